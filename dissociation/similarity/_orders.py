"""Orders of samples. Two independent representations are as similar in any of them."""

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy.special import gammaln

from dissociation._core.types import PRNGKey

Units = list[np.ndarray]
"""Rows that move together, [units, rows of a unit], in one array per number of rows."""

Kinds = list[np.ndarray]
"""Number of the kind of each unit, [units], in one array per array of `Units`.

Equal units are of one kind.
"""


def stacked_by_length(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return arrays [n] stacked by their length n, from the shortest."""
    arrays_of_length = defaultdict(list)
    for array in arrays:
        arrays_of_length[len(array)].append(array)
    return [np.stack(arrays_of_length[length]) for length in sorted(arrays_of_length)]


def units_of(
    number: int, repeats: int = 1, num_positions: int = 1, groups: np.ndarray | None = None
) -> Units:
    """Return the units of samples, or those of groups [n].

    Samples occur `repeats` times and have `num_positions` positions.
    """
    rows = np.arange(number).reshape(repeats, -1, num_positions)
    rows = rows.swapaxes(0, 1).reshape(rows.shape[1], -1)
    if groups is None:
        return [rows]
    of_samples = groups[rows[:, 0]]
    num_groups = of_samples.max() + 1
    units = [rows[of_samples == group].reshape(-1) for group in range(num_groups)]
    return stacked_by_length(units)


def kinds_of(features: np.ndarray, units: Units) -> Kinds:
    """Return the kinds of units, by equality of their features [n, p]."""
    numbers = np.ascontiguousarray(features + 0.0)  # -0 equals 0
    words = numbers.view(np.uint32).astype(np.uint64)
    # Sums of integers do not round: equal rows have equal sums, and others differ but for chance.
    draws = np.random.Philox(key=2).random_raw(words.shape[1])
    factors = draws | np.uint64(1)
    sums = words @ factors

    kinds = []
    for rows in units:
        _, kind = np.unique(sums[rows], axis=0, return_inverse=True)
        kinds.append(kind.reshape(-1))
    return kinds


def log_number(kinds: Kinds) -> float:
    """Return the logarithm of the number of orders that differ, for units of these kinds."""
    total = 0.0
    for of_size in kinds:
        repeats = gammaln(np.bincount(of_size) + 1)
        total += gammaln(len(of_size) + 1) - repeats.sum()
    return float(total)


def all_orders(units: Units, kinds: Kinds) -> np.ndarray:
    """Return all orders that differ for units of these kinds, except the identity, [orders, n]."""
    choices = []
    for of_size in kinds:
        counts = np.bincount(of_size).tolist()
        choices.append(list(_arrangements(counts)))

    orders = []
    for arrangements in itertools.product(*choices):
        moves = []
        is_moved = False
        for of_size, arrangement in zip(kinds, arrangements, strict=True):
            move = np.empty(len(of_size), int)
            move[np.argsort(arrangement, kind="stable")] = np.argsort(of_size, kind="stable")
            is_moved = is_moved or (of_size[move] != of_size).any()
            moves.append(move[None])
        if is_moved:
            orders.append(_rows(units, moves)[0])
    num_rows = sum(rows.size for rows in units)
    return np.array(orders, int).reshape(len(orders), num_rows)


def random_orders(
    key: PRNGKey, count: int, units: Units, *, blocks: str = "shuffled"
) -> np.ndarray:
    """Return up to `count` random orders, [orders, n].

    `blocks="shuffled"` permutes units of one size. `blocks="contiguous"` shifts all cyclically, by
    another number in each order, so that neighbours in a time series stay neighbours.
    """
    sizes = tuple(map(len, units))
    orders = jax.device_get(_drawn(key, count, sizes, blocks == "contiguous"))
    return _rows(units, orders)


@partial(jax.jit, static_argnums=(1, 2, 3))
def _drawn(key: PRNGKey, count: int, sizes: Sequence[int], shifted: bool) -> list[Array]:
    """Return orders of the units of each size, [orders, units]."""
    orders = []
    for index, size in enumerate(sizes):
        size_key = key
        if index:
            size_key = jax.random.fold_in(key, index)
        if shifted:
            # Cyclic shifts keep the dependence of neighbours in a time series.
            shifts = 1 + jax.random.permutation(size_key, size - 1)[:count]
            orders.append((jnp.arange(size)[None] + shifts[:, None]) % size)
        else:
            keys = jax.random.split(size_key, count)
            permute = jax.vmap(lambda key, size=size: jax.random.permutation(key, size))
            orders.append(permute(keys))
    return orders


def _rows(units: Units, orders: Sequence[np.ndarray]) -> np.ndarray:
    """Return orders of rows, [orders, n], from orders of the units of each size."""
    num_rows = sum(rows.size for rows in units)
    orders_of_rows = np.empty((len(orders[0]), num_rows), int)
    for rows, order in zip(units, orders, strict=True):
        orders_of_rows[:, rows.ravel()] = rows[order].reshape(len(order), -1)
    return orders_of_rows


def _arrangements(counts: list[int]) -> Iterator[list[int]]:
    """Yield every sequence that holds each number i `counts[i]` times."""
    if not any(counts):
        yield []
    for kind, count in enumerate(counts):
        if count:
            remaining = [*counts[:kind], count - 1, *counts[kind + 1 :]]
            for arrangement in _arrangements(remaining):
                yield [kind, *arrangement]
