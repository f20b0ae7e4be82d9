"""Convolutional networks on images of 28 x 28 pixels."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._layers import Affine, Convolution, as_example, check_sizes, max_pool
from dissociation.models._representations import Network, named


class Encoder(eqx.Module):
    """Encoder of images: two convolutions with ReLU and pooling, and a linear layer.

    Convolutions are 5 x 5, to 16 and 32 channels, max-pooling 2 x 2. Weights of `head` are [features, 1568].
    """

    convolutions: tuple[Convolution, Convolution]
    head: Affine

    @validated
    def __init__(self, features: int, *, init: str = "pytorch", key: PRNGKey):
        check_sizes(features=features)
        keys = jax.random.split(key, 3)
        self.convolutions = (Convolution(1, 16, init=init, key=keys[0]), Convolution(16, 32, init=init, key=keys[1]))
        self.head = Affine(32 * 49, features, init=init, key=keys[2])

    def layers(self, image: Float[Array | np.ndarray, "28 28"]) -> tuple[Array, Array, Array]:
        """Return the outputs of both convolutions, [14, 14, 16] and [7, 7, 32], and the features of one image."""
        hidden = [as_example("image", image, 28, 28)[:, :, None]]
        for convolution in self.convolutions:
            # ReLU commutes with the maximum, so it runs after pooling, on a quarter of the values.
            hidden.append(jax.nn.relu(max_pool(convolution(hidden[-1]))))
        return hidden[1], hidden[2], self.head(hidden[2].reshape(-1))

    def __call__(self, image: Float[Array | np.ndarray, "28 28"]) -> Float[Array, " features"]:
        """Return the features of one image."""
        return self.layers(image)[-1]


class Decoder(eqx.Module):
    """Mirror of the encoder, from features to an image, without a last activation.

    Attributes:
        head: Linear layer, weights [1568, features].
        convolutions: Two transposed convolutions to 16 and 1 channels.
        upsampling: "nearest" or "bilinear".
    """

    head: Affine
    convolutions: tuple[Convolution, Convolution]
    upsampling: str = eqx.field(static=True)

    @validated
    def __init__(self, features: int, *, upsampling: str = "nearest", init: str = "pytorch", key: PRNGKey):
        check_choice("upsampling", upsampling, ("nearest", "bilinear"))
        check_sizes(features=features)
        keys = jax.random.split(key, 3)
        self.head = Affine(features, 32 * 49, init=init, key=keys[0])
        # A transposed convolution of stride 1 is a plain one with turned kernels: only initial weights differ.
        turned = {"transposed": True, "init": init}
        self.convolutions = (Convolution(32, 16, **turned, key=keys[1]), Convolution(16, 1, **turned, key=keys[2]))
        self.upsampling = upsampling

    def __call__(self, features: Float[Array | np.ndarray, " features"]) -> Float[Array, "28 28"]:
        """Return the image."""
        hidden = self.head(as_example("features", features, self.head.weight.shape[-1])).reshape(7, 7, 32)
        for convolution in self.convolutions:
            if self.upsampling == "nearest":
                # Nearest upsampling and the convolution after it run together at the lower resolution.
                hidden = convolution.upsampled(jax.nn.relu(hidden))
            else:
                shape = (2 * hidden.shape[0], 2 * hidden.shape[1], hidden.shape[2])
                hidden = convolution(jax.nn.relu(jax.image.resize(hidden, shape, self.upsampling)))
        return hidden[:, :, 0]


class CNN(Network):
    """Classifier of flat images."""

    encoder: Encoder
    head: Affine
    last_activation: bool = eqx.field(static=True)

    @validated
    def __init__(
        self,
        width: int = 200,
        classes: int = 10,
        *,
        last_activation: bool = True,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a network.

        Args:
            width: Number of features.
            classes: Width of the output.
            last_activation: If True, features pass a ReLU.
            init: One of `_layers.INITS`.
            key: Key of the weights.
        """
        check_sizes(width=width, classes=classes)
        first, second = jax.random.split(key)
        self.encoder = Encoder(width, init=init, key=first)
        self.head = Affine(width, classes, init=init, key=second)
        self.last_activation = last_activation

    def representations(self, x: Float[Array | np.ndarray, " 784"]) -> dict[str, Array]:
        """Return both convolutions, [14, 14, 16] and [7, 7, 32], features and logits."""
        *convolved, features = self.encoder.layers(as_example("x", x, 784).reshape(28, 28))
        features = jax.nn.relu(features) if self.last_activation else features
        names = "encoder.convolutions[0]", "encoder.convolutions[1]", "encoder.head"
        return named(dict(zip(names, [*convolved, features], strict=True)), self.head(features))
