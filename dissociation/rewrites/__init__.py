"""Find the neurons of any model, rewrite its weights, and compare networks up to such rewrites."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "neuron_groups", "NeuronGroup", "group_report", "scale", "permute", "rotate", "null_space",
    "null_perturb", "compose", "check_groups", "Rewrite", "duplicate", "add_nuisance",
    "add_phantom", "plant_rsm", "plant_activity", "PlantedActivity", "certify", "Certificate",
    "layer_inputs", "refitted", "parameter_noise", "add_parameter_noise", "null_dimension",
    "match_weights", "match_activations", "Matching", "interpolate", "renormalised", "barrier",
    "barriers", "canonical", "fingerprint", "fingerprint_distance", "cka_range", "CkaRange",
    "approached", "linear_cka_range", "similarity_bounds",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.rewrites._barriers import barrier, barriers, interpolate, renormalised
    from dissociation.rewrites._bounds import similarity_bounds
    from dissociation.rewrites._canonical import canonical, fingerprint, fingerprint_distance
    from dissociation.rewrites._certificate import Certificate, certify
    from dissociation.rewrites._freedom import CkaRange, approached, cka_range, linear_cka_range
    from dissociation.rewrites._groups import NeuronGroup, group_report, neuron_groups
    from dissociation.rewrites._growth import add_nuisance, add_phantom, duplicate
    from dissociation.rewrites._network_matching import Matching, match_activations, match_weights
    from dissociation.rewrites._noise import add_parameter_noise, parameter_noise
    from dissociation.rewrites._null_spaces import null_dimension
    from dissociation.rewrites._plant_activity import PlantedActivity, plant_activity
    from dissociation.rewrites._plant_rsm import plant_rsm
    from dissociation.rewrites._rewrites import (
        Rewrite,
        check_groups,
        compose,
        null_perturb,
        null_space,
        permute,
        rotate,
        scale,
    )
    from dissociation.rewrites._seen import layer_inputs
    from dissociation.rewrites._sizes import refitted
else:
    __getattr__, __dir__ = attach(__name__)
