import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import pytest
import xarray
from compiled import compilations
from drawn import assert_figure, assert_only_draws

from dissociation import member_mesh
from dissociation.figures import Cache, collapse
from dissociation.figures import _collapse_measures as collapse_measures
from dissociation.figures._cache import digest_of, read_identity, read_part
from dissociation.figures._collapse_measures import (
    EVENTS,
    assemble,
    crossings,
    first_crossings,
    median_of,
)
from dissociation.recipes import observation_steps
from dissociation.recipes._grokking import standardised

pytestmark = pytest.mark.slow

KEY = jax.random.PRNGKey(3)
NAMES = {
    "train_accuracy",
    "test_accuracy",
    "nc1_score",
    "rnc1_score",
    "nc2_score",
    "within_class_variance",
}
NAMES |= {"scale_means", "test_rnc1_score", "test_nc2_score"}
EXPENSIVE = {"mi_zx_compression", "mi_zy_compression", "nhsic_zx", "nhsic_zy", "nhsic_zx_free"}
EXPENSIVE |= {"mi_zx_compression_null", "mi_zx_smoothed"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    # Small weights and a large rate: so short a run has to learn something.
    config = dataclasses.replace(
        collapse.Config().quick(),
        num_steps=200,
        num_images=320,
        num_test=320,
        init_scale=1.0,
        learning_rate=5e-3,
    )
    folder = tmp_path_factory.mktemp("collapse")
    return collapse.compute(config, key=KEY, cache=folder), config, folder


def along(dataset, axis):
    """Arrays [weight_decays, seeds, axis]."""
    return {
        name: array.values
        for name, array in dataset.items()
        if array.dims == ("weight_decays", "seeds", axis)
    }


def kept_margins(folder):
    return read_part(folder / "margins.npz", digest_of(read_identity(folder)))


def test_series(small):
    results, config, _ = small
    found = along(results, "information_step")
    assert set(along(results, "time_step")) >= NAMES
    assert set(found) >= EXPENSIVE
    np.testing.assert_array_equal(results.information_step, config.information_steps())
    assert (results.train_accuracy[..., -1] > results.train_accuracy[..., 0]).all()
    assert (results.nhsic_zy <= 9 + 1e-3).all()
    # Labels are in the features to some degree, and shuffled pairs are not: with 32 samples a
    # class, what is said of these may even be too far below zero to pass.
    null = np.nan_to_num(found["mi_zy_compression_null"][..., -1], nan=0.0)
    label = found["mi_zy_compression"][..., -1]
    assert (label > np.maximum(null, 0))[known := np.isfinite(label)].all()
    assert known.sum() >= 3
    assert (null < 0.3).all()


@pytest.mark.full
def test_another_rate_and_scale_compile_nothing_anew(small, monkeypatch):
    _, config, folder = small
    with np.load(folder / "codes.npz") as file:
        codes = {"codes": file["codes"]}
    monkeypatch.setattr(collapse, "_codes", lambda *args: codes)
    other = dataclasses.replace(
        config, learning_rate=3e-3, init_scale=2.0, weight_decays=(0.2, 0.02)
    )
    assert compilations(lambda: collapse.compute(other, key=KEY)) == []


def test_margins(small):
    results, config, folder = small
    kept = kept_margins(folder)
    for label in config.classes:
        for split in ("train", "test"):
            part, found = (
                kept[f"margin_{label}_{split}"],
                results.margin.sel(classes=label, splits=split).values,
            )
            np.testing.assert_array_equal(found[..., : part.shape[1]].reshape(part.shape), part)
            assert np.isnan(found[..., part.shape[1] :]).all()
    # Samples of the first class lie on its side of the boundary, those of the second on the other.
    first, second = (
        results.margin.sel(classes=label, splits="train").values for label in config.classes
    )
    assert (first[np.isfinite(first)] > 0).mean() > 0.8
    assert (second[np.isfinite(second)] < 0).mean() > 0.8
    # The first coordinate in the plane is the signed distance but for where the boundary lies.
    distances = results.plane.isel(coordinates=0) - results.plane_boundary
    np.testing.assert_allclose(distances.transpose(*results.margin.dims), results.margin, atol=1e-3)


def test_models_are_kept_and_those_of_another_run_refused(small, tmp_path):
    results, config, folder = small
    models = collapse.load_models(config, folder)
    data = collapse.source(config)
    images, truth = standardised(data.test_images), data.test_labels.argmax(1)
    for index in range(4):
        model = jax.tree.map(lambda leaf, i=index: leaf[i], models)
        accuracy = np.mean(np.asarray(jax.vmap(model)(images)).argmax(1) == truth)
        np.testing.assert_allclose(
            results.test_accuracy.values.reshape(4, -1)[index, -1], accuracy, atol=1e-6
        )
    other = dataclasses.replace(config, width=64)
    for read in (collapse.load_models, collapse.load_partial):
        with pytest.raises(ValueError, match="whose width differ"):
            read(other, folder)
    with pytest.raises(FileNotFoundError, match=r"identity\.json"):
        collapse.load_models(config, folder / "none")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    identity = {
        **read_identity(tmp_path),
        "config": json.loads(json.dumps(dataclasses.asdict(other))),
    }
    (tmp_path / "identity.json").write_text(
        json.dumps({"identity": identity, "digest": digest_of(identity)})
    )
    for read, name in (
        (collapse.load_models, "models.ckpt"),
        (collapse.load_partial, "series.npz"),
    ):
        with pytest.raises(
            ValueError, match=f"{name} belongs to another run"
        ):  # whose files were replaced
            read(other, tmp_path)


def test_a_seed_that_diverged_is_left_out_and_named(small):
    """The first network of the first decay is not finite from the third observation on; accuracies look plausible."""
    results, config, folder = small
    steps, series = results.time_step.values, along(results, "time_step")
    flat = series | {
        name: np.full(series["train_loss"].shape, 0.5)
        for name in along(results, "information_step")
    }
    flat = {name: values.reshape(4, -1).copy() for name, values in flat.items()}
    flat["train_loss"][0, 2:] = np.inf
    margins = {name: values for name, values in kept_margins(folder).items() if name != "seconds"}
    # After training, and under way.
    for diverged_at, step in ((np.array([9, -1, -1, -1]), 9), (None, steps[2])):
        found = assemble(config, json.loads(results.data), steps, flat, margins, diverged_at)
        found = found.assign_attrs(config=results.config)
        for name, values in along(found, "time_step").items():
            assert np.isfinite(values[0, 0, :2]).all(), name
            assert np.isnan(values[0, 0, 2:]).all(), name
            np.testing.assert_array_equal(values[0, 1], series[name][0, 1])
        later = found.information_step >= steps[2]
        np.testing.assert_array_equal(np.isnan(found.nhsic_zx[0, 0]), later)
        np.testing.assert_array_equal(found.diverged_at, [[step, -1], [-1, -1]])
        assert f"left out: weight decay 0.3 seed 42 at step {step} (3 of 4" in collapse.headline(
            found
        )
        figure = collapse.draw(found)
        line = figure.axes[0].lines[0].get_ydata()
        np.testing.assert_allclose(line[-1], results.test_accuracy[0, 1, -1])
        row = collapse.table(found)[1]
        for name in ("fitted", "generalised", "collapsed"):  # of the seeds that are left
            left = found.first_crossing.sel(events=name).values[0, 1]
            median = found.median_crossing.sel(events=name, bounds="median").values[0]
            assert median == (left if np.isfinite(left) else np.inf), name
        assert found.diverged.values.tolist() == [[True, False], [False, False]]
        fitted, before = (
            dataset.first_crossing.sel(events="fitted").values for dataset in (found, results)
        )
        assert np.isnan(fitted[0, 0])
        np.testing.assert_array_equal(fitted[1], before[1])
        assert " of 1" in row[5]  # one network could have crossed


def test_steps_are_coordinates(small):
    results, config, _ = small
    last = results.rnc1_score.sel(weight_decays=0.03, seeds=43, time_step=config.num_steps)
    assert last == results.rnc1_score.values[1, 1, -1]
    assert (results.time_step.units, results.mi_zx_smoothed.units) == ("steps", "nats")


def test_figures_of_nothing(small):
    results, config, _ = small
    steps = results.time_step.values
    whole = {name: values.reshape(4, -1) for name, values in along(results, "time_step").items()}
    nan = {name: np.full_like(values, np.nan) for name, values in whole.items()}
    first = {name: values[..., :5] for name, values in whole.items()}
    for series, times in ((nan, steps), (first, steps[:5])):
        figure = collapse.draw(
            assemble(config, {}, times, series, {}, None).assign_attrs(config=results.config)
        )
        with warnings.catch_warnings(action="error"):
            figure.canvas.draw()


def test_crossings(small):
    results, config, _ = small
    steps = np.asarray([0, 10, 20, 40])
    curves = np.asarray([[[0.1, 0.5, 1.0, 1.0], [0.1, 0.2, 0.3, 0.4]]])
    names = ("train_accuracy", "test_accuracy", "rnc1_score", "train_loss")

    def of(*series):
        return first_crossings(config, dict(zip(names, series, strict=True)), steps)[0]

    found = of(curves, curves, 1 - curves, curves)
    np.testing.assert_array_equal(found["fitted"], [[20, np.nan]])
    np.testing.assert_array_equal(found["collapsed"], [[20, np.nan]])
    np.testing.assert_array_equal(found["delay"], [[0, np.nan]])
    # Features that lie together before the network has fitted have not collapsed.
    early = np.asarray([[[0.01, 0.5, 0.5, 0.05]]])
    found = of(curves[:, :1], early, early, early)
    np.testing.assert_array_equal(found["collapsed"], [[40]])
    np.testing.assert_array_equal(found["delay"], [[20]])
    assert median_of(np.asarray([30.0, np.nan]), np.asarray([80.0, np.nan])).value == 30
    assert np.isnan(median_of(np.full(2, np.nan), np.full(2, np.nan)).value)
    assert (
        median_of(np.asarray([30.0, np.nan, np.nan]), np.asarray([80.0, 70.0, 70.0])).value
        == np.inf
    )
    assert np.isnan(found["generalised"]).all()


def crossed(config, series, steps):
    variables, slope = crossings(config, series, steps)
    return xarray.Dataset(variables, {"events": list(EVENTS)}), slope


def test_the_line_of_first_crossings(small):
    results, config, _ = small
    # Two seeds per decay cross at steps that are inversely proportional to the decay, 1 % apart.
    steps = np.asarray([0, 100, 3333, 3366, 33333, 33666, 100_000])
    collapsed = np.asarray([[3333, 3366], [33333, 33666]])
    low = np.where(steps >= collapsed[..., None], 0.01, 1.0)
    early = np.broadcast_to(steps >= 100, low.shape).astype(float)
    series = {"train_accuracy": early, "test_accuracy": early, "rnc1_score": low, "train_loss": low}
    found, slope = crossed(config, series, steps)
    assert slope.startswith("collapse time goes as (weight decay)^(-1.00")
    assert "; delay after fitting goes as (weight decay)^(-1.0" in slope
    for name, values in (
        ("fitted", [100, 100]),
        ("collapsed", [3333, 33333]),
        ("delay", [3233, 33233]),
    ):
        np.testing.assert_array_equal(found.median_crossing.sel(events=name)[:, 0], values)
    # Seeds that never fit have no delay, where a crossing that never comes counts as a late one.
    three = {name: np.concatenate([values, values[:, :1]], 1) for name, values in series.items()}
    three["train_accuracy"][0, 1:] = 0.0
    unfitted, _ = crossed(dataclasses.replace(config, seeds=(42, 43, 44)), three, steps)
    np.testing.assert_array_equal(unfitted.median_crossing.sel(events="delay")[:, 0], [3233, 33233])
    assert unfitted.median_crossing.sel(events="fitted")[0, 0] == np.inf
    never, slope = crossed(config, series | {"rnc1_score": np.ones_like(low)}, steps)
    assert slope.startswith(
        "collapse time: no slope, which takes three crossings at two weight decays, of 0 of"
    )
    assert np.isinf(never.median_crossing.sel(events="collapsed")[:, 0]).all()
    times = np.where(results.time_step.values > 100, steps[-1], 0)
    shown = results.assign_coords(time_step=times).assign({name: found[name] for name in found})
    axes = next(
        axes for axes in collapse.draw(shown).axes if axes.get_title().startswith("first crossing")
    )
    (line,) = (line for line in axes.lines if line.get_label() == "end of training")
    assert line.get_ydata()[0] > steps[-1]


def test_images_tables_and_resuming(small):
    results, config, folder = small
    part = collapse.load_partial(config, folder)
    series = ("weight_decays", "seeds", "time_step")
    dims = {"rnc1_score": series, "nhsic_zx": (*series[:2], "information_step")}
    said = (
        "means over 2 seeds",
        f"measured {len(results.information_step)} times",
        "200 training",
        "(l) first",
    )
    for shown in (part, results):
        with warnings.catch_warnings(action="error"):
            assert_only_draws(collapse, shown)
    assert_figure(collapse, config, KEY, results, folder, dims=dims, rows=3, parts=said)
    count = len(part.time_step)
    assert count == len(results.time_step)
    np.testing.assert_array_equal(part.rnc1_score, results.rnc1_score[..., :count])
    assert "glyphs" in collapse.headline(results)


def tiny(**options):
    sizes = {
        "num_steps": 3,
        "num_train": 40,
        "batch_size": 20,
        "num_loaded": 60,
        "num_test": 60,
        "width": 12,
    }
    return dataclasses.replace(collapse.Config().quick(), seeds=(42,), **sizes, **options)


@pytest.mark.full
def test_a_sweep_over_devices():
    config = tiny(num_information=0)
    alone, spread = (
        collapse.compute(config, key=KEY, mesh=mesh)
        for mesh in (None, member_mesh(jax.devices()[:2]))
    )
    for name, values in along(alone, "time_step").items():
        np.testing.assert_allclose(spread[name], values, rtol=2e-3, atol=1e-4, err_msg=name)


@pytest.mark.full
def test_a_sweep_of_convolutional_networks():
    results = collapse.compute(
        tiny(
            network="cnn", num_information=1, num_images=60, num_smoothed=60, compression_epochs=1
        ),
        key=KEY,
    )
    assert np.isfinite(results.rnc1_score).all()
    assert results.plane.shape == (*results.margin.shape, 2)
    zy = results.nhsic_zy
    assert ((zy > 0) & (zy <= 9 + 1e-3)).all()  # classes less one
    assert (results.within_class_variance[..., 0] > 0).all()


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`test_threshold` must lie from 0 to 0.999999, got 1.0"):
        collapse.Config(test_threshold=1.0)  # nothing is above it
    with pytest.raises(FileNotFoundError, match="must hold series.npz"):
        collapse.load_partial(collapse.Config(), tmp_path)


def test_an_interrupted_sweep_keeps_its_beginning(tmp_path):
    def records(step):
        return {
            "observed": {"rnc1_score": np.full(4, step), "expensive": {"nhsic_zx": np.zeros(4)}}
        }

    with Cache(tmp_path, {}) as parts:
        first = collapse_measures.SeriesKeeper(parts)
        for step in range(20):
            first(step, records(step))
    with Cache(tmp_path, {}) as parts:
        later = collapse_measures.SeriesKeeper(
            parts
        )  # another process, from a checkpoint of step 15
        for step in range(15, 35):
            later(step, records(step))
        kept = parts.load("series")
        np.testing.assert_array_equal(kept["time_step"], np.arange(35))
        np.testing.assert_array_equal(kept["rnc1_score"], np.tile(np.arange(35), (4, 1)))
        np.savez(tmp_path / "series.npz", **kept)
        with pytest.raises(ValueError, match=r"series\.npz belongs to another run"):
            collapse_measures.SeriesKeeper(parts)(15, records(15))


def test_information_is_measured_as_often_as_asked():
    chosen = collapse.Config(num_steps=1000).information_steps()
    assert len(chosen) == 30
    assert set(chosen) <= set(observation_steps(1000))
    assert (chosen[0] <= 1, chosen[-1]) == (True, 1000)
    few = collapse.Config(num_steps=5, num_information=30).information_steps()
    np.testing.assert_array_equal(few, np.arange(6))
