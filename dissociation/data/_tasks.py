"""Tasks made from labelled images: which way up they are, and coarser classes.

Everything here is a pure function of arrays and a key, for `jit` and `vmap`.
"""

import math
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Real

from dissociation._core.checks import check_count, fail
from dissociation._core.types import Labels, PRNGKey
from dissociation._core.validation import validated

Digits = Annotated[Float[Array | np.ndarray, "n 10"], Labels(one_hot=True, soft=True)]

NUM_QUARTERS = 4
"""Turns by 0, 90, 180 and 270 degrees."""


@validated
def least_prime_factor(number: int) -> int:
    """The smallest prime that divides `number`; 0 and 1, which have none, stay themselves."""
    number = check_count("number", number)
    return next((p for p in range(2, math.isqrt(number) + 1) if number % p == 0), number)


COARSE_CLASSES = tuple(sorted({least_prime_factor(digit) for digit in range(10)}))
"""What the columns of coarse-grained labels stand for: 0, 1, 2, 3, 5, 7."""


def _side(images: Real[Array, "n ..."]) -> int:
    """The side of square images, flat or not."""
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
    """Turns a random quarter of the images by 0, 90, 180 and 270 degrees each: the task is to tell the turn.

    The images are permuted, cut into four quarters, turned counter-clockwise (row 0 is the top), and permuted
    again. The cut comes after a permutation because the order of a data set may carry information: the later half
    of MNIST's test set is easier than the first.

    Args:
        images: Square images, flat [n, side * side] or [n, side, side], n at least 4. None is dropped: if four does
            not divide n, the first n mod 4 quarters hold one image more.
        key: Picks both permutations.

    Returns:
        `(images, labels)`: the turned images in the shape and dtype that they came in, and one-hot labels [n, 4],
        column k for k quarter turns; the labels' dtype is the images', float32 for integer images.
    """
    images = jnp.asarray(images)
    side, num = _side(images), images.shape[0]
    if num < NUM_QUARTERS:
        fail("images", "hold at least 4 images", num)
    dtype = images.dtype if jnp.issubdtype(images.dtype, jnp.floating) else jnp.float32
    first_key, last_key = jax.random.split(key)
    order = jax.random.permutation(first_key, num)
    quarters = jnp.array_split(images[order].reshape(num, side, side), NUM_QUARTERS)
    turned = jnp.concatenate([jnp.rot90(quarter, k, axes=(1, 2)) for k, quarter in enumerate(quarters)])
    turns = np.repeat(np.arange(NUM_QUARTERS), [len(quarter) for quarter in quarters])
    last = jax.random.permutation(last_key, num)
    return turned.reshape(images.shape)[last], jax.nn.one_hot(turns, NUM_QUARTERS, dtype=dtype)[last]


@validated
def coarse_labels(labels: Digits) -> Float[Array, "n 6"]:
    """Adds up the label columns of digits with one least prime factor: 4, 6, 8 join 2, and 9 joins 3.

    `labels`: Digits as integers [n] or one-hot rows [n, 10], or rows of their probabilities.
    """
    labels = jnp.asarray(labels)
    digits = [[d for d in range(10) if least_prime_factor(d) == coarse] for coarse in COARSE_CLASSES]
    return jnp.stack([sum(labels[:, d] for d in group) for group in digits], axis=1)


@validated
def coarse_grained(
    images: Real[Array | np.ndarray, "n *image"],
    labels: Digits,
    *,
    key: PRNGKey | None = None,
) -> tuple[Real[Array, "n *image"], Float[Array, "n 6"]]:
    """The digits under coarser labels: the least prime factor of the digit, 0 and 1 kept.

    Args:
        images: Images, one per row, of any shape; returned as they are but for their order.
        labels: As in `coarse_labels`.
        key: Permutes images and labels together; None keeps the order.

    Returns:
        `(images, labels)`, the labels [n, 6] with columns for 0, 1, 2, 3, 5, 7 (`COARSE_CLASSES`).

    Raises:
        ValueError: If the numbers of images and labels differ, or there are not ten label columns.
    """
    images, coarse = jnp.asarray(images), coarse_labels(labels)
    if key is None:
        return images, coarse
    order = jax.random.permutation(key, images.shape[0])
    return images[order], coarse[order]
