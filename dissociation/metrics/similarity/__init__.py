"""Do two representations of the same samples resemble each other, up to what does not matter? Twenty-three answers.

Each measure is a function of two arrays, samples first, in the same order; `MEASURES` says which maps of the neurons it
ignores, whether it is a metric, its range, its cost and where it is from.
"""

from dissociation.metrics.similarity.base import Measure
from dissociation.metrics.similarity.canonical import cca, cca_squared, gulp_distance, pwcca, svcca
from dissociation.metrics.similarity.dissimilarity import compare_rdms, crossnobis_rdm, crossnobis_rsa, rdm, rsa
from dissociation.metrics.similarity.embedding import classical_mds, smacof
from dissociation.metrics.similarity.functional import disagreement, jensen_shannon, min_max_disagreement
from dissociation.metrics.similarity.inference import (
    adjust_p_values,
    calibrate,
    jackknife_interval,
    member_interval,
    permutation_test,
)
from dissociation.metrics.similarity.kernels import (
    debiased_cka,
    debiased_rbf_cka,
    distance_correlation,
    linear_cka,
    rbf_cka,
)
from dissociation.metrics.similarity.matching import hard_matching, soft_matching
from dissociation.metrics.similarity.measures import MEASURES, custom_measure
from dissociation.metrics.similarity.neighbourhoods import knn_jaccard, mutual_knn
from dissociation.metrics.similarity.pairs import Similarities, compare, flatten_positions, pairwise
from dissociation.metrics.similarity.predictivity import linear_predictivity, predictivity_path
from dissociation.metrics.similarity.shapes import (
    angular_distance,
    angular_similarity,
    partial_whitening_distance,
    procrustes_distance,
)
from dissociation.metrics.similarity.streaming import (
    baseline_from_moments,
    joint_moments,
    merge_joint_moments,
    predictivity_from_moments,
    similarity_from_moments,
    stream_moments,
)

__all__ = [
    "MEASURES",
    "Measure",
    "Similarities",
    "adjust_p_values",
    "angular_distance",
    "angular_similarity",
    "baseline_from_moments",
    "calibrate",
    "cca",
    "cca_squared",
    "classical_mds",
    "compare",
    "compare_rdms",
    "crossnobis_rdm",
    "crossnobis_rsa",
    "custom_measure",
    "debiased_cka",
    "debiased_rbf_cka",
    "disagreement",
    "distance_correlation",
    "flatten_positions",
    "gulp_distance",
    "hard_matching",
    "jackknife_interval",
    "jensen_shannon",
    "joint_moments",
    "knn_jaccard",
    "linear_cka",
    "linear_predictivity",
    "member_interval",
    "merge_joint_moments",
    "min_max_disagreement",
    "mutual_knn",
    "pairwise",
    "partial_whitening_distance",
    "permutation_test",
    "predictivity_from_moments",
    "predictivity_path",
    "procrustes_distance",
    "pwcca",
    "rbf_cka",
    "rdm",
    "rsa",
    "similarity_from_moments",
    "smacof",
    "soft_matching",
    "stream_moments",
    "svcca",
]
