"""Cross-validated softmax probes, and their errors for increasing numbers of labelled samples."""

from collections.abc import Sequence
from functools import partial
from itertools import groupby
from math import ceil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_non_negative,
    check_positive,
    fail,
    is_traced,
    warn,
)
from dissociation._core.conversion import to_device
from dissociation._core.groups import group_numbers, warn_repeated
from dissociation._core.linalg import no_derivative
from dissociation._core.types import Count, OneHot, PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.measures._softmax_solver import (
    SoftmaxFit,
    descend_fixed,
    fold_of_samples,
    largest_eigenvalue,
    minimise,
    with_ones,
)

FOLDS = ("stratified", "contiguous")
"""Folds with evenly distributed classes, or contiguous rows as in scikit-learn's `KFold`."""


@validated
def linear_probe(
    x: Float[Array | np.ndarray, "n d"],
    y: OneHot,
    num_splits: int = 10,
    *,
    ridge: Scalar = 1.0,
    folds: str = "stratified",
    groups: Any = None,
    key: PRNGKey | None = None,
    num_samples: Count | None = None,
    tol: Scalar | None = None,
    max_steps: int = 1000,
) -> Float[Array, "n classes"]:
    """Return held-out class probabilities of a converged softmax probe.

    For every fold f, with features x~ standardised by the mean and deviation of its training part
    T_f,

        minimise  sum_{i in T_f} -log softmax(W^T x~_i + b)[y_i]  +  ridge / 2 ||W||^2.

    `ridge` is `1 / C` of `sklearn.linear_model.LogisticRegression` (`2 / C` for two classes), and r
    m for a penalty r on the *mean* loss of m training samples. Larger values suit noisy labels and
    fewer samples than features.

    Args:
        x: Features, which `jax.vmap` or `eqx.filter_vmap` may map over members.
        y: One-hot labels.
        num_splits: Folds, from 2 to n.
        ridge: Positive penalty on the weights; traced. The intercept is not penalised.
        folds: One of `FOLDS`.
        groups: Label of each sample's group, integers or text, if samples depend on each other, as
            copies of a stimulus do. Folds hold whole groups, stratified by the class of a group's
            first sample.
        key: Random key that shuffles samples before they are distributed. Results keep the given
            order.
        num_samples: Leading samples in use, at the cost of all n; traced. Later rows of the result
            are zero.
        tol: Bound of the `gap` of `SoftmaxFit`; default 1e-5 in float32 and 1e-9 in float64.
            Probabilities err by its square root.
        max_steps: Largest number of solver steps.

    Returns:
        Probabilities in [0, 1] that sum to one in each row, from the fold without the sample. Rows
        of a fold that did not converge are NaN (with `argmax` 0), with a `RuntimeWarning` unless
        the call is traced.

    Raises:
        ValueError: If shapes disagree, `y` is not one-hot, `ridge` or `tol` is not positive, or
            there are too few samples for the folds.
        TypeError: If `num_splits` is not a Python integer.

    References:
        Bishop (2006), Pattern Recognition and Machine Learning, eqs. 4.108-4.110.

    >>> x = np.eye(3, dtype=np.float32)[[0, 1, 2, 0, 1, 2]]
    >>> linear_probe(x, x, num_splits=2).argmax(1)
    Array([0, 1, 2, 0, 1, 2], dtype=int32)
    """
    fit, ids = _converged(x, y, num_splits, ridge, folds, groups, key, num_samples, tol, max_steps)
    converged = fit.converged
    if not is_traced(converged) and not np.all(converged):
        number = int(np.sum(~np.asarray(converged)))
        gap = float(jnp.max(fit.gap))
        advice = "Is `x` finite, and not too large?"
        if np.isfinite(gap):
            advice = "Raise `ridge`, `tol` or `max_steps`"
        warn(
            f"{number} of {converged.size} folds did not converge in {int(fit.iterations)} "
            f"steps (gap up to {gap:.1e}): their probabilities are NaN. {advice}"
        )
    # Samples in no fold are beyond the last one, and keep their zeros.
    is_defined = jnp.append(converged, True)[ids]
    return jnp.where(is_defined[:, None], fit.probabilities, jnp.nan)


@validated
def linear_probe_fit(
    x: Float[Array | np.ndarray, "n d"],
    y: OneHot,
    num_splits: int = 10,
    *,
    ridge: Scalar = 1.0,
    folds: str = "stratified",
    groups: Any = None,
    key: PRNGKey | None = None,
    num_samples: Count | None = None,
    tol: Scalar | None = None,
    max_steps: int = 1000,
) -> SoftmaxFit:
    """Return the probe of `linear_probe` with its coefficients and the solver's record.

    L-BFGS stops by `gap`, from f - f* <= ||g||^2 / (2 ridge), a bound if the intercept were
    penalised, too.

    Arguments and errors are those of `linear_probe`. `probabilities` of a fold that is not
    `converged` are those of its last step.

    References:
        Nocedal and Wright (2006), Numerical Optimization, algorithm 7.4.
    """
    fit, _ = _converged(x, y, num_splits, ridge, folds, groups, key, num_samples, tol, max_steps)
    return fit


def _converged(
    x, y, num_splits, ridge, folds, groups, key, num_samples, tol, max_steps
) -> tuple[SoftmaxFit, Array]:
    """Return the fit, and the fold of every sample."""
    x, y, groups, count = _prepare(x, y, groups, num_splits, num_samples, folds)
    # Without a penalty the minimum for separable data is at infinity.
    check_positive("ridge", ridge)
    if tol is None:
        is_single = jnp.finfo(x.dtype).bits <= 32
        tol = 1e-5 if is_single else 1e-9
    check_positive("tol", tol)
    check_count("max_steps", max_steps, minimum=1)
    scalars = (jnp.asarray(ridge, x.dtype), jnp.asarray(tol, x.dtype))
    options = {"num_splits": num_splits, "folds": folds, "limit": max_steps}
    return _solved(minimise, x, y, groups, count, key, *scalars, **options)


@validated
def gradient_probe(
    x: Float[Array | np.ndarray, "n d"],
    y: OneHot,
    num_splits: int = 10,
    *,
    num_steps: Count = 200,
    step_size: Scalar | None = None,
    folds: str = "stratified",
    groups: Any = None,
    key: PRNGKey | None = None,
    num_samples: Count | None = None,
) -> Float[Array, "n classes"]:
    """Return held-out class probabilities of a softmax probe after a number of gradient steps.

    Weights start at zero and follow the gradient of the *mean* training loss on raw features,
    without a penalty. Steps below 2 / L are stable, L = lambda_max(sum_i z_i z_i^T) / (2 m_f), z_i
    = [x_i, 1], summed over all samples in use, with m_f training samples. To compare
    representations at one learning rate, pass their smallest 1 / L.

    The result and errors are those of `linear_probe`.

    Args:
        x: Features, which are not standardised.
        y: One-hot labels.
        num_splits: Folds, from 2 to n.
        num_steps: Steps; traced.
        step_size: Step of all folds for the mean loss; traced; default 1 / L of each fold. Known
            steps above 2 / L of all samples warn.
        folds: One of `FOLDS`.
        groups: Label of each sample's group, as in `linear_probe`.
        key: Random key that shuffles samples before they are distributed.
        num_samples: Leading samples in use; later rows of the result are zero.

    References:
        Boehning (1992), Multinomial logistic regression algorithm, theorem 1.
    """
    x, y, groups, count = _prepare(x, y, groups, num_splits, num_samples, folds)
    _check_descent(x, count, num_steps, step_size)
    # For a size of 0 `descend_fixed` takes 1 / L of each fold.
    if step_size is None:
        step_size = 0.0
    scalars = (jnp.asarray(num_steps, jnp.int32), jnp.asarray(step_size, x.dtype))
    options = {"num_splits": num_splits, "folds": folds}
    probabilities, _ = _solved(descend_fixed, x, y, groups, count, key, *scalars, **options)
    return probabilities


@jax.jit
def stable_step_size(x: Float[Array | np.ndarray, "n d"]) -> Float[Array, ""]:
    """Return the step 1 / L of `gradient_probe` for all of `x`.

    Steps below twice this step are stable.
    """
    return 2.0 * len(x) / largest_eigenvalue(with_ones(x))


def _check_descent(x: Array, count: Count, num_steps: Count, step_size: Scalar | None) -> None:
    """Raise if a number or size of steps is wrong.

    Warn if the size is unstable on the first `count` samples. Traced numbers are not checked.
    """
    check_non_negative("num_steps", num_steps)
    if step_size is None:
        return
    check_positive("step_size", step_size)
    if any(map(is_traced, (x, count, step_size))):
        return
    limit = 2 * float(stable_step_size(x[: int(count)]))
    size = float(step_size)
    if size > limit:
        step = f"`step_size` ({size:.3g}) is above the stable {limit:.3g}"
        warn(f"{step}: the loss may rise, and the probe says little about `x`.")


def _prepare(
    x: Array | np.ndarray,
    y: Array | np.ndarray,
    groups: Any,
    num_splits: int,
    num_samples: Count | None,
    folds: str,
) -> tuple[Array, Array, Array | None, Array]:
    """Return the checked arrays, the group of each sample, and the number of samples in use."""
    size = len(x)
    groups = _read_groups(groups, x, y)
    x = to_device(x)
    if y.shape[1] < 2:
        fail("y", "have at least 2 classes", f"shape {y.shape}", "Pass one-hot labels")
    check_choice("folds", folds, FOLDS)
    check_count("num_splits", num_splits, minimum=2)
    if num_splits > size:
        fail("num_splits", f"be at most the number of samples ({size})", num_splits)
    if num_samples is None:
        num_samples = size
    elif not is_traced(num_samples) and not num_splits <= int(num_samples) <= size:
        bounds = f"lie between `num_splits` ({num_splits}) and the length of `x` ({size})"
        fail("num_samples", bounds, num_samples)
    if groups is not None and not any(map(is_traced, (groups, num_samples))):
        _check_groups(groups, int(np.asarray(num_samples)), num_splits)
    features: Any = no_derivative(x, "A cross-validated probe, as a function of its features,")
    return features, to_device(y, x.dtype), groups, jnp.asarray(num_samples, jnp.int32)


def _read_groups(groups: Any, x: Any, y: Any) -> Array | None:
    """Return the number of each sample's group.

    Without groups, warn of samples that repeat others, and return None.
    """
    if groups is None:
        warn_repeated([x, y], "copies of a held-out sample are fitted")
        return None
    if is_traced(groups):
        return groups
    return to_device(group_numbers(groups, len(x)), jnp.int32)


def _check_groups(groups: Array, count: int, num_splits: int) -> None:
    """Raise unless the first `count` samples are in a group per fold at least."""
    number = len(np.unique(np.asarray(groups)[:count]))
    if number < num_splits:
        requirement = f"label at least `num_splits` ({num_splits}) groups"
        fail("groups", requirement, f"{number} in the {count} samples in use")


# Jitted here because single operations at a new length would compile dozens of programs.
@partial(jax.jit, static_argnames=("solver", "num_splits", "folds", "limit"))
def _solved(
    solver, x, y, groups, count, key, *scalars, num_splits: int, folds: str, **options
) -> tuple[Any, Array]:
    """Return the solver's output, and the fold of every sample."""
    ids = fold_of_samples(jnp.argmax(y, 1), num_splits, count, key, folds, groups)
    # Mapped members are solved sequentially, each with its number of iterations.
    solve = sequential_vmap(partial(solver, num_splits=num_splits, **options))
    return solve(x, y, ids, *scalars), ids


@validated
def transfer_errors(
    features: Float[Array | np.ndarray, "n d"],
    labels: OneHot,
    *,
    key: PRNGKey | None,
    fractions: Sequence[float] = tuple(k / 20 for k in range(1, 21)),
    num_splits: int = 10,
    folds: str = "stratified",
    groups: Any = None,
    probe: str = "converged",
    ridge: Scalar = 1.0,
    num_steps: Count = 200,
    step_size: Scalar | None = None,
    num_buckets: int = 4,
) -> Float[Array, " budgets"]:
    """Return the cross-validated error of a probe on int(p n) samples, for every fraction p.

    Each budget contains all smaller ones. Budgets of similar size share one of up to `num_buckets`
    compiled solvers.

    Args:
        features: Representation of the samples.
        labels: Classes [n], or one-hot [n, classes].
        key: Random key of the order of samples, the same for representations to be compared. None
            keeps the order of rows, the first of which must hold every class.
        fractions: Budgets as fractions of n in (0, 1], in any order, of at least `num_splits`
            samples.
        num_splits: Folds of the cross-validation.
        folds: "stratified" or "contiguous".
        groups: Label of each sample's group, as in `linear_probe`. A `key` shuffles groups, so that
            budgets hold whole groups but for the last one.
        probe: "converged" for `linear_probe`, "gradient" for `gradient_probe`.
        ridge: Penalty of the converged probe.
        num_steps: Steps of the gradient probe.
        step_size: Step of the gradient probe; default 1 / L of each fold, see `gradient_probe`.
        num_buckets: Number of compiled solvers. More take longer to compile and less to run.

    Returns:
        1 - accuracy per fraction, in [0, 1]; NaN for a budget with a fold that did not converge,
        with a `RuntimeWarning` unless the call is traced.
    """
    check_choice("probe", probe, ("converged", "gradient"))
    check_count("num_buckets", num_buckets, minimum=1)
    numbers = _read_groups(groups, features, labels)
    x = to_device(features)
    y = to_device(labels)
    size = len(features)
    if probe == "converged":
        check_positive("ridge", ridge)
        solver = linear_probe
        options = {"ridge": ridge}
        advice = "Raise `ridge`."
    else:
        _check_descent(x, size, num_steps, step_size)
        solver = gradient_probe
        options = {"num_steps": num_steps, "step_size": step_size}
        advice = "Lower `step_size`."
    # As arrays, because a program is compiled for each Python number.
    options = jax.tree.map(jnp.asarray, options)
    predict = eqx.Partial(solver, num_splits=num_splits, folds=folds, **options)

    budgets = [_budget(fraction, size, num_splits) for fraction in fractions]
    if not budgets:
        fail("fractions", "name at least one budget", fractions)
    smallest = min(budgets)
    if key is not None:
        x, y, numbers = _shuffled(key, x, y, numbers)
    elif not is_traced(labels):
        _check_classes(np.asarray(labels), smallest)
    if numbers is not None and not is_traced(numbers):
        _check_groups(numbers, smallest, num_splits)

    def bucket_of(index):
        return ceil(budgets[index] * num_buckets / size)

    order = sorted(range(len(budgets)), key=budgets.__getitem__)
    errors = []
    for _, bucket in groupby(order, key=bucket_of):
        counts = [budgets[i] for i in bucket]
        # The solver runs on the rows of the bucket's largest budget, and masks those beyond each
        # smaller one.
        counts_on_device = to_device(np.array(counts), jnp.int32)
        errors.append(_errors(predict, x, y, numbers, counts[-1], counts_on_device))
    ordered = jnp.concatenate(errors)[np.argsort(order)]

    if not is_traced(ordered):
        num_undefined = int(np.sum(np.isnan(ordered)))
        if num_undefined:
            warn(
                f"a probe did not converge in {num_undefined} of {len(budgets)} budgets: their "
                f"errors are NaN. {advice}"
            )
    return ordered


def _budget(fraction: float, size: int, num_splits: int) -> int:
    """Return the number of samples int(fraction * size); raise if it is too small for the folds."""
    if not 0 < fraction <= 1:
        fail("fractions", "lie in (0, 1]", fraction)
    # In floats 0.29 * 100 is below 29.
    count = int(round(fraction * size, 6))
    if count < num_splits:
        fail("fractions", f"leave at least `num_splits` ({num_splits}) of {size} samples", fraction)
    return count


def _check_classes(labels: np.ndarray, count: int) -> None:
    """Raise unless the first `count` rows have every class of the labels."""
    is_class = np.any(labels, 0)
    is_early = np.any(labels[:count], 0)
    missing = np.flatnonzero(is_class & ~is_early)
    if len(missing):
        fail(
            "labels",
            f"hold every class in the first {count} rows, which are the smallest budget",
            f"none of class {missing[0]}",
            "Pass a `key`, which draws budgets from all rows",
        )


@jax.jit
def _shuffled(
    key: PRNGKey, features: Array, labels: Array, groups: Array | None
) -> tuple[Array, Array, Array | None]:
    """Return samples in another order.

    Groups stay together, and are numbered by the position of their first sample.
    """
    number = len(features)
    order = jax.random.permutation(key, number)
    if groups is None:
        return features[order], labels[order], None
    random_rank = jnp.argsort(order)[groups]
    order = jnp.argsort(random_rank, stable=True)
    groups = groups[order]
    index = jnp.arange(number, dtype=groups.dtype)
    first = jax.ops.segment_min(index, groups, num_segments=number)
    return features[order], labels[order], first[groups]


@eqx.filter_jit
def _errors(
    predict: eqx.Partial,
    features: Array,
    labels: Array,
    groups: Array | None,
    largest: int,
    counts: Array,
) -> Array:
    """Return the errors of a probe on the first `counts[i]` samples for every i, sequentially.

    Counts are at most `largest`.
    """
    x = features[:largest]
    y = labels[:largest]
    if groups is not None:
        groups = groups[:largest]

    def error_of(count):
        probabilities = predict(x, y, groups=groups, num_samples=count)
        is_right = jnp.argmax(probabilities, -1) == jnp.argmax(y, -1)
        is_used = jnp.arange(len(x)) < count
        error = 1.0 - jnp.sum(is_right & is_used) / count.astype(x.dtype)
        return jnp.where(jnp.any(jnp.isnan(probabilities)), jnp.nan, error)

    return lax.map(error_of, counts)
