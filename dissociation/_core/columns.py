"""Meanings of columns by their values: clocks, runs, and labels that come back."""

import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

FEWEST = 8
"""Rows from which on rising columns and repeated integers are not due to chance."""


MOST = 50
"""Columns of numbers that advice looks through for a clock."""


class Reading(NamedTuple):
    """Parts of a frame that a call names, and the calls that advice may give."""

    time: Any = None
    run: Any = None
    columns: Any = None
    takes_names: bool = False
    """True if the function has these arguments."""
    in_time: bool = True
    """True if the package reads trajectories."""
    by_index: bool = False
    """True if the function reads trajectories of frames by their index."""

    @property
    def runs(self) -> list[Any]:
        """Return the names of runs."""
        if self.run is None:
            return []
        return list(self.run) if isinstance(self.run, list | tuple) else [self.run]

    def call(self, run: Any, time: Any, columns: Any) -> str:
        """Return the words that advise a call."""
        if self.by_index and not self.takes_names:
            states = "" if columns is None else f"[{columns}]"
            levels = [*(run if isinstance(run, list) else [run] * (run is not None)), time]
            if time is not None:
                return f"pass frame.set_index({levels}){states}"
            return f"pass [part{states} for _, part in frame.groupby({run!r})]"
        names = {"run": run, "time": time, "columns": columns}
        given = ", ".join(f"{name}={value!r}" for name, value in names.items() if value is not None)
        return f"pass {given}" if self.takes_names else f"use lagged_pairs(frame, {given})"


class Doubts(NamedTuple):
    """Labels of columns that may be no states."""

    clocks: list[Any]
    """Dates, and numbers that rise in every row of a run."""
    wraps: list[Any]
    """Numbers that rise, but start again near their least within what may be one run."""
    runs: list[Any]
    """Text or numbers, each in one block of two rows or more."""
    labels: list[Any]
    """Text, or few integers, that come back."""


def doubts_of(table: Any, run: Any = None) -> Doubts:
    """Return the doubts about the columns of a frame; `run` has the codes of its rows' runs, if they are known."""
    found = Doubts([], [], [], [])
    number = len(table)
    order = np.arange(number) if run is None else np.argsort(run, kind="stable")
    starts = np.zeros(number - 1, bool) if run is None else np.diff(run[order]) != 0
    columns = list(_known(table, order))
    counts = 0
    for label, kind, values in columns:
        if kind == "M":
            continue
        codes = np.unique(values, return_inverse=True)[1]
        changes = np.diff(codes) != 0
        blocks = np.diff(np.flatnonzero(np.concatenate([[True], changes, [True]])))
        distinct = int(codes.max()) + 1
        whole = kind in "biu" or (kind == "f" and (values == np.round(values)).all())
        counts += whole and distinct < number
        if distinct > 1 and len(blocks) == distinct and blocks.min() > 1:
            found.runs.append(label)
            starts = starts | changes
        elif 1 < distinct < number and (
            kind == "O" or (whole and number >= FEWEST and 4 * distinct <= number)
        ):
            found.labels.append(label)
    for label, kind, values in columns:
        if kind == "M":
            found.clocks.append(label)
        elif (
            kind in "iuf"
            and label not in found.runs
            and number >= FEWEST
            and (rises := _rise(values, starts))
        ):
            (found.clocks if rises == "always" else found.wraps).append(label)
            if label in found.labels:
                found.labels.remove(label)
    if 2 * counts > len(columns):  # as in a table of counts or pixels
        return found._replace(labels=[label for label in found.labels if is_text(table[label])])
    return found


def _known(table: Any, order: np.ndarray) -> Iterator[tuple[Any, str, np.ndarray]]:
    """Yield label, kind and values of the columns without missing values: "M" for dates, "O" for text and objects."""
    for label in table.columns if table.columns.is_unique else ():
        column = table[label]
        kind = getattr(column.dtype, "kind", "O")
        is_date = kind in "mM" or hasattr(column.array, "asi8")
        if is_date or (is_text(column) and hasattr(labels_of(table, label), "asi8")):
            yield label, "M", np.arange(len(order))
        elif kind not in "biuf":
            yield label, "O", column.astype(str).to_numpy()[order]
        elif not column.isna().any():
            yield label, kind, np.asarray(column.array, float if kind == "f" else None)[order]


def is_text(column: Any) -> bool:
    """Return True for a column of text or objects."""
    return getattr(column.dtype, "kind", "O") not in "biufmM"


def _rise(values: np.ndarray, starts: np.ndarray) -> str:
    """Return "always" for numbers that rise in every row but at starts, "again" if they also start again, or ""."""
    head = np.diff(values[:FEWEST].astype(float))
    if np.sum(head <= 0) > FEWEST // 2:
        return ""  # as for most columns
    steps = np.diff(values.astype(float))
    rises, falls = (steps > 0) & ~starts, (steps <= 0) & ~starts
    if rises.sum() < FEWEST - 1:
        return ""
    if not falls.any():
        return "always"
    span = np.ptp(values.astype(float))
    near = values.min() + min(max(0.1 * span, 1.01 * np.median(steps[rises])), 0.25 * span)
    return "again" if 4 * falls.sum() <= rises.sum() and (values[1:][falls] <= near).all() else ""


def rises_within(run: np.ndarray, times: np.ndarray) -> bool:
    """Return True if numbers rise from row to row of each run."""
    order = np.argsort(run, kind="stable")
    rising = np.diff(times[order].astype(float)) > 0
    return bool((rising | (np.diff(run[order]) != 0)).all()) and bool(rising.any())


def are_even(times: np.ndarray) -> bool:
    """Return True if numbers have even steps but for rounding, which is less than a tenth of a step."""
    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    off = np.append(0, np.cumsum(steps)) / steps.mean() - np.arange(len(times))
    return bool(np.abs(off).max() <= 0.1)


def advice_on(doubts: Doubts, table: Any, reading: Reading) -> str:
    """Return the calls that read a frame, whose columns are in doubt, as trajectories or as states."""
    marked = [label for part in doubts for label in part]
    if not reading.in_time:
        labels = [*doubts.runs, *doubts.labels]
        groups = (
            f". Rows of one label depend on each other: groups={labels[0]!r}, where it is taken"
            if labels
            else ""
        )
        return (
            f"Drop them, frame.drop(columns={marked}); if all are features, pass "
            f"frame.to_numpy(){groups}"
        )
    others = [
        label for label in table.columns if label not in (*marked, reading.time, *reading.runs)
    ]
    numbers = [label for label in table.columns if label not in (reading.time, *reading.runs)]
    numbers = [label for label in numbers if table[label].dtype.kind in "biuf"]
    as_states = (
        f"columns={numbers}" if reading.takes_names and len(numbers) < 9 else "frame.to_numpy()"
    )
    as_states = f"If {marked} are states, pass {as_states}"
    pairs = _pairs(doubts, table, reading)
    if not pairs and doubts.wraps and not reading.runs:
        label = doubts.wraps[0]
        rest = None if set(marked) == {label} else others
        return f"{_begins(table, label, reading, rest)}. {as_states}"
    runs = [*reading.runs, *doubts.runs, *doubts.labels]
    alone = (next(iter(runs), None), None if runs else next(iter(doubts.clocks), None))
    calls = [
        _call(table, run, time, None if set(marked) <= {run, time} else others, others, reading)
        for run, time in pairs or [alone]
    ]
    words = ", or, if rows are in the order of time, ".join(calls)
    if alone[0] in doubts.labels and not pairs:
        return f"If {alone[0]!r} labels runs, {words}. {as_states}"
    return f"{words[0].upper()}{words[1:]}. {as_states}"


def _call(table: Any, run: Any, time: Any, columns: Any, others: Any, reading: Reading) -> str:
    """Return the words that advise a call for a run and a clock, whose steps may be uneven."""
    named = run if reading.run is None else reading.run
    if time is None or _even_within(table, run, time):
        return reading.call(named, time, columns)
    times = _numbers(table, time)
    steps = np.diff(times.astype(float))
    step = np.median(steps[steps > 0]) if (steps > 0).any() else 0.0
    ratios = steps[steps > 0] / step
    if (
        np.abs(ratios - np.round(ratios)).max(initial=0.0) > 0.1
        or not (ratios > 1.5).any()
        or time not in table.columns
    ):
        counted = reading.call(named, None, others)
        return f"{counted} to count rows as steps, because those of {time!r} are uneven"
    parts = [*(named if isinstance(named, list) else [named] * (named is not None)), "part"]
    cut = f"frame.assign(part=(frame[{time!r}].diff() > {1.5 * step:.4g}).cumsum())"
    called = reading.call(
        parts if len(parts) > 1 else "part", time, others if columns is not None else None
    )
    return f"{called} of {cut}, which cuts runs at gaps"


def _begins(table: Any, label: Any, reading: Reading, columns: Any) -> str:
    """Return the words that advise runs which begin where times start again."""
    if label in table.columns:
        begins = f"frame.assign(run=(frame[{label!r}].diff() <= 0).cumsum())"
        return (
            f"If a run begins where {label!r} starts again, "
            f"{reading.call('run', label, columns)} of {begins}"
        )
    begins = "frame.assign(run=(numpy.diff(frame.index, prepend=frame.index[:1]) < 0).cumsum())"
    return (
        f"If a run begins where the index starts again, pass run='run' of {begins} to lagged_pairs"
    )


def advice_on_restarts(table: Any, reading: Reading) -> str:
    """Return the calls that tell apart rows of one time in a run, by another label or where times start again."""
    named = [label for label in (reading.time, *reading.runs) if label is not None]
    states = [] if reading.columns is None else list(reading.columns)
    rest = table[[label for label in table.columns if label not in (*named, *states)]]
    doubts = doubts_of(rest) if len(table) > 1 and rest.shape[1] else Doubts([], [], [], [])
    times = (
        np.asarray(getattr(table.index, "asi8", table.index))
        if reading.time is None
        else _numbers(table, reading.time)
    )
    if table.index.nlevels > 1 and reading.time is None:
        return "Several rows have one time: keep one of them, or name what tells them apart by run="
    for label in [*doubts.runs, *doubts.labels]:
        codes = [labels_of(table, part).factorize()[0] for part in (*reading.runs, label)]
        keys = np.stack([*codes, np.unique(times, return_inverse=True)[1].reshape(-1)], 1)
        if len(np.unique(keys, axis=0)) == len(keys):
            names = [*reading.runs, label]
            run = names if len(names) > 1 else label
            calls = reading._replace(by_index=False) if reading.time is None else reading
            return (
                f"Rows of one time differ in {label!r}: "
                f"{calls.call(run, reading.time, reading.columns)}"
            )
    falls = np.diff(times.astype(float)) <= 0
    if not reading.runs and 0 < 4 * falls.sum() <= len(falls):
        return _begins(table, reading.time, reading, reading.columns)
    return "Several rows have one time: keep one of them, or name what tells them apart by run="


def _pairs(doubts: Doubts, table: Any, reading: Reading) -> list[tuple[Any, Any]]:
    """Return the likeliest label of runs and clock that rises within these runs, and the reverse if it may be, too."""
    levels = [level for level in table.index.names if level is not None]
    integers = [label for label in table.columns if table[label].dtype.kind in "iu"]
    doubted = [*doubts.clocks, *doubts.wraps]
    repeated = [label for label in doubted if label in integers and table[label].duplicated().any()]
    labelled = [level for level in levels if not _is_measured(table, level)]
    runs = reading.runs[:1] or [*doubts.runs, *labelled, *doubts.labels, *repeated]
    others = [label for label in table.columns if label not in doubted][:MOST]
    times = [*doubts.wraps, *doubts.clocks, *levels, *doubts.runs, *others]
    times = times if reading.time is None else [reading.time]
    numbers = {time: _numbers(table, time) for time in times}
    numbers = {
        time: values
        for time, values in numbers.items()
        if values.dtype.kind in "iuf" and len(values) > 1
    }
    falls = {
        time: bool((np.diff(values.astype(float)) <= 0).any()) for time, values in numbers.items()
    }
    codes = {run: labels_of(table, run).factorize()[0] for run in runs}
    pairs = [
        (r, t)
        for r in runs
        for t in numbers
        if r != t
        and (
            rises_within(codes[r], numbers[t])
            or (len(table) >= FEWEST and _even_within(table, r, t))
        )
    ]
    # A clock starts again in each run, which is rarely labelled by a measured number.
    pairs.sort(key=lambda pair: (_is_measured(table, pair[0]), not falls[pair[1]]))
    first = pairs[:1]
    reverse = [
        pair
        for pair in pairs
        if first and pair == first[0][::-1] and not _is_measured(table, pair[0])
    ]
    reverse = [pair for pair in reverse if _even_within(table, *pair)]
    return first + reverse


def _is_measured(table: Any, label: Any) -> bool:
    """Return True for dates, and for floating-point numbers that are not all whole."""
    values = labels_of(table, label)
    numbers = np.asarray(values) if getattr(values.dtype, "kind", "O") == "f" else None
    return hasattr(values, "asi8") or (
        numbers is not None and not (numbers == np.round(numbers)).all()
    )


def _even_within(table: Any, run: Any, time: Any) -> bool:
    """Return True if numbers have even steps within every run, in their order."""
    times = _numbers(table, time)
    codes = np.zeros(len(times), int) if run is None else labels_of(table, run).factorize()[0]
    parts = [np.sort(times[codes == code]) for code in np.unique(codes)]
    long = [part for part in parts if len(part) > 2]
    return bool(long) and all(part[0] < part[-1] and are_even(part) for part in long)


def labels_of(table: Any, label: Any) -> Any:
    """Return a column or an index level of a frame as an index; text of dates as dates."""
    values = (
        table[[label]].set_index(label).index
        if label in table.columns
        else table.index.get_level_values(label)
    )
    first = values[0] if len(values) else None
    if isinstance(first, str) and _DATES.match(first):
        with suppress(ValueError, TypeError):
            return values.astype("datetime64[ns]")
    return values


_DATES = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{4}|\d{1,2}:\d{2}")


def _numbers(table: Any, label: Any) -> np.ndarray:
    values = labels_of(table, label)
    return np.asarray(getattr(values, "asi8", values))
