"""Greedy start of sums of exponentials from a periodogram over rate and frequency."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from koopman._models._exponential_fit import (
    AnyArray,
    Blocks,
    Limits,
    Samples,
    Solution,
    optimise,
    project,
    unknown_projection,
)
from koopman._operators._numerics import positive_or_one

_RATES = (0.0, -0.5, 0.5, -1.0, 1.0, -2.0, 2.0, -4.0, 4.0, -8.0, -16.0, -32.0, -64.0)
"""Growth rates of the periodogram, per half of the longest run."""
_NUM_LEADING = 16
"""Largest number of principal components in the periodogram."""
_FAST_STEPS = 30
_MAX_STEPS = 500
_REPLICATE_STEPS = 200
KEPT_WEIGHT = 0.25


class Grid(eqx.Module):
    """Grid of the periodogram.

    Attributes:
        cells: Cell of a fine grid of times for every row, [runs, time].
        spacing: Length of a cell in scaled time.
        num_cells: Number of cells.
        num_frequencies: Number of frequencies, from 0 up.
    """

    cells: Int[AnyArray, "runs time"]
    spacing: Float[AnyArray, ""]
    num_cells: int = eqx.field(static=True)
    num_frequencies: int = eqx.field(static=True)


def periodogram(
    samples: Samples, residual: Float[AnyArray, "runs time d"], grid: Grid
) -> Float[Array, "rates frequencies"]:
    """Return the decrease of the squared error by one more pair, at every rate and frequency.

    At frequency 0 it is that by one exponential. Every run has amplitudes of its own. Sums over
    times are Fourier transforms on a fine grid.

    References:
        Scargle (1982), Studies in astronomical time series analysis II, appendix C.
    """
    rates = jnp.asarray(_RATES, residual.dtype)
    width = residual.shape[2]

    def of_run(rate: Array, states: Any, times: Any, weights: Any, cells: Any) -> Array:
        exponent = jnp.where(weights > 0, rate * times, -jnp.inf)
        largest = jnp.max(exponent)
        decay = jnp.exp(exponent - jnp.where(jnp.isfinite(largest), largest, 0.0)) * weights
        rows = jnp.concatenate([decay[:, None] * states, decay[:, None] ** 2], 1)
        on_grid = jnp.zeros((grid.num_cells, width + 1), rows.dtype).at[cells].add(rows)
        sums = jnp.fft.rfft(on_grid, axis=0)
        frequencies = jnp.arange(grid.num_frequencies)
        products = sums[frequencies, :width]
        squares = sums[2 * frequencies, width]
        energy = jnp.sum(decay**2)
        cosine_square = energy + jnp.real(squares)
        sine_square = energy - jnp.real(squares)
        cosine_power = jnp.sum(jnp.real(products) ** 2, 1)
        sine_power = jnp.sum(jnp.imag(products) ** 2, 1)
        cross_power = jnp.sum(jnp.real(products) * jnp.imag(products), 1)
        numerator = sine_square * cosine_power + cosine_square * sine_power
        numerator = 2 * (numerator - 2 * jnp.imag(squares) * cross_power)
        determinant = energy**2 - jnp.abs(squares) ** 2
        is_regular = determinant > 1e-2 * energy**2
        power = jnp.where(is_regular, numerator / positive_or_one(determinant), 0.0)
        return power.at[0].set(cosine_power[0] / positive_or_one(energy))

    def of_rate(rate: Array) -> Array:
        powers = jax.vmap(of_run, (None, 0, 0, 0, 0))(
            rate, residual, samples.times, samples.weights, grid.cells
        )
        return jnp.sum(powers, 0)

    return lax.map(of_rate, rates)


@jax.jit
def start_and_fit(
    samples: Samples, empty: Blocks, limits: Limits, grid: Grid
) -> tuple[Solution, Array]:
    """Return the fit from a greedy start, and the largest power in its residual.

    Every block starts at the peak of the periodogram of the residual of the others, after which
    all are optimised. A second round searches again for every block and keeps what is better.
    """
    num_slots = empty.is_pair.shape[0]
    num_blocks = jnp.sum(empty.is_active)
    rates = jnp.asarray(_RATES, samples.states.dtype)
    frequency_step = 2 * jnp.pi / (grid.num_cells * grid.spacing)
    frequencies = frequency_step * jnp.arange(grid.num_frequencies)
    slots = jnp.arange(num_slots)

    def replaced(blocks: Blocks, index: Array) -> tuple[Blocks, Array]:
        is_index = slots == index
        remaining = blocks._replace(is_active=blocks.is_active & ~is_index)
        residual = project(samples, remaining).residual[..., :_NUM_LEADING]
        powers = periodogram(samples, residual, grid)
        is_allowed = frequencies < limits.frequency
        # One exponential has no frequency.
        is_allowed &= jnp.all(blocks.is_pair | ~is_index) | (frequencies <= 0)
        powers = jnp.where(is_allowed[None], powers, -1.0)
        peak = jnp.argmax(powers)
        rate = rates[peak // grid.num_frequencies]
        frequency = frequencies[peak % grid.num_frequencies]
        start = jnp.stack([rate, frequency**2])[:, None]
        parameters = jnp.where(is_index[None], start, blocks.parameters)
        candidate = Blocks(parameters, blocks.is_active | is_index, blocks.is_pair)
        return candidate, jnp.max(powers)

    def advance(number: Array, search: tuple[Solution, Array]) -> tuple[Solution, Array]:
        best, _ = search
        is_last = number == 2 * num_blocks
        # The last round replaces no block, and ends with the power of what no block explains.
        index = jnp.where(is_last, num_slots, number % num_blocks)
        candidate, power = replaced(best.blocks, index)
        num_steps = jnp.where(is_last, _MAX_STEPS, _FAST_STEPS)
        solution = optimise(samples, candidate, limits, num_steps)
        is_better = solution.projection.error < best.projection.error
        is_taken = is_better | (number < num_blocks) | is_last
        best = jax.tree.map(lambda new, old: jnp.where(is_taken, new, old), solution, best)
        return best, power

    none = empty._replace(is_active=jnp.zeros(num_slots, bool))
    first = Solution(none, unknown_projection(samples, none), jnp.asarray(False))
    start = (first, jnp.zeros((), samples.states.dtype))
    return lax.fori_loop(0, 2 * num_blocks + 1, advance, start)


@jax.jit
def reweighted(
    samples: Samples,
    fitted: Blocks,
    limits: Limits,
    block_of_row: Int[AnyArray, "runs time"],
    numbers: Int[AnyArray, " replicates"],
) -> Solution:
    """Return the fits with a quarter of the weight on the rows of one block, over replicates.

    Without a block, deviations exceed the influence of the block by its leverage. With a quarter of
    its weight, four thirds of the deviations are closer to it.
    """

    def replicate(number: AnyArray) -> Solution:
        weights = samples.weights * jnp.where(block_of_row == number, KEPT_WEIGHT**0.5, 1.0)
        return optimise(
            samples._replace(weights=weights), fitted, limits, jnp.asarray(_REPLICATE_STEPS)
        )

    return jax.vmap(replicate)(numbers)
