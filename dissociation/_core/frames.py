"""Convert frames of pandas and arrays of xarray to trajectories."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from dissociation._core.checks import fail, fail_kind
from dissociation._core.columns import (
    Reading,
    advice_on,
    advice_on_restarts,
    are_even,
    doubts_of,
    is_text,
    labels_of,
)

_ROWS = "frame.reset_index(drop=True) counts rows as steps"


class TabulatedRun(NamedTuple):
    """States of one run of a frame, in the order of time."""

    name: str
    """Words for the run in messages."""
    label: Any
    """Label of the run, or None."""
    states: np.ndarray
    """[time, ...]."""
    times: Any
    """Index of times, or None."""
    restarts: Callable[[], str]
    """Function that returns advice for times that do not increase."""
    clock: Any = None
    """Name of the times, if the call gives it."""
    without: str = "frame.reset_index(drop=True)"
    """Words for the table without times."""


def as_trajectories(name: str, value: Any, reading: Reading, *, is_single: bool) -> Any:
    """Return frames as arrays in order of time, one per run; other values unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fail_kind(
            name, "be trajectories", f"{type(value).__name__}, in which they are cut into pairs"
        )
    is_list = isinstance(value, (list, tuple))
    tables = list(value) if is_list else [value]
    reading = checked_names(reading)
    if not any(map(is_table, tables)):
        check_unnamed(name, value, reading)
        return value
    common_labels(name, tables, reading)
    runs = _even_runs(name, tables, reading, is_list)
    if is_list:
        return runs
    if is_single and len(runs) > 1:
        fail(name, "be one trajectory", f"{len(runs)} runs", "Pass one at a time, frame.loc[[run]]")
    num_levels = getattr(getattr(value, "index", None), "nlevels", 1)
    is_split = len(runs) > 1 or reading.run is not None or num_levels > 1
    return runs if is_split and not is_single else runs[0]


def check_unnamed(name: str, value: Any, reading: Reading) -> None:
    """Raise if the reading of a value that is no frame has names."""
    advice = ""
    if hasattr(value, "to_pandas"):
        advice = "Pass frame.to_pandas()"
    for argument in ("time", "run", "columns"):
        label = getattr(reading, argument)
        if label is not None:
            fail(argument, f"be None unless `{name}` is a frame of pandas", repr(label), advice)


def common_labels(name: str, tables: list[Any], reading: Reading) -> tuple[Any, ...]:
    """Return the labels of the states of all tables, empty without labels."""
    orders = dict.fromkeys(state_labels(table, reading) for table in tables)
    orders.pop((), None)  # of tables without labels
    if len(orders) > 1:
        words = " and ".join(str(list(order)) for order in orders)
        fail(name, "hold frames of the same columns in one order", words)
    return next(iter(orders), ())


def _even_runs(name: str, tables: list[Any], reading: Reading, is_list: bool) -> list[Any]:
    """Return the states of all runs, or raise unless they have one even step."""
    runs = []
    time_steps = []
    for i, table in enumerate(tables):
        if not is_table(table):
            runs.append(table)
            continue
        label = f"{name}[{i}]" if is_list else name
        for run in tabulated_runs(label, table, reading, is_list):
            if run.times is not None:
                _check_steps(run, time_steps)
            runs.append(run.states)
    _check_one_step(name, time_steps)
    return runs


def checked_names(reading: Reading) -> Reading:
    """Return the reading, or raise unless it has names."""
    for argument in ("time", "run", "columns"):
        labels = getattr(reading, argument)
        if argument == "time" or not isinstance(labels, list | tuple):
            labels = [labels]
        for label in labels:
            if hasattr(label, "shape") or isinstance(label, dict | list | set):
                target = "a column, an index level or a dimension"
                if argument == "columns":
                    target = "columns"
                fail_kind(
                    argument,
                    f"name {target}",
                    f"an object of type {type(label).__name__}",
                    "Add it to the frame as a column",
                )
        if not labels:
            fail(argument, "name at least one column", "none")
    if isinstance(reading.columns, str):
        return reading._replace(columns=[reading.columns])
    return reading


def _check_one_step(name: str, time_steps: list[Any]) -> None:
    """Raise unless all runs have one time step."""
    for kind, step, spread in time_steps:
        first_kind, first_step, first_spread = time_steps[0]
        # Mean steps of two trajectories may differ as much as the steps within one.
        tolerance = max(spread, first_spread) + 1e-6 * max(step, first_step)
        if kind == first_kind and abs(step - first_step) > tolerance:
            unit = " s" if kind == "dates" else ""
            fail(
                name,
                "have one time step",
                f"{first_step:.6g}{unit} and {step:.6g}{unit}",
                f"Resample them; {_ROWS}",
            )


def is_table(value: Any) -> bool:
    """Return True for frames and Series of pandas and for arrays of xarray."""
    return hasattr(value, "iloc") or (hasattr(value, "dims") and hasattr(value, "ndim"))


def state_labels(table: Any, reading: Reading) -> tuple[Any, ...]:
    """Return the labels of a table's states; empty without labels."""
    named = (reading.time, *reading.runs)
    if is_table(table) and hasattr(table, "dims"):
        named = ("time", *named)
        dims = [dim for dim in table.dims if dim in table.indexes and dim not in named]
        labels = [tuple(table.indexes[dim]) for dim in dims]
        if len(labels) == 1:
            return labels[0]
        return tuple(labels)
    if reading.columns is not None:
        return tuple(reading.columns)
    return tuple(label for label in getattr(table, "columns", ()) if label not in named)


def tabulated_runs(name: str, table: Any, reading: Reading, is_listed: bool) -> list[TabulatedRun]:
    """Return the runs of a frame or of an array of xarray, by their first rows."""
    if hasattr(table, "dims"):
        return _runs_of_dimensions(name, table, reading, is_listed)
    return _runs_of_rows(name, table, reading)


def _runs_of_rows(name: str, table: Any, reading: Reading) -> list[TabulatedRun]:
    """Return the runs of a frame, with states [time, states]."""
    is_series = not hasattr(table, "columns")
    if is_series:
        table = table.to_frame()
    _check_named(name, table, reading)
    runs, time = _runs_and_time(name, table, reading)
    codes = [run.factorize()[0] for run in runs] or [np.zeros(len(table), int)]
    if any((code < 0).any() for code in codes):
        fail("run", f"have a label in every row of `{name}`", "missing ones")
    _, first, run_of_row = np.unique(
        np.stack(codes, 1), axis=0, return_index=True, return_inverse=True
    )
    run_of_row = run_of_row.reshape(-1)
    values = _numbers(name, table, reading, run_of_row if runs else None)

    tabulated = []
    for run in np.argsort(first):
        rows = np.flatnonzero(run_of_row == run)
        label = runs[0][rows[0]] if runs else None
        words = f"{name}[{str(label)!r}]" if runs else name
        times = None
        if time is not None:
            if reading.time is not None:
                order = np.asarray(time[rows].argsort(kind="stable"))
                rows = rows[order]
            times = time[rows]
        states = values[rows, 0] if is_series else values[rows]
        restarts = partial(advice_on_restarts, table, reading)
        tabulated.append(TabulatedRun(words, label, states, times, restarts, reading.time))
    return tabulated


def _runs_and_time(name: str, table: Any, reading: Reading) -> tuple[list[Any], Any]:
    """Return the labels of runs, one index per name, and the times, or None if rows have none."""
    runs = [labels_of(table, run) for run in reading.runs]
    time = None
    if reading.time is not None:
        time = labels_of(table, reading.time)
        if getattr(time, "hasnans", False):
            requirement = f"have a time in every row of {reading.time!r}"
            fail(name, requirement, "missing ones", "Drop these rows")

    # Levels of the index that the call does not name replace missing runs and times.
    named = (reading.time, *reading.runs)
    index = table.index
    levels = [i for i, level in enumerate(index.names) if level is None or level not in named]
    num_missing = (time is None) + (not runs)
    if index.nlevels > 1 and levels and num_missing:
        if len(levels) != num_missing:
            advice = "Use lagged_pairs(frame, time=..., run=...)"
            if reading.takes_names:
                advice = "Pass time= and run="
            requirement = "have an index of two levels, run and time"
            fail(name, requirement, f"levels {list(index.names)}", advice)
        if not runs:
            runs = [index.get_level_values(levels[0])]
        if time is None:
            time = index.get_level_values(levels[-1])
    elif levels and time is None and not (reading.runs and _counts_rows(index)):
        time = index
    return runs, time


def _check_named(name: str, table: Any, reading: Reading) -> None:
    """Raise unless a frame has the columns or index levels that a call names."""
    arguments = [("time", reading.time)]
    arguments += [("run", run) for run in reading.runs]
    for argument, label in arguments:
        if label is not None and label not in table.columns and label not in table.index.names:
            labels = [*table.columns, *(level for level in table.index.names if level is not None)]
            fail(argument, f"be a column or an index level of `{name}`, of {labels}", repr(label))


def _counts_rows(index: Any) -> bool:
    """Return True for an index without a name that counts the rows."""
    if index.name is not None or index.dtype.kind not in "iu":
        return False
    return np.array_equal(np.asarray(index), np.arange(len(index)))


def _with_coordinates(array: Any, reading: Reading) -> Any:
    """Return a two-dimensional array as a frame, if coordinates label its rows, else None."""
    if array.ndim != 2:
        return None
    for dim in array.dims:
        if getattr(array.indexes.get(dim), "nlevels", 1) > 1:
            return array.transpose(dim, ...).to_pandas()

    labels = []
    for label in (reading.time, *reading.runs):
        if label is None or label in array.dims or label not in array.coords:
            continue
        if array.coords[label].ndim == 1:
            labels.append(label)
    if not labels:
        return None
    (dim,) = array.coords[labels[0]].dims
    frame = array.transpose(dim, ...).to_pandas()
    for label in labels:
        frame[label] = array.coords[label].to_numpy()
    if dim == "time":
        return frame
    return frame.reset_index(drop=True)


def _check_coordinates(name: str, array: Any, time: Any) -> None:
    """Raise if a coordinate along time may label runs."""
    coords = {label: coord for label, coord in array.coords.items() if coord.dims == (time,)}
    coords.pop(time, None)
    if array.ndim != 2 or not coords:
        return
    frame = array.transpose(time, ...).to_pandas().iloc[:, :0]
    for label, coord in coords.items():
        frame[label] = coord.to_numpy()
    doubts = doubts_of(frame)
    labels = [*doubts.runs, *doubts.labels, *doubts.wraps]
    if labels:
        advice = f"Pass run={labels[0]!r}, or array.drop_vars({labels}) for one trajectory"
        fail(name, f"be one trajectory along {time!r}", f"what may be runs in {labels}", advice)


def _runs_of_dimensions(
    name: str, array: Any, reading: Reading, is_listed: bool
) -> list[TabulatedRun]:
    """Return the runs of an array of xarray, with states [time, ...]."""
    time = "time" if reading.time is None else reading.time
    frame = _with_coordinates(array, reading)
    if frame is not None:
        return _runs_of_rows(name, frame, reading)
    for dim in (time, *reading.runs):
        if dim not in array.dims:
            advice = f"Pass time=, one of {array.dims}" if reading.takes_names else "Rename it"
            fail(
                name,
                f"have a dimension {dim!r}",
                f"dimensions {array.dims}",
                f"{advice}, or pass array.to_numpy()",
            )
    num_runs = len(reading.runs)
    if array.ndim - num_runs > 2 and not is_listed:
        advice = "For several runs pass run=, or list(array); for one [array]; or array.to_numpy()"
        requirement = "be of dimensions (time, state), or a list of such arrays"
        fail(name, requirement, f"dimensions {array.dims}", advice)
    _check_coordinates(name, array, time)

    times = None
    if time in array.indexes:
        if reading.time is not None:
            array = array.sortby(time)
        times = array.indexes[time]
    ordered = array.transpose(*reading.runs, time, ...).to_numpy()
    tabulated = []
    for index, states in enumerate(ordered.reshape(-1, *ordered.shape[num_runs:])):
        label = index if reading.runs else None
        run = TabulatedRun(
            name,
            label,
            states,
            times,
            lambda: "array.sortby(...) puts rows in order",
            time,
            f"array.drop_vars({time!r})",
        )
        tabulated.append(run)
    return tabulated


def _numbers(name: str, table: Any, reading: Reading, run: np.ndarray | None) -> np.ndarray:
    """Return the states of a frame, [rows, states]."""
    missing = [label for label in reading.columns or () if label not in table.columns]
    if missing:
        fail("columns", f"be columns of `{name}`, of {list(table.columns)}", missing)
    states = table
    if table.columns.is_unique:
        states = table[list(state_labels(table, reading))]
    if reading.columns is None:
        check_columns(name, states, reading=reading, full_table=table, run=run)

    kind_of_column = {}
    for label, dtype in zip(states.columns, states.dtypes, strict=True):
        kind_of_column[label] = getattr(dtype, "kind", "O")
    wrong = [label for label, kind in kind_of_column.items() if kind not in "biuf"]
    if wrong:
        advice = "Drop them"
        if reading.takes_names:
            runs = [*reading.runs, *wrong]
            advice = f"If they label runs, pass run={runs}; else select the states by columns=[...]"
        fail_kind(
            name, "hold real numbers in every column", f"text, dates or objects in {wrong}", advice
        )
    values = np.asarray(states)
    if values.dtype == object:  # numbers of several kinds, or missing ones
        return states.to_numpy(float, na_value=np.nan)
    return values


def check_columns(
    name: str,
    table: Any,
    columns_of_axis: dict[str, Any] | None = None,
    axis: str = "",
    *,
    reading: Reading,
    full_table: Any = None,
    run: np.ndarray | None = None,
) -> None:
    """Raise if columns of a frame, or later dimensions of an array, may hold runs or times.

    `columns_of_axis` has the labels and the name of the first argument with an axis.
    """
    labels = state_labels(table, Reading())
    if columns_of_axis is not None:
        first_labels, first_name = columns_of_axis.setdefault(axis, (labels, name))
        if labels != first_labels and set(labels) == set(first_labels):
            requirement = f"have its columns in the order of `{first_name}`"
            fail(name, requirement, list(labels), f"Use frame[{list(first_labels)}]")
    if hasattr(table, "dims"):
        times = [
            dim
            for dim in table.dims[1:]
            if dim == "time" or hasattr(table.indexes.get(dim), "asi8")
        ]
        if times:
            requirement = "have states along all dimensions but the first"
            advice = "array.transpose; if they are states, array.to_numpy()"
            if reading.in_time:
                advice = f"lagged_pairs, or {advice}"
            fail(name, requirement, f"times along {times}", f"Use {advice}")
        return
    columns = getattr(table, "columns", ())
    if hasattr(columns, "asi8"):
        advice = "Pass frame.T; if they are states, pass frame.to_numpy()"
        fail(name, "have states for columns", "columns of dates", advice)
    if len(columns) < 2 or len(table) < 2:
        return

    doubts = doubts_of(table, run)
    if reading.time is not None or reading.run is not None:
        texts = [label for label in doubts.labels if is_text(table[label]) and reading.run is None]
        doubts = doubts._replace(wraps=[], labels=texts)
    words = ("clocks", "clocks that start again", "runs", "labels that come back")
    reasons = [f"{word} in {labels}" for word, labels in zip(words, doubts, strict=True) if labels]
    if reasons:
        quantity = "states" if reading.in_time else "features"
        fail(
            name,
            f"hold {quantity} alone in its columns",
            f"{', '.join(reasons)}, by their values",
            advice_on(doubts, table if full_table is None else full_table, reading),
        )


def rising_times(run: TabulatedRun) -> tuple[Any, np.ndarray]:
    """Return the times of a run as an index and as numbers, or raise unless they increase."""
    index = run.times
    if hasattr(index, "to_timestamp") and hasattr(index, "start_time"):
        index = index.to_timestamp()
    times = np.asarray(getattr(index, "asi8", index))
    rows = _advice_on_rows(run)
    as_runs = f"If {index.name!r} labels runs, lagged_pairs(frame, run={index.name!r})"
    if times.dtype.kind not in "iuf":
        advice = f"Times take pandas.to_datetime (dayfirst=True for days before months); {rows}"
        if index.name is not None:
            advice = f"{as_runs}. {advice}"
        fail_kind(run.name, "have an index of numbers or dates", f"one of {index.dtype}", advice)

    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    if not (steps > 0).all():
        i = int(np.argmin(steps > 0))
        advice = run.restarts()
        num_repeats = (steps == 0).sum() + 1 + (steps < 0).sum()
        if run.clock is None and index.name is not None and num_repeats >= len(times) / 2:
            advice = as_runs
        fail(
            run.name,
            "have an index that increases",
            f"{index[i + 1]} after {index[i]}",
            f"{advice}; {rows}",
        )
    return index, times


def _advice_on_rows(run: TabulatedRun) -> str:
    """Return the words that advise to count rows as steps."""
    if run.clock is not None and run.without.startswith("frame"):
        return f"without time={run.clock!r}, and the states as columns=[...], rows are steps"
    return f"{run.without} counts rows as steps"


def _check_steps(run: TabulatedRun, time_steps: list[Any]) -> None:
    """Raise unless times increase in even steps, and append kind, mean and spread of the steps."""
    index, times = rising_times(run)
    if len(times) < 2:
        return
    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    with warnings.catch_warnings():  # pandas 3 warns that `inferred_freq` will change its type
        warnings.simplefilter("ignore")
        is_calendar = getattr(index, "inferred_freq", None) is not None  # months are even, too
    if not is_calendar and not are_even(times):
        order = np.argsort(steps)
        i = int(order[-1])
        j = int(order[len(steps) // 2])
        fail(
            run.name,
            "have an index of even steps",
            f"{index[i + 1]} after {index[i]}, where {index[j + 1]} comes after {index[j]}",
            f"Cut it at gaps into a list of trajectories, or fill them; {_advice_on_rows(run)}",
        )

    kind = "numbers"
    unit = 1.0
    if hasattr(index, "asi8"):
        kind = "dates"
        unit = (index[-1] - index[0]).total_seconds() / float(times[-1] - times[0])
    time_steps.append((kind, steps.mean() * unit, np.ptp(steps) * unit))


def check_same_rows(arguments: dict[str, Any]) -> None:
    """Raise if two frames among the arguments have the same rows in different orders."""
    first_name = ""
    first_index = None
    for name, value in arguments.items():
        for index in _row_labels(value):
            if first_index is None:
                first_name = name
                first_index = index
            elif (
                len(index) == len(first_index)
                and not index.equals(first_index)
                and set(index) == set(first_index)
            ):
                requirement = f"have its rows in the order of `{first_name}`"
                advice = "Use frame.loc[other.index]"
                fail(name, requirement, "the same labels in another order", advice)


def _row_labels(value: Any) -> list[Any]:
    """Return the indices of frames in an argument whose first element is a frame."""
    if isinstance(value, dict):
        value = list(value.values())
    tables = value if isinstance(value, list | tuple) else [value]
    if not tables or not hasattr(tables[0], "iloc"):
        return []
    indices = [getattr(table, "index", None) for table in tables]
    return [index for index in indices if index is not None]


def take_groups(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose `groups`, if a name, are replaced by the labels of this name.

    The name is that of a column, an index level or a coordinate, which the arguments then lack.
    """
    name = arguments.get("groups")
    if not isinstance(name, str | int):
        return arguments
    labels_of_tables = []

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(table) for key, table in value.items()}
        if isinstance(value, list | tuple):
            return [without(table) for table in value]
        if not is_table(value):
            return value
        table, labels = _without(value, name)
        if labels is not None:
            labels_of_tables.append(labels)
        return table

    arguments = {key: without(value) for key, value in arguments.items() if key != "groups"}
    if not labels_of_tables:
        requirement = (
            "be one label per sample, or the name of a column, index level or coordinate of a frame"
        )
        fail("groups", requirement, repr(name))
    groups = labels_of_tables[0]
    if any(label is None or label != label for label in groups.tolist()):
        fail("groups", f"have a label in every row of {name!r}", "missing ones")
    if any(not np.array_equal(labels, groups) for labels in labels_of_tables):
        requirement = "be the same in all frames, whose rows are the same samples"
        fail("groups", requirement, f"others in {name!r}")
    return arguments | {"groups": groups}


def _without(table: Any, name: str | int) -> tuple[Any, np.ndarray | None]:
    """Return a table without its row labels of one name, and these labels, or None without any."""
    if hasattr(table, "dims"):
        if name not in table.coords or table.coords[name].ndim != 1:
            return table, None
        return table.drop_vars(name), table.coords[name].to_numpy()
    if name in getattr(table, "columns", ()):
        return table.drop(columns=name), table[name].to_numpy()
    if name in table.index.names:
        return table.reset_index(drop=True), table.index.get_level_values(name).to_numpy()
    return table, None
