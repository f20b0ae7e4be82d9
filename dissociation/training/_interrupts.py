"""Ctrl-C and SIGTERM in a program of its own: heard at any moment, answered in a sentence, never by a traceback.

Before `begin` a signal ends the program at once. Afterwards it raises `KeyboardInterrupt`, and a second thread ends
the process after `grace`: a compiler is deaf, and an exception can be lost in a callback. Files are replaced as a
whole, so this is safe. This module imports only the standard library, so that it is there first.
"""

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

grace = 10.0
"""Seconds that a program has to save what it has, after the first signal."""

NOTHING = "Nothing had begun."

advice = NOTHING
"""Advice on how to resume, printed when an interrupted process ends."""

_heard: list[int] = []
_saving = False
_program = ""


def listen(program: str) -> None:
    """Take the two signals over; call it first, in the main thread."""
    global _program
    _program = program
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _lost
    threading.Thread(target=_watch, args=(reading, writing), daemon=True).start()


def begin() -> None:
    """Let a signal raise `KeyboardInterrupt` from now on, and end the process after `grace` seconds."""
    global _saving
    _saving = True


def status() -> int:
    """Return the exit status of a program that was interrupted: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (_heard[0] if _heard else signal.SIGINT)


def heard() -> bool:
    """Return True if a signal has come."""
    return bool(_heard)


def end() -> None:
    """Let signals end the process as by default, or end it here after an interrupt.

    The interpreter is not taken down then: a compiler's threads may still run under it.
    """
    if _heard:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status())
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: Any) -> None:
    _note(number)
    if not _saving:
        _leave()
    raise KeyboardInterrupt


def _terminate(number: int, frame: Any) -> None:
    """Interrupt by the handler of the moment: training delays it to the end of its steps."""
    _note(number)
    signal.raise_signal(signal.SIGINT)


def _note(number: int) -> None:
    """Store the first signal; the handlers and the second thread race for it."""
    if not _heard:
        _heard.append(number)


def _lost(unraisable: Any) -> None:
    """End the process at an interrupt that no one can catch any more, and show all other exceptions."""
    if _heard and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _watch(reading: socket.socket, _keep: socket.socket) -> None:
    """Take signals while the main thread is deaf; the third one ends the process."""
    count = 0
    while True:
        for number in reading.recv(64):
            if number not in SIGNALS:
                continue
            _note(number)
            count += 1
            if not _saving or count > 2:
                _leave()
            if count == 1:
                _say("stopping ...")
                later = threading.Timer(grace, _leave)
                later.daemon = True
                later.start()


def _say(words: str) -> None:
    os.write(2, f"\n{_program}: {words}\n".encode())


def _leave() -> None:
    _say(f"stopped. {advice}")
    os._exit(status())


@contextmanager
def interrupts_later() -> Iterator[Callable[[], None]]:
    """Hold a signal back until the block ends, or calls the function: a chunk's donated state must not be lost."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    heard: list[tuple[int, Any]] = []
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle() -> None:
        first, heard[:] = heard[:1], []
        for number, frame in first:
            handlers[number](number, frame)

    with ExitStack() as held:
        for number in [number for number, handler in handlers.items() if callable(handler)]:
            held.callback(signal.signal, number, handlers[number])
            signal.signal(number, lambda number, frame: heard.append((number, frame)))
        yield handle
    handle()


@contextmanager
def terminations_interrupt() -> Iterator[None]:
    """Let the first SIGTERM in the block be a `KeyboardInterrupt`, and call the handler of before after the block.

    Without one the process ends then. Only the main thread can take signals.
    """
    before = signal.getsignal(signal.SIGTERM)
    if threading.current_thread() is not threading.main_thread() or before in (None, signal.SIG_IGN):
        yield
        return
    heard: list[tuple[int, Any]] = []

    def interrupt(number: int, frame: Any) -> None:
        heard.append((number, frame))
        if len(heard) == 1:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is interrupt:  # or somebody has set another one meanwhile
            signal.signal(signal.SIGTERM, before)
        if heard and callable(before):
            before(*heard[0])
        elif heard:
            signal.raise_signal(signal.SIGTERM)
