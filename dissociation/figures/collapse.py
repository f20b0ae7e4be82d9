"""Figure `collapse`: grokking, neural collapse and the information plane through training.

Networks with large initial weights fit a few pictures at once and generalise long after. What happens in between: the
features of a class shrink to a point, sooner the larger the weight decay, and with them goes what the features say
about the picture beyond its class.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from dissociation import checkpoint as checkpoints
from dissociation.checks import fail
from dissociation.data.datasets import Dataset
from dissociation.figures.artifacts import Parts, check_parts_of, identity_of, read_part
from dissociation.figures.collapse_drawing import draw
from dissociation.figures.collapse_measures import (
    Config,
    compressed,
    crossing_slope,
    crossing_table,
    crossings,
    information_measures,
    margins_of,
)
from dissociation.figures.members import source as members_source
from dissociation.figures.seeds import masked_part, named_diverged, number, stand_ins
from dissociation.files import RefusedFile
from dissociation.progress import MeterFactory
from dissociation.recipes.grokking import initial_models, train_grokking
from dissociation.training import Layout, Progress

__all__ = ["STEM", "Config", "Results", "compute", "draw", "load_models", "load_partial", "series_of", "source"]

STEM = "collapse"
"""The name of the files."""

_MEMBERS = ("weight_decays", "seeds")

AXES = {
    "weight_decays": ("weight_decays",),
    "seeds": ("seeds",),
    "time_step": ("times",),
    "information_step": ("information_times",),
    "nhsic": (*_MEMBERS, "information_times"),
    "mi_": (*_MEMBERS, "information_times"),
    "margin": (*_MEMBERS, "images"),
    "plane": (*_MEMBERS, "images", "coordinates"),
    "plane_boundary": _MEMBERS,
    "diverged_at": _MEMBERS,
    "": (*_MEMBERS, "times"),
}
"""What the axes of the saved arrays are, by how the arrays' names begin."""

_SAVED, _MODELS = "series", "models.ckpt"
_SHOWN = "train_loss", "train_accuracy", "test_accuracy", "rnc1_score", "nc2_score"


class Results(NamedTuple):
    """Everything the figure shows.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        series: By name, [decay, seed, time]: accuracies, losses and measures of collapse. Those of collapse are on
            training pictures, or on test pictures where the name begins with "test_".
        time_step: Steps of the series, [time].
        information: By name, [decay, seed, time]: the costly measures, on test pictures.
        information_step: Their steps, [time].
        margins: By class and split, signed distances to the boundary between two classes, [decay, seed, samples], and
            coordinates in the plane of the two classes' weights, [decay, seed, samples, 2]: see `margins_of`.
        diverged_at: The step at which a network diverged, or -1: [decay, seed]. From there on its numbers are NaN.
        seconds: Wall time of every part.
    """

    config: Config
    data: dict[str, Any]
    series: dict[str, np.ndarray]
    time_step: np.ndarray
    information: dict[str, np.ndarray]
    information_step: np.ndarray
    margins: dict[str, np.ndarray]
    diverged_at: np.ndarray
    seconds: dict[str, float]


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
    mesh: Mesh | None = None,
) -> Results:
    """Trains all networks and follows them.

    Args:
        config: What to do.
        key: Of the autoencoder that compresses pictures; networks follow from `config.seeds`.
        dataset: In place of the one that `config.data` names.
        folder: Where finished parts are kept, and the series so far: see `load_partial`.
        progress: See `dissociation.progress`.
        mesh: Devices over which the networks are laid: see `sharding.member_mesh`.

    Returns:
        The results.

    Raises:
        RefusedFile: If `folder` holds parts of another run, or broken ones.
        WrongValue: If an option does not fit the data.
    """
    data = source(config) if dataset is None else dataset
    _check_data(config, data)
    with Parts(folder, identity_of(config, key, data)) as parts:
        return _computed(config, key, data, parts, progress, mesh)


def source(config: Config) -> Dataset:
    """The data set that the configuration names.

    Raises:
        WrongValue: If an option does not fit it.
    """
    data = members_source(config)
    _check_data(config, data)
    return data


def _check_data(config: Config, data: Dataset) -> None:
    if max(config.classes) >= data.num_classes:
        fail("classes", f"be among the {data.num_classes} of the data", config.classes)
    if config.num_seen > len(data.train_images):
        fail("num_seen", f"be at most the number of training pictures ({len(data.train_images)})", config.num_seen)
    if config.num_information and min(config.num_pictures, len(data.test_images)) <= config.num_neighbours:
        have = f"{min(config.num_pictures, len(data.test_images))} test pictures"
        fail("num_neighbours", f"be below the number of pictures ({have})", config.num_neighbours)


def _computed(
    config: Config,
    key: Array,
    data: Dataset,
    parts: Parts,
    progress: str | MeterFactory | None,
    mesh: Mesh | None,
) -> Results:
    measures = None
    if config.num_information:
        code_key = jax.random.fold_in(key, 2)  # of its own though `key` is a network's seed, which folds in 0 and 1
        codes = parts.get("codes", partial(compressed, config, data, key=code_key))["codes"]
        measures = information_measures(config, data, codes)
    keeper = _Keeper(parts)
    names = ("weight_decays", "seeds", "num_steps", "batch_size", "learning_rate", "init_scale", "optimizer", "network")
    trained = train_grokking(
        data,
        num_train=config.num_seen,
        options=_network_options(config),
        measures=measures,
        measure_at=config.information_steps(),
        callbacks=[Progress(progress, _SHOWN), keeper],
        checkpoint=parts.path("networks.ckpt"),
        layout=Layout(mesh=mesh),
        **{name: getattr(config, name) for name in names},
    )
    parts.seconds["training and measuring"] = trained.seconds
    if (path := parts.path(_MODELS)) is not None:
        checkpoints.save(path, trained.models, {"run": parts.digest})
    flat = _flat(trained.history.observed)
    alive = trained.diverged_at < 0
    job = partial(margins_of, config, data, stand_ins(trained.models, alive))
    margins = masked_part(parts, "margins", alive, job)
    described = {"name": data.name, "num_seen": config.num_seen, "num_test": len(data.test_images)}
    diverged_at = trained.diverged_at
    return _assemble(config, described, trained.history.observed_at, flat, margins, diverged_at, parts.seconds)


class _Keeper:
    """Keeps the series so far on disk; goes on with those of an interrupted run."""

    def __init__(self, parts: Parts):
        self.parts = parts
        self.steps: list[int] = []
        self.found: list[dict[str, np.ndarray]] = []

    def __call__(self, step: int, records: dict[str, Any]) -> None:
        if self.parts.folder is None:
            return
        if not self.steps and step > 0 and (earlier := self.parts.load(_SAVED)) is not None:
            before = np.flatnonzero(earlier["time_step"] < step)
            self.steps = earlier.pop("time_step")[before].tolist()
            self.found = [{name: leaf[..., i] for name, leaf in earlier.items()} for i in before]
        self.steps.append(step)
        self.found.append(_flat(records["observed"]))
        # At every observation: never behind the checkpoint, which is written later and less often.
        stacked = {name: np.stack([one[name] for one in self.found], -1) for name in self.found[0]}
        self.parts.save(_SAVED, {"time_step": np.asarray(self.steps), **stacked})


def _flat(observed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Costly measures beside the cheap ones."""
    return {**{name: leaf for name, leaf in observed.items() if name != "dear"}, **observed.get("dear", {})}


def _assemble(
    config: Config,
    data: dict[str, Any],
    steps: np.ndarray,
    flat: dict[str, np.ndarray],
    margins: dict[str, np.ndarray],
    diverged_at: np.ndarray | None,
    seconds: dict[str, float],
) -> Results:
    grid = len(config.weight_decays), len(config.seeds)
    # The numbers of a network that is not finite may look plausible: its accuracy is that of the first class.
    finite = np.isfinite(flat["train_loss"])
    if diverged_at is None:  # of a sweep under way: the first observation that shows it
        steps = np.asarray(steps)
        diverged_at = np.where(finite.all(-1), -1, steps[np.argmin(finite, -1)])
    flat = {name: np.where(finite, values, np.nan) for name, values in flat.items()}
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
        margins={name: np.asarray(leaf).reshape(*grid, *leaf.shape[1:]) for name, leaf in margins.items()},
        diverged_at=np.asarray(diverged_at).reshape(grid),
        seconds=seconds,
    )


def load_partial(config: Config, folder: str | os.PathLike[str]) -> Results:
    """What a sweep that still runs, or was stopped, has found so far; `draw` leaves out what is missing.

    Args:
        config: Of the sweep.
        folder: The one given to `compute`; the command line's is `parts` in the run's own folder.

    Returns:
        Results without margins, up to the last time that was kept.

    Raises:
        FileNotFoundError: If nothing has been kept yet.
        RefusedFile: If what was kept is of another configuration, or broken.
    """
    path = Path(folder) / f"{_SAVED}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"`folder` must hold {path.name} of a sweep under way, got {folder}. Has it come to its first observation?"
        )
    flat = read_part(path, check_parts_of(folder, config))
    steps = flat.pop("time_step")
    data = {"name": config.data, "num_seen": config.num_seen, "num_test": config.num_test or "all"}
    return _assemble(config, data, steps, flat, {}, None, {})


def load_models(config: Config, folder: str | os.PathLike[str]) -> Any:
    """The trained networks of a finished sweep.

    Args:
        config: Of the sweep.
        folder: The one given to `compute`.

    Returns:
        Stacked models, in the order [decay, seed].

    Raises:
        FileNotFoundError: If the sweep has not ended.
        RefusedFile: If what was kept is of another configuration, or broken.
    """
    path, digest = Path(folder) / _MODELS, check_parts_of(folder, config)
    if checkpoints.read_header(path).get("run") != digest:
        raise RefusedFile(f"{path} belongs to another run. Delete it and run the sweep again: it goes on from its end.")
    keys = jnp.zeros((len(config.weight_decays) * len(config.seeds), 2), jnp.uint32)
    like = jax.eval_shape(lambda: initial_models(keys, network=config.network, options=_network_options(config)))
    return checkpoints.restore(path, like)


def _network_options(config: Config) -> dict[str, Any]:
    sizes = {"width": config.width, "last_activation": config.last_activation}
    return sizes | ({"depth": config.depth} if config.network == "mlp" else {})


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


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    config = results.config
    steps = {"time_step": results.time_step, "information_step": results.information_step}
    axes = {"weight_decays": np.asarray(config.weight_decays), "seeds": np.asarray(config.seeds)}
    members = {**axes, "diverged_at": results.diverged_at}
    return {**steps, **members, **results.series, **results.information, **results.margins}


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
    names = [f"weight decay {decay:g} seed {seed}" for decay in config.weight_decays for seed in config.seeds]
    return (
        f"{data['name']}: {data['num_seen']} training and {data['num_test']} test pictures, "
        f"{len(config.weight_decays)} weight decays x {len(config.seeds)} seeds, {config.num_steps} steps; "
        f"{crossing_slope(config, found, int(results.time_step[-1]))}"
        f"{named_diverged(names, results.diverged_at.reshape(-1))}"
    )


def table(results: Results) -> list[list[str]]:
    """A header and a row per weight decay: when networks fitted and collapsed, and how they end."""
    config = results.config
    found = crossings(config, results.series, results.time_step)
    rows = crossing_table(config, found, int(results.time_step[-1]))
    rows[0] += ["test accuracy", "RNC1", "NC2"]
    names = ("test_accuracy", "rnc1_score", "nc2_score")
    for index, row in enumerate(rows[1:]):
        ends = [results.series[name][index, :, -1] for name in names]
        row += [number(values, form) for values, form in zip(ends, (".4f", ".2g", ".3g"), strict=True)]
    return rows
