"""Bounds from inside are values of real networks, lie within what is exact, and come close to what is known."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import representations
from dissociation.rewrites import cka_freedom, neuron_groups, similarity_bounds
from dissociation.similarity import MEASURES, angular_similarity, linear_cka, rsa

KEY = jax.random.key(0)


def networks():
    models = [eqx.nn.MLP(6, 4, 24, 2, key=jax.random.key(seed)) for seed in (0, 1)]
    inputs = jax.random.normal(jax.random.key(2), (150, 6))
    return models, inputs, *(representations(m, inputs)["features"] for m in models)


def orthonormal(rows, columns):
    q = np.linalg.qr(np.random.default_rng(0).standard_normal((rows, columns + 1)))[0]
    return np.linalg.qr(q - q.mean(0))[0][:, :columns]


def test_gradients_come_to_the_exact_interval():
    _, _, x, y = networks()
    exact = cka_freedom(x, y)
    found = similarity_bounds(x, y, free="x", key=KEY)
    np.testing.assert_allclose(found.measured, exact.measured, rtol=1e-5)
    assert exact.low - 1e-5 <= found.low <= exact.low + 2e-3
    assert exact.high - 2e-3 <= found.high <= exact.high + 1e-5
    assert (found.ends[0].max() < exact.measured) & (found.ends[1].min() > exact.measured)
    np.testing.assert_array_equal(found.low_factors[1], 1)
    lengths = np.linalg.norm(x - x.mean(0, keepdims=True), axis=0)
    there = lengths > 0
    for factors in (found.low_factors[0], found.high_factors[0]):
        ratios = (factors * lengths)[there] / lengths[there].mean()
        assert 1 / 30.01 < ratios.min() < ratios.max() < 30.01
    both = similarity_bounds(x, y, key=KEY)
    assert both.low < found.low
    assert both.high > found.high + 0.05


@pytest.mark.parametrize("measure", ["linear_cka", "angular_similarity", "rsa"])
def test_the_networks_have_these_values(measure):
    models, inputs, x, y = networks()
    found = similarity_bounds(x, y, measure, key=KEY, num_starts=5, num_steps=30)
    groups = [neuron_groups(m, inputs[0])["layers[1]"] for m in models]
    for end in ("low", "high"):
        moved = [found.rewrite(g, end=end, side=side)(m) for m, g, side in zip(models, groups, ("x", "y"), strict=True)]
        sides = [representations(m, inputs)["features"] for m in moved]
        np.testing.assert_allclose(MEASURES[measure](*sides), getattr(found, end), atol=1e-4)
        for before, after in zip(models, moved, strict=True):
            np.testing.assert_allclose(jax.vmap(after)(inputs), jax.vmap(before)(inputs), atol=1e-5)
    assert found.low < found.measured - 0.2
    assert found.high > found.measured + 0.1


def test_known_ends():
    """Orthonormal neurons; the other network has the first of them, and one of its own."""
    q = orthonormal(40, 3)
    found = similarity_bounds(q[:, :2], q[:, [0, 2]], key=KEY)
    np.testing.assert_allclose(found.measured, 0.5, rtol=1e-5)
    np.testing.assert_allclose([found.low, found.high], [0, 1], atol=1e-3)
    # Of lengths (c, d) against factors (a, b): (ac + bd) / sqrt((a^2 + b^2) (c^2 + d^2)).
    found = similarity_bounds(q[:, :2], q[:, :2] * np.array([3.0, 4.0]), angular_similarity, free="x", key=KEY)
    np.testing.assert_allclose(found.measured, 7 / 5 / np.sqrt(2), rtol=1e-5)
    np.testing.assert_allclose([found.low, found.high], [0.6, 1], atol=3e-3)
    np.testing.assert_allclose(found.high_factors[0][1] / found.high_factors[0][0], 4 / 3, rtol=0.02)


def test_starts_are_what_they_are_said_to_be():
    """Without steps: lengths as they are, equal ones, and one neuron alone; of the other network too if it is free."""
    q = orthonormal(40, 4)
    found = similarity_bounds(
        q[:, :3] * np.array([100.0, 200.0, 300.0]), q[:, [0]], free="x", key=KEY, num_starts=4, num_steps=0
    )
    wanted = [1 / np.sqrt(98), 1 / np.sqrt(3), 0, 1]
    np.testing.assert_allclose(found.ends, [wanted, wanted], atol=3e-6)
    both = similarity_bounds(q[:, :2], q[:, [0, 2]], key=KEY, num_starts=4, num_steps=0)
    np.testing.assert_allclose(both.ends, [[0.5, 0.5, 0, 1]] * 2, atol=3e-6)
    lengths = np.log(both.high_factors[0]), np.log(both.high_factors[1])  # the first of each, 30 and 1 / 30
    np.testing.assert_allclose(lengths, np.log(30) * np.array([[1, -1], [1, -1]]), rtol=1e-4)


def test_nothing_moves_what_is_invariant_to_the_scale_of_a_neuron():
    _, _, x, y = networks()
    for measure, free in (("cca", "both"), ("linear_predictivity", "x")):
        found = similarity_bounds(x, y, measure, free=free, key=KEY)
        np.testing.assert_array_equal([found.low, found.high], found.measured)
    # To that of its targets, predictivity is not invariant.
    assert similarity_bounds(x, y, "linear_predictivity", key=KEY, num_steps=0).low < found.measured - 0.1


def test_no_worse_than_what_is_there():
    """Ranks have no derivative, and no start of ours need be as close as the networks are to each other."""
    x = np.random.default_rng(0).standard_normal((30, 4)) * np.array([1.0, 3.0, 0.3, 2.0])
    found = similarity_bounds(x, x, lambda a, b: rsa(a, b, comparison="spearman"), key=KEY, num_steps=3)
    np.testing.assert_allclose([found.measured, found.high], 1, rtol=1e-6)
    assert found.low < 0.9


def test_constant_neurons_and_samples_in_any_unit():
    _, _, x, y = networks()
    plain = similarity_bounds(x, y, key=KEY, num_steps=20)
    still = jnp.concatenate([jnp.full((len(x), 1), 2.0), x], 1)
    found = similarity_bounds(still, 1e6 * y, key=KEY, num_steps=20)
    assert jnp.isfinite(found.ends).all()
    np.testing.assert_allclose(found.low, plain.low, atol=0.02)
    np.testing.assert_allclose(found.high, plain.high, atol=0.02)


def test_bounds_print_a_line():
    _, _, x, y = networks()
    found = jax.vmap(lambda x: similarity_bounds(x, y, key=KEY, num_starts=4, num_steps=5))(jnp.stack([x, 2 * x]))
    one = jax.tree.map(lambda leaf: leaf[0], found)
    np.testing.assert_allclose(found.low, jnp.stack([one.low] * 2), atol=1e-3)
    assert repr(one).startswith(f"Bounds(measured={float(one.measured):.6f}")
    assert "low_factors=(f32[24], f32[24])" in repr(one)
    many = jax.tree.map(lambda leaf: jnp.tile(leaf, (9, *[1] * (leaf.ndim - 1))), found)
    values = f"from {np.asarray(many.measured).min():.4g} to {np.asarray(many.measured).max():.4g}"
    assert repr(many).startswith(f"Bounds(measured=f32[18] {values}")


@pytest.mark.parametrize(
    ("options", "error", "wanted"),
    [
        ({"measure": "cka"}, ValueError, "`measure` must be one of"),
        ({"measure": "hard_matching"}, TypeError, "a step of which the host does"),
        ({"measure": "disagreement"}, ValueError, "which compares outputs"),
        ({"free": "y"}, ValueError, "`free` must be one of 'x', 'both'"),
        ({"largest_factor": 1.0}, ValueError, "`largest_factor` must be more than 1 and finite"),
        ({"num_starts": 3}, ValueError, "`num_starts`"),
    ],
)
def test_wrong_use(options, error, wanted):
    x = np.random.default_rng(0).standard_normal((20, 3))
    with pytest.raises(error, match=wanted):
        similarity_bounds(x, x, key=KEY, **options)


def test_bounds_of_other_neurons_are_refused():
    x = np.random.default_rng(0).standard_normal((20, 3))
    found = similarity_bounds(x, x, linear_cka, key=KEY, num_steps=0)
    group = neuron_groups(eqx.nn.MLP(3, 2, 3, 1, activation=jnp.tanh, key=KEY), x[0])["layers[0]"]
    with pytest.raises(ValueError, match="homogeneous of a positive degree"):
        found.rewrite(group, end="low")
    with pytest.raises(ValueError, match="`side` must be one of 'x', 'y'"):
        found.rewrite(group, end="low", side="z")
