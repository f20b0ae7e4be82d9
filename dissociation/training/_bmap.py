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
    """Vectorise `fun` as `equinox.filter_vmap` does, in batches of `batch_size` along the mapped axis.

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
    }
    options |= {"batch_size": batch_size, "memory_budget": memory_budget, "loop": loop}
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
    """Function with its mapping options; a PyTree, so that arrays of a wrapped module stay leaves."""

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
        return self if instance is None else eqx.Partial(self, instance)

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
        sequential = self.batch_size == 1 and self.axis_name is None
        if (
            self.batch_size is None
            or self.batch_size > size
            or (self.batch_size == size and not sequential)
        ):
            options = {"axis_name": self.axis_name, "axis_size": self.axis_size}
            return eqx.filter_vmap(self.fun, in_axes=in_axes, out_axes=self.out_axes, **options)(
                *args
            )
        if self.axis_name is not None:
            wanted = f"be at least the {size} members while `axis_name` is given"
            checks.fail("batch_size", wanted, self.batch_size, "Collectives cannot cross batches")
        return self._in_batches(args, axes, size)

    def _unmapped(self, args: tuple[Any, ...]) -> Any:
        """Call the function once; raise if a result is to be stacked."""
        out = self.fun(*args)
        if any(axis is not None for axis in _axis_of_each_leaf("out_axes", self.out_axes, out)):
            advice = "Map one, give `axis_size`, or set `out_axes` to None"
            checks.fail(
                "in_axes",
                "map at least one argument if results are stacked",
                "nothing to map",
                advice,
            )
        return out

    def _in_largest_batches(self, args: tuple[Any, ...], axes: list[int | None], size: int) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def of_size(count: int) -> Callable[[list[Any]], Any]:
            sized = dataclasses.replace(self, batch_size=count)
            return lambda mapped: sized(*structure.unflatten(_filled(leaves, axes, mapped)))

        mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
        return run_largest(of_size, mapped, size, self.memory_budget)

    def _in_batches(self, args: tuple[Any, ...], axes: list[int | None], size: int) -> Any:
        leaves, structure = jax.tree.flatten(args)

        def member(row: tuple[Any, list[Any]]) -> Any:
            """Return one member's mapped leaves, common leaves, output axes and tree structure."""
            out = self.fun(*structure.unflatten(_filled(leaves, axes, row[1])))
            out_axes = _axis_of_each_leaf("out_axes", self.out_axes, out)
            outputs = list(zip(jax.tree.leaves(out), out_axes, strict=True))
            mapped = [None if axis is None else jnp.asarray(leaf) for leaf, axis in outputs]
            common = [leaf if axis is None else None for leaf, axis in outputs]
            return mapped, common, out_axes, jax.tree.structure(out)

        mapped = [jnp.moveaxis(jnp.asarray(leaf), axis, 0)
                  for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]  # fmt: skip
        rows = jnp.arange(size), mapped  # with `axis_size` alone there are no mapped arrays
        # Shapes from `eval_shape` keep weak types; example arrays of the same dtype would lose
        # them.
        example = jax.eval_shape(lambda arrays: jax.tree.map(lambda leaf: leaf[0], arrays), rows)
        one = eqx.filter_closure_convert(member, example)
        _, common, out_axes, out_structure = eqx.filter_eval_shape(one, example)
        own_of = lambda row: one(row)[0]  # noqa: E731
        program = trace(own_of, example)
        operations = program.code.primitives
        known = not any(checks.is_traced(leaf) for leaf in jax.tree.leaves((program, rows)))
        if self._unrolls(operations, known, size):
            starts = range(0, size, self.batch_size)
            parts = [
                _batch(own_of, jax.tree.map(lambda leaf, i=i: leaf[i : i + self.batch_size], rows))
                for i in starts
            ]
            gathered = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts)
        elif known and not program.weak:
            threads = (
                number_of_threads(size, operations, (program, rows)) if self.batch_size == 1 else 1
            )
            gathered = map_shards(_looped_over, (program, self.batch_size), rows, size, threads)
        else:
            gathered = _loop_over((own_of, self.batch_size), rows)
        if any(
            isinstance(leaf, jax.ShapeDtypeStruct) for leaf in common
        ):  # raises if one depends on a mapped argument
            first = jax.tree.map(lambda leaf: leaf[:1], rows)
            common = eqx.filter_vmap(lambda row: one(row)[1], out_axes=None)(first)
        leaves = [
            leaf if axis is None else jnp.moveaxis(rows, 0, axis)
            for leaf, rows, axis in zip(common, gathered, out_axes, strict=True)
        ]
        return out_structure.unflatten(leaves)

    def _unrolls(self, operations: frozenset[str], known: bool, size: int) -> bool:
        if self.loop != "auto":
            return self.loop == "unroll"
        if jax.default_backend() != "cpu" or "conv_general_dilated" not in operations:
            return False
        if not known and size > 1:
            message = (
                "bmap loops over batches with a convolution inside a compiled program on a CPU, "
                "where XLA is slow. "
                "loop='unroll' is faster and takes more memory; loop='scan' keeps the loop "
                "without this warning."
            )
            checks.warn(message, UserWarning)
        return known


def _filled(leaves: list[Any], axes: list[int | None], mapped: list[Any]) -> list[Any]:
    """Return all leaves, with the mapped ones replaced in order."""
    values = iter(mapped)
    return [leaf if axis is None else next(values) for leaf, axis in zip(leaves, axes, strict=True)]


def _loop_over(how: tuple[Callable[..., Any], int], rows: Any) -> Any:
    one, batch_size = how
    # Without batching rules, products and convolutions of single members keep their fast forms.
    return (
        jax.lax.map(one, rows) if batch_size == 1 else jax.lax.map(one, rows, batch_size=batch_size)
    )


_looped_over = eqx.filter_jit(_loop_over)  # equal programs compile once


def _batch(own_of: Callable[..., Any], rows: Any) -> list[Any]:
    if len(rows[0]) == 1:
        return jax.tree.map(
            lambda leaf: leaf[None], own_of(jax.tree.map(lambda leaf: leaf[0], rows))
        )
    return jax.vmap(own_of)(rows)


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
        of_leaf: Any = axis if callable(axis) else lambda _: axis
        axes.extend(of_leaf(leaf) for leaf in jax.tree.leaves(subtree))

    try:
        jax.tree.map(resolve, prefix, tree, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        if str(error).startswith(f"`{name}`"):
            raise
        what = "arguments" if name == "in_axes" else "results"
        raise ValueError(
            f"`{name}` must be a prefix of the tree of {what}, got another structure: {error}"
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
            advice = "Set its axis to None, or use eqx.if_array"
            checks.fail(name, f"be an array, as `in_axes` maps its axis {axis}", repr(leaf), advice)
        if not -leaf.ndim <= axis < leaf.ndim:
            checks.fail(name, f"have the axis {axis} that `in_axes` maps", f"shape {leaf.shape}")
        sizes[name] = leaf.shape[axis]
    if not sizes:
        return None
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size:
            checks.fail(
                name, f"have as many members along its mapped axis as `{first}` ({size})", other
            )
    return size


def _name_of(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """Return the name of an argument's leaf as the caller writes it."""
    index = path[0].idx
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_name = (
        index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
    )
    return (parameters[index].name if by_name else f"args[{index}]") + jax.tree_util.keystr(
        path[1:]
    )
