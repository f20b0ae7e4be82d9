"""The import paths and calls that the paper's notebook makes, pinned."""

import sys
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.data import load
from dissociation.fig4 import mnist as mnist_module
from dissociation.fig4.bmap import bmap
from dissociation.fig4.expand import (
    add_phantom_zero_neurons,
    add_random_zero_neurons,
    duplicate_neurons,
    scale_neurons,
)
from dissociation.fig4.mnist import mnist_data, train_mnist
from dissociation.recipes import _mnist as recipe

IMAGES = 50


@pytest.fixture(scope="module")
def small():
    return load("glyphs", num_train=400, num_test=IMAGES, key=jax.random.key(0))


@pytest.fixture(scope="module")
def models(small):
    return train_mnist(num_seeds=2, num_epochs=0, dataset=small, progress=None)


def rewritten(function):
    """The notebook's way: new matrices for layers 1 and 2 by `eqx.tree_at`."""

    def rewrite(model, *arguments):
        w_in, w_out = function(model.layers[1].weight, model.layers[2].weight, *arguments)
        return eqx.tree_at(lambda m: (m.layers[1].weight, m.layers[2].weight), model, (w_in, w_out))

    return rewrite


scale = rewritten(lambda w, v, factor: scale_neurons(w_in=w, w_out=v, scale_factor=factor))
duplicate = rewritten(
    lambda w, v, times: duplicate_neurons(w_in=w, w_out=v, duplicate_multiplier=times)
)


@rewritten
def add_zero(w_in, w_out, number, key):
    options = {"num_zero_groups": number, "neurons_per_group": 1, "key": key}
    return add_random_zero_neurons(w_in=w_in, w_out=w_out, **options)


def outputs(models, images):
    return eqx.filter_vmap(lambda model, x: jax.vmap(model)(x), in_axes=(eqx.if_array(0), None))(
        models, images
    )


def test_fresh_networks_are_as_documented(models):
    assert [layer.weight.shape for layer in models.layers] == [
        (2, 1024, 784),
        (2, 1024, 1024),
        (2, 10, 1024),
    ]
    assert all(layer.bias is None for layer in models.layers)
    keys = jax.random.split(jax.random.PRNGKey(37), 2)
    alone = eqx.nn.MLP(784, 10, 1024, 2, use_bias=False, use_final_bias=False, key=keys[1])
    np.testing.assert_array_equal(models.layers[1].weight[1], alone.layers[1].weight)
    np.testing.assert_array_equal(models.activation(jnp.array([-1.0, 2.0])), [0, 2])


@pytest.mark.parametrize(
    ("rewrite", "number", "width"),
    [(scale, 20, 1024), (duplicate, 1 + 1, 2048), (duplicate, 1.2, 1229)],
)
def test_numbers_pass_through_the_map_and_set_shapes(models, small, rewrite, number, width):
    changed = partial(bmap, in_axes=(eqx.if_array(0), None))(rewrite)(models, number)
    assert changed.layers[1].weight.shape == (2, width, 1024)
    assert changed.layers[2].weight.shape == (2, 10, width)
    np.testing.assert_allclose(
        outputs(changed, small.test_images), outputs(models, small.test_images), atol=1e-5
    )


def test_zero_neurons_with_a_key_per_seed(models, small):
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    changed = bmap(add_zero, in_axes=(eqx.if_array(0), None, 0))(models, 1024, keys)
    assert changed.layers[1].weight.shape == (2, 2048, 1024)
    assert not np.allclose(changed.layers[1].weight[0, 1024:], changed.layers[1].weight[1, 1024:])
    np.testing.assert_allclose(
        outputs(changed, small.test_images), outputs(models, small.test_images), atol=1e-5
    )


def test_defaults_of_the_four_functions(models):
    w_in, w_out = models.layers[1].weight[0, :50], models.layers[2].weight[0, :, :50]
    inputs = jax.random.normal(jax.random.key(0), (20, 1024))
    pattern = jax.random.normal(jax.random.key(1), (20, 3))
    pairs = {
        50: scale_neurons(w_in=w_in, w_out=w_out),
        60: duplicate_neurons(w_in=w_in, w_out=w_out),
        62: add_random_zero_neurons(w_in=w_in, w_out=w_out, key=jax.random.PRNGKey(2)),
        53: add_phantom_zero_neurons(w_in=w_in, w_out=w_out, inputs=inputs, pattern=pattern),
    }
    before = jax.nn.relu(inputs @ w_in.T) @ w_out.T
    for width, (new_in, new_out) in pairs.items():
        assert new_in.shape == (width, 1024)
        after = jax.nn.relu(inputs @ new_in.T) @ new_out.T
        np.testing.assert_allclose(after, before, atol=1e-3 * np.abs(before).max())
    np.testing.assert_allclose(inputs @ pairs[53][0][50:].T, pattern, atol=1e-3)


@pytest.mark.slow
def test_hidden_features_by_plain_vmap_and_the_probe(models, small, monkeypatch):
    """Features through `model.layers` and `model.activation`, probed for several sample counts under filter_vmap."""
    monkeypatch.setattr(
        sys, "path", [str(Path(__file__).parents[2] / "notebooks" / "paper"), *sys.path]
    )
    from logistic import crossval_softmax_predict

    def hidden(model, x):
        x = model.activation(model.layers[0](x))
        return model.activation(model.layers[1](x))

    narrow = eqx.tree_at(
        lambda m: (m.layers[0].weight, m.layers[1].weight, m.layers[2].weight),
        models,
        (
            models.layers[0].weight[:, :32],
            models.layers[1].weight[:, :16, :32],
            models.layers[2].weight[:, :, :16],
        ),
    )

    @partial(eqx.filter_vmap, in_axes=(eqx.if_array(0), None))
    def transfer_error(model, num_samples):
        features = jax.vmap(hidden, in_axes=(None, 0))(model, small.test_images)
        probabilities = crossval_softmax_predict(
            features[:num_samples], small.test_labels[:num_samples]
        )
        return (probabilities.argmax(1) != small.test_labels[:num_samples].argmax(1)).mean()

    errors = [transfer_error(narrow, num_samples) for num_samples in (20, 50)]
    assert np.mean(errors) < 0.85  # chance is 0.9


def test_the_modules_offer_the_pinned_names():
    assert mnist_module.mnist_data is mnist_data
    assert mnist_module.fit_mnist is recipe.fit_classifiers
    for name in set(mnist_module.__all__) - {"mnist_data", "fit_mnist"}:
        assert getattr(mnist_module, name) is getattr(recipe, name)


@pytest.mark.parametrize("size", [2, 5])
def test_outgoing_weights_cancel_and_have_the_deviation_that_was_asked_for(size):
    w_in, w_out = jnp.ones((4, 3)), jnp.ones((50, 4))
    _, grown = add_random_zero_neurons(
        w_in, w_out, 200, size, key=jax.random.key(0), outgoing_std=0.5
    )
    new = np.asarray(grown[:, 4:]).reshape(50, 200, size)
    np.testing.assert_allclose(new.sum(-1), 0, atol=1e-5)
    np.testing.assert_allclose(new.std(), 0.5, rtol=0.02)
