"""Measures that divide samples at random, under intervals that leave samples out."""

import jax.numpy as jnp
import numpy as np
import pytest

from dissociation._core.splits import fold_numbers, folds
from dissociation.similarity import compare, custom_measure, jackknife_interval, linear_predictivity
from dissociation.similarity._inference import kept_rows

DRAWS = np.random.default_rng(5)
HIDDEN = DRAWS.normal(size=(60, 4))
X = HIDDEN @ DRAWS.normal(size=(4, 6)) + 0.7 * DRAWS.normal(size=(60, 6))
Y = HIDDEN @ DRAWS.normal(size=(4, 8)) + 0.7 * DRAWS.normal(size=(60, 8))


def r_squared(x, y, fold_of):
    """Return R^2 of least squares on held-out rows, in float64."""
    wrong = 0.0
    for fold in np.unique(fold_of):
        train = fold_of != fold
        x_mean = x[train].mean(0)
        y_mean = y[train].mean(0)
        weights = np.linalg.lstsq(x[train] - x_mean, y[train] - y_mean, rcond=None)[0]
        wrong += np.sum((y[~train] - y_mean - (x[~train] - x_mean) @ weights) ** 2)
    return 1 - wrong / np.sum((y - y.mean(0)) ** 2)


def intervals(measure_of, num_blocks):
    """Return value and interval of a function of rows."""
    blocks = kept_rows(60, num_blocks)
    leave_outs = np.array([measure_of(rows) for size in blocks for rows in size])
    sizes = np.array([60.0 - len(rows) for size in blocks for rows in size])
    value = measure_of(np.arange(60))
    return value, jackknife_interval(value, leave_outs, sizes=sizes, bounds=(-np.inf, 1.0))


@pytest.mark.parametrize(("kind", "num_blocks"), [("shuffled", 12), ("contiguous", 7)])
@pytest.mark.slow
def test_rows_keep_their_folds_when_others_are_left_out(kind, num_blocks):
    fold_of = fold_numbers(60, 3, contiguous=kind == "contiguous")
    value, interval = intervals(lambda rows: r_squared(X[rows], Y[rows], fold_of[rows]), num_blocks)
    found = compare(
        X, Y, "linear_predictivity", num_folds=3, folds=kind, num_blocks=num_blocks, p_values=False
    )
    assert float(found.values) == pytest.approx(value, abs=1e-4)
    for name in ("estimate", "low", "high"):
        assert float(getattr(found, name)) == pytest.approx(
            float(getattr(interval, name)), abs=2e-3
        )


def test_fold_numbers_are_those_of_folds():
    for number, num_folds in ((60, 5), (61, 7)):
        numbers = fold_numbers(number, num_folds)
        for fold, rows in enumerate(folds(number, num_folds)):
            np.testing.assert_array_equal(np.flatnonzero(numbers == fold), rows)


def half_by_rows(x, y, rows):
    """Return a similarity of the half of the samples with even numbers."""
    chosen = (rows % 2 == 0)[:, None]
    x = jnp.where(chosen, x, 0.0)
    y = jnp.where(chosen, y, 0.0)
    return jnp.sum((x.T @ y) ** 2) / (jnp.linalg.norm(x.T @ x) * jnp.linalg.norm(y.T @ y))


def test_a_custom_measure_gets_the_numbers_of_its_rows():
    measure = custom_measure(
        half_by_rows, identical=1.0, range=(0.0, 1.0), population=True, rows=True
    )
    value, interval = intervals(lambda rows: float(half_by_rows(X[rows], Y[rows], rows)), 20)
    found = compare(X, Y, measure, num_blocks=20, p_values=False)
    assert float(found.values) == pytest.approx(float(value), abs=1e-5)
    assert float(found.standard_error) == pytest.approx(float(interval.standard_error), rel=1e-2)
    assert float(measure(X, Y)) == pytest.approx(float(value), abs=1e-5)
    with pytest.raises(TypeError, match="take 3 arguments"):
        compare(X, Y, custom_measure(lambda x, y: 0.0, rows=True))


def test_columns_that_depend_on_others_or_are_constant_add_nothing():
    x = np.concatenate([X, X[:, :2], np.ones((60, 1))], 1)
    fold_of = fold_numbers(60, 5)
    assert float(linear_predictivity(x, Y)) == pytest.approx(r_squared(x, Y, fold_of), abs=1e-4)
