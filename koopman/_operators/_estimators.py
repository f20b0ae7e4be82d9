"""Estimators G = U U^T C_xy of an evolution operator, U^T (C_x + alpha I) U = I, with different spans of U.

C_x = X^T X / n and C_xy = X^T Y / n, not centred by default.
"""

import dataclasses
from abc import abstractmethod
from functools import partial
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_non_negative, is_traced
from dissociation._core.linalg import product
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from koopman._operators._subspaces import (
    Basis,
    FeatureRegression,
    KernelRegression,
    Rank,
    chosen_solver,
    eigenpairs,
    find_eigenpairs,
    find_left_vectors,
    halved,
    leading_of,
    mixing,
)

Slopes = tuple[Array, Array]
"""Derivatives of the vectors and of the values of a `Basis`."""


class Estimator(eqx.Module):
    """Base class of the estimators. Fields of a subclass are static: programs are compiled per estimator."""

    alpha: Scalar | None  # in units of C_x; None for `koopman._operators._pairs.default_alpha`
    size: int | None = eqx.field(static=True)  # static number of latent functions; None for all
    masked: Array | None  # traced number of latent functions
    solver: str | None = eqx.field(static=True)  # None: `feature_solver`; "auto" with a kernel
    feature_solver: ClassVar[str] = "dense"
    kernel_solvers: ClassVar[tuple[str, ...]] = ("auto", "dense", "krylov")
    inverts_all: ClassVar[bool] = False  # True if C_x is inverted in all directions

    def __init__(self, rank: Rank | None, alpha: Scalar | None, solver: str | None):
        if alpha is not None:
            check_non_negative("alpha", alpha)
        known = rank is not None and not is_traced(rank)
        self.size = check_count("rank", rank, minimum=1) if known else None
        self.masked = None if known or rank is None else jnp.asarray(rank)
        self.alpha, self.solver = alpha, solver

    def __check_init__(self):
        arrays = {f.name for f in dataclasses.fields(self) if not f.metadata.get("static")} - {
            "alpha",
            "masked",
        }
        if arrays:
            raise TypeError(
                "Fields of an estimator must be static, `eqx.field(static=True)`, got "
                f"{sorted(arrays)}."
            )

    @property
    def rank(self) -> int | Array | None:
        """Return the rank that was passed, or None for full rank."""
        return self.size if self.masked is None else self.masked

    @abstractmethod
    def features(self, problem: FeatureRegression) -> Basis:
        """Return U and the singular values on explicit features; unused columns are arbitrary."""

    @abstractmethod
    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Return the derivatives of vectors and values along `tangent`."""

    @abstractmethod
    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W and the singular values with a kernel."""

    @abstractmethod
    def kernel_jvp(
        self, problem: KernelRegression, tangent: KernelRegression, solution: Basis
    ) -> Slopes:
        """Return the derivatives of vectors and values along `tangent`, which keeps the rank of K."""

    def choose_kernel_solver(
        self, gram: Float[Array, "n n"], alpha: Float[Array, ""], size: int
    ) -> str:
        """Return the solver for "auto": an iterative one for a few directions of many samples."""
        if gram.shape[0] <= 1000 or size > gram.shape[0] // 16:
            return "dense"
        return "krylov"


# Derivatives leave out rotations among the columns of U, so that they exist if singular values
# coincide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def span(estimator: Estimator, problem: FeatureRegression | KernelRegression) -> Basis:
    """Return the basis of the latent functions. Functions of U U^T are differentiable in the data and in alpha."""
    basis = (
        estimator.features(problem)
        if isinstance(problem, FeatureRegression)
        else estimator.kernel(problem)
    )
    missing = problem.size - basis.values.shape[0]  # fewer samples than the rank asked for
    used = jnp.arange(problem.size) < problem.active
    vectors = jnp.pad(basis.vectors, ((0, 0), (0, missing))) * used[None]
    return basis._replace(vectors=vectors, values=jnp.pad(basis.values, (0, missing)) * used)


@span.defjvp
def _span_jvp(estimator, primals, tangents):
    (problem,), (tangent,) = primals, tangents
    basis = span(estimator, problem)
    rule = (
        estimator.features_jvp if isinstance(problem, FeatureRegression) else estimator.kernel_jvp
    )
    d_vectors, d_values = rule(problem, tangent, basis)
    return basis, jax.tree.map(jnp.zeros_like, basis)._replace(vectors=d_vectors, values=d_values)


class _Principal:
    """Mixin with a kernel's solution along principal directions, c = P Lambda^(-1/2) (Lambda + alpha)^(-1/2)."""

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W = V F^(1/2) with the leading eigenvectors V of K, F = lambda^-1 (lambda + alpha)^-1."""
        if problem.solver == "krylov":
            number, dtype = problem.x.shape[0], problem.x.dtype
            leading = find_eigenpairs(
                partial(product, problem.x), number, problem.size, dtype=dtype
            )
        else:
            leading = leading_of(problem.x, problem.size)
        scale, _ = problem.scale(leading.values)
        return _rooted(leading, leading.vectors * scale[None], leading.values[-1])

    def kernel_jvp(
        self, problem: KernelRegression, tangent: KernelRegression, solution: Basis
    ) -> Slopes:
        """Differentiate F, a matrix function of K and alpha."""
        size, alpha = problem.size, problem.alpha
        squares, vectors = eigenpairs(problem.x)
        scale, kept = problem.scale(squares)
        active = jnp.minimum(problem.active, jnp.sum(kept))
        leading = jnp.arange(size) < active
        scale = scale[:size] * leading
        mixed = product(vectors.T, product(tangent.x, vectors[:, :size]))
        outside = mixing(mixed, squares, active) * scale[None]
        both = squares[:size, None] + squares[None, :size] + alpha
        inside = -0.5 * both * scale[:, None] ** 2 * scale[None] * mixed[:size]
        inside = inside - jnp.diag(
            0.5 * tangent.alpha * scale / (jnp.where(leading, squares[:size], 1.0) + alpha)
        )
        d_own = product(vectors, outside) + product(vectors[:, :size], inside)
        # If eigenvalues coincide, the solver's columns differ from these by a rotation.
        pull = scale * squares[:size] * (squares[:size] + alpha)
        turn = pull[:, None] * product(vectors[:, :size].T, solution.vectors)
        return product(d_own, turn), halved(jnp.diagonal(mixed), solution.values)


class Ridge(_Principal, Estimator):
    """Ridge regression, G = (C_x + alpha I)^{-1} C_xy: rank d on features, n with a kernel.

    Attributes:
        alpha: Tikhonov regularisation, non-negative, an absolute number in the units of C_x (with a
            kernel, of k(x, x)). A `jax.vmap` over it decomposes the data once. None: the columns
            are scaled to one size, and alpha is the rounding of the trace of their C_x; with a
            kernel it is 1e-6 times the mean of k(x, x).

    References:
        Kostic et al. (2022), eq. 7, see `koopman.fit`.
    """

    @validated
    def __init__(self, alpha: Scalar | None = None):
        super().__init__(None, alpha, "dense")

    def features(self, problem: FeatureRegression) -> Basis:
        """Return U = W, of all directions."""
        whiten, deviations = problem.by_route(FeatureRegression.axes)
        size, variance = problem.size, jnp.sum(deviations**2) / problem.x.shape[1]
        return Basis(whiten[:, :size], deviations[:size], deviations[size:], variance)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Return -(C_x + alpha I)^(-1) d(C_x + alpha I) U / 2."""
        slope, _, right, whiten, _ = problem.perturbed(tangent)
        mixed = product(product(right, slope), right.T)
        d_values = halved(jnp.diagonal(mixed)[: problem.size] - tangent.alpha, solution.values)
        return -0.5 * product(whiten, product(whiten.T, product(slope, solution.vectors))), d_values

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W, of all directions."""
        return super().kernel(problem)._replace(variance=jnp.trace(problem.x))


class PrincipalComponents(_Principal, Estimator):
    """Principal component regression: ridge regression on the leading `rank` eigenvectors of C_x.

    It is (extended) dynamic mode decomposition, or with a kernel and alpha = 0 its kernel version.

    Attributes:
        rank: Number of directions, from 1 to d (with a kernel, n). If it is traced, as in a
            `jax.vmap` over ranks, shapes are those of the highest rank and latent functions beyond
            `rank` are zero.
        alpha: Tikhonov regularisation, as in `Ridge`.
        solver: "dense" (all directions), or, for a few directions of many, "krylov" and on features
            and centres "randomized", which square the condition number. "auto" is "krylov" for a
            few directions of many (with a kernel, above 1000 samples), else "dense". None is
            "dense" on features, otherwise "auto".

    References:
        Kostic et al. (2022), eq. 8, see `koopman.fit`; Williams, Rowley and Kevrekidis (2015), A
        kernel-based method for data-driven Koopman spectral analysis.
    """

    @validated
    def __init__(self, rank: Rank, alpha: Scalar | None = None, *, solver: str | None = None):
        super().__init__(rank, alpha, solver)

    def features(self, problem: FeatureRegression) -> Basis:
        """Return U = W, of the leading directions."""
        if problem.solver == "dense":
            size, (whiten, deviations) = problem.size, problem.by_route(FeatureRegression.axes)
            return Basis(
                whiten[:, :size], deviations[:size], deviations[size:], deviations[:size][-1] ** 2
            )
        found = problem.by_route(FeatureRegression.leading)
        return found._replace(variance=found.values[-1] ** 2)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Differentiate U = V G^(-1/2) with the leading directions V, G = V^T (C_x + alpha I) V."""
        size = problem.size
        basis = solution.vectors
        slope, squares, right, whiten, scale = problem.perturbed(tangent)
        mixed = product(product(right, slope), right.T)
        used = (jnp.arange(size) < problem.active) & jnp.any(
            basis != 0, 0
        )  # and none that is cut off
        outside = mixing(mixed[:, :size], squares, jnp.sum(used))
        scaled = whiten[:, :size] * used[None]
        scale = scale[:size] * used
        inside = -0.5 * scale[:, None] * mixed[:size, :size] * scale[None]
        d_own = product(right.T, outside * scale[None]) + product(scaled, inside)
        d_values = halved(jnp.diagonal(mixed)[:size] - tangent.alpha, solution.values)
        return product(
            d_own, product(problem.pull(scaled), basis)
        ), d_values  # in the fit's columns


class ReducedRank(Estimator):
    """Reduced rank regression: minimiser of the regularised risk among operators of rank at most `rank`.

    It takes the leading left singular vectors of (C_x + alpha I)^(-1/2) C_xy.

    Attributes:
        rank: Rank, from 1 to d (with a kernel, n); may be traced, as in `PrincipalComponents`.
        alpha: Tikhonov regularisation, as in `Ridge`.
        solver: On features and centres "dense", "krylov", "randomized" or "auto". With a kernel
            "dense" (two eigendecompositions), "krylov" (a Cholesky factor of K + alpha I per
            positive `alpha`), "spectral" (one eigendecomposition of K, which a `vmap` over `alpha`
            shares) or "auto": "dense" up to 1000 samples; above, "krylov" if `alpha` exceeds 100
            times the rounding unit times the mean of k(x, x) (if it is traced, in float64), else
            "spectral". None is "auto".

    References:
        Kostic et al. (2022), eq. 9 and appendix, see `koopman.fit`.
    """

    feature_solver: ClassVar[str] = "auto"
    kernel_solvers: ClassVar[tuple[str, ...]] = ("auto", "dense", "krylov", "spectral")
    inverts_all: ClassVar[bool] = True

    @validated
    def __init__(self, rank: Rank, alpha: Scalar | None = None, *, solver: str | None = None):
        super().__init__(rank, alpha, solver)

    def features(self, problem: FeatureRegression) -> Basis:
        """Return U = W Q with W^T (C_x + alpha I) W = I and the leading left singular vectors Q of W^T C_xy."""
        number, iterated = problem.x.shape[1], ("krylov", "randomized")
        leading = (
            chosen_solver(problem.solver, number, problem.y.shape[1], problem.size) in iterated
        )
        if problem.route == "qr" or not leading:
            return problem.by_route(self._whitened)
        other = "qr" if problem.route == "auto" else problem.route
        return problem.either(_from_moments, lambda given: self._whitened(given.via(other)))

    def _whitened(self, problem: FeatureRegression) -> Basis:
        whiten, deviations, gain, turned = problem.whitening(crossed=True)
        rows = turned(problem.y)
        number = min(problem.size, *rows.shape)
        basis = find_left_vectors(rows, number, scale=gain, solver=problem.solver)
        variance = deviations[min(problem.size, deviations.shape[0]) - 1] ** 2
        return basis._replace(vectors=product(whiten, basis.vectors), variance=variance)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Differentiate the eigenvectors of W^T C_xy C_yx W."""
        size, x, y, basis = problem.size, problem.x, problem.y, solution.vectors
        slope, _, _, whiten, _ = problem.perturbed(tangent)
        rows = product(whiten.T, product(x.T, y))
        d_cross = product(tangent.x.T, y) + product(x.T, tangent.y)
        d_rows = product(whiten.T, d_cross) - 0.5 * product(
            product(whiten.T, product(slope, whiten)), rows
        )
        left, sizes, _ = jnp.linalg.svd(rows, full_matrices=rows.shape[0] > rows.shape[1])
        squares = jnp.pad(sizes, (0, left.shape[1] - sizes.shape[0])) ** 2
        d_square = product(d_rows, rows.T)
        # The solver's columns differ from these by a rotation.
        turn = product(product(left[:, :size].T, problem.pull(whiten)), basis)
        mixed = product(product(left.T, d_square + d_square.T), left)
        outside = mixing(mixed[:, :size], squares, problem.active)
        inside = product(whiten, product(whiten.T, product(slope, basis)))
        d_basis = product(whiten, product(product(left, outside), turn)) - 0.5 * inside
        return d_basis, halved(jnp.diagonal(mixed)[:size], solution.values)

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W from the leading eigenvectors of g P^T L P g, in the eigenbasis P of K."""
        if problem.solver == "krylov":
            return _reduced_krylov(problem)
        vectors, values, scale, gain, turned = problem.in_eigenbasis()
        # T = P diag(g)^2 P^T, and P^T L P does not depend on `alpha`, so that a sweep shares it.
        if problem.solver == "spectral":
            leading = find_eigenpairs(
                lambda block: gain * product(turned, gain * block),
                scale.shape[0],
                problem.size,
                dtype=problem.x.dtype,
            )
        else:
            leading = leading_of(gain * turned * gain.T, problem.size)
        return _rooted(
            leading, product(vectors, scale[:, None] * leading.vectors), values[problem.size - 1]
        )

    def kernel_jvp(
        self, problem: KernelRegression, tangent: KernelRegression, solution: Basis
    ) -> Slopes:
        """Differentiate K L K w = sigma^2 (K^2 + alpha K) w, a symmetric pencil on the range of K."""
        size, weights, alpha = problem.size, solution.vectors, problem.alpha
        vectors, _, scale, gain, turned = problem.in_eigenbasis()
        squares, turn = jnp.linalg.eigh(gain * turned * gain.T)
        squares, turn = jnp.maximum(squares[::-1], 0.0), turn[:, ::-1]
        every = product(vectors, scale[:, None] * turn)
        leading = every[:, :size] * (jnp.arange(size) < problem.active)[None]
        seen, d_seen = product(problem.x, leading), product(tangent.x, leading)
        ahead = product(problem.y, seen)
        d_left = product(tangent.x, ahead) + product(
            problem.x, product(tangent.y, seen) + product(problem.y, d_seen)
        )
        d_right = (
            product(tangent.x, seen)
            + product(problem.x, d_seen)
            + alpha * d_seen
            + tangent.alpha * seen
        )
        d_right = product(every.T, d_right)
        mixed = product(every.T, d_left) - d_right * squares[None, :size]
        outside = mixing(mixed, squares, problem.active, problem.cutoff)
        d_own = product(every, outside) - 0.5 * product(leading, d_right[:size])
        seen = product(problem.x, weights)
        rotation = product(leading.T, product(problem.x, seen) + alpha * seen)
        return product(d_own, rotation), halved(jnp.diagonal(mixed), solution.values)

    def choose_kernel_solver(
        self, gram: Float[Array, "n n"], alpha: Float[Array, ""], size: int
    ) -> str:
        """Return "krylov" if rounding allows a factor of K + alpha I, else "spectral"."""
        if super().choose_kernel_solver(gram, alpha, size) == "dense":
            return "dense"
        if is_traced(alpha) or is_traced(
            gram
        ):  # in float64 usual values of `alpha` exceed the rounding
            return "krylov" if jnp.finfo(gram.dtype).eps < 1e-12 else "spectral"
        return "krylov" if float(alpha) > _cholesky_floor(gram) else "spectral"


def _from_moments(problem: FeatureRegression) -> Basis:
    """Return U = L^(-T) Q with C_x + alpha I = L L^T and the leading left singular vectors Q of L^(-1) C_xy."""
    size, solver = problem.size, problem.solver

    def factored(square: Array, cross: Array, alpha: Array) -> Basis:
        factor = jnp.linalg.cholesky(square + alpha * jnp.eye(square.shape[0], dtype=square.dtype))
        rows = jax.scipy.linalg.solve_triangular(factor, cross, lower=True)
        found = find_left_vectors(rows, size, solver=solver)
        vectors = jax.scipy.linalg.solve_triangular(factor, found.vectors, lower=True, trans=1)
        variance = find_left_vectors(square, size, solver="randomized").values[-1]
        return found._replace(vectors=vectors, variance=variance)

    # Under a `vmap` over `alpha` all values share the eigenvectors of C_x, which replace the
    # Cholesky factor.
    def shared(square: Array, cross: Array, alpha: Array) -> Basis:
        squares, vectors = jnp.linalg.eigh(square)
        gain = lax.rsqrt(jnp.maximum(squares, 0.0) + alpha)
        found = find_left_vectors(product(vectors.T, cross), size, scale=gain, solver=solver)
        return found._replace(
            vectors=product(vectors, gain[:, None] * found.vectors), variance=squares[-size]
        )

    solved = custom_vmap(factored)

    @solved.def_vmap
    def _(_: int, batched: list[bool], *arguments: Array) -> tuple[Basis, Basis]:
        one = shared if batched == [False, False, True] else factored
        basis = jax.vmap(one, [0 if mapped else None for mapped in batched])(*arguments)
        return basis, jax.tree.map(lambda _: True, basis)

    return solved(product(problem.x.T, problem.x), product(problem.x.T, problem.y), problem.alpha)


def _rooted(leading: Basis, vectors: Array, variance: Array) -> Basis:
    """Return a basis of `vectors`, with the square roots of the leading values."""
    values, rest = (jnp.sqrt(jnp.maximum(part, 0.0)) for part in (leading.values, leading.rest))
    return Basis(vectors, values, rest, variance, leading.residual)


def _cholesky_floor(gram: Float[Array, "n n"]) -> float:
    """Return the least `alpha` at which the factor of K + alpha I has a rounding eps tr(K) / alpha below 1 %."""
    return 100 * float(jnp.finfo(gram.dtype).eps) * float(jnp.trace(gram))


def refuse_singular(
    estimator: Estimator,
    problem: FeatureRegression | KernelRegression,
    values: np.ndarray,
    cutoff: float,
    *what: str,
) -> None:
    """Raise if `alpha` is zero and the data lack directions that the estimator inverts.

    `values`: Singular values of the features or eigenvalues of K, [k]. `what`: Name and symbol of
    the matrix.
    """
    width = problem.x.shape[1]
    needed, rank = (
        width if estimator.inverts_all else problem.size,
        int((values > cutoff * values[0]).sum()),
    )
    if rank < needed:
        raise ValueError(
            f"`alpha` must be positive where {what[0]} is singular: {type(estimator).__name__} "
            f"needs rank {needed}, "
            f"{what[1]} has rank {rank} of {width}. Pass alpha > 0, drop dependent features or "
            "samples, or lower the "
            "rank."
        )


def check_factor(problem: KernelRegression, basis: Basis) -> None:
    """Raise if the Cholesky factor of K + alpha I is not finite."""
    if not np.isfinite(np.asarray(basis.values)[0]):
        raise ValueError(
            f"`alpha` must make K + alpha I positive definite in {problem.x.dtype}, got "
            f"{float(problem.alpha):.3g}. "
            f"Raise it above {_cholesky_floor(problem.x):.1g}, use solver='dense', or enable x64."
        )


def _reduced_krylov(problem: KernelRegression) -> Basis:
    gram_x, alpha, number = problem.x, problem.alpha, problem.x.shape[0]
    # c = (K + alpha I)^(-1) v with the leading eigenvectors L T v = sigma^2 v, T = K (K + alpha
    # I)^(-1), v^T T v = 1.
    factor = jnp.linalg.cholesky(gram_x + alpha * jnp.eye(number, dtype=gram_x.dtype))

    def solve(block: Array) -> Array:
        return jax.scipy.linalg.cho_solve((factor, True), block)

    def shrink(block: Array) -> Array:
        return block - alpha * solve(block)  # T

    leading = find_eigenpairs(
        partial(product, problem.y), number, problem.size, dtype=gram_x.dtype, inner=shrink
    )
    return _rooted(leading, solve(leading.vectors), jnp.trace(gram_x) / problem.size)
