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
from dissociation.training._samplers import HostBatches, Sampler, ndims_of
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
    # Of losses, observations and the order of data, as those of a member of `fit`.
    loss_key, _, order_key = jax.random.split(typed(key), 3)

    def train_block(state: State, number: Any, start: Any, runs: Any) -> Any:
        """Take the steps of a block, from step `start` on; `runs` are those of `_blocks`."""
        plan = sampler.plan(order_key, number)
        history = []
        for size, within, length in runs:

            def train_step(
                state: State, i: Array, bound: Any = (size, within, start)
            ) -> tuple[State, Info]:
                size, within, start = bound
                batch = sampler.batch(plan, within + i, size)
                return step(state, batch, jax.random.fold_in(loss_key, start + i))

            state, infos = jax.lax.scan(train_step, state, jnp.arange(length))
            history.append(infos)
            start = start + length
        return state, concatenate(history)

    history = []
    start = first_step
    blocks = _blocks(sampler, first_step, num_steps)
    for runs, group in itertools.groupby(blocks, lambda block: block[0]):
        numbers = [number for _, number in group]
        length = sum(length for _, _, length in runs)
        if len(numbers) == 1:
            state, infos = train_block(state, numbers[0], start, runs)
        else:
            starts = start + length * jnp.arange(len(numbers))
            state, infos = jax.lax.scan(
                lambda state, block, runs=runs: train_block(state, *block, runs),
                state,
                (jnp.asarray(numbers), starts),
            )
            infos = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), infos)
        history.append(infos)
        start += length * len(numbers)
    if history:
        return state, concatenate(history)

    batch = sampler.batch(sampler.plan(order_key, 0), 0, sampler.segment(0).size)
    _, info = jax.eval_shape(step, state, batch, loss_key)
    return state, jax.tree.map(lambda leaf: jnp.zeros((0, *leaf.shape), leaf.dtype), info)


def _blocks(sampler: Sampler, first: int, total: int) -> Any:
    """Yield the runs of every block, and the number of the block.

    A run is a sequence of steps with batches of one size: (size, place in the block, length).
    """
    step = first
    end = first + total
    while step < end:
        number = sampler.segment(step).block
        runs = []
        while step < end:
            segment = sampler.segment(step)
            if segment.block != number:
                break
            stop = min(segment.end, end)
            runs.append((segment.size, segment.within, stop - step))
            step = stop
        yield tuple(runs), number


def _check_fitting(state: State, step: Step) -> None:
    """Raise unless the state is of one member and of the step's optimiser."""
    if jnp.ndim(state.step):
        checks.fail(
            "state",
            "be that of one member",
            f"{jnp.shape(state.step)} of them",
            "Map over members, as in eqx.filter_vmap(lambda state: train(state, ...))(states)",
        )
    init = partial(first_opt_state, step.optimizer)
    opt_state = jax.eval_shape(init, state.arrays, state.hyperparams)
    if jax.tree.structure(opt_state) != jax.tree.structure(state.opt_state):
        checks.fail(
            "state",
            "hold an `opt_state` of the step's optimiser",
            "that of another",
            "step.init(state.model) starts from scratch",
        )
