import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dissociation.weights.certificate import certify
from dissociation.weights.noise import add_parameter_noise, parameter_noise, perturb_parameters


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

    for scale in np.logspace(-4, 0, 5):
        new = noisy(model, jnp.asarray(scale))
        drawn = add_parameter_noise(model, float(scale), key=key)
        np.testing.assert_allclose(new.layers[1].weight, drawn.layers[1].weight, rtol=1e-6, atol=1e-7)
        moved = (new.layers[1].weight - model.layers[1].weight) / scale
        np.testing.assert_allclose(moved, noise.layers[1].weight, atol=1e-7 / scale)
    assert len(traces) == 1
    assert eqx.tree_equal(noisy(model, jnp.asarray(0.0)), model)
    assert eqx.tree_equal(add_parameter_noise(model, 0, key=key), model)


def test_it_does_not_preserve_the_function(model, key):
    x = jax.random.normal(key, (50, 6))
    certificate = certify(model, add_parameter_noise(model, 0.3, key=key), x)
    assert not bool(certificate.kept(1e-2))
    assert int(certificate.changed_predictions) > 0
    assert bool(certify(model, add_parameter_noise(model, 0.0, key=key), x).kept(0.0))


def test_everything_but_parameters_stays(key):
    tree = {"count": jnp.arange(3), "name": "a", "call": jax.nn.relu, "weight": jnp.ones(4), "key": jax.random.key(0)}
    noisy = add_parameter_noise(tree, 1.0, key=key)
    weight = noisy.pop("weight")
    tree.pop("weight")
    assert eqx.tree_equal(noisy, tree)
    [one] = jax.random.split(key, 1)
    np.testing.assert_allclose(weight, 1 + jax.random.normal(one, (4,)), rtol=1e-6)


@pytest.mark.usefixtures("unchecked")
def test_noise_refuses(model, key):
    with pytest.raises(ValueError, match="`scale` must be non-negative"):
        add_parameter_noise(model, -0.1, key=key)
    noise = parameter_noise(model, key=key)
    with pytest.raises(ValueError, match="`noise` must have the structure"):
        perturb_parameters(model, noise.layers, 0.1)
    wider = eqx.tree_at(lambda n: n.layers[0].weight, noise, jnp.ones((10, 1)))
    with pytest.raises(ValueError, match="`noise` must be shaped like the parameters"):
        perturb_parameters(model, wider, 0.1)
