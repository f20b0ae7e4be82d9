"""Figure `eigenvectors`: features of bilinear networks of several sizes and seeds, from their weights alone.

Every class is a quadratic form of the image, whose eigenvectors are its features. The figure compares them between
seeds and sizes, and counts those that the classification needs.
"""

import dataclasses
import json
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import check_count, check_distinct, check_non_negative, fail
from dissociation.bilinear._forms import decompose
from dissociation.data._datasets import Dataset
from dissociation.figures import _eigenvector_drawing as drawing
from dissociation.figures import _eigenvector_measures as measures
from dissociation.figures._cache import AnyMeter, Arrays, Cache, CacheFolder
from dissociation.figures._eigenvector_drawing import draw
from dissociation.figures._eigenvector_measures import MEASURES, ORDERS, PADDED, RANKINGS, of_size, pooled
from dissociation.figures._harness import config_of, padded, run
from dissociation.figures._members import DataConfig, check_fields, described
from dissociation.figures._members import source as source
from dissociation.figures._seeds import cell, check_some_left, masked_job, named_diverged, stand_ins
from dissociation.plotting._axes import summarise
from dissociation.recipes._bilinear import train_bilinear
from dissociation.training._bmap import bmap
from dissociation.training._members import take
from dissociation.training._progress import Progress

if TYPE_CHECKING:
    import xarray

__all__ = ["Config", "compute", "draw"]

STEM = "eigenvectors"
SHOWS = "Eigenvectors of bilinear networks, compared across seeds and sizes."


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
        check_distinct("sizes", self.sizes)
        for size in self.sizes:
            check_count("sizes", size, minimum=1)
        counts = ("large", "num_epochs", "batch_size", "num_ranks", "num_components", "num_certified")
        check_fields(self, check_count, *counts, minimum=1)
        check_fields(self, check_non_negative, "weight_decay", "noise")
        check_non_negative("mask_norms", np.asarray(self.mask_norms))
        if not 0 <= check_count("digit", self.digit) <= 9:
            fail("digit", "be a digit from 0 to 9", self.digit)
        if self.reference not in self.sizes:
            fail("reference", f"be one of the sizes {self.sizes}", self.reference)
        check_fields(self, check_count, "num_seeds", "num_large_seeds", minimum=2)

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
    config: Config, *, key: Array, data: Dataset | None = None, cache: CacheFolder = None, progress: AnyMeter = None
) -> "xarray.Dataset":
    """Train, decompose and compare; see `figures.Figure.compute`.

    Returns:
        By hidden size, seed and epoch: `train_loss`, `train_accuracy`, `validation_loss`, `validation_accuracy`. By
        size and seed: `diverged_at`, the step at which a network diverged, or -1; `full_error`, the test error of the
        whole network; `error` [hidden_sizes, orders, seeds, components], that of the leading 0, 1, ... components.
        By size and pair of different networks, the other one of the reference size: `first` and `second`, the seeds;
        `similarity` [hidden_sizes, measures, pairs, classes, ranks]; `form` [hidden_sizes, pairs, classes], that of
        whole forms; `interval` [hidden_sizes, measures, kinds, bounds, ranks], see `_eigenvector_measures.intervals`.
        Entries that a size lacks are NaN or -1, see `_eigenvector_measures.of_size`. `top` [hidden_sizes,
        other_hidden_sizes] is the mean similarity of the leading component; `with_self` that within the reference size
        with pairs of a network with itself, as published.

        Of the reference size's first network and class `digit`: `eigenvalues` [value_ranks], descending; `leading`
        [ends, end_ranks, pixels], its most positive and negative eigenvectors; of a test `image` [pixels], the largest
        `contributions` of components to the logit, with `vectors` and `component_values` [explaining]; `radii` [kept,
        images], distances to the nearest image of another class, by components kept; `mask` [pixels], with
        `mask_accuracy`, `mask_share` [signs, norms] and `random_accuracy` [norms], see `_eigenvector_measures.masking`.
    """
    return run(_computed, config, key=key, data=source(config, data), cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> "xarray.Dataset":
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    found: dict[int, dict[str, Any]] = {}
    leading, forms, alive = {}, {}, {}
    reference: Any = ()
    for size in config.sizes:
        trained = train_bilinear(
            data,
            size,
            key=jax.random.fold_in(key, size),
            num_seeds=config.seeds(size),
            callbacks=[Progress(cache.progress)],
            checkpoint=cache.path(f"size_{size}.ckpt"),
            **{name: getattr(config, name) for name in ("num_epochs", "batch_size", "weight_decay", "noise")},
        )
        cache.seconds[f"training size {size}"] = trained.seconds
        observed = trained.history.observed
        # A diverged network would have the accuracy of the first class.
        finite = np.isfinite(observed["train_loss"]) & np.isfinite(observed["validation_loss"])
        alive[size] = check_some_left(trained.diverged_at, f"networks of size {size}")
        models = stand_ins(trained.models, alive[size])
        spectra = forms[size] = bmap(decompose, batch_size=1)(models)
        leading[size] = measures.leading_components(spectra, min(config.num_ranks, spectra.values.shape[2]))
        job = partial(measures.truncations, config.num_components, spectra, images, labels)
        part = cache.get(f"truncation_{size}", masked_job(alive[size], job))
        found[size] = {
            **{name: (("seeds", "epochs"), np.where(finite, values, np.nan)) for name, values in observed.items()},
            "diverged_at": (("seeds",), np.asarray(trained.diverged_at)),
            "full_error": (("seeds",), part["full"]),
            "error": (("orders", "seeds", "components"), np.stack([part[order] for order in ORDERS])),
        }
        if size == config.reference:
            reference = take((models, spectra), 0)
    cache.network = reference[0]
    for size in config.sizes:
        first, second = pairs = measures.compared_pairs(alive, size, config.reference)
        both = alive[size][first] & alive[config.reference][second]
        others = None if size == config.reference else alive[config.reference]
        job = partial(measures.similarities, leading, forms, size, config.reference, pairs)
        part = cache.get(f"similarity_{size}", masked_job(both, job))
        found[size] |= {
            "first": (("pairs",), first),
            "second": (("pairs",), second),
            "similarity": (("measures", "pairs", "classes", "ranks"), np.stack([part[name] for name in MEASURES])),
            "form": (("pairs", "classes"), part["form"][..., 0]),
            "interval": (
                ("measures", "kinds", "bounds", "ranks"),
                np.stack([measures.intervals(part[name], pairs, alive[size], others) for name in MEASURES]),
            ),
        }
    jobs = {
        "details": partial(measures.details, config, *reference, images, labels),
        "top": partial(measures.top_similarity, leading, alive),
        "masks": partial(measures.masking, config, *reference, images, labels, key=jax.random.fold_in(key, 0)),
    }
    parts = {name: cache.get(name, job) for name, job in jobs.items()}
    return _dataset(config, data, found, parts, int(alive[config.reference].sum()))


def _dataset(
    config: Config, data: Dataset, found: dict[int, dict[str, Any]], parts: dict[str, Arrays], count: int
) -> "xarray.Dataset":
    """Return the dataset of variables by size and cached arrays, with `count` networks of the reference size."""
    import xarray

    details, masks, pixels = parts["details"], parts["masks"], {"units": "pixel intensity"}
    kept = [int(name.removeprefix("radii_")) for name in details if name.startswith("radii_")]
    kept.sort(key=lambda components: components or np.inf)
    overlap = pooled(found[config.reference]["similarity"][1][0])[0]
    # Among pairs i <= j, n (n - 1) / 2 are of different networks, and n of a network with itself, of similarity 1.
    with_self = (overlap * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)
    variables = {
        "top": (("hidden_sizes", "other_hidden_sizes"), parts["top"]["top"]),
        "with_self": ((), float(with_self)),
        "eigenvalues": ("value_ranks", details["values"]),
        "leading": (("ends", "end_ranks", "pixels"), details["leading"]),
        "image": ("pixels", details["image"], pixels),
        "contributions": ("explaining", details["contributions"]),
        "vectors": (("explaining", "pixels"), details["vectors"]),
        "component_values": ("explaining", details["component_values"]),
        "radii": (("kept", "images"), np.stack([details[f"radii_{components}"] for components in kept]), pixels),
        "mask": ("pixels", masks["mask"]),
        "mask_accuracy": (("signs", "norms"), masks["mask_accuracy"]),
        "mask_share": (("signs", "norms"), masks["mask_share"]),
        "random_accuracy": ("norms", masks["random_accuracy"]),
    }
    coords = {
        "hidden_sizes": list(config.sizes),
        "other_hidden_sizes": list(config.sizes),
        "measures": list(MEASURES),
        "orders": list(ORDERS),
        "kinds": ["members", "pairs"],
        "bounds": ["mean", "low", "high"],
        "ends": ["positive", "negative"],
        "kept": [str(components) if components else "all" for components in kept],
        "signs": ["mask", "negative"],
        "norms": ("norms", list(config.mask_norms), pixels),
    }
    for name, (dims, like) in found[config.reference].items():
        arrays = [own[name][1] for own in found.values()]
        fill = -1 if np.issubdtype(like.dtype, np.integer) else np.nan
        variables[name] = (("hidden_sizes", *dims), padded(arrays, fill))
        lengths = {axis: [array.shape[place] for array in arrays] for place, axis in enumerate(dims)}
        coords |= {f"{axis}_length": ("hidden_sizes", lengths[axis]) for axis in PADDED if axis in lengths}
        coords |= {axis: np.arange(max(lengths[axis])) for axis in ("seeds", "epochs", "components") if axis in lengths}
    coords["ranks"] = np.arange(1, max(coords["ranks_length"][1]) + 1)
    return xarray.Dataset(variables, coords, {"data": json.dumps(described(data))})


def components_needed(dataset: "xarray.Dataset", order: str = "magnitude", drop: float = 1e-3) -> dict[int, float]:
    """Return by size the least number of components per class that costs less accuracy than `drop`, mean over seeds.

    It is infinite if `num_components` are too few.
    """
    added = dataset.error.sel(orders=order) - dataset.full_error
    enough = summarise(added.transpose("seeds", "hidden_sizes", "components").values).mean < drop
    sizes = dataset.hidden_sizes.values.tolist()
    return {size: float(row.argmax()) if row.any() else np.inf for size, row in zip(sizes, enough, strict=True)}


def caption(dataset: "xarray.Dataset") -> str:
    """Return the caption."""
    return f"{drawing.caption(dataset)} Data: {headline(dataset)}."


def headline(dataset: "xarray.Dataset") -> str:
    """Return a line with the data and the size of the run."""
    config, data = config_of(dataset), json.loads(dataset.attrs["data"])
    sizes = f"{data['num_train']} training and {data['num_test']} test images"
    steps = {size: of_size(dataset, size).diverged_at.values for size in config.sizes}
    names = [f"size {size} seed {i}" for size, own in steps.items() for i in range(len(own))]
    gone = named_diverged(names, np.concatenate(list(steps.values())))
    return (
        f"{data['name']}: {sizes}, {config.num_epochs} epochs; similarities with size {config.reference}, "
        f"pairs of different networks only{gone}"
    )


def table(dataset: "xarray.Dataset") -> list[list[str]]:
    """Return a header and a row per size: accuracy, similarity of some ranks in three orders, components needed."""
    shown = [rank for rank in (1, 5, 20) if rank <= config_of(dataset).num_ranks]
    rows = [["size", "seeds", "accuracy", *(f"rank {rank}, {by}" for by in RANKINGS for rank in shown)]]
    rows[0] += ["matched", "form", "needed", "needed, by contribution"]
    needed = [components_needed(dataset, order) for order in ORDERS]
    for size in dataset.hidden_sizes.values.tolist():
        one = of_size(dataset, size)
        accuracy = 100 * (1 - one.full_error.values)
        means = {str(name): pooled(values.values) for name, values in zip(MEASURES, one.similarity, strict=True)}
        row = [str(size), str(len(accuracy)), cell(accuracy, unit=" %")]
        row += [f"{means[by][rank - 1]:.3f}" if rank <= len(means[by]) else "" for by in RANKINGS for rank in shown]
        row += [f"{means['matched'].mean():.3f}", f"{pooled(one.form.values[..., None]).mean():.3f}"]
        rows.append(row + [f"{found[size]:g}" for found in needed])
    return rows
