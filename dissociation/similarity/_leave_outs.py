"""Linear CKA without each block of samples, from one matrix over samples per representation."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation.similarity._base import apart_from_rounding, centred

CHUNK_BYTES = 64 * 2**20
"""Memory of rows of the matrices of all representations, in bytes."""


def without_blocks(
    is_debiased: bool,
    first: Sequence[Float[Array, "_ n _"]],
    second: Sequence[Float[Array, "_ n _"]] | None,
    blocks: Sequence[Int[np.ndarray, "_"]],
) -> Float[np.ndarray, "blocks items others"]:
    """Return linear CKA of all pairs of two sets without each of disjoint blocks of samples.

    The result equals that of the remaining samples, up to rounding.

    Args:
        is_debiased: True for the debiased measure.
        first: Representations stacked by width.
        second: The same of the second set; None for the pairs of one set.
        blocks: Rows of each block. All blocks together hold all rows.
    """
    stacks = [*first, *(second or ())]
    num_items = sum(map(len, stacks))
    number = stacks[0].shape[1]
    membership = np.zeros((len(blocks), number), stacks[0].dtype)
    chunks = []
    block_of_chunk = []
    longest = max(map(len, blocks))
    length = CHUNK_BYTES // (num_items * number * membership.itemsize)
    length = int(np.clip(length, 1, longest))
    for index, rows in enumerate(blocks):
        membership[index, rows] = 1
        for start in range(0, len(rows), length):
            chunk = rows[start : start + length]
            # A row beyond the last one marks the end of a short chunk.
            chunks.append(np.pad(chunk, (0, length - len(chunk)), constant_values=number))
            block_of_chunk.append(index)

    arguments = map(to_device, (membership, np.stack(chunks), np.asarray(block_of_chunk)))
    table = np.asarray(_without_blocks(is_debiased, stacks, *arguments))
    if second is None:
        return table
    num_rows = sum(map(len, first))
    return table[:, :num_rows, num_rows:]


@eqx.filter_jit
def _without_blocks(
    is_debiased: bool, stacks: list[Array], membership: Array, chunks: Array, block_of_chunk: Array
) -> Array:
    """Return the measure of all pairs of items without each block, [blocks, items, items].

    With A the matrix over samples, centred for all of them, S the samples outside of a block, and
    m their number,

        HSIC = <A_S, B_S> - 2 / m' <r, t> + sum r sum t / m'',   r = A_S 1,   t = B_S 1,

    of which no multiple a_i + a_j in A_ij changes the value: m' = m and m'' = m^2, or m' = m - 2
    and m'' = (m - 1)(m - 2) for matrices without their diagonals. <A_S, B_S> is that of all samples
    without twice that of the block's rows, and with that of the block's rows and columns.
    """
    num_blocks = len(membership)
    items = []
    row_sums = []
    for stack in stacks:
        x = lax.map(lambda features: centred(features)[0], stack)
        shifts = jax.vmap(lambda features: _shifts(is_debiased, features))(x)
        items.append((x, shifts))
        row_sums.append(
            lax.map(lambda item: _row_sums(is_debiased, item[0], item[1], membership), (x, shifts))
        )
    sums = jnp.concatenate(row_sums)

    def products(chunk):
        rows, block = chunk
        matrices = []
        for pair in items:
            rows_of = lambda item: _rows_of(is_debiased, item[0], item[1], rows)  # noqa: E731
            matrices.append(lax.map(rows_of, pair))
        joined = jnp.concatenate(matrices)
        inside = joined * membership[block][None, None]
        flat = joined.reshape(len(joined), -1)
        return product(flat, flat.T), product(inside.reshape(len(joined), -1), flat.T)

    of_rows, of_squares = lax.map(products, (chunks, block_of_chunk))
    of_rows = jax.ops.segment_sum(of_rows, block_of_chunk, num_blocks)
    of_squares = jax.ops.segment_sum(of_squares, block_of_chunk, num_blocks)
    inner = jnp.sum(of_rows, 0)[None] - 2 * of_rows + of_squares

    number = len(membership[0]) - jnp.sum(membership, 1)[:, None, None]
    divisor = number
    divisor_of_totals = number**2
    if is_debiased:
        divisor = number - 2
        divisor_of_totals = (number - 1) * (number - 2)
    crossed = lax.map(lambda of_block: product(of_block, of_block.T), jnp.moveaxis(sums, 1, 0))
    totals = jnp.sum(sums, 2).T
    hsic = inner - 2 / divisor * crossed
    hsic = hsic + totals[:, :, None] * totals[:, None] / divisor_of_totals

    squares = jax.vmap(jax.vmap(apart_from_rounding))(_diagonals(hsic), _diagonals(inner))
    norms = jnp.sqrt(squares)
    ratio = hsic / norms[:, :, None] / norms[:, None]
    return jnp.clip(ratio, -1.0, 1.0) if is_debiased else ratio


def _diagonals(tables: Array) -> Array:
    return jnp.diagonal(tables, axis1=1, axis2=2)


def _shifts(is_debiased: bool, x: Array) -> Array:
    """Return the numbers a_i that centre rows of K, without its diagonal, by K_ij - a_i - a_j."""
    number = len(x)
    lengths = jnp.sum(x**2, 1)
    if not is_debiased:
        return jnp.zeros_like(lengths)
    return (0.5 * jnp.sum(lengths) / (number - 1) - lengths) / (number - 2)


def _row_sums(is_debiased: bool, x: Array, shifts: Array, membership: Array) -> Array:
    """Return the sums of rows over the columns outside of each block, [blocks, n].

    Rows inside of the block are zero.
    """
    of_blocks = product(product(membership, x), x.T)
    sums = jnp.sum(of_blocks, 0)[None] - of_blocks
    outside = 1 - membership
    if is_debiased:
        lengths = jnp.sum(x**2, 1)
        num_others = jnp.sum(outside, 1)[:, None] - 2
        shifts_outside = product(outside, shifts[:, None])
        sums = sums - lengths[None] - shifts[None] * num_others - shifts_outside
    return sums * outside


def _rows_of(is_debiased: bool, x: Array, shifts: Array, rows: Array) -> Array:
    """Return rows of the matrix over samples, [rows, n]; zero for rows beyond the last one."""
    number = len(x)
    matrix = product(x.at[rows].get(mode="fill", fill_value=0), x.T)
    if not is_debiased:
        return matrix
    shifts_of_rows = shifts.at[rows].get(mode="fill", fill_value=0)
    shifted = matrix - shifts_of_rows[:, None] - shifts[None]
    columns = jnp.arange(number)[None]
    is_used = (rows[:, None] < number) & (rows[:, None] != columns)
    return jnp.where(is_used, shifted, 0.0)
