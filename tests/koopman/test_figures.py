import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.data.datasets import Dataset, load
from dissociation.figures import command
from koopman import __main__ as koopman_main
from koopman.figures import ordered_mnist, spectra
from koopman.figures.films import PROTOCOLS, Forecaster, Latent, project, spectral


@pytest.fixture(scope="module")
def film_results():
    models = ("linear", "classifier", "vamp", "contrastive", "dpnets", "autoencoder", "orthogonal")
    sizes = {"num_seeds": 1, "num_train": 230, "num_steps": 2, "oracle_epochs": 10, "models": models}
    config = dataclasses.replace(ordered_mnist.Config().quick(), **sizes)
    return ordered_mnist.compute(config, key=jax.random.key(0), dataset=load("glyphs", num_train=1000, num_test=20))


def test_ordered_digits(film_results):
    results = film_results
    assert results.times.tolist() == [1, 2, 1000]
    for name in results.config.models:
        accuracy = results.accuracy(name)
        assert accuracy.shape == (1, len(PROTOCOLS), 2, 3)
        # Picture by picture there is no horizon of a thousand steps.
        np.testing.assert_array_equal(np.isnan(accuracy[0]).any((0, 1)), [False, False, True])
        assert np.isfinite(accuracy[:, 1:]).all()
        # One step ahead the two ways to look are one.
        np.testing.assert_array_equal(accuracy[:, 0, :, 0], accuracy[:, 1, :, 0])
    assert results.oracle_accuracy.mean() > 0.6
    # The oracle's own features tell digits apart, and their operator foresees the next one: chance is 0.2.
    assert results.accuracy("classifier")[0, 1, 0, 0] > 0.5
    errors = ordered_mnist.eigenvalue_errors(results)
    assert errors["classifier"][0] < errors["linear"][0]
    assert results.strips["autoencoder"].shape == (1, 4, 2, 28, 28)
    assert "glyphs" in ordered_mnist.headline(results)
    assert len(ordered_mnist.table(results)) == 1 + 7
    for name in ("vamp", "contrastive", "dpnets", "autoencoder", "orthogonal"):
        assert np.isfinite(results.validation[name]).all()
        assert results.validation[name][0, -1] < results.validation[name][0, 0]
    # A Cayley transform is orthogonal, trained or not.
    np.testing.assert_allclose(np.abs(results.eigenvalues["orthogonal"]), 1.0, atol=1e-5)
    figure = ordered_mnist.draw(results)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()
    assert any(text.get_text() == "Random" for text in figure.subfigs[1].legends[0].get_texts())


def test_distances_to_the_roots_of_unity(film_results):
    roots = np.exp(2j * np.pi * np.arange(5) / 5)
    found = np.stack([roots[::-1], roots * np.exp([0.02j, 0, 0, 0, 0]), roots * [1, 1, 0.9, 1, 1]])
    results = film_results._replace(eigenvalues={"linear": found.astype(np.complex64)})
    np.testing.assert_allclose(ordered_mnist.phase_errors(results)["linear"], [0, 0.02, 0], atol=1e-6)
    np.testing.assert_allclose(ordered_mnist.eigenvalue_errors(results)["linear"], [0, 0.02, 0.1], atol=1e-5)


def test_projection_moves_eigenvalues_only():
    rng = np.random.default_rng(0)
    turn = 2 * np.pi / 5 + 0.05
    block = 0.9 * np.asarray([[np.cos(turn), -np.sin(turn)], [np.sin(turn), np.cos(turn)]])
    mix = rng.normal(size=(2, 2))
    plain = Forecaster(lambda image: image, Latent(jnp.asarray(np.linalg.solve(mix, block @ mix), jnp.float32)), None)
    for kind, angle in (("circle", turn), ("roots", 2 * np.pi / 5)):
        moved = spectral(project(plain, kind, 5).dynamics)
        np.testing.assert_allclose(moved.values, np.exp([1j * angle, -1j * angle]), atol=1e-5)
        own = spectral(plain.dynamics).right
        overlap = np.abs(np.sum(np.conj(own) * moved.right, 0))
        np.testing.assert_allclose(
            overlap, np.prod([np.linalg.norm(m, axis=0) for m in (own, moved.right)], 0), rtol=1e-4
        )


@pytest.mark.parametrize(("num_digits", "root"), [(5, 1.0), (4, -1.0)])
def test_a_real_eigenvalue_goes_to_a_real_root(num_digits, root):
    # -1 is as far from two complex fifth roots; either alone would leave a real part that decays.
    mix = np.random.default_rng(1).normal(size=(3, 3))
    matrix = np.linalg.solve(mix, np.diag([-0.8, 0.7, 0.5]) @ mix)
    plain = Forecaster(lambda image: image, Latent(jnp.asarray(matrix, jnp.float32)), None)
    moved = project(plain, "roots", num_digits).dynamics.matrix
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(moved)), [root, 1, 1], atol=1e-4)
    np.testing.assert_allclose(np.linalg.matrix_power(moved, num_digits), np.eye(3), atol=1e-3)
    np.testing.assert_allclose(mix @ moved, np.diag([root, 1, 1]) @ mix, atol=1e-3)


def test_a_film_must_hold_the_three_splits():
    labels = np.eye(10, dtype=np.float32)
    config = dataclasses.replace(ordered_mnist.Config(), num_train=5000)
    with pytest.raises(ValueError, match="at most the film's length"):
        ordered_mnist.compute(
            config,
            key=jax.random.key(0),
            dataset=Dataset(
                "mine", np.zeros((10, 784), np.float32), labels, np.zeros((5, 784), np.float32), labels[:5]
            ),
        )


def test_spectra():
    config = dataclasses.replace(spectra.Config().quick(), lengths=(3000,), systems=("logistic", "ornstein_uhlenbeck"))
    results = spectra.compute(config, key=jax.random.key(0))
    for name, exact in results.exact.items():
        for estimator in spectra.ESTIMATORS:
            values = results.eigenvalues[name][estimator]
            assert values.shape == (1, 4, len(exact))
        error = np.abs(results.eigenvalues[name]["ridge"][0] - exact[None])[:, 0].mean()
        assert error < 0.12
    # What the first eigenfunction of an Ornstein-Uhlenbeck process is, is known: the state itself.
    grid, truth = results.grids["ornstein_uhlenbeck"], results.exact_functions["ornstein_uhlenbeck"]
    np.testing.assert_allclose(np.abs(truth), np.abs(grid), atol=1e-6)
    # A complex eigenfunction is compared as a whole: scaled to the truth it has the truth's size, not that of a part.
    truth, found = results.exact_functions["logistic"], results.functions["logistic"]["ridge"].mean(0)
    assert np.linalg.norm(found - truth) < 0.35 * np.linalg.norm(truth)
    figure = spectra.draw(results)
    assert len(figure.axes) == 6
    assert len(spectra.table(results)) == 1 + 4 * (1 + 3)  # a conjugate pair has one rate
    exact, mean, error = spectra.rates(results, "ornstein_uhlenbeck", "ridge")
    np.testing.assert_allclose(exact, [0.5, 1.0, 1.5])
    assert (np.abs(mean - exact)[:2] < 5 * error[:2] + 0.05).all()


def test_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path / "cache")
    sizes = ["--num-trajectories", "2", "--lengths", "300", "--num-centres", "10", "--systems", "ornstein_uhlenbeck"]
    assert koopman_main.main(["spectra", *sizes, "--out", str(tmp_path), "--silent"]) == 0
    shown = capsys.readouterr().out
    assert "Ornstein-Uhlenbeck" in shown
    assert {path.suffix for path in tmp_path.glob("spectra.*")} == {".pdf", ".png", ".npz", ".json"}
    with pytest.raises(SystemExit):
        koopman_main.main(["ordered-mnist", "--data", "cifar"])
