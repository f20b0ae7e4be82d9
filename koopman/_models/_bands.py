"""Bands of forecasts: of means from deleted blocks, of observations from training errors."""

from statistics import NormalDist
from typing import Any

import numpy as np

from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import StateBasis

_FEWEST_ERRORS = 10
"""Number of training errors below which those of fewer steps serve."""


def bands(
    mean: np.ndarray,
    deleted: np.ndarray | None,
    errors: list[np.ndarray],
    level: float,
    basis: StateBasis | None,
) -> dict[str, np.ndarray]:
    """Return the bands of a forecast, [steps, runs, d]; those of means are NaN without replicates.

    The band of observations joins the interval of the mean and the quantiles of the training
    errors as independent errors.

    Args:
        mean: Forecasts, [steps, runs, o].
        deleted: Forecasts with one block deleted, [N, steps, runs, o], or None.
        errors: Errors of training forecasts of every step, [rows, o].
        level: Probability of the intervals.
        basis: Basis of wide states, or None.
    """
    mean = in_columns(mean, basis)
    half_width = np.full(mean.shape, np.nan)
    low = np.full(mean.shape, np.nan)
    high = np.full(mean.shape, np.nan)
    limits = np.full((2, mean.shape[2]), np.nan)
    for step, errors_of_step in enumerate(errors):
        if deleted is not None:
            states = in_columns(deleted[:, step], basis)
            half_width[step] = student_quantile(states, level) * jackknife_error(states)
        if len(errors_of_step) >= _FEWEST_ERRORS:
            limits = _quantiles(errors_of_step, 0.5 + 0.5 * level, basis)
        half_error = 0.5 * (limits[1] - limits[0])
        spread = np.hypot(half_error, np.nan_to_num(half_width[step])) - half_error
        low[step] = mean[step] + limits[0] - spread
        high[step] = mean[step] + limits[1] + spread
    ends = {"mean_low": mean - half_width, "mean_high": mean + half_width}
    return {"mean": mean, **ends, "low": low, "high": high}


def in_columns(coordinates: Any, basis: StateBasis | None) -> Any:
    """Return states of coordinates, [..., d]."""
    return coordinates if basis is None else basis.states(coordinates)


def _quantiles(errors: np.ndarray, tail: float, basis: StateBasis | None) -> Any:
    """Return the lower and upper quantiles of errors; of wide states those of a normal law."""
    if basis is None:
        return np.quantile(errors, [1 - tail, tail], axis=0)
    mean = errors.mean(0)
    # Rows whose products are the covariance; their number is that of the coordinates.
    root = np.linalg.qr(errors - mean, mode="r") / len(errors) ** 0.5
    deviation = np.linalg.norm(basis.states(root), axis=0)
    half_width = NormalDist().inv_cdf(tail) * deviation
    return basis.states(mean) + np.stack([-half_width, half_width])
