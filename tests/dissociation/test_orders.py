"""Orders of samples, and p-values where few of them differ."""

import itertools
import math

import jax
import numpy as np
import pytest

from dissociation.similarity import MEASURES, compare, permutation_test
from dissociation.similarity._orders import all_orders, kinds_of, log_number, units_of


@pytest.mark.parametrize("labels", ["aab", "abc", "aabbb", "aaaa", "abcd"])
def test_all_orders_are_the_arrangements_but_the_given_one(labels):
    units = units_of(len(labels))
    kinds = kinds_of(np.array([[float(ord(label))] for label in labels]), units)
    orders = all_orders(units, kinds)
    found = ["".join(labels[place] for place in order) for order in orders]
    expected = {"".join(order) for order in itertools.permutations(labels)}
    assert sorted([labels, *found]) == sorted(expected)
    assert np.exp(log_number(kinds)) == pytest.approx(len(expected))


def test_units_of_positions_and_repeats_move_together():
    units = units_of(12, repeats=2, num_positions=2)
    (order,) = all_orders(units, [np.array([0, 0, 1])])[:1]
    rows = np.arange(12).reshape(2, 3, 2)
    moved = rows.ravel()[order].reshape(2, 3, 2)
    assert (np.diff(moved, axis=2) == 1).all()
    assert (moved[1] - moved[0] == 6).all()
    assert sorted(order) == list(range(12))


def test_rows_are_of_one_kind_if_all_numbers_are_equal():
    rows = np.random.default_rng(0).normal(size=(6, 5))
    rows[3] = rows[1]
    rows[4, 0] = 0.0
    rows[5] = rows[4]
    rows[5, 0] = -0.0
    for features in (rows, rows.astype(np.float32)):
        (kinds,) = kinds_of(features, units_of(6))
        assert [kinds[1] == kinds[3], kinds[4] == kinds[5], len(set(kinds.tolist()))] == [
            True,
            True,
            4,
        ]
    rows[3, 2] = np.nextafter(rows[3, 2], 1)
    (kinds,) = kinds_of(rows, units_of(6))
    assert len(set(kinds.tolist())) == 5


def exact(name, x, y):
    """Return the p-value by all orders of the samples of y."""
    measure = MEASURES[name]
    form = measure.with_options()
    # One program for all orders.
    program = jax.jit(lambda x, y: form.compare(form.prepare(x), form.prepare(y)))
    orders = itertools.permutations(range(len(y)))
    values = np.array([program(x, y[list(order)]) for order in orders])
    sign = 1 if measure.larger_is_closer else -1
    return np.mean(sign * values >= sign * values[0] - 1e-5)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("linear_cka", 5),
        ("linear_cka", 6),
        ("debiased_cka", 6),
        ("rbf_cka", 5),
        ("angular_distance", 5),
        ("rsa", 5),
        pytest.param("distance_correlation", 7, marks=pytest.mark.slow),
        pytest.param("linear_cka", 8, marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
def test_p_values_of_few_samples_are_those_of_all_orders(name, number):
    draws = np.random.default_rng(number)
    x = draws.normal(size=(number, 2)).astype(np.float32)
    y = (x[:, :1] + draws.normal(size=(number, 3))).astype(np.float32)
    found = compare(x, y, name, num_blocks=None, num_orders=math.factorial(number))
    assert float(found.p_values) == pytest.approx(exact(name, x, y))


@pytest.mark.parametrize(("first", "second", "orders"), [(3, 3, 20), (4, 4, 70), (2, 6, 28)])
def test_labels_have_no_p_value_below_what_orders_can_give(first, second, orders):
    labels = np.repeat([0.0, 1.0], [first, second])[:, None]
    y = 10 * labels + 0.5 * np.random.default_rng(0).normal(size=(first + second, 3))
    symmetric = 2 if first == second else 1  # the exchange of both labels changes nothing
    for x, other in ((labels, y), (y, labels)):
        found = compare(x, other, "linear_cka", num_blocks=None)
        assert float(found.p_values) == pytest.approx(symmetric / orders)
    tested = permutation_test("linear_cka", labels, y, key=jax.random.key(0), num_draws=99)
    assert float(tested.p_value) == pytest.approx(symmetric / orders)


def test_moments_give_no_p_value_below_one_over_the_number_of_orders():
    labels = np.repeat([0.0, 1.0], [12, 13])[:, None]
    y = 100 * labels + 0.01 * np.random.default_rng(0).normal(size=(25, 3))
    assert float(compare(labels, y, "linear_cka", num_blocks=None).p_values) >= 1 / math.comb(
        25, 12
    )


@pytest.mark.parametrize("name", ["linear_cka", "rsa"])
def test_equal_samples_have_no_other_order_and_no_p_value(name):
    y = np.random.default_rng(0).normal(size=(30, 3))
    for pair in ((np.ones((30, 2)), y), (y, np.ones((30, 2)))):
        with pytest.warns(RuntimeWarning, match="is not defined for"):
            found = compare(*pair, name, num_blocks=None)
        assert np.isnan(found.p_values)
