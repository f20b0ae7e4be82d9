"""Entropy and mutual information of samples from the distances to their nearest neighbours.

With r_ij the distance from sample i to its j-th neighbour among n in d dimensions and V_d the volume of the unit ball,

    H = (1 / n) sum_i sum_j w_j log(r_ij^d V_d (n - 1) / exp(psi(j))),    sum_j w_j = 1,

the weighted Kozachenko-Leonenko estimator. Its weights cancel the leading terms of the bias in 4 and more dimensions.
Kraskov's estimator of information counts the neighbours of the margins within the joint distance instead, and its
variant for labels those of all classes.

Neighbours come from distances in blocks, so everything runs on any device and maps over members. Differences are taken
coordinate by coordinate: products of coordinates would cancel at the distances that matter here.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jaxtyping import Array, Bool, Float, Int
from scipy.special import gammaln

from dissociation.checks import check_choice, check_count, check_ndim, check_same_length, fail, is_traced
from dissociation.linalg import centre, product

Points = Float[Array | np.ndarray, "n d"]

# Distances per group in the search for the smallest.
_GROUP = 32
# Share of samples that may coincide with a neighbour in rounding before an estimate is called unreliable.
_TIES = 0.01

ESTIMATORS = ("entropies", "kraskov")
"""Differences of entropies, each the weighted Kozachenko-Leonenko one, or Kraskov's estimator."""


class Estimate(eqx.Module):
    """A number of nats.

    Attributes:
        value: The estimate; NaN where it is not `reliable`.
        error: Standard error from the spread of the samples' own terms, which takes them for independent.
        reliable: False where more than 1 % of the samples coincide with neighbours (an entropy is then minus infinity,
            an information infinite; fewer are taken for rounding), where an information comes within 5 % of the most
            that n samples can show (log n, and psi(k) less for Kraskov's estimator), where one about labels is above
            what labels can hold by more than its error, or where there are fewer than 2^d samples in d dimensions,
            those of both sides together for an information.
    """

    value: Float[Array, ""]
    error: Float[Array, ""]
    reliable: Bool[Array, ""]


def neighbour_distances(points: Points, num_neighbours: int, *, block: int = 250) -> Float[Array, "n k"]:
    """Euclidean distances to the nearest other points, rising.

    Args:
        points: [n, d], few dimensions.
        num_neighbours: k, below n.
        block: Points compared at once with all others.

    Returns:
        [n, k].

    Raises:
        ValueError: If there are not more than `num_neighbours` points.
    """
    check_ndim("points", points, 2, "[samples, dimensions]")
    count = _check_neighbours(num_neighbours, points.shape[0])
    squares = _smallest(jnp.asarray(points), jnp.zeros(points.shape[0], int), count, block, _squared)
    return jnp.sqrt(squares)


def entropy_weights(num_neighbours: int, dimension: int) -> Float[np.ndarray, " k"]:
    """The shortest weights over neighbours that sum to 1 and cancel the terms n^(-2 l / d), l = 1 ... floor(d / 4).

    The condition of every term is sum_j w_j Gamma(j + 2 l / d) / Gamma(j) = 0. Below 4 dimensions weights are equal.

    Args:
        num_neighbours: k.
        dimension: d.

    Returns:
        The weights of neighbours 1 to k.

    Raises:
        ValueError: If k is too small for the dimension.

    References:
        Berrett, Samworth and Yuan (2019), Efficient multivariate entropy estimation via k-nearest neighbour distances,
        section 2.
    """
    count, width = (
        check_count("num_neighbours", num_neighbours, minimum=1),
        check_count("dimension", dimension, minimum=1),
    )
    terms = np.arange(width // 4 + 1)
    if len(terms) > count:
        fail("num_neighbours", f"be at least {len(terms)} in {width} dimensions", num_neighbours)
    order = np.arange(1, count + 1)
    conditions = np.exp(gammaln(order[None] + 2 * terms[:, None] / width) - gammaln(order)[None])
    return np.linalg.pinv(conditions)[:, 0]


def entropy(points: Points, *, num_neighbours: int = 5, block: int = 250) -> Estimate:
    """Differential entropy by the weighted Kozachenko-Leonenko estimator.

    Args:
        points: Samples, [n, d].
        num_neighbours: k.
        block: Points compared at once.

    Returns:
        In nats.

    Raises:
        ValueError: If there are too few samples, or neighbours for the dimension.

    Example:
        >>> points = jax.random.normal(jax.random.key(0), (2000, 1))
        >>> found = entropy(points)  # exactly: log(2 pi e) / 2 = 1.419
        >>> bool(jnp.abs(found.value - 1.419) < 3 * found.error)
        True
    """
    terms = _entropy_terms(jnp.asarray(points), num_neighbours, block)
    return _estimate(terms, enough=_enough(*points.shape))


def information(
    x: Float[Array | np.ndarray, "n p"],
    z: Float[Array | np.ndarray, "n d"],
    *,
    estimator: str = "entropies",
    num_neighbours: int = 5,
    block: int = 250,
) -> Estimate:
    """Mutual information I(X; Z) of samples whose rows belong together.

    Coordinates ought to be on one scale: see `whiten`. A deterministic, invertible relation has infinite information;
    add a little noise to one side, and look at shuffled pairs beside it.

    Args:
        x: [n, p].
        z: [n, d]; taken to the dtype of x.
        estimator: "entropies": H(X) + H(Z) - H(X, Z). "kraskov": his first estimator, with the larger of the two
            Euclidean distances.
        num_neighbours: k.
        block: Samples compared at once.

    Returns:
        In nats.

    Raises:
        ValueError: If lengths differ, or an option is out of range.

    References:
        Kozachenko and Leonenko (1987); Berrett, Samworth and Yuan (2019).
        Kraskov, Stoegbauer and Grassberger (2004), Estimating mutual information, eq. 8.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_ndim("x", x, 2, "[samples, dimensions]")
    check_ndim("z", z, 2, "[samples, dimensions]")
    check_same_length("x", x.shape[0], "z", z.shape[0])
    x = jnp.asarray(x)
    z = jnp.asarray(z, x.dtype)
    if estimator == "entropies":
        joint = jnp.concatenate([x, z], 1)
        parts = [_entropy_terms(points, num_neighbours, block) for points in (x, z, joint)]
        return _estimate(parts[0] + parts[1] - parts[2], math.log(x.shape[0]), _enough(*joint.shape))
    number = x.shape[0]
    count = _check_neighbours(num_neighbours, number)
    joint, split = jnp.concatenate([x, z], 1), x.shape[1]

    def larger(a: Array, b: Array) -> Array:
        return jnp.maximum(_squared(a[:, :split], b[:, :split]), _squared(a[:, split:], b[:, split:]))

    same = jnp.zeros(number, int)
    radius = _smallest(joint, same, count, block, larger)[:, -1]
    counts = [_closer(points, radius, block) for points in (x, z)]
    terms = digamma(jnp.asarray(count, x.dtype)) + digamma(jnp.asarray(number, x.dtype))
    terms = terms - sum(digamma(near.astype(x.dtype) + 1) for near in counts)
    terms = jnp.where(jnp.mean(radius > 0) > 1 - _TIES, terms, jnp.inf)
    # With the k neighbours alone within reach of both margins.
    return _estimate(terms, math.log(number) - digamma(jnp.asarray(count, x.dtype)), _enough(*joint.shape))


def label_information(
    z: Points,
    labels: Int[Array | np.ndarray, " n"],
    *,
    num_classes: int,
    estimator: str = "entropies",
    num_neighbours: int = 5,
    block: int = 250,
) -> Estimate:
    """Mutual information I(Z; Y) of samples and their classes.

    Args:
        z: [n, d].
        labels: Classes from 0, [n]; every class that occurs needs more than `num_neighbours` samples. Traced labels
            that are out of range, or of a class with too few, give NaN and `reliable` False.
        num_classes: C.
        estimator: "entropies": H(Z) - sum_c (n_c / n) H(Z | c). "kraskov": the variant for one discrete variable.
        num_neighbours: k.
        block: Samples compared at once.

    Returns:
        In nats, at most H(Y), the entropy of the labels among these samples. Classes that stand apart do reach it:
        there it is the truth, and reliable. An estimate above it is H(Y) as long as finite classes and the error
        explain it, and NaN beyond.

    Raises:
        ValueError: If lengths differ, an option or a label is out of range, or a class has too few samples.

    References:
        Ross (2014), Mutual information between discrete and continuous data sets.
    """
    check_choice("estimator", estimator, ESTIMATORS)
    check_ndim("z", z, 2, "[samples, dimensions]")
    check_same_length("z", z.shape[0], "labels", labels.shape[0])
    number = z.shape[0]
    count, classes = _check_neighbours(num_neighbours, number), check_count("num_classes", num_classes, minimum=1)
    if not is_traced(labels):
        if int(labels.min()) < 0 or int(labels.max()) >= classes:
            fail("labels", f"lie between 0 and {classes - 1}", f"{int(labels.min())} to {int(labels.max())}")
        sizes = np.bincount(np.asarray(labels), minlength=classes)
        small = np.flatnonzero((sizes > 0) & (sizes <= count))
        if len(small):
            fail("labels", f"have more than {count} samples of every class", f"{sizes[small[0]]} of class {small[0]}")
    z, labels = jnp.asarray(z), jnp.asarray(labels)
    sizes = jnp.sum(jax.nn.one_hot(labels, classes, dtype=z.dtype), 0)[labels]
    squares = _smallest(z, labels, count, block, _squared)
    total = jnp.asarray(number, z.dtype)
    # Neighbours of the class that are the neighbours of all: the most that a term can be with equal weights.
    if estimator == "entropies":
        terms = _entropy_terms(z, count, block) - _terms_of_distances(squares, z.shape[1], sizes)
        most = jnp.log((total - 1) / (sizes - 1))
    else:
        radius = squares[:, -1]
        near = _closer(z, radius, block).astype(z.dtype) + 1  # the k-th neighbour of the class, on the rim, counts
        most = digamma(total) - digamma(sizes)
        terms = most + digamma(jnp.asarray(count, z.dtype)) - digamma(near)
        terms = jnp.where(jnp.mean(radius > 0) > 1 - _TIES, terms, jnp.inf)
    terms = jnp.where(jnp.all((labels >= 0) & (labels < classes)), terms, jnp.nan)
    return _capped(_estimate(terms, enough=_enough(*z.shape)), jnp.mean(most), jnp.mean(jnp.log(total / sizes)))


def _capped(found: Estimate, most: Array, entropy: Array) -> Estimate:
    """An information of at most `entropy`; not reliable more than three errors above what the estimator can reach."""
    reliable = found.reliable & (found.value <= most + 3 * found.error + 1e-3)
    value, error = jnp.minimum(found.value, entropy), found.error
    return Estimate(jnp.where(reliable, value, jnp.nan), jnp.where(reliable, error, jnp.nan), reliable)


def whiten(points: Points, num_components: int | None = None, *, rtol: float | None = None) -> Float[Array, "n k"]:
    """Leading principal components, each divided by its standard deviation.

    Args:
        points: [n, d].
        num_components: How many; default d.
        rtol: Components below this share of the largest deviation are zero; default sqrt(d times rounding), below
            which a covariance shows none (0.005 for 200 dimensions in float32).

    Returns:
        [n, num_components], uncorrelated, of variance 1 or 0.

    Raises:
        ValueError: If `num_components` is above the dimension.
    """
    check_ndim("points", points, 2, "[samples, dimensions]")
    width = points.shape[1]
    count = width if num_components is None else check_count("num_components", num_components, minimum=1)
    if count > width:
        fail("num_components", f"be at most the dimension ({width})", num_components)
    points = jnp.asarray(points)
    centred = centre(points)
    values, vectors = jnp.linalg.eigh(product(centred.T, centred) / points.shape[0])
    values, vectors = values[::-1][:count], vectors[:, ::-1][:, :count]
    cutoff = width * float(jnp.finfo(values.dtype).eps) if rtol is None else rtol**2
    kept = values > cutoff * jnp.maximum(values[0], jnp.finfo(values.dtype).tiny)
    scale = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values, 1.0)), 0.0)
    return product(centred, vectors) * scale[None]


def _check_neighbours(num_neighbours: int, number: int) -> int:
    count = check_count("num_neighbours", num_neighbours, minimum=1)
    if count >= number:
        fail("num_neighbours", f"be below the number of samples ({number})", num_neighbours)
    return count


def _squared(a: Array, b: Array) -> Array:
    """|a_i - b_j|^2, coordinate by coordinate: no array [i, j, d], and no cancellation."""
    total = jnp.zeros((a.shape[0], b.shape[0]), a.dtype)
    for index in range(a.shape[1]):
        total = total + (a[:, index, None] - b[None, :, index]) ** 2
    return total


def _blocks(arrays: tuple[Array, ...], block: int) -> tuple[tuple[Array, ...], int]:
    number = arrays[0].shape[0]
    size = min(check_count("block", block, minimum=1), number)
    extra = -number % size
    padded = tuple(jnp.pad(a, ((0, extra), *((0, 0),) * (a.ndim - 1))).reshape(-1, size, *a.shape[1:]) for a in arrays)
    return padded, number


def _smallest(points: Array, labels: Array, count: int, block: int, distance: Callable[[Array, Array], Array]) -> Array:
    """Every point's smallest distances to others of its label, rising: [n, count]; infinite where there are fewer."""
    index = jnp.arange(points.shape[0])
    parts, number = _blocks((points, labels, index), block)
    # To a multiple of the group, with points that no label admits.
    extra = -number % _GROUP
    others, names = jnp.pad(points, ((0, extra), (0, 0))), jnp.pad(labels, (0, extra), constant_values=-1)

    def some(part: tuple[Array, ...]) -> Array:
        point, label, own = part
        allowed = (label[:, None] == names[None]) & (own[:, None] != jnp.arange(number + extra)[None])
        return _least(jnp.where(allowed, distance(point, others), jnp.inf), count)

    return jax.lax.map(some, parts).reshape(-1, count)[:number]


def _least(values: Array, count: int) -> Array:
    """The `count` smallest of every row, rising; rows are a multiple of the group long.

    They lie in the groups with the `count` smallest minima, so the sort sees few candidates.
    """
    rows, columns = values.shape
    groups = columns // _GROUP
    if groups > count:
        grouped = values.reshape(rows, groups, _GROUP)
        chosen = jax.lax.top_k(-jnp.min(grouped, 2), count)[1]
        values = jnp.take_along_axis(grouped, chosen[:, :, None], 1).reshape(rows, -1)
    return -jax.lax.top_k(-values, count)[0]


def _closer(points: Array, radius: Array, block: int) -> Array:
    """How many other points lie strictly within a squared radius of every point."""
    index = jnp.arange(points.shape[0])
    parts, number = _blocks((points, radius, index), block)

    def some(part: tuple[Array, ...]) -> Array:
        point, limit, own = part
        inside = (_squared(point, points) < limit[:, None]) & (own[:, None] != index[None])
        return jnp.sum(inside, 1)

    return jax.lax.map(some, parts).reshape(-1)[:number]


def _entropy_terms(points: Array, num_neighbours: int, block: int) -> Array:
    check_ndim("points", points, 2, "[samples, dimensions]")
    number = points.shape[0]
    count = _check_neighbours(num_neighbours, number)
    squares = _smallest(points, jnp.zeros(number, int), count, block, _squared)
    return _terms_of_distances(squares, points.shape[1], jnp.asarray(number, points.dtype))


def _terms_of_distances(squares: Array, width: int, sizes: Array) -> Array:
    """Every sample's term of the entropy; infinite where samples coincide."""
    count = squares.shape[1]
    weights = jnp.asarray(entropy_weights(count, width), squares.dtype)
    volume = 0.5 * width * math.log(math.pi) - math.lgamma(0.5 * width + 1)
    ranks = jnp.arange(1, count + 1, dtype=squares.dtype)
    # Few coincident samples are rounding: they are at the smallest distance that occurs.
    apart = squares != 0  # and not a number stays that
    least = jnp.min(jnp.where(apart, squares, jnp.inf))
    tied = jnp.mean(~apart[:, 0]) > _TIES
    squares = jnp.where(apart, squares, jnp.where(tied, 0.0, least))
    logs = 0.5 * width * jnp.log(squares) + volume - digamma(ranks)[None]
    return jnp.sum(weights[None] * logs, 1) + jnp.log(sizes - 1)


def _enough(number: int, width: int) -> bool:
    """At least 2^d samples: with fewer the nearest neighbours are hardly nearer than the others."""
    return number >= 2**width


def _estimate(terms: Array, most: float | Array = math.inf, enough: bool = True) -> Estimate:
    """Mean and error; not reliable near the most that so many samples can show, nor from too few."""
    number = terms.shape[0]
    value = jnp.mean(terms)
    reliable = jnp.isfinite(value) & (value < 0.95 * most) & enough
    error = jnp.std(terms) / number**0.5
    return Estimate(jnp.where(reliable, value, jnp.nan), jnp.where(reliable, error, jnp.nan), reliable)
