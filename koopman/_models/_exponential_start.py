"""Greedy start of sums of exponentials from a periodogram over rate and frequency."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from koopman._models._exponential_fit import (
    Blocks,
    Samples,
    Solution,
    optimise,
    project,
    taken_if,
    unknown_solution,
)
from koopman._operators._numerics import ratio_or_zero

_RATES = (0.0, -0.5, 0.5, -1.0, 1.0, -2.0, 2.0, -4.0, 4.0, -8.0, -16.0, -32.0, -64.0)
"""Growth rates of the periodogram, per half of the longest run."""
_NUM_LEADING = 16
"""Largest number of principal components in the periodogram."""
_FAST_STEPS = 30
_MAX_STEPS = 500
_REPLICATE_STEPS = 200
KEPT_WEIGHT = 0.25


def periodogram(samples: Samples, residual: Array, num_cells: int) -> tuple[Array, Array]:
    """Return frequencies, and the decrease of the squared error by one more pair at each.

    The decreases are [rates, frequencies]. At frequency 0 it is that by one exponential. Every run
    has amplitudes of its own. Sums over times are Fourier transforms on a grid of cells of half a
    step, four times as long as the longest run.

    References:
        Scargle (1982), Studies in astronomical time series analysis II, appendix C.
    """
    spacing = jnp.maximum(0.5 * samples.step, 8 / num_cells)
    numbers = jnp.arange(num_cells // 4)

    def of_run(rate: Array, states: Array, times: Array, weights: Array) -> Array:
        # Rows that pad have the time 0.
        largest = jnp.max(rate * times)
        decay = jnp.exp(rate * times - largest) * weights
        rows = jnp.concatenate([decay[:, None] * states, decay[:, None] ** 2], 1)
        cells = jnp.round((times + 1) / spacing).astype(int)
        on_grid = jnp.zeros((num_cells, rows.shape[1]), rows.dtype).at[cells].add(rows)
        sums = jnp.fft.rfft(on_grid, axis=0)
        products = sums[numbers, :-1]
        energy = jnp.sum(decay**2)
        # The sum of the squared decays times e^{-2i frequency time}.
        overlap = sums[2 * numbers, -1]
        power = jnp.sum(jnp.abs(products) ** 2, 1)
        numerator = energy * power - jnp.real(jnp.conj(overlap) * jnp.sum(products**2, 1))
        determinant = energy**2 - jnp.abs(overlap) ** 2
        decrease = ratio_or_zero(2 * numerator, determinant, determinant > 1e-2 * energy**2)
        return decrease.at[0].set(ratio_or_zero(power[0], energy, energy > 0))

    def of_rate(rate: Array) -> Array:
        decreases = jax.vmap(of_run, (None, 0, 0, 0))(
            rate, residual, samples.times, samples.weights
        )
        return jnp.sum(decreases, 0)

    rates = jnp.asarray(_RATES, residual.dtype)
    return 2 * jnp.pi / (num_cells * spacing) * numbers, lax.map(of_rate, rates)


@partial(jax.jit, static_argnames="num_cells")
def start_and_fit(samples: Samples, is_column: Any, num_cells: int) -> tuple[Solution, Array]:
    """Return the fit from a greedy start, and the largest power in its residual.

    Every block starts at the peak of the periodogram of the residual of the others, after which
    all are optimised. A second round searches again for every block and keeps what is better.
    """
    num_slots = len(is_column)
    num_blocks = jnp.sum(is_column[:, 0])
    rates = jnp.asarray(_RATES, samples.states.dtype)

    def advance(number: Array, search: tuple[Solution, Array]) -> tuple[Solution, Array]:
        best, _ = search
        blocks = best.blocks
        is_last = number == 2 * num_blocks
        # The last round replaces no block, and ends with the power of what no block explains.
        index = jnp.where(is_last, num_slots, number % num_blocks)
        is_index = (jnp.arange(num_slots) == index)[:, None]
        remaining = blocks._replace(is_column=blocks.is_column & ~is_index)
        residual = project(samples, remaining).residual[..., :_NUM_LEADING]
        frequencies, powers = periodogram(samples, residual, num_cells)
        # One exponential has no frequency.
        is_single = jnp.any(is_index & ~is_column)
        powers = powers.at[:, 1:].multiply(1.0 - is_single)
        row, column = jnp.unravel_index(jnp.argmax(powers), powers.shape)
        peak = jnp.stack([rates[row], frequencies[column] ** 2])
        parameters = jnp.where(is_index, peak[None], blocks.parameters)
        candidate = Blocks(parameters, jnp.where(is_index, is_column, blocks.is_column))
        num_steps = jnp.where(is_last, _MAX_STEPS, _FAST_STEPS)
        solution = optimise(samples, candidate, num_steps)
        is_better = solution.projection.error < best.projection.error
        is_taken = is_better | (number < num_blocks) | is_last
        return taken_if(is_taken, solution, best), jnp.max(powers)

    parameters = jnp.zeros(is_column.shape, samples.states.dtype)
    first = unknown_solution(samples, Blocks(parameters, jnp.zeros_like(is_column)))
    return lax.fori_loop(0, 2 * num_blocks + 1, advance, (first, jnp.zeros_like(samples.step)))


@jax.jit
def reweighted(samples: Samples, fitted: Blocks, block_of_row: Any, numbers: Any) -> Solution:
    """Return the fits with a quarter of the weight on the rows of one block, over replicates.

    Without a block, deviations exceed the influence of the block by its leverage. With a quarter of
    its weight, four thirds of the deviations are closer to it.
    """

    def replicate(number: Any) -> Solution:
        weights = samples.weights * jnp.where(block_of_row == number, KEPT_WEIGHT**0.5, 1.0)
        return optimise(samples._replace(weights=weights), fitted, _REPLICATE_STEPS)

    return jax.vmap(replicate)(numbers)
