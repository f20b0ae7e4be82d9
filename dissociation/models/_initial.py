"""Initial weights by the defaults of common libraries."""

from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated

Initialiser = Callable[[PRNGKey, tuple[int, ...], int], Array]

INITS = ("pytorch", "lecun")
"""PyTorch's default (uniform in +-1/sqrt(fan_in)), or flax's (normal of variance 1/fan_in, cut at two deviations)."""


@validated
def draw_weights(
    init: str | Initialiser, shape: tuple[int, ...], fan_in: int, *, key: PRNGKey
) -> Float[Array, "*shape"]:
    """Draw weights by a name in `INITS` or a function `(key, shape, fan_in) -> array`."""
    fan_in = check_count("fan_in", fan_in, minimum=1)
    if not isinstance(init, str):
        weights = init(key, shape, fan_in)
        if weights.shape != shape:
            fail("init", f"give weights of shape {shape}", weights.shape)
        return weights
    check_choice("init", init, INITS)
    bound = fan_in**-0.5
    if init == "pytorch":
        # PyTorch's `kaiming_uniform_` with a = sqrt(5) has this bound.
        return jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    # A normal distribution cut at two deviations has 0.8796 of its deviation.
    return jax.random.truncated_normal(key, -2.0, 2.0, shape) * (bound / 0.87962566)
