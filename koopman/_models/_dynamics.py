"""Linear dynamics of rows of features, with inputs, of estimates and of replicates."""

from statistics import NormalDist
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import fail
from dissociation._core.linalg import product
from koopman._models._block_sums import Replicates
from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import StateBasis, padded
from koopman._operators._operator import Operator

_FEEDBACK = 1e-7
"""Residual of an input over its spread below which it is a function of the other columns."""
_FEWEST_ERRORS = 10
"""Number of training errors below which those of fewer steps serve."""


class Dynamics(NamedTuple):
    """Linear systems z' = z K + u G + m with z = (row - mean) U, and o' = z D + u E + c.

    Fields have an axis of replicates first, of length M. Without inputs u has no columns.
    """

    mean: Any  # [M, R]
    project: Any  # U, [M, R, r]
    core: Any  # K, [M, r, r]
    drift: Any  # m, [M, r]
    gain: Any  # G, [M, q, r]
    readout: Any  # D, [M, r, o]
    direct: Any  # E, [M, q, o]
    constant: Any  # c, [M, o]


def of_operator(operator: Operator) -> Dynamics:
    """Return the dynamics of an operator on features."""
    encode: Any = operator.encode
    fields = [encode.offset, encode.matrix, operator.core, operator.drift]
    fields += [operator.readout, operator.mean_observable]
    return _without_inputs([np.asarray(field)[None] for field in fields])


def of_replicates(replicates: Replicates, scale: np.ndarray) -> Dynamics:
    """Return the dynamics of replicates on features of root mean squares `scale`."""
    fields = [np.asarray(field) for field in replicates[:6]]
    fields[0] = fields[0] * scale
    fields[1] = fields[1] / scale[:, None]
    return _without_inputs(fields)


def _without_inputs(fields: list[np.ndarray]) -> Dynamics:
    mean, project, core, drift, readout, constant = fields
    return Dynamics(mean, project, core, drift, core[:, :0], readout, readout[:, :0], constant)


def regression(
    dynamics: Dynamics, offset: np.ndarray, basis: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients [M, P, o] and intercepts [M, o] of rows (row - offset) basis."""
    latent = dynamics.project @ dynamics.readout
    coefficients = basis @ latent
    shift = offset @ coefficients + (dynamics.mean[:, None] @ latent)[:, 0]
    return coefficients, dynamics.constant - shift


def with_inputs(
    coefficients: np.ndarray,
    intercept: np.ndarray,
    num_delays: int,
    readout: np.ndarray,
    mean_observable: np.ndarray,
) -> Dynamics:
    """Return the dynamics x' = [delays of x] A + [delays of u] B + c of rows of delays of x.

    Args:
        coefficients: A and B below each other, [M, P, f].
        intercept: c, [M, f].
        num_delays: Number of delays of x.
        readout: Map of features of a state to the observable, [f, o].
        mean_observable: Constant of this map, [o].
    """
    width = coefficients.shape[2]
    size = num_delays * width
    others = ((0, 0), (0, size - width))
    a, b = np.split(coefficients, [size], 1)
    core = np.pad(a, ((0, 0), *others))
    core[:, : size - width, width:] += np.eye(size - width)
    return Dynamics(
        np.zeros(core.shape[:2]),
        np.broadcast_to(np.eye(size), core.shape),
        core,
        np.pad(intercept, others),
        np.pad(b, ((0, 0), *others)),
        a @ readout,
        b @ readout,
        intercept @ readout + mean_observable,
    )


def one_step(dynamics: Dynamics, rows: np.ndarray, inputs: np.ndarray) -> np.ndarray:
    """Return forecasts of one lag of the first replicate, by NumPy."""
    mean, project, _, _, _, readout, direct, constant = (field[0] for field in dynamics)
    return ((rows - mean) @ project) @ readout + inputs @ direct + constant


def forecasts(
    dynamics: Dynamics, rows: np.ndarray, inputs: np.ndarray, ahead: np.ndarray
) -> np.ndarray:
    """Return forecasts [M, t, n, o] at rising lags from rows [n, R], by one program.

    Args:
        dynamics: Systems.
        rows: Rows at the present.
        inputs: Inputs of every step, [steps, n, q].
        ahead: Lags, rising from 1 or more.
    """
    dtype = dynamics.core.dtype
    num_rows = len(rows)
    rows = padded(rows.astype(dtype))
    missing = ((0, 0), (0, len(rows) - num_rows), (0, 0))
    values = _forecasts(dynamics, rows, np.pad(inputs.astype(dtype), missing))
    return np.asarray(values)[:, ahead - 1, :num_rows]


@jax.jit
def _forecasts(dynamics: Dynamics, rows: Array, inputs: Array) -> Array:
    def forecasts_of(system: Dynamics) -> Array:
        def step(latent: Array, u: Array) -> tuple[Array, Array]:
            observable = product(latent, system.readout) + product(u, system.direct)
            latent = product(latent, system.core) + product(u, system.gain) + system.drift[None]
            return latent, observable + system.constant[None]

        return lax.scan(step, product(rows - system.mean[None], system.project), inputs)[1]

    return jax.vmap(forecasts_of)(dynamics)


def refuse_singular(rows: np.ndarray, num_inputs: int) -> None:
    """Raise if inputs are constant, or functions of the states and the other inputs.

    Args:
        rows: Delays of states, and then of inputs, newest first.
        num_inputs: Number of columns that are inputs.
    """
    first = rows.shape[1] - num_inputs
    centred = rows - rows.mean(0)
    spread = centred.std(0)
    for column in range(first, rows.shape[1]):
        if not spread[column] > 1e-12 * np.abs(rows[:, column]).max():
            fail(
                "inputs",
                "vary: the intercept stands for constant ones",
                f"a constant column {column - first}",
                "Leave it out",
            )
    scaled = centred / np.where(spread > 0, spread, 1.0)
    for column in range(first, rows.shape[1]):
        others = np.delete(scaled, column, 1)
        solution = np.linalg.lstsq(others, scaled[:, column], rcond=1e-12)[0]
        if (scaled[:, column] - others @ solution).std() < _FEEDBACK:
            fail(
                "inputs",
                "not be a linear function of the states and of the other inputs: a feedback "
                "u = x G leaves only A + G B",
                f"such a column {column - first}",
                "Add noise to the inputs of the experiment, or leave `inputs` out",
            )


def shares(covariance: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the fraction of the variance of the forecast of one lag of every mode.

    It is Re E[conj(p_i) . p] / E|p|^2 of the modes p_i about their means and their sum p.

    Args:
        covariance: E[conj(psi_i) psi_j] of the eigenfunctions about their means.
        shapes: Amplitudes of the modes.
    """
    power = np.real(covariance * (shapes.conj() @ shapes.T)).sum(1)
    total = power.sum()
    return power / (total if total > 0 else 1.0)


class Bands(NamedTuple):
    """Means with intervals, and intervals of new observations: [steps, runs, d]."""

    mean: np.ndarray
    mean_low: np.ndarray
    mean_high: np.ndarray
    low: np.ndarray
    high: np.ndarray


def bands(
    mean: np.ndarray,
    deleted: np.ndarray | None,
    errors: list[np.ndarray],
    level: float,
    basis: StateBasis | None,
) -> Bands:
    """Return the bands of a forecast; those of means are NaN without replicates.

    The band of observations joins the interval of the mean and the quantiles of the training
    errors as independent errors.

    Args:
        mean: Forecasts, [steps, runs, o].
        deleted: Forecasts with one block deleted, [N, steps, runs, o], or None.
        errors: Errors of training forecasts of every step, [rows, o].
        level: Probability of the intervals.
        basis: Basis of wide states, or None.
    """

    def expanded(coordinates: np.ndarray) -> np.ndarray:
        return coordinates if basis is None else basis.states(coordinates)

    mean = expanded(mean)
    half_width = np.full(mean.shape, np.nan)
    low = np.full(mean.shape, np.nan)
    high = np.full(mean.shape, np.nan)
    lower = upper = np.full(mean.shape[2], np.nan)
    for step, errors_of_step in enumerate(errors):
        if deleted is not None:
            states = expanded(deleted[:, step])
            half_width[step] = student_quantile(states, level) * jackknife_error(states)
        if len(errors_of_step) >= _FEWEST_ERRORS:
            lower, upper = _quantiles(errors_of_step, 0.5 + 0.5 * level, basis)
        half_error = 0.5 * (upper - lower)
        spread = np.hypot(half_error, np.nan_to_num(half_width[step])) - half_error
        low[step] = mean[step] + lower - spread
        high[step] = mean[step] + upper + spread
    return Bands(mean, mean - half_width, mean + half_width, low, high)


def _quantiles(errors: np.ndarray, tail: float, basis: StateBasis | None) -> Any:
    """Return the lower and upper quantiles of errors; of wide states those of a normal law."""
    if basis is None:
        return np.quantile(errors, [1 - tail, tail], axis=0)
    mean = basis.states(errors.mean(0))
    covariance = np.atleast_2d(np.cov(errors, rowvar=False, bias=True))
    variance = np.sum((basis.vectors @ covariance) * basis.vectors, 1)
    half_width = NormalDist().inv_cdf(tail) * np.sqrt(np.maximum(variance, 0.0)) * basis.scale
    return mean - half_width, mean + half_width
