"""Groups of rows that depend on each other, and rows that repeat others."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dissociation._core.checks import fail, fail_kind, is_traced, warn
from dissociation._core.ties import ROUNDINGS

NEAR = ROUNDINGS * float(np.finfo(np.float32).eps)
"""Difference of entries, beside the largest of a row about the mean, up to which rows repeat each other."""


def group_numbers(groups: Any, number: int, *, repeats: int = 1, each: int = 1) -> np.ndarray:
    """Return the group of each row, numbered from 0 in the order of rows, [number].

    Labels are integers or text, one per row, or one per sample of `each` rows. The rows are
    `repeats` times the same samples.
    """
    count = number // each
    wanted = f"be {count} integers or texts, the label of each sample"
    if is_traced(groups):
        fail_kind("groups", f"{wanted}, known when the program is traced", "a traced value")
    labels = np.asarray(groups)
    if labels.shape != (count,):
        fail("groups", wanted, f"shape {labels.shape}")
    for label in labels.tolist() if labels.dtype.kind not in "biuUS" else ():
        if not isinstance(label, str | int):
            fail_kind("groups", wanted, f"{label!r} of type {type(label).__name__}")
    _, first, numbers = np.unique(labels.astype(str), return_index=True, return_inverse=True)
    numbers = np.argsort(np.argsort(first))[numbers].reshape(-1)
    if (numbers.reshape(repeats, -1) != numbers[: count // repeats]).any():
        fail(
            "groups",
            f"be the same in all {repeats} repeats of the samples",
            "a sample of two groups",
        )
    return np.repeat(numbers, each)


def one_per_group(numbers: np.ndarray, most: int) -> np.ndarray:
    """Return up to `most` choices of one row of each group, in turn, [choices, groups]."""
    order = np.argsort(numbers, kind="stable")
    sizes = np.bincount(numbers)
    starts = np.cumsum(sizes) - sizes
    draws = np.arange(min(most, sizes.max()))
    return order[starts[None] + draws[:, None] % sizes[None]]


def num_distinct(arrays: Sequence[np.ndarray]) -> int:
    """Return the number of rows of arrays [n, ...] that do not repeat an earlier row in all arrays."""
    number = len(arrays[0])
    flat = [array.reshape(number, -1) for array in arrays]
    # Single columns of many rows come close by chance.
    near = NEAR if sum(array.shape[1] for array in flat) > 3 else 0.0
    rows = np.arange(number)
    runs = np.zeros(number, int)
    for array in flat:
        if len(rows):
            kept, runs = _runs(array if len(rows) == number else array[rows], runs, near)
            rows, runs = rows[kept], runs[kept]
    return number - len(rows) + len(np.unique(runs))


def _runs(features: np.ndarray, runs: np.ndarray, near: float) -> tuple[np.ndarray, np.ndarray]:
    """Return True for rows that repeat others of their run, and the numbers of finer runs."""
    number, width = features.shape
    features = features.astype(np.result_type(features.dtype, np.float32), copy=False)
    features = features - np.median(
        features[:: -(-number // 100)], 0
    )  # a mean would follow a single large row
    sizes = np.maximum(features.max(1), -features.min(1))
    rounding = 8 * float(np.finfo(features.dtype).eps)
    # Terms of random signs add up to some roots of their number.
    reach = 8 * width**0.5 * (near + rounding) * sizes
    for draw in range(2):
        factors = 1.0 - np.random.Philox(key=3 + draw).random_raw(width) / 2.0**63
        # The threads of NumPy's library for products would wait for work on the cores of the
        # measure that follows.
        places = np.einsum("ij,j->i", features, factors.astype(features.dtype))
        order = np.lexsort((places, runs))
        far = np.diff(places[order]) > np.maximum(reach[order][1:], reach[order][:-1])
        starts = np.append(True, far | (np.diff(runs[order]) != 0))
        runs = np.empty(number, int)
        runs[order] = np.cumsum(starts) - 1
    kept = np.bincount(runs)[runs] > 1
    heads = np.unique(runs, return_index=True)[1][runs]
    at, first = np.flatnonzero(kept), heads[kept]
    apart = np.abs(features[at] - features[first]).max(1) > near * np.maximum(
        sizes[at], sizes[first]
    )
    runs[at[apart]] = number + at[apart]
    return np.bincount(runs)[runs] > 1, runs


def _persistence(array: np.ndarray) -> float:
    """Return the largest correlation of a column of [n, ...] with itself one row earlier, 0 within chance."""
    columns = array.reshape(len(array), -1).astype(float)
    columns = columns - columns.mean(0)
    squares = (columns**2).sum(0)
    found = (columns[1:] * columns[:-1]).sum(0) / np.where(squares > 0, squares, 1.0)
    chance = (4 + np.sqrt(2 * np.log(columns.shape[1]))) / len(array) ** 0.5
    return float(found.max()) if found.max() > chance else 0.0


def warn_in_time(names: Sequence[str], arrays: Sequence[Any]) -> None:
    """Warn of known arrays [n, ...] whose rows all depend on the row before."""
    if any(map(is_traced, arrays)):
        return
    factor = np.prod([_persistence(np.asarray(array)) for array in arrays])
    # The variance of a mean of products rises by (1 + r s) / (1 - r s).
    if factor > 0.1:
        both = " and ".join(f"`{name}`" for name in names)
        warn(
            f"rows of {both} resemble the rows before them. Of a time series they are not "
            "independent, so that the "
            "estimate and its error are wrong: take rows that are a few correlation times apart. "
            "Independent rows that "
            "were sorted by a value lose nothing.",
            gates=2,
        )


def warn_repeated(arrays: Sequence[Any], effect: str, *, repeats: int = 1, each: int = 1) -> None:
    """Warn of known samples that repeat others in all arrays [n, ...], `repeats` times `each` rows of a sample."""
    if any(map(is_traced, arrays)):
        return
    samples = [
        np.asarray(array).reshape(repeats, len(array) // repeats // each, -1).swapaxes(0, 1)
        for array in arrays
    ]
    number, distinct = len(samples[0]), num_distinct(samples)
    if distinct < number:
        warn(
            f"{distinct} of {number} samples are distinct: the others repeat them up to "
            "rounding. If they are copies, "
            f"{effect}: pass `groups`, the label of each sample's original, or drop the copies.",
            gates=2,
        )
