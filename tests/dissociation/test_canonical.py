"""Rewrites of one network have one canonical form; other networks have others."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.spatial.distance import pdist
from zoo import ZOO, ResidualMLP, one

from dissociation import rewrites
from dissociation._core.conversion import to_device
from dissociation.rewrites import canonical, fingerprint, fingerprint_distance, neuron_groups
from dissociation.rewrites._groups import parameters_of
from dissociation.rewrites._sizes import refit

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

MADE_AND_READ = {
    "perceptron": [([(0, 0), (1, 0)], [(2, 1)]), ([(2, 0), (3, 0)], [(4, 1)])],
    "convolutional": [
        ([(0, 3), (1, 0)], [(2, 2)]),
        ([(2, 3), (3, 0)], [(4, 1)]),
        ([(4, 0), (5, 0)], [(6, 1)]),
    ],
    "residual": [
        ([(0, 0), (1, 0), (6, 0), (7, 0), (8, 0), (9, 0)], [(2, 1), (4, 1), (10, 1)]),
        ([(2, 0), (3, 0)], [(6, 1)]),
        ([(4, 0), (5, 0)], [(8, 1)]),
    ],
}
"""Arrays, in their order, and axes that make and read the neurons of each group; those of the last axis go fastest."""


def with_leaves(model, leaves):
    _, tree, rest = parameters_of(model)
    return refit(eqx.combine(jax.tree.unflatten(tree, [to_device(leaf) for leaf in leaves]), rest))


@eqx.filter_jit
def outputs_of(model, inputs):
    """Outputs of a network, in one program."""
    return jax.vmap(model)(inputs)


def rewritten(leaves, group, rng, kind):
    """A random rewrite of the neurons of a group, in NumPy."""
    makes, reads = group
    count = leaves[makes[0][0]].shape[makes[0][1]]
    index = rng.permutation(count) if kind == "permute" else np.arange(count)
    if kind in ("duplicate", "dead", "unmade"):
        index = np.concatenate([index, rng.integers(count, size=3)])
    made, read = np.ones((2, len(index)))
    if kind == "scale":
        made = np.exp(rng.normal(size=count))
        read = 1 / made
    elif kind == "duplicate":
        made[count:] = np.exp(rng.normal(size=3))
        share = np.exp(rng.normal(size=len(index)))
        read = share / np.bincount(index, share)[index] / made
    elif kind == "dead":
        read[count:] = 0
    elif kind == "unmade":
        made[count:] = 0
    leaves = list(leaves)
    for places, factor in ((makes, made), (reads, read)):
        for leaf, axis in places:
            array = np.moveaxis(leaves[leaf], axis, 0)
            array = array.reshape(-1, count, *array.shape[1:])[:, index]
            array = array * factor.reshape(-1, *[1] * (array.ndim - 2))
            array = array.reshape(-1, *array.shape[2:]).astype(leaves[leaf].dtype)
            leaves[leaf] = np.moveaxis(array, 0, axis)
    return leaves


def composed(name, model, rng, steps=5, kinds=("permute", "scale", "duplicate", "dead", "unmade")):
    """A network after random rewrites of random groups, one after another."""
    leaves = [np.asarray(leaf) for leaf in parameters_of(model)[0]]
    for _ in range(steps):
        groups = MADE_AND_READ[name]
        leaves = rewritten(
            leaves, groups[rng.integers(len(groups))], rng, kinds[rng.integers(len(kinds))]
        )
    return with_leaves(model, leaves)


@pytest.mark.parametrize("name", MADE_AND_READ)
def test_the_canonical_form_computes_the_same(name):
    model, inputs, _ = one(name)
    first = canonical(model, inputs[0])
    network = composed(name, model, np.random.default_rng(0))
    form = canonical(network, inputs[0])
    for other in (network, form):
        np.testing.assert_allclose(outputs_of(other, inputs), outputs_of(model, inputs), atol=5e-6)
    assert jax.tree.structure(eqx.filter(form, eqx.is_array)) == jax.tree.structure(
        eqx.filter(model, eqx.is_array)
    )
    again = canonical(form, inputs[0])
    for leaves in zip(*(parameters_of(each)[0] for each in (form, again, first)), strict=True):
        for same in leaves[1:]:
            np.testing.assert_allclose(same, leaves[0], atol=1e-5)


@pytest.mark.parametrize("count", [4, pytest.param(150, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MADE_AND_READ)
def test_rewrites_of_a_network_have_one_fingerprint(name, count):
    model, inputs, _ = one(name)
    own, rng = fingerprint(model, inputs[0]), np.random.default_rng(5)
    for _ in range(count):
        wide = composed(name, model, rng, rng.integers(3, 9))
        assert fingerprint_distance(own, fingerprint(wide, inputs[0])) < 1e-6


def nearby(name, model, rng, kind):
    """A network that differs from another in little."""
    leaves = [np.array(leaf) for leaf in parameters_of(model)[0]]
    flat = leaves[rng.integers(len(leaves))].reshape(-1)
    large = np.flatnonzero(np.abs(flat) >= np.quantile(np.abs(flat), 0.5))
    flat[rng.choice(large)] *= -1 if kind == "sign" else 1.001
    return with_leaves(model, leaves)


@pytest.mark.parametrize("name", MADE_AND_READ)
def test_networks_that_differ_in_little_have_other_fingerprints(name):
    model, inputs, _ = one(name)
    own, rng = fingerprint(model, inputs[0]), np.random.default_rng(1)
    for kind, least in {"weight": 1e-6, "sign": 1e-3}.items():
        found = [fingerprint(nearby(name, model, rng, kind), inputs[0]) for _ in range(3)]
        assert min(fingerprint_distance(own, other) for other in found) > least, kind


def test_neurons_without_effect_are_dropped():
    model, inputs, groups = one("perceptron")
    wide = (
        rewrites.add_nuisance(groups["layers[0]"], 2, 3, key=jax.random.key(0))
        | rewrites.add_nuisance(groups["layers[1]"], 4, key=jax.random.key(1))  # which read those
        | rewrites.duplicate(groups["layers[1]"], 2.5)
    )(model)
    assert wide.layers[1].weight.shape == (30, 14)
    form = canonical(wide, inputs[0])
    assert [layer.weight.shape for layer in form.layers] == [(8, 5), (8, 8), (3, 8)]
    assert form.width_size == 8
    own, other = (fingerprint(network, inputs[0]) for network in (model, wide))
    assert fingerprint_distance(own, other) < 1e-6
    lengths = jnp.sum(form.layers[0].weight ** 2, 1) + form.layers[0].bias ** 2
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    dead = eqx.tree_at(lambda m: m.layers[2].weight, model, model.layers[2].weight.at[:, 2].set(0))
    assert canonical(dead, inputs[0]).layers[1].weight.shape == (7, 8)


class Flattened(eqx.Module):
    """Channels first, flattened after pooling."""

    first: eqx.nn.Conv2d
    second: eqx.nn.Conv2d
    hidden: eqx.nn.Linear
    out: eqx.nn.Linear

    def __init__(self, widths, key, kernel=3):
        keys = jax.random.split(key, 4)
        a, b, c = widths
        self.first = eqx.nn.Conv2d(1, a, kernel, padding=kernel // 2, key=keys[0])
        self.second = eqx.nn.Conv2d(a, b, kernel, padding=kernel // 2, key=keys[1])
        self.hidden, self.out = (
            eqx.nn.Linear(4 * b, c, key=keys[2]),
            eqx.nn.Linear(c, 2, key=keys[3]),
        )

    def __call__(self, x):
        for layer in (self.first, self.second):
            x = eqx.nn.MaxPool2d(2, 2)(jax.nn.relu(layer(x)))
        return self.out(jax.nn.relu(self.hidden(x.reshape(-1))))


NARROW = {
    "perceptron": (lambda key: eqx.nn.MLP(5, 3, 1, 2, key=key), (5,)),
    "of one number": (lambda key: eqx.nn.MLP("scalar", "scalar", 1, 2, key=key), ()),
    "residual": (lambda key: ResidualMLP(1, 1, normalise=False, key=key), (5,)),
    "flattened": (lambda key: Flattened((3, 1, 2), key), (1, 8, 8)),
    "pointwise": (lambda key: Flattened((1, 2, 1), key, kernel=1), (1, 8, 8)),
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.slow
def test_layers_of_one_neuron_and_of_none(name):
    make, shape = NARROW[name]
    model = jax.tree.map(
        lambda x: jnp.abs(x) if eqx.is_array(x) else x, make(jax.random.key(1))
    )  # nothing is dead
    inputs = np.abs(np.random.default_rng(2).standard_normal((4, *shape))).astype(np.float32)
    given = [np.asarray(leaf) for leaf in parameters_of(model)[0]]
    own = fingerprint(model, inputs[0])
    for group in neuron_groups(model, inputs[0], single=True).values():
        scaled, alone, dead, wide = (list(given) for _ in range(4))
        for slot, exponent in zip(group.slots, group.scaling, strict=True):
            array = given[slot.leaf]
            factor = np.linspace(3.0, 5.0, group.size).reshape(-1, *[1] * array.ndim) ** exponent
            scaled[slot.leaf] = slot.with_blocks(
                scaled[slot.leaf], slot.blocks(scaled[slot.leaf]) * factor
            )
            for arrays, first in ((alone, 1), (dead, 0)) if slot.outgoing else ():
                blocks = slot.blocks(arrays[slot.leaf])
                blocks[first:] = 0
                arrays[slot.leaf] = slot.with_blocks(arrays[slot.leaf], blocks)
        assert fingerprint_distance(own, fingerprint(with_leaves(model, scaled), inputs[0])) < 1e-6
        assert fingerprint_distance(own, fingerprint(with_leaves(model, dead), inputs[0])) > 1e-2
        for arrays in (alone, dead):
            network = with_leaves(model, arrays)
            form = canonical(network, inputs[0])
            assert len(parameters_of(form)[0][group.slots[0].leaf]) == 1
            np.testing.assert_allclose(
                outputs_of(form, inputs), outputs_of(network, inputs), rtol=2e-6
            )


def test_what_is_alike_or_dead_leaves_one_neuron():
    keys, example = jax.random.split(jax.random.key(0), 2), jnp.ones(3)
    narrow, wide = (
        eqx.nn.MLP(3, 2, width, 1, key=key) for width, key in zip((1, 2), keys, strict=True)
    )
    parts = lambda m: [part for layer in m.layers for part in (layer.weight, layer.bias)]  # noqa: E731
    made, bias, read, last = parts(narrow)
    weights = jnp.array([1.0, 2.0])[:, None]
    parallel = [weights * made, weights[:, 0] * bias, read * jnp.array([[0.5, 0.25]]), last]
    parallel = eqx.tree_at(parts, wide, parallel)
    nothing = [
        jax.tree.map(lambda x: 0 * x if eqx.is_array(x) else x, network)
        for network in (narrow, wide)
    ]
    deep = (eqx.nn.MLP(3, 2, width, 2, key=key) for width, key in zip((1, 2), keys, strict=True))
    still = [eqx.tree_at(lambda m: parts(m)[4:], m, [0 * m.layers[2].weight, last]) for m in deep]
    assert canonical(still[1], example).layers[1].weight.shape == (1, 1)
    for pair in ((narrow, parallel), nothing, still):
        assert fingerprint_distance(*(fingerprint(network, example) for network in pair)) < 1e-6


def test_groups_side_by_side_shrink_each_by_itself():
    def call(arrays, x):
        one, other, read = arrays
        return read @ jnp.concatenate([jax.nn.relu(one @ x), jax.nn.relu(other @ x)])

    rng = np.random.default_rng(0)
    one, other, read = (
        rng.normal(size=shape).astype(np.float32) for shape in ((4, 3), (5, 3), (2, 9))
    )
    twice = [np.concatenate([array, 2 * array[1:3]]) for array in (one, other)]
    parts = [read[:, :4], np.zeros((2, 2)), read[:, 4:], read[:, [5, 6]] / 4]
    parts[2] = np.where(np.isin(np.arange(5), (1, 2)), parts[2] / 2, parts[2])
    wide = (*twice, np.concatenate(parts, 1).astype(np.float32))
    arrays = tuple(map(jnp.asarray, (one, other, read)))
    wide, example = tuple(map(jnp.asarray, wide)), jnp.ones(3)
    forms = [canonical(network, example, call=call) for network in (arrays, wide)]
    for first, second in zip(*forms, strict=True):
        np.testing.assert_allclose(second, first, atol=1e-6)
    np.testing.assert_allclose(call(forms[1], example), call(arrays, example), atol=1e-5)


@pytest.mark.parametrize(("dtype", "most"), [(jnp.float32, 1e-6), (jnp.bfloat16, 0.01)])
def test_a_fingerprint_does_not_jump_where_the_order_does(dtype, most):
    models = [eqx.nn.MLP(5, 3, 300, 2, key=jax.random.key(seed)) for seed in range(2)]
    model, other = (
        jax.tree.map(lambda x: x.astype(dtype) if eqx.is_array(x) else x, m) for m in models
    )
    rng, example = np.random.default_rng(0), jnp.ones(5, dtype)
    moved = composed("perceptron", model, rng, 10, ("permute", "scale"))
    own, again, far = (fingerprint(network, example) for network in (model, moved, other))
    assert fingerprint_distance(own, again) < most
    assert fingerprint_distance(own, far) > 0.5
    forms = [np.asarray(canonical(m, example).layers[0].bias, float) for m in (model, moved)]
    assert (np.abs(forms[0] - forms[1]).max() > 0.1) == (dtype == jnp.bfloat16)


@pytest.mark.parametrize("double", [False, True])
def test_deep_networks_of_any_size_have_one_fingerprint(double):
    with jax.enable_x64(double):
        model, example = eqx.nn.MLP(4, 2, 6, 8, key=jax.random.key(0)), jnp.ones(4)
        own = fingerprint(model, example)
        for signs in ((1, 1), (-1, -1), (1, -1)):
            leaves = [np.array(leaf) for leaf in parameters_of(model)[0]]
            for layer in range(8):  # weights of 1e10 and of 1e-10
                factor = leaves[0].dtype.type(10.0 ** (10 * signs[layer % 2]))
                for leaf in leaves[2 * layer : 2 * layer + 2]:
                    leaf *= factor
                leaves[2 * layer + 2] /= factor
            scaled = with_leaves(model, leaves)
            assert fingerprint_distance(own, fingerprint(scaled, example)) < (
                1e-14 if double else 1e-6
            )


def test_networks_whose_outputs_are_tiny_are_told_apart():
    model = eqx.nn.MLP(4, 2, 6, 3, use_bias=False, use_final_bias=False, key=jax.random.key(0))
    model = jax.tree.map(lambda x: 1e-8 * x if eqx.is_array(x) else x, model)
    turned = eqx.tree_at(lambda m: m.layers[3].weight, model, model.layers[3].weight[::-1])
    larger = eqx.tree_at(lambda m: m.layers[3].weight, model, replace_fn=lambda x: 1.01 * x)
    own, *others = (fingerprint(network, jnp.ones(4)) for network in (model, turned, larger))
    assert fingerprint_distance(own, others[0]) > 1e-2
    assert fingerprint_distance(own, others[1]) > 1e-5


class Gain(eqx.Module):
    """relu(z) and what becomes of it."""

    first: eqx.nn.Linear
    second: eqx.nn.Linear
    gain: jax.Array
    after: Callable = eqx.field(static=True)

    def __init__(self, after, width=6):
        keys = jax.random.split(jax.random.key(0), 3)
        self.first, self.second = (
            eqx.nn.Linear(4, width, key=keys[0]),
            eqx.nn.Linear(width, 2, key=keys[1]),
        )
        self.gain, self.after = jax.random.normal(keys[2], (width,)), after

    def __call__(self, x):
        return self.second(self.after(jax.nn.relu(self.first(x)), self.gain))


def test_what_has_no_canonical_form_is_refused_by_name():
    model, inputs, _ = one("stack in a scan")
    with pytest.raises(
        ValueError, match=r"`model` must have groups that are homogeneous.*first \(in 3 copies\)"
    ):
        canonical(model, inputs[0])
    for after, reason in (
        (lambda x, gain: x**2, "of degree 2"),
        (lambda x, gain: gain * x, "scaled in 2 ways"),
        (lambda x, gain: jnp.tanh(x), "not homogeneous"),
        (lambda x, gain: x / jnp.linalg.norm(x), "normalised"),
    ):
        for width in (6, 1):
            reasons = rf".*first \({reason}\)" if width > 1 else ""
            with pytest.raises(
                ValueError, match="`model` must have groups that are homogeneous" + reasons
            ):
                fingerprint(Gain(after, width), jnp.ones(4))
    model, inputs, _ = one("perceptron")
    with pytest.raises(TypeError, match="`model` must be known"):
        eqx.filter_jit(lambda m: canonical(m, inputs[0]))(model)
    spoilt = eqx.tree_at(
        lambda m: m.layers[0].bias, model, replace_fn=lambda x: x.at[0].set(jnp.nan)
    )
    with pytest.raises(ValueError, match="`model` must be finite"):
        canonical(spoilt, inputs[0])
    model, inputs, _ = one("residual")
    firm = lambda m: [m.embed.weight, m.embed.bias, *(layer.bias for layer in m.second)]  # noqa: E731
    unmade = eqx.tree_at(firm, model, replace_fn=lambda x: x.at[0].set(0))
    with pytest.raises(ValueError, match="write to all neurons of embed by its own weights"):
        fingerprint(unmade, inputs[0])
    counts = Gain(lambda x, gain: x / len(x))
    canonical(counts, inputs[0][:4])
    wide = eqx.tree_at(lambda m: m.second.weight, counts, counts.second.weight.at[:, 0].set(0))
    with pytest.raises(
        ValueError, match="number of neurons the function does not depend on, got first"
    ):
        canonical(wide, inputs[0][:4])
    arrays = [
        jax.random.normal(jax.random.key(k), shape)
        for k, shape in enumerate([(5, 8), (8, 3), (5, 8)])
    ]
    for call, wanted in (
        (
            lambda p, x: (jax.nn.sigmoid(x @ p[2]) * (x @ p[0])) @ p[1],
            "made by what does not scale with it",
        ),
        (lambda p, x: (x @ p[0])[::-1] @ p[1], "read in another order"),
    ):
        with pytest.raises(ValueError, match=wanted):
            canonical(arrays, jnp.ones(5), call=call)


@pytest.mark.parametrize("count", [6, pytest.param(200, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", MADE_AND_READ)
def test_other_networks_have_other_fingerprints(name, count):
    kind = ZOO[name]
    example = kind.inputs(jax.random.key(1))[0]
    found = np.stack(
        [fingerprint(kind.make(jax.random.key(seed)), example) for seed in range(count)]
    )
    assert pdist(found).min() > 0.3 * np.linalg.norm(found, axis=1).max()


@pytest.mark.parametrize("name", MADE_AND_READ)
def test_neurons_without_activity_are_dropped_where_asked(name):
    """Biases far below zero: dead on the data, and not for every input."""
    model, inputs, groups = one(name)
    names = {
        "perceptron": "layers[1]",
        "convolutional": "encoder.convolutions[1]",
        "residual": "first[1]",
    }
    group = groups[names[name]]
    bias = next(slot for slot in group.slots if slot.path.endswith("bias"))
    leaves = [np.array(leaf) for leaf in parameters_of(model)[0]]
    leaves[bias.leaf][bias.positions[:2]] -= 1e3
    dead = with_leaves(model, leaves)
    plain, dropped = canonical(dead, inputs[0]), canonical(dead, inputs[0], inputs=inputs)
    sizes = [sum(np.size(leaf) for leaf in parameters_of(m)[0]) for m in (model, plain, dropped)]
    assert sizes[0] == sizes[1] > sizes[2]
    np.testing.assert_allclose(
        outputs_of(dropped, inputs), outputs_of(dead, inputs), rtol=1e-4, atol=1e-5
    )
    found = neuron_groups(dropped, inputs[0])[group.name]
    assert found.size <= group.size - 2
    leaves[bias.leaf][bias.positions[:2]] -= 7.0  # of no effect on these inputs
    prints = [fingerprint(m, inputs[0], inputs=inputs) for m in (dead, with_leaves(model, leaves))]
    assert fingerprint_distance(*prints) < 1e-6
