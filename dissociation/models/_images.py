"""Networks on images of 28 x 28 pixels: convolutional, residual, transformer."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, fail
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.models._layers import Affine, Convolution, as_example, max_pool
from dissociation.models._representations import Network, named


class Encoder(eqx.Module):
    """Encoder of images: two convolutions with ReLU and pooling, and a linear layer.

    Convolutions are 5 x 5, to 16 and 32 channels, max-pooling 2 x 2. Weights of `head` are
    [features, 1568].
    """

    convolutions: tuple[Convolution, Convolution]
    head: Affine

    @validated
    def __init__(self, features: Size, *, init: str = "pytorch", key: PRNGKey):
        keys = jax.random.split(key, 3)
        first = Convolution(1, 16, init=init, key=keys[0])
        second = Convolution(16, 32, init=init, key=keys[1])
        self.convolutions = (first, second)
        self.head = Affine(32 * 49, features, init=init, key=keys[2])

    def layers(self, image: Float[Array | np.ndarray, "28 28"]) -> tuple[Array, Array, Array]:
        """Return the outputs of both convolutions and the features of one image.

        The outputs have shapes [14, 14, 16] and [7, 7, 32].
        """
        pixels = as_example("image", image, 28, 28)
        first, second = self.convolutions
        # ReLU commutes with the maximum, so it runs after pooling, on a quarter of the values.
        pooled = max_pool(first(pixels[:, :, None]))
        first_output = jax.nn.relu(pooled)
        pooled = max_pool(second(first_output))
        second_output = jax.nn.relu(pooled)
        features = self.head(second_output.reshape(-1))
        return first_output, second_output, features

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

    def __init__(
        self, features: int, *, upsampling: str = "nearest", init: str = "pytorch", key: PRNGKey
    ):
        check_choice("upsampling", upsampling, ("nearest", "bilinear"))
        keys = jax.random.split(key, 3)
        self.head = Affine(features, 32 * 49, init=init, key=keys[0])
        # A transposed convolution of stride 1 is a plain one with turned kernels: only initial
        # weights differ.
        first = Convolution(32, 16, transposed=True, init=init, key=keys[1])
        second = Convolution(16, 1, transposed=True, init=init, key=keys[2])
        self.convolutions = (first, second)
        self.upsampling = upsampling

    def __call__(self, features: Float[Array | np.ndarray, " features"]) -> Float[Array, "28 28"]:
        """Return the image."""
        image = self.head(features).reshape(7, 7, 32)
        for convolution in self.convolutions:
            if self.upsampling == "nearest":
                # Nearest upsampling and the convolution after it run together at the lower
                # resolution.
                activity = jax.nn.relu(image)
                image = convolution.upsampled(activity)
            else:
                height, width, channels = image.shape
                shape = (2 * height, 2 * width, channels)
                image = jax.image.resize(image, shape, self.upsampling)
                activity = jax.nn.relu(image)
                image = convolution(activity)
        return image[:, :, 0]


class CNN(Network):
    """Classifier of flat images."""

    encoder: Encoder
    head: Affine
    last_activation: bool = eqx.field(static=True)

    @validated
    def __init__(
        self,
        width: Size = 200,
        classes: Size = 10,
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
        encoder_key, head_key = jax.random.split(key)
        self.encoder = Encoder(width, init=init, key=encoder_key)
        self.head = Affine(width, classes, init=init, key=head_key)
        self.last_activation = last_activation

    def representations(self, x: Float[Array | np.ndarray, " 784"]) -> dict[str, Array]:
        """Return both convolutions, [14, 14, 16] and [7, 7, 32], features and logits."""
        image = as_example("x", x, 784).reshape(28, 28)
        first, second, features = self.encoder.layers(image)
        if self.last_activation:
            features = jax.nn.relu(features)
        hidden = {"encoder.convolutions[0]": first, "encoder.convolutions[1]": second}
        hidden["encoder.head"] = features
        return named(hidden, self.head(features))


class ResidualBlock(eqx.Module):
    """Residual block x + conv(ReLU(conv(ReLU(x)))).

    References:
        He, Zhang, Ren and Sun (2016), Identity mappings in deep residual networks, figure 1b.
    """

    first: Convolution
    second: Convolution

    def __init__(self, channels: int, *, init: str, key: PRNGKey):
        first_key, second_key = jax.random.split(key)
        self.first = Convolution(channels, channels, init=init, key=first_key)
        self.second = Convolution(channels, channels, init=init, key=second_key)

    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        """Return the output of the block."""
        hidden = self.first(jax.nn.relu(x))
        return x + self.second(jax.nn.relu(hidden))


class ResNet(Network):
    """Residual network of images.

    Convolution `stem`, max pooling, residual blocks, max pooling, and two linear layers. A ReLU
    precedes each linear layer. No layer is normalised, so rewrites can permute and scale the
    neurons of every hidden layer.
    """

    stem: Convolution
    blocks: tuple[ResidualBlock, ...]
    hidden: Affine
    head: Affine

    @validated
    def __init__(
        self,
        width: Size = 200,
        classes: Size = 10,
        *,
        channels: Size = 16,
        depth: Size = 2,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a network.

        Args:
            width: Number of features.
            classes: Width of the output.
            channels: Channels of all convolutions.
            depth: Residual blocks.
            init: One of `_layers.INITS`.
            key: Key of the weights.
        """
        keys = jax.random.split(key, depth + 3)
        self.stem = Convolution(1, channels, init=init, key=keys[0])
        self.blocks = tuple(ResidualBlock(channels, init=init, key=k) for k in keys[3:])
        self.hidden = Affine(49 * channels, width, init=init, key=keys[1])
        self.head = Affine(width, classes, init=init, key=keys[2])

    def representations(self, x: Float[Array | np.ndarray, " 784"]) -> dict[str, Array]:
        """Return the residual stream before and after every block, features and logits.

        The residual stream has shape [14, 14, channels].
        """
        image = as_example("x", x, 784).reshape(28, 28, 1)
        stream = max_pool(self.stem(image))
        hidden = {"stem": stream}
        for index, block in enumerate(self.blocks):
            stream = block(stream)
            hidden[f"blocks[{index}].second"] = stream

        pooled = jax.nn.relu(max_pool(stream))
        features = self.hidden(pooled.reshape(-1))
        features = jax.nn.relu(features)
        hidden["hidden"] = features
        return named(hidden, self.head(features))


class TransformerBlock(eqx.Module):
    """Attention and perceptron on a residual stream, each after a layer normalisation."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    def __init__(self, size: int, heads: int, *, key: PRNGKey):
        keys = jax.random.split(key, 3)
        self.norms = (eqx.nn.LayerNorm(size), eqx.nn.LayerNorm(size))
        self.attention = eqx.nn.MultiheadAttention(heads, size, key=keys[0])
        self.first = eqx.nn.Linear(size, 2 * size, key=keys[1])
        self.second = eqx.nn.Linear(2 * size, size, key=keys[2])

    def __call__(self, x: Float[Array, "tokens size"]) -> Float[Array, "tokens size"]:
        """Return the residual stream after the block."""
        normalised = jax.vmap(self.norms[0])(x)
        x = x + self.attention(normalised, normalised, normalised)

        def perceptron(token: Array) -> Array:
            hidden = self.first(self.norms[1](token))
            return self.second(jax.nn.relu(hidden))

        return x + jax.vmap(perceptron)(x)


class Transformer(Network):
    """Blocks on tokens, which are patches of pixels, and a head on their mean.

    `positions` [tokens, size] are added to embedded patches. A layer normalisation precedes the
    mean, two linear layers with a ReLU between them follow it.

    References:
        Dosovitskiy et al. (2021), An image is worth 16 x 16 words, section 3.1, with the head of
        pre-training.
    """

    embed: Affine
    positions: Float[Array, "tokens size"]
    blocks: tuple[TransformerBlock, ...]
    norm: eqx.nn.LayerNorm
    hidden: Affine
    head: Affine
    patch: int = eqx.field(static=True)

    @validated
    def __init__(
        self,
        width: Size = 200,
        classes: Size = 10,
        *,
        size: Size = 64,
        heads: Size = 4,
        depth: Size = 2,
        patch: Size = 7,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a network.

        Args:
            width: Number of features.
            classes: Width of the output.
            size: Width of the residual stream, a multiple of `heads`.
            heads: Heads of every attention.
            depth: Blocks.
            patch: Side of a patch, a divisor of 28.
            init: One of `_layers.INITS`, for linear layers outside of blocks.
            key: Key of the weights.
        """
        if size % heads:
            fail("size", f"be a multiple of `heads` ({heads})", size)
        if 28 % patch:
            fail("patch", "divide the images' side of 28 pixels", patch)
        keys = jax.random.split(key, depth + 4)
        self.embed = Affine(patch**2, size, init=init, key=keys[0])
        num_tokens = (28 // patch) ** 2
        self.positions = 0.02 * jax.random.normal(keys[1], (num_tokens, size))
        self.blocks = tuple(TransformerBlock(size, heads, key=k) for k in keys[4:])
        self.norm = eqx.nn.LayerNorm(size)
        self.hidden = Affine(size, width, init=init, key=keys[2])
        self.head = Affine(width, classes, init=init, key=keys[3])
        self.patch = patch

    def representations(self, x: Float[Array | np.ndarray, " 784"]) -> dict[str, Array]:
        """Return the residual stream before and after every block, features and logits.

        The residual stream has shape [tokens, size].
        """
        side = 28 // self.patch
        pixels = as_example("x", x, 784).reshape(side, self.patch, side, self.patch)
        patches = pixels.transpose(0, 2, 1, 3).reshape(side**2, self.patch**2)
        stream = jax.vmap(self.embed)(patches) + self.positions
        hidden = {"embed": stream}
        for index, block in enumerate(self.blocks):
            stream = block(stream)
            hidden[f"blocks[{index}].second"] = stream

        normalised = jax.vmap(self.norm)(stream)
        features = self.hidden(jnp.mean(normalised, 0))
        features = jax.nn.relu(features)
        hidden["hidden"] = features
        return named(hidden, self.head(features))
