"""Range of any similarity measure over rewrites that keep the function, searched by gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail, fail_kind
from dissociation._core.keys import typed
from dissociation._core.results import printed
from dissociation._core.types import Natural, PRNGKey
from dissociation._core.validation import validated
from dissociation.rewrites._freedom import at_end, scale_activity
from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._rewrites import Rewrite
from dissociation.similarity._base import in_common_dtype
from dissociation.similarity._measures import MEASURES
from dissociation.training._loop import train
from dissociation.training._members import per_batch
from dissociation.training._samplers import FullBatch
from dissociation.training._state import make_step

SIDES = ("x", "y")
FREE = ("x", "both")


class Bounds(NamedTuple):
    """Range of a measure over scaled networks of the same functions, found by a search.

    The true range may be wider.

    Attributes:
        measured: Value of the representations as they are.
        low: Smallest value found.
        high: Largest value found.
        low_factors: Factors of the neurons of x and of y at `low`; ones for a representation that
            is not scaled.
        high_factors: Factors of x and of y at `high`.
        ends: Minimum (row 0) and maximum (row 1) from each start, [2, starts]. If a row varies
            much, use more starts.
    """

    measured: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]
    low_factors: tuple[Float[Array, " neurons"], Float[Array, " others"]]
    high_factors: tuple[Float[Array, " neurons"], Float[Array, " others"]]
    ends: Float[Array, "2 starts"]

    __repr__ = printed

    def rewrite(self, group: NeuronGroup, *, end: str, side: str = "x") -> Rewrite:
        """Return the rewrite of a network that gives an end; see `rewrites.scale`.

        Args:
            group: Group of the neurons.
            end: "low" or "high".
            side: "x" or "y", the network to rewrite. If both were free, rewrite both.

        Raises:
            ValueError: If the group is not homogeneous of a positive degree in one way.
        """
        check_choice("side", side, SIDES)
        factors = at_end(end, self.low_factors, self.high_factors)
        return scale_activity(group, factors[SIDES.index(side)])


@validated(finite=("x", "y"))
def similarity_bounds(
    x: Float[Array | np.ndarray, "samples neurons"],
    y: Float[Array | np.ndarray, "samples others"],
    measure: str | Callable[[Any, Any], Any] = "linear_cka",
    *,
    free: str = "both",
    largest_factor: float = 30.0,
    num_starts: int = 8,
    num_steps: Natural = 100,
    key: PRNGKey,
) -> Bounds:
    """Return inner bounds of a measure over positive scalings of neurons of one network or both.

    Scaled networks with the same function attain every value. For exact limits of linear CKA with
    one free network, see `cka_range`.

    Args:
        x: A representation whose neurons may be scaled.
        y: Another representation of the same samples.
        measure: A name in `similarity.MEASURES`, or a function of x and y. Without a derivative, as
            for neighbours or ranks, only starts are compared. The overall scale dominates measures
            that depend on it, as the Procrustes distance. Measures that are invariant to the scale
            of a neuron, as CCA, have one value.
        free: "both", or "x" to keep y as it is.
        largest_factor: Largest length of centred activity, in units of the mean over neurons, more
            than 1. The smallest length is its inverse.
        num_starts: Number of starts, at least 4: lengths as they are, equal lengths, the single
            neurons of x least and most similar to y, then random lengths.
        num_steps: Steps of Adam from each start.
        key: Key of the random starts.

    Raises:
        ValueError: If the numbers of samples differ, or an argument is out of range.
        TypeError: If the measure is computed on the host, where it has no derivative.
    """
    check_choice("free", free, FREE)
    check_count("num_starts", num_starts, minimum=4)
    if not 1 < largest_factor < np.inf:
        fail("largest_factor", "be more than 1 and finite", largest_factor)
    first, second = in_common_dtype(x, y)
    if isinstance(measure, str):
        check_choice("measure", measure, MEASURES)
        definition = MEASURES[measure]
        if definition.same_width:
            fail("measure", "compare representations", f"{measure!r}, which compares outputs")
        if definition.host:
            host_step = f"{measure!r}, a step of which the host does"
            fail_kind("measure", "be computed on the device", host_step)
        measure = definition.function
        # Scaling neurons cannot change such a measure: there is nothing to search.
        of_x = definition.invariances_at(*first.shape)
        of_y = definition.invariances_of_y or definition.invariances
        if "D" in of_x and (free == "x" or "D" in of_y):
            value = measure(first, second)
            ones_of_x = jnp.ones_like(first[0])
            ones_of_y = jnp.ones_like(second[0])
            ones = (ones_of_x, ones_of_y)
            ends = jnp.broadcast_to(value, (2, num_starts))
            return Bounds(value, value, value, ones, ones, ends)
    largest = jnp.asarray(largest_factor)
    is_y_free = free == "both"
    return _bounds(first, second, typed(key), largest, measure, is_y_free, num_starts, num_steps)


@eqx.filter_jit
def _bounds(
    x: Array,
    y: Array,
    key: Array,
    largest: Array,
    measure: Callable[..., Any],
    is_y_free: bool,
    num_starts: int,
    num_steps: int,
) -> Bounds:
    # Logarithms keep factors positive and give shrinking and growing the same step size.
    limit = jnp.log(largest).astype(x.dtype)
    lengths_of_x = _lengths(x)
    lengths_of_y = _lengths(y)

    def factors(logs):
        """Return the factors that give neurons these log-lengths, in units of the mean length."""
        of_x = jnp.exp(logs[0]) * jnp.mean(lengths_of_x) / lengths_of_x
        of_y = jnp.exp(logs[1]) * jnp.mean(lengths_of_y) / lengths_of_y
        if not is_y_free:
            of_y = jnp.ones_like(of_y)
        return of_x, of_y

    def similarity(scales):
        scaled_x = x * scales[0][None]
        scaled_y = y * scales[1][None]
        return measure(scaled_x, scaled_y)

    def project(state):
        arrays = jax.tree.map(lambda u: jnp.clip(u, -limit, limit), state.arrays)
        return eqx.tree_at(lambda s: s.arrays, state, arrays)

    def cost(logs, batch, key):
        return batch[0] * similarity(factors(logs))

    rate = optax.cosine_decay_schedule(0.3, num_steps + 1)
    optimizer = optax.adam(rate)
    step = make_step(cost, optimizer, after_update=project)

    def descended(job):
        """Return cost and factors of the better of a start and the end of its descent."""
        sign, start = job
        batches = FullBatch(sign[None])
        state = step.init(start)
        key = jax.random.key(0)  # nothing is drawn from it
        state, _ = train(state, step, batches, num_steps, key=key)
        initial = factors(start)
        final = factors(state.model)
        initial_cost = sign * similarity(initial)
        final_cost = sign * similarity(final)
        costs = jnp.stack([initial_cost, final_cost])
        # An undefined value must not win over a defined one.
        costs = jnp.where(jnp.isnan(costs), jnp.inf, costs)
        is_lower = costs[1] < costs[0]
        better = jax.tree.map(lambda u, v: jnp.where(is_lower, v, u), initial, final)
        return jnp.min(costs), better

    starts = _starts(x, y, key, limit, measure, is_y_free, num_starts)
    signs = jnp.repeat(jnp.array([1.0, -1.0], x.dtype), num_starts)
    starts = jax.tree.map(lambda u: jnp.concatenate([u, u]), starts)
    jobs = (signs, starts)
    # Sequentially on a CPU: parallel decompositions can hang there.
    if per_batch() == 1:
        costs, scales = jax.lax.map(descended, jobs)
    else:
        costs, scales = jax.vmap(descended)(jobs)
    costs = costs.reshape(2, num_starts)
    measured = measure(x, y)
    measured_costs = jnp.stack([measured, -measured])
    best = jnp.argmin(costs, 1)
    # No search may end worse than the networks as they are.
    is_improved = jnp.min(costs, 1) < measured_costs

    def end(row):
        job = row * num_starts + best[row]
        value = costs[row, best[row]] * (1 - 2 * row)

        def best_or_one(side):
            return jnp.where(is_improved[row], side[job], jnp.ones_like(side[0]))

        value = jnp.where(is_improved[row], value, measured)
        return value, jax.tree.map(best_or_one, scales)

    low, low_factors = end(0)
    high, high_factors = end(1)
    ends = costs * jnp.array([[1.0], [-1.0]], x.dtype)
    return Bounds(measured, low, high, low_factors, high_factors, ends)


def _starts(
    x: Array,
    y: Array,
    key: Array,
    limit: Array,
    measure: Callable[..., Any],
    is_y_free: bool,
    num_starts: int,
) -> tuple[Array, Array]:
    """Return initial log-lengths of both sides, [starts, neurons]."""
    alone = jax.lax.map(lambda neuron: measure(neuron[:, None], y), x.T)
    # A constant neuron alone has similarity NaN.
    indices = jnp.stack([jnp.nanargmin(alone), jnp.nanargmax(alone)])
    single_of_x = _single(indices, x.shape[1], limit)
    num_neurons = y.shape[1]
    single_of_y = jnp.zeros((2, num_neurons), x.dtype)
    if is_y_free:
        least_similar, most_similar = (
            jax.lax.map(lambda neuron, i=i: measure(x[:, i][:, None], neuron[:, None]), y.T)
            for i in indices
        )
        indices_of_y = jnp.stack([jnp.nanargmin(least_similar), jnp.nanargmax(most_similar)])
        single_of_y = _single(indices_of_y, num_neurons, limit)

    num_random = num_starts - 4
    spreads = jnp.linspace(0.5, 2.0, num_random, dtype=x.dtype)

    def log_lengths(side, single, key):
        lengths = _lengths(side)
        logs = jnp.log(lengths / jnp.mean(lengths))
        logs = jnp.clip(logs, -limit, limit)
        equal = jnp.zeros_like(logs)
        noise = jax.random.normal(key, (num_random, logs.size), x.dtype)
        return jnp.concatenate([logs[None], equal[None], single, spreads[:, None] * noise])

    key_of_x, key_of_y = jax.random.split(key, 2)
    logs_of_x = log_lengths(x, single_of_x, key_of_x)
    logs_of_y = log_lengths(y, single_of_y, key_of_y)
    return logs_of_x, logs_of_y


def _single(index: Array, number: int, limit: Array) -> Array:
    """Return log-lengths with one neuron as long as allowed, the others as short."""
    return jnp.where(jnp.arange(number)[None] == index[:, None], limit, -limit)


def _lengths(side: Array) -> Array:
    """Return lengths of centred activity; the mean over others for constant neurons."""
    centred = side - jnp.mean(side, 0, keepdims=True)
    lengths = jnp.linalg.norm(centred, axis=0)
    is_varying = lengths > 0
    return jnp.where(is_varying, lengths, jnp.mean(lengths, where=is_varying))
