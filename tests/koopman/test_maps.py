import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from koopman.datasets import logistic_features, logistic_map, logistic_spectrum
from koopman.datasets._spectrum_type import conjugate_order

NODES, WEIGHTS = np.polynomial.legendre.leggauss(250)
X, WEIGHTS = (NODES[:, None] + 1) / 2, WEIGHTS / 2


def transition_density(order):
    """p(y | x) at the Gauss-Legendre nodes, straight from the definition of the map; rows x, columns y."""
    shift = X.T - 4 * X * (1 - X)
    return np.cos(np.pi * shift) ** (2 * order) * 4.0**order / math.comb(2 * order, order)


@pytest.mark.parametrize("order", [1, 20])
def test_spectrum_against_the_discretised_kernel(order):
    spectrum = logistic_spectrum(order)
    operator = transition_density(order) * WEIGHTS[None, :]
    values = np.linalg.eigvals(operator)
    values = values[conjugate_order(values)]
    k = min(order + 1, 7)
    # The operator is far from normal: rounding in 250 x 250 matters more than in 21 x 21, the more
    # the smaller.
    np.testing.assert_allclose(
        spectrum.eigenvalues[:k], values[:k], atol=1e-8 if order == 20 else 1e-12
    )
    np.testing.assert_allclose(values[order + 1 :], 0, atol=1e-6)  # the rest of the operator
    values, right = spectrum.eigenvalues[:k], spectrum.right(X)[:, :k]
    left, density = spectrum.left(X)[:, :k], spectrum.density(X)
    np.testing.assert_allclose(operator @ right, right * values, atol=1e-11)
    np.testing.assert_allclose((density * WEIGHTS) @ transition_density(order), density, atol=1e-11)
    weighted = left * (density * WEIGHTS)[:, None]
    pushed = (
        transition_density(order).T @ weighted / density[:, None]
    )  # the adjoint in L2 of the density
    np.testing.assert_allclose(pushed, left * values.conj(), rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(weighted.conj().T @ right, np.eye(k), atol=1e-7)
    np.testing.assert_allclose((density * WEIGHTS) @ np.abs(right) ** 2, 1, atol=1e-11)
    np.testing.assert_allclose(right[:, 0], 1, atol=1e-11)
    assert density.min() > 0
    np.testing.assert_allclose(WEIGHTS @ density, 1, atol=1e-12)


def test_the_operator_maps_features_to_features():
    operator = transition_density(5) * WEIGHTS[None, :]

    def residual(order):
        with jax.enable_x64(True):
            features = np.asarray(logistic_features(jnp.asarray(X), order))
        moved = operator @ features
        fitted = np.linalg.lstsq(features, moved, rcond=None)
        return np.abs(moved - features @ fitted[0]).max(), fitted[0]

    error, matrix = residual(5)
    assert error < 1e-12
    values = np.linalg.eigvals(matrix)
    np.testing.assert_allclose(
        values[conjugate_order(values)][:6], logistic_spectrum(5).eigenvalues, atol=1e-12
    )
    assert residual(1)[0] > 1e-2  # too small a span is not invariant


def test_trajectories_follow_the_density_and_the_operator(key):
    """Means over a trajectory are independent between trajectories: their spread is the standard error."""
    path = np.asarray(logistic_map(50, key=key, num_trajectories=800), np.float64)
    assert path.shape == (800, 51, 1)
    assert path.min() >= 0
    assert path.max() < 1
    spectrum = logistic_spectrum(20, num_components=3)
    density = WEIGHTS * spectrum.density(X)
    for states in (path[:, :1], path):  # stationary from the first state on
        for m in (1, 2, 3):
            for wave in (np.cos, np.sin):
                means = wave(2 * np.pi * m * states).mean(axis=(1, 2))
                expected = density @ wave(2 * np.pi * m * X[:, 0])
                assert abs(means.mean() - expected) < 4.5 * means.std() / np.sqrt(800)
    right = spectrum.right(path.reshape(-1, 1))[:, 1].reshape(800, 51)
    for lag in (1, 2):
        products = np.mean(right[:, :-lag].conj() * right[:, lag:], axis=1)
        error = np.std(products) / np.sqrt(800)
        assert error < 0.01
        assert abs(products.mean() - spectrum.eigenvalues[1] ** lag) < 4.5 * error


def test_initial_states_and_longer_runs(key):
    start = jnp.array([[0.1], [0.7]])
    path = logistic_map(5, key=key, num_trajectories=2, initial=start)
    np.testing.assert_array_equal(path[:, 0], start)
    shared = logistic_map(8, key=key, num_trajectories=2, initial=start[0])
    np.testing.assert_array_equal(shared[:, 0], jnp.tile(start[:1], (2, 1)))
    np.testing.assert_allclose(shared[0, :6], path[0], atol=1e-4)
    with jax.enable_x64(True):
        assert jax.eval_shape(lambda: logistic_map(2, key=key)).dtype == np.float64


def test_wrong_arguments_are_named(key):
    assert logistic_map(1, key=key, order=1).shape == (2, 1)  # the least of both
    four = {"key": key, "num_trajectories": 4}
    refused(
        (lambda: logistic_map(0, key=key), "`num_steps` must be at least 1, got 0"),
        (
            lambda: logistic_map(3, key=key, num_trajectories=0),
            "`num_trajectories` must be at least 1",
        ),
        (lambda: logistic_spectrum(0), "`order` must be at least 1"),
        (
            lambda: logistic_map(3, initial=np.zeros((3, 1)), **four),
            r"`initial` .* \(1,\) or \(4, 1\), got \(3, 1\)",
        ),
    )
