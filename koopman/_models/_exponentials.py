"""Sums of exponentials of noisy trajectories at any times: optimised DMD with intervals."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import xarray
from jaxtyping import Bool, Complex, Float, Int

from dissociation._core.checks import check_count, check_finite, check_level, fail, fail_kind
from dissociation._core.columns import Reading
from koopman._models._exponential_fit import Blocks, Limits, Samples, Solution
from koopman._models._exponential_start import KEPT_WEIGHT, Grid, reweighted, start_and_fit
from koopman._models._intervals import jackknife_error, student_quantile
from koopman._models._lifting import threshold_rank, working_dtype
from koopman._models._rates import RateEstimates, rates_dataset, rates_summary
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
_FASTEST = 3.0
"""Largest growth or decay per median step."""
_NOISE_RATIO = 1.25
"""Largest variance of the residual, in variances of the noise, at which the rank is enough."""
_NOISE_PEAKS = 2.0
"""Energy of a mode, in powers of the largest peak of the residual, from which it is no noise."""
_CHANGED_SHARE = 0.05
"""Largest share of replicates in which a pair may turn into two real rates."""


class _Problem(NamedTuple):
    """Padded samples with what the fit needs.

    Attributes:
        samples: States in their principal components on scaled times.
        basis: Principal components, [k, d].
        limits: Limits of rates.
        grid: Grid of the periodogram.
        middles: Middle of the times of every run, [runs].
        reach: Largest modulus of the scaled times of a run, [runs].
        unit_time: Length of time that is scaled to 1.
    """

    samples: Samples
    basis: Float[np.ndarray, "k d"]
    limits: Limits
    grid: Grid
    middles: Float[np.ndarray, " runs"]
    reach: Float[np.ndarray, " runs"]
    unit_time: float


class _Modes(NamedTuple):
    """Complex rates and amplitudes: a run is the sum of Re(amplitude exp(rate (t - middle))).

    Amplitudes are multiplied by the largest modulus of the exponential in the run.

    Attributes:
        rates: Rates per scaled time, [..., modes].
        amplitudes: Amplitudes in principal components, [..., runs, modes, k].
    """

    rates: Complex[np.ndarray, "*replicates modes"]
    amplitudes: Complex[np.ndarray, "*replicates runs modes k"]


class Exponentials(eqx.Module):
    """Sum of exponentials that was fitted to noisy runs at any times.

    Attributes:
        growth: Growth of every mode per unit of time, a conjugate pair once: [modes].
        angular_frequency: Angular frequency of every mode, 0 or more: [modes].
        amplitudes: Complex amplitude of every mode in the middle of a run: [runs, modes, d].
        share: Share of every mode in the variance of the fit, [modes].
        rank: Number of exponentials, a conjugate pair as two.
        trajectories: Runs of the fit.
    """

    growth: Float[np.ndarray, " modes"]
    angular_frequency: Float[np.ndarray, " modes"]
    amplitudes: Complex[np.ndarray, "runs modes d"]
    share: Float[np.ndarray, " modes"]
    rank: int = eqx.field(static=True)
    trajectories: Trajectories
    _problem: _Problem
    _modes: _Modes
    _reasons: list[str]
    _residuals: Float[np.ndarray, "rows d"]

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
        rates = self._modes.rates / self._problem.unit_time
        growth = _interval(np.real(rates), level)
        frequency = _interval(np.imag(rates) / (2 * np.pi), level)
        frequency[1] = np.maximum(frequency[1], 0.0)
        estimates = RateEstimates(
            growth[0],
            growth[1],
            growth[2],
            frequency[0],
            frequency[1],
            frequency[2],
            self.share,
            self._reasons,
        )
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
        problem = self._problem
        trajectories = self.trajectories
        arrays = _times_of_runs(times, len(trajectories.runs), trajectories.has_dates)
        run_times = np.full((len(arrays), max(map(len, arrays))), np.nan)
        for row, array in zip(run_times, arrays, strict=True):
            row[: len(array)] = array
        scaled = (run_times - problem.middles[:, None]) / problem.unit_time
        states = _contributions(self._modes, scaled, problem.reach).sum(3)
        mean = states[0] @ problem.basis
        half_width = _half_width(states, level, problem.basis)
        tails = np.array([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        noise = np.quantile(self._residuals, tails, axis=0)
        bands = {
            "mean": mean,
            "mean_low": mean - half_width,
            "mean_high": mean + half_width,
            "low": mean - np.hypot(half_width, noise[0]),
            "high": mean + np.hypot(half_width, noise[1]),
        }
        dims = ("run", "step", "column")
        coords = {
            "run": list(trajectories.labels),
            "column": list(trajectories.columns),
            "time": (("run", "step"), as_dates(run_times, trajectories.has_dates)),
        }
        variables = {name: (dims, values) for name, values in bands.items()}
        dataset = xarray.Dataset(variables, coords, {"unit": trajectories.unit})
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
    _check_rising(samples)
    problem = _problem(samples)
    if rank is None:
        rank, fitted = _automatic(problem, samples)
    else:
        rank = check_count("rank", rank, minimum=1)
        _num_free(samples, rank)
        fitted = _fitted(problem, rank)
    if not bool(fitted[0].has_converged):
        advice = "Choose another rank; noise alone has no rates to converge to"
        fail("rank", "be one for which the fit converges", rank, advice)
    return _exponentials(samples, problem, *fitted, rank)


def _next_power(count: int) -> int:
    """Return the smallest power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _times_of_runs(times: Any, num_runs: int, has_dates: bool) -> list[Float[np.ndarray, " _"]]:
    """Return the times of every run as numbers, dates in days."""
    is_listed = isinstance(times, list | tuple) and len(times) > 0 and np.ndim(times[0]) > 0
    listed = list(times) if is_listed else [times] * num_runs
    if len(listed) != num_runs:
        fail("times", f"be one array, or a list of {num_runs}, one per run", len(listed))
    arrays = []
    for run_times in listed:
        array = np.asarray(run_times)
        if array.dtype.kind == "M":
            array = array.astype("datetime64[ns]").astype(np.int64) / 86400e9
        elif has_dates:
            fail_kind("times", "be dates, as those of the fit", array.dtype)
        if array.dtype.kind not in "iuf" or array.ndim != 1:
            fail_kind("times", "be numbers [time]", f"{array.dtype} of shape {array.shape}")
        check_finite("times", array)
        arrays.append(array.astype(float))
    return arrays


def _with_times(trajectories: Trajectories, times: Any) -> Trajectories:
    """Return the runs with the times of an argument."""
    if times is None:
        return trajectories
    arrays = _times_of_runs(times, len(trajectories.runs), False)
    for index, states in enumerate(trajectories.runs):
        if len(arrays[index]) != len(states):
            fail("times", f"have the {len(states)} times of run {index}", len(arrays[index]))
    step = float(np.median(np.concatenate([np.diff(array) for array in arrays])))
    first = times[0] if isinstance(times, list | tuple) else times
    has_dates = np.asarray(first).dtype.kind == "M"
    unit = "day" if has_dates else "time"
    return trajectories._replace(times=arrays, time_step=step, unit=unit, has_dates=has_dates)


def _check_rising(trajectories: Trajectories) -> None:
    """Raise unless the times of every run rise."""
    for index, times in enumerate(trajectories.times):
        steps = np.diff(times)
        if not len(steps) or not (steps > 0).all():
            received = f"{len(times)} times"
            if len(steps):
                position = int(np.argmin(steps))
                received = f"{times[position]:.6g} before {times[position + 1]:.6g}"
            advice = "Sort the rows, and name runs by `run` or pass a list"
            fail("times", f"rise within run {index} of two rows or more", received, advice)


def _num_free(trajectories: Trajectories, rank: int) -> int:
    """Return how many numbers there are, apart from amplitudes and rates; raise below 1."""
    num_columns = trajectories.runs[0].shape[1]
    lengths = np.array(list(map(len, trajectories.runs)))
    num_free = int(np.maximum(lengths - rank, 0).sum()) * num_columns - rank
    if num_free < 1:
        fail("rank", f"be below the number of rows of a run ({lengths.max()})", rank)
    return num_free


def _problem(trajectories: Trajectories) -> _Problem:
    """Return padded samples in principal components, on times from -1 to 1."""
    runs = trajectories.runs
    left, sizes, basis = np.linalg.svd(np.concatenate(runs), full_matrices=False)
    ends = np.cumsum(list(map(len, runs)))
    components = np.split(left * sizes, ends[:-1])
    first = np.array([times[0] for times in trajectories.times])
    last = np.array([times[-1] for times in trajectories.times])
    middles = 0.5 * (first + last)
    unit_time = 0.5 * float((last - first).max())
    step = trajectories.time_step / unit_time

    dtype = working_dtype()
    shape = (_next_power(len(runs)), _next_power(max(map(len, runs))))
    states = np.zeros((*shape, _next_power(len(sizes))), dtype)
    scaled_times = np.zeros(shape, dtype)
    weights = np.zeros(shape, dtype)
    for index, array in enumerate(components):
        length = len(array)
        states[index, :length, : len(sizes)] = array
        scaled_times[index, :length] = (trajectories.times[index] - middles[index]) / unit_time
        weights[index, :length] = 1.0
    reach = np.abs(scaled_times).max(1)

    # A cell is half of a step, and the grid is four times as long as the longest run.
    num_cells = max(16 * shape[1], _next_power(int(16 / step)))
    num_cells = min(num_cells, _MAX_CELLS)
    spacing = max(0.5 * step, 8 / num_cells)
    cells = np.round((scaled_times + 1) / spacing).astype(np.int32)
    return _Problem(
        samples=Samples(states, scaled_times, weights, reach),
        basis=basis,
        limits=Limits(np.asarray(_FASTEST / step, dtype), np.asarray(np.pi / step, dtype)),
        grid=Grid(cells, np.asarray(spacing, dtype), num_cells, num_cells // 4),
        middles=middles,
        reach=reach[: len(runs)],
        unit_time=unit_time,
    )


def _fitted(problem: _Problem, rank: int) -> tuple[Solution, Any]:
    """Return the fit of a rank, and the largest power in its residual."""
    num_blocks = (rank + 1) // 2
    slots = np.arange(_next_power(num_blocks))
    parameters = np.zeros((2, len(slots)), working_dtype())
    # With an odd rank the first block is one exponential, such as a constant.
    is_pair = (slots > 0) | (rank % 2 == 0)
    empty = Blocks(parameters, slots < num_blocks, is_pair)
    return start_and_fit(problem.samples, empty, problem.limits, problem.grid)


def _automatic(problem: _Problem, trajectories: Trajectories) -> tuple[int, tuple[Solution, Any]]:
    """Return the rank by the hard threshold, or the next one that explains the states."""
    num_columns = trajectories.runs[0].shape[1]
    if num_columns < _MIN_COLUMNS:
        advice = "Pass rank=2 for one damped oscillation, 4 for two"
        fail("rank", f"be an integer for fewer than {_MIN_COLUMNS} columns", None, advice)
    smallest = 1
    noise = 0.0
    num_noise = 0
    energy = 0.0
    for states in trajectories.runs:
        sizes = np.linalg.svd(states, compute_uv=False)
        # The lower median: of eight values with four signals, the fifth.
        padded = np.append(sizes, np.zeros(1 - len(sizes) % 2))
        rank = threshold_rank(padded, len(states), num_columns)
        smallest = max(smallest, rank)
        energy += np.sum(sizes**2)
        noise += np.sum(sizes[rank:] ** 2)
        num_noise += (len(states) - rank) * (num_columns - rank)
    variance = _NOISE_RATIO * noise / max(num_noise, 1)
    variance += float(np.finfo(working_dtype()).eps) ** 1.2 * energy

    first = None
    longest = max(map(len, trajectories.runs))
    for rank in range(smallest, min(2 * smallest, longest - 2) + 1):
        num_free = _num_free(trajectories, rank)
        fitted = _fitted(problem, rank)
        first = first or fitted
        # Standing waves have one direction for two exponentials.
        is_explained = float(fitted[0].projection.error) <= variance * num_free
        if is_explained and bool(fitted[0].has_converged):
            return rank, fitted
    if first is None:
        fail("trajectories", f"have more than {smallest + 1} rows", longest)
    return smallest, first


def _block_of_row(lengths: Sequence[int], shape: tuple[int, ...]) -> Int[np.ndarray, "runs time"]:
    """Return the number of the block of every row: runs, if there are enough, else times."""
    blocks = np.full(shape, -1, np.int32)
    num_rows = sum(lengths)
    start = 0
    for index, length in enumerate(lengths):
        if len(lengths) >= _NUM_BLOCKS:
            blocks[index, :length] = index * _NUM_BLOCKS // len(lengths)
        else:
            rows = np.arange(start, start + length)
            blocks[index, :length] = rows * _NUM_BLOCKS // num_rows
        start += length
    return blocks


def _exponentials(
    trajectories: Trajectories, problem: _Problem, solution: Solution, power: Any, rank: int
) -> Exponentials:
    """Return the fit with its replicates."""
    lengths = [len(states) for states in trajectories.runs]
    samples: Any = problem.samples
    stacked: Any = jax.tree.map(lambda leaf: np.asarray(leaf)[None], solution)
    if sum(lengths) >= _MIN_ROWS:
        blocks = _block_of_row(lengths, samples.times.shape)
        numbers = np.arange(_NUM_BLOCKS, dtype=np.int32)
        replicates = reweighted(samples, solution.blocks, problem.limits, blocks, numbers)
        stacked = jax.tree.map(
            lambda first, leaf: np.concatenate([first, np.asarray(leaf)]), stacked, replicates
        )
    modes = _complex_modes(stacked, len(lengths), len(problem.basis))
    fitted = _Modes(modes.rates[:1], modes.amplitudes[:1])
    contributions = _contributions(fitted, samples.times[: len(lengths)], problem.reach)[0]
    contributions = contributions[samples.weights[: len(lengths)] > 0]
    residuals = np.concatenate(trajectories.runs) - contributions.sum(1) @ problem.basis
    ratio = residuals.size / _num_free(trajectories, rank)
    energy = np.sum(contributions**2, (0, 2))
    scale = np.exp(-np.abs(np.real(modes.rates[0]))[None] * problem.reach[:, None])
    amplitudes = modes.amplitudes[0] * scale[..., None]
    rates = modes.rates[0] / problem.unit_time
    return Exponentials(
        growth=rates.real,
        angular_frequency=rates.imag,
        amplitudes=amplitudes @ problem.basis,
        share=_shares(contributions),
        rank=rank,
        trajectories=trajectories,
        _problem=problem,
        _modes=modes,
        _reasons=_reasons(modes, problem.limits, stacked, energy < _NOISE_PEAKS * float(power)),
        _residuals=residuals * np.sqrt(ratio),
    )


def _complex_modes(stacked: Any, num_runs: int, num_components: int) -> _Modes:
    """Return complex rates and amplitudes of stacked fits, for the modes of the first."""
    blocks = stacked.blocks
    growth, curvature = np.moveaxis(blocks.parameters, 1, 0)
    root = np.sqrt((-curvature).astype(complex))
    rates = np.stack([growth + root, growth - root], -1)
    amplitudes = stacked.projection.amplitudes[:, :num_runs, :, :num_components]
    shape = (*amplitudes.shape[:2], growth.shape[1], 2, num_components)
    first, second = np.moveaxis(amplitudes.reshape(shape), 3, 0)
    # The second column of a conjugate pair is a sine.
    is_wave = (curvature > 0)[:, None, :, None]
    paired = np.stack([np.where(is_wave, first - 1j * second, first), second * ~is_wave], 3)

    is_second = blocks.is_active[0] & blocks.is_pair[0] & (curvature[0] <= 0)
    is_mode = np.stack([blocks.is_active[0], is_second], -1)
    return _Modes(rates[:, is_mode], paired[:, :, is_mode])


def _contributions(
    modes: _Modes, times: Float[np.ndarray, "runs time"], reach: Float[np.ndarray, " runs"]
) -> Float[np.ndarray, "fits runs time modes k"]:
    """Return what every entry contributes to the states."""
    rates = modes.rates[:, None, None, :]
    exponents = rates * times[None, :, :, None]
    largest = np.abs(np.real(modes.rates))[:, None, None] * reach[None, :, None, None]
    with np.errstate(over="ignore", invalid="ignore"):
        waves = np.exp(exponents - largest)[..., None]
        return np.real(waves * modes.amplitudes[:, :, None])


def _interval(values: Float[np.ndarray, "fits modes"], level: float) -> np.ndarray:
    """Return the first row with both ends of its interval, [3, modes]."""
    half_width = _half_width(values, level)
    return np.stack([values[0], values[0] - half_width, values[0] + half_width])


def _half_width(
    values: Float[np.ndarray, "fits *shape"], level: float, basis: Any = None
) -> Float[np.ndarray, "*shape"]:
    """Return half of the interval of the first row by the replicates in the other rows."""
    replicates = values[1:]
    if basis is not None:
        replicates = replicates @ basis
    if not len(replicates):
        return np.full(replicates.shape[1:], np.nan)
    error = jackknife_error(replicates) / (1 - KEPT_WEIGHT)
    return student_quantile(replicates, level) * error


def _shares(contributions: Float[np.ndarray, "rows modes k"]) -> Float[np.ndarray, " modes"]:
    """Return the share of every mode in the variance of the fit."""
    centred = contributions - contributions.mean(0)
    total = centred.sum(1)
    energy = np.sum(total**2)
    products = np.einsum("nmk,nk->m", centred, total)
    return products / max(energy, np.finfo(float).tiny)


def _reasons(
    modes: _Modes, limits: Limits, stacked: Any, is_noise: Bool[np.ndarray, " modes"]
) -> list[str]:
    """Return why modes are not resolved, "" for those that are."""
    num_replicates = len(modes.rates) - 1
    if not num_replicates:
        return [f"fewer than {_MIN_ROWS} rows"] * len(is_noise)
    rates = modes.rates[0]
    is_wave = np.imag(modes.rates) > 0
    changed = np.sum(is_wave != is_wave[:1], 0) / num_replicates
    has_failed = np.mean(~stacked.has_converged) > _CHANGED_SHARE
    is_failed_of_reason = {
        "fits with less weight on a block do not converge; take a smaller rank": has_failed,
        "growth or decay within one step": np.abs(rates.real) > 0.99 * limits.growth,
        "at or beyond Nyquist; shorten the step": rates.imag > 0.99 * limits.frequency,
        "as weak as peaks of the noise; take a smaller rank": is_noise,
        "a pair and two real rates fit alike; change the rank": changed > _CHANGED_SHARE,
    }
    conditions = [np.broadcast_to(mask, rates.shape) for mask in is_failed_of_reason.values()]
    return np.select(conditions, list(is_failed_of_reason), "").tolist()
