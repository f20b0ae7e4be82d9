from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from dissociation.data import load
from dissociation.measures import class_moments, neural_collapse
from dissociation.recipes import initial_models, observation_steps, train_grokking
from dissociation.recipes._grokking import standardised

SMALL = {"num_steps": 200, "num_train": 100, "batch_size": 50, "options": {"width": 16}}


@pytest.fixture(scope="module")
def data():
    return load("glyphs", num_train=150, num_test=60)


class Norm(eqx.Module):
    def __call__(self, model, key):
        return {"norm": jnp.linalg.norm(model.layers[0].weight)}


@pytest.fixture(scope="module")
def trained(data):
    return train_grokking(
        data,
        weight_decays=(3.0, 0.1, 0.0),
        seeds=(42, 43),
        measures=Norm(),
        measure_at=(0, 20, 200),
        **SMALL,
    )


def beginning(seed):
    return initial_models(
        jax.random.split(jax.random.PRNGKey(seed))[:1], 8.0, options={"width": 16}
    )


@pytest.mark.slow
def test_members_are_decays_by_seeds(trained):
    observed = trained.history.observed
    grid = {
        name: values.reshape(3, 2, -1) for name, values in observed.items() if name != "expensive"
    }
    np.testing.assert_array_equal(trained.history.observed_at, observation_steps(200))
    for values in grid.values():
        # A seed begins alike whatever its decay, and seeds differ.
        np.testing.assert_array_equal(values[:, :, 0], values[:1, :, 0].repeat(3, 0))
        assert values[0, 0, 0] != values[0, 1, 0] or values[0, 0, -1] != values[0, 1, -1]
    assert (grid["train_loss"][..., -1] < 0.5 * grid["train_loss"][..., 0]).all()
    norms = observed["expensive"]["norm"].reshape(3, 2, -1)
    assert (np.diff(norms[:, :, -1], axis=0) > 0).all()  # the less decay, the larger the weights
    asked = np.isin(trained.history.observed_at, (0, 20, 200))
    assert np.isfinite(norms[:, :, asked]).all()
    assert np.isnan(norms[:, :, ~asked]).all()
    squares = [
        np.sum(np.asarray(layer.weight, float) ** 2, (1, 2)) for layer in trained.models.layers
    ]
    np.testing.assert_allclose(observed["weight_norm"][:, -1], np.sqrt(sum(squares)), rtol=1e-5)
    np.testing.assert_allclose(observed["head_norm"][:, -1], np.sqrt(squares[-1]), rtol=1e-5)


@pytest.mark.slow
def test_the_beginning_is_eight_times_pytorchs(trained, data):
    model = jax.tree.map(lambda leaf: leaf[0], beginning(42))
    for layer, fan_in in zip(model.layers, (784, 16, 16), strict=True):
        for part in (layer.weight, layer.bias):
            assert 0.8 < np.abs(part).max() * fan_in**0.5 / 8 <= 1
    # What is observed at step 0 belongs to that network, with images standardised.
    images = (np.asarray(data.test_images) - 0.1307) / 0.3081
    np.testing.assert_allclose(standardised(data.test_images), images, rtol=1e-5)
    seen = jax.vmap(model.representations)(images)
    truth = data.test_labels.argmax(1)
    observed = {
        name: values[0, 0]
        for name, values in trained.history.observed.items()
        if name != "expensive"
    }
    np.testing.assert_allclose(
        observed["test_accuracy"], np.mean(seen["logits"].argmax(1) == truth), atol=1e-6
    )
    loss = np.sum((np.asarray(seen["logits"]) - data.test_labels) ** 2) / 60
    np.testing.assert_allclose(observed["test_loss"], loss, rtol=1e-4)
    collapse = neural_collapse(class_moments(seen["features"], truth, 10))
    np.testing.assert_allclose(observed["test_rnc1_score"], collapse.rnc1, rtol=1e-4)
    np.testing.assert_allclose(observed["test_nc2_score"], collapse.nc2, rtol=1e-3)


@pytest.mark.slow
def test_every_parameter_decays_apart_from_the_gradient(data):
    # A first step of AdamW: the gradient's part has the size of the rate, whatever the decay, and
    # is the same in both.
    options = {**SMALL, "num_steps": 1, "learning_rate": 0.01}
    models = train_grokking(data, weight_decays=(0.0, 5.0), seeds=(42,), **options).models
    start = beginning(42)
    for before, after in zip(jax.tree.leaves(start), jax.tree.leaves(models), strict=True):
        np.testing.assert_allclose(
            after[0] - after[1], 0.01 * 5.0 * before[0], rtol=1e-3, atol=1e-5
        )
        assert (
            np.isclose(np.abs(after[0] - before[0]), 0.01, rtol=1e-3).mean() > 0.2
        )  # where there is a gradient


def test_initial_scales_by_member():
    keys = jnp.tile(jax.random.PRNGKey(3)[None], (2, 1))
    models = initial_models(keys, (8.0, 2.0), options={"width": 16})
    for leaf in jax.tree.leaves(models):
        np.testing.assert_allclose(leaf[0], 4 * leaf[1], rtol=1e-6)


@pytest.mark.slow
def test_stochastic_gradient_descent(data):
    small = {**SMALL, "num_steps": 4, "init_scale": 1.0, "optimizer": "sgd", "learning_rate": 1e-5}
    result = train_grokking(data, weight_decays=(0.1,), seeds=(1,), **small)
    observed = result.history.observed
    assert observed["train_loss"][0, -1] < observed["train_loss"][0, 0]


def test_bad_input_is_refused(data):
    train = partial(train_grokking, data, **SMALL)
    refused(
        (lambda: train(measure_at=(31,)), "`measure_at` must be steps"),
        (
            lambda: train(num_train=1000),
            r"`num_train` must be at most the number of training images \(150\)",
        ),
        (lambda: train(seeds=(0, 2**32)), "`seeds` must lie from 0 to 4294967295, got 4294967296"),
        (lambda: train(optimizer="adam"), "'adamw', 'sgd'"),
        (
            lambda: train(init_scale=(8.0, 1.0)),
            "`init_scale` must be one number, or one for each of the 30 members",
        ),
        (lambda: train(weight_decays=(-0.1,)), "`weight_decays` must be non-negative"),
    )
