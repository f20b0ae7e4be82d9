"""Jackknife intervals over samples, tests by permutations or the moments of the null, and calibrated scores."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy import stats

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_known,
    check_level,
    check_positive,
    fail,
    warn,
)
from dissociation._core.conversion import to_device
from dissociation._core.groups import group_numbers, warn_repeated
from dissociation._core.linalg import product
from dissociation._core.results import Result, printed
from dissociation._core.splits import folds
from dissociation._core.ties import ROUNDINGS
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.similarity._base import (
    Features,
    Measure,
    OtherFeatures,
    Prepared,
    in_common_dtype,
)
from dissociation.similarity._items import Items, as_items, check_fit, check_sets, of_one_width
from dissociation.similarity._measures import as_measure
from dissociation.similarity._orders import (
    Units,
    all_orders,
    kinds_of,
    log_number,
    random_orders,
    units_of,
)
from dissociation.similarity._tables import tables
from dissociation.training._progress import MeterFactory

BLOCKS = ("shuffled", "contiguous")
"""Names of blocks of samples: drawn by a fixed permutation, or of neighbouring samples for time series."""

CORRECTIONS = ("holm", "bh", "by", "none")
"""Holm's correction, Benjamini and Hochberg's, Benjamini and Yekutieli's, or none."""


# The null of few samples, or of few different ones, has atoms, and the cost of moments is the cube
# of their number.
FEWEST, MOST = 20, 4096
"""Limits of the number of samples for tests by moments."""

FEWEST_ORDERS = 1e6
"""Smallest number of orders that differ for tests by moments."""

FEWEST_EXCHANGES = 20
"""Smallest number of orders of groups for a test."""

LEAST_P_VALUE = 1e-16
"""Smallest p-value from moments. Smaller ones are set to it and printed as "< 1e-16"."""


class Interval(NamedTuple):
    """Jackknife interval, in arrays of one shape.

    Attributes:
        standard_error: Standard error of the value, in its unit.
        low: Lower end of the interval about `estimate`.
        high: Upper end of the interval about `estimate`.
        bias: First-order bias of the value.
        estimate: Value without its bias, within the bounds and between `low` and `high`; the value
            itself if no bias is removed.
    """

    standard_error: Array
    low: Array
    high: Array
    bias: Array
    estimate: Array

    __repr__ = printed


def kept_rows(
    number: int,
    num_blocks: Any,
    blocks: str = "shuffled",
    repeats: int = 1,
    each: int = 1,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the samples that remain without each block of whole groups, [choices, remaining] per size of blocks."""
    conditions = number // repeats // each
    of_rows = np.tile(np.repeat(np.arange(conditions), each), repeats) if groups is None else groups
    units, kind = (
        int(of_rows.max()) + 1,
        "samples without repeats and positions" if groups is None else "groups",
    )
    if check_count("num_blocks", num_blocks, minimum=2) > units:
        fail("num_blocks", f"be at most {units}, the number of {kind}", num_blocks)
    # A bootstrap would draw samples twice, which are then their own nearest neighbours and raise
    # similarities.
    left_out = folds(units, num_blocks, contiguous=blocks == "contiguous")
    kept = [np.flatnonzero(~np.isin(of_rows, block)) for block in left_out]
    return [
        np.stack([rows for rows in kept if len(rows) == size])
        for size in sorted({len(rows) for rows in kept})
    ]


@validated
def jackknife_interval(
    values: Float[Array | np.ndarray, "*rest"],
    leave_outs: Float[Array | np.ndarray, "blocks *rest"],
    *,
    sizes: Float[Array | np.ndarray, " blocks"] | None = None,
    level: float = 0.9,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    unbias: bool = True,
) -> Interval:
    """Return Student's interval from values without each block, about the value less its first-order bias.

    With B blocks, z = g(value) on an unbounded scale, z_b without block b, and the fraction f_b of
    samples in block b,

        centre = z - s,   s = sum_b (1 - f_b)(z_b - z),
        error^2 = mean_b (f_b / (1 - f_b)) ((1 / f_b - 1)(z_b - z) - s)^2,

    which for blocks of one size are z - (B - 1)(mean z_b - z) and (B - 1) / B sum_b (z_b - mean
    z_b)^2.

    g is arctanh for bounds within -1 and 1, -log(1 - value) for others up to 1, else the identity.

    Args:
        values: Values of all samples.
        leave_outs: Values without each block.
        sizes: Number of samples in each block; equal by default.
        level: Coverage, between 0 and 1.
        bounds: Smallest and largest value of the measure.
        unbias: If False, the interval lies about z, as for measures of a fixed number of
            neighbours.

    Returns:
        The estimate and its interval, within the bounds. Values within 64 rounding units of a bound
        equal it.

    Raises:
        ValueError: If there is one block, or `level` is out of range.

    References:
        Efron and Tibshirani (1993), An introduction to the bootstrap, chapter 11; Kunsch (1989),
        The jackknife and the bootstrap for general stationary observations; Busing, Meijer and van
        der Leeden (1999), Delete-m jackknife for unequal m.
    """
    count = check_count("leave_outs", leave_outs.shape[0], minimum=2)
    check_level(level)
    if sizes is not None:
        check_positive("sizes", sizes)
    values, leave_outs = in_common_dtype(values, leave_outs)
    fractions = np.full(count, 1 / count) if sizes is None else sizes / sizes.sum()
    return _interval(
        values, leave_outs, students_quantile(level, count), bounds, unbias, jnp, fractions
    )


def students_quantile(level: float, count: int) -> float:
    """Return the half width, in standard errors, of Student's interval from `count` numbers."""
    return float(stats.t.ppf(0.5 + 0.5 * level, count - 1))


def interval(
    values: Any,
    leave_outs: Any,
    quantile: float,
    bounds: tuple[float, float],
    unbias: bool,
    xp: Any,
    fractions: Any,
) -> Interval:
    """Return `jackknife_interval` from the fractions of samples in the blocks, by `xp`: JAX or NumPy.

    NumPy compiles nothing.
    """
    fractions = fractions.reshape(-1, *(1,) * values.ndim).astype(values.dtype)
    least, most = bounds
    rounding = float(jnp.finfo(values.dtype).eps)
    for bound in (
        bounds if np.isfinite(bounds).all() else ()
    ):  # near a bound, arctanh and log magnify rounding
        near = ROUNDINGS * rounding
        values, leave_outs = (
            xp.where(xp.abs(v - bound) <= near, bound, v) for v in (values, leave_outs)
        )
    inside = 1 - 4 * rounding
    # An interval on an unbounded scale stays within the bounds when it is mapped back.
    if most == 1 and least >= -1:
        to, back = lambda v: xp.arctanh(xp.clip(v, -inside, inside)), xp.tanh
    elif most == 1:
        to, back = lambda v: -xp.log1p(-xp.minimum(v, inside)), lambda z: -xp.expm1(-z)
    else:
        to, back = lambda v: v, lambda z: xp.clip(z, least, most)

    def spread(value: Any, each: Any) -> tuple[Any, Any]:
        change = each - value[None]
        bias = xp.sum((1 - fractions) * change, 0)
        parts = (1 / fractions - 1) * change - bias[None]
        return bias, xp.sqrt(xp.mean(fractions / (1 - fractions) * parts**2, 0))

    z = to(values)
    shift, error = spread(z, to(leave_outs))
    half = quantile * error
    centre = z - shift if unbias else z
    bias, raw_error = spread(values, leave_outs)
    same = xp.all(leave_outs == values[None], 0)
    ends = (xp.clip(back(end), least, most) for end in (centre - half, centre, centre + half))
    low, estimate, high = (xp.where(same, values, end) for end in ends)
    # Measures of a fixed number of neighbours change with n without limit, so bias is not defined.
    estimate = estimate if unbias else values
    low, high = xp.minimum(low, estimate), xp.maximum(high, estimate)  # also of one rounding
    return Interval(raw_error, low, high, bias, estimate)


_interval = eqx.filter_jit(interval)


class MemberInterval(Result):
    """Mean over pairs of members, and its interval."""

    mean: Float[Array, ""]
    standard_error: Float[Array, ""]
    low: Float[Array, ""]
    high: Float[Array, ""]


class PermutationTest(Result):
    """Similarity compared with similarities of shuffled samples.

    Attributes:
        value: The measure.
        p_value: Probability of at least this similarity under independence.
        null_mean: Mean over orders of the samples.
        null_sd: Standard deviation over orders.
        null_quantile: Quantile over orders at `level`.
        calibrated: Result of `calibrate`; NaN for measures without a best value.
        num_draws: Drawn orders.
    """

    value: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    p_value: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    null_mean: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    null_sd: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    null_quantile: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    calibrated: Float[np.ndarray, "..."] = eqx.field(converter=np.asarray)
    num_draws: int = eqx.field(static=True)


@validated
def permutation_test(
    measure: str | Measure,
    x: Features,
    y: OtherFeatures,
    *,
    key: PRNGKey | None = None,
    num_draws: int = 999,
    level: float = 0.95,
    blocks: str = "shuffled",
    groups: Any = None,
    progress: str | MeterFactory | None = "late",
    **options: Any,
) -> PermutationTest:
    """Test if two representations are more similar than with samples in another order.

    p = (1 + hits) / (1 + draws), where ties are hits.

    Args:
        measure: A name in `MEASURES`, or a `Measure`.
        x: Features, [n, p].
        y: Features, [n, q].
        key: Random key of the orders, required.
        num_draws: Orders of y's samples.
        level: Level of the null's quantile.
        blocks: "shuffled" for exchangeable samples, "contiguous" for time series, whose orders are
            at most n - 1 cyclic shifts.
        groups: Label of each sample's group, see `pairwise`. Orders exchange groups of equal size.
        progress: See `dissociation.training`.
        options: Options of the measure.

    Returns:
        The test. Small distances count as similar. All but `value` is NaN, with a warning, if fewer
        than 20 orders exchange groups.

    Raises:
        ValueError: If an option is out of range, or the key is missing.

    References:
        Phipson and Smyth (2010), Permutation p-values should never be zero.
    """
    known = as_measure(measure)
    form = known.with_options(**options)
    check_level(level)
    check_count("num_draws", num_draws, minimum=1)
    if key is None:
        fail("key", "be given", "None", "For instance jax.random.key(0)")
    read = partial(as_items, members=False, positions=None, channels=None)
    first, second = read("x", x), read("y", y)
    number = check_sets([first, second], known)
    numbers = groups_of([first, second], known, groups, blocks)
    form = form.grouped(numbers)
    check_fit([first, second], form, number, groups=numbers)
    units = units_of(number, known.repeats, groups=numbers)
    too_few = numbers is not None and warn_few_exchanges(units)
    orders, _ = orders_of([first, second], key, num_draws, units, blocks=blocks)
    # The value itself comes from the same program, so that equal values are equal.
    orders = np.concatenate([np.arange(number)[None], orders])
    values = np.asarray(
        tables(known, form, first, second, [("orders", orders)], progress=progress)[0]
    )[:, 0, 0]
    draws = np.full_like(values[1:], np.nan) if too_few else values[1:]
    return placed(known, np.asarray(values[0]), draws, level)


def groups_of(
    sets: Sequence[Items], measure: Measure, groups: Any, blocks: str
) -> np.ndarray | None:
    """Return the group of each row, or None with a warning of samples that repeat others in all sets."""
    check_choice("blocks", blocks, BLOCKS)
    number, each = sets[0].arrays[0].shape[1], max(one.each for one in sets)
    if groups is None:
        arrays = [
            features for one in sets for stack in one.arrays for features in np.asarray(stack)
        ]
        effect = "intervals and p-values are too small"
        warn_repeated(arrays, effect, repeats=measure.repeats, each=each)
        return None
    if blocks != "shuffled":
        fail(
            "blocks",
            "be 'shuffled' for samples in groups",
            repr(blocks),
            "A group may be a stretch of time",
        )
    numbers = group_numbers(groups, number, repeats=measure.repeats, each=each)
    alone = int(numbers.max()) + 1 == number // measure.repeats // each
    return None if alone and each == 1 else numbers


def warn_few_exchanges(units: Units) -> bool:
    """Return True, with a warning, if too few orders exchange groups of equal size for a test."""
    exponent = log_number([np.arange(len(part)) for part in units])
    if exponent >= np.log(FEWEST_EXCHANGES):
        return False
    sizes = ", ".join(f"{len(part)} of {part.shape[1]}" for part in units)
    warn(
        f"groups of equal size have {round(np.exp(exponent))} orders ({sizes} samples), fewer than "
        f"{FEWEST_EXCHANGES}: p-values and values by chance are NaN."
    )
    return True


def orders_of(
    sets: Sequence[Items], key: PRNGKey, count: int, units: Units, *, blocks: str
) -> tuple[np.ndarray, bool]:
    """Return orders of the second set's samples but the given one, [orders, n], and True if they are all that differ.

    All are listed if they are at most `count`; else up to `count` random ones are drawn.
    """
    if blocks == "shuffled":
        # Exchanging equal samples changes nothing, which is known of a single representation.
        kinds = [[np.arange(len(part)) for part in units]]
        kinds += [
            kinds_of(np.asarray(one.arrays[0])[0], units) for one in sets if len(one.labels) == 1
        ]
        numbers = [log_number(each) for each in kinds]
        fewest = int(np.argmin(numbers))
        # If all samples are equal, there is no other order to list.
        if np.log(1.5) < numbers[fewest] <= np.log(count + 1.5):
            orders = all_orders(units, kinds[fewest])
            of_first = len(sets) == 2 and len(sets[0].labels) == 1 and fewest == 1
            return np.argsort(orders, 1) if of_first else orders, True
    return random_orders(key, count, units, blocks=blocks), False


def placed(measure: Measure, value: np.ndarray, draws: np.ndarray, level: float) -> PermutationTest:
    """Return the test of a value against the values `draws` in other orders, [draws, ...]."""
    sign = 1.0 if measure.larger_is_closer else -1.0
    slack = 8 * np.finfo(draws.dtype).eps * np.maximum(np.abs(value), np.abs(draws).max(0))
    # Ties count as hits, so that p-values are not too small if values can be equal.
    hits = np.sum(sign * draws >= sign * value - slack, 0)
    p_value = np.where(
        np.isfinite(value) & np.isfinite(draws).all(0), (1 + hits) / (1 + len(draws)), np.nan
    )
    quantile = sign * np.quantile(sign * draws, level, axis=0)
    spread = draws.std(0, ddof=1) if len(draws) > 1 else np.full_like(value, np.nan)
    calibrated = calibrate(value, quantile, measure.identical)
    return PermutationTest(value, p_value, draws.mean(0), spread, quantile, calibrated, len(draws))


@validated
def calibrate(
    value: Float[Array | np.ndarray, "..."],
    null_quantile: Float[Array | np.ndarray, "..."],
    best: Scalar = 1.0,
) -> Float[Array, "..."]:
    """Return (value - null_quantile) / (best - null_quantile), 0 for chance and 1 for the best value.

    Args:
        value: Value of a measure.
        null_quantile: Quantile of the null.
        best: Value for a representation with itself.

    Returns:
        At most 1, negative below the null's quantile, NaN if this equals `best`.

    Example:
        >>> round(float(calibrate(0.6, 0.2)), 3)
        0.5
    """
    value, null_quantile = in_common_dtype(value, null_quantile)
    return _calibrated(value, null_quantile, best)


@eqx.filter_jit
def _calibrated(value: Array, null_quantile: Array, best: Scalar) -> Array:
    room = best - null_quantile
    return jnp.where(room == 0, jnp.nan, (value - null_quantile) / jnp.where(room == 0, 1.0, room))


@validated
def adjust_p_values(
    p_values: Float[Array | np.ndarray, "..."], method: str = "holm"
) -> Float[np.ndarray, "..."]:
    """Correct p-values for multiple tests.

    Args:
        p_values: P-values of any shape, from 0 to 1. NaN stays and does not count.
        method: "holm", "bh", "by" or "none".

    Returns:
        Corrected p-values of the same shape.

    Raises:
        ValueError: If `method` is unknown, or known numbers are outside of 0 to 1.

    References:
        Holm (1979), A simple sequentially rejective multiple test procedure; Benjamini and Hochberg
        (1995); Benjamini and Yekutieli (2001).

    Example:
        >>> adjust_p_values(np.array([0.01, 0.04, 0.03]))
        array([0.03, 0.06, 0.06])
    """
    check_choice("method", method, CORRECTIONS)
    check_known("they are sorted on the host", p_values=p_values)
    values = np.array(p_values, float)
    known = ~np.isnan(values)
    if np.any((values[known] < 0) | (values[known] > 1)):
        fail("p_values", "lie from 0 to 1", f"{values[known].min()} to {values[known].max()}")
    if method == "none" or not known.any():
        return values
    own = values[known]
    if method == "holm":
        order = np.argsort(own)
        own[order] = np.minimum(np.maximum.accumulate(own[order] * np.arange(len(own), 0, -1)), 1.0)
    else:
        own = stats.false_discovery_control(own, method=method)
    values[known] = own
    return values


@validated
def member_interval(
    values: Float[Array | np.ndarray, "members members"],
    *,
    level: float = 0.9,
    bounds: tuple[float, float] = (-np.inf, np.inf),
) -> MemberInterval:
    """Return the mean similarity of pairs of members, with a jackknife interval over members.

    The interval is for networks that might be trained, at these samples.

    Args:
        values: One measure of all pairs of members. The diagonal is ignored.
        level: Coverage, between 0 and 1.
        bounds: Smallest and largest value of the measure, which limit the interval.

    Returns:
        The mean, its standard error and the ends of the interval.

    Raises:
        ValueError: If there are fewer than three members or `level` is out of range.

    References:
        Arvesen (1969), Jackknifing U-statistics.
    """
    count = values.shape[0]
    if count < 3:
        fail("values", "be of at least 3 members", count)
    check_level(level)
    return _member_interval(to_device(values), students_quantile(level, count), bounds)


@eqx.filter_jit
def _member_interval(values: Array, quantile: float, bounds: tuple[float, float]) -> MemberInterval:
    count = len(values)
    table = jnp.where(jnp.eye(count, dtype=bool), 0.0, values)
    # Pairs share members and are not independent, so whole members are left out.
    total, rows = jnp.sum(table), jnp.sum(table, 0) + jnp.sum(table, 1)
    mean = total / (count * (count - 1))
    # A mean over pairs has no bias, and lies inside of its interval.
    left = (total - rows) / ((count - 1) * (count - 2))
    found = interval(mean, left, quantile, bounds, False, jnp, np.full(count, 1 / count))
    return MemberInterval(mean, found.standard_error, found.low, found.high)


class Invariants(NamedTuple):
    """Sums over a symmetric matrix over samples, made traceless."""

    trace: Array | np.ndarray  # before
    diagonal2: Array | np.ndarray  # of squares of the diagonal
    all2: Array | np.ndarray  # of squares
    diagonal3: Array | np.ndarray  # of cubes of the diagonal
    all3: Array | np.ndarray  # of cubes
    ends: Array | np.ndarray  # e^T E e, of the matrix E and its diagonal e
    paths: Array | np.ndarray  # e^T diag(E^2)
    cycles: Array | np.ndarray  # tr E^3


def invariants(matrix: Float[Array, "n n"]) -> Invariants:
    """Return the sums over a matrix that determine the null's moments."""
    number = matrix.shape[0]
    trace = jnp.trace(matrix)
    # Without a trace the third moment has few terms.
    matrix = matrix - trace / (number - 1) * (jnp.eye(number, dtype=matrix.dtype) - 1 / number)
    diagonal, square = jnp.diagonal(matrix), product(matrix, matrix)
    return Invariants(
        trace=trace,
        diagonal2=jnp.sum(diagonal**2),
        all2=jnp.sum(matrix**2),
        diagonal3=jnp.sum(diagonal**3),
        all3=jnp.sum(matrix**3),
        ends=diagonal @ product(matrix, diagonal[:, None])[:, 0],
        paths=jnp.sum(diagonal * jnp.diagonal(square)),
        cycles=jnp.sum(square * matrix),
    )


def null_moments(a: Invariants, b: Invariants, number: int) -> tuple[Any, Any, Any]:
    """Return mean, variance and third central moment of <A, P B P^T> over permutations P of n > 5.

    Source: Kazi-Aoual et al. (1995).
    """
    n = float(number)
    a, b = (Invariants(*(np.asarray(part, float) for part in one)) for one in (a, b))
    mean = np.asarray(a.trace * b.trace / (n - 1))
    loose = [n * (n + 1) * one.diagonal2 - 2 * (n - 1) * one.all2 for one in (a, b)]
    variance = 2 * a.all2 * b.all2 / ((n + 1) * (n - 2))
    variance += loose[0] * loose[1] / ((n + 1) * n * (n - 1) * (n - 2) * (n - 3))
    # At trace zero the published formulas are bilinear in these few terms.
    weights = {
        ("diagonal3", "diagonal3"): n**2 * (n + 1) * (n**2 + 15 * n - 4),
        ("all3", "all3"): 4 * (n**4 - 8 * n**3 + 19 * n**2 - 4 * n - 16),
        ("ends", "ends"): 6 * (n**4 - 8 * n**3 + 21 * n**2 - 6 * n - 24),
        ("paths", "paths"): 12 * (n**4 - n**3 - 8 * n**2 + 36 * n - 48),
        ("cycles", "cycles"): 8 * (n**3 - 9 * n**2 + 26 * n - 22),
        ("all3", "ends"): 24 * (n**2 - n - 4),
        ("all3", "paths"): 24 * (n**3 - 3 * n**2 - 2 * n + 8),
        ("ends", "paths"): 24 * (n**3 - 2 * n**2 - 3 * n + 12),
        ("all3", "diagonal3"): -4 * n * (n - 1) * (n**2 - n + 4),
        ("ends", "diagonal3"): -6 * n * (n - 1) * (n**2 - n + 4),
        ("paths", "diagonal3"): -12 * n * (n - 1) ** 2 * (n + 4),
        ("cycles", "diagonal3"): 16 * n * (n - 1) * (n - 2),
        ("cycles", "all3"): -8 * (3 * n**2 - 15 * n + 16),
        ("cycles", "ends"): -8 * (3 * n**2 - 15 * n + 24),
        ("cycles", "paths"): -8 * (n - 2) * (3 * n**2 - 15 * n + 24),
    }
    third = np.zeros(np.broadcast_shapes(mean.shape))
    for (one, other), weight in weights.items():
        third = third + weight * getattr(a, one) * getattr(b, other)
        if one != other:
            third = third + weight * getattr(a, other) * getattr(b, one)
    return mean, variance, third / (n * (n - 1) * (n - 2) * (n - 3) * (n - 4) * (n - 5))


@eqx.filter_jit
def _invariants(
    gram: Callable[[Array], Prepared], stacks: list[Array], indices: Array
) -> Invariants:
    """Return the sums over matrices of representations, by indices [representations, 2] of a stack and within it."""
    # The code of the sums, most of the program, is compiled once for stacks of all widths.
    matrices = [lambda item, stack=stack: gram(stack[item]).entries for stack in stacks]
    return jax.lax.map(
        lambda index: invariants(jax.lax.switch(index[0], matrices, index[1])), indices
    )


def log_orders(sets: Sequence[Items], units: Units) -> np.ndarray:
    """Return the logarithm of the number of orders that differ for each pair, [items, others]."""
    logs = []
    for one in sets:
        of_set = np.zeros(len(one.labels))
        for stack, places in zip(one.arrays, one.places, strict=True):
            of_set[places] = [
                log_number(kinds_of(features, units)) for features in np.asarray(stack)
            ]
        logs.append(of_set)
    of_all = log_number([np.arange(len(part)) for part in units])
    return logs[0][:, None] + logs[-1][None] - of_all


def moment_p_values(
    values: Any, gram: Any, sets: Sequence[Items], log_numbers: np.ndarray
) -> np.ndarray:
    """Return p-values of inner products of unit matrices over samples, [items, others], from Pearson's type III law.

    It has the null's exact mean, variance and skewness. P-values below 1 / 1000 are extrapolated,
    down to one over the number of orders that differ, of which `log_numbers` are logarithms.
    """
    values = np.asarray(values, float)
    sets = of_one_width(*sets) if len(sets) == 2 else sets
    stacks: dict[int, list[np.ndarray]] = {}  # by width
    indices: list[np.ndarray] = []  # of the representations of each set, in the order of its labels
    for items in sets:
        ordered = np.zeros((len(items.labels), 2), int)
        for stack, labels in zip(items.arrays, items.places, strict=True):
            own = stacks.setdefault(stack.shape[2], [])
            place, before = list(stacks).index(stack.shape[2]), sum(map(len, own))
            ordered[labels] = [(place, before + item) for item in range(len(labels))]
            own.append(np.asarray(stack))
        indices.append(ordered)
    joined = [to_device(np.concatenate(own)) for own in stacks.values()]
    sums = jax.device_get(_invariants(gram, joined, to_device(np.concatenate(indices))))
    rows = len(indices[0])
    columns = len(indices[-1])
    a = Invariants(*(part[:rows, None] for part in sums))
    b = Invariants(*(part[None, -columns:] for part in sums))
    mean, variance, third = null_moments(a, b, sets[0].arrays[0].shape[1])
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(variance)
        skew = np.clip(third / spread**3, -1e3, 1e3)
    # If all orders score alike but for rounding, as for samples at equal distances, there is
    # nothing to test.
    alike = np.isfinite(values) & (spread <= 1e-5 * np.abs(mean))
    known = np.isfinite(values) & (spread > 0) & ~alike
    # Three moments do not determine the far tail.
    tail = np.maximum(stats.pearson3.sf(values, skew, loc=mean, scale=spread), LEAST_P_VALUE)
    tail = np.maximum(tail, np.exp(-log_numbers))
    return np.where(known, tail, np.where(alike, 1.0, np.nan))
