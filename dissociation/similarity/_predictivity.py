"""Linear predictivity of one representation from another."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core import splits
from dissociation._core.checks import check_choice, check_count, check_non_negative, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.linalg import centre, finite_part, product, rank_cut, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Score

FOLDS = ("shuffled", "contiguous")
"""Folds by a fixed permutation, or blocks of rows for time series."""


class _Prepared(NamedTuple):
    """Prepared representation; `_score` reads `folds` of x, and the other fields of y.

    A fold has the transposed pseudo-inverse of its fitted rows, and its held-out rows. Both are
    [n, p], zero in rows of the other kind, and of features in the same units.
    """

    centred: Array  # [n, p]
    fold_of: Array | None  # fold of each row, [n]
    folds: list[tuple[Array, Array]]


class _Fold(NamedTuple):
    """Rows that are fitted and rows that are predicted, zero elsewhere."""

    is_fitted: Array  # True for rows that are fitted, [n]
    fitted: Array  # [n, p]
    held_out: Array  # [n, p]


def _in_folds(x: Array, fold_of: Array | None, num_folds: int | None) -> list[_Fold]:
    """Return the rows of each fold, by the fold of each row.

    Without folds all rows are fitted and predicted.
    """
    if num_folds is None or fold_of is None:
        centred = centre(x)
        return [_Fold(jnp.ones(len(x), bool), centred, centred)]
    folds = []
    for fold in range(num_folds):
        is_fitted = fold_of != fold
        # All rows are centred by the mean of the fitted ones, because the fit has no access to
        # held-out samples.
        centred = centre(x, is_fitted)
        rows = is_fitted[:, None]
        fitted = jnp.where(rows, centred, 0.0)
        held_out = jnp.where(rows, 0.0, centred)
        folds.append(_Fold(is_fitted, fitted, held_out))
    return folds


def _per_square(alpha: Array, unit: Array) -> Array:
    """Return alpha / unit^2 for a power of two whose square may leave the dtype."""
    _, exponent = jnp.frexp(unit)
    return jnp.ldexp(alpha.astype(unit.dtype), -2 * (exponent - 1))


def _shrunk(values: Array, alpha: Array) -> Array:
    return values / (values**2 + alpha)


def _prepared(
    x: Array, fold_of: Array | None = None, *, alpha: Array, num_folds: int | None
) -> _Prepared:
    """Return a prepared representation, x or y: `Form.prepare` does not depend on the side.

    It has a derivative for every spectrum of x.
    """
    x, unit = base.centred(x)
    alpha = _per_square(alpha, unit)
    folds = []
    for fold in _in_folds(x, fold_of, num_folds):
        # Sizes of columns affect a penalty, and the least norm if there are more columns than rows.
        is_wide = x.shape[1] >= jnp.sum(fold.is_fitted)
        sizes = jnp.where((alpha > 0) | is_wide, 1.0, base.column_sizes(fold.fitted))
        # A penalty leaves no direction negligible.
        cut = jnp.where(alpha > 0, 0.0, rank_cut(x))
        inverse = singular_map(_shrunk, fold.fitted / sizes, alpha, cut)
        folds.append((inverse, fold.held_out / sizes))
    return _Prepared(x, fold_of, folds)


def _score(a: _Prepared, b: _Prepared, num_folds: int | None) -> Array:
    """Return R^2 of b's held-out rows, predicted from those of a."""
    y = b.centred
    error = jnp.zeros((), y.dtype)
    folds = _in_folds(y, b.fold_of, num_folds)
    for (inverse, held_out), fold in zip(a.folds, folds, strict=True):
        weights = product(inverse.T, fold.fitted)
        predicted = product(held_out, weights)
        error = error + jnp.sum((fold.held_out - predicted) ** 2)
    return 1 - error / jnp.sum(centre(y) ** 2)


@validated
def predictivity_form(
    *, alpha: Scalar = 0.0, num_folds: int | None = 5, folds: str = "shuffled"
) -> Form:
    check_non_negative("alpha", alpha)
    check_choice("folds", folds, FOLDS)
    labels = None
    if num_folds is not None:
        num_folds = check_count("num_folds", num_folds, minimum=2)
        contiguous = folds == "contiguous"
        labels = partial(splits.fold_numbers, num_folds=num_folds, contiguous=contiguous)
    cut = ""
    if not is_traced(alpha) and float(alpha) == 0:
        cut = "scaled"

    prepare = eqx.Partial(_prepared, alpha=to_device(alpha, float), num_folds=num_folds)
    score = eqx.Partial(_score, num_folds=num_folds)
    form = Form(prepare, score, minimum=num_folds or 2, narrow=num_folds is None)
    return form._replace(cut=cut, sides="x", labels=labels)


@validated(finite=("x", "y"))
def linear_predictivity(
    x: Features,
    y: OtherFeatures,
    *,
    alpha: Scalar = 0.0,
    num_folds: int | None = 5,
    folds: str = "shuffled",
) -> Score:
    """Return R^2 of a linear map from x to y on held-out samples.

        R^2 = 1 - sum |y - prediction|^2 / sum |y - mean y|^2

    The map minimises |Yc - Xc W|^2 + alpha |W|^2 on the other folds, with an intercept; at `alpha`
    0 it has the least norm.

    Args:
        x: Source features, [n, p].
        y: Target features, [n, q].
        alpha: Non-negative ridge penalty, in squared units of x summed over samples.
        num_folds: Folds. None fits and evaluates on all samples, which gives 1 if features are as
            many as samples.
        folds: "shuffled" or "contiguous".

    Returns:
        R^2 up to 1, negative if the prediction is worse than y's mean. It is not symmetric.

    Raises:
        ValueError: If the numbers of samples differ, an option is out of range, `y` is constant, or
            `num_folds` is None and `x` has as many features as samples.

    References:
        Yamins et al. (2014), Performance-optimized hierarchical models predict neural responses in
        higher visual cortex; Hoerl and Kennard (1970), Ridge regression.
    """
    form = predictivity_form(alpha=alpha, num_folds=num_folds, folds=folds)
    return base.evaluate(form, x, y)


@validated(finite=("x", "y", "alphas"))
def predictivity_path(
    x: Features,
    y: OtherFeatures,
    alphas: Float[Array | np.ndarray, " alphas"],
    *,
    num_folds: int | None = 5,
    folds: str = "shuffled",
) -> Float[Array, " alphas"]:
    """Return `linear_predictivity` at several penalties, from one decomposition per fold.

    The largest value is a little too high, because held-out samples choose its penalty.

    Args:
        x: Source features, [n, p].
        y: Target features, [n, q].
        alphas: Non-negative ridge penalties.
        num_folds: Folds, as in `linear_predictivity`.
        folds: "shuffled" or "contiguous".

    Returns:
        R^2, [alphas].

    """
    check_non_negative("alphas", alphas)
    form = predictivity_form(num_folds=num_folds, folds=folds)
    base.check_size(form, "x", *x.shape)
    base.refuse_constant("y", y)
    x, y = base.in_common_dtype(x, y)
    return _path(x, y, to_device(alphas), form.labels_of(len(x)), num_folds)


def _errors(x: _Fold, y: _Fold, penalties: Array) -> tuple[Array, Array]:
    """Return the squared error of held-out rows at each penalty, and NaN if `x` is not finite."""
    matrix, undefined = finite_part(x.fitted)
    left_vectors, values, right_vectors = jnp.linalg.svd(matrix, full_matrices=False)
    values = jnp.where(values > 0, values, jnp.inf)  # whose inverse is zero
    # In singular vectors a ridge penalty only shrinks, so one decomposition serves all alphas.
    latent = product(left_vectors.T, y.fitted)
    held_out = product(x.held_out, right_vectors.T)

    def squared_error(alpha):
        shrunk = held_out / (values + alpha / values)[None]
        return jnp.sum((y.held_out - product(shrunk, latent)) ** 2)

    return lax.map(squared_error, penalties), undefined


@eqx.filter_jit
def _path(x: Array, y: Array, alphas: Array, fold_of: Array | None, num_folds: int | None) -> Array:
    """Return R^2 at every alpha, from one decomposition per fold."""
    x, unit = base.centred(x)
    y, _ = base.centred(y)
    penalties = _per_square(alphas, unit)
    error = jnp.zeros(alphas.shape, x.dtype)
    folds_x = _in_folds(x, fold_of, num_folds)
    folds_y = _in_folds(y, fold_of, num_folds)
    for fold_x, fold_y in zip(folds_x, folds_y, strict=True):
        errors, undefined = _errors(fold_x, fold_y, penalties)
        error = error + errors + undefined
    penalised = 1 - error / jnp.sum(centre(y) ** 2)

    # Without a penalty, columns are scaled to one size.
    plain = predictivity_form(num_folds=num_folds)._replace(labels=None)
    is_plain = alphas == 0
    zero = jnp.zeros((), x.dtype)
    unpenalised = lax.cond(
        jnp.any(is_plain), lambda: base.compared(plain, x, y, fold_of), lambda: zero
    )
    return jnp.where(is_plain, unpenalised, penalised)
