"""Kernels, choice of their centres, and maps of states to features.

A kernel maps two arrays of states, [n, d] and [m, d], to their matrix of kernel values [n, m]. Any
such function serves as a kernel. Parameters may be traced.
"""

from abc import abstractmethod
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_non_negative,
    check_positive,
    check_single,
    fail,
    fail_kind,
    is_traced,
)
from dissociation._core.conversion import describe, to_device
from dissociation._core.distances import root
from dissociation._core.linalg import product, psd_power, scale_of
from dissociation._core.splits import permutation
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman._operators._findings import kernel_findings, warn_float32, warn_of
from koopman._operators._numerics import rounding_unit

Kernel = Callable[[Array, Array], Array]
Result = TypeVar("Result")
States = Float[Array | np.ndarray, "n d"]


def plain_number(value: Any) -> Any:
    """Return a known scalar of NumPy or JAX as Python's; return other values unchanged."""
    if not isinstance(value, np.generic | np.ndarray | Array):
        return value
    if is_traced(value) or np.ndim(value):
        return value
    return value.item()


class Linear(eqx.Module):
    """Linear kernel, k(x, y) = x . y."""

    @validated
    @jax.jit
    def __call__(self, x: States, y: Float[Array | np.ndarray, "m d"]) -> Float[Array, "n m"]:
        return _products(x, y)


class _Stationary(eqx.Module):
    """Kernel of |x - y| / l."""

    length_scale: Scalar

    def __check_init__(self):
        check_single("length_scale", self.length_scale)
        check_positive("length_scale", self.length_scale)

    @validated
    @jax.jit
    def __call__(self, x: States, y: Float[Array | np.ndarray, "m d"]) -> Float[Array, "n m"]:
        x = jnp.asarray(x)
        y = jnp.asarray(y)
        length = jnp.asarray(self.length_scale, x.dtype)
        unit = scale_of(length)  # otherwise squares overflow or vanish
        return self._values(x / unit, y / unit, length / unit)

    @abstractmethod
    def _values(
        self, x: Float[Array, "n d"], y: Float[Array, "m d"], length: Float[Array, ""]
    ) -> Float[Array, "n m"]:
        """Return the matrix of kernel values, from states and l in the same unit."""


class RBF(_Stationary):
    """Gaussian kernel, k(x, y) = exp(-|x - y|^2 / (2 l^2)).

    Attributes:
        length_scale: l, in units of the states; `median_distance` is a common choice.
    """

    def _values(self, x: Array, y: Array, length: Array) -> Array:
        return _gaussian(x, y, length)


class Laplacian(_Stationary):
    """Laplacian kernel, k(x, y) = exp(-|x - y| / l) with the Euclidean norm.

    It is the Matern kernel of smoothness 1/2.

    Attributes:
        length_scale: l, in units of the states.
    """

    def _values(self, x: Array, y: Array, length: Array) -> Array:
        return jnp.exp(-_distances(x, y) / length)


class Matern(_Stationary):
    """Matern kernel of smoothness nu (Rasmussen and Williams 2006, eq. 4.17).

    With s = sqrt(2 nu) |x - y| / l it is exp(-s), (1 + s) exp(-s) or (1 + s + s^2 / 3) exp(-s).

    Attributes:
        length_scale: l, in units of the states.
        nu: 0.5, 1.5 or 2.5.
    """

    nu: float = eqx.field(static=True, default=1.5, converter=plain_number)

    def __check_init__(self):
        check_single("nu", self.nu)
        if self.nu not in (0.5, 1.5, 2.5):
            fail("nu", "be one of 0.5, 1.5, 2.5", self.nu)

    def _values(self, x: Array, y: Array, length: Array) -> Array:
        s = (2 * self.nu) ** 0.5 * _distances(x, y) / length
        factor = jnp.ones_like(s)
        if self.nu == 1.5:
            factor = 1.0 + s
        elif self.nu == 2.5:
            factor = 1.0 + s + s**2 / 3
        return factor * jnp.exp(-s)


class Polynomial(eqx.Module):
    """Polynomial kernel, k(x, y) = (gamma x . y + c)^p.

    Attributes:
        degree: p, at least 1.
        gamma: Factor, positive.
        offset: c, non-negative.
    """

    degree: int = eqx.field(static=True, default=2, converter=plain_number)
    gamma: Scalar = 1.0
    offset: Scalar = 1.0

    def __check_init__(self):
        check_count("degree", self.degree, minimum=1)
        check_single("gamma", self.gamma)
        check_single("offset", self.offset)
        check_positive("gamma", self.gamma)
        check_non_negative("offset", self.offset)

    @validated
    @jax.jit
    def __call__(self, x: States, y: Float[Array | np.ndarray, "m d"]) -> Float[Array, "n m"]:
        base = self.gamma * _products(x, y) + self.offset
        return jnp.asarray(base) ** self.degree


def compiled_by_kernel(function: Callable[..., Result]) -> Callable[..., Result]:
    """Compile a function of a kernel and arrays for the kernels of this module.

    With other kernels the function runs uncompiled.
    """
    program = jax.jit(function)

    @wraps(function)
    def run(kernel: Kernel, *arrays: Any) -> Result:
        # What a user's function closes over may change, and its values may be NumPy's.
        if type(kernel) in (Linear, RBF, Laplacian, Matern, Polynomial):
            return program(kernel, *arrays)
        return function(kernel, *arrays)

    return run


class Function(eqx.Module):
    """Plain function as a kernel."""

    # Static, so that `jax.jit` takes and returns operators that hold it. A traced value in its
    # closure would not outlive the transformation.
    function: Callable[[Array, Array], Array] = eqx.field(static=True)

    def __call__(self, x: Array, y: Array) -> Any:
        return self.function(x, y)


def as_module(kernel: Kernel) -> Any:
    """Return a kernel that is a PyTree unchanged, and a plain function as a `Function`."""
    if isinstance(kernel, type):
        fail_kind("kernel", "be a kernel, for example `RBF(1.0)`", describe(kernel))
    is_leaf = jax.tree.structure(kernel) == jax.tree.structure(0)
    return Function(kernel) if is_leaf else kernel


def gram(kernel: Kernel, x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Array:
    """Return the matrix of kernel values; raise if its type or shape is wrong."""
    values = kernel(x, y)
    shape = (x.shape[0], y.shape[0])
    if not isinstance(values, Array | np.ndarray | np.generic | float):
        fail_kind("kernel", "give an array of kernel values", describe(values))
    values = jnp.asarray(values)
    if values.shape != shape:
        expected = f"give a matrix [n, m] of n and m states, here {shape}"
        advice = "A function of two single states is mapped by `jax.vmap` over each"
        fail("kernel", expected, f"shape {values.shape}", advice)
    if not jnp.issubdtype(values.dtype, jnp.floating):
        fail_kind("kernel", "give real floating-point numbers", str(values.dtype))
    return values


@jax.jit
def extremes(values: Float[Array, "n n"]) -> Float[Array, "3"]:
    """Return the largest entry, the smallest diagonal entry, and the largest asymmetry."""
    skew = jnp.max(jnp.abs(values - values.T))
    largest = jnp.max(jnp.abs(values))
    smallest = jnp.min(jnp.diagonal(values))
    return jnp.stack([largest, smallest, skew])


def check_kernel(extreme: Array) -> None:
    """Raise if known `extremes` of a kernel matrix are not those of a positive kernel."""
    if is_traced(extreme):
        return
    dtype = extreme.dtype
    size, smallest, skew = np.asarray(extreme).tolist()
    if not np.isfinite(size):
        advice = f"What {dtype} cannot hold overflows: scale the states"
        fail("kernel", "give finite values", size, advice)
    tolerance = rounding_unit(extreme) ** 0.5 * size
    if smallest < -tolerance:
        fail("kernel", "be positive semidefinite: k(x, x) at least 0", f"{smallest:.3g}")
    if skew > tolerance:
        fail("kernel", "be symmetric, k(x, y) = k(y, x)", f"two values that differ by {skew:.3g}")


def kernel_alpha(is_linear: bool, trace: Float[Array, ""]) -> Float[Array, ""]:
    """Return the default regularisation, 1e-6 times the mean of k(x, x).

    For a linear kernel it is rounding, as for explicit features.
    """
    factor = 8 * rounding_unit(trace) if is_linear else 1e-6
    return factor * trace


@validated(finite=("x",))
def median_distance(x: States, *, max_samples: int = 1000) -> Float[Array, ""]:
    """Return the median Euclidean distance of two states, in units of x.

    It is the usual length scale of an RBF kernel.

    Args:
        x: States, [n, d], two or more and finite.
        max_samples: Largest number of states to compare, drawn by a fixed permutation.

    References:
        Gretton et al. (2012), A kernel two-sample test, section 8.
    """
    check_count("max_samples", max_samples, minimum=2)
    if x.shape[0] < 2:
        fail("x", "hold at least two states", f"shape {x.shape}")
    warn_float32(x)
    if x.shape[0] > max_samples:
        indices = permutation(x.shape[0])[:max_samples]
        x = x[indices] if isinstance(x, np.ndarray) else jnp.take(x, indices, axis=0)
    return _median_distance(to_device(x))


@jax.jit
def _median_distance(x: Array) -> Array:
    rows, columns = np.triu_indices(x.shape[0], 1)
    unit = scale_of(jnp.max(jnp.abs(x)))
    squares = squared_distances(x / unit, x / unit)[rows, columns]
    return jnp.median(jnp.sqrt(squares)) * unit


def squared_distances(x: States, y: Float[Array | np.ndarray, "m d"]) -> Float[Array, "n m"]:
    """Return |x_i - y_j|^2 by one product, never below zero."""
    # Centring reduces cancellation.
    mean = lax.stop_gradient(jnp.mean(y, 0))[None]
    x = x - mean
    y = y - mean
    squares_x = jnp.sum(x**2, 1)[:, None]
    squares_y = jnp.sum(y**2, 1)[None]
    return jnp.maximum(squares_x + squares_y - 2 * _products(x, y), 0.0)


def _gaussian(x: Array, y: Array, length: Array) -> Array:
    # If states are many lengths from their mean, products leave rounding in the exponent.
    squares = jnp.sum((y - jnp.mean(y, 0)[None]) ** 2, 1)
    is_lost = rounding_unit(x) * jnp.max(squares) > 1e-4 * length**2
    square = lax.cond(is_lost, lambda: _distances(x, y) ** 2, lambda: squared_distances(x, y))
    return jnp.exp(-0.5 * square / length**2)


def _distances(x: Float[Array, "n d"], y: Float[Array, "m d"]) -> Float[Array, "n m"]:
    """Return |x_i - y_j| by differences, a row at a time."""

    # By differences, because the root of a product's rounding would not be small.
    @jax.checkpoint  # otherwise a gradient stores all n m d differences
    def distances_from(state: Array) -> Array:
        squares = (state[None] - y) ** 2
        return root(jnp.sum(squares, 1))

    return lax.map(distances_from, x)


def _products(x: Array | np.ndarray, y: Array | np.ndarray) -> Array:
    return product(jnp.asarray(x), jnp.asarray(y).T)


def _check_width(x: Array | np.ndarray, width: int) -> None:
    if x.shape[1] != width:
        fail("x", f"have shape [n, {width}], as the operator was fitted", np.shape(x))


class LinearMap(eqx.Module):
    """Map x -> (x - offset) matrix of features.

    `offset` is the mean of centred features, else zero.
    """

    offset: Float[Array, " d"]
    matrix: Float[Array, "d r"]

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        _check_width(x, self.matrix.shape[0])
        return _linear_features(to_device(x), self.offset, self.matrix)


@jax.jit
def _linear_features(x: Array, offset: Array, matrix: Array) -> Array:
    return product(x - offset[None], matrix)


class KernelMap(eqx.Module):
    """Map x -> k(x, centres) coefficients of states."""

    kernel: Kernel
    centres: Float[Array, "m d"]
    coefficients: Float[Array, "m r"]

    @validated
    def __call__(self, x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n r"]:
        _check_width(x, self.centres.shape[1])
        return kernel_features(self.kernel, self.centres, self.coefficients, to_device(x))


@compiled_by_kernel
def kernel_features(kernel: Kernel, centres: Array, coefficients: Array, x: Array) -> Array:
    """Return k(x, centres) coefficients, [n, r]."""
    return product(gram(kernel, x, centres), coefficients)


@validated(finite=("centres",))
def nystroem_map(kernel: Kernel, centres: Float[Array | np.ndarray, "m d"]) -> KernelMap:
    """Return the map from states [n, d] to Nystroem features [n, m].

    Products of features are k(x, Z) k(Z, Z)^(-1) k(Z, y).

    Args:
        kernel: Kernel of `koopman`, or a function of two arrays of states.
        centres: Z, [m, d], for instance from `choose_centres`.

    Warns:
        UserWarning: If k(Z, Z) varies by less than its rounding.

    Raises:
        ValueError: If centres are not finite, or the kernel's values are invalid.
        TypeError: If the kernel does not return an array of real numbers.

    References:
        Williams and Seeger (2001), Using the Nystroem method to speed up kernel machines.
    """
    warn_float32(centres)
    centres = to_device(centres)
    kernel = as_module(kernel)
    values, extreme, coefficients = _nystroem(kernel, centres)
    check_kernel(extreme)
    if not is_traced(values):
        warn_of(kernel_findings(centres, values))
    return KernelMap(kernel, centres, coefficients)


@compiled_by_kernel
def _nystroem(kernel: Kernel, centres: Array) -> tuple[Array, Array, Array]:
    """Return k(Z, Z), its `extremes`, and k(Z, Z)^(-1/2)."""
    values = gram(kernel, centres, centres)
    coefficients = psd_power(values, -0.5)
    return values, extremes(values), coefficients


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
        method: "uniform", or "leverage" for ridge leverage scores [K (K + alpha I)^{-1}]_ii,
            estimated from m uniform centres.
        kernel: Kernel of "leverage".
        alpha: Regularisation of "leverage". None is 1e-6 times the mean of k(x, x) on the span of
            the centres.

    Returns:
        Indices into x, [m].

    References:
        Rudi, Calandriello, Carratino and Rosasco (2018), On fast leverage score sampling and
        optimal learning.
    """
    check_choice("method", method, ("uniform", "leverage"))
    num_centres = check_count("num_centres", num_centres, minimum=1)
    num_samples = x.shape[0]
    if num_centres > num_samples:
        fail("num_centres", f"be at most the number of samples ({num_samples})", num_centres)
    if method == "uniform":
        indices, _, _ = _drawn(key, num_samples, num_centres)
        return indices
    if kernel is None:
        fail("kernel", "be given for leverage scores", "None")
    if alpha is not None:
        check_non_negative("alpha", alpha)
    warn_float32(x)
    x = to_device(x)
    _, centres, leverage_key = _drawn(key, num_samples, num_centres, x)
    features = nystroem_map(kernel, centres)(x)
    indices, alpha = _by_leverage(features, alpha, leverage_key)
    check_non_negative("alpha", alpha)
    return indices


@partial(jax.jit, static_argnames=("number", "count"))
def _drawn(
    key: PRNGKey, number: int, count: int, x: Array | None = None
) -> tuple[Array, Any, Array]:
    """Return indices of `count` samples of `number`, the samples of `x`, and another key."""
    key, next_key = jax.random.split(key)
    indices = jax.random.permutation(key, number)[:count]
    samples = jax.tree.map(lambda array: array[indices], x)
    return indices, samples, next_key


@jax.jit
def _by_leverage(features: Array, alpha: Scalar | None, key: PRNGKey) -> tuple[Array, Scalar]:
    """Return indices of as many samples as centres, and the regularisation."""
    num_samples, num_centres = features.shape
    features = features * num_samples**-0.5
    if alpha is None:
        alpha = 1e-6 * jnp.sum(features**2)
    covariance = product(features.T, features)
    regularised = covariance + alpha * jnp.eye(num_centres, dtype=features.dtype)
    solved = product(features, psd_power(regularised, -1.0))
    scores = jnp.sum(features * solved, 1)
    # The m largest sums of log score and Gumbel noise are a draw without repetition, by scores.
    noise = jax.random.gumbel(key, (num_samples,), features.dtype)
    logarithms = jnp.log(jnp.maximum(scores, jnp.finfo(scores.dtype).tiny))
    _, indices = lax.top_k(logarithms + noise, num_centres)
    return indices, alpha
