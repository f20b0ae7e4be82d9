"""Fit an evolution operator on explicit features, with a kernel, or on Nystroem features."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_single, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product, scale_of
from dissociation._core.validation import validated
from koopman._operators._diagnose import findings_of
from koopman._operators._estimators import Estimator, check_factor, refuse_singular, span
from koopman._operators._findings import refuse_large_gram, warn_of
from koopman._operators._kernels import (
    Kernel,
    KernelMap,
    Linear,
    LinearMap,
    as_module,
    check_kernel,
    compiled_by_kernel,
    extremes,
    gram,
    kernel_alpha,
    kernel_features,
    nystroem_map,
)
from koopman._operators._numerics import positive_or_one, rounding_unit
from koopman._operators._operator import FitSettings, Fitting, Operator, unshrinking
from koopman._operators._pairs import (
    AnyArray,
    Moments,
    as_known,
    check_square,
    checked_pairs,
    default_alpha,
    few_rows,
    gram_root,
    mean_of,
)
from koopman._operators._subspaces import (
    SOLVERS,
    Basis,
    FeatureRegression,
    KernelRegression,
    latent,
)

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
) -> Operator:
    """Fit the operator G = U U^T C_xy of an estimator to pairs, U^T (C_x + alpha I) U = I.

    Without a kernel the arrays are features, in which the operator is linear. With a kernel they
    are states, and the operator acts in the kernel's space, on the span of all samples or of
    `centres`. Noise on the states makes decay too fast: pass pairs of `delay_embed`.

    Args:
        estimator: `Ridge`, `PrincipalComponents` or `ReducedRank`.
        x: Features of the states, or states: [n, d]. Without kernel also `Moments`.
        y: Features of the successors, or successors, [n, d]; see `lagged_pairs`. None if `x` are
            moments.
        kernel: Kernel of `koopman`, or any function of two arrays of states to their kernel matrix.
        centres: Z, [m, d], for instance `x[choose_centres(...)]`. All samples are used, unlike in
            Meanti et al. (2023). The default `alpha` is 1e-6 times the mean of k(x, x) on the span
            of Z.
        observable: Quantity to forecast, at the successors' times: [n, ...]. Default: `y`.
        center: If True, features and observable are centred and the operator has an intercept:
            affine maps are exact, trends are drifts. Drop a constant feature, which centring makes
            zero. Not with a kernel.
        route: "qr" takes the QR factor of the features. "covariance" takes C_x, which is faster and
            squares the condition number: in float32 it loses directions of x below 1e-3 of the
            largest, and an `alpha` below 1e-7 of C_x's largest eigenvalue. "auto" is "covariance"
            in float64 with at least 64 features, twice as many pairs, and all eigenvalues of C_x
            above 2e-10 tr(C_x) (for all members of a `vmap`; of C_x + alpha I for few directions by
            `ReducedRank`); else "qr". Not for a kernel without
            centres.

    Returns:
        The fitted operator, a function of features or states as in `x`.

    Warns:
        UserWarning: For known values, if a given `alpha` suppresses predictive directions or
            exceeds eigenvalue number `rank` of k(X, X) / n (for `Ridge`, the mean of k(x, x)); if
            without `center` a column of ones lowers the residual (F > 25), or a column's variance
            is below the rounding of its squared mean; if k(x, x) varies by less than its rounding,
            or rounding outweighs `alpha`; if the data hold fewer directions than `rank`, or
            singular values `rank` and `rank` + 1 agree to rounding; once per process, if there are
            more features than pairs and no lower rank.

    Raises:
        ValueError: If there are fewer than two pairs, known data are not finite (the error names
            the row), or their mean square is out of range; if the rank exceeds the number of
            features or samples, or the solver does not apply; if `alpha` is zero and C_x or K
            singular, or K + alpha I is factored and not positive definite; if the kernel's values
            are not a finite, symmetric [n, n] in range with a non-negative diagonal.
        TypeError: If the kernel does not return an array of real numbers.

    References:
        Kostic et al. (2022), Learning dynamical systems via Koopman operator regression in RKHS,
        eq. 7 to 9; Meanti et al. (2023), Estimating Koopman operators with sketching to provably
        learn large scale dynamical systems.

    >>> from koopman import ReducedRank
    >>> cycle = np.eye(3, dtype=np.float32)[np.arange(12) % 3]
    >>> operator = fit(ReducedRank(rank=3, alpha=0.0), cycle[:-1], cycle[1:])
    >>> jnp.abs(jnp.linalg.eigvals(operator.core)).round(4)
    Array([1., 1., 1.], dtype=float32)
    """
    check_choice("route", route, ROUTES)
    check_single("alpha", estimator.alpha)
    check_single("rank", estimator.rank)
    if kernel is None:
        problem, shape = _features(x, y, centres, observable, center)
        is_centred = x.center if isinstance(x, Moments) else center
        solver = estimator.solver or estimator.feature_solver
        operator = _fit(estimator, problem, shape, solver, route, is_centred=is_centred)
    else:
        states, successors = _states(x, y, center)
        if centres is not None:
            operator = _fit_on_centres(
                estimator, states, successors, kernel, centres, observable, route
            )
        elif route == "covariance":
            fail("route", "be 'qr' for a kernel without `centres`", repr(route))
        else:
            operator = _fit_with_kernel(estimator, states, successors, kernel, observable)
    if not any(map(is_traced, (operator.core, operator.alpha, estimator.rank))):
        warn_of(findings_of(operator, x, y))
    return operator


def _features(
    x: Data, y: AnyArray | None, centres: AnyArray | None, observable: AnyArray | None, center: bool
) -> tuple["_Problem", tuple[int, ...]]:
    """Return the problem of pairs or moments of features, and the shape of one observable."""
    if centres is not None:
        fail("kernel", "be given with `centres`", "None")
    if not isinstance(x, Moments):
        if y is None:
            fail("y", "be given with `x`", "None", "See koopman.lagged_pairs")
        return _from_pairs(x, y, observable, center)
    if y is not None or observable is not None or center:
        expected = "stand alone when it is `Moments`: they hold successors, observable and means"
        fail("x", expected, "more arguments")
    return _from_moments(x)


def _states(x: Data, y: AnyArray | None, center: bool) -> tuple[AnyArray, AnyArray]:
    """Return states and successors for a kernel."""
    if isinstance(x, Moments) or y is None:
        received = "moments" if isinstance(x, Moments) else "no `y`"
        fail("x", "be states, with their successors `y`, where there is a `kernel`", received)
    if center:
        fail("center", "be False with a kernel", center, "Take the states about their mean")
    return x, y


class _Problem(NamedTuple):
    """Rows of data, or of the factor of their moments, with the same products."""

    x: Array  # [m, d], x^T x = m C_x
    y: Array  # [m, d], x^T y = m C_xy
    observable: Array | None  # [m, o]; None: y
    offset: Array  # [d], mean of x; zero unless centred, like the next three
    offset_y: Array  # [d], mean of y
    mean_observable: Array  # [o]
    drift: Array  # [d], offset_y - offset
    mean: Array  # [d], of x about its offset
    scale: Array | np.ndarray  # of the rows, m^(-1/2) for data; applied by `_in_units`
    pairs: Array | int  # number of pairs


def _fit(
    estimator: Estimator,
    problem: _Problem,
    shape: tuple[int, ...],
    solver: str,
    route: str,
    fallback: Array | None = None,
    lift: Array | None = None,
    is_centred: bool = False,
) -> Operator:
    """Fit features.

    `fallback`: Default `alpha` on centres. `lift` [m, d] maps coefficients of the features to
    coefficients of k(x, centres).
    """
    num_pairs = problem.pairs
    width = problem.x.shape[1]
    has_rank = estimator.rank is not None
    is_given = estimator.alpha is not None
    alpha = to_device(estimator.alpha, problem.x.dtype) if is_given else fallback
    # Without regularisation the span does not depend on the units of columns, and rank cuts must
    # not either.
    level = False
    if not has_rank or estimator.inverts_all or estimator.size == width:
        level = alpha is None or (not is_traced(alpha) and float(alpha) == 0.0)
    problem, unit_alpha, largest, trace, squares, units = _in_units(problem, alpha, level)
    if alpha is not None or level:
        squares = None

    size, active, solver = latent(estimator.rank, width, "features", solver, SOLVERS)
    # The QR factor of the data does not square the condition number, which float32 needs.
    is_float32 = rounding_unit(problem.x) > 1e-12
    is_short = isinstance(num_pairs, int) and num_pairs < 2 * width
    if route == "auto" and (is_float32 or width < 64 or is_short):
        route = "qr"
    regression = FeatureRegression(problem.x, problem.y, unit_alpha, active, size, solver, route)
    if not is_traced(largest):
        _refuse_features(estimator, regression, problem, largest, trace, units[0], fallback)

    compared = ""
    if fallback is not None:
        compared = f"eigenvalue {size} of C_x" if has_rank else "the mean eigenvalue of C_x"
    settings = FitSettings(compared, has_rank, estimator.inverts_all, is_centred)
    static = eqx.filter(estimator, False)
    return _solve(
        static, problem, regression, units, lift, squares, trace, shape, is_given, settings
    )


def _refuse_features(
    estimator: Estimator,
    regression: FeatureRegression,
    problem: _Problem,
    largest: Array,
    trace: Array,
    unit: Array,
    fallback: Array | None,
) -> None:
    """Raise if known squares are out of range, or if `alpha` is zero and C_x singular."""
    width = problem.x.shape[1]
    if float(largest) > 0:
        square = float(trace) / width * float(unit) * float(unit)
        check_square("x", square, "a mean square", problem.x.dtype)
    alpha = regression.alpha
    # The default is zero too if all features are.
    if any(map(is_traced, (alpha, problem.x, problem.y))) or float(alpha) != 0.0:
        return
    if float(trace) == 0 and (fallback is not None or np.asarray(problem.offset).any()):
        received = "constant ones alone"
        if fallback is not None:
            received = "k(x, centres) = 0, as all are far from the centres"
        fail("x", "hold features that vary", received)
    root = np.asarray(_root(problem.x))
    values = np.linalg.svd(root, compute_uv=False)
    cutoff = width * rounding_unit(problem.x)
    if regression.route == "covariance":
        cutoff = (8 * rounding_unit(problem.x)) ** 0.5
    refuse_singular(estimator, regression, values, cutoff, "the covariance of `x`", "C_x")


@partial(jax.jit, static_argnames="level")
def _in_units(
    problem: _Problem, alpha: Array | None, level: bool
) -> tuple[_Problem, Array, Array, Array, Array, tuple[Array, Array, Array]]:
    """Return the problem, alpha, the largest entry of x, tr(C_x), squares of columns, and units.

    Units are (unit, column divisors, ratio of the traces). With `level`, column divisors are powers
    of two near the columns' sizes.
    """
    scale = problem.scale
    # In this unit squares neither overflow nor vanish.
    largest = jnp.max(jnp.abs(problem.x)) * scale
    unit = scale_of(largest)
    x = problem.x * (scale / unit)
    y = problem.y * (scale / unit)
    observable = problem.observable
    if observable is not None:
        observable = observable * scale

    sizes = scale_of(jnp.max(jnp.abs(x), 0))
    # A constant column about its mean is rounding, which levelling would amplify.
    floor = 4 * rounding_unit(x) * jnp.abs(problem.offset) / unit / sizes
    lengths = jnp.sqrt(jnp.sum((x / sizes[None]) ** 2, 0))
    x = jnp.where((lengths < floor)[None], 0.0, x)
    trace = jnp.sum(x**2)
    if not level:
        sizes = jnp.ones_like(sizes)
    x = x / sizes[None]
    level_trace = jnp.sum(x**2)
    if alpha is None:
        rank = jnp.minimum(problem.pairs, x.shape[1])
        alpha = default_alpha(level_trace, rank)
    else:
        alpha = alpha / unit / unit

    trace_ratio = jnp.where(level_trace > 0, trace, 1.0) / positive_or_one(level_trace)
    squares = jnp.sum(x**2, 0)
    problem = problem._replace(x=x, y=y, observable=observable)
    return problem, alpha, largest, trace, squares, (unit, sizes, trace_ratio)


_root = jax.jit(gram_root)


def _fit_on_centres(
    estimator: Estimator,
    x: AnyArray,
    y: AnyArray,
    kernel: Kernel,
    centres: AnyArray,
    observable: AnyArray | None,
    route: str,
) -> Operator:
    x, y, flat, shape = checked_pairs(x, y, observable, to_device)
    features = nystroem_map(kernel, centres)
    kernel = features.kernel
    centres = features.centres
    lift = features.coefficients
    features_x, features_y, fallback = _centre_features(kernel, centres, lift, x, y)
    problem, _ = _from_pairs(features_x, features_y, flat, center=False)
    solver = estimator.solver or "auto"
    operator = _fit(estimator, problem, shape, solver, route, fallback, lift)
    maps = []
    for linear_map in (operator.encode, operator.dual):
        if isinstance(linear_map, LinearMap):
            maps.append(KernelMap(kernel, centres, linear_map.matrix))
    return eqx.tree_at(lambda operator: (operator.encode, operator.dual), operator, maps)


@compiled_by_kernel
def _centre_features(
    kernel: Kernel, centres: Array, coefficients: Array, x: Array, y: Array
) -> tuple[Array, Array, Array]:
    """Return Nystroem features of x and y, and the default `alpha`."""
    features_x = kernel_features(kernel, centres, coefficients, x)
    features_y = kernel_features(kernel, centres, coefficients, y)
    mean_square = jnp.sum(features_x**2) / x.shape[0]
    return features_x, features_y, kernel_alpha(type(kernel) is Linear, mean_square)


def _from_pairs(
    x: AnyArray, y: AnyArray, observable: AnyArray | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    x, y, flat, shape = checked_pairs(x, y, observable, as_known)
    arrays = [x, y]
    if observable is not None:
        arrays.append(flat)
    is_known = all(isinstance(array, np.ndarray) for array in arrays)
    about_means = _about_means if is_known else _compiled_about_means
    means, drift, centred = about_means(arrays, center)

    dtype = x.dtype
    zero = np.zeros(x.shape[1], dtype)
    zero_y = np.zeros(y.shape[1], dtype)
    zero_observable = np.zeros(flat.shape[1], dtype)
    offsets = (zero, zero_y, zero_observable, zero, means[0])
    if center:
        # Without an observable the last mean is that of y.
        offsets = (means[0], means[1], means[-1], drift, zero)
        arrays = centred
    rows: Any = few_rows(*arrays)
    if observable is None:
        rows = (*rows, None)
    num_pairs = x.shape[0]
    scale = np.asarray(num_pairs**-0.5, dtype)
    return _Problem._make([*rows, *offsets, scale, num_pairs]), shape


def _about_means(arrays: list[Any], center: bool) -> tuple[list[Any], Any, list[Any]]:
    """Return the means of the arrays, the mean of y less that of x, and the centred arrays.

    The arrays are x, y and perhaps an observable. Without `center` none is centred.
    """
    means = [mean_of(array)[0] for array in arrays]
    centred = []
    if center:
        # By the rounded mean, which the operator subtracts too.
        centred = [array - mean[None] for array, mean in zip(arrays, means, strict=True)]
    return means, means[1] - means[0], centred


_compiled_about_means = jax.jit(_about_means, static_argnames="center")


def _from_moments(moments: Moments) -> tuple[_Problem, tuple[int, ...]]:
    width, width_y, _ = moments.widths
    if width_y != width:
        expected = f"hold moments of as many features of the successors as of the states ({width})"
        fail("x", expected, width_y)
    if not is_traced(moments.root) and not np.isfinite(np.asarray(moments.root)).all():
        advice = "Outside jit `moments` names the row that is not finite"
        fail("x", "be moments of finite data", "sums that are not finite", advice)
    return _of_moments(moments), moments.mean_observable.shape


@jax.jit
def _of_moments(moments: Moments) -> _Problem:
    width = moments.widths[0]
    mean_x = moments.mean_x
    mean_y = moments.mean_y
    mean_observable = moments.mean_observable
    rows = moments.root * jax.lax.rsqrt(moments.count)
    x, y, observable = jnp.split(rows, [width, 2 * width], 1)
    zero = jnp.zeros_like(mean_x)
    if moments.center:
        errors = moments.rest[1 + width : 1 + 2 * width] - moments.rest[1 : 1 + width]
        drift = (mean_y - mean_x) + errors
        offsets = (mean_x, mean_y, mean_observable, drift, zero)
    else:
        offsets = (zero, zero, jnp.zeros_like(mean_observable), zero, mean_x)
    return _Problem(x, y, observable, *offsets, jnp.ones_like(moments.count), moments.count)


def _fit_with_kernel(
    estimator: Estimator, x: AnyArray, y: AnyArray, kernel: Kernel, observable: AnyArray | None
) -> Operator:
    """Fit by exact Gram matrices K = k(X, X) / n and L = k(Y, Y) / n."""
    x, y, flat, shape = checked_pairs(x, y, observable, to_device)
    has_rank = estimator.rank is not None
    # Measured numbers of matrices: a full eigendecomposition takes more.
    num_matrices = 3 if has_rank else 7
    refuse_large_gram(x, num_matrices)
    kernel = as_module(kernel)
    is_linear = type(kernel) is Linear
    solver = estimator.solver or "auto"
    size, active, solver = latent(
        estimator.rank, x.shape[0], "samples", solver, estimator.kernel_solvers
    )

    is_given = estimator.alpha is not None
    alpha = to_device(estimator.alpha, x.dtype) if is_given else None
    gram_x = gram(kernel, x, x)
    gram_y = gram(kernel, y, y)
    gram_x, gram_y, alpha, unit, trace, extremes_x, extremes_y = _kernel_in_units(
        gram_x, gram_y, alpha, is_linear
    )
    check_kernel(extremes_x)
    check_kernel(extremes_y)
    if not is_traced(gram_x):
        mean_square = float(trace) * float(unit) ** 2
        check_square("kernel", mean_square, "a mean of k(x, x)", gram_x.dtype)
    if solver == "auto":
        solver = estimator.choose_kernel_solver(gram_x, alpha, size)
        if solver == "krylov" and estimator.inverts_all and is_linear and not is_given:
            solver = "spectral"  # the default `alpha` of rounding is too small for a factor

    problem = KernelRegression(gram_x, gram_y, alpha, active, size, solver)
    compared = f"eigenvalue {size} of k(X, X) / n" if has_rank else "the mean of k(x, x)"
    settings = FitSettings(compared, has_rank, estimator.inverts_all, False)
    static = eqx.filter(estimator, False)
    across = gram(kernel, y, x)
    fields, basis = _solve_kernel(static, problem, across, flat, unit, trace, settings)
    if not any(map(is_traced, (alpha, gram_x, gram_y))):
        _refuse_kernel(estimator, problem, basis, is_given)
    fields["encode"] = KernelMap(kernel, x, fields["encode"])
    fields["dual"] = KernelMap(kernel, y, fields["dual"])
    return Operator(**fields, observable_shape=shape, given=is_given)


def _refuse_kernel(
    estimator: Estimator, problem: KernelRegression, basis: Basis, is_given: bool
) -> None:
    """Raise if a known K + alpha I has no factor, or if a given `alpha` is zero and K singular."""
    if estimator.inverts_all and problem.solver == "krylov":
        check_factor(problem, basis)
    elif is_given and float(problem.alpha) == 0.0:
        # Principal components have the leading eigenvalues of K in their basis, and ridge all.
        values = np.asarray(basis.values) ** 2
        if estimator.inverts_all:
            values = np.linalg.eigvalsh(np.asarray(problem.x))[::-1]
        name = "the kernel matrix of `x`"
        refuse_singular(estimator, problem, values, problem.cutoff, name, "K")


@partial(jax.jit, static_argnames="is_linear")
def _kernel_in_units(
    gram_x: Array, gram_y: Array, alpha: Array | None, is_linear: bool
) -> tuple[Array, ...]:
    """Return K and L in a unit of features, alpha, the unit, the trace of K, and `extremes`.

    In this unit squares neither overflow nor vanish.
    """
    extremes_x = extremes(gram_x)
    extremes_y = extremes(gram_y)
    num_samples = len(gram_x)
    gram_x = gram_x / num_samples
    gram_y = gram_y / num_samples
    unit = scale_of(jnp.sqrt(jnp.trace(gram_x)))
    gram_x = gram_x / unit / unit
    gram_y = gram_y / unit / unit
    trace = jnp.trace(gram_x)
    alpha = kernel_alpha(is_linear, trace) if alpha is None else alpha / unit / unit
    return gram_x, gram_y, alpha, unit, trace, extremes_x, extremes_y


@partial(jax.jit, static_argnames=("estimator", "shape", "is_given", "settings"))
def _solve(
    estimator: Estimator,
    problem: _Problem,
    regression: FeatureRegression,
    units: tuple[Array, Array, Array],
    lift: Array | None,
    squares: Array | None,
    trace: Array,
    shape: tuple[int, ...],
    is_given: bool,
    settings: FitSettings,
) -> Operator:
    """Return the operator of a regression in units.

    `squares` and `trace` are the columns' mean squares and tr(C_x) in these units.
    """
    solution = span(estimator, regression)
    basis = solution.vectors
    values = solution.values
    alpha = regression.alpha
    cutoff = estimator.threshold(regression)
    unit, sizes, trace_ratio = units
    penalty = alpha * product(basis.T, basis)
    latent_x = product(problem.x, basis)
    basis = basis / sizes[:, None]
    latent_y = product(problem.y, basis)
    weights, moments = _latent_moments(latent_x, latent_y, penalty, 1)
    dual = product(problem.y.T, weights)

    # If columns of the successors differ in units, small singular values may be directions.
    heights = jnp.max(jnp.abs(problem.y), 0)
    floor = jnp.finfo(heights.dtype).eps ** 0.5 * jnp.max(heights)
    is_uneven = jnp.any((heights > 0) & (heights < floor))
    diagonal = jnp.diagonal(moments["gram_x"] + penalty)
    is_direction = jnp.where(is_uneven, diagonal > 0.5, values > cutoff * jnp.max(values))

    def lifted(coefficients: Array) -> Array:
        return coefficients if lift is None else product(lift, coefficients)

    if squares is not None:
        squares = squares * unit * unit
    fitting = Fitting(
        solution.trailing_values * unit,
        solution.variance * unit * unit,
        trace * unit * unit,
        squares,
        cutoff,
        solution.residual,
        settings,
    )
    readout = dual.T * unit
    if problem.observable is not None:
        readout = product(weights.T, problem.observable)
    return Operator(
        **moments,
        encode=LinearMap(problem.offset, lifted(basis / unit)),
        dual=LinearMap(problem.offset_y, lifted(dual * unit)),
        drift=product(problem.drift[None], basis / unit)[0],
        readout=readout,
        mean_observable=problem.mean_observable,
        mean_latent=product(problem.mean[None], basis / unit)[0],
        dual_gram=product(dual.T, dual) * unit * unit,
        basis_gram=product(basis.T, basis) / unit / unit,
        singular_values=values * unit,
        alpha=alpha * trace_ratio * unit * unit,
        effective_rank=jnp.sum(is_direction),
        observable_shape=shape,
        given=is_given,
        fitting=fitting,
    )


@partial(jax.jit, static_argnames=("estimator", "settings"))
def _solve_kernel(
    estimator: Estimator,
    problem: KernelRegression,
    across: Array,
    flat: Array,
    unit: Array,
    trace: Array,
    settings: FitSettings,
) -> tuple[dict[str, Any], Basis]:
    """Return the fields of an operator, with coefficients of its maps, and its basis."""
    num_samples = problem.x.shape[0]
    basis = span(estimator, problem)
    # U = sum_i c_i phi(x_i) / sqrt(n), with latent functions u(x) = k(x, X) c / sqrt(n).
    latent_x = product(problem.x, basis.vectors) * num_samples**0.5
    coefficients = basis.vectors / unit / unit * num_samples**-0.5
    basis_gram = product(basis.vectors.T, latent_x) * num_samples**-0.5
    latent_y = product(across, coefficients)
    penalty = problem.alpha * basis_gram
    weights, moments = _latent_moments(latent_x, latent_y, penalty, num_samples)
    dual_gram = product(weights.T, product(problem.y, weights))

    square = unit * unit
    cutoff = problem.cutoff**0.5
    # Values below the cut-off are rounding, which differs between programs.
    is_resolved = basis.trailing_values > cutoff * jnp.max(basis.values)
    fitting = Fitting(
        jnp.where(is_resolved, basis.trailing_values, 0.0) * unit,
        basis.variance * square,
        trace * square,
        None,
        jnp.asarray(cutoff, trace.dtype),
        basis.residual,
        settings,
    )
    fields = moments | {
        "fitting": fitting,
        "encode": coefficients,
        "dual": weights,
        "drift": jnp.zeros(latent_x.shape[1], latent_x.dtype),
        "readout": product(weights.T, flat),
        "mean_observable": jnp.zeros(flat.shape[1:], flat.dtype),
        "mean_latent": jnp.mean(latent_x, 0),
        "dual_gram": dual_gram * num_samples * unit * unit,
        "basis_gram": basis_gram / unit / unit,
        "singular_values": basis.values * unit,
        "alpha": problem.alpha * unit * unit,
        "effective_rank": jnp.sum(basis.values > cutoff * jnp.max(basis.values)),
    }
    return fields, basis


def _latent_moments(
    latent_x: Array, latent_y: Array, penalty: Array, number: int
) -> tuple[Array, dict[str, Array]]:
    """Return weights of the samples in the regression on the latent functions, and its moments."""
    weights = product(latent_x, unshrinking(penalty)) / number
    moments = {
        "core": product(weights.T, latent_y),
        "gram_x": product(latent_x.T, latent_x) / number,
        "gram_y": product(latent_y.T, latent_y) / number,
        "cross_gram": product(latent_x.T, latent_y) / number,
        "penalty": penalty,
    }
    return weights, moments
