"""Coordinates for nearest-neighbour estimates of information: asinh, normal scores and whitening."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_non_negative
from dissociation._core.keys import named_key
from dissociation._core.linalg import centre, product
from dissociation._core.validation import validated

Points = Float[Array | np.ndarray, "n d"]

# Coordinates within this many robust standard deviations are nearly unchanged by asinh.
_TAIL = 3.0


def drawn_in(points: Array) -> Array:
    """Return asinh((x - median) / (3 robust deviations)) of every coordinate, which shortens tails."""
    low, middle, high = jnp.quantile(points, jnp.asarray([0.25, 0.5, 0.75], points.dtype), axis=0)
    points = points - middle[None]
    deviation = (high - low) / 1.349  # the quartiles of a Gaussian are 1.349 deviations apart
    deviation = jnp.where(deviation > 0, deviation, jnp.max(jnp.abs(points), 0))
    return jnp.arcsinh(points / (_TAIL * jnp.where(deviation > 0, deviation, 1.0))[None])


def normal_scores(points: Array) -> Array:
    """Return coordinates replaced, rank by rank, by sorted samples of a Gaussian. Equal values stay equal."""
    # Gaussian quantiles in place of samples would be evenly spaced, which biases distances of
    # neighbours.
    scores = jax.random.normal(named_key("normal scores"), points.shape[::-1], jnp.float32).astype(
        points.dtype
    )

    def replaced(column: Array, sample: Array) -> Array:
        return jnp.sort(sample)[jnp.searchsorted(jnp.sort(column), column)]

    return jax.vmap(replaced, (1, 0), 1)(points, scores)


def whitened(points: Any, reference: Any = None) -> tuple[Array, Array]:
    """Return points in coordinates in which the reference (default: points) is white, and the log volume.

    The log volume is half the log determinant of the reference's covariance.
    """
    points = centre(points)
    reference = points if reference is None else centre(reference)
    number = points.shape[0]

    def body(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        white, done, logs = state
        column, target = points[:, index][:, None], reference[:, index][:, None]
        before = jnp.sqrt(jnp.mean(target**2))
        # Gram and Schmidt's method, twice against rounding, because a covariance would lose half of
        # the digits.
        for _ in range(2):
            shares = product(done.T, target) / number
            column, target = column - product(white, shares), target - product(done, shares)
        left = jnp.sqrt(jnp.mean(target**2))
        full = left > 32 * jnp.finfo(points.dtype).eps * jnp.maximum(
            before, jnp.sqrt(jnp.mean(column**2))
        )
        scale = jnp.where(full, 1.0 / jnp.where(full, left, 1.0), 0.0)
        log = jnp.where(full, jnp.log(jnp.where(full, left, 1.0)), -jnp.inf)
        # A constant or dependent coordinate becomes zero. If only the reference's is, the point's
        # gets mean square 1.
        rest = column / jnp.maximum(jnp.sqrt(jnp.mean(column**2)), jnp.finfo(points.dtype).tiny)
        column = column * scale if reference is points else jnp.where(full, column * scale, rest)
        return (
            white.at[:, index].set(column[:, 0]),
            done.at[:, index].set(target[:, 0] * scale),
            logs + log,
        )

    zero = jnp.zeros_like(points)
    white, _, logs = jax.lax.fori_loop(
        0, points.shape[1], body, (zero, zero, jnp.zeros((), points.dtype))
    )
    return white, logs


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
    points, width = jnp.asarray(points), points.shape[1]
    count = check_count(
        "num_components",
        width if num_components is None else num_components,
        minimum=1,
        maximum=width,
    )
    centred = centre(points)
    values, vectors = jnp.linalg.eigh(product(centred.T, centred) / points.shape[0])
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    cutoff = width * float(jnp.finfo(values.dtype).eps) if rtol is None else rtol**2
    kept = values > cutoff * jnp.maximum(values[0], jnp.finfo(values.dtype).tiny)
    scale = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)
    return product(centred, vectors) * scale[None]
