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
    Fitting,
    Kernel,
    KernelMap,
    Linear,
    LinearMap,
    Operator,
    as_module,
    check_kernel,
    compiled_by_kernel,
    extremes,
    gram,
    kernel_alpha,
    kernel_features,
    nystroem_map,
    unshrinking,
)
from koopman._operators._pairs import (
    Given,
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
            above 2e-10 tr(C_x) (for all members of a `vmap`); else "qr". Not for a kernel without
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
        centred = x.center if isinstance(x, Moments) else center
        solver = estimator.solver or estimator.feature_solver
        operator = _fit(estimator, problem, shape, solver, route, centred=centred)
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
    if not any(is_traced(part) for part in (operator.core, operator.alpha, estimator.rank)):
        warn_of(findings_of(operator, x, y))
    return operator


def _features(
    x: Data, y: Given | None, centres: Given | None, observable: Given | None, center: bool
) -> tuple["_Problem", tuple[int, ...]]:
    """Return the problem of pairs or moments of explicit features, and the shape of one observable."""
    if centres is not None:
        fail("kernel", "be given with `centres`", "None")
    if not isinstance(x, Moments):
        if y is None:
            fail("y", "be given with `x`", "None", "See koopman.lagged_pairs")
        return _from_pairs(x, y, observable, center)
    if y is not None or observable is not None or center:
        fail(
            "x",
            "stand alone when it is `Moments`: they hold successors, observable and means",
            "more arguments",
        )
    return _from_moments(x)


def _states(x: Data, y: Given | None, center: bool) -> tuple[Given, Given]:
    """Return states and successors for a kernel."""
    if isinstance(x, Moments) or y is None:
        got = "moments" if isinstance(x, Moments) else "no `y`"
        fail("x", "be states, with their successors `y`, where there is a `kernel`", got)
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
    centred: bool = False,
) -> Operator:
    """Fit features; `lift` [m, d] maps their coefficients to those of k(x, centres)."""
    (number, width), dtype, given = (
        (problem.pairs, problem.x.shape[1]),
        problem.x.dtype,
        estimator.alpha is not None,
    )
    asked = to_device(estimator.alpha, dtype) if given else fallback
    # Without regularisation the span does not depend on the units of columns, and rank cuts must
    # not either.
    free = estimator.rank is None or estimator.inverts_all or estimator.size == width
    level = free and (asked is None or (not is_traced(asked) and float(asked) == 0.0))
    problem, alpha, largest, trace, squares, units = _in_units(problem, asked, level)
    size, active, solver = latent(estimator.rank, width, "features", solver, SOLVERS)
    rounding = float(jnp.finfo(dtype).eps)
    # The QR factor of the data does not square the condition number, which float32 needs.
    few = isinstance(number, int) and number < 2 * width
    if route == "auto" and (rounding > 1e-12 or width < 64 or few):
        route = "qr"
    regression = FeatureRegression(problem.x, problem.y, alpha, active, size, solver, route)
    if not is_traced(largest):
        _refuse_features(estimator, regression, problem, largest, trace, units[0], fallback)
    compared = ""
    if fallback is not None:
        compared = (
            "the mean eigenvalue of C_x" if estimator.rank is None else f"eigenvalue {size} of C_x"
        )
    hidden = squares if asked is None and not level else None
    words = _Words(compared, estimator.rank is not None, estimator.inverts_all, centred)
    static = eqx.filter(estimator, False)
    return _solve(static, problem, regression, units, lift, hidden, trace, shape, given, words)


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
    width, dtype = problem.x.shape[1], problem.x.dtype
    if float(largest) > 0:
        check_square("x", float(trace) / width * float(unit) * float(unit), "a mean square", dtype)
    alpha = regression.alpha
    # The default is zero too if all features are.
    if is_traced(alpha) or is_traced(problem.x) or is_traced(problem.y) or float(alpha) != 0.0:
        return
    if float(trace) == 0 and (fallback is not None or np.asarray(problem.offset).any()):
        got = (
            "constant ones alone"
            if fallback is None
            else "k(x, centres) = 0, as all are far from the centres"
        )
        fail("x", "hold features that vary", got)
    values = np.linalg.svd(np.asarray(_root(problem.x)), compute_uv=False)
    rounding = float(jnp.finfo(dtype).eps)
    cutoff = (8 * rounding) ** 0.5 if regression.route == "covariance" else width * rounding
    refuse_singular(estimator, regression, values, cutoff, "the covariance of `x`", "C_x")


class _Words(NamedTuple):
    """Static fields of `Fitting`."""

    compared: str
    ranked: bool
    whole: bool
    centred: bool


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
    observable = None if problem.observable is None else problem.observable * scale
    x, y = problem.x * (scale / unit), problem.y * (scale / unit)
    sizes = scale_of(jnp.max(jnp.abs(x), 0))
    # A constant column about its mean is rounding, which levelling would amplify.
    floor = 4 * jnp.finfo(x.dtype).eps * jnp.abs(problem.offset) / unit / sizes
    x = jnp.where((jnp.sqrt(jnp.sum((x / sizes[None]) ** 2, 0)) < floor)[None], 0.0, x)
    trace = jnp.sum(x**2)
    sizes = sizes if level else jnp.ones_like(sizes)
    x = x / sizes[None]
    within = jnp.sum(x**2)
    alpha = (
        default_alpha(within, jnp.minimum(problem.pairs, x.shape[1]))
        if alpha is None
        else alpha / unit / unit
    )
    share = jnp.where(within > 0, trace, 1.0) / jnp.where(within > 0, within, 1.0)
    squares = jnp.sum(x**2, 0)
    return (
        problem._replace(x=x, y=y, observable=observable),
        alpha,
        largest,
        trace,
        squares,
        (unit, sizes, share),
    )


_root = jax.jit(gram_root)


def _fit_on_centres(
    estimator: Estimator,
    x: Given,
    y: Given,
    kernel: Kernel,
    centres: Given,
    observable: Given | None,
    route: str,
) -> Operator:
    x, y, flat, shape = checked_pairs(x, y, observable, to_device)
    features = nystroem_map(kernel, centres)
    arrays = features.centres, features.coefficients, x, y
    features_x, features_y, fallback = _centre_features(features.kernel, *arrays)
    problem, _ = _from_pairs(features_x, features_y, flat, center=False)
    solver = estimator.solver or "auto"
    fitted = _fit(estimator, problem, shape, solver, route, fallback, features.coefficients)
    maps = [
        KernelMap(features.kernel, features.centres, linear.matrix)
        for linear in (fitted.encode, fitted.dual)
        if isinstance(linear, LinearMap)
    ]
    return eqx.tree_at(lambda o: (o.encode, o.dual), fitted, maps)


@compiled_by_kernel
def _centre_features(
    kernel: Kernel, centres: Array, coefficients: Array, x: Array, y: Array
) -> tuple[Array, Array, Array]:
    """Return Nystroem features of x and y, and the default `alpha`."""
    features_x = kernel_features(kernel, centres, coefficients, x)
    features_y = kernel_features(kernel, centres, coefficients, y)
    return (
        features_x,
        features_y,
        kernel_alpha(type(kernel) is Linear, jnp.sum(features_x**2) / x.shape[0]),
    )


def _from_pairs(
    x: Given, y: Given, observable: Given | None, center: bool
) -> tuple[_Problem, tuple[int, ...]]:
    x, y, flat, shape = checked_pairs(x, y, observable, as_known)
    arrays = [x, y]
    if observable is not None:
        arrays.append(flat)
    is_known = all(isinstance(array, np.ndarray) for array in arrays)
    about_means = _about_means if is_known else _compiled_about_means
    means, drift, centred = about_means(arrays, center)
    rows: Any = few_rows(*(centred or arrays))
    if observable is None:
        rows = (*rows, None)
    number, dtype = x.shape[0], x.dtype
    zero, zero_y, zero_o = (np.zeros(part.shape[1], dtype) for part in (x, y, flat))
    offsets = [zero, zero_y, zero_o, zero, means[0]]
    if center:  # without an observable the last mean is that of y
        offsets = [*means[:2], means[-1], drift, zero]
    return _Problem._make([*rows, *offsets, np.asarray(number**-0.5, dtype), number]), shape


def _about_means(arrays: list[Any], center: bool) -> tuple[list[Any], Any, list[Any]]:
    """Return the means of x, y and perhaps an observable, that of y less that of x, and, if `center`, the arrays."""
    means = [mean_of(array)[0] for array in arrays]
    # By the rounded mean, which the operator subtracts too.
    centred = [array - mean[None] for array, mean in zip(arrays, means, strict=True) if center]
    return means, means[1] - means[0], centred


_compiled_about_means = jax.jit(_about_means, static_argnames="center")


def _from_moments(seen: Moments) -> tuple[_Problem, tuple[int, ...]]:
    width, width_y, _ = seen.widths
    if width_y != width:
        fail(
            "x",
            f"hold moments of as many features of the successors as of the states ({width})",
            width_y,
        )
    if not is_traced(seen.root) and not np.isfinite(np.asarray(seen.root)).all():
        fail(
            "x",
            "be moments of finite data",
            "sums that are not finite",
            "Outside jit `moments` names the row that is not finite",
        )
    return _of_moments(seen), seen.mean_observable.shape


@jax.jit
def _of_moments(seen: Moments) -> _Problem:
    width = seen.widths[0]
    x, y, observable = jnp.split(seen.root * jax.lax.rsqrt(seen.count), [width, 2 * width], 1)
    offset, offset_y, mean = seen.mean_x, seen.mean_y, seen.mean_observable
    drift = (offset_y - offset) + (seen.rest[1 + width : 1 + 2 * width] - seen.rest[1 : 1 + width])
    about = jnp.zeros_like(offset)
    if not seen.center:
        about, offset, offset_y, drift, mean = offset, about, about, about, jnp.zeros_like(mean)
    one = jnp.ones_like(seen.count)
    return _Problem(x, y, observable, offset, offset_y, mean, drift, about, one, seen.count)


def _fit_with_kernel(
    estimator: Estimator, x: Given, y: Given, kernel: Kernel, observable: Given | None
) -> Operator:
    """Fit by exact Gram matrices K = k(X, X) / n and L = k(Y, Y) / n."""
    x, y, flat, shape = checked_pairs(x, y, observable, to_device)
    # Measured numbers of matrices: a full eigendecomposition takes more.
    refuse_large_gram(x, 7 if estimator.rank is None else 3)
    kernel, number = as_module(kernel), x.shape[0]
    solver, solvers = estimator.solver or "auto", estimator.kernel_solvers
    size, active, solver = latent(estimator.rank, number, "samples", solver, solvers)
    given, is_linear = estimator.alpha is not None, type(kernel) is Linear
    asked = to_device(estimator.alpha, x.dtype) if given else None
    grams = gram(kernel, x, x), gram(kernel, y, y)
    gram_x, gram_y, alpha, unit, trace, extreme = _kernel_in_units(*grams, asked, is_linear)
    for extreme_of_states in extreme:
        check_kernel(extreme_of_states)
    if not is_traced(gram_x):
        check_square("kernel", float(trace) * float(unit) ** 2, "a mean of k(x, x)", gram_x.dtype)
    known = not (is_traced(alpha) or is_traced(gram_x) or is_traced(gram_y))
    if solver == "auto":
        solver = estimator.choose_kernel_solver(gram_x, alpha, size)
        if solver == "krylov" and estimator.inverts_all and is_linear and not given:
            solver = "spectral"  # the default `alpha` of rounding is too small for a factor
    problem = KernelRegression(gram_x, gram_y, alpha, active, size, solver)
    compared = (
        "the mean of k(x, x)" if estimator.rank is None else f"eigenvalue {size} of k(X, X) / n"
    )
    words = _Words(compared, estimator.rank is not None, estimator.inverts_all, False)
    static = eqx.filter(estimator, False)
    fields, basis = _solve_kernel(static, problem, gram(kernel, y, x), flat, unit, trace, words)
    if known and estimator.inverts_all and solver == "krylov":
        check_factor(problem, basis)
    elif known and given and float(alpha) == 0.0:
        # Principal components have the leading eigenvalues of K in their basis, and ridge all.
        whole = estimator.inverts_all
        squares = (
            np.linalg.eigvalsh(np.asarray(gram_x))[::-1] if whole else np.asarray(basis.values) ** 2
        )
        refuse_singular(
            estimator, problem, squares, problem.cutoff, "the kernel matrix of `x`", "K"
        )
    maps = {
        name: KernelMap(kernel, states, fields.pop(name))
        for name, states in (("encode", x), ("dual", y))
    }
    return Operator(**maps, **fields, observable_shape=shape, given=given)


@partial(jax.jit, static_argnames="is_linear")
def _kernel_in_units(
    gram_x: Array, gram_y: Array, alpha: Array | None, is_linear: bool
) -> tuple[Array, Array, Array, Array, Array, tuple[Array, Array]]:
    """Return K and L in a unit of features, alpha, the unit, the trace of K, and `extremes`; squares are in range."""
    number, extreme = len(gram_x), (extremes(gram_x), extremes(gram_y))
    gram_x, gram_y = gram_x / number, gram_y / number
    unit = scale_of(jnp.sqrt(jnp.trace(gram_x)))
    gram_x, gram_y = gram_x / unit / unit, gram_y / unit / unit
    trace = jnp.trace(gram_x)
    alpha = kernel_alpha(is_linear, trace) if alpha is None else alpha / unit / unit
    return gram_x, gram_y, alpha, unit, trace, extreme


@partial(jax.jit, static_argnames=("estimator", "shape", "given", "words"))
def _solve(
    estimator: Estimator,
    problem: _Problem,
    regression: FeatureRegression,
    units: tuple[Array, Array, Array],
    lift: Array | None,
    squares: Array | None,
    trace: Array,
    shape: tuple[int, ...],
    given: bool,
    words: _Words,
) -> Operator:
    """Return the operator of a regression in units, whose columns' mean squares and tr(C_x) are `squares`, `trace`."""
    solution = span(estimator, regression)
    basis, values, alpha, cutoff = (
        solution.vectors,
        solution.values,
        regression.alpha,
        regression.threshold,
    )
    unit, sizes, share = units
    penalty = alpha * product(basis.T, basis)
    latent_x, basis = product(problem.x, basis), basis / sizes[:, None]
    weights, moments = _latent_moments(latent_x, product(problem.y, basis), penalty, 1)
    dual = product(problem.y.T, weights)
    # If columns of the successors differ in units, small singular values may be directions.
    heights = jnp.max(jnp.abs(problem.y), 0)
    uneven = jnp.any(
        (heights > 0) & (heights < jnp.finfo(heights.dtype).eps ** 0.5 * jnp.max(heights))
    )
    regular = jnp.diagonal(moments["gram_x"] + penalty)

    def lifted(coefficients: Array) -> Array:
        return coefficients if lift is None else product(lift, coefficients)

    fitting = Fitting(
        solution.rest * unit,
        solution.variance * unit * unit,
        trace * unit * unit,
        None if squares is None else squares * unit * unit,
        cutoff,
        solution.residual,
        *words,
    )
    return Operator(
        **moments,
        encode=LinearMap(problem.offset, lifted(basis / unit)),
        dual=LinearMap(problem.offset_y, lifted(dual * unit)),
        drift=product(problem.drift[None], basis / unit)[0],
        readout=dual.T * unit
        if problem.observable is None
        else product(weights.T, problem.observable),
        mean_observable=problem.mean_observable,
        mean_latent=product(problem.mean[None], basis / unit)[0],
        dual_gram=product(dual.T, dual) * unit * unit,
        basis_gram=product(basis.T, basis) / unit / unit,
        singular_values=values * unit,
        alpha=alpha * share * unit * unit,
        effective_rank=jnp.sum(jnp.where(uneven, regular > 0.5, values > cutoff * jnp.max(values))),
        observable_shape=shape,
        given=given,
        fitting=fitting,
    )


@partial(jax.jit, static_argnames=("estimator", "words"))
def _solve_kernel(
    estimator: Estimator,
    problem: KernelRegression,
    across: Array,
    flat: Array,
    unit: Array,
    trace: Array,
    words: _Words,
) -> tuple[dict[str, Any], Basis]:
    """Return the fields of an operator, with coefficients of its maps, and its basis."""
    number, basis = problem.x.shape[0], span(estimator, problem)
    # U = sum_i c_i phi(x_i) / sqrt(n), with latent functions u(x) = k(x, X) c / sqrt(n).
    latent_x = product(problem.x, basis.vectors) * number**0.5
    coefficients = basis.vectors / unit / unit * number**-0.5
    basis_gram = product(basis.vectors.T, latent_x) * number**-0.5
    latent_y = product(across, coefficients)
    weights, moments = _latent_moments(latent_x, latent_y, problem.alpha * basis_gram, number)
    square, cutoff = unit * unit, jnp.asarray(problem.cutoff**0.5, trace.dtype)
    measured = basis.rest * unit, basis.variance * square, trace * square
    fields = moments | {
        "fitting": Fitting(*measured, None, cutoff, basis.residual, *words),
        "encode": coefficients,
        "dual": weights,
        "drift": jnp.zeros(latent_x.shape[1], latent_x.dtype),
        "readout": product(weights.T, flat),
        "mean_observable": jnp.zeros(flat.shape[1:], flat.dtype),
        "mean_latent": jnp.mean(latent_x, 0),
        "dual_gram": product(weights.T, product(problem.y, weights)) * number * unit * unit,
        "basis_gram": basis_gram / unit / unit,
        "singular_values": basis.values * unit,
        "alpha": problem.alpha * unit * unit,
        "effective_rank": jnp.sum(basis.values > problem.cutoff**0.5 * jnp.max(basis.values)),
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
