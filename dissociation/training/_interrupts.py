"""Handling of Ctrl-C and SIGTERM: saved work, and a sentence in place of a traceback.

In training the first signal is stored, and raised between two chunks: an exception in a handler can
be lost, in garbage collection for instance, and a chunk holds the only copy of its state. A second
Ctrl-C raises at once, and a second SIGTERM ends the process. In a command, a signal before `begin`
ends the program at once; afterwards the first raises `KeyboardInterrupt`. Only the standard library
is imported, so that the module loads first.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple, NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM)

NOTHING = "Nothing had started."

advice = NOTHING
"""Advice on how to resume, printed when an interrupted process ends."""


class _Block(NamedTuple):
    """Training, whose first signal waits."""

    signals: list[tuple[int, Any]]  # numbers and frames
    handlers: dict[int, Any]  # before the block
    waiting: list[None]  # not empty while the host waits, and nothing can be lost


_signals: list[int] = []
_saving = False
_program = ""
_block: _Block | None = None


def listen(program: str) -> None:
    """Install the handlers of both signals; call it first, in the main thread."""
    global _program
    _program = program
    for number in SIGNALS:
        signal.signal(number, _handle)


def begin() -> None:
    """Raise `KeyboardInterrupt` at the first signal from now on."""
    global _saving
    _saving = True


def status() -> int:
    """Return the exit status of an interrupted program: 130 after Ctrl-C, 143 after SIGTERM."""
    number = _signals[0] if _signals else signal.SIGINT
    return 128 + number


def heard() -> bool:
    """Return True if a signal has arrived."""
    return bool(_signals)


def end() -> None:
    """Restore the default handlers, or end the process here after an interrupt."""
    if _signals:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        # Without shutdown of the interpreter, under which a compiler's threads may still run.
        os._exit(status())
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: Any) -> None:
    _signals.append(number)
    if not _saving or len(_signals) > 1:
        _stop()
    raise KeyboardInterrupt


def _print(message: str) -> None:
    os.write(2, f"\n{_program}: {message}\n".encode())


def _stop() -> NoReturn:
    _print(f"stopped. {advice}")
    os._exit(status())


@contextmanager
def interruptible() -> Iterator[None]:
    """Store the first signal in the block until `check`.

    After the block, the handler of SIGTERM is called with it. Without a handler the process ends
    after the block. Only the main thread handles signals. Blocks may be nested.
    """
    global _block
    if _signals:
        raise KeyboardInterrupt  # a collection of garbage, say, has lost it
    if _block is not None or threading.current_thread() is not threading.main_thread():
        yield
        return

    handlers: dict[int, Any] = {}
    for number in SIGNALS:
        handler = signal.getsignal(number)
        if handler not in (None, signal.SIG_IGN):
            handlers[number] = handler
    block = _Block([], handlers, [])
    _block = block
    for number in handlers:
        signal.signal(number, _store)
    try:
        yield
    except BaseException:
        _close(block, SIGNALS[1:])
        raise
    _close(block, SIGNALS)


def _close(block: _Block, numbers: tuple[int, ...]) -> None:
    """Restore the handlers, and call that of the first signal, if it is one of `numbers`."""
    global _block
    _block = None
    for number, handler in block.handlers.items():
        if signal.getsignal(number) is _store:  # a callback may have set another
            signal.signal(number, handler)
    for number, frame in block.signals[:1]:
        if number in numbers:
            _call(block.handlers[number], number, frame)


def _call(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.raise_signal(number)


def _store(number: int, frame: Any) -> None:
    """Store the first signal, or raise it if nothing can be lost; a second one is not stored."""
    if _block is None:
        return
    _block.signals.append((number, frame))
    is_second = len(_block.signals) > 1
    if is_second and number == signal.SIGTERM:
        if _program:
            _signals.append(number)
            _stop()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    elif is_second:
        raise KeyboardInterrupt
    elif _block.waiting:
        check()
    elif _program:
        _print("stopping ...")


def check() -> None:
    """Raise the signal that was stored since `interruptible` began."""
    block = _block
    if block is None or not block.signals:
        return
    number, frame = block.signals[0]
    if number != signal.SIGINT:
        raise KeyboardInterrupt
    _call(block.handlers[number], number, frame)
    block.signals.clear()  # its handler raises nothing


@contextmanager
def waiting() -> Iterator[None]:
    """Raise signals at once while the host waits."""
    if _block is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    check()
    _block.waiting.append(None)
    try:
        yield
    finally:
        _block.waiting.clear()
