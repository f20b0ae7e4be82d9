"""Promises that hold for some shapes or types only."""

import equinox as eqx
import jax
import numpy as np
import pytest

from dissociation.measures import error_rate, input_noise_error, linear_head
from dissociation.rewrites import similarity_bounds
from dissociation.similarity import (
    MEASURES,
    compare,
    disagreement,
    jensen_shannon,
    linear_predictivity,
    min_max_disagreement,
)

DRAWS = np.random.default_rng(0)


@pytest.mark.parametrize("width", [20, 32, 40, 60])
def test_an_invariance_that_is_promised_for_a_shape_holds_there(width):
    """Neurons are scaled, and mixed, below and above the number of samples of which a map is fitted."""
    x = DRAWS.normal(size=(40, width)).astype(np.float32)
    y = x[:, :10] @ DRAWS.normal(size=(10, 3)).astype(np.float32)
    scales = np.where(np.arange(width) < 10, 10.0, 0.1).astype(np.float32)
    mixed = x @ (np.eye(width) + 0.3 * DRAWS.normal(size=(width, width))).astype(np.float32)
    letters = MEASURES["linear_predictivity"].invariances_at(*x.shape)
    value = float(linear_predictivity(x, y))
    for letter, other in (("D", x * scales), ("L", mixed)):
        changed = abs(float(linear_predictivity(other, y)) - value)
        assert (changed < 1e-3) == (letter in letters), (letter, changed)


@pytest.mark.slow
def test_bounds_are_searched_where_no_invariance_holds():
    x = DRAWS.normal(size=(20, 30))
    y = x[:, :5] @ DRAWS.normal(size=(5, 2))
    found = similarity_bounds(
        x, y, "linear_predictivity", free="x", key=jax.random.key(0), num_steps=10, num_starts=4
    )
    witness = float(linear_predictivity(x * np.repeat([10.0, 0.1], [5, 25]), y))
    assert float(found.low) < float(found.measured) < witness <= float(found.high) + 1e-2


class Standardised(eqx.nn.MLP):
    def __call__(self, x, *, key=None):
        return super().__call__((x - 100) / 50)


class Named(eqx.nn.MLP):
    """A subclass that is called as its base is."""


def test_subclasses_are_called_and_not_taken_apart():
    images = (100 + 50 * DRAWS.normal(size=(50, 6))).astype(np.float32)
    model = Standardised(6, 3, 16, 1, key=jax.random.key(0))
    outputs = jax.vmap(model)(images)
    labels = np.asarray(outputs).argmax(1)
    noise = np.ones_like(images)
    errors = input_noise_error(model, images, labels, np.array([0.0, 30.0]), noise=noise)
    moved = error_rate(jax.vmap(model)(images + 30 * noise), jax.nn.one_hot(labels, 3))
    np.testing.assert_allclose(errors, [0, moved])
    assert 0 < moved < 1
    with pytest.raises(
        TypeError, match=r"Standardised, a subclass with its own __call__. Pass model.layers\[-1\]"
    ):
        linear_head(model)
    assert linear_head(Named(6, 3, 16, 1, key=jax.random.key(0)))[0].shape == (3, 16)


def test_one_logit_decides_by_its_sign():
    x, y = DRAWS.normal(size=(2, 50, 1))
    labels = DRAWS.integers(0, 2, 50)
    both = [np.concatenate([np.zeros_like(logits), logits], 1) for logits in (x, y)]
    differ = np.mean((x > 0) != (y > 0))
    assert 0 < differ < 1
    assert float(disagreement(x, y)) == pytest.approx(differ)
    for function in (disagreement, jensen_shannon):
        assert float(function(x, y)) == pytest.approx(float(function(*both)))
    assert float(min_max_disagreement(x, y, labels)) == pytest.approx(
        float(min_max_disagreement(*both, labels))
    )
    first = 1 / (1 + np.exp(-x))
    second = 1 / (1 + np.exp(-y))
    middle = (first + second) / 2
    entropy = lambda p: -p * np.log(p) - (1 - p) * np.log(1 - p)  # noqa: E731
    expected = np.mean(entropy(middle) - (entropy(first) + entropy(second)) / 2)
    assert float(jensen_shannon(x, y)) == pytest.approx(expected, rel=1e-4)


def test_one_constant_representation_is_named_alone():
    x = np.ones((30, 5))
    y = DRAWS.normal(size=(30, 3))
    with pytest.warns(RuntimeWarning, match="is not defined for x, whose values are NaN"):
        found = compare(x, y, num_blocks=None, p_values=False)
    assert np.isnan(found.values)
    assert np.isnan(found.baseline)
