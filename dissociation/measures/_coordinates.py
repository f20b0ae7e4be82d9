"""Coordinates for estimates of information by nearest neighbours: asinh, scores, whitening."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_non_negative
from dissociation._core.keys import named_key
from dissociation._core.linalg import centre, product
from dissociation._core.validation import validated

Points = Float[Array | np.ndarray, "n d"]

# Coordinates within this many robust standard deviations are nearly unchanged by asinh.
_TAIL = 3.0


def drawn_in(points: Array) -> Array:
    """Return asinh((x - median) / (3 robust deviations)) of every coordinate.

    This shortens the tails of its distribution.
    """
    levels = jnp.asarray([0.25, 0.5, 0.75], points.dtype)
    low, middle, high = jnp.quantile(points, levels, axis=0)
    points = points - middle[None]
    deviation = (high - low) / 1.349  # the quartiles of a Gaussian are 1.349 deviations apart
    deviation = jnp.where(deviation > 0, deviation, jnp.max(jnp.abs(points), 0))
    deviation = jnp.where(deviation > 0, deviation, 1.0)
    return jnp.arcsinh(points / (_TAIL * deviation)[None])


def normal_scores(points: Array) -> Array:
    """Return coordinates replaced, rank by rank, by sorted samples of a Gaussian.

    Equal coordinates stay equal.
    """
    # Gaussian quantiles in place of samples would be evenly spaced, which biases distances of
    # neighbours.
    key = named_key("normal scores")
    samples = jax.random.normal(key, points.shape[::-1], jnp.float32)
    samples = samples.astype(points.dtype)

    def scores_of(column, sample):
        ranks = jnp.searchsorted(jnp.sort(column), column)
        return jnp.sort(sample)[ranks]

    return jax.vmap(scores_of, (1, 0), 1)(points, samples)


def whitened(points: Any, reference: Any = None) -> tuple[Array, Array]:
    """Return points in coordinates in which the reference (default: points) is white.

    The log volume follows, half the log determinant of the reference's covariance.
    """
    points = centre(points)
    is_own_reference = reference is None
    reference = points if is_own_reference else centre(reference)
    number, dimension = points.shape
    limits = jnp.finfo(points.dtype)

    def body(index, state):
        white, white_reference, log_volume = state
        column = points[:, index][:, None]
        target = reference[:, index][:, None]
        target_size = _root_mean_square(target)

        # Gram and Schmidt's method, twice against rounding, because a covariance would lose half of
        # the digits.
        for _ in range(2):
            shares = product(white_reference.T, target) / number
            column = column - product(white, shares)
            target = target - product(white_reference, shares)
        residual = _root_mean_square(target)
        column_size = _root_mean_square(column)

        is_independent = residual > 32 * limits.eps * jnp.maximum(target_size, column_size)
        residual = jnp.where(is_independent, residual, 1.0)
        scale = jnp.where(is_independent, 1.0 / residual, 0.0)
        log = jnp.where(is_independent, jnp.log(residual), -jnp.inf)

        # A constant or dependent coordinate becomes zero. If only the reference's is, the point's
        # gets mean square 1.
        scaled = column * scale
        if not is_own_reference:
            normalised = column / jnp.maximum(column_size, limits.tiny)
            scaled = jnp.where(is_independent, scaled, normalised)
        white = white.at[:, index].set(scaled[:, 0])
        white_reference = white_reference.at[:, index].set(target[:, 0] * scale)
        return white, white_reference, log_volume + log

    zero = jnp.zeros_like(points)
    start = (zero, zero, jnp.zeros((), points.dtype))
    white, _, log_volume = lax.fori_loop(0, dimension, body, start)
    return white, log_volume


def _root_mean_square(x: Array) -> Array:
    return jnp.sqrt(jnp.mean(x**2))


@validated
def whiten(
    points: Points, num_components: int | None = None, *, rtol: float | None = None
) -> Float[Array, "n k"]:
    """Return leading principal components, each divided by its standard deviation.

    Args:
        points: Samples, [n, d].
        num_components: Components, at most and by default d.
        rtol: Fraction of the largest deviation below which components are zero; default sqrt(d
            times rounding), the resolution of a covariance (0.005 for 200 dimensions in float32).

    Returns:
        Uncorrelated components of variance 1 or 0, [n, num_components].
    """
    if rtol is not None:
        check_non_negative("rtol", rtol)
    points = jnp.asarray(points)
    number, dimension = points.shape
    if num_components is None:
        num_components = dimension
    count = check_count("num_components", num_components, minimum=1, maximum=dimension)

    centred = centre(points)
    covariance = product(centred.T, centred) / number
    values, vectors = jnp.linalg.eigh(covariance)
    values = values[::-1][:count]
    vectors = vectors[:, ::-1][:, :count]

    limits = jnp.finfo(values.dtype)
    cutoff = dimension * float(limits.eps)
    if rtol is not None:
        cutoff = rtol**2
    is_resolved = values > cutoff * jnp.maximum(values[0], limits.tiny)
    values = jnp.where(is_resolved, values, 1.0)
    scale = jnp.where(is_resolved, lax.rsqrt(values), 0.0)
    return product(centred, vectors) * scale[None]
