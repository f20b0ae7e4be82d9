"""Layers by name: values of modules, loops, several inputs and outputs, and interventions."""

from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from zoo import Block, made, stacked

from dissociation import member
from dissociation.models import (
    intervene,
    layer_shapes,
    member_representations,
    representations,
)
from dissociation.models._module_values import with_marks
from dissociation.models._program import called
from dissociation.similarity import compare, pairwise

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

DRAWS = np.random.default_rng(0)
TOKENS = DRAWS.integers(0, 11, (4, 6))
BATCH = {"ids": TOKENS, "mask": (DRAWS.random((4, 6)) < 0.7).astype(np.float32)}
LINEAR = partial(eqx.nn.Linear, use_bias=False, key=np.array([0, 1], np.uint32))


class Scanned(eqx.Module):
    """Blocks in a scan, each compiled by itself and checkpointed."""

    embed: eqx.nn.Embedding
    blocks: Block
    head: eqx.nn.Linear

    def __init__(self, key, depth=3):
        self.embed = eqx.nn.Embedding(11, 8, key=key)
        keys = jax.random.split(key, depth)
        arrays = stacked(lambda k: eqx.filter(Block(8, k), eqx.is_array), keys)
        self.blocks = eqx.combine(arrays, Block(8, keys[0]))
        self.head = LINEAR(8, 11)

    def __call__(self, tokens):
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        @eqx.filter_checkpoint
        def step(x, arrays):
            return eqx.filter_jit(eqx.combine(arrays, static))(x), None

        x, _ = jax.lax.scan(step, jax.vmap(self.embed)(tokens), arrays)
        return jax.vmap(self.head)(x)


def by_hand(model, change, tokens):
    """Return values of blocks by name, [iterations, ...], and logits; `change` replaces values."""
    values = {}

    def note(name, value):
        name = f"blocks.{name}"
        value = change(name, len(values.setdefault(name, [])), value)
        values[name].append(value)
        return value

    x = model.embed.weight[tokens]
    mask = jnp.tril(jnp.ones((len(x), len(x)), bool))
    for depth in range(3):
        block = member(model.blocks, depth)
        y = note("norms[0]()", jax.vmap(block.norms[0])(x))
        x = x + note("attention()", block.attention(y, y, y, mask=mask))
        y = note("norms[1]()", jax.vmap(block.norms[1])(x))
        y = note("first", jax.nn.gelu(note("first()", jax.vmap(block.first)(y))))
        x = x + note("second()", jax.vmap(block.second)(y))
    return {name: jnp.stack(array) for name, array in values.items()}, x @ model.head.weight.T


def same(name, depth, value):
    return value


class Encoder(eqx.Module):
    """Encoder of a dictionary, with a dictionary of outputs; it calls one layer twice."""

    embed: eqx.nn.Embedding
    layer: eqx.nn.Linear
    pooler: eqx.nn.Linear
    unused: eqx.nn.Linear

    def __init__(self, key):
        self.embed = eqx.nn.Embedding(11, 8, key=key)
        self.layer, self.pooler, self.unused = LINEAR(8, 8), LINEAR(8, 3), LINEAR(8, 3)

    def __call__(self, batch):
        x = jax.vmap(self.embed)(batch["ids"]) * batch["mask"][:, None]
        x = jnp.tanh(jax.vmap(self.layer, in_axes=1, out_axes=1)(x.T))
        x = jnp.tanh(jax.vmap(self.layer)(x.T))
        return {"tokens": x, "pooled": self.pooler(x.mean(0))}


class UNet(eqx.Module):
    """Two resolutions, and a connection around the lower one."""

    down: eqx.nn.Conv2d
    middle: eqx.nn.Sequential
    up: eqx.nn.ConvTranspose2d

    def __init__(self, key):
        self.down = eqx.nn.Conv2d(2, 4, 3, padding=1, key=key)
        self.middle = eqx.nn.Sequential([eqx.nn.MaxPool2d(2, 2), eqx.nn.Lambda(jax.nn.relu)])
        self.up = eqx.nn.ConvTranspose2d(4, 4, 2, stride=2, key=key)

    def __call__(self, x):
        x = self.down(x)
        return jnp.concatenate([x, self.up(self.middle(x))])


JITTED = eqx.filter_jit(lambda m, x: jax.vmap(lambda example: called(m, example))(x))


@pytest.fixture(scope="module")
def scanned():
    return Scanned(jax.random.key(0))


@pytest.fixture(scope="module")
def precise(scanned):
    """The network in double precision."""
    with jax.enable_x64(True):
        return jax.tree.map(lambda x: x.astype(float) if eqx.is_inexact_array(x) else x, scanned)


def test_values_in_a_scan_equal_a_forward_pass_by_hand(precise):
    with jax.enable_x64(True):
        layers = representations(precise, TOKENS, "*")
        values, logits = eqx.filter_jit(jax.vmap(partial(by_hand, precise, same)))(TOKENS)
        for name, array in values.items():
            np.testing.assert_allclose(layers[name], array, rtol=0, atol=1e-12)
            assert layers.iterations[name] == (1 - array.ndim,)
        # The residual stream is named after what enters the loop, and its result after the block.
        np.testing.assert_array_equal(layers["embed"], layers["blocks.norms[0]()"])
        by_head = layers["blocks.second"] @ precise.head.weight.T
        np.testing.assert_allclose(by_head, logits, atol=1e-12)


def test_iterations_are_layers_of_their_own(scanned):
    layers = representations(scanned, TOKENS, "blocks.first()")
    assert list(layers.unrolled()) == [f"blocks.first() {index}" for index in range(3)]
    options = {"positions": "neurons", "baseline": False}
    table = pairwise(layers, "linear_cka", **options)
    first, last = (layers["blocks.first()"][:, index] for index in (0, 2))
    options |= {"num_blocks": None, "p_values": False, "members": False}
    pair = compare(first, last, "linear_cka", **options)
    value = table.between("blocks.first() 0", "blocks.first() 2")
    np.testing.assert_allclose(value, pair.values, atol=1e-6)


def test_dictionaries_of_inputs_and_several_outputs():
    model = Encoder(jax.random.key(0))
    layers = representations(model, BATCH)
    assert list(layers) == ["embed", "layer", "layer:2", "outputs.pooled", "outputs.tokens"]
    # The axes of an inner `vmap` are in front, wherever the model has them.
    values = representations(model, BATCH, "layer():*")
    assert list(values) == ["layer():2"]
    np.testing.assert_allclose(
        values["layer():2"], layers["layer"] @ model.layer.weight.T, atol=1e-6
    )
    first = representations(model, BATCH, "layer()")["layer()"]
    np.testing.assert_allclose(first, layers["embed"] @ model.layer.weight.T, atol=1e-6)
    pair = representations(lambda xs: (xs[0] @ xs[1], xs[1]), (np.ones((4, 3)), np.ones((4, 3))))
    assert {name: array.shape for name, array in pair.items()} == {
        "outputs[0]": (4,),
        "outputs[1]": (4, 3),
    }


MODELS = {
    "scanned": lambda: (Scanned(jax.random.key(0)), TOKENS),
    "encoder": lambda: (Encoder(jax.random.key(0)), BATCH),
    "U-Net": lambda: (UNet(jax.random.key(0)), DRAWS.random((4, 2, 4, 4), np.float32)),
    "BatchNorm with state": lambda: made("residual convolutional"),
    "recurrent": lambda: made("gated recurrent"),
}


def vision_transformer():
    vit = pytest.importorskip("equimo.models.vit")
    sizes = {"img_size": 32, "in_channels": 3, "dim": 48, "patch_size": 8, "num_classes": 10}
    key = jax.random.key(0)
    model = vit.VisionTransformer(**sizes, num_heads=[4], depths=[3], key=key)
    return model, DRAWS.random((4, 3, 32, 32), np.float32)


@pytest.mark.parametrize("kind", [*MODELS, pytest.param("ViT", marks=pytest.mark.full)])
def test_every_called_module_is_listed_and_the_identity_changes_no_bit(kind):
    model, inputs = MODELS[kind]() if kind in MODELS else vision_transformer()
    shapes = layer_shapes(model, jax.tree.map(lambda array: array[0], inputs))
    _, modules = with_marks(model, "recorder")
    uncalled = {"encoder": {"unused()"}, "ViT": {"pos_drop()"}}
    assert set(modules) - set(shapes) == uncalled.get(kind, set())
    layers = representations(model, inputs, "*")
    assert {name: array.shape[1:] for name, array in layers.items()} == {
        name: struct.shape for name, struct in shapes.items()
    }
    intervened = intervene(model, {name: lambda value: value for name in shapes if "()" in name})
    outputs = jax.tree.leaves(JITTED(model, inputs))
    replaced = jax.tree.leaves(JITTED(intervened, inputs))
    recorded = [layers[name] for name in shapes if name.startswith(("logits", "outputs"))]
    for arrays in zip(outputs, replaced, recorded, strict=True):
        np.testing.assert_array_equal(arrays[0], arrays[1])
        np.testing.assert_array_equal(arrays[0], arrays[2])


def test_names_select_layers_and_unknown_ones_raise_with_the_nearest():
    model, x = eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0)), np.ones((4, 4), np.float32)
    for at, names in (
        ("layers[1]*", ["layers[1]()", "layers[1]"]),  # brackets are no set of characters
        (["logits", "layers[?]"], ["layers[0]", "layers[1]", "logits"]),
        ("features", ["layers[1]"]),
        (lambda name, shape: shape == (3,), ["layers[2]()", "logits"]),
    ):
        assert list(representations(model, x, at)) == names
    nearest = r"the nearest are ('[^']+', )*'layers\[1\]\(\)'(, '[^']+')*, got 'layer\[1\]\(\)'"
    with pytest.raises(ValueError, match=f"`at` must name layers, of which {nearest}") as error:
        representations(model, x, ["logits", "layer[1]()"])
    assert str(error.value).count("', '") == 4
    with pytest.raises(ValueError, match="`at` must hold at least one pattern, got none"):
        representations(model, x, [])
    with pytest.raises(ValueError, match="`at` must be True for at least one layer, got none"):
        representations(model, x, lambda name, shape: False)


def test_layer_shapes_compute_nothing_and_a_second_call_compiles_nothing(scanned):
    assert not compilations(lambda: layer_shapes(scanned, TOKENS[0]))
    assert len(compilations(lambda: representations(scanned, TOKENS[:3], "*norms*"))) == 1
    assert not compilations(lambda: representations(scanned, TOKENS[:3], "*norms*"))
    lines = repr(layer_shapes(scanned, TOKENS[0])).splitlines()
    (line,) = (line for line in lines if line.startswith("blocks() "))
    assert line.split() == ["blocks()", "(3,", "6,", "8)", "float32", str(3 * 6 * 8 * 4)]


def test_members_and_calls_that_close_over_values():
    make = eqx.filter_vmap(lambda key: LINEAR(4, 3, key=key))
    models, x, factor = make(jax.random.split(jax.random.key(0), 2)), np.ones((4, 4)), [1.0]

    def call(m, x):
        return m(factor[0] * x)

    for factor[0] in (1.0, 2.0):  # a cached program would hold the first
        layers = member_representations(models, x, "logits", call=call)
        expected = factor[0] * x @ np.swapaxes(models.weight, 1, 2)
        np.testing.assert_allclose(layers["logits"], expected, rtol=1e-5)


def test_code_types_and_fields_of_modules_stay(scanned):
    marked = with_marks(scanned, "recorder")[0].blocks.attention
    assert isinstance(marked, eqx.nn.MultiheadAttention)
    assert set(vars(marked)) == set(vars(scanned.blocks.attention))
    # Compiled functions within a model are cached by types.
    assert type(marked) is type(with_marks(scanned, "recorder")[0].blocks.attention)


def test_one_position_and_one_iteration_are_patched(scanned):
    clean = representations(scanned, TOKENS, "blocks.second()")["blocks.second()"][0]

    def patch(value, iteration):
        patched = value.at[2].set(clean[iteration, 2])
        return jnp.where(iteration == 1, patched, value)

    def change(name, depth, value):
        is_patched = name == "blocks.second()" and depth == 1
        return value.at[2].set(clean[1, 2]) if is_patched else value

    patched = intervene(scanned, {"blocks.second()": patch})
    # Later interventions join earlier ones.
    patched = intervene(patched, {"head()": lambda value: 2 * value})
    _, logits = eqx.filter_jit(jax.vmap(partial(by_hand, scanned, change)))(TOKENS)
    np.testing.assert_allclose(JITTED(patched, TOKENS), 2 * logits, atol=1e-5)
    assert np.abs(2 * JITTED(scanned, TOKENS) - 2 * logits).max() > 1e-3
    second = intervene(Encoder(jax.random.key(0)), {"layer():2": jnp.zeros_like})
    np.testing.assert_array_equal(JITTED(second, BATCH)["tokens"], 0)


def test_the_gradient_by_a_scale_equals_the_finite_difference(precise):
    with jax.enable_x64(True):

        def loss(scale):
            scaled = intervene(precise, {"blocks.attention()": lambda value: scale * value})
            return jnp.sum(jnp.sin(jax.vmap(scaled)(TOKENS)))

        gradient = jax.jit(jax.grad(loss))(1.0)
        function = jax.jit(loss)
        difference = (function(1 + 1e-5) - function(1 - 1e-5)) / 2e-5
        np.testing.assert_allclose(gradient, difference, rtol=1e-6)


def test_names_stay_in_a_model_with_interventions():
    model, x = eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0)), np.ones((2, 4), np.float32)
    patched = intervene(model, {"layers[1]()": lambda value: 2 * value})
    assert list(layer_shapes(patched, x[0])) == list(layer_shapes(model, x[0]))
    value = representations(patched, x, "layers[2]()")["layers[2]()"]
    np.testing.assert_array_equal(value, jax.vmap(patched)(x))
    stateful = eqx.nn.make_with_state(eqx.nn.BatchNorm)(4, axis_name="batch", mode="ema")
    with pytest.raises(TypeError, match="get one example: it holds the state, got 2 arguments"):
        intervene(stateful, {})(x[0], stateful[1])


def test_wrong_interventions_are_refused():
    model, x = eqx.nn.MLP(4, 3, 5, 2, key=jax.random.key(0)), np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"`functions` must name layers, .* got 'layer\[1\]\(\)'"):
        intervene(model, {"layer[1]()": jnp.tanh})
    with pytest.raises(TypeError, match=r"`functions\['layers\[1\]\(\)'\]` must be a function"):
        intervene(model, {"layers[1]()": 3})
    with pytest.raises(TypeError, match="must return an array, got None"):
        intervene(model, {"layers[1]()": lambda value: None})(x)
    for name, function, message in (
        ("layers[1]():2", jnp.tanh, r"must name layers, .* got 'layers\[1\]\(\):2'"),
        ("layers[1]()", lambda v: v[:1], r"must return an array of shape \(5,\) and dtype float32"),
        ("layers[1]()", lambda v: v > 0, r"dtype float32, got \(5,\) and bool"),
        ("layers[1]()", lambda v, iteration: v, "must take one argument outside of a `scan`"),
    ):
        with pytest.raises(ValueError, match=message):
            intervene(model, {name: function})(x)
