"""Compare two spectra by rank, by matching and as whole forms."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from scipy import stats

from dissociation._core.checks import check_count, fail, is_traced
from dissociation._core.linalg import product
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.bilinear._forms import Spectrum, check_single, truncate


def overlaps(a: Spectrum, b: Spectrum) -> Float[Array, "outputs components_a components_b"]:
    """Return |cosine| of all pairs of components of two spectra, by output."""
    check_single("a", a)
    check_single("b", b)
    if None not in (a.space, b.space) and a.space != b.space:
        fail("b", f"be in the space of `a`, {a.space!r}", repr(b.space))
    if a.constant != b.constant:
        fail("b", f"have `constant={a.constant}`, as `a` has", b.constant)
    size_a = a.vectors.shape[::2]
    size_b = b.vectors.shape[::2]
    if size_a != size_b:
        fail("b", f"have outputs and width of `a`, {size_a}", size_b)
    return jnp.abs(product(a.vectors, b.vectors.swapaxes(1, 2)))


@validated
def rank_similarity(a: Spectrum, b: Spectrum) -> Float[Array, "outputs components"]:
    """Return |cosine| of equally ranked components, as many as both have.

    Two components that swap ranks have no similarity; see `matched_similarity`.

    Args:
        a: One spectrum.
        b: Another, in the same order.

    Returns:
        Numbers from 0 to 1; sqrt(2 / (pi d)) on average for random directions in d dimensions.

    References:
        Pearce et al. (2024), section 4.2.
    """
    return jnp.diagonal(overlaps(a, b), axis1=1, axis2=2)


@validated
def matched_similarity(
    a: Spectrum, b: Spectrum, num_components: int
) -> Float[Array, "outputs components"]:
    """Return |cosine| under the one-to-one matching of leading components that maximises its sum.

    Args:
        a: One spectrum, whose order the result has.
        b: Another.
        num_components: Number of leading components of each, at most all.

    References:
        Kuhn (1955), The Hungarian method for the assignment problem.
    """
    count = check_count("num_components", num_components, minimum=1)
    leading_a = truncate(a, count)
    leading_b = truncate(b, count)
    return _matched(overlaps(leading_a, leading_b))


@jax.jit
def _matched(similarity: Array) -> Array:
    """Return the similarity of matched components, [outputs, components]."""

    def match(table: Array) -> Array:
        rows, columns = optax.assignment.hungarian_algorithm(-table)
        zeros = jnp.zeros(table.shape[0], table.dtype)
        return zeros.at[rows].set(table[rows, columns])

    return jax.vmap(match)(similarity)


@validated
def form_similarity(a: Spectrum, b: Spectrum) -> Float[Array, " outputs"]:
    """Return the signed cosine of whole forms.

    Their inner product is <Q_a, Q_b> = sum_ij lambda_i mu_j (v_i . w_j)^2.

    Args:
        a: One spectrum.
        b: Another.
    """
    squares = overlaps(a, b) ** 2
    inner = jnp.einsum("oi,oij,oj->o", a.values, squares, b.values, precision="highest")
    norm_a = jnp.linalg.norm(a.values, axis=1)
    norm_b = jnp.linalg.norm(b.values, axis=1)
    return inner / (norm_a * norm_b)


def member_pairs(num_members: int, other: int | None = None) -> np.ndarray:
    """Return first and second indices of all pairs of members, [2, pairs].

    Pairs are within one ensemble of `num_members`, or between it and a second one of `other`.
    """
    if other is None:
        return np.stack(np.triu_indices(num_members, 1))
    return np.indices((num_members, other)).reshape(2, -1)


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    mean: Array
    low: Array
    high: Array

    __repr__ = printed


def student_interval(samples: Array | np.ndarray) -> Interval:
    """Return Student's 90 % interval for the mean of independent samples [n, ...]; NaN for one."""
    count = samples.shape[0]
    mean = jnp.mean(samples, 0)
    quantile = float(stats.t.ppf(0.95, count - 1))
    margin = quantile * jnp.std(samples, axis=0, ddof=1) / count**0.5
    return Interval(mean, mean - margin, mean + margin)


def bootstrap_interval(
    statistic: Callable[[Array], Array],
    groups: tuple[int, ...],
    *,
    key: PRNGKey,
    level: float = 0.9,
    num_resamples: int = 1000,
) -> Interval:
    """Return `statistic` of unit member weights with its percentile interval.

    The interval is over members that are resampled in each group.
    """

    def resample(key: Array, count: int) -> Array:
        drawn = jax.random.randint(key, (num_resamples, count), 0, count)
        counts = jax.vmap(lambda row: jnp.bincount(row, length=count))(drawn)
        return counts.astype(float)

    # Pairs share members, so members are drawn. A weight is how often a member was drawn, and a
    # pair weighs the product of its two (Efron and Tibshirani, 1993, An introduction to the
    # bootstrap, section 13.3).
    group_weights = []
    for index, count in enumerate(groups):
        group_key = jax.random.fold_in(key, index)
        group_weights.append(resample(group_key, count))
    weights = jnp.concatenate(group_weights, 1)
    values = jax.vmap(statistic)(weights)
    quantiles = jnp.asarray([0.5 - 0.5 * level, 0.5 + 0.5 * level])
    low, high = jnp.nanquantile(values, quantiles, axis=0)

    # Resamples without the member whose values are undefined must not bound an undefined mean.
    mean = statistic(jnp.ones(weights.shape[1]))
    is_undefined = jnp.isnan(mean)
    low = jnp.where(is_undefined, jnp.nan, low)
    high = jnp.where(is_undefined, jnp.nan, high)
    return Interval(mean, low, high)


@validated
def pair_mean(
    values: Float[Array | np.ndarray, "pairs *rest"],
    first: Int[Array | np.ndarray, " pairs"],
    second: Int[Array | np.ndarray, " pairs"],
) -> Callable[[Array], Array]:
    """Return the mean over pairs as a function of members' weights, for `bootstrap_interval`.

    Args:
        values: A value per pair.
        first: One member of each pair, as from `member_pairs`.
        second: The other member of each pair.

    Returns:
        A function of weights. It returns NaN if weights leave no pair, and raises `ValueError` if
        there are fewer weights than members.

    Raises:
        ValueError: If lengths differ, or an index is negative.
    """
    table = jnp.asarray(values)
    concrete_indices = {}
    for name, members in (("first", first), ("second", second)):
        if not is_traced(members):
            concrete_indices[name] = np.asarray(members)
    for name, members in concrete_indices.items():
        if members.min() < 0:
            fail(name, "hold members counted from 0", members.min())

    def mean(weights: Array) -> Array:
        num_weights = weights.shape[0]
        for name, members in concrete_indices.items():
            largest = members.max()
            if largest >= num_weights:
                fail(name, f"hold members below {num_weights}, the number of weights", largest)

        # A traced index that is out of range would be clamped.
        def weights_of(members: Array | np.ndarray) -> Array:
            return weights.at[jnp.asarray(members)].get(mode="fill", fill_value=jnp.nan)

        pair_weights = weights_of(first) * weights_of(second)
        return jnp.tensordot(pair_weights, table, 1) / jnp.sum(pair_weights)

    return mean
