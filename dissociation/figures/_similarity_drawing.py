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
    """Draw matrices of all pairs above; rewrites, training, function and plane below; 6.6 x 4.3 inches."""
    figure = plt.figure(figsize=(6.6, 4.3), layout="constrained")
    above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.45)))
    panels = above.subplots(1, len(dataset.measures), squeeze=False)[0]
    for index, (panel, matrix) in enumerate(zip(panels, dataset.matrix, strict=True)):
        _matrix(panel, matrix, layers_of(dataset), first=index == 0)
    above.colorbar(panels[0].images[0], ax=panels, shrink=0.8, label="value")
    left, middle, right, last = below.subplots(1, 4, width_ratios=(1.4, 1, 1, 1))
    _rewrites(left, dataset.calibrated)
    _training(middle, dataset.course)
    _function(right, dataset)
    _plane(last, dataset.points)
    plotting.letter(panels[0], left, middle, right, last)
    handles = [
        handle for panel in (middle, right, last) for handle in panel.get_legend_handles_labels()[0]
    ]
    below.legend(handles=handles, loc="outside lower center", ncols=8)
    return figure


def layers_of(dataset: xarray.Dataset | xarray.DataArray) -> list[str]:
    """Return the layers of items, in the order of the network."""
    return list(dict.fromkeys(dataset.layer.values.tolist()))


def of_seeds(values: xarray.DataArray, layer: str) -> np.ndarray:
    """Return the values of pairs of seeds in one layer, [pairs], from a matrix [items, other_items].

    The layer "features" is the last hidden one.
    """
    rows = np.flatnonzero(values.layer.values == layer_named("layer", layer, layers_of(values)))
    return values.values[np.ix_(rows, rows)][np.triu_indices(len(rows), 1)]


def _matrix(panel: Axes, matrix: xarray.DataArray, layers: list[str], *, first: bool) -> None:
    count = len(matrix) // len(layers)
    plotting.heat(panel, matrix.values)
    panel.set_aspect("equal")
    middles = count * np.arange(len(layers)) + 0.5 * (count - 1)
    titles = list(_layer_titles(layers).values())
    panel.set_xticks(middles, titles, rotation=30, ha="right", rotation_mode="anchor")
    panel.set_yticks(middles, titles if first else [""] * len(layers))
    for edge in count * np.arange(1, len(layers)) - 0.5:
        panel.axhline(edge, color="white", linewidth=0.8)
        panel.axvline(edge, color="white", linewidth=0.8)
    panel.set_title(plotting.title_of(matrix.measures.item()))


def _layer_titles(layers: list[str]) -> dict[str, str]:
    """Return the title of each layer, in their order: "hidden 1", ..., "last hidden", "logits"."""
    titles = {layer: f"hidden {number}" for number, layer in enumerate(layers, 1)}
    titles[[layer for layer in layers if layer != "logits"][-1]] = "last hidden"
    if "logits" in layers:
        titles["logits"] = "logits"
    return titles


def _rewrites(panel: Axes, calibrated: xarray.DataArray) -> None:
    """Draw a map of calibrated values, 1 if a rewrite does not move a measure and 0 for chance."""
    table = calibrated.values
    plotting.heat(panel, table, [[_short(value) for value in row] for row in table.tolist()])
    panel.set_xticks(
        range(len(REWRITES)), REWRITES, rotation=30, ha="right", rotation_mode="anchor"
    )
    titles = [plotting.title_of(name) for name in calibrated.rewrite_measures.values.tolist()]
    panel.set_yticks(range(len(table)), titles, fontsize=5)
    panel.set_title("one function, rewritten\n1: unmoved, 0: chance")


def _short(value: float) -> str:
    return "1" if value > 0.9995 else f"{value:.2f}".lstrip("0") if value >= 0 else f"{value:.1f}"


def _training(panel: Axes, course: xarray.DataArray) -> None:
    for index, name in enumerate(course.measures.values):
        look, (mean, low, high) = plotting.look(index), course.values[index]
        # Broad below narrow lines, so that curves that coincide stay visible.
        panel.plot(
            range(len(mean)),
            mean,
            label=plotting.title_of(name),
            linewidth=2.4 - 0.5 * index,
            **look,
        )
        panel.fill_between(range(len(mean)), low, high, color=look["color"], alpha=0.2, linewidth=0)
    panel.set(xlabel="epoch", ylabel="value, last hidden layer", ylim=(0, 1), title="training")


def _function(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw estimates with intervals against disagreement."""
    x = 100 * dataset.disagreement.values[np.triu_indices(len(dataset.disagreement), 1)]
    for index, name in enumerate(dataset.measures.values):
        look, one = plotting.look(index), dataset.sel(measures=name)
        value, low, high, chance = (
            of_seeds(one[kind], "features") for kind in ("estimate", "low", "high", "baseline")
        )
        dots = {"fmt": look["marker"], "color": look["color"], "markersize": 2.5, "linewidth": 0.6}
        panel.errorbar(x, value, np.stack([value - low, high - value]), **dots)
        panel.axhline(float(np.nanmean(chance)), color=look["color"], linestyle=":", linewidth=0.7)
    panel.plot([], [], color="0.3", linestyle=":", linewidth=0.7, label="chance")
    panel.set(
        xlabel="disagreement (%)",
        ylabel="estimate, last hidden layer",
        ylim=(-0.05, 1),
        title="function",
    )


def _plane(panel: Axes, points: xarray.DataArray) -> None:
    # In grey, because colours are measures.
    values = points.values
    shades = ("black", "0.4", "0.7", "0.2", "0.55")
    titles = _layer_titles(layers_of(points))
    for layer, marker, shade in zip(titles, "osD^v", shades, strict=False):
        own = values[points.layer.values == layer]
        panel.plot(own[:, 0], own[:, 1], marker, color=shade, markersize=3, label=titles[layer])
    panel.set(xlabel="first axis (rad)", ylabel="second axis (rad)", title="plane of angles")
    middle = (np.nanmax(values, 0) + np.nanmin(values, 0)) / 2
    half = 1.1 * np.nanmax(np.abs(values - middle))
    limits = np.stack([middle - half, middle + half], 1)
    panel.set(xlim=limits[0], ylim=limits[1], aspect="equal")
