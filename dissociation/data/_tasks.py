"""Tasks made from labelled images: rotation and coarser classes."""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from dissociation._core.checks import fail
from dissociation._core.types import Labels, PRNGKey
from dissociation._core.validation import validated

Digits = Annotated[Float[Array | np.ndarray, "n 10"], Labels(one_hot=True, soft=True)]

NUM_QUARTERS = 4
"""Number of rotations: 0, 90, 180 and 270 degrees."""


DIGITS_BY_FACTOR = {0: (0,), 1: (1,), 2: (2, 4, 6, 8), 3: (3, 9), 5: (5,), 7: (7,)}
"""Digits by their least prime factors, which are the columns of coarse-grained labels."""


def _side(images: Real[Array, "n ..."]) -> int:
    """Return the side of square images, flat or not."""
    shape = images.shape
    if len(shape) == 3 and shape[1] == shape[2]:
        return shape[1]
    if len(shape) == 2 and math.isqrt(shape[1]) ** 2 == shape[1]:
        return math.isqrt(shape[1])
    return fail("images", "be square images, [n, side * side] or [n, side, side]", f"shape {shape}")


@validated
def rotated_quarters(
    images: Real[Array | np.ndarray, "n *image"], *, key: PRNGKey
) -> tuple[Real[Array, "n *image"], Float[Array, "n 4"]]:
    """Rotate a random quarter of the images by 0, 90, 180 and 270 degrees each.

    The task is to name the rotation.

    Rotation is counter-clockwise, with row 0 at the top. The images are permuted before and after.

    Args:
        images: Square images, flat [n, side * side] or [n, side, side], n at least 4. The first n
            mod 4 quarters hold one image more.
        key: Random key of both permutations.

    Returns:
        `(images, labels)`: the rotated images in their shape and dtype, and one-hot labels [n, 4],
        column k for k quarter turns. The labels' dtype is the images', float32 for integer images.
    """
    images = jnp.asarray(images)
    side = _side(images)
    num = images.shape[0]
    if num < NUM_QUARTERS:
        fail("images", "hold at least 4 images", num)
    dtype = images.dtype if jnp.issubdtype(images.dtype, jnp.floating) else jnp.float32
    first_key, last_key = jax.random.split(key)

    # The later half of MNIST's test set is easier than the first.
    order = jax.random.permutation(first_key, num)
    quarters = jnp.array_split(images[order].reshape(num, side, side), NUM_QUARTERS)
    rotated = [jnp.rot90(quarter, k, axes=(1, 2)) for k, quarter in enumerate(quarters)]
    rotated = jnp.concatenate(rotated).reshape(images.shape)
    turns = np.repeat(np.arange(NUM_QUARTERS), list(map(len, quarters)))
    labels = jax.nn.one_hot(turns, NUM_QUARTERS, dtype=dtype)
    order = jax.random.permutation(last_key, num)
    return rotated[order], labels[order]


def coarse_labels(labels: Digits) -> Float[Array, "n 6"]:
    """Add the label columns [n, 10] of digits with one least prime factor.

    4, 6 and 8 are added to 2, and 9 to 3.
    """
    labels = jnp.asarray(labels)
    columns = []
    for digits in DIGITS_BY_FACTOR.values():
        columns.append(sum(labels[:, digit] for digit in digits))
    return jnp.stack(columns, axis=1)


@validated
def coarse_grained(
    images: Real[Array | np.ndarray, "n *image"],
    labels: Digits,
    *,
    key: PRNGKey | None = None,
) -> tuple[Real[Array, "n *image"], Float[Array, "n 6"]]:
    """Replace the labels of digits by least prime factors; 0 and 1 stay.

    Args:
        images: Images of any shape, [n, ...].
        labels: Digits as integers [n], one-hot rows [n, 10] or rows of probabilities.
        key: Random key that permutes images and labels together; None keeps their order.

    Returns:
        `(images, labels)`, the labels [n, 6] with columns for 0, 1, 2, 3, 5, 7.

    Raises:
        ValueError: If the numbers of images and labels differ, or there are not ten label columns.
    """
    images = jnp.asarray(images)
    coarse = coarse_labels(labels)
    if key is None:
        return images, coarse
    order = jax.random.permutation(key, images.shape[0])
    return images[order], coarse[order]
