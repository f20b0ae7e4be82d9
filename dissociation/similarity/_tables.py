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

from dissociation._core.checks import fail
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation.similarity._base import Form, Measure, inner, of_sizes
from dissociation.similarity._items import Items, of_one_width
from dissociation.training._machine import free_memory
from dissociation.training._progress import MeterFactory, open_meter

# Parts of this size stay in a CPU's caches, which makes products three times as fast.
PART = 4096
"""Number of columns of flat matrices that a CPU multiplies at a time."""

TILE_BYTES = 64 * 2**20
"""Memory of one tile of pairs, in bytes."""

BATCH_BYTES = 16 * 2**20
"""Memory of one batch of prepared representations, in bytes."""

CHUNKS = 10
"""Largest number of chunks of the choices of one step. The host advances the progress meter after each chunk."""

SMALLEST_CHUNK = 5
"""Smallest number of choices in a chunk, unless a step has fewer."""

Stacks = tuple[Array, ...]
"""Representations stacked by width, [items, n, p] each."""

Step = tuple[str, Any]
"""A task and its choices of samples, [choices, m].

"all" compares all samples and has no choices. "blocks" compares the chosen samples of both sets.
"orders" compares the first set with the chosen samples of the second.
"""


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _prepared_bytes(form: Form, stack: Array, labels: Array | None) -> int:
    """Return the size of one prepared representation, in bytes."""
    return _bytes(jax.eval_shape(lambda stack: form.prepared(stack[0], labels), stack))


@eqx.filter_jit
def _tables(
    form: Form,
    first: Stacks,
    second: Stacks | None,
    labels: Array | None,
    choices: Array | None,
    task: str,
    symmetric: bool,
) -> Array:
    """Return the measure of all pairs for each choice of samples, [choices, items, others].

    Labels stay with samples if others are left out, and with places if samples change their order.
    `second` is None for the pairs of one set. For the task "all", return the measure and, if the
    form has `expected`, its mean over all orders, [1 or 2, items, others].
    """
    ready = _prepared(form, first, labels, None) if task == "orders" else None

    def prepared(rows: Array | None) -> tuple[list[Any], list[Any]]:
        of_rows = labels[rows] if labels is not None and task == "blocks" else labels
        if task == "orders":
            return ready or [], _prepared(form, second or first, of_rows, rows)
        if second is None:
            a = _prepared(form, first, of_rows, rows)
            return a, a
        if [stack.shape[1:] for stack in first] == [
            stack.shape[1:] for stack in second
        ]:  # compiled once for both
            stacks = tuple(jnp.concatenate(pair) for pair in zip(first, second, strict=True))
            both = _prepared(form, stacks, of_rows, rows)
            counts = [len(stack) for stack in first]
            return _parts(both, [slice(count) for count in counts]), _parts(
                both, [slice(n, None) for n in counts]
            )
        return _prepared(form, first, of_rows, rows), _prepared(form, second, of_rows, rows)

    if choices is not None:
        return lax.map(lambda rows: _table(form, *prepared(rows), symmetric), choices)
    a, b = prepared(None)
    found = [_table(form, a, b, symmetric)]
    if form.expected is not None:
        outer = jax.vmap(jax.vmap(form.expected, (None, 0)), (0, None))
        found.append(jnp.block([[outer(one, other) for other in b] for one in a]))
    return jnp.stack(found)


def _parts(trees: list[Any], parts: list[slice]) -> list[Any]:
    """Return a part of the leaves of each tree."""
    return [
        jax.tree.map(lambda leaf, part=part: leaf[part], tree)
        for tree, part in zip(trees, parts, strict=True)
    ]


def _prepared(form: Form, stacks: Stacks, labels: Array | None, rows: Array | None) -> list[Any]:
    """Return the prepared representations of a set, in one stack per width."""
    found = []
    for stack in stacks:
        own = stack if rows is None else stack[:, rows]
        # Preparation takes some six times the memory of its result.
        batch = int(
            np.clip(
                BATCH_BYTES // (6 * (_prepared_bytes(form, own, labels) + _bytes(own[0]))),
                1,
                len(own),
            )
        )
        # A batch of one would be computed by the slower products of batches.
        found.append(
            lax.map(
                lambda x: form.prepared(x, labels), own, batch_size=None if batch == 1 else batch
            )
        )
    return found


def _table(form: Form, first: list[Any], second: list[Any], symmetric: bool) -> Array:
    blocks: list[list[Array]] = []
    for i, a in enumerate(first):
        mirrored = [blocks[j][i].T for j in range(i)] if symmetric else []
        rest = enumerate(second[len(mirrored) :], len(mirrored))
        blocks.append(
            mirrored + [_block(form, a, b, symmetric=symmetric and i == j) for j, b in rest]
        )
    return jnp.block(blocks)


def _block(form: Form, a: Any, b: Any, *, symmetric: bool) -> Array:
    """Return one measure of all pairs of two stacks of prepared representations."""
    if form.compare is inner:
        return jnp.sum(jnp.stack(jax.tree.leaves(jax.tree.map(_products, a.entries, b.entries))), 0)
    size, others = (jax.tree.leaves(one)[0].shape[0] for one in (a, b))
    # A comparison takes some four times the memory of one prepared representation.
    width = TILE_BYTES * size // (4 * _bytes(a))
    width = int(
        np.clip(width, 1, -(-others // 5) if symmetric else others)
    )  # a symmetric row starts anywhere
    kind = jax.eval_shape(form.compare, _item(a, 0), _item(b, 0)).dtype

    def row(i: Array | int, out: Array) -> Array:
        def put(tile: Array | int, out: Array) -> Array:
            start = jnp.minimum(tile * width, others - width)
            part = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, width), b)
            found = jax.vmap(form.compare, (None, 0))(_item(a, i), part)
            return lax.dynamic_update_slice(out, found[None], (i, start))

        return lax.fori_loop(i // width if symmetric else 0, -(-others // width), put, out)

    out = lax.fori_loop(0, size, row, jnp.zeros((size, others), kind))
    return jnp.triu(out) + jnp.triu(out, 1).T if symmetric else out


def _item(tree: Any, index: Array | int) -> Any:
    return jax.tree.map(lambda leaf: leaf[index], tree)


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


def _pieces(
    form: Form, one: Items, labels: Array | None, budget: float
) -> list[tuple[Stacks, list[int]]]:
    """Return stacks and their label indices, in as many pieces as memory requires."""
    sizes = [_prepared_bytes(form, array, labels) for array in one.arrays]
    if np.dot(sizes, [len(array) for array in one.arrays]) <= budget:
        return [(tuple(one.arrays), sum(one.places, start=[]))]
    pieces = []
    for size, array, places in zip(sizes, one.arrays, one.places, strict=True):
        step = max(1, int(budget // size))
        pieces += [
            ((array[i : i + step],), places[i : i + step]) for i in range(0, len(array), step)
        ]
    return pieces


def tables(
    measure: Measure,
    form: Form,
    first: Items,
    second: Items,
    steps: Sequence[Step] = (("all", None),),
    *,
    budget: int | None = None,
    progress: str | MeterFactory | None = None,
) -> list[np.ndarray]:
    """Return the tables of each step, [choices, items, others], with a meter that counts choices."""
    within, shape = first is second, (len(first.labels), len(second.labels))
    if form.gram is not None and not within:
        first, second = of_one_width(first, second)
    symmetric = measure.symmetric and within
    arrays = first.arrays + ([] if within else second.arrays)
    widths, items = [array.shape[2] for array in arrays], sum(array.shape[0] for array in arrays)
    labels = form.labels_of(arrays[0].shape[1])
    form = of_sizes(
        form, arrays[0].shape[1], max(widths), min(widths), items=items, pairs=shape[0] * shape[1]
    )
    if budget is None:
        budget = free_memory(arrays)
    else:
        # Two representations are prepared at a time.
        needed = 2 * max(_prepared_bytes(form, array, labels) for array in arrays)
        if budget < needed:
            fail("memory_budget", f"be at least {needed} bytes, for two representations", budget)
    # Two pieces are held while they are compared.
    rows = _pieces(form, first, labels, budget / 2)
    columns = rows if within else _pieces(form, second, labels, budget / 2)

    pairs = [(i, j) for i in range(len(rows)) for j in range(i if symmetric else 0, len(columns))]

    def table(task: str, choices: Array | None) -> np.ndarray:
        found: Any = None
        for i, j in pairs:
            (one, own), (other, others) = rows[i], columns[j]
            same = within and i == j
            second_stacks = None if same else other
            part = np.asarray(
                _tables(form, one, second_stacks, labels, choices, task, symmetric and same)
            )
            found = np.zeros((len(part), *shape), part.dtype) if found is None else found
            found[(slice(None), *np.ix_(own, others))] = part
            if symmetric and not same:
                found[(slice(None), *np.ix_(others, own))] = part.swapaxes(-1, -2)
        return found

    done, found = 0, []
    counts = [1 if choices is None else len(choices) for _, choices in steps]
    with closing(open_meter(progress, sum(counts), measure.name)) as meter:
        for (task, choices), count in zip(steps, counts, strict=True):
            size, parts = min(count, max(SMALLEST_CHUNK, -(-count // CHUNKS))), []
            for start in range(0, count, size):
                meter.advance(done + start, task)
                # The last choice fills the last chunk, so that one program computes all chunks.
                chunk = np.minimum(np.arange(start, start + size), count - 1)
                parts.append(
                    table(task, None if choices is None else to_device(np.asarray(choices)[chunk]))
                )
            done += count
            found.append(np.concatenate(parts)[: None if choices is None else count])
        meter.advance(done, "done")
    return found
