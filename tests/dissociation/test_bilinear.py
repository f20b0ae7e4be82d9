import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models.bilinear import GATES, BilinearLayer, BilinearNetwork
from dissociation.models.initial import draw_weights

X = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_is_a_product(gate, bias):
    layer = BilinearLayer(12, 5, bias=bias, gate=gate, key=jax.random.key(0))
    left, right = X @ np.asarray(layer.left).T, X @ np.asarray(layer.right).T
    if bias:
        left, right = left + np.asarray(layer.left_bias), right + np.asarray(layer.right_bias)
    np.testing.assert_allclose(jax.vmap(layer)(X), GATES[gate](left) * right, rtol=1e-4, atol=1e-6)
    doubled = jax.vmap(layer)(2 * X)
    quadratic = np.allclose(doubled, 4 * jax.vmap(layer)(X), rtol=1e-4, atol=1e-6)
    assert quadratic == (not bias and gate in ("none", "relu"))  # a ReLU is homogeneous too, but no quadratic form


@pytest.mark.parametrize("residual", [False, True])
def test_a_network_by_hand(residual):
    model = BilinearNetwork(12, 6, 3, num_layers=2, residual=residual, key=jax.random.key(1))
    hidden = X @ np.asarray(model.embed).T
    for layer in model.layers:
        added = (hidden @ np.asarray(layer.left).T) * (hidden @ np.asarray(layer.right).T)
        hidden = hidden + added if residual else added
    np.testing.assert_allclose(jax.vmap(model)(X), hidden @ np.asarray(model.head).T, rtol=1e-4, atol=1e-6)
    found = jax.vmap(model.representations)(X)
    assert list(found) == ["embed", "layer0", "layer1", "logits"]
    np.testing.assert_allclose(found["layer1"], hidden, rtol=1e-4, atol=1e-6)


def test_defaults_and_stacking():
    models = eqx.filter_vmap(lambda key: BilinearNetwork(key=key))(jax.random.split(jax.random.key(0), 2))
    assert models.embed.shape == (2, 256, 784)
    assert models.head.shape == (2, 10, 256)
    bound = 784**-0.5
    assert 0.99 * bound < np.abs(models.embed).max() <= bound
    assert np.abs(models.layers[0].left).max() <= 1 / 16
    assert np.abs(models.embed[0] - models.embed[1]).max() > 0.01


def test_initialisation_by_a_function():
    model = BilinearNetwork(
        4, 3, 2, init=lambda key, shape, fan_in: jnp.full(shape, 1.0 * fan_in), key=jax.random.key(0)
    )
    np.testing.assert_array_equal(model.embed, 4)
    np.testing.assert_array_equal(model.head, 3)
    spread = draw_weights("lecun", (300, 400), 100, key=jax.random.key(0)).std()
    np.testing.assert_allclose(spread, 0.1, rtol=0.01)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"gate": "tanh"}, "'silu'"), ({"init": "he"}, "'pytorch', 'lecun'"), ({"num_layers": 0}, "`num_layers`")],
)
def test_bad_input_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        BilinearNetwork(4, 3, 2, **options, key=jax.random.key(0))
