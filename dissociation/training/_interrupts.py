"""Handling of Ctrl-C and SIGTERM in a program: a sentence, never a traceback.

Before `begin` a signal ends the program at once. Afterwards it raises `KeyboardInterrupt`, and a second thread ends the
process after `grace` seconds, because a compiler does not react and a callback can lose an exception. Files are
replaced as a whole, so this is safe. Only the standard library is imported, so that the module loads first.
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
"""Seconds for saving after the first signal."""

NOTHING = "Nothing had started."

advice = NOTHING
"""Advice on how to resume, printed when an interrupted process ends."""

_heard: list[int] = []
_saving = False
_program = ""


def listen(program: str) -> None:
    """Install the handlers of both signals; call it first, in the main thread."""
    global _program
    _program = program
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_watch, args=(reading, writing), daemon=True).start()


def begin() -> None:
    """Raise `KeyboardInterrupt` at a signal from now on, and end the process `grace` seconds later."""
    global _saving
    _saving = True


def status() -> int:
    """Return the exit status of an interrupted program: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (_heard[0] if _heard else signal.SIGINT)


def heard() -> bool:
    """Return True if a signal has arrived."""
    return bool(_heard)


def end() -> None:
    """Restore the default handlers, or end the process here after an interrupt."""
    if _heard:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status())  # without shutdown of the interpreter, under which a compiler's threads may still run
    signal.set_wakeup_fd(-1)
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _interrupt(number: int, frame: Any) -> None:
    _note(number)
    if not _saving:
        _leave()
    raise KeyboardInterrupt


def _terminate(number: int, frame: Any) -> None:
    """Interrupt by the current handler of SIGINT, which training delays."""
    _note(number)
    signal.raise_signal(signal.SIGINT)


def _note(number: int) -> None:
    """Store the first signal; handlers and the second thread race for it."""
    if not _heard:
        _heard.append(number)


def _watch(reading: socket.socket, _keep: socket.socket) -> None:
    """Handle signals while the main thread does not react; the third ends the process."""
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
    """Delay signals until the block ends or calls the function, so that no donated state is lost."""
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
    """Raise `KeyboardInterrupt` at the first SIGTERM in the block; after the block, call the previous handler with it.

    Without a previous handler the process ends after the block. Only the main thread can handle signals.
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
        if signal.getsignal(signal.SIGTERM) is interrupt:  # a callback may have set another
            signal.signal(signal.SIGTERM, before)
        if heard and callable(before):
            before(*heard[0])
        elif heard:
            signal.raise_signal(signal.SIGTERM)
