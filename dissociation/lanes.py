"""Members side by side on a CPU: threads that run one compiled program, each with members of its own.

XLA's CPU backend runs programs that one thread starts one after another, and those of several threads at the same time,
on one device. Small programs, which leave most cores idle, then fill them. A member's result does not depend on how
many threads there were: all run one program, a loop whose body XLA compiles alike for any number of members.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation import cores
from dissociation.sharding import drop_padding, pad_members


def number_of_lanes(num_members: int, operations: Iterable[str], arrays: Any) -> int:
    """How many members go side by side where they go in turn: as many as a CPU has devices (`use_all_cores`).

    Args:
        num_members: How many there are.
        operations: Names of the primitives in a member's program.
        arrays: A PyTree of what it is given.

    Returns:
        At most the number of members, devices or cores; 1 on an accelerator, for arrays that are laid over several
        devices already, for a program that must not run beside another (`cores.side_by_side`), and where JAX looks for
        NaN or compiles nothing.
    """
    if any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")):
        return 1
    spread = any(isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 for leaf in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or spread or not cores.side_by_side(operations):
        return 1
    return min(num_members, jax.local_device_count(), cores.available_cores())


class Parts(NamedTuple):
    """How members lie in parts, each of which one program computes.

    Attributes:
        num_members: How many there are.
        size: Members per part; the last one may have fewer.
        rows: Of a part's arrays; what is beyond its members are copies of its last one. At least two for `in_turn`,
            so that a single member takes the memory of two.
    """

    num_members: int
    size: int
    rows: int

    @property
    def counts(self) -> list[int]:
        """How many members each part has."""
        return [min(self.size, self.num_members - start) for start in range(0, self.num_members, self.size)]

    def split(self, stacked: Any) -> list[Any]:
        """A PyTree whose array leaves carry members first, in parts; other leaves go to every one."""
        arrays, rest = eqx.partition(stacked, eqx.is_array)

        def part(index: int, count: int) -> Any:
            # By a number that the program does not know, as each one that it knows would make a program of its own.
            start = np.int32(index * self.size)
            cut = lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, start, count)  # noqa: E731
            own = arrays if count == self.num_members else jax.tree.map(cut, arrays)
            return eqx.combine(pad_members(own, self.rows), rest)

        return [part(*each) for each in enumerate(self.counts)]

    def cut(self, part: Any) -> Any:
        """A part's arrays without copies, but for those of the last part."""
        return part if self.rows == self.size else jax.tree.map(lambda leaf: leaf[: self.size], part)

    def joined(self, parts: Sequence[Any]) -> Any:
        """Undoes `split`."""
        own = [self.cut(part) for part in parts]
        whole = own[0] if len(own) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *own)
        return drop_padding(whole, self.num_members)


def parts_in_turn(num_members: int, lanes: int) -> Parts:
    """Parts for `in_turn`, as many as there are lanes."""
    size = -(-num_members // lanes)
    return Parts(num_members, size, max(size, 2))


def in_turn(
    function: Callable[[Any, Any], tuple[Any, Any]], carried: Any, stacked: Any, count: Array
) -> tuple[Any, Any]:
    """`function` of one member after another, as `jax.lax.map`, but of the first `count`; without a reverse derivative.

    XLA does not know how many there are, and so it compiles a single member as it does many: a loop of known length 1,
    or over a single row, would be taken apart, and round otherwise.

    Args:
        function: From two PyTrees of arrays, of `carried` and `stacked`, to what takes the place of the first, and a
            PyTree of results.
        carried: Arrays, members first, at least two rows: rewritten in place.
        stacked: The same, read alone. One of the two may be empty.
        count: Traced.

    Returns:
        `carried` with its first `count` members rewritten, and the results, members first; zeros beyond `count`.
    """
    kinds: list[Any] = []  # of keys, which are held as numbers in the loop

    def plain(i: Array | int, carried: Any) -> tuple[Any, Any]:
        take = lambda leaf: jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False)  # noqa: E731
        after, made = function(*jax.tree.map(take, (carried, stacked)))
        kinds.append(jax.tree.map(lambda leaf: jax.random.key_impl(leaf) if _is_key(leaf) else "", made))
        return after, jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, made)

    def body(i: Array | int, loop: Any) -> Any:
        put = lambda all_, one: jax.lax.dynamic_update_index_in_dim(all_, one, i, 0)  # noqa: E731
        return jax.tree.map(put, loop, plain(i, loop[0]))

    total, shapes = jax.tree.leaves((carried, stacked))[0].shape[0], jax.eval_shape(plain, 0, carried)[1]
    zeros = jax.tree.map(lambda leaf: jnp.zeros((total, *leaf.shape), leaf.dtype), shapes)
    carried, made = jax.lax.fori_loop(0, count, body, (carried, zeros))
    return carried, jax.tree.map(
        lambda leaf, kind: jax.random.wrap_key_data(leaf, impl=kind) if kind else leaf, made, kinds[0]
    )


def traced_number(count: int) -> Array:
    """A number that a program does not know."""
    return jax.device_put(np.int32(count))


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def ready(function: Any, lanes: int, *example: Any) -> Callable[..., Any]:
    """A function made by `eqx.filter_jit`, compiled for arguments like `example` where several lanes are to call it."""
    return function if lanes == 1 else function.lower(*example).compile()


def run_tasks(tasks: Sequence[Callable[[], Any]], lanes: int) -> list[Any]:
    """What the tasks return, `lanes` of them at a time.

    Settings of JAX that hold for one thread (`with jax.enable_x64(True)`) do not reach the tasks: they call what is
    compiled already.
    """
    if lanes == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(lambda task: jax.block_until_ready(task()), tasks))


def map_lanes(function: Any, shared: Any, stacked: Any, num_members: int, lanes: int) -> Any:
    """`function(shared, stacked, count)`, the members in as many parts as there are lanes.

    Args:
        function: Made by `eqx.filter_jit`; of the members of a part, the first `count` of which are asked for. Returns
            arrays, members first.
        shared: A PyTree that every part gets whole.
        stacked: A PyTree whose array leaves carry members first.
        num_members: How many.
        lanes: From `number_of_lanes`.
    """
    parts = parts_in_turn(num_members, lanes)
    each = list(zip(parts.split(stacked), map(traced_number, parts.counts), strict=True))
    program = ready(function, lanes, shared, *each[0])
    return parts.joined(run_tasks([partial(program, shared, *part) for part in each], lanes))
