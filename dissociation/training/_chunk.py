"""Compiled chunks of a run: some steps of every member, and observations."""

from contextlib import nullcontext
from typing import Any, NamedTuple

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
    """Return shapes and dtypes without the `first` leading axes."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype), tree)


@eqx.filter_jit
def drawn(sampler: Sampler, keys: Array, block: Any) -> Any:
    """Return the plan of a block, one for all members or one per key."""
    if sampler.shared:
        return sampler.plan(keys, block)
    return jax.vmap(sampler.plan, (0, None))(keys, block)


def trace_step(step: Step, sampler: Sampler, example: Any, size: int | None, mesh: Any) -> Traced:
    """Trace one step of one member on arguments like `example`.

    The function maps (state, sampler arrays, plan, index in the block, key) to (state, info).
    Batches of `size` are split over the data axis of a `mesh`.
    """
    static = eqx.filter(sampler, eqx.is_array, inverse=True)

    def over_data(leaf: Array) -> Array:
        axes = ()
        if leaf.ndim and leaf.shape[0] % mesh.shape[DATA_AXIS] == 0:
            axes = (DATA_AXIS,)
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))

    def function(state: State, arrays: Any, plan: Any, within: Array, key: Array) -> Any:
        batch = eqx.combine(arrays, static).batch(plan, within, size)
        if mesh is not None:
            batch = jax.tree.map(over_data, batch)
        return step(state, batch, key)

    mesh_context: Any = nullcontext()
    if mesh is not None:  # as inside `map_members`, where the axis of members is manual
        manual = mesh.abstract_mesh.update_axis_types({MEMBER_AXIS: AxisType.Manual})
        mesh_context = jax.sharding.use_abstract_mesh(manual)
    with mesh_context:
        return trace(function, *example)


def trace_observation(observe: Any, state: State, *example: Any) -> Traced:
    """Trace (state, step, key) -> JAX arrays of `observe` for one member.

    The traced function takes the `observable` part of the state.
    """
    if not callable(observe):
        checks.fail_kind("save", "have a function as `observe`", repr(observe))
    names = [] if state.aux is None else ["aux"]
    advice = (
        "With an `aux` it is observe(model, aux, step, key), without one observe(model, step, key)"
    )
    checks.check_call("observe", observe, ("model", *names, "step", "key"), advice)

    def observation(state: State, step: Array, key: Array) -> Any:
        carried = [] if state.aux is None else [state.aux]
        try:
            observed = observe(state.model, *carried, step, key)
        except jax.errors.JAXTypeError as error:  # such as `float` of a traced number
            checks.fail_kind(
                "observe",
                "be of JAX's operations, which are compiled",
                f"{type(error).__name__}: {str(error).splitlines()[0]}",
            )
        return jax.tree.map(_as_numbers, observed)

    return trace(observation, observable(state), *example)


def _as_numbers(leaf: Any) -> Array:
    """Return a leaf of an observation as an array; raise unless it holds numbers."""
    array = leaf
    if not isinstance(leaf, Array):
        array = np.asarray(leaf)
    if not number_kind(array.dtype):
        checks.fail_kind("observe", "return arrays of numbers", describe(leaf))
    return jnp.asarray(leaf)


def observable(state: State) -> State:
    """Return the state as losses and observations get it, without the optimiser's part."""
    return eqx.tree_at(
        lambda s: (s.opt_state, s.hyperparams),
        state,
        (None, None),
        is_leaf=lambda leaf: leaf is None,
    )


class ChunkInputs(NamedTuple):
    """Inputs of `run_chunk` for one shard of members, beside the state.

    Attributes:
        how: `Partition.how`.
        traced: Traced step of one member.
        loss_keys: Keys of the loss, [members].
        active: True for members that are trained, [members]; None for all.
        member_sources: Sampler's arrays and plan of every member, None for common ones.
        common_sources: Sampler's arrays and plan of all members, None for those of single members.
        span: First step, its index in the block, and number of steps, [3]; None until a chunk is
            chosen.
    """

    how: dict[str, Any]
    traced: Traced
    loss_keys: Array
    active: Array | None
    member_sources: Any
    common_sources: Any
    span: Array | None = None


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: ChunkInputs, state: State) -> Any:
    """Return the new state and `Info`s of several steps of every member, of one step if unrolled.

    The state is donated.
    """
    how, traced, keys, active, member_sources, common_sources, span = inputs
    is_unrolled = how["member_map"] == "unroll"
    info_shapes = traced.out[1]
    num_rows = 1 if is_unrolled else MAX_CHUNK

    def run_member(shared: Any, stacked: Any) -> Any:
        # `steps` is traced: chunk lengths follow wall time, and a loop of constant length 1 rounds
        # differently.
        traced, common_sources, (start, within, steps) = shared
        state, member_sources, key, is_active = stacked
        pairs = zip(member_sources, common_sources, strict=True)
        sources = [of_member if of_all is None else of_all for of_member, of_all in pairs]

        def step(i: Array | int, state: State) -> Any:
            return traced(state, *sources, within + i, jax.random.fold_in(key, start + i))

        def body(i: Array | int, carry: Any) -> Any:
            state, buffers = carry
            state, info = step(i, state)
            return state, jax.tree.map(
                lambda buffer, leaf: buffer.at[i].set(leaf.astype(buffer.dtype)), buffers, info
            )

        def run(state: State) -> Any:
            if is_unrolled:
                state, info = step(0, state)
                return state, jax.tree.map(lambda leaf: leaf[None], info)
            buffers = jax.tree.map(
                lambda leaf: jnp.zeros((num_rows, *leaf.shape), leaf.dtype), info_shapes
            )
            return jax.lax.fori_loop(0, steps, body, (state, buffers))

        def stay(state: State) -> Any:
            return state, jax.tree.map(
                lambda leaf: missing((num_rows, *leaf.shape), leaf.dtype), info_shapes
            )

        if is_active is None:
            return run(state)
        return jax.lax.cond(is_active, run, stay, state)

    shared = (traced, common_sources, span)
    if how["member_map"] != "scan" or how["mesh"] is not None:
        return map_members(run_member, shared, (state, member_sources, keys, active), **how)
    return _scan_in_place(run_member, shared, state, (member_sources, keys, active))


def _scan_in_place(run_member: Any, shared: Any, state: State, member_inputs: Any) -> Any:
    """Run members sequentially, and replace the state of each by its new state.

    `jax.lax.map` would hold two copies of the states.
    """
    state_arrays, state_static = eqx.partition(state, eqx.is_array)
    input_arrays, input_static = eqx.partition(member_inputs, eqx.is_array)

    def run_and_store(state_arrays: Any, row: Any) -> Any:
        index, row_arrays = row
        member_arrays = jax.tree.map(lambda leaf: leaf[index], state_arrays)
        member_state = eqx.combine(member_arrays, state_static)
        row_inputs = eqx.combine(row_arrays, input_static)
        new_state, infos = run_member(shared, (member_state, *row_inputs))

        new_arrays = eqx.filter(new_state, eqx.is_array)
        updated = jax.tree.map(
            lambda leaf, new_leaf: leaf.at[index].set(new_leaf), state_arrays, new_arrays
        )
        return updated, infos

    rows = (jnp.arange(count(state)), input_arrays)
    state_arrays, infos = jax.lax.scan(run_and_store, state_arrays, rows)
    return eqx.combine(state_arrays, state_static), infos


def largest_batch(inputs: ChunkInputs, state: State) -> int:
    """Return the number of members per batch and device that fits in free memory."""
    how = inputs.how

    def bytes_of(size: int) -> int:
        jitted: Any = run_chunk
        sized = how | {"members_per_batch": size}
        program = jitted.lower(inputs._replace(how=sized), state).compile()
        return program_bytes(program.compiled)

    arrays = jax.tree.leaves(eqx.filter(state, eqx.is_array))
    num_members = count(state) // member_devices(how["mesh"])
    return largest(bytes_of, num_members, free_memory(arrays))


def missing(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the fill value for missing entries: NaN, the smallest integer, or False."""
    fill: Any = False
    if jnp.issubdtype(dtype, jnp.inexact):
        fill = jnp.nan
    elif jnp.issubdtype(dtype, jnp.integer):
        fill = jnp.iinfo(dtype).min
    return jnp.full(shape, fill, dtype)


@eqx.filter_jit
def observe_members(inputs: Any, state: State) -> Any:
    """Return each member's observation.

    `inputs`: `Partition.how`, traced observation, step and keys.
    """
    how, traced, step, keys = inputs

    def observe_member(shared: Any, stacked: Any) -> Any:
        observe, step = shared
        key, member_state = stacked
        return observe(observable(member_state), step, jax.random.fold_in(key, step))

    return map_members(observe_member, (traced, step), (keys, state), **how, ordered=True)
