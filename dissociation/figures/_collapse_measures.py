"""Measures of the figure `collapse`: steps of observation, information, margins, and stored series."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import platformdirs
from jaxtyping import Array, Float

from dissociation.data._datasets import Dataset
from dissociation.figures._cache import Arrays, Cache, read_part, save_part
from dissociation.measures._coordinates import whiten
from dissociation.measures._hsic import information_plane
from dissociation.measures._margins import class_places, linear_head
from dissociation.measures._nearest import information, label_information
from dissociation.measures._smoothed import smoothed_information
from dissociation.models._representations import representations
from dissociation.recipes._compression import encode, train_compression
from dissociation.recipes._grokking import observation_steps, standardised
from dissociation.training import _checkpoint as checkpoint
from dissociation.training import _distributed as distributed
from dissociation.training._members import after, count, take
from dissociation.training._records import log_spaced_steps

SAVED = "series"
"""Name of the part with the series so far."""


def spread_observations(num_steps: int, number: int) -> np.ndarray:
    """Return `number` of the observed steps, evenly spaced in the logarithm, or all if there are fewer."""
    times = observation_steps(num_steps)
    if number < 2:
        return times[:0] if number == 0 else times[-1:]
    if number >= len(times):
        return times
    finer = number
    while True:  # several wanted steps may be nearest to one observation, so more are wanted until enough differ
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
    feature_noise: float = eqx.field(static=True)  # standard deviation of the noise on whitened features
    num_neighbours: int = eqx.field(static=True)
    smoothing: float = eqx.field(static=True)  # noise of smoothed information over the features' spread
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
        return {**found, **{"mi_zx_smoothed": smoothed.zx, "mi_zy_smoothed": smoothed.zy}}


def compressed(
    train: Array | np.ndarray, images: Array | np.ndarray, *, size: int, num_epochs: int, key: Array
) -> Arrays:
    """Return whitened codes of `images` by an autoencoder of `train`, cached on disk: "codes" [n, size]."""
    identity = {"train": train, "images": images, "key": key, "code": size, "epochs": num_epochs}
    identity["format"] = 2  # to be raised if `train_compression` returns other codes
    digest = checkpoint.fingerprint(identity)
    # Parallel sweeps share the file. Both may compute the same codes, and the later one replaces it.
    path = code_cache() / f"{digest}.npz"
    if all(distributed.all_values(path.exists())):  # processes train together, or none does
        return read_part(path, digest)
    model = train_compression(train, size, key=key, num_epochs=num_epochs)
    codes = {"codes": np.asarray(whiten(encode(model, images)))}
    save_part(path, codes, digest)
    return codes


def code_cache() -> Path:
    """Return the folder of cached codes."""
    return Path(platformdirs.user_cache_dir("dissociation")) / "codes"


def information_measures(config: Any, data: Dataset, codes: Array | np.ndarray) -> Information:
    """Return the expensive measures on the first test images; `config` has the fields of `Information`."""
    images, labels = data.test_images[: len(codes)], data.test_labels[: len(codes)]
    options = {name: getattr(config, name) for name in ("feature_noise", "num_neighbours", "smoothing", "num_smoothed")}
    return Information(standardised(images), jnp.asarray(labels), jnp.asarray(codes), **options)


def margins_of(data: Dataset, models: Any, classes: tuple[int, int], num_train: int) -> dict[str, np.ndarray]:
    """Return signed distances of samples of two classes to the boundary between the classes, in every network.

    "margin_{class}_{train|test}" is [members, samples]; "plane_{class}_{train|test}", coordinates in the plane of the
    two classes' weights, [members, samples, 2]; "plane_boundary", the boundary's place on the first axis, [members].
    "test" are all test images, and the training images after the first `num_train`.
    """
    train = data.train_images[:num_train], data.train_labels[:num_train]
    rest = ([data.train_images[num_train:], data.test_images], [data.train_labels[num_train:], data.test_labels])
    test = tuple(np.concatenate([np.asarray(part) for part in parts]) for parts in rest)

    margins = {}
    each = [take(models, index) for index in range(count(models))]
    for name, (images, labels) in (("train", train), ("test", test)):
        truth = np.asarray(labels).argmax(1)
        for label in classes:
            chosen = standardised(np.asarray(images)[truth == label])
            # Not in a compiled loop over members, in which convolutions are slow on a CPU.
            parts = [_places(model, chosen, *classes) for model in each]
            margin, plane, boundary = (np.stack(part) for part in zip(*parts, strict=True))
            margins |= {f"margin_{label}_{name}": margin, f"plane_{label}_{name}": plane, "plane_boundary": boundary}
    return margins


@eqx.filter_jit
def _places(model: Any, images: Array, first: int, second: int) -> tuple[Array, Array, Array]:
    return class_places(representations(model, images)["features"], *linear_head(model), first, second)


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
    return {**{name: leaf for name, leaf in observed.items() if name != "expensive"}, **observed.get("expensive", {})}
