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

    heard: list[tuple[int, Any]]
    before: dict[int, Any]  # handlers
    waiting: list[None]  # not empty while the host waits, and nothing can be lost


_heard: list[int] = []
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
        os._exit(
            status()
        )  # without shutdown of the interpreter, under which a compiler's threads may still run
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _handle(number: int, frame: Any) -> None:
    _heard.append(number)
    if not _saving or len(_heard) > 1:
        _leave()
    raise KeyboardInterrupt


def _say(words: str) -> None:
    os.write(2, f"\n{_program}: {words}\n".encode())


def _leave() -> NoReturn:
    _say(f"stopped. {advice}")
    os._exit(status())


@contextmanager
def interruptible() -> Iterator[None]:
    """Store the first signal in the block until `check`; after the block, call the handler of SIGTERM with it.

    Without a handler the process ends after the block. Only the main thread handles signals. Blocks
    may be nested.
    """
    global _block
    if _heard:
        raise KeyboardInterrupt  # a collection of garbage, say, has lost it
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}
    before = {
        number: handler
        for number, handler in before.items()
        if handler not in (None, signal.SIG_IGN)
    }
    if _block is not None or threading.current_thread() is not threading.main_thread():
        yield
        return
    block = _block = _Block([], before, [])
    for number in before:
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
    for number, handler in block.before.items():
        if signal.getsignal(number) is _store:  # a callback may have set another
            signal.signal(number, handler)
    for number, frame in block.heard[:1]:
        if number in numbers:
            _call(block.before[number], number, frame)


def _call(handler: Any, number: int, frame: Any) -> None:
    if callable(handler):
        handler(number, frame)
    else:
        signal.raise_signal(number)


def _store(number: int, frame: Any) -> None:
    """Store the first signal, or raise it if nothing can be lost; a second one is not stored."""
    if _block is None:
        return
    _block.heard.append((number, frame))
    if len(_block.heard) > 1 and number == signal.SIGTERM:
        if _program:
            _heard.append(number)
            _leave()
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    elif len(_block.heard) > 1:
        raise KeyboardInterrupt
    elif _block.waiting:
        check()
    elif _program:
        _say("stopping ...")


def check() -> None:
    """Raise the signal that was stored since `interruptible` began."""
    for number, frame in _block.heard[:1] if _block is not None else ():
        if number == signal.SIGINT and _block is not None:
            _call(_block.before[number], number, frame)
            _block.heard.clear()  # its handler raises nothing
        else:
            raise KeyboardInterrupt


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
