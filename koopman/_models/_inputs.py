"""Linear systems with inputs, x_{t+1} = [x_t .. x_{t-p+1}] A + [u_t .. u_{t-q+1}] B + c."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Complex, Float

from dissociation._core.checks import fail
from dissociation._core.linalg import product
from koopman._models._block_sums import Replicates
from koopman._models._lifting import Lifted
from koopman._operators._kernels import Operator

_FEEDBACK = 1e-7
"""Residual of an input over its spread below which it is a function of the other columns."""


class InputSystem(eqx.Module):
    """Coefficients of rows of delays and inputs, and of the observable.

    Attributes:
        coefficients: A and B below each other, in rows: [P, f].
        intercept: c, [f].
        readout: Map of features of one state to the observable, [f, o].
        mean_observable: Constant of this map, [o].
    """

    coefficients: Float[Array | np.ndarray, "*M P f"]
    intercept: Float[Array | np.ndarray, "*M f"]
    readout: Float[Array | np.ndarray, "f o"]
    mean_observable: Float[Array | np.ndarray, " o"]


class Spectrum(NamedTuple):
    """Eigenvalues of a system without its inputs.

    Attributes:
        eigenvalues: Eigenvalues per lag, [k].
        shapes: Modes of the observable, [k, o].
        share: Fraction of the variance of the forecast of one lag, [k].
    """

    eigenvalues: Complex[np.ndarray, " k"]
    shapes: Complex[np.ndarray, "k o"]
    share: Float[np.ndarray, " k"]


def refuse_singular(rows: Float[np.ndarray, "n P"], num_inputs: int) -> None:
    """Raise if inputs are constant, or functions of the states and the other inputs.

    Args:
        rows: Delays of states, and then of inputs, newest first.
        num_inputs: Number of inputs.
    """
    first = rows.shape[1] - num_inputs
    centred = rows - rows.mean(0)
    spread = np.sqrt(np.mean(centred**2, 0))
    scaled = centred / np.where(spread > 0, spread, 1.0)
    for column in range(first, rows.shape[1]):
        name = column - first
        if not spread[column] > 1e-12 * np.abs(rows[:, column]).max():
            fail(
                "inputs",
                "vary: the intercept stands for constant ones",
                f"a constant column {name}",
                "Leave it out",
            )
        others = np.delete(scaled, column, 1)
        solution = np.linalg.lstsq(others, scaled[:, column], rcond=1e-12)[0]
        residual = scaled[:, column] - others @ solution
        if np.sqrt(np.mean(residual**2)) < _FEEDBACK:
            fail(
                "inputs",
                "not be a linear function of the states and of the other inputs: a feedback "
                "u = x G leaves only A + G B",
                f"such a column {name}",
                "Add noise to the inputs of the experiment, or leave `inputs` out",
            )


def input_system(
    operator: Operator,
    lifted: Lifted,
    readout: Float[np.ndarray, "f o"],
    mean_observable: Float[np.ndarray, " o"],
) -> InputSystem:
    """Return the coefficients of rows from a fit on the basis of the rows."""
    lifting = lifted.lifting
    encode: Any = operator.encode
    latent = np.asarray(encode.matrix) @ np.asarray(operator.readout)
    coefficients = np.asarray(lifting.basis) @ latent
    centre = np.asarray(lifting.offset) @ coefficients + np.asarray(encode.offset) @ latent
    intercept = np.asarray(operator.mean_observable) - centre
    return InputSystem(coefficients, intercept, readout, mean_observable)


def replicated_systems(replicates: Replicates, lifted: Lifted, system: InputSystem) -> InputSystem:
    """Return the coefficients of all replicates."""
    basis = np.asarray(lifted.lifting.basis) / lifted.scale
    latent = np.asarray(replicates.project) @ np.asarray(replicates.readout)
    coefficients = basis @ latent
    centre = np.asarray(lifted.lifting.offset) @ coefficients
    centre = centre + (np.asarray(replicates.mean)[:, None] @ latent)[:, 0]
    intercept = np.asarray(replicates.mean_observable) - centre
    return InputSystem(coefficients, intercept, system.readout, system.mean_observable)


def companion(
    coefficients: Float[np.ndarray, "*M P f"], num_delays: int
) -> Float[np.ndarray, "*M k k"]:
    """Return the matrix that maps a row of delays to the next one, without inputs."""
    width = coefficients.shape[-1]
    size = num_delays * width
    matrix = np.zeros((*coefficients.shape[:-2], size, size))
    matrix[..., :width] = coefficients[..., :size, :]
    matrix[..., : size - width, width:] += np.eye(size - width)
    return matrix


def spectrum_of(system: InputSystem, num_delays: int, rows: Float[np.ndarray, "n P"]) -> Spectrum:
    """Return the eigenvalues of the companion matrix, with modes and shares on rows."""
    matrix = companion(np.asarray(system.coefficients), num_delays)
    values, vectors = np.linalg.eig(matrix)
    order = np.argsort(-np.abs(values), kind="stable")
    values = values[order]
    vectors = vectors[:, order]
    width = np.asarray(system.coefficients).shape[1]
    shapes = np.linalg.pinv(vectors)[:, :width] @ np.asarray(system.readout)
    shapes = values[:, None] * shapes
    states = rows[:, : len(matrix)]
    functions = (states - states.mean(0)) @ vectors
    covariance = functions.conj().T @ functions
    return Spectrum(values, shapes, shares(covariance, shapes))


def shares(
    covariance: Complex[np.ndarray, "k k"], shapes: Complex[np.ndarray, "k o"]
) -> Float[np.ndarray, " k"]:
    """Return the fraction of the variance of the forecast of one lag of every mode.

    It is Re E[conj(p_i) . p] / E|p|^2 of the modes p_i about their means and their sum p.

    Args:
        covariance: E[conj(psi_i) psi_j] of the eigenfunctions about their means.
        shapes: Amplitudes of the modes.
    """
    power = np.real(covariance * (shapes.conj() @ shapes.T)).sum(1)
    total = power.sum()
    return power / (total if total > 0 else 1.0)


def with_eigenvalues(replicates: Replicates, systems: InputSystem, num_delays: int) -> Replicates:
    """Return replicates whose eigenvalues are those of the companion matrices."""
    matrices = companion(np.asarray(systems.coefficients), num_delays)
    values = np.linalg.eigvals(matrices)
    # Twice the lag depends on inputs in between, so the check with it passes.
    num_later = len(replicates.eigenvalues_later)
    return replicates._replace(eigenvalues=values, eigenvalues_later=values[:num_later] ** 2)


@jax.jit
def simulate(
    system: InputSystem, rows: Float[Array, "n k"], inputs: Float[Array, "steps n q"]
) -> Float[Array, "*M steps n f"]:
    """Return features of states of every step from rows of delays and rows of inputs.

    Args:
        system: Coefficients, perhaps of replicates.
        rows: Delays of states, newest first.
        inputs: Delays of inputs of every step, newest first.
    """

    def simulate_one(coefficients: Array, intercept: Array) -> Array:
        def step(row: Array, input_row: Array) -> tuple[Array, Array]:
            joint = jax.numpy.concatenate([row, input_row], 1)
            state = product(joint, coefficients) + intercept[None]
            row = jax.numpy.concatenate([state, row], 1)[:, : row.shape[1]]
            return row, state

        return lax.scan(step, rows, inputs)[1]

    if system.coefficients.ndim == 2:
        return simulate_one(system.coefficients, system.intercept)
    return jax.vmap(simulate_one)(system.coefficients, system.intercept)
