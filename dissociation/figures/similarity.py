"""Figure `similarity`: between seeds and layers, under rewrites, in training, and by disagreement.

Measures of `similarity` compare the representations of test images in every layer of networks from
several seeds.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array, Float

from dissociation import similarity
from dissociation._core.checks import fail
from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import config_of, run
from dissociation.figures._members import source as source
from dissociation.figures._seeds import cell, stand_ins
from dissociation.figures._similarity_drawing import REWRITES, draw, layers_of, of_seeds
from dissociation.models._representations import member_representations, representations
from dissociation.recipes._mnist import HeldOutPerformance
from dissociation.rewrites._rewrites import permute
from dissociation.similarity._measures import MEASURES

__all__ = ["Config", "compute", "draw", "of_seeds"]

STEM = "similarity"
SHOWS = (
    "Similarity of representations between seeds and layers, under rewrites and through training."
)

REPRESENTATIONAL = tuple(
    name for name in MEASURES if name not in ("disagreement", "jensen_shannon", "crossnobis_rsa")
)
"""Measures of representations that do not need repeated measurements."""

SIMILARITIES = tuple(
    name
    for name in REPRESENTATIONAL
    if MEASURES[name].larger_is_closer and MEASURES[name].range[0] >= -1
)
"""Measures that are larger for closer representations, at most 1."""

MAPS = {"mlp": 0, "cnn": 14 * 14 * 16, "resnet": 14 * 14 * 16, "transformer": 16 * 64}
"""Features of the widest layer that does not depend on `width`."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, rewrites and comparison."""

    model: members.ModelName = "mlp"
    """Architecture. Neurons are entries of a layer: positions of channels, entries of tokens."""
    num_seeds: int = 5
    """Networks trained from scratch, at least 3."""
    num_samples: int = 1000
    """Number of represented test images, the first ones."""
    width: int = 128
    """Units in each of the two hidden layers; of networks of images, in the last."""
    measures: tuple[str, ...] = ("debiased_cka", "angular_similarity", "rsa", "mutual_knn")
    """Measures between seeds and layers, in training and by disagreement: similarities up to 1."""
    rewrite_measures: tuple[str, ...] = REPRESENTATIONAL
    """Measures on which rewrites are tried."""
    num_blocks: int = 20
    """Blocks of samples for the jackknife's 90 % intervals."""
    scale_factor: float = 20.0
    """Factor on incoming weights; outgoing ones are divided by it."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    num_zero: int = 64
    """Nuisance neurons, one per group."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_seeds=3, num_samples=20, num_blocks=(2, self.num_samples))
        self.check(measures=SIMILARITIES, rewrite_measures=REPRESENTATIONAL)
        largest_block = -(-self.num_samples // self.num_blocks)
        layer_width = max(self.width, MAPS[self.model])
        self._check_narrow("measures", layer_width, self.num_samples - largest_block)
        duplicated_width = round(self.width * self.duplicate_multiplier)
        rewritten_width = max(duplicated_width, self.width + self.num_zero)
        self._check_narrow("rewrite_measures", rewritten_width, self.num_samples)

    def _check_narrow(self, name: str, width: int, num_samples: int) -> None:
        """Raise if a measure of the setting `name` needs more samples than features."""
        for measure in getattr(self, name):
            if MEASURES[measure].narrow and width >= num_samples - 1:
                advice = "Raise `num_samples`, lower `width`, or leave the measure out"
                fail(name, f"suit {num_samples} samples of {width} features", measure, advice)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        rewrite_measures = ("debiased_cka", "angular_distance", "cca", "mutual_knn")
        return dataclasses.replace(
            self, num_seeds=3, num_epochs=3, num_train=2000, num_test=200, num_samples=100,
            width=24, num_blocks=5, num_zero=8, rewrite_measures=rewrite_measures,
        )  # fmt: skip


class Snapshots(eqx.Module):
    """Observation of error and loss on held-out images, and of the last hidden layer."""

    held_out: HeldOutPerformance
    images: Float[Array, "n pixels"]

    def __call__(self, model: Any, step: Array, key: Array) -> dict[str, Array]:
        """Return `HeldOutPerformance`'s numbers and `features`, [n, width]."""
        performance = self.held_out(model, step, key)
        features = representations(model, self.images)["features"]
        return {**performance, "features": features}


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, represent and compare; see `figures.Figure.compute`.

    Returns:
        Items are a layer of a seed each, with coordinates `layer` and `seed`. By measure and pair
        of items: `matrix`, the values; `estimate`, the same without their bias; `low` and `high`,
        90 % intervals about the estimates; `baseline`, the values by chance. Last hidden layer:
        `through` [measures, epochs, seeds, other_seeds], and its `course`, the mean over pairs with
        the ends of its 90 % interval; `rewritten` [rewrite_measures, rewrites, seeds], the values
        of a network and its rewrites, `chance`, those with samples in another order, and
        `calibrated`, means over seeds, 0 for chance and 1 for a measure that does not move. Between
        seeds, `disagreement`, the share of samples of different predicted classes, and
        `jensen_shannon`, the divergence of predictions. `points` [items, dimensions], all
        representations in a plane by angular distance, and Kruskal's stress-1, `stress`. Along
        training, `test_error`. Numbers of diverged seeds are NaN.
    """
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    """Return the dataset of `compute`."""
    train_key, rewrite_key, order_key, start_key = jax.random.split(key, 4)
    images = jnp.asarray(data.test_images[: config.num_samples])
    held_out = HeldOutPerformance(jnp.asarray(data.test_images), jnp.asarray(data.test_labels))
    trained = config.train(train_key, data, cache, Snapshots(held_out, images))

    layers = member_representations(trained.models, images)
    group = members.rewritten_group(trained.models, images[0])
    rewrites = config.rewrites(group)
    rewrites["permuted"] = lambda model, key: permute(group, key=key)(model)
    represent = eqx.Partial(members.represent, images)
    all_keys = jax.random.split(rewrite_key, (len(REWRITES), config.num_seeds))
    rewritten = {}
    for name, keys in zip(REWRITES, all_keys, strict=True):
        rewritten[name] = members.measure_members(
            rewrites[name], represent, trained.models, keys, keys
        )

    features = layers["features"]
    observed = trained.observed["features"]
    alive = trained.alive
    jobs = {}
    for name in config.measures:
        jobs[f"pairs_{name}"] = partial(_pairs, config, name, layers, order_key)
    for name in config.rewrite_measures:
        jobs[f"rewrites_{name}"] = partial(
            _of_rewrites, name, features, rewritten, order_key, alive
        )
    for name in config.measures:
        jobs[f"training_{name}"] = partial(_through, name, observed, alive)
    jobs["plane_angular_distance"] = partial(_plane, "angular_distance", layers, start_key)
    arrays = cache.get_all(jobs, "comparing")

    def stacked(job: str, measures: tuple[str, ...], name: str) -> np.ndarray:
        return np.stack([arrays[f"{job}_{measure}"][name] for measure in measures])

    variables = {}
    for name in ("matrix", "estimate", "low", "high", "baseline"):
        matrices = stacked("pairs", config.measures, name)
        variables[name] = (("measures", "items", "other_items"), matrices)
    through = stacked("training", config.measures, "through")
    variables["through"] = (("measures", "epochs", "seeds", "other_seeds"), through)
    course = stacked("training", config.measures, "course")
    variables["course"] = (("measures", "ends", "epochs"), course)
    for name in ("rewritten", "chance"):
        tables = stacked("rewrites", config.rewrite_measures, name)
        variables[name] = (("rewrite_measures", "rewrites", "seeds"), tables)
    calibrated = stacked("rewrites", config.rewrite_measures, "calibrated")
    variables["calibrated"] = (("rewrite_measures", "rewrites"), calibrated)

    predictions = arrays[f"pairs_{config.measures[0]}"]
    seed_axes = ("seeds", "other_seeds")
    variables["disagreement"] = (seed_axes, predictions["disagreement"])
    variables["jensen_shannon"] = (seed_axes, predictions["jensen_shannon"], {"units": "nats"})
    plane = arrays["plane_angular_distance"]
    variables["points"] = (("items", "dimensions"), plane["points"])
    variables["stress"] = ((), float(plane["stress"]))

    seeds = np.arange(config.num_seeds)
    layer_of_item = np.repeat(list(layers), config.num_seeds)
    seed_of_item = np.tile(seeds, len(layers))
    coords = {
        "layer": ("items", layer_of_item),
        "seed": ("items", seed_of_item),
        "other_layer": ("other_items", layer_of_item),
        "other_seed": ("other_items", seed_of_item),
        "other_seeds": seeds,
        "measures": list(config.measures),
        "rewrite_measures": list(config.rewrite_measures),
        "rewrites": list(REWRITES),
        "ends": ["mean", "low", "high"],
    }
    # Means over seeds leave diverged ones out already.
    alive_items = alive[seed_of_item]
    return trained.dataset(data, variables, coords, items=alive_items, other_items=alive_items)


def _pairs(config: Config, name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    """Return a measure of all pairs of items, and the disagreement of pairs of seeds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large biases: the figure shows estimates too
        pairs = similarity.pairwise(
            layers, name, num_blocks=config.num_blocks, positions="neurons", key=key, progress=None
        )
    tables = {}
    tables["matrix"] = pairs.values
    for field in ("estimate", "low", "high", "baseline"):
        tables[field] = getattr(pairs, field)
    # The first items are one layer of all seeds.
    seeds = slice(config.num_seeds)
    for field in ("disagreement", "jensen_shannon"):
        tables[field] = np.asarray(getattr(pairs, field))[seeds, seeds]
    return tables


def _of_rewrites(
    name: str, trained: Array, rewritten: dict[str, Array], key: Array, alive: np.ndarray
) -> dict[str, Any]:
    """Return a measure of networks and their rewrites, [rewrites, seeds], and by chance."""
    pairs = similarity.compare(
        {"trained": trained}, rewritten, name, members=True, key=key, progress=None
    )

    def of_one_seed(values: Any) -> np.ndarray:
        by_seeds = np.asarray(values).reshape(len(alive), -1, len(alive))
        return np.diagonal(by_seeds, axis1=0, axis2=2)

    table = of_one_seed(pairs.values)
    chance = of_one_seed(pairs.baseline)
    identical = MEASURES[name].identical
    calibrated = similarity.calibrate(table[:, alive], chance[:, alive], identical)
    return {"rewritten": table, "chance": chance, "calibrated": np.mean(calibrated, axis=1)}


def _through(name: str, features: np.ndarray, alive: np.ndarray) -> dict[str, Any]:
    """Return a measure of pairs of seeds along training, and its mean with an interval."""
    features = stand_ins(features, alive)
    tables = []
    for step in range(features.shape[1]):
        pairs = similarity.pairwise(
            features[:, step], name, members=True, baseline=False, progress=None
        )
        tables.append(np.asarray(pairs.values))

    course = np.full((3, len(tables)), np.nan)
    alive_seeds = np.flatnonzero(alive)
    if len(alive_seeds) > 2:  # two networks have no interval
        block = np.ix_(alive_seeds, alive_seeds)
        for step, table in enumerate(tables):
            interval = similarity.member_interval(table[block], bounds=MEASURES[name].range)
            course[:, step] = (interval.mean, interval.low, interval.high)
    return {"through": np.stack(tables), "course": course}


def _plane(name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    """Return points of all items in a plane, by the distance `name`."""
    pairs = similarity.pairwise(layers, name, baseline=False, positions="neurons", progress=None)
    distances = np.maximum(np.asarray(pairs.values), 0.0)
    scaling = similarity.smacof(distances, key=key)
    return {"points": scaling.points, "stress": scaling.relative_stress}


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    config = config_of(dataset)
    pairs = f"{config.num_seeds * (config.num_seeds - 1) // 2} pairs of seeds"
    return (
        f"Similarity of the representations of {config.num_samples} test images. (a) Values of "
        "all pairs of "
        f"{config.num_seeds} seeds and their layers. (b) A network and its rewrites with the "
        "same function, last "
        f"hidden layer, means over {config.num_seeds} seeds. (c) During training, means over "
        f"{pairs} with 90 % "
        f"intervals over the seeds. (d) The same {pairs} after training, by the share of images "
        "that they classify "
        "differently: estimates (values without their bias), with 90 % intervals over blocks of "
        "images; dotted, values "
        "by chance. (e) All representations in a plane by angular_distance, stress "
        f"{dataset.stress.item():.2f}. "
        f"Data: {headline(dataset)}."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    return f"{members.headline(dataset)}; {config_of(dataset).num_samples} samples"


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per measure.

    Columns are pairs of seeds in each layer, chance, and each rewrite.
    """
    layers = layers_of(dataset)
    names = dict.fromkeys((*dataset.measures.values, *dataset.rewrite_measures.values))
    rows = [["measure", *(f"{layer}, seeds" for layer in layers), "chance", *REWRITES]]
    for name in names:
        seed_cells = [""] * (len(layers) + 1)
        if name in dataset.measures:
            matrix = dataset.matrix.sel(measures=name)
            baseline = dataset.baseline.sel(measures=name)
            seed_cells = [cell(of_seeds(matrix, layer), 3) for layer in layers]
            seed_cells.append(cell(of_seeds(baseline, layers[0]), 3))
        rewrite_cells = [""] * len(REWRITES)
        if name in dataset.rewrite_measures:
            values = dataset.rewritten.sel(rewrite_measures=name).values
            rewrite_cells = [cell(row, 3) for row in values]
        rows.append([name, *seed_cells, *rewrite_cells])
    return rows
