"""Transformer on images of 28 x 28 pixels."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import fail
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._layers import Affine, as_example, check_sizes
from dissociation.models._representations import Network, named


class TransformerBlock(eqx.Module):
    """Attention and perceptron on a residual stream, each after a layer normalisation."""

    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    first: eqx.nn.Linear
    second: eqx.nn.Linear

    @validated
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
        return x + jax.vmap(lambda token: self.second(jax.nn.relu(self.first(self.norms[1](token)))))(x)


class Transformer(Network):
    """Blocks on tokens, which are patches of pixels, and a head on their mean.

    `positions` [tokens, size] are added to embedded patches. A layer normalisation precedes the mean, two linear layers
    with a ReLU between them follow it.

    References:
        Dosovitskiy et al. (2021), An image is worth 16 x 16 words, section 3.1, with the head of pre-training.
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
        width: int = 200,
        classes: int = 10,
        *,
        size: int = 64,
        heads: int = 4,
        depth: int = 2,
        patch: int = 7,
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
        check_sizes(width=width, classes=classes, size=size, heads=heads, depth=depth, patch=patch)
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
