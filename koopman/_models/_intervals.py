"""Intervals of rates from deleted blocks, and gates that withhold those that cannot be right."""

from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from koopman._models._block_sums import MIN_BLOCKS, TENTHS, Replicates
from koopman._models._rates import RateEstimates

MIN_PAIRS = 40
"""Number of pairs per latent function below which intervals are too short."""
EXACT = 1e-6
"""Relative residual below which few pairs are enough."""
LENGTH_LIMIT = 3.0
LAG_LIMIT = 2.5
ZERO_LIMIT = 5.0
FADED_LIMIT = 10.0
"""|lambda|^memory sqrt(pairs) below which noise alone has eigenvalues as large as a mode's."""
DELAYS_LIMIT = 2.5
CLUSTER_LIMIT = 0.05
BIAS_SHARE = 0.2
"""Share of the difference between tenths and all data that is added to an interval."""
_FAR = 1e30  # in float32 too


class Intervals(NamedTuple):
    """Rates of modes with their intervals, a conjugate pair once.

    Attributes:
        index: Index of the eigenvalue with imaginary part 0 or more, [modes].
        centre: Growth and angular frequency, [modes, 2].
        width: Half of the lengths of their intervals, [modes, 2].
        reason: Reason of every mode that is not resolved, or "".
    """

    index: Any
    centre: np.ndarray
    width: np.ndarray
    reason: list[str]

    def with_share(self, share: np.ndarray, eigenvalues: np.ndarray) -> RateEstimates:
        """Return the estimates with shares, which are added up for conjugate pairs."""
        is_pair = np.imag(eigenvalues[self.index]) > 0
        total = np.where(is_pair, 2.0, 1.0) * share[self.index]
        return estimates_of(self.centre, self.width, total, self.reason)


def estimates_of(
    centre: np.ndarray, width: np.ndarray, share: np.ndarray, reasons: list[str]
) -> RateEstimates:
    """Return estimates of growth and angular frequency [modes, 2], the latter in cycles."""
    ends = np.stack([centre, centre - width, centre + width], 1) / np.array([[[1, 2 * np.pi]]])
    ends[:, 1, 1] = np.maximum(ends[:, 1, 1], 0.0)
    return RateEstimates._make([*ends[..., 0].T, *ends[..., 1].T, share, reasons])


def few_pairs(num_pairs: int, num_latent: int, residual: float) -> str:
    """Return the reason if there are too few pairs per latent function, else "".

    Args:
        num_pairs: Number of pairs.
        num_latent: Number of latent functions.
        residual: Root mean square of the one-step error over the spread of the states.
    """
    ratio = num_pairs / max(num_latent, 1)
    if ratio >= MIN_PAIRS or residual < EXACT:
        return ""
    return (
        f"{ratio:.0f} pairs per latent function, fewer than {MIN_PAIRS}: "
        'pass PrincipalComponents("auto"), or use fit_exponentials'
    )


def rate_intervals(
    eigenvalues: np.ndarray,
    replicates: Replicates | None,
    richer: Replicates | None,
    *,
    time: float,
    level: float,
    num_pairs: int,
    num_latent: int,
    residual: float,
    memory: float = 0.0,
) -> Intervals:
    """Return growth and frequency of every mode, with intervals where all gates are passed.

    The interval of g is g +- (t_nu s + |t| / 5): s the jackknife error over N deleted blocks, nu =
    2 N / (kappa - 1) with kappa the kurtosis of the replicates, t the mean difference of g between
    tenths of the data and all data.

    Args:
        eigenvalues: Eigenvalues of the estimate.
        replicates: Replicates of the estimate, or None if there are too few blocks.
        richer: Replicates with twice the delays, or None if runs are too short.
        time: Lag in units of time.
        level: Probability of the intervals.
        num_pairs: Number of pairs of the estimate.
        num_latent: Number of latent functions of the estimate.
        residual: Root mean square of the one-step error over the spread of the states.
        memory: Lags that the delays span, if all latent functions are used; else 0.
    """
    index = np.flatnonzero(np.imag(eigenvalues) >= 0)
    reference = eigenvalues[index]
    centre = _rates(reference, time)
    reason = few_pairs(num_pairs, num_latent, residual)
    if not reason and replicates is None:
        reason = f"fewer than {MIN_BLOCKS} blocks: record longer, or more runs"
    if not reason and richer is None:
        reason = "runs too short for a check with twice the delays"
    if reason or replicates is None or richer is None:
        return Intervals(index, centre, np.full_like(centre, np.nan), [reason] * len(index))

    num_blocks = replicates.num_blocks
    deleted = matched(eigenvalues, replicates.eigenvalues[1 : 1 + num_blocks])[:, index]
    tenths = matched(eigenvalues, replicates.eigenvalues[-TENTHS:])[:, index]
    later = matched(eigenvalues**2, replicates.eigenvalues_later[: 1 + num_blocks])[:, index]
    richer_values = matched(eigenvalues, richer.eigenvalues[: 1 + num_blocks])[:, index]
    error = jackknife_error(deleted)
    rounding = np.finfo(replicates.eigenvalues.dtype).eps ** 0.5 / time

    estimates = np.concatenate([reference[None], deleted])
    rates = _rates(estimates, time)
    deviation = jackknife_error(rates[1:])
    tenth_rates = _rates(tenths, time)
    shift = np.abs(np.mean(tenth_rates, 0) - centre)
    spread = np.std(tenth_rates, 0, ddof=1) / TENTHS**0.5
    width = student_quantile(rates[1:], level) * deviation + BIAS_SHARE * shift
    with np.errstate(divide="ignore", invalid="ignore"):
        mismatch = np.log(later / estimates**2) / (2 * time)
    mismatch = np.stack([np.real(mismatch), np.imag(mismatch)], -1)
    richer_rates = _rates(richer_values, time)
    difference = richer_rates - rates
    # Estimates far from right have large errors, which hide the difference.
    richer_error = 2 * jackknife_error(richer_rates[1:])
    difference_error = np.minimum(jackknife_error(difference[1:]), richer_error)

    is_changed = (np.imag(deleted) == 0) != (np.imag(reference) == 0)
    is_faded = np.abs(reference) ** memory * num_pairs**0.5 < FADED_LIMIT

    def is_below(difference: np.ndarray, error: np.ndarray, limit: float) -> np.ndarray:
        """Return True where differences [modes, 2] are below a multiple of their errors."""
        return np.all(np.abs(difference) <= limit * np.maximum(error, rounding), -1)

    # A comparison with NaN is False, so that undefined replicates fail.
    passes = {
        "below the noise floor": np.abs(reference) >= ZERO_LIMIT * error,
        "at or beyond Nyquist: shorten the lag": np.abs(np.angle(reference)) < np.pi,
        "two real rates or one frequency, by chance: record longer": (
            np.mean(is_changed, 0) <= CLUSTER_LIMIT
        ),
        "it decays within the delays: take fewer, or a lower rank": (
            ~is_faded | (memory <= 1) | (residual < EXACT)
        ),
        "it drifts with the length of the data: record longer": is_below(
            shift, np.maximum(deviation, spread), LENGTH_LIMIT
        ),
        "twice the lag disagrees (noise, or features are missing): take more delays": is_below(
            mismatch[0], jackknife_error(mismatch[1:]), LAG_LIMIT
        ),
        "twice the delays disagree: take more delays": is_below(
            difference[0], difference_error, DELAYS_LIMIT
        ),
    }
    is_failed = ~np.stack(list(passes.values()))
    reasons = np.select(list(is_failed), list(passes), "").tolist()
    return Intervals(index, centre, width, reasons)


def _rates(values: np.ndarray, time: float) -> np.ndarray:
    """Return growth and angular frequency of eigenvalues, [..., 2]."""
    with np.errstate(divide="ignore"):
        growth = np.log(np.abs(values))
    return np.stack([growth, np.abs(np.angle(values))], -1) / time


def matched(reference: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the values [M, r] that a linear assignment on |lambda - lambda*| gives to references.

    Values [M, k] that are not finite come last, and NaN stands for missing ones.
    """
    # Here, because it takes a fifth of a second.
    from scipy.optimize import linear_sum_assignment

    num_missing = max(len(reference) - values.shape[1], 0)
    values = np.pad(values, ((0, 0), (0, num_missing)), constant_values=np.nan)
    distances = np.abs(values[:, None] - reference[None, :, None])
    distances = np.nan_to_num(distances, nan=_FAR, posinf=_FAR)
    nearest = np.stack([linear_sum_assignment(matrix)[1] for matrix in distances])
    return np.take_along_axis(values, nearest, 1)


def jackknife_error(values: np.ndarray) -> np.ndarray:
    """Return sqrt((N - 1) / N sum |g_j - mean|^2) over replicates, [N, modes]."""
    deviations = np.abs(values - np.mean(values, 0))
    return np.sqrt((len(values) - 1) * np.mean(deviations**2, 0))


def student_quantile(values: np.ndarray, level: float | np.ndarray) -> np.ndarray:
    """Return Student's quantile, with degrees of freedom by the kurtosis of the replicates."""
    num_blocks = len(values)
    squares = (values - np.mean(values, 0)) ** 2
    variance = np.mean(squares, 0)
    kurtosis = np.mean(squares**2, 0) / np.where(variance > 0, variance, 1.0) ** 2
    excess = np.maximum(kurtosis - 1, 1e-6)
    degrees = np.clip(2 * num_blocks / excess, 1.5, num_blocks - 1)
    return stdtrit(degrees, 0.5 + 0.5 * level)
