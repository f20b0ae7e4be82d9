"""Progress meters driven from the host: none, in a terminal, in a notebook, or the caller's own.

If stderr is a file, a bar becomes occasional lines. The host advances the meter between compiled
chunks.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from dissociation._core import checks
from dissociation.training._records import Callback, numbers_of

MAX_DESCRIBED = 6
"""Number of recorded values that progress shows by default."""


class Meter:
    """Base of meters, which shows nothing; any object with these two methods is a meter."""

    def advance(self, step: int, text: str) -> None:
        """Show `step` finished steps of the total and a short text; an empty text keeps the last one."""

    def close(self) -> None:
        """End the meter; called once, also after an error."""


MeterFactory = Callable[[int, str], Any]
"""Function from the total number of steps and a description to a `Meter`, or to any object with its methods."""


class BarMeter(Meter):
    """Meter with a bar of a tqdm class; in a file, a line every `SECONDS` seconds and one at the end."""

    SECONDS = 10.0

    def __init__(self, total: int, description: str, bar: Callable[..., Any] = tqdm):
        self._in_file = bar is tqdm and not sys.stderr.isatty()
        options = {"file": sys.stderr, "dynamic_ncols": True, "mininterval": 0.2, "smoothing": 0}
        self._bar = bar(
            total=total, desc=description, delay=np.inf if self._in_file else 0.0, **options
        )
        self._started, self._shown, self._last = False, -np.inf, None

    def advance(self, step: int, text: str) -> None:
        if text:
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        if step and not self._started:  # the rate leaves compilation out
            self._started, self._bar.initial, self._bar.start_t = True, step, time.time()
        if not self._in_file:
            self._bar.refresh()
        elif time.monotonic() - self._shown >= self.SECONDS:
            self._write()

    def _write(self) -> None:
        if (state := (self._bar.n, self._bar.postfix)) != self._last:
            self._shown, self._last = time.monotonic(), state
            sys.stderr.write(f"{self._bar}\n")
            sys.stderr.flush()

    def close(self) -> None:
        """Close the bar; its last state stays on the screen."""
        if self._in_file:
            self._write()
        self._bar.close()


class LateMeter(Meter):
    """Meter that opens at the first `advance` after `SECONDS` seconds."""

    SECONDS = 4.0

    def __init__(self, total: int, description: str):
        self._options, self._text = (total, description), ""
        self._meter, self._begun = None, time.monotonic()

    def advance(self, step: int, text: str) -> None:
        self._text = text or self._text
        if self._meter is None and time.monotonic() - self._begun >= self.SECONDS:
            self._meter = _auto_meter(*self._options)
        if self._meter is not None:
            self._meter.advance(step, self._text)

    def close(self) -> None:
        """Close the meter, if it has opened."""
        if self._meter is not None:
            self._meter.close()


def _auto_meter(total: int, description: str) -> Meter:
    from tqdm.auto import tqdm as auto_bar
    from tqdm.notebook import tqdm as notebook_bar

    return BarMeter(total, description, auto_bar if issubclass(auto_bar, notebook_bar) else tqdm)


_NAMED: dict[str, MeterFactory] = {"terminal": BarMeter, "auto": _auto_meter, "late": LateMeter}


def open_meter(progress: str | MeterFactory | None, total: int, description: str) -> Any:
    """Open a meter.

    Args:
        progress: None for silence, "terminal", "auto" (a terminal or a notebook), "late" ("auto",
            if the work still runs after 4 seconds), or a factory `(total, description) -> Meter`.
        total: Total number of steps.
        description: Short text in front of the bar.

    Example:
        >>> meter = open_meter(None, 10, "training")
        >>> meter.advance(5, "loss 0.1")
        >>> meter.close()
    """
    if progress is None:
        return Meter()
    if isinstance(progress, str):
        checks.check_choice("progress", progress, _NAMED)
        return _NAMED[progress](total, description)
    return progress(total, description)


class Progress(Callback):
    """Meter of steps, with mean and standard deviation over members of recorded numbers.

    Args:
        how: "auto", "terminal", None for silence, or a factory `(total, description) -> Meter`.
        shown: Names of the numbers to show beside the loss; default: the first six.
    """

    def __init__(self, how: str | MeterFactory | None = "auto", shown: Sequence[str] | None = None):
        self.how, self.shown, self._meter, self._text, self._recorded = (
            how,
            shown,
            Meter(),
            "",
            False,
        )

    @property
    def needs_records(self) -> bool:
        # The meter shows losses without records.
        return False

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        self._meter, self._text, self._recorded = (
            open_meter(self.how, num_steps, "training"),
            "",
            False,
        )
        self._meter.advance(step, "compiling")

    def advance(self, step: int, loss: np.ndarray) -> None:
        if not self._recorded and loss.size:
            self._text = described({"loss": loss.mean(axis=1)}, self.shown)
        # Without losses, the program of the steps has not been compiled.
        texts = [self._text, "" if loss.size else "compiling"]
        self._meter.advance(step, ", ".join(filter(None, texts)))

    def record(self, step: int, records: dict[str, Any]) -> None:
        for name in self.shown or ():
            checks.check_choice("shown", name, numbers_of(records))
        self._text, self._recorded = described(records, self.shown), True

    def close(self) -> None:
        self._meter.close()


def described(records: dict[str, Any], shown: Sequence[str] | None) -> str:
    """Return mean and standard deviation over members of the loss and other numbers, in a line."""
    known = numbers_of(records)
    others = [name for name in known if name != "loss"]
    names = [
        "loss",
        *(others[:MAX_DESCRIBED] if shown is None else [name for name in shown if name in others]),
    ]
    finite = [(name, known[name][np.isfinite(known[name])].astype(np.float64)) for name in names]
    return ", ".join(f"{name} {x.mean():.4g} \u00b1 {x.std():.2g}" for name, x in finite if x.size)
