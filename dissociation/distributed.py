"""Several processes of one program: they start JAX's distributed runtime, and say to each other what each has found.

Every process runs the same program. Members are shared out: each process trains or measures its own on its own devices,
and nothing is communicated inside a program; what is found is exchanged between programs. Files are one process' alone,
`on_main`. A process that dies, or ends by an error, ends the others with a sentence that names it.
"""

import atexit
import base64
import builtins
import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dissociation import _compat, checks, interrupts
from dissociation.files import RefusedFile
from dissociation.validation import validated

logger = logging.getLogger(__name__)

HEARTBEAT = 60
"""Seconds after which a process that says nothing counts as dead, unless `initialize` is told otherwise."""

_QUIET = 5  # seconds of waiting for the others, before a line says so
_LONG = 10**9  # milliseconds; a process that is alive may compute for days before it answers
_LARGE, _LARGEST = 2**20, 2**24  # bytes: what goes through devices, and in pieces of at most this size
_ARRAY = "array of bytes"
_SAID, _ALIVE = "dissociation/said", "dissociation/alive"


class _Group:
    """This process among the others."""

    def __init__(self, client: Any, index: int, count: int, heartbeat: float):
        self.client, self.index, self.count, self.heartbeat = client, index, count, heartbeat
        self.exchanges, self.apart, self.ended = 0, 0, threading.Event()
        self.note, self.status = "", 1  # why this process ends before its work is done, and with which status
        self.name = f"on {socket.gethostname()}, process {os.getpid()}"


_group: _Group | None = None
_interrupted: list[int] = []  # signals that this process alone has heard
_stopping = False  # whether all have heard of one


@validated
def initialize(
    address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    heartbeat: int = HEARTBEAT,
    timeout: int = 300,
) -> None:
    """Joins the other processes, by `jax.distributed.initialize`; to be called before anything is computed.

    What is not given comes from the cluster's environment: SLURM, Open MPI, Kubernetes, TPU. From then on `fit` shares
    members out to the processes where its `layout` leaves open where they lie, or lays them over a mesh of all; every
    process has to call it with the same arguments. A second call does nothing.

    Args:
        address: Where process 0 listens to the others, "host:port".
        num_processes: How many there are.
        process_id: Which one this is, from 0.
        heartbeat: Seconds after which a process that says nothing counts as dead, and the others end, at least 5.
        timeout: Seconds to wait for all to come. After some, a line is logged that says for whom.

    Raises:
        ValueError: If the arguments contradict each other, or say too little where no cluster is found.
        RuntimeError: If JAX has computed something already.
        ConnectionError: If the others cannot be reached, or have not come in time.
    """
    global _group
    checks.check_count("heartbeat", heartbeat, minimum=5)
    checks.check_count("timeout", timeout, minimum=1)
    if address is not None and not address.rpartition(":")[2].isdecimal():
        checks.fail("address", "be host:port", repr(address))
    if num_processes is not None:
        checks.check_count("num_processes", num_processes, minimum=1)
    if process_id is not None and checks.check_count("process_id", process_id) >= (num_processes or process_id + 1):
        checks.fail("process_id", f"lie from 0 to {(num_processes or 1) - 1}", process_id)
    if not jax.distributed.is_initialized():
        _start(address, num_processes, process_id, heartbeat, timeout)
    if _group is None:
        global_state = _compat.global_state  # the runtime's key-value store and barriers have no public name
        _group = _Group(global_state.client, global_state.process_id, global_state.num_processes, heartbeat)
        if _group.count > 1:
            _watch_over(_group)
    for name, wanted, got in (
        ("num_processes", _group.count, num_processes),
        ("process_id", _group.index, process_id),
    ):
        if got not in (None, wanted):
            checks.fail(name, f"be {wanted}, as this process has joined already", got)


def _start(
    address: str | None, num_processes: int | None, process_id: int | None, heartbeat: int, timeout: int
) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM from `interrupts`

    def join() -> None:
        jax.distributed.initialize(
            address,
            num_processes,
            process_id,
            coordinator_bind_address=address,  # by default it listens on every interface, to anyone
            heartbeat_timeout_seconds=2 * heartbeat,  # after `_watch`, which says more
            initialization_timeout=_LONG // 1000,  # at the end of its own the runtime would abort the process
        )

    try:
        _in_time(join, timeout)
    except (ValueError, TypeError, KeyError) as error:
        given = f"address {address}, num_processes {num_processes}, process_id {process_id}"
        wanted = "be given with `num_processes` and `process_id` where no cluster's environment says them"
        checks.fail("address", wanted, f"{given} ({str(error).rstrip('.')})")
    except jax.errors.JaxRuntimeError as error:
        first = str(error).partition("\n")[0].rstrip(".")
        raise ConnectionError(f"The processes did not come together at {address}: {first}.") from error
    except RuntimeError as error:
        if "before" not in str(error):
            raise
        raise RuntimeError(
            "initialize() must be called before JAX computes anything, got a backend that has started. "
            "Restart the process, and call it first."
        ) from error


def _in_time(join: Callable[[], None], timeout: int) -> None:
    """Joins the others in a thread, which can be waited for, and left behind.

    Raises:
        ConnectionError: If that takes longer than `timeout`.
    """
    global_state = _compat.global_state
    failure: list[BaseException] = []

    def run() -> None:
        try:
            join()
        except BaseException as error:
            failure.append(error)

    def waits() -> str:
        where = global_state.coordinator_address
        if where is None:
            return "for the cluster's environment to say where the others are"
        listens = "process 0 listens" if global_state.process_id else "it listens"
        own = f"process {global_state.process_id} of {global_state.num_processes}"
        return f"as {own} for the others at {where}, where {listens}"

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(min(_QUIET, timeout))
    if thread.is_alive() and timeout > _QUIET:
        logger.warning("This process waits %s: for %d s at most, %d of them are over.", waits(), timeout, _QUIET)
        thread.join(timeout - _QUIET)
    if thread.is_alive():
        whom = waits()
        # What is computed from here on is computed alone.
        global_state.client, global_state.process_id, global_state.num_processes = None, 0, 1
        raise ConnectionError(
            f"The processes did not come together: this one has waited {timeout} s {whom}. Start all of them within "
            "`timeout`, with one address, each with a number of its own from 0."
        )
    if failure:
        raise failure[0]


def started() -> bool:
    """Whether `initialize` was called."""
    return _group is not None


def number() -> int:
    """How many processes work together: 1 without `initialize`, and inside of `on_main`."""
    return 1 if _group is None or _group.apart else _group.count


def index() -> int:
    """Which of them this is."""
    return 0 if _group is None else _group.index


def is_main() -> bool:
    """Whether this is the process that writes files: the first one."""
    return index() == 0


def exchange(value: Any, what: str = "") -> list[Any]:
    """What every process says, in their order; all must call it at the same place.

    Args:
        value: Arrays, numbers and text, in lists and dictionaries; tuples become lists.
        what: What is exchanged, which must be the same for all.

    Raises:
        RuntimeError: If another process exchanges something else, or a message holds anything else.
    """
    global _stopping
    if number() == 1 or _group is None:
        return [value]
    group, interrupted = _group, bool(_interrupted)
    group.exchanges += 1
    said = [_unpacked(data) for data in _gathered(group, _packed((what, interrupted, value)))]
    others = [(i, name) for i, (name, *_) in enumerate(said) if name != what]
    if others:
        wanted = f"run the same program, got {what!r} in process {group.index} and {others[0][1]!r} in {others[0][0]}"
        raise RuntimeError(f"All processes must {wanted}.")
    if any(one for _, one, _ in said):
        _interrupted.clear()
        _stopping = True
    return [one for *_, one in said]


def _packed(value: Any) -> bytes:
    """A message: JSON, with arrays in it. No pickle, which runs code of whoever wrote it."""

    def plain(part: Any) -> Any:
        array = np.asarray(part)
        if not isinstance(part, np.ndarray | np.generic | jax.Array) or array.dtype.hasobject:
            checks.fail_kind("value", "hold arrays, numbers and text", f"an object of type {type(part).__name__}")
        dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
        return {_ARRAY: base64.b64encode(array.tobytes()).decode(), "dtype": dtype, "shape": array.shape}

    return json.dumps(value, default=plain).encode()


def _unpacked(data: bytes) -> Any:
    def whole(part: dict[str, Any]) -> Any:
        if _ARRAY not in part:
            return part
        contents = np.frombuffer(base64.b64decode(part[_ARRAY]), jnp.dtype(part["dtype"]))
        return contents.reshape(part["shape"]).copy()

    try:
        return json.loads(data, object_hook=whole)
    except Exception as error:
        raise RuntimeError("All processes must run one program, got a message not of arrays and JSON.") from error


def _gathered(group: _Group, data: bytes) -> list[bytes]:
    """The bytes of all: few through the runtime's store, many through the devices."""
    few = len(data) <= _LARGE
    here, client = f"{_SAID}/{group.exchanges}", group.client
    try:
        client.key_value_set_bytes(f"{here}/{group.index}", b"=" + data if few else str(len(data)).encode())
        client.wait_at_barrier(f"{here} ", _LONG)
        heads = {int(name.rpartition("/")[2]): head for name, head in client.key_value_dir_get_bytes(f"{here}/")}
        if group.index == 0 and group.exchanges > 1:  # all have come here, so all have read that
            client.key_value_delete(f"{_SAID}/{group.exchanges - 1}/")
    except jax.errors.JaxRuntimeError:
        _leave(group, _LOST)
    ordered = [heads[i] for i in range(group.count)]
    sizes = [0 if head[:1] == b"=" else int(head) for head in ordered]
    if not max(sizes):
        return [head[1:] for head in ordered]
    try:
        rows = _through_devices(group, b"" if few else data, max(sizes))
    except (jax.errors.JaxRuntimeError, ValueError) as error:  # which of them depends on when it is noticed
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        # Another one has died in the middle of it. Who that was, the watch says within the heartbeat, or the runtime.
        time.sleep(2 * group.heartbeat)
        _leave(group, f"an exchange with the others has failed: {str(error).splitlines()[0][:200]}")
    return [row[:size] if size else head[1:] for row, size, head in zip(rows, sizes, ordered, strict=True)]


def _through_devices(group: _Group, data: bytes, longest: int) -> list[bytes]:
    size = min(_LARGEST, 1 << (longest - 1).bit_length())
    devices = [next(d for d in jax.devices() if d.process_index == i) for i in range(group.count)]
    mesh = Mesh(np.array(devices), ("processes",))
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("processes"), PartitionSpec()))
    pieces = []
    for start in range(0, longest, size):
        row = np.zeros((1, size), np.uint8)
        own = np.frombuffer(data[start : start + size], np.uint8)
        row[0, : len(own)] = own
        placed = jax.make_array_from_process_local_data(split, row, (group.count, size))
        pieces.append(np.asarray(jax.jit(_same, out_shardings=whole)(placed).addressable_data(0)))
    return [row.tobytes() for row in np.concatenate(pieces, axis=1)]


def _same(value: Any) -> Any:
    return value


def on_main(function: Callable[[], Any], *, interruptible: bool = True) -> Any:
    """What `function` returns or raises in the first process, which alone calls it, in all of them.

    Inside of it the first process works alone: `number()` is 1, and nothing is shared out.

    Args:
        function: Returns what `exchange` takes.
        interruptible: Whether an interrupt of one process, of which `exchange` has told all, is raised here.
    """
    global _stopping
    if number() == 1 or _group is None:
        return function()
    returned, raised = None, None
    if is_main():
        _group.apart += 1
        try:
            returned = function()
        except BaseException as error:
            raised = error
        finally:
            _group.apart -= 1
    words = None if raised is None else (type(raised).__name__, str(raised))
    said, words = exchange((returned, words), "on_main")[0]
    if _stopping and interruptible:
        _stopping = False
        raise everywhere(KeyboardInterrupt())
    if words is not None:
        raise everywhere(raised or _error_of(*words))
    return returned if is_main() else said


def _error_of(name: str, text: str) -> BaseException:
    """An error of process 0, of its class or, if that is the user's own, a `RuntimeError`."""
    kind = {"WrongValue": checks.WrongValue, "RefusedFile": RefusedFile}.get(name) or getattr(builtins, name, None)
    with contextlib.suppress(TypeError):
        if isinstance(kind, type) and issubclass(kind, BaseException):
            return kind(text)
    return RuntimeError(f"process 0: {name}: {text}")


def everywhere(error: BaseException) -> BaseException:
    """An error that all processes raise at this place."""
    error.__dict__["everywhere"] = True
    return error


def is_everywhere(error: BaseException) -> bool:
    """Whether an error is raised in all processes at this place, so that they can still act together."""
    return number() == 1 or "everywhere" in error.__dict__


@contextlib.contextmanager
def interrupts_together() -> Iterator[None]:
    """Inside, an interrupt (Ctrl-C) of one process is raised in all of them at once, by an `on_main`."""
    if number() == 1 or threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.signal(signal.SIGINT, lambda sent, frame: _interrupted.append(sent))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if _interrupted and callable(handler):
            handler(_interrupted.pop(), None)


def failed(what: object, status: int = 1) -> None:
    """Tells the others that this process ends before its work is done: they end as well.

    Args:
        what: Why.
        status: The exit status of this process.
    """
    if _group is not None and _group.count > 1 and not _group.note:
        _group.note, _group.status = " ".join(f"!{what}".split())[:500], status
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _say_alive(_group, _group.note)


def leaving(error: BaseException, status: int) -> bool:
    """Before this process ends by an error: tells the others; returns whether it is this one that should say why.

    Args:
        error: Why; of one that is raised everywhere the first process should speak.
        status: The exit status.
    """
    if number() == 1 or _group is None:
        return True
    if not is_everywhere(error):
        failed(f"{type(error).__name__}: {error}", status)
        return True
    _group.note, _group.status = "!", status
    exchange(None, "end")
    return is_main()


def _say_alive(group: _Group, text: str) -> None:
    group.client.key_value_set(f"{_ALIVE}/{group.index}", f"{group.name}|{text}", allow_overwrite=True)


def _watch_over(group: _Group) -> None:
    """Ends this process when another one has died or failed, before the runtime does without a word of advice."""
    watch = threading.Thread(target=_watch, args=(group,), daemon=True)
    watch.start()
    inherited = sys.excepthook

    def told(kind: Any, error: Any, trace: Any) -> None:
        inherited(kind, error, trace)
        failed(f"{kind.__name__}: {error}")

    sys.excepthook = told
    # Where the first process dies the runtime aborts the others from a thread of its own, at once.
    library, answer = ctypes.CDLL(None), ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: _leave(group, _LOST))
    library.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    library.signal(int(signal.SIGABRT), ctypes.cast(answer, ctypes.c_void_p))

    def end(_kept: Any = answer) -> None:
        if group.note:
            _leave(group)
        jax.distributed.shutdown()  # waits for the others, under the eyes of the watch
        group.ended.set()
        watch.join()
        library.signal(int(signal.SIGABRT), None)

    atexit.register(end)


_LOST = "the runtime has failed, most likely because process 0, which leads it, has died"


def _watch(group: _Group) -> None:
    seen = {i: ("", time.monotonic()) for i in range(group.count)}
    beat = 0
    while not group.ended.wait(group.heartbeat / 10 if beat else 0):
        beat += 1
        try:
            _say_alive(group, group.note or str(beat))
            said = group.client.key_value_dir_get(f"{_ALIVE}/")
        except jax.errors.JaxRuntimeError:
            return  # the runtime has failed, and says so itself
        if group.note:  # it is leaving anyway
            return
        for name, words in said:
            other, now = int(name.rpartition("/")[2]), time.monotonic()
            where, _, text = words.partition("|")
            if words != seen[other][0]:
                seen[other] = words, now
            if text.startswith("!"):
                _leave(group, f"process {other} ({where}) has ended: {text[1:].rstrip('.')}")
            if (silent := now - seen[other][1]) > group.heartbeat:
                _leave(group, f"process {other} ({where}) has died: nothing was heard of it for {silent:.0f} s")


def _leave(group: _Group, why: str = "") -> NoReturn:
    """Ends this process at once: nothing can be done without the others, and files are whole at any moment."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if not group.note:
        advice = interrupts.advice
        if advice == interrupts.NOTHING:
            advice = "Start all processes again: what has a checkpoint goes on from it."
        os.write(2, f"\nprocess {group.index} of {group.count} stops: {why}. {advice}\n".encode())
    if group.index == 0 and why != _LOST:  # it holds what the others are told: let them hear it
        time.sleep(0.2 * group.heartbeat)
    os._exit(group.status)
