"""Similarity of representations: between seeds and layers, under rewrites, through training, beside the function.

Every layer of networks from several seeds represents some test images, at the start and after every epoch. Measures of
`similarity` compare the representations.
"""

import dataclasses
import warnings
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation import similarity
from dissociation._core.checks import check_choice, check_count, check_distinct, fail
from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._artifacts import AnyMeter, Folder, Parts
from dissociation.figures._members import source as source
from dissociation.figures._results import Results
from dissociation.figures._seeds import cell
from dissociation.figures._similarity_drawing import REWRITES, draw, of_seeds
from dissociation.models._representations import member_representations, representations
from dissociation.recipes._mnist import HeldOutPerformance
from dissociation.rewrites._rewrites import permute
from dissociation.similarity._measures import MEASURES

__all__ = ["Config", "compute", "draw", "of_seeds"]

STEM = "similarity"
SHOWS = "Similarity of representations between seeds and layers, under rewrites and through training."

_PAIRS = ("measures", "items", "items")
AXES = {
    "matrix": _PAIRS,  # `matrices` of results: values of all pairs
    "estimate": _PAIRS,  # `estimates`: the same without their bias
    "low": _PAIRS,  # `lows`: lower ends of the intervals about estimates
    "high": _PAIRS,  # `highs`: upper ends
    "baseline": _PAIRS,  # `baselines`: values by chance
    "through": ("measures", "epochs", "seeds", "seeds"),  # values of the last hidden layer between seeds
    "course": ("measures", "ends", "epochs"),  # mean over pairs of seeds and the ends of its 90 % interval
    "rewritten": ("measures", "rewrites", "seeds"),  # values of a network and its rewrites, last hidden layer
    "chance": ("measures", "rewrites", "seeds"),  # the same with samples in another order
    "calibrated": ("measures", "rewrites"),  # means over seeds, 0 for chance and 1 for a measure that does not move
    "disagreement": ("seeds", "seeds"),  # share of samples to which two seeds give different classes
    "jensen_shannon": ("seeds", "seeds"),  # divergence of their predictions
    "points": ("items", "dimensions"),  # all representations in a plane, by angular distance
    "test_error": ("seeds", "epochs"),  # along training
    "diverged_at": ("seeds",),
    "stress": (),  # Kruskal's stress-1 of the plane
    "items": ("items",),  # layer and seed of the rows of matrices, pairs in results
    "rewrites": ("rewrites",),
    "ends": ("ends",),
}
"""Axes of the results."""

UNITS = {"jensen_shannon": "nats"}

REPRESENTATIONAL = tuple(name for name in MEASURES if name not in ("disagreement", "jensen_shannon", "crossnobis_rsa"))
"""Measures on which rewrites are tried: of representations, measured once."""

SIMILARITIES = tuple(
    name for name in REPRESENTATIONAL if MEASURES[name].larger_is_closer and MEASURES[name].range[0] >= -1
)
"""Measures on one scale, at most 1."""

MAPS = {"mlp": 0, "cnn": 14 * 14 * 16, "resnet": 14 * 14 * 16, "transformer": 16 * 64}
"""Features of the widest layer that does not depend on `width`."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, rewrites and comparison."""

    model: members.ModelName = "mlp"
    """Architecture. Neurons are all positions of all channels of a convolutional layer, all entries of tokens."""
    num_seeds: int = 5
    """Networks trained from scratch, at least 3."""
    num_samples: int = 1000
    """Test images that are represented, the first ones."""
    width: int = 128
    """Units in each of the two hidden layers; of networks of images, in the last."""
    measures: tuple[str, ...] = ("debiased_cka", "angular_similarity", "rsa", "mutual_knn")
    """Measures of seeds and layers, through training and beside the function: similarities up to 1."""
    rewrite_measures: tuple[str, ...] = REPRESENTATIONAL
    """Measures on which rewrites are tried."""
    num_blocks: int = 20
    """Blocks of samples for the jackknife's 90 % intervals."""
    scale_factor: float = 20.0
    """Factor on incoming weights (outgoing ones are divided by it)."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    num_zero: int = 64
    """Nuisance neurons, one per group."""

    def __post_init__(self):
        check_count("num_seeds", self.num_seeds, minimum=3)
        super().__post_init__()
        check_count("num_samples", self.num_samples, minimum=20)
        check_count("num_blocks", self.num_blocks, minimum=2)
        for name in ("measures", "rewrite_measures"):
            check_distinct(name, getattr(self, name))
            for measure in getattr(self, name):
                check_choice(name, measure, SIMILARITIES if name == "measures" else REPRESENTATIONAL)
        if self.num_blocks > self.num_samples:
            fail("num_blocks", f"be at most `num_samples` ({self.num_samples})", self.num_blocks)
        left = self.num_samples - -(-self.num_samples // self.num_blocks)
        layer = max(self.width, MAPS[self.model])
        rewritten = max(round(self.width * self.duplicate_multiplier), self.width + self.num_zero)
        for name, widest, samples in (("measures", layer, left), ("rewrite_measures", rewritten, self.num_samples)):
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
        return {**self.held_out(model, step, key), "features": representations(model, self.images)["features"]}


def compute(
    config: Config, *, key: Array, dataset: Dataset | None = None, folder: Folder = None, progress: AnyMeter = None
) -> Results:
    """Train, represent and compare; see `figures.Figure.compute`."""
    return members.run(_computed, config, key, dataset, folder, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts) -> Results:
    train_key, rewrite_key, order_key, start_key = jax.random.split(key, 4)
    images = jnp.asarray(data.test_images[: config.num_samples])
    observe = Snapshots(HeldOutPerformance(jnp.asarray(data.test_images), jnp.asarray(data.test_labels)), images)
    trained = members.train_members(config, key=train_key, data=data, parts=parts, observe=observe)
    keys = jax.random.split(rewrite_key, (len(REWRITES), config.num_seeds))
    layers = member_representations(trained.models, images)
    items = tuple((layer, seed) for layer in layers for seed in range(config.num_seeds))
    group = members.rewritten_group(trained.models, images[0])
    variants = members.neuron_rewrites(config, group) | {"permuted": lambda model, key: permute(group, key=key)(model)}
    rewritten = {
        name: members.measure_members(variants[name], eqx.Partial(members.represent, images), trained.models, own, own)
        for name, own in zip(REWRITES, keys, strict=True)
    }
    features, observed = layers["features"], trained.observed["features"]
    jobs = {
        **{f"pairs_{name}": partial(_pairs, config, name, layers, order_key) for name in config.measures},
        **{
            f"rewrites_{name}": partial(_of_rewrites, name, features, rewritten, order_key, trained.alive)
            for name in config.rewrite_measures
        },
        **{f"training_{name}": partial(_through, name, observed, trained.alive) for name in config.measures},
        "plane_angular_distance": partial(_plane, "angular_distance", layers, start_key),
    }
    found = {name: _without(part, trained.alive, items) for name, part in parts.get_all(jobs, "comparing").items()}

    def of(kind: str, array: str) -> dict[str, np.ndarray]:
        names = config.rewrite_measures if kind == "rewrites" else config.measures
        return {name: found[f"{kind}_{name}"][array] for name in names}

    plane, first = found["plane_angular_distance"], found[f"pairs_{config.measures[0]}"]
    return trained.results(
        config,
        data,
        parts,
        items=items,
        matrices=of("pairs", "matrix"),
        estimates=of("pairs", "estimate"),
        lows=of("pairs", "low"),
        highs=of("pairs", "high"),
        baselines=of("pairs", "baseline"),
        through=of("training", "through"),
        course=of("training", "course"),
        rewritten=of("rewrites", "rewritten"),
        chance=of("rewrites", "chance"),
        calibrated=of("rewrites", "calibrated"),
        disagreement=first["disagreement"],
        jensen_shannon=first["jensen_shannon"],
        points=plane["points"],
        stress=float(plane["stress"]),
        rewrites=np.asarray(REWRITES),
        ends=np.asarray(("mean", "low", "high")),
    )


def _pairs(config: Config, name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about large biases: the figure shows estimates too
        found = similarity.pairwise(
            layers, name, num_blocks=config.num_blocks, positions="neurons", key=key, progress=None
        )
    count = config.num_seeds
    return {
        "matrix": found.values,
        "estimate": found.estimate,
        "low": found.low,
        "high": found.high,
        "baseline": found.baseline,
        "disagreement": np.asarray(found.disagreement)[:count, :count],
        "jensen_shannon": np.asarray(found.jensen_shannon)[:count, :count],
    }


def _of_rewrites(
    name: str, trained: Array, rewritten: dict[str, Array], key: Array, alive: np.ndarray
) -> dict[str, Any]:
    found = similarity.compare({"trained": trained}, rewritten, name, members=True, key=key, progress=None)
    count = len(alive)
    table, null = (
        np.diagonal(np.asarray(values).reshape(count, -1, count), axis1=0, axis2=2)
        for values in (found.values, found.baseline)
    )
    calibrated = similarity.calibrate(table[:, alive], null[:, alive], MEASURES[name].identical)
    return {"rewritten": table, "chance": null, "calibrated": np.mean(calibrated, axis=1)}


def _through(name: str, features: np.ndarray, alive: np.ndarray) -> dict[str, Any]:
    known = np.flatnonzero(alive)
    features = np.where(alive[:, None, None, None], features, features[known[:1]])  # as `_seeds.stand_ins` does
    tables = [
        np.asarray(similarity.pairwise(features[:, step], name, members=True, baseline=False, progress=None).values)
        for step in range(features.shape[1])
    ]
    course = np.full((3, len(tables)), np.nan)
    if len(known) > 2:  # two networks have no interval
        bounds = MEASURES[name].range
        found = [similarity.member_interval(table[np.ix_(known, known)], bounds=bounds) for table in tables]
        course = np.array([[float(end) for end in (one.mean, one.low, one.high)] for one in found]).T
    return {"through": np.stack(tables), "course": course}


def _plane(name: str, layers: dict[str, Array], key: Array) -> dict[str, Any]:
    distances = similarity.pairwise(layers, name, baseline=False, positions="neurons", progress=None).values
    found = similarity.smacof(np.maximum(np.asarray(distances), 0.0), key=key)
    return {"points": found.points, "stress": found.relative_stress}


def _without(
    part: dict[str, np.ndarray], alive: np.ndarray, items: tuple[tuple[str, int], ...]
) -> dict[str, np.ndarray]:
    """Return a part with NaN in the rows and columns of diverged seeds."""
    if alive.all():
        return part
    gone = {len(alive): ~alive, len(items): np.array([not alive[seed] for _, seed in items])}
    masked = {}
    for name, value in part.items():
        masked[name] = np.array(value, float)
        if name in ("course", "calibrated"):  # these leave them out already
            continue
        for axis, size in enumerate(value.shape):
            if size in gone:
                masked[name][(slice(None),) * axis + (gone[size],)] = np.nan
    return masked


def arrays(results: Results) -> dict[str, Any]:
    """Return the arrays of the figure by name."""
    others = {
        "matrix": results.matrices, "estimate": results.estimates, "low": results.lows, "high": results.highs,
        "baseline": results.baselines, "items": np.asarray([f"{layer} {seed}" for layer, seed in results.items]),
    }  # fmt: skip
    return {name: others[name] if name in others else getattr(results, name) for name in AXES}


def caption(results: Results) -> str:
    """Return the caption."""
    config = results.config
    pairs = f"{config.num_seeds * (config.num_seeds - 1) // 2} pairs of seeds"
    return (
        f"Similarity of the representations of {config.num_samples} test images. (a) Values of all pairs of "
        f"{config.num_seeds} seeds and their layers. (b) A network and its rewrites with the same function, last "
        f"hidden layer, means over {config.num_seeds} seeds. (c) During training, means over {pairs} with 90 % "
        f"intervals over the seeds. (d) The same {pairs} after training, by the share of images that they classify "
        "differently: estimates (values without their bias), with 90 % intervals over blocks of images; dotted, "
        f"values by chance. (e) All representations in a plane by angular_distance, stress {results.stress:.2f}. "
        f"Data: {headline(results)}."
    )


def headline(results: Results) -> str:
    """Return a line with the data and the size of the run."""
    return f"{members.headline(results)}; {results.config.num_samples} samples"


def describe(results: Results) -> dict[str, Any]:
    """Return settings and numbers for the JSON beside the figure."""
    return {
        "figure": "similarity",
        "config": results.config,
        "data": results.data,
        "items": [f"{layer} {seed}" for layer, seed in results.items],
        "stress of the plane": results.stress,
    }


def table(results: Results) -> list[list[str]]:
    """Return a header and a row per measure: between seeds by layer, by chance, and under rewrites."""
    layers = list(dict.fromkeys(layer for layer, _ in results.items))
    rows = [["measure", *(f"{layer}, seeds" for layer in layers), "chance", *(f"{name}" for name in REWRITES)]]
    for name in dict.fromkeys((*results.matrices, *results.rewritten)):
        cells = [""] * (len(layers) + 1)
        if name in results.matrices:
            own = [of_seeds(results.items, results.matrices[name], layer) for layer in layers]
            cells = [
                *(cell(values, 3) for values in own),
                cell(of_seeds(results.items, results.baselines[name], layers[0]), 3),
            ]
        moved = results.rewritten.get(name)
        cells += [cell(values, 3) for values in moved] if moved is not None else [""] * len(REWRITES)
        rows.append([name, *cells])
    return rows
