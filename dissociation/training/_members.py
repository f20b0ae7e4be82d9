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
MEMBER_AXIS, DATA_AXIS = "members", "data"


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
    ((number,),) = counts
    return number


def take(models: Any, index: Any) -> Any:
    """Return stacked members at an index, a slice or an array of indices; other leaves unchanged.

    Raises:
        ValueError: If no member has a known index.

    Example:
        >>> take({"weight": jnp.arange(6.0).reshape(3, 2)}, jnp.array([2, 0]))["weight"].tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    index = np.asarray(index) if isinstance(index, list) else index
    _check_members(models, index)
    arrays, constants = eqx.partition(models, lambda leaf: isinstance(leaf, jax.Array))
    constants = jax.tree.map(
        lambda leaf: leaf[index] if hasattr(leaf, "shape") else leaf, constants
    )
    leaves = jax.tree.leaves(arrays)
    is_known = leaves and not any(map(checks.is_traced, [*leaves, index]))
    if is_known and np.asarray(index).dtype.kind in "iu":
        arrays = gathered(arrays, to_device(np.asarray(index)))  # one program for all places
    else:
        arrays = jax.tree.map(lambda leaf: leaf[index], arrays)
    return eqx.combine(arrays, constants)


def _check_members(models: Any, index: Any) -> None:
    """Raise if an array has no entry at a known index: JAX would return the last one."""
    if checks.is_traced(index) or np.asarray(index).dtype.kind not in "iu":
        return
    lengths = [leaf.shape[0] for leaf in jax.tree.leaves(models) if getattr(leaf, "shape", ())]
    number = min(lengths, default=0)
    indices = np.asarray(index)
    missing = indices[(indices < -number) | (indices >= number)]
    if lengths and missing.size:
        checks.fail(
            "index",
            f"lie from {-number} to {number - 1}",
            ", ".join(map(str, missing.ravel().tolist())),
        )


@jax.jit
def gathered(arrays: Any, members: Array) -> Any:
    """Return stacked members at some indices, or the member at one."""
    return jax.tree.map(lambda leaf: leaf[members], arrays)


def stack(trees: Sequence[Any], axis: int = 0) -> Any:
    """Stack members along a new axis; NumPy arrays stay NumPy arrays."""
    return _joined("stack", trees, axis)


def concatenate(trees: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate PyTrees of one structure; NumPy arrays stay NumPy arrays."""
    return trees[0] if len(trees) == 1 else _joined("concatenate", trees, axis)


def per_batch(platform: str | None = None) -> int | None:
    """Return the number of members to map at once: 1 on a CPU, which one member keeps busy, else None (all)."""
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
    return local(shared, stacked) if mesh is None else _each_device(local, mesh, shared, stacked)


def _map_locally(
    function: Any,
    member_map: str,
    members_per_batch: int | None,
    ordered: bool,
    shared: Any,
    stacked: Any,
) -> Any:
    arrays, static = eqx.partition(stacked, eqx.is_array)

    def one(own: Any) -> Any:
        return function(shared, eqx.combine(own, static))

    if member_map == "vmap" and (members_per_batch is None or members_per_batch >= count(arrays)):
        return jax.vmap(one)(arrays)
    if member_map != "unroll":
        several = member_map == "vmap" and members_per_batch != 1
        return jax.lax.map(one, arrays, batch_size=members_per_batch if several else None)
    results = []
    for index in range(count(arrays)):
        part = take(arrays, index)
        if ordered and results:
            results[-1], part = after(results[-1], part)
        results.append(one(part))
    return stack(results)


def after(done: Any, then: Any) -> tuple[Any, Any]:
    """Return both arguments; what is computed from the second waits for the first."""
    # Decompositions that XLA runs in parallel in one program on a CPU can wait for each other for
    # ever.
    arrays, static = eqx.partition((done, then), eqx.is_array)
    return eqx.combine(jax.lax.optimization_barrier(arrays), static)


def _joined(how: str, trees: Sequence[Any], axis: int) -> Any:
    if not trees:
        checks.fail("trees", "hold at least one PyTree", "none")

    columns: list[Any] = []
    on_device: dict[int, tuple[Any, ...]] = {}
    try:
        jax.tree.map(lambda *leaves: columns.append(leaves), *trees)
        for number, leaves in enumerate(columns):
            if not hasattr(leaves[0], "shape"):
                columns[number] = leaves[0]
            elif all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves):
                columns[number] = getattr(np, how)(leaves, axis=axis)
            else:
                on_device[number] = _of_one_kind(leaves)
        is_known = on_device and not any(map(checks.is_traced, jax.tree.leaves(on_device)))
        join = _compiled_join if is_known else _joined_arrays
        for number, array in join(how, on_device, axis).items():
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
    dtype = common_dtype([f"trees[{index}]" for index in range(len(leaves))], list(leaves))
    return tuple(to_device(leaf, dtype) for leaf in leaves)


def _joined_arrays(how: str, columns: dict[int, tuple[Array, ...]], axis: int) -> dict[int, Array]:
    return {number: getattr(jnp, how)(arrays, axis=axis) for number, arrays in columns.items()}


_compiled_join = jax.jit(_joined_arrays, static_argnums=(0, 2))


@validated
def member_mesh(devices: Sequence[Any] | None = None, *, data: Size = 1) -> Mesh:
    """Return a mesh with the axis `"members"`, and `"data"` if batches are split over several devices too.

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
    names = (MEMBER_AXIS,) if data == 1 else (MEMBER_AXIS, DATA_AXIS)
    shaped = np.array(chosen).reshape((-1, data)[: len(names)])
    return Mesh(shaped, names, axis_types=(AxisType.Auto,) * len(names))


def member_devices(mesh: Any) -> int:
    """Return the number of devices over which a mesh, or None, splits members."""
    return 1 if mesh is None else mesh.shape[MEMBER_AXIS]


def check_mesh(mesh: Mesh) -> None:
    """Raise unless `mesh` has the axis `"members"`, at most `"data"` beside it, and local devices."""
    if mesh.axis_names not in ((MEMBER_AXIS,), (MEMBER_AXIS, DATA_AXIS)):
        wanted = f"have the axis {MEMBER_AXIS!r}, and {DATA_AXIS!r} at most"
        checks.fail("mesh", wanted, mesh.axis_names, "Make it with dissociation.member_mesh")
    if mesh.is_multi_process:
        checks.fail(
            "mesh",
            "hold devices of this process",
            "devices of several",
            "Pass devices=jax.local_devices()",
        )


def place_members(tree: Any, mesh: Mesh, spec: PartitionSpec | None = None) -> Any:
    """Place array leaves on the mesh, by default split along the leading axis."""
    where = NamedSharding(mesh, PartitionSpec(MEMBER_AXIS) if spec is None else spec)
    return jax.tree.map(
        lambda leaf: jax.device_put(leaf, where) if eqx.is_array(leaf) else leaf, tree
    )


def _each_device(function: Callable[..., Any], mesh: Mesh, shared: Any, stacked: Any) -> Any:
    """Return `function(shared, stacked)`, called on every device with its members."""
    arrays, static = eqx.partition((shared, stacked), eqx.is_array)
    split = PartitionSpec(MEMBER_AXIS)
    options = {
        "in_specs": (PartitionSpec(), split),
        "out_specs": split,
        "axis_names": {MEMBER_AXIS},
    }
    local = lambda *arrays: function(*eqx.combine(arrays, static))  # noqa: E731
    return jax.shard_map(local, mesh=mesh, check_vma=False, **options)(*arrays)
