"""Sums of products over blocks of pairs, and the operators of all replicates from them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve
from jaxtyping import Array, Complex, Float, Int

from dissociation._core.linalg import product
from koopman._operators._pairs import AnyArray

MIN_BLOCKS = 20
"""Number of blocks below which there are no intervals."""
MAX_BLOCKS = 200
BLOCKS_OF_SERIES = 100
TENTHS = 10


class Blocks(NamedTuple):
    """Blocks of pairs, which replicates leave out one at a time.

    Attributes:
        of_pair: Block of every pair, for each run: [pairs].
        tenths: Tenth of the data to which a block belongs, from 0 to 9: [blocks].
    """

    of_pair: list[Int[np.ndarray, " pairs"]]
    tenths: Int[np.ndarray, " blocks"]

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks."""
        return len(self.tenths)

    def without(self, skipped: int) -> "Blocks":
        """Return the same blocks for pairs that start `skipped` times later in every run."""
        return Blocks([blocks[skipped:] for blocks in self.of_pair], self.tenths)


def assign_blocks(num_pairs: Sequence[int], span: int = 1) -> Blocks:
    """Return blocks of the pairs of runs.

    From 20 runs on they are runs, or groups of adjacent runs, 200 blocks at most. Otherwise they
    are about 100 blocks of successive pairs, fewer if `span` is longer than a block.

    Args:
        num_pairs: Number of pairs of every run.
        span: Number of successive pairs whose errors are correlated.
    """
    num_runs = len(num_pairs)
    total = sum(num_pairs)
    if num_runs >= MIN_BLOCKS:
        num_blocks = min(num_runs, MAX_BLOCKS)
        of_run = np.arange(num_runs) * num_blocks // num_runs
        of_pair = np.repeat(of_run, num_pairs)
        # Runs may be sorted, for example by a setting of the experiment.
        order = np.random.default_rng(0).permutation(num_blocks)
    else:
        num_blocks = max(total // span, MIN_BLOCKS)
        num_blocks = min(num_blocks, BLOCKS_OF_SERIES, max(total // 2, 1))
        of_pair = np.arange(total) * num_blocks // max(total, 1)
        order = np.arange(num_blocks)
    ends = np.cumsum(num_pairs)[:-1]
    return Blocks(np.split(of_pair, ends), order * TENTHS // num_blocks)


class Layout(NamedTuple):
    """Pairs in tiles of equal size, every tile within one block.

    Attributes:
        rows: Row of the state x, [tiles, size].
        is_pair: 1 for pairs, 0 for padding, [tiles, size].
        has_later: 1 for pairs with a state at twice the lag, [tiles, size].
        block: Block of the tile, [tiles].
    """

    rows: Int[np.ndarray, "tiles size"]
    is_pair: Float[np.ndarray, "tiles size"]
    has_later: Float[np.ndarray, "tiles size"]
    block: Int[np.ndarray, " tiles"]


def _padded_size(count: int) -> int:
    """Return the next power of two, at least 32."""
    return max(32, 1 << (count - 1).bit_length())


def _layout(blocks: Blocks, lengths: Sequence[int], lag: int) -> Layout:
    """Return the tiles of pairs; `lengths` are the numbers of rows of the runs."""
    starts = np.cumsum([0, *lengths[:-1]])
    rows = []
    has_later = []
    for start, length, of_pair in zip(starts, lengths, blocks.of_pair, strict=True):
        times = np.arange(len(of_pair))
        rows.append(start + times)
        has_later.append(times + 2 * lag < length)
    of_pair = np.concatenate(blocks.of_pair)

    # The number and the size of tiles depend on powers of two alone.
    num_blocks = _padded_size(blocks.num_blocks)
    size = max(1, _padded_size(len(of_pair)) // (2 * num_blocks))
    counts = np.bincount(of_pair, minlength=num_blocks)
    num_tiles = -(-counts // size)
    first_tile = np.cumsum(num_tiles) - num_tiles
    first_pair = np.cumsum(counts) - counts
    position = np.arange(len(of_pair)) - first_pair[of_pair]
    slots = (first_tile[of_pair] + position // size, position % size)

    shape = (max(3 * num_blocks, len(of_pair) // size + num_blocks), size)
    tiles = Layout(np.zeros(shape, int), np.zeros(shape), np.zeros(shape), np.zeros(shape[0], int))
    tiles.rows[slots] = np.concatenate(rows)
    tiles.is_pair[slots] = 1.0
    tiles.has_later[slots] = np.concatenate(has_later)
    tiles.block[: num_tiles.sum()] = np.repeat(np.arange(num_blocks), num_tiles)
    return tiles


class BlockSums(NamedTuple):
    """Sums of products of (1, x) with (1, x, y, o) over the pairs of every block.

    Attributes:
        ahead: Sums with y at the lag and o the observable, [blocks, 1 + R, 1 + 2 R + o].
        later: Sums with y at twice the lag, where there is one: [blocks, 1 + R, 1 + 2 R].
    """

    ahead: Float[Array, "blocks x y"]
    later: Float[Array, "blocks x z"]


def block_sums(
    rows: Float[Array, "n R"],
    observable: Float[Array, "n o"],
    layout: Layout,
    lag: int | Array,
    num_blocks: int,
) -> BlockSums:
    """Return sums over the blocks of a layout, for rows of all times.

    Args:
        rows: Features z, by run and time.
        observable: Observable at the same times.
        layout: Tiles of pairs.
        lag: Steps from x to y.
        num_blocks: Static number of blocks.
    """
    last = rows.shape[0] - 1
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    states = jnp.concatenate([ones, rows], 1)
    x = states[layout.rows]
    ahead = jnp.minimum(layout.rows + lag, last)
    later = jnp.minimum(layout.rows + 2 * lag, last)

    def sums(target: Array, weights: Array) -> Array:
        tiles = product(jnp.swapaxes(x * weights[..., None], 1, 2), target)
        return jax.ops.segment_sum(tiles, layout.block, num_blocks)

    targets = jnp.concatenate([x, rows[ahead], observable[ahead]], 2)
    later_targets = jnp.concatenate([x, rows[later]], 2)
    dtype = rows.dtype
    return BlockSums(
        sums(targets, layout.is_pair.astype(dtype)),
        sums(later_targets, layout.has_later.astype(dtype)),
    )


class Replicates(NamedTuple):
    """Operators of all blocks (replicate 0) and of all but one block (1 to `num_blocks`).

    Those of `eigenvalues` and `eigenvalues_later` beyond are padding. The forecast at lag s is
    [1, (z - mean) U] T^(s-1) [mean_observable; D], T = [[1, drift], [0, K]].

    Attributes:
        mean: Means of z, zero without an intercept: [M, R].
        project: U, from z to latent functions: [M, R, r].
        core: K, [M, r, r].
        drift: Mean of y less that of x, in latent functions: [M, r].
        readout: D, [M, r, o].
        mean_observable: Mean of the observable, zero without an intercept: [M, o].
        eigenvalues: Eigenvalues at the lag, [M, r].
        eigenvalues_later: Eigenvalues at twice the lag, [M, r].
        eigenvalues_of_tenths: Eigenvalues at the lag of tenths of the data, [10, r].
        num_blocks: Number of blocks.
    """

    mean: Float[Array, "M R"]
    project: Float[Array, "M R r"]
    core: Float[Array, "M r r"]
    drift: Float[Array, "M r"]
    readout: Float[Array, "M r o"]
    mean_observable: Float[Array, "M o"]
    eigenvalues: Complex[np.ndarray, "M r"]
    eigenvalues_later: Complex[np.ndarray, "M r"]
    eigenvalues_of_tenths: Complex[np.ndarray, "10 r"]
    num_blocks: int


def replicate(
    rows: Float[AnyArray, "n R"],
    observable: Float[AnyArray, "n o"] | None,
    lengths: Sequence[int],
    lag: int,
    blocks: Blocks,
    scale: Float[AnyArray, " R"],
    alpha: float | Array,
    *,
    kind: str,
    rank: int | None,
    center: bool,
) -> Replicates:
    """Return the operators of all replicates, by one compiled program.

    Args:
        rows: Features z of all times, by run and time, about 1 in size.
        observable: Observable at the same times, or None.
        lengths: Number of rows of every run.
        lag: Steps from x to y.
        blocks: Blocks of pairs.
        scale: Sizes s of the features in which `alpha` is stated, z = x / s.
        alpha: Tikhonov regularisation.
        kind: "ridge", "principal" or "reduced", the estimator.
        rank: Number of latent functions; None for all.
        center: If True, there is an intercept.
    """
    dtype = rows.dtype
    if observable is None:
        observable = np.zeros((len(rows), 0), dtype)
    num_missing = _padded_size(len(rows)) - len(rows)
    padding = ((0, num_missing), (0, 0))
    layout = _layout(blocks, lengths, lag)
    num_blocks = _padded_size(blocks.num_blocks)
    weights = np.ones((1 + num_blocks + TENTHS, num_blocks))
    deleted = np.arange(blocks.num_blocks)
    weights[1 + deleted, deleted] = 0.0
    for tenth in range(TENTHS):
        weights[1 + num_blocks + tenth, deleted] = blocks.tenths == tenth
    solution, values = _replicate(
        np.pad(np.asarray(rows), padding),
        np.pad(np.asarray(observable), padding),
        layout,
        lag,
        weights.astype(dtype),
        np.asarray(scale, dtype),
        np.asarray(alpha, dtype),
        kind=kind,
        rank=rank,
        center=center,
    )
    values = np.asarray(values)
    later = 1 + num_blocks + TENTHS
    return Replicates(
        *solution,
        values[: 1 + num_blocks],
        values[later:],
        values[1 + num_blocks : later],
        blocks.num_blocks,
    )


@partial(jax.jit, static_argnames=("kind", "rank", "center"))
def _replicate(
    rows: Array,
    observable: Array,
    layout: Layout,
    lag: Array,
    weights: Array,
    scale: Array,
    alpha: Array,
    kind: str,
    rank: int | None,
    center: bool,
) -> tuple[tuple[Array, ...], Array]:
    """Return the fields of `Replicates`, and eigenvalues at the lag and then at twice the lag."""
    num_replicates, num_blocks = weights.shape
    sums = block_sums(rows, observable, layout, lag, num_blocks)
    num_states = sums.later.shape[2]
    # LAPACK's calls are stacked: several independent ones in a program may never return.
    total = jnp.tensordot(weights, sums.ahead, 1, precision="highest")
    weights_later = weights[: 1 + num_blocks]
    total_later = jnp.tensordot(weights_later, sums.later, 1, precision="highest")
    num_columns = sums.ahead.shape[2] - num_states
    total_later = jnp.pad(total_later, ((0, 0), (0, 0), (0, num_columns)))
    total = jnp.concatenate([total, total_later])

    count = total[:, :1, :1]
    total = total / jnp.where(count > 0, count, 1.0)
    means = total[:, 0, 1:] * center
    products = total[:, 1:, 1:]
    width = rows.shape[1]
    mean = means[:, :width]
    products = products - mean[:, :, None] * means[:, None, :]
    square = products[:, :, :width]
    cross = products[:, :, width:]
    penalty = alpha / scale**2
    if kind == "ridge":
        project = jnp.broadcast_to(jnp.eye(width, dtype=rows.dtype), square.shape)
        solution = _ridge(square, cross, penalty)
    else:
        rank = width if rank is None else rank
        if kind == "principal":
            project, shrinkage = _principal(square, scale, alpha, rank)
        else:
            project, shrinkage = _reduced(square, cross[:, :, :width], scale, alpha, rank)
        projected = product(jnp.swapaxes(project, 1, 2), cross)
        solution = product(_unshrinking(shrinkage), projected)
    core = product(solution[:, :, :width], project)
    values = jnp.linalg.eigvals(core) if jax.default_backend() == "cpu" else _on_host(core)

    step = (means[:, width : 2 * width] - mean)[:, None]
    drift = product(step, project)[:, 0]
    fields = (mean, project, core, drift, solution[:, :, width:], means[:, 2 * width :])
    return tuple(field[: 1 + num_blocks] for field in fields), values


def _ridge(square: Array, cross: Array, penalty: Array) -> Array:
    """Return F (C + P)^(-1) C_xy, F = I + B + B^2 + B^3 with B = (C + P)^(-1) P."""
    factor = jnp.linalg.cholesky(square + jnp.diag(penalty)[None])
    solve = jax.vmap(lambda root, target: cho_solve((root, True), target))
    solution = solve(factor, cross)
    for _ in range(3):
        solution = solve(factor, cross + penalty[None, :, None] * solution)
    return solution


def _principal(square: Array, scale: Array, alpha: Array, rank: int) -> tuple[Array, Array]:
    """Return U and alpha U^T U of the leading eigenvectors of C in units of the features."""
    values, vectors = jnp.linalg.eigh(scale[:, None] * square * scale)
    values = jnp.maximum(values[:, ::-1][:, :rank], 0.0)
    vectors = vectors[:, :, ::-1][:, :, :rank]
    power = values + alpha
    gain = jnp.where(power > 0, jax.lax.rsqrt(power), 0.0)
    project = scale[:, None] * vectors * gain[:, None]
    shrinkage = alpha * gain**2
    return project, shrinkage[:, :, None] * jnp.eye(rank, dtype=scale.dtype)


def _reduced(
    square: Array, cross: Array, scale: Array, alpha: Array, rank: int
) -> tuple[Array, Array]:
    """Return U and alpha U^T U of the leading left singular vectors of (C + alpha)^(-1/2) C_xy."""
    whiten, _ = _principal(square, scale, alpha, scale.shape[0])
    # Columns of y count in units of the features.
    images = product(jnp.swapaxes(whiten, 1, 2), cross * scale)
    _, vectors = jnp.linalg.eigh(product(images, jnp.swapaxes(images, 1, 2)))
    project = product(whiten, vectors[:, :, ::-1][:, :, :rank])
    columns = project / scale[:, None]
    return project, alpha * product(jnp.swapaxes(columns, 1, 2), columns)


def _unshrinking(shrinkage: Array) -> Array:
    """Return I + B + B^2 + B^3."""
    eye = jnp.eye(shrinkage.shape[1], dtype=shrinkage.dtype)
    factor = eye + shrinkage
    return eye + product(shrinkage, eye + product(shrinkage, factor))


def _on_host(matrices: Array) -> Array:
    """Return eigenvalues by NumPy, where the backend has none of matrices that do not commute."""
    dtype = jnp.result_type(matrices.dtype, jnp.complex64)
    shape = jax.ShapeDtypeStruct(matrices.shape[:-1], dtype)

    def values(batch: np.ndarray) -> np.ndarray:
        return np.linalg.eigvals(np.asarray(batch)).astype(dtype)

    return jax.pure_callback(values, shape, matrices, vmap_method="expand_dims")
