"""Entropy and mutual information of samples from the distances to their nearest neighbours.

With r_ij the distance from sample i to its j-th neighbour among n in d dimensions and V_d the volume of the unit ball,

    H = (1 / n) sum_i sum_j w_j log(r_ij^d V_d (n - 1) / exp(psi(j))),    sum_j w_j = 1,

the weighted Kozachenko-Leonenko estimator. Its weights cancel the leading terms of the bias in 4 and more dimensions.
Kraskov's estimator of information counts the neighbours of the margins within the joint distance instead, and its
variant for labels those of all classes.

Information does not change when the coordinates of either side do. So every coordinate is replaced by normal scores,
a Gaussian sample of the same ranks, unless asinh, which draws tails in, leaves a strong linear relation straighter.
Then each side is whitened, and for the entropy of both together the joint distribution, too, whose log determinant is
the information of the linear relation: neighbours see only what is left over, however strong it is and whatever the
units. Ranks have no derivatives: those of an information are zero, and `smoothed_information` has some. For labels,
whose classes may stand apart, there is asinh alone.

Neighbours come from distances in blocks, so everything runs on any device and maps over members. Differences are taken
coordinate by coordinate: products of coordinates would cancel at the distances that matter here.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import digamma
from jaxtyping import Array, Bool, Float
from scipy.special import gammaln

from dissociation.checks import check_choice, check_count, check_non_negative, check_same_length, fail, is_traced
from dissociation.keys import named_key
from dissociation.linalg import centre, product
from dissociation.results import Result
from dissociation.types import Classes
from dissociation.validation import validated

Points = Float[Array | np.ndarray, "n d"]

# Distances per group in the search for the smallest.
_GROUP = 32
# Share of samples that may coincide with a neighbour in rounding before an estimate is called unreliable.
_TIES = 0.01
# Interleaved parts of the samples whose own estimates give the error, at most.
_PARTS = 16
# Robust standard deviations beyond which asinh draws tails in.
_TAIL = 3.0
# Nats of linear information from which on it counts that it is larger between coordinates that are not normal scores.
_BENT = 0.25

ESTIMATORS = ("entropies", "kraskov")
"""Differences of entropies, each the weighted Kozachenko-Leonenko one, or Kraskov's estimator."""


class Estimate(Result):
    """A number of nats.

    What `error` leaves out is bias. An information by "entropies" resolves a strong relation only as far as it is
    linear between normal scores, or after asinh; one by "kraskov" falls short by more the stronger the relation
    and the more the dimensions.
    `reliable` is False where a bias shows; one that halving the samples does not change cannot be told from the truth.

    Attributes:
        value: The estimate; NaN where it is not `reliable`.
        error: Standard error from the spread of the samples' own terms, or that of the estimates from up to 16
            interleaved parts of the samples if larger, since the terms of neighbours depend on each other. Both take
            samples for independent. An information about labels has the first alone.
        reliable: False where more than 1 % of the samples coincide with neighbours (an entropy is then minus infinity,
            an information infinite; fewer are taken for rounding), or coordinates are linear functions of others; where
            an information is more than three errors below zero, or its part that is not linear above two thirds of the
            most that n samples can show (log n, and psi(k) less for Kraskov's estimator); where one about labels is
            above what labels can hold by more than its error; where the two halves of the samples say something else
            than the whole, by more than three errors, or say less by two of an information above log(n) / 2; where
            there are fewer than 2^d samples in d dimensions, those of both sides together for an information, 8^d for
            Kraskov's, or fewer than 8 k for halves; and for Kraskov's estimator of information where the other is not
            reliable, or more than three errors away.
    """

    value: Float[Array, ""]
    error: Float[Array, ""]
    reliable: Bool[Array, ""]


@validated(finite=("points",))
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
    count = _check_neighbours(num_neighbours, points.shape[0])
    squares = _smallest(jnp.asarray(points), jnp.zeros(points.shape[0], int), count, block, _squared)[0]
    apart = squares > 0  # a distance of zero has no slope, and is given none
    return jnp.where(apart, jnp.sqrt(jnp.where(apart, squares, 1.0)), squares)


@validated
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


@validated
def entropy(points: Points, *, num_neighbours: int = 5, block: int = 250) -> Estimate:
    """Differential entropy by the weighted Kozachenko-Leonenko estimator, in whitened coordinates.

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
    count = _check_neighbours(num_neighbours, points.shape[0])
    white, logs = _whitened(jnp.asarray(points))
    terms = _entropy_terms(white, count, block) + logs
    groups = _num_parts(len(white), count)
    return _estimate(terms, groups, enough=groups > 1 and len(white) >= 2 ** white.shape[1])


@validated
def information(
    x: Float[Array | np.ndarray, "n p"],
    z: Float[Array | np.ndarray, "n d"],
    *,
    estimator: str = "entropies",
    num_neighbours: int = 5,
    block: int = 250,
) -> Estimate:
    """Mutual information I(X; Z) of samples whose rows belong together.

    Units, and rising maps of any coordinate, matter at most to a strong relation. An invertible one has infinite
    information; add a little noise to one side, and look at shuffled pairs beside it. Of coordinates with few values
    nothing is said: see `label_information`.

    Args:
        x: [n, p].
        z: [n, d]; taken to the dtype of x.
        estimator: "entropies": H(X) + H(Z) - H(X, Z). "kraskov": his first estimator, with the larger of the two
            Euclidean distances: a smaller error in few dimensions, and a bias in more. It computes the other as well.
        num_neighbours: k. With 10 or 20 in place of 5, an information of 4 + 4 dimensions has an error smaller by a
            third or a half.
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
    check_same_length("x", x.shape[0], "z", z.shape[0])
    number, width = x.shape[0], x.shape[1] + z.shape[1]
    count = _check_neighbours(num_neighbours, number)
    x = jnp.asarray(x)
    both = jnp.concatenate([x, jnp.asarray(z, x.dtype)], 1)
    ways = [_coordinates(part, x.shape[1]) for part in (_normal_scores(both), _drawn_in(both))]
    # Normal scores bend a strong linear relation of several coordinates a little.
    bent = ways[1][3] < ways[0][3] - _BENT
    x, z, joint, linear = (jnp.where(bent, drawn, scores) for scores, drawn in zip(*ways, strict=True))
    parts = [_entropy_terms(points, count, block) for points in (x, z, joint)]
    # The determinants of each side by itself are in both entropies, and cancel.
    terms = parts[0] + parts[1] - parts[2] - linear
    groups, most = _num_parts(number, count), 2 / 3 * math.log(number)
    found = _estimate(terms, groups, least=0.0, most=most - linear, enough=groups > 1 and number >= 2**width)
    if estimator == "entropies":
        return found
    # Its most is where the k neighbours alone are within reach of both margins.
    most = most - 2 / 3 * digamma(jnp.asarray(count, x.dtype))
    terms = _kraskov_terms(x, z, count, block)
    own = _estimate(terms, groups, least=0.0, most=most, enough=number >= 8**width)
    agree = jnp.abs(own.value - found.value) <= 3 * jnp.hypot(own.error, found.error)
    return _where(own.reliable & found.reliable & agree, own.value, own.error)


def _coordinates(both: Array, split: int) -> tuple[Array, Array, Array, Array]:
    """Each side white, both together white, and the log determinant that this took: minus the linear information."""
    x, z = (_whitened(part)[0] for part in jnp.split(both, [split], 1))
    return x, z, *_whitened(jnp.concatenate([x, z], 1))


def _kraskov_terms(x: Array, z: Array, count: int, block: int) -> Array:
    number, split = x.shape

    def larger(a: Array, b: Array) -> Array:
        return jnp.maximum(_squared(a[:, :split], b[:, :split]), _squared(a[:, split:], b[:, split:]))

    groups = _num_parts(number, count)
    radius = _smallest(jnp.concatenate([x, z], 1), jnp.zeros(number, int), count, block, larger, groups)[:, :, -1]
    counts = [_closer(points, radius, block, groups) for points in (x, z)]
    terms = digamma(jnp.asarray(count, x.dtype)) + digamma(_sizes(number, groups, x.dtype))
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

    Neighbours are those in coordinates in which the classes, on average, are white: units do not matter.

    References:
        Ross (2014), Mutual information between discrete and continuous data sets.
    """
    check_choice("estimator", estimator, ESTIMATORS)
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
    z, labels = _drawn_in(jnp.asarray(z)), jnp.asarray(labels)
    members = jax.nn.one_hot(labels, classes, dtype=z.dtype)
    numbers = jnp.sum(members, 0)
    means = product(members.T, z) / jnp.maximum(numbers, 1)[:, None]
    z, _ = _whitened(z, z - product(members, means))
    sizes, total = numbers[labels], jnp.asarray(number, z.dtype)
    squares = _smallest(z, labels, count, block, _squared)[0]
    # Neighbours of the class that are the neighbours of all: the most that a term can be with equal weights.
    if estimator == "entropies":
        everything = _smallest(z, jnp.zeros(number, int), count, block, _squared)[0]
        terms = _terms_of_distances(everything, z.shape[1], total) - _terms_of_distances(squares, z.shape[1], sizes)
        most = jnp.log((total - 1) / (sizes - 1))
    else:
        radius = squares[:, -1]
        near = _closer(z, radius[None], block)[0].astype(z.dtype) + 1  # the class's k-th, on the rim, counts
        most = digamma(total) - digamma(sizes)
        terms = most + digamma(jnp.asarray(count, z.dtype)) - digamma(near)
        terms = jnp.where(jnp.mean(radius > 0) > 1 - _TIES, terms, jnp.inf)
    terms = jnp.where(jnp.all((labels >= 0) & (labels < classes)), terms, jnp.nan)
    found = _estimate(terms[None], least=0.0, enough=number >= 2 ** z.shape[1])
    return _capped(found, jnp.mean(most), jnp.mean(jnp.log(total / sizes)))


def _capped(found: Estimate, most: Array, entropy: Array) -> Estimate:
    """An information of at most `entropy`; not reliable more than three errors above what the estimator can reach."""
    reliable = found.reliable & (found.value <= most + 3 * found.error + 1e-3)
    return _where(reliable, jnp.minimum(found.value, entropy), found.error)


def _where(reliable: Array, value: Array, error: Array) -> Estimate:
    kept = jnp.where(reliable, 1.0, jnp.nan)  # a factor: derivatives are not a number either
    return Estimate(kept * value, kept * error, reliable)


def _drawn_in(points: Array) -> Array:
    """Arsinh of every coordinate, which leaves three robust deviations about the median nearly as they are."""
    low, middle, high = jnp.quantile(points, jnp.asarray([0.25, 0.5, 0.75], points.dtype), axis=0)
    points = points - middle[None]
    deviation = (high - low) / 1.349  # of a Gaussian
    deviation = jnp.where(deviation > 0, deviation, jnp.max(jnp.abs(points), 0))
    return jnp.arcsinh(points / (_TAIL * jnp.where(deviation > 0, deviation, 1.0))[None])


def _normal_scores(points: Array) -> Array:
    """Every coordinate replaced, rank by rank, by a sample of a Gaussian. What coincides stays so.

    Ranks of a sample are independent of its ordered values, so these are samples of a distribution with Gaussian
    margins and the same information. Quantiles of a Gaussian would do but for their even spacing, which neighbours see.
    """
    key = named_key("normal scores")
    scores = jax.random.normal(key, points.shape[::-1], jnp.float32).astype(points.dtype)

    def replaced(column: Array, sample: Array) -> Array:
        return jnp.sort(sample)[jnp.searchsorted(jnp.sort(column), column)]

    return jax.vmap(replaced, (1, 0), 1)(points, scores)


def _whitened(points: Array, reference: Array | None = None) -> tuple[Array, Array]:
    """Points in coordinates in which the reference is white, and the log volume that they were divided by.

    By Gram and Schmidt, twice each: a covariance would have half the digits. A coordinate that is constant or a linear
    function of those before it becomes zero (of another reference, keeps its own scale), and the logarithm infinite.
    """
    points = centre(points)
    reference = points if reference is None else centre(reference)
    number = points.shape[0]

    def body(index: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        white, done, logs = state
        column, own = points[:, index][:, None], reference[:, index][:, None]
        before = jnp.sqrt(jnp.mean(own**2))
        for _ in range(2):
            shares = product(done.T, own) / number
            column, own = column - product(white, shares), own - product(done, shares)
        left = jnp.sqrt(jnp.mean(own**2))
        full = left > 32 * jnp.finfo(points.dtype).eps * jnp.maximum(before, jnp.sqrt(jnp.mean(column**2)))
        scale = jnp.where(full, 1.0 / jnp.where(full, left, 1.0), 0.0)
        log = jnp.where(full, jnp.log(jnp.where(full, left, 1.0)), -jnp.inf)
        rest = column / jnp.maximum(jnp.sqrt(jnp.mean(column**2)), jnp.finfo(points.dtype).tiny)
        column = column * scale if reference is points else jnp.where(full, column * scale, rest)
        return white.at[:, index].set(column[:, 0]), done.at[:, index].set(own[:, 0] * scale), logs + log

    zero = jnp.zeros_like(points)
    white, _, logs = jax.lax.fori_loop(0, points.shape[1], body, (zero, zero, jnp.zeros((), points.dtype)))
    return white, logs


@validated
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
    if rtol is not None:
        check_non_negative("rtol", rtol)
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


def _num_parts(number: int, count: int) -> int:
    """Interleaved parts with at least 4 k samples each, an even number of them, or all samples in one."""
    return max(min(_PARTS, number // (4 * count)) // 2 * 2, 1)


def _strides(groups: int) -> tuple[int, ...]:
    """Of all samples, the halves, and the parts: sample i belongs to number i % stride."""
    return (1, 2, groups) if groups > 1 else (1,)


def _sizes(number: int, groups: int, dtype: jnp.dtype) -> Array:
    """How many samples there are in that of every sample: [levels, n]."""
    index = np.arange(number)
    return jnp.asarray([(number - 1 - index % stride) // stride + 1 for stride in _strides(groups)], dtype)


def _smallest(
    points: Array,
    labels: Array,
    count: int,
    block: int,
    distance: Callable[[Array, Array], Array],
    groups: int = 1,
) -> Array:
    """Every point's smallest distances to others of its label, rising: [levels, n, count]; infinite if there are fewer.

    Levels are all points and, with several groups, its own half and group. Every distance is computed once: the
    smallest of every group are found first.
    """
    index = jnp.arange(points.shape[0])
    parts, number = _blocks((points, labels, index), block)
    # Groups one after the other, each to a multiple of that of the search, with points that no label admits.
    width = -(-number // (groups * _GROUP)) * _GROUP
    columns = (np.arange(groups)[:, None] + groups * np.arange(width)[None]).reshape(-1)
    chosen = np.minimum(columns, number - 1)
    others, names = points[chosen], jnp.where(columns < number, labels[chosen], -1)
    group = np.arange(groups)

    def some(part: tuple[Array, ...]) -> Array:
        point, label, own = part
        allowed = (label[:, None] == names[None]) & (own[:, None] != columns[None])
        values = jnp.where(allowed, distance(point, others), jnp.inf)
        least = _least(values.reshape(-1, width), count).reshape(-1, groups, count)
        same = [group[None] % stride == (own % stride)[:, None] for stride in _strides(groups)]
        levels = [jnp.where(one[:, :, None], least, jnp.inf).reshape(-1, groups * count) for one in same]
        return -jax.lax.top_k(-jnp.stack(levels), count)[0]

    found = jax.lax.map(some, parts)
    return found.swapaxes(0, 1).reshape(found.shape[1], -1, count)[:, :number]


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


def _closer(points: Array, radius: Array, block: int, groups: int = 1) -> Array:
    """How many others lie strictly within a squared radius of every point, level by level: [levels, n]."""
    index = jnp.arange(points.shape[0])
    parts, number = _blocks((points, radius.T, index), block)

    def some(part: tuple[Array, ...]) -> Array:
        point, limits, own = part
        squares = jnp.where(own[:, None] != index[None], _squared(point, points), jnp.inf)
        levels = [
            jnp.sum((squares < limits[:, level, None]) & (own[:, None] % stride == index[None] % stride), 1)
            for level, stride in enumerate(_strides(groups))
        ]
        return jnp.stack(levels)

    found = jax.lax.map(some, parts)
    return found.swapaxes(0, 1).reshape(found.shape[1], -1)[:, :number]


def _entropy_terms(points: Array, count: int, block: int) -> Array:
    """Every sample's term of the entropy of all samples, of the two halves, and of the parts: [levels, n]."""
    number = points.shape[0]
    groups = _num_parts(number, count)
    squares = _smallest(points, jnp.zeros(number, int), count, block, _squared, groups)
    sizes = _sizes(number, groups, points.dtype)
    width = points.shape[1]
    return jnp.stack([_terms_of_distances(level, width, size) for level, size in zip(squares, sizes, strict=True)])


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


def _estimate(
    terms: Array,
    groups: int = 1,
    *,
    least: float = -math.inf,
    most: float | Array = math.inf,
    enough: bool,
) -> Estimate:
    """Mean and error from terms of all samples, halves and parts, [levels, n]; see `Estimate` for what is reliable."""
    number = terms.shape[1]
    value, error = jnp.mean(terms[0]), jnp.std(terms[0]) / number**0.5
    reliable = jnp.isfinite(value) & (value < most) & enough
    if groups > 1:
        own = np.arange(number) % groups
        parts = jnp.zeros(groups, terms.dtype).at[own].add(terms[2]) / np.bincount(own)
        error = jnp.maximum(error, jnp.std(parts, ddof=1) / groups**0.5)
        growth = value - jnp.mean(terms[1])
        # A relation without noise has infinite information: what is found grows by log 2, not far above three errors.
        large = (growth > 0) & (value > 0.5 * math.log(number)) & math.isfinite(least)
        reliable = reliable & (jnp.abs(growth) <= jnp.where(large, 2, 3) * error)
    return _where(reliable & (value >= least - 3 * error), value, error)
