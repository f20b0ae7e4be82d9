"""Names for the axes of results: from annotations, from what was mapped, from grids; and results as they were."""

import dataclasses
import importlib
import pkgutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jaxtyping import Array, Bool, Float

import dissociation
import koopman
from dissociation import load_results
from dissociation._core.results import Result, dataset_of
from dissociation.measures import class_moments
from dissociation.similarity import compare, pairwise
from dissociation.training import FullBatch, Grid, Save, fit, make_step

FEATURES = jax.random.normal(jax.random.key(0), (6, 30, 5))
LABELS = jnp.arange(30) % 3
GRID = Grid.zipped(decay=[0.1, 0.2, 0.3], rate=[1, 2, 3]) * Grid(seed=[7, 9])


class Measured(Result):
    """Annotations of every kind."""

    rates: Float[Array, "modes"]
    plane: Float[Array, "2 d"]
    table: Float[Array, "*pairs r r"]
    anything: Array
    found: Bool[Array, ""] | None
    measure: str = eqx.field(static=True)
    widths: tuple[int, ...] = eqx.field(static=True)

    UNITS = {"rates": "1 / s"}


@pytest.fixture
def measured():
    return Measured(
        jnp.ones(3), jnp.ones((2, 4)), jnp.ones((5, 3, 3)), jnp.ones((2, 7)), None, "cka", (1, 2)
    )


def test_axes_have_the_names_of_the_annotations(measured):
    found = measured.to_xarray()
    assert {name: array.dims for name, array in found.items()} == {
        "rates": ("modes",), "plane": ("plane_dim_0", "d"), "table": ("pairs", "r", "other_r"),
        "anything": ("anything_dim_0", "anything_dim_1"),
    }  # fmt: skip
    assert found.attrs == {"measure": "cka", "widths": "[1, 2]"}
    assert found.rates.attrs == {"units": "1 / s"}


def test_what_mapping_adds_stands_in_front(measured):
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, 2 * leaf]), measured)
    found = stacked.to_xarray({"seeds": [7, 9]})
    assert found.table.dims == ("seeds", "pairs", "r", "other_r")
    assert found.anything.dims == ("seeds", "anything_dim_0", "anything_dim_1")
    np.testing.assert_array_equal(found.seeds, [7, 9])
    assert stacked.to_xarray("seeds").rates.dims == ("seeds", "modes")
    assert measured.to_xarray("seeds").rates.dims == ("modes",)  # not mapped
    with pytest.raises(ValueError, match="conflicting sizes for dimension 'seeds'"):
        stacked.to_xarray({"seeds": [7, 9, 11]})


def test_members_of_a_grid_are_its_axes():
    moments = jax.vmap(lambda z: class_moments(z, LABELS, 3, scatter=True))(FEATURES)
    data = moments.to_xarray(GRID)
    assert data.scatter.dims == ("decay,rate", "seed", "d", "other_d")
    np.testing.assert_array_equal(data.means.sel(seed=9)[1], moments.means[3])
    table = moments.to_dataframe(GRID)["decay,rate", "seed"]
    assert list(table.columns) == ["decay,rate", "seed", "decay", "rate", "norms", "unit"]
    np.testing.assert_array_equal(table.rate, [1, 1, 2, 2, 3, 3])
    with pytest.raises(
        ValueError,
        match=r"have 2 members on the first axis .* has shape \(2,\), got shape \(6, 3\)",
    ):
        moments.to_xarray(Grid(seed=[7, 9]))


@pytest.mark.slow
def test_a_comparison_knows_its_layers_and_members():
    compared = pairwise({"hidden": FEATURES[:2], "last": FEATURES[2:4]}, "linear_cka", members=True)
    data = compared.to_xarray()
    assert float(data["values"].sel(items="hidden 1", others="last 0")) == float(
        compared.between("hidden", "last")[1, 0]
    )
    with pytest.raises(ValueError, match="`layer` must be one of 'hidden', 'last', got 'features'"):
        compared.between("features")  # without logits, these are not the layers of a network
    assert data.other_layers.values.tolist() == ["hidden", "hidden", "last", "last"]
    assert data.attrs["measure"] == "linear_cka"
    assert compare(FEATURES[0], FEATURES[1]).to_xarray()["values"].dims == ()


def test_every_measure_has_names():
    """No field of any result is called as an axis of another, and none of its methods is in the way."""
    for package in (dissociation, koopman):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    kinds = [
        kind
        for kind in _below(Result)
        if kind.__module__.partition(".")[0] in ("dissociation", "koopman")
    ]
    assert len(kinds) >= 14
    for kind in kinds:
        result, fields = object.__new__(kind), dataclasses.fields(kind)
        for field in fields:
            static = field.metadata.get("static")
            rank = _rank(kind.__annotations__.get(field.name), kind.AXES)
            value = (("a", 0), ("b", 1)) if static else np.zeros((2,) * rank)
            object.__setattr__(result, field.name, value)
        found = result.to_xarray()
        assert set(found.data_vars) | set(found.attrs) == {field.name for field in fields}, kind


def _below(kind):
    return [below for child in kind.__subclasses__() for below in (child, *_below(child))]


def _rank(hint, axes):
    kind = next(
        (part for part in (hint, *getattr(hint, "__args__", ())) if hasattr(part, "dims")), None
    )
    return (
        1
        if kind is None
        else len(kind.dims) - 1 + len(axes)
        if kind.index_variadic == 0
        else len(kind.dims)
    )


def test_results_stay_trees_that_transformations_take(measured):
    doubled = jax.jit(lambda result: jax.tree.map(lambda leaf: 2 * leaf, result))(measured)
    assert type(doubled) is Measured
    np.testing.assert_array_equal(doubled.rates, 2 * measured.rates)
    with pytest.raises(TypeError, match="`rates` must be known, got a traced value"):
        jax.jit(lambda result: result.to_xarray().rates.values)(measured)


def test_any_tree_of_arrays_will_do():
    found = dataset_of(
        {"a": [np.zeros(2), {"b": 1.5}], "c": (1, 2), "model": jnp.tanh, "none": None, "text": "x"}
    )
    dims = {name: array.dims for name, array in found.items()}
    assert dims == {"a_0": ("a_0_dim_0",), "a_1_b": (), "c": ("c_dim_0",)}
    assert found.attrs == {"text": "x"}
    assert dataset_of(np.zeros((2, 3)), "seeds")["values"].dims == ("seeds", "values_dim_0")
    assert dataset_of({"key": jax.random.key(0)})["key"].shape == (2,)
    with pytest.raises(
        ValueError, match="`tree` must give each array a name of its own, got a_b twice"
    ):
        dataset_of({"a": {"b": np.zeros(2)}, "a_b": np.ones(2)})
    with pytest.raises(TypeError, match="`tree` must hold arrays, got an object of type dict"):
        dataset_of({"a": None})


def _loss(model, batch, key):
    x, y = batch
    error = (jax.vmap(model)(x)[:, 0] - y) ** 2
    return error.mean(), {"largest": error.max()}


@pytest.fixture(scope="module")
def trained():
    models = eqx.filter_vmap(lambda key: eqx.nn.Linear(5, 1, key=key))(
        jax.random.split(jax.random.key(0), 6)
    )
    save = Save(lambda model, step, key: {"weight": model.weight[0]}, at=[0, 2, 4])
    step, data = make_step(_loss, optax.sgd(0.01)), FullBatch((FEATURES[0], LABELS.astype(float)))
    return fit(models, step, data, num_steps=4, key=jax.random.key(1), save=save)


def test_a_history_has_steps_and_members(trained, tmp_path):
    data = trained.history.to_xarray(GRID)
    assert data.loss.dims == ("decay,rate", "seed", "steps")
    assert data.observed_weight.dims == (
        "decay,rate",
        "seed",
        "observed_at",
        "observed_weight_dim_0",
    )
    np.testing.assert_array_equal(data.observed_at, [0, 2, 4])
    np.testing.assert_array_equal(data.loss.sel(seed=7, steps=3)[2], trained.history.loss[4, 3])
    np.testing.assert_array_equal(
        data.observed_weight.sel(seed=9, observed_at=4)[1], trained.history.observed["weight"][3, 2]
    )
    assert data.metrics_largest.dims == data.loss.dims
    features = FullBatch((FEATURES[0], LABELS.astype(float)))
    on = fit(
        trained.state,
        make_step(_loss, optax.sgd(0.01)),
        features,
        num_steps=2,
        key=jax.random.key(1),
    )
    np.testing.assert_array_equal(on.history.to_xarray().steps, [4, 5])  # they go on counting
    read = load_results(trained.history.save(tmp_path / "history.npz", GRID))
    np.testing.assert_array_equal(read.loss.values.reshape(6, 4), trained.history.loss)
    outcome = trained.to_xarray({"seeds": range(6)})
    assert (outcome.diverged_at.dims, outcome.loss.dims) == (("seeds",), ("seeds", "steps"))
    assert outcome.attrs["num_steps"] == 4
