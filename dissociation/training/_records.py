"""Records of a run, which `Save` selects and a `History` holds, and callbacks, which the host calls with them.

`records["loss"]` is each member's mean loss since the last record ([members], NaN at the start),
`records["metrics"]` the means of metrics, `records["observed"]` the observation, members first. A
callback, which may be a function `callback(step, records)`, returns True to end the run, or a
boolean per member to freeze members.
"""

import csv
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from dissociation._core import checks
from dissociation._core.files import naming, replacing
from dissociation._core.results import Labelled, Over, dataset_of, printed
from dissociation._core.validation import validated
from dissociation.training._members import concatenate, stack
from dissociation.training._state import Info

if TYPE_CHECKING:
    import xarray


class History(NamedTuple):
    """Records of a run.

    Attributes:
        loss: Loss of every step's batch before the update: [members, steps], NumPy. NaN if a member
            is frozen.
        observed_at: Steps of the observations: [times]; step s is the state after s updates.
        observed: Observations, every leaf [members, times, ...], NumPy; or None.
        metrics: Metrics of the loss, every leaf [members, steps, ...]; or None.
        first_step: Step of the first loss: the number of updates of the initial state.
    """

    loss: np.ndarray
    observed_at: np.ndarray
    observed: Any
    metrics: Any
    first_step: int

    def to_xarray(self, over: Over = None) -> "xarray.Dataset":
        """Return losses and metrics along steps, and observations along the steps of the records.

        Args:
            over: Name or axes of the members: a name, `{"seeds": [0, 1]}`, or a sweep's
                `training.Grid`.

        Returns:
            `loss` [members, steps], `metrics_...` [members, steps, ...], `observed_...` [members,
            observed_at, ...], with the steps as coordinates.
        """
        over = "members" if over is None else over
        steps = self.first_step + np.arange(self.loss.shape[1])
        done = dataset_of({"loss": self.loss, "metrics": self.metrics}, over, then={"steps": steps})
        if self.observed is None:
            return done
        seen = dataset_of({"observed": self.observed}, over, then={"observed_at": self.observed_at})
        return done.merge(seen)

    to_dataframe, save = Labelled.to_dataframe, Labelled.save
    __repr__ = printed


class Record:
    """Losses, metrics and observations of all members since the first step of a run.

    Attributes:
        first: Number of updates of the initial state.
        num_members: Number of members.
        infos: Losses and metrics [members, steps, ...], a part per chunk.
        observed_at: Steps of the observations.
        observations: Observations, [members, ...] each.
        diverged_at: First step whose loss was not finite, or -1: [members].
    """

    def __init__(self, first: int, num_members: int, info: Info):
        self.first, self.num_members = first, num_members
        self.infos = [self.empty(info, 0)]
        self.observed_at: list[int] = []
        self.observations: list[Any] = []
        self.diverged_at = np.full(num_members, -1)

    def empty(self, tree: Any, columns: int) -> Any:
        """Return NumPy zeros [members, columns, ...] for the shapes of one member."""
        return jax.tree.map(
            lambda leaf: np.zeros((self.num_members, columns, *leaf.shape), leaf.dtype), tree
        )

    def add(self, infos: Info, step: int, frozen: np.ndarray) -> None:
        """Add the last steps up to `step`, and warn of losses that are not finite."""
        self.infos.append(infos)
        bad = ~np.isfinite(infos.loss)
        for member in np.flatnonzero(bad.any(axis=1) & (self.diverged_at < 0) & ~frozen):
            column = int(bad[member].argmax())
            self.diverged_at[member] = step - bad.shape[1] + column
            became = (
                f"the loss became {infos.loss[member, column]} at step {self.diverged_at[member]}"
            )
            checks.warn(f"member {member}: {became}; the other members go on.")

    def observe(self, step: int, observed: Any) -> None:
        """Add an observation, or None."""
        self.observed_at.append(step)
        self.observations.append(observed)

    def restore(
        self, infos: Info, observations: Sequence[tuple[int, Any]], diverged_at: np.ndarray
    ) -> None:
        """Replace everything by what a checkpoint holds."""
        self.infos = [infos]
        self.observed_at = [step for step, _ in observations]
        self.observations = [observed for _, observed in observations]
        self.diverged_at = diverged_at

    def _done(self) -> Info:
        """Return losses and metrics of all steps."""
        self.infos = [concatenate(self.infos, axis=1)]
        return self.infos[0]

    def at(self, index: int) -> dict[str, Any]:
        """Return a record for callbacks: means since the last one, and the observation."""
        index = index % len(self.observed_at)
        end, begin = self.observed_at[index], self.observed_at[index - 1] if index else self.first

        def mean(leaf: np.ndarray) -> np.ndarray:
            part = leaf[:, begin - self.first : end - self.first]
            kind = np.result_type(leaf.dtype, np.float16)
            return (
                part.mean(axis=1)
                if end > begin
                else np.full((len(leaf), *leaf.shape[2:]), np.nan, kind)
            )

        return {**jax.tree.map(mean, self._done())._asdict(), "observed": self.observations[index]}

    def history(self) -> History:
        """Return everything as the result of `fit` holds it."""
        done = self._done()
        known = [observed for observed in self.observations if observed is not None]
        observed = stack(known, axis=1) if known else None
        return History(
            done.loss, np.asarray(self.observed_at, np.int64), observed, done.metrics, self.first
        )


class Save(NamedTuple):
    """Selection of records and of their steps.

    Attributes:
        observe: `observe(model, step, key) -> PyTree of arrays` for one member, `step` traced; if
            the state has an `aux`, `observe(model, aux, step, key)`.
        at: Steps at which to observe and to call the callbacks' `record`, the first and the last
            only if listed. Default: start and end of every epoch (of the run, if an epoch is one
            step), or none without `observe` and callbacks that record.
        seconds: Least time in seconds between two writes of the checkpoint; the first write comes
            after at most five seconds.
    """

    observe: Callable[..., Any] | None = None
    at: Any = None
    seconds: float = 60.0


@validated
def log_spaced_steps(num_steps: int, count: int) -> Int[np.ndarray, " times"]:
    """Return steps from 0 to `num_steps`, evenly spaced in the logarithm, without repetition.

    Args:
        num_steps: Last step, at least 1.
        count: Number of steps before repetitions are dropped, at least 2.

    Example:
        >>> log_spaced_steps(100, 6)
        array([  0,   1,   3,  10,  32, 100])
    """
    checks.check_count("num_steps", num_steps, minimum=1)
    checks.check_count("count", count, minimum=2)
    spaced = np.rint(np.geomspace(1, num_steps, count - 1)).astype(np.int64)
    return np.unique(np.concatenate([[0], spaced]))


class Callback:
    """Hooks of a run on the host; every method is optional."""

    @property
    def needs_records(self) -> bool:
        """Return True if records are made for this callback, even if `Save` selects none."""
        return type(self).record is not Callback.record

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Start a call of `fit` from `step` to `num_steps`; `past` holds a resumed run's records by step."""

    def advance(self, step: int, loss: np.ndarray) -> None:
        """Receive the losses [members, steps] since the last call, first before any step."""

    def record(self, step: int, records: dict[str, Any]) -> Any:
        """Receive records; return True to end the run, or booleans [members] to freeze members."""

    def close(self) -> None:
        """Finish, also after an error."""


class OfFunction(Callback):
    """Callback that calls a function of step and records."""

    def __init__(self, index: int, function: Any):
        if not callable(function) or isinstance(function, type):
            wanted = "be a function of step and records, or a Callback"
            checks.fail_kind(f"callbacks[{index}]", wanted, repr(function))
        self.function = function

    def record(self, step: int, records: dict[str, Any]) -> Any:
        return self.function(step, records)


def record_steps(
    save: Save, callbacks: Sequence[Callback], first: int, last: int, epoch_steps: int
) -> np.ndarray:
    """Return the steps of the records, sorted, without repetition: those of `save.at`, or its default."""
    if not save.seconds >= 0:
        checks.fail("save", "have `seconds` of at least 0", save.seconds)
    if (
        save.at is None
        and save.observe is None
        and not any(each.needs_records for each in callbacks)
    ):
        return np.zeros(0, int)
    if save.at is None:
        every = np.arange(0, last + 1, epoch_steps) if epoch_steps > 1 else np.zeros(0, int)
        return np.union1d(every[every >= first], [first, last])
    steps = np.atleast_1d(np.asarray(save.at))
    steps = steps if steps.size else steps.astype(int)
    if steps.ndim != 1 or not np.issubdtype(steps.dtype, np.integer):
        checks.fail_kind("at", "be a sequence of integers", repr(save.at))
    if steps.size and (steps.min() < first or steps.max() > last):
        checks.fail(
            "at",
            f"lie between {first} and the last step ({last})",
            f"{steps.min()} to {steps.max()}",
        )
    return np.unique(steps)


class CsvLog(Callback):
    """Table on disk with a row per record and member: step, member, loss, and every recorded number.

    A resumed run continues the table at the checkpoint: later rows are dropped.

    Args:
        path: File, which is replaced.
        columns: Further columns: names and [members] values each, as in `Grid.values`.
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
    """Callback that freezes members whose recorded number stopped falling; the run ends when none is left.

    Args:
        name: Name of the number: "loss", or a metric or observation.
        patience: Number of records without a new minimum that a member may have.
        least_change: Decrease that a new minimum must exceed.
        rising: If True, the number should rise.

    Raises:
        ValueError: If `patience` or `least_change` is negative, or no number of this name is
            recorded.
    """

    @validated
    def __init__(
        self, name: str, patience: int, *, least_change: float = 0.0, rising: bool = False
    ):
        checks.check_count("patience", patience)
        checks.check_non_negative("least_change", least_change)
        self.name, self.patience, self.least_change, self.rising = (
            name,
            patience,
            least_change,
            rising,
        )
        self._best, self._waited, self._first = np.inf, 0, -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Resume from the records so far."""
        self._best, self._waited, self._first = np.inf, 0, past[0][0] if past else step
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray:
        """Return True for members without a new minimum for too long, [members]."""
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
    """Callback that freezes members whose loss is not finite."""

    _first = -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        self._first = past[0][0] if past else step

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray | None:
        """Return True for members whose loss is not finite, [members]."""
        loss = records["loss"]
        return None if step == self._first and np.isnan(loss).all() else ~np.isfinite(loss)


def numbers_of(records: dict[str, Any]) -> dict[str, Any]:
    """Return recorded numbers [members], named without "observed." and "metrics." if that is unambiguous."""
    leaves = jax.tree_util.tree_leaves_with_path(records)
    named = [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves
    ]
    short = [name.removeprefix("observed.").removeprefix("metrics.") for name, _ in named]
    both = zip(short, named, strict=True)
    return {s if short.count(s) == 1 else name: leaf for s, (name, leaf) in both if leaf.ndim == 1}
