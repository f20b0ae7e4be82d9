"""Rates over lags, and the test of Chapman and Kolmogorov."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray
from jaxtyping import Complex, Int

from dissociation._core.checks import check_count, check_distinct, fail
from koopman._models._block_sums import Replicates
from koopman._models._intervals import jackknife_error, matched, student_quantile
from koopman._models._lifting import pair_indices
from koopman._models._model import KoopmanModel, fit_model
from koopman._operators._estimators import Estimator

MULTIPLES = np.arange(2, 6)
TEST_SIZE = 0.1
"""Probability that the test fails for a mode, if the model is true."""
ROUNDING = 1e-9


def scan_lags(
    trajectories: Any,
    lags: Sequence[int],
    estimator: Estimator | None = None,
    *,
    level: float = 0.9,
    **options: Any,
) -> xarray.Dataset:
    """Fit a model at every lag, and test it at 2 to 5 lags.

    Rates are right from the lag on from which they stay within their intervals. The test compares
    lambda_i^k, predicted, with l_i^T C(k lag) w_i, measured, where l_i^T C(0) w_i = 1 and C is the
    covariance of the features.

    Args:
        trajectories: Trajectories, as in `fit_model`.
        lags: Distinct steps between states, at least 1.
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
    first = models[0].mode_table(level).eigenvalues
    tables = []
    for model in models:
        rates, eigenvalues, _ = model.mode_table(level)
        tests = _chapman_kolmogorov(model, eigenvalues)
        table = xarray.merge([rates, tests], combine_attrs="override")
        # Eigenvalues of the first lag at this one, with imaginary parts that are not negative.
        target = first ** (model.recipe.lag / steps[0])
        target = target.real + 1j * np.abs(target.imag)
        tables.append(_in_order(table, eigenvalues, target))
    scan = xarray.concat(tables, "lag", combine_attrs="override")
    times = models[0].meaning.time_step * np.asarray(steps)
    lag_time = ("lag", times, {"units": scan.attrs["unit"]})
    return scan.assign_coords(lag=("lag", steps, {"units": "step"}), lag_time=lag_time)


def _in_order(
    table: xarray.Dataset,
    eigenvalues: Complex[np.ndarray, " modes"],
    target: Complex[np.ndarray, " first"],
) -> xarray.Dataset:
    """Return the modes nearest to the targets, in the order of the targets."""
    nearest = matched(target, eigenvalues[None])[0]
    is_missing = np.isnan(nearest)
    distances = np.abs(np.where(is_missing, 0.0, nearest)[:, None] - eigenvalues)
    ordered = table.isel(mode=np.argmin(distances, 1)).assign_coords(mode=np.arange(len(target)))
    for name in ordered.data_vars:
        values = ordered[name].values.copy()
        fill: Any = np.nan
        if values.dtype == bool:
            fill = False
        elif values.dtype == object:
            fill = "no such mode at this lag"
        values[is_missing] = fill
        ordered[name] = (ordered[name].dims, values, ordered[name].attrs)
    return ordered


def _chapman_kolmogorov(
    model: KoopmanModel, eigenvalues: Complex[np.ndarray, " modes"]
) -> xarray.Dataset:
    """Return the test of every mode at multiples of the lag."""
    num_modes = len(eigenvalues)
    undefined = np.full((num_modes, len(MULTIPLES)), np.nan)
    arrays = {name: undefined.copy() for name in ("measured", "predicted", "low", "high")}
    replicates = model._replicates()
    is_passed = np.full(num_modes, replicates is not None)
    if replicates is not None:
        series = _series_of_modes(model, replicates, eigenvalues)
        predicted_at_lag = series.correlations(1)
        num_tests = len(MULTIPLES) * np.where(np.imag(eigenvalues) > 0, 2, 1)
        for column, multiple in enumerate(MULTIPLES.tolist()):
            measured = series.correlations(multiple)
            predicted = predicted_at_lag**multiple
            difference = measured - predicted
            widths = []
            for component in (np.real, np.imag):
                deleted = component(difference[1:])
                quantile = student_quantile(deleted, 1 - TEST_SIZE / num_tests)
                widths.append(quantile * jackknife_error(deleted) + ROUNDING)
                # A comparison with NaN, at multiples longer than the runs, is False.
                is_passed &= ~(np.abs(component(difference[0])) > widths[-1])
            arrays["measured"][:, column] = measured[0].real
            arrays["predicted"][:, column] = predicted[0].real
            arrays["low"][:, column] = predicted[0].real - widths[0]
            arrays["high"][:, column] = predicted[0].real + widths[0]
    variables: dict[str, Any] = {"ck_passed": ("mode", is_passed)}
    for name, values in arrays.items():
        variables[f"ck_{name}"] = (("mode", "multiple"), values)
    return xarray.Dataset(variables, {"multiple": MULTIPLES})


class _SeriesOfModes(NamedTuple):
    """Eigenfunctions at all times.

    Attributes:
        duals: z_t^T l_i, [rows, modes].
        functions: z_t^T w_i, [rows, modes].
        lengths: Numbers of rows of the runs.
        lag: Steps of one lag.
        block: Block of every row, [rows].
        num_blocks: Number of blocks.
    """

    duals: Complex[np.ndarray, "rows modes"]
    functions: Complex[np.ndarray, "rows modes"]
    lengths: list[int]
    lag: int
    block: Int[np.ndarray, " rows"]
    num_blocks: int

    def correlations(self, multiple: int) -> Complex[np.ndarray, "N modes"]:
        """Return l^T C(k lag) w / l^T C(0) w of all blocks, and of all but one.

        To first order l and w of all blocks serve all but one.
        """
        starts, ends = pair_indices(self.lengths, multiple * self.lag)
        sums = []
        for successors in (starts, ends):
            products = self.duals[starts] * self.functions[successors]
            by_block = np.zeros((self.num_blocks, products.shape[1]), complex)
            np.add.at(by_block, self.block[starts], products)
            total = np.sum(by_block, 0)
            sums.append(np.concatenate([total[None], total - by_block]))
        with np.errstate(invalid="ignore"):
            return sums[1] / sums[0]


def _series_of_modes(
    model: KoopmanModel, replicates: Replicates, eigenvalues: Complex[np.ndarray, " modes"]
) -> _SeriesOfModes:
    """Return the eigenfunctions of a model's modes, and their duals, at all times."""
    lengths = model._row_lengths(model.series)
    lag = model.recipe.lag
    starts, _ = pair_indices(lengths, lag)
    centred = np.asarray(model.lifted.rows) - np.asarray(replicates.mean[0])
    latent = centred @ np.asarray(replicates.project[0])
    values, vectors = np.linalg.eig(np.asarray(replicates.core[0]))
    index = np.argmin(np.abs(values - eigenvalues[:, None]), 1)
    square = latent[starts].T @ latent[starts]
    left_vectors = np.linalg.solve(square, np.linalg.inv(vectors).T)
    blocks = model._blocks()
    block = np.zeros(len(latent), int)
    block[starts] = np.concatenate(blocks.of_pair)
    duals = latent @ left_vectors[:, index]
    functions = latent @ vectors[:, index]
    return _SeriesOfModes(duals, functions, lengths, lag, block, blocks.num_blocks)
