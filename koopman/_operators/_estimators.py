"""Estimators G = U U^T C_xy of an evolution operator, with different spans of U.

U^T (C_x + alpha I) U = I, C_x = X^T X / n and C_xy = X^T Y / n, not centred by default.
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

from dissociation._core.checks import check_choice, check_count, check_non_negative, is_traced
from dissociation._core.linalg import product
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from koopman._operators._numerics import rounding_unit
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
    truncated,
)

Slopes = tuple[Array, Array]
"""Derivatives of the vectors and of the values of a `Basis`."""


class Estimator(eqx.Module):
    """Base class of the estimators.

    Fields of a subclass are static: programs are compiled per estimator.
    """

    alpha: Scalar | None  # in units of C_x; None for `koopman._operators._pairs.default_alpha`
    # Static number of latent functions; None for all, "auto" for the choice of `fit_model`.
    size: int | str | None = eqx.field(static=True)
    masked: Array | None  # traced number of latent functions
    solver: str | None = eqx.field(static=True)  # None: `feature_solver`; "auto" with a kernel
    feature_solver: ClassVar[str] = "dense"
    kernel_solvers: ClassVar[tuple[str, ...]] = ("auto", "dense", "krylov")
    inverts_all: ClassVar[bool] = False  # True if C_x is inverted in all directions

    def __init__(self, rank: Rank | str | None, alpha: Scalar | None, solver: str | None):
        if alpha is not None:
            check_non_negative("alpha", alpha)
        self.alpha = alpha
        self.size = None
        self.masked = None
        self.solver = solver
        if isinstance(rank, str):
            check_choice("rank", rank, ("auto",))
            self.size = rank
        elif is_traced(rank):
            self.masked = jnp.asarray(rank)
        elif rank is not None:
            self.size = check_count("rank", rank, minimum=1)

    def __check_init__(self):
        fields = dataclasses.fields(self)
        arrays = {field.name for field in fields if not field.metadata.get("static")}
        arrays = arrays - {"alpha", "masked"}
        if arrays:
            raise TypeError(
                "Fields of an estimator must be static, `eqx.field(static=True)`, got "
                f"{sorted(arrays)}."
            )

    def threshold(self, problem: FeatureRegression) -> Array:
        """Return the relative size below which a singular value counts as zero."""
        return problem.threshold()

    @property
    def rank(self) -> int | str | Array | None:
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
        """Return the derivatives of vectors and values along a `tangent` that keeps K's rank."""

    def choose_kernel_solver(
        self, gram: Float[Array, "n n"], alpha: Float[Array, ""], size: int
    ) -> str:
        """Return the solver for "auto": an iterative one for a few directions of many samples."""
        num_samples = gram.shape[0]
        is_dense = num_samples <= 1000 or size > num_samples // 16
        return "dense" if is_dense else "krylov"


# Derivatives leave out rotations among the columns of U, so that they exist if singular values
# coincide.
@partial(jax.custom_jvp, nondiff_argnums=(0,))
def span(estimator: Estimator, problem: FeatureRegression | KernelRegression) -> Basis:
    """Return the basis of the latent functions.

    Functions of U U^T are differentiable in the data and in alpha.
    """
    is_explicit = isinstance(problem, FeatureRegression)
    basis = estimator.features(problem) if is_explicit else estimator.kernel(problem)
    num_missing = problem.size - basis.values.shape[0]  # fewer samples than the rank
    is_used = jnp.arange(problem.size) < problem.active
    vectors = jnp.pad(basis.vectors, ((0, 0), (0, num_missing))) * is_used[None]
    values = jnp.pad(basis.values, (0, num_missing)) * is_used
    return basis._replace(vectors=vectors, values=values)


@span.defjvp
def _span_jvp(estimator, primals, tangents):
    (problem,) = primals
    (tangent,) = tangents
    basis = span(estimator, problem)
    rule = estimator.kernel_jvp
    if isinstance(problem, FeatureRegression):
        rule = estimator.features_jvp
    d_vectors, d_values = rule(problem, tangent, basis)
    zeros = jax.tree.map(jnp.zeros_like, basis)
    return basis, zeros._replace(vectors=d_vectors, values=d_values)


class _Principal:
    """Mixin with a kernel's solution along principal directions.

    c = P Lambda^(-1/2) (Lambda + alpha)^(-1/2)
    """

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W = V F^(1/2) with the leading eigenvectors V of K.

        F = lambda^-1 (lambda + alpha)^-1
        """
        size = problem.size
        gram = problem.x
        if problem.solver == "krylov":
            leading = find_eigenpairs(partial(product, gram), len(gram), size, dtype=gram.dtype)
        else:
            leading = leading_of(gram, size)
        scale, _ = problem.scale(leading.values)
        return _rooted(leading, leading.vectors * scale[None], leading.values[-1])

    def kernel_jvp(
        self, problem: KernelRegression, tangent: KernelRegression, solution: Basis
    ) -> Slopes:
        """Differentiate F, a matrix function of K and alpha."""
        size = problem.size
        alpha = problem.alpha
        squares, vectors = eigenpairs(problem.x)
        scale, is_kept = problem.scale(squares)
        num_active = jnp.minimum(problem.active, jnp.sum(is_kept))
        is_active = jnp.arange(size) < num_active
        scale = scale[:size] * is_active
        leading_squares = squares[:size]
        leading_vectors = vectors[:, :size]

        mixed = product(vectors.T, product(tangent.x, leading_vectors))
        outside = mixing(mixed, squares, num_active) * scale[None]
        sums = leading_squares[:, None] + leading_squares[None] + alpha
        inside = -0.5 * sums * scale[:, None] ** 2 * scale[None] * mixed[:size]
        regularised = jnp.where(is_active, leading_squares, 1.0) + alpha
        inside = inside - jnp.diag(0.5 * tangent.alpha * scale / regularised)
        d_vectors = product(vectors, outside) + product(leading_vectors, inside)

        # If eigenvalues coincide, the solver's columns differ from these by a rotation.
        pull = scale * leading_squares * (leading_squares + alpha)
        turn = pull[:, None] * product(leading_vectors.T, solution.vectors)
        return product(d_vectors, turn), halved(jnp.diagonal(mixed), solution.values)


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
        variance = jnp.sum(deviations**2) / problem.x.shape[1]
        basis = truncated(whiten, deviations, problem.size)
        return basis._replace(variance=variance)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Return -(C_x + alpha I)^(-1) d(C_x + alpha I) U / 2."""
        slope, _, right_vectors, whiten, _ = problem.perturbed(tangent)
        mixed = product(product(right_vectors, slope), right_vectors.T)
        d_squares = jnp.diagonal(mixed)[: problem.size] - tangent.alpha
        slope_of_basis = product(whiten.T, product(slope, solution.vectors))
        return -0.5 * product(whiten, slope_of_basis), halved(d_squares, solution.values)

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W, of all directions."""
        basis = super().kernel(problem)
        return basis._replace(variance=jnp.trace(problem.x))


class PrincipalComponents(_Principal, Estimator):
    """Principal component regression: ridge regression on the leading `rank` eigenvectors of C_x.

    It is (extended) dynamic mode decomposition, or with a kernel and alpha = 0 its kernel version.

    Attributes:
        rank: Number of directions, from 1 to d (with a kernel, n). If it is traced, as in a
            `jax.vmap` over ranks, shapes are those of the highest rank and latent functions beyond
            `rank` are zero. With "auto" `fit_model` takes the number of singular values above the
            hard threshold of noise.
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
    def __init__(self, rank: Rank | str, alpha: Scalar | None = None, *, solver: str | None = None):
        super().__init__(rank, alpha, solver)

    def features(self, problem: FeatureRegression) -> Basis:
        """Return U = W, of the leading directions."""
        if problem.solver == "dense":
            whiten, deviations = problem.by_route(FeatureRegression.axes)
            basis = truncated(whiten, deviations, problem.size)
        else:
            basis = problem.by_route(FeatureRegression.leading)
        return basis._replace(variance=basis.values[-1] ** 2)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Differentiate U = V G^(-1/2) with the leading directions V, G = V^T (C_x + alpha I) V."""
        size = problem.size
        basis = solution.vectors
        slope, squares, right_vectors, whiten, scale = problem.perturbed(tangent)
        mixed = product(product(right_vectors, slope), right_vectors.T)
        is_nonzero = jnp.any(basis != 0, 0)  # False for columns that are cut off
        is_used = (jnp.arange(size) < problem.active) & is_nonzero
        scale = scale[:size] * is_used
        whiten = whiten[:, :size] * is_used[None]

        outside = mixing(mixed[:, :size], squares, jnp.sum(is_used))
        inside = -0.5 * scale[:, None] * mixed[:size, :size] * scale[None]
        d_vectors = product(right_vectors.T, outside * scale[None]) + product(whiten, inside)
        d_squares = jnp.diagonal(mixed)[:size] - tangent.alpha
        # The fit's columns differ from these by a rotation.
        turn = product(problem.pull(whiten), basis)
        return product(d_vectors, turn), halved(d_squares, solution.values)


class ReducedRank(Estimator):
    """Reduced rank regression: minimiser of the regularised risk at rank at most `rank`.

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
    def __init__(self, rank: Rank | str, alpha: Scalar | None = None, *, solver: str | None = None):
        super().__init__(rank, alpha, solver)

    def features(self, problem: FeatureRegression) -> Basis:
        """Return U = W Q with W^T (C_x + alpha I) W = I.

        Columns of Q are the leading left singular vectors of W^T C_xy.
        """
        if not self._factors_moments(problem):
            return problem.by_route(self._whitened)
        route = "qr" if problem.route == "auto" else problem.route
        # A factor of C_x + alpha I cuts no direction off, so that `alpha` counts.
        return problem.either(
            _from_moments, lambda task: self._whitened(task.via(route)), problem.alpha
        )

    def threshold(self, problem: FeatureRegression) -> Array:
        """Return the relative size below which a singular value counts as zero."""
        return problem.threshold(problem.alpha if self._factors_moments(problem) else 0.0)

    def _factors_moments(self, problem: FeatureRegression) -> bool:
        """Return True if a factor of C_x + alpha I may replace that of the features."""
        solver = chosen_solver(problem.solver, problem.x.shape[1], problem.y.shape[1], problem.size)
        return problem.route != "qr" and solver != "dense"

    def _whitened(self, problem: FeatureRegression) -> Basis:
        size = problem.size
        whiten, deviations, gain, turned = problem.whitening(crossed=True)
        rows = turned(problem.y)
        num_vectors = min(size, *rows.shape)
        basis = find_left_vectors(rows, num_vectors, scale=gain, solver=problem.solver)
        vectors = product(whiten, basis.vectors)
        last = min(size, deviations.shape[0]) - 1
        return basis._replace(vectors=vectors, variance=deviations[last] ** 2)

    def features_jvp(
        self, problem: FeatureRegression, tangent: FeatureRegression, solution: Basis
    ) -> Slopes:
        """Differentiate the eigenvectors of W^T C_xy C_yx W."""
        size = problem.size
        x = problem.x
        y = problem.y
        slope, _, _, whiten, _ = problem.perturbed(tangent)
        rows = product(whiten.T, product(x.T, y))
        d_cross = product(tangent.x.T, y) + product(x.T, tangent.y)
        whitened_slope = product(whiten.T, product(slope, whiten))
        d_rows = product(whiten.T, d_cross) - 0.5 * product(whitened_slope, rows)

        is_tall = rows.shape[0] > rows.shape[1]
        left_vectors, sizes, _ = jnp.linalg.svd(rows, full_matrices=is_tall)
        squares = jnp.pad(sizes, (0, left_vectors.shape[1] - sizes.shape[0])) ** 2
        d_square = product(d_rows, rows.T)
        d_square = d_square + d_square.T
        mixed = product(product(left_vectors.T, d_square), left_vectors)
        outside = mixing(mixed[:, :size], squares, problem.active)
        d_vectors = product(left_vectors, outside)

        # The solver's columns differ from these by a rotation.
        pull = product(left_vectors[:, :size].T, problem.pull(whiten))
        turn = product(pull, solution.vectors)
        slope_of_basis = product(whiten.T, product(slope, solution.vectors))
        inside = product(whiten, slope_of_basis)
        d_basis = product(whiten, product(d_vectors, turn)) - 0.5 * inside
        return d_basis, halved(jnp.diagonal(mixed)[:size], solution.values)

    def kernel(self, problem: KernelRegression) -> Basis:
        """Return W from the leading eigenvectors of g P^T L P g, in the eigenbasis P of K."""
        if problem.solver == "krylov":
            return _reduced_krylov(problem)
        size = problem.size
        vectors, values, scale, gain, turned = problem.in_eigenbasis()

        def apply(block: Array) -> Array:
            return gain * product(turned, gain * block)

        # T = P diag(g)^2 P^T, and P^T L P does not depend on `alpha`, so that a sweep shares it.
        if problem.solver == "spectral":
            leading = find_eigenpairs(apply, scale.shape[0], size, dtype=problem.x.dtype)
        else:
            leading = leading_of(gain * turned * gain.T, size)
        weights = product(vectors, scale[:, None] * leading.vectors)
        return _rooted(leading, weights, values[size - 1])

    def kernel_jvp(
        self, problem: KernelRegression, tangent: KernelRegression, solution: Basis
    ) -> Slopes:
        """Differentiate K L K w = sigma^2 (K^2 + alpha K) w, a pencil on the range of K."""
        size = problem.size
        alpha = problem.alpha
        gram_x = problem.x
        vectors, _, scale, gain, turned = problem.in_eigenbasis()
        squares, turn = jnp.linalg.eigh(gain * turned * gain.T)
        squares = jnp.maximum(squares[::-1], 0.0)
        turn = turn[:, ::-1]
        weights = product(vectors, scale[:, None] * turn)
        is_active = jnp.arange(size) < problem.active
        leading = weights[:, :size] * is_active[None]

        images = product(gram_x, leading)
        ahead = product(problem.y, images)
        d_images = product(tangent.x, leading)
        d_ahead = product(tangent.y, images) + product(problem.y, d_images)
        d_left = product(tangent.x, ahead) + product(gram_x, d_ahead)
        d_right = product(tangent.x, images) + product(gram_x, d_images)
        d_right = d_right + alpha * d_images + tangent.alpha * images
        d_right = product(weights.T, d_right)
        mixed = product(weights.T, d_left) - d_right * squares[None, :size]
        outside = mixing(mixed, squares, problem.active, problem.cutoff)
        d_weights = product(weights, outside) - 0.5 * product(leading, d_right[:size])

        # The solver's columns differ from these by a rotation.
        images = product(gram_x, solution.vectors)
        images = product(gram_x, images) + alpha * images
        rotation = product(leading.T, images)
        return product(d_weights, rotation), halved(jnp.diagonal(mixed), solution.values)

    def choose_kernel_solver(
        self, gram: Float[Array, "n n"], alpha: Float[Array, ""], size: int
    ) -> str:
        """Return "krylov" if rounding allows a factor of K + alpha I, else "spectral"."""
        if super().choose_kernel_solver(gram, alpha, size) == "dense":
            return "dense"
        if is_traced(alpha) or is_traced(gram):
            # In float64 usual values of `alpha` exceed the rounding.
            has_factor = rounding_unit(gram) < 1e-12
        else:
            has_factor = float(alpha) > _cholesky_floor(gram)
        return "krylov" if has_factor else "spectral"


def _from_moments(problem: FeatureRegression) -> Basis:
    """Return U = L^(-T) Q with C_x + alpha I = L L^T.

    Columns of Q are the leading left singular vectors of L^(-1) C_xy.
    """
    size = problem.size
    solver = problem.solver

    def factored(square: Array, cross: Array, alpha: Array) -> Basis:
        ridge = alpha * jnp.eye(square.shape[0], dtype=square.dtype)
        factor = jnp.linalg.cholesky(square + ridge)
        rows = jax.scipy.linalg.solve_triangular(factor, cross, lower=True)
        basis = find_left_vectors(rows, size, solver=solver)
        vectors = jax.scipy.linalg.solve_triangular(factor, basis.vectors, lower=True, trans=1)
        variance = find_left_vectors(square, size, solver="randomized").values[-1]
        return basis._replace(vectors=vectors, variance=variance)

    # Under a `vmap` over `alpha` all values share the eigenvectors of C_x, which replace the
    # Cholesky factor.
    def shared(square: Array, cross: Array, alpha: Array) -> Basis:
        squares, vectors = jnp.linalg.eigh(square)
        gain = lax.rsqrt(jnp.maximum(squares, 0.0) + alpha)
        rows = product(vectors.T, cross)
        basis = find_left_vectors(rows, size, scale=gain, solver=solver)
        vectors = product(vectors, gain[:, None] * basis.vectors)
        return basis._replace(vectors=vectors, variance=squares[-size])

    solve = custom_vmap(factored)

    @solve.def_vmap
    def _(_: int, batched: list[bool], *arguments: Array) -> tuple[Basis, Basis]:
        solve_member = shared if batched == [False, False, True] else factored
        axes = [0 if is_mapped else None for is_mapped in batched]
        basis = jax.vmap(solve_member, axes)(*arguments)
        return basis, jax.tree.map(lambda _: True, basis)

    cross = product(problem.x.T, problem.y)
    return solve(problem.second_moment, cross, problem.alpha)


def _rooted(leading: Basis, vectors: Array, variance: Array) -> Basis:
    """Return a basis of `vectors`, with the square roots of the leading values."""
    values = jnp.sqrt(jnp.maximum(leading.values, 0.0))
    trailing_values = jnp.sqrt(jnp.maximum(leading.trailing_values, 0.0))
    return Basis(vectors, values, trailing_values, variance, leading.residual)


def _cholesky_floor(gram: Float[Array, "n n"]) -> float:
    """Return the smallest `alpha` at which the factor of K + alpha I is accurate.

    The rounding eps tr(K) / alpha of the factor is then below 1 %.
    """
    return 100 * rounding_unit(gram) * float(jnp.trace(gram))


def refuse_singular(
    estimator: Estimator,
    problem: FeatureRegression | KernelRegression,
    values: np.ndarray,
    cutoff: float,
    name: str,
    symbol: str,
) -> None:
    """Raise if `alpha` is zero and the data lack directions that the estimator inverts.

    `values`: Singular values of the features or eigenvalues of K, [k]. `name` and `symbol` are
    those of the matrix.
    """
    width = problem.x.shape[1]
    needed = width if estimator.inverts_all else problem.size
    rank = int((values > cutoff * values[0]).sum())
    if rank < needed:
        raise ValueError(
            f"`alpha` must be positive where {name} is singular: {type(estimator).__name__} "
            f"needs rank {needed}, "
            f"{symbol} has rank {rank} of {width}. Pass alpha > 0, drop dependent features or "
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
    gram_x = problem.x
    alpha = problem.alpha
    num_samples = gram_x.shape[0]
    # c = (K + alpha I)^(-1) v with the leading eigenvectors L T v = sigma^2 v, T = K (K + alpha
    # I)^(-1), v^T T v = 1.
    ridge = alpha * jnp.eye(num_samples, dtype=gram_x.dtype)
    factor = jnp.linalg.cholesky(gram_x + ridge)

    def solve(block: Array) -> Array:
        return jax.scipy.linalg.cho_solve((factor, True), block)

    def shrink(block: Array) -> Array:
        return block - alpha * solve(block)  # T

    apply = partial(product, problem.y)
    leading = find_eigenpairs(apply, num_samples, problem.size, dtype=gram_x.dtype, inner=shrink)
    variance = jnp.trace(gram_x) / problem.size
    return _rooted(leading, solve(leading.vectors), variance)
