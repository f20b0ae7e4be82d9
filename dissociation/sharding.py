"""Laying stacked members over devices, of this process or of several.

Members are independent, so their axis is the natural one to shard: every device trains or measures its own members
and nothing is communicated. Where the devices do not divide the members, the last member is repeated as padding and
its copies are dropped afterwards.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dissociation import checks
from dissociation.conversion import check_fits
from dissociation.validation import validated

MEMBER_AXIS, DATA_AXIS = "members", "data"


@validated
def member_mesh(devices: Sequence[Any] | None = None, *, data: int = 1) -> Mesh:
    """A mesh whose axes are `"members"`, and `"data"` if batches are laid over several devices too.

    Args:
        devices: The devices to use; None means all of the default backend, of all processes.
        data: Over how many devices a member's batches are laid; must divide the number of devices.

    Returns:
        A mesh with automatic axes, as `training.Layout` takes it.

    Raises:
        ValueError: If `data` does not divide the number of devices.
    """
    # Those of a process side by side, so that a member's data lie in one process where its devices allow it.
    every = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    chosen = every if devices is None else list(devices)
    checks.check_count("data", data, minimum=1)
    if len(chosen) % data:
        checks.fail("data", f"divide the number of devices ({len(chosen)})", data)
    if data == 1:
        return Mesh(np.array(chosen), (MEMBER_AXIS,), axis_types=(AxisType.Auto,))
    return Mesh(np.array(chosen).reshape(-1, data), (MEMBER_AXIS, DATA_AXIS), axis_types=(AxisType.Auto,) * 2)


def member_devices(mesh: Mesh) -> int:
    """Over how many devices a mesh lays members."""
    return mesh.shape[MEMBER_AXIS]


@validated
def check_mesh(mesh: Mesh) -> None:
    """Raises unless `mesh` has the axis `"members"`, and no other but `"data"`."""
    if mesh.axis_names not in ((MEMBER_AXIS,), (MEMBER_AXIS, DATA_AXIS)):
        wanted = f"have the axis {MEMBER_AXIS!r}, and {DATA_AXIS!r} at most"
        checks.fail("mesh", wanted, mesh.axis_names, "Make it with sharding.member_mesh")


@validated
def pad_members(tree: Any, num_devices: int) -> Any:
    """Repeats the last member until `num_devices`, or the rows of a part, divide their number.

    Args:
        tree: A PyTree whose array leaves carry members first.
        num_devices: How many devices the member axis is laid over.

    Returns:
        The tree; leaves that are not arrays are left alone.

    Raises:
        TypeError: If `num_devices` is no integer.
        ValueError: If it is below 1, or the leaves do not all have the same number of members, at least one.
    """
    checks.check_count("num_devices", num_devices, minimum=1)
    _check_members(tree)

    def pad(leaf: jax.Array) -> jax.Array:
        missing = -leaf.shape[0] % num_devices
        return leaf if missing == 0 else jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])

    return _map_arrays(pad, tree)


@validated
def drop_padding(tree: Any, num_members: int) -> Any:
    """Keeps the first `num_members` members of every array leaf: undoes `pad_members`.

    Args:
        tree: A PyTree whose array leaves carry members first.
        num_members: How many are no padding, from 1 to as many as there are.

    Returns:
        The tree; leaves that are not arrays are left alone.

    Raises:
        TypeError: If `num_members` is no integer.
        ValueError: If it is out of range, or the leaves do not all have the same number of members.
    """
    count = checks.check_count("num_members", num_members, minimum=1)
    present = _check_members(tree)
    if present is not None and count > present:
        checks.fail("num_members", f"be at most {present}, the members of `tree`", count)
    return _map_arrays(lambda leaf: leaf[:num_members], tree)


def _check_members(tree: Any) -> int | None:
    """How many members the array leaves of a tree carry; None if it has no such leaf. Raises if they disagree."""
    shapes = [leaf.shape for leaf in jax.tree.leaves(tree) if eqx.is_array(leaf)]
    if any(not shape or not shape[0] or shape[0] != shapes[0][0] for shape in shapes):
        checks.fail("tree", "carry the same members, at least one, first in every array", f"shapes {str(shapes)[:200]}")
    return shapes[0][0] if shapes else None


@validated
def place_members(tree: Any, mesh: Mesh) -> Any:
    """Puts every array leaf on the mesh, its leading axis split over the devices.

    Where these are of several processes, each must hold the whole leaves, and keeps its part of them.
    """
    return _map_arrays(lambda leaf: _placed(leaf, NamedSharding(mesh, PartitionSpec(MEMBER_AXIS))), tree)


@validated
def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts a whole copy of every array leaf on each device of the mesh."""
    return _map_arrays(lambda leaf: _placed(leaf, NamedSharding(mesh, PartitionSpec())), tree)


def _placed(leaf: Any, where: NamedSharding) -> jax.Array:
    check_fits("tree", leaf)
    if where.is_fully_addressable or not getattr(leaf, "is_fully_addressable", True):
        return jax.device_put(leaf, where)
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        data = _placed(jax.random.key_data(leaf), where)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    whole = np.asarray(leaf)
    return jax.make_array_from_callback(whole.shape, where, lambda part: whole[part])


def rows_of_processes(mesh: Mesh | None, num_processes: int) -> list[int]:
    """How many of a mesh's rows, each of which gets members of its own, lie in each process; without one, devices.

    Raises:
        ValueError: If a row lies in several processes.
    """
    if mesh is None:
        rows = [[device] for device in jax.devices()]
    else:
        rows = mesh.devices.reshape(member_devices(mesh), -1).tolist()
    whose = [{device.process_index for device in row} for row in rows]
    if broken := next((each for each in whose if len(each) > 1), None):
        wanted = "lay the data of a member over devices of one process"
        advice = "Choose `data` of `member_mesh` so that it divides the devices of a process"
        checks.fail("mesh", wanted, f"devices of processes {sorted(broken)} in one row", advice)
    return [sum(each == {i} for each in whose) for i in range(num_processes)]


def local_part(mesh: Mesh) -> Mesh | None:
    """The rows of a mesh that lie in this process; the mesh itself if all do, None if none does."""
    rows = mesh.devices.reshape(member_devices(mesh), -1)
    own = np.array([row[0].process_index == jax.process_index() for row in rows])
    if own.all():
        return mesh
    if not own.any():
        return None
    return Mesh(mesh.devices[own], mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)


def each_device(function: Callable[..., Any], mesh: Mesh, shared: Any, stacked: Any) -> Any:
    """`function(shared, stacked)` on every device, with the members that lie there.

    Args:
        function: Of all of `shared` and of some members; returns arrays, members first.
        mesh: The devices; must divide the number of members (`pad_members`).
        shared: A PyTree that every device gets whole.
        stacked: A PyTree whose array leaves carry members first; other leaves are handed over as they are.

    Returns:
        The results, members first, laid over the mesh.
    """
    arrays, static = eqx.partition((shared, stacked), eqx.is_array)
    split = PartitionSpec(MEMBER_AXIS)
    specs = {"in_specs": (PartitionSpec(), split), "out_specs": split}

    def local(*arrays: Any) -> Any:
        return function(*eqx.combine(arrays, static))

    return jax.shard_map(local, mesh=mesh, **specs, axis_names={MEMBER_AXIS}, check_vma=False)(*arrays)


def _map_arrays(function: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if eqx.is_array(leaf) else leaf, tree)
