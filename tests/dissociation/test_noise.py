import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dissociation.rewrites import add_parameter_noise, parameter_noise
from dissociation.rewrites._noise import perturb_parameters


@pytest.fixture
def unchecked():
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def model(key):
    return eqx.nn.MLP(6, 3, 10, 2, use_bias=False, use_final_bias=False, key=key)


def test_one_key_per_layer_in_their_order(model):
    for key in (jax.random.key(8), jax.random.PRNGKey(8)):
        noisy = add_parameter_noise(model, 0.3, key=key)
        for old, new, k in zip(model.layers, noisy.layers, jax.random.split(key, 3), strict=True):
            wanted = old.weight + 0.3 * jax.random.normal(k, old.weight.shape)
            np.testing.assert_allclose(new.weight, wanted, rtol=1e-6)


def test_noise_has_the_scale_and_is_independent_between_parameters(key):
    model = {"a": np.zeros((50, 40), np.float32), "b": np.zeros((50,), np.float32), "c": np.zeros((30, 50), np.float32)}
    noise = parameter_noise(model, key=key)
    leaves = [np.ravel(leaf) for leaf in jax.tree.leaves(noise)]
    values = np.concatenate(leaves)
    assert abs(values.mean()) < 4 / np.sqrt(values.size)
    assert abs(values.var() - 1) < 4 * np.sqrt(2 / values.size)
    first, second = leaves[0][:1500], leaves[2][:1500]
    assert abs(np.corrcoef(first, second)[0, 1]) < 4 / np.sqrt(1500)


def test_one_draw_serves_many_scales(model, key):
    noise = parameter_noise(model, key=key)
    traces = []

    @eqx.filter_jit
    def noisy(model, scale):
        traces.append(scale)
        return perturb_parameters(model, noise, scale)

    for scale in (1e-4, 1.0):
        new = noisy(model, jnp.asarray(scale))
        drawn = add_parameter_noise(model, float(scale), key=key)
        np.testing.assert_allclose(new.layers[1].weight, drawn.layers[1].weight, rtol=1e-6, atol=1e-7)
        moved = (new.layers[1].weight - model.layers[1].weight) / scale
        np.testing.assert_allclose(moved, noise.layers[1].weight, atol=1e-7 / scale)
    assert len(traces) == 1
    assert eqx.tree_equal(noisy(model, jnp.asarray(0.0)), model)
    assert eqx.tree_equal(add_parameter_noise(model, 0, key=key), model)


def test_everything_but_parameters_stays(key):
    tree = {"count": jnp.arange(3), "name": "a", "call": jax.nn.relu, "weight": jnp.ones(4), "key": jax.random.key(0)}
    noisy = add_parameter_noise(tree, 1.0, key=key)
    weight = noisy.pop("weight")
    tree.pop("weight")
    assert eqx.tree_equal(noisy, tree)
    [one] = jax.random.split(key, 1)
    np.testing.assert_allclose(weight, 1 + jax.random.normal(one, (4,)), rtol=1e-6)


class Normalised(eqx.Module):
    """A layer, batch normalisation, and a layer; running statistics are its state."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.last = eqx.nn.Linear(6, 5, key=key), eqx.nn.Linear(5, 3, key=key)
        self.norm = eqx.nn.BatchNorm(5, axis_name="batch", mode="batch")


@pytest.mark.parametrize("apart", [True, False])
def test_state_is_no_parameter(apart, key):
    """Whether `make_with_state` has taken it out of the model or not."""
    model = eqx.nn.make_with_state(Normalised)(key) if apart else Normalised(key)
    module = model[0] if apart else model
    weights = [module.first.weight, module.first.bias, module.norm.weight, module.norm.bias,
               module.last.weight, module.last.bias]  # fmt: skip
    assert len(jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))) > len(weights)
    noise = parameter_noise(model, key=key)
    assert [draw.shape for draw in jax.tree.leaves(noise)] == [weight.shape for weight in weights]
    noisy = perturb_parameters(model, noise, 2.0)
    moved = eqx.tree_at(lambda m: [(m[0] if apart else m).first, (m[0] if apart else m).last], noisy, [None, None])
    still = eqx.tree_at(lambda m: [(m[0] if apart else m).first, (m[0] if apart else m).last], model, [None, None])
    norms = lambda m: (m[0] if apart else m).norm  # noqa: E731
    put_back = eqx.tree_at(lambda m: [norms(m).weight, norms(m).bias], moved, [module.norm.weight, module.norm.bias])
    assert eqx.tree_equal(put_back, still)
    assert np.abs(norms(noisy).weight - module.norm.weight).min() > 0


def test_some_parameters_alone_get_the_noise_that_they_get_with_all(model, key):
    whole = parameter_noise(model, key=key)
    part = parameter_noise(model, key=key, where=lambda m: [m.layers[2], m.layers[0].weight])
    noisy = perturb_parameters(model, part, 0.3)
    for index, (layer, own) in enumerate(zip(whole.layers, part.layers, strict=True)):
        assert own.weight is None if index == 1 else (own.weight == layer.weight).all()
    np.testing.assert_array_equal(noisy.layers[1].weight, model.layers[1].weight)
    np.testing.assert_array_equal(noisy.layers[2].weight, perturb_parameters(model, whole, 0.3).layers[2].weight)
    with pytest.raises(ValueError, match="`where` must choose parameters of `model`, got none"):
        parameter_noise(model, key=key, where=lambda m: m.activation)


@pytest.mark.usefixtures("unchecked")
def test_noise_refuses(model, key):
    with pytest.raises(ValueError, match="`scale` must be non-negative"):
        add_parameter_noise(model, -0.1, key=key)
    noise = parameter_noise(model, key=key)
    with pytest.raises(ValueError, match="`noise` must be shaped like the parameters"):
        perturb_parameters(model, noise.layers, 0.1)
    wider = eqx.tree_at(lambda n: n.layers[0].weight, noise, jnp.ones((10, 1)))
    with pytest.raises(ValueError, match="`noise` must be shaped like the parameters"):
        perturb_parameters(model, wider, 0.1)
