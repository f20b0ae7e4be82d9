"""Linear CKA of arrays that exceed the memory, with intervals, from sums over blocks of samples."""

from collections.abc import Iterable

import numpy as np

from dissociation._core.rounding_ties import ROUNDINGS
from dissociation.similarity._streaming import augmented, point_of


def stream_block_sums(
    batches: Iterable[tuple[np.ndarray, np.ndarray]], block_of_row: np.ndarray
) -> np.ndarray:
    """Return sums over the samples of each block of u v^T, [blocks, p + 2, q + 2].

    u = (1, x, |x|^2) and v = (1, y, |y|^2) about the means of the first batch. Products have the
    dtype of the arrays, and are added in float64.

    Args:
        batches: Arrays [m, p] and [m, q] of consecutive samples.
        block_of_row: Block of each sample.
    """
    points: list[np.ndarray] = []
    sums = np.zeros(0)
    num_blocks = block_of_row.max() + 1
    start = 0
    for x, y in batches:
        if not points:
            points = [point_of(x), point_of(y)]
            sums = np.zeros((num_blocks, x.shape[1] + 2, y.shape[1] + 2))
        u = augmented([x], points[:1], x.dtype, np)
        v = u if y is x else augmented([y], points[1:], y.dtype, np)
        blocks = block_of_row[start : start + len(x)]
        start += len(x)
        for block in range(num_blocks):
            rows = np.flatnonzero(blocks == block)
            u_rows = u[rows]
            v_rows = u_rows if v is u else v[rows]
            sums[block] += u_rows.T @ v_rows
    return sums


def products(sums: np.ndarray, *, is_debiased: bool) -> np.ndarray:
    """Return numbers of all samples and without each block, [3, 1 + blocks], from sums of blocks.

    They are inner products of matrices over samples, the largest terms of these, whose rounding
    they carry, and their means over orders of samples. With x and y about their means,

        HSIC = |sum x y^T|^2,   or less n / (n - 2) sum |x|^2 |y|^2, and with
        sum |x|^2 sum |y|^2 / ((n - 1)(n - 2)).
    """
    total = sums.sum(0)
    terms = [_terms(total, is_debiased)]
    terms += [_terms(total - block, is_debiased) for block in sums]
    return np.transpose(terms)


def _terms(sums: np.ndarray, is_debiased: bool) -> tuple[float, float, float]:
    """Return the numbers of `products` of one choice of samples."""
    n = sums[0, 0]
    mean_x = sums[1:-1, 0] / n
    mean_y = sums[0, 1:-1] / n
    crossed = sums[1:-1, 1:-1] - n * np.outer(mean_x, mean_y)
    square = np.vdot(crossed, crossed)
    trace_x = sums[-1, 0] - n * mean_x @ mean_x
    trace_y = sums[0, -1] - n * mean_y @ mean_y
    traces = trace_x * trace_y / (n - 1)
    if not is_debiased:
        return square, square, traces
    # |x - a|^2 |y - b|^2 = (|x|^2 - 2 a x + a^2)(|y|^2 - 2 b y + b^2), summed.
    of_x = np.concatenate([[mean_x @ mean_x], -2 * mean_x, [1.0]])
    of_y = np.concatenate([[mean_y @ mean_y], -2 * mean_y, [1.0]])
    quartic = of_x @ sums @ of_y
    return square + (traces - n * quartic) / (n - 2), square, 0.0


def cka(
    crossed: np.ndarray, first: np.ndarray, second: np.ndarray, *, is_debiased: bool
) -> tuple[np.ndarray, float]:
    """Return the measure, [1 + blocks], and its value by chance; NaN where undefined.

    Args:
        crossed: `products` of both representations.
        first: Those of the first one with itself.
        second: Those of the second one with itself.
        is_debiased: True for the debiased measure.
    """
    norms = np.ones_like(crossed[0])
    for hsic, size, _ in (first, second):
        is_defined = hsic > ROUNDINGS * np.finfo(np.float32).eps * size
        norms = norms * np.sqrt(np.where(is_defined, hsic, np.nan))
    ratio = crossed[0] / norms
    if is_debiased:
        ratio = np.clip(ratio, -1.0, 1.0)
    return ratio, crossed[2, 0] / norms[0]
