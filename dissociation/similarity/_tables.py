"""All pairs of many representations by one measure, in one program."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.linalg import product
from dissociation.similarity._base import Route

PART = 4096
"""Entries of flat matrices that are multiplied at a time on a CPU, whose caches hold them: three times as fast."""

TILE_BYTES = 64 * 2**20
"""What comparing one tile of pairs may hold."""

FEWEST_TILES = 5
"""Tiles along one side of a symmetric table, if there are so many representations."""

BATCH_BYTES = 16 * 2**20
"""What preparing one batch of representations may hold."""

SCRATCH = 6
"""Arrays of the size of its result that preparing a representation holds, about."""

Stacks = tuple[Array, ...]
"""Representations of equal widths together: [items, n, p] each."""


class Plan(NamedTuple):
    """How tables are computed.

    Attributes:
        symmetric: Whether the second set is the first one, and the measure symmetric: half of the pairs.
        itemsize: Bytes per number.
        pair_numbers: Numbers held while two are compared.
        whole: Whether products of flat matrices are taken at once.
    """

    symmetric: bool
    itemsize: int
    pair_numbers: int
    whole: bool


def prepared_bytes(route: Route, stack: Array, number: int) -> int:
    """Bytes of one prepared representation of so many samples."""
    example = jax.ShapeDtypeStruct((number, stack.shape[2]), stack.dtype)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(route.prepare, example)))


@eqx.filter_jit
def prepared(route: Route, stacks: Stacks, plan: Plan) -> list[Any]:
    """All representations, prepared, without what `route` costs."""
    return [_prepare(route, stack, plan) for stack in stacks]


@eqx.filter_jit
def tables(route: Route, stacks: Stacks, others: Stacks | None, rows: Array | None, plan: Plan) -> Array:
    """The measure of all pairs, for several choices of samples.

    `rows`: Samples of both sets, [choices, m]. None: all, once.

    Returns:
        [choices, items, others].
    """

    def chosen(own: Array | None) -> Array:
        sets = [tuple(s if own is None else s[:, own] for s in one) for one in (stacks, others) if one is not None]
        ready = [prepared(route, one, plan) for one in sets]
        return _table(route, ready[0], ready[-1], plan)

    return chosen(None)[None] if rows is None else lax.map(chosen, rows)


@eqx.filter_jit
def reordered(route: Route, first: list[Any], second: Any, orders: Array, plan: Plan) -> Array:
    """`tables` with the second set's samples in other orders, [orders, items, others].

    `orders`: [orders, n].
    """

    def turned(order: Array) -> Array:
        own = jax.tree.map(lambda leaf: leaf[:, order] if leaf.ndim > 1 else leaf, second)
        return _table(route, first, own if route.by_rows else prepared(route, own, plan), plan)

    return lax.map(turned, orders)


@eqx.filter_jit
def expected_table(route: Route, stacks: Stacks, others: Stacks | None, plan: Plan) -> Array:
    """The measure's means over all orders of the samples, where the route knows them: [items, others]."""
    first = prepared(route, stacks, plan)
    second = first if others is None else prepared(route, others, plan)
    return _joined([[_outer(route.expected, a, b) for b in second] for a in first])


def _table(route: Route, first: list[Any], second: list[Any], plan: Plan) -> Array:
    blocks: list[list[Array]] = []
    for i, a in enumerate(first):
        row = []
        for j, b in enumerate(second):
            if plan.symmetric and j < i:
                row.append(blocks[j][i].T)
                continue
            row.append(_block(route, a, b, plan, symmetric=plan.symmetric and i == j))
        blocks.append(row)
    return _joined(blocks)


def _joined(blocks: list[list[Array]]) -> Array:
    return jnp.concatenate([jnp.concatenate(row, 1) for row in blocks], 0)


def _prepare(route: Route, stack: Array, plan: Plan) -> Any:
    own = prepared_bytes(route, stack, stack.shape[1]) + stack.shape[1] * stack.shape[2] * plan.itemsize
    batch = int(np.clip(BATCH_BYTES // (SCRATCH * own), 1, stack.shape[0]))
    if batch == 1:  # a batch of one would be computed by the slower products of batches
        return lax.map(route.prepare, stack)
    return lax.map(route.prepare, stack, batch_size=batch)


def _outer(function: Any, a: Any, b: Any) -> Array:
    return jax.vmap(lambda one: jax.vmap(lambda other: function(one, other))(b))(a)


def _block(route: Route, a: Any, b: Any, plan: Plan, *, symmetric: bool) -> Array:
    """One measure of all pairs of two stacks of prepared representations."""
    finished = route.finish
    if finished is not None:
        parts = jax.tree.map(lambda one, other: _products(one, other, plan), a.entries, b.entries)
        products = sum(jax.tree.leaves(parts))
        light = [one._replace(entries=one.mean) for one in (a, b)]
        finish = lambda row, one: jax.vmap(lambda value, other: finished(value, one, other))(row, light[1])  # noqa: E731
        return jax.vmap(finish)(products, light[0])
    sizes = [jax.tree.leaves(one)[0].shape[0] for one in (a, b)]
    side = int(np.sqrt(TILE_BYTES / (plan.itemsize * max(plan.pair_numbers, 1))))
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
    if symmetric:
        upper = jnp.triu(out, 1)
        return jnp.triu(out) + upper.T
    return out


def _cut(tree: Any, start: Array | int, width: int) -> Any:
    return jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, width), tree)


def _products(a: Array, b: Array, plan: Plan) -> Array:
    """<a_i, b_j> of all pairs, a part of the entries at a time."""
    a, b = a.reshape(a.shape[0], -1), b.reshape(b.shape[0], -1)
    size = a.shape[1]
    parts = size // PART
    if plan.whole or parts < 2:
        return product(a, b.T)

    def add(index: Array | int, total: Array) -> Array:
        own = [lax.dynamic_slice_in_dim(one, index * PART, PART, 1) for one in (a, b)]
        return total + product(own[0], own[1].T)

    total = lax.fori_loop(0, parts, add, jnp.zeros((a.shape[0], b.shape[0]), a.dtype))
    return total + product(a[:, parts * PART :], b[:, parts * PART :].T)
