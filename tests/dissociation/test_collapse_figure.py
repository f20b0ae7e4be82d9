import dataclasses
import warnings

import jax
import numpy as np
import pytest

from dissociation.figures import collapse
from dissociation.figures.collapse_measures import crossing_slope, crossings

KEY = jax.random.PRNGKey(3)
NAMES = {
    "train_accuracy",
    "test_accuracy",
    "nc1_score",
    "rnc1_score",
    "nc2_score",
    "within_class_variance",
    "scale_means",
}
DEAR = {"mi_zx_compression", "mi_zy_compression", "nhsic_zx", "nhsic_zy", "nhsic_zx_free", "mi_zx_compression_null"}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    # Small weights and a large rate: so short a run has to learn something.
    config = dataclasses.replace(
        collapse.Config().quick(), num_steps=200, num_pictures=200, num_test=200, init_scale=1.0, learning_rate=5e-3
    )
    folder = tmp_path_factory.mktemp("collapse")
    return collapse.compute(config, key=KEY, folder=folder), config, folder


def test_series(small):
    results, config, _ = small
    assert set(results.series) >= NAMES | {f"test_{name}" for name in ("rnc1_score", "nc2_score")}
    assert set(results.information) >= DEAR
    for values in results.series.values():
        assert values.shape == (2, 2, len(results.time_step))
    for values in results.information.values():
        assert values.shape == (2, 2, len(results.information_step))
    np.testing.assert_array_equal(results.information_step, config.information_steps())
    assert (results.series["train_accuracy"][..., -1] > results.series["train_accuracy"][..., 0]).all()
    assert (results.information["nhsic_zy"] <= 9 + 1e-3).all()
    # Labels are in the features to some degree, and shuffled pairs are not.
    found = results.information
    assert (found["mi_zy_compression"][..., -1] > found["mi_zy_compression_null"][..., -1]).all()


def test_one_curve(small):
    results, config, _ = small
    steps, values = collapse.series_of(results, "rnc1_score", 0.03, 43)
    np.testing.assert_array_equal(values, results.series["rnc1_score"][1, 1])
    assert len(steps) == len(values)
    assert len(collapse.series_of(results, "nhsic_zx", 0.3, 42)[0]) == len(results.information_step)
    with pytest.raises(ValueError, match=r"weight decay 0.1, seed 42"):
        collapse.series_of(results, "rnc1_score", 0.1, 42)
    with pytest.raises(ValueError, match=r"weight decay 0.3, seed 7"):
        collapse.series_of(results, "rnc1_score", 0.3, 7)
    with pytest.raises(ValueError, match="`name` must be one of"):
        collapse.series_of(results, "accuracy", 0.3, 42)


def test_margins(small):
    results, config, _ = small
    seen, unseen = (results.margins[f"margin_0_{split}"] for split in ("seen", "unseen"))
    assert seen.shape[:2] == unseen.shape[:2] == (2, 2)
    assert unseen.shape[2] > seen.shape[2] > 0  # the unseen ones are not an empty set
    # Samples of the first class lie on its side of the boundary, those of the second on the other.
    assert (results.margins["margin_0_seen"] > 0).mean() > 0.8
    assert (results.margins["margin_1_seen"] < 0).mean() > 0.8


def test_crossings(small):
    results, config, _ = small
    steps = np.asarray([0, 10, 20, 40])
    curves = np.asarray([[[0.1, 0.5, 1.0, 1.0], [0.1, 0.2, 0.3, 0.4]]])
    found = crossings(config, {"train_accuracy": curves, "rnc1_score": 1 - curves}, steps)
    np.testing.assert_array_equal(found["fitted"], [[20, np.nan]])
    np.testing.assert_array_equal(found["collapsed"], [[20, np.nan]])
    decays = np.asarray([0.3, 0.1])[:, None] * np.ones((1, 2))
    exact = {"collapsed": 100 / decays * np.asarray([[1.0, 1.01]])}
    config = dataclasses.replace(config, weight_decays=(0.3, 0.1))
    assert "(weight decay)^(-1.00" in crossing_slope(config, exact, 10**6)
    assert "no slope" in crossing_slope(config, {"collapsed": np.full((2, 2), np.nan)}, 100)


def test_pictures_tables_and_resuming(small):
    results, config, folder = small
    for shown in (results, collapse.load_partial(config, folder)):
        figure = collapse.draw(shown)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            figure.canvas.draw()
    part = collapse.load_partial(config, folder)
    count = len(part.time_step)
    assert 10 <= count <= len(results.time_step)
    np.testing.assert_array_equal(part.series["rnc1_score"], results.series["rnc1_score"][..., :count])
    assert len({len(row) for row in collapse.table(results)}) == 1
    assert "glyphs" in collapse.headline(results)
    again = collapse.compute(config, key=KEY, folder=folder)
    jax.tree.map(np.testing.assert_array_equal, collapse.arrays(results), collapse.arrays(again))


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`seeds` must be different numbers"):
        collapse.Config(seeds=(1, 1))
    with pytest.raises(FileNotFoundError, match="must hold series.npz"):
        collapse.load_partial(collapse.Config(), tmp_path)


def test_an_interrupted_sweep_keeps_its_beginning(tmp_path):
    path = tmp_path / "series.npz"
    records = lambda step: {"observed": {"rnc1_score": np.full(4, step), "dear": {"nhsic_zx": np.zeros(4)}}}  # noqa: E731
    first = collapse._Keeper(path)
    for step in range(20):
        first(step, records(step))
    later = collapse._Keeper(path)  # another process, from a checkpoint of step 15
    for step in range(15, 35):
        later(step, records(step))
    with np.load(path) as kept:
        np.testing.assert_array_equal(kept["time_step"], np.arange(30))
        np.testing.assert_array_equal(kept["rnc1_score"], np.tile(np.arange(30), (4, 1)))
