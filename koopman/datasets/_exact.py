"""What is known exactly of an evolution operator, computed on the host in NumPy's float64."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from dissociation._core.checks import fail
from dissociation._core.validation import validated


class ExactSpectrum(NamedTuple):
    """Leading part of the spectrum of (E f)(x) = E[f(x') | x], where x' follows x.

    In the Hilbert space with <f, g> = integral of conj(f) g times the invariant density, E is the sum over i of
    eigenvalues[i] <left_i, .> right_i (plus what was not asked for). A reversible system has left = right.

    Attributes:
        eigenvalues: [components], modulus descending, the one with positive imaginary part first in each conjugate
            pair; real where the system is reversible.
        right: From states [n, d] to the right eigenfunctions [n, components], E right_i = eigenvalues[i] right_i.
        left: From states to the left eigenfunctions, [n, components], with <left_i, right_j> = 1 if i = j, else 0.
            None where it is not given.
        density: From states to the invariant density, [n]. None where there is none.
    """

    eigenvalues: Inexact[np.ndarray, " components"]
    right: Callable[..., np.ndarray]
    left: Callable[..., np.ndarray] | None = None
    density: Callable[..., np.ndarray] | None = None


def conjugate_order(eigenvalues: Inexact[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """The order that sorts eigenvalues of a real operator: modulus descending, conjugate pairs kept together.

    Sorting by modulus alone tears pairs apart that rounding made unequal.
    """
    values = np.asarray(eigenvalues, np.complex128)
    height = np.where(np.abs(np.imag(values)) <= 1e-13 * np.abs(values), 0, np.imag(values))
    lower = [int(i) for i in np.flatnonzero(height < 0)]
    order = []
    for i in np.lexsort((-np.real(values), -np.abs(values))):
        if height[i] >= 0:
            order.append(int(i))
        if height[i] > 0 and lower:
            order.append(lower.pop(int(np.argmin(np.abs(values[lower] - np.conj(values[i]))))))
    return np.array([*order, *lower], int)


@validated(finite=("states",))
def column(states: Float[Array | np.ndarray, "n 1"]) -> Float[np.ndarray, " n"]:
    """States on a line as a vector of float64."""
    return np.asarray(states, np.float64)[:, 0]


@validated(finite=("states",))
def rows(states: Float[Array | np.ndarray, "n d"], width: int) -> Float[np.ndarray, "n d"]:
    """States of so many coordinates in float64."""
    if states.shape[1] != width:
        fail("states", f"have shape [n, {width}]", f"shape {states.shape}")
    return np.asarray(states, np.float64)
