"""Tasks made from labelled pictures: which way up they are, and coarser classes.

Everything here is a pure function of arrays and a key, for `jit` and `vmap`.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key, Num, Shaped, UInt32

from dissociation.checks import check_count, check_ndim, check_same_length, fail

AnyKey = Key[Array, ""] | UInt32[Array, "2"]

NUM_QUARTERS = 4
"""Turns by 0, 90, 180 and 270 degrees."""


def least_prime_factor(number: int) -> int:
    """The smallest prime that divides `number`; 0 and 1, which have none, stay themselves.

    Args:
        number: At least 0.

    Returns:
        A prime, or 0 or 1.

    Raises:
        TypeError: If `number` is no Python integer.
        ValueError: If it is negative.

    Examples:
        >>> [least_prime_factor(digit) for digit in range(10)]
        [0, 1, 2, 3, 2, 5, 2, 7, 2, 3]
    """
    number = check_count("number", number)
    if number < 2:
        return number
    return next((p for p in range(2, math.isqrt(number) + 1) if number % p == 0), number)


COARSE_CLASSES = tuple(sorted({least_prime_factor(digit) for digit in range(10)}))
"""What the columns of coarse-grained labels stand for: 0, 1, 2, 3, 5, 7."""


def _side(images: Shaped[Array, "n ..."]) -> int:
    """The side of square pictures, flat or not."""
    shape = images.shape
    if len(shape) == 3 and shape[1] == shape[2]:
        return shape[1]
    if len(shape) == 2 and math.isqrt(shape[1]) ** 2 == shape[1]:
        return math.isqrt(shape[1])
    return fail("images", "be square pictures, [n, side * side] or [n, side, side]", f"shape {shape}")


def rotated_quarters(
    images: Num[Array | np.ndarray, "n *picture"], *, key: AnyKey
) -> tuple[Num[Array, "n *picture"], Float[Array, "n 4"]]:
    """Turns a random quarter of the pictures by 0, 90, 180 and 270 degrees each: the task is to tell the turn.

    The pictures are permuted, cut into four quarters, turned counter-clockwise (row 0 is the top), and permuted
    again. The cut comes after a permutation because the order of a data set may carry information: the later half
    of MNIST's test set is easier than the first.

    Args:
        images: Square pictures, flat [n, side * side] or [n, side, side], n at least 4. None is dropped: if four does
            not divide n, the first n mod 4 quarters hold one picture more.
        key: Picks both permutations.

    Returns:
        `(images, labels)`: the turned pictures in the shape and dtype that they came in, and one-hot labels [n, 4],
        column k for k quarter turns; the labels' dtype is the pictures', float32 for integer pictures.

    Raises:
        ValueError: If the pictures are not square, or fewer than four.
    """
    images = jnp.asarray(images)
    side, num = _side(images), images.shape[0]
    if num < NUM_QUARTERS:
        fail("images", "hold at least 4 pictures", num)
    dtype = images.dtype if jnp.issubdtype(images.dtype, jnp.floating) else jnp.float32
    first_key, last_key = jax.random.split(key)
    order = jax.random.permutation(first_key, num)
    quarters = jnp.array_split(images[order].reshape(num, side, side), NUM_QUARTERS)
    turned = jnp.concatenate([jnp.rot90(quarter, k, axes=(1, 2)) for k, quarter in enumerate(quarters)])
    turns = np.repeat(np.arange(NUM_QUARTERS), [len(quarter) for quarter in quarters])
    last = jax.random.permutation(last_key, num)
    labels = jax.nn.one_hot(turns, NUM_QUARTERS, dtype=dtype)
    return turned.reshape(images.shape)[last], labels[last]


def coarse_labels(labels: Float[Array | np.ndarray, "n classes"]) -> Float[Array, "n 6"]:
    """Adds up the label columns of digits with one least prime factor: 4, 6, 8 join 2, and 9 joins 3.

    Args:
        labels: One-hot labels of the digits 0 to 9, or probabilities of them, [n, 10].

    Returns:
        Labels [n, 6] whose columns stand for `COARSE_CLASSES`, that is 0, 1, 2, 3, 5, 7: one-hot stays one-hot, and
        probabilities still add up to what they did.

    Raises:
        ValueError: If there are not ten columns.
    """
    labels = jnp.asarray(labels)
    check_ndim("labels", labels, 2, "[samples, classes]")
    if labels.shape[1] != 10:
        fail("labels", "have 10 columns, one per digit", labels.shape[1])
    digits = [[d for d in range(10) if least_prime_factor(d) == coarse] for coarse in COARSE_CLASSES]
    return jnp.stack([sum(labels[:, d] for d in group) for group in digits], axis=1)


def coarse_grained(
    images: Shaped[Array | np.ndarray, "n *picture"],
    labels: Float[Array | np.ndarray, "n classes"],
    *,
    key: AnyKey | None = None,
) -> tuple[Shaped[Array, "n *picture"], Float[Array, "n 6"]]:
    """The digits under coarser labels: the least prime factor of the digit, 0 and 1 kept.

    Args:
        images: Pictures, one per row, of any shape; returned as they are but for their order.
        labels: One-hot labels of the digits 0 to 9, [n, 10].
        key: Permutes pictures and labels together; None keeps the order.

    Returns:
        `(images, labels)`, the labels [n, 6] with columns for 0, 1, 2, 3, 5, 7 (`COARSE_CLASSES`).

    Raises:
        ValueError: If the numbers of pictures and labels differ, or there are not ten label columns.
    """
    images, coarse = jnp.asarray(images), coarse_labels(labels)
    check_same_length("images", images.shape[0], "labels", coarse.shape[0])
    if key is None:
        return images, coarse
    order = jax.random.permutation(key, images.shape[0])
    return images[order], coarse[order]
