"""The exact interval of linear CKA over scalings, and bounds from inside by gradients, for any measure."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import representations
from dissociation.rewrites import (
    approached,
    cka_range,
    linear_cka_range,
    neuron_groups,
    similarity_bounds,
)
from dissociation.similarity import MEASURES, angular_similarity, linear_cka, rsa

KEY = jax.random.key(0)


def cka(x, y):
    x, y = x - x.mean(0), y - y.mean(0)
    return np.linalg.norm(x.T @ y) ** 2 / np.linalg.norm(x.T @ x) / np.linalg.norm(y.T @ y)


def orthonormal(rows, columns):
    """Columns of mean zero."""
    x = np.random.default_rng(1).standard_normal((rows, columns))
    return np.linalg.qr(x - x.mean(0))[0]


@pytest.fixture(scope="module")
def networks():
    """Two networks, their last hidden neurons, inputs, and features."""
    models = [eqx.nn.MLP(6, 4, 24, 2, key=jax.random.key(seed)) for seed in (0, 1)]
    inputs = jax.random.normal(jax.random.key(2), (150, 6))
    groups = [neuron_groups(m, inputs[0])["layers[1]"] for m in models]
    return models, groups, inputs, *(representations(m, inputs)["features"] for m in models)


@pytest.fixture(scope="module")
def interval(networks):
    *_, x, y = networks
    return cka_range(x, y)


def test_all_scalings_lie_within(networks, interval):
    found, (x, y) = interval, (np.asarray(part, float) for part in networks[3:])
    np.testing.assert_allclose(found.measured, cka(x, y), rtol=1e-9)
    assert found.low <= found.measured <= found.high
    assert found.residual < 1e-6
    assert repr(found).startswith(f"CkaRange(measured={found.measured:.6f}, low={found.low:.6f}")
    assert f"lengths=f64[24](numpy) from 0 to {found.lengths.max():.4g})" in repr(found)
    rng = np.random.default_rng(0)
    spread = rng.uniform(0, 6, (500, 1)) * rng.standard_normal((500, x.shape[1]))
    values = [cka(x * np.exp(each), y) for each in spread]
    assert found.low - 1e-9 <= min(values)
    assert max(values) <= found.high + 1e-9
    assert max(values) > found.measured  # the search found something, and it stays below


def test_ends_are_exact_where_they_are_known():
    q = orthonormal(40, 3)
    # Orthogonal columns of lengths a against the same of lengths c: the cosine of a^2 and c^2.
    a, c = np.array([1.0, 2.0, 0.5]), np.array([1.0, 1.0, 3.0])
    found = cka_range(q * a, q * c)
    np.testing.assert_allclose(
        found.measured, (a**2 @ c**2) / np.linalg.norm(a**2) / np.linalg.norm(c**2), rtol=1e-9
    )
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    np.testing.assert_allclose(found.low, 1 / np.linalg.norm(c**2), rtol=1e-9)
    np.testing.assert_allclose(
        found.high_weights * a**2 / (found.high_weights * a**2).max(), c**2 / 9, rtol=1e-6
    )


@pytest.mark.parametrize("end", ["low", "high"])
def test_a_rewrite_of_the_network_approaches_either_end(end, networks, interval):
    found, ((a, _), (group, _), inputs, _, y) = interval, networks
    moved, certificate = approached(found, a, group, inputs, end=end)
    assert certificate.max_abs_change <= (0 if end == "low" else 1e-5)
    assert certificate.changed_predictions == 0
    outputs = representations(moved, inputs)
    before = representations(a, inputs)["logits"]
    assert jnp.abs(outputs["logits"] - before).max() <= (0 if end == "low" else 1e-5)
    np.testing.assert_allclose(linear_cka(outputs["features"], y), getattr(found, end), atol=1e-4)
    assert abs(float(linear_cka(outputs["features"], y)) - found.measured) > 1e-3


def test_many_neurons_of_few_directions_have_the_ends_of_these():
    """Their Gram matrix is singular but for rounding. Other neurons open the interval."""
    rng = np.random.default_rng(4)
    q = orthonormal(40, 3)
    mixed, reference = rng.standard_normal((3, 57)), q * np.array([1.0, 2.0, 3.0])
    x = q @ np.concatenate([np.eye(3), mixed], 1)
    found = cka_range(x, reference)
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    assert found.residual < 1e-9
    unit = np.concatenate([np.eye(3), mixed / np.linalg.norm(mixed, axis=0)], 1)
    np.testing.assert_allclose(
        found.low, (np.array([1, 4, 9]) @ unit**2 / np.sqrt(98)).min(), rtol=1e-9
    )
    assert (
        cka_range(np.concatenate([x, rng.standard_normal((40, 30))], 1), reference).low < found.low
    )


def test_neurons_that_are_constant_are_left_out(networks):
    _, (group, _), _, x, y = networks
    x = np.asarray(x)[:, np.std(x, 0) > 0]
    found = cka_range(np.concatenate([np.zeros((len(x), 2)), x, np.full((len(x), 1), 3.0)], 1), y)
    np.testing.assert_array_equal(np.flatnonzero(found.constant), [0, 1, 2 + x.shape[1]])
    plain = cka_range(x, y)
    np.testing.assert_allclose([found.low, found.high], [plain.low, plain.high], rtol=1e-9)
    with pytest.raises(ValueError, match="`x` must differ between samples"):
        cka_range(np.ones((5, 2)), y[:5])
    with pytest.raises(ValueError, match="`end` must be one of 'low', 'high'"):
        plain.rewrite(group, end="middle")


@pytest.mark.parametrize("unit", [1e100, 1e-100])
def test_it_holds_for_large_means_and_in_any_unit(unit):
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((50, 8)), rng.standard_normal((50, 5))
    plain = cka_range(x, y)
    x[:, 0] += 1e8
    found = cka_range(unit * x, unit * y)
    assert not found.constant.any()
    np.testing.assert_allclose(found.measured, cka(x, y), rtol=1e-6)
    np.testing.assert_allclose((found.low, found.high), (plain.low, plain.high), rtol=1e-6)
    with pytest.raises(ValueError, match="`reference` must differ between samples"):
        cka_range(x, np.full((50, 3), 0.1))


def test_factors_follow_the_degree():
    call = lambda p, x: p[1] @ jax.nn.relu(p[0] @ x) ** 2  # noqa: E731
    p = [jax.random.normal(jax.random.key(0), (8, 5)), jax.random.normal(jax.random.key(1), (3, 8))]
    inputs = jax.random.normal(jax.random.key(2), (60, 5))
    (group,) = neuron_groups(p, inputs[0], call=call).values()
    assert group.degree == 2
    hidden = lambda p: np.asarray(jax.nn.relu(inputs @ p[0].T) ** 2)  # noqa: E731
    found = cka_range(hidden(p), np.asarray(inputs))
    for end in ("low", "high"):
        moved = found.rewrite(group, end=end)(p)
        np.testing.assert_allclose(
            cka(hidden(moved), np.asarray(inputs)), getattr(found, end), atol=1e-3
        )


@pytest.mark.parametrize("samples", [60, 6])
def test_positions_of_a_channel_share_its_factor(samples):
    """More samples than positions, and fewer."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((samples, 7, 3, 4))
    y = rng.standard_normal((samples, 5)) + x[:, 0, 0, :1]
    found = cka_range(x, y)
    moved = lambda factors: cka((x * factors[:, None, None]).reshape(samples, -1), y)  # noqa: E731
    np.testing.assert_allclose(found.measured, moved(np.ones(7)), rtol=1e-9)
    values = [moved(np.exp(rng.uniform(0, 5) * rng.standard_normal(7))) for _ in range(1000)]
    assert found.low - 1e-9 <= min(values) < found.low + 0.05
    assert found.high - 0.05 < max(values) <= found.high + 1e-9
    np.testing.assert_allclose(moved(np.sqrt(found.low_weights)), found.low, rtol=1e-9)
    np.testing.assert_allclose(moved(np.sqrt(found.high_weights)), found.high, rtol=1e-9)
    assert found.residual < 1e-6
    apart = cka_range(x.reshape(samples, -1), y)
    assert apart.low < found.low < found.high < apart.high
    one = cka_range(x[:, :, 0, 0], y)
    np.testing.assert_allclose(cka_range(x[:, :, :1, 0], y).high, one.high, rtol=1e-12)


def test_linear_networks():
    model = eqx.nn.MLP(6, 4, 24, 2, activation=lambda x: x, key=KEY)
    inputs = jax.random.normal(jax.random.key(2), (150, 6))
    y = jax.random.normal(jax.random.key(3), (150, 3)) + inputs[:, :3]
    shown = representations(model, inputs)
    x = shown["layers[0]"]
    found = linear_cka_range(x, y)
    np.testing.assert_allclose(found.measured, linear_cka(x, y), rtol=1e-5)
    assert found.low < found.measured < found.high
    # Wide enough layers may have what any map of the inputs has.
    whole = linear_cka_range(inputs, y)
    np.testing.assert_allclose(
        (whole.low, whole.high), (found.low, found.high), rtol=1e-4, atol=1e-9
    )
    rng = np.random.default_rng(0)
    for spread in rng.uniform(0, 4, 200):
        matrix = rng.standard_normal((24, 24)) * np.exp(spread * rng.standard_normal(24))
        assert (
            found.low - 1e-6
            <= cka(np.asarray(x, float) @ matrix, np.asarray(y))
            <= found.high + 1e-6
        )
    group = neuron_groups(model, inputs[0])["layers[0]"]
    for end in ("low", "high"):
        rewritten = found.rewrite(group, end=end)(model)
        moved = representations(rewritten, inputs)
        np.testing.assert_allclose(
            linear_cka(moved["layers[0]"], y), getattr(found, end), atol=1e-4
        )
        # The map is far from orthogonal, so products that round are larger than the logits that are
        # left of them.
        products = jnp.abs(moved["layers[0]"]) @ jnp.abs(rewritten.layers[1].weight).T
        assert (
            jnp.abs(moved["logits"] - shown["logits"]).max()
            < products.max() * jnp.finfo(jnp.float32).eps
        )


def test_linear_maps_reach_a_reference_in_their_span():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((50, 6))
    q = np.linalg.qr(x - x.mean(0))[0]
    found = linear_cka_range(x, q * np.array([1.0, 2, 3, 4, 5, 6]))
    np.testing.assert_allclose(found.high, 1, rtol=1e-9)
    np.testing.assert_allclose(found.low, 1 / np.linalg.norm(np.arange(1, 7.0) ** 2), rtol=1e-9)
    np.testing.assert_allclose(linear_cka_range(x, x[:, :5]).low, 0, atol=1e-12)
    twice = np.concatenate([x, x[:, :2]], 1)  # of rank 6
    np.testing.assert_allclose(
        linear_cka_range(twice, q).low, linear_cka_range(x, q).low, rtol=1e-6
    )
    with pytest.raises(ValueError, match="`reference` must differ"):
        linear_cka_range(x, np.ones((50, 2)))


@pytest.mark.slow
def test_gradients_come_to_the_exact_interval(networks):
    """Also with a neuron that is constant, and samples in another unit."""
    *_, x, y = networks
    for side, other in ((x.at[:, 0].set(2.0), 1e6 * y), (x, y)):
        exact = cka_range(side, other)
        found = similarity_bounds(side, other, free="x", key=KEY)
        np.testing.assert_allclose(found.measured, exact.measured, rtol=1e-5)
        assert exact.low - 1e-5 <= found.low <= exact.low + 2e-3
        assert exact.high - 2e-3 <= found.high <= exact.high + 1e-5
        assert (found.ends[0].max() < exact.measured) & (found.ends[1].min() > exact.measured)
        np.testing.assert_array_equal(found.low_factors[1], 1)
        lengths = np.linalg.norm(side - side.mean(0, keepdims=True), axis=0)
        there = lengths > 1e-5
        for factors in (found.low_factors[0], found.high_factors[0]):
            ratios = (factors * lengths)[there] / lengths[there].mean()
            assert 1 / 30.01 < ratios.min() < ratios.max() < 30.01
    both = similarity_bounds(x, y, key=KEY)
    assert both.low < found.low
    assert both.high > found.high + 0.05


@pytest.mark.slow
@pytest.mark.parametrize(
    ("measure", "options"), [("linear_cka", {}), ("rsa", {"num_starts": 5, "num_steps": 30})]
)
def test_the_networks_have_these_values(measure, options, networks):
    models, groups, inputs, x, y = networks
    found = similarity_bounds(x, y, measure, key=KEY, **options)
    for end in ("low", "high"):
        moved = [
            found.rewrite(g, end=end, side=side)(m)
            for m, g, side in zip(models, groups, "xy", strict=True)
        ]
        shown = [representations(m, inputs) for m in moved]
        value = MEASURES[measure](*(each["features"] for each in shown))
        np.testing.assert_allclose(value, getattr(found, end), atol=1e-4)
        for before, after in zip(models, shown, strict=True):
            np.testing.assert_allclose(after["logits"], jax.vmap(before)(inputs), atol=1e-5)
    assert found.low < found.measured - 0.2
    assert found.high > found.measured + 0.1


def test_known_bounds():
    q = orthonormal(40, 3)
    # Of lengths (c, d) against factors (a, b): (ac + bd) / sqrt((a^2 + b^2) (c^2 + d^2)).
    found = similarity_bounds(
        q[:, :2], q[:, :2] * np.array([3.0, 4.0]), angular_similarity, free="x", key=KEY
    )
    np.testing.assert_allclose(found.measured, 7 / 5 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose([found.low, found.high], [0.6, 1], atol=3e-3)
    np.testing.assert_allclose(
        found.high_factors[0][1] / found.high_factors[0][0], 4 / 3, rtol=0.02
    )


@pytest.mark.slow
def test_nothing_moves_what_is_invariant_to_the_scale_of_a_neuron(networks):
    *_, x, y = networks
    for measure, free in (("cca", "both"), ("linear_predictivity", "x")):
        found = similarity_bounds(x, y, measure, free=free, key=KEY)
        np.testing.assert_array_equal([found.low, found.high], found.measured)
    # To that of its targets, predictivity is not invariant.
    assert (
        similarity_bounds(x, y, "linear_predictivity", key=KEY, num_steps=0).low
        < found.measured - 0.1
    )


@pytest.mark.slow
def test_no_worse_than_what_is_there():
    """Ranks have no derivative, and no start of ours need be as close as the networks are to each other."""
    x = np.random.default_rng(0).standard_normal((30, 4)) * np.array([1.0, 3.0, 0.3, 2.0])
    found = similarity_bounds(
        x, x, lambda a, b: rsa(a, b, comparison="spearman"), key=KEY, num_steps=3
    )
    np.testing.assert_allclose([found.measured, found.high], 1, rtol=1e-6)
    assert found.low < 0.9


def test_wrong_use_of_bounds():
    x = np.random.default_rng(0).standard_normal((20, 3))
    for options, error, wanted in (
        ({"measure": "cka"}, ValueError, "`measure` must be one of"),
        ({"measure": "hard_matching"}, TypeError, "a step of which the host does"),
        ({"measure": "disagreement"}, ValueError, "which compares outputs"),
        ({"free": "y"}, ValueError, "`free` must be one of 'x', 'both'"),
        ({"largest_factor": 1.0}, ValueError, "`largest_factor` must be more than 1 and finite"),
        ({"num_starts": 3}, ValueError, "`num_starts`"),
    ):
        with pytest.raises(error, match=wanted):
            similarity_bounds(x, x, key=KEY, **options)
    found = similarity_bounds(x, x, linear_cka, key=KEY, num_steps=0)
    group = neuron_groups(eqx.nn.MLP(3, 2, 3, 1, activation=jnp.tanh, key=KEY), x[0])["layers[0]"]
    with pytest.raises(ValueError, match="homogeneous of a positive degree"):
        found.rewrite(group, end="low")
    with pytest.raises(ValueError, match="`side` must be one of 'x', 'y'"):
        found.rewrite(group, end="low", side="z")
