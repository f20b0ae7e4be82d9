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
# Columns beyond those asked for, and blocks of one Krylov space before it is restarted with its best vectors.
_OVERSAMPLING = 8
_BLOCKS = 4


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
        apply: A on a block [size, columns]; self-adjoint and non-negative in the inner product.
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
    width = min(number + _OVERSAMPLING, size)
    blocks = max(1, min(_BLOCKS, size // width))
    limit = 30 * jnp.finfo(dtype).eps if tol is None else tol

    def space(block: Array) -> tuple[Array, Array, Array]:
        columns = [block]
        for _ in range(blocks - 1):
            columns.append(_orthonormal(apply(columns[-1]), None))
        basis = _orthonormal(jnp.concatenate(columns, 1), inner)
        image = apply(basis)
        dual = basis if inner is None else inner(basis)
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

    start = _orthonormal(apply(jax.random.normal(jax.random.key(0), (size, width), dtype)), None)
    first = space(start)
    vectors, values, *_ = lax.while_loop(going, body, (*first, first[2], jnp.asarray(1)))
    return vectors[:, :number], values[:number]


def leading_left_vectors(
    matrix: Float[Array, "k m"], number: int, *, solver: str = "auto"
) -> tuple[Float[Array, "k number"], Float[Array, " number"]]:
    """Leading left singular vectors and singular values of a matrix.

    Args:
        matrix: The matrix.
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
    if solver == "auto":
        solver = "krylov" if min(rows, columns) > 256 and number <= min(rows, columns) // 16 else "dense"
    if solver == "dense":
        left, values, _ = jnp.linalg.svd(matrix, full_matrices=False)
        return left[:, :number], values[:number]
    if solver == "krylov":
        vectors, squares = leading_eigenpairs(
            lambda block: product(matrix, product(matrix.T, block)), rows, number, dtype=matrix.dtype
        )
        return vectors, jnp.sqrt(jnp.maximum(squares, 0.0))
    width = min(number + _OVERSAMPLING, rows, columns)
    block = _orthonormal(product(matrix, jax.random.normal(jax.random.key(0), (columns, width), matrix.dtype)), None)
    for _ in range(4):
        block = _orthonormal(product(matrix, _orthonormal(product(matrix.T, block), None)), None)
    left, values, _ = jnp.linalg.svd(product(block.T, matrix), full_matrices=False)
    return product(block, left[:, :number]), values[:number]


def _orthonormal(block: Array, inner: Callable[[Array], Array] | None) -> Array:
    """Columns that span the block, orthonormal in the inner product; zero where the block's rank falls short of it."""
    block = jnp.linalg.qr(block)[0]
    if inner is None:
        return block
    for _ in range(2):  # once more against rounding
        gram = product(block.T, inner(block))
        values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
        kept = values > 10 * values.shape[0] * jnp.finfo(values.dtype).eps * values[-1]
        block = product(block, vectors * jnp.where(kept, lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)[None])
    return block
