"""Nystroem features k(x, Z) k(Z, Z)^(-1/2) of centres Z, which reduce cost from n^3 to n m^2."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_choice, check_count, check_non_negative, fail, is_traced
from dissociation._core.linalg import product, psd_power
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman._operators._diagnostics import warn_constant, warn_narrowed
from koopman._operators._kernels import as_module, own_gram
from koopman._operators._operator import KernelMap

Kernel = Callable[[Array, Array], Array]
States = Float[Array | np.ndarray, "n d"]


@validated(finite=("centres",))
def nystroem_map(kernel: Kernel, centres: Float[Array | np.ndarray, "m d"], *, rtol: float | None = None) -> KernelMap:
    """Return the map to Nystroem features of centres, whose products are k(x, Z) k(Z, Z)^(-1) k(Z, y).

    Args:
        kernel: Kernel of `koopman`, or a function of two arrays of states.
        centres: Z, [m, d], for instance from `choose_centres`.
        rtol: Relative size below which an eigenvalue of k(Z, Z) counts as zero. Default: m times rounding.

    Returns:
        The map from states [n, d] to features [n, m], for `koopman.fit` and `moments`.

    Warns:
        UserWarning: If k(Z, Z) varies by less than its rounding.

    Raises:
        ValueError: If centres are not finite, or the kernel's values are invalid.
        TypeError: If the kernel does not return an array of real numbers.

    References:
        Williams and Seeger (2001), Using the Nystroem method to speed up kernel machines.
    """
    warn_narrowed(centres)
    centres = jnp.asarray(centres)
    kernel = as_module(kernel)
    values = own_gram(kernel, centres)
    if not is_traced(values):
        warn_constant(centres, values)
    return KernelMap(kernel, centres, psd_power(values, -0.5, rtol=rtol))


@validated(finite=("x",))
def choose_centres(
    x: States,
    num_centres: int,
    *,
    key: PRNGKey,
    method: str = "uniform",
    kernel: Kernel | None = None,
    alpha: Scalar | None = None,
) -> Int[Array, " m"]:
    """Choose samples as centres, without repetition.

    Args:
        x: States, [n, d].
        num_centres: m, from 1 to n.
        key: Key of the draw.
        method: "uniform", or "leverage" for ridge leverage scores [K (K + alpha I)^{-1}]_ii, estimated from m uniform
            centres.
        kernel: Kernel of "leverage".
        alpha: Regularisation of "leverage". None is 1e-6 times the mean of k(x, x) on the span of the centres.

    Returns:
        Indices into x, [m].

    References:
        Rudi, Calandriello, Carratino and Rosasco (2018), On fast leverage score sampling and optimal learning.
    """
    check_choice("method", method, ("uniform", "leverage"))
    count, number = check_count("num_centres", num_centres, minimum=1), x.shape[0]
    if count > number:
        fail("num_centres", f"be at most the number of samples ({number})", num_centres)
    first, second = jax.random.split(key)
    uniform = jax.random.permutation(first, number)[:count]
    if method == "uniform":
        return uniform
    if kernel is None:
        fail("kernel", "be given for leverage scores", "None")
    warn_narrowed(x)
    features = nystroem_map(kernel, jnp.asarray(x)[uniform])(x) * number**-0.5
    alpha = 1e-6 * jnp.sum(features**2) if alpha is None else alpha
    check_non_negative("alpha", alpha)
    return _by_leverage(features, alpha, second)


@jax.jit
def _by_leverage(features: Array, alpha: Scalar, key: PRNGKey) -> Array:
    number, count = features.shape
    gram = product(features.T, features) + alpha * jnp.eye(count, dtype=features.dtype)
    scores = jnp.sum(features * product(features, psd_power(gram, -1.0)), 1)
    # The m largest sums of log score and Gumbel noise are a draw without repetition, by scores.
    noise = jax.random.gumbel(key, (number,), features.dtype)
    return jax.lax.top_k(jnp.log(jnp.maximum(scores, jnp.finfo(scores.dtype).tiny)) + noise, count)[1]
