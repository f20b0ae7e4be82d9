"""Scaling to the plane, drawing and texts of the figure `manifold`."""

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

    count, wanted = len(activity), distances(activity)

    def step(_: Array, points: Array) -> Array:
        ratio = wanted / distances(points)
        return (jnp.sum(ratio, 1)[:, None] * points - ratio @ points) / count

    return lax.fori_loop(0, 500, step, start)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw five rows of six panels: a walk, the hierarchy in two rows, similarities, and noise; 7 x 6.6 inches."""
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
    axes[4, 4].legend(*_handles(axes[4, 0], axes[4, 1]), loc="upper left", fontsize="x-small")
    plotting.letter(*axes.ravel()[:28])
    return figure


def _handles(*panels: Axes) -> tuple[list, list]:
    """Return handles and labels of panels, each label once."""
    found = {}
    for panel in panels:
        found |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
    return list(found.values()), list(found)


def _walk(panel: Axes, dataset: xarray.Dataset, name: str) -> None:
    """Draw the median over tasks and the quartiles: distances of RSMs have a heavy tail, which a mean follows."""
    curves = np.maximum(dataset.moved.sel(quantities=name).values, SMALLEST)
    steps = np.arange(curves.shape[1])
    low, median, high = np.nanquantile(curves, (0.25, 0.5, 0.75), axis=0)
    panel.plot(steps, median, color=plotting.color(0))
    panel.fill_between(steps, low, high, color=plotting.color(0), alpha=0.2, linewidth=0)
    panel.set(title=name, xlabel="step", ylim=(0, 1.1 * max(1.0, np.nanmax(high))))
    if np.nanmax(high) < 0.01:
        panel.set(yscale="log", ylim=(SMALLEST / 2, 10))


def _hierarchy(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    """Draw tree, inputs, targets and activities in one row, products and scaling in the next."""
    _tree(panels[0], dataset.parents.values)
    for panel, name, title in (
        (panels[1], "leaves_x", "inputs"),
        (panels[2], "leaves_y", "targets"),
    ):
        panel.imshow(dataset[name].values, aspect="auto", cmap="viridis", interpolation="nearest")
        panel.set(title=title, xticks=[], yticks=[])
    for place, solution in enumerate(dataset.planted.values):
        one = dataset.sel(planted=solution)
        title = "LSS, exchanged" if solution == "LSS" else solution
        panels[3 + place].imshow(
            one.activity.values, aspect="auto", cmap="coolwarm", interpolation="nearest"
        )
        panels[3 + place].set(title=title, xticks=[], yticks=[])
        panels[6 + place].imshow(one.rsm.values, cmap="viridis", interpolation="nearest")
        panels[6 + place].set(title=f"RSM, {solution}", xticks=[], yticks=[])
        leaves = np.arange(len(one.mds))
        panels[9 + place].scatter(*one.mds.values.T, c=leaves, cmap="viridis", s=6)
        panels[9 + place].set(title=f"MDS, {solution}", xticks=[], yticks=[])
    panels[3].set_ylabel("leaves")


def _tree(panel: Axes, parents: np.ndarray) -> None:
    """Draw a complete binary tree, its nodes in the middle of their leaves."""
    nodes = np.arange(len(parents))
    level = np.floor(np.log2(nodes + 1))
    position = (nodes + 1.5 - 2**level) * 2 ** (level[-1] - level) - 0.5
    for node in nodes[1:]:
        ends = [node, parents[node]]
        panel.plot(position[ends], -level[ends], color="0.5", linewidth=0.6, zorder=1)
    panel.scatter(position, -level, c="0.3", s=4, zorder=2)
    leaves = level == level[-1]
    panel.scatter(
        position[leaves], -level[leaves], c=position[leaves], cmap="viridis", s=6, zorder=3
    )
    panel.set(title="hierarchy")
    panel.set_axis_off()


def _similarity(panels: np.ndarray, dataset: xarray.Dataset) -> None:
    means = dataset.similarity.mean(("tasks", "pair_steps"))
    names = dataset.families.values
    pairs = [
        (measure, scope) for measure in dataset.measures.values for scope in dataset.scopes.values
    ]
    for panel, (measure, scope) in zip(panels, pairs, strict=True):
        values = means.sel(measures=measure, scopes=scope).values
        plotting.heat(panel, values, [[f"{value:.2f}" for value in row] for row in values])
        panel.set_xticks(range(len(names)), names, fontsize=4.5, rotation=45)
        panel.set_yticks(
            range(len(names)), names if panel is panels[0] else [""] * len(names), fontsize=4.5
        )
        panel.set_title(f"{TITLES.get(measure, measure)},\n{scope}")


def _drift(panel: Axes, dataset: xarray.Dataset) -> None:
    for place, name in enumerate(dataset.families.values):
        curves = dataset.drift.sel(families=name).values
        panel.plot(curves.mean(0), label=name, **plotting.look(place))
    panel.set(xlabel="step", ylabel="relative error", title="first readout")


def _noise(panel: Axes, one: xarray.Dataset) -> None:
    panel.axhline(1, color="black", linewidth=0.5)
    scales = one.scales.values
    for place, name in enumerate(one.solutions.values):
        known = one.sel(solutions=name)
        ratio, bar = (known.simulated / known.theory).values, (known.error / known.theory).values
        shifted = scales * 1.04 ** (place - 3)
        panel.errorbar(
            shifted, ratio, bar, fmt=plotting.MARKERS[place], color=plotting.color(place), markersize=1.8,
            linewidth=0.5, label=name,
        )  # fmt: skip
    panel.set(xscale="log", xlabel="standard deviation", title=f"noise on {one.sources.values}")


def _selected(panel: Axes, dataset: xarray.Dataset) -> None:
    for place, name in enumerate(dataset.minimal.values, 2):
        look = plotting.look(place)
        panel.plot(dataset.noise_scales, dataset.selected.sel(minimal=name), label=name, **look)
    panel.set(xscale="log", xlabel="input noise", ylabel="RSA", title="least under both")


def z_scores(dataset: xarray.Dataset) -> np.ndarray:
    """Return deviations of simulated from expected losses in standard errors."""
    return ((dataset.simulated - dataset.theory) / dataset.error).values.ravel()


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config, scores = config_of(dataset), z_scores(dataset)
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
    """Return a header and a row per pair of families; then the noise and the largest movement of the function."""
    shown = [
        [
            "families",
            *(
                f"{measure}, {scope}"
                for measure in dataset.measures.values
                for scope in dataset.scopes.values
            ),
        ]
    ]
    for name in dataset.families.values:
        for other in dataset.other_families.values:
            one = dataset.similarity.sel(families=name, other_families=other)
            shown.append(
                [
                    f"{name}, {other}",
                    *(cell(values.ravel(), 3) for part in one.values for values in part),
                ]
            )
    scores, still = z_scores(dataset), dataset.moved.sel(quantities=["predictions", "loss"])
    numbers = f"largest |z| {np.abs(scores).max():.2f}, mean z^2 {np.mean(scores**2):.2f}"
    shown.append(["noise, simulated over theory", numbers, *[""] * (len(shown[0]) - 2)])
    shown.append(
        [
            "largest change of predictions, loss",
            f"{float(still.max()):.0e}",
            *[""] * (len(shown[0]) - 2),
        ]
    )
    return shown
