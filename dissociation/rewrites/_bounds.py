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
from dissociation.training._state import State, make_step

SIDES = ("x", "y")
FREE = ("x", "both")


class Bounds(NamedTuple):
    """Range of a measure found over scaled networks of the same functions; the true range may be wider.

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
        return scale_activity(
            group, at_end(end, self.low_factors, self.high_factors)[SIDES.index(side)]
        )


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
    """Return inner bounds of a measure over positive scalings of the neurons of one network or both.

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
        known = MEASURES[measure]
        if known.same_width:
            fail("measure", "compare representations", f"{measure!r}, which compares outputs")
        if known.host:
            fail_kind(
                "measure",
                "be computed on the device",
                f"{measure!r}, a step of which the host does",
            )
        measure = known.function
        # Scaling neurons cannot change such a measure: there is nothing to search.
        of_x = known.invariances_at(*first.shape)
        of_y = known.invariances_of_y or known.invariances
        if "D" in of_x and (free == "x" or "D" in of_y):
            value, ones = (
                measure(first, second),
                (jnp.ones_like(first[0]), jnp.ones_like(second[0])),
            )
            return Bounds(value, value, value, ones, ones, jnp.broadcast_to(value, (2, num_starts)))
    return _bounds(
        first,
        second,
        typed(key),
        jnp.asarray(largest_factor),
        measure,
        free == "both",
        num_starts,
        num_steps,
    )


@eqx.filter_jit
def _bounds(
    x: Array,
    y: Array,
    key: Array,
    largest: Array,
    measure: Callable[..., Any],
    both: bool,
    starts: int,
    steps: int,
) -> Bounds:
    # Logarithms keep factors positive and give shrinking and growing the same step size.
    limit = jnp.log(largest).astype(x.dtype)
    lengths = _lengths(x), _lengths(y)

    def factors(logs: Any) -> Any:
        """Return the factors that give neurons these log-lengths, in units of the mean length."""
        first, second = (
            jnp.exp(u) * jnp.mean(own) / own for u, own in zip(logs, lengths, strict=True)
        )
        return first, second if both else jnp.ones_like(second)

    def value(given: Any) -> Array:
        return measure(x * given[0][None], y * given[1][None])

    def project(state: State) -> State:
        inside = jax.tree.map(lambda u: jnp.clip(u, -limit, limit), state.arrays)
        return eqx.tree_at(lambda s: s.arrays, state, inside)

    rate = optax.cosine_decay_schedule(0.3, steps + 1)
    step = make_step(
        lambda logs, batch, key: batch[0] * value(factors(logs)),
        optax.adam(rate),
        after_update=project,
    )

    def descended(job: Any) -> Any:
        """Return the better of a start and the end of its descent, with value and factors."""
        sign, start = job
        # Nothing is drawn from the key.
        end = train(step.init(start), step, FullBatch(sign[None]), steps, key=jax.random.key(0))[
            0
        ].model
        there = factors(start), factors(end)
        costs = jnp.stack([sign * value(given) for given in there])
        # An undefined value must not win over a defined one.
        costs = jnp.where(jnp.isnan(costs), jnp.inf, costs)
        return jnp.min(costs), jax.tree.map(
            lambda *both: jnp.where(costs[1] < costs[0], both[1], both[0]), *there
        )

    begun: Any = _starts(x, y, key, limit, lengths, measure, both, starts)
    signs = jnp.repeat(jnp.array([1.0, -1.0], x.dtype), starts)
    jobs = signs, jax.tree.map(lambda u: jnp.concatenate([u, u]), begun)
    # Sequentially on a CPU: parallel decompositions can hang there.
    costs, given = jax.lax.map(descended, jobs) if per_batch() == 1 else jax.vmap(descended)(jobs)
    costs = costs.reshape(2, starts)
    measured = measure(x, y)
    best = jnp.argmin(costs, 1)
    # No search may end worse than the networks as they are.
    moved = jnp.min(costs, 1) < jnp.stack([measured, -measured])

    def end(k: int) -> tuple[Array, Any]:
        kept = jax.tree.map(
            lambda side: jnp.where(moved[k], side[k * starts + best[k]], jnp.ones_like(side[0])),
            given,
        )
        return jnp.where(moved[k], costs[k, best[k]] * (1 - 2 * k), measured), kept

    (low, low_factors), (high, high_factors) = end(0), end(1)
    return Bounds(
        measured, low, high, low_factors, high_factors, costs * jnp.array([[1.0], [-1.0]], x.dtype)
    )


def _starts(
    x: Array,
    y: Array,
    key: Array,
    limit: Array,
    lengths: Any,
    measure: Callable[..., Any],
    both: bool,
    number: int,
) -> tuple[Array, Array]:
    """Return initial log-lengths of both sides, [starts, neurons]."""
    own = [jnp.clip(jnp.log(side / jnp.mean(side)), -limit, limit) for side in lengths]
    alone = jax.lax.map(lambda one: measure(one[:, None], y), x.T)
    # A constant neuron alone has similarity NaN.
    firsts = jnp.stack([jnp.nanargmin(alone), jnp.nanargmax(alone)])
    of_y = jnp.zeros_like(own[1])
    if both:
        others = [
            jax.lax.map(lambda one, i=i: measure(x[:, i][:, None], one[:, None]), y.T)
            for i in firsts
        ]
        of_y = _single(
            jnp.stack([jnp.nanargmin(others[0]), jnp.nanargmax(others[1])]), y.shape[1], limit
        )
    keys = jax.random.split(key, 2)
    spreads = jnp.linspace(0.5, 2.0, number - 4, dtype=x.dtype)[:, None]
    sides = zip(
        (_single(firsts, x.shape[1], limit), jnp.broadcast_to(of_y, (2, y.shape[1]))),
        own,
        keys,
        strict=True,
    )
    made = [
        jnp.concatenate(
            [
                u[None],
                jnp.zeros_like(u)[None],
                ends,
                spreads * jax.random.normal(k, (number - 4, u.size), x.dtype),
            ]
        )
        for ends, u, k in sides
    ]
    return made[0], made[1]


def _single(index: Array, number: int, limit: Array) -> Array:
    """Return log-lengths with one neuron as long as allowed, the others as short."""
    return jnp.where(jnp.arange(number)[None] == index[:, None], limit, -limit)


def _lengths(side: Array) -> Array:
    """Return lengths of centred activity; the mean over others for constant neurons."""
    lengths = jnp.linalg.norm(side - jnp.mean(side, 0, keepdims=True), axis=0)
    return jnp.where(lengths > 0, lengths, jnp.mean(lengths, where=lengths > 0))
