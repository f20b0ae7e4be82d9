"""The figure of similarities in small: what must hold of it, its files' axes, and that drawing only draws."""

import jax
import numpy as np
import pytest
from drawn import assert_only_draws
from labels import assert_labelled

from dissociation.figures import similarity

pytestmark = pytest.mark.slow

CONFIG = similarity.Config(
    num_seeds=3, num_epochs=2, num_train=500, num_test=120, num_samples=60, width=12, num_blocks=3, num_zero=6,
    measures=("debiased_cka", "mutual_knn"), rewrite_measures=("debiased_cka", "procrustes_distance", "hard_matching"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("similarity")
    return similarity.compute(CONFIG, key=jax.random.PRNGKey(0), folder=folder), folder


def test_rewrites_move_what_they_must(run):
    results, _ = run
    moved = {name: dict(zip(similarity.REWRITES, values, strict=True)) for name, values in results.rewritten.items()}
    for rewrite in ("scaled", "duplicated", "permuted"):
        np.testing.assert_allclose(moved["debiased_cka"][rewrite], 1, atol=1e-4)
    np.testing.assert_allclose(moved["procrustes_distance"]["permuted"], 0, atol=1e-3)
    assert moved["procrustes_distance"]["scaled"].min() > 1  # in units of the features: the scale counts
    assert moved["debiased_cka"]["zero"].max() < 0.999
    np.testing.assert_allclose(moved["hard_matching"]["permuted"], moved["hard_matching"]["scaled"], atol=1e-5)
    assert results.chance["procrustes_distance"].min() > 0.1


def test_matrices_and_training_are_of_the_same_networks(run):
    results, _ = run
    layer = [index for index, (name, _) in enumerate(results.items) if name == "features"]
    for name, matrix in results.matrices.items():
        np.testing.assert_allclose(results.through[name][-1], matrix[np.ix_(layer, layer)], atol=1e-5)
        assert results.through[name].shape == (CONFIG.num_epochs + 1, 3, 3)
        assert (results.lows[name] <= results.estimates[name]).all()
        assert (results.estimates[name] <= results.highs[name]).all()
    np.testing.assert_allclose(np.diagonal(results.disagreement), 0, atol=1e-6)
    off = ~np.eye(3, dtype=bool)
    assert results.disagreement[off].min() > 0
    assert 0 < results.stress < 1


def test_the_files_and_the_figure(run, tmp_path):
    results, folder = run
    again = similarity.compute(CONFIG, key=jax.random.PRNGKey(0), folder=folder)
    jax.tree.map(np.testing.assert_array_equal, similarity.arrays(results), similarity.arrays(again))
    dims = {"matrix": ("measures", "items", "other_items"), "rewritten": ("measures", "rewrites", "seeds")}
    found = assert_labelled(similarity, results, tmp_path, dims).to_xarray()
    moved = found.rewritten.sel(rewrites="permuted").to_series().dropna()
    assert set(moved.index.get_level_values("measures")) == set(results.rewritten)
    assert len(similarity.table(results)) == 1 + 4
    assert "3 seeds" in similarity.headline(results)
    for part in ("60 test images", "3 pairs of seeds", "500 training", f"stress {results.stress:.2f}", "(e)"):
        assert part in similarity.caption(results)
    assert_only_draws(similarity, results)
    drawn = similarity.draw(results)
    (legend,) = drawn.subfigs[1].legends
    legends = {text.get_text() for text in legend.get_texts()}
    assert {*results.matrices, "hidden0", "features", "logits"} == legends  # called as in tables and arrays
    assert {panel.get_title() for panel in drawn.axes} >= set(results.matrices)


def test_seeds_that_diverged_are_left_out(run):
    results, _ = run
    part = {"matrix": results.matrices["debiased_cka"], "through": results.through["debiased_cka"]}
    alive = np.array([True, False, True])
    found = similarity._without(part, alive, results.items)
    assert np.isnan(found["matrix"][1]).all()
    assert np.isnan(found["through"][:, :, 1]).all()
    assert np.isfinite(found["matrix"][0, 2])
