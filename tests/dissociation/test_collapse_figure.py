import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import pytest
from compiled import compilations
from drawn import assert_only_draws
from labels import assert_labelled

from dissociation import member_mesh
from dissociation.figures import Parts, collapse
from dissociation.figures import _collapse_measures as collapse_measures
from dissociation.figures._artifacts import digest_of, read_identity
from dissociation.figures._collapse_results import assemble, crossings, first_crossings, median_delay
from dissociation.figures._seeds import masked
from dissociation.recipes import observation_steps
from dissociation.recipes._grokking import standardised

pytestmark = pytest.mark.slow

KEY = jax.random.PRNGKey(3)
NAMES = {"train_accuracy", "test_accuracy", "nc1_score", "rnc1_score", "nc2_score", "within_class_variance"}
NAMES |= {"scale_means", "test_rnc1_score", "test_nc2_score"}
EXPENSIVE = {"mi_zx_compression", "mi_zy_compression", "nhsic_zx", "nhsic_zy", "nhsic_zx_free"}
EXPENSIVE |= {"mi_zx_compression_null", "mi_zx_smoothed"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    # Small weights and a large rate: so short a run has to learn something.
    config = dataclasses.replace(
        collapse.Config().quick(), num_steps=200, num_images=320, num_test=320, init_scale=1.0, learning_rate=5e-3
    )
    folder, cache = tmp_path_factory.mktemp("collapse"), tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collapse_measures, "code_cache", lambda: cache)
        results = collapse.compute(config, key=KEY, folder=folder)
        assert len(list(cache.iterdir())) == 1  # the next sweep finds them
        with np.load(folder / "codes.npz") as first:
            data, key = collapse.source(config), jax.random.fold_in(KEY, 2)
            options = {"size": config.code, "num_epochs": config.compression_epochs, "key": key}
            again = collapse_measures.compressed(data.train_images[:10_000], data.test_images, **options)
            np.testing.assert_array_equal(first["codes"], again["codes"])
    return results, config, folder


def test_series(small):
    results, config, _ = small
    assert set(results.series) >= NAMES
    assert set(results.information) >= EXPENSIVE
    np.testing.assert_array_equal(results.information_step, config.information_steps())
    assert (results.series["train_accuracy"][..., -1] > results.series["train_accuracy"][..., 0]).all()
    assert (results.information["nhsic_zy"] <= 9 + 1e-3).all()
    # Labels are in the features to some degree, and shuffled pairs are not: with 32 samples a class, what is said of
    # these may even be too far below zero to pass.
    found = results.information
    null = np.nan_to_num(found["mi_zy_compression_null"][..., -1], nan=0.0)
    label = found["mi_zy_compression"][..., -1]
    assert (label > np.maximum(null, 0))[known := np.isfinite(label)].all()
    assert known.sum() >= 3
    assert (null < 0.3).all()


def test_another_rate_and_scale_compile_nothing_anew(small, caplog, monkeypatch):
    _, config, folder = small
    with np.load(folder / "codes.npz") as file:
        codes = {"codes": file["codes"]}
    monkeypatch.setattr(collapse, "compressed", lambda *args, **options: codes)
    other = dataclasses.replace(config, learning_rate=3e-3, init_scale=2.0, weight_decays=(0.2, 0.02))
    assert compilations(caplog, lambda: collapse.compute(other, key=KEY)) == []


def test_margins(small):
    results, config, _ = small
    train, test = (results.margins[f"margin_0_{split}"] for split in ("train", "test"))
    assert train.shape[:2] == test.shape[:2] == (2, 2)
    assert test.shape[2] > train.shape[2] > 0  # the test ones are not an empty set
    # Samples of the first class lie on its side of the boundary, those of the second on the other.
    assert (results.margins["margin_0_train"] > 0).mean() > 0.8
    assert (results.margins["margin_1_train"] < 0).mean() > 0.8
    # The first coordinate in the plane is the signed distance but for where the boundary lies.
    for name in ("0_train", "1_test"):
        along = results.margins[f"plane_{name}"][..., 0]
        boundary = results.margins["plane_boundary"][..., None]
        np.testing.assert_allclose(along - boundary, results.margins[f"margin_{name}"], atol=1e-3)


def test_models_are_kept_and_those_of_another_run_refused(small, tmp_path):
    results, config, folder = small
    models = collapse.load_models(config, folder)
    data = collapse.source(config)
    images, truth = standardised(data.test_images), data.test_labels.argmax(1)
    for index in range(4):
        model = jax.tree.map(lambda leaf, i=index: leaf[i], models)
        accuracy = np.mean(np.asarray(jax.vmap(model)(images)).argmax(1) == truth)
        np.testing.assert_allclose(results.series["test_accuracy"].reshape(4, -1)[index, -1], accuracy, atol=1e-6)
    other = dataclasses.replace(config, width=64)
    for read in (collapse.load_models, collapse.load_partial):
        with pytest.raises(ValueError, match="whose width differ"):
            read(other, folder)
    with pytest.raises(FileNotFoundError, match=r"identity\.json"):
        collapse.load_models(config, folder / "none")
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    identity = {**read_identity(tmp_path), "config": json.loads(json.dumps(dataclasses.asdict(other)))}
    (tmp_path / "identity.json").write_text(json.dumps({"identity": identity, "digest": digest_of(identity)}))
    for read, name in ((collapse.load_models, "models.ckpt"), (collapse.load_partial, "series.npz")):
        with pytest.raises(ValueError, match=f"{name} belongs to another run"):  # whose files were replaced
            read(other, tmp_path)


def test_a_seed_that_diverged_is_left_out_and_named(small):
    """The first network of the first decay is not finite from the third observation on; accuracies look plausible."""
    results, config, _ = small
    flat = {
        **results.series,
        **{name: np.full(results.series["train_loss"].shape, 0.5) for name in results.information},
    }
    flat = {name: values.reshape(4, -1).copy() for name, values in flat.items()}
    flat["train_loss"][0, 2:] = np.inf
    margins = {name: values.reshape(4, *values.shape[2:]) for name, values in results.margins.items()}
    margins = masked(margins, np.array([False, True, True, True]))
    # After training, and under way.
    for diverged_at, step in ((np.array([9, -1, -1, -1]), 9), (None, results.time_step[2])):
        found = assemble(config, results.data, results.time_step, flat, margins, diverged_at, {})
        for name, values in found.series.items():
            assert np.isfinite(values[0, 0, :2]).all(), name
            assert np.isnan(values[0, 0, 2:]).all(), name
            np.testing.assert_array_equal(values[0, 1], results.series[name][0, 1])
        later = found.information_step >= results.time_step[2]
        np.testing.assert_array_equal(np.isnan(found.information["nhsic_zx"][0, 0]), later)
        np.testing.assert_array_equal(found.diverged_at, [[step, -1], [-1, -1]])
        assert f"left out: weight decay 0.3 seed 42 at step {step} (3 of 4" in collapse.headline(found)
        figure = collapse.draw(found)
        line = figure.axes[0].lines[0].get_ydata()
        np.testing.assert_allclose(line[-1], results.series["test_accuracy"][0, 1, -1])
        row = collapse.table(found)[1]
        times, whole = found.crossings.first, results.crossings.first
        for name, medians in found.crossings.median.items():  # of the seeds that are left
            if name != "delay":
                left = times[name][0, 1:]
                expected = left[0] if np.isfinite(left[0]) else np.inf
                np.testing.assert_array_equal(medians[0, 0], expected, err_msg=name)
        assert times["diverged"].tolist() == [[True, False], [False, False]]
        assert np.isnan(times["fitted"][0, 0])
        np.testing.assert_array_equal(times["fitted"][1], whole["fitted"][1])
        assert " of 1" in row[5]  # one network could have crossed


def test_steps_are_coordinates(small, tmp_path):
    results, config, _ = small
    series = ("weight_decays", "seeds", "time_step")
    dims = {"rnc1_score": series, "nhsic_zx": (*series[:2], "information_step")}
    found = assert_labelled(collapse, results, tmp_path, dims)
    steps, values = collapse.series_of(results, "rnc1_score", 0.03, 43)
    np.testing.assert_array_equal(values, results.series["rnc1_score"][1, 1])
    assert len(steps) == len(values)
    with pytest.raises(ValueError, match=r"weight decay 0.3, seed 7"):
        collapse.series_of(results, "rnc1_score", 0.3, 7)
    last = found.to_xarray().rnc1_score.sel(seeds=config.seeds[1], time_step=results.time_step[-1])
    np.testing.assert_array_equal(last, results.series["rnc1_score"][:, 1, -1])


def test_figures_of_nothing(small):
    results, config, _ = small
    nan = {name: np.full_like(values, np.nan) for name, values in results.series.items()}
    first = {name: values[..., :5] for name, values in results.series.items()}
    for series, steps in ((nan, results.time_step), (first, results.time_step[:5])):
        found = results._replace(series=series, time_step=steps, information={}, margins={})
        figure = collapse.draw(found._replace(crossings=crossings(config, series, steps)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.canvas.draw()


def test_crossings(small):
    results, config, _ = small
    steps = np.asarray([0, 10, 20, 40])
    curves = np.asarray([[[0.1, 0.5, 1.0, 1.0], [0.1, 0.2, 0.3, 0.4]]])
    found = first_crossings(
        config,
        {"train_accuracy": curves, "test_accuracy": curves, "rnc1_score": 1 - curves, "train_loss": curves},
        steps,
    )
    np.testing.assert_array_equal(found["fitted"], [[20, np.nan]])
    np.testing.assert_array_equal(found["collapsed"], [[20, np.nan]])
    np.testing.assert_array_equal(found["delay"], [[0, np.nan]])
    # Features that lie together before the network has fitted have not collapsed.
    early = np.asarray([[[0.01, 0.5, 0.5, 0.05]]])
    found = first_crossings(
        config,
        {"train_accuracy": curves[:, :1], "test_accuracy": early, "rnc1_score": early, "train_loss": early},
        steps,
    )
    np.testing.assert_array_equal(found["collapsed"], [[40]])
    np.testing.assert_array_equal(found["delay"], [[20]])
    assert median_delay(np.asarray([20.0, np.nan]), np.asarray([30.0, np.nan]), 100).value == 30
    assert np.isnan(median_delay(np.full(2, np.nan), np.full(2, np.nan), 100).value)
    assert median_delay(np.asarray([20.0, 30.0, 30.0]), np.asarray([30.0, np.nan, np.nan]), 100).value == np.inf
    assert np.isnan(found["generalised"]).all()


def test_the_line_of_first_crossings(small):
    results, config, _ = small
    # Two seeds per decay cross at steps that are inversely proportional to the decay, 1 % apart.
    steps = np.asarray([0, 100, 3333, 3366, 33333, 33666, 100_000])
    collapsed = np.asarray([[3333, 3366], [33333, 33666]])
    low = np.where(steps >= collapsed[..., None], 0.01, 1.0)
    early = np.broadcast_to(steps >= 100, low.shape).astype(float)
    series = {"train_accuracy": early, "test_accuracy": early, "rnc1_score": low, "train_loss": low}
    found = crossings(config, series, steps)
    assert found.slope.startswith("collapse time goes as (weight decay)^(-1.00")
    assert "; delay after fitting goes as (weight decay)^(-1.0" in found.slope
    for name, values in (("fitted", [100, 100]), ("collapsed", [3333, 33333]), ("delay", [3233, 33233])):
        np.testing.assert_array_equal(found.median[name][:, 0], values)
    # Seeds that never fit have no delay, where a crossing that never comes counts as a late one.
    three = {name: np.concatenate([values, values[:, :1]], 1) for name, values in series.items()}
    three["train_accuracy"][0, 1:] = 0.0
    unfitted = crossings(dataclasses.replace(config, seeds=(42, 43, 44)), three, steps)
    np.testing.assert_array_equal(unfitted.median["delay"][:, 0], [3233, 33233])
    assert unfitted.median["fitted"][0, 0] == np.inf
    never = crossings(config, series | {"rnc1_score": np.ones_like(low)}, steps)
    assert never.slope.startswith("collapse time: no slope, which takes three crossings at two weight decays, of 0 of")
    assert np.isnan(never.line).all()
    assert np.isinf(never.median["collapsed"][:, 0]).all()
    shown = results._replace(crossings=found, time_step=np.where(results.time_step > 100, steps[-1], 0))
    axes = next(axes for axes in collapse.draw(shown).axes if axes.get_title().startswith("first crossing"))
    (line,) = (line for line in axes.lines if str(line.get_label()).startswith("slope"))
    assert line.get_label() == "slope -1.00"
    np.testing.assert_allclose(line.get_xdata(), [0.03, 0.3])
    np.testing.assert_allclose(line.get_ydata(), [1000 / 0.03, 1000 / 0.3], rtol=0.02)


def test_images_tables_and_resuming(small):
    results, config, folder = small
    for shown in (results, collapse.load_partial(config, folder)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert_only_draws(collapse, shown)
    part = collapse.load_partial(config, folder)
    count = len(part.time_step)
    assert count == len(results.time_step)
    np.testing.assert_array_equal(part.series["rnc1_score"], results.series["rnc1_score"][..., :count])
    assert "glyphs" in collapse.headline(results)
    for part in ("means over 2 seeds", f"measured {len(results.information_step)} times", "200 training", "(l) first"):
        assert part in collapse.caption(results)
    again = collapse.compute(config, key=KEY, folder=folder)
    jax.tree.map(np.testing.assert_array_equal, collapse.arrays(results), collapse.arrays(again))


def tiny(**options):
    sizes = {"num_steps": 3, "num_train": 40, "batch_size": 20, "num_loaded": 60, "num_test": 60, "width": 12}
    return dataclasses.replace(collapse.Config().quick(), seeds=(42,), **sizes, **options)


def test_a_sweep_over_devices():
    config = tiny(num_information=0)
    alone, spread = (collapse.compute(config, key=KEY, mesh=mesh) for mesh in (None, member_mesh(jax.devices()[:2])))
    for name, values in alone.series.items():
        np.testing.assert_allclose(spread.series[name], values, rtol=2e-3, atol=1e-4, err_msg=name)


def test_a_sweep_of_convolutional_networks():
    results = collapse.compute(
        tiny(network="cnn", num_information=1, num_images=60, num_smoothed=60, compression_epochs=1), key=KEY
    )
    assert np.isfinite(results.series["rnc1_score"]).all()
    margins = results.margins
    assert margins["plane_0_train"].shape == (*margins["margin_0_train"].shape, 2)
    zy = results.information["nhsic_zy"]
    assert ((zy > 0) & (zy <= 9 + 1e-3)).all()  # classes less one
    assert (results.series["within_class_variance"][..., 0] > 0).all()


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`test_threshold` must lie from 0 to below 1, got 1.0"):
        collapse.Config(test_threshold=1.0)  # nothing is above it
    with pytest.raises(FileNotFoundError, match="must hold series.npz"):
        collapse.load_partial(collapse.Config(), tmp_path)


def test_an_interrupted_sweep_keeps_its_beginning(tmp_path):
    records = lambda step: {"observed": {"rnc1_score": np.full(4, step), "expensive": {"nhsic_zx": np.zeros(4)}}}  # noqa: E731
    with Parts(tmp_path, {}) as parts:
        first = collapse_measures.SeriesKeeper(parts)
        for step in range(20):
            first(step, records(step))
    with Parts(tmp_path, {}) as parts:
        later = collapse_measures.SeriesKeeper(parts)  # another process, from a checkpoint of step 15
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
