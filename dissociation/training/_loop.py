"""Training as one pure function, `train`."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.keys import typed
from dissociation._core.types import Natural, PRNGKey
from dissociation._core.validation import validated
from dissociation.training._members import concatenate
from dissociation.training._samplers import HostBatches, Sampler, ndims_of, streams
from dissociation.training._state import Info, State, Step, first_opt_state


@validated
def train(
    state: State,
    step: Step,
    sampler: Sampler,
    num_steps: Natural,
    *,
    key: PRNGKey,
    first_step: Natural = 0,
) -> tuple[State, Info]:
    """Take steps in one compiled loop: a pure function of arrays, for `jax.jit`, `vmap` and `grad`.

    `fit` takes the same steps for a member with its own key, if members do not share batches.

    Args:
        state: Initial state, such as `step.init(model)`.
        step: Step of `make_step`.
        sampler: Sampler, except `HostBatches`; key and step number determine the batches.
        num_steps: Number of steps; 0 returns the state.
        key: Key that is split for losses and for the order of samples.
        first_step: Number of the first step, to continue another call with its key.

    Returns:
        The state, and the `Info` of every step: [num_steps] on the leading axis.

    Raises:
        ValueError: If a count is negative, state or sampler are of several members (map over them),
            or the state is of another optimiser.
        TypeError: If the sampler is a `HostBatches`.

    Example:
        >>> import optax
        >>> from dissociation.training import FullBatch
        >>> from dissociation.training import make_step
        >>> step = make_step(lambda w, batch, key: jnp.mean((w - batch) ** 2), optax.sgd(0.25))
        >>> sampler = FullBatch(jnp.array([2.0, 4.0]))
        >>> def final(start):
        ...     return train(step.init(start), step, sampler, 20, key=jax.random.key(0))[0].model
        >>> round(float(jax.grad(final)(1.0)) * 2**20, 4)  # every step halves the distance to 3
        1.0
    """
    if isinstance(sampler, HostBatches):
        checks.fail_kind(
            "sampler",
            "draw its batches in the program",
            "a HostBatches",
            "Train with `training.fit`",
        )
    _check_fitting(state, step)
    if sampler.stacked and ndims_of(sampler) == getattr(sampler, "ndims", None):
        advice = (
            "Map over it, as in eqx.filter_vmap(lambda sampler: train(state, step, sampler, "
            "...))(sampler)"
        )
        checks.fail("sampler", "hold the data of one member", "those of all (stacked=True)", advice)
    loss_key, _, order_key = streams(typed(key))

    def block(carry: Any, number: Any, start: Any, parts: Any) -> Any:
        plan, history = sampler.plan(order_key, number), []
        for size, within, steps in parts:

            def one(state: State, i: Array, at: Any = (size, within, start)) -> tuple[State, Info]:
                size, within, start = at
                return step(
                    state,
                    sampler.batch(plan, within + i, size),
                    jax.random.fold_in(loss_key, start + i),
                )

            carry, infos = jax.lax.scan(one, carry, jnp.arange(steps))
            history.append(infos)
            start = start + steps
        return carry, concatenate(history)

    history, begin = [], first_step
    for parts, group in itertools.groupby(
        _blocks(sampler, first_step, num_steps), lambda entry: entry[0]
    ):
        numbers = [number for _, number in group]
        length = sum(steps for _, _, steps in parts)
        if len(numbers) == 1:
            state, infos = block(state, numbers[0], begin, parts)
        else:
            place = jnp.asarray(numbers), begin + length * jnp.arange(len(numbers))
            state, infos = jax.lax.scan(
                lambda carry, x, parts=parts: block(carry, *x, parts), state, place
            )
            infos = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), infos)
        history.append(infos)
        begin += length * len(numbers)
    if not history:
        batch = sampler.batch(sampler.plan(order_key, 0), 0, sampler.segment(0).size)
        like = jax.eval_shape(step, state, batch, loss_key)[1]
        return state, jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), like)
    return state, concatenate(history)


def _blocks(sampler: Sampler, first: int, total: int) -> Any:
    """Yield every block's parts with batches of one size, as (size, place in the block, steps), and its number."""
    at, end = first, first + total
    while at < end:
        number, parts = sampler.segment(at).block, []
        while at < end and (segment := sampler.segment(at)).block == number:
            stop = min(segment.end, end)
            parts.append((segment.size, segment.within, stop - at))
            at = stop
        yield tuple(parts), number


def _check_fitting(state: State, step: Step) -> None:
    """Raise unless the state is of one member and of the step's optimiser."""
    if jnp.ndim(state.step):
        advice = "Map over members, as in eqx.filter_vmap(lambda state: train(state, ...))(states)"
        checks.fail("state", "be that of one member", f"{jnp.shape(state.step)} of them", advice)
    like = jax.eval_shape(partial(first_opt_state, step.optimizer), state.arrays, state.hyperparams)
    if jax.tree.structure(like) != jax.tree.structure(state.opt_state):
        wanted, advice = (
            "hold an `opt_state` of the step's optimiser",
            "step.init(state.model) starts from scratch",
        )
        checks.fail("state", wanted, "that of another", advice)
