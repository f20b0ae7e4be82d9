"""Rewrites of groups of any model keep its function; controls do not."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ZOO, Normalised, change, made, numpy_draws, one

from dissociation import bmap
from dissociation.models import BilinearNetwork
from dissociation.models._program import called
from dissociation.rewrites import _rewrites as rewrites
from dissociation.rewrites import (
    add_nuisance,
    add_phantom,
    certify,
    check_groups,
    compose,
    duplicate,
    layer_inputs,
    neuron_groups,
    null_perturb,
    null_space,
    permute,
    rotate,
    scale,
)
from dissociation.rewrites._groups import parameters_of

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")


def all_rewrites(group):
    key = jax.random.key(2)
    yield "permute", lambda: permute(group, key=key)
    for index in range(len(group.scalings)):
        factor = jnp.exp(jax.random.normal(jax.random.key(index), (group.copies, group.size)))
        yield (
            f"scale {index}",
            lambda factor=factor, index=index: scale(group, factor, scaling=index),
        )
    if group.scaling is not None:
        yield "scale", lambda: scale(group, 3.0)
    if group.linear is not None:
        yield "rotate", lambda: rotate(group, key=key)
        noise = jax.random.normal(key, (group.copies, group.size, group.size))
        general = jnp.eye(group.size)[None] + 0.3 * noise
        yield "rotate by any matrix", lambda: rotate(group, general)
    if group.sharing is not None:
        yield "duplicate", lambda: duplicate(group, 1.5)
        if group.cancelling:
            yield "cancelling", lambda: add_nuisance(group, 2, 3, key=key, incoming_std=0.3)
        yield "without effect", lambda: add_nuisance(group, 3, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", ZOO)
def test_every_rewrite_of_every_group_keeps_the_function(name):
    with jax.enable_x64(True):
        model, inputs, groups = one(name)
        leaves = parameters_of(model)[0]
        for group in groups.values():
            for what, make in all_rewrites(group):
                grows = what in ("duplicate", "cancelling", "without effect")
                if (
                    grows and group.name == "blocks[0].attention.query_proj:2"
                ):  # whose number the program holds
                    with pytest.raises(
                        ValueError, match="number of neurons the function does not depend on"
                    ):
                        make()(model)
                    continue
                rewritten = make()(model)
                assert change(model, rewritten, inputs) < 1e-12, (group.name, what)
                moved = parameters_of(rewritten)[0]
                shapes = [np.shape(leaf) for leaf in moved] != [np.shape(leaf) for leaf in leaves]
                assert shapes == grows
                assert grows or any((a != b).any() for a, b in zip(leaves, moved, strict=True))


X = jnp.arange(5.0) - 1.7
A, B = jax.random.normal(jax.random.key(18), (8, 5)), jax.random.normal(jax.random.key(9), (3, 8))
relu = jax.nn.relu


def test_neurons_that_a_convolution_reads_are_scaled():
    """All at once, as places of one channel."""

    def call(p, x):
        return jax.lax.conv_general_dilated(
            relu(p[0] @ x)[None, None], p[1][:, None], (1,), "VALID"
        )[0, :, 0]

    group = max(neuron_groups([A, B], X, call=call).values(), key=lambda group: group.size)
    assert group.degree == 1
    factor = jnp.exp(jax.random.normal(jax.random.key(0), (group.size,)))
    for rewrite in (permute(group, key=jax.random.key(1)), scale(group, factor)):
        np.testing.assert_allclose(call(rewrite([A, B]), X), call([A, B], X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [2, 3])
def test_rows_made_by_different_weights_are_scaled_alike(number):
    def call(p, x):
        return p[-1] @ jnp.concatenate([w @ x for w in p[:-1]]).reshape(number, 8).max(0)

    params = [A, *jax.random.normal(jax.random.key(10), (number - 1, 8, 5)), B]
    (group,) = neuron_groups(params, X, call=call).values()
    assert len(group.scalings) == 1
    rewritten = scale(group, jnp.arange(1.0, 9.0))(params)
    np.testing.assert_allclose(call(rewritten, X), call(params, X), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(rewritten[1], params[1] * jnp.arange(1.0, 9.0)[:, None], rtol=1e-6)


def test_rewrites_follow_one_another():
    model, inputs, groups = one("perceptron")
    first = groups["layers[0]"]
    whole = (
        duplicate(first, 2.0)
        | permute(first, key=jax.random.key(0))
        | add_nuisance(first, 4, key=jax.random.key(1))
        | scale(first, 0.1)
    )
    assert "NeuronGroup('layers[0]': 8 neurons" in repr(whole)
    rewritten = whole(model)
    assert rewritten.layers[0].weight.shape == (20, 5)
    assert change(model, rewritten, inputs) < 1e-5
    with pytest.raises(ValueError, match="`permutation` must have 20 entries"):
        permute(first, np.arange(8))(rewritten)


def test_a_composition_of_nothing_changes_nothing():
    model, _, groups = one("perceptron")
    rewrite = permute(groups["layers[0]"], key=jax.random.key(0))
    same = compose([rewrite, compose([])])(model)
    np.testing.assert_array_equal(same.layers[0].weight, rewrite(model).layers[0].weight)


def test_rewrites_are_pure():
    """Of an output by a scale factor the derivative is zero; traced factors that change the function give NaN."""
    model, x = ZOO["perceptron"].make(jax.random.key(0)), jnp.ones(5)
    group = neuron_groups(model, x)["layers[1]"]

    def function(a):
        return scale(group, a)(model)(x)[0]

    np.testing.assert_allclose(jax.grad(function)(2.0), 0, atol=1e-6)

    def weights(a):
        return scale(group, a)(model).layers[2].weight.sum()

    assert abs(jax.grad(weights)(2.0)) > 1e-2
    assert np.isnan(jax.jit(lambda a: scale(group, a)(model)(x))(-1.0)).all()


def test_what_layers_see():
    model, inputs = made("perceptron")
    hidden = jax.vmap(lambda x: jax.nn.relu(model.layers[0](x)))(inputs)
    seen = layer_inputs(model, inputs, ".layers[1].weight")
    np.testing.assert_allclose(seen.rows, hidden, atol=1e-6)
    assert seen.axes == (1,)


def test_what_layers_of_tokens_see():
    model, inputs = made("transformer")
    stream = layer_inputs(model, inputs, ".blocks[0].second.weight")
    assert stream.rows.shape == (6 * 5, 24)


def test_what_convolutions_see():
    model, inputs = made("convolutional")
    weight = model.encoder.convolutions[1].weight  # [5, 5, in, out]
    patches = layer_inputs(model, inputs, ".encoder.convolutions[1].weight")
    assert patches.axes == (0, 1, 2)
    assert patches.rows.shape == (3 * 14 * 14, 400)
    first = model.encoder.layers(inputs[0].reshape(28, 28))[0]
    wanted = model.encoder.convolutions[1](first) - model.encoder.convolutions[1].bias[None, None]
    np.testing.assert_allclose(
        (patches.rows[:196] @ weight.reshape(400, 32)).reshape(14, 14, 32), wanted, atol=1e-5
    )
    with pytest.raises(ValueError, match="`path` must be one of .encoder"):
        layer_inputs(model, inputs, "weight")


def test_what_layers_in_loops_see():
    model, inputs = made("gated recurrent")
    step = eqx.filter_jit(model.cell)
    states = []
    for signal in inputs:
        state = jnp.zeros(6)
        for value in signal:
            states.append(state)
            state = step(value, state)
    seen = layer_inputs(model, inputs, ".cell.weight_hh")
    assert seen.axes == (1,)
    np.testing.assert_allclose(seen.rows, np.stack(states), atol=1e-6)

    def backwards(m, x):
        return jax.lax.scan(lambda h, v: (m.cell(v, h), None), jnp.zeros(6), x, reverse=True)[0]

    turned = layer_inputs(model, inputs[:, ::-1], ".cell.weight_hh", call=backwards).rows.reshape(
        5, 7, 6
    )
    np.testing.assert_allclose(turned[:, ::-1], seen.rows.reshape(5, 7, 6), atol=1e-6)
    model, inputs = made("stack in a scan")
    with pytest.raises(
        ValueError, match="that something is multiplied by, as a whole, got '.first.weight'"
    ):
        layer_inputs(model, inputs, ".first.weight")


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("perceptron", ".layers[1].weight"),
        ("residual", ".first[1].weight"),
        ("grouped convolutions", None),
    ],
)
def test_moves_in_the_null_space_of_what_a_layer_sees(name, path):
    model, inputs = made(name)
    if path is None:
        with pytest.raises(
            ValueError, match="`path` must name weights of a convolution without groups"
        ):
            layer_inputs(model, inputs, ".convolutions[1].weight")
        path = ".convolutions[0].weight"
        inputs = inputs[:1, :, :5]
        model = eqx.tree_at(lambda m: m.convolutions[1:], model, [eqx.nn.Identity()] * 3)
    else:
        inputs = inputs[:4]
    seen = layer_inputs(model, inputs, path)
    space = null_space(seen, rtol=1e-6)
    moved = null_perturb(space, 0.5, key=jax.random.key(0))(model)
    assert change(model, moved, inputs) < 1e-5
    weights = [parameters_of(m)[0][seen.leaf] for m in (model, moved)]
    assert np.abs(weights[1] - weights[0]).max() > 0.1
    others = inputs + jax.random.normal(jax.random.key(3), inputs.shape)
    assert change(model, moved, others) > 1e-2


def SQUARE(key):
    return eqx.nn.MLP(4, 4, 4, 2, activation=lambda x: x, key=key)


def every_rewrite():
    """Of a network whose layers are square, so that no size tells a stack of members from one of them."""
    model, x = SQUARE(jax.random.key(0)), jax.random.normal(jax.random.key(1), (3, 4))
    group, key = neuron_groups(model, x[0])["layers[0]"], jax.random.key(2)
    yield "phantom", add_phantom(group, model, x, jnp.ones((3, 1)))
    yield (
        "null",
        null_perturb(null_space(layer_inputs(model, x, ".layers[1].weight")), 0.5, key=key),
    )
    yield from ((what, make()) for what, make in all_rewrites(group))


@pytest.fixture(scope="module")
def stacked():
    """Four stacked members, and every rewrite of one of them."""
    with numpy_draws():
        models = eqx.filter_jit(eqx.filter_vmap(SQUARE))(jax.random.split(jax.random.key(0), 4))
        return models, dict(every_rewrite())


def test_stacked_members_are_refused(stacked):
    models, every = stacked
    for rewrite in every.values():
        with pytest.raises(
            ValueError, match="`model` must have an array .*map rewrites over stacked members by"
        ):
            rewrite(models)


@pytest.mark.slow  # two programs of all rewrites
def test_stacked_members_are_mapped_over(stacked):
    models, every = stacked
    arrays, rest = eqx.partition(models, eqx.is_array)

    @jax.jit
    def run(own):
        model = eqx.combine(own, rest)
        return {what: eqx.filter(rewrite(model), eqx.is_array) for what, rewrite in every.items()}

    mapped, alone = jax.vmap(run)(arrays), run(jax.tree.map(lambda leaf: leaf[1], arrays))
    for what in every:
        for several, own in zip(*map(jax.tree.leaves, (mapped[what], alone[what])), strict=True):
            np.testing.assert_allclose(several[1], own, atol=1e-5, err_msg=what)


def test_pairs_of_models_and_states_are_mapped_over():
    make = eqx.nn.make_with_state(Normalised)
    pairs = eqx.filter_jit(eqx.filter_vmap(make))(jax.random.split(jax.random.key(0), 3))
    hidden = neuron_groups(make(jax.random.key(1)), jnp.ones(5))["first"]
    mapped, _ = bmap(scale(hidden, 2.0))(pairs)
    np.testing.assert_allclose(2 * mapped.last.weight, pairs[0].last.weight, rtol=1e-6)


def test_a_null_space_belongs_to_the_weights_that_it_was_found_for():
    model, x = SQUARE(jax.random.key(0)), jnp.ones((3, 4))
    space = null_space(layer_inputs(model, x, ".layers[1].weight"))
    move = null_perturb(space, 0.5, key=jax.random.key(0))
    bare = eqx.nn.MLP(
        4, 4, 4, 2, use_bias=False, key=jax.random.key(0)
    )  # other arrays have these numbers
    np.testing.assert_array_equal(*(m.layers[2].weight for m in (move(bare), bare)))
    assert np.abs(move(bare).layers[1].weight - bare.layers[1].weight).max() > 0.1
    with pytest.raises(
        ValueError, match="must have an array .layers.1..weight of 2 axes, 4 features"
    ):
        move(model.layers[1])


@pytest.mark.parametrize("name", ["residual", pytest.param("transformer", marks=pytest.mark.slow)])
def test_groups_are_checked_by_permuting(name):
    model, inputs, groups = one(name)
    found = check_groups(model, inputs, key=jax.random.key(0))
    assert list(found) == list(groups)
    assert all(certificate.max_rel_change < 1e-5 for certificate in found.values())
    wrong = certify(
        lambda x: called(model, x).ravel(), lambda x: called(model, x[::-1]).ravel(), inputs
    )
    assert wrong.max_rel_change > 1e-2


def test_what_cannot_be_is_refused_by_name():
    model, _, groups = one("transformer")
    stream, hidden = groups["embedding"], groups["blocks[0].first"]
    other, _ = made("perceptron")
    for call, message in (
        (lambda: duplicate(stream, 2), "can be widened, got embedding: a statistic is taken over"),
        (lambda: scale(hidden, 2.0), "can be scaled, got .*its activation is not homogeneous"),
        (lambda: rotate(hidden, key=jax.random.key(0)), "only sums and matrix products"),
        (lambda: scale(stream, -1.0), "`factor` must be positive"),
        (lambda: scale(stream, 2.0, scaling=3), "be one of the 3 scalings of embedding"),
        (
            lambda: permute(stream, np.zeros(16, int)),
            "`permutation` must hold each of 0, ..., 15 once",
        ),
        (lambda: permute(stream), "be given, or `key` to draw it, got neither"),
        (lambda: permute(stream, key=jax.random.key(0))(other), "`model` must have an array"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match=r"`model` must take one example of shape \(\)"):
        layer_inputs(other, jnp.ones(5), ".layers[0].weight")


def with_activation(activation, seed=0):
    return eqx.nn.MLP(5, 3, 8, 1, activation=activation, key=jax.random.key(seed))


def test_another_model_has_its_own_symmetries(monkeypatch):
    """Of the same shapes; members and other seeds of one architecture have the same."""
    x = jax.random.normal(jax.random.key(1), (12, 5))
    model, other = with_activation(relu), with_activation(jnp.tanh)
    (group,) = neuron_groups(model, x[0]).values()
    assert change(other, permute(group, key=jax.random.key(0))(other), x) < 1e-5
    with pytest.raises(
        ValueError,
        match="`model` must have a group layers.0. with the scalings of the group that was passed",
    ):
        scale(group, 2.0)(other)
    for same in (with_activation(relu, 1), eqx.nn.inference_mode(model)):
        assert change(same, scale(group, 2.0)(same), x) < 1e-5
    models = eqx.filter_vmap(lambda key: eqx.nn.MLP(5, 3, 8, 1, key=key))(
        jax.random.split(jax.random.key(0), 2)
    )
    assert eqx.filter_vmap(scale(group, 2.0))(models).layers[0].bias.shape == (2, 8)
    with (
        monkeypatch.context() as patch
    ):  # members and other seeds of one architecture are not looked into anew
        patch.setattr(rewrites, "neuron_groups", None)
        scale(group, 2.0)(with_activation(relu, 1))


def test_functions_that_are_equal_and_not_the_same_have_the_same_symmetries():
    x = jax.random.normal(jax.random.key(1), (12, 5))
    model = with_activation(relu)
    models = [
        with_activation(lambda x: x, seed) for seed in (0, 1)
    ]  # functions that are equal and not the same
    (linear,) = neuron_groups(models[0], x[0]).values()
    turn = rotate(linear, key=jax.random.key(0))
    assert change(models[1], turn(models[1]), x) < 1e-5
    with pytest.raises(ValueError, match="only sums and matrix products"):
        turn(model)
    scaled = rotate(
        linear, np.diag(10.0 ** np.arange(-12, 12, 3))
    )  # well conditioned but for its scales
    assert change(models[1], scaled(models[1]), x) < 1e-5
    for singular in (np.ones((8, 8)), np.zeros((8, 8)), np.ones((8, 8)) + 1e-5 * np.eye(8)):
        with pytest.raises(
            ValueError, match="`matrix` must be invertible, with a condition number below 8.4e.03"
        ):
            rotate(linear, singular)
    with pytest.raises(ValueError, match="`matrix` must be finite"):
        rotate(linear, np.full((8, 8), np.nan))


def test_other_layers_of_the_same_shapes_refuse_a_rewrite():
    x = jax.random.normal(jax.random.key(1), (12, 5))
    model = with_activation(relu)
    weights = {name: jax.random.normal(jax.random.key(i), (5, 5)) for i, name in enumerate("abv")}

    def largest(p, x):
        return jnp.maximum(x @ p["a"], x @ p["b"]) @ p["v"]

    (maxout,) = neuron_groups(weights, x[0], call=largest).values()
    with pytest.raises(ValueError, match="only sums and matrix products"):
        rotate(maxout, key=jax.random.key(0))
    norm = eqx.nn.LayerNorm(8, use_weight=False, use_bias=False)
    chain = eqx.nn.Sequential([model.layers[0], eqx.nn.Lambda(relu), norm, model.layers[1]])
    plain = eqx.tree_at(lambda m: m.layers[2], chain, eqx.nn.Identity())
    (found,) = neuron_groups(plain, x[0]).values()
    with pytest.raises(ValueError, match="a statistic is taken over its neurons"):
        duplicate(found, 2)(chain)
    space = null_space(layer_inputs(model, x[:2], ".layers[1].weight"))
    with pytest.raises(
        ValueError, match="must have an array .layers.1..weight of 2 axes, 8 features"
    ):
        null_perturb(space, 0.1, key=jax.random.key(0))(
            eqx.nn.MLP(5, 3, 9, 1, key=jax.random.key(0))
        )


def test_examples_may_be_several_arrays():
    model = {"a": A, "b": B}

    def call(p, pair):
        return p["b"] @ relu(p["a"] @ pair["x"] + pair["y"])

    x = {"x": jnp.sin(jnp.arange(30.0)).reshape(6, 5), "y": jnp.arange(6.0)[:, None]}
    (found,) = check_groups(model, x, key=jax.random.key(0), call=call).values()
    assert found.max_rel_change < 1e-5
    assert found.num_inputs == 6
    hidden = jax.nn.relu(x["x"] @ A.T + x["y"])
    np.testing.assert_allclose(layer_inputs(model, x, "['b']", call=call).rows, hidden, rtol=1e-5)
    with pytest.raises(
        ValueError, match="`inputs` must have at least 1 axis .samples, ....*of one length"
    ):
        check_groups(model, x | {"y": x["y"][:3]}, key=jax.random.key(0), call=call)
    with pytest.raises(ValueError, match="`inputs` must be finite"):
        check_groups(model, x | {"y": x["y"] * jnp.nan}, key=jax.random.key(0), call=call)


def test_factors_whose_powers_leave_the_precision_are_refused():
    """Denormal factors have infinite reciprocals, bilinear layers take squares, models may be in float32 under x64."""
    model, _, groups = one("perceptron")
    group = groups["layers[0]"]
    layer = BilinearNetwork(3, 4, 2, key=jax.random.key(0))
    square = next(g for g in neuron_groups(layer, jnp.ones(3)).values() if g.degree == 2)
    for own, factor in (
        *((group, np.full(8, size)) for size in (1e39, 1e-39, 1e-60)),
        (square, 1e-20),
        (square, 1e20),
    ):
        with pytest.raises(ValueError, match=r"`factor` must have a power -?\d that float32 holds"):
            scale(own, factor)(layer if own is square else model)
    for factor in (2e-38, 3e37):  # representable, but products with weights are not
        with pytest.raises(ValueError, match="`factor` must leave weights that float32 holds"):
            scale(group, factor)(model)
    assert np.isfinite(scale(group, 1e-33)(model).layers[1].weight).all()
    with jax.enable_x64(True):
        wide = scale(group, 1e-60)
        with pytest.raises(ValueError, match="`factor` must have a power"):
            wide(model)


def test_rewrites_without_options_do_what_they_are_said_to():
    """Scale by a tenth, twice the neurons, three more without effect, no scaling chosen but the main one."""
    model, _, groups = one("perceptron")
    group, key = groups["layers[0]"], jax.random.key(0)
    np.testing.assert_allclose(
        scale(group)(model).layers[0].weight, 0.1 * model.layers[0].weight, rtol=1e-6
    )
    assert duplicate(group)(model).layers[0].weight.shape[0] == 2 * group.size
    added = add_nuisance(group, key=key)(model)
    assert added.layers[0].weight.shape[0] == group.size + 3
    np.testing.assert_array_equal(added.layers[1].weight[:, -3:], 0)
    drawn = add_nuisance(group, 400, key=key)(model).layers[0].weight[group.size :]
    assert abs(float(drawn.std()) - 1) < 4 / np.sqrt(2 * drawn.size)
    for shift, kept in ((0.9e-4, True), (1.1e-4, False)):
        assert (
            bool(certify(lambda x: x, lambda x, by=shift: x + by, jnp.ones((2, 3))).kept()) == kept
        )


@pytest.mark.parametrize("order", [[0, 1, 1, 3], [3, 1, 0, 0]])
def test_a_model_of_other_constants_has_groups_of_its_own(order):
    """Whole numbers say which neurons are read: a rewrite of others would not keep the function."""

    def call(p, x):
        return relu(x @ p["w"])[p["order"]] @ p["v"]

    weights = {"w": A[:4].T, "v": B[:, :4].T}
    other, tried = weights | {"order": jnp.array(order)}, 0
    for group in neuron_groups(weights | {"order": jnp.array([0, 0, 1, 2])}, X, call=call).values():
        for rewrite in (
            (permute(group, key=jax.random.key(3)), scale(group, 3.0)) if group.degree else ()
        ):
            tried += 1
            try:
                moved = rewrite(other)
            except ValueError:
                continue
            np.testing.assert_allclose(call(moved, X), call(other, X), rtol=1e-5, atol=1e-6)
    assert tried


def test_a_group_may_lie_along_both_axes_of_one_array():
    """Hidden units of a recurrent network: rows and columns of the weights that map them to themselves."""
    draws = np.random.default_rng(0)
    model = {
        name: draws.normal(size=size).astype(np.float32)
        for name, size in (("h", (4, 4)), ("x", (4, 2)))
    }

    def run(model, x):
        hidden = jnp.tanh(model["x"] @ x)
        hidden = jnp.tanh(model["h"] @ hidden + model["x"] @ x)
        return jnp.sum(hidden**2, keepdims=True)

    inputs = draws.normal(size=(8, 2)).astype(np.float32)
    (certificate,) = rewrites.check_groups(model, inputs, key=jax.random.key(0), call=run).values()
    assert certificate.max_abs_change < 1e-5
