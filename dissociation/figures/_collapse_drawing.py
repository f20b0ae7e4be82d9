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

_MEASURES = {
    "mi_{}_compression": ("I", "nearest neighbours"),
    "nhsic_{}": ("nHSIC", "fixed bandwidth"),
    "nhsic_{}_free": ("nHSIC", "median bandwidth"),
}
"""Symbols and labels of measures of information, by array name with "zx" or "zy" for {}."""

Panel = tuple[Callable[[Axes], None], str]
"""Function that draws a panel, and the panel's sentence in the caption."""


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw every panel that has numbers, three per row; 7.2 inches wide, 2.3 inches per row."""
    panels = _panels(dataset)
    num_panels = len(panels)
    num_rows = -(-num_panels // 3)
    size = (7.2, 2.3 * num_rows + 0.3)
    figure, axes = plt.subplots(num_rows, 3, figsize=size, squeeze=False)
    for axis, (draw_panel, _) in zip(axes.flat, panels, strict=False):
        draw_panel(axis)
    for axis in axes.flat[num_panels:]:
        axis.remove()
    plotting.letter(*axes.flat[:num_panels])
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, title="weight decay", loc="outside upper center", ncols=8)
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    sentences = []
    for letter, (_, sentence) in zip("abcdefghijkl", _panels(dataset), strict=False):
        sentences.append(f"({letter}) {sentence}")
    steps = ""
    if "mi_zx_compression" in dataset and len(dataset.information_step):
        steps = f"Information is measured {len(dataset.information_step)} times. "
    curves = [*dataset.test_accuracy.values, *dataset.rnc1_score.values]
    return (
        f"Networks during training: {'; '.join(sentences)}. {plotting.drawn_as(*curves)} {steps}"
        f"Data: {headline(dataset)}."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the exponents of weight decay.

    They are those of the time of collapse and of the delay after fitting.
    """
    decays = dataset.weight_decays.values
    seeds = dataset.seeds.values
    names = []
    for decay in decays:
        names += [f"weight decay {decay:g} seed {seed}" for seed in seeds]
    return (
        f"{data_line(dataset)}, {len(decays)} weight decays x {len(seeds)} seeds, "
        f"{config_of(dataset).num_steps} steps; {dataset.attrs['slope']}"
        f"{named_diverged(names, dataset.diverged_at.values.reshape(-1))}"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per weight decay, with crossings and the last measures.

    Crossings are medians with 90 % intervals.
    """
    crossings = [
        "fitted at",
        "generalised",
        "collapsed",
        "90 % interval",
        "never",
        "delay",
        "90 % interval",
    ]
    rows = [["weight decay", *crossings, "test accuracy", "RNC1", "NC2"]]
    for decay in dataset.weight_decays.values:
        networks = dataset.sel(weight_decays=decay)
        is_alive = ~networks.diverged.values
        cells = ["all diverged", *[""] * 6]
        if is_alive.any():
            cells = _crossing_cells(networks, is_alive)
        rows.append(
            [
                f"{decay:g}",
                *cells,
                _last_mean(networks.test_accuracy, ".4f"),
                _last_mean(networks.rnc1_score, ".2g"),
                _last_mean(networks.nc2_score, ".3g"),
            ]
        )
    return rows


def _crossing_cells(networks: xarray.Dataset, is_alive: np.ndarray) -> list[str]:
    """Return the cells of the crossings of the networks of one weight decay."""
    medians, lows, highs = networks.median_crossing.values.T
    lows = np.maximum(lows, 0.0)  # no time is negative
    fitted, generalised, collapsed, delay = (f"{median:.0f}" for median in medians)
    times = networks.first_crossing.sel(events="collapsed").values[is_alive]
    return [
        fitted,
        generalised,
        collapsed,
        f"{lows[2]:.0f} to {highs[2]:.0f}",
        f"{np.isnan(times).sum()} of {len(times)}",
        delay,
        f"{lows[3]:.0f} to {highs[3]:.0f}",
    ]


def _last_mean(series: xarray.DataArray, form: str) -> str:
    """Return the last mean over seeds, and the number of seeds if some are missing."""
    values = series.values[:, -1]
    mean, _, count = plotting.summarise(values)
    text = format(float(mean), form)
    if count < len(values):
        text = f"{text} ({count} of {len(values)})"
    return text


def _panels(dataset: xarray.Dataset) -> list[Panel]:
    """Return the panels that have numbers, in order."""
    config = config_of(dataset)
    largest = max(dataset.weight_decays.values)
    decay = f"weight decay {largest:g}"
    panels = _training_panels(dataset, config.collapse_threshold)

    information = _information_panels(dataset)
    panels += information
    if information and "mi_zx_compression" in dataset:
        estimators = partial(_estimators, dataset=dataset)
        panels.append((estimators, f"two estimators of information at {decay}"))

    panels.append((partial(_geometry, dataset=dataset), f"distances from collapse at {decay}"))
    norms = partial(
        _series,
        values=dataset.scale_means,
        log=True,
        dashed=dataset.weight_norm,
        dotted=dataset.head_norm,
        ylabel="norm",
        title="features (line), weights (dashed), last (dotted)",
    )
    sentence = (
        "norm of the class means; dashed, of all weights; dotted, of the last layer's weights"
    )
    panels.append((norms, sentence))

    if "margin" in dataset:
        classes = " and ".join(map(str, config.classes))
        sentence = (
            f"distances of images of classes {classes} to their boundary at {decay}, all seeds"
        )
        panels.append((partial(_margins, dataset=dataset), sentence))
        sentence = f"one seed's images of these classes in the plane of their weights, at {decay}"
        panels.append((partial(_plane, dataset=dataset), sentence))
    if largest > 0:
        sentence = (
            "first steps at which networks fitted, generalised and collapsed, with medians "
            "and 90 % intervals; open symbols for networks that never did"
        )
        panels.append((partial(_crossings, dataset=dataset), sentence))
    return panels


def _training_panels(dataset: xarray.Dataset, threshold: float) -> list[Panel]:
    """Return the panels of accuracy, of RNC1, and of NC2."""
    accuracy = partial(
        _series,
        values=dataset.test_accuracy,
        dashed=dataset.train_accuracy,
        within=(0.0, 1.0),
        ylim=(0, 1.02),
        ylabel="accuracy",
        title="test (line), training (dashed)",
    )
    collapse = partial(
        _series,
        values=dataset.rnc1_score,
        log=True,
        threshold=threshold,
        ylabel="RNC1",
        title="collapse of classes (training)",
    )
    means = partial(
        _series,
        values=dataset.nc2_score,
        log=True,
        threshold=1,
        within=(1.0, np.inf),
        ylabel="NC2",
        title="condition number of means",
    )
    return [
        (accuracy, "accuracy on test images; dashed, on training images"),
        (
            collapse,
            "spread within classes over spread between classes; dotted, the threshold "
            f"{threshold:g}",
        ),
        (means, "condition number of the class means; dotted, its value after collapse"),
    ]


def _information_panels(dataset: xarray.Dataset) -> list[Panel]:
    """Return a panel for each measure of information that has finite values."""
    panels = []
    is_drawn = dataset.information_step.values >= 10
    for name, (symbol, words) in _MEASURES.items():
        zx = name.format("zx")
        zy = name.format("zy")
        if zx not in dataset:
            continue
        is_finite = np.isfinite(dataset[zx].values[..., is_drawn])
        if not is_finite.any():
            continue
        information = f"{symbol}(Z;X) - {symbol}(Z;Y)"
        panel = partial(
            _series,
            values=dataset[zx] - dataset[zy],
            dotted=dataset[f"{zx}_null"] - dataset[f"{zy}_null"],
            ylabel=information,
            title=f"{words} (dotted: shuffled)",
        )
        panels.append((panel, f"{information} by {words}; dotted, with shuffled rows"))
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
    """Draw a curve per weight decay from step 10 on, and means over seeds of other values."""
    steps = values[values.dims[-1]].values
    decays = values.weight_decays.values
    is_drawn = steps >= 10
    curves = values.values
    if log and not np.isfinite(within[0]):  # bands end at half the least positive value
        lowest = 1e-12
        positive = curves[np.isfinite(curves) & (curves > 0)]
        if positive.size:
            lowest = 0.5 * float(positive.min())
        within = (lowest, np.inf)

    colormap = plt.get_cmap("viridis")
    colors = []
    for index, decay in enumerate(decays):
        # Brighter for smaller weight decays.
        brightness = 0.85 * index / max(len(decays) - 1, 1)
        color = colormap(brightness)
        colors.append(color)
        look = {**plotting.look(index), "color": color, "linestyle": "solid", "within": within}
        drawn = curves[index][:, is_drawn]
        plotting.band(axis, steps[is_drawn], drawn, label=f"{decay:g}", **look)
    for style, means in (("dashed", dashed), ("dotted", dotted)):
        if means is None:
            continue
        for color, seeds in zip(colors, means.values, strict=True):
            mean = plotting.summarise(seeds).mean[is_drawn]
            axis.plot(steps[is_drawn], mean, color=color, linestyle=style, linewidth=0.8)

    _against_steps(axis, steps, log=log)
    if threshold is not None:
        axis.axhline(threshold, color="black", linestyle=":", linewidth=0.8)
    axis.set(**labels)


def _against_steps(axis: Axes, steps: np.ndarray, *, log: bool = False) -> None:
    # A logarithmic axis finds no limits if nothing is finite, or no step has reached 10.
    last = 10
    if len(steps):
        last = max(last, int(steps[-1]))
    axis.set(xscale="log", xlabel="step", xlim=(9, 1.1 * last))
    if not log:
        return
    has_positive = [np.any(np.asarray(line.get_ydata()) > 0) for line in axis.lines]
    if any(has_positive):
        plotting.log_height(axis)


def _legend(axis: Axes, columns: int = 2) -> None:
    handles, _ = axis.get_legend_handles_labels()
    if handles:
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
    """Draw means over seeds at the largest weight decay, in black and grey, from step 10 on."""
    steps = np.zeros(0)
    for index, (label, values) in enumerate(curves.items()):
        steps = values[values.dims[-1]].values
        is_drawn = steps >= 10
        mean = plotting.summarise(_largest(values).values).mean
        if log:
            mean = np.where(mean > 0, mean, np.nan)
        mean = mean[is_drawn]
        look: dict[str, Any] = {}
        if np.isfinite(mean).any():
            grey = ("black", "0.4", "0.6")[index % 3]
            look = {**plotting.look(index), "color": grey, **options}
        axis.plot(steps[is_drawn], mean, label=label, **look)
    _against_steps(axis, steps, log=log)


def _estimators(axis: Axes, dataset: xarray.Dataset) -> None:
    """Draw I(Z;X) and I(Z;Y) by two estimators at the largest weight decay."""
    curves = {
        "I(Z;X) neighbours": dataset.mi_zx_compression,
        "I(Z;X) smoothed": dataset.mi_zx_smoothed,
        "I(Z;Y) neighbours": dataset.mi_zy_compression,
        "I(Z;Y) smoothed": dataset.mi_zy_smoothed,
        "I(Z;X) shuffled": dataset.mi_zx_compression_null,
        "I(Z;Y) shuffled": dataset.mi_zy_compression_null,
    }
    _lines(axis, curves, markevery=None)
    lowest, _ = axis.get_ylim()
    axis.set(ylim=(min(0.0, lowest), None), ylabel="nats")
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
    margins = _largest(dataset).margin
    classes = dataset.classes.values
    _title(axis, dataset, "margins")
    axis.axhline(0, color="black", linewidth=0.5)
    for position, label in enumerate(classes):
        for side, split, color in (("low", "train", "0.35"), ("high", "test", "0.75")):
            distances = margins.sel(classes=label, splits=split).values.reshape(-1)
            distances = distances[np.isfinite(distances)]
            if distances.size < 2 or distances.std() == 0:
                continue
            body = axis.violinplot(
                distances,
                [position],
                side=side,
                showextrema=False,
                quantiles=[[0.25, 0.5, 0.75]],
                widths=0.8,
            )
            violin = body["bodies"][0]
            violin.set(facecolor=color, alpha=1.0)
            if position == 0:
                violin.set(label=split)
            body["cquantiles"].set(color="black", linewidth=0.8)
    names = [f"class {label}" for label in classes]
    axis.set(xticks=range(len(classes)), xticklabels=names, ylabel="signed distance")
    _legend(axis)


def _plane(axis: Axes, dataset: xarray.Dataset) -> None:
    """Draw one seed's samples of two classes in the plane of their weights."""
    networks = _largest(dataset)
    classes = dataset.classes.values
    is_alive = networks.diverged_at.values < 0
    network = networks.isel(seeds=int(np.argmax(is_alive)))
    for marker, label in zip("ox", classes, strict=True):
        for split, size, color in (("test", 4, "0.65"), ("train", 8, "black")):
            points = network.plane.sel(classes=label, splits=split).values
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
    axis.axvline(network.plane_boundary.item(), color="black", linewidth=0.8)
    axis.set(
        title=f"plane of classes {classes[0]} and {classes[1]}",
        xlabel="along $w_a - w_b$",
        ylabel="across",
    )
    _legend(axis)


def _crossings(axis: Axes, dataset: xarray.Dataset) -> None:
    end = int(dataset.time_step.values[-1])
    axis.set(xlabel="weight decay", ylabel="step", title="first crossing (above the line: never)")
    is_positive = dataset.weight_decays.values > 0
    dataset = dataset.isel(weight_decays=is_positive)  # a logarithmic axis has no 0
    decays = dataset.weight_decays.values
    is_alive = ~dataset.diverged.values
    for name, color, marker, shift in (
        ("fitted", "0.65", "o", 0.88),
        ("generalised", "0.4", "D", 1.0),
        ("collapsed", "black", "s", 1.14),
    ):
        # A logarithmic axis has no step 0 either.
        times = np.maximum(dataset.first_crossing.sel(events=name).values, 1)
        positions = np.repeat(decays, times.shape[1]) * shift
        positions = positions[is_alive.reshape(-1)]
        times = times[is_alive]
        crossed = ~np.isnan(times)
        look: Any = {"marker": marker, "color": color, "linestyle": ""}
        axis.plot(positions[crossed], times[crossed], markersize=2, alpha=0.5, **look)
        never = np.full((~crossed).sum(), 2 * end)
        axis.plot(positions[~crossed], never, markersize=3, mfc="none", **look)

        bounds = dataset.median_crossing.sel(events=name).values
        is_finite = np.isfinite(bounds)
        has_median = is_finite[:, 0]
        bounds = np.where(is_finite, np.maximum(bounds, 1), end)
        medians, lows, highs = bounds[has_median].T
        spread = np.maximum([medians - lows, highs - medians], 0)
        axis.errorbar(
            decays[has_median] * shift,
            medians,
            spread,
            color=color,
            fmt=marker,
            markersize=4,
            label=name,
            linewidth=1,
        )
    axis.axhline(1.4 * end, color="0.5", linestyle=":", linewidth=0.8, label="end of training")
    axis.set_xscale("log")
    axis.margins(0.12)
    plotting.log_height(axis)
    axis.set_xticks(decays, [f"{decay:g}" for decay in decays])
    axis.set_xticks([], minor=True)
    _legend(axis)
