"""Tables of one measure for all pairs of representations."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_count
from dissociation._core.linalg import product
from dissociation.similarity._base import Form, Measure, inner, of_sizes
from dissociation.similarity._items import Items
from dissociation.training._machine import free_memory

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

CHUNKS, SMALLEST_CHUNK = 10, 5
"""Number of chunks of orders or blocks, between which the host shows progress, and of choices in one, at least."""

Stacks = tuple[Array, ...]
"""Representations stacked by width, [items, n, p] each."""

Sets = tuple[Stacks, Stacks | None]
"""Two sets, or one set whose pairs are compared."""


def _prepared_bytes(form: Form, stack: Array) -> int:
    """Return the size of one prepared representation, in bytes."""
    example = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    return _bytes(jax.eval_shape(form.prepare, example))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@eqx.filter_jit
def _tables(form: Form, sets: Sets, choices: Array | None, task: str, symmetric: bool) -> Array:
    """Return the measure of all pairs, [choices, items, others], and its means over all orders, if they are known.

    Choices of samples [choices, m] are samples of both sets if `task` is "rows", and of the second set if it is
    "orders".
    """
    first, second = sets
    ready = _prepared(form, first, None) if task == "orders" else None

    def prepared(rows: Array | None) -> tuple[list[Any], list[Any]]:
        b = _prepared(form, first if second is None else second, rows)
        return ready or (b if second is None else _prepared(form, first, rows)), b

    if choices is not None:
        return lax.map(lambda rows: _table(form, *prepared(rows), symmetric), choices)
    a, b = prepared(None)
    found = [_table(form, a, b, symmetric)]
    if form.expected is not None:
        found.append(_joined([[_outer(form.expected, one, other) for other in b] for one in a]))
    return jnp.stack(found)


def _prepared(form: Form, stacks: Stacks, rows: Array | None) -> list[Any]:
    """Return all representations of a set, prepared."""
    found = []
    for stack in stacks:
        own = stack if rows is None else stack[:, rows]
        held = SCRATCH * (_prepared_bytes(form, own) + _bytes(own[0]))
        batch = int(np.clip(BATCH_BYTES // held, 1, len(own)))
        # A batch of one would be computed by the slower products of batches.
        found.append(lax.map(form.prepare, own, batch_size=None if batch == 1 else batch))
    return found


def _table(form: Form, first: list[Any], second: list[Any], symmetric: bool) -> Array:
    blocks: list[list[Array]] = []
    for i, a in enumerate(first):
        mirrored = [blocks[j][i].T for j in range(i)] if symmetric else []
        rest = enumerate(second[len(mirrored) :], len(mirrored))
        blocks.append(mirrored + [_block(form, a, b, symmetric=symmetric and i == j) for j, b in rest])
    return _joined(blocks)


def _joined(blocks: list[list[Array]]) -> Array:
    return jnp.concatenate([jnp.concatenate(row, 1) for row in blocks], 0)


def _outer(function: Any, a: Any, b: Any) -> Array:
    return jax.vmap(lambda one: jax.vmap(lambda other: function(one, other))(b))(a)


def _block(form: Form, a: Any, b: Any, *, symmetric: bool) -> Array:
    """Return one measure of all pairs of two stacks of prepared representations."""
    if form.compare is inner:
        return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(_products, a.entries, b.entries))), 0)
    sizes = [jax.tree.leaves(one)[0].shape[0] for one in (a, b)]
    # A comparison takes some four times the memory of one prepared representation.
    side = int((TILE_BYTES * sizes[0] / (4 * _bytes(a))) ** 0.5)
    if symmetric:  # of the tiles on the diagonal, half is for nothing
        side = min(side, -(-sizes[0] // FEWEST_TILES))
    tile = [-(-size // -(-size // max(1, min(side, size)))) for size in sizes]
    starts = [np.minimum(np.arange(0, size, width), size - width) for size, width in zip(sizes, tile, strict=True)]
    where = np.array([(i, j) for i in starts[0] for j in starts[1] if not (symmetric and j < i)])
    kind = jax.eval_shape(lambda: _outer(form.compare, *(_cut(one, 0, 1) for one in (a, b)))).dtype
    places = jnp.asarray(where)

    def put(index: Array | int, out: Array) -> Array:
        i, j = places[index]
        found = _outer(form.compare, _cut(a, i, tile[0]), _cut(b, j, tile[1]))
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


class Job:
    """One measure on two sets of representations, or on pairs within one set."""

    def __init__(
        self, measure: Measure, form: Form, first: Items, second: Items | None = None, budget: int | None = None
    ):
        self.first, self.second = first, second
        self.symmetric = measure.symmetric and second is None
        both = first.arrays + (second.arrays if second else [])
        widths, items = [array.shape[2] for array in both], sum(array.shape[0] for array in both)
        pairs = len(first.labels) * len((second or first).labels)
        self.form = of_sizes(form, both[0].shape[1], max(widths), min(widths), items=items, pairs=pairs)
        self.budget = (
            free_memory(both) if budget is None else check_count("memory_budget", budget, minimum=1, maximum=None)
        )

    def _pieces(self, one: Items) -> list[tuple[Stacks, list[int]]]:
        """Return stacks and their label indices, in as many pieces as memory requires."""
        bytes_of = [_prepared_bytes(self.form, array) for array in one.arrays]
        sets = 1 if self.second is None else 2
        if sets * sum(size * len(array) for size, array in zip(bytes_of, one.arrays, strict=True)) <= self.budget:
            return [(tuple(one.arrays), sum(one.places, start=[]))]
        pieces = []
        for size, array, places in zip(bytes_of, one.arrays, one.places, strict=True):
            # Two pieces are held while they are compared.
            step = max(1, int(self.budget // (2 * size)))
            pieces += [((array[i : i + step],), places[i : i + step]) for i in range(0, len(array), step)]
        return pieces

    def run(
        self,
        choices: Any = None,
        task: str = "values",
        advance: Callable[[int, str], None] = lambda done, text: None,
    ) -> Array:
        """Return `_tables` of all pairs of pieces, joined."""
        rows = self._pieces(self.first)
        columns = rows if self.second is None else self._pieces(self.second)
        count = len(self.first.labels), len((self.second or self.first).labels)
        table: Any = None
        for i, (one, own) in enumerate(rows):
            for j, (other, others) in enumerate(columns):
                if self.symmetric and j < i:
                    continue
                same = self.second is None and i == j
                sets = one, None if same else other
                part = self._in_chunks(sets, choices, task, self.symmetric and same, advance)
                table = np.zeros((len(part), *count), part.dtype) if table is None else table
                table[(slice(None), *np.ix_(own, others))] = part
                if self.symmetric and not same:
                    table[(slice(None), *np.ix_(others, own))] = part.swapaxes(-1, -2)
        return jnp.asarray(table)

    def _in_chunks(
        self, sets: Sets, choices: Any, task: str, symmetric: bool, advance: Callable[[int, str], None]
    ) -> np.ndarray:
        """Return `_tables` of known choices, computed in chunks."""
        if choices is None:
            return np.asarray(_tables(self.form, sets, None, task, symmetric))
        choices, count, parts = np.asarray(choices), len(choices), []
        size = min(count, max(SMALLEST_CHUNK, -(-count // CHUNKS)))
        for start in range(0, count, size):  # the last choice stands in for those that are missing: one program
            own = choices[np.minimum(np.arange(start, start + size), count - 1)]
            parts.append(np.asarray(_tables(self.form, sets, jnp.asarray(own), task, symmetric))[: count - start])
            advance(min(start + size, count), "")
        return np.concatenate(parts)
