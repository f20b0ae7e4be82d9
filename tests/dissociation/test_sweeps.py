"""Named axes of a sweep: what every member is, and results back in those axes."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.training import Grid


def test_members_are_the_product_the_last_axis_fastest():
    axes = {"decay": [0.1, 0.3], "name": ["adam", "sgd", "lion"], "seed": [4, 5]}
    grid = Grid(**axes)
    wanted = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    assert list(grid) == wanted
    assert len(grid) == 12
    assert grid.axes == ("decay", "name", "seed")
    assert grid.shape == (2, 3, 2)
    assert grid.values["seed"].tolist() == [4, 5] * 6
    assert repr(grid) == "Grid(decay: 2, name: 3, seed: 2)"
    assert isinstance(list(grid)[0]["seed"], int)
    assert isinstance(list(grid)[0]["decay"], float)


def test_zipped_quantities_vary_together():
    grid = Grid.zipped(width=[8, 64, 256], rate=[0.1, 0.01, 0.001])
    assert grid.axes == ("width,rate",)
    assert grid.shape == (3,)
    assert list(grid) == [
        {"width": 8, "rate": 0.1},
        {"width": 64, "rate": 0.01},
        {"width": 256, "rate": 0.001},
    ]
    both = grid * Grid(seed=[0, 1])
    assert both.axes == ("width,rate", "seed")
    assert both.shape == (3, 2)
    assert [member["rate"] for member in both] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
    assert len(grid) == 3  # grids do not change
    assert len(Grid.zipped(width=[8, 64, 8], rate=[0.1, 0.1, 0.2])) == 3


def test_members_are_found_by_their_coordinates():
    grid = Grid(decay=[0.1, 0.3], name=["adam", "sgd"], seed=[4, 5, 6])
    members = list(grid)
    for wanted in ({"decay": 0.3}, {"name": "sgd", "seed": 5}, {}):
        found = [i for i, member in enumerate(members) if wanted.items() <= member.items()]
        assert grid.where(**wanted).tolist() == found
    assert grid.where(seed=np.array([6, 4, 4]), name=["sgd"]).tolist() == [3, 5, 9, 11]
    zipped = Grid.zipped(width=[8, 64], rate=[0.1, 0.01])
    assert zipped.where(width=64, rate=0.01).tolist() == [1]
    assert zipped.where(width=64, rate=0.1).tolist() == []
    with pytest.raises(
        ValueError, match="`coordinates` must be one of 'decay', 'name', 'seed', got 'other'"
    ):
        grid.where(other=1)
    with pytest.raises(ValueError, match="`seed` must be one of 4, 5, 6, got 7"):
        grid.where(seed=[4, 7])


def test_results_come_back_in_named_axes():
    grid = Grid(decay=[0.1, 0.3], name=["a", "b", "c"], seed=[4, 5])
    tree = {
        "loss": np.arange(12 * 7).reshape(12, 7),
        "last": jnp.arange(12.0),
        "none": None,
        "text": "kept",
    }
    found = grid.unflatten(tree)
    np.testing.assert_array_equal(found["loss"], tree["loss"].reshape(2, 3, 2, 7))
    np.testing.assert_array_equal(found["last"], tree["last"].reshape(2, 3, 2))
    assert (found["none"], found["text"]) == (None, "kept")
    with pytest.raises(
        ValueError, match=r"`tree` must hold arrays of 12 members, one for each of Grid.*got \(6,\)"
    ):
        grid.unflatten(np.arange(6))


def test_a_seed_has_its_key_whatever_else_a_member_is(key):
    """The same for all of a seed's members, and whatever other seeds and settings there are."""
    grid = Grid(decay=[0.1, 0.3], seed=[4, 0, 2**32 - 1])
    data = np.asarray(jax.random.key_data(grid.keys(key))).reshape(2, 3, -1)
    np.testing.assert_array_equal(data[0], data[1])
    assert len(np.unique(data[0], axis=0)) == 3
    np.testing.assert_array_equal(data[0, 0], jax.random.key_data(jax.random.fold_in(key, 4)))
    other = Grid(seed=[7, 4], width=[1, 2])
    np.testing.assert_array_equal(jax.random.key_data(other.keys(key))[2], data[0, 0])
    for keys in (Grid(seed=[4]).keys(jax.random.key_data(key)), Grid(start=[4]).keys(key, "start")):
        np.testing.assert_array_equal(jax.random.key_data(keys)[0], data[0, 0])
    for seeds, error in ((["a"], TypeError), ([-1], ValueError), ([2**32], ValueError)):
        with pytest.raises(error, match="`seed` must"):
            Grid(seed=seeds).keys(key)


def test_quantities_become_hyperparameters():
    grid = Grid(rate=[1, 2], name=["a", "b"], decay=[0.5])
    found = grid.hyperparams("rate", "decay")
    assert list(found) == ["rate", "decay"]
    np.testing.assert_array_equal(found["rate"], [1, 1, 2, 2])
    np.testing.assert_array_equal(found["decay"], [0.5] * 4)
    assert all(leaf.dtype == jnp.float32 for leaf in found.values())
    with pytest.raises(
        TypeError, match="`names` must name quantities that are numbers, got 'name', which is text"
    ):
        grid.hyperparams("name")
    with pytest.raises(
        ValueError, match="`names` must be one of 'rate', 'name', 'decay', got 'other'"
    ):
        grid.hyperparams("other")


@pytest.mark.parametrize(
    ("make", "axes", "error", "message"),
    [
        (Grid, {}, ValueError, "`axes` must name at least one axis"),
        (Grid, {"rate": []}, ValueError, "`rate` must"),
        (Grid, {"rate": [[0.1, 0.2]]}, ValueError, "`rate` must be one-dimensional"),
        (Grid, {"rate": [None]}, TypeError, "`rate` must"),
        (Grid, {"name": "adam"}, TypeError, "`name` must"),
        (Grid, {"rate": [0.1], "seed": [0, 1, 0]}, ValueError, "`seed` must be different"),
        (Grid, {"rate": [np.nan, np.nan]}, ValueError, "`rate` must hold no NaN.*nan"),
        (Grid, {"rate": np.array([0.1, np.nan])}, ValueError, "`rate` must hold no NaN.*nan"),
        (
            Grid.zipped,
            {"width": [8, 64, 8], "rate": [0.1] * 3},
            ValueError,
            "`width,rate` must be different",
        ),
        (
            Grid.zipped,
            {"width": [8, 64], "rate": [1]},
            ValueError,
            r"`rate` .* values as `width` \(2\), got 1",
        ),
        (
            lambda rate: Grid(rate=rate) * Grid(rate=[1]),
            {"rate": [1, 2]},
            ValueError,
            "`axes` must be different",
        ),
    ],
)
def test_wrong_axes_are_refused(make, axes, error, message):
    with pytest.raises(error, match=message):
        make(**axes)


@pytest.mark.parametrize("values", [[2**24 + 1], [0.1, 0.1 + 1e-12], [1e-46], [1e39]])
def test_hyperparameters_that_floats_do_not_distinguish_are_refused(values):
    grid = Grid(rate=values, seed=[0])
    with pytest.raises(ValueError, match="`names` must name .* got 'rate', .* in float32"):
        grid.hyperparams("rate")
    with jax.enable_x64(True):
        assert grid.hyperparams("rate")["rate"].tolist() == values
