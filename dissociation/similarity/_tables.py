"""Tables of one measure for all pairs of representations."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
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
"""Largest number of chunks of the choices of one step.

The host advances the progress meter after each chunk.
"""

SMALLEST_CHUNK = 5
"""Smallest number of choices in a chunk, unless a step has fewer."""

Stacks = tuple[Array, ...]
"""Representations stacked by width, [items, n, p] each."""


Piece = tuple[Stacks, list[int]]
"""Stacks, and the label indices of their items."""


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
    fixed = []
    if task == "orders":
        fixed = _prepared(form, first, labels, None)

    def prepared(rows):
        """Return both sets, prepared from the chosen rows."""
        labels_of_rows = labels
        if labels is not None and task == "blocks":
            labels_of_rows = labels[rows]
        if task == "orders":
            return fixed, _prepared(form, second or first, labels_of_rows, rows)
        if second is None:
            items = _prepared(form, first, labels_of_rows, rows)
            return items, items
        return _both_prepared(form, first, second, labels_of_rows, rows)

    if choices is not None:
        return lax.map(lambda rows: _table(form, *prepared(rows), symmetric), choices)
    a, b = prepared(None)
    measured = [_table(form, a, b, symmetric)]
    if form.expected is not None:
        along = jax.vmap(form.expected, (None, 0))
        outer = jax.vmap(along, (0, None))
        blocks = []
        for x in a:
            blocks.append([outer(x, y) for y in b])
        measured.append(jnp.block(blocks))
    return jnp.stack(measured)


def _both_prepared(
    form: Form, first: Stacks, second: Stacks, labels: Array | None, rows: Array | None
) -> tuple[list[Any], list[Any]]:
    """Return two prepared sets, whose preparation is compiled once if they have equal shapes."""
    shapes = [stack.shape[1:] for stack in first]
    if shapes != [stack.shape[1:] for stack in second]:
        return _prepared(form, first, labels, rows), _prepared(form, second, labels, rows)

    stacks = tuple(map(jnp.concatenate, zip(first, second, strict=True)))
    a = []
    b = []
    for tree, stack in zip(_prepared(form, stacks, labels, rows), first, strict=True):
        count = len(stack)
        a.append(_chosen(tree, slice(count)))
        b.append(_chosen(tree, slice(count, None)))
    return a, b


def _prepared(form: Form, stacks: Stacks, labels: Array | None, rows: Array | None) -> list[Any]:
    """Return the prepared representations of a set, in one stack per width."""
    trees = []
    for stack in stacks:
        chosen = stack if rows is None else stack[:, rows]
        # Preparation takes some six times the memory of its result.
        item_bytes = _prepared_bytes(form, chosen, labels) + _bytes(chosen[0])
        batch = int(np.clip(BATCH_BYTES // (6 * item_bytes), 1, len(chosen)))
        # A batch of one would be computed by the slower products of batches.
        batch_size = None if batch == 1 else batch
        trees.append(lax.map(lambda x: form.prepared(x, labels), chosen, batch_size=batch_size))
    return trees


def _table(form: Form, first: list[Any], second: list[Any], symmetric: bool) -> Array:
    """Return one measure of all pairs of two prepared sets."""
    blocks = []
    for i, a in enumerate(first):
        row = []
        for j, b in enumerate(second):
            if symmetric and j < i:
                row.append(blocks[j][i].T)
            else:
                row.append(_block(form, a, b, symmetric=symmetric and i == j))
        blocks.append(row)
    return jnp.block(blocks)


def _block(form: Form, a: Any, b: Any, *, symmetric: bool) -> Array:
    """Return one measure of all pairs of two stacks of prepared representations."""
    if form.compare is inner:
        products = jax.tree.map(_products, a.entries, b.entries)
        return jnp.sum(jnp.stack(jax.tree.leaves(products)), 0)

    num_rows = len(jax.tree.leaves(a)[0])
    num_columns = len(jax.tree.leaves(b)[0])
    # A symmetric row starts anywhere.
    max_width = -(-num_columns // 5) if symmetric else num_columns
    # A comparison takes some four times the memory of one prepared representation.
    width = TILE_BYTES * num_rows // (4 * _bytes(a))
    width = int(np.clip(width, 1, max_width))
    num_tiles = -(-num_columns // width)
    dtype = jax.eval_shape(form.compare, _chosen(a, 0), _chosen(b, 0)).dtype
    compare = jax.vmap(form.compare, (None, 0))

    def fill_row(i, table):
        def fill_tile(tile, table):
            start = jnp.minimum(tile * width, num_columns - width)
            columns = jax.tree.map(lambda leaf: lax.dynamic_slice_in_dim(leaf, start, width), b)
            values = compare(_chosen(a, i), columns)
            return lax.dynamic_update_slice(table, values[None], (i, start))

        first_tile = i // width if symmetric else 0
        return lax.fori_loop(first_tile, num_tiles, fill_tile, table)

    zeros = jnp.zeros((num_rows, num_columns), dtype)
    table = lax.fori_loop(0, num_rows, fill_row, zeros)
    if symmetric:
        table = jnp.triu(table) + jnp.triu(table, 1).T
    return table


def _chosen(tree: Any, index: Any) -> Any:
    """Return the items of all leaves at an index or a slice."""
    return jax.tree.map(lambda leaf: leaf[index], tree)


def _products(a: Array, b: Array) -> Array:
    """Return the inner products of all items of `a` with all of `b`, [items, others].

    On a CPU the sum is over blocks of entries that fit into the caches.
    """
    a = a.reshape(len(a), -1)
    b = b.reshape(len(b), -1)
    num_blocks = a.shape[1] // PART
    if num_blocks < 2 or jax.default_backend() != "cpu":
        return product(a, b.T)

    def add(index, total):
        start = index * PART
        columns_a = lax.dynamic_slice_in_dim(a, start, PART, 1)
        columns_b = lax.dynamic_slice_in_dim(b, start, PART, 1)
        return total + product(columns_a, columns_b.T)

    zeros = jnp.zeros((len(a), len(b)), a.dtype)
    total = lax.fori_loop(0, num_blocks, add, zeros)
    end = num_blocks * PART
    return total + product(a[:, end:], b[:, end:].T)


def _pieces(form: Form, items: Items, labels: Array | None, budget: float) -> list[Piece]:
    """Return stacks and their label indices, in as many pieces as memory requires."""
    sizes = [_prepared_bytes(form, array, labels) for array in items.arrays]
    counts = [len(array) for array in items.arrays]
    if np.dot(sizes, counts) <= budget:
        return [(tuple(items.arrays), sum(items.indices, start=[]))]
    pieces = []
    for size, array, indices in zip(sizes, items.arrays, items.indices, strict=True):
        step = max(1, int(budget // size))
        for start in range(0, len(array), step):
            piece = slice(start, start + step)
            pieces.append(((array[piece],), indices[piece]))
    return pieces


def _assembled(
    form: Form,
    rows: list[Piece],
    columns: list[Piece],
    labels: Array | None,
    symmetric: bool,
    task: str,
    choices: Array | None,
) -> np.ndarray:
    """Return the tables of all choices, [choices, items, others], from tables of pieces."""
    num_rows = sum(len(indices) for _, indices in rows)
    num_columns = sum(len(indices) for _, indices in columns)
    assembled: Any = None
    for i, (first, row_indices) in enumerate(rows):
        for j, (second, column_indices) in enumerate(columns):
            if symmetric and j < i:
                continue
            is_within = rows is columns and i == j
            second_or_none = None if is_within else second
            mirrors = symmetric and is_within
            block = np.asarray(_tables(form, first, second_or_none, labels, choices, task, mirrors))
            if assembled is None:
                assembled = np.zeros((len(block), num_rows, num_columns), block.dtype)
            assembled[(slice(None), *np.ix_(row_indices, column_indices))] = block
            if symmetric and not is_within:
                transposed = block.swapaxes(-1, -2)
                assembled[(slice(None), *np.ix_(column_indices, row_indices))] = transposed
    return assembled


def _without_blocks(
    leave_outs: Any, arrays: list[Array], first: Items, second: Items, steps: Sequence[Step]
) -> Iterator[np.ndarray] | None:
    """Return the tables without each block, or None if the direct way is quicker."""
    remaining = [rows for task, choices in steps if task == "blocks" for rows in choices]
    num_items = sum(map(len, arrays))
    num_rows = len(first.labels)
    num_columns = len(second.labels)
    num_pairs = num_rows * num_columns
    widths = [array.shape[2] for array in arrays]
    over_features = len(remaining) * (num_items * max(widths) + num_pairs * min(widths))
    # Of one pair the direct way takes less to compile.
    is_quick = num_pairs == 1 or first.number * num_items >= over_features
    if leave_outs is None or is_quick:
        return None
    of_stacks = leave_outs(arrays, remaining)[:, :num_rows, -num_columns:]
    ordered = np.empty_like(of_stacks)
    rows = np.concatenate(first.indices)
    columns = np.concatenate(second.indices)
    ordered[(slice(None), *np.ix_(rows, columns))] = of_stacks
    return iter(ordered)


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
    """Return the tables of each step, [choices, items, others]. A meter counts choices."""
    is_within = first is second
    num_pairs = len(first.labels) * len(second.labels)
    arrays = first.arrays
    if not is_within:
        if form.gram is not None:
            first, second = of_one_width(first, second)
        arrays = first.arrays + second.arrays
    number = arrays[0].shape[1]
    labels = form.labels_of(number)
    widths = [array.shape[2] for array in arrays]
    num_items = sum(map(len, arrays))
    leave_outs = form.leave_outs
    form = of_sizes(form, number, max(widths), min(widths), items=num_items, pairs=num_pairs)

    if budget is None:
        budget = free_memory(arrays)
    else:
        # Two representations are prepared at a time.
        needed = 2 * max(_prepared_bytes(form, array, labels) for array in arrays)
        if budget < needed:
            fail("memory_budget", f"be at least {needed} bytes, for two representations", budget)
    # Two pieces are held while they are compared.
    rows = _pieces(form, first, labels, budget / 2)
    columns = rows
    if not is_within:
        columns = _pieces(form, second, labels, budget / 2)
    symmetric = measure.symmetric and is_within
    table = partial(_assembled, form, rows, columns, labels, symmetric)

    without_blocks = _without_blocks(leave_outs, arrays, first, second, steps)

    num_done = 0
    results = []
    counts = [1 if choices is None else len(choices) for _, choices in steps]
    with closing(open_meter(progress, sum(counts), measure.name)) as meter:
        for (task, choices), count in zip(steps, counts, strict=True):
            if task == "blocks" and without_blocks is not None:
                results.append(np.stack(list(itertools.islice(without_blocks, count))))
            else:
                results.append(_of_step(table, task, choices, meter, num_done))
            num_done += count
            meter.advance(num_done, task)
        meter.advance(num_done, "done")
    return results


def _of_step(table: Any, task: str, choices: Any, meter: Any, num_done: int) -> np.ndarray:
    """Return the tables of a step, whose choices are computed in chunks of one size."""
    if choices is None:
        meter.advance(num_done, task)
        return table(task, None)
    count = len(choices)
    size = min(count, max(SMALLEST_CHUNK, -(-count // CHUNKS)))
    chunks = []
    for start in range(0, count, size):
        meter.advance(num_done + start, task)
        # The last choice fills the last chunk, so that one program computes all chunks.
        indices = np.minimum(np.arange(start, start + size), count - 1)
        chunks.append(table(task, to_device(np.asarray(choices)[indices])))
    return np.concatenate(chunks)[:count]
