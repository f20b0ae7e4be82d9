"""Multidimensional scaling, points whose distances approximate given dissimilarities."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_finite, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.distances import root
from dissociation._core.linalg import finite_part, product
from dissociation._core.results import Result
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.similarity._base import scaled
from dissociation.similarity._kernels import double_centred

Distances = Float[Array | np.ndarray, "n n"]


class Embedding(Result):
    """Points with approximately the given distances.

    Attributes:
        points: Points of mean zero, [n, dimensions].
        stress: sum over pairs i < j of (d_ij - |z_i - z_j|)^2.
        relative_stress: Kruskal's stress-1, sqrt(stress / sum d_ij^2), good below 0.1.
        steps: Number of iterations; 0 for the classical solution.
    """

    points: Float[Array, "n dimensions"]
    stress: Float[Array, ""]
    relative_stress: Float[Array, ""]
    steps: Array


@validated
def classical_mds(distances: Distances, *, num_dims: int = 2) -> Embedding:
    """Return principal coordinates, the leading eigenvectors of -H D^2 H / 2.

    They are exact for Euclidean distances in `num_dims` dimensions.

    Args:
        distances: Symmetric distances, zero on the diagonal, [n, n].
        num_dims: Dimensions, below n.

    Returns:
        Points with axes in order of decreasing variance, of arbitrary sign. Directions of negative
        eigenvalues are zero.

    Raises:
        ValueError: If distances are not square, symmetric, finite and non-negative, or `num_dims`
            is out of range.

    References:
        Torgerson (1952), Multidimensional scaling I: theory and method; Gower (1966).
    """
    table, count = _checked(distances, num_dims)
    return _embedded(table, None, 0.0, 0, num_dims=count, num_starts=0)


@validated
def smacof(
    distances: Distances,
    *,
    num_dims: int = 2,
    key: PRNGKey | None = None,
    num_starts: int = 4,
    max_steps: int = 1000,
    rtol: float = 1e-7,
) -> Embedding:
    """Return points of least stress by majorisation, Z <- B(Z) Z / n.

    No step increases the stress. B_ij = -d_ij / |z_i - z_j| off the diagonal, with rows of sum
    zero. It returns the best result from the classical solution and, with a key, from random
    points.

    Args:
        distances: Symmetric distances, zero on the diagonal, [n, n].
        num_dims: Dimensions, below n.
        key: Random key of the starts; None for the classical solution alone.
        num_starts: Random starts.
        max_steps: Largest number of steps.
        rtol: Relative change of stress at which it stops.

    Returns:
        The points.

    References:
        De Leeuw (1977), Applications of convex analysis to multidimensional scaling; Borg and
        Groenen (2005), chapter 8.
    """
    table, count = _checked(distances, num_dims)
    limit = check_count("max_steps", max_steps, minimum=1)
    starts = check_count("num_starts", num_starts, minimum=1)
    return _embedded(table, key, rtol, limit, num_dims=count, num_starts=starts)


def _checked(distances: Array | np.ndarray, num_dims: int) -> tuple[Array, int]:
    """Return the checked distances and number of dimensions."""
    count = check_count("num_dims", num_dims, minimum=1)
    if count >= len(distances):
        fail("num_dims", f"be below the number of points ({len(distances)})", num_dims)
    if is_traced(distances):
        return to_device(distances), count

    check_finite("distances", distances)
    table = np.asarray(distances)
    slack = 1e-3 * np.abs(table).max()
    is_uneven = (table < 0) | (np.abs(table - table.T) > slack)
    is_diagonal = np.eye(len(table), dtype=bool)
    is_wrong = np.where(is_diagonal, np.abs(table) > slack, is_uneven)
    if is_wrong.any():
        row, column = np.argwhere(is_wrong)[0]
        pair = (
            f"{table[row, column]:.4g} at ({row}, {column}), and {table[column, row]:.4g} "
            f"at ({column}, {row})"
        )
        fail("distances", "be symmetric, non-negative and zero on the diagonal", pair)
    return to_device(distances), count


def _classical(distances: Array, num_dims: int) -> Array:
    """Return principal coordinates, [n, num_dims]."""
    matrix, undefined = finite_part(-0.5 * double_centred(distances**2))
    values, vectors = jnp.linalg.eigh(matrix)
    leading = jnp.maximum(values[::-1][:num_dims], 0.0)
    axes = vectors[:, ::-1][:, :num_dims]
    return axes * jnp.sqrt(leading)[None] + undefined


@partial(jax.jit, static_argnames=("num_dims", "num_starts"))
def _embedded(
    distances: Array,
    key: Any,
    rtol: Array | float,
    max_steps: Array | int,
    *,
    num_dims: int,
    num_starts: int,
) -> Embedding:
    """Return the best points from the classical solution and, with a key, from random points."""
    # Without this unit, squares of distances may overflow or vanish.
    distances, unit = scaled(0.5 * (distances + distances.T))
    diagonal = jnp.eye(len(distances), dtype=distances.dtype)
    distances = distances * (1 - diagonal)
    # Stress has local minima. The classical solution is a good start, and random ones may find a
    # better minimum.
    starts = _classical(distances, num_dims)[None]
    if key is not None:
        size = jnp.sqrt(jnp.mean(distances**2))
        draws = jax.random.normal(key, (num_starts, *starts.shape[1:]), starts.dtype)
        starts = jnp.concatenate([starts, size * draws])

    def spread(points):
        """Return distances of points, and the stress."""
        differences = points[:, None] - points[None]
        lengths = root(jnp.sum(differences**2, -1))
        return lengths, 0.5 * jnp.sum((distances - lengths) ** 2)

    def is_improving(carry):
        count, _, previous, stress = carry
        return (count < max_steps) & (previous - stress > rtol * stress)

    def step(carry):
        count, points, _, previous = carry
        lengths, _ = spread(points)
        # Points that coincide pull in no direction.
        is_apart = lengths > 0
        ratio = jnp.where(is_apart, distances / jnp.where(is_apart, lengths, 1.0), 0.0)
        moved = jnp.sum(ratio, 1)[:, None] * points - product(ratio, points)
        points = moved / len(distances)
        _, stress = spread(points)
        return count + 1, points, previous, stress

    def run(points):
        _, stress = spread(points)
        start = (jnp.zeros((), int), points, jnp.full_like(stress, jnp.inf), stress)
        return lax.while_loop(is_improving, step, start)

    counts, points, _, stresses = lax.map(run, starts)
    best = jnp.argmin(stresses)
    points = points[best] - jnp.mean(points[best], 0)[None]
    _, stress = spread(points)
    total = 0.5 * jnp.sum(distances**2)
    relative_stress = jnp.sqrt(stress / total)
    return Embedding(points * unit, stress * unit * unit, relative_stress, counts[best])
