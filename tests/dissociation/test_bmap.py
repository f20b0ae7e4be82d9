"""bmap against filter_vmap, a loop over members, and the compiler's account of memory."""

import logging
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation import bmap
from dissociation.training import _machine as memory

SIZE = 5
EACH = eqx.if_array(0)


def arange(*shape):
    return jnp.sin(jnp.arange(np.prod(shape), dtype=jnp.float32)).reshape(shape)


def assert_same(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        if not eqx.is_array(b):
            np.testing.assert_equal(a, b)
            continue
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        else:
            assert a.weak_type == b.weak_type
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


class Pair(eqx.Module):
    weight: jax.Array
    activation: object
    name: str = eqx.field(static=True)


def mlp(key):
    return eqx.nn.MLP(3, 2, 8, 1, use_bias=False, key=key)


def returns_everything(x, n):
    out = {
        "array": x,
        "number": n,
        "string": "s",
        "function": jnp.tanh,
        "nothing": None,
        "numpy": np.arange(2),
    }
    return out, [jnp.full(n, 2.0), x.astype(jnp.int32), x.sum() > 0]


def _cases():
    keys = jax.random.split(jax.random.key(3), SIZE)
    x, y = arange(SIZE, 4), arange(4, SIZE, 3)
    yield "static shape", lambda x, n: jnp.tile(x, n), (x, 3), {"in_axes": (0, None)}
    tree = {"a": x, "b": 2}, 3.0
    yield (
        "PyTree of axes",
        lambda p, s: p["a"] * s + p["b"],
        tree,
        {"in_axes": ({"a": 0, "b": None}, None)},
    )
    yield "dict by name", lambda a, b: a * b.sum(), (x, y), {"in_axes": {"b": 1}}
    yield "if_array(1)", lambda a, f: f(a), (y, jnp.tanh), {"in_axes": eqx.if_array(1)}
    yield "negative axes", lambda a, b: a.sum() + b.sum(), (x, y), {"in_axes": (-2, -2)}
    axes = {"in_axes": 1, "out_axes": (eqx.if_array(-2), {"c": 0})}
    yield "out_axes a tree", lambda b: (b, {"c": b.sum()}), (y,), axes
    axes = {"in_axes": (0, None), "out_axes": (0, None, None)}
    yield "out_axes None", lambda a, b: (a + b.sum(), b * 2, "s"), (x, y), axes
    yield "everything", returns_everything, (x, 3), {}
    yield (
        "weak type",
        lambda a, b: a * b,
        (jax.vmap(lambda _: 2.0)(x), jnp.arange(SIZE, dtype=jnp.bfloat16)),
        {},
    )
    numbers = np.arange(SIZE, dtype=np.float32), np.arange(2)
    yield "NumPy", lambda a, b: (a * 2, b), numbers, {"in_axes": (0, None), "out_axes": EACH}
    yield (
        "nothing mapped at all",
        lambda a, s: (a * 2, s),
        (x, "s"),
        {"in_axes": None, "out_axes": None},
    )
    yield (
        "typed keys on axis 1",
        lambda k: jax.random.split(k[0]),
        (keys[None],),
        {"in_axes": 1, "out_axes": 1},
    )
    yield (
        "shared keys",
        lambda a, k: (a, k),
        (x, keys[0]),
        {"in_axes": (0, None), "out_axes": (0, None)},
    )
    pair = Pair(arange(SIZE, 3), jnp.tanh, "pair")
    yield (
        "model in and out",
        lambda p: eqx.tree_at(lambda q: q.weight, p, p.weight * 2),
        (pair,),
        {},
    )
    yield "no arguments", lambda: jnp.ones(2), (), {"axis_size": SIZE}
    yield "empty axis", lambda a: a * 2, (jnp.zeros((0, 3)),), {}


CASES = {name: rest for name, *rest in _cases()}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_plain_and_jit_equal_filter_vmap(name):
    fun, args, options = CASES[name]
    wanted = eqx.filter_vmap(fun, **options)(*args)
    batched = bmap(fun, batch_size=2, **options)
    assert_same(batched(*args), wanted)
    assert_same(
        *eqx.filter_jit(lambda *args: (batched(*args), eqx.filter_vmap(fun, **options)(*args)))(
            *args
        )
    )


@pytest.mark.parametrize(
    ("name", "batch_size", "loop"),
    [
        ("out_axes None", None, "auto"), ("out_axes a tree", 1, "scan"), ("dict by name", 3, "unroll"),
        ("typed keys on axis 1", 4, "scan"), ("out_axes a tree", 9, "auto"), ("out_axes None", np.int64(2), "scan"),
        ("typed keys on axis 1", "auto", "unroll"),
    ],
)  # fmt: skip
def test_every_batch_size_and_loop_equals_filter_vmap(name, batch_size, loop):
    fun, args, options = CASES[name]
    assert_same(
        bmap(fun, batch_size=batch_size, loop=loop, **options)(*args),
        eqx.filter_vmap(fun, **options)(*args),
    )


@pytest.mark.parametrize(("loop", "checkpoint"), [("scan", True), ("unroll", False)])
def test_gradients_equal(loop, checkpoint):
    models, x = eqx.filter_vmap(mlp)(jax.random.split(jax.random.key(1), SIZE)), arange(3)
    arrays, static = eqx.partition(models, eqx.is_array)

    def gradient(mapping):
        def total(arrays, x):
            energy = mapping(lambda model, x: jnp.sum(model(x) ** 2), in_axes=(EACH, None))
            return jnp.sum(energy(eqx.combine(arrays, static), x))

        return jax.jit(jax.grad(jax.checkpoint(total) if checkpoint else total, (0, 1)))(arrays, x)

    ours, wanted = gradient(partial(bmap, batch_size=2, loop=loop)), gradient(eqx.filter_vmap)
    assert_same(ours, wanted)
    assert sum(float(jnp.abs(g).sum()) for g in jax.tree.leaves(wanted)) > 0.1


@pytest.mark.parametrize("outer", [jax.vmap, partial(bmap, batch_size=2)])
def test_nested_and_under_an_outer_map(outer):
    x, y = arange(3, 4), arange(SIZE, 4)

    def rows(mapping):
        return mapping(lambda a, b: (a * b, a.sum()), in_axes=(None, 0))

    ours = outer(lambda a: rows(partial(bmap, batch_size=2))(a, y))(x)
    assert_same(ours, jax.vmap(lambda a: rows(jax.vmap)(a, y))(x))
    shared = outer(
        lambda a: bmap(lambda b, c: (b, c), in_axes=(0, None), out_axes=(0, None), batch_size=2)(
            y, a
        )
    )(x)
    assert_same(shared[1], x)


def test_unmapped_arguments_arrive_unchanged():
    seen = []
    given = (20, 1.2, "s", np.arange(3), jnp.arange(3), jnp.tanh, None, True)

    def look(x, *rest):
        seen.append(rest)
        return x

    x = jnp.arange(SIZE)
    for batch_size in (None, 2, "auto"):
        seen.clear()
        bmap(look, in_axes=(0, *(None for _ in given)), batch_size=batch_size)(x, *given)
        assert seen
        assert all(a is b for rest in seen for a, b in zip(rest, given, strict=True))


def test_decorator_forms_keep_names_and_wrapped_function():
    @partial(bmap, batch_size=2)
    def doubled(x):
        """Doc."""
        return 2 * x

    @bmap(in_axes=(None, 0), batch_size=2)
    def product(a, b):
        return a * b

    class Scaler(eqx.Module):
        scale: jax.Array

        @partial(bmap, in_axes=(None, 0), batch_size=2)
        def __call__(self, x):
            return self.scale * x

    assert (doubled.__name__, doubled.__doc__, doubled.__wrapped__(3)) == ("doubled", "Doc.", 6)
    np.testing.assert_array_equal(product(2, jnp.arange(3)), [0, 2, 4])
    np.testing.assert_array_equal(Scaler(jnp.array(2.0))(jnp.arange(5.0)), 2 * np.arange(5.0))


def test_wrapped_module_is_differentiable():
    model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    gradients = [
        eqx.filter_grad(lambda f: jnp.sum(f(arange(SIZE, 3))))(wrap(model)).__wrapped__
        for wrap in (partial(bmap, batch_size=2), eqx.filter_vmap)
    ]
    assert_same(*gradients)


def add(x, y):
    return jax.tree.leaves(x)[0] + y


BAD_CALLS = [
    (
        ValueError,
        "`y` must have as many members .*`x` \\(5\\), got 3",
        add,
        (jnp.ones(5), jnp.ones(3)),
        {},
    ),
    (
        ValueError,
        "`x` .*`axis_size` \\(4\\), got 5",
        add,
        (jnp.ones(5), jnp.ones(5)),
        {"axis_size": 4},
    ),
    (ValueError, "out_axes", add, (jnp.ones(5), jnp.ones(5)), {"out_axes": None}),
    (ValueError, r"`args\[1\]` must have as many", lambda *xs: xs, (jnp.ones(5), jnp.ones(3)), {}),
    (ValueError, "`in_axes` must map at least one", add, (1.0, 2.0), {"out_axes": 0}),
    (ValueError, "`y` must have the axis 1", add, (jnp.ones(5), jnp.ones(5)), {"in_axes": (0, 1)}),
    (
        ValueError,
        "`in_axes` must consist of",
        add,
        (jnp.ones(5), jnp.ones(5)),
        {"in_axes": ("a", 0)},
    ),
    (ValueError, "`in_axes` must be a prefix", add, (jnp.ones(5), jnp.ones(5)), {"in_axes": (0,)}),
    (
        ValueError,
        "`in_axes` must name .*'z'",
        add,
        (jnp.ones(5), jnp.ones(5)),
        {"in_axes": {"z": 0}},
    ),
    (
        ValueError,
        "`out_axes` must be a prefix",
        add,
        (jnp.ones(5), jnp.ones(5)),
        {"out_axes": (0, 0)},
    ),
    (
        ValueError,
        "`batch_size` .*5 members.*cannot cross",
        add,
        (jnp.ones(5), jnp.ones(5)),
        {"axis_name": "i"},
    ),
]


@pytest.mark.parametrize(("kind", "message", "fun", "args", "options"), BAD_CALLS)
def test_wrong_calls_name_the_argument(kind, message, fun, args, options):
    with pytest.raises(kind, match=message):
        bmap(fun, batch_size=2, **options)(*args)


def test_wrong_options_are_refused_at_once():
    for name, value in (
        ("batch_size", 0),
        ("batch_size", "big"),
        ("memory_budget", 10),
        ("loop", "fori"),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            bmap(add, **{name: value})
    for mapping in (bmap, eqx.filter_vmap):
        with pytest.raises(RuntimeError, match="keyword arguments"):
            mapping(add)(jnp.ones(5), y=jnp.ones(5))


def test_collectives_within_one_batch():
    x = arange(SIZE)
    for batch_size in (None, SIZE, 9):
        centred = bmap(
            lambda a: a - jax.lax.pmean(a, "members"), axis_name="members", batch_size=batch_size
        )(x)
        np.testing.assert_allclose(centred, x - x.mean(), atol=1e-6)


def wide(x):
    """Some hundred kB of temporaries a member: running sums over 100 x 1000."""
    return jax.lax.cumsum(jnp.outer(x, jnp.ones(1000)), axis=0).max(axis=0).sum()


all_wide = jax.jit(jax.vmap(wide))


def chosen_batch(caplog, *, budget, size=40):
    x = arange(size, 100)
    caplog.clear()
    with caplog.at_level(logging.INFO, memory.__name__):
        result = bmap(wide, batch_size="auto", memory_budget=budget)(x)
    np.testing.assert_allclose(result, all_wide(x), rtol=1e-6)
    (record,) = [r for r in caplog.records if r.name == memory.__name__]
    chosen, members, needed, allowed = record.args
    assert members == size
    assert needed <= allowed
    return chosen


@pytest.mark.cpu
@pytest.mark.slow
def test_auto_takes_the_largest_batch_that_fits(caplog):
    x = arange(40, 100)

    def needed(batch_size):
        return memory.program_bytes(
            eqx.filter_jit(bmap(wide, batch_size=batch_size)).lower(x).compile().compiled
        )

    table = {batch: needed(batch) for batch in (1, 10, 40)}
    assert table[40] > 3 * table[10]
    assert chosen_batch(caplog, budget=table[40]) == 40
    found = chosen_batch(caplog, budget=table[10])
    assert found >= 10
    assert needed(found) <= table[10] < needed(found + 1)
    assert chosen_batch(caplog, budget=table[1]) == 1
    assert chosen_batch(caplog, budget=None) == 40  # the memory of the host
    with pytest.raises(ValueError, match="`memory_budget` must be at least"):
        chosen_batch(caplog, budget=1)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_auto_is_refused_inside_transformations(transform):
    x = arange(SIZE)
    total = lambda v: jnp.sum(bmap(jnp.sin, batch_size="auto")(v))  # noqa: E731
    captured = lambda v: jnp.sum(bmap(lambda a: a * v.sum(), batch_size="auto")(jnp.arange(3.0)))  # noqa: E731
    for function in (total, captured):
        with pytest.raises(
            ValueError, match="`batch_size` must be a number or None inside jit, grad"
        ):
            transform(function)(x)


def convolve(image, kernel):
    return jax.nn.relu(jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME"))


def loops_in(function, *args):
    return str(jax.make_jaxpr(function)(*args)).count("scan[")


def test_convolutions_on_a_cpu_are_looped_over_outside_of_compiled_programs():
    images, kernels = arange(SIZE, 2, 1, 6, 6), arange(SIZE, 3, 1, 3, 3)
    wanted = jax.vmap(convolve)(images, kernels)
    for loop in ("auto", "scan", "unroll"):
        np.testing.assert_allclose(
            bmap(convolve, batch_size=2, loop=loop)(images, kernels), wanted, atol=1e-5
        )
    scan, unroll = (bmap(convolve, batch_size=2, loop=loop) for loop in ("scan", "unroll"))
    assert loops_in(scan, images, kernels) == 1
    assert loops_in(unroll, images, kernels) == 0
    assert (
        loops_in(bmap(jnp.dot, batch_size=2), arange(SIZE, 3), arange(SIZE, 3)) == 1
    )  # dense layers stay


@pytest.mark.cpu
def test_convolutions_in_a_compiled_loop_on_a_cpu_are_reported():
    images, kernels = arange(SIZE, 2, 1, 6, 6), arange(SIZE, 3, 1, 3, 3)
    nested = jax.jit(bmap(lambda a, b: jax.jit(convolve)(a, b), batch_size=1))
    with pytest.warns(
        UserWarning, match="convolution inside a compiled program on a CPU.*loop='unroll'"
    ):
        jitted = nested(images, kernels)
    np.testing.assert_allclose(jitted, jax.vmap(convolve)(images, kernels), atol=1e-5)
    nested(images[:1], kernels[:1])  # a single member is no loop: a warning would be an error


@pytest.mark.parametrize(("batch_size", "loop"), [(2, "unroll"), ("auto", "scan")])
def test_a_number_of_members_is_enough_to_map(loop, batch_size):
    repeated = bmap(lambda x: x + 1, in_axes=None, axis_size=5, batch_size=batch_size, loop=loop)
    np.testing.assert_array_equal(repeated(jnp.arange(2.0)), [[1.0, 2.0]] * 5)
