"""Models of trajectories: one entry from data to rates, forecasts and files."""

import dataclasses
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Array, Complex, Float, Int

from dissociation._core.checks import (
    check_count,
    check_known,
    check_level,
    fail,
    fail_kind,
)
from dissociation._core.columns import Reading
from dissociation._core.types import Size
from dissociation._core.validation import validated
from koopman._models._block_sums import MIN_BLOCKS, Replicates, assign_blocks, replicate
from koopman._models._forecasts import Forecast, bands, replicated_forecasts
from koopman._models._inputs import (
    InputSystem,
    input_system,
    refuse_singular,
    replicated_systems,
    shares,
    simulate,
    spectrum_of,
    with_eigenvalues,
)
from koopman._models._intervals import (
    Intervals,
    few_pairs,
    jackknife_error,
    rate_intervals,
    student_quantile,
)
from koopman._models._lifting import (
    Lifted,
    Lifting,
    Recipe,
    as_features,
    basis_of_states,
    delay_rows,
    has_levels,
    lift_rows,
    padded,
    pair_indices,
    state_features,
    threshold_rank,
    working_dtype,
)
from koopman._models._rates import RateEstimates, falling_order, rates_dataset, rates_summary
from koopman._models._trajectories import (
    Trajectories,
    as_coordinates,
    check_columns,
    cut_at_gaps,
    read_trajectories,
)
from koopman._operators._diagnose import findings_of
from koopman._operators._estimators import Estimator, PrincipalComponents, ReducedRank, Ridge
from koopman._operators._findings import warn_of
from koopman._operators._fit import fit
from koopman._operators._forecast import predict
from koopman._operators._kernels import Kernel, Operator, as_module
from koopman._operators._pairs import Moments
from koopman._operators._spectrum import decompose

_KINDS: dict[type, str] = {
    Ridge: "ridge",
    PrincipalComponents: "principal",
    ReducedRank: "reduced",
}
_CONSTANT = 0.99
"""Squared mean of an eigenfunction, over its mean square, from which on it is the constant."""
_LARGE_QR = 2**27
"""Rows times columns squared from which on `fit` would compile for every number of rows."""
_STATE_AXES = ("channel", "height", "width")


class Meaning(NamedTuple):
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
        selected: Columns of frames that were chosen, or None.
    """

    columns: tuple[Any, ...]
    input_columns: tuple[Any, ...]
    labels: tuple[Any, ...]
    time_step: float
    unit: str
    has_dates: bool
    time: Any
    run: Any
    selected: Any


class Series(NamedTuple):
    """States of all pieces of runs below each other.

    Attributes:
        observed: States, or their coordinates: [n, o].
        coordinates: Features of every state, [n, f]; None where they are the states.
        inputs: Inputs at the same times, [n, m], or None.
        times: Times, [n].
        lengths: Numbers of states of the pieces, [pieces].
        run_of_piece: Index of the run, [pieces].
    """

    observed: Float[np.ndarray, "n o"]
    coordinates: Float[np.ndarray, "n f"] | None
    inputs: Float[np.ndarray, "n m"] | None
    times: Float[np.ndarray, " n"]
    lengths: Int[np.ndarray, " pieces"]
    run_of_piece: Int[np.ndarray, " pieces"]

    @property
    def features(self) -> Float[np.ndarray, "n f"]:
        """Return the features of every state."""
        return self.observed if self.coordinates is None else self.coordinates


class ModeTable(NamedTuple):
    """Modes in the order of `KoopmanModel.rates`.

    Attributes:
        rates: Result of `KoopmanModel.rates`.
        eigenvalues: Eigenvalues per lag, the one of a pair with positive imaginary part: [modes].
        shapes: Amplitudes of the modes, [modes, *state].
    """

    rates: Any
    eigenvalues: Complex[np.ndarray, " modes"]
    shapes: Complex[np.ndarray, "modes *state"]


class Starts(NamedTuple):
    """Pasts from which forecasts start.

    Attributes:
        rows: Rows of delays, newest first: [runs, k].
        inputs: Last inputs, in the order of time: [runs, delays - 1, m].
        times: Times of the last states, [runs].
        labels: Labels of the runs.
    """

    rows: Float[np.ndarray, "runs k"]
    inputs: Float[np.ndarray, "runs past m"] | None
    times: Float[np.ndarray, " runs"]
    labels: list[Any]


class KoopmanModel(eqx.Module):
    """Model of trajectories that `fit_model` returns.

    Its operator acts on features of the last `num_delays` states. Methods that return a Dataset
    need known values; `model.lift` and `model.operator` may be used under `jax.jit`, `jax.vmap` and
    `jax.grad`.

    Attributes:
        recipe: Estimator, lag, delays, features and kernel.
        lifting: Map from the last states to features.
        latent_operator: Operator on these features, or None with inputs.
        system: Coefficients with inputs, or None.
        series: Training states.
        rows: Features of all training times, about 1 in size: [rows, r].
        scale: Root mean squares of the features, [r].
        alpha: Tikhonov regularisation.
        meaning: Names and units.
    """

    recipe: Recipe
    lifting: Lifting
    latent_operator: Operator | None
    system: InputSystem | None
    series: Series
    rows: Float[Array | np.ndarray, "rows r"]
    scale: Float[Array | np.ndarray, " r"]
    alpha: float | Array | np.ndarray
    meaning: Meaning = eqx.field(static=True)

    def __repr__(self) -> str:
        name = type(self.recipe.estimator).__name__
        num_runs = len(self.meaning.labels)
        return (
            f"KoopmanModel({name}, {num_runs} runs of {len(self.meaning.columns)} columns, "
            f"lag={self.recipe.lag}, num_delays={self.recipe.num_delays}, "
            f"time_step={self.meaning.time_step:.6g} {self.meaning.unit})"
        )

    @property
    def operator(self) -> Operator:
        """Return the operator for `koopman.predict`, `koopman.decompose` and others.

        Its features are those of `lift`, and its observable is the state one lag later.
        """
        operator = self.latent_operator
        if operator is None:
            fail(
                "operator",
                "be used without inputs",
                "a model with inputs",
                "Use model.predict and model.matrices",
            )
        basis = self.recipe.state_basis
        if basis is None:
            return dataclasses.replace(operator, observable_shape=self.lifting.state_shape)
        readout = basis.states(operator.readout)
        mean = basis.states(operator.mean_observable)
        return dataclasses.replace(
            operator,
            readout=readout,
            mean_observable=mean,
            observable_shape=self.lifting.state_shape,
        )

    def lift(self, past: Float[Array | np.ndarray, "..."]) -> Float[Array, "n r"]:
        """Return features of the last `num_delays` states, in the order of time.

        Args:
            past: States [n, num_delays, ...]; without the first axis for one state.
        """
        shape = (self.recipe.num_delays, *self.lifting.state_shape)
        if np.ndim(past) == len(shape) and np.shape(past)[0] == shape[0]:
            past = past[None]
        return self.lifting(past)

    def rates(self, level: float = 0.9) -> Any:
        """Return growth, frequency and time scale of every mode, with intervals.

        Args:
            level: Probability of the intervals, between 0 and 1.

        Returns:
            An `xarray.Dataset` over `mode`, by falling share, a conjugate pair once: `growth`
            (signed), `frequency` (cycles) and `time_scale`, each with `_low` and `_high`, which are
            NaN for modes that are not resolved; `share` of the variance; `resolved`; `reason`.

        Raises:
            ValueError: If `level` is not between 0 and 1.
        """
        return self.mode_table(level).rates

    def mode_table(self, level: float = 0.9) -> ModeTable:
        """Return the rates with eigenvalues and mode shapes in the same order."""
        check_level(level)
        check_known("rates are tables of numbers", model=self)
        spectrum = self._spectrum()
        intervals = self._intervals(spectrum.eigenvalues, level)
        estimates = intervals.with_share(spectrum.share, spectrum.eigenvalues)
        index = intervals.index
        if self.recipe.center is False and spectrum.is_constant.any():
            is_mode = ~spectrum.is_constant[index]
            index = index[is_mode]
            columns = [np.asarray(field)[is_mode] for field in estimates]
            estimates = RateEstimates(*columns)
        order = falling_order(estimates.share, estimates.growth)
        unit = self.meaning.unit
        shapes = spectrum.shapes[index[order]]
        if self.recipe.state_basis is not None:
            shapes = self.recipe.state_basis.states(shapes)
        shaped = shapes.reshape(len(order), *self.lifting.state_shape)
        dataset = rates_dataset(estimates, unit, level)
        return ModeTable(dataset, spectrum.eigenvalues[index[order]], shaped)

    def summary(self, level: float = 0.9) -> str:
        """Return the table of `rates` as a string with units."""
        return rates_summary(self.rates(level))

    def plot(self, steps: int = 50) -> Any:
        """Return a Matplotlib figure of eigenvalues, rates, modes and a forecast.

        Args:
            steps: Lags ahead of the forecast.
        """
        from koopman._models._drawing import draw_model

        return draw_model(self, steps)

    def predict(self, steps: Any, past: Any = None, inputs: Any = None, level: float = 0.9) -> Any:
        """Return forecasts with intervals of their means and bands of new observations.

        Args:
            steps: Lags ahead, 1 to `steps`, or a list of lags.
            past: The last `num_delays` states in the order of time, one array or one per run; by
                default the end of every run.
            inputs: Inputs from the last state on, [steps, m] or [run, steps, m], for a model with
                inputs. With several input delays and a `past`, the delays come before.
            level: Probability of the intervals.

        Returns:
            An `xarray.Dataset` of `mean`, `mean_low`, `mean_high`, `low` and `high` over `step`,
            `run` and `column` (images: `height` and `width`), with the coordinate `time`. Means
            have intervals from 20 blocks on. `low` and `high` add quantiles of the training errors
            at as many steps; where runs are too short for them, at the most steps that are not.

        Raises:
            ValueError: If `past` is too short or of other columns, or inputs do not fit.
        """
        check_level(level)
        check_known("forecasts are tables of numbers", model=self)
        ahead = _checked_steps(steps)
        starts = self._starts(past)
        forecast = self._forecast(starts, ahead, inputs)
        return self._dataset(bands(forecast, level, self.recipe.state_basis), starts, ahead)

    def score(self, trajectories: Any, steps: Any, inputs: Any = None) -> Any:
        """Return root mean square errors of forecasts, and of persistence.

        Args:
            trajectories: Trajectories in the form of the fit.
            steps: Lags ahead, 1 to `steps`, or a list of lags.
            inputs: Inputs of the trajectories, for a model with inputs; read from frames.

        Returns:
            An `xarray.Dataset` over `step` and `column`: `error`, and `persistence`, the error of
            the last state repeated.
        """
        check_known("scores are tables of numbers", model=self)
        ahead = _checked_steps(steps)
        recipe = self.recipe
        read = self._read(trajectories, inputs)
        cut = cut_at_gaps(read, recipe.span + recipe.lag * int(ahead.min()))
        series = _series(cut, recipe)
        forecasts = self._row_forecasts(series, self._rows_of(series), ahead)
        errors, changes = self._differences(series, forecasts, ahead)
        arrays = {"error": errors, "persistence": changes}
        variables = {}
        for name, differences in arrays.items():
            values = []
            for difference in differences:
                if recipe.state_basis is not None:
                    difference = recipe.state_basis.states(difference)
                is_empty = not len(difference)
                mean = np.nan if is_empty else np.sqrt(np.mean(difference**2, 0))
                values.append(np.broadcast_to(mean, len(self.meaning.columns)))
            variables[name] = self._with_state_axes(("step",), np.stack(values))
        return _labelled(variables, {"step": ahead} | self._state_coordinates())

    def matrices(self, level: float = 0.9) -> Any:
        """Return A, B and the intercept of x A + u B + c, with intervals.

        Args:
            level: Probability of the intervals.

        Returns:
            An `xarray.Dataset` of `A` [delay, from, to], `B` [input delay, input, to] and
            `intercept` [to], each with `_low` and `_high`, NaN below 20 blocks. The matrices of
            DMDc are the transposes.

        Raises:
            ValueError: If the model has features of states, a kernel, or images.
        """
        check_level(level)
        check_known("matrices are tables of numbers", model=self)
        recipe = self.recipe
        is_linear = recipe.features is None and recipe.kernel is None
        if not is_linear or recipe.state_basis is not None:
            fail(
                "model",
                "be linear in few states for its matrices",
                "features, a kernel, or more columns than rows",
                "Use model.operator",
            )
        system = self._system()
        replicates = self._replicates()
        ends = {"": system}
        if replicates is not None:
            ends |= self._matrix_ends(system, replicates, level)
        return self._matrix_table(ends)

    def save(self, path: str | Path) -> None:
        """Write the model to an `.npz` file, which `koopman.load_model` reads.

        Args:
            path: Name of the file.
        """
        from koopman._models._saving import save_model

        save_model(self, path)

    # -- what the methods are made of

    def _lifted(self) -> Lifted:
        rows = np.asarray(self.rows)
        scale = np.asarray(self.scale, float)
        lengths = self._row_lengths(self.series)
        alpha = float(np.asarray(self.alpha))
        lag = self.recipe.lag
        return Lifted(self.lifting, rows, scale, scale, alpha, lengths, lag, scale)

    def _row_lengths(self, series: Series) -> list[int]:
        missing = self.recipe.span - 1
        return [max(int(length) - missing, 0) for length in series.lengths]

    def _observed(self, series: Series) -> Float[np.ndarray, "rows o"]:
        """Return the observable at the times of the rows."""
        rows, _ = delay_rows(series.observed, series.lengths.tolist(), 1, self.recipe.span)
        return rows

    def _delayed(self, series: Series) -> Float[np.ndarray, "rows k"]:
        """Return delays of features of states, newest first."""
        recipe = self.recipe
        lengths = series.lengths.tolist()
        return delay_rows(series.features, lengths, recipe.num_delays, recipe.span)[0]

    def _rows_of(self, series: Series) -> Float[np.ndarray, "rows k"]:
        """Return rows from which forecasts start: features z, or delays with inputs."""
        delayed = self._delayed(series)
        if self.latent_operator is None:
            return delayed
        return self._projected(delayed)

    def _projected(self, delayed: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n r"]:
        dtype = working_dtype()
        if self.lifting.kernel_map is None:
            centred = delayed - np.asarray(self.lifting.offset, float)
            return (centred @ np.asarray(self.lifting.basis, float)).astype(dtype)
        values = self.lifting.project(padded(delayed.astype(dtype)))
        return np.asarray(values)[: len(delayed)]

    def _spectrum(self) -> "_Spectrum":
        return remembered(self, "spectrum", self._computed_spectrum)

    def _computed_spectrum(self) -> "_Spectrum":
        recipe = self.recipe
        if self.system is not None:
            delayed = self._delayed(self.series)
            values, shapes, share = spectrum_of(self.system, recipe.num_delays, delayed)
            return _Spectrum(values, shapes, share, np.zeros(len(values), bool))
        assert self.latent_operator is not None
        eigensystem = decompose(self.latent_operator)
        operator = self.latent_operator
        mean = np.asarray(operator.mean_latent)
        covariance = np.asarray(operator.gram_x) - mean[:, None] * mean
        right_vectors = np.asarray(eigensystem.right)
        shapes = np.asarray(eigensystem.left).T @ np.asarray(operator.readout)
        # The mean square of an eigenfunction is 1, so that a constant has the squared mean 1.
        is_constant = np.abs(mean @ right_vectors) ** 2 > _CONSTANT
        covariance = right_vectors.conj().T @ covariance @ right_vectors
        values = np.asarray(eigensystem.eigenvalues)
        return _Spectrum(values, shapes, shares(covariance, shapes), is_constant)

    def _intervals(self, eigenvalues: Complex[np.ndarray, " r"], level: float) -> Intervals:
        lifted = self._lifted()
        num_pairs = len(lifted.pairs[0])
        num_latent = len(eigenvalues)
        residual = self._residual()
        reason = few_pairs(num_pairs, num_latent, residual)
        replicates = None if reason else self._replicates()
        richer = None
        if replicates is not None:
            richer = remembered(self, "richer", self._richer)
        return rate_intervals(
            eigenvalues,
            replicates,
            richer,
            time=self.recipe.lag * self.meaning.time_step,
            level=level,
            num_pairs=num_pairs,
            num_latent=num_latent,
            residual=residual,
        )

    def _residual(self) -> float:
        """Return the root mean square of the one-step error over the spread of the states."""
        ahead = np.asarray([1])
        rows = self._rows_of(self.series)
        if self.system is None:
            # On the host, which compiles no program.
            operator = self.latent_operator
            encode: Any = operator.encode
            latent = (rows - np.asarray(encode.offset)) @ np.asarray(encode.matrix)
            forecasts = latent @ np.asarray(operator.readout) + np.asarray(operator.mean_observable)
            forecasts = forecasts[None]
        else:
            forecasts = self._row_forecasts(self.series, rows, ahead)
        errors, _ = self._differences(self.series, forecasts, ahead)
        observed = self._observed(self.series)
        spread = np.sqrt(np.mean((observed - observed.mean(0)) ** 2))
        return float(np.sqrt(np.mean(errors[0] ** 2)) / spread)

    def _blocks(self) -> Any:
        lag = self.recipe.lag
        num_pairs = [max(length - lag, 0) for length in self._row_lengths(self.series)]
        return assign_blocks(num_pairs)

    def _replicates(self) -> Replicates | None:
        """Return replicates of the fit, or None if there are too few blocks."""
        blocks = self._blocks()
        if blocks.num_blocks < MIN_BLOCKS:
            return None
        return remembered(self, "replicates", self._computed_replicates)

    def _computed_replicates(self) -> Replicates:
        observed = self._observed(self.series)
        if self.system is not None:
            observed = self._delayed(self.series)[:, : self.series.features.shape[1]]
        replicates = _replicated(self._lifted(), self.recipe, self._blocks(), observed)
        if self.system is None:
            return replicates
        systems = replicated_systems(replicates, self._lifted(), self.system)
        return with_eigenvalues(replicates, systems, self.recipe.num_delays)

    def _richer(self) -> Replicates | None:
        """Return replicates of a silent fit with twice the delays, or None if runs are short."""
        recipe = self.recipe
        richer = dataclasses.replace(recipe, num_delays=2 * recipe.num_delays)
        skipped = richer.span - recipe.span
        lengths = self._row_lengths(self.series)
        num_pairs = [max(length - recipe.lag - skipped, 0) for length in lengths]
        blocks = self._blocks()
        is_short = sum(num_pairs) < 2 * blocks.num_blocks
        if is_short:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            series = self.series
            lifted = lift_rows(richer, series.features, series.lengths.tolist(), series.inputs)
        blocks = blocks.without(skipped)
        if self.system is None:
            return _replicated(lifted, richer, blocks, None, is_check=True)
        observed = delay_rows(series.features, series.lengths.tolist(), 1, richer.span)[0]
        replicates = _replicated(lifted, richer, blocks, observed, is_check=True)
        systems = replicated_systems(replicates, lifted, self.system)
        return with_eigenvalues(replicates, systems, richer.num_delays)

    def _system(self) -> InputSystem:
        """Return the coefficients of rows, with or without inputs."""
        if self.system is not None:
            return self.system
        width = self.series.observed.shape[1]
        assert self.latent_operator is not None
        return input_system(self.latent_operator, self._lifted(), np.eye(width), np.zeros(width))

    def _read(self, trajectories: Any, inputs: Any = None) -> Trajectories:
        """Return new trajectories, read as those of the fit."""
        meaning = self.meaning
        listed = trajectories if isinstance(trajectories, list | tuple) else [trajectories]
        is_framed = any(hasattr(table, "iloc") or hasattr(table, "dims") for table in listed)
        reading = Reading(takes_names=True)
        axis = None
        if is_framed:
            reading = _available(listed[0], meaning)
            if meaning.input_columns and inputs is None and self.system is not None:
                inputs = list(meaning.input_columns)
        else:
            num_axes = 1 + len(self.recipe.state_shape)
            if not isinstance(trajectories, list | tuple):
                if np.ndim(trajectories) > num_axes:
                    axis = 0
                elif num_axes > 2:
                    trajectories = [trajectories]
        read = read_trajectories(trajectories, reading, trajectory_axis=axis, inputs=inputs)
        if is_framed:
            check_columns("trajectories", read.columns, meaning.columns)
        width = int(np.prod(self.recipe.state_shape or (len(meaning.columns),)))
        if read.runs[0].shape[1] != width:
            fail(
                "trajectories",
                f"have the {width} columns of the fit",
                f"{read.runs[0].shape[1]} columns",
            )
        return read

    def _starts(self, past: Any) -> Starts:
        """Return the pasts of a forecast: the ends of runs, or those of a call."""
        recipe = self.recipe
        series = self.series
        if past is None:
            ends = np.cumsum(series.lengths)
            last_piece = {run: piece for piece, run in enumerate(series.run_of_piece.tolist())}
            runs = sorted(last_piece)
            newest = np.asarray([ends[last_piece[run]] for run in runs])
            indices = newest[:, None] - 1 - np.arange(recipe.num_delays)
            rows = series.features[indices].reshape(len(newest), -1)
            inputs = None
            if series.inputs is not None:
                steps = np.arange(recipe.num_input_delays - 1, 0, -1)
                inputs = series.inputs[newest[:, None] - 1 - steps]
            labels = [self.meaning.labels[run] for run in runs]
            return Starts(rows, inputs, series.times[newest - 1], labels)
        read = self._read_past(past)
        shortest = min(map(len, read.runs))
        if shortest < recipe.num_delays:
            fail(
                "past",
                f"hold the last {recipe.num_delays} states (num_delays)",
                f"{shortest}",
            )
        last_states = [states[-recipe.num_delays :] for states in read.runs]
        for states in last_states:
            if not np.isfinite(states).all():
                fail("past", "be finite", "missing or infinite states")
        coordinates = _coordinates(np.concatenate(last_states), recipe)
        shape = (len(last_states), recipe.num_delays, coordinates.shape[1])
        rows = coordinates.reshape(shape)[:, ::-1].reshape(shape[0], -1)
        times = np.asarray([times[-1] for times in read.times])
        if not any(hasattr(table, "iloc") for table in (past, *_listed(past))):
            times = np.zeros(len(times))
        return Starts(rows, None, times, list(read.labels))

    def _read_past(self, past: Any) -> Trajectories:
        try:
            return self._read(past)
        except (ValueError, TypeError) as error:
            message = str(error).replace("`trajectories", "`past", 1)
            raise type(error)(message) from None

    def _forecast(self, starts: Starts, ahead: Int[np.ndarray, " t"], inputs: Any) -> Forecast:
        series = self.series
        rows = self._rows_of(series)
        replicates = self._replicates()
        if self.system is not None:
            return self._driven_forecast(starts, ahead, inputs, replicates)
        if inputs is not None:
            fail("inputs", "be None for a model without inputs", type(inputs).__name__)
        z = self._projected(starts.rows)
        # One program forecasts from the pasts and from all training rows.
        values = self._advanced(np.concatenate([z, rows]), ahead)
        mean = values[:, : len(z)]
        errors, _ = self._differences(series, values[:, len(z) :], ahead)
        deleted = None
        if replicates is not None:
            scaled = padded(z / np.asarray(self.scale, z.dtype))
            forecasts = replicated_forecasts(replicates, scaled, ahead)
            deleted = forecasts[1 : 1 + replicates.num_blocks, :, : len(z)]
        return Forecast(mean, deleted, errors)

    def _advanced(
        self, z: Float[np.ndarray, "n r"], ahead: Int[np.ndarray, " t"]
    ) -> Float[np.ndarray, "t n o"]:
        """Return forecasts of `koopman.predict` for rows of features."""
        assert self.latent_operator is not None
        values = predict(self.latent_operator, padded(z), ahead)
        return np.asarray(values)[:, : len(z)]

    def _row_forecasts(
        self, series: Series, rows: Float[np.ndarray, "rows k"], ahead: Int[np.ndarray, " t"]
    ) -> Float[np.ndarray, "t rows o"]:
        """Return forecasts of every step from all rows of series."""
        if self.system is None:
            return self._advanced(rows, ahead)
        windows = self._windows(series, int(ahead[-1]))
        features = np.asarray(simulate(self.system, rows, windows))[ahead - 1]
        return features @ np.asarray(self.system.readout) + np.asarray(self.system.mean_observable)

    def _differences(
        self,
        series: Series,
        forecasts: Float[np.ndarray, "t rows o"],
        ahead: Int[np.ndarray, " t"],
    ) -> tuple[list[Any], list[Any]]:
        """Return errors of forecasts of every step, and changes of the state."""
        lengths = self._row_lengths(series)
        observed = self._observed(series)
        errors = []
        changes = []
        for values, step in zip(forecasts, ahead.tolist(), strict=True):
            start, end = pair_indices(lengths, self.recipe.lag * step)
            errors.append(observed[end] - values[start])
            changes.append(observed[end] - observed[start])
        return errors, changes

    def _windows(self, series: Series, steps: int) -> Float[np.ndarray, "t rows q"]:
        """Return delays of inputs of every step from all rows, zero beyond the end of a piece."""
        recipe = self.recipe
        assert series.inputs is not None
        lengths = series.lengths.tolist()
        delayed, num_rows = delay_rows(series.inputs, lengths, recipe.num_input_delays, recipe.span)
        windows = np.zeros((steps, *delayed.shape))
        for step in range(steps):
            start, later = pair_indices(num_rows, step)
            windows[step, start] = delayed[later]
        return windows

    def _driven_forecast(
        self,
        starts: Starts,
        ahead: Int[np.ndarray, " t"],
        inputs: Any,
        replicates: Replicates | None,
    ) -> Forecast:
        assert self.system is not None
        windows = self._input_windows(starts, int(ahead[-1]), inputs)
        forecasts = self._row_forecasts(self.series, self._rows_of(self.series), ahead)
        errors, _ = self._differences(self.series, forecasts, ahead)
        readout = np.asarray(self.system.readout)
        constant = np.asarray(self.system.mean_observable)
        features = np.asarray(simulate(self.system, starts.rows, windows))
        mean = features[ahead - 1] @ readout + constant
        deleted = None
        if replicates is not None:
            systems = replicated_systems(replicates, self._lifted(), self.system)
            features = np.asarray(simulate(systems, starts.rows, windows))
            features = features[1 : 1 + replicates.num_blocks]
            deleted = features[:, ahead - 1] @ readout + constant
        return Forecast(mean, deleted, errors)

    def _input_windows(
        self, starts: Starts, steps: int, inputs: Any
    ) -> Float[np.ndarray, "t runs q"]:
        """Return delays of the inputs of a forecast."""
        num_inputs = len(self.meaning.input_columns)
        num_runs = len(starts.rows)
        num_past = self.recipe.num_input_delays - 1
        num_missing = num_past if starts.inputs is None else 0
        shape = (steps + num_missing, num_inputs)
        requirement = f"have shape {list(shape)} or [{num_runs} runs, {shape[0]}, {shape[1]}]"
        if inputs is None:
            fail("inputs", requirement, "None", "The model has inputs")
        array = np.asarray(inputs, float)
        if array.ndim == 1 and num_inputs == 1:
            array = array[:, None]
        if array.shape == shape:
            array = np.broadcast_to(array, (num_runs, *shape))
        if array.shape != (num_runs, *shape):
            fail("inputs", requirement, f"shape {array.shape}")
        if not np.isfinite(array).all():
            fail("inputs", "be finite", "missing or infinite ones")
        if starts.inputs is not None:
            array = np.concatenate([starts.inputs, array], 1)
        newest = np.arange(num_past, num_past + steps)
        indices = newest[:, None] - np.arange(num_past + 1)
        windows = array[:, indices].reshape(num_runs, steps, -1)
        return np.swapaxes(windows, 0, 1)

    def _matrix_ends(
        self, system: InputSystem, replicates: Replicates, level: float
    ) -> dict[str, InputSystem]:
        """Return the ends of intervals of the coefficients."""
        systems = replicated_systems(replicates, self._lifted(), system)
        is_deleted = slice(1, 1 + replicates.num_blocks)
        ends = {}
        for sign, end in ((-1, "_low"), (1, "_high")):
            fields = []
            for name in ("coefficients", "intercept"):
                deleted = np.asarray(getattr(systems, name))[is_deleted]
                width = student_quantile(deleted, level) * jackknife_error(deleted)
                fields.append(np.asarray(getattr(system, name)) + sign * width)
            ends[end] = InputSystem(*fields, system.readout, system.mean_observable)
        return ends

    def _matrix_table(self, ends: dict[str, InputSystem]) -> Any:
        """Return the dataset of matrices and the ends of their intervals."""
        num_delays = self.recipe.num_delays
        columns = self.meaning.columns
        width = len(columns)
        variables = {}
        for end in ("", "_low", "_high"):
            system = ends.get(end, ends[""])
            factor = 1.0 if end in ends else np.nan
            coefficients = factor * np.asarray(system.coefficients, float)
            a, b = np.split(coefficients, [num_delays * width])
            variables[f"A{end}"] = (("delay", "from", "to"), a.reshape(num_delays, width, width))
            if self.system is not None:
                b = b.reshape(self.recipe.num_input_delays, -1, width)
                variables[f"B{end}"] = (("input_delay", "input", "to"), b)
            intercept = factor * np.asarray(system.intercept, float)
            variables[f"intercept{end}"] = (("to",), intercept)
        coords = {"from": list(columns), "to": list(columns)}
        if self.system is not None:
            coords["input"] = list(self.meaning.input_columns)
        return _labelled(variables, coords)

    def _with_state_axes(
        self, axes: tuple[str, ...], values: np.ndarray
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Return names of axes and values [..., *state]."""
        shape = self.recipe.state_shape
        if len(shape) < 2:
            return (*axes, "column"), values
        names = _STATE_AXES[-len(shape) :]
        return (*axes, *names), values.reshape(*values.shape[: len(axes)], *shape)

    def _state_coordinates(self) -> dict[str, Any]:
        if len(self.recipe.state_shape) > 1:
            return {}
        return {"column": list(self.meaning.columns)}

    def _dataset(self, band: Any, starts: Starts, ahead: Int[np.ndarray, " t"]) -> Any:
        """Return the dataset of a forecast."""
        variables = {}
        for name, values in band._asdict().items():
            variables[name] = self._with_state_axes(("step", "run"), values)
        elapsed = ahead * self.recipe.lag * self.meaning.time_step
        read = Trajectories([], [], None, [], (), (), (), (), 1.0, "", self.meaning.has_dates)
        time = elapsed[:, None] + starts.times
        units = {} if self.meaning.has_dates else {"units": self.meaning.unit}
        coords = {
            "step": ahead,
            "run": starts.labels,
            "time": (("step", "run"), as_coordinates(read, time), units),
        }
        return _labelled(variables, coords | self._state_coordinates())


class _Spectrum(NamedTuple):
    """Eigenvalues with mode shapes, shares, and True for the constant."""

    eigenvalues: Complex[np.ndarray, " r"]
    shapes: Complex[np.ndarray, "r o"]
    share: Float[np.ndarray, " r"]
    is_constant: np.ndarray


_memory: dict[int, dict[str, Any]] = {}
"""Results of models that methods share, by the identity of the model, while it lives."""


def remembered(model: KoopmanModel, name: str, compute: Callable[[], Any]) -> Any:
    """Return a result of a model, computed once."""
    key = id(model)
    if key not in _memory:
        _memory[key] = {}
        weakref.finalize(model, _memory.pop, key, None)
    results = _memory[key]
    if name not in results:
        results[name] = compute()
    return results[name]


def _replicated(
    lifted: Lifted,
    recipe: Recipe,
    blocks: Any,
    observed: Float[np.ndarray, "rows o"] | None,
    is_check: bool = False,
) -> Replicates:
    """Return replicates of an estimator on lifted rows."""
    if observed is not None:
        observed = observed.astype(working_dtype())
    return replicate(
        lifted.rows,
        observed,
        lifted.lengths,
        lifted.lag,
        blocks,
        lifted.scale,
        lifted.alpha,
        kind=_KINDS[type(recipe.estimator)],
        rank=recipe.estimator.size,
        center=recipe.center,
        is_check=is_check,
    )


def _labelled(variables: dict[str, Any], coords: dict[str, Any]) -> Any:
    import xarray

    return xarray.Dataset(variables, coords)


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _available(table: Any, meaning: Meaning) -> Reading:
    """Return the names of a fit that a new frame has."""
    names = set(getattr(table, "columns", ())) | set(getattr(table.index, "names", ()))
    time = meaning.time if meaning.time in names else None
    runs = list(meaning.run) if isinstance(meaning.run, tuple) else meaning.run
    listed = runs if isinstance(runs, list) else [runs]
    run = runs if all(label in names for label in listed) else None
    return Reading(time=time, run=run, columns=list(meaning.columns), takes_names=True)


def _checked_steps(steps: Any) -> Int[np.ndarray, " t"]:
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
    has_inputs = inputs is not None
    _check_options(estimator, kernel, centres, center, features)
    if has_inputs:
        _check_input_options(estimator, lag, kernel)
    elif num_input_delays != 1:
        fail("num_input_delays", "be 1 without `inputs`", num_input_delays)
    reading = Reading(time, run, columns, takes_names=True)
    read = read_trajectories(
        trajectories,
        reading,
        trajectory_axis=trajectory_axis,
        inputs=inputs,
        time_step=time_step,
    )
    num_inputs = num_input_delays if has_inputs else 0
    cut = cut_at_gaps(read, max(num_delays, num_inputs) + lag)
    width = cut.runs[0].shape[1]
    state_shape = cut.state_shape or (width,)
    state_basis = None
    observed = np.concatenate(cut.runs)
    if width > len(observed) and features is None and kernel is None:
        lengths = list(map(len, cut.runs))
        is_levelled = has_levels(estimator, width)
        state_basis, observed = basis_of_states(observed, lengths, lag, is_levelled)
    recipe = Recipe(
        estimator,
        as_features(features),
        state_basis,
        None if kernel is None else as_module(kernel),
        centres,
        lag,
        num_delays,
        num_inputs,
        center,
        state_shape,
    )
    series = _series(cut, recipe, observed)
    meaning = Meaning(
        cut.columns,
        cut.input_columns,
        cut.labels,
        cut.time_step,
        cut.unit,
        cut.has_dates,
        _hashable(time),
        _hashable(run),
        _hashable(columns),
    )
    return _fitted(recipe, series, meaning)


def _hashable(labels: Any) -> Any:
    return tuple(labels) if isinstance(labels, list) else labels


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


def _coordinates(states: Float[np.ndarray, "n d"], recipe: Recipe) -> Float[np.ndarray, "n f"]:
    """Return features of states."""
    if recipe.state_basis is not None:
        return np.asarray(recipe.state_basis.coordinates(states))
    if recipe.features is None:
        return states
    return state_features(recipe.features, states, recipe.state_shape)


def _series(
    cut: Trajectories, recipe: Recipe, observed: Float[np.ndarray, "n o"] | None = None
) -> Series:
    """Return the states of all pieces; `observed` if they are known."""
    states = np.concatenate(cut.runs)
    if observed is None:
        observed = states
        if recipe.state_basis is not None:
            observed = np.asarray(recipe.state_basis.coordinates(states))
    coordinates = None
    if recipe.features is not None:
        coordinates = state_features(recipe.features, states, recipe.state_shape)
    return Series(
        observed,
        coordinates,
        None if cut.inputs is None else np.concatenate(cut.inputs),
        np.concatenate(cut.times),
        np.asarray(list(map(len, cut.runs))),
        np.asarray(cut.run_of_piece),
    )


def _fitted(recipe: Recipe, series: Series, meaning: Meaning) -> KoopmanModel:
    """Return the model of series."""
    lengths = series.lengths.tolist()
    lifted = lift_rows(recipe, series.features, lengths, series.inputs)
    recipe = _with_rank(recipe, lifted)
    observed, _ = delay_rows(series.observed, lengths, 1, recipe.span)
    if recipe.num_input_delays:
        delayed, _ = delay_rows(series.features, lengths, recipe.num_delays, recipe.span)
        inputs, _ = delay_rows(series.inputs, lengths, recipe.num_input_delays, recipe.span)
        refuse_singular(np.concatenate([delayed, inputs], 1), inputs.shape[1])
        observed = delayed[:, : series.features.shape[1]]
    operator = _fitted_operator(recipe, lifted, observed)
    system = None
    if recipe.num_input_delays:
        system = _system_of(operator, lifted, series)
        operator = None
    return KoopmanModel(
        recipe,
        lifted.lifting,
        operator,
        system,
        series,
        lifted.rows,
        lifted.scale,
        np.asarray(lifted.alpha),
        meaning,
    )


def _with_rank(recipe: Recipe, lifted: Lifted) -> Recipe:
    """Return the recipe with a rank for "auto" that is not above the number of directions."""
    estimator = recipe.estimator
    if estimator.rank != "auto":
        return recipe
    states, _ = lifted.pairs
    width = len(lifted.squares)
    rank = threshold_rank(lifted.sizes, len(states), width)
    ranked: Any = type(estimator)
    resolved = ranked(rank, estimator.alpha, solver=estimator.solver)
    return dataclasses.replace(recipe, estimator=resolved)


def _system_of(operator: Operator, lifted: Lifted, series: Series) -> InputSystem:
    """Return the coefficients of a fit with inputs, and the map from features to states."""
    width = series.observed.shape[1]
    if series.coordinates is None:
        return input_system(operator, lifted, np.eye(width), np.zeros(width))
    mean = series.observed.mean(0)
    centre = series.coordinates.mean(0)
    readout = np.linalg.lstsq(series.coordinates - centre, series.observed - mean, rcond=1e-12)[0]
    return input_system(operator, lifted, readout, mean - centre @ readout)


def _fitted_operator(
    recipe: Recipe, lifted: Lifted, observed: Float[np.ndarray, "rows o"]
) -> Operator:
    """Return the operator of `koopman.fit` on lifted rows, and warn of what `diagnose` finds."""
    estimator = recipe.estimator
    alpha = eqx.tree_at(
        lambda estimator: estimator.alpha, estimator, lifted.alpha, is_leaf=lambda x: x is None
    )
    states, successors = lifted.pairs
    dtype = working_dtype()
    z = lifted.features.astype(dtype)
    x = z[states]
    y = z[successors]
    target = observed[successors].astype(dtype)
    num_columns = 2 * x.shape[1] + target.shape[1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if len(x) * num_columns**2 > _LARGE_QR and len(x) > num_columns:
            operator = fit(alpha, _host_moments(x, y, target, recipe.center))
        else:
            operator = fit(alpha, x, y, observable=target, center=recipe.center)
    squares = None
    if estimator.alpha is None:
        operator = dataclasses.replace(operator, given=False)
        squares = lifted.squares
    if squares is not None and recipe.kernel is None and not has_levels(estimator, len(squares)):
        columns = jax.device_put(squares.astype(dtype))
        fitting = dataclasses.replace(operator.fitting, squares=columns)
        operator = dataclasses.replace(operator, fitting=fitting)
    warn_of(findings_of(operator, x, y))
    return operator


def _host_moments(x: np.ndarray, y: np.ndarray, target: np.ndarray, center: bool) -> Moments:
    """Return `moments` by NumPy, which compiles no program for the number of rows."""
    joint = np.concatenate([x, y, target], 1)
    mean = joint.mean(0)
    centred = joint - mean if center else joint
    root = np.linalg.qr(centred, mode="r")
    means = np.split(mean, [x.shape[1], 2 * x.shape[1]])
    count = np.asarray(len(x), joint.dtype)
    fields = [count, *means, np.zeros(1 + len(mean), joint.dtype), root]
    return Moments(*map(jax.numpy.asarray, fields), center)
