"""Samplers: the batches of training steps, for a compiled loop and for the host.

Steps are cut into blocks (`segment`); `plan` draws once for a block, and `batch` makes the batch of a step. Everything
follows from a key and the step's number, so batches are the same however steps are chunked, mapped or resumed.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import as_array, check_fits, describe, number_kind, warn_narrowed
from dissociation._core.keys import typed
from dissociation._core.types import PRNGKey, PyTree
from dissociation._core.validation import validated

MAX_BLOCK = 512
"""The longest block of several epochs, in steps."""

MAX_ORDER = 65_536
"""The longest order in samples, if it covers more than one epoch."""

UNENDING = 2**62


class Segment(NamedTuple):
    """Place of a step.

    Attributes:
        size: Samples in its batch, if that may differ between steps; a program is compiled for each.
        block: The block whose plan it needs.
        within: Its place in the block.
        end: The step up to which size and block hold.
    """

    size: int | None
    block: int
    within: int
    end: int


class Sampler(eqx.Module):
    """Base of samplers. To write one, give `segment`, `plan` and `batch`, and `check_single` if it can be `stacked`.

    Attributes:
        shared: True if all members of a sweep draw with one key, False if each draws with its own.
        stacked: True if its arrays carry members first: data of each member's own.
        epoch_steps: Steps in a pass over the data; 1 if there are no passes.
    """

    shared: eqx.AbstractVar[bool]
    stacked: eqx.AbstractVar[bool]
    epoch_steps: eqx.AbstractVar[int]

    def check_single(self) -> None:
        """Raise if the sampler is `stacked` and is not mapped over members."""
        if self.stacked and _ndims(self) == getattr(self, "ndims", None):
            advice = "Map over it, as in eqx.filter_vmap(lambda sampler: train(state, step, sampler, ...))(sampler)"
            checks.fail("sampler", "hold the data of one member", "those of all (stacked=True)", advice)

    def segment(self, step: int) -> Segment:
        """Return the place of `step`, on the host."""
        return Segment(None, 0, step, UNENDING)

    def plan(self, key: PRNGKey, block: Any) -> PyTree:
        """Return what is drawn once for a block (its number may be traced); None if nothing."""
        return None

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        """Return the batch at a place of a block."""
        raise NotImplementedError


class FullBatch(Sampler):
    """Sampler of all samples in every step, in the given order.

    Args:
        data: A PyTree of finite arrays, samples first; with `stacked`, members and then samples.
        stacked: True if every member has data of its own.
    """

    data: PyTree
    stacked: bool = eqx.field(static=True)
    shared: bool = eqx.field(static=True)
    epoch_steps: int = eqx.field(static=True)
    ndims: tuple[int, ...] = eqx.field(static=True)

    @validated
    def __init__(self, data: Any, *, stacked: bool = False):
        self.data, self.stacked, self.shared, self.epoch_steps = as_data(data, stacked), stacked, True, 1
        self.ndims = _ndims(self.data)

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        """Return the data."""
        return self.data


class Epochs(Sampler):
    """Sampler of passes over arrays in batches, the samples in a new random order every time.

    Args:
        data: A PyTree of finite arrays, samples first; with `stacked`, members and then samples.
        batch_size: Samples in a batch; the last one of a pass is smaller if it does not divide their number.
        shared: True if all members see the same batches in the same order.
        shuffle: True for a random order, False for the given one.
        drop_remainder: True to leave out a last, smaller batch.
        stacked: True if every member has data of its own.

    Raises:
        ValueError: If there are fewer samples than a batch.
    """

    data: PyTree
    batch_size: int = eqx.field(static=True)
    shared: bool = eqx.field(static=True)
    shuffle: bool = eqx.field(static=True)
    stacked: bool = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    epoch_steps: int = eqx.field(static=True)
    ndims: tuple[int, ...] = eqx.field(static=True)

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
        self.data, self.batch_size = as_data(data, stacked), batch_size
        self.shared, self.shuffle, self.stacked, self.ndims = shared, shuffle, stacked, _ndims(self.data)
        self.num_samples = jax.tree.leaves(self.data)[0].shape[int(stacked)]
        self.epoch_steps = steps_per_epoch(self.num_samples, batch_size, drop_remainder=drop_remainder)

    @property
    def span(self) -> int:
        """Return the number of epochs in a block: several if they are short and have no smaller batch."""
        if self.epoch_steps != self.num_samples // self.batch_size:
            return 1
        return max(1, min(MAX_BLOCK // self.epoch_steps, MAX_ORDER // self.num_samples))

    def segment(self, step: int) -> Segment:
        """Return the place of `step`: blocks are epochs, or several short ones."""
        block, within = divmod(step, self.span * self.epoch_steps)
        full, rest = divmod(self.num_samples, self.batch_size)
        if within < self.span * full:
            return Segment(self.batch_size, block, within, step - within + self.span * full)
        return Segment(rest, block, within, step + 1)

    def plan(self, key: PRNGKey, block: Any) -> Array | None:
        """Return the order of the samples in the block; of several epochs, only those that are in a batch."""
        if not self.shuffle:
            return None
        kept = min(self.num_samples, self.epoch_steps * self.batch_size)
        return permutations(typed(key), block * self.span + jnp.arange(self.span), self.num_samples, kept)

    def batch(self, plan: Array | None, within: Any, size: int | None) -> PyTree:
        """Return `size` samples."""
        wanted = self.batch_size if size is None else size
        if plan is None:
            start = within % self.epoch_steps * self.batch_size
            return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, wanted), self.data)
        chosen = jax.lax.dynamic_slice_in_dim(plan, within * self.batch_size, wanted)
        return jax.tree.map(lambda leaf: leaf.at[chosen].get(mode="promise_in_bounds"), self.data)


class Online(Sampler):
    """Sampler of batches that are drawn anew in every step.

    Args:
        draw: `draw(key) -> batch`, or `draw(source, key)` if there is a `source`.
        source: A PyTree of arrays that `draw` is given: a teacher; with `stacked`, members first.
        shared: True if all members see the same draws.
        stacked: True if every member has a source of its own; there must be one.
    """

    draw: Callable[..., Any]
    source: PyTree
    shared: bool = eqx.field(static=True)
    stacked: bool = eqx.field(static=True)
    epoch_steps: int = eqx.field(static=True)
    ndims: tuple[int, ...] = eqx.field(static=True)

    @validated
    def __init__(self, draw: Callable[..., Any], source: Any = None, *, shared: bool = False, stacked: bool = False):
        if stacked and source is None:
            checks.fail("source", "be given where every member has its own (`stacked=True`)", None)
        self.draw, self.source, self.shared, self.stacked, self.epoch_steps = draw, source, shared, stacked, 1
        self.ndims = _ndims((draw, source))

    def plan(self, key: PRNGKey, block: Any) -> PyTree:
        """Return the key."""
        return key

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        """Return a draw."""
        key = jax.random.fold_in(plan, within)
        return self.draw(key) if self.source is None else self.draw(self.source, key)


class HostBatches(Sampler):
    """Sampler of batches that the host makes, one after the other: data larger than memory, or any Python iterator.

    For `fit` alone; a compiled loop does not call the host. A thread makes batches ahead of the training, and copies
    them: an iterator may fill one buffer again and again.

    Args:
        start: `start(step)` gives an iterator (of PyTrees of arrays, all of the same shapes) whose first batch is that
            of step `step`: 0, or the step of a resumed run. A `grain` loader gives one by setting its state.
        epoch_steps: Batches in a pass over the data, at least 1, so that training may be counted in epochs.
        block: Number of batches that are handed over at once, at least 1.
    """

    start: Callable[[int], Iterator[Any]] = eqx.field(static=True)
    epoch_steps: int = eqx.field(static=True)
    block: int = eqx.field(static=True)
    shared: bool = eqx.field(static=True)
    stacked: bool = eqx.field(static=True)

    @validated
    def __init__(self, start: Callable[[int], Any], *, epoch_steps: int = 1, block: int = 16):
        for name, value in (("epoch_steps", epoch_steps), ("block", block)):
            checks.check_count(name, value, minimum=1)
        self.start, self.epoch_steps, self.block, self.shared, self.stacked = start, epoch_steps, block, True, False

    def segment(self, step: int) -> Segment:
        """Return the place of `step`."""
        block, within = divmod(step, self.block)
        return Segment(None, block, within, (block + 1) * self.block)

    def batch(self, plan: PyTree, within: Any, size: int | None) -> PyTree:
        """Return one of the batches handed over."""
        return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, within, keepdims=False), plan)


def steps_per_epoch(num_samples: int, batch_size: int, *, drop_remainder: bool = False) -> int:
    """Return the number of optimiser steps in one pass over the data."""
    checks.check_count("batch_size", batch_size, minimum=1)
    if batch_size > num_samples:
        checks.fail("batch_size", f"be at most the number of samples ({num_samples})", batch_size)
    full, rest = divmod(num_samples, batch_size)
    return full + (rest > 0 and not drop_remainder)


@eqx.filter_jit
def permutations(key: Array, epochs: Array, num_samples: int, kept: int) -> Array:
    """Return the order of the samples in every epoch, each cut to its first `kept`: [epochs * kept]."""

    def one(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), num_samples)[:kept]

    return jax.vmap(one)(epochs).reshape(-1)


def _ndims(tree: Any) -> tuple[int, ...]:
    return tuple(leaf.ndim for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array)))


def as_data(data: Any, stacked: bool = False, *, finite: bool = True) -> Any:
    """Return data as JAX arrays, samples first (after members, if they are stacked)."""
    arrays = as_arrays("data", data, "samples", finite=finite)
    for axis in range(1 + stacked):
        leading_size("data", arrays, axis)
    return jax.tree.map(jnp.asarray, arrays)


def as_arrays(name: str, tree: Any, first: str, *, finite: bool = False) -> Any:
    """Return the tree with an array for every leaf, or raise an error with the place of a leaf that is not one."""

    def one(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex, str, bytes)):
            came = f"{describe(leaf)} at {name}{jax.tree_util.keystr(path)}"
            checks.fail_kind(name, f"hold arrays, {first} first", came, "numpy.asarray makes an array of a list")
        place = f"{name}{jax.tree_util.keystr(path)}"
        if isinstance(leaf, jax.Array) and number_kind(leaf.dtype) == "key":
            return leaf
        array = as_array(place, leaf, may_be_empty=True)
        check_fits(place, array)
        if number_kind(array.dtype) == "float":
            warn_narrowed(place, array, gates=2)
        if finite and number_kind(array.dtype) in ("float", "complex"):
            checks.check_finite(place, array)
        return array

    return jax.tree_util.tree_map_with_path(one, tree)


def leading_size(name: str, tree: Any, axis: int = 0) -> int:
    """Return the length of an axis in all arrays of a tree, or raise an error with the array that differs."""
    meaning = "second" if axis else "leading"
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    sizes = {jax.tree_util.keystr(path): np.shape(x)[axis : axis + 1] for path, x in leaves if eqx.is_array(x)}
    if not sizes:
        checks.fail(name, "hold at least one array", "none")
    first_path, first = next(iter(sizes.items()))
    for path, size in sizes.items():
        if size != first or not size:
            wanted = f"agree in the {meaning} axis of all arrays ({first_path}: {first})"
            checks.fail(name, wanted, f"{path} with {size or 'no axis'}")
    if not first[0]:
        checks.fail(name, "not be empty", f"a {meaning} axis of length 0 ({first_path})")
    return int(first[0])
