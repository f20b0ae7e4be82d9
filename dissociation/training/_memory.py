"""Memory of compiled programs, free memory, and the largest batch that fits."""

import functools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import psutil

from dissociation._core import checks

logger = logging.getLogger(__name__)


def program_bytes(executable: Any) -> int:
    """Return the bytes of a compiled program's temporaries and results."""
    usage = executable.memory_analysis()
    if usage is None:
        checks.fail("batch_size", "be a number here", "'auto'", "This backend gives no memory analysis")
    return usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes


def free_memory(arrays: Iterable[jax.Array]) -> int:
    """Return nine tenths of the devices' free bytes, or half of the host's, where other programs run."""
    devices = set().union(*(leaf.devices() for leaf in arrays)) or {jax.local_devices()[0]}
    stats = [device.memory_stats() or {} for device in devices]
    known = {"bytes_limit", "bytes_in_use"}
    if all(known <= each.keys() for each in stats):
        return min(each["bytes_limit"] - each["bytes_in_use"] for each in stats) * 9 // 10
    return max(0, min([psutil.virtual_memory().available, *_free_in_groups()])) // 2


def _free_in_groups(process: str | Path = "/proc/self/cgroup", root: str | Path = "/sys/fs/cgroup") -> Iterator[int]:
    """Yield the free bytes of this process' limited control groups, parents included."""
    for line in _lines(process):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, limit, usage = Path(root), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = Path(root) / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's; then only the top folder exists.
        folder = top / group.strip("/")
        for place in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            allowed, used = _lines(place / limit), _lines(place / usage)
            if allowed and used and allowed[0].isdigit():  # "max" means no limit
                # The kernel counts cached files as used, and frees them when memory is short.
                stat = dict(entry.split() for entry in _lines(place / "memory.stat"))
                cached = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                yield int(allowed[0]) - int(used[0]) + int(cached)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def largest(bytes_of: Callable[[int], int], size: int, budget: int) -> int:
    """Return a large batch size, at most `size`, whose program fits in `budget` bytes."""
    if bytes_of(size) <= budget:
        return size
    # Memory is linear in the batch size from 2 on.
    two, four = bytes_of(2), bytes_of(4)
    batch = max(1, min(size - 1, 2 + int(2 * (budget - two) // max(four - two, 1))))
    while batch > 1 and bytes_of(batch) > budget:  # the line is not a bound
        batch = batch * 7 // 8
    if bytes_of(batch) > budget:
        checks.fail("memory_budget", f"be at least {bytes_of(1)} bytes (one member at a time, all results)", budget)
    return batch


def run_largest(function_of: Callable[[int], Callable[..., Any]], arrays: Any, size: int, budget: int | None) -> Any:
    """Return `function_of(batch_size)(arrays)` for the largest batch within `budget` bytes."""

    @functools.cache
    def compiled(batch_size: int) -> tuple[Any, int]:
        # Closed-over arrays become arguments; as constants they would be folded and copied.
        converted = eqx.filter_closure_convert(function_of(batch_size), arrays)
        _refuse_traced(converted)
        jitted: Any = eqx.filter_jit(lambda function, arrays: function(arrays))
        program = jitted.lower(converted, arrays).compile()
        return functools.partial(program, converted, arrays), program_bytes(program.compiled)

    _refuse_traced(arrays)
    budget = free_memory(jax.tree.leaves(arrays)) if budget is None else budget
    chosen = largest(lambda batch_size: compiled(batch_size)[1], size, budget)
    run, needed = compiled(chosen)
    logger.info("batches of %d of %d members: %d bytes of %d", chosen, size, needed, budget)
    return run()


def _refuse_traced(tree: Any) -> None:
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "`batch_size` must be a number or None inside jit, grad, vmap and other transformations, got 'auto'. The "
            "program that runs is not known there; choose with 'auto' outside, on concrete arrays."
        )
