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
"""PyTorch's default (uniform in +-1/sqrt(fan_in)), or flax's (normal of variance 1/fan_in, cut at two deviations)."""


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
    wanted = f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"
    array = as_numbers(
        name, as_array(name, x, f"real numbers, one example {wanted}"), frozenset({"float"})
    )
    sizes = tuple(n if isinstance(m, int) else m for m, n in zip(shape, array.shape, strict=False))
    if array.ndim != len(shape) or sizes != shape:
        advice = "Map the network over examples by `jax.vmap`" if array.ndim > len(shape) else ""
        fail(name, f"be one example of shape {wanted}", f"shape {array.shape}", advice)
    return jnp.asarray(array)


def check_sizes(**sizes: int) -> None:
    """Raise unless all sizes are counts of at least 1."""
    for name, size in sizes.items():
        check_count(name, size, minimum=1)


def _draw_bias(init: str, outputs: int, fan_in: int, key: PRNGKey) -> Array:
    return jnp.zeros(outputs) if init == "lecun" else draw_weights(init, (outputs,), fan_in, key)


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
        first, second = jax.random.split(key)
        self.weight = draw_weights(init, (inputs, outputs), inputs, first).T
        self.bias = _draw_bias(init, outputs, inputs, second) if bias else None

    def __call__(self, x: Float[Array | np.ndarray, " i"]) -> Float[Array, " o"]:
        """Return the output."""
        y = self.weight @ as_example("x", x, self.weight.shape[-1])
        return y if self.bias is None else y + self.bias


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
        first, second = jax.random.split(key)
        # PyTorch counts the outputs of a transposed convolution as its fan-in.
        fan_in = 25 * (outputs if transposed and init == "pytorch" else inputs)
        self.weight = draw_weights(init, (5, 5, inputs, outputs), fan_in, first)
        self.bias = _draw_bias(init, outputs, fan_in, second)

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
        add = jnp.asarray(_EQUAL_ENTRIES, x.dtype)
        # Default precision would change the weights on an accelerator.
        merged = jnp.einsum("apk,bql,klio->pqiabo", add, add, self.weight, precision="highest")
        four = _convolve(x, merged.reshape(3, 3, x.shape[2], -1), padding=1).reshape(
            height, width, 2, 2, -1
        )
        return (
            four.transpose(0, 2, 1, 3, 4).reshape(2 * height, 2 * width, -1) + self.bias[None, None]
        )


_EQUAL_ENTRIES = (
    ((1, 1, 0, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 0, 1)),
    ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 1)),
)
"""Weights that meet the entry before, at and after the output's, for even and odd outputs."""


def _convolve(
    x: Float[Array, "h w i"], weight: Float[Array, "k l i o"], *, padding: int
) -> Float[Array, "h w o"]:
    # Channels last: XLA's CPU convolutions are fastest in this layout.
    kinds, around = ("NHWC", "HWIO", "NHWC"), [(padding, padding)] * 2
    return lax.conv_general_dilated(x[None], weight, (1, 1), around, dimension_numbers=kinds)[0]


def max_pool(x: Float[Array, "h w c"]) -> Float[Array, "h//2 w//2 c"]:
    """Return the maximum of each disjoint 2 x 2 square of one image."""
    # The gradient of three elementwise maxima is several times faster than that of `reduce_window`.
    upper, lower = x[::2], x[1::2]
    return jnp.maximum(
        jnp.maximum(upper[:, ::2], upper[:, 1::2]), jnp.maximum(lower[:, ::2], lower[:, 1::2])
    )
