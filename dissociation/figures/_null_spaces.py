"""Null spaces of the weights that figures move: of all that the data shows them."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._null_spaces import NullSpectrum, null_spectrum
from dissociation.rewrites._rewrites import NullSpace, null_perturb
from dissociation.rewrites._seen import LayerInputs, layer_inputs
from dissociation.training._members import take

BATCH = 1000
"""Images that networks see at once."""


def moved_weights(architecture: str, models: Any, group: NeuronGroup, images: np.ndarray) -> LayerInputs:
    """The weights that are moved in a null space: of a perceptron the first, of others those that make the group."""
    made = next(slot.path for slot in group.slots if not slot.outgoing and len(slot.shape) > 1)
    return layer_inputs(take(models, 0), images, ".layers[0].weight" if architecture == "mlp" else made)


def null_spaces(architecture: str, models: Any, path: str, images: np.ndarray, num_members: int) -> dict[str, Any]:
    """Null spaces of what the moved weights see, on the host in float64, with what shows how clear the cuts are.

    Of images themselves it is one for all members, exact for float32 numbers. What a network makes of them is rounded,
    so that smaller singular values than 1e-6 of the largest count as zero; then each member has its own basis, padded
    with zeros to the largest.
    """
    if architecture == "mlp":
        return _described([null_spectrum(images)])
    spectra = []
    for index in range(num_members):
        one = take(models, index)
        parts = (images[start : start + BATCH] for start in range(0, len(images), BATCH))
        spectra.append(null_spectrum(np.concatenate([np.asarray(_rows(one, part, path)) for part in parts]), 1e-6))
    return _described(spectra)


@eqx.filter_jit
def _rows(model: Any, images: Array | np.ndarray, path: str) -> Array:
    return layer_inputs(model, images, path).rows


def _described(spectra: list[NullSpectrum]) -> dict[str, Any]:
    """Bases, [features, features] at most each, the smallest dimension, and the least clear cut."""
    dimension = max(len(one.basis) for one in spectra)
    bases = np.zeros((len(spectra), dimension, spectra[0].basis.shape[-1]))
    for own, one in zip(bases, spectra, strict=True):
        own[: len(one.basis)] = one.basis
    cut = [one.singular_values[one.rank] if one.rank < len(one.singular_values) else 0.0 for one in spectra]
    return {
        "basis": bases,
        "dimension": min(len(one.basis) for one in spectra),
        "rank": max(one.rank for one in spectra),
        "smallest_kept": min(one.singular_values[one.rank - 1] for one in spectra),
        "largest_cut": max(cut),
    }


def of_members(bases: np.ndarray, num_members: int) -> Array:
    """A basis for every member, of one for all or for each."""
    return jnp.asarray(np.broadcast_to(bases, (num_members, *bases.shape[-2:])))


def null_perturbed(weights: LayerInputs, std: float) -> Callable[[Any, tuple[Array, Array]], Any]:
    """The rewrite of a network, given a key and a basis, orthonormal rows [dimension, features]."""

    def moved(model: Any, given: tuple[Array, Array]) -> Any:
        key, basis = given
        space = NullSpace(weights.path, weights.leaf, weights.axes, basis, weights.shape)
        return null_perturb(space, std, key=key)(model)

    return moved
