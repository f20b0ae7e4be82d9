import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import solve_ivp
from words import refused

from koopman.datasets import duffing, lorenz63, ornstein_uhlenbeck, ornstein_uhlenbeck_spectrum
from koopman.datasets._systems import rk4_trajectory


def test_ornstein_uhlenbeck_spectrum_by_quadrature():
    """E[f(x')] by Gauss-Hermite sums over the transition density, exact for polynomials."""
    theta, sigma, lag = 0.8, 0.6, 0.3
    spectrum = ornstein_uhlenbeck_spectrum(
        theta=theta, sigma=sigma, time_step=lag, num_components=6
    )
    np.testing.assert_allclose(spectrum.eigenvalues, np.exp(-0.24 * np.arange(6)))
    z, weights = np.polynomial.hermite_e.hermegauss(20)
    weights = weights / weights.sum()
    decay, variance = np.exp(-theta * lag), sigma**2 / (2 * theta)
    x = np.linspace(-1, 1.1, 7)[:, None]
    moved = decay * x + np.sqrt(variance * (1 - decay**2)) * z[None, :]
    expected = np.einsum(
        "z,xzk->xk", weights, spectrum.right(moved.reshape(-1, 1)).reshape(7, 20, 6)
    )
    np.testing.assert_allclose(
        expected, spectrum.right(x) * spectrum.eigenvalues[None, :], atol=1e-12
    )
    functions = spectrum.right(np.sqrt(variance) * z[:, None])
    np.testing.assert_allclose((functions * weights[:, None]).T @ functions, np.eye(6), atol=1e-11)
    grid = np.linspace(-5, 5, 2001)[:, None]
    mass = spectrum.density(grid) * 0.005
    np.testing.assert_allclose([mass.sum(), mass @ grid[:, 0] ** 2], [1, variance], rtol=1e-12)


@pytest.mark.parametrize("time_step", [0.05, 2.0])
def test_ornstein_uhlenbeck_has_exact_transitions(time_step, key):
    """A long step is as exact as a short one; Euler's scheme would be unstable at theta time_step = 3."""
    n, theta, sigma = 20_000, 1.5, 0.8
    path = ornstein_uhlenbeck(
        4, key=key, num_trajectories=n, theta=theta, sigma=sigma, time_step=time_step
    )
    path = np.asarray(path, np.float64)[:, :, 0]
    variance = sigma**2 / (2 * theta)
    for t in range(5):
        assert abs(path[:, t].var() / variance - 1) < 4 * np.sqrt(2 / n)
        assert abs(path[:, t].mean()) < 4 * np.sqrt(variance / n)
    for lag in (1, 4):
        expected = np.exp(-theta * time_step * lag)
        correlation = np.mean(path[:, 0] * path[:, lag]) / variance
        assert abs(correlation - expected) < 4 * np.sqrt((1 + expected**2) / n)
    still = ornstein_uhlenbeck(4, key=key, sigma=0.0, time_step=0.3, initial=np.array([2.0]))
    np.testing.assert_allclose(still[:, 0], 2 * np.exp(-0.3 * np.arange(5)), rtol=1e-6)


def test_runge_kutta_closed_forms(x64):
    """On x' = c x a step multiplies by the Taylor polynomial of degree four; cubics in time are integrated exactly."""
    path = rk4_trajectory(lambda t, x: -0.7 * x, jnp.array([1.0, 2.0]), 5, 0.6, 2)
    z = -0.7 * 0.3
    factor = 1 + z + z**2 / 2 + z**3 / 6 + z**4 / 24
    np.testing.assert_allclose(
        path, factor ** (2 * np.arange(6)[:, None]) * np.array([1, 2]), rtol=1e-13
    )
    path = rk4_trajectory(lambda t, x: t**3 + 0 * x, jnp.zeros(1), 4, 0.5, 1)
    np.testing.assert_allclose(path[:, 0], (0.5 * np.arange(5)) ** 4 / 4, rtol=1e-13)


def test_duffing_against_scipy():
    parameters = {"alpha": -1.0, "beta": 1.0, "gamma": 0.3, "delta": 0.25, "omega": 1.2}

    def field(t, state):
        x, v = state
        return [v, 0.3 * np.cos(1.2 * t) + x - x**3 - 0.25 * v]

    start = np.array([0.4, -0.2])
    times = 0.05 * np.arange(101)
    solution = solve_ivp(field, (0, 5), start, t_eval=times, rtol=1e-11, atol=1e-12).y.T
    with jax.enable_x64(True):
        path = duffing(100, initial=start, time_step=0.05, substeps=4, **parameters)
        np.testing.assert_allclose(path, solution, atol=1e-8)
    path = duffing(100, initial=start, time_step=0.05, **parameters)
    np.testing.assert_allclose(path, solution, atol=1e-5)


def test_lorenz_against_scipy(x64):
    def field(t, state):
        x, y, z = state
        return [10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z]

    start = np.array([1.0, 2.0, 20.0])
    solution = solve_ivp(
        field, (0, 2), start, t_eval=0.01 * np.arange(201), rtol=1e-11, atol=1e-11
    ).y.T
    path = lorenz63(200, initial=start, substeps=8)
    np.testing.assert_allclose(path, solution, atol=1e-6)


def test_initial_states_are_drawn_as_they_say(key):
    """N(m, s^2 I): every mean within four standard errors, every deviation too, no correlations."""
    n = 4000
    for sample, mean, deviation in (
        (lambda k: lorenz63(1, key=k, num_trajectories=n), [0, 0, 27], 5.0),
        (lambda k: duffing(1, key=k, num_trajectories=n), [0, 0], 1.0),
        (
            lambda k: ornstein_uhlenbeck(1, key=k, num_trajectories=n, theta=2.0, sigma=3.0),
            [0],
            1.5,
        ),
    ):
        start = np.asarray(sample(key), float)[:, 0]
        np.testing.assert_allclose(start.mean(0), mean, atol=4 * deviation / n**0.5)
        np.testing.assert_allclose(
            np.cov(start.T),
            deviation**2 * np.eye(len(mean)).squeeze(),
            atol=6 * deviation**2 / n**0.5,
        )


def test_wrong_arguments_are_named(key):
    refused(
        (lambda: lorenz63(0, key=key), "`num_steps` must be at least 1"),
        (lambda: duffing(3), "`key` must be given where `initial` is not"),
        (lambda: lorenz63(3, initial=np.zeros(2)), r"`initial` must have shape \(3,\), got \(2,\)"),
        (lambda: ornstein_uhlenbeck(3, key=key, theta=-1.0), "`theta` must be positive"),
        (lambda: ornstein_uhlenbeck(3, key=key, sigma=-1.0), "`sigma` must be non-negative"),
        (lambda: lorenz63(3, key=key, time_step=0.0), "`time_step` must be positive"),
        (lambda: lorenz63(3, key=key, mu=np.inf), "`mu` must be finite"),
        (lambda: duffing(3, key=key, beta=np.inf), "`beta` must be finite"),
        (
            lambda: ornstein_uhlenbeck_spectrum().right(np.ones((3, 2))),
            r"`states` must have shape \[n, 1\], got",
        ),
    )


def test_many_hermite_polynomials_do_not_overflow():
    states = np.linspace(-2, 2, 5)[:, None]
    many, few = (ornstein_uhlenbeck_spectrum(num_components=n) for n in (400, 12))
    assert np.isfinite(many.right(states)).all()
    np.testing.assert_allclose(many.right(states)[:, :12], few.right(states))
    norms = np.sqrt([float(math.factorial(k)) for k in range(12)])
    wanted = np.polynomial.hermite_e.hermevander(states[:, 0], 11) / norms[None]
    np.testing.assert_allclose(few.right(states), wanted, atol=1e-12)
    assert ornstein_uhlenbeck_spectrum(num_components=1).right(states).shape == (5, 1)
