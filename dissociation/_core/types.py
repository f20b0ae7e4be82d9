"""Types of arguments, which `dissociation._core.validation` converts."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

from dissociation._core.checks import check_count, check_non_negative, check_positive

if TYPE_CHECKING:
    PyTree = Any  # strict type checkers warn callers of jaxtyping's, because its type is unknown
else:
    from jaxtyping import PyTree as PyTree


class Labels(NamedTuple):
    """Mark of an argument of class labels, integers [n] or one-hot rows [n, classes]."""

    one_hot: bool
    """If True, the function takes one-hot rows, else integers."""
    soft: bool = False
    """If True, rows may be probabilities."""


class InTime:
    """Mark of an argument of trajectories, which may be frames."""


class Checked(NamedTuple):
    """Mark of an argument whose converted value `check(name, value)` checks, unless it is None."""

    check: Callable[[str, Any], Any]


Natural = Annotated[int, Checked(check_count)]
"""Known integer from 0."""

Size = Annotated[int, Checked(partial(check_count, minimum=1))]
"""Known integer from 1."""

Positive = Annotated[float, Checked(check_positive)]
"""Known real number above 0."""

Scalar = float | int | Float[Array | np.ndarray, ""]
"""Real number, perhaps traced."""

NonNegative = Annotated[Scalar, Checked(check_non_negative)]
"""Real number from 0, perhaps traced."""

Count = int | Int[Array | np.ndarray, ""]
"""Integer, perhaps traced."""

PRNGKey = Key[Array, ""] | UInt32[Array | np.ndarray, "2"]
"""Random key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)."""

PRNGKeys = Key[Array, " members"] | UInt32[Array | np.ndarray, "members 2"]
"""Random keys, one per member."""

OneHot = Annotated[Float[Array | np.ndarray, "n classes"], Labels(one_hot=True)]
"""Labels, integers or one-hot rows, converted to one-hot rows."""

Classes = Annotated[Int[Array | np.ndarray, " n"], Labels(one_hot=False)]
"""Labels, integers or one-hot rows, converted to integers."""


class Statistics(eqx.Module):
    """Arrays of a model that no optimiser changes, such as running means.

    Attributes:
        values: PyTree of arrays.
    """

    values: PyTree


def are_statistics(node: Any) -> bool:
    """Return True for arrays of a model that move with neurons, and are no parameters."""
    # A `StateIndex` holds the initial values of the state.
    return isinstance(node, Statistics | eqx.nn.State | eqx.nn.StateIndex)


def parameter_mask(model: Any) -> Any:
    """Return True for each parameter of a model, and False for other leaves."""

    def is_parameter(node: Any) -> bool:
        return not are_statistics(node) and eqx.is_inexact_array(node)

    return jax.tree.map(is_parameter, model, is_leaf=are_statistics)
