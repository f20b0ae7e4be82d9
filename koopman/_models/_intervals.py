"""Intervals of rates from deleted blocks, and gates that withhold those that cannot be right."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Complex, Float, Int
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
BELOW_NOISE = "below the noise floor"
_FAR = 1e30  # in float32 too


class Intervals(NamedTuple):
    """Rates of modes with their intervals, a conjugate pair once.

    Attributes:
        index: Index of the eigenvalue with imaginary part 0 or more, [modes].
        growth: log |lambda| / time, with ends: [3, modes].
        frequency: Cycles per unit of time, with ends: [3, modes].
        reason: Reason of every mode that is not resolved, or "".
        standard_error: Jackknife error of lambda, [modes].
    """

    index: Int[np.ndarray, " modes"]
    growth: Float[np.ndarray, "3 modes"]
    frequency: Float[np.ndarray, "3 modes"]
    reason: list[str]
    standard_error: Float[np.ndarray, " modes"]

    def with_share(
        self, share: Float[np.ndarray, " r"], eigenvalues: Complex[np.ndarray, " r"]
    ) -> RateEstimates:
        """Return the estimates with shares, which are added up for conjugate pairs."""
        is_pair = np.imag(eigenvalues[self.index]) > 0
        total = np.where(is_pair, 2.0, 1.0) * share[self.index]
        return RateEstimates._make([*self.growth, *self.frequency, total, self.reason])


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
    eigenvalues: Complex[np.ndarray, " r"],
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
    centre = _rates(eigenvalues[index], time)
    undefined = np.full_like(centre, np.nan)
    reason = few_pairs(num_pairs, num_latent, residual)
    if not reason and replicates is None:
        reason = f"fewer than {MIN_BLOCKS} blocks: record longer, or more runs"
    elif not reason and richer is None:
        reason = "runs too short for a check with twice the delays"
    if reason or replicates is None or richer is None:
        reasons = [reason] * len(index)
        return _intervals(index, centre, undefined, reasons, undefined[:, 0])

    num_blocks = replicates.num_blocks
    reference = eigenvalues[index]
    deleted = matched(eigenvalues, replicates.eigenvalues[1 : 1 + num_blocks])[:, index]
    tenths = matched(eigenvalues, replicates.eigenvalues[-TENTHS:])[:, index]
    later = matched(eigenvalues**2, replicates.eigenvalues_later[: 1 + num_blocks])[:, index]
    richer_values = matched(eigenvalues, richer.eigenvalues[: 1 + num_blocks])[:, index]
    error = jackknife_error(deleted)
    rounding = np.finfo(replicates.eigenvalues.dtype).eps ** 0.5 / time

    rates = _rates(deleted, time)
    deviation = jackknife_error(rates)
    tenth_rates = _rates(tenths, time)
    shift = np.abs(np.mean(tenth_rates, 0) - centre)
    spread = np.std(tenth_rates, 0, ddof=1) / TENTHS**0.5
    width = student_quantile(rates, level) * deviation + BIAS_SHARE * shift
    with np.errstate(divide="ignore", invalid="ignore"):
        mismatch = np.log(later[0] / reference**2) / 2
        mismatches = np.log(later[1:] / deleted**2) / 2
    richer_rates = _rates(richer_values, time)

    is_negative = (np.imag(reference) == 0) & (np.real(reference) < 0)
    is_changed = (np.imag(deleted) == 0) != (np.imag(reference) == 0)
    is_faded = np.abs(reference) ** memory * num_pairs**0.5 < FADED_LIMIT
    # A comparison with NaN is False, so that undefined replicates fail.
    passes = {
        BELOW_NOISE: np.abs(reference) >= ZERO_LIMIT * error,
        "at or beyond Nyquist: shorten the lag": ~is_negative,
        "two real rates or one frequency, by chance: record longer": (
            np.mean(is_changed, 0) <= CLUSTER_LIMIT
        ),
        "it decays within the delays: take fewer, or a lower rank": (
            ~is_faded | (memory <= 1) | (residual < EXACT)
        ),
        "it drifts with the length of the data: record longer": _is_below(
            shift, np.maximum(deviation, spread), LENGTH_LIMIT, rounding
        ),
        "twice the lag disagrees (noise, or features are missing): take more delays": _is_below(
            _components(mismatch),
            jackknife_error(_components(mismatches)),
            LAG_LIMIT,
            rounding * time,
        ),
        "twice the delays disagree: take more delays": _is_below(
            richer_rates[0] - centre,
            jackknife_error(richer_rates[1:] - rates),
            DELAYS_LIMIT,
            rounding,
        ),
    }
    reasons = []
    for mode in range(len(index)):
        failures = [name for name, is_passed in passes.items() if not is_passed[mode]]
        reasons.append(failures[0] if failures else "")
    return _intervals(index, centre, width, reasons, error)


def _intervals(
    index: np.ndarray, centre: np.ndarray, width: np.ndarray, reasons: list[str], error: np.ndarray
) -> Intervals:
    """Return intervals of growth and angular frequency [modes, 2], the latter in cycles."""
    ends = np.stack([centre, centre - width, centre + width])
    growth = ends[..., 0]
    frequency = ends[..., 1] / (2 * np.pi)
    frequency[1] = np.maximum(frequency[1], 0.0)
    return Intervals(index, growth, frequency, reasons, error)


def _is_below(
    difference: np.ndarray, error: np.ndarray, limit: float, rounding: float
) -> Bool[np.ndarray, " modes"]:
    """Return True where differences [modes, 2] are below a multiple of their errors."""
    return np.all(np.abs(difference) <= limit * np.maximum(error, rounding), -1)


def _components(values: np.ndarray) -> Float[np.ndarray, "*k 2"]:
    return np.stack([np.real(values), np.imag(values)], -1)


def _rates(values: np.ndarray, time: float) -> Float[np.ndarray, "*k 2"]:
    """Return growth and angular frequency of eigenvalues."""
    with np.errstate(divide="ignore"):
        growth = np.log(np.abs(values))
    return np.stack([growth, np.abs(np.angle(values))], -1) / time


def matched(
    reference: Complex[np.ndarray, " r"], values: Complex[np.ndarray, "M k"]
) -> Complex[np.ndarray, "M r"]:
    """Return the values that a linear assignment on |lambda - lambda*| gives to the references.

    Values that are not finite come last, and NaN stands for missing ones.
    """
    # Here, because it takes a fifth of a second.
    from scipy.optimize import linear_sum_assignment

    num_missing = max(len(reference) - values.shape[1], 0)
    values = np.pad(values, ((0, 0), (0, num_missing)), constant_values=np.nan)
    distances = np.abs(values[:, None] - reference[None, :, None])
    distances = np.nan_to_num(distances, nan=_FAR, posinf=_FAR)
    nearest = np.argmin(distances, 2)
    # Nearest values that differ are the best assignment.
    is_repeated = np.any(np.diff(np.sort(nearest, 1), axis=1) == 0, 1)
    for replicate in np.flatnonzero(is_repeated):
        nearest[replicate] = linear_sum_assignment(distances[replicate])[1]
    return np.take_along_axis(values, nearest, 1)


def jackknife_error(values: np.ndarray) -> Float[np.ndarray, "*modes"]:
    """Return sqrt((N - 1) / N sum |g_j - mean|^2) over replicates, [N, modes]."""
    deviations = np.abs(values - np.mean(values, 0))
    return np.sqrt((len(values) - 1) * np.mean(deviations**2, 0))


def student_quantile(
    values: Float[np.ndarray, "N *modes"], level: float | np.ndarray
) -> Float[np.ndarray, "*modes"]:
    """Return Student's quantile, with degrees of freedom by the kurtosis of the replicates."""
    num_blocks = len(values)
    squares = (values - np.mean(values, 0)) ** 2
    variance = np.mean(squares, 0)
    kurtosis = np.mean(squares**2, 0) / np.where(variance > 0, variance, 1.0) ** 2
    excess = np.maximum(kurtosis - 1, 1e-6)
    degrees = np.clip(2 * num_blocks / excess, 1.5, num_blocks - 1)
    return stdtrit(degrees, 0.5 + 0.5 * level)
