"""Clocks, names and inputs of frames as users have them."""

import numpy as np
import pandas as pd
import pytest

from koopman import fit_model


@pytest.fixture(autouse=True)
def double(x64):
    """Turn x64 mode on."""


def frame_of(num_rows=120, angle=0.3, seed=0):
    """Two noisy coordinates that decay and turn, driven by noise."""
    rng = np.random.default_rng(seed)
    turn = 0.95 * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    states = [rng.normal(size=2)]
    for _ in range(num_rows - 1):
        states.append(states[-1] @ turn + rng.normal(size=2))
    return pd.DataFrame(states, columns=["x", "y"])


def frequency(model):
    return float(model.rates().frequency[0])


def test_a_rounded_clock_has_the_mean_step():
    frame = frame_of()
    exact = fit_model(frame, time_step=1 / 60)
    rounded = fit_model(frame.assign(s=(np.arange(120) / 60).round(3)), time="s")
    assert frequency(rounded) == pytest.approx(frequency(exact), rel=1e-3)
    given = fit_model(frame.assign(s=(np.arange(120) / 60).round(3)), time="s", time_step=1 / 60)
    assert frequency(given) == pytest.approx(frequency(exact), rel=1e-9)


def test_runs_of_other_steps_are_refused():
    first = frame_of().assign(t=0.5 * np.arange(120), k="a")
    second = frame_of(60, seed=1).assign(t=1.0 * np.arange(60), k="b")
    with pytest.raises(ValueError, match="one time step in all runs.*in run 'b'.*fit_exponentials"):
        fit_model(pd.concat([first, second]), time="t", run="k")


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y"])
def test_days_and_months_are_told_apart_by_their_values(form):
    days = pd.date_range("2025-03-01", periods=120, freq="D")
    model = fit_model(frame_of().assign(day=days.strftime(form)), time="day")
    assert model.meaning.time_step == pytest.approx(1.0)
    assert model.predict(1).time.values.ravel()[0] == days[-1] + days.freq


def test_days_that_may_be_months_are_refused():
    days = pd.date_range("2025-03-01", periods=12, freq="D").strftime("%d/%m/%Y")
    with pytest.raises(TypeError, match="dayfirst=True"):
        fit_model(frame_of(12).assign(day=days), time="day")


def test_time_zones_are_converted_to_utc():
    times = pd.date_range("2025-03-01", periods=120, freq="h", tz="Europe/Berlin")
    model = fit_model(frame_of().assign(when=times), time="when")
    last = model.predict(1).time.values.ravel()[0]
    assert last == (times[-1] + times.freq).tz_convert(None)
    assert frequency(model) == pytest.approx(24 * frequency(fit_model(frame_of())), rel=1e-6)


def test_one_series_is_scored_and_continued():
    frame = frame_of().assign(t=np.arange(120.0))
    model = fit_model(frame, time="t")
    array = fit_model(frame[["x", "y"]].to_numpy())
    np.testing.assert_allclose(
        model.score(frame, [1, 2]).to_array(),
        array.score(frame[["x", "y"]].to_numpy(), [1, 2]).to_array(),
    )
    forecast = model.predict(3, past=frame)
    np.testing.assert_allclose(forecast["mean"], model.predict(3)["mean"])


@pytest.mark.parametrize("name", ["time", "frame", "Unnamed: 0"])
def test_two_clocks_are_refused_with_a_call_that_works(name):
    frame = frame_of().assign(**{"t": np.arange(120) * 0.5, name: np.arange(120.0) + 1})
    with pytest.raises(ValueError, match="clocks") as refused:
        fit_model(frame, time="t")
    assert "columns=['x', 'y']" in str(refused.value)
    fit_model(frame, time="t", columns=["x", "y"])


def test_inputs_of_a_forecast_are_read_by_name():
    inputs = np.random.default_rng(3).normal(size=(120, 2))
    frame = frame_of().assign(u=inputs[:, 0], v=inputs[:, 1])
    model = fit_model(frame, inputs=["u", "v"])
    new = pd.DataFrame(inputs[:5], columns=["u", "v"])
    expected = model.predict(5, inputs=inputs[:5])["mean"]
    np.testing.assert_array_equal(model.predict(5, inputs=new[["v", "u"]])["mean"], expected)
    with pytest.raises(ValueError, match="`inputs` must have the columns .*'u', 'v'"):
        model.predict(5, inputs=new.rename(columns={"v": "w"}))
    arrays = fit_model(frame[["x", "y"]].to_numpy(), inputs=inputs)
    with pytest.raises(ValueError, match="`inputs` must be the 2 inputs of the fit"):
        arrays.score(frame[["x", "y"]].to_numpy(), [1])
