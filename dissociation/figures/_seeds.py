"""Replace, mask and name diverged networks, and write means over the others."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int, Real

from dissociation._core.checks import WrongValue
from dissociation.plotting._axes import summarise
from dissociation.training._members import take


def check_some_left(
    diverged_at: Int[np.ndarray, " members"], what: str = "networks"
) -> Bool[np.ndarray, " members"]:
    """Return True for each member that did not diverge, [members].

    Args:
        diverged_at: Step at which a member diverged, or -1.
        what: Name of the members in errors.

    Raises:
        WrongValue: If all members diverged.
    """
    alive = np.asarray(diverged_at) < 0
    if not alive.any():
        steps = ", ".join(map(str, diverged_at))
        raise WrongValue(
            f"All {len(alive)} {what} diverged, at step {steps}: there is nothing to measure."
        )
    return alive


def stand_ins(models: Any, alive: Bool[np.ndarray, " members"]) -> Any:
    """Return stacked models, with diverged ones replaced by the first that did not diverge."""
    # Decompositions of numbers that are not finite may raise or never return. `without_diverged`
    # makes the results NaN.
    if alive.all():
        return models
    first_alive = int(np.argmax(alive))
    index = np.where(alive, np.arange(len(alive)), first_alive)
    return take(models, index)


def without_diverged(
    variables: Mapping[str, Any], **alive: Bool[np.ndarray, "_"]
) -> dict[str, Any]:
    """Return variables of a dataset with NaN for diverged members, along the axes in `alive`."""
    masked = {}
    for name, (dims, values, *attributes) in variables.items():
        axes = [dims] if isinstance(dims, str) else dims
        for index, axis in enumerate(axes):
            if axis in alive and not alive[axis].all():
                num_later_axes = len(axes) - index - 1
                mask = alive[axis].reshape(-1, *(1,) * num_later_axes)
                values = np.where(mask, values, np.nan)
        masked[name] = (dims, values, *attributes)
    return masked


def cell(
    values: Real[np.ndarray, " members"],
    places: int = 2,
    *,
    factor: float | int = 1,
    unit: str = "",
) -> str:
    """Return mean and standard deviation over members for a table.

    If some members are missing, the number of members follows.

    Args:
        values: One number per member; NaN for a diverged member.
        places: Decimal places.
        factor: Factor on the values.
        unit: Text behind the numbers.

    Example:
        >>> cell(np.array([0.125, 0.175, np.nan]), factor=100, unit=" %")
        '15.00 ± 3.54 % (2 of 3)'
    """
    mean, deviation, count = summarise(factor * np.asarray(values, float))
    if not count:
        return f"none of {len(values)}"
    text = f"{mean:.{places}f}"
    if count > 1:
        text += f" ± {deviation:.{places}f}"
    text += unit
    if count < len(values):
        text += f" ({count} of {len(values)})"
    return text


def named_diverged(names: Sequence[str], diverged_at: Int[np.ndarray, " members"]) -> str:
    """Return the end of a headline, which names the members that diverged; empty if there are none.

    Args:
        names: Names of the members.
        diverged_at: Step at which a member diverged, or -1.

    Example:
        >>> named_diverged(["seed 0", "seed 1", "seed 2"], np.array([-1, 12, -1]))
        '; diverged and left out: seed 1 at step 12 (2 of 3 networks remain)'
    """
    diverged = []
    for name, step in zip(names, diverged_at, strict=True):
        if step >= 0:
            diverged.append(f"{name} at step {step}")
    if not diverged:
        return ""
    num_alive = len(names) - len(diverged)
    return (
        f"; diverged and left out: {', '.join(diverged)} ({num_alive} of {len(names)} networks "
        "remain)"
    )
