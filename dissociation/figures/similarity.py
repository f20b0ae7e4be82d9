"""Figure `similarity`: between seeds and layers, under rewrites, through training, and by disagreement of functions.

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
    """Architecture. Neurons are all entries of a layer: positions of channels, entries of tokens."""
    num_seeds: int = 5
    """Networks trained from scratch, at least 3."""
    num_samples: int = 1000
    """Number of represented test images, the first ones."""
    width: int = 128
    """Units in each of the two hidden layers; of networks of images, in the last."""
    measures: tuple[str, ...] = ("debiased_cka", "angular_similarity", "rsa", "mutual_knn")
    """Measures between seeds and layers, through training and by disagreement: similarities up to 1."""
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
        left = self.num_samples - -(-self.num_samples // self.num_blocks)
        layer = max(self.width, MAPS[self.model])
        rewritten = max(round(self.width * self.duplicate_multiplier), self.width + self.num_zero)
        for name, widest, samples in (
            ("measures", layer, left),
            ("rewrite_measures", rewritten, self.num_samples),
        ):
            for measure in getattr(self, name):
                if MEASURES[measure].narrow and widest >= samples - 1:
                    advice = "Raise `num_samples`, lower `width`, or leave the measure out"
                    fail(name, f"suit {samples} samples of {widest} features", measure, advice)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=3, num_epochs=3, num_train=2000, num_test=200, num_samples=100, width=24, num_blocks=5,
            num_zero=8, rewrite_measures=("debiased_cka", "angular_distance", "cca", "mutual_knn"),
        )  # fmt: skip


class Snapshots(eqx.Module):
    """Observation of error and loss on held-out images, and of the last hidden layer on `images`."""

    held_out: HeldOutPerformance
    images: Float[Array, "n pixels"]

    def __call__(self, model: Any, step: Array, key: Array) -> dict[str, Array]:
        """Return `HeldOutPerformance`'s numbers and `features`, [n, width]."""
        return {
            **self.held_out(model, step, key),
            "features": representations(model, self.images)["features"],
        }


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
    train_key, rewrite_key, order_key, start_key = jax.random.split(key, 4)
    images = jnp.asarray(data.test_images[: config.num_samples])
    observe = Snapshots(
        HeldOutPerformance(jnp.asarray(data.test_images), jnp.asarray(data.test_labels)), images
    )
    trained = config.train(train_key, data, cache, observe)
    keys = jax.random.split(rewrite_key, (len(REWRITES), config.num_seeds))
    layers = member_representations(trained.models, images)
    group = members.rewritten_group(trained.models, images[0])
    variants = config.rewrites(group) | {
        "permuted": lambda model, key: permute(group, key=key)(model)
    }
    rewritten = {
        name: members.measure_members(
            variants[name], eqx.Partial(members.represent, images), trained.models, own, own
        )
        for name, own in zip(REWRITES, keys, strict=True)
    }
    features, observed = layers["features"], trained.observed["features"]
    jobs = {
        **{
            f"pairs_{name}": partial(_pairs, config, name, layers, order_key)
            for name in config.measures
        },
        **{
            f"rewrites_{name}": partial(
                _of_rewrites, name, features, rewritten, order_key, trained.alive
            )
            for name in config.rewrite_measures
        },
        **{
            f"training_{name}": partial(_through, name, observed, trained.alive)
            for name in config.measures
        },
        "plane_angular_distance": partial(_plane, "angular_distance", layers, start_key),
    }
    found = cache.get_all(jobs, "comparing")
    plane, first = found["plane_angular_distance"], found[f"pairs_{config.measures[0]}"]

    def of(job: str, names: tuple[str, ...], arrays: str, *dims: str) -> dict[str, Any]:
        axis = "rewrite_measures" if job == "rewrites" else "measures"
        return {
            array: ((axis, *dims), np.stack([found[f"{job}_{name}"][array] for name in names]))
            for array in arrays.split()
        }

    variables = {
        **of("pairs", config.measures, "matrix estimate low high baseline", "items", "other_items"),
        **of("training", config.measures, "through", "epochs", "seeds", "other_seeds"),
        **of("training", config.measures, "course", "ends", "epochs"),
        **of("rewrites", config.rewrite_measures, "rewritten chance", "rewrites", "seeds"),
        **of("rewrites", config.rewrite_measures, "calibrated", "rewrites"),
        "disagreement": (("seeds", "other_seeds"), first["disagreement"]),
        "jensen_shannon": (("seeds", "other_seeds"), first["jensen_shannon"], {"units": "nats"}),
        "points": (("items", "dimensions"), plane["points"]),
        "stress": ((), float(plane["stress"])),
    }
    count = config.num_seeds
    items = {
        "layer": np.repeat(list(layers), count),
        "seed": np.tile(np.arange(count), len(layers)),
    }
    coords = {
        **{name: ("items", values) for name, values in items.items()},
        **{f"other_{name}": ("other_items", values) for name, values in items.items()},
        "other_seeds": np.arange(count),
        "measures": list(config.measures),
        "rewrite_measures": list(config.rewrite_measures),
        "rewrites": list(REWRITES),
        "ends": ["mean", "low", "high"],
    }
    # Means over seeds leave diverged ones out already.
    alive = trained.alive[items["seed"]]
    return trained.dataset(data, variables, coords, items=alive, other_items=alive)


def _pairs(config: Config, name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large biases: the figure shows estimates too
        found = similarity.pairwise(
            layers, name, num_blocks=config.num_blocks, positions="neurons", key=key, progress=None
        )
    count = config.num_seeds
    return {
        "matrix": found.values,
        **{part: getattr(found, part) for part in ("estimate", "low", "high", "baseline")},
        "disagreement": np.asarray(found.disagreement)[:count, :count],
        "jensen_shannon": np.asarray(found.jensen_shannon)[:count, :count],
    }


def _of_rewrites(
    name: str, trained: Array, rewritten: dict[str, Array], key: Array, alive: np.ndarray
) -> dict[str, Any]:
    found = similarity.compare(
        {"trained": trained}, rewritten, name, members=True, key=key, progress=None
    )
    count = len(alive)
    table, null = (
        np.diagonal(np.asarray(values).reshape(count, -1, count), axis1=0, axis2=2)
        for values in (found.values, found.baseline)
    )
    calibrated = similarity.calibrate(table[:, alive], null[:, alive], MEASURES[name].identical)
    return {"rewritten": table, "chance": null, "calibrated": np.mean(calibrated, axis=1)}


def _through(name: str, features: np.ndarray, alive: np.ndarray) -> dict[str, Any]:
    known = np.flatnonzero(alive)
    features = stand_ins(features, alive)
    tables = [
        np.asarray(
            similarity.pairwise(
                features[:, step], name, members=True, baseline=False, progress=None
            ).values
        )
        for step in range(features.shape[1])
    ]
    course = np.full((3, len(tables)), np.nan)
    if len(known) > 2:  # two networks have no interval
        bounds = MEASURES[name].range
        found = [
            similarity.member_interval(table[np.ix_(known, known)], bounds=bounds)
            for table in tables
        ]
        course = np.array(
            [[float(end) for end in (one.mean, one.low, one.high)] for one in found]
        ).T
    return {"through": np.stack(tables), "course": course}


def _plane(name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    distances = similarity.pairwise(
        layers, name, baseline=False, positions="neurons", progress=None
    ).values
    found = similarity.smacof(np.maximum(np.asarray(distances), 0.0), key=key)
    return {"points": found.points, "stress": found.relative_stress}


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
    """Return a header and a row per measure. Columns: pairs of seeds in each layer, chance, and each rewrite."""
    layers = layers_of(dataset)
    names = dict.fromkeys((*dataset.measures.values, *dataset.rewrite_measures.values))
    shown = [["measure", *(f"{layer}, seeds" for layer in layers), "chance", *REWRITES]]
    for name in names:
        cells, moved = [""] * (len(layers) + 1), [""] * len(REWRITES)
        if name in dataset.measures:
            matrix, baseline = (dataset[kind].sel(measures=name) for kind in ("matrix", "baseline"))
            cells = [cell(of_seeds(matrix, layer), 3) for layer in layers]
            cells.append(cell(of_seeds(baseline, layers[0]), 3))
        if name in dataset.rewrite_measures:
            moved = [
                cell(values, 3) for values in dataset.rewritten.sel(rewrite_measures=name).values
            ]
        shown.append([name, *cells, *moved])
    return shown
