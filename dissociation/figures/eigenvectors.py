"""Figure `eigenvectors`: features of bilinear networks of several sizes and seeds, from their weights alone.

Every class is a quadratic form of the image, whose eigenvectors are its features. The figure
compares them between seeds and sizes, and counts those that the classification needs.
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
    """Test images whose distance to another class is computed, for the reference size's first network."""
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
        return self.num_large_seeds if size >= self.large else self.num_seeds

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, sizes=(12, 24), reference=24, num_seeds=3, num_epochs=10, batch_size=100, num_ranks=5,
            num_components=10, num_certified=10, num_train=1000, num_test=200,
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
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


class _Networks(NamedTuple):
    """Trained networks of a size."""

    models: Any  # stacked; diverged ones are replaced, see `_seeds.stand_ins`
    spectra: Spectrum  # stacked
    alive: np.ndarray  # True for networks that did not diverge, [seeds]
    variables: dict[str, Any]  # of the training and of truncations, by name: axes and array


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    sizes = {
        size: _trained(config, size, jax.random.fold_in(key, size), data, cache)
        for size in config.sizes
    }
    reference = take(sizes[config.reference][:2], 0)
    cache.network = reference[0]
    leading = {
        size: measures.leading_components(own.spectra, config.num_ranks)
        for size, own in sizes.items()
    }
    forms, alive = (
        {size: getattr(own, part) for size, own in sizes.items()} for part in ("spectra", "alive")
    )
    found: dict[int, dict[str, Any]] = {}
    for size, own in sizes.items():
        pairs = measures.compared_pairs(alive, size, config.reference)
        job = partial(measures.similarities, leading, forms, size, config.reference, pairs)
        part = cache.get(f"similarity_{size}", job)
        compared = {
            "similarity": (
                ("measures", "pairs", "classes", "ranks"),
                np.stack([part[name] for name in MEASURES]),
            ),
            "form": (("pairs", "classes"), part["form"][..., 0]),
        }
        compared = without_diverged(
            compared, pairs=alive[size][pairs[0]] & alive[config.reference][pairs[1]]
        )
        others = None if size == config.reference else alive[config.reference]
        intervals = [
            measures.intervals(each, pairs, alive[size], others)
            for each in compared["similarity"][1]
        ]
        found[size] = {
            **own.variables,
            "first": (("pairs",), pairs[0]),
            "second": (("pairs",), pairs[1]),
            **compared,
            "interval": (("measures", "kinds", "bounds", "ranks"), np.stack(intervals)),
        }
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    jobs = {
        "details": partial(measures.details, config, *reference, images, labels),
        "top": partial(measures.top_similarity, leading, alive),
        "masks": partial(
            measures.masking, config, *reference, images, labels, key=jax.random.fold_in(key, 0)
        ),
    }
    details, top, masks = (cache.get(name, job) for name, job in jobs.items())
    overlap, count = (
        pooled(found[config.reference]["similarity"][1][0])[0],
        int(alive[config.reference].sum()),
    )
    # Among pairs i <= j, n (n - 1) / 2 are of different networks, and n of a network with itself,
    # of similarity 1.
    with_self = (overlap * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)
    of_reference, kept = _of_reference(details | masks)
    variables, counted = _padded(found, config.reference)
    whole = {
        "top": (("hidden_sizes", "other_hidden_sizes"), top["top"]),
        "with_self": ((), float(with_self)),
    }
    coords = {
        "hidden_sizes": list(found), "other_hidden_sizes": list(found), "measures": list(MEASURES),
        "orders": list(ORDERS), "kinds": ["members", "pairs"], "bounds": ["mean", "low", "high"],
        "ends": ["positive", "negative"], "kept": kept, "signs": ["mask", "negative"],
        "norms": ("norms", list(config.mask_norms), PIXELS), **counted,
    }  # fmt: skip
    return xarray.Dataset(
        whole | of_reference | variables, coords, {"data": json.dumps(described(data))}
    )


def _trained(config: Config, size: int, key: Array, data: Dataset, cache: Cache) -> _Networks:
    trained = train_bilinear(
        data,
        size,
        key=key,
        num_seeds=config.seeds(size),
        callbacks=[Progress(cache.progress)],
        checkpoint=cache.path(f"size_{size}.ckpt"),
        **{
            name: getattr(config, name)
            for name in ("num_epochs", "batch_size", "weight_decay", "noise")
        },
    )
    cache.seconds[f"training size {size}"] = trained.seconds
    alive = check_some_left(trained.diverged_at, f"networks of size {size}")
    models = stand_ins(trained.models, alive)
    spectra = bmap(decompose, batch_size=1)(models)
    observed = trained.history.observed
    # A diverged network would have the accuracy of the first class.
    finite = np.isfinite(observed["train_loss"]) & np.isfinite(observed["validation_loss"])
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    job = partial(measures.truncations, config.num_components, spectra, images, labels)
    part = cache.get(f"truncation_{size}", job)
    errors = {
        "full_error": (("seeds",), part["full"]),
        "error": (("orders", "seeds", "components"), np.stack([part[order] for order in ORDERS])),
    }
    variables = {
        name: (("seeds", "epochs"), np.where(finite, values, np.nan))
        for name, values in observed.items()
    }
    variables |= {
        "diverged_at": (("seeds",), trained.diverged_at),
        **without_diverged(errors, seeds=alive),
    }
    return _Networks(models, spectra, alive, variables)


def _of_reference(found: Arrays) -> tuple[dict[str, Any], list[str]]:
    """Return variables of one network from `measures.details` and `measures.masking`, and numbers of components."""
    kept = sorted(int(name.removeprefix("radii_")) for name in found if name.startswith("radii_"))
    kept = [*kept[1:], 0]  # 0 stands for all components
    variables = {
        "eigenvalues": ("value_ranks", found["values"]),
        "leading": (("ends", "end_ranks", "pixels"), found["leading"]),
        "image": ("pixels", found["image"], PIXELS),
        "contributions": ("explaining", found["contributions"]),
        "vectors": (("explaining", "pixels"), found["vectors"]),
        "component_values": ("explaining", found["component_values"]),
        "radii": (
            ("kept", "images"),
            np.stack([found[f"radii_{components}"] for components in kept]),
            PIXELS,
        ),
        "mask": ("pixels", found["mask"]),
        "mask_accuracy": (("signs", "norms"), found["mask_accuracy"]),
        "mask_share": (("signs", "norms"), found["mask_share"]),
        "random_accuracy": ("norms", found["random_accuracy"]),
    }
    return variables, [str(components) if components else "all" for components in kept]


def _padded(
    found: dict[int, dict[str, Any]], reference: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return variables of all sizes, padded with NaN or -1, and coordinates with lengths of axes."""
    variables, lengths = {}, {}
    for name, (dims, like) in found[reference].items():
        arrays = [own[name][1] for own in found.values()]
        fill = -1 if np.issubdtype(like.dtype, np.integer) else np.nan
        variables[name] = (("hidden_sizes", *dims), padded(arrays, fill))
        lengths |= {
            axis: [array.shape[place] for array in arrays] for place, axis in enumerate(dims)
        }
    coords = {}
    for axis in ("seeds", "epochs", "components", "pairs", "ranks"):
        if axis in PADDED:
            coords[f"{axis}_length"] = ("hidden_sizes", lengths[axis])
        if axis != "pairs":
            coords[axis] = np.arange(max(lengths[axis])) + (axis == "ranks")
    return variables, coords
