from itertools import product

import jax
import numpy as np
import pytest
from words import refused

from koopman.datasets import (
    linear_spectrum,
    linear_system,
    regime_switching_spectrum,
    regime_switching_var,
)
from koopman.datasets._linear import stationary_covariance
from koopman.datasets._spectrum_type import conjugate_order

A = np.array([[0.8, -0.5], [0.4, 0.6]])  # eigenvalues 0.7 +- 0.436i
A3 = np.array([[0.9, 0.5, 0.0], [0.0, 0.7, 0.3], [-0.1, 0.0, -0.4]])
B = np.array([[0.3, 0.0, 0.1], [0.2, 0.4, 0.0]])
MATRICES = np.array([[[0.9, 0.2], [-0.1, 0.7]], [[0.5, -0.4], [0.6, 0.3]]])
TRANSITION = np.array([[0.9, 0.1], [0.3, 0.7]])


def monomials(x, degree):
    powers = [p for p in product(range(degree + 1), repeat=x.shape[1]) if sum(p) <= degree]
    return np.stack([np.prod(x ** np.array(p), axis=1) for p in powers], axis=1)


def assert_same_spectrum(first, second, atol):
    """Equal as multisets: each has its partner."""
    assert len(first) == len(second)
    rest = list(second)
    for value in first:
        nearest = int(np.argmin(np.abs(np.array(rest) - value)))
        assert abs(rest.pop(nearest) - value) < atol


@pytest.mark.parametrize(("matrix", "degree"), [(A, 3), (A3, 2)], ids=["2d", "3d"])
def test_products_against_regression_on_monomials(matrix, degree):
    """Monomials up to a degree are closed under a linear map: least squares on them finds the operator."""
    spectrum = linear_spectrum(matrix, degree)
    x = np.random.default_rng(0).standard_normal((200, len(matrix)))
    lifted = np.linalg.lstsq(monomials(x, degree), monomials(x @ matrix.T, degree), rcond=None)[0]
    assert_same_spectrum(np.linalg.eigvals(lifted), spectrum.eigenvalues, 1e-9)
    np.testing.assert_allclose(
        spectrum.right(x @ matrix.T), spectrum.right(x) * spectrum.eigenvalues[None, :], atol=1e-11
    )
    assert np.linalg.matrix_rank(spectrum.right(x)) == len(spectrum.eigenvalues)
    assert spectrum.density is None


@pytest.mark.parametrize("noise", [B, 0.4], ids=["matrix", "deviation"])
def test_eigenfunctions_with_noise_by_quadrature(noise):
    """E[f(A x + B z)] by Gauss-Hermite sums, which are exact for polynomials."""
    spectrum = linear_spectrum(A, 4, noise=noise)
    silent = linear_spectrum(A, 4)
    assert_same_spectrum(spectrum.eigenvalues, silent.eigenvalues, 1e-13)
    b = noise * np.eye(2) if np.ndim(noise) == 0 else noise
    z, weights = np.polynomial.hermite_e.hermegauss(6)
    z = np.stack([axis.ravel() for axis in np.meshgrid(*[z] * b.shape[1])], axis=1)
    weights = np.prod(
        np.stack(np.meshgrid(*[weights / weights.sum()] * b.shape[1])), axis=0
    ).ravel()
    x = np.random.default_rng(0).standard_normal((20, 2))

    def residual(right):
        expected = np.stack([weights @ right((A @ point)[None] + z @ b.T) for point in x])
        return np.abs(expected - right(x) * spectrum.eigenvalues[None, :]).max()

    assert residual(spectrum.right) < 1e-10
    assert (
        residual(silent.right) > 0.1
    )  # products of linear functions are no eigenfunctions with noise
    root = np.linalg.cholesky(stationary_covariance(A, noise))
    states = (
        np.stack([axis.ravel() for axis in np.meshgrid(*[np.linspace(-7, 7, 141)] * 2)], axis=1)
        @ root.T
    )
    mass = spectrum.density(states) * 0.1**2 * np.prod(np.diag(root))
    np.testing.assert_allclose(mass.sum(), 1, atol=1e-8)
    covariance = (states * mass[:, None]).T @ states
    np.testing.assert_allclose(covariance, stationary_covariance(A, noise), atol=1e-8)
    np.testing.assert_allclose(mass @ np.abs(spectrum.right(states)[:, 1:3]) ** 2, 1, atol=1e-7)


def test_no_stationary_distribution():
    with pytest.raises(
        ValueError, match="`matrix` must have all eigenvalues inside the unit circle.*radius 1.1"
    ):
        stationary_covariance(np.diag([1.1, 0.5]), 1.0)
    with pytest.raises(ValueError, match="`matrix` must have all eigenvalues inside"):
        linear_spectrum(np.eye(2), 2, noise=0.1)
    np.testing.assert_allclose(linear_spectrum(np.diag([1.1, 0.5]), 1).eigenvalues, [1.1, 1, 0.5])


def test_noise_free_trajectories_are_powers(key):
    start = np.random.default_rng(0).normal(size=(3, 2))
    path = linear_system(A, 6, key=key, num_trajectories=3, initial=start)
    expected = np.stack([start @ np.linalg.matrix_power(A, t).T for t in range(7)], axis=1)
    np.testing.assert_allclose(path, expected, atol=1e-6)


def test_noise_has_the_covariance_of_its_matrix(key):
    """From the stationary distribution every later state has its covariance, and the next one its cross-covariance."""
    n = 20_000
    covariance = stationary_covariance(A, B)
    start = np.random.default_rng(0).normal(size=(n, 2)) @ np.linalg.cholesky(covariance).T
    path = np.asarray(
        linear_system(A, 3, key=key, num_trajectories=n, noise=B, initial=start), np.float64
    )
    # The fourth moments of a normal: a product of two coordinates has variance C_ii C_jj + C_ij^2.
    error = np.sqrt((np.outer(np.diag(covariance), np.diag(covariance)) + covariance**2) / n)
    np.testing.assert_array_less(np.abs(path[:, 3].T @ path[:, 3] / n - covariance), 4 * error)
    np.testing.assert_array_less(np.abs(path[:, 3].T @ path[:, 2] / n - A @ covariance), 6 * error)
    assert np.any(np.abs(path[:, 3].T @ path[:, 2] / n - A.T @ covariance) > 6 * error)
    drawn = np.asarray(linear_system(A, 1, key=key, num_trajectories=n))[:, 0]
    np.testing.assert_allclose(drawn.T @ drawn / n, np.eye(2), atol=4 * np.sqrt(2 / n))


def test_repeated_pairs_stay_pairs():
    values = linear_spectrum(np.kron(np.eye(2), [[0.6, -0.3], [0.3, 0.6]]), 2).eigenvalues
    np.testing.assert_allclose(values[1:5], [0.6 + 0.3j, 0.6 - 0.3j] * 2)


def test_regime_eigenfunctions_by_their_definition():
    """E[f(x', s') | x, s] = sum_j P_sj f(A_s x, j) for functions affine in the state."""
    spectrum = regime_switching_spectrum(MATRICES, TRANSITION)
    x = np.random.default_rng(0).standard_normal((12, 2))
    regimes = np.arange(12) % 2
    moved = np.einsum("nab,nb->na", MATRICES[regimes], x)
    expected = sum(
        TRANSITION[regimes, j][:, None] * spectrum.right(moved, np.full(12, j)) for j in range(2)
    )
    np.testing.assert_allclose(
        expected, spectrum.right(x, regimes) * spectrum.eigenvalues[None, :], atol=1e-12
    )
    assert np.linalg.matrix_rank(spectrum.right(x, regimes)) == 6
    np.testing.assert_allclose(
        spectrum.eigenvalues[conjugate_order(spectrum.eigenvalues)], spectrum.eigenvalues
    )
    assert_same_spectrum(
        [1, 0.6], [v for v in spectrum.eigenvalues if min(abs(v - 1), abs(v - 0.6)) < 1e-12], 1e-12
    )


def test_states_obey_the_regimes_recorded_with_them(key):
    run = regime_switching_var(
        MATRICES,
        TRANSITION,
        4,
        key=key,
        num_trajectories=20_000,
        initial_regime=1,
        noise=np.float32(0.0),
    )
    states, regimes = np.asarray(run.states), np.asarray(run.regimes)
    assert np.all(regimes[:, 0] == 1)
    expected = np.einsum("ntab,ntb->nta", MATRICES[regimes[:, :-1]], states[:, :-1])
    np.testing.assert_allclose(states[:, 1:], expected, atol=1e-6)
    for regime in range(2):
        stays = regimes[:, 1:][regimes[:, :-1] == regime] == regime
        share = TRANSITION[regime, regime]
        assert abs(stays.mean() - share) < 4 * np.sqrt(share * (1 - share) / stays.size)
    noisy = regime_switching_var(
        0 * MATRICES, TRANSITION, 4, key=key, num_trajectories=20_000, noise=0.1
    )
    np.testing.assert_allclose(np.std(noisy.states[:, 1:]), 0.1, rtol=0.02)


@pytest.mark.slow
def test_trajectories_are_drawn_alone(key):
    batch = linear_system(A, 4, key=key, num_trajectories=3)
    np.testing.assert_allclose(
        batch, [linear_system(A, 4, key=k) for k in jax.random.split(key, 3)], atol=1e-6
    )


def test_wrong_arguments_are_named(key):
    assert regime_switching_var(MATRICES, TRANSITION, 1, key=key).states.shape == (
        2,
        2,
    )  # the least number of steps
    refused(
        (lambda: linear_system(A, 0, key=key), "`num_steps` must be at least 1"),
        (lambda: linear_system(A, 3, key=key, noise=-1.0), "`noise` must be non-negative"),
        (
            lambda: linear_system(A, 3, key=key, noise=np.ones((3, 1))),
            r"got shape \(3, 1\), .* for `matrix`",
        ),
        (
            lambda: linear_system(A, 3, key=key, initial=np.zeros(3)),
            r"`initial` must have shape \(2,\), got \(3,\)",
        ),
        (
            lambda: regime_switching_var(MATRICES, np.full((2, 2), 0.4), 3, key=key),
            "must have rows that sum to 1",
        ),
    )


def test_directions_that_no_noise_reaches():
    exact = linear_spectrum(np.diag([0.5, 0.3]), 1, noise=[[1.0], [0.0]])
    states = np.asarray([[1.0, 2.0], [-3.0, 0.5]])
    found = exact.right(states)
    np.testing.assert_allclose(
        np.abs(found[:, 1]), np.abs(states[:, 0]) * np.sqrt(1 - 0.5**2)
    )  # of variance one
    np.testing.assert_allclose(np.abs(found[:, 2]), np.abs(states[:, 1]))
    assert exact.density is None


def test_functions_of_an_exact_spectrum_check_their_states():
    exact = linear_spectrum(np.diag([0.5, 0.3]), 1, noise=1.0)
    for function in (exact.right, exact.density):
        for states, words in (
            (np.ones((4, 3)), r"have shape \[n, 2\]"),
            ([[1.0, np.inf]], "finite"),
        ):
            with pytest.raises(ValueError, match=f"`states` must .*{words}"):
                function(states)
    switching = regime_switching_spectrum(MATRICES, TRANSITION)
    for at, words in (([0, 2], "lie between 0 and 1, got 0 to 2"), ([0.0, 1.0], "hold integers")):
        with pytest.raises((ValueError, TypeError), match=f"`at` must {words}"):
            switching.right(np.ones((2, 2)), at)
