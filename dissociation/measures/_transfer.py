"""Transfer errors: probe errors of a representation on a new task, for increasing numbers of labelled samples."""

from collections.abc import Callable, Sequence
from itertools import groupby
from math import ceil
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_positive, fail, is_traced, warn
from dissociation._core.types import Count, OneHot, PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.measures._probes import crossval_gradient_predict, crossval_softmax_predict, warn_unstable


@validated
def transfer_errors(
    features: Float[Array | np.ndarray, "n d"],
    labels: OneHot,
    *,
    key: PRNGKey | None,
    fractions: Sequence[float] = tuple(k / 20 for k in range(1, 21)),
    num_splits: int = 10,
    folds: str = "stratified",
    probe: str = "converged",
    ridge: Scalar = 1.0,
    num_steps: Count = 200,
    step_size: Scalar | None = None,
    num_buckets: int = 4,
) -> Float[Array, " budgets"]:
    """Return the cross-validated error of a probe on int(p n) samples, for every fraction p.

    Each budget contains all smaller ones. Budgets of similar size share one of up to `num_buckets` compiled solvers.

    Args:
        features: Representation of the samples.
        labels: Classes [n], or one-hot [n, classes].
        key: Random key of the order of samples, the same for representations to be compared. None keeps the order of
            rows, which is wrong if they are sorted.
        fractions: Budgets as fractions of n in (0, 1], in any order.
        num_splits: Folds of the cross-validation.
        folds: Distribution of samples over folds, "stratified" or "contiguous".
        probe: "converged" for `crossval_softmax_predict`, "gradient" for `crossval_gradient_predict`.
        ridge: Penalty of the converged probe.
        num_steps: Steps of the gradient probe.
        step_size: Step of the gradient probe; default 1 / L of each fold, see `crossval_gradient_predict`.
        num_buckets: Number of compiled solvers. More take longer to compile and less to run.

    Returns:
        1 - accuracy per fraction, in [0, 1]; NaN for a budget with a fold that did not converge, with a
        `RuntimeWarning` unless the call is traced.

    Raises:
        ValueError: If a fraction is outside (0, 1] or leaves fewer samples than folds, if `probe` or `folds` is
            unknown, or if `key` is None and the smallest budget lacks a class.
    """
    check_choice("probe", probe, ("converged", "gradient"))
    check_count("num_splits", num_splits, minimum=2)
    check_count("num_buckets", num_buckets, minimum=1)
    predict, options = _probe(probe, ridge, num_steps, step_size)
    options |= {"num_splits": num_splits, "folds": folds}
    size = features.shape[0]
    counts = [_budget(fraction, size, num_splits) for fraction in fractions]
    if not counts:
        fail("fractions", "name at least one budget", fractions)
    features = jnp.asarray(features)
    if probe == "gradient" and step_size is not None:
        warn_unstable(features, size, step_size)
    if key is not None:
        order = jax.random.permutation(key, size)
        features, labels = features[order], jnp.asarray(labels)[order]
    elif not is_traced(labels):
        known = np.asarray(labels)
        missing = np.flatnonzero(np.any(known, 0) & ~np.any(known[: min(counts)], 0))
        if len(missing):
            wanted = f"hold every class in the first {min(counts)} rows, which are the smallest budget"
            fail("labels", wanted, f"none of class {missing[0]}", "Pass a `key`, which draws budgets from all rows")

    order = sorted(range(len(counts)), key=counts.__getitem__)
    errors = []
    for _, group in groupby(order, key=lambda i: ceil(counts[i] * num_buckets / size)):
        members = [counts[i] for i in group]
        # The solver runs on the rows of the group's largest budget, and masks those beyond each smaller one.
        x, y = features[: members[-1]], jnp.asarray(labels)[: members[-1]]
        errors.append(_errors(predict, options, x, y, jnp.asarray(members, jnp.int32)))
    ordered = jnp.concatenate(errors)[np.argsort(order)]
    if not is_traced(ordered) and np.any(np.isnan(ordered)):
        number = int(np.sum(np.isnan(ordered)))
        advice = "Raise `ridge`." if probe == "converged" else "Lower `step_size`."
        warn(f"a probe did not converge in {number} of {len(counts)} budgets: their errors are NaN. {advice}")
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


def _probe(
    probe: str, ridge: Scalar, num_steps: Count, step_size: Scalar | None
) -> tuple[Callable[..., Array], dict[str, Any]]:
    """Return the function of a probe and the options it takes, after checks of known values."""
    if probe == "converged":
        check_positive("ridge", ridge)
        return crossval_softmax_predict, {"ridge": ridge}
    if step_size is not None:
        check_positive("step_size", step_size)
    if not is_traced(num_steps) and int(num_steps) < 0:
        fail("num_steps", "be at least 0", num_steps)
    return crossval_gradient_predict, {"num_steps": num_steps, "step_size": step_size}


@eqx.filter_jit
def _errors(predict: Callable[..., Array], options: dict[str, Any], x: Array, y: Array, counts: Array) -> Array:
    """Return the errors of a probe on the first `counts[i]` samples for every i, computed sequentially."""

    def error(count: Array) -> Array:
        chances = predict(x, y, num_samples=count, **options)
        right = jnp.argmax(chances, -1) == jnp.argmax(y, -1)
        wrong = 1.0 - jnp.sum(right & (jnp.arange(x.shape[0]) < count)) / count.astype(x.dtype)
        return jnp.where(jnp.any(jnp.isnan(chances)), jnp.nan, wrong)

    return lax.map(error, counts)
