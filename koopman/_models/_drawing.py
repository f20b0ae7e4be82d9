"""Figures of models, sums of exponentials, and scans of lags."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import plotting
from koopman._models._bands import in_columns
from koopman._models._rates import falling_order
from koopman._models._trajectories import as_dates

_NUM_MODES = 4
"""Number of leading modes with a colour and a shape."""
_NUM_RATES = 12
"""Largest number of modes in the panel of rates."""
_NUM_COLUMNS = 3
"""Largest number of states in the panel of forecasts."""
_NUM_TICKS = 8
_MARGIN = 0.08
"""Space beside points, in widths of a panel."""
_SPACING = 8
"""Pixels of a forecast are farther from each other than an image's size divided by this."""
_AXES_OF_IMAGE = ("channel", "row", "column")
_FORECAST = "forecast_"
_NUM_POINTS = 400
"""Number of times at which a sum of exponentials is drawn."""


def plot_model(dataset: xarray.Dataset) -> Figure:
    """Return a figure of eigenvalues, rates with intervals, modes and a forecast.

    Args:
        dataset: Result of `KoopmanModel.report`.
    """
    with plotting.house_style():
        figure, axes = plt.subplots(2, 2, figsize=(6.5, 4.2))
        _draw_eigenvalues(axes[0, 0], dataset)
        _draw_rates(axes[0, 1], dataset)
        _draw_shapes(axes[1, 0], dataset)
        _draw_forecast(axes[1, 1], dataset)
        plotting.letter(*axes.flat)
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def report_of(model: Any, steps: int, level: float) -> xarray.Dataset:
    """Return the arrays of the figure of a `KoopmanModel`."""
    series = model.series
    meaning = model.meaning
    # The last piece of the first run ends where its forecast starts.
    first_run = series.run_of_piece[0]
    piece = int(np.flatnonzero(series.run_of_piece == first_run)[-1])
    end = int(series.lengths[: piece + 1].sum())
    start = end - min(int(series.lengths[piece]), 2 * steps * model.recipe.lag)
    states = in_columns(series.observed[start:end], model.recipe.state_basis)
    inputs = None
    title = f"run {meaning.labels[first_run]}"
    if meaning.input_columns:
        inputs = np.tile(series.inputs.mean(0), (steps, 1))
        title = f"{title}, mean inputs"
    forecast = model.predict(steps, inputs=inputs, level=level)
    elapsed = forecast.step.values * model.recipe.lag * meaning.time_step
    times = np.append(series.times[start:end], series.times[end - 1] + elapsed)
    return _report(model.mode_table(level), states, times, forecast, meaning, title)


def draw_exponentials(fitted: Any, steps: int) -> Figure:
    """Draw rates, mode shapes, and the fit with a forecast of a sum of exponentials."""
    trajectories = fitted.trajectories
    states = trajectories.runs[0][-2 * steps :]
    times = trajectories.times[0][-2 * steps :]
    grid = np.linspace(times[0], times[-1] + steps * trajectories.time_step, _NUM_POINTS)
    forecast = fitted.predict(as_dates(grid, trajectories.has_dates))
    order = falling_order(fitted.share, fitted.growth)
    rates = fitted.growth + 1j * fitted.angular_frequency
    eigenvalues = np.exp(rates * trajectories.time_step)[order]
    shapes = fitted.amplitudes[0][order].reshape(-1, *trajectories.state_shape)
    times = np.append(times, grid)
    title = f"run {trajectories.labels[0]}"
    table = (fitted.rates(), eigenvalues, shapes)
    return plot_model(_report(table, states, times, forecast, trajectories, title))


def _report(
    table: Any, states: np.ndarray, times: np.ndarray, forecast: Any, meaning: Any, title: str
) -> xarray.Dataset:
    """Return all arrays of a figure; times are those of the observed states and the forecast."""
    rates, eigenvalues, shapes = table
    forecast = forecast.isel(run=0).drop_vars(["run", "time", "column"], errors="ignore")
    forecast = forecast.rename({name: f"{_FORECAST}{name}" for name in forecast})
    clock = "time (day)" if meaning.unit == "day" else meaning.unit
    axes = forecast[f"{_FORECAST}mean"].dims[1:]
    if shapes.ndim > 1 + len(axes):
        axes = [f"state_{axis}" for axis in _AXES_OF_IMAGE[1 - shapes.ndim :]]
    arrays = {
        "reason": ("mode", rates.reason.values.astype(str)),
        "eigenvalues": ("mode", eigenvalues),
        "shapes": (("mode", *axes), shapes),
        "observed": (("observation", "state"), states.reshape(len(states), -1)),
        "observation_time": ("observation", times[: len(states)]),
        "time": ("step", times[len(states) :]),
        "labels": ("state", list(map(str, meaning.columns))),
    }
    facts = {
        "clock": "date" if meaning.has_dates else clock,
        "title": title,
        "has_dates": int(meaning.has_dates),
    }
    dataset = rates.drop_vars("reason").assign(dict(forecast.variables) | arrays)
    return dataset.set_coords("time").assign_attrs(facts)


def plot_lags(dataset: xarray.Dataset) -> Figure:
    """Return a figure of rates over the lag, and of the Chapman-Kolmogorov test.

    Args:
        dataset: Result of `scan_lags`.

    Returns:
        A Matplotlib figure: growth and frequency of the leading modes with intervals, which do not
        change over lags at which the model is right; and eigenvalues measured at multiples of the
        lag, over those that the model predicts, with intervals.
    """
    unit = dataset.attrs["unit"]
    with plotting.house_style():
        options: Any = {"figsize": (6.5, 2.2), "gridspec_kw": {"wspace": 0.08}}
        figure, axes = plt.subplots(1, 3, **options)
        for index in range(min(dataset.sizes["mode"], _NUM_MODES)):
            mode = dataset.isel(mode=index)
            style: Any = {"color": plotting.color(index), "capsize": 1.5, "label": f"mode {index}"}
            for panel, name in zip(axes, ("growth", "frequency"), strict=False):
                panel.errorbar(mode.lag.values, mode[name].values, _errors(mode, name), **style)
            for position, lag in enumerate(mode.lag.values):
                _draw_lag(axes, mode.sel(lag=lag), index, position)
        for position, lag in enumerate(dataset.lag.values):
            marker = plotting.look(position)["marker"]
            axes[2].plot([], [], marker, color="0.4", markersize=3, label=f"lag {lag}")
        axes[0].set(ylabel=f"growth (1/{unit})", xlabel="lag (step)", title="open: not resolved")
        axes[1].set(ylabel=f"frequency (cycles/{unit})", xlabel="lag (step)")
        axes[2].axline((0, 0), slope=1, color="0.7", linewidth=0.6, zorder=0)
        axes[2].set(xlabel="predicted $\\lambda^k$", ylabel="measured")
        axes[2].set(title="Chapman-Kolmogorov test\nopen: failed")
        axes[0].legend()
        axes[2].legend(loc="upper left")
        plotting.letter(*axes)
    plt.close(figure)
    return figure


def _draw_lag(axes: Any, point: xarray.Dataset, index: int, position: int) -> None:
    """Draw the dots of a mode at a lag: rates, and the test with a marker of the lag."""
    for panel, name in zip(axes, ("growth", "frequency"), strict=False):
        panel.plot(point.lag, point[name], "o", **_marker(index, bool(point.resolved)))
    half_width = 0.5 * (point.ck_high - point.ck_low)
    style: Any = {"fmt": plotting.look(position)["marker"], "capsize": 1.5}
    style |= _marker(index, bool(point.ck_passed))
    axes[2].errorbar(point.ck_predicted, point.ck_measured, xerr=half_width, **style)


def _marker(index: int, is_resolved: bool) -> dict[str, Any]:
    """Return the style of a mode: grey from the fifth on, open if it is not resolved."""
    color = plotting.color(index) if index < _NUM_MODES else "0.6"
    face = color if is_resolved else "none"
    return {"color": color, "markerfacecolor": face, "markersize": 3}


def _errors(values: xarray.Dataset, name: str) -> np.ndarray:
    """Return the distances to both ends of intervals, [2, n]."""
    centre = values[name]
    distances = [centre - values[f"{name}_low"], values[f"{name}_high"] - centre]
    return np.reshape(distances, (2, -1))


def _draw_eigenvalues(axes: Axes, dataset: xarray.Dataset) -> None:
    """Draw eigenvalues and the circle on which nothing decays."""
    angles = np.linspace(0, 2 * np.pi, 200)
    axes.plot(np.cos(angles), np.sin(angles), color="0.7", linewidth=0.6)
    for index in range(dataset.sizes["mode"] - 1, -1, -1):
        value = complex(dataset.eigenvalues[index])
        label = f"mode {index}" if index < _NUM_MODES else None
        marker: Any = _marker(index, bool(dataset.resolved[index]))
        heights = [value.imag, -value.imag]
        axes.plot([value.real] * 2, heights, "o", label=label, **marker)
    axes.set_aspect("equal", adjustable="datalim")
    axes.set(xlabel="real part", ylabel="imaginary part", title="eigenvalues per lag")
    axes.legend(reverse=True)


def _draw_rates(axes: Axes, dataset: xarray.Dataset) -> None:
    """Draw growth over frequency, with intervals of resolved modes."""
    axes.axhline(0, color="0.7", linewidth=0.6)
    rates = dataset.isel(mode=slice(_NUM_RATES))
    growth = rates.growth.values
    is_resolved = rates.resolved.values
    # Noise may decay a hundred times faster than the modes that are resolved.
    scale = growth[is_resolved] if is_resolved.any() else growth[:1]
    limit = 3 * np.abs(scale).max()
    for index in np.flatnonzero(np.abs(growth) <= limit)[::-1].tolist():
        mode = rates.isel(mode=index)
        errors = (_errors(mode, "growth"), _errors(mode, "frequency"))
        marker = _marker(index, bool(is_resolved[index]))
        frequency = float(mode.frequency)
        axes.errorbar(frequency, growth[index], *errors, fmt="o", capsize=1.5, **marker)
    unit = rates.attrs["unit"]
    level = 100 * rates.attrs["level"]
    axes.set(
        xlabel=f"frequency (cycles/{unit})",
        ylabel=f"growth (1/{unit})",
        title=f"rates, {level:.3g} % intervals; open: not resolved",
    )
    highest = np.fmax(rates.frequency, rates.frequency_high)[np.abs(growth) <= limit].max()
    width = float(highest) or 1.0
    axes.set_xlim(-_MARGIN * width, (1 + _MARGIN) * width)
    axes.margins(y=_MARGIN)


def _draw_shapes(axes: Axes, dataset: xarray.Dataset) -> None:
    """Draw moduli of the leading modes over columns, or real parts of images."""
    shapes = dataset.shapes.values[:_NUM_MODES]
    shares = dataset.share.values
    axes.set(title="mode shapes")
    if shapes.ndim > 2:
        tiles = []
        labels = []
        for index, shape in enumerate(shapes.reshape(len(shapes), -1, shapes.shape[-1])):
            # The phase with the largest real part.
            phase = np.exp(-0.5j * np.angle(np.sum(shape**2)))
            tile = _normalised(np.real(shape * phase))
            tiles.append(np.pad(tile, ((0, 0), (0, 1)), constant_values=np.nan))
            labels.append(f"mode {index}\nshare {shares[index]:.2f}")
        mosaic = np.concatenate(tiles, 1)[:, :-1]
        axes.imshow(mosaic, cmap="RdBu_r", vmin=-1, vmax=1)
        axes.set_frame_on(False)
        centres = (np.arange(len(tiles)) + 0.5) * tiles[0].shape[1] - 1
        axes.set_xticks(centres, labels)
        axes.set_yticks([])
        return
    positions = np.arange(shapes.shape[1])
    spacing = -(-len(positions) // _NUM_TICKS)
    for index, shape in enumerate(np.abs(shapes)):
        look: Any = plotting.look(index) | {"markevery": spacing}
        label = f"mode {index}, share {shares[index]:.2f}"
        axes.plot(positions, _normalised(shape), label=label, **look)
    axes.set_xticks(positions[::spacing], dataset["labels"].values[::spacing])
    axes.set(xlabel="column", ylabel="modulus / largest", ylim=(0, 1.3))
    axes.legend(loc="upper right", ncols=2)


def _normalised(values: np.ndarray) -> np.ndarray:
    return values / max(np.abs(values).max(), np.finfo(float).tiny)


def _draw_forecast(axes: Axes, dataset: xarray.Dataset) -> None:
    """Draw observations, and forecasts with the bands of their means and of observations."""
    has_dates = bool(dataset.attrs["has_dates"])
    observation_time = as_dates(dataset.observation_time.values, has_dates)
    time = as_dates(dataset.time.values, has_dates)
    states = dataset.observed.values
    axes.margins(y=0.15)
    columns = _leading_columns(states, dataset.shapes.values)
    for index, column in enumerate(columns):
        bands = {}
        for name in ("mean", "mean_low", "mean_high", "low", "high"):
            values = dataset[f"{_FORECAST}{name}"].values
            bands[name] = values.reshape(len(time), -1)[:, column]
        style: dict[str, Any] = {"color": plotting.color(index)}
        axes.plot(observation_time, states[:, column], ".", markersize=1.5, **style)
        axes.plot(time, bands["mean"], label=_label(dataset, column), **style)
        style["linewidth"] = 0
        axes.fill_between(time, bands["low"], bands["high"], alpha=0.2, **style)
        axes.fill_between(time, bands["mean_low"], bands["mean_high"], alpha=0.4, **style)
    axes.axvline(observation_time[-1], color="0.5", linestyle="--", linewidth=0.6, zorder=0)
    offset: Any = {"textcoords": "offset points", "fontsize": 5, "color": "0.4"}
    anchor = (observation_time[-1], 0)
    axes.annotate(" data end", anchor, (0, 2), xycoords=("data", "axes fraction"), **offset)
    axes.set(xlabel=dataset.attrs["clock"], title=f"forecast, {dataset.attrs['title']}")
    axes.legend(loc="upper left", ncols=_NUM_COLUMNS)
    if has_dates:
        axes.tick_params(axis="x", labelrotation=20)


def _leading_columns(states: np.ndarray, shapes: np.ndarray) -> list[int]:
    """Return the columns with the largest variance; for images a pixel per leading mode."""
    if shapes.ndim == 2:
        largest = np.argsort(-np.var(states, 0), kind="stable")[:_NUM_COLUMNS]
        return np.sort(largest).tolist()
    image = shapes.shape[1:]
    positions = np.stack(np.unravel_index(np.arange(states.shape[1]), image), -1)
    # Pixels beside each other have curves that coincide.
    is_free = np.ones(len(positions), bool)
    pixels = []
    for shape in np.abs(shapes[:_NUM_COLUMNS]).reshape(-1, len(positions)):
        if is_free.any():
            pixels.append(int(np.argmax(np.where(is_free, shape, -1.0))))
            distance = np.abs(positions - positions[pixels[-1]])
            is_free &= np.any(_SPACING * distance > image, -1)
    return pixels


def _label(dataset: xarray.Dataset, column: int) -> str:
    """Return the label of a column, or the position of a pixel."""
    image = dataset.shapes.shape[1:]
    if len(image) == 1:
        return str(dataset["labels"].values[column])
    position = np.unravel_index(column, image)
    return ", ".join(map("{} {}".format, _AXES_OF_IMAGE[-len(image) :], position))
