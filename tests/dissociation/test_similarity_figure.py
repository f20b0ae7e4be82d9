"""The figure of similarities in small: what must hold of it, its files' axes, and that drawing only draws."""

import jax
import numpy as np
import pytest
from drawn import assert_figure

from dissociation.figures import rows, similarity
from dissociation.figures._seeds import without_diverged

pytestmark = pytest.mark.slow

CONFIG = similarity.Config(
    num_seeds=3, num_epochs=2, num_train=500, num_test=120, num_samples=60, width=12, num_blocks=3, num_zero=6,
    measures=("debiased_cka", "mutual_knn"), rewrite_measures=("debiased_cka", "procrustes_distance", "hard_matching"),
)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("similarity")
    return similarity.compute(CONFIG, key=jax.random.PRNGKey(0), cache=folder), folder


def test_rewrites_move_what_they_must(run):
    results, _ = run
    moved = {
        name: rows(results.rewritten.sel(rewrite_measures=name), "rewrites")
        for name in CONFIG.rewrite_measures
    }
    for rewrite in ("scaled", "duplicated", "permuted"):
        np.testing.assert_allclose(moved["debiased_cka"][rewrite], 1, atol=1e-4)
    np.testing.assert_allclose(moved["procrustes_distance"]["permuted"], 0, atol=1e-3)
    assert (
        moved["procrustes_distance"]["scaled"].min() > 1
    )  # in units of the features: the scale counts
    assert moved["debiased_cka"]["nuisance"].max() < 0.999
    np.testing.assert_allclose(
        moved["hard_matching"]["permuted"], moved["hard_matching"]["scaled"], atol=1e-5
    )
    assert results.chance.sel(rewrite_measures="procrustes_distance").min() > 0.1


def test_matrices_and_training_are_of_the_same_networks(run):
    results, _ = run
    last, other = results.layer == "layers[1]", results.other_layer == "layers[1]"
    matrices = results.matrix.values[:, last.values][..., other.values]
    np.testing.assert_allclose(results.through.sel(epochs=CONFIG.num_epochs), matrices, atol=1e-5)
    assert results.through.shape == (2, CONFIG.num_epochs + 1, 3, 3)
    assert (results.low <= results.estimate).all()
    assert (results.estimate <= results.high).all()
    np.testing.assert_allclose(np.diagonal(results.disagreement), 0, atol=1e-6)
    off = ~np.eye(3, dtype=bool)
    assert results.disagreement.values[off].min() > 0
    assert 0 < results.stress < 1


def test_the_files_and_the_figure(run):
    results, folder = run
    dims = {
        "matrix": ("measures", "items", "other_items"),
        "rewritten": ("rewrite_measures", "rewrites", "seeds"),
    }
    parts = (
        "60 test images",
        "3 pairs of seeds",
        "500 training",
        f"stress {results.stress.item():.2f}",
        "(e)",
    )
    assert_figure(
        similarity,
        CONFIG,
        jax.random.PRNGKey(0),
        results,
        folder,
        dims=dims,
        rows=1 + 4,
        parts=parts,
    )
    assert (results.layer.values[3], results.other_seed.values[4]) == ("layers[1]", 1)
    last = results.through[0, -1].values[np.triu_indices(3, 1)]
    for layer in ("layers[1]", "features"):
        np.testing.assert_allclose(similarity.of_seeds(results.matrix[0], layer), last, atol=1e-5)
    with pytest.raises(ValueError, match=r"`layer` must be one of .* 'hidden0'"):
        similarity.of_seeds(results.matrix[0], "hidden0")
    assert results.jensen_shannon.attrs == {"units": "nats"}
    assert "3 seeds" in similarity.headline(results)
    drawn = similarity.draw(results)
    (legend,) = drawn.subfigs[1].legends
    legends = {text.get_text() for text in legend.get_texts()}
    titles = {"debiased CKA", "mutual KNN"}
    assert legends == {*titles, "chance", "hidden 1", "last hidden", "logits"}
    assert {panel.get_title() for panel in drawn.axes} >= titles


def test_seeds_that_diverged_are_left_out(run):
    results, _ = run
    variables = {
        name: (results[name].dims, results[name].values)
        for name in ("matrix", "through", "calibrated")
    }
    alive = np.array([True, False, True])
    items = alive[results.seed.values]
    found = without_diverged(
        variables, seeds=alive, other_seeds=alive, items=items, other_items=items
    )
    matrix, through = found["matrix"][1], found["through"][1]
    assert np.isnan(matrix[:, 1]).all()
    assert np.isnan(matrix[:, :, 1]).all()
    assert np.isnan(through[..., 1]).all()
    assert np.isfinite(matrix[:, 0, 2]).all()
    np.testing.assert_array_equal(found["calibrated"][1], results.calibrated)
