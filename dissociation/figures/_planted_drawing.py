"""Drawing and texts of the figure `planted`."""

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import config_of, drawing
from dissociation.figures._members import data_line
from dissociation.plotting import _axes as plotting

ACTIVITY, PRODUCTS = "gray", "viridis"


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw four rows of five panels: an image on few inputs, on more, patterns of RSMs, and marks; 7 x 6 inches."""
    figure, axes = plt.subplots(4, 5, figsize=(7, 6))
    for row, (prefix, extent) in enumerate(zip(("", "more_"), dataset.extents.values, strict=True)):
        _planted(axes[row], dataset, prefix, extent)
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
    low, high = float(np.min(values)), float(np.percentile(values, 99))
    high = high if high > low else low + 1
    aspect, interpolation = ("equal", "nearest") if square else ("auto", "antialiased")
    panel.imshow(
        values, cmap=colours, vmin=low, vmax=high, aspect=aspect, interpolation=interpolation
    )
    panel.set(title=title, xticks=[], yticks=[])


def _planted(panels: np.ndarray, dataset: xarray.Dataset, prefix: str, extent: str) -> None:
    image, activity = dataset[f"{prefix}image"].values, dataset[f"{prefix}activity"]
    _show(panels[0], image, "image")
    panels[0].set(ylabel=f"{len(image)} inputs", xlabel=f"{image.shape[1]} neurons")
    for panel, stage in zip(panels[1:4], dataset.stages.values, strict=True):
        value = float(dataset.correlation.sel(extents=extent, stages=stage))
        title = "best" if stage == dataset.stages.values[-1] else stage
        _show(panel, activity.sel(stages=stage).values, f"{title}, {value:.2f}")


def _along(panel: Axes, dataset: xarray.Dataset, name: str, label: str) -> None:
    sizes = len(dataset.shown), len(dataset.more_shown)
    for place, (values, size) in enumerate(zip(dataset[name].values, sizes, strict=True)):
        panel.plot(dataset.passes, values, label=f"{size} inputs", **plotting.look(place))
    panel.set(xlabel="pass", ylabel=label)


def _rsms(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    _show(
        panels[0], dataset.rsm.sel(versions="trained")[0].values, "trained", PRODUCTS, square=True
    )
    panels[0].set_ylabel("RSM")
    order = [
        (pattern, version)
        for pattern in dataset.patterns.values
        for version in ("wanted", "planted")
    ]
    for panel, (pattern, version) in zip(panels[1:], order, strict=True):
        one = dataset.sel(patterns=pattern, versions=version)
        title = pattern if version == "wanted" else f"planted, {float(one.agreement):.4f}"
        _show(panel, one.rsm.values, title, PRODUCTS, square=True)


def _marks(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    for panel, name in zip(panels, dataset.marks.values, strict=False):
        value = float(dataset.mark_correlation.sel(marks=name))
        _show(panel, dataset[name].values, f"{name}, {value:.3f}")
        panel.set_xlabel(f"{dataset[name].shape[1]} neurons")
    for panel, state in zip(panels[2:], dataset.states.values, strict=True):
        _show(panel, dataset.rdm.sel(states=state).values, f"RDM, {state}", PRODUCTS, square=True)


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config, correlation = config_of(dataset), dataset.correlation.values
    images = int(dataset.num_inputs[0])
    numbers = [f"{before:.2f}, {after:.2f} and {best:.2f}" for before, after, best in correlation]
    changed = [int(value) for value in dataset.changed_predictions.values[:2]]
    kept = float(dataset.max_rel_change.values[2:].max())
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
        f"logit changes by more than {kept:.0e} of the largest."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    error = 100 * float(dataset.train_error)
    return (
        f"{data_line(dataset)}, {config_of(dataset).width} hidden units, training error "
        f"{error:.2g} %"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per planting: similarity to what is planted, before, after, best; and certificate."""
    shown = [
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
    nothing = np.full(2, np.nan)  # as many patterns as marks
    three = np.concatenate([
        dataset.correlation.values,
        np.stack([*dataset.agreement.sel(versions=["trained", "planted"]).values.T, nothing], 1),
        np.stack([nothing, dataset.mark_correlation.values, dataset.mark_optimum.values], 1),
    ])  # fmt: skip
    for place, name in enumerate(dataset.plantings.values):
        one = dataset.isel(plantings=place)
        numbers = ["" if np.isnan(value) else f"{value:.4f}" for value in three[place]]
        changed = f"{int(one.changed_predictions)} of {int(one.num_inputs)}"
        changes = [f"{float(value):.0e}" for value in (one.max_abs_change, one.max_rel_change)]
        title = f"image, {name}" if name in dataset.extents.values else str(name)
        shown.append([title, *numbers, changed, *changes])
    return shown
