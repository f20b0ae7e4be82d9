"""Linear predictivity of one representation from another."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core import splits
from dissociation._core.checks import check_choice, check_count, check_non_negative, check_single, fail, is_traced
from dissociation._core.linalg import centre, finite_part, product, rank_cut, scale_of, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity._base import (
    Features,
    OtherFeatures,
    Route,
    Routes,
    Score,
    check_samples,
    column_sizes,
    evaluate,
    in_common_dtype,
    refuse_constant,
    warn_dropped,
)

FOLDS = ("shuffled", "contiguous")
"""Folds by a fixed permutation, or blocks of rows for time series."""


class _Fold(NamedTuple):
    left: Array  # U of the training part, [m, k]
    values: Array
    held_out: Array  # features of the held-out part in the right singular vectors, [h, k]


class _Prepared(NamedTuple):
    target: Array
    folds: tuple[_Fold, ...]
    unit: Array  # of the features; squared, of alpha in what is decomposed


def _centred_parts(x: Array, num_folds: int | None, folds: str) -> tuple[Array, Array, list[tuple[Array, Array]]]:
    """Return features over a power of two, that power, and centred parts of each fold."""
    scale = scale_of(jnp.max(jnp.abs(centre(x))))
    x = centre(x) / scale
    found = []
    for train, test in _parts(x.shape[0], num_folds, folds):
        # Both parts have the training part's mean, as the fit has no access to held-out samples.
        own = centre(x[train])
        found.append((own, x[test] - (x[train][:1] - own[:1])))
    return x, scale, found


def _prepare(x: Array, num_folds: int | None, folds: str) -> _Prepared:
    x, scale, parts = _centred_parts(x, num_folds, folds)
    found = []
    for own, held_out in parts:
        matrix, undefined = finite_part(own)
        left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
        values = jnp.where(values > rank_cut(matrix) * values[0], values, 0.0) + undefined
        found.append(_Fold(left, values, product(held_out, right.T)))
    return _Prepared(x, tuple(found), scale)


def _parts(number: int, num_folds: int | None, folds: str) -> list[tuple[np.ndarray, np.ndarray]]:
    if num_folds is None:
        return [(np.arange(number), np.arange(number))]
    members = splits.folds(number, num_folds, contiguous=folds == "contiguous")
    return [(np.setdiff1d(np.arange(number), test), test) for test in members]


def _path(a: _Prepared, b: _Prepared, alphas: Array, num_folds: int | None, folds: str) -> Array:
    """Return R^2 at every alpha, from one decomposition per fold."""
    y = b.target
    alphas = _per_square(alphas.astype(y.dtype), a.unit)
    wrong = jnp.zeros(alphas.shape[0], y.dtype)
    for fold, (train, test) in zip(a.folds, _parts(y.shape[0], num_folds, folds), strict=True):
        mean = jnp.mean(y[train], 0)[None]
        known = fold.values > 0
        denominator = fold.values[None] ** 2 + alphas[:, None]
        shrunk = jnp.where(known[None], fold.values[None] / jnp.where(known[None], denominator, 1.0), 0.0)
        # In singular vectors a ridge penalty only shrinks, so one decomposition serves all alphas.
        latent = product(fold.left.T, y[train] - mean)
        missed = lambda weights, fold=fold, latent=latent, truth=y[test] - mean: jnp.sum(  # noqa: E731
            (truth - product(fold.held_out * weights[None], latent)) ** 2
        )
        wrong = wrong + jax.lax.map(missed, shrunk) + 0 * jnp.sum(fold.values)
    return 1 - wrong / jnp.sum(centre(y) ** 2)


def _per_square(alpha: Array, unit: Array) -> Array:
    """Return alpha / unit^2 for a power of two whose square may leave the dtype."""
    return jnp.ldexp(alpha, -2 * (jnp.frexp(unit)[1] - 1))


class _Maps(NamedTuple):
    target: Array
    parts: tuple[tuple[Array, Array], ...]  # of each fold: the transposed pseudo-inverse, and the held-out features


def _shrunk(values: Array, alpha: Array) -> Array:
    return values / (values**2 + alpha)


def _prepare_single(x: Array, alpha: Array, num_folds: int | None, folds: str) -> _Maps:
    """Return the maps of one alpha, which have a derivative for every spectrum."""
    x, scale, parts = _centred_parts(x, num_folds, folds)
    alpha = _per_square(alpha.astype(x.dtype), scale)
    return _Maps(x, tuple(_transposed_inverse(own, held_out, alpha) for own, held_out in parts))


def _transposed_inverse(own: Array, held_out: Array, alpha: Array) -> tuple[Array, Array]:
    # Sizes of columns affect a penalty, and the least norm if there are more columns than rows.
    sizes = jnp.where(alpha > 0, 1.0, column_sizes(own)) if own.shape[1] < own.shape[0] else 1.0
    return singular_map(_shrunk, own / sizes, alpha), held_out / sizes


def _single(a: _Maps, b: _Maps | _Prepared, num_folds: int | None, folds: str) -> Array:
    y = b.target
    wrong = jnp.zeros((), y.dtype)
    for (inverse, held_out), (train, test) in zip(a.parts, _parts(y.shape[0], num_folds, folds), strict=True):
        mean = jnp.mean(y[train], 0)[None]
        wrong = wrong + jnp.sum((y[test] - mean - product(held_out, product(inverse.T, y[train] - mean))) ** 2)
    return 1 - wrong / jnp.sum(centre(y) ** 2)


def _held(n: int, p: int) -> int:
    return (n + p) * p


def predictivity_routes(*, alpha: Scalar = 0.0, num_folds: int | None = 5, folds: str = "shuffled") -> Routes:
    """Return one route."""
    check_single("alpha", alpha)
    check_non_negative("alpha", alpha)
    count = _checked_folds(num_folds, folds)
    prepare = eqx.Partial(_prepare_single, alpha=jnp.asarray(alpha, float), num_folds=count, folds=folds)
    return (Route(prepare, eqx.Partial(_single, num_folds=count, folds=folds), effort=20.0 * (count or 1), held=_held),)


def _checked_folds(num_folds: int | None, folds: str) -> int | None:
    check_choice("folds", folds, FOLDS)
    return None if num_folds is None else check_count("num_folds", num_folds, minimum=2)


def _check_sizes(x: Array | np.ndarray, num_folds: int | None) -> None:
    """Raise unless there are samples for all folds, or without folds more samples than features."""
    number, width = x.shape
    if num_folds is not None and num_folds > number:
        fail("num_folds", f"be at most the number of samples ({number})", num_folds)
    if num_folds is None and width >= number - 1:
        advice = "As many features as samples fit anything: give `num_folds`"
        fail("x", "have fewer features than samples less one where nothing is held out", f"{tuple(x.shape)}", advice)


@validated(finite=("x", "y"))
def linear_predictivity(
    x: Features, y: OtherFeatures, *, alpha: Scalar = 0.0, num_folds: int | None = 5, folds: str = "shuffled"
) -> Score:
    """Return R^2 of a linear map from x to y on held-out samples, 1 - sum |y - prediction|^2 / sum |y - mean y|^2.

    The map minimises |Yc - Xc W|^2 + alpha |W|^2 on the other folds, with an intercept; at `alpha` 0 it has the least
    norm.

    Args:
        x: Source features, [n, p].
        y: Target features, [n, q].
        alpha: Non-negative ridge penalty, in squared units of x summed over samples.
        num_folds: Folds. None fits and evaluates on all samples, which gives 1 if features are as many as samples.
        folds: "shuffled" or "contiguous".

    Returns:
        R^2 up to 1, negative if the prediction is worse than y's mean. It is not symmetric.

    Raises:
        ValueError: If the numbers of samples differ, an option is out of range, `y` is constant, or `num_folds` is
            None and `x` has as many features as samples.

    References:
        Yamins et al. (2014), Performance-optimized hierarchical models predict neural responses in higher visual
        cortex; Hoerl and Kennard (1970), Ridge regression.
    """
    routes = predictivity_routes(alpha=alpha, num_folds=num_folds, folds=folds)
    _check_sizes(x, num_folds)
    if not is_traced(alpha) and float(alpha) == 0 and x.shape[1] < x.shape[0] - 1:
        warn_dropped(x=x)
    return evaluate(routes, x, y)


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

    Raises:
        ValueError: As `linear_predictivity`.
    """
    check_non_negative("alphas", alphas)
    count = _checked_folds(num_folds, folds)
    check_samples("x", x.shape[0], 2)
    _check_sizes(x, count)
    refuse_constant("y", y)
    x, y = in_common_dtype(x, y)
    return _whole_path(x, y, jnp.asarray(alphas), count, folds)


@eqx.filter_jit
def _whole_path(x: Array, y: Array, alphas: Array, num_folds: int | None, folds: str) -> Array:
    source, target = _prepare(x, num_folds, folds), _prepare(y, num_folds, folds)
    zero = jnp.zeros((), x.dtype)
    plain = lambda: _single(_prepare_single(x, zero, num_folds, folds), target, num_folds, folds)  # noqa: E731
    free = alphas == 0  # no penalty: columns are scaled to one size
    return jnp.where(
        free, jax.lax.cond(jnp.any(free), plain, lambda: zero), _path(source, target, alphas, num_folds, folds)
    )
