"""Rewrites of one network have one canonical form; other networks have others."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ZOO

from dissociation.symmetry.canonical import canonical, fingerprint, fingerprint_distance
from dissociation.weights import growth, rewrites
from dissociation.weights.groups import neuron_groups

KINDS = ("perceptron", "convolutional", "residual")


def one(name, seed=0):
    kind = ZOO[name]
    model, inputs = kind.make(jax.random.key(seed)), kind.inputs(jax.random.key(1))
    return model, inputs, neuron_groups(model, inputs[0])


def composed(groups, rng, steps=5):
    """Random rewrites, one after another."""
    parts = []
    for _ in range(steps):
        group = groups[list(groups)[rng.integers(len(groups))]]
        key = jax.random.key(rng.integers(2**31))
        makers = (
            lambda group=group, key=key: rewrites.permute(group, key=key),
            lambda group=group: rewrites.scale(group, float(np.exp(rng.normal()))),
            lambda group=group: growth.duplicate(group, 1 + rng.random()),
            lambda group=group, key=key: growth.add_nuisance(group, 3, key=key),
            lambda group=group, key=key: growth.add_nuisance(group, 2, 3, key=key, incoming_std=0.3),
        )
        parts.append(makers[rng.integers(len(makers))]())
    return rewrites.compose(parts)


@pytest.mark.parametrize("name", KINDS)
def test_the_canonical_form_computes_the_same(name):
    model, inputs, groups = one(name)
    for network in (model, composed(groups, np.random.default_rng(0))(model)):
        form = canonical(network, inputs[0])
        np.testing.assert_allclose(jax.vmap(form)(inputs), jax.vmap(model)(inputs), atol=2e-6)
        assert jax.tree.structure(eqx.filter(form, eqx.is_array)) == jax.tree.structure(eqx.filter(model, eqx.is_array))
        again = canonical(form, inputs[0])
        assert fingerprint_distance(fingerprint(again, inputs[0]), fingerprint(form, inputs[0])) < 1e-6


def check_one_fingerprint(name, count):
    model, inputs, groups = one(name)
    own, rng = fingerprint(model, inputs[0]), np.random.default_rng(5)
    distances = [fingerprint_distance(own, fingerprint(composed(groups, rng)(model), inputs[0])) for _ in range(count)]
    assert max(distances) < 1e-5


def test_rewrites_of_a_network_have_one_fingerprint():
    check_one_fingerprint("perceptron", 12)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "count"), [("perceptron", 150), ("convolutional", 15), ("residual", 40)])
def test_many_rewrites_of_a_network_have_one_fingerprint(name, count):
    check_one_fingerprint(name, count)


@pytest.mark.parametrize("name", KINDS)
def test_other_networks_have_other_fingerprints(name):
    found = [fingerprint(one(name, seed)[0], one(name)[1][0]) for seed in range(4)]
    assert min(fingerprint_distance(a, b) for i, a in enumerate(found) for b in found[:i]) > 0.1
    model, inputs, _ = one(name)
    leaf = jax.tree.leaves(eqx.filter(model, eqx.is_array))[0]
    moved = jax.tree.map(lambda x: 1.01 * x if x is leaf else x, model)
    assert fingerprint_distance(found[0], fingerprint(moved, inputs[0])) > 1e-4


def test_neurons_without_effect_are_dropped():
    model, inputs, groups = one("perceptron")
    wide = (
        growth.add_nuisance(groups["layers[0]"], 2, 3, key=jax.random.key(0))
        | growth.add_nuisance(groups["layers[1]"], 4, key=jax.random.key(1))  # which read those
        | growth.duplicate(groups["layers[1]"], 2.5)
    )(model)
    assert wide.layers[1].weight.shape == (30, 14)
    form = canonical(wide, inputs[0])
    assert [layer.weight.shape for layer in form.layers] == [(8, 5), (8, 8), (3, 8)]
    assert form.width_size == 8
    lengths = jnp.sum(form.layers[0].weight ** 2, 1) + form.layers[0].bias ** 2
    np.testing.assert_allclose(lengths, 1, rtol=1e-5)
    dead = eqx.tree_at(lambda m: m.layers[2].weight, model, model.layers[2].weight.at[:, 2].set(0))
    assert canonical(dead, inputs[0]).layers[1].weight.shape == (7, 8)


def test_what_has_no_canonical_form_is_refused_by_name():
    for name, group in (
        ("tanh without biases", r"layers\[0\]"),
        ("bilinear", r"layers\[0\].left"),
        ("transformer", "embed"),
        ("stack in a scan", "first"),
    ):
        model, inputs, _ = one(name)
        with pytest.raises(ValueError, match=f"`model` must have groups that are homogeneous .* got others: .*{group}"):
            canonical(model, inputs[0])
    model, inputs, _ = one("perceptron")
    with pytest.raises(TypeError, match="`model` must be known"):
        eqx.filter_jit(lambda m: canonical(m, inputs[0]))(model)
