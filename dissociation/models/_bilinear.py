"""Bilinear networks, with layers g(x) = (W x) * (V x)."""

from collections.abc import Callable, Sequence

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, fail
from dissociation._core.conversion import as_array, as_numbers
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.models._layers import as_example, draw_weights
from dissociation.models._representations import Network, named

GATES: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
"""Functions applied to W x + b; only "none" keeps the layer bilinear."""


class BilinearLayer(eqx.Module):
    """The layer gate(W x + b) * (V x + c).

    W and V have shape [outputs, inputs]. Biases b and c are None if the layer has none.
    """

    left: Float[Array, "o i"]
    right: Float[Array, "o i"]
    left_bias: Float[Array, " o"] | None = None
    right_bias: Float[Array, " o"] | None = None
    gate: str = eqx.field(static=True, default="none")

    def __call__(self, x: Float[Array | np.ndarray, " i"]) -> Float[Array, " o"]:
        """Return the output."""
        x = as_example("x", x, self.left.shape[-1])
        gate_input = self.left @ x
        factor = self.right @ x
        if self.left_bias is not None and self.right_bias is not None:
            gate_input = gate_input + self.left_bias
            factor = factor + self.right_bias
        return GATES[self.gate](gate_input) * factor


@validated
def wrap_bilinear(
    embed: Float[Array | np.ndarray, "hidden inputs"],
    layers: Sequence[tuple[Float[Array | np.ndarray, "..."], ...]],
    head: Float[Array | np.ndarray, "classes last"],
    *,
    residual: bool = False,
) -> "BilinearNetwork":
    """Return a `BilinearNetwork` with given weights, for `dissociation.bilinear`.

    Args:
        embed: [hidden, inputs]; the identity for a model without embedding.
        layers: (W, V) or (W, V, b, c) of every layer, matrices [outputs, inputs of the layer].
        head: [classes, outputs of the last layer].
        residual: If True, every layer adds its input to its output.

    Raises:
        ValueError: If there are no layers, or shapes of consecutive layers do not fit.

    Example:
        >>> eye = jnp.eye(2)
        >>> wrap_bilinear(eye, [(eye, eye)], jnp.ones((1, 2)))(jnp.array([3.0, 4.0]))  # 3^2 + 4^2
        Array([25.], dtype=float32)
    """
    if not layers:
        fail("layers", "hold at least one layer", "none")
    width = embed.shape[0]
    bilinear_layers = []
    for index, weights in enumerate(layers):
        arrays = []
        for position, array in enumerate(weights):
            name = f"layers[{index}][{position}]"
            array = as_array(name, array, "real numbers")
            array = as_numbers(name, array, frozenset({"float"}))
            arrays.append(jnp.asarray(array))

        shapes = [tuple(array.shape) for array in arrays]
        outputs = shapes[0][0] if shapes and shapes[0] else 0
        matrices = [(outputs, width)] * 2
        biases = [(outputs,)] * 2
        if shapes not in (matrices, matrices + biases):
            requirement = f"have two matrices [outputs, {width}], and two biases [outputs] or none"
            fail("layers", f"{requirement}, in layer {index}", shapes)
        bilinear_layers.append(BilinearLayer(*arrays))
        width = outputs
    if head.shape[1] != width:
        fail("head", f"have {width} columns, the last layer's outputs", tuple(head.shape))

    # The constructor draws weights: the smallest ones, to be replaced.
    template = BilinearNetwork(1, 1, 1, residual=residual, key=jax.random.PRNGKey(0))
    replacements = [jnp.asarray(embed), tuple(bilinear_layers), jnp.asarray(head)]
    return eqx.tree_at(lambda m: [m.embed, m.layers, m.head], template, replacements)


class BilinearNetwork(Network):
    """Embedding, bilinear layers and head; embedding and head have no biases.

    The embedding has shape [hidden, inputs], layers [hidden, hidden], the head [classes, hidden].

    References:
        Pearce et al. (2024), Bilinear MLPs enable weight-based mechanistic interpretability,
        section 2.
    """

    embed: Float[Array, "hidden inputs"]
    layers: tuple[BilinearLayer, ...]
    head: Float[Array, "classes hidden"]
    residual: bool = eqx.field(static=True)

    @validated
    def __init__(
        self,
        inputs: Size = 784,
        hidden: Size = 256,
        classes: Size = 10,
        *,
        num_layers: Size = 1,
        bias: bool = False,
        gate: str = "none",
        residual: bool = False,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a network.

        Args:
            inputs: Width of the input.
            hidden: Width of embedding and layers.
            classes: Width of the output.
            num_layers: Bilinear layers, at least 1.
            bias: If True, layers have biases.
            gate: One of `GATES`.
            residual: If True, every layer adds its input to its output.
            init: One of `_layers.INITS`.
            key: Key of the weights.
        """
        check_choice("gate", gate, GATES)
        embed_key, head_key, *layer_keys = jax.random.split(key, num_layers + 2)
        shapes: list[tuple[int, ...]] = [(hidden, hidden)] * 2
        if bias:
            shapes += [(hidden,)] * 2

        layers = []
        for layer_key in layer_keys:
            keys = jax.random.split(layer_key, 4)[: len(shapes)]
            pairs = zip(shapes, keys, strict=True)
            weights = [draw_weights(init, shape, hidden, k) for shape, k in pairs]
            layers.append(BilinearLayer(*weights, gate=gate))

        self.embed = draw_weights(init, (hidden, inputs), inputs, embed_key)
        self.layers = tuple(layers)
        self.head = draw_weights(init, (classes, hidden), hidden, head_key)
        self.residual = residual

    def representations(self, x: Float[Array | np.ndarray, " inputs"]) -> dict[str, Array]:
        """Return embedding, layers and logits."""
        x = as_example("x", x, self.embed.shape[-1])
        x = self.embed @ x
        hidden = {"embed": x}
        for index, layer in enumerate(self.layers):
            stream = x
            x = layer(stream)
            if self.residual:
                x = x + stream
            hidden[f"layers[{index}].left"] = x
        return named(hidden, self.head @ x)
