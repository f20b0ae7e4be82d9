"""Networks and their layers: by hand, what is found in them, and what is refused."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.bilinear import decompose
from dissociation.figures._members import rewritten_group
from dissociation.models import (
    CNN,
    MLP,
    Affine,
    BilinearNetwork,
    Convolution,
    Encoder,
    ResNet,
    Transformer,
    representations,
    wrap_bilinear,
)
from dissociation.models._bilinear import GATES, BilinearLayer
from dissociation.models._images import Decoder
from dissociation.models._layers import draw_weights, max_pool
from dissociation.rewrites import neuron_groups

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(7, 12)).astype(np.float32)
IMAGES = np.random.default_rng(0).uniform(size=(4, 28, 28)).astype(np.float32)
FLAT = IMAGES.reshape(4, 784)
call = eqx.filter_jit(lambda function, *inputs: function(*inputs))
"""A compiled call of a layer or a function: one program instead of one per operation."""


def test_convolution_and_pooling_by_hand():
    layer = Convolution(2, 3, key=KEY)
    x = jax.random.normal(jax.random.key(1), (6, 8, 2))
    padded = np.pad(x, ((2, 2), (2, 2), (0, 0)))
    patches = np.stack([[padded[i : i + 5, j : j + 5] for j in range(8)] for i in range(6)])
    wanted = np.einsum("hwijc,ijco->hwo", patches, layer.weight) + np.asarray(layer.bias)
    np.testing.assert_allclose(layer(x), wanted, atol=1e-5)
    np.testing.assert_array_equal(max_pool(x), np.asarray(x).reshape(3, 2, 4, 2, 2).max((1, 3)))


def test_a_convolution_after_nearest_upsampling_is_done_below():
    layer = Convolution(3, 4, key=KEY)
    x = jax.random.normal(jax.random.key(1), (6, 8, 3))
    above = jax.image.resize(x, (12, 16, 3), "nearest")
    np.testing.assert_allclose(call(layer.upsampled, x), call(layer, above), atol=1e-5)
    slopes = [jax.jit(jax.grad(lambda w, f=f: jnp.sum(f(eqx.tree_at(lambda m: m.weight, layer, w)) ** 2)))(layer.weight)
              for f in (lambda m: m.upsampled(x), lambda m: m(above))]  # fmt: skip
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-3)
    smooth = jax.image.resize(x, (12, 16, 3), "bilinear")
    assert np.abs(call(layer.upsampled, x) - call(layer, smooth)).max() > 0.1


@pytest.mark.parametrize("gate", GATES)
def test_a_bilinear_layer_is_a_product(gate):
    for bias in (False, True):
        parts = jax.random.normal(KEY, (2, 5, 12)), jax.random.normal(KEY, (2 * bias, 5))
        layer = BilinearLayer(*parts[0], *parts[1], gate=gate)
        left, right = X @ np.asarray(layer.left).T, X @ np.asarray(layer.right).T
        if bias:
            left, right = left + np.asarray(layer.left_bias), right + np.asarray(layer.right_bias)
        found, doubled = jax.vmap(layer)(X), jax.vmap(layer)(2 * X)
        np.testing.assert_allclose(found, GATES[gate](left) * right, rtol=1e-4, atol=1e-6)
        # A ReLU is homogeneous too, but no quadratic form.
        quadratic = np.allclose(doubled, 4 * found, rtol=1e-4, atol=1e-6)
        assert quadratic == (not bias and gate in ("none", "relu"))


def test_initial_weights():
    pytorch, lecun = (Affine(400, 300, init=init, key=KEY) for init in ("pytorch", "lecun"))
    assert np.abs(pytorch.weight).max() <= 0.05
    np.testing.assert_allclose(np.std(pytorch.weight), 0.05 / 3**0.5, rtol=0.01)
    np.testing.assert_allclose(np.std(lecun.weight), 0.05, rtol=0.01)
    np.testing.assert_array_equal(lecun.bias, 0)
    for layer, fan_in in zip(MLP(784, 200, 2, 10, key=KEY).layers, (784, 200, 200), strict=True):
        for part in (layer.weight, layer.bias):
            assert 0.5 * fan_in**-0.5 < np.abs(part).max() <= fan_in**-0.5  # biases too
        np.testing.assert_allclose(layer.weight.std(), fan_in**-0.5 / 3**0.5, rtol=0.05)
    plain = BilinearNetwork(key=KEY)
    assert (plain.embed.shape, plain.head.shape) == ((256, 784), (10, 256))
    assert 0.99 * 784**-0.5 < np.abs(plain.embed).max() <= 784**-0.5
    assert np.abs(plain.layers[0].left).max() <= 1 / 16
    np.testing.assert_allclose(draw_weights("lecun", (300, 400), 100, KEY).std(), 0.1, rtol=0.01)


def test_encoders_and_decoders_by_hand():
    encoder, x = call(lambda key: Encoder(5, key=key), KEY), IMAGES[0][:, :, None]
    for layer in encoder.convolutions:
        x = call(lambda layer, x: max_pool(jax.nn.relu(layer(x))), layer, x)
    np.testing.assert_allclose(call(encoder, IMAGES[0]), call(encoder.head, x.reshape(-1)), atol=1e-5)
    for upsampling in ("nearest", "bilinear"):
        decoder = call(lambda key, how=upsampling: Decoder(5, upsampling=how, key=key), KEY)
        x = np.asarray(call(decoder.head, X[0, :5])).reshape(7, 7, 32)
        for layer in decoder.convolutions:
            above = jax.image.resize(x, (2 * len(x), 2 * len(x), x.shape[2]), upsampling)
            x = np.asarray(call(layer, jax.nn.relu(above)))
        np.testing.assert_allclose(call(decoder, X[0, :5]), x[:, :, 0], atol=1e-5)


@pytest.mark.parametrize("last_activation", [True, False])
def test_perceptrons_and_convolutional_networks_by_hand(last_activation):
    last = (lambda z: np.maximum(z, 0)) if last_activation else np.asarray
    model = MLP(12, 8, 2, 3, last_activation=last_activation, key=KEY)
    first, second, head = ([np.asarray(layer.weight).T, np.asarray(layer.bias)] for layer in model.layers)
    hidden = np.maximum(X @ first[0] + first[1], 0)
    features = last(hidden @ second[0] + second[1])
    wanted = {"layers[0]": hidden, "layers[1]": features, "logits": features @ head[0] + head[1]}
    found = jax.vmap(model.representations)(X)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)
    np.testing.assert_array_equal(jax.vmap(model)(X), found["logits"])
    model = call(lambda key: CNN(30, 7, last_activation=last_activation, key=key), KEY)
    found, features = call(jax.vmap(model.representations), FLAT), last(call(jax.vmap(model.encoder), IMAGES))
    assert [array.shape for array in found.values()] == [(4, 14, 14, 16), (4, 7, 7, 32), (4, 30), (4, 7)]
    below = found["encoder.convolutions[1]"].reshape(4, -1)
    np.testing.assert_allclose(found["features"], last(jax.vmap(model.encoder.head)(below)), atol=1e-5)
    np.testing.assert_allclose(found["features"], features, atol=1e-6)
    np.testing.assert_allclose(found["logits"], jax.vmap(model.head)(features), atol=1e-5)
    np.testing.assert_allclose(call(jax.vmap(model), FLAT), found["logits"], atol=1e-6)


def small(kind):
    if kind == "resnet":
        return call(lambda key: ResNet(6, 3, channels=4, depth=2, key=key), KEY)
    return call(lambda key: Transformer(6, 3, size=8, heads=2, depth=1, patch=14, key=key), KEY)


def test_a_residual_network_by_hand():
    model = small("resnet")
    found = representations(model, FLAT)
    x = call(lambda stem, x: max_pool(stem(x)), model.stem, FLAT[0].reshape(28, 28, 1))
    for name, block in zip(("blocks[0].second", "blocks[1].second"), model.blocks, strict=True):
        x = call(lambda block, x: x + block.second(jax.nn.relu(block.first(jax.nn.relu(x)))), block, x)
        np.testing.assert_allclose(found[name][0], x, atol=1e-5)
    features = call(lambda hidden, x: jax.nn.relu(hidden(jax.nn.relu(max_pool(x)).reshape(-1))), model.hidden, x)
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)
    np.testing.assert_allclose(found["logits"][0], model.head(features), atol=1e-5)
    np.testing.assert_allclose(call(jax.vmap(model), FLAT), found["logits"], atol=1e-5)


def test_a_transformer_by_hand():
    model = small("transformer")
    found = representations(model, FLAT)
    assert {name: array.shape[1:] for name, array in found.items()} == {
        "embed": (4, 8), "blocks[0].second": (4, 8), "hidden": (6,), "logits": (3,)
    }  # fmt: skip
    image = FLAT[0].reshape(28, 28)
    patches = [image[i : i + 14, j : j + 14].reshape(-1) for i in (0, 14) for j in (0, 14)]
    tokens = jnp.stack([model.embed(patch) for patch in patches]) + model.positions
    np.testing.assert_allclose(found["embed"][0], tokens, atol=1e-5)
    normed = jax.vmap(model.norm)(found["blocks[0].second"][0])
    features = jax.nn.relu(model.hidden(normed.mean(0)))
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)
    # Attention is over tokens: without positions, their order is not seen.
    blind = eqx.tree_at(lambda m: m.positions, model, jnp.zeros_like(model.positions))
    other = image[:, np.r_[14:28, 0:14]].reshape(-1)
    np.testing.assert_allclose(call(blind, other), call(blind, FLAT[0]), atol=1e-5)
    assert np.abs(call(model, other) - call(model, FLAT[0])).max() > 1e-5


@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_the_last_hidden_layer_is_what_figures_rewrite(kind):
    model = small(kind)
    group = rewritten_group(eqx.filter_vmap(lambda _: model)(jnp.arange(2)), FLAT[0])
    assert (group.name, group.size, group.degree) == ("hidden", 6, 1)
    groups = neuron_groups(model, FLAT[0])
    stream = groups["stem" if kind == "resnet" else "embed"]
    assert stream.normalised == (kind == "transformer")
    assert stream.size == (4 if kind == "resnet" else 8)


@pytest.mark.parametrize("residual", [False, True])
def test_a_bilinear_network_by_hand(residual):
    model = BilinearNetwork(12, 6, 3, num_layers=2, residual=residual, key=jax.random.key(1))
    hidden = X @ np.asarray(model.embed).T
    for layer in model.layers:
        added = (hidden @ np.asarray(layer.left).T) * (hidden @ np.asarray(layer.right).T)
        hidden = hidden + added if residual else added
    np.testing.assert_allclose(jax.vmap(model)(X), hidden @ np.asarray(model.head).T, rtol=1e-4, atol=1e-6)
    found = jax.vmap(model.representations)(X)
    np.testing.assert_allclose(found["features"], hidden, rtol=1e-4, atol=1e-6)


def test_any_bilinear_model_can_be_wrapped():
    # Layers of different widths, as no constructor here makes them.
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    embed, head, x = draw(5, 7), draw(3, 4), draw(7)
    layers = [(draw(6, 5), draw(6, 5), draw(6), draw(6)), (draw(4, 6), draw(4, 6), draw(4), draw(4))]
    model = wrap_bilinear(embed, layers, head)
    hidden = [embed @ x]
    for left, right, b, c in layers:
        hidden.append((left @ hidden[-1] + b) * (right @ hidden[-1] + c))
    np.testing.assert_allclose(model(x), head @ hidden[-1], rtol=1e-4)
    # And decomposed: the first layer's forms give what it computes.
    spectrum = decompose(model, np.eye(6, dtype=np.float32), layer=0)
    np.testing.assert_allclose(spectrum(x), hidden[1], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "shapes", "wanted"),
    [
        (lambda: Affine(3, 2, key=KEY), [(5, 3), (2,)], r"`x` must be one example of shape \(3,\)"),
        (lambda: BilinearLayer(*jnp.ones((2, 2, 3))), [(5, 3), (2,)], r"`x` must be one example of shape \(3,\)"),
        (lambda: MLP(12, 8, key=KEY), [(7, 12), (12, 7), (12, 12), ()], r"`x` must be one example of shape \(12,\)"),
        # A square batch would pass through as columns.
        (lambda: BilinearNetwork(12, 8, key=KEY), [(12, 7), (12, 12)], r"`x` must be one example of shape \(12,\)"),
        (lambda: CNN(5, key=KEY), [(28, 28)], r"`x` must be one example of shape \(784,\), got .* by `jax.vmap`"),
        (lambda: Decoder(5, key=KEY), [(4,)], r"`features` must be one example of shape \(5,\), got shape \(4,\)"),
        (lambda: Convolution(3, 2, key=KEY), [(4, 4, 2), (2, 4, 4, 3)], r"`x` must be .* \(height, width, 3\), got"),
        (lambda: max_pool, [(3, 6, 3), (4, 5, 3)], "even"),
    ],
)
def test_batches_and_wrong_shapes_are_refused(make, shapes, wanted):
    layer = make()
    for shape in shapes:
        with pytest.raises(ValueError, match=wanted):
            layer(jnp.zeros(shape))


@pytest.mark.usefixtures("unchecked")
def test_layers_take_lists_and_no_complex_numbers():
    for layer in (Affine(3, 2, key=KEY), BilinearLayer(*jnp.ones((2, 2, 3)))):
        with pytest.raises(TypeError, match="`x` must hold real numbers, got dtype complex64"):
            layer(jnp.ones(3, complex))
        np.testing.assert_array_equal(layer([1, 2, 3]), layer(jnp.array([1.0, 2.0, 3.0])))


def test_bad_settings_are_refused():
    for make in (Affine, Convolution):
        for sizes, name in (((0, 3), "inputs"), ((3, -1), "outputs")):
            with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got"):
                make(*sizes, key=KEY)
    for call, words in (
        (lambda: Affine(2, 2, init="flax", key=KEY), "'pytorch', 'lecun'"),
        (lambda: Encoder(0, key=KEY), "`features` must be at least 1, got 0"),
        (lambda: MLP(depth=0, key=KEY), "`depth` must be"),
        (lambda: MLP(activation="swish", key=KEY), "'relu', 'tanh', 'gelu', 'none'"),
        (lambda: BilinearNetwork(4, 3, 2, gate="tanh", key=KEY), "'silu'"),
        (lambda: BilinearNetwork(4, 3, 2, num_layers=0, key=KEY), "`num_layers`"),
        (lambda: Transformer(6, size=8, heads=3, key=KEY), r"`size` must be a multiple of `heads` \(3\), got 8"),
        (lambda: Transformer(6, size=8, heads=2, patch=5, key=KEY), "`patch` must divide .* side of 28 pixels, got 5"),
        (lambda: ResNet(6, depth=0, key=KEY), "`depth` must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()


@pytest.mark.usefixtures("unchecked")
def test_parts_that_are_no_real_weights_are_named():
    eye, head = np.eye(3, dtype=np.float32), np.ones((2, 3), np.float32)
    for layers, error, words in (
        ([], ValueError, "at least one layer"),
        ([(np.ones((4, 3), np.float32),) * 2], ValueError, "`head` must have 4 columns"),
        ([(eye, eye), (eye, np.full((3, 3), "a"))], TypeError, r"`layers\[1\]\[1\]` must be .* numbers, got text"),
        ([(eye, eye), (eye, eye * 1j)], TypeError, r"`layers\[1\]\[1\]` must hold real numbers, got dtype complex64"),
        ([(eye, eye), (eye, eye, np.ones(2), np.ones(3))], ValueError, r"two biases \[outputs\] or none, in layer 1,"),
        ([(np.float32(1.0), eye)], ValueError, "two matrices"),
        ([(eye, eye), ()], ValueError, r"two matrices \[outputs, 3\], .*, in layer 1, got \[\]"),
    ):
        with pytest.raises(error, match=words):
            wrap_bilinear(eye, layers, head)
