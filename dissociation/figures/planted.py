"""Figure `planted`: images and patterns in the hidden activity of a network that still does its task.

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
    """Passes over the training images in each planting of an image, up to twice as many if predictions are changed."""
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
        self.check(**dict.fromkeys(("num_shown", "num_more"), (10, len(data.train_images))))

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        sizes = {
            "width": 128,
            "num_shown": 64,
            "num_more": 128,
            "strip": 64,
            "num_around": 256,
            "num_factors": 32,
        }
        return dataclasses.replace(
            self, num_train=2000, num_test=200, num_passes=12, batch_size=100, **sizes
        )


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
    train_key, few_key, more_key, rsm_key = jax.random.split(key, 4)
    images = jnp.asarray(data.train_images)
    cache.network = model = _trained(config, train_key, data, cache)
    group = neuron_groups(model, images[0])[LAYER]
    sizes = config.num_shown, config.num_more
    plantings = zip(EXTENTS, sizes, (few_key, more_key), strict=True)
    jobs: dict[str, Any] = {
        name: partial(_image, config, model, group, images, size, each, cache, name)
        for name, size, each in plantings
    }
    labels = np.argmax(data.train_labels[: config.num_shown], 1)
    jobs["rsm"] = partial(_rsms, config, model, group, images, labels, rsm_key)
    jobs["marks"] = partial(_marks, config, model, group, images)
    found = cache.get_all(jobs, "planting")
    few, more = (found[name] for name in EXTENTS)
    rsms, marks = found["rsm"], found["marks"]
    certificates = [
        few["certificate"],
        more["certificate"],
        *rsms["certificate"],
        *marks["certificate"],
    ]
    variables = {
        "image": (("shown", "neurons"), few["image"]),
        "activity": (("stages", "shown", "neurons"), few["activity"]),
        "more_image": (("more_shown", "neurons"), more["image"]),
        "more_activity": (("stages", "more_shown", "neurons"), more["activity"]),
        "correlation": (("extents", "stages"), np.stack([few["correlation"], more["correlation"]])),
        "along": (("extents", "passes"), padded([few["along"], more["along"]])),
        "changed": (("extents", "passes"), padded([few["changed"] * 1.0, more["changed"] * 1.0])),
        "kept": ("extents", np.stack([few["kept"], more["kept"]])),
        "rsm": (("patterns", "versions", "shown", "others"), rsms["rsm"]),
        "agreement": (("patterns", "versions"), rsms["agreement"]),
        "strip": (("shown", "strip_neurons"), marks["strip"]),
        "whole": (("shown", "whole_neurons"), marks["whole"]),
        "mark_correlation": ("marks", marks["correlation"]),
        "mark_optimum": ("marks", marks["optimum"]),
        "rdm": (("states", "shown", "others"), marks["rdm"]),
        "train_error": ((), _error(model, images, jnp.asarray(data.train_labels))),
        **{
            name: ("plantings", np.array(values))
            for name, *values in zip(Certificate._fields, *certificates, strict=True)
        },
    }
    coords = {
        "stages": ["trained", "planted", "best without constraint"], "extents": list(EXTENTS),
        "patterns": list(PATTERNS), "versions": ["wanted", "trained", "planted"], "marks": list(MARKS),
        "states": ["trained", *MARKS], "plantings": [*EXTENTS, *PATTERNS, *MARKS],
        "passes": np.arange(max(len(few["along"]), len(more["along"]))),
    }  # fmt: skip
    return xarray.Dataset(variables, coords, {"data": json.dumps(members.described(data))})


def _trained(config: Config, key: Array, data: Dataset, cache: Cache) -> eqx.nn.MLP:
    """Return a trained network with one hidden layer."""
    model_key, order_key = jax.random.split(key)
    sizes = data.train_images.shape[1], data.train_labels.shape[1], config.width

    def start(key: Array) -> eqx.nn.MLP:
        return eqx.nn.MLP(*sizes, depth=1, key=key)

    found = fit(
        eqx.filter_vmap(start)(model_key[None]),
        make_step(cross_entropy, optax.adam(1e-3)),
        Epochs((data.train_images, data.train_labels), min(128, len(data.train_images))),
        num_epochs=config.num_epochs,
        key=order_key,
        callbacks=[Progress(cache.progress)],
        checkpoint=cache.path("training.ckpt"),
    )
    return take(found.models, 0)


def face(rows: int, columns: int) -> np.ndarray:
    """Return the image of a smiling face, ones on zeros."""
    down, across = np.linspace(-1, 1, rows)[:, None], np.linspace(-1, 1, columns)[None]
    radius = np.hypot(down, across)
    eyes = np.hypot((down + 0.25) / 1.4, np.abs(across) - 0.28) < 0.12
    mouth = (radius > 0.38) & (radius < 0.52) & (down > 0.12)
    return ((radius < 0.76) & ~eyes & ~mouth).astype(np.float32)


def _image(
    config: Config,
    model: Any,
    group: NeuronGroup,
    images: Array,
    size: int,
    key: Array,
    cache: Cache,
    name: str,
) -> dict[str, Any]:
    """Return the activity of the first images before and after an image is planted, and its numbers."""
    image = face(size, config.width)
    options = {
        "num_passes": config.num_passes,
        "batch_size": config.batch_size,
        "learning_rate": config.learning_rate,
    }
    found = plant_activity(
        group, model, images, image, **options,
        key=key, checkpoint=cache.path(f"{name.replace(' ', '_')}.ckpt"), progress=cache.progress,
    )  # fmt: skip
    numbers = {
        field: getattr(found, field)
        for field in ("activity", "correlation", "along", "changed", "kept")
    }
    return numbers | {"image": image, "certificate": _certificate(model, found.model, images)}


def _certificate(model: Any, rewritten: Any, images: Array) -> np.ndarray:
    return np.array([float(value) for value in certify(model, rewritten, images)])


@eqx.filter_jit
def _activity(model: Any, images: Array) -> Array:
    return representations(model, images)[LAYER]


def _error(model: Any, images: Array, labels: Array) -> float:
    return float(error_rate(jax.lax.map(model, images, batch_size=min(1000, len(images))), labels))


def _correlation(one: Any, other: Any) -> float:
    return float(np.corrcoef(np.ravel(one), np.ravel(other))[0, 1])


def _rsms(
    config: Config, model: Any, group: NeuronGroup, images: Array, labels: np.ndarray, key: Array
) -> dict[str, Any]:
    """Return matrices of activities, wanted, trained and planted, for two patterns."""
    shown, keys = images[: config.num_shown], jax.random.split(key, len(PATTERNS) + 1)
    pairs = (
        np.asarray(jax.random.permutation(keys[-1], 10))[labels] // 2
    )  # two random classes share a block
    squares = np.arange(len(shown)) * 8 // len(shown)
    wanted = [pairs[:, None] == pairs[None], ((squares[:, None] + squares[None]) % 2 == 0) + FLOOR]
    off = ~np.eye(len(shown), dtype=bool)
    before = _activity(model, shown)
    rsms, agreement, certificates = [], [], []
    for target, each in zip(np.asarray(wanted, np.float32), keys, strict=False):
        planted = plant_rsm(group, model, shown, target, num_neurons=config.num_factors, key=each)(
            model
        )
        after = _activity(planted, shown)
        three = [target, *(np.asarray(activity @ activity.T) for activity in (before, after))]
        rsms.append(np.stack(three))
        agreement.append([_correlation(one[off], target[off]) for one in three])
        certificates.append(_certificate(model, planted, images))
    return {
        "rsm": np.stack(rsms),
        "agreement": np.array(agreement),
        "certificate": np.stack(certificates),
    }


def _marks(config: Config, model: Any, group: NeuronGroup, images: Array) -> dict[str, Any]:
    """Return activities with an image shown by neurons without effect, as a strip and with the trained ones."""
    shown = images[: config.num_shown]
    mark = face(len(shown), config.strip) * float(jnp.percentile(_activity(model, shown), 99))
    marked = add_phantom(group, model, shown, mark)(model)
    # Trained neurons take the darkest columns of the whole image, of equal ones the first.
    whole = face(len(shown), config.width + config.num_around)
    order = np.argsort(whole.mean(0), kind="stable")
    dark, bright = np.sort(order[: config.width]), np.sort(order[config.width :])
    faint = scale(group, config.gain)(model)
    wide = add_phantom(neuron_groups(faint, shown[0])[LAYER], faint, shown, whole[:, bright])(faint)
    place = np.argsort(np.concatenate([dark, bright]))
    hidden = permute(neuron_groups(wide, shown[0])[LAYER], place)(wide)
    activities = [_activity(one, shown) for one in (model, marked, hidden)]
    strip, all_of_it = activities[1], activities[2]
    best = np.where(np.isin(np.arange(whole.shape[1]), bright)[None], whole, 0)
    return {
        "strip": strip,
        "whole": all_of_it,
        "correlation": np.array(
            [_correlation(strip[:, config.width :], mark), _correlation(all_of_it, whole)]
        ),
        "optimum": np.array([1.0, _correlation(best, whole)]),
        "rdm": np.stack(
            [squareform(np.asarray(rdm(activity, "correlation"))) for activity in activities]
        ),
        "certificate": np.stack([_certificate(model, one, images) for one in (marked, hidden)]),
    }
