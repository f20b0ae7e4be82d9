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
from dissociation._core.ties import ROUNDINGS, ranks, snapped
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Prepared, Score

Dissimilarities = Float[Array | np.ndarray, " pairs"]

RDMS = ("euclidean", "squared", "correlation", "cosine")
"""Distances of rows, or one minus correlations or cosines (0 for rows without variance or length)."""

# Dissimilarities are not negative, so cosines of unrelated data are 0.5 and more.
COMPARISONS = ("pearson", "spearman", "kendall", "cosine")
"""Correlation of the entries or of their ranks (ties share the mean rank), Kendall's tau-a, and cosine."""

RANKED = ("spearman", "kendall")
"""Comparisons that depend on the order of the entries alone."""


def _with_size(x: Array, kind: str, *, by_order: bool = False) -> tuple[Array, Array]:
    """Return dissimilarities, squared if "euclidean", and the magnitudes whose rounding they carry."""
    if kind in ("euclidean", "squared"):
        return squared_distances_with_size(x, by_order=by_order)
    if kind == "cosine":
        return cosine_distances_with_size(x, by_order=by_order)
    rows, scale = base.centred(x.T)
    distances, size = cosine_distances_with_size(rows.T, by_order=by_order)
    lengths = root(jnp.sum(rows**2, 0))
    lost = jnp.where(
        lengths > 0, root(jnp.sum((x / scale) ** 2, 1)) / jnp.where(lengths > 0, lengths, 1.0), 1.0
    )
    return distances, size * (
        1 + lost[:, None] + lost[None]
    )  # a row's rounding is that of its mean, too


def entries(matrix: Array) -> Array:
    """Return the pairs i < j of a square matrix, in the order of SciPy's `squareform`."""
    return matrix[np.triu_indices(matrix.shape[0], 1)]


def _kendall(one: Prepared, other: Prepared) -> Array:
    """Return Kendall's tau-a: concordant minus discordant pairs over all pairs."""
    number = one.entries.shape[0]
    # Infinite entries do not count. They come last in both.
    left_out = jnp.sum(jnp.isinf(one.entries)).astype(one.entries.dtype)
    order = jnp.lexsort((other.entries, one.entries))
    a, b = one.entries[order], other.entries[order]
    same_a = a[1:] == a[:-1]
    sorted_b = jnp.sort(b)
    runs = same_a & (b[1:] == b[:-1]), same_a, sorted_b[1:] == sorted_b[:-1]
    tied_both, tied_a, tied_b = map(_pairs_in_runs, runs)
    rank = jnp.searchsorted(sorted_b, b)  # how many are below
    bits = max(number - 1, 1).bit_length()
    below = jnp.searchsorted(jnp.sort(rank), jnp.arange(1 << bits))

    # Sorted by a, a pair is discordant if b falls. Such pairs are counted by the bits of b's dense
    # rank: a one before a zero among values with the same higher bits.
    def level(index: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        discordant, values = carry
        shift = bits - 1 - index
        bit, group = (values >> shift) & 1, (values >> shift) // 2
        start = below[group << (shift + 1)]
        ones = jnp.cumsum(bit) - bit
        ones -= ones[start]  # before this one, in its group
        place = (
            jnp.where(bit == 1, ones, jnp.arange(number) - start - ones)
            + below[(values >> shift) << shift]
        )
        fallen = jnp.where(bit == 0, ones.astype(a.dtype), 0.0)
        return discordant + jnp.sum(fallen), jnp.zeros_like(values).at[place].set(values)

    discordant, _ = lax.fori_loop(0, bits, level, (jnp.zeros((), a.dtype), rank))
    total, kept = 0.5 * number * (number - 1), number - left_out
    agreement = total - tied_a - tied_b + tied_both - 2 * discordant - left_out * kept
    return agreement / (0.5 * kept * (kept - 1))


def _pairs_in_runs(same: Array) -> Array:
    """Return the number of pairs within runs, from flags of repeated values."""
    places = jnp.arange(same.shape[0] + 1)
    starts = lax.cummax(jnp.where(jnp.concatenate([jnp.zeros(1, bool), same]), 0, places))
    return jnp.sum((places - starts).astype(jnp.result_type(float)))


def _read(
    pairs: Array, comparison: str, size: Array | None = None, among: Array | None = None
) -> Prepared:
    """Return prepared entries, or those `among` them."""
    if comparison in RANKED:
        if among is not None:
            pairs = jnp.where(among, pairs, jnp.inf)
        pairs = ranks(pairs, size) if comparison == "spearman" else snapped(pairs, size)
    if comparison != "kendall":
        if comparison != "cosine":
            pairs = base.apart_from_rounding(pairs - jnp.mean(pairs, where=among), pairs)
        pairs = base.unit(pairs if among is None else jnp.where(among, pairs, 0.0))
    return Prepared(pairs, jnp.sum(pairs) * pairs.size**-0.5)  # an order of samples is one of pairs


def _apart(groups: Array | None) -> Array | None:
    """Return True for the pairs i < j of two groups."""
    return None if groups is None else entries(groups[:, None] != groups[None])


def _prepared(x: Array, groups: Array | None = None, *, kind: str, comparison: str) -> Prepared:
    x, _ = base.scaled(x)  # no comparison depends on the scale
    pairs, size = (entries(matrix) for matrix in _with_size(x, kind, by_order=comparison in RANKED))
    if (
        kind == "euclidean" and comparison not in RANKED
    ):  # squares have the same order, and rounding of one size
        pairs = root(pairs)
    return _read(pairs, comparison, size, _apart(groups))


def rsa_form(*, rdm: str = "euclidean", comparison: str = "pearson") -> Form:
    check_choice("rdm", rdm, RDMS)
    return _compared(eqx.Partial(_prepared, kind=rdm, comparison=comparison), comparison, minimum=3)


def _compared(prepare: Callable[[Array], Prepared], comparison: str, minimum: int = 2) -> Form:
    check_choice("comparison", comparison, COMPARISONS)
    form = Form(prepare, base.inner, base.inner_mean, minimum=minimum)
    form = form._replace(compare=_kendall, expected=None) if comparison == "kendall" else form
    return form._replace(
        apart=form._replace(expected=None, minimum=min(minimum, 3), labels=np.arange, outside=1)
    )


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
    if x.shape[0] < 2:
        fail("x", "have at least 2 samples", x.shape[0])
    x, scale = base.scaled(base.in_common_dtype(x)[0])
    pairs = entries(_with_size(x, kind)[0])
    if kind in ("cosine", "correlation"):
        return pairs
    return scale * root(pairs) if kind == "euclidean" else scale**2 * pairs


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
    return base.compared(
        _compared(eqx.Partial(_read_alone, comparison=comparison), comparison),
        *base.in_common_dtype(a, b),
    )


def _read_alone(pairs: Array, comparison: str) -> Prepared:
    """Return prepared entries, whose rounding is at least that of the median."""
    pairs, _ = base.scaled(pairs)
    # Small entries may result from a subtraction.
    return _read(pairs, comparison, 0.5 * jnp.maximum(jnp.abs(pairs), median(jnp.abs(pairs))))


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
    if a.shape[0] < 2:
        fail("a", "have at least 2 samples", a.shape[0])
    a, b = base.in_common_dtype(a, b)
    return _crossnobis(
        a, b, None if noise_covariance is None else to_device(noise_covariance, b.dtype)
    )


@jax.jit
def _crossnobis(a: Array, b: Array, noise_covariance: Array | None) -> Array:
    if noise_covariance is not None:
        a, b = centre(a), product(centre(b), psd_power(noise_covariance, -1))
    return entries(_crossed(a, b))


def _crossed(a: Array, b: Array) -> Array:
    # Errors of independent measurements do not add up in products, so these distances are unbiased.
    a, b = centre(a), centre(b)
    inner_products = product(a, b.T)
    own = jnp.diagonal(inner_products)
    return (own[:, None] + own[None] - inner_products - inner_products.T) / a.shape[1]


def _crossed_halves(x: Array, groups: Array | None = None, *, comparison: str) -> Prepared:
    half = x.shape[0] // 2
    rows, scale = base.centred(x)
    sums = [
        root(jnp.sum(part**2, 1))
        for part in (rows[:half], rows[half:], x[:half] / scale, x[half:] / scale)
    ]
    a, b, whole_a, whole_b = (part[:, None] + part[None] for part in sums)
    size = (a * b / 4 + (a * whole_b + whole_a * b) / 32) / x.shape[1]
    among = _apart(None if groups is None else groups[:half])
    return _read(entries(_crossed(rows[:half], rows[half:])), comparison, entries(size), among)


def crossnobis_rsa_form(*, comparison: str = "cosine") -> Form:
    return _compared(eqx.Partial(_crossed_halves, comparison=comparison), comparison, minimum=6)


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
    if x.shape[0] % 2:
        fail("x", "have an even number of rows, two measurements of all conditions", x.shape[0])
    return base.evaluate(crossnobis_rsa_form(comparison=comparison), x, y)


def memberships(x: Array, groups: Array | None = None, *, num_neighbours: int) -> Array:
    """Return the memberships of samples j among the k nearest of i, [n, n], which are of other groups than i.

    Ties share the last places in fractions.
    """
    number = x.shape[0]
    distances, size = cosine_distances_with_size(x, by_order=True)
    rounding = ROUNDINGS * jnp.finfo(x.dtype).eps * size
    # A sample is not a neighbour of itself.
    within = jnp.eye(number, dtype=bool) if groups is None else groups[:, None] == groups[None]
    distances = jnp.where(within, jnp.inf, distances)
    last = -lax.top_k(-distances, num_neighbours)[0][:, -1:]
    above, tied = distances < last - rounding, jnp.abs(distances - last) <= rounding
    # Ties broken by the order of samples would agree in both representations.
    share = (num_neighbours - jnp.sum(above, 1, keepdims=True)) / jnp.sum(tied, 1, keepdims=True)
    return jnp.where(above, 1.0, jnp.where(tied, share.astype(x.dtype), 0.0))


def _unit_memberships(x: Array, groups: Array | None = None, *, num_neighbours: int) -> Prepared:
    number = jnp.asarray(x.shape[0], x.dtype)
    entries = memberships(x, groups, num_neighbours=num_neighbours) / jnp.sqrt(
        number * num_neighbours
    )
    return Prepared(entries, jnp.sqrt(num_neighbours / (number - 1)))


def _jaccard(a: Array, b: Array) -> Array:
    common = jnp.sum(a * b, 1)
    return jnp.mean(common / (jnp.sum(a, 1) + jnp.sum(b, 1) - common))


def mutual_knn_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    form = Form(
        eqx.Partial(_unit_memberships, num_neighbours=count),
        base.inner,
        base.inner_mean,
        minimum=count + 1,
    )
    return _of_neighbours(form, count)


def knn_jaccard_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    return _of_neighbours(
        Form(eqx.Partial(memberships, num_neighbours=count), _jaccard, minimum=count + 1), count
    )


def _of_neighbours(form: Form, count: int) -> Form:
    return form._replace(
        apart=form._replace(expected=None, minimum=2, labels=np.arange, outside=count)
    )


@validated(finite=("x", "y"))
def mutual_knn(x: Features, y: OtherFeatures, *, num_neighbours: int = 10) -> Score:
    """Return the mean fraction of common samples among the k nearest neighbours; by chance k / (n - 1).

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
