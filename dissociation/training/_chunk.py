"""Compiled chunks of a run: some steps of every member, and observations."""

from contextlib import nullcontext
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import describe, number_kind
from dissociation.training._machine import free_memory, largest, program_bytes
from dissociation.training._members import (
    DATA_AXIS,
    MEMBER_AXIS,
    count,
    map_members,
    member_devices,
)
from dissociation.training._samplers import Sampler
from dissociation.training._state import State, Step
from dissociation.training._traced import Traced, trace

MAX_CHUNK = 512
"""Largest number of steps in a chunk, which sets the buffer for losses and metrics."""


def shapes(tree: Any, first: int) -> Any:
    """Return shapes and dtypes without the first axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype), tree)


@eqx.filter_jit
def drawn(sampler: Sampler, keys: Array, block: Any) -> Any:
    """Return the plan of a block, one for all members or one per key."""
    return (
        sampler.plan(keys, block)
        if sampler.shared
        else jax.vmap(sampler.plan, (0, None))(keys, block)
    )


def trace_step(step: Step, sampler: Sampler, example: Any, size: int | None, mesh: Any) -> Traced:
    """Trace (state, sampler arrays, plan, index in the block, key) -> (state, info) on arguments like `example`.

    Batches of `size` are split over the data axis of a `mesh`.
    """
    static = eqx.filter(sampler, eqx.is_array, inverse=True)

    def function(state: State, arrays: Any, plan: Any, within: Array, key: Array) -> Any:
        batch = eqx.combine(arrays, static).batch(plan, within, size)
        return step(state, batch if mesh is None else jax.tree.map(over_data, batch), key)

    def over_data(leaf: Array) -> Array:
        axes = (DATA_AXIS,) if leaf.ndim and leaf.shape[0] % mesh.shape[DATA_AXIS] == 0 else ()
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))

    inside: Any = nullcontext()
    if mesh is not None:  # as inside `map_members`, where the axis of members is manual
        inside = jax.sharding.use_abstract_mesh(
            mesh.abstract_mesh.update_axis_types({MEMBER_AXIS: AxisType.Manual})
        )
    with inside:
        return trace(function, *example)


def trace_observation(observe: Any, state: State, *example: Any) -> Traced:
    """Trace (state, step, key) -> JAX arrays of `observe` for one member; its state is the result of `observable`."""
    if not callable(observe):
        checks.fail_kind("save", "have a function as `observe`", repr(observe))
    advice = (
        "With an `aux` it is observe(model, aux, step, key), without one observe(model, step, key)"
    )
    words = ("model", *([] if state.aux is None else ["aux"]), "step", "key")
    checks.check_call("observe", observe, words, advice)

    def observation(state: State, step: Array, key: Array) -> Any:
        carried = () if state.aux is None else (state.aux,)
        try:
            found = observe(state.model, *carried, step, key)
        except jax.errors.JAXTypeError as error:  # such as `float` of a traced number
            got = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            checks.fail_kind("observe", "be of JAX's operations, which are compiled", got)
        return jax.tree.map(_as_numbers, found)

    return trace(observation, observable(state), *example)


def _as_numbers(part: Any) -> Array:
    """Return a part of an observation as an array."""
    known = part if isinstance(part, Array) else np.asarray(part)
    if not number_kind(known.dtype):
        checks.fail_kind("observe", "return arrays of numbers", describe(part))
    return jnp.asarray(part)


def observable(state: State) -> State:
    """Return the state as losses and observations get it, without the optimiser's part."""
    return eqx.tree_at(
        lambda s: (s.opt_state, s.hyperparams),
        state,
        (None, None),
        is_leaf=lambda leaf: leaf is None,
    )


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: Any, state: State) -> Any:
    """Return the new state and `Info`s of several steps of every member, of one step if unrolled.

    `inputs`: `Partition.how`, traced step, loss keys, trained members (None: all), sources of
    batches per member and common, and `[first step, place in the block, steps]`. The state is
    donated.
    """
    how, traced, keys, active, mapped, common, place = inputs
    unrolls, infos = how["member_map"] == "unroll", traced.out[1]
    rows = 1 if unrolls else MAX_CHUNK

    def one(shared: Any, stacked: Any) -> Any:
        # `steps` is traced: chunk lengths follow wall time, and a loop of constant length 1 rounds
        # differently.
        traced, common, (start, within, steps) = shared
        state, mapped, key, goes_on = stacked
        source = [
            mine if theirs is None else theirs for mine, theirs in zip(mapped, common, strict=True)
        ]

        def step(i: Array | int, state: State) -> Any:
            return traced(state, *source, within + i, jax.random.fold_in(key, start + i))

        def body(i: Array | int, carry: Any) -> Any:
            state, buffers = carry
            state, info = step(i, state)
            return state, jax.tree.map(
                lambda buffer, leaf: buffer.at[i].set(leaf.astype(buffer.dtype)), buffers, info
            )

        def run(state: State) -> Any:
            if unrolls:
                state, info = step(0, state)
                return state, jax.tree.map(lambda leaf: leaf[None], info)
            buffers = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), infos)
            return jax.lax.fori_loop(0, steps, body, (state, buffers))

        def stay(state: State) -> Any:
            return state, jax.tree.map(lambda leaf: missing((rows, *leaf.shape), leaf.dtype), infos)

        return run(state) if goes_on is None else jax.lax.cond(goes_on, run, stay, state)

    shared = traced, common, place
    if how["member_map"] != "scan" or how["mesh"] is not None:
        return map_members(one, shared, (state, mapped, keys, active), **how)
    # This loop updates the state in place; `jax.lax.map` would hold it twice.
    own, static = eqx.partition(state, eqx.is_array)
    rest, rest_static = eqx.partition((mapped, keys, active), eqx.is_array)

    def of_member(own: Any, each: Any) -> Any:
        i, rest = each
        member = eqx.combine(jax.tree.map(lambda leaf: leaf[i], own), static)
        after, infos = one(shared, (member, *eqx.combine(rest, rest_static)))
        return jax.tree.map(
            lambda leaf, new: leaf.at[i].set(new), own, eqx.filter(after, eqx.is_array)
        ), infos

    own, infos = jax.lax.scan(of_member, own, (jnp.arange(count(state)), rest))
    return eqx.combine(own, static), infos


def largest_batch(inputs: Any, state: State) -> int:
    """Return the number of members per batch and device that fits in free memory; `inputs` as in `run_chunk`."""
    how, *others = inputs

    def bytes_of(size: int) -> int:
        jitted: Any = run_chunk
        return program_bytes(
            jitted.lower((how | {"members_per_batch": size}, *others), state).compile().compiled
        )

    free = free_memory(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    return largest(bytes_of, count(state) // member_devices(how["mesh"]), free)


def missing(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the fill value for missing entries: NaN, the smallest integer, or False."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    return jnp.full(
        shape, jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False, dtype
    )


@eqx.filter_jit
def observe_members(inputs: Any, state: State) -> Any:
    """Return each member's observation; `inputs`: `Partition.how`, traced observation, step and keys."""
    how, traced, step, keys = inputs

    def one(shared: Any, stacked: Any) -> Any:
        observe, step = shared
        key, own_state = stacked
        return observe(observable(own_state), step, jax.random.fold_in(key, step))

    return map_members(one, (traced, step), (keys, state), **how, ordered=True)
