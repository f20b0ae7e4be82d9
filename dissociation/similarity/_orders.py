"""Orders of samples, under which two independent representations are as similar as in the given order."""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import gammaln

from dissociation._core.types import PRNGKey

Units = list[np.ndarray]
"""Rows that move together, [units, rows of each], in one array per number of rows."""

Kinds = list[np.ndarray]
"""Number of the kind of each unit, [units], in one array per array of `Units`; equal units are of one kind."""


def units_of(
    number: int, repeats: int = 1, each: int = 1, groups: np.ndarray | None = None
) -> Units:
    """Return the units of samples that occur `repeats` times and have `each` positions: samples, or groups [n]."""
    rows = np.arange(number).reshape(repeats, -1, each)
    rows = rows.swapaxes(0, 1).reshape(rows.shape[1], -1)
    if groups is None:
        return [rows]
    of_samples = groups[rows[:, 0]]
    units = [rows[of_samples == group].reshape(-1) for group in range(of_samples.max() + 1)]
    return [
        np.stack([unit for unit in units if len(unit) == size])
        for size in sorted(set(map(len, units)))
    ]


def kinds_of(features: np.ndarray, units: Units) -> Kinds:
    """Return the kinds of units, by equality of their features [n, p]."""
    words = np.ascontiguousarray(features + 0.0).view(np.uint32).astype(np.uint64)  # -0 equals 0
    # Sums of integers do not round: equal rows have equal sums, and others differ but for chance.
    factors = np.random.Philox(key=2).random_raw(words.shape[1]) | np.uint64(1)
    sums = words @ factors
    return [np.unique(sums[rows], axis=0, return_inverse=True)[1].reshape(-1) for rows in units]


def log_number(kinds: Kinds) -> float:
    """Return the logarithm of the number of orders that differ, for units of these kinds."""
    total = 0.0
    for of_size in kinds:
        total += gammaln(len(of_size) + 1) - gammaln(np.bincount(of_size) + 1).sum()
    return float(total)


def all_orders(units: Units, kinds: Kinds) -> np.ndarray:
    """Return all orders that differ for units of these kinds, without the given one, [orders, n]."""
    per_size = [list(_arrangements(np.bincount(of_size).tolist())) for of_size in kinds]
    orders = []
    for arrangements in itertools.product(*per_size):
        moved = []
        for of_size, arrangement in zip(kinds, arrangements, strict=True):
            places = np.empty(len(of_size), int)
            places[np.argsort(arrangement, kind="stable")] = np.argsort(of_size, kind="stable")
            moved.append(places)
        if any(
            (of_size[places] != of_size).any() for of_size, places in zip(kinds, moved, strict=True)
        ):
            orders.append(_rows(units, [places[None] for places in moved])[0])
    return np.array(orders, int).reshape(len(orders), sum(part.size for part in units))


def random_orders(
    key: PRNGKey, count: int, units: Units, *, blocks: str = "shuffled"
) -> np.ndarray:
    """Return up to `count` random orders, [orders, n].

    `blocks="shuffled"` permutes units of one size. `blocks="contiguous"` shifts all cyclically, by
    another number in each order, so that neighbours in a time series stay neighbours.
    """
    sizes = tuple(len(part) for part in units)
    return _rows(units, jax.device_get(_drawn(key, count, sizes, blocks == "contiguous")))


@partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: PRNGKey, count: int, sizes: Sequence[int], shifted: bool) -> list[Array]:
    """Return orders of the units of each size, [orders, units]."""
    orders = []
    for place, size in enumerate(sizes):
        own = jax.random.fold_in(key, place) if place else key
        if shifted:
            # Cyclic shifts keep the dependence of neighbours in a time series.
            shifts = 1 + jax.random.permutation(own, size - 1)[:count]
            orders.append((jnp.arange(size)[None] + shifts[:, None]) % size)
        else:
            orders.append(
                jax.vmap(lambda one, size=size: jax.random.permutation(one, size))(
                    jax.random.split(own, count)
                )
            )
    return orders


def _rows(units: Units, orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return orders of rows, [orders, n], from orders of the units of each size."""
    rows = np.empty((len(orders[0]), sum(part.size for part in units)), int)
    for part, order in zip(units, orders, strict=True):
        rows[:, part.ravel()] = part[order].reshape(len(order), -1)
    return rows


def _arrangements(counts: list[int]) -> Iterator[list[int]]:
    """Yield every sequence that holds each number i `counts[i]` times."""
    if not any(counts):
        yield []
    for kind, left in enumerate(counts):
        if left:
            fewer = [*counts[:kind], left - 1, *counts[kind + 1 :]]
            for rest in _arrangements(fewer):
                yield [kind, *rest]
