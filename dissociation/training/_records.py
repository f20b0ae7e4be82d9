"""Records of a run, which `Save` selects and a `History` holds, and callbacks of the host.

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
        if over is None:
            over = "members"
        steps = self.first_step + np.arange(self.loss.shape[1])
        losses = {"loss": self.loss, "metrics": self.metrics}
        dataset = dataset_of(losses, over, then={"steps": steps})
        if self.observed is None:
            return dataset
        times = {"observed_at": self.observed_at}
        return dataset.merge(dataset_of({"observed": self.observed}, over, then=times))

    to_dataframe = Labelled.to_dataframe
    save = Labelled.save
    __repr__ = printed


class Record:
    """Losses, metrics and observations of all members since the first step of a run.

    Attributes:
        first: Number of updates of the initial state.
        num_members: Number of members.
        infos: Losses and metrics [members, steps, ...] of every chunk.
        observed_at: Steps of the observations.
        observations: Observations, [members, ...] each.
        diverged_at: First step whose loss was not finite, or -1: [members].
    """

    def __init__(self, first: int, num_members: int, info: Info):
        self.first = first
        self.num_members = num_members
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
        is_nonfinite = ~np.isfinite(infos.loss)
        is_newly_diverged = is_nonfinite.any(axis=1) & (self.diverged_at < 0) & ~frozen
        for member in np.flatnonzero(is_newly_diverged):
            column = int(is_nonfinite[member].argmax())
            self.diverged_at[member] = step - is_nonfinite.shape[1] + column
            loss = infos.loss[member, column]
            checks.warn(
                f"member {member}: the loss became {loss} at step {self.diverged_at[member]}; "
                "the other members go on."
            )

    def observe(self, step: int, observed: Any) -> None:
        """Add an observation, or None."""
        self.observed_at.append(step)
        self.observations.append(observed)

    def restore(
        self, infos: Info, observations: Sequence[tuple[int, Any]], diverged_at: np.ndarray
    ) -> None:
        """Replace everything by the records of a checkpoint."""
        self.infos = [infos]
        self.observed_at = [step for step, _ in observations]
        self.observations = [observed for _, observed in observations]
        self.diverged_at = diverged_at

    def _joined_infos(self) -> Info:
        """Return losses and metrics of all steps, and replace those of the chunks by them."""
        self.infos = [concatenate(self.infos, axis=1)]
        return self.infos[0]

    def at(self, index: int) -> dict[str, Any]:
        """Return a record for callbacks: means since the last one, and the observation."""
        index = index % len(self.observed_at)
        end = self.observed_at[index]
        begin = self.observed_at[index - 1] if index else self.first

        def mean(leaf: np.ndarray) -> np.ndarray:
            if end > begin:
                return leaf[:, begin - self.first : end - self.first].mean(axis=1)
            dtype = np.result_type(leaf.dtype, np.float16)
            return np.full((len(leaf), *leaf.shape[2:]), np.nan, dtype)

        means = jax.tree.map(mean, self._joined_infos())
        return {**means._asdict(), "observed": self.observations[index]}

    def history(self) -> History:
        """Return everything as the result of `fit` holds it."""
        infos = self._joined_infos()
        observations = [observed for observed in self.observations if observed is not None]
        observed = stack(observations, axis=1) if observations else None
        observed_at = np.asarray(self.observed_at, np.int64)
        return History(infos.loss, observed_at, observed, infos.metrics, self.first)


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
        """Start a call of `fit` from `step` to `num_steps`.

        `past` holds a resumed run's records by step.
        """

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
            checks.fail_kind(
                f"callbacks[{index}]",
                "be a function of step and records, or a Callback",
                repr(function),
            )
        self.function = function

    def record(self, step: int, records: dict[str, Any]) -> Any:
        return self.function(step, records)


def record_steps(
    save: Save, callbacks: Sequence[Callback], first: int, last: int, epoch_steps: int
) -> np.ndarray:
    """Return the steps of the records: `save.at` or its default, sorted, without repetition."""
    if not save.seconds >= 0:
        checks.fail("save", "have `seconds` of at least 0", save.seconds)
    if save.at is None:
        if save.observe is None and not any(callback.needs_records for callback in callbacks):
            return np.zeros(0, int)
        epochs = np.zeros(0, int)
        if epoch_steps > 1:
            epochs = np.arange(0, last + 1, epoch_steps)
        return np.union1d(epochs[epochs >= first], [first, last])

    steps = np.atleast_1d(np.asarray(save.at))
    if not steps.size:
        steps = steps.astype(int)
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
    """Table on disk with a row per record and member: step, member, loss, every recorded number.

    A resumed run continues the table at the checkpoint: later rows are dropped.

    Args:
        path: File, which is replaced.
        columns: Further columns: names and [members] values each, as in `Grid.values`.
    """

    @validated
    def __init__(self, path: str | os.PathLike[str], columns: Mapping[str, Any] | None = None):
        self.path = Path(path)
        self.columns = dict(columns or {})
        self._names = None

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Write the rows of the records so far."""
        self._names = None
        with replacing(self.path):
            pass
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> None:
        numbers = numbers_of(records)
        num_members = len(numbers["loss"])
        rows = []
        if self._names is None:
            for name, column in self.columns.items():
                if np.shape(column) != numbers["loss"].shape:
                    checks.fail(
                        "columns",
                        f"hold one value for each of the {num_members} members",
                        f"shape {np.shape(column)} for {name!r}",
                    )
            self._names = list(numbers)
            rows.append(["step", "member", *self.columns, *self._names])

        for member in range(num_members):
            labels = [np.asarray(column)[member] for column in self.columns.values()]
            recorded = [numbers[name][member] for name in self._names]
            rows.append([step, member, *labels, *recorded])
        with naming(self.path), self.path.open("a", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows(rows)


class EarlyStop(Callback):
    """Callback that freezes members whose recorded number stopped falling.

    The run ends when all members are frozen.

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
        self.name = name
        self.patience = patience
        self.least_change = least_change
        self.rising = rising
        self._restart(-1)

    def _restart(self, first: int) -> None:
        """Reset to a run without records; `first` is the step of the first one."""
        self._best = np.inf
        self._waited = 0
        self._first = first

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        """Resume from the records so far."""
        first = past[0][0] if past else step
        self._restart(first)
        for recorded, records in past:
            self.record(recorded, records)

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray:
        """Return True for members without a new minimum for too long, [members]."""
        numbers = numbers_of(records)
        checks.check_choice("name", self.name, numbers)
        recorded = numbers[self.name]
        if self.rising:
            recorded = -recorded
        if step == self._first and np.isnan(recorded).all():  # no loss before the first step
            return np.zeros(len(recorded), bool)
        is_better = recorded < self._best - self.least_change
        self._best = np.where(is_better, recorded, self._best)
        self._waited = np.where(is_better, 0, self._waited + 1)
        return self._waited > self.patience


class FreezeDiverged(Callback):
    """Callback that freezes members whose loss is not finite."""

    _first = -1

    def begin(self, step: int, num_steps: int, past: Sequence[tuple[int, dict[str, Any]]]) -> None:
        self._first = past[0][0] if past else step

    def record(self, step: int, records: dict[str, Any]) -> np.ndarray | None:
        """Return True for members whose loss is not finite, [members]."""
        loss = records["loss"]
        if step == self._first and np.isnan(loss).all():
            return None
        return ~np.isfinite(loss)


def numbers_of(records: dict[str, Any]) -> dict[str, Any]:
    """Return recorded numbers [members] by name.

    Names are without "observed." and "metrics." if they are unambiguous then.
    """
    leaves = jax.tree_util.tree_leaves_with_path(records)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    short_names = [name.removeprefix("observed.").removeprefix("metrics.") for name in names]
    numbers = {}
    for (_, leaf), name, short_name in zip(leaves, names, short_names, strict=True):
        if leaf.ndim != 1:
            continue
        if short_names.count(short_name) == 1:
            name = short_name
        numbers[name] = leaf
    return numbers
