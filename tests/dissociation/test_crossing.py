import jax
import numpy as np
import pytest
from scipy.stats import linregress, norm, t
from words import refused

from dissociation.measures import first_cross, log_slope, median_crossing


def test_first_crossing():
    x = np.asarray([0.0, 1.0, 2.0, 3.0])
    y = np.asarray([[0.0, 0.6, 0.4, 0.9], [0.5, 0.5, 0.5, 0.5], [np.nan, np.nan, 0.8, 0.0]])
    np.testing.assert_array_equal(first_cross(x, y, 0.5), [1, np.nan, 2])
    np.testing.assert_array_equal(first_cross(x, y, 0.5, "below"), [0, np.nan, 3])
    np.testing.assert_array_equal(
        jax.jit(jax.vmap(lambda c: first_cross(x, c, 0.5)))(y), [1, np.nan, 2]
    )


def test_medians_without_censoring_and_with():
    times = np.asarray([5.0, 1.0, 4.0, 2.0, 3.0])
    assert median_crossing(times, 10).value == 3
    # The product-limit estimate by hand: 4/5 at 1, 3/5 at 2, and at 6, with three left, 3/5 * 2/3.
    assert median_crossing(np.asarray([1.0, 2.0, np.nan, np.nan, 6.0]), 10).value == 6
    never = median_crossing(np.asarray([1.0, np.nan, np.nan]), 10)
    assert never.value == np.inf
    assert median_crossing(np.full(4, np.nan), 10) == (np.inf, 10, np.inf)
    halves = np.asarray(
        [np.nan, 1, 3, 2, 4, 4, np.nan, 3, 5, 2]
    )  # a survival of one half is counted
    assert [median_crossing(halves, end).value for end in (5, 99)] == [3, 3]


def test_the_medians_interval_covers():
    rng = np.random.default_rng(0)
    times = rng.exponential(size=(300, 30))
    times[times > 1.5] = np.nan
    found = [median_crossing(each, 1.5, level=0.9) for each in times]
    covered = [each.low <= np.log(2) <= each.high for each in found]
    np.testing.assert_allclose(np.mean(covered), 0.9, atol=0.06)


def test_few_samples_bound_the_median_as_far_as_they_can():
    # All n samples lie on one side of their median with chance 2^-n: 1/8 of three is above 1/10,
    # 1/16 of four is not.
    for number, low, high in (
        (1, -np.inf, np.inf),
        (3, -np.inf, np.inf),
        (4, 1, np.inf),
        (5, 1, 5),
    ):
        found = median_crossing(np.arange(1.0, number + 1), 10)
        assert (found.low, found.high) == (low, high), number
        never = median_crossing(np.full(number, np.nan), 10)
        assert never == (np.inf, -np.inf if number < 4 else 10, np.inf)
    assert median_crossing(np.full(5, 3.0), 10) == (3, 3, 3)
    assert median_crossing(np.full(2, 3.0), 10) == (3, -np.inf, np.inf)
    assert median_crossing(np.asarray([1.0, 2.0, 3.0, 4.0, np.nan]), 10).high == np.inf


def test_the_slope_of_times_on_a_line():
    at = np.repeat(np.asarray([0.1, 0.01]), 3)
    tied = log_slope(np.full(6, 40.0), at, 100.0)
    np.testing.assert_allclose(tied[:3], [0.0, np.log(40), 0.0], atol=1e-12)
    assert np.isnan(tied.error)
    steep = log_slope((3 * at**-0.5).astype(np.float32).astype(float), at, 100.0)
    np.testing.assert_allclose(steep[:3], [-0.5, np.log(3), 0.0], atol=1e-6)
    # A censored sample that the line would have cross after the end agrees with it, one long before
    # does not.
    late, early = (
        log_slope(np.append(np.full(6, 40.0), np.nan), np.append(at, 0.1), end)
        for end in (40.0, 100.0)
    )
    assert late.spread == 0
    assert early.spread > 0.1
    assert early.error > 0


def test_the_slope_is_the_likelihoods_maximum():
    rng = np.random.default_rng(3)
    at = np.repeat(np.asarray([3e-4, 1e-4, 3e-5]), 4)
    times = np.exp(1.0 - 0.7 * np.log(at) + 0.2 * rng.normal(size=12))
    end = np.quantile(times, 0.7)
    times[times > end] = np.nan
    crossed = ~np.isnan(times)

    def likelihood(slope, intercept, spread):
        line = intercept + slope * np.log(at)
        seen = norm.logpdf(np.log(times), line, spread)
        return np.sum(np.where(crossed, seen, norm.logsf(np.log(end), line, spread)))

    found = log_slope(times, at, end)
    best = likelihood(*found[:3])
    for shift in ([1e-3, 0, 0], [0, 1e-2, 0], [0, 0, 1e-3], [1e-3, 9e-3, 0]):
        for sign in (1, -1):
            assert likelihood(*(np.asarray(found[:3]) + sign * np.asarray(shift))) < best


def test_the_slope_of_times_that_all_cross():
    rng = np.random.default_rng(0)
    at = np.repeat(np.asarray([0.3, 0.1, 0.03, 0.01]), 50)
    times = np.exp(2.0 - 0.8 * np.log(at) + 0.3 * rng.normal(size=200))
    whole = log_slope(times, at, 1e9)
    plain = np.polyfit(np.log(at), np.log(times), 1)
    np.testing.assert_allclose([whole.slope, whole.intercept], plain, rtol=1e-3)
    few = log_slope(times[::25], at[::25], 1e9, level=0.8)
    ordinary = linregress(np.log(at[::25]), np.log(times[::25]))
    half = t.ppf(0.9, 6) * ordinary.stderr
    np.testing.assert_allclose(
        few[3:], [ordinary.stderr, ordinary.slope - half, ordinary.slope + half], rtol=1e-5
    )
    np.testing.assert_allclose(whole.error, 0.3 / (np.log(at).std() * 200**0.5), rtol=0.1)


@pytest.mark.parametrize(("number", "censored"), [(8, 0.0), (8, 0.4), (15, 0.3)])
def test_the_slopes_interval_covers(number, censored):
    rng = np.random.default_rng(5)
    at = np.resize(np.asarray([1.0, 0.1, 0.01, 0.001]), number)
    covered = []
    for _ in range(100):
        times = np.exp(1.0 - 0.7 * np.log(at) + 0.8 * rng.normal(size=number))
        end = np.quantile(times, 1 - censored)
        found = log_slope(np.where(times > end, np.nan, times), at, end, level=0.9)
        covered.append(found.low <= -0.7 <= found.high)
    # Without the correction 0.78 to 0.84.
    np.testing.assert_allclose(np.mean(covered), 0.9, atol=2.5 * (0.9 * 0.1 / 100) ** 0.5)


def test_bad_input_is_refused():
    ones, rising = np.ones(3), np.asarray([1.0, 2.0, 3.0])
    refused(
        (lambda: first_cross([0.0, np.nan, 1.0], np.arange(3.0), 1.0), "`x` must rise"),
        (lambda: first_cross(rising, rising, 1.0, "up"), "'above', 'below'"),
        (lambda: median_crossing([1.0, np.inf], 1.0), "`times` must be finite"),
        (
            lambda: median_crossing([5, 6, 7], end=3),
            "`end` must be no earlier than the crossing at 5, got 3",
        ),
        (lambda: median_crossing([np.nan, 6, 7], end=[1, 6, 6.5]), "the crossing at 7, got 6.5"),
        (lambda: median_crossing(ones, 1.0, level=1.0), "`level` must be between 0 and 1"),
        (lambda: log_slope([2.0, 3.0, 4.0], rising, 3.5), "the crossing at 4, got 3.5"),
        (lambda: log_slope([1.0, np.nan, 2.0], ones, 3.0), "three crossings"),
        (lambda: log_slope([1.0, 0.0, 2.0], ones, 3.0), "`times` must be positive and finite"),
        (lambda: log_slope(ones, [1.0, 2.0, 0.0], 3.0), "`at` must be positive"),
        (lambda: log_slope(ones, rising, 0.0), "`end` must be positive"),
        error=(ValueError, TypeError),
    )
