"""Vectorise a function over members in batches, so that the map fits in memory."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from dissociation._core import checks
from dissociation._core.types import PyTree
from dissociation._core.validation import validated
from dissociation.training._machine import number_of_threads, run_largest
from dissociation.training._partition import map_shards
from dissociation.training._traced import trace

EVERY_ARRAY = eqx.if_array(0)
LOOPS = ("auto", "scan", "unroll")


@validated
def bmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: PyTree = EVERY_ARRAY,
    out_axes: PyTree = EVERY_ARRAY,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    batch_size: int | str | None = None,
    memory_budget: int | None = None,
    loop: str = "auto",
) -> Callable[..., Any]:
    """Vectorise `fun` as `equinox.filter_vmap` does, in batches along the mapped axis.

    Values, structure and dtypes equal those of `equinox.filter_vmap`. Unmapped arguments reach
    `fun` unchanged: a Python number may set a shape. Every call traces `fun`, so put repeated calls
    inside `equinox.filter_jit`. Outside it, equal programs compile the loop over batches once. On a
    CPU after `dissociation.use_all_cores`, single members (`batch_size=1`) without a convolution
    are then mapped in parallel, with the same results up to rounding.

    On a CPU, XLA runs convolutions several times slower in a compiled loop. With a convolution, a
    call on concrete arrays therefore loops in Python, which costs no memory. Inside `jit`, an
    unrolled program is as fast but keeps intermediate results of all batches; a compiled loop warns
    there.

    Args:
        fun: Function of positional arguments. None returns a decorator.
        in_axes: Mapped axis of each array, None if unmapped, or a function from leaf to axis. A
            prefix of the tuple of arguments, or a dict by name, in which missing names mean
            `if_array(0)`.
        out_axes: Mapped axis of the results, as a prefix of the results. Leaves at None are
            returned once and must not depend on a mapped argument.
        axis_name: Name of the mapped axis for collectives, which cannot cross batches: needs a
            single batch.
        axis_size: Number of members; needed only if no argument is mapped.
        batch_size: Members per batch, at least 1; the last batch may be smaller. None: one batch,
            by `equinox.filter_vmap`. 1: members sequentially, without batching. "auto": the largest
            batch that fits `memory_budget`. "auto" compiles ahead of time to measure, so it needs
            concrete arguments outside `jit`, `grad` and `vmap`; it logs the choice at level INFO.
        memory_budget: For "auto": bytes for temporaries and results, beyond the arguments, as the
            compiler counts them; on a CPU it omits the scratch memory of matrix routines. None:
            nine tenths of the device's free memory; on a CPU, half of the machine's, within the
            limits of control groups.
        loop: "scan" (compiled loop), "unroll" (Python loop) or "auto" (as above).

    Returns:
        The vectorised function. It takes no keyword arguments, and works as a method.

    Raises:
        TypeError: If `fun` is not callable or `batch_size` is not an integer.
        ValueError: If an option is out of range; when called, if sizes differ, nothing is mapped,
            an axis does not exist, or collectives would have to cross batches.
        RuntimeError: When called, if keyword arguments are given.

    Example:
        >>> bmap(lambda x, power: x**power, in_axes=(0, None), batch_size=2)(jnp.arange(5.0), 2)
        Array([ 0.,  1.,  4.,  9., 16.], dtype=float32)
    """
    options: dict[str, Any] = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "axis_name": axis_name,
        "axis_size": axis_size,
        "batch_size": batch_size,
        "memory_budget": memory_budget,
        "loop": loop,
    }
    if fun is None:
        return partial(bmap, **options)
    if isinstance(batch_size, str):
        if batch_size != "auto":
            checks.fail("batch_size", "be an integer, None or 'auto'", repr(batch_size))
    elif batch_size is not None:
        options["batch_size"] = checks.check_count("batch_size", batch_size, minimum=1)
    if memory_budget is not None:
        checks.check_count("memory_budget", memory_budget, minimum=1, maximum=None)
        if batch_size != "auto":
            checks.fail(
                "memory_budget", "come with batch_size='auto'", f"batch_size={batch_size!r}"
            )
    checks.check_choice("loop", loop, LOOPS)
    return eqx.module_update_wrapper(_Batched(fun, **options))


class _Batched(eqx.Module):
    """Function with its mapping options, as a PyTree: arrays of a wrapped module stay leaves."""

    fun: Callable[..., Any]
    in_axes: PyTree
    out_axes: PyTree
    axis_name: Hashable
    axis_size: int | None
    batch_size: Any
    memory_budget: Any
    loop: str

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fun

    def __get__(self, instance: Any, owner: Any) -> Any:
        if instance is None:
            return self
        return eqx.Partial(self, instance)

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            names = ", ".join(f"`{name}`" for name in kwargs)
            raise RuntimeError(
                f"{names} must be passed by position, got keyword arguments. bmap does not map "
                "them."
            )
        in_axes = _in_axes_by_position(self.fun, self.in_axes, args)
        axes = _axis_of_each_leaf("in_axes", in_axes, args)
        size = _common_size(self.fun, args, axes, self.axis_size)
        if size is None:
            return self._unmapped(args)
        if self.batch_size == "auto":
            return self._in_largest_batches(args, axes, size)

        # A single member needs no batching either, unless collectives need the mapped axis.
        is_sequential = self.batch_size == 1 and self.axis_name is None
        is_one_batch = self.batch_size is None or self.batch_size > size
        if is_one_batch or (self.batch_size == size and not is_sequential):
            vectorised = eqx.filter_vmap(
                self.fun,
                in_axes=in_axes,
                out_axes=self.out_axes,
                axis_name=self.axis_name,
                axis_size=self.axis_size,
            )
            return vectorised(*args)
        if self.axis_name is not None:
            checks.fail(
                "batch_size",
                f"be at least the {size} members while `axis_name` is given",
                self.batch_size,
                "Collectives cannot cross batches",
            )
        return self._in_batches(args, axes, size)

    def _unmapped(self, args: tuple[Any, ...]) -> Any:
        """Call the function once; raise if a result is to be stacked."""
        out = self.fun(*args)
        if any(axis is not None for axis in _axis_of_each_leaf("out_axes", self.out_axes, out)):
            checks.fail(
                "in_axes",
                "map at least one argument if results are stacked",
                "nothing to map",
                "Map one, give `axis_size`, or set `out_axes` to None",
            )
        return out

    def _in_largest_batches(self, args: tuple[Any, ...], axes: list[int | None], size: int) -> Any:
        """Return the results in the largest batches that fit the memory budget."""
        leaves, structure = jax.tree.flatten(args)

        def of_size(count: int) -> Callable[[list[Any]], Any]:
            sized = dataclasses.replace(self, batch_size=count)
            return lambda mapped: sized(*structure.unflatten(_filled(leaves, axes, mapped)))

        mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
        return run_largest(of_size, mapped, size, self.memory_budget)

    def _in_batches(self, args: tuple[Any, ...], axes: list[int | None], size: int) -> Any:
        """Return the results in batches of `batch_size`."""
        leaves, structure = jax.tree.flatten(args)

        def run_member(row: tuple[Any, list[Any]]) -> Any:
            """Return one member's mapped leaves, common leaves, output axes and tree structure."""
            out = self.fun(*structure.unflatten(_filled(leaves, axes, row[1])))
            out_axes = _axis_of_each_leaf("out_axes", self.out_axes, out)
            mapped = []
            common = []
            for leaf, axis in zip(jax.tree.leaves(out), out_axes, strict=True):
                if axis is None:
                    mapped.append(None)
                    common.append(leaf)
                else:
                    mapped.append(jnp.asarray(leaf))
                    common.append(None)
            return mapped, common, out_axes, jax.tree.structure(out)

        mapped = []
        for leaf, axis in zip(leaves, axes, strict=True):
            if axis is not None:
                mapped.append(jnp.moveaxis(jnp.asarray(leaf), axis, 0))
        rows = (jnp.arange(size), mapped)  # with `axis_size` alone there are no mapped arrays

        # Shapes from `eval_shape` keep weak types; example arrays of the same dtype would lose
        # them.
        example = jax.eval_shape(_first, rows)
        converted = eqx.filter_closure_convert(run_member, example)
        _, common, out_axes, out_structure = eqx.filter_eval_shape(converted, example)
        columns = self._mapped_over(lambda row: converted(row)[0], rows, example, size)

        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in common):
            first_row = jax.tree.map(lambda leaf: leaf[:1], rows)
            # This raises if a leaf depends on a mapped argument.
            common = eqx.filter_vmap(lambda row: converted(row)[1], out_axes=None)(first_row)
        out_leaves = []
        for leaf, column, axis in zip(common, columns, out_axes, strict=True):
            if axis is not None:
                leaf = jnp.moveaxis(column, 0, axis)
            out_leaves.append(leaf)
        return out_structure.unflatten(out_leaves)

    def _mapped_over(self, function: Callable[..., Any], rows: Any, example: Any, size: int) -> Any:
        """Return the stacked results of a function of one row for all rows."""
        program = trace(function, example)
        operations = program.code.primitives
        leaves = jax.tree.leaves((program, rows))
        is_known = not any(map(checks.is_traced, leaves))
        if self._unrolls(operations, is_known, size):
            batches = []
            for start in range(0, size, self.batch_size):
                span = slice(start, start + self.batch_size)
                batch = jax.tree.map(lambda leaf, span=span: leaf[span], rows)
                batches.append(_batch(function, batch))
            return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *batches)

        if is_known and not program.weak:
            threads = 1
            if self.batch_size == 1:
                threads = number_of_threads(size, operations, (program, rows))
            return map_shards(_looped_over, (program, self.batch_size), rows, size, threads)
        return _loop_over((function, self.batch_size), rows)

    def _unrolls(self, operations: frozenset[str], is_known: bool, size: int) -> bool:
        """Return True if a Python loop runs the batches; warn if it should but cannot."""
        if self.loop != "auto":
            return self.loop == "unroll"
        if jax.default_backend() != "cpu" or "conv_general_dilated" not in operations:
            return False
        if not is_known and size > 1:
            message = (
                "bmap loops over batches with a convolution inside a compiled program on a CPU, "
                "where XLA is slow. "
                "loop='unroll' is faster and takes more memory; loop='scan' keeps the loop "
                "without this warning."
            )
            checks.warn(message, UserWarning)
        return is_known


def _filled(leaves: list[Any], axes: list[int | None], mapped: list[Any]) -> list[Any]:
    """Return all leaves, with the mapped ones replaced in order."""
    new = iter(mapped)
    return [leaf if axis is None else next(new) for leaf, axis in zip(leaves, axes, strict=True)]


def _first(rows: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf[0], rows)


def _loop_over(shared: tuple[Callable[..., Any], int], rows: Any) -> Any:
    """Map a function over rows in a compiled loop; `shared` holds function and batch size."""
    function, batch_size = shared
    if batch_size == 1:
        # Without batching rules, products and convolutions of single members keep their fast forms.
        return jax.lax.map(function, rows)
    return jax.lax.map(function, rows, batch_size=batch_size)


_looped_over = eqx.filter_jit(_loop_over)  # equal programs compile once


def _batch(function: Callable[..., Any], rows: Any) -> list[Any]:
    """Return the stacked results of `function` for the rows of one batch."""
    if len(rows[0]) == 1:
        return jax.tree.map(lambda leaf: leaf[None], function(_first(rows)))
    return jax.vmap(function)(rows)


def _in_axes_by_position(fun: Callable[..., Any], in_axes: PyTree, args: tuple[Any, ...]) -> PyTree:
    """Return `in_axes` by name as a tuple; missing names get `if_array(0)`."""
    if not isinstance(in_axes, dict):
        return in_axes
    names = list(inspect.signature(fun).parameters)[: len(args)]
    unknown = [name for name in in_axes if name not in names]
    if unknown:
        checks.fail(
            "in_axes",
            f"name arguments that are passed ({', '.join(names)})",
            ", ".join(map(repr, unknown)),
        )
    return tuple(in_axes.get(name, EVERY_ARRAY) for name in names)


def _axis_of_each_leaf(name: str, prefix: PyTree, tree: Any) -> list[int | None]:
    """Return the axis of every leaf of `tree` from a prefix."""
    axes: list[int | None] = []

    def resolve(axis: Any, subtree: Any) -> None:
        if not (axis is None or isinstance(axis, int) or callable(axis)):
            checks.fail(
                name, "consist of None, integers and functions from leaf to axis", repr(axis)
            )
        for leaf in jax.tree.leaves(subtree):
            leaf_axis: Any = axis
            if callable(axis):
                leaf_axis = axis(leaf)
            axes.append(leaf_axis)

    try:
        jax.tree.map(resolve, prefix, tree, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        if str(error).startswith(f"`{name}`"):
            raise
        values = "arguments" if name == "in_axes" else "results"
        raise ValueError(
            f"`{name}` must be a prefix of the tree of {values}, got another structure: {error}"
        ) from error
    return axes


def _common_size(
    fun: Callable[..., Any], args: tuple[Any, ...], axes: list[int | None], axis_size: int | None
) -> int | None:
    """Return the number of members; None if nothing is mapped."""
    sizes: dict[str, int] = {} if axis_size is None else {"axis_size": axis_size}
    for (path, leaf), axis in zip(jax.tree_util.tree_leaves_with_path(args), axes, strict=True):
        if axis is None:
            continue
        name = _name_of(fun, path)
        if not eqx.is_array(leaf):
            checks.fail(
                name,
                f"be an array, as `in_axes` maps its axis {axis}",
                repr(leaf),
                "Set its axis to None, or use eqx.if_array",
            )
        if not -leaf.ndim <= axis < leaf.ndim:
            checks.fail(name, f"have the axis {axis} that `in_axes` maps", f"shape {leaf.shape}")
        sizes[name] = leaf.shape[axis]
    if not sizes:
        return None
    first_name, size = next(iter(sizes.items()))
    for name, length in sizes.items():
        if length != size:
            checks.fail(
                name,
                f"have as many members along its mapped axis as `{first_name}` ({size})",
                length,
            )
    return size


def _name_of(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """Return the name of an argument's leaf as the caller writes it."""
    index = path[0].idx
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    name = f"args[{index}]"
    if index < len(parameters):
        parameter = parameters[index]
        if parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
            name = parameter.name
    return name + jax.tree_util.keystr(path[1:])
