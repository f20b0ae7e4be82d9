"""Networks and their layers: by hand, what is found in them, and what is refused."""

from functools import cache

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
        rng = np.random.default_rng(1)
        matrices = rng.normal(size=(2, 5, 12)).astype(np.float32)
        biases = rng.normal(size=(2 * bias, 5)).astype(np.float32)
        layer = BilinearLayer(*map(jnp.asarray, (*matrices, *biases)), gate=gate)
        left, right = X @ np.asarray(layer.left).T, X @ np.asarray(layer.right).T
        if bias:
            left, right = left + np.asarray(layer.left_bias), right + np.asarray(layer.right_bias)
        found = np.asarray(call(jax.vmap(layer), X))
        doubled = np.asarray(call(jax.vmap(layer), 2 * X))
        np.testing.assert_allclose(found, GATES[gate](left) * right, rtol=1e-4, atol=1e-6)
        # A ReLU is homogeneous too, but no quadratic form.
        quadratic = np.allclose(doubled, 4 * found, rtol=1e-4, atol=1e-6)
        assert quadratic == (not bias and gate in ("none", "relu"))


def test_initial_weights():
    make = eqx.filter_jit(
        lambda key: [Affine(400, 300, init=init, key=key) for init in ("pytorch", "lecun")]
    )
    pytorch, lecun = jax.tree.map(np.asarray, make(KEY))
    assert np.abs(pytorch.weight).max() <= 0.05
    np.testing.assert_allclose(np.std(pytorch.weight), 0.05 / 3**0.5, rtol=0.01)
    np.testing.assert_allclose(np.std(lecun.weight), 0.05, rtol=0.01)
    np.testing.assert_array_equal(lecun.bias, 0)
    np.testing.assert_allclose(np.std(draw_weights("lecun", (300, 400), 100, KEY)), 0.1, rtol=0.01)


def test_initial_weights_of_a_perceptron():
    model = call(lambda key: MLP(784, 200, 2, 10, key=key), KEY)
    for layer, fan_in in zip(model.layers, (784, 200, 200), strict=True):
        for part in (np.asarray(layer.weight), np.asarray(layer.bias)):
            assert 0.5 * fan_in**-0.5 < np.abs(part).max() <= fan_in**-0.5  # biases too
        np.testing.assert_allclose(np.std(layer.weight), fan_in**-0.5 / 3**0.5, rtol=0.05)


def test_initial_weights_of_a_bilinear_network():
    plain = call(lambda key: BilinearNetwork(key=key), KEY)
    assert (plain.embed.shape, plain.head.shape) == ((256, 784), (10, 256))
    assert 0.99 * 784**-0.5 < np.abs(plain.embed).max() <= 784**-0.5
    assert np.abs(plain.layers[0].left).max() <= 1 / 16


def test_encoders_by_hand():
    encoder = call(lambda key: Encoder(5, key=key), KEY)

    def encoded(encoder, image):
        x = image[:, :, None]
        for layer in encoder.convolutions:
            x = max_pool(jax.nn.relu(layer(x)))
        return encoder.head(x.reshape(-1))

    np.testing.assert_allclose(
        call(encoder, IMAGES[0]), call(encoded, encoder, IMAGES[0]), atol=1e-5
    )


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear"])
def test_decoders_by_hand(upsampling):
    decoder = call(lambda key: Decoder(5, upsampling=upsampling, key=key), KEY)

    def decoded(decoder, features):
        x = decoder.head(features).reshape(7, 7, 32)
        for layer in decoder.convolutions:
            above = jax.image.resize(x, (2 * len(x), 2 * len(x), x.shape[2]), upsampling)
            x = layer(jax.nn.relu(above))
        return x[:, :, 0]

    np.testing.assert_allclose(call(decoder, X[0, :5]), call(decoded, decoder, X[0, :5]), atol=1e-5)


def normalised(norm, x):
    """Return what a layer normalisation computes of rows, by NumPy."""
    scaled = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + norm.eps)
    return scaled * np.asarray(norm.weight) + np.asarray(norm.bias)


def applied(layer, x):
    """Return what an affine layer computes of rows, by NumPy."""
    return x @ np.asarray(layer.weight).T + np.asarray(layer.bias)


@pytest.mark.parametrize("last_activation", [True, False])
def test_perceptrons_by_hand(last_activation):
    last = (lambda z: np.maximum(z, 0)) if last_activation else np.asarray
    model = call(lambda key: MLP(12, 8, 2, 3, last_activation=last_activation, key=key), KEY)
    first, second, head = (
        [np.asarray(layer.weight).T, np.asarray(layer.bias)] for layer in model.layers
    )
    hidden = np.maximum(X @ first[0] + first[1], 0)
    features = last(hidden @ second[0] + second[1])
    wanted = {"layers[0]": hidden, "layers[1]": features, "logits": features @ head[0] + head[1]}
    found = call(jax.vmap(model.representations), X)
    assert set(found) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, atol=1e-6)
    np.testing.assert_array_equal(call(jax.vmap(model), X), found["logits"])


@pytest.mark.parametrize("last_activation", [True, False])
def test_convolutional_networks_by_hand(last_activation):
    last = (lambda z: np.maximum(z, 0)) if last_activation else np.asarray
    model = call(lambda key: CNN(30, 7, last_activation=last_activation, key=key), KEY)
    found, features = (
        call(jax.vmap(model.representations), FLAT),
        last(call(jax.vmap(model.encoder), IMAGES)),
    )
    assert [array.shape for array in found.values()] == [
        (4, 14, 14, 16),
        (4, 7, 7, 32),
        (4, 30),
        (4, 7),
    ]
    below = np.asarray(found["encoder.convolutions[1]"]).reshape(4, -1)
    np.testing.assert_allclose(
        found["features"], last(applied(model.encoder.head, below)), atol=1e-5
    )
    np.testing.assert_allclose(found["features"], features, atol=1e-6)
    np.testing.assert_allclose(found["logits"], applied(model.head, features), atol=1e-5)
    np.testing.assert_allclose(call(jax.vmap(model), FLAT), found["logits"], atol=1e-6)


@cache
def small(kind):
    """Return a network of images, which tests only read."""
    if kind == "resnet":
        return call(lambda key: ResNet(6, 3, channels=4, depth=2, key=key), KEY)
    return call(lambda key: Transformer(6, 3, size=8, heads=2, depth=1, patch=14, key=key), KEY)


def test_a_residual_network_by_hand():
    model = small("resnet")
    found = representations(model, FLAT)

    def by_hand(model, image):
        x = max_pool(model.stem(image))
        streams = []
        for block in model.blocks:
            x = x + block.second(jax.nn.relu(block.first(jax.nn.relu(x))))
            streams.append(x)
        return streams, jax.nn.relu(model.hidden(jax.nn.relu(max_pool(x)).reshape(-1)))

    streams, features = call(by_hand, model, FLAT[0].reshape(28, 28, 1))
    for name, stream in zip(("blocks[0].second", "blocks[1].second"), streams, strict=True):
        np.testing.assert_allclose(found[name][0], stream, atol=1e-5)
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)
    np.testing.assert_allclose(
        found["logits"][0], applied(model.head, np.asarray(features)), atol=1e-5
    )
    np.testing.assert_allclose(call(jax.vmap(model), FLAT), found["logits"], atol=1e-5)


def test_a_transformer_by_hand():
    model = small("transformer")
    found = representations(model, FLAT)
    assert {name: array.shape[1:] for name, array in found.items()} == {
        "embed": (4, 8), "blocks[0].second": (4, 8), "hidden": (6,), "logits": (3,)
    }  # fmt: skip
    image = FLAT[0].reshape(28, 28)
    patches = [image[i : i + 14, j : j + 14].reshape(-1) for i in (0, 14) for j in (0, 14)]
    tokens = applied(model.embed, np.stack(patches)) + np.asarray(model.positions)
    np.testing.assert_allclose(found["embed"][0], tokens, atol=1e-5)
    normed = normalised(model.norm, np.asarray(found["blocks[0].second"][0]))
    features = np.maximum(applied(model.hidden, np.mean(normed, 0)), 0)
    np.testing.assert_allclose(found["features"][0], features, atol=1e-5)


def test_attention_is_over_tokens():
    """Without positions, their order has no effect."""
    model = small("transformer")
    image = FLAT[0].reshape(28, 28)
    blind = eqx.tree_at(lambda m: m.positions, model, np.zeros(model.positions.shape, np.float32))
    other = image[:, np.r_[14:28, 0:14]].reshape(-1)
    np.testing.assert_allclose(call(blind, other), call(blind, FLAT[0]), atol=1e-5)
    assert np.abs(call(model, other) - call(model, FLAT[0])).max() > 1e-5


@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_the_last_hidden_layer_is_what_figures_rewrite(kind):
    model = small(kind)
    pair = jax.tree.map(lambda leaf: np.stack([leaf, leaf]) if eqx.is_array(leaf) else leaf, model)
    group = rewritten_group(pair, FLAT[0])
    assert (group.name, group.size, group.degree) == ("hidden", 6, 1)


@pytest.mark.parametrize("kind", ["resnet", "transformer"])
def test_the_stream_of_a_transformer_is_normalised(kind):
    groups = neuron_groups(small(kind), FLAT[0])
    stream = groups["stem" if kind == "resnet" else "embed"]
    assert stream.normalised == (kind == "transformer")
    assert stream.size == (4 if kind == "resnet" else 8)


@pytest.mark.parametrize("residual", [False, True])
def test_a_bilinear_network_by_hand(residual):
    make = lambda key: BilinearNetwork(12, 6, 3, num_layers=2, residual=residual, key=key)  # noqa: E731
    model = call(make, jax.random.key(1))
    hidden = X @ np.asarray(model.embed).T
    for layer in model.layers:
        added = (hidden @ np.asarray(layer.left).T) * (hidden @ np.asarray(layer.right).T)
        hidden = hidden + added if residual else added
    np.testing.assert_allclose(
        call(jax.vmap(model), X), hidden @ np.asarray(model.head).T, rtol=1e-4, atol=1e-6
    )
    found = call(jax.vmap(model.representations), X)
    np.testing.assert_allclose(found["features"], hidden, rtol=1e-4, atol=1e-6)


def test_any_bilinear_model_can_be_wrapped():
    # Layers of different widths, as no constructor here makes them.
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    embed, head, x = draw(5, 7), draw(3, 4), draw(7)
    layers = [
        (draw(6, 5), draw(6, 5), draw(6), draw(6)),
        (draw(4, 6), draw(4, 6), draw(4), draw(4)),
    ]
    model = wrap_bilinear(embed, layers, head)
    hidden = [embed @ x]
    for left, right, b, c in layers:
        hidden.append((left @ hidden[-1] + b) * (right @ hidden[-1] + c))
    np.testing.assert_allclose(call(model, x), head @ hidden[-1], rtol=1e-4)
    # And decomposed: the first layer's forms give what it computes.
    spectrum = eqx.filter_jit(decompose)(model, np.eye(6, dtype=np.float32), layer=0)
    np.testing.assert_allclose(call(spectrum, x), hidden[1], rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "shapes", "wanted"),
    [
        (lambda: Affine(3, 2, key=KEY), [(5, 3), (2,)], r"`x` must be one example of shape \(3,\)"),
        (
            lambda: BilinearLayer(*jnp.ones((2, 2, 3))),
            [(5, 3), (2,)],
            r"`x` must be one example of shape \(3,\)",
        ),
        (
            lambda: MLP(12, 8, key=KEY),
            [(7, 12), (12, 7), (12, 12), ()],
            r"`x` must be one example of shape \(12,\)",
        ),
        # A square batch would pass through as columns.
        (
            lambda: BilinearNetwork(12, 8, key=KEY),
            [(12, 7), (12, 12)],
            r"`x` must be one example of shape \(12,\)",
        ),
        (
            lambda: CNN(5, key=KEY),
            [(28, 28)],
            r"`x` must be one example of shape \(784,\), got .* by `jax.vmap`",
        ),
        (
            lambda: Decoder(5, key=KEY),
            [(4,)],
            r"`x` must be one example of shape \(5,\), got shape \(4,\)",
        ),
        (
            lambda: Convolution(3, 2, key=KEY),
            [(4, 4, 2), (2, 4, 4, 3)],
            r"`x` must be .* \(height, width, 3\), got",
        ),
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
        (
            lambda: Transformer(6, size=8, heads=3, key=KEY),
            r"`size` must be a multiple of `heads` \(3\), got 8",
        ),
        (
            lambda: Transformer(6, size=8, heads=2, patch=5, key=KEY),
            "`patch` must divide .* side of 28 pixels, got 5",
        ),
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
        (
            [(eye, eye), (eye, np.full((3, 3), "a"))],
            TypeError,
            r"`layers\[1\]\[1\]` must be .* numbers, got text",
        ),
        (
            [(eye, eye), (eye, eye * 1j)],
            TypeError,
            r"`layers\[1\]\[1\]` must hold real numbers, got dtype complex64",
        ),
        (
            [(eye, eye), (eye, eye, np.ones(2), np.ones(3))],
            ValueError,
            r"two biases \[outputs\] or none, in layer 1,",
        ),
        ([(np.float32(1.0), eye)], ValueError, "two matrices"),
        ([(eye, eye), ()], ValueError, r"two matrices \[outputs, 3\], .*, in layer 1, got \[\]"),
    ):
        with pytest.raises(error, match=words):
            wrap_bilinear(eye, layers, head)
