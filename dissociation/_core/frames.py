"""Convert frames of pandas and arrays of xarray to trajectories."""

import warnings
from collections.abc import Callable
from typing import Any

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


def as_trajectories(name: str, value: Any, reading: Reading, *, one: bool = False) -> Any:
    """Return frames as arrays in order of time, one per run; other values unchanged."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fail_kind(
            name, "be trajectories", f"{type(value).__name__}, in which they are cut into pairs"
        )
    several = isinstance(value, (list, tuple))
    parts = list(value) if several else [value]
    reading = _checked_names(reading)
    if not any(map(is_table, parts)):
        for argument in ("time", "run", "columns"):
            if getattr(reading, argument) is not None:
                fail(
                    argument,
                    f"be None unless `{name}` is a frame",
                    repr(getattr(reading, argument)),
                )
        return value
    if len(orders := {order: None for part in parts if (order := _states(part, reading))}) > 1:
        fail(
            name,
            "hold frames of the same columns in one order",
            " and ".join(str(list(order)) for order in orders),
        )
    runs, steps = [], []
    for i, part in enumerate(parts):
        label = f"{name}[{i}]" if several else name
        if not is_table(part):
            runs.append(part)
        elif hasattr(part, "dims"):
            runs += _runs_of_dimensions(label, part, reading, several, steps)
        else:
            runs += _runs_of_rows(label, part, reading, steps)
    _check_one_step(name, steps)
    if one and len(runs) > 1 and not several:
        fail(name, "be one trajectory", f"{len(runs)} runs", "Pass one at a time, frame.loc[[run]]")
    split = (
        len(runs) > 1
        or reading.run is not None
        or getattr(getattr(value, "index", None), "nlevels", 1) > 1
    )
    return runs if several or (split and not one) else runs[0]


def _checked_names(reading: Reading) -> Reading:
    """Return the reading, or raise unless it has names."""
    for argument in ("time", "run", "columns"):
        given = getattr(reading, argument)
        parts = given if isinstance(given, list | tuple) and argument != "time" else [given]
        for part in parts:
            if hasattr(part, "shape") or isinstance(part, dict | list | set):
                wanted = (
                    "name "
                    f"{'columns' if argument == 'columns' else 'a column, an index level or a dimension'}"
                )
                fail_kind(
                    argument,
                    wanted,
                    f"an object of type {type(part).__name__}",
                    "Add it to the frame as a column",
                )
        if argument != "time" and given is not None and not len(parts):
            fail(argument, "name at least one column", "none")
    return (
        reading._replace(columns=[reading.columns]) if isinstance(reading.columns, str) else reading
    )


def _check_one_step(name: str, steps: list[Any]) -> None:
    """Raise unless all runs have one time step."""
    for kind, step, spread in steps:
        first, other, varies = steps[0]
        # Mean steps of two trajectories may differ as much as the steps within one.
        if kind == first and abs(step - other) > max(spread, varies) + 1e-6 * max(step, other):
            unit = " s" if kind == "dates" else ""
            fail(
                name,
                "have one time step",
                f"{other:.6g}{unit} and {step:.6g}{unit}",
                f"Resample them; {_ROWS}",
            )


def is_table(value: Any) -> bool:
    """Return True for frames and Series of pandas and for arrays of xarray."""
    return hasattr(value, "iloc") or (hasattr(value, "dims") and hasattr(value, "ndim"))


def _states(table: Any, reading: Reading) -> tuple[Any, ...]:
    """Return the labels of a table's states; empty without labels."""
    named = (reading.time, *reading.runs)
    if is_table(table) and hasattr(table, "dims"):
        named = ("time", *named)
        own = [
            table.indexes[dim] for dim in table.dims if dim in table.indexes and dim not in named
        ]
        return tuple(own[0]) if len(own) == 1 else tuple(map(tuple, own))
    if reading.columns is not None:
        return tuple(reading.columns)
    return tuple(label for label in getattr(table, "columns", ()) if label not in named)


def _runs_of_rows(name: str, table: Any, reading: Reading, steps: list[Any]) -> list[np.ndarray]:
    """Return the states of each run of a frame, [time, states]."""
    series = not hasattr(table, "columns")
    table = table.to_frame() if series else table
    _check_named(name, table, reading)
    named = (reading.time, *reading.runs)
    runs = [labels_of(table, run) for run in reading.runs]
    time = None if reading.time is None else labels_of(table, reading.time)
    if time is not None and getattr(time, "hasnans", False):
        fail(
            name, f"have a time in every row of {reading.time!r}", "missing ones", "Drop these rows"
        )
    levels = [i for i, level in enumerate(table.index.names) if level is None or level not in named]
    wanted = (time is None) + (not runs)
    if table.index.nlevels > 1 and levels and wanted:
        if len(levels) != wanted:
            advice = (
                "Pass time= and run="
                if reading.takes_names
                else "Use lagged_pairs(frame, time=..., run=...)"
            )
            fail(
                name,
                "have an index of two levels, run and time",
                f"levels {list(table.index.names)}",
                advice,
            )
        runs = runs or [table.index.get_level_values(levels[0])]
        time = table.index.get_level_values(levels[-1]) if time is None else time
    elif levels and time is None and not (reading.runs and _counts_rows(table.index)):
        time = table.index
    codes = [run.factorize()[0] for run in runs] or [np.zeros(len(table), int)]
    if any((code < 0).any() for code in codes):
        fail("run", f"have a label in every row of `{name}`", "missing ones")
    _, first, run = np.unique(np.stack(codes, 1), axis=0, return_index=True, return_inverse=True)
    run = run.reshape(-1)
    values = _numbers(name, table, reading, run if runs else None)
    found = []
    for key in np.argsort(first):
        rows = np.flatnonzero(run == key)
        label = f"[{str(runs[0][rows[0]])!r}]" if runs else ""
        if time is not None:
            if reading.time is not None:
                rows = rows[np.asarray(time[rows].argsort(kind="stable"))]
            _check_steps(
                f"{name}{label}",
                time[rows],
                steps,
                lambda: advice_on_restarts(table, reading),
                reading.time,
            )
        found.append(values[rows, 0] if series else values[rows])
    return found


def _check_named(name: str, table: Any, reading: Reading) -> None:
    """Raise unless a frame has the columns or index levels that a call names."""
    for argument, label in (("time", reading.time), *(("run", run) for run in reading.runs)):
        if label is not None and label not in table.columns and label not in table.index.names:
            known = [*table.columns, *(level for level in table.index.names if level is not None)]
            fail(argument, f"be a column or an index level of `{name}`, of {known}", repr(label))


def _counts_rows(index: Any) -> bool:
    """Return True for an index without a name that counts the rows."""
    known = index.name is None and index.dtype.kind in "iu"
    return known and np.array_equal(np.asarray(index), np.arange(len(index)))


def _with_coordinates(array: Any, reading: Reading) -> Any:
    """Return an array of two dimensions as a frame, if labels of its rows are coordinates; else None."""
    stacked = [dim for dim in array.dims if getattr(array.indexes.get(dim), "nlevels", 1) > 1]
    named = [
        label
        for label in (reading.time, *reading.runs)
        if label is not None and label not in array.dims
    ]
    named = [label for label in named if label in array.coords and array.coords[label].ndim == 1]
    rows = stacked[:1] or [array.coords[label].dims[0] for label in named[:1]]
    if array.ndim != 2 or not rows:
        return None
    frame = array.transpose(rows[0], ...).to_pandas()
    for label in named if not stacked else ():
        frame[label] = array.coords[label].to_numpy()
    return frame if stacked or rows[0] == "time" else frame.reset_index(drop=True)


def _check_coordinates(name: str, array: Any, time: Any) -> None:
    """Raise if a coordinate along time may label runs."""
    own = [label for label, one in array.coords.items() if one.dims == (time,) and label != time]
    if array.ndim != 2 or not own:
        return
    frame = array.transpose(time, ...).to_pandas().iloc[:, :0]
    for label in own:
        frame[label] = array.coords[label].to_numpy()
    doubts = doubts_of(frame)
    if labels := [*doubts.runs, *doubts.labels, *doubts.wraps]:
        advice = f"Pass run={labels[0]!r}, or array.drop_vars({labels}) for one trajectory"
        fail(name, f"be one trajectory along {time!r}", f"what may be runs in {labels}", advice)


def _runs_of_dimensions(
    name: str, array: Any, reading: Reading, listed: bool, steps: list[Any]
) -> list[np.ndarray]:
    """Return the states of each run of an array of xarray, [time, ...]."""
    time = "time" if reading.time is None else reading.time
    if (frame := _with_coordinates(array, reading)) is not None:
        return _runs_of_rows(name, frame, reading, steps)
    for dim in (time, *reading.runs):
        if dim not in array.dims:
            advice = f"Pass time=, one of {array.dims}" if reading.takes_names else "Rename it"
            fail(
                name,
                f"have a dimension {dim!r}",
                f"dimensions {array.dims}",
                f"{advice}, or pass array.to_numpy()",
            )
    if array.ndim - len(reading.runs) > 2 and not listed:
        advice = "For several runs pass run=, or list(array); for one [array]; or array.to_numpy()"
        fail(
            name,
            "be of dimensions (time, state), or a list of such arrays",
            f"dimensions {array.dims}",
            advice,
        )
    _check_coordinates(name, array, time)
    if time in array.indexes:
        array = array if reading.time is None else array.sortby(time)
        restart = "array.sortby(...) puts rows in order"
        _check_steps(
            name, array.indexes[time], steps, lambda: restart, time, f"array.drop_vars({time!r})"
        )
    ordered = array.transpose(*reading.runs, time, ...).to_numpy()
    return list(ordered.reshape(-1, *ordered.shape[len(reading.runs) :]))


def _numbers(name: str, table: Any, reading: Reading, run: np.ndarray | None) -> np.ndarray:
    """Return the states of a frame, [rows, states]."""
    if missing := [label for label in reading.columns or () if label not in table.columns]:
        fail("columns", f"be columns of `{name}`, of {list(table.columns)}", missing)
    states = table[list(_states(table, reading))] if table.columns.is_unique else table
    if reading.columns is None:
        check_columns(name, states, reading=reading, whole=table, run=run)
    kinds = {
        label: getattr(dtype, "kind", "O")
        for label, dtype in zip(states.columns, states.dtypes, strict=True)
    }
    if wrong := [label for label, kind in kinds.items() if kind not in "biuf"]:
        advice = "Drop them"
        if reading.takes_names:
            advice = (
                f"If they label runs, pass run={[*reading.runs, *wrong]}; else select the "
                "states by columns=[...]"
            )
        fail_kind(
            name, "hold real numbers in every column", f"text, dates or objects in {wrong}", advice
        )
    values = np.asarray(states)  # of objects, if numbers are of several kinds or missing
    return states.to_numpy(float, na_value=np.nan) if values.dtype == object else values


def check_columns(
    name: str,
    table: Any,
    known: dict[str, Any] | None = None,
    axis: str = "",
    *,
    reading: Reading,
    whole: Any = None,
    run: np.ndarray | None = None,
) -> None:
    """Raise if columns of a frame, or later dimensions of an array, may hold runs or times."""
    own = _states(table, Reading())
    first, other = (known if known is not None else {}).setdefault(f"columns {axis}", (own, name))
    if own != first and set(own) == set(first):
        fail(
            name,
            f"have its columns in the order of `{other}`",
            list(own),
            f"Use frame[{list(first)}]",
        )
    if hasattr(table, "dims"):
        if labels := [
            dim
            for dim in table.dims[1:]
            if dim == "time" or hasattr(table.indexes.get(dim), "asi8")
        ]:
            advice = (
                f"Use {'lagged_pairs, or ' * reading.in_time}array.transpose; if they are "
                "states, array.to_numpy()"
            )
            fail(
                name,
                "have states along all dimensions but the first",
                f"times along {labels}",
                advice,
            )
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
    got = [f"{text} in {labels}" for text, labels in zip(words, doubts, strict=True) if labels]
    if got:
        wanted = (
            "hold states alone in its columns"
            if reading.in_time
            else "hold features alone in its columns"
        )
        fail(
            name,
            wanted,
            f"{', '.join(got)}, by their values",
            advice_on(doubts, table if whole is None else whole, reading),
        )


def _check_steps(
    name: str,
    index: Any,
    found: list[Any],
    restarts: Callable[[], str],
    column: Any = None,
    without: str = "frame.reset_index(drop=True)",
) -> None:
    """Raise unless times increase in even steps, which are added to `found`.

    `restarts` returns advice for times that do not increase; `column` is the name of the times, if
    the call gives it, and `without` the table without times.
    """
    index = (
        index.to_timestamp()
        if hasattr(index, "to_timestamp") and hasattr(index, "start_time")
        else index
    )
    times = np.asarray(getattr(index, "asi8", index))
    rows = f"{without} counts rows as steps"
    if column is not None and without.startswith("frame"):
        rows = f"without time={column!r}, and the states as columns=[...], rows are steps"
    if times.dtype.kind not in "iuf":
        label = (
            ""
            if index.name is None
            else f"If {index.name!r} labels runs, lagged_pairs(frame, run={index.name!r}). "
        )
        advice = f"{label}Times take pandas.to_datetime; {rows}"
        fail_kind(name, "have an index of numbers or dates", f"one of {index.dtype}", advice)
    if len(times) < 2:
        return
    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    if not (steps > 0).all():
        at = int(np.argmin(steps > 0))
        advice = restarts()
        repeats = (steps == 0).sum() + 1 + (steps < 0).sum() < len(times) / 2
        if column is None and index.name is not None and not repeats:
            advice = f"If {index.name!r} labels runs, lagged_pairs(frame, run={index.name!r})"
        fail(
            name,
            "have an index that increases",
            f"{index[at + 1]} after {index[at]}",
            f"{advice}; {rows}",
        )
    with warnings.catch_warnings():  # pandas 3 warns that `inferred_freq` will change its type
        warnings.simplefilter("ignore")
        calendar = getattr(index, "inferred_freq", None) is not None  # months are even, too
    if not calendar and not are_even(times):
        most, usual = (int(np.argsort(steps)[at]) for at in (-1, len(steps) // 2))
        got = (
            f"{index[most + 1]} after {index[most]}, where {index[usual + 1]} comes after "
            f"{index[usual]}"
        )
        fail(
            name,
            "have an index of even steps",
            got,
            f"Cut it at gaps into a list of trajectories, or fill them; {rows}",
        )
    dates = hasattr(index, "asi8")
    unit = (index[-1] - index[0]).total_seconds() / float(times[-1] - times[0]) if dates else 1.0
    found.append(("dates" if dates else "numbers", steps.mean() * unit, np.ptp(steps) * unit))


def check_same_rows(given: dict[str, Any]) -> None:
    """Raise if two frames among the arguments have the same rows in different orders."""
    known: tuple[str, Any] | None = None
    for name, value in given.items():
        parts = (
            list(value.values())
            if isinstance(value, dict)
            else value
            if isinstance(value, list | tuple)
            else [value]
        )
        for part in parts if parts and hasattr(parts[0], "iloc") else ():
            index = getattr(part, "index", None)
            if index is None or known is None:
                known = known or (name, index)
            elif (
                len(index) == len(known[1])
                and not index.equals(known[1])
                and set(index) == set(known[1])
            ):
                wanted = f"have its rows in the order of `{known[0]}`"
                fail(name, wanted, "the same labels in another order", "Use frame.loc[other.index]")


def take_groups(given: dict[str, Any]) -> dict[str, Any]:
    """Return arguments whose `groups`, if the name of a column, level or coordinate, is replaced by its labels."""
    label, found = given.get("groups"), []
    if not isinstance(label, str | int):
        return given

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: without(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [without(part) for part in value]
        if not is_table(value):
            return value
        rest, labels = _without(value, label)
        found.extend([] if labels is None else [labels])
        return rest

    rest = {name: without(value) for name, value in given.items() if name != "groups"}
    if not found:
        wanted = (
            "be one label per sample, or the name of a column, index level or coordinate of a frame"
        )
        fail("groups", wanted, repr(label))
    if any(one is None or one != one for one in found[0].tolist()):
        fail("groups", f"have a label in every row of {label!r}", "missing ones")
    if any(not np.array_equal(labels, found[0]) for labels in found):
        fail(
            "groups",
            "be the same in all frames, whose rows are the same samples",
            f"others in {label!r}",
        )
    return rest | {"groups": found[0]}


def _without(table: Any, label: str | int) -> tuple[Any, np.ndarray | None]:
    """Return a table without its labels of rows of one name, and these labels, or None if it has none."""
    if hasattr(table, "dims"):
        if label not in table.coords or table.coords[label].ndim != 1:
            return table, None
        return table.drop_vars(label), table.coords[label].to_numpy()
    if label in getattr(table, "columns", ()):
        return table.drop(columns=label), table[label].to_numpy()
    if label in table.index.names:
        return table.reset_index(drop=True), table.index.get_level_values(label).to_numpy()
    return table, None
