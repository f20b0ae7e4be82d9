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
"""Kernel bandwidth 2 sigma^2 d, as published, or 2 sigma^2 times the median squared distance of a batch.

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
    """Return kernels exp(-|x_i - x_j|^2 / (2 sigma^2 s)), [n, n], with s the dimension or the median squared distance.

    Source: Ma, Lewis and Kleijn (2020), The HSIC bottleneck: deep learning without
    back-propagation.
    """
    square = squared_distances(x)
    scale = typical(square) if bandwidth == "median" else jnp.asarray(x.shape[1], x.dtype)
    return jnp.exp(-square / (2 * jnp.asarray(sigma, x.dtype) ** 2 * scale))


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
    number = features.shape[0]
    size, passes = (
        check_count("batch_size", batch_size, minimum=2),
        check_count("num_passes", num_passes, minimum=1),
    )
    if size > number:
        fail("batch_size", f"be at most the number of samples ({number})", batch_size)
    check_choice("bandwidth", bandwidth, BANDWIDTHS)
    check_positive("sigma", sigma)
    check_positive("epsilon", epsilon)
    return _plane(
        features, inputs, labels, jax.random.split(key, passes), sigma, epsilon, size, bandwidth
    )


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
    number = features.shape[0]
    batches = number // size
    unit = jnp.eye(size, dtype=features.dtype)[None, None]
    ridge = jnp.asarray(epsilon, features.dtype) * size

    def one_pass(key: Array) -> Array:
        order = jax.random.permutation(key, number)[: batches * size].reshape(batches, size)

        def grams(rows: Array) -> Array:
            z, x = (
                gaussian_gram(part[rows], sigma=sigma, bandwidth=bandwidth)
                for part in (features, inputs)
            )
            y = labels[rows].astype(z.dtype)
            return jnp.stack([centred_gram(z), centred_gram(x.astype(z.dtype)), product(y, y.T)])

        # K (K + eps n I)^{-1} of all three kernel matrices, [3, batches, n, n].
        spans = unit - ridge * positive_inverse(jax.vmap(grams, out_axes=1)(order) + ridge * unit)
        mine, others = spans[:1], spans[1:]
        in_common = jnp.sum(mine * others.swapaxes(-1, -2), (-1, -2))
        # Their means over all permutations of samples.
        traces = [jnp.trace(part, axis1=-2, axis2=-1) for part in (mine, centred_gram(others))]
        by_chance = traces[0] * traces[1] / (size - 1)
        return jnp.mean(jnp.concatenate([in_common, by_chance]), 1)

    return InformationPlane(*jnp.mean(lax.map(one_pass, keys), 0))
