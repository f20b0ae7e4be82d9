import jax
import numpy as np
import pytest

from koopman import fit_model, scan_lags
from koopman._models._lags import FOLDED


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def relaxations(num_steps, noise=0.0):
    """Two relaxations of 0.95 and 0.8 per step."""
    rng = np.random.default_rng(1)
    kicks = rng.normal(size=(num_steps, 2))
    states = np.zeros_like(kicks)
    for t in range(1, num_steps):
        states[t] = np.asarray([0.95, 0.8]) * states[t - 1] + kicks[t]
    return states + noise * states.std(0) * rng.normal(size=states.shape)


def test_modes_of_all_lags_are_those_of_the_first():
    states = relaxations(4000)
    scan = scan_lags(states, [1, 2, 4], time_step=0.5)
    single = fit_model(states, lag=2, time_step=0.5).rates()
    assert scan.lag_time.values.tolist() == [0.5, 1.0, 2.0]
    slow = int(np.argmax(scan.growth.values[0]))
    assert (np.argmax(scan.growth.values, 1) == slow).all()
    assert set(scan.growth.values[1]) == set(single.growth.values)
    assert scan.growth.attrs["units"] == single.growth.attrs["units"]
    within = scan.growth_low <= 2 * np.log(0.95)
    within &= 2 * np.log(0.95) <= scan.growth_high
    assert within.values[:, slow].all()


def test_a_markov_process_passes_and_noise_fails():
    scan = scan_lags(relaxations(4000), [1, 2])
    assert scan.ck_passed.values.all()
    assert scan.multiple.values.tolist() == [2, 3, 4, 5]
    slow = int(np.argmax(scan.growth.values[0]))
    eigenvalue = np.exp(scan.growth.values[0, slow])
    powers = eigenvalue ** np.arange(2, 6)
    np.testing.assert_allclose(scan.ck_predicted.values[0, slow], powers, rtol=1e-6)
    measured = scan.ck_measured.values
    assert (scan.ck_low.values <= measured).all()
    assert (measured <= scan.ck_high.values).all()
    noisy = scan_lags(relaxations(4000, noise=0.5), [1])
    assert not noisy.ck_passed.values.any()


def test_folded_frequencies_are_not_resolved():
    turn = 2 * np.pi * 0.094
    matrix = 0.97 * np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])
    kicks = np.random.default_rng(0).normal(size=(4000, 2))
    states = np.zeros_like(kicks)
    for t in range(1, len(states)):
        states[t] = states[t - 1] @ matrix + kicks[t]
    # Half a period is 5.3 steps.
    scan = scan_lags(states, [1, 5, 6, 8], time_step=0.5)
    assert scan.resolved.values[:, 0].tolist() == [True, True, False, False]
    assert scan.reason.values[2:, 0].tolist() == [FOLDED] * 2
    assert np.isfinite(scan.growth.values).all()
    for name in ("growth", "frequency", "time_scale"):
        for end in ("low", "high"):
            is_finite = np.isfinite(scan[f"{name}_{end}"].values[:, 0])
            np.testing.assert_array_equal(is_finite, scan.resolved.values[:, 0])
    single = fit_model(states, lag=6, time_step=0.5).rates()
    assert single.resolved.values[0]  # a model of one lag has no other frequency


def test_short_runs_have_no_test_at_long_multiples():
    runs = np.split(relaxations(600), 30)
    scan = scan_lags(runs, [5])
    assert np.isfinite(scan.ck_measured.values[..., 0]).all()
    assert np.isnan(scan.ck_measured.values[..., -1]).all()


def test_lags_are_checked():
    states = relaxations(100)
    with pytest.raises(ValueError, match="`lags` must be different"):
        scan_lags(states, [1, 1])
    with pytest.raises(ValueError, match="`inputs` must be None"):
        scan_lags(states, [1, 2], inputs=states)
