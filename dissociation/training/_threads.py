"""Worker threads on a CPU, each of which calls one compiled function on a shard of the members.

XLA's CPU backend runs the programs of one thread in order, and those of several threads in parallel, on one device.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dissociation.training import _cores as cores
from dissociation.training._sharding import place_members


def number_of_threads(num_members: int, operations: Iterable[str], arrays: Any) -> int:
    """Return the number of worker threads for sequential mapping of a program of such primitives and arguments."""
    if any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")):
        return 1
    spread = any(isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 for leaf in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or spread or not cores.runs_in_parallel(operations):
        return 1
    return min(num_members, jax.local_device_count(), cores.available_cores())


class Shards(NamedTuple):
    """Members in shards of equal size, the last one padded by copies of its last member, each laid over a mesh."""

    num_members: int
    size: int
    mesh: Mesh | None = None

    @property
    def number(self) -> int:
        """Number of shards."""
        return -(-self.num_members // self.size)

    def split(self, stacked: Any) -> list[Any]:
        """Cut a PyTree whose array leaves carry members first into shards; other leaves go to each shard."""
        arrays, rest = eqx.partition(stacked, eqx.is_array)

        def shard(start: int) -> Any:
            count = min(self.size, self.num_members - start)

            def cut(leaf: jax.Array) -> jax.Array:
                if count < self.num_members:
                    # The start is a traced number: a known one would compile a program for each shard.
                    leaf = jax.lax.dynamic_slice_in_dim(leaf, np.int32(start), count)
                missing = self.size - count
                return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], missing, axis=0)]) if missing else leaf

            own = jax.tree.map(cut, arrays)
            return eqx.combine(own if self.mesh is None else place_members(own, self.mesh), rest)

        return [shard(start) for start in range(0, self.num_members, self.size)]

    def joined(self, shards: Sequence[Any]) -> Any:
        """Undo `split`."""
        whole = shards[0] if len(shards) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *shards)
        return jax.tree.map(lambda leaf: leaf[: self.num_members] if eqx.is_array(leaf) else leaf, whole)


def compiled(function: Any, threads: int, *example: Any) -> Callable[..., Any]:
    """Compile a function made by `eqx.filter_jit` for arguments like `example` before several threads call it."""
    return function if threads == 1 else function.lower(*example).compile()


def run_tasks(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Return the results of the tasks, `threads` of which run at the same time; they must be compiled already."""
    if threads == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda task: jax.block_until_ready(task()), tasks))


def map_shards(function: Any, shared: Any, stacked: Any, num_members: int, threads: int) -> Any:
    """Return `function(shared, stacked)`, computed in one shard per worker thread; `function` is a `filter_jit`."""
    shards = Shards(num_members, -(-num_members // threads))
    each = shards.split(stacked)
    program = compiled(function, threads, shared, each[0])
    return shards.joined(run_tasks([partial(program, shared, one) for one in each], threads))
