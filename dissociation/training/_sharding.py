"""Meshes of this process' devices, over which stacked members are split.

Every device trains or measures its own members, without communication.
"""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dissociation._core import checks
from dissociation._core.validation import validated

MEMBER_AXIS, DATA_AXIS = "members", "data"


@validated
def member_mesh(devices: Sequence[Any] | None = None, *, data: int = 1) -> Mesh:
    """Return a mesh with the axis `"members"`, and `"data"` if batches are split over several devices too.

    Args:
        devices: Devices of this process; None: all of the default backend.
        data: Number of devices over which a member's batches are split; must divide the number of devices.

    Returns:
        A mesh with automatic axes, for `training.Layout`.
    """
    chosen = jax.local_devices() if devices is None else list(devices)
    checks.check_count("data", data, minimum=1)
    if len(chosen) % data:
        checks.fail("data", f"divide the number of devices ({len(chosen)})", data)
    if data == 1:
        return Mesh(np.array(chosen), (MEMBER_AXIS,), axis_types=(AxisType.Auto,))
    return Mesh(np.array(chosen).reshape(-1, data), (MEMBER_AXIS, DATA_AXIS), axis_types=(AxisType.Auto,) * 2)


def member_devices(mesh: Any) -> int:
    """Return the number of devices over which a mesh, or None, splits members."""
    return 1 if mesh is None else mesh.shape[MEMBER_AXIS]


def check_mesh(mesh: Mesh) -> None:
    """Raise unless `mesh` has the axis `"members"`, at most `"data"` beside it, and local devices."""
    if mesh.axis_names not in ((MEMBER_AXIS,), (MEMBER_AXIS, DATA_AXIS)):
        wanted = f"have the axis {MEMBER_AXIS!r}, and {DATA_AXIS!r} at most"
        checks.fail("mesh", wanted, mesh.axis_names, "Make it with sharding.member_mesh")
    if not mesh.is_multi_process:
        return
    checks.fail("mesh", "hold devices of this process", "devices of several", "Pass devices=jax.local_devices()")


def place_members(tree: Any, mesh: Mesh, spec: PartitionSpec | None = None) -> Any:
    """Place array leaves on the mesh, by default split along the leading axis."""
    where = NamedSharding(mesh, PartitionSpec(MEMBER_AXIS) if spec is None else spec)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, where) if eqx.is_array(leaf) else leaf, tree)


def each_device(function: Callable[..., Any], mesh: Mesh, shared: Any, stacked: Any) -> Any:
    """Return `function(shared, stacked)`, called on every device with its members."""
    arrays, static = eqx.partition((shared, stacked), eqx.is_array)
    split = PartitionSpec(MEMBER_AXIS)
    specs = {"in_specs": (PartitionSpec(), split), "out_specs": split}

    def local(*arrays: Any) -> Any:
        return function(*eqx.combine(arrays, static))

    return jax.shard_map(local, mesh=mesh, **specs, axis_names={MEMBER_AXIS}, check_vma=False)(*arrays)
