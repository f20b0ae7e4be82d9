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
    """Return the weights to move.

    They are those of a perceptron's first layer, else the group's incoming weights.
    """
    model = take(models, 0)
    if architecture == "mlp":
        return layer_inputs(model, images, ".layers[0].weight")
    incoming = [slot for slot in group.slots if not slot.outgoing and len(slot.shape) > 1]
    return layer_inputs(model, images, incoming[0].path)


def null_spaces(
    architecture: str,
    models: Any,
    path: str,
    images: np.ndarray,
    num_members: int,
    published: Array | np.ndarray | None = None,
) -> dict[str, Any]:
    """Return null spaces of layer inputs in float64, and the singular values at the cut.

    `basis` is [1 or members, dimension, features], padded with zeros. Images have one exact null
    space. Hidden layers are rounded, so singular values below 1e-6 of the largest count as zero,
    and there is a basis per member. Numbers are those of the smallest null space and the least
    clear cut. `published_basis` is that of the images `published` by the usual float32 cut-off.
    """
    if architecture == "mlp":
        spectra = [null_spectrum(images)]
    else:
        spectra = []
        for index in range(num_members):
            rows = _rows(take(models, index), images, path)
            spectra.append(null_spectrum(rows, 1e-6))

    ranks = []
    dimensions = []
    smallest_kept = []
    largest_cut = [0.0]
    for spectrum in spectra:
        rank = spectrum.rank
        singular_values = spectrum.singular_values
        ranks.append(rank)
        dimensions.append(len(spectrum.basis))
        smallest_kept.append(singular_values[rank - 1])
        if rank < len(singular_values):
            largest_cut.append(singular_values[rank])
    bases = []
    for spectrum, dimension in zip(spectra, dimensions, strict=True):
        padding = (0, max(dimensions) - dimension)
        bases.append(np.pad(spectrum.basis, (padding, (0, 0))))
    measures = {
        "basis": np.stack(bases),
        "dimension": min(dimensions),
        "rank": max(ranks),
        "smallest_kept": min(smallest_kept),
        "largest_cut": max(largest_cut),
    }
    if published is not None:
        rtol = len(published) * float(np.finfo(np.float32).eps)
        measures["published_basis"] = null_spectrum(published, rtol).basis
    return measures


def _rows(model: Any, images: np.ndarray, path: str) -> np.ndarray:
    batches = []
    for start in range(0, len(images), BATCH):
        rows = _rows_of_batch(model, images[start : start + BATCH], path)
        batches.append(np.asarray(rows))
    return np.concatenate(batches)


@eqx.filter_jit
def _rows_of_batch(model: Any, images: Array | np.ndarray, path: str) -> Array:
    return layer_inputs(model, images, path).rows


def null_perturbed(weights: LayerInputs, std: float) -> Callable[[Any, tuple[Array, Array]], Any]:
    """Return a rewrite of a network, a key and a basis, orthonormal rows [dimension, features]."""

    def rewrite(model: Any, key_and_basis: tuple[Array, Array]) -> Any:
        key, basis = key_and_basis
        space = NullSpace(weights.path, weights.axes, len(weights.shape), basis)
        return null_perturb(space, std, key=key)(model)

    return rewrite
