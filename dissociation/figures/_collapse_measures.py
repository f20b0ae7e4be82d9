"""Measures of the figure `collapse`: steps of observation, information, margins, stored series, and crossings."""

import json
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
    """Return `number` of the observed steps, evenly spaced in the logarithm, or all if there are fewer."""
    times = observation_steps(num_steps)
    if number < 2:
        return times[:0] if number == 0 else times[-1:]
    if number >= len(times):
        return times
    finer = number
    # several wanted steps may be nearest to one observation, so more are wanted until enough differ
    while True:
        wanted = log_spaced_steps(num_steps, min(finer, num_steps + 1))
        chosen = np.unique(times[np.abs(times[None] - wanted[:, None]).argmin(1)])
        if len(chosen) >= number:
            return chosen[np.rint(np.linspace(0, len(chosen) - 1, number)).astype(int)]
        finer += 1


class Information(eqx.Module):
    """Expensive measures of one network, on test images."""

    images: Float[Array, "n d"]  # standardised
    labels: Float[Array, "n classes"]  # one-hot
    codes: Float[Array, "n code"]  # compressed and whitened images
    feature_noise: float = eqx.field(
        static=True
    )  # standard deviation of the noise on whitened features
    num_neighbours: int = eqx.field(static=True)
    smoothing: float = eqx.field(
        static=True
    )  # noise of smoothed information over the features' spread
    num_smoothed: int = eqx.field(static=True)  # images for smoothed information

    def __call__(self, model: Any, key: Array) -> dict[str, Array]:
        """Return measures by name: "null" of shuffled pairs, "free" with a bandwidth in proportion to the features."""
        keys = jax.random.split(key, 4)
        features = representations(model, self.images)["features"]
        size = min(100, len(self.images))
        plane = information_plane(features, self.images, self.labels, key=keys[0], batch_size=size)
        plane, features = after(plane, features)
        # At this sigma the median bandwidth is the published one for features of variance 1.
        free = information_plane(
            features,
            self.images,
            self.labels,
            key=keys[0],
            batch_size=size,
            sigma=5 / 2**0.5,
            bandwidth="median",
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
            zy = label_information(
                z, truth, num_classes=classes, num_neighbours=self.num_neighbours
            )
            found |= {f"mi_zx_compression{name}": zx.value, f"mi_zy_compression{name}": zy.value}
            found |= {f"mi_zx_error{name}": zx.error, f"mi_zy_error{name}": zy.error}
        some = features[: self.num_smoothed]
        spread = jnp.sqrt(jnp.mean(jnp.sum((some - jnp.mean(some, 0)[None]) ** 2, 1)))
        noise = self.smoothing * jnp.maximum(spread, jnp.finfo(some.dtype).tiny)
        smoothed = smoothed_information(some, truth[: self.num_smoothed], noise, key=keys[3])
        return found | {"mi_zx_smoothed": smoothed.zx, "mi_zy_smoothed": smoothed.zy}


def information_measures(config: Any, data: Dataset, codes: Array | np.ndarray) -> Information:
    """Return the expensive measures on the first test images; `config` has the fields of `Information`."""
    images, labels = data.test_images[: len(codes)], data.test_labels[: len(codes)]
    options = {
        name: getattr(config, name)
        for name in ("feature_noise", "num_neighbours", "smoothing", "num_smoothed")
    }
    return Information(standardised(images), jnp.asarray(labels), jnp.asarray(codes), **options)


def margins_of(data: Dataset, models: Any, classes: tuple[int, int], num_train: int) -> Arrays:
    """Return signed distances of samples of two classes to the boundary between the classes, in every network.

    "margin_{class}_{train|test}" is [members, samples]; "plane_{class}_{train|test}", coordinates
    in the plane of the two classes' weights, [members, samples, 2]; "plane_boundary", the
    boundary's place on the first axis, [members]. "test" are all test images, and the training
    images after the first `num_train`.
    """
    images, labels = (
        np.split(np.concatenate(parts), [num_train])
        for parts in ((data.train_images, data.test_images), (data.train_labels, data.test_labels))
    )
    margins = {}
    each = [take(models, index) for index in range(count(models))]
    for split, own, one_hot in zip(SPLITS, images, labels, strict=True):
        truth = one_hot.argmax(1)
        for label in classes:
            chosen = standardised(own[truth == label])
            # Not in a compiled loop over members, in which convolutions are slow on a CPU.
            parts = [_places(model, chosen, *classes) for model in each]
            margin, plane, boundary = (np.stack(part) for part in zip(*parts, strict=True))
            margins |= {
                f"margin_{label}_{split}": margin,
                f"plane_{label}_{split}": plane,
                "plane_boundary": boundary,
            }
    return margins


@eqx.filter_jit
def _places(model: Any, images: Array, first: int, second: int) -> tuple[Array, Array, Array]:
    return class_places(
        representations(model, images)["features"], *linear_head(model), first, second
    )


class SeriesKeeper:
    """Callback that saves the series so far, and continues the series of an interrupted run."""

    def __init__(self, cache: Cache):
        self.cache = cache
        self.steps: list[int] = []
        self.found: list[dict[str, np.ndarray]] = []

    def __call__(self, step: int, records: dict[str, Any]) -> None:
        if self.cache.folder is None:
            return
        if not self.steps and step > 0 and (earlier := self.cache.load(SAVED)) is not None:
            before = np.flatnonzero(earlier["time_step"] < step)
            self.steps = earlier.pop("time_step")[before].tolist()
            self.found = [{name: leaf[..., i] for name, leaf in earlier.items()} for i in before]
        self.steps.append(step)
        self.found.append(flat(records["observed"]))
        # At every observation, so that a checkpoint never is ahead of the series.
        stacked = {name: np.stack([one[name] for one in self.found], -1) for name in self.found[0]}
        self.cache.save(SAVED, {"time_step": np.asarray(self.steps), **stacked})


def flat(observed: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return observations with expensive measures on the level of the cheap ones."""
    return {
        **{name: leaf for name, leaf in observed.items() if name != "expensive"},
        **observed.get("expensive", {}),
    }


def first_crossings(config: Any, series: Arrays, time_step: np.ndarray) -> tuple[Arrays, Arrays]:
    """Return by event the first steps beyond the thresholds, and the steps at which watching ended, [decay, seed].

    First steps are NaN if a network never crossed. Both are NaN if it diverged; ends of "delay", if
    it never fitted. "collapsed" is the first such step from "fitted" on, "delay" their difference.
    """
    times, end = np.asarray(time_step, np.float32), float(time_step[-1])
    generalised = np.asarray(first_cross(times, series["test_accuracy"], config.test_threshold))
    fitted = np.asarray(first_cross(times, series["train_accuracy"], config.accuracy_threshold))
    # Features may be close to each other at the start too.
    after = np.where(times >= fitted[..., None], series["rnc1_score"], np.nan)
    collapsed = np.asarray(first_cross(times, after, config.collapse_threshold, "below"))
    first = dict(zip(EVENTS, (fitted, generalised, collapsed, collapsed - fitted), strict=True))
    ends = dict.fromkeys(EVENTS, np.full(fitted.shape, end)) | {"delay": end - fitted}
    diverged = ~np.isfinite(series["train_loss"]).all(-1)
    first, ends = (
        {name: np.where(diverged, np.nan, each[name]) for name in EVENTS} for each in (first, ends)
    )
    return first, ends


def median_of(steps: np.ndarray, ends: np.ndarray) -> Median:
    """Return the median step over the networks with known ends; NaN without any."""
    known = ~np.isnan(ends)
    return (
        median_crossing(steps[known], ends[known])
        if known.any()
        else Median(np.nan, np.nan, np.nan)
    )


def crossings(config: Any, series: Arrays, time_step: np.ndarray) -> tuple[dict[str, Any], str]:
    """Return variables on the steps at which networks crossed the thresholds, and a sentence on slopes.

    `first_crossing` [events, weight_decays, seeds], see `first_crossings`; `median_crossing`
    [events, weight_decays, bounds] with 90 % intervals, over the seeds that did not diverge and for
    "delay" fitted; `diverged` [weight_decays, seeds].
    """
    first, ends = first_crossings(config, series, time_step)
    median = [
        [median_of(*both) for both in zip(first[name], ends[name], strict=True)] for name in EVENTS
    ]
    decays = np.asarray(config.weight_decays, float)
    sentences = []
    for name, words in (("collapsed", "collapse time"), ("delay", "delay after fitting")):
        # A logarithm has no place for 0: neither a decay, nor a delay of a network that fitted at
        # the last step.
        kept = (decays[:, None] > 0) & (ends[name] > 0)
        at = np.broadcast_to(decays[:, None], kept.shape)
        try:
            slope = log_slope(first[name][kept].astype(float), at[kept], ends[name][kept])
        except ValueError:
            crossed = f"{np.isfinite(first[name]).sum()} of {first[name].size} networks"
            sentences.append(
                f"{words}: no slope, which takes three crossings at two weight decays, of {crossed}"
            )
            continue
        sentences.append(
            f"{words} goes as (weight decay)^({slope.slope:.2f} \u00b1 {slope.error:.2f})"
        )
    steps = {"units": "steps"}
    variables = {
        "first_crossing": (
            ("events", "weight_decays", "seeds"),
            np.stack(list(first.values())),
            steps,
        ),
        "median_crossing": (("events", "weight_decays", "bounds"), np.array(median), steps),
        "diverged": (("weight_decays", "seeds"), np.isnan(ends["fitted"])),
    }
    return variables, "; ".join(sentences)


def assemble(
    config: Any,
    data: dict[str, Any],
    steps: np.ndarray,
    flat: Arrays,
    margins: Arrays,
    diverged_at: np.ndarray | None,
) -> xarray.Dataset:
    """Return the dataset of flat series [members, time]; `diverged_at` is None for a running sweep."""
    grid, steps = (len(config.weight_decays), len(config.seeds)), np.asarray(steps)
    # Accuracy by argmax of NaN is that of the first class, so it looks plausible.
    finite = np.isfinite(flat["train_loss"])
    if diverged_at is None:  # the first observation that is not finite
        diverged_at = np.where(finite.all(-1), -1, steps[np.argmin(finite, -1)])
    series = {
        name: np.where(finite, values, np.nan).reshape(*grid, -1) for name, values in flat.items()
    }
    crossed, slope = crossings(config, series, steps)
    networks, measured = ("weight_decays", "seeds"), np.isin(steps, config.information_steps())
    variables: dict[str, Any] = {
        "diverged_at": (networks, np.asarray(diverged_at).reshape(grid)),
        **crossed,
    }
    for name, values in series.items():
        expensive = name.startswith(("nhsic", "mi_"))
        axis, kept = (
            ("information_step", values[..., measured]) if expensive else ("time_step", values)
        )
        variables[name] = (
            (*networks, axis),
            kept,
            {"units": "nats"} if name.startswith("mi_") else {},
        )
    coords = {
        "weight_decays": list(config.weight_decays),
        "seeds": list(config.seeds),
        "time_step": ("time_step", steps, {"units": "steps"}),
        "information_step": ("information_step", steps[measured], {"units": "steps"}),
        "events": list(EVENTS),
        "bounds": ["median", "low", "high"],
    }
    if margins:
        axes = ("classes", "splits", *networks, "images")
        for kind, dims in (("margin", axes), ("plane", (*axes, "coordinates"))):
            values = padded(
                [margins[f"{kind}_{label}_{split}"] for label in config.classes for split in SPLITS]
            )
            values[:, diverged_at >= 0] = np.nan
            variables[kind] = (
                dims,
                values.reshape(len(config.classes), len(SPLITS), *grid, *values.shape[2:]),
            )
        boundary = np.where(diverged_at < 0, margins["plane_boundary"], np.nan)
        variables["plane_boundary"] = (networks, boundary.reshape(grid))
        coords |= {"classes": list(config.classes), "splits": list(SPLITS)}
    return xarray.Dataset(variables, coords, {"data": json.dumps(data), "slope": slope})
