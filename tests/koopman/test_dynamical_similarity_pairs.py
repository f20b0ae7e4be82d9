"""Tests of tables of distances between linear dynamics."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman import dynamical_distance, pairwise_dynamical_distance
from koopman._operators import _dynamical_similarity as dynamical_similarity

MATRICES = np.random.default_rng(0).normal(size=(5, 3, 3))
MATRICES[3:] += MATRICES[3:].swapaxes(1, 2)


@pytest.fixture(scope="module")
def table():
    """Distances within the five matrices, of which the last two are symmetric."""
    with jax.enable_x64(True):
        return np.asarray(pairwise_dynamical_distance(MATRICES, key=jax.random.key(20)))


@pytest.fixture(scope="module")
def rectangle():
    """Distances of the first two matrices from the other three."""
    with jax.enable_x64(True):
        return np.asarray(
            pairwise_dynamical_distance(MATRICES[:2], MATRICES[2:], key=jax.random.key(20))
        )


def test_it_is_a_metric(table):
    np.testing.assert_array_equal(table, table.T)
    np.testing.assert_array_equal(np.diagonal(table), 0)
    for i, j, k in itertools.permutations(range(5), 3):
        assert 0 < table[i, j] <= table[i, k] + table[k, j]


def test_symmetric_matrices_are_as_far_as_their_sorted_eigenvalues(table):
    first, second = np.linalg.eigvalsh(MATRICES[3:])
    np.testing.assert_allclose(table[3, 4], np.linalg.norm(first - second), rtol=1e-9)


def test_two_sets_have_the_distances_of_one(table, rectangle):
    np.testing.assert_allclose(rectangle, table[:2, 2:], rtol=1e-9)


def test_one_matrix_has_no_pairs(key, x64):
    np.testing.assert_array_equal(pairwise_dynamical_distance(MATRICES[:1], key=key), [[0]])


@pytest.mark.slow  # a program of its own, as the next three
def test_a_pair_of_a_table_is_the_distance_of_two(key, table, x64):
    np.testing.assert_allclose(
        dynamical_distance(MATRICES[3], MATRICES[1], key=key), table[1, 3], rtol=1e-9
    )


@pytest.mark.slow
def test_pairs_at_once_are_the_pairs_one_by_one(key, table, x64):
    """As on an accelerator, in chunks that do not divide their number."""
    pairs = np.triu_indices(5, 1)
    matrices = jnp.asarray(MATRICES)
    found = dynamical_similarity._solve(matrices, *pairs, key, 32, 100, "frobenius", 4)
    loop = dynamical_similarity._align(matrices, *pairs, key, 32, 100, "frobenius")
    np.testing.assert_allclose(found.distance, table[pairs], rtol=1e-9)
    np.testing.assert_array_equal(found.agreement, loop.agreement)
    assert found.converged.all()


@pytest.mark.slow
def test_traced_matrices_that_are_not_finite_give_nan(key, x64):
    a = np.eye(3)
    bad = a.copy()
    bad[1, 2] = np.nan
    table = jax.jit(lambda m: pairwise_dynamical_distance(m, key=key))(np.stack([a, bad, 2 * a]))
    np.testing.assert_array_equal(
        np.isnan(table), [[False, True, False], [True] * 3, [False, True, False]]
    )
    np.testing.assert_allclose(table[0, 2], 3**0.5, rtol=1e-12)


@pytest.mark.slow
def test_one_start_is_no_evidence_unless_the_bound_is_met(key):
    """A start and its mirror image are two runs."""
    a, b = np.random.default_rng(5).normal(size=(2, 8, 8)).astype(np.float32)
    with pytest.warns(UserWarning, match="2 of 3 distances may not"):
        pairwise_dynamical_distance(np.stack([a, b, a]), key=key, num_starts=1)
