"""Drawing of the figure `collapse`, panel by panel, from its dataset.

Colours and markers show weight decays, dashes kinds of curves. Curves of a single weight decay are black.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import config_of
from dissociation.plotting import _axes as plotting

if TYPE_CHECKING:
    import xarray

SHOWN_POINTS = 400
"""Largest number of samples per class and split in the plane of two classes."""

_PAIRS = {
    "mi_{}_compression": ("I", "nearest neighbours"),
    "nhsic_{}": ("nHSIC", "fixed bandwidth"),
    "nhsic_{}_free": ("nHSIC", "median bandwidth"),
}
"""Symbols and labels of the measures of the information plane, by array name with "zx" or "zy" for {}."""


def draw(dataset: "xarray.Dataset") -> Figure:
    """Draw every panel that has numbers, three per row; 7.2 inches wide, 2.3 inches per row."""
    panels = _panels(dataset)
    rows = -(-len(panels) // 3)
    with plotting.house_style():
        figure, axes = plt.subplots(rows, 3, figsize=(7.2, 2.3 * rows + 0.3), squeeze=False)
        for axis, (panel, _) in zip(axes.flat, panels, strict=False):
            panel(axis, dataset)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        plotting.letter(*axes.flat[: len(panels)])
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, title="weight decay", loc="outside upper center", ncols=8)
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def caption(dataset: "xarray.Dataset") -> str:
    """Return the caption without the data."""
    said = "; ".join(f"({'abcdefghijkl'[index]}) {words}" for index, (_, words) in enumerate(_panels(dataset)))
    curves = [*dataset.test_accuracy.values, *dataset.rnc1_score.values]
    count = len(dataset.information_step) if "mi_zx_compression" in dataset else 0
    steps = f"Information is measured {count} times. " if count else ""
    return f"Networks during training: {said}. {plotting.drawn_as(*curves)} {steps}".rstrip()


def _panels(dataset: "xarray.Dataset") -> list[tuple[Callable[[Axes, "xarray.Dataset"], None], str]]:
    """Return the panels that have numbers, in order, with their sentences of the caption."""
    config, largest = config_of(dataset), max(dataset.weight_decays.values)
    decay, classes = f"weight decay {largest:g}", " and ".join(map(str, config.classes))
    panels: list[tuple[Callable[[Axes, "xarray.Dataset"], None], str]] = [
        (_accuracy, "accuracy on test images; dashed, on training images"),
        (
            _collapse,
            f"spread within classes over spread between classes; dotted, the threshold {config.collapse_threshold:g}",
        ),
        (_condition, "condition number of the class means; dotted, its value after collapse"),
    ]
    for name in _PAIRS:
        values = dataset.get(name.format("zx"))
        if values is not None and np.isfinite(values.values[..., dataset.information_step.values >= 10]).any():
            symbol, words = _PAIRS[name]
            what = f"{symbol}(Z;X) - {symbol}(Z;Y) by {words}; dotted, with shuffled rows"
            panels.append((lambda axis, found, name=name: _information(axis, found, name), what))
    if len(panels) > 3 and "mi_zx_compression" in dataset:
        panels.append((_estimators, f"two estimators of information at {decay}"))
    panels.append((_geometry, f"distances from collapse at {decay}"))
    panels.append((_scale, "norm of the class means; dashed, of all weights; dotted, of the last layer's weights"))
    if "margin" in dataset:
        panels.append((_margins, f"distances of images of classes {classes} to their boundary at {decay}, all seeds"))
        panels.append((_plane, f"one seed's images of these classes in the plane of their weights, at {decay}"))
    if largest > 0:
        crossed = "first steps at which networks fitted, generalised and collapsed, with medians and 90 % intervals"
        panels.append((_crossings, f"{crossed}; open symbols for networks that never did"))
    return panels


def _look(index: int, count: int) -> dict[str, Any]:
    """Return the style of one of several weight decays: brighter for smaller ones."""
    color = plt.get_cmap("viridis")(0.85 * index / max(count - 1, 1))
    return {**plotting.look(index), "color": color, "linestyle": "solid"}


def _curves(axis: Axes, values: "xarray.DataArray", *, log: bool = False, **options: Any) -> None:
    """Draw a curve per weight decay, from step 10 on."""
    steps, decays = values[values.dims[-1]].values, values.weight_decays.values
    later = steps >= 10
    for index, (decay, curves) in enumerate(zip(decays, values.values, strict=True)):
        look = _look(index, len(decays))
        plotting.band(axis, steps[later], curves[:, later], label=f"{decay:g}", **look, **options)
    _against_steps(axis, steps, log=log)


def _means(axis: Axes, values: "xarray.DataArray", linestyle: str) -> None:
    """Draw means over seeds, a curve per weight decay, without bands."""
    steps = values[values.dims[-1]].values
    later = steps >= 10
    for index, curves in enumerate(values.values):
        look = {"color": _look(index, len(values))["color"], "linestyle": linestyle, "linewidth": 0.8}
        axis.plot(steps[later], plotting.summarise(curves).mean[later], **look)


def _against_steps(axis: Axes, steps: np.ndarray, *, log: bool = False) -> None:
    # A logarithmic axis finds no limits if nothing is finite, or no step has reached 10.
    axis.set(xscale="log", xlabel="step", xlim=(9, 1.1 * max(10, int(steps[-1]) if len(steps) else 10)))
    if log and any((np.asarray(line.get_ydata()) > 0).any() for line in axis.lines):
        plotting.log_height(axis)


def _floor(values: np.ndarray) -> float:
    """Return the lower limit of bands on a logarithmic axis: half the least positive value, or 1e-12."""
    positive = values[np.isfinite(values) & (values > 0)]
    return 0.5 * float(positive.min()) if positive.size else 1e-12


def _legend(axis: Axes, columns: int = 2) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, handlelength=2.5)


def _accuracy(axis: Axes, dataset: "xarray.Dataset") -> None:
    _curves(axis, dataset.test_accuracy, within=(0.0, 1.0))
    _means(axis, dataset.train_accuracy, "dashed")
    axis.set(ylim=(0, 1.02), ylabel="accuracy", title="test (line), training (dashed)")


def _collapse(axis: Axes, dataset: "xarray.Dataset") -> None:
    values = dataset.rnc1_score
    _curves(axis, values, log=True, within=(_floor(values.values), np.inf))
    axis.axhline(config_of(dataset).collapse_threshold, color="black", linestyle=":", linewidth=0.8)
    axis.set(ylabel="RNC1 (log)", title="collapse of classes (training)")


def _condition(axis: Axes, dataset: "xarray.Dataset") -> None:
    _curves(axis, dataset.nc2_score, log=True, within=(1.0, np.inf))
    axis.axhline(1, color="black", linestyle=":", linewidth=0.8)
    axis.set(ylabel="NC2 (log)", title="condition number of means")


def _information(axis: Axes, dataset: "xarray.Dataset", name: str) -> None:
    symbol, words = _PAIRS[name]
    inputs, labels = (name.format(part) for part in ("zx", "zy"))
    _curves(axis, dataset[inputs] - dataset[labels])
    _means(axis, dataset[f"{inputs}_null"] - dataset[f"{labels}_null"], "dotted")
    axis.set(title=f"{words} (dotted: shuffled)", ylabel=f"{symbol}(Z;X) - {symbol}(Z;Y)")


def _largest(dataset: "xarray.Dataset") -> "xarray.Dataset":
    """Return the networks of the largest weight decay."""
    return dataset.isel(weight_decays=int(np.argmax(dataset.weight_decays.values)))


def _black(index: int) -> dict[str, Any]:
    return {**plotting.look(index), "color": ("black", "0.4", "0.6")[index % 3]}


def _title(axis: Axes, dataset: "xarray.Dataset", words: str) -> None:
    axis.set_title(f"{words}, weight decay {max(dataset.weight_decays.values):g}")


def _estimators(axis: Axes, dataset: "xarray.Dataset") -> None:
    """Draw I(Z;X) and I(Z;Y) by two estimators at the largest weight decay."""
    steps, largest = dataset.information_step.values, _largest(dataset)
    later = steps >= 10
    names = {
        "mi_zx_compression": "I(Z;X) neighbours",
        "mi_zx_smoothed": "I(Z;X) smoothed",
        "mi_zy_compression": "I(Z;Y) neighbours",
        "mi_zy_smoothed": "I(Z;Y) smoothed",
        "mi_zx_compression_null": "I(Z;X) shuffled",
        "mi_zy_compression_null": "I(Z;Y) shuffled",
    }
    for index, (name, label) in enumerate(names.items()):
        mean = plotting.summarise(largest[name].values).mean[later]
        axis.plot(steps[later], mean, label=label, **{**_black(index), "markevery": None})
    _against_steps(axis, steps)
    axis.set(ylim=(min(0.0, axis.get_ylim()[0]), None), ylabel="nats")
    _title(axis, dataset, "estimators")
    _legend(axis)


def _geometry(axis: Axes, dataset: "xarray.Dataset") -> None:
    """Draw the other measures of neural collapse at the largest weight decay."""
    steps, largest = dataset.time_step.values, _largest(dataset)
    names = {
        "trace_ratio": "tr($S_W S_B^+$)/C",
        "equinorm": "NC2 norms",
        "equiangularity": "NC2 angles",
        "nc3_score": "NC3",
        "nc4_score": "1 - NC4",
    }
    later = steps >= 10
    for index, (name, label) in enumerate(names.items()):
        values = plotting.summarise(largest[name].values).mean[later]
        values = 1 - values if name == "nc4_score" else values
        shown = np.where(values > 0, values, np.nan)
        look = _black(index) if np.isfinite(shown).any() else {}
        axis.plot(steps[later], shown, label=label, **look)
    _against_steps(axis, steps, log=True)
    axis.set(ylabel="distance (log)")
    _title(axis, dataset, "distances from collapse")
    _legend(axis, 3)


def _scale(axis: Axes, dataset: "xarray.Dataset") -> None:
    for name, style in (("weight_norm", "dashed"), ("head_norm", "dotted")):
        if name in dataset:  # sweeps of earlier versions lack them
            _means(axis, dataset[name], style)
    values = dataset.scale_means
    _curves(axis, values, log=True, within=(_floor(values.values), np.inf))
    axis.set(ylabel="norm (log)", title="features (line), weights (dashed), last (dotted)")


def _margins(axis: Any, dataset: "xarray.Dataset") -> None:
    largest, classes = _largest(dataset), dataset.classes.values
    _title(axis, dataset, "margins")
    axis.axhline(0, color="black", linewidth=0.5)
    for place, label in enumerate(classes):
        for side, split, color in (("low", "train", "0.35"), ("high", "test", "0.75")):
            values = largest.margin.sel(classes=label, splits=split).values.reshape(-1)
            values = values[np.isfinite(values)]
            if values.size < 2 or values.std() == 0:
                continue
            quartiles = [[0.25, 0.5, 0.75]]
            body = axis.violinplot(values, [place], side=side, showextrema=False, quantiles=quartiles, widths=0.8)
            body["bodies"][0].set(facecolor=color, alpha=1.0, label=split if place == 0 else None)
            body["cquantiles"].set(color="black", linewidth=0.8)
    axis.set(xticks=range(len(classes)), xticklabels=[f"class {label}" for label in classes], ylabel="signed distance")
    _legend(axis)


def _plane(axis: Axes, dataset: "xarray.Dataset") -> None:
    """Draw one seed's samples of two classes in the plane of their weights."""
    largest, classes = _largest(dataset), dataset.classes.values
    first = largest.isel(seeds=int(np.argmax(largest.diverged_at.values < 0)))  # the first that did not diverge
    for marker, label in zip("ox", classes, strict=True):
        for split, size, color in (("test", 4, "0.65"), ("train", 8, "black")):
            points = first.plane.sel(classes=label, splits=split).values
            points = points[np.isfinite(points).all(1)]
            points = points[:: max(1, len(points) // SHOWN_POINTS)]
            axis.scatter(*points.T, s=size, color=color, marker=marker, linewidth=0.5, label=f"class {label}, {split}")
    axis.axvline(first.plane_boundary.item(), color="black", linewidth=0.8)
    axis.set(title=f"plane of classes {classes[0]} and {classes[1]}", xlabel="along $w_a - w_b$", ylabel="across")
    _legend(axis)


def _crossings(axis: Axes, dataset: "xarray.Dataset") -> None:
    end = int(dataset.time_step.values[-1])
    shown = (("fitted", "0.65", "o", 0.88), ("generalised", "0.4", "D", 1.0), ("collapsed", "black", "s", 1.14))
    axis.set(xlabel="weight decay", ylabel="step (log)", title="first crossing (open: never)")
    dataset = dataset.isel(weight_decays=dataset.weight_decays.values > 0)  # a logarithmic axis has no 0
    decays, alive = dataset.weight_decays.values, ~dataset.diverged.values
    for name, color, marker, aside in shown:
        times = np.maximum(dataset.first_crossing.sel(events=name).values, 1)  # neither for step 0
        places = (np.repeat(decays, times.shape[1]) * aside)[alive.reshape(-1)]
        flat = times[alive]
        crossed = ~np.isnan(flat)
        axis.plot(places[crossed], flat[crossed], marker, color=color, markersize=2, alpha=0.5, linestyle="")
        never = np.full((~crossed).sum(), end)
        axis.plot(places[~crossed], never, marker, color=color, markersize=3, mfc="none", linestyle="")
        medians = dataset.median_crossing.sel(events=name).values
        kept = np.isfinite(medians[:, 0])
        values, low, high = np.where(np.isfinite(medians), np.maximum(medians, 1), end)[kept].T
        spread = np.maximum([values - low, high - values], 0)
        where = decays[kept] * aside
        axis.errorbar(where, values, spread, color=color, fmt=marker, markersize=4, label=name, linewidth=1)
    slope, intercept = dataset.collapse_line.values
    if np.isfinite(slope):
        ends = np.asarray([decays.min(), decays.max()])
        times = np.exp(intercept + slope * np.log(ends))
        axis.plot(ends, times, color="black", linewidth=0.8, linestyle="--", label=f"slope {slope:.2f}")
    axis.set_xscale("log")
    axis.margins(0.12)
    plotting.log_height(axis)
    axis.set_xticks(decays, [f"{decay:g}" for decay in decays])
    axis.set_xticks([], minor=True)
    _legend(axis)
