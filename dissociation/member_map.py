"""Mapping a function over stacked members: batched, in turn, unrolled, and over several devices."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from dissociation import checks, sharding
from dissociation.bmap import bmap
from dissociation.validation import validated

MEMBER_MAPS = ("vmap", "scan", "unroll")


@validated
def member(models: Any, index: int) -> Any:
    """One of stacked members.

    Args:
        models: A PyTree whose array leaves carry members first; other leaves belong to all.
        index: Which one; counted from the end if negative.

    Returns:
        The PyTree with every array at `index`.

    Raises:
        TypeError: If it is the whole result of a training.
        ValueError: If there is none of this index, or the arrays do not agree in their number of members.

    Example:
        >>> member({"weight": jnp.arange(6.0).reshape(3, 2), "name": "a"}, -1)
        {'name': 'a', 'weight': Array([4., 5.], dtype=float32)}
    """
    if hasattr(models, "history"):
        checks.fail_kind("models", "be stacked models, as in `result.models`", f"a {type(models).__name__}")
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(models) if hasattr(leaf, "shape")}
    if len(counts) != 1 or counts == {()}:
        checks.fail("models", "hold arrays that agree in a leading axis", f"leading axes {sorted(counts)}")
    ((count,),) = counts
    if not -count <= index < count:
        checks.fail("index", f"lie from {-count} to {count - 1}", index)
    return jax.tree.map(lambda leaf: leaf[index] if hasattr(leaf, "shape") else leaf, models)


@validated
def map_members(
    function: Callable[[Any, Any], Any],
    shared: Any,
    stacked: Any,
    *,
    member_map: str,
    members_per_batch: int | None = None,
    mesh: Mesh | None = None,
    ordered: bool = False,
) -> Any:
    """`function(shared, member)` for every member.

    With "scan" and "unroll" a member's result does not depend on how many others there are, bit for bit; with "vmap"
    it may, in the last digits.

    Args:
        function: For one member; must return arrays.
        shared: A PyTree that every call gets whole.
        stacked: A PyTree whose array leaves carry members first; other leaves are handed over as they are.
        member_map: "vmap" (batched), "scan" (in turn, a compiled loop) or "unroll" (in turn, no loop).
        members_per_batch: With "vmap", how many members are batched at once; None means all.
        mesh: Devices to lay the members over; must divide their number (`sharding.pad_members`).
        ordered: With "unroll", whether a member waits for the one before it. Decompositions of several members at once
            can hang on a CPU.

    Returns:
        The results, every leaf with members first.

    Raises:
        ValueError: If `member_map` is unknown.

    Example:
        >>> map_members(lambda scale, x: scale * x, 2.0, jnp.arange(3.0), member_map="scan")
        Array([0., 2., 4.], dtype=float32)
    """
    checks.check_choice("member_map", member_map, MEMBER_MAPS)
    if mesh is None:
        return _map_locally(function, shared, stacked, member_map, members_per_batch, ordered)
    shared_arrays, shared_static = eqx.partition(shared, eqx.is_array)
    stacked_arrays, stacked_static = eqx.partition(stacked, eqx.is_array)

    def local(shared_arrays: Any, stacked_arrays: Any) -> Any:
        own_shared = eqx.combine(shared_arrays, shared_static)
        own_stacked = eqx.combine(stacked_arrays, stacked_static)
        return _map_locally(function, own_shared, own_stacked, member_map, members_per_batch, ordered)

    whole, split = PartitionSpec(), PartitionSpec(sharding.MEMBER_AXIS)
    over = {sharding.MEMBER_AXIS}
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(whole, split), out_specs=split, axis_names=over, check_vma=False)
    return mapped(shared_arrays, stacked_arrays)


def _map_locally(
    function: Callable[[Any, Any], Any],
    shared: Any,
    stacked: Any,
    member_map: str,
    members_per_batch: int | None,
    ordered: bool,
) -> Any:
    if member_map == "vmap":
        return bmap(function, in_axes=(None, eqx.if_array(0)), batch_size=members_per_batch)(shared, stacked)
    arrays, static = eqx.partition(stacked, eqx.is_array)
    if member_map == "scan":
        return jax.lax.map(lambda member: function(shared, eqx.combine(member, static)), arrays)
    count = jax.tree.leaves(arrays)[0].shape[0]
    members = [jax.tree.map(lambda leaf, i=i: leaf[i], arrays) for i in range(count)]
    results = []
    for member in members:
        if ordered and results:
            member, results[-1] = jax.lax.optimization_barrier((member, results[-1]))
        results.append(function(shared, eqx.combine(member, static)))
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *results)
