"""Data of models as users have them: frames, clocks, runs, units, gaps, and refusals."""

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from words import refused, warned

from koopman import Ridge, fit_model, load_model

pytestmark = pytest.mark.usefixtures("x64")

LENGTHS = (60, 50, 40)
OPTIONS = {"time": "hours", "run": "replicate"}


def frame_of_runs(step=0.5):
    """Return a table of three runs of a noisy oscillation, as read from a CSV file."""
    rng = np.random.default_rng(0)
    frames = []
    for run, length in enumerate(LENGTHS):
        angle = 0.4 * np.arange(length)
        columns = {"a": np.cos(angle), "b": np.sin(angle)}
        table = pd.DataFrame(columns) + 0.1 * rng.normal(size=(length, 2))
        table.insert(0, "hours", step * np.arange(length))
        table.insert(0, "replicate", f"r{run}")
        frames.append(table)
    return pd.concat(frames, ignore_index=True)


FRAME = frame_of_runs()
RUNS = [table[["a", "b"]].to_numpy() for _, table in FRAME.groupby("replicate")]


def coefficients(model):
    """Return the matrix of a linear model."""
    return model.matrices().A.values[0]


def test_all_forms_give_one_model():
    expected = coefficients(fit_model(RUNS))
    indexed = FRAME.set_index(["replicate", "hours"])
    shuffled = FRAME.sample(frac=1, random_state=0)
    listed = [table.set_index("hours")[["a", "b"]] for _, table in FRAME.groupby("replicate")]
    for trajectories, options in (
        (FRAME, OPTIONS),
        (shuffled, OPTIONS),
        (indexed, {}),
        (listed, {}),
        (FRAME.reset_index(), OPTIONS | {"columns": ["a", "b"]}),
    ):
        model = fit_model(trajectories, **options)
        np.testing.assert_allclose(coefficients(model), expected, atol=1e-12)
        assert model.meaning.columns == ("a", "b")
        assert model.rates().growth.attrs["units"] == "1/hours"
        assert model.meaning.time_step == 0.5
    stacked = np.stack([run[:40] for run in RUNS])
    expected = coefficients(fit_model(list(stacked)))
    for axis in (0, 1):
        array = np.moveaxis(stacked, 0, axis)
        model = fit_model(array, trajectory_axis=axis)
        np.testing.assert_allclose(coefficients(model), expected, atol=1e-12)


def test_one_series_arrays_of_xarray_and_units():
    series = RUNS[0][:, 0]
    model = fit_model(series, num_delays=2)
    assert model.rates().frequency.attrs["units"] == "1/step"
    named = xr.DataArray(RUNS[0], dims=("time", "state"), coords={"time": np.arange(60) * 0.5})
    labelled = fit_model(named)
    np.testing.assert_allclose(coefficients(labelled), coefficients(fit_model(RUNS[0])))
    assert labelled.meaning.unit == "time"
    dates = pd.Series(series, pd.date_range("2020-01-01", periods=60, freq="6h"), name="x")
    dated = fit_model(dates, num_delays=2)
    assert dated.rates().time_scale.attrs["units"] == "day"
    assert dated.meaning.time_step == 0.25
    times = dated.predict(2).time.values[:, 0]
    expected = np.array(["2020-01-16T00", "2020-01-16T06"], "datetime64[ns]")
    np.testing.assert_array_equal(times, expected)
    assert dated.predict(1).column.values.tolist() == ["x"]


def test_forecasts_start_at_the_ends_of_runs_or_at_a_past():
    model = fit_model(FRAME, **OPTIONS, num_delays=2)
    forecast = model.predict(3)
    assert forecast["mean"].dims == ("step", "run", "column")
    assert forecast.run.values.tolist() == ["r0", "r1", "r2"]
    np.testing.assert_allclose(forecast.time.values[0], [30.0, 25.0, 20.0])
    for past in ([run[-2:] for run in RUNS], np.stack([run[-2:] for run in RUNS]), RUNS):
        np.testing.assert_allclose(model.predict(3, past)["mean"], forecast["mean"])
    tail = FRAME.groupby("replicate").tail(2)
    framed = model.predict(3, tail)
    np.testing.assert_allclose(framed["mean"], forecast["mean"])
    np.testing.assert_allclose(framed.time, forecast.time)


def test_missing_rows_and_gaps_split_runs_with_one_warning():
    frame = FRAME.copy()
    frame.loc[20, "a"] = np.nan
    frame = frame.drop(index=[75, 76, 112, 114])
    messages = warned(lambda: fit_model(frame, **OPTIONS))
    (message,) = [words for words in messages if "pieces" in words]
    assert "1 rows with missing values and 3 gaps" in message
    assert "left out 1 of 7 pieces" in message
    with pytest.warns(UserWarning, match="left out"):
        model = fit_model(frame, **OPTIONS)
    # Successors of the rows that are left, within pieces.
    cut = [RUNS[0][:20], RUNS[0][21:], RUNS[1][:15], RUNS[1][17:], RUNS[2][:2], RUNS[2][5:]]
    np.testing.assert_allclose(coefficients(model), coefficients(fit_model(cut)), atol=1e-12)
    assert model.predict(1).sizes["run"] == 3


def test_unclear_data_are_refused_with_what_to_write():
    def fitted(table, **options):
        return lambda: fit_model(table, **(OPTIONS | options))

    uneven = FRAME.assign(hours=FRAME.hours**1.5)
    clocks = r"`trajectories` must hold states alone.*'index'.*columns=\['a', 'b'\]"
    refused(
        (fitted(FRAME.reset_index()), clocks),
        (fitted(FRAME.assign(note="x")), "text, dates or objects in"),
        (fitted(FRAME, run=None, columns=["a"]), "0.0 after 0.0.*run='replicate'"),
        (fitted(uneven), "For uneven times use koopman.fit_exponentials"),
        (fitted(FRAME, time_step=0.1), r"`time_step` must be None, or that of the clock \(0.5"),
        (fitted(FRAME, num_delays=80), "must have 81 rows or more in a run"),
        (fitted(FRAME.assign(a=np.inf)), "must be finite, or NaN where missing"),
        (lambda: fit_model(RUNS[0], time="hours"), "`time` must be None unless"),
        (lambda: fit_model(np.stack([RUNS[0]] * 2)), "Pass trajectory_axis=0"),
        (lambda: fit_model([RUNS[0], RUNS[1][:, :1]]), r"must have states of shape \(2,\)"),
        (
            lambda: fit_model(FRAME, **OPTIONS).predict(1, past=FRAME.rename(columns={"b": "c"})),
            "`columns` must be columns of",
        ),
        error=(ValueError, TypeError),
    )
    refused(
        (lambda: fit_model(RUNS[0] + 1j), "imaginary parts as two features"),
        (lambda: fit_model(np.array([None, {}, []], object)), "an array of dtype object"),
        error=TypeError,
    )


def driven_runs():
    """Return runs of x' = x R + u B with noise, and their inputs."""
    rng = np.random.default_rng(3)
    rotation = 0.9 * np.array([[np.cos(0.4), np.sin(0.4)], [-np.sin(0.4), np.cos(0.4)]])
    gain = np.array([[0.5, 0.0], [1.0, -1.0]])
    runs = []
    inputs = []
    for length in (150, 200, 120):
        u = rng.normal(size=(length, 2))
        x = np.zeros((length, 2))
        for step in range(length - 1):
            x[step + 1] = x[step] @ rotation + u[step] @ gain + 0.1 * rng.normal(size=2)
        runs.append(x)
        inputs.append(u)
    return runs, inputs, rotation, gain


DRIVEN, INPUTS, A, B = driven_runs()


def test_inputs_give_the_regression_of_dmdc():
    matrices = fit_model(DRIVEN, inputs=INPUTS).matrices()
    rows = []
    for x, u in zip(DRIVEN, INPUTS, strict=True):
        rows.append(np.hstack([x[:-1], u[:-1], np.ones((len(x) - 1, 1))]))
    target = np.concatenate([x[1:] for x in DRIVEN])
    solution = np.linalg.lstsq(np.concatenate(rows), target, rcond=None)[0]
    np.testing.assert_allclose(matrices.A.values[0], solution[:2], atol=1e-10)
    np.testing.assert_allclose(matrices.B.values[0], solution[2:4], atol=1e-10)
    np.testing.assert_allclose(matrices.intercept.values, solution[4], atol=1e-10)
    held = [
        (matrices[f"{name}_low"] < truth) & (truth < matrices[f"{name}_high"])
        for name, truth in (("A", A[None]), ("B", B[None]))
    ]
    assert np.mean(held) > 0.7
    plain = fit_model(DRIVEN[0], inputs=INPUTS[0], center=False).matrices()
    joint = np.linalg.pinv(np.hstack([DRIVEN[0], INPUTS[0]])[:-1]) @ DRIVEN[0][1:]
    np.testing.assert_allclose(plain.A.values[0], joint[:2], atol=1e-10)
    pydmd = pytest.importorskip("pydmd")
    peer = pydmd.DMDc(svd_rank=-1, svd_rank_omega=-1)
    peer.fit(DRIVEN[0].T, INPUTS[0][:-1].T)
    np.testing.assert_allclose(peer.B, plain.B.values[0].T, atol=1e-6)


def test_input_delays_recover_a_partly_observed_system(tmp_path):
    rng = np.random.default_rng(0)
    u = rng.normal(size=300)
    state = np.zeros((301, 2))
    for step in range(300):
        rotation = np.array([[0.95, -0.2], [0.2, 0.9]])
        state[step + 1] = rotation @ state[step] + np.array([0.1, 1.0]) * u[step]
    x = state[:300, 0]
    model = fit_model(x, Ridge(1e-14), inputs=u, num_delays=2, num_input_delays=2)
    matrices = model.matrices()
    np.testing.assert_allclose(matrices.A.values.ravel(), [1.85, -0.895], atol=1e-8)
    np.testing.assert_allclose(matrices.B.values.ravel(), [0.1, -0.29], atol=1e-8)
    values = model.mode_table().eigenvalues
    np.testing.assert_allclose(values, [0.925 + 0.198431j], atol=1e-6)
    start = fit_model(x[:250], Ridge(1e-14), inputs=u[:250], num_delays=2, num_input_delays=2)
    forecast = start.predict(40, inputs=u[249:289, None])
    np.testing.assert_allclose(forecast["mean"].values[:, 0, 0], x[250:290], atol=1e-6)
    given_past = start.predict(40, past=x[248:250], inputs=u[248:289, None])
    np.testing.assert_allclose(given_past["mean"], forecast["mean"], atol=1e-10)
    start.save(tmp_path / "driven.npz")
    loaded = load_model(tmp_path / "driven.npz").predict(40, inputs=u[249:289, None])
    np.testing.assert_array_equal(loaded["mean"], forecast["mean"])


def test_inputs_of_frames_and_scores():
    frames = []
    for run, (x, u) in enumerate(zip(DRIVEN, INPUTS, strict=True)):
        columns = {"run": run, "t": np.arange(len(x)) * 0.1, "x": x[:, 0], "y": x[:, 1]}
        frames.append(pd.DataFrame(columns | {"u": u[:, 0], "v": u[:, 1]}))
    table = pd.concat(frames)
    model = fit_model(table, time="t", run="run", inputs=["u", "v"])
    expected = fit_model(DRIVEN, inputs=INPUTS).matrices()
    np.testing.assert_allclose(model.matrices().A, expected.A, atol=1e-12)
    assert model.matrices().input.values.tolist() == ["u", "v"]
    np.testing.assert_allclose(model.score(table, 1).error, 0.1, rtol=0.1)


def test_noise_of_driven_states_is_seen_at_twice_the_lag():
    rng = np.random.default_rng(5)
    reasons = []
    for runs in (DRIVEN, [x + rng.normal(size=x.shape) for x in DRIVEN]):
        rates = fit_model(runs, inputs=INPUTS).rates()
        reasons.append(str(rates.reason.values[0]))
    assert reasons[0] == ""
    assert reasons[1].startswith("twice the lag disagrees")


def test_inputs_that_do_not_fit_are_refused():
    model = fit_model(DRIVEN, inputs=INPUTS)

    def fitted(inputs, estimator=None, **options):
        return lambda: fit_model(DRIVEN, estimator, inputs=inputs, **options)

    from koopman import RBF, PrincipalComponents

    constant = [np.ones((len(x), 1)) for x in DRIVEN]
    feedback = [x @ [[1.0], [2.0]] for x in DRIVEN]
    refused(
        (fitted(constant), "`inputs` must vary: the intercept stands for"),
        (fitted(feedback), "`inputs` must not be a linear function of the states"),
        (fitted(INPUTS[:2]), r"`inputs` must have one array per run \(3\), got 2"),
        (fitted([u[:-1] for u in INPUTS]), r"`inputs` must have shape .*150 times of run 0"),
        (fitted(INPUTS, PrincipalComponents(1)), "`estimator` must be Ridge with"),
        (fitted(INPUTS, lag=2), "`lag` must be 1 with"),
        (fitted(INPUTS, kernel=RBF(1.0)), "`kernel` must be None with"),
        (lambda: model.predict(3), r"`inputs` must be finite, of shape \[3, 2\].*got None"),
        (lambda: model.predict(3, inputs=np.ones((2, 2))), r"got shape \(2, 2\)"),
        (lambda: model.operator, "`operator` must be used without inputs"),
    )
