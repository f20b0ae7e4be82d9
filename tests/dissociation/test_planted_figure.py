"""The figure of planted representations in small: what is planted, and what stays."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from drawn import assert_figure

from dissociation.figures import planted

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(
    planted.Config().quick(),
    num_train=500,
    width=64,
    num_shown=40,
    num_more=60,
    strip=40,
    num_around=100,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("planted")
    return planted.compute(CONFIG, key=jax.random.key(1), cache=folder), folder


def correlation(one, other):
    return np.corrcoef(np.ravel(one), np.ravel(other))[0, 1]


def test_images_are_planted_and_no_prediction_changes(run):
    results, _ = run
    assert (results.changed_predictions == 0).all()
    assert (results.num_inputs == 500).all()
    for extent, image, activity in (
        ("few inputs", results.image, results.activity),
        ("more inputs", results.more_image, results.more_activity),
    ):
        values = results.correlation.sel(extents=extent).values
        known = [correlation(activity.sel(stages=stage), image) for stage in results.stages.values]
        np.testing.assert_allclose(values, known, atol=1e-5)
        trained, after, best = values
        assert trained < 0.2
        assert 0.4 < after <= best
        assert 0.2 < image.values.mean() < 0.4


def test_patterns_are_planted_and_logits_stay(run):
    results, _ = run
    exact = results.max_rel_change.sel(plantings=["blocks", "checkerboard", "strip", "whole"])
    assert exact.max() < 1e-4
    assert results.agreement.sel(versions="planted").min() > 0.99
    assert results.agreement.sel(versions="trained").max() < 0.5
    for wanted in results.rsm.sel(versions="wanted").values:
        assert np.linalg.eigvalsh(wanted)[0] > -1e-3
        assert wanted.min() >= 0


def test_marks_show_an_image(run):
    results, _ = run
    width = CONFIG.width
    mark, whole = planted.face(40, 40), planted.face(40, 164)
    shown = results.strip.values[:, width:]
    np.testing.assert_allclose(
        results.strip.values[:, :width], results.activity.sel(stages="trained"), atol=1e-5
    )
    np.testing.assert_allclose(shown / shown.max(), mark, atol=1e-2)
    known = [correlation(shown, mark), correlation(results.whole, whole)]
    np.testing.assert_allclose(results.mark_correlation, known, atol=1e-5)
    assert known[0] > 0.95
    assert known[1] > results.mark_optimum.sel(marks="whole") - 1e-2
    np.testing.assert_allclose(
        results.rdm.sel(states="whole"), 1 - np.corrcoef(results.whole.values), atol=1e-3
    )


def test_it_draws_saves_and_resumes(run):
    dims = {"correlation": ("extents", "stages")}
    assert_figure(
        planted, CONFIG, jax.random.key(1), *run, dims=dims, rows=7, parts=("64 hidden units",)
    )
    assert json.loads(run[0].attrs["data"])["num_train"] == 500
