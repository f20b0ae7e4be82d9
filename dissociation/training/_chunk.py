"""Compiled chunks of a run: some steps of every member, and observations."""

import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array

from dissociation._core import checks
from dissociation.training import _sharding as sharding
from dissociation.training._cores import number_of_threads
from dissociation.training._members import MEMBER_MAPS, count, map_members, per_batch
from dissociation.training._memory import free_memory, largest, program_bytes
from dissociation.training._samplers import Sampler
from dissociation.training._state import State, Step
from dissociation.training._traced import Traced, trace

MAX_CHUNK = 512
"""Largest number of steps in a chunk, which sets the buffer for losses and metrics."""


class Layout(NamedTuple):
    """Placement of members on devices, and mapping over members.

    Attributes:
        member_map: "vmap" (members batched in one program), "scan" (sequentially inside the program), "unroll"
            (sequentially, one step per call, no loop in the program) or "auto". On a CPU "auto" is "scan", or "unroll"
            if a step has a convolution, which XLA runs slowly inside a loop there; elsewhere it is "vmap".
        members_per_batch: With "vmap", number of members batched at once. None: all. "auto": as many as fit in the free
            memory, measured by one more compilation.
        mesh: Mesh of `member_mesh`: devices of this process over which members are split, and, along the axis "data" if
            there is one, the samples of every batch. None: one device and one thread. "auto": one device with
            `threads`.
        threads: With `mesh="auto"` and sequential mapping on a CPU, number of shards of the members, which worker
            threads train in parallel, as many at once as there are devices. "auto": one shard per device;
            `dissociation.use_all_cores` makes every core a device.
    """

    member_map: str = "auto"
    members_per_batch: int | str | None = None
    mesh: Mesh | str | None = "auto"
    threads: int | str = "auto"

    def resumed(self, stored: dict[str, Any]) -> "Layout":
        """Return the layout with "auto" entries filled from a stored layout."""
        if self.member_map not in ("auto", stored["member_map"]):
            return self
        given = {name: value for name, value in self._asdict().items() if value != "auto"}
        layout, sizes = Layout(**{**stored, "mesh": "auto", **given}), stored["mesh"]
        if not isinstance(sizes, list) or layout.mesh != "auto" or math.prod(sizes) > jax.local_device_count():
            return layout
        devices = jax.local_devices()[: math.prod(sizes)]
        return layout._replace(mesh=sharding.member_mesh(devices, data=sizes[1]))


def stored_layout(layout: Layout) -> dict[str, Any]:
    """Return a layout for JSON; a mesh becomes its numbers of devices for members and data."""
    mesh = layout.mesh
    if isinstance(mesh, Mesh):
        members = sharding.member_devices(mesh)
        mesh = [members, mesh.size // members]
    return layout._asdict() | {"mesh": mesh}


def checked_mesh(layout: Layout) -> Mesh | None:
    """Return the checked mesh of a layout, None without one."""
    if isinstance(layout.mesh, Mesh):
        sharding.check_mesh(layout.mesh)
        return layout.mesh
    if layout.mesh is not None and str(layout.mesh) != "auto":
        checks.fail_kind("mesh", 'be a mesh of `member_mesh`, None or "auto"', repr(layout.mesh))
    return None


def chosen_layout(
    layout: Layout, mesh: Mesh | None, num_members: int, arrays: Any, step: Traced, *others: Traced
) -> tuple[Layout, int]:
    """Return the layout, with only `members_per_batch` perhaps "auto", and the number of worker threads."""
    member_map, members_per_batch, _, wanted = layout
    checks.check_choice("member_map", member_map, ("auto", *MEMBER_MAPS))
    for name, value in (("members_per_batch", members_per_batch), ("threads", wanted)):
        if isinstance(value, str):
            checks.check_choice(name, value, ("auto",))
        elif value is not None or name == "threads":
            checks.check_count(name, value, minimum=1)
    if member_map == "auto":
        platform = None if mesh is None else mesh.devices.flat[0].platform
        sequential = "unroll" if "conv_general_dilated" in step.code.primitives else "scan"
        member_map = sequential if per_batch(platform) == 1 else "vmap"
    if member_map == "vmap":
        return Layout(member_map, members_per_batch, mesh, 1), 1
    if members_per_batch not in (None, "auto"):
        wanted_value = f"be None with sequential mapping (member_map={member_map!r})"
        checks.fail("members_per_batch", wanted_value, members_per_batch)
    if layout.mesh != "auto":
        return Layout(member_map, None, mesh, 1), 1
    operations = frozenset().union(*(program.code.primitives for program in (step, *others)))
    threads = number_of_threads(num_members, operations, (arrays, step, *others))
    # Bits depend on the shards, so fewer cores compute the same shards with fewer threads.
    shards = threads if isinstance(wanted, str) else min(wanted, num_members)
    return Layout(member_map, None, None, shards), threads


def trace_step(step: Step, sampler: Sampler, size: int | None, mesh: Mesh | None, *example: Any) -> Traced:
    """Trace `step` for one member.

    The traced function takes (state, sampler arrays, plan, index in the block, key) and returns (state, info).
    """
    static = eqx.filter(sampler, eqx.is_array, inverse=True)
    devices = 0 if mesh is None or sharding.DATA_AXIS not in mesh.axis_names else mesh.shape[sharding.DATA_AXIS]

    def over_data(leaf: Array) -> Array:
        axes = (sharding.DATA_AXIS,) if leaf.ndim and leaf.shape[0] % devices == 0 else ()
        return jax.lax.with_sharding_constraint(leaf, PartitionSpec(*axes))

    def function(state: State, arrays: Any, plan: Any, within: Array, key: Array) -> Any:
        batch = eqx.combine(arrays, static).batch(plan, within, size)
        return step(state, jax.tree.map(over_data, batch) if devices else batch, key)

    if mesh is None or not devices:
        return trace(function, *example)
    # As inside `map_members`, where the axis of members is manual.
    inside = mesh.abstract_mesh.update_axis_types({sharding.MEMBER_AXIS: AxisType.Manual})
    with jax.sharding.use_abstract_mesh(inside):
        return trace(function, *example)


def trace_observation(observe: Any, state: State, *example: Any) -> Traced:
    """Trace `observe` for one member.

    The traced function takes (state, step, key) and returns the PyTree of `observe` with JAX arrays. Its state is the
    result of `observable`: the model and `aux`, without the optimiser's state.
    """

    def observation(state: State, step: Array, key: Array) -> Any:
        carried = () if state.aux is None else (state.aux,)
        return jax.tree.map(jnp.asarray, observe(state.model, *carried, step, key))

    return trace(observation, observable(state), *example)


def observable(state: State) -> State:
    """Return the state as losses and observations get it, without the optimiser's part."""
    return eqx.tree_at(lambda s: (s.opt_state, s.hyperparams), state, (None, None), is_leaf=lambda leaf: leaf is None)


@eqx.filter_jit(donate="all-except-first")
def run_chunk(inputs: Any, state: State) -> Any:
    """Return the new state and `Info`s of several steps of every member, of one step if unrolled.

    `inputs`: layout, traced step, loss keys, trained members (None: all), sources of batches per member and common, and
    `[first step, place in the block, steps]`. The state is donated.
    """
    layout, traced, keys, active, mapped, common, place = inputs

    def one(shared: Any, stacked: Any) -> Any:
        # `steps` is traced: chunk lengths follow wall time, and a loop of constant length 1 rounds differently.
        traced, common, (start, within, steps) = shared
        state, mapped, key, goes_on = stacked
        source = [mine if theirs is None else theirs for mine, theirs in zip(mapped, common, strict=True)]

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
    if layout.member_map != "scan" or layout.mesh is not None:
        return _over_members(layout, one, shared, (state, mapped, keys, active))
    # This loop updates the state in place; `jax.lax.map` would hold it twice.
    own, static = eqx.partition(state, eqx.is_array)
    rest, rest_static = eqx.partition((mapped, keys, active), eqx.is_array)

    def of_member(own: Any, each: Any) -> Any:
        i, rest = each
        member = eqx.combine(jax.tree.map(lambda leaf: leaf[i], own), static)
        after, infos = one(shared, (member, *eqx.combine(rest, rest_static)))
        return jax.tree.map(lambda leaf, new: leaf.at[i].set(new), own, eqx.filter(after, eqx.is_array)), infos

    own, infos = jax.lax.scan(of_member, own, (jnp.arange(count(state)), rest))
    return eqx.combine(own, static), infos


def largest_batch(inputs: Any, state: State) -> int:
    """Return the number of members per batch and device that fits in free memory; `inputs` as in `run_chunk`."""
    layout, *others = inputs

    def bytes_of(size: int) -> int:
        jitted: Any = run_chunk
        program = jitted.lower((layout._replace(members_per_batch=size), *others), state).compile()
        return program_bytes(program.compiled)

    free = free_memory(jax.tree.leaves(eqx.filter(state, eqx.is_array)))
    return largest(bytes_of, count(state) // sharding.member_devices(layout.mesh), free)


def missing(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the fill value for missing entries: NaN, the smallest integer, or False."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.full(shape, jnp.nan, dtype)
    return jnp.full(shape, jnp.iinfo(dtype).min if jnp.issubdtype(dtype, jnp.integer) else False, dtype)


@eqx.filter_jit
def observe_members(inputs: Any, state: State) -> Any:
    """Return each member's observation; `inputs`: layout, traced observation, step and keys."""
    layout, traced, step, keys = inputs

    def one(shared: Any, stacked: Any) -> Any:
        observe, step = shared
        key, own_state = stacked
        return observe(observable(own_state), step, jax.random.fold_in(key, step))

    return _over_members(layout, one, (traced, step), (keys, state), ordered=True)


def _over_members(layout: Layout, function: Any, shared: Any, stacked: Any, *, ordered: bool = False) -> Any:
    member_map, per_batch, mesh, _ = layout
    how = {"members_per_batch": per_batch, "mesh": mesh, "ordered": ordered}
    return map_members(function, shared, stacked, member_map=member_map, **how)
