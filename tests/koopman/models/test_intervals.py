import jax
import numpy as np
import pytest
from compiled import compilations
from scipy.optimize import linear_sum_assignment

from koopman import PrincipalComponents, ReducedRank, Ridge, eigenvalues, fit, fit_model
from koopman._models._block_sums import assign_blocks, replicate
from koopman._models._intervals import (
    few_pairs,
    jackknife_error,
    matched,
    student_quantile,
)

LAG = 2
ESTIMATORS = {
    "ridge": Ridge(1e-2),
    "principal": PrincipalComponents(2, 1e-2),
    "reduced": ReducedRank(3, 1e-2),
}


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def rotation(num_steps, noise=0.0, seed=0, decay=0.95):
    """Two states with eigenvalues decay exp(+-.3i), and noise of observation."""
    rng = np.random.default_rng(seed)
    cosine, sine = decay * np.cos(0.3), decay * np.sin(0.3)
    kicks = rng.normal(size=(num_steps + 50, 2))
    states = np.zeros_like(kicks)
    for t in range(1, len(kicks)):
        x, y = states[t - 1]
        states[t] = [cosine * x - sine * y, sine * x + cosine * y] + kicks[t]
    states = states[50:]
    return states + noise * states.std() * rng.normal(size=states.shape)


def delayed(states, number):
    length = len(states) - number + 1
    columns = [states[number - 1 - k : number - 1 - k + length] for k in range(number)]
    return np.concatenate(columns, 1)


def replicates_of(runs, kind, center=True):
    """Replicates in a basis that is not that of the features, and pairs with their blocks."""
    rows = np.concatenate(runs)
    lengths = [len(run) for run in runs]
    blocks = assign_blocks([max(length - LAG, 0) for length in lengths])
    turn, _ = np.linalg.qr(np.random.default_rng(1).normal(size=(rows.shape[1],) * 2))
    scale = np.asarray([3.0, 1.5, 1.0, 0.7])
    z = (rows @ turn) / scale
    estimator = ESTIMATORS[kind]
    options = {"kind": kind, "rank": estimator.size, "center": center}
    replicates = replicate(z, rows, lengths, LAG, blocks, scale, 1e-2, **options)
    starts = np.cumsum([0, *lengths[:-1]])
    times = [start + np.arange(length - LAG) for start, length in zip(starts, lengths, strict=True)]
    return replicates, rows, np.concatenate(times), np.concatenate(blocks.of_pair)


def assert_equal_sets(values, expected, tolerance=1e-8):
    distances = np.abs(np.asarray(values)[:, None] - np.asarray(expected))
    rows, columns = linear_sum_assignment(distances)
    assert distances[rows, columns].max() < tolerance


@pytest.mark.parametrize("center", [True, False])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_replicate_is_the_fit_without_its_block(kind, center):
    offset = 1.0 if center else 0.0
    runs = [delayed(rotation(length, seed=length) + offset, 2) for length in (150, 41, 90)]
    replicates, rows, times, block = replicates_of(runs, kind, center)
    estimator = ESTIMATORS[kind]
    assert replicates.num_blocks == 100
    for number in (0, 1, 57):
        x = times[block != number - 1]
        operator = fit(estimator, rows[x], rows[x + LAG], center=center)
        assert_equal_sets(replicates.eigenvalues[number], eigenvalues(operator))
        if center:
            mean = replicates.mean_observable[number]
            np.testing.assert_allclose(mean, rows[x + LAG].mean(0), atol=1e-10)
    tenth = times[block // 10 == 4]
    operator = fit(estimator, rows[tenth], rows[tenth + LAG], center=center)
    tolerance = 1e-3 if kind == "principal" else 1e-8
    assert_equal_sets(replicates.eigenvalues[-6], eigenvalues(operator), tolerance)
    # Pairs at twice the lag start at the same times, where the run is long enough.
    has_later = np.isin(times + LAG, times)
    later = times[has_later]
    operator = fit(estimator, rows[later], rows[later + 2 * LAG], center=center)
    assert_equal_sets(replicates.eigenvalues_later[0], eigenvalues(operator))


def test_twenty_runs_are_blocks_and_tenths_are_of_a_permutation():
    blocks = assign_blocks([5] * 20)
    assert [set(run.tolist()) for run in blocks.of_pair] == [{k} for k in range(20)]
    assert np.bincount(blocks.tenths).tolist() == [2] * 10
    assert (np.diff(blocks.tenths) < 0).any()
    grouped = assign_blocks([3] * 500)
    assert grouped.num_blocks == 200
    assert assign_blocks([30]).num_blocks == 15
    assert [len(run) for run in assign_blocks([7, 9]).without(8).of_pair] == [0, 1]


def test_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).exponential(size=(50, 1))
    deleted = (values.sum(0) - values) / 49
    expected = values.std(ddof=1) / 50**0.5
    np.testing.assert_allclose(jackknife_error(deleted), expected, rtol=1e-10)
    # The kurtosis of replicates is that of the values, and heavy tails widen the interval.
    even = np.tile([[-1.0], [1.0]], (25, 1))
    heavy = np.zeros((50, 1))
    heavy[0] = 1.0
    assert student_quantile(even, 0.9)[0] == pytest.approx(1.6766, abs=1e-3)
    assert student_quantile(heavy, 0.9)[0] > 2.5


def test_values_are_matched_by_distance_not_by_order():
    reference = np.asarray([0.9, 0.8, 0.1]) + 0j
    values = np.asarray([[0.12, 0.79, 0.91], [0.86, 0.88, 0.1], [np.nan, 0.8, 0.9]]) + 0j
    expected = [[0.91, 0.79, 0.12], [0.88, 0.86, 0.1], [0.9, 0.8, np.nan]]
    np.testing.assert_array_equal(matched(reference, values), np.asarray(expected) + 0j)
    # Missing values are not a number.
    assert np.isnan(matched(reference, values[:1, 1:])).tolist() == [[False, False, True]]


def test_other_lengths_up_to_a_power_of_two_do_not_compile_again():
    replicates_of([delayed(rotation(300), 2)], "ridge")
    assert compilations(lambda: replicates_of([delayed(rotation(391), 2)], "ridge")) == []


def reasons(model):
    rates = model.rates()
    return rates.reason.values[0], rates


def test_right_models_are_resolved_and_wrong_ones_withheld():
    reason, rates = reasons(fit_model(rotation(2000)))
    assert reason == ""
    assert rates.growth_low[0] < np.log(0.95) < rates.growth_high[0]
    assert rates.frequency_low[0] < 0.3 / (2 * np.pi) < rates.frequency_high[0]
    noisy = rotation(2000, noise=0.3)
    reason, rates = reasons(fit_model(noisy))
    assert reason.startswith("twice the lag disagrees")
    assert np.isnan(rates.growth_low[0])
    assert reasons(fit_model(noisy, num_delays=6))[0] == ""
    assert reasons(fit_model(noisy, num_delays=30))[0].startswith("33 pairs per latent function")


@pytest.mark.parametrize("num_delays", [12, 24])
def test_too_few_delays_are_contradicted_by_twice_as_many(num_delays):
    time = 0.05 * np.arange(900)
    tones = np.exp(-0.05 * time) * np.cos(2 * time) + np.exp(-0.1 * time) * np.cos(5 * time)
    noise = 0.1 * np.random.default_rng(30000).normal(size=900)
    rates = fit_model(tones + noise, PrincipalComponents(4), num_delays=num_delays).rates()
    assert not rates.resolved.any()
    assert "twice the delays" in "".join(rates.reason.values)


def test_short_series_have_rates_without_intervals():
    reason, rates = reasons(fit_model(rotation(38)))
    assert "fewer than 20 blocks" in reason or "pairs per latent" in reason
    assert np.isfinite(rates.growth).all()
    assert np.isnan(rates.growth_low).all()


def test_a_negative_eigenvalue_is_beyond_nyquist():
    rng = np.random.default_rng(0)
    kicks = rng.normal(size=1000)
    states = np.convolve(kicks, (-0.7) ** np.arange(30))[:1000]
    assert "Nyquist" in reasons(fit_model(states))[0]


def test_exact_data_are_resolved():
    time = np.arange(300)
    model = fit_model(np.cos(0.3 * time) * 0.99**time, num_delays=2)
    reason, rates = reasons(model)
    assert reason == ""
    assert float(rates.growth[0]) == pytest.approx(np.log(0.99), abs=1e-9)


def test_few_pairs_are_enough_for_exact_data_alone():
    assert 'PrincipalComponents("auto")' in few_pairs(79, 2, 1e-3)
    assert few_pairs(80, 2, 1e-3) == ""
    assert few_pairs(30, 2, 1e-8) == ""


@pytest.mark.full
def test_intervals_hold_the_rates_of_nine_in_ten_draws():
    draws = 150
    hits = []
    for seed in range(draws):
        reason, rates = reasons(fit_model(rotation(2000, seed=seed, noise=0.3), num_delays=8))
        if reason:
            continue
        for name, exact in (("growth", np.log(0.95)), ("frequency", 0.3 / (2 * np.pi))):
            low, high = float(rates[f"{name}_low"][0]), float(rates[f"{name}_high"][0])
            hits.append(low <= exact <= high)
    assert len(hits) > 2 * 0.9 * draws
    assert 0.86 <= np.mean(hits) <= 0.95
