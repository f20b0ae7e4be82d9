"""Argument checks in one style: "`name` must ..., got ...".

Shapes are always checked. Values are checked where they are known: a traced value passes.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike


def fail(name: str, wanted: str, got: object, advice: str = "") -> NoReturn:
    """Raises the house's `ValueError`.

    Args:
        name: The argument at fault, as the caller wrote it.
        wanted: What it must be; completes "`name` must ...".
        got: What came instead.
        advice: A sentence on what to do, without its final stop.

    Raises:
        ValueError: Always.
    """
    tail = f" {advice}." if advice else ""
    raise ValueError(f"`{name}` must {wanted}, got {got}.{tail}")


def is_traced(value: Any) -> bool:
    """Whether `value` is being traced by a transformation, so that its numbers are unknown."""
    return isinstance(value, Tracer)


def check_ndim(name: str, array: ArrayLike, ndim: int, meaning: str) -> None:
    """Raises unless `array` has `ndim` axes; `meaning` names them, for example "[samples, features]"."""
    if np.ndim(array) != ndim:
        fail(name, f"have {ndim} axes {meaning}", f"shape {np.shape(array)}")


def check_positive(name: str, value: ArrayLike) -> None:
    """Raises unless every known entry of `value` is above zero and finite."""
    if is_traced(value):
        return
    number = np.asarray(value)
    if not np.all(np.isfinite(number) & (number > 0)):
        fail(name, "be positive and finite", value)


def check_non_negative(name: str, value: ArrayLike) -> None:
    """Raises unless every known entry of `value` is at least zero and finite."""
    if is_traced(value):
        return
    number = np.asarray(value)
    if not np.all(np.isfinite(number) & (number >= 0)):
        fail(name, "be non-negative and finite", value)


def check_count(name: str, value: Any, *, minimum: int = 0) -> int:
    """Returns `value` as a Python int, or raises unless it is a whole number of at least `minimum`.

    Raises:
        TypeError: If `value` is no integer, or is traced: counts set shapes and are static.
        ValueError: If it is below `minimum`.
    """
    if is_traced(value) or isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be a Python integer (it sets a shape), got {value!r}.")
    if value < minimum:
        fail(name, f"be at least {minimum}", value)
    return int(value)


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raises unless `value` is one of `choices`, which the error lists."""
    known = tuple(choices)
    if value not in known:
        fail(name, f"be one of {', '.join(map(repr, known))}", repr(value))


def check_finite(name: str, array: ArrayLike) -> None:
    """Raises unless every known entry of `array` is finite, and names the first bad position."""
    if is_traced(array):
        return
    bad = ~np.isfinite(np.asarray(array))
    if bad.any():
        position = tuple(int(i) for i in np.argwhere(bad)[0])
        fail(name, "be finite", f"{np.asarray(array)[position]} at index {position}")


def check_same_length(first: str, length: int, second: str, other: int, meaning: str = "samples") -> None:
    """Raises unless two arguments agree in their number of `meaning`."""
    if length != other:
        fail(second, f"have as many {meaning} as `{first}` ({length})", other)
