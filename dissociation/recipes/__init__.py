"""Train the networks of the figures."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "fit_classifiers", "train_mnist", "fresh_networks", "cross_entropy", "train_bilinear",
    "train_grokking", "initial_models", "observation_steps", "squared_error", "CheapMeasures",
    "train_compression",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.recipes._bilinear import train_bilinear
    from dissociation.recipes._compression import train_compression
    from dissociation.recipes._grokking import (
        CheapMeasures,
        initial_models,
        observation_steps,
        squared_error,
        train_grokking,
    )
    from dissociation.recipes._mnist import (
        cross_entropy,
        fit_classifiers,
        fresh_networks,
        train_mnist,
    )
else:
    __getattr__, __dir__ = attach(__name__)
