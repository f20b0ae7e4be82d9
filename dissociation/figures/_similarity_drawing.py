"""Drawing of the figure `similarity`, panel by panel, from its dataset."""

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import drawing
from dissociation.models._representations import layer_named
from dissociation.plotting import _axes as plotting

REWRITES = ("scaled", "duplicated", "nuisance", "permuted")
"""Names of the rewrites in tables, arrays and the figure."""


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw matrices of all pairs above, and four panels below, 6.6 x 4.3 inches.

    The panels are rewrites, training, function and plane.
    """
    figure = plt.figure(figsize=(6.6, 4.3), layout="constrained")
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.45)))
    matrix_panels = above.subplots(1, len(dataset.measures), squeeze=False)[0]
    for index, panel in enumerate(matrix_panels):
        _matrix(panel, dataset.matrix[index], layers_of(dataset), has_titles=index == 0)
    first_panel = matrix_panels[0]
    above.colorbar(first_panel.images[0], ax=matrix_panels, shrink=0.8, label="value")

    panels = below.subplots(1, 4, width_ratios=(1.4, 1, 1, 1))
    _rewrites(panels[0], dataset.calibrated)
    _training(panels[1], dataset.course)
    _function(panels[2], dataset)
    _plane(panels[3], dataset.points)
    plotting.letter(first_panel, *panels)
    handles = []
    for panel in panels[1:]:
        panel_handles, _ = panel.get_legend_handles_labels()
        handles += panel_handles
    below.legend(handles=handles, loc="outside lower center", ncols=8)
    return figure


def layers_of(dataset: xarray.Dataset | xarray.DataArray) -> list[str]:
    """Return the layers of items, in the order of the network."""
    return list(dict.fromkeys(dataset.layer.values.tolist()))


def of_seeds(values: xarray.DataArray, layer: str) -> np.ndarray:
    """Return the values of pairs of seeds in one layer, [pairs].

    `values` is a matrix [items, other_items]. The layer "features" is the last hidden one.
    """
    name = layer_named("layer", layer, layers_of(values))
    rows = np.flatnonzero(values.layer.values == name)
    block = values.values[np.ix_(rows, rows)]
    return block[np.triu_indices(len(rows), 1)]


def _matrix(panel: Axes, matrix: xarray.DataArray, layers: list[str], *, has_titles: bool) -> None:
    """Draw values of all pairs of items of one measure, with lines between layers."""
    count = len(matrix) // len(layers)
    plotting.heat(panel, matrix.values)
    panel.set_aspect("equal")
    middles = count * np.arange(len(layers)) + 0.5 * (count - 1)
    titles = list(_layer_titles(layers).values())
    panel.set_xticks(middles, titles, rotation=30, ha="right", rotation_mode="anchor")
    if not has_titles:
        titles = [""] * len(layers)
    panel.set_yticks(middles, titles)
    for edge in count * np.arange(1, len(layers)) - 0.5:
        panel.axhline(edge, color="white", linewidth=0.8)
        panel.axvline(edge, color="white", linewidth=0.8)
    panel.set_title(plotting.title_of(matrix.measures.item()))


def _layer_titles(layers: list[str]) -> dict[str, str]:
    """Return the title of each layer, in their order: "hidden 1", ..., "last hidden", "logits"."""
    titles = {layer: f"hidden {number}" for number, layer in enumerate(layers, 1)}
    hidden_layers = [layer for layer in layers if layer != "logits"]
    titles[hidden_layers[-1]] = "last hidden"
    if "logits" in layers:
        titles["logits"] = "logits"
    return titles


def _rewrites(panel: Axes, calibrated: xarray.DataArray) -> None:
    """Draw a map of calibrated values, 1 if a rewrite does not move a measure and 0 for chance."""
    table = calibrated.values
    labels = [list(map(_short, row)) for row in table.tolist()]
    plotting.heat(panel, table, labels)
    columns = range(len(REWRITES))
    panel.set_xticks(columns, REWRITES, rotation=30, ha="right", rotation_mode="anchor")
    titles = [plotting.title_of(name) for name in calibrated.rewrite_measures.values.tolist()]
    panel.set_yticks(range(len(table)), titles, fontsize=5)
    panel.set_title("one function, rewritten\n1: unmoved, 0: chance")


def _short(number: float) -> str:
    """Return a number in at most four characters."""
    if number > 0.9995:
        return "1"
    if number >= 0:
        return f"{number:.2f}".lstrip("0")
    return f"{number:.1f}"


def _training(panel: Axes, course: xarray.DataArray) -> None:
    """Draw the mean value of each measure along training, with its interval."""
    for index, name in enumerate(course.measures.values):
        mean, low, high = course.values[index]
        epochs = range(len(mean))
        look = plotting.look(index)
        # Broad below narrow lines, so that curves that coincide stay visible.
        linewidth = 2.4 - 0.5 * index
        panel.plot(epochs, mean, label=plotting.title_of(name), linewidth=linewidth, **look)
        panel.fill_between(epochs, low, high, color=look["color"], alpha=0.2, linewidth=0)
    panel.set(xlabel="epoch", ylabel="value, last hidden layer", ylim=(0, 1), title="training")


def _function(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw estimates with intervals against disagreement."""
    pairs = np.triu_indices(len(dataset.disagreement), 1)
    x = 100 * dataset.disagreement.values[pairs]
    for index, name in enumerate(dataset.measures.values):
        measured = dataset.sel(measures=name)
        estimate = of_seeds(measured.estimate, "features")
        low = of_seeds(measured.low, "features")
        high = of_seeds(measured.high, "features")
        chance = of_seeds(measured.baseline, "features")

        look = plotting.look(index)
        color = look["color"]
        bars = np.stack([estimate - low, high - estimate])
        panel.errorbar(
            x, estimate, bars, fmt=look["marker"], color=color, markersize=2.5, linewidth=0.6
        )
        panel.axhline(float(np.nanmean(chance)), color=color, linestyle=":", linewidth=0.7)
    panel.plot([], [], color="0.3", linestyle=":", linewidth=0.7, label="chance")
    panel.set(xlabel="disagreement (%)", ylabel="estimate, last hidden layer")
    panel.set(ylim=(-0.05, 1), title="function")


def _plane(panel: Axes, points: xarray.DataArray) -> None:
    """Draw all representations in a plane, in grey, because colours are measures."""
    coordinates = points.values
    shades = ("black", "0.4", "0.7", "0.2", "0.55")
    titles = _layer_titles(layers_of(points))
    for layer, marker, shade in zip(titles, "osD^v", shades, strict=False):
        x, y = coordinates[points.layer.values == layer].T
        panel.plot(x, y, marker, color=shade, markersize=3, label=titles[layer])
    panel.set(xlabel="first axis (rad)", ylabel="second axis (rad)", title="plane of angles")

    middle = (np.nanmax(coordinates, 0) + np.nanmin(coordinates, 0)) / 2
    radius = 1.1 * np.nanmax(np.abs(coordinates - middle))
    limits = np.stack([middle - radius, middle + radius], 1)
    panel.set(xlim=limits[0], ylim=limits[1], aspect="equal")
