"""The figure of freedom in small: intervals hold what is measured, rewrites approach their ends, drawing only draws."""

import jax
import numpy as np
import pytest
from drawn import assert_figure, assert_only_draws

from dissociation import recipes
from dissociation.figures import _members as members
from dissociation.figures import freedom, rows
from dissociation.models import member_representations
from dissociation.recipes import fit_classifiers
from dissociation.similarity import linear_cka

pytestmark = pytest.mark.slow

CONFIG = freedom.Config(
    num_seeds=3,
    num_epochs=3,
    num_train=400,
    num_test=120,
    num_samples=80,
    width=16,
    num_zero=6,
    scale_factor=7.0,
)
OFF = ~np.eye(3, dtype=bool)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("freedom")
    return freedom.compute(CONFIG, key=jax.random.PRNGKey(0), cache=folder), folder


def test_what_is_measured_lies_within_and_rewrites_approach_the_ends(run):
    results, _ = run
    assert results.layers.values.tolist() == ["layers[0]", "layers[1]"]
    measured = results.measured.values
    assert np.isnan(np.diagonal(measured, axis1=1, axis2=2)).all()
    np.testing.assert_allclose(measured, measured.swapaxes(1, 2), atol=1e-6)
    assert (results.low.values < measured)[:, OFF].all()
    assert (measured < results.high.values)[:, OFF].all()
    assert results.residual.max() < 1e-6
    for end in ("low", "high"):
        np.testing.assert_allclose(results.approached.sel(ends=end), results[end], atol=1e-4)
    assert results.change.max() < 1e-5


def test_it_is_the_trained_networks_that_are_measured(run):
    results, _ = run
    data = freedom.source(CONFIG)
    sizes = {"num_epochs": 3, "num_seeds": 3, "width": 16, "progress": None}
    trained = fit_classifiers(**sizes, key=jax.random.split(jax.random.PRNGKey(0))[0], dataset=data)
    layers = member_representations(trained.models, data.test_images[:80])
    for layer in ("layers[0]", "layers[1]"):
        wanted = linear_cka(layers[layer][0], layers[layer][2])
        np.testing.assert_allclose(results.measured.sel(layers=layer)[0, 2], wanted, atol=1e-5)


def test_what_rewrites_leave_of_it(run):
    results, _ = run
    last, moved = results.isel(layers=-1), rows(results.moved, "rewrites")
    for name in ("scaled", "duplicated"):
        np.testing.assert_allclose(moved[name], last.measured, atol=1e-5)
    for name in ("unevenly", "nuisance"):
        assert np.abs(moved[name] - last.measured.values)[OFF].max() > 1e-2
    uneven = moved["unevenly"]
    assert (uneven <= last.high.values + 1e-6)[OFF].all()
    assert (uneven >= last.low.values - 1e-6)[OFF].all()


def test_seeds_that_diverged_are_left_out(monkeypatch):
    real = recipes.fit_classifiers

    def broken(**options):
        return real(**options)._replace(diverged_at=np.array([-1, 5, -1]))

    monkeypatch.setattr(members, "fit_classifiers", broken)
    results = freedom.compute(CONFIG, key=jax.random.PRNGKey(0))
    there = np.isfinite(results.measured.isel(layers=-1))
    assert there.values.tolist() == [[False, False, True], [False] * 3, [True, False, False]]
    assert "diverged and left out: seed 1" in freedom.headline(results)
    assert_only_draws(freedom, results)


def test_the_files_and_the_figure(run):
    results, folder = run
    dims = {
        "change": ("ends", "layers", "seeds", "other_seeds"),
        "moved": ("rewrites", "seeds", "other_seeds"),
    }
    parts = ("6 ordered pairs", "80 test images", "400 training", "(b) The last hidden layer")
    assert_figure(
        freedom,
        CONFIG,
        jax.random.PRNGKey(0),
        results,
        folder,
        dims=dims,
        rows=1 + 2 + 5,
        parts=parts,
    )
    assert "the functions of a pair can show anything from" in freedom.headline(results)


@pytest.mark.full
def test_of_networks_of_images_the_last_layer():
    config = freedom.Config(
        model="transformer",
        num_seeds=2,
        num_epochs=1,
        num_train=200,
        num_test=40,
        num_samples=30,
        width=6,
        num_zero=2,
    )
    results = freedom.compute(config, key=jax.random.PRNGKey(0))
    assert results.layers.values.tolist() == ["hidden"]
    assert "2 ordered pairs" in freedom.caption(results)
    assert results.change.sel(ends="high", layers="hidden")[0, 1] < 1e-5
