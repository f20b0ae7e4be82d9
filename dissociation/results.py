"""What measures return: frozen results that print their numbers."""

import equinox as eqx
import numpy as np

from dissociation.checks import is_traced
from dissociation.labelling import Labels

__all__ = ["Result"]

_PRINTED = 16


class Result(eqx.Module, Labels):
    """Base of results. Small arrays are printed as numbers, where a module would print their shape and dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> class Height(Result):
        ...     mean: jnp.ndarray
        ...     table: jnp.ndarray
        >>> Height(jnp.array([1.5, 2.0]), jnp.zeros((3, 400)))
        Height(mean=[1.5 2. ], table=f32[3,400])
    """

    def __repr__(self) -> str:
        parts = []
        for name, value in vars(self).items():
            known = eqx.is_array_like(value) and not is_traced(value) and np.size(value) <= _PRINTED
            shown = np.array2string(np.asarray(value), precision=6) if known else eqx.tree_pformat(value)
            parts.append(f"{name}={shown}")
        return f"{type(self).__name__}({', '.join(parts)})"
