import dataclasses
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from drawn import assert_only_draws
from saved import assert_saved

from dissociation import load_results
from dissociation.data import load
from dissociation.figures import _command as command
from dissociation.models import Encoder
from koopman import datasets, figures
from koopman.figures import ordered_mnist, spectra
from koopman.figures._ordered_mnist_measures import (
    Forecaster,
    Latent,
    eigenvalue_errors,
    measured,
    project,
    spectral,
)
from koopman.figures._ordered_mnist_models import Networks
from koopman.figures.ordered_mnist import PROTOCOLS

pytestmark = pytest.mark.slow


def glyphs(num_digits=5):
    return datasets.ordered_mnist(num_digits, data=load("glyphs", num_train=1000, num_test=20))


@pytest.fixture(scope="module")
def sequence_results():
    models = ("linear", "classifier", "vamp", "contrastive", "dpnets", "autoencoder", "orthogonal")
    sizes = {
        "num_seeds": 1,
        "num_train": 230,
        "num_steps": 2,
        "oracle_epochs": 10,
        "models": models,
    }
    config = dataclasses.replace(ordered_mnist.Config().quick(), **sizes)
    return ordered_mnist.compute(config, key=jax.random.key(0), data=glyphs())


def test_ordered_digits(sequence_results):
    results = sequence_results
    assert results.times.values.tolist() == [1, 2, 1000]
    by_images, by_powers = (
        results.accuracy.sel(protocols=kind).values for kind in ("images", "powers")
    )
    # Image by image there is no horizon of a thousand steps.
    assert (np.isnan(by_images) == [False, False, True]).all()
    assert np.isfinite(results.accuracy.drop_sel(protocols="images")).all()
    # One step ahead the two ways to look are one.
    np.testing.assert_array_equal(by_images[..., 0], by_powers[..., 0])
    assert results.oracle_accuracy.mean() > 0.6
    # The oracle's own features tell digits apart, and their operator foresees the next one: chance
    # is 0.2.
    assert (
        results.accuracy.sel(models="classifier", protocols="powers", scales="raw", times=1).item()
        > 0.5
    )
    errors = results.eigenvalue_error[:, 0]
    assert errors.sel(models="classifier") < errors.sel(models="linear")
    assert "glyphs" in ordered_mnist.headline(results)
    header, *rows = ordered_mnist.table(results)
    assert [row[0] for row in rows] == results.legend.values.tolist()
    final = {row[0]: row[header.index("loss")] for row in rows}
    assert final.pop("linear") == final.pop("classifier features") == ""
    losses = results.validation.drop_sel(networks="oracle")[:, 0]
    assert float(final["VAMP-2"]) == round(float(losses.sel(networks="vamp")[-1]), 3)
    assert len(losses) == len(final)
    assert np.isfinite(losses).all()
    assert (losses[:, -1] < losses[:, 0]).all()
    # A Cayley transform is orthogonal, trained or not.
    np.testing.assert_allclose(np.abs(results.eigenvalues.sel(models="orthogonal")), 1.0, atol=1e-5)
    with warnings.catch_warnings(action="error"):
        assert_only_draws(ordered_mnist, results)
    said = ordered_mnist.caption(results)
    parts = (
        "Lines are of one of the seeds",
        "100 test images",
        "VAMP-2 0",
        "glyphs: 230 train",
        "whatever the input",
    )
    assert [part for part in parts if part not in said] == []
    figure = ordered_mnist.draw(results)
    assert all(axis.get_yscale() == "log" for axis in figure.subfigs[1].axes)
    assert any(text.get_text() == "chance" for text in figure.subfigs[1].legends[0].get_texts())


def with_seeds(results, names, number):
    """Results of several seeds that are alike, of some of the models."""
    return results.sel(models=names).isel(seeds=[0] * number).assign_coords(seeds=range(number))


def test_seeds_that_are_stuck_are_named_and_not_shown(sequence_results):
    # Of three seeds two see one image everywhere, the third what it saw.
    results = with_seeds(sequence_results, ["autoencoder"], 3)
    labels, logits = results.labels.values, results.logits.values[0]
    logits[2] = np.eye(5)[(labels + results.times.values[:, None]) % 5]
    logits[:2] = np.eye(5)[3]
    assert measured(results).stuck.values.tolist() == [[True, True, False]]
    logits[1] = np.nan
    results = measured(results)
    assert results.stuck.values.tolist() == [[True, False, False]]
    assert "whatever the input, of: autoencoder seed 0." in ordered_mnist.caption(results)
    assert "(autoencoder 2)" in ordered_mnist.caption(results)
    figure = ordered_mnist.draw(results)
    low, high = figure.subfigs[1].axes[0].get_ylim()
    assert 0 < low < 0.5 / len(labels) < high == 1.0
    framed = {
        text.get_text(): text.get_bbox_patch()
        for axis in figure.subfigs[2].axes
        for text in axis.texts
    }
    right = str((labels[0] + 1) % 5)
    assert framed[right] is None  # right, without a frame
    thin = [
        line.get_ydata() for line in figure.subfigs[1].axes[0].lines if line.get_linewidth() < 0.5
    ]
    assert len(thin) == 3


def test_distances_to_the_roots_of_unity():
    roots = np.exp(2j * np.pi * np.arange(5) / 5)
    found = np.stack([roots[::-1], roots * np.exp([0.02j, 0, 0, 0, 0]), roots * [1, 1, 0.9, 1, 1]])
    distances, phases = eigenvalue_errors(found.astype(np.complex64)[None])
    np.testing.assert_allclose(phases, [[0, 0.02, 0]], atol=1e-6)
    np.testing.assert_allclose(distances, [[0, 0.02, 0.1]], atol=1e-5)


def test_a_sequence_of_other_digits_is_refused():
    config = dataclasses.replace(ordered_mnist.Config().quick(), num_digits=4)
    with pytest.raises(ValueError, match="`num_digits` must be the number of different digits"):
        ordered_mnist.compute(config, key=jax.random.key(0), data=glyphs())


def test_projection_moves_eigenvalues_only():
    rng = np.random.default_rng(0)
    turn = 2 * np.pi / 5 + 0.05
    block = 0.9 * np.asarray([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    mix = rng.normal(size=(2, 2))
    plain = Forecaster(
        lambda image: image,
        Latent(jnp.asarray(np.linalg.solve(mix, block @ mix), jnp.float32)),
        None,
    )
    for kind, angle in (("circle", turn), ("roots", 2 * np.pi / 5)):
        values, right, _ = spectral(project(plain, kind, 5).dynamics)
        np.testing.assert_allclose(values, np.exp([1j * angle, -1j * angle]), atol=1e-5)
        own = spectral(plain.dynamics)[1]
        overlap = np.abs(np.sum(np.conj(own) * right, 0))
        np.testing.assert_allclose(
            overlap, np.prod([np.linalg.norm(m, axis=0) for m in (own, right)], 0), rtol=1e-4
        )


@pytest.mark.parametrize(("num_digits", "root"), [(5, 1.0), (4, -1.0)])
def test_a_real_eigenvalue_goes_to_a_real_root(num_digits, root):
    # -1 is as far from two complex fifth roots; either alone would leave a real part that decays.
    mix = np.random.default_rng(1).normal(size=(3, 3))
    matrix = np.linalg.solve(mix, np.diag([-0.8, 0.7, 0.5]) @ mix)
    plain = Forecaster(lambda image: image, Latent(jnp.asarray(matrix, jnp.float32)), None)
    moved = project(plain, "roots", num_digits).dynamics.matrix
    np.testing.assert_allclose(mix @ moved, np.diag([root, 1, 1]) @ mix, atol=1e-3)


def test_spectra():
    config = dataclasses.replace(
        spectra.Config().quick(), lengths=(3000,), systems=("logistic", "ornstein_uhlenbeck")
    )
    results = spectra.compute(config, key=jax.random.key(0))
    other = dataclasses.replace(config, alpha=1e-4)
    assert compilations(lambda: spectra.compute(other, key=jax.random.key(0))) == []
    assert results.eigenvalues.shape == (2, 4, 4, 1, 3)
    assert results.num_components.values.tolist() == [2, 3]  # of a complex pair, and of real ones
    assert np.isnan(results.eigenvalues[0, ..., 2]).all()
    ridge = results.sel(estimators="ridge")
    assert (np.abs(ridge.eigenvalues - results.exact)[..., 0].mean("trajectories") < 0.12).all()
    logistic, diffusion = ridge.isel(systems=0), ridge.sel(systems="Ornstein-Uhlenbeck")
    # What the first eigenfunction of an Ornstein-Uhlenbeck process is, is known: the state itself.
    np.testing.assert_allclose(np.abs(diffusion.exact_functions), np.abs(diffusion.grid), atol=1e-6)
    # A complex eigenfunction is compared as a whole: scaled to the truth it has the truth's size,
    # not that of a part.
    truth, found = logistic.exact_functions.values, logistic.functions.values.mean(0)
    assert np.linalg.norm(found - truth) < 0.35 * np.linalg.norm(truth)
    assert_only_draws(spectra, results)
    figure = spectra.draw(results)
    assert len(figure.axes) == 6
    said = spectra.caption(results)
    for part in (
        "3000 transitions",
        "4 independent trajectories",
        "Ornstein-Uhlenbeck (d, e, f)",
        "95 % Student",
    ):
        assert part in said
    means = [
        bars[0].get_ydata() for bars in figure.axes[3].containers
    ]  # of one estimator each, over the exact rates
    np.testing.assert_allclose(means, results.mean_rate[1] / results.exact_rate[1], rtol=1e-5)
    assert all(
        bars[2][0].get_segments() for bars in figure.axes[5].containers
    )  # errors have intervals
    assert len(spectra.table(results)) == 1 + 4 * (1 + 3)  # a conjugate pair has one rate
    np.testing.assert_allclose(diffusion.exact_rate, [0.5, 1.0, 1.5])
    bias = np.abs(diffusion.mean_rate - diffusion.exact_rate)
    assert (bias < 5 * diffusion.standard_error + 0.05)[:2].all()


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path / "cache")
    sizes = [
        "--num-trajectories",
        "2",
        "--lengths",
        "300",
        "--num-centres",
        "10",
        "--systems",
        "ornstein_uhlenbeck",
    ]
    assert figures.main(["spectra", *sizes, "--out", str(tmp_path), "--silent"]) == 0
    shown = capsys.readouterr().out
    assert "Ornstein-Uhlenbeck" in shown
    (out,) = tmp_path.glob("spectra_*")
    assert {path.suffix for path in out.glob("spectra.*")} == {".pdf", ".png", ".npz", ".json"}
    results = load_results(out / "spectra.npz")
    assert results.eigenvalues.dims == (
        "systems",
        "estimators",
        "trajectories",
        "lengths",
        "components",
    )
    assert results.eigenvalues.sel(systems="Ornstein-Uhlenbeck", estimators="ridge").shape == (
        2,
        1,
        3,
    )
    assert results.exact_functions.dims == results.grid.dims == ("systems", "points")
    assert "estimated against exact" in (out / "report.html").read_text().lower()
    assert (
        figures.main(["ordered-mnist", "--num-train", "100000", "--out", str(tmp_path / "new")])
        == 2
    )
    assert "at most the sequence's length" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()


def test_networks_that_diverged_are_left_out_and_named(sequence_results):
    # Two seeds, of which one did not come through: the second oracle, and the first of the DPNets.
    results = with_seeds(sequence_results, ["linear", "dpnets"], 2).sel(
        networks=["oracle", "dpnets"]
    )
    results["oracle_accuracy"] = ("seeds", [0.75, np.nan])
    results["diverged_at"] = (("networks", "seeds"), [[-1, 4], [8, -1]])
    for field in ("logits", "strips", "eigenvalues", "left"):
        results[field].values[[0, 1, 1], [1, 0, 1]] = np.nan
    results = measured(results)
    row, gone = ordered_mnist.table(results)[1:]
    accuracy = sequence_results.accuracy.sel(
        models="linear", protocols="powers", scales="raw", times=2
    ).item()
    assert row[2] == f"{accuracy:.3f} (1 of 2)"
    assert gone[2] == "none of 2"
    headline = ordered_mnist.headline(results)
    assert "oracle 75.00 % (1 of 2)" in headline
    assert headline.endswith(
        "left out: oracle seed 1 at step 4, dpnets seed 0 at step 8 (2 of 4 networks remain)"
    )
    assert (results.predicted.sel(models="dpnets") == -1).all()  # not class 0
    assert "VAMP" not in ordered_mnist.caption(results)
    figure = ordered_mnist.draw(results)
    figure.canvas.draw()
    read = {text.get_text() for axis in figure.subfigs[2].axes[3:] for text in axis.texts}
    assert read == {"-1"}  # of a row in which nothing was forecast


def test_a_seed_that_diverged_is_not_measured(monkeypatch):
    models = ("classifier", "contrastive")
    sizes = {"num_seeds": 2, "num_train": 130, "num_steps": 1, "num_test": 20}
    config = dataclasses.replace(ordered_mnist.Config().quick(), models=models, **sizes)
    oracle = eqx.filter_vmap(lambda key: Encoder(5, key=key))(jax.random.split(jax.random.key(1)))
    oracle = jax.tree.map(
        lambda leaf: leaf.at[0].set(np.nan) if eqx.is_array(leaf) else leaf, oracle
    )
    gone = {"oracle": np.array([2, -1]), "contrastive": np.array([-1, 3])}
    losses = {name: np.zeros((2, config.num_epochs + 1)) for name in gone}
    batched = {name: np.zeros(2) for name in gone}
    trained = Networks({"oracle": oracle}, losses, batched, gone)
    seen = []

    shapes = ordered_mnist._nothing(config, np.zeros((20, 28, 28)))
    evaluation = {name: np.ones_like(part) for name, part in shapes.items()}
    monkeypatch.setattr(ordered_mnist, "train_networks", lambda *_: trained)
    monkeypatch.setattr(
        ordered_mnist, "forecaster", lambda config, name, *_: seen.append((name, _[-1]))
    )
    monkeypatch.setattr(ordered_mnist, "evaluate", lambda *_, **__: evaluation)
    results = ordered_mnist.compute(config, key=jax.random.key(0), data=glyphs())
    assert seen == [("classifier", 1)]  # both contrastive seeds lack their oracle or themselves
    classifier, contrastive = np.isnan(
        results.accuracy.sel(protocols="powers", scales="raw", times=1)
    ).values
    np.testing.assert_array_equal(classifier, [True, False])
    assert contrastive.all()
    np.testing.assert_array_equal(np.isnan(results.oracle_accuracy), [True, False])
    assert np.isnan(results.logits.sel(models="contrastive")).all()
    assert np.isnan(results.left.sel(models="contrastive")).all()


def test_models_and_protocols_are_axes(sequence_results, tmp_path):
    axes = ("models", "seeds", "protocols", "scales", "times")
    assert_saved(
        sequence_results, tmp_path, {"accuracy": axes, "logits": (*axes, "images", "classes")}
    )
    lengths = {
        "models": 7,
        "seeds": 1,
        "protocols": len(PROTOCOLS),
        "scales": 2,
        "times": 3,
        "images": 100,
    }
    sizes = dict(sequence_results.sizes)
    assert sizes | lengths | {"classes": 5, "networks": 6} == sizes
