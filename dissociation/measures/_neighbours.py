"""Distances to the nearest neighbours, of all samples and within interleaved parts."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import check_count, fail

# Largest number of distances per group in the search for the smallest, a power of two.
_MULTIPLE = 32
# Largest number of interleaved parts, whose scatter gives the standard error.
_PARTS = 16


def check_neighbours(num_neighbours: int, number: int) -> None:
    """Raise unless the number of neighbours is below the number of samples."""
    if check_count("num_neighbours", num_neighbours, minimum=1) >= number:
        fail("num_neighbours", f"be below the number of samples ({number})", num_neighbours)


def squared(a: Array, b: Array) -> Array:
    """Return |a_i - b_j|^2, summed coordinate by coordinate."""
    # Products would lose the digits of small distances, and all differences at once would take an
    # array [i, j, d].
    total = jnp.zeros((a.shape[0], b.shape[0]), a.dtype)
    for index in range(a.shape[1]):
        total = total + (a[:, index, None] - b[None, :, index]) ** 2
    return total


def num_parts(number: int, count: int) -> int:
    """Return an even number of interleaved parts of at least 4 k samples each, or 1."""
    return max(min(_PARTS, number // (4 * count)) // 2 * 2, 1)


def strides(groups: int) -> tuple[int, ...]:
    """Return the strides of all samples, halves, and parts. Sample i belongs to part i % stride."""
    return (1, 2, groups) if groups > 2 else (1, 2)[:groups]


def part_sizes(number: int, groups: int, dtype: jnp.dtype) -> Array:
    """Return the sizes of the parts of every sample, [levels, n]."""
    index = np.arange(number)
    return jnp.asarray(
        [(number - 1 - index % stride) // stride + 1 for stride in strides(groups)], dtype
    )


def smallest(
    points: Array,
    labels: Array | None,
    count: int,
    block: int,
    distance: Callable[[Array, Array], Array],
    groups: int,
) -> Array:
    """Return the `count` smallest distances of every point to others of its label or inf, [levels, n, count]."""
    number = points.shape[0]
    longest = -(-number // groups)
    blocks = -(-longest // check_count("block", block, minimum=1))
    # Points are ordered by group, with groups of the first half first, so that halves and groups
    # are slices.
    rows = _by_group(number, groups, -(-longest // blocks) * blocks).reshape(groups * blocks, -1)
    columns = _by_group(number, groups, -(-max(longest, count) // _MULTIPLE) * _MULTIPLE)
    # Padding is so far away that its distances are infinite and its differences finite: 0 times
    # infinity is NaN.
    far = 2 * float(jnp.finfo(points.dtype).max) ** 0.5
    others = jnp.where(columns[:, None] < number, points[columns % number], far)
    # Index of the half, and of the group, of each block of rows.
    places = [
        np.repeat(np.arange(stride), rows.shape[0] // stride) for stride in strides(groups)[1:]
    ]

    def some(part: tuple[Array, Array, list[Array]]) -> Array:
        row, index, place = part
        allowed = row[:, None] != columns[None]
        if labels is not None:
            allowed = allowed & (labels[index][:, None] == labels[columns % number][None])
        values = jnp.where(allowed, distance(points[index], others), jnp.inf)
        levels = [_least(values, count)]
        for stride, which in zip(strides(groups)[1:], place, strict=True):
            own = values.reshape(row.shape[0], stride, -1)
            levels.append(
                _least(jax.lax.dynamic_index_in_dim(own, which, 1, keepdims=False), count)
            )
        return jnp.stack(levels)

    squares = jax.lax.map(some, jax.tree.map(jnp.asarray, (rows, rows % number, places)))
    squares = squares.swapaxes(0, 1).reshape(squares.shape[1], -1, count)
    return squares[:, np.argsort(rows.reshape(-1), kind="stable")[:number]]


def _by_group(number: int, groups: int, width: int) -> np.ndarray:
    """Return indices of samples by group i % groups, even groups first, each padded to `width` with `number`."""
    first = np.concatenate([np.arange(groups)[half::2] for half in range(2)])
    return np.minimum(first[:, None] + groups * np.arange(width)[None], number).reshape(-1)


def _least(values: Array, count: int) -> Array:
    """Return the `count` smallest entries of every row, rising. The length of rows is a multiple of `_MULTIPLE`."""
    rows, columns = values.shape
    length = min(1 << int(math.log2(max(columns / count, 1)) / 2), _MULTIPLE)
    if columns // length > count:
        grouped = values.reshape(rows, -1, length)
        # The smallest entries lie in the groups with the smallest minima, so the sort has few
        # candidates.
        chosen = jax.lax.top_k(-jnp.min(grouped, 2), count)[1]
        values = jnp.take_along_axis(grouped, chosen[:, :, None], 1).reshape(rows, -1)
    return -jax.lax.top_k(-values, count)[0]


def in_blocks(function: Callable[..., Any], arrays: tuple[Array, ...], block: int) -> Any:
    """Return `function` of `arrays`, applied to blocks of rows of one size."""
    number = arrays[0].shape[0]
    size = min(block, number)
    padded = (jnp.pad(part, ((0, -number % size), *((0, 0),) * (part.ndim - 1))) for part in arrays)
    found = jax.lax.map(function, tuple(part.reshape(-1, size, *part.shape[1:]) for part in padded))
    return jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:])[:number], found)


def closer(points: Array, radius: Array, block: int, groups: int) -> Array:
    """Return the number of other points strictly within each point's squared radius, [levels, n]."""
    index = jnp.arange(points.shape[0])
    rounding = 8 * jnp.finfo(points.dtype).eps * jnp.max(jnp.abs(points))
    # The point that defines a radius lies at it, and its distance may be rounded differently here.
    radius = jnp.maximum(jnp.sqrt(radius) - rounding, 0.0) ** 2

    def some(part: tuple[Array, ...]) -> Array:
        point, limits, row = part
        squares = jnp.where(row[:, None] != index[None], squared(point, points), jnp.inf)
        levels = [
            jnp.sum(
                (squares < limits[:, level, None])
                & (row[:, None] % stride == index[None] % stride),
                1,
            )
            for level, stride in enumerate(strides(groups))
        ]
        return jnp.stack(levels, 1)

    return in_blocks(some, (points, radius.T, index), block).T
