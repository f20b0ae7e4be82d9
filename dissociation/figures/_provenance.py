"""Environment, record and log of a run."""

import json
import logging
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from dissociation._core.files import write_bytes

try:
    import resource
except ImportError:  # not on Windows
    resource = None

RECORD, LOG = "run.json", "log.txt"

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
    with suppress(OSError, subprocess.SubprocessError):
        return (
            subprocess.run(
                words, capture_output=True, text=True, timeout=10, check=True
            ).stdout.strip()
            or None
        )


def peak_memory() -> dict[str, int]:
    """Return this process' peak memory in bytes, on the host and on devices that report it."""
    found = {}
    if resource is not None:
        scale = 1 if sys.platform == "darwin" else 1024
        found["host"] = scale * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for device in jax.local_devices():
        if peak := (device.memory_stats() or {}).get("peak_bytes_in_use"):
            found[str(device)] = peak
    return found


@contextmanager
def recorded(
    folder: str | os.PathLike[str], command: Sequence[str], facts: Mapping[str, Any]
) -> Iterator[None]:
    """Write the record of a run and the log of both packages to its folder while the block runs."""
    record = {"command": shlex.join(command), "began": _now(), **facts}
    began = time.perf_counter()

    def write(status: str, **more: Any) -> None:
        now = {"status": status, **record, "seconds": round(time.perf_counter() - began, 1), **more}
        write_bytes(Path(folder) / RECORD, (json.dumps(now, indent=2, default=str) + "\n").encode())

    write("running")
    handler = logging.FileHandler(Path(folder) / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    handler.handleError = lambda record: None  # a full disk is reported by the run itself
    loggers = [logging.getLogger(name) for name in ("dissociation", "koopman", "py.warnings")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    loggers[0].info("began: %s", record["command"])
    try:
        yield
    except BaseException as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        loggers[0].info("%s: %s: %s", status, type(error).__name__, error)
        with suppress(OSError):  # the disk may be the cause
            write(status, ended=_now(), error=f"{type(error).__name__}: {error}"[:500])
        raise
    else:
        loggers[0].info("done")
        write("done", ended=_now())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
        handler.close()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
