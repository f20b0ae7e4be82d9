"""Arithmetic that the operators and the losses share."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Inexact


def rounding_unit(array: Array | np.ndarray) -> float:
    """Return the machine epsilon of an array's dtype."""
    return float(jnp.finfo(array.dtype).eps)


def positive_or_one(x: Array) -> Array:
    """Return positive entries unchanged, and 1 for the others, as a safe divisor."""
    return jnp.where(x > 0, x, 1.0)


def ratio_or_zero(
    numerator: Array | float, denominator: Array, is_valid: Bool[Array, "..."]
) -> Array:
    """Return the ratio of valid entries, and zero with a finite gradient for the others."""
    return jnp.where(is_valid, numerator / jnp.where(is_valid, denominator, 1.0), 0.0)


def largest_entries(matrix: Inexact[Array, "d r"]) -> Inexact[Array, "1 r"]:
    """Return the entry of largest modulus in every column."""
    rows = jnp.argmax(jnp.abs(matrix), 0)
    return jnp.take_along_axis(matrix, rows[None], 0)
