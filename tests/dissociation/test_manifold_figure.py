"""The figure of solution manifolds in small: what moves, what stands, and how families compare."""

import dataclasses

import jax
import numpy as np
import pytest
from drawn import assert_figure

from dissociation.figures import manifold

pytestmark = pytest.mark.slow

CONFIG = dataclasses.replace(
    manifold.Config().quick(), num_tasks=2, pair_steps=5, num_steps=21, num_draws=400
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("manifold")
    return manifold.compute(CONFIG, key=jax.random.key(1), cache=folder), folder


def test_the_function_stands_while_weights_move(run):
    moved = run[0].moved.isel(steps=slice(5, None))
    assert moved.sel(quantities=["predictions", "loss"]).max() < 1e-4
    assert (
        moved.sel(quantities=["first layer", "second layer", "hidden activity", "RSM"]).min() > 0.1
    )
    assert run[0].drift.isel(steps=0).max() < 1e-4
    assert run[0].drift.isel(steps=20).min() > 0.1


def test_minimal_families_have_one_rsm(run):
    known = run[0].similarity
    for name in ("MRNS", "MWNS"):
        own = known.sel(families=name, other_families=name)
        np.testing.assert_allclose(own.sel(measures="rsa", scopes="one task"), 1, atol=1e-4)
        assert own.sel(measures="rsa", scopes="two tasks").max() < 0.95
    free = known.sel(measures="rsa", scopes="one task", families="GLS", other_families="GLS")
    assert free.max() < 0.99
    # In-sample predictivity is that of the fit itself, so no cross-validated one is above it.
    for scope in known.scopes.values:
        one = known.sel(scopes=scope)
        gap = one.sel(measures="in-sample predictivity") - one.sel(measures="predictivity")
        assert gap.min() > -1e-4


def test_noise_has_its_expected_loss_and_selects(run):
    results, _ = run
    scores = ((results.simulated - results.theory) / results.error).values
    assert np.abs(scores).max() < 4.5
    parameters = results.theory.sel(sources="parameters")
    least = parameters.sel(solutions="least under parameter noise")
    assert (parameters >= least * (1 - 1e-5)).all()
    inputs = results.theory.sel(sources="inputs")
    np.testing.assert_allclose(
        inputs.min("solutions"), inputs.sel(solutions="least under input noise"), rtol=1e-5
    )
    selected = results.selected
    np.testing.assert_allclose(selected.sel(minimal="MRNS")[0], 1, atol=1e-3)
    np.testing.assert_allclose(selected.sel(minimal="MWNS")[-1], 1, atol=1e-3)
    assert selected.sel(minimal="MRNS")[-1] < 0.995


def test_the_hierarchy_is_planted(run):
    results, _ = run
    rsm, activity = results.rsm.values, results.activity.values
    np.testing.assert_allclose(rsm, activity @ activity.swapaxes(1, 2), atol=1e-4)
    np.testing.assert_allclose(
        np.sort(rsm[0].ravel()), np.sort(rsm[1].ravel()), atol=1e-3
    )  # leaves are exchanged
    assert np.abs(rsm[0] - rsm[1]).max() > 0.1


def test_it_draws_saves_and_resumes(run):
    dims = {"moved": ("quantities", "tasks", "steps")}
    assert_figure(manifold, CONFIG, jax.random.key(1), *run, dims=dims, rows=19, parts=("MRNS",))
