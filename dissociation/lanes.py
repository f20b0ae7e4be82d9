"""Members side by side on a CPU: threads that run one compiled program, each with members of its own.

XLA's CPU backend runs programs that one thread starts one after another, and those of several threads at the same time,
on one device. Small programs, which leave most cores idle, then fill them, and a member's result cannot depend on how
many threads there were: they all run the program that one alone would.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

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
        devices already, and for a program that must not run beside another (`cores.side_by_side`).
    """
    spread = any(isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 for leaf in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or spread or not cores.side_by_side(operations):
        return 1
    return min(num_members, jax.local_device_count(), cores.available_cores())


def split(stacked: Any, num_members: int, size: int) -> list[Any]:
    """Stacked members in parts of `size`; the last one is filled up with copies of its last member.

    Args:
        stacked: A PyTree whose array leaves carry members first; other leaves go to every part.
        num_members: How many.
        size: Members per part.
    """
    arrays, rest = eqx.partition(pad_members(stacked, size), eqx.is_array)
    starts = range(0, num_members, size)

    def part(start: int) -> Any:
        return arrays if len(starts) == 1 else jax.tree.map(lambda leaf: leaf[start : start + size], arrays)

    return [eqx.combine(part(start), rest) for start in starts]


def joined(parts: Sequence[Any], num_members: int) -> Any:
    """Undoes `split`."""
    whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    return drop_padding(whole, num_members)


def run(tasks: Sequence[Callable[[], Any]], lanes: int) -> list[Any]:
    """What the tasks return, `lanes` of them at a time.

    Settings of JAX that hold for one thread (`with jax.enable_x64(True)`) do not reach the tasks: they call what is
    compiled already.
    """
    if lanes == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(lanes) as pool:
        return list(pool.map(lambda task: jax.block_until_ready(task()), tasks))


def map_lanes(function: Any, shared: Any, stacked: Any, num_members: int, lanes: int) -> Any:
    """`function(shared, stacked)`, the members in as many parts as there are lanes.

    Args:
        function: Made by `eqx.filter_jit`; returns arrays, members first.
        shared: A PyTree that every part gets whole.
        stacked: A PyTree whose array leaves carry members first.
        num_members: How many.
        lanes: From `number_of_lanes`.
    """
    if lanes == 1:
        return function(shared, stacked)
    parts = split(stacked, num_members, -(-num_members // lanes))
    program = function.lower(shared, parts[0]).compile()
    return joined(run([lambda part=part: program(shared, part) for part in parts], lanes), num_members)
