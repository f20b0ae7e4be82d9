"""What figures do with networks of which some diverged: their numbers are NaN, and means say over how many they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Real

from dissociation._core.checks import WrongValue
from dissociation.figures._artifacts import Arrays, Parts
from dissociation.plotting._axes import summarise
from dissociation.training._members import take


def check_some_left(diverged_at: Int[np.ndarray, " members"], what: str = "networks") -> Bool[np.ndarray, " members"]:
    """Which members did not diverge.

    Args:
        diverged_at: The step at which a member did, or -1.
        what: What they are called in errors.

    Raises:
        WrongValue: If all did.
    """
    alive = np.asarray(diverged_at) < 0
    if not alive.any():
        steps = ", ".join(str(step) for step in diverged_at)
        raise WrongValue(f"All {len(alive)} {what} diverged, at step {steps}: there is nothing to measure.")
    return alive


def stand_ins(models: Any, alive: Bool[np.ndarray, " members"]) -> Any:
    """Stacked models with those that diverged replaced by the first that did not.

    Measures then never see what is not finite, on which a decomposition may raise or not return; what they find is
    made NaN by `masked`.
    """
    if alive.all():
        return models
    places = np.where(alive, np.arange(len(alive)), int(np.argmax(alive)))
    return take(models, places)


def masked(values: Mapping[str, Any], alive: Bool[np.ndarray, "*members"]) -> Arrays:
    """Arrays, members first, with NaN for those that diverged."""
    arrays = {name: np.asarray(value) for name, value in values.items()}
    if alive.all():
        return arrays
    return {name: _masked(value, alive) for name, value in arrays.items()}


def _masked(value: np.ndarray, alive: np.ndarray) -> np.ndarray:
    kind = value.dtype if np.issubdtype(value.dtype, np.inexact) else float
    return np.where(alive.reshape(*alive.shape, *(1,) * (value.ndim - alive.ndim)), value, np.nan).astype(kind)


def masked_part(
    parts: Parts, name: str, alive: Bool[np.ndarray, " members"], compute: Callable[[], Mapping[str, Any]]
) -> Arrays:
    """`Parts.get` of what `compute` finds on `stand_ins`."""
    return parts.get(name, lambda: masked(compute(), alive))


def cell(values: Real[np.ndarray, " members"], places: int = 2, *, factor: float | int = 1, unit: str = "") -> str:
    """Mean and standard deviation over members for a table, and of how many if not of all.

    Args:
        values: One number per member; NaN for one that diverged.
        places: Decimal places.
        factor: On the values.
        unit: Behind the numbers.

    Example:
        >>> cell(np.array([0.125, 0.175, np.nan]), factor=100, unit=" %")
        '15.00 ± 3.54 % (2 of 3)'
    """
    mean, deviation, count = summarise(factor * np.asarray(values, float))
    if not count:
        return f"none of {len(values)}"
    shown = f"{mean:.{places}f}" + (f" ± {deviation:.{places}f}" if count > 1 else "") + unit
    return shown if count == len(values) else f"{shown} ({count} of {len(values)})"


def number(values: Real[np.ndarray, " members"], form: str) -> str:
    """Mean over members for a table, and of how many if not of all."""
    mean, _, count = summarise(values)
    shown = format(float(mean), form)
    return shown if count == len(values) else f"{shown} ({count} of {len(values)})"


def named_diverged(names: Sequence[str], diverged_at: Int[np.ndarray, " members"]) -> str:
    """A sentence for a headline on the members that diverged and are left out; empty if there is none.

    Args:
        names: What the members are called.
        diverged_at: The step at which a member did, or -1.

    Example:
        >>> named_diverged(["seed 0", "seed 1", "seed 2"], np.array([-1, 12, -1]))
        '; diverged and left out: seed 1 at step 12 (2 of 3 networks remain)'
    """
    gone = [f"{name} at step {step}" for name, step in zip(names, diverged_at, strict=True) if step >= 0]
    if not gone:
        return ""
    return f"; diverged and left out: {', '.join(gone)} ({len(names) - len(gone)} of {len(names)} networks remain)"
