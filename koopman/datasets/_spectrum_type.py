"""Type of exact spectra, and helpers; each system and its spectrum are in one other module."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float, Inexact, Int

from dissociation._core.checks import fail
from dissociation._core.rounding_ties import snapped
from dissociation._core.validation import validated


class ExactSpectrum(NamedTuple):
    """Leading part of the spectrum of (E f)(x) = E[f(x') | x], with x' the successor of x.

    With <f, g> = integral of conj(f) g times the invariant density, E is the sum over i of
    eigenvalues[i] <left_i, .> right_i, plus further components.

    Attributes:
        eigenvalues: Eigenvalues by falling modulus, positive imaginary part first in each conjugate
            pair, real if the system is reversible: [components].
        right: Function of states [n, d] to right eigenfunctions [n, components].
        left: Function of states [n, d] to left eigenfunctions [n, components], <left_i, right_j> =
            delta_ij, equal to `right` for a reversible system; or None.
        density: Function of states [n, d] to the invariant density, [n]; or None.
    """

    eigenvalues: Inexact[np.ndarray, " components"]
    right: Callable[..., np.ndarray]
    left: Callable[..., np.ndarray] | None = None
    density: Callable[..., np.ndarray] | None = None


def conjugate_order(eigenvalues: Inexact[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
    """Return the order of eigenvalues by falling modulus, with conjugate pairs adjacent.

    The eigenvalues are those of a real operator.
    """
    values = np.asarray(eigenvalues, np.complex128)
    moduli = np.abs(values)
    # Numbers that differ by rounding count as equal, which keeps pairs adjacent.
    keys = np.stack([snapped(numbers, moduli) for numbers in (moduli, values.real, values.imag)])
    _, kinds = np.unique(keys, axis=1, return_inverse=True)
    kinds = kinds.ravel()  # NumPy 2.0 keeps an axis

    # Equal values are counted, so that a repeated pair is not cut.
    order = np.argsort(kinds, kind="stable")
    ordered = kinds[order]
    copies = np.empty_like(order)
    copies[order] = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    modulus, real, imaginary = keys
    return np.lexsort((-imaginary, copies, -real, -modulus))


@validated(finite=("states",))
def rows(states: Float[Array | np.ndarray, "n d"], width: int) -> Float[np.ndarray, "n d"]:
    """Return states of `width` coordinates in float64."""
    if states.shape[1] != width:
        fail("states", f"have shape [n, {width}]", f"shape {states.shape}")
    # NumPy, to compute in float64 even if JAX's x64 mode is off.
    return np.asarray(states, np.float64)
