"""Drawing and texts of the figure `collapse`, panel by panel, from its dataset.

Colours and markers show weight decays, dashes kinds of curves. Curves of a single weight decay are
black.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import config_of, drawing
from dissociation.figures._members import data_line
from dissociation.figures._seeds import named_diverged
from dissociation.plotting import _axes as plotting

SHOWN_POINTS = 400
"""Largest number of samples per class and split in the plane of two classes."""

_PAIRS = {
    "mi_{}_compression": ("I", "nearest neighbours"),
    "nhsic_{}": ("nHSIC", "fixed bandwidth"),
    "nhsic_{}_free": ("nHSIC", "median bandwidth"),
}
"""Symbols and labels of the measures of the information plane, by array name with "zx" or "zy" for {}."""


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw every panel that has numbers, three per row; 7.2 inches wide, 2.3 inches per row."""
    panels = _panels(dataset)
    rows = -(-len(panels) // 3)
    figure, axes = plt.subplots(rows, 3, figsize=(7.2, 2.3 * rows + 0.3), squeeze=False)
    for axis, (panel, _) in zip(axes.flat, panels, strict=False):
        panel(axis)
    for axis in axes.flat[len(panels) :]:
        axis.remove()
    plotting.letter(*axes.flat[: len(panels)])
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, title="weight decay", loc="outside upper center", ncols=8)
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    said = "; ".join(
        f"({'abcdefghijkl'[index]}) {words}" for index, (_, words) in enumerate(_panels(dataset))
    )
    curves = [*dataset.test_accuracy.values, *dataset.rnc1_score.values]
    count = len(dataset.information_step) if "mi_zx_compression" in dataset else 0
    steps = f"Information is measured {count} times. " if count else ""
    return (
        f"Networks during training: {said}. {plotting.drawn_as(*curves)} {steps}Data: "
        f"{headline(dataset)}."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data, and exponents of weight decay in collapse time and in delay after fitting."""
    decays, seeds = dataset.weight_decays.values, dataset.seeds.values
    names = [f"weight decay {decay:g} seed {seed}" for decay in decays for seed in seeds]
    return (
        f"{data_line(dataset)}, {len(decays)} weight decays x {len(seeds)} seeds, "
        f"{config_of(dataset).num_steps} steps; {dataset.attrs['slope']}"
        f"{named_diverged(names, dataset.diverged_at.values.reshape(-1))}"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per weight decay: medians of crossings with 90 % intervals, and the last measures."""
    crossed = [
        "fitted at",
        "generalised",
        "collapsed",
        "90 % interval",
        "never",
        "delay",
        "90 % interval",
    ]
    forms = {"test_accuracy": ".4f", "rnc1_score": ".2g", "nc2_score": ".3g"}
    shown = [["weight decay", *crossed, "test accuracy", "RNC1", "NC2"]]
    for decay in dataset.weight_decays.values:
        one = dataset.sel(weight_decays=decay)
        alive = ~one.diverged.values
        cells = ["all diverged", *[""] * 6]
        if alive.any():
            median, low, high = one.median_crossing.values.T
            fitted, generalised, collapsed, delay = (f"{value:.0f}" for value in median)
            # No time is negative.
            spread = [
                f"{max(below, 0.0):.0f} to {above:.0f}"
                for below, above in zip(low, high, strict=True)
            ]
            times = one.first_crossing.sel(events="collapsed").values[alive]
            never = f"{np.isnan(times).sum()} of {len(times)}"
            cells = [fitted, generalised, collapsed, spread[2], never, delay, spread[3]]
        last = [_mean(one[name].values[:, -1], form) for name, form in forms.items()]
        shown.append([f"{decay:g}", *cells, *last])
    return shown


def _mean(values: np.ndarray, form: str) -> str:
    """Return the mean over seeds, and the number of seeds if some are missing."""
    mean, _, count = plotting.summarise(values)
    shown = format(float(mean), form)
    return shown if count == len(values) else f"{shown} ({count} of {len(values)})"


def _panels(dataset: xarray.Dataset) -> list[tuple[Callable[[Axes], None], str]]:
    """Return the panels that have numbers, in order, with their sentences of the caption."""
    config, largest = config_of(dataset), max(dataset.weight_decays.values)
    decay, classes = f"weight decay {largest:g}", " and ".join(map(str, config.classes))
    threshold = config.collapse_threshold
    accuracy: dict[str, Any] = {
        "dashed": dataset.train_accuracy,
        "within": (0.0, 1.0),
        "ylim": (0, 1.02),
    }
    accuracy |= {"ylabel": "accuracy", "title": "test (line), training (dashed)"}
    collapse = {"threshold": threshold, "ylabel": "RNC1", "title": "collapse of classes (training)"}
    means = {
        "threshold": 1,
        "within": (1.0, np.inf),
        "ylabel": "NC2",
        "title": "condition number of means",
    }
    panels: list[tuple[Callable[[Axes], None], str]] = [
        (
            partial(_series, values=dataset.test_accuracy, **accuracy),
            "accuracy on test images; dashed, on training images",
        ),
        (
            partial(_series, values=dataset.rnc1_score, log=True, **collapse),
            "spread within classes over spread between classes; dotted, the threshold "
            f"{threshold:g}",
        ),
        (
            partial(_series, values=dataset.nc2_score, log=True, **means),
            "condition number of the class means; dotted, its value after collapse",
        ),
    ]
    for name, (symbol, words) in _PAIRS.items():
        zx, zy = (name.format(part) for part in ("zx", "zy"))
        if (
            zx in dataset
            and np.isfinite(dataset[zx].values[..., dataset.information_step.values >= 10]).any()
        ):
            information = f"{symbol}(Z;X) - {symbol}(Z;Y)"
            options = {
                "dotted": dataset[f"{zx}_null"] - dataset[f"{zy}_null"],
                "ylabel": information,
            }
            options |= {"title": f"{words} (dotted: shuffled)"}
            panel = partial(_series, values=dataset[zx] - dataset[zy], **options)
            panels.append((panel, f"{information} by {words}; dotted, with shuffled rows"))
    if len(panels) > 3 and "mi_zx_compression" in dataset:
        panels.append(
            (partial(_estimators, dataset=dataset), f"two estimators of information at {decay}")
        )
    panels.append((partial(_geometry, dataset=dataset), f"distances from collapse at {decay}"))
    norms = {"dashed": dataset["weight_norm"], "dotted": dataset["head_norm"], "ylabel": "norm"}
    norms |= {"title": "features (line), weights (dashed), last (dotted)"}
    panel = partial(_series, values=dataset.scale_means, log=True, **norms)
    panels.append(
        (
            panel,
            "norm of the class means; dashed, of all weights; dotted, of the last layer's weights",
        )
    )
    if "margin" in dataset:
        distances = (
            f"distances of images of classes {classes} to their boundary at {decay}, all seeds"
        )
        plane = f"one seed's images of these classes in the plane of their weights, at {decay}"
        panels += [
            (partial(_margins, dataset=dataset), distances),
            (partial(_plane, dataset=dataset), plane),
        ]
    if largest > 0:
        crossed = (
            "first steps at which networks fitted, generalised and collapsed, with medians "
            "and 90 % intervals"
        )
        panels.append(
            (
                partial(_crossings, dataset=dataset),
                f"{crossed}; open symbols for networks that never did",
            )
        )
    return panels


def _series(
    axis: Axes,
    values: xarray.DataArray,
    *,
    dashed: xarray.DataArray | None = None,
    dotted: xarray.DataArray | None = None,
    threshold: float | int | None = None,
    log: bool = False,
    within: tuple[float, float] = (-np.inf, np.inf),
    **labels: Any,
) -> None:
    """Draw a curve per weight decay from step 10 on, and means over seeds of other values without bands."""
    steps, decays = values[values.dims[-1]].values, values.weight_decays.values
    later, positive = steps >= 10, values.values[np.isfinite(values.values) & (values.values > 0)]
    if log and not np.isfinite(within[0]):  # bands end at half the least positive value
        within = (0.5 * float(positive.min()) if positive.size else 1e-12, np.inf)
    # Brighter for smaller weight decays.
    colors = [
        plt.get_cmap("viridis")(0.85 * index / max(len(decays) - 1, 1))
        for index in range(len(decays))
    ]
    for index, (decay, curves) in enumerate(zip(decays, values.values, strict=True)):
        look = {**plotting.look(index), "color": colors[index], "linestyle": "solid"}
        plotting.band(
            axis, steps[later], curves[:, later], label=f"{decay:g}", **look, within=within
        )
    for style, others in (("dashed", dashed), ("dotted", dotted)):
        for color, curves in zip(colors, others.values, strict=True) if others is not None else ():
            mean = plotting.summarise(curves).mean[later]
            axis.plot(steps[later], mean, color=color, linestyle=style, linewidth=0.8)
    _against_steps(axis, steps, log=log)
    if threshold is not None:
        axis.axhline(threshold, color="black", linestyle=":", linewidth=0.8)
    axis.set(**labels)


def _against_steps(axis: Axes, steps: np.ndarray, *, log: bool = False) -> None:
    # A logarithmic axis finds no limits if nothing is finite, or no step has reached 10.
    axis.set(
        xscale="log", xlabel="step", xlim=(9, 1.1 * max(10, int(steps[-1]) if len(steps) else 10))
    )
    if log and any((np.asarray(line.get_ydata()) > 0).any() for line in axis.lines):
        plotting.log_height(axis)


def _legend(axis: Axes, columns: int = 2) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=columns, handlelength=2.5
        )


def _largest(dataset: Any) -> Any:
    """Return the networks of the largest weight decay."""
    return dataset.isel(weight_decays=int(np.argmax(dataset.weight_decays.values)))


def _title(axis: Axes, dataset: xarray.Dataset, words: str) -> None:
    axis.set_title(f"{words}, weight decay {max(dataset.weight_decays.values):g}")


def _lines(
    axis: Axes, curves: dict[str, xarray.DataArray], *, log: bool = False, **options: Any
) -> None:
    """Draw means over seeds at the largest weight decay by label, from step 10 on, in black and grey."""
    steps = np.zeros(0)
    for index, (label, values) in enumerate(curves.items()):
        steps = values[values.dims[-1]].values
        later, mean = steps >= 10, plotting.summarise(_largest(values).values).mean
        shown = np.where(mean > 0, mean, np.nan)[later] if log else mean[later]
        look = {**plotting.look(index), "color": ("black", "0.4", "0.6")[index % 3], **options}
        axis.plot(steps[later], shown, label=label, **look if np.isfinite(shown).any() else {})
    _against_steps(axis, steps, log=log)


def _estimators(axis: Axes, dataset: xarray.Dataset) -> None:
    """Draw I(Z;X) and I(Z;Y) by two estimators at the largest weight decay."""
    names = {
        "I(Z;X) neighbours": "mi_zx_compression",
        "I(Z;X) smoothed": "mi_zx_smoothed",
        "I(Z;Y) neighbours": "mi_zy_compression",
        "I(Z;Y) smoothed": "mi_zy_smoothed",
        "I(Z;X) shuffled": "mi_zx_compression_null",
        "I(Z;Y) shuffled": "mi_zy_compression_null",
    }
    _lines(axis, {label: dataset[name] for label, name in names.items()}, markevery=None)
    axis.set(ylim=(min(0.0, axis.get_ylim()[0]), None), ylabel="nats")
    _title(axis, dataset, "estimators")
    _legend(axis)


def _geometry(axis: Axes, dataset: xarray.Dataset) -> None:
    """Draw the other measures of neural collapse at the largest weight decay."""
    curves = {
        "tr($S_W S_B^+$)/C": dataset.trace_ratio,
        "NC2 norms": dataset.equinorm,
        "NC2 angles": dataset.equiangularity,
        "NC3": dataset.nc3_score,
        "1 - NC4": 1 - dataset.nc4_score,
    }
    _lines(axis, curves, log=True)
    axis.set(ylabel="distance")
    _title(axis, dataset, "distances from collapse")
    _legend(axis, 3)


def _margins(axis: Any, dataset: xarray.Dataset) -> None:
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
            body = axis.violinplot(
                values, [place], side=side, showextrema=False, quantiles=quartiles, widths=0.8
            )
            body["bodies"][0].set(facecolor=color, alpha=1.0, label=split if place == 0 else None)
            body["cquantiles"].set(color="black", linewidth=0.8)
    axis.set(
        xticks=range(len(classes)),
        xticklabels=[f"class {label}" for label in classes],
        ylabel="signed distance",
    )
    _legend(axis)


def _plane(axis: Axes, dataset: xarray.Dataset) -> None:
    """Draw one seed's samples of two classes in the plane of their weights."""
    largest, classes = _largest(dataset), dataset.classes.values
    first = largest.isel(
        seeds=int(np.argmax(largest.diverged_at.values < 0))
    )  # the first that did not diverge
    for marker, label in zip("ox", classes, strict=True):
        for split, size, color in (("test", 4, "0.65"), ("train", 8, "black")):
            points = first.plane.sel(classes=label, splits=split).values
            points = points[np.isfinite(points).all(1)]
            points = points[:: max(1, len(points) // SHOWN_POINTS)]
            axis.scatter(
                *points.T,
                s=size,
                color=color,
                marker=marker,
                linewidth=0.5,
                label=f"class {label}, {split}",
            )
    axis.axvline(first.plane_boundary.item(), color="black", linewidth=0.8)
    axis.set(
        title=f"plane of classes {classes[0]} and {classes[1]}",
        xlabel="along $w_a - w_b$",
        ylabel="across",
    )
    _legend(axis)


def _crossings(axis: Axes, dataset: xarray.Dataset) -> None:
    end = int(dataset.time_step.values[-1])
    shown = (
        ("fitted", "0.65", "o", 0.88),
        ("generalised", "0.4", "D", 1.0),
        ("collapsed", "black", "s", 1.14),
    )
    axis.set(xlabel="weight decay", ylabel="step", title="first crossing (above the line: never)")
    dataset = dataset.isel(
        weight_decays=dataset.weight_decays.values > 0
    )  # a logarithmic axis has no 0
    decays, alive = dataset.weight_decays.values, ~dataset.diverged.values
    for name, color, marker, aside in shown:
        times = np.maximum(dataset.first_crossing.sel(events=name).values, 1)  # neither for step 0
        places = (np.repeat(decays, times.shape[1]) * aside)[alive.reshape(-1)]
        flat = times[alive]
        crossed = ~np.isnan(flat)
        axis.plot(
            places[crossed],
            flat[crossed],
            marker,
            color=color,
            markersize=2,
            alpha=0.5,
            linestyle="",
        )
        never = np.full((~crossed).sum(), 2 * end)
        axis.plot(
            places[~crossed], never, marker, color=color, markersize=3, mfc="none", linestyle=""
        )
        medians = dataset.median_crossing.sel(events=name).values
        kept = np.isfinite(medians[:, 0])
        values, low, high = np.where(np.isfinite(medians), np.maximum(medians, 1), end)[kept].T
        spread = np.maximum([values - low, high - values], 0)
        where = decays[kept] * aside
        axis.errorbar(
            where, values, spread, color=color, fmt=marker, markersize=4, label=name, linewidth=1
        )
    axis.axhline(1.4 * end, color="0.5", linestyle=":", linewidth=0.8, label="end of training")
    axis.set_xscale("log")
    axis.margins(0.12)
    plotting.log_height(axis)
    axis.set_xticks(decays, [f"{decay:g}" for decay in decays])
    axis.set_xticks([], minor=True)
    _legend(axis)
