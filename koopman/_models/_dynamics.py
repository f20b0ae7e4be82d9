"""Linear dynamics of rows of features, with inputs, of estimates and of replicates."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import fail
from dissociation._core.linalg import product
from koopman._models._block_sums import Replicates
from koopman._models._lifting import Lifting, padded
from koopman._operators._operator import Operator

_FEEDBACK = 1e-7
"""Residual of an input over its spread below which it is a function of the other columns."""


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
    return _without_inputs(*(np.asarray(field)[None] for field in fields))


def of_replicates(replicates: Replicates, scale: np.ndarray) -> Dynamics:
    """Return the dynamics of replicates on features of root mean squares `scale`."""
    mean, project, *fields = map(np.asarray, replicates[:6])
    return _without_inputs(mean * scale, project / scale[:, None], *fields)


def _without_inputs(
    mean: Any, project: Any, core: Any, drift: Any, readout: Any, constant: Any
) -> Dynamics:
    return Dynamics(mean, project, core, drift, core[:, :0], readout, readout[:, :0], constant)


def regression(dynamics: Dynamics, lifting: Lifting) -> np.ndarray:
    """Return coefficients of rows of delays, and intercepts below them: [M, P + 1, o]."""
    latent = dynamics.project @ dynamics.readout
    coefficients = lifting.basis @ latent
    shift = lifting.offset[None] @ coefficients + dynamics.mean[:, None] @ latent
    return np.concatenate([coefficients, dynamics.constant[:, None] - shift], 1)


def with_inputs(solution: np.ndarray, num_delays: int, readout: np.ndarray) -> Dynamics:
    """Return the dynamics x' = [delays of x] A + [delays of u] B + c of rows of delays of x.

    Args:
        solution: A, B and c below each other, [M, P + 1, f].
        num_delays: Number of delays of x.
        readout: Map of features of a state to the observable, with its constant: [f + 1, o].
    """
    num_older = (num_delays - 1) * solution.shape[2]
    size = num_older + solution.shape[2]
    latent = np.pad(solution, ((0, 0), (0, 0), (0, num_older)))
    core, gain, drift = np.split(latent, [size, -1], 1)
    core[:, :num_older, size - num_older :] += np.eye(num_older)
    direct = np.split(solution @ readout[:-1], [size, -1], 1)
    return Dynamics(
        np.zeros((len(core), size)),
        np.broadcast_to(np.eye(size), core.shape),
        core,
        drift[:, 0],
        gain,
        direct[0],
        direct[1],
        direct[2][:, 0] + readout[-1],
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
    centred = rows - rows.mean(0)
    spread = centred.std(0)
    scaled = centred / np.where(spread > 0, spread, 1.0)
    for column in range(-num_inputs, 0):
        label = f"column {num_inputs + column}"
        if not spread[column] > 1e-12 * np.abs(rows[:, column]).max():
            requirement = "vary: the intercept stands for constant ones"
            fail("inputs", requirement, f"a constant {label}", "Leave it out")
        predictors = np.delete(scaled, column, 1)
        solution = np.linalg.lstsq(predictors, scaled[:, column], rcond=1e-12)[0]
        if (scaled[:, column] - predictors @ solution).std() < _FEEDBACK:
            fail(
                "inputs",
                "not be a linear function of the states and of the other inputs: a feedback "
                "u = x G leaves only A + G B",
                label,
                "Add noise to the inputs of the experiment, or leave `inputs` out",
            )


def shares(functions: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return the fraction of the variance of the forecast of one lag of every mode.

    It is Re E[conj(p_i) . p] / E|p|^2 of the modes p_i about their means and their sum p.

    Args:
        functions: Eigenfunctions about their means.
        shapes: Amplitudes of the modes.
    """
    covariance = functions.conj().T @ functions / len(functions)
    power = np.real(covariance * (shapes.conj() @ shapes.T)).sum(1)
    total = power.sum()
    return power / (total if total > 0 else 1.0)
