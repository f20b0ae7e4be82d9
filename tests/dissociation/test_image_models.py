"""The residual network and the transformer on images: what they compute, and what is found in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.figures._members import rewritten_group
from dissociation.models import CNN, ResNet, Transformer, representations
from dissociation.models._layers import max_pool
from dissociation.models._representations import seen_by_weights
from dissociation.rewrites import neuron_groups

pytestmark = pytest.mark.usefixtures("barely_optimized")

IMAGES = np.random.default_rng(0).uniform(size=(3, 784)).astype(np.float32)


def small(kind):
    if kind == "resnet":
        return ResNet(6, 3, channels=4, depth=2, key=jax.random.key(0))
    return Transformer(6, 3, size=8, heads=2, depth=1, patch=14, key=jax.random.key(0))


def test_a_residual_network_by_hand():
    model = small("resnet")
    found = representations(model, IMAGES)
    assert list(found) == ["hidden0", "hidden1", "hidden2", "features", "logits"]
    x = max_pool(model.stem(IMAGES[0].reshape(28, 28, 1)))
    for name, block in zip(("hidden1", "hidden2"), model.blocks, strict=True):
        x = x + block.second(jax.nn.relu(block.first(jax.nn.relu(x))))
        np.testing.assert_allclose(found[name][0], x, atol=1e-5)
    features = jax.nn.relu(model.hidden(jax.nn.relu(max_pool(x)).reshape(-1)))
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)
    np.testing.assert_allclose(found["logits"][0], model.head(features), atol=1e-5)
    np.testing.assert_allclose(jax.vmap(model)(IMAGES), found["logits"], atol=1e-5)


def test_a_transformer_by_hand():
    model = small("transformer")
    found = representations(model, IMAGES)
    assert {name: array.shape[1:] for name, array in found.items()} == {
        "hidden0": (4, 8), "hidden1": (4, 8), "features": (6,), "logits": (3,)
    }  # fmt: skip
    image = IMAGES[0].reshape(28, 28)
    patches = [image[i : i + 14, j : j + 14].reshape(-1) for i in (0, 14) for j in (0, 14)]
    tokens = jnp.stack([model.embed(patch) for patch in patches]) + model.positions
    np.testing.assert_allclose(found["hidden0"][0], tokens, atol=1e-5)
    normed = jax.vmap(model.norm)(found["hidden1"][0])
    features = jax.nn.relu(model.hidden(normed.mean(0)))
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)
    # Attention is over tokens: without positions, their order is not seen.
    blind = eqx.tree_at(lambda m: m.positions, model, jnp.zeros_like(model.positions))
    other = image[:, np.r_[14:28, 0:14]].reshape(-1)
    np.testing.assert_allclose(blind(other), blind(IMAGES[0]), atol=1e-5)
    assert np.abs(model(other) - model(IMAGES[0])).max() > 1e-5


@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_the_last_hidden_layer_is_what_figures_rewrite(kind):
    model = small(kind)
    group = rewritten_group(eqx.filter_vmap(lambda _: model)(jnp.arange(2)), IMAGES[0])
    assert (group.name, group.size, group.degree) == ("hidden", 6, 1)
    groups = neuron_groups(model, IMAGES[0])
    stream = groups["stem" if kind == "resnet" else "embed"]
    assert stream.normalised == (kind == "transformer")
    assert stream.size == (4 if kind == "resnet" else 8)


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"`size` must be a multiple of `heads` \(3\), got 8"):
        Transformer(6, size=8, heads=3, key=jax.random.key(0))
    with pytest.raises(ValueError, match="`patch` must divide the images' side of 28 pixels, got 5"):
        Transformer(6, size=8, heads=2, patch=5, key=jax.random.key(0))
    with pytest.raises(ValueError, match="`depth` must be at least 1"):
        ResNet(6, depth=0, key=jax.random.key(0))


def test_what_weights_see_is_what_the_models_say():
    perceptron, x = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0)), jnp.ones(4)
    cnn, image = CNN(6, 3, key=jax.random.key(0)), jnp.asarray(IMAGES[0])
    for model, example in ((perceptron, x), (cnn, image)):
        stated, found = representations(model, example[None]), seen_by_weights(model, example)
        assert list(found) == list(stated)
        for name, array in found.items():
            np.testing.assert_allclose(array.ravel(), stated[name][0].ravel(), atol=1e-6)
    # The blocks' weights see what is behind the ReLUs, in them and between them.
    seen = seen_by_weights(small("resnet"), image)
    assert list(seen) == [*(f"hidden{index}" for index in range(5)), "features", "logits"]


class Gated(eqx.Module):
    """Weights that are normalised before they act, twice on the same stream, and inputs that are shifted."""

    direction: jax.Array
    first: eqx.nn.Linear
    second: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.direction = jax.random.normal(keys[0], (8, 4))
        self.first, self.second = (eqx.nn.Linear(8, 5, key=k) for k in keys[1:3])
        self.norm, self.head = eqx.nn.LayerNorm(5), eqx.nn.Linear(5, 2, key=keys[3])

    def __call__(self, x):
        gram = self.direction @ self.direction.T
        weight = self.direction / jnp.sqrt(jnp.trace(gram))
        h = jax.nn.relu(weight @ (2 * x - 1))
        return self.head(self.norm(self.first(h) * jax.nn.sigmoid(self.second(h))))


def test_hidden_layers_of_any_model():
    model, inputs = Gated(jax.random.key(0)), jax.random.normal(jax.random.key(1), (6, 4))
    found = representations(model, inputs)
    shapes = {"hidden0": (6, 8), "features": (6, 5), "logits": (6, 2)}
    assert {name: array.shape for name, array in found.items()} == shapes
    np.testing.assert_allclose(found["logits"], jax.vmap(model)(inputs), atol=1e-6)
    np.testing.assert_allclose(jax.vmap(model.head)(found["features"]), found["logits"], atol=1e-6)
    compiled = jax.jit(lambda x: representations(model, x))(inputs)
    np.testing.assert_allclose(compiled["features"], found["features"], atol=1e-6)
    slope = jax.grad(lambda x: (representations(model, x)["features"] ** 3).sum())(inputs)
    assert np.isfinite(slope).all()
    assert np.abs(slope).max() > 1e-3
    with pytest.raises(TypeError, match="`model` must return one array, got 2 arrays"):
        representations(lambda x: (x, x), inputs)
