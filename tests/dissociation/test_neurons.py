"""The four rewrites of a pair of matrices, as the paper's notebook imports them."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.fig4.expand import (
    add_phantom_zero_neurons,
    add_random_zero_neurons,
    duplicate_neurons,
    scale_neurons,
)

HIDDEN, INPUTS, OUTPUTS = 12, 7, 5


def normal(rng, *shape):
    return jnp.asarray(rng.normal(size=shape), jnp.float32)


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    return normal(rng, HIDDEN, INPUTS), normal(rng, OUTPUTS, HIDDEN)


@pytest.fixture
def x():
    return normal(np.random.default_rng(1), INPUTS, 40)


def change(new, old, x, activation=jax.nn.relu):
    outputs = [w_out @ activation(w_in @ x) for w_in, w_out in (new, old)]
    return float(jnp.max(jnp.abs(outputs[0] - outputs[1])))


def test_scale_is_what_the_equation_says(layer, x):
    for factor in (0.1, jnp.asarray(20)):
        w_in, w_out = scale_neurons(w_in=layer[0], w_out=layer[1], scale_factor=factor)
        np.testing.assert_allclose(w_in, float(factor) * np.asarray(layer[0]), rtol=1e-6)
        np.testing.assert_allclose(w_out, np.asarray(layer[1]) / float(factor), rtol=1e-6)
        assert w_in.dtype == w_out.dtype == jnp.float32
        assert change((w_in, w_out), layer, x, jnp.tanh) > 0.1  # negative control
        each = scale_neurons(*layer, factor * jnp.logspace(-1, 1, HIDDEN))
        assert change(each, layer, x) < 1e-4


@pytest.mark.parametrize("factor", [0.0, -1.0, np.nan, np.inf])
def test_a_traced_factor_that_changes_the_function_gives_nan(layer, factor):
    for factors, undefined in (
        (jnp.asarray(factor), slice(None)),
        (jnp.ones(HIDDEN).at[2].set(factor), np.array([2])),
    ):
        w_in, w_out = jax.jit(scale_neurons)(*layer, factors)
        assert np.isnan(w_in[undefined]).all()
        assert np.isnan(w_out[:, undefined]).all()
    assert np.isfinite(np.delete(w_in, 2, 0)).all()


def test_copies_come_in_the_order_and_number_documented(layer):
    w_in, w_out = duplicate_neurons(layer[0][:3], layer[1][:, :3], 2.6)
    order = np.array([0, 1, 2, 0, 1, 2, 0, 1])
    np.testing.assert_array_equal(w_in, layer[0][order])
    np.testing.assert_allclose(
        w_out, layer[1][:, order] / np.array([[3, 3, 2, 3, 3, 2, 3, 3]]), rtol=1e-6
    )
    # The fractional part of a float such as 1.2 is a little under 0.2, and truncating would lose
    # neurons.
    for hidden in (7, 1024):
        w_in, w_out = np.ones((hidden, 1), np.float32), np.ones((1, hidden), np.float32)
        for tenths in range(10, 41):
            exact = tenths // 10 * hidden + round(Fraction(tenths % 10, 10) * hidden)
            shapes = jax.eval_shape(
                lambda w_in, w_out, m=tenths / 10: duplicate_neurons(w_in, w_out, m), w_in, w_out
            )
            assert [leaf.shape for leaf in shapes] == [(exact, 1), (1, exact)]


@pytest.mark.parametrize(("groups", "size"), [(3, 4), (64, 1), (0, 3)])
def test_zero_neurons_keep_the_function(layer, x, key, groups, size):
    """Groups share incoming weights, and their outgoing weights cancel or are zero."""
    new = add_random_zero_neurons(*layer, groups, size, key=key)
    assert new[0].shape == (HIDDEN + groups * size, INPUTS)
    assert max(change(new, layer, x, activation) for activation in (jax.nn.relu, jnp.tanh)) < 1e-4
    np.testing.assert_array_equal(new[0][:HIDDEN], layer[0])
    np.testing.assert_array_equal(new[1][:, :HIDDEN], layer[1])
    assert np.linalg.matrix_rank(new[0][HIDDEN:]) == min(groups, INPUTS)
    new_in, new_out = (
        new[0][HIDDEN:].reshape(groups, size, INPUTS),
        new[1][:, HIDDEN:].reshape(OUTPUTS, groups, size),
    )
    np.testing.assert_array_equal(new_in, jnp.broadcast_to(new_in[:, :1], new_in.shape))
    np.testing.assert_allclose(jnp.sum(new_out, axis=-1), 0, atol=1e-6 if size > 1 else 0)
    assert (new_out != 0).all() == (size > 1)
    if size == 4:  # without options
        named = add_random_zero_neurons(w_in=layer[0], w_out=layer[1], key=key)
        np.testing.assert_array_equal(named[0], new[0])


@pytest.mark.parametrize("std", [0.02, jnp.asarray(3.0)])
def test_size_of_zero_neurons(key, std):
    w_in, w_out = (
        np.ones((2, 50), np.float32),
        np.asarray([[0.3, -0.4]], np.float32).repeat(20, axis=0),
    )
    new_in, new_out = add_random_zero_neurons(w_in, w_out, 200, 3, key=key, incoming_std=std)
    draws = new_in[2::3]
    # Of n normal draws, the mean has the standard error std / sqrt(n) and the variance std^2 sqrt(2
    # / n).
    assert abs(float(jnp.mean(draws))) < 4 * float(std) / np.sqrt(draws.size)
    assert abs(float(jnp.var(draws)) / float(std) ** 2 - 1) < 4 * np.sqrt(2 / draws.size)
    spread = float(jnp.mean(new_out[:, 2:] ** 2)) / np.mean(w_out**2)
    assert abs(spread - 1) < 4 * np.sqrt(2 / (20 * 200 * 2))
    given = add_random_zero_neurons(w_in, w_out, 200, 3, key=key, outgoing_std=5)[1][:, 2:]
    np.testing.assert_allclose(given, new_out[:, 2:] * 5 / np.sqrt(np.mean(w_out**2)), rtol=1e-4)


@pytest.mark.parametrize(("batch", "rank"), [(40, 7), (5, 3), (40, 0)])
def test_phantoms_are_the_least_squares_solution_of_numpy(layer, batch, rank):
    rng = np.random.default_rng(0)
    inputs = rng.integers(-4, 5, (batch, rank)) @ rng.integers(
        -4, 5, (rank, INPUTS)
    )  # exact in float32, and deficient
    pattern = rng.normal(size=(batch, 3)).astype(np.float32)
    wanted = np.linalg.lstsq(inputs.astype(float), pattern.astype(float), rcond=1e-10)[0].T
    found = add_phantom_zero_neurons(*layer, inputs.astype(np.float32), pattern)[0][HIDDEN:]
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_phantoms_of_ill_conditioned_inputs(layer):
    rng = np.random.default_rng(1)
    u, v = (np.linalg.qr(rng.normal(size=(n, INPUTS)))[0] for n in (30, INPUTS))
    inputs = ((u * np.logspace(0, -4, INPUTS)) @ v.T).astype(np.float32)
    pattern = (u @ rng.normal(size=(INPUTS, 2))).astype(np.float32)
    exact = np.linalg.lstsq(inputs.astype(float), pattern.astype(float))[0]
    new = np.asarray(add_phantom_zero_neurons(*layer, inputs, pattern)[0][HIDDEN:], float)
    np.testing.assert_allclose(inputs.astype(float) @ (new.T - exact), 0, atol=1e-3)
    # A coarse cut-off gives small weights and misses the pattern.
    coarse = np.asarray(
        add_phantom_zero_neurons(*layer, inputs, pattern, rtol=1e-2)[0][HIDDEN:], float
    )
    assert np.abs(coarse).max() < 0.1 * np.abs(new).max()
    assert np.abs(inputs @ (coarse.T - exact)).max() > 0.1


@pytest.mark.usefixtures("unchecked")
def test_wrong_calls_are_refused_with_a_reason(layer, key):
    for factor in (0, -1.0, np.inf, np.nan, np.ones(HIDDEN + 1), -np.ones(HIDDEN)):
        with pytest.raises(ValueError, match="`scale_factor` must be"):
            scale_neurons(*layer, factor)
    for multiplier in (0.9, np.nan, np.inf):
        with pytest.raises(
            ValueError, match="`duplicate_multiplier` must be finite and at least 1"
        ):
            duplicate_neurons(*layer, multiplier)
    with pytest.raises(TypeError, match="`duplicate_multiplier` must be a number that is known"):
        jax.jit(lambda m: duplicate_neurons(*layer, m))(2.0)
    for name, value, words in (
        ("num_zero_groups", -1, "at least 0, got -1"),
        ("neurons_per_group", 0, "at least 1, got 0"),
        ("incoming_std", -1.0, "non-negative"),
        ("outgoing_std", -1.0, "non-negative"),
    ):
        with pytest.raises(ValueError, match=f"`{name}` must be {words}"):
            add_random_zero_neurons(*layer, key=key, **{name: value})
