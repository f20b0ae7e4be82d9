"""The compiled part of a run: some steps of every member, and observations of them."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from dissociation import checks, sharding
from dissociation.batch_size import largest, needed_bytes
from dissociation.cores import available_cores
from dissociation.lanes import in_turn, number_of_lanes
from dissociation.members import MEMBER_MAPS, count, map_members, per_batch
from dissociation.memory import free_memory
from dissociation.traced import Traced, trace
from dissociation.training.samplers import Sampler
from dissociation.training.state import State, Step

MAX_CHUNK = 512
"""The longest chunk in steps: the length of the buffer that a compiled chunk writes losses and metrics to."""


class Layout(NamedTuple):
    """Where members lie, and in what order they are trained.

    Attributes:
        member_map: "vmap" (members batched in one program), "scan" (in turn inside the program), "unroll" (in turn, one
            step per call, no loop in the program) or "auto": on a CPU "scan", or "unroll" if a step contains a
            convolution, which XLA's CPU backend runs slowly inside a loop; elsewhere "vmap".
        members_per_batch: With "vmap", how many members are batched at once; None means all, "auto" as many as fit in
            the memory that is free (their program is compiled once more to measure that).
        mesh: Of `sharding.member_mesh`: devices over which the members are laid, and, along its axis "data" if it has
            one, the samples of every batch. All of them belong to this process. None: one device. "auto": one device as
            well, but where members go in turn on a CPU, as many side by side as it has devices, of which
            `dissociation.use_all_cores` makes several; a single member takes the memory of two there.
    """

    member_map: str = "auto"
    members_per_batch: int | str | None = None
    mesh: Mesh | str | None = "auto"


class Chosen(NamedTuple):
    """A layout with nothing left open but, until the program is known, the number of members per batch."""

    member_map: str
    members_per_batch: int | str | None
    mesh: Mesh | None

    @property
    def devices(self) -> int:
        """Over how many devices the members are laid."""
        return 1 if self.mesh is None else sharding.member_devices(self.mesh)


def chosen_layout(layout: Layout, num_members: int, arrays: Any, step: Traced, *others: Traced) -> tuple[Chosen, int]:
    """The layout, with what suits the platform and the programs where it is open, and how many members side by side."""
    member_map, members_per_batch, mesh = layout
    checks.check_choice("member_map", member_map, ("auto", *MEMBER_MAPS))
    if isinstance(mesh, str):
        checks.check_choice("mesh", mesh, ("auto",))
    elif mesh is not None:
        sharding.check_mesh(mesh)
    if isinstance(members_per_batch, str):
        checks.check_choice("members_per_batch", members_per_batch, ("auto",))
    elif members_per_batch is not None:
        checks.check_count("members_per_batch", members_per_batch, minimum=1)
    if member_map == "auto":
        platform = mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()
        in_turn = "unroll" if "conv_general_dilated" in step.code.primitives else "scan"
        member_map = in_turn if per_batch(platform) == 1 else "vmap"
    if member_map != "vmap" and members_per_batch not in (None, "auto"):
        wanted = f"be None where members go in turn (member_map={member_map!r})"
        checks.fail("members_per_batch", wanted, members_per_batch)
    lanes, laid = 1, None if isinstance(mesh, str) else mesh
    if member_map != "vmap" and (mesh == "auto" or _in_turn_on_cpu(laid)):
        operations = frozenset().union(*(program.code.primitives for program in (step, *others)))
        lanes = number_of_lanes(num_members, operations, (arrays, step, *others))
        # The devices of a CPU are threads: they run one program, whose bits do not depend on how many run it.
        if lanes > 1 or min(num_members, available_cores()) == 1:
            laid, lanes = None, lanes if laid is None else min(lanes, laid.size)
    return Chosen(member_map, members_per_batch if member_map == "vmap" else None, laid), lanes


def _in_turn_on_cpu(mesh: Mesh | None) -> bool:
    return mesh is not None and mesh.devices.flat[0].platform == "cpu" and mesh.axis_names == (sharding.MEMBER_AXIS,)


class Source(NamedTuple):
    """What batches are made from; both are None, the member's own, or all members'.

    Attributes:
        arrays: The sampler's.
        plan: Of the current block.
    """

    arrays: Any
    plan: Any


def trace_step(step: Step, sampler: Sampler, size: int | None, mesh: Mesh | None, *example: Any) -> Traced:
    """From state, sampler's arrays, plan, place in the block and key of one member to (state, info)."""
    static = eqx.filter(sampler, eqx.is_array, inverse=True)

    def function(state: State, arrays: Any, plan: Any, within: Array, key: Array) -> Any:
        batch = eqx.combine(arrays, static).batch(plan, within, size)
        return step(state, _over_data(batch, mesh), key)

    if mesh is None or sharding.DATA_AXIS not in mesh.axis_names:
        return trace(function, *example)
    # As it is inside `map_members`, where the axis of members is no matter of the compiler's any more.
    inside = mesh.abstract_mesh.update_axis_types({sharding.MEMBER_AXIS: AxisType.Manual})
    with jax.sharding.use_abstract_mesh(inside):
        return trace(function, *example)


def _over_data(batch: Any, mesh: Mesh | None) -> Any:
    """The batch laid over the mesh's data axis, if it has one that divides its samples."""
    if mesh is None or sharding.DATA_AXIS not in mesh.axis_names:
        return batch
    devices = mesh.shape[sharding.DATA_AXIS]

    def place(leaf: Array) -> Array:
        axes = (sharding.DATA_AXIS,) if leaf.ndim and leaf.shape[0] % devices == 0 else ()
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))

    return jax.tree.map(place, batch)


def trace_observation(observe: Any, state: State, *example: Any) -> Traced:
    """From state (as `observable` has it), step and key of one member to its observation."""

    def observation(state: State, step: Array, key: Array) -> Any:
        carried = () if state.aux is None else (state.aux,)
        return jax.tree.map(jnp.asarray, observe(state.model, *carried, step, key))

    return trace(observation, observable(state), *example)


def observable(state: State) -> State:
    """The state without what is the optimiser's alone: what losses and observations can tell apart."""
    where = lambda state: (state.opt_state, state.hyperparams)  # noqa: E731
    return eqx.tree_at(where, state, (None, None), is_leaf=lambda leaf: leaf is None)


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: Any, state: State) -> Any:
    """Several steps of every member, or one where members are unrolled: the new state, and the steps' `Info`s.

    `inputs` is the layout, the traced step, the members' loss keys, which of them go on (None: all), what each and what
    all of them take batches from, how many there are (None: all), and `[first step, place in the block, steps]`. The
    state is donated.
    """
    layout, traced, keys, active, mapped, common, count, place = inputs

    def one(shared: Any, stacked: Any) -> Any:
        traced, common, (start, within, steps) = shared
        state, mapped, key, goes_on = stacked
        source = Source(*(mine if theirs is None else theirs for mine, theirs in zip(mapped, common, strict=True)))

        def step(i: Array | int, state: State) -> Any:
            return traced(state, *source, within + i, jax.random.fold_in(key, start + i))

        infos = jax.eval_shape(lambda state: step(0, state)[1], state)
        rows = 1 if layout.member_map == "unroll" else MAX_CHUNK

        def body(i: Array | int, carry: Any) -> Any:
            state, buffers = carry
            state, info = step(i, state)
            return state, jax.tree.map(lambda buffer, leaf: buffer.at[i].set(leaf.astype(buffer.dtype)), buffers, info)

        def run(state: State) -> Any:
            if layout.member_map == "unroll":
                state, info = step(0, state)
                return state, jax.tree.map(lambda leaf: leaf[None], info)
            buffers = jax.tree.map(lambda leaf: jnp.zeros((rows, *leaf.shape), leaf.dtype), infos)
            return jax.lax.fori_loop(0, steps, body, (state, buffers))

        def stay(state: State) -> Any:
            return state, jax.tree.map(lambda leaf: missing((rows, *leaf.shape), leaf.dtype), infos)

        return run(state) if goes_on is None else jax.lax.cond(goes_on, run, stay, state)

    shared = traced, common, place
    if count is None:
        return _over_members(layout, one, shared, (state, mapped, keys, active))
    arrays, static = eqx.partition((state, (mapped, keys, active)), eqx.is_array)

    def of_member(own: Any, rest: Any) -> Any:
        own, rest = eqx.combine((own, rest), static)
        after, infos = one(shared, (own, *rest))
        return eqx.filter(after, eqx.is_array), infos

    state_arrays, infos = in_turn(of_member, arrays[0], arrays[1], count)
    return eqx.combine(state_arrays, static[0]), infos


def largest_batch(inputs: Any, state: State) -> int:
    """As many members per batch, on each device, as the memory that is free allows; `inputs` as of `run_chunk`."""
    layout, *others = inputs

    def bytes_of(size: int) -> int:
        jitted: Any = run_chunk
        program = jitted.lower((layout._replace(members_per_batch=size), *others), state).compile()
        return needed_bytes(program.compiled)

    return largest(
        bytes_of, count(state) // layout.devices, free_memory(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    )


def missing(shape: tuple[int, ...], dtype: Any) -> Array:
    """What stands for numbers that there are none of: NaN, or the least number, or False."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    return jnp.full(shape, jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False, dtype)


@eqx.filter_jit
def observe_members(inputs: Any, state: State) -> Any:
    """What is observed of every member; `inputs` is the layout, the traced observation, step, keys and how many."""
    layout, traced, step, keys, count = inputs

    def one(shared: Any, stacked: Any) -> Any:
        observe, step = shared
        key, own_state = stacked
        return observe(observable(own_state), step, jax.random.fold_in(key, step))

    if count is None:
        return _over_members(layout, one, (traced, step), (keys, state), ordered=True)
    arrays, static = eqx.partition((keys, state), eqx.is_array)
    observed = lambda _, member: ((), one((traced, step), eqx.combine(member, static)))  # noqa: E731
    return in_turn(observed, (), arrays, count)[1]


def _over_members(layout: Chosen, function: Any, shared: Any, stacked: Any, *, ordered: bool = False) -> Any:
    member_map, per_batch, mesh = layout
    how = {"members_per_batch": per_batch, "mesh": mesh, "ordered": ordered}
    return map_members(function, shared, stacked, member_map=member_map, **how)
