"""Null space of a dataset, and noise on weights within it."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from dissociation._core.checks import check_known, check_non_negative, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated

# Far above what float64 rounding leaves of a null direction, far below what float32 data resolve.
RELATIVE_CUTOFF = 1e-10
CUT_SLACK = 1e-4
CHUNK = 8192


class NullSpectrum(NamedTuple):
    """Singular values of a dataset and its null directions.

    Attributes:
        basis: Orthonormal directions orthogonal to all samples, [null dimension, *sample shape],
            float64.
        singular_values: Singular values, descending, [features], float64.
        rank: Number of singular values above the cut-off.
        gap: Smallest kept singular value over the largest cut one, large if the rank is clear.
            Infinite if either is missing or the cut one is zero.
    """

    basis: Float[np.ndarray, "null ..."]
    singular_values: Float[np.ndarray, " features"]
    rank: int
    gap: float

    __repr__ = printed


@validated(finite=("dataset",))
def null_spectrum(
    dataset: Real[Array | np.ndarray, "samples features ..."], rtol: float | None = None
) -> NullSpectrum:
    """Return singular values and null directions of a dataset, on the host in float64.

    Memory holds at most a chunk of the samples times the features.
    """
    check_known("its rank sets shapes", dataset=dataset)
    samples = np.asarray(dataset)
    if rtol is None:
        rtol = RELATIVE_CUTOFF
    check_non_negative("rtol", rtol)

    flat = samples.reshape(len(samples), -1)
    # Squares of very large or small numbers overflow float64. A power of two changes no digit.
    largest = max(abs(float(flat.min())), abs(float(flat.max())))
    scale = 2.0 ** np.frexp(largest)[1]
    # A Gram matrix resolves singular values down to 1e-8 of the largest only. Those below 1e-4 are
    # therefore decomposed again among themselves.
    eigenvalues, vectors = np.linalg.eigh(_gram(flat, scale, None))
    is_small = eigenvalues <= 1e-8 * eigenvalues[-1]
    if is_small.any():
        small_vectors = vectors[:, is_small]
        eigenvalues[is_small], rotation = np.linalg.eigh(_gram(flat, scale, small_vectors))
        vectors[:, is_small] = small_vectors @ rotation
    singular_values = np.sqrt(np.maximum(eigenvalues, 0))[::-1]
    directions = vectors.T[::-1]

    # A value at the cut-off is kept: its last digits differ between processors.
    rank = int(np.sum(singular_values > (1 - CUT_SLACK) * rtol * singular_values[0]))
    basis = directions[rank:].reshape(-1, *samples.shape[1:])
    gap = float("inf")
    if 0 < rank < len(singular_values) and singular_values[rank] > 0:
        gap = float(singular_values[rank - 1] / singular_values[rank])
    return NullSpectrum(np.ascontiguousarray(basis), scale * singular_values, rank, gap)


@validated
def null_dimension(
    dataset: Real[Array | np.ndarray, "samples ..."], rtol: float | None = None
) -> tuple[int, int, int]:
    """Return `(null dimension, rank, features)` of a dataset; the first two add up to the third.

    Args:
        dataset: Samples first.
        rtol: Relative cut-off on the singular values; None is 1e-10.

    Raises:
        TypeError: If `dataset` is traced.
        ValueError: If `dataset` is empty, flat or not finite, or `rtol` is negative.
    """
    spectrum = null_spectrum(dataset, rtol)
    features = len(spectrum.singular_values)
    return features - spectrum.rank, spectrum.rank, features


def perturb_in_null_space(
    weights: Array,
    basis: Array | np.ndarray,
    scale: Scalar,
    *,
    key: PRNGKey,
    axes: tuple[int, ...] = (1,),
) -> Array:
    """Return W + scale Z basis^T basis with Z ~ N(0, 1).

    W has its inputs on `axes`, and the basis is [null, inputs].
    """
    if not is_traced(basis):
        directions = np.asarray(basis, np.float64)
        errors = directions @ directions.T - np.eye(len(directions))
        largest = np.abs(errors).max(initial=0)
        if not largest <= 1e-3:
            inner_products = f"inner products {largest:.2g} away from 0 or 1"
            fail("basis", "hold orthonormal directions", inner_products)
    return _perturb(to_device(weights), to_device(basis), scale, key, axes)


@partial(jax.jit, static_argnames="axes")
def _perturb(
    weights: Array, basis: Array, scale: Scalar, key: PRNGKey, axes: tuple[int, ...]
) -> Array:
    directions = basis.astype(weights.dtype)
    last = tuple(range(-len(axes), 0))
    moved = jnp.moveaxis(weights, axes, last)
    rows = moved.reshape(-1, basis.shape[-1])
    draws = jax.random.normal(key, rows.shape, rows.dtype)
    # A projection, so that the noise depends on the space and not on its basis.
    noise = product(product(draws, directions.T), directions)
    rows = rows + jnp.asarray(scale, rows.dtype) * noise
    return jnp.moveaxis(rows.reshape(moved.shape), last, axes)


def _gram(samples: np.ndarray, scale: float, directions: np.ndarray | None) -> np.ndarray:
    """Return the sum over samples of x x^T / scale^2 in float64.

    With `directions`, x is in coordinates along them.
    """
    size = samples.shape[1]
    if directions is not None:
        size = directions.shape[1]
    total = np.zeros((size, size))
    for start in range(0, len(samples), CHUNK):
        # A float64 copy of all samples may not fit in memory.
        chunk = samples[start : start + CHUNK].astype(np.float64) / scale
        if directions is not None:
            chunk = chunk @ directions
        total += chunk.T @ chunk
    return total
