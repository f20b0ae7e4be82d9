"""Figure `eigenvectors`: features of bilinear networks of several sizes and seeds, from their weights alone.

Every class of a bilinear network is a quadratic form of the image, whose eigenvectors are its features. The figure
compares them between seeds and sizes, and counts those that the classification needs.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import check_count, check_distinct, check_non_negative, fail
from dissociation.bilinear._forms import decompose
from dissociation.data._datasets import Dataset
from dissociation.figures import _eigenvector_drawing as drawing
from dissociation.figures import _eigenvector_measures as measures
from dissociation.figures._artifacts import AnyMeter, Folder, Parts
from dissociation.figures._eigenvector_drawing import draw
from dissociation.figures._eigenvector_measures import ORDERS, pooled
from dissociation.figures._members import DataConfig, check_fields, described, run
from dissociation.figures._members import source as source
from dissociation.figures._results import Results
from dissociation.figures._seeds import cell, check_some_left, masked_job, named_diverged, stand_ins
from dissociation.plotting._axes import summarise
from dissociation.recipes._bilinear import train_bilinear
from dissociation.training._bmap import bmap
from dissociation.training._members import take
from dissociation.training._progress import Progress

__all__ = ["Config", "compute", "draw"]

STEM = "eigenvectors"
SHOWS = "Eigenvectors of bilinear networks, compared across seeds and sizes."

AXES = {
    "top": ("sizes", "sizes"),  # mean similarity of the leading component between all sizes
    "values": ("components",),  # eigenvalues of the reference size's first network for `digit`
    "leading": ("ends", "ranks", "pixels"),  # its three most positive and most negative eigenvectors, extreme first
    "image": ("pixels",),  # in `explained`: a test image of that digit,
    "contributions": ("components",),  # the largest contributions of components to its logit,
    "vectors": ("components", "pixels"),  # their eigenvectors,
    "component_values": ("components",),  # and values
    "mask": ("pixels",),  # in `masks`, see `_eigenvector_measures.masking`
    "mask_accuracy": ("signs", "norms"),
    "mask_share": ("signs", "norms"),
    "random_accuracy": ("norms",),
    "train": ("seeds", "epochs"),  # in `history`: loss and accuracy
    "validation": ("seeds", "epochs"),
    "similarity": ("compared", "classes", "ranks"),  # with networks of the reference size, per measure; forms: one rank
    "error": ("seeds", "components"),  # test error from the leading 0, 1, ... components, per order
    "pairs": ("sides", "compared"),  # first and second member of every pair
    "full_error": ("seeds",),  # test error of the whole networks
    "interval": ("kinds", "bounds", "ranks"),  # in `intervals`, see `_eigenvector_measures.intervals`
    "diverged_at": ("seeds",),
    "radii": ("images",),  # distance to the nearest image of another class, per components kept (0: all)
    "sizes": ("sizes",),
    "norms": ("norms",),
    "bounds": ("bounds",),
    "ends": ("ends",),
    "kinds": ("kinds",),
}
"""Axes of the arrays. Results hold dictionaries by size, and in these by measure or order. `with_self` is in addition:
the reference size's entry of `top` with every network also compared with itself, as published."""


@dataclasses.dataclass(frozen=True)
class Config(DataConfig):
    """Settings of the networks and their comparison."""

    sizes: tuple[int, ...] = (30, 50, 100, 300)
    """Hidden sizes."""
    reference: int = 300
    """Size with which all are compared; one of the sizes."""
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
    """Test images with a computed distance to another class, for the reference size's first network."""
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
    config: Config, *, key: Array, dataset: Dataset | None = None, folder: Folder = None, progress: AnyMeter = None
) -> Results:
    """Train, decompose and compare; see `figures.Figure.compute`."""
    return run(_computed, config, key, dataset, folder, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts) -> Results:
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels.argmax(1))
    history, error, full_error, leading = {}, {}, {}, {}
    forms, diverged_at, alive = {}, {}, {}
    reference: Any = ()
    for size in config.sizes:
        trained = train_bilinear(
            data,
            size,
            key=jax.random.fold_in(key, size),
            num_seeds=config.seeds(size),
            callbacks=[Progress(parts.progress)],
            checkpoint=parts.path(f"size_{size}.ckpt"),
            **{name: getattr(config, name) for name in ("num_epochs", "batch_size", "weight_decay", "noise")},
        )
        parts.seconds[f"training size {size}"] = trained.seconds
        observed = trained.history.observed
        # A diverged network would have the accuracy of the first class.
        finite = np.isfinite(observed["train_loss"]) & np.isfinite(observed["validation_loss"])
        history[size] = {name: np.where(finite, values, np.nan) for name, values in observed.items()}
        diverged_at[size] = trained.diverged_at
        alive[size] = check_some_left(trained.diverged_at, f"networks of size {size}")
        models = stand_ins(trained.models, alive[size])
        spectra = forms[size] = bmap(decompose, batch_size=1)(models)
        leading[size] = measures.leading_components(spectra, min(config.num_ranks, spectra.values.shape[2]))
        job = partial(measures.truncations, config.num_components, spectra, images, labels)
        part = parts.get(f"truncation_{size}", masked_job(alive[size], job))
        error[size], full_error[size] = {order: part[order] for order in ORDERS}, part["full"]
        if size == config.reference:
            reference = take((models, spectra), 0)
    similarity, pairs = {}, {}
    for size in config.sizes:
        pairs[size] = measures.compared_pairs(alive, size, config.reference)
        both = alive[size][pairs[size][0]] & alive[config.reference][pairs[size][1]]
        job = partial(measures.similarities, leading, forms, size, config.reference, pairs[size])
        similarity[size] = parts.get(f"similarity_{size}", masked_job(both, job))
    overlap = pooled(similarity[config.reference]["magnitude"])[0]
    count = int(alive[config.reference].sum())
    part = parts.get("details", partial(measures.details, config, *reference, images, labels))
    return Results(
        config=config,
        data=described(data),
        history=history,
        similarity=similarity,
        intervals={size: _intervals(config, size, similarity[size], pairs[size], alive) for size in config.sizes},
        pairs=pairs,
        top=parts.get("top", partial(measures.top_similarity, leading, alive))["top"],
        # Pairs i <= j: n (n - 1) / 2 true ones and n of a network with itself.
        with_self=float((overlap * (count - 1) / 2 + 1) / ((count - 1) / 2 + 1)),
        error=error,
        full_error=full_error,
        values=part["values"],
        leading=part["leading"],
        explained={name: part[name] for name in ("image", "contributions", "vectors", "component_values")},
        radii={int(name.removeprefix("radii_")): array for name, array in part.items() if name.startswith("radii_")},
        masks=parts.get(
            "masks", partial(measures.masking, config, *reference, images, labels, key=jax.random.fold_in(key, 0))
        ),
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
    return {by: measures.intervals(similarity[by], pairs, alive[size], other) for by in names}


def components_needed(results: Results, order: str = "magnitude", drop: float = 1e-3) -> dict[int, float]:
    """Return by size the least number of components per class that costs less accuracy than `drop`, mean over seeds.

    Infinite if no number up to `num_components` does.
    """
    needed = {}
    for size, errors in results.error.items():
        enough = np.flatnonzero(summarise(errors[order] - results.full_error[size][:, None]).mean < drop)
        needed[size] = float(enough[0]) if len(enough) else np.inf
    return needed


def arrays(results: Results) -> dict[str, np.ndarray]:
    """Return the arrays of the figure by their names in an `.npz` file."""
    flat = {
        "top": results.top,
        "values": results.values,
        "leading": results.leading,
        **results.explained,
        **results.masks,
        "sizes": np.asarray(results.config.sizes),
        "norms": np.asarray(results.config.mask_norms),
        "bounds": np.asarray(("mean", "low", "high")),
        "ends": np.asarray(("positive", "negative")),
        "kinds": np.asarray(("members", "pairs")),
    }
    for size in results.config.sizes:
        flat |= {f"{name}_{size}": part for name, part in results.history[size].items()}
        flat |= {f"similarity_{name}_{size}": part for name, part in results.similarity[size].items()}
        flat |= {f"error_{name}_{size}": part for name, part in results.error[size].items()}
        flat |= {f"interval_{name}_{size}": part for name, part in results.intervals[size].items()}
        flat |= {f"pairs_{size}": results.pairs[size], f"full_error_{size}": results.full_error[size]}
        flat |= {f"diverged_at_{size}": results.diverged_at[size]}
    return flat | {f"radii_{kept}": part for kept, part in results.radii.items()}


def describe(results: Results) -> dict[str, Any]:
    """Return settings and numbers for the JSON beside the figure."""
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
    """Return the ends of array names, by the axes that they make."""
    config = results.config
    first = config.sizes[0]
    kinds = {"similarity": results.similarity, "interval": results.intervals, "error": results.error}
    ends = [f"{kind}_{name}" for kind, by_size in kinds.items() for name in by_size[first]]
    return dict.fromkeys(
        (*results.history[first], *ends, "pairs", "full_error", "diverged_at"), {"sizes": config.sizes}
    )


def caption(results: Results) -> str:
    """Return the caption."""
    return f"{drawing.caption(results)} Data: {headline(results)}."


def headline(results: Results) -> str:
    """Return a line with the data and the size of the run."""
    sizes = f"{results.data['num_train']} training and {results.data['num_test']} test images"
    names = [f"size {size} seed {i}" for size, steps in results.diverged_at.items() for i in range(len(steps))]
    gone = named_diverged(names, np.concatenate(list(results.diverged_at.values())))
    return (
        f"{results.data['name']}: {sizes}, {results.config.num_epochs} epochs; similarities with size "
        f"{results.config.reference}, pairs of different networks only{gone}"
    )


def table(results: Results) -> list[list[str]]:
    """Return a header and a row per size: accuracy, similarity of some ranks in three orders, components needed."""
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
