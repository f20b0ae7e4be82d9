"""Least squares of sums of exponentials by variable projection, with times of every run."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dissociation._core.linalg import product
from koopman._operators._numerics import positive_or_one, rounding_unit

FASTEST = 3.0
"""Largest growth or decay per median step."""
_TOLERANCE = 1e-12
"""Largest predicted decrease of the squared error of a converged fit, as a share of the error."""


class Samples(NamedTuple):
    """Padded runs on scaled times.

    Attributes:
        states: States, zero in rows that pad: [runs, time, d].
        times: Times about the middle of the run, from -1 to 1, zero in rows that pad: [runs, time].
        weights: Weights of rows, 0 for rows that pad: [runs, time].
        step: Median step of the times.
    """

    states: Any
    times: Any
    weights: Any
    step: Any


class Blocks(NamedTuple):
    """Blocks of two exponentials with rates a +- sqrt(-c), or of one with rate a.

    A curvature c above 0 is a squared angular frequency, and one below 0 belongs to two real rates.
    The span of a block is a smooth function of a and c, unlike that of two rates.

    Attributes:
        parameters: a and c of every block, per scaled time: [blocks, 2].
        is_column: True for the exponentials that the blocks have: [blocks, 2].
    """

    parameters: Any
    is_column: Any


class Projection(NamedTuple):
    """States without their projection on the span of the exponentials.

    Attributes:
        residual: Weighted residual, [runs, time, d].
        error: Sum of the squares of the residual, infinite before a projection.
        amplitudes: Coefficients of the columns, [runs, columns, d].
        gradient: Half of the derivative of the squared error with its sign changed, [parameters].
        curvatures: Gauss and Newton's half of the second derivatives, [parameters, parameters].
    """

    residual: Any
    error: Any
    amplitudes: Any
    gradient: Any
    curvatures: Any


class Solution(NamedTuple):
    """Blocks at the end of an optimisation, and the projection on their span.

    It has converged if the predicted decrease of the error is negligible.
    """

    blocks: Blocks
    projection: Projection
    has_converged: Any


_Search = tuple[Solution, Array, Array]
"""Solution, damping and number of steps."""


def _columns(parameters: Array, time: Array, reach: Array) -> Array:
    """Return both columns of a block at one time.

    Columns are e^{at} cos(bt) and e^{at} sin(bt) with b^2 the curvature, or two real exponentials.
    The largest value of an exponential in a run is 1.
    """
    growth, curvature = parameters
    root = jnp.sqrt(positive_or_one(jnp.abs(curvature)))
    spread = jnp.where(curvature < 0, root, 0.0)
    rates = jnp.stack([growth + spread, growth - spread])
    wave = jnp.stack([jnp.cos(root * time), jnp.sin(root * time)])
    scale = jnp.exp(time * rates - reach * jnp.abs(rates))
    return scale * jnp.where(curvature > 0, wave, 1.0)


_columns_of = jnp.vectorize(_columns, signature="(p),(),()->(c)")
_slopes_of = jnp.vectorize(jax.jacfwd(_columns), signature="(p),(),()->(c,p)")


def project(samples: Samples, blocks: Blocks) -> Projection:
    """Return the states without their projection on the span of the exponentials.

    With Q R the design matrix of a run, P = I - Q Q', D_j its derivative by a parameter and B the
    amplitudes, the residual is r = P Y, and its derivative is -P D_j B - Q R^-T D_j' r, whose
    second term is left out. Then the curvatures are tr(B' D_j' P D_k B).

    References:
        Kaufman (1975), A variable projection method for solving separable nonlinear least squares
        problems. Golub and Pereyra (2003), Separable nonlinear least squares, section 2.
    """
    num_blocks = len(blocks.is_column)
    shape = (num_blocks, 2)

    def of_run(states: Array, times: Array, weights: Array) -> tuple[Array, ...]:
        arguments = (blocks.parameters[None], times[:, None], jnp.max(jnp.abs(times))[None, None])
        used = weights[:, None, None] * blocks.is_column[None]
        columns = (_columns_of(*arguments) * used).reshape(len(times), -1)
        slopes = (_slopes_of(*arguments) * used[..., None]).reshape(len(times), -1)
        # Rows of rounding below keep equal or missing columns apart.
        rounding = 100 * rounding_unit(columns) * jnp.eye(2 * num_blocks, dtype=columns.dtype)
        basis, root = jnp.linalg.qr(jnp.concatenate([columns, rounding]))
        basis = basis[: len(times)]
        weighted = states * weights[:, None]
        coefficients = product(basis.T, weighted)
        residual = weighted - product(basis, coefficients)
        amplitudes = jax.scipy.linalg.solve_triangular(root, coefficients)
        slopes = slopes - product(basis, product(basis.T, slopes))

        squares = product(amplitudes, amplitudes.T).reshape(shape * 2)
        slope_squares = product(slopes.T, slopes).reshape((*shape, 2) * 2)
        curvatures = jnp.einsum("icpjdq,icjd->ipjq", slope_squares, squares)
        by_slope = product(slopes.T, residual).reshape(*shape, 2, -1)
        gradient = jnp.einsum("icpd,icd->ip", by_slope, amplitudes.reshape(*shape, -1))
        return residual, amplitudes, gradient, curvatures

    residual, amplitudes, *sums = jax.vmap(of_run)(*samples[:3])
    gradient = jnp.sum(sums[0], 0).ravel()
    curvatures = jnp.sum(sums[1], 0).reshape(len(gradient), -1)
    return Projection(residual, jnp.sum(residual**2), amplitudes, gradient, curvatures)


def _clipped(blocks: Blocks, step: Array) -> Blocks:
    """Return blocks whose rates and frequencies are resolved by the median step."""
    growth, curvature = blocks.parameters.T
    fastest = FASTEST / step
    growth = jnp.clip(growth, -fastest, fastest)
    # Both real rates growth +- sqrt(-curvature) stay within the limit.
    smallest_curvature = -((fastest - jnp.abs(growth)) ** 2)
    curvature = jnp.clip(curvature, smallest_curvature, (jnp.pi / step) ** 2)
    # At 0 both columns of a pair are equal.
    gap = rounding_unit(curvature) ** 0.5
    curvature = jnp.where(jnp.abs(curvature) < gap, gap, curvature) * blocks.is_column[:, 1]
    return blocks._replace(parameters=jnp.stack([growth, curvature], 1))


def unknown_solution(samples: Samples, blocks: Blocks) -> Solution:
    """Return a solution of infinite error, from which an optimisation starts."""
    zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(project, samples, blocks))
    projection = zeros._replace(error=zeros.error + jnp.inf)
    return Solution(blocks, projection, jnp.asarray(False))


def optimise(samples: Samples, blocks: Blocks, max_steps: int | Array) -> Solution:
    """Return the blocks of a local minimum of the squared error.

    References:
        Marquardt (1963), An algorithm for least-squares estimation of nonlinear parameters.
    """
    eps = rounding_unit(samples.states)
    floor = (10 * eps) ** 2 * jnp.sum((samples.states * samples.weights[..., None]) ** 2)

    def step(search: _Search) -> _Search:
        (blocks, projection, _), damping, num_steps = search
        # The damping is in units of the diagonal of the curvatures.
        diagonal = jnp.diagonal(projection.curvatures)
        scale = 1 / jnp.sqrt(positive_or_one(diagonal))
        scaled = projection.curvatures * scale[:, None] * scale[None]
        damped = scaled + jnp.diag(jnp.where(diagonal > 0, damping + eps, 1.0))
        change = jnp.linalg.solve(damped, (projection.gradient * scale)[:, None])[:, 0] * scale
        parameters = blocks.parameters + change.reshape(-1, 2)
        moved = _clipped(blocks._replace(parameters=parameters), samples.step)
        # At a limit the step is shorter, and so is the decrease that it promises.
        change = (moved.parameters - blocks.parameters).ravel()
        decrease = jnp.abs(jnp.sum(change * projection.gradient))
        candidate = project(samples, moved)
        # Close to the minimum, rounding hides the decrease.
        is_better = candidate.error < projection.error * (1 + 4 * eps)
        is_small = decrease <= _TOLERANCE * projection.error + floor
        is_small |= jnp.max(jnp.abs(change)) <= eps**0.5
        has_converged = is_small & (damping < 0.1) & jnp.isfinite(projection.error)
        damping = jnp.where(is_better, damping / 8, damping * 4 + 1e-4)
        moved = Solution(moved, candidate, has_converged)
        remaining = search[0]._replace(has_converged=has_converged)
        return taken_if(is_better, moved, remaining), damping, num_steps + 1

    def is_running(search: _Search) -> Array:
        solution, damping, num_steps = search
        return ~solution.has_converged & (damping <= 1e12) & (num_steps < max_steps)

    # The first step has gradient zero and computes the projection of the start.
    start = unknown_solution(samples, _clipped(blocks, samples.step))
    damping = jnp.full_like(samples.step, 1e-2)
    return lax.while_loop(is_running, step, (start, damping, jnp.asarray(0)))[0]


def taken_if(is_taken: Array, new: Solution, old: Solution) -> Solution:
    """Return a solution if it is taken, else the old one."""
    return jax.tree.map(partial(jnp.where, is_taken), new, old)
