from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from words import refused

from dissociation._core import distances
from dissociation.measures import information_plane
from dissociation.measures._hsic import centred_gram, gaussian_gram

KEY = jax.random.key(0)
plane_of = jax.jit(
    lambda *data, **options: information_plane(*data, key=KEY, **options),
    static_argnames=("batch_size", "num_passes", "bandwidth"),
)


def reference_gram(x, sigma):
    square = ((x[:, None] - x[None]) ** 2).sum(-1)
    return np.exp(-square / (2 * sigma**2 * x.shape[1]))


def reference_hsic(k, other, epsilon=1e-5):
    ridge = epsilon * len(k) * np.eye(len(k))
    return np.trace(k @ np.linalg.inv(k + ridge) @ other @ np.linalg.inv(other + ridge))


def clusters(count=200, classes=4, width=6, noise=0.1, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    x = rng.normal(size=(classes, width))[labels] + noise * rng.normal(size=(count, width))
    return x.astype(np.float32), labels


def test_against_the_definition_in_float64():
    x, labels = clusters(60)
    z = np.tanh(x @ np.random.default_rng(1).normal(size=(6, 8))).astype(np.float32)
    centre = np.eye(60) - 1 / 60
    y = np.eye(4)[labels]
    for options, sigma in (({"sigma": 0.1}, 0.1), ({}, 5.0)):
        gram_z, gram_x = (
            centre @ reference_gram(part.astype(float), sigma) @ centre for part in (z, x)
        )
        expected = [reference_hsic(gram_z, gram_x), reference_hsic(gram_z, y @ y.T)]
        with jax.enable_x64(True):
            plane = plane_of(
                z.astype(float), x.astype(float), y, batch_size=60, num_passes=1, **options
            )
            np.testing.assert_allclose([plane.zx, plane.zy], expected, rtol=1e-9)
    # One batch of all samples, in another order, and in float32.
    plane = plane_of(z, x, y.astype(np.float32), batch_size=60, num_passes=2)
    np.testing.assert_allclose([plane.zx, plane.zy], expected, rtol=1e-3)


@pytest.mark.parametrize("number", [1, 6, 151])
def test_the_median_is_that_of_a_sort(number):
    """Bit for bit, with ties, zeros, infinities and what is not a number; its derivative is shared by equals."""
    drawn = np.random.default_rng(number).random(number)
    spoilt = np.where(np.arange(number) == number // 2, np.nan, drawn)
    for values in (
        drawn,
        np.round(4 * drawn),
        0 * drawn,
        np.where(drawn < 0.6, np.inf, drawn),
        spoilt,
    ):
        values = jnp.asarray(values, jnp.float32)
        np.testing.assert_array_equal(distances.median(values), jnp.median(values))
    tied = jax.grad(distances.median)(jnp.ones(number))
    np.testing.assert_allclose(tied, np.full(number, 1 / number), rtol=1e-6)


def test_independent_features_and_rows_that_do_not_belong_together_say_little():
    # The published code drew features and inputs in two passes over a shuffled loader: the last
    # case.
    x, labels = clusters(300)
    y = np.eye(4, dtype=np.float32)[labels]
    order = np.random.default_rng(0).permutation(300)
    noise = np.random.default_rng(5).normal(size=(300, 6)).astype(np.float32)
    right, unrelated, wrong = (
        plane_of(*data) for data in ((x, x, y), (noise, x, y), (x, x[order], y[order]))
    )
    assert right.zy > 2.9  # of at most 3
    assert unrelated.zy < 0.8
    assert wrong.zy < 0.3
    assert wrong.zx < 0.2 * right.zx


@pytest.mark.slow
def test_by_chance_is_the_mean_over_shuffled_pairs():
    # Many dimensions and few samples: both kernels span nearly everything, related or not.
    keys = jax.random.split(jax.random.key(5), 3)
    x = jax.random.normal(keys[0], (40, 100))
    z = jax.nn.relu(x @ jax.random.normal(keys[1], (100, 60)))
    labels = jax.nn.one_hot(jnp.arange(40) % 4, 4)
    options = {"key": KEY, "batch_size": 40, "num_passes": 1}
    plane = information_plane(z, x, labels, **options)

    def shuffled(key):
        found = information_plane(z[jax.random.permutation(key, 40)], x, labels, **options)
        return jnp.stack([found.zx, found.zy])

    draws = jax.jit(jax.vmap(shuffled))(jax.random.split(keys[2], 400))
    wanted = jnp.stack([plane.zx_null, plane.zy_null])
    assert (jnp.abs(draws.mean(0) - wanted) < 4 * draws.std(0) / 20 + 1e-3).all()
    assert plane.zx_null > 0.9 * plane.zx  # what the measure alone does not tell


def test_a_median_of_zero_is_defined():
    # 70 of 80 samples coincide, so that most distances are zero; the scale of the others still does
    # not matter.
    rng = np.random.default_rng(0)
    x = np.zeros((80, 3), np.float32)
    x[70:] = rng.normal(size=(10, 3))
    gram = jax.jit(lambda x: gaussian_gram(x, sigma=1.0, bandwidth="median"))
    square = ((x[:, None].astype(float) - x[None]) ** 2).sum(-1)
    expected = np.exp(-square / (2 * square[np.triu_indices(80, 1)].mean()))
    for scale in (1.0, 1e-3):
        np.testing.assert_allclose(gram(scale * x + np.float32(0)), expected, rtol=1e-4)
    for bandwidth in ("dimension", "median"):
        np.testing.assert_array_equal(gaussian_gram(x[70:71], bandwidth=bandwidth), [[1.0]])
    # Features that are all alike have a constant kernel, whatever the value, and no dependence; so
    # says the slope.
    for value in (0.0, 0.1, 1e4):
        same = np.full((80, 3), value, np.float32)
        np.testing.assert_array_equal(gram(same), 1.0)
    assert np.isfinite(jax.jit(jax.grad(lambda x: jnp.sum(centred_gram(gram(x)))))(same)).all()
    labels = np.eye(4, dtype=np.float32)[rng.integers(0, 4, 80)]
    plane = plane_of(same, x, labels, batch_size=40, num_passes=1, bandwidth="median")
    np.testing.assert_allclose([plane.zx, plane.zy], 0.0, atol=1e-6)


def test_bad_input_is_refused():
    x, labels = clusters(40)
    measure = partial(information_plane, x, x, labels, key=KEY)
    refused(
        (
            lambda: measure(batch_size=500),
            r"`batch_size` must be at most the number of samples \(40\)",
        ),
        (lambda: measure(batch_size=20, bandwidth="mean"), "'dimension', 'median'"),
        (lambda: measure(batch_size=20, epsilon=0.0), "`epsilon` must be positive"),
        (lambda: measure(batch_size=20, num_passes=0), "`num_passes` must be"),
    )
