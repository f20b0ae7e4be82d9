"""Samplers of training batches, for a compiled loop and for the host.

Steps are cut into blocks (`segment`); `plan` draws once per block, and `batch` returns a step's
batch. Key and step number determine all batches, however steps are chunked, mapped or resumed.
"""

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import (
    as_array,
    check_fits,
    describe,
    number_kind,
    to_device,
    warn_narrowed,
)
from dissociation._core.keys import typed
from dissociation._core.types import PRNGKey, PyTree, Size
from dissociation._core.validation import validated

MAX_BLOCK = 512
"""Largest number of steps in a block of several epochs."""

MAX_ORDER = 65_536
"""Largest number of samples in an order of several epochs."""

UNENDING = 2**62


class Segment(NamedTuple):
    """Place of a step.

    Attributes:
        size: Samples in the batch, if that may differ between steps; each size compiles a program.
        block: Block whose plan the step needs.
        within: Place in the block.
        end: Step up to which size and block hold.
    """

    size: int | None
    block: int
    within: int
    end: int


class Sampler(eqx.Module):
    """Base of samplers.

    Subclasses define `segment`, `plan` and `batch`.

    Attributes:
        shared: True if all members of a sweep draw with one key, False if each draws with its own.
        stacked: True if arrays carry members first: each member has its own data.
        epoch_steps: Steps in a pass over the data; 1 if there are no passes.
    """

    shared: eqx.AbstractVar[bool]
    stacked: eqx.AbstractVar[bool]
    epoch_steps: eqx.AbstractVar[int]

    def segment(self, step: int) -> Segment:
        """Return the place of `step`, on the host."""
        return Segment(None, 0, step, UNENDING)

    def plan(self, key: PRNGKey, block: Any) -> PyTree:
        """Return the draw for a block (its number may be traced); None if nothing is drawn."""
        return None

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        """Return the batch at index `within` of a block."""
        raise NotImplementedError


class _Known(Sampler):
    """Base of the samplers here; `ndims` holds the number of axes of every array as passed."""

    shared: bool = eqx.field(static=True)
    stacked: bool = eqx.field(static=True)
    epoch_steps: int = eqx.field(static=True)
    ndims: tuple[int, ...] = eqx.field(static=True)


class FullBatch(_Known):
    """Sampler of all samples in every step, in the given order.

    Args:
        data: PyTree of finite arrays, samples first; with `stacked`, members and then samples.
        stacked: True if every member has its own data.
    """

    data: PyTree

    @validated
    def __init__(self, data: Any, *, stacked: bool = False):
        self.data = as_data(data, stacked)
        self.stacked = stacked
        self.shared = True
        self.epoch_steps = 1
        self.ndims = ndims_of(self.data)

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        return self.data


class Epochs(_Known):
    """Sampler of passes over arrays in batches, in a new random order every time.

    Args:
        data: PyTree of finite arrays, samples first; with `stacked`, members and then samples.
        batch_size: Samples in a batch; the last one of a pass is smaller if it does not divide
            their number.
        shared: True if all members get the same batches in the same order.
        shuffle: True for a random order, False for the given one.
        drop_remainder: True to leave out a last, smaller batch.
        stacked: True if every member has its own data.

    Raises:
        ValueError: If there are fewer samples than `batch_size`.
    """

    data: PyTree
    batch_size: int = eqx.field(static=True)
    shuffle: bool = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)

    @validated
    def __init__(
        self,
        data: Any,
        batch_size: int,
        *,
        shared: bool = True,
        shuffle: bool = True,
        drop_remainder: bool = False,
        stacked: bool = False,
    ):
        self.data = as_data(data, stacked)
        self.batch_size = batch_size
        self.shared = shared
        self.shuffle = shuffle
        self.stacked = stacked
        self.ndims = ndims_of(self.data)
        self.num_samples = jax.tree.leaves(self.data)[0].shape[int(stacked)]
        self.epoch_steps = steps_per_epoch(
            self.num_samples, batch_size, drop_remainder=drop_remainder
        )

    @property
    def span(self) -> int:
        """Return the number of epochs in a block: several if short and without a smaller batch."""
        if self.epoch_steps != self.num_samples // self.batch_size:
            return 1
        return max(1, min(MAX_BLOCK // self.epoch_steps, MAX_ORDER // self.num_samples))

    def segment(self, step: int) -> Segment:
        """Return the place of `step`; a block is one epoch, or several short ones."""
        block, within = divmod(step, self.span * self.epoch_steps)
        num_full, remainder = divmod(self.num_samples, self.batch_size)
        num_full *= self.span
        if within < num_full:
            return Segment(self.batch_size, block, within, step - within + num_full)
        return Segment(remainder, block, within, step + 1)

    def plan(self, key: PRNGKey, block: Any) -> Array | None:
        """Return the order of the block's samples that are in a batch."""
        if not self.shuffle:
            return None

        epochs = block * self.span + jnp.arange(self.span)
        epoch_keys = jax.vmap(jax.random.fold_in, (None, 0))(typed(key), epochs)
        orders = jax.vmap(partial(jax.random.permutation, x=self.num_samples))(epoch_keys)
        return orders[:, : self.epoch_steps * self.batch_size].reshape(-1)

    def batch(self, plan: Array | None, within: Any, size: int | None) -> PyTree:
        if size is None:
            size = self.batch_size
        if plan is None:
            start = within % self.epoch_steps * self.batch_size
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, size), self.data
            )
        indices = jax.lax.dynamic_slice_in_dim(plan, within * self.batch_size, size)
        return jax.tree.map(lambda leaf: leaf.at[indices].get(mode="promise_in_bounds"), self.data)


class Online(_Known):
    """Sampler that draws a new batch in every step.

    Args:
        draw: `draw(key) -> batch`, or `draw(source, key)` if there is a `source`.
        source: PyTree of arrays for `draw`, such as a teacher; with `stacked`, members first.
        shared: True if all members get the same draws.
        stacked: True if every member has its own source, which is then required.
    """

    draw: Callable[..., Any]
    source: PyTree

    @validated
    def __init__(
        self,
        draw: Callable[..., Any],
        source: Any = None,
        *,
        shared: bool = False,
        stacked: bool = False,
    ):
        if stacked and source is None:
            checks.fail("source", "be given if every member has its own (`stacked=True`)", None)
        self.draw = draw
        self.source = source
        self.shared = shared
        self.stacked = stacked
        self.epoch_steps = 1
        self.ndims = ndims_of((draw, source))

    def plan(self, key: PRNGKey, block: Any) -> PyTree:
        return key

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        key = jax.random.fold_in(plan, within)
        if self.source is None:
            return self.draw(key)
        return self.draw(self.source, key)


class HostBatches(_Known):
    """Sampler of batches from a Python iterator, such as data larger than memory.

    For `fit` alone, because a compiled loop does not call the host. A thread makes batches ahead
    and copies them, so an iterator may reuse one buffer.

    Args:
        start: `start(step)` returns an iterator (of PyTrees of arrays, all of the same shapes)
            whose first batch is that of step `step`: 0, or the step of a resumed run. A `grain`
            loader gives one by setting its state.
        epoch_steps: Batches in a pass over the data, at least 1, so that training can be counted in
            epochs.
        block: Number of batches passed on at once, at least 1.
    """

    start: Callable[[int], Iterator[Any]] = eqx.field(static=True)
    block: int = eqx.field(static=True)

    @validated
    def __init__(self, start: Callable[[int], Any], *, epoch_steps: Size = 1, block: Size = 16):
        self.start = start
        self.epoch_steps = epoch_steps
        self.block = block
        self.shared = True
        self.stacked = False
        self.ndims = ()

    def segment(self, step: int) -> Segment:
        block, within = divmod(step, self.block)
        return Segment(None, block, within, (block + 1) * self.block)

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, within, keepdims=False), plan
        )

    def blocks(self, step: int) -> Iterator[tuple[int, Any]]:
        """Yield the end and the stacked batches of every block from that of `step` on.

        Places before `step` repeat its batch, and those after the iterator's end the last one.
        """
        batches = self.start(step)
        if not isinstance(batches, Iterable):
            checks.fail_kind("start", "return an iterator of batches", describe(batches))
        iterator = iter(batches)
        num_before = step % self.block
        num_awaited = self.block - num_before
        shapes = None
        future = _ahead(iterator, num_awaited)
        while block := future.result():
            if len(block) == num_awaited:
                future = _ahead(iterator, self.block)
            for batch in block:
                arrays = as_arrays("start", batch, "samples")  # `np.stack` accepts plain numbers
                batch_shapes = jax.tree.map(jax.typeof, arrays)
                if shapes not in (None, batch_shapes):
                    checks.fail(
                        "start",
                        "give batches of one structure and shape",
                        f"{batch_shapes} at step {step} after {shapes}",
                        "Drop a last, smaller batch, or pad it",
                    )
                shapes = batch_shapes
                step += 1

            num_missing = num_awaited - len(block)
            padded = block[:1] * num_before + block + block[-1:] * num_missing
            yield step, jax.tree.map(lambda *leaves: jax.device_put(np.stack(leaves)), *padded)
            if num_missing:
                return
            num_before = 0
            num_awaited = self.block


def _ahead(batches: Iterator[Any], count: int) -> "Future[list[Any]]":
    """Return the next batches, at most `count`, which a thread makes.

    The future's `result` raises errors of the thread.
    """
    future: Future[list[Any]] = Future()

    def copied(leaf: Any) -> Any:  # an iterator may overwrite it
        if hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array):
            return np.array(leaf)
        return leaf

    def fill() -> None:
        try:
            next_batches = itertools.islice(batches, count)
            future.set_result([jax.tree.map(copied, batch) for batch in next_batches])
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=fill, daemon=True).start()
    return future


def steps_per_epoch(num_samples: int, batch_size: int, *, drop_remainder: bool = False) -> int:
    """Return the number of batches in a pass over the data.

    A smaller last batch counts unless it is dropped.
    """
    checks.check_count("batch_size", batch_size, minimum=1)
    if batch_size > num_samples:
        checks.fail("batch_size", f"be at most the number of samples ({num_samples})", batch_size)
    num_full, remainder = divmod(num_samples, batch_size)
    return num_full + (remainder > 0 and not drop_remainder)


def ndims_of(tree: Any) -> tuple[int, ...]:
    """Return the number of axes of every array."""
    return tuple(leaf.ndim for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def as_data(data: Any, stacked: bool) -> Any:
    """Return data as JAX arrays of finite numbers, samples first; after members if `stacked`."""
    arrays = as_arrays("data", data, "samples", finite=True)
    for axis in range(1 + stacked):
        leading_size("data", arrays, axis)
    return jax.tree.map(to_device, arrays)


def as_arrays(name: str, tree: Any, first: str, *, finite: bool = False) -> Any:
    """Return the tree with an array for every leaf; raise with the place of any other leaf."""

    def converted(path: Any, leaf: Any) -> Any:
        leaf_name = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, (bool, int, float, complex, str, bytes)):
            checks.fail_kind(
                name,
                f"hold arrays, {first} first",
                f"{describe(leaf)} at {leaf_name}",
                "numpy.asarray converts a list",
            )
        if isinstance(leaf, jax.Array) and number_kind(leaf.dtype) == "key":
            return leaf
        array = as_array(leaf_name, leaf, may_be_empty=True)
        check_fits(leaf_name, array)
        kind = number_kind(array.dtype)
        if kind == "float":
            warn_narrowed(leaf_name, array, gates=2)
        if finite and kind in ("float", "complex"):
            checks.check_finite(leaf_name, array)
        return array

    return jax.tree_util.tree_map_with_path(converted, tree)


def leading_size(name: str, tree: Any, axis: int = 0) -> int:
    """Return the length of an axis in all arrays; raise with the array that differs."""
    position = "second" if axis else "leading"
    sizes = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_array(leaf):
            sizes[jax.tree_util.keystr(path)] = np.shape(leaf)[axis : axis + 1]
    if not sizes:
        checks.fail(name, "hold at least one array", "none")

    first_path, first_size = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != first_size or not size:
            checks.fail(
                name,
                f"agree in the {position} axis of all arrays ({first_path}: {first_size})",
                f"{path} with {size or 'no axis'}",
            )
    if not first_size[0]:
        checks.fail(name, "not be empty", f"a {position} axis of length 0 ({first_path})")
    return int(first_size[0])
