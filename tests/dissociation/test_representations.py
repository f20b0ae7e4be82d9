import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from similarity_reference import linear_cka

from dissociation import member
from dissociation.models import (
    CNN,
    MLP,
    BilinearNetwork,
    Transformer,
    member_representations,
    named,
    representations,
    representations_of_example,
)
from dissociation.models._representations import Layers
from dissociation.rewrites import layer_inputs
from dissociation.similarity import compare, pairwise

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

X = np.random.default_rng(0).normal(size=(7, 4)).astype(np.float32)


def names(depth):
    return [*(f"layers[{index}]" for index in range(depth)), "logits"]


@pytest.mark.parametrize(
    "depth", [1, 12]
)  # with twelve layers, the order of the alphabet is another one
def test_layers_come_in_forward_order(depth):
    key = jax.random.key(0)
    bilinear = ["embed", *(f"layers[{index}].left" for index in range(depth)), "logits"]
    for model, layers in (
        (eqx.nn.MLP(4, 3, 5, depth, key=key), names(depth)),
        (MLP(4, 5, depth, 3, key=key), names(depth)),
        (BilinearNetwork(4, 5, 3, num_layers=depth, key=key), bilinear),
    ):
        found = representations(model, X)
        assert list(found) == layers
        assert found["features"] is found[layers[-2]]
        np.testing.assert_allclose(found["logits"], jax.vmap(model)(X), rtol=1e-5, atol=1e-6)
        assert {array.shape for array in found.values()} == {(7, 5), (7, 3)}


@pytest.mark.usefixtures("unchecked")
def test_unknown_layers_raise_with_the_known_ones():
    found = representations(eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0)), X)
    names = r"`layer` must be one of 'layers\[0\]', 'layers\[1\]', 'logits', got"
    with pytest.raises(KeyError, match=rf"{names} 'hidden2'\.\"$"):
        found["hidden2"]
    assert "features" not in found  # a word for a layer, not one more layer
    with pytest.raises(
        TypeError, match=r'`hidden` must be arrays by .* list\. .* named\(\{"layers\[0\]": array, '
    ):
        named([X], X)
    with pytest.raises(KeyError, match="must be one of 'logits', got 'features'"):
        named({}, X)["features"]
    # Of a layer called so and of the last one, the name decides.
    np.testing.assert_array_equal(named({"features": X, "last": X + 1}, X)["features"], X)


@pytest.mark.parametrize(
    ("options", "activation"),
    [
        ({"use_bias": False}, jax.nn.relu),
        ({"use_final_bias": False, "final_activation": jnp.tanh}, jax.nn.relu),
        ({"activation": eqx.nn.PReLU(0.3)}, lambda z: jnp.where(z > 0, z, 0.3 * z)),
        ({"depth": 0, "final_activation": jnp.tanh}, None),
    ],
)
def test_multilayer_perceptrons_of_equinox(options, activation):
    model = eqx.nn.MLP(4, 3, **{"width_size": 6, "depth": 3, "key": jax.random.key(1)} | options)
    found, hidden = representations(model, X), X
    assert list(found) == (names(model.depth) if model.depth else ["logits"])
    for layer, name in zip(model.layers[:-1], found, strict=False):
        hidden = jax.vmap(lambda z, layer=layer: activation(layer(z)))(hidden)
        np.testing.assert_allclose(found[name], hidden, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found["logits"], jax.vmap(model)(X), rtol=1e-5, atol=1e-6)


def test_learned_activations_of_every_neuron():
    model = eqx.nn.MLP(4, 3, 7, 2, activation=eqx.nn.PReLU(0.3), key=jax.random.key(0))
    slopes = jax.random.uniform(jax.random.key(1), model.activation.negative_slope.shape)
    model = eqx.tree_at(lambda m: m.activation.negative_slope, model, slopes)
    features = representations(model, X)["features"]
    np.testing.assert_allclose(jax.vmap(model.layers[2])(features), jax.vmap(model)(X), atol=1e-5)


def test_scalars():
    scalar = eqx.nn.MLP("scalar", "scalar", 6, 2, final_activation=jnp.tanh, key=jax.random.key(1))
    found = representations(scalar, X[:, 0])
    assert found["features"].shape == (7, 6)
    np.testing.assert_allclose(found["logits"], jax.vmap(scalar)(X[:, 0]), rtol=1e-5)


def test_members():
    make = eqx.filter_jit(eqx.filter_vmap(lambda key: MLP(4, 5, 3, 3, key=key)))
    models = make(jax.random.split(jax.random.key(0), 3))
    found = member_representations(models, X)
    assert list(found) == names(3)
    one = representations(member(models, 1), X)
    for name, array in found.items():
        np.testing.assert_allclose(array[1], one[name], atol=1e-6)


def test_derivatives():
    alone = eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0))
    slope = eqx.filter_jit(
        eqx.filter_grad(lambda model: jnp.sum(representations(model, X)["layers[0]"]))
    )(alone)
    positive = np.asarray(representations(alone, X)["layers[0]"]) > 0
    np.testing.assert_allclose(slope.layers[0].bias, positive.sum(0), rtol=1e-5)
    # A custom rule, as that of a ReLU at 0, is kept.
    plain = eqx.nn.MLP(4, 3, 5, 2, use_bias=False, key=jax.random.key(0))
    for call in (jax.vmap(plain), lambda x: representations(plain, x)["logits"]):
        slope = jax.jit(jax.grad(lambda x, call=call: jnp.sum(call(x))))
        np.testing.assert_array_equal(slope(np.zeros_like(X)), 0)


def test_stacked_models_and_single_examples_are_refused():
    for depth in (0, 2):  # as many members as units: every product would have a shape

        def make(key, depth=depth):
            return eqx.nn.MLP(4, 4, 4, depth, key=key)

        models = eqx.filter_vmap(make)(jax.random.split(jax.random.key(0), 4))
        with pytest.raises(
            TypeError, match=r"stacked ones\), got an error: weights of shape \(4, 4, 4\) are those"
        ):
            representations(models, X)
    with pytest.raises(TypeError, match=r"`model` must take one example of shape \(\)"):
        representations(make(jax.random.key(0)), X[0])
    with pytest.raises(TypeError, match="`model` must return arrays, got None"):
        representations(lambda x: None, X)
    with pytest.raises(
        TypeError,
        match="`model` must be a function of one example, or such a one and its state, got",
    ):
        representations(3, X)


def test_models_of_other_libraries():
    class Other(eqx.Module):
        inner: eqx.nn.Linear

        def __call__(self, x):
            return self.inner(x)

    model = Other(eqx.nn.Linear(4, 2, key=jax.random.key(0)))
    assert list(representations(model, X)) == ["logits"]

    @representations_of_example.register
    def _(model: Other, x):
        return {"logits": model.inner(x)}

    np.testing.assert_allclose(representations(model, X)["logits"], jax.vmap(model)(X), rtol=1e-6)


def test_one_program_computes_all_layers_and_what_functions_close_over_may_change():
    def make(seed):
        return eqx.nn.MLP(4, 3, 6, 2, key=jax.random.key(seed))

    model, other = make(0), make(1)
    for call in (
        lambda m: representations(m, X),
        lambda m: layer_inputs(m, X, ".layers[1].weight"),
    ):
        assert len(compilations(lambda call=call: call(model))) == 1
        assert not compilations(lambda call=call: call(other))  # of the same structure
    factor = [1.0]

    def plain(x):
        return factor[0] * model(x)

    before = representations(plain, X)["logits"]
    inputs = {"call": lambda m, x: m(factor[0] * x), "path": ".layers[0].weight"}
    np.testing.assert_allclose(layer_inputs(model, X, **inputs).rows, X)
    factor[0] = 2.0
    np.testing.assert_allclose(representations(plain, X)["logits"], 2 * before, rtol=1e-6)
    np.testing.assert_allclose(layer_inputs(model, X, **inputs).rows, 2 * X)

    class Taken(eqx.Module):
        places: np.ndarray  # NumPy's integers set shapes

        def representations(self, x):
            return {"logits": x[: self.places[0]] * factor[0]}

    assert representations(Taken(np.array([3])), X)["logits"].shape == (7, 3)
    representations_of_example.register(Taken, lambda model, x: {"logits": factor[0] * x})
    for factor[0] in (2.0, 3.0):
        np.testing.assert_allclose(representations(Taken(jnp.ones(1)), X)["logits"], factor[0] * X)


class Convolved(eqx.Module):
    """Channels first: two convolutions with pooling between them, then logits at each position, or of their mean."""

    first: eqx.nn.Conv
    second: eqx.nn.Conv
    last: eqx.Module
    dense: bool

    def __init__(self, dims, dense, key):
        keys = jax.random.split(key, 3)
        self.first = eqx.nn.Conv(dims, 1, 5, 3, padding=1, key=keys[0])
        self.second = eqx.nn.Conv(dims, 5, 4, 3, padding=1, key=keys[1])
        self.last = (
            eqx.nn.Conv(dims, 4, 3, 1, key=keys[2]) if dense else eqx.nn.Linear(4, 3, key=keys[2])
        )
        self.dense = dense

    def __call__(self, x):
        x = eqx.nn.Pool(0.0, jax.lax.add, x.ndim - 1, 2, 2)(jax.nn.relu(self.first(x)))
        x = jax.nn.relu(self.second(x))
        return (
            2 * jnp.tanh(self.last(x)) if self.dense else self.last(x.mean(tuple(range(1, x.ndim))))
        )


class Tokens(eqx.Module):
    """A layer for every token, whose features are the first axis or the last one."""

    first: eqx.nn.Linear
    last: eqx.nn.Linear
    features_first: bool

    def __init__(self, features_first, key):
        keys = jax.random.split(key)
        self.first, self.last = eqx.nn.Linear(4, 5, key=keys[0]), eqx.nn.Linear(5, 3, key=keys[1])
        self.features_first = features_first

    def __call__(self, x):
        axis = 1 if self.features_first else 0
        hidden = jax.nn.relu(jax.vmap(self.first, in_axes=axis, out_axes=axis)(x))
        return jax.vmap(self.last, in_axes=axis, out_axes=axis)(hidden) + 1


def permuted(model, order, rows):
    """The same function with other channels in the first layer, and other logits."""

    def where(m):
        return (
            m.first.weight,
            m.first.bias,
            m.second.weight if hasattr(m, "second") else m.last.weight,
        )

    first, bias, read = where(model)
    model = eqx.tree_at(where, model, (first[order], bias[order], read[:, order]))
    return eqx.tree_at(
        lambda m: (m.last.weight, m.last.bias),
        model,
        (model.last.weight[rows], model.last.bias[rows]),
    )


@pytest.mark.parametrize(
    ("make", "shape", "compared"),
    [
        (lambda key: Convolved(1, True, key), (1, 8), "first"),
        (lambda key: Convolved(2, False, key), (1, 8, 6), "nothing"),
        (lambda key: Tokens(False, key), (6, 4), "nothing"),
        (lambda key: Tokens(True, key), (4, 6), "logits"),
    ],
)
def test_channels_are_last_wherever_the_program_has_them(make, shape, compared):
    """Channels in another order, of the first layer and of logits, are the same representation."""
    model, x = make(jax.random.key(0)), jax.random.normal(jax.random.key(1), (7, *shape))
    order, rows = np.array([3, 1, 4, 0, 2]), np.array([2, 0, 1])
    one, other = (representations(each, x) for each in (model, permuted(model, order, rows)))
    first = next(iter(one))
    for name, moved in ((first, order), ("logits", rows)):
        arrays = [np.asarray(found[name]) for found in (one, other)]
        np.testing.assert_allclose(arrays[1], arrays[0][..., moved], atol=1e-5)
        assert np.abs(arrays[0] - arrays[1]).max() > 0.01
    if compared != "nothing":
        name = first if compared == "first" else "logits"
        sides = [Layers({name: found[name]}, found.ranks) for found in (one, other)]
        options = {"positions": "samples", "num_blocks": None, "p_values": False, "baseline": False}
        np.testing.assert_allclose(compare(*sides, "linear_cka", **options).values, 1, atol=1e-4)
    assert one.ranks == {name: array.ndim - 1 for name, array in one.items()}


def test_an_unknown_axis_of_channels_is_not_stated():
    class Mixed(eqx.Module):
        first: eqx.nn.Linear

        def __call__(self, x):
            hidden = jax.vmap(self.first)(x)
            return hidden + hidden.T

    found = representations(
        Mixed(eqx.nn.Linear(4, 4, key=jax.random.key(0))), np.ones((7, 4, 4), np.float32)
    )
    assert found.ranks == {}
    with pytest.raises(ValueError, match="`members` must be True or False for `representations"):
        pairwise(found, "linear_cka", positions="samples")


@pytest.mark.parametrize(
    ("model", "seeds"),
    [
        (MLP, 1),
        (MLP, 2),
        pytest.param(CNN, 3, marks=pytest.mark.slow),
        pytest.param(Transformer, 3, marks=pytest.mark.slow),
    ],
)
def test_layers_of_all_models_are_compared_for_one_seed_and_for_several(model, seeds):
    options = {"size": 8, "heads": 2, "patch": 14} if model is Transformer else {}

    def make(key):
        return model(width=6, classes=3, key=key, **options)

    x = np.random.default_rng(1).random((9, 784)).astype(np.float32)
    if seeds == 1:
        found = representations(make(jax.random.key(1)), x)
    else:
        models = [eqx.partition(make(jax.random.key(seed)), eqx.is_array) for seed in range(seeds)]
        arrays = jax.tree.map(lambda *leaves: np.stack(leaves), *(model[0] for model in models))
        found = member_representations(eqx.combine(arrays, models[0][1]), x)
    table = pairwise(found, "linear_cka", positions="neurons", baseline=False)
    assert table.items == tuple((name, seed) for name in found for seed in range(seeds))
    assert table.num_samples == 9
    assert table.disagreement.shape == table.values.shape
    first, *_, last = (array if seeds > 1 else array[None] for array in found.values())
    wanted = linear_cka(*(np.asarray(side).reshape(9, -1) for side in (first[0], last[-1])))
    np.testing.assert_allclose(table.values[0, -1], wanted, atol=1e-5)
