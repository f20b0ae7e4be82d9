"""Read bilinear weights: forms, eigenvectors, their similarity, and certified radii."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "decompose", "Spectrum", "interaction_tensor", "truncate", "truncated_outputs",
    "adversarial_mask", "rank_similarity", "matched_similarity", "form_similarity", "pair_mean",
    "margins", "certified_radius", "certified_accuracy",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.bilinear._certificate import certified_accuracy, certified_radius, margins
    from dissociation.bilinear._forms import (
        Spectrum,
        adversarial_mask,
        decompose,
        interaction_tensor,
        truncate,
        truncated_outputs,
    )
    from dissociation.bilinear._similarity import (
        form_similarity,
        matched_similarity,
        pair_mean,
        rank_similarity,
    )
else:
    __getattr__, __dir__ = attach(__name__)
