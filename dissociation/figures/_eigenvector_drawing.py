"""Drawing and texts of the figure `eigenvectors`, panel by panel, from its dataset."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.figure import Figure

from dissociation.figures._eigenvector_measures import ORDERS, RANKINGS, of_size, pooled
from dissociation.figures._harness import config_of, drawing
from dissociation.figures._members import data_line
from dissociation.figures._seeds import cell, named_diverged
from dissociation.plotting import _axes as plotting


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw similarity, truncation, a spectrum and an explanation; 7.2 x 6.8 inches."""
    figure = plt.figure(figsize=(7.2, 6.8))
    rows: Any = figure.subfigures(3, 1, height_ratios=[1.1, 1.0, 1.05])
    panels = [
        *_draw_similarity(rows[0], dataset),
        *_draw_truncation(rows[1], dataset),
        *_draw_details(rows[2], dataset),
    ]
    plotting.letter(*panels)
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    curves = []
    counts = []
    for size in config.sizes:
        errors = of_size(dataset, size).error.values
        curves += list(errors)
        counts.append(f"{errors.shape[1]} of size {size}")
    return (
        "|Cosine| of equally ranked eigenvectors of bilinear networks and networks of size "
        f"{config.reference}: means "
        "over pairs and classes with 90 % intervals that resample networks (a), and the leading "
        "eigenvector between "
        "sizes (b). Test error of the leading components of every digit (c), and its excess over "
        "the whole network, in "
        "two orders of the components (d, e). "
        f"{plotting.drawn_as(*curves)} "
        f"One network of size {config.reference} and digit {config.digit}: eigenvalues (f), the "
        "three most positive "
        "and three most negative eigenvectors (g), and one test image with the five components "
        "that contribute most to "
        f"its logit (h). The sign of an eigenvector is arbitrary. Networks: {', '.join(counts)}. "
        f"Data: {headline(dataset)}."
    )


def components_needed(
    dataset: xarray.Dataset, order: str = "magnitude", drop: float = 1e-3
) -> dict[int, float]:
    """Return by size the least number of components per class that costs less accuracy than `drop`.

    Costs are means over seeds. The number is infinite if `num_components` are too few.
    """
    added = dataset.error.sel(orders=order) - dataset.full_error
    added = added.transpose("seeds", "hidden_sizes", "components")
    is_enough = plotting.summarise(added.values).mean < drop
    needed = {}
    for size, row in zip(dataset.hidden_sizes.values.tolist(), is_enough, strict=True):
        needed[size] = np.inf
        if row.any():
            needed[size] = float(row.argmax())
    return needed


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    config = config_of(dataset)
    names = []
    steps = []
    for size in config.sizes:
        diverged_at = of_size(dataset, size).diverged_at.values
        names += [f"size {size} seed {i}" for i in range(len(diverged_at))]
        steps.append(diverged_at)
    return (
        f"{data_line(dataset)}, {config.num_epochs} epochs; similarities with size "
        f"{config.reference}, pairs of different networks only"
        f"{named_diverged(names, np.concatenate(steps))}"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per size.

    Cells are accuracy, similarity of some ranks in three orders, and the components needed.
    """
    num_ranks = config_of(dataset).num_ranks
    ranks = [rank for rank in (1, 5, 20) if rank <= num_ranks]
    header = ["size", "seeds", "accuracy"]
    for order in RANKINGS:
        header += [f"rank {rank}, {order}" for rank in ranks]
    rows = [[*header, "matched", "form", "needed", "needed, by contribution"]]

    needed = [components_needed(dataset, order) for order in ORDERS]
    for size in dataset.hidden_sizes.values.tolist():
        networks = of_size(dataset, size)
        accuracy = 100 * (1 - networks.full_error.values)
        row = [str(size), str(len(accuracy)), cell(accuracy, unit=" %")]
        *ranked, matched = (pooled(similarity.values) for similarity in networks.similarity)
        for means in ranked:
            row += [f"{means[rank - 1]:.3f}" if rank <= len(means) else "" for rank in ranks]
        row.append(f"{matched.mean():.3f}")
        form = networks.form.values[..., None]
        row.append(f"{pooled(form).mean():.3f}")
        row += [f"{num_components[size]:g}" for num_components in needed]
        rows.append(row)
    return rows


def _ranks(axis: Any, last: int) -> None:
    """Set ticks and limits of ranks from 1."""
    step = 5
    if last < 10:
        step = max(1, round(last / 6))
    ticks = list(range(step, last + 1, step))
    if step > 1:
        ticks = [1, *ticks]
    axis.set_xticks(ticks)
    axis.set_xlim(0.5, last + 0.5)


def _draw_similarity(panel: Any, dataset: xarray.Dataset) -> tuple[Any, Any]:
    by_rank, by_size = panel.subplots(1, 2, width_ratios=[1.6, 1])
    config = config_of(dataset)
    for index, size in enumerate(config.sizes):
        interval = of_size(dataset, size).interval.sel(measures="magnitude", kinds="members")
        mean, low, high = interval.values
        ranks = np.arange(1, len(mean) + 1)
        by_rank.fill_between(ranks, low, high, alpha=0.25, color=plotting.color(index), linewidth=0)
        by_rank.plot(ranks, mean, label=str(size), **plotting.look(index))
    chance = (2 / (np.pi * len(dataset.pixels))) ** 0.5
    by_rank.axhline(chance, color="black", linestyle=":", linewidth=0.8, label="chance")
    by_rank.set(
        xlabel="eigenvector rank",
        ylabel="similarity",
        ylim=(0, 1.01),
        title=f"with size {config.reference}",
    )
    _ranks(by_rank, len(dataset.ranks))
    handles = by_rank.get_legend_handles_labels()
    panel.legend(*handles, title="size", loc="outside upper center", ncols=8, handlelength=3)

    values = dataset.top.values
    texts = []
    for row in values:
        texts.append([f"{value:.2f}" for value in row])
    image = plotting.heat(by_size, values, texts)
    names = [str(size) for size in config.sizes]
    ticks = range(len(names))
    by_size.set(xticks=ticks, yticks=ticks, xticklabels=names, yticklabels=names)
    by_size.set(xlabel="size", ylabel="size", title="leading eigenvector")
    panel.colorbar(image, ax=by_size, label="similarity")
    return by_rank, by_size


def _draw_truncation(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    panels = panel.subplots(1, 3)
    total, by_magnitude, by_contribution = panels
    by_contribution.sharey(by_magnitude)
    lowest = 0.0
    largest = 1
    for index, size in enumerate(config_of(dataset).sizes):
        networks = of_size(dataset, size)
        look = {"label": str(size), **plotting.look(index)}
        full = networks.full_error.values[:, None]
        for errors, axis in zip(networks.error.values, panels[1:], strict=True):
            num_kept = np.arange(1, errors.shape[1])
            added = 100 * (errors - full)[:, 1:]
            plotting.band(axis, num_kept, added, **look)
            lowest = min(lowest, float(np.nanmin(added, initial=0.0)))
            largest = max(largest, len(num_kept))
            if axis is by_magnitude:
                plotting.band(total, num_kept, 100 * errors[:, 1:], within=(1e-3, 100), **look)

    total.set(xlabel="components kept (per digit)", ylabel="test error (%, log)")
    plotting.log_height(total)
    bottom = 1.2 * min(lowest, -0.02)  # a symmetric axis would be half empty
    ticks = [tick for tick in (-100, -10, -1, -0.1, 0, 0.1, 1, 10, 100) if tick >= bottom]
    for axis, title in zip(panels[1:], ORDERS.values(), strict=True):
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
        axis.set(xlabel="components kept (per digit)", title=title, ylim=(bottom, 100))
        axis.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.minorticks_off()
    by_magnitude.set(ylabel="added test error (%)")
    for axis in panels:
        _ranks(axis, largest)
    return list(panels)


def _draw_details(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    forms, explanation = panel.subfigures(1, 2)
    grid = forms.subplots(2, 4, width_ratios=[1.8, 1, 1, 1])
    for axis in grid[:, 0]:
        axis.remove()
    spectrum = forms.add_subplot(grid[0, 0].get_gridspec()[:, 0])
    values = dataset.eigenvalues.values
    ranks = np.arange(1, len(values) + 1)
    spectrum.plot(ranks, values, ".", markersize=2, color=plotting.color(0))
    title = f"digit {config_of(dataset).digit}"
    spectrum.set(xlabel="rank by value", ylabel="eigenvalue", title=title)
    spectrum.axhline(0, color="black", linewidth=0.5)
    for row, vectors, name in zip(grid, dataset.leading.values, dataset.ends.values, strict=True):
        for axis, vector in zip(row[1:], vectors, strict=True):
            _image(axis, vector)
        row[1].set_ylabel(name, fontsize="small")

    axes = explanation.subplots(2, 3)
    first, *vector_axes = axes.flat
    first.imshow(_square(dataset.image.values), cmap="gray")
    first.set(xticks=[], yticks=[], title="image")
    for axis in vector_axes:
        axis.set_visible(False)
    images = []
    contributions = dataset.contributions.values
    for axis, vector, contribution in zip(
        vector_axes, dataset.vectors.values, contributions, strict=False
    ):
        axis.set_visible(True)
        images.append(_image(axis, vector))
        axis.set_title(f"{contribution:+.2f}")
    label = "entry over the largest"
    explanation.colorbar(images[0], ax=axes, ticks=[-1, 0, 1], label=label, shrink=0.8)
    return [spectrum, grid[0, 1], first]


def _square(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(round(len(pixels) ** 0.5), -1)


def _image(axis: Any, pixels: np.ndarray) -> Any:
    """Draw an image whose brightness rises from negative to positive.

    Signs are seen without colour.
    """
    relative = pixels / np.abs(pixels).max()
    image = axis.imshow(_square(relative), cmap="cividis", vmin=-1, vmax=1)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
    return image
