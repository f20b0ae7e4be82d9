"""Drawing of the figure `ordered-mnist`, panel by panel, from its dataset."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import xarray
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissociation import plotting
from koopman.datasets import cycle_spectrum
from koopman.figures._ordered_mnist_models import MODELS


def _shown(dataset: xarray.Dataset, name: str) -> xarray.Dataset:
    """Return a model's results by the protocol that is drawn."""
    return dataset.sel(models=name, protocols=MODELS[name].shown, scales="raw")


def _curves(dataset: xarray.Dataset, name: str) -> np.ndarray:
    """Return the drawn accuracy of a model, [seeds, steps]."""
    return _shown(dataset, name).accuracy.values[:, :-1]


def _shown_seed(dataset: xarray.Dataset, name: str) -> int:
    """Return the seed of median accuracy at the last drawn step, among those that did not diverge."""
    accuracy = _curves(dataset, name)[:, -1]
    # Nearly all forecasts of a fixed seed might be read as one digit, see `stuck` of the dataset.
    order = np.argsort(accuracy)[: np.isfinite(accuracy).sum()]
    return int(order[len(order) // 2]) if len(order) else 0


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw sequence, errors, forecast strips, eigenfunctions and eigenvalues; 7 x 8.5 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(7.0, 8.5))
        panels: Any = figure.subfigures(4, 1, height_ratios=[0.7, 2.5, 4.2, 2.2])
        parts = (_draw_sequence, _draw_errors, _draw_strips, _draw_spectra)
        plotting.letter(
            *(
                axis
                for part, panel in zip(parts, panels, strict=True)
                for axis in part(panel, dataset)
            )
        )
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption without the data, which the headline has."""
    names = dataset.models.values
    letters = iter("abcdefghij")
    first, errors, strips = next(letters), [next(letters) for _ in _groups(dataset)], next(letters)
    functions, disc = [next(letters) for _ in _with_functions(dataset)], next(letters)
    named = "; ".join(
        f"{MODELS[name].label} "
        f"{'all' if which.all() else 'seed ' + ', '.join(map(str, np.flatnonzero(which)))}"
        for name, which in zip(names, dataset.stuck.values, strict=True)
        if which.any()
    )
    powers = ", ".join(MODELS[name].label for name in names if MODELS[name].shown == "powers")
    ahead = "image by image" + (f", but by powers of the operator for {powers}" if powers else "")
    curves = [_curves(dataset, name) for name in names]
    shown = ", ".join(f"{MODELS[name].label} {_shown_seed(dataset, name)}" for name in names)
    eigenfunctions = (
        f"Left eigenfunctions on the test images, drawn as digits ({', '.join(functions)}). "
    )
    return (
        f"Digits in sequence ({first}), and the share of forecasts from "
        f"{dataset.sizes['images']} test images in which "
        f"an oracle reads a wrong digit ({', '.join(errors)}; zero is drawn as half a forecast), "
        f"{ahead}. "
        f"{plotting.drawn_as(*curves)} Forecasts from the first image by the seed of median "
        f"accuracy ({shown}), with "
        f"the oracle's digit, framed if wrong ({strips}). "
        f"{eigenfunctions if functions else ''}Eigenvalues of all "
        f"seeds ({disc}). Nearly all forecasts one step ahead show one digit, whatever the "
        "input, of: "
        f"{named or 'no seed'}."
    )


def _draw_sequence(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    axes = panel.subplots(1, 10)
    for axis, image, label in zip(
        axes, dataset.test_images.values, dataset.labels.values, strict=False
    ):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1)
        axis.set_title(str(label), fontsize="small")
        axis.axis("off")
    return [axes[0]]


def _groups(dataset: xarray.Dataset) -> list[list[str]]:
    """Return the models of both panels, encoders and autoencoders."""
    names = dataset.models.values.tolist()
    groups = [
        [name for name in names if ("autoencoder" in MODELS[name].label) == auto]
        for auto in (False, True)
    ]
    return [group for group in groups if group]


def _draw_errors(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    times, groups = dataset.times.values[:-1], _groups(dataset)
    axes = panel.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    least = 0.5 / dataset.sizes["images"]  # a logarithmic axis has no zero
    handles: dict[str, Any] = {}
    for axis, names in zip(axes, groups, strict=True):
        for name in names:
            model = MODELS[name]
            errors = np.maximum(1 - _curves(dataset, name), least)
            plotting.band(
                axis, times, errors, label=model.label, within=(least, 1.0), **model.look()
            )
        chance = 1 - 1 / dataset.sizes["classes"]
        axis.axhline(
            chance, linestyle="dashed", color="0.5", linewidth=0.8, zorder=1, label="chance"
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="time steps", xlim=(min(1, len(times) - 0.5), len(times)))
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    axes[0].set_ylabel("forecasts read wrongly")
    plotting.log_height(axes[0])
    axes[0].set_ylim(top=1.0)
    panel.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, handlelength=3
    )
    return list(axes)


def _draw_strips(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    steps = min(dataset.sizes["steps"], 14)
    axes = panel.subplots(dataset.sizes["models"], steps + 1, squeeze=False)
    start = dataset.test_images.values[:1]
    first, digits = int(dataset.labels[0]), dataset.sizes["classes"]
    for row, name in zip(axes, dataset.models.values, strict=True):
        one = _shown(dataset, name).isel(seeds=_shown_seed(dataset, name))
        images, read = np.concatenate([start, one.strips.values]), one.predicted.values[:, 0]
        for step, axis in enumerate(row):
            due = (first + step) % digits
            axis.imshow(images[step], cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row is axes[0]:
                axis.set_title(str(due), fontsize="small")
            if step:
                text = axis.text(
                    0.95, 0.95, str(read[step - 1]), transform=axis.transAxes, ha="right", va="top"
                )
                text.set_color("white")
                if read[step - 1] != due:
                    text.set_bbox(
                        {
                            "boxstyle": "square,pad=0.1",
                            "facecolor": plotting.color(1),
                            "linewidth": 0.5,
                        }
                    )
        row[0].set_ylabel(MODELS[name].label, rotation=0, ha="right", va="center", fontsize="small")
    return [axes[0, 0]]


def _with_functions(dataset: xarray.Dataset) -> list[str]:
    return [name for name in ("classifier", "vamp", "contrastive") if name in dataset.models]


def _draw_spectra(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    names, digits, labels = (
        _with_functions(dataset),
        dataset.sizes["classes"],
        dataset.labels.values,
    )
    axes = panel.subplots(1, len(names) + 1, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=False):
        one = dataset.sel(models=name).isel(seeds=_shown_seed(dataset, name))
        pairs = np.flatnonzero(one.eigenvalues.values.imag > 1e-3)[:2]
        first, second = one.left.values.real[:, pairs if len(pairs) == 2 else [0, 1]].T
        for digit in range(digits):
            chosen = labels == digit
            look = {
                "color": plt.get_cmap("viridis")(0.85 * digit / max(digits - 1, 1)),
                "marker": f"${digit}$",
            }
            axis.scatter(first[chosen], second[chosen], s=6, linewidth=0.1, **look)
        axis.set(xticks=[], yticks=[], title=MODELS[name].label)
    if names:
        axes[0].set(xlabel="left eigenfunction 1", ylabel="left eigenfunction 2")
    disc = axes[-1]
    turn = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    disc.plot(np.real(turn), np.imag(turn), color="black", linewidth=0.5)
    for name in [name for name in ("linear", *names) if name in dataset.models]:
        values, look = dataset.eigenvalues.sel(models=name).values.reshape(-1), MODELS[name].look()
        kind = {"color": look["color"], "marker": look["marker"], "zorder": 3, "linewidth": 0}
        disc.scatter(np.real(values), np.imag(values), s=8, label=MODELS[name].label, **kind)
    roots = cycle_spectrum(digits)
    ring = {"s": 60, "facecolor": "none", "edgecolor": "black", "linewidth": 0.7}
    disc.scatter(np.real(roots), np.imag(roots), label="roots of unity", **ring)
    disc.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], title="eigenvalues")
    panel.legend(*disc.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return list(axes)
