import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.integrate import quad
from scipy.stats import norm

from dissociation.metrics.information.nearest import (
    ESTIMATORS,
    entropy,
    entropy_weights,
    information,
    label_information,
    neighbour_distances,
    whiten,
)

measure = jax.jit(information, static_argnames=("estimator", "num_neighbours"))


def gaussian_pair(correlation, width, count=10_000, seed=0):
    rng = np.random.default_rng(seed)
    x, noise = rng.normal(size=(2, count, width))
    z = correlation * x + (1 - correlation**2) ** 0.5 * noise
    return x.astype(np.float32), z.astype(np.float32)


@pytest.mark.parametrize("count", [40, 500])
def test_neighbours_against_all_distances(count):
    points = np.random.default_rng(0).normal(size=(count, 3))
    exact = np.sort(np.linalg.norm(points[:, None] - points[None], axis=2), 1)[:, 1:5]
    for block in (7, 64, 1000):
        with jax.enable_x64(True):
            np.testing.assert_allclose(neighbour_distances(points, 4, block=block), exact, rtol=1e-12)
    np.testing.assert_allclose(neighbour_distances(points.astype(np.float32), 4), exact, rtol=1e-5)


def test_neighbours_against_scikit_learn():
    neighbours = pytest.importorskip("sklearn.neighbors")
    points = np.random.default_rng(0).normal(size=(2000, 8)).astype(np.float32)
    expected = neighbours.KDTree(points).query(points, k=6)[0][:, 1:]
    np.testing.assert_allclose(neighbour_distances(points, 5), expected, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 12])
def test_weights_fulfil_their_conditions(width):
    weights = entropy_weights(5, width)
    np.testing.assert_allclose(weights.sum(), 1, rtol=1e-9)
    order = np.arange(1, 6)
    for term in range(1, width // 4 + 1):
        # Gamma(j + s) / Gamma(j) through its own recursion in j.
        ratio = np.cumprod(np.concatenate([[1.0], (order[:-1] + 2 * term / width) / order[:-1]]))
        np.testing.assert_allclose(weights @ ratio, 0, atol=1e-9)
    if width < 4:
        np.testing.assert_allclose(weights, 0.2)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_entropies_of_known_densities(width):
    rng = np.random.default_rng(width)
    normal = entropy(3 * rng.normal(size=(5000, width)).astype(np.float32))
    uniform = entropy(rng.random((5000, width)).astype(np.float32))
    # The weights of 4 dimensions make the terms vary more; borders bias the uniform density.
    np.testing.assert_allclose(
        normal.value, width * (0.5 * np.log(2 * np.pi * np.e) + np.log(3)), atol=4 * normal.error
    )
    np.testing.assert_allclose(uniform.value, 0.0, atol=4 * uniform.error + 0.03 * width)
    assert normal.error < 0.05 * width


@pytest.mark.parametrize("correlation", [0.5, 0.75, 0.9])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_information_of_gaussians(correlation, width):
    # 0.1438, 0.4133, 0.8304 nats per dimension; 10 000 samples.
    exact = -0.5 * width * np.log(1 - correlation**2)
    x, z = gaussian_pair(correlation, width)
    found = {name: measure(x, z, estimator=name) for name in ESTIMATORS}
    np.testing.assert_allclose(found["entropies"].value, exact, atol=3 * found["entropies"].error)
    assert found["entropies"].error < 0.04 * width
    # Kraskov's is biased downwards in many dimensions, by up to an eighth here.
    np.testing.assert_allclose(found["kraskov"].value, exact, rtol=0.03 if width < 3 else 0.13, atol=0.02)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_of_nothing(estimator):
    for width in (1, 4):
        x, z = gaussian_pair(0.0, width)
        found = measure(x, z, estimator=estimator)
        np.testing.assert_allclose(found.value, 0.0, atol=3 * found.error + 0.01)
        # The null that stands beside every curve: a strong relation, its pairs shuffled.
        x, z = gaussian_pair(0.9, width)
        null = measure(x, z[np.random.default_rng(1).permutation(len(z))], estimator=estimator)
        np.testing.assert_allclose(null.value, 0.0, atol=3 * null.error + 0.01)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("width", [1, 2])
def test_invertible_maps_change_nothing(estimator, width):
    x, z = gaussian_pair(0.75, width)
    exact = 0.4133 * width
    maps = {"cdf": norm.cdf, "half_cube": lambda t: t * np.abs(t) ** 0.5, "asinh": lambda t: np.arcsinh(t)}
    for name, map_ in maps.items():
        found = measure(map_(x).astype(np.float32), z, estimator=estimator)
        np.testing.assert_allclose(found.value, exact, atol=3 * found.error + 0.03 * width, err_msg=name)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_classes(estimator):
    rng = np.random.default_rng(0)
    labels = rng.choice(3, 6000, p=[0.5, 0.3, 0.2])
    centres, spread = np.asarray([-2.0, 0.0, 1.5]), 0.7
    z = (centres[labels] + spread * rng.normal(size=6000)).astype(np.float32)[:, None]
    mixture = lambda t: sum(p * norm.pdf(t, c, spread) for p, c in zip([0.5, 0.3, 0.2], centres, strict=True))  # noqa: E731
    whole = quad(lambda t: -mixture(t) * np.log(mixture(t)), -8, 8)[0]
    exact = whole - 0.5 * np.log(2 * np.pi * np.e * spread**2)
    found = label_information(z, labels, num_classes=4, estimator=estimator)  # the fourth class does not occur
    np.testing.assert_allclose(found.value, exact, atol=0.03)
    shuffled = label_information(z, rng.permutation(labels), num_classes=4, estimator=estimator)
    np.testing.assert_allclose(shuffled.value, 0.0, atol=0.03)


measure_labels = jax.jit(label_information, static_argnames=("num_classes", "estimator"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_classes_that_stand_apart_say_the_entropy_of_labels(estimator):
    rng = np.random.default_rng(0)
    labels = rng.choice(4, 300, p=[0.5, 0.3, 0.1, 0.1])
    share = np.bincount(labels) / 300
    z = (10.0 * labels[:, None] + rng.normal(size=(300, 2))).astype(np.float32)
    found = measure_labels(z, labels, num_classes=4, estimator=estimator)
    assert found.reliable
    np.testing.assert_allclose(found.value, -np.sum(share * np.log(share)), rtol=1e-5)
    # One class has nothing to tell, and says so.
    alone = measure_labels(z, np.zeros(300, int), num_classes=4, estimator=estimator)
    assert alone.reliable
    np.testing.assert_allclose(alone.value, 0.0, atol=1e-6)
    # Traced labels out of range are not checked, and not used either.
    for wrong in (labels - 1, labels + 1):
        lost = measure_labels(z, wrong, num_classes=4, estimator=estimator)
        assert not lost.reliable
        assert np.isnan(lost.value)


def test_more_than_labels_can_hold_is_not_a_number():
    # Fours of all classes close together: with the negative weights of neighbours in 8 dimensions that is a surplus.
    rng = np.random.default_rng(0)
    z = np.repeat(rng.normal(size=(75, 8)), 4, 0) + 1e-3 * rng.normal(size=(300, 8))
    found = measure_labels(z.astype(np.float32), np.arange(300) % 4, num_classes=4)
    assert not found.reliable
    assert np.isnan(found.value)
    assert np.isnan(found.error)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_dtype_is_that_of_x(estimator):
    x, z = gaussian_pair(0.75, 2, 300)
    expected = measure(x, z, estimator=estimator)
    with jax.enable_x64(True):
        found = measure(x, z.astype(float), estimator=estimator)
        assert found.value.dtype == np.float32
        np.testing.assert_allclose(found.value, expected.value, rtol=1e-5)


def test_what_cannot_be_told_is_not_a_number():
    x, _ = gaussian_pair(0.0, 2, 500)
    copies = np.repeat(x[:50], 10, 0)
    assert len(copies) == len(x)  # one compiled program for both
    for estimator in ESTIMATORS:
        for found in (measure(copies, copies, estimator=estimator), measure(x, x, estimator=estimator)):
            assert not found.reliable, estimator
            assert np.isnan(found.value)
            assert np.isnan(found.error)
    assert not entropy(copies).reliable
    # One coincidence among many samples is rounding, and does no harm.
    one = np.concatenate([x, x[:1]])
    np.testing.assert_allclose(entropy(one).value, entropy(x).value, atol=0.05)


def test_whitening():
    rng = np.random.default_rng(0)
    points = (rng.normal(size=(400, 6)) * [5, 3, 2, 1, 1e-9, 0] + 7).astype(np.float32)
    found = np.asarray(whiten(points, 5))
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-4)
    np.testing.assert_allclose(np.cov(found.T, bias=True), np.diag([1, 1, 1, 1, 0]), atol=1e-3)
    # Turned, the missing directions are rounding, and still zero.
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    turned = np.asarray(whiten((points @ turn).astype(np.float32), 5))
    np.testing.assert_allclose(np.cov(turned.T, bias=True), np.diag([1, 1, 1, 1, 0]), atol=1e-3)
    _, _, right = np.linalg.svd(points - points.mean(0), full_matrices=False)
    expected = (points - points.mean(0)) @ right[0]
    np.testing.assert_allclose(np.abs(np.corrcoef(found[:, 0], expected)[0, 1]), 1, rtol=1e-5)


def test_jit_vmap_and_loop_agree():
    x, _ = gaussian_pair(0.0, 2, 300)
    z = np.stack([gaussian_pair(c, 2, 300)[1] for c in (0.3, 0.6, 0.9)])
    labels = np.arange(300) % 3

    def one(z):
        return jnp.stack(
            [
                information(x, z).value,
                information(x, z, estimator="kraskov").value,
                label_information(z, labels, num_classes=3).value,
            ]
        )

    compiled = jax.jit(one)
    loop = np.stack([compiled(part) for part in z])
    np.testing.assert_allclose(one(z[0]), loop[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(z), loop, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda x: entropy(x, num_neighbours=30), r"`num_neighbours` must be below the number of samples \(30\)"),
        (lambda x: entropy_weights(2, 8), "`num_neighbours` must be at least 3 in 8 dimensions"),
        (lambda x: information(x, x, estimator="ksg"), "'entropies', 'kraskov'"),
        (lambda x: label_information(x, np.arange(30) // 28, num_classes=2), "got 2 of class 1"),
        (lambda x: label_information(x, np.arange(30) % 3, num_classes=2), "`labels` must lie between 0 and 1, got 0"),
        (lambda x: label_information(x, np.arange(30) % 3 - 1, num_classes=3), "`labels` must lie between 0 and 2"),
        (lambda x: whiten(x, 3), r"`num_components` must be at most the dimension \(2\)"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call(np.random.default_rng(0).normal(size=(30, 2)).astype(np.float32))
