"""Linear networks."""

import itertools
from functools import reduce

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import fail
from dissociation._core.linalg import product
from dissociation.models._layers import as_example


class LinearNetwork(eqx.Module):
    """Linear network W_l ... W_1 x for one example, without biases.

    Attributes:
        weights: Weights [outputs, inputs] of the layers, the first one first.
    """

    weights: tuple[Float[Array, "..."], ...]

    def __call__(self, x: Float[Array | np.ndarray, " inputs"]) -> Float[Array, " outputs"]:
        """Return the output."""
        x = as_example("x", x, self.weights[0].shape[-1])
        return reduce(lambda h, weight: weight @ h, self.weights, x)

    @property
    def map(self) -> Float[Array, "outputs inputs"]:
        """Return the matrix of the whole network."""
        shapes = [weight.shape for weight in self.weights]
        if not shapes or any(one[-2] != following[-1] for one, following in itertools.pairwise(shapes)):
            fail("weights", "be [outputs, inputs] of layers that follow each other", shapes)
        return reduce(lambda first, weight: product(weight, first), self.weights)

    def hidden(self, x: Float[Array | np.ndarray, "samples inputs"]) -> Float[Array, "samples hidden"]:
        """Return the activity of the first hidden layer."""
        if x.shape[-1] != self.weights[0].shape[-1]:
            fail("x", f"have {self.weights[0].shape[-1]} columns, the network's inputs", x.shape)
        return product(jnp.asarray(x), self.weights[0].swapaxes(-1, -2))
