import jax
import numpy as np
import pytest

from dissociation.metrics.crossing import first_cross, log_slope, median_crossing


def test_first_crossing():
    x = np.asarray([0.0, 1.0, 2.0, 3.0])
    y = np.asarray([[0.0, 0.6, 0.4, 0.9], [0.5, 0.5, 0.5, 0.5], [np.nan, np.nan, 0.8, 0.0]])
    np.testing.assert_array_equal(first_cross(x, y, 0.5), [1, np.nan, 2])
    np.testing.assert_array_equal(first_cross(x, y, 0.5, "below"), [0, np.nan, 3])
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda c: first_cross(x, c, 0.5)))(y), [1, np.nan, 2])


def test_medians_without_censoring_and_with():
    times = np.asarray([5.0, 1.0, 4.0, 2.0, 3.0])
    assert median_crossing(times, 10).value == 3
    # The product-limit estimate by hand: 4/5 at 1, 3/5 at 2, and at 6, with three left, 3/5 * 2/3.
    assert median_crossing(np.asarray([1.0, 2.0, np.nan, np.nan, 6.0]), 10).value == 6
    never = median_crossing(np.asarray([1.0, np.nan, np.nan]), 10)
    assert never.value == np.inf
    assert median_crossing(np.full(4, np.nan), 10) == (np.inf, 10, np.inf)
    one = median_crossing(times, 10)
    assert one.low <= one.value <= one.high


def test_the_medians_interval_covers():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(300):
        times = rng.exponential(size=30)
        times[times > 1.5] = np.nan
        found = median_crossing(times, 1.5, level=0.9)
        covered.append(found.low <= np.log(2) <= found.high)
    np.testing.assert_allclose(np.mean(covered), 0.9, atol=0.06)


def test_the_slope_of_censored_times():
    rng = np.random.default_rng(0)
    at = np.repeat(np.asarray([0.3, 0.1, 0.03, 0.01]), 50)
    times = np.exp(2.0 - 0.8 * np.log(at) + 0.3 * rng.normal(size=200))
    whole = log_slope(times, at, 1e9)
    plain = np.polyfit(np.log(at), np.log(times), 1)
    np.testing.assert_allclose([whole.slope, whole.intercept], plain, rtol=1e-3)
    np.testing.assert_allclose(whole.error, 0.3 / (np.log(at).std() * 200**0.5), rtol=0.1)
    end = 250.0  # half of those at 0.01 have not crossed
    cut = np.where(times > end, np.nan, times)
    assert 0.3 < np.isnan(cut[at == 0.01]).mean() < 0.9
    found = log_slope(cut, at, end)
    np.testing.assert_allclose(found.slope, -0.8, atol=3 * found.error)
    np.testing.assert_allclose(found.spread, 0.3, rtol=0.2)
    # The control: without the censored ones the line is too flat.
    kept = ~np.isnan(cut)
    assert np.polyfit(np.log(at[kept]), np.log(cut[kept]), 1)[0] > found.slope + 0.02


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: first_cross(np.arange(3.0), np.arange(4.0), 1.0), "`y`"),
        (lambda: first_cross(np.arange(3.0), np.arange(3.0), 1.0, "up"), "'above', 'below'"),
        (lambda: median_crossing(np.zeros(0), 1.0), "`times` must hold at least one"),
        (lambda: log_slope(np.asarray([1.0, np.nan, 2.0]), np.ones(3), 3.0), "three crossings"),
    ],
)
def test_bad_input_is_refused(call, words):
    with pytest.raises((ValueError, TypeError), match=words):
        call()
