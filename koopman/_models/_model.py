"""Models of trajectories: one entry from data to rates, forecasts and files."""

import dataclasses
import functools
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import xarray
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_known, check_level, fail, fail_kind
from dissociation._core.columns import Reading
from dissociation._core.frames import is_table
from dissociation._core.types import Size
from dissociation._core.validation import validated
from koopman._models import _dynamics as systems
from koopman._models import _lifting as lifts
from koopman._models._bands import bands, in_columns
from koopman._models._block_sums import MIN_BLOCKS, Replicates, assign_blocks, replicate
from koopman._models._dynamics import Dynamics
from koopman._models._intervals import (
    Intervals,
    few_pairs,
    jackknife_error,
    rate_intervals,
    student_quantile,
)
from koopman._models._lifting import Lifted, Lifting, Recipe, delay_rows, pair_indices
from koopman._models._rates import RateEstimates, falling_order, rates_dataset, rates_summary
from koopman._models._saving import read_model, write_model
from koopman._models._trajectories import (
    Trajectories,
    as_dates,
    check_columns,
    cut_at_gaps,
    read_trajectories,
)
from koopman._operators._diagnose import findings_of
from koopman._operators._estimators import Estimator, PrincipalComponents, ReducedRank, Ridge
from koopman._operators._findings import warn_of
from koopman._operators._fit import fit
from koopman._operators._forecast import warn_lost
from koopman._operators._kernels import Kernel, LinearMap, as_module
from koopman._operators._operator import Operator, unshrinking
from koopman._operators._pairs import Moments

_KINDS: dict[type, str] = {
    Ridge: "ridge", PrincipalComponents: "principal", ReducedRank: "reduced"
}  # fmt: skip
_CONSTANT = 0.99
"""Squared mean of an eigenfunction, over its mean square, from which on it is the constant."""
_STATE_AXES = ("channel", "height", "width")


@dataclasses.dataclass(frozen=True)
class Meaning:
    """Names and units of a model.

    Attributes:
        columns: Labels of the states.
        input_columns: Labels of the inputs.
        labels: Labels of the runs.
        time_step: Time between states.
        unit: Unit of time.
        has_dates: True if times are dates.
        time: Name of the clock in frames.
        run: Name of the runs in frames, or several.
    """

    columns: tuple[Any, ...]
    input_columns: tuple[Any, ...]
    labels: tuple[Any, ...]
    time_step: float
    unit: str
    has_dates: bool
    time: Any
    run: Any


class Series(eqx.Module):
    """States of all pieces of runs below each other.

    Attributes:
        observed: States, or their coordinates: [n, o].
        features: Features of every state, [n, f]; the states without a function.
        inputs: Inputs at the same times, [n, m]; m = 0 without inputs.
        times: Times, [n].
        lengths: Numbers of states of the pieces, [pieces].
        run_of_piece: Index of the run, [pieces].
    """

    observed: Any
    features: Any
    inputs: Any
    times: Any
    lengths: Any
    run_of_piece: Any

    def delays(self, values: np.ndarray, num_delays: int, span: int) -> np.ndarray:
        """Return rows of delays, the first of a piece at its state number `span`."""
        return delay_rows(values, self.lengths.tolist(), num_delays, span)[0]


class ModeTable(NamedTuple):
    """Modes in the order of `KoopmanModel.rates`.

    Attributes:
        rates: Result of `KoopmanModel.rates`.
        eigenvalues: Eigenvalues per lag, the one of a pair with positive imaginary part: [modes].
        shapes: Amplitudes of the modes, [modes, *state].
    """

    rates: xarray.Dataset
    eigenvalues: np.ndarray
    shapes: np.ndarray


class KoopmanModel(eqx.Module):
    """Model of trajectories that `fit_model` returns.

    Its operator acts on features of the last `num_delays` states. Methods that return a Dataset
    need known values; `model.lift` and `model.operator` may be used under `jax.jit`, `jax.vmap` and
    `jax.grad`.

    Attributes:
        recipe: Estimator, lag, delays, features and kernel.
        lifted: Features of all training times.
        latent_operator: Operator on these features; with inputs, of their regression alone.
        series: Training states.
        meaning: Names and units.
    """

    recipe: Recipe
    lifted: Lifted
    latent_operator: Operator
    series: Series
    meaning: Meaning = eqx.field(static=True)

    def __repr__(self) -> str:
        meaning = self.meaning
        return (
            f"KoopmanModel({type(self.recipe.estimator).__name__}, "
            f"{len(meaning.labels)} runs of {len(meaning.columns)} columns, "
            f"lag={self.recipe.lag}, num_delays={self.recipe.num_delays}, "
            f"time_step={meaning.time_step:.6g} {meaning.unit})"
        )

    @property
    def lifting(self) -> Lifting:
        """Map from the last states to features."""
        return self.lifted.lifting

    @property
    def operator(self) -> Operator:
        """Return the operator for `koopman.predict`, `koopman.decompose` and others.

        Its features are those of `lift`, and its observable is the state one lag later.
        """
        if self.recipe.num_input_delays:
            advice = "Use model.predict and model.matrices"
            fail("operator", "be used without inputs", "a model with inputs", advice)
        operator = self.latent_operator
        return dataclasses.replace(
            operator,
            readout=in_columns(operator.readout, self.recipe.state_basis),
            mean_observable=in_columns(operator.mean_observable, self.recipe.state_basis),
            observable_shape=self.recipe.state_shape,
        )

    def lift(self, past: Float[Array | np.ndarray, "..."]) -> Float[Array, "n r"]:
        """Return features of the last `num_delays` states, in the order of time.

        Args:
            past: States [n, num_delays, ...]; without the first axis for one state.
        """
        num_axes = 1 + len(self.recipe.state_shape)
        return self.lifting(past[None] if np.ndim(past) == num_axes else past)

    def rates(self, level: float = 0.9) -> xarray.Dataset:
        """Return growth, frequency and time scale of every mode, with intervals.

        Args:
            level: Probability of the intervals, between 0 and 1.

        Returns:
            A dataset over `mode`, by falling share, a conjugate pair once: `growth` (signed),
            `frequency` (cycles) and `time_scale`, each with `_low` and `_high`, which are NaN for
            modes that are not resolved; `share` of the variance; `resolved`; `reason`.

        Raises:
            ValueError: If `level` is not between 0 and 1.
        """
        return self.mode_table(level).rates

    def mode_table(self, level: float = 0.9) -> ModeTable:
        """Return the rates with eigenvalues and mode shapes in the same order."""
        self._check(level)
        values, shapes, share, is_constant = self._spectrum
        intervals = self._intervals(values, level)
        estimates = intervals.with_share(share, values)
        is_mode = ~is_constant[intervals.index]
        estimates = RateEstimates._make(np.asarray(field)[is_mode] for field in estimates)
        index = intervals.index[is_mode][falling_order(estimates.share, estimates.growth)]
        amplitudes = in_columns(shapes[index], self.recipe.state_basis)
        dataset = rates_dataset(estimates, self.meaning.unit, level)
        shaped = amplitudes.reshape(len(index), *self.recipe.state_shape)
        return ModeTable(dataset, values[index], shaped)

    def summary(self, level: float = 0.9) -> str:
        """Return the table of `rates` as a string with units."""
        return rates_summary(self.rates(level))

    def plot(self, steps: int = 50) -> Any:
        """Return a Matplotlib figure of eigenvalues, rates, modes and a forecast.

        Args:
            steps: Lags ahead of the forecast.
        """
        # Here, because Matplotlib takes half a second.
        from koopman._models._drawing import plot_model

        return plot_model(self.report(steps))

    def report(self, steps: int = 50, level: float = 0.9) -> xarray.Dataset:
        """Return rates, modes, and a forecast of the first run, which `plot_model` draws.

        Args:
            steps: Lags ahead of the forecast.
            level: Probability of the intervals.

        Returns:
            The variables of `rates`, with `eigenvalues` and `shapes` of modes; observations as
            `observed` at `observation_time`; and those of `predict` after "forecast_".
        """
        from koopman._models._drawing import report_of

        return report_of(self, steps, level)

    def predict(
        self, steps: Any, past: Any = None, inputs: Any = None, level: float = 0.9
    ) -> xarray.Dataset:
        """Return forecasts with intervals of their means and bands of new observations.

        Args:
            steps: Lags ahead, 1 to `steps`, or a list of lags.
            past: The last `num_delays` states in the order of time, one array or one per run; by
                default the end of every run.
            inputs: Inputs from the last state on, [steps, m] or [run, steps, m], for a model with
                inputs. With several input delays and a `past`, the delays come before.
            level: Probability of the intervals.

        Returns:
            A dataset of `mean`, `mean_low`, `mean_high`, `low` and `high` over `step`, `run` and
            `column` (images: `height` and `width`), with the coordinate `time`. Means have
            intervals from 20 blocks on. `low` and `high` add quantiles of the training errors at as
            many steps; where runs are too short for them, at the most steps that are not.

        Raises:
            ValueError: If `past` is too short or of other columns, or inputs do not fit.
        """
        self._check(level)
        ahead = _checked_steps(steps)
        present, driving, times, labels = self._starts(past, inputs, int(ahead[-1]))
        num_runs = len(present)
        if not self.recipe.num_input_delays:
            warn_lost(self.latent_operator, ahead)
        # One program forecasts from the pasts and from all training rows.
        rows = np.concatenate([present, self._rows(self.series)])
        windows = np.concatenate([driving, self._windows(self.series, int(ahead[-1]))], 1)
        values = systems.forecasts(self._dynamics(), rows, windows, ahead)[0]
        errors, _ = self._differences(self.series, values[:, num_runs:], ahead)
        deleted = None
        replicates = self._replicates()
        if replicates is not None:
            dynamics = self._driven(
                systems.of_replicates(replicates, self.lifted.scale), self.lifting
            )
            deleted = systems.forecasts(dynamics, present, driving, ahead)
            deleted = deleted[1 : 1 + replicates.num_blocks]
        basis = self.recipe.state_basis
        band = bands(values[:, :num_runs], deleted, errors, level, basis)
        variables = {}
        for name, states in band.items():
            variables[name] = self._with_axes(("step", "run"), states)
        elapsed = ahead * self.recipe.lag * self.meaning.time_step
        dates = as_dates(elapsed[:, None] + times, self.meaning.has_dates)
        units = {} if self.meaning.has_dates else {"units": self.meaning.unit}
        coords = {"step": ahead, "run": labels, "time": (("step", "run"), dates, units)}
        return xarray.Dataset(variables, coords | self._column_coordinate())

    def score(self, trajectories: Any, steps: Any, inputs: Any = None) -> xarray.Dataset:
        """Return root mean square errors of forecasts, and of persistence.

        Args:
            trajectories: Trajectories in the form of the fit.
            steps: Lags ahead, 1 to `steps`, or a list of lags.
            inputs: Inputs of the trajectories, for a model with inputs; read from frames.

        Returns:
            A dataset over `step` and `column`: `error`, and `persistence`, the error of the last
            state repeated.
        """
        self._check()
        ahead = _checked_steps(steps)
        num_rows = self.recipe.span + self.recipe.lag * int(ahead[0])
        series = _series(self._read("trajectories", trajectories, num_rows, inputs), self.recipe)
        windows = self._windows(series, int(ahead[-1]))
        values = systems.forecasts(self._dynamics(), self._rows(series), windows, ahead)[0]
        errors, changes = self._differences(series, values, ahead)
        variables = {}
        for name, by_step in {"error": errors, "persistence": changes}.items():
            means = []
            for differences in by_step:
                squares = in_columns(differences, self.recipe.state_basis) ** 2
                means.append(squares.sum(0) / (len(squares) or np.nan))
            variables[name] = self._with_axes(("step",), np.sqrt(np.stack(means)))
        return xarray.Dataset(variables, {"step": ahead} | self._column_coordinate())

    def matrices(self, level: float = 0.9) -> xarray.Dataset:
        """Return A, B and the intercept of x A + u B + c, with intervals.

        Args:
            level: Probability of the intervals.

        Returns:
            A dataset of `A` [delay, from, to], `B` [input delay, input, to] and `intercept` [to],
            each with `_low` and `_high`, NaN below 20 blocks. The matrices of DMDc are the
            transposes.

        Raises:
            ValueError: If the model has features of states, a kernel, or images.
        """
        self._check(level)
        recipe = self.recipe
        if recipe.features or recipe.kernel or recipe.state_basis:
            received = "features, a kernel, or more columns than rows"
            fail("model", "be linear in few states for its matrices", received)
        columns = list(self.meaning.columns)
        inputs = list(self.meaning.input_columns)
        coords = {"from": columns, "to": columns, "input": inputs}
        values = systems.regression(systems.of_operator(self.latent_operator), self.lifting)[0]
        half_width = np.full(values.shape, np.nan)
        replicates = self._replicates()
        if replicates is not None:
            dynamics = systems.of_replicates(replicates, self.lifted.scale)
            deleted = systems.regression(dynamics, self.lifting)[1 : 1 + replicates.num_blocks]
            half_width = student_quantile(deleted, level) * jackknife_error(deleted)
        width = len(columns)
        variables = {}
        ends = {"": values, "_low": values - half_width, "_high": values + half_width}
        for end, matrix in ends.items():
            a, b, intercept = np.split(matrix, [recipe.num_delays * width, len(values) - 1])
            variables[f"A{end}"] = (("delay", "from", "to"), a.reshape(-1, width, width))
            b = b.reshape(recipe.num_input_delays, len(inputs), width)
            variables[f"B{end}"] = (("input_delay", "input", "to"), b)
            variables[f"intercept{end}"] = ("to", intercept[0])
        return xarray.Dataset(variables, coords)

    def save(self, path: str | Path) -> None:
        """Write the model to an `.npz` file, which `koopman.load_model` reads.

        Args:
            path: Name of the file.
        """
        self._check()
        write_model(self, path, _SAVED)

    def _check(self, level: float = 0.9) -> None:
        """Raise if the model is traced, or unless the level is a probability."""
        check_level(level)
        check_known("tables and files hold numbers", model=self)

    def _row_lengths(self, series: Series) -> list[int]:
        return np.maximum(series.lengths - self.recipe.span + 1, 0).tolist()

    def _rows(self, series: Series) -> np.ndarray:
        """Return the rows of series from which forecasts start."""
        recipe = self.recipe
        return self._lifted(series.delays(series.features, recipe.num_delays, recipe.span))

    def _lifted(self, delayed: np.ndarray) -> np.ndarray:
        """Return features of rows of delays; the rows themselves with inputs."""
        if self.recipe.num_input_delays:
            return delayed
        lifting = self.lifting
        if lifting.kernel_map is None:
            return (delayed - lifting.offset) @ lifting.basis
        values = lifting.project(lifts.padded(delayed.astype(lifts.working_dtype())))
        return np.asarray(values)[: len(delayed)]

    def _dynamics(self) -> Dynamics:
        """Return the dynamics of the estimate."""
        return self._driven(systems.of_operator(self.latent_operator), self.lifting)

    def _driven(self, dynamics: Dynamics, lifting: Lifting) -> Dynamics:
        """Return the dynamics of rows of delays with inputs; without inputs unchanged."""
        if not self.recipe.num_input_delays:
            return dynamics
        series = self.series
        width = series.observed.shape[1]
        readout = np.eye(width + 1, width)
        if self.recipe.features is not None:
            affine = np.pad(series.features, ((0, 0), (0, 1)), constant_values=1.0)
            readout = np.linalg.lstsq(affine, series.observed, rcond=1e-12)[0]
        solution = systems.regression(dynamics, lifting)
        return systems.with_inputs(solution, lifting.num_delays, readout)

    @functools.cached_property
    def _spectrum(self) -> tuple[np.ndarray, ...]:
        """Return eigenvalues [r] with shapes [r, o], shares, and True for the constant."""
        dynamics = self._dynamics()
        values, vectors = np.linalg.eig(dynamics.core[0])
        states, _ = pair_indices(self._row_lengths(self.series), self.recipe.lag)
        latent = (self._rows(self.series)[states] - dynamics.mean[0]) @ dynamics.project[0]
        functions = latent @ vectors
        size = np.sqrt(np.mean(np.abs(functions) ** 2, 0))
        scale = np.where(size > 0, size, 1.0)
        functions = functions / scale
        shapes = scale[:, None] * (np.linalg.pinv(vectors) @ dynamics.readout[0])
        mean = functions.mean(0)
        share = systems.shares(functions - mean, shapes)
        is_constant = (np.abs(mean) ** 2 > _CONSTANT) & (not self.recipe.center)
        return values.astype(complex), shapes, share, is_constant

    def _intervals(self, eigenvalues: np.ndarray, level: float) -> Intervals:
        recipe = self.recipe
        series = self.series
        inputs = self._windows(series, 1)[0]
        values = systems.one_step(self._dynamics(), self._rows(series), inputs)
        (errors,), _ = self._differences(series, values[None], np.ones(1, int))
        residual = float(np.sqrt(np.mean(errors**2) / np.mean(series.observed.var(0))))
        num_pairs = len(errors)
        num_latent = len(eigenvalues)
        replicates = None
        if not few_pairs(num_pairs, num_latent, residual):
            replicates = self._replicates()
        return rate_intervals(
            eigenvalues,
            replicates,
            None if replicates is None else self._richer,
            time=recipe.lag * self.meaning.time_step,
            level=level,
            num_pairs=num_pairs,
            num_latent=num_latent,
            residual=residual,
            memory=recipe.num_delays / recipe.lag if recipe.estimator.size is None else 0.0,
        )

    def _blocks(self) -> Any:
        lengths = np.asarray(self._row_lengths(self.series)) - self.recipe.lag
        return assign_blocks(np.maximum(lengths, 0).tolist())

    def _replicates(self) -> Replicates | None:
        """Return replicates of the fit, or None if there are too few blocks."""
        return None if self._blocks().num_blocks < MIN_BLOCKS else self._fitted

    @functools.cached_property
    def _fitted(self) -> Replicates:
        replicates = self._replicated(self.lifted, self.recipe)
        if not self.recipe.num_input_delays:
            return replicates
        later = self._later(systems.of_replicates(replicates, self.lifted.scale))
        return replicates._replace(eigenvalues_later=later)

    def _later(self, replicated: Dynamics) -> np.ndarray:
        """Return eigenvalues at twice the lag, of a fit that takes the inputs in between, too."""
        series = self.series
        recipe = self.recipe
        recipe = dataclasses.replace(recipe, lag=2, num_input_delays=1 + recipe.num_input_delays)
        # The first input of the next piece is in no pair.
        lifted = _silent_lift(recipe, series, np.roll(series.inputs, -1, 0))
        if lifted is None:
            return np.full((len(replicated.core), 1), np.nan + 0j)
        replicates = self._replicated(lifted, recipe, is_check=True)
        later = systems.of_replicates(replicates, lifted.scale)
        solution = systems.regression(later, lifted.lifting)
        core = self._driven(replicated, self.lifting).core[: len(solution)]
        square = core @ core
        width = solution.shape[2]
        square[:, :, :width] = solution[:, : core.shape[1]]
        return np.linalg.eigvals(square).astype(complex)

    @functools.cached_property
    def _richer(self) -> Replicates | None:
        """Return replicates of a silent fit with twice the delays, or None if runs are short."""
        recipe = dataclasses.replace(self.recipe, num_delays=2 * self.recipe.num_delays)
        lifted = _silent_lift(recipe, self.series, self.series.inputs)
        return None if lifted is None else self._replicated(lifted, recipe, is_check=True)

    def _replicated(self, lifted: Lifted, recipe: Recipe, is_check: bool = False) -> Replicates:
        """Return replicates of the estimator on lifted rows."""
        observed = None
        if recipe.num_input_delays or not is_check:
            observed = _targets(self.series, recipe).astype(lifts.working_dtype())
        blocks = self._blocks().without(recipe.span - self.recipe.span)
        num_later = recipe.lag - self.recipe.lag
        of_pair = [piece[: len(piece) - num_later] for piece in blocks.of_pair]
        estimator: Any = recipe.estimator
        replicates = replicate(
            lifted.rows,
            observed,
            lifted.lengths.tolist(),
            recipe.lag,
            blocks._replace(of_pair=of_pair),
            lifted.scale,
            float(lifted.alpha),
            kind=_KINDS[type(estimator)],
            rank=estimator.size,
            center=recipe.center,
            is_check=is_check,
        )
        if not recipe.num_input_delays:
            return replicates
        dynamics = self._driven(systems.of_replicates(replicates, lifted.scale), lifted.lifting)
        return replicates._replace(eigenvalues=np.linalg.eigvals(dynamics.core).astype(complex))

    def _read(
        self, name: str, trajectories: Any, num_rows: int, inputs: Any = None
    ) -> Trajectories:
        """Return new trajectories, read as those of the fit."""
        meaning = self.meaning
        tables = trajectories if isinstance(trajectories, list | tuple) else [trajectories]
        reading = Reading(takes_names=True)
        axis = None
        num_axes = 1 + len(self.recipe.state_shape)
        if any(map(is_table, tables)):
            reading = _available(tables[0], meaning)
            if inputs is None and name == "trajectories":
                inputs = list(meaning.input_columns) or None
        elif tables is not trajectories and np.ndim(trajectories) > num_axes:
            axis = 0
        elif num_axes > 2:
            trajectories = tables
        try:
            read = read_trajectories(trajectories, reading, trajectory_axis=axis, inputs=inputs)
            check_columns(read, meaning.columns)
            if name == "trajectories" and len(read.input_columns) != len(meaning.input_columns):
                requirement = f"be the {len(meaning.input_columns)} inputs of the fit, in every run"
                fail("inputs", requirement, f"{len(read.input_columns)} columns")
            return cut_at_gaps(read, num_rows, "Pass more of the last states")
        except (ValueError, TypeError) as error:
            if not str(error).startswith("`trajectories"):
                raise
            raise type(error)(str(error).replace("`trajectories", f"`{name}", 1)) from None

    def _starts(self, past: Any, inputs: Any, steps: int) -> tuple[Any, ...]:
        """Return rows [runs, R] with delays of inputs [steps, runs, q], times and labels.

        A forecast starts at the ends of the runs of the fit, or of a call.
        """
        recipe = self.recipe
        series = self.series
        labels = self.meaning.labels
        if past is not None:
            cut = self._read("past", past, recipe.num_delays)
            series = _series(cut, recipe)
            labels = cut.labels
        # The last piece of every run.
        pieces = np.flatnonzero(np.diff(series.run_of_piece, append=-1))
        ends = np.cumsum(series.lengths)[pieces] - 1
        delayed = series.features[ends[:, None] - np.arange(recipe.num_delays)]
        rows = self._lifted(delayed.reshape(len(ends), -1))

        earlier = series.inputs[ends[:, None] - np.arange(recipe.num_input_delays - 1, 0, -1)]
        if past is not None:
            earlier = np.zeros((len(ends), 0, len(self.meaning.input_columns)))
        num_times = steps + max(recipe.num_input_delays - 1, 0)
        if hasattr(inputs, "columns"):
            inputs = _input_columns(inputs, self.meaning.input_columns)
        later = _inputs_of_runs(inputs, (len(ends), num_times - earlier.shape[1], earlier.shape[2]))
        driving = np.concatenate([earlier, later], 1).reshape(len(ends) * num_times, -1)
        windows, _ = delay_rows(driving, [num_times] * len(ends), recipe.num_input_delays)
        windows = np.swapaxes(windows.reshape(len(ends), steps, -1), 0, 1)

        times = series.times[ends]
        if past is not None:
            tables = past if isinstance(past, list | tuple) else [past]
            times = times * any(map(is_table, tables))
        return rows, windows, times, [labels[run] for run in series.run_of_piece[pieces]]

    def _windows(self, series: Series, steps: int) -> np.ndarray:
        """Return delays of inputs of every step from all rows, zero beyond the end of a piece."""
        recipe = self.recipe
        delayed = series.delays(series.inputs, recipe.num_input_delays, recipe.span)
        windows = np.zeros((steps, *delayed.shape))
        for step in range(steps):
            start, later = pair_indices(self._row_lengths(series), step)
            windows[step, start] = delayed[later]
        return windows

    def _differences(self, series: Series, values: np.ndarray, ahead: np.ndarray) -> Any:
        """Return errors of forecasts [t, rows, o] of every step, and changes of the state."""
        lengths = self._row_lengths(series)
        observed = series.delays(series.observed, 1, self.recipe.span)
        errors = []
        changes = []
        for forecast, step in zip(values, ahead.tolist(), strict=True):
            start, end = pair_indices(lengths, self.recipe.lag * step)
            errors.append(observed[end] - forecast[start])
            changes.append(observed[end] - observed[start])
        return errors, changes

    def _with_axes(self, axes: tuple[str, ...], values: np.ndarray) -> Any:
        """Return names of axes and values [..., *state]."""
        shape = self.recipe.state_shape
        names = _STATE_AXES[-len(shape) :] if len(shape) > 1 else ("column",)
        return (*axes, *names), values.reshape(*values.shape[:-1], *shape)

    def _column_coordinate(self) -> dict[str, Any]:
        is_image = len(self.recipe.state_shape) > 1
        return {} if is_image else {"column": list(self.meaning.columns)}


def _input_columns(frame: Any, labels: tuple[Any, ...]) -> np.ndarray:
    """Return the columns of a frame that were inputs of the fit; all, if those had no labels."""
    if labels == tuple(range(len(labels))):
        return frame.to_numpy()
    missing = [label for label in labels if label not in frame.columns]
    if missing:
        fail("inputs", f"have the columns {list(labels)} of the fit", list(frame.columns))
    return frame[list(labels)].to_numpy()


def _inputs_of_runs(inputs: Any, shape: tuple[int, int, int]) -> np.ndarray:
    """Return the inputs of a forecast, [runs, steps, m]."""
    num_runs, num_steps, num_inputs = shape
    if not num_inputs:
        if inputs is not None:
            fail("inputs", "be None for a model without inputs", type(inputs).__name__)
        return np.zeros(shape)
    array = np.asarray(np.nan if inputs is None else inputs, float)
    if array.shape == (num_steps,) and num_inputs == 1:
        array = array[:, None]
    if array.shape == shape[1:]:
        array = np.broadcast_to(array, shape)
    if array.shape != shape or not np.isfinite(array).all():
        words = f"be finite, of shape {list(shape[1:])} or {list(shape)}"
        fail("inputs", words, "None" if inputs is None else f"shape {array.shape}")
    return array


def _available(table: Any, meaning: Meaning) -> Reading:
    """Return the names of a fit that a new frame has."""
    names = {*getattr(table, "columns", ()), *getattr(table, "dims", ())}
    names = names.union(getattr(getattr(table, "index", None), "names", ()))
    time = meaning.time if meaning.time in names else None
    runs = meaning.run if isinstance(meaning.run, tuple) else (meaning.run,)
    is_split = meaning.run is not None and names.issuperset(runs)
    run = list(runs) if is_split else None
    columns = list(meaning.columns) if hasattr(table, "columns") else None
    return Reading(time=time, run=run, columns=columns, takes_names=True)


def _checked_steps(steps: Any) -> np.ndarray:
    """Return rising lags: 1 to a number, or those of a list."""
    if isinstance(steps, int | np.integer):
        return np.arange(1, check_count("steps", steps, minimum=1) + 1)
    ahead = np.asarray(steps)
    if ahead.ndim != 1 or not ahead.size or ahead.dtype.kind not in "iu" or ahead.min() < 1:
        fail("steps", "be an integer from 1 on, or a list of them", repr(steps))
    return np.unique(ahead)


@validated(empty=("trajectories",))
def fit_model(
    trajectories: Any,
    estimator: Estimator | None = None,
    *,
    time_step: float | None = None,
    lag: Size = 1,
    num_delays: Size = 1,
    inputs: Any = None,
    num_input_delays: Size = 1,
    time: Any = None,
    run: Any = None,
    columns: Any = None,
    trajectory_axis: int | None = None,
    features: Any = None,
    kernel: Kernel | None = None,
    centres: Float[Array | np.ndarray, "m d"] | None = None,
    center: bool | None = None,
) -> KoopmanModel:
    """Fit a model to trajectories: rates with intervals, forecasts, files and a figure.

    Rows with missing values and gaps of the clock split runs. `koopman.fit` is the fit of an
    operator to pairs.

    Args:
        trajectories: Trajectories in the forms of `lagged_pairs`: a frame, an array [time] or
            [time, d], a list of arrays [time, ...], one per run. Images are states: pass a list of
            arrays [time, height, width].
        estimator: `Ridge()` by default. `PrincipalComponents("auto")` and `ReducedRank("auto")` cut
            the rank by the hard threshold of singular values.
        time_step: Time between rows. By default it is the step of the clock, or 1. Dates count in
            days.
        lag: Steps from a state to the state that is predicted.
        num_delays: Number of successive states from which the next is predicted.
        inputs: Inputs u_t that act from t to t + lag: arrays [time, m], one per run, or columns of
            the frame. For `Ridge` and lag 1.
        num_input_delays: Number of successive inputs.
        time: Column, index level or dimension of times of a frame.
        run: Column, index level or dimension that labels runs, or a list of them.
        columns: Columns of a frame that are states.
        trajectory_axis: Axis of trajectories in an array.
        features: Function of one state to an array of features, such as an encoder.
        kernel: Kernel of `koopman`, on rows of delays, newest state first.
        centres: Centres of the kernel, [m, num_delays d].
        center: If True, there is an intercept. None: True, without a kernel.

    Returns:
        A `KoopmanModel`.

    Warns:
        UserWarning: If there are missing rows, gaps, or runs without a pair; and what
            `koopman.diagnose` finds.

    Raises:
        ValueError: If steps of a clock are uneven, runs are interleaved, inputs are constant or
            functions of the states, or arguments do not fit together.
        TypeError: If columns are no real numbers.

    References:
        Kostic et al. (2022), see `koopman.fit`; Proctor, Brunton and Kutz (2016), Dynamic mode
        decomposition with control.

    >>> import numpy
    >>> times = numpy.arange(200)
    >>> model = fit_model(numpy.cos(0.3 * times) * 0.99**times, num_delays=2)
    >>> rates = model.rates()
    >>> round(float(rates.frequency[0]), 3), rates.growth.attrs["units"]
    (0.048, '1/step')
    """
    check_known("runs are read on the host", trajectories=trajectories, inputs=inputs)
    estimator = Ridge() if estimator is None else estimator
    center = kernel is None if center is None else center
    _check_options(estimator, kernel, centres, center, features)
    num_inputs = num_input_delays
    if inputs is None:
        num_inputs = 0
        if num_input_delays != 1:
            fail("num_input_delays", "be 1 without `inputs`", num_input_delays)
    else:
        _check_input_options(estimator, lag, kernel)
    reading = Reading(time, run, columns, takes_names=True)
    read = read_trajectories(
        trajectories, reading, trajectory_axis=trajectory_axis, inputs=inputs, time_step=time_step
    )
    cut = cut_at_gaps(read, max(num_delays, num_inputs) + lag)
    width = cut.runs[0].shape[1]
    if centres is not None and centres.shape[1] != num_delays * width:
        requirement = f"have shape [m, {num_delays * width}], a row of delays, newest state first"
        fail("centres", requirement, f"shape {centres.shape}")
    state_basis = None
    if width > sum(map(len, cut.runs)) and features is None and kernel is None:
        state_basis = lifts.basis_of_states(cut.runs, lag, estimator)
    recipe = Recipe(
        estimator,
        lifts.as_features(features),
        state_basis,
        None if kernel is None else as_module(kernel),
        centres,
        lag,
        num_delays,
        num_inputs,
        center,
        cut.state_shape,
    )
    runs = tuple(run) if isinstance(run, list) else run
    # The last fields of trajectories are the first ones of their meaning.
    facts: list[Any] = [*cut[5:], time, runs]
    meaning = Meaning(*facts)
    return _model_of(recipe, _series(cut, recipe), meaning)


def _check_options(
    estimator: Estimator, kernel: Any, centres: Any, center: bool, features: Any
) -> None:
    """Raise unless options fit together."""
    if type(estimator) not in _KINDS:
        names = " or ".join(kind.__name__ for kind in _KINDS)
        fail_kind("estimator", f"be {names}", type(estimator).__name__, "Use koopman.fit")
    if kernel is not None and center:
        fail("center", "be False or None with a kernel", center, "Take the states about their mean")
    if kernel is None and centres is not None:
        fail("kernel", "be given with `centres`", "None")
    if kernel is not None and features is not None:
        fail("features", "be None with a kernel", "both", "Compose them in one kernel")


def _check_input_options(estimator: Estimator, lag: int, kernel: Any) -> None:
    """Raise unless options fit to inputs."""
    if not isinstance(estimator, Ridge):
        fail("estimator", "be Ridge with `inputs`", type(estimator).__name__)
    if lag != 1:
        fail("lag", "be 1 with `inputs`", lag, "Take every lag-th row of states and inputs")
    if kernel is not None:
        fail("kernel", "be None with `inputs`", type(kernel).__name__, "Pass features=")


def _series(cut: Trajectories, recipe: Recipe) -> Series:
    """Return the states of all pieces."""
    runs = cut.runs
    if recipe.state_basis is not None:
        runs = list(map(recipe.state_basis.coordinates, runs))
    states = np.concatenate(runs)
    features = states
    if recipe.features is not None:
        features = lifts.state_features(recipe.features, states, recipe.state_shape)
    return Series(
        states,
        features,
        np.concatenate(cut.inputs),
        np.concatenate(cut.times),
        np.asarray(list(map(len, cut.runs))),
        np.asarray(cut.run_of_piece),
    )


def _targets(series: Series, recipe: Recipe) -> np.ndarray:
    """Return what rows predict: states, or with inputs features of the newest state."""
    values = series.features if recipe.num_input_delays else series.observed
    return series.delays(values, 1, recipe.span)


def _model_of(recipe: Recipe, series: Series, meaning: Meaning) -> KoopmanModel:
    """Return the model of series."""
    lifted = lifts.lift_rows(recipe, series.features, series.lengths.tolist(), series.inputs)
    if recipe.num_input_delays:
        delayed = series.delays(series.features, recipe.num_delays, recipe.span)
        inputs = series.delays(series.inputs, recipe.num_input_delays, recipe.span)
        systems.refuse_singular(np.concatenate([delayed, inputs], 1), inputs.shape[1])
    estimator: Any = recipe.estimator
    if estimator.rank == "auto":
        num_pairs = len(pair_indices(lifted.lengths.tolist(), recipe.lag)[0])
        rank = lifts.threshold_rank(lifted.sizes, num_pairs, len(lifted.squares))
        estimator = type(estimator)(rank, estimator.alpha, solver=estimator.solver)
        recipe = dataclasses.replace(recipe, estimator=estimator)
    operator = _operator_of(recipe, lifted, _targets(series, recipe))
    return KoopmanModel(recipe, lifted, operator, series, meaning)


def _operator_of(recipe: Recipe, lifted: Lifted, observed: np.ndarray) -> Operator:
    """Return the operator of `koopman.fit` on lifted rows, and warn of what `diagnose` finds."""
    default: Any = recipe.estimator
    estimator = eqx.tree_at(
        lambda estimator: estimator.alpha, default, float(lifted.alpha), is_leaf=_is_none
    )
    states, successors = pair_indices(lifted.lengths.tolist(), recipe.lag)
    dtype = lifts.working_dtype()
    z = (lifted.rows * lifted.scale).astype(dtype)
    x = z[states]
    y = z[successors]
    levelled = x if lifted.metric is None else x @ lifted.metric
    moments = _host_moments([levelled, y, observed[successors].astype(dtype)], recipe.center)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        operator = fit(estimator, moments)
    if lifted.metric is not None:
        operator = _in_units(operator, lifted.metric, x, y, recipe.center)
    if default.alpha is None:
        fitting = operator.fitting
        has_columns = recipe.kernel is None and recipe.state_basis is None
        if has_columns and not lifts.has_levels(default, len(lifted.squares)):
            squares = jax.device_put(lifted.squares.astype(dtype))
            fitting = eqx.tree_at(
                lambda fitting: fitting.squares, fitting, squares, is_leaf=_is_none
            )
        operator = dataclasses.replace(operator, given=False, fitting=fitting)
    warn_of(findings_of(operator, x, y))
    return operator


def _is_none(value: Any) -> bool:
    return value is None


def _host_moments(arrays: list[np.ndarray], center: bool) -> Moments:
    """Return `moments` of x, y and the observable, without a program for the number of rows."""
    joint = np.concatenate(arrays, 1)
    num_rows, width = joint.shape
    mean = joint.mean(0)
    root = np.zeros((width, width), joint.dtype)
    root[:num_rows] = np.linalg.qr(joint - mean if center else joint, mode="r")
    ends = np.cumsum([array.shape[1] for array in arrays])[:2]
    count = np.full((), num_rows, joint.dtype)
    rounding = np.zeros(1 + width, joint.dtype)
    fields: list[Any] = [count, *np.split(mean, ends), rounding, root]
    return Moments(*map(jax.device_put, fields), center)  # pyright: ignore[reportCallIssue]


def _in_units(
    operator: Operator, metric: np.ndarray, x: np.ndarray, y: np.ndarray, center: bool
) -> Operator:
    """Return an operator that was fitted to x times `metric` and to y as one on x and y."""
    encode: Any = operator.encode
    matrix = metric @ np.asarray(encode.matrix)
    mean_x = x.mean(0) * center
    mean_y = y.mean(0) * center
    latent_x = (x - mean_x) @ matrix
    latent_y = (y - mean_y) @ matrix
    cross_gram = latent_x.T @ latent_y / len(x)
    fields = {
        "core": np.asarray(unshrinking(operator.penalty)).T @ cross_gram,
        "drift": (mean_y - mean_x) @ matrix,
        "cross_gram": cross_gram,
        "gram_y": latent_y.T @ latent_y / len(x),
        "basis_gram": matrix.T @ matrix,
    }
    fields = jax.device_put(fields)
    encode = LinearMap(*jax.device_put((mean_x, matrix)))
    return dataclasses.replace(operator, encode=encode, **fields)


def _silent_lift(recipe: Recipe, series: Series, inputs: np.ndarray) -> Lifted | None:
    """Return the rows of a check; None if runs are too short for 20 pairs."""
    num_pairs = np.maximum(series.lengths - recipe.span - recipe.lag + 1, 0).sum()
    if num_pairs < MIN_BLOCKS:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lifts.lift_rows(recipe, series.features, series.lengths.tolist(), inputs)


_SAVED = (KoopmanModel, Meaning, Series)
_NUM_PROBES = 8
"""Number of states at which features are compared with those of the fit."""


@validated
def load_model(path: str | Path, features: Any = None) -> KoopmanModel:
    """Read a model that `KoopmanModel.save` wrote.

    Args:
        path: Name of the file.
        features: Features of the fit, if it had some. A file does not hold functions.

    Raises:
        ValueError: If the file holds no model, or features are missing or are not those of the
            fit.
    """
    model = read_model(path, _SAVED, lifts.as_features(features))
    series = model.series
    recipe = model.recipe
    if recipe.features is None:
        if features is not None:
            fail("features", "be None: the model has none", "a function")
        return model
    if features is None:
        fail("features", "be given again: files do not hold functions", "None")
    probes = series.observed[:_NUM_PROBES]
    values = lifts.state_features(recipe.features, probes, recipe.state_shape)
    expected = series.features[:_NUM_PROBES]
    tolerance = 1e-5 * np.abs(expected).max()
    if values.shape != expected.shape or not np.abs(values - expected).max() <= tolerance:
        received = "other values at its first states"
        fail("features", "be the function of the fit", received, "Load the parameters of the fit")
    return model
