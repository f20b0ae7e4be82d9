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

RECORD = "run.json"
LOG = "log.txt"

PACKAGES = ("dissociation", "jax", "jaxlib", "equinox", "optax", "numpy")

SWITCHES = ("jax_enable_x64", "jax_default_matmul_precision", "jax_num_cpu_devices")
"""Settings of JAX that change numbers or the place of computation."""


def environment() -> dict[str, Any]:
    """Return versions, devices, switches of JAX and XLA, machine, and commit, for JSON."""
    facts = {}
    facts["python"] = platform.python_version()
    for name in PACKAGES:
        facts[name] = metadata.version(name)
    devices = jax.devices()
    facts["devices"] = [str(device) for device in devices]
    facts["kind of device"] = devices[0].device_kind
    facts["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    for name in SWITCHES:
        facts[name] = jax.config.values.get(name)
    facts["machine"] = f"{platform.platform()}, {os.cpu_count()} processors"
    facts["commit"] = commit()
    return {name: fact for name, fact in facts.items() if fact not in ("", None)}


def commit() -> str | None:
    """Return the commit of the checkout, with "-dirty" if files differ; None without a checkout."""
    top = Path(__file__).parents[2]
    if not (top / ".git").exists():
        return None
    words = ["git", "-C", str(top), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with suppress(OSError, subprocess.SubprocessError):
        process = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True)
        return process.stdout.strip() or None


def peak_memory() -> dict[str, int]:
    """Return this process' peak memory in bytes, on the host and on devices that report it."""
    peak_of_place = {}
    if resource is not None:
        unit = 1 if sys.platform == "darwin" else 1024
        usage = resource.getrusage(resource.RUSAGE_SELF)
        peak_of_place["host"] = unit * usage.ru_maxrss
    for device in jax.local_devices():
        statistics = device.memory_stats() or {}
        peak = statistics.get("peak_bytes_in_use")
        if peak:
            peak_of_place[str(device)] = peak
    return peak_of_place


@contextmanager
def recorded(
    folder: str | os.PathLike[str], command: Sequence[str], facts: Mapping[str, Any]
) -> Iterator[None]:
    """Write the record of a run and the log of both packages to its folder while the block runs."""
    record = {"command": shlex.join(command), "began": _now(), **facts}
    began = time.perf_counter()

    def write(status: str, **outcome: Any) -> None:
        seconds = round(time.perf_counter() - began, 1)
        document = {"status": status, **record, "seconds": seconds, **outcome}
        text = json.dumps(document, indent=2, default=str) + "\n"
        write_bytes(Path(folder) / RECORD, text.encode())

    write("running")
    handler = logging.FileHandler(Path(folder) / LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(message)s"))
    handler.handleError = lambda record: None  # a full disk is reported by the run itself
    loggers = [logging.getLogger(name) for name in ("dissociation", "koopman", "py.warnings")]
    package_logger = loggers[0]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    package_logger.info("began: %s", record["command"])
    try:
        yield
    except BaseException as error:
        status = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else "failed"
        message = f"{type(error).__name__}: {error}"
        package_logger.info("%s: %s", status, message)
        with suppress(OSError):  # the disk may be the cause
            write(status, ended=_now(), error=message[:500])
        raise
    else:
        package_logger.info("done")
        write("done", ended=_now())
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
        handler.close()


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")
