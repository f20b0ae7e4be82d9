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


def _forecasts(dataset: xarray.Dataset, name: str) -> xarray.Dataset:
    """Return the forecasts of a model by the protocol that is drawn."""
    return dataset.sel(models=name, protocols=MODELS[name].protocol, scales="raw")


def _curves(dataset: xarray.Dataset, name: str) -> np.ndarray:
    """Return the drawn accuracy of a model, [seeds, steps]."""
    return _forecasts(dataset, name).accuracy.values[:, :-1]


def _shown_seed(dataset: xarray.Dataset, name: str) -> int:
    """Return the seed of median accuracy at the last drawn step, without diverged seeds."""
    accuracy = _curves(dataset, name)[:, -1]
    # Nearly all forecasts of a fixed seed might be read as one digit, see `stuck` of the dataset.
    num_finite = np.isfinite(accuracy).sum()
    if num_finite == 0:
        return 0
    # NaN is sorted last.
    return int(np.argsort(accuracy)[num_finite // 2])


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw sequence, errors, forecast strips, eigenfunctions and eigenvalues; 7 x 8.5 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(7.0, 8.5))
        panels: Any = figure.subfigures(4, 1, height_ratios=[0.7, 2.5, 4.2, 2.2])
        axes = _draw_sequence(panels[0], dataset)
        axes += _draw_errors(panels[1], dataset)
        axes += _draw_strips(panels[2], dataset)
        axes += _draw_spectra(panels[3], dataset)
        plotting.letter(*axes)
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption without the data, which the headline has."""
    letters = iter("abcdefghij")
    sequence = next(letters)
    errors = ", ".join(next(letters) for _ in _groups(dataset))
    strips = next(letters)
    functions = ", ".join(next(letters) for _ in _with_functions(dataset))
    disc = next(letters)

    curves = []
    drawn_seeds = []
    by_powers = []
    stuck = []
    for name, is_stuck in zip(dataset.models.values, dataset.stuck.values, strict=True):
        label = MODELS[name].label
        curves.append(_curves(dataset, name))
        drawn_seeds.append(f"{label} {_shown_seed(dataset, name)}")
        if MODELS[name].protocol == "powers":
            by_powers.append(label)
        if is_stuck.all():
            stuck.append(f"{label} all")
        elif is_stuck.any():
            seeds = ", ".join(map(str, np.flatnonzero(is_stuck)))
            stuck.append(f"{label} seed {seeds}")

    ahead = "image by image"
    if by_powers:
        ahead += f", but by powers of the operator for {', '.join(by_powers)}"
    eigenfunctions = ""
    if functions:
        eigenfunctions = f"Left eigenfunctions on the test images, drawn as digits ({functions}). "
    return (
        f"Digits in sequence ({sequence}), and the share of forecasts from "
        f"{dataset.sizes['images']} test images in which an oracle reads a wrong digit ({errors}; "
        f"zero is drawn as half a forecast), {ahead}. "
        f"{plotting.drawn_as(*curves)} Forecasts from the first image by the seed of median "
        f"accuracy ({', '.join(drawn_seeds)}), with the oracle's digit, framed if wrong "
        f"({strips}). {eigenfunctions}Eigenvalues of all seeds ({disc}). Nearly all forecasts one "
        f"step ahead show one digit, whatever the input, of: {'; '.join(stuck) or 'no seed'}."
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
    encoders = []
    autoencoders = []
    for name in dataset.models.values.tolist():
        if "autoencoder" in MODELS[name].label:
            autoencoders.append(name)
        else:
            encoders.append(name)
    return [names for names in (encoders, autoencoders) if names]


def _draw_errors(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    times = dataset.times.values[:-1]
    groups = _groups(dataset)
    axes = panel.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    smallest = 0.5 / dataset.sizes["images"]  # a logarithmic axis has no zero
    chance = 1 - 1 / dataset.sizes["classes"]

    handles = {}
    for axis, names in zip(axes, groups, strict=True):
        for name in names:
            model = MODELS[name]
            errors = np.maximum(1 - _curves(dataset, name), smallest)
            look = model.look()
            plotting.band(axis, times, errors, label=model.label, within=(smallest, 1.0), **look)
        axis.axhline(
            chance, linestyle="dashed", color="0.5", linewidth=0.8, zorder=1, label="chance"
        )
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="time steps", xlim=(min(1, len(times) - 0.5), len(times)))
        drawn, labels = axis.get_legend_handles_labels()
        handles |= zip(labels, drawn, strict=True)

    axes[0].set_ylabel("forecasts read wrongly")
    plotting.log_height(axes[0])
    axes[0].set_ylim(top=1.0)
    panel.legend(
        handles.values(), handles.keys(), loc="outside upper center", ncols=5, handlelength=3
    )
    return list(axes)


def _draw_strips(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    num_steps = min(dataset.sizes["steps"], 14)
    axes = panel.subplots(dataset.sizes["models"], num_steps + 1, squeeze=False)
    start = dataset.test_images.values[:1]
    first_digit = int(dataset.labels[0])
    frame = {"boxstyle": "square,pad=0.1", "facecolor": plotting.color(1), "linewidth": 0.5}
    corner = {"ha": "right", "va": "top"}
    for row, name in zip(axes, dataset.models.values, strict=True):
        forecasts = _forecasts(dataset, name).isel(seeds=_shown_seed(dataset, name))
        images = np.concatenate([start, forecasts.strips.values])
        digits = forecasts.predicted.values[:, 0]
        for step, axis in enumerate(row):
            label = (first_digit + step) % dataset.sizes["classes"]
            axis.imshow(images[step], cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            if row is axes[0]:
                axis.set_title(str(label), fontsize="small")
            if step:
                digit = digits[step - 1]
                text = axis.text(0.95, 0.95, str(digit), transform=axis.transAxes, **corner)
                text.set_color("white")
                if digit != label:
                    text.set_bbox(frame)
        row[0].set_ylabel(MODELS[name].label, rotation=0, ha="right", va="center", fontsize="small")
    return [axes[0, 0]]


def _with_functions(dataset: xarray.Dataset) -> list[str]:
    """Return the models whose eigenfunctions are drawn."""
    return [name for name in ("classifier", "vamp", "contrastive") if name in dataset.models]


def _draw_spectra(panel: Any, dataset: xarray.Dataset) -> list[Any]:
    names = _with_functions(dataset)
    axes = panel.subplots(1, len(names) + 1, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=False):
        _draw_functions(axis, dataset, name)
    if names:
        axes[0].set(xlabel="left eigenfunction 1", ylabel="left eigenfunction 2")

    disc = axes[-1]
    circle = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    disc.plot(np.real(circle), np.imag(circle), color="black", linewidth=0.5)
    if "linear" in dataset.models:
        names.insert(0, "linear")
    for name in names:
        model = MODELS[name]
        eigenvalues = dataset.eigenvalues.sel(models=name).values.reshape(-1)
        look = model.look()
        style = {"color": look["color"], "marker": look["marker"], "zorder": 3, "linewidth": 0}
        disc.scatter(np.real(eigenvalues), np.imag(eigenvalues), s=8, label=model.label, **style)
    roots = cycle_spectrum(dataset.sizes["classes"])
    ring = {"s": 60, "facecolor": "none", "edgecolor": "black", "linewidth": 0.7}
    disc.scatter(np.real(roots), np.imag(roots), label="roots of unity", **ring)
    disc.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], title="eigenvalues")
    panel.legend(*disc.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return list(axes)


def _draw_functions(axis: Any, dataset: xarray.Dataset, name: str) -> None:
    """Draw two left eigenfunctions of a model on the test images, as digits."""
    spectrum = dataset.sel(models=name).isel(seeds=_shown_seed(dataset, name))
    components = np.flatnonzero(spectrum.eigenvalues.values.imag > 1e-3)[:2]
    if len(components) < 2:
        components = [0, 1]
    first, second = spectrum.left.values.real[:, components].T

    num_digits = dataset.sizes["classes"]
    viridis = plt.get_cmap("viridis")
    for digit in range(num_digits):
        is_digit = dataset.labels.values == digit
        color = viridis(0.85 * digit / max(num_digits - 1, 1))
        marker = f"${digit}$"
        x = first[is_digit]
        axis.scatter(x, second[is_digit], s=6, linewidth=0.1, color=color, marker=marker)
    axis.set(xticks=[], yticks=[], title=MODELS[name].label)
