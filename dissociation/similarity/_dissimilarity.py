"""Agreement of dissimilarities of samples (RDMs) and of their nearest neighbours."""

from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, fail
from dissociation._core.conversion import to_device
from dissociation._core.distances import (
    cosine_distances_with_size,
    median,
    root,
    squared_distances_with_size,
)
from dissociation._core.linalg import centre, product, psd_power
from dissociation._core.rounding_ties import ROUNDINGS, ranks, snapped
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Prepared, Score

Dissimilarities = Float[Array | np.ndarray, " pairs"]

RDMS = ("euclidean", "squared", "correlation", "cosine")
"""Distances of rows, or one minus correlations or cosines.

Correlations and cosines are 0 for rows without variance or length.
"""

# Dissimilarities are not negative, so cosines of unrelated data are 0.5 and more.
COMPARISONS = ("pearson", "spearman", "kendall", "cosine")
"""Correlation of the entries or of their ranks, Kendall's tau-a, and cosine.

Ties share the mean rank.
"""

RANKED = ("spearman", "kendall")
"""Comparisons that depend on the order of the entries alone."""


def _with_size(x: Array, kind: str, *, by_order: bool = False) -> tuple[Array, Array]:
    """Return dissimilarities, squared if "euclidean", and the magnitudes of their rounding."""
    if kind in ("euclidean", "squared"):
        return squared_distances_with_size(x, by_order=by_order)
    if kind == "cosine":
        return cosine_distances_with_size(x, by_order=by_order)

    rows, scale = base.centred(x.T)
    distances, size = cosine_distances_with_size(rows.T, by_order=by_order)
    lengths = root(jnp.sum(rows**2, 0))
    raw_lengths = root(jnp.sum((x / scale) ** 2, 1))
    ratio = raw_lengths / jnp.where(lengths > 0, lengths, 1.0)
    # The rounding of a row is that of its mean, too.
    lost = jnp.where(lengths > 0, ratio, 1.0)
    return distances, size * (1 + lost[:, None] + lost[None])


def entries(matrix: Array) -> Array:
    """Return the pairs i < j of a square matrix, in the order of SciPy's `squareform`."""
    return matrix[np.triu_indices(len(matrix), 1)]


def _kendall(a: Prepared, b: Prepared) -> Array:
    """Return Kendall's tau-a: concordant minus discordant pairs over all pairs."""
    number = len(a.entries)
    # Infinite entries do not count. They come last in both.
    is_infinite = jnp.isinf(a.entries)
    num_infinite = jnp.sum(is_infinite).astype(a.entries.dtype)
    order = jnp.lexsort((b.entries, a.entries))
    x = a.entries[order]
    y = b.entries[order]

    sorted_y = jnp.sort(y)
    repeats_x = x[1:] == x[:-1]
    repeats_both = repeats_x & (y[1:] == y[:-1])
    tied_both = _pairs_in_runs(repeats_both)
    tied_x = _pairs_in_runs(repeats_x)
    tied_y = _pairs_in_runs(sorted_y[1:] == sorted_y[:-1])

    rank = jnp.searchsorted(sorted_y, y)  # how many are below
    num_bits = max(number - 1, 1).bit_length()
    below = jnp.searchsorted(jnp.sort(rank), jnp.arange(1 << num_bits))

    # Sorted by x, a pair is discordant if y falls. Such pairs are counted by the bits of y's dense
    # rank: a one before a zero among values with the same higher bits.
    def count_level(index, carry):
        discordant, values = carry
        shift = num_bits - 1 - index
        prefix = values >> shift
        bit = prefix & 1
        group = prefix // 2
        start = below[group << (shift + 1)]
        ones = jnp.cumsum(bit) - bit
        ones -= ones[start]  # before this entry, in its group
        zeros = jnp.arange(number) - start - ones
        destination = jnp.where(bit == 1, ones, zeros) + below[prefix << shift]
        fallen = jnp.where(bit == 0, ones.astype(x.dtype), 0.0)
        reordered = jnp.zeros_like(values).at[destination].set(values)
        return discordant + jnp.sum(fallen), reordered

    initial = (jnp.zeros((), x.dtype), rank)
    discordant, _ = lax.fori_loop(0, num_bits, count_level, initial)
    total = 0.5 * number * (number - 1)
    num_finite = number - num_infinite
    agreement = total - tied_x - tied_y + tied_both - 2 * discordant - num_infinite * num_finite
    return agreement / (0.5 * num_finite * (num_finite - 1))


def _pairs_in_runs(repeats: Array) -> Array:
    """Return the number of pairs within runs, from flags of repeated values."""
    positions = jnp.arange(len(repeats) + 1)
    is_repeat = jnp.concatenate([jnp.zeros(1, bool), repeats])
    starts = lax.cummax(jnp.where(is_repeat, 0, positions))
    preceding = positions - starts
    return jnp.sum(preceding.astype(jnp.result_type(float)))


def _prepared_pairs(
    pairs: Array, comparison: str, size: Array, among: Array | None = None
) -> Prepared:
    """Return prepared dissimilarities, or those `among` them, with rounding by their `size`."""
    if comparison in RANKED:
        if among is not None:
            pairs = jnp.where(among, pairs, jnp.inf)
        order = ranks if comparison == "spearman" else snapped
        pairs = order(pairs, size)
    if comparison in ("pearson", "spearman"):
        centred = pairs - jnp.mean(pairs, where=among)
        pairs = base.apart_from_rounding(centred, pairs)
    if comparison != "kendall":
        if among is not None:
            pairs = jnp.where(among, pairs, 0.0)
        pairs = base.unit(pairs)
    # An order of samples is an order of pairs.
    return Prepared(pairs, jnp.sum(pairs) * pairs.size**-0.5)


def _apart(groups: Array | None) -> Array | None:
    """Return True for the pairs i < j of two groups."""
    if groups is None:
        return None
    return entries(groups[:, None] != groups[None])


def _prepared(x: Array, groups: Array | None = None, *, kind: str, comparison: str) -> Prepared:
    """Return the prepared RDM of a representation."""
    x, _ = base.scaled(x)  # no comparison depends on the scale
    is_ranked = comparison in RANKED
    distances, sizes = _with_size(x, kind, by_order=is_ranked)
    pairs = entries(distances)
    # Squares have the same order, and rounding of one size.
    if kind == "euclidean" and not is_ranked:
        pairs = root(pairs)
    return _prepared_pairs(pairs, comparison, entries(sizes), _apart(groups))


def rsa_form(*, rdm: str = "euclidean", comparison: str = "pearson") -> Form:
    check_choice("rdm", rdm, RDMS)
    prepare = eqx.Partial(_prepared, kind=rdm, comparison=comparison)
    return _form_of(prepare, comparison, minimum=3)


def _form_of(prepare: Callable[[Array], Prepared], comparison: str, minimum: int = 2) -> Form:
    """Return the form of a comparison of prepared dissimilarities."""
    check_choice("comparison", comparison, COMPARISONS)
    form = Form(prepare, base.inner, base.inner_mean, minimum=minimum)
    if comparison == "kendall":
        form = form._replace(compare=_kendall, expected=None)
    apart = form._replace(expected=None, minimum=min(minimum, 3), labels=np.arange, outside=1)
    return form._replace(apart=apart)


@validated(finite=("x",))
@partial(jax.jit, static_argnames="kind")
def rdm(x: Features, kind: str = "euclidean") -> Float[Array, " pairs"]:
    """Return the dissimilarities of all pairs of samples.

    Args:
        x: Features, [n, p].
        kind: "euclidean", "squared", "correlation" or "cosine".

    Returns:
        Dissimilarities of pairs i < j in the order of SciPy's `squareform`, [n (n - 1) / 2].
        Euclidean distances have the unit of x.

    Raises:
        ValueError: If there is only one sample, or `kind` is unknown.

    References:
        Kriegeskorte, Mur and Bandettini (2008), Representational similarity analysis.

    Example:
        >>> rdm(jnp.array([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]]))
        Array([5., 8., 5.], dtype=float32)
    """
    check_choice("kind", kind, RDMS)
    if len(x) < 2:
        fail("x", "have at least 2 samples", len(x))
    x = base.in_common_dtype(x)[0]
    x, scale = base.scaled(x)
    distances, _ = _with_size(x, kind)
    pairs = entries(distances)
    if kind == "euclidean":
        return scale * root(pairs)
    if kind == "squared":
        return scale**2 * pairs
    return pairs


@validated(finite=("a", "b"))
def compare_rdms(a: Dissimilarities, b: Dissimilarities, comparison: str = "pearson") -> Score:
    """Return the agreement of two RDMs.

    Args:
        a: Dissimilarities of pairs of samples. For ranks, entries within 32 rounding units of the
            median's size (4e-6 of it in float32) are ties.
        b: Dissimilarities of the same pairs.
        comparison: "pearson", "spearman", "kendall" or "cosine".

    Returns:
        Agreement from -1 to 1.

    Raises:
        ValueError: If lengths differ or `comparison` is unknown.

    References:
        Nili et al. (2014), A toolbox for representational similarity analysis.
    """
    prepare = eqx.Partial(_prepared_alone, comparison=comparison)
    form = _form_of(prepare, comparison)
    a, b = base.in_common_dtype(a, b)
    return base.compared(form, a, b)


def _prepared_alone(pairs: Array, comparison: str) -> Prepared:
    """Return the prepared entries of an RDM, whose rounding is at least that of the median."""
    pairs, _ = base.scaled(pairs)
    sizes = jnp.abs(pairs)
    # Small entries may result from a subtraction.
    size = 0.5 * jnp.maximum(sizes, median(sizes))
    return _prepared_pairs(pairs, comparison, size)


@validated(finite=("x", "y"))
def rsa(
    x: Features, y: OtherFeatures, *, rdm: str = "euclidean", comparison: str = "pearson"
) -> Score:
    """Return the agreement of two representations' RDMs.

    RDMs are invariant under rotation and translation ("euclidean", "squared"), rotation and scale
    ("cosine"), or permutation and scale ("correlation"). Comparisons ignore the scale of an RDM.

    Args:
        x: Features, [n, p], at least 3 samples.
        y: Features, [n, q].
        rdm: "euclidean", "squared", "correlation" or "cosine".
        comparison: "pearson", "spearman", "kendall" or "cosine".

    Returns:
        Agreement from -1 to 1, non-negative for the cosine; NaN if all dissimilarities are equal.

    Raises:
        ValueError: If the numbers of samples differ or are below 3, or an option is unknown.

    References:
        Kriegeskorte et al. (2008); Nili et al. (2014).
    """
    return base.evaluate(rsa_form(rdm=rdm, comparison=comparison), x, y)


@validated(finite=("a", "b", "noise_covariance"))
def crossnobis_rdm(
    a: Features, b: Features, noise_covariance: Float[Array | np.ndarray, "p p"] | None = None
) -> Float[Array, " pairs"]:
    """Return cross-validated squared Mahalanobis distances (a_i - a_j)^T S^-1 (b_i - b_j) / p.

    The distances are unbiased, so they may be negative by chance.

    Args:
        a: One measurement of n conditions, [n, p].
        b: Independent measurement of the same conditions and neurons, [n, p].
        noise_covariance: Noise covariance S, [p, p], perhaps singular; default identity.

    Returns:
        Distances of pairs i < j, [n (n - 1) / 2].

    Raises:
        ValueError: If shapes differ.

    References:
        Walther et al. (2016), Reliability of dissimilarity measures for multi-voxel pattern
        analysis.
    """
    if len(a) < 2:
        fail("a", "have at least 2 samples", len(a))
    a, b = base.in_common_dtype(a, b)
    if noise_covariance is not None:
        noise_covariance = to_device(noise_covariance, b.dtype)
    return _crossnobis(a, b, noise_covariance)


@jax.jit
def _crossnobis(a: Array, b: Array, noise_covariance: Array | None) -> Array:
    if noise_covariance is not None:
        a = centre(a)
        b = product(centre(b), psd_power(noise_covariance, -1))
    return entries(_crossed(a, b))


def _crossed(a: Array, b: Array) -> Array:
    """Return the crossnobis distances of two measurements, [n, n]."""
    # Errors of independent measurements do not add up in products, so these distances are unbiased.
    a = centre(a)
    b = centre(b)
    products = product(a, b.T)
    squares = jnp.diagonal(products)
    distances = squares[:, None] + squares[None] - products - products.T
    return distances / a.shape[1]


def _length_sums(rows: Array) -> Array:
    """Return the sum of lengths of each pair of rows, [n, n]."""
    lengths = root(jnp.sum(rows**2, 1))
    return lengths[:, None] + lengths[None]


def _crossed_halves(x: Array, groups: Array | None = None, *, comparison: str) -> Prepared:
    """Return the prepared crossnobis RDM of the two halves of the rows."""
    half = len(x) // 2
    rows, scale = base.centred(x)
    pairs = entries(_crossed(rows[:half], rows[half:]))

    a = _length_sums(rows[:half])
    b = _length_sums(rows[half:])
    raw_a = _length_sums(x[:half] / scale)
    raw_b = _length_sums(x[half:] / scale)
    mixed = a * raw_b + raw_a * b
    size = (a * b / 4 + mixed / 32) / x.shape[1]
    if groups is not None:
        groups = groups[:half]
    return _prepared_pairs(pairs, comparison, entries(size), _apart(groups))


def crossnobis_rsa_form(*, comparison: str = "cosine") -> Form:
    prepare = eqx.Partial(_crossed_halves, comparison=comparison)
    return _form_of(prepare, comparison, minimum=6)


@validated(finite=("x", "y"))
def crossnobis_rsa(x: Features, y: OtherFeatures, *, comparison: str = "cosine") -> Score:
    """Return the agreement of cross-validated RDMs of representations that were measured twice.

    Both halves of the rows measure the same n conditions in the same order.

    Args:
        x: Features, [2 n, p], n at least 3.
        y: Features, [2 n, q].
        comparison: "pearson", "spearman", "kendall" or "cosine". The cosine of unbiased RDMs is not
            driven by noise.

    Returns:
        Agreement from -1 to 1.

    Raises:
        ValueError: If the numbers of rows differ, are odd or below 6, or `comparison` is unknown.

    References:
        Walther et al. (2016).
    """
    if len(x) % 2:
        fail("x", "have an even number of rows, two measurements of all conditions", len(x))
    return base.evaluate(crossnobis_rsa_form(comparison=comparison), x, y)


def memberships(x: Array, groups: Array | None = None, *, num_neighbours: int) -> Array:
    """Return the memberships [n, n] of samples j among the k nearest of i.

    Neighbours are of other groups than i. Ties share the last places in fractions.
    """
    distances, size = cosine_distances_with_size(x, by_order=True)
    rounding = ROUNDINGS * jnp.finfo(x.dtype).eps * size
    is_within = jnp.eye(len(x), dtype=bool)  # a sample is not a neighbour of itself
    if groups is not None:
        is_within = groups[:, None] == groups[None]
    distances = jnp.where(is_within, jnp.inf, distances)

    nearest, _ = lax.top_k(-distances, num_neighbours)
    limit = -nearest[:, -1:]
    is_nearer = distances < limit - rounding
    is_tied = jnp.abs(distances - limit) <= rounding
    # Ties broken by the order of samples would agree in both representations.
    num_open = num_neighbours - jnp.sum(is_nearer, 1, keepdims=True)
    share = num_open / jnp.sum(is_tied, 1, keepdims=True)
    fractions = jnp.where(is_tied, share.astype(x.dtype), 0.0)
    return jnp.where(is_nearer, 1.0, fractions)


def _unit_memberships(x: Array, groups: Array | None = None, *, num_neighbours: int) -> Prepared:
    """Return memberships of norm 1."""
    number = jnp.asarray(len(x), x.dtype)
    norm = jnp.sqrt(number * num_neighbours)
    entries = memberships(x, groups, num_neighbours=num_neighbours) / norm
    return Prepared(entries, jnp.sqrt(num_neighbours / (number - 1)))


def _jaccard(a: Array, b: Array) -> Array:
    common = jnp.sum(a * b, 1)
    union = jnp.sum(a, 1) + jnp.sum(b, 1) - common
    return jnp.mean(common / union)


def mutual_knn_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    prepare = eqx.Partial(_unit_memberships, num_neighbours=count)
    form = Form(prepare, base.inner, base.inner_mean, minimum=count + 1)
    return _with_groups(form, count)


def knn_jaccard_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    prepare = eqx.Partial(memberships, num_neighbours=count)
    form = Form(prepare, _jaccard, minimum=count + 1)
    return _with_groups(form, count)


def _with_groups(form: Form, count: int) -> Form:
    """Return the form with its form for samples in groups."""
    apart = form._replace(expected=None, minimum=2, labels=np.arange, outside=count)
    return form._replace(apart=apart)


@validated(finite=("x", "y"))
def mutual_knn(x: Features, y: OtherFeatures, *, num_neighbours: int = 10) -> Score:
    """Return the mean fraction of common samples among the k nearest neighbours.

    By chance it is k / (n - 1).

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        num_neighbours: Neighbours k, below n, by the cosine of rows about the origin, without the
            sample itself. Samples at equal cosines share the last places.

    Returns:
        Similarity from 0 to 1; below 1 for x with itself if rows are tied, as rows of zeros are.
        Its derivative is zero.

    Raises:
        ValueError: If the numbers of samples differ or `num_neighbours` is out of range.

    References:
        Huh, Cheung, Wang and Isola (2024), The platonic representation hypothesis, appendix A.
    """
    return base.evaluate(mutual_knn_form(num_neighbours=num_neighbours), x, y)


@validated(finite=("x", "y"))
def knn_jaccard(x: Features, y: OtherFeatures, *, num_neighbours: int = 10) -> Score:
    """Return the mean Jaccard index |A & B| / |A | B| of the sets of k nearest neighbours.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        num_neighbours: Neighbours k, below n, as in `mutual_knn`.

    Returns:
        Similarity from 0 to 1, as for `mutual_knn`.

    References:
        Wang, Rudolph, Borgeaud and Hamilton (2022), Towards understanding the instability of
        network embedding; Klabunde et al. (2024), ReSi: a comprehensive benchmark for
        representational similarity measures.
    """
    return base.evaluate(knn_jaccard_form(num_neighbours=num_neighbours), x, y)
