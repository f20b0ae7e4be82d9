"""Stacked members: taking, stacking and mapping over them.

Arrays carry members first; other leaves (functions, numbers, text) belong to all members.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dissociation._core import checks
from dissociation._core.conversion import check_fits, common_dtype, number_kind
from dissociation._core.validation import validated
from dissociation.training import _sharding as sharding
from dissociation.training._bmap import bmap

MEMBER_MAPS = ("vmap", "scan", "unroll")


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
    number = count(models)
    if not -number <= index < number:
        checks.fail("index", f"lie from {-number} to {number - 1}", index)
    return take(models, index)


def count(models: Any) -> int:
    """Return the number of stacked members."""
    if hasattr(models, "history"):
        checks.fail_kind("models", "be stacked models, as in `result.models`", f"a {type(models).__name__}")
    counts = {leaf.shape[:1] for leaf in jax.tree.leaves(models) if hasattr(leaf, "shape")}
    if len(counts) != 1 or counts == {()}:
        checks.fail("models", "hold arrays that agree in a leading axis", f"leading axes {sorted(counts)}")
    ((number,),) = counts
    return number


def take(models: Any, index: Any) -> Any:
    """Return stacked members at an index, a slice or an array of indices, unchecked; other leaves unchanged.

    Example:
        >>> take({"weight": jnp.arange(6.0).reshape(3, 2)}, jnp.array([2, 0]))["weight"].tolist()
        [[4.0, 5.0], [0.0, 1.0]]
    """
    index = np.asarray(index) if isinstance(index, list) else index
    return jax.tree.map(lambda leaf: leaf[index] if hasattr(leaf, "shape") else leaf, models)


def stack(trees: Sequence[Any], axis: int = 0) -> Any:
    """Stack members along a new axis; NumPy arrays stay NumPy arrays."""
    return _joined("stack", trees, axis)


def concatenate(trees: Sequence[Any], axis: int = 0) -> Any:
    """Concatenate PyTrees of one structure; NumPy arrays stay NumPy arrays."""
    return trees[0] if len(trees) == 1 else _joined("concatenate", trees, axis)


def per_batch(platform: str | None = None) -> int | None:
    """Return the number of members to map at once: 1 on a CPU, which one member keeps busy, else None (all).

    Args:
        platform: Platform of the devices; None: JAX's default.

    Example:
        >>> per_batch("cpu"), per_batch("gpu")
        (1, None)
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
        member_map: "vmap" (batched), "scan" (sequentially, a compiled loop) or "unroll" (sequentially, no loop).
        members_per_batch: With "vmap", number of members batched at once; None: all.
        mesh: Devices over which members are split, equally many on each.
        ordered: With "unroll", if True, compute members in order: simultaneous decompositions can hang on a CPU.

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
    return local(shared, stacked) if mesh is None else sharding.each_device(local, mesh, shared, stacked)


def _map_locally(
    function: Any, member_map: str, members_per_batch: int | None, ordered: bool, shared: Any, stacked: Any
) -> Any:
    if member_map == "vmap":
        return bmap(function, in_axes=(None, eqx.if_array(0)), batch_size=members_per_batch)(shared, stacked)
    arrays, static = eqx.partition(stacked, eqx.is_array)
    if member_map == "scan":
        return jax.lax.map(lambda member: function(shared, eqx.combine(member, static)), arrays)
    results = []
    for index in range(jax.tree.leaves(arrays)[0].shape[0]):
        part = take(arrays, index)
        if ordered and results:
            results[-1], part = after(results[-1], part)
        results.append(function(shared, eqx.combine(part, static)))
    return stack(results)


def after(done: Any, then: Any) -> tuple[Any, Any]:
    """Return both arguments; what is computed from the second waits for the first."""
    # Decompositions that XLA runs in parallel in one program on a CPU can wait for each other for ever.
    arrays, static = eqx.partition((done, then), eqx.is_array)
    return eqx.combine(jax.lax.optimization_barrier(arrays), static)


def _joined(how: str, trees: Sequence[Any], axis: int) -> Any:
    if not trees:
        checks.fail("trees", "hold at least one PyTree", "none")

    def join(*leaves: Any) -> Any:
        if not hasattr(leaves[0], "shape"):
            return leaves[0]
        library = np if all(isinstance(leaf, np.ndarray | np.generic) for leaf in leaves) else jnp
        if library is jnp and len(kinds := {leaf.dtype for leaf in leaves}) > 1 and "int" in map(number_kind, kinds):
            dtype = common_dtype([f"trees[{index}]" for index in range(len(leaves))], list(leaves))
            leaves = tuple(jnp.asarray(leaf, dtype) for leaf in leaves)
        return getattr(library, how)(leaves, axis=axis)

    try:
        return jax.tree.map(join, *trees)
    except checks.WrongValue:
        raise
    except ValueError as error:
        shapes = [str(jax.tree.map(lambda leaf: getattr(leaf, "shape", None), tree)) for tree in trees]
        other = next((shape for shape in shapes if shape != shapes[0]), shapes[-1])
        raise ValueError(f"`trees` must be alike, got arrays of {shapes[0][:200]} and {other[:200]}.") from error
