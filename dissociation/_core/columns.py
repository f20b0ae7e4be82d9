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
        if isinstance(self.run, tuple):
            return list(self.run)
        return _listed(self.run)

    def call(self, run: Any, time: Any, columns: Any) -> str:
        """Return the words that advise a call."""
        if self.by_index and not self.takes_names:
            states = "" if columns is None else f"[{columns}]"
            if time is None:
                return f"pass [part{states} for _, part in frame.groupby({run!r})]"
            return f"pass frame.set_index({[*_listed(run), time]}){states}"

        arguments = []
        for name, label in {"run": run, "time": time, "columns": columns}.items():
            if label is not None:
                arguments.append(f"{name}={label!r}")
        words = ", ".join(arguments)
        if self.takes_names:
            return f"pass {words}"
        return f"use lagged_pairs(frame, {words})"


def _listed(run: Any) -> list[Any]:
    """Return one label or a list of labels as a list, which is empty for None."""
    if isinstance(run, list):
        return run
    if run is None:
        return []
    return [run]


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
    """Return the doubts about the columns of a frame.

    `run` has the codes of the rows' runs, if they are known.
    """
    number = len(table)
    order = np.arange(number)
    is_start = np.zeros(number - 1, bool)
    if run is not None:
        order = np.argsort(run, kind="stable")
        is_start = np.diff(run[order]) != 0
    columns = list(_complete_columns(table, order))
    runs = []
    labels = []
    num_repeating = 0
    for label, kind, values in columns:
        if kind == "M":
            continue
        codes = np.unique(values, return_inverse=True)[1]
        is_change = np.diff(codes) != 0
        edges = np.flatnonzero(np.concatenate([[True], is_change, [True]]))
        lengths = np.diff(edges)
        num_distinct = int(codes.max()) + 1
        is_whole = kind in "biu" or (kind == "f" and (values == np.round(values)).all())
        num_repeating += is_whole and num_distinct < number

        is_few = is_whole and number >= FEWEST and 4 * num_distinct <= number
        if num_distinct > 1 and len(lengths) == num_distinct and lengths.min() > 1:
            runs.append(label)
            is_start = is_start | is_change
        elif 1 < num_distinct < number and (kind == "O" or is_few):
            labels.append(label)

    rises = {label: _rise(kind, values, is_start) for label, kind, values in columns}
    clocks = [label for label in rises if rises[label] == "always" and label not in runs]
    wraps = [label for label in rises if rises[label] == "again" and label not in runs]
    labels = [label for label in labels if not rises[label]]
    if 2 * num_repeating > len(columns):  # as in a table of counts or pixels
        labels = [label for label in labels if is_text(table[label])]
    return Doubts(clocks, wraps, runs, labels)


def _complete_columns(table: Any, order: np.ndarray) -> Iterator[tuple[Any, str, np.ndarray]]:
    """Yield label, kind and sorted values of the columns without missing values.

    The kind is that of the dtype, or "M" for dates, and "O" for text and objects.
    """
    if not table.columns.is_unique:
        return
    for label in table.columns:
        column = table[label]
        kind = getattr(column.dtype, "kind", "O")
        is_date = kind in "mM" or hasattr(column.array, "asi8")
        if is_date or (is_text(column) and hasattr(labels_of(table, label), "asi8")):
            yield label, "M", np.arange(len(order))
        elif kind not in "biuf":
            yield label, "O", column.astype(str).to_numpy()[order]
        elif not column.isna().any():
            dtype = float if kind == "f" else None
            yield label, kind, np.asarray(column.array, dtype)[order]


def is_text(column: Any) -> bool:
    """Return True for a column of text or objects."""
    return getattr(column.dtype, "kind", "O") not in "biufmM"


def _rise(kind: str, values: np.ndarray, is_start: np.ndarray) -> str:
    """Return "always" for dates, and for numbers that rise in every row but at starts of runs.

    Return "again" if numbers also start again near their least, and "" for other columns.
    """
    if kind == "M":
        return "always"
    if kind not in "iuf" or len(values) < FEWEST:
        return ""
    head = np.diff(values[:FEWEST].astype(float))
    if np.sum(head <= 0) > FEWEST // 2:
        return ""  # as for most columns
    numbers = values.astype(float)
    steps = np.diff(numbers)
    is_rise = (steps > 0) & ~is_start
    is_fall = (steps <= 0) & ~is_start
    if is_rise.sum() < FEWEST - 1:
        return ""
    if not is_fall.any():
        return "always"

    span = np.ptp(numbers)
    reach = max(0.1 * span, 1.01 * np.median(steps[is_rise]))
    highest_start = values.min() + min(reach, 0.25 * span)
    starts = values[1:][is_fall]
    is_rare = 4 * is_fall.sum() <= is_rise.sum()
    if is_rare and (starts <= highest_start).all():
        return "again"
    return ""


def rises_within(run: np.ndarray, times: np.ndarray) -> bool:
    """Return True if numbers rise from row to row of each run."""
    order = np.argsort(run, kind="stable")
    is_rise = np.diff(times[order].astype(float)) > 0
    is_new_run = np.diff(run[order]) != 0
    return bool((is_rise | is_new_run).all()) and bool(is_rise.any())


def are_even(times: np.ndarray) -> bool:
    """Return True if steps of numbers are even but for rounding, less than a tenth of a step."""
    steps = np.diff(times.astype(float) if times.dtype.kind == "u" else times)
    elapsed = np.append(0, np.cumsum(steps))
    deviations = elapsed / steps.mean() - np.arange(len(times))
    return bool(np.abs(deviations).max() <= 0.1)


def advice_on(doubts: Doubts, table: Any, reading: Reading) -> str:
    """Return the calls that read a frame with doubtful columns as trajectories or as states."""
    doubted = [*doubts.clocks, *doubts.wraps, *doubts.runs, *doubts.labels]
    if not reading.in_time:
        return _advice_on_features(doubts, doubted)

    named = (reading.time, *reading.runs)
    unnamed = [label for label in table.columns if label not in named]
    numeric = [label for label in unnamed if table[label].dtype.kind in "biuf"]
    states = [label for label in numeric if label not in doubted]
    call_of_states = "frame.to_numpy()"
    if reading.takes_names and len(numeric) < 9:
        call_of_states = f"columns={numeric}"
    as_states = f"If {doubted} are states, pass {call_of_states}"

    pairs = _pairs(doubts, table, reading)
    if not pairs and doubts.wraps and not reading.runs:
        label = doubts.wraps[0]
        columns = None if set(doubted) == {label} else states
        return f"{_begins(table, label, reading, columns)}. {as_states}"

    # Without a pair of runs and a clock, name one of them.
    runs = [*reading.runs, *doubts.runs, *doubts.labels]
    run = next(iter(runs), None)
    clock = None
    if not runs:
        clock = next(iter(doubts.clocks), None)
        if reading.time is not None:
            call = _call(table, None, reading.time, states, states, reading)
            return f"{call[0].upper()}{call[1:]}. {as_states}"
    calls = []
    for pair in pairs or [(run, clock)]:
        columns = None if set(doubted) <= set(pair) else states
        calls.append(_call(table, *pair, columns, states, reading))
    words = ", or, if rows are in the order of time, ".join(calls)
    if run in doubts.labels and not pairs:
        return f"If {run!r} labels runs, {words}. {as_states}"
    return f"{words[0].upper()}{words[1:]}. {as_states}"


def _advice_on_features(doubts: Doubts, doubted: list[Any]) -> str:
    """Return the calls that drop doubtful columns, or take all columns as features."""
    advice = f"Drop them, frame.drop(columns={doubted}); if all are features, pass frame.to_numpy()"
    labels = [*doubts.runs, *doubts.labels]
    if labels:
        advice += (
            f". Rows of one label depend on each other: groups={labels[0]!r}, where it is taken"
        )
    return advice


def _call(table: Any, run: Any, time: Any, columns: Any, states: Any, reading: Reading) -> str:
    """Return the words that advise a call for a run and a clock, whose steps may be uneven."""
    runs = run if reading.run is None else reading.run
    if time is None or _is_even_within(table, run, time):
        return reading.call(runs, time, columns)

    steps = np.diff(_numbers(table, time).astype(float))
    steps = steps[steps > 0]
    step = np.median(steps) if steps.size else 0.0
    ratios = steps / step
    is_uneven = np.abs(ratios - np.round(ratios)).max(initial=0.0) > 0.1
    if is_uneven or not (ratios > 1.5).any() or time not in table.columns:
        call = reading.call(runs, None, states)
        return f"{call} to count rows as steps, because those of {time!r} are uneven"

    cut = f"frame.assign(part=(frame[{time!r}].diff() > {1.5 * step:.4g}).cumsum())"
    levels = [*_listed(runs), "part"]
    call = reading.call(levels if len(levels) > 1 else "part", time, columns)
    return f"{call} of {cut}, which cuts runs at gaps"


def _begins(table: Any, label: Any, reading: Reading, columns: Any) -> str:
    """Return the words that advise runs which begin where times start again."""
    if label not in table.columns:
        runs = "frame.assign(run=(numpy.diff(frame.index, prepend=frame.index[:1]) < 0).cumsum())"
        return (
            "If a run begins where the index starts again, "
            f"pass run='run' of {runs} to lagged_pairs"
        )
    runs = f"frame.assign(run=(frame[{label!r}].diff() <= 0).cumsum())"
    call = reading.call("run", label, columns)
    return f"If a run begins where {label!r} starts again, {call} of {runs}"


_KEEP_ONE = "Several rows have one time: keep one of them, or name what tells them apart by run="


def advice_on_restarts(table: Any, reading: Reading) -> str:
    """Return the calls that distinguish rows of one time in a run.

    The rows differ by another label, or runs begin where times start again.
    """
    if table.index.nlevels > 1 and reading.time is None:
        return _KEEP_ONE
    if reading.time is None:
        times = np.asarray(getattr(table.index, "asi8", table.index))
    else:
        times = _numbers(table, reading.time)

    # Look for a label that distinguishes the rows.
    used = (reading.time, *reading.runs, *(reading.columns or ()))
    unused = table[[label for label in table.columns if label not in used]]
    labels = []
    if len(table) > 1 and unused.shape[1]:
        doubts = doubts_of(unused)
        labels = [*doubts.runs, *doubts.labels]
    for label in labels:
        names = [*reading.runs, label]
        codes = [labels_of(table, name).factorize()[0] for name in names]
        time_codes = np.unique(times, return_inverse=True)[1]
        keys = np.stack([*codes, time_codes.reshape(-1)], 1)
        if len(np.unique(keys, axis=0)) < len(keys):
            continue
        run = names if len(names) > 1 else label
        if reading.time is None:
            reading = reading._replace(by_index=False)
        call = reading.call(run, reading.time, reading.columns)
        return f"Rows of one time differ in {label!r}: {call}"

    is_fall = np.diff(times.astype(float)) <= 0
    if not reading.runs and 0 < 4 * is_fall.sum() <= len(is_fall):
        return _begins(table, reading.time, reading, reading.columns)
    return _KEEP_ONE


def _pairs(doubts: Doubts, table: Any, reading: Reading) -> list[tuple[Any, Any]]:
    """Return the likeliest label of runs and the clock that rises within these runs.

    The reverse pair follows if it may be meant, too.
    """
    levels = [level for level in table.index.names if level is not None]
    doubted = [*doubts.clocks, *doubts.wraps]
    runs = reading.runs[:1]
    if not runs:
        labels = [level for level in levels if not _is_measured(table, level)]
        integers = [label for label in table.columns if table[label].dtype.kind in "iu"]
        repeated = [
            label for label in doubted if label in integers and table[label].duplicated().any()
        ]
        runs = [*doubts.runs, *labels, *doubts.labels, *repeated]
    times = [reading.time]
    if reading.time is None:
        undoubted = [label for label in table.columns if label not in doubted]
        times = [*doubts.wraps, *doubts.clocks, *levels, *doubts.runs, *undoubted[:MOST]]

    numbers_of_time = {}
    has_falls = {}
    for time in times:
        numbers = _numbers(table, time)
        if numbers.dtype.kind in "iuf" and len(numbers) > 1:
            numbers_of_time[time] = numbers
            has_falls[time] = bool((np.diff(numbers.astype(float)) <= 0).any())
    pairs = _rising_pairs(table, runs, numbers_of_time)
    if not pairs:
        return []

    # A clock starts again in each run, which is rarely labelled by a measured number.
    pairs.sort(key=lambda pair: (_is_measured(table, pair[0]), not has_falls[pair[1]]))
    run, time = pairs[0]
    reverse = [pair for pair in pairs if pair == (time, run)]
    if reverse and not _is_measured(table, time) and _is_even_within(table, time, run):
        return [pairs[0], *reverse]
    return pairs[:1]


def _rising_pairs(
    table: Any, runs: list[Any], numbers_of_time: dict[Any, np.ndarray]
) -> list[tuple[Any, Any]]:
    """Return the labels of runs with the times that rise, or have even steps, within the runs."""
    pairs = []
    for run in runs:
        codes = labels_of(table, run).factorize()[0]
        for time, numbers in numbers_of_time.items():
            if run == time:
                continue
            is_long = len(table) >= FEWEST
            if rises_within(codes, numbers) or (is_long and _is_even_within(table, run, time)):
                pairs.append((run, time))
    return pairs


def _is_measured(table: Any, label: Any) -> bool:
    """Return True for dates, and for floating-point numbers that are not all whole."""
    values = labels_of(table, label)
    if hasattr(values, "asi8"):
        return True
    if getattr(values.dtype, "kind", "O") != "f":
        return False
    numbers = np.asarray(values)
    return not (numbers == np.round(numbers)).all()


def _is_even_within(table: Any, run: Any, time: Any) -> bool:
    """Return True if numbers have even steps within every run, in their order."""
    times = _numbers(table, time)
    codes = np.zeros(len(times), int) if run is None else labels_of(table, run).factorize()[0]
    has_long_run = False
    for code in np.unique(codes):
        run_times = np.sort(times[codes == code])
        if len(run_times) <= 2:
            continue
        has_long_run = True
        if not (run_times[0] < run_times[-1] and are_even(run_times)):
            return False
    return has_long_run


def labels_of(table: Any, label: Any) -> Any:
    """Return a column or an index level of a frame as an index; text of dates as dates.

    Dates stay text if day and month cannot be told apart.
    """
    values = _as_index(table, label)
    if not len(values) or not isinstance(values[0], str):
        return values
    if _DATES.match(values[0]):
        with suppress(ValueError, TypeError):
            return values.astype("datetime64[ns]")
    if _DAYS_AND_MONTHS.match(values[0]):
        with suppress(ValueError, TypeError):
            return _by_day_and_month(values)
    return values


def _by_day_and_month(values: Any) -> Any:
    """Return text such as "31/12/2025" as dates, by the place of numbers above 12."""
    # Here, because frames do not need it: whoever has one has imported pandas.
    import pandas

    matches = map(_DAYS_AND_MONTHS.match, values)
    numbers = np.asarray([match.groups() for match in matches if match], int)
    is_day = numbers.max(0) > 12
    if len(numbers) < len(values) or is_day.sum() != 1:
        return values
    return pandas.to_datetime(values, dayfirst=bool(is_day[0]))


def _as_index(table: Any, label: Any) -> Any:
    if label in table.columns:
        return table[[label]].set_index(label).index
    return table.index.get_level_values(label)


_DATES = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}|\d{1,2}:\d{2}")
_DAYS_AND_MONTHS = re.compile(r"(\d{1,2})[-/.](\d{1,2})[-/.]\d{4}")


def _numbers(table: Any, label: Any) -> np.ndarray:
    values = labels_of(table, label)
    return np.asarray(getattr(values, "asi8", values))
