"""Regression problems of estimators, on explicit features or with a kernel, and solvers of their leading subspaces."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Bool, Float, Inexact, Int

from dissociation._core.checks import check_choice, check_count, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.keys import named_key
from dissociation._core.linalg import finite_part, product, scale_of
from koopman._operators._pairs import gram_root

Rank = int | Int[Array | np.ndarray, ""]

SOLVERS = ("auto", "dense", "krylov", "randomized")
# "auto" is "dense" up to this number of rows or columns.
DENSE_UP_TO = 256
# Number of further columns, and of blocks in a Krylov space before a restart with its best vectors:
# narrow blocks and long spaces if a product is cheap, wide blocks and short spaces if each inner
# product costs a solve.
_OVERSAMPLING, _BLOCKS = 4, 8
_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER = 8, 2
NUM_CHECKED = 64
"""Number of leading eigenvalues to check by Rayleigh quotients."""


def latent(
    rank: Rank | None, width: int, columns: str, solver: str, solvers: tuple[str, ...]
) -> tuple[int, Array, str]:
    """Return the static number of latent functions, the number of those in use, and the solver."""
    check_choice("solver", solver, solvers)
    if rank is None:
        return width, to_device(width, int), solver
    if is_traced(rank):
        if solver not in ("auto", "dense"):
            fail("solver", "be 'dense' for a traced `rank`", repr(solver))
        return width, jnp.asarray(rank), "dense"
    size = check_count("rank", rank.item() if isinstance(rank, jax.Array) else rank, minimum=1)
    if size > width:
        fail("rank", f"be at most the number of {columns} ({width})", rank)
    return size, to_device(size, int), solver


class Basis(NamedTuple):
    """Leading vectors and values of a spectrum. `variance` and `rest` have no derivative."""

    vectors: Array  # eigenvectors, left singular vectors, or of a fit U, [d, size], or W, [n, size]
    values: Array  # eigenvalues or singular values, falling: [size]
    # values that follow: all from a dense solver, lower bounds of a few from an iterative one
    rest: Array
    variance: Array | None = (
        None  # eigenvalue number `size` of C_x or K, or a bound of it, to compare with `alpha`
    )
    residual: Array | None = (
        None  # over the largest eigenvalue (of the operator, or of M M^T); None without iterations
    )


class FeatureRegression(eqx.Module):
    """Regression on explicit features, U^T (C_x + alpha I) U = I."""

    x: Array  # rows of the states with x^T x = C_x: [m, d]
    y: Array  # rows of the successors with x^T y = C_xy: [m, dy]
    alpha: Array  # Tikhonov regularisation
    active: Array  # latent functions in use, the others are zero
    size: int = eqx.field(static=True)  # latent functions
    solver: str = eqx.field(static=True)  # see `find_left_vectors`
    route: str = eqx.field(
        static=True
    )  # "qr", "covariance", or "auto": the second if `suffices`, else the first

    @property
    def suffices(self) -> Array:
        """True if all eigenvalues of C_x exceed 10^6 eps tr(C_x), for all members of a `vmap`."""
        x = lax.stop_gradient(self.x)
        square = product(x.T, x)
        sizes = jnp.diagonal(square)
        trace = jnp.sum(sizes)
        # A Cholesky factor exists if all eigenvalues are positive, and is cheaper than the
        # eigenvalues.
        least = 1e6 * jnp.finfo(x.dtype).eps * trace - jnp.where(sizes == 0, trace, 0.0)
        # Members of a `vmap` decide together, because a mapped condition would run both programs.
        return _all_members(jnp.isfinite(jnp.linalg.cholesky(square - jnp.diag(least))).all())

    @property
    def threshold(self) -> Array:
        """Relative size below which a singular value of the data counts as zero."""
        eps = jnp.finfo(self.x.dtype).eps
        # Zero eigenvalues of C_x were 0.2 to 3.2 rounding units, for 10 to 1500 columns and up to
        # 100 000 rows.
        qr, covariance = (
            jnp.asarray(value, self.x.dtype) for value in (self.x.shape[1] * eps, (8 * eps) ** 0.5)
        )
        if self.route == "auto":
            return jnp.where(self.suffices, covariance, qr)
        return qr if self.route == "qr" else covariance

    def either(
        self,
        quick: Callable[["FeatureRegression"], Any],
        whole: Callable[["FeatureRegression"], Any],
    ) -> Any:
        """Return `quick` of the problem if second moments suffice, else `whole` of it, computing only one of them."""
        return lax.cond(self.suffices, quick, whole, self)

    def by_route(self, function: Callable[["FeatureRegression"], Any]) -> Any:
        """Return a function of the problem with its route resolved."""
        if self.route != "auto":
            return function(self)
        return self.either(
            lambda given: function(given.via("covariance")), lambda given: function(given.via("qr"))
        )

    def via(self, route: str) -> "FeatureRegression":
        """Return the same problem with another route."""
        return dataclasses.replace(self, route=route)

    def scaled(self, values: Float[Array, " k"], right: Float[Array, "k d"]) -> tuple[Array, Array]:
        """Return W, from square roots of C_x's eigenvalues and eigenvectors in rows, and the scale of its columns."""
        kept = values > self.threshold * values[0]
        scale = jnp.where(kept, lax.rsqrt(jnp.where(kept, values**2 + self.alpha, 1.0)), 0.0)
        return right.T * scale[None], scale

    def leading(self) -> Basis:
        """Return the first `size` columns of W, and their deviations."""
        if self.route == "covariance":
            found = find_left_vectors(product(self.x.T, self.x), self.size, solver=self.solver)
            found = found._replace(values=jnp.sqrt(found.values), rest=jnp.sqrt(found.rest))
        else:
            root = gram_root(self.x) if self.x.shape[0] > self.x.shape[1] else self.x
            found = find_left_vectors(root.T, min(self.size, *root.shape), solver=self.solver)
        return found._replace(vectors=self.scaled(found.values, found.vectors.T)[0])

    def axes(self) -> tuple[Array, Array]:
        """Return W and the square roots of C_x's eigenvalues."""
        return self.whitening(crossed=False)[:2]

    def whitening(self, *, crossed: bool) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
        """Return W [d, k], deviations [k], and g [k] and, if `crossed`, f with W^T x^T y = g f(y)."""
        x = self.x
        if self.route == "covariance":
            squares, vectors = jnp.linalg.eigh(product(x.T, x))
            values, right = jnp.sqrt(jnp.maximum(squares, 0.0))[::-1], vectors.T[::-1]
            whiten, scale = self.scaled(values, right)
            return whiten, values, scale, lambda y: product(right, product(x.T, y))
        tall = x.shape[0] > x.shape[1]
        if tall and not crossed:  # Q is not needed
            orthogonal, root = None, gram_root(x)
        else:
            orthogonal, root = jnp.linalg.qr(x) if tall else (None, x)
        left, values, right = jnp.linalg.svd(root, full_matrices=False)
        whiten, scale = self.scaled(values, right)

        def turned(y: Array) -> Array:
            # Through Q: W^T (x^T y) would multiply the rounding of x^T y by W.
            return product(left.T, y if orthogonal is None else product(orthogonal.T, y))

        return whiten, values, values * scale, turned

    def perturbed(self, tangent: "FeatureRegression") -> tuple[Array, ...]:
        """Return d(C_x + alpha I), eigenvalues of C_x, falling, its eigenvectors in rows, W and its scale."""
        half = product(self.x.T, tangent.x)
        slope = half + half.T + tangent.alpha * jnp.eye(self.x.shape[1], dtype=self.x.dtype)
        squares, vectors = jnp.linalg.eigh(product(self.x.T, self.x))
        squares, right = jnp.maximum(squares, 0.0)[::-1], vectors.T[::-1]
        return slope, squares, right, *self.scaled(jnp.sqrt(squares), right)

    def pull(self, whiten: Float[Array, "d k"]) -> Float[Array, "k d"]:
        """Return W^T (C_x + alpha I), which maps U = W E back to E."""
        return product(product(whiten.T, self.x.T), self.x) + self.alpha * whiten.T


@custom_vmap
def _all_members(true: Array) -> Array:
    """Return a boolean; under `vmap`, True if all are, for every member."""
    return true


@_all_members.def_vmap
def _(_: int, batched: list[bool], true: Array) -> tuple[Array, bool]:
    return _all_members(jnp.all(true, 0) if batched[0] else true), False


class KernelRegression(eqx.Module):
    """Regression in the space of a kernel, with weights W = sqrt(n) c, W^T (K^2 + alpha K) W = I."""

    x: Array  # K = k(X, X) / n: [n, n]
    y: Array  # L = k(Y, Y) / n: [n, n]
    alpha: Array  # Tikhonov regularisation
    active: Array  # latent functions in use, the others are zero
    size: int = eqx.field(static=True)  # latent functions
    solver: str = eqx.field(static=True)  # one of the estimator's `kernel_solvers`, "auto" resolved

    @property
    def cutoff(self) -> float:
        """Relative size below which an eigenvalue of K counts as zero: 8 times the rounding unit."""
        # Zero eigenvalues of kernels were 1.3 to 3.3 rounding units, for 30 to 2000 samples. A
        # cut-off in proportion to n would drop directions that the regularised risk needs.
        return 8 * float(jnp.finfo(self.x.dtype).eps)

    def scale(self, values: Float[Array, " k"]) -> tuple[Array, Array]:
        """Return (lambda (lambda + alpha))^(-1/2), zero if lambda is cut off, and True for each lambda kept."""
        kept = values > self.cutoff * values[0]
        safe = jnp.where(kept, values, 1.0)
        return jnp.where(kept, lax.rsqrt(safe) * lax.rsqrt(safe + self.alpha), 0.0), kept

    def in_eigenbasis(self) -> tuple[Array, Array, Array, Array, Array]:
        """Return P, l, s, g, P^T L P: K = P diag(l) P^T, l falling, s = (l (l + alpha))^(-1/2), T = P g^2 P^T."""
        values, vectors = eigenpairs(self.x)
        scale, _ = self.scale(values)
        return (
            vectors,
            values,
            scale,
            (scale * values)[:, None],
            product(vectors.T, product(self.y, vectors)),
        )


def leading_of(matrix: Float[Array, "n n"], size: int) -> Basis:
    """Return leading eigenpairs of a positive matrix, by its full decomposition."""
    values, vectors = eigenpairs(matrix)
    return Basis(vectors[:, :size], values[:size], values[size:])


def eigenpairs(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return eigenvalues of a positive matrix, falling, and eigenvectors in columns."""
    # At low rank LAPACK returns zeros of up to 48 rounding units of the largest eigenvalue (2000
    # equal rows, on one of two processors), while their quotients v^T K v are at most 0.3 units.
    values, vectors = jnp.linalg.eigh(matrix)
    values, vectors = values[::-1], vectors[:, ::-1]
    head = vectors[:, :NUM_CHECKED]
    quotients = jnp.sum(head * product(matrix, head), 0)
    found = values[:NUM_CHECKED]
    return values.at[:NUM_CHECKED].set(
        jnp.where(2 * quotients < found, jnp.maximum(quotients, 0.0), found)
    ), vectors


def mixing(
    numerator: Float[Array, "k r"],
    squares: Float[Array, " k"],
    active: Int[Array, ""],
    floor: float = 0.0,
) -> Float[Array, "k r"]:
    """Return the derivative of leading eigenvectors along the others, N_ij / (s_j - s_i), i beyond and j within."""
    rows, columns = jnp.arange(numerator.shape[0])[:, None], jnp.arange(numerator.shape[1])[None]
    leading = squares[None, : numerator.shape[1]]
    gap = leading - squares[:, None]
    used = (rows >= active) & (columns < active) & (leading > floor * squares[0])
    eps = jnp.finfo(squares.dtype).eps
    # Gaps of small eigenvalues may be rounding of the largest, or of themselves if they are
    # accurate.
    noise = 64 * eps * jnp.where(leading > eps**0.5 * squares[0], squares[0], leading)
    tied = used & (gap <= noise)
    return refused(jnp.where(used, numerator / jnp.where(used & ~tied, gap, 1.0), 0.0), tied)


def halved(slopes: Float[Array, " r"], values: Float[Array, " r"]) -> Float[Array, " r"]:
    """Return derivatives of roots from those of their squares; zero at zero."""
    return jnp.where(values > 0, 0.5 * slopes / jnp.where(values > 0, values, 1.0), 0.0)


def find_eigenpairs(
    apply: Callable, size: int, number: int, dtype: Any, inner: Any = None, max_restarts: int = 50
) -> Basis:
    """Find leading eigenpairs of a positive semidefinite operator, by restarted block Krylov spaces.

    `apply`: Self-adjoint A on a block [size, columns]. With `inner`, A of a block is
    `apply(inner(block))`.

    Source: Musco and Musco (2015), Randomized block Krylov methods for stronger and faster
    approximate SVD, algorithm 2.
    """
    extra, blocks = (
        (_OVERSAMPLING, _BLOCKS)
        if inner is None
        else (_OVERSAMPLING_WITH_INNER, _BLOCKS_WITH_INNER)
    )
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
        # Residuals are measured in the inner product, because its null directions hold only
        # rounding.
        off = (images - vectors * values[None])[:, :number]
        off = off / scale_of(
            jnp.maximum(values[0], tiny)
        )  # squares in units of the operator may overflow
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
    start = jnp.linalg.qr(
        image_of(jax.random.normal(named_key("first vectors"), (size, width), dtype))
    )[0]
    first = space(start)
    vectors, values, off, *_ = lax.while_loop(going, body, (*first, first[2], jnp.asarray(1)))
    return Basis(vectors[:, :number], values[:number], values[number:], residual=off)


def find_left_vectors(
    matrix: Float[Array, "k m"],
    number: int,
    *,
    scale: Float[Array | np.ndarray, " k"] | None = None,
    solver: str,
) -> Basis:
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

        found = find_eigenpairs(squared, rows, number, dtype=matrix.dtype)
        values, rest = (
            jnp.sqrt(jnp.maximum(part, 0.0)) * unit * grade + undefined
            for part in (found.values, found.rest)
        )
        return found._replace(vectors=found.vectors + undefined, values=values, rest=rest)
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
    return Basis(vectors[:, :number], values[:number], values[number:])


def chosen_solver(solver: str, rows: int, columns: int, number: int) -> str:
    """Return the solver for `number` singular vectors, with "auto" resolved."""
    if solver != "auto":
        return solver
    return (
        "krylov"
        if min(rows, columns) > DENSE_UP_TO and number <= min(rows, columns) // 16
        else "dense"
    )


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


def refused(
    tangent: Inexact[Array, "..."], unresolved: Bool[Array, "..."]
) -> Inexact[Array, "..."]:
    """Return the tangent, infinite if it is unresolved and not zero."""
    # Without a gap there is no derivative, and a wrong finite one would go unnoticed. A product is
    # linear in the tangent, so it has a transpose. NaN would spread to other gradients, as 0 * NaN.
    factor = jnp.where(unresolved, jnp.finfo(tangent.dtype).max, 1.0)
    return tangent * factor * factor
