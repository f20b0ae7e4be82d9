"""Stacked members: taking, stacking and mapping over them, and meshes over which they are split.

Arrays carry members first; other leaves (functions, numbers, text) belong to all members.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import check_fits, common_dtype, number_kind, to_device
from dissociation._core.types import Size
from dissociation._core.validation import validated

MEMBER_MAPS = ("vmap", "scan", "unroll")
MEMBER_AXIS = "members"
DATA_AXIS = "data"


@validated
def member(models: Any, index: int) -> Any:
    """Return one of stacked members.

    Args:
        models: PyTree whose array leaves carry members first; other leaves belong to all.
        index: Index of the member, negative from the end.

    Raises:
        TypeError: If `models` is a result of training.
        ValueError: If no member has this index, or arrays disagree in the number of members.

    Example:
        >>> member({"weight": jnp.arange(6.0).reshape(3, 2), "name": "a"}, -1)
        {'name': 'a', 'weight': Array([4., 5.], dtype=float32)}
    """
    count(models)
    return take(models, index)


def count(models: Any) -> int:
    """Return the number of stacked members."""
    if hasattr(models, "history"):
        checks.fail_kind(
            "models", "be stacked models, as in `result.models`", f"a {type(models).__name__}"
        )
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(models) if hasattr(leaf, "shape")}
    if len(counts) != 1 or counts == {()}:
        checks.fail(
            "models", "hold arrays that agree in a leading axis", f"leading axes {sorted(counts)}"
        )
    (num_members,) = counts.pop()
    return num_members


def take(models: Any, index: Any) -> Any:
    """Return stacked members at an index, a slice or an array of indices; other leaves unchanged.

    Raises:
        ValueError: If no member has a known index.

    Example:
        >>> take({"weight": jnp.arange(6.0).reshape(3, 2)}, jnp.array([2, 0]))["weight"].tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    if isinstance(index, list):
        index = np.asarray(index)
    _check_members(models, index)

    def taken(leaf: Any) -> Any:
        return leaf[index] if hasattr(leaf, "shape") else leaf

    arrays, constants = eqx.partition(models, lambda leaf: isinstance(leaf, jax.Array))
    constants = jax.tree.map(taken, constants)
    leaves = jax.tree.leaves(arrays)
    is_known = leaves and not any(map(checks.is_traced, [*leaves, index]))
    if is_known and np.asarray(index).dtype.kind in "iu":
        arrays = gathered(arrays, to_device(np.asarray(index)))  # one program for all indices
    else:
        arrays = jax.tree.map(taken, arrays)
    return eqx.combine(arrays, constants)


def _check_members(models: Any, index: Any) -> None:
    """Raise if an array has no entry at a known index: JAX would return the last one."""
    if checks.is_traced(index) or np.asarray(index).dtype.kind not in "iu":
        return
    lengths = [leaf.shape[0] for leaf in jax.tree.leaves(models) if getattr(leaf, "shape", ())]
    if not lengths:
        return
    length = min(lengths)
    indices = np.asarray(index)
    missing = indices[(indices < -length) | (indices >= length)]
    if missing.size:
        checks.fail(
            "index",
            f"lie from {-length} to {length - 1}",
            ", ".join(map(str, missing.ravel().tolist())),
        )


@jax.jit
def gathered(arrays: Any, members: Array) -> Any:
    """Return stacked members at an array of indices, or the member at a scalar."""
    return jax.tree.map(lambda leaf: leaf[members], arrays)


def stack(trees: Sequence[Any], axis: int = 0) -> Any:
    """Stack members along a new axis; NumPy arrays stay NumPy arrays."""
    return _joined("stack", trees, axis)


def concatenate(trees: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate PyTrees of one structure; NumPy arrays stay NumPy arrays."""
    if len(trees) == 1:
        return trees[0]
    return _joined("concatenate", trees, axis)


def per_batch(platform: str | None = None) -> int | None:
    """Return the number of members to map at once: 1 on a CPU, else None, which means all.

    A single member keeps a CPU busy.
    """
    return 1 if (platform or jax.default_backend()) == "cpu" else None


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
    """Return `function(shared, member)` for every member, independent of the others up to rounding.

    Args:
        function: Function for one member that returns arrays.
        shared: PyTree that every call gets whole.
        stacked: PyTree whose array leaves carry members first; other leaves are passed unchanged.
        member_map: "vmap" (batched), "scan" (sequentially, a compiled loop) or "unroll"
            (sequentially, no loop).
        members_per_batch: With "vmap", number of members batched at once; None: all.
        mesh: Devices over which members are split, equally many on each.
        ordered: With "unroll", if True, compute members in order: simultaneous decompositions can
            hang on a CPU.

    Returns:
        The results, every leaf with members first.

    Example:
        >>> map_members(lambda scale, x: scale * x, 2.0, jnp.arange(3.0), member_map="scan")
        Array([0., 2., 4.], dtype=float32)
    """
    checks.check_choice("member_map", member_map, MEMBER_MAPS)
    for leaf in jax.tree.leaves((shared, stacked)):
        if isinstance(leaf, np.ndarray):
            check_fits("stacked", leaf)
    local = partial(_map_locally, function, member_map, members_per_batch, ordered)
    if mesh is not None:
        return _each_device(local, mesh, shared, stacked)
    return local(shared, stacked)


def _map_locally(
    function: Any,
    member_map: str,
    members_per_batch: int | None,
    ordered: bool,
    shared: Any,
    stacked: Any,
) -> Any:
    """Return `function(shared, member)` for every member on one device, see `map_members`."""
    arrays, static = eqx.partition(stacked, eqx.is_array)

    def mapped(member_arrays: Any) -> Any:
        return function(shared, eqx.combine(member_arrays, static))

    is_batched = member_map == "vmap"
    if is_batched and (members_per_batch is None or members_per_batch >= count(arrays)):
        return jax.vmap(mapped)(arrays)
    if member_map != "unroll":
        batch_size = None
        if is_batched and members_per_batch != 1:
            batch_size = members_per_batch
        return jax.lax.map(mapped, arrays, batch_size=batch_size)

    results = []
    for index in range(count(arrays)):
        member_arrays = take(arrays, index)
        if ordered and results:
            results[-1], member_arrays = after(results[-1], member_arrays)
        results.append(mapped(member_arrays))
    return stack(results)


def after(done: Any, pending: Any) -> tuple[Any, Any]:
    """Return both arguments; what is computed from `pending` waits for `done`."""
    # Decompositions that XLA runs in parallel in one program on a CPU can wait for each other for
    # ever.
    arrays, static = eqx.partition((done, pending), eqx.is_array)
    return eqx.combine(jax.lax.optimization_barrier(arrays), static)


def _joined(operation: str, trees: Sequence[Any], axis: int) -> Any:
    """Join the leaves of PyTrees of one structure by `operation`: "stack" or "concatenate"."""
    if not trees:
        checks.fail("trees", "hold at least one PyTree", "none")

    columns: list[Any] = []
    device_columns: dict[int, tuple[Any, ...]] = {}
    try:
        jax.tree.map(lambda *leaves: columns.append(leaves), *trees)
        for number, leaves in enumerate(columns):
            if not hasattr(leaves[0], "shape"):
                columns[number] = leaves[0]
            elif all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
                columns[number] = getattr(np, operation)(leaves, axis=axis)
            else:
                device_columns[number] = _of_one_kind(leaves)

        is_traced = any(map(checks.is_traced, jax.tree.leaves(device_columns)))
        join = _compiled_join if device_columns and not is_traced else _joined_arrays
        for number, array in join(operation, device_columns, axis).items():
            columns[number] = array
    except checks.WrongValue:
        raise
    except ValueError as error:
        raise ValueError(
            f"`trees` must be alike, got other structures or shapes: {error}"
        ) from error
    return jax.tree.unflatten(jax.tree.structure(trees[0]), columns)


def _of_one_kind(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Return JAX arrays, converted to a common dtype if some hold integers."""
    kinds = {leaf.dtype for leaf in leaves}
    if len(kinds) == 1 or "int" not in map(number_kind, kinds):
        return tuple(map(to_device, leaves))
    names = [f"trees[{index}]" for index in range(len(leaves))]
    dtype = common_dtype(names, list(leaves))
    return tuple(to_device(leaf, dtype) for leaf in leaves)


def _joined_arrays(
    operation: str, columns: dict[int, tuple[Array, ...]], axis: int
) -> dict[int, Array]:
    join = getattr(jnp, operation)
    return {number: join(arrays, axis=axis) for number, arrays in columns.items()}


_compiled_join = jax.jit(_joined_arrays, static_argnums=(0, 2))


@validated
def member_mesh(devices: Sequence[Any] | None = None, *, data: Size = 1) -> Mesh:
    """Return a mesh with the axis `"members"`, and `"data"` if devices split batches, too.

    Args:
        devices: Devices of this process; None: all of the default backend.
        data: Number of devices over which a member's batches are split; must divide the number of
            devices.

    Returns:
        A mesh with automatic axes, for `fit(mesh=...)` and `map_members`.
    """
    chosen = jax.local_devices() if devices is None else list(devices)
    if len(chosen) % data:
        checks.fail("data", f"divide the number of devices ({len(chosen)})", data)
    names = (MEMBER_AXIS,)
    grid = np.array(chosen)
    if data > 1:
        names = (MEMBER_AXIS, DATA_AXIS)
        grid = grid.reshape(-1, data)
    return Mesh(grid, names, axis_types=(AxisType.Auto,) * len(names))


def member_devices(mesh: Any) -> int:
    """Return the number of devices over which a mesh, or None, splits members."""
    return 1 if mesh is None else mesh.shape[MEMBER_AXIS]


def check_mesh(mesh: Mesh) -> None:
    """Raise unless `mesh` has the axis `"members"`, at most `"data"` too, and local devices."""
    if mesh.axis_names not in ((MEMBER_AXIS,), (MEMBER_AXIS, DATA_AXIS)):
        checks.fail(
            "mesh",
            f"have the axis {MEMBER_AXIS!r}, and {DATA_AXIS!r} at most",
            mesh.axis_names,
            "Make it with dissociation.member_mesh",
        )
    if mesh.is_multi_process:
        checks.fail(
            "mesh",
            "hold devices of this process",
            "devices of several",
            "Pass devices=jax.local_devices()",
        )


def place_members(tree: Any, mesh: Mesh, spec: PartitionSpec | None = None) -> Any:
    """Place array leaves on the mesh, by default split along the leading axis."""
    if spec is None:
        spec = PartitionSpec(MEMBER_AXIS)
    sharding = NamedSharding(mesh, spec)
    arrays, static = eqx.partition(tree, eqx.is_array)
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, sharding), arrays)
    return eqx.combine(placed, static)


def _each_device(function: Callable[..., Any], mesh: Mesh, shared: Any, stacked: Any) -> Any:
    """Return `function(shared, stacked)`, called on every device with its members."""
    arrays, static = eqx.partition((shared, stacked), eqx.is_array)
    split = PartitionSpec(MEMBER_AXIS)
    local = lambda *arrays: function(*eqx.combine(arrays, static))  # noqa: E731
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(PartitionSpec(), split),
        out_specs=split,
        axis_names={MEMBER_AXIS},
        check_vma=False,
    )
    return mapped(*arrays)
