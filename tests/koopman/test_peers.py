"""Numbers of other packages, kept in `benchmarks/peers.json` with their versions."""

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from koopman import ReducedRank, delay_embed, eigenvalues, fit, lagged_pairs, vamp_loss

FOLDER = Path(__file__).parents[2] / "benchmarks"
KEPT = json.loads((FOLDER / "peers.json").read_text())


@pytest.fixture(scope="module")
def peers():
    spec = importlib.util.spec_from_file_location("peers", FOLDER / "peers.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_kept_numbers_are_ours(peers):
    """By this package, with its defaults."""
    paths = peers.data()
    with jax.enable_x64(True):
        lifted = fit(ReducedRank(4), *lagged_pairs(paths["lifted"]))
        cosine = fit(ReducedRank(2), *lagged_pairs(delay_embed(paths["cosine"], 2)))
        affine = fit(ReducedRank(2), *lagged_pairs(paths["affine"] - paths["affine"].mean(0)))
        found = {
            ("PyDMD", "lifted"): peers.spectrum(np.asarray(eigenvalues(lifted))),
            ("PyDMD", "cosine"): peers.spectrum(np.asarray(eigenvalues(cosine))),
            ("deeptime", "affine"): 1 - float(vamp_loss(*lagged_pairs(paths["affine"]))),
            ("kooplearn", "affine"): peers.spectrum(np.asarray(eigenvalues(affine))),
        }
    assert {(peer, name) for peer, kept in KEPT.items() for name in {*kept} - {"version"}} == {
        *found
    }
    for (peer, name), values in found.items():
        np.testing.assert_allclose(
            values, KEPT[peer][name], rtol=1e-6, atol=1e-10, err_msg=f"{peer} {name}"
        )


@pytest.mark.parametrize("name", KEPT)
def test_the_kept_numbers_are_the_peers(name, peers):
    pytest.importorskip(name.lower())
    if importlib.metadata.version(name) != KEPT[name]["version"]:
        pytest.skip(f"{name} is not version {KEPT[name]['version']}")
    for case, values in peers.PEERS[name](peers.data()).items():
        np.testing.assert_allclose(values, KEPT[name][case], rtol=1e-8, atol=1e-10, err_msg=case)
