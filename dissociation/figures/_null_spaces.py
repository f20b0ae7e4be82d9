"""Null spaces of the inputs of weights, in which figures move the weights."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import numpy as np
from jaxtyping import Array

from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._null_spaces import null_spectrum
from dissociation.rewrites._rewrites import NullSpace, null_perturb
from dissociation.rewrites._seen import LayerInputs, layer_inputs
from dissociation.training._members import take

BATCH = 1000
"""Number of images that a network evaluates at once."""


def moved_weights(
    architecture: str, models: Any, group: NeuronGroup, images: np.ndarray
) -> LayerInputs:
    """Return the weights to move, those of a perceptron's first layer, else the group's incoming weights."""
    made = next(slot.path for slot in group.slots if not slot.outgoing and len(slot.shape) > 1)
    return layer_inputs(
        take(models, 0), images, ".layers[0].weight" if architecture == "mlp" else made
    )


def null_spaces(
    architecture: str,
    models: Any,
    path: str,
    images: np.ndarray,
    num_members: int,
    published: Array | np.ndarray | None = None,
) -> dict[str, Any]:
    """Return null spaces of layer inputs in float64: `basis`, `dimension`, `rank` and the singular values at the cut.

    `basis` is [1 or members, dimension, features], padded with zeros. Images have one exact null
    space. Hidden layers are rounded, so singular values below 1e-6 of the largest count as zero,
    and there is a basis per member. Numbers are those of the smallest null space and the least
    clear cut. `published_basis` is that of the images `published` by the usual float32 cut-off.
    """
    if architecture == "mlp":
        spectra = [null_spectrum(images)]
    else:
        spectra = [
            null_spectrum(_rows(take(models, index), images, path), 1e-6)
            for index in range(num_members)
        ]
    dimension = max(len(one.basis) for one in spectra)
    cut = [
        one.singular_values[one.rank] if one.rank < len(one.singular_values) else 0.0
        for one in spectra
    ]
    found = {
        "basis": np.stack(
            [np.pad(one.basis, ((0, dimension - len(one.basis)), (0, 0))) for one in spectra]
        ),
        "dimension": min(len(one.basis) for one in spectra),
        "rank": max(one.rank for one in spectra),
        "smallest_kept": min(one.singular_values[one.rank - 1] for one in spectra),
        "largest_cut": max(cut),
    }
    if published is not None:
        rtol = len(published) * float(np.finfo(np.float32).eps)
        found["published_basis"] = null_spectrum(published, rtol).basis
    return found


def _rows(model: Any, images: np.ndarray, path: str) -> np.ndarray:
    parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
    return np.concatenate([np.asarray(_rows_of_batch(model, part, path)) for part in parts])


@eqx.filter_jit
def _rows_of_batch(model: Any, images: Array | np.ndarray, path: str) -> Array:
    return layer_inputs(model, images, path).rows


def null_perturbed(weights: LayerInputs, std: float) -> Callable[[Any, tuple[Array, Array]], Any]:
    """Return a rewrite of a network, a key and a basis, orthonormal rows [dimension, features]."""

    def moved(model: Any, given: tuple[Array, Array]) -> Any:
        key, basis = given
        space = NullSpace(weights.path, weights.axes, len(weights.shape), basis)
        return null_perturb(space, std, key=key)(model)

    return moved
