"""Names of groups and of representations, of models that are modules, dictionaries or functions."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.models import representations
from dissociation.rewrites import certify, neuron_groups, permute

DRAWS = np.random.default_rng(0)
INPUTS = DRAWS.normal(size=(5, 4)).astype(np.float32)


def weights(*shape):
    return jnp.asarray(DRAWS.normal(size=shape), jnp.float32)


def layers(first, second):
    """Return two layers with keys of the kernel and the bias, in the order of text."""
    shapes = {"kernel": (4, 6), "w": (4, 6), "bias": (6,), "b": (6,)}
    return [
        {
            key: weights(*(shapes[key] if place == 0 else (6, 3)[-len(shapes[key]) :]))
            for key in (first, second)
        }
        for place in range(2)
    ]


def called(model, x, names, keys, front=()):
    for key in front:
        model = model[key]
    for place, name in enumerate(names):
        layer = model[name]
        x = x @ layer[keys[0]] + layer[keys[1]]
        x = x if place else jax.nn.relu(x)
    return x


FLAX = {"params": dict(zip(("Dense_0", "Dense_1"), layers("kernel", "bias"), strict=True))}
HAIKU = dict(zip(("net/~/linear", "net/~/linear_1"), layers("w", "b"), strict=True))
FLAT = {"w1": weights(4, 6), "b1": weights(6), "w2": weights(6, 3), "scale": jnp.ones(())}


def call_flax(model, x):
    return called(model, x, ("Dense_0", "Dense_1"), ("kernel", "bias"), ("params",))


def call_haiku(model, x):
    return called(model, x, tuple(HAIKU), ("w", "b"))


def call_flat(model, x):
    return model["scale"] * jax.nn.relu(x @ model["w1"] + model["b1"]) @ model["w2"]


class Wrapped(eqx.Module):
    """A module around the weights of another library."""

    variables: dict

    def __call__(self, x):
        return call_flax(self.variables, x)


MODELS = {
    "flax": (FLAX, call_flax, "Dense_0"),
    "haiku": (HAIKU, call_haiku, "net/~/linear"),
    "one dictionary": (FLAT, call_flat, "w1"),
    "a list": ([FLAT["w1"], FLAT["w2"]], lambda model, x: jnp.tanh(x @ model[0]) @ model[1], "[0]"),
    "a function": (jax.tree_util.Partial(call_flax, FLAX), None, "Dense_0"),
    "a wrapper": (Wrapped(FLAX), None, "Dense_0"),
    "modules": (eqx.nn.MLP(4, 3, 6, 1, key=jax.random.key(0)), None, "layers[0]"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_group_and_its_activities_have_the_name_of_the_layer(kind):
    model, call, name = MODELS[kind]
    groups = neuron_groups(model, INPUTS[0], call=call)
    assert list(groups) == [name]
    found = representations(model, INPUTS, call=call)
    assert list(found) == [name, "logits"]
    moved = permute(groups[name], jnp.array([5, 0, 1, 2, 3, 4]))(model)
    np.testing.assert_array_equal(
        representations(moved, INPUTS, call=call)[name][:, 0], found[name][:, 5]
    )
    assert certify(model, moved, INPUTS, call=call).kept()


def test_two_matrices_of_one_dictionary_keep_their_names():
    model = {"block": {"up": weights(4, 6), "down": weights(6, 3), "gate": weights(4, 6)}}
    groups = neuron_groups(
        model,
        INPUTS[0],
        call=lambda p, x: (x @ p["block"]["up"] * (x @ p["block"]["gate"])) @ p["block"]["down"],
    )
    assert list(groups) == ["gate"]  # the first in the order of text


def test_a_group_is_printed_with_its_weights_and_exponents():
    model, call, name = MODELS["flax"]
    lines = repr(neuron_groups(model, INPUTS[0], call=call)[name]).splitlines()
    assert lines == [
        "NeuronGroup('Dense_0': 6 neurons, permutable, homogeneous of degree 1",
        "    made by ['params']['Dense_0']['bias'][0] x a",
        "    made by ['params']['Dense_0']['kernel'][1] x a",
        "    read by ['params']['Dense_1']['kernel'][0] x a^-1)",
    ]
