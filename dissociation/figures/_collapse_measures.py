"""Measures of the figure `collapse`: observations, information, margins, series, crossings."""

import json
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array, Float

from dissociation.data._datasets import Dataset
from dissociation.figures._cache import Arrays, Cache
from dissociation.figures._harness import padded
from dissociation.measures._coordinates import whiten
from dissociation.measures._crossing import Median, first_cross, log_slope, median_crossing
from dissociation.measures._hsic import information_plane
from dissociation.measures._margins import class_places, linear_head
from dissociation.measures._nearest import information, label_information
from dissociation.measures._smoothed import smoothed_information
from dissociation.models._representations import representations
from dissociation.recipes._grokking import observation_steps, standardised
from dissociation.training._members import after, count, take
from dissociation.training._records import log_spaced_steps

SAVED = "series"
"""Name of the part with the series so far."""

EVENTS = ("fitted", "generalised", "collapsed", "delay")
"""Crossings of thresholds; "delay" is the time from "fitted" to "collapsed"."""

SPLITS = ("train", "test")


def spread_observations(num_steps: int, number: int) -> np.ndarray:
    """Return `number` of the observed steps, evenly spaced in the logarithm, or all if fewer."""
    times = observation_steps(num_steps)
    if number == 0:
        return times[:0]
    if number == 1:
        return times[-1:]
    if number >= len(times):
        return times
    # Several targets may be nearest to one observation, so targets are added until enough differ.
    num_targets = number
    while True:
        targets = log_spaced_steps(num_steps, min(num_targets, num_steps + 1))
        nearest = np.abs(times[None] - targets[:, None]).argmin(1)
        chosen = np.unique(times[nearest])
        if len(chosen) >= number:
            positions = np.linspace(0, len(chosen) - 1, number)
            return chosen[np.rint(positions).astype(int)]
        num_targets += 1


class Information(eqx.Module):
    """Expensive measures of one network, on test images."""

    images: Float[Array, "n d"]  # standardised
    labels: Float[Array, "n classes"]  # one-hot
    codes: Float[Array, "n code"]  # compressed and whitened images
    # Standard deviation of the noise on whitened features.
    feature_noise: float = eqx.field(static=True)
    num_neighbours: int = eqx.field(static=True)
    # Noise of smoothed information over the features' spread.
    smoothing: float = eqx.field(static=True)
    num_smoothed: int = eqx.field(static=True)  # images for smoothed information

    def __call__(self, model: Any, key: Array) -> dict[str, Array]:
        """Return measures by name.

        Names have "null" for shuffled pairs, and "free" for a bandwidth in proportion to the
        features.
        """
        keys = jax.random.split(key, 4)
        features = representations(model, self.images)["features"]
        plane = partial(
            information_plane,
            inputs=self.images,
            labels=self.labels,
            key=keys[0],
            batch_size=min(100, len(self.images)),
        )
        fixed = plane(features)
        fixed, features = after(fixed, features)
        # At this sigma the median bandwidth is the published one for features of variance 1.
        free = plane(features, sigma=5 / 2**0.5, bandwidth="median")
        free, features = after(free, features)
        measures = {}
        for name, hsic in (("", fixed), ("_free", free)):
            measures[f"nhsic_zx{name}"] = hsic.zx
            measures[f"nhsic_zy{name}"] = hsic.zy
            measures[f"nhsic_zx{name}_null"] = hsic.zx_null
            measures[f"nhsic_zy{name}_null"] = hsic.zy_null

        codes = whiten(features, self.codes.shape[1])
        noise = jax.random.normal(keys[1], codes.shape, codes.dtype)
        codes = codes + self.feature_noise * noise
        order = jax.random.permutation(keys[2], len(codes))
        truth = jnp.argmax(self.labels, 1)
        options: Any = {"num_neighbours": self.num_neighbours}
        for name, z in (("", codes), ("_null", codes[order])):
            zx = information(self.codes, z, **options)
            zy = label_information(z, truth, num_classes=self.labels.shape[1], **options)
            measures[f"mi_zx_compression{name}"] = zx.value
            measures[f"mi_zy_compression{name}"] = zy.value
            measures[f"mi_zx_error{name}"] = zx.error
            measures[f"mi_zy_error{name}"] = zy.error

        features = features[: self.num_smoothed]
        centred = features - jnp.mean(features, 0)[None]
        spread = jnp.sqrt(jnp.mean(jnp.sum(centred**2, 1)))
        spread = jnp.maximum(spread, jnp.finfo(features.dtype).tiny)
        smoothed = smoothed_information(
            features, truth[: self.num_smoothed], self.smoothing * spread, key=keys[3]
        )
        measures["mi_zx_smoothed"] = smoothed.zx
        measures["mi_zy_smoothed"] = smoothed.zy
        return measures


def information_measures(config: Any, data: Dataset, codes: Array | np.ndarray) -> Information:
    """Return the expensive measures on the first test images.

    `config` has the fields of `Information`.
    """
    number = len(codes)
    return Information(
        images=standardised(data.test_images[:number]),
        labels=jnp.asarray(data.test_labels[:number]),
        codes=jnp.asarray(codes),
        feature_noise=config.feature_noise,
        num_neighbours=config.num_neighbours,
        smoothing=config.smoothing,
        num_smoothed=config.num_smoothed,
    )


def margins_of(data: Dataset, models: Any, classes: tuple[int, int], num_train: int) -> Arrays:
    """Return signed distances of samples of two classes to their boundary, in every network.

    "margin_{class}_{train|test}" is [members, samples]; "plane_{class}_{train|test}", coordinates
    in the plane of the two classes' weights, [members, samples, 2]; "plane_boundary", the
    boundary's position on the first axis, [members]. "test" are all test images, and the training
    images after the first `num_train`.
    """
    images = np.concatenate([data.train_images, data.test_images])
    labels = np.concatenate([data.train_labels, data.test_labels]).argmax(1)
    networks = [take(models, index) for index in range(count(models))]
    margins = {}
    for split, samples in zip(SPLITS, (slice(num_train), slice(num_train, None)), strict=True):
        for label in classes:
            of_class = labels[samples] == label
            chosen = standardised(images[samples][of_class])
            # Not in a compiled loop over members, in which convolutions are slow on a CPU.
            measured = [_coordinates(network, chosen, *classes) for network in networks]
            margin, plane, boundary = map(np.stack, zip(*measured, strict=True))
            margins[f"margin_{label}_{split}"] = margin
            margins[f"plane_{label}_{split}"] = plane
            margins["plane_boundary"] = boundary
    return margins


@eqx.filter_jit
def _coordinates(model: Any, images: Array, first: int, second: int) -> tuple[Array, Array, Array]:
    features = representations(model, images)["features"]
    return class_places(features, *linear_head(model), first, second)


class SeriesKeeper:
    """Callback that saves the series so far, and continues the series of an interrupted run."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.steps: list[int] = []
        self.observations: list[dict[str, np.ndarray]] = []

    def __call__(self, step: int, records: dict[str, Any]) -> None:
        if self.cache.folder is None:
            return
        if not self.steps and step > 0:
            self._resume(step)
        self.steps.append(step)
        self.observations.append(flat(records["observed"]))

        # At every observation, so that a checkpoint never is ahead of the series.
        series = {"time_step": np.asarray(self.steps)}
        for name in self.observations[0]:
            arrays = [observation[name] for observation in self.observations]
            series[name] = np.stack(arrays, -1)
        self.cache.save(SAVED, series)

    def _resume(self, step: int) -> None:
        """Load the saved observations before `step`."""
        series = self.cache.load(SAVED)
        if series is None:
            return
        times = series.pop("time_step")
        for index in np.flatnonzero(times < step):
            self.steps.append(int(times[index]))
            observation = {name: leaf[..., index] for name, leaf in series.items()}
            self.observations.append(observation)


def flat(observed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return observations with expensive measures on the level of the cheap ones."""
    measures = dict(observed)
    expensive = measures.pop("expensive", {})
    return measures | expensive


def first_crossings(config: Any, series: Arrays, time_step: np.ndarray) -> tuple[Arrays, Arrays]:
    """Return by event the first steps beyond the thresholds, and the last steps of watching.

    Both are [decay, seed]. First steps are NaN if a network never crossed. Both are NaN if it
    diverged; last steps of "delay", if it never fitted. "collapsed" is the first such step from
    "fitted" on, "delay" their difference.
    """
    times = np.asarray(time_step, np.float32)
    end = float(time_step[-1])
    generalised = np.asarray(first_cross(times, series["test_accuracy"], config.test_threshold))
    fitted = np.asarray(first_cross(times, series["train_accuracy"], config.accuracy_threshold))
    # Features may be close to each other at the start too.
    collapse = np.where(times >= fitted[..., None], series["rnc1_score"], np.nan)
    collapsed = np.asarray(first_cross(times, collapse, config.collapse_threshold, "below"))

    steps = (fitted, generalised, collapsed, collapsed - fitted)
    ends: dict[str, Any] = dict.fromkeys(EVENTS, np.full(fitted.shape, end))
    ends["delay"] = end - fitted
    has_diverged = ~np.isfinite(series["train_loss"]).all(-1)
    first = {}
    for event, crossed in zip(EVENTS, steps, strict=True):
        first[event] = np.where(has_diverged, np.nan, crossed)
        ends[event] = np.where(has_diverged, np.nan, ends[event])
    return first, ends


def median_of(steps: np.ndarray, ends: np.ndarray) -> Median:
    """Return the median step over the networks that have ends; NaN without any."""
    has_end = ~np.isnan(ends)
    if not has_end.any():
        return Median(np.nan, np.nan, np.nan)
    return median_crossing(steps[has_end], ends[has_end])


def crossings(config: Any, series: Arrays, time_step: np.ndarray) -> tuple[dict[str, Any], str]:
    """Return variables on the steps of crossings, and a sentence on slopes.

    `first_crossing` [events, weight_decays, seeds], see `first_crossings`; `median_crossing`
    [events, weight_decays, bounds] with 90 % intervals, over the seeds that did not diverge and for
    "delay" fitted; `diverged` [weight_decays, seeds].
    """
    first, ends = first_crossings(config, series, time_step)
    medians = []
    for event in EVENTS:
        pairs = zip(first[event], ends[event], strict=True)
        medians.append([median_of(*pair) for pair in pairs])
    decays = np.asarray(config.weight_decays, float)[:, None]

    sentences = []
    for event, words in (("collapsed", "collapse time"), ("delay", "delay after fitting")):
        steps = first[event]
        event_ends = ends[event]
        # The logarithm of 0 does not exist: neither of a decay, nor of the delay of a network that
        # fitted at the last step.
        is_usable = (decays > 0) & (event_ends > 0)
        at = np.broadcast_to(decays, is_usable.shape)[is_usable]
        try:
            slope = log_slope(steps[is_usable].astype(float), at, event_ends[is_usable])
        except ValueError:
            sentences.append(
                f"{words}: no slope, which takes three crossings at two weight decays, of "
                f"{np.isfinite(steps).sum()} of {steps.size} networks"
            )
            continue
        sentences.append(
            f"{words} goes as (weight decay)^({slope.slope:.2f} \u00b1 {slope.error:.2f})"
        )

    unit = {"units": "steps"}
    first_steps = np.stack(list(first.values()))
    variables = {
        "first_crossing": (("events", "weight_decays", "seeds"), first_steps, unit),
        "median_crossing": (("events", "weight_decays", "bounds"), np.array(medians), unit),
        "diverged": (("weight_decays", "seeds"), np.isnan(ends["fitted"])),
    }
    return variables, "; ".join(sentences)


def assemble(
    config: Any,
    data_facts: dict[str, Any],
    steps: np.ndarray,
    member_series: Arrays,
    margins: Arrays,
    diverged_at: np.ndarray | None,
) -> xarray.Dataset:
    """Return the dataset of a sweep: series, crossings and margins along weight decays and seeds.

    Args:
        config: `collapse.Config`, whose grid has decays * seeds members.
        data_facts: Name and sizes of the data, for the caption.
        steps: Steps of the observations, [time].
        member_series: Observed numbers by name, [members, time].
        margins: Result of `margins_of`; empty for a running sweep.
        diverged_at: Step of divergence, or -1, [members]; None for a running sweep.
    """
    networks = ("weight_decays", "seeds")
    grid = (len(config.weight_decays), len(config.seeds))
    steps = np.asarray(steps)
    # Accuracy by argmax of NaN is that of the first class, so it looks plausible.
    is_finite = np.isfinite(member_series["train_loss"])
    if diverged_at is None:  # the first observation that is not finite
        first_undefined = steps[np.argmin(is_finite, -1)]
        diverged_at = np.where(is_finite.all(-1), -1, first_undefined)
    series = {}  # [weight_decays, seeds, time]
    for name, values in member_series.items():
        series[name] = np.where(is_finite, values, np.nan).reshape(*grid, -1)

    crossing_variables, slope_sentence = crossings(config, series, steps)
    is_measured = np.isin(steps, config.information_steps())
    variables: dict[str, Any] = {
        "diverged_at": (networks, np.asarray(diverged_at).reshape(grid)),
        **crossing_variables,
    }
    for name, values in series.items():
        axis = "time_step"
        if name.startswith(("nhsic", "mi_")):
            axis = "information_step"
            values = values[..., is_measured]
        attributes = {}
        if name.startswith("mi_"):
            attributes["units"] = "nats"
        variables[name] = ((*networks, axis), values, attributes)
    coords = {
        "weight_decays": list(config.weight_decays),
        "seeds": list(config.seeds),
        "time_step": ("time_step", steps, {"units": "steps"}),
        "information_step": ("information_step", steps[is_measured], {"units": "steps"}),
        "events": list(EVENTS),
        "bounds": ["median", "low", "high"],
    }

    if margins:
        classes = list(config.classes)
        coords["classes"] = classes
        coords["splits"] = list(SPLITS)
        axes = ("classes", "splits", *networks, "images")
        for kind, dims in (("margin", axes), ("plane", (*axes, "coordinates"))):
            arrays = []
            for label in classes:
                arrays += [margins[f"{kind}_{label}_{split}"] for split in SPLITS]
            values = padded(arrays)
            values[:, diverged_at >= 0] = np.nan
            shape = (len(classes), len(SPLITS), *grid, *values.shape[2:])
            variables[kind] = (dims, values.reshape(shape))
        boundary = np.where(diverged_at < 0, margins["plane_boundary"], np.nan)
        variables["plane_boundary"] = (networks, boundary.reshape(grid))
    facts = {"data": json.dumps(data_facts), "slope": slope_sentence}
    return xarray.Dataset(variables, coords, facts)
