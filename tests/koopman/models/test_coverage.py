"""The command `coverage`: counts, Wilson's intervals, and reasons of misses."""

import jax
import numpy as np
import pytest
from drawn import assert_only_draws
from scipy.stats import binomtest

from koopman.figures import coverage


@pytest.fixture(scope="module")
def results():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage, "SYSTEMS", {"linear": coverage.SYSTEMS["linear"]})
        config = coverage.Config(num_seeds=6, lengths=(300, 400))
        return coverage.compute(config, key=jax.random.key(0))


def test_counts_are_those_of_modes_with_an_exact_rate(results):
    # A conjugate pair has two rates.
    assert results.sizes["modes"] == coverage.MAX_MODES
    has_rate = results.deviation.notnull().any(("systems", "lengths", "seeds"))
    assert has_rate.sum().item() == 2
    np.testing.assert_array_equal(results.num_strong, 1)
    np.testing.assert_array_equal(results.num_intervals, 2 * (1 - results.num_withheld))
    held = np.abs(results.deviation) <= 1
    total = held.sum(("seeds", "rates", "modes")) / results.num_intervals.sum("seeds")
    np.testing.assert_allclose(results.coverage, total)
    assert (results.coverage > 0.5).all()


@pytest.mark.parametrize(("hits", "number"), [(40, 50), (12, 12), (0, 7)])
def test_ends_are_those_of_wilson(hits, number):
    fraction = hits / number
    error = np.sqrt(fraction * (1 - fraction) / number)
    # Cases of a trajectory that agree count once.
    ends = coverage._wilson_ends(fraction, error, number, 4 * number)
    expected = binomtest(hits, number).proportion_ci(method="wilson")
    np.testing.assert_allclose(ends, expected, atol=1e-4)


def test_bars_stay_within_fractions_and_have_a_length(results):
    assert_only_draws(coverage, results)
    for panel in coverage.draw(results).axes:
        for bars in panel.collections:
            for segment in bars.get_segments():
                low, high = segment[:, 0]
                assert 0 <= low < high <= 1


def test_a_miss_has_a_reason(results):
    good = results.assign(coverage=0 * results.coverage + 0.9, withheld=0 * results.withheld)
    assert [row[-1] for row in coverage.table(good)[1:]] == ["", ""]
    bad = good.copy()
    bad["coverage"] = 0 * bad.coverage + 0.7
    bad["deviation"] = 0 * bad.deviation + 1.25
    row = coverage.table(bad)[1]
    assert row[-1] == (
        "intervals 1.25 times as wide hold 90 %; growth of mode 0 is off by +1.25 half-widths"
    )
    bad = good.assign(withheld=0 * good.withheld + 0.5)
    bad["reason"] = bad.reason.copy(data=np.full(bad.reason.shape, coverage.FAINT, "U200"))
    bad.reason.values[..., :3, 0] = "twice the lag disagrees"
    assert coverage.table(bad)[1][-1] == "3 of 3 withheld: twice the lag disagrees"
