"""Signals during a run: held back while a chunk runs, and SIGTERM as an interrupt."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


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
