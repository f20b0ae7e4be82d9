"""Compare two representations of the same samples, in the same order, by measures of `MEASURES`."""

from typing import TYPE_CHECKING

from dissociation._core.lazy import attach

__all__ = [
    "compare", "pairwise", "Similarities", "MEASURES", "custom_measure", "Measure", "linear_cka",
    "debiased_cka", "rbf_cka", "debiased_rbf_cka", "distance_correlation", "procrustes_distance",
    "angular_similarity", "angular_distance", "partial_whitening_distance", "cca", "cca_squared",
    "svcca", "pwcca", "gulp_distance", "rdm", "compare_rdms", "rsa", "crossnobis_rdm",
    "crossnobis_rsa", "mutual_knn", "knn_jaccard", "linear_predictivity", "predictivity_path",
    "hard_matching", "soft_matching", "disagreement", "jensen_shannon", "min_max_disagreement",
    "member_interval", "jackknife_interval", "permutation_test", "calibrate", "adjust_p_values",
    "stream_moments", "similarity_from_moments", "baseline_from_moments", "classical_mds", "smacof",
]  # fmt: skip

if TYPE_CHECKING:
    from dissociation.similarity._base import Measure
    from dissociation.similarity._dissimilarity import (
        compare_rdms,
        crossnobis_rdm,
        crossnobis_rsa,
        knn_jaccard,
        mutual_knn,
        rdm,
        rsa,
    )
    from dissociation.similarity._embedding import classical_mds, smacof
    from dissociation.similarity._functional import (
        disagreement,
        jensen_shannon,
        min_max_disagreement,
    )
    from dissociation.similarity._inference import (
        adjust_p_values,
        calibrate,
        jackknife_interval,
        member_interval,
        permutation_test,
    )
    from dissociation.similarity._kernels import (
        debiased_cka,
        debiased_rbf_cka,
        distance_correlation,
        linear_cka,
        rbf_cka,
    )
    from dissociation.similarity._matched_correlation import hard_matching, soft_matching
    from dissociation.similarity._measures import MEASURES, custom_measure
    from dissociation.similarity._pairs import Similarities, compare, pairwise
    from dissociation.similarity._predictivity import linear_predictivity, predictivity_path
    from dissociation.similarity._shapes import (
        angular_distance,
        angular_similarity,
        cca,
        cca_squared,
        gulp_distance,
        partial_whitening_distance,
        procrustes_distance,
        pwcca,
        svcca,
    )
    from dissociation.similarity._streaming import (
        baseline_from_moments,
        similarity_from_moments,
        stream_moments,
    )
else:
    __getattr__, __dir__ = attach(__name__)
