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


def snapped(values: Any, size: Any = None) -> Any:
    """Return `values`, a constant for derivatives, with numbers made equal that differ by rounding alone.

    Runs of neighbours closer than 64 rounding units of `size` (default: the largest) get their
    smallest value, or 0 if it is as close to 0.
    """
    xp: Any = np if isinstance(values, np.ndarray) else jnp
    values = xp.asarray(values)
    if not xp.issubdtype(values.dtype, xp.floating) or not values.size:
        return values
    order, _, tied = _sorted(xp, values, size)
    if xp is np:
        found = np.empty_like(tied)
        found[order] = tied
    else:
        found = jnp.zeros_like(tied).at[order].set(tied)
    return found.reshape(values.shape)


def ranks(
    values: Float[Array | np.ndarray, " number"], size: Any = None
) -> Float[Array, " number"]:
    """Return ranks from 1, with mean ranks for ties."""
    values = jnp.asarray(values)
    order, first, _ = _sorted(jnp, values, size)
    number, kind = values.shape[0], values.dtype
    places = jnp.arange(number)
    last = jnp.concatenate([first[1:], jnp.ones(1, bool)])
    start = lax.cummax(jnp.where(first, places, 0))
    end = lax.cummin(jnp.where(last, places, number - 1), reverse=True)
    mean = 1 + 0.5 * (start.astype(kind) + end.astype(kind))
    return jnp.zeros(number, kind).at[order].set(mean)


def _sorted(xp: Any, values: Any, size: Any) -> tuple[Any, Any, Any]:
    """Return the rising order, and in this order True for the first number of each tie, and tied numbers."""
    values = (values if xp is np else lax.stop_gradient(values)).reshape(-1)
    if size is None:
        size = xp.max(xp.where(xp.isfinite(values), abs(values), 0))
    elif xp is jnp:
        size = lax.stop_gradient(size)
    # A rescaling by a power of two is exact here, so it changes no comparison.
    slack = xp.asarray(size, values.dtype) * xp.asarray(
        ROUNDINGS * xp.finfo(values.dtype).eps, values.dtype
    )
    slack = xp.broadcast_to(slack, values.shape) if slack.ndim == 0 else slack.reshape(-1)
    places = xp.arange(values.size)
    if xp is np:
        order = np.argsort(values, kind="stable")
        values, slack = values[order], slack[order]
        running = np.maximum.accumulate
    else:  # the sort returns the numbers, because XLA may round recomputed ones differently
        values, slack, order = lax.sort((values, slack, places), num_keys=1)
        running = lax.cummax
    with np.errstate(invalid="ignore"):  # infinity - infinity
        same = (values[1:] - values[:-1] <= xp.maximum(slack[1:], slack[:-1])) | (
            values[1:] == values[:-1]
        )
        start = running(xp.where(xp.concatenate([xp.zeros(1, bool), same]), 0, places))
        # Dense numbers form long runs, which are cut from their start: a fixed grid would separate
        # equal numbers.
        width = xp.where(slack[start] > 0, LONGEST * slack[start], 1)
        cell = xp.where(values == values[start], 0, xp.floor((values - values[start]) / width))
    first = xp.concatenate(
        [xp.ones(1, bool), ~(same & (cell[1:] == cell[:-1]))]
    )  # each NaN is a tie of its own
    begin = running(xp.where(first, places, 0))
    tied = values[begin]
    return order, first, xp.where(abs(tied) <= slack[begin], 0, tied)
