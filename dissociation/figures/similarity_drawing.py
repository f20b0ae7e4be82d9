"""Draws the figure of `figures.similarity`."""

from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation import plotting

NAMES = {
    "debiased_cka": "debiased CKA",
    "linear_cka": "linear CKA",
    "angular_similarity": "angular shape",
    "angular_distance": "angular distance",
    "rsa": "RSA",
    "mutual_knn": "mutual kNN",
    "knn_jaccard": "kNN Jaccard",
    "cca": "CCA",
    "cca_squared": "CCA, squares",
    "svcca": "SVCCA",
    "pwcca": "PWCCA",
    "gulp_distance": "GULP",
    "rbf_cka": "RBF CKA",
    "debiased_rbf_cka": "debiased RBF CKA",
    "procrustes_distance": "Procrustes",
    "partial_whitening_distance": "partial whitening",
    "linear_predictivity": "predictivity",
    "distance_correlation": "distance corr.",
    "hard_matching": "hard matching",
    "soft_matching": "soft matching",
}
REWRITE_NAMES = {"scaled": "scaled", "duplicated": "duplicated", "zero": "zero\nneurons", "permuted": "permuted"}
LAYER_NAMES = {
    "mlp": {"hidden0": "first", "features": "second"},
    "cnn": {"hidden0": "conv 1", "hidden1": "conv 2"},
    "resnet": {"hidden0": "stem", "hidden1": "block 1", "hidden2": "block 2"},
    "transformer": {"hidden0": "tokens", "hidden1": "block 1", "hidden2": "block 2"},
}


def draw(results: Any) -> Figure:
    """See `figures.similarity.draw`."""
    with plotting.house_style():
        figure = plt.figure(figsize=(6.6, 4.6), layout="constrained")
        above, below = np.asarray(figure.subfigures(2, 1, height_ratios=(1, 1.25)))
        panels = above.subplots(1, len(results.matrices), squeeze=False)[0]
        for index, (panel, (name, values)) in enumerate(zip(panels, results.matrices.items(), strict=True)):
            _matrix(panel, results, name, values, first=index == 0)
        above.colorbar(panels[0].images[0], ax=panels, shrink=0.8, label="similarity")
        left, middle, right, last = below.subplots(1, 4, width_ratios=(1.25, 1, 1, 1))
        _rewrites(left, results)
        _training(middle, results)
        _function(right, results)
        _plane(last, results)
        for letter, panel in zip("abcde", (panels[0], left, middle, right, last), strict=True):
            panel.text(-0.02, 1.04, letter, transform=panel.transAxes, ha="right", va="bottom", fontweight="bold")
    plt.close(figure)
    return figure


def _matrix(panel: Axes, results: Any, name: str, values: np.ndarray, *, first: bool) -> None:
    layers = list(dict.fromkeys(layer for layer, _ in results.items))
    count = len(results.items) // len(layers)
    panel.imshow(values, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
    middles = count * np.arange(len(layers)) + 0.5 * (count - 1)
    shown = [_layer(results, layer) for layer in layers]
    panel.set_xticks(middles, shown)
    panel.set_yticks(middles, shown if first else [""] * len(shown))
    panel.tick_params(length=0)
    for edge in count * np.arange(1, len(layers)) - 0.5:
        panel.axhline(edge, color="white", linewidth=0.8)
        panel.axvline(edge, color="white", linewidth=0.8)
    panel.set_title(NAMES.get(name, name))


def _layer(results: Any, name: str) -> str:
    return LAYER_NAMES[results.config.model].get(name, name)


def _rewrites(panel: Axes, results: Any) -> None:
    """1 where a rewrite does not move a measure, 0 where it leaves nothing above chance."""
    names = list(results.rewritten)
    table = np.array(list(results.calibrated.values()))
    panel.imshow(table, vmin=0, vmax=1, cmap="viridis", aspect="auto")
    for row, values in enumerate(table):
        for column, value in enumerate(values):
            shown = "1" if value > 0.9995 else f"{value:.2f}".lstrip("0") if value >= 0 else f"{value:.1f}"
            panel.text(
                column, row, shown, ha="center", va="center", fontsize=4, color="black" if value > 0.6 else "white"
            )
    panel.set_xticks(range(len(REWRITE_NAMES)), list(REWRITE_NAMES.values()), fontsize=5)
    panel.set_yticks(range(len(names)), [str(NAMES.get(name, name)) for name in names], fontsize=5)
    panel.tick_params(length=0)
    panel.set_title("one function, rewritten\n1: unmoved, 0: chance")


def _training(panel: Axes, results: Any) -> None:
    for name, (mean, low, high) in results.course.items():
        (line,) = panel.plot(range(len(mean)), mean, label=NAMES.get(name, name))
        panel.fill_between(range(len(mean)), low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    panel.set(xlabel="epoch", ylabel="seeds, last hidden layer", ylim=(0, 1), title="training")
    panel.legend(fontsize=5, loc="best")


def _function(panel: Axes, results: Any) -> None:
    layer = [index for index, (name, _) in enumerate(results.items) if name == "features"]
    first, second = np.triu_indices(len(layer), 1)
    for name, values in results.matrices.items():
        own = [
            table[np.ix_(layer, layer)][first, second] for table in (values, results.lows[name], results.highs[name])
        ]
        value, low, high = own
        errors = np.stack([np.maximum(value - low, 0), np.maximum(high - value, 0)])
        x = 100 * results.disagreement[first, second]
        drawn = panel.errorbar(x, value, errors, fmt=".", markersize=3, linewidth=0.6, label=NAMES.get(name, name))
        chance = np.nanmean(results.baselines[name][np.ix_(layer, layer)][first, second])
        panel.axhline(chance, color=drawn[0].get_color(), linestyle=":", linewidth=0.7)
    panel.set(xlabel="disagreement (%)", ylabel="seeds, last hidden layer", ylim=(-0.05, 1), title="function")


def _plane(panel: Axes, results: Any) -> None:
    markers = dict(zip(dict.fromkeys(layer for layer, _ in results.items), "osD^v", strict=False))
    for layer, marker in markers.items():
        rows = [index for index, (name, _) in enumerate(results.items) if name == layer]
        points = results.points[rows]
        panel.plot(points[:, 0], points[:, 1], marker, markersize=3, label=_layer(results, layer))
    panel.set(xticks=[], yticks=[], title="plane of angles")
    panel.set_aspect("equal", adjustable="datalim")
    panel.legend(fontsize=5, loc="upper center", bbox_to_anchor=(0.5, -0.02), ncols=len(markers), columnspacing=0.8)
