"""Environment of a run."""

import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

try:
    import resource
except ImportError:  # not on Windows
    resource = None

PACKAGES = ("dissociation", "jax", "jaxlib", "equinox", "optax", "numpy")

SWITCHES = ("jax_enable_x64", "jax_default_matmul_precision", "jax_num_cpu_devices")
"""Settings of JAX that change numbers or the place of computation."""


def environment() -> dict[str, Any]:
    """Return versions, devices, switches of JAX and XLA, the machine, and the commit of a checkout, for JSON."""
    found = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in PACKAGES},
        "devices": [str(device) for device in jax.devices()],
        "kind of device": jax.devices()[0].device_kind,
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        **{name: jax.config.values[name] for name in SWITCHES if name in jax.config.values},
        "machine": f"{platform.platform()}, {os.cpu_count()} processors",
        "commit": commit(),
    }
    return {name: value for name, value in found.items() if value not in ("", None)}


def commit() -> str | None:
    """Return the commit of the checkout, with "-dirty" if files differ; None without a checkout."""
    top = Path(__file__).parents[2]
    if not (top / ".git").exists():
        return None
    words = ["git", "-C", str(top), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None


def peak_memory() -> dict[str, int]:
    """Return this process' peak memory in bytes, on the host and on devices that report it."""
    found = {}
    if resource is not None:
        scale = 1 if sys.platform == "darwin" else 1024
        found["host"] = scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            found[str(device)] = stats["peak_bytes_in_use"]
    return found
