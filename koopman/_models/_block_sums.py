"""Sums of products over blocks of pairs, and the operators of all replicates from them."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve, solve_triangular
from jaxtyping import Array, Complex, Float, Int

from dissociation._core.linalg import product
from koopman._operators._numerics import ratio_or_zero
from koopman._operators._operator import unshrinking
from koopman._operators._pairs import AnyArray
from koopman._operators._subspaces import Basis, leading_of

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

    def padded_tenths(self, size: int) -> Int[np.ndarray, " size"]:
        """Return the tenths, and 10 for blocks without pairs."""
        return np.pad(self.tenths, (0, size - self.num_blocks), constant_values=TENTHS)

    def without(self, skipped: int) -> "Blocks":
        """Return the same blocks for pairs that start `skipped` times later in every run."""
        return Blocks([blocks[skipped:] for blocks in self.of_pair], self.tenths)


def assign_blocks(num_pairs: Sequence[int]) -> Blocks:
    """Return blocks of the pairs of runs.

    From 20 runs on they are runs, or groups of adjacent runs, 200 blocks at most. Otherwise they
    are 100 blocks of successive pairs, fewer if there are fewer than 200 pairs.

    Args:
        num_pairs: Number of pairs of every run.
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
        num_blocks = min(BLOCKS_OF_SERIES, max(total // 2, 1))
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


def block_sums(
    rows: Float[Array, "n R"],
    observable: Float[Array, "n o"],
    layout: Layout,
    lag: int | Array,
    num_blocks: int,
    is_check: bool = False,
) -> Float[Array, "lags blocks x y"]:
    """Return sums of products of (1, x) with (1, x, y, o) over blocks, at the lag and at twice it.

    Args:
        rows: Features z, by run and time.
        observable: Observable o at the same times.
        layout: Tiles of pairs.
        lag: Steps from x to y and o.
        num_blocks: Static number of blocks.
        is_check: If True, sums are at the lag alone.
    """
    last = rows.shape[0] - 1
    ones = jnp.ones((rows.shape[0], 1), rows.dtype)
    states = jnp.concatenate([ones, rows], 1)
    targets = jnp.concatenate([rows, observable], 1)
    x = states[layout.rows]
    sums = []
    for steps, is_used in ((lag, layout.is_pair), (2 * lag, layout.has_later)):
        successors = jnp.minimum(layout.rows + steps, last)
        y = jnp.concatenate([x, targets[successors]], 2)
        weighted = x * is_used.astype(rows.dtype)[..., None]
        tiles = product(jnp.swapaxes(weighted, 1, 2), y)
        sums.append(jax.ops.segment_sum(tiles, layout.block, num_blocks))
    return jnp.stack(sums[:1] if is_check else sums)


class Replicates(NamedTuple):
    """Operators of all blocks (replicate 0), of all but one block (1 to `num_blocks`), of tenths.

    Tenths of the data are the last ten replicates, others beyond `num_blocks` are padding. The
    forecast at lag s is [1, (z - mean) U] T^(s-1) [mean_observable; D], T = [[1, drift], [0, K]].

    Attributes:
        mean: Means of z, zero without an intercept: [M, R].
        project: U, from z to latent functions: [M, R, r].
        core: K, [M, r, r].
        drift: Mean of y less that of x, in latent functions: [M, r].
        readout: D, [M, r, o].
        mean_observable: Mean of the observable, zero without an intercept: [M, o].
        eigenvalues: Eigenvalues at the lag, [M, r].
        eigenvalues_later: Eigenvalues at twice the lag, without tenths: [M - 10, r].
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
    num_blocks: int


def replicate(
    rows: Float[AnyArray, "n R"],
    observable: Float[AnyArray, "n o"] | None,
    lengths: Sequence[int],
    lag: int,
    blocks: Blocks,
    scale: Float[AnyArray, " R"],
    alpha: float | AnyArray,
    *,
    kind: str,
    rank: int | None,
    center: bool,
    is_check: bool = False,
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
        is_check: If True, neither tenths nor twice the lag are computed, which a check with twice
            the delays does not need.
    """
    dtype = rows.dtype
    if observable is None:
        observable = np.zeros((len(rows), 0), dtype)
    num_missing = _padded_size(len(rows)) - len(rows)
    padding = ((0, num_missing), (0, 0))
    layout = _layout(blocks, lengths, lag)
    num_blocks = _padded_size(blocks.num_blocks)
    num_rows = 1 + num_blocks + TENTHS
    solution, values = _replicate(
        np.pad(np.asarray(rows), padding),
        np.pad(np.asarray(observable), padding),
        layout,
        lag,
        _picks(num_blocks, is_check),
        (blocks.padded_tenths(num_blocks) == np.arange(TENTHS)[:, None]).astype(dtype),
        np.asarray(scale, dtype),
        np.asarray(alpha, dtype),
        kind=kind,
        rank=rank,
        center=center,
        is_check=is_check,
    )
    # NumPy slices: those of JAX would compile a program for each shape.
    fields = [np.asarray(field)[:num_rows] for field in solution]
    values = np.asarray(values)
    return Replicates(*fields, values[:num_rows], values[num_rows:], blocks.num_blocks)


class Pick(NamedTuple):
    """Sums of a replicate: number `total` of the totals, less those of a block.

    Totals are those of all blocks at the lag and at twice the lag, and of ten tenths at the lag.
    """

    total: Int[AnyArray, "..."]
    order: Int[AnyArray, "..."]  # 0 at the lag, 1 at twice the lag
    block: Int[AnyArray, "..."]
    is_deleted: Int[AnyArray, "..."]


def _picks(num_blocks: int, is_check: bool) -> Pick:
    """Return all blocks, all but one, and tenths; then at twice the lag all, and all but one."""
    blocks = np.arange(1 + num_blocks)
    zeros = np.zeros_like(blocks)
    deleted = Pick(zeros, zeros, np.maximum(blocks - 1, 0), np.minimum(blocks, 1))
    if is_check:
        return deleted
    tenths = np.arange(TENTHS)
    no_block = np.zeros_like(tenths)
    groups = [
        deleted,
        Pick(2 + tenths, no_block, no_block, no_block),
        deleted._replace(total=zeros + 1, order=zeros + 1),
    ]
    return Pick(*map(np.concatenate, zip(*groups, strict=True)))


# Compiling takes longer than running, which is products and LAPACK's calls.
@partial(
    jax.jit,
    static_argnames=("kind", "rank", "center", "is_check"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def _replicate(
    rows: Array,
    observable: Array,
    layout: Layout,
    lag: Array,
    picks: Pick,
    is_tenth: Array,
    scale: Array,
    alpha: Array,
    kind: str,
    rank: int | None,
    center: bool,
    is_check: bool,
) -> tuple[tuple[Array, ...], Array]:
    """Return the fields of `Replicates` and the eigenvalues of all picks."""
    sums = block_sums(rows, observable, layout, lag, is_tenth.shape[1], is_check)
    tenths = jnp.tensordot(is_tenth, sums[0], 1, precision="highest")
    totals = jnp.concatenate([jnp.sum(sums, 1), tenths])
    width = rows.shape[1]

    def moments(pick: Pick) -> tuple[Array, Array, Array]:
        """Return the means of x, y and o, C and C_xy."""
        total = totals[pick.total] - pick.is_deleted * sums[pick.order, pick.block]
        total = total / jnp.maximum(total[0, 0], 1.0)
        means = total[0, 1:] * center
        products = total[1:, 1:] - means[:width, None] * means[None]
        return means, products[:, :width], products[:, width:]

    units = scale[:, None] * scale[None]
    if kind == "principal":
        _, square, _ = moments(jax.tree.map(lambda pick: pick[0], picks))
        reference = leading_of(square * units, width)

    def solve(pick: Pick) -> tuple[tuple[Array, ...], Array]:
        means, square, cross = moments(pick)
        mean = means[:width]
        if kind == "ridge":
            project = jnp.eye(width, dtype=rows.dtype)
            solution = _ridge(square, cross, alpha / scale**2)
        else:
            if kind == "principal":
                columns = _principal(square * units, reference, alpha, rank)
            else:
                columns = _reduced(square * units, cross[:, :width] * units, alpha, rank)
            project = scale[:, None] * columns
            penalty = alpha * product(columns.T, columns)
            solution = product(unshrinking(penalty), product(project.T, cross))
        core = product(solution[:, :width], project)
        drift = product((means[width : 2 * width] - mean)[None], project)[0]
        fields = (mean, project, core, drift, solution[:, width:], means[2 * width :])
        return fields, _eigenvalues(core)

    # Batches of LAPACK calls on a CPU wait for each other for ever when threads share its pool.
    batch_size = None if jax.default_backend() == "cpu" else len(picks.block)
    return jax.lax.map(solve, picks, batch_size=batch_size)


def _ridge(square: Array, cross: Array, penalty: Array) -> Array:
    """Return F (C + P)^(-1) C_xy, F = I + B + B^2 + B^3 with B = (C + P)^(-1) P."""
    factor = jnp.linalg.cholesky(square + jnp.diag(penalty))
    solution = cho_solve((factor, True), cross)
    for _ in range(3):
        solution = cho_solve((factor, True), cross + penalty[:, None] * solution)
    return solution


def _principal(square: Array, reference: Basis, alpha: Array, rank: int | None) -> Array:
    """Return U of the leading eigenvectors of C, near those of all blocks.

    Corrections of first order, repeated, take a tenth of the time of a decomposition.
    """
    vectors = reference.vectors
    values = reference.values
    leading = vectors[:, :rank]
    trailing = vectors[:, leading.shape[1] :]
    gaps = values[None, : leading.shape[1]] - values[leading.shape[1] :, None]
    inverse = ratio_or_zero(1.0, gaps, gaps > 0)

    def correct(_: Array, basis: Array) -> Array:
        image = product(square, basis)
        residual = image - product(basis, product(basis.T, image))
        change = product(trailing, product(trailing.T, residual) * inverse)
        return jnp.linalg.qr(basis + change)[0]

    basis = jax.lax.fori_loop(0, 4, correct, leading)
    small = product(basis.T, product(square, basis))
    factor = jnp.linalg.cholesky(small + alpha * jnp.eye(small.shape[0], dtype=small.dtype))
    return solve_triangular(factor, basis.T, lower=True).T


def _reduced(square: Array, cross: Array, alpha: Array, rank: int | None) -> Array:
    """Return U of the leading left singular vectors of (C + alpha I)^(-1/2) C_xy."""
    factor = jnp.linalg.cholesky(square + alpha * jnp.eye(square.shape[0], dtype=square.dtype))
    images = solve_triangular(factor, cross, lower=True)
    _, vectors = jnp.linalg.eigh(product(images, images.T))
    return solve_triangular(factor, vectors[:, ::-1][:, :rank], lower=True, trans=1)


def _eigenvalues(matrix: Array) -> Array:
    """Return eigenvalues, by NumPy where the backend has none of general matrices."""
    if jax.default_backend() == "cpu":
        return jnp.linalg.eigvals(matrix)
    dtype = jnp.result_type(matrix.dtype, jnp.complex64)
    shape = jax.ShapeDtypeStruct(matrix.shape[:1], dtype)

    def on_host(matrices: Array) -> np.ndarray:
        return np.linalg.eigvals(np.asarray(matrices)).astype(dtype)

    return jax.pure_callback(on_host, shape, matrix, vmap_method="expand_dims")
