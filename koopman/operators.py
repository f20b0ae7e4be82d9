"""Fitting an evolution operator: an estimator, on explicit features, with a kernel, or on Nystroem features.

`koopman.estimators` says what there is to estimate with. Covariances enter as the QR factor of the data, so float32
does not square the condition number. One decomposition serves all values of `alpha` under `jax.vmap`.
"""

import warnings
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation.checks import check_choice, check_non_negative, check_single, fail, is_traced
from dissociation.linalg import product, scale_of
from dissociation.types import Scalar
from dissociation.validation import validated
from koopman.diagnostics import warn_inexact, warn_large_alpha, warn_offset, warn_tied, warn_unconverged
from koopman.estimators import Estimator, span
from koopman.kernel_operators import fit_with_kernel
from koopman.nystroem import Kernel, nystroem_map
from koopman.operator import KernelMap, LinearMap, Operator
from koopman.pairs import Moments, check_square, checked_pairs, default_alpha, gram_root, mean_of
from koopman.solvers import SOLVERS
from koopman.subspaces import Basis, FeatureRegression, latent, refuse_singular

ROUTES = ("auto", "qr", "covariance")

Data = Float[Array | np.ndarray, "n d"] | Moments


@validated
def fit(
    estimator: Estimator,
    x: Data,
    y: Float[Array | np.ndarray, "n d"] | None = None,
    *,
    kernel: Kernel | None = None,
    centres: Float[Array | np.ndarray, "m d"] | None = None,
    observable: Float[Array | np.ndarray, "n *o"] | None = None,
    center: bool = False,
    route: str = "auto",
    rtol: float | None = None,
) -> Operator:
    """The operator G = U U^T C_xy that an estimator makes of pairs, U^T (C_x + alpha I) U = I.

    The arrays are features, to which the operator is linear; or, with a kernel, states: then it acts in the kernel's
    space, on the span of all samples, or with `centres` on the span of these alone, which states and successors share.
    (Meanti et al. 2023 project successors on centres of their own, and estimate M and D at these alone; here all
    samples serve.)

    Gram matrices hold the squares of what feature matrices hold: with a kernel and no centres, eigenvalues of C_x below
    8 times the rounding unit of the largest (1e-6 in float32) count as zero in the dense solvers, and `alpha` has to
    lie well above rounding in the one that factors K + alpha I. Use x64 for smaller ones.

    Args:
        estimator: `Ridge`, `PrincipalComponents` or `ReducedRank` of `koopman.estimators`, with its regularisation.
        x: Features of the states, or states: [n, d]. Without kernel also `Moments`.
        y: Features of their successors, one lag later, or these; see `lagged_pairs`. None if `x` are moments.
        kernel: A module of `koopman.kernels`, or any function of two arrays of states to their kernel matrix.
        centres: Z, for instance `x[choose_centres(...)]`. A default `alpha` is 1e-6 times the mean of k(x, x) on their
            span.
        observable: What forecasts return, at the successors' times: [n, ...]. Default: `y`.
        center: Whether features and observable are taken about their means; not with a kernel. It removes the constant
            function, whose eigenvalue is 1; the drift between the means of x and y is neglected, as in a stationary
            process.
        route: "qr" takes the QR factor of the features; "covariance" C_x itself, faster (0.20 against 0.53 s for 5000
            digits of 784 pixels, rank 5, float64, on two cores), but C_x squares the condition number: in float32
            directions of x below 1e-3 of the largest are lost, and an `alpha` below 1e-7 of C_x's largest eigenvalue
            means nothing. "auto" is "qr" in float32, for fewer than 64 features and for fewer than twice as many pairs
            as features; else "covariance" where alpha > 10^6 eps tr(C_x) (2e-10 tr(C_x) in float64), and "qr" where
            not, which is decided when the program runs (by all members of a `vmap` together). Not for a kernel without
            centres.
        rtol: Relative size below which a singular value of the features counts as zero; default d times rounding
            ("qr", and "auto" with it), or the root of 8 times that ("covariance"). Not for a kernel without centres.

    Returns:
        The fitted operator. It takes what `x` holds.

    Warns:
        UserWarning: Where values are known, if `alpha` exceeds eigenvalue number `rank` of C_x or k(X, X) / n (for
            ridge regression tr(C_x) / d, or the mean of k(x, x)); if a column's variance is below the rounding of its
            squared mean and `center` is False, or k(x, x) varies by less than its rounding; if rounding outweighs
            `alpha`; if singular values `rank` and `rank` + 1 agree to rounding.

    Raises:
        ValueError: If shapes disagree, there are fewer than two pairs, known data are not finite (the error names the
            row), their mean square is out of the dtype's range, the rank is above the number of features or samples,
            the estimator's solver is none for these data, `alpha` is zero and C_x or K is singular (the error names
            its rank), K + alpha I is not positive definite in the dtype's precision where it has to be, or the
            kernel's values are no symmetric [n, n], not finite, negative for a state with itself, or out of range.
        TypeError: If data are not real numbers, or the kernel does not give an array of them.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS, eq. 7 to 9; Meanti et
        al. (2023), Estimating Koopman operators with sketching to provably learn large scale dynamical systems.

    >>> from koopman.estimators import ReducedRank
    >>> cycle = np.eye(3, dtype=np.float32)[np.arange(12) % 3]
    >>> operator = fit(ReducedRank(rank=3, alpha=0.0), cycle[:-1], cycle[1:])
    >>> jnp.abs(jnp.linalg.eigvals(operator.core)).round(4)
    Array([1., 1., 1.], dtype=float32)
    """
    check_choice("route", route, ROUTES)
    check_single("alpha", estimator.alpha)
    check_single("rank", estimator.rank)
    if rtol is not None:
        check_non_negative("rtol", rtol)
    if kernel is None:
        if centres is not None:
            fail("kernel", "be given with `centres`", "None")
        problem, shape = _problem(x, y, observable, center)
        solver = estimator.solver or estimator.feature_solver
        return _fit(estimator, problem, shape, estimator.alpha, solver, route, rtol)
    if isinstance(x, Moments) or y is None:
        got = "moments" if isinstance(x, Moments) else "no `y`"
        fail("x", "be states, with their successors `y`, where there is a `kernel`", got)
    if center:
        fail("center", "be False with a kernel", center, "Take the states about their mean")
    if centres is not None:
        return _fit_on_centres(estimator, x, y, kernel, centres, observable, route, rtol)
    for name, value, only in (("route", "qr" if route == "auto" else route, "qr"), ("rtol", rtol, None)):
        if value != only:
            fail(name, f"be {only!r} for a kernel without `centres`", repr(value))
    return fit_with_kernel(estimator, x, y, kernel, observable)


class _Problem(NamedTuple):
    """Rows whose products are the moments: data, or the factor of their moments."""

    x: Array  # [m, d], x^T x = m C_x
    y: Array  # [m, d], x^T y = m C_xy
    observable: Array | None  # [m, o]; None: y
    offset: Array  # [d]
    mean_observable: Array  # [o]
    scale: Array  # of the rows, m^(-1/2) for data; applied by `_in_units`


def _problem(
    x: Array | np.ndarray | Moments, y: Array | np.ndarray | None, observable: Array | np.ndarray | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    if isinstance(x, Moments):
        if y is not None or observable is not None or center:
            fail("x", "stand alone when it is `Moments`: they hold successors, observable and means", "more arguments")
        return _from_moments(x)
    if y is None:
        fail("y", "be given with `x`", "None", "See koopman.pairs.lagged_pairs")
    return _from_pairs(x, y, observable, center)


def _fit(
    estimator: Estimator,
    problem: _Problem,
    shape: tuple[int, ...],
    given: Scalar | None,
    solver: str,
    route: str,
    rtol: float | None,
) -> Operator:
    width, dtype = problem.x.shape[1], problem.x.dtype
    asked = None if given is None else jnp.asarray(given, dtype)
    problem, alpha, largest, unit, trace = _in_units(problem, asked)
    size, active, solver = latent(estimator.rank, width, "features", solver, SOLVERS)
    rounding = float(jnp.finfo(dtype).eps)
    if route == "auto" and (rtol is not None or rounding > 1e-12 or width < 64 or problem.x.shape[0] < 2 * width):
        route = "qr"
    known = not is_traced(alpha) and not is_traced(problem.x) and not is_traced(problem.y)
    if not is_traced(largest) and float(largest) > 0:
        check_square("x", float(trace) / width * float(unit) ** 2, "a mean square", dtype)
    if known and float(alpha) == 0.0:  # by default, too, where all features are zero
        values = np.linalg.svd(np.asarray(gram_root(problem.x)), compute_uv=False)
        needed, what = width if estimator.inverts_all else size, ("the covariance of `x`", "C_x")
        cutoff = rtol if rtol is not None else (8 * rounding) ** 0.5 if route == "covariance" else width * rounding
        refuse_singular(type(estimator).__name__, values, cutoff, needed, width, what)
    regression = FeatureRegression(
        problem.x, problem.y, alpha, jnp.asarray(size if active is None else active), size, solver, route, rtol
    )
    basis = span(estimator, regression)
    warn_unconverged(basis.residual, rounding)
    operator, cutoff = _assemble(problem, regression, basis, unit, shape)
    if known and active is None:
        which = "the mean eigenvalue of C_x" if estimator.rank is None else f"eigenvalue {size} of C_x"
        warn_large_alpha(alpha, basis.variance, trace, which, unit)
        warn_tied(np.asarray(basis.values), np.asarray(basis.rest), float(cutoff))
        warn_inexact(operator)
    return operator


@jax.jit
def _in_units(problem: _Problem, alpha: Array | None) -> tuple[_Problem, Array, Array, Array, Array]:
    """Problem and alpha in a unit in which squares neither overflow nor vanish; its largest entry, unit, trace."""
    scale = problem.scale
    largest = jnp.max(jnp.abs(problem.x)) * scale
    unit = scale_of(largest)
    observable = None if problem.observable is None else problem.observable * scale
    problem = problem._replace(x=problem.x * (scale / unit), y=problem.y * (scale / unit), observable=observable)
    trace = jnp.sum(problem.x**2)
    alpha = default_alpha(trace, problem.x.shape[1]) if alpha is None else alpha / unit / unit
    return problem, alpha, largest, unit, trace


def _fit_on_centres(
    estimator: Estimator,
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    kernel: Kernel,
    centres: Array | np.ndarray,
    observable: Array | np.ndarray | None,
    route: str,
    rtol: float | None,
) -> Operator:
    x, y, flat, shape = checked_pairs(x, y, observable)
    features = nystroem_map(kernel, centres)
    features_x, alpha = features(x), estimator.alpha
    if alpha is None:
        alpha = default_alpha(jnp.sum(features_x**2) / x.shape[0])
    with warnings.catch_warnings():  # columns of features are none of the caller's; `nystroem_map` has warned
        warnings.filterwarnings("ignore", "Column .* varies by", module="koopman")
        problem, _ = _from_pairs(features_x, features(y), flat, center=False)
    fitted = _fit(estimator, problem, shape, alpha, estimator.solver or "auto", route, rtol)

    def lifted(linear: LinearMap | KernelMap) -> KernelMap:
        matrix = linear.matrix if isinstance(linear, LinearMap) else linear.coefficients
        return KernelMap(features.kernel, features.centres, product(features.whitening, matrix))

    return eqx.tree_at(lambda o: (o.encode, o.dual), fitted, (lifted(fitted.encode), lifted(fitted.dual)))


def _from_pairs(
    x: Array | np.ndarray, y: Array | np.ndarray, observable: Array | np.ndarray | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    x, y, flat, shape = checked_pairs(x, y, observable)
    scale = jnp.asarray(x.shape[0] ** -0.5, x.dtype)
    if center:
        return _centred(x, y, flat, scale), shape
    warn_offset(x)
    offset, mean = jnp.zeros(x.shape[1:], x.dtype), jnp.zeros(flat.shape[1:], x.dtype)
    return _Problem(x, y, None if observable is None else flat, offset, mean, scale), shape


@jax.jit
def _centred(x: Array, y: Array, flat: Array, scale: Array) -> _Problem:
    # About the mean as it is stored, which is within rounding of the mean: what the operator subtracts is the same.
    (offset, _), (mean, _) = mean_of(x), mean_of(flat)
    return _Problem(x - offset[None], y - offset[None], flat - mean[None], offset, mean, scale)


def _from_moments(seen: Moments) -> tuple[_Problem, tuple[int, ...]]:
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
    return _Problem(x, y, observable, offset, mean, jnp.ones_like(seen.count)), seen.mean_observable.shape


@partial(jax.jit, static_argnames="shape")
def _assemble(
    problem: _Problem, regression: FeatureRegression, solution: Basis, unit: Array, shape: tuple[int, ...]
) -> tuple[Operator, Array]:
    """The operator, from what is in units of the features, and the relative size at which values count as zero."""
    basis, values, alpha, cutoff = solution.vectors, solution.values, regression.alpha, regression.threshold
    latent_x, latent_y = product(problem.x, basis), product(problem.y, basis)
    dual = product(problem.y.T, latent_x)
    operator = Operator(
        encode=LinearMap(problem.offset, basis / unit),
        dual=LinearMap(problem.offset, dual * unit),
        core=product(latent_x.T, latent_y),
        readout=dual.T * unit if problem.observable is None else product(latent_x.T, problem.observable),
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
    return operator, cutoff
