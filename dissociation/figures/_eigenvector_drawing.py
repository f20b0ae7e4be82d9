"""Drawing and texts of the figure `eigenvectors`, panel by panel, from its dataset."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.figure import Figure

from dissociation.figures._eigenvector_measures import MEASURES, ORDERS, RANKINGS, of_size, pooled
from dissociation.figures._harness import config_of, drawing
from dissociation.figures._members import data_line
from dissociation.figures._seeds import cell, named_diverged
from dissociation.plotting import _axes as plotting


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw similarity by rank and size, truncation, a class' spectrum, an explanation; 7.2 x 6.8 inches."""
    figure = plt.figure(figsize=(7.2, 6.8))
    rows: Any = figure.subfigures(3, 1, height_ratios=[1.1, 1.0, 1.05])
    upper, middle, lower = rows
    panels = [
        *_draw_similarity(upper, dataset),
        *_draw_truncation(middle, dataset),
        *_draw_details(lower, dataset),
    ]
    plotting.letter(*panels)
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    errors = [of_size(dataset, size).error.values for size in config.sizes]
    counts = ", ".join(
        f"{error.shape[1]} of size {size}" for size, error in zip(config.sizes, errors, strict=True)
    )
    return (
        "|Cosine| of equally ranked eigenvectors of bilinear networks and networks of size "
        f"{config.reference}: means "
        "over pairs and classes with 90 % intervals that resample networks (a), and the leading "
        "eigenvector between "
        "sizes (b). Test error of the leading components of every digit (c), and its excess over "
        "the whole network, in "
        "two orders of the components (d, e). "
        f"{plotting.drawn_as(*(curves for error in errors for curves in error))} "
        f"One network of size {config.reference} and digit {config.digit}: eigenvalues (f), the "
        "three most positive "
        "and three most negative eigenvectors (g), and one test image with the five components "
        "that contribute most to "
        f"its logit (h). The sign of an eigenvector is arbitrary. Networks: {counts}. Data: "
        f"{headline(dataset)}."
    )


def components_needed(
    dataset: xarray.Dataset, order: str = "magnitude", drop: float = 1e-3
) -> dict[int, float]:
    """Return by size the least number of components per class that costs less accuracy than `drop`, mean over seeds.

    It is infinite if `num_components` are too few.
    """
    added = dataset.error.sel(orders=order) - dataset.full_error
    enough = (
        plotting.summarise(added.transpose("seeds", "hidden_sizes", "components").values).mean
        < drop
    )
    sizes = dataset.hidden_sizes.values.tolist()
    return {
        size: float(row.argmax()) if row.any() else np.inf
        for size, row in zip(sizes, enough, strict=True)
    }


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    config = config_of(dataset)
    steps = {size: of_size(dataset, size).diverged_at.values for size in config.sizes}
    names = [f"size {size} seed {i}" for size, own in steps.items() for i in range(len(own))]
    gone = named_diverged(names, np.concatenate(list(steps.values())))
    return (
        f"{data_line(dataset)}, {config.num_epochs} epochs; similarities with size "
        f"{config.reference}, "
        f"pairs of different networks only{gone}"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per size: accuracy, similarity of some ranks in three orders, components needed."""
    shown = [rank for rank in (1, 5, 20) if rank <= config_of(dataset).num_ranks]
    rows = [
        ["size", "seeds", "accuracy", *(f"rank {rank}, {by}" for by in RANKINGS for rank in shown)]
    ]
    rows[0] += ["matched", "form", "needed", "needed, by contribution"]
    needed = [components_needed(dataset, order) for order in ORDERS]
    for size in dataset.hidden_sizes.values.tolist():
        one = of_size(dataset, size)
        accuracy = 100 * (1 - one.full_error.values)
        means = {
            str(name): pooled(values.values)
            for name, values in zip(MEASURES, one.similarity, strict=True)
        }
        row = [str(size), str(len(accuracy)), cell(accuracy, unit=" %")]
        row += [
            f"{means[by][rank - 1]:.3f}" if rank <= len(means[by]) else ""
            for by in RANKINGS
            for rank in shown
        ]
        row += [
            f"{means['matched'].mean():.3f}",
            f"{pooled(one.form.values[..., None]).mean():.3f}",
        ]
        rows.append(row + [f"{found[size]:g}" for found in needed])
    return rows


def _ranks(axis: Any, last: int) -> None:
    """Set ticks and limits of ranks from 1."""
    step = max(1, round(last / 6)) if last < 10 else 5
    ticks = [1, *range(step, last + 1, step)] if step > 1 else range(1, last + 1)
    axis.set_xticks(list(ticks))
    axis.set_xlim(0.5, last + 0.5)


def _draw_similarity(panel: Any, dataset: xarray.Dataset) -> tuple[Any, Any]:
    left, right = panel.subplots(1, 2, width_ratios=[1.6, 1])
    config = config_of(dataset)
    for index, size in enumerate(config.sizes):
        mean, low, high = (
            of_size(dataset, size).interval.sel(measures="magnitude", kinds="members").values
        )
        ranks = np.arange(1, len(mean) + 1)
        left.fill_between(ranks, low, high, alpha=0.25, color=plotting.color(index), linewidth=0)
        left.plot(ranks, mean, label=str(size), **plotting.look(index))
    chance = (2 / (np.pi * len(dataset.pixels))) ** 0.5
    left.axhline(chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    left.set(
        xlabel="eigenvector rank",
        ylabel="similarity",
        ylim=(0, 1.01),
        title=f"with size {config.reference}",
    )
    _ranks(left, len(dataset.ranks))
    panel.legend(
        *left.get_legend_handles_labels(),
        title="size",
        loc="outside upper center",
        ncols=8,
        handlelength=3,
    )
    names = [str(size) for size in config.sizes]
    shown = plotting.heat(
        right, dataset.top.values, [[f"{value:.2f}" for value in row] for row in dataset.top.values]
    )
    right.set(
        xticks=range(len(names)), yticks=range(len(names)), xticklabels=names, yticklabels=names
    )
    right.set(xlabel="size", ylabel="size", title="leading eigenvector")
    panel.colorbar(shown, ax=right, label="similarity")
    return left, right


def _draw_truncation(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    left, *drops = panel.subplots(1, 3)
    drops[1].sharey(drops[0])
    lowest, most = 0.0, 1
    for index, size in enumerate(config_of(dataset).sizes):
        look, one = {"label": str(size), **plotting.look(index)}, of_size(dataset, size)
        full = one.full_error.values[:, None]
        for errors, axis in zip(one.error.values, drops, strict=True):
            kept = np.arange(1, errors.shape[1])
            added = 100 * (errors - full)[:, 1:]
            plotting.band(axis, kept, added, **look)
            lowest, most = min(lowest, float(np.nanmin(added, initial=0.0))), max(most, len(kept))
            if axis is drops[0]:
                plotting.band(left, kept, 100 * errors[:, 1:], within=(1e-3, 100), **look)
    left.set(xlabel="components kept (per digit)", ylabel="test error (%, log)")
    plotting.log_height(left)
    bottom = 1.2 * min(lowest, -0.02)  # a symmetric axis would be half empty
    for axis, title in zip(drops, ORDERS.values(), strict=True):
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        axis.set(xlabel="components kept (per digit)", title=title, ylim=(bottom, 100))
        ticks = [tick for tick in (-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100) if tick >= bottom]
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    drops[0].set(ylabel="added test error (%)")
    for axis in (left, *drops):
        _ranks(axis, most)
    return [left, *drops]


def _draw_details(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    halves: Any = panel.subfigures(1, 2)
    left, right = halves
    values = dataset.eigenvalues.values
    grid = left.subplots(2, 4, width_ratios=[1.8, 1, 1, 1])
    for axis in grid[:, 0]:
        axis.remove()
    spectrum = left.add_subplot(grid[0, 0].get_gridspec()[:, 0])
    spectrum.plot(np.arange(1, len(values) + 1), values, ".", markersize=2, color=plotting.color(0))
    spectrum.set(
        xlabel="rank by value", ylabel="eigenvalue", title=f"digit {config_of(dataset).digit}"
    )
    spectrum.axhline(0, color="black", linewidth=0.5)
    for row, vectors, name in zip(grid, dataset.leading.values, dataset.ends.values, strict=True):
        for place, vector in zip(row[1:], vectors, strict=True):
            _image(place, vector)
        row[1].set_ylabel(name, fontsize="small")
    top = right.subplots(2, 3)
    top[0, 0].imshow(_square(dataset.image.values), cmap="gray")
    top[0, 0].set(xticks=[], yticks=[], title="image")
    shown = [_image(*pair) for pair in zip(top.flat[1:], dataset.vectors.values, strict=False)]
    for place, contribution in zip(top.flat[1:], dataset.contributions.values, strict=False):
        place.set_title(f"{contribution:+.2f}")
    for place in top.flat[1 + len(shown) :]:
        place.set_visible(False)
    right.colorbar(shown[0], ax=top, ticks=[-1, 0, 1], label="entry over the largest", shrink=0.8)
    return [spectrum, grid[0, 1], top[0, 0]]


def _square(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(round(len(pixels) ** 0.5), -1)


def _image(axis: Any, pixels: np.ndarray) -> Any:
    """Draw an image whose brightness rises from negative to positive, to show signs without colour."""
    shown = axis.imshow(_square(pixels / np.abs(pixels).max()), cmap="cividis", vmin=-1, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    return shown
