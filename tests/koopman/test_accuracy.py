"""What holds across data sets: float32 against float64, and errors that fall with the root of the samples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman import ReducedRank, Ridge, eigenvalues, fit, lagged_pairs, predict
from koopman.datasets import (
    duffing,
    logistic_features,
    logistic_map,
    lorenz63,
    ornstein_uhlenbeck,
    prinz_langevin,
)

pytestmark = pytest.mark.slow


def monomials(x, degree):
    """Of standardised states, up to a total degree, 1 first."""
    x = (x - x.mean(0)) / x.std(0)
    powers = np.stack(
        np.meshgrid(*[np.arange(degree + 1)] * x.shape[1], indexing="ij"), -1
    ).reshape(-1, x.shape[1])
    return np.prod(x[:, None] ** powers[powers.sum(1) <= degree][None], -1)


# States, features, lag.
DATASETS = {
    "logistic": (
        lambda key: logistic_map(400, key=key),
        lambda x: np.asarray(logistic_features(x, 20)),
        1,
    ),
    "prinz": (lambda key: prinz_langevin(400, key=key), lambda x: monomials(x, 4), 10),
    "duffing": (lambda key: duffing(400, key=key), lambda x: monomials(x, 3), 1),
    "lorenz63": (lambda key: lorenz63(400, key=key), lambda x: monomials(x, 3), 1),
}


@pytest.mark.parametrize("name", DATASETS)
def test_float32_is_within_a_thousandth_of_float64(name, key):
    sample, features, lag = DATASETS[name]
    states = np.asarray(sample(key), float)
    with jax.enable_x64(True):
        single = lagged_pairs(features(states).astype(np.float32), lag)
        double = [np.asarray(part, float) for part in single]
        fitted = jax.jit(lambda x, y: fit(ReducedRank(4, 1e-6), x, y))
        one, exact = fitted(*single), fitted(*double)
        assert one.core.dtype == one.encode.matrix.dtype == jnp.float32
        forecasts = [predict(one, single[0]), predict(exact, double[0])]
        values = [np.sort(np.abs(eigenvalues(operator)))[::-1] for operator in (one, exact)]
    error = np.linalg.norm(np.subtract(*forecasts)) / np.linalg.norm(forecasts[1])
    assert error < 1e-3
    np.testing.assert_allclose(values[0], values[1], rtol=1e-3)


def test_errors_fall_with_the_root_of_the_samples(key):
    # Hermite polynomials are the eigenfunctions, so that sampling is the only error.
    lengths = (200, 800, 3200, 12800)
    paths = ornstein_uhlenbeck(lengths[-1], key=key, num_trajectories=400, time_step=0.5)
    truth = np.exp(-0.5 * np.arange(3))

    @jax.jit
    @jax.vmap
    def core(path):
        x = path[:, 0]
        features = jnp.stack([jnp.ones_like(x), x, (x**2 - 1) / jnp.sqrt(2.0)], 1)
        return fit(Ridge(1e-6), *lagged_pairs(features)).core

    found = [
        np.sort(np.linalg.eigvals(core(paths[:, : length + 1])).real)[:, ::-1] for length in lengths
    ]
    errors = [np.sqrt(np.mean((values - truth[None]) ** 2, 0)) for values in found]
    slopes = np.polyfit(np.log(lengths), np.log(errors)[:, 1:], 1)[0]
    # A root mean square of 400 has a relative error of 0.035, and so a slope over these lengths one
    # of 0.011.
    np.testing.assert_allclose(slopes, -0.5, atol=0.05)
