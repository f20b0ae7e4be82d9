"""What the figure of eigenvectors measures on trained networks: agreement, truncation, explanation, distance."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation.bmap import bmap
from dissociation.checks import check_choice, check_count, check_distinct, check_non_negative, fail
from dissociation.data.datasets import NAMES
from dissociation.figures.members import DataName, check_sizes
from dissociation.members import take
from dissociation.spectral import Spectrum, truncate
from dissociation.spectral.certificate import certified_radius, margins
from dissociation.spectral.forms import (
    adversarial_mask,
    contributions,
    mean_contribution,
    reorder,
    truncated_outputs,
)
from dissociation.spectral.similarity import form_similarity, matched_similarity, member_pairs, rank_similarity

MEASURES = ("magnitude", "positive", "negative", "matched", "form")
"""Similarity of equally ranked components in three orders, of the best matching, and of the whole forms."""

ORDERS = {"magnitude": "by |eigenvalue|", "contribution": "by mean contribution"}
"""The orders in which components are kept."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The networks, and what is compared."""

    data: DataName = "glyphs"
    """Data set, by its name in `data.datasets.SOURCES`."""
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
    """Passes over the training pictures."""
    batch_size: int = 2048
    """Pictures in a batch."""
    weight_decay: float = 1.0
    """AdamW's."""
    noise: float = 0.4
    """Standard deviation of the noise on training pictures."""
    num_ranks: int = 20
    """Leading components that are compared."""
    num_components: int = 30
    """Most components per class in truncations."""
    digit: int = 5
    """The class whose spectrum is drawn."""
    mask_norms: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
    """Euclidean norms of the masks added to test pictures."""
    num_certified: int = 100
    """Test pictures whose distance to another class is computed, for the reference size's first network."""
    num_train: int | None = None
    """Training pictures; all by default."""
    num_test: int | None = None
    """Test pictures; all by default."""

    def __post_init__(self):
        check_choice("data", self.data, NAMES)
        check_sizes(self)
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


def compared_pairs(config: Config, size: int, other: int) -> tuple[np.ndarray, np.ndarray]:
    """First and second members of all pairs of two sizes, no member with itself."""
    if size == other:
        return member_pairs(config.seeds(size))
    return member_pairs(config.seeds(size), config.seeds(other))


@eqx.filter_jit
def leading_components(spectra: Spectrum, count: int) -> dict[str, Spectrum]:
    """The leading components of stacked spectra, in three orders."""

    def one(spectrum: Spectrum) -> dict[str, Spectrum]:
        values = spectrum.values
        orders = {"magnitude": jnp.abs(values), "positive": values, "negative": -values}
        return {by: truncate(reorder(spectrum, importance), count) for by, importance in orders.items()}

    return jax.vmap(one)(spectra)


@eqx.filter_jit
def _each_pair(
    measure: Callable[[Spectrum, Spectrum], Array], first: Spectrum, second: Spectrum, pairs: Array | np.ndarray
) -> Array:
    def one(pair: Array) -> Array:
        return measure(take(first, pair[0]), take(second, pair[1]))

    return jax.lax.map(one, jnp.asarray(pairs.T))


def similarities(
    leading: dict[int, dict[str, Spectrum]], forms: dict[int, Spectrum], size: int, other: int, pairs: np.ndarray
) -> dict[str, Array]:
    """By measure, the similarity of pairs of networks of two sizes: [pairs, classes, ranks], forms of one rank."""
    found = {
        by: _each_pair(rank_similarity, leading[size][by], leading[other][by], pairs)
        for by in ("magnitude", "positive", "negative")
    }
    found["matched"] = _each_pair(_matched, leading[size]["magnitude"], leading[other]["magnitude"], pairs)
    found["form"] = _each_pair(form_similarity, forms[size], forms[other], pairs)[:, :, None]
    return found


def _matched(a: Spectrum, b: Spectrum) -> Array:
    return matched_similarity(a, b, min(a.values.shape[1], b.values.shape[1]))


def top_similarity(
    config: Config, leading: dict[int, dict[str, Spectrum]], alive: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Mean similarity of the leading component between all sizes, "top": [sizes, sizes]; NaN where there is no pair.

    Pairs with a network that diverged, which `alive` says by size, are left out.
    """
    table = np.zeros((len(config.sizes),) * 2)
    first = {size: eqx.filter_jit(jax.vmap(partial(truncate, num_components=1)))(leading[size]["magnitude"])
             for size in config.sizes}  # fmt: skip
    for i, size in enumerate(config.sizes):
        for j, other in enumerate(config.sizes[: i + 1]):
            one, two = first[size], first[other]
            pairs = np.stack(compared_pairs(config, size, other))
            found = np.asarray(_each_pair(rank_similarity, one, two, pairs))
            known = found[alive[size][pairs[0]] & alive[other][pairs[1]]]
            table[i, j] = table[j, i] = known.mean() if known.size else np.nan
    return {"top": table}


def truncations(config: Config, spectra: Spectrum, images: Array, labels: Array) -> dict[str, Array]:
    """Test errors from leading components, in both orders, and from all."""

    def one(spectrum: Spectrum) -> dict[str, Array]:
        def wrong(outputs: Array) -> Array:
            return jnp.mean(jnp.argmax(outputs, -1) != labels.reshape(-1, *(1,) * (outputs.ndim - 2)), 0)

        count = min(config.num_components, spectrum.values.shape[1])
        by_contribution = reorder(spectrum, mean_contribution(spectrum, images))
        return {
            "magnitude": wrong(truncated_outputs(truncate(spectrum, count), images)),
            "contribution": wrong(truncated_outputs(truncate(by_contribution, count), images)),
            "full": wrong(jnp.sum(contributions(spectrum, images), 2)),
        }

    return eqx.filter_jit(bmap(one, batch_size=1))(spectra)


def details(config: Config, model: Any, spectrum: Spectrum, images: Array, labels: Array) -> dict[str, Array]:
    """The spectrum of one class, the explanation of one picture, and certified radii, of one network."""
    order = jnp.argsort(spectrum.values[config.digit])
    vectors = spectrum.vectors[config.digit]
    chosen = images[jnp.argmax(labels == config.digit)]
    parts = contributions(spectrum, chosen[None])[0, config.digit]
    largest = jnp.argsort(-jnp.abs(parts))[:5]
    found = {
        "values": spectrum.values[config.digit][order[::-1]],
        "leading": jnp.stack([vectors[order[::-1][:3]], vectors[order[:3]]]),
        "image": chosen,
        "contributions": parts[largest],
        "vectors": vectors[largest],
        "component_values": spectrum.values[config.digit][largest],
    }
    count = min(config.num_certified, len(images))
    kept = sorted({1, 5, config.num_components} & set(range(spectrum.values.shape[1])))
    for components in (0, *kept):
        forms = margins(truncate(spectrum, components)) if components else margins(model)
        run = eqx.filter_jit(lambda f, x, y: bmap(lambda a, b: certified_radius(f, a, b).radius, batch_size=20)(x, y))
        found[f"radii_{components}"] = run(forms, images[:count], labels[:count])
    return found


def masking(
    config: Config, model: Any, spectrum: Spectrum, images: Array, labels: Array, *, key: Array, against: int = 2
) -> dict[str, Array]:
    """What a mask from the most positive eigenvector of one class costs, added to all test pictures, by its norm.

    Args:
        config: `digit` and `mask_norms`.
        model: One network.
        spectrum: Its decomposition.
        images: Test pictures, [n, pixels].
        labels: Their classes, [n].
        key: Draws ten random masks to compare with.
        against: Leading components of every class that the mask spares. The more, the less is left of the eigenvector
            in a mask of given norm: with 10 nothing that tells (0.6 % at size 300 on MNIST, against 71 % with 2).

    Returns:
        "mask" [pixels]; "mask_accuracy" and "mask_share", the share of pictures taken for the class, of the mask and of
        its negative (an eigenvector has no sign): [2, norms]; "random_accuracy" [norms], mean over random masks.
    """
    mask = adversarial_mask(reorder(spectrum, spectrum.values), config.digit, 0, against=against)
    random = jax.random.normal(key, (10, mask.shape[0]), mask.dtype)
    random = random / jnp.linalg.norm(random, axis=1, keepdims=True)
    norms = jnp.asarray(config.mask_norms, mask.dtype)

    @eqx.filter_jit
    def classes(model: Any, images: Array, masks: Array) -> Array:
        """[masks, norms, n]."""
        steps = masks[:, None] * norms[None, :, None]
        return jax.lax.map(
            lambda step: jnp.argmax(jax.vmap(model)(images + step[None]), 1), steps.reshape(-1, mask.shape[0])
        ).reshape(*steps.shape[:2], -1)

    found, control = (classes(model, images, masks) for masks in (jnp.stack([mask, -mask]), random))
    return {
        "mask": mask,
        "mask_accuracy": jnp.mean(found == labels[None, None], 2),
        "mask_share": jnp.mean(found == config.digit, 2),
        "random_accuracy": jnp.mean(control == labels[None, None], (0, 2)),
    }
