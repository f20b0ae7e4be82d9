"""Callbacks: what happens on the host while a run goes on.

A function `callback(step, records)` will do, called at the steps of `Save`. `records["loss"]` is each member's mean
loss since the last record ([members], NaN at the start), `records["metrics"]` the same of the loss's metrics, and
`records["observed"]` the observation, members first. True ends the run; a truth value per member freezes members.
"""

import csv
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dissociation._core import checks
from dissociation._core.files import naming, replacing
from dissociation._core.validation import validated
from dissociation.training._progress import MeterFactory, open_meter

MAX_DESCRIBED = 6
"""Recorded numbers that progress shows by default."""


class Callback:
    """What happens on the way; every method may be left out."""

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Before the first step of a call: where it stands, where it ends, and the records so far, if it goes on."""

    def advance(self, step: int, loss: np.ndarray) -> None:
        """After some steps, and once before the first: the step, and the losses since ([members, steps])."""

    def record(self, step: int, records: dict[str, Any]) -> Any:
        """At the steps of `Save`; returns True to end the run, or which members to freeze: [members]."""

    def close(self) -> None:
        """At the end, also after an error."""


class OfFunction(Callback):
    """A function of step and records as a callback."""

    def __init__(self, function: Callable[[int, dict[str, Any]], Any]):
        self.function = function

    def record(self, step: int, records: dict[str, Any]) -> Any:
        """Calls it."""
        return self.function(step, records)


class Progress(Callback):
    """A meter of steps, with the loss and recorded numbers as mean and standard deviation over members.

    Args:
        how: "auto", "terminal", "notebook", None for silence, or a factory `(total, description) -> Meter`.
        shown: Names of the numbers to show beside the loss, one per member each; default: the first six.
    """

    def __init__(self, how: str | MeterFactory | None = "auto", shown: Sequence[str] | None = None):
        self.how, self.shown, self._meter, self._text, self._recorded = how, shown, None, "", False

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Opens the meter."""
        self._meter, self._text, self._recorded = open_meter(self.how, num_steps, "training"), "", False

    def advance(self, step: int, loss: np.ndarray) -> None:
        """Moves the meter."""
        if not self._recorded and loss.size:
            self._text = described({"loss": loss.mean(axis=1)}, self.shown)
        if self._meter is not None:
            self._meter.advance(step, self._text)

    def record(self, step: int, records: dict[str, Any]) -> None:
        """Changes the text."""
        names = [name for name, leaf in scalars(records) if leaf.ndim == 1]
        for name in self.shown or ():
            checks.check_choice("shown", name, names)
        self._text, self._recorded = described(records, self.shown), True

    def close(self) -> None:
        """Closes the meter."""
        if self._meter is not None:
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
        """Writes the rows of the records so far."""
        self._names = None
        with replacing(self.path):
            pass
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> None:
        """Adds a row per member."""
        numbers = {name: leaf for name, leaf in scalars(records) if leaf.ndim == 1}
        text = io.StringIO()
        table = csv.writer(text)
        if self._names is None:
            for name, values in self.columns.items():
                if np.shape(values) != numbers["loss"].shape:
                    wanted = f"hold one value for each of the {len(numbers['loss'])} members"
                    checks.fail("columns", wanted, f"shape {np.shape(values)} for {name!r}")
            self._names = list(numbers)
            table.writerow(["step", "member", *self.columns, *self._names])
        for member in range(len(numbers["loss"])):
            labels = [np.asarray(values)[member] for values in self.columns.values()]
            table.writerow([step, member, *labels, *(numbers[name][member] for name in self._names)])
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(text.getvalue())


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
        self._best, self._waited, self._first = None, None, -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Takes up where the records so far end."""
        self._best, self._waited, self._first = None, None, past[0][0] if past else step
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray:
        """Which members have waited long enough."""
        numbers = {name: leaf for name, leaf in scalars(records) if leaf.ndim == 1}
        checks.check_choice("name", self.name, numbers)
        values = -numbers[self.name] if self.rising else numbers[self.name]
        if self._best is None or self._waited is None:
            self._best, self._waited = np.full(len(values), np.inf), np.zeros(len(values), int)
        if step != self._first or not np.isnan(values).all():  # there is no loss before the first step
            better = values < self._best - self.least_change
            self._best = np.where(better, values, self._best)
            self._waited = np.where(better, 0, self._waited + 1)
        return self._waited > self.patience


class FreezeDiverged(Callback):
    """Freezes members whose loss is not finite."""

    _first = -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Notes where the records begin."""
        self._first = past[0][0] if past else step

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray | None:
        """Which members have diverged."""
        loss = records["loss"]
        return None if step == self._first and np.isnan(loss).all() else ~np.isfinite(loss)


def scalars(records: dict[str, Any]) -> list[tuple[str, Any]]:
    """Names and arrays of what is recorded; "observed." and "metrics." are left out of names where that is clear."""
    leaves = jax.tree_util.tree_leaves_with_path(records)
    named = [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]
    short = [name.removeprefix("observed.").removeprefix("metrics.") for name, _ in named]
    return [(s if short.count(s) == 1 else name, leaf) for s, (name, leaf) in zip(short, named, strict=True)]


def described(records: dict[str, Any], shown: Sequence[str] | None) -> str:
    """Mean and standard deviation over members of the loss and of some of the numbers recorded, in a line."""
    known = {name: leaf for name, leaf in scalars(records) if leaf.ndim == 1}
    others = [name for name in known if name != "loss"]
    names = ["loss", *(others[:MAX_DESCRIBED] if shown is None else [name for name in shown if name in others])]
    finite = [(name, known[name][np.isfinite(known[name])].astype(np.float64)) for name in names]
    return ", ".join(f"{name} {x.mean():.4g} \u00b1 {x.std():.2g}" for name, x in finite if x.size)
