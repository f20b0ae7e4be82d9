"""Drawing of the figure `similarity`, panel by panel, from its results."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.plotting import _axes as plotting

REWRITES = ("scaled", "duplicated", "zero", "permuted")
"""Rewrites of one function, by their names in tables, arrays and the figure."""


def draw(results: Any) -> Figure:
    """Draw matrices of all pairs above; rewrites, training, function and plane below; 6.6 x 4.6 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(6.6, 4.6), layout="constrained")
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.25)))
        panels = above.subplots(1, len(results.matrices), squeeze=False)[0]
        for index, (panel, (name, values)) in enumerate(zip(panels, results.matrices.items(), strict=True)):
            _matrix(panel, results, name, values, first=index == 0)
        above.colorbar(panels[0].images[0], ax=panels, shrink=0.8, label="value")
        left, middle, right, last = below.subplots(1, 4, width_ratios=(1.4, 1, 1, 1))
        _rewrites(left, results)
        _training(middle, results)
        _function(right, results)
        _plane(last, results)
        plotting.letter(panels[0], left, middle, right, last)
        handles = middle.get_legend_handles_labels()[0] + last.get_legend_handles_labels()[0]
        below.legend(handles=handles, loc="outside lower center", ncols=7)
    plt.close(figure)
    return figure


def _matrix(panel: Axes, results: Any, name: str, values: np.ndarray, *, first: bool) -> None:
    layers = list(dict.fromkeys(layer for layer, _ in results.items))
    count = len(results.items) // len(layers)
    plotting.heat(panel, values)
    panel.set_aspect("equal")
    middles = count * np.arange(len(layers)) + 0.5 * (count - 1)
    panel.set_xticks(middles, layers)
    panel.set_yticks(middles, layers if first else [""] * len(layers))
    for edge in count * np.arange(1, len(layers)) - 0.5:
        panel.axhline(edge, color="white", linewidth=0.8)
        panel.axvline(edge, color="white", linewidth=0.8)
    panel.set_title(name)


def _rewrites(panel: Axes, results: Any) -> None:
    """Draw 1 for measures that a rewrite does not move, 0 for chance."""
    names = list(results.rewritten)
    table = np.array(list(results.calibrated.values()))
    plotting.heat(panel, table, [[_short(value) for value in row] for row in table])
    panel.set_xticks(range(len(REWRITES)), REWRITES, rotation=30, ha="right", rotation_mode="anchor")
    panel.set_yticks(range(len(names)), names, fontsize=5)
    panel.set_title("one function, rewritten\n1: unmoved, 0: chance")


def _short(value: Any) -> str:
    return "1" if value > 0.9995 else f"{value:.2f}".lstrip("0") if value >= 0 else f"{value:.1f}"


def _training(panel: Axes, results: Any) -> None:
    for index, (name, (mean, low, high)) in enumerate(results.course.items()):
        look = plotting.look(index)
        panel.plot(range(len(mean)), mean, label=name, **look)
        panel.fill_between(range(len(mean)), low, high, color=look["color"], alpha=0.2, linewidth=0)
    panel.set(xlabel="epoch", ylabel="value, last hidden layer", ylim=(0, 1), title="training")


def _function(panel: Axes, results: Any) -> None:
    """Draw estimates with their intervals by disagreement."""
    for index, (name, values) in enumerate(results.estimates.items()):
        look = plotting.look(index)
        kinds = (values, results.lows[name], results.highs[name], results.baselines[name])
        value, low, high, chance = (of_seeds(results.items, table, "features") for table in kinds)
        errors = np.stack([value - low, high - value])
        x = 100 * results.disagreement[np.triu_indices(len(results.disagreement), 1)]
        dots = {"fmt": look["marker"], "color": look["color"], "markersize": 2.5, "linewidth": 0.6}
        panel.errorbar(x, value, errors, label=name, **dots)
        panel.axhline(float(np.nanmean(chance)), color=look["color"], linestyle=":", linewidth=0.7)
    panel.set(xlabel="disagreement (%)", ylabel="estimate, last hidden layer", ylim=(-0.05, 1), title="function")


def _plane(panel: Axes, results: Any) -> None:
    """Draw representations in grey, because colours are measures."""
    layers = list(dict.fromkeys(layer for layer, _ in results.items))
    for layer, marker, shade in zip(layers, "osD^v", ("black", "0.4", "0.7", "0.2", "0.55"), strict=False):
        points = results.points[[index for index, (name, _) in enumerate(results.items) if name == layer]]
        panel.plot(points[:, 0], points[:, 1], marker, color=shade, markersize=3, label=layer)
    panel.set(xticks=[], yticks=[], title="plane of angles")
    middle = (results.points.max(0) + results.points.min(0)) / 2
    half = 1.1 * np.abs(results.points - middle).max()
    limits = np.stack([middle - half, middle + half], 1)
    panel.set(xlim=limits[0], ylim=limits[1], aspect="equal")


def of_seeds(items: Sequence[tuple[str, int]], values: np.ndarray, layer: str) -> np.ndarray:
    """Return the values of pairs of seeds in one layer, [pairs], from a matrix of all `items`."""
    rows = np.array([index for index, (name, _) in enumerate(items) if name == layer])
    return values[np.ix_(rows, rows)][np.triu_indices(len(rows), 1)]
