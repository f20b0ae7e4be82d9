"""Tables of one measure for all pairs of representations."""

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_count
from dissociation._core.linalg import product
from dissociation.similarity._base import Measure, Route, cheapest
from dissociation.similarity._items import Items
from dissociation.similarity._measures import routes_of
from dissociation.training._memory import free_memory

# Parts of this size stay in a CPU's caches, which makes products three times as fast.
PART = 4096
"""Entries of flat matrices that are multiplied at a time on a CPU."""

TILE_BYTES = 64 * 2**20
"""Memory of one tile of pairs, in bytes."""

FEWEST_TILES = 5
"""Smallest number of tiles along a side of a symmetric table."""

BATCH_BYTES = 16 * 2**20
"""Memory of one batch of prepared representations, in bytes."""

SCRATCH = 6
"""Approximate memory of preparation, in arrays of the size of its result."""

# About a second: the host shows progress between chunks.
CHUNK_WORK = 2e9
"""Multiplications of one chunk of orders or blocks."""

Stacks = tuple[Array, ...]
"""Representations stacked by width, [items, n, p] each."""


def prepared_bytes(route: Route, stack: Array) -> int:
    """Return the size of one prepared representation, in bytes."""
    example = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(route.prepare, example)))


@eqx.filter_jit
def prepared(route: Route, stacks: Stacks) -> list[Any]:
    """Return all representations, prepared."""
    return [_prepare(route, stack) for stack in stacks]


@eqx.filter_jit
def tables(route: Route, stacks: Stacks, others: Stacks | None, rows: Array | None, symmetric: bool) -> Array:
    """Return the measure of all pairs for samples `rows` [choices, m], by default all: [choices, items, others]."""

    def chosen(own: Array | None) -> Array:
        sets = [tuple(s if own is None else s[:, own] for s in one) for one in (stacks, others) if one is not None]
        ready = [prepared(route, one) for one in sets]
        return _table(route, ready[0], ready[-1], symmetric)

    return chosen(None)[None] if rows is None else lax.map(chosen, rows)


@eqx.filter_jit
def reordered(route: Route, first: list[Any], second: Any, orders: Array, symmetric: bool) -> Array:
    """Return `tables` [orders, items, others] for `orders` [orders, n] of the second set, prepared if `by_rows`."""

    def turned(order: Array) -> Array:
        own = jax.tree.map(lambda leaf: leaf[:, order] if leaf.ndim > 1 else leaf, second)
        return _table(route, first, own if route.by_rows else prepared(route, own), symmetric)

    return lax.map(turned, orders)


@eqx.filter_jit
def expected_table(route: Route, stacks: Stacks, others: Stacks | None) -> Array:
    """Return the measure's means over all orders of the samples, [items, others]."""
    first = prepared(route, stacks)
    second = first if others is None else prepared(route, others)
    return _joined([[_outer(route.expected, a, b) for b in second] for a in first])


def _table(route: Route, first: list[Any], second: list[Any], symmetric: bool) -> Array:
    blocks: list[list[Array]] = []
    for i, a in enumerate(first):
        mirrored = [blocks[j][i].T for j in range(i)] if symmetric else []
        rest = enumerate(second[len(mirrored) :], len(mirrored))
        blocks.append(mirrored + [_block(route, a, b, symmetric=symmetric and i == j) for j, b in rest])
    return _joined(blocks)


def _joined(blocks: list[list[Array]]) -> Array:
    return jnp.concatenate([jnp.concatenate(row, 1) for row in blocks], 0)


def _prepare(route: Route, stack: Array) -> Any:
    own = prepared_bytes(route, stack) + stack.shape[1] * stack.shape[2] * stack.dtype.itemsize
    batch = int(np.clip(BATCH_BYTES // (SCRATCH * own), 1, stack.shape[0]))
    # A batch of one would be computed by the slower products of batches.
    return lax.map(route.prepare, stack, batch_size=None if batch == 1 else batch)


def _outer(function: Any, a: Any, b: Any) -> Array:
    return jax.vmap(lambda one: jax.vmap(lambda other: function(one, other))(b))(a)


def _block(route: Route, a: Any, b: Any, *, symmetric: bool) -> Array:
    """Return one measure of all pairs of two stacks of prepared representations."""
    finished = route.finish
    if finished is not None:
        products = sum(jax.tree.leaves(jax.tree.map(_products, a.entries, b.entries)))
        light = [one._replace(entries=one.mean) for one in (a, b)]
        finish = lambda row, one: jax.vmap(lambda value, other: finished(value, one, other))(row, light[1])  # noqa: E731
        return jax.vmap(finish)(products, light[0])
    sizes = [jax.tree.leaves(one)[0].shape[0] for one in (a, b)]
    side = route.tile
    if symmetric:  # of the tiles on the diagonal, half is for nothing
        side = min(side, -(-sizes[0] // FEWEST_TILES))
    tile = [-(-size // -(-size // max(1, min(side, size)))) for size in sizes]
    starts = [np.minimum(np.arange(0, size, width), size - width) for size, width in zip(sizes, tile, strict=True)]
    where = np.array([(i, j) for i in starts[0] for j in starts[1] if not (symmetric and j < i)])
    if len(where) == 1:
        out = _outer(route.compare, a, b)
    else:
        kind = jax.eval_shape(lambda: _outer(route.compare, *(_cut(one, 0, 1) for one in (a, b)))).dtype
        places = jnp.asarray(where)

        def put(index: Array | int, out: Array) -> Array:
            i, j = places[index]
            found = _outer(route.compare, _cut(a, i, tile[0]), _cut(b, j, tile[1]))
            return lax.dynamic_update_slice(out, found, (i, j))

        out = lax.fori_loop(0, len(where), put, jnp.zeros(sizes, kind))
    return jnp.triu(out) + jnp.triu(out, 1).T if symmetric else out


def _cut(tree: Any, start: Array | int, width: int) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, width), tree)


def _products(a: Array, b: Array) -> Array:
    """Return <a_i, b_j> of all pairs, on a CPU from parts of the entries."""
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    parts = a.shape[1] // PART
    if parts < 2 or jax.default_backend() != "cpu":
        return product(a, b.T)

    def add(index: Array | int, total: Array) -> Array:
        own = [lax.dynamic_slice_in_dim(one, index * PART, PART, 1) for one in (a, b)]
        return total + product(own[0], own[1].T)

    total = lax.fori_loop(0, parts, add, jnp.zeros((a.shape[0], b.shape[0]), a.dtype))
    return total + product(a[:, parts * PART :], b[:, parts * PART :].T)


def in_chunks(
    function: Callable[[Array], Array], choices: Any, work: float, advance: Callable[[int, str], None]
) -> np.ndarray:
    """Return a compiled function's results for choices of samples, [choices, m], in chunks."""
    count = len(choices)
    size = int(np.clip(CHUNK_WORK // max(work, 1), 1, count))
    parts = []
    for start in range(0, count, size):  # the last ones stand in for those that are missing: one program
        part = np.asarray(choices)[np.minimum(np.arange(start, start + size), count - 1)]
        parts.append(np.asarray(function(jnp.asarray(part)))[: count - start])
        advance(min(start + size, count), "")
    return np.concatenate(parts)


class Job:
    """One measure on two sets of representations, or on pairs within one set."""

    def __init__(
        self, measure: Measure, first: Items, second: Items | None, options: Mapping[str, Any], budget: int | None
    ):
        self.measure, self.first, self.second = measure, first, second
        both = first.arrays + (second.arrays if second else [])
        widths = [array.shape[2] for array in both]
        sizes = both[0].shape[1], max(widths), min(widths)
        items = sum(array.shape[0] for array in both)
        pairs = len(first.labels) * len((second or first).labels)
        routes = routes_of(measure, dict(options))
        route = cheapest(routes, *sizes, items=items, pairs=pairs)
        bytes_of_pair = both[0].dtype.itemsize * route.held(*sizes[:2])
        self.route = route._replace(tile=int((TILE_BYTES / bytes_of_pair) ** 0.5))
        self.work = route.work(*sizes, items=items, pairs=pairs)
        self.matrix = next((route for route in routes if route.matrix), None)
        known = tuple(route for route in routes if route.expected is not None)
        self.expected = cheapest(known, *sizes, items=1, pairs=0) if known else None
        self.symmetric = measure.symmetric and second is None
        self.budget = (
            free_memory(both) if budget is None else check_count("memory_budget", budget, minimum=1, maximum=None)
        )

    def _pieces(self, one: Items, route: Route) -> list[tuple[Stacks, list[int]]]:
        """Return stacks and their label indices, in as many pieces as memory requires."""
        bytes_of = [prepared_bytes(route, array) for array in one.arrays]
        sets = 1 if self.second is None else 2
        if sets * sum(size * len(array) for size, array in zip(bytes_of, one.arrays, strict=True)) <= self.budget:
            return [(tuple(one.arrays), sum(one.places, start=[]))]
        pieces = []
        for size, array, places in zip(bytes_of, one.arrays, one.places, strict=True):
            # Two pieces are held while they are compared.
            step = max(1, int(self.budget // (2 * size)))
            pieces += [((array[i : i + step],), places[i : i + step]) for i in range(0, len(array), step)]
        return pieces

    def _over_pieces(self, route: Route, of_pair: Callable[[Stacks, Stacks | None, bool], Any]) -> Array:
        """Return the tables of all pairs of pieces, joined: [..., items, others]."""
        rows = self._pieces(self.first, route)
        columns = rows if self.second is None else self._pieces(self.second, route)
        count = len(self.first.labels), len((self.second or self.first).labels)
        table: Any = None
        for i, (one, own) in enumerate(rows):
            for j, (other, others) in enumerate(columns):
                if self.symmetric and j < i:
                    continue
                same = self.second is None and i == j
                part = np.asarray(of_pair(one, None if same else other, self.symmetric and same))
                table = np.zeros((*part.shape[:-2], *count), part.dtype) if table is None else table
                table[(..., *np.ix_(own, others))] = part
                if self.symmetric and not same:
                    table[(..., *np.ix_(others, own))] = part.swapaxes(-1, -2)
        return jnp.asarray(table)

    def run(
        self,
        choices: Any = None,
        advance: Callable[[int, str], None] = lambda done, text: None,
        *,
        reorder: bool = False,
    ) -> Array:
        """Return tables for choices of samples, or for orders of the second set's samples: [choices, items, others]."""
        route = self.route

        def table(one: Stacks, other: Stacks | None, symmetric: bool) -> Any:
            if choices is None:
                return tables(route, one, other, None, symmetric)
            chunk = lambda part: tables(route, one, other, part, symmetric)  # noqa: E731
            if reorder:
                first, second = prepared(route, one), one if other is None else other
                if route.by_rows:
                    second = first if other is None else prepared(route, other)
                chunk = lambda part: reordered(route, first, second, part, symmetric)  # noqa: E731
            return in_chunks(chunk, choices, self.work, advance)

        return self._over_pieces(route, table)

    def run_expected(self) -> Array:
        """Return the measure's mean over all orders of the samples."""
        route: Any = self.expected
        return self._over_pieces(route, lambda one, other, _: expected_table(route, one, other))
