"""Several processes of one program: joining, and all-gathers of their values."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from dissociation._core import checks
from dissociation._core.validation import validated

_DAY = 86_400  # seconds
_BLOCK = 2**24  # bytes per all-gather; each device holds as many from every process
_joined = threading.Event()


@validated
def initialize(
    address: str | None = None, num_processes: int | None = None, process_id: int | None = None, *, timeout: int = 300
) -> None:
    """Join the other processes with `jax.distributed.initialize`, before any computation.

    Afterwards an uncaught error ends this process at once, and with it the others.

    Args:
        address: Only address at which process 0 listens, "host:port"; None takes all arguments from a cluster's
            environment.
        num_processes: Number of processes.
        process_id: Index of this process, from 0.
        timeout: Seconds to wait for all processes. Afterwards a `ConnectionError` is raised: end this process.
    """
    if address is not None and not (num_processes or 0) > (-1 if process_id is None else process_id) >= 0:
        given = f"num_processes {num_processes}, process_id {process_id}"
        checks.fail("address", "be given with `num_processes` and a `process_id` from 0 below it", given)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM
    failure: list[Exception] = []

    def end(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        sys.__excepthook__(kind, error, trace)
        leave(130 if issubclass(kind, KeyboardInterrupt) else 1)

    def join() -> None:
        where = {"coordinator_bind_address": address, "initialization_timeout": _DAY, "shutdown_timeout_seconds": _DAY}
        try:
            jax.distributed.initialize(address, num_processes, process_id, **where)
        except Exception as error:
            failure.append(error)

    # In a thread, because the runtime aborts the process at its own timeout.
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(timeout)
    if failure and isinstance(failure[0], ValueError):
        checks.fail("address", "be given, as no cluster's environment holds it", address)
    if failure:
        raise failure[0]
    if thread.is_alive():
        raise ConnectionError(f"Not all processes came to {address} within {timeout} s. Start all again.")
    _joined.set()
    sys.excepthook = end


def leave(status: int) -> None:
    """End a process that has joined others, without waiting; their next all-gather fails."""
    if _joined.is_set():
        sys.stdout.flush()
        sys.stderr.flush()
        # The runtime ends with process 0, so the others get time to print their errors.
        time.sleep(0 if jax.process_index() else 2)
        os._exit(status)


def all_gather(data: bytes, error: BaseException | None = None) -> list[bytes]:
    """Return the bytes of every process, in order; all processes must call it at the same place.

    All processes raise an `error`, the others as `ConnectionError` or `KeyboardInterrupt`.
    """
    message = b"+" + data if error is None else f"{type(error).__name__}: {error}".encode()
    try:
        lengths = process_allgather(np.frombuffer(len(message).to_bytes(8, "little"), np.uint8), tiled=True)
        sizes = [int(size) for size in lengths.view("<u8")]
        size = min(_BLOCK, 1 << (max(sizes) - 1).bit_length())  # few sizes, because each is compiled
        padded = np.frombuffer(message.ljust(-(-max(sizes) // size) * size, b"\0"), np.uint8)
        blocks = [process_allgather(block, tiled=True) for block in padded.reshape(-1, size)]
    except (jax.errors.JaxRuntimeError, ValueError) as lost:
        advice = "Start all processes again: they resume from their checkpoints."
        raise ConnectionError(f"An all-gather failed, perhaps because a process ended ({lost}). {advice}") from lost
    if error is not None:
        raise error
    rows = np.concatenate([block.reshape(-1, size) for block in blocks], axis=1)
    messages = [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]
    for i, other in enumerate(messages):
        if other.startswith(b"KeyboardInterrupt"):
            raise KeyboardInterrupt
        if not other.startswith(b"+"):
            raise ConnectionError(f"Process {i} failed: {other.decode()}")
    return [other[1:] for other in messages]


def all_values(value: Any, error: BaseException | None = None) -> list[Any]:
    """Return the JSON-compatible value of every process, see `all_gather`."""
    return [json.loads(data) for data in all_gather(json.dumps(value).encode(), error)]


def on_main(function: Callable[[], Any]) -> Any:
    """Call `function` in process 0, and return its JSON-compatible result, or raise, in all processes."""
    value, error = None, None
    try:
        value = function() if jax.process_index() == 0 else None
    except BaseException as raised:
        error = raised
    return all_values(value, error)[0]
