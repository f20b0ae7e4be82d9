"""Every core of a CPU: how many there are, a device of each, and which programs may run beside one another.

XLA's CPU backend is one device, whose threads share out single operations. Those of small networks leave most cores
idle; several members side by side (`lanes`), or on devices of their own (`sharding.member_mesh`), do not.
"""

import contextlib
import ctypes
import math
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import jax


def available_cores(group: str | Path = "/sys/fs/cgroup/cpu.max") -> int:
    """How many cores this process may use: of its affinity, and no more than its control group's quota, at least one.

    Args:
        group: The file with the quota, if there is one.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity is not None else os.cpu_count() or 1
    try:
        quota, period = Path(group).read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, math.ceil(int(quota) / int(period))))


def use_all_cores() -> None:
    """Makes every core that this process may use a device of JAX's CPU backend.

    To be called before anything is computed: the number of devices is fixed by then. `fit`, and `bmap` over single
    members, then have as many members side by side as there are devices, with the same results bit for bit. No effect
    where as many devices are set or have started, nor where JAX computes on an accelerator. A number of devices in
    `XLA_FLAGS` gives way. SciPy's OpenBLAS, with which JAX decomposes matrices on a CPU, is left one thread, on which
    it rounds otherwise: several programs ask it at once. Processes that are started later inherit both settings of
    threads.

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
    if "scipy.linalg" not in sys.modules or _limit_loaded_blas():
        os.environ.setdefault(_BLAS, "1")  # which OpenBLAS reads when it is loaded


def _limit_loaded_blas() -> bool:
    """Gives SciPy's OpenBLAS, which is loaded already, one thread; returns whether there was one to give."""
    found = False
    with contextlib.suppress(OSError):
        names = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
        for name in names:
            if "openblas" in name and "scipy.libs" in name:
                limit = getattr(ctypes.CDLL(name), "scipy_openblas_set_num_threads", None)
                found = found or limit is not None
                if limit is not None:
                    limit(1)
    return found


_POOL, _BLAS = "PJRT_NPROC", "OPENBLAS_NUM_THREADS"

DECOMPOSITIONS = frozenset(
    ("cholesky", "eig", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product", "lu", "schur", "svd")
    + ("triangular_solve", "tridiagonal", "tridiagonal_solve")
)
"""Operations that XLA leaves to LAPACK on a CPU."""

CALLBACKS = frozenset(("pure_callback", "io_callback", "debug_callback", "debug_print"))
"""Operations that ask the host."""


def side_by_side(operations: Iterable[str]) -> bool:
    """Whether a CPU can run a program of such operations several times at once.

    XLA shares a batch of decompositions out to its threads and waits for them in one of these: as many programs as
    threads wait for ever. And OpenBLAS's own threads, asked from several sides, stand in each other's way. More threads
    of the one and a single one of the other, as `use_all_cores` has them, do neither.
    """
    asked = CALLBACKS if _decomposes() else CALLBACKS | DECOMPOSITIONS
    return asked.isdisjoint(operations)


def _decomposes() -> bool:
    pool = os.environ.get(_POOL, "")
    return pool.isdecimal() and int(pool) > jax.local_device_count("cpu") and os.environ.get(_BLAS) == "1"
