"""Batches of a run on the host: plans of blocks, and blocks that a thread makes ahead."""

import itertools
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import describe
from dissociation.training._partition import Partition, Threads
from dissociation.training._samplers import HostBatches, Sampler, Segment, as_arrays, as_data


def example(tree: Any, first: int = 1) -> Any:
    """Return shapes and dtypes without the first axes: those of one member's arrays."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[first:], leaf.dtype), tree)


class Batches:
    """Batches of a run, from the sampler's arrays and the current block's plan."""

    def __init__(self, sampler: Sampler, order_keys: Array):
        self.sampler, self.keys = sampler, order_keys
        self.partition = Partition(1, "scan", None, Threads(1))
        self.arrays: Any = eqx.filter(sampler, eqx.is_array)
        self._plan: Any = None
        self._block, self._end, self._like = -1, -1, None
        self._iterator: Iterator[Any] = iter(())
        self._ahead: Future[list[Any]] = Future()

    def lay(self, partition: Partition) -> None:
        """Place the arrays on devices, those of single members in shards."""
        self.partition = partition
        self.arrays = self._placed(self.arrays, own=self.sampler.stacked)
        self._plan = self._placed(self._plan, own=not self.sampler.shared)

    def example(self, step: int) -> tuple[Any, Any]:
        """Return the sampler's arrays and plan for one member, as shapes and dtypes."""
        arrays = example(eqx.filter(self.sampler, eqx.is_array), int(self.sampler.stacked))
        if isinstance(self.sampler, HostBatches):
            return arrays, example(self.source(step)[0][1], 0)
        key = self.keys if self.sampler.shared else self.keys[0]
        return arrays, jax.eval_shape(self.sampler.plan, key, 0)

    def source(self, step: int) -> tuple[Any, list[Any], Segment]:
        """Return (arrays, plan) of a step's batch for all members, the same per shard, and the step's `Segment`.

        An entry is None if the other pair holds it.
        """
        segment, on_host = self.sampler.segment(step), isinstance(self.sampler, HostBatches)
        if segment.block != self._block:
            number = jnp.asarray(segment.block)  # an array: a Python number would be a constant
            drawn = self._from_host(step, segment) if on_host else _plan(self.sampler, self.keys, number)
            self._plan, self._block = self._placed(drawn, own=not self.sampler.shared), segment.block
        if on_host:
            segment = segment._replace(end=self._end)
            if step >= segment.end:
                wanted, advice = f"give a batch for every step, {step} among them", "Repeat it with itertools.cycle"
                checks.fail("start", wanted, "an iterator that has ended", advice)
        nothing: Any = [None] * self.partition.num_shards
        arrays, common_arrays = (self.arrays, None) if self.sampler.stacked else (nothing, self.arrays)
        plans, common_plan = (nothing, self._plan) if self.sampler.shared else (self._plan, None)
        return (common_arrays, common_plan), list(zip(arrays, plans, strict=True)), segment

    def _placed(self, tree: Any, *, own: bool) -> Any:
        return self.partition.split(tree) if own else self.partition.everywhere(tree)

    def _from_host(self, step: int, segment: Segment) -> Any:
        """Return the stacked batches of a block, None at the end; an incomplete block repeats the last batch."""
        sampler: Any = self.sampler
        if step != self._end:
            started = sampler.start(step)
            if not isinstance(started, Iterable):
                checks.fail_kind("start", "return an iterator of batches", describe(started))
            self._iterator = iter(started)
            self._ahead = _ahead(self._iterator, sampler.block - segment.within)
        part = self._ahead.result()
        part = part[:1] * segment.within + part  # a resumed run does not read the places before its step
        self._end = segment.block * sampler.block + len(part)
        if len(part) == sampler.block:
            self._ahead = _ahead(self._iterator, sampler.block)
        if not part:
            return None
        for place, batch in enumerate(part, segment.block * sampler.block):
            shapes = example(as_arrays("start", batch, "samples"), 0)  # `np.stack` accepts plain numbers
            if self._like not in (None, shapes):
                wanted, advice = "give batches of one structure and shape", "Drop a last, smaller batch, or pad it"
                checks.fail("start", wanted, f"{shapes} at step {place} after {self._like}", advice)
            self._like = shapes
        filled = part + part[-1:] * (sampler.block - len(part))
        stacked = jax.tree.map(lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves]), *filled)
        return as_data(stacked, finite=False)


@eqx.filter_jit
def _plan(sampler: Sampler, keys: Array, block: Any) -> Any:
    plan = lambda key: sampler.plan(key, block)  # noqa: E731
    return plan(keys) if sampler.shared else jax.vmap(plan)(keys)


def _ahead(batches: Iterator[Any], count: int) -> "Future[list[Any]]":
    """Return the next batches, at most `count`, which a thread makes; its errors are raised with the result."""
    found: Future[list[Any]] = Future()

    def copied(leaf: Any) -> Any:  # an iterator may overwrite it
        return np.array(leaf) if hasattr(leaf, "__array__") and not isinstance(leaf, jax.Array) else leaf

    def fill() -> None:
        try:
            found.set_result([jax.tree.map(copied, batch) for batch in itertools.islice(batches, count)])
        except BaseException as error:
            found.set_exception(error)

    threading.Thread(target=fill, daemon=True).start()
    return found
