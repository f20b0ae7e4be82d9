"""Forecasts of replicates, and bands of means and of new observations."""

from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int
from scipy.special import ndtri

from dissociation._core.linalg import product
from koopman._models._block_sums import Replicates
from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import StateBasis

_FEWEST_ERRORS = 10
"""Number of training errors below which those of fewer steps serve."""


def replicated_forecasts(
    replicates: Replicates, z: Float[np.ndarray, "n R"], steps: Int[np.ndarray, " t"]
) -> Float[np.ndarray, "M t n o"]:
    """Return forecasts of all replicates at rising lags `steps`, by one program.

    Args:
        replicates: Replicates with an observable.
        z: Rows of features, about 1 in size.
        steps: Lags ahead, rising from 1 or more.
    """
    gaps = np.diff(steps, prepend=1)
    fields = replicates[:6]
    return np.asarray(_replicated_forecasts(fields, z, gaps))


@jax.jit
def _replicated_forecasts(fields: tuple[Array, ...], z: Array, gaps: Array) -> Array:
    def forecasts(
        mean: Array, project: Array, core: Array, drift: Array, readout: Array, constant: Array
    ) -> Array:
        def advance(_: Array, latent: Array) -> Array:
            return product(latent, core) + drift[None]

        def step(latent: Array, gap: Array) -> tuple[Array, Array]:
            latent = lax.fori_loop(0, gap, advance, latent)
            return latent, product(latent, readout) + constant[None]

        return lax.scan(step, product(z - mean[None], project), gaps)[1]

    return jax.vmap(forecasts)(*fields)


class Forecast(NamedTuple):
    """Forecasts of states, and what their bands are made of.

    Attributes:
        mean: Forecasts, [steps, runs, o].
        deleted: Forecasts with one block deleted, or None: [N, steps, runs, o].
        errors: Errors of training forecasts, a list over steps: [rows, o].
    """

    mean: Float[np.ndarray, "t runs o"]
    deleted: Float[np.ndarray, "N t runs o"] | None
    errors: list[Float[np.ndarray, "_ o"]]


class Bands(NamedTuple):
    """Means with intervals, and intervals of new observations: [steps, runs, d]."""

    mean: Float[np.ndarray, "t runs d"]
    mean_low: Float[np.ndarray, "t runs d"]
    mean_high: Float[np.ndarray, "t runs d"]
    low: Float[np.ndarray, "t runs d"]
    high: Float[np.ndarray, "t runs d"]


def bands(forecast: Forecast, level: float, basis: StateBasis | None) -> Bands:
    """Return the bands of a forecast; those of means are NaN without replicates.

    The band of observations joins the interval of the mean and the quantiles of the training
    errors as independent errors.
    """
    mean = _expanded(forecast.mean, basis)
    half_width = np.full(mean.shape, np.nan)
    if forecast.deleted is not None:
        for step in range(len(mean)):
            deleted = _expanded(forecast.deleted[:, step], basis)
            half_width[step] = student_quantile(deleted, level) * jackknife_error(deleted)
    low = np.empty_like(mean)
    high = np.empty_like(mean)
    lower = upper = np.full(mean.shape[2], np.nan)
    for step, errors in enumerate(forecast.errors):
        if len(errors) >= _FEWEST_ERRORS or step == 0:
            lower, upper = _quantiles(errors, level, basis)
        half_error = 0.5 * (upper - lower)
        spread = np.hypot(half_error, np.nan_to_num(half_width[step])) - half_error
        low[step] = mean[step] + lower - spread
        high[step] = mean[step] + upper + spread
    return Bands(mean, mean - half_width, mean + half_width, low, high)


def _expanded(
    coordinates: Float[np.ndarray, "*n c"], basis: StateBasis | None
) -> Float[np.ndarray, "*n d"]:
    """Return states of coordinates."""
    return coordinates if basis is None else basis.states(coordinates)


def _quantiles(
    errors: Float[np.ndarray, "n o"], level: float, basis: StateBasis | None
) -> tuple[Float[np.ndarray, " d"], Float[np.ndarray, " d"]]:
    """Return the lower and upper quantiles of errors; of wide states those of a normal law."""
    if not len(errors):
        width = errors.shape[1] if basis is None else len(basis.scale)
        undefined = np.full(width, np.nan)
        return undefined, undefined
    tail = 0.5 - 0.5 * level
    if basis is None:
        lower, upper = np.quantile(errors, [tail, 1 - tail], axis=0)
        return lower, upper
    mean = basis.states(errors.mean(0))
    covariance = np.cov(errors, rowvar=False, bias=True).reshape(errors.shape[1], -1)
    vectors = np.asarray(basis.vectors)
    variance = np.sum((vectors @ covariance) * vectors, 1)
    half_width = ndtri(1 - tail) * np.sqrt(np.maximum(variance, 0.0)) * np.asarray(basis.scale)
    return mean - half_width, mean + half_width
