"""Bilinear networks: layers g(x) = (W x) * (V x), whose every output is a quadratic form of the input."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, UInt32

from dissociation.checks import check_choice, check_count
from dissociation.models.initial import Initialiser, draw_weights

AnyKey = Key[Array, ""] | UInt32[Array, "2"]

GATES: dict[str, Callable[[Array], Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
}
"""What is applied to W x before the product. With any but "none" the layer is no longer bilinear."""


class BilinearLayer(eqx.Module):
    """gate(W x + b) * (V x + c).

    Attributes:
        left: W, [outputs, inputs].
        right: V, [outputs, inputs].
        left_bias: b, [outputs], or None.
        right_bias: c, [outputs], or None.
        gate: One of `GATES`.
    """

    left: Float[Array, "o i"]
    right: Float[Array, "o i"]
    left_bias: Float[Array, " o"] | None
    right_bias: Float[Array, " o"] | None
    gate: str = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool = False,
        gate: str = "none",
        init: str | Initialiser = "pytorch",
        key: AnyKey,
    ):
        check_choice("gate", gate, GATES)
        keys = jax.random.split(key, 4)
        self.left, self.right = (draw_weights(init, (outputs, inputs), inputs, key=k) for k in keys[:2])
        biases = [draw_weights(init, (outputs,), inputs, key=k) if bias else None for k in keys[2:]]
        self.left_bias, self.right_bias = biases
        self.gate = gate

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        """The layer's output."""
        left, right = self.left @ x, self.right @ x
        if self.left_bias is not None and self.right_bias is not None:
            left, right = left + self.left_bias, right + self.right_bias
        return GATES[self.gate](left) * right


class BilinearNetwork(eqx.Module):
    """Embedding, bilinear layers, and head; without biases at both ends.

    Attributes:
        embed: [hidden, inputs].
        layers: The bilinear layers, [hidden, hidden] each.
        head: [classes, hidden].
        residual: Whether every layer's input is added to its output.

    References:
        Pearce et al. (2024), Bilinear MLPs enable weight-based mechanistic interpretability, section 2.
    """

    embed: Float[Array, "hidden inputs"]
    layers: tuple[BilinearLayer, ...]
    head: Float[Array, "classes hidden"]
    residual: bool = eqx.field(static=True)

    def __init__(
        self,
        inputs: int = 784,
        hidden: int = 256,
        classes: int = 10,
        *,
        num_layers: int = 1,
        bias: bool = False,
        gate: str = "none",
        residual: bool = False,
        init: str | Initialiser = "pytorch",
        key: AnyKey,
    ):
        """A fresh network.

        Args:
            inputs: Width of the input.
            hidden: Width of embedding and layers.
            classes: Width of the output.
            num_layers: Bilinear layers, at least 1.
            bias: Whether the layers have biases.
            gate: One of `GATES`.
            residual: Whether layers add to their input.
            init: One of `dissociation.models.initial.INITS`, or a function `(key, shape, fan_in) -> array`.
            key: Draws the weights.
        """
        for name, value in (("inputs", inputs), ("hidden", hidden), ("classes", classes), ("num_layers", num_layers)):
            check_count(name, value, minimum=1)
        first, last, *keys = jax.random.split(key, num_layers + 2)
        self.embed = draw_weights(init, (hidden, inputs), inputs, key=first)
        options = {"bias": bias, "gate": gate, "init": init}
        self.layers = tuple(BilinearLayer(hidden, hidden, **options, key=k) for k in keys)
        self.head = draw_weights(init, (classes, hidden), hidden, key=last)
        self.residual = residual

    def representations(self, x: Float[Array | np.ndarray, " inputs"]) -> dict[str, Array]:
        """Everything computed on the way: "embed", "layer0", "layer1", ..., "logits"."""
        hidden = self.embed @ jnp.asarray(x)
        found = {"embed": hidden}
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden) + hidden if self.residual else layer(hidden)
            found[f"layer{index}"] = hidden
        return {**found, "logits": self.head @ hidden}

    def __call__(self, x: Float[Array | np.ndarray, " inputs"]) -> Float[Array, " classes"]:
        """Logits of one example."""
        return self.representations(x)["logits"]
