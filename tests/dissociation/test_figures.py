"""Both figures in small: what the theory says of the curves, the files, and resuming."""

import dataclasses
import json
import warnings

import jax
import numpy as np
import pytest

from dissociation import cli
from dissociation.figures import command, robustness, transfer
from dissociation.figures.artifacts import Parts

KEY = jax.random.PRNGKey(5)
SMALL = {"num_seeds": 2, "num_epochs": 4, "num_train": 600, "num_test": 150, "width": 48}


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    config = robustness.Config(**SMALL, num_scales=6, num_nuisance=48, published_null=True)
    folder = tmp_path_factory.mktemp("noise")
    return robustness.compute(config, key=KEY, folder=folder), config, folder


@pytest.fixture(scope="module")
def transferred():
    sizes = {"num_budgets": 2, "num_splits": 3, "num_zero": 6, "gradient_steps": 150}
    config = transfer.Config(**SMALL, **sizes, probes=("converged", "one_rate"))
    return transfer.compute(config, key=KEY)


def test_rewrites_of_neurons_leave_the_input_noise_curve_where_it_was(noise):
    results, *_ = noise
    for name in ("duplicated", "scaled", "nuisance"):
        np.testing.assert_allclose(results.input_error[name], results.input_error["trained"], atol=1 / 150)
    moved = results.input_error["null_perturbed"] - results.input_error["trained"]
    assert moved.max() > 0.05  # negative control: kept on the data, changed elsewhere


def test_noise_on_parameters_tells_them_apart(noise):
    results, *_ = noise
    trained, scaled = results.parameter_error["trained"], results.parameter_error["scaled"]
    assert results.parameter_error["trained"].shape == (6, 2)
    assert (scaled - trained).max() > 0.1
    assert "published_null" not in results.parameter_error


def test_certificates(noise):
    results, *_ = noise
    assert results.certificates["trained"]["max_abs_change"] == 0
    for name in ("null_perturbed", "duplicated", "scaled", "nuisance"):
        assert results.certificates[name]["max_abs_change"] < 1e-4
        assert results.certificates[name]["changed_predictions"] == 0
    assert results.certificates["nuisance"]["num_inputs"] == 2 * 150
    assert results.null_space["dimension"] + results.null_space["rank"] == 784


def test_finished_parts_are_used_again_and_others_refused(noise):
    results, config, folder = noise
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir() if path.suffix == ".npz"}
    again = robustness.compute(config, key=KEY, folder=folder)
    assert before == {path: path.stat().st_mtime_ns for path in before}
    jax.tree.map(np.testing.assert_array_equal, robustness.arrays(results), robustness.arrays(again))
    with pytest.raises(ValueError, match="whose config differ"):
        robustness.compute(dataclasses.replace(config, null_scale=0.2), key=KEY, folder=folder)
    with pytest.raises(ValueError, match="whose key differ"):
        robustness.compute(config, key=jax.random.PRNGKey(6), folder=folder)


def test_a_part_is_kept_as_soon_as_it_is_done(tmp_path):
    parts = Parts(tmp_path / "parts", {"config": {"a": 1}})
    np.testing.assert_array_equal(parts.get("one", lambda: {"x": np.arange(3)})["x"], [0, 1, 2])
    again = Parts(tmp_path / "parts", {"config": {"a": 1}})

    def never():
        raise AssertionError("computed twice")

    np.testing.assert_array_equal(again.get("one", never)["x"], [0, 1, 2])
    assert again.seconds["one"] == parts.seconds["one"]
    assert Parts(None, {}).get("one", lambda: {"x": np.ones(1)})["x"] == 1


def test_noise_figure_is_as_specified(noise):
    results, *_ = noise
    figure = robustness.draw(results)
    np.testing.assert_allclose(figure.get_size_inches(), [3.24, 1.6])
    assert len(figure.axes) == 2
    for axes in figure.axes:
        assert axes.get_xscale() == axes.get_yscale() == "log"
        assert axes.get_xlabel() == "noise scale (log)"
        assert not axes.spines["top"].get_visible()
    assert figure.axes[0].get_ylabel() == "test error (log)"
    assert [len(axes.lines) for axes in figure.axes] == [6, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.canvas.draw()


def test_transfer_curves_and_figure(transferred):
    results = transferred
    assert results.budgets.tolist() == [75, 150]
    for task, chance in (("rotation", 0.75), ("coarse", 0.9)):
        curves = results.transfer_error[task]["converged"]
        assert curves["trained"].shape == (2, 2)
        assert curves["trained"][-1].mean() < chance - 0.1
        # Standardised features forget a common factor, so the converged probe cannot see the scaling.
        np.testing.assert_allclose(curves["scaled"], curves["trained"], atol=2 / 75)
    # With a limited number of steps it is the rate that sees it: the trained network's features are 20 times smaller,
    # so a rate that is stable for the scaled ones leaves them where they began.
    one_rate = results.transfer_error["rotation"]["one_rate"]
    assert one_rate["trained"][-1].mean() > one_rate["scaled"][-1].mean() + 0.1
    figure = transfer.draw(results)
    assert figure.axes[0].get_ylim() == (0, 1)
    assert figure.axes[2].get_xlabel() == "sample budget (log)"
    assert figure.axes[0].get_ylabel() == "transfer error"
    assert [len(axes.lines) for axes in figure.axes] == 4 * [4]


def test_command_line_writes_everything_and_resumes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path / "cache")
    # The sizes of the fixture: nothing to compile again.
    sizes = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    arguments = ["robustness", *sizes, "--num-scales", "6", "--num-nuisance", "48", "--out", str(tmp_path / "out")]
    assert cli.main([*arguments, "--silent"]) == 0
    shown = capsys.readouterr()
    assert "input null-perturbed" in shown.out
    assert "compiling" in shown.out
    out = tmp_path / "out"
    assert {path.suffix for path in out.glob("noise-robustness.*")} == {".pdf", ".png", ".npz", ".json"}
    arrays = np.load(out / "noise-robustness.npz")
    assert arrays["input_error_scaled"].shape == (2, 6)
    assert arrays["parameter_error_scaled"].shape == (6, 2)
    description = json.loads((out / "noise-robustness.json").read_text())
    assert description["data"] == {"name": "glyphs", "num_train": 600, "num_test": 150}
    assert description["config"]["num_nuisance"] == 48
    assert description["certificates on the test images"]["scaled"]["changed_predictions"] == 0
    assert "jax" in description["environment"]
    assert cli.main([*arguments, "--silent", "--resume"]) == 0
    assert not list(out.glob(".*-before"))
    again = np.load(out / "noise-robustness.npz")
    np.testing.assert_array_equal(arrays["parameter_error_trained"], again["parameter_error_trained"])


def test_command_line_names_what_is_wrong(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "cache_folder", lambda: tmp_path / "cache")
    with pytest.raises(SystemExit):
        cli.main(["robustness", "--data", "cifar"])
    assert "cifar" in capsys.readouterr().err
    assert cli.main(["transfer", "--num-train", "0", "--out", str(tmp_path)]) == 1
    assert "`num_train` must be at least 1, got 0" in capsys.readouterr().err
