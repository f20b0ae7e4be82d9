"""Neural collapse, measured from moments of features by class."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from dissociation._core.checks import check_classes, check_count, fail, is_traced, warn
from dissociation._core.distances import root
from dissociation._core.linalg import finite_part, product, scale_of
from dissociation._core.results import Result
from dissociation._core.types import Classes, Scalar
from dissociation._core.validation import validated

Features = Float[Array | np.ndarray, "n d"]


# Uncentred measures show only the offset if it exceeds this multiple of the features' spread.
_LARGE_OFFSET = 100.0


class ClassMoments(Result):
    """Moments of features by class. A class without samples has zeros and does not affect measures.

    Attributes:
        counts: Number of samples n_c, [classes].
        means: Rounded means mu_c, [classes, d].
        rest: Rounding errors mu_c - means, [classes, d].
        spread: sum_i |z_i - mu_c|^2 / unit^2 over the samples of a class, [classes].
        norms: sum_i |z_i| over all samples.
        scatter: sum_i (z_i - mu_c)(z_i - mu_c)^T / unit^2 over all samples, [d, d], or None.
        unit: 1, or a power of two near the largest feature if its square may leave the dtype's
            range.
    """

    counts: Float[Array, " classes"]
    means: Float[Array, "classes d"]
    # If all features share a large offset, these errors are as large as the differences between
    # classes.
    rest: Float[Array, "classes d"]
    spread: Float[Array, " classes"]
    norms: Float[Array, ""]
    scatter: Float[Array, "d d"] | None
    unit: Scalar = 1.0


class Collapse(Result):
    """Measures of neural collapse.

    Attributes:
        within: Within-class variance, sum_i |z_i - mu_c|^2 / n.
        between: Between-class variance, sum_c (n_c / n) |mu_c - mu|^2.
        scale: Mean norm of features, sum_i |z_i| / n.
        nc1: within / (between + 1e-8).
        rnc1: within / (scale^2 + 1e-10), which is also small if classes are not separated.
        nc2: Condition number of the matrix of uncentred class means, from 1 (orthogonal, of one
            norm) to infinity (more classes than dimensions, or linearly dependent means).
    """

    within: Float[Array, ""]
    between: Float[Array, ""]
    scale: Float[Array, ""]
    nc1: Float[Array, ""]
    rnc1: Float[Array, ""]
    nc2: Float[Array, ""]


class Frame(Result):
    """Distances of centred class means from a simplex equiangular tight frame; NaN if undefined."""

    equinorm: Float[Array, ""]  # standard deviation of the means' norms over their mean norm
    equiangularity: Float[Array, ""]  # standard deviation of the cosines of all pairs
    maximal_angle: Float[Array, ""]  # mean of |cos + 1 / (C - 1)| over all pairs


@validated(finite=("features",), empty=("features", "labels"))
def class_moments(
    features: Features, labels: Classes, num_classes: int, *, scatter: bool = False
) -> ClassMoments:
    """Return moments of features by class, in two passes.

    Args:
        features: Finite features Z, [samples, d].
        labels: Classes from 0, [samples].
        num_classes: Classes C, some of which may have no samples.
        scatter: If True, compute the [d, d] matrix for `trace_ratio`, at a cost of n d^2.

    Returns:
        The moments. For a traced feature that is not finite or label that is not a class, `rest`,
        `spread` and `scatter` are NaN.
    """
    count = check_count("num_classes", num_classes, minimum=1)
    check_classes("labels", labels, count)
    return _class_moments(jnp.asarray(features), jnp.asarray(labels), count, scatter)


@partial(jax.jit, static_argnames=("count", "scatter"))
def _class_moments(features: Array, labels: Array, count: int, scatter: bool) -> ClassMoments:
    membership = jax.nn.one_hot(labels, count, dtype=features.dtype)
    counts = jnp.sum(membership, 0)
    # An index beyond the last class is filled with NaN below.
    is_class = (labels >= 0) & (labels < count)
    class_index = jnp.where(is_class, labels, count)

    def class_mean(samples):
        totals = product(membership.T, samples)
        return totals / jnp.maximum(counts, 1.0)[:, None]

    def of_sample(table):
        return table.at[class_index].get(mode="fill", fill_value=jnp.nan)

    # The difference of two numbers of similar size is exact, so the mean of the differences is the
    # means' rounding.
    means = class_mean(features)
    deviation = features - of_sample(means)
    rounding = class_mean(deviation)
    rounding = rounding + class_mean(deviation - of_sample(rounding))

    largest = jnp.max(jnp.abs(features), initial=0.0)
    limits = jnp.finfo(features.dtype)
    is_above = largest > float(limits.tiny) ** 0.25
    is_below = largest < float(limits.max) ** 0.25
    unit = jnp.where(is_above & is_below, 1.0, scale_of(largest))

    residual = (deviation - of_sample(rounding)) / unit
    square = jnp.sum(residual**2, 1)
    lengths = root(jnp.sum((features / unit) ** 2, 1))
    scatter_matrix = None
    if scatter:
        scatter_matrix = product(residual.T, residual)
    return ClassMoments(
        counts=counts,
        means=means,
        rest=rounding,
        spread=product(membership.T, square[:, None])[:, 0],
        norms=unit * jnp.sum(lengths),
        scatter=scatter_matrix,
        unit=unit,
    )


@validated
@jax.jit
def merge_moments(a: ClassMoments, b: ClassMoments) -> ClassMoments:
    """Return the joint moments of two sets of samples.

    Args:
        a: Moments of some samples.
        b: Moments of other samples, of the same classes and dimensions.

    Returns:
        The moments of all samples; `scatter` is None unless both arguments have it.

    Raises:
        ValueError: If the numbers of classes or dimensions differ.

    References:
        Chan, Golub and LeVeque (1983), Algorithms for computing the sample variance.
    """
    if a.means.shape != b.means.shape:
        fail("b", f"have class means of the shape of `a`'s, {a.means.shape}", b.means.shape)
    # Chan's update, because the mean of squares minus the square of the mean cancels when classes
    # collapse.
    counts = a.counts + b.counts
    share = b.counts / jnp.maximum(counts, 1.0)
    # A class absent from `a` starts at the mean of `b`: from the mean 0 of an absent class, `rest`
    # would lose digits.
    present = (a.counts > 0)[:, None]
    start = jnp.where(present, a.means, b.means)
    rounding = jnp.where(present, a.rest, b.rest)
    difference = (b.means - start) + (b.rest - rounding)

    # Knuth's sum: the new means plus their rounding equal start + step exactly.
    step = rounding + share[:, None] * difference
    means = start + step
    moved = means - start
    rounding = (start - (means - moved)) + (step - moved)

    # The unit of features that are all zero does not count.
    unit_a = jnp.where(a.norms == 0, 0.0, a.unit)
    unit_b = jnp.where(b.norms == 0, 0.0, b.unit)
    unit = jnp.where(unit_a + unit_b == 0, 1.0, jnp.maximum(unit_a, unit_b))
    factor_a = (unit_a / unit) ** 2
    factor_b = (unit_b / unit) ** 2

    difference = difference / unit
    weight = a.counts * share
    spread = factor_a * a.spread + factor_b * b.spread
    scatter = None
    if a.scatter is not None and b.scatter is not None:
        scatter = factor_a * a.scatter + factor_b * b.scatter
        scatter = scatter + product(difference.T, weight[:, None] * difference)
    return ClassMoments(
        counts=counts,
        means=means,
        rest=rounding,
        spread=spread + weight * jnp.sum(difference**2, 1),
        norms=a.norms + b.norms,
        scatter=scatter,
        unit=unit,
    )


@validated
def neural_collapse(moments: ClassMoments) -> Collapse:
    """Return variances within and between classes, scale, and the condition number of class means.

    `scale`, `rnc1` and `nc2` take uncentred features, as published.

    Args:
        moments: Moments of the features.

    Warns:
        UserWarning: If the norm of the mean exceeds 100 times the features' spread.
        RuntimeWarning: If features vary by less than 1e-3, so that the constants in `nc1` and
            `rnc1` matter.

    References:
        Sakamoto and Sato (2025), Explaining grokking and information bottleneck through neural
        collapse emergence. Papyan, Han and Donoho (2020), Prevalence of neural collapse during the
        terminal phase of deep learning.
    """
    collapse, spread, offset = _collapse(moments)
    if is_traced(spread):
        return collapse
    if spread > 0 and offset > _LARGE_OFFSET * spread:
        warn(
            f"`moments` are of features {offset:.3g} from zero that spread by {spread:.3g}: "
            "`scale`, `rnc1` and `nc2`,"
            " which do not subtract their mean, measure this offset. Centre the features first.",
            UserWarning,
        )
    if 0 < spread < 1e-3:
        warn(
            f"Features vary by {float(spread):.2g}, beside which the published constants of "
            "`nc1` (1e-8) and `rnc1` "
            "(1e-10) count: multiply the features by a number, or read `trace_ratio` of "
            "`recipes.CheapMeasures`."
        )
    return collapse


@jax.jit
def _collapse(moments: ClassMoments) -> tuple[Collapse, Array, Array]:
    """Return the measures, the features' spread, and the norm of their mean."""
    counts = moments.counts
    number = jnp.sum(counts)
    within = jnp.sum(moments.spread) / number
    centred, _ = _centred(moments, counts)
    unit = jnp.asarray(moments.unit)
    square = jnp.sum((centred / unit) ** 2, 1)
    between = jnp.sum(counts / number * square)

    # A traced label that is not a class makes the variance NaN, and so all other measures.
    undefined = jnp.where(jnp.isnan(within), jnp.nan, 0.0)
    scale = moments.norms / number + undefined
    collapse = Collapse(
        within=within * unit**2,
        between=between * unit**2,
        scale=scale,
        nc1=within * unit / (between * unit + 1e-8 / unit),
        rnc1=within * unit / ((scale / unit) * scale + 1e-10 / unit),
        nc2=_condition_number(moments) + undefined,
    )

    spread = unit * jnp.sqrt(within + between)
    mean = jnp.sum(counts[:, None] * moments.means, 0) / number
    offset = unit * jnp.linalg.norm(mean / unit)
    return collapse, spread, offset


def _centred(moments: ClassMoments, weights: Array) -> tuple[Array, Bool[Array, " classes"]]:
    """Return class means minus their weighted mean, and True for each class with samples.

    The means of classes without samples are zero.
    """
    present = moments.counts > 0
    weights = jnp.where(present, weights, 0.0)
    share = weights[:, None] / jnp.sum(weights)
    centred = moments.means - jnp.sum(share * moments.means, 0)[None] + moments.rest
    centred = centred - jnp.sum(share * centred, 0)[None]
    return jnp.where(present[:, None], centred, 0.0), present


def _condition_number(moments: ClassMoments) -> Array:
    means, undefined = finite_part(moments.means / moments.unit)
    # Classes without samples add zeros at the end.
    singular_values = jnp.linalg.svd(means, compute_uv=False)
    num_values = len(singular_values)
    num_present = jnp.sum(moments.counts > 0)
    largest = singular_values[0]
    smallest = singular_values[jnp.minimum(num_present, num_values) - 1]

    eps = jnp.finfo(means.dtype).eps
    rounding = max(means.shape) * eps
    is_regular = (num_present <= num_values) & (smallest > rounding * largest)
    divisor = jnp.where(is_regular, smallest, 1.0)
    return jnp.where(is_regular, largest / divisor, jnp.inf) + undefined


@jax.jit
def trace_ratio(moments: ClassMoments) -> Float[Array, ""]:
    """Return tr(S_W pinv(S_B)) / C, the covariance within classes in units of that between them.

    S_W = sum_i (z_i - mu_c)(z_i - mu_c)^T / n and S_B = sum_c (mu_c - mu_G)(mu_c - mu_G)^T / C,
    with the mean mu_G of class means, over classes with samples.

    Returns:
        The ratio; infinite if class means are equal up to rounding, NaN if features are equal or
        there is one class.

    Raises:
        ValueError: If `moments` have no scatter matrix.

    Source: Papyan, Han and Donoho (2020), section "Properties of neural collapse", NC1.
    """
    if moments.scatter is None:
        fail(
            "moments",
            "have a scatter matrix",
            "None",
            "Ask for it: class_moments(..., scatter=True)",
        )
    means, present, smallest = _about_their_mean(moments)
    within = moments.scatter / jnp.sum(moments.counts)
    num_classes = jnp.sum(present)
    means, undefined = finite_part(means)

    # S_B = M^T M / C with few rows M, so that pinv(S_B) / C = pinv(M) pinv(M)^T.
    fixed_means = lax.stop_gradient(means)
    left_vectors, values, right_vectors = jnp.linalg.svd(fixed_means, full_matrices=False)
    rounding = max(means.shape) * float(jnp.finfo(means.dtype).eps)
    cutoff = jnp.maximum(rounding * values[0], smallest)
    # Centred means have rank C - 1 at most, even if rounding makes the last singular value
    # positive.
    is_resolved = (values > cutoff) & (jnp.arange(len(values)) < num_classes - 1)
    resolved_values = jnp.where(is_resolved, values, 0.0)
    resolved = product(left_vectors * resolved_values[None], right_vectors)

    # `means` - `fixed_means` is zero and carries the derivative.
    means = resolved + (means - fixed_means)
    inverse = jnp.linalg.pinv(means, rtol=rounding)
    ratio = jnp.sum(inverse * product(within, inverse))
    is_spread = (num_classes > 1) & (jnp.trace(within) > 0)
    limit = jnp.where(is_spread, jnp.inf, jnp.nan)
    return jnp.where(values[0] > smallest, ratio, limit) + undefined


def _about_their_mean(moments: ClassMoments) -> tuple[Array, Bool[Array, " classes"], Array]:
    """Return class means minus their mean, True for each class with samples, and a tolerance.

    Means are in units of `unit`, and zero for classes without samples. Lengths up to the tolerance
    are rounding.
    """
    counts = moments.counts
    means, present = _centred(moments, jnp.ones_like(counts))
    means = means / moments.unit

    # Differences of samples are summed, so the rounding is proportional to the samples' distances
    # from their mean.
    number = jnp.sum(counts)
    within = jnp.sum(moments.spread / number)
    square = jnp.sum(means**2, 1)
    between = jnp.sum(counts / number * square)
    size = jnp.sqrt(within + between)
    eps = jnp.finfo(means.dtype).eps
    tolerance = 8 * len(means) ** 0.5 * eps * size
    return means, present, lax.stop_gradient(tolerance)


@jax.jit
def simplex_frame(moments: ClassMoments) -> Frame:
    """Return the distances of centred class means from a simplex frame.

    Source: Papyan, Han and Donoho (2020), NC2.
    """
    means, present, smallest = _about_their_mean(moments)
    norms = root(jnp.sum(means**2, 1))
    num_classes = jnp.sum(present)
    are_distinct = (num_classes > 1) & (jnp.max(norms) > smallest)
    are_directed = are_distinct & jnp.all(~present | (norms > smallest))

    average = jnp.mean(norms, where=present)
    deviation = root(jnp.mean((norms - average) ** 2, where=present))
    relative_deviation = deviation / jnp.where(are_distinct, average, 1.0)

    lengths = jnp.where(norms > 0, norms, 1.0)
    directions = means / lengths[:, None]
    rows, columns = np.triu_indices(len(means), 1)
    cosines = product(directions, directions.T)[rows, columns]
    is_pair = present[rows] & present[columns]
    mean_cosine = jnp.mean(cosines, where=is_pair)
    variance = jnp.mean((cosines - mean_cosine) ** 2, where=is_pair)
    distance = jnp.mean(jnp.abs(cosines + 1.0 / (num_classes - 1)), where=is_pair)
    return Frame(
        equinorm=jnp.where(are_distinct, relative_deviation, jnp.nan),
        equiangularity=jnp.where(are_directed, root(variance), jnp.nan),
        maximal_angle=jnp.where(are_directed, distance, jnp.nan),
    )


@jax.jit
def self_duality(
    moments: ClassMoments, classifier: Float[Array | np.ndarray, "classes d"]
) -> Float[Array, ""]:
    """Return |W / |W| - M / |M||^2 of the last layer's weights W and the centred class means M.

    All norms are Frobenius norms.

    Source: Papyan, Han and Donoho (2020), NC3.
    """
    means, present, smallest = _about_their_mean(moments)
    weights = jnp.where(present[:, None], jnp.asarray(classifier), 0.0)
    largest = jnp.max(jnp.abs(weights))
    weights = weights / scale_of(largest)
    weights = weights / jnp.linalg.norm(weights)
    size = jnp.linalg.norm(means)
    size = jnp.where(size > smallest, size, jnp.nan)
    return jnp.sum((weights - means / size) ** 2)


@jax.jit
def nearest_centre_agreement(
    features: Float[Array, "n d"], logits: Float[Array, "n classes"], moments: ClassMoments
) -> Float[Array, ""]:
    """Return the fraction of samples that the network assigns to the class with the nearest mean.

    Source: Papyan, Han and Donoho (2020), NC4.
    """
    means, present, _ = _about_their_mean(moments)

    # |z - mu|^2 minus |z|^2, about the middle of the means because an offset would cancel digits.
    share = jnp.where(present, 1.0, 0.0)[:, None] / jnp.sum(present)
    middle = jnp.sum(share * moments.means, 0)[None]
    remainder = jnp.sum(share * (moments.means - middle + moments.rest), 0)[None]
    centred = (features - middle - remainder) / moments.unit
    distance = jnp.sum(means**2, 1)[None] - 2 * product(centred, means.T)
    distance = jnp.where(present[None], distance, jnp.inf)

    is_nearest = jnp.argmin(distance, 1) == jnp.argmax(logits, 1)
    fraction = jnp.mean(is_nearest, dtype=distance.dtype)
    has_nearest = jnp.isfinite(jnp.min(distance, 1))
    has_prediction = jnp.isfinite(jnp.max(logits, 1))
    return jnp.where(jnp.all(has_nearest & has_prediction), fraction, jnp.nan)
