"""Trajectories from frames of pandas and arrays of xarray: an index or a name says which rows are which times."""

import warnings
from typing import Any

import numpy as np

from dissociation.checks import fail, fail_kind

_TIMES = ("time", "times", "t", "step", "date", "datetime", "timestamp")
_RUNS = ("run", "trajectory", "traj", "trial", "episode", "session", "subject", "id")
_SPLIT = "pass a list of frames, [run for _, run in frame.groupby(...)], or an index of two levels, run and time"
_ROWS = "frame.reset_index(drop=True) counts rows as steps"


def as_trajectories(name: str, value: Any) -> Any:
    """Return frames as arrays in the order of time, one for each run of an index (run, time); others as they are."""
    several = isinstance(value, (list, tuple))
    parts = list(value) if several else [value]
    if not any(map(_is_table, parts)):
        return value
    if len(orders := {tuple(part.columns): None for part in parts if hasattr(part, "columns")}) > 1:
        fail(name, "hold frames of the same columns in one order", " and ".join(str(list(order)) for order in orders))
    runs = []
    for i, part in enumerate(parts):
        runs += _runs(f"{name}[{i}]" if several else name, part, several) if _is_table(part) else [part]
    return runs if several or getattr(getattr(value, "index", None), "nlevels", 1) > 1 else runs[0]


def _is_table(value: Any) -> bool:
    return hasattr(value, "iloc") or (hasattr(value, "dims") and hasattr(value, "ndim"))


def _is_time(label: Any) -> bool:
    return str(label).lower() in _TIMES


def _runs(name: str, table: Any, listed: bool) -> list[np.ndarray]:
    if hasattr(table, "dims"):
        times = [dimension for dimension in table.dims if _is_time(dimension)]
        if len(times) != 1 or (table.ndim > 2 and not listed):
            advice = "Rename one to 'time'; for more than two pass list(array), or [array]; or array.to_numpy()"
            fail(name, "be of dimensions (time, state), or a list of such arrays", f"dimensions {table.dims}", advice)
        if times[0] in table.indexes:
            _check_steps(name, table.indexes[times[0]])
        return [table.transpose(times[0], ...).to_numpy()]
    values, index = _numbers(name, table), table.index
    if index.nlevels == 1:
        _check_steps(name, index)
        return [values]
    if any(map(_is_time, index.names[:-1])):
        fail(name, "have time as the last level of its index", list(index.names), "Use frame.reorder_levels")
    _, first, run = np.unique(np.stack(index.codes[:-1], 1), axis=0, return_index=True, return_inverse=True)
    rows = [np.flatnonzero(run.ravel() == key) for key in np.argsort(first)]
    for at in rows:
        _check_steps(f"{name}[{index[at[0]][:-1]}]", index.get_level_values(-1)[at])
    return [values[at] for at in rows]


def _numbers(name: str, table: Any) -> np.ndarray:
    columns, dtypes = (table.columns, table.dtypes) if hasattr(table, "columns") else ([table.name], [table.dtype])
    kinds = {label: getattr(dtype, "kind", "O") for label, dtype in zip(columns, dtypes, strict=True)}
    if wrong := [label for label, kind in kinds.items() if kind not in "biuf"]:
        advice = f"Use frame.set_index({wrong}) if they are runs or times, or drop them"
        fail_kind(name, "hold real numbers in every column", f"text, dates or objects in {wrong}", advice)
    if len(kinds) > 1 and (labels := [label for label in kinds if _is_time(label) or str(label).lower() in _RUNS]):
        advice = f"Use frame.set_index({labels}) or drop them; if they are states, pass frame.to_numpy()"
        fail(name, "hold states alone in its columns", f"what looks like runs or times in {labels}", advice)
    values = np.asarray(table)  # objects: numbers of several kinds, or missing ones
    return table.to_numpy(float, na_value=np.nan) if values.dtype == object else values


def _check_steps(name: str, index: Any) -> None:
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
    with warnings.catch_warnings():  # pandas warns of the type to come
        warnings.simplefilter("ignore")
        calendar = getattr(index, "inferred_freq", None) is not None  # months are even, too
    off = np.append(0, np.cumsum(steps)) / steps.mean() - np.arange(
        len(times)
    )  # a clock's rounding is less than a tenth
    if np.abs(off).max() > 0.1 and not calendar:
        most, usual = (int(np.argsort(steps)[at]) for at in (-1, len(steps) // 2))
        got = f"{index[most + 1]} after {index[most]}, where {index[usual + 1]} comes after {index[usual]}"
        fail(
            name,
            "have an index of even steps",
            got,
            f"Cut it at gaps into a list of trajectories, or fill them; {_ROWS}",
        )


def check_same_rows(given: dict[str, Any]) -> None:
    """Raise if two frames among arguments, or in lists and dictionaries of them, order the same rows differently."""
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
