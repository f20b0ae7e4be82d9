from fractions import Fraction

import equinox as eqx
import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from dissociation import take
from dissociation.fig4 import expand
from dissociation.rewrites import add_nuisance, certify, duplicate, neuron_groups, scale
from dissociation.rewrites._neurons import (
    add_phantom_zero_neurons,
    add_random_zero_neurons,
    duplicate_neurons,
    scale_neurons,
)

HIDDEN, INPUTS, OUTPUTS = 12, 7, 5


@pytest.fixture
def unchecked():
    """As users run it: our own errors, not the type checker's."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    return normal(rng, HIDDEN, INPUTS), normal(rng, OUTPUTS, HIDDEN)


@pytest.fixture
def x():
    return normal(np.random.default_rng(1), INPUTS, 40)


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


def perceptron(in_size=6, out_size=3, width=10, depth=2, members=(), **kwargs):
    """A perceptron of random weights and biases, without compiling its initialisation."""
    model = eqx.filter_eval_shape(lambda: eqx.nn.MLP(in_size, out_size, width, depth, key=jax.random.key(0), **kwargs))
    rng = np.random.default_rng(depth)

    def fill(leaf):
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        return (0.4 * rng.normal(size=(*members, *leaf.shape))).astype(np.float32)

    return jax.tree.map(fill, model)


EXAMPLES = np.random.default_rng(4).normal(size=(30, 6)).astype(np.float32)


def outputs(pair, x, activation=jax.nn.relu):
    w_in, w_out = pair
    return w_out @ activation(w_in @ x)


def change(new, old, x, activation=jax.nn.relu):
    return float(jnp.max(jnp.abs(outputs(new, x, activation) - outputs(old, x, activation))))


# scale


@pytest.mark.parametrize("factor", [0.1, 20, jnp.asarray(7)])
def test_scale_is_what_the_equation_says(layer, x, factor):
    w_in, w_out = scale_neurons(w_in=layer[0], w_out=layer[1], scale_factor=factor)
    np.testing.assert_allclose(w_in, float(factor) * np.asarray(layer[0]), rtol=1e-6)
    np.testing.assert_allclose(w_out, np.asarray(layer[1]) / float(factor), rtol=1e-6)
    assert w_in.dtype == w_out.dtype == jnp.float32
    each = scale_neurons(*layer, factor * jnp.logspace(-1, 1, HIDDEN))
    assert change(each, layer, x) < 1e-4
    assert change((w_in, w_out), layer, x, jnp.tanh) > 0.1  # negative control


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("factor", [0, -1.0, np.inf, np.nan, np.ones(HIDDEN + 1), -np.ones(HIDDEN)])
def test_scale_refuses(layer, factor):
    with pytest.raises(ValueError, match="`scale_factor` must be"):
        scale_neurons(*layer, factor)


# duplicate


def test_copies_come_in_the_order_documented(layer):
    w_in, w_out = duplicate_neurons(layer[0][:3], layer[1][:, :3], 2.6)
    order = [0, 1, 2, 0, 1, 2, 0, 1]
    np.testing.assert_array_equal(w_in, layer[0][np.asarray(order)])
    np.testing.assert_allclose(
        w_out, layer[1][:, np.asarray(order)] / np.asarray([[3, 3, 2, 3, 3, 2, 3, 3]]), rtol=1e-6
    )


@pytest.mark.parametrize("hidden", [7, 10, 1024])
def test_number_of_copies(hidden):
    # The fractional part of a float such as 1.2 is a little under 0.2, and truncating would lose neurons.
    w_in, w_out = np.ones((hidden, 1), np.float32), np.ones((1, hidden), np.float32)
    for tenths in range(10, 41):
        exact = tenths // 10 * hidden + round(Fraction(tenths % 10, 10) * hidden)
        shapes = jax.eval_shape(lambda: duplicate_neurons(w_in, w_out, tenths / 10))  # noqa: B023
        assert [leaf.shape for leaf in shapes] == [(exact, 1), (1, exact)]


@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh])
def test_duplicates_keep_the_function(layer, x, activation):
    for multiplier in (1, 1.2, np.float64(3.25)):
        new = duplicate_neurons(w_in=layer[0], w_out=layer[1], duplicate_multiplier=multiplier)
        assert change(new, layer, x, activation) < 1e-4
        if multiplier == 1:
            np.testing.assert_array_equal(new[0], layer[0])


@pytest.mark.usefixtures("unchecked")
def test_duplicate_refuses(layer):
    for multiplier in (0.9, np.nan, np.inf):
        with pytest.raises(ValueError, match="`duplicate_multiplier` must be finite and at least 1"):
            duplicate_neurons(*layer, multiplier)
    with pytest.raises(TypeError, match="`duplicate_multiplier` must be a number that is known"):
        jax.jit(lambda m: duplicate_neurons(*layer, m))(2.0)


# random zero neurons


@pytest.mark.parametrize("activation", [jax.nn.relu, jnp.tanh])
@pytest.mark.parametrize(("groups", "size"), [(3, 4), (64, 1), (0, 3)])
def test_zero_neurons_keep_the_function(layer, x, key, activation, groups, size):
    new = add_random_zero_neurons(*layer, groups, size, key=key)
    assert new[0].shape == (HIDDEN + groups * size, INPUTS)
    assert change(new, layer, x, activation) < 1e-4
    np.testing.assert_array_equal(new[0][:HIDDEN], layer[0])
    np.testing.assert_array_equal(new[1][:, :HIDDEN], layer[1])
    assert np.linalg.matrix_rank(new[0][HIDDEN:]) == min(groups, INPUTS)


def test_groups_share_incoming_weights_and_cancel(layer, key):
    w_in, w_out = add_random_zero_neurons(w_in=layer[0], w_out=layer[1], key=key)
    new_in, new_out = w_in[HIDDEN:].reshape(3, 4, INPUTS), w_out[:, HIDDEN:].reshape(OUTPUTS, 3, 4)
    np.testing.assert_array_equal(new_in, jnp.broadcast_to(new_in[:, :1], new_in.shape))
    np.testing.assert_allclose(jnp.sum(new_out, axis=-1), 0, atol=1e-6)
    assert float(jnp.min(jnp.abs(new_out))) > 0
    single = add_random_zero_neurons(*layer, 4, 1, key=key)[1][:, HIDDEN:]
    np.testing.assert_array_equal(single, np.zeros((OUTPUTS, 4)))


@pytest.mark.parametrize("std", [1.0, 0.02, jnp.asarray(3.0)])
def test_size_of_zero_neurons(key, std):
    w_in, w_out = np.ones((2, 50), np.float32), np.asarray([[0.3, -0.4]], np.float32).repeat(20, axis=0)
    new_in, new_out = add_random_zero_neurons(w_in, w_out, 200, 3, key=key, incoming_std=std)
    draws = new_in[2::3]
    # Of n normal draws, the mean has the standard error std / sqrt(n) and the variance std^2 sqrt(2 / n).
    assert abs(float(jnp.mean(draws))) < 4 * float(std) / np.sqrt(draws.size)
    assert abs(float(jnp.var(draws)) / float(std) ** 2 - 1) < 4 * np.sqrt(2 / draws.size)
    degrees = 20 * 200 * 2
    spread = float(jnp.mean(new_out[:, 2:] ** 2)) / np.mean(w_out**2)
    assert abs(spread - 1) < 4 * np.sqrt(2 / degrees)
    given = add_random_zero_neurons(w_in, w_out, 200, 3, key=key, outgoing_std=5)[1][:, 2:]
    np.testing.assert_allclose(given, new_out[:, 2:] * 5 / np.sqrt(np.mean(w_out**2)), rtol=1e-4)


@pytest.mark.usefixtures("unchecked")
def test_impossible_zero_neurons_are_refused_with_a_reason(layer, key):
    for wrong, words in (
        ({"num_zero_groups": -1}, "at least 0, got -1"),
        ({"neurons_per_group": 0}, "at least 1, got 0"),
        ({"incoming_std": -1.0}, "non-negative"),
        ({"outgoing_std": -1.0}, "non-negative"),
    ):
        with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be {words}"):
            add_random_zero_neurons(*layer, key=key, **wrong)


# phantom neurons


def test_phantoms_show_any_pattern_on_few_inputs(layer, x):
    inputs, pattern = np.asarray(x.T[:6]), normal(np.random.default_rng(2), 6, 9)
    w_in, w_out = add_phantom_zero_neurons(w_in=layer[0], w_out=layer[1], inputs=inputs, pattern=pattern)
    np.testing.assert_allclose(inputs @ w_in[HIDDEN:].T, pattern, atol=1e-4)
    np.testing.assert_array_equal(w_out[:, HIDDEN:], np.zeros((OUTPUTS, 9)))
    np.testing.assert_array_equal(w_in[:HIDDEN], layer[0])
    assert change((w_in, w_out), layer, x) < 1e-6
    # Controls: with outgoing weights they would be seen, and on other inputs they show something else.
    assert change((w_in, w_out.at[:, HIDDEN:].set(1.0)), layer, x) > 0.1
    assert float(jnp.max(jnp.abs(x.T[6:12] @ w_in[HIDDEN:].T - pattern))) > 0.1


@pytest.mark.parametrize(("batch", "rank"), [(40, 7), (5, 3), (40, 0)])
def test_phantoms_are_the_least_squares_solution_of_numpy(layer, batch, rank):
    rng = np.random.default_rng(0)
    inputs = rng.integers(-4, 5, (batch, rank)) @ rng.integers(-4, 5, (rank, INPUTS))  # exact in float32, and deficient
    pattern = rng.normal(size=(batch, 3))
    wanted = np.linalg.lstsq(inputs.astype(float), pattern.astype(np.float32).astype(float), rcond=1e-10)[0].T
    got = add_phantom_zero_neurons(*layer, inputs.astype(np.float32), pattern.astype(np.float32))[0][HIDDEN:]
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_phantoms_of_ill_conditioned_inputs(layer):
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(n, INPUTS)))[0] for n in (30, INPUTS))
    inputs = ((u * np.logspace(0, -4, INPUTS)) @ v.T).astype(np.float32)
    pattern = (u @ rng.normal(size=(INPUTS, 2))).astype(np.float32)
    exact = np.linalg.lstsq(inputs.astype(float), pattern.astype(float))[0]
    new = np.asarray(add_phantom_zero_neurons(*layer, inputs, pattern)[0][HIDDEN:], float)
    np.testing.assert_allclose(inputs.astype(float) @ (new.T - exact), 0, atol=1e-3)
    # A coarse cut-off gives small weights and misses the pattern.
    coarse = np.asarray(add_phantom_zero_neurons(*layer, inputs, pattern, rtol=1e-2)[0][HIDDEN:], float)
    assert np.abs(coarse).max() < 0.1 * np.abs(new).max()
    assert np.abs(inputs @ (coarse.T - exact)).max() > 0.1


# all four

REWRITES = {
    "scale": lambda w_in, w_out, key: scale_neurons(w_in, w_out, 20),
    "duplicate": lambda w_in, w_out, key: duplicate_neurons(w_in, w_out, 1.5),
    "zero": lambda w_in, w_out, key: add_random_zero_neurons(w_in, w_out, key=key),
    "phantom": lambda w_in, w_out, key: add_phantom_zero_neurons(
        w_in, w_out, w_in[:6] + 1, jnp.eye(6, dtype=w_in.dtype)
    ),
}


@pytest.mark.parametrize("name", REWRITES)
def test_double_precision(name, key):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        layer, x = (rng.normal(size=(HIDDEN, INPUTS)), rng.normal(size=(OUTPUTS, HIDDEN))), rng.normal(size=(INPUTS, 9))
        new = REWRITES[name](jnp.asarray(layer[0]), jnp.asarray(layer[1]), key)
        assert {w.dtype for w in new} == {jnp.dtype("float64")}
        assert change(new, layer, x) < 1e-12


def test_fixed_import_path():
    wanted = (scale_neurons, duplicate_neurons, add_random_zero_neurons, add_phantom_zero_neurons)
    found = (expand.scale_neurons, expand.duplicate_neurons, expand.add_random_zero_neurons)
    assert (*found, expand.add_phantom_zero_neurons) == wanted


def test_rewrites_by_hand_inside_a_model(key):
    # The way the paper's notebook does it: matrices of a model without biases, replaced in place, over stacked members.
    models = perceptron(members=(2,), use_bias=False, use_final_bias=False)

    def wider(model, number, k):
        w_in, w_out = expand.add_random_zero_neurons(
            w_in=model.layers[1].weight,
            w_out=model.layers[2].weight,
            num_zero_groups=number,
            neurons_per_group=1,
            key=k,
        )
        return eqx.tree_at(lambda m: (m.layers[1].weight, m.layers[2].weight), model, (w_in, w_out))

    keys = jax.random.split(key, 2)
    group = neuron_groups(take(models, 0), EXAMPLES[0])["layers[1]"]
    by_hand = eqx.filter_vmap(wider, in_axes=(eqx.if_array(0), None, 0))(models, 16, keys)
    whole = eqx.filter_vmap(lambda m, k: add_nuisance(group, 16, key=k)(m))(models, keys)
    assert eqx.tree_equal(eqx.filter(by_hand, eqx.is_array).layers[1].weight, whole.layers[1].weight)
    run = eqx.filter_jit(eqx.filter_vmap(lambda m: jax.vmap(m)(EXAMPLES)))
    np.testing.assert_allclose(run(by_hand), run(models), atol=1e-6)
    np.testing.assert_allclose(run(whole), run(models), atol=1e-6)


# whole models


def hidden(model, layer=1):
    example = jnp.ones(()) if model.in_size == "scalar" else EXAMPLES[0]
    return neuron_groups(model, example)[f"layers[{layer}]"]


def test_a_rewritten_model_is_one_of_the_new_width():
    model, wide = (perceptron(6, "scalar", width, 1) for width in (10, 20))
    assert jax.tree.structure(duplicate(hidden(model, 0), 2)(model)) == jax.tree.structure(wide)
    one = perceptron()
    deep = duplicate(hidden(one), 2)(one)
    assert (deep.layers[0].out_features, deep.layers[1].out_features, deep.layers[2].in_features) == (10, 20, 20)
    assert deep.width_size == 10
    assert duplicate(hidden(deep, 0), 2)(deep).width_size == 20


def test_scalar_inputs(key):
    model, x = perceptron("scalar", "scalar"), EXAMPLES[:, 0]
    rewrite = scale(hidden(model), 20.0) | add_nuisance(hidden(model, 0), 3, 2, key=key)
    assert bool(certify(model, rewrite(model), x).kept(1e-5))


OTHERS = [
    jnp.tanh,
    jax.nn.relu6,
    lambda z: z + 1,
    lambda z: jnp.clip(z, -1e9, None),
    lambda z: jnp.where(jnp.abs(z) < 1e-6, 0.0, z),
    lambda z: jnp.maximum(z, 0) + 1e-9,
    lambda z: jnp.where(z > 1e4, 2 * z, z),
]


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.leaky_relu, jnp.abs, lambda z: 2 * z])
def test_scale_takes_any_homogeneous_activation(activation):
    model = perceptron(activation=activation)
    assert bool(certify(model, scale(hidden(model), 20.0)(model), EXAMPLES).kept(1e-4))


@pytest.mark.parametrize("activation", OTHERS)
def test_scale_refuses_other_activations(activation):
    group = hidden(perceptron(activation=activation))
    assert group.scaling is None
    with pytest.raises(ValueError, match=r"`group` must be one that can be scaled, .* activation is not homogeneous"):
        scale(group, 20.0)


def test_a_sweep_of_factors_on_a_model_is_traced_once():
    model, traces = perceptron(), []
    group = hidden(model)

    @eqx.filter_jit
    def run(model, factor, x):
        traces.append(factor)
        return certify(model, scale(group, factor)(model), x)

    for factor in np.logspace(-1, 1, 7):
        assert bool(run(model, jnp.asarray(factor), jnp.ones((4, 6))).kept())
    assert len(traces) == 1


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_a_traced_factor_that_changes_the_function_gives_nan(layer, factor):
    hidden = layer[0].shape[0]
    one, vector = jnp.asarray(factor), jnp.ones(hidden).at[2].set(factor)
    for w_in, w_out in (jax.jit(scale_neurons)(*layer, one), jax.jit(scale_neurons)(*layer, vector)):
        undefined = slice(None) if w_in.shape[0] and np.isnan(w_in).all() else slice(2, 3)
        assert np.isnan(w_in[undefined]).all()
        assert np.isnan(w_out[:, undefined]).all()
    assert np.isfinite(np.delete(w_in, 2, 0)).all()
