"""Groups grow, or are refused by name; sizes that modules keep follow."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import RUN, ResidualCNN, change, numpy_draws, one

from dissociation import rewrites
from dissociation.rewrites import layer_inputs, neuron_groups

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

X = jnp.arange(5.0) - 1.7
A, B = jax.random.normal(jax.random.key(8), (8, 5)), jax.random.normal(jax.random.key(9), (3, 8))
relu = jax.nn.relu


@pytest.mark.parametrize(
    "call",
    [lambda p, x: p[0].T @ relu(p[0] @ x), lambda p, x: jax.nn.softplus(p[1]) @ relu(p[0] @ x)],
    ids=["tied", "positive"],
)
def test_sets_that_would_not_cancel_are_refused(call):
    """Models that read neurons otherwise than by multiplying and summing."""
    group = next(iter(neuron_groups([A, B], X, call=call).values()))
    assert not group.cancelling
    with pytest.raises(ValueError, match="`neurons_per_group` must be 1"):
        rewrites.add_nuisance(group, 2, 3, key=jax.random.key(0))
    alone = rewrites.add_nuisance(group, 2, key=jax.random.key(0))([A, B])
    np.testing.assert_allclose(call(alone, X), call([A, B], X), atol=1e-5)


def halves(p, x):
    first, second = jnp.split(p[0] @ x, 2)
    return p[1] @ jnp.concatenate([relu(first), jnp.tanh(second)])


@pytest.mark.parametrize(
    ("call", "some"),
    [
        (halves, True),
        (lambda p, x: p[1] @ jnp.roll(relu(p[0] @ x), 3), True),
        (lambda p, x: p[1] @ relu(p[0] @ x)[::-1], False),
    ],
)
def test_neurons_that_the_program_counts_grow_only_where_it_is_right(call, some):
    refused = 0
    for group in neuron_groups([A, B], X, call=call).values():
        try:
            grown = rewrites.duplicate(group, 2)([A, B])
        except ValueError as error:
            assert "`group` must be one whose n" in str(error)  # noqa: PT017
            refused += 1
        else:
            np.testing.assert_allclose(call(grown, X), call([A, B], X), atol=1e-5)
    assert (refused > 0) == some


def test_nuisance_is_drawn_from_traced_keys():
    model, _, groups = one("perceptron")
    group = groups["layers[0]"]
    nuisance = lambda key: eqx.filter(rewrites.add_nuisance(group, 2, key=key)(model), eqx.is_array)  # noqa: E731
    many = jax.jit(jax.vmap(nuisance))(jax.random.split(jax.random.key(0), 3))
    assert many.layers[0].weight.shape == (3, 10, 5)


def test_new_variances_are_those_of_present_neurons():
    call = lambda p, x: p[2] @ relu((p[0] @ x)[:, None] / jnp.sqrt(p[1] + 1e-5))[:, 0]  # noqa: E731
    params = [A, 0.5 + np.arange(8, dtype=np.float32)[:, None], B]
    (found,) = neuron_groups(params, X, call=call).values()
    wider = rewrites.add_nuisance(found, 8, key=jax.random.key(0))(params)
    assert (np.asarray(wider[1]) > 0).all()
    run = jax.jit(call)
    np.testing.assert_allclose(run(wider, X), run(params, X), atol=1e-5)


def test_static_sizes_of_a_perceptron_follow():
    model, _, groups = one("perceptron")
    half = rewrites.duplicate(groups["layers[1]"], 2)(model)
    assert half.width_size == 8  # one layer of two is wider
    wide = rewrites.duplicate(groups["layers[0]"], 2)(half)
    assert jax.tree.structure(wide) == jax.tree.structure(
        eqx.nn.MLP(5, 3, 16, 2, key=jax.random.key(0))
    )
    assert [(layer.in_features, layer.out_features) for layer in wide.layers] == [
        (5, 16),
        (16, 16),
        (16, 3),
    ]


def test_static_sizes_of_convolutions_and_their_normalisation_follow():
    model = eqx.nn.make_with_state(ResidualCNN)(jax.random.key(0))
    groups = neuron_groups(model, jnp.ones((1, 8, 8)))
    wide, _ = rewrites.duplicate(groups["convolutions[1]"], 2)(model)
    assert [c.out_channels for c in wide.convolutions] == [6, 16, 6]
    assert wide.norms[1].input_size == 16


@pytest.fixture(scope="module")
def transformer():
    """A transformer, its inputs, and its groups."""
    with numpy_draws():
        return one("transformer")


@pytest.mark.parametrize(
    ("name", "sizes"), [("query_proj", (8, 4, 4, 32)), ("value_proj", (4, 4, 8, 16))]
)
def test_static_sizes_of_attention_follow(transformer, name, sizes):
    model, _, groups = transformer
    wide = rewrites.duplicate(groups[f"blocks[0].attention.{name}"], 2)(model).blocks[0].attention
    assert (wide.num_heads, wide.qk_size, wide.vo_size, wide.query_proj.out_features) == sizes


def test_modules_that_keep_their_size_are_named_or_registered():
    class Keeps(eqx.Module):
        layers: list
        size: int = eqx.field(static=True)

        def __call__(self, x):
            return self.layers[1](jax.nn.relu(self.layers[0](x)).reshape(self.size))

    keys = jax.random.split(jax.random.key(0))
    model = Keeps([eqx.nn.Linear(5, 8, key=keys[0]), eqx.nn.Linear(8, 3, key=keys[1])], 8)
    group = neuron_groups(model, jnp.ones(5))["layers[0]"]
    with pytest.raises(
        TypeError,
        match="run with another number of neurons in layers.*[^.][.] If.*refitted.register",
    ):
        rewrites.duplicate(group, 2)(model)
    rewrites.refitted.register(
        Keeps, lambda module: Keeps(module.layers, module.layers[0].out_features)
    )
    wide = rewrites.duplicate(group, 2)(model)
    assert wide.size == 16
    np.testing.assert_allclose(wide(jnp.ones(5)), model(jnp.ones(5)), rtol=1e-5)


def test_phantom_neurons_show_a_pattern():
    model, inputs, groups = one("residual")
    pattern = jax.random.uniform(jax.random.key(0), (8, 2))
    rewritten = rewrites.add_phantom(groups["first[1]"], model, inputs[:8], pattern)(model)
    assert change(model, rewritten, inputs) < 1e-5
    seen = layer_inputs(rewritten, inputs[:8], ".first[1].weight").rows
    shown = seen @ rewritten.first[1].weight[-2:].T + rewritten.first[1].bias[None, -2:]
    np.testing.assert_allclose(shown, pattern, atol=1e-3)
    bilinear, inputs, groups = one("bilinear")
    with pytest.raises(ValueError, match="made by one matrix"):
        rewrites.add_phantom(groups["layers[0].left"], bilinear, inputs, jnp.ones((12, 1)))


def first_layer(model, inputs):
    """Return the activities of the first layer of a perceptron, [samples, neurons]."""
    layer = model.layers[0]
    return np.maximum(np.asarray(inputs) @ np.asarray(layer.weight).T + np.asarray(layer.bias), 0)


CLASSES = np.arange(30) * 7 % 5
ROWS = np.arange(30) // 5
PRODUCTS = {
    "classes": CLASSES[:, None] == CLASSES,
    "checkerboard": 0.5 + ((ROWS[:, None] + ROWS) % 2 == 0),
}
"""Blocks of permuted classes, and a checkerboard with its floor."""


def full_rank(dtype):
    """Return a perceptron, its first group, and inputs of full rank."""
    model = eqx.nn.MLP(40, 3, 50, 2, key=jax.random.key(3), dtype=dtype)
    inputs = jax.random.normal(jax.random.key(4), (30, 40), dtype)
    return model, neuron_groups(model, inputs[0])["layers[0]"], inputs


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.usefixtures("precision")
def test_products_of_activities_are_planted(dtype, name):
    model, group, inputs = full_rank(dtype)
    off = ~np.eye(30, dtype=bool)
    target = PRODUCTS[name].astype(dtype)
    rewritten = rewrites.plant_rsm(
        group, model, inputs, target, num_neurons=20, key=jax.random.key(0)
    )(model)
    assert change(model, rewritten, inputs) < (1e-3 if dtype == "float32" else 1e-10)
    correlations = []
    for network in (model, rewritten):
        hidden = first_layer(network, inputs)
        correlations.append(np.corrcoef((hidden @ hidden.T)[off], target[off])[0, 1])
    assert correlations[0] < 0.5
    assert correlations[1] > 0.99
    lengths = [np.linalg.norm(network.layers[0].weight, axis=1) for network in (model, rewritten)]
    assert lengths[1].max() <= 100.01 * lengths[0].mean()


def test_products_that_no_activities_have_are_refused():
    model, group, inputs = full_rank("float32")
    with pytest.raises(ValueError, match=r"`rsm` must have shape \(30, 30\)"):
        rewrites.plant_rsm(group, model, inputs, np.ones((3, 3), np.float32), key=jax.random.key(0))
    with pytest.raises(ValueError, match="`rsm` must be symmetric, non-negative"):
        rewrites.plant_rsm(
            group, model, inputs, -np.ones((30, 30), np.float32), key=jax.random.key(0)
        )


@pytest.fixture(scope="module")
def planted_on():
    """A perceptron, its first group, integer inputs, and a target."""
    with numpy_draws():
        model = eqx.nn.MLP(9, 3, 12, 2, key=jax.random.key(0))
    group = neuron_groups(model, np.ones(9, np.float32))["layers[0]"]
    inputs = np.arange(45).reshape(5, 9) ** 2 % 7
    return model, group, inputs, np.eye(5, dtype=np.float32)


@pytest.mark.parametrize("convert", [np.asarray, np.ndarray.tolist], ids=["integers", "lists"])
def test_patterns_are_planted_on_inputs_of_any_kind(planted_on, convert):
    model, group, inputs, target = planted_on
    rewrite = rewrites.plant_rsm(
        group, model, convert(inputs), target, num_neurons=5, key=jax.random.key(1)
    )
    hidden = first_layer(rewrite(model), inputs)
    products = hidden @ hidden.T
    assert np.abs(products / products[0, 0] - target).max() < 0.1


def test_patterns_are_planted_in_half_precision(planted_on):
    model, _, inputs, target = planted_on
    half = jax.tree.map(
        lambda leaf: np.asarray(leaf, np.float16) if eqx.is_inexact_array(leaf) else leaf, model
    )
    examples = inputs.astype(np.float16)
    group = neuron_groups(half, examples[0])["layers[0]"]
    options = {"num_neurons": 5, "largest": 4.0, "key": jax.random.key(1)}
    wide = rewrites.plant_rsm(group, half, examples, target, **options)(half)
    assert wide.layers[0].weight.dtype == jnp.float16
    np.testing.assert_allclose(RUN(wide, examples), RUN(half, examples), atol=2e-2)


def test_inputs_and_groups_that_allow_no_pattern_are_refused(planted_on):
    model, group, inputs, target = planted_on
    with pytest.raises(ValueError, match="`inputs` must be finite"):
        rewrites.plant_rsm(group, model, inputs * np.nan, target, key=jax.random.key(1))
    with pytest.raises(
        ValueError, match="`inputs` must lead to incoming weights that are not zero"
    ):
        rewrites.plant_rsm(group, model, inputs * 0.0, target, key=jax.random.key(1))
    silent = eqx.tree_at(
        lambda network: network.layers[0].weight, model, np.zeros((12, 9), np.float32)
    )
    with pytest.raises(ValueError, match="`group` must lead to incoming weights that are not zero"):
        rewrites.plant_rsm(group, silent, inputs, target, key=jax.random.key(1))


class Embedded(eqx.Module):
    """Sums over tokens of what is read of their embeddings, each looked up by a number."""

    table: jax.Array
    read: eqx.nn.Linear

    def __call__(self, tokens):
        return sum(self.read(relu(self.table[token])) for token in tokens)


class Tied(eqx.Module):
    """An embedding whose transpose gives the logits."""

    shared: eqx.nn.Shared

    def __init__(self, key):
        keys = jax.random.split(key)
        parts = eqx.nn.Embedding(7, 8, key=keys[0]), eqx.nn.Linear(8, 7, key=keys[1])
        self.shared = eqx.nn.Shared(parts, lambda pair: pair[1].weight, lambda pair: pair[0].weight)

    def __call__(self, tokens):
        embedding, head = self.shared()
        return head(sum(embedding(token) for token in tokens))


def convolutional(*parts, norm=None):
    """Convolutions of (inputs, outputs, groups), with ReLU between them."""
    keys = iter(jax.random.split(jax.random.key(0), len(parts)))
    layers = [
        layer
        for p in parts
        for layer in (eqx.nn.Conv1d(*p[:2], 3, groups=p[2], key=next(keys)), LAMBDA)
    ][:-1]
    return eqx.nn.Sequential(layers[:1] + ([norm] if norm else []) + layers[1:])


def dense(norm):
    keys = jax.random.split(jax.random.key(0))
    return eqx.nn.Sequential(
        [eqx.nn.Linear(5, 8, key=keys[0]), norm, LAMBDA, eqx.nn.Linear(8, 3, key=keys[1])]
    )


def normed(weights_of):
    """Two hidden layers; the weights of the second are normalised."""
    keys = jax.random.split(jax.random.key(0), 3)
    first, second, third = (
        eqx.nn.Linear(i, o, key=key) for i, o, key in zip((5, 8, 6), (8, 6, 3), keys, strict=True)
    )
    return eqx.nn.Sequential([first, LAMBDA, weights_of(second), LAMBDA, third])


LAMBDA = eqx.nn.Lambda(relu)
SPECTRAL = eqx.nn.make_with_state(normed)(
    lambda layer: eqx.nn.SpectralNorm(layer, "weight", key=jax.random.key(1))
)
TOKENS, SIGNALS, VECTORS = (
    jnp.arange(12).reshape(6, 2) % 7,
    jnp.sin(jnp.arange(144.0)).reshape(6, 2, 12),
    A[:6],
)
HOLD_SIZES = {
    "several of each": (convolutional((2, 6, 1), (6, 12, 6), (12, 3, 1)), SIGNALS, 2),
    "grouped": (convolutional((2, 6, 1), (6, 8, 2), (8, 3, 1)), SIGNALS, 3),
    "grouped, then depthwise": (
        convolutional((2, 6, 1), (6, 8, 2), (8, 8, 8), (8, 3, 1)),
        SIGNALS,
        3,
    ),
    "channels by themselves": (
        convolutional((2, 6, 1), (6, 3, 1), norm=eqx.nn.GroupNorm(6, 6)),
        SIGNALS,
        1,
    ),
    "slopes": (dense(eqx.nn.Lambda(eqx.nn.PReLU(jnp.full(8, 0.3)))), VECTORS, 1),
    "lengths of weights": (
        normed(eqx.nn.WeightNorm),
        VECTORS,
        1,
    ),  # not of those who read a length's weights
    "largest stretch of weights": (SPECTRAL, VECTORS, 2),
    "tokens": (Embedded(A[:7], eqx.nn.Linear(5, 3, key=jax.random.key(0))), TOKENS, 1),
    "tied": (Tied(jax.random.key(0)), TOKENS, 1),
}
"""Models whose modules or programs hold sizes, inputs, and how many groups grow."""


SLOW = ("grouped", "grouped, then depthwise")
"""Models whose groups are like those of "several of each", and take longer."""
GROUPS = [
    pytest.param(name, index, marks=pytest.mark.slow if name in SLOW else ())
    for name, (_, _, count) in HOLD_SIZES.items()
    for index in range(count)
]


@pytest.mark.parametrize(("name", "index"), GROUPS)
@pytest.mark.slow
def test_modules_that_hold_sizes_grow(name, index):
    """Neurons are duplicated, and new ones added to the wider group that is found in the wider model."""
    model, inputs, count = HOLD_SIZES[name]
    able = [
        group for group in neuron_groups(model, inputs[0]).values() if group.sharing is not None
    ]
    assert len(able) == count
    group = able[index]
    grown = rewrites.duplicate(group, 1.5)(model)
    again = neuron_groups(grown, inputs[0])[group.name]
    assert again.size > group.size
    wide = rewrites.add_nuisance(again, 2, key=jax.random.key(1))(grown)
    assert change(model, wide, inputs) < 1e-5


@pytest.mark.parametrize("norm", [eqx.nn.LayerNorm(8), eqx.nn.GroupNorm(2, 8)])
def test_neurons_that_a_statistic_is_taken_over_do_not_grow(norm):
    own = [
        group for group in neuron_groups(dense(norm), VECTORS[0]).values() if group.size != 2
    ]  # no whole groups
    assert own
    for group in own:
        with pytest.raises(
            ValueError, match="widened, got .*: a statistic is taken over its neurons.$"
        ):
            rewrites.duplicate(group, 2)


COUNTING = {
    "a number": lambda y, n, x: y / n,
    "a constant": lambda y, n, x: y * np.full(2, 1.0 / n),
    "a large constant": lambda y, n, x: y * jnp.asarray(np.full((70_000, 2), 1.0 / n))[0],
    "the last": lambda y, n, x: y + jnp.arange(9.0)[jnp.minimum(8, n + 0 * x[0].astype(int))],
    "a power": lambda y, n, x: y ** (n - 5),
    "turns of a loop": lambda y, n, x: jax.lax.fori_loop(0, n, lambda i, c: c * 1.1, y),
    "a sum of ones": lambda y, n, x: y / jnp.sqrt(jnp.ones(n).sum()),
    "copies that are summed": lambda y, n, x: jnp.broadcast_to(y, (n, 2)).sum(0),
    "the shape of the result": lambda y, n, x: jnp.broadcast_to(y, (n, 2)),
    "a stretch of the inputs": lambda y, n, x: y + x[: n // 2].sum(),
    "another order of the results": lambda y, n, x: jnp.roll(y, n + 1),
    "a case": lambda y, n, x: y * jax.lax.cond(x.sum() > 0, lambda: float(n), lambda: 1.0),
}


@pytest.mark.parametrize("name", COUNTING)
def test_programs_that_count_neurons_are_refused(name):
    model = {
        "w": jax.random.normal(jax.random.key(0), (20, 6)),
        "v": jax.random.normal(jax.random.key(1), (6, 2)),
    }
    x = jax.random.normal(jax.random.key(3), (20,))

    def call(p, x, number=None):
        return COUNTING[name](relu(x @ p["w"]) @ p["v"], number or p["w"].shape[1], x)

    (group,) = neuron_groups(model, x, call=call).values()
    for rewrite in (
        rewrites.duplicate(group, 1.5),
        rewrites.add_nuisance(group, 3, key=jax.random.key(2)),
    ):
        with pytest.raises(
            ValueError, match="whose number of neurons the function does not depend on"
        ):
            rewrite(model)
    plain = lambda p, x: call(p, x, 6)  # noqa: E731
    (group,) = neuron_groups(model, x, call=plain).values()
    np.testing.assert_allclose(
        plain(rewrites.duplicate(group, 1.5)(model), x), plain(model, x), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("read", [lambda v: 1 / v, lambda v: jnp.abs(v) ** -0.5])
def test_what_is_divided_by_is_not_silenced_by_zeros(read):
    call = lambda p, x: jax.nn.relu(x @ p["w"]) @ read(p["v"])  # noqa: E731
    model = {
        "w": jax.random.normal(jax.random.key(0), (3, 4)),
        "v": jax.random.normal(jax.random.key(1), (4, 2)),
    }
    (group,) = neuron_groups(model, jnp.ones(3), call=call).values()
    for rewrite in (
        rewrites.duplicate(group),
        rewrites.add_nuisance(group, 2, key=jax.random.key(0)),
    ):
        np.testing.assert_allclose(
            call(rewrite(model), jnp.ones(3)), call(model, jnp.ones(3)), rtol=1e-5
        )


@pytest.mark.parametrize(
    "call",
    [lambda p, x: p[1] @ jnp.sqrt(20 - p[0] @ x), lambda p, x: p[1] @ (jnp.log(9 - p[0]) @ x)],
)
def test_new_neurons_that_are_no_numbers_are_refused(call):
    model = [jnp.abs(A), B]
    assert jnp.isfinite(call(model, jnp.abs(X))).all()
    group = next(iter(neuron_groups(model, X, call=call).values()))
    with pytest.raises(ValueError, match="`group` must be one whose new neurons are finite"):
        rewrites.add_nuisance(group, 8, key=jax.random.key(0), incoming_std=40.0)(model)


def test_new_neurons_are_positive_where_all_are():
    call, model = lambda p, x: p[1] @ (jnp.log(p[0]) @ x), [jnp.abs(A), B]
    group = next(iter(neuron_groups(model, X, call=call).values()))
    grown = rewrites.add_nuisance(group, 8, key=jax.random.key(0))(model)
    assert grown[0].shape == (16, 5)
    assert (grown[0] > 0).all()
    np.testing.assert_allclose(call(grown, X), call(model, X), rtol=1e-5)
    signed = rewrites.add_nuisance(group, 8, key=jax.random.key(0))([A, B])
    assert (signed[0][8:] < 0).any()
