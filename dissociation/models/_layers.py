"""Layers with named initialisation: affine, convolution, pooling.

Modules take one example. Images run channels last, the layout in which XLA's CPU convolutions are fastest, and
pooling is three elementwise maxima, whose gradient is several times faster than that of `reduce_window`. A convolution
after nearest upsampling is done at the lower resolution.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.conversion import as_array, as_numbers
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._initial import INITS, draw_weights


def as_example(name: str, x: Any, *shape: int | str) -> Array:
    """What a network of one example was called with, as an array; a word in its shape stands for any length."""
    wanted = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = as_numbers(name, as_array(name, x, f"real numbers, one example {wanted}"), frozenset({"float"}))
    sizes = tuple(n if isinstance(m, int) else m for m, n in zip(shape, array.shape, strict=False))
    if array.ndim != len(shape) or sizes != shape:
        advice = "Map the network over examples by `jax.vmap`" if array.ndim > len(shape) else ""
        fail(name, f"be one example of shape {wanted}", f"shape {array.shape}", advice)
    return jnp.asarray(array)


def check_sizes(**sizes: int) -> None:
    """Raises unless all are counts of at least 1."""
    for name, size in sizes.items():
        check_count(name, size, minimum=1)


class Affine(eqx.Module):
    """W x + b, or without b.

    Attributes:
        weight: [out, in].
        bias: [out] or None.
    """

    weight: Float[Array, "o i"]
    bias: Float[Array, " o"] | None

    @validated
    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, init: str = "pytorch", key: PRNGKey):
        check_choice("init", init, INITS)
        check_sizes(inputs=inputs, outputs=outputs)
        first, second = jax.random.split(key)
        self.weight = draw_weights(init, (inputs, outputs), inputs, key=first).T
        zero = init == "lecun"
        self.bias = (
            (jnp.zeros(outputs) if zero else draw_weights(init, (outputs,), inputs, key=second)) if bias else None
        )

    def __call__(self, x: Float[Array | np.ndarray, " i"]) -> Float[Array, " o"]:
        """The layer's output."""
        y = self.weight @ as_example("x", x, self.weight.shape[-1])
        return y if self.bias is None else y + self.bias


class Convolution(eqx.Module):
    """5 x 5 convolution of stride 1 that keeps the image's size.

    Attributes:
        weight: [5, 5, in, out].
        bias: [out].
    """

    weight: Float[Array, "5 5 i o"]
    bias: Float[Array, " o"]

    @validated
    def __init__(self, inputs: int, outputs: int, *, transposed: bool = False, init: str = "pytorch", key: PRNGKey):
        check_choice("init", init, INITS)
        check_sizes(inputs=inputs, outputs=outputs)
        first, second = jax.random.split(key)
        # PyTorch counts the outputs of a transposed convolution as its fan-in.
        fan_in = 25 * (outputs if transposed and init == "pytorch" else inputs)
        self.weight = draw_weights(init, (5, 5, inputs, outputs), fan_in, key=first)
        self.bias = jnp.zeros(outputs) if init == "lecun" else draw_weights(init, (outputs,), fan_in, key=second)

    def __call__(self, x: Float[Array | np.ndarray, "h w i"]) -> Float[Array, "h w o"]:
        """The layer's output."""
        x = as_example("x", x, "height", "width", self.weight.shape[-2])
        return _convolve(x, self.weight, padding=2) + self.bias[None, None]

    def upsampled(self, x: Float[Array | np.ndarray, "h w i"]) -> Float[Array, "2*h 2*w o"]:
        """The output for an input whose every entry was repeated in a 2 x 2 square first (nearest upsampling).

        Of the 5 x 5 entries under the kernel at most 3 x 3 differ, so weights of equal entries are added before the
        convolution and not after: 9 products instead of 25.
        """
        x = as_example("x", x, "height", "width", self.weight.shape[-2])
        height, width, _ = x.shape
        add = jnp.asarray(_EQUAL_ENTRIES, x.dtype)
        merged = jnp.einsum("apk,bql,klio->pqiabo", add, add, self.weight, precision="highest")
        four = _convolve(x, merged.reshape(3, 3, x.shape[2], -1), padding=1).reshape(height, width, 2, 2, -1)
        return four.transpose(0, 2, 1, 3, 4).reshape(2 * height, 2 * width, -1) + self.bias[None, None]


_EQUAL_ENTRIES = (
    ((1, 1, 0, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 0, 1)),
    ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 1)),
)
"""For even and odd outputs: which of the 5 weights in a row meet the entry before, at and after the output's own."""


def _convolve(x: Float[Array, "h w i"], weight: Float[Array, "k l i o"], *, padding: int) -> Float[Array, "h w o"]:
    kinds, around = ("NHWC", "HWIO", "NHWC"), [(padding, padding)] * 2
    return lax.conv_general_dilated(x[None], weight, (1, 1), around, dimension_numbers=kinds)[0]


@validated
def max_pool(x: Float[Array, "h w c"]) -> Float[Array, "h//2 w//2 c"]:
    """The largest of every 2 x 2 square of one image."""
    if x.shape[0] % 2 or x.shape[1] % 2:
        fail("x", "have sides of even length", f"shape {x.shape}")
    upper, lower = x[::2], x[1::2]
    return jnp.maximum(jnp.maximum(upper[:, ::2], upper[:, 1::2]), jnp.maximum(lower[:, ::2], lower[:, 1::2]))
