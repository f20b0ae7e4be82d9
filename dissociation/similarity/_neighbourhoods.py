"""Agreement of the nearest neighbours of samples, by the cosine of rows."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_count, fail
from dissociation._core.distances import cosine_distances_with_size
from dissociation._core.ties import ROUNDINGS
from dissociation._core.validation import validated
from dissociation.similarity._base import Features, Form, OtherFeatures, Prepared, Score, evaluate, inner, inner_mean


def memberships(x: Array, num_neighbours: int) -> Array:
    """Return the memberships of samples j among the k nearest of i, [n, n]. Ties share the last places in fractions."""
    number = x.shape[0]
    if num_neighbours >= number:
        fail("num_neighbours", f"be below the number of samples ({number})", num_neighbours)
    distances, size = cosine_distances_with_size(x, by_order=True)
    rounding = ROUNDINGS * jnp.finfo(x.dtype).eps * size
    # A sample is not a neighbour of itself.
    distances = jnp.where(jnp.eye(number, dtype=bool), jnp.inf, distances)
    last = -lax.top_k(-distances, num_neighbours)[0][:, -1:]
    above, tied = distances < last - rounding, jnp.abs(distances - last) <= rounding
    # Ties broken by the order of samples would agree in both representations.
    share = (num_neighbours - jnp.sum(above, 1, keepdims=True)) / jnp.sum(tied, 1, keepdims=True)
    return jnp.where(above, 1.0, jnp.where(tied, share.astype(x.dtype), 0.0))


def _scaled(x: Array, num_neighbours: int) -> Prepared:
    number = jnp.asarray(x.shape[0], x.dtype)
    entries = memberships(x, num_neighbours) / jnp.sqrt(number * num_neighbours)
    return Prepared(entries, jnp.sqrt(num_neighbours / (number - 1)))


def _jaccard(a: Array, b: Array) -> Array:
    common = jnp.sum(a * b, 1)
    return jnp.mean(common / (jnp.sum(a, 1) + jnp.sum(b, 1) - common))


def mutual_knn_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    return Form(eqx.Partial(_scaled, num_neighbours=count), inner, inner_mean, minimum=count + 1)


def knn_jaccard_form(*, num_neighbours: int = 10) -> Form:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    return Form(eqx.Partial(memberships, num_neighbours=count), _jaccard, minimum=count + 1)


@validated(finite=("x", "y"))
def mutual_knn(x: Features, y: OtherFeatures, *, num_neighbours: int = 10) -> Score:
    """Return the mean fraction of common samples among the k nearest neighbours; by chance k / (n - 1).

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        num_neighbours: Neighbours k, below n, by the cosine of rows about the origin, without the sample
            itself. Samples at equal cosines share the last places.

    Returns:
        Similarity from 0 to 1; below 1 for x with itself if rows are tied, as rows of zeros are. Its derivative is
        zero.

    Raises:
        ValueError: If the numbers of samples differ or `num_neighbours` is out of range.

    References:
        Huh, Cheung, Wang and Isola (2024), The platonic representation hypothesis, appendix A.
    """
    return evaluate(mutual_knn_form(num_neighbours=num_neighbours), x, y)


@validated(finite=("x", "y"))
def knn_jaccard(x: Features, y: OtherFeatures, *, num_neighbours: int = 10) -> Score:
    """Return the mean Jaccard index |A & B| / |A | B| of the sets of k nearest neighbours.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        num_neighbours: Neighbours k, below n, as in `mutual_knn`.

    Returns:
        Similarity from 0 to 1, as for `mutual_knn`.

    Raises:
        ValueError: As `mutual_knn`.

    References:
        Wang, Rudolph, Borgeaud and Hamilton (2022), Towards understanding the instability of network embedding;
        Klabunde et al. (2024), ReSi: a comprehensive benchmark for representational similarity measures.
    """
    return evaluate(knn_jaccard_form(num_neighbours=num_neighbours), x, y)
