"""Scaling to the plane, drawing and texts of the figure `manifold`."""

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jax import lax
from jaxtyping import Array
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dissociation.figures._harness import config_of, drawing
from dissociation.figures._seeds import cell
from dissociation.plotting import _axes as plotting

QUANTITIES = "first layer", "second layer", "hidden activity", "RSM", "predictions", "loss"
"""Panels of a walk, in their order."""

SMALLEST = 1e-9
"""Least relative distance that a walk shows."""

TITLES = {"rsa": "RSA", "in-sample predictivity": "$R^2$ in sample"}


@jax.jit
def scaled(activity: Array, start: Array) -> Array:
    """Return points in the plane whose distances are near those of activities, [samples, 2].

    Source: De Leeuw (1977), Applications of convex analysis to multidimensional scaling.
    """

    def distances(points: Array) -> Array:
        return jnp.sqrt(jnp.sum((points[:, None] - points[None]) ** 2, 2) + 1e-12)

    count = len(activity)
    targets = distances(activity)

    def step(_: Array, points: Array) -> Array:
        ratio = targets / distances(points)
        moved = jnp.sum(ratio, 1)[:, None] * points - ratio @ points
        return moved / count

    return lax.fori_loop(0, 500, step, start)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw five rows of six panels, 7 x 6.6 inches.

    A walk, the hierarchy in two rows, similarities, and noise.
    """
    figure, axes = plt.subplots(5, 6, figsize=(7, 6.6))
    for panel, name in zip(axes[0], QUANTITIES, strict=True):
        _walk(panel, dataset, name)
    axes[0, 0].set_ylabel("relative distance")
    _hierarchy(axes[1:3].ravel(), dataset)
    _similarity(axes[3], dataset)
    _drift(axes[4, 0], dataset)
    for panel, name in zip(axes[4, 1:3], dataset.sources.values, strict=True):
        _noise(panel, dataset.sel(sources=name))
    axes[4, 1].set_ylabel("simulated / expected loss")
    _selected(axes[4, 3], dataset)
    for panel in axes[4, 4:]:
        panel.set_axis_off()
    # Each label once: solutions bear the names of families.
    handle_of_label = {}
    for panel in axes[4, :2]:
        handles, labels = panel.get_legend_handles_labels()
        handle_of_label |= dict(zip(labels, handles, strict=True))
    handles = list(handle_of_label.values())
    axes[4, 4].legend(handles, list(handle_of_label), loc="upper left", fontsize="x-small")
    plotting.letter(*axes.ravel()[:28])
    return figure


def _walk(panel: Axes, dataset: xarray.Dataset, name: str) -> None:
    """Draw the median over tasks and the quartiles of one quantity along a walk."""
    # Distances of RSMs have a heavy tail, which a mean follows.
    curves = np.maximum(dataset.moved.sel(quantities=name).values, SMALLEST)
    steps = np.arange(curves.shape[1])
    low, median, high = np.nanquantile(curves, (0.25, 0.5, 0.75), axis=0)
    color = plotting.color(0)
    panel.plot(steps, median, color=color)
    panel.fill_between(steps, low, high, color=color, alpha=0.2, linewidth=0)
    highest = np.nanmax(high)
    panel.set(title=name, xlabel="step", ylim=(0, 1.1 * max(1.0, highest)))
    if highest < 0.01:
        panel.set(yscale="log", ylim=(SMALLEST / 2, 10))


def _hierarchy(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    """Draw tree, inputs, targets and activities in one row, products and scaling in the next."""
    _tree(panels[0], dataset.parents.values)
    _show(panels[1], dataset.leaves_x, "inputs", aspect="auto")
    _show(panels[2], dataset.leaves_y, "targets", aspect="auto")
    by_solution = zip(dataset.planted.values, *panels[3:].reshape(3, 3), strict=True)
    for name, activity_panel, rsm_panel, mds_panel in by_solution:
        solution = dataset.sel(planted=name)
        title = "LSS, exchanged" if name == "LSS" else name
        _show(activity_panel, solution.activity, title, cmap="coolwarm", aspect="auto")
        _show(rsm_panel, solution.rsm, f"RSM, {name}")
        leaves = np.arange(len(solution.mds))
        mds_panel.scatter(*solution.mds.values.T, c=leaves, cmap="viridis", s=6)
        mds_panel.set(title=f"MDS, {name}", xticks=[], yticks=[])
    panels[3].set_ylabel("leaves")


def _show(
    panel: Axes, matrix: xarray.DataArray, title: str, cmap: str = "viridis", **options: Any
) -> None:
    """Draw a matrix as an image."""
    panel.imshow(matrix.values, cmap=cmap, interpolation="nearest", **options)
    panel.set(title=title, xticks=[], yticks=[])


def _tree(panel: Axes, parents: np.ndarray) -> None:
    """Draw a complete binary tree with one leaf per unit of length, the root at the top.

    `parents` has the parent of each node, [nodes]. Nodes are numbered level by level from the root,
    and each is drawn in the middle of its leaves.
    """
    nodes = np.arange(len(parents))
    level = np.floor(np.log2(nodes + 1))
    index_in_level = nodes + 1 - 2**level
    num_leaves = 2 ** (level[-1] - level)  # below each node
    position = (index_in_level + 0.5) * num_leaves - 0.5
    for node in nodes[1:]:
        ends = [node, parents[node]]
        panel.plot(position[ends], -level[ends], color="0.5", linewidth=0.6, zorder=1)
    panel.scatter(position, -level, c="0.3", s=4, zorder=2)
    is_leaf = level == level[-1]
    leaves = position[is_leaf]
    panel.scatter(leaves, -level[is_leaf], c=leaves, cmap="viridis", s=6, zorder=3)
    panel.set(title="hierarchy")
    panel.set_axis_off()


def _similarity(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    """Draw the mean similarity of pairs of families by measure and scope."""
    means = dataset.similarity.mean(("tasks", "pair_steps"))
    names = dataset.families.values
    ticks = range(len(names))
    pairs = product(dataset.measures.values, dataset.scopes.values)
    for panel, (measure, scope) in zip(panels, pairs, strict=True):
        matrix = means.sel(measures=measure, scopes=scope).values
        labels = []
        for row in matrix:
            labels.append([f"{similarity:.2f}" for similarity in row])
        plotting.heat(panel, matrix, labels)
        panel.set_xticks(ticks, names, fontsize=4.5, rotation=45)
        panel.set_yticks(ticks, [""] * len(names), fontsize=4.5)
        panel.set_title(f"{TITLES.get(measure, measure)},\n{scope}")
    panels[0].set_yticks(ticks, names, fontsize=4.5)


def _drift(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw the error of the first readout along walks in each family."""
    for index, name in enumerate(dataset.families.values):
        curves = dataset.drift.sel(families=name).values
        panel.plot(curves.mean(0), label=name, **plotting.look(index))
    panel.set(xlabel="step", ylabel="relative error", title="first readout")


def _noise(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw simulated over expected losses of all solutions under one source of noise."""
    panel.axhline(1, color="black", linewidth=0.5)
    for index, name in enumerate(dataset.solutions.values):
        losses = dataset.sel(solutions=name)
        ratio = (losses.simulated / losses.theory).values
        bar = (losses.error / losses.theory).values
        shifted_scales = dataset.scales.values * 1.04 ** (index - 3)
        panel.errorbar(
            shifted_scales, ratio, bar, fmt=plotting.MARKERS[index], color=plotting.color(index),
            markersize=1.8, linewidth=0.5, label=name,
        )  # fmt: skip
    title = f"noise on {dataset.sources.values}"
    panel.set(xscale="log", xlabel="standard deviation", title=title)


def _selected(panel: Axes, dataset: xarray.Dataset) -> None:
    """Draw the similarity of the minimiser under both noises to the minimal families."""
    for index, name in enumerate(dataset.minimal.values, 2):
        look = plotting.look(index)
        panel.plot(dataset.noise_scales, dataset.selected.sel(minimal=name), label=name, **look)
    panel.set(xscale="log", xlabel="input noise", ylabel="RSA", title="least under both")


def z_scores(dataset: xarray.Dataset) -> np.ndarray:
    """Return deviations of simulated from expected losses in standard errors."""
    return ((dataset.simulated - dataset.theory) / dataset.error).values.ravel()


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    scores = z_scores(dataset)
    tasks = f"{config.num_tasks} tasks"
    return (
        f"Two-layer linear networks with {config.hidden} hidden units that solve random tasks of "
        f"rank {config.rank} "
        f"({config.num_samples} samples, {config.num_inputs} inputs of rank {config.input_rank}, "
        f"{config.num_outputs} "
        f"outputs). (a to f) Distance from the start of a walk of {config.num_steps} steps "
        "through the general "
        f"solutions, relative, median and quartiles of {tasks}: weights and activities move, "
        "predictions and loss "
        f"stand (logarithmic, from 1e-9 up). (g to r) A hierarchy of {len(dataset.leaves)} "
        "leaves, its inputs and "
        "targets; hidden activities, their products "
        "and multidimensional scaling for a least-squares solution with the leaves exchanged, "
        "MRNS and MWNS. (s to x) "
        "Similarity of two independent solutions, of a family in a row and one in a column, "
        f"means over {tasks} and "
        f"{config.pair_steps} steps; predictivity is cross-validated, except in w and x. (y) "
        "Relative error of "
        f"predictions by the readout of the first step, means over {tasks}. (z, A) Loss under "
        "noise over its expected "
        f"value, {scores.size} simulations of {config.num_draws} draws with standard errors; the "
        "largest deviation is "
        f"{np.abs(scores).max():.1f} of them. (B) RSA of the minimiser under noise on inputs and "
        "parameters with MRNS "
        "and MWNS, by input noise."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    config = config_of(dataset)
    return (
        f"{config.num_tasks} random tasks of rank {config.rank}, {config.hidden} hidden "
        f"units, {config.num_steps} steps"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per pair of families.

    The last rows hold the noise and the largest movement of the function.
    """
    columns = list(product(dataset.measures.values, dataset.scopes.values))
    header = ["families", *(f"{measure}, {scope}" for measure, scope in columns)]
    rows = [header]
    for first, second in product(dataset.families.values, dataset.other_families.values):
        similarity = dataset.similarity.sel(families=first, other_families=second)
        row = [f"{first}, {second}"]
        for measure, scope in columns:
            values = similarity.sel(measures=measure, scopes=scope).values
            row.append(cell(values.ravel(), 3))
        rows.append(row)

    blank = [""] * (len(header) - 2)
    scores = z_scores(dataset)
    numbers = f"largest |z| {np.abs(scores).max():.2f}, mean z^2 {np.mean(scores**2):.2f}"
    rows.append(["noise, simulated over theory", numbers, *blank])
    function = dataset.moved.sel(quantities=["predictions", "loss"])
    change = f"{float(function.max()):.0e}"
    rows.append(["largest change of predictions, loss", change, *blank])
    return rows
