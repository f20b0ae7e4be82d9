import re

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from trajectories import follow

from koopman import ReducedRank, Ridge, fit, lagged_pairs, matrix_powers, predict, risk, score
from koopman._operators._forecast import r2_score


def trajectory(n=200):
    matrix = np.asarray([[0.9, 0.2, 0.0], [-0.2, 0.9, 0.1], [0.0, 0.0, 0.7]])
    return matrix, follow(matrix, n, 0.2, np.random.default_rng(0))


@pytest.mark.slow
def test_powers_of_the_operator(x64):
    x, y = (np.asarray(a) for a in lagged_pairs(trajectory()[1]))
    operator = fit(ReducedRank(2, 1e-3), x, y)
    matrix = np.asarray(operator.encode.matrix @ operator.dual.matrix.T)
    steps = [1, 2, 3, 7, 100]
    many = predict(operator, x[:5], steps)
    for step, found in zip(steps, many, strict=True):
        np.testing.assert_allclose(found, x[:5] @ np.linalg.matrix_power(matrix, step), atol=1e-10)
        np.testing.assert_allclose(predict(operator, x[:5], step), found, atol=1e-12)
    traced = jax.jit(lambda step: predict(operator, x[:5], step))
    np.testing.assert_allclose(traced(7), many[3], atol=1e-12)
    np.testing.assert_allclose(jax.vmap(traced)(jnp.asarray(steps)), many, atol=1e-12)


def test_far_ahead_nothing_overflows_on_the_way():
    # An unstable operator: squares beyond those needed overflow float32, and must not reach the
    # result.
    grow = np.asarray([[1.0], [1.5], [2.25], [3.375]], np.float32)
    operator = fit(Ridge(0.0), grow[:-1], grow[1:])
    np.testing.assert_allclose(predict(operator, grow[:1], 130), 1.5**130, rtol=1e-4)
    np.testing.assert_allclose(
        jax.jit(lambda s: predict(operator, grow[:1], s))(130), 1.5**130, rtol=1e-4
    )
    slope = jax.jit(jax.grad(lambda matrix, power: matrix_powers(matrix, power).sum()))
    np.testing.assert_allclose(
        slope(jnp.full((1, 1), 1.5), jnp.asarray([130])), 130 * 1.5**129, rtol=1e-4
    )


def test_powers_below_zero_are_no_numbers():
    """By binary digits they would be huge powers."""
    for exponents in ([-1], [2, -3], np.asarray([0, -1])):
        with pytest.raises(ValueError, match="`exponents` must be non-negative"):
            matrix_powers(2 * jnp.eye(2), np.asarray(exponents))
    traced = jax.jit(matrix_powers)(2 * jnp.eye(2), jnp.asarray([-1, 0, 3]))
    assert jnp.isnan(traced[0]).all()
    np.testing.assert_array_equal(traced[1:], [np.eye(2), 8 * np.eye(2)])
    operator = fit(Ridge(), *lagged_pairs(PATH))
    assert jnp.isnan(jax.jit(lambda s: predict(operator, PATH[:2], s))(0)).all()


@pytest.mark.slow
@pytest.mark.parametrize(("lag", "steps"), [(1, 1), (2, 3)])
def test_score_compares_what_was_forecast_with_what_came(lag, steps, x64):
    """Scores elsewhere were misaligned for lag > 1 with several steps: they compared with t + lag + steps - 1."""
    path = follow(trajectory()[0], 60, 0.0, np.random.default_rng(0))
    operator = fit(Ridge(0.0), *lagged_pairs(path, lag))
    np.testing.assert_allclose(score(operator, path, lag=lag, steps=steps), 1.0, atol=1e-9)
    # The negative control: compared one sample off, an exact forecast is not perfect.
    assert score(operator, path[:-1], lag=lag, steps=steps, observable=path[1:]) < 0.99


def test_score_is_a_metric_of_an_observable(x64):
    path = trajectory()[1]
    x, y = lagged_pairs(path)
    energy = (path**2).sum(1, keepdims=True)
    operator = fit(Ridge(), x, y, observable=energy[1:])
    found = score(operator, path, observable=energy)
    forecast = np.asarray(predict(operator, x))
    np.testing.assert_allclose(found, r2_score(energy[1:], forecast), rtol=1e-12)
    error = score(
        operator, path, observable=energy, metric=lambda a, b: np.mean((np.asarray(a) - b) ** 2)
    )
    np.testing.assert_allclose(error, np.mean((energy[1:] - forecast) ** 2), rtol=1e-12)


def test_r2_against_scikit_learn(x64):
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    target, forecast = rng.normal(size=(2, 30, 4))
    np.testing.assert_allclose(
        r2_score(target, forecast), metrics.r2_score(target, forecast), rtol=1e-12
    )
    target[:, 0] = forecast[:, 0] = 2.0  # constant and right, then constant and wrong
    np.testing.assert_allclose(
        r2_score(target, forecast), metrics.r2_score(target, forecast), rtol=1e-12
    )
    forecast[:, 0] = 3.0
    np.testing.assert_allclose(
        r2_score(target, forecast), metrics.r2_score(target, forecast), rtol=1e-12
    )


@pytest.mark.filterwarnings("ignore:`alpha`")
def test_risk_is_the_mean_squared_error_of_features(x64):
    x, y = (np.asarray(a) for a in lagged_pairs(trajectory()[1]))
    operator = fit(Ridge(0.1), x, y)
    errors = y - np.asarray(predict(operator, x))
    np.testing.assert_allclose(risk(operator, x, y), np.mean(np.sum(errors**2, 1)))


PATH = trajectory(20)[1]


def test_steps_beyond_the_integers_are_named():
    operator = fit(Ridge(), *lagged_pairs(trajectory()[1].astype(np.float32)))
    x = np.ones((2, 3), np.float32)
    assert np.abs(predict(operator, x, 2**31 - 1)).max() < 1e-6
    for steps in (
        2**31,
        4294967297,
        2**40,
        10**30,
        [1, 2**31],
        np.asarray([3, 2**40]),
    ):  # 2^32 + 1 was step 1
        with pytest.raises(
            ValueError, match="`steps` must (be at most|hold integers from .* to) 2147483647, got "
        ):
            predict(operator, x, steps)
    with pytest.raises(
        ValueError, match="`exponents` must (be at most|hold integers from .* to) 2147483647"
    ):
        matrix_powers(np.eye(2), np.asarray([2**32]))
    with jax.enable_x64(True):
        np.testing.assert_array_equal(
            matrix_powers(np.eye(2), np.asarray([2**40])), np.eye(2)[None]
        )


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scores_do_not_depend_on_units(scale):
    rng, unit = np.random.default_rng(0), np.float32(scale)
    x, y = rng.normal(size=(2, 50, 3)).astype(np.float32)
    np.testing.assert_allclose(r2_score(x * unit, y * unit), r2_score(x, y), rtol=1e-5)
    np.testing.assert_allclose(r2_score(x * unit, -5 * x * unit), r2_score(x, -5 * x), rtol=1e-5)
    same = np.full((50, 1), unit)
    assert r2_score(same, same) == 1
    assert r2_score(same, 2 * same) == 0


def test_a_forecast_that_alpha_eats_is_named(x64):
    """At the horizon at which it is lost, and at no other."""
    t = np.arange(2000)
    path = np.stack([np.cos(0.01 * t), np.cos(0.01 * (t - 1))], 1)
    x, y = path[:-1], path[1:]
    exact = np.cos(0.01 * (t[:3] + 628))
    for alpha, least, most in ((None, 0, 1e-9), (1e-6, 0, 1e-2), (1e-5, 0.1, 2)):
        operator = fit(Ridge(alpha), x, y)
        if least:
            with pytest.warns(
                UserWarning, match=r"`alpha` \(1e-05\) takes .* of the forecast 628 steps ahead"
            ):
                forecast = predict(operator, x[:3], [1, 628])
        else:
            forecast = predict(operator, x[:3], [1, 628])
        error = np.abs(np.asarray(forecast)[1, :, 0] - exact).max()
        assert least <= error < most


FRAME = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 2)), columns=["p", "q"])
RUNS = {"run": np.repeat([0, 1], 15), "t": np.tile(np.arange(15), 2)}


def test_a_frame_is_scored_as_its_pairs_are_made():
    operator = fit(Ridge(), *lagged_pairs(FRAME))
    wanted = float(score(operator, FRAME.to_numpy()))
    turned = xr.DataArray(FRAME.to_numpy().T, dims=("state", "time"))
    for table in (FRAME, turned, FRAME.assign(run="a", t=range(30)).set_index(["run", "t"])):
        np.testing.assert_allclose(score(operator, table, observable=table), wanted, rtol=1e-6)
    for table, words in (
        (FRAME[::-1], "index that increases"),
        (FRAME.set_axis(np.arange(len(FRAME), dtype=np.uint32)[::-1]), "index that increases"),
        (FRAME.drop(7), "index of even steps"),
        (FRAME.assign(**RUNS).set_index("t"), "`trajectory` must .*increases|states alone"),
    ):
        with pytest.raises(ValueError, match=words):
            score(operator, table)
        with pytest.raises(ValueError, match="`observable` must"):
            score(operator, FRAME.to_numpy(), observable=table)


def test_several_trajectories_are_scored_by_their_pairs():
    runs, states = FRAME.assign(**RUNS).set_index(["run", "t"]), FRAME.to_numpy()
    operator = fit(Ridge(), *lagged_pairs(runs))
    parts = [states[:15], states[15:]]
    wanted = r2_score(
        np.concatenate([part[2:] for part in parts]),
        predict(operator, np.concatenate([part[:-2] for part in parts]), 2),
    )
    for given in (runs, parts):
        np.testing.assert_allclose(
            score(operator, given, steps=2, observable=given), wanted, rtol=1e-6
        )
    with pytest.raises(
        ValueError,
        match=r"`observable` must be of the lengths of the trajectories, \[15, 15\], got \[30\]",
    ):
        score(operator, parts, observable=states)
    with pytest.raises(ValueError, match=r"Pass frame.set_index\(\['run', 't'\]\)"):
        score(operator, runs.reset_index("t"))


@pytest.mark.parametrize("label", ["run", "Time (s)"])
def test_runs_and_times_among_columns_are_no_states(label):
    wrong, right = FRAME.assign(**{label: RUNS["t"]}), FRAME.to_numpy()
    operator = fit(Ridge(), right[:-1], right[1:])
    calls = (
        lambda x: fit(Ridge(), x, x),
        lambda x: fit(Ridge(), right, right, observable=x),
        lambda x: predict(operator, x),
        lambda x: score(operator, x),
    )
    words = rf"must hold states alone in its columns, got clocks .* in \['{re.escape(label)}'\]"
    for call in calls:
        with pytest.raises(ValueError, match=words):
            call(wrong)


def test_frames_of_states_and_successors_have_one_order_of_columns():
    for call in (
        lambda x, y: fit(Ridge(), x, y),
        r2_score,
        lambda x, y: risk(fit(Ridge(), x, x), x, y),
    ):
        call(FRAME, FRAME.rename(columns={"p": "p next", "q": "q next"}))
        with pytest.raises(
            ValueError, match=r"must have its columns in the order of `.*Use frame\[\['p', 'q'\]\]"
        ):
            call(FRAME, FRAME[["q", "p"]])
    turned = xr.DataArray(FRAME.to_numpy().T, dims=("state", "time"))
    with pytest.raises(
        ValueError, match=r"times along \['time'\]\. Use lagged_pairs, or array.transpose"
    ):
        fit(Ridge(), turned, turned)
