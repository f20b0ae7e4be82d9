"""Read trajectories as users have them: runs, clocks, units, missing rows and gaps."""

from typing import Any, NamedTuple

import numpy as np

from dissociation._core.checks import check_positive, fail, fail_kind, warn
from dissociation._core.columns import Reading, are_even
from dissociation._core.frames import (
    TabulatedRun,
    check_unnamed,
    checked_names,
    common_labels,
    is_table,
    rising_times,
    tabulated_runs,
)
from dissociation._core.validation import validated
from koopman._operators import _pairs

_GAP = 1.5
"""Steps between rows, in median steps, from which on there is a gap."""
_FEW_STEPS = 4
"""Number of steps of a run below which long ones are gaps."""
_DAY = 86400e9
"""Nanoseconds."""
_TOLERANCE = 1e-3
"""Relative difference up to which runs have the same time step."""


class Trajectories(NamedTuple):
    """Runs of one system on the host.

    Attributes:
        runs: States of every run, or of every piece of a run: [time, d].
        times: Times of the states, [time]; dates in days since 1970. Row numbers without a clock.
        inputs: Inputs at the same times, [time, m]; m = 0 without inputs.
        run_of_piece: Index of the run to which a piece belongs.
        state_shape: Shape of one state.
        columns: Labels of the states.
        input_columns: Labels of the inputs.
        labels: Labels of the runs.
        time_step: Time between rows.
        unit: Unit of time.
        has_dates: True if times are dates.
    """

    runs: list[np.ndarray]
    times: list[np.ndarray]
    inputs: list[np.ndarray]
    run_of_piece: list[int]
    state_shape: tuple[int, ...]
    columns: tuple[Any, ...]
    input_columns: tuple[Any, ...]
    labels: tuple[Any, ...]
    time_step: float
    unit: str
    has_dates: bool


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
    is_listed = isinstance(trajectories, list | tuple)
    tables = list(trajectories) if is_listed else [trajectories]
    columns = ()
    input_columns = ()
    input_values: Any = inputs
    if any(map(is_table, tables)):
        reading = checked_names(reading)
        if isinstance(inputs, str):
            input_columns = (inputs,)
        elif isinstance(inputs, list | tuple) and not any(map(np.ndim, inputs)):
            input_columns = tuple(inputs)
        columns = _labels_of_states(tables, reading, input_columns)
        tabulated, input_arrays = _tabulated(tables, reading, input_columns, is_listed)
    else:
        check_unnamed("trajectories", trajectories, reading)
        arrays = _listed("trajectories", _read_arrays(trajectories), trajectory_axis)
        tabulated = [TabulatedRun("trajectories", None, array, None, str) for array in arrays]
        input_arrays = []
    states = _states_of(tabulated)
    if inputs is None:
        input_arrays = [np.zeros((len(array), 0)) for array in states]
    elif not input_columns:
        input_arrays = _listed("inputs", _read_inputs(input_values), trajectory_axis)
        _check_inputs(input_arrays, states)
        input_columns = range(input_arrays[0].shape[1])
    state_shape = states[0].shape[1:]
    width = int(np.prod(state_shape))
    if len(columns) != width:
        columns = range(width)
    labels = [_plain(run.label) for run in tabulated]
    if None in labels or len(set(labels)) < len(labels):
        labels = range(len(labels))
    times, unit, has_dates = _clock(tabulated)
    step = _step_of(times, unit, time_step)
    if unit is None:
        times = [array * step for array in times]
        unit = "step" if time_step is None else "time"
    return Trajectories(
        runs=[array.reshape(len(array), width).astype(float, copy=False) for array in states],
        times=times,
        inputs=[array.astype(float) for array in input_arrays],
        run_of_piece=list(range(len(states))),
        labels=tuple(labels),
        columns=tuple(map(_plain, columns)),
        input_columns=tuple(map(_plain, input_columns)),
        state_shape=state_shape,
        time_step=step,
        unit=unit,
        has_dates=has_dates,
    )


def _plain(label: Any) -> Any:
    """Return a label as a number or text of Python."""
    return label.item() if isinstance(label, np.generic) else label


def _labels_of_states(tables: list[Any], reading: Reading, inputs: tuple[Any, ...]) -> Any:
    """Return the labels of states, or of a series its name; empty without labels."""
    labels = [
        label for label in common_labels("trajectories", tables, reading) if label not in inputs
    ]
    name = getattr(tables[0], "name", None)
    if labels or name is None:
        return labels
    return [name]


def _tabulated(
    tables: list[Any], reading: Reading, inputs: tuple[Any, ...], is_listed: bool
) -> tuple[list[TabulatedRun], list[np.ndarray]]:
    """Return the runs of frames without the columns `inputs`, and the inputs of every run."""
    runs = []
    input_arrays = []
    for index, table in enumerate(tables):
        name = f"trajectories[{index}]" if is_listed else "trajectories"
        if not is_table(table):
            fail_kind(name, "be a frame, as the others are", type(table).__name__)
        if inputs:
            columns = list(getattr(table, "columns", ()))
            missing = [label for label in inputs if label not in columns]
            if missing:
                fail("inputs", f"be columns of `{name}`, of {columns}, or arrays", missing)
            input_reading = reading._replace(columns=list(inputs))
            for run in tabulated_runs(name, table, input_reading, is_listed):
                input_arrays.append(run.states)
            if reading.columns is None:
                table = table.drop(columns=list(inputs))
        runs += tabulated_runs(name, table, reading, is_listed)
    if not runs:
        fail("trajectories", "not be empty", "no rows")
    return runs, input_arrays


@validated(empty=("trajectories",))
def _read_arrays(trajectories: _pairs.Trajectories) -> Any:
    """Return converted arrays, one or a list."""
    return trajectories


@validated(empty=("inputs",))
def _read_inputs(inputs: _pairs.Trajectories) -> Any:
    """Return converted arrays, one or a list."""
    return inputs


def _listed(name: str, arrays: Any, trajectory_axis: int | None) -> list[np.ndarray]:
    """Return a list of arrays with a time axis and an axis of states or more."""
    if not isinstance(arrays, list):
        arrays = _pairs.one_stack(name, arrays, trajectory_axis)
    elif name == "trajectories" and trajectory_axis is not None:
        fail("trajectory_axis", "be None for a list of trajectories", trajectory_axis)
    listed = []
    for index, array in enumerate(map(np.asarray, arrays)):
        if array.ndim == 0:
            fail(f"{name}[{index}]", "have a time axis", "shape ()")
        listed.append(array[:, None] if array.ndim == 1 else array)
    return listed


def _states_of(runs: list[TabulatedRun]) -> list[np.ndarray]:
    """Return the states of runs, or raise unless they are real and of one shape."""
    states = []
    for run in runs:
        array = run.states[:, None] if run.states.ndim == 1 else run.states
        if array.dtype.kind == "c":
            advice = "Pass real and imaginary parts as two columns"
            fail_kind(run.name, "hold real numbers", "complex states", advice)
        states.append(array)
        shape = states[0].shape[1:]
        if array.shape[1:] != shape:
            fail("trajectories", f"have states of shape {shape}", array.shape[1:])
    return states


def _check_inputs(inputs: list[np.ndarray], states: list[np.ndarray]) -> None:
    """Raise unless every run has inputs [time, m] at its times."""
    if len(inputs) != len(states):
        advice = "Pass a list with one array [time, inputs] per run"
        fail("inputs", f"have one array per run ({len(states)})", len(inputs), advice)
    num_columns = inputs[0].shape[-1]
    for index, array in enumerate(inputs):
        shape = (len(states[index]), num_columns)
        if array.shape != shape:
            fail(
                "inputs",
                f"have shape [time, inputs] with the {shape[0]} times of run {index}, and as many "
                "columns in every run",
                f"shape {array.shape}",
                "u_t acts from t to t + 1; repeat the last one for the last state",
            )


def _clock(runs: list[TabulatedRun]) -> tuple[list[np.ndarray], str | None, bool]:
    """Return the times of runs, dates in days, their unit, and True for dates.

    Without a clock times are row numbers, and the unit is None.
    """
    times = []
    unit = None
    has_dates = False
    for run in runs:
        rows = np.arange(len(run.states))
        if run.times is None:
            times.append(rows.astype(float))
            continue
        index, numbers = rising_times(run)
        name = index.name
        if hasattr(index, "asi8"):
            if getattr(index, "tz", None) is not None:
                index = index.tz_convert(None)  # to UTC
            kind = np.asarray(index).dtype.kind
            numbers = np.asarray(index).astype(f"{kind}8[ns]").astype(np.int64) / _DAY
            has_dates = kind == "M"
            name = "day"
        elif name is None and not np.array_equal(numbers, rows):
            name = "time"
        times.append(numbers.astype(float))
        if name is not None:
            unit = str(name)
    return times, unit, has_dates


def _step_of(times: list[np.ndarray], unit: str | None, time_step: float | None) -> float:
    """Return the mean step of the clock between gaps, or `time_step`."""
    if time_step is not None:
        check_positive("time_step", time_step)
    if unit is None:
        return float(time_step or 1.0)
    steps = np.concatenate(list(map(np.diff, times)))
    if not len(steps):
        fail("trajectories", "hold runs of two rows or more", "single rows")
    # Each step of a clock that is rounded may be off by as much as its rounding, their mean is not.
    step = float(np.mean(steps[steps <= _GAP * np.median(steps)]))
    if time_step is None:
        return step
    if abs(step - time_step) > _TOLERANCE * step:
        fail("time_step", f"be None, or that of the clock ({step:.6g} {unit})", time_step)
    return float(time_step)


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
    for index, states in enumerate(trajectories.runs):
        is_complete = _complete(states, index) & np.isfinite(trajectories.inputs[index]).all(1)
        is_gap = np.diff(trajectories.times[index]) > _GAP * trajectories.time_step
        _check_even(trajectories, index, is_gap)
        num_missing += int((~is_complete).sum())
        num_gaps += int(is_gap.sum())
        rows = np.flatnonzero(is_complete)
        is_cut = (np.diff(rows) > 1) | is_gap[rows[1:] - 1]
        for piece in np.split(rows, np.flatnonzero(is_cut) + 1):
            if len(piece):
                pieces.append((index, range(piece[0], piece[-1] + 1)))
    lengths = [len(rows) for _, rows in pieces]
    longest = max(lengths, default=0)
    if longest < min_rows:
        requirement = f"have {min_rows} rows or more in a run without gaps"
        fail("trajectories", requirement, f"{longest} at most", advice)
    long_pieces = [piece for piece in pieces if len(piece[1]) >= min_rows]
    num_short = len(pieces) - len(long_pieces)
    words = []
    if num_missing or num_gaps:
        words.append(f"split runs at {num_missing} rows with missing values and {num_gaps} gaps")
    if num_short:
        words.append(
            f"left out {num_short} of {len(pieces)} pieces that have fewer than {min_rows} rows"
        )
    if words:
        sentence = ", and ".join(words)
        warn(f"{sentence[0].upper()}{sentence[1:]}.", UserWarning)

    def cut(arrays: Any) -> list[np.ndarray]:
        return [arrays[index][rows.start : rows.stop] for index, rows in long_pieces]

    return trajectories._replace(
        runs=cut(trajectories.runs),
        times=cut(trajectories.times),
        inputs=cut(trajectories.inputs),
        run_of_piece=[index for index, _ in long_pieces],
    )


def _complete(states: np.ndarray, index: int) -> Any:
    """Return True for rows without NaN; raise for infinite values."""
    # Rows of images have many columns: no copies of their size.
    extremes = np.stack([np.fmin.reduce(states, 1), np.fmax.reduce(states, 1)])
    if np.isinf(extremes).any():
        position = tuple(np.argwhere(np.isinf(states))[0].tolist())
        fail(f"trajectories[{index}]", "be finite, or NaN where missing", f"inf at {position}")
    return ~np.isnan(states.max(1))


def _check_even(trajectories: Trajectories, index: int, is_gap: np.ndarray) -> None:
    """Raise unless a run has the common step between its gaps."""
    step = trajectories.time_step
    times = trajectories.times[index]
    steps = np.diff(times)
    # Not a run with gaps, but one with longer steps.
    if len(steps) < _FEW_STEPS or np.median(steps) <= _GAP * step:
        steps = steps[~is_gap]
    # Steps of a calendar, such as months, differ by a tenth.
    is_even = np.abs(steps - step).max(initial=0.0) <= 0.1 * step
    if is_even and not trajectories.has_dates:
        pieces = np.split(times, np.flatnonzero(is_gap) + 1)
        is_even = all(are_even(piece) for piece in pieces if len(piece) > 2)
    if not is_even:
        fail(
            "trajectories",
            f"have one time step in all runs, apart from gaps ({step:.4g} {trajectories.unit})",
            f"steps from {steps.min():.4g} to {steps.max():.4g} in run "
            f"{trajectories.labels[index]!r}",
            "For uneven times use koopman.fit_exponentials, or resample",
        )


def drop_missing(trajectories: Trajectories) -> Trajectories:
    """Return runs without the rows that have missing values, and warn of them."""
    runs = []
    times = []
    for index, states in enumerate(trajectories.runs):
        is_complete = _complete(states, index)
        runs.append(states[is_complete])
        times.append(trajectories.times[index][is_complete])
    num_missing = sum(map(len, trajectories.runs)) - sum(map(len, runs))
    if num_missing:
        warn(f"Left out {num_missing} rows with missing values.", UserWarning)
    return trajectories._replace(runs=runs, times=times)


def as_dates(times: np.ndarray, has_dates: bool) -> np.ndarray:
    """Return times in days as dates, if the clock has dates."""
    if not has_dates:
        return times
    # Days are known to some tenths of a microsecond.
    microseconds = np.round(times * (_DAY / 1000))
    return microseconds.astype("datetime64[us]").astype("datetime64[ns]")


def check_columns(trajectories: Trajectories, fitted: tuple[Any, ...]) -> None:
    """Raise unless columns are those of a fit; columns of arrays have no labels."""
    columns = trajectories.columns
    is_labelled = columns != tuple(range(len(columns)))
    if len(columns) != len(fitted) or (is_labelled and columns != fitted):
        words = f"{len(columns)} columns, {list(columns)[:9]}"
        fail("trajectories", f"have the {len(fitted)} columns of the fit", words)
