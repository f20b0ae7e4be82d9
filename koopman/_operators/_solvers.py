"""Leading singular vectors of a matrix, or of an operator given by its products."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.keys import named_key
from dissociation._core.linalg import finite_part, product, scale_of

SOLVERS = ("auto", "dense", "krylov", "randomized")
# "auto" is "dense" up to this number of rows or columns.
DENSE_UP_TO = 256
# Number of further columns, and of blocks in a Krylov space before a restart with its best vectors: narrow blocks and
# long spaces if a product is cheap, wide blocks and short spaces if each inner product costs a solve.
_OVERSAMPLING, _BLOCKS = 4, 8
_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER = 8, 2


class Leading(NamedTuple):
    """Leading part of a spectrum."""

    vectors: Array  # eigenvectors or left singular vectors, [size, number]
    values: Array  # falling: [number]
    rest: Array  # values that follow: all from a dense solver, lower bounds of a few from an iterative one
    residual: Array | None = None  # over the largest eigenvalue (of the operator, or of M M^T); None without iterations


def find_eigenpairs(
    apply: Callable, size: int, number: int, dtype: Any, inner: Any = None, max_restarts: int = 50
) -> Leading:
    """Find leading eigenpairs of a positive semidefinite operator, by restarted block Krylov spaces.

    `apply`: Self-adjoint A on a block [size, columns]. With `inner`, A of a block is `apply(inner(block))`.

    Source: Musco and Musco (2015), Randomized block Krylov methods for stronger and faster approximate SVD, algorithm
    2.
    """
    extra, blocks = (_OVERSAMPLING, _BLOCKS) if inner is None else (_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER)
    width = number + extra
    if size <= blocks * width:  # the Krylov space would be the whole space
        width, blocks = size, 1
    limit = 30 * jnp.finfo(dtype).eps
    tiny = jnp.finfo(dtype).tiny
    image_of = apply if inner is None else lambda block: apply(inner(block))

    def space(block: Array) -> tuple[Array, Array, Array]:
        columns = [block]
        for _ in range(blocks - 1):
            columns.append(jnp.linalg.qr(image_of(columns[-1]))[0])
        basis, dual = _orthonormal(jnp.concatenate(columns, 1), inner)
        image = apply(dual)
        small = product(dual.T, image)
        values, mixing = jnp.linalg.eigh(0.5 * (small + small.T))
        best = mixing[:, ::-1][:, :width]
        values = values[::-1][:width]
        vectors, images = product(basis, best), product(image, best)
        # Residuals are measured in the inner product, because its null directions hold only rounding.
        off = (images - vectors * values[None])[:, :number]
        off = off / scale_of(jnp.maximum(values[0], tiny))  # squares in units of the operator may overflow
        squares = jnp.sum(off * (off if inner is None else inner(off)), 0)
        largest = jnp.maximum(values[0], tiny) / scale_of(jnp.maximum(values[0], tiny))
        return vectors, values, jnp.sqrt(jnp.maximum(jnp.max(squares), 0.0)) / largest

    def going(state: tuple[Array, ...]) -> Array:
        _, _, off, before, count = state
        # If rounding stops the fall of the residual, another space does not help.
        return (off > limit) & ((off < 0.95 * before) | (count < 3)) & (count < max_restarts)

    def body(state: tuple[Array, ...]) -> tuple[Array, ...]:
        return *space(state[0]), state[2], state[4] + 1

    # A fixed key makes the result a pure function of the operator.
    start = jnp.linalg.qr(image_of(jax.random.normal(named_key("first vectors"), (size, width), dtype)))[0]
    first = space(start)
    vectors, values, off, *_ = lax.while_loop(going, body, (*first, first[2], jnp.asarray(1)))
    return Leading(vectors[:, :number], values[:number], values[number:], off)


def find_left_vectors(
    matrix: Float[Array, "k m"],
    number: int,
    *,
    scale: Float[Array | np.ndarray, " k"] | None = None,
    solver: str = "auto",
) -> Leading:
    """Find leading left singular vectors and values of a matrix, or of diag(scale) times it.

    Source: Halko, Martinsson and Tropp (2011), Finding structure with randomness.
    """
    matrix, undefined = finite_part(matrix)
    rows, columns = matrix.shape
    factors = jnp.ones((rows, 1), matrix.dtype) if scale is None else jnp.asarray(scale)[:, None]
    solver = chosen_solver(solver, rows, columns, number)
    if solver == "krylov":
        # Squares overflow or vanish in other units.
        unit, grade = scale_of(jnp.max(jnp.abs(matrix))), scale_of(jnp.max(jnp.abs(factors)))
        matrix, factors = matrix / unit, factors / grade

        def squared(block: Array) -> Array:
            return factors * product(matrix, product(matrix.T, factors * block))

        vectors, *squares, residual = find_eigenpairs(squared, rows, number, dtype=matrix.dtype)
        values, rest = (jnp.sqrt(jnp.maximum(part, 0.0)) * unit * grade + undefined for part in squares)
        return Leading(vectors + undefined, values, rest, residual)
    matrix = factors * matrix
    if solver == "randomized":
        width = min(number + 2 * _OVERSAMPLING, rows, columns)
        start = jax.random.normal(named_key("first vectors"), (columns, width), matrix.dtype)
        block = jnp.linalg.qr(product(matrix, start))[0]
        for _ in range(4):
            block = jnp.linalg.qr(product(matrix, jnp.linalg.qr(product(matrix.T, block))[0]))[0]
        left, values, _ = jnp.linalg.svd(product(block.T, matrix), full_matrices=False)
        vectors = product(block, left) + undefined
    else:
        left, values, _ = jnp.linalg.svd(matrix, full_matrices=False)
        vectors = left + undefined
    values = values + undefined
    return Leading(vectors[:, :number], values[:number], values[number:])


def chosen_solver(solver: str, rows: int, columns: int, number: int) -> str:
    """Return the solver for `number` singular vectors, with "auto" resolved."""
    if solver != "auto":
        return solver
    return "krylov" if min(rows, columns) > DENSE_UP_TO and number <= min(rows, columns) // 16 else "dense"


def _orthonormal(block: Array, inner: Callable[[Array], Array] | None) -> tuple[Array, Array]:
    """Return Q that spans the block with Q^T T Q = I, and T Q; zero columns if the block's rank falls short."""
    block = jnp.linalg.qr(block)[0]
    if inner is None:
        return block, block
    dual = block
    for _ in range(2):  # the second time against rounding
        dual = inner(block)
        gram = product(block.T, dual)
        values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
        kept = values > 10 * values.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
        mixing = vectors * jnp.where(kept, lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)[None]
        block, dual = product(block, mixing), product(dual, mixing)
    return block, dual
