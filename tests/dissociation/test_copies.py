"""Copies of neurons that may move separately are told apart, and those that must move alike are not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zoo import one

from dissociation import rewrites
from dissociation.rewrites import _control_flow as control_flow
from dissociation.rewrites import _copies as copies
from dissociation.rewrites import neuron_groups

pytestmark = pytest.mark.usefixtures("drawn_by_numpy")

TIME, WIDTH, HEADS, DIM, LAYERS, HIDDEN = 5, 6, 3, 4, 3, 7
ATTENTION = {"q": "ehd", "k": "ehd", "v": "ehd", "o": "hde", "head": "eo"}
STACK = {"in": "ec", "a": "lcn", "b": "lnc", "head": "co"}
SINGLE = {"u": "ehd", "o": "hdo"}
SIZES = dict(
    zip(
        "tehdlncogf",
        (TIME, WIDTH, HEADS, DIM, LAYERS, HIDDEN, 5, 2, 2, 3 * HEADS * DIM),
        strict=True,
    )
)


def weights(kinds):
    """Random arrays, their axes by letters."""
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=[SIZES[k] for k in letters]) / 2)
        for name, letters in kinds.items()
    }


def projected(p, x):
    return [jnp.einsum("te,ehd->thd", x, p[name]) for name in "qkv"]


def read_out(p, scores, v):
    return jnp.einsum("hts,shd,hde->te", jax.nn.softmax(scores), v, p["o"]) @ p["head"]


def attention(p, x, change=lambda y: y):
    q, k, v = projected(p, x)
    return read_out(p, jnp.einsum("thd,shd->hts", change(q), change(k)), v)


def mapped(p, x, loop=jax.vmap):
    def one(p):
        q, k, v, o = p
        return jax.nn.softmax((x @ q) @ (x @ k).T) @ (x @ v) @ o

    q, k, v = [p[name].transpose(1, 0, 2) for name in "qkv"]
    return loop(one)((q, k, v, p["o"])).sum(0) @ p["head"]


def all_with_all(p, x):
    q, k, v = projected(p, x)
    return read_out(p, jnp.einsum("thd,sgd->htgs", q, k).mean(2), v)


def shared_bias(p, x):
    return attention(p, x, lambda y: y + p["bias"][None, None])


def fused(p, x):
    q, k, v = jnp.moveaxis((x @ p["qkv"]).reshape(TIME, 3, HEADS, DIM), 1, 0)
    return read_out(p, jnp.einsum("thd,shd->hts", q, k), v)


def fused_by_heads(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(TIME, HEADS, 3 * DIM), 3, -1)
    return read_out(p, jnp.einsum("thd,shd->hts", q, k), v)


def residual(p, x):
    def layer(h, w):
        return h + jax.nn.relu(h @ w[0]) @ w[1], None

    return jax.lax.scan(layer, x[0] @ p["in"], (p["a"], p["b"]))[0] @ p["head"]


def with_outputs(p, x):
    def layer(h, w):
        hidden = jax.nn.relu(h @ w[0])
        return h + hidden @ w[1], hidden

    h, hidden = jax.lax.scan(layer, x[0] @ p["in"], (p["a"], p["b"]), reverse=True)
    return h @ p["head"] + jnp.sum(p["r"] * (hidden if p["r"].ndim == 2 else hidden.mean(0)))


def carried(p, x):
    def layer(carry, w):
        hidden = jax.nn.relu(carry[0] @ w[0] + carry[1])
        return (carry[0] + hidden @ w[1], hidden), None

    return (
        jax.lax.scan(layer, (x[0] @ p["in"], jnp.zeros(HIDDEN)), (p["a"], p["b"]))[0][0] @ p["head"]
    )


def one_late(p, x):
    """A loop hands on what it was given: its first turn shows no neurons of any layer."""
    last, shown = jax.lax.scan(lambda h, a: (jax.nn.relu(x[0] @ a), h), jnp.ones(HIDDEN), p["a"])
    return jnp.einsum("ln,lno->o", shown * p["g"], p["r"]) + last @ p["last"]


def begun_at_the_end(p, x):
    """What the loop begins with meets the last layer alone."""

    def layer(carry, w):
        hidden = jax.nn.relu(carry[0] @ w[0] + carry[1])
        return (carry[0] + hidden @ w[1], jnp.zeros(HIDDEN)), None

    return (
        jax.lax.scan(layer, (x[0] @ p["in"], p["start"]), (p["a"], p["b"]), reverse=True)[0][0]
        @ p["head"]
    )


def recurrent(p, x):
    """Blocks of a matrix that could move apart: neurons that meet each other in one array move alike, which is safe."""

    def turn(h, x):
        return jnp.tanh(
            jnp.einsum("hd,hdf->hf", h, p["w"]) + jnp.einsum("e,ehd->hd", x, p["u"])
        ), None

    return jnp.einsum("hd,hdo->o", jax.lax.scan(turn, jnp.zeros((HEADS, DIM)), x)[0], p["o"])


def between(change):
    """Heads of neurons, something done to them, and what reads them."""
    return lambda p, x: jnp.einsum(
        "hd,hdo->o", change(jnp.einsum("e,ehd->hd", x[0], p["u"])), p["o"]
    )


def over_times(change):
    """The same at every time; what is done may depend on the input."""
    return lambda p, x: jnp.einsum(
        "thd,hdo->o", change(jnp.einsum("te,ehd->thd", x, p["u"]), x), p["o"]
    )


def cut(y):
    """The last two heads, the first, each by its number or from the end."""
    last, first, also = (
        jax.lax.dynamic_slice(y, (at, 0), (n, DIM)) for at, n in ((-2, 2), (0, 1), (1, 2))
    )
    return jnp.tanh(jnp.concatenate([last, first])) + jnp.tanh(jnp.concatenate([also, y[:1]]))


def repeated(y):
    return jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] + y)), (0, jnp.zeros_like(y))
    )[1]


MIXING = np.arange(1.0, 10.0).reshape(HEADS, HEADS, 1)
HEAD = [(HEADS, 1), (DIM, HEADS), (DIM, HEADS)]
BOTH = [(HEADS, DIM), (DIM, HEADS)]
LAYERED = [(5, 1), (HIDDEN, LAYERS)]
FUSED = {"qkv": "ef", "o": "hde", "head": "eo"}
SEPARATE = {
    "attention": (attention, ATTENTION, [*HEAD, (WIDTH, 1)]),
    "attention, mapped over heads": (mapped, ATTENTION, [*HEAD, (WIDTH, 1)]),
    "attention, heads in a loop": (
        lambda p, x: mapped(p, x, lambda f: lambda y: jax.lax.map(f, y)), ATTENTION, [*HEAD[1:], (WIDTH, 1)]),
    # Queries and keys of each head are one copy, values are another.
    "fused": (fused, FUSED, [(HEADS, 1), (DIM, 2 * HEADS), (WIDTH, 1)]),
    "fused by heads": (fused_by_heads, FUSED, [*HEAD, (WIDTH, 1)]),
    "stack": (residual, STACK, LAYERED),
    "stack, its hidden neurons read outside": (with_outputs, STACK | {"r": "ln"}, LAYERED),
    "stack, from the end, begun with a bias": (begun_at_the_end, STACK | {"start": "n"}, LAYERED),
    "a loop one turn late": (one_late, {"a": "len", "g": "ln", "r": "lno", "last": "no"}, [(HIDDEN, LAYERS + 1)]),
    "recurrent": (recurrent, SINGLE | {"w": "hdd"}, [(HEADS, 1), (DIM, 1)]),
    "cut at known places": (between(cut), SINGLE, [(DIM, HEADS), (2, DIM)]),
    "two of three change places": (
        between(lambda y: jax.lax.cond(y.sum() > 0, lambda z: jnp.concatenate([z[1::-1], z[2:]]), jnp.tanh, y)), SINGLE,
        [(DIM, 2)]),
    "one head or its mirror": (between(lambda y: jnp.tanh(y) + jnp.tanh(y[::-1])), SINGLE, [(DIM, 2)]),
    "read at times that are computed": (
        lambda p, x: between(lambda y: jnp.tanh(y))(p, x[jnp.argmax(x[:, 0])][None]), SINGLE, BOTH),
    "side by side": (
        lambda p, x: jnp.sum(jnp.tanh(jnp.tile(jnp.einsum("e,ehd->hd", x[0], p["u"]), (1, 2))).reshape(HEADS, 2, DIM)
                             .sum(1)[..., None] * p["o"], (0, 1)), SINGLE, BOTH),
} | {name: (between(change), SINGLE, BOTH) for name, change in {
    "padded and cut": lambda y: jnp.tanh(jnp.pad(y, ((1, 1), (0, 0)))[1:-1]),
    "stacked": lambda y: jnp.tanh(jax.lax.slice_in_dim(jnp.stack([y, jnp.sin(y)]), 0, 2)).sum(0),
    "a loop that keeps heads apart": repeated,
    "a sum over no axes": lambda y: jnp.tanh(jnp.sum(y, axis=())),
    "heads in another order": lambda y: jnp.tanh(y[jnp.array([2, 0, 1])]),
    "windows over no heads": lambda y: jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 1), (1, 1), "VALID"),
}.items()} | {name: (over_times(change), SINGLE, BOTH) for name, change in {
    "a cache of values": lambda v, x: jnp.tanh(
        jax.lax.dynamic_update_slice(jnp.zeros((8, HEADS, DIM)), v, (jnp.argmax(x[:, 0]), 0, 0))),
    "summed by segments": lambda v, x: jnp.tanh(jax.ops.segment_sum(v, jnp.argsort(x[:, 0]) // 2, 3)),
    "picked by each head at a time of its own": lambda v, x: jnp.take_along_axis(
        v, jnp.argmax(v, 0, keepdims=True), 0),
    "sorted, the largest, and spectra over time": lambda v, x: (
        jnp.sort(v, 0) + jax.lax.top_k(v, 1, axis=0)[0] + jnp.abs(jnp.fft.fft(v, axis=0))),
}.items()}  # fmt: skip
"""A function, its weights, and sizes and copies of its groups."""


TIED = {
    "scores of all heads with all": (all_with_all, ATTENTION, ("k", "q")),
    "a bias for all heads": (shared_bias, ATTENTION | {"bias": "d"}, ("q", "k", "bias")),
    "hidden neurons carried": (carried, STACK, ("a", "b")),
    "hidden neurons averaged over layers": (with_outputs, STACK | {"r": "n"}, ("a", "b")),
} | {name: (between(change), SINGLE, ("u", "o")) for name, change in {
    "softmax over heads": lambda y: jax.nn.softmax(y, 0),
    "sum over heads": lambda y: jnp.tanh(y + y.sum(0, keepdims=True)),
    "sorted over heads": lambda y: jnp.sort(y, 0),
    "cumulated over heads": lambda y: jnp.tanh(jnp.cumsum(y, 0)),
    "a mean over the neighbours": lambda y: jax.lax.reduce_window(y, 0.0, jax.lax.add, (2, 1), (1, 1), "SAME"),
    "the largest head": lambda y: y * (jnp.argmax(y, 0) + 1.0)[None],
    "read from another head": lambda y: jnp.tanh(y + y[jnp.argmax(y.sum(1))][None]),
    "added to a head": lambda y: jnp.tanh(y.at[jnp.argmax(y.sum(1))].add(y.sum(0))),
    "spectra over heads": lambda y: jnp.abs(jnp.fft.fft(y, axis=0)),
    "written at a place": lambda y: jax.lax.dynamic_update_slice(jnp.tanh(y), y[1:2], (0, 0)),
    "mixed by a convolution over neurons": lambda y: jnp.tanh(
        jax.lax.conv_general_dilated(y[None], MIXING, (1,), "VALID")[0]),
    "one branch of two mirrored": lambda y: jax.lax.cond(y.sum() > 0, lambda z: jnp.roll(z, 1, 0), lambda z: z, y),
}.items()}  # fmt: skip
"""A function, its weights, and the arrays whose copies are tied."""


def changes(function, model):
    """The largest change of an output by a rewrite of the model, of their size: one compiled program."""
    inputs = np.random.default_rng(1).normal(size=(8, TIME, WIDTH))
    run = jax.jit(jax.vmap(function, (None, 0)))
    before = np.asarray(run(model, inputs))
    return lambda rewritten: np.abs(run(rewritten, inputs) - before).max() / np.abs(before).max()


def separate_rewrites(group):
    """Of every copy by itself."""
    rng = np.random.default_rng(3)
    yield rewrites.permute(group, key=jax.random.key(3))
    if group.scaling is not None:
        yield rewrites.scale(group, np.exp(rng.normal(size=(group.copies, group.size))))
    if group.linear is not None:
        noise = rng.normal(size=(group.copies, group.size, group.size))
        yield rewrites.rotate(group, np.eye(group.size) + 0.3 * noise)


@pytest.mark.parametrize("name", SEPARATE)
@pytest.mark.slow
def test_copies_move_separately(name):
    """Sizes and copies of the groups are as wanted, and each copy moves by itself without changing the function."""
    function, kinds, wanted = SEPARATE[name]
    with jax.enable_x64(True):
        model = weights(kinds)
        groups, change = (
            neuron_groups(model, jnp.ones((TIME, WIDTH)), call=function),
            changes(function, model),
        )
        assert sorted((group.size, group.copies) for group in groups.values()) == sorted(wanted)
        for group in groups.values():
            for rewrite in separate_rewrites(group):
                assert change(rewrite(model)) < 1e-12, (group, rewrite)


def test_random_rotations_turn_each_copy_by_itself():
    function, kinds, _ = SEPARATE["attention"]
    with jax.enable_x64(True):
        model = weights(kinds)
        groups = neuron_groups(model, jnp.ones((TIME, WIDTH)), call=function)
        change = changes(function, model)
        linear = [group for group in groups.values() if group.linear is not None]
        values = next(group for group in linear if "['v']" in {slot.path for slot in group.slots})
        turned = rewrites.rotate(values, key=jax.random.key(3))(model)
        assert change(turned) < 1e-12
        # The rotation of a head: v of the head is turned by it.
        turns = [
            np.linalg.lstsq(model["v"][:, head], turned["v"][:, head])[0] for head in range(HEADS)
        ]
        np.testing.assert_allclose(turns[0] @ turns[0].T, np.eye(DIM), atol=1e-10)
        assert np.abs(turns[0] - turns[1]).max() > 0.1


def forced(group):
    """A group whose copies are said to be separate, by the axis of heads or layers."""

    def copy(slot):
        beside = [k for k, size in enumerate(slot.shape) if size == HEADS and k != slot.axis]
        shape = [-1 if k in beside[:1] else 1 for k in range(len(slot.shape))]
        return np.arange(HEADS).reshape(shape) if beside else slot.copy

    slots = tuple(slot._replace(copy=copy(slot)) for slot in group.slots)
    return dataclasses.replace(group, slots=slots, copies=HEADS)


@pytest.mark.parametrize("name", TIED)
def test_copies_that_must_move_alike_do(name):
    """And would change the function if they did not."""
    function, kinds, paths = TIED[name]
    with jax.enable_x64(True):
        model = weights(kinds)
        groups, change = (
            neuron_groups(model, jnp.ones((TIME, WIDTH)), call=function),
            changes(function, model),
        )
        size, wanted = HIDDEN if "a" in paths else DIM, {f"['{path}']" for path in paths}
        (own,) = (
            g for g in groups.values() if g.size == size and wanted <= {s.path for s in g.slots}
        )
        assert own.copies == 1
        assert all(change(rewrite(model)) < 1e-12 for rewrite in separate_rewrites(own))
        assert change(rewrites.permute(forced(own), key=jax.random.key(3))(model)) > 1e-3


def test_slots_say_which_copy_is_where():
    _, _, groups = one("transformer")
    values = groups["blocks[0].attention.value_proj"]
    assert "4 neurons in each of 4 copies, permutable" in repr(values)
    made, bias, read = values.slots
    np.testing.assert_array_equal(made.copy, np.arange(4)[:, None])
    np.testing.assert_array_equal(bias.copy, np.arange(4))
    np.testing.assert_array_equal(read.copy, np.arange(4)[None])
    assert made.positions.shape == (4, 4)
    assert not any(slot.copy.any() for slot in groups["embedding"].slots)


def test_one_permutation_is_for_all_copies(monkeypatch):
    function, kinds, _ = SEPARATE["stack"]
    model, x = weights(kinds), jnp.ones((TIME, WIDTH))
    group = next(g for g in neuron_groups(model, x, call=function).values() if g.copies > 1)
    order = np.random.default_rng(0).permutation(HIDDEN)
    np.testing.assert_array_equal(
        rewrites.permute(group, order)(model)["a"], model["a"][:, :, order]
    )
    each = np.stack([order, order[::-1], np.arange(HIDDEN)])
    moved = rewrites.permute(group, each)(model)["a"]
    np.testing.assert_array_equal(
        moved, jnp.stack([model["a"][k][:, own] for k, own in enumerate(each)])
    )
    drawn = rewrites.permute(group, key=jax.random.key(0))(model)["a"]
    assert (
        len({tuple(np.argsort(drawn[k, 0]) - np.argsort(model["a"][k, 0])) for k in range(LAYERS)})
        > 1
    )
    scaled = rewrites.scale(group, jnp.array([1.0, 2.0, 3.0])[:, None] * jnp.ones((1, HIDDEN)))(
        model
    )
    np.testing.assert_allclose(
        scaled["a"], model["a"] * jnp.arange(1.0, 4.0)[:, None, None], rtol=1e-6
    )
    for make, wanted in (
        (lambda: rewrites.permute(group, each[:2])(model), "one for each of the 3 copies"),
        (
            lambda: rewrites.permute(group, each[None]),
            r"\[neurons\] or an array of integers \[copies, neurons\]",
        ),
        (lambda: rewrites.permute(group, np.zeros((3, HIDDEN), int)), "once"),
        (
            lambda: rewrites.scale(group, np.ones((2, HIDDEN)))(model),
            "one for each of the 3 copies",
        ),
    ):
        with pytest.raises(ValueError, match=wanted):
            make()
    monkeypatch.setattr(copies, "LONGEST", LAYERS - 1)  # turns of long loops are not told apart
    assert {group.copies for group in neuron_groups(model, x, call=function).values()} == {1}


def test_every_operation_that_is_known_has_a_rule_or_ties_copies():
    known = {*copies.RULES, *copies.PARTS, *copies.SKIPPED}
    assert set(control_flow.RULES) - known == {"iota"}
    assert not known - set(control_flow.RULES)
