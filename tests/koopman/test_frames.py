"""Columns that are clocks or runs by their values, whatever their names."""

import re

import jax
import numpy as np
import pandas as pd
import pytest
import xarray as xr

import dissociation
from koopman import Ridge, delay_embed, eigenvalues, fit, lagged_pairs, score

MATRIX = np.array([[0.9, -0.3], [0.3, 0.9]])


def runs_of(seed, num_runs=5, length=9, text=False):
    """Return a frame of columns r, t, a and b, by run, whose eigenvalues are those of `MATRIX`."""
    rng = np.random.default_rng(seed)
    rows = []
    for run in range(num_runs):
        state = rng.normal(size=2)
        for step in range(length):
            rows.append((f"run {run}" if text else run, 0.05 * step, *state))
            state = MATRIX @ state
    return pd.DataFrame(rows, columns=["r", "t", "a", "b"])


def rates(frame, **names):
    """Return the eigenvalues of the operator from a frame."""
    return np.asarray(eigenvalues(fit(Ridge(), *lagged_pairs(frame, **names))))


RIGHT = [0.9 + 0.3j, 0.9 - 0.3j]
RNG = np.random.default_rng(0)


def advised(error, frame):
    """Return the frame and the arguments of the first call that an error advises."""
    text = f"{error}. "
    given = re.search(
        r"[pP]ass ((?:run|time|columns)=.*?)(?: to count| of frame|\. |; |, or, if)", text
    ).group(1)
    changed = re.search(r" of (frame\.assign\(.*?cumsum\(\)\))", text)
    frame = eval(changed.group(1), {"frame": frame, "numpy": np}) if changed else frame  # noqa: S307
    return frame, eval(f"dict({given})")  # noqa: S307


def _dates(frame):
    """Return times of a frame as text, hours of a day."""
    hours = np.round(20 * frame.t).astype(int)
    return [f"2024-02-28 {hour:02d}:00:00" for hour in hours]


LAYOUTS = {
    "integer runs": lambda: runs_of(0),
    "text runs": lambda: runs_of(1, text=True),
    "an index that was written": lambda: (
        runs_of(2).reset_index().rename(columns={"index": "Unnamed: 0"})
    ),
    "rows in the order of time": lambda: runs_of(3, text=True).sort_values(
        ["t", "r"], kind="stable", ignore_index=True
    ),
    "integers in the order of time": lambda: runs_of(3).sort_values(
        ["t", "r"], kind="stable", ignore_index=True
    ),
    "times that go on": lambda: runs_of(4).assign(t=lambda f: f.t + 3.0 * f.r),
    "rows in no order": lambda: runs_of(5).sample(frac=1, random_state=0, ignore_index=True),
    "runs in the index": lambda: runs_of(6, text=True).set_index("r"),
    "times in the index": lambda: runs_of(7, text=True).set_index("t", append=True),
    "clocks and counts": lambda: runs_of(8).assign(step=np.tile(np.arange(9), 5)),
    "dates as text": lambda: runs_of(10).assign(t=_dates),
    "dates as text in the order of time": lambda: (
        runs_of(11).assign(t=_dates).sort_values(["t", "r"], kind="stable", ignore_index=True)
    ),
    "doses": lambda: runs_of(12).assign(r=lambda f: 0.1 * 2.0**f.r),
    "times without runs": lambda: runs_of(13).drop(columns="r"),
    "gaps": lambda: runs_of(9).assign(t=lambda f: f.t + 0.2 * (f.t > 0.22)),
}


@pytest.mark.parametrize(
    "names", [("fly", "hours"), ("Run #", "t [s]"), ("x", "y"), ("exp", "elapsed")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_advice_is_a_call_that_works(layout, names, x64):
    frame = LAYOUTS[layout]()
    labels = dict(zip(("r", "t"), names, strict=True))
    frame = frame.rename(columns=labels).rename_axis(index=lambda name: labels.get(name, name))
    with pytest.raises((ValueError, TypeError)) as refused:
        lagged_pairs(frame)
    changed, names = advised(refused.value, frame)
    np.testing.assert_allclose(rates(changed, **names), RIGHT, atol=1e-8)


def test_one_run_with_a_clock(x64):
    frame = runs_of(0, num_runs=1, length=20).drop(columns="r")
    for times in (
        frame.t,
        pd.date_range("2024", periods=20, freq="h"),
        pd.timedelta_range("0s", periods=20, freq="s"),
    ):
        table = frame.assign(t=times)
        with pytest.raises(
            ValueError, match=r"got clocks in \['t'\], by their values. Pass time='t'"
        ):
            lagged_pairs(table)
        np.testing.assert_allclose(rates(table, time="t"), RIGHT, atol=1e-8)
        np.testing.assert_allclose(rates(table[::-1], time="t"), RIGHT, atol=1e-8)
    uneven = frame.assign(t=np.cumsum(1 + RNG.random(20)))
    with pytest.raises(
        ValueError, match="to count rows as steps, because those of 't' are uneven"
    ) as refused:
        lagged_pairs(uneven)
    changed, names = advised(refused.value, uneven)
    np.testing.assert_allclose(rates(changed, **names), RIGHT, atol=1e-8)
    with pytest.raises(ValueError, match="even steps"):
        lagged_pairs(uneven, time="t")


def test_both_readings_are_shown_where_runs_and_clocks_can_be_exchanged():
    frame = runs_of(0).assign(t=np.tile(np.arange(9), 5))
    for table, first in (
        (frame, "run='r', time='t'"),
        (frame.sort_values(["t", "r"]).reset_index(drop=True), ""),
    ):
        error = str(pytest.raises(ValueError, lagged_pairs, table).value)
        assert first in error
        assert "run='r', time='t'" in error
        assert "run='t', time='r'" in error
        assert "or, if rows are in the order of time" in error


def test_values_that_come_back_are_states_beside_a_named_clock():
    states = pd.DataFrame(RNG.normal(size=(40, 2)), columns=["p", "q"])
    action = states.assign(action=RNG.integers(0, 2, 40))
    regime = states.assign(regime=np.repeat(["on", "off", "on", "off"], 10))
    phase = states.assign(phase=(0.7 + 0.3 * np.arange(40)) % 6.28)
    for table, words in (
        (
            action,
            r"labels that come back in \['action'\].*If 'action' labels runs, pass run='action'. "
            r"If .* are states",
        ),
        (regime, r"labels that come back in \['regime'\]"),
        (
            phase,
            r"clocks that start again in \['phase'\].*If a run begins where 'phase' starts again",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            lagged_pairs(table)
    for table in (action, phase):
        assert lagged_pairs(table.assign(t=range(40)), time="t").x.shape == (39, 3)
        assert lagged_pairs(table, columns=list(table)).x.shape == (39, 3)
        assert lagged_pairs(table.to_numpy()).x.shape == (39, 3)
    assert lagged_pairs(regime, columns=["p", "q"]).x.shape == (39, 2)
    begins = phase.assign(run=(phase.phase.diff() <= 0).cumsum())
    assert len(lagged_pairs(begins, run="run", columns=["p", "q"]).x) == 40 - begins.run.nunique()


@pytest.mark.parametrize("seed", range(20))
def test_states_are_not_taken_for_clocks_or_runs(seed):
    """Random walks, noise, oscillations, counts and pixels."""
    rng = np.random.default_rng(seed)
    number = int(rng.integers(10, 60))
    walk = np.cumsum(rng.normal(size=(number, 3)), 0)
    noise = rng.normal(size=(number, 4))
    waves = np.sin(0.7 * np.arange(number)[:, None] + rng.uniform(0, 6, 3))
    tables = [
        walk,
        noise,
        waves,
        rng.poisson(3, (number, 4)),
        rng.integers(0, 256, (number, 20)),
        noise > 0,
    ]
    for table in tables:
        frame = pd.DataFrame(table, columns=[f"time {i}" for i in range(table.shape[1])])
        assert len(lagged_pairs(frame).x) == number - 1
        assert lagged_pairs(frame["time 0"]).x.shape == (number - 1,)


def test_names_in_a_call(x64):
    frame = runs_of(3)
    several = frame.assign(day=frame.r % 2, r=frame.r // 2)
    np.testing.assert_allclose(rates(several, run=["day", "r"], time="t"), RIGHT, atol=1e-8)
    np.testing.assert_allclose(rates(frame, run="r", columns=["a", "b"]), RIGHT, atol=1e-8)
    np.testing.assert_allclose(rates(frame.set_index(["r", "t"])), RIGHT, atol=1e-8)
    swapped = frame.set_index(["t", "r"])
    np.testing.assert_allclose(rates(swapped, run="r", time="t"), RIGHT, atol=1e-8)
    np.testing.assert_allclose(rates(swapped, run="r"), RIGHT, atol=1e-8)
    pieces = [piece for _, piece in frame.groupby("r")]
    np.testing.assert_allclose(rates(pieces, time="t", columns=["a", "b"]), RIGHT, atol=1e-8)
    delayed = delay_embed(frame, 2, run="r", time="t")
    assert [rows.shape for rows in delayed] == [(8, 4)] * 5
    sheet = xr.DataArray(frame[["a", "b"]].to_numpy().reshape(5, 9, 2), dims=("fly", "hour", "y"))
    np.testing.assert_allclose(rates(sheet, run="fly", time="hour"), RIGHT, atol=1e-8)
    for names, words in (
        (
            {"time": "hour"},
            r"`time` must be a column or an index level of `trajectories`, of \['r', 't', 'a', "
            r"'b'\]",
        ),
        ({"run": "fly"}, "`run` must be a column or an index level"),
        ({"columns": ["a", "c"]}, r"`columns` must be columns of `trajectories`, .* got \['c'\]"),
    ):
        with pytest.raises(ValueError, match=words):
            lagged_pairs(frame, **names)
    with pytest.raises(ValueError, match="`time` must be None unless `trajectories` is a frame"):
        lagged_pairs(frame.to_numpy(), time="t")
    with pytest.raises(
        ValueError, match=r"have a dimension 'time', got dimensions .*Pass time=, one of"
    ):
        lagged_pairs(sheet[0])
    rows = {"fly": ("obs", frame.r.to_numpy()), "hour": ("obs", frame.t.to_numpy())}
    long = xr.DataArray(frame[["a", "b"]].to_numpy(), dims=("obs", "y"), coords=rows)
    np.testing.assert_allclose(rates(long, run="fly", time="hour"), RIGHT, atol=1e-8)
    np.testing.assert_allclose(rates(long.rename(obs="time"), run="fly"), RIGHT, atol=1e-8)
    with pytest.raises(
        ValueError,
        match=r"one trajectory along 'time', got what may be runs in \['fly'\].*Pass run='fly'",
    ):
        lagged_pairs(long.rename(obs="time"))
    stacked = sheet.assign_coords(fly=range(5), hour=0.05 * np.arange(9)).stack(obs=("fly", "hour"))
    assert len(lagged_pairs(stacked).x) == 40
    for names in ({"run": frame.r}, {"time": frame.t.to_numpy()}):
        with pytest.raises(TypeError, match="must name a column, an index level or a dimension"):
            lagged_pairs(frame, **names)
    with pytest.raises(ValueError, match="`columns` must name at least one column"):
        lagged_pairs(frame, columns=[])
    twice = pd.concat([several, several.assign(day=several.day + 2)], ignore_index=True).assign(r=0)
    with pytest.raises(ValueError, match="increases, got .* after .*without time='t'"):
        lagged_pairs(twice, run="r", time="t")


def test_a_second_label_of_runs_is_named():
    one, two = runs_of(0), runs_of(1)
    both = pd.concat([one.assign(day=1), two.assign(day=2)], ignore_index=True)
    with pytest.raises(
        ValueError, match=r"Rows of one time differ in 'day': pass run=\['r', 'day'\], time='t'"
    ):
        lagged_pairs(both, run="r", time="t")
    text = both.assign(day=np.where(both.day == 1, "Monday", "Tuesday"))
    with pytest.raises(TypeError, match=r"If they label runs, pass run=\['r', 'day'\]"):
        lagged_pairs(text, run="r", time="t")
    for table in (both, text):
        assert len(lagged_pairs(table, run=["r", "day"], time="t").x) == 80
    interleaved = (
        pd.concat([one[:9], one[9:14], one[18:25]])
        .sort_values("t", ignore_index=True)
        .drop(columns="t")
    )
    assert len(lagged_pairs(interleaved, run="r").x) == 18  # rows count within runs
    with pytest.raises(
        ValueError,
        match="If a run begins where 't' starts again, pass run='run', time='t' of frame",
    ):
        lagged_pairs(one.drop(columns="r"), time="t")


def test_other_functions_refuse_by_the_same_rule(unchecked):
    frame = runs_of(0)
    states = frame[["a", "b"]]
    operator = fit(Ridge(), *lagged_pairs(states))
    with pytest.raises(ValueError, match=r"Use lagged_pairs\(frame, run='r', time='t'\)"):
        fit(Ridge(), frame, frame)
    with pytest.raises(ValueError, match=r"Pass frame.set_index\(\['r', 't'\]\)"):
        score(operator, frame)
    assert float(score(operator, frame.set_index(["r", "t"]))) > 0.99
    with pytest.raises(
        TypeError,
        match="`trajectory` must be trajectories, got Pairs, in which they are cut into pairs",
    ):
        score(operator, lagged_pairs(states))
    for call in (dissociation.compare, dissociation.linear_cka):
        with pytest.raises(
            ValueError, match=r"features alone .*frame.drop\(columns=\['r'\]\).*groups='r'"
        ):
            call(frame[["r", "a", "b"]], states)
    groups = dissociation.compare(
        frame[["r", "a", "b"]], states, groups="r", num_blocks=None, p_values=False
    )
    assert float(groups.values) == pytest.approx(1, abs=1e-5)


def test_a_frame_under_a_transformation():
    frame = runs_of(0)
    pairs = lagged_pairs(frame, run="r", time="t")
    swept = jax.vmap(lambda lag: lagged_pairs(frame, lag, max_lag=2, run="r", time="t").y)(
        np.arange(1, 3)
    )
    assert swept.shape == (2, 35, 2)
    assert pairs.x.shape == (40, 2)
