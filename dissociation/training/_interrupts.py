"""Ctrl-C and SIGTERM in a program of its own: heard at any moment, answered in a sentence, never by a traceback.

While a program starts, a signal ends it at once. Once there is something to save (`begin`), the signal becomes a
`KeyboardInterrupt` where the main thread stands, and a second thread sees to it that the process ends: a compiler is
deaf for as long as it runs, and an exception can be lost in a callback. That is safe at any moment, as files are
replaced as a whole. This module imports no more than the standard library, so that it is there first.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)

grace = 10.0
"""Seconds that a program has to save what it has, after the first signal."""

NOTHING = "Nothing had begun."

advice = NOTHING
"""How to go on after an interrupt: told when the process ends."""

_heard: list[int] = []
_saving = False
_program = ""


def listen(program: str) -> None:
    """Takes the two signals over; call it first, in the main thread."""
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
    """From now on a signal raises `KeyboardInterrupt`, and the process has `grace` seconds to end."""
    global _saving
    _saving = True


def status() -> int:
    """The exit status of a program that was interrupted: 130 after Ctrl-C, 143 after SIGTERM."""
    return 128 + (_heard[0] if _heard else signal.SIGINT)


def heard() -> bool:
    """Whether a signal has come, whatever became of its exception."""
    return bool(_heard)


def end() -> None:
    """From now on signals end the process as they do by default: there is nothing left to save.

    After an interrupt the process ends here: a compiler's threads may still run, and taking the interpreter down under
    them is no end that a program survives.
    """
    if _heard:
        with contextlib.suppress(OSError, ValueError):
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
    """As an interrupt, by whatever handler it has just now: training puts it off to the end of its steps."""
    _note(number)
    signal.raise_signal(signal.SIGINT)


def _note(number: int) -> None:
    """Remembers the first signal; the handlers and the second thread race for it."""
    if not _heard:
        _heard.append(number)


def _lost(unraisable: Any) -> None:
    """An exception that no one can catch any more: an interrupt ends the process then, all else is shown as ever."""
    if _heard and issubclass(unraisable.exc_type, KeyboardInterrupt):
        _leave()
    sys.__unraisablehook__(unraisable)


def _watch(reading: socket.socket, _keep: socket.socket) -> None:
    """Signals as they come, also while the main thread is deaf; the third one of an impatient user ends the process."""
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
                threading.Thread(target=_leave_later, daemon=True).start()


def _leave_later() -> None:
    time.sleep(grace)
    _leave()


def _say(words: str) -> None:
    os.write(2, f"\n{_program}: {words}\n".encode())


def _leave() -> None:
    _say(f"stopped. {advice}")
    os._exit(status())
