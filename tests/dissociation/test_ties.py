"""Ties among computed numbers: what rounding separated is tied again, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import similarity_reference as reference
from scipy import stats

from dissociation import similarity
from dissociation._core.ties import ranks, snapped

RNG = np.random.default_rng(0)


def test_dense_numbers_do_not_melt_into_one_tie():
    values = RNG.uniform(size=200_000).astype(np.float32)  # neighbours within rounding of the largest
    found = np.asarray(ranks(values))
    np.testing.assert_allclose(found, stats.rankdata(values), atol=20)
    assert abs(snapped(values) - values).max() < 1e-4


def test_sizes_zeros_and_numbers_that_are_none():
    values = np.array([1e6, 2.0, 1.0, 2.0 + 1e-15, -1e-17, np.nan, np.inf, np.inf, -np.inf])
    tied = snapped(values, np.abs(np.nan_to_num(values, posinf=1.0, neginf=1.0)))
    np.testing.assert_array_equal(tied, [1e6, 2.0, 1.0, 2.0, -1e-17, np.nan, np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(snapped(values)[4], 0.0)
    same = jnp.array([[3.0, 1.0, 1.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_array_equal(jax.vmap(ranks)(same), [[4, 1.5, 1.5, 3], [2.5] * 4])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(x * snapped(x)))(same), same)
    np.testing.assert_array_equal(snapped(np.arange(3)), np.arange(3))


@pytest.mark.parametrize("apart", [30.0, 1e4])
def test_distances_within_clusters_that_are_far_apart(apart):
    """Differences of products in float32 lose them: all pairs of a cluster were ties."""
    labels = np.repeat(np.arange(4), 25)
    centres = apart * RNG.standard_normal((4, 20))
    x = centres[labels] + RNG.standard_normal((100, 20))
    y = 0.2 * centres[labels] @ RNG.standard_normal((20, 30)) + RNG.standard_normal((100, 30))
    x, y = x.astype(np.float32), y.astype(np.float32)
    for kind in ("euclidean", "cosine"):
        wanted = reference.rsa(x.astype(float), y.astype(float), kind, "spearman")
        np.testing.assert_allclose(similarity.rsa(x, y, rdm=kind, comparison="spearman"), wanted, atol=1e-3)
    wanted = reference.mutual_knn(x.astype(float), y.astype(float), 10)
    np.testing.assert_allclose(similarity.mutual_knn(x, y, num_neighbours=10), wanted, atol=5e-3)
