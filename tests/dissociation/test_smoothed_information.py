from functools import partial

import jax
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import gaussian_kde, norm
from words import refused

from dissociation.measures import smoothed_information

KEY = jax.random.key(0)


@pytest.mark.parametrize("width", [1, 3])
def test_gaussian_features_have_the_channels_information(width, x64):
    # I(Z + noise; Z) = (1/2) sum log(1 + v / s^2), of which n samples show all while it is well
    # below log n.
    spread, labels = np.asarray([1.0, 0.7, 0.5])[:width], np.zeros(2000, int)
    features = np.random.default_rng(width).normal(size=(2000, width)) * spread
    exact = 0.5 * np.sum(np.log(1 + spread**2 / 0.25))
    options = {"key": KEY, "num_draws": 2}
    upper, middle, lower = (
        smoothed_information(features, labels, 0.5, method=method, **options)
        for method in ("upper", "monte_carlo", "lower")
    )
    np.testing.assert_allclose(middle.zx, exact, atol=0.04)
    assert lower.zx < middle.zx < upper.zx
    for one in (upper, middle, lower):
        np.testing.assert_allclose(one.zy, 0.0, atol=1e-9)  # one label says nothing
        np.testing.assert_allclose(one.zx_given_y, one.zx)


def test_two_overlapping_classes(x64):
    rng, spread = np.random.default_rng(0), 0.8
    labels = rng.integers(0, 2, 3000)
    features = np.where(labels, 1.0, -1.0)[:, None]
    mixture = lambda t: 0.5 * (norm.pdf(t, 1, spread) + norm.pdf(t, -1, spread))  # noqa: E731
    entropy = quad(lambda t: -mixture(t) * np.log(mixture(t)), -8, 8)[0]
    exact = entropy - 0.5 * np.log(2 * np.pi * np.e * spread**2)
    options = {"key": KEY, "num_draws": 2}
    found = smoothed_information(features, labels, spread, **options)
    np.testing.assert_allclose(found.zy, exact, atol=0.02)
    # The features are the labels: given them, nothing is left.
    np.testing.assert_allclose(found.zx_given_y, 0.0, atol=0.02)
    shuffled = smoothed_information(features, rng.permutation(labels), spread, **options)
    np.testing.assert_allclose(shuffled.zy, 0.0, atol=3e-3)


def test_saturation_is_said_and_never_infinite():
    features = 1e3 * np.arange(100.0, dtype=np.float32)[:, None]
    labels = np.arange(100) % 4
    for method in ("monte_carlo", "upper", "lower"):
        found = smoothed_information(features, labels, 0.1, method=method, key=KEY)
        assert found.saturated
        # Clusters of one sample say log 4 about any labels, random ones too.
        assert np.isnan([found.zx, found.zy, found.zx_given_y]).all()
    assert not smoothed_information(features, labels, 1e4, key=KEY).saturated


def test_collapsed_features_far_apart_are_rounding_in_float32():
    rng = np.random.default_rng(0)
    labels = np.arange(500) % 10
    centres = rng.normal(size=(10, 50))
    centres = 1000 * centres / np.linalg.norm(centres, axis=1)[:, None]
    features = centres[labels] + 0.01 * rng.normal(size=(500, 50))
    assert smoothed_information(features.astype(np.float32), labels, 0.01, key=KEY).saturated
    with jax.enable_x64(True):
        found = smoothed_information(features, labels, 0.1, key=KEY)
        assert not found.saturated
        np.testing.assert_allclose(found.zy, np.log(10), rtol=1e-3)


def test_the_upper_bound_is_the_mean_log_density_of_scipy(x64):
    centres = np.random.default_rng(0).normal(size=(300, 2))
    peer = gaussian_kde(centres.T)
    # scipy's kernel has the data's covariance: take it out.
    root = np.linalg.cholesky(peer.covariance)
    features, labels = np.linalg.solve(root, centres.T).T, np.zeros(300, int)
    found = smoothed_information(features, labels, 1.0, method="upper", block=256)
    wanted = -peer.logpdf(centres.T).mean() - np.log(2 * np.pi * np.linalg.det(root))
    np.testing.assert_allclose(found.zx, wanted, rtol=1e-9)


def test_bad_input_is_refused():
    measure = partial(smoothed_information, np.ones((5, 2), np.float32), np.zeros(5, int))
    refused(
        (lambda: measure(0.5), "`key` must be given for 'monte_carlo'"),
        (lambda: measure(0.0, key=KEY), "`noise` must be positive"),
        (lambda: measure(1.0, method="jensen"), "'monte_carlo', 'upper', 'lower'"),
    )
