"""Figure `collapse`: grokking, neural collapse and the information plane through training.

Networks with large initial weights fit a few images and generalise much later. In between, the
features of a class shrink to a point, sooner for larger weight decays, and lose information about
the image beyond its class.
"""

import dataclasses
import json
import os
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jax.sharding import Mesh
from jaxtyping import Array

from dissociation._core.checks import (
    check_non_negative,
    check_positive,
    check_seed,
    fail,
    that_differ,
)
from dissociation._core.datasets import as_json
from dissociation._core.files import RefusedFile
from dissociation.data._datasets import Dataset
from dissociation.figures._cache import (
    AnyMeter,
    Cache,
    CacheFolder,
    differences,
    digest_of,
    read_identity,
    read_part,
)
from dissociation.figures._collapse_drawing import caption as caption
from dissociation.figures._collapse_drawing import draw
from dissociation.figures._collapse_drawing import headline as headline
from dissociation.figures._collapse_drawing import table as table
from dissociation.figures._collapse_measures import (
    SAVED,
    SeriesKeeper,
    assemble,
    flat,
    information_measures,
    margins_of,
    spread_observations,
)
from dissociation.figures._harness import run
from dissociation.figures._members import DataConfig
from dissociation.figures._members import source as source
from dissociation.figures._seeds import stand_ins
from dissociation.measures._coordinates import whiten
from dissociation.recipes._compression import encode, train_compression
from dissociation.recipes._grokking import initial_models, train_grokking
from dissociation.training import _checkpoint_file as checkpoints
from dissociation.training._members import take
from dissociation.training._progress import Progress

__all__ = ["Config", "compute", "draw", "load_models", "load_partial", "information_measures"]

STEM = "collapse"
SHOWS = (
    "Grokking, neural collapse and the information plane through training, over weight "
    "decays and seeds."
)

_MODELS = "models.ckpt"
_SHOWN = "train_loss", "train_accuracy", "test_accuracy", "rnc1_score", "nc2_score"


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """Settings of the networks and their measures."""

    LOADED = "num_loaded"

    weight_decays: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    """Weight decays of AdamW."""
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)
    """Seeds of the networks of every weight decay."""
    num_steps: int = 100_000
    """Optimiser steps."""
    num_train: int = 1000
    """Number of training images, the first ones; margins use the others as test images."""
    batch_size: int = 100
    """Images in a batch."""
    learning_rate: float = 1e-3
    """Step size of the optimiser."""
    init_scale: float = 8.0
    """Factor of all initial parameters."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """Optimiser. The loss, a sum over classes and batch, is steep at an initial scale of 8, where
    "sgd" diverges at the default rate within 3 steps (glyphs); at scale 1 it learns with 1e-4."""
    network: Literal["mlp", "cnn"] = "mlp"
    """Architecture."""
    width: int = 200
    """Units of the hidden layers; of the last one for a convolutional network."""
    depth: int = 2
    """Hidden layers of a multilayer perceptron."""
    last_activation: bool = True
    """If True, take features after an activation."""
    num_information: int = 30
    """Number of observations of information, evenly spaced in the logarithm of the step."""
    num_images: int = 10_000
    """Largest number of test images for information."""
    num_neighbours: int = 10
    """Neighbours of the estimators by entropies (Kraskov's underestimates in 4 + 4 dimensions)."""
    feature_noise: float = 0.1
    """Standard deviation of the noise on whitened features, without which information would be
    infinite."""
    code: int = 4
    """Dimensions to which images and features are compressed."""
    compression_epochs: int = 10
    """Passes of the autoencoder over at most 10 000 training images."""
    smoothing: float = 0.3
    """Standard deviation of the noise for smoothed information, in units of the features' root mean
    square distance from their mean: d features show at most (d / 2) log(1 + 1 / (smoothing^2 d))
    nats."""
    num_smoothed: int = 2000
    """Largest number of test images for smoothed information, whose cost grows quadratically."""
    classes: tuple[int, int] = (0, 1)
    """Two classes whose margins are drawn."""
    accuracy_threshold: float = 0.99
    """Training accuracy above which a network has fitted."""
    collapse_threshold: float = 0.1
    """RNC1 below which a network has collapsed."""
    test_threshold: float = 0.8
    """Test accuracy above which a network has generalised."""
    num_loaded: int | None = None
    """Training images loaded, at least `num_train`; all by default."""
    num_test: int | None = None
    """Test images; all by default."""

    def __post_init__(self):
        super().__post_init__()
        self.check(
            optimizer=("adamw", "sgd"), network=("mlp", "cnn"), seeds=check_seed, classes=(0, 9)
        )
        if len(self.classes) != 2:
            fail("classes", "be two classes", self.classes)
        self.check(
            num_steps=1, num_train=1, width=1, depth=1, num_images=1, num_neighbours=1, code=1
        )
        self.check(
            batch_size=(1, self.num_train), compression_epochs=1, num_smoothed=1, num_information=0
        )
        self.check(
            weight_decays=check_non_negative,
            learning_rate=check_positive,
            init_scale=check_positive,
        )
        self.check(
            feature_noise=check_positive,
            smoothing=check_positive,
            collapse_threshold=check_positive,
        )
        # No accuracy is above 1.
        self.check(accuracy_threshold=(0.0, 0.999999), test_threshold=(0.0, 0.999999))

    def check_data(self, data: Dataset) -> None:
        """Raise if a setting does not fit the dataset."""
        if max(self.classes) >= data.num_classes:
            fail("classes", f"be among the {data.num_classes} of the data", self.classes)
        self.check(num_train=(1, len(data.train_images)))
        measured = min(self.num_images, len(data.test_images))
        if self.num_information and measured <= self.num_neighbours:
            fail(
                "num_neighbours",
                f"be below the number of images ({measured} test images)",
                self.num_neighbours,
            )

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, weight_decays=(0.3, 0.03), seeds=(42, 43), num_steps=1000, num_train=200,
            width=32, num_information=9, num_images=300, compression_epochs=2, num_loaded=400,
            num_test=300,
            # Networks learn with these, and cross these thresholds.
            init_scale=2.0, learning_rate=3e-3, accuracy_threshold=0.9, test_threshold=0.5,
        )  # fmt: skip

    def information_steps(self) -> np.ndarray:
        """Return `num_information` observations, evenly spaced in the logarithm; all if fewer."""
        return spread_observations(self.num_steps, self.num_information)


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
    mesh: Mesh | str | None = "auto",
) -> xarray.Dataset:
    """Train and measure all networks; see `figures.Figure.compute`.

    `key` is of the autoencoder that compresses images; networks follow from `config.seeds`. `cache`
    also keeps the series so far, see `load_partial`. `mesh` is that of `training.fit`.

    Returns:
        Series [weight_decays, seeds, time_step], on training images, or on test images if the name
        starts with "test_"; expensive measures `nhsic_...` and `mi_...` (nats) [weight_decays,
        seeds, information_step], on test images; steps of crossings, see
        `_collapse_measures.crossings`; `margin` [classes, splits, weight_decays, seeds, images],
        signed distances to the boundary between the classes, padded with NaN; `plane`, coordinates
        in the plane of the classes' weights, and `plane_boundary`. Numbers are NaN from
        `diverged_at` on.
    """
    data = source(config, data)
    body = partial(_computed, mesh=mesh)
    return run(body, config, key=key, data=data, cache=cache, progress=progress)


def _computed(
    config: Config, key: Array, data: Dataset, cache: Cache, mesh: Mesh | str | None
) -> xarray.Dataset:
    measures = None
    if config.num_information:
        code_key = jax.random.fold_in(key, 2)  # networks of the same seed fold in 0 and 1
        codes = cache.get("codes", partial(_codes, config, data, code_key))["codes"]
        measures = information_measures(config, data, codes)
    names = (
        "weight_decays",
        "seeds",
        "num_train",
        "num_steps",
        "batch_size",
        "learning_rate",
        "init_scale",
        "optimizer",
    )
    options = {name: getattr(config, name) for name in names}
    trained = train_grokking(
        data,
        network=config.network,
        options=_network_options(config),
        measures=measures,
        measure_at=config.information_steps(),
        callbacks=[Progress(cache.progress, _SHOWN), SeriesKeeper(cache)],
        checkpoint=cache.path("networks.ckpt"),
        mesh=mesh,
        **options,
    )
    cache.seconds["training and measuring"] = trained.seconds
    cache.network = take(trained.models, 0)
    path = cache.path(_MODELS)
    if path is not None:
        checkpoints.save(path, trained.models, {"run": cache.digest})

    models = stand_ins(trained.models, trained.diverged_at < 0)
    margins = partial(margins_of, data, models, config.classes, config.num_train)
    return assemble(
        config,
        {"name": data.name, "num_train": config.num_train, "num_test": len(data.test_images)},
        trained.history.observed_at,
        flat(trained.history.observed),
        cache.get("margins", margins),
        trained.diverged_at,
    )


def _codes(config: Config, data: Dataset, key: Array) -> dict[str, Array]:
    """Return an array `codes` for the cache: whitened codes of test images, [n, code]."""
    model = train_compression(
        data.train_images[:10_000], config.code, key=key, num_epochs=config.compression_epochs
    )
    codes = encode(model, data.test_images[: config.num_images])
    return {"codes": whiten(codes)}


def load_partial(config: Config, folder: str | os.PathLike[str]) -> xarray.Dataset:
    """Load the dataset so far of a running or stopped sweep, for `draw`.

    Args:
        config: Configuration of the sweep.
        folder: Folder given to `compute`; for the command line, `parts` in the run's folder.

    Returns:
        The dataset without margins, up to the last saved step.

    Raises:
        FileNotFoundError: If there are no series yet.
        RefusedFile: If the series are of another configuration, or broken.
    """
    path = Path(folder) / f"{SAVED}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"`folder` must hold {path.name} of a running sweep, got {folder}. Wait for the "
            "first observation."
        )
    series = read_part(path, _digest_of_run(folder, config))
    steps = series.pop("time_step")
    data = {
        "name": config.data,
        "num_train": config.num_train,
        "num_test": config.num_test or "all",
    }
    dataset = assemble(config, data, steps, series, {}, None)
    return dataset.assign_attrs(config=json.dumps(as_json(config)))


def load_models(config: Config, folder: str | os.PathLike[str]) -> Any:
    """Load the trained networks of a finished sweep.

    Args:
        config: Configuration of the sweep.
        folder: Folder given to `compute`.

    Returns:
        Stacked models, in the order [decay, seed].

    Raises:
        FileNotFoundError: If the sweep has not ended.
        RefusedFile: If the networks are of another configuration, or broken.
    """
    path = Path(folder) / _MODELS
    digest = _digest_of_run(folder, config)
    if checkpoints.read_header(path).get("run") != digest:
        raise RefusedFile(f"{path} belongs to another run. Delete it, then resume the sweep.")
    num_members = len(config.weight_decays) * len(config.seeds)
    keys = jnp.zeros((num_members, 2), jnp.uint32)
    options = _network_options(config)
    like = jax.eval_shape(lambda: initial_models(keys, network=config.network, options=options))
    return checkpoints.restore(path, like)


def _network_options(config: Config) -> dict[str, Any]:
    options = {"width": config.width, "last_activation": config.last_activation}
    if config.network == "mlp":
        options["depth"] = config.depth
    return options


def _digest_of_run(folder: str | os.PathLike[str], config: Config) -> str:
    """Return the digest of the run in `folder`; raise unless its configuration equals `config`."""
    identity = read_identity(folder)
    names = differences(identity["config"], as_json(config))
    if names:
        raise RefusedFile(
            f"`folder` must hold parts of a run of this configuration, got {folder}, whose "
            f"{that_differ(names)}."
        )
    return digest_of(identity)
