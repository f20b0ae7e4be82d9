"""Linear CKA without each block of samples, from one matrix over samples per representation."""

from collections.abc import Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation.similarity._base import apart_from_rounding, centred

CHUNK_BYTES = 64 * 2**20
"""Memory of rows of the matrices of all representations, in bytes."""


def without_blocks(
    is_debiased: bool, stacks: Sequence[Array], remaining: Sequence[np.ndarray]
) -> np.ndarray:
    """Return linear CKA of all pairs of items without each block, [blocks, items, items].

    The result equals that of the remaining samples, up to rounding.

    Args:
        is_debiased: True for the debiased measure.
        stacks: Representations stacked by width, [items, n, p] each.
        remaining: Rows without each block. Blocks are disjoint, and together hold all rows.
    """
    number = stacks[0].shape[1]
    blocks = [np.setdiff1d(np.arange(number), rows) for rows in remaining]
    longest = max(map(len, blocks))
    row_bytes = sum(map(len, stacks)) * len(blocks) * longest * stacks[0].dtype.itemsize
    num_chunks = int(np.clip(-(-longest * row_bytes // CHUNK_BYTES), 1, longest))
    length = -(-longest // num_chunks)
    # A row beyond the last one fills short blocks.
    order = np.full((len(blocks), num_chunks * length), number)
    for block, rows in zip(order, blocks, strict=True):
        block[: len(rows)] = rows
    order = order.reshape(len(blocks), num_chunks, length)
    return np.asarray(_without_blocks(is_debiased, list(stacks), to_device(order)))


@eqx.filter_jit
def _without_blocks(is_debiased: bool, stacks: list[Array], order: Array) -> Array:
    """Return the measure of all pairs of items without each block, [blocks, items, items].

    With A the matrix over samples, S the samples outside of a block, and m their number,

        HSIC = <A_S, B_S> - 2 / m' <r, t> + sum r sum t / m'',   r = A_S 1,   t = B_S 1,

    m' = m and m'' = m^2, or m' = m - 2 and m'' = (m - 1)(m - 2) for matrices without their
    diagonals. <A_S, B_S> and r are sums over pairs of other blocks, without differences, in which
    one long sample would leave its rounding. `order` holds rows, [blocks, chunks, rows].
    """
    num_blocks = len(order)
    num_items = sum(map(len, stacks))

    def in_order(features):
        """Return centred rows by block; zero for rows beyond the last one."""
        return centred(features)[0].at[order.reshape(-1)].get(mode="fill", fill_value=0)

    ordered_stacks = [lax.map(in_order, stack) for stack in stacks]
    columns = jnp.arange(order.size)
    is_other = 1 - jnp.eye(num_blocks, dtype=stacks[0].dtype)

    def rows_of(x, rows):
        """Return rows of the matrix over samples."""
        matrix = product(x[rows], x.T)
        if is_debiased:
            matrix = jnp.where(rows[:, None] == columns[None], 0.0, matrix)
        return matrix

    def add(sums, chunk):
        """Add the rows of a block to <A_S, B_S>, <r, t> and sum r."""
        inner, crossed, totals = sums
        rows, block = chunk
        matrices = [lax.map(lambda x: rows_of(x, rows), stack) for stack in ordered_stacks]
        matrix = jnp.concatenate(matrices).reshape(num_items, len(rows), num_blocks, -1)
        of_blocks = jnp.einsum("irbn,jrbn->bij", matrix, matrix, precision="highest")
        of_others = product(is_other, of_blocks.reshape(num_blocks, -1)).reshape(inner.shape)
        row_sums = jnp.einsum("irbn,cb->cir", matrix, is_other, precision="highest")
        row_sums = row_sums * is_other[block][:, None, None]
        inner = inner + of_others * is_other[block][:, None, None]
        crossed = crossed + product(row_sums, jnp.swapaxes(row_sums, 1, 2))
        return (inner, crossed, totals + jnp.sum(row_sums, 2)), None

    zeros = jnp.zeros((num_blocks, num_items, num_items), is_other.dtype)
    chunks = (
        columns.reshape(-1, order.shape[2]),
        jnp.repeat(jnp.arange(num_blocks), order.shape[1]),
    )
    (inner, crossed, totals), _ = lax.scan(add, (zeros, zeros, zeros[:, :, 0]), chunks)
    counts = jnp.sum(order < stacks[0].shape[1], (1, 2)).astype(is_other.dtype)
    remaining = product(is_other, counts[:, None])[:, :, None]
    divisor = remaining
    divisor_of_totals = remaining**2
    if is_debiased:
        divisor = remaining - 2
        divisor_of_totals = (remaining - 1) * (remaining - 2)
    hsic = inner - 2 / divisor * crossed
    hsic = hsic + totals[:, :, None] * totals[:, None] / divisor_of_totals

    diagonal = jax.vmap(jnp.diagonal)
    norms = jnp.sqrt(jax.vmap(jax.vmap(apart_from_rounding))(diagonal(hsic), diagonal(inner)))
    ratio = hsic / norms[:, :, None] / norms[:, None]
    return jnp.clip(ratio, -1.0, 1.0) if is_debiased else ratio
