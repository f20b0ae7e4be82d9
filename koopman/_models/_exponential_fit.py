"""Least squares of sums of exponentials by variable projection, with times of every run."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from dissociation._core.linalg import product
from koopman._operators._numerics import positive_or_one

AnyArray = Array | np.ndarray

_TOLERANCE = 1e-12
"""Largest predicted decrease of the squared error of a converged fit, as a share of the error."""


class Samples(NamedTuple):
    """Padded runs on scaled times.

    Attributes:
        states: States, zero where the weight is: [runs, time, d].
        times: Times about the middle of the run, from -1 to 1: [runs, time].
        weights: Weights of rows, 0 for rows that pad: [runs, time].
        reach: Largest modulus of the times of a run, [runs].
    """

    states: Float[AnyArray, "runs time d"]
    times: Float[AnyArray, "runs time"]
    weights: Float[AnyArray, "runs time"]
    reach: Float[AnyArray, " runs"]


class Blocks(NamedTuple):
    """Blocks of two exponentials with rates a +- sqrt(-c), or of one with rate a.

    A curvature c above 0 is a squared angular frequency, and one below 0 belongs to two real rates.
    The span of a block is a smooth function of a and c, unlike that of two rates.

    Attributes:
        parameters: a and c of every block, per scaled time: [2, blocks].
        is_active: If False, the block is left out: [blocks].
        is_pair: If False, the block is one exponential: [blocks].
    """

    parameters: Float[AnyArray, "2 blocks"]
    is_active: Bool[AnyArray, " blocks"]
    is_pair: Bool[AnyArray, " blocks"]


class Limits(NamedTuple):
    """Largest modulus of a real rate, and largest angular frequency, per scaled time."""

    growth: Float[AnyArray, ""]
    frequency: Float[AnyArray, ""]


class Projection(NamedTuple):
    """States without their projection on the span of the exponentials.

    Attributes:
        residual: Weighted residual, [runs, time, d].
        error: Sum of the squares of the residual, infinite before a projection.
        amplitudes: Coefficients of the columns, [runs, columns, d].
        gradient: Half of the derivative of the squared error with its sign changed, [parameters].
        curvatures: Gauss and Newton's half of the second derivatives, [parameters, parameters].
    """

    residual: Float[AnyArray, "runs time d"]
    error: Float[AnyArray, ""]
    amplitudes: Float[AnyArray, "runs columns d"]
    gradient: Float[AnyArray, " parameters"]
    curvatures: Float[AnyArray, "parameters parameters"]


class Solution(NamedTuple):
    """Result of an optimisation.

    Attributes:
        blocks: Blocks at the end.
        projection: Projection on their span.
        has_converged: True if the predicted decrease of the error is negligible.
    """

    blocks: Blocks
    projection: Projection
    has_converged: Bool[AnyArray, ""]


def _design(
    blocks: Blocks,
    times: Float[AnyArray, " time"],
    weights: Float[AnyArray, " time"],
    reach: Float[AnyArray, ""],
) -> Float[Array, "3 time blocks 2"]:
    """Return weighted columns of a run, and their derivatives by growth and by curvature.

    Columns are e^{at} cos(bt) and e^{at} sin(bt) with b^2 the curvature, or two real exponentials.
    The largest value of an exponential in the run is 1.
    """
    growth, curvature = blocks.parameters
    times = times[:, None, None]
    root = positive_or_one(jnp.sqrt(jnp.abs(curvature)))
    signs = jnp.array([1.0, -1.0], root.dtype)
    is_wave = (curvature > 0)[None, :, None]
    spread = jnp.where(curvature < 0, root, 0.0)
    rates = growth[:, None] + spread[:, None] * signs[None]
    scale = jnp.exp(times * rates[None] - reach * jnp.abs(rates)[None]) * weights[:, None, None]
    is_column = jnp.stack([blocks.is_active, blocks.is_active & blocks.is_pair], -1)
    scale = scale * is_column[None]

    phase = times * root[None, :, None]
    cosine = jnp.cos(phase)
    sine = jnp.sin(phase)
    columns = jnp.where(is_wave, jnp.concatenate([cosine, sine], -1), 1.0)
    # Half of the derivative by the root, over the root.
    waves = jnp.concatenate([-sine, cosine], -1)
    slopes = jnp.where(is_wave, waves, -signs[None, None])
    slopes = 0.5 * times / root[None, :, None] * slopes * blocks.is_pair[None, :, None]
    return jnp.stack([columns, times * columns, slopes]) * scale[None]


def project(samples: Samples, blocks: Blocks) -> Projection:
    """Return the states without their projection on the span of the exponentials.

    With Q R the design matrix of a run, P = I - Q Q', D_j its derivative by a parameter and B the
    amplitudes, the residual is r = P Y, and its derivative is -P D_j B - Q R^-T D_j' r, whose
    second term is left out. Then the curvatures are tr(B' D_j' P D_k B).

    References:
        Kaufman (1975), A variable projection method for solving separable nonlinear least squares
        problems. Golub and Pereyra (2003), Separable nonlinear least squares, section 2.
    """
    states, times, weights, reach = samples
    states = states * weights[..., None]
    design = jax.vmap(_design, (None, 0, 0, 0), 2)(blocks, times, weights, reach)
    _, num_times, num_runs, num_blocks, _ = design.shape
    design = jnp.moveaxis(design, 2, 0)
    columns = design[:, 0].reshape(num_runs, num_times, 2 * num_blocks)
    slopes = jnp.moveaxis(design[:, 1:], 1, 2).reshape(num_runs, num_times, 4 * num_blocks)
    # A zero column, of a block that is left out or of a run that pads, has a row to itself, so that
    # the span of the others stays as it is.
    norms = jnp.sqrt(jnp.sum(columns**2, 1))
    unit = jnp.eye(2 * num_blocks, dtype=columns.dtype)[None]
    extra_rows = (norms <= 0)[:, None] * unit
    basis, root = jnp.linalg.qr(jnp.concatenate([columns, extra_rows], 1))
    basis = basis[:, :num_times]
    sizes = jnp.abs(jnp.diagonal(root, axis1=1, axis2=2))
    is_regular = sizes > 100 * jnp.finfo(sizes.dtype).eps * norms
    root = root + ~is_regular[:, :, None] * unit
    targets = product(jnp.swapaxes(basis, 1, 2), jnp.concatenate([states, slopes], 2))
    coefficients, slope_targets = jnp.split(targets, [states.shape[2]], 2)
    coefficients = coefficients * is_regular[:, :, None]
    amplitudes = jax.scipy.linalg.solve_triangular(root, coefficients)
    residual = states - product(basis, coefficients)
    slopes = slopes - product(basis, slope_targets)

    slopes = slopes.reshape(num_runs, num_times, 2, num_blocks, 2)
    by_block = amplitudes.reshape(num_runs, num_blocks, 2, -1)
    squares = jnp.einsum("riud,rjvd->riujv", by_block, by_block)
    slope_squares = jnp.einsum("rtkiu,rtljv->rkiuljv", slopes, slopes)
    curvatures = jnp.einsum("rkiuljv,riujv->kilj", slope_squares, squares)
    slope_states = jnp.einsum("rtkiu,rtd->rkiud", slopes, residual)
    gradient = jnp.einsum("rkiud,riud->ki", slope_states, by_block).ravel()
    curvatures = curvatures.reshape(len(gradient), -1)
    return Projection(residual, jnp.sum(residual**2), amplitudes, gradient, curvatures)


def _clipped(
    parameters: Float[Array, "2 blocks"], is_pair: Bool[AnyArray, " blocks"], limits: Limits
) -> Float[Array, "2 blocks"]:
    """Return parameters whose rates and frequencies are within the limits."""
    growth, curvature = parameters
    growth = jnp.clip(growth, -limits.growth, limits.growth)
    # Both real rates growth +- sqrt(-curvature) stay within the limit.
    room = limits.growth - jnp.abs(growth)
    curvature = jnp.clip(curvature, -(room**2), limits.frequency**2)
    # At 0 both columns of a pair are equal.
    smallest = _smallest_curvature(curvature)
    curvature = jnp.where(jnp.abs(curvature) < smallest, smallest, curvature)
    return jnp.stack([growth, jnp.where(is_pair, curvature, 0.0)])


def _smallest_curvature(array: Array) -> float:
    return float(jnp.finfo(array.dtype).eps) ** 0.5


def unknown_projection(samples: Samples, blocks: Blocks) -> Projection:
    """Return a projection of infinite error, from which an optimisation starts."""
    structs = jax.eval_shape(project, samples, blocks)
    zeros = jax.tree.map(lambda struct: jnp.zeros(struct.shape, struct.dtype), structs)
    return zeros._replace(error=jnp.full_like(zeros.error, jnp.inf))


class _Search(NamedTuple):
    """State of the optimisation: the damping is in units of the diagonal of the curvatures."""

    blocks: Blocks
    projection: Projection
    damping: Float[Array, ""]
    has_converged: Bool[Array, ""]
    num_steps: Int[Array, ""]


def optimise(
    samples: Samples, blocks: Blocks, limits: Limits, max_steps: Int[Array, ""]
) -> Solution:
    """Return the blocks of a local minimum of the squared error.

    References:
        Marquardt (1963), An algorithm for least-squares estimation of nonlinear parameters.
    """
    eps = jnp.finfo(samples.states.dtype).eps
    floor = (10 * eps) ** 2 * jnp.sum((samples.states * samples.weights[..., None]) ** 2)

    def step(search: _Search) -> _Search:
        blocks, projection, damping, _, num_steps = search
        diagonal = jnp.diagonal(projection.curvatures)
        scale = 1 / jnp.sqrt(positive_or_one(diagonal))
        scaled = projection.curvatures * scale[:, None] * scale[None]
        damped = scaled + jnp.diag(jnp.where(diagonal > 0, damping + eps, 1.0))
        change = jnp.linalg.solve(damped, (projection.gradient * scale)[:, None])[:, 0] * scale
        parameters = blocks.parameters + change.reshape(2, -1)
        parameters = _clipped(parameters, blocks.is_pair, limits)
        moved = blocks._replace(parameters=parameters)
        # At a limit the step is shorter, and so is the decrease that it promises.
        change = (parameters - blocks.parameters).ravel()
        decrease = jnp.abs(jnp.sum(change * projection.gradient))
        candidate = project(samples, moved)
        # Close to the minimum, rounding hides the decrease.
        is_better = candidate.error < projection.error * (1 + 4 * eps)
        is_small = decrease <= _TOLERANCE * projection.error + floor
        is_small |= jnp.max(jnp.abs(change)) <= _smallest_curvature(change)
        has_converged = is_small & (damping < 0.1) & jnp.isfinite(projection.error)
        damping = jnp.where(is_better, damping / 8, damping * 4 + 1e-4)
        blocks, projection = jax.tree.map(
            lambda new, old: jnp.where(is_better, new, old),
            (moved, candidate),
            (blocks, projection),
        )
        return _Search(blocks, projection, damping, has_converged, num_steps + 1)

    def is_running(search: _Search) -> Bool[Array, ""]:
        is_stuck = search.damping > 1e12
        return ~search.has_converged & ~is_stuck & (search.num_steps < max_steps)

    parameters = _clipped(jnp.asarray(blocks.parameters), blocks.is_pair, limits)
    blocks = blocks._replace(parameters=parameters)
    # The first step has gradient zero and computes the projection of the start.
    damping = jnp.asarray(1e-2, parameters.dtype)
    projection = unknown_projection(samples, blocks)
    start = _Search(blocks, projection, damping, jnp.asarray(False), jnp.asarray(0))
    end = lax.while_loop(is_running, step, start)
    return Solution(end.blocks, end.projection, end.has_converged)
