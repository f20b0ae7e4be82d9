"""Drawing of the figure `spectra` from its dataset."""

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import plotting


def kept(dataset: xarray.Dataset, system: str) -> xarray.Dataset:
    """Return a system's results, with one component per conjugate pair, because both have the same rate."""
    one = dataset.sel(systems=system)
    return one.isel(
        components=np.flatnonzero(one.exact.values[: int(one.num_components)].imag >= 0)
    )


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw rates, leading eigenfunction and errors, a row per system, 6.5 inches wide."""
    with plotting.house_style():
        rows = dataset.sizes["systems"]
        figure, axes = plt.subplots(rows, 3, figsize=(6.5, 0.7 + 1.6 * rows), squeeze=False)
        for row, name in zip(axes, dataset.systems.values, strict=True):
            one = kept(dataset, name)
            _draw_rates(row[0], one)
            row[0].set_title(name)
            for index, (title, functions) in enumerate(
                zip(one.estimators.values, one.functions.values, strict=True)
            ):
                plotting.band(
                    row[1], one.grid.values, functions, label=title, **plotting.look(index)
                )
            row[1].plot(
                one.grid.values, one.exact_functions.values, "k--", linewidth=0.8, label="exact"
            )
            row[1].set(title="leading eigenfunction", xlabel="state")
            _draw_errors(row[2], one.error)
        plotting.letter(*axes.flat)
        handles = axes[0, 2].get_legend_handles_labels(), axes[0, 1].get_legend_handles_labels()
        drawn = dict(zip(handles[0][1] + handles[1][1], handles[0][0] + handles[1][0], strict=True))
        figure.legend(
            drawn.values(), drawn.keys(), loc="outside upper center", ncols=3, handlelength=3
        )
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def _draw_rates(axes: Axes, one: xarray.Dataset) -> None:
    """Draw estimated over exact rates, with mean and interval."""
    axes.axhline(1, color="black", linestyle="--", linewidth=0.8)
    for index, rate in enumerate(one.rate.values[:, :, -1]):
        look, ratios = plotting.look(index), rate / one.exact_rate.values
        places = np.arange(ratios.shape[1]) + 0.2 * (index - 1.5)
        summary = plotting.summarise(ratios)
        axes.plot(
            np.tile(places, (len(ratios), 1)) - 0.04,
            ratios,
            ".",
            color=look["color"],
            markersize=2,
            alpha=0.6,
        )
        style = {
            "fmt": look["marker"],
            "color": look["color"],
            "markersize": 3,
            "linewidth": 0.8,
            "capsize": 1.5,
        }
        axes.errorbar(places + 0.04, summary.mean, summary.interval()[1] - summary.mean, **style)
    ticks = [f"{rate:.3g}" for rate in one.exact_rate.values]
    axes.set_xticks(range(len(ticks)), ticks)
    axes.set(
        xlabel="exact rate per lag", ylabel="estimated over exact", xlim=(-0.5, len(ticks) - 0.5)
    )


def _draw_errors(axes: Axes, errors: xarray.DataArray) -> None:
    lengths, guide = errors.lengths.values, np.nan
    for index, (title, error) in enumerate(
        zip(errors.estimators.values, errors.values, strict=True)
    ):
        summary = plotting.summarise(error)
        low, high = summary.interval()
        spread = [np.minimum(summary.mean - low, 0.9 * summary.mean), high - summary.mean]
        look = {**plotting.look(index), "markevery": 1}
        axes.errorbar(
            lengths * 1.04 ** (index - 1.5), summary.mean, spread, label=title, capsize=1.5, **look
        )
        guide = summary.mean[0]
    axes.plot(
        lengths,
        guide * (lengths / lengths[0]) ** -0.5,
        color="black",
        linestyle=":",
        label="$n^{-1/2}$",
    )
    axes.set(xscale="log", title="largest relative error", xlabel="transitions")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set_xticks([], minor=True)
    plotting.log_height(axes)
