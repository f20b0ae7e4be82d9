"""Bands of forecasts: of means from deleted blocks, of observations from training errors."""

from statistics import NormalDist
from typing import Any

import numpy as np

from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import StateBasis, column_blocks

_NAMES = ("mean", "mean_low", "mean_high", "low", "high")
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
    summary = np.full((2, mean.shape[2]), np.nan)
    summaries = []
    for errors_of_step in errors:
        if len(errors_of_step) >= _FEWEST_ERRORS:
            summary = errors_of_step if basis is None else _moments(errors_of_step)
        summaries.append(summary)
    if basis is None:
        ends = _ends(mean, deleted, summaries, level, None)
    else:
        ends = np.empty((len(_NAMES), *mean.shape[:2], len(basis.vectors)))
        for block, columns in zip(basis.blocks(), column_blocks(ends.T), strict=True):
            columns.T[:] = _ends(mean, deleted, summaries, level, block)
    return dict(zip(_NAMES, ends, strict=True))


def _ends(
    mean: np.ndarray,
    deleted: np.ndarray | None,
    summaries: list[np.ndarray],
    level: float,
    basis: StateBasis | None,
) -> np.ndarray:
    """Return the bands of all columns, or of those of a basis, from errors or their `_moments`."""
    mean = in_columns(mean, basis)
    half_width = np.full(mean.shape, np.nan)
    low = np.full(mean.shape, np.nan)
    high = np.full(mean.shape, np.nan)
    for step, summary in enumerate(summaries):
        if deleted is not None:
            states = in_columns(deleted[:, step], basis)
            half_width[step] = student_quantile(states, level) * jackknife_error(states)
        limits = _quantiles(summary, 0.5 + 0.5 * level, basis)
        half_error = 0.5 * (limits[1] - limits[0])
        spread = np.hypot(half_error, np.nan_to_num(half_width[step])) - half_error
        low[step] = mean[step] + limits[0] - spread
        high[step] = mean[step] + limits[1] + spread
    return np.stack([mean, mean - half_width, mean + half_width, low, high])


def in_columns(coordinates: Any, basis: StateBasis | None) -> Any:
    """Return states of coordinates, [..., d]."""
    return coordinates if basis is None else basis.states(coordinates)


def _moments(errors: np.ndarray) -> np.ndarray:
    """Return the mean of errors, and below it rows whose products are their covariance."""
    mean = errors.mean(0, keepdims=True)
    # The number of rows is that of the coordinates at most.
    root = np.linalg.qr(errors - mean, mode="r") / len(errors) ** 0.5
    return np.concatenate([mean, root])


def _quantiles(summary: np.ndarray, tail: float, basis: StateBasis | None) -> Any:
    """Return the lower and upper quantiles of errors; of wide states those of a normal law."""
    if basis is None:
        return np.quantile(summary, [1 - tail, tail], axis=0)
    states = basis.states(summary)
    half_width = NormalDist().inv_cdf(tail) * np.linalg.norm(states[1:], axis=0)
    return states[0] + np.stack([-half_width, half_width])
