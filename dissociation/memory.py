"""Memory: what a compiled program takes, and what is free on a device or on the host."""

import contextlib
import ctypes
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from dissociation import checks

try:
    import resource
except ImportError:  # not on Windows
    resource = None

PACKING = 8 * 2**20
"""Bytes at most, on a CPU, into which a routine of matrices copies pieces of its operands."""

UNLIMITED = 2**60
"""A limit above this is none; control groups write one as 2^63 - 4096, or "max"."""

_INSTRUCTION = re.compile(r"^\s*(ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]+)(\d+)?\w*\[([\d,]*)\]")
_LIBRARY = re.compile(r"kind=kCustom, calls=%([^,\s]+)")
_COPIED = ("dot", "convolution", "custom-call")
_FUSED_AWAY = ("parameter", "constant", "bitcast", "broadcast", "iota", "tuple", "get-tuple-element")


def program_bytes(executable: Any) -> int | None:
    """Bytes that a compiled program takes for temporaries and results, beyond its arguments.

    The compiler's own account, and on a CPU an upper bound on the scratch that it leaves out: XLA hands chains of
    matrix products to a library, which keeps the products between them, and pieces of operands, in memory of its own.
    Two dense layers that end in a sum take, by the compiler's account, the four bytes of the sum.

    Args:
        executable: What `jax.jit(...).lower(...).compile()` returns.

    Returns:
        The bytes, or None where the backend gives no account.
    """
    usage = executable.memory_analysis()
    if usage is None:
        return None
    platform = next(iter(executable.runtime_executable().local_devices())).platform
    scratch = library_scratch(executable.as_text()) if platform == "cpu" else 0
    return usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes + scratch


def library_scratch(program: str) -> int:
    """An upper bound on the bytes of scratch that libraries take in a program for a CPU.

    Args:
        program: Optimised HLO as text.
    """
    library, total = set(_LIBRARY.findall(program)), 0
    for name, instructions in _computations(program):
        sizes = {instruction: size for _, instruction, size, _, _ in instructions}
        for root, instruction, size, operation, arguments in instructions:
            operands = [sizes.get(operand, 0) for operand in re.findall(r"%([\w.-]+)", arguments.split(")")[0])]
            if operation in _COPIED:
                total += min(PACKING, sum(operands))
            if name not in library or operation in _FUSED_AWAY:
                continue
            if operation == "dot":  # its second operand is put in another order as a whole
                total += operands[1]
            # A chain of elementwise operations is computed in passing, unless its result is wanted twice.
            uses = sum(f"%{instruction}" in re.split(r"[,)\s]+", other) for *_, other in instructions)
            if not root and (operation in (*_COPIED, "reduce") or uses > 1):
                total += size
    return total


def _computations(program: str) -> Iterator[tuple[str, list[tuple[bool, str, int, str, str]]]]:
    """Name and instructions (is it the root, name, bytes, operation, rest of the line) of every computation."""
    name, instructions = "", []
    for line in program.splitlines():
        if line.endswith("{") and (head := re.match(r"(?:ENTRY )?%(\S+)", line)):
            name, instructions = head[1], []
        elif line.startswith("}"):
            yield name, instructions
        elif match := _INSTRUCTION.match(line):
            root, instruction, shape, operation, arguments = match.groups()
            instructions.append((root is not None, instruction, _bytes_of(shape), operation, arguments))


def _bytes_of(shape: str) -> int:
    """Bytes of an HLO shape, as of "f32[4,3]{1,0}" or a tuple of such; anything below a byte counts as one."""
    total = 0
    for kind, bits, sizes in _ARRAY.findall(shape):
        width = max(1, int(bits or 8) // 8) if kind != "token" else 0
        total += width * math.prod(int(size) for size in sizes.split(",") if size)
    return total


def free_memory(arrays: Iterable[jax.Array]) -> int:
    """A safe share of the bytes that are free where the arrays live: nine tenths on a device, half on the host.

    Args:
        arrays: Concrete arrays; without any, the default device counts.
    """
    devices = set().union(*(leaf.devices() for leaf in arrays)) or {jax.local_devices()[0]}
    free = [_free_on_device(device) for device in devices]
    return min(free_on_host() // 2 if number is None else number * 9 // 10 for number in free)


def _free_on_device(device: Any) -> int | None:
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if {"bytes_limit", "bytes_in_use"} <= stats.keys() else None


def free_on_host() -> int:
    """Bytes that this process can still take: the machine's, within its control groups' and its own limits."""
    return max(0, min([_free_on_machine(), *_free_in_groups(), *_free_in_limits()]))


def resident() -> int | None:
    """Bytes of this process that are in memory; None where the system does not say."""
    return _table("/proc/self/status").get("VmRSS")


def trim() -> None:
    """Gives what was freed back to the system, where the C library can: threads would not use each other's."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def _free_on_machine() -> int:
    available = _table("/proc/meminfo").get("MemAvailable")
    return _free_pages() if available is None else available


def _free_pages() -> int:
    """Free memory by `os.sysconf`; half of the physical memory where only that is known."""
    known = getattr(os, "sysconf_names", {})
    if "SC_PAGE_SIZE" in known and "SC_AVPHYS_PAGES" in known:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if "SC_PAGE_SIZE" in known and "SC_PHYS_PAGES" in known:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    checks.fail("memory_budget", "be given on this system, whose free memory is unknown", None)


def _free_in_groups(process: str | Path = "/proc/self/cgroup", root: str | Path = "/sys/fs/cgroup") -> Iterator[int]:
    """What is left in every control group with a limit that this process is in, of both versions, parents included."""
    for line in _lines(process):
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, limit, usage = Path(root), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top, limit, usage = Path(root) / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        # In a container the path may be the host's, of which only the last part, or nothing, exists here.
        folder = top / group.strip("/")
        for place in (folder, *(parent for parent in folder.parents if parent.is_relative_to(top))):
            allowed, used = (_number(place / name) for name in (limit, usage))
            if allowed is not None and used is not None and allowed < UNLIMITED:
                # Cached files are counted as used, and given back when memory is short.
                stat = {name: int(value) for name, value in (entry.split() for entry in _lines(place / "memory.stat"))}
                yield allowed - used + stat.get("total_inactive_file", stat.get("inactive_file", 0))


def _free_in_limits() -> Iterator[int]:
    """What is left of this process's limits (`ulimit -v`, `ulimit -d`)."""
    if resource is None:
        return
    used = _table("/proc/self/status")
    for limit, name in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY and name in used:
            yield allowed - used[name]


def _table(path: str) -> dict[str, int]:
    """Entries "name: number kB" of a file under /proc, in bytes; empty where there is no such file."""
    rows = (re.match(r"(\w+):\s+(\d+) kB", line) for line in _lines(path))
    return {match[1]: int(match[2]) * 1024 for match in rows if match}


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    lines = _lines(path)
    return int(lines[0]) if lines and lines[0].isdigit() else None
