"""Laying stacked members over the devices of this process.

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

from dissociation._core import checks
from dissociation._core.conversion import check_fits
from dissociation._core.validation import validated

MEMBER_AXIS, DATA_AXIS = "members", "data"


@validated
def member_mesh(devices: Sequence[Any] | None = None, *, data: int = 1) -> Mesh:
    """A mesh whose axes are `"members"`, and `"data"` if batches are laid over several devices too.

    Args:
        devices: Devices of this process; None means all of the default backend.
        data: Over how many devices a member's batches are laid; must divide the number of devices.

    Returns:
        A mesh with automatic axes, as `training.Layout` takes it.

    Raises:
        ValueError: If `data` does not divide the number of devices.
    """
    chosen = jax.local_devices() if devices is None else list(devices)
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
    """Raise unless `mesh` has the axis `"members"`, none but `"data"` beside it, and devices of this process."""
    if mesh.axis_names not in ((MEMBER_AXIS,), (MEMBER_AXIS, DATA_AXIS)):
        wanted = f"have the axis {MEMBER_AXIS!r}, and {DATA_AXIS!r} at most"
        checks.fail("mesh", wanted, mesh.axis_names, "Make it with sharding.member_mesh")
    if not mesh.is_multi_process:
        return
    checks.fail("mesh", "hold devices of this process", "devices of several", "Pass devices=jax.local_devices()")


@validated
def pad_members(tree: Any, num_devices: int) -> Any:
    """Repeats the last member until `num_devices`, or the rows of a part, divide their number."""
    checks.check_count("num_devices", num_devices, minimum=1)
    _check_members(tree)

    def pad(leaf: jax.Array) -> jax.Array:
        missing = -leaf.shape[0] % num_devices
        return leaf if missing == 0 else jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)])

    return _map_arrays(pad, tree)


@validated
def drop_padding(tree: Any, num_members: int) -> Any:
    """Keeps the first `num_members` members of every array leaf: undoes `pad_members`."""
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
    """Puts every array leaf on the mesh, its leading axis split over the devices."""
    return _map_arrays(lambda leaf: _placed(leaf, NamedSharding(mesh, PartitionSpec(MEMBER_AXIS))), tree)


@validated
def replicate(tree: Any, mesh: Mesh) -> Any:
    """Puts a whole copy of every array leaf on each device of the mesh."""
    return _map_arrays(lambda leaf: _placed(leaf, NamedSharding(mesh, PartitionSpec())), tree)


def _placed(leaf: Any, where: NamedSharding) -> jax.Array:
    check_fits("tree", leaf)
    return jax.device_put(leaf, where)


def each_device(function: Callable[..., Any], mesh: Mesh, shared: Any, stacked: Any) -> Any:
    """`function(shared, stacked)` on every device, with the members that lie there."""
    arrays, static = eqx.partition((shared, stacked), eqx.is_array)
    split = PartitionSpec(MEMBER_AXIS)
    specs = {"in_specs": (PartitionSpec(), split), "out_specs": split}

    def local(*arrays: Any) -> Any:
        return function(*eqx.combine(arrays, static))

    return jax.shard_map(local, mesh=mesh, **specs, axis_names={MEMBER_AXIS}, check_vma=False)(*arrays)


def _map_arrays(function: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: function(leaf) if eqx.is_array(leaf) else leaf, tree)
