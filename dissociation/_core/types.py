"""Types of arguments that both packages share, and how each is taken: see `dissociation._core.validation`."""

from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Int, Key, UInt32

if TYPE_CHECKING:
    PyTree = Any  # jaxtyping's is of no known type, of which a strict type checker warns whoever calls us
else:
    from jaxtyping import PyTree as PyTree


class Labels(NamedTuple):
    """Mark of an argument of class labels, which callers give as integers [n] or one-hot rows [n, classes]."""

    one_hot: bool
    """Whether the function works on one-hot rows, or on integers."""
    soft: bool = False
    """Whether rows may be probabilities."""


class InTime:
    """Mark of an argument of trajectories: frames are read by `frames.as_trajectories`."""


Scalar = float | int | Float[Array | np.ndarray, ""]
"""A real number, perhaps traced."""

Count = int | Int[Array | np.ndarray, ""]
"""A whole number, perhaps traced."""

PRNGKey = Key[Array, ""] | UInt32[Array | np.ndarray, "2"]
"""One random key, typed (`jax.random.key`) or raw (`jax.random.PRNGKey`)."""

PRNGKeys = Key[Array, " members"] | UInt32[Array | np.ndarray, "members 2"]
"""One random key per member."""

OneHot = Annotated[Float[Array | np.ndarray, "n classes"], Labels(one_hot=True)]
"""Labels of samples, given as integers or one-hot rows; the function sees one-hot rows."""

Classes = Annotated[Int[Array | np.ndarray, " n"], Labels(one_hot=False)]
"""Labels of samples, given as integers or one-hot rows; the function sees integers."""
