"""Which members are whose, where several processes work together: those of this one, and all put together again."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dissociation import checks, distributed, sharding


class Share(NamedTuple):
    """Members cut into one part for each process, in order.

    Attributes:
        bounds: Process i has the members from `bounds[i]` to `bounds[i + 1]`; possibly none.
        process: Which one this is.
    """

    bounds: tuple[int, ...]
    process: int

    @property
    def alone(self) -> bool:
        """Whether this process has them all, and exchanges nothing."""
        return len(self.bounds) == 2

    @property
    def start(self) -> int:
        """The first of this process' members."""
        return self.bounds[self.process]

    @property
    def stop(self) -> int:
        """Behind the last of them."""
        return self.bounds[self.process + 1]

    def on_main(self, function: Callable[[], Any], *, interruptible: bool = True) -> Any:
        """`distributed.on_main`, where members are shared out at all."""
        return function() if self.alone else distributed.on_main(function, interruptible=interruptible)

    def take(self, tree: Any) -> Any:
        """This process' members of a PyTree that carries all of them first.

        A process that has none works on a copy of another's, which `gather` drops.
        """
        if self.alone:
            return tree
        return jax.tree.map(lambda leaf: leaf[self._rows] if eqx.is_array(leaf) else leaf, tree)

    @property
    def _rows(self) -> slice:
        start = min(self.start, self.bounds[-1] - 1)
        return slice(start, max(self.stop, start + 1))

    def cut(self, start: int, stop: int) -> slice | None:
        """Which rows of the members from `start` to `stop` this process takes; None if none."""
        low, high = max(self._rows.start, start), min(self._rows.stop, stop)
        return slice(low - start, high - start) if low < high else None

    def gather(self, tree: Any, what: str = "members") -> Any:
        """All members of a PyTree of whose arrays each process has its own first, on the host of every one.

        Other leaves are this process' own. Typed keys stay what they are.
        """
        if self.alone:
            return tree
        arrays, rest = eqx.partition(tree, eqx.is_array)
        leaves, structure = jax.tree.flatten(arrays)
        own = [np.asarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf) for leaf in leaves]
        counts = [stop - start for start, stop in zip(self.bounds, self.bounds[1:], strict=False)]
        said = distributed.exchange([leaf[: counts[self.process]] for leaf in own], what)
        whole = [np.concatenate(parts) for parts in zip(*said, strict=True)]
        whole = [
            jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(old)) if _is_key(old) else leaf
            for leaf, old in zip(whole, leaves, strict=True)
        ]
        return eqx.combine(structure.unflatten(whole), rest)


def share_of(num_members: int, mesh: Mesh | None = None) -> Share:
    """Members in parts for all processes, as equal as their devices: those of a mesh, or all there are.

    Raises:
        ValueError: If a mesh lays the data of a member over several processes.
    """
    count = distributed.number()
    if count == 1:
        return Share((0, num_members), 0)
    rows = sharding.rows_of_processes(mesh, count)
    done = list(accumulate(rows, initial=0))
    return Share(tuple(round(num_members * rows / done[-1]) for rows in done), distributed.index())


def over_processes(function: Callable[[Any], Any], stacked: Any) -> Any:
    """`function` of stacked members, each process on its own ones, put together on the host of every process.

    Args:
        function: Of some stacked members; returns a PyTree of arrays, members first.
        stacked: A PyTree whose array leaves carry all members first; the same in every process.

    Returns:
        What `function(stacked)` returns; that itself where there is one process.
    """
    counts = {leaf.shape[0] for leaf in jax.tree.leaves(stacked) if eqx.is_array(leaf) and leaf.ndim}
    if len(counts) != 1:
        checks.fail("stacked", "hold arrays that agree in a leading axis", f"leading axes {sorted(counts)}")
    share = share_of(counts.pop())
    return share.gather(function(share.take(stacked)))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
