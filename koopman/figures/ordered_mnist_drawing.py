"""How the figure of ordered digits is drawn, panel by panel, from its results."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from dissociation import plotting
from koopman.datasets.ordered_mnist import cycle_spectrum
from koopman.figures.ordered_mnist_measures import PROTOCOLS, predicted
from koopman.figures.ordered_mnist_models import MODELS


def _shown_seed(results: Any, name: str) -> int:
    """The first that did not diverge."""
    return int(np.isfinite(results.eigenvalues[name]).all(1).argmax())


def draw(results: Any) -> Figure:
    """The sequence, accuracy against time, forecast strips, eigenfunctions and eigenvalues, on 7 x 8.5 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(7.0, 8.5))
        panels: Any = figure.subfigures(4, 1, height_ratios=[0.7, 2.3, 4.2, 2.2])
        sequence, curves, strips, lower = panels
        _draw_sequence(sequence, results)
        _draw_accuracy(curves, results)
        _draw_strips(strips, results)
        _draw_spectra(lower, results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _draw_sequence(panel: Any, results: Any) -> None:
    axes = panel.subplots(1, 10)
    for axis, image, label in zip(axes, results.images, results.labels, strict=False):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1)
        axis.set_title(str(label), fontsize="small")
        axis.axis("off")


def _draw_accuracy(panel: Any, results: Any) -> None:
    axis = panel.subplots()
    steps = results.config.num_steps
    for name in results.logits:
        model = MODELS[name]
        curve = results.accuracy(name)[:, list(PROTOCOLS).index(model.shown), 0, :steps]
        plotting.band(axis, results.times[:steps], curve, label=model.label, **model.look)
    axis.axhline(1 / results.config.num_digits, linestyle="dashed", color="black", label="chance")
    axis.set(xlabel="time steps", ylabel="accuracy", xlim=(1, steps), ylim=(0, 1.1))
    panel.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize="small")


def _draw_strips(panel: Any, results: Any) -> None:
    steps, digits = results.config.num_steps, results.config.num_digits
    shown = min(steps, 14)
    axes = panel.subplots(len(results.logits), shown + 1, squeeze=False)
    start, label = results.images[0], int(results.labels[0])
    for row, name in zip(axes, results.logits, strict=True):
        which, seed = list(PROTOCOLS).index(MODELS[name].shown), _shown_seed(results, name)
        read = predicted(results.logits[name][seed, which, 0, :shown, 0])
        for step, axis in enumerate(row):
            image = start if step == 0 else results.strips[name][seed, which, step - 1]
            axis.imshow(image, cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            true = (label + step) % digits
            if row is axes[0]:
                axis.set_title(str(true), fontsize="small")
            if step:
                colour = "limegreen" if read[step - 1] == true else "red"
                axis.text(0.97, 0.97, str(read[step - 1]), transform=axis.transAxes, ha="right", va="top", color=colour)
        row[0].set_ylabel(MODELS[name].label, rotation=0, ha="right", va="center", fontsize="small")


def _draw_spectra(panel: Any, results: Any) -> None:
    names = [name for name in ("classifier", "vamp", "contrastive") if name in results.logits]
    axes = panel.subplots(1, len(names) + 1, squeeze=False)[0]
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axis, name in zip(axes, names, strict=False):
        seed = _shown_seed(results, name)
        values, left = results.eigenvalues[name][seed], results.left[name][seed]
        pairs = [i for i in range(len(values)) if values[i].imag > 1e-3][:2]
        first, second = [left[:, i].real for i in (pairs if len(pairs) == 2 else (0, 1))]
        for digit in range(results.config.num_digits):
            chosen = results.labels == digit
            axis.scatter(first[chosen], second[chosen], s=2, color=colours[digit % len(colours)], label=str(digit))
        axis.set(xticks=[], yticks=[], title=MODELS[name].label)
    if names:
        axes[0].set(xlabel="left eigenfunction 1", ylabel="left eigenfunction 2")
        axes[0].legend(markerscale=3, fontsize="x-small", loc="best")
    disc = axes[-1]
    turn = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    disc.plot(np.real(turn), np.imag(turn), color="black", linewidth=0.5)
    roots = cycle_spectrum(results.config.num_digits)
    disc.plot(np.real(roots), np.imag(roots), "+", color="black", markersize=8, label="roots of unity")
    for name in [name for name in ("linear", *names) if name in results.logits]:
        values = results.eigenvalues[name].reshape(-1)
        model = MODELS[name]
        disc.scatter(np.real(values), np.imag(values), s=6, label=model.label, zorder=3, color=model.look["color"])
    disc.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], title="eigenvalues")
    panel.legend(*disc.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="x-small")
