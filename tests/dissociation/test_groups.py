"""Groups of neurons, found in models of many kinds; fixed axes with reasons; axes and their atoms."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import ZOO, one

from dissociation.models import CNN, MLP, BilinearNetwork, ResNet, Transformer, representations
from dissociation.models._program import program_of
from dissociation.rewrites import group_report, layer_inputs, neuron_groups

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")


def layers_of(model, inputs, groups):
    """Hidden layers by name, and pairs of a layer and the size of a group that it makes."""
    names = program_of(model, None).layers
    made = {
        (names[slot.leaf], g.size) for g in groups.values() for slot in g.slots if not slot.outgoing
    }
    return {
        name: array for name, array in representations(model, inputs).items() if name != "logits"
    }, made


@pytest.mark.parametrize("name", ZOO)
def test_all_groups_are_found_and_name_representations(name):
    model, inputs, groups = one(name)
    letters = {"s": "scaling", "g": "sharing", "r": "linear"}
    found = {
        name: (
            group.size,
            "".join(k for k, part in letters.items() if getattr(group, part) is not None),
        )
        for name, group in groups.items()
    }
    assert found == ZOO[name].groups
    assert {name: group.copies for name, group in groups.items() if group.copies > 1} == ZOO[
        name
    ].copies
    alone = neuron_groups(model, inputs[0], single=True)
    assert {name: group.size for name, group in alone.items()} == {
        name: size for name, (size, _) in found.items()
    }
    hidden, made = layers_of(model, inputs, groups)
    for layer, array in hidden.items():  # neurons may lie at several positions or in several copies
        name = layer.partition(":")[0]
        assert any(array.shape[-1] % size == 0 for maker, size in made if maker == name), layer


CHAINS = {
    "perceptron of ours": lambda key: MLP(784, 6, 3, key=key),
    "perceptron of Equinox": lambda key: eqx.nn.MLP(784, 3, 5, 2, key=key),
    "convolutional": lambda key: CNN(5, 3, key=key),
    "bilinear": lambda key: BilinearNetwork(784, 5, 3, num_layers=2, bias=True, key=key),
}
RESIDUAL = {
    "residual convolutional": lambda key: ResNet(5, 3, channels=4, key=key),
    "transformer": lambda key: Transformer(5, 3, size=8, heads=2, patch=14, key=key),
    "residual bilinear": lambda key: BilinearNetwork(
        784, 5, 3, num_layers=2, residual=True, key=key
    ),
    "perceptron in a scan": lambda key: eqx.nn.MLP(784, 3, 5, 4, scan=True, key=key),
}


@pytest.mark.parametrize("name", [*CHAINS, *RESIDUAL])
def test_groups_and_representations_have_the_same_names(name):
    model, inputs = (
        (CHAINS | RESIDUAL)[name](jax.random.key(0)),
        jax.random.normal(jax.random.key(1), (5, 784)),
    )
    groups = neuron_groups(model, inputs[0])
    hidden, made = layers_of(model, inputs, groups)
    sizes = {layer: array.shape[-1] for layer, array in hidden.items()}
    assert {(layer.partition(":")[0], size) for layer, size in sizes.items()} <= made
    assert ({layer: group.size for layer, group in groups.items()} == sizes) == (name in CHAINS)
    for layer in hidden if name.startswith("perceptron of") else ():
        read = next(slot for slot in groups[layer].slots if slot.outgoing)
        np.testing.assert_allclose(
            layer_inputs(model, inputs, read.path).rows, hidden[layer], rtol=1e-5
        )


def test_slots_say_where_neurons_lie():
    last = one("convolutional")[2]["encoder.convolutions[1]"]
    made, bias, read = last.slots
    assert (made.path, made.axis, made.outgoing) == (".encoder.convolutions[1].weight", 3, False)
    assert bias.path == ".encoder.convolutions[1].bias"
    assert (read.path, read.axis, read.outgoing) == (".encoder.head.weight", 1, True)
    # Flattened from [7, 7, 32], channels last.
    np.testing.assert_array_equal(read.positions, np.arange(49 * 32).reshape(49, 32).T)
    assert last.degree == 1
    np.testing.assert_array_equal(last.scalings, [[1, 1, -1]])
    np.testing.assert_array_equal(last.sharing, [0, 0, -1])


def test_degrees_of_homogeneity():
    found = one("bilinear")[2]
    assert found["layers[0].left"].degree == 2
    assert len(found["layers[0].left"].scalings) == 2  # each side by itself
    assert found["embed"].degree == 1
    assert one("tanh without biases")[2]["layers[0]"].degree is None


def test_neurons_that_are_alone_are_found_where_asked_for():
    def after(x, arrays, move):
        made, gain, read = arrays
        return read @ move(jax.nn.relu(made @ x), gain)

    arrays = jnp.ones((1, 3)), jnp.ones(4), jnp.ones((2, 4))
    for move, reason in (
        (lambda h, gain: h[0] * gain, "it is no longer an axis"),
        (lambda h, gain: jnp.squeeze(h) * gain, "it is no longer an axis"),
        (lambda h, gain: jnp.broadcast_to(h, (4,)) * gain, "it is broadcast"),
        (lambda h, gain: jnp.take(h, jnp.array([0]) * 1) * gain[:1] + gain, "it is"),
        (lambda h, gain: (h[None] * gain[:, None]).reshape(-1), ""),  # read where it was flattened
    ):
        report = group_report(
            arrays, jnp.ones(3), call=lambda a, x, move=move: after(x, a, move), single=True
        )
        assert report.frozen.get("[0][0]", "").startswith(reason)
        assert ("[0]" in report.groups) == (not reason)
        plain = neuron_groups(arrays, jnp.ones(3), call=lambda a, x, move=move: after(x, a, move))
        assert all(group.size > 1 for group in plain.values())


def test_gates_of_a_recurrent_cell_move_together():
    slots = one("gated recurrent")[2]["cell"].slots
    rows = [slot.positions[:, 0].tolist() for slot in slots if slot.path == ".cell.weight_ih"]
    assert rows == [list(range(start, start + 6)) for start in (0, 6, 12)]


def test_what_a_normalisation_makes_is_scaled_by_its_gain():
    stream = one("residual normalised")[2]["embed"]
    assert stream.normalised
    paths = [slot.path for slot in stream.slots]
    for vector, index in zip(stream.scalings, (0, 1), strict=True):
        moved = {path for path, exponent in zip(paths, vector, strict=True) if exponent}
        norm = f".norms[{index}]"
        assert moved == {f"{norm}.weight", f"{norm}.bias", f".first[{index}].weight"}


def test_what_stands_still_says_why():
    model = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0))
    report = group_report(model, jnp.ones(5))
    assert report.frozen[".layers[0].weight[1]"] == "the input has it"
    assert report.frozen[".layers[1].weight[0]"] == "the output has it"
    assert "is fixed: the input has it" in str(report)
    ramp = jnp.arange(8.0)
    tilted = group_report(
        model, jnp.ones(5), call=lambda m, x: m.layers[1](jax.nn.relu(m.layers[0](x)) * ramp)
    )
    assert not tilted.groups
    assert tilted.frozen[".layers[0].weight[0]"] == "a constant differs along it"
    unused = group_report(model, jnp.ones(5), call=lambda m, x: m.layers[0](x))
    assert unused.frozen[".layers[1].weight[1]"] == "the function does not depend on it"


def test_what_is_no_model_of_the_example_is_refused():
    model, x = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), jnp.ones(4)
    for find in (neuron_groups, group_report):
        with pytest.raises(
            TypeError, match="`example` must be arrays, .* Is `model` given second?"
        ):
            find(x, model)
        with pytest.raises(TypeError, match="`model` must take `example`, got MLP"):
            find(model, jnp.ones(6))
        with pytest.raises(
            TypeError,
            match="`model` must hold arrays of floating-point .*closes over are not found",
        ):
            find(lambda x: model(x), x)
        with pytest.raises(TypeError, match="`model` must return arrays for `example`"):
            find([jnp.ones((3, 2))], jnp.ones(3), call=lambda p, x: None)
