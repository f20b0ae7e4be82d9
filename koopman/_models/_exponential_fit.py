"""Least squares of sums of exponentials by variable projection, with times of every run."""

from typing import NamedTuple

import equinox as eqx
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


class Samples(eqx.Module):
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


class Blocks(eqx.Module):
    """Blocks of two exponentials with rates growth +- sqrt(-curvature), or of one.

    A curvature above 0 is a squared angular frequency, one below 0 belongs to two real rates. The
    span of a block is a smooth function of both numbers, unlike that of two rates.

    Attributes:
        growth: Mean growth rate of every block, per scaled time: [blocks].
        curvature: Squared angular frequency, [blocks].
        is_active: If False, the block is left out: [blocks].
        is_pair: If False, the block is one exponential, whose curvature is 0: [blocks].
    """

    growth: Float[AnyArray, " blocks"]
    curvature: Float[AnyArray, " blocks"]
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


def _sinusoids(
    curvature: Float[Array, " blocks"], times: Float[Array, "time 1"]
) -> tuple[Array, Array]:
    """Return the factors of both columns of blocks, and their derivatives by the curvature.

    Shapes are [time, blocks, 2]. Above 1 the factors are cos(b t) and sin(b t) with b^2 the
    curvature, and below -1 they are 1. In between they are cos(b t) and sin(b t) / b by their
    series, which are smooth at 0.
    """
    frequency = jnp.sqrt(jnp.maximum(jnp.abs(curvature), 1.0))[None]
    phase = frequency * times
    half = 0.5 * times / frequency
    ones = jnp.ones_like(phase)
    is_oscillating = (curvature > 1)[None, :, None]
    is_smooth = (jnp.abs(curvature) <= 1)[None, :, None]

    square = -jnp.clip(curvature, -1.0, 1.0)[None] * times**2
    cosine = ones
    sine = ones
    slope = ones
    for k in range(9, 0, -1):
        cosine = 1 + square / ((2 * k - 1) * (2 * k)) * cosine
        sine = 1 + square / ((2 * k) * (2 * k + 1)) * sine
    for k in range(8, 0, -1):
        slope = 1 + square * (k + 1) / (k * (2 * k + 2) * (2 * k + 3)) * slope
    series = jnp.stack([cosine, times * sine], -1)
    series_slope = jnp.stack([-0.5 * times**2 * sine, -(times**3) * slope / 6], -1)

    waves = jnp.stack([jnp.cos(phase), jnp.sin(phase)], -1)
    wave_slope = jnp.stack([-half * waves[..., 1], half * waves[..., 0]], -1)
    real = jnp.stack([ones, ones], -1)
    real_slope = jnp.stack([-half, half], -1)
    factors = jnp.where(is_smooth, series, jnp.where(is_oscillating, waves, real))
    slopes = jnp.where(is_smooth, series_slope, jnp.where(is_oscillating, wave_slope, real_slope))
    return factors, slopes


def _design(
    blocks: Blocks,
    times: Float[Array, " time"],
    weights: Float[Array, " time"],
    reach: Float[Array, ""],
) -> tuple[Float[Array, "time blocks 2"], Float[Array, "2 time blocks 2"]]:
    """Return weighted columns of a run, and their derivatives by growth and by curvature.

    The largest value of an exponential in the run is 1.
    """
    factors, slopes = _sinusoids(blocks.curvature, times[:, None])
    spread = jnp.where(blocks.curvature < -1, jnp.sqrt(jnp.abs(blocks.curvature)), 0.0)
    rates = jnp.stack([blocks.growth + spread, blocks.growth - spread], -1)
    exponents = times[:, None, None] * rates[None] - reach * jnp.abs(rates)[None]
    is_column = jnp.stack([blocks.is_active, blocks.is_active & blocks.is_pair], -1)
    scale = jnp.exp(exponents) * weights[:, None, None] * is_column[None]
    columns = factors * scale
    slopes = slopes * scale * blocks.is_pair[None, :, None]
    return columns, jnp.stack([times[:, None, None] * columns, slopes])


def project(samples: Samples, blocks: Blocks) -> Projection:
    """Return the states without their projection on the span of the exponentials.

    With Q R the design matrix of a run, P = I - Q Q', D_j its derivative by a parameter and B the
    amplitudes, the residual is r = P Y, and its derivative is -P D_j B - Q R^-T D_j' r, whose
    second term is left out. Then the curvatures are tr(B' D_j' P D_k B).

    References:
        Kaufman (1975), A variable projection method for solving separable nonlinear least squares
        problems. Golub and Pereyra (2003), Separable nonlinear least squares, section 2.
    """
    columns, slopes = jax.vmap(_design, (None, 0, 0, 0))(
        blocks, samples.times, samples.weights, samples.reach
    )
    num_runs, num_times, num_blocks, _ = columns.shape
    states = samples.states * samples.weights[..., None]
    columns = columns.reshape(num_runs, num_times, 2 * num_blocks)
    slopes = jnp.moveaxis(slopes, 1, 2).reshape(num_runs, num_times, 4 * num_blocks)
    # A zero column, of a block that is left out or of a run that pads, has a row to itself, so that
    # the span of the others stays as it is.
    norms = jnp.sqrt(jnp.sum(columns**2, 1))
    extra_rows = (norms <= 0)[:, None] * jnp.eye(2 * num_blocks, dtype=columns.dtype)[None]
    basis, root = jnp.linalg.qr(jnp.concatenate([columns, extra_rows], 1))
    basis = basis[:, :num_times]
    diagonal = jnp.abs(jnp.diagonal(root, axis1=1, axis2=2))
    eps = jnp.finfo(states.dtype).eps
    is_regular = diagonal > 100 * eps * norms
    root = root + ~is_regular[:, :, None] * jnp.eye(2 * num_blocks, dtype=root.dtype)[None]
    width = states.shape[2]
    targets = product(jnp.swapaxes(basis, 1, 2), jnp.concatenate([states, slopes], 2))
    coefficients = targets[..., :width] * is_regular[:, :, None]
    amplitudes = jax.scipy.linalg.solve_triangular(root, coefficients)
    residual = states - product(basis, coefficients)
    slopes = slopes - product(basis, targets[..., width:])

    shape = (num_runs, 2, num_blocks, 2)
    slopes_t = jnp.swapaxes(slopes, 1, 2)
    slope_products = product(slopes_t, slopes).reshape(*shape, *shape[1:])
    slope_states = product(slopes_t, residual).reshape(*shape, width)
    by_block = amplitudes.reshape(num_runs, num_blocks, 2, width)
    squares = product(amplitudes, jnp.swapaxes(amplitudes, 1, 2)).reshape(
        *by_block.shape[:3], *shape[2:]
    )
    curvatures = jnp.einsum("rkiuljv,riujv->kilj", slope_products, squares)
    gradient = jnp.einsum("rkiud,riud->ki", slope_states, by_block)
    num_parameters = 2 * num_blocks
    return Projection(
        residual,
        jnp.sum(residual**2),
        amplitudes,
        gradient.reshape(num_parameters),
        curvatures.reshape(num_parameters, num_parameters),
    )


def clipped(blocks: Blocks, limits: Limits) -> Blocks:
    """Return blocks whose rates and frequencies are within the limits."""
    growth = jnp.clip(blocks.growth, -limits.growth, limits.growth)
    # Both real rates growth +- sqrt(-curvature) stay within the limit.
    room = limits.growth - jnp.abs(growth)
    curvature = jnp.clip(blocks.curvature, -(room**2), limits.frequency**2)
    curvature = jnp.where(blocks.is_pair, curvature, 0.0)
    return eqx.tree_at(lambda b: (b.growth, b.curvature), blocks, (growth, curvature))


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
    states = samples.states * samples.weights[..., None]
    floor = (10 * eps) ** 2 * jnp.sum(states**2)

    def step(search: _Search) -> _Search:
        projection = search.projection
        diagonal = positive_or_one(jnp.diagonal(projection.curvatures))
        scale = 1 / jnp.sqrt(diagonal)
        scaled = projection.curvatures * scale[:, None] * scale[None]
        damped = scaled + (search.damping + eps) * jnp.eye(scale.shape[0], dtype=scale.dtype)
        damped = damped + jnp.diag((jnp.diagonal(scaled) <= 0).astype(scale.dtype))
        change = jnp.linalg.solve(damped, (projection.gradient * scale)[:, None])[:, 0]
        change = change * scale
        growth_change, curvature_change = jnp.split(change, 2)
        previous = search.blocks
        moved = eqx.tree_at(
            lambda b: (b.growth, b.curvature),
            previous,
            (previous.growth + growth_change, previous.curvature + curvature_change),
        )
        moved = clipped(moved, limits)
        growth_change = moved.growth - previous.growth
        curvature_change = moved.curvature - previous.curvature
        actual_change = jnp.concatenate([growth_change, curvature_change])
        # At a limit the step is shorter, and so is the decrease that it promises.
        decrease = jnp.abs(jnp.sum(actual_change * projection.gradient))
        candidate = project(samples, moved)
        # Close to the minimum, rounding hides the decrease.
        is_better = candidate.error < projection.error * (1 + 4 * eps)
        is_small = decrease <= _TOLERANCE * projection.error + floor
        is_known = jnp.isfinite(projection.error)
        has_converged = is_small & is_known & (search.damping < 0.1)
        damping = jnp.where(is_better, search.damping / 8, search.damping * 4 + 1e-4)
        damping = jnp.where(is_known, damping, search.damping)

        def choose(new: Array, old: Array) -> Array:
            return jnp.where(is_better, new, old)

        blocks = jax.tree.map(choose, moved, previous)
        projection = jax.tree.map(choose, candidate, projection)
        num_steps = search.num_steps + 1
        return _Search(blocks, projection, damping, has_converged, num_steps)

    def is_running(search: _Search) -> Bool[Array, ""]:
        is_stuck = search.damping > 1e12
        return ~search.has_converged & ~is_stuck & (search.num_steps < max_steps)

    blocks = clipped(blocks, limits)
    dtype = samples.states.dtype
    # The first step has gradient zero and computes the projection of the start.
    start = _Search(
        blocks,
        unknown_projection(samples, blocks),
        jnp.asarray(1e-2, dtype),
        jnp.asarray(False),
        jnp.asarray(0),
    )
    end = lax.while_loop(is_running, step, start)
    return Solution(end.blocks, end.projection, end.has_converged)
