"""The residual network and the transformer on images: what they compute, and what is found in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.figures._members import rewritten_group
from dissociation.models import ResNet, Transformer, representations
from dissociation.models._layers import max_pool
from dissociation.rewrites import neuron_groups

IMAGES = np.random.default_rng(0).uniform(size=(3, 784)).astype(np.float32)


def small(kind):
    if kind == "resnet":
        return ResNet(6, 3, channels=4, depth=2, key=jax.random.key(0))
    return Transformer(6, 3, size=8, heads=2, depth=1, patch=14, key=jax.random.key(0))


def test_a_residual_network_by_hand():
    model = small("resnet")
    found = representations(model, IMAGES)
    x = max_pool(model.stem(IMAGES[0].reshape(28, 28, 1)))
    for name, block in zip(("blocks[0].second", "blocks[1].second"), model.blocks, strict=True):
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
        "embed": (4, 8), "blocks[0].second": (4, 8), "hidden": (6,), "logits": (3,)
    }  # fmt: skip
    image = IMAGES[0].reshape(28, 28)
    patches = [image[i : i + 14, j : j + 14].reshape(-1) for i in (0, 14) for j in (0, 14)]
    tokens = jnp.stack([model.embed(patch) for patch in patches]) + model.positions
    np.testing.assert_allclose(found["embed"][0], tokens, atol=1e-5)
    normed = jax.vmap(model.norm)(found["blocks[0].second"][0])
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
