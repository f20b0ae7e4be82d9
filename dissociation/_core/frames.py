"""Convert frames of pandas and arrays of xarray to trajectories."""

import re
import warnings
from typing import Any

import numpy as np

from dissociation._core.checks import fail, fail_kind

_TIMES = ("time", "times", "t", "step", "date", "datetime", "timestamp")
_RUNS = ("run", "trajectory", "traj", "trial", "episode", "session", "subject", "id")
_EITHER = ("ts", "frame", "day", "animal", "mouse", "patient", "seed")  # or names of states
_UNITS = r"\s*[\[(].*[\])]|[\s_.-]+(id|no|nr|idx|index|s|sec|seconds|ms|us|ns|min|h|hours)$"
_SPLIT = "pass a list of frames, [run for _, run in frame.groupby(...)], or an index of two levels, run and time"
_ROWS = "frame.reset_index(drop=True) counts rows as steps"


def as_trajectories(name: str, value: Any, *, one: bool = False) -> Any:
    """Return frames as arrays in order of time, one per run; other values unchanged."""
    several = isinstance(value, (list, tuple))
    parts = list(value) if several else [value]
    if not any(map(is_table, parts)):
        return value
    if len(orders := {order: None for part in parts if (order := _states(part))}) > 1:
        fail(name, "hold frames of the same columns in one order", " and ".join(str(list(order)) for order in orders))
    runs, steps = [], []
    for i, part in enumerate(parts):
        runs += _runs(f"{name}[{i}]" if several else name, part, several, steps) if is_table(part) else [part]
    for kind, step, spread in steps:
        first, other, varies = steps[0]
        # Mean steps of two trajectories may differ as much as the steps within one.
        if kind == first and abs(step - other) > max(spread, varies) + 1e-6 * max(step, other):
            unit = " s" if kind == "dates" else ""
            fail(name, "have one time step", f"{other:.6g}{unit} and {step:.6g}{unit}", f"Resample them; {_ROWS}")
    if one and len(runs) > 1 and not several:
        fail(name, "be one trajectory", f"{len(runs)} runs", "Pass one at a time, frame.loc[[run]]")
    listed = several or (getattr(getattr(value, "index", None), "nlevels", 1) > 1 and not one)
    return runs if listed else runs[0]


def _states(table: Any) -> tuple[Any, ...]:
    """Return the labels of a table's states; empty without labels."""
    if not is_table(table) or not hasattr(table, "dims"):
        return tuple(getattr(table, "columns", ()))
    own = [table.indexes[dim] for dim in table.dims if dim in table.indexes and not _meaning(dim, table.indexes[dim])]
    return tuple(own[0]) if len(own) == 1 else tuple(map(tuple, own))


def is_table(value: Any) -> bool:
    """Return True for frames and Series of pandas and for arrays of xarray."""
    return hasattr(value, "iloc") or (hasattr(value, "dims") and hasattr(value, "ndim"))


def _meaning(label: Any, values: Any = None) -> str:
    """Return the meaning of an axis by its name or dtype: "time", "run" or ""."""
    if hasattr(values, "asi8"):  # dates, periods, spans of time
        return "time"
    name = re.sub(_UNITS, "", str(label).strip().lower())
    return "time" if name in _TIMES else "run" if name in _RUNS else ""


def _runs(name: str, table: Any, listed: bool, steps: list[Any]) -> list[np.ndarray]:
    if hasattr(table, "dims"):
        means = {_meaning(dim, table.indexes.get(dim)): dim for dim in table.dims}
        count = sum(_meaning(dim, table.indexes.get(dim)) == "time" for dim in table.dims)
        if count != 1 or "run" in means or (table.ndim > 2 and not listed):
            advice = "Rename one to 'time'; for several runs pass list(array), for one [array]; or array.to_numpy()"
            fail(name, "be of dimensions (time, state), or a list of such arrays", f"dimensions {table.dims}", advice)
        if means["time"] in table.indexes:
            _check_steps(name, table.indexes[means["time"]], steps)
        return [table.transpose(means["time"], ...).to_numpy()]
    values, index = _numbers(name, table), table.index
    if index.nlevels == 1:
        if _meaning(index.name, index) == "run":
            advice = f"For several trajectories {_SPLIT}; for one trajectory, {_ROWS}"
            fail(name, "have an index of times", f"one of runs, named {index.name!r}", advice)
        _check_steps(name, index, steps)
        return [values]
    means = list(map(_meaning, index.names, index.levels))
    times = [level for level, meaning in enumerate(means) if meaning == "time"]
    if not times:  # numbers of no other meaning
        kinds = zip(means, index.levels, strict=True)
        times = [i for i, (meaning, level) in enumerate(kinds) if not meaning and level.dtype.kind in "iuf"]
    if len(times) != 1:
        advice = "Name it, frame.rename_axis(['run', 'time']), or drop the other levels, frame.droplevel"
        fail(name, "have one level of times in its index", f"{len(times)} that may be, of {list(index.names)}", advice)
    others = index.droplevel(times[0])
    codes = [codes for level, codes in enumerate(index.codes) if level != times[0]]
    _, first, run = np.unique(np.stack(codes, 1), axis=0, return_index=True, return_inverse=True)
    rows = [np.flatnonzero(run.ravel() == key) for key in np.argsort(first)]
    for at in rows:
        _check_steps(f"{name}[{others[at[0]]!r}]", index.get_level_values(times[0])[at], steps)
    return [values[at] for at in rows]


def _numbers(name: str, table: Any) -> np.ndarray:
    columns, dtypes = (table.columns, table.dtypes) if hasattr(table, "columns") else ([table.name], [table.dtype])
    kinds = {label: getattr(dtype, "kind", "O") for label, dtype in zip(columns, dtypes, strict=True)}
    if wrong := [label for label, kind in kinds.items() if kind not in "biuf"]:
        advice = f"Use frame.set_index({wrong}) if they are runs or times, or drop them"
        fail_kind(name, "hold real numbers in every column", f"text, dates or objects in {wrong}", advice)
    check_columns(name, table)
    values = np.asarray(table)  # of objects, if numbers are of several kinds or missing
    return table.to_numpy(float, na_value=np.nan) if values.dtype == object else values


def check_columns(name: str, table: Any, known: dict[str, Any] | None = None, axis: str = "") -> None:
    """Raise if columns, or later dimensions of an array, may hold runs or times."""
    own = _states(table)
    first, other = (known if known is not None else {}).setdefault(f"columns {axis}", (own, name))
    if own != first and set(own) == set(first):
        fail(name, f"have its columns in the order of `{other}`", list(own), f"Use frame[{list(first)}]")
    if hasattr(table, "dims"):
        if labels := [dim for dim in table.dims[1:] if _meaning(dim, table.indexes.get(dim))]:
            advice = "Use lagged_pairs, or array.transpose; if they are states, pass array.to_numpy()"
            fail(name, "have states along all dimensions but the first", f"runs or times along {labels}", advice)
        return
    columns = getattr(table, "columns", ())
    if labels := [label for label in getattr(columns, "names", ()) if _meaning(label, columns)]:
        advice = "Pass [frame[[run]] for run in frame], or frame.T; if they are states, pass frame.to_numpy()"
        fail(name, "have states for columns", f"columns of runs or times, named {labels[0]!r}", advice)
    if len(columns) > 1 and (labels := [label for label in columns if _meaning(label) or _may_be(label, table)]):
        runs = any(_meaning(level) == "run" for level in getattr(table.index, "names", ()))
        call = f"frame.set_index({labels}{', append=True' if runs else ''})"
        advice = f"Use {call}; if they are states, pass frame.to_numpy()"
        fail(name, "hold states alone in its columns", f"what looks like runs or times in {labels}", advice)


def _may_be(label: Any, table: Any) -> bool:
    """Return True if a column has an ambiguous name, and integers or increasing numbers."""
    if re.sub(_UNITS, "", str(label).strip().lower()) not in _EITHER:
        return False
    values = np.asarray(table[label])
    return values.dtype.kind in "iu" or (values.dtype.kind == "f" and bool((np.diff(values) > 0).all()))


def _check_steps(name: str, index: Any, found: list[Any]) -> None:
    index = index.to_timestamp() if hasattr(index, "to_timestamp") and hasattr(index, "start_time") else index
    times = np.asarray(getattr(index, "asi8", index))
    if times.dtype.kind not in "iuf":
        fail_kind(
            name, "have an index of numbers or dates", f"one of {index.dtype}", f"Use pandas.to_datetime; {_ROWS}"
        )
    if len(times) < 2:
        return
    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    if not (steps > 0).all():
        at = int(np.argmin(steps > 0))
        advice = f"If time starts again with each of several trajectories, {_SPLIT}; for one trajectory, {_ROWS}"
        fail(name, "have an index that increases", f"{index[at + 1]} after {index[at]}", advice)
    with warnings.catch_warnings():  # pandas 3 warns that `inferred_freq` will change its type
        warnings.simplefilter("ignore")
        calendar = getattr(index, "inferred_freq", None) is not None  # months are even, too
    # A clock's rounding is less than a tenth of a step.
    off = np.append(0, np.cumsum(steps)) / steps.mean() - np.arange(len(times))
    if np.abs(off).max() > 0.1 and not calendar:
        most, usual = (int(np.argsort(steps)[at]) for at in (-1, len(steps) // 2))
        got = f"{index[most + 1]} after {index[most]}, where {index[usual + 1]} comes after {index[usual]}"
        advice = f"Cut it at gaps into a list of trajectories, or fill them; {_ROWS}"
        fail(name, "have an index of even steps", got, advice)
    dates = hasattr(index, "asi8")
    unit = (index[-1] - index[0]).total_seconds() / float(times[-1] - times[0]) if dates else 1.0
    found.append(("dates" if dates else "numbers", steps.mean() * unit, np.ptp(steps) * unit))


def check_same_rows(given: dict[str, Any]) -> None:
    """Raise if two frames among the arguments have the same rows in different orders."""
    known: tuple[str, Any] | None = None
    for name, value in given.items():
        parts = (
            list(value.values()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        )
        for part in parts if parts and hasattr(parts[0], "iloc") else ():
            index = getattr(part, "index", None)
            if index is None or known is None:
                known = known or (name, index)
            elif len(index) == len(known[1]) and not index.equals(known[1]) and set(index) == set(known[1]):
                wanted = f"have its rows in the order of `{known[0]}`"
                fail(name, wanted, "the same labels in another order", "Use frame.loc[other.index]")
