import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dissociation.models import CNN, Affine, Convolution, Encoder
from dissociation.models._bilinear import BilinearLayer
from dissociation.models._cnn import Decoder
from dissociation.models._initial import draw_weights
from dissociation.models._layers import max_pool

IMAGES = np.random.default_rng(0).uniform(size=(12, 28, 28)).astype(np.float32)


@pytest.fixture
def unchecked():
    """As users run it: our own errors, not the type checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_convolution_and_pooling_by_hand():
    layer = Convolution(2, 3, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 8, 2))
    padded = np.pad(x, ((2, 2), (2, 2), (0, 0)))
    patches = np.stack([[padded[i : i + 5, j : j + 5] for j in range(8)] for i in range(6)])
    wanted = np.einsum("hwijc,ijco->hwo", patches, layer.weight) + np.asarray(layer.bias)
    np.testing.assert_allclose(layer(x), wanted, atol=1e-5)
    np.testing.assert_array_equal(max_pool(x), np.asarray(x).reshape(3, 2, 4, 2, 2).max((1, 3)))


def test_a_convolution_after_nearest_upsampling_is_done_below():
    layer = Convolution(3, 4, key=jax.random.key(0))
    x = jax.random.normal(jax.random.key(1), (6, 8, 3))
    above = jax.image.resize(x, (12, 16, 3), "nearest")
    np.testing.assert_allclose(layer.upsampled(x), layer(above), atol=1e-5)
    slopes = [jax.grad(lambda w, f=f: jnp.sum(f(eqx.tree_at(lambda m: m.weight, layer, w)) ** 2))(layer.weight)
              for f in (lambda m: m.upsampled(x), lambda m: m(above))]  # fmt: skip
    np.testing.assert_allclose(*slopes, rtol=1e-4, atol=1e-3)
    assert np.abs(layer.upsampled(x) - layer(jax.image.resize(x, (12, 16, 3), "bilinear"))).max() > 0.1


def test_encoder_against_torch():
    torch = pytest.importorskip("torch")
    encoder = Encoder(5, key=jax.random.key(0))
    first, second = encoder.convolutions

    def tensor(array, *axes):
        return torch.tensor(np.array(array)).permute(*axes) if axes else torch.tensor(np.array(array))

    x = torch.tensor(IMAGES)[:, None]
    for layer in (first, second):
        x = torch.conv2d(x, tensor(layer.weight, 3, 2, 0, 1), tensor(layer.bias), padding=2)
        x = torch.max_pool2d(torch.relu(x), 2)
    # Channels last, so the linear layer reads pixels before channels.
    wanted = x.permute(0, 2, 3, 1).reshape(len(x), -1) @ tensor(encoder.head.weight).T + tensor(encoder.head.bias)
    np.testing.assert_allclose(jax.vmap(encoder)(IMAGES), wanted.numpy(), atol=1e-5)


@pytest.mark.parametrize("upsampling", ["nearest", "bilinear"])
def test_decoder_against_torch(upsampling):
    torch = pytest.importorskip("torch")
    decoder = Decoder(5, upsampling=upsampling, key=jax.random.key(0))
    features = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)
    x = torch.tensor(np.asarray(jax.vmap(decoder.head)(features))).reshape(3, 7, 7, 32).permute(0, 3, 1, 2)
    for layer in decoder.convolutions:
        x = torch.relu(torch.nn.functional.interpolate(x, scale_factor=2, mode=upsampling))
        # A transposed convolution of stride 1 is a convolution with the kernel turned by half a turn.
        weight = torch.tensor(np.array(layer.weight)).flip(0, 1).permute(2, 3, 0, 1)
        x = torch.conv_transpose2d(x, weight, torch.tensor(np.array(layer.bias)), padding=2)
    np.testing.assert_allclose(jax.vmap(decoder)(features), x[:, 0].numpy(), atol=1e-5)


@pytest.mark.parametrize("init", ["pytorch", "lecun"])
def test_initialisations(init):
    layer = Affine(400, 300, init=init, key=jax.random.key(0))
    spread = np.std(layer.weight)
    if init == "pytorch":
        assert np.abs(layer.weight).max() <= 0.05
        np.testing.assert_allclose(spread, 0.05 / 3**0.5, rtol=0.01)
        assert np.abs(layer.bias).max() > 0.02
    else:
        np.testing.assert_allclose(spread, 0.05, rtol=0.01)
        np.testing.assert_array_equal(layer.bias, 0)
    with pytest.raises(ValueError, match="'pytorch', 'lecun'"):
        Affine(2, 2, init="flax", key=jax.random.key(0))


@pytest.mark.parametrize("last_activation", [True, False])
def test_classifier(last_activation):
    model = CNN(30, 7, last_activation=last_activation, key=jax.random.key(0))
    flat = IMAGES.reshape(12, -1)
    found = jax.vmap(model.representations)(flat)
    features = jax.vmap(model.encoder)(IMAGES)
    expected = np.asarray(np.maximum(features, 0) if last_activation else features)
    weight, bias = (np.asarray(part) for part in (model.head.weight, model.head.bias))
    np.testing.assert_allclose(found["features"], expected, atol=1e-6)
    np.testing.assert_allclose(found["logits"], expected @ weight.T + bias, atol=1e-5)
    np.testing.assert_array_equal(jax.vmap(model)(flat), found["logits"])


@pytest.mark.usefixtures("unchecked")
def test_batches_and_odd_sides_are_refused():
    batch = jnp.zeros((2, 4, 6, 3))
    for x, words in (
        (batch, r"`x` must have 3 axes \[h, w, c\]"),
        (batch[0, 0], "3 axes"),
        (batch[0, :3], "even"),
        (batch[0, :, :5], "even"),
    ):
        with pytest.raises(ValueError, match=words):
            max_pool(x)
    with pytest.raises(ValueError, match=r"`image` must be one example of shape \(28, 28\)"):
        Encoder(5, key=jax.random.key(0))(IMAGES)
    with pytest.raises(ValueError, match=r"`x` must be one example of shape \(784,\), got .* by `jax.vmap`"):
        CNN(5, key=jax.random.key(0))(IMAGES[0])


@pytest.mark.parametrize("make", [Affine, Convolution, BilinearLayer])
def test_sizes_of_layers_are_counts(make):
    for sizes, name in (((0, 3), "inputs"), ((3, -1), "outputs")):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got"):
            make(*sizes, key=jax.random.key(0))
    for kind in (Encoder, Decoder):
        with pytest.raises(ValueError, match="`features` must be at least 1, got 0"):
            kind(0, key=jax.random.key(0))


@pytest.mark.usefixtures("unchecked")
def test_layers_name_wrong_inputs():
    key = jax.random.key(0)
    convolution = Convolution(3, 2, key=key)
    for layer in (Affine(3, 2, key=key), BilinearLayer(3, 2, key=key)):
        with pytest.raises(ValueError, match=r"got shape \(5, 3\)\. Map the network over examples by `jax.vmap`"):
            layer(jnp.ones((5, 3)))
        with pytest.raises(TypeError, match="`x` must hold real numbers, got dtype complex64"):
            layer(jnp.ones(3, complex))
        np.testing.assert_array_equal(layer([1, 2, 3]), layer(jnp.array([1.0, 2.0, 3.0])))
    for call in (convolution, convolution.upsampled):
        for shape in ((4, 4, 2), (2, 4, 4, 3)):
            with pytest.raises(ValueError, match=r"`x` must be one example of shape \(height, width, 3\), got shape"):
                call(jnp.ones(shape))
    with pytest.raises(ValueError, match=r"`features` must be one example of shape \(5,\), got shape \(4,\)"):
        Decoder(5, key=key)(jnp.ones(4))


def test_weights_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`init` must give weights of shape \(5, 3\), got \(3, 5\)"):
        draw_weights(lambda key, shape, fan_in: jnp.zeros(shape[::-1]), (5, 3), 3, key=jax.random.key(0))
