"""Data and training, under the name that the notebook of the paper imports them by."""

from dissociation.data._mnist import mnist_data
from dissociation.recipes._mnist import (
    HeldOutPerformance,
    cross_entropy,
    fresh_networks,
    train_mnist,
)
from dissociation.recipes._mnist import fit_classifiers as fit_mnist

__all__ = [
    "HeldOutPerformance",
    "cross_entropy",
    "fit_mnist",
    "fresh_networks",
    "mnist_data",
    "train_mnist",
]
