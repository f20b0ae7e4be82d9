"""Linear predictivity of one representation from another."""

from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
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

Maps = tuple[Array, Array | None, list[tuple[Array, Array]]]
"""Centred features, the fold of each row, and of each fold a transposed pseudo-inverse and the held-out features."""


class _Fold(NamedTuple):
    """Rows that are fitted and rows that are predicted, zero elsewhere."""

    kept: Array  # True for rows that are fitted, [n]
    fitted: Array  # [n, p]
    held_out: Array  # [n, p]


def _in_folds(x: Array, fold_of: Array | None, num_folds: int | None) -> list[_Fold]:
    """Return the parts of each fold, by the fold of each row; without folds all rows are fitted and predicted."""
    if num_folds is None or fold_of is None:
        centred = centre(x)
        return [_Fold(jnp.ones(len(x), bool), centred, centred)]
    parts = []
    for fold in range(num_folds):
        kept = fold_of != fold
        # Both parts have the mean of the fitted part, because the fit has no access to held-out
        # samples.
        centred = centre(x, kept)
        rows = kept[:, None]
        parts.append(_Fold(kept, jnp.where(rows, centred, 0.0), jnp.where(rows, 0.0, centred)))
    return parts


def _per_square(alpha: Array, unit: Array) -> Array:
    """Return alpha / unit^2 for a power of two whose square may leave the dtype."""
    return jnp.ldexp(alpha.astype(unit.dtype), -2 * (jnp.frexp(unit)[1] - 1))


def _shrunk(values: Array, alpha: Array) -> Array:
    return values / (values**2 + alpha)


def _maps(x: Array, fold_of: Array | None = None, *, alpha: Array, num_folds: int | None) -> Maps:
    """Return the maps of one alpha, which have a derivative for every spectrum."""
    x, unit = base.centred(x)
    alpha, maps = _per_square(alpha, unit), []
    for fold in _in_folds(x, fold_of, num_folds):
        # Sizes of columns affect a penalty, and the least norm if there are more columns than rows.
        as_they_are = (alpha > 0) | (x.shape[1] >= jnp.sum(fold.kept))
        sizes = jnp.where(as_they_are, 1.0, base.column_sizes(fold.fitted))
        # A penalty leaves no direction negligible.
        cut = jnp.where(alpha > 0, 0.0, rank_cut(x))
        maps.append((singular_map(_shrunk, fold.fitted / sizes, alpha, cut), fold.held_out / sizes))
    return x, fold_of, maps


def _score(a: Maps, b: Maps, num_folds: int | None) -> Array:
    y, fold_of, _ = b
    wrong = jnp.zeros((), y.dtype)
    for (inverse, held_out), fold in zip(a[2], _in_folds(y, fold_of, num_folds), strict=True):
        predicted = product(held_out, product(inverse.T, fold.fitted))
        wrong = wrong + jnp.sum((fold.held_out - predicted) ** 2)
    return 1 - wrong / jnp.sum(centre(y) ** 2)


@validated
def predictivity_form(
    *, alpha: Scalar = 0.0, num_folds: int | None = 5, folds: str = "shuffled"
) -> Form:
    check_non_negative("alpha", alpha)
    check_choice("folds", folds, FOLDS)
    count = None if num_folds is None else check_count("num_folds", num_folds, minimum=2)
    prepare = eqx.Partial(_maps, alpha=to_device(alpha, float), num_folds=count)
    score = eqx.Partial(_score, num_folds=count)
    cut = "scaled" if not is_traced(alpha) and float(alpha) == 0 else ""
    labels = None
    if count is not None:
        labels = partial(splits.fold_numbers, num_folds=count, contiguous=folds == "contiguous")
    return Form(
        prepare, score, minimum=count or 2, narrow=count is None, cut=cut, sides="x", labels=labels
    )


@validated(finite=("x", "y"))
def linear_predictivity(
    x: Features,
    y: OtherFeatures,
    *,
    alpha: Scalar = 0.0,
    num_folds: int | None = 5,
    folds: str = "shuffled",
) -> Score:
    """Return R^2 of a linear map from x to y on held-out samples, 1 - sum |y - prediction|^2 / sum |y - mean y|^2.

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
    return base.evaluate(predictivity_form(alpha=alpha, num_folds=num_folds, folds=folds), x, y)


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


@eqx.filter_jit
def _path(x: Array, y: Array, alphas: Array, fold_of: Array | None, num_folds: int | None) -> Array:
    """Return R^2 at every alpha, from one decomposition per fold."""
    (x, unit), (y, _) = base.centred(x), base.centred(y)
    penalties, wrong = _per_square(alphas, unit), jnp.zeros(alphas.shape, x.dtype)
    parts = (_in_folds(each, fold_of, num_folds) for each in (x, y))
    for (_, own, held_out), (_, known, truth) in zip(*parts, strict=True):
        matrix, undefined = finite_part(own)
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
        values = jnp.where(values > 0, values, jnp.inf)  # whose inverse is zero
        # In singular vectors a ridge penalty only shrinks, so one decomposition serves all alphas.
        latent, ahead = product(left.T, known), product(held_out, right.T)

        def missed(
            alpha: Array, values: Array = values, fold: tuple[Array, ...] = (ahead, latent, truth)
        ) -> Array:
            ahead, latent, truth = fold
            return jnp.sum((truth - product(ahead / (values + alpha / values)[None], latent)) ** 2)

        wrong = wrong + jax.lax.map(missed, penalties) + undefined
    penalised = 1 - wrong / jnp.sum(centre(y) ** 2)
    # Without a penalty, columns are scaled to one size.
    plain = predictivity_form(num_folds=num_folds)._replace(labels=None)
    zero = jnp.zeros((), x.dtype)
    unpenalised = jax.lax.cond(
        jnp.any(alphas == 0), lambda: base.compared(plain, x, y, fold_of), lambda: zero
    )
    return jnp.where(alphas == 0, unpenalised, penalised)
