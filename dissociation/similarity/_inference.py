"""Jackknife intervals over samples, tests against independence, and calibrated scores."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
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
from dissociation._core.rounding_ties import ROUNDINGS
from dissociation._core.splits import folds
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
    Kinds,
    Units,
    all_orders,
    kinds_of,
    log_number,
    random_orders,
    stacked_by_length,
    units_of,
)
from dissociation.similarity._tables import tables
from dissociation.training._progress import MeterFactory

BLOCKS = ("shuffled", "contiguous")
"""Blocks of samples: by a fixed permutation, or of neighbouring samples for time series."""

CORRECTIONS = ("holm", "bh", "by", "none")
"""Holm's correction, Benjamini and Hochberg's, Benjamini and Yekutieli's, or none."""


# The null of few samples, or of few different ones, has atoms, and the cost of moments is the cube
# of their number.
FEWEST = 20
"""Smallest number of samples for tests by moments."""

MOST = 4096
"""Largest number of samples for tests by moments."""

FEWEST_ORDERS = 1e6
"""Smallest number of orders that differ for tests by moments."""

FEWEST_EXCHANGES = 20
"""Smallest number of orders of groups for a test."""

LEAST_P_VALUE = 1e-16
"""Smallest p-value from moments. Smaller ones are set to it and printed as "< 1e-16"."""


HostArray = Float[np.ndarray, "..."]


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
    num_positions: int = 1,
    groups: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Return the samples that remain without each block, [choices, remaining] per size of blocks.

    Blocks hold whole groups. Without blocks, return nothing.
    """
    if num_blocks is None:
        return []
    unit_of_row: Any = groups
    kind = "groups"
    if groups is None:
        conditions = np.arange(number // repeats // num_positions)
        unit_of_row = np.tile(np.repeat(conditions, num_positions), repeats)
        kind = "samples without repeats and positions"
    num_units = int(unit_of_row.max()) + 1
    if check_count("num_blocks", num_blocks, minimum=2) > num_units:
        fail("num_blocks", f"be at most {num_units}, the number of {kind}", num_blocks)

    # A bootstrap would draw samples twice, which are then their own nearest neighbours and raise
    # similarities.
    remaining = []
    for block in folds(num_units, num_blocks, contiguous=blocks == "contiguous"):
        is_left_out = np.isin(unit_of_row, block)
        remaining.append(np.flatnonzero(~is_left_out))
    return stacked_by_length(remaining)


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
    """Return Student's interval from values without each block.

    Its centre is the value less its first-order bias.

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
    count = check_count("leave_outs", len(leave_outs), minimum=2)
    check_level(level)
    fractions = np.full(count, 1 / count)
    if sizes is not None:
        check_positive("sizes", sizes)
        fractions = sizes / sizes.sum()
    values, leave_outs = in_common_dtype(values, leave_outs)
    quantile = students_quantile(level, count)
    return _interval(values, leave_outs, quantile, bounds, unbias, jnp, fractions)


def students_quantile(level: float, count: int) -> float:
    """Return the half width, in standard errors, of Student's interval from `count` numbers."""
    return float(stats.t.ppf(0.5 + 0.5 * level, count - 1))


def _unbounded(bounds: tuple[float, float], rounding: float, xp: Any) -> tuple[Callable, Callable]:
    """Return a map from within the bounds to an unbounded scale, and its inverse."""
    low, high = bounds
    inside = 1 - 4 * rounding
    if high == 1 and low >= -1:
        return lambda v: xp.arctanh(xp.clip(v, -inside, inside)), xp.tanh
    if high == 1:
        return lambda v: -xp.log1p(-xp.minimum(v, inside)), lambda z: -xp.expm1(-z)
    return lambda v: v, lambda z: xp.clip(z, low, high)


def interval(
    values: Any,
    leave_outs: Any,
    quantile: float,
    bounds: tuple[float, float],
    unbias: bool,
    xp: Any,
    fractions: Any,
) -> Interval:
    """Return `jackknife_interval` from the fractions of samples in the blocks.

    `xp` is JAX or NumPy, which compiles nothing.
    """
    fractions = fractions.reshape(-1, *(1,) * values.ndim).astype(values.dtype)
    rounding = float(jnp.finfo(values.dtype).eps)
    # Near a bound, arctanh and log magnify rounding.
    if np.isfinite(bounds).all():
        width = ROUNDINGS * rounding
        for bound in bounds:
            values = xp.where(xp.abs(values - bound) <= width, bound, values)
            leave_outs = xp.where(xp.abs(leave_outs - bound) <= width, bound, leave_outs)

    def spread(value, leave_outs):
        """Return the bias and the standard error of a value."""
        changes = leave_outs - value[None]
        bias = xp.sum((1 - fractions) * changes, 0)
        deviations = (1 / fractions - 1) * changes - bias[None]
        variances = fractions / (1 - fractions) * deviations**2
        return bias, xp.sqrt(xp.mean(variances, 0))

    # An interval on an unbounded scale stays within the bounds when it is mapped back.
    to_line, from_line = _unbounded(bounds, rounding, xp)
    z = to_line(values)
    shift, error = spread(z, to_line(leave_outs))
    half_width = quantile * error
    centre = z
    if unbias:
        centre = z - shift
    bias, raw_error = spread(values, leave_outs)
    is_constant = xp.all(leave_outs == values[None], 0)

    def mapped_back(z):
        clipped = xp.clip(from_line(z), *bounds)
        return xp.where(is_constant, values, clipped)

    low = mapped_back(centre - half_width)
    estimate = mapped_back(centre)
    high = mapped_back(centre + half_width)
    # Measures of a fixed number of neighbours change with n without limit, so bias is not defined.
    if not unbias:
        estimate = values
    low = xp.minimum(low, estimate)  # also of one rounding
    high = xp.maximum(high, estimate)
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

    value: HostArray = eqx.field(converter=np.asarray)
    p_value: HostArray = eqx.field(converter=np.asarray)
    null_mean: HostArray = eqx.field(converter=np.asarray)
    null_sd: HostArray = eqx.field(converter=np.asarray)
    null_quantile: HostArray = eqx.field(converter=np.asarray)
    calibrated: HostArray = eqx.field(converter=np.asarray)
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
    measure = as_measure(measure)
    form = measure.with_options(**options)
    check_level(level)
    check_count("num_draws", num_draws, minimum=1)
    if key is None:
        fail("key", "be given", "None", "For instance jax.random.key(0)")

    read = partial(as_items, members=False, positions=None, channels=None)
    first = read("x", x)
    second = read("y", y)
    sets = [first, second]
    number = check_sets(sets, measure)
    groups = groups_of(sets, measure, groups, blocks)
    form = form.grouped(groups)
    check_fit(sets, form, number, groups=groups)

    units = units_of(number, measure.repeats, groups=groups)
    too_few = groups is not None and warn_few_exchanges(units)
    orders, _ = orders_of(sets, key, num_draws, units, blocks=blocks)
    # The value itself comes from the same program, so that equal values are equal.
    orders = np.concatenate([np.arange(number)[None], orders])
    steps = [("orders", orders)]
    (table,) = tables(measure, form, first, second, steps, progress=progress)
    values = table[:, 0, 0]
    draws = values[1:]
    if too_few:
        draws = np.full_like(draws, np.nan)
    return placed(measure, np.asarray(values[0]), draws, level)


def groups_of(
    sets: Sequence[Items], measure: Measure, groups: Any, blocks: str
) -> np.ndarray | None:
    """Return the group of each row, or None if each sample is a group.

    Without groups, warn of samples that repeat others in all sets.
    """
    check_choice("blocks", blocks, BLOCKS)
    number = sets[0].number
    num_positions = max(items.num_positions for items in sets)
    if groups is None:
        arrays = []
        for items in sets:
            for stack in items.arrays:
                arrays.extend(np.asarray(stack))
        effect = "intervals and p-values are too small"
        warn_repeated(arrays, effect, repeats=measure.repeats, each=num_positions)
        return None

    if blocks != "shuffled":
        advice = "A group may be a stretch of time"
        fail("blocks", "be 'shuffled' for samples in groups", repr(blocks), advice)
    numbers = group_numbers(groups, number, repeats=measure.repeats, each=num_positions)
    num_groups = int(numbers.max()) + 1
    if num_positions == 1 and num_groups == number // measure.repeats:
        return None
    return numbers


def _distinct(units: Units) -> Kinds:
    """Return the kinds of units that all differ."""
    return [np.arange(len(rows)) for rows in units]


def warn_few_exchanges(units: Units) -> bool:
    """Return True, with a warning, if too few orders exchange groups of equal size for a test."""
    exponent = log_number(_distinct(units))
    if exponent >= np.log(FEWEST_EXCHANGES):
        return False
    sizes = ", ".join(f"{len(rows)} of {rows.shape[1]}" for rows in units)
    warn(
        f"groups of equal size have {round(np.exp(exponent))} orders ({sizes} samples), fewer than "
        f"{FEWEST_EXCHANGES}: p-values and values by chance are NaN."
    )
    return True


def orders_of(
    sets: Sequence[Items], key: PRNGKey, count: int, units: Units, *, blocks: str
) -> tuple[np.ndarray, bool]:
    """Return orders of the second set's samples, [orders, n], and True if they are all that differ.

    The identity is not among them. All are listed if they are at most `count`; else up to `count`
    random ones are drawn.
    """
    if blocks == "shuffled":
        kinds = [_distinct(units)]
        for items in sets:
            # Exchanging equal samples changes nothing, which is known of a single representation.
            if len(items.labels) == 1:
                features = np.asarray(items.arrays[0])[0]
                kinds.append(kinds_of(features, units))
        numbers = [log_number(of_units) for of_units in kinds]
        fewest = int(np.argmin(numbers))
        # If all samples are equal, no order but the identity can be listed.
        if np.log(1.5) < numbers[fewest] <= np.log(count + 1.5):
            orders = all_orders(units, kinds[fewest])
            # Inverses of orders of the first set are orders of the second.
            if len(sets) == 2 and len(sets[0].labels) == 1 and fewest == 1:
                orders = np.argsort(orders, 1)
            return orders, True
    return random_orders(key, count, units, blocks=blocks), False


def placed(measure: Measure, value: np.ndarray, draws: np.ndarray, level: float) -> PermutationTest:
    """Return the test of a value against the values `draws` in other orders, [draws, ...]."""
    sign = 1.0 if measure.larger_is_closer else -1.0
    size = np.maximum(np.abs(value), np.abs(draws).max(0))
    slack = 8 * np.finfo(draws.dtype).eps * size
    # Ties count as hits, so that p-values are not too small if values can be equal.
    hits = np.sum(sign * draws >= sign * value - slack, 0)
    is_defined = np.isfinite(value) & np.isfinite(draws).all(0)
    num_draws = len(draws)
    p_value = np.where(is_defined, (1 + hits) / (1 + num_draws), np.nan)

    quantile = sign * np.quantile(sign * draws, level, axis=0)
    spread = np.full_like(value, np.nan)
    if num_draws > 1:
        spread = draws.std(0, ddof=1)
    calibrated = calibrate(value, quantile, measure.identical)
    mean = draws.mean(0)
    return PermutationTest(value, p_value, mean, spread, quantile, calibrated, num_draws)


def largest_p_values(
    measure: Measure,
    values: np.ndarray,
    draws: np.ndarray,
    is_tested: np.ndarray,
) -> np.ndarray:
    """Return p-values corrected for the number of tested pairs, NaN for the others.

    Tables are [items, others], and `draws` [orders, items, others].

    In each order the statistic is the largest over pairs of the value less its mean over orders,
    divided by its deviation. p = (1 + hits) / (1 + orders), where ties are hits.

    References:
        Westfall and Young (1993), Resampling-based multiple testing.
    """
    sign = 1.0 if measure.larger_is_closer else -1.0
    # The values belong to the orders, so that no order is special under independence.
    table = np.concatenate([values[None], draws])[:, is_tested].astype(float)
    deviations = table - table.mean(0)
    rounding = 8 * np.finfo(draws.dtype).eps * np.abs(table).max(0, initial=0)
    spread = table.std(0)
    # A pair that all orders score alike is never the largest.
    is_constant = spread <= rounding
    spread[is_constant] = np.inf
    statistics = sign * deviations / spread
    slack = rounding / spread
    largest = statistics[1:].max(1, initial=-np.inf)
    hits = np.sum(largest[:, None] >= statistics[0] - slack, 0)
    p_values = np.full(values.shape, np.nan)
    p_values[is_tested] = np.where(is_constant, 1.0, (1 + hits) / len(table))
    return p_values


@validated
def calibrate(
    value: Float[Array | np.ndarray, "..."],
    null_quantile: Float[Array | np.ndarray, "..."],
    best: Scalar = 1.0,
) -> Float[Array, "..."]:
    """Return (value - null_quantile) / (best - null_quantile).

    It is 0 for chance and 1 for the best value.

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
    ratio = (value - null_quantile) / jnp.where(room == 0, 1.0, room)
    return jnp.where(room == 0, jnp.nan, ratio)


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
    is_tested = ~np.isnan(values)
    tested = values[is_tested]
    if np.any((tested < 0) | (tested > 1)):
        fail("p_values", "lie from 0 to 1", f"{tested.min()} to {tested.max()}")
    if method == "none" or not tested.size:
        return values

    if method == "holm":
        order = np.argsort(tested)
        products = tested[order] * np.arange(len(tested), 0, -1)
        tested[order] = np.minimum(np.maximum.accumulate(products), 1.0)
    else:
        tested = stats.false_discovery_control(tested, method=method)
    values[is_tested] = tested
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
    count = len(values)
    if count < 3:
        fail("values", "be of at least 3 members", count)
    check_level(level)
    return _member_interval(to_device(values), students_quantile(level, count), bounds)


@eqx.filter_jit
def _member_interval(values: Array, quantile: float, bounds: tuple[float, float]) -> MemberInterval:
    count = len(values)
    is_diagonal = jnp.eye(count, dtype=bool)
    table = jnp.where(is_diagonal, 0.0, values)
    # Pairs share members and are not independent, so whole members are left out.
    total = jnp.sum(table)
    of_members = jnp.sum(table, 0) + jnp.sum(table, 1)
    mean = total / (count * (count - 1))
    leave_outs = (total - of_members) / ((count - 1) * (count - 2))
    fractions = np.full(count, 1 / count)
    # A mean over pairs has no bias, and lies inside of its interval.
    limits = interval(mean, leave_outs, quantile, bounds, False, jnp, fractions)
    return MemberInterval(mean, limits.standard_error, limits.low, limits.high)


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
    number = len(matrix)
    trace = jnp.trace(matrix)
    # Without a trace the third moment has few terms.
    centring = jnp.eye(number, dtype=matrix.dtype) - 1 / number
    matrix = matrix - trace / (number - 1) * centring
    diagonal = jnp.diagonal(matrix)
    square = product(matrix, matrix)
    image = product(matrix, diagonal[:, None])
    return Invariants(
        trace=trace,
        diagonal2=jnp.sum(diagonal**2),
        all2=jnp.sum(matrix**2),
        diagonal3=jnp.sum(diagonal**3),
        all3=jnp.sum(matrix**3),
        ends=diagonal @ image[:, 0],
        paths=jnp.sum(diagonal * jnp.diagonal(square)),
        cycles=jnp.sum(square * matrix),
    )


def null_moments(a: Invariants, b: Invariants, number: int) -> tuple[Any, Any, Any]:
    """Return mean, variance and third central moment of <A, P B P^T> over permutations P of n > 5.

    Source: Kazi-Aoual et al. (1995).
    """
    n = float(number)
    n2 = n**2
    n3 = n**3
    n4 = n**4
    a, b = jax.tree.map(lambda total: np.asarray(total, float), (a, b))
    mean = np.asarray(a.trace * b.trace / (n - 1))

    loose_a = n * (n + 1) * a.diagonal2 - 2 * (n - 1) * a.all2
    loose_b = n * (n + 1) * b.diagonal2 - 2 * (n - 1) * b.all2
    variance = 2 * a.all2 * b.all2 / ((n + 1) * (n - 2))
    scale = (n + 1) * n * (n - 1) * (n - 2) * (n - 3)
    variance += loose_a * loose_b / scale

    # At trace zero the published formulas are bilinear in these few terms.
    weights = {
        ("diagonal3", "diagonal3"): n2 * (n + 1) * (n2 + 15 * n - 4),
        ("all3", "all3"): 4 * (n4 - 8 * n3 + 19 * n2 - 4 * n - 16),
        ("ends", "ends"): 6 * (n4 - 8 * n3 + 21 * n2 - 6 * n - 24),
        ("paths", "paths"): 12 * (n4 - n3 - 8 * n2 + 36 * n - 48),
        ("cycles", "cycles"): 8 * (n3 - 9 * n2 + 26 * n - 22),
        ("all3", "ends"): 24 * (n2 - n - 4),
        ("all3", "paths"): 24 * (n3 - 3 * n2 - 2 * n + 8),
        ("ends", "paths"): 24 * (n3 - 2 * n2 - 3 * n + 12),
        ("all3", "diagonal3"): -4 * n * (n - 1) * (n2 - n + 4),
        ("ends", "diagonal3"): -6 * n * (n - 1) * (n2 - n + 4),
        ("paths", "diagonal3"): -12 * n * (n - 1) ** 2 * (n + 4),
        ("cycles", "diagonal3"): 16 * n * (n - 1) * (n - 2),
        ("cycles", "all3"): -8 * (3 * n2 - 15 * n + 16),
        ("cycles", "ends"): -8 * (3 * n2 - 15 * n + 24),
        ("cycles", "paths"): -8 * (n - 2) * (3 * n2 - 15 * n + 24),
    }
    third = np.zeros(mean.shape)
    for (first, second), weight in weights.items():
        third = third + weight * getattr(a, first) * getattr(b, second)
        if first != second:
            third = third + weight * getattr(a, second) * getattr(b, first)
    num_orders = n * (n - 1) * (n - 2) * (n - 3) * (n - 4) * (n - 5)
    return mean, variance, third / num_orders


@eqx.filter_jit
def _invariants(
    gram: Callable[[Array], Prepared], stacks: list[Array], indices: Array
) -> Invariants:
    """Return the sums over matrices of representations.

    `indices` [representations, 2] are those of a stack, and of an item in it.
    """
    # The code of the sums, most of the program, is compiled once for stacks of all widths.
    matrices = [lambda item, stack=stack: gram(stack[item]).entries for stack in stacks]

    def of_item(index):
        matrix = lax.switch(index[0], matrices, index[1])
        return invariants(matrix)

    return lax.map(of_item, indices)


def log_orders(sets: Sequence[Items], units: Units) -> np.ndarray:
    """Return the logarithm of the number of orders that differ for each pair, [items, others]."""
    logs = []
    for items in sets:
        of_set = np.zeros(len(items.labels))
        for stack, indices in items.stacks():
            kinds = [kinds_of(features, units) for features in np.asarray(stack)]
            of_set[indices] = list(map(log_number, kinds))
        logs.append(of_set)
    of_all = log_number(_distinct(units))
    return logs[0][:, None] + logs[-1][None] - of_all


def _invariants_of_pairs(gram: Any, sets: Sequence[Items]) -> tuple[Invariants, Invariants]:
    """Return the sums of rows [items, 1] and of columns [1, others]."""
    stacks_of_width = defaultdict(list)
    indices = []  # of the representations of each set, in the order of its labels
    for items in sets:
        of_set = np.zeros((len(items.labels), 2), int)
        for array, labels in items.stacks():
            width = array.shape[2]
            stacks = stacks_of_width[width]
            start = sum(map(len, stacks))
            of_set[labels, 0] = list(stacks_of_width).index(width)
            of_set[labels, 1] = np.arange(start, start + len(labels))
            stacks.append(np.asarray(array))
        indices.append(of_set)

    joined = [to_device(np.concatenate(stacks)) for stacks in stacks_of_width.values()]
    sums = _invariants(gram, joined, to_device(np.concatenate(indices)))
    sums = jax.device_get(sums)
    num_rows = len(indices[0])
    num_columns = len(indices[-1])
    a = jax.tree.map(lambda numbers: numbers[:num_rows, None], sums)
    b = jax.tree.map(lambda numbers: numbers[None, -num_columns:], sums)
    return a, b


def moment_p_values(
    values: Any, gram: Any, sets: Sequence[Items], log_numbers: np.ndarray
) -> np.ndarray:
    """Return p-values [items, others] of inner products of unit matrices over samples.

    They follow Pearson's type III law, which has the null's exact mean, variance and skewness.
    P-values below 1 / 1000 are extrapolated, down to one over the number of orders that differ, of
    which `log_numbers` are logarithms.
    """
    values = np.asarray(values, float)
    if len(sets) == 2:
        sets = of_one_width(*sets)
    a, b = _invariants_of_pairs(gram, sets)
    mean, variance, third = null_moments(a, b, sets[0].number)
    with np.errstate(invalid="ignore", divide="ignore"):
        spread = np.sqrt(variance)
        skew = np.clip(third / spread**3, -1e3, 1e3)

    # If all orders score alike but for rounding, as for samples at equal distances, there is
    # nothing to test.
    is_finite = np.isfinite(values)
    is_constant = is_finite & (spread <= 1e-5 * np.abs(mean))
    is_tested = is_finite & (spread > 0) & ~is_constant
    # Three moments do not determine the far tail.
    tail = stats.pearson3.sf(values, skew, loc=mean, scale=spread)
    tail = np.maximum(tail, LEAST_P_VALUE)
    tail = np.maximum(tail, np.exp(-log_numbers))
    untested = np.where(is_constant, 1.0, np.nan)
    return np.where(is_tested, tail, untested)
