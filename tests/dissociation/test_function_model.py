"""Pure functions of parameters, as Flax and Haiku have them, where models are taken."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dissociation import certify, duplicate, neuron_groups, permute, scale
from dissociation.models import FunctionModel, representations
from dissociation.rewrites import match_weights
from dissociation.training import FullBatch, fit, make_step

RNG = np.random.default_rng(0)
X = RNG.normal(size=(20, 4)).astype(np.float32)


def dense(layer, x):
    return x @ layer["kernel"] + layer["bias"]


def network(parameters, state, x):
    """A layer, batch normalisation with running statistics, and two layers."""
    parameters = parameters["params"]
    mean, var = state["BatchNorm_0"]["mean"], state["BatchNorm_0"]["var"]
    x = dense(parameters["Dense_0"], x)
    x = (x - mean) / jnp.sqrt(var + 1e-5) * parameters["BatchNorm_0"]["scale"]
    x = jax.nn.relu(dense(parameters["Dense_1"], jax.nn.relu(x)))
    return dense(parameters["Dense_2"], x)


@pytest.fixture(scope="module")
def model():
    layers = {"BatchNorm_0": {"scale": np.ones(6, np.float32)}}
    for name, outputs in {"Dense_0": 6, "Dense_1": 6, "Dense_2": 3}.items():
        draws = RNG.normal(size=(7, outputs)).astype(np.float32)
        inputs = 4 if name == "Dense_0" else 6
        layers[name] = {"kernel": draws[:inputs], "bias": draws[6]}
    mean, var = RNG.normal(size=(2, 6)).astype(np.float32)
    statistics = {"BatchNorm_0": {"mean": mean, "var": var**2}}
    return FunctionModel(network, {"params": layers}, statistics)


@pytest.fixture(scope="module")
def groups(model):
    return neuron_groups(model, X[0])


def test_layers_keep_their_names(model, groups):
    assert list(groups) == ["Dense_0", "Dense_1"]
    layers = representations(model, X)
    assert list(layers) == ["Dense_0", "Dense_1", "logits"]
    np.testing.assert_allclose(layers["logits"], jax.vmap(model)(X), rtol=1e-5, atol=1e-5)


def test_running_statistics_move_with_their_neurons(model, groups, key):
    group = groups["Dense_0"]
    permuted = permute(group, key=key)(model)
    (order,) = match_weights(permuted, model, {"Dense_0": group}).permutations.values()
    for name, values in model.state["BatchNorm_0"].items():
        np.testing.assert_array_equal(permuted.state["BatchNorm_0"][name], values[order])
    rewrite = scale(groups["Dense_1"], 20.0) | duplicate(group, 1.5) | permute(group, key=key)
    assert certify(model, rewrite(model), X).max_rel_change < 1e-5
    mixed = FunctionModel(network, permuted.parameters, model.state)
    assert certify(model, mixed, X).max_rel_change > 0.1


def test_no_optimiser_changes_running_statistics(model, key):
    def loss(model, batch, key):
        return (jax.vmap(model)(batch) ** 2).mean()

    step = make_step(loss, optax.adamw(0.1, weight_decay=0.1))
    models = jax.tree.map(lambda leaf: leaf[None] if eqx.is_array(leaf) else leaf, model)
    trained = fit(models, step, FullBatch(X), num_steps=3, key=key).state.model
    jax.tree.map(np.testing.assert_array_equal, trained.state, models.state)
    change = jax.tree.map(lambda a, b: np.ptp(a - b), trained.parameters, models.parameters)
    assert min(jax.tree.leaves(change)) > 0.01


def test_a_state_is_an_argument_of_the_function():
    assert FunctionModel(lambda parameters, x: x, {}).state is None
    assert FunctionModel(lambda parameters, state, x: x, {}, {})(1) == 1  # as Haiku has it
    message = r"`function` must take 2 arguments \(parameters, example\)"
    with pytest.raises(TypeError, match=message):
        FunctionModel(network, {})
