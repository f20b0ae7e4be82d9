"""Callbacks: what happens on the host while a run goes on.

A function `callback(step, records)` will do, called at the steps of `Save`. `records["loss"]` is each member's mean
loss since the last record ([members], NaN at the start), `records["metrics"]` the same of the loss's metrics, and
`records["observed"]` the observation, members first. True ends the run; a truth value per member freezes members.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dissociation._core import checks
from dissociation._core.files import naming, replacing
from dissociation._core.validation import validated
from dissociation.training._progress import MeterFactory, SilentMeter, open_meter

MAX_DESCRIBED = 6
"""Recorded numbers that progress shows by default."""


class Callback:
    """Hooks of a run on the host; every method may be left out."""

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Start a call of `fit` at `step`, which ends at `num_steps`; `past` holds a resumed run's records by step."""

    def advance(self, step: int, loss: np.ndarray) -> None:
        """Take the losses [members, steps] since the last call; it is called once before the first step too."""

    def record(self, step: int, records: dict[str, Any]) -> Any:
        """Take the records at a step of `Save`, and return True to end the run or the members to freeze [members]."""

    def close(self) -> None:
        """End, also after an error."""


class OfFunction(Callback):
    """Callback that calls a function of step and records."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]):
        self.function = function

    def record(self, step: int, records: dict[str, Any]) -> Any:
        """Call the function."""
        return self.function(step, records)


class Progress(Callback):
    """A meter of steps, with the loss and recorded numbers as mean and standard deviation over members.

    Args:
        how: "auto", "terminal", "notebook", None for silence, or a factory `(total, description) -> Meter`.
        shown: Names of the numbers to show beside the loss, one per member each; default: the first six.
    """

    def __init__(self, how: str | MeterFactory | None = "auto", shown: Sequence[str] | None = None):
        self.how, self.shown, self._meter, self._text, self._recorded = how, shown, SilentMeter(), "", False

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Open the meter."""
        self._meter, self._text, self._recorded = open_meter(self.how, num_steps, "training"), "", False

    def advance(self, step: int, loss: np.ndarray) -> None:
        """Move the meter."""
        if not self._recorded and loss.size:
            self._text = described({"loss": loss.mean(axis=1)}, self.shown)
        self._meter.advance(step, self._text)

    def record(self, step: int, records: dict[str, Any]) -> None:
        """Change the text."""
        for name in self.shown or ():
            checks.check_choice("shown", name, numbers_of(records))
        self._text, self._recorded = described(records, self.shown), True

    def close(self) -> None:
        """Close the meter."""
        self._meter.close()


class CsvLog(Callback):
    """A table on disk, a row per record and member: step, member, loss, and every recorded number.

    A run that goes on from a checkpoint goes on with its table: later rows of the run that was cut off are dropped.

    Args:
        path: The file; an older one is replaced.
        columns: What to say of the members: names and [members] values each, as in `Grid.values`.
    """

    @validated
    def __init__(self, path: str | os.PathLike[str], columns: Mapping[str, Any] | None = None):
        self.path, self.columns, self._names = Path(path), dict(columns or {}), None

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Write the rows of the records so far."""
        self._names = None
        with replacing(self.path):
            pass
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> None:
        """Add a row per member."""
        numbers = numbers_of(records)
        rows = []
        if self._names is None:
            for name, values in self.columns.items():
                if np.shape(values) != numbers["loss"].shape:
                    wanted = f"hold one value for each of the {len(numbers['loss'])} members"
                    checks.fail("columns", wanted, f"shape {np.shape(values)} for {name!r}")
            self._names = list(numbers)
            rows.append(["step", "member", *self.columns, *self._names])
        for member in range(len(numbers["loss"])):
            labels = [np.asarray(values)[member] for values in self.columns.values()]
            rows.append([step, member, *labels, *(numbers[name][member] for name in self._names)])
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)


class EarlyStop(Callback):
    """Freezes members whose recorded number has stopped falling; the run ends when none is left.

    Args:
        name: Of the number: "loss", or one observed.
        patience: Records without a new least value that a member is given.
        least_change: By how much a value must lie below the least one so far.
        rising: Whether the number is one that should rise.

    Raises:
        ValueError: If a count is negative, or no number of this name is recorded.
    """

    @validated
    def __init__(self, name: str, patience: int, *, least_change: float = 0.0, rising: bool = False):
        checks.check_count("patience", patience)
        checks.check_non_negative("least_change", least_change)
        self.name, self.patience, self.least_change, self.rising = name, patience, least_change, rising
        self._best, self._waited, self._first = np.inf, 0, -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Resume from the records so far."""
        self._best, self._waited, self._first = np.inf, 0, past[0][0] if past else step
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray:
        """Return the members that have waited long enough: [members]."""
        numbers = numbers_of(records)
        checks.check_choice("name", self.name, numbers)
        values = -numbers[self.name] if self.rising else numbers[self.name]
        if step == self._first and np.isnan(values).all():  # there is no loss before the first step
            return np.zeros(len(values), bool)
        better = values < self._best - self.least_change
        self._best = np.where(better, values, self._best)
        self._waited = np.where(better, 0, self._waited + 1)
        return self._waited > self.patience


class FreezeDiverged(Callback):
    """Freezes members whose loss is not finite."""

    _first = -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Store the step of the first record."""
        self._first = past[0][0] if past else step

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray | None:
        """Return the members whose loss is not finite: [members]."""
        loss = records["loss"]
        return None if step == self._first and np.isnan(loss).all() else ~np.isfinite(loss)


def numbers_of(records: dict[str, Any]) -> dict[str, Any]:
    """Return recorded numbers [members] by name, without "observed." and "metrics." if the rest is unambiguous."""
    leaves = jax.tree_util.tree_leaves_with_path(records)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
    short = [name.removeprefix("observed.").removeprefix("metrics.") for name, _ in named]
    both = zip(short, named, strict=True)
    return {s if short.count(s) == 1 else name: leaf for s, (name, leaf) in both if leaf.ndim == 1}


def described(records: dict[str, Any], shown: Sequence[str] | None) -> str:
    """Return a line with the mean and standard deviation over members of the loss and of other numbers."""
    known = numbers_of(records)
    others = [name for name in known if name != "loss"]
    names = ["loss", *(others[:MAX_DESCRIBED] if shown is None else [name for name in shown if name in others])]
    finite = [(name, known[name][np.isfinite(known[name])].astype(np.float64)) for name in names]
    return ", ".join(f"{name} {x.mean():.4g} \u00b1 {x.std():.2g}" for name, x in finite if x.size)
