import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from dissociation.models.bilinear import BilinearNetwork, wrap_bilinear
from dissociation.spectral import Spectrum, decompose, truncate
from dissociation.spectral.certificate import certified_accuracy, certified_radius, margins


def network(classes=3, **options):
    return BilinearNetwork(6, 5, classes, key=jax.random.key(3), **options)


def labelled(model, count=12, seed=0):
    x = np.random.default_rng(seed).normal(size=(count, model.embed.shape[1])).astype(np.float32)
    return x, jax.vmap(model)(x).argmax(1)


def certify(model, x, labels):
    @eqx.filter_jit
    def run(model, x, labels):
        forms = margins(model)
        return jax.vmap(lambda one, label: certified_radius(forms, one, label))(x, labels)

    return run(model, x, labels)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"residual": True}])
def test_the_point_found_lies_on_the_boundary(options):
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: leaf.astype(float), network(**options))
        x, labels = labelled(model)
        x = x.astype(float)
        found = certify(model, x, labels)
        assert np.isfinite(found.radius).all()
        np.testing.assert_allclose(jnp.linalg.norm(found.step, axis=1), found.radius, rtol=1e-9)
        logits = np.asarray(jax.vmap(model)(x + found.step))
        own, rival = (logits[np.arange(12), index] for index in (labels, found.rival))
        np.testing.assert_allclose(own, rival, atol=1e-9)
        beyond = jax.vmap(model)(x + 1.001 * found.step).argmax(1)
        within = jax.vmap(model)(x + 0.999 * found.step).argmax(1)
        assert (beyond != labels).all()
        assert (within == labels).all()


@pytest.mark.parametrize("options", [{}, {"bias": True}])
def test_no_attack_finds_a_nearer_one(options):
    with jax.enable_x64(True):
        model = jax.tree.map(lambda leaf: leaf.astype(float), network(**options))
        x, labels = labelled(model, 6)
        found = certify(model, x.astype(float), labels)
        for one, label, radii in zip(x, np.asarray(labels), np.asarray(found.radii), strict=True):
            for rival in set(range(3)) - {int(label)}:
                margin = jax.jit(lambda p, a=int(label), b=rival: model(p)[a] - model(p)[b])
                slope = jax.jit(jax.grad(margin))
                best = np.inf
                for seed in range(8):
                    start = one + np.random.default_rng(seed).normal(size=6)
                    limit = {"type": "ineq", "fun": lambda p, m=margin: -float(m(p)), "jac": lambda p, s=slope: -s(p)}
                    distance = lambda p, c=one: float(np.sum((p - c) ** 2))  # noqa: E731
                    result = minimize(distance, start, constraints=[limit], method="SLSQP", options={"maxiter": 200})
                    if result.success and margin(result.x) < 1e-6:
                        best = min(best, result.fun**0.5)
                np.testing.assert_allclose(radii[rival], best, rtol=1e-3)


def spectrum_of(first, second):
    """Two diagonal forms, and so a margin with the difference on its diagonal."""
    eye = np.broadcast_to(np.eye(len(first), dtype=np.float32), (2, len(first), len(first)))
    return Spectrum(jnp.asarray([first, second], jnp.float32), jnp.asarray(eye), False)


def test_closed_forms():
    # x1^2 - x2^2 from (2, 1): the nearest point of the lines x1 = +-x2 is at distance 1 / sqrt(2).
    forms = margins(spectrum_of([1, 0], [0, 1]))
    found = certified_radius(forms, np.asarray([2.0, 1.0], np.float32), 0)
    np.testing.assert_allclose(found.radius, 0.5**0.5, rtol=1e-5)
    np.testing.assert_allclose(found.step, [-0.5, 0.5], atol=1e-5)
    # The hard case, (2, 0): no slope along the second axis, and two nearest points, (1, 1) and (1, -1).
    found = certified_radius(forms, np.asarray([2.0, 0.0], np.float32), 0)
    np.testing.assert_allclose(found.radius, 2**0.5, rtol=1e-5)
    np.testing.assert_allclose(np.abs(found.step), [1, 1], atol=1e-5)
    # The centre of |x|^2 > 0 is its only point that is not above zero. The margin has no slope there, which costs half
    # the digits.
    found = certified_radius(margins(spectrum_of([1, 1], [0, 0])), np.asarray([2.0, 0.0], np.float32), 0)
    np.testing.assert_allclose(found.radius, 2, rtol=1e-3)


@pytest.mark.parametrize("curvature", [0.0, 1e-20, -1e-20, 1e-7, -1e-7])
def test_an_all_but_linear_margin_has_the_distance_to_a_plane(curvature):
    # (c x + 1) * (V x) with c next to nothing: logits V x.
    weights, ones = np.asarray([[1.0, 2.0], [0.0, -1.0]], np.float32), np.ones(2, np.float32)
    layer = (curvature * np.eye(2, dtype=np.float32), weights, ones, 0 * ones)
    model = wrap_bilinear(np.eye(2, dtype=np.float32), [layer], np.eye(2, dtype=np.float32))
    x, difference = ones, weights[0] - weights[1]
    found = certified_radius(margins(model), x, 0)
    distance = difference @ x / np.linalg.norm(difference)
    np.testing.assert_allclose(found.radius, distance, rtol=1e-5)
    np.testing.assert_allclose(found.step, -distance * difference / np.linalg.norm(difference), rtol=1e-5)


def test_no_rival_and_misclassified():
    # With a constant, 1 + x^2 against 0 never changes sign.
    vectors = jnp.broadcast_to(jnp.eye(2), (2, 2, 2))
    forms = margins(Spectrum(jnp.asarray([[1.0, 1.0], [0.0, 0.0]]), vectors, True))
    found = certified_radius(forms, np.asarray([0.5], np.float32), 0)
    assert np.isinf(found.radius)
    np.testing.assert_array_equal(found.step, 0)
    wrong = certified_radius(forms, np.asarray([0.5], np.float32), 1)
    assert float(wrong.radius) == 0
    shares = certified_accuracy(np.asarray([0.0, 1.0, 2.0, np.inf], np.float32), np.asarray([0.0, 1.5], np.float32))
    np.testing.assert_allclose(shares, [0.75, 0.5])


def test_a_full_spectrum_has_the_networks_radii_and_a_truncated_one_has_not():
    model = network()
    x, labels = labelled(model)
    own = certify(model, x, labels).radius
    spectrum = decompose(model)
    np.testing.assert_allclose(certify(spectrum, x, labels).radius, own, rtol=2e-3)
    assert np.abs(certify(truncate(spectrum, 2), x, labels).radius - own).max() > 0.01


def test_float32_is_close_to_float64():
    model = BilinearNetwork(784, 30, 10, key=jax.random.key(0))
    x, labels = labelled(model, 20)
    found = certify(model, x, labels)
    with jax.enable_x64(True):
        exact = certify(jax.tree.map(lambda leaf: leaf.astype(float), model), x.astype(float), labels)
    np.testing.assert_allclose(found.radius, exact.radius, rtol=2e-3)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="one layer"):
        margins(network(num_layers=2))
    with pytest.raises(ValueError, match="at least two classes"):
        margins(network(classes=1))
    with pytest.raises(ValueError, match=r"`x` must have shape \[6\]"):
        certified_radius(margins(network()), np.ones(7, np.float32), 0)
