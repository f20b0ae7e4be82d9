"""The machine's cores and memory: worker threads for shards of members, and the largest batch.

XLA's CPU backend runs programs of one thread in order, and those of several threads in parallel, on
one device.
"""

import functools
import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
from threadpoolctl import ThreadpoolController

from dissociation._core import checks
from dissociation._core.memory import host_budget

logger = logging.getLogger(__name__)


def available_cores(group: str | Path = "/sys/fs/cgroup/cpu.max") -> int:
    """Return the number of this process' cores, at least one.

    The affinity and the control group's quota limit it.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = os.cpu_count() or 1
    if affinity is not None:
        cores = len(affinity(0))
    try:
        quota, period = Path(group).read_text().split()
    except (OSError, ValueError):
        return cores
    if quota == "max":
        return cores
    allowed = math.ceil(int(quota) / int(period))
    return max(1, min(cores, allowed))


def use_all_cores() -> None:
    """Make every core of this process a device of JAX's CPU backend.

    Call it before any computation, because JAX then fixes the number of devices. `fit`, and `bmap`
    over single members, train or map as many members in parallel as there are devices. The call
    replaces a number of devices in `XLA_FLAGS`, and keeps a larger one in JAX's configuration. It
    changes nothing if JAX has started with as many devices, or on an accelerator. SciPy's OpenBLAS,
    which decomposes matrices for JAX on a CPU, gets one thread, because several programs call it at
    once; it then rounds differently.

    Raises:
        RuntimeError: If JAX has started on a CPU with fewer devices.

    Example:
        >>> use_all_cores()  # doctest: +SKIP
    """
    cores = available_cores()
    num_devices = max(cores, getattr(jax.config, "jax_num_cpu_devices", -1))
    try:
        # After it has started, JAX accepts the number that is set, and raises for another one.
        jax.config.update("jax_num_cpu_devices", num_devices + 1)
        jax.config.update("jax_num_cpu_devices", num_devices)
    except RuntimeError as error:
        num_started = jax.local_device_count("cpu")
        if jax.default_backend() != "cpu" or num_started >= cores:
            return
        raise RuntimeError(
            f"use_all_cores() must be called before JAX computes anything, got {num_started} "
            f"device(s) that have started, for {cores} cores. Restart the process (in a notebook, "
            "the kernel), and call it first."
        ) from error
    os.environ.setdefault(_POOL, str(2 * cores))
    import scipy.linalg  # noqa: F401  # loads OpenBLAS before its threads are set

    for library in ThreadpoolController().lib_controllers:  # NumPy's OpenBLAS keeps its threads
        if library.user_api == "blas" and "numpy.libs" not in library.filepath:
            library.set_num_threads(1)


_POOL = "PJRT_NPROC"

DECOMPOSITIONS = frozenset(
    (
        "cholesky",
        "eig",
        "eigh",
        "geqp3",
        "geqrf",
        "hessenberg",
        "householder_product",
        "lu",
        "schur",
        "svd",
        "triangular_solve",
        "tridiagonal",
        "tridiagonal_solve",
    )
)
"""Operations that XLA computes by LAPACK on a CPU."""

CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
"""Operations that call the host."""


def runs_in_parallel(operations: Iterable[str]) -> bool:
    """Return True if worker threads can run programs of these operations without a deadlock."""
    # In a batch of decompositions XLA's threads wait for others: for ever, without more threads
    # than programs.
    pool = os.environ.get(_POOL, "")
    is_large = pool.isdecimal() and int(pool) > jax.local_device_count("cpu")
    excluded = CALLBACKS if is_large else CALLBACKS | DECOMPOSITIONS
    return excluded.isdisjoint(operations)


def number_of_threads(num_members: int, operations: Iterable[str], arrays: Any) -> int:
    """Return the number of worker threads for sequential mapping of a program."""
    debugging = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit")
    if any(getattr(jax.config, name) for name in debugging):
        return 1
    for leaf in jax.tree.leaves(arrays):
        if isinstance(leaf, jax.Array) and len(leaf.devices()) > 1:
            return 1
    if jax.default_backend() != "cpu" or not runs_in_parallel(operations):
        return 1
    return min(num_members, jax.local_device_count(), available_cores())


def compiled(function: Any, threads: int, *example: Any) -> Callable[..., Any]:
    """Compile a `filter_jit` function for arguments like `example`, if several threads call it."""
    if threads == 1:
        return function
    return function.lower(*example).compile()


def run_tasks(tasks: Sequence[Callable[[], Any]], threads: int) -> list[Any]:
    """Return the results of compiled tasks, `threads` of them at the same time."""
    if threads == 1 or len(tasks) == 1:
        return [task() for task in tasks]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda task: jax.block_until_ready(task()), tasks))


def program_bytes(executable: Any) -> int:
    """Return the bytes of a compiled program's temporaries and results."""
    usage = executable.memory_analysis()
    if usage is None:
        checks.fail(
            "batch_size", "be a number here", "'auto'", "This backend gives no memory analysis"
        )
    return usage.temp_size_in_bytes + usage.output_size_in_bytes - usage.alias_size_in_bytes


def free_memory(arrays: Iterable[jax.Array]) -> int:
    """Return nine tenths of the devices' free bytes, or half of the host's free bytes.

    Other programs run on the host.
    """
    devices = set().union(*(leaf.devices() for leaf in arrays)) or {jax.local_devices()[0]}
    free = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" in stats and "bytes_in_use" in stats:
            free.append(stats["bytes_limit"] - stats["bytes_in_use"])
    if len(free) == len(devices):
        return min(free) * 9 // 10
    return host_budget()


def largest(bytes_of: Callable[[int], int], size: int, budget: int) -> int:
    """Return a large batch size, at most `size`, whose program fits in `budget` bytes."""
    if bytes_of(size) <= budget:
        return size
    # Memory is linear in the batch size from 2 on.
    two = bytes_of(2)
    four = bytes_of(4)
    estimate = 2 + int(2 * (budget - two) // max(four - two, 1))
    batch = max(1, min(size - 1, estimate))
    while batch > 1 and bytes_of(batch) > budget:  # the line is not a bound
        batch = batch * 7 // 8
    if bytes_of(batch) > budget:
        checks.fail(
            "memory_budget",
            f"be at least {bytes_of(1)} bytes (one member at a time, all results)",
            budget,
        )
    return batch


def run_largest(
    function_of: Callable[[int], Callable[..., Any]], arrays: Any, size: int, budget: int | None
) -> Any:
    """Return `function_of(batch_size)(arrays)` for the largest batch within `budget` bytes."""

    @functools.cache
    def program_of(batch_size: int) -> tuple[Any, int]:
        # Closed-over arrays become arguments; as constants they would be folded and copied.
        converted = eqx.filter_closure_convert(function_of(batch_size), arrays)
        _refuse_traced(converted)
        jitted: Any = eqx.filter_jit(lambda function, arrays: function(arrays))
        program = jitted.lower(converted, arrays).compile()
        return functools.partial(program, converted, arrays), program_bytes(program.compiled)

    _refuse_traced(arrays)
    if budget is None:
        budget = free_memory(jax.tree.leaves(arrays))
    batch_size = largest(lambda batch_size: program_of(batch_size)[1], size, budget)
    run, num_bytes = program_of(batch_size)
    logger.info("batches of %d of %d members: %d bytes of %d", batch_size, size, num_bytes, budget)
    return run()


def _refuse_traced(tree: Any) -> None:
    if any(checks.is_traced(leaf) for leaf in jax.tree.leaves(tree)):
        raise ValueError(
            "`batch_size` must be a number or None inside jit, grad, vmap and other "
            "transformations, got 'auto'. The "
            "program that runs is not known there; choose with 'auto' outside, on concrete arrays."
        )
