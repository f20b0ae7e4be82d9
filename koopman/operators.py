"""Ridge, principal component and reduced-rank regression of an evolution operator on explicit features.

With C_x = X^T X / n and C_xy = X^T Y / n (divided by n, not centred unless asked), every estimator is
G = U U^T C_xy with U^T (C_x + alpha I) U = I; the three differ in the span of U:

- ridge: everything, G = (C_x + alpha I)^(-1) C_xy;
- principal components: the leading eigenvectors of C_x (kernel and classical dynamic mode decomposition);
- reduced rank: the leading left singular vectors of (C_x + alpha I)^(-1/2) C_xy, which minimise the regularised risk.

Covariances enter as the QR factor of the data, so float32 does not square the condition number. One decomposition
serves all values of `alpha` under `jax.vmap`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation.checks import check_choice, check_count, check_non_negative, fail, is_traced
from dissociation.linalg import product
from koopman.fitted import LinearMap, Operator
from koopman.pairs import Moments, checked_pairs, gram_root
from koopman.solvers import SOLVERS, leading_left_vectors

Scalar = float | int | Float[Array | np.ndarray, ""]
Rank = int | Int[Array | np.ndarray, ""]
Data = Float[Array | np.ndarray, "n d"] | Moments


def fit_ridge(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    route: str = "qr",
    rtol: float | None = None,
) -> Operator:
    r"""Ridge regression: G = (C_x + alpha I)^{-1} C_xy.

    Args:
        x: Features of the states [n, d], or `Moments`.
        y: Features of their successors, one lag later; see `lagged_pairs`. None if `x` are moments.
        alpha: Tikhonov regularisation, non-negative, in the units of C_x. Traced: a sweep by `jax.vmap` decomposes the
            data once.
        observable: What forecasts return, at the successors' times: [n, ...]. Default: the features themselves.
        center: Whether features and observable are taken about their means. It removes the constant function, whose
            eigenvalue is 1; the drift between the means of x and y is neglected, as in a stationary process.
        route: "qr" takes the QR factor of the data; "covariance" the eigenvectors of C_x, in about half the time for
            5000 MNIST digits of 784 pixels (0.31 against 0.58 s in float64 on two cores), but C_x squares the condition
            number: in float32 directions of x below 3e-4 of the largest are lost, and an `alpha` below 1e-7 of C_x's
            largest eigenvalue means nothing. Use it with x64.
        rtol: Relative size below which a singular value of the data counts as zero; default d times rounding ("qr"),
            or the square root of rounding ("covariance").

    Returns:
        The fitted operator, of rank d.

    Raises:
        ValueError: If shapes disagree, there are fewer than two pairs, known data are not finite (the error names the
            row), `alpha` is negative, or it is zero and C_x is singular (the error names its rank).
        TypeError: If data are not floating point.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS, eq. 7.
    """
    return _fit("ridge", x, y, None, alpha, observable, center, "dense", route, rtol)


def fit_pcr(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    rank: Rank,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    route: str = "qr",
    rtol: float | None = None,
) -> Operator:
    """Principal component regression: ridge regression on the leading `rank` principal directions of x.

    Args:
        x: Features of the states [n, d], or `Moments`.
        y: Features of their successors.
        rank: Directions kept, from 1 to d. If it is traced, all shapes are those of rank d and latent functions
            beyond `rank` are zero, so that ranks too can be swept by `jax.vmap`.
        alpha: Tikhonov regularisation, as in `fit_ridge`.
        observable: What forecasts return.
        center: Whether features and observable are taken about their means.
        route: "qr" or "covariance", as in `fit_ridge`.
        rtol: Relative size below which a singular value of the data counts as zero.

    Returns:
        The fitted operator.

    Raises:
        ValueError: As `fit_ridge`, or if `rank` is above the number of features.
        TypeError: As `fit_ridge`.

    References:
        Kostic et al. (2022), eq. 8.
    """
    return _fit("pcr", x, y, rank, alpha, observable, center, "dense", route, rtol)


def fit_reduced_rank(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    rank: Rank,
    alpha: Scalar = 1e-6,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    solver: str = "auto",
    route: str = "qr",
    rtol: float | None = None,
) -> Operator:
    """Reduced rank regression: the minimiser of the regularised risk among operators of rank at most `rank`.

    Args:
        x: Features of the states [n, d], or `Moments`.
        y: Features of their successors.
        rank: Rank, from 1 to d; may be traced, as in `fit_pcr`, with the dense solver.
        alpha: Tikhonov regularisation, as in `fit_ridge`.
        observable: What forecasts return.
        center: Whether features and observable are taken about their means.
        solver: "auto", "dense", "krylov" or "randomized", see `leading_left_vectors`.
        route: "qr" or "covariance", as in `fit_ridge`.
        rtol: Relative size below which a singular value of the data counts as zero.

    Returns:
        The fitted operator.

    Raises:
        ValueError: As `fit_pcr`, or if the solver is unknown.
        TypeError: As `fit_ridge`.

    References:
        Kostic et al. (2022), eq. 9.

    >>> cycle = np.eye(3, dtype=np.float32)[np.arange(12) % 3]
    >>> operator = fit_reduced_rank(cycle[:-1], cycle[1:], rank=3, alpha=0.0)
    >>> jnp.abs(jnp.linalg.eigvals(operator.core)).round(4)
    Array([1., 1., 1.], dtype=float32)
    """
    return _fit("reduced_rank", x, y, rank, alpha, observable, center, solver, route, rtol)


class _Problem(NamedTuple):
    """Rows whose products are the moments: data divided by sqrt(n), or the factor of their moments."""

    x: Array  # [m, d], x^T x = C_x
    y: Array  # [m, d], x^T y = C_xy
    observable: Array  # [m, o]
    offset: Array  # [d]
    mean_observable: Array  # [o]


def _fit(
    kind: str,
    x: Array | np.ndarray | Moments,
    y: Array | np.ndarray | None,
    rank: Rank | None,
    alpha: Scalar,
    observable: Array | np.ndarray | None,
    center: bool,
    solver: str,
    route: str,
    rtol: float | None,
) -> Operator:
    check_choice("solver", solver, SOLVERS)
    check_choice("route", route, ("qr", "covariance"))
    check_non_negative("alpha", alpha)
    if isinstance(x, Moments):
        if y is not None or observable is not None or center:
            fail("x", "stand alone when it is `Moments`: they hold successors, observable and means", "more arguments")
        problem, shape = _from_moments(x), x.mean_observable.shape
    else:
        if y is None:
            fail("y", "be given with `x`", "None", "See koopman.pairs.lagged_pairs")
        problem, shape = _from_pairs(x, y, observable, center)
    width, dtype = problem.x.shape[1], problem.x.dtype
    size, active = _sizes(rank, width)
    if active is not None and solver not in ("auto", "dense"):
        fail("solver", "be 'dense' for a traced `rank`", repr(solver))
    rounding = width * float(jnp.finfo(dtype).eps)
    cutoff = rtol if rtol is not None else rounding if route == "qr" else float(jnp.finfo(dtype).eps) ** 0.5
    if not is_traced(alpha) and not is_traced(problem.x) and float(alpha) == 0.0:
        _check_regular(problem.x, cutoff, size if kind == "pcr" else width, kind)
    solver = "dense" if active is not None else solver
    alpha = jnp.asarray(alpha, dtype)
    basis, values = _basis(_Method(kind, size, solver, route, cutoff), problem.x, problem.y, alpha)
    if active is not None:
        kept = jnp.arange(size) < active
        basis, values = basis * kept[None], values * kept
    return _assemble(problem, basis, values, alpha, tuple(shape), cutoff)


def _from_pairs(
    x: Array | np.ndarray, y: Array | np.ndarray, observable: Array | np.ndarray | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    x, y, flat, shape = checked_pairs(x, y, observable, "features")
    offset, mean = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros(flat.shape[1:], x.dtype)
    if center:
        offset, mean = jnp.mean(x, 0), jnp.mean(flat, 0)
        x, y, flat = x - offset[None], y - offset[None], flat - mean[None]
    scale = x.shape[0] ** -0.5
    return _Problem(x * scale, y * scale, flat * scale, offset, mean), shape


def _from_moments(seen: Moments) -> _Problem:
    offset, mean = jnp.zeros_like(seen.mean_x), jnp.zeros_like(seen.mean_observable)
    width, width_y, _ = seen.widths
    if width_y != width:
        fail("x", f"hold moments of as many features of the successors as of the states ({width})", width_y)
    rows = seen.root * jax.lax.rsqrt(seen.count)
    if seen.center:
        # Successors are about their own mean there, and about that of x here: one row more is the step between.
        offset, mean = seen.mean_x, seen.mean_observable
        step = jnp.concatenate([jnp.zeros_like(offset), seen.mean_y - offset, jnp.zeros_like(mean)])
        rows = jnp.concatenate([rows, step[None]])
    x, y, observable = jnp.split(rows, [width, width + width_y], 1)
    return _Problem(x, y, observable, offset, mean)


def _sizes(rank: Rank | None, width: int) -> tuple[int, Array | None]:
    """The static number of latent functions, and the traced number of those in use."""
    if rank is None:
        return width, None
    if is_traced(rank):
        return width, jnp.asarray(rank)
    size = check_count("rank", rank.item() if isinstance(rank, jax.Array) else rank, minimum=1)
    if size > width:
        fail("rank", f"be at most the number of features ({width})", rank)
    return size, None


def _check_regular(x: Array, cutoff: float, needed: int, kind: str) -> None:
    values = np.linalg.svd(np.asarray(gram_root(x)), compute_uv=False)
    found = int((values > cutoff * values[0]).sum())
    if found < needed:
        raise ValueError(
            f"`alpha` must be positive where the covariance of `x` is singular: {kind} needs rank {needed}, C_x has "
            f"rank {found} of {x.shape[1]}. Pass alpha > 0, drop dependent features, or lower the rank."
        )


class _Method(NamedTuple):
    """The static choices of a fit."""

    kind: str
    size: int
    solver: str
    route: str
    cutoff: float


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _basis(method: _Method, x: Array, y: Array, alpha: Array) -> tuple[Array, Array]:
    """U [d, size] and the estimator's singular values, from rows with x^T x = C_x and x^T y = C_xy."""
    whiten, values, gain, turned = _whitening(method, x, alpha)
    if method.kind == "reduced_rank":
        rows = turned(y)
        number = min(method.size, *rows.shape)
        vectors, values = leading_left_vectors(rows, number, scale=gain, solver=method.solver)
        whiten = product(whiten, vectors)
    else:
        whiten, values = whiten[:, : method.size], values[: method.size]
    missing = method.size - values.shape[0]  # fewer samples than the rank asked for
    return jnp.pad(whiten, ((0, 0), (0, missing))), jnp.pad(values, (0, missing))


def _whitening(method: _Method, x: Array, alpha: Array) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
    """W [d, k], W^T (C_x + alpha I) W = I on the range of C_x; falling deviations [k]; g [k] and f, W^T x^T y = g f(y).

    `alpha` is in g alone, so that all values of a sweep share f(y).
    """
    if method.route == "covariance":
        squares, vectors = jnp.linalg.eigh(product(x.T, x))
        values, right = jnp.sqrt(jnp.maximum(squares, 0.0))[::-1], vectors.T[::-1]
        whiten, scale = _scaled(method, values, right, alpha)
        return whiten, values, scale, lambda y: product(right, product(x.T, y))
    tall = x.shape[0] > x.shape[1]
    if tall and method.kind != "reduced_rank":  # which does without Q
        orthogonal, root = None, gram_root(x)
    else:
        orthogonal, root = jnp.linalg.qr(x) if tall else (None, x)
    left, values, right = jnp.linalg.svd(root, full_matrices=False)
    whiten, scale = _scaled(method, values, right, alpha)

    def turned(y: Array) -> Array:
        # Through Q: W^T (x^T y) would multiply the rounding of x^T y by W.
        return product(left.T, y if orthogonal is None else product(orthogonal.T, y))

    return whiten, values, values * scale, turned


def _scaled(method: _Method, values: Array, right: Array, alpha: Array) -> tuple[Array, Array]:
    kept = values > method.cutoff * values[0]
    scale = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values**2 + alpha, 1.0)), 0.0)
    return right.T * scale[None], scale


@_basis.defjvp
def _basis_jvp(method, primals, tangents):
    """By perturbation theory of the covariances, with no rotation among the columns of U: they span, and no more.

    Whatever is computed from U U^T has this derivative, also where singular values coincide within the span.
    """
    kind, size = method.kind, method.size
    (x, y, alpha), (d_x, d_y, d_alpha) = primals, tangents
    basis, values = _basis(method, x, y, alpha)
    half = product(x.T, d_x)
    d_cov = half + half.T + d_alpha * jnp.eye(x.shape[1], dtype=x.dtype)
    squares, vectors = jnp.linalg.eigh(product(x.T, x))
    squares, right = jnp.maximum(squares, 0.0)[::-1], vectors.T[::-1]
    whiten, scale = _scaled(method, jnp.sqrt(squares), right, alpha)

    def inverse(block: Array) -> Array:
        return product(whiten, product(whiten.T, block))

    if kind == "ridge":
        return (basis, values), (-0.5 * inverse(product(d_cov, basis)), jnp.zeros_like(values))
    if kind == "pcr":
        # U = V G^(-1/2) with V the leading directions, G = V^T (C_x + alpha) V.
        mixed = product(product(right, d_cov), right.T)
        outside = _divided(mixed[size:, :size], squares[None, :size] - squares[size:, None])
        scale = scale[:size]
        inside = -0.5 * scale[:, None] * mixed[:size, :size] * scale[None]
        own = whiten[:, :size]
        d_own = product(right[size:].T, outside * scale[None]) + product(own, inside)
        d_basis = product(d_own, product(_pull(own, x, alpha), basis))  # in the fit's own columns
        return (basis, values), (d_basis, jnp.zeros_like(values))
    rows = product(whiten.T, product(x.T, y))
    d_cross = product(d_x.T, y) + product(x.T, d_y)
    d_rows = product(whiten.T, d_cross) - 0.5 * product(product(whiten.T, product(d_cov, whiten)), rows)
    left, sizes, _ = jnp.linalg.svd(rows, full_matrices=rows.shape[0] > rows.shape[1])
    squares = jnp.pad(sizes, (0, left.shape[1] - sizes.shape[0])) ** 2
    d_square = product(d_rows, rows.T)
    # The solver's own columns of U, and not the decomposition's: the two differ by a rotation.
    turn = product(product(left[:, :size].T, _pull(whiten, x, alpha)), basis)
    mixed = product(product(left.T, d_square + d_square.T), left)
    outside = _divided(mixed[size:, :size], squares[None, :size] - squares[size:, None])
    d_basis = product(whiten, product(product(left[:, size:], outside), turn)) - 0.5 * inverse(product(d_cov, basis))
    slopes = 0.5 * jnp.diagonal(mixed)[:size] / jnp.where(values > 0, values, 1.0)
    return (basis, values), (d_basis, jnp.where(values > 0, slopes, 0.0))


def _pull(whiten: Array, x: Array, alpha: Array) -> Array:
    """W^T (C_x + alpha I): takes U = W E back to E."""
    return product(product(whiten.T, x.T), x) + alpha * whiten.T


def _divided(numerator: Array, gap: Array) -> Array:
    safe = jnp.where(gap == 0, 1.0, gap)
    return jnp.where(gap == 0, 0.0, numerator / safe)


def _assemble(
    problem: _Problem, basis: Array, values: Array, alpha: Array, shape: tuple[int, ...], cutoff: float
) -> Operator:
    latent_x, latent_y = product(problem.x, basis), product(problem.y, basis)
    dual = product(problem.y.T, latent_x)
    return Operator(
        encode=LinearMap(problem.offset, basis),
        dual=LinearMap(problem.offset, dual),
        core=product(latent_x.T, latent_y),
        readout=product(latent_x.T, problem.observable),
        mean_observable=problem.mean_observable,
        gram_x=product(latent_x.T, latent_x),
        gram_y=product(latent_y.T, latent_y),
        dual_gram=product(dual.T, dual),
        basis_gram=product(basis.T, basis),
        singular_values=values,
        alpha=alpha,
        effective_rank=jnp.sum(values > cutoff * jnp.max(values)),
        observable_shape=shape,
    )
