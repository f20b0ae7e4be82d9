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
        self.convolutions = (
            Convolution(1, 16, init=init, key=keys[0]),
            Convolution(16, 32, init=init, key=keys[1]),
        )
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

    def __init__(
        self, features: int, *, upsampling: str = "nearest", init: str = "pytorch", key: PRNGKey
    ):
        check_choice("upsampling", upsampling, ("nearest", "bilinear"))
        keys = jax.random.split(key, 3)
        self.head = Affine(features, 32 * 49, init=init, key=keys[0])
        # A transposed convolution of stride 1 is a plain one with turned kernels: only initial
        # weights differ.
        turned = {"transposed": True, "init": init}
        self.convolutions = (
            Convolution(32, 16, **turned, key=keys[1]),
            Convolution(16, 1, **turned, key=keys[2]),
        )
        self.upsampling = upsampling

    def __call__(self, features: Float[Array | np.ndarray, " features"]) -> Float[Array, "28 28"]:
        """Return the image."""
        hidden = self.head(features).reshape(7, 7, 32)
        for convolution in self.convolutions:
            if self.upsampling == "nearest":
                # Nearest upsampling and the convolution after it run together at the lower
                # resolution.
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


class ResidualBlock(eqx.Module):
    """Residual block x + conv(ReLU(conv(ReLU(x)))).

    References:
        He, Zhang, Ren and Sun (2016), Identity mappings in deep residual networks, figure 1b.
    """

    first: Convolution
    second: Convolution

    def __init__(self, channels: int, *, init: str, key: PRNGKey):
        self.first, self.second = (
            Convolution(channels, channels, init=init, key=k) for k in jax.random.split(key)
        )

    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        """Return the output of the block."""
        return x + self.second(jax.nn.relu(self.first(jax.nn.relu(x))))


class ResNet(Network):
    """Residual network: convolution `stem`, max pooling, residual blocks, max pooling, and two linear layers.

    A ReLU precedes each linear layer. No layer is normalised, so rewrites can permute and scale the
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
        """Return the residual stream before and after every block, [14, 14, channels], features and logits."""
        stream = max_pool(self.stem(as_example("x", x, 784).reshape(28, 28, 1)))
        hidden = {"stem": stream}
        for index, block in enumerate(self.blocks):
            hidden[f"blocks[{index}].second"] = stream = block(stream)
        hidden["hidden"] = jax.nn.relu(self.hidden(jax.nn.relu(max_pool(stream)).reshape(-1)))
        return named(hidden, self.head(hidden["hidden"]))


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
        seen = jax.vmap(self.norms[0])(x)
        x = x + self.attention(seen, seen, seen)
        return x + jax.vmap(
            lambda token: self.second(jax.nn.relu(self.first(self.norms[1](token))))
        )(x)


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
        self.positions = 0.02 * jax.random.normal(keys[1], ((28 // patch) ** 2, size))
        self.blocks = tuple(TransformerBlock(size, heads, key=k) for k in keys[4:])
        self.norm = eqx.nn.LayerNorm(size)
        self.hidden = Affine(size, width, init=init, key=keys[2])
        self.head = Affine(width, classes, init=init, key=keys[3])
        self.patch = patch

    def representations(self, x: Float[Array | np.ndarray, " 784"]) -> dict[str, Array]:
        """Return the residual stream before and after every block, [tokens, size], features and logits."""
        side = 28 // self.patch
        pixels = as_example("x", x, 784).reshape(side, self.patch, side, self.patch)
        patches = pixels.transpose(0, 2, 1, 3).reshape(side**2, self.patch**2)
        stream = jax.vmap(self.embed)(patches) + self.positions
        hidden = {"embed": stream}
        for index, block in enumerate(self.blocks):
            hidden[f"blocks[{index}].second"] = stream = block(stream)
        hidden["hidden"] = jax.nn.relu(self.hidden(jnp.mean(jax.vmap(self.norm)(stream), 0)))
        return named(hidden, self.head(hidden["hidden"]))
