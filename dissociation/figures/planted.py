"""Figure `planted`: images and patterns in the hidden activity of a network that does its task.

After figure 5 of Braun, Grant and Saxe (2025). A network with one hidden layer is trained. Its
activity is moved towards an image while all predictions stay, its RSM is given two patterns, and
neurons without effect show an image.
"""

import dataclasses
import json
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray
from jaxtyping import Array
from scipy.spatial.distance import squareform

from dissociation._core.checks import check_positive, fail
from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import padded, run
from dissociation.figures._members import source as source
from dissociation.figures._planted_drawing import caption as caption
from dissociation.figures._planted_drawing import draw
from dissociation.figures._planted_drawing import headline as headline
from dissociation.figures._planted_drawing import table as table
from dissociation.measures._robustness import error_rate
from dissociation.models._representations import representations
from dissociation.recipes._mnist import cross_entropy
from dissociation.rewrites._certificate import Certificate, certify
from dissociation.rewrites._groups import NeuronGroup, neuron_groups
from dissociation.rewrites._growth import add_phantom
from dissociation.rewrites._plant_activity import plant_activity
from dissociation.rewrites._plant_rsm import plant_rsm
from dissociation.rewrites._rewrites import permute, scale
from dissociation.similarity._dissimilarity import rdm
from dissociation.training._fitting import fit
from dissociation.training._members import take
from dissociation.training._progress import Progress
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step

__all__ = ["Config", "compute", "draw"]

STEM = "planted-representations"
SHOWS = "Images and patterns planted in the hidden activity of a network whose predictions stay."

LAYER = "layers[0]"
EXTENTS = "few inputs", "more inputs"
PATTERNS = "blocks", "checkerboard"
MARKS = "strip", "whole"
FLOOR = 0.5
"""Added to the checkerboard of zeros and ones, which is then positive semidefinite."""


@dataclasses.dataclass(frozen=True)
class Config(members.DataConfig):
    """Settings of the network and of plantings."""

    num_train: int | None = None
    """Training images, whose predictions stay; None takes the data set's default."""
    num_test: int | None = None
    """Test images; None takes the data set's default."""
    num_epochs: int = 4
    """Passes of the training before plantings."""
    width: int = 1024
    """Hidden units."""
    num_shown: int = 256
    """Training images, the first ones, whose activity is planted."""
    num_more: int = 1024
    """Training images of a second planting of an image."""
    num_passes: int = 40
    """Passes over training images per planted image, up to twice as many if predictions change."""
    batch_size: int = 1000
    """Images per step of these passes."""
    learning_rate: float = 3e-3
    """Rate of Adam in these passes."""
    num_factors: int = 64
    """Neurons without effect that give an RSM its pattern."""
    strip: int = 256
    """Neurons without effect that show an image beside the trained ones."""
    num_around: int = 2048
    """Neurons without effect that show an image together with the trained ones."""
    gain: float = 0.01
    """Factor on the activities of trained neurons that are part of the image."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_epochs=1, width=(1, 2**16), num_passes=1, batch_size=1, num_factors=1)
        self.check(num_shown=10, num_more=10, strip=10, num_around=10)
        self.check(learning_rate=check_positive, gain=check_positive)
        if self.gain > 1:
            fail("gain", "be at most 1", self.gain)

    def check_data(self, data: Dataset) -> None:
        """Raise if there are fewer training images than are shown."""
        limits = (10, len(data.train_images))
        self.check(num_shown=limits, num_more=limits)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_train=2000, num_test=200, num_passes=12, batch_size=100, width=128,
            num_shown=64, num_more=128, strip=64, num_around=256, num_factors=32,
        )  # fmt: skip


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train and plant; see `figures.Figure.compute`.

    Returns:
        For the image on few inputs, `activity` [stages, shown, neurons] and `image`; on more,
        `more_activity` and `more_image`. By extent (few or more inputs), `correlation` of activity
        and image [extents, stages], and along the passes `along`, and `changed`, the number of
        changed predictions. `rsm` [patterns, versions, shown, others], wanted, trained and planted,
        and `agreement` [patterns, versions], the correlation of entries off the diagonal with the
        wanted ones. `strip` and `whole`, activities with an image of neurons without effect;
        `mark_correlation` of the strip, and of the whole, with the image; `mark_optimum`, the same
        if trained neurons were dark, [marks]; and `rdm` [states, shown, others], 1 minus
        correlation. By planting, the fields of `rewrites.Certificate` on all training images.
        `train_error`, a fraction.
    """
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    """Return the dataset of `compute`."""
    train_key, few_key, more_key, rsm_key = jax.random.split(key, 4)
    images = jnp.asarray(data.train_images)
    model = _trained(config, train_key, data, cache)
    cache.network = model
    group = neuron_groups(model, images[0])[LAYER]

    sizes = (config.num_shown, config.num_more)
    jobs = {}
    for name, size, image_key in zip(EXTENTS, sizes, (few_key, more_key), strict=True):
        jobs[name] = partial(_image, config, model, group, images, size, image_key, cache, name)
    labels = np.argmax(data.train_labels[: config.num_shown], 1)
    jobs["rsm"] = partial(_rsms, config, model, group, images, labels, rsm_key)
    jobs["marks"] = partial(_marks, config, model, group, images)
    few_inputs, more_inputs, rsms, marks = cache.get_all(jobs, "planting").values()

    variables = {}
    variables["image"] = (("shown", "neurons"), few_inputs["image"])
    variables["activity"] = (("stages", "shown", "neurons"), few_inputs["activity"])
    variables["more_image"] = (("more_shown", "neurons"), more_inputs["image"])
    variables["more_activity"] = (("stages", "more_shown", "neurons"), more_inputs["activity"])
    correlation = np.stack([few_inputs["correlation"], more_inputs["correlation"]])
    variables["correlation"] = (("extents", "stages"), correlation)
    variables["along"] = (
        ("extents", "passes"),
        padded([few_inputs["along"], more_inputs["along"]]),
    )
    num_changed = padded([few_inputs["changed"] * 1.0, more_inputs["changed"] * 1.0])
    variables["changed"] = (("extents", "passes"), num_changed)
    variables["kept"] = ("extents", np.stack([few_inputs["kept"], more_inputs["kept"]]))
    variables["rsm"] = (("patterns", "versions", "shown", "others"), rsms["rsm"])
    variables["agreement"] = (("patterns", "versions"), rsms["agreement"])
    variables["strip"] = (("shown", "strip_neurons"), marks["strip"])
    variables["whole"] = (("shown", "whole_neurons"), marks["whole"])
    variables["mark_correlation"] = ("marks", marks["correlation"])
    variables["mark_optimum"] = ("marks", marks["optimum"])
    variables["rdm"] = (("states", "shown", "others"), marks["rdm"])

    batch_size = min(1000, len(images))
    logits = jax.lax.map(model, images, batch_size=batch_size)
    error = error_rate(logits, jnp.asarray(data.train_labels))
    variables["train_error"] = ((), float(error))
    certificates = [few_inputs["certificate"], more_inputs["certificate"]]
    certificates += [*rsms["certificate"], *marks["certificate"]]
    for name, *values in zip(Certificate._fields, *certificates, strict=True):
        variables[name] = ("plantings", np.array(values))

    coords = {
        "stages": ["trained", "planted", "best without constraint"],
        "extents": list(EXTENTS),
        "patterns": list(PATTERNS),
        "versions": ["wanted", "trained", "planted"],
        "marks": list(MARKS),
        "states": ["trained", *MARKS],
        "plantings": [*EXTENTS, *PATTERNS, *MARKS],
        "passes": np.arange(max(len(few_inputs["along"]), len(more_inputs["along"]))),
    }
    return xarray.Dataset(variables, coords, {"data": json.dumps(members.described(data))})


def _trained(config: Config, key: Array, data: Dataset, cache: Cache) -> eqx.nn.MLP:
    """Return a trained network with one hidden layer."""
    model_key, order_key = jax.random.split(key)
    num_inputs = data.train_images.shape[1]
    num_classes = data.train_labels.shape[1]

    def initial(key: Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(num_inputs, num_classes, config.width, depth=1, key=key)

    batch_size = min(128, len(data.train_images))
    trained = fit(
        eqx.filter_vmap(initial)(model_key[None]),
        make_step(cross_entropy, optax.adam(1e-3)),
        Epochs((data.train_images, data.train_labels), batch_size),
        num_epochs=config.num_epochs,
        key=order_key,
        callbacks=[Progress(cache.progress)],
        checkpoint=cache.path("training.ckpt"),
    )
    return take(trained.models, 0)


def face(rows: int, columns: int) -> np.ndarray:
    """Return the image of a smiling face, ones on zeros."""
    down = np.linspace(-1, 1, rows)[:, None]
    across = np.linspace(-1, 1, columns)[None]
    radius = np.hypot(down, across)
    eyes = np.hypot((down + 0.25) / 1.4, np.abs(across) - 0.28) < 0.12
    mouth = (radius > 0.38) & (radius < 0.52) & (down > 0.12)
    is_bright = (radius < 0.76) & ~eyes & ~mouth
    return is_bright.astype(np.float32)


def _image(
    config: Config,
    model: Any,
    group: NeuronGroup,
    images: Array,
    num_images: int,
    key: Array,
    cache: Cache,
    name: str,
) -> dict[str, Any]:
    """Return activities of the first images before and after an image is planted, with numbers."""
    image = face(num_images, config.width)
    planting = plant_activity(
        group, model, images, image, num_passes=config.num_passes, batch_size=config.batch_size,
        learning_rate=config.learning_rate, key=key, progress=cache.progress,
        checkpoint=cache.path(f"{name.replace(' ', '_')}.ckpt"),
    )  # fmt: skip
    numbers = {}
    for field in ("activity", "correlation", "along", "changed", "kept"):
        numbers[field] = getattr(planting, field)
    numbers["image"] = image
    numbers["certificate"] = _certificate(model, planting.model, images)
    return numbers


def _certificate(model: Any, rewritten: Any, images: Array) -> np.ndarray:
    """Return the fields of a certificate."""
    return np.array([float(number) for number in certify(model, rewritten, images)])


@eqx.filter_jit
def _activity(model: Any, images: Array) -> Array:
    """Return the hidden activity of a network."""
    return representations(model, images)[LAYER]


def _correlation(x: Any, y: Any) -> float:
    """Return the correlation of the entries of two arrays."""
    return float(np.corrcoef(np.ravel(x), np.ravel(y))[0, 1])


def _rsms(
    config: Config, model: Any, group: NeuronGroup, images: Array, labels: np.ndarray, key: Array
) -> dict[str, Any]:
    """Return RSMs of activities, wanted, trained and planted, for two patterns."""
    *pattern_keys, block_key = jax.random.split(key, len(PATTERNS) + 1)
    first_images = images[: config.num_shown]
    num_images = len(first_images)
    # Two random classes share a block.
    blocks = np.asarray(jax.random.permutation(block_key, 10))[labels] // 2
    stripes = np.arange(num_images) * 8 // num_images
    is_light = (stripes[:, None] + stripes[None]) % 2 == 0
    patterns = np.asarray([blocks[:, None] == blocks[None], is_light + FLOOR], np.float32)

    is_off_diagonal = ~np.eye(num_images, dtype=bool)
    activity = _activity(model, first_images)
    trained_rsm = np.asarray(activity @ activity.T)
    rsms = []
    agreements = []
    certificates = []
    for pattern, pattern_key in zip(patterns, pattern_keys, strict=True):
        plant = plant_rsm(
            group, model, first_images, pattern, num_neurons=config.num_factors, key=pattern_key
        )
        planted = plant(model)
        activity = _activity(planted, first_images)
        versions = [pattern, trained_rsm, np.asarray(activity @ activity.T)]
        rsms.append(np.stack(versions))
        entries = pattern[is_off_diagonal]
        agreements.append([_correlation(rsm[is_off_diagonal], entries) for rsm in versions])
        certificates.append(_certificate(model, planted, images))
    return {
        "rsm": np.stack(rsms),
        "agreement": np.array(agreements),
        "certificate": np.stack(certificates),
    }


def _marks(config: Config, model: Any, group: NeuronGroup, images: Array) -> dict[str, Any]:
    """Return activities with an image in neurons without effect.

    The image is a strip beside the trained neurons, or includes them.
    """
    first_images = images[: config.num_shown]
    num_images = len(first_images)
    trained_activity = _activity(model, first_images)
    strip_image = face(num_images, config.strip) * float(jnp.percentile(trained_activity, 99))
    with_strip = add_phantom(group, model, first_images, strip_image)(model)
    strip_activity = _activity(with_strip, first_images)

    # Trained neurons take the darkest columns of the whole image, of equal ones the first.
    whole_image = face(num_images, config.width + config.num_around)
    order = np.argsort(whole_image.mean(0), kind="stable")
    dark = np.sort(order[: config.width])
    bright = np.sort(order[config.width :])
    faint = scale(group, config.gain)(model)
    faint_group = neuron_groups(faint, first_images[0])[LAYER]
    wide = add_phantom(faint_group, faint, first_images, whole_image[:, bright])(faint)
    columns = np.argsort(np.concatenate([dark, bright]))
    wide_group = neuron_groups(wide, first_images[0])[LAYER]
    with_whole = permute(wide_group, columns)(wide)
    whole_activity = _activity(with_whole, first_images)

    is_bright = np.isin(np.arange(whole_image.shape[1]), bright)
    best = np.where(is_bright[None], whole_image, 0)
    strip_correlation = _correlation(strip_activity[:, config.width :], strip_image)
    rdms = []
    for activity in (trained_activity, strip_activity, whole_activity):
        distances = rdm(activity, "correlation")
        rdms.append(squareform(np.asarray(distances)))
    certificates = [
        _certificate(model, rewritten, images) for rewritten in (with_strip, with_whole)
    ]
    return {
        "strip": strip_activity,
        "whole": whole_activity,
        "correlation": np.array([strip_correlation, _correlation(whole_activity, whole_image)]),
        "optimum": np.array([1.0, _correlation(best, whole_image)]),
        "rdm": np.stack(rdms),
        "certificate": np.stack(certificates),
    }
