"""Mutual information of features with Gaussian noise, from all pairs of samples."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from dissociation._core.checks import check_choice, check_count, check_positive, fail
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation._core.results import Result
from dissociation._core.types import Classes, PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.measures._neighbours import in_blocks

Features = Float[Array | np.ndarray, "n d"]

METHODS = ("monte_carlo", "upper", "lower")
"""Draws from the mixture, or bounds of I(T; X) from pairs of samples.

The upper bound is by Kullback-Leibler divergences, the lower one by Bhattacharyya distances.
"""


class SmoothedInformation(Result):
    """Information of noisy features, in nats.

    Attributes:
        zx: I(T; X), from 0 to log n; a bound with the methods "upper" and "lower".
        zy: I(T; Y), from 0 to H(Y); an estimate with every method.
        zx_given_y: I(T; X | Y) = zx - zy, a bound if zx is one.
        saturated: True if the values are NaN, because zx is within 1 % of log n, or features exceed
            the noise so far (in float32 about 1000 times) that their rounding matters: use x64, or
            standardise.
    """

    zx: Float[Array, ""]
    zy: Float[Array, ""]
    zx_given_y: Float[Array, ""]
    saturated: Bool[Array, ""]

    UNITS = {"zx": "nats", "zy": "nats", "zx_given_y": "nats"}


def _log_mixtures(
    points: Array, owners: Array, centres: Array, labels: Array, scale: Array, block: int
) -> tuple[Array, Array]:
    """Return log mean_j exp(-|t_i - z_j|^2 / scale) of all points t_i, [n] each.

    The first mean is over all centres z_j, the second over the centres whose label is `owners[i]`.
    """
    middle = jnp.mean(centres, 0)
    centres = centres - middle[None]
    points = points - middle[None]
    lengths = jnp.sum(centres**2, 1)

    def of_block(row_block):
        point, owner = row_block
        sums = jnp.sum(point**2, 1)[:, None] + lengths[None]
        square = sums - 2 * product(point, centres.T)
        logs = -jnp.maximum(square, 0.0) / scale
        over_all = jax.nn.logsumexp(logs, axis=1) - jnp.log(len(centres))
        has_label = owner[:, None] == labels[None]
        count = jnp.sum(has_label, 1)
        logs = jnp.where(has_label, logs, -jnp.inf)
        over_label = jax.nn.logsumexp(logs, axis=1) - jnp.log(count)
        return over_all, over_label

    return in_blocks(of_block, (points, owners), block)


@validated
def smoothed_information(
    features: Features,
    labels: Classes,
    noise: Scalar,
    *,
    method: str = "monte_carlo",
    key: PRNGKey | None = None,
    num_draws: int = 1,
    block: int = 1000,
) -> SmoothedInformation:
    """Return the information of noisy features about their samples and labels, in nats.

    T = Z + N(0, s^2 I) is a mixture of one Gaussian per sample, with finite entropy h:

        I(T; X) = h(T) - h(N),    I(T; Y) = h(T) - sum_c p_c h(T | Y = c),    I(T; X | Y) = I(T; X)
        - I(T; Y).

    Without noise, I(X; Z) of a deterministic network is infinite, log n for n samples.

    Args:
        features: Features Z of distinct samples, [samples, d].
        labels: Classes from 0, [samples].
        noise: Standard deviation s of the noise, in the units of the features.
        method: One of `METHODS`.
        key: Random key of the noise, which "monte_carlo" needs.
        num_draws: Draws of the noise per sample.
        block: Samples compared at once with all others.

    References:
        Goldfeld et al. (2019), Estimating information flow in deep neural networks.
        Kolchinsky and Tracey (2017), Estimating mixture entropy with pairwise distances, section 4.
    """
    check_choice("method", method, METHODS)
    check_positive("noise", noise)
    draws = check_count("num_draws", num_draws, minimum=1)
    check_count("block", block, minimum=1)
    if method == "monte_carlo" and key is None:
        fail("key", "be given for 'monte_carlo'", "None")
    features = to_device(features)
    labels = to_device(labels)
    noise = to_device(noise, features.dtype)
    return _smoothed(features, labels, noise, key, method, draws, block)


@partial(jax.jit, static_argnames=("method", "draws", "block"))
def _smoothed(
    features: Array,
    labels: Array,
    noise: Array,
    key: PRNGKey | None,
    method: str,
    draws: int,
    block: int,
) -> SmoothedInformation:
    number, dimension = features.shape
    dtype = features.dtype
    points = features
    owners = labels
    offset = 0.0
    if key is not None and method == "monte_carlo":
        deviations = jax.random.normal(key, (draws, *features.shape), dtype)
        points = (features[None] + noise * deviations).reshape(-1, dimension)
        owners = jnp.tile(labels, draws)
        offset = 0.5 * dimension  # E |t - z|^2 / (2 s^2) from the Gaussian's own centre
    factor = 8 if method == "lower" else 2
    scale = factor * noise**2
    over_all, over_label = _log_mixtures(points, owners, features, labels, scale, block)
    zx = -jnp.mean(over_all) - offset
    zy = jnp.mean(over_label - over_all)

    is_bound_reached = zx > 0.99 * jnp.log(number)
    centred = features - jnp.mean(features, 0)[None]
    largest_square = jnp.max(jnp.sum(centred**2, 1))
    is_rounded = jnp.finfo(dtype).eps * largest_square > 0.1 * noise**2
    saturated = is_bound_reached | is_rounded
    zx = jnp.where(saturated, jnp.nan, zx)
    zy = jnp.where(saturated, jnp.nan, zy)
    return SmoothedInformation(zx, zy, zx - zy, saturated)
