"""Cores of a CPU: how many there are, one device for each, and which programs may run in parallel."""

import math
import os
from collections.abc import Iterable
from pathlib import Path

import jax
from threadpoolctl import ThreadpoolController


def available_cores(group: str | Path = "/sys/fs/cgroup/cpu.max") -> int:
    """Return the number of cores of this process: of its affinity, at most its control group's quota, at least one."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota, period = Path(group).read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def use_all_cores() -> None:
    """Make every core that this process may use a device of JAX's CPU backend.

    Call it before anything is computed: JAX fixes the number of devices then. `fit`, and `bmap` over single members,
    train or map as many members in parallel as there are devices. It changes nothing if as many devices are set or have
    started, or if JAX computes on an accelerator. A number of devices in `XLA_FLAGS` gives way. SciPy's OpenBLAS, with
    which JAX decomposes matrices on a CPU, gets one thread, on which it rounds otherwise: several programs call it at
    once.

    Raises:
        RuntimeError: If JAX has started on a CPU with fewer devices.

    Example:
        >>> use_all_cores()  # doctest: +SKIP
    """
    cores = available_cores()
    wanted = max(cores, getattr(jax.config, "jax_num_cpu_devices", -1))
    try:
        for number in (wanted + 1, wanted):  # the number that is set would be taken where JAX has started, too
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
    import scipy.linalg  # noqa: F401  # loads the OpenBLAS whose threads are set; JAX would load it later

    for library in ThreadpoolController().lib_controllers:  # NumPy's keeps its threads
        if library.user_api == "blas" and "numpy.libs" not in library.filepath:
            library.set_num_threads(1)


_POOL = "PJRT_NPROC"

DECOMPOSITIONS = frozenset(
    ("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "schur", "svd")
    + ("triangular_solve", "tridiagonal", "tridiagonal_solve")
)
"""Operations that XLA leaves to LAPACK on a CPU."""

CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
"""Operations that call the host."""


def runs_in_parallel(operations: Iterable[str]) -> bool:
    """Return True if a CPU can run several programs of such operations at once.

    A thread of XLA waits for others with a batch of decompositions: without more threads than programs, for ever.
    """
    pool = os.environ.get(_POOL, "")
    enough = pool.isdecimal() and int(pool) > jax.local_device_count("cpu")
    return (CALLBACKS if enough else CALLBACKS | DECOMPOSITIONS).isdisjoint(operations)
