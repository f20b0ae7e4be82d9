"""Activities that move towards a pattern while predictions stay."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize
from words import refused

from dissociation.rewrites import neuron_groups, plant_activity


def classifier(activation=jax.nn.relu, *, inputs=12, dtype=None, rank=None):
    """Return a network, 200 inputs, and the group of its first layer, of 20 neurons."""
    keys = jax.random.split(jax.random.key(0), 3)
    model = eqx.nn.MLP(inputs, 4, 20, 2, activation, key=keys[0], dtype=dtype)
    x = jax.random.normal(keys[1], (200, rank or inputs), dtype)
    x = x if rank is None else x @ jax.random.normal(keys[2], (rank, inputs), dtype)
    return model, x, neuron_groups(model, x[0])["layers[0]"]


PATTERN = (np.add.outer(np.arange(8), np.arange(20)) % 5 < 2).astype(np.float32)
KEY = jax.random.key(5)


def predictions(model, x):
    return np.argmax(jax.vmap(model)(x), 1)


def hidden(model, x):
    return np.maximum(
        np.asarray(x) @ np.asarray(model.layers[0].weight).T + np.asarray(model.layers[0].bias), 0
    )


def planted_in(dtype):
    """Return a network, its inputs, and the planting of a pattern."""
    model, x, group = classifier(dtype=dtype)
    pattern = PATTERN.astype(dtype)
    return (
        model,
        x,
        plant_activity(
            group, model, x, pattern, num_passes=60, batch_size=40, learning_rate=1e-2, key=KEY
        ),
    )


@pytest.fixture(scope="module")
def planted():
    return planted_in("float32")


def check_planted(model, x, found):
    np.testing.assert_array_equal(predictions(found.model, x), predictions(model, x))
    for place in (1, 2):
        np.testing.assert_array_equal(found.model.layers[place].weight, model.layers[place].weight)
    for network, activity, value in zip(
        (model, found.model), found.activity, found.correlation, strict=False
    ):
        np.testing.assert_allclose(activity, hidden(network, x[:8]), atol=1e-4)
        np.testing.assert_allclose(
            value, np.corrcoef(hidden(network, x[:8]).ravel(), PATTERN.ravel())[0, 1], atol=1e-4
        )
    trained, planted, best = found.correlation
    assert trained < 0.2
    assert planted > 0.5
    assert best > 0.9999  # 8 inputs of 12 numbers are independent
    assert found.kept == 1
    assert found.changed[0] == found.changed[-1] == 0
    assert found.changed.max() > 0  # without the constraint predictions would change
    assert found.along.shape == found.changed.shape
    np.testing.assert_allclose(found.along[[0, -1]], [trained, planted], atol=1e-5)


def test_the_activity_moves_and_no_prediction_changes(planted):
    check_planted(*planted)


@pytest.mark.full
@pytest.mark.usefixtures("x64")
def test_the_activity_moves_in_float64():
    check_planted(*planted_in("float64"))


def test_the_change_is_reduced_until_no_prediction_changes():
    model, x, group = classifier()
    with pytest.warns(UserWarning, match="of the change is kept"):
        found = plant_activity(
            group, model, x, PATTERN, num_passes=1, batch_size=200, learning_rate=1.0, key=KEY
        )
    assert found.changed[-1] > 0
    assert 0 <= found.kept < 1
    np.testing.assert_array_equal(predictions(found.model, x), predictions(model, x))


@pytest.mark.slow
@pytest.mark.parametrize("bias", [True, False])
def test_the_best_activity_is_that_of_a_convex_problem(bias):
    """No run of L-BFGS over incoming weights finds a larger correlation."""
    model, x, _ = classifier(rank=5)
    if not bias:
        layers = [eqx.tree_at(lambda layer: layer.bias, model.layers[0], None), *model.layers[1:]]
        model = eqx.tree_at(lambda network: network.layers, model, layers)
    pattern = (np.add.outer(np.arange(60), 3 * np.arange(20)) % 11 < 4).astype(np.float32)
    group = neuron_groups(model, x[0])["layers[0]"]
    found = plant_activity(group, model, x, pattern, num_passes=1, batch_size=100, key=KEY)
    rows = np.asarray(x[:60], float)
    rows = np.concatenate([rows, np.ones((60, 1))], 1) if bias else rows

    def excess(weights, column):
        seen = rows @ weights
        wrong = np.where(pattern[:, column] > 0, seen - pattern[:, column], np.maximum(seen, 0))
        return wrong @ wrong, 2 * rows.T @ wrong

    start = np.zeros(rows.shape[1])
    weights = [
        minimize(excess, start, column, jac=True, method="L-BFGS-B").x for column in range(20)
    ]
    known = np.maximum(rows @ np.stack(weights, 1), 0)
    value = np.corrcoef(known.ravel(), pattern.ravel())[0, 1]
    assert 0.15 < value < 0.9
    assert float(found.correlation[2]) >= value - 1e-3


class Stopped(Exception):
    """An interrupt at a chosen time."""


class StopsAt:
    """Meter that fails at a step."""

    def __init__(self, last):
        self.last = last

    def advance(self, step, text):
        if step >= self.last:
            raise Stopped

    def close(self):
        pass


@pytest.mark.slow
def test_it_resumes_to_the_same_bits(tmp_path):
    model, x, group = classifier()
    options = {"num_passes": 6, "batch_size": 40, "key": KEY}
    whole = plant_activity(group, model, x, PATTERN, **options)
    file = tmp_path / "planting.ckpt"
    with pytest.raises(Stopped):
        plant_activity(
            group, model, x, PATTERN, **options, checkpoint=file, progress=lambda *_: StopsAt(10)
        )
    assert file.exists()
    resumed = plant_activity(group, model, x, PATTERN, **options, checkpoint=file)
    for one, other in zip(jax.tree.leaves(whole), jax.tree.leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match="a file of the same run"):
        plant_activity(group, model, x, 1 - PATTERN, **options, checkpoint=file)


@pytest.mark.slow
def test_units_and_constants_of_the_pattern_do_not_matter():
    model, x, group = classifier()
    pattern = np.random.default_rng(0).random((8, 20))
    options = {"num_passes": 2, "batch_size": 40, "key": KEY}
    known = plant_activity(group, model, x, pattern, **options)
    assert known.correlation[2] >= known.correlation[1]
    for other in (1e-30 * pattern, 1e30 * pattern, pattern + 1e6):
        found = plant_activity(group, model, x, other, **options)
        np.testing.assert_allclose(found.correlation, known.correlation, atol=1e-3)


@pytest.mark.slow
def test_the_best_is_near_that_of_a_direct_search():
    """Patterns between zero and one, without biases: the convex problem alone would reach .28 of .62."""
    keys = jax.random.split(jax.random.key(7), 3)
    model = eqx.nn.MLP(6, 3, 8, 2, use_bias=False, use_final_bias=False, key=keys[0])
    x, pattern = jax.random.normal(keys[1], (60, 6)), jax.random.uniform(keys[2], (20, 8))
    group = neuron_groups(model, x[0])["layers[0]"]
    found = plant_activity(group, model, x, pattern, num_passes=2, batch_size=32, key=KEY)
    rows, wanted = np.asarray(x[:20], float), np.asarray(pattern, float) - np.mean(pattern)

    def negative(flat):
        seen = np.maximum(rows @ flat.reshape(6, 8), 0)
        spread = seen - seen.mean()
        value = (spread * wanted).sum() / np.linalg.norm(spread) / np.linalg.norm(wanted)
        slope = wanted / np.linalg.norm(spread) / np.linalg.norm(wanted) - value * spread / np.sum(
            spread**2
        )
        return -value, -(rows.T @ ((slope - slope.mean()) * (seen > 0))).ravel()

    draws = np.random.default_rng(1).normal(size=(6, 48))
    best = -min(minimize(negative, draw, jac=True, method="L-BFGS-B").fun for draw in draws)
    assert found.correlation[2] > 0.9 * best


@pytest.mark.slow
def test_what_cannot_be_planted_is_refused():
    model, x, group = classifier()
    plant = partial(plant_activity, num_passes=1, batch_size=40, key=KEY)
    smooth, _, curved = classifier(jax.nn.gelu)
    capped, _, flat = classifier(lambda z: jnp.clip(z, 0, 2.45))
    single = eqx.nn.MLP(12, "scalar", 20, 1, key=jax.random.key(0))
    alone = neuron_groups(single, x[0])["layers[0]"]
    layers = [
        eqx.nn.Conv2d(1, 20, 3, key=KEY),
        eqx.nn.Lambda(jax.nn.relu),
        eqx.nn.Lambda(jnp.ravel),
    ]
    convolution = eqx.nn.Sequential([*layers, eqx.nn.Linear(20 * 36, 4, key=KEY)])
    images = jax.random.normal(KEY, (50, 1, 8, 8))
    channels = next(iter(neuron_groups(convolution, images[0]).values()))
    called = neuron_groups(model, x[0], call=lambda network, each: -network(each))["layers[0]"]
    broken = jax.tree.map(lambda leaf: leaf * np.nan if eqx.is_inexact_array(leaf) else leaf, model)
    dead = eqx.tree_at(lambda network: network.layers[0].bias, model, model.layers[0].bias - 100)
    refused(
        (lambda: plant(group, model, x, PATTERN[:, :3]), "`pattern` must .*and 20 columns"),
        (
            lambda: plant(group, model, x, np.zeros((300, 20), np.float32)),
            "`pattern` must .*at most 200 rows",
        ),
        (
            lambda: plant(group, model, x, np.ones((8, 20), np.float32)),
            "`pattern` must .*not be constant",
        ),
        (lambda: plant(curved, smooth, x, PATTERN), "`group` must be of ReLU neurons"),
        (
            lambda: plant(flat, capped, x, PATTERN, num_passes=40, learning_rate=3e-2),
            "`group` must be of ReLU neurons",
        ),
        (
            lambda: plant(alone, single, x, PATTERN),
            "`model` must return one vector of at least two logits",
        ),
        (lambda: plant(channels, convolution, images, PATTERN), "`group` must be made"),
        (lambda: plant(called, model, x, PATTERN), "`group` must be found without `call`"),
        (lambda: plant(group, model, x * np.nan, PATTERN), "`(inputs|model|group)` must"),
        (lambda: plant(group, broken, x, PATTERN), "`(inputs|model|group)` must"),
        (
            lambda: plant(group, dead, x, PATTERN),
            "`group` must have an active neuron on the shown inputs",
        ),
    )
    with pytest.raises(TypeError, match="`pattern` must be known"):
        jax.jit(lambda pattern: plant(group, model, x, pattern).correlation)(PATTERN)
