"""Times at which curves cross a threshold, treated as censored survival times."""

import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize, stats

from dissociation._core.checks import (
    check_choice,
    check_finite,
    check_level,
    check_positive,
    fail,
    is_traced,
)
from dissociation._core.validation import validated

DIRECTIONS = ("above", "below")

# Residual of log times that counts as zero, because times may be rounded to float32.
_ON_THE_LINE = 1e-6


class Median(NamedTuple):
    """Median time of an event that some samples may not have had.

    Attributes:
        value: Median; infinite if the estimated probability of no event stays above 1/2.
        low: Lower end of the interval; minus infinity if the data do not bound it.
        high: Upper end of the interval; infinite if the data do not bound it.
    """

    value: float
    low: float
    high: float


class Slope(NamedTuple):
    """Line of log time against the logarithm of another quantity.

    Attributes:
        slope: Slope of the line.
        intercept: Log time at log 1.
        spread: Standard deviation of log times about the line, 0 if all crossings lie on it.
        error: Standard error of the slope, from the curvature of the likelihood times sqrt(k / (k -
            2)) with k crossings; NaN if the spread is 0.
        low: Lower end of Student's interval of the slope with k - 2 degrees of freedom.
        high: Upper end of the interval.
    """

    slope: float
    intercept: float
    spread: float
    error: float
    low: float
    high: float


@validated
def first_cross(
    x: Float[Array | np.ndarray, " times"],
    y: Float[Array | np.ndarray, "*b times"],
    threshold: float | Float[Array, ""],
    direction: str = "above",
) -> Float[Array, "*b"]:
    """Return the first x at which y is strictly beyond the threshold, or NaN.

    Args:
        x: Increasing positions, [times]; not checked if traced.
        y: Curves, [..., times]. NaN is never beyond the threshold.
        threshold: Threshold, in the units of y.
        direction: "above" or "below".

    Example:
        >>> first_cross(jnp.array([0.0, 1.0, 2.0]), jnp.array([[0.1, 0.6, 0.9], [0.1, 0.2, 0.3]]), 0.5)
        Array([ 1., nan], dtype=float32)
    """
    check_choice("direction", direction, DIRECTIONS)
    if not is_traced(x) and not np.all(np.diff(np.asarray(x)) > 0):
        fail("x", "rise", np.asarray(x))
    x, y = jnp.asarray(x), jnp.asarray(y)
    beyond = y > threshold if direction == "above" else y < threshold
    return jnp.where(jnp.any(beyond, -1), x[jnp.argmax(beyond, -1)], jnp.nan)


@validated
def median_crossing(
    times: Float[np.ndarray, " n"],
    end: float | int | Float[np.ndarray, " n"],
    *,
    level: float = 0.9,
) -> Median:
    """Return Kaplan and Meier's median of crossing times with Brookmeyer and Crowley's interval, on the host.

    At level 0.9 an interval bounded from below needs four samples, one bounded from above five if
    all have crossed.

    Args:
        times: Crossing times; NaN for samples that had not crossed when their run ended.
        end: End of all runs or of each.
        level: Coverage of the interval, between 0 and 1; approximate in small samples.

    Raises:
        ValueError: If there are no times, a time is infinite, an end is not finite or before its
            crossing, or `level` is out of range.

    References:
        Kaplan and Meier (1958). Brookmeyer and Crowley (1982), A confidence interval for the median
        survival time.
    """
    times = np.asarray(times, float)
    check_level(level)
    crossed = ~np.isnan(times)
    check_finite("times", times[crossed])
    check_finite("end", end)
    ends = np.broadcast_to(np.asarray(end, float), times.shape)
    _check_ends(times, ends)
    one_side = 0.5**times.size  # probability that all samples lie on one side of the median
    bounded = one_side <= 1 - level
    if not crossed.any():
        return Median(np.inf, float(ends.min()) if bounded else -np.inf, np.inf)
    survival = stats.ecdf(stats.CensoredData(uncensored=times[crossed], right=ends[~crossed])).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", RuntimeWarning
        )  # SciPy has no limits if all or none have crossed
        limits = survival.confidence_interval(level, method="log-log")

    def half(chance: np.ndarray) -> float:
        below = np.flatnonzero(chance <= 0.5)
        return float(survival.quantiles[below[0]]) if len(below) else np.inf

    def limit(curve: Any, after_all: float) -> np.ndarray:
        # Log-log limits do not exist before the first and after the last crossing.
        beyond = np.where(survival.probabilities > 0, 1.0, after_all)
        return np.where(np.isnan(curve.probabilities), beyond, curve.probabilities)

    low = half(limit(limits.low, 0.0)) if bounded else -np.inf
    high = half(limit(limits.high, 0.0 if 2 * one_side <= 1 - level else 1.0))
    # The estimate is often exactly 1/2, but for its rounding.
    return Median(half(np.round(survival.probabilities, 12)), low, high)


def _check_ends(times: np.ndarray, ends: np.ndarray) -> None:
    if (late := times > ends).any():
        fail("end", f"be no earlier than the crossing at {times[late][0]:g}", f"{ends[late][0]:g}")


@validated
def log_slope(
    times: Float[np.ndarray, " n"],
    at: Float[np.ndarray, " n"],
    end: float | int | Float[np.ndarray, " n"],
    *,
    level: float = 0.95,
) -> Slope:
    """Fit a line to log time against log `at`, by maximum likelihood with a normal spread, on the host.

    Samples that did not cross count as "later than `end`" (Tobin's model of censored data). If all
    crossings lie on one line that contradicts no other sample, the spread is 0.

    Args:
        times: Positive crossing times; NaN for samples that had not crossed.
        at: Positive quantity on which the times depend.
        end: Positive end of all runs or of each.
        level: Coverage of the slope's interval, between 0 and 1, to first order. With up to half of
            8 or 15 samples censored, intervals at 0.95 held 94 to 97 % of true slopes.

    Raises:
        ValueError: If lengths differ, a value or `level` is out of range, or there are fewer than
            three crossings or all are at one value of `at`.

    References:
        Tobin (1958), Estimation of relationships for limited dependent variables.
        Olsen (1978), Note on the uniqueness of the maximum likelihood estimator for the Tobit
        model.
    """
    times, at = np.asarray(times, float), np.asarray(at, float)
    crossed = ~np.isnan(times)
    wrong = crossed & ~((times > 0) & np.isfinite(times))
    if wrong.any():
        fail("times", "be positive and finite, or NaN where there was no crossing", times[wrong][0])
    check_level(level)
    check_positive("at", at)
    check_positive("end", end)
    _check_ends(times, np.broadcast_to(np.asarray(end, float), times.shape))
    if crossed.sum() < 3 or len(np.unique(at[crossed])) < 2:
        fail("times", "hold three crossings at two places at least", f"{crossed.sum()} crossings")
    logs, places = np.log(np.where(crossed, times, end)), np.log(at)
    middle, width = places[crossed].mean(), places[crossed].std()
    design = np.stack([(places - middle) / width, np.ones_like(places)], 1)
    line = np.linalg.lstsq(design[crossed], logs[crossed], rcond=None)[0]
    beyond = logs - design @ line
    # The likelihood of an exact line has no maximum.
    if np.abs(beyond[crossed]).max() <= _ON_THE_LINE and np.all(beyond[~crossed] <= _ON_THE_LINE):
        slope = line[0] / width
        return Slope(float(slope), float(line[1] - slope * middle), 0.0, np.nan, np.nan, np.nan)
    scaled, covariance = _tobit(design, logs, crossed)
    slope, height, spread = scaled[0] / scaled[2], scaled[1] / scaled[2], 1 / scaled[2]
    gradient = np.asarray([spread, 0.0, -slope * spread])
    slope, free = slope / width, crossed.sum() - 2
    # The maximum of the likelihood underestimates the variance by the factor free / (free + 2).
    error = np.sqrt(gradient @ covariance @ gradient * (free + 2) / free) / width
    half = stats.t.ppf(0.5 + 0.5 * level, free) * error
    found = slope, height - slope * middle, spread, error, slope - half, slope + half
    return Slope(*map(float, found))


def _tobit(
    design: np.ndarray, logs: np.ndarray, crossed: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the maximum of the likelihood in (slope, height, 1) / spread, and the inverse of minus its curvature."""
    # Residuals in units of the spread are linear in these parameters, in which the likelihood is
    # concave.
    rows = np.concatenate([-design, logs[:, None]], 1)

    def cost(scaled: np.ndarray) -> float:
        residual = rows @ scaled
        if scaled[2] <= 0:
            return np.inf
        chance = np.where(
            crossed, stats.norm.logpdf(residual) + np.log(scaled[2]), stats.norm.logsf(residual)
        )
        return -float(np.sum(chance))

    def slopes(scaled: np.ndarray) -> np.ndarray:
        residual = rows @ scaled
        return rows.T @ np.where(crossed, residual, hazard(residual)) - np.asarray(
            [0, 0, crossed.sum() / scaled[2]]
        )

    def curvature(scaled: np.ndarray) -> np.ndarray:
        residual = rows @ scaled
        weights = np.where(crossed, 1.0, hazard(residual) * (hazard(residual) - residual))
        return rows.T @ (weights[:, None] * rows) + np.diag([0, 0, crossed.sum() / scaled[2] ** 2])

    def hazard(residual: np.ndarray) -> np.ndarray:
        return np.exp(stats.norm.logpdf(residual) - stats.norm.logsf(residual))

    line = np.linalg.lstsq(design, logs, rcond=None)[0]
    start = np.append(line, 1.0) / max(np.std(logs - design @ line), 1e-3)
    solution = optimize.minimize(
        cost, start, jac=slopes, hess=curvature, method="trust-exact", options={"gtol": 1e-8}
    )
    return solution.x, np.linalg.inv(curvature(solution.x))
