"""Both figures in small: what the theory says of the curves, the files, and resuming."""

import dataclasses
import json

import equinox as eqx
import jax
import numpy as np
import pytest
from drawn import assert_only_draws
from saved import assert_saved

from dissociation import recipes, take
from dissociation.data import load
from dissociation.figures import Cache, main, robustness, rows, transfer
from dissociation.figures import _command as command
from dissociation.figures import _members as members
from dissociation.figures import _null_spaces as null_spaces
from dissociation.models import CNN
from dissociation.rewrites import Certificate, layer_inputs

KEY = jax.random.PRNGKey(5)
SMALL = {"num_seeds": 2, "num_epochs": 30, "num_train": 600, "num_test": 150, "width": 48}


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    config = robustness.Config(**SMALL, num_scales=6, num_zero=48, published_null=True)
    folder = tmp_path_factory.mktemp("noise")
    return robustness.compute(config, key=KEY, cache=folder), config, folder


@pytest.fixture(scope="module")
def transferred():
    sizes = {"num_budgets": 2, "num_splits": 3, "num_zero": 6, "gradient_steps": 150}
    config = transfer.Config(**SMALL, **sizes, probes=("converged", "one_rate"))
    return transfer.compute(config, key=KEY)


@pytest.mark.slow
def test_rewrites_of_neurons_leave_the_input_noise_curve_where_it_was(noise):
    results, *_ = noise
    errors, parameters = (
        rows(results.input_error, "variants"),
        rows(results.parameter_error, "variants"),
    )
    for name in ("duplicated", "scaled", "nuisance"):
        np.testing.assert_allclose(errors[name], errors["trained"], atol=1 / 150)
    assert "are those of trained at 3 scales" in robustness.caption(results)
    whole = dataclasses.replace(noise[1], even_scales=True)
    assert robustness._num_even(whole) == 6
    # A negative control: the function is kept on the data, and changed elsewhere.
    assert (errors["null-perturbed"] - errors["trained"]).max() > 0.05
    assert (
        parameters["scaled"] - parameters["trained"]
    ).max() > 0.1  # noise on parameters distinguishes them
    assert set(errors) - set(parameters) == {robustness.UNCLEAR}


@pytest.mark.parametrize("difference", [0.0, 0.002, np.nan])
def test_curves_that_are_equal_at_even_scales_are_measured_once(difference):
    calls = []

    def errors_at(scales, names):
        calls.append((scales, names))
        trained = np.tile(1 / (1 + scales**-4.0), (2, 1))
        errors = {"trained": trained, "other": trained / 2, "equal": trained.copy()}
        errors["equal"][1, -1] += difference
        return {name: errors[name] for name in names}

    names = ["trained", "other", "equal"]
    scales, errors, shared = robustness._curves(errors_at, names, ("equal",), (-2.0, 2.0), 11, 6)
    (even, first), (steep, second) = calls
    assert first == names
    assert (second, shared) == ((names, []) if difference else (names[:2], ["equal"]))
    np.testing.assert_allclose(even, np.logspace(-2, 2, 6), rtol=1e-6)
    # The two intervals beside 1 have nearly all of the rise.
    assert ((steep > even[2] / 6.4) & (steep < even[3] * 6.4)).all()
    np.testing.assert_array_equal(scales, np.sort(np.concatenate([even, steep])))
    np.testing.assert_allclose(errors["other"][0], errors["trained"][0] / 2)
    np.testing.assert_allclose(errors["trained"][0], 1 / (1 + scales**-4.0), rtol=1e-6)
    assert (errors["equal"] == errors["trained"]).all() != bool(difference)


@pytest.mark.slow
def test_the_published_null_space_is_no_smaller_and_not_everything():
    data = load("glyphs", num_train=60, num_test=500)
    found = null_spaces.null_spaces(
        "mlp", None, "", data.test_images, 1, published=data.test_images
    )
    assert found["dimension"] <= len(found["published_basis"]) < 400


def test_null_spaces_of_what_networks_make_of_their_images():
    images, path = (
        np.random.default_rng(0).uniform(size=(5, 784)).astype(np.float32),
        ".head.weight",
    )
    models = eqx.filter_jit(eqx.filter_vmap(lambda key: CNN(8, 10, key=key)))(jax.random.split(KEY))
    found = null_spaces.null_spaces("cnn", models, path, images, 2)
    for index, basis in enumerate(found["basis"]):
        seen = np.asarray(layer_inputs(take(models, index), images, path).rows)
        assert np.abs(seen @ basis.T).max() < 1e-5 * np.abs(seen).max()
        assert np.linalg.matrix_rank(basis) + np.linalg.matrix_rank(seen) == seen.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    ["resnet", *(pytest.param(name, marks=pytest.mark.full) for name in ("cnn", "transformer"))],
)
def test_networks_of_images(model):
    sizes = {
        "num_seeds": 2,
        "num_epochs": 2,
        "num_train": 200,
        "num_test": 40,
        "width": 12,
        "model": model,
    }
    results = robustness.compute(robustness.Config(**sizes, num_scales=2, num_zero=6), key=KEY)
    size = max(np.abs(results.test_error).max(), 1.0)
    assert (results.max_abs_change < 1e-4 * size).all()
    assert (
        json.loads(results.null_space)["dimension"] >= 1
    )  # few images, or a mean that normalisation takes out
    assert [row[0] for row in robustness.table(results)[1:3]] == ["trained", "null-perturbed"]
    with pytest.raises(
        ValueError, match="`published_null` must be False except for the perceptron"
    ):
        robustness.Config(**sizes, published_null=True)


@pytest.mark.full
def test_features_of_networks_of_images_transfer():
    sizes = {
        "num_seeds": 2,
        "num_epochs": 2,
        "num_train": 200,
        "num_test": 40,
        "width": 12,
        "model": "transformer",
    }
    probed = transfer.Config(
        **sizes, num_budgets=1, num_splits=2, num_zero=6, probes=("converged",)
    )
    results = transfer.compute(probed, key=KEY)
    assert_only_draws(transfer, results)  # a single budget
    errors = rows(results.transfer_error.sel(tasks="coarse", probes="converged"), "variants")
    np.testing.assert_allclose(errors["duplicated"], errors["trained"], atol=0.1)


@pytest.mark.slow
def test_certificates(noise, transferred):
    results, config, folder = noise
    assert results.identical(robustness.compute(config, key=KEY, cache=folder))
    assert results.max_abs_change.sel(variants="trained") == 0
    kept = results.sel(variants=["null-perturbed", "duplicated", "scaled", "nuisance"])
    assert (kept.max_abs_change < 1e-4).all()
    assert (kept.changed_predictions == 0).all()
    assert results.num_inputs.sel(variants="nuisance") == 2 * 150
    null_space = json.loads(results.null_space)
    assert null_space["dimension"] + null_space["rank"] == 784
    # A variant has one name in legend, table, report and array.
    named = [row[0] for row in transfer.table(transferred)[1:]]
    assert list(command.certificates_of(transferred)["certificates on the test images"]) == named
    assert transfer.draw(transferred).axes[0].get_legend_handles_labels()[1] == named
    assert transferred.variants.values.tolist() == named


def test_a_part_is_kept_as_soon_as_it_is_done(tmp_path):
    with Cache(tmp_path / "parts", {"config": {"a": 1}}) as parts:
        np.testing.assert_array_equal(parts.get("one", lambda: {"x": np.arange(3)})["x"], [0, 1, 2])
        with (
            pytest.raises(OSError, match="is in use by process"),
            Cache(tmp_path / "parts", {"config": {"a": 1}}),
        ):
            pass
    with (
        pytest.raises(ValueError, match="whose a differ"),
        Cache(tmp_path / "parts", {"config": {"a": 2}}),
    ):
        pass

    def never():
        raise AssertionError("computed twice")

    with Cache(
        tmp_path / "parts", {"config": {"a": 1}}
    ) as again:  # free after a use and after a refusal
        np.testing.assert_array_equal(again.get("one", never)["x"], [0, 1, 2])
    assert again.seconds["one"] == parts.seconds["one"]
    with Cache(None, {}) as nowhere:
        assert nowhere.get("one", lambda: {"x": np.ones(1)})["x"] == 1


@pytest.fixture
def one_diverges(monkeypatch):
    """The second of the seeds diverges at step 7, in the second epoch."""
    real = recipes.fit_classifiers

    def fit_classifiers(**options):
        trained = real(**options)
        models = jax.tree.map(
            lambda leaf: leaf.at[1].set(np.nan) if eqx.is_array(leaf) else leaf, trained.models
        )
        observed = {name: values.copy() for name, values in trained.history.observed.items()}
        observed["test_loss"][1, 2:] = (
            np.nan
        )  # and the test error stays what it was: that of a class
        history = trained.history._replace(observed=observed)
        return trained._replace(models=models, history=history, diverged_at=np.array([-1, 7]))

    monkeypatch.setattr(members, "fit_classifiers", fit_classifiers)


@pytest.mark.slow
def test_a_network_that_diverged_is_left_out_and_named(noise, one_diverges, tmp_path):
    results, config, _ = noise
    found = robustness.compute(config, key=KEY, cache=tmp_path)
    for kind in ("input_error", "parameter_error", "clean_error"):
        assert np.isnan(found[kind].sel(seeds=1)).all()
        np.testing.assert_array_equal(found[kind].sel(seeds=0), results[kind].sel(seeds=0))
    lost = np.arange(config.num_epochs + 1) >= 2
    np.testing.assert_array_equal(np.isnan(found.test_error), [0 * lost > 0, lost])
    scaled, before = (dataset.sel(variants="scaled") for dataset in (found, results))
    assert scaled.num_inputs == 150
    assert scaled.max_abs_change <= before.max_abs_change
    assert robustness.headline(found).endswith(
        "diverged and left out: seed 1 at step 7 (1 of 2 networks remain)"
    )
    assert "diverged" not in robustness.headline(results)
    row = robustness.table(found)[1]
    assert row[1] == f"{100 * results.clean_error[0, 0].item():.2f} % (1 of 2)"
    assert "seed 1 at step 7" in robustness.caption(found)
    lines = robustness.draw(found).axes[0].lines
    np.testing.assert_allclose(lines[0].get_ydata(), results.input_error[0, 0])


@pytest.mark.slow
def test_networks_that_all_diverged_are_an_error(monkeypatch):
    real, gone = recipes.fit_classifiers, np.array([3, 3])
    monkeypatch.setattr(
        members, "fit_classifiers", lambda **options: real(**options)._replace(diverged_at=gone)
    )
    with pytest.raises(ValueError, match="All 2 networks diverged, at step 3"):
        robustness.compute(robustness.Config(**SMALL | {"num_epochs": 1}), key=KEY)


@pytest.mark.slow
def test_noise_figure_is_as_specified(noise):
    results, *_ = noise
    figure = robustness.draw(results)
    np.testing.assert_allclose(figure.get_size_inches(), [3.24, 2.9])
    above, below = figure.axes[:2], figure.axes[2:]
    assert [axes.get_yscale() for axes in figure.axes] == ["log", "log", "linear", "linear"]
    assert [axes.get_xlabel() for axes in below] == ["noise scale"] * 2
    assert above[0].get_ylabel() == "test error"
    names = [axes.get_legend_handles_labels()[1] for axes in figure.axes]
    assert [len(shown) for shown in names] == [6, 5, 5, 4]
    moved = next(line for line in below[0].lines if line.get_label() == "null-perturbed")
    paired = results.input_error.sel(variants="null-perturbed") - results.input_error.sel(
        variants="trained"
    )
    np.testing.assert_allclose(moved.get_ydata(), paired.values.mean(0))
    for part in ("means over 2 seeds", "600 training and 150 test images", "glyphs", "nuisance"):
        assert part in robustness.caption(results)


@pytest.mark.slow
def test_drawing_computes_nothing(noise, transferred):
    """Also for a single seed."""
    for figure, results in ((robustness, noise[0]), (transfer, transferred)):
        assert_only_draws(figure, results)
        assert_only_draws(figure, results.isel(seeds=[0]))


@pytest.mark.slow
def test_transfer_curves_and_figure(transferred):
    results = transferred
    assert results.budgets.values.tolist() == [75, 150]
    for task, chance in (("rotation", 0.75), ("coarse", 0.9)):
        curves = rows(results.transfer_error.sel(tasks=task, probes="converged"), "variants")
        assert curves["trained"].shape == (2, 2)
        assert curves["trained"][:, -1].mean() < chance - 0.1
        # Standardised features forget a common factor, so the converged probe cannot see the
        # scaling.
        np.testing.assert_allclose(curves["scaled"], curves["trained"], atol=2 / 75)
    # With a limited number of steps it is the rate that sees it: the trained network's features are
    # 20 times smaller, so a rate that is stable for the scaled ones leaves them where they began.
    one_rate = rows(results.transfer_error.sel(tasks="rotation", probes="one_rate"), "variants")
    assert one_rate["trained"][:, -1].mean() > one_rate["scaled"][:, -1].mean() + 0.05
    figure = transfer.draw(results)
    assert figure.axes[-1].get_xlabel() == "sample budget"
    assert [axes.get_ylabel() for axes in figure.axes[::2]] == 2 * [
        "transfer error",
        "added transfer error",
    ]
    assert "quarter turns (a, b) and least prime factor (e, f)" in transfer.caption(results)


def test_a_change_that_is_nan_shows_unless_its_network_diverged():
    changes = dict.fromkeys((*Certificate._fields, "clean_error"), np.array([1.0, np.nan, 3.0]))
    alive = np.array([True, False, True])
    found = members.certified({"scaled_certificate": changes}, ["scaled"], alive)
    assert (found["max_abs_change"][1], found["changed_predictions"][1]) == ([3.0], [4.0])
    assert np.isnan(
        members.certified({"scaled_certificate": changes}, ["scaled"], alive | True)[
            "max_abs_change"
        ][1]
    )


@pytest.mark.slow
def test_variants_tasks_and_probes_are_axes(noise, transferred, tmp_path):
    dims = {
        "input_error": ("variants", "seeds", "input_scales"),
        "clean_error": ("variants", "seeds"),
    }
    assert_saved(noise[0], tmp_path, dims)
    assert noise[0].input_scales.attrs == {"units": "pixel intensity"}
    assert_saved(
        transferred,
        tmp_path,
        {"transfer_error": ("tasks", "probes", "variants", "seeds", "budgets")},
    )


@pytest.mark.slow
def test_settings_that_the_data_cannot_meet_are_refused_before_training(tmp_path, capsys):
    for words, name in (
        (["transfer", "--num-test", "20", "--num-train", "50"], "num_budgets"),
        (
            ["transfer", "--quick", "--num-test", "3", "--num-splits", "2", "--num-budgets", "1"],
            "num_test",
        ),
        (["similarity", "--num-test", "50"], "num_samples"),
        (["freedom", "--num-test", "50"], "num_samples"),
        (["collapse", "--num-loaded", "50"], "num_train"),
        (["collapse", "--num-test", "5"], "num_neighbours"),
    ):
        assert main([*words, "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert f"`{name}` must " in error
        assert error.removeprefix("dissociation: compiling\n").count("\n") == 1
    assert not (tmp_path / "out").exists()
