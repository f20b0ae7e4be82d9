"""Regression problems of estimators, and solvers of their leading subspaces."""

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
from koopman._operators._numerics import ratio_or_zero, rounding_unit
from koopman._operators._pairs import gram_root

Rank = int | Int[Array | np.ndarray, ""]

SOLVERS = ("auto", "dense", "krylov", "randomized")
# "auto" is "dense" up to this number of rows or columns.
DENSE_UP_TO = 256
# Number of further columns, and of blocks in a Krylov space before a restart with its best vectors:
# narrow blocks and long spaces if a product is cheap, wide blocks and short spaces if each inner
# product costs a solve.
_OVERSAMPLING = 4
_BLOCKS = 8
_OVERSAMPLING_WITH_INNER = 8
_BLOCKS_WITH_INNER = 2
NUM_CHECKED = 64
"""Number of leading eigenvalues to check by Rayleigh quotients."""


def latent(
    rank: Rank | str | None, width: int, columns: str, solver: str, solvers: tuple[str, ...]
) -> tuple[int, Array, str]:
    """Return the static number of latent functions, the number of those in use, and the solver."""
    check_choice("solver", solver, solvers)
    if rank is None:
        return width, to_device(width, int), solver
    if isinstance(rank, str):
        fail("rank", "be an integer in `koopman.fit`", repr(rank), "koopman.fit_model chooses it")
    if is_traced(rank):
        if solver not in ("auto", "dense"):
            fail("solver", "be 'dense' for a traced `rank`", repr(solver))
        return width, jnp.asarray(rank), "dense"
    if isinstance(rank, jax.Array):
        rank = rank.item()
    size = check_count("rank", rank, minimum=1)
    if size > width:
        fail("rank", f"be at most the number of {columns} ({width})", rank)
    return size, to_device(size, int), solver


class Basis(NamedTuple):
    """Leading vectors and values of a spectrum.

    `variance` and `trailing_values` have no derivative.
    """

    # Eigenvectors, left singular vectors, or of a fit U, [d, size], or W, [n, size].
    vectors: Array
    # Eigenvalues or singular values, falling: [size].
    values: Array
    # Values that follow: all from a dense solver, lower bounds of a few from an iterative one.
    trailing_values: Array
    # Eigenvalue number `size` of C_x or K, or a bound of it, to compare with `alpha`.
    variance: Array | None = None
    # Residual over the largest eigenvalue (of the operator, or of M M^T); None without iterations.
    residual: Array | None = None


class FeatureRegression(eqx.Module):
    """Regression on explicit features, U^T (C_x + alpha I) U = I."""

    x: Array  # rows of the states with x^T x = C_x: [m, d]
    y: Array  # rows of the successors with x^T y = C_xy: [m, dy]
    alpha: Array  # Tikhonov regularisation
    active: Array  # latent functions in use, the others are zero
    size: int = eqx.field(static=True)  # latent functions
    solver: str = eqx.field(static=True)  # see `find_left_vectors`
    # "qr", "covariance", or "auto": "covariance" if `moments_suffice`, else "qr".
    route: str = eqx.field(static=True)
    square: Array | None = None  # x^T x, if it is computed already

    @property
    def second_moment(self) -> Float[Array, "d d"]:
        """Return C_x = x^T x."""
        return product(self.x.T, self.x) if self.square is None else self.square

    def moments_suffice(self, alpha: Array | float = 0.0) -> Array:
        """Return True if all eigenvalues of C_x + alpha I exceed 10^6 eps tr(C_x).

        For all members of a `vmap`.
        """
        square = lax.stop_gradient(self.second_moment)
        sizes = jnp.diagonal(square)
        trace = jnp.sum(sizes)
        # A Cholesky factor exists if all eigenvalues are positive, and is cheaper than the
        # eigenvalues.
        floor = 1e6 * rounding_unit(square) * trace - lax.stop_gradient(alpha)
        shift = floor - jnp.where(sizes == 0, trace, 0.0)
        factor = jnp.linalg.cholesky(square - jnp.diag(shift))
        # Members of a `vmap` decide together, because a mapped condition would run both programs.
        return _all_members(jnp.isfinite(factor).all())

    def threshold(self, alpha: Array | float = 0.0) -> Array:
        """Return the relative size below which a singular value of the data counts as zero.

        By "auto", `either` chooses the route at `alpha`.
        """
        eps = rounding_unit(self.x)
        # Zero eigenvalues of C_x were 0.2 to 3.2 rounding units, for 10 to 1500 columns and up to
        # 100 000 rows.
        qr = jnp.asarray(self.x.shape[1] * eps, self.x.dtype)
        covariance = jnp.asarray((8 * eps) ** 0.5, self.x.dtype)
        if self.route == "auto":
            return jnp.where(self.moments_suffice(alpha), covariance, qr)
        return qr if self.route == "qr" else covariance

    def either(
        self,
        quick: Callable[["FeatureRegression"], Any],
        accurate: Callable[["FeatureRegression"], Any],
        alpha: Array | float = 0.0,
    ) -> Any:
        """Return `quick` of the problem if moments suffice at `alpha`, else `accurate` of it.

        Only one of them is computed.
        """
        # Both the decision and the quick branch need C_x.
        problem = dataclasses.replace(self, square=self.second_moment)
        return lax.cond(problem.moments_suffice(alpha), quick, accurate, problem)

    def by_route(self, function: Callable[["FeatureRegression"], Any]) -> Any:
        """Return a function of the problem with its route resolved."""
        if self.route != "auto":
            return function(self)
        return self.either(
            lambda task: function(task.via("covariance")), lambda task: function(task.via("qr"))
        )

    def via(self, route: str) -> "FeatureRegression":
        """Return the same problem with another route."""
        return dataclasses.replace(self, route=route)

    def scaled(
        self, values: Float[Array, " k"], right_vectors: Float[Array, "k d"]
    ) -> tuple[Array, Array]:
        """Return W and the scale of the columns of W.

        `values`: Square roots of C_x's eigenvalues. `right_vectors`: Eigenvectors in rows.
        """
        is_kept = values > self.threshold() * values[0]
        squares = jnp.where(is_kept, values**2 + self.alpha, 1.0)
        scale = jnp.where(is_kept, lax.rsqrt(squares), 0.0)
        return right_vectors.T * scale[None], scale

    def leading(self) -> Basis:
        """Return the first `size` columns of W, and their deviations."""
        x = self.x
        if self.route == "covariance":
            basis = find_left_vectors(self.second_moment, self.size, solver=self.solver)
            values = jnp.sqrt(basis.values)
            trailing_values = jnp.sqrt(basis.trailing_values)
            basis = basis._replace(values=values, trailing_values=trailing_values)
        else:
            root = gram_root(x) if x.shape[0] > x.shape[1] else x
            num_vectors = min(self.size, *root.shape)
            basis = find_left_vectors(root.T, num_vectors, solver=self.solver)
        whiten, _ = self.scaled(basis.values, basis.vectors.T)
        return basis._replace(vectors=whiten)

    def axes(self) -> tuple[Array, Array]:
        """Return W and the square roots of C_x's eigenvalues."""
        whiten, values, _, _ = self.whitening(crossed=False)
        return whiten, values

    def whitening(self, *, crossed: bool) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
        """Return W [d, k], deviations [k], g [k], and a function f.

        If `crossed`, W^T x^T y = g f(y).
        """
        x = self.x
        if self.route == "covariance":
            squares, vectors = jnp.linalg.eigh(self.second_moment)
            values = jnp.sqrt(jnp.maximum(squares, 0.0))[::-1]
            right_vectors = vectors.T[::-1]
            whiten, scale = self.scaled(values, right_vectors)
            return whiten, values, scale, lambda y: product(right_vectors, product(x.T, y))

        is_tall = x.shape[0] > x.shape[1]
        orthogonal = None
        root = x
        if is_tall and crossed:
            orthogonal, root = jnp.linalg.qr(x)
        elif is_tall:  # Q is not needed
            root = gram_root(x)
        left_vectors, values, right_vectors = jnp.linalg.svd(root, full_matrices=False)
        whiten, scale = self.scaled(values, right_vectors)

        def turned(y: Array) -> Array:
            # Through Q: W^T (x^T y) would multiply the rounding of x^T y by W.
            if orthogonal is not None:
                y = product(orthogonal.T, y)
            return product(left_vectors.T, y)

        return whiten, values, values * scale, turned

    def perturbed(self, tangent: "FeatureRegression") -> tuple[Array, ...]:
        """Return d(C_x + alpha I), eigenvalues and eigenvectors of C_x, W and its scale.

        Eigenvalues fall, and eigenvectors are in rows.
        """
        x = self.x
        half = product(x.T, tangent.x)
        ridge = tangent.alpha * jnp.eye(x.shape[1], dtype=x.dtype)
        slope = half + half.T + ridge
        squares, vectors = jnp.linalg.eigh(product(x.T, x))
        squares = jnp.maximum(squares, 0.0)[::-1]
        right_vectors = vectors.T[::-1]
        whiten, scale = self.scaled(jnp.sqrt(squares), right_vectors)
        return slope, squares, right_vectors, whiten, scale

    def pull(self, whiten: Float[Array, "d k"]) -> Float[Array, "k d"]:
        """Return W^T (C_x + alpha I), which maps U = W E back to E."""
        images = product(whiten.T, self.x.T)
        return product(images, self.x) + self.alpha * whiten.T


@custom_vmap
def _all_members(is_true: Array) -> Array:
    """Return a boolean; under `vmap`, True for every member if all are True."""
    return is_true


@_all_members.def_vmap
def _(_: int, batched: list[bool], is_true: Array) -> tuple[Array, bool]:
    if batched[0]:
        is_true = jnp.all(is_true, 0)
    return _all_members(is_true), False


class KernelRegression(eqx.Module):
    """Regression in a kernel's space, with weights W = sqrt(n) c, W^T (K^2 + alpha K) W = I."""

    x: Array  # K = k(X, X) / n: [n, n]
    y: Array  # L = k(Y, Y) / n: [n, n]
    alpha: Array  # Tikhonov regularisation
    active: Array  # latent functions in use, the others are zero
    size: int = eqx.field(static=True)  # latent functions
    solver: str = eqx.field(static=True)  # one of the estimator's `kernel_solvers`, "auto" resolved

    @property
    def cutoff(self) -> float:
        """Relative size below which an eigenvalue of K counts as zero: 8 rounding units."""
        # Zero eigenvalues of kernels were 1.3 to 3.3 rounding units, for 30 to 2000 samples. A
        # cut-off in proportion to n would drop directions that the regularised risk needs.
        return 8 * rounding_unit(self.x)

    def scale(self, values: Float[Array, " k"]) -> tuple[Array, Array]:
        """Return (lambda (lambda + alpha))^(-1/2), and False for every lambda that is cut off.

        The scale is zero if lambda is cut off.
        """
        is_kept = values > self.cutoff * values[0]
        safe = jnp.where(is_kept, values, 1.0)
        scale = lax.rsqrt(safe) * lax.rsqrt(safe + self.alpha)
        return jnp.where(is_kept, scale, 0.0), is_kept

    def in_eigenbasis(self) -> tuple[Array, ...]:
        """Return P, l, s, g and P^T L P with K = P diag(l) P^T and l falling.

        s = (l (l + alpha))^(-1/2), T = P g^2 P^T.
        """
        values, vectors = eigenpairs(self.x)
        scale, _ = self.scale(values)
        gain = (scale * values)[:, None]
        turned = product(vectors.T, product(self.y, vectors))
        return vectors, values, scale, gain, turned


def truncated(vectors: Array, values: Array, size: int) -> Basis:
    """Return a basis of the first `size` vectors and values."""
    return Basis(vectors[:, :size], values[:size], values[size:])


def leading_of(matrix: Float[Array, "n n"], size: int) -> Basis:
    """Return leading eigenpairs of a positive matrix, by its full decomposition."""
    values, vectors = eigenpairs(matrix)
    return truncated(vectors, values, size)


def eigenpairs(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return eigenvalues of a positive matrix, falling, and eigenvectors in columns."""
    # At low rank LAPACK returns zeros of up to 48 rounding units of the largest eigenvalue (2000
    # equal rows, on one of two processors), while their quotients v^T K v are at most 0.3 units.
    values, vectors = jnp.linalg.eigh(matrix)
    values = values[::-1]
    vectors = vectors[:, ::-1]
    leading_vectors = vectors[:, :NUM_CHECKED]
    leading_values = values[:NUM_CHECKED]
    quotients = jnp.sum(leading_vectors * product(matrix, leading_vectors), 0)
    is_rounding = 2 * quotients < leading_values
    checked = jnp.where(is_rounding, jnp.maximum(quotients, 0.0), leading_values)
    return values.at[:NUM_CHECKED].set(checked), vectors


def mixing(
    numerator: Float[Array, "k r"],
    squares: Float[Array, " k"],
    active: Int[Array, ""],
    floor: float = 0.0,
) -> Float[Array, "k r"]:
    """Return the derivative of leading eigenvectors along the others, N_ij / (s_j - s_i).

    It is zero unless i is beyond and j within the first `active` eigenvectors.
    """
    num_rows, num_columns = numerator.shape
    rows = jnp.arange(num_rows)[:, None]
    columns = jnp.arange(num_columns)[None]
    leading = squares[None, :num_columns]
    gap = leading - squares[:, None]
    is_used = (rows >= active) & (columns < active) & (leading > floor * squares[0])

    # Gaps of small eigenvalues may be rounding of the largest, or of themselves if they are
    # accurate.
    eps = jnp.finfo(squares.dtype).eps
    noise = 64 * eps * jnp.where(leading > eps**0.5 * squares[0], squares[0], leading)
    is_tied = is_used & (gap <= noise)
    ratio = numerator / jnp.where(is_used & ~is_tied, gap, 1.0)
    return infinite_if_unresolved(jnp.where(is_used, ratio, 0.0), is_tied)


def halved(slopes: Float[Array, " r"], values: Float[Array, " r"]) -> Float[Array, " r"]:
    """Return derivatives of roots from those of their squares; zero at zero."""
    return ratio_or_zero(0.5 * slopes, values, values > 0)


def find_eigenpairs(
    apply: Callable, size: int, number: int, dtype: Any, inner: Any = None, max_restarts: int = 50
) -> Basis:
    """Find leading eigenpairs of a positive semidefinite operator by restarted Krylov spaces.

    `apply`: Self-adjoint A on a block [size, columns]. With `inner`, A of a block is
    `apply(inner(block))`.

    Source: Musco and Musco (2015), Randomized block Krylov methods for stronger and faster
    approximate SVD, algorithm 2.
    """
    num_extra = _OVERSAMPLING
    num_blocks = _BLOCKS
    if inner is not None:
        num_extra = _OVERSAMPLING_WITH_INNER
        num_blocks = _BLOCKS_WITH_INNER
    width = number + num_extra
    if size <= num_blocks * width:  # all vectors would lie in the Krylov space
        width = size
        num_blocks = 1
    limit = 30 * jnp.finfo(dtype).eps
    tiny = jnp.finfo(dtype).tiny

    def image_of(block: Array) -> Array:
        if inner is not None:
            block = inner(block)
        return apply(block)

    def search(block: Array) -> tuple[Array, Array, Array]:
        """Return the best vectors and values in the Krylov space of a block, and their residual."""
        blocks = [block]
        for _ in range(num_blocks - 1):
            image = image_of(blocks[-1])
            blocks.append(jnp.linalg.qr(image)[0])
        basis, dual = _orthonormal(jnp.concatenate(blocks, 1), inner)
        image = apply(dual)
        small = product(dual.T, image)
        values, rotation = jnp.linalg.eigh(0.5 * (small + small.T))
        values = values[::-1][:width]
        rotation = rotation[:, ::-1][:, :width]
        vectors = product(basis, rotation)
        images = product(image, rotation)

        # Residuals are measured in the inner product, because its null directions hold only
        # rounding. Squares in units of the operator may overflow.
        largest = jnp.maximum(values[0], tiny)
        unit = scale_of(largest)
        residuals = (images - vectors * values[None])[:, :number]
        residuals = residuals / unit
        duals = residuals if inner is None else inner(residuals)
        squares = jnp.sum(residuals * duals, 0)
        residual = jnp.sqrt(jnp.maximum(jnp.max(squares), 0.0))
        return vectors, values, residual / (largest / unit)

    def is_unfinished(state: tuple[Array, ...]) -> Array:
        _, _, residual, previous, num_spaces = state
        # If rounding stops the fall of the residual, another space does not help.
        is_falling = (residual < 0.95 * previous) | (num_spaces < 3)
        return (residual > limit) & is_falling & (num_spaces < max_restarts)

    def restart(state: tuple[Array, ...]) -> tuple[Array, ...]:
        vectors, _, residual, _, num_spaces = state
        return *search(vectors), residual, num_spaces + 1

    # A fixed key makes the result a pure function of the operator.
    block = jax.random.normal(named_key("first vectors"), (size, width), dtype)
    block, _ = jnp.linalg.qr(image_of(block))
    vectors, values, residual = search(block)
    start = (vectors, values, residual, residual, jnp.asarray(1))
    vectors, values, residual, _, _ = lax.while_loop(is_unfinished, restart, start)
    basis = truncated(vectors, values, number)
    return basis._replace(residual=residual)


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
    num_rows, num_columns = matrix.shape
    factors = jnp.ones((num_rows, 1), matrix.dtype)
    if scale is not None:
        factors = jnp.asarray(scale)[:, None]
    solver = chosen_solver(solver, num_rows, num_columns, number)
    if solver == "krylov":
        # Squares overflow or vanish in other units.
        unit = scale_of(jnp.max(jnp.abs(matrix)))
        factor_unit = scale_of(jnp.max(jnp.abs(factors)))
        matrix = matrix / unit
        factors = factors / factor_unit

        def apply(block: Array) -> Array:
            image = product(matrix.T, factors * block)
            return factors * product(matrix, image)

        def root_of(squares: Array) -> Array:
            return jnp.sqrt(jnp.maximum(squares, 0.0)) * unit * factor_unit + undefined

        basis = find_eigenpairs(apply, num_rows, number, dtype=matrix.dtype)
        return basis._replace(
            vectors=basis.vectors + undefined,
            values=root_of(basis.values),
            trailing_values=root_of(basis.trailing_values),
        )

    matrix = factors * matrix
    if solver == "randomized":
        width = min(number + 2 * _OVERSAMPLING, num_rows, num_columns)
        block = jax.random.normal(named_key("first vectors"), (num_columns, width), matrix.dtype)
        block = jnp.linalg.qr(product(matrix, block))[0]
        for _ in range(4):
            dual = jnp.linalg.qr(product(matrix.T, block))[0]
            block = jnp.linalg.qr(product(matrix, dual))[0]
        small = product(block.T, matrix)
        vectors, values, _ = jnp.linalg.svd(small, full_matrices=False)
        vectors = product(block, vectors)
    else:
        vectors, values, _ = jnp.linalg.svd(matrix, full_matrices=False)
    return truncated(vectors + undefined, values + undefined, number)


def chosen_solver(solver: str, rows: int, columns: int, number: int) -> str:
    """Return the solver for `number` singular vectors, with "auto" resolved."""
    if solver != "auto":
        return solver
    smaller = min(rows, columns)
    is_iterative = smaller > DENSE_UP_TO and number <= smaller // 16
    return "krylov" if is_iterative else "dense"


def _orthonormal(block: Array, inner: Callable[[Array], Array] | None) -> tuple[Array, Array]:
    """Return Q that spans the block with Q^T T Q = I, and T Q.

    Q has zero columns if the block is rank-deficient.
    """
    block = jnp.linalg.qr(block)[0]
    if inner is None:
        return block, block
    dual = block
    for _ in range(2):  # the second time against rounding
        dual = inner(block)
        gram = product(block.T, dual)
        values, vectors = jnp.linalg.eigh(0.5 * (gram + gram.T))
        cutoff = 10 * values.shape[0] * rounding_unit(values)
        is_kept = values > cutoff * values[-1]
        safe = jnp.where(is_kept, values, 1.0)
        scale = jnp.where(is_kept, lax.rsqrt(safe), 0.0)
        rotation = vectors * scale[None]
        block = product(block, rotation)
        dual = product(dual, rotation)
    return block, dual


def infinite_if_unresolved(
    tangent: Inexact[Array, "..."], unresolved: Bool[Array, "..."]
) -> Inexact[Array, "..."]:
    """Return the tangent, infinite if it is unresolved and not zero."""
    # Without a gap there is no derivative, and a wrong finite one would go unnoticed. A product is
    # linear in the tangent, so it has a transpose. NaN would spread to other gradients, as 0 * NaN.
    factor = jnp.where(unresolved, jnp.finfo(tangent.dtype).max, 1.0)
    return tangent * factor * factor
