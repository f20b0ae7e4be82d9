"""Measures of the figure `eigenvectors`: similarity, truncation, explanation, distance."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array

from dissociation._core.keys import named_key
from dissociation.bilinear._certificate import certified_radius, margins
from dissociation.bilinear._forms import (
    Spectrum,
    adversarial_mask,
    contributions,
    mean_contribution,
    reorder,
    truncate,
    truncated_outputs,
)
from dissociation.bilinear._similarity import (
    bootstrap_interval,
    form_similarity,
    matched_similarity,
    member_pairs,
    pair_mean,
    rank_similarity,
    student_interval,
)
from dissociation.plotting._axes import summarise
from dissociation.training._bmap import bmap
from dissociation.training._members import take

RANKINGS = ("magnitude", "positive", "negative")
"""Orders in which components are ranked."""

MEASURES = (*RANKINGS, "matched")
"""Similarities of equally ranked components, and of best matching components among the leading ones by magnitude."""

ORDERS = {"magnitude": "by |eigenvalue|", "contribution": "by mean contribution"}
"""Orders in which components are kept."""


PADDED = ("seeds", "pairs", "ranks", "components")
"""Axes that differ in length between sizes. Coordinates hold the lengths, for example "seeds_length"."""


def of_size(dataset: xarray.Dataset, size: int) -> xarray.Dataset:
    """Return the dataset of one hidden size, without padding."""
    one = dataset.sel(hidden_sizes=size)
    return one.isel({axis: slice(one[f"{axis}_length"].item()) for axis in PADDED})


def compared_pairs(alive: dict[int, np.ndarray], size: int, other: int) -> np.ndarray:
    """Return the first and second members of all pairs of different networks of two sizes, [2, pairs]."""
    one, two = len(alive[size]), len(alive[other])
    return member_pairs(one) if size == other else member_pairs(one, two)


@eqx.filter_jit
def leading_components(spectra: Spectrum, count: int) -> dict[str, Spectrum]:
    """Return up to `count` leading components of stacked spectra, in three orders."""

    def one(spectrum: Spectrum) -> dict[str, Spectrum]:
        values, kept = spectrum.values, min(count, spectrum.values.shape[1])
        orders = dict(zip(RANKINGS, (jnp.abs(values), values, -values), strict=True))
        return {
            by: truncate(reorder(spectrum, importance), kept) for by, importance in orders.items()
        }

    return jax.vmap(one)(spectra)


@eqx.filter_jit
def _each_pair(
    measure: Callable[[Spectrum, Spectrum], Array],
    first: Spectrum,
    second: Spectrum,
    pairs: Array | np.ndarray,
) -> Array:
    def one(pair: Array) -> Array:
        return measure(take(first, pair[0]), take(second, pair[1]))

    return jax.lax.map(one, jnp.asarray(pairs.T))


def similarities(
    leading: dict[int, dict[str, Spectrum]],
    forms: dict[int, Spectrum],
    size: int,
    other: int,
    pairs: np.ndarray,
) -> dict[str, Array]:
    """Return similarities of pairs of networks of two sizes by measure, [pairs, classes, ranks]; 1 rank for "form"."""
    measures = {
        by: _each_pair(rank_similarity, leading[size][by], leading[other][by], pairs)
        for by in RANKINGS
    }
    measures["matched"] = _each_pair(
        _matched, leading[size]["magnitude"], leading[other]["magnitude"], pairs
    )
    measures["form"] = _each_pair(form_similarity, forms[size], forms[other], pairs)[:, :, None]
    return measures


def _matched(a: Spectrum, b: Spectrum) -> Array:
    return matched_similarity(a, b, min(a.values.shape[1], b.values.shape[1]))


_first = eqx.filter_jit(jax.vmap(partial(truncate, num_components=1)))


def top_similarity(
    leading: dict[int, dict[str, Spectrum]], alive: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the mean similarity of the leading component between all sizes, "top" [sizes, sizes]; NaN without pairs.

    `alive`: True for each network that did not diverge, by size.
    """
    sizes = list(alive)
    table = np.zeros((len(sizes),) * 2)
    first = {size: _first(leading[size]["magnitude"]) for size in sizes}
    for i, size in enumerate(sizes):
        for j, other in enumerate(sizes[: i + 1]):
            pairs = compared_pairs(alive, size, other)
            similarity = np.asarray(_each_pair(rank_similarity, first[size], first[other], pairs))
            known = similarity[alive[size][pairs[0]] & alive[other][pairs[1]]]
            table[i, j] = table[j, i] = known.mean() if known.size else np.nan
    return {"top": table}


def truncations(
    num_components: int, spectra: Spectrum, images: Array, labels: Array
) -> dict[str, Array]:
    """Return test errors of the leading 0, 1, ... components in both orders, and of all components."""

    def one(spectrum: Spectrum) -> dict[str, Array]:
        def wrong(outputs: Array) -> Array:
            return jnp.mean(
                jnp.argmax(outputs, -1) != labels.reshape(-1, *(1,) * (outputs.ndim - 2)), 0
            )

        count = min(num_components, spectrum.values.shape[1])
        by_contribution = reorder(spectrum, mean_contribution(spectrum, images))
        return {
            "magnitude": wrong(truncated_outputs(truncate(spectrum, count), images)),
            "contribution": wrong(truncated_outputs(truncate(by_contribution, count), images)),
            "full": wrong(jnp.sum(contributions(spectrum, images), 2)),
        }

    return bmap(one, batch_size=1)(spectra)


def details(
    config: Any, model: Any, spectrum: Spectrum, images: Array, labels: Array
) -> dict[str, Array]:
    """Return one network's spectrum of class `digit`, explanation of an image, and certified radii."""
    order = jnp.argsort(spectrum.values[config.digit])
    vectors = spectrum.vectors[config.digit]
    chosen = images[jnp.argmax(labels == config.digit)]
    parts = contributions(spectrum, chosen[None])[0, config.digit]
    largest = jnp.argsort(-jnp.abs(parts))[:5]
    measures = {
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
        source = truncate(spectrum, components) if components else model
        measures[f"radii_{components}"] = _radii(source, images[:count], labels[:count])
    return measures


@eqx.filter_jit
def _radii(source: Any, images: Array, labels: Array) -> Array:
    known = margins(source)
    return bmap(lambda image, label: certified_radius(known, image, label).radius, batch_size=20)(
        images, labels
    )


def masking(
    config: Any,
    model: Any,
    spectrum: Spectrum,
    images: Array,
    labels: Array,
    *,
    key: Array,
    against: int = 2,
) -> dict[str, Array]:
    """Return the effect of a mask from the most positive eigenvector of class `digit`, added to test images.

    "mask" [pixels]; "mask_accuracy" and "mask_share", the share of images classified as `digit`, of
    the mask and its negative (an eigenvector has no sign): [2, norms]; "random_accuracy" [norms],
    mean over random masks.
    """
    mask = adversarial_mask(reorder(spectrum, spectrum.values), config.digit, 0, against=against)
    random = jax.random.normal(key, (10, mask.shape[0]), mask.dtype)
    random = random / jnp.linalg.norm(random, axis=1, keepdims=True)
    norms = jnp.asarray(config.mask_norms, mask.dtype)
    masked, control = (
        _classes(model, images, masks, norms) for masks in (jnp.stack([mask, -mask]), random)
    )
    return {
        "mask": mask,
        "mask_accuracy": jnp.mean(masked == labels[None, None], 2),
        "mask_share": jnp.mean(masked == config.digit, 2),
        "random_accuracy": jnp.mean(control == labels[None, None], (0, 2)),
    }


@eqx.filter_jit
def _classes(model: Any, images: Array, masks: Array, norms: Array) -> Array:
    """Return the predicted classes of images plus multiples of masks, [masks, norms, n]."""
    steps = masks[:, None] * norms[None, :, None]
    run = jax.lax.map(
        lambda step: jnp.argmax(jax.vmap(model)(images + step[None]), 1),
        steps.reshape(-1, masks.shape[1]),
    )
    return run.reshape(*steps.shape[:2], -1)


def pooled(similarity: np.ndarray) -> np.ndarray:
    """Return the mean over pairs and classes of networks that did not diverge: [ranks]."""
    return summarise(similarity.reshape(-1, similarity.shape[2])).mean


def intervals(
    similarity: np.ndarray, pairs: np.ndarray, alive: np.ndarray, others: np.ndarray | None = None
) -> np.ndarray:
    """Return means over pairs and classes with the ends of 90 % intervals of two kinds, [2, 3, ranks].

    The first kind resamples members. The second is Student's, as published, as if pairs and classes
    were independent. Intervals of fewer than two members are NaN. `similarity`: [pairs, classes,
    ranks], NaN for diverged networks.
    """
    known = np.isfinite(similarity).all((1, 2))
    values, (first, second) = similarity[known].astype(np.float32), pairs[:, known]
    # Members are renumbered without those that diverged.
    mine, theirs = (np.flatnonzero(which) for which in (alive, alive if others is None else others))
    if len(values) == 0 or min(len(mine), len(theirs)) < 2:
        mean = pooled(values)
        return np.stack(
            [np.stack([mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)])] * 2
        )
    offset, groups = (0, (len(mine),)) if others is None else (len(mine), (len(mine), len(theirs)))
    statistic = pair_mean(
        values.mean(1), np.searchsorted(mine, first), np.searchsorted(theirs, second) + offset
    )
    resampled = bootstrap_interval(statistic, groups, key=named_key("bootstrap of intervals"))
    return np.stack(
        [np.stack(resampled), np.stack(student_interval(values.reshape(-1, values.shape[2])))]
    )
