"""Steps, epochs and the steps of records."""

import numpy as np
from jaxtyping import Int

from dissociation._core import checks
from dissociation._core.validation import validated


def steps_per_epoch(num_samples: int, batch_size: int | None, *, drop_remainder: bool = False) -> int:
    """Return the number of optimiser steps in one pass over the data."""
    if batch_size is None:
        return 1
    checks.check_count("batch_size", batch_size, minimum=1)
    if batch_size > num_samples:
        checks.fail("batch_size", f"be at most the number of samples ({num_samples})", batch_size)
    full, rest = divmod(num_samples, batch_size)
    return full + (rest > 0 and not drop_remainder)


@validated
def log_spaced_steps(num_steps: int, count: int) -> Int[np.ndarray, " times"]:
    """Return steps from 0 to `num_steps`, evenly spaced in the logarithm, without repetition.

    Args:
        num_steps: The last step, at least 1.
        count: Number of steps to aim for, at least 2; early repetitions are dropped, so there may be fewer.

    Example:
        >>> log_spaced_steps(100, 6)
        array([  0,   1,   3,  10,  32, 100])
    """
    checks.check_count("num_steps", num_steps, minimum=1)
    checks.check_count("count", count, minimum=2)
    spaced = np.rint(np.geomspace(1, num_steps, count - 1)).astype(np.int64)
    return np.unique(np.concatenate([[0], spaced]))


def check_steps(name: str, steps: object, num_steps: int, first: int = 0) -> Int[np.ndarray, " times"]:
    """Return `steps` sorted and without repetition, or raise unless they are integers within the run."""
    array = np.atleast_1d(np.asarray(steps))
    array = array if array.size else array.astype(int)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"`{name}` must be a sequence of whole steps, got {steps!r}.")
    if array.size and (array.min() < first or array.max() > num_steps):
        checks.fail(name, f"lie between {first} and the last step ({num_steps})", f"{array.min()} to {array.max()}")
    return np.unique(array)
