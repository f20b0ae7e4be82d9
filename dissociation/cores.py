"""Every core a device: what fills a CPU with programs that are too small to fill it by themselves.

XLA's CPU backend is one device, whose threads share out single operations. Those of small networks leave most cores
idle; members on devices of their own do not.
"""

import math
import os
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

    To be called before anything is computed: the number of devices is fixed by then. With
    `Layout(mesh=sharding.member_mesh())` `fit` lays members over the devices, with the same results bit for bit where
    members go in turn. No effect where as many devices are set or have started, nor where JAX computes on an
    accelerator. A number of devices in `XLA_FLAGS` gives way.

    Raises:
        RuntimeError: If JAX has started on a CPU with fewer devices.

    Example:
        >>> use_all_cores()  # doctest: +SKIP
    """
    cores = available_cores()
    if getattr(jax.config, "jax_num_cpu_devices", -1) >= cores:
        return
    try:
        jax.config.update("jax_num_cpu_devices", cores)
    except RuntimeError as started:
        have = jax.local_device_count("cpu")
        if jax.default_backend() != "cpu" or have >= cores:
            return
        raise RuntimeError(
            f"use_all_cores() must be called before JAX computes anything, got {have} device(s) that have started, for "
            f"{cores} cores. Restart the process (in a notebook, the kernel), and call it first."
        ) from started
