"""How the figure of neural collapse is drawn, panel by panel, from its results."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from dissociation import plotting

SHOWN_POINTS = 400
"""Samples of a class and split in the plane of two classes, at most."""


def draw(results: Any) -> Figure:
    """Rows of training, of information, of estimators and geometry, and of margins with crossings; 7.2 x 8.8 inches."""
    with plotting.house_style():
        figure, axes = plt.subplots(4, 3, figsize=(7.2, 8.8), layout="constrained")
        _training(axes[0], results)
        _information(axes[1], results)
        _estimators(axes[2, 0], results)
        _geometry(axes[2, 1], results)
        _scale(axes[2, 2], results)
        _margins(axes[3, 0], results)
        _plane(axes[3, 1], results)
        _crossings(axes[3, 2], results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _curves(
    axis: Any, steps: np.ndarray, values: np.ndarray, decays: tuple[float, ...], *, yscale: str = "linear", **style: Any
) -> None:
    """A band over seeds per weight decay, from step 10 on."""
    later = steps >= 10
    for index, (decay, curves) in enumerate(zip(decays, values, strict=True)):
        plotting.band(axis, steps[later], curves[:, later], color=f"C{index}", label=f"$\\lambda$ = {decay:g}", **style)
    _against_steps(axis, steps, yscale=yscale)


def _against_steps(axis: Any, steps: np.ndarray, *, yscale: str = "linear") -> None:
    """Limits are set: a logarithmic axis cannot find its own where nothing is finite, or no step has come to 10."""
    axis.set(xscale="log", xlabel="step", xlim=(9, 1.1 * max(10, int(steps[-1]) if len(steps) else 10)))
    if any((np.asarray(line.get_ydata()) > 0).any() for line in axis.lines):
        axis.set(yscale=yscale)


def _floor(values: np.ndarray) -> float:
    """For the lower edge of bands on a logarithmic axis: half the least positive value."""
    positive = values[np.isfinite(values) & (values > 0)]
    return 0.5 * float(positive.min()) if positive.size else 1e-12


def _mean(values: np.ndarray) -> np.ndarray:
    """Over seeds, those left out that are not finite."""
    return np.ma.filled(np.ma.masked_invalid(values).mean(0).astype(float), np.nan)


def _training(axes: Any, results: Any) -> None:
    decays, steps, series = results.config.weight_decays, results.time_step, results.series
    later = steps >= 10
    _curves(axes[0], steps, series["test_accuracy"], decays)
    for index, curves in enumerate(series["train_accuracy"]):
        axes[0].plot(steps[later], _mean(curves)[later], linestyle="--", color=f"C{index}", linewidth=0.8)
    axes[0].set(ylim=(0, 1.02), ylabel="accuracy", title="test (line), training (dashed)")
    axes[0].legend(fontsize="x-small")
    _curves(axes[1], steps, series["rnc1_score"], decays, yscale="log", floor=_floor(series["rnc1_score"]))
    axes[1].axhline(results.config.collapse_threshold, color="black", linestyle=":", linewidth=0.8)
    axes[1].set(ylabel="RNC1", title="collapse of classes (training)")
    _curves(axes[2], steps, series["nc2_score"], decays)
    axes[2].axhline(1, color="black", linestyle=":", linewidth=0.8)
    axes[2].set(ylim=(0, None), ylabel="NC2", title="condition number of means")


def _information(axes: Any, results: Any) -> None:
    decays, steps, information = results.config.weight_decays, results.information_step, results.information
    titles = ("information (dotted: shuffled)", "fixed bandwidth (dotted: shuffled)", "median bandwidth")
    pairs = (("mi_zx_compression", "mi_zy_compression"), ("nhsic_zx", "nhsic_zy"), ("nhsic_zx_free", "nhsic_zy_free"))
    later = steps >= 10
    for axis, title, (inputs, labels) in zip(axes, titles, pairs, strict=True):
        kind = "I" if inputs.startswith("mi") else "nHSIC"
        axis.set(title=title, ylabel=f"{kind}(Z;X) - {kind}(Z;Y)")
        if inputs not in information or not np.isfinite(information[inputs]).any():
            _empty(axis, "not measured")
            continue
        _curves(axis, steps, information[inputs] - information[labels], decays)
        for index, null in enumerate(information[f"{inputs}_null"] - information[f"{labels}_null"]):
            axis.plot(steps[later], _mean(null)[later], linestyle=":", color=f"C{index}", linewidth=0.8)


def _largest(results: Any) -> int:
    return int(np.argmax(results.config.weight_decays))


def _estimators(axis: Any, results: Any) -> None:
    """I(Z;X) and I(Z;Y) by two estimators at the largest weight decay."""
    steps, information, largest = results.information_step, results.information, _largest(results)
    axis.set(title=f"estimators, $\\lambda$ = {results.config.weight_decays[largest]:g}", ylabel="nats")
    if "mi_zx_compression" not in information:
        _empty(axis, "not measured")
        return
    later = steps >= 10
    names = (
        ("mi_zx_compression", "C0", "-", "I(Z;X) entropies"),
        ("mi_zx_smoothed", "C0", ":", "I(Z;X) smoothed"),
        ("mi_zy_compression", "C1", "-", "I(Z;Y) entropies"),
        ("mi_zy_smoothed", "C1", ":", "I(Z;Y) smoothed"),
        ("mi_zx_compression_null", "grey", "-", "shuffled"),
        ("mi_zy_compression_null", "grey", "-", None),
    )
    for name, color, style, label in names:
        axis.plot(steps[later], _mean(information[name][largest])[later], color=color, linestyle=style, label=label)
    _against_steps(axis, steps)
    axis.set(ylim=(min(0.0, axis.get_ylim()[0]), None))
    axis.legend(fontsize="x-small")


def _geometry(axis: Any, results: Any) -> None:
    """The rest of the canon at the largest weight decay, on training samples."""
    steps, series, largest = results.time_step, results.series, _largest(results)
    names = {
        "trace_ratio": "tr($S_W S_B^+$)/C",
        "equinorm": "NC2 norms",
        "equiangularity": "NC2 angles",
        "nc3_score": "NC3",
        "nc4_score": "1 - NC4",
    }
    later = steps >= 10
    for index, (name, label) in enumerate(names.items()):
        values = _mean(series[name][largest])
        values = 1 - values if name == "nc4_score" else values
        axis.plot(steps[later], np.where(values > 0, values, np.nan)[later], color=f"C{index}", label=label)
    _against_steps(axis, steps, yscale="log")
    axis.set(ylabel="distance")
    axis.set_title(f"distances from collapse, $\\lambda$ = {results.config.weight_decays[largest]:g}")
    axis.legend(fontsize="x-small")


def _scale(axis: Any, results: Any) -> None:
    steps, values = results.time_step, results.series["scale_means"]
    _curves(axis, steps, values, results.config.weight_decays, yscale="log", floor=_floor(values))
    later = steps >= 10
    for name, style in (("weight_norm", "--"), ("head_norm", ":")):
        for index, curves in enumerate(results.series.get(name, ())):  # sweeps of earlier versions have none
            axis.plot(steps[later], _mean(curves)[later], linestyle=style, color=f"C{index}", linewidth=0.8)
    axis.set(ylabel="norm")
    axis.set_title("features (line), weights (dashed), last (dotted)")


def _empty(axis: Any, why: str) -> None:
    axis.text(0.5, 0.5, why, ha="center", transform=axis.transAxes)


def _margins(axis: Any, results: Any) -> None:
    largest, classes = _largest(results), results.config.classes
    axis.set(title=f"margins, $\\lambda$ = {results.config.weight_decays[largest]:g}", ylabel="signed distance")
    axis.axhline(0, color="black", linewidth=0.5)
    if not results.margins:
        _empty(axis, "after training")
        return
    for place, label in enumerate(classes):
        for side, split, color in (("low", "train", "C0"), ("high", "test", "C1")):
            values = results.margins[f"margin_{label}_{split}"][largest].reshape(-1)
            values = values[np.isfinite(values)]
            if values.size < 2 or values.std() == 0:
                continue
            quartiles = [[0.25, 0.5, 0.75]]
            body = axis.violinplot(values, [place], side=side, showextrema=False, quantiles=quartiles, widths=0.8)
            body["bodies"][0].set(facecolor=color, alpha=0.6, label=split if place == 0 else None)
            body["cquantiles"].set(color=color, linewidth=0.8)
    axis.set(xticks=range(len(classes)), xticklabels=[f"class {label}" for label in classes])
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="x-small")


def _plane(axis: Any, results: Any) -> None:
    """Samples of two classes in the plane of their weights, of one seed at the largest weight decay."""
    largest, classes = _largest(results), results.config.classes
    first = int(np.argmax(results.diverged_at[largest] < 0))  # the first that did not diverge
    axis.set(title=f"plane of classes {classes[0]} and {classes[1]}", xlabel="along $w_a - w_b$", ylabel="across")
    if not results.margins:
        _empty(axis, "after training")
        return
    for color, label in zip(("C0", "C1"), classes, strict=True):
        for split, size, alpha in (("test", 2, 0.3), ("train", 6, 1.0)):
            points = results.margins[f"plane_{label}_{split}"][largest, first]
            points = points[:: max(1, len(points) // SHOWN_POINTS)]
            kind = {"s": size, "alpha": alpha, "color": color, "linewidth": 0}
            axis.scatter(*points.T, **kind, label=f"{label}" if split == "train" else None)
    axis.axvline(float(results.margins["plane_boundary"][largest, first]), color="black", linewidth=0.8)
    axis.legend(fontsize="x-small")


def _crossings(axis: Any, results: Any) -> None:
    config, end, crossings = results.config, int(results.time_step[-1]), results.crossings
    shown = (("fitted", "C0", "o", 0.88), ("generalised", "C2", "d", 1.0), ("collapsed", "C1", "s", 1.14))
    axis.set(xlabel="weight decay", ylabel="step", title="first crossing (open: never)")
    positive = np.asarray(config.weight_decays) > 0  # none has a place on a logarithmic axis
    if not positive.any():
        _empty(axis, "no weight decay")
        return
    decays, alive = np.asarray(config.weight_decays)[positive], ~crossings.first["diverged"][positive]
    for name, color, marker, aside in shown:
        times = np.maximum(crossings.first[name], 1)[positive]  # nor has step 0
        places = (np.repeat(decays, times.shape[1]) * aside)[alive.reshape(-1)]
        flat = times[alive]
        crossed = ~np.isnan(flat)
        axis.plot(places[crossed], flat[crossed], marker, color=color, markersize=2, alpha=0.5, linestyle="")
        axis.plot(places[~crossed], np.full((~crossed).sum(), end), "^", color=color, markersize=3, mfc="none", ls="")
        medians = crossings.median[name][positive]
        kept = np.isfinite(medians[:, 0])
        if not kept.any():
            continue
        values, low, high = np.where(np.isfinite(medians), np.maximum(medians, 1), end)[kept].T
        spread = np.maximum([values - low, high - values], 0)
        where = decays[kept] * aside
        axis.errorbar(where, values, spread, color=color, fmt=marker, markersize=4, label=name, linewidth=1)
    slope, intercept = crossings.line
    if np.isfinite(slope):
        ends = np.asarray([decays.min(), decays.max()])
        times = np.exp(intercept + slope * np.log(ends))
        axis.plot(ends, times, color="C1", linewidth=0.8, linestyle="--", label=f"slope {slope:.2f}")
    axis.set(xscale="log", yscale="log")
    axis.set_xticks(decays, [f"{decay:g}" for decay in decays])
    axis.set_xticks([], minor=True)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="x-small")
