import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from compiled import compilations
from words import refused, warned

from koopman import (
    Ridge,
    delay_embed,
    fit,
    fit_generator,
    lagged_pairs,
    merge_moments,
    moments,
    predict,
    risk,
    scan_moments,
    spectral_contrastive_loss,
    vamp_score,
)
from koopman._operators import _findings as findings
from koopman._operators._forecast import r2_score


def test_stacked_trajectories_are_those_of_a_list():
    states = np.random.default_rng(0).normal(size=(4, 9, 2)).astype(np.float32)
    listed, delayed = lagged_pairs(list(states), 3), delay_embed(list(states), 3)
    for axis in (0, 1, -1):
        for array in (np.moveaxis(states, 0, axis), jnp.moveaxis(states, 0, axis)):
            for found, wanted in zip(
                lagged_pairs(array, 3, trajectory_axis=axis), listed, strict=True
            ):
                np.testing.assert_array_equal(found, wanted)
            np.testing.assert_array_equal(
                delay_embed(array, 3, trajectory_axis=axis), np.stack(delayed)
            )
    scalars = lagged_pairs(states[..., 0], 3, trajectory_axis=0)
    np.testing.assert_array_equal(scalars.y, listed.y[:, 0])
    mapped = jax.vmap(lambda one: lagged_pairs(one, 3))(states)
    np.testing.assert_array_equal(mapped.y.reshape(-1, 2), listed.y)
    joined = lagged_pairs(np.stack(delayed), trajectory_axis=0)
    np.testing.assert_array_equal(joined.y, lagged_pairs(delayed).y)


STACK, RUN = np.zeros((4, 7, 3, 2), np.float32), np.ones((5, 2), np.float32)
ROWS = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]


def test_pairs_and_delays_that_cannot_be_are_refused():
    refused(
        (lambda: lagged_pairs(STACK), r"`trajectories` must name the axis.*Pass trajectory_axis=0"),
        (
            lambda: lagged_pairs(STACK[:1, :, 0]),
            r"`trajectories` must name the axis.*Pass trajectory_axis=0",
        ),
        (lambda: delay_embed(STACK, 3), r"`trajectory` must name the axis.*Pass trajectory_axis=0"),
        (
            lambda: lagged_pairs(STACK.tolist()),
            r"list of arrays, got nested lists of shape .*\. Pass numpy.asarray",
        ),
        (lambda: lagged_pairs(STACK, trajectory_axis=-5), "`trajectory_axis` must be an axis"),
        (
            lambda: lagged_pairs(list(STACK), trajectory_axis=0),
            "`trajectory_axis` must be None for a list",
        ),
        (lambda: lagged_pairs(RUN[:, 0], trajectory_axis=0), "with another for time"),
        (
            lambda: lagged_pairs(RUN[:3], 3),
            r"`trajectories` must be longer than the lag \(3\), got 3 samples",
        ),
        (lambda: lagged_pairs([RUN, np.ones((5, 3))]), r"states of shape \(2,\)"),
        (lambda: lagged_pairs([]), r"`trajectories` must be longer than the lag \(1\), got 0"),
        (
            lambda: lagged_pairs([np.full(3, 2**40)]),
            r"\[0\]` must hold integers .*got 1099511627776.*jax_enable_x64",
        ),
        (lambda: lagged_pairs(RUN, 0), "`lag`"),
        (lambda: lagged_pairs(RUN, 0, max_lag=4), "`lag` must be at least 1"),
        (lambda: lagged_pairs(RUN, 5, max_lag=4), "`lag` must be at most 4, got 5"),
        (lambda: lagged_pairs([RUN[:, 0], [1.0, 2.0]]), "`trajectories"),
        (
            lambda: delay_embed(RUN, 6),
            r"`trajectory` must be longer than \(num_delays - 1\) \* stride \(5\), got 5",
        ),
        (lambda: delay_embed(RUN, 0), "must be at least 1"),
        (lambda: delay_embed(RUN, 2, stride=0), "must be at least 1"),
        error=(TypeError, ValueError),
    )


def test_lags_can_be_swept():
    """A traced lag out of range gives no pairs."""
    trajectories = [np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32) for n in (9, 6)]
    x, y = jax.jit(jax.vmap(lambda lag: lagged_pairs(trajectories, lag, max_lag=4)))(
        jnp.arange(-2, 7)
    )
    assert x.shape == y.shape == (9, 5 + 2, 2)
    for lag, first, second in zip(range(-2, 7), x, y, strict=True):
        if 1 <= lag <= 4:
            np.testing.assert_array_equal(first, np.concatenate([t[:-4] for t in trajectories]))
            np.testing.assert_array_equal(
                second, np.concatenate([t[lag:][: len(t) - 4] for t in trajectories])
            )
        else:
            assert np.isnan(second).all()
    np.testing.assert_array_equal(
        lagged_pairs(trajectories, 4, max_lag=4).y, lagged_pairs(trajectories, 4).y
    )
    with pytest.raises(TypeError, match="floating point where `lag` is traced"):
        jax.jit(lambda lag: lagged_pairs(np.arange(9), lag, max_lag=4))(1)


def pairs_apart(runs, lag):
    """Pairs of a list of runs by a loop over times, and rows of three delays of each run."""
    pairs = [(run[t], run[t + lag]) for run in runs for t in range(len(run) - lag)]
    rows = [
        [
            np.concatenate([np.ravel(run[t - i * lag]) for i in range(3)])
            for t in range(2 * lag, len(run))
        ]
        for run in runs
    ]
    return *zip(*pairs, strict=True), *rows


@pytest.mark.parametrize(
    ("seed", "dtype"), [(0, np.float64), (1, np.int16), (2, np.int64), (2, np.float32)]
)
def test_pairs_and_delays_of_any_form_and_dtype(seed, dtype, x64):
    rng = np.random.default_rng(seed)
    lag, shape = int(rng.integers(1, 4)), [(), (2,), (2, 3)][seed]
    scale = 2**40 if dtype == np.int64 else 2**10
    runs = [
        (scale * rng.normal(size=(n, *shape))).astype(dtype)
        for n in rng.permutation(np.arange(7, 11))
    ]
    wanted = pairs_apart(runs, lag)

    def both(runs):
        return *lagged_pairs(runs, lag), *delay_embed(runs, 3, stride=lag)

    on_device = [jnp.asarray(run) for run in runs]
    # Under a transformation other code runs than on arrays that are known.
    forms = (runs, tuple(runs), [*runs[:2], *on_device[2:]], on_device)
    for found in (*map(both, forms), jax.jit(both)(runs)):
        for one, other in zip(found, wanted, strict=True):
            assert one.dtype == dtype
            np.testing.assert_array_equal(one, other)


STATES = np.random.default_rng(3).normal(size=(12, 2)).astype(np.float32)
RUNS = {"run": np.repeat(["b", "a"], [7, 5]), "t": [*range(7), *range(5)]}
DAYS = pd.date_range("2024-02-25", periods=12)
HOURS = pd.date_range("2024-02-25", periods=12, freq="h")


def frame(index=None, **columns):
    return pd.DataFrame({"p": STATES[:, 0], "q": STATES[:, 1], **columns}, index=index)


def named(dimensions, **coordinates):
    return xr.DataArray(
        STATES if dimensions[0] != "state" else STATES.T, dims=dimensions, coords=coordinates
    )


@pytest.mark.parametrize(
    "table",
    [
        frame(
            DAYS.tz_localize("Europe/Berlin") + pd.Timedelta("31D")
        ),  # over a change of the clocks
        frame(pd.period_range("2024-01", periods=12, freq="Q")),
        frame((1000 / 30 * np.arange(12)).round().astype(np.uint32)),  # milliseconds of a video
        frame()[["p", "q"]].astype({"p": "Float32"}),
        named(("state", "time"), time=DAYS),
    ],
)
def test_frames_whose_times_are_even_are_one_trajectory(table, x64):
    for found, wanted in zip(lagged_pairs(table, 2), lagged_pairs(STATES, 2), strict=True):
        np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(delay_embed([table, STATES], 3)[0], delay_embed(STATES, 3))


@pytest.mark.parametrize("order", ["rows by run", "rows by time"])
def test_runs_of_an_index_are_trajectories(order):
    table = frame(**RUNS).set_index(["run", "t"])
    table = (
        table.sort_index(level=1, sort_remaining=False, kind="stable")
        if order == "rows by time"
        else table
    )
    wanted = lagged_pairs([STATES[:7], STATES[7:]], 2)
    pieces = [run for _, run in frame(**RUNS).set_index("t").groupby("run", sort=False)]
    days = frame().set_index([pd.Index(RUNS["run"], name=None), DAYS])
    coded = frame(**RUNS | {"run": [ord(run) for run in RUNS["run"]]}).set_index(["run", "t"])
    forms = (
        days,
        coded,
        coded.rename_axis([None, None]),
        coded.rename_axis(["t", "run"]),
    )  # in this order
    forms = (
        *forms,
        table,
        [table.loc[["b"]], table.loc[["a"]]],
        [piece[["p", "q"]] for piece in pieces],
    )
    sheet = xr.DataArray(STATES, dims=("time", "y"), coords={"y": ["p", "q"]})
    sheets = [sheet[:7].T, sheet[7:]]
    for form in (*forms, sheets, [frame(**RUNS)[["p", "q"]][:7], STATES[7:]]):
        for found, other in zip(lagged_pairs(form, 2), wanted, strict=True):
            np.testing.assert_array_equal(found, other)
        assert [len(rows) for rows in delay_embed(form, 2)] == [6, 4]
    series = lagged_pairs(table["p"], 2)
    np.testing.assert_array_equal(series.y, wanted.y[:, 0])


SHEETS = [
    xr.DataArray(STATES, dims=("time", "y"), coords={"y": labels})
    for labels in (["p", "q"], ["q", "p"])
]
OPEN = [
    (
        frame(RUNS["t"]),
        r"increases, got 0 after 6\. If a run begins where the index starts again, .*counts rows "
        r"as steps",
    ),
    (frame(DAYS[::-1]), "increases, got 2024-03-06 00:00:00 after 2024-03-07"),
    (frame(DAYS + pd.to_timedelta([0] * 5 + [1] * 7, "D")), "got 2024-03-02 .* after 2024-02-29"),
    (frame(np.delete(np.arange(13.0), 11)), "even steps, got 12.0 after 10.0, where"),
    (frame(list("abcdefghijkl")), "index of numbers or dates, got one of .*to_datetime"),
    (
        frame(note=list("abababababab"), **RUNS).set_index(["run", "t"]),
        r"got labels that come back in \['note'\]",
    ),
    (frame(**RUNS | {"t": RUNS["t"][::-1]}).set_index(["run", "t"]), "increases, got 3 after 4"),
    (
        [frame(), frame()[["q", "p"]]],
        r"same columns in one order, got \['p', 'q'\] and \['q', 'p'\]",
    ),
    (SHEETS, r"same columns in one order, got \['p', 'q'\] and \['q', 'p'\]"),
    (named(("time", "y"), time=np.arange(12) ** 2), "even steps"),
    (xr.DataArray(np.ones((3, 4, 2)), dims=("run", "time", "y")), r"pass run=, or list\(array\)"),
    (
        frame(pd.Index(list("aaaaaabbbbbb"), name="fly")),
        r"index of numbers or dates.*lagged_pairs\(frame, run='fly'\)",
    ),
    (
        frame(pd.Index([0] * 6 + [1] * 6, name="fly")),
        r"index that increases.*lagged_pairs\(frame, run='fly'\)",
    ),
    (frame().T.set_axis(DAYS, axis=1), "for columns, got columns of dates"),
    (
        frame(**RUNS, day=DAYS).set_index(["run", "t", "day"]),
        r"levels \['run', 't', 'day'\]. Pass time= and run=",
    ),
    ([frame(DAYS), frame(HOURS)], "one time step, got 86400 s and 3600 s. Resample"),
    ([frame(DAYS), frame(HOURS.to_period("h"))], "one time step, got 86400 s and 3600 s"),
    ([frame(0.1 * np.arange(12)), frame(0.11 * np.arange(12))], "one time step, got 0.1 and 0.11"),
]
for dims in (("fly", "t"), ("Time", "date")):
    OPEN += [
        (given, "have a dimension 'time', got dimensions") for given in (named(dims), [named(dims)])
    ]


@pytest.mark.parametrize(("table", "words"), OPEN)
def test_tables_that_leave_time_open_are_refused(table, words):
    for call in (lagged_pairs, lambda table: delay_embed(table, 2)):
        with pytest.raises((TypeError, ValueError), match=f"`traj.*must .*{words}"):
            call(table)


def test_names_and_steps_of_one_reading_pass():
    plausible = frame(ts=STATES[:, 0], run=STATES[:, 1], time=-STATES[:, 0])
    assert lagged_pairs(plausible).x.shape == (11, 5)
    milliseconds = [
        (1000 / 30 * np.arange(start, start + n)).round().astype(int)
        for start, n in ((0, 5), (1, 7))
    ]
    months = pd.date_range("2024-01-31", periods=12, freq="ME")
    for one, other in (
        milliseconds,
        (months[:4], months[5:]),
        (DAYS[:5], DAYS[5:].tz_localize("Europe/Berlin")),
    ):
        pieces = [frame()[: len(one)].set_axis(one), frame()[: len(other)].set_axis(other)]
        assert len(lagged_pairs(pieces).x) == len(one) + len(other) - 2


def test_short_trajectories_of_a_list_are_skipped_with_one_warning():
    runs = [np.arange(float(n), dtype=np.float32) for n in (2, 9, 0, 12, 4)]
    for call, words in (
        (lambda runs: lagged_pairs(runs, 4).x, r"the lag \(4\)"),
        (
            lambda runs: np.concatenate(delay_embed(runs, 3, stride=2)),
            r"\(num_delays - 1\) \* stride \(4\)",
        ),
    ):
        with pytest.warns(
            UserWarning, match=rf"Skipped 3 of 5 trajectories that are not longer than {words}"
        ) as seen:
            found = call(runs)
        assert len(seen) == 1
        np.testing.assert_array_equal(found, call([runs[1], runs[3]]))
    with pytest.raises(ValueError, match=r"longer than the lag \(12\), got 12 samples at most"):
        lagged_pairs(runs, 12)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    ("kinds", "start", "error"),
    [
        (("int32", "float32"), 2**30 + 1, "warns"),
        (
            ("int32", "uint32"),
            2**31 + 5,
            r"`traj.*\[1\]` must hold integers from .* to 2147483647, got 2147483",
        ),
        (("int32", "uint8", "float32"), 2**20, None),
    ],
)
def test_lists_of_several_dtypes_lose_no_digit_in_silence(kinds, start, error, x64):
    large = [k != "float32" and np.iinfo(k).max > start + 2 for k in kinds]
    runs = [(start * held + np.arange(3)).astype(k) for k, held in zip(kinds, large, strict=True)]
    for call in (lambda: lagged_pairs(runs).y, lambda: np.concatenate(delay_embed(runs, 1))[:, 0]):
        with jax.enable_x64(x64):
            if x64 or error is None:
                with warnings.catch_warnings(action="error"):
                    found = np.asarray(call()).tolist()
                shown = [run[1:] if len(found) == 2 * len(runs) else run for run in runs]
                assert found == [number for run in shown for number in run.tolist()]
            elif error == "warns":
                with pytest.warns(
                    RuntimeWarning, match=r"^`traj.*\[\d\]` varies by .* float32 keeps 0 digits"
                ):
                    call()
            else:
                with pytest.raises(ValueError, match=error):
                    call()


@pytest.mark.cpu  # a GPU looks for NaN where the data are
def test_known_trajectories_compile_nothing():
    runs = [np.random.default_rng(n).normal(size=(n, 2)).astype(np.float32) for n in range(60, 80)]
    on_device = [jnp.asarray(run) for run in runs]

    def run():
        for form in (runs, on_device):
            for lag in (1, 2, 5):
                lagged_pairs(form, lag)
                delay_embed(form, 16, stride=lag // 2 + 1)
        delay_embed(np.arange(512, dtype=np.float32), 128)
        lagged_pairs(np.zeros((3, 40, 2), np.float32), 7, trajectory_axis=0)

    assert not compilations(run)
    assert compilations(lambda: jnp.sin(on_device[0]))  # negative control


def test_committed_arrays_stay_on_their_device():
    device = jax.devices("cpu")[1]
    run = jax.device_put(np.arange(12, dtype=np.float32), device)
    for found in (
        *lagged_pairs(run, 2),
        *lagged_pairs([run, run[:7]], 2),
        delay_embed(run, 2),
        *delay_embed([run], 2),
    ):
        assert found.devices() == {device}
    np.testing.assert_array_equal(lagged_pairs([run, run[:7]], 2).y, [*range(2, 12), *range(2, 7)])


def test_float64_that_becomes_float32_is_said_once():
    states = np.arange(9.0)[:, None]
    operator = fit(Ridge(), np.float32(states - 4), np.float32(states - 4))
    calls = (
        lambda: lagged_pairs(states),
        lambda: lagged_pairs([states]),
        lambda: delay_embed(states, 2),
        lambda: delay_embed([states[:, 0]], 2),
        lambda: moments(states, states),
        lambda: scan_moments(states[None], states[None]),
        lambda: fit(Ridge(), states, states + 1),
        lambda: predict(operator, states),
        lambda: risk(operator, states, states),
        lambda: r2_score(states, states),
        lambda: fit_generator(states, states[..., None], rank=1),
    )
    for call in calls:
        findings._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="float64 are computed in float32.*jax_enable_x64"):
            call()
    with warnings.catch_warnings(action="error"):
        calls[0]()
        findings._warn_once.cache_clear()
        lagged_pairs(states.astype(np.float32))
        with jax.enable_x64(True):
            calls[0]()
    findings._warn_once.cache_clear()


@pytest.mark.parametrize(("center", "offset", "atol"), [(False, 2.0, 2e-5), (True, -3e4, 5e-5)])
def test_moments_of_parts_merge_to_those_of_all_pairs(center, offset, atol):
    rng = np.random.default_rng(3)
    data = [
        (rng.normal(size=(3000, d)) * [1.0, 0.3][:d] + offset).astype(np.float32) for d in (2, 2, 1)
    ]
    exact = np.concatenate([a.astype(float) for a in data], 1)
    wanted = np.cov(exact.T, bias=True) if center else exact.T @ exact / 3000
    unit = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))

    def of(part, call=moments):
        return call(*part[:2], observable=part[2], center=center)

    parts = [of([a[at] for a in data]) for at in (slice(6), slice(6, 7), slice(7, None))]
    for found in (
        of(data),
        jax.jit(of)(data),
        merge_moments(merge_moments(*parts[:2]), parts[2]),
        # A mean far from zero would not move by a thousandth of a step.
        of([a.reshape(1000, 3, -1) for a in data], scan_moments),
        of([a.reshape(75, 40, -1) for a in data], scan_moments),
    ):
        root = np.asarray(found.root, float)
        np.testing.assert_allclose(root.T @ root / 3000 / unit, wanted / unit, atol=1e-3)
        assert float(found.count) == 3000
        mean = np.concatenate(
            [np.asarray(m, float) for m in (found.mean_x, found.mean_y, found.mean_observable)]
        )
        np.testing.assert_allclose(
            mean + np.asarray(found.rest, float)[1:], exact.mean(0), atol=atol
        )
    np.testing.assert_allclose(np.tril(of(data).root, -1), 0)


def test_the_count_goes_on_beyond_the_integers_of_float32():
    one = moments(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32), center=True)
    many = one
    for _ in range(26):  # 2^26
        many = merge_moments(many, many)
    assert float(many.count) == 2**26
    for _ in range(12):
        many = merge_moments(many, one)
    assert float(many.count) + float(many.rest[0]) == 2**26 + 12
    assert float(many.count) > 2**26


def test_an_offset_that_swamps_the_variance_is_named_once():
    wide = np.random.default_rng(0).normal(size=(400, 2)) + [0.0, 1e4]
    x = wide.astype(np.float32)
    calls = (
        lambda x, **o: moments(x, x, **o),
        lambda x, **o: scan_moments(x.reshape(4, 100, 2), x.reshape(4, 100, 2), **o),
        lambda x, **o: fit(Ridge(), x, x, **o),
    )
    for call in calls:
        with pytest.warns(
            UserWarning, match=r"Column 1 of `x` varies by .* about 1e\+04.*center=True"
        ) as seen:
            call(x)
        assert len(seen) == 1
        for quiet in (
            x - [[0, 9e3]],
            np.where([[True, False]], x, 1e4),
        ):  # a constant has nothing to lose
            call(quiet.astype(np.float32))
        call(x, center=True)
        with pytest.warns(UserWarning, match="squared mean"):
            call(x.astype(float))  # float32 keeps all digits
    jax.jit(calls[0])(x)
    with jax.enable_x64(True):
        calls[0](x.astype(float))
    for call in (
        *calls,
        lambda x: vamp_score(x, x, x, x, center_covariances=False),
        lambda x: spectral_contrastive_loss(x, x),
        lambda x: fit_generator(x, np.ones((*x.shape, 1)), rank=1),
    ):
        # Where float32 drops digits advice on the squared mean would be one too many.
        (said,) = [
            words
            for words in warned(lambda call=call: call(wide))
            if "Column 1 of `x` varies by" in words
        ]
        assert "float32 keeps" in said


def test_moments_refuse_what_does_not_fit():
    x, y = np.random.default_rng(0).normal(2.0, 1.0, size=(2, 60, 3)).astype(np.float32)
    # Under jit values are not known; what comes out is refused by the fit.
    seen = jax.jit(moments)(x, y * np.nan)
    refused(
        (lambda: fit(Ridge(), seen), "`x` must be moments of finite data"),
        (lambda: merge_moments(moments(x, y, center=True), moments(x, y)), "centred as `first` is"),
        (lambda: merge_moments(moments(x, y), moments(x[:, :2], y[:, :2])), "widths of `first`"),
    )


def test_lists_of_numbers_are_one_trajectory():
    np.testing.assert_array_equal(lagged_pairs([1.0, 2.0, 3.0]).y, [2.0, 3.0])
    np.testing.assert_array_equal(lagged_pairs(ROWS).y, np.asarray(ROWS)[1:])
    np.testing.assert_array_equal(lagged_pairs(tuple(map(tuple, ROWS))).x, np.asarray(ROWS)[:-1])
    np.testing.assert_array_equal(
        lagged_pairs([np.float32([1, 2]), np.float32([4, 5, 6])]).y, [2.0, 5.0, 6.0]
    )
    assert delay_embed(RUN, 5).shape == (1, 10)


def test_float64_rounds_large_integers_with_a_word(x64):
    large = [np.arange(2**60, 2**60 + 5), np.arange(5, dtype=np.float32)]
    words = r"^`trajectories\[0\]` .*: float64 keeps 0 digits of it\. Subtract [^,]*$"
    with pytest.warns(RuntimeWarning, match=words):
        lagged_pairs(large)
    with pytest.warns(RuntimeWarning, match=r"^Column 1 of `x` .*: float64 keeps"):
        moments(np.stack([np.arange(5), 2**60 + np.arange(5)], 1), np.ones((5, 2)), center=True)


def test_the_mean_step_of_moments_keeps_digits_that_the_means_lose():
    x = (1e4 + np.random.default_rng(0).normal(size=(300, 2))).astype(np.float32)
    y = (x + np.float32(0.01) * np.arange(300, dtype=np.float32)[:, None] / 300).astype(np.float32)
    first, second, third = (
        moments(x[i : i + 100], y[i : i + 100], center=True) for i in (0, 100, 200)
    )
    operator = fit(Ridge(1e-3), merge_moments(merge_moments(first, second), third))
    step = y.astype(float).mean(0) - x.astype(float).mean(0)
    expected = step @ np.asarray(operator.encode.matrix, float)
    np.testing.assert_allclose(operator.drift, expected, rtol=1e-2)
