"""Results of measures: frozen, they print their numbers, and have tables and files with names."""

from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import numpy as np

from dissociation._core.checks import is_traced
from dissociation._core.labelling import Labels

__all__ = ["Result", "printed"]

_PRINTED = 16
_LONGEST = 80


class Result(eqx.Module, Labels):
    """Base of results. Small arrays are printed as numbers, larger ones as their shape and the range of their numbers.

    Axes have the names in the fields' annotations: `result.to_xarray("seeds")` if `vmap` put seeds in front.

    Attributes:
        UNITS: Units of fields, by name.
        AXES: Axes for "..." in annotations, if an array has as many.
        LEAST: By a field's name, the number at or below which its numbers are printed as being below it.

    Example:
        >>> import jax.numpy as jnp
        >>> class Height(Result):
        ...     mean: jnp.ndarray
        ...     table: jnp.ndarray
        >>> Height(jnp.array([1.5, 2.0]), jnp.arange(1200.0).reshape(3, 400))
        Height(mean=[1.5 2. ], table=f32[3,400] from 0 to 1199)
    """

    UNITS: ClassVar[Mapping[str, str]] = {}
    AXES: ClassVar[tuple[str, ...]] = ()
    LEAST: ClassVar[Mapping[str, float]] = {}

    def __repr__(self) -> str:
        return printed(self)


def printed(self: Any) -> str:
    """Return a result as text; named tuples, which have no bases, take it as their `__repr__`."""
    fields = self._asdict() if hasattr(self, "_asdict") else vars(self)
    least = getattr(self, "LEAST", {})
    known = {name: value for name, value in fields.items() if value is not None}
    shown = ", ".join(f"{name}={_shown(value, least.get(name, -np.inf))}" for name, value in known.items())
    return f"{type(self).__name__}({shown})"


def _shown(value: Any, least: float) -> str:
    if not eqx.is_array_like(value) or is_traced(value):
        text = eqx.tree_pformat(value)
        if type(value) in (list, tuple) and len(text) > _LONGEST:
            return f"({eqx.tree_pformat(value[0])}, ..., {eqx.tree_pformat(value[-1])})"
        return text
    array = np.asarray(value)
    known = array[np.isfinite(array)] if array.dtype.kind in "iuf" else np.zeros(0)

    def word(number: Any, digits: int = 4) -> str:
        return f"< {least:.4g}" if number <= least else f"{number:.{digits}g}"

    if array.size <= _PRINTED:
        formatter: Any = {"float": lambda number: word(number, 6)} if (known <= least).any() else None
        return np.array2string(array, precision=6, formatter=formatter)
    return eqx.tree_pformat(value) + (f" from {word(known.min())} to {word(known.max())}" if known.size else "")
