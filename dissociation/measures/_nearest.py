"""Entropy and mutual information from the distances to nearest neighbours."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jaxtyping import Array, Bool, Float
from scipy.special import gammaln

from dissociation._core.checks import check_choice, check_classes, check_count, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.groups import group_numbers, one_per_group, warn_in_time, warn_repeated
from dissociation._core.linalg import product
from dissociation._core.results import Result
from dissociation._core.splits import permutation
from dissociation._core.types import Classes
from dissociation._core.validation import validated
from dissociation.measures._coordinates import Points, drawn_in, normal_scores, whitened
from dissociation.measures._neighbours import (
    check_neighbours,
    closer,
    num_parts,
    part_sizes,
    smallest,
    squared,
)

# Largest fraction of samples of a reliable estimate that coincide with a neighbour.
_TIES = 0.01
# asinh coordinates are used if their linear information exceeds that of normal scores by this
# number of nats.
_BENT = 0.25
# Largest fraction of samples of a reliable estimate whose class is too small for halves.
_SMALL = 0.1
# Largest number of choices of one sample of each group.
_CHOICES = 10

ESTIMATORS = ("entropies", "kraskov")
"""Differences of weighted Kozachenko-Leonenko entropies, or Kraskov's estimator."""


class Estimate(Result):
    """Estimate in nats.

    "entropies" resolves a strong relation only as far as it is linear between normal scores or
    asinh coordinates. "kraskov" underestimates strong relations and many dimensions. Not every bias
    is detected.

    `reliable` is False in these cases:

    - More than 1 % of the samples coincide with neighbours, or coordinates are linear functions of
    others.
    - There are fewer than 2^d samples, with the d dimensions of both sides together (8^d for
    Kraskov's estimator), or
      fewer than 8 k, too few to compare halves.
    - The halves differ from the whole by more than three errors, or, if an information is above
    log(n) / 2, fall short
      of it by more than two.
    - An information is more than three errors below zero.
    - The nonlinear part of an information is above 2/3 log n, or Kraskov's estimate above 2/3 (log
    n - psi(k)).
    - An information about labels is more than three errors above its value for perfectly separated
    classes.
    - A tenth of the samples belong to classes of fewer than 2 (k + 1).
    - Kraskov's I(X; Z) is more than three errors from the estimate by entropies, or that is not
    reliable.
    - Kraskov's estimator is used with labels, and classes have, on average over samples, fewer than
    2^d samples.

    Attributes:
        value: The estimate; NaN if it is not `reliable`.
        error: Standard error of independent samples, without bias, from the samples' terms or, if
            larger, from up to 16 parts. For labels it is from terms, and at least H(Y) / n.
        reliable: True if no check finds a bias.
    """

    value: Float[Array, ""]
    error: Float[Array, ""]
    reliable: Bool[Array, ""]

    UNITS = {"value": "nats", "error": "nats"}


@validated
def entropy_weights(num_neighbours: int, dimension: int) -> Float[np.ndarray, " k"]:
    """Return the shortest weights over neighbours that sum to 1 and cancel leading terms of the bias.

    The terms are n^(-2 l / d), l = 1 ... floor(d / 4), with conditions sum_j w_j Gamma(j + 2 l / d)
    / Gamma(j) = 0. Below 4 dimensions weights are equal.

    Args:
        num_neighbours: Neighbours k, more than d / 4.
        dimension: Dimension d.

    References:
        Berrett, Samworth and Yuan (2019), Efficient multivariate entropy estimation via k-nearest
        neighbour distances, section 2.
    """
    check_count("dimension", dimension, minimum=1)
    terms = np.arange(dimension // 4 + 1)
    if len(terms) > num_neighbours:
        fail(
            "num_neighbours", f"be at least {len(terms)} in {dimension} dimensions", num_neighbours
        )
    order = np.arange(1, num_neighbours + 1)
    return np.linalg.pinv(
        np.exp(gammaln(order[None] + 2 * terms[:, None] / dimension) - gammaln(order)[None])
    )[:, 0]


@validated
@partial(jax.jit, static_argnames=("num_neighbours", "block"))
def entropy(points: Points, *, num_neighbours: int = 5, block: int = 250) -> Estimate:
    """Return the differential entropy in nats by the weighted Kozachenko-Leonenko estimator, in whitened coordinates.

    H = (1 / n) sum_i sum_j w_j log(r_ij^d V_d (n - 1) / exp(psi(j))), with the distance r_ij of
    sample i to its j-th neighbour among n in d dimensions, the volume V_d of the unit ball, and
    `entropy_weights` w_j.

    Args:
        points: Samples, [n, d].
        num_neighbours: Neighbours k, more than d / 4 and below n.
        block: Samples compared at once.

    Example:
        >>> points = jax.random.normal(jax.random.key(0), (2000, 1))
        >>> found = entropy(points)  # exactly: log(2 pi e) / 2 = 1.419
        >>> bool(jnp.abs(found.value - 1.419) < 3 * found.error)
        True
    """
    check_neighbours(num_neighbours, len(points))
    white, logs = whitened(points[permutation(len(points))])
    groups, terms = (
        num_parts(len(white), num_neighbours),
        _entropy_terms(white, num_neighbours, block) + logs,
    )
    return _estimate(terms, groups, enough=groups > 1 and len(white) >= 2 ** white.shape[1])


@validated
def information(
    x: Float[Array | np.ndarray, "n p"],
    z: Float[Array | np.ndarray, "n d"],
    *,
    groups: Any = None,
    estimator: str = "entropies",
    num_neighbours: int = 5,
    block: int = 250,
) -> Estimate:
    """Return the mutual information I(X; Z) of paired samples in nats.

    Units, and increasing maps of a coordinate, affect only strong relations. An invertible relation
    has infinite information: add a little noise to one side, and compare with shuffled pairs.
    Coordinates with few values need `label_information`, gradients `smoothed_information`. Rows are
    taken as independent: of a time series pass rows that are a few correlation times apart.

    Args:
        x: Samples, [n, p].
        z: Samples, [n, d], converted to the dtype of x.
        groups: Label of each sample's group, integers or text, if samples depend on each other, as
            copies of a stimulus do. The result is the mean over up to 10 choices of one sample of
            each group, in turn, reliable if most are.
        estimator: "entropies" for H(X) + H(Z) - H(X, Z), or "kraskov" for Kraskov's first estimator
            with the larger Euclidean distance, with a smaller error in few dimensions and a bias in
            more. It computes both.
        num_neighbours: Neighbours k. In 4 + 4 dimensions 10 or 20 in place of 5 reduce the error by
            a third or a half.
        block: Samples compared at once.

    References:
        Kozachenko and Leonenko (1987); Berrett, Samworth and Yuan (2019).
        Kraskov, Stoegbauer and Grassberger (2004), Estimating mutual information, eq. 8.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    if groups is None:
        check_neighbours(num_neighbours, len(x))
        warn_repeated([x, z], "estimates and errors are those of independent samples")
        warn_in_time(["x", "z"], [x, z])
        return _information(to_device(x), to_device(z), estimator, num_neighbours, block)
    choices = one_per_group(group_numbers(groups, len(x)), _CHOICES)
    if num_neighbours >= choices.shape[1]:
        fail(
            "groups",
            f"label more groups than `num_neighbours` ({num_neighbours})",
            f"{choices.shape[1]} groups",
        )
    return _mean_information(
        to_device(x), to_device(z), to_device(choices), estimator, num_neighbours, block
    )


@partial(jax.jit, static_argnames=("estimator", "count", "block"))
def _mean_information(
    x: Array, z: Array, choices: Array, estimator: str, count: int, block: int
) -> Estimate:
    """Return the mean over choices [choices, groups] of samples."""
    found = jax.lax.map(
        lambda rows: _information(x[rows], z[rows], estimator, count, block), choices
    )
    kept = found.reliable
    mean = [jnp.mean(part, where=kept) for part in (found.value, found.error)]
    return _where(jnp.mean(kept) > 0.5, *mean)


@partial(jax.jit, static_argnames=("estimator", "count", "block"))
def _information(x: Array, z: Array, estimator: str, count: int, block: int) -> Estimate:
    number, width = x.shape[0], x.shape[1] + z.shape[1]
    both = jnp.concatenate([x, z.astype(x.dtype)], 1)[permutation(number)]
    ways = jax.vmap(partial(_coordinates, split=x.shape[1]))(
        jnp.stack([normal_scores(both), drawn_in(both)])
    )
    # Normal scores make a strong linear relation of several coordinates slightly nonlinear.
    straighter = (ways[3][1] < ways[3][0] - _BENT).astype(int)
    x, z, joint, linear = (way[straighter] for way in ways)
    # The log determinant is the information of the linear relation. Neighbours estimate the rest.
    parts = [_entropy_terms(points, count, block) for points in (x, z, joint)]
    # The log determinants of the two sides cancel between their entropies and the linear
    # information.
    terms = parts[0] + parts[1] - parts[2] - linear
    groups, most = num_parts(number, count), 2 / 3 * math.log(number)
    beyond = _estimate(
        terms, groups, least=0.0, most=most - linear, enough=groups > 1 and number >= 2**width
    )
    if estimator == "entropies":
        return beyond
    # The estimate is largest if only the k neighbours are within reach of both margins.
    most = most - 2 / 3 * digamma(jnp.asarray(count, x.dtype))
    terms = _kraskov_terms(x, z, count, block)
    direct = _estimate(terms, groups, least=0.0, most=most, enough=number >= 8**width)
    agree = jnp.abs(direct.value - beyond.value) <= 3 * jnp.hypot(direct.error, beyond.error)
    return _where(direct.reliable & beyond.reliable & agree, direct.value, direct.error)


def _coordinates(both: Array, split: int) -> tuple[Array, Array, Array, Array]:
    """Return each side whitened, both whitened together, and the log volume of the latter."""
    x, z = (whitened(part)[0] for part in jnp.split(both, [split], 1))
    return x, z, *whitened(jnp.concatenate([x, z], 1))


def _kraskov_terms(x: Array, z: Array, count: int, block: int) -> Array:
    number, split = x.shape

    def larger(a: Array, b: Array) -> Array:
        return jnp.maximum(squared(a[:, :split], b[:, :split]), squared(a[:, split:], b[:, split:]))

    groups = num_parts(number, count)
    radius = smallest(jnp.concatenate([x, z], 1), None, count, block, larger, groups)[:, :, -1]
    counts = [closer(points, radius, block, groups) for points in (x, z)]
    terms = digamma(jnp.asarray(count, x.dtype)) + digamma(part_sizes(number, groups, x.dtype))
    terms = terms - sum(digamma(near.astype(x.dtype) + 1) for near in counts)
    return jnp.where(jnp.mean(radius[0] > 0) > 1 - _TIES, terms, jnp.inf)


@validated
def label_information(
    z: Points,
    labels: Classes,
    *,
    num_classes: int,
    estimator: str = "entropies",
    num_neighbours: int = 5,
    block: int = 250,
) -> Estimate:
    """Return the mutual information I(Z; Y) of samples and their classes.

    Neighbours are found in coordinates in which classes, on average, are white, so units have no
    effect.

    Args:
        z: Samples, [n, d].
        labels: Classes from 0, [n]. Every class that occurs needs more than `num_neighbours`
            samples. Traced labels that are out of range, or of too small a class, give NaN and
            `reliable` False.
        num_classes: Classes C.
        estimator: "entropies" for H(Z) - sum_c (n_c / n) H(Z | c), or "kraskov" for the variant for
            one discrete variable.
        num_neighbours: Neighbours k.
        block: Samples compared at once.

    Returns:
        The information in nats, at most the entropy H(Y) of the labels, which separated classes
        reach. A larger estimate is replaced by H(Y) if class sizes and the error explain it, else
        by NaN.

    References:
        Ross (2014), Mutual information between discrete and continuous data sets.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_neighbours(num_neighbours, len(z))
    check_classes("labels", labels, check_count("num_classes", num_classes, minimum=1))
    if not is_traced(labels):
        sizes = np.bincount(np.asarray(labels))
        small = np.flatnonzero((sizes > 0) & (sizes <= num_neighbours))
        if len(small):
            wanted = f"have more than {num_neighbours} samples of every class"
            fail("labels", wanted, f"{sizes[small[0]]} of class {small[0]}")
    return _label_information(
        to_device(z), to_device(labels), num_classes, estimator, num_neighbours, block
    )


@partial(jax.jit, static_argnames=("classes", "estimator", "count", "block"))
def _label_information(
    z: Array, labels: Array, classes: int, estimator: str, count: int, block: int
) -> Estimate:
    # Every other sample in the order of classes, so that both halves hold every class.
    number, order = z.shape[0], jnp.asarray(permutation(z.shape[0]))
    order = order[jnp.argsort(labels[order], stable=True)]
    z, labels = drawn_in(z)[order], labels[order]
    members = jax.nn.one_hot(labels, classes, dtype=z.dtype)
    means = product(members.T, z) / jnp.maximum(jnp.sum(members, 0), 1)[:, None]
    z, _ = whitened(z, z - product(members, means))
    half = jax.nn.one_hot(np.arange(number) % 2, 2, dtype=z.dtype)
    halves = product(half.T, members)
    own = jnp.stack([jnp.sum(halves, 0)[labels], jnp.sum(half * halves[:, labels].T, 1)])
    total = part_sizes(number, 2, z.dtype)
    squares = smallest(z, labels, count, block, squared, 2)
    # A term with equal weights is largest if the neighbours in the class are the neighbours in all
    # samples.
    if estimator == "entropies":
        everything = smallest(z, None, count, block, squared, 2)
        terms = _level_terms(everything, z.shape[1], total) - _level_terms(squares, z.shape[1], own)
        most = jnp.log((total[0] - 1) / (own[0] - 1))
    else:
        radius = squares[:, :, -1]
        near = (
            closer(z, radius, block, 2).astype(z.dtype) + 1
        )  # the class's k-th, on the rim, counts
        terms = digamma(total) - digamma(own)
        most = terms[0]
        terms = terms + digamma(jnp.asarray(count, z.dtype)) - digamma(near)
        terms = jnp.where(jnp.mean(radius[0] > 0) > 1 - _TIES, terms, jnp.inf)
    terms = jnp.where(jnp.all((labels >= 0) & (labels < classes)), terms, jnp.nan)
    enough = 2 ** z.shape[1] <= (number if estimator == "entropies" else jnp.mean(own[0]))
    whole = _estimate(terms[:1], least=0.0, enough=enough)
    held = jnp.log(total / own)
    # If all terms are equal their deviation is zero, although one more sample could change the
    # estimate.
    error = jnp.maximum(whole.error, jnp.mean(held[0]) / number)
    known = own[1] > count  # a half of the class has neighbours enough
    values = jnp.minimum(*(jnp.mean(level, 1, where=known) for level in (terms, held)))
    same = (jnp.mean(known) > 1 - _SMALL) & (jnp.abs(values[0] - values[1]) <= 3 * error)
    found = _where(whole.reliable & same, whole.value, error)
    reliable = found.reliable & (found.value <= jnp.mean(most) + 3 * found.error + 1e-3)
    return _where(reliable, jnp.minimum(found.value, jnp.mean(held[0])), found.error)


def _where(reliable: Array, value: Array, error: Array) -> Estimate:
    kept = jnp.where(reliable, 1.0, jnp.nan)  # a factor, so that derivatives are NaN too
    return Estimate(kept * value, kept * error, reliable)


def _entropy_terms(points: Array, count: int, block: int) -> Array:
    """Return the samples' terms of the entropy of all samples, halves and parts: [levels, n]."""
    number = points.shape[0]
    groups = num_parts(number, count)
    squares = smallest(points, None, count, block, squared, groups)
    return _level_terms(squares, points.shape[1], part_sizes(number, groups, points.dtype))


def _level_terms(squares: Array, width: int, sizes: Array) -> Array:
    """Return each sample's terms of the entropies, [levels, n]; -inf for coincident samples, if many coincide."""
    count = squares.shape[2]
    weights = jnp.asarray(entropy_weights(count, width), squares.dtype)
    volume = 0.5 * width * math.log(math.pi) - math.lgamma(0.5 * width + 1)
    ranks = jnp.arange(1, count + 1, dtype=squares.dtype)
    # A few coincident samples are due to rounding and get the smallest distance that occurs.
    apart = squares != 0  # not `> 0`, which would hide NaN
    least = jnp.min(jnp.where(apart, squares, jnp.inf), (1, 2), keepdims=True)
    tied = jnp.mean(~apart[:, :, :1], (1, 2), keepdims=True) > _TIES
    squares = jnp.where(apart, squares, jnp.where(tied, 0.0, least))
    logs = 0.5 * width * jnp.log(squares) + volume - digamma(ranks)[None, None]
    return jnp.sum(weights[None, None] * logs, 2) + jnp.log(sizes - 1)


def _estimate(
    terms: Array,
    groups: int = 1,
    *,
    least: float = -math.inf,
    most: float | Array = math.inf,
    enough: bool | Array,
) -> Estimate:
    """Return the estimate from terms [levels, n], reliable below `most` and above `least` less three errors."""
    number = terms.shape[1]
    value, error = jnp.mean(terms[0]), jnp.std(terms[0]) / number**0.5
    reliable = jnp.isfinite(value) & (value < most) & enough
    if groups > 1:
        # Terms of neighbouring samples depend on each other, so parts may vary more than the terms
        # suggest.
        group = np.arange(number) % groups
        parts = jnp.zeros(groups, terms.dtype).at[group].add(terms[-1]) / np.bincount(group)
        error = jnp.maximum(error, jnp.std(parts, ddof=1) / groups**0.5)
        growth = value - jnp.mean(terms[1])
        # Twice the samples add log 2 to the infinite information of a relation without noise,
        # hardly three errors.
        large = (growth > 0) & (value > 0.5 * math.log(number)) & math.isfinite(least)
        reliable = reliable & (jnp.abs(growth) <= jnp.where(large, 2, 3) * error)
    return _where(reliable & (value >= least - 3 * error), value, error)
