import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from noisy import perturbed
from zoo import Normalised

from dissociation.rewrites import add_parameter_noise, parameter_noise


@pytest.fixture
def model(key):
    return eqx.nn.MLP(6, 3, 10, 2, use_bias=False, use_final_bias=False, key=key)


def test_one_key_per_layer_in_their_order(model):
    for key in (jax.random.key(8), jax.random.PRNGKey(8)):
        noisy = add_parameter_noise(model, 0.3, key=key)
        for old, new, k in zip(model.layers, noisy.layers, jax.random.split(key, 3), strict=True):
            wanted = old.weight + 0.3 * jax.random.normal(k, old.weight.shape)
            np.testing.assert_allclose(new.weight, wanted, rtol=1e-6)


def test_one_draw_serves_many_scales(model, key):
    noise, traces = parameter_noise(model, key=key), []

    @eqx.filter_jit
    def noisy(model, scale):
        traces.append(scale)
        return perturbed(model, noise, scale)

    for scale in (1e-4, 1.0):
        new = noisy(model, jnp.asarray(scale)).layers[1].weight
        drawn = add_parameter_noise(model, float(scale), key=key)
        np.testing.assert_allclose(new, drawn.layers[1].weight, rtol=1e-6, atol=1e-7)
        moved = (new - model.layers[1].weight) / scale
        np.testing.assert_allclose(moved, noise.layers[1].weight, atol=1e-7 / scale)
    assert len(traces) == 1
    assert eqx.tree_equal(noisy(model, jnp.asarray(0.0)), model)
    assert eqx.tree_equal(add_parameter_noise(model, 0, key=key), model)


def test_everything_but_parameters_stays(key):
    tree = {"count": jnp.arange(3), "name": "a", "call": jax.nn.relu, "key": jax.random.key(0)}
    noisy = add_parameter_noise(tree | {"weight": jnp.ones(4)}, 1.0, key=key)
    draw = jax.random.normal(jax.random.split(key, 1)[0], (4,))
    np.testing.assert_allclose(noisy.pop("weight"), 1 + draw, rtol=1e-6)
    assert eqx.tree_equal(noisy, tree)


@pytest.mark.parametrize("apart", [True, False])
def test_state_is_no_parameter(apart, key):
    """Whether `make_with_state` has taken it out of the model or not."""
    model = eqx.nn.make_with_state(Normalised)(key) if apart else Normalised(key)

    def weights(model):
        module = model[0] if apart else model
        return [
            part
            for layer in (module.first, module.norm, module.last)
            for part in (layer.weight, layer.bias)
        ]

    assert len(jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))) > len(weights(model))
    noise = parameter_noise(model, key=key)
    assert [draw.shape for draw in jax.tree.leaves(noise)] == [
        weight.shape for weight in weights(model)
    ]
    noisy = perturbed(model, noise, 2.0)
    assert all((new != old).all() for new, old in zip(weights(noisy), weights(model), strict=True))
    assert eqx.tree_equal(eqx.tree_at(weights, noisy, weights(model)), model)


def test_some_parameters_alone_get_the_noise_that_they_get_with_all(model, key):
    whole = parameter_noise(model, key=key)
    part = parameter_noise(model, key=key, where=lambda m: [m.layers[2], m.layers[0].weight])
    noisy = perturbed(model, part, 0.3)
    for index, (layer, own) in enumerate(zip(whole.layers, part.layers, strict=True)):
        assert own.weight is None if index == 1 else (own.weight == layer.weight).all()
    np.testing.assert_array_equal(noisy.layers[1].weight, model.layers[1].weight)
    np.testing.assert_array_equal(
        noisy.layers[2].weight, perturbed(model, whole, 0.3).layers[2].weight
    )
    with pytest.raises(ValueError, match="`where` must choose parameters of `model`, got none"):
        parameter_noise(model, key=key, where=lambda m: m.activation)


@pytest.mark.usefixtures("unchecked")
def test_noise_refuses(model, key):
    with pytest.raises(ValueError, match="`scale` must be non-negative"):
        add_parameter_noise(model, -0.1, key=key)
