"""Figure `eigenvectors`: features of bilinear networks, from their weights alone.

The networks have several sizes and seeds. Every class is a quadratic form of the image, whose
eigenvectors are its features. The figure compares them between seeds and sizes, and counts those
that the classification needs.
"""

import dataclasses
import json
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array

from dissociation._core.checks import check_non_negative, fail
from dissociation.bilinear._forms import Spectrum, decompose
from dissociation.data._datasets import Dataset
from dissociation.figures import _eigenvector_measures as measures
from dissociation.figures._cache import AnyMeter, Arrays, Cache, CacheFolder
from dissociation.figures._eigenvector_drawing import caption as caption
from dissociation.figures._eigenvector_drawing import components_needed as components_needed
from dissociation.figures._eigenvector_drawing import draw
from dissociation.figures._eigenvector_drawing import headline as headline
from dissociation.figures._eigenvector_drawing import table as table
from dissociation.figures._eigenvector_measures import MEASURES, ORDERS, PADDED, pooled
from dissociation.figures._eigenvector_measures import of_size as of_size
from dissociation.figures._harness import padded, run
from dissociation.figures._members import DataConfig, described
from dissociation.figures._members import source as source
from dissociation.figures._seeds import check_some_left, stand_ins, without_diverged
from dissociation.recipes._bilinear import train_bilinear
from dissociation.training._bmap import bmap
from dissociation.training._members import take
from dissociation.training._progress import Progress

__all__ = ["Config", "compute", "draw"]

STEM = "eigenvectors"
SHOWS = "Eigenvectors of bilinear networks, compared across seeds and sizes."

PIXELS = {"units": "pixel intensity"}


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """Settings of the networks and their comparison."""

    sizes: tuple[int, ...] = (30, 50, 100, 300)
    """Hidden sizes."""
    reference: int = 300
    """Size with which all sizes are compared, one of them."""
    num_seeds: int = 5
    """Networks of each size."""
    large: int = 500
    """Least size with `num_large_seeds` networks."""
    num_large_seeds: int = 3
    """Networks of each size from `large` on."""
    num_epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 2048
    """Images in a batch."""
    weight_decay: float = 1.0
    """Weight decay of AdamW."""
    noise: float = 0.4
    """Standard deviation of the noise on training images."""
    num_ranks: int = 20
    """Leading components that are compared."""
    num_components: int = 30
    """Largest number of components per class in truncations."""
    digit: int = 5
    """Class whose spectrum is drawn."""
    mask_norms: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    """Euclidean norms of the masks added to test images."""
    num_certified: int = 100
    """Test images whose distance to another class is computed, for the reference size's first
    network."""
    num_train: int | None = None
    """Training images; all by default."""
    num_test: int | None = None
    """Test images; all by default."""

    def __post_init__(self):
        super().__post_init__()
        self.check(
            sizes=1,
            large=1,
            num_epochs=1,
            batch_size=1,
            num_ranks=1,
            num_components=1,
            num_certified=1,
        )
        self.check(num_seeds=2, num_large_seeds=2, digit=(0, 9))
        self.check(
            weight_decay=check_non_negative, noise=check_non_negative, mask_norms=check_non_negative
        )
        if self.reference not in self.sizes:
            fail("reference", f"be one of the sizes {self.sizes}", self.reference)

    def seeds(self, size: int) -> int:
        """Return the number of networks of a size."""
        if size >= self.large:
            return self.num_large_seeds
        return self.num_seeds

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, sizes=(12, 24), reference=24, num_seeds=3, num_epochs=10, batch_size=100,
            num_ranks=5, num_components=10, num_certified=10, num_train=1000, num_test=200,
        )  # fmt: skip


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, decompose and compare; see `figures.Figure.compute`.

    Returns:
        By hidden size, seed and epoch: `train_loss`, `train_accuracy`, `validation_loss`,
        `validation_accuracy`. By size and seed: `diverged_at`, the step at which a network
        diverged, or -1; `full_error`, the test error of the whole network; `error` [hidden_sizes,
        orders, seeds, components], that of the leading 0, 1, ... components. By size and pair of
        different networks, the other one of the reference size: `first` and `second`, the seeds;
        `similarity` [hidden_sizes, measures, pairs, classes, ranks]; `form` [hidden_sizes, pairs,
        classes], that of whole forms; `interval` [hidden_sizes, measures, kinds, bounds, ranks],
        see `_eigenvector_measures.intervals`. Entries that a size lacks are NaN or -1, see
        `_eigenvector_measures.of_size`. `top` [hidden_sizes, other_hidden_sizes] is the mean
        similarity of the leading component; `with_self` that within the reference size with pairs
        of a network with itself, as published.

        Of the reference size's first network and class `digit`: `eigenvalues` [value_ranks],
        descending; `leading` [ends, end_ranks, pixels], its most positive and negative
        eigenvectors; of a test `image` [pixels], the largest `contributions` of components to the
        logit, with `vectors` and `component_values` [explaining]; `radii` [kept, images], distances
        to the nearest image of another class, by components kept; `mask` [pixels], with
        `mask_accuracy`, `mask_share` [signs, norms] and `random_accuracy` [norms], see
        `_eigenvector_measures.masking`.
    """
    data = source(config, data)
    return run(_computed, config, key=key, data=data, cache=cache, progress=progress)


class _Networks(NamedTuple):
    """Trained networks of a size."""

    models: Any  # stacked; diverged ones are replaced, see `_seeds.stand_ins`
    spectra: Spectrum  # stacked
    alive: np.ndarray  # True for networks that did not diverge, [seeds]
    variables: dict[str, Any]  # of the training and of truncations, by name: axes and array


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    networks = {}
    for size in config.sizes:
        size_key = jax.random.fold_in(key, size)
        networks[size] = _trained(config, size, size_key, data, cache)
    reference = networks[config.reference]
    model, spectrum = take((reference.models, reference.spectra), 0)
    cache.network = model

    forms = {size: trained.spectra for size, trained in networks.items()}
    alive = {size: trained.alive for size, trained in networks.items()}
    leading = {}
    for size, spectra in forms.items():
        leading[size] = measures.leading_components(spectra, config.num_ranks)
    variables_of_size = {}
    for size, trained in networks.items():
        compared = _compared(size, config.reference, leading, forms, alive, cache)
        variables_of_size[size] = trained.variables | compared

    images = jnp.asarray(data.test_images)
    labels = jnp.asarray(data.test_labels.argmax(1))
    one_network = (config, model, spectrum, images, labels)
    details = cache.get("details", partial(measures.details, *one_network))
    top = cache.get("top", partial(measures.top_similarity, leading, alive))
    masking = partial(measures.masking, *one_network, key=jax.random.fold_in(key, 0))
    masks = cache.get("masks", masking)

    similarity = variables_of_size[config.reference]["similarity"][1]
    overlap = pooled(similarity[0])[0]
    count = int(reference.alive.sum())
    # Among pairs i <= j, n (n - 1) / 2 are of different networks, and n of a network with itself,
    # of similarity 1.
    with_self = (overlap * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)

    of_reference, component_names = _reference_variables(details | masks)
    padded_variables, lengths = _padded(variables_of_size, config.reference)
    variables = {
        "top": (("hidden_sizes", "other_hidden_sizes"), top["top"]),
        "with_self": ((), float(with_self)),
        **of_reference,
        **padded_variables,
    }
    sizes = list(networks)
    coords = {
        "hidden_sizes": sizes,
        "other_hidden_sizes": sizes,
        "measures": list(MEASURES),
        "orders": list(ORDERS),
        "kinds": ["members", "pairs"],
        "bounds": ["mean", "low", "high"],
        "ends": ["positive", "negative"],
        "kept": component_names,
        "signs": ["mask", "negative"],
        "norms": ("norms", list(config.mask_norms), PIXELS),
        **lengths,
    }
    return xarray.Dataset(variables, coords, {"data": json.dumps(described(data))})


def _compared(
    size: int,
    reference: int,
    leading: dict[int, dict[str, Spectrum]],
    forms: dict[int, Spectrum],
    alive: dict[int, np.ndarray],
    cache: Cache,
) -> dict[str, Any]:
    """Return variables of the similarity of a size with the reference size, by name."""
    pairs = measures.compared_pairs(alive, size, reference)
    job = partial(measures.similarities, leading, forms, size, reference, pairs)
    arrays = cache.get(f"similarity_{size}", job)
    similarity = np.stack([arrays[name] for name in MEASURES])
    variables = {
        "similarity": (("measures", "pairs", "classes", "ranks"), similarity),
        "form": (("pairs", "classes"), arrays["form"][..., 0]),
    }
    are_alive = alive[size][pairs[0]] & alive[reference][pairs[1]]
    variables = without_diverged(variables, pairs=are_alive)

    other_alive = None
    if size != reference:
        other_alive = alive[reference]
    intervals = []
    for values in variables["similarity"][1]:
        intervals.append(measures.intervals(values, pairs, alive[size], other_alive))
    return {
        "first": (("pairs",), pairs[0]),
        "second": (("pairs",), pairs[1]),
        **variables,
        "interval": (("measures", "kinds", "bounds", "ranks"), np.stack(intervals)),
    }


def _trained(config: Config, size: int, key: Array, data: Dataset, cache: Cache) -> _Networks:
    names = ("num_epochs", "batch_size", "weight_decay", "noise")
    options = {name: getattr(config, name) for name in names}
    trained = train_bilinear(
        data,
        size,
        key=key,
        num_seeds=config.seeds(size),
        callbacks=[Progress(cache.progress)],
        checkpoint=cache.path(f"size_{size}.ckpt"),
        **options,
    )
    cache.seconds[f"training size {size}"] = trained.seconds
    alive = check_some_left(trained.diverged_at, f"networks of size {size}")
    models = stand_ins(trained.models, alive)
    spectra = bmap(decompose, batch_size=1)(models)

    images = jnp.asarray(data.test_images)
    labels = jnp.asarray(data.test_labels.argmax(1))
    job = partial(measures.truncations, config.num_components, spectra, images, labels)
    arrays = cache.get(f"truncation_{size}", job)
    error = np.stack([arrays[order] for order in ORDERS])
    errors = {
        "full_error": (("seeds",), arrays["full"]),
        "error": (("orders", "seeds", "components"), error),
    }

    observed = trained.history.observed
    # A diverged network would have the accuracy of the first class.
    is_finite = np.isfinite(observed["train_loss"])
    is_finite = is_finite & np.isfinite(observed["validation_loss"])
    variables = {}
    for name, values in observed.items():
        variables[name] = (("seeds", "epochs"), np.where(is_finite, values, np.nan))
    variables["diverged_at"] = (("seeds",), trained.diverged_at)
    variables |= without_diverged(errors, seeds=alive)
    return _Networks(models, spectra, alive, variables)


def _reference_variables(arrays: Arrays) -> tuple[dict[str, Any], list[str]]:
    """Return variables of one network, and labels of numbers of components ("1", "5", "all").

    The arrays are those of `measures.details` and `measures.masking`.
    """
    numbers = [int(name.removeprefix("radii_")) for name in arrays if name.startswith("radii_")]
    zero, *positive = sorted(numbers)
    numbers = [*positive, zero]  # 0 stands for all components
    radii = np.stack([arrays[f"radii_{number}"] for number in numbers])
    variables = {
        "eigenvalues": ("value_ranks", arrays["values"]),
        "leading": (("ends", "end_ranks", "pixels"), arrays["leading"]),
        "image": ("pixels", arrays["image"], PIXELS),
        "contributions": ("explaining", arrays["contributions"]),
        "vectors": (("explaining", "pixels"), arrays["vectors"]),
        "component_values": ("explaining", arrays["component_values"]),
        "radii": (("kept", "images"), radii, PIXELS),
        "mask": ("pixels", arrays["mask"]),
        "mask_accuracy": (("signs", "norms"), arrays["mask_accuracy"]),
        "mask_share": (("signs", "norms"), arrays["mask_share"]),
        "random_accuracy": ("norms", arrays["random_accuracy"]),
    }
    return variables, [*map(str, positive), "all"]


def _padded(
    variables_of_size: dict[int, dict[str, Any]], reference: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return variables of all sizes, padded with NaN or -1, and coordinates with lengths."""
    padded_variables = {}
    lengths = {}
    for name, (dims, like) in variables_of_size[reference].items():
        arrays = [variables[name][1] for variables in variables_of_size.values()]
        fill = np.nan
        if np.issubdtype(like.dtype, np.integer):
            fill = -1
        padded_variables[name] = (("hidden_sizes", *dims), padded(arrays, fill))
        for index, axis in enumerate(dims):
            lengths[axis] = [array.shape[index] for array in arrays]

    coords = {}
    for axis in ("seeds", "epochs", "components", "pairs", "ranks"):
        if axis in PADDED:
            coords[f"{axis}_length"] = ("hidden_sizes", lengths[axis])
        if axis != "pairs":
            coords[axis] = np.arange(max(lengths[axis]))
    coords["ranks"] = coords["ranks"] + 1
    return padded_variables, coords
