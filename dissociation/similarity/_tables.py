"""Tables of one measure for all pairs of representations."""

from collections.abc import Sequence
from contextlib import closing
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
from dissociation.training._progress import MeterFactory, open_meter

# Parts of this size stay in a CPU's caches, which makes products three times as fast.
PART = 4096
"""Number of columns of flat matrices that a CPU multiplies at a time."""

TILE_BYTES = 64 * 2**20
"""Memory of one tile of pairs, in bytes."""

FEWEST_TILES = 5
"""Smallest number of tiles along a side of a symmetric table."""

BATCH_BYTES = 16 * 2**20
"""Memory of one batch of prepared representations, in bytes."""

SCRATCH = 6
"""Approximate memory of preparation, in arrays of the size of its result."""

CHUNKS = 10
"""Largest number of chunks of the choices of one step. The host advances the progress meter after each chunk."""

SMALLEST_CHUNK = 5
"""Smallest number of choices in a chunk, unless a step has fewer."""

Stacks = tuple[Array, ...]
"""Representations stacked by width, [items, n, p] each."""

Sets = tuple[Stacks, Stacks | None]
"""Two sets whose pairs across are compared, or one set and None."""

Step = tuple[str, Any]
"""A task and its choices of samples, [choices, m].

"all" compares all samples and has no choices. "blocks" compares the chosen samples of both sets. "orders" compares the
first set with the chosen samples of the second.
"""


def _prepared_bytes(form: Form, stack: Array) -> int:
    """Return the size of one prepared representation, in bytes."""
    example = jax.ShapeDtypeStruct(stack.shape[1:], stack.dtype)
    return _bytes(jax.eval_shape(form.prepare, example))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@eqx.filter_jit
def _tables(form: Form, sets: Sets, choices: Array | None, task: str, symmetric: bool) -> Array:
    """Return the measure of all pairs for each choice of samples, [choices, items, others].

    For the task "all", return the measure and, if the form has `expected`, its mean over all orders, [1 or 2, items,
    others].
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
        found.append(jnp.block([[_outer(form.expected, one, other) for other in b] for one in a]))
    return jnp.stack(found)


def _prepared(form: Form, stacks: Stacks, rows: Array | None) -> list[Any]:
    """Return the prepared representations of a set, in one stack per width."""
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
    return jnp.block(blocks)


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
    """Return the inner products of all items of `a` with all of `b`, [items, others].

    On a CPU the sum over entries is split into parts that fit into the caches.
    """
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
    """One measure of all pairs across two sets of representations, which may be the same object."""

    def __init__(self, measure: Measure, form: Form, first: Items, second: Items, budget: int | None = None):
        self.name, self.within = measure.name, first is second
        self.symmetric, self.count = measure.symmetric and self.within, (len(first.labels), len(second.labels))
        arrays = first.arrays + ([] if self.within else second.arrays)
        widths, items = [array.shape[2] for array in arrays], sum(array.shape[0] for array in arrays)
        sizes = {"items": items, "pairs": self.count[0] * self.count[1]}
        self.form = of_sizes(form, arrays[0].shape[1], max(widths), min(widths), **sizes)
        limits = {"minimum": 1, "maximum": None}
        self.budget = free_memory(arrays) if budget is None else check_count("memory_budget", budget, **limits)
        self.rows = self._pieces(first)
        self.columns = self.rows if self.within else self._pieces(second)

    def _pieces(self, one: Items) -> list[tuple[Stacks, list[int]]]:
        """Return stacks and their label indices, in as many pieces as memory requires."""
        sizes = [_prepared_bytes(self.form, array) for array in one.arrays]
        if np.dot(sizes, [len(array) for array in one.arrays]) <= self.budget / (1 if self.within else 2):
            return [(tuple(one.arrays), sum(one.places, start=[]))]
        pieces = []
        for size, array, places in zip(sizes, one.arrays, one.places, strict=True):
            # Two pieces are held while they are compared.
            step = max(1, int(self.budget // (2 * size)))
            pieces += [((array[i : i + step],), places[i : i + step]) for i in range(0, len(array), step)]
        return pieces

    def run(self, steps: Sequence[Step], progress: str | MeterFactory | None = None) -> list[Array]:
        """Return the tables of each step, [choices, items, others], with a meter that counts choices."""
        done, found = 0, []
        counts = [1 if choices is None else len(choices) for _, choices in steps]
        with closing(open_meter(progress, sum(counts), self.name)) as meter:
            for (task, choices), count in zip(steps, counts, strict=True):
                size, parts = min(count, max(SMALLEST_CHUNK, -(-count // CHUNKS))), []
                for start in range(0, count, size):
                    meter.advance(done + start, task)
                    # The last choice fills the last chunk, so that one program computes all chunks.
                    rows = np.minimum(np.arange(start, start + size), count - 1)
                    parts.append(self._table(task, None if choices is None else jnp.asarray(np.asarray(choices)[rows])))
                done += count
                found.append(jnp.asarray(np.concatenate(parts)[: None if choices is None else count]))
            meter.advance(done, "done")
        return found

    def _table(self, task: str, choices: Array | None) -> np.ndarray:
        """Return `_tables` of all pairs of pieces, joined."""
        table: Any = None
        for i, (one, own) in enumerate(self.rows):
            for j, (other, others) in enumerate(self.columns):
                if self.symmetric and j < i:
                    continue
                same = self.within and i == j
                sets = one, None if same else other
                part = np.asarray(_tables(self.form, sets, choices, task, self.symmetric and same))
                table = np.zeros((len(part), *self.count), part.dtype) if table is None else table
                table[(slice(None), *np.ix_(own, others))] = part
                if self.symmetric and not same:
                    table[(slice(None), *np.ix_(others, own))] = part.swapaxes(-1, -2)
        return table
