"""Figures of models, sums of exponentials, and scans of lags."""

from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Complex, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import plotting
from koopman._models._rates import falling_order
from koopman._models._trajectories import as_dates

_NUM_MODES = 4
"""Number of leading modes with a colour and a shape."""
_NUM_RATES = 12
"""Largest number of modes in the panel of rates."""
_NUM_COLUMNS = 3
"""Largest number of states in the panel of forecasts."""
_NUM_TICKS = 8
_FORECAST = "forecast_"
_NUM_POINTS = 400
"""Number of times at which a sum of exponentials is drawn."""
_BAND = {"alpha": 0.2, "linewidth": 0}
_MEAN_BAND = {"alpha": 0.4, "linewidth": 0}


class Scene(NamedTuple):
    """Arrays of a figure.

    Attributes:
        rates: Table of rates.
        values: Eigenvalues per lag, or rates per unit of time, in the order of `rates`: [modes].
        is_discrete: True for eigenvalues per lag.
        shapes: Amplitudes of modes, [modes, *state].
        times: Times of the observations of a run.
        states: Observations, [n, columns].
        forecast: Forecast of this run over `step` and the axes of a state.
        columns: Labels of the states.
        clock: Label of the axis of time.
        title: Title of the forecast.
    """

    rates: xarray.Dataset
    values: Complex[np.ndarray, " modes"]
    is_discrete: bool
    shapes: Complex[np.ndarray, "modes *state"]
    times: Any
    states: Float[np.ndarray, "n columns"]
    forecast: xarray.Dataset
    columns: list[str]
    clock: str
    title: str


def plot_model(dataset: xarray.Dataset) -> Figure:
    """Return a figure of eigenvalues, rates with intervals, modes and a forecast.

    Args:
        dataset: Result of `KoopmanModel.report`.
    """
    has_dates = bool(dataset.attrs["has_dates"])
    forecast = dataset[[name for name in dataset if str(name).startswith(_FORECAST)]]
    forecast = forecast.rename({name: str(name)[len(_FORECAST) :] for name in forecast})
    forecast = forecast.assign_coords(time=("step", as_dates(dataset.time.values, has_dates)))
    scene = Scene(
        dataset,
        dataset.eigenvalues.values,
        True,
        dataset.shapes.values,
        as_dates(dataset.observation_time.values, has_dates),
        dataset.observed.values,
        forecast,
        dataset["labels"].values.tolist(),
        dataset.attrs["clock"],
        dataset.attrs["title"],
    )
    return draw_scene(scene)


def report_of(model: Any, steps: int, level: float) -> xarray.Dataset:
    """Return the arrays of the figure of a `KoopmanModel`."""
    table = model.mode_table(level)
    series = model.series
    meaning = model.meaning
    # The last piece of the first run ends where its forecast starts.
    first_run = series.run_of_piece[0]
    piece = int(np.flatnonzero(series.run_of_piece == first_run)[-1])
    end = int(series.lengths[: piece + 1].sum())
    start = max(end - int(series.lengths[piece]), end - 2 * steps * model.recipe.lag)
    states = series.observed[start:end]
    if model.recipe.state_basis is not None:
        states = np.asarray(model.recipe.state_basis.states(states))
    inputs = None
    title = f"run {meaning.labels[first_run]}"
    if series.inputs is not None:
        inputs = np.tile(series.inputs.mean(0), (steps, 1))
        title = f"{title}, mean inputs"
    forecast = model.predict(steps, inputs=inputs, level=level).isel(run=0)
    start_time = series.times[end - 1]
    elapsed = forecast.step.values * model.recipe.lag * meaning.time_step
    forecast = forecast.drop_vars("run").assign_coords(time=("step", start_time + elapsed))
    forecast = forecast.rename({name: f"{_FORECAST}{name}" for name in forecast})
    state_axes = forecast[f"{_FORECAST}mean"].dims[1:]
    arrays = {
        "reason": ("mode", table.rates.reason.values.astype(str)),
        "eigenvalues": ("mode", table.eigenvalues),
        "shapes": (("mode", *state_axes), table.shapes),
        "observed": (("observation", "state"), states.reshape(len(states), -1)),
        "observation_time": ("observation", series.times[start:end]),
        "labels": ("state", list(map(str, meaning.columns))),
    }
    facts = {"clock": _clock(meaning.unit, meaning.has_dates), "title": title}
    facts = table.rates.attrs | facts | {"has_dates": int(meaning.has_dates)}
    dataset = table.rates.drop_vars("reason").assign(dict(forecast.variables) | arrays)
    return dataset.drop_vars("column", errors="ignore").assign_attrs(facts)


def draw_exponentials(fitted: Any, steps: int) -> Figure:
    """Draw rates, mode shapes, and the fit with a forecast of a sum of exponentials."""
    trajectories = fitted.trajectories
    times = trajectories.times[0][-2 * steps :]
    end = times[-1] + steps * trajectories.time_step
    grid = as_dates(np.linspace(times[0], end, _NUM_POINTS), trajectories.has_dates)
    order = falling_order(fitted.share, fitted.growth)
    scene = Scene(
        fitted.rates(),
        (fitted.growth + 1j * fitted.angular_frequency)[order],
        False,
        fitted.amplitudes[0][order],
        as_dates(times, trajectories.has_dates),
        trajectories.runs[0][-2 * steps :],
        fitted.predict(grid).isel(run=0),
        list(map(str, trajectories.columns)),
        _clock(trajectories.unit, trajectories.has_dates),
        f"run {trajectories.labels[0]}",
    )
    return draw_scene(scene)


def plot_lags(dataset: xarray.Dataset) -> Figure:
    """Return a figure of rates over the lag, and of the Chapman-Kolmogorov test.

    Args:
        dataset: Result of `scan_lags`.

    Returns:
        A Matplotlib figure: growth and frequency of the leading modes with intervals, which do not
        change over lags at which the model is right; and eigenvalues measured at multiples of the
        lag, over those that the model predicts, with intervals.
    """
    with plotting.house_style():
        figure, axes = plt.subplots(1, 3, figsize=(6.5, 2.2))
        for index in range(min(dataset.sizes["mode"], _NUM_MODES)):
            mode = dataset.isel(mode=index)
            for panel, name in zip(axes[:2], ("growth", "frequency"), strict=True):
                _draw_over_lags(panel, mode, name, index)
            _draw_consistency(axes[2], mode, index)
        unit = dataset.attrs["unit"]
        axes[0].set(ylabel=f"growth (1/{unit})", title="open: not resolved")
        axes[1].set(ylabel=f"frequency (cycles/{unit})")
        for panel in axes[:2]:
            panel.set(xlabel=f"lag ({dataset.lag.attrs.get('units', 'steps')})")
        axes[2].axline((0, 0), slope=1, color="0.7", linewidth=0.6, zorder=0)
        axes[2].set(
            xlabel="predicted $\\lambda^k$", ylabel="measured", title="Chapman-Kolmogorov test"
        )
        axes[0].legend()
        plotting.letter(*axes)
    plt.close(figure)
    return figure


def _draw_over_lags(axes: Axes, mode: xarray.Dataset, name: str, index: int) -> None:
    """Draw a rate of a mode over lags, with intervals where it is resolved."""
    lags = mode.lag.values
    values = mode[name].values
    is_resolved = mode.resolved.values
    color = _mode_color(index)
    axes.plot(lags, values, "o", color=color, markerfacecolor="none", markersize=3)
    low = mode[f"{name}_low"].values[is_resolved]
    high = mode[f"{name}_high"].values[is_resolved]
    middle = values[is_resolved]
    errors = np.stack([middle - low, high - middle])
    style = {"fmt": "o-", "color": color, "markersize": 3, "capsize": 1.5}
    axes.errorbar(lags[is_resolved], middle, errors, label=f"mode {index}", **style)


def _draw_consistency(axes: Axes, mode: xarray.Dataset, index: int) -> None:
    """Draw measured over predicted moduli, with intervals."""
    predicted = mode.ck_predicted.values.ravel()
    measured = mode.ck_measured.values.ravel()
    low = mode.ck_low.values.ravel()
    high = mode.ck_high.values.ravel()
    errors = np.abs(np.stack([predicted - low, high - predicted]))
    style = {"fmt": "o", "color": _mode_color(index), "markersize": 2, "capsize": 1}
    axes.errorbar(predicted, measured, xerr=errors, **style)


def _clock(unit: str, has_dates: bool) -> str:
    """Return the label of an axis of time."""
    if has_dates:
        return "date"
    if unit == "day":
        return "time (day)"
    return unit


def draw_scene(scene: Scene) -> Figure:
    """Draw four panels, 6.5 inches wide."""
    with plotting.house_style():
        figure, axes = plt.subplots(2, 2, figsize=(6.5, 4.2))
        _draw_values(axes[0, 0], scene)
        _draw_rates(axes[0, 1], scene.rates)
        _draw_shapes(axes[1, 0], scene)
        _draw_forecast(axes[1, 1], scene)
        plotting.letter(*axes.flat)
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def _mode_color(index: int) -> str:
    """Return the colour of a mode, grey from the fifth on."""
    return plotting.color(index) if index < _NUM_MODES else "0.6"


def _draw_values(axes: Axes, scene: Scene) -> None:
    """Draw eigenvalues and the circle on which nothing decays, or rates and that line."""
    if scene.is_discrete:
        angles = np.linspace(0, 2 * np.pi, 200)
        axes.plot(np.cos(angles), np.sin(angles), color="0.7", linewidth=0.6)
        axes.set_aspect("equal", adjustable="datalim")
        axes.set(xlabel="real part", ylabel="imaginary part", title="eigenvalues per lag")
    else:
        axes.axvline(0, color="0.7", linewidth=0.6)
        unit = scene.rates.attrs["unit"]
        axes.set(
            xlabel=f"growth (1/{unit})",
            ylabel=f"angular frequency (1/{unit})",
            title="exponentials",
        )
    is_resolved = scene.rates.resolved.values
    for index in range(len(scene.values) - 1, -1, -1):
        value = scene.values[index]
        pair = np.array([value, np.conj(value)])
        color = _mode_color(index)
        face = color if is_resolved[index] else "none"
        label = f"mode {index}" if index < _NUM_MODES else None
        axes.plot(
            np.real(pair),
            np.imag(pair),
            "o",
            color=color,
            markerfacecolor=face,
            markersize=4,
            label=label,
        )
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="best")


def _draw_rates(axes: Axes, rates: xarray.Dataset) -> None:
    """Draw growth over frequency, with intervals of resolved modes."""
    is_resolved = rates.resolved.values
    num_modes = min(rates.sizes["mode"], _NUM_RATES)
    axes.axhline(0, color="0.7", linewidth=0.6)
    # Noise may decay a hundred times faster than the modes that are resolved.
    drawn = rates.isel(mode=slice(num_modes))
    scale = drawn.growth.where(drawn.resolved)
    if not is_resolved[:num_modes].any():
        scale = drawn.growth.isel(mode=slice(1))
    limit = 3 * float(abs(scale).max())
    for index in range(num_modes - 1, -1, -1):
        mode = rates.isel(mode=index)
        color = _mode_color(index)
        x = float(mode.frequency)
        y = float(mode.growth)
        if not abs(y) <= limit:
            continue
        if not is_resolved[index]:
            axes.plot(x, y, "o", color=color, markerfacecolor="none", markersize=3)
            continue
        x_error = [[x - float(mode.frequency_low)], [float(mode.frequency_high) - x]]
        y_error = [[y - float(mode.growth_low)], [float(mode.growth_high) - y]]
        axes.errorbar(x, y, y_error, x_error, fmt="o", color=color, markersize=3, capsize=1.5)
    unit = rates.attrs["unit"]
    level = 100 * rates.attrs["level"]
    axes.set(
        xlabel=f"frequency (cycles/{unit})",
        ylabel=f"growth (1/{unit})",
        title=f"rates, {level:.3g} % intervals; open: not resolved",
    )
    axes.set_xlim(left=min(0.0, axes.get_xlim()[0]))


def _draw_shapes(axes: Axes, scene: Scene) -> None:
    """Draw moduli of the leading modes over columns, or real parts of images."""
    shapes = scene.shapes[:_NUM_MODES]
    shares = scene.rates.share.values
    if shapes.ndim > 2:
        images = shapes.reshape(len(shapes), -1, shapes.shape[-1])
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0)
        row = []
        for image in images:
            # The phase with the largest real part.
            phase = np.exp(-0.5j * np.angle(np.sum(image**2)))
            real = np.real(image * phase)
            row.append(real / max(np.abs(real).max(), np.finfo(float).tiny))
            row.append(np.full((len(image), 1), np.nan))
        mosaic = np.concatenate(row[:-1], 1)
        axes.imshow(mosaic, cmap="RdBu_r", vmin=-1, vmax=1)
        width = images.shape[2]
        centres = (width + 1) * np.arange(len(images)) + 0.5 * (width - 1)
        labels = [f"mode {index}\nshare {shares[index]:.2f}" for index in range(len(images))]
        axes.set_xticks(centres, labels)
        axes.set_yticks([])
        axes.set(title="mode shapes")
        return
    num_columns = shapes.shape[1]
    positions = np.arange(num_columns)
    for index, shape in enumerate(np.abs(shapes)):
        look = plotting.look(index)
        look["markevery"] = max(1, num_columns // _NUM_TICKS)
        label = f"mode {index}, share {shares[index]:.2f}"
        axes.plot(positions, shape / max(shape.max(), np.finfo(float).tiny), label=label, **look)
    ticks = positions[:: -(-num_columns // _NUM_TICKS)]
    axes.set_xticks(ticks, [scene.columns[tick] for tick in ticks])
    axes.set_ylim(0, 1.3)
    axes.set(xlabel="column", ylabel="modulus / largest", title="mode shapes")
    axes.legend(loc="upper right", ncols=2)


def _draw_forecast(axes: Axes, scene: Scene) -> None:
    """Draw observations, and forecasts with the bands of their means and of observations."""
    forecast = scene.forecast
    time = forecast.time.values
    variances = np.nan_to_num(np.var(scene.states, 0))
    chosen = np.sort(np.argsort(-variances, kind="stable")[:_NUM_COLUMNS])
    bands = {}
    for name in ("mean", "mean_low", "mean_high", "low", "high"):
        values = forecast[name].values
        bands[name] = values.reshape(len(time), -1)
    for index, column in enumerate(chosen):
        color = plotting.color(index)
        axes.plot(scene.times, scene.states[:, column], ".", color=color, markersize=1.5)
        label = scene.columns[column]
        if scene.shapes.ndim > 2:
            label = f"pixel {label}"
        axes.plot(time, bands["mean"][:, column], color=color, label=label)
        low = bands["low"][:, column]
        high = bands["high"][:, column]
        axes.fill_between(time, low, high, color=color, **_BAND)
        low = bands["mean_low"][:, column]
        high = bands["mean_high"][:, column]
        axes.fill_between(time, low, high, color=color, **_MEAN_BAND)
    axes.set(xlabel=scene.clock, title=f"forecast, {scene.title}")
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + 0.15 * (high - low))
    axes.legend(loc="upper left", ncols=_NUM_COLUMNS)
    if scene.clock == "date":
        axes.tick_params(axis="x", labelrotation=20)
