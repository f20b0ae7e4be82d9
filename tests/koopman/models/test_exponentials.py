"""Sums of exponentials at any times: closed forms, frames, runs, ranks, intervals and errors."""

import jax
import numpy as np
import pandas as pd
import pytest
from compiled import compilations

from koopman import fit_exponentials

RATES = np.array([-0.05 + 2j, -0.1 + 5j])


pytestmark = pytest.mark.usefixtures("x64")


def waves(rng, times, rates=RATES, num_columns=8, noise=0.2, correlation=0.0):
    """Return a sum of exponentials with random shapes and noise, [time, columns]."""
    shape = (len(rates), num_columns)
    shapes = rng.normal(size=shape) + 1j * rng.normal(size=shape)
    clean = np.real(np.exp(np.outer(times, rates)) @ shapes)
    errors = rng.normal(size=clean.shape)
    for step in range(1, len(times)):
        errors[step] += correlation * errors[step - 1]
    return clean + noise * np.sqrt(1 - correlation**2) * errors


def found_rates(fitted):
    """Return rates by falling angular frequency and growth."""
    rates = fitted.growth + 1j * fitted.angular_frequency
    return rates[np.lexsort((-rates.real, -rates.imag))]


TIMES = {
    "even": lambda rng: np.linspace(0, 20, 200),
    "uneven": lambda rng: np.sort(rng.uniform(0, 20, 200)),
    "long": lambda rng: np.linspace(0, 100, 200),
    "long and uneven": lambda rng: np.sort(rng.uniform(0, 100, 200)),
    "a gap of ten units": lambda rng: np.concatenate(
        [np.linspace(0, 10, 100), np.linspace(20, 30, 100)]
    ),
}


@pytest.mark.parametrize("kind", TIMES)
def test_two_tones_are_found_at_all_times(kind):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        times = TIMES[kind](rng)
        # In 100 units a tone that lasts for 10 is near the threshold of noise.
        rank = 4 if kind.startswith("long") else None
        fitted = fit_exponentials(waves(rng, times), times, rank)
        assert fitted.rank == 4
        np.testing.assert_allclose(found_rates(fitted), RATES[::-1], atol=0.03)


SYSTEMS = {
    "a constant and a tone": (3, [0, -0.1 + 3j]),
    "four decays": (4, [-0.1, -0.3, -2, -6]),
    "one decay": (1, [-0.4]),
    "a growing tone and a decay": (3, [0.1 + 1j, -5]),
    "tones half a unit apart": (6, [-0.2 + 10j, -0.1 + 3.5j, -0.1 + 3j]),
}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_exponentials_without_noise_are_exact(kind):
    rank, rates = SYSTEMS[kind]
    rng = np.random.default_rng(1)
    times = np.sort(rng.uniform(0, 10, 150))
    states = waves(rng, times, np.array(rates), noise=0)
    fitted = fit_exponentials(states, times, rank)
    expected = np.array(rates, complex)
    expected = expected[np.lexsort((-expected.real, -expected.imag))]
    np.testing.assert_allclose(found_rates(fitted), expected, atol=1e-6)
    predicted = fitted.predict(times)
    assert predicted["mean"].dims == ("step", "run", "column")
    np.testing.assert_allclose(predicted["mean"].values[:, 0], states, atol=1e-5)


def test_a_double_rate_is_a_limit_of_pairs():
    # t e^{-t/2} is in the span of a pair as its frequency goes to zero.
    times = np.linspace(0, 10, 100)
    decay = np.exp(-0.5 * times)
    states = np.stack([decay, times * decay], 1)
    fitted = fit_exponentials(states, times, 2)
    np.testing.assert_allclose(fitted.growth, -0.5, atol=1e-4)
    np.testing.assert_allclose(fitted.predict(times)["mean"].values[:, 0], states, atol=1e-6)


def test_the_rank_counts_exponentials_of_standing_waves():
    # Two standing waves have two directions, but four exponentials.
    rng = np.random.default_rng(2)
    times = np.sort(rng.uniform(0, 20, 200))
    waves_of_time = np.real(np.exp(np.outer(times, RATES)))
    states = waves_of_time @ rng.normal(size=(2, 8)) + 0.05 * rng.normal(size=(200, 8))
    fitted = fit_exponentials(states, times)
    assert fitted.rank == 4
    np.testing.assert_allclose(found_rates(fitted), RATES[::-1], atol=0.03)


def test_runs_have_times_and_amplitudes_of_their_own():
    rng = np.random.default_rng(3)
    times = [
        np.sort(rng.uniform(0, 6, size)) + start for size, start in ((50, 0), (30, 7), (64, 2))
    ]
    runs = [waves(rng, array, noise=0.02) for array in times]
    fitted = fit_exponentials(runs, times, 4)
    np.testing.assert_allclose(found_rates(fitted), RATES[::-1], atol=0.02)
    assert fitted.amplitudes.shape == (3, 2, 8)
    predicted = fitted.predict(times)
    assert predicted.sizes == {"step": 64, "run": 3, "column": 8}
    error = predicted["mean"].values[:50, 0] - runs[0]
    assert np.sqrt(np.mean(error**2)) < 0.025
    assert np.isnan(predicted["mean"].values[-1, 1]).all()

    rows = [
        pd.DataFrame(run).assign(hours=array, sample=f"s{index}")
        for index, (run, array) in enumerate(zip(runs, times, strict=True))
    ]
    frame = pd.concat(rows).sample(frac=1, random_state=0)
    framed = fit_exponentials(frame, rank=4, time="hours", run="sample")
    np.testing.assert_allclose(found_rates(framed), found_rates(fitted), atol=1e-8)
    assert "growth (1/hours)" in framed.summary()


def test_times_and_units_scale_the_rates():
    rng = np.random.default_rng(4)
    times = np.sort(rng.uniform(0, 20, 200))
    states = waves(rng, times)
    fitted = fit_exponentials(states, times, 4).rates()
    scaled = fit_exponentials(3 * states, 1000 + times / 60, 4).rates()
    for name in ("growth", "growth_low", "frequency", "frequency_high"):
        np.testing.assert_allclose(scaled[name], 60 * fitted[name], rtol=1e-4)
    np.testing.assert_allclose(scaled.share, fitted.share, rtol=1e-5)
    np.testing.assert_allclose(fitted.share.sum(), 1.0)
    dates = pd.Timestamp("2024-02-01") + pd.to_timedelta(times, unit="D")
    dated = fit_exponentials(pd.DataFrame(states, dates), rank=4)
    np.testing.assert_allclose(dated.rates().growth, fitted.growth, rtol=1e-4)
    assert dated.rates().growth.attrs["units"] == "1/day"
    assert dated.predict(dates[:3]).time.dtype.kind == "M"


def test_missing_rows_are_left_out():
    rng = np.random.default_rng(5)
    times = np.linspace(0, 20, 200)
    states = waves(rng, times)
    is_complete = rng.random(200) > 0.2
    holes = np.where(is_complete[:, None], states, np.nan)
    with pytest.warns(UserWarning, match=r"Left out \d+ rows"):
        fitted = fit_exponentials(holes, times, 4)
    expected = fit_exponentials(states[is_complete], times[is_complete], 4)
    np.testing.assert_allclose(found_rates(fitted), found_rates(expected), atol=1e-9)


def test_one_column_needs_a_rank():
    times = np.linspace(0, 20, 200)
    series = waves(np.random.default_rng(6), times, num_columns=1, noise=0.05)[:, 0]
    with pytest.raises(ValueError, match="`rank` must be an integer"):
        fit_exponentials(series, times)
    fitted = fit_exponentials(series, times, 4)
    np.testing.assert_allclose(found_rates(fitted), RATES[::-1], atol=0.05)


def test_float32_finds_the_rates_of_float64():
    rng = np.random.default_rng(7)
    times = np.linspace(0, 20, 200)
    states = waves(rng, times)
    expected = found_rates(fit_exponentials(states, times, 4))
    with jax.enable_x64(False):
        single = fit_exponentials(states, times, 4)
    np.testing.assert_allclose(found_rates(single), expected, atol=2e-4)


def test_other_lengths_and_ranks_compile_nothing():
    rng = np.random.default_rng(8)
    times = np.linspace(0, 20, 200)
    fit_exponentials(waves(rng, times), times, 4)

    def fit_again():
        shorter = np.linspace(0, 13, 131)
        fitted = fit_exponentials(waves(rng, shorter), shorter, 3)
        fitted.rates()
        fitted.predict([1.0, 2.0])

    assert compilations(fit_again) == []


def coverage(num_draws, correlation):
    """Return the share of draws in which each of four numbers is in its 90 % interval."""
    truth = {"growth": RATES.real, "frequency": RATES.imag / (2 * np.pi)}
    hits = []
    for seed in range(num_draws):
        rng = np.random.default_rng(1000 + seed)
        times = np.sort(rng.uniform(0, 20, 200)) if seed % 2 else np.linspace(0, 20, 200)
        fitted = fit_exponentials(waves(rng, times, correlation=correlation), times, 4)
        rates = fitted.rates().sortby("frequency")
        assert bool(rates.resolved.all())
        draw = []
        for name, values in truth.items():
            is_covered = (rates[f"{name}_low"] <= values) & (values <= rates[f"{name}_high"])
            draw += is_covered.values.tolist()
        hits.append(draw)
    return np.mean(hits, 0)


@pytest.mark.parametrize("correlation", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_intervals_cover_the_rates(correlation):
    # 40 draws of four numbers: a standard error of 0.03 of the mean.
    assert 0.8 < coverage(40, correlation).mean() < 0.98


@pytest.mark.full
@pytest.mark.parametrize(("correlation", "low", "high"), [(0.0, 0.85, 0.95), (0.8, 0.84, 0.97)])
def test_intervals_of_each_number_cover(correlation, low, high):
    shares = coverage(400, correlation)
    assert (shares > low).all()
    assert (shares < high).all()
    if correlation == 0:
        assert 0.88 < shares.mean() < 0.92


def test_bands_hold_new_observations():
    shares = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        times = np.linspace(0, 30, 300)
        states = waves(rng, times)
        fitted = fit_exponentials(states[:200], times[:200], 4)
        bands = fitted.predict(times[200:]).isel(run=0)
        held = (bands.low.values <= states[200:]) & (states[200:] <= bands.high.values)
        shares.append(held.mean())
    assert 0.88 < np.mean(shares) < 0.92


def test_short_data_give_rates_without_intervals():
    times = np.linspace(0, 3, 30)
    states = waves(np.random.default_rng(9), times, RATES[:1], noise=0.01)
    rates = fit_exponentials(states, times, 2).rates()
    assert np.isnan(rates.growth_low).all()
    assert not rates.resolved.any()
    assert "fewer than 40 rows" in str(rates.reason.values[0])
    np.testing.assert_allclose(rates.frequency, 1 / np.pi, atol=0.02)


@pytest.mark.parametrize("correlation", [0.0, pytest.param(0.8, marks=pytest.mark.slow)])
def test_exponentials_of_noise_are_not_resolved(correlation):
    num_resolved = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        times = np.linspace(0, 20, 200)
        rates = fit_exponentials(waves(rng, times, correlation=correlation), times, 6).rates()
        num_resolved += int(rates.resolved.sum())
        assert not rates.resolved.values[2]
        assert "noise" in rates.reason.values[2] or "converge" in rates.reason.values[2]
    assert num_resolved >= 16


WRONG = {
    "times of another length": (
        (np.ones((50, 2)), np.arange(49.0), 2),
        "have the 50 times of run 0",
    ),
    "times that fall": ((np.ones((3, 2)), [0.0, 2.0, 1.0], 1), "2 before 1"),
    "times of another number of runs": (
        ([np.ones((9, 2))] * 3, [np.arange(9.0)] * 2, 1),
        "a list of 3, one per run",
    ),
    "text as times": ((np.ones((3, 2)), ["a", "b", "c"], 1), "be numbers"),
    "a rank above the rows": ((np.ones((5, 2)), None, 5), "below the number of rows"),
    "a rank of zero": ((np.ones((50, 2)), None, 0), "`rank` must be at least 1"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_raise(kind):
    arguments, message = WRONG[kind]
    with pytest.raises((ValueError, TypeError), match=message):
        fit_exponentials(*arguments)
