"""Normalised HSIC, the dependence of two sets of features from kernel matrices of mini-batches."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_positive, fail
from dissociation._core.distances import squared_distances, typical
from dissociation._core.linalg import positive_inverse, product
from dissociation._core.results import Result
from dissociation._core.types import OneHot, PRNGKey, Scalar
from dissociation._core.validation import validated

Features = Float[Array | np.ndarray, "n d"]

BANDWIDTHS = ("dimension", "median")
"""Kernel bandwidth 2 sigma^2 d, as published, or 2 sigma^2 times a batch's median squared distance.

For uncorrelated features of variance 1, "median" with sigma 5 / sqrt(2) equals "dimension" with the
published 5.
"""


class InformationPlane(Result):
    """Dependence of features on inputs and on labels.

    Attributes:
        zx: nHSIC(Z; X), from 0 to batch_size - 1.
        zy: nHSIC(Z; Y), from 0 to C - 1.
        zx_null: Mean of `zx` over all shuffles of the pairs.
        zy_null: Mean of `zy` over all shuffles of the pairs.
    """

    zx: Float[Array, ""]
    zy: Float[Array, ""]
    zx_null: Float[Array, ""]
    zy_null: Float[Array, ""]


@partial(jax.jit, static_argnames="bandwidth")
def gaussian_gram(x: Array, sigma: Scalar = 5.0, bandwidth: str = "dimension") -> Array:
    """Return kernels exp(-|x_i - x_j|^2 / (2 sigma^2 s)), [n, n].

    The scale s is the dimension or the median squared distance.

    Source: Ma, Lewis and Kleijn (2020), The HSIC bottleneck: deep learning without
    back-propagation.
    """
    square = squared_distances(x)
    scale = jnp.asarray(x.shape[1], x.dtype)
    if bandwidth == "median":
        scale = typical(square)
    sigma = jnp.asarray(sigma, x.dtype)
    return jnp.exp(-square / (2 * sigma**2 * scale))


def centred_gram(gram: Array) -> Array:
    """Return H K H with H = I - 1 1^T / n, the kernel matrices of centred features, [..., n, n]."""
    # H removes any constant. Fused products would leave the rounding of a large one.
    gram = gram - gram[..., :1, :1]
    rows = gram - jnp.mean(gram, -1, keepdims=True)
    return rows - jnp.mean(rows, -2, keepdims=True)


@validated
def information_plane(
    features: Features,
    inputs: Float[Array | np.ndarray, "n p"],
    labels: OneHot,
    *,
    key: PRNGKey,
    batch_size: int = 100,
    num_passes: int = 3,
    sigma: Scalar = 5.0,
    bandwidth: str = "dimension",
    epsilon: Scalar = 1e-5,
) -> InformationPlane:
    """Return nHSIC(Z; X) and nHSIC(Z; Y), means over mini-batches of several shuffled passes.

    nHSIC = tr(K (K + eps n I)^{-1} L (L + eps n I)^{-1}) with centred kernel matrices K and L of n
    samples. With bandwidth "dimension" it falls if features shrink, although no information is
    lost.

    Args:
        features: Features Z, [samples, d].
        inputs: Inputs X, [samples, p].
        labels: One-hot labels Y, [samples, classes], with the linear kernel, not centred.
        key: Random key that shuffles the rows of all three together.
        batch_size: Samples n of a kernel matrix, at most all. The remainder of a pass is dropped.
        num_passes: Passes over the samples.
        sigma: Width of the Gaussian kernels of Z and X.
        bandwidth: One of `BANDWIDTHS`.
        epsilon: Regularisation.

    Returns:
        Both values, and their means over shuffled pairs.

    References:
        Sakamoto and Sato (2025), Explaining grokking and information bottleneck through neural
        collapse emergence.
    """
    number = len(features)
    size = check_count("batch_size", batch_size, minimum=2)
    num_passes = check_count("num_passes", num_passes, minimum=1)
    if size > number:
        fail("batch_size", f"be at most the number of samples ({number})", batch_size)
    check_choice("bandwidth", bandwidth, BANDWIDTHS)
    check_positive("sigma", sigma)
    check_positive("epsilon", epsilon)
    keys = jax.random.split(key, num_passes)
    return _plane(features, inputs, labels, keys, sigma, epsilon, size, bandwidth)


@partial(jax.jit, static_argnames=("size", "bandwidth"))
def _plane(
    features: Array,
    inputs: Array,
    labels: Array,
    keys: Array,
    sigma: Scalar,
    epsilon: Scalar,
    size: int,
    bandwidth: str,
) -> InformationPlane:
    number = len(features)
    num_batches = number // size
    dtype = features.dtype
    identity = jnp.eye(size, dtype=dtype)[None, None]
    ridge = jnp.asarray(epsilon, dtype) * size

    def one_pass(key):
        order = jax.random.permutation(key, number)
        batches = order[: num_batches * size].reshape(num_batches, size)

        def grams_of(rows):
            z = gaussian_gram(features[rows], sigma=sigma, bandwidth=bandwidth)
            x = gaussian_gram(inputs[rows], sigma=sigma, bandwidth=bandwidth)
            x = x.astype(z.dtype)
            y = labels[rows].astype(z.dtype)
            return jnp.stack([centred_gram(z), centred_gram(x), product(y, y.T)])

        # K (K + eps n I)^{-1} of all three kernel matrices, [3, batches, n, n].
        grams = jax.vmap(grams_of, out_axes=1)(batches)
        projections = identity - ridge * positive_inverse(grams + ridge * identity)
        of_features = projections[:1]
        of_targets = projections[1:]
        transposed = of_targets.swapaxes(-1, -2)
        traces = jnp.sum(of_features * transposed, (-1, -2))

        # The mean of the traces over all permutations of samples.
        trace_of_features = jnp.trace(of_features, axis1=-2, axis2=-1)
        trace_of_targets = jnp.trace(centred_gram(of_targets), axis1=-2, axis2=-1)
        null_traces = trace_of_features * trace_of_targets / (size - 1)
        return jnp.mean(jnp.concatenate([traces, null_traces]), 1)

    means = jnp.mean(lax.map(one_pass, keys), 0)
    return InformationPlane(*means)
