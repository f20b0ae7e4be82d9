"""Neural collapse, measured from moments of features by class."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
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
    """Distances of centred class means from a simplex equiangular tight frame; NaN where they are undefined."""

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
    member = jax.nn.one_hot(labels, count, dtype=features.dtype)
    counts = jnp.sum(member, 0)
    # An index beyond the last class is filled with NaN below.
    place = jnp.where((labels >= 0) & (labels < count), labels, count)

    def mean(of: Array) -> Array:
        return product(member.T, of) / jnp.maximum(counts, 1.0)[:, None]

    def of_sample(table: Array) -> Array:
        return table.at[place].get(mode="fill", fill_value=jnp.nan)

    # The difference of two numbers of similar size is exact, so the mean of the differences is the
    # means' rounding.
    means = mean(features)
    apart = features - of_sample(means)
    rest = mean(apart)
    rest = rest + mean(apart - of_sample(rest))
    largest, limits = jnp.max(jnp.abs(features), initial=0.0), jnp.finfo(features.dtype)
    usual = (largest > float(limits.tiny) ** 0.25) & (largest < float(limits.max) ** 0.25)
    unit = jnp.where(usual, 1.0, scale_of(largest))
    residual = (apart - of_sample(rest)) / unit
    return ClassMoments(
        counts=counts,
        means=means,
        rest=rest,
        spread=product(member.T, jnp.sum(residual**2, 1)[:, None])[:, 0],
        norms=unit * jnp.sum(root(jnp.sum((features / unit) ** 2, 1))),
        scatter=product(residual.T, residual) if scatter else None,
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
    known = (a.counts > 0)[:, None]
    first, rest = jnp.where(known, a.means, b.means), jnp.where(known, a.rest, b.rest)
    apart = (b.means - first) + (b.rest - rest)
    weight = a.counts * share
    # Knuth's sum: the new means plus the new rest equal first + step exactly.
    step = rest + share[:, None] * apart
    means = first + step
    moved = means - first
    units = [jnp.where(part.norms == 0, 0.0, part.unit) for part in (a, b)]  # 0 if all features are
    unit = jnp.where(sum(units) == 0, 1.0, jnp.maximum(*units))
    scatter, apart, factors = None, apart / unit, [(each / unit) ** 2 for each in units]
    if a.scatter is not None and b.scatter is not None:
        scatter = (
            factors[0] * a.scatter
            + factors[1] * b.scatter
            + product(apart.T, weight[:, None] * apart)
        )
    return ClassMoments(
        counts=counts,
        means=means,
        rest=(first - (means - moved)) + (step - moved),
        spread=factors[0] * a.spread + factors[1] * b.spread + weight * jnp.sum(apart**2, 1),
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
    found, spread, offset = _collapse(moments)
    if not is_traced(spread) and spread > 0 and offset > _LARGE_OFFSET * spread:
        warn(
            f"`moments` are of features {offset:.3g} from zero that spread by {spread:.3g}: "
            "`scale`, `rnc1` and `nc2`,"
            " which do not subtract their mean, measure this offset. Centre the features first.",
            UserWarning,
        )
    if not is_traced(spread) and 0 < spread < 1e-3:
        warn(
            f"Features vary by {float(spread):.2g}, beside which the published constants of "
            "`nc1` (1e-8) and `rnc1` "
            "(1e-10) count: multiply the features by a number, or read `trace_ratio` of "
            "`recipes.CheapMeasures`."
        )
    return found


@jax.jit
def _collapse(moments: ClassMoments) -> tuple[Collapse, Array, Array]:
    """Return the measures, the features' spread, and the norm of their mean."""
    number = jnp.sum(moments.counts)
    within = jnp.sum(moments.spread) / number
    centred, _ = _centred(moments, moments.counts)
    unit = jnp.asarray(moments.unit)
    between = jnp.sum(moments.counts / number * jnp.sum((centred / unit) ** 2, 1))
    lost = jnp.where(jnp.isnan(within), jnp.nan, 0.0)  # a traced label that is not a class
    scale = moments.norms / number + lost
    found = Collapse(
        within=within * unit**2,
        between=between * unit**2,
        scale=scale,
        nc1=within * unit / (between * unit + 1e-8 / unit),
        rnc1=within * unit / ((scale / unit) * scale + 1e-10 / unit),
        nc2=_condition_number(moments) + lost,
    )
    mean = jnp.sum(moments.counts[:, None] * moments.means, 0) / number
    return found, unit * jnp.sqrt(within + between), unit * jnp.linalg.norm(mean / unit)


def _centred(moments: ClassMoments, weights: Array) -> tuple[Array, Bool[Array, " classes"]]:
    """Return class means minus their weighted mean, zero for absent classes, and True for each present class."""
    present = moments.counts > 0
    share = jnp.where(present, weights, 0.0)[:, None] / jnp.sum(jnp.where(present, weights, 0.0))
    centred = moments.means - jnp.sum(share * moments.means, 0)[None] + moments.rest
    return jnp.where(present[:, None], centred - jnp.sum(share * centred, 0)[None], 0.0), present


def _condition_number(moments: ClassMoments) -> Array:
    means, undefined = finite_part(moments.means / moments.unit)
    values = jnp.linalg.svd(means, compute_uv=False)  # absent classes add zeros at the end
    present = jnp.sum(moments.counts > 0)
    least = values[jnp.minimum(present, values.shape[0]) - 1]
    rounding = max(means.shape) * jnp.finfo(means.dtype).eps
    enough = (present <= values.shape[0]) & (least > rounding * values[0])
    return jnp.where(enough, values[0] / jnp.where(enough, least, 1.0), jnp.inf) + undefined


@jax.jit
def trace_ratio(moments: ClassMoments) -> Float[Array, ""]:
    """Return tr(S_W pinv(S_B)) / C, the within-class covariance in units of the between-class covariance.

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
    within, classes = moments.scatter / jnp.sum(moments.counts), jnp.sum(present)
    means, undefined = finite_part(means)
    # S_B = M^T M / C with few rows M, so that pinv(S_B) / C = pinv(M) pinv(M)^T.
    known = jax.lax.stop_gradient(means)
    left, values, right = jnp.linalg.svd(known, full_matrices=False)
    rounding = max(means.shape) * float(jnp.finfo(means.dtype).eps)
    # Centred means have rank C - 1 at most, even if rounding makes the last singular value
    # positive.
    kept = (values > jnp.maximum(rounding * values[0], smallest)) & (
        jnp.arange(len(values)) < classes - 1
    )
    # `means` - `known` is zero and carries the derivative.
    means = product(left * jnp.where(kept, values, 0.0)[None], right) + (means - known)
    inverse = jnp.linalg.pinv(means, rtol=rounding)
    ratio = jnp.sum(inverse * product(within, inverse))
    spread = (classes > 1) & (jnp.trace(within) > 0)
    return jnp.where(values[0] > smallest, ratio, jnp.where(spread, jnp.inf, jnp.nan)) + undefined


def _about_their_mean(moments: ClassMoments) -> tuple[Array, Bool[Array, " classes"], Array]:
    """Return class means minus their mean over `unit`, 0 if absent, True if present, and a size that counts as zero."""
    means, present = _centred(moments, jnp.ones_like(moments.counts))
    means = means / moments.unit
    # Differences of samples are summed, so the rounding is proportional to the samples' distances
    # from their mean.
    number = jnp.sum(moments.counts)
    size = jnp.sqrt(
        jnp.sum(moments.spread / number) + jnp.sum(moments.counts / number * jnp.sum(means**2, 1))
    )
    return (
        means,
        present,
        jax.lax.stop_gradient(8 * means.shape[0] ** 0.5 * jnp.finfo(means.dtype).eps * size),
    )


@jax.jit
def simplex_frame(moments: ClassMoments) -> Frame:
    """Return the distances of centred class means from a simplex frame.

    Source: Papyan, Han and Donoho (2020), NC2.
    """
    means, present, smallest = _about_their_mean(moments)
    norms = root(jnp.sum(means**2, 1))
    classes = jnp.sum(present)
    average = jnp.mean(norms, where=present)
    apart = (classes > 1) & (jnp.max(norms) > smallest)
    directed = apart & jnp.all(~present | (norms > smallest))
    deviation = root(jnp.mean((norms - average) ** 2, where=present))
    unit = means / jnp.where(norms > 0, norms, 1.0)[:, None]
    rows, columns = np.triu_indices(means.shape[0], 1)
    cosines = product(unit, unit.T)[rows, columns]
    both = present[rows] & present[columns]
    variance = jnp.mean((cosines - jnp.mean(cosines, where=both)) ** 2, where=both)
    off = jnp.mean(jnp.abs(cosines + 1.0 / (classes - 1)), where=both)
    return Frame(
        equinorm=jnp.where(apart, deviation / jnp.where(apart, average, 1.0), jnp.nan),
        equiangularity=jnp.where(directed, root(variance), jnp.nan),
        maximal_angle=jnp.where(directed, off, jnp.nan),
    )


@jax.jit
def self_duality(
    moments: ClassMoments, classifier: Float[Array | np.ndarray, "classes d"]
) -> Float[Array, ""]:
    """Return |W / |W| - M / |M||^2 of the last layer's weights W and the centred class means M, in Frobenius norms.

    Source: Papyan, Han and Donoho (2020), NC3.
    """
    means, present, smallest = _about_their_mean(moments)
    weights = jnp.where(present[:, None], jnp.asarray(classifier), 0.0)
    weights = weights / scale_of(jnp.max(jnp.abs(weights)))
    size = jnp.linalg.norm(means)
    return jnp.sum(
        (weights / jnp.linalg.norm(weights) - means / jnp.where(size > smallest, size, jnp.nan))
        ** 2
    )


@jax.jit
def nearest_centre_agreement(
    features: Float[Array, "n d"], logits: Float[Array, "n classes"], moments: ClassMoments
) -> Float[Array, ""]:
    """Return the fraction of samples [samples, d] that the network assigns to the class with the nearest mean.

    Source: Papyan, Han and Donoho (2020), NC4.
    """
    means, present, _ = _about_their_mean(moments)
    # |z - mu|^2 minus |z|^2, about the middle of the means because an offset would cancel digits.
    share = jnp.where(present, 1.0, 0.0)[:, None] / jnp.sum(present)
    middle = jnp.sum(share * moments.means, 0)[None]
    about = features - middle - jnp.sum(share * (moments.means - middle + moments.rest), 0)[None]
    about = about / moments.unit
    distance = jnp.where(
        present[None], jnp.sum(means**2, 1)[None] - 2 * product(about, means.T), jnp.inf
    )
    agree = jnp.mean(jnp.argmin(distance, 1) == jnp.argmax(logits, 1), dtype=distance.dtype)
    defined = jnp.isfinite(jnp.min(distance, 1)) & jnp.isfinite(jnp.max(logits, 1))
    return jnp.where(jnp.all(defined), agree, jnp.nan)
