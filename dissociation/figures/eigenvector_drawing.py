"""How the figure of eigenvectors is drawn, panel by panel, from its results."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissociation import plotting
from dissociation.figures.eigenvector_measures import ORDERS


def draw(results: Any) -> Figure:
    """Similarity by rank and between sizes, truncation, the spectrum of a class, an explanation; 7.2 x 6.8 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(7.2, 6.8))
        rows: Any = figure.subfigures(3, 1, height_ratios=[1.0, 1.0, 1.05])
        upper, middle, lower = rows
        _draw_similarity(upper, results)
        _draw_truncation(middle, results)
        _draw_details(lower, results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _draw_similarity(panel: Any, results: Any) -> None:
    left, right = panel.subplots(1, 2, width_ratios=[1.6, 1])
    for index, size in enumerate(results.config.sizes):
        both = results.intervals[size]["magnitude"]
        ranks = np.arange(1, both.shape[2] + 1)
        for (_, low, high), alpha in zip(both, (0.15, 0.35), strict=True):
            left.fill_between(ranks, low, high, alpha=alpha, color=f"C{index}", linewidth=0)
        left.plot(ranks, both[1, 0], color=f"C{index}", label=str(size))
    chance = (2 / (np.pi * results.leading.shape[-1])) ** 0.5
    left.axhline(chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    left.set(
        xlabel="eigenvector rank", ylabel="similarity", ylim=(0, 1.01), title=f"with size {results.config.reference}"
    )
    left.legend(title="size", fontsize="x-small", ncols=2, title_fontsize="x-small")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = [str(size) for size in results.config.sizes]
    shown = right.imshow(results.top, vmin=0, vmax=1, cmap="RdBu")
    for (i, j), value in np.ndenumerate(results.top):
        right.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize="x-small")
    right.set(xticks=range(len(names)), yticks=range(len(names)), xticklabels=names, yticklabels=names)
    right.set(xlabel="size", ylabel="size", title="leading eigenvector")
    panel.colorbar(shown, ax=right)


def _draw_truncation(panel: Any, results: Any) -> None:
    left, *drops = panel.subplots(1, 3)
    drops[1].sharey(drops[0])
    for index, size in enumerate(results.config.sizes):
        bands, style = results.bands[size], {"color": f"C{index}", "label": str(size)}
        components = np.arange(bands["error"].shape[1])
        _band(left, components, bands["error"], **style)
        for axis, order in zip(drops, ORDERS, strict=True):
            _band(axis, components[1:], bands[order], **style)
    left.set(yscale="log", ylim=(1, 100), xlabel="eigenvector rank (per digit)", ylabel="classification error (%)")
    ticks = (1, 2, 5, 10, 20, 50, 100)
    left.set_yticks(ticks, [str(tick) for tick in ticks])
    left.minorticks_off()
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis, title in zip(drops, ORDERS.values(), strict=True):
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_yscale("symlog", linthresh=0.1)
        axis.set(xlabel="eigenvector rank (per digit)", title=title)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    drops[0].set(ylabel="accuracy drop (%)")
    left.legend(title="size", fontsize="x-small", title_fontsize="x-small")


def _band(axis: Any, x: np.ndarray, band: np.ndarray, *, color: str, label: str) -> None:
    mean, low, high = band
    axis.plot(x, mean, color=color, label=label)
    if np.isfinite(low).any():
        low = np.maximum(low, 1e-3) if axis.get_yscale() == "log" else low
        axis.fill_between(x, low, high, color=color, alpha=0.2, lw=0)


def _draw_details(panel: Any, results: Any) -> None:
    halves: Any = panel.subfigures(1, 2)
    left, right = halves
    shape = (round(results.leading.shape[-1] ** 0.5), -1)
    grid = left.subplots(2, 4, width_ratios=[1.8, 1, 1, 1])
    for axis in grid[:, 0]:
        axis.remove()
    axis = left.add_subplot(grid[0, 0].get_gridspec()[:, 0])
    axis.plot(results.values, np.arange(len(results.values)), ".", markersize=2)
    axis.set(xlabel="eigenvalue", yticks=[], title=f"digit {results.config.digit}")
    axis.axvline(0, color="black", linewidth=0.5)
    for row, vectors, name in zip(grid, results.leading, ("positive", "negative"), strict=True):
        for place, vector in zip(row[1:], vectors, strict=True):
            _image(place, vector.reshape(shape))
        row[1].set_ylabel(name, fontsize="small")
    top = right.subplots(2, 3)
    top[0, 0].imshow(results.explained["image"].reshape(shape), cmap="gray")
    top[0, 0].set(xticks=[], yticks=[], title="image")
    parts = zip(top.flat[1:], *(results.explained[n] for n in ("contributions", "vectors")), strict=False)
    for place, contribution, vector in parts:
        _image(place, vector.reshape(shape))
        place.set_title(f"{contribution:+.2f}")


def _image(axis: Any, image: np.ndarray) -> None:
    limit = np.abs(image).max()
    axis.imshow(image, cmap="RdBu", vmin=-limit, vmax=limit)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
