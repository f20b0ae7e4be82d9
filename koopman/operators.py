"""Ridge, principal component and reduced-rank regression of an evolution operator on explicit features.

With C_x = X^T X / n and C_xy = X^T Y / n (divided by n, not centred unless asked), every estimator is
G = U U^T C_xy with U^T (C_x + alpha I) U = I; the three differ in the span of U:

- ridge: everything, G = (C_x + alpha I)^(-1) C_xy;
- principal components: the leading eigenvectors of C_x (kernel and classical dynamic mode decomposition);
- reduced rank: the leading left singular vectors of (C_x + alpha I)^(-1/2) C_xy, which minimise the regularised risk.

Covariances enter as the QR factor of the data, so float32 does not square the condition number. One decomposition
serves all values of `alpha` under `jax.vmap`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation.checks import check_choice, check_non_negative, fail, is_traced
from dissociation.linalg import product
from dissociation.types import Scalar
from dissociation.validation import validated
from koopman.diagnostics import warn_inexact, warn_large_alpha, warn_offset, warn_tied
from koopman.fitted import LinearMap, Operator
from koopman.pairs import Moments, check_square, checked_pairs, default_alpha, gram_root, mean_of, scale_of
from koopman.solvers import SOLVERS
from koopman.subspaces import Basis, Method, Rank, latent_size, refuse_singular, whitened_basis

Data = Float[Array | np.ndarray, "n d"] | Moments


@validated
def fit_ridge(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    route: str = "qr",
    rtol: float | None = None,
) -> Operator:
    r"""Ridge regression: G = (C_x + alpha I)^{-1} C_xy.

    Args:
        x: Features of the states [n, d], or `Moments`.
        y: Features of their successors, one lag later; see `lagged_pairs`. None if `x` are moments.
        alpha: Tikhonov regularisation, non-negative, in units of C_x; None is 1e-6 tr(C_x) / d, so that the unit of the
            data does not matter. Traced: a sweep by `jax.vmap` decomposes the data once.
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

    Warns:
        UserWarning: Where values are known, if `alpha` exceeds tr(C_x) / d (for the other two estimators: eigenvalue
            number `rank` of C_x); if a column's variance is below the rounding of its squared mean and `center` is
            False; if rounding outweighs `alpha`; if singular values `rank` and `rank` + 1 agree to rounding.

    Raises:
        ValueError: If shapes disagree, there are fewer than two pairs, known data are not finite (the error names the
            row), their mean square is out of the dtype's range, `alpha` is negative, or it is zero and C_x is singular
            (the error names its rank).
        TypeError: If data are not real numbers.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS, eq. 7.
    """
    return _fit("ridge", x, y, None, alpha, observable, center, "dense", route, rtol)


@validated
def fit_pcr(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    rank: Rank,
    alpha: Scalar | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    solver: str = "dense",
    route: str = "qr",
    rtol: float | None = None,
) -> Operator:
    """Principal component regression: ridge regression on the leading `rank` principal directions of x.

    Args:
        x: Features of the states [n, d], or `Moments`.
        y: Features of their successors.
        rank: Directions kept, from 1 to d. If it is traced, all shapes are those of rank d and latent functions
            beyond `rank` are zero, so that ranks too can be swept by `jax.vmap`.
        alpha: Tikhonov regularisation and its default, as in `fit_ridge`.
        observable: What forecasts return.
        center: Whether features and observable are taken about their means.
        solver: "dense" (all directions), or as in `leading_left_vectors` for a few directions of many features; the
            others square the condition number, as "covariance" does.
        route: "qr" or "covariance", as in `fit_ridge`.
        rtol: Relative size below which a singular value of the data counts as zero.

    Returns:
        The fitted operator.

    Warns:
        UserWarning: As `fit_ridge`.

    Raises:
        ValueError: As `fit_ridge`, or if `rank` is above the number of features, or the solver is unknown.
        TypeError: As `fit_ridge`.

    References:
        Kostic et al. (2022), eq. 8.
    """
    return _fit("pcr", x, y, rank, alpha, observable, center, solver, route, rtol)


@validated
def fit_reduced_rank(
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    rank: Rank,
    alpha: Scalar | None = None,
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
        alpha: Tikhonov regularisation and its default, as in `fit_ridge`.
        observable: What forecasts return.
        center: Whether features and observable are taken about their means.
        solver: "auto", "dense", "krylov" or "randomized", see `leading_left_vectors`.
        route: "qr" or "covariance", as in `fit_ridge`.
        rtol: Relative size below which a singular value of the data counts as zero.

    Returns:
        The fitted operator.

    Warns:
        UserWarning: As `fit_ridge`.

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
    alpha: Scalar | None,
    observable: Array | np.ndarray | None,
    center: bool,
    solver: str,
    route: str,
    rtol: float | None,
) -> Operator:
    check_choice("solver", solver, SOLVERS)
    check_choice("route", route, ("qr", "covariance"))
    for name, value in (("alpha", alpha), ("rtol", rtol)):
        if value is not None:
            check_non_negative(name, value)
    if isinstance(x, Moments):
        if y is not None or observable is not None or center:
            fail("x", "stand alone when it is `Moments`: they hold successors, observable and means", "more arguments")
        problem, shape = _from_moments(x), x.mean_observable.shape
    else:
        if y is None:
            fail("y", "be given with `x`", "None", "See koopman.pairs.lagged_pairs")
        problem, shape = _from_pairs(x, y, observable, center)
    width, dtype = problem.x.shape[1], problem.x.dtype
    largest = jnp.max(jnp.abs(problem.x))
    unit = scale_of(largest)  # in which squares neither overflow nor vanish
    problem = problem._replace(x=problem.x / unit, y=problem.y / unit)
    size, active = latent_size(rank, width, "features")
    if active is not None and solver not in ("auto", "dense"):
        fail("solver", "be 'dense' for a traced `rank`", repr(solver))
    rounding = width * float(jnp.finfo(dtype).eps)
    cutoff = rtol if rtol is not None else rounding if route == "qr" else float(jnp.finfo(dtype).eps) ** 0.5
    trace = jnp.sum(problem.x**2)
    given = alpha is not None
    alpha = jnp.asarray(alpha, dtype) / unit / unit if given else default_alpha(trace, width)
    known = not is_traced(alpha) and not is_traced(problem.x) and not is_traced(problem.y)
    if not is_traced(largest) and float(largest) > 0:
        check_square("x", float(trace) / width * float(unit) ** 2, "a mean square", dtype)
    if known and given and float(alpha) == 0.0:
        values = np.linalg.svd(np.asarray(gram_root(problem.x)), compute_uv=False)
        needed = size if kind == "pcr" else width
        refuse_singular(kind, values, cutoff, needed, width, ("the covariance of `x`", "C_x"))
    method = Method(kind, size, "dense" if active is not None else solver, route, cutoff)
    basis = whitened_basis(method, problem.x, problem.y, alpha, active)
    operator = _assemble(problem, basis, alpha, unit, tuple(shape), cutoff)
    if known and active is None:
        which = "the mean eigenvalue of C_x" if kind == "ridge" else f"eigenvalue {size} of C_x"
        warn_large_alpha(alpha, basis.variance, trace, which, unit)
        warn_tied(np.asarray(basis.values), np.asarray(basis.rest), cutoff)
        warn_inexact(operator)
    return operator


def _from_pairs(
    x: Array | np.ndarray, y: Array | np.ndarray, observable: Array | np.ndarray | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    x, y, flat, shape = checked_pairs(x, y, observable)
    offset, mean = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros(flat.shape[1:], x.dtype)
    if not center:
        warn_offset(x)
    else:
        # About the mean as it is stored, which is within rounding of the mean: what the operator subtracts is the same.
        (offset, _), (mean, _) = mean_of(x), mean_of(flat)
        x, y, flat = x - offset[None], y - offset[None], flat - mean[None]
    scale = x.shape[0] ** -0.5
    return _Problem(x * scale, y * scale, flat * scale, offset, mean), shape


def _from_moments(seen: Moments) -> _Problem:
    offset, mean = jnp.zeros_like(seen.mean_x), jnp.zeros_like(seen.mean_observable)
    width, width_y, _ = seen.widths
    if width_y != width:
        fail("x", f"hold moments of as many features of the successors as of the states ({width})", width_y)
    if not is_traced(seen.root) and not np.isfinite(np.asarray(seen.root)).all():
        fail("x", "be moments of finite data", "others", "Outside jit `moments` names the row that is not finite")
    rows = seen.root * jax.lax.rsqrt(seen.count)
    if seen.center:
        # Successors are about their own mean there, and about that of x here: one row more is the step between.
        offset, mean = seen.mean_x, seen.mean_observable
        drift = (seen.mean_y - offset) + (seen.rest[1 + width : 1 + 2 * width] - seen.rest[1 : 1 + width])
        step = jnp.concatenate([jnp.zeros_like(offset), drift, jnp.zeros_like(mean)])
        rows = jnp.concatenate([rows, step[None]])
    x, y, observable = jnp.split(rows, [width, width + width_y], 1)
    return _Problem(x, y, observable, offset, mean)


def _assemble(
    problem: _Problem, found: Basis, alpha: Array, unit: Array, shape: tuple[int, ...], cutoff: float
) -> Operator:
    """The operator, from what is in units of the features."""
    basis, values = found.vectors, found.values
    latent_x, latent_y = product(problem.x, basis), product(problem.y, basis)
    dual = product(problem.y.T, latent_x)
    return Operator(
        encode=LinearMap(problem.offset, basis / unit),
        dual=LinearMap(problem.offset, dual * unit),
        core=product(latent_x.T, latent_y),
        readout=product(latent_x.T, problem.observable),
        mean_observable=problem.mean_observable,
        gram_x=product(latent_x.T, latent_x),
        gram_y=product(latent_y.T, latent_y),
        dual_gram=product(dual.T, dual) * unit * unit,
        basis_gram=product(basis.T, basis) / unit / unit,
        singular_values=values * unit,
        alpha=alpha * unit * unit,
        effective_rank=jnp.sum(values > cutoff * jnp.max(values)),
        observable_shape=shape,
    )
