"""Entropy and mutual information from the distances to nearest neighbours."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
      Kraskov's estimator), or fewer than 8 k, too few to compare halves.
    - The halves differ from the whole by more than three errors, or, if an information is above
      log(n) / 2, fall short of it by more than two.
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
    """Return the shortest weights that sum to 1 and cancel leading terms of the bias.

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
        requirement = f"be at least {len(terms)} in {dimension} dimensions"
        fail("num_neighbours", requirement, num_neighbours)
    order = np.arange(1, num_neighbours + 1)
    shifted_order = order[None] + 2 * terms[:, None] / dimension
    ratios = np.exp(gammaln(shifted_order) - gammaln(order)[None])
    return np.linalg.pinv(ratios)[:, 0]


@validated
@partial(jax.jit, static_argnames=("num_neighbours", "block"))
def entropy(points: Points, *, num_neighbours: int = 5, block: int = 250) -> Estimate:
    """Return the differential entropy in nats by the weighted Kozachenko-Leonenko estimator.

    Neighbours are found in whitened coordinates.

    H = (1 / n) sum_i sum_j w_j log(r_ij^d V_d (n - 1) / exp(psi(j))), with the distance r_ij of
    sample i to its j-th neighbour among n in d dimensions, the volume V_d of the unit ball, and
    `entropy_weights` w_j.

    Args:
        points: Samples, [n, d].
        num_neighbours: Neighbours k, more than d / 4 and below n.
        block: Samples compared at once.

    Example:
        >>> points = jax.random.normal(jax.random.key(0), (2000, 1))
        >>> estimate = entropy(points)  # exactly: log(2 pi e) / 2 = 1.419
        >>> bool(jnp.abs(estimate.value - 1.419) < 3 * estimate.error)
        True
    """
    number = len(points)
    check_neighbours(num_neighbours, number)
    white, log_volume = whitened(points[permutation(number)])
    groups = num_parts(number, num_neighbours)
    terms = _entropy_terms(white, num_neighbours, block) + log_volume
    is_enough = groups > 1 and number >= 2 ** white.shape[1]
    return _estimate(terms, groups, enough=is_enough)


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
    num_groups = choices.shape[1]
    if num_neighbours >= num_groups:
        requirement = f"label more groups than `num_neighbours` ({num_neighbours})"
        fail("groups", requirement, f"{num_groups} groups")
    return _mean_information(
        to_device(x), to_device(z), to_device(choices), estimator, num_neighbours, block
    )


@partial(jax.jit, static_argnames=("estimator", "count", "block"))
def _mean_information(
    x: Array, z: Array, choices: Array, estimator: str, count: int, block: int
) -> Estimate:
    """Return the mean over choices [choices, groups] of samples."""

    def of_choice(rows):
        return _information(x[rows], z[rows], estimator, count, block)

    estimates = lax.map(of_choice, choices)
    reliable = estimates.reliable
    value = jnp.mean(estimates.value, where=reliable)
    error = jnp.mean(estimates.error, where=reliable)
    return _where(jnp.mean(reliable) > 0.5, value, error)


@partial(jax.jit, static_argnames=("estimator", "count", "block"))
def _information(x: Array, z: Array, estimator: str, count: int, block: int) -> Estimate:
    number, split = x.shape
    joint = jnp.concatenate([x, z.astype(x.dtype)], 1)
    joint = joint[permutation(number)]
    dimension = joint.shape[1]
    transformed = jnp.stack([normal_scores(joint), drawn_in(joint)])
    coordinates = jax.vmap(partial(_coordinates, split=split))(transformed)

    # Normal scores make a strong linear relation of several coordinates slightly nonlinear.
    linear = coordinates[3]
    straighter = (linear[1] < linear[0] - _BENT).astype(int)
    x, z, joint, linear = (array[straighter] for array in coordinates)

    # The log determinant is the information of the linear relation. Neighbours estimate the
    # remainder. The log determinants of the two sides cancel between their entropies and the linear
    # information.
    entropy_x = _entropy_terms(x, count, block)
    entropy_z = _entropy_terms(z, count, block)
    terms = entropy_x + entropy_z - _entropy_terms(joint, count, block) - linear
    groups = num_parts(number, count)
    largest = 2 / 3 * math.log(number)
    is_enough = groups > 1 and number >= 2**dimension
    estimate = _estimate(terms, groups, low=0.0, high=largest - linear, enough=is_enough)
    if estimator == "entropies":
        return estimate

    # The estimate is largest if only the k neighbours are within reach of both margins.
    largest = largest - 2 / 3 * digamma(jnp.asarray(count, x.dtype))
    terms = _kraskov_terms(x, z, count, block)
    kraskov = _estimate(terms, groups, low=0.0, high=largest, enough=number >= 8**dimension)
    difference = jnp.abs(kraskov.value - estimate.value)
    agree = difference <= 3 * jnp.hypot(kraskov.error, estimate.error)
    reliable = kraskov.reliable & estimate.reliable & agree
    return _where(reliable, kraskov.value, kraskov.error)


def _coordinates(joint: Array, split: int) -> tuple[Array, Array, Array, Array]:
    """Return each side whitened, both whitened together, and the log volume of the latter."""
    x, _ = whitened(joint[:, :split])
    z, _ = whitened(joint[:, split:])
    white, log_volume = whitened(jnp.concatenate([x, z], 1))
    return x, z, white, log_volume


def _kraskov_terms(x: Array, z: Array, count: int, block: int) -> Array:
    number, split = x.shape
    dtype = x.dtype

    def larger(a, b):
        distance_x = squared(a[:, :split], b[:, :split])
        distance_z = squared(a[:, split:], b[:, split:])
        return jnp.maximum(distance_x, distance_z)

    groups = num_parts(number, count)
    joint = jnp.concatenate([x, z], 1)
    radius = smallest(joint, None, count, block, larger, groups)[:, :, -1]
    closer_x = closer(x, radius, block, groups).astype(dtype)
    closer_z = closer(z, radius, block, groups).astype(dtype)
    sizes = part_sizes(number, groups, dtype)
    terms = digamma(jnp.asarray(count, dtype)) + digamma(sizes)
    terms = terms - (digamma(closer_x + 1) + digamma(closer_z + 1))
    return _infinite_if_tied(terms, radius)


def _infinite_if_tied(terms: Array, radius: Array) -> Array:
    """Return the terms, or infinity if too many samples coincide with their neighbours."""
    is_apart = jnp.mean(radius[0] > 0) > 1 - _TIES
    return jnp.where(is_apart, terms, jnp.inf)


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
            label = small[0]
            requirement = f"have more than {num_neighbours} samples of every class"
            fail("labels", requirement, f"{sizes[label]} of class {label}")
    return _label_information(
        to_device(z), to_device(labels), num_classes, estimator, num_neighbours, block
    )


@partial(jax.jit, static_argnames=("classes", "estimator", "count", "block"))
def _label_information(
    z: Array, labels: Array, classes: int, estimator: str, count: int, block: int
) -> Estimate:
    # Every second sample in the order of classes, so that both halves hold every class.
    number = len(z)
    order = jnp.asarray(permutation(number))
    order = order[jnp.argsort(labels[order], stable=True)]
    labels = labels[order]
    z = drawn_in(z)[order]
    dtype = z.dtype
    membership = jax.nn.one_hot(labels, classes, dtype=dtype)
    counts = jnp.maximum(jnp.sum(membership, 0), 1)
    means = product(membership.T, z) / counts[:, None]
    z, _ = whitened(z, z - product(membership, means))
    dimension = z.shape[1]

    half = jax.nn.one_hot(np.arange(number) % 2, 2, dtype=dtype)
    halves = product(half.T, membership)
    class_size = jnp.sum(halves, 0)[labels]
    class_size_in_half = jnp.sum(half * halves[:, labels].T, 1)
    class_sizes = jnp.stack([class_size, class_size_in_half])
    sizes = part_sizes(number, 2, dtype)

    squares = smallest(z, labels, count, block, squared, 2)
    # A term with equal weights is largest if the neighbours in the class are the neighbours in all
    # samples.
    if estimator == "entropies":
        squares_in_all = smallest(z, None, count, block, squared, 2)
        terms = _level_terms(squares_in_all, dimension, sizes)
        terms = terms - _level_terms(squares, dimension, class_sizes)
        largest_terms = jnp.log((sizes[0] - 1) / (class_size - 1))
        is_enough = 2**dimension <= number
    else:
        radius = squares[:, :, -1]
        # The class's k-th neighbour, on the rim, counts.
        num_closer = closer(z, radius, block, 2).astype(dtype) + 1
        terms = digamma(sizes) - digamma(class_sizes)
        largest_terms = terms[0]
        terms = terms + digamma(jnp.asarray(count, dtype)) - digamma(num_closer)
        terms = _infinite_if_tied(terms, radius)
        is_enough = 2**dimension <= jnp.mean(class_size)
    are_classes = jnp.all((labels >= 0) & (labels < classes))
    terms = jnp.where(are_classes, terms, jnp.nan)

    estimate = _estimate(terms[:1], low=0.0, enough=is_enough)
    separated_terms = jnp.log(sizes / class_sizes)
    separated = jnp.mean(separated_terms[0])
    # If all terms are equal their deviation is zero, although one more sample could change the
    # estimate.
    error = jnp.maximum(estimate.error, separated / number)

    # Compare the halves, on classes with enough neighbours in a half.
    is_large = class_size_in_half > count
    values = jnp.mean(terms, 1, where=is_large)
    values = jnp.minimum(values, jnp.mean(separated_terms, 1, where=is_large))
    halves_agree = jnp.abs(values[0] - values[1]) <= 3 * error
    reliable = (jnp.mean(is_large) > 1 - _SMALL) & halves_agree
    estimate = _where(estimate.reliable & reliable, estimate.value, error)

    bound = jnp.mean(largest_terms) + 3 * estimate.error + 1e-3
    reliable = estimate.reliable & (estimate.value <= bound)
    value = jnp.minimum(estimate.value, separated)
    return _where(reliable, value, estimate.error)


def _where(reliable: Array, value: Array, error: Array) -> Estimate:
    factor = jnp.where(reliable, 1.0, jnp.nan)  # so that derivatives are NaN too
    return Estimate(factor * value, factor * error, reliable)


def _entropy_terms(points: Array, count: int, block: int) -> Array:
    """Return the samples' terms of the entropy of all samples, halves and groups: [levels, n]."""
    number, dimension = points.shape
    groups = num_parts(number, count)
    squares = smallest(points, None, count, block, squared, groups)
    sizes = part_sizes(number, groups, points.dtype)
    return _level_terms(squares, dimension, sizes)


def _level_terms(squares: Array, dimension: int, sizes: Array) -> Array:
    """Return each sample's terms of the entropies, [levels, n].

    Terms of coincident samples are minus infinity if many samples coincide.
    """
    count = squares.shape[2]
    weights = jnp.asarray(entropy_weights(count, dimension), squares.dtype)
    log_volume = 0.5 * dimension * math.log(math.pi) - math.lgamma(0.5 * dimension + 1)
    ranks = jnp.arange(1, count + 1, dtype=squares.dtype)

    # A few coincident samples are due to rounding and get the smallest distance that occurs.
    is_apart = squares != 0  # not `> 0`, which would hide NaN
    positive_squares = jnp.where(is_apart, squares, jnp.inf)
    shortest = jnp.min(positive_squares, (1, 2), keepdims=True)
    tied_fraction = jnp.mean(~is_apart[:, :, :1], (1, 2), keepdims=True)
    replacement = jnp.where(tied_fraction > _TIES, 0.0, shortest)
    squares = jnp.where(is_apart, squares, replacement)

    logs = 0.5 * dimension * jnp.log(squares) + log_volume - digamma(ranks)[None, None]
    weighted = jnp.sum(weights[None, None] * logs, 2)
    return weighted + jnp.log(sizes - 1)


def _estimate(
    terms: Array,
    groups: int = 1,
    *,
    low: float = -math.inf,
    high: float | Array = math.inf,
    enough: bool | Array,
) -> Estimate:
    """Return the estimate from terms [levels, n].

    It is reliable below `high` and above `low` less three errors.
    """
    number = terms.shape[1]
    value = jnp.mean(terms[0])
    error = jnp.std(terms[0]) / number**0.5
    reliable = jnp.isfinite(value) & (value < high) & enough
    if groups > 1:
        # Terms of neighbouring samples depend on each other, so groups may vary more than the terms
        # suggest.
        group = np.arange(number) % groups
        totals = jnp.zeros(groups, terms.dtype)
        totals = totals.at[group].add(terms[-1])
        means = totals / np.bincount(group)
        error = jnp.maximum(error, jnp.std(means, ddof=1) / groups**0.5)

        # Twice the samples add log 2 to the infinite information of a relation without noise,
        # hardly three errors.
        growth = value - jnp.mean(terms[1])
        is_large = value > 0.5 * math.log(number)
        is_large = (growth > 0) & is_large & math.isfinite(low)
        num_errors = jnp.where(is_large, 2, 3)
        reliable = reliable & (jnp.abs(growth) <= num_errors * error)
    reliable = reliable & (value >= low - 3 * error)
    return _where(reliable, value, error)
