"""What the figure of neural collapse measures: its configuration, the costly measures, margins, and crossing times."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jaxtyping import Array, Float

from dissociation import checkpoint
from dissociation.checks import (
    check_choice,
    check_count,
    check_distinct,
    check_non_negative,
    check_positive,
    check_seed,
    fail,
)
from dissociation.data.datasets import NAMES, Dataset
from dissociation.figures.artifacts import Arrays, read_part, save_part
from dissociation.figures.members import DataName, check_sizes
from dissociation.members import after, count, take
from dissociation.metrics.crossing import Median, Slope, first_cross, log_slope, median_crossing
from dissociation.metrics.information.coordinates import whiten
from dissociation.metrics.information.hsic import information_plane
from dissociation.metrics.information.nearest import information, label_information
from dissociation.metrics.information.smoothed import smoothed_information
from dissociation.metrics.margins import class_plane, linear_head, signed_distance
from dissociation.recipes.compression import encode, train_compression
from dissociation.recipes.grokking import observation_steps, standardised
from dissociation.schedule import log_spaced_steps


@dataclasses.dataclass(frozen=True)
class Config:
    """The networks, and what is measured on them."""

    data: DataName = "glyphs"
    """Data set, by its name in `data.datasets.SOURCES`."""
    weight_decays: tuple[float, ...] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
    """AdamW's."""
    seeds: tuple[int, ...] = (42, 43, 44, 45, 46)
    """Networks of every weight decay."""
    num_steps: int = 100_000
    """Optimiser steps."""
    num_seen: int = 1000
    """Training pictures that are trained on, the first ones; the others are unseen."""
    batch_size: int = 100
    """Pictures in a batch."""
    learning_rate: float = 1e-3
    """Of the optimiser."""
    init_scale: float = 8.0
    """Factor of all initial parameters."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimiser. The loss is a sum over classes and batch, and steep at an initial scale of 8: "sgd" diverges there
    at the default rate within 3 steps (glyphs); at scale 1 it learns with 1e-4."""
    network: Literal["mlp", "cnn"] = "mlp"
    """The architecture."""
    width: int = 200
    """Of the hidden layers; of the last one for a convolutional network."""
    depth: int = 2
    """Hidden layers of a multilayer perceptron."""
    last_activation: bool = True
    """Whether features are taken after an activation."""
    num_information: int = 30
    """Observations at which information is measured, evenly spaced in the logarithm of the step; 0 for none."""
    num_pictures: int = 10_000
    """Test pictures on which it is measured, at most."""
    num_neighbours: int = 10
    """Of the estimators by entropies, the ones that are right in 4 + 4 dimensions; Kraskov's falls short there."""
    feature_noise: float = 0.1
    """Standard deviation of the noise on whitened features, without which information would be infinite."""
    code: int = 4
    """Numbers to which pictures and features are compressed."""
    compression_epochs: int = 10
    """Passes of the autoencoder over at most 10 000 training pictures."""
    smoothing: float = 0.3
    """Standard deviation of the noise for smoothed information over the features' root mean square distance from their
    mean: d features can then show (d / 2) log(1 + 1 / (smoothing^2 d)) nats at the most."""
    num_smoothed: int = 2000
    """Test pictures for smoothed information, whose cost grows with their square, at most."""
    classes: tuple[int, int] = (0, 1)
    """Whose margins are drawn."""
    accuracy_threshold: float = 0.99
    """Training accuracy above which a network has fitted."""
    collapse_threshold: float = 0.1
    """RNC1 below which it has collapsed."""
    test_threshold: float = 0.8
    """Test accuracy above which it has generalised."""
    num_train: int | None = None
    """Training pictures loaded; all by default."""
    num_test: int | None = None
    """Test pictures; all by default."""

    def __post_init__(self):
        for name, choices in (("data", NAMES), ("optimizer", ("adamw", "sgd")), ("network", ("mlp", "cnn"))):
            check_choice(name, getattr(self, name), choices)
        check_sizes(self)
        for name in ("weight_decays", "seeds"):
            check_distinct(name, getattr(self, name))
        check_non_negative("weight_decays", np.asarray(self.weight_decays))
        for seed in self.seeds:
            check_seed("seeds", seed)
        check_count("num_information", self.num_information)
        for name in ("num_steps", "num_seen", "batch_size", "width", "depth", "num_pictures", "num_neighbours", "code",
                     "compression_epochs", "num_smoothed"):  # fmt: skip
            check_count(name, getattr(self, name), minimum=1)
        for name in ("learning_rate", "init_scale", "feature_noise", "smoothing", "collapse_threshold"):
            check_positive(name, getattr(self, name))
        if self.batch_size > self.num_seen:
            fail("batch_size", f"be at most `num_seen` ({self.num_seen})", self.batch_size)
        for name in ("accuracy_threshold", "test_threshold"):
            if not 0 <= getattr(self, name) < 1:
                fail(name, "lie from 0 to below 1", getattr(self, name))
        first, second = (check_count("classes", label) for label in self.classes)
        if first == second or min(self.classes) < 0 or max(self.classes) > 9:
            fail("classes", "be two different digits", self.classes)

    def quick(self) -> "Config":
        """A small run that shows that everything works: no science."""
        small = {"weight_decays": (0.3, 0.03), "seeds": (42, 43), "num_steps": 1000, "num_seen": 200, "width": 32}
        small |= {"init_scale": 2.0, "learning_rate": 3e-3}  # learns in so few steps
        few = {"num_information": 3, "num_pictures": 300, "compression_epochs": 2, "num_train": 400, "num_test": 300}
        return dataclasses.replace(self, **small, **few)

    def information_steps(self) -> np.ndarray:
        """`num_information` observations, nearest to steps evenly spaced in the logarithm; all if there are no more."""
        times = observation_steps(self.num_steps)
        if self.num_information < 2:
            return times[:0] if self.num_information == 0 else times[-1:]
        if self.num_information >= len(times):
            return times
        finer = self.num_information
        while True:  # where observations are sparse several wanted steps share one: ask for more until enough differ
            wanted = log_spaced_steps(self.num_steps, min(finer, self.num_steps + 1))
            chosen = np.unique(times[np.abs(times[None] - wanted[:, None]).argmin(1)])
            if len(chosen) >= self.num_information:
                return chosen[np.rint(np.linspace(0, len(chosen) - 1, self.num_information)).astype(int)]
            finer += 1


class Information(eqx.Module):
    """The costly measures of one network, on test pictures.

    Attributes:
        images: Standardised pictures X, [n, pixels].
        labels: One-hot Y, [n, classes].
        codes: Pictures compressed and whitened, [n, code].
        feature_noise: On whitened features.
        num_neighbours: Of the estimators.
        smoothing: Noise of smoothed information, in units of the features' spread.
        num_smoothed: Pictures for it.
    """

    images: Float[Array, "n d"]
    labels: Float[Array, "n classes"]
    codes: Float[Array, "n code"]
    feature_noise: float = eqx.field(static=True)
    num_neighbours: int = eqx.field(static=True)
    smoothing: float = eqx.field(static=True)
    num_smoothed: int = eqx.field(static=True)

    def __call__(self, model: Any, key: Array) -> dict[str, Array]:
        """By name; "null" stands for shuffled pairs, "free" for a bandwidth that follows the features' scale.

        The free bandwidth is the published one for features of variance 1.
        """
        keys = jax.random.split(key, 4)
        features = jax.vmap(model.representations)(self.images)["features"]
        size = min(100, len(self.images))
        plane = information_plane(features, self.images, self.labels, key=keys[0], batch_size=size)
        plane, features = after(plane, features)
        free = information_plane(
            features, self.images, self.labels, key=keys[0], batch_size=size, sigma=5 / 2**0.5, bandwidth="median"
        )
        free, features = after(free, features)
        codes = whiten(features, self.codes.shape[1])
        codes = codes + self.feature_noise * jax.random.normal(keys[1], codes.shape, codes.dtype)
        order = jax.random.permutation(keys[2], len(codes))
        truth, classes = jnp.argmax(self.labels, 1), self.labels.shape[1]
        found = {}
        for name, own in (("", plane), ("_free", free)):
            found |= {f"nhsic_zx{name}": own.zx, f"nhsic_zy{name}": own.zy}
            found |= {f"nhsic_zx{name}_null": own.zx_null, f"nhsic_zy{name}_null": own.zy_null}
        for name, z in (("", codes), ("_null", codes[order])):
            zx = information(self.codes, z, num_neighbours=self.num_neighbours)
            zy = label_information(z, truth, num_classes=classes, num_neighbours=self.num_neighbours)
            found |= {f"mi_zx_compression{name}": zx.value, f"mi_zy_compression{name}": zy.value}
            found |= {f"mi_zx_error{name}": zx.error, f"mi_zy_error{name}": zy.error}
        some = features[: self.num_smoothed]
        spread = jnp.sqrt(jnp.mean(jnp.sum((some - jnp.mean(some, 0)[None]) ** 2, 1)))
        noise = self.smoothing * jnp.maximum(spread, jnp.finfo(some.dtype).tiny)
        smoothed = smoothed_information(some, truth[: self.num_smoothed], noise, key=keys[3])
        named = {"mi_zx_smoothed": smoothed.zx, "mi_zy_smoothed": smoothed.zy}
        return {**found, **named}


def compressed(config: Config, data: Dataset, *, key: Array) -> Arrays:
    """Codes of the test pictures, whitened, from an autoencoder of training pictures, kept: "codes" [n, code]."""
    seen, images = data.train_images[:10_000], data.test_images[: config.num_pictures]
    asked = {"seen": seen, "images": images, "key": key, "code": config.code, "epochs": config.compression_epochs}
    asked["format"] = 2  # to be raised when `train_compression` finds other codes
    digest = checkpoint.fingerprint(asked)
    # Shared by sweeps side by side: both may compute it, and the later one replaces the same codes.
    path = code_cache() / f"{digest}.npz"
    if path.exists():
        return read_part(path, digest)
    model = train_compression(seen, config.code, key=key, num_epochs=config.compression_epochs)
    codes = {"codes": np.asarray(whiten(encode(model, images)))}
    save_part(path, codes, digest)
    return codes


def code_cache() -> Path:
    """Where codes of pictures are kept from one sweep to the next."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "codes"


def information_measures(config: Config, data: Dataset, codes: Array | np.ndarray) -> Information:
    """The costly measures on the first test pictures."""
    count = len(codes)
    return Information(
        standardised(data.test_images[:count]),
        jnp.asarray(data.test_labels[:count]),
        jnp.asarray(codes),
        config.feature_noise,
        config.num_neighbours,
        config.smoothing,
        config.num_smoothed,
    )


def margins_of(config: Config, data: Dataset, models: Any) -> dict[str, np.ndarray]:
    """Signed distances to the boundary between two classes, of their samples, in every network.

    Returns:
        For each of the classes and for seen and unseen samples, "margin_{class}_{seen|unseen}": [members, samples], and
        "plane_{class}_{seen|unseen}": coordinates in the plane of the two classes' weights, [members, samples, 2].
        Where the boundary crosses its first axis is "plane_boundary", [members]. Unseen are the training pictures after
        the first `num_seen`, and all test pictures.
    """
    first, second = config.classes
    seen = data.train_images[: config.num_seen], data.train_labels[: config.num_seen]
    rest = (
        [data.train_images[config.num_seen :], data.test_images],
        [data.train_labels[config.num_seen :], data.test_labels],
    )
    unseen = tuple(np.concatenate([np.asarray(part) for part in parts]) for parts in rest)

    @eqx.filter_jit
    def places(model: Any, images: Array) -> tuple[Array, Array, Array]:
        weights, biases = linear_head(model)
        features = jax.vmap(model.representations)(images)["features"]
        plane = class_plane(weights, biases, first, second)
        distances = signed_distance(features, weights, biases, first, second)
        return distances, plane.coordinates(features), plane.boundary

    found = {}
    each = [take(models, index) for index in range(count(models))]
    for name, (images, labels) in (("seen", seen), ("unseen", unseen)):
        truth = np.asarray(labels).argmax(1)
        for label in config.classes:
            chosen = standardised(np.asarray(images)[truth == label])
            # Members in turn, and not in a compiled loop, where a CPU's convolutions are slow.
            parts = [places(model, chosen) for model in each]
            margin, plane, boundary = (np.stack(part) for part in zip(*parts, strict=True))
            found |= {f"margin_{label}_{name}": margin, f"plane_{label}_{name}": plane, "plane_boundary": boundary}
    return found


def crossings(config: Config, series: dict[str, np.ndarray], time_step: np.ndarray) -> dict[str, np.ndarray]:
    """First steps, [decay, seed], NaN where there is none: "fitted", "generalised", "collapsed"; "delay"; "diverged".

    They are steps of `time_step`, so each is late by less than the steps between two observations. Collapse is looked
    for from fitting on: features of the beginning may be as close to each other, for other reasons. "delay" is the one
    minus the other. A network that diverged, where "diverged" is true, has none, and is not one that never crossed.
    """
    times = np.asarray(time_step, np.float32)
    generalised = np.asarray(first_cross(times, series["test_accuracy"], config.test_threshold))
    fitted = np.asarray(first_cross(times, series["train_accuracy"], config.accuracy_threshold))
    after = np.where(times >= fitted[..., None], series["rnc1_score"], np.nan)
    collapsed = np.asarray(first_cross(times, after, config.collapse_threshold, "below"))
    diverged = np.asarray(~np.isfinite(series["train_loss"]).all(-1))
    found = {"fitted": fitted, "generalised": generalised, "collapsed": collapsed, "delay": collapsed - fitted}
    return {name: np.where(diverged, np.nan, first) for name, first in found.items()} | {"diverged": diverged}


def median_delay(fitted: np.ndarray, delay: np.ndarray, end: int) -> Median:
    """Median steps from fitting to collapse over the seeds that fitted; NaN if none did."""
    chosen = ~np.isnan(fitted)
    if not chosen.any():
        return Median(np.nan, np.nan, np.nan)
    return median_crossing(delay[chosen], end - fitted[chosen])


def crossing_table(config: Config, found: dict[str, np.ndarray], end: int) -> list[list[str]]:
    """A header, and a row per weight decay: medians with 90 % intervals, and how much later collapse came."""
    rows = [
        ["weight decay", "fitted at", "generalised", "collapsed", "90 % interval", "never", "delay", "90 % interval"]
    ]
    names = ("fitted", "generalised", "collapsed", "delay")
    for index, decay in enumerate(config.weight_decays):
        fitted, generalised, collapsed, delay = (found[name][index, ~found["diverged"][index]] for name in names)
        if not len(fitted):
            rows.append([f"{decay:g}", *["all diverged", "", "", "", "", "", ""]])
            continue
        first, general, later = (median_crossing(own, end) for own in (fitted, generalised, collapsed))
        between = median_delay(fitted, delay, end)
        never = f"{int(np.isnan(collapsed).sum())} of {len(collapsed)}"
        shown = [f"{first.value:.0f}", f"{general.value:.0f}", f"{later.value:.0f}", _interval(later), never]
        rows.append([f"{decay:g}", *shown, f"{between.value:.0f}", _interval(between)])
    return rows


def _interval(median: Median) -> str:
    return f"{max(median.low, 0.0):.0f} to {median.high:.0f}"  # no time is negative


def crossing_line(config: Config, found: dict[str, np.ndarray], end: int, name: str = "collapsed") -> Slope:
    """The line of log time on log weight decay, over positive decays.

    Args:
        config: The sweep's.
        found: What `crossings` returned.
        end: The last step.
        name: "fitted", "generalised", "collapsed", or "delay", over the networks that fitted.

    Raises:
        ValueError: If too few networks crossed.
    """
    decays, times = np.asarray(config.weight_decays, float), np.asarray(found[name], float)
    places = np.repeat(decays, times.shape[1])
    ends = np.full(times.shape, float(end)) - (found["fitted"] if name == "delay" else 0.0)
    # A delay that the run's end leaves no room for says nothing.
    kept = (places > 0) & (ends.reshape(-1) > 0) & ~found["diverged"].reshape(-1)
    return log_slope(times.reshape(-1)[kept], places[kept], ends.reshape(-1)[kept])


def crossing_slope(config: Config, found: dict[str, np.ndarray], end: int) -> str:
    """Slopes of log collapse time and of log delay on log weight decay with standard errors, or why there are none."""
    said = []
    for name, words in (("collapsed", "collapse time"), ("delay", "delay after fitting")):
        try:
            line = crossing_line(config, found, end, name)
        except ValueError as error:
            said.append(f"{words}: no slope, {error}")
        else:
            said.append(f"{words} goes as (weight decay)^({line.slope:.2f} \u00b1 {line.error:.2f})")
    return "; ".join(said)
