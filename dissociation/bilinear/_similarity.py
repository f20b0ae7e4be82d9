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
    if a.vectors.shape[::2] != b.vectors.shape[::2]:
        fail("b", f"have outputs and width of `a`, {a.vectors.shape[::2]}", b.vectors.shape[::2])
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
    return _matched(overlaps(truncate(a, count), truncate(b, count)))


@jax.jit
def _matched(similarity: Array) -> Array:
    def match(table: Array) -> Array:
        rows, columns = optax.assignment.hungarian_algorithm(-table)
        return jnp.zeros(table.shape[0], table.dtype).at[rows].set(table[rows, columns])

    return jax.vmap(match)(similarity)


@validated
def form_similarity(a: Spectrum, b: Spectrum) -> Float[Array, " outputs"]:
    """Return the signed cosine of whole forms, with <Q_a, Q_b> = sum_ij lambda_i mu_j (v_i . w_j)^2.

    Args:
        a: One spectrum.
        b: Another.
    """
    inner = jnp.einsum("oi,oij,oj->o", a.values, overlaps(a, b) ** 2, b.values, precision="highest")
    return inner / (jnp.linalg.norm(a.values, axis=1) * jnp.linalg.norm(b.values, axis=1))


def member_pairs(num_members: int, other: int | None = None) -> np.ndarray:
    """Return first and second indices of all pairs, [2, pairs]: within one ensemble, or with `other` between two."""
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
    count, mean = samples.shape[0], jnp.mean(samples, 0)
    half = float(stats.t.ppf(0.95, count - 1)) * jnp.std(samples, axis=0, ddof=1) / count**0.5
    return Interval(mean, mean - half, mean + half)


def bootstrap_interval(
    statistic: Callable[[Array], Array],
    groups: tuple[int, ...],
    *,
    key: PRNGKey,
    level: float = 0.9,
    num_resamples: int = 1000,
) -> Interval:
    """Return `statistic` of unit member weights with its percentile interval over members resampled in each group."""

    def resample(key: Array, count: int) -> Array:
        drawn = jax.random.randint(key, (num_resamples, count), 0, count)
        return jax.vmap(lambda row: jnp.bincount(row, length=count))(drawn).astype(float)

    weights = [
        resample(jax.random.fold_in(key, index), count) for index, count in enumerate(groups)
    ]
    # Pairs share members, so members are drawn. A weight is how often a member was drawn, and a
    # pair weighs the product of its two (Efron and Tibshirani, 1993, An introduction to the
    # bootstrap, section 13.3).
    weights = jnp.concatenate(weights, 1)
    values = jax.vmap(statistic)(weights)
    low, high = jnp.nanquantile(values, jnp.asarray([0.5 - 0.5 * level, 0.5 + 0.5 * level]), axis=0)
    mean = statistic(jnp.ones(weights.shape[1]))
    # Resamples without the member whose values are undefined must not bound an undefined mean.
    return Interval(mean, *(jnp.where(jnp.isnan(mean), jnp.nan, end) for end in (low, high)))


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
    table, pairs = jnp.asarray(values), {"first": first, "second": second}
    known = {name: np.asarray(members) for name, members in pairs.items() if not is_traced(members)}
    for name, members in known.items():
        if members.min() < 0:
            fail(name, "hold members counted from 0", members.min())

    def mean(weights: Array) -> Array:
        for name, members in known.items():
            if members.max() >= weights.shape[0]:
                fail(
                    name,
                    f"hold members below {weights.shape[0]}, the number of weights",
                    members.max(),
                )
        # A traced index that is out of range would be clamped.
        chosen = [
            weights.at[jnp.asarray(members)].get(mode="fill", fill_value=jnp.nan)
            for members in pairs.values()
        ]
        pair_weights = chosen[0] * chosen[1]
        return jnp.tensordot(pair_weights, table, 1) / jnp.sum(pair_weights)

    return mean
