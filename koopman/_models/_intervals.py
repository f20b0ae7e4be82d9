"""Intervals of rates from deleted blocks, and gates that withhold those that cannot be right."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Complex, Float, Int
from scipy.optimize import linear_sum_assignment
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
_FAR = 1e100


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
        return RateEstimates(*self.growth, *self.frequency, total, self.reason)


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
    reference = eigenvalues[index]
    reason = few_pairs(num_pairs, num_latent, residual)
    if not reason and replicates is None:
        reason = f"fewer than {MIN_BLOCKS} blocks: record longer, or more runs"
    elif not reason and richer is None:
        reason = "runs too short for a check with twice the delays"
    if reason or replicates is None or richer is None:
        undefined = np.full(len(index), np.nan)
        centre = _rates(reference, time)
        ends = [np.stack([values, undefined, undefined]) for values in centre]
        return Intervals(index, ends[0], ends[1], [reason] * len(index), undefined)

    deleted = matched(eigenvalues, replicates.eigenvalues[1 : 1 + replicates.num_blocks])
    tenths = matched(eigenvalues, replicates.eigenvalues[-TENTHS:])[:, index]
    deleted = deleted[:, index]
    error = jackknife_error(deleted)
    rounding = np.finfo(eigenvalues.dtype).eps ** 0.5 / time

    ends = []
    is_biased = np.zeros(len(index), bool)
    for centre, values, tenth_values in zip(
        _rates(reference, time), _rates(deleted, time), _rates(tenths, time), strict=True
    ):
        deviation = jackknife_error(values)
        shift = np.mean(tenth_values, 0) - centre
        spread = np.std(tenth_values, 0, ddof=1) / TENTHS**0.5
        width = student_quantile(values, level) * deviation + BIAS_SHARE * np.abs(shift)
        ends.append(np.stack([centre, centre - width, centre + width]))
        noise = np.maximum(np.maximum(deviation, spread), rounding)
        # A comparison with NaN is False.
        is_biased |= ~(np.abs(shift) <= LENGTH_LIMIT * noise)
    growth, frequency = ends
    frequency = frequency / (2 * np.pi)
    frequency[1] = np.maximum(frequency[1], 0.0)

    gates = {
        BELOW_NOISE: np.abs(reference) < ZERO_LIMIT * error,
        "at or beyond Nyquist: shorten the lag": _is_negative(reference),
        "two real rates or one frequency, by chance: record longer": _is_clustered(
            reference, deleted
        ),
        "it decays within the delays: take fewer, or a lower rank": (
            (memory > 1)
            & (residual > EXACT)
            & (np.abs(reference) ** memory * num_pairs**0.5 < FADED_LIMIT)
        ),
        "it drifts with the length of the data: record longer": is_biased,
        "twice the lag disagrees (noise, or features are missing): take more delays": (
            _lag_excess(eigenvalues, replicates, deleted, index, rounding * time) > LAG_LIMIT
        ),
        "twice the delays disagree: take more delays": _delays_excess(
            richer, eigenvalues, deleted, index, time, rounding
        )
        > DELAYS_LIMIT,
    }
    reasons = []
    for mode in range(len(index)):
        failures = [name for name, fails in gates.items() if fails[mode]]
        reasons.append(failures[0] if failures else "")
    return Intervals(index, growth, frequency, reasons, error)


def _rates(
    values: Complex[np.ndarray, "..."], time: float
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """Return growth and angular frequency."""
    with np.errstate(divide="ignore"):
        growth = np.log(np.abs(values)) / time
    return growth, np.abs(np.angle(values)) / time


def matched(
    reference: Complex[np.ndarray, " r"], values: Complex[np.ndarray, "M k"]
) -> Complex[np.ndarray, "M r"]:
    """Return the values that a linear assignment on |lambda - lambda*| gives to the references.

    Values that are not finite come last, and NaN stands for missing ones.
    """
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
    values: Float[np.ndarray, "N *modes"], level: float
) -> Float[np.ndarray, "*modes"]:
    """Return Student's quantile, with degrees of freedom by the kurtosis of the replicates."""
    num_blocks = len(values)
    squares = (values - np.mean(values, 0)) ** 2
    variance = np.mean(squares, 0)
    kurtosis = np.mean(squares**2, 0) / np.where(variance > 0, variance, 1.0) ** 2
    excess = np.maximum(kurtosis - 1, 1e-6)
    degrees = np.clip(2 * num_blocks / excess, 1.5, num_blocks - 1)
    return stdtrit(degrees, 0.5 + 0.5 * level)


def _is_negative(reference: Complex[np.ndarray, " modes"]) -> Bool[np.ndarray, " modes"]:
    """Return True for real negative eigenvalues."""
    return (reference.imag == 0) & (reference.real < 0)


def _is_clustered(
    reference: Complex[np.ndarray, " modes"], deleted: Complex[np.ndarray, "N modes"]
) -> Bool[np.ndarray, " modes"]:
    """Return True for pairs that are often real, and for real eigenvalues that are often pairs."""
    is_real = deleted.imag == 0
    is_changed = is_real != (reference.imag == 0)
    return np.mean(is_changed, 0) > CLUSTER_LIMIT


def _lag_excess(
    eigenvalues: Complex[np.ndarray, " r"],
    replicates: Replicates,
    deleted: Complex[np.ndarray, "N modes"],
    index: Int[np.ndarray, " modes"],
    rounding: float,
) -> Float[np.ndarray, " modes"]:
    """Return log(lambda(2 lag) / lambda(lag)^2) / 2 over its error, the larger component."""
    later = replicates.eigenvalues_later[: 1 + replicates.num_blocks]
    later = matched(eigenvalues**2, later)[:, index]
    with np.errstate(divide="ignore", invalid="ignore"):
        differences = np.log(later[1:] / deleted**2) / 2
        difference = np.log(later[0] / eigenvalues[index] ** 2) / 2
    ratios = []
    for component in (np.real, np.imag):
        error = np.maximum(jackknife_error(component(differences)), rounding)
        ratios.append(np.abs(component(difference)) / error)
    return np.max(ratios, 0)


def _delays_excess(
    richer: Replicates,
    eigenvalues: Complex[np.ndarray, " r"],
    deleted: Complex[np.ndarray, "N modes"],
    index: Int[np.ndarray, " modes"],
    time: float,
    rounding: float,
) -> Float[np.ndarray, " modes"]:
    """Return differences of rates with richer features over their errors, the larger of two."""
    values = matched(eigenvalues, richer.eigenvalues[: 1 + richer.num_blocks])[:, index]
    reference = eigenvalues[index]
    ratios = []
    for richer_rates, centre, rates in zip(
        _rates(values, time), _rates(reference, time), _rates(deleted, time), strict=True
    ):
        error = np.maximum(jackknife_error(richer_rates[1:] - rates), rounding)
        ratios.append(np.abs(richer_rates[0] - centre) / error)
    return np.max(ratios, 0)
