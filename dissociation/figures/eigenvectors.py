"""Figure `eigenvectors`: what bilinear networks of several sizes and seeds see, from their weights alone.

Every class of a bilinear network is a quadratic form of the image, whose eigenvectors are its features. Do networks
of other seeds and sizes have the same ones, and how many of them carry the classification?
"""

import dataclasses
import os
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import check_count, check_distinct, check_non_negative, fail
from dissociation.bilinear._forms import decompose
from dissociation.data._datasets import Dataset
from dissociation.figures import _eigenvector_drawing as drawing
from dissociation.figures._artifacts import Parts, identity_of
from dissociation.figures._eigenvector_drawing import draw as draw
from dissociation.figures._eigenvector_measures import (
    ORDERS,
    compared_pairs,
    details,
    intervals,
    leading_components,
    masking,
    pooled,
    similarities,
    top_similarity,
    truncations,
)
from dissociation.figures._members import DataName, check_source
from dissociation.figures._members import source as source
from dissociation.figures._seeds import cell, check_some_left, masked_part, named_diverged, stand_ins
from dissociation.plotting._axes import summarise
from dissociation.recipes._bilinear import train_bilinear
from dissociation.training._bmap import bmap
from dissociation.training._callbacks import Progress
from dissociation.training._members import take
from dissociation.training._progress import MeterFactory

__all__ = ["Config", "compute", "draw"]

STEM = "eigenvectors"
SHOWS = "Eigenvectors of bilinear networks, compared across seeds and sizes."

AXES = {
    "top": ("sizes", "sizes"),
    "values": ("components",),
    "leading": ("ends", "ranks", "pixels"),
    "image": ("pixels",),
    "contributions": ("components",),
    "vectors": ("components", "pixels"),
    "component_values": ("components",),
    "mask": ("pixels",),
    "mask_accuracy": ("signs", "norms"),
    "mask_share": ("signs", "norms"),
    "random_accuracy": ("norms",),
    "train": ("seeds", "epochs"),
    "validation": ("seeds", "epochs"),
    "similarity": ("compared", "classes", "ranks"),
    "error": ("seeds", "components"),
    "pairs": ("sides", "compared"),
    "full_error": ("seeds",),
    "interval": ("kinds", "bounds", "ranks"),
    "diverged_at": ("seeds",),
    "radii": ("images",),
    "sizes": ("sizes",),
    "norms": ("norms",),
    "bounds": ("bounds",),
    "ends": ("ends",),
    "kinds": ("kinds",),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """The networks, and what is compared."""

    data: DataName = "glyphs"
    """Data set, by its name in `_datasets.SOURCES`."""
    sizes: tuple[int, ...] = (30, 50, 100, 300)
    """Hidden sizes."""
    reference: int = 300
    """The size that all are compared with; one of the sizes."""
    num_seeds: int = 5
    """Networks of each size."""
    large: int = 500
    """Sizes from here on ..."""
    num_large_seeds: int = 3
    """... have this many networks."""
    num_epochs: int = 100
    """Passes over the training images."""
    batch_size: int = 2048
    """Images in a batch."""
    weight_decay: float = 1.0
    """AdamW's."""
    noise: float = 0.4
    """Standard deviation of the noise on training images."""
    num_ranks: int = 20
    """Leading components that are compared."""
    num_components: int = 30
    """Most components per class in truncations."""
    digit: int = 5
    """The class whose spectrum is drawn."""
    mask_norms: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    """Euclidean norms of the masks added to test images."""
    num_certified: int = 100
    """Test images whose distance to another class is computed, for the reference size's first network."""
    num_train: int | None = None
    """Training images; all by default."""
    num_test: int | None = None
    """Test images; all by default."""

    def __post_init__(self):
        check_source(self)
        check_distinct("sizes", self.sizes)
        for size in self.sizes:
            check_count("sizes", size, minimum=1)
        for name in ("large", "num_epochs", "batch_size", "num_ranks", "num_components", "num_certified"):
            check_count(name, getattr(self, name), minimum=1)
        check_non_negative("weight_decay", self.weight_decay)
        check_non_negative("noise", self.noise)
        check_non_negative("mask_norms", np.asarray(self.mask_norms))
        if not 0 <= check_count("digit", self.digit) <= 9:
            fail("digit", "be a digit from 0 to 9", self.digit)
        if self.reference not in self.sizes:
            fail("reference", f"be one of the sizes {self.sizes}", self.reference)
        for name in ("num_seeds", "num_large_seeds"):
            check_count(name, getattr(self, name), minimum=2)

    def seeds(self, size: int) -> int:
        """Networks of a size."""
        return self.num_large_seeds if size >= self.large else self.num_seeds

    def quick(self) -> "Config":
        """A small run that shows that everything works: no science."""
        small = {"sizes": (12, 24), "reference": 24, "num_seeds": 3, "num_epochs": 10, "batch_size": 100}
        few = {"num_ranks": 5, "num_components": 10, "num_certified": 10, "num_train": 1000, "num_test": 200}
        return dataclasses.replace(self, **small, **few)


class Results(NamedTuple):
    """Everything the figure shows; dictionaries by size.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        history: "train_loss", "train_accuracy", "validation_loss", "validation_accuracy", [seeds, epochs + 1] each.
        similarity: Per measure, with networks of the reference size: [pairs, classes, ranks] (forms: one rank).
        intervals: Mean over pairs and classes with ends, see `_eigenvector_measures.intervals`, [2, 3, ranks]: by
            magnitude, and within the reference size "positive" and "negative" too.
        pairs: First and second member of every pair, [2, pairs].
        top: Mean similarity of the leading component between all sizes, [sizes, sizes].
        with_self: The reference size's with every network also compared with itself, as published.
        error: Per order, test error from the leading 0, 1, ... components, [seeds, components + 1].
        full_error: Test error of the whole networks, [seeds].
        values: Eigenvalues of the first network of the reference size for one class, [components].
        leading: Its three most positive and three most negative eigenvectors, most extreme first, [2, 3, pixels].
        explained: One test image of that class ("image"), and its components' contributions to the class's logit
            ("contributions"), their eigenvectors ("vectors") and values ("component_values"), the largest first.
        radii: Distance to the nearest image of another class, by components kept (0 stands for all): [images].
        masks: See `_eigenvector_measures.masking`.
        diverged_at: The step at which a network diverged, or -1: [seeds]. Its numbers, and those of its pairs, are NaN.
        seconds: Wall time of every part.
        member: One of the networks, as a report shows it; None for results of another making.
    """

    config: Config
    data: dict[str, Any]
    history: dict[int, dict[str, np.ndarray]]
    similarity: dict[int, dict[str, np.ndarray]]
    intervals: dict[int, dict[str, np.ndarray]]
    pairs: dict[int, np.ndarray]
    top: np.ndarray
    with_self: float
    error: dict[int, dict[str, np.ndarray]]
    full_error: dict[int, np.ndarray]
    values: np.ndarray
    leading: np.ndarray
    explained: dict[str, np.ndarray]
    radii: dict[int, np.ndarray]
    masks: dict[str, np.ndarray]
    diverged_at: dict[int, np.ndarray]
    seconds: dict[str, float]
    member: Any = None


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains, decomposes and compares; see `figures.Figure.compute`."""
    data = source(config) if dataset is None else dataset
    with Parts(folder, identity_of(config, key, data)) as parts:
        return _computed(config, key, data, parts, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts, progress: str | MeterFactory | None) -> Results:
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    history: dict[int, dict[str, np.ndarray]] = {}
    error: dict[int, dict[str, np.ndarray]] = {}
    full_error, leading, forms = {}, {}, {}
    reference: Any = ()
    diverged_at, alive = {}, {}
    for size in config.sizes:
        settings = {name: getattr(config, name) for name in ("num_epochs", "batch_size", "weight_decay", "noise")}
        settings["num_seeds"] = config.seeds(size)
        trained = train_bilinear(
            data,
            size,
            key=jax.random.fold_in(key, size),
            callbacks=[Progress(progress)],
            checkpoint=parts.path(f"size_{size}.ckpt"),
            **settings,
        )
        parts.seconds[f"training size {size}"] = trained.seconds
        history[size] = _finite_history(trained.history.observed)
        diverged_at[size] = trained.diverged_at
        alive[size] = check_some_left(trained.diverged_at, f"networks of size {size}")
        models = stand_ins(trained.models, alive[size])
        run = bmap(decompose, batch_size=1)
        spectra = run(models)
        forms[size] = spectra
        leading[size] = leading_components(spectra, min(config.num_ranks, spectra.values.shape[2]))
        job = partial(truncations, config.num_components, spectra, images, labels)
        part = masked_part(parts, f"truncation_{size}", alive[size], job)
        error[size], full_error[size] = {order: part[order] for order in ORDERS}, part["full"]
        if size == config.reference:
            reference = take((models, spectra), 0)
    similarity, pairs = {}, {}
    for size in config.sizes:
        pairs[size] = compared_pairs(alive, size, config.reference)
        both = alive[size][pairs[size][0]] & alive[config.reference][pairs[size][1]]
        job = partial(similarities, leading, forms, size, config.reference, pairs[size])
        similarity[size] = masked_part(parts, f"similarity_{size}", both, job)
    overlap = pooled(similarity[config.reference]["magnitude"])[0]
    count = int(alive[config.reference].sum())
    part = parts.get("details", partial(details, config, *reference, images, labels))
    return Results(
        config=config,
        data={"name": data.name, "num_train": len(data.train_images), "num_test": len(data.test_images)},
        history=history,
        similarity=similarity,
        intervals={size: _intervals(config, size, similarity[size], pairs[size], alive) for size in config.sizes},
        pairs=pairs,
        top=parts.get("top", partial(top_similarity, leading, alive))["top"],
        # Pairs i <= j: n (n - 1) / 2 true ones and n of a network with itself.
        with_self=float((overlap * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)),
        error=error,
        full_error=full_error,
        values=part["values"],
        leading=part["leading"],
        explained={name: part[name] for name in ("image", "contributions", "vectors", "component_values")},
        radii={int(name.removeprefix("radii_")): array for name, array in part.items() if name.startswith("radii_")},
        masks=parts.get("masks", partial(masking, config, *reference, images, labels, key=jax.random.fold_in(key, 0))),
        diverged_at=diverged_at,
        seconds=parts.seconds,
        member=reference[0],
    )


def _intervals(
    config: Config, size: int, similarity: dict[str, np.ndarray], pairs: np.ndarray, alive: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    same = size == config.reference
    names = ("magnitude", "positive", "negative") if same else ("magnitude",)
    other = None if same else alive[config.reference]
    return {by: intervals(similarity[by], pairs, alive[size], other) for by in names}


def _finite_history(observed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """NaN from where a network diverged: its accuracy would be that of the first class."""
    finite = np.isfinite(observed["train_loss"]) & np.isfinite(observed["validation_loss"])
    return {name: np.where(finite, values, np.nan) for name, values in observed.items()}


def components_needed(results: Results, order: str = "magnitude", drop: float = 1e-3) -> dict[int, float]:
    """By size, the least number of components per class that costs less than `drop` of accuracy, mean over seeds.

    Infinite where no number up to `num_components` does.
    """
    needed = {}
    for size, errors in results.error.items():
        lost = summarise(errors[order] - results.full_error[size][:, None]).mean
        enough = np.flatnonzero(lost < drop)
        needed[size] = float(enough[0]) if len(enough) else np.inf
    return needed


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    flat = {"top": results.top, "values": results.values, "leading": results.leading, **results.explained}
    flat |= results.masks
    for size in results.config.sizes:
        flat |= {f"{name}_{size}": part for name, part in results.history[size].items()}
        flat |= {f"similarity_{name}_{size}": part for name, part in results.similarity[size].items()}
        flat |= {f"error_{name}_{size}": part for name, part in results.error[size].items()}
        flat |= {f"interval_{name}_{size}": part for name, part in results.intervals[size].items()}
        flat |= {f"pairs_{size}": results.pairs[size], f"full_error_{size}": results.full_error[size]}
        flat |= {f"diverged_at_{size}": results.diverged_at[size]}
    flat |= {"sizes": np.asarray(results.config.sizes), "norms": np.asarray(results.config.mask_norms)}
    flat |= {"bounds": np.asarray(("mean", "low", "high")), "ends": np.asarray(("positive", "negative"))}
    flat |= {"kinds": np.asarray(("members", "pairs"))}
    return flat | {f"radii_{kept}": part for kept, part in results.radii.items()}


def describe(results: Results) -> dict[str, Any]:
    """Return the settings and numbers for the JSON beside the figure."""
    return {
        "figure": STEM,
        "config": results.config,
        "data": results.data,
        "similarity of the leading component with every network compared with itself too": results.with_self,
        "components per class that cost less than 0.1 %": {
            order: components_needed(results, order) for order in ORDERS
        },
    }


def families(results: Results) -> dict[str, Any]:
    """Return the endings of array names, by the axes that they make; see `figures`."""
    config = results.config
    first = config.sizes[0]
    kinds = {"similarity": results.similarity, "interval": results.intervals, "error": results.error}
    ends = [f"{kind}_{name}" for kind, by_size in kinds.items() for name in by_size[first]]
    return dict.fromkeys(
        (*results.history[first], *ends, "pairs", "full_error", "diverged_at"), {"sizes": config.sizes}
    )


def caption(results: Results) -> str:
    """See `figures.Figure.caption`."""
    return f"{drawing.caption(results)} Data: {headline(results)}."


def headline(results: Results) -> str:
    """Return a line that names the data and the size of the run."""
    sizes = f"{results.data['num_train']} training and {results.data['num_test']} test images"
    names = [f"size {size} seed {i}" for size, steps in results.diverged_at.items() for i in range(len(steps))]
    gone = named_diverged(names, np.concatenate(list(results.diverged_at.values())))
    return (
        f"{results.data['name']}: {sizes}, {results.config.num_epochs} epochs; similarities with size "
        f"{results.config.reference}, pairs of different networks only{gone}"
    )


def table(results: Results) -> list[list[str]]:
    """A header and a row per size: accuracy, similarity of some ranks in three orders, components needed."""
    shown = [rank for rank in (1, 5, 20) if rank <= results.config.num_ranks]
    rows = [["size", "seeds", "accuracy"]]
    rows[0] += [f"rank {rank}, {by}" for by in ("magnitude", "positive", "negative") for rank in shown]
    rows[0] += ["matched", "form", "needed", "needed, by contribution"]
    needed = [components_needed(results, order) for order in ORDERS]
    for size in results.config.sizes:
        accuracy = 100 * (1 - results.full_error[size])
        row = [str(size), str(len(accuracy)), cell(accuracy, unit=" %")]
        for by in ("magnitude", "positive", "negative"):
            means = pooled(results.similarity[size][by])
            row += [f"{means[rank - 1]:.3f}" if rank <= len(means) else "" for rank in shown]
        row += [f"{pooled(results.similarity[size][measure]).mean():.3f}" for measure in ("matched", "form")]
        rows.append(row + [f"{found[size]:g}" for found in needed])
    return rows
