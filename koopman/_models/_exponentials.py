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
from koopman._models._intervals import student_quantile
from koopman._models._lifting import threshold_rank, working_dtype
from koopman._models._rates import RateEstimates, rates_dataset, rates_summary
from koopman._models._trajectories import (
    Trajectories,
    as_coordinates,
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
        unit_time: Length of time that is scaled to 1.
        num_leading: Number of components in the periodogram.
    """

    samples: Samples
    basis: Float[np.ndarray, "k d"]
    limits: Limits
    grid: Grid
    middles: Float[np.ndarray, " runs"]
    unit_time: float
    num_leading: int


class _Modes(NamedTuple):
    """Complex rates and amplitudes: a run is the sum of Re(amplitude exp(rate (t - middle))).

    Amplitudes are divided by the largest modulus of the exponential. Every block has two entries;
    the second of a conjugate pair is empty.

    Attributes:
        rates: Rates per scaled time, [..., entries].
        amplitudes: Amplitudes in principal components, [..., runs, entries, k].
    """

    rates: Complex[np.ndarray, "*replicates entries"]
    amplitudes: Complex[np.ndarray, "*replicates runs entries k"]


class Exponentials(eqx.Module):
    """Sum of exponentials that was fitted to noisy runs at any times.

    Attributes:
        growth: Growth of every mode per unit of time, a conjugate pair once: [modes].
        angular_frequency: Angular frequency of every mode, 0 or more: [modes].
        amplitudes: Complex amplitude of every mode in the middle of a run: [runs, modes, d].
        columns: Labels of the states.
        unit: Unit of time.
        rank: Number of exponentials, a conjugate pair as two.
    """

    growth: Float[np.ndarray, " modes"]
    angular_frequency: Float[np.ndarray, " modes"]
    amplitudes: Complex[np.ndarray, "runs modes d"]
    columns: tuple[Any, ...] = eqx.field(static=True)
    unit: str = eqx.field(static=True)
    rank: int = eqx.field(static=True)
    trajectories: Trajectories
    _problem: _Problem
    _modes: _Modes
    _entries: Int[np.ndarray, " modes"]
    _reasons: list[str]
    share: Float[np.ndarray, " modes"]
    _residuals: Float[np.ndarray, "rows d"]
    _has_intervals: bool

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
        rates = self._modes.rates[:, self._entries] / self._problem.unit_time
        growth = _interval(rates.real, level)
        frequency = _interval(np.abs(rates.imag) / (2 * np.pi), level)
        frequency[1] = np.maximum(frequency[1], 0.0)
        estimates = RateEstimates(*growth, *frequency, self.share, self._reasons)
        return rates_dataset(estimates, self.unit, level)

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
        run_times = self._times_of_runs(times)
        problem = self._problem
        scaled = (run_times - problem.middles[:, None]) / problem.unit_time
        reach = np.asarray(problem.samples.reach)[: len(scaled)]
        states = _contributions(self._modes, scaled, reach).sum(3)
        mean = np.moveaxis(states[0] @ problem.basis, 0, 1)
        half_width = np.full_like(mean, np.nan)
        if self._has_intervals:
            # Far ahead a replicate may be infinite, and so is the interval.
            half_width = np.moveaxis(_half_width(states, level, problem.basis), 0, 1)
        tails = np.array([0.5 - 0.5 * level, 0.5 + 0.5 * level])
        noise = np.quantile(self._residuals, tails, axis=0)
        low = mean - np.hypot(half_width, noise[0])
        high = mean + np.hypot(half_width, noise[1])
        arrays = {
            "mean": mean,
            "mean_low": mean - half_width,
            "mean_high": mean + half_width,
            "low": low,
            "high": high,
        }
        return self._dataset(arrays, run_times)

    def plot(self, steps: int = 50) -> Any:
        """Return a Matplotlib figure of rates, mode shapes, and the fit with a forecast.

        Args:
            steps: Number of median steps to forecast.
        """
        from koopman._models._drawing import draw_exponentials

        return draw_exponentials(self, check_count("steps", steps, minimum=1))

    def _times_of_runs(self, times: Any) -> Float[np.ndarray, "runs steps"]:
        """Return checked times for every run, NaN where a run has fewer."""
        trajectories = self.trajectories
        num_runs = len(trajectories.runs)
        listed = list(times) if _is_per_run(times) else [times] * num_runs
        if len(listed) != num_runs:
            fail("times", f"be one array, or a list of {num_runs}, one per run", len(listed))
        arrays = []
        for array in listed:
            arrays.append(_as_times("times", array, trajectories.has_dates))
        padded = np.full((num_runs, max(map(len, arrays))), np.nan)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return padded

    def _dataset(
        self, arrays: dict[str, np.ndarray], run_times: Float[np.ndarray, "runs steps"]
    ) -> xarray.Dataset:
        """Return arrays [step, run, column] with their coordinates."""
        trajectories = self.trajectories
        dims = ("step", "run", "column")
        variables = {name: (dims, values) for name, values in arrays.items()}
        times = as_coordinates(trajectories, run_times.T)
        coords = {
            "run": list(trajectories.labels),
            "column": list(trajectories.columns),
            "time": (("step", "run"), times),
        }
        return xarray.Dataset(variables, coords, {"unit": self.unit})


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
        _check_rows(samples, rank)
        fitted = _fitted(problem, rank)
    if not bool(fitted[0].has_converged):
        advice = "Choose another rank; noise alone has no rates to converge to"
        fail("rank", "be one for which the fit converges", rank, advice)
    return _exponentials(samples, problem, *fitted, rank)


def _next_power(count: int) -> int:
    """Return the smallest power of two from `count` on."""
    return 1 << (count - 1).bit_length()


def _is_per_run(times: Any) -> bool:
    return isinstance(times, list | tuple) and len(times) > 0 and np.ndim(times[0]) > 0


def _as_times(name: str, times: Any, has_dates: bool) -> Float[np.ndarray, " time"]:
    """Return times as numbers, dates in days."""
    array = np.atleast_1d(np.asarray(times))
    if array.dtype.kind == "M":
        array = array.astype("datetime64[ns]").astype(np.int64) / 86400e9
    elif has_dates:
        fail_kind(name, "be dates, as those of the fit", array.dtype)
    if array.dtype.kind not in "iuf" or array.ndim != 1:
        fail_kind(name, "be numbers [time]", f"{array.dtype} of shape {array.shape}")
    check_finite(name, array)
    return array.astype(float)


def _with_times(trajectories: Trajectories, times: Any) -> Trajectories:
    """Return the runs with the times of an argument."""
    if times is None:
        return trajectories
    num_runs = len(trajectories.runs)
    listed = list(times) if _is_per_run(times) else [times] * num_runs
    if len(listed) != num_runs:
        fail("times", f"be one array, or a list of {num_runs}, one per run", len(listed))
    has_dates = np.asarray(listed[0]).dtype.kind == "M"
    arrays = []
    for index, array in enumerate(listed):
        name = f"times[{index}]" if _is_per_run(times) else "times"
        array = _as_times(name, array, has_dates)
        length = len(trajectories.runs[index])
        if len(array) != length:
            fail(name, f"have the {length} times of run {index}", len(array))
        arrays.append(array)
    step = float(np.median(np.concatenate([np.diff(array) for array in arrays])))
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


def _check_rows(trajectories: Trajectories, rank: int) -> None:
    """Raise unless there are more numbers than rates and amplitudes."""
    num_columns = trajectories.runs[0].shape[1]
    num_free = 0
    for states in trajectories.runs:
        num_free += max(len(states) - rank, 0) * num_columns
    if num_free <= rank:
        longest = max(map(len, trajectories.runs))
        fail("rank", f"be below the number of rows of a run ({longest})", rank)


def _problem(trajectories: Trajectories) -> _Problem:
    """Return padded samples in principal components, on times from -1 to 1."""
    runs = trajectories.runs
    lengths = [len(states) for states in runs]
    left, sizes, basis = np.linalg.svd(np.concatenate(runs), full_matrices=False)
    components = np.split(left * sizes, np.cumsum(lengths)[:-1])
    num_runs = _next_power(len(runs))
    num_times = _next_power(max(lengths))
    num_components = _next_power(len(sizes))
    middles = np.array([0.5 * (times[0] + times[-1]) for times in trajectories.times])
    spans = np.array([times[-1] - times[0] for times in trajectories.times])
    unit_time = 0.5 * spans.max()
    step = trajectories.time_step / unit_time

    states = np.zeros((num_runs, num_times, num_components))
    scaled_times = np.zeros((num_runs, num_times))
    weights = np.zeros((num_runs, num_times))
    reach = np.zeros(num_runs)
    reach[: len(runs)] = 0.5 * spans / unit_time
    for index, length in enumerate(lengths):
        states[index, :length, : len(sizes)] = components[index]
        scaled_times[index, :length] = (trajectories.times[index] - middles[index]) / unit_time
        weights[index, :length] = 1.0

    # A cell is half of a step, and the grid is four times as long as the longest run.
    num_cells = max(16 * num_times, _next_power(int(16 / step)))
    num_cells = min(num_cells, _MAX_CELLS)
    spacing = max(0.5 * step, 8 / num_cells)
    cells = np.where(weights > 0, np.round((scaled_times + 1) / spacing), 0)
    dtype = working_dtype()
    samples = Samples(
        states.astype(dtype), scaled_times.astype(dtype), weights.astype(dtype), reach.astype(dtype)
    )
    grid = Grid(cells.astype(np.int32), np.asarray(spacing, dtype), num_cells, num_cells // 4)
    limits = Limits(np.asarray(_FASTEST / step, dtype), np.asarray(np.pi / step, dtype))
    num_leading = min(num_components, 16)
    return _Problem(samples, basis, limits, grid, middles, float(unit_time), num_leading)


def _fitted(problem: _Problem, rank: int) -> tuple[Solution, Any]:
    """Return the fit of a rank, and the largest power in its residual."""
    num_blocks = (rank + 1) // 2
    slots = np.arange(_next_power(num_blocks))
    zeros = np.zeros(len(slots), working_dtype())
    # With an odd rank the first block is one exponential, such as a constant.
    is_pair = (slots > 0) | (rank % 2 == 0)
    empty = Blocks(zeros, zeros, slots < num_blocks, is_pair)
    return start_and_fit(problem.samples, empty, problem.limits, problem.grid, problem.num_leading)


def _automatic(problem: _Problem, trajectories: Trajectories) -> tuple[int, tuple[Solution, Any]]:
    """Return the rank by the hard threshold, or the next one that explains the states."""
    num_columns = trajectories.runs[0].shape[1]
    if num_columns < _MIN_COLUMNS:
        advice = "Pass rank=2 for one damped oscillation, 4 for two"
        fail("rank", f"be an integer for fewer than {_MIN_COLUMNS} columns", None, advice)
    ranks = []
    noise = 0.0
    num_free = 0
    for states in trajectories.runs:
        sizes = np.linalg.svd(states, compute_uv=False)
        # The lower median: of eight values with four signals, the fifth.
        padded = np.append(sizes, np.zeros(1 - len(sizes) % 2))
        rank_of_run = threshold_rank(padded, len(states), num_columns)
        ranks.append(rank_of_run)
        noise += np.sum(sizes[rank_of_run:] ** 2)
        num_free += (len(states) - rank_of_run) * (num_columns - rank_of_run)
    smallest = max(ranks)
    energy = sum(np.sum(states**2) for states in trajectories.runs)
    floor = float(np.finfo(working_dtype()).eps) ** 1.2 * energy

    _check_rows(trajectories, smallest)
    first = _fitted(problem, smallest)
    for rank in range(smallest, 2 * smallest + 1):
        num_numbers = sum(max(len(states) - rank, 0) for states in trajectories.runs) * num_columns
        if num_numbers <= rank:
            break
        fitted = first if rank == smallest else _fitted(problem, rank)
        allowed = _NOISE_RATIO * noise / max(num_free, 1) * num_numbers + floor
        # Standing waves have one direction for two exponentials.
        if float(fitted[0].projection.error) <= allowed:
            return rank, fitted
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
    has_intervals = sum(lengths) >= _MIN_ROWS
    stacked = jax.tree.map(lambda leaf: np.asarray(leaf)[None], solution)
    has_converged = np.ones(0, bool)
    if has_intervals:
        replicates = reweighted(
            problem.samples,
            solution.blocks,
            problem.limits,
            _block_of_row(lengths, problem.samples.times.shape),
            np.arange(_NUM_BLOCKS, dtype=np.int32),
        )
        stacked = jax.tree.map(
            lambda first, leaf: np.concatenate([first, np.asarray(leaf)]), stacked, replicates
        )
        has_converged = stacked.has_converged[1:]
    reach = np.asarray(problem.samples.reach)[: len(lengths)]
    modes = _complex_modes(stacked, reach, len(problem.basis))
    blocks = solution.blocks
    is_active = np.asarray(blocks.is_active)
    is_split = np.asarray(blocks.curvature) <= 0
    is_entry = np.stack([is_active, is_active & np.asarray(blocks.is_pair) & is_split], 1)
    entries = np.flatnonzero(is_entry)
    rates = modes.rates[0, entries] / problem.unit_time
    scale = np.exp(-np.abs(modes.rates[0, entries].real)[None] * reach[:, None])
    amplitudes = modes.amplitudes[0][:, entries] * scale[..., None]

    contributions = []
    fitted = []
    for index, length in enumerate(lengths):
        scaled = np.asarray(problem.samples.times)[index : index + 1, :length]
        run = _Modes(modes.rates[:1], modes.amplitudes[:1, index : index + 1])
        pieces = _contributions(run, scaled, reach[index : index + 1])[0, 0][:, entries]
        contributions.append(pieces)
        fitted.append(pieces.sum(1) @ problem.basis)
    pieces = np.concatenate(contributions)
    is_noise = np.sum(pieces**2, (0, 2)) < _NOISE_PEAKS * float(power)
    residuals = np.concatenate(trajectories.runs) - np.concatenate(fitted)
    num_numbers = residuals.size
    num_free = max(num_numbers - rank * (1 + len(lengths) * residuals.shape[1]), 1)
    return Exponentials(
        growth=rates.real,
        angular_frequency=np.abs(rates.imag),
        amplitudes=amplitudes @ problem.basis,
        columns=trajectories.columns,
        unit=trajectories.unit,
        rank=rank,
        trajectories=trajectories,
        _problem=problem,
        _modes=modes,
        _entries=entries,
        _reasons=_reasons(modes, entries, problem.limits, has_converged, is_noise),
        share=_shares(pieces),
        _residuals=residuals * np.sqrt(num_numbers / num_free),
        _has_intervals=has_intervals,
    )


def _complex_modes(
    stacked: Solution, reach: Float[np.ndarray, " runs"], num_components: int
) -> _Modes:
    """Return complex rates and amplitudes of stacked fits.

    Columns are e^{at} cos(bt) and e^{at} sin(bt), or sin(bt) / b at small b, or exponentials.
    """
    num_runs = len(reach)
    growth = stacked.blocks.growth
    curvature = stacked.blocks.curvature
    root = np.sqrt(np.abs(curvature))
    is_oscillating = curvature > 0
    spread = np.where(is_oscillating, 1j * root, root)
    rates = np.stack([growth + spread, growth - spread], -1)

    amplitudes = stacked.projection.amplitudes[:, :num_runs, :, :num_components]
    shape = (*amplitudes.shape[:2], growth.shape[1], 2, num_components)
    first, second = np.moveaxis(amplitudes.reshape(shape), 3, 0)
    tiny = np.finfo(float).eps
    # Real rates from -1 to 1 share the columns cosh(kt) and sinh(kt) / k.
    is_series = np.abs(curvature) <= 1
    slope = np.where(is_series, 1 / np.maximum(root, tiny), 1.0)[:, None, :, None]
    is_pair = stacked.blocks.is_pair[:, None, :, None]
    is_wave = is_oscillating[:, None, :, None]
    is_hyperbolic = (is_series & ~is_oscillating)[:, None, :, None] & is_pair
    second = second * slope
    upper = np.where(is_wave, first - 1j * second, first)
    upper = np.where(is_hyperbolic, 0.5 * (first + second), upper)
    lower = np.where(is_wave, 0.0, second)
    lower = np.where(is_hyperbolic, 0.5 * (first - second), lower)
    paired = np.stack([upper, lower], 3)
    # Columns of a block at small curvature were divided by the largest value of e^{at} alone.
    excess = np.where(is_series[..., None], np.abs(rates.real) - np.abs(growth)[..., None], 0.0)
    paired = paired * np.exp(excess[:, None] * reach[None, :, None, None])[..., None]
    num_fits = len(growth)
    return _Modes(
        rates.reshape(num_fits, -1), paired.reshape(num_fits, num_runs, -1, num_components)
    )


def _contributions(
    modes: _Modes, times: Float[np.ndarray, "runs time"], reach: Float[np.ndarray, " runs"]
) -> Float[np.ndarray, "fits runs time entries k"]:
    """Return what every entry contributes to the states."""
    rates = modes.rates[:, None, None, :]
    exponents = rates * times[None, :, :, None]
    largest = np.abs(modes.rates.real)[:, None, None] * reach[None, :, None, None]
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
    if not len(replicates):
        return np.full(values.shape[1:], np.nan)
    deviations = replicates - replicates.mean(0)
    if basis is not None:
        deviations = deviations @ basis
    num_blocks = len(replicates)
    square = (num_blocks - 1) / num_blocks * np.sum(deviations**2, 0)
    quantile = student_quantile(deviations.reshape(num_blocks, -1), level).reshape(square.shape)
    return quantile * np.sqrt(square) / (1 - KEPT_WEIGHT)


def _shares(contributions: Float[np.ndarray, "rows modes k"]) -> Float[np.ndarray, " modes"]:
    """Return the share of every mode in the variance of the fit."""
    centred = contributions - contributions.mean(0)
    total = centred.sum(1)
    energy = np.sum(total**2)
    products = np.einsum("nmk,nk->m", centred, total)
    return products / max(energy, np.finfo(float).tiny)


def _reasons(
    modes: _Modes,
    entries: Int[np.ndarray, " modes"],
    limits: Limits,
    has_converged: Bool[np.ndarray, " replicates"],
    is_noise: Bool[np.ndarray, " modes"],
) -> list[str]:
    """Return why modes are not resolved, "" for those that are."""
    rates = modes.rates[0, entries]
    is_wave = modes.rates[:, entries].imag != 0
    changed = np.mean(is_wave[1:] != is_wave[0], 0) if len(is_wave) > 1 else np.zeros(len(rates))
    reasons = []
    for rate, share, is_weak in zip(rates, changed, is_noise, strict=True):
        reason = ""
        if not len(has_converged):
            reason = f"fewer than {_MIN_ROWS} rows"
        elif np.mean(~has_converged) > _CHANGED_SHARE:
            reason = "fits without a block do not converge; take a smaller rank"
        elif abs(rate.real) > 0.99 * float(limits.growth):
            reason = "growth or decay within one step"
        elif abs(rate.imag) > 0.99 * float(limits.frequency):
            reason = "at or beyond Nyquist; shorten the step"
        elif is_weak:
            reason = "as weak as peaks of the noise; take a smaller rank"
        elif share > _CHANGED_SHARE:
            reason = "a pair and two real rates fit alike; change the rank"
        reasons.append(reason)
    return reasons
