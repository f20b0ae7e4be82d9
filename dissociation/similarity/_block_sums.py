"""Linear CKA of arrays that exceed the memory, with intervals, from sums over blocks of samples."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from dissociation._core.rounding_ties import ROUNDINGS
from dissociation.similarity._streaming import _point_of as point_of

Sums = Float[np.ndarray, "blocks u v"]
"""Sums over the samples of each block of u v^T, u = (1, x, |x|^2) and v = (1, y, |y|^2)."""


class Products(NamedTuple):
    """Numbers of a pair of representations, of all samples and without each block.

    Attributes:
        hsic: Inner products of matrices over samples, [1 + blocks].
        size: Largest terms of these, whose rounding they carry, [1 + blocks].
        chance: Mean of `hsic` over orders of samples, [1 + blocks].
    """

    hsic: Float[np.ndarray, " choices"]
    size: Float[np.ndarray, " choices"]
    chance: Float[np.ndarray, " choices"]


def stream_block_sums(
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    block_of_row: Int[np.ndarray, " n"],
    num_blocks: int,
) -> Sums:
    """Return the sums of each block of samples about the means of the first batch.

    Products have the dtype of the arrays, and are added in float64.

    Args:
        batches: Arrays [m, p] and [m, q] of consecutive samples.
        block_of_row: Block of each sample.
        num_blocks: Number of blocks.
    """
    points: list[np.ndarray] = []
    sums = np.zeros(0)
    start = 0
    for x, y in batches:
        if not points:
            points = [point_of(x), point_of(y)]
            sums = np.zeros((num_blocks, x.shape[1] + 2, y.shape[1] + 2))
        blocks = block_of_row[start : start + len(x)]
        start += len(x)
        factors = [_with_lengths(x - points[0])]
        factors.append(factors[0] if y is x else _with_lengths(y - points[1]))
        order = np.argsort(blocks, kind="stable")
        ends = np.searchsorted(blocks[order], np.arange(num_blocks + 1))
        for block in range(num_blocks):
            rows = order[ends[block] : ends[block + 1]]
            u = factors[0][rows]
            v = u if y is x else factors[1][rows]
            sums[block] += u.T @ v
    return sums


def _with_lengths(x: np.ndarray) -> np.ndarray:
    """Return (1, x, |x|^2) of each row."""
    lengths = np.einsum("np,np->n", x, x)
    return np.concatenate([np.ones_like(x[:, :1]), x, lengths[:, None]], 1)


def products(sums: Sums, *, is_debiased: bool) -> Products:
    """Return inner products of matrices over all samples, and over those outside of each block."""
    total = sums.sum(0)
    terms = [_terms(total, is_debiased)]
    terms += [_terms(total - block, is_debiased) for block in sums]
    return Products(*np.transpose(terms))


def _terms(sums: Float[np.ndarray, "u v"], is_debiased: bool) -> tuple[float, float, float]:
    """Return the entries of `Products` of one choice of samples.

    With x and y about their means,

        HSIC = |sum x y^T|^2,   or less n / (n - 2) sum |x|^2 |y|^2, and with
        sum |x|^2 sum |y|^2 / ((n - 1)(n - 2)).
    """
    n = sums[0, 0]
    mean_x = sums[1:-1, 0] / n
    mean_y = sums[0, 1:-1] / n
    crossed = sums[1:-1, 1:-1] - n * np.outer(mean_x, mean_y)
    square = np.vdot(crossed, crossed)
    trace_x = sums[-1, 0] - n * mean_x @ mean_x
    trace_y = sums[0, -1] - n * mean_y @ mean_y
    if not is_debiased:
        return square, square, trace_x * trace_y / (n - 1)

    # |x - a|^2 |y - b|^2 = (|x|^2 - 2 a x + a^2)(|y|^2 - 2 b y + b^2), summed.
    of_x = np.concatenate([[mean_x @ mean_x], -2 * mean_x, [1.0]])
    of_y = np.concatenate([[mean_y @ mean_y], -2 * mean_y, [1.0]])
    quartic = of_x @ sums @ of_y
    hsic = square - n / (n - 2) * quartic + trace_x * trace_y / ((n - 1) * (n - 2))
    return hsic, square, 0.0


def cka(crossed: Products, first: Products, second: Products, *, is_debiased: bool) -> Products:
    """Return the measure and its chance value in place of inner products; NaN where undefined.

    Args:
        crossed: Inner products of both representations.
        first: Those of the first one with itself.
        second: Those of the second one with itself.
        is_debiased: True for the debiased measure.
    """
    norms = np.ones_like(crossed.hsic)
    for square in (first, second):
        rounding = ROUNDINGS * np.finfo(np.float32).eps * square.size
        is_defined = square.hsic > rounding
        norms = norms * np.sqrt(np.where(is_defined, square.hsic, np.nan))
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = crossed.hsic / norms
        chance = crossed.chance / norms
    if is_debiased:
        ratio = np.clip(ratio, -1.0, 1.0)
    return Products(ratio, crossed.size, chance)
