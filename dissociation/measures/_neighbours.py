"""Distances to the nearest neighbours, of all samples and within interleaved groups."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_count, fail

# Largest number of distances per row segment in the search for the smallest, a power of two.
_MULTIPLE = 32
# Largest number of interleaved groups, whose scatter gives the standard error.
_GROUPS = 16


def check_neighbours(num_neighbours: int, number: int) -> None:
    """Raise unless the number of neighbours is below the number of samples."""
    check_count("num_neighbours", num_neighbours, minimum=1)
    if num_neighbours >= number:
        fail("num_neighbours", f"be below the number of samples ({number})", num_neighbours)


def squared(a: Array, b: Array) -> Array:
    """Return |a_i - b_j|^2, summed coordinate by coordinate."""
    # Products would lose the digits of small distances, and all differences at once would take an
    # array [i, j, d].
    total = jnp.zeros((a.shape[0], b.shape[0]), a.dtype)
    for i in range(a.shape[1]):
        total = total + (a[:, i, None] - b[None, :, i]) ** 2
    return total


def num_parts(number: int, count: int) -> int:
    """Return an even number of interleaved groups of at least 4 k samples each, or 1."""
    num_groups = min(_GROUPS, number // (4 * count))
    return max(num_groups // 2 * 2, 1)


def strides(groups: int) -> tuple[int, ...]:
    """Return the strides of all samples, halves and groups.

    Sample i belongs to group i % stride.
    """
    if groups > 2:
        return (1, 2, groups)
    return (1, 2)[:groups]


def part_sizes(number: int, groups: int, dtype: jnp.dtype) -> Array:
    """Return the size of the group of every sample, [levels, n]."""
    index = np.arange(number)
    sizes = []
    for stride in strides(groups):
        last = number - 1 - index % stride
        sizes.append(last // stride + 1)
    return jnp.asarray(sizes, dtype)


def smallest(
    points: Array,
    labels: Array | None,
    count: int,
    block: int,
    distance: Callable[[Array, Array], Array],
    groups: int,
) -> Array:
    """Return the `count` smallest distances of every point to the others, [levels, n, count].

    Distances to points of other labels are infinite.
    """
    number = len(points)
    block = check_count("block", block, minimum=1)
    longest = -(-number // groups)
    num_blocks = -(-longest // block)

    # Points are ordered by group, with groups of the first half first, so that halves and groups
    # are slices.
    height = -(-longest // num_blocks)
    rows = _by_group(number, groups, height * num_blocks)
    rows = rows.reshape(groups * num_blocks, -1)
    width = -(-max(longest, count) // _MULTIPLE)
    columns = _by_group(number, groups, width * _MULTIPLE)
    column_index = columns % number

    # Padding is so far away that its distances are infinite and its differences finite: 0 times
    # infinity is NaN.
    far = 2 * float(jnp.finfo(points.dtype).max) ** 0.5
    neighbours = jnp.where(columns[:, None] < number, points[column_index], far)

    # Index of the half, and of the group, of each block of rows.
    subsets = []
    for stride in strides(groups)[1:]:
        subsets.append(np.repeat(np.arange(stride), len(rows) // stride))

    def of_block(row_block):
        row, index, subset = row_block
        is_allowed = row[:, None] != columns[None]
        if labels is not None:
            has_label = labels[index][:, None] == labels[column_index][None]
            is_allowed = is_allowed & has_label
        distances = jnp.where(is_allowed, distance(points[index], neighbours), jnp.inf)

        levels = [_smallest_of_rows(distances, count)]
        for stride, i in zip(strides(groups)[1:], subset, strict=True):
            split = distances.reshape(len(row), stride, -1)
            in_subset = lax.dynamic_index_in_dim(split, i, 1, keepdims=False)
            levels.append(_smallest_of_rows(in_subset, count))
        return jnp.stack(levels)

    blocks = jax.tree.map(jnp.asarray, (rows, rows % number, subsets))
    squares = lax.map(of_block, blocks)
    squares = squares.swapaxes(0, 1)
    squares = squares.reshape(len(squares), -1, count)
    order = np.argsort(rows.reshape(-1), kind="stable")
    return squares[:, order[:number]]


def _by_group(number: int, groups: int, width: int) -> np.ndarray:
    """Return indices of samples by group i % groups, with even groups first.

    Every group is padded to `width` with `number`.
    """
    group_index = np.arange(groups)
    first = np.concatenate([group_index[::2], group_index[1::2]])
    index = first[:, None] + groups * np.arange(width)[None]
    return np.minimum(index, number).reshape(-1)


def _smallest_of_rows(values: Array, count: int) -> Array:
    """Return the `count` smallest entries of every row, rising.

    The length of rows is a multiple of `_MULTIPLE`.
    """
    num_rows, num_columns = values.shape
    exponent = int(math.log2(max(num_columns / count, 1)) / 2)
    length = min(1 << exponent, _MULTIPLE)
    if num_columns // length > count:
        segments = values.reshape(num_rows, -1, length)
        # The smallest entries lie in the segments with the smallest minima, so the sort has few
        # candidates.
        _, chosen = lax.top_k(-jnp.min(segments, 2), count)
        candidates = jnp.take_along_axis(segments, chosen[:, :, None], 1)
        values = candidates.reshape(num_rows, -1)
    negative, _ = lax.top_k(-values, count)
    return -negative


def in_blocks(function: Callable[..., Any], arrays: tuple[Array, ...], block: int) -> Any:
    """Return `function` of `arrays`, applied to blocks of rows of one size."""
    number = len(arrays[0])
    size = min(block, number)
    num_padding = -number % size
    blocks = []
    for array in arrays:
        padding = ((0, num_padding), *((0, 0),) * (array.ndim - 1))
        padded = jnp.pad(array, padding)
        blocks.append(padded.reshape(-1, size, *array.shape[1:]))

    def joined(leaf):
        rows = leaf.reshape(-1, *leaf.shape[2:])
        return rows[:number]

    outputs = lax.map(function, tuple(blocks))
    return jax.tree.map(joined, outputs)


def closer(points: Array, radius: Array, block: int, groups: int) -> Array:
    """Return the number of points strictly within each point's squared radius, [levels, n]."""
    index = jnp.arange(len(points))
    eps = jnp.finfo(points.dtype).eps
    rounding = 8 * eps * jnp.max(jnp.abs(points))
    # The point that defines a radius lies at it, and its distance may be rounded differently here.
    radius = jnp.maximum(jnp.sqrt(radius) - rounding, 0.0) ** 2

    def of_block(row_block):
        point, limits, row = row_block
        is_other = row[:, None] != index[None]
        squares = jnp.where(is_other, squared(point, points), jnp.inf)
        levels = []
        for level, stride in enumerate(strides(groups)):
            is_within = squares < limits[:, level, None]
            is_in_group = row[:, None] % stride == index[None] % stride
            levels.append(jnp.sum(is_within & is_in_group, 1))
        return jnp.stack(levels, 1)

    return in_blocks(of_block, (points, radius.T, index), block).T
