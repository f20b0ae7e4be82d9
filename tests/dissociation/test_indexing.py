"""Groups through operations that read, write, sort and cumulate; what is found keeps the function."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.rewrites import group_report, neuron_groups, permute, scale

relu = jax.nn.relu
SOME = jnp.array([2, 0, 1, 3, 5, 4, 7, 6])


def between(middle):
    """Something between two matrices."""
    return lambda p, x: jnp.tensordot(middle(x @ p["a"]), p["b"], axes=[[-1], [0]])


def weights(middle, shape):
    rng = np.random.default_rng(0)
    width = jax.eval_shape(middle, jax.ShapeDtypeStruct((*shape[:-1], 8), float)).shape[-1]
    return {
        "a": jnp.asarray(rng.normal(size=(shape[-1], 8))),
        "b": jnp.asarray(rng.normal(size=(width, 3))),
    }


def picked(h):
    return jax.vmap(lambda column, where: column[where], in_axes=(1, 0))(h, jnp.argmax(h, 0))


def masked(h):
    return jnp.where(jnp.arange(5)[:, None] != 2, h, -jnp.inf).max(0)


def recurrence(h):
    return jax.lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.full_like(h, 0.5), h)
    )[1]


def filtered(h):
    """A convolution over time, with neurons on its batch axis."""
    kernel = jnp.asarray([[[1.0, 2.0, -1.0]]], h.dtype)
    return relu(jax.lax.conv_general_dilated(h.T[:, None], kernel, (1,), "SAME"))[:, 0].T


def mixed(h):
    """A convolution by itself at each neuron, with times as channels."""
    kernel = jnp.arange(25.0, dtype=h.dtype).reshape(5, 5, 1)
    return relu(jax.lax.conv_general_dilated(h[None], kernel, (1,), "VALID"))[0]


def printed(h):
    jax.debug.callback(lambda mean: None, h.mean())
    return relu(h)


VECTOR, TIME = (5,), (5, 5)
CASES = {
    # One by one.
    "halves": (lambda h: jnp.concatenate([relu(h[:3]), jnp.tanh(h[3:])]), VECTOR, {3: 1, 5: None}),
    "squared": (lambda h: jnp.maximum(h, 0) ** 2, VECTOR, {8: 2}),
    "of length one": (lambda h: h / jnp.sqrt(jnp.sum(h**2) + 1e-6), VECTOR, {8: None}),
    "times the largest": (lambda h: h * jnp.max(h), VECTOR, {8: None}),
    "in a loop": (lambda h: jax.lax.fori_loop(0, 3, lambda _, h: relu(h), h), VECTOR, {8: 1}),
    "one of two": (lambda h: jax.lax.cond(h.sum() > 0, relu, lambda h: -h, h), VECTOR, {8: None}),
    "computed twice": (lambda h: jax.checkpoint(relu)(h), VECTOR, {8: 1}),
    "softmax": (jax.nn.softmax, VECTOR, {8: None}),
    "with all others": (lambda h: jnp.outer(h, h).sum(1) + 0 * h, VECTOR, {8: None}),
    "chosen constants": (lambda h: jnp.where(h > 0, 1.0, 0.0), VECTOR, {8: 0}),
    "whole numbers": (lambda h: (h * 10).astype(int).astype(float), VECTOR, {8: None}),
    "truth": (lambda h: relu(h).astype(bool).astype(float), VECTOR, {8: 0}),
    "added to an array": (lambda h: jnp.pad(jnp.ones(6), (0, 2)) + h, VECTOR, {6: None}),
    "of two rows": (lambda h: jnp.concatenate([h, 2 * h]).reshape(2, 8).max(0), VECTOR, {8: 1}),
    "stacked": (lambda h: jnp.stack([relu(h), h]).sum(0), VECTOR, {8: 1}),
    "tiled": (lambda h: jnp.tile(relu(h), 2).reshape(2, 8)[0], VECTOR, {8: 1}),
    "its largest time": (lambda h: jnp.argmax(h, 0).astype(float), TIME, {8: 0}),
    "deviation": (lambda h: jnp.std(relu(h), axis=0), TIME, {8: 1}),
    **{f"homogeneous {k}": (activation, VECTOR, {8: 1})
       for k, activation in enumerate((jax.nn.leaky_relu, jnp.abs, lambda h: 2 * h))},
    **{f"not homogeneous {k}": (activation, VECTOR, {8: None})
       for k, activation in enumerate((jnp.tanh, jax.nn.relu6, lambda h: h + 1, lambda h: jnp.clip(h, -1e9, None),
                                       lambda h: jnp.where(jnp.abs(h) < 1e-6, 0.0, h),
                                       lambda h: jnp.maximum(h, 0) + 1e-9, lambda h: jnp.where(h > 1e4, 2 * h, h)))},
    # Neurons in another order.
    "in another order": (lambda h: relu(h)[SOME], VECTOR, {8: 1}),
    "reversed": (lambda h: relu(h)[::-1], VECTOR, {8: 1}),
    "rolled": (lambda h: jnp.roll(relu(h), 3), VECTOR, {8: 1}),
    "every second twice": (lambda h: relu(h[::2]) + h[1::2], VECTOR, {4: 1}),
    "every second repeated": (lambda h: relu(h)[::2].repeat(2), VECTOR, {4: 1}),
    "read unequally often": (lambda h: relu(h)[jnp.array([0, 3, 0, 1, 2, 3, 4])], VECTOR, {2: 1, 3: 1}),
    "added to its mirror": (lambda h: relu(h + h[::-1]), VECTOR, {4: 1}),
    "two orders": (lambda h: relu(h[SOME] + 2 * h[SOME][::-1]), VECTOR, {4: 1}),
    "reversed in blocks": (lambda h: relu(h.reshape(2, 4)[:, ::-1].reshape(-1)), VECTOR, {2: 1, 4: 1}),
    "two orders of halves": (
        lambda h: jnp.concatenate([relu(h[SOME][:4]), h[SOME][4:] ** 2]), VECTOR, {4: {1, 2}}),
    "a table of indices": (lambda h: relu(h)[SOME.reshape(2, 4)].reshape(-1), VECTOR, {2: 1, 4: 1}),
    "padded within": (lambda h: jax.lax.pad(relu(h), 0.0, [(1, 2, 1)]), VECTOR, {8: 1}),
    # Written.
    "some rectified": (lambda h: h.at[:3].set(relu(h[:3])), VECTOR, {3: 1, 5: 1}),
    "some multiplied": (lambda h: relu(h.at[:4].multiply(2.0)), VECTOR, {4: 1}),
    "a cache": (
        lambda h: jax.lax.dynamic_update_slice(jnp.zeros((7, 8)), relu(h), (jnp.argmax(h.sum(1)), 0)), TIME, {8: None}),
    "summed by segments": (lambda h: jax.ops.segment_sum(relu(h), jnp.array([0, 1, 1, 2, 0]), 3), TIME, {8: 1}),
    "the largest by segments": (lambda h: jax.ops.segment_max(h, jnp.array([0, 1, 1, 2, 0]), 3), TIME, {8: 1}),
    "along edges": (
        lambda h: jnp.zeros_like(h).at[jnp.array([0, 1, 1])].add(relu(h[jnp.array([1, 2, 3])])), TIME, {8: 1}),
    # Over another axis.
    "at a time that is computed": (lambda h: relu(h)[jnp.argmax(jnp.prod(h, 1) * 0)], TIME, {8: None}),
    "each at a time of its own": (picked, TIME, {8: 1}),
    "in the order of time of its own": (
        lambda h: jnp.take_along_axis(h, jnp.argsort(h, 0), 0), TIME, {8: 1}),
    "sorted": (lambda h: jnp.sort(h, 0), TIME, {8: 1}),
    "sorted by others": (lambda h: jax.lax.sort_key_val(h, relu(h), dimension=0)[1], TIME, {8: 1}),
    "the two largest": (lambda h: jax.lax.top_k(h, 2, axis=0)[0], TIME, {8: 1}),
    "cumulated": (lambda h: relu(jnp.cumsum(h, 0)), TIME, {8: 1}),
    "the largest until now": (lambda h: jax.lax.cummax(h, axis=0), TIME, {8: 1}),
    "logarithms cumulated": (lambda h: jax.lax.cumlogsumexp(h, axis=0), TIME, {8: None}),
    "products cumulated": (lambda h: jnp.cumprod(h, 0), TIME, {8: None}),
    "spectrum": (lambda h: jnp.abs(jnp.fft.rfft(h, axis=0)), TIME, {8: 1}),
    "complex": (lambda h: (lambda z: (z * jnp.conj(z)).real)(jax.lax.complex(h, relu(h))), VECTOR, {8: 2}),
    "masked": (masked, TIME, {8: 1}),
    "padded in time": (lambda h: relu(jax.lax.pad(h, 0.0, [(-1, 2, 1), (0, 0, 0)])), TIME, {8: 1}),
    "padded with ones": (lambda h: relu(jnp.pad(h, ((2, 0), (0, 0)), constant_values=1.0)), TIME, {8: None}),
    "padded with infinity": (lambda h: jax.lax.pad(h, -jnp.inf, [(1, 0, 0), (0, 0, 0)]).max(0), TIME, {8: 1}),
    "one time is kept": (lambda h: relu(jax.lax.pad(h, 0.0, [(-4, 2, 0), (0, 0, 0)])), TIME, {8: 1}),
    "one neuron is kept": (lambda h: relu(jax.lax.pad(h, 0.0, [(1, -7, 0)])), VECTOR, {}),
    "mixed over times": (mixed, TIME, {8: 1}),
    "filtered in time": (filtered, TIME, {8: 1}),
    "a linear recurrence": (recurrence, TIME, {8: 1}),
    "unstacked": (lambda h: (lambda u: relu(u[0]) + u[1])(jnp.unstack(h)), TIME, {8: 1}),
    "transposed as it is reshaped": (lambda h: jnp.ravel(relu(h), order="F").reshape(8, 5).T, TIME, {8: 1}),
    # Without effect on what is asked for.
    "printed": (printed, VECTOR, {8: 1}),
}  # fmt: skip
"""What is between, the shape of an input, and by the sizes of groups that are made and read their degrees."""


def degrees(groups):
    found = {}
    for group in groups.values():
        if {slot.path for slot in group.slots} == {"['a']", "['b']"}:
            found.setdefault(group.size, set()).add(group.degree)
    return {size: own.pop() if len(own) == 1 else own for size, own in found.items()}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", CASES)
def test_neurons_are_followed(name):
    middle, shape, wanted = CASES[name]
    call, rng = between(middle), np.random.default_rng(2)
    model, inputs = weights(middle, shape), rng.normal(size=(4, *shape))
    groups = neuron_groups(model, inputs[0], call=call)
    assert degrees(groups) == wanted
    run = jax.jit(lambda model: jnp.nan_to_num(jax.vmap(call, (None, 0))(model, inputs)))
    before = run(model)
    for group in groups.values():
        factors = np.exp(rng.normal(size=group.size))
        scaled = [] if group.scaling is None else [scale(group, factors)]
        for rewrite in (permute(group, rng.permutation(group.size)), *scaled):
            np.testing.assert_allclose(run(rewrite(model)), before, rtol=1e-9, atol=1e-9)


LOST = {
    "sorted": (lambda h: jnp.sort(h), VECTOR, "it is sorted"),
    "the largest of them": (lambda h: jax.lax.top_k(h, 4)[0], VECTOR, "its largest values"),
    "spectrum": (lambda h: jnp.abs(jnp.fft.fft(h)), VECTOR, "a Fourier transform"),
    "a ramp": (lambda h: h * jnp.cumsum(jnp.ones(8)), VECTOR, "cumulative"),
    "rolled by one and added": (lambda h: relu(h + 2 * jnp.roll(h, 1)), VECTOR, "itself in "
                                                                                "another order"),
    "a computed order": (lambda h: h[jnp.argsort(jnp.arange(8.0) * h[0])], VECTOR, "."),
    "summed by segments": (lambda h: relu(jax.ops.segment_sum(h, jnp.arange(8) // 3, 3)), VECTOR, "written"),
    "added where another is": (lambda h: jnp.tanh(jax.lax.dynamic_update_slice(h, h[1:3], (jnp.argmax(h),))), VECTOR,
                               "."),
    "called back": (lambda h: jax.pure_callback(lambda z: z, jax.ShapeDtypeStruct(h.shape, h.dtype), h), VECTOR,
                    "not known"),
}  # fmt: skip


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", LOST)
def test_what_is_lost_is_not_found(name):
    middle, shape, reason = LOST[name]
    report = group_report(weights(middle, shape), jnp.ones(shape), call=between(middle))
    assert not degrees(report.groups)
    assert any(re.search(reason, why) for why in report.frozen.values())


def largest(h, k=3):
    return jax.lax.top_k(h, k)


READ_AT_INDICES = {
    "the largest": lambda h, b: (lambda v, i: relu(v) @ b[i])(*largest(h)),
    "the largest at their places": lambda h, b: (lambda v, i: jnp.zeros(8).at[i].set(relu(v)) @ b)(
        *largest(h)
    ),
    "all others": lambda h, b: h.at[largest(h)[1]].set(0.0) @ b,
    "a mixture": lambda h, b: (lambda v, i: jax.nn.softmax(v) @ jax.nn.one_hot(i, 8) @ b)(
        *largest(h)
    ),
    "the code": lambda h, b: b[jnp.argmax(h)],
    "the code and its value": lambda h, b: (lambda i: h[i] * b[i])(jnp.argmax(h)),
    "the code, one-hot": lambda h, b: jax.nn.one_hot(jnp.argmin(h), 8) @ b,
    "above the third": lambda h, b: (relu(h) * (relu(h) >= largest(relu(h))[0][-1])) @ b,
}
"""From neurons and what reads them."""
NUMBERED = {
    "the next of the largest": lambda h, b: (lambda v, i: v @ b[(i + 1) % 8])(*largest(h)),
    "two from there on": lambda h, b: (
        jax.lax.dynamic_slice(b, (jnp.argmax(h), 0), (2, 3)).sum(0) + h.sum() * b[0]
    ),
    "the first of some that tie": lambda h, b: b[jnp.argmax(relu(h - 9))] + h @ b,
    "the largest that tie anywhere": lambda h, b: (
        (lambda v, i: jnp.zeros(8).at[i].set(v) @ b)(*largest(jnp.clip(h, -1, 0.5))) + h @ b
    ),
    "its number": lambda h, b: jnp.argmax(h) * (h @ b),
    "compared with a number": lambda h, b: (lambda i: h @ b * (i == 3))(jnp.argmax(h)),
    "in another array": lambda h, b: h @ b + jnp.arange(8.0)[jnp.argmax(h)],
    "two of them as one place": lambda h, b: (
        (h @ b)
        * jax.lax.gather(
            jnp.arange(64.0).reshape(8, 8),
            largest(h, 2)[1],
            jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1)),
            (1, 1),
        )
    ),
    "in a loop": lambda h, b: (
        h @ b + jax.lax.fori_loop(0, jnp.argmax(h), lambda i, s: s + 1.0, 0.0)
    ),
}


def codes(read, batched):
    """Read at indices of its neurons, for one input or for several at once; a run over 50 inputs, and examples."""
    one = lambda p, x: read(x @ p["a"] + p["c"], p["b"])  # noqa: E731
    several = jax.vmap(one, (None, 0))
    inputs = jax.random.normal(jax.random.key(9), (50, 5))
    run = jax.jit(lambda p: several(p, inputs))
    return (several, inputs, run) if batched else (one, inputs[0], run)


CODES = {name: jax.random.normal(jax.random.key(k), s) for k, (name, s) in enumerate(
    {"a": (5, 8), "b": (8, 3), "c": (8,)}.items())}  # fmt: skip


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", READ_AT_INDICES)
def test_what_is_read_at_indices_of_neurons_moves_with_them(name, batched):
    call, example, run = codes(READ_AT_INDICES[name], batched)
    (group,) = (
        group for group in neuron_groups(CODES, example, call=call).values() if group.size == 8
    )
    assert {slot.path for slot in group.slots} == {"['a']", "['b']", "['c']"}
    assert group.scaling is group.sharing is None
    assert jnp.abs(run(CODES)).max() > 0.1
    moved = permute(group, np.random.default_rng(3).permutation(8))(CODES)
    np.testing.assert_allclose(run(moved), run(CODES), atol=1e-5)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("name", NUMBERED)
def test_neurons_whose_numbers_are_used_stand_still(name, batched):
    call, example, run = codes(NUMBERED[name], batched)
    report = group_report(CODES, example, call=call)
    assert not [group for group in report.groups.values() if len(group.slots) == 3]
    moved = {
        name: value[..., ::-1] if name != "b" else value[::-1] for name, value in CODES.items()
    }
    assert jnp.abs(run(moved) - run(CODES)).max() > 1e-3
    for group in report.groups.values():
        moved = permute(group, key=jax.random.key(3))(CODES)
        np.testing.assert_allclose(run(moved), run(CODES), atol=1e-5)


def test_heads_that_share_a_codebook_move_together():
    read = lambda x, a, b: (lambda v, i: v @ b[i])(*largest(x @ a))  # noqa: E731
    shared = lambda p, x: sum(read(x, a, p["b"]) for a in p["a"])  # noqa: E731
    apart = lambda p, x: jax.vmap(read, (None, 0, 0))(x, p["a"], p["b"]).sum(0)  # noqa: E731
    keys = jax.random.split(jax.random.key(0), 3)
    a, b = jax.random.normal(keys[0], (2, 5, 8)), jax.random.normal(keys[1], (2, 8, 3))
    inputs = jax.random.normal(keys[2], (30, 5))
    for model, call in (({"a": a, "b": b[0]}, shared), ({"a": a, "b": b}, apart)):
        run = jax.jit(jax.vmap(call, (None, 0)))
        for group in neuron_groups(model, inputs[0], call=call).values():
            moved = permute(group, key=keys[0])(model)
            np.testing.assert_allclose(run(moved, inputs), run(model, inputs), atol=1e-5)


def test_coordinates_of_what_is_read_do_not_change_places():
    numbers = jax.lax.GatherDimensionNumbers((), (0, 1), (0, 1))

    def call(p, x):
        return jax.lax.gather(
            jnp.arange(9.0).reshape(3, 3), jnp.round(x @ p["w"]).astype(int) % 3, numbers, (1, 1)
        )

    report = group_report({"w": jnp.ones((4, 2))}, jnp.ones((5, 4)), call=call)
    assert not report.groups
    assert report.frozen["['w'][1]"] == "it says where to read"


def test_neurons_written_at_computed_places_stand_still():
    call = lambda p, x: jnp.zeros(8).at[jnp.argsort(x)].set(x @ p["a"]) @ p["b"]  # noqa: E731
    report = group_report(weights(relu, (8,)), jnp.ones(8), call=call)
    assert not report.groups
    assert report.frozen["['a'][1]"] == "it is written at some places"


def test_a_fill_that_is_not_zero_binds_what_is_scaled():
    for fill, degree in ((0.0, 1), (1.0, None)):

        def call(p, x, fill=fill):
            times = jnp.round(x[0, 0]).astype(int) + jnp.arange(3)
            return jnp.take(x @ p["a"], times, axis=0, mode="fill", fill_value=fill) @ p["b"]

        (group,) = neuron_groups(weights(relu, TIME), jnp.ones(TIME), call=call).values()
        assert (group.size, group.degree) == (8, degree)


def test_products_with_what_is_read_twice_bind_scalings():
    """Neurons 1 and 3 are multiplied with another one, and read by no one else: made by a, read by 1 / a."""
    places = jnp.array([6, 2, 5, 2, 6, 7, 0, 2])
    call = lambda p, x: ((x @ p[0]) * (x @ p[0])[places]) @ p[1]  # noqa: E731
    model = [
        jax.random.normal(jax.random.key(0), (5, 8)),
        jax.random.normal(jax.random.key(1), (8, 3)),
    ]
    x = jax.random.normal(jax.random.key(2), (5,))
    (group,) = neuron_groups(model, x, call=call).values()
    assert [slot.positions.ravel().tolist() for slot in group.slots] == [[1, 3], [1, 3]]
    np.testing.assert_array_equal(group.scalings, [[1, -1]])
    np.testing.assert_allclose(
        call(scale(group, np.array([3.0, 0.2]))(model), x), call(model, x), rtol=1e-5
    )


def test_neurons_of_a_slice_by_known_indices_can_be_permuted():
    """Three of eight neurons are read by a gather with one start."""
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(0, 1), collapsed_slice_dims=(), start_index_map=(1,)
    )

    def middle(h):
        return relu(jax.lax.gather(h, jnp.array([2]), numbers, slice_sizes=(h.shape[0], 3)))

    p = weights(middle, (4, 6))
    groups = neuron_groups(p, jnp.ones((4, 6)), call=between(middle)).values()
    (read,) = [group for group in groups if any("b" in slot.path for slot in group.slots)]
    assert read.size == 3
    assert len(groups) == 2
