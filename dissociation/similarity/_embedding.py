"""Multidimensional scaling, points whose distances approximate given dissimilarities."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
    """Return principal coordinates, leading eigenvectors of -H D^2 H / 2, exact for Euclidean distances in `num_dims`.

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
    """Return points of least stress by majorisation, Z <- B(Z) Z / n, in which no step increases the stress.

    B_ij = -d_ij / |z_i - z_j| off the diagonal, with rows of sum zero. It returns the best result
    from the classical solution and, with a key, from random points.

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
    limit, starts = (
        check_count("max_steps", max_steps, minimum=1),
        check_count("num_starts", num_starts, minimum=1),
    )
    return _embedded(table, key, rtol, limit, num_dims=count, num_starts=starts)


def _checked(distances: Array | np.ndarray, num_dims: int) -> tuple[Array, int]:
    """Return the checked distances and number of dimensions."""
    count = check_count("num_dims", num_dims, minimum=1)
    if count >= distances.shape[0]:
        fail("num_dims", f"be below the number of points ({distances.shape[0]})", num_dims)
    if not is_traced(distances):
        check_finite("distances", distances)
        known = np.asarray(distances)
        slack = 1e-3 * np.abs(known).max()
        uneven = (known < 0) | (np.abs(known - known.T) > slack)
        wrong = np.where(np.eye(len(known), dtype=bool), np.abs(known) > slack, uneven)
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            got = (
                f"{known[row, column]:.4g} at ({row}, {column}), and {known[column, row]:.4g} "
                f"at ({column}, {row})"
            )
            fail("distances", "be symmetric, non-negative and zero on the diagonal", got)
    return to_device(distances), count


def _classical(distances: Array, num_dims: int) -> Array:
    matrix, undefined = finite_part(-0.5 * double_centred(distances**2))
    values, vectors = jnp.linalg.eigh(matrix)
    leading = jnp.maximum(values[::-1][:num_dims], 0.0)
    return vectors[:, ::-1][:, :num_dims] * jnp.sqrt(leading)[None] + undefined


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
    distances = distances * (1 - jnp.eye(distances.shape[0], dtype=distances.dtype))
    # Stress has local minima. The classical solution is a good start, and random ones may find a
    # better minimum.
    starts = _classical(distances, num_dims)[None]
    if key is not None:
        size = jnp.sqrt(jnp.mean(distances**2))
        draws = jax.random.normal(key, (num_starts, *starts.shape[1:]), starts.dtype)
        starts = jnp.concatenate([starts, size * draws])

    def spread(points: Array) -> tuple[Array, Array]:
        """Return distances and the stress."""
        apart = root(jnp.sum((points[:, None] - points[None]) ** 2, -1))
        return apart, 0.5 * jnp.sum((distances - apart) ** 2)

    def goes_on(carry: tuple[Array, ...]) -> Array:
        count, _, before, now = carry
        return (count < max_steps) & (before - now > rtol * now)

    def step(carry: tuple[Array, ...]) -> tuple[Array, ...]:
        count, points, _, now = carry
        apart, _ = spread(points)
        # Points that coincide pull in no direction.
        ratio = jnp.where(apart > 0, distances / jnp.where(apart > 0, apart, 1.0), 0.0)
        points = (jnp.sum(ratio, 1)[:, None] * points - product(ratio, points)) / distances.shape[0]
        return count + 1, points, now, spread(points)[1]

    def run(points: Array) -> tuple[Array, ...]:
        now = spread(points)[1]
        return jax.lax.while_loop(
            goes_on, step, (jnp.zeros((), int), points, jnp.full_like(now, jnp.inf), now)
        )

    counts, points, _, stresses = jax.lax.map(run, starts)
    best = jnp.argmin(stresses)
    points = points[best] - jnp.mean(points[best], 0)[None]
    least = spread(points)[1]
    return Embedding(
        points * unit,
        least * unit * unit,
        jnp.sqrt(least / (0.5 * jnp.sum(distances**2))),
        counts[best],
    )
