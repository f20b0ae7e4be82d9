"""When curves cross a threshold, as survival times: those that never do within a run are not left out."""

import warnings
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import optimize, stats

from dissociation.checks import check_choice, check_same_length, fail

DIRECTIONS = ("above", "below")


class Median(NamedTuple):
    """A median time of events that not all samples have had.

    Attributes:
        value: Infinite if fewer than half of the samples had the event.
        low: Lower end of the interval.
        high: Upper end; infinite if the data do not bound it.
    """

    value: float
    low: float
    high: float


class Slope(NamedTuple):
    """Log time against the logarithm of another quantity.

    Attributes:
        slope: Of the line.
        intercept: At log 1.
        spread: Standard deviation of log times about the line.
        error: Standard error of the slope, from the curvature of the likelihood.
    """

    slope: float
    intercept: float
    spread: float
    error: float


def first_cross(
    x: Float[Array | np.ndarray, " times"],
    y: Float[Array | np.ndarray, "*b steps"],
    threshold: float | Float[Array, ""],
    direction: str = "above",
) -> Float[Array, "*b"]:
    """The first x at which y is beyond the threshold; NaN if it never is.

    Args:
        x: Rising, [times].
        y: Curves, [..., times]; NaN is not beyond anything.
        threshold: In the units of y; reaching it is not enough.
        direction: "above" or "below".

    Returns:
        One x per curve.

    Raises:
        ValueError: If lengths differ or the direction is unknown.

    Example:
        >>> first_cross(jnp.array([0.0, 1.0, 2.0]), jnp.array([[0.1, 0.6, 0.9], [0.1, 0.2, 0.3]]), 0.5)
        Array([ 1., nan], dtype=float32)
    """
    check_choice("direction", direction, DIRECTIONS)
    check_same_length("x", x.shape[0], "y", y.shape[-1], "times")
    x, y = jnp.asarray(x), jnp.asarray(y)
    beyond = y > threshold if direction == "above" else y < threshold
    return jnp.where(jnp.any(beyond, -1), x[jnp.argmax(beyond, -1)], jnp.nan)


def median_crossing(
    times: Float[np.ndarray, " n"], end: float | int | Float[np.ndarray, " n"], *, level: float = 0.9
) -> Median:
    """Kaplan and Meier's median of crossing times, on the host.

    Args:
        times: NaN for samples that had not crossed when their run ended.
        end: When runs ended, all of them or each.
        level: Of the interval (Brookmeyer and Crowley's, from log-log limits of the survival function).

    Returns:
        Median and interval.

    Raises:
        ValueError: If there are no times.

    References:
        Kaplan and Meier (1958). Brookmeyer and Crowley (1982), A confidence interval for the median survival time.
    """
    times = np.asarray(times, float)
    if times.size == 0:
        fail("times", "hold at least one time", "none")
    crossed = ~np.isnan(times)
    ends = np.broadcast_to(np.asarray(end, float), times.shape)
    if not crossed.any():
        return Median(np.inf, float(ends.min()), np.inf)
    data = stats.CensoredData(uncensored=times[crossed], right=ends[~crossed])
    survival = stats.ecdf(data).sf
    with np.errstate(divide="ignore", invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # where all or none have crossed there are no limits
        limits = survival.confidence_interval(level, method="log-log")

    def half(curve: Any) -> float:
        chance = np.where(np.isnan(curve.probabilities), survival.probabilities, curve.probabilities)
        below = np.flatnonzero(chance <= 0.5)
        return float(survival.quantiles[below[0]]) if len(below) else np.inf

    return Median(half(survival), half(limits.low), half(limits.high))


def log_slope(times: Float[np.ndarray, " n"], at: Float[np.ndarray, " n"], end: float | int) -> Slope:
    """A line through log time against log `at`, by maximum likelihood with a normal spread, on the host.

    Samples that never crossed count as "later than `end`" (Tobin's model of censored data): leaving them out would
    flatten the line.

    Args:
        times: Positive; NaN for samples that had not crossed.
        at: What the times depend on, positive.
        end: When runs ended.

    Returns:
        The line.

    Raises:
        ValueError: If lengths differ, or fewer than three times at two different places were crossed.

    References:
        Tobin (1958), Estimation of relationships for limited dependent variables.
    """
    times, at = np.asarray(times, float), np.asarray(at, float)
    check_same_length("times", len(times), "at", len(at))
    crossed = ~np.isnan(times)
    if crossed.sum() < 3 or len(np.unique(at[crossed])) < 2:
        fail("times", "hold three crossings at two places at least", f"{crossed.sum()} crossings")
    logs, places = np.log(np.where(crossed, times, end)), np.log(at)
    start = np.polyfit(places[crossed], logs[crossed], 1)
    spread = max(np.std(logs[crossed] - np.polyval(start, places[crossed])), 1e-3)

    def cost(parameters: np.ndarray) -> float:
        slope, intercept, log_spread = parameters
        residual = (logs - intercept - slope * places) / np.exp(log_spread)
        return -float(np.sum(np.where(crossed, stats.norm.logpdf(residual) - log_spread, stats.norm.logsf(residual))))

    found = optimize.minimize(cost, [*start, np.log(spread)], method="Nelder-Mead",
                              options={"maxiter": 5000, "xatol": 1e-8, "fatol": 1e-10})  # fmt: skip
    slope, intercept, log_spread = found.x
    step = 1e-3
    around = [[cost(found.x + step * (np.eye(3)[i] * a + np.eye(3)[j] * b)) for a in (1, -1) for b in (1, -1)]
              for i in range(3) for j in range(3)]  # fmt: skip
    curvature = np.asarray([(pp - pm - mp + mm) / (4 * step**2) for pp, pm, mp, mm in around]).reshape(3, 3)
    return Slope(
        float(slope), float(intercept), float(np.exp(log_spread)), float(np.linalg.inv(curvature)[0, 0] ** 0.5)
    )
