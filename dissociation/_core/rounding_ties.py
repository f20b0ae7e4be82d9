"""Ties among computed numbers that differ by rounding alone, and ranks with such ties."""

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


def snapped(values: Any, size: Any = None) -> Any:
    """Return `values` as a constant, with ties where numbers differ by rounding alone.

    Runs of neighbours closer than 64 rounding units of `size` (default: the largest) get their
    smallest value, or 0 if it is as close to 0.
    """
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    values = xp.asarray(values)
    if not xp.issubdtype(values.dtype, xp.floating) or not values.size:
        return values
    order, _, tied = _sorted(xp, values, size)
    if xp is np:
        unsorted = np.empty_like(tied)
        unsorted[order] = tied
    else:
        unsorted = jnp.zeros_like(tied).at[order].set(tied)
    return unsorted.reshape(values.shape)


def ranks(
    values: Float[Array | np.ndarray, " number"], size: Any = None
) -> Float[Array, " number"]:
    """Return ranks from 1, with mean ranks for ties."""
    values = jnp.asarray(values)
    order, is_first, _ = _sorted(jnp, values, size)
    number = values.shape[0]
    dtype = values.dtype
    positions = jnp.arange(number)
    is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])
    start = lax.cummax(jnp.where(is_first, positions, 0))
    end = lax.cummin(jnp.where(is_last, positions, number - 1), reverse=True)
    mean = 1 + 0.5 * (start.astype(dtype) + end.astype(dtype))
    return jnp.zeros(number, dtype).at[order].set(mean)


def _sorted(xp: Any, values: Any, size: Any) -> tuple[Any, Any, Any]:
    """Return the rising order, flags of the first number of each tie, and tied numbers.

    Flags and tied numbers are in the rising order.
    """
    if xp is jnp:
        values = lax.stop_gradient(values)
    values = values.reshape(-1)
    if size is None:
        size = xp.max(xp.where(xp.isfinite(values), abs(values), 0))
    elif xp is jnp:
        size = lax.stop_gradient(size)

    # A rescaling by a power of two is exact here, so it changes no comparison.
    unit = xp.asarray(ROUNDINGS * xp.finfo(values.dtype).eps, values.dtype)
    slack = xp.asarray(size, values.dtype) * unit
    slack = xp.broadcast_to(slack, values.shape) if slack.ndim == 0 else slack.reshape(-1)

    positions = xp.arange(values.size)
    if xp is np:
        order = np.argsort(values, kind="stable")
        values = values[order]
        slack = slack[order]
        running_maximum = np.maximum.accumulate
    else:  # the sort returns the numbers, because XLA may round recomputed ones differently
        values, slack, order = lax.sort((values, slack, positions), num_keys=1)
        running_maximum = lax.cummax

    with np.errstate(invalid="ignore"):  # infinity - infinity
        is_near = values[1:] - values[:-1] <= xp.maximum(slack[1:], slack[:-1])
        is_tied = is_near | (values[1:] == values[:-1])
        is_continued = xp.concatenate([xp.zeros(1, bool), is_tied])
        start = running_maximum(xp.where(is_continued, 0, positions))

        # Dense numbers form long runs, which are cut from their start: a fixed grid would separate
        # equal numbers.
        width = xp.where(slack[start] > 0, LONGEST * slack[start], 1)
        offset = values - values[start]
        cell = xp.where(values == values[start], 0, xp.floor(offset / width))

    is_first = ~(is_tied & (cell[1:] == cell[:-1]))
    is_first = xp.concatenate([xp.ones(1, bool), is_first])  # each NaN is a tie of its own
    tie_start = running_maximum(xp.where(is_first, positions, 0))
    tied = values[tie_start]
    return order, is_first, xp.where(abs(tied) <= slack[tie_start], 0, tied)
