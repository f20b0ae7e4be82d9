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
        self.train_images, self.test_images = train_images, test_images
        labels = {"train": train_labels, "test": test_labels}
        classes = max(_classes_in(f"{split}_labels", given) for split, given in labels.items())
        for split, images in (("train", train_images), ("test", test_images)):
            rows = as_one_hot(f"{split}_labels", labels[split], classes or None)
            check_same_length(f"{split}_images", len(images), f"{split}_labels", len(rows))
            setattr(self, f"{split}_labels", rows)
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


def _classes_in(name: str, labels: Any) -> int:
    """Return the smallest number of classes that the labels allow, 0 for traced integers."""
    labels = as_array(name, labels, "integers [n] or one-hot rows [n, classes]", bare=True)
    if labels.ndim > 1:
        return labels.shape[1]
    return 0 if is_traced(labels) else int(np.max(np.asarray(as_classes(name, labels)))) + 1


def _glyphs(
    train: int | None, test: int | None, folder: Any, key: PRNGKey | None
) -> tuple[np.ndarray, ...]:
    key = named_key("glyphs") if key is None else key
    return glyph_data(10_000 if train is None else train, 2_000 if test is None else test, key=key)


def _mnist(
    train: int | None, test: int | None, folder: Any, key: PRNGKey | None
) -> tuple[np.ndarray, ...]:
    sizes = (("num_train", train),) * 2 + (("num_test", test),) * 2
    arrays = list(mnist_data(folder=folder))
    for i, (name, number) in enumerate(sizes):
        if number is not None and number > len(arrays[i]):
            fail(name, f"be at most {len(arrays[i])}, which is all of MNIST", number)
        if number is not None and number < len(arrays[i]):
            arrays[i] = arrays[i][:number].copy()  # a view would keep all images in memory
    return tuple(arrays)


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
    return Dataset(name, *SOURCES[name][1](num_train, num_test, folder, key))
