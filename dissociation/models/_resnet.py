"""Residual convolutional network on images of 28 x 28 pixels."""

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._layers import Affine, Convolution, as_example, check_sizes, max_pool
from dissociation.models._representations import Network, named


class ResidualBlock(eqx.Module):
    """Residual block x + conv(ReLU(conv(ReLU(x)))).

    References:
        He, Zhang, Ren and Sun (2016), Identity mappings in deep residual networks, figure 1b.
    """

    first: Convolution
    second: Convolution

    @validated
    def __init__(self, channels: int, *, init: str = "pytorch", key: PRNGKey):
        self.first, self.second = (Convolution(channels, channels, init=init, key=k) for k in jax.random.split(key))

    def __call__(self, x: Float[Array, "h w c"]) -> Float[Array, "h w c"]:
        """Return the output of the block."""
        return x + self.second(jax.nn.relu(self.first(jax.nn.relu(x))))


class ResNet(Network):
    """Residual network: convolution `stem`, max pooling, residual blocks, max pooling, and two linear layers.

    A ReLU precedes each linear layer. No layer is normalised, so rewrites can permute and scale the neurons of every
    hidden layer.
    """

    stem: Convolution
    blocks: tuple[ResidualBlock, ...]
    hidden: Affine
    head: Affine

    @validated
    def __init__(
        self,
        width: int = 200,
        classes: int = 10,
        *,
        channels: int = 16,
        depth: int = 2,
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
        check_sizes(width=width, classes=classes, channels=channels, depth=depth)
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
