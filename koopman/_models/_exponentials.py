"""Sums of exponentials of noisy trajectories at any times: optimised DMD with intervals."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import xarray

from dissociation._core.checks import check_count, check_finite, check_level, fail, fail_kind
from dissociation._core.columns import Reading
from koopman._models._exponential_fit import FASTEST, Samples, Solution
from koopman._models._exponential_start import KEPT_WEIGHT, reweighted, start_and_fit
from koopman._models._intervals import estimates_of, jackknife_error, student_quantile
from koopman._models._lifting import next_power, threshold_rank, working_dtype
from koopman._models._rates import rates_dataset, rates_summary
from koopman._models._trajectories import (
    Trajectories,
    as_dates,
    drop_missing,
    read_trajectories,
)

_NUM_BLOCKS = 20
_MIN_ROWS = 2 * _NUM_BLOCKS
"""Number of rows below which there are no intervals."""
_MIN_COLUMNS = 4
"""Number of columns below which singular values do not show the noise."""
_MAX_CELLS = 2**18
_NOISE_RATIO = 1.25
"""Largest variance of the residual, in variances of the noise, at which the rank is enough."""
_NOISE_PEAKS = 2.0
"""Energy of a mode, in powers of the largest peak of the residual, from which it is no noise."""
_CHANGED_SHARE = 0.05
"""Largest share of replicates in which a pair may turn into two real rates."""


class Exponentials(eqx.Module):
    """Sum of exponentials that was fitted to noisy runs at any times.

    Attributes:
        amplitudes: Complex amplitude of every mode in the middle of a run: [runs, modes, d].
        share: Share of every mode in the variance of the fit, [modes].
        rank: Number of exponentials, a conjugate pair as two.
        trajectories: Runs of the fit.
    """

    amplitudes: np.ndarray
    share: np.ndarray
    rank: int = eqx.field(static=True)
    trajectories: Trajectories
    _fits: "_Fits"
    _reasons: list[str]
    _residuals: np.ndarray

    @property
    def growth(self) -> np.ndarray:
        """Growth of every mode per unit of time, a conjugate pair once."""
        return np.real(self._fits.rates[0])

    @property
    def angular_frequency(self) -> np.ndarray:
        """Angular frequency of every mode, 0 or more."""
        return np.imag(self._fits.rates[0])

    def rates(self, level: float = 0.9) -> xarray.Dataset:
        """Return growth, frequency and time scale of every mode, with intervals.

        Intervals are Student's, from 20 fits with less weight on one block of times or runs.

        Args:
            level: Probability of the intervals.

        Returns:
            Variables over `mode`, by falling share of the variance: `growth`, `frequency` (cycles
            per unit of time) and `time_scale`, and `_low` and `_high` of them; `share`; `resolved`;
            `reason`.
        """
        check_level(level)
        rates = np.stack([np.real(self._fits.rates), np.imag(self._fits.rates)], -1)
        width = _half_width(rates, level)
        estimates = estimates_of(rates[0], width, self.share, self._reasons)
        return rates_dataset(estimates, self.trajectories.unit, level)

    def summary(self) -> str:
        """Return the table of rates as a string with units."""
        return rates_summary(self.rates())

    def predict(self, times: Any, level: float = 0.9) -> xarray.Dataset:
        """Return the states at any times, with intervals.

        Args:
            times: Times in the unit of the fit, [steps], or a list with one array per run.
            level: Probability of the intervals.

        Returns:
            `mean` with its interval, `mean_low` and `mean_high`, and the interval of new
            observations, `low` and `high`, [step, run, column], with the coordinate `time`.
            Intervals are NaN for too short data.
        """
        check_level(level)
        trajectories = self.trajectories
        tails = np.array([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        noise = np.quantile(self._residuals, tails, axis=0)
        datasets = []
        arrays = _times_of_runs(times, len(trajectories.runs), trajectories.has_dates)
        for run, numbers in enumerate(arrays):
            states = self._fits.waves(run, numbers).sum(2) @ self._fits.basis
            mean = states[0]
            half_width = _half_width(states, level)
            bands = {
                "mean": mean,
                "mean_low": mean - half_width,
                "mean_high": mean + half_width,
                "low": mean - np.hypot(half_width, noise[0]),
                "high": mean + np.hypot(half_width, noise[1]),
            }
            variables = {name: (("step", "column"), values) for name, values in bands.items()}
            time = ("step", as_dates(numbers, trajectories.has_dates))
            coords = {"step": np.arange(len(numbers)), "time": time}
            datasets.append(xarray.Dataset(variables, coords))
        dataset = xarray.concat(datasets, "run", join="outer")
        labels = {"run": list(trajectories.labels), "column": list(trajectories.columns)}
        dataset = dataset.drop_vars("step").assign_coords(labels)
        dataset.attrs["unit"] = trajectories.unit
        return dataset.transpose("step", "run", "column")

    def plot(self, steps: int = 50) -> Any:
        """Return a Matplotlib figure of rates, mode shapes, and the fit with a forecast.

        Args:
            steps: Number of median steps to forecast.
        """
        from koopman._models._drawing import draw_exponentials

        return draw_exponentials(self, check_count("steps", steps, minimum=1))


def fit_exponentials(
    trajectories: Any,
    times: Any = None,
    rank: int | None = None,
    *,
    time: Any = None,
    run: Any = None,
) -> Exponentials:
    """Fit a sum of exponentials to noisy runs at any times, which is optimised DMD.

    Minimises sum_runs |Y - Phi(rates) B|^2 over shared rates and amplitudes B of every run by
    variable projection. Unlike least squares on pairs of states, noise does not bias the rates. The
    start is a greedy search of a periodogram over growth and frequency, below pi over the median
    step.

    Args:
        trajectories: Trajectories in the forms of `lagged_pairs`. Rows with NaN are left out.
        times: Ascending times of arrays, [time], or a list with one array per run. By default rows
            count.
        rank: Number of exponentials, a conjugate pair as two. By default it is the number of
            singular values above the hard threshold of noise, or up to twice as many if these do
            not explain the states. There should be twice as many columns.
        time: Column or index level of times of a frame.
        run: Column or index level that labels runs of a frame.

    Returns:
        A fit with `rates`, `predict`, `summary` and `plot`.

    Raises:
        ValueError: If the fit does not converge, there are too few rows for the rank, or too few
            columns to choose a rank.

    References:
        Askham and Kutz (2018), Variable projection methods for an optimized dynamic mode
        decomposition. Sashidhar and Kutz (2022), Bagging, optimized dynamic mode decomposition.
        Gavish and Donoho (2014), The optimal hard threshold for singular values.

    >>> t = np.linspace(0.0, 10.0, 60)
    >>> wave = np.exp(-0.1 * t) * np.cos(2.0 * t)
    >>> fitted = fit_exponentials(wave[:, None], t, rank=2)
    >>> bool(np.allclose([fitted.growth, fitted.angular_frequency], [[-0.1], [2.0]], atol=1e-3))
    True
    """
    reading = Reading(time, run, None, takes_names=True)
    samples = drop_missing(_with_times(read_trajectories(trajectories, reading), times))
    shortest = min(map(len, samples.runs))
    if shortest < 2:
        fail("trajectories", "have two rows or more in every run", shortest)
    problem = _Problem(samples)
    if rank is None:
        rank, fit = problem.automatic()
    else:
        rank = check_count("rank", rank, minimum=1)
        fit = problem.fit(rank)
    if not bool(fit[0].has_converged):
        advice = "Choose another rank; noise alone has no rates to converge to"
        fail("rank", "be one for which the fit converges", rank, advice)
    return _exponentials(problem, *fit, rank)


def _times_of_runs(times: Any, num_runs: int, has_dates: bool) -> list[np.ndarray]:
    """Return the times of every run as numbers, dates in days."""
    is_listed = isinstance(times, list | tuple) and len(times) > 0 and np.ndim(times[0]) > 0
    listed = times if is_listed else [times] * num_runs
    if len(listed) != num_runs:
        fail("times", f"be one array, or a list of {num_runs}, one per run", len(listed))
    arrays = []
    for array in map(np.asarray, listed):
        if array.ndim != 1 or array.dtype.kind not in ("M" if has_dates else "iuf"):
            kind = "dates" if has_dates else "numbers"
            fail_kind("times", f"be {kind} [time]", f"{array.dtype} of shape {array.shape}")
        if has_dates:
            array = array.astype("datetime64[ns]").astype(np.int64) / 86400e9
        check_finite("times", array)
        arrays.append(array.astype(float))
    return arrays


def _with_times(trajectories: Trajectories, times: Any) -> Trajectories:
    """Return the runs with the times of an argument."""
    if times is None:
        return trajectories
    runs = trajectories.runs
    first = times[0] if isinstance(times, list | tuple) else times
    has_dates = np.asarray(first).dtype.kind == "M"
    arrays = _times_of_runs(times, len(runs), has_dates)
    for index, array in enumerate(arrays):
        if len(array) != len(runs[index]):
            fail("times", f"have the {len(runs[index])} times of run {index}", len(array))
        falls = np.flatnonzero(np.diff(array) <= 0)
        if len(falls):
            received = f"{array[falls[0]]:.6g} before {array[falls[0] + 1]:.6g}"
            advice = "Sort the rows, or pass runs as a list"
            fail("times", f"rise within run {index}", received, advice)
    step = float(np.median(np.concatenate(list(map(np.diff, arrays)))))
    unit = "day" if has_dates else "time"
    return trajectories._replace(times=arrays, time_step=step, unit=unit, has_dates=has_dates)


class _Problem:
    """Padded samples in principal components, on times from -1 to 1."""

    def __init__(self, trajectories: Trajectories):
        runs = trajectories.runs
        self.trajectories = trajectories
        self.lengths = np.array(list(map(len, runs)))
        left, sizes, self.basis = np.linalg.svd(np.concatenate(runs), full_matrices=False)
        ends = np.array([times[[0, -1]] for times in trajectories.times])
        self.middles = ends.mean(1)
        self.reach = ends[:, 1] - self.middles
        self.unit_time = self.reach.max()
        shape = (len(runs), next_power(int(self.lengths.max())))
        self.is_row = np.arange(shape[1]) < self.lengths[:, None]
        states = np.zeros((*shape, next_power(len(sizes))))
        states[self.is_row, : len(sizes)] = left * sizes
        times = np.zeros(shape)
        elapsed = np.concatenate(trajectories.times) - np.repeat(self.middles, self.lengths)
        times[self.is_row] = elapsed / self.unit_time
        step = trajectories.time_step / self.unit_time
        self.samples = Samples(states, times, 1.0 * self.is_row, np.asarray(step))
        self.num_cells = min(max(16 * shape[1], next_power(int(16 / step))), _MAX_CELLS)

    def num_free(self, rank: int) -> int:
        """Return how many numbers there are, apart from amplitudes and rates; raise below 1."""
        num_columns = self.basis.shape[1]
        num_free = int(np.maximum(self.lengths - rank, 0).sum()) * num_columns - rank
        if num_free < 1:
            fail("rank", f"be below the number of rows of a run ({self.lengths.max()})", rank)
        return num_free

    def fit(self, rank: int) -> tuple[Solution, Any]:
        """Return the fit of a rank, and the largest power in its residual."""
        self.num_free(rank)
        num_blocks = (rank + 1) // 2
        is_column = np.zeros((next_power(num_blocks), 2), bool)
        is_column[:num_blocks] = True
        # With an odd rank the first block is one exponential, such as a constant.
        is_column[0, 1] = rank % 2 == 0
        return start_and_fit(self.samples, is_column, self.num_cells)

    def automatic(self) -> tuple[int, tuple[Solution, Any]]:
        """Return the rank by the hard threshold, or the next one that explains the states."""
        longest = max(self.trajectories.runs, key=len)
        num_rows, num_columns = longest.shape
        if num_columns < _MIN_COLUMNS:
            advice = "Pass rank=2 for one damped oscillation, 4 for two"
            fail("rank", f"be an integer for fewer than {_MIN_COLUMNS} columns", None, advice)
        sizes = np.linalg.svd(longest, compute_uv=False)
        # The lower median: of eight values with four signals, the fifth.
        padded = np.append(sizes, np.zeros(1 - len(sizes) % 2))
        smallest = threshold_rank(padded, num_rows, num_columns)
        num_noise = (num_rows - smallest) * (num_columns - smallest)
        variance = _NOISE_RATIO * np.sum(sizes[smallest:] ** 2) / max(num_noise, 1)
        variance += float(np.finfo(working_dtype()).eps) ** 1.2 * np.sum(sizes**2)
        largest = max(smallest, min(2 * smallest, num_rows - 2))
        fits = []
        # Standing waves have one direction for two exponentials.
        for rank in range(smallest, largest + 1):
            fits.append(self.fit(rank))
            solution = fits[-1][0]
            is_explained = solution.projection.error <= variance * self.num_free(rank)
            if is_explained & solution.has_converged:
                return rank, fits[-1]
        return smallest, fits[0]


class _Fits(NamedTuple):
    """Complex modes of the fit, and of its replicates: modes are those of the fit.

    A run is the sum of Re(amplitude exp(rate (t - middle))), with amplitudes multiplied by the
    largest modulus of the exponential in the run.

    Attributes:
        rates: Rates per unit of time, [fits, modes].
        amplitudes: Amplitudes in principal components, [fits, runs, modes, k].
        basis: Principal components, [k, d].
        middles: Middle of the times of every run, [runs].
        reach: Half of the length of every run in time, [runs].
    """

    rates: np.ndarray
    amplitudes: np.ndarray
    basis: np.ndarray
    middles: np.ndarray
    reach: np.ndarray

    def waves(self, run: int, times: np.ndarray) -> np.ndarray:
        """Return what every mode contributes to the states of a run, [fits, time, modes, k]."""
        rates = self.rates[:, None]
        exponents = rates * (times - self.middles[run])[:, None]
        exponents = exponents - np.abs(np.real(rates)) * self.reach[run]
        with np.errstate(over="ignore", invalid="ignore"):
            return np.real(np.exp(exponents)[..., None] * self.amplitudes[:, run, None])


def _exponentials(problem: _Problem, solution: Solution, power: Any, rank: int) -> Exponentials:
    """Return the fit with its replicates."""
    trajectories = problem.trajectories
    lengths = problem.lengths
    stacked: Any = jax.tree.map(lambda leaf: np.asarray(leaf)[None], solution)
    if sum(lengths) >= _MIN_ROWS:
        # Blocks are runs, if there are enough, else times.
        position = np.arange(sum(lengths))
        if len(lengths) >= _NUM_BLOCKS:
            position = np.repeat(np.arange(len(lengths)), lengths)
        blocks = np.full(problem.is_row.shape, -1)
        blocks[problem.is_row] = position * _NUM_BLOCKS // (position[-1] + 1)
        fits = reweighted(problem.samples, solution.blocks, blocks, np.arange(_NUM_BLOCKS))
        stacked = jax.tree.map(lambda *leaves: np.concatenate(leaves), stacked, fits)
    fits = _complex_fits(stacked, problem)
    waves = [fits.waves(run, times)[0] for run, times in enumerate(trajectories.times)]
    waves = np.concatenate(waves)
    residuals = np.concatenate(trajectories.runs) - waves.sum(1) @ problem.basis
    centred = waves - waves.mean(0)
    power_of_mode = np.einsum("nmk,nk->m", centred, centred.sum(1))
    ratio = residuals.size / problem.num_free(rank)
    is_noise = np.sum(waves**2, (0, 2)) < _NOISE_PEAKS * float(power)
    scale = np.exp(-np.abs(np.real(fits.rates[0])) * problem.reach[:, None])
    return Exponentials(
        amplitudes=(fits.amplitudes[0] * scale[..., None]) @ problem.basis,
        share=power_of_mode / max(power_of_mode.sum(), np.finfo(float).tiny),
        rank=rank,
        trajectories=trajectories,
        _fits=fits,
        _reasons=_reasons(fits.rates * trajectories.time_step, stacked, is_noise),
        _residuals=residuals * np.sqrt(ratio),
    )


def _complex_fits(stacked: Any, problem: _Problem) -> _Fits:
    """Return the complex modes of stacked fits."""
    growth, curvature = np.moveaxis(stacked.blocks.parameters, 2, 0)
    root = np.sqrt((-curvature).astype(complex))
    rates = np.stack([growth + root, growth - root], -1)
    amplitudes = stacked.projection.amplitudes[..., : len(problem.basis)].astype(complex)
    amplitudes = amplitudes.reshape(*amplitudes.shape[:2], *rates.shape[1:], -1)
    # The second column of a conjugate pair is a sine.
    sine = amplitudes[..., 1, :] * (curvature > 0)[:, None, :, None]
    amplitudes[..., 0, :] -= 1j * sine
    amplitudes[..., 1, :] -= sine
    is_mode = np.array(stacked.blocks.is_column[0])
    is_mode[:, 1] &= curvature[0] <= 0
    return _Fits(
        rates[:, is_mode] / problem.unit_time,
        amplitudes[:, :, is_mode],
        problem.basis,
        problem.middles,
        problem.reach,
    )


def _half_width(values: np.ndarray, level: float) -> np.ndarray:
    """Return half of the interval of the first row by the replicates in the other rows."""
    replicates = values[1:]
    if not len(replicates):
        return np.full(values.shape[1:], np.nan)
    error = jackknife_error(replicates) / (1 - KEPT_WEIGHT)
    return student_quantile(replicates, level) * error


def _reasons(rates_per_step: np.ndarray, stacked: Any, is_noise: np.ndarray) -> list[str]:
    """Return why modes are not resolved, "" for those that are."""
    num_replicates = len(rates_per_step) - 1
    if not num_replicates:
        return [f"fewer than {_MIN_ROWS} rows"] * len(is_noise)
    rates = rates_per_step[0]
    is_wave = np.imag(rates_per_step) > 0
    changed = np.sum(is_wave != is_wave[:1], 0) / num_replicates
    has_failed = np.mean(~stacked.has_converged) > _CHANGED_SHARE
    is_failed_of_reason = {
        "fits with less weight on a block do not converge; take a smaller rank": has_failed,
        "growth or decay within one step": np.abs(np.real(rates)) > 0.99 * FASTEST,
        "at or beyond Nyquist; shorten the step": np.imag(rates) > 0.99 * np.pi,
        "as weak as peaks of the noise; take a smaller rank": is_noise,
        "a pair and two real rates fit alike; change the rank": changed > _CHANGED_SHARE,
    }
    conditions = [np.broadcast_to(mask, rates.shape) for mask in is_failed_of_reason.values()]
    return np.select(conditions, list(is_failed_of_reason), "").tolist()
