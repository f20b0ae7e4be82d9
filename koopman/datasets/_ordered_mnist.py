"""Ordered digits: sequences of images of the digits 0, 1, ..., k - 1, 0, 1, ..., in a cycle."""

import os
from typing import NamedTuple

import numpy as np
from jaxtyping import Complex, Float, Int

from dissociation._core.checks import check_count, fail
from dissociation._core.validation import validated
from dissociation.data._datasets import Dataset, load
from koopman.datasets._spectrum_type import conjugate_order


class OrderedDigits(NamedTuple):
    """Sequence of digits.

    Attributes:
        images: Images in [0, 1], [n, 28, 28].
        labels: Digits 0 to k - 1 in a cycle, [n].
        name: Name of the images' data set.
    """

    images: Float[np.ndarray, "n 28 28"]
    labels: Int[np.ndarray, " n"]
    name: str


@validated
def ordered_mnist(
    num_digits: int = 5,
    *,
    data: str | Dataset = "glyphs",
    folder: str | os.PathLike[str] | None = None,
) -> OrderedDigits:
    """Return a sequence of the digits 0 to k - 1 in a cycle, as long as the smallest class allows.

    Args:
        num_digits: k, from 1 to 10.
        data: "glyphs" (digits drawn by code), "mnist", or a data set of 28 x 28 images. Training
            images come first, then test images.
        folder: Folder of MNIST, see `dissociation.data.load`.

    Raises:
        ValueError: If a class is missing, or images are not 28 x 28.
        FileNotFoundError: If MNIST is not found.

    References:
        Kostic et al. (2022), see `koopman.fit`, section 6.
    """
    count = check_count("num_digits", num_digits, minimum=1, maximum=10)
    source = load(data, folder=folder) if isinstance(data, str) else data
    if source.num_pixels != 784:
        fail("data", "hold images of 28 x 28 pixels", f"{source.num_pixels} pixels")
    rows = np.concatenate([np.asarray(source.train_labels), np.asarray(source.test_labels)])
    images = np.concatenate([np.asarray(source.train_images), np.asarray(source.test_images)])
    labels = rows.argmax(1)

    indices_of_digits = [np.flatnonzero(labels == digit) for digit in range(count)]
    length = min(map(len, indices_of_digits))
    if length == 0:
        classes = sorted(set(labels.tolist()))
        fail("data", f"hold every digit below {count}", f"classes {classes}")
    # Images of a class keep the order of the source, so that only the class can be forecast.
    cycles = np.stack([indices[:length] for indices in indices_of_digits], 1)
    order = cycles.reshape(-1)
    digits = labels[order].astype(np.int32)
    return OrderedDigits(images[order].reshape(-1, 28, 28), digits, source.name)


@validated
def cycle_spectrum(num_digits: int = 5) -> Complex[np.ndarray, " k"]:
    """Return the eigenvalues [k] of the cycle of classes, exp(2 pi i j / k).

    They are in the order j = 0, 1, -1, 2, -2, ...

    Args:
        num_digits: k, 1 or more.
    """
    count = check_count("num_digits", num_digits, minimum=1)
    roots = np.exp(2j * np.pi * np.arange(count) / count)
    return roots[conjugate_order(roots)]
