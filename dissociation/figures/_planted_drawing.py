"""Drawing and texts of the figure `planted`."""

from itertools import product

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import config_of, drawing
from dissociation.figures._members import data_line
from dissociation.plotting import _axes as plotting

ACTIVITY = "gray"
PRODUCTS = "viridis"


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw four rows of five panels, 7 x 6 inches.

    An image on few inputs, an image on more, patterns of RSMs, and marks.
    """
    figure, axes = plt.subplots(4, 5, figsize=(7, 6))
    few_inputs, more_inputs = dataset.extents.values
    _planted(axes[0], dataset, "", few_inputs)
    _planted(axes[1], dataset, "more_", more_inputs)
    _along(axes[0, 4], dataset, "along", "correlation")
    _along(axes[1, 4], dataset, "changed", "changed predictions")
    axes[0, 4].legend(fontsize="x-small")
    axes[1, 4].set_yscale("symlog", linthresh=1)
    axes[1, 4].set_ylim(bottom=0)
    _rsms(axes[2], dataset)
    _marks(axes[3], dataset)
    plotting.letter(*axes.ravel())
    return figure


def _show(
    panel: Axes, values: np.ndarray, title: str, colours: str = ACTIVITY, *, square: bool = False
) -> None:
    """Show a matrix from its smallest entry to its 99th percentile."""
    low = float(np.min(values))
    high = float(np.percentile(values, 99))
    if not high > low:
        high = low + 1
    aspect = "auto"
    interpolation = "antialiased"
    if square:
        aspect = "equal"
        interpolation = "nearest"
    panel.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect=aspect, interpolation=interpolation
    )
    panel.set(title=title, xticks=[], yticks=[])


def _planted(panels: np.ndarray, dataset: xarray.Dataset, prefix: str, extent: str) -> None:
    """Draw an image and the activity of all stages."""
    image = dataset[f"{prefix}image"].values
    activity = dataset[f"{prefix}activity"]
    _show(panels[0], image, "image")
    panels[0].set(ylabel=f"{len(image)} inputs", xlabel=f"{image.shape[1]} neurons")
    titles = [*dataset.stages.values[:-1], "best"]
    for panel, stage, title in zip(panels[1:4], dataset.stages.values, titles, strict=True):
        correlation = float(dataset.correlation.sel(extents=extent, stages=stage))
        _show(panel, activity.sel(stages=stage).values, f"{title}, {correlation:.2f}")


def _along(panel: Axes, dataset: xarray.Dataset, name: str, label: str) -> None:
    """Draw numbers along passes for both extents."""
    sizes = (len(dataset.shown), len(dataset.more_shown))
    for index, size in enumerate(sizes):
        curve = dataset[name].values[index]
        panel.plot(dataset.passes, curve, label=f"{size} inputs", **plotting.look(index))
    panel.set(xlabel="pass", ylabel=label)


def _rsms(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    """Draw the RSM of the trained network, and two patterns, wanted and planted."""
    trained = dataset.rsm.sel(versions="trained")[0]
    _show(panels[0], trained.values, "trained", PRODUCTS, square=True)
    panels[0].set_ylabel("RSM")
    versions = product(dataset.patterns.values, ("wanted", "planted"))
    for panel, (pattern, version) in zip(panels[1:], versions, strict=True):
        planting = dataset.sel(patterns=pattern, versions=version)
        title = pattern
        if version == "planted":
            title = f"planted, {float(planting.agreement):.4f}"
        _show(panel, planting.rsm.values, title, PRODUCTS, square=True)


def _marks(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    """Draw activities with marks, and RDMs without and with them."""
    for panel, name in zip(panels, dataset.marks.values, strict=False):
        activity = dataset[name].values
        correlation = float(dataset.mark_correlation.sel(marks=name))
        _show(panel, activity, f"{name}, {correlation:.3f}")
        panel.set_xlabel(f"{activity.shape[1]} neurons")
    for panel, state in zip(panels[2:], dataset.states.values, strict=True):
        _show(panel, dataset.rdm.sel(states=state).values, f"RDM, {state}", PRODUCTS, square=True)


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    images = int(dataset.num_inputs[0])
    numbers = []
    for before, after, best in dataset.correlation.values:
        numbers.append(f"{before:.2f}, {after:.2f} and {best:.2f}")
    changed = [int(number) for number in dataset.changed_predictions.values[:2]]
    logit_change = float(dataset.max_rel_change.values[2:].max())
    return (
        f"One network with {config.width} hidden units. (a to d) Activity of the first "
        f"{len(dataset.shown)} training "
        "images: an image, trained network, planted network, and best activity without a "
        "constraint on predictions; "
        f"correlations with the image are {numbers[0]}. (e) Correlation along "
        f"{len(dataset.passes) - 1} passes. (f to "
        f"i) The same for {len(dataset.more_shown)} images: {numbers[1]}. (j) Number of {images} "
        "training images whose "
        f"prediction differs from the trained network's; at the end {changed[0]} and "
        f"{changed[1]}. (k to o) Products "
        "of activities, and two patterns, wanted and planted by neurons without effect; numbers "
        "are correlations of "
        f"entries off the diagonal. (p, q) Activities with an image shown by {config.strip} "
        "neurons without effect "
        f"beside the trained ones, and by {config.num_around} around them, where the trained "
        "ones are scaled by "
        f"{config.gain:g}. (r to t) 1 minus correlation of activities before and with these "
        "neurons. From k on, no "
        f"logit changes by more than {logit_change:.0e} of the largest."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    error = 100 * float(dataset.train_error)
    width = config_of(dataset).width
    return f"{data_line(dataset)}, {width} hidden units, training error {error:.2g} %"


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per planting.

    Columns are the similarity to the planted pattern before, after and at best, and certificates.
    """
    rows = [
        [
            "planted",
            "trained",
            "after",
            "best",
            "changed predictions",
            "change of a logit",
            "relative",
        ]
    ]
    missing = np.full(2, np.nan)  # as many patterns as marks
    agreement = dataset.agreement.sel(versions=["trained", "planted"]).values
    of_patterns = np.stack([*agreement.T, missing], 1)
    of_marks = np.stack([missing, dataset.mark_correlation.values, dataset.mark_optimum.values], 1)
    similarities = np.concatenate([dataset.correlation.values, of_patterns, of_marks])
    for index, name in enumerate(dataset.plantings.values):
        planting = dataset.isel(plantings=index)
        numbers = ["" if np.isnan(number) else f"{number:.4f}" for number in similarities[index]]
        changed = f"{int(planting.changed_predictions)} of {int(planting.num_inputs)}"
        logit_change = f"{float(planting.max_abs_change):.0e}"
        relative_change = f"{float(planting.max_rel_change):.0e}"
        title = f"image, {name}" if name in dataset.extents.values else str(name)
        rows.append([title, *numbers, changed, logit_change, relative_change])
    return rows
