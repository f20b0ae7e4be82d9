"""The interval of linear CKA over scalings holds all of them, and its ends are approached by rewrites."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import representations
from dissociation.rewrites import approached, cka_freedom, linear_cka_freedom, neuron_groups
from dissociation.similarity import linear_cka


def cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def networks():
    a, b = (eqx.nn.MLP(6, 4, 24, 2, key=jax.random.key(seed)) for seed in (0, 1))
    inputs = jax.random.normal(jax.random.key(2), (150, 6))
    return a, b, inputs, *(np.asarray(representations(m, inputs)["features"], np.float64) for m in (a, b))


def test_all_scalings_lie_within():
    _, _, _, x, y = networks()
    found = cka_freedom(x, y)
    np.testing.assert_allclose(found.measured, cka(x, y), rtol=1e-9)
    assert found.low <= found.measured <= found.high
    assert found.residual < 1e-6
    assert repr(found).startswith(f"Freedom(measured={found.measured:.6f}, low={found.low:.6f}")
    assert f"lengths=f64[24](numpy) from 0 to {found.lengths.max():.4g})" in repr(found)
    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 6, (2000, 1)) * rng.standard_normal((2000, x.shape[1]))
    values = [cka(x * np.exp(each), y) for each in spread]
    assert found.low - 1e-9 <= min(values)
    assert max(values) <= found.high + 1e-9
    assert max(values) > found.measured  # the search found something, and it stays below


def test_ends_are_exact_where_they_are_known():
    rng = np.random.default_rng(1)
    q = np.linalg.qr(rng.standard_normal((40, 3)) - 0.0)[0]
    q = np.linalg.qr(q - q.mean(0))[0]
    # Orthogonal columns of lengths a against the same of lengths c: the cosine of a^2 and c^2.
    a, c = np.array([1.0, 2.0, 0.5]), np.array([1.0, 1.0, 3.0])
    found = cka_freedom(q * a, q * c)
    np.testing.assert_allclose(found.measured, (a**2 @ c**2) / np.linalg.norm(a**2) / np.linalg.norm(c**2), rtol=1e-9)
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    np.testing.assert_allclose(found.low, 1 / np.linalg.norm(c**2), rtol=1e-9)
    np.testing.assert_allclose(found.high_weights * a**2 / (found.high_weights * a**2).max(), c**2 / 9, rtol=1e-6)


@pytest.mark.parametrize("end", ["low", "high"])
def test_a_rewrite_of_the_network_approaches_either_end(end):
    a, _, inputs, x, y = networks()
    found = cka_freedom(x, y)
    moved, certificate = approached(found, a, neuron_groups(a, inputs[0])["layers[1]"], inputs, end=end)
    assert certificate.max_abs_change <= (0 if end == "low" else 1e-5)
    assert certificate.changed_predictions == 0
    outputs = representations(moved, inputs)
    before = representations(a, inputs)["logits"]
    assert jnp.abs(outputs["logits"] - before).max() <= (0 if end == "low" else 1e-5)
    np.testing.assert_allclose(linear_cka(outputs["features"], y), getattr(found, end), atol=1e-4)
    assert abs(float(linear_cka(outputs["features"], y)) - found.measured) > 1e-3


def test_neurons_without_use_show_a_ten_thousandth_of_the_longest():
    """To the nearest power of two, which rounds nothing."""
    a, _, inputs, x, y = networks()
    found = cka_freedom(x, y)
    factors = np.asarray(found.rewrite(neuron_groups(a, inputs[0])["layers[1]"], end="high").factor, np.float64)
    unused = (found.high_weights == 0) & ~found.constant
    sizes = np.log2(factors * np.where(found.constant, 0.5, found.lengths))
    assert unused.sum() > 5
    np.testing.assert_array_equal(np.log2(factors[unused]) % 1, 0)
    np.testing.assert_allclose((sizes[unused] - sizes[~unused].max()).mean(), np.log2(1e-4), atol=0.3)


def test_many_neurons_of_few_directions_have_the_ends_of_these():
    """Their Gram matrix is singular but for rounding. Other neurons open the interval."""
    rng = np.random.default_rng(4)
    q = np.linalg.qr(rng.standard_normal((40, 4)))[0]
    q = np.linalg.qr(q - q.mean(0))[0][:, :3]
    mixed, reference = rng.standard_normal((3, 57)), q * np.array([1.0, 2.0, 3.0])
    x = q @ np.concatenate([np.eye(3), mixed], 1)
    found = cka_freedom(x, reference)
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    assert found.residual < 1e-9
    unit = np.concatenate([np.eye(3), mixed / np.linalg.norm(mixed, axis=0)], 1)
    np.testing.assert_allclose(found.low, (np.array([1, 4, 9]) @ unit**2 / np.sqrt(98)).min(), rtol=1e-9)
    assert cka_freedom(np.concatenate([x, rng.standard_normal((40, 30))], 1), reference).low < found.low


def test_neurons_that_are_constant_are_left_out():
    _, _, _, x, y = networks()
    x = x[:, x.std(0) > 0]
    found = cka_freedom(np.concatenate([np.zeros((len(x), 2)), x, np.full((len(x), 1), 3.0)], 1), y)
    np.testing.assert_array_equal(np.flatnonzero(found.constant), [0, 1, 2 + x.shape[1]])
    plain = cka_freedom(x, y)
    np.testing.assert_allclose([found.low, found.high], [plain.low, plain.high], rtol=1e-9)
    with pytest.raises(ValueError, match="`x` must differ between samples"):
        cka_freedom(np.ones((5, 2)), y[:5])
    a, _, inputs, _, _ = networks()
    with pytest.raises(ValueError, match="`end` must be one of 'low', 'high'"):
        plain.rewrite(neuron_groups(a, inputs[0])["layers[1]"], end="middle")


@pytest.mark.parametrize("unit", [1e100, 1e-100])
def test_it_holds_for_large_means_and_in_any_unit(unit):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 8)), rng.standard_normal((50, 5))
    plain = cka_freedom(x, y)
    x[:, 0] += 1e8
    found = cka_freedom(unit * x, unit * y)
    assert not found.constant.any()
    np.testing.assert_allclose(found.measured, cka(x, y), rtol=1e-6)
    np.testing.assert_allclose((found.low, found.high), (plain.low, plain.high), rtol=1e-6)
    with pytest.raises(ValueError, match="`reference` must differ between samples"):
        cka_freedom(x, np.full((50, 3), 0.1))


def test_factors_follow_the_degree():
    call = lambda p, x: p[1] @ jax.nn.relu(p[0] @ x) ** 2  # noqa: E731
    p = [jax.random.normal(jax.random.key(0), (8, 5)), jax.random.normal(jax.random.key(1), (3, 8))]
    inputs = jax.random.normal(jax.random.key(2), (60, 5))
    (group,) = neuron_groups(p, inputs[0], call=call).values()
    assert group.degree == 2
    hidden = lambda p: np.asarray(jax.nn.relu(inputs @ p[0].T) ** 2)  # noqa: E731
    found = cka_freedom(hidden(p), np.asarray(inputs))
    for end in ("low", "high"):
        moved = found.rewrite(group, end=end)(p)
        np.testing.assert_allclose(cka(hidden(moved), np.asarray(inputs)), getattr(found, end), atol=1e-3)


@pytest.mark.parametrize("samples", [60, 6])
def test_positions_of_a_channel_share_its_factor(samples):
    """More samples than positions, and fewer."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, 7, 3, 4))
    y = rng.standard_normal((samples, 5)) + x[:, 0, 0, :1]
    found = cka_freedom(x, y)
    moved = lambda factors: cka((x * factors[:, None, None]).reshape(samples, -1), y)  # noqa: E731
    np.testing.assert_allclose(found.measured, moved(np.ones(7)), rtol=1e-9)
    values = [moved(np.exp(rng.uniform(0, 5) * rng.standard_normal(7))) for _ in range(3000)]
    assert found.low - 1e-9 <= min(values) < found.low + 0.05
    assert found.high - 0.05 < max(values) <= found.high + 1e-9
    np.testing.assert_allclose(moved(np.sqrt(found.low_weights)), found.low, rtol=1e-9)
    np.testing.assert_allclose(moved(np.sqrt(found.high_weights)), found.high, rtol=1e-9)
    assert found.residual < 1e-6
    apart = cka_freedom(x.reshape(samples, -1), y)
    assert apart.low < found.low < found.high < apart.high
    one = cka_freedom(x[:, :, 0, 0], y)
    np.testing.assert_allclose(cka_freedom(x[:, :, :1, 0], y).high, one.high, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_linear_networks(dtype):
    with jax.enable_x64(dtype == "float64"):
        model = eqx.nn.MLP(6, 4, 24, 2, activation=lambda x: x, key=jax.random.key(0), dtype=dtype)
        inputs = jax.random.normal(jax.random.key(2), (150, 6), dtype)
        y = jax.random.normal(jax.random.key(3), (150, 3), dtype) + inputs[:, :3]
        x = representations(model, inputs)["hidden0"]
        found = linear_cka_freedom(x, y)
        np.testing.assert_allclose(found.measured, linear_cka(x, y), rtol=1e-5)
        assert found.low < found.measured < found.high
        # Wide enough layers may have what any map of the inputs has.
        whole = linear_cka_freedom(inputs, y)
        np.testing.assert_allclose((whole.low, whole.high), (found.low, found.high), rtol=1e-4, atol=1e-9)
        rng = np.random.default_rng(0)
        for spread in rng.uniform(0, 4, 500):
            matrix = rng.standard_normal((24, 24)) * np.exp(spread * rng.standard_normal(24))
            value = cka(np.asarray(x, float) @ matrix, np.asarray(y))
            assert found.low - 1e-6 <= value <= found.high + 1e-6
        group = neuron_groups(model, inputs[0])["layers[0]"]
        for end in ("low", "high"):
            moved = found.rewrite(group, end=end)(model)
            np.testing.assert_allclose(
                linear_cka(representations(moved, inputs)["hidden0"], y), getattr(found, end), atol=1e-4
            )
            change = jnp.abs(jax.vmap(moved)(inputs) - jax.vmap(model)(inputs)).max()
            assert change < (1e-5 if dtype == "float32" else 1e-13)


def test_linear_maps_reach_a_reference_in_their_span():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 6))
    q = np.linalg.qr(x - x.mean(0))[0]
    found = linear_cka_freedom(x, q * np.array([1.0, 2, 3, 4, 5, 6]))
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    np.testing.assert_allclose(found.low, 1 / np.linalg.norm(np.arange(1, 7.0) ** 2), rtol=1e-9)
    np.testing.assert_allclose(linear_cka_freedom(x, x[:, :5]).low, 0, atol=1e-12)
    twice = np.concatenate([x, x[:, :2]], 1)  # of rank 6
    np.testing.assert_allclose(linear_cka_freedom(twice, q).low, linear_cka_freedom(x, q).low, rtol=1e-6)
    with pytest.raises(ValueError, match="`smallest` must be more than 0"):
        linear_cka_freedom(x, q, smallest=0.0)
    with pytest.raises(ValueError, match="`reference` must differ"):
        linear_cka_freedom(x, np.ones((50, 2)))
