"""Layers of one example with named initialisation: affine, convolution, pooling."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.conversion import as_array, as_numbers
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated

INITS = ("pytorch", "lecun")
"""Initialisations of weights.

"pytorch" is PyTorch's default, uniform in +-1/sqrt(fan_in). "lecun" is flax's, normal of variance
1/fan_in, cut at two deviations.
"""


def draw_weights(init: str, shape: tuple[int, ...], fan_in: int, key: PRNGKey) -> Array:
    """Draw weights by a name in `INITS`."""
    check_choice("init", init, INITS)
    bound = fan_in**-0.5
    if init == "pytorch":
        # PyTorch's `kaiming_uniform_` with a = sqrt(5) has this bound.
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    # A normal distribution cut at two deviations has 0.8796 of its deviation.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) * (bound / 0.87962566)


def as_example(name: str, x: Any, *shape: int | str) -> Array:
    """Convert one example of a network to an array; text in its shape fits any length."""
    shape_text = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = as_array(name, x, f"real numbers, one example {shape_text}")
    array = as_numbers(name, array, frozenset({"float"}))

    fits = array.ndim == len(shape)
    for size, length in zip(shape, array.shape, strict=False):
        if isinstance(size, int) and size != length:
            fits = False
    if not fits:
        advice = ""
        if array.ndim > len(shape):
            advice = "Map the network over examples by `jax.vmap`"
        fail(name, f"be one example of shape {shape_text}", f"shape {array.shape}", advice)
    return jnp.asarray(array)


def check_sizes(**sizes: int) -> None:
    """Raise unless all sizes are counts of at least 1."""
    for name, size in sizes.items():
        check_count(name, size, minimum=1)


def _draw_bias(init: str, outputs: int, fan_in: int, key: PRNGKey) -> Array:
    if init == "lecun":
        return jnp.zeros(outputs)
    return draw_weights(init, (outputs,), fan_in, key)


class Affine(eqx.Module):
    """The layer W x + b, or W x.

    Attributes:
        weight: W, [out, in].
        bias: b, [out], or None.
    """

    weight: Float[Array, "o i"]
    bias: Float[Array, " o"] | None

    @validated
    def __init__(
        self, inputs: Size, outputs: Size, *, bias: bool = True, init: str = "pytorch", key: PRNGKey
    ):
        """Draw a layer.

        Args:
            inputs: Width of the input.
            outputs: Width of the output.
            bias: If False, the layer has no bias.
            init: Initialisation, one of `INITS`; "lecun" sets the bias to zero.
            key: Key of the draw.
        """
        weight_key, bias_key = jax.random.split(key)
        self.weight = draw_weights(init, (inputs, outputs), inputs, weight_key).T
        self.bias = _draw_bias(init, outputs, inputs, bias_key) if bias else None

    def __call__(self, x: Float[Array | np.ndarray, " i"]) -> Float[Array, " o"]:
        """Return the output."""
        x = as_example("x", x, self.weight.shape[-1])
        y = self.weight @ x
        if self.bias is None:
            return y
        return y + self.bias


class Convolution(eqx.Module):
    """5 x 5 convolution of stride 1 that keeps the size of the image.

    Attributes:
        weight: Kernel, [5, 5, in, out].
        bias: Bias, [out].
    """

    weight: Float[Array, "5 5 i o"]
    bias: Float[Array, " o"]

    @validated
    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        *,
        transposed: bool = False,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a layer.

        Args:
            inputs: Number of input channels.
            outputs: Number of output channels.
            transposed: If True, "pytorch" draws weights of PyTorch's transposed convolution.
            init: Initialisation, one of `INITS`; "lecun" sets the bias to zero.
            key: Key of the draw.
        """
        weight_key, bias_key = jax.random.split(key)
        fan_in = 25 * inputs
        # PyTorch counts the outputs of a transposed convolution as its fan-in.
        if transposed and init == "pytorch":
            fan_in = 25 * outputs
        self.weight = draw_weights(init, (5, 5, inputs, outputs), fan_in, weight_key)
        self.bias = _draw_bias(init, outputs, fan_in, bias_key)

    def __call__(self, x: Float[Array | np.ndarray, "h w i"]) -> Float[Array, "h w o"]:
        """Return the output."""
        x = as_example("x", x, "height", "width", self.weight.shape[-2])
        return _convolve(x, self.weight, padding=2) + self.bias[None, None]

    def upsampled(self, x: Float[Array | np.ndarray, "h w i"]) -> Float[Array, "2*h 2*w o"]:
        """Upsample the input by 2 with nearest neighbours and return its convolution."""
        x = as_example("x", x, "height", "width", self.weight.shape[-2])
        height, width, _ = x.shape
        # Of the 5 x 5 entries under the kernel at most 3 x 3 differ. Weights of equal entries are
        # added before the convolution: 9 products instead of 25.
        is_equal = jnp.asarray(_EQUAL_ENTRIES, x.dtype)
        # Along rows a is the output's parity, p its entry and k the kernel's row, as in
        # `_EQUAL_ENTRIES`; along columns these are b, q and l. Channels are i and o.
        # Default precision would change the weights on an accelerator.
        merged = jnp.einsum(
            "apk,bql,klio->pqiabo", is_equal, is_equal, self.weight, precision="highest"
        )
        kernel = merged.reshape(3, 3, x.shape[2], -1)

        # The convolution returns the four outputs of each entry, even and odd in both directions.
        outputs = _convolve(x, kernel, padding=1)
        outputs = outputs.reshape(height, width, 2, 2, -1)
        image = outputs.transpose(0, 2, 1, 3, 4)
        image = image.reshape(2 * height, 2 * width, -1)
        return image + self.bias[None, None]


_EQUAL_ENTRIES = (
    ((1, 1, 0, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 0, 1)),
    ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 1)),
)
"""1 if a row of the kernel meets an entry of the input, else 0: [parity, entry, row of the kernel].

The parity is even or odd, of the output's row; the entry lies before, at or after the output's.
Columns have the same table.
"""


def _convolve(
    x: Float[Array, "h w i"], weight: Float[Array, "k l i o"], *, padding: int
) -> Float[Array, "h w o"]:
    """Return the convolution of one image, of stride 1."""
    # Channels last: XLA's CPU convolutions are fastest in this layout.
    layout = ("NHWC", "HWIO", "NHWC")
    paddings = [(padding, padding)] * 2
    batch = lax.conv_general_dilated(x[None], weight, (1, 1), paddings, dimension_numbers=layout)
    return batch[0]


def max_pool(x: Float[Array, "h w c"]) -> Float[Array, "h//2 w//2 c"]:
    """Return the maximum of each disjoint 2 x 2 square of one image."""
    # The gradient of three elementwise maxima is several times faster than that of `reduce_window`.
    upper = x[::2]
    lower = x[1::2]
    upper_maximum = jnp.maximum(upper[:, ::2], upper[:, 1::2])
    lower_maximum = jnp.maximum(lower[:, ::2], lower[:, 1::2])
    return jnp.maximum(upper_maximum, lower_maximum)
