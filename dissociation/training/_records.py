"""Records of a run: `Save` selects them, and a `History` holds them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jaxtyping import Int

from dissociation._core import checks
from dissociation._core.results import Labels, Over, dataset_of, printed
from dissociation._core.validation import validated

if TYPE_CHECKING:
    import xarray


class History(NamedTuple):
    """Records of a run.

    Attributes:
        loss: Loss of every step's batch before the update: [members, steps], NumPy. NaN if a member is frozen.
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
            over: Name or axes of the members: a name, `{"seeds": [0, 1]}`, or a sweep's `training.Grid`.

        Returns:
            `loss` [members, steps], `metrics_...` [members, steps, ...], `observed_...` [members, observed_at, ...],
            with the steps as coordinates.
        """
        over = "members" if over is None else over
        steps = self.first_step + np.arange(self.loss.shape[1])
        done = dataset_of({"loss": self.loss, "metrics": self.metrics}, over, then={"steps": steps})
        if self.observed is None:
            return done
        seen = dataset_of({"observed": self.observed}, over, then={"observed_at": self.observed_at})
        return done.merge(seen)

    to_dataframe, save = Labels.to_dataframe, Labels.save
    __repr__ = printed


class Save(NamedTuple):
    """Selection of records and of their steps.

    Attributes:
        observe: `observe(model, step, key) -> PyTree of arrays` for one member, `step` traced; if the state has an
            `aux`, `observe(model, aux, step, key)`.
        at: Steps at which to observe and to call the callbacks' `record`, the first and the last only if listed.
            Default: start and end of every epoch (of the run, if an epoch is one step), or none without `observe` and
            callbacks that record.
        seconds: Least time in seconds between two writes of the checkpoint; the first write comes after at most five
            seconds.
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


def check_steps(name: str, steps: object, num_steps: int, first: int = 0) -> Int[np.ndarray, " times"]:
    """Return `steps` sorted, without repetition; raise unless they are integers within the run."""
    array = np.atleast_1d(np.asarray(steps))
    array = array if array.size else array.astype(int)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`{name}` must be a sequence of integers, got {steps!r}.")
    if array.size and (array.min() < first or array.max() > num_steps):
        checks.fail(name, f"lie between {first} and the last step ({num_steps})", f"{array.min()} to {array.max()}")
    return np.unique(array)
