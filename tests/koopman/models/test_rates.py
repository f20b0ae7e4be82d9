import numpy as np

from koopman._models._rates import RateEstimates, falling_order, rates_dataset, rates_summary


def estimates():
    return RateEstimates(
        growth=np.asarray([-0.05, -0.1, 0.3]),
        growth_low=np.asarray([-0.06, -0.11, -0.1]),
        growth_high=np.asarray([0.01, -0.08, 0.4]),
        frequency=np.asarray([0.1, 0.0, 0.0]),
        frequency_low=np.asarray([0.09, 0.0, 0.0]),
        frequency_high=np.asarray([0.11, 0.0, 0.0]),
        share=np.asarray([0.2, 0.7, 0.1]),
        reason=["", "", "too short"],
    )


def test_the_table_is_in_the_order_of_shares_with_units():
    rates = rates_dataset(estimates(), "day", 0.9)
    assert rates.share.values.tolist() == [0.7, 0.2, 0.1]
    assert rates.frequency.values.tolist() == [0.0, 0.1, 0.0]
    assert rates.resolved.values.tolist() == [True, True, False]
    assert rates.reason.values.tolist() == ["", "", "too short"]
    # The estimate of a mode that is not resolved stays, its interval does not.
    assert rates.growth.values[2] == 0.3
    for name in ("growth", "frequency", "time_scale"):
        assert np.isnan(rates[f"{name}_low"].values[2])
        assert np.isnan(rates[f"{name}_high"].values[2])
        assert rates[name].attrs["units"] == ("day" if name == "time_scale" else "1/day")


def test_time_scales_are_of_the_ends_and_infinite_without_decay():
    rates = rates_dataset(estimates(), "day", 0.9)
    np.testing.assert_allclose(rates.time_scale, [10.0, 20.0, np.inf])
    np.testing.assert_allclose(rates.time_scale_low[:2], [1 / 0.11, 1 / 0.06])
    np.testing.assert_allclose(rates.time_scale_high[:2], [12.5, np.inf])


def test_shares_that_agree_are_ordered_by_growth():
    share = np.asarray([0.5, 0.5 + 1e-14, 0.0])
    assert falling_order(share, np.asarray([-1.0, -2.0, 3.0])).tolist() == [0, 1, 2]


def test_the_summary_holds_units_intervals_and_reasons():
    lines = rates_summary(rates_dataset(estimates(), "day", 0.9)).splitlines()
    assert lines[0] == "Rates with 90 % intervals; 2 of 3 modes are resolved."
    assert "growth (1/day)" in lines[1]
    assert "time scale (day)" in lines[1]
    assert "-0.1 [-0.11, -0.08]" in lines[2]
    assert lines[4].endswith("not resolved: too short")
