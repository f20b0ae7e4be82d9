"""Worker threads for the cores of a CPU, each calling one compiled function on a shard of the members.

XLA's CPU backend runs programs of one thread in order, and those of several threads in parallel, on one device.
"""

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from threadpoolctl import ThreadpoolController


def available_cores(group: str | Path = "/sys/fs/cgroup/cpu.max") -> int:
    """Return the number of this process' cores: its affinity, at most the control group's quota, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota, period = Path(group).read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def use_all_cores() -> None:
    """Make every core of this process a device of JAX's CPU backend.

    Call it before any computation, because JAX then fixes the number of devices. `fit`, and `bmap` over single members,
    train or map as many members in parallel as there are devices. The call replaces a number of devices in `XLA_FLAGS`,
    and keeps a larger one in JAX's configuration. It changes nothing if JAX has started with as many devices, or on an
    accelerator. SciPy's OpenBLAS, which decomposes matrices for JAX on a CPU, gets one thread, because several programs
    call it at once; it then rounds differently.

    Raises:
        RuntimeError: If JAX has started on a CPU with fewer devices.

    Example:
        >>> use_all_cores()  # doctest: +SKIP
    """
    cores = available_cores()
    wanted = max(cores, getattr(jax.config, "jax_num_cpu_devices", -1))
    try:
        for number in (wanted + 1, wanted):  # JAX accepts the number that is set even after it has started
            jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as started:
        have = jax.local_device_count("cpu")
        if jax.default_backend() != "cpu" or have >= cores:
            return
        raise RuntimeError(
            f"use_all_cores() must be called before JAX computes anything, got {have} device(s) that have started, "
            f"for {cores} cores. Restart the process (in a notebook, the kernel), and call it first."
        ) from started
    os.environ.setdefault(_POOL, str(2 * cores))
    import scipy.linalg  # noqa: F401  # loads OpenBLAS before its threads are set

    for library in ThreadpoolController().lib_controllers:  # NumPy's OpenBLAS keeps its threads
        if library.user_api == "blas" and "numpy.libs" not in library.filepath:
            library.set_num_threads(1)


_POOL = "PJRT_NPROC"

DECOMPOSITIONS = frozenset(
    ("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "schur", "svd")
    + ("triangular_solve", "tridiagonal", "tridiagonal_solve")
)
"""Operations that XLA computes by LAPACK on a CPU."""

CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
"""Operations that call the host."""


def runs_in_parallel(operations: Iterable[str]) -> bool:
    """Return True if worker threads can run programs of these operations in parallel without a deadlock."""
    # In a batch of decompositions XLA's threads wait for others: for ever, without more threads than programs.
    pool = os.environ.get(_POOL, "")
    enough = pool.isdecimal() and int(pool) > jax.local_device_count("cpu")
    return (CALLBACKS if enough else CALLBACKS | DECOMPOSITIONS).isdisjoint(operations)


def number_of_threads(num_members: int, operations: Iterable[str], arrays: Any) -> int:
    """Return the number of worker threads for sequential mapping of a program."""
    if any(getattr(jax.config, name) for name in ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")):
        return 1
    spread = any(isinstance(leaf, jax.Array) and len(leaf.devices()) > 1 for leaf in jax.tree.leaves(arrays))
    if jax.default_backend() != "cpu" or spread or not runs_in_parallel(operations):
        return 1
    return min(num_members, jax.local_device_count(), available_cores())


def compiled(function: Any, threads: int, *example: Any) -> Callable[..., Any]:
    """Compile a `filter_jit` function for arguments like `example`, if several threads call it."""
    return function if threads == 1 else function.lower(*example).compile()


def run_tasks(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Return the results of compiled tasks, `threads` of them at the same time."""
    if threads == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda task: jax.block_until_ready(task()), tasks))
