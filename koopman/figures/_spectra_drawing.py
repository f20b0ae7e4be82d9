"""Drawing of the figure `spectra` from its dataset."""

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import plotting


def without_conjugates(dataset: xarray.Dataset, system: str) -> xarray.Dataset:
    """Return a system's results, with one component per conjugate pair."""
    # Both have the same rate.
    results = dataset.sel(systems=system)
    eigenvalues = results.exact.values[: int(results.num_components)]
    return results.isel(components=np.flatnonzero(eigenvalues.imag >= 0))


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw rates, leading eigenfunction and errors, a row per system, 6.5 inches wide."""
    with plotting.house_style():
        num_rows = dataset.sizes["systems"]
        size = (6.5, 0.7 + 1.6 * num_rows)
        figure, axes = plt.subplots(num_rows, 3, figsize=size, squeeze=False)
        for row, name in zip(axes, dataset.systems.values, strict=True):
            results = without_conjugates(dataset, name)
            _draw_rates(row[0], results)
            row[0].set_title(name)
            _draw_functions(row[1], results)
            _draw_errors(row[2], results.error)
        plotting.letter(*axes.flat)

        handles, labels = axes[0, 2].get_legend_handles_labels()
        more_handles, more_labels = axes[0, 1].get_legend_handles_labels()
        drawn = dict(zip(labels + more_labels, handles + more_handles, strict=True))
        figure.legend(
            drawn.values(), drawn.keys(), loc="outside upper center", ncols=3, handlelength=3
        )
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def _draw_rates(axes: Axes, results: xarray.Dataset) -> None:
    """Draw estimated over exact rates, with mean and interval."""
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    exact_rates = results.exact_rate.values
    num_rates = len(exact_rates)
    for index, rates in enumerate(results.rate.values[:, :, -1]):
        look = plotting.look(index)
        color = look["color"]
        ratios = rates / exact_rates
        positions = np.arange(num_rates) + 0.2 * (index - 1.5)
        dots = np.tile(positions, (len(ratios), 1)) - 0.04
        axes.plot(dots, ratios, ".", color=color, markersize=2, alpha=0.6)
        summary = plotting.summarise(ratios)
        half_width = summary.interval()[1] - summary.mean
        style = {"markersize": 3, "linewidth": 0.8, "capsize": 1.5}
        axes.errorbar(
            positions + 0.04, summary.mean, half_width, fmt=look["marker"], color=color, **style
        )
    ticks = [f"{rate:.3g}" for rate in exact_rates]
    axes.set_xticks(range(num_rates), ticks)
    axes.set(
        xlabel="exact rate per lag", ylabel="estimated over exact", xlim=(-0.5, num_rates - 0.5)
    )


def _draw_functions(axes: Axes, results: xarray.Dataset) -> None:
    """Draw the estimated and the exact leading eigenfunction."""
    grid = results.grid.values
    for index, functions in enumerate(results.functions.values):
        label = results.estimators.values[index]
        plotting.band(axes, grid, functions, label=label, **plotting.look(index))
    axes.plot(grid, results.exact_functions.values, "k--", linewidth=0.8, label="exact")
    axes.set(title="leading eigenfunction", xlabel="state")


def _draw_errors(axes: Axes, errors: xarray.DataArray) -> None:
    lengths = errors.lengths.values
    guide = np.nan
    for index, error in enumerate(errors.values):
        summary = plotting.summarise(error)
        low, high = summary.interval()
        mean = summary.mean
        spread = [np.minimum(mean - low, 0.9 * mean), high - mean]
        look = plotting.look(index)
        look["markevery"] = 1
        look["label"] = errors.estimators.values[index]
        axes.errorbar(lengths * 1.04 ** (index - 1.5), mean, spread, capsize=1.5, **look)
        guide = mean[0]
    heights = guide * (lengths / lengths[0]) ** -0.5
    axes.plot(lengths, heights, color="black", linestyle=":", label="$n^{-1/2}$")
    axes.set(xscale="log", title="largest relative error", xlabel="transitions")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xticks([], minor=True)
    plotting.log_height(axes)
