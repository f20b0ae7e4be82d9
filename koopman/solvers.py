"""Leading singular vectors of a matrix, or of an operator known by its products."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dissociation.checks import check_choice
from dissociation.linalg import product

SOLVERS = ("auto", "dense", "krylov", "randomized")
# Columns beyond those asked for, and blocks of one Krylov space before it is restarted with its best vectors: few
# columns and long spaces where a product is cheap; wider and short ones where each inner product costs a solve.
_OVERSAMPLING, _BLOCKS = 4, 8
_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER = 8, 2


def leading_eigenpairs(
    apply: Callable[[Array], Array],
    size: int,
    number: int,
    *,
    dtype: Any,
    inner: Callable[[Array], Array] | None = None,
    tol: float | None = None,
    max_restarts: int = 50,
) -> tuple[Float[Array, "size number"], Float[Array, " number"]]:
    """Leading eigenpairs of a positive semidefinite operator, by restarted block Krylov spaces.

    A space [Q, A Q, A^2 Q, ...] is orthonormalised, the operator is diagonalised in it (Rayleigh and Ritz), and its
    best vectors begin the next space, until all residuals are below `tol` times the largest eigenvalue or stop falling.
    The first block is drawn from a fixed key, so the outcome is a pure function of the operator.

    Args:
        apply: A on a block [size, columns]; self-adjoint and non-negative in the inner product. With `inner`: A T^+, so
            that A of a block is `apply(inner(block))` and one evaluation of T serves both.
        size: Rows of a vector.
        number: Eigenpairs wanted.
        dtype: Of the vectors.
        inner: Gram operator T of the inner product <u, v> = u^T T v on a block; None for the ordinary one.
        tol: Relative residual; default 30 times the rounding unit. Residuals bound eigenvalues' errors quadratically.
        max_restarts: Limit of the loop.

    Returns:
        Vectors, orthonormal in the inner product, and eigenvalues in falling order.

    References:
        Musco and Musco (2015), Randomized block Krylov methods for stronger and faster approximate SVD, algorithm 2.
    """
    extra, blocks = (_OVERSAMPLING, _BLOCKS) if inner is None else (_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER)
    width = min(number + extra, size)
    blocks = max(1, min(blocks, size // width))
    limit = 30 * jnp.finfo(dtype).eps if tol is None else tol
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
        off = images - vectors * values[None]
        return vectors, values, jnp.max(jnp.linalg.norm(off[:, :number], axis=0) / jnp.linalg.norm(images[:, 0]))

    def going(state: tuple[Array, ...]) -> Array:
        _, _, off, before, count = state
        # Where rounding keeps the residual from falling any further, so does another space.
        return (off > limit) & ((off < 0.95 * before) | (count < 3)) & (count < max_restarts)

    def body(state: tuple[Array, ...]) -> tuple[Array, ...]:
        return *space(state[0]), state[2], state[4] + 1

    start = jnp.linalg.qr(image_of(jax.random.normal(jax.random.key(0), (size, width), dtype)))[0]
    first = space(start)
    vectors, values, *_ = lax.while_loop(going, body, (*first, first[2], jnp.asarray(1)))
    return vectors[:, :number], values[:number]


def leading_left_vectors(
    matrix: Float[Array, "k m"], number: int, *, scale: Float[Array, " k"] | None = None, solver: str = "auto"
) -> tuple[Float[Array, "k number"], Float[Array, " number"]]:
    """Leading left singular vectors and singular values of a matrix, or of diag(scale) times it.

    Args:
        matrix: The matrix.
        scale: Factors of its rows. Under a `vmap` over them alone, the products with the matrix stay one product each.
        number: How many, at most min(k, m).
        solver: "dense" (LAPACK), "krylov" (`leading_eigenpairs` of M M^T, to convergence), "randomized" (four power
            iterations on a random block: Halko et al. 2011, algorithm 4.4) or "auto": "krylov" for a few vectors of a
            large matrix, otherwise "dense".

    Returns:
        Orthonormal vectors and values in falling order.

    Raises:
        ValueError: If the solver is unknown.

    References:
        Halko, Martinsson and Tropp (2011), Finding structure with randomness.
    """
    check_choice("solver", solver, SOLVERS)
    rows, columns = matrix.shape
    factors = jnp.ones((rows, 1), matrix.dtype) if scale is None else scale[:, None]
    if solver == "auto":
        solver = "krylov" if min(rows, columns) > 256 and number <= min(rows, columns) // 16 else "dense"
    if solver == "krylov":

        def squared(block: Array) -> Array:
            return factors * product(matrix, product(matrix.T, factors * block))

        vectors, squares = leading_eigenpairs(squared, rows, number, dtype=matrix.dtype)
        return vectors, jnp.sqrt(jnp.maximum(squares, 0.0))
    matrix = factors * matrix
    if solver == "dense":
        left, values, _ = jnp.linalg.svd(matrix, full_matrices=False)
        return left[:, :number], values[:number]
    width = min(number + 2 * _OVERSAMPLING, rows, columns)
    block = jnp.linalg.qr(product(matrix, jax.random.normal(jax.random.key(0), (columns, width), matrix.dtype)))[0]
    for _ in range(4):
        block = jnp.linalg.qr(product(matrix, jnp.linalg.qr(product(matrix.T, block))[0]))[0]
    left, values, _ = jnp.linalg.svd(product(block.T, matrix), full_matrices=False)
    return product(block, left[:, :number]), values[:number]


def _orthonormal(block: Array, inner: Callable[[Array], Array] | None) -> tuple[Array, Array]:
    """Columns Q that span the block, Q^T T Q = I, and T Q; columns are zero where the block's rank falls short."""
    block = jnp.linalg.qr(block)[0]
    if inner is None:
        return block, block
    dual = block
    for _ in range(2):  # once more against rounding
        dual = inner(block)
        gram = product(block.T, dual)
        values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
        kept = values > 10 * values.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
        mixing = vectors * jnp.where(kept, lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)[None]
        block, dual = product(block, mixing), product(dual, mixing)
    return block, dual
