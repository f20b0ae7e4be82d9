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
    outside = np.zeros((len(remaining), number), stacks[0].dtype)
    row_bytes = sum(map(len, stacks)) * number * outside.itemsize
    longest = number - min(map(len, remaining))
    length = int(np.clip(CHUNK_BYTES // row_bytes, 1, longest))
    chunks = []
    block_of_chunk = []
    for index, rows in enumerate(remaining):
        outside[index, rows] = 1
        block = np.flatnonzero(outside[index] < 1)
        # A row beyond the last one marks the end of a short chunk.
        padded = np.pad(block, (0, -len(block) % length), constant_values=number)
        chunks.append(padded.reshape(-1, length))
        block_of_chunk += [index] * len(chunks[-1])
    arrays = (outside, np.concatenate(chunks), np.asarray(block_of_chunk))
    return np.asarray(_without_blocks(is_debiased, list(stacks), *map(to_device, arrays)))


@eqx.filter_jit
def _without_blocks(
    is_debiased: bool, stacks: list[Array], outside: Array, chunks: Array, block_of_chunk: Array
) -> Array:
    """Return the measure of all pairs of items without each block, [blocks, items, items].

    With A the matrix over samples, S the samples outside of a block, and m their number,

        HSIC = <A_S, B_S> - 2 / m' <r, t> + sum r sum t / m'',   r = A_S 1,   t = B_S 1,

    m' = m and m'' = m^2, or m' = m - 2 and m'' = (m - 1)(m - 2) for matrices without their
    diagonals. <A_S, B_S> is that of all samples without twice that of the block's rows, and with
    that of the block's rows and columns.
    """
    centred_stacks = [lax.map(lambda features: centred(features)[0], stack) for stack in stacks]
    number = outside.shape[1]

    def rows_of(x, rows):
        """Return rows of the matrix over samples; zero for rows beyond the last one."""
        matrix = product(x.at[rows].get(mode="fill", fill_value=0), x.T)
        if is_debiased:
            matrix = jnp.where(rows[:, None] == jnp.arange(number)[None], 0.0, matrix)
        return matrix

    def add(sums, chunk):
        """Add the rows of a block to <A_S, B_S>, <r, t> and sum r."""
        inner, crossed, totals = sums
        rows, block = chunk
        matrices = [lax.map(lambda x: rows_of(x, rows), stack) for stack in centred_stacks]
        matrix = jnp.concatenate(matrices)
        flat = matrix.reshape(len(matrix), -1)
        of_rows = product(flat, flat.T)
        inside = matrix * (1 - outside[block])[None, None]
        of_squares = product(inside.reshape(len(inside), -1), flat.T)
        inner = (inner + of_rows[None]).at[block].add(of_squares - 2 * of_rows)

        row_sums = jnp.einsum("irn,bn->bir", matrix, outside, precision="highest")
        row_sums = row_sums * outside.at[:, rows].get(mode="fill", fill_value=0)[:, None]
        crossed = crossed + product(row_sums, jnp.swapaxes(row_sums, 1, 2))
        return (inner, crossed, totals + jnp.sum(row_sums, 2)), None

    num_blocks = len(outside)
    num_items = sum(map(len, stacks))
    zeros = jnp.zeros((num_blocks, num_items, num_items), outside.dtype)
    (inner, crossed, totals), _ = lax.scan(
        add, (zeros, zeros, zeros[:, :, 0]), (chunks, block_of_chunk)
    )
    remaining = jnp.sum(outside, 1)[:, None, None]
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
