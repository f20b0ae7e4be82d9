"""Forecasts of a fitted operator, and their scores."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_count, check_finite, check_non_negative, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation._core.types import Count, InTime
from dissociation._core.validation import validated
from koopman._operators._findings import warn_float32
from koopman._operators._kernels import Kernel, LinearMap, compiled_by_kernel
from koopman._operators._operator import Operator
from koopman._operators._pairs import Rows, as_known, cut
from koopman._operators._spectrum import decompose, modes

Path = Annotated[
    Float[Array | np.ndarray, "time *o"] | Sequence[Float[Array | np.ndarray, "_ *o"]], InTime()
]
Steps = Int[Array | np.ndarray, " t"] | Sequence[int] | Count


@validated
def predict(operator: Operator, x: Rows, steps: Steps = 1) -> Float[Array, "..."]:
    """Return E[o(x_{t + steps}) | x_t] of the fit's observable, by default the features.

    Args:
        operator: A fitted operator.
        x: Features of the present states (states, for a kernel operator), [n, d].
        steps: Lags ahead, at least 1: a number, or a list [T]. May be traced.

    Returns:
        Forecasts [n, ...] for a number, [T, n, ...] for a list; NaN for rows of x with NaN.

    Warns:
        UserWarning: For known values and up to 500 latent functions, if modes lose 1 % of the
            forecast to `alpha`.

    Raises:
        ValueError: If x has not the width of the fit, or a step is below 1 or beyond JAX's integers
            (2^31 - 1, in x64 2^63 - 1).

    References:
        Kostic et al. (2022), section 2.
    """
    ahead = _checked(steps)
    warn_float32(x)
    warn_lost(operator, ahead)
    latent = operator.encode(x)
    return _forecast(operator, latent, to_device(ahead), _num_digits(ahead - 1))


@eqx.filter_jit
def _forecast(operator: Operator, latent: Array, ahead: Array, digits: int) -> Array:
    """Return [1, u(x)] T^(s-1) [mean; D], see `Operator`, for lags s.

    All s - 1 have at most `digits` binary digits.
    """
    first_column = ((0, 0), (1, 0))
    latent = jnp.pad(latent, first_column, constant_values=1.0)
    step = jnp.concatenate([operator.drift[None], operator.core])
    step = jnp.pad(step, first_column)
    step = step.at[0, 0].set(1.0)
    powers = _matrix_powers(step, (ahead - 1).reshape(-1), digits)
    if ahead.ndim:
        latent = latent[None]
    else:
        powers = powers[0]
    latent = product(latent, powers)

    readout = jnp.concatenate([operator.mean_observable[None], operator.readout])
    flat = product(latent, readout)
    return flat.reshape(*flat.shape[:-1], *operator.observable_shape)


def warn_lost(operator: Operator, steps: np.ndarray | Array) -> None:
    """Warn if the modes lose 1 % of the forecast to `alpha`."""
    if any(map(is_traced, (operator.core, operator.alpha, steps))):
        return
    if operator.core.shape[0] > 500:
        return
    ahead = np.asarray(steps, float).reshape(-1, 1)
    # A bound of the loss, which spares most operators the decomposition.
    largest_penalty = np.linalg.norm(np.asarray(operator.penalty), 2)
    if ahead.max() * largest_penalty**4 < 1e-5:
        return

    with jax.ensure_compile_time_eval():  # the operator is known, even under a trace
        moduli, shrinkage, shares = (np.asarray(leaf, float) for leaf in _mode_losses(operator))
    with np.errstate(all="ignore"):
        amplitudes = shares * moduli ** (ahead - 1)
        losses = amplitudes * (1 - shrinkage**ahead)
        lost = np.sqrt(np.sum(losses**2, 1))
    if lost.max() > 1e-2:
        worst = np.argmax(lost)
        message = (
            f"`alpha` ({float(operator.alpha):.3g}) takes {lost[worst]:.2g} of the forecast "
            f"{int(ahead[worst, 0])} steps ahead: modes that it suppresses lose some of their "
            "size at every step. Lower it."
        )
        warnings.warn(message, stacklevel=1)


@eqx.filter_jit
def _mode_losses(operator: Operator) -> tuple[Array, Array, Array]:
    """Return moduli of the eigenvalues, their shrinkage and shares."""
    spectrum = decompose(operator)
    moduli = jnp.abs(spectrum.eigenvalues)
    shares = modes(operator, spectrum=spectrum).share
    return moduli, spectrum.shrinkage, shares


def _checked(steps: Steps) -> np.ndarray | Array:
    if is_traced(steps):
        return steps  # pyright: ignore[reportReturnType]
    ahead = np.asarray(steps)
    if ahead.min() < 1:
        fail("steps", "be at least 1", steps)
    integers = jax.dtypes.canonicalize_dtype(np.int64)
    maximum = jnp.iinfo(integers).max
    if ahead.max() > maximum:
        fail("steps", f"be at most {maximum}", ahead.max())
    return ahead


@validated
def matrix_powers(
    matrix: Float[Array | np.ndarray, "r r"], exponents: Int[Array | np.ndarray, " t"]
) -> Float[Array, "t r r"]:
    """Return powers [t, r, r] of one matrix.

    There is one squaring per binary digit of the largest exponent, or 31 if exponents are traced.

    Args:
        matrix: A square matrix, [r, r].
        exponents: Non-negative integers, [t]. A negative traced one gives NaN.

    Raises:
        ValueError: If a known exponent is negative, or beyond JAX's integers.
    """
    check_non_negative("exponents", exponents)
    return _matrix_powers(to_device(matrix), to_device(exponents), _num_digits(exponents))


def _num_digits(exponents: Any) -> int:
    """Return the number of binary digits of the largest exponent, or 31 if it is traced."""
    if is_traced(exponents):
        return 31
    largest = np.max(np.asarray(exponents), initial=1)
    return int(largest).bit_length()


@partial(jax.jit, static_argnames="digits")
def _matrix_powers(matrix: Array, exponents: Array, digits: int) -> Array:
    eye = jnp.eye(matrix.shape[0], dtype=matrix.dtype)

    def body(digit: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        powers, square = state
        remaining = exponents >> digit
        is_used = ((remaining & 1) == 1)[:, None, None]
        # Unused powers may overflow, here or in a gradient, and are neither multiplied nor squared.
        factors = jnp.where(is_used, square[None], eye[None])
        powers = jnp.where(is_used, product(powers, factors), powers)
        square = jnp.where(jnp.any(remaining > 1), square, 0.0)
        return powers, product(square, square)

    identities = jnp.broadcast_to(eye, (*exponents.shape, *eye.shape))
    powers, _ = lax.fori_loop(0, digits, body, (identities, matrix))
    is_negative = (exponents < 0)[:, None, None]
    return jnp.where(is_negative, jnp.nan, powers)


@validated
def risk(operator: Operator, x: Rows, y: Rows) -> Float[Array, ""]:
    """Return E |phi(y) - G^* phi(x)|^2, the mean squared error of the forecast.

    It is in squared units of the features.

    Args:
        operator: A fitted operator.
        x: Features of the states (states, for a kernel operator), [n, d].
        y: Features of the successors, [n, d].

    References:
        Kostic et al. (2022), eq. 4.
    """
    warn_float32(x, y)
    latent = operator.encode(x)
    dual = operator.dual
    if isinstance(dual, LinearMap):
        return _feature_risk(dual, latent, to_device(y))
    diagonal = _diagonal(dual.kernel, to_device(y))
    return _kernel_risk(diagonal, latent, dual(y), operator.dual_gram)


@jax.jit
def _feature_risk(dual: LinearMap, latent: Array, y: Array) -> Array:
    error = y - dual.offset[None] - product(latent, dual.matrix.T)
    return jnp.mean(jnp.sum(error**2, 1))


@compiled_by_kernel
def _diagonal(kernel: Kernel, y: Array) -> Array:
    """Return k(y, y) of each state, [n]."""

    def self_similarity(state: Array) -> Array:
        states = state[None]
        return kernel(states, states)[0, 0]

    return lax.map(self_similarity, y)


@jax.jit
def _kernel_risk(diagonal: Array, latent: Array, dual: Array, dual_gram: Array) -> Array:
    across = jnp.sum(latent * dual, 1)
    squares = jnp.sum(product(latent, dual_gram) * latent, 1)
    return jnp.mean(diagonal) - 2 * jnp.mean(across) + jnp.mean(squares)


@validated
def r2_score(
    target: Float[Array | np.ndarray, "n *o"], forecast: Float[Array | np.ndarray, "n *o"]
) -> Array:
    """Return 1 - squared errors / squared deviations, averaged over the entries of the observable.

    An entry constant in `target` scores 1 if its forecast is exact, else 0, as in scikit-learn.
    """
    if target.shape[0] < 2:
        fail("target", "hold at least two samples: one has no spread", f"shape {np.shape(target)}")
    warn_float32(target, forecast)
    return _r2_score(to_device(target), to_device(forecast))


@jax.jit
def _r2_score(target: Array, forecast: Array) -> Array:
    target = target.reshape(target.shape[0], -1)
    forecast = forecast.reshape(forecast.shape[0], -1)
    deviation = target - jnp.mean(target, 0)[None]
    residual = target - forecast
    is_constant = jnp.all(target == target[:1], 0)  # the mean may be rounded

    # Without a unit squares may overflow or vanish.
    unit = lax.stop_gradient(jnp.max(jnp.abs(deviation), 0))
    unit = jnp.where(is_constant | (unit == 0), 1.0, unit)[None]
    error = jnp.sum((residual / unit) ** 2, 0)
    spread = jnp.sum((deviation / unit) ** 2, 0)
    ratio = 1.0 - error / jnp.where(is_constant, 1.0, spread)

    is_exact = jnp.all(residual == 0, 0)
    score_of_constant = jnp.where(is_exact, 1.0, 0.0)
    return jnp.mean(jnp.where(is_constant, score_of_constant, ratio))


@validated
def score(
    operator: Operator,
    trajectory: Annotated[
        Float[Array | np.ndarray, "time d"] | Sequence[Float[Array | np.ndarray, "_ d"]], InTime()
    ],
    *,
    lag: int = 1,
    steps: int = 1,
    observable: Path | None = None,
    metric: Callable[[Array, Array], Array] = r2_score,
) -> Array:
    """Return a metric of the states at t + lag * steps and their forecasts from t.

    Args:
        operator: An operator fitted on pairs of this lag.
        trajectory: Features (states, for a kernel operator), [time, d], a list of such
            trajectories, or a frame as for `lagged_pairs`.
        lag: Lag of the fit, in samples.
        steps: Lags ahead.
        observable: Observable of the fit at the same times, [time, ...]. Default: `trajectory`.
        metric: Function of targets and forecasts of all pairs within trajectories, [n, ...] each;
            default R^2.

    Raises:
        ValueError: If a trajectory is not longer than lag * steps, or is not finite.
    """
    ahead = check_count("lag", lag, minimum=1) * check_count("steps", steps, minimum=1)
    states = _as_list(trajectory)
    targets = states if observable is None else _as_list(observable)
    lengths = list(map(len, states))
    target_lengths = list(map(len, targets))
    if min(lengths) <= ahead:
        fail("trajectory", f"be longer than lag * steps ({ahead})", f"{min(lengths)} samples")
    if lengths != target_lengths:
        fail("observable", f"be of the lengths of the trajectories, {lengths}", target_lengths)
    for array in states:
        check_finite("trajectory", array)

    x = cut([array[None] for array in states], ahead, ahead).x
    future = cut([array[None] for array in targets], ahead, ahead).y
    return metric(future, predict(operator, x, steps))


def _as_list(arrays: Any) -> list[Any]:
    if not isinstance(arrays, list | tuple):
        arrays = [arrays]
    return list(map(as_known, arrays))
