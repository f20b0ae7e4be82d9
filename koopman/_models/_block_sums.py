"""Sums of products over blocks of pairs, and the operators of all replicates from them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Int

from dissociation._core.linalg import product
from koopman._models._lifting import next_power, padded, pair_indices
from koopman._operators._numerics import ratio_or_zero
from koopman._operators._operator import unshrinking
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


def _padded_size(count: int) -> int:
    """Return the next power of two, at least 32."""
    return max(32, next_power(count))


class Tiles(NamedTuple):
    """Pairs in tiles of equal size, every tile within one block, tiles of a block in succession.

    Attributes:
        row: Rows of the states x, [tiles, size].
        is_used: 1 for pairs with a state at the lag and at twice the lag, 0 for others and
            padding: [2, tiles, size].
        tenth: Tenth of the data, [tiles].
    """

    row: Any
    is_used: Any
    tenth: Any


def _tiles(blocks: Blocks, lengths: Sequence[int], lag: int) -> tuple[Tiles, np.ndarray]:
    """Return tiles, and the first tile of every block and its end, [2, blocks].

    Args:
        blocks: Blocks of pairs.
        lengths: Number of rows of every run.
        lag: Steps from x to y.
    """
    rows, _ = pair_indices(lengths, lag)
    of_pair = np.concatenate(blocks.of_pair)
    # The number and the size of tiles depend on powers of two alone.
    num_blocks = _padded_size(blocks.num_blocks)
    size = max(1, _padded_size(len(rows)) // (2 * num_blocks))
    counts = np.bincount(of_pair, minlength=num_blocks)
    end = np.cumsum(-(-counts // size))
    first = np.append(0, end[:-1])
    position = np.arange(len(rows)) - (np.cumsum(counts) - counts)[of_pair]
    tile = first[of_pair] + position // size
    slot = position % size

    shape = (3 * num_blocks, size)
    row = np.zeros(shape, int)
    row[tile, slot] = rows
    is_used = np.zeros((2, *shape))
    is_used[0, tile, slot] = 1.0
    is_used[1, tile, slot] = np.isin(rows, pair_indices(lengths, 2 * lag)[0])
    tenth = np.zeros(len(row), int)
    tenth[tile] = blocks.tenths[of_pair]
    return Tiles(row, is_used, tenth), np.stack([first, end])


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

    mean: np.ndarray
    project: np.ndarray
    core: np.ndarray
    drift: np.ndarray
    readout: np.ndarray
    mean_observable: np.ndarray
    eigenvalues: np.ndarray
    eigenvalues_later: np.ndarray
    num_blocks: int


def replicate(
    rows: np.ndarray,
    observable: np.ndarray | None,
    lengths: Sequence[int],
    lag: int,
    blocks: Blocks,
    scale: np.ndarray,
    alpha: float,
    *,
    is_check: bool = False,
    **options: Any,
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
        is_check: If True, neither tenths nor twice the lag are computed, which a check with twice
            the delays does not need.
        **options: `kind`, the estimator: "ridge", "principal" or "reduced"; `rank`, the number of
            latent functions, or None for all; and `center`, True with an intercept.
    """
    if observable is None:
        observable = np.zeros((len(rows), 0), rows.dtype)
    tiles, tiles_of_block = _tiles(blocks, lengths, lag)
    if is_check:
        tiles = tiles._replace(is_used=tiles.is_used[:1])
    num_rows = 1 + tiles_of_block.shape[1] + TENTHS
    solution, values = _replicate(
        padded(rows),
        padded(observable),
        tiles,
        lag,
        _picks(tiles_of_block, is_check),
        scale,
        alpha,
        **options,
    )
    # NumPy slices: those of JAX would compile a program for each shape.
    fields = [np.asarray(field)[:num_rows] for field in solution]
    values = np.asarray(values)
    fields += [values[:num_rows], values[num_rows:]]
    return Replicates(*fields, num_blocks=blocks.num_blocks)


def _picks(tiles_of_block: np.ndarray, is_check: bool) -> Int[np.ndarray, "4 M"]:
    """Return which sums make a replicate: its order, its total, and tiles that are left out.

    Orders are 0 for the lag, 1 for twice the lag. Totals are those of tenths, and then of all.
    Replicates are all blocks, all but one, and tenths; then at twice the lag all, and all but one.
    Tiles are the first one and their end.
    """
    deleted = np.pad(tiles_of_block, ((2, 0), (1, 0)))
    deleted[1] = TENTHS
    if is_check:
        return deleted
    tenths = np.outer([0, 1, 0, 0], np.arange(TENTHS))
    later = deleted + np.array([[1], [0], [0], [0]])
    return np.concatenate([deleted, tenths, later], 1)


# Compiling takes longer than running, which is products and LAPACK's calls.
@partial(
    jax.jit,
    static_argnames=("kind", "rank", "center"),
    compiler_options={"xla_backend_optimization_level": 0},
)
def _replicate(
    rows: Array,
    observable: Array,
    tiles: Tiles,
    lag: Array,
    picks: Array,
    scale: Array,
    alpha: Array,
    kind: str,
    rank: int | None,
    center: bool,
) -> tuple[tuple[Array, ...], Array]:
    """Return the fields of `Replicates` and the eigenvalues of all picks."""
    width = rows.shape[1]
    num_orders = len(tiles.is_used)
    states = jnp.pad(rows, ((0, 0), (1, 0)), constant_values=1.0)
    targets = jnp.concatenate([rows, observable], 1)

    def sums(tile: Array, order: Array) -> Array:
        """Return products of (1, x) with (1, x, y, o) over a tile."""
        row = tiles.row[tile]
        x = states[row]
        successors = jnp.minimum(row + (1 + order) * lag, len(rows) - 1)
        y = jnp.concatenate([x, targets[successors]], 1)
        products = product((x * tiles.is_used[order, tile][:, None]).T, y)
        return products.astype(rows.dtype)

    def add(number: Array, totals: Array) -> Array:
        order = number // len(tiles.row)
        tile = number % len(tiles.row)
        return totals.at[order, tiles.tenth[tile]].add(sums(tile, order))

    shape = (num_orders, TENTHS + 1, 1 + width, 1 + width + targets.shape[1])
    totals = jnp.zeros(shape, rows.dtype)
    totals = lax.fori_loop(0, num_orders * len(tiles.row), add, totals)
    totals = totals.at[:, TENTHS].set(jnp.sum(totals, 1))

    def moments(pick: Array) -> tuple[Array, Array, Array]:
        """Return the means of x, y and o, C and C_xy."""
        order = pick[0]

        def delete(tile: Array, total: Array) -> Array:
            return total - sums(tile, order)

        total = lax.fori_loop(pick[2], pick[3], delete, totals[order, pick[1]])
        total = total / jnp.maximum(total[0, 0], 1.0)
        means = total[0, 1:] * center
        products = total[1:, 1:] - means[:width, None] * means[None]
        return means, products[:, :width], products[:, width:]

    units = scale[:, None] * scale[None]
    reference = None
    if kind == "principal":
        _, square, _ = moments(picks[:, 0])
        reference = leading_of(square * units, width)

    def latent_functions(square: Array, cross: Array) -> Array:
        """Return U with U'(C + alpha I) U = I, in units of the features."""
        basis = jnp.eye(width, dtype=square.dtype)
        if reference is not None:
            basis = _near(reference, square, rank)
            square = product(basis.T, product(square, basis))
        rotation = jnp.eye(len(square), dtype=square.dtype)
        factor = jnp.linalg.cholesky(square + alpha * rotation)
        if kind == "reduced":
            # The leading left singular vectors of (C + alpha I)^(-1/2) C_xy.
            images = solve_triangular(factor, cross, lower=True)
            _, vectors = jnp.linalg.eigh(product(images, images.T))
            rotation = vectors[:, ::-1][:, :rank]
        return product(basis, solve_triangular(factor, rotation, lower=True, trans=1))

    def solve(pick: Array) -> tuple[tuple[Array, ...], Array]:
        means, square, cross = moments(pick)
        mean = means[:width]
        columns = latent_functions(square * units, cross[:, :width] * units)
        project = scale[:, None] * columns
        shrunk = product(project.T, cross)
        solution = product(unshrinking(alpha * product(columns.T, columns)), shrunk)
        core = product(solution[:, :width], project)
        drift = product((means[width : 2 * width] - mean)[None], project)[0]
        fields = (mean, project, core, drift, solution[:, width:], means[2 * width :])
        return fields, _eigenvalues(core)

    # Batches of LAPACK calls on a CPU wait for each other for ever when threads share its pool.
    batch_size = None if jax.default_backend() == "cpu" else picks.shape[1]
    return lax.map(solve, picks.T, batch_size=batch_size)


def _near(reference: Basis, square: Array, rank: int | None) -> Array:
    """Return leading eigenvectors of C, near those of all blocks.

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

    return lax.fori_loop(0, 4, correct, leading)


def _eigenvalues(matrix: Array) -> Array:
    """Return eigenvalues, by NumPy where the backend has none of general matrices."""
    if jax.default_backend() == "cpu":
        return jnp.linalg.eigvals(matrix)
    dtype = jnp.result_type(matrix.dtype, jnp.complex64)
    shape = jax.ShapeDtypeStruct(matrix.shape[:1], dtype)

    def on_host(matrices: Array) -> np.ndarray:
        return np.linalg.eigvals(np.asarray(matrices)).astype(dtype)

    return jax.pure_callback(on_host, shape, matrix, vmap_method="expand_dims")
