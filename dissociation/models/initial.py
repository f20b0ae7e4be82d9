"""How weights begin: the defaults of the common libraries, by name."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float, Key, UInt32

from dissociation.checks import check_choice, check_count

AnyKey = Key[Array, ""] | UInt32[Array, "2"]
Initialiser = Callable[[AnyKey, tuple[int, ...], int], Array]

INITS = ("pytorch", "lecun")
"""PyTorch's default (uniform in +-1/sqrt(fan_in)), or flax's (normal of variance 1/fan_in, cut at two deviations)."""


def draw_weights(
    init: str | Initialiser, shape: tuple[int, ...], fan_in: int, *, key: AnyKey
) -> Float[Array, "*shape"]:
    """Weights of a layer.

    Args:
        init: One of `INITS`, or a function `(key, shape, fan_in) -> array`.
        shape: Of the array.
        fan_in: Inputs of one output, at least 1.
        key: Draws them.

    Returns:
        The weights.

    Raises:
        ValueError: If the name is unknown or `fan_in` below 1.

    >>> bool(abs(draw_weights("pytorch", (3, 100), 100, key=jax.random.key(0))).max() <= 0.1)
    True
    """
    fan_in = check_count("fan_in", fan_in, minimum=1)
    if not isinstance(init, str):
        return init(key, shape, fan_in)
    check_choice("init", init, INITS)
    bound = fan_in**-0.5
    if init == "pytorch":
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    # A normal cut at two deviations has 0.8796 of its deviation left.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) * (bound / 0.87962566)
