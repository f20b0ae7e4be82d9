"""Members: taken, counted, stacked, mapped over, one after the other."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dissociation
from dissociation import map_members, member, take
from dissociation.training._members import concatenate, count, stack


@pytest.mark.parametrize(("member_map", "devices"), [("scan", 0), ("vmap", 2), ("unroll", 2)])
def test_map_members_equals_a_loop(member_map, devices):
    shared = (jnp.arange(3.0), "static")
    stacked = {"x": jnp.arange(12.0).reshape(4, 3), "f": jnp.sin}
    mesh = dissociation.member_mesh(jax.devices("cpu")[:devices]) if devices else None

    def function(shared, member):
        return {"out": member["f"](shared[0] @ member["x"]), "sum": member["x"].sum()}

    mapped = map_members(function, shared, stacked, member_map=member_map, mesh=mesh)
    for m in range(4):
        alone = function(shared, {"x": stacked["x"][m], "f": jnp.sin})
        jax.tree.map(
            lambda a, b, m=m: np.testing.assert_allclose(a[m], b, rtol=1e-6), mapped, alone
        )


def test_one_of_stacked_members():
    keys = jax.random.split(jax.random.key(0), 3)
    stacked = eqx.filter_vmap(lambda key: eqx.nn.MLP(4, 2, 5, 1, key=key))(keys)
    for index in (0, 2, -1):
        alone = eqx.nn.MLP(4, 2, 5, 1, key=keys[index])
        np.testing.assert_allclose(
            member(stacked, index)(jnp.ones(4)), alone(jnp.ones(4)), rtol=1e-5
        )
    numbers = member({"x": np.arange(3), "rate": 0.5, "key": keys}, 1)
    assert (numbers["x"], numbers["rate"], numbers["key"].shape) == (1, 0.5, ())
    for index in (3, -4):
        with pytest.raises(ValueError, match=f"`index` must lie from -3 to 2, got {index}"):
            member(stacked, index)
    for wrong in ({"a": jnp.ones(3), "b": jnp.ones(2)}, {"rate": 0.5}, jnp.ones(())):
        for call in (lambda wrong=wrong: member(wrong, 0), lambda wrong=wrong: count(wrong)):
            with pytest.raises(
                ValueError, match="`models` must hold arrays that agree in a leading axis, got"
            ):
                call()


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
def test_stacked_members_come_apart_again(kind):
    each = [{"w": kind(w), "f": np.tanh} for w in np.random.default_rng(3).normal(size=(3, 2, 3))]
    whole = stack(each)
    assert count(whole) == 3
    assert type(whole["w"]) is type(each[0]["w"])
    assert whole["f"] is np.tanh
    for i in range(3):
        np.testing.assert_array_equal(member(whole, i)["w"], each[i]["w"])
    np.testing.assert_array_equal(take(whole, slice(1, 3))["w"], whole["w"][1:])
    np.testing.assert_array_equal(take(whole, np.array([2, 0]))["w"][0], each[2]["w"])
    np.testing.assert_array_equal(stack(each, axis=1)["w"][:, 2], each[2]["w"])


@pytest.mark.parametrize("join", [stack, concatenate])
def test_nothing_and_other_shapes_are_not_joined(join):
    with pytest.raises(ValueError, match="`trees` must hold at least one PyTree, got none"):
        join([])
    with pytest.raises(ValueError, match="`trees` must be alike, got"):
        join([{"w": np.ones((2, 3))}, {"w": np.ones((2, 2))}])
    with pytest.raises(ValueError, match="`trees` must be alike, got"):
        join([{"w": np.ones((2, 3))}, {"v": np.ones((2, 3))}])


@pytest.mark.parametrize("join", [stack, concatenate])
def test_integers_of_several_kinds_neither_wrap_nor_round_in_silence(join):
    large = jnp.asarray([2**31 + 5, 1], jnp.uint32)
    with pytest.raises(
        ValueError, match=r"`trees\[1\]` must hold integers from .* to 2147483647, got 2147483653"
    ):
        join([{"w": jnp.arange(2)}, {"w": large}])
    with pytest.warns(RuntimeWarning, match=r"^`trees\[0\]` varies by .*: float32 keeps 0 digits"):
        join([{"w": 2**30 + jnp.arange(2)}, {"w": jnp.ones(2)}])
    assert join([{"w": jnp.arange(2)}, {"w": jnp.ones(2)}])["w"].dtype == np.float32
    with jax.enable_x64(True):
        whole = join(
            [{"w": large}, {"w": jnp.ones(2, np.float32)}, {"w": jnp.arange(2, dtype=np.int32)}]
        )["w"]
        np.testing.assert_array_equal(whole.ravel(), [2**31 + 5, 1, 1, 1, 0, 1])


@pytest.mark.parametrize("array", [np.arange(6.0).reshape(3, 2), jnp.arange(6.0).reshape(3, 2)])
@pytest.mark.parametrize("index", [3, -4, [0, 5], np.array([[1, -7]])])
def test_a_member_that_is_not_there_is_refused(array, index):
    with pytest.raises(
        ValueError, match=f"`index` must lie from -3 to 2, got {np.ravel(index)[-1]}"
    ):
        take({"w": array, "name": "a"}, index)
    np.testing.assert_array_equal(take({"w": array}, -1)["w"], [4, 5])
