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
        """Show `step` finished steps and a short text; an empty text keeps the last one."""

    def close(self) -> None:
        """End the meter; called once, also after an error."""


MeterFactory = Callable[[int, str], Any]
"""Function from the total number of steps and a description to an object like `Meter`."""


class BarMeter(Meter):
    """Meter with a bar of a tqdm class; in a file, a line every `SECONDS` and one at the end."""

    SECONDS = 10.0

    def __init__(self, total: int, description: str, bar: Callable[..., Any] = tqdm):
        self._in_file = bar is tqdm and not sys.stderr.isatty()
        # After an infinite delay tqdm draws nothing, and `_write` writes lines to the file instead.
        delay = np.inf if self._in_file else 0.0
        self._bar = bar(
            total=total,
            desc=description,
            delay=delay,
            file=sys.stderr,
            dynamic_ncols=True,
            mininterval=0.2,
            smoothing=0,
        )
        self._started = False
        self._written_at = -np.inf
        self._written_state = None

    def advance(self, step: int, text: str) -> None:
        if text:
            self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(step - self._bar.n)
        if step and not self._started:  # the rate leaves compilation out
            self._started = True
            self._bar.initial = step
            self._bar.start_t = time.time()
        if not self._in_file:
            self._bar.refresh()
        elif time.monotonic() - self._written_at >= self.SECONDS:
            self._write()

    def _write(self) -> None:
        """Write the bar as text and a line break; nothing if step and text have not changed."""
        state = (self._bar.n, self._bar.postfix)
        if state == self._written_state:
            return
        self._written_at = time.monotonic()
        self._written_state = state
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
        self._total = total
        self._description = description
        self._text = ""
        self._meter = None
        self._began = time.monotonic()

    def advance(self, step: int, text: str) -> None:
        self._text = text or self._text
        if self._meter is None and time.monotonic() - self._began >= self.SECONDS:
            self._meter = _auto_meter(self._total, self._description)
        if self._meter is not None:
            self._meter.advance(step, self._text)

    def close(self) -> None:
        """Close the meter, if it has opened."""
        if self._meter is not None:
            self._meter.close()


def _auto_meter(total: int, description: str) -> Meter:
    from tqdm.auto import tqdm as auto_bar
    from tqdm.notebook import tqdm as notebook_bar

    bar = auto_bar if issubclass(auto_bar, notebook_bar) else tqdm
    return BarMeter(total, description, bar)


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
        self.how = how
        self.shown = shown
        self._meter = Meter()
        self._text = ""
        self._recorded = False

    @property
    def needs_records(self) -> bool:
        # The meter shows losses without records.
        return False

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        self._meter = open_meter(self.how, num_steps, "training")
        self._text = ""
        self._recorded = False
        self._meter.advance(step, "compiling")

    def advance(self, step: int, loss: np.ndarray) -> None:
        if not self._recorded and loss.size:
            self._text = described({"loss": loss.mean(axis=1)}, self.shown)
        texts = [self._text] if self._text else []
        if not loss.size:  # the program of the steps has not been compiled
            texts.append("compiling")
        self._meter.advance(step, ", ".join(texts))

    def record(self, step: int, records: dict[str, Any]) -> None:
        for name in self.shown or ():
            checks.check_choice("shown", name, numbers_of(records))
        self._text = described(records, self.shown)
        self._recorded = True

    def close(self) -> None:
        self._meter.close()


def described(records: dict[str, Any], shown: Sequence[str] | None) -> str:
    """Return mean and standard deviation over members of the loss and other numbers, in a line."""
    numbers = numbers_of(records)
    names = [name for name in numbers if name != "loss"]
    described_names = names[:MAX_DESCRIBED]
    if shown is not None:
        described_names = [name for name in shown if name in names]

    texts = []
    for name in ["loss", *described_names]:
        finite = numbers[name][np.isfinite(numbers[name])].astype(np.float64)
        if finite.size:
            texts.append(f"{name} {finite.mean():.4g} \u00b1 {finite.std():.2g}")
    return ", ".join(texts)
