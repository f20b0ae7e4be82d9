"""Columns in mixed units: ranks are counted without them where the definition does not depend on them."""

import ast
import re
import warnings
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dissociation
from dissociation.linear import GLS, LinearNetwork, make_task, placement, second_readout_loss
from dissociation.rewrites import linear_cka_range
from dissociation.similarity import (
    linear_predictivity,
    partial_whitening_distance,
    predictivity_path,
)

DRAWS = np.random.default_rng(0)
X = DRAWS.normal(size=(80, 4))
MAP = DRAWS.normal(size=(4, 3))
UNITS = np.array([1e6, 1.0, 1e-3, 30.0])


@pytest.mark.parametrize("dependent", [False, True])
def test_a_task_has_the_rank_of_its_inputs_in_any_units(dependent):
    x = np.concatenate([X, X[:, :1] + X[:, 1:2]], 1) if dependent else X
    units = np.append(UNITS, 1e-5)[: x.shape[1]]
    y = X @ MAP
    plain = make_task(x, y)
    scaled = make_task(x * units, y * [1.0, 1e5, 1e-4])
    assert len(scaled.input_values) == len(plain.input_values) == 4
    assert scaled.rank == plain.rank == 3
    predictions = (x * units) @ np.asarray(scaled.best_map, float).T
    np.testing.assert_allclose(predictions, y * [1.0, 1e5, 1e-4], rtol=2e-3, atol=1e-2)
    assert len(make_task(x * units, y, rtol=1e-3).input_values) == 1  # as asked


@pytest.mark.parametrize("alpha", [0.0, 1e-3, 1.0])
def test_a_ridge_has_no_cut(alpha):
    x = X * [1e5, 1.0, 1.0, 1.0]
    y = X[:, 1:] + 0.1 * DRAWS.normal(size=(80, 3))
    expected = float(linear_predictivity(X, y, num_folds=2))
    assert expected > 0.9
    assert float(linear_predictivity(x, y, alpha=alpha, num_folds=2)) == pytest.approx(
        expected, abs=2e-3
    )
    assert float(predictivity_path(x, y, np.array([alpha]), num_folds=2)[0]) == pytest.approx(
        expected, abs=2e-3
    )


def test_the_span_of_hidden_neurons_does_not_depend_on_their_scales():
    first = DRAWS.normal(size=(6, 4)).astype(np.float32)
    second = DRAWS.normal(size=(3, 6)).astype(np.float32)
    scales = np.array([1e3, 1e-3, 1e3, 1e-3, 1.0, 1.0], np.float32)
    network = LinearNetwork((jnp.asarray(first * scales[:, None]), jnp.asarray(second / scales)))
    assert float(second_readout_loss(network, X, X @ MAP)) < 1e-8


def test_limits_of_cka_do_not_depend_on_the_dtype_or_the_number_of_samples():
    hidden = DRAWS.normal(size=(20_000, 6))
    x = hidden * [1, 1, 1, 1e-3, 1e-3, 1e-3]
    reference = hidden @ DRAWS.normal(size=(6, 6)) + 0.1 * DRAWS.normal(size=(20_000, 6))
    narrow = linear_cka_range(x.astype(np.float32), reference.astype(np.float32))
    wide = linear_cka_range(x, reference)
    assert narrow.low == pytest.approx(wide.low, rel=1e-3)
    assert narrow.high == pytest.approx(wide.high, rel=1e-3)


def test_a_cut_that_depends_on_units_names_its_columns():
    """Columns from 1e-3 to 1e5: a partial whitening drops those that are small beside the largest."""
    x = X * [1e4, 1.0, 1e-3, 1.0]
    words = "1 of the directions of `x` exceed rounding, .*Column with most of each: 2. Float64"
    with pytest.warns(RuntimeWarning, match=words):
        partial_whitening_distance(x, X[:, :2], a=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        partial_whitening_distance(X * [10.0, 1.0, 0.1, 1.0], X[:, :2], a=0.5)
        partial_whitening_distance(
            np.concatenate([X, X[:, :1] + X[:, 1:2]], 1), X[:, :2], a=0.5
        )  # dependent


def test_the_nearest_network_of_a_family_does_not_depend_on_sizes_of_neurons():
    task = make_task(X, X @ MAP)
    network = GLS.sample(task, 6, key=jax.random.key(0))
    scales = np.array([1e3, 1e-3, 1e2, 1e-2, 1.0, 10.0], np.float32)
    first, second = network.weights
    scaled = LinearNetwork((first * scales[:, None], second / scales[None]))
    for one in (network, scaled):
        nearest = GLS.project(task, one)
        assert np.isfinite(placement(task, one).distance[0])
        assert np.isfinite(nearest.weights[1]).all()
        np.testing.assert_allclose(nearest.map, task.best_map, atol=2e-4)
        np.testing.assert_array_equal(nearest.weights[0], one.weights[0])


CUTS = re.compile(r"\b(\w*values|squares)(\[-?[01]\]|\.max\()|max\(\w*(values|squares)")
ALLOWED = {
    "figures/manifold.py": 1,  # principal axes that are drawn
    "linear/_noise.py": 1,  # after columns are evened out
    "measures/_collapse.py": 1,  # of class means, whose units are those of the features
    "measures/_coordinates.py": 1,  # of whitened coordinates
    "rewrites/_freedom.py": 1,  # of normalised kernels
    "rewrites/_null_spaces.py": 2,  # an explicit `rtol`
    "rewrites/_plant_activity.py": 3,
    "similarity/_base.py": 2,  # of columns evened out, for warnings
}


def is_multiple_of_largest(node):
    """Return True for a product with the largest of some singular values."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)):
        return False
    factors = [side for side in (node.left, node.right) if not isinstance(side, ast.BinOp)]
    return any(CUTS.search(ast.unparse(factor)) for factor in factors)


def test_ranks_are_cut_in_one_place():
    """Multiples of the largest singular value, outside of `linalg`."""
    root = Path(dissociation.__file__).parent
    found = Counter()
    for file in root.rglob("*.py"):
        if file.name != "linalg.py":
            products = sum(map(is_multiple_of_largest, ast.walk(ast.parse(file.read_text()))))
            found[file.relative_to(root).as_posix()] += products
    assert +found == Counter(ALLOWED)
