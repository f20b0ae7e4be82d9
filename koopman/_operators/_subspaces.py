"""Regression problems of estimators, on explicit features or with a kernel, and the bases that solve them."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float, Int

from dissociation._core.checks import check_choice, check_count, fail, is_traced
from dissociation._core.linalg import product
from koopman._operators._pairs import gram_root
from koopman._operators._perturbation import refused
from koopman._operators._solvers import Leading, find_left_vectors

Rank = int | Int[Array | np.ndarray, ""]

NUM_CHECKED = 64
"""Number of leading eigenvalues to check by Rayleigh quotients."""


def latent(
    rank: Rank | None, width: int, columns: str, solver: str, solvers: tuple[str, ...]
) -> tuple[int, Array, str]:
    """Return the static number of latent functions, the number of those in use, and the solver."""
    check_choice("solver", solver, solvers)
    if rank is None:
        return width, jnp.asarray(width), solver
    if is_traced(rank):
        if solver not in ("auto", "dense"):
            fail("solver", "be 'dense' for a traced `rank`", repr(solver))
        return width, jnp.asarray(rank), "dense"
    size = check_count("rank", rank.item() if isinstance(rank, jax.Array) else rank, minimum=1)
    if size > width:
        fail("rank", f"be at most the number of {columns} ({width})", rank)
    return size, jnp.asarray(size), solver


class Basis(NamedTuple):
    """Basis of the latent functions. `variance` and `rest` have no derivative."""

    vectors: Array  # U, [d, size], or W, [n, size]
    values: Array  # the estimator's singular values, falling: [size]
    rest: Array  # values that follow, as far as the solver returns them
    variance: Array  # eigenvalue number `size` of C_x or K, or a bound of it, to compare with `alpha`
    residual: Array | None = None  # as in `_solvers.Leading`


class FeatureRegression(eqx.Module):
    """Regression on explicit features, U^T (C_x + alpha I) U = I."""

    x: Array  # rows of the states with x^T x = C_x: [m, d]
    y: Array  # rows of the successors with x^T y = C_xy: [m, dy]
    alpha: Array  # Tikhonov regularisation
    active: Array  # latent functions in use, the others are zero
    size: int = eqx.field(static=True)  # latent functions
    solver: str = eqx.field(static=True)  # see `find_left_vectors`
    route: str = eqx.field(static=True)  # "qr", "covariance", or "auto": the second if `suffices`, else the first
    cutoff: float | None = eqx.field(static=True)  # None: the default of the route

    @property
    def suffices(self) -> Array:
        """True if all eigenvalues of C_x exceed 10^6 eps tr(C_x), for all members of a `vmap`."""
        x = lax.stop_gradient(self.x)
        square = product(x.T, x)
        sizes = jnp.diagonal(square)
        trace = jnp.sum(sizes)
        # A Cholesky factor exists if all eigenvalues are positive, and is cheaper than the eigenvalues.
        least = 1e6 * jnp.finfo(x.dtype).eps * trace - jnp.where(sizes == 0, trace, 0.0)
        # Members of a `vmap` decide together, because a mapped condition would run both programs.
        return _all_members(jnp.isfinite(jnp.linalg.cholesky(square - jnp.diag(least))).all())

    @property
    def threshold(self) -> Array:
        """Relative size below which a singular value of the data counts as zero."""
        if self.cutoff is not None:
            return jnp.asarray(self.cutoff, self.x.dtype)
        eps = jnp.finfo(self.x.dtype).eps
        # Zero eigenvalues of C_x were 0.2 to 3.2 rounding units, for 10 to 1500 columns and up to 100 000 rows.
        qr, covariance = (jnp.asarray(value, self.x.dtype) for value in (self.x.shape[1] * eps, (8 * eps) ** 0.5))
        if self.route == "auto":
            return jnp.where(self.suffices, covariance, qr)
        return qr if self.route == "qr" else covariance

    def either(self, quick: Callable[["FeatureRegression"], Any], whole: Callable[["FeatureRegression"], Any]) -> Any:
        """Return `quick` of the problem if second moments suffice, else `whole` of it, computing only one of them."""
        return lax.cond(self.suffices, quick, whole, self)

    def by_route(self, function: Callable[["FeatureRegression"], Any]) -> Any:
        """Return a function of the problem with its route resolved."""
        if self.route != "auto":
            return function(self)
        return self.either(lambda given: function(given.via("covariance")), lambda given: function(given.via("qr")))

    def via(self, route: str) -> "FeatureRegression":
        """Return the same problem with another route."""
        return dataclasses.replace(self, route=route)

    def scaled(self, values: Float[Array, " k"], right: Float[Array, "k d"]) -> tuple[Array, Array]:
        """Return W, from square roots of C_x's eigenvalues and eigenvectors in rows, and the scale of its columns."""
        kept = values > self.threshold * values[0]
        scale = jnp.where(kept, lax.rsqrt(jnp.where(kept, values**2 + self.alpha, 1.0)), 0.0)
        return right.T * scale[None], scale

    def leading(self) -> Leading:
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
        # Zero eigenvalues of kernels were 1.3 to 3.3 rounding units, for 30 to 2000 samples. A cut-off in proportion to
        # n would drop directions that the regularised risk needs.
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
        return vectors, values, scale, (scale * values)[:, None], product(vectors.T, product(self.y, vectors))


def leading_of(matrix: Float[Array, "n n"], size: int) -> Leading:
    """Return leading eigenpairs of a positive matrix, by its full decomposition."""
    values, vectors = eigenpairs(matrix)
    return Leading(vectors[:, :size], values[:size], values[size:])


def eigenpairs(matrix: Float[Array, "n n"]) -> tuple[Float[Array, " n"], Float[Array, "n n"]]:
    """Return eigenvalues of a positive matrix, falling, and eigenvectors in columns."""
    # At low rank LAPACK returns zeros of up to 48 rounding units of the largest eigenvalue (2000 equal rows, on one of
    # two processors), while their quotients v^T K v are at most 0.3 units.
    values, vectors = jnp.linalg.eigh(matrix)
    values, vectors = values[::-1], vectors[:, ::-1]
    head = vectors[:, :NUM_CHECKED]
    quotients = jnp.sum(head * product(matrix, head), 0)
    found = values[:NUM_CHECKED]
    return values.at[:NUM_CHECKED].set(jnp.where(2 * quotients < found, jnp.maximum(quotients, 0.0), found)), vectors


def mixing(
    numerator: Float[Array, "k r"], squares: Float[Array, " k"], active: Int[Array, ""], floor: float = 0.0
) -> Float[Array, "k r"]:
    """Return the derivative of leading eigenvectors along the others, N_ij / (s_j - s_i), i beyond and j within."""
    rows, columns = jnp.arange(numerator.shape[0])[:, None], jnp.arange(numerator.shape[1])[None]
    leading = squares[None, : numerator.shape[1]]
    gap = leading - squares[:, None]
    used = (rows >= active) & (columns < active) & (leading > floor * squares[0])
    eps = jnp.finfo(squares.dtype).eps
    # Gaps of small eigenvalues may be rounding of the largest, or of themselves if they are accurate.
    noise = 64 * eps * jnp.where(leading > eps**0.5 * squares[0], squares[0], leading)
    tied = used & (gap <= noise)
    return refused(jnp.where(used, numerator / jnp.where(used & ~tied, gap, 1.0), 0.0), tied)


def halved(slopes: Float[Array, " r"], values: Float[Array, " r"]) -> Float[Array, " r"]:
    """Return derivatives of roots from those of their squares; zero at zero."""
    return jnp.where(values > 0, 0.5 * slopes / jnp.where(values > 0, values, 1.0), 0.0)
