"""Tests of inner products of matrices over samples against chance, from the null's first three moments."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

from dissociation._core.linalg import product
from dissociation.similarity._base import Prepared

# The cost of moments is the cube of the number of samples.
FEWEST, MOST = 6, 4096
"""Limits of the number of samples for tests by moments."""

LEAST_P_VALUE = 1e-16
"""Smallest p-value from moments. Smaller ones are set to it and printed as "< 1e-16"."""


class Invariants(NamedTuple):
    """Sums over a symmetric matrix over samples, made traceless."""

    trace: Array | np.ndarray  # before
    diagonal2: Array | np.ndarray  # of squares of the diagonal
    all2: Array | np.ndarray  # of squares
    diagonal3: Array | np.ndarray  # of cubes of the diagonal
    all3: Array | np.ndarray  # of cubes
    ends: Array | np.ndarray  # e^T E e, of the matrix E and its diagonal e
    paths: Array | np.ndarray  # e^T diag(E^2)
    cycles: Array | np.ndarray  # tr E^3


def invariants(matrix: Float[Array, "n n"]) -> Invariants:
    """Return the sums over a matrix that determine the null's moments."""
    number = matrix.shape[0]
    trace = jnp.trace(matrix)
    # Without a trace the third moment has few terms.
    matrix = matrix - trace / (number - 1) * (jnp.eye(number, dtype=matrix.dtype) - 1 / number)
    diagonal, square = jnp.diagonal(matrix), product(matrix, matrix)
    return Invariants(
        trace=trace,
        diagonal2=jnp.sum(diagonal**2),
        all2=jnp.sum(matrix**2),
        diagonal3=jnp.sum(diagonal**3),
        all3=jnp.sum(matrix**3),
        ends=diagonal @ product(matrix, diagonal[:, None])[:, 0],
        paths=jnp.sum(diagonal * jnp.diagonal(square)),
        cycles=jnp.sum(square * matrix),
    )


def null_moments(a: Invariants, b: Invariants, number: int) -> tuple[Any, Any, Any]:
    """Return mean, variance and third central moment of <A, P B P^T> over permutations P of n > 5.

    Source: Kazi-Aoual et al. (1995).
    """
    n = float(number)
    a, b = (Invariants(*(np.asarray(part, float) for part in one)) for one in (a, b))
    mean = np.asarray(a.trace * b.trace / (n - 1))
    loose = [n * (n + 1) * one.diagonal2 - 2 * (n - 1) * one.all2 for one in (a, b)]
    variance = 2 * a.all2 * b.all2 / ((n + 1) * (n - 2))
    variance += loose[0] * loose[1] / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))
    # At trace zero the published formulas are bilinear in these few terms.
    weights = {
        ("diagonal3", "diagonal3"): n**2 * (n + 1) * (n**2 + 15 * n - 4),
        ("all3", "all3"): 4 * (n**4 - 8 * n**3 + 19 * n**2 - 4 * n - 16),
        ("ends", "ends"): 6 * (n**4 - 8 * n**3 + 21 * n**2 - 6 * n - 24),
        ("paths", "paths"): 12 * (n**4 - n**3 - 8 * n**2 + 36 * n - 48),
        ("cycles", "cycles"): 8 * (n**3 - 9 * n**2 + 26 * n - 22),
        ("all3", "ends"): 24 * (n**2 - n - 4),
        ("all3", "paths"): 24 * (n**3 - 3 * n**2 - 2 * n + 8),
        ("ends", "paths"): 24 * (n**3 - 2 * n**2 - 3 * n + 12),
        ("all3", "diagonal3"): -4 * n * (n - 1) * (n**2 - n + 4),
        ("ends", "diagonal3"): -6 * n * (n - 1) * (n**2 - n + 4),
        ("paths", "diagonal3"): -12 * n * (n - 1) ** 2 * (n + 4),
        ("cycles", "diagonal3"): 16 * n * (n - 1) * (n - 2),
        ("cycles", "all3"): -8 * (3 * n**2 - 15 * n + 16),
        ("cycles", "ends"): -8 * (3 * n**2 - 15 * n + 24),
        ("cycles", "paths"): -8 * (n - 2) * (3 * n**2 - 15 * n + 24),
    }
    third = np.zeros(np.broadcast_shapes(mean.shape))
    for (one, other), weight in weights.items():
        third = third + weight * getattr(a, one) * getattr(b, other)
        if one != other:
            third = third + weight * getattr(a, other) * getattr(b, one)
    return mean, variance, third / (n * (n - 1) * (n - 2) * (n - 3) * (n - 4) * (n - 5))


@eqx.filter_jit
def invariants_of(gram: Callable[[Array], Prepared], stack: Array) -> Invariants:
    """Return `invariants` of stacked representations' matrices, [items] each."""
    return jax.lax.map(lambda x: invariants(gram(x).entries), stack)


def moment_p_values(values: Any, a: Invariants, b: Invariants, number: int) -> np.ndarray:
    """Return p-values of inner products of unit matrices over samples, [items, others], from Pearson's type III law.

    It has the null's exact mean, variance and skewness. P-values below 1 / 1000 are extrapolated.
    """
    values = np.asarray(values, float)
    a, b = Invariants(*(part[:, None] for part in a)), Invariants(*(part[None] for part in b))
    mean, variance, third = null_moments(a, b, number)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(variance)
        skew = np.clip(third / spread**3, -1e3, 1e3)
    # If all orders score alike but for rounding, as for samples at equal distances, there is nothing to test.
    alike = np.isfinite(values) & (spread <= 1e-5 * np.abs(mean))
    known = np.isfinite(values) & (spread > 0) & ~alike
    # Three moments do not determine the far tail.
    tail = np.maximum(stats.pearson3.sf(values, skew, loc=mean, scale=spread), LEAST_P_VALUE)
    return np.where(known, tail, np.where(alike, 1.0, np.nan))
