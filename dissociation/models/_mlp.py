"""Multilayer perceptrons with named hidden representations."""

from collections.abc import Callable
from itertools import pairwise

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.models._layers import Affine
from dissociation.models._representations import Network, named

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "gelu": jax.nn.gelu,
    "none": lambda x: x,
}
"""Activations of hidden layers."""


class MLP(Network):
    """Affine layers with activations; `layers` holds hidden layers and head, weights [out, in]."""

    layers: tuple[Affine, ...]
    activation: str = eqx.field(static=True)
    last_activation: bool = eqx.field(static=True)

    @validated
    def __init__(
        self,
        inputs: Size = 784,
        width: Size = 200,
        depth: Size = 2,
        classes: Size = 10,
        *,
        activation: str = "relu",
        last_activation: bool = True,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a network.

        Args:
            inputs: Width of the input.
            width: Width of hidden layers.
            depth: Hidden layers, at least 1.
            classes: Width of the output.
            activation: One of `ACTIVATIONS`.
            last_activation: If True, the features are taken after an activation.
            init: One of `_layers.INITS`.
            key: Key of weights and biases.
        """
        check_choice("activation", activation, ACTIVATIONS)
        sizes = [inputs, *[width] * depth, classes]
        keys = jax.random.split(key, depth + 1)
        layers = []
        for (num_in, num_out), layer_key in zip(pairwise(sizes), keys, strict=True):
            layers.append(Affine(num_in, num_out, init=init, key=layer_key))
        self.layers = tuple(layers)
        self.activation = activation
        self.last_activation = last_activation

    def representations(self, x: Float[Array | np.ndarray, " inputs"]) -> dict[str, Array]:
        """Return hidden layers and logits."""
        hidden = {}
        *hidden_layers, head = self.layers
        for index, layer in enumerate(hidden_layers):
            x = layer(x)
            is_last = index == len(hidden_layers) - 1
            if self.last_activation or not is_last:
                x = ACTIVATIONS[self.activation](x)
            hidden[f"layers[{index}]"] = x
        return named(hidden, head(x))
