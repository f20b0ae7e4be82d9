"""Measures of the figure `eigenvectors`: similarity, truncation, explanation, distance."""

from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jax import lax
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
"""Similarities of equally ranked components, and of best matches among those of large magnitude."""

ORDERS = {"magnitude": "by |eigenvalue|", "contribution": "by mean contribution"}
"""Orders in which components are kept."""

PADDED = ("seeds", "pairs", "ranks", "components")
"""Axes that differ in length between sizes; coordinates such as "seeds_length" hold the lengths."""


def of_size(dataset: xarray.Dataset, size: int) -> xarray.Dataset:
    """Return the dataset of one hidden size, without padding."""
    networks = dataset.sel(hidden_sizes=size)
    slices = {axis: slice(networks[f"{axis}_length"].item()) for axis in PADDED}
    return networks.isel(slices)


def compared_pairs(alive: dict[int, np.ndarray], size: int, other_size: int) -> np.ndarray:
    """Return the members of all pairs of different networks of two sizes, [2, pairs]."""
    num_members = len(alive[size])
    if size == other_size:
        return member_pairs(num_members)
    return member_pairs(num_members, len(alive[other_size]))


@eqx.filter_jit
def leading_components(spectra: Spectrum, count: int) -> dict[str, Spectrum]:
    """Return up to `count` leading components of stacked spectra, in three orders."""

    def of_network(spectrum):
        values = spectrum.values
        num_components = min(count, values.shape[1])
        importances = (jnp.abs(values), values, -values)
        leading = {}
        for order, importance in zip(RANKINGS, importances, strict=True):
            leading[order] = truncate(reorder(spectrum, importance), num_components)
        return leading

    return jax.vmap(of_network)(spectra)


@eqx.filter_jit
def _of_pairs(
    measure: Callable[[Spectrum, Spectrum], Array],
    first: Spectrum,
    second: Spectrum,
    pairs: Array | np.ndarray,
) -> Array:
    def of_pair(pair):
        a = take(first, pair[0])
        b = take(second, pair[1])
        return measure(a, b)

    return lax.map(of_pair, jnp.asarray(pairs.T))


def similarities(
    leading: dict[int, dict[str, Spectrum]],
    forms: dict[int, Spectrum],
    size: int,
    other_size: int,
    pairs: np.ndarray,
) -> dict[str, Array]:
    """Return similarities of pairs of networks of two sizes by measure, [pairs, classes, ranks].

    "form" has one rank.
    """
    first = leading[size]
    second = leading[other_size]
    measures = {}
    for order in RANKINGS:
        measures[order] = _of_pairs(rank_similarity, first[order], second[order], pairs)
    measures["matched"] = _of_pairs(_matched, first["magnitude"], second["magnitude"], pairs)
    form = _of_pairs(form_similarity, forms[size], forms[other_size], pairs)
    measures["form"] = form[:, :, None]
    return measures


def _matched(a: Spectrum, b: Spectrum) -> Array:
    num_components = min(a.values.shape[1], b.values.shape[1])
    return matched_similarity(a, b, num_components)


_leading_component = eqx.filter_jit(jax.vmap(partial(truncate, num_components=1)))


def top_similarity(
    leading: dict[int, dict[str, Spectrum]], alive: dict[int, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the mean similarity of the leading component between all sizes.

    "top" is [sizes, sizes], NaN without pairs. `alive`: True for each network that did not diverge,
    by size.
    """
    sizes = list(alive)
    table = np.full((len(sizes),) * 2, np.nan)
    top = {size: _leading_component(leading[size]["magnitude"]) for size in sizes}
    for i, size in enumerate(sizes):
        for j, other_size in enumerate(sizes[: i + 1]):
            pairs = compared_pairs(alive, size, other_size)
            similarity = np.asarray(_of_pairs(rank_similarity, top[size], top[other_size], pairs))
            are_alive = alive[size][pairs[0]] & alive[other_size][pairs[1]]
            if are_alive.any():
                mean = similarity[are_alive].mean()
                table[i, j] = mean
                table[j, i] = mean
    return {"top": table}


def truncations(
    num_components: int, spectra: Spectrum, images: Array, labels: Array
) -> dict[str, Array]:
    """Return test errors of the leading 0, 1, ... components in both orders, and of all."""

    def error_of(outputs):
        truth = labels.reshape(-1, *(1,) * (outputs.ndim - 2))
        return jnp.mean(jnp.argmax(outputs, -1) != truth, 0)

    def of_network(spectrum):
        count = min(num_components, spectrum.values.shape[1])
        importance = mean_contribution(spectrum, images)
        by_contribution = reorder(spectrum, importance)
        errors = {}
        for order, ordered in (("magnitude", spectrum), ("contribution", by_contribution)):
            outputs = truncated_outputs(truncate(ordered, count), images)
            errors[order] = error_of(outputs)
        outputs = jnp.sum(contributions(spectrum, images), 2)
        errors["full"] = error_of(outputs)
        return errors

    return bmap(of_network, batch_size=1)(spectra)


def details(
    config: Any, model: Any, spectrum: Spectrum, images: Array, labels: Array
) -> dict[str, Array]:
    """Return one network's spectrum of class `digit`, explanation of an image, and radii."""
    digit = config.digit
    values = spectrum.values[digit]
    vectors = spectrum.vectors[digit]
    ascending = jnp.argsort(values)
    descending = ascending[::-1]

    image = images[jnp.argmax(labels == digit)]
    shares = contributions(spectrum, image[None])[0, digit]
    largest = jnp.argsort(-jnp.abs(shares))[:5]
    measures = {
        "values": values[descending],
        "leading": jnp.stack([vectors[descending[:3]], vectors[ascending[:3]]]),
        "image": image,
        "contributions": shares[largest],
        "vectors": vectors[largest],
        "component_values": values[largest],
    }

    count = min(config.num_certified, len(images))
    images = images[:count]
    labels = labels[:count]
    measures["radii_0"] = _radii(model, images, labels)
    for num_components in sorted({1, 5, config.num_components}):
        if num_components < len(values):
            source = truncate(spectrum, num_components)
            measures[f"radii_{num_components}"] = _radii(source, images, labels)
    return measures


@eqx.filter_jit
def _radii(source: Any, images: Array, labels: Array) -> Array:
    margins_of_source = margins(source)

    def radius_of(image, label):
        return certified_radius(margins_of_source, image, label).radius

    return bmap(radius_of, batch_size=20)(images, labels)


def masking(
    config: Any, model: Any, spectrum: Spectrum, images: Array, labels: Array, *, key: Array
) -> dict[str, Array]:
    """Return the effect of a mask from the most positive eigenvector of class `digit`.

    The mask is added to test images. "mask" is [pixels]; "mask_accuracy" and "mask_share", the
    fraction of images classified as `digit`, of the mask and its negative (an eigenvector has no
    sign): [2, norms]; "random_accuracy" [norms], mean over random masks.
    """
    digit = config.digit
    by_value = reorder(spectrum, spectrum.values)
    mask = adversarial_mask(by_value, digit, 0, against=2)
    random_masks = jax.random.normal(key, (10, len(mask)), mask.dtype)
    random_masks = random_masks / jnp.linalg.norm(random_masks, axis=1, keepdims=True)

    norms = jnp.asarray(config.mask_norms, mask.dtype)
    masked = _classes(model, images, jnp.stack([mask, -mask]), norms)
    control = _classes(model, images, random_masks, norms)
    return {
        "mask": mask,
        "mask_accuracy": jnp.mean(masked == labels[None, None], 2),
        "mask_share": jnp.mean(masked == digit, 2),
        "random_accuracy": jnp.mean(control == labels[None, None], (0, 2)),
    }


@eqx.filter_jit
def _classes(model: Any, images: Array, masks: Array, norms: Array) -> Array:
    """Return the predicted classes of images plus multiples of masks, [masks, norms, n]."""
    steps = masks[:, None] * norms[None, :, None]
    rows = steps.reshape(-1, masks.shape[1])

    def predict(step):
        outputs = jax.vmap(model)(images + step[None])
        return jnp.argmax(outputs, 1)

    classes = lax.map(predict, rows)
    return classes.reshape(*steps.shape[:2], -1)


def pooled(similarity: np.ndarray) -> np.ndarray:
    """Return the mean over pairs and classes of networks that did not diverge: [ranks]."""
    return summarise(similarity.reshape(-1, similarity.shape[2])).mean


def intervals(
    similarity: np.ndarray,
    pairs: np.ndarray,
    alive: np.ndarray,
    other_alive: np.ndarray | None = None,
) -> np.ndarray:
    """Return means over pairs and classes with the ends of 90 % intervals, [2, 3, ranks].

    The first interval resamples members. The second is Student's, as published, as if pairs and
    classes were independent. Intervals of fewer than two members are NaN. `similarity`: [pairs,
    classes, ranks], NaN for diverged networks.
    """
    is_finite = np.isfinite(similarity).all((1, 2))
    values = similarity[is_finite].astype(np.float32)
    first, second = pairs[:, is_finite]

    # Members are renumbered without those that diverged.
    members = np.flatnonzero(alive)
    groups = (len(members),)
    other_members = members
    offset = 0
    if other_alive is not None:
        other_members = np.flatnonzero(other_alive)
        offset = len(members)
        groups = (offset, len(other_members))
    if len(values) == 0 or min(groups) < 2:
        mean = pooled(values)
        undefined = np.full_like(mean, np.nan)
        return np.stack([np.stack([mean, undefined, undefined])] * 2)

    first = np.searchsorted(members, first)
    second = np.searchsorted(other_members, second) + offset
    statistic = pair_mean(values.mean(1), first, second)
    resampled = bootstrap_interval(statistic, groups, key=named_key("bootstrap of intervals"))
    student = student_interval(values.reshape(-1, values.shape[2]))
    return np.stack([np.stack(resampled), np.stack(student)])
