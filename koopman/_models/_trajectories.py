"""Read trajectories as users have them: runs, clocks, units, missing rows and gaps."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from dissociation._core.checks import check_positive, fail, fail_kind, warn
from dissociation._core.columns import Reading
from dissociation._core.frames import (
    TabulatedRun,
    checked_names,
    has_even_steps,
    is_table,
    rising_times,
    state_labels,
    tabulated_runs,
)
from dissociation._core.validation import validated
from koopman._operators import _pairs

_GAP = 1.5
"""Steps between rows, in median steps, from which on there is a gap."""
_DAY = 86400e9
"""Nanoseconds."""
_TOLERANCE = 1e-3
"""Relative difference up to which runs have the same time step."""


class Trajectories(NamedTuple):
    """Runs of one system on the host.

    Attributes:
        runs: States of every run, or of every piece of a run: [time, d].
        times: Times of the states, [time]; dates in days since 1970. Row numbers without a clock.
        inputs: Inputs at the same times, [time, m], or None.
        run_of_piece: Index of the run to which a piece belongs.
        labels: Labels of the runs.
        columns: Labels of the states.
        input_columns: Labels of the inputs.
        state_shape: Shape of one state.
        time_step: Time between rows.
        unit: Unit of time.
        has_dates: True if times are dates.
        is_series: True if states were numbers, not rows.
    """

    runs: list[Float[np.ndarray, "_ d"]]
    times: list[Float[np.ndarray, " _"]]
    inputs: list[Float[np.ndarray, "_ m"]] | None
    run_of_piece: list[int]
    labels: tuple[Any, ...]
    columns: tuple[Any, ...]
    input_columns: tuple[Any, ...]
    state_shape: tuple[int, ...]
    time_step: float
    unit: str
    has_dates: bool


class _Clocks(NamedTuple):
    """Times of all runs, with their unit and how they were read."""

    times: list[Float[np.ndarray, " _"]]
    unit: str
    has_dates: bool
    is_counted: bool
    runs: list[TabulatedRun | None]


def read_trajectories(
    trajectories: Any,
    reading: Reading,
    *,
    trajectory_axis: int | None = None,
    inputs: Any = None,
    time_step: float | None = None,
) -> Trajectories:
    """Return the runs of frames or arrays, in order of time, uncut.

    Args:
        trajectories: Trajectories in the forms of `lagged_pairs`.
        reading: Names of times, runs and states.
        trajectory_axis: Axis of trajectories in an array.
        inputs: Arrays of inputs, or names of columns.
        time_step: Time between rows, if it is not read from a clock.
    """
    listed = list(trajectories) if isinstance(trajectories, list | tuple) else [trajectories]
    is_framed = any(map(is_table, listed))
    input_names = _names_of_inputs(inputs) if is_framed else ()
    if is_framed:
        reading = checked_names(reading)
        tabulated = _tabulated(trajectories, reading, input_names)
        states = [run.states for run in tabulated]
        columns = _labels_of_states(listed[0], reading, input_names)
    else:
        if inputs is not None and isinstance(inputs, str):
            fail("inputs", "be arrays, as `trajectories` are", repr(inputs))
        states = _arrays(trajectories, trajectory_axis, reading)
        tabulated = [None] * len(states)
        columns = ()
    states = [np.asarray(array) for array in states]
    state_shape = states[0].shape[1:]
    for array in states:
        if array.shape[1:] != state_shape:
            fail("trajectories", f"have states of shape {state_shape}", array.shape[1:])
    if not columns or len(columns) != int(np.prod(state_shape)):
        columns = tuple(range(int(np.prod(state_shape))))

    input_arrays = None
    if input_names:
        input_arrays = [
            run.states for run in _tabulated(trajectories, reading, (), columns=input_names)
        ]
    elif inputs is not None:
        input_arrays = _input_arrays(inputs, states, trajectory_axis)
        input_names = tuple(range(input_arrays[0].shape[1]))
    clocks = _clocks(tabulated, states)
    step = _step_of(clocks, time_step)
    unit = clocks.unit
    if time_step is not None and clocks.is_counted:
        unit = "time"
    labels = [_plain(getattr(run, "label", None)) for run in tabulated]
    if None in labels or len(set(labels)) < len(labels):
        labels = list(range(len(labels)))
    return Trajectories(
        runs=[array.reshape(len(array), -1).astype(float) for array in states],
        times=_times(clocks, step),
        inputs=input_arrays,
        run_of_piece=list(range(len(states))),
        labels=tuple(labels),
        columns=tuple(map(_plain, columns)),
        input_columns=tuple(map(_plain, input_names)),
        state_shape=state_shape if len(state_shape) > 1 else (),
        time_step=step,
        unit=unit,
        has_dates=clocks.has_dates,
    )


def _plain(label: Any) -> Any:
    """Return a label as a number or text of Python."""
    return label.item() if isinstance(label, np.generic) else label


def _names_of_inputs(inputs: Any) -> tuple[Any, ...]:
    """Return the names of columns that are inputs; none if inputs are arrays."""
    if inputs is None:
        return ()
    if isinstance(inputs, str):
        return (inputs,)
    is_listed = isinstance(inputs, list | tuple) and len(inputs) > 0
    if is_listed and not any(map(np.ndim, inputs)):
        return tuple(inputs)
    return ()


def _labels_of_states(table: Any, reading: Reading, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the labels of states, or of a series its name."""
    if hasattr(table, "iloc") and not hasattr(table, "columns"):
        return (0 if table.name is None else table.name,)
    if not is_table(table):
        return ()
    return tuple(label for label in state_labels(table, reading) if label not in inputs)


def _tabulated(
    trajectories: Any, reading: Reading, inputs: tuple[Any, ...], columns: Any = None
) -> list[TabulatedRun]:
    """Return the runs of one frame or of a list of frames, without the columns `inputs`."""
    is_listed = isinstance(trajectories, list | tuple)
    tables = list(trajectories) if is_listed else [trajectories]
    if columns is not None:
        reading = reading._replace(columns=list(columns))
    runs = []
    for index, table in enumerate(tables):
        name = f"trajectories[{index}]" if is_listed else "trajectories"
        if not is_table(table):
            fail_kind(name, "be a frame, as the others are", type(table).__name__)
        missing = [label for label in inputs if label not in getattr(table, "columns", ())]
        if missing:
            labels = list(getattr(table, "columns", ()))
            fail("inputs", f"be columns of `{name}`, of {labels}, or arrays", missing)
        if inputs and reading.columns is None:
            table = table.drop(columns=list(inputs))
        runs += tabulated_runs(name, table, reading, is_listed)
    if not runs:
        fail("trajectories", "not be empty", "no rows")
    reshaped = []
    for run in runs:
        if run.states.ndim == 1:
            run = run._replace(states=run.states[:, None])
        if run.states.dtype.kind == "c":
            fail_kind(
                run.name,
                "hold real numbers",
                "complex states",
                "Pass real and imaginary parts as two columns",
            )
        reshaped.append(run)
    return reshaped


@validated(empty=("trajectories",))
def _read_arrays(trajectories: _pairs.Trajectories) -> Any:
    """Return converted arrays, one or a list."""
    return trajectories


def _arrays(trajectories: Any, trajectory_axis: int | None, reading: Reading) -> list[np.ndarray]:
    """Return trajectories that are no frames as a list of arrays."""
    for argument in ("time", "run", "columns"):
        label = getattr(reading, argument)
        if label is not None:
            fail(argument, "be None unless `trajectories` is a frame", repr(label))
    if getattr(getattr(trajectories, "dtype", None), "kind", "") == "O":
        fail_kind(
            "trajectories",
            "hold numbers",
            "an array of objects",
            "Pass a list of arrays [time, states], one per run",
        )
    arrays = _read_arrays(trajectories)
    if isinstance(arrays, list):
        if trajectory_axis is not None:
            fail("trajectory_axis", "be None for a list of trajectories", trajectory_axis)
    else:
        arrays = list(np.asarray(_pairs.one_stack("trajectories", arrays, trajectory_axis)))
    states = []
    for index, array in enumerate(arrays):
        array = np.asarray(array)
        if array.ndim == 0:
            fail(f"trajectories[{index}]", "have a time axis", "shape ()")
        states.append(array[:, None] if array.ndim == 1 else array)
    return states


def _input_arrays(
    inputs: Any, states: list[np.ndarray], trajectory_axis: int | None
) -> list[Float[np.ndarray, "_ m"]]:
    """Return inputs [time, m] of every run."""
    if isinstance(inputs, list | tuple):
        arrays = [np.asarray(array, float) for array in inputs]
        if len(states) == 1 and arrays and arrays[0].ndim < 2 and len(arrays) != 1:
            arrays = [np.asarray(inputs, float)]
    else:
        array = np.asarray(inputs, float)
        arrays = (
            [array] if trajectory_axis is None else list(np.moveaxis(array, trajectory_axis, 0))
        )
    if len(arrays) != len(states):
        advice = "Pass a list with one array [time, inputs] per run"
        fail("inputs", f"have one array per run ({len(states)})", len(arrays), advice)
    shaped = []
    for index, (array, run) in enumerate(zip(arrays, states, strict=True)):
        if array.ndim == 1:
            array = array[:, None]
        if array.ndim != 2 or len(array) != len(run):
            fail(
                f"inputs[{index}]" if len(states) > 1 else "inputs",
                f"have shape [time, inputs] with the {len(run)} times of the states",
                f"shape {array.shape}",
                "u_t acts from t to t + 1; repeat the last one for the last state",
            )
        shaped.append(array)
    if len({array.shape[1] for array in shaped}) > 1:
        fail("inputs", "have as many columns in every run", [a.shape[1] for a in shaped])
    return shaped


def _clocks(tabulated: list[Any], states: list[np.ndarray]) -> _Clocks:
    """Return the times of runs, dates in days."""
    times = []
    unit = "step"
    has_dates = False
    is_counted = True
    for run, array in zip(tabulated, states, strict=True):
        if run is None or run.times is None:
            times.append(np.arange(len(array), dtype=float))
            continue
        index, numbers = rising_times(run)
        if hasattr(index, "asi8"):
            nanoseconds = np.asarray(index).astype(f"{np.asarray(index).dtype.kind}8[ns]")
            times.append(nanoseconds.astype(np.int64) / _DAY)
            has_dates = np.asarray(index).dtype.kind == "M"
            unit = "day"
            is_counted = False
            continue
        times.append(numbers.astype(float))
        if index.name is not None:
            unit = str(index.name)
            is_counted = False
        elif not np.array_equal(numbers, np.arange(len(numbers))):
            unit = "time"
            is_counted = False
    return _Clocks(times, unit, has_dates, is_counted, tabulated)


def _step_of(clocks: _Clocks, time_step: float | None) -> float:
    """Return the median step of the clock, or `time_step` without one."""
    if time_step is not None:
        check_positive("time_step", time_step)
    if clocks.is_counted:
        return 1.0 if time_step is None else float(time_step)
    steps = np.concatenate([np.diff(times) for times in clocks.times])
    if not len(steps):
        fail("trajectories", "hold runs of two rows or more", "single rows")
    step = float(np.median(steps))
    if time_step is not None and abs(step - time_step) > _TOLERANCE * step:
        fail(
            "time_step",
            f"be None, or that of the clock ({step:.6g} {clocks.unit})",
            time_step,
        )
    return step


def _times(clocks: _Clocks, step: float) -> list[Float[np.ndarray, " _"]]:
    """Return times; those that count rows in units of the time step."""
    if clocks.is_counted:
        return [times * step for times in clocks.times]
    return clocks.times


class _Cuts(NamedTuple):
    """Numbers of what split runs into pieces."""

    num_missing: int
    num_gaps: int
    num_short: int


def cut_at_gaps(
    trajectories: Trajectories,
    min_rows: int,
    advice: str = "Take fewer delays or a shorter lag",
) -> Trajectories:
    """Return the pieces of runs between missing rows and gaps of the clock.

    Args:
        trajectories: Runs.
        min_rows: Number of rows below which a piece is left out.
        advice: What to do if all pieces are shorter.

    Warns:
        UserWarning: If there are missing rows or gaps, or pieces are left out.

    Raises:
        ValueError: If steps are uneven, or no piece has `min_rows` rows.
    """
    pieces = []
    num_missing = 0
    num_gaps = 0
    longest = 0
    for index, (states, times) in enumerate(
        zip(trajectories.runs, trajectories.times, strict=True)
    ):
        columns = [states]
        if trajectories.inputs is not None:
            columns.append(trajectories.inputs[index])
        is_complete = np.all(np.isfinite(np.concatenate(columns, 1)), 1)
        _refuse_infinite(states, index)
        is_gap = np.diff(times) > _GAP * trajectories.time_step
        _check_even(times, is_gap, trajectories, index)
        num_missing += int((~is_complete).sum())
        num_gaps += int(is_gap.sum())
        for rows in _pieces(is_complete, is_gap):
            longest = max(longest, len(rows))
            pieces.append((index, rows))
    long_pieces = [piece for piece in pieces if len(piece[1]) >= min_rows]
    if not long_pieces:
        fail(
            "trajectories",
            f"have {min_rows} rows or more in a run without gaps",
            f"{longest} at most",
            advice,
        )
    cuts = _Cuts(num_missing, num_gaps, len(pieces) - len(long_pieces))
    _warn_cuts(cuts, len(pieces), min_rows)
    inputs = trajectories.inputs
    if inputs is not None:
        inputs = [inputs[index][rows] for index, rows in long_pieces]
    return trajectories._replace(
        runs=[trajectories.runs[index][rows] for index, rows in long_pieces],
        times=[trajectories.times[index][rows] for index, rows in long_pieces],
        inputs=inputs,
        run_of_piece=[trajectories.run_of_piece[index] for index, _ in long_pieces],
    )


def _refuse_infinite(states: Float[np.ndarray, "n d"], index: int) -> None:
    if np.isinf(states).any():
        position = tuple(np.argwhere(np.isinf(states))[0].tolist())
        fail(f"trajectories[{index}]", "be finite, or NaN where missing", f"inf at {position}")


def _pieces(is_complete: Bool[np.ndarray, " n"], is_gap: Bool[np.ndarray, " gaps"]) -> list[range]:
    """Return the row numbers of each piece of a run, a range."""
    rows = np.flatnonzero(is_complete)
    is_cut = np.diff(rows) > 1
    is_cut |= is_gap[rows[1:] - 1]
    pieces = np.split(rows, np.flatnonzero(is_cut) + 1)
    ranges = []
    for piece in pieces:
        if len(piece):
            ranges.append(range(piece[0], piece[-1] + 1))
    return ranges


def _check_even(
    times: Float[np.ndarray, " n"],
    is_gap: Bool[np.ndarray, " gaps"],
    trajectories: Trajectories,
    index: int,
) -> None:
    """Raise unless a run has the common step between its gaps."""
    step = trajectories.time_step
    errors = np.abs(np.diff(times) - step)[~is_gap]
    # Steps of a calendar, such as months, differ by a tenth.
    is_uneven = errors.size and errors.max() > 0.1 * step
    for piece in np.split(times, np.flatnonzero(is_gap) + 1):
        if len(piece) > 2 and not is_uneven:
            is_uneven = not has_even_steps(piece, piece) and not trajectories.has_dates
    if is_uneven:
        smallest = np.diff(times).min()
        label = trajectories.labels[trajectories.run_of_piece[index]]
        fail(
            "trajectories",
            f"have one time step in all runs, apart from gaps ({step:.4g} {trajectories.unit})",
            f"steps from {smallest:.4g} to {np.diff(times)[~is_gap].max():.4g} in run {label!r}",
            "For uneven times use koopman.fit_exponentials, or resample",
        )


def _warn_cuts(cuts: _Cuts, num_pieces: int, min_rows: int) -> None:
    """Warn once of missing rows, gaps and short pieces."""
    words = []
    if cuts.num_missing or cuts.num_gaps:
        words.append(
            f"split runs at {cuts.num_missing} rows with missing values and {cuts.num_gaps} gaps"
        )
    if cuts.num_short:
        words.append(
            f"left out {cuts.num_short} of {num_pieces} pieces that have fewer than {min_rows} rows"
        )
    if words:
        sentence = ", and ".join(words)
        warn(f"{sentence[0].upper()}{sentence[1:]}.", UserWarning)


def drop_missing(trajectories: Trajectories) -> Trajectories:
    """Return runs without the rows that have missing values, and warn of them."""
    runs = []
    times = []
    num_missing = 0
    for index, states in enumerate(trajectories.runs):
        _refuse_infinite(states, index)
        is_complete = np.isfinite(states).all(1)
        num_missing += int((~is_complete).sum())
        runs.append(states[is_complete])
        times.append(trajectories.times[index][is_complete])
    if num_missing:
        warn(f"Left out {num_missing} rows with missing values.", UserWarning)
    return trajectories._replace(runs=runs, times=times)


def as_dates(times: np.ndarray, has_dates: bool) -> np.ndarray:
    """Return times in days as dates, if the clock has dates."""
    if not has_dates:
        return times
    return np.round(times * _DAY).astype(np.int64).astype("datetime64[ns]")


def check_columns(trajectories: Trajectories, fitted: tuple[Any, ...]) -> None:
    """Raise unless columns are those of a fit; columns of arrays have no labels."""
    columns = trajectories.columns
    is_labelled = columns != tuple(range(len(columns)))
    if len(columns) != len(fitted) or (is_labelled and columns != fitted):
        words = f"{len(columns)} columns, {list(columns)[:9]}"
        fail("trajectories", f"have the {len(fitted)} columns of the fit", words)
