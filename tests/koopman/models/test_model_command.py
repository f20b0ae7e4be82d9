"""The command `fit`: files, options, what it writes, and what it refuses."""

import dataclasses

import jax
import numpy as np
import pandas as pd
from drawn import assert_only_draws
from words import refused

from dissociation import load_results
from koopman import figures, load_model
from koopman.figures import fit

TONES = fit.Config(num_times=300, num_delays=12, steps=8)


def test_two_tones_are_fitted_and_drawn():
    results = fit.compute(TONES, key=jax.random.key(0))
    assert results.sizes["mode"] == 2
    np.testing.assert_allclose(sorted(results.frequency), [1 / np.pi, 2.5 / np.pi], atol=0.02)
    assert results.forecast_mean.shape == (8, 8)
    assert_only_draws(fit, results)
    assert "2 modes" in fit.caption(results)
    header, *rows = fit.table(results)
    assert header[1] == "growth (1/time)"
    assert len(rows) == 2


def test_a_table_gives_a_figure_and_a_model(tmp_path, capsys):
    angle = 0.3 * np.arange(90)
    noise = 0.1 * np.random.default_rng(0).normal(size=(90, 2))
    columns = {"x": np.cos(angle) + noise[:, 0], "y": np.sin(angle) + noise[:, 1]}
    table = pd.DataFrame(columns | {"hours": np.arange(90) * 0.5, "run": ["a"] * 50 + ["b"] * 40})
    table.to_csv(tmp_path / "runs.csv", index=False)
    words = ["fit", "--file", str(tmp_path / "runs.csv"), "--time", "hours", "--run", "run"]
    options = ["--steps", "5", "--rank", "2", "--num-delays", "4", "--silent"]
    assert figures.main([*words, *options, "--out", str(tmp_path)]) == 0
    (folder,) = tmp_path.glob("fit_*")
    assert "growth (1/hours)" in capsys.readouterr().out
    results = load_results(folder / "fit.npz")
    with jax.enable_x64(True):
        model = load_model(folder / "model.npz")
        forecast = model.predict(5)["mean"].sel(run="a")
    np.testing.assert_allclose(results.forecast_mean, forecast, atol=1e-8)
    assert figures.main([*words[:3], "--time", "days", "--out", str(tmp_path), "--silent"]) == 1
    assert "`time` must be a column" in capsys.readouterr().err


def test_arrays_of_a_file_are_runs_and_inputs(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {}
    for run in range(2):
        u = rng.normal(size=60)
        x = np.zeros(60)
        for step in range(59):
            x[step + 1] = 0.8 * x[step] + u[step]
        arrays |= {f"x{run}": x, f"u{run}": u}
    np.savez(tmp_path / "runs.npz", **arrays)
    config = fit.Config(str(tmp_path / "runs.npz"), inputs=("u0", "u1"), steps=3)
    results = fit.compute(config, key=jax.random.key(0))
    np.testing.assert_allclose(results.growth, [np.log(0.8)], atol=1e-6)
    np.save(tmp_path / "run.npy", arrays["x0"])
    single = dataclasses.replace(config, file=str(tmp_path / "run.npy"), inputs=())
    assert fit.compute(single, key=jax.random.key(0)).sizes["mode"] == 1
    objects = tmp_path / "objects.npz"
    np.savez(objects, runs=np.array([None, {}], object))
    wrong = dataclasses.replace(config, columns=("z",))
    refused(
        (lambda: fit.compute(wrong, key=jax.random.key(0)), "`columns` must be arrays of"),
        (lambda: fit.source(fit.Config(str(objects))), "`file` must hold arrays of numbers"),
        (lambda: fit.Config(time="t"), "`file` must be given with time"),
    )
