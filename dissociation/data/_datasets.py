"""Datasets of labelled images, loaded by name."""

import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_same_length, fail, is_traced
from dissociation._core.conversion import as_array, as_classes, as_one_hot
from dissociation._core.keys import named_key
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.data._glyphs import glyph_data
from dissociation.data._mnist import mnist_data


class Dataset(eqx.Module):
    """Labelled images for training and testing, checked when the dataset is made.

    Images are flat, [n, d]. Labels, integers [n] or one-hot rows [n, classes], are stored one-hot.
    Integers define classes up to the largest of both splits; pass one-hot rows if there are more.

    Attributes:
        name: Source of the images.

    Raises:
        TypeError: If images or labels do not hold numbers.
        ValueError: If the name is empty, lengths or widths disagree, an image is not finite or
            holds integers above 1, or labels are neither integers from 0 nor one-hot.
    """

    name: str = eqx.field(static=True)
    train_images: Float[Array | np.ndarray, "n d"]
    train_labels: Float[Array | np.ndarray, "n classes"]
    test_images: Float[Array | np.ndarray, "m d"]
    test_labels: Float[Array | np.ndarray, "m classes"]

    @validated(finite=("train_images", "test_images"), pixels=("train_images", "test_images"))
    def __init__(
        self,
        name: str,
        train_images: Float[Array | np.ndarray, "n d"],
        train_labels: Any,
        test_images: Float[Array | np.ndarray, "m d"],
        test_labels: Any,
    ):
        if not name:
            fail("name", "say where the data come from", "an empty string")
        self.name = name
        self.train_images = train_images
        self.test_images = test_images
        num_classes = max(
            _num_classes("train_labels", train_labels), _num_classes("test_labels", test_labels)
        )
        self.train_labels = _one_hot("train", train_images, train_labels, num_classes)
        self.test_labels = _one_hot("test", test_images, test_labels, num_classes)
        check_same_length(
            "train_labels", self.num_classes, "test_labels", self.test_labels.shape[1], "classes"
        )

    @property
    def num_pixels(self) -> int:
        """Number of features of one image."""
        return self.train_images.shape[1]

    @property
    def num_classes(self) -> int:
        """Number of columns of the labels."""
        return self.train_labels.shape[1]


def _num_classes(name: str, labels: Any) -> int:
    """Return the smallest number of classes that the labels allow, 0 for traced integers."""
    labels = as_array(name, labels, "integers [n] or one-hot rows [n, classes]", bare=True)
    if labels.ndim > 1:
        return labels.shape[1]
    if is_traced(labels):
        return 0
    return int(np.max(np.asarray(as_classes(name, labels)))) + 1


def _one_hot(split: str, images: Any, labels: Any, num_classes: int) -> Any:
    """Return the labels of a split as one-hot rows, as many as images."""
    rows = as_one_hot(f"{split}_labels", labels, num_classes or None)
    check_same_length(f"{split}_images", len(images), f"{split}_labels", len(rows))
    return rows


def _glyphs(
    num_train: int | None, num_test: int | None, folder: Any, key: PRNGKey | None
) -> tuple[np.ndarray, ...]:
    if key is None:
        key = named_key("glyphs")
    if num_train is None:
        num_train = 10_000
    if num_test is None:
        num_test = 2_000
    return glyph_data(num_train, num_test, key=key)


def _mnist(
    num_train: int | None, num_test: int | None, folder: Any, key: PRNGKey | None
) -> tuple[np.ndarray, ...]:
    train_images, train_labels, test_images, test_labels = mnist_data(folder=folder)
    return (
        _leading("num_train", num_train, train_images),
        _leading("num_train", num_train, train_labels),
        _leading("num_test", num_test, test_images),
        _leading("num_test", num_test, test_labels),
    )


def _leading(name: str, number: int | None, array: np.ndarray) -> np.ndarray:
    """Return the leading rows of an array of MNIST, or all if `number` is None."""
    if number is None or number == len(array):
        return array
    if number > len(array):
        fail(name, f"be at most {len(array)}, which is all of MNIST", number)
    return array[:number].copy()  # a view would keep all images in memory


SOURCES: dict[str, tuple[str, Callable[..., tuple[np.ndarray, ...]]]] = {
    "glyphs": ("digits drawn by code", _glyphs),
    "mnist": ("MNIST", _mnist),
}
"""Description and loader of each dataset.

A loader takes the numbers of training and test images (None: defaults), folder and key, and returns
both splits.
"""

NAMES = tuple(SOURCES)
"""Names that `load` accepts."""


@validated
def load(
    name: str,
    *,
    num_train: int | None = None,
    num_test: int | None = None,
    folder: str | os.PathLike[str] | None = None,
    key: PRNGKey | None = None,
) -> Dataset:
    """Load a dataset by name.

    Args:
        name: One of `NAMES`: "glyphs" (digits drawn by code), "mnist".
        num_train: Training images, at least 1; default 10 000 glyphs or MNIST's 60 000. From MNIST,
            the leading images are taken.
        num_test: Test images, at least 1; default 2 000 glyphs or MNIST's 10 000.
        folder: Folder of MNIST's files, see `mnist_data`; ignored for glyphs.
        key: Random key of the glyphs, by default `named_key("glyphs")`; ignored for MNIST.

    Returns:
        The dataset of float32 NumPy arrays: images [n, 784] in [0, 1], one-hot labels [n, 10].

    Raises:
        ValueError: If `name` is unknown or MNIST has fewer images; see `mnist_data` for other
            errors.
    """
    check_choice("name", name, NAMES)
    for argument, number in (("num_train", num_train), ("num_test", num_test)):
        if number is not None:
            check_count(argument, number, minimum=1)
    _, load_arrays = SOURCES[name]
    return Dataset(name, *load_arrays(num_train, num_test, folder, key))
