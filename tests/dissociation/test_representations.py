import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.members import member
from dissociation.models.bilinear import BilinearNetwork
from dissociation.models.cnn import CNN
from dissociation.models.mlp import MLP
from dissociation.models.representations import (
    member_representations,
    representations,
    representations_of_example,
)

X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def names(depth):
    return [*(f"hidden{index}" for index in range(depth - 1)), "features", "logits"]


@pytest.mark.parametrize("depth", [1, 3, 12])  # with twelve layers, the order of the alphabet is another one
def test_one_naming_for_all_models(depth):
    key = jax.random.key(0)
    models = {
        "Equinox": eqx.nn.MLP(4, 3, 5, depth, key=key),
        "affine": MLP(4, 5, depth, 3, key=key),
        "bilinear": BilinearNetwork(4, 5, 3, num_layers=depth - 1 or 1, key=key),
    }
    for name, model in models.items():
        found = representations(model, X)
        assert list(found) == names(max(depth, 2) if name == "bilinear" else depth), name
        np.testing.assert_allclose(found["logits"], jax.vmap(model)(X), rtol=1e-5, atol=1e-6)
        assert {array.shape for array in found.values()} == {(7, 5), (7, 3)}


def test_a_convolutional_network():
    model = CNN(6, 3, key=jax.random.key(0))
    found = representations(model, np.ones((2, 784), np.float32))
    shapes = {"hidden0": (2, 14, 14, 16), "hidden1": (2, 7, 7, 32), "features": (2, 6), "logits": (2, 3)}
    assert {name: array.shape for name, array in found.items()} == shapes
    assert list(found) == list(shapes)
    flat = found["hidden1"].reshape(2, -1)
    np.testing.assert_allclose(found["features"], jax.nn.relu(jax.vmap(model.encoder.head)(flat)), rtol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"use_bias": False},
        {"use_final_bias": False, "final_activation": jnp.tanh},
        {"activation": eqx.nn.PReLU(0.3)},
        {"depth": 1},
    ],
)
def test_multilayer_perceptrons_of_equinox(options):
    model = eqx.nn.MLP(4, 3, **{"width_size": 6, "depth": 3, "key": jax.random.key(1)} | options)
    found, hidden = representations(model, X), X
    for index, name in enumerate(names(model.depth)[:-1]):
        hidden = jax.vmap(model.layers[index])(hidden)
        if isinstance(options.get("activation"), eqx.nn.PReLU):
            hidden = jnp.where(hidden > 0, hidden, 0.3 * hidden)
        else:
            hidden = jax.nn.relu(hidden)
        np.testing.assert_allclose(found[name], hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], jax.vmap(model)(X), rtol=1e-5, atol=1e-6)


def test_scalars_and_no_hidden_layer():
    scalar = eqx.nn.MLP("scalar", "scalar", 6, 2, final_activation=jnp.tanh, key=jax.random.key(1))
    found = representations(scalar, X[:, 0])
    assert found["features"].shape == (7, 6)
    np.testing.assert_allclose(found["logits"], jax.vmap(scalar)(X[:, 0]), rtol=1e-5)
    linear = eqx.nn.MLP(4, 3, 6, 0, final_activation=jnp.tanh, key=jax.random.key(1))
    assert list(representations(linear, X)) == ["logits"]
    np.testing.assert_allclose(representations(linear, X)["logits"], jax.vmap(linear)(X), rtol=1e-5)


def test_members_and_derivatives():
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 3, 5, 2, key=key))(jax.random.split(jax.random.key(0), 3))
    found = eqx.filter_jit(eqx.filter_vmap(representations, in_axes=(eqx.if_array(0), None)))(models, X)
    assert found["features"].shape == (3, 7, 5)
    arrays, static = eqx.partition(models, eqx.is_array)
    alone = eqx.combine(jax.tree.map(lambda leaf: leaf[1], arrays), static)
    np.testing.assert_allclose(found["features"][1], representations(alone, X)["features"], rtol=1e-5, atol=1e-6)
    slope = eqx.filter_grad(lambda model: jnp.sum(representations(model, X)["hidden0"]))(alone)
    positive = np.asarray(representations(alone, X)["hidden0"]) > 0
    np.testing.assert_allclose(slope.layers[0].bias, positive.sum(0), rtol=1e-5)


@pytest.mark.parametrize("depth", [0, 2])
def test_stacked_models_and_single_examples_are_refused(depth):
    # As many members as units: every product would have a shape.
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 4, 4, depth, key=key))(jax.random.split(jax.random.key(0), 4))
    with pytest.raises(ValueError, match=r"`model` must be one network, got weights of shape \(4, 4, 4\)"):
        representations(models, X)
    with pytest.raises(TypeError, match=r"`model` must take one example of shape \(\)"):
        representations(eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0)), X[0])


def test_models_of_other_libraries():
    class Other(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(x)

    model = Other(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    assert list(representations(model, X)) == ["logits"]
    with pytest.raises(
        TypeError, match="`model` must be a function of one example, or such a one and its state, got int"
    ):
        representations(3, X)

    @representations_of_example.register
    def _(model: Other, x):
        return {"logits": model.inner(x)}

    np.testing.assert_allclose(representations(model, X)["logits"], jax.vmap(model)(X), rtol=1e-6)


def test_members_are_represented_as_each_of_them_in_the_order_of_the_layers():
    models = eqx.filter_vmap(lambda key: MLP(4, 5, 12, 3, key=key))(jax.random.split(jax.random.key(0), 3))
    found = member_representations(models, X)
    assert list(found) == names(12)
    for index in range(3):
        one = representations(member(models, index), X)
        for name, array in found.items():
            np.testing.assert_allclose(array[index], one[name], atol=1e-6)
