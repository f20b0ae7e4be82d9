"""Batches of a run on the host: plans of blocks, and blocks that a thread makes ahead."""

import itertools
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import describe
from dissociation._core.types import PyTree
from dissociation.training._partition import Partition, Threads
from dissociation.training._samplers import HostBatches, Sampler, Segment, as_arrays, as_data


def example(tree: Any) -> Any:
    """Return the shapes and dtypes of one member's arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), tree)


def _shape(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


class Batches:
    """Batches of a run, from the sampler's arrays and the current block's plan."""

    def __init__(self, sampler: Sampler, order_keys: Array):
        self.sampler, self.keys = sampler, order_keys
        self.partition = Partition(1, "scan", None, Threads(1))
        self.arrays = eqx.filter(sampler, eqx.is_array)
        self._block, self._plan = -1, cast(Any, None)  # `lay` makes lists of shards
        self._prefetched, self._expected = None, -1

    def lay(self, partition: Partition) -> None:
        """Place the arrays on devices, those of single members in shards."""
        self.partition = partition
        self.arrays = self._placed(self.arrays, own=self.sampler.stacked)
        self._plan = self._placed(self._plan, own=not self.sampler.shared)

    def example(self, step: int) -> tuple[Any, Any]:
        """Return the sampler's arrays and plan for one member, as shapes and dtypes."""
        arrays = eqx.filter(self.sampler, eqx.is_array)
        arrays = example(arrays) if self.sampler.stacked else jax.tree.map(_shape, arrays)
        if isinstance(self.sampler, HostBatches):
            return arrays, jax.tree.map(_shape, self.source(step)[0][1])
        key = self.keys if self.sampler.shared else self.keys[0]
        return arrays, jax.eval_shape(lambda key: self.sampler.plan(key, 0), key)

    def source(self, step: int) -> tuple[Any, list[Any], Segment]:
        """Return (arrays, plan) of a step's batch for all members, the same per shard, and the step's `Segment`.

        An entry is None if the other pair holds it.
        """
        segment = self.sampler.segment(step)
        if segment.block != self._block:
            self._plan = self._next_plan(step, segment)
            self._block = segment.block
        if isinstance(self.sampler, HostBatches):
            segment = segment._replace(end=self._expected)
            if step >= segment.end:
                wanted, advice = f"give a batch for every step, {step} among them", "Repeat it with itertools.cycle"
                checks.fail("start", wanted, "an iterator that has ended", advice)
        nothing: Any = [None] * self.partition.num_shards
        arrays, common_arrays = (self.arrays, None) if self.sampler.stacked else (nothing, self.arrays)
        plans, common_plan = (nothing, self._plan) if self.sampler.shared else (self._plan, None)
        return (common_arrays, common_plan), list(zip(arrays, plans, strict=True)), segment

    def _next_plan(self, step: int, segment: Segment) -> Any:
        if isinstance(self.sampler, HostBatches):
            if self._prefetched is None or step != self._expected:
                self.close()
                like = None if self._prefetched is None else self._prefetched.like
                self._prefetched = Prefetched(self.sampler, step, like)
            plan, count = self._prefetched.next_block()
            self._expected = segment.block * self.sampler.block + count
            return self._placed(plan, own=False)
        number = jnp.asarray(segment.block)  # an array: a Python number would be a constant
        return self._placed(_plan(self.sampler, self.keys, number), own=not self.sampler.shared)

    def _placed(self, tree: Any, *, own: bool) -> Any:
        return self.partition.split(tree) if own else self.partition.everywhere(tree)

    def close(self) -> None:
        """End the thread that makes batches, if there is one."""
        if self._prefetched is not None:
            self._prefetched.close()


@eqx.filter_jit
def _plan(sampler: Sampler, keys: Array, block: Any) -> Any:
    plan = lambda key: sampler.plan(key, block)  # noqa: E731
    return plan(keys) if sampler.shared else jax.vmap(plan)(keys)


def _kept(leaf: Any) -> Any:
    """Copy a leaf that an iterator may overwrite."""
    return np.array(leaf) if hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array) else leaf


class Prefetched:
    """Blocks of a `HostBatches`, made ahead in a thread; an incomplete block repeats the last batch.

    `like`: shapes and dtypes of all batches; None takes those of the first.
    """

    def __init__(self, sampler: HostBatches, step: int, like: Any = None):
        self._sampler, self._blocks, self._ended = sampler, queue.Queue(maxsize=2), threading.Event()
        self._skip, self._next, self.like = step % sampler.block, step - step % sampler.block, like
        started = sampler.start(step)
        if not isinstance(started, Iterable):
            checks.fail_kind("start", "return an iterator of batches", describe(started))
        threading.Thread(target=self._fill, args=(iter(started),), daemon=True).start()

    def _fill(self, batches: Iterator[Any]) -> None:
        size = self._sampler.block - self._skip
        try:
            while not self._ended.is_set():
                part = [jax.tree.map(_kept, batch) for batch in itertools.islice(batches, size)]
                if part:  # a resumed run does not read the places before its step
                    part = [part[0]] * (self._sampler.block - size) + part
                self._put(part)
                if len(part) < self._sampler.block:
                    return
                size = self._sampler.block
        except BaseException as error:  # raised in the training thread
            self._put(error)

    def _put(self, item: Any) -> None:
        while not self._ended.is_set():
            try:
                return self._blocks.put(item, timeout=0.1)
            except queue.Full:
                continue

    def next_block(self) -> tuple[PyTree, int]:
        """Return the next block, stacked, and the number of batches; None and 0 at the end."""
        part = self._blocks.get()
        if isinstance(part, BaseException):
            raise part
        if not part:
            return None, 0
        for step, batch in enumerate(part, self._next):
            shapes = jax.tree.map(_shape, as_arrays("start", batch, "samples"))  # `np.stack` accepts plain numbers
            if self.like not in (None, shapes):
                wanted, advice = "give batches of one structure and shape", "Drop a last, smaller batch, or pad it"
                checks.fail("start", wanted, f"{shapes} at step {step} after {self.like}", advice)
            self.like = shapes
        self._next += self._sampler.block
        filled = part + [part[-1]] * (self._sampler.block - len(part))
        stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *filled)
        return as_data(stacked, finite=False), len(part)

    def close(self) -> None:
        self._ended.set()
