"""Groups of rows that depend on each other, and rows that repeat others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dissociation._core.checks import fail, fail_kind, is_traced, warn
from dissociation._core.rounding_ties import ROUNDINGS

NEAR = ROUNDINGS * float(np.finfo(np.float32).eps)
"""Difference of entries up to which rows repeat each other.

The unit is the largest entry of a row about the mean.
"""


def group_numbers(groups: Any, number: int, *, repeats: int = 1, each: int = 1) -> np.ndarray:
    """Return the group of each row, numbered from 0 in the order of rows, [number].

    Labels are integers or text, one per row, or one per sample of `each` rows. The rows are
    `repeats` times the same samples.
    """
    num_samples = number // each
    requirement = f"be {num_samples} integers or texts, the label of each sample"
    if is_traced(groups):
        fail_kind("groups", f"{requirement}, known when the program is traced", "a traced value")
    labels = np.asarray(groups)
    if labels.shape != (num_samples,):
        fail("groups", requirement, f"shape {labels.shape}")
    if labels.dtype.kind not in "biuUS":
        for label in labels.tolist():
            if not isinstance(label, str | int):
                fail_kind("groups", requirement, f"{label!r} of type {type(label).__name__}")

    _, first, numbers = np.unique(labels.astype(str), return_index=True, return_inverse=True)
    rank_of_label = np.argsort(np.argsort(first))
    numbers = rank_of_label[numbers].reshape(-1)
    if (numbers.reshape(repeats, -1) != numbers[: num_samples // repeats]).any():
        requirement = f"be the same in all {repeats} repeats of the samples"
        fail("groups", requirement, "a sample of two groups")
    return np.repeat(numbers, each)


def one_per_group(numbers: np.ndarray, max_choices: int) -> np.ndarray:
    """Return up to `max_choices` choices of one row of each group, in turn, [choices, groups]."""
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers)
    starts = np.cumsum(sizes) - sizes
    choices = np.arange(min(max_choices, sizes.max()))
    return order[starts[None] + choices[:, None] % sizes[None]]


def num_distinct(arrays: Sequence[np.ndarray]) -> int:
    """Return the number of rows of arrays [n, ...] that repeat no earlier row in all arrays."""
    number = len(arrays[0])
    flat = [array.reshape(number, -1) for array in arrays]
    # Single columns of many rows come close by chance.
    tolerance = 0.0
    if sum(array.shape[1] for array in flat) > 3:
        tolerance = NEAR

    rows = np.arange(number)
    runs = np.zeros(number, int)
    for array in flat:
        if not len(rows):
            break
        if len(rows) != number:
            array = array[rows]
        is_repeat, runs = _runs(array, runs, tolerance)
        rows = rows[is_repeat]
        runs = runs[is_repeat]
    return number - len(rows) + len(np.unique(runs))


def _runs(
    features: np.ndarray, runs: np.ndarray, tolerance: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return True for rows that repeat others of their run, and the numbers of finer runs.

    A run is a set of rows that may be equal: it is cut where random projections lie apart, and
    loses the rows that are unlike its first.
    """
    number, width = features.shape
    features = features.astype(np.result_type(features.dtype, np.float32), copy=False)
    sample = features[:: -(-number // 100)]
    features = features - np.median(sample, 0)  # a mean would follow a single large row
    sizes = np.maximum(features.max(1), -features.min(1))

    # Cut runs where random projections of rows lie apart.
    rounding = 8 * float(np.finfo(features.dtype).eps)
    # Terms of random signs add up to some roots of their number.
    reach = 8 * width**0.5 * (tolerance + rounding) * sizes
    for draw in range(2):
        factors = 1.0 - np.random.Philox(key=3 + draw).random_raw(width) / 2.0**63
        # The threads of NumPy's library for products would wait for work on the cores of the
        # measure that follows.
        projections = np.einsum("ij,j->i", features, factors.astype(features.dtype))
        order = np.lexsort((projections, runs))
        sorted_reach = reach[order]
        gap_limits = np.maximum(sorted_reach[1:], sorted_reach[:-1])
        is_apart = np.diff(projections[order]) > gap_limits
        is_new_run = np.diff(runs[order]) != 0
        is_start = np.append(True, is_apart | is_new_run)
        runs = np.empty(number, int)
        runs[order] = np.cumsum(is_start) - 1

    # Give rows that differ from the first row of their run a run of their own.
    is_repeat = np.bincount(runs)[runs] > 1
    _, first_of_run = np.unique(runs, return_index=True)
    rows = np.flatnonzero(is_repeat)
    first = first_of_run[runs][is_repeat]
    distances = np.abs(features[rows] - features[first]).max(1)
    is_apart = distances > tolerance * np.maximum(sizes[rows], sizes[first])
    rows_apart = rows[is_apart]
    runs[rows_apart] = number + rows_apart
    return np.bincount(runs)[runs] > 1, runs


def _persistence(array: np.ndarray) -> float:
    """Return the largest correlation of a column with itself one row earlier, 0 within chance."""
    columns = array.reshape(len(array), -1).astype(float)
    columns = columns - columns.mean(0)
    squares = (columns**2).sum(0)
    products = (columns[1:] * columns[:-1]).sum(0)
    largest = (products / np.where(squares > 0, squares, 1.0)).max()
    chance = (4 + np.sqrt(2 * np.log(columns.shape[1]))) / len(array) ** 0.5
    if largest > chance:
        return float(largest)
    return 0.0


def warn_in_time(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Warn of known arrays [n, ...] whose rows all depend on the row before."""
    if any(map(is_traced, arrays)):
        return
    factor = np.prod([_persistence(np.asarray(array)) for array in arrays])
    # The variance of a mean of products rises by (1 + r s) / (1 - r s).
    if factor > 0.1:
        quoted = " and ".join(f"`{name}`" for name in names)
        warn(
            f"rows of {quoted} resemble the rows before them. Of a time series they are not "
            "independent, so that the "
            "estimate and its error are wrong: take rows that are a few correlation times apart. "
            "Independent rows that "
            "were sorted by a value lose nothing.",
            gates=2,
        )


def warn_repeated(arrays: Sequence[Any], effect: str, *, repeats: int = 1, each: int = 1) -> None:
    """Warn of known samples that repeat others in all arrays [n, ...].

    The rows are `repeats` times the same samples, of `each` rows.
    """
    if any(map(is_traced, arrays)):
        return
    samples = []
    for array in arrays:
        num_samples = len(array) // repeats // each
        repeated = np.asarray(array).reshape(repeats, num_samples, -1)
        samples.append(repeated.swapaxes(0, 1))
    num_all = len(samples[0])
    num_unique = num_distinct(samples)
    if num_unique < num_all:
        warn(
            f"{num_unique} of {num_all} samples are distinct: the others repeat them up to "
            "rounding. If they are copies, "
            f"{effect}: pass `groups`, the label of each sample's original, or drop the copies.",
            gates=2,
        )
