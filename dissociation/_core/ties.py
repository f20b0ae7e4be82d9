"""Ties among computed numbers, up to rounding."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

# Products and LAPACK leave up to 48 units.
ROUNDINGS = 64
"""Rounding units of `size` within which neighbours are tied."""

LONGEST = 4
"""Length of a run of ties, in units of the tolerance, beyond which the run is cut."""


def snapped(values: Any, size: Any = None) -> Array:
    """Return `values`, a constant for derivatives, with numbers made equal that differ by rounding alone.

    Runs of neighbours closer than 64 rounding units of `size` (default: the largest) get their smallest value, or 0 if
    it is as close to 0.
    """
    values = jnp.asarray(values)
    if not jnp.issubdtype(values.dtype, jnp.floating) or not values.size:
        return values
    order, _, tied = _sorted(values, size)
    return jnp.zeros_like(tied).at[order].set(tied).reshape(values.shape)


def ranks(values: Float[Array | np.ndarray, " number"], size: Any = None) -> Float[Array, " number"]:
    """Return ranks from 1, with mean ranks for ties."""
    values = jnp.asarray(values)
    order, first, _ = _sorted(values, size)
    number, kind = values.shape[0], values.dtype
    places = jnp.arange(number)
    last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
    start = lax.cummax(jnp.where(first, places, 0))
    end = lax.cummin(jnp.where(last, places, number - 1), reverse=True)
    mean = 1 + 0.5 * (start.astype(kind) + end.astype(kind))
    return jnp.zeros(number, kind).at[order].set(mean)


def _sorted(values: Array, size: Any) -> tuple[Array, Array, Array]:
    """Return the rising order, and in this order True for the first number of each tie, and tied numbers."""
    values = lax.stop_gradient(values).reshape(-1)
    size = jnp.max(jnp.where(jnp.isfinite(values), abs(values), 0)) if size is None else lax.stop_gradient(size)
    # A rescaling by a power of two is exact here, so it changes no comparison.
    slack = jnp.asarray(size, values.dtype) * jnp.asarray(ROUNDINGS * jnp.finfo(values.dtype).eps, values.dtype)
    places = jnp.arange(values.size)
    # The sort returns the numbers, because XLA may round recomputed ones differently.
    slack = jnp.broadcast_to(slack.reshape(-1), values.shape)
    values, slack, order = lax.sort((values, slack, places), num_keys=1)
    same = (values[1:] - values[:-1] <= jnp.maximum(slack[1:], slack[:-1])) | (values[1:] == values[:-1])
    start = lax.cummax(jnp.where(jnp.concatenate([jnp.zeros(1, bool), same]), 0, places))
    # Dense numbers form long runs, which are cut from their start: a fixed grid would separate equal numbers.
    width = jnp.where(slack[start] > 0, LONGEST * slack[start], 1)
    cell = jnp.where(values == values[start], 0, jnp.floor((values - values[start]) / width))
    first = jnp.concatenate([jnp.ones(1, bool), ~(same & (cell[1:] == cell[:-1]))])  # each NaN is a tie of its own
    begin = lax.cummax(jnp.where(first, places, 0))
    tied = values[begin]
    return order, first, jnp.where(abs(tied) <= slack[begin], 0, tied)
