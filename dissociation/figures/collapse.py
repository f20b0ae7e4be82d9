"""Figure `collapse`: grokking, neural collapse and the information plane through training.

Networks with large initial weights fit a few pictures at once and generalise long after. What happens in between: the
features of a class shrink to a point, sooner the larger the weight decay, and with them goes what the features say
about the picture beyond its class.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure

from dissociation import plotting
from dissociation.checks import fail
from dissociation.data.datasets import Dataset, load
from dissociation.figures.artifacts import Parts, identity_of, save_arrays
from dissociation.figures.collapse_measures import (
    Config,
    compressed,
    crossing_slope,
    crossing_table,
    crossings,
    information_measures,
    margins_of,
)
from dissociation.progress import MeterFactory
from dissociation.recipes.grokking import train_grokking

__all__ = ["STEM", "Config", "Results", "compute", "draw", "load_partial", "series_of", "source"]

STEM = "collapse"
"""The name of the files."""

_SAVED = "series"


class Results(NamedTuple):
    """Everything the figure shows.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        series: By name, [decay, seed, time]: accuracies, losses and measures of collapse. Those of collapse are on
            training pictures, or on test pictures where the name begins with "test_".
        time_step: Steps of the series, [time].
        information: By name, [decay, seed, time]: the dear measures, on test pictures.
        information_step: Their steps, [time].
        margins: Signed distances to the boundary between two classes by class and split, [decay, seed, samples].
        seconds: Wall time of every part.
    """

    config: Config
    data: dict[str, Any]
    series: dict[str, np.ndarray]
    time_step: np.ndarray
    information: dict[str, np.ndarray]
    information_step: np.ndarray
    margins: dict[str, np.ndarray]
    seconds: dict[str, float]


def source(config: Config) -> Dataset:
    """The data set that the configuration names."""
    return load(config.data, num_train=config.num_train, num_test=config.num_test)


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains all networks and follows them.

    Args:
        config: What to do.
        key: Of the autoencoder that compresses pictures; networks follow from `config.seeds`.
        dataset: In place of the one that `config.data` names.
        folder: Where finished parts are kept, and the series so far: see `load_partial`.
        progress: See `dissociation.progress`.

    Returns:
        The results.

    Raises:
        ValueError: If `folder` holds parts of another run, or an option is out of range.
    """
    data = source(config) if dataset is None else dataset
    parts = Parts(folder, identity_of(config, key, data))
    measures = None
    if config.num_information:
        codes = parts.get("codes", partial(compressed, config, data, key=key))["codes"]
        measures = information_measures(config, data, codes)
    keeper = _Keeper(config, parts.path(f"{_SAVED}.npz"))
    names = ("weight_decays", "seeds", "num_steps", "batch_size", "learning_rate", "init_scale", "optimizer", "network")
    sizes = {"width": config.width, "last_activation": config.last_activation}
    trained = train_grokking(
        data,
        num_train=config.num_seen,
        options=sizes | ({"depth": config.depth} if config.network == "mlp" else {}),
        measures=measures,
        measure_at=config.information_steps(),
        log=keeper,
        checkpoint=parts.path("networks.ckpt"),
        progress=progress,
        **{name: getattr(config, name) for name in names},
    )
    parts.seconds["training and measuring"] = trained.seconds
    flat = _flat(trained.history.observed)
    margins = parts.get("margins", partial(margins_of, config, data, trained.models))
    described = {"name": data.name, "num_seen": config.num_seen, "num_test": len(data.test_images)}
    return _assemble(config, described, trained.history.observed_at, flat, margins, parts.seconds)


class _Keeper:
    """Keeps the series so far on disk, at every tenth observation; goes on with those of an interrupted run."""

    def __init__(self, config: Config, path: Path | None):
        self.config, self.path = config, path
        self.steps: list[int] = []
        self.found: list[dict[str, np.ndarray]] = []

    def __call__(self, step: int, records: dict[str, Any]) -> None:
        if self.path is None:
            return
        if not self.steps and step > 0 and self.path.exists():
            with np.load(self.path) as kept:
                earlier = dict(kept)
            before = np.flatnonzero(earlier["time_step"] < step)
            self.steps = earlier.pop("time_step")[before].tolist()
            self.found = [{name: leaf[..., i] for name, leaf in earlier.items()} for i in before]
        self.steps.append(step)
        self.found.append(_flat(records["observed"]))
        if len(self.steps) % 10 == 0:
            stacked = {name: np.stack([one[name] for one in self.found], -1) for name in self.found[0]}
            save_arrays(self.path, {"time_step": np.asarray(self.steps), **stacked})


def _flat(observed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Dear measures beside the cheap ones."""
    return {**{name: leaf for name, leaf in observed.items() if name != "dear"}, **observed.get("dear", {})}


def _assemble(
    config: Config,
    data: dict[str, Any],
    steps: np.ndarray,
    flat: dict[str, np.ndarray],
    margins: dict[str, np.ndarray],
    seconds: dict[str, float],
) -> Results:
    grid = len(config.weight_decays), len(config.seeds)
    shaped = {name: np.asarray(leaf).reshape(*grid, -1) for name, leaf in flat.items()}
    dear = {name for name in shaped if name.startswith(("nhsic", "mi_"))}
    asked = np.isin(steps, config.information_steps())
    return Results(
        config=config,
        data=data,
        series={name: leaf for name, leaf in shaped.items() if name not in dear},
        time_step=np.asarray(steps),
        information={name: leaf[:, :, asked] for name, leaf in shaped.items() if name in dear},
        information_step=np.asarray(steps)[asked],
        margins={name: np.asarray(leaf).reshape(*grid, -1) for name, leaf in margins.items()},
        seconds=seconds,
    )


def load_partial(config: Config, folder: str | os.PathLike[str]) -> Results:
    """What a sweep that still runs, or was stopped, has found so far; `draw` leaves out what is missing.

    Args:
        config: Of the sweep.
        folder: The one given to `compute`; the command line's is `.collapse-parts` in its output folder.

    Returns:
        Results without margins, up to the last time that was kept.

    Raises:
        FileNotFoundError: If nothing has been kept yet.
    """
    path = Path(folder) / f"{_SAVED}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"`folder` must hold {path.name} of a sweep under way, got {folder}. Is it the first minute?"
        )
    with np.load(path) as kept:
        flat = dict(kept)
    steps = flat.pop("time_step")
    data = {"name": config.data, "num_seen": config.num_seen, "num_test": config.num_test or "all"}
    return _assemble(config, data, steps, flat, {}, {})


def series_of(results: Results, name: str, weight_decay: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One curve: its steps and its values.

    Args:
        results: What `compute` returned.
        name: Of `series` or `information`.
        weight_decay: One of the configuration's.
        seed: One of the configuration's.

    Returns:
        Two arrays [time].

    Raises:
        ValueError: If there is no such series, or no such network; both of decay and seed are named.
    """
    known = {**results.series, **results.information}
    if name not in known:
        fail("name", f"be one of {', '.join(sorted(known))}", name)
    decays, seeds = results.config.weight_decays, results.config.seeds
    if weight_decay not in decays or seed not in seeds:
        wanted = f"be of a network that was trained: weight decay in {decays}, seed in {seeds}"
        fail("weight_decay, seed", wanted, f"weight decay {weight_decay:g}, seed {seed}")
    steps = results.time_step if name in results.series else results.information_step
    return steps, known[name][decays.index(weight_decay), seeds.index(seed)]


def draw(results: Results) -> Figure:
    """Accuracy and collapse, the information plane, margins, and crossing times.

    Args:
        results: What `compute` or `load_partial` returned.

    Returns:
        A figure 7.2 inches wide.
    """
    with plotting.house_style():
        figure, axes = plt.subplots(3, 3, figsize=(7.2, 6.6), layout="constrained")
        _draw_training(axes[0], results)
        _draw_information(axes[1], results)
        _draw_margins(axes[2, 0], results)
        _draw_crossings(axes[2, 1], results)
        _draw_scale(axes[2, 2], results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _curves(axis: Any, steps: np.ndarray, values: np.ndarray, decays: tuple[float, ...], **style: Any) -> None:
    """A band over seeds per weight decay, from step 10 on."""
    later = steps >= 10
    for index, (decay, own) in enumerate(zip(decays, values, strict=True)):
        plotting.band(axis, steps[later], own[:, later], color=f"C{index}", label=f"$\\lambda$ = {decay:g}", **style)
    axis.set(xscale="log", xlabel="step")


def _draw_training(axes: Any, results: Results) -> None:
    decays, steps = results.config.weight_decays, results.time_step
    _curves(axes[0], steps, results.series["test_accuracy"], decays)
    for index, own in enumerate(results.series["train_accuracy"]):
        later = steps >= 10
        axes[0].plot(steps[later], own.mean(0)[later], linestyle="--", color=f"C{index}", linewidth=0.8)
    axes[0].set(ylim=(0, 1.02), ylabel="accuracy", title="test (line), training (dashed)")
    axes[0].legend(fontsize="x-small")
    _curves(axes[1], steps, results.series["rnc1_score"], decays)
    axes[1].set(yscale="log", ylabel="RNC1", title="collapse of classes (training)")
    _curves(
        axes[2], steps, np.where(np.isfinite(results.series["nc2_score"]), results.series["nc2_score"], np.nan), decays
    )
    axes[2].axhline(1, color="black", linestyle=":", linewidth=0.8)
    axes[2].set(ylim=(0, None), ylabel="NC2", title="condition number of means")


def _draw_information(axes: Any, results: Results) -> None:
    decays, steps, found = results.config.weight_decays, results.information_step, results.information
    titles = ("information", "nHSIC, fixed bandwidth", "nHSIC, median bandwidth")
    pairs = (("mi_zx_compression", "mi_zy_compression"), ("nhsic_zx", "nhsic_zy"), ("nhsic_zx_free", "nhsic_zy_free"))
    for axis, title, (inputs, labels) in zip(axes, titles, pairs, strict=True):
        kind = "I" if inputs.startswith("mi") else "nHSIC"
        axis.set(title=title, ylabel=f"{kind}(Z;X) - {kind}(Z;Y)")
        if inputs not in found or not np.isfinite(found[inputs]).any():
            axis.text(0.5, 0.5, "not measured", ha="center", transform=axis.transAxes)
            continue
        _curves(axis, steps, found[inputs] - found[labels], decays)
        if inputs.startswith("mi"):
            null = (found["mi_zx_compression_null"] - found["mi_zy_compression_null"]).reshape(-1, len(steps))
            plotting.band(axis, steps[steps >= 10], null[:, steps >= 10], color="grey", label="shuffled")
            axis.legend(handles=axis.lines[-1:], fontsize="x-small")


def _draw_margins(axis: Any, results: Results) -> None:
    axis.set(title="margins, largest weight decay", ylabel="signed distance")
    axis.axhline(0, color="black", linewidth=0.5)
    if not results.margins:
        axis.text(0.5, 0.5, "training", ha="center", transform=axis.transAxes)
        return
    classes = results.config.classes
    for place, label in enumerate(classes):
        for side, split, color in (("low", "seen", "C0"), ("high", "unseen", "C1")):
            largest = int(np.argmax(results.config.weight_decays))
            values = results.margins[f"margin_{label}_{split}"][largest].reshape(-1)
            if values.size < 2 or values.std() == 0:
                continue
            quartiles = [[0.25, 0.5, 0.75]]
            body = axis.violinplot(values, [place], side=side, showextrema=False, quantiles=quartiles, widths=0.8)
            body["bodies"][0].set(facecolor=color, alpha=0.6, label=split if place == 0 else None)
            body["cquantiles"].set(color=color, linewidth=0.8)
    axis.set(xticks=range(len(classes)), xticklabels=[f"class {label}" for label in classes])
    axis.legend(fontsize="x-small")


def _draw_crossings(axis: Any, results: Results) -> None:
    config, end = results.config, int(results.time_step[-1])
    found = crossings(config, results.series, results.time_step)
    for name, color, marker in (("fitted", "C0", "o"), ("collapsed", "C1", "s")):
        times = found[name]
        places = np.repeat(config.weight_decays, times.shape[1])
        flat = times.reshape(-1)
        crossed = ~np.isnan(flat)
        axis.plot(places[crossed], flat[crossed], marker, color=color, markersize=3, label=name, linestyle="")
        axis.plot(places[~crossed], np.full((~crossed).sum(), end), "^", color=color, markersize=3, mfc="none", ls="")
    axis.set(xscale="log", yscale="log", xlabel="weight decay", ylabel="step", title="first crossing (open: never)")
    axis.legend(fontsize="x-small")


def _draw_scale(axis: Any, results: Results) -> None:
    _curves(axis, results.time_step, results.series["scale_means"], results.config.weight_decays)
    axis.set(yscale="log", ylabel="mean norm", title="scale of features")


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    config = results.config
    steps = {"time_step": results.time_step, "information_step": results.information_step}
    axes = {"weight_decays": np.asarray(config.weight_decays), "seeds": np.asarray(config.seeds)}
    return {**steps, **axes, **results.series, **results.information, **results.margins}


def describe(results: Results) -> dict[str, Any]:
    """What the JSON beside the figure says."""
    config = results.config
    found = crossings(config, results.series, results.time_step)
    return {
        "figure": STEM,
        "config": config,
        "data": results.data,
        "first steps": found,
        "slope": crossing_slope(config, found, int(results.time_step[-1])),
    }


def headline(results: Results) -> str:
    """What was computed on, in a line, and how the time of collapse depends on weight decay."""
    config, data = results.config, results.data
    found = crossings(config, results.series, results.time_step)
    return (
        f"{data['name']}: {data['num_seen']} training and {data['num_test']} test pictures, "
        f"{len(config.weight_decays)} weight decays x {len(config.seeds)} seeds, {config.num_steps} steps; "
        f"{crossing_slope(config, found, int(results.time_step[-1]))}"
    )


def table(results: Results) -> list[list[str]]:
    """A header and a row per weight decay: when networks fitted and collapsed, and how they end."""
    config = results.config
    found = crossings(config, results.series, results.time_step)
    rows = crossing_table(config, found, int(results.time_step[-1]))
    rows[0] += ["test accuracy", "RNC1", "NC2"]
    names = ("test_accuracy", "rnc1_score", "nc2_score")
    for index, row in enumerate(rows[1:]):
        accuracy, rnc1, nc2 = (results.series[name][index, :, -1].mean() for name in names)
        row += [f"{accuracy:.4f}", f"{rnc1:.2g}", f"{nc2:.3g}"]
    return rows
