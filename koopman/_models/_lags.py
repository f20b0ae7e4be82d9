"""Rates over lags, and the test of Chapman and Kolmogorov."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xarray
from scipy.optimize import linear_sum_assignment

from dissociation._core.checks import check_count, check_distinct, fail
from koopman._models._block_sums import Replicates
from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import pair_indices
from koopman._models._model import KoopmanModel, fit_model
from koopman._operators._estimators import Estimator

MULTIPLES = np.arange(2, 6)
TEST_SIZE = 0.1
"""Probability that the test fails for a mode, if the model is true."""
ROUNDING = 1e-9
FOLDED = "at or beyond Nyquist by the frequency at the first lag: shorten the lag"


def scan_lags(
    trajectories: Any,
    lags: Sequence[int],
    estimator: Estimator | None = None,
    *,
    level: float = 0.9,
    **options: Any,
) -> xarray.Dataset:
    """Fit a model at every lag, and test it at 2 to 5 lags.

    Rates are right from the lag on from which they stay within their intervals. A lag of half a
    period or more folds the frequency into a lower one, by the frequency at the first lag; such
    modes are not resolved. The test compares lambda_i^k, predicted, with l_i^T C(k lag) w_i,
    measured, where l_i^T C(0) w_i = 1 and C is the covariance of the features.

    Args:
        trajectories: Trajectories, as in `fit_model`.
        lags: Distinct steps between states, at least 1, the shortest first.
        estimator: Estimator, as in `fit_model`.
        level: Probability of the intervals.
        **options: Other options of `fit_model`; without inputs.

    Returns:
        The variables of `KoopmanModel.rates` over `lag` and `mode`, NaN where a lag has fewer
        modes: modes are those of the first lag, and others the nearest. The test over `lag`, `mode`
        and `multiple`, 2 to 5: `ck_measured` and `ck_predicted`, real parts, with `ck_low` and
        `ck_high` around what is predicted; `ck_passed` over `lag` and `mode`. The test has no
        ends, and is not passed, below 20 blocks.

    Raises:
        ValueError: If lags are repeated, below 1, or given with inputs; see `fit_model`.

    References:
        Prinz et al. (2011), Markov models of molecular kinetics: generation and validation, section
        IV.F.
    """
    check_distinct("lags", lags)
    if options.get("inputs") is not None:
        fail("inputs", "be None for several lags", "inputs", "They act from t to t + 1")
    steps = [check_count("lags", lag, minimum=1) for lag in lags]
    models = [fit_model(trajectories, estimator, lag=lag, **options) for lag in steps]
    first_rates, first, _ = models[0].mode_table(level)
    # Without an interval its upper end is NaN.
    cycles = np.fmax(first_rates.frequency.values, first_rates.frequency_high.values)
    cycles = cycles * models[0].meaning.time_step
    # Modes that a lag lacks.
    missing = {"resolved": False, "ck_passed": False, "reason": "no such mode at this lag"}
    tables = []
    for model in models:
        rates, eigenvalues, _ = model.mode_table(level)
        tests = _chapman_kolmogorov(model, eigenvalues)
        table = xarray.merge([rates, tests], combine_attrs="override")
        # Eigenvalues of the first lag at this one, with imaginary parts that are not negative.
        target = first ** (model.recipe.lag / steps[0])
        target = np.real(target) + 1j * np.abs(np.imag(target))
        numbers, nearest = linear_sum_assignment(np.abs(target[:, None] - eigenvalues))
        ordered = table.isel(mode=nearest).assign_coords(mode=numbers)
        if model is not models[0]:
            is_folded = cycles[numbers] * model.recipe.lag >= 0.5
            _withhold(ordered, xarray.DataArray(is_folded, dims="mode"), FOLDED)
        tables.append(ordered.reindex(mode=np.arange(len(first)), fill_value=missing))
    scan = xarray.concat(tables, "lag", combine_attrs="override")
    times = models[0].meaning.time_step * np.asarray(steps)
    lag_time = ("lag", times, {"units": scan.attrs["unit"]})
    return scan.assign_coords(lag=("lag", steps, {"units": "step"}), lag_time=lag_time)


def _withhold(rates: xarray.Dataset, is_withheld: xarray.DataArray, reason: str) -> None:
    """Remove the intervals of modes from a table, and write the reason."""
    rates["resolved"] = rates.resolved & ~is_withheld
    rates["reason"] = rates.reason.where(~is_withheld, reason)
    for name in ("growth", "frequency", "time_scale"):
        for end in ("low", "high"):
            rates[f"{name}_{end}"] = rates[f"{name}_{end}"].where(~is_withheld)


def _chapman_kolmogorov(model: KoopmanModel, eigenvalues: np.ndarray) -> xarray.Dataset:
    """Return the test of every mode at multiples of the lag."""
    tests = np.full((4, len(eigenvalues), len(MULTIPLES)), np.nan)
    replicates = model._replicates()
    is_passed = np.full(len(eigenvalues), replicates is not None)
    if replicates is not None:
        correlations = _correlations(model, replicates, eigenvalues)
        num_tests = len(MULTIPLES) * np.where(np.imag(eigenvalues) > 0, 2, 1)
        level = 1 - TEST_SIZE / num_tests[:, None]
        for column, multiple in enumerate(MULTIPLES.tolist()):
            measured = correlations(multiple)
            predicted = correlations(1) ** multiple
            difference = measured - predicted
            difference = np.stack([np.real(difference), np.imag(difference)], -1)
            width = student_quantile(difference[1:], level) * jackknife_error(difference[1:])
            width = width + ROUNDING
            # A comparison with NaN, at multiples longer than the runs, is False.
            is_passed &= ~np.any(np.abs(difference[0]) > width, -1)
            centre = np.real(predicted[0])
            ends = (centre - width[:, 0], centre + width[:, 0])
            tests[:, :, column] = [np.real(measured[0]), centre, *ends]
    variables: dict[str, Any] = {"ck_passed": ("mode", is_passed)}
    for name, values in zip(("measured", "predicted", "low", "high"), tests, strict=True):
        variables[f"ck_{name}"] = (("mode", "multiple"), values)
    return xarray.Dataset(variables, {"multiple": MULTIPLES})


def _correlations(
    model: KoopmanModel, replicates: Replicates, eigenvalues: np.ndarray
) -> Callable[[int], np.ndarray]:
    """Return a function of k to l^T C(k lag) w / l^T C(0) w, [N, modes].

    N counts all blocks, and all but one. To first order l and w of all blocks serve all but one.
    """
    lengths = model._row_lengths(model.series)
    lag = model.recipe.lag
    pairs, _ = pair_indices(lengths, lag)
    latent = (np.asarray(model.lifted.rows) - replicates.mean[0]) @ replicates.project[0]
    values, vectors = np.linalg.eig(replicates.core[0])
    index = np.argmin(np.abs(values - eigenvalues[:, None]), 1)
    square = latent[pairs].T @ latent[pairs]
    # z_t^T l_i and z_t^T w_i at all times.
    duals = latent @ np.linalg.solve(square, np.linalg.inv(vectors).T)[:, index]
    functions = latent @ vectors[:, index]
    blocks = model._blocks()
    block_of_row = np.zeros(len(latent), int)
    block_of_row[pairs] = np.concatenate(blocks.of_pair)

    def correlations(multiple: int) -> np.ndarray:
        starts, ends = pair_indices(lengths, multiple * lag)
        products = duals[starts, None] * functions[np.stack([starts, ends], 1)]
        by_block = np.zeros((blocks.num_blocks, *products.shape[1:]), complex)
        np.add.at(by_block, block_of_row[starts], products)
        total = np.sum(by_block, 0, keepdims=True)
        sums = np.concatenate([total, total - by_block])
        with np.errstate(invalid="ignore"):
            return sums[:, 1] / sums[:, 0]

    return correlations
