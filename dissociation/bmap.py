"""Vectorising a function over members in batches, so that a map over many of them fits in memory.

`bmap` is `equinox.filter_vmap` with one more argument, `batch_size`. The mapped axis is cut into batches; a loop goes
over the full ones and one more call takes what is left.
"""

import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from dissociation import checks, memory
from dissociation.validation import validated

logger = logging.getLogger(__name__)

EVERY_ARRAY = eqx.if_array(0)
LOOPS = ("auto", "scan", "unroll")
CORRECTIONS = 6


@validated
def bmap(
    fun: Callable[..., Any] | None = None,
    *,
    in_axes: PyTree = EVERY_ARRAY,
    out_axes: PyTree = EVERY_ARRAY,
    axis_name: Hashable = None,
    axis_size: int | None = None,
    batch_size: int | np.integer | str | None = None,
    memory_budget: int | np.integer | None = None,
    loop: str = "auto",
) -> Callable[..., Any]:
    """Vectorises `fun` as `equinox.filter_vmap` does, in batches of `batch_size` along the mapped axis.

    Values, structure and dtypes are those of `equinox.filter_vmap`. Nothing is jitted or cached (but see "auto"), so a
    call that is repeated belongs inside `equinox.filter_jit`. What is not mapped reaches `fun` as it came: a Python
    number stays one and may set a shape.

    The loop over batches is traced, as by `jax.jit`; batches of one member call `fun` without batching. On a CPU, XLA
    runs convolutions in a compiled loop several times slower than outside of one (two layers of 16 channels, 8 batches
    of 64 images of 28 x 28, two busy cores: 1.7 s against 0.3 s). Where `fun` holds one, a call on concrete arrays
    therefore loops in Python instead, which costs no memory. Inside `jit` an unrolled program is as fast, but keeps
    intermediate results of all batches (that example: 32 MB against 10 MB): the choice is yours, and a warning says so
    where the loop stays compiled.

    Args:
        fun: A function of positional arguments. None returns a decorator.
        in_axes: The axis of each array in the arguments that is mapped; None: not mapped; or a function from leaf to
            axis. A prefix of the tuple of arguments, or a dict by name, whose missing names mean `if_array(0)`.
        out_axes: Where the mapped axis stands in the results, a prefix of what `fun` returns. Leaves at None are
            returned once and must not depend on a mapped argument.
        axis_name: The mapped axis' name for collectives, which cannot cross batches: needs a single batch.
        axis_size: The number of members; needed only if no argument is mapped.
        batch_size: Members per batch, at least 1; the last batch may be smaller. None: a single batch, which is
            `equinox.filter_vmap` itself. "auto": the largest batch that fits `memory_budget` by the account of
            `memory.program_bytes`; the call is compiled ahead of time for that, and the program that was measured is
            run. Works on concrete arguments only, outside `jit`, `grad` and `vmap`. The choice is logged at level INFO.
        memory_budget: For "auto": bytes for temporaries and results, beyond the arguments; on a CPU the scratch of
            matrix routines counts. None: nine tenths of what the device has free; on a CPU, half of what the process
            can still take (the machine's free memory, limits of control groups, `ulimit`).
        loop: "scan" (compiled loop), "unroll" (Python loop) or "auto" (as above).

    Returns:
        The vectorised function. It takes no keyword arguments, and works as a method.

    Raises:
        TypeError: If `fun` is not callable or `batch_size` is no integer.
        ValueError: If an option is out of range; when called, if sizes differ, nothing is mapped, an axis does not
            exist, or collectives would have to cross batches.
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
        return functools.partial(bmap, **options)
    if not callable(fun):
        raise TypeError(f"`fun` must be callable, got {fun!r}.")
    if isinstance(batch_size, str):
        if batch_size != "auto":
            checks.fail("batch_size", "be an integer, None or 'auto'", repr(batch_size))
    elif batch_size is not None:
        options["batch_size"] = checks.check_count("batch_size", batch_size, minimum=1)
    if memory_budget is not None:
        checks.check_count("memory_budget", memory_budget, minimum=1)
        if batch_size != "auto":
            checks.fail("memory_budget", "come with batch_size='auto'", f"batch_size={batch_size!r}")
    checks.check_choice("loop", loop, LOOPS)
    return eqx.module_update_wrapper(_Batched(fun, **options))


class _Batched(eqx.Module):
    """A function together with how it is mapped; a PyTree, so that a wrapped module's arrays stay leaves."""

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
            raise RuntimeError(f"{names} must be passed by position, got keyword arguments, which bmap does not map.")
        in_axes = _in_axes_by_position(self.fun, self.in_axes, args)
        leaves, structure = jax.tree.flatten(args)
        axes = _axis_of_each_leaf("in_axes", in_axes, args)
        size = _common_size(self.fun, args, axes, self.axis_size)
        if size is None:
            return self._unmapped(args)
        if self.batch_size is None or (self.batch_size != "auto" and self.batch_size >= size):
            options = {"axis_name": self.axis_name, "axis_size": self.axis_size}
            return eqx.filter_vmap(self.fun, in_axes=in_axes, out_axes=self.out_axes, **options)(*args)

        def member(mapped: list[Any]) -> Any:
            values = iter(mapped)
            full = [leaf if axis is None else next(values) for leaf, axis in zip(leaves, axes, strict=True)]
            return self.fun(*structure.unflatten(full))

        mapped_axes = [axis for axis in axes if axis is not None]
        mapped = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
        plan = _Plan(member, mapped_axes, self.out_axes, self.axis_name, size, self.loop)
        if self.batch_size == "auto":
            if any(checks.is_traced(leaf) for leaf in jax.tree.leaves((self.fun, leaves))):
                _refuse_auto()
            stacked, shared = _run_largest_batch(plan, mapped, self.memory_budget)
        else:
            stacked, shared = plan.run(mapped, self.batch_size)
        return plan.assemble(stacked, shared)

    def _unmapped(self, args: tuple[Any, ...]) -> Any:
        """One plain call: allowed while no result is to be stacked."""
        out = self.fun(*args)
        if any(axis is not None for axis in _axis_of_each_leaf("out_axes", self.out_axes, out)):
            advice = "Map one, give `axis_size`, or set `out_axes` to None"
            checks.fail("in_axes", "map at least one argument where results are stacked", "nothing to map", advice)
        return out


class _Plan:
    """One call: arrays in, arrays out, and the layout of the result, which is known once `fun` was traced."""

    def __init__(
        self,
        member: Callable[[list[Any]], Any],
        in_axes: list[int],
        out_axes: PyTree,
        axis_name: Hashable,
        size: int,
        loop: str,
    ):
        self.member, self.in_axes, self.out_axes = member, in_axes, out_axes
        self.axis_name, self.size, self.loop = axis_name, size, loop
        self.layout: tuple[Any, list[int | None], list[Any]] | None = None

    def one(self, mapped: list[Any]) -> tuple[list[Any], list[Any]]:
        """One member's result as (leaves to stack, array leaves that all members share)."""
        out = self.member(mapped)
        leaves, structure = jax.tree.flatten(out)
        axes = _axis_of_each_leaf("out_axes", self.out_axes, out)
        stacked = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
        shared = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is None and eqx.is_array(leaf)]
        # None marks an array; what is left (functions, strings, numbers) is the same for every member.
        static = [None if axis is not None or eqx.is_array(leaf) else leaf
                  for leaf, axis in zip(leaves, axes, strict=True)]  # fmt: skip
        self.layout = structure, axes, static
        return stacked, shared

    def batch(self, mapped: list[Any], count: int) -> tuple[list[Any], list[Any]]:
        """`count` members at once, arrays with members first."""
        vmapped = jax.vmap(self.one, out_axes=(0, None), axis_name=self.axis_name, axis_size=count)
        if count > 1 or self.axis_name is not None:
            return vmapped(mapped)
        # A member alone needs no batching rules: products and convolutions keep their fast forms.
        stacked, shared = self.one([leaf[0] for leaf in mapped])
        if shared:
            jax.eval_shape(vmapped, mapped)  # raises if they depend on a mapped argument
        return [jnp.asarray(leaf)[None] for leaf in stacked], shared

    def run(self, mapped: list[Any], batch_size: int) -> tuple[list[Any], list[Any]]:
        """All members, `batch_size` at a time: (stacked leaves with members first, shared arrays)."""
        mapped = [jnp.moveaxis(jnp.asarray(leaf), axis, 0) for leaf, axis in zip(mapped, self.in_axes, strict=True)]
        batch_size = min(batch_size, self.size)
        batches, rest = divmod(self.size, batch_size)
        if self.axis_name is not None and batches + (rest > 0) > 1:
            wanted = f"be at least the {self.size} members while `axis_name` is given"
            checks.fail("batch_size", wanted, batch_size, "Collectives cannot cross batches")
        if batches == 1:
            parts = [self.batch([leaf[:batch_size] for leaf in mapped] if rest else mapped, batch_size)]
        else:
            parts = self._loop([leaf[: batches * batch_size] for leaf in mapped], batches, batch_size)
        if rest:
            parts.append(self.batch([leaf[-rest:] for leaf in mapped], rest))
        stacked = [leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves)
                   for leaves in zip(*(part[0] for part in parts), strict=True)]  # fmt: skip
        shared = parts[-1][1]
        if shared is None:
            # Shared arrays are the same in every batch: one member outside the loop yields them without a stack.
            shared = self.batch([leaf[:1] for leaf in mapped], 1)[1] if self._shares() else []
        return stacked, shared

    def _loop(self, mapped: list[Any], batches: int, batch_size: int) -> list[tuple[list[Any], list[Any] | None]]:
        """The full batches, in parts still to be concatenated; None where the shared arrays are not known."""
        cut = [leaf.reshape(batches, batch_size, *leaf.shape[1:]) for leaf in mapped]
        # A structure keeps weak types, which example arrays of the same dtype would lose.
        example = jax.eval_shape(lambda arrays: [leaf[0] for leaf in arrays], cut)
        traced = eqx.filter_closure_convert(lambda arrays: self.batch(arrays, batch_size), example)
        if self._unrolls(traced, example, mapped):
            return [traced([leaf[i] for leaf in cut]) for i in range(batches)]
        _, stacked = jax.lax.scan(lambda _, arrays: (None, traced(arrays)[0]), None, cut, length=batches)
        return [([leaf.reshape(batches * batch_size, *leaf.shape[2:]) for leaf in stacked], None)]

    def _unrolls(self, traced: Callable[..., Any], example: list[Any], mapped: list[Any]) -> bool:
        if self.loop != "auto":
            return self.loop == "unroll"
        if jax.default_backend() != "cpu" or not _has_convolution(jax.make_jaxpr(traced)(example)):
            return False
        if any(checks.is_traced(leaf) for leaf in jax.tree.leaves((traced, mapped))):
            message = (
                "bmap loops over batches with a convolution inside a compiled program on a CPU, where XLA is slow. "
                "loop='unroll' is faster and takes more memory; loop='scan' keeps the loop and silences this."
            )
            warnings.warn(message, stacklevel=2)
            return False
        return True

    def assemble(self, stacked: list[Any], shared: list[Any]) -> Any:
        """The result as `fun` laid it out, members at `out_axes`."""
        structure, axes, static = self._layout()
        stacked_leaves, shared_leaves = iter(stacked), iter(shared)
        leaves = []
        for axis, leaf in zip(axes, static, strict=True):
            if axis is not None:
                leaves.append(jnp.moveaxis(next(stacked_leaves), 0, axis))
            else:
                leaves.append(next(shared_leaves) if leaf is None else leaf)
        return structure.unflatten(leaves)

    def _shares(self) -> bool:
        _, axes, static = self._layout()
        return any(axis is None and leaf is None for axis, leaf in zip(axes, static, strict=True))

    def _layout(self) -> tuple[Any, list[int | None], list[Any]]:
        if self.layout is None:
            raise RuntimeError("the mapped function has not been traced")
        return self.layout


def _run_largest_batch(plan: _Plan, mapped: list[Any], budget: int | None) -> tuple[list[Any], list[Any]]:
    """Runs `plan` in the largest batches whose compiled program stays within `budget` bytes."""
    mapped = [jnp.asarray(leaf) for leaf in mapped]
    budget = memory.free_memory(mapped) if budget is None else budget

    @functools.cache
    def program(batch_size: int) -> tuple[Callable[[], Any], int]:
        return _compiled(lambda arrays: plan.run(arrays, batch_size), mapped)

    chosen = _largest_batch(lambda batch_size: program(batch_size)[1], plan.size, budget)
    run, needed = program(chosen)
    logger.info("batches of %d of %d members: %d bytes of %d", chosen, plan.size, needed, budget)
    return run()


def _compiled(function: Callable[[list[Any]], Any], arrays: list[Any]) -> tuple[Callable[[], Any], int]:
    """`function(arrays)` ready to run, and the bytes that it takes for temporaries and results."""
    closed = eqx.filter_closure_convert(function, arrays)
    # Arrays that `function` closes over become inputs of the program: as constants, they would be folded and copied.
    captured, static = eqx.partition(closed, eqx.is_array)
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves(captured)):
        _refuse_auto()
    program = jax.jit(lambda captured, arrays: eqx.combine(captured, static)(arrays))
    executable = program.lower(captured, arrays).compile()
    needed = memory.program_bytes(executable)
    if needed is None:
        advice = "This backend gives no memory analysis"
        checks.fail("batch_size", "be a number here", "'auto'", advice)
    return (lambda: executable(captured, arrays)), needed


def _largest_batch(bytes_of: Callable[[int], int], size: int, budget: int) -> int:
    """The largest batch of at most `size` members whose program needs at most `budget` bytes, in few calls.

    A single batch is tried first. If it is too large, batches of 2 and 4 give the slope (memory is linear in the batch
    from 2 on, not from 1), and the line gives a guess, which is tried and corrected. The answer is the largest where
    the line holds, and fits in any case.
    """
    if bytes_of(size) <= budget:
        return size
    fits = next((batch for batch in (4, 2, 1) if batch < size and bytes_of(batch) <= budget), 0)
    if fits == 0:
        checks.fail("memory_budget", f"be at least {bytes_of(1)} bytes (one member at a time, all results)", budget)
    if fits < 4:
        return 3 if fits == 2 and size > 3 and bytes_of(3) <= budget else fits
    too_large, slope = size, (bytes_of(4) - bytes_of(2)) / 2
    for _ in range(CORRECTIONS):
        room = int((budget - bytes_of(fits)) / max(slope, 1.0))
        guess = min(fits + room, too_large - 1)
        if guess <= fits:
            break
        slope = (bytes_of(guess) - bytes_of(fits)) / (guess - fits)
        if bytes_of(guess) <= budget:
            fits = guess
        else:
            too_large = guess
    return fits


def _refuse_auto() -> NoReturn:
    raise ValueError(
        "`batch_size` must be a number or None inside jit, grad, vmap and other transformations, got 'auto'. The "
        "program that runs is not known there; choose with 'auto' outside, on concrete arrays."
    )


def _has_convolution(jaxpr: Any) -> bool:
    """Whether a program, or one inside of it, convolves."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "conv_general_dilated":
            return True
        inner = (value for entry in equation.params.values() for value in (entry if _is_list(entry) else (entry,)))
        if any(_has_convolution(value) for value in inner if hasattr(value, "eqns")):
            return True
    return False


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def _in_axes_by_position(fun: Callable[..., Any], in_axes: PyTree, args: tuple[Any, ...]) -> PyTree:
    """`in_axes` given by name, as a tuple for the arguments that came; unnamed ones get `if_array(0)`."""
    if not isinstance(in_axes, dict):
        return in_axes
    names = list(inspect.signature(fun).parameters)[: len(args)]
    unknown = [name for name in in_axes if name not in names]
    if unknown:
        checks.fail("in_axes", f"name arguments that are passed ({', '.join(names)})", ", ".join(map(repr, unknown)))
    return tuple(in_axes.get(name, EVERY_ARRAY) for name in names)


def _axis_of_each_leaf(name: str, prefix: PyTree, tree: Any) -> list[int | None]:
    """The axis of every leaf of `tree`, in order, from a prefix of it."""
    axes: list[int | None] = []

    def resolve(axis: Any, subtree: Any) -> None:
        if not (axis is None or isinstance(axis, int) or callable(axis)):
            checks.fail(name, "consist of None, integers and functions from leaf to axis", repr(axis))
        of_leaf: Any = axis if callable(axis) else lambda _: axis
        axes.extend(of_leaf(leaf) for leaf in jax.tree.leaves(subtree))

    try:
        jax.tree.map(resolve, prefix, tree, is_leaf=lambda axis: axis is None)
    except ValueError as error:
        if str(error).startswith(f"`{name}`"):
            raise
        what = "arguments" if name == "in_axes" else "results"
        raise ValueError(f"`{name}` must be a prefix of the tree of {what}, got another structure: {error}") from error
    return axes


def _common_size(
    fun: Callable[..., Any], args: tuple[Any, ...], axes: list[int | None], axis_size: int | None
) -> int | None:
    """The number of members, from `axis_size` and every mapped array; None if nothing is mapped."""
    sizes: dict[str, int] = {} if axis_size is None else {"axis_size": axis_size}
    paths = jax.tree_util.tree_leaves_with_path(args)
    for (path, leaf), axis in zip(paths, axes, strict=True):
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
            checks.fail(name, f"have as many members along its mapped axis as `{first}` ({size})", other)
    return size


def _name_of(fun: Callable[..., Any], path: tuple[Any, ...]) -> str:
    """How the caller would write the leaf of the arguments at `path`."""
    index = path[0].idx
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    by_name = index < len(parameters) and parameters[index].kind is not inspect.Parameter.VAR_POSITIONAL
    return (parameters[index].name if by_name else f"args[{index}]") + jax.tree_util.keystr(path[1:])
