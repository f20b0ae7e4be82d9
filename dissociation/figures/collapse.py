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
from dissociation.figures.artifacts import Parts, check_parts_of, identity_of, save_arrays
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
from dissociation.figures.members import source
from dissociation.progress import MeterFactory
from dissociation.recipes.grokking import initial_models, train_grokking

__all__ = ["STEM", "Config", "Results", "compute", "draw", "load_models", "load_partial", "series_of", "source"]

STEM = "collapse"
"""The name of the files."""

_SAVED, _MODELS = "series", "models.ckpt"


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
        margins: By class and split, signed distances to the boundary between two classes, [decay, seed, samples], and
            coordinates in the plane of the two classes' weights, [decay, seed, samples, 2]: see `margins_of`.
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
        ValueError: If `folder` holds parts of another run, or an option is out of range.
    """
    data = source(config) if dataset is None else dataset
    if max(config.classes) >= data.num_classes:
        fail("classes", f"be among the {data.num_classes} of the data", config.classes)
    parts = Parts(folder, identity_of(config, key, data))
    measures = None
    if config.num_information:
        codes = parts.get("codes", partial(compressed, config, data, key=key))["codes"]
        measures = information_measures(config, data, codes)
    keeper = _Keeper(parts.path(f"{_SAVED}.npz"))
    names = ("weight_decays", "seeds", "num_steps", "batch_size", "learning_rate", "init_scale", "optimizer", "network")
    trained = train_grokking(
        data,
        num_train=config.num_seen,
        options=_network_options(config),
        measures=measures,
        measure_at=config.information_steps(),
        log=keeper,
        checkpoint=parts.path("networks.ckpt"),
        progress=progress,
        shown=("train_loss", "train_accuracy", "test_accuracy", "rnc1_score", "nc2_score"),
        mesh=mesh,
        **{name: getattr(config, name) for name in names},
    )
    parts.seconds["training and measuring"] = trained.seconds
    if (path := parts.path(_MODELS)) is not None:
        checkpoints.save(path, trained.models)
    flat = _flat(trained.history.observed)
    margins = parts.get("margins", partial(margins_of, config, data, trained.models))
    described = {"name": data.name, "num_seen": config.num_seen, "num_test": len(data.test_images)}
    return _assemble(config, described, trained.history.observed_at, flat, margins, parts.seconds)


class _Keeper:
    """Keeps the series so far on disk; goes on with those of an interrupted run."""

    def __init__(self, path: Path | None):
        self.path = path
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
        # At every observation: never behind the checkpoint, which is written later and less often.
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
        margins={name: np.asarray(leaf).reshape(*grid, *leaf.shape[1:]) for name, leaf in margins.items()},
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
        ValueError: If what was kept is of another configuration.
    """
    path = Path(folder) / f"{_SAVED}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"`folder` must hold {path.name} of a sweep under way, got {folder}. Has it come to its first observation?"
        )
    check_parts_of(folder, config)
    with np.load(path) as kept:
        flat = dict(kept)
    steps = flat.pop("time_step")
    data = {"name": config.data, "num_seen": config.num_seen, "num_test": config.num_test or "all"}
    return _assemble(config, data, steps, flat, {}, {})


def load_models(config: Config, folder: str | os.PathLike[str]) -> Any:
    """The trained networks of a finished sweep.

    Args:
        config: Of the sweep.
        folder: The one given to `compute`.

    Returns:
        Stacked models, in the order [decay, seed].

    Raises:
        FileNotFoundError: If the sweep has not ended.
        ValueError: If what was kept is of another configuration.
    """
    check_parts_of(folder, config)
    keys = jnp.zeros((len(config.weight_decays) * len(config.seeds), 2), jnp.uint32)
    like = jax.eval_shape(lambda: initial_models(keys, network=config.network, options=_network_options(config)))
    return checkpoints.restore(Path(folder) / _MODELS, like)


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
