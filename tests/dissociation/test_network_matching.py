"""Planted permutations are found; barriers fall; statistics are taken anew."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import RUN, Normalised, ResidualMLP, Transformer, made, one, residual_cnn

from dissociation import rewrites, take
from dissociation.data import load
from dissociation.rewrites import _barriers, neuron_groups, permute
from dissociation.rewrites._groups import parameters_of
from dissociation.similarity import member_interval

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")


def planted(model, groups, seed):
    """A copy in another order, every copy of a group in its own, and the orders."""
    rng = np.random.default_rng(seed)
    still = {
        name: np.tile(np.arange(group.size), (group.copies, 1)) for name, group in groups.items()
    }
    orders = {name: np.squeeze(rng.permuted(each, axis=1)) for name, each in still.items()}
    for name, order in orders.items():
        model = permute(groups[name], order)(model)
    return model, orders


def is_found(found, orders):
    return all(
        (orders[name][found.permutations[name]] == np.arange(len(order))).all()
        for name, order in orders.items()
    )


@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)])
@pytest.mark.parametrize("normalise", [False, True])
def test_planted_permutations_of_residual_networks_are_found(normalise, seeds):
    for seed in seeds:
        model = ResidualMLP(64, 64, normalise=normalise, key=jax.random.key(seed))
        groups = neuron_groups(model, jnp.ones(5))
        other, orders = planted(model, groups, seed)
        found = rewrites.match_weights(model, other, groups)
        assert found.converged
        assert is_found(found, orders)
    assert "i64[64](numpy)" in repr(found)
    assert repr(found).endswith(f"value={found.value:.6f}, converged=True)")
    back = found.apply(other, groups)
    np.testing.assert_array_equal(back.first[1].weight, model.first[1].weight)
    single = rewrites.match_weights(model, other, groups, num_starts=1)
    assert found.value >= single.value - 1e-9


def test_running_statistics_are_not_matched():
    """Large ones would decide over weights; they move with the neurons nevertheless."""
    model, state = eqx.nn.make_with_state(Normalised)(key=jax.random.key(0))
    state = state.set(model.norm.batch_state_index, (1e4 * jnp.arange(6.0), jnp.ones(6)))
    groups = neuron_groups((model, state), jnp.ones(5))
    (name,) = groups
    order = np.asarray([3, 1, 0, 5, 4, 2])
    other, _ = permute(groups[name], order)((model, state))
    given = other, jax.tree.map(lambda leaf: leaf, state)  # statistics in the old order
    found = rewrites.match_weights((model, state), given, groups)
    np.testing.assert_array_equal(order[found.permutations[name]], np.arange(6))
    moved = [
        model.first.weight,
        model.first.bias,
        model.norm.weight,
        model.norm.bias,
        model.last.weight,
    ]
    np.testing.assert_allclose(
        found.value, sum(float(jnp.sum(leaf**2)) for leaf in moved), rtol=1e-6
    )
    means = found.apply(given, groups)[1].get(model.norm.batch_state_index)[0]
    np.testing.assert_array_equal(means, 1e4 * np.argsort(order))


@pytest.mark.parametrize(
    "name", ["convolutional", "transformer", "grouped convolutions", "stack in a scan"]
)
def test_models_of_other_kinds_are_matched(name):
    model, inputs, groups = one(name)
    other, _ = planted(model, groups, 3)
    found = rewrites.match_weights(model, other, groups, num_starts=4, key=jax.random.key(0))
    assert found.converged
    shapes = {
        k: (group.copies, group.size) if group.copies > 1 else (group.size,)
        for k, group in groups.items()
    }
    assert {name: each.shape for name, each in found.permutations.items()} == shapes
    back = found.apply(other, groups)
    leaves = [parameters_of(network)[0] for network in (model, back, other)]
    leaves = [[np.asarray(leaf) for leaf in arrays] for arrays in leaves]
    assert all((one == same).all() for one, same in zip(*leaves[:2], strict=True))
    assert any((one != moved).any() for one, moved in zip(*leaves[::2], strict=True))


def test_ties_leave_neurons_where_they_are():
    """All permutations have the sum 0, those of random starts too."""
    model = ResidualMLP(64, 64, normalise=False, key=jax.random.key(0))
    groups = neuron_groups(model, jnp.ones(5))
    zeros = jax.tree.map(lambda leaf: 0 * leaf if eqx.is_array(leaf) else leaf, model)
    matching = rewrites.match_weights(zeros, model, groups, num_starts=4, key=jax.random.key(1))
    for name, permutation in matching.permutations.items():
        np.testing.assert_array_equal(permutation, np.arange(groups[name].size))


def test_the_value_is_that_of_the_permutations():
    """Also where heads change places after what lies in them did."""
    part = {name: group for name, group in one("transformer")[2].items() if "attention" in name}
    touched = {slot.leaf for group in part.values() for slot in group.slots}
    for seed in range(2):
        a, b = (Transformer(jax.random.key(2 * seed + k)) for k in (1, 2))
        found = rewrites.match_weights(a, b, part, num_starts=6, key=jax.random.key(seed))
        pairs = zip(parameters_of(a)[0], parameters_of(found.apply(b, part))[0], strict=True)
        products = [float(np.vdot(np.float64(one), np.float64(other))) for one, other in pairs]
        np.testing.assert_allclose(sum(products[leaf] for leaf in touched), found.value, rtol=1e-10)


def test_activities_of_copies_are_matched_by_themselves():
    model, inputs, every = one("transformer")
    name = "blocks[0].attention.value_proj"
    groups = {name: every[name]}
    other, orders = planted(model, groups, 1)
    assert orders[name].shape == (4, 4)
    found = rewrites.match_activations(model, other, groups, inputs)
    np.testing.assert_array_equal(
        np.take_along_axis(orders[name], found.permutations[name], 1), [np.arange(4)] * 4
    )


def test_activities_that_no_layer_reads_are_not_matched():
    model, inputs, every = one("transformer")
    whole = rewrites.match_activations(model, model, every, inputs)
    assert (
        "blocks[0].attention.query_proj:2" not in whole.permutations
    )  # no layer reads queries and keys
    np.testing.assert_allclose(whole.value, 1, atol=1e-5)


def test_activations_match_what_weights_match():
    model = eqx.nn.MLP(5, 3, 16, 2, key=jax.random.key(0))
    inputs = jax.random.normal(jax.random.key(1), (200, 5))
    groups = neuron_groups(model, inputs[0])
    other, orders = planted(model, groups, 0)
    found = rewrites.match_activations(model, other, groups, inputs)
    assert (
        np.mean([orders[name][found.permutations[name]] == np.arange(16) for name in orders]) > 0.85
    )
    assert found.value > 0.9  # 1 but for neurons that are constant on the data


def test_activations_of_channels_match():
    convolutional, _ = made("convolutional")
    images = jax.random.normal(jax.random.key(1), (40, 784))
    groups = neuron_groups(convolutional, images[0])
    other, orders = planted(convolutional, groups, 0)
    # Channels that are dead on these images have no partner; all others have theirs.
    found = rewrites.match_activations(convolutional, other, groups, images)
    before = rewrites.match_activations(convolutional, convolutional, groups, images)
    np.testing.assert_allclose(found.value, before.value, atol=1e-5)
    assert found.value > 0.8


def test_activations_in_a_loop_match():
    recurrent, inputs, groups = one("long short-term memory")
    other, orders = planted(recurrent, groups, 1)
    assert is_found(rewrites.match_activations(recurrent, other, groups, inputs), orders)


def test_the_line_between_two_networks():
    a, b = (eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(seed)) for seed in (0, 1))
    middle = rewrites.interpolate(a, b, 0.25)
    wanted = 0.75 * a.layers[0].weight + 0.25 * b.layers[0].weight
    np.testing.assert_allclose(middle.layers[0].weight, wanted, rtol=1e-6)
    assert middle.activation is a.activation
    numbers = {"x": jnp.asarray(0.0)}, {"x": jnp.asarray(2.0)}
    hill = rewrites.barrier(lambda m: m["x"] * (4 - m["x"]), *numbers, num_points=5)
    np.testing.assert_allclose(hill.losses, [0, 1.75, 3, 3.75, 4])
    np.testing.assert_allclose(hill.height, 1)  # 3 in the middle, 2 on the line
    assert rewrites.barrier(lambda m: (m["x"] - 1) ** 2, *numbers, num_points=5).height == 0
    with pytest.raises(ValueError, match="`num_points` must be at least 3"):
        rewrites.barrier(lambda m: m["x"], *numbers, num_points=2)


def test_all_pairs():
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(5, 3, 8, 1, key=key))(
        jax.random.split(jax.random.key(0), 3)
    )
    x = jax.random.normal(jax.random.key(1), (50, 5))
    groups = neuron_groups(take(models, 0), x[0])
    loss = lambda m: jnp.mean(jax.vmap(m)(x) ** 2)  # noqa: E731
    found = rewrites.barriers(loss, models, groups, num_points=5)
    assert set(found.matchings) == {(0, 1), (0, 2), (1, 2)}
    for table in (found.before, found.after):
        np.testing.assert_array_equal(table, table.T)
        assert (np.diagonal(table) == 0).all()
    height = rewrites.barrier(loss, take(models, 0), take(models, 2), num_points=5).height
    np.testing.assert_allclose(found.before[0, 2], height, atol=1e-6)
    assert np.isfinite(member_interval(found.after).mean)
    assert repr(found).startswith(
        f"Barriers(3 pairs of 3 members, means before={found.before.sum() / 6:.4g}"
    )


@pytest.mark.slow
def test_the_barrier_between_trained_networks_falls():
    from dissociation.recipes import fit_classifiers

    digits = load("glyphs", num_train=5000, num_test=500)
    trained = fit_classifiers(num_epochs=8, num_seeds=2, width=256, dataset=digits)
    a, b = (take(trained.models, index) for index in (0, 1))
    images, labels = jnp.asarray(digits.test_images), jnp.asarray(digits.test_labels)
    loss = lambda m: -jnp.mean(jnp.sum(labels * jax.nn.log_softmax(jax.vmap(m)(images)), 1))  # noqa: E731
    groups = neuron_groups(a, digits.test_images[0])
    before = rewrites.barrier(loss, a, b).height
    after = rewrites.barrier(loss, a, rewrites.match_weights(a, b, groups).apply(b, groups)).height
    assert before > 0.05
    assert after < 0.3 * before


@pytest.mark.parametrize("mode", ["batch", "ema"])
def test_statistics_are_taken_anew(mode):
    model, state = residual_cnn(jax.random.key(0), mode)
    images = 3 + 2 * jax.random.normal(jax.random.key(1), (64, 1, 8, 8))
    new = rewrites.renormalised(model, state, images)
    norm = eqx.nn.inference_mode(model.norms[0])

    @eqx.filter_jit
    def normalised(state):
        return jax.vmap(lambda x: norm(model.convolutions[0](x), state)[0])(images)

    after = np.asarray(normalised(new))
    np.testing.assert_allclose(after.mean((0, 2, 3)), 0, atol=1e-3)
    np.testing.assert_allclose(after.std((0, 2, 3)), 1, atol=1e-3)
    before = np.asarray(normalised(state))
    assert abs(before.mean((0, 2, 3))).max() > 0.1

    @eqx.filter_jit
    def training(model, state):
        return jax.vmap(lambda x: model(x, state)[0], axis_name="batch")(images)

    np.testing.assert_allclose(RUN((model, new), images), training(model, new), atol=1e-3)


def test_models_without_batch_normalisation_are_refused():
    state = eqx.nn.make_with_state(Normalised)(key=jax.random.key(0))[1]
    with pytest.raises(ValueError, match="`model` must have batch normalisations"):
        rewrites.renormalised(
            eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0)), state, np.ones((4, 5), np.float32)
        )


def test_wrong_calls_are_refused_by_name():
    a, b = (eqx.nn.MLP(5, 3, width, 1, key=jax.random.key(0)) for width in (8, 9))
    groups = neuron_groups(a, jnp.ones(5))
    broken = eqx.tree_at(
        lambda m: m.layers[0].weight, a, replace_fn=lambda w: w.at[0, 0].set(jnp.nan)
    )
    stack, inputs, own = one("stack in a scan")
    for call, message in (
        (
            lambda: rewrites.match_weights(a, b, groups),
            "`b` must have arrays of the shapes that `a` has",
        ),
        (lambda: rewrites.match_weights(a, broken, groups), "`b` must be finite"),
        (lambda: rewrites.match_weights(a, a, groups, num_starts=3), "`key` must be given"),
        (
            lambda: eqx.filter_jit(lambda m: rewrites.match_weights(m, a, groups).value)(a),
            "`a` must be known",
        ),
        (
            lambda: rewrites.match_weights(b, b, groups),
            "`groups` must be of the networks: 'layers.0.' has an array",
        ),
        (
            lambda: rewrites.match_weights(a, a, groups).apply(a, {}),
            "`groups` must hold 'layers.0.', which was match",
        ),
        (
            lambda: rewrites.barrier(lambda m: jax.vmap(m)(jnp.ones((2, 5))), a, a),
            "`loss` must return a single real",
        ),
        (
            lambda: rewrites.match_activations(a, a, groups, jnp.ones(5)),
            r"`model` must take one example of shape \(\)",
        ),
        (
            lambda: rewrites.match_activations(stack, stack, own, inputs),
            "that some layer reads as a whole, got 'first",
        ),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()


class Regularised(eqx.Module):
    """Normalisations with a dropout between them."""

    norms: list
    dropout: eqx.nn.Dropout

    def __init__(self, names):
        self.norms = [eqx.nn.BatchNorm(4, name, mode="batch") for name in names]
        self.dropout = eqx.nn.Dropout(0.9)

    def __call__(self, x, state):
        x, state = self.norms[0](x["a"] + x["b"], state)
        return self.norms[1](jax.nn.relu(self.dropout(x)) + 2, state)


def test_statistics_are_taken_whatever_the_names_and_without_dropout():
    model, state = eqx.nn.make_with_state(Regularised)(("batch", "other"))
    x = jax.random.normal(jax.random.key(0), (50, 4))
    new = rewrites.renormalised(model, state, {"a": 3 * x, "b": x})
    outputs = np.asarray(RUN((model, new), {"a": 3 * x, "b": x}))
    np.testing.assert_allclose(outputs.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(outputs.std(0), 1, atol=1e-3)


def test_the_mean_barrier_has_an_interval_over_members():
    values = np.random.default_rng(0).normal(size=6)
    found = rewrites.barriers(
        lambda m: -(m["x"] ** 2), {"x": jnp.asarray(values)}, {}, num_points=3
    )
    np.testing.assert_allclose(found.before, (values[:, None] - values[None]) ** 2 / 4, atol=1e-6)
    interval = found.interval("before")
    np.testing.assert_allclose(interval.mean, np.var(values, ddof=1) / 2, rtol=1e-5)
    assert 0 <= interval.low < interval.mean < interval.high
    fall = found._replace(after=found.before / 4).interval("fall")
    np.testing.assert_allclose(fall.mean, 0.75 * interval.mean, rtol=1e-5)
    np.testing.assert_allclose(fall.standard_error, 0.75 * interval.standard_error, rtol=1e-5)
    with pytest.raises(ValueError, match="`of` must be one of"):
        found.interval("between")
    with pytest.raises(ValueError, match="`models` must be at least 3 members"):
        _barriers.Barriers(np.zeros((2, 2)), np.zeros((2, 2)), {}).interval()
