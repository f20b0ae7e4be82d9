"""Drawing of the figure `ordered-mnist`, panel by panel, from its results."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dissociation import plotting
from koopman.datasets import cycle_spectrum
from koopman.figures._ordered_mnist_measures import PROTOCOLS, predicted, stuck
from koopman.figures._ordered_mnist_models import MODELS


def _which(name: str) -> int:
    """Return the index of the protocol by which a model is drawn."""
    return list(PROTOCOLS).index(MODELS[name].shown)


def _shown_seed(results: Any, name: str) -> int:
    """Return the seed of median accuracy at the last drawn step, among those that did not diverge."""
    accuracy = results.accuracy(name)[:, _which(name), 0, results.config.num_steps - 1]
    # The median avoids a seed whose forecasts are stuck.
    order = np.argsort(accuracy)[: np.isfinite(accuracy).sum()]
    return int(order[len(order) // 2]) if len(order) else 0


def draw(results: Any) -> Figure:
    """Draw sequence, errors, forecast strips, eigenfunctions and eigenvalues; 7 x 8.5 inches."""
    with plotting.house_style():
        figure = plt.figure(figsize=(7.0, 8.5))
        panels: Any = figure.subfigures(4, 1, height_ratios=[0.7, 2.5, 4.2, 2.2])
        parts = (_draw_sequence, _draw_errors, _draw_strips, _draw_spectra)
        plotting.letter(*(axis for part, panel in zip(parts, panels, strict=True) for axis in part(panel, results)))
    plt.close(figure)  # pyplot forgets it, so that a notebook shows it once
    return figure


def caption(results: Any) -> str:
    """Return the caption without the data, which the headline has."""
    config, groups = results.config, _groups(results)
    letters = iter("abcdefghij")
    first, errors, strips = next(letters), [next(letters) for _ in groups], next(letters)
    functions, disc = [next(letters) for _ in _with_functions(results)], next(letters)
    seeds = [(MODELS[name].label, stuck(logits)) for name, logits in results.logits.items()]
    named = "; ".join(
        f"{label} {'all' if which.all() else 'seed ' + ', '.join(map(str, np.flatnonzero(which)))}"
        for label, which in seeds
        if which.any()
    )
    powers = ", ".join(MODELS[name].label for name in results.logits if MODELS[name].shown == "powers")
    ahead = "image by image" + (f", but by powers of the operator for {powers}" if powers else "")
    curves = [results.accuracy(name)[:, _which(name), 0, : config.num_steps] for name in results.logits]
    shown = ", ".join(f"{MODELS[name].label} {_shown_seed(results, name)}" for name in results.logits)
    eigenfunctions = f"Left eigenfunctions on the test images, drawn as digits ({', '.join(functions)}). "
    return (
        f"Digits in sequence ({first}), and the share of forecasts from {len(results.images)} test images in which an "
        f"oracle reads a wrong digit ({', '.join(errors)}; zero is drawn as half a forecast), {ahead}. "
        f"{plotting.drawn_as(*curves)} Forecasts from the first image by the seed of median accuracy ({shown}), with "
        f"the oracle's digit, framed if wrong ({strips}). {eigenfunctions if functions else ''}Eigenvalues of all "
        f"seeds ({disc}). Nearly all forecasts one step ahead show one digit, whatever the input, of: "
        f"{named or 'no seed'}."
    )


def _draw_sequence(panel: Any, results: Any) -> list[Any]:
    axes = panel.subplots(1, 10)
    for axis, image, label in zip(axes, results.images, results.labels, strict=False):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1)
        axis.set_title(str(label), fontsize="small")
        axis.axis("off")
    return [axes[0]]


def _groups(results: Any) -> list[list[str]]:
    """Return the models of each panel."""
    auto = {name for name in results.logits if MODELS[name].label.endswith("autoencoder") or "auto" in name}
    groups = [[name for name in results.logits if (name in auto) == own] for own in (False, True)]
    return [group for group in groups if group]


def _draw_errors(panel: Any, results: Any) -> list[Any]:
    steps, groups = results.config.num_steps, _groups(results)
    axes = panel.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    least = 0.5 / len(results.images)  # a logarithmic axis has no zero
    handles: dict[str, Any] = {}
    for axis, names in zip(axes, groups, strict=True):
        for name in names:
            model = MODELS[name]
            errors = np.maximum(1 - results.accuracy(name)[:, _which(name), 0, :steps], least)
            plotting.band(axis, results.times[:steps], errors, label=model.label, within=(least, 1.0), **model.look())
        chance = 1 - 1 / results.config.num_digits
        axis.axhline(chance, linestyle="dashed", color="0.5", linewidth=0.8, zorder=1, label="chance")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.set(xlabel="time steps", xlim=(min(1, steps - 0.5), steps))
        drawn, labels = axis.get_legend_handles_labels()
        handles |= dict(zip(labels, drawn, strict=True))
    axes[0].set_ylabel("forecasts read wrongly (log)")
    plotting.log_height(axes[0])
    axes[0].set_ylim(top=1.0)
    panel.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=5, handlelength=3)
    return list(axes)


def _draw_strips(panel: Any, results: Any) -> list[Any]:
    steps, digits = results.config.num_steps, results.config.num_digits
    shown = min(steps, 14)
    axes = panel.subplots(len(results.logits), shown + 1, squeeze=False)
    start, label = results.images[0], int(results.labels[0])
    for row, name in zip(axes, results.logits, strict=True):
        which, seed = _which(name), _shown_seed(results, name)
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
                text = axis.text(0.95, 0.95, str(read[step - 1]), transform=axis.transAxes, ha="right", va="top")
                text.set_color("white")
                if read[step - 1] != true:
                    text.set_bbox({"boxstyle": "square,pad=0.1", "facecolor": plotting.color(1), "linewidth": 0.5})
        row[0].set_ylabel(MODELS[name].label, rotation=0, ha="right", va="center", fontsize="small")
    return [axes[0, 0]]


def _with_functions(results: Any) -> list[str]:
    return [name for name in ("classifier", "vamp", "contrastive") if name in results.logits]


def _draw_spectra(panel: Any, results: Any) -> list[Any]:
    names, digits = _with_functions(results), results.config.num_digits
    axes = panel.subplots(1, len(names) + 1, squeeze=False)[0]
    for axis, name in zip(axes, names, strict=False):
        seed = _shown_seed(results, name)
        values, left = results.eigenvalues[name][seed], results.left[name][seed]
        pairs = [i for i in range(len(values)) if values[i].imag > 1e-3][:2]
        first, second = [left[:, i].real for i in (pairs if len(pairs) == 2 else (0, 1))]
        for digit in range(digits):
            chosen = results.labels == digit
            look = {"color": plt.get_cmap("viridis")(0.85 * digit / max(digits - 1, 1)), "marker": f"${digit}$"}
            axis.scatter(first[chosen], second[chosen], s=6, linewidth=0.1, **look)
        axis.set(xticks=[], yticks=[], title=MODELS[name].label)
    if names:
        axes[0].set(xlabel="left eigenfunction 1", ylabel="left eigenfunction 2")
    disc = axes[-1]
    turn = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    disc.plot(np.real(turn), np.imag(turn), color="black", linewidth=0.5)
    for name in [name for name in ("linear", *names) if name in results.logits]:
        values, look = results.eigenvalues[name].reshape(-1), MODELS[name].look()
        kind = {"color": look["color"], "marker": look["marker"], "zorder": 3, "linewidth": 0}
        disc.scatter(np.real(values), np.imag(values), s=8, label=MODELS[name].label, **kind)
    roots = cycle_spectrum(digits)
    ring = {"s": 60, "facecolor": "none", "edgecolor": "black", "linewidth": 0.7}
    disc.scatter(np.real(roots), np.imag(roots), label="roots of unity", **ring)
    disc.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], title="eigenvalues")
    panel.legend(*disc.get_legend_handles_labels(), loc="outside lower center", ncols=5)
    return list(axes)
