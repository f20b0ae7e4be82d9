"""Comparison of all pairs of representations of layers and members."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_count, check_level, fail, fail_kind, warn
from dissociation._core.conversion import to_device
from dissociation._core.results import Result
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._representations import layer_named
from dissociation.similarity import _inference as inference
from dissociation.similarity._base import Form, Measure, warn_dropped
from dissociation.similarity._items import Items, Representations, as_items, check_fit, check_sets
from dissociation.similarity._measures import MEASURES, as_measure
from dissociation.similarity._orders import units_of
from dissociation.similarity._tables import Step, tables
from dissociation.training._progress import MeterFactory

DEFAULT_BLOCKS = 20
"""Number of blocks of samples for one pair, if there are as many samples."""

FUNCTIONAL = ("disagreement", "jensen_shannon")
"""Measures of networks' outputs that accompany every pair."""

LARGEST_BIAS = 2
"""Bias in standard errors above which `pairwise` warns."""

SPECTRAL = (
    "cca",
    "svcca",
    "pwcca",
    "angular_similarity",
    "angular_distance",
    "partial_whitening_distance",
)
"""Measures with half of this limit: sums of singular values keep more bias than the first order removes."""


class Similarities(Result):
    """Similarities of all pairs of two sets of representations, which may be the same set.

    Tables are [items, others], or None if they were not computed.

    Attributes:
        values: The measure of all samples.
        estimate: `values` less the first-order bias by the jackknife, within the measure's range;
            `values` for measures that do not converge as samples grow.
        baseline: Mean with one set's samples in other orders.
        standard_error: Standard error over samples, by the jackknife.
        low: Lower ends of the intervals about `estimate`.
        high: Upper ends of the intervals about `estimate`.
        p_values: Probability of such a similarity by chance, not corrected for the number of pairs;
            NaN for items with themselves.
        disagreement: Fraction of samples to which the two networks assign different classes; None
            without outputs, or with one number as output.
        jensen_shannon: Divergence of predicted distributions, in nats.
        output_similarity: The measure of the two networks' outputs.
        items: Layer and member of each row.
        others: Layer and member of each column.
        measure: Name of the measure.
        num_samples: Number of samples.
        counts_once: True if the table is symmetric, so that its two entries of a pair are one test.
    """

    values: Float[Array, "..."]
    estimate: Float[Array, "..."] | None
    baseline: Float[Array, "..."] | None
    standard_error: Float[Array, "..."] | None
    low: Float[Array, "..."] | None
    high: Float[Array, "..."] | None
    p_values: Float[Array | np.ndarray, "..."] | None
    disagreement: Float[Array, "..."] | None
    jensen_shannon: Float[Array, "..."] | None
    output_similarity: Float[Array, "..."] | None
    items: tuple[tuple[str, int], ...] = eqx.field(static=True)
    others: tuple[tuple[str, int], ...] = eqx.field(static=True)
    measure: str = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    counts_once: bool = eqx.field(static=True)

    UNITS = {"jensen_shannon": "nats"}
    AXES = ("items", "others")
    LEAST = {"p_values": inference.LEAST_P_VALUE}

    def axis_coordinates(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the labels of rows and columns, by name: an axis and its values."""
        found = {}
        for axis, stem, pairs in (("items", "item", self.items), ("others", "other", self.others)):
            found[axis] = axis, np.asarray([f"{layer} {member}" for layer, member in pairs])
            found[f"{stem}_layers"] = axis, np.asarray([layer for layer, _ in pairs])
            found[f"{stem}_members"] = axis, np.asarray([member for _, member in pairs])
        return found

    def bars(self) -> tuple[Array, Array]:
        """Return `estimate`, [pairs], and its distances to `low` and `high`, [2, pairs], for `errorbar`.

        Tables are flattened row by row. `values` have no bars because they may lie outside of the
        interval.

        Raises:
            ValueError: If there are no intervals.
        """
        if self.estimate is None or self.low is None or self.high is None:
            fail("num_blocks", "be given for intervals", "None")
        middle = self.estimate.reshape(-1)
        return middle, jnp.stack([middle - self.low.reshape(-1), self.high.reshape(-1) - middle])

    def between(self, layer: str, other: str | None = None) -> Array:
        """Return the values of one layer's members with another's, [members, members].

        Args:
            layer: Layer of the rows; "features" is the last hidden layer of networks with "logits".
            other: Layer of the columns, by default `layer`.
        """
        other, places = layer if other is None else other, []
        for name, wanted, pairs in (("layer", layer, self.items), ("other", other, self.others)):
            layers = [label for label, _ in pairs]
            wanted = layer_named(name, wanted, layers)
            places.append([place for place, label in enumerate(layers) if label == wanted])
        return self.values[np.ix_(*places)]

    def corrected(self, method: str = "holm") -> Array | np.ndarray | None:
        """Return p-values corrected for the number of pairs by `adjust_p_values`, or None without p-values.

        In a symmetric table each pair counts once. Items with themselves are not tested.

        Args:
            method: One of "holm", "bh", "by" and "none".
        """
        if self.p_values is None:
            return None
        values = np.array(self.p_values, float)
        if not self.counts_once:
            return inference.adjust_p_values(values, method)
        values[np.tril_indices(len(values))] = np.nan
        values = inference.adjust_p_values(values, method)
        return np.fmax(values, values.T)


@validated
def pairwise(
    representations: Representations,
    measure: str | Measure | Callable[..., Array] = "debiased_cka",
    others: Representations | None = None,
    *,
    baseline: bool = True,
    p_values: bool | None = None,
    num_orders: int | None = None,
    key: PRNGKey | None = None,
    num_blocks: int | str | None = "auto",
    blocks: str = "shuffled",
    groups: Any = None,
    level: float = 0.9,
    positions: str | None = None,
    channels: str | None = None,
    members: bool | None = None,
    outputs: str | None = "logits",
    memory_budget: int | None = None,
    progress: str | MeterFactory | None = "late",
    **options: Any,
) -> Similarities:
    """Return one measure of all pairs of representations of the same samples.

    Programs are compiled once for shapes, measure and options. Large problems are split into
    pieces.

    Args:
        representations: Arrays by layer's name, one array, or a list of arrays. Arrays are [n, p],
            [members, n, p] or, for one feature, [n] or [members, n], with more axes in place of p
            if samples have positions. Rows are the same samples in the same order.
        measure: A name in `MEASURES`, a `Measure`, or a function of two arrays [n, p] and [n, q],
            of JAX's operations, for which larger values count as more similar and intervals lie
            about the value (see `custom_measure`).
        others: A second set like the first, whose pairs with the first are compared, as by
            `compare(x, y, measure)`.
        baseline: If True, compute chance values, exactly if they are known, else over random
            orders.
        p_values: If True, test each pair against chance; default for one pair. Tests use moments
            for linear and RBF CKA of 20 to 4096 samples of which a million orders differ, else
            random orders with p-values from 1 / (1 + num_orders), or all orders if they are fewer,
            see `permutation_test`.
        num_orders: Random orders; default 5 for a baseline and 199 for tests. Corrections for many
            pairs need more.
        key: Random key of the orders, by default a fixed one.
        num_blocks: Blocks of samples for `jackknife_interval`, None for no intervals; default 20
            for one pair, if there are as many samples, else None.
        blocks: "shuffled" for blocks by a fixed permutation, or "contiguous" for time series, whose
            baselines and tests shift one of the two.
        groups: Label of each sample's group, integers or text, if samples depend on each other, as
            copies of a stimulus or trials of a subject; or the name of the column, index level or
            coordinate of the frames that holds it. Folds and blocks hold whole groups, orders
            exchange groups of equal size, and measures of pairs of samples (debiased and RBF CKA,
            RSA, neighbours, distance correlation) leave out pairs within a group, or count them as
            a sample with itself.
        level: Coverage of the intervals.
        positions: "samples" or "neurons", the meaning of a sample's positions (pixels, tokens or
            steps). As samples, positions of a sample stay together, and all layers must have the
            same positions.
        channels: With `positions="samples"`, "last" for channels of [n, h, w, c], or "first" for
            [n, c, h, w].
        members: If True, arrays are [members, samples, ...], else [samples, ...]. Default False for
            [n] and [n, p]; required for more axes, except of `models.representations`.
        outputs: Layer of the networks' outputs, which are compared too, except for None or without
            "logits".
        memory_budget: Bytes for prepared representations, by default half of the free memory.
        progress: See `dissociation.training`.
        options: Options of the measure.

    Returns:
        The values, with rows and columns labelled by layer and member. Undefined values are NaN,
        with a warning.

    Raises:
        ValueError: If numbers of samples differ, entries are not finite, or an option is out of
            range.
        TypeError: If representations are of another type.
    """
    check_level(level)
    known = as_measure(measure)
    form = known.with_options(**options)
    axes = {"members": members, "positions": positions, "channels": channels}
    first = as_items("representations" if others is None else "x", representations, **axes)
    second = first if others is None else as_items("y", others, **axes)
    sets, within = [first] if others is None else [first, second], others is None
    number, each = check_sets(sets, known), max(one.each for one in sets)
    numbers = inference.groups_of(sets, known, groups, blocks)
    form = form.grouped(numbers)
    units = number // known.repeats // each if numbers is None else int(numbers.max()) + 1
    one_pair = not within and len(first.labels) == len(second.labels) == 1
    p_values = one_pair if p_values is None else p_values
    if num_blocks == "auto":
        enough = units >= DEFAULT_BLOCKS or (units - 1) * each * known.repeats >= form.minimum
        enough = enough and (numbers is None or units > form.minimum)
        num_blocks = min(units, DEFAULT_BLOCKS) if one_pair and enough else None
    kept = []
    if num_blocks is not None:
        kept = inference.kept_rows(number, num_blocks, blocks, known.repeats, each, numbers)
    check_fit(sets, form, number, kept, numbers)
    _warn_dropped(form, sets)
    symmetric = within and known.symmetric
    # Moments and expected values hold for exchangeable samples.
    alike = blocks == "shuffled" and each == 1 and numbers is None
    by_moments = form.gram is not None and alike and inference.FEWEST <= number <= inference.MOST
    moved = units_of(number, known.repeats, each, numbers)
    log_numbers = inference.log_orders(sets, moved) if p_values and by_moments else np.zeros(())
    few = log_numbers < np.log(inference.FEWEST_ORDERS)
    drawn = p_values and few.any(), baseline and (form.expected is None or not alike)
    steps: list[Step] = [("all", None)]
    are_all = too_few = False
    if any(drawn):
        # A mean needs few orders, a p-value many: its smallest value is 1 / (1 + orders).
        default = 199 if drawn[0] else 5 if alike else 20
        count = check_count("num_orders", default if num_orders is None else num_orders, minimum=1)
        key = jax.random.key(0) if key is None else key
        too_few = numbers is not None and inference.warn_few_exchanges(moved)
        orders, are_all = inference.orders_of(sets, key, count, moved, blocks=blocks)
        steps.append(("orders", orders))
    steps += [("blocks", rows) for rows in kept]
    (values, *expected), *found = tables(
        known, form, first, second, steps, budget=memory_budget, progress=progress
    )
    if too_few:
        found[0] = np.full_like(found[0], np.nan)
    chance: Any = None
    if drawn[1]:
        chance = np.mean([*found[0], values] if are_all else found[0], 0)
    elif baseline:
        chance = np.where(np.isnan(values), np.nan, expected[0])
    p_value = (
        _p_values(known, form, sets, values, found[0] if drawn[0] else None, log_numbers)
        if p_values
        else None
    )
    error = low = high = estimate = None
    if kept:
        leave_outs = np.concatenate(found[any(drawn) :])
        quantile = inference.students_quantile(level, len(leave_outs))
        with np.errstate(all="ignore"):
            fractions = np.concatenate(
                [np.full(len(rows), 1 - rows.shape[1] / number) for rows in kept]
            )
            interval = inference.interval(
                values, leave_outs, quantile, known.range, known.population, np, fractions
            )
        error, low, high, _, estimate = interval
        if known.population:
            _warn_biased(known, values, interval)
    _warn_undefined(known, values, first, second)
    beside = _of_outputs(values, first, second, outputs, memory_budget)
    results: list[Any] = [values, estimate, chance, error, low, high, *beside]
    if not within and first.single and second.single:
        results, p_value = jax.tree.map(lambda table: table[..., 0, 0], (results, p_value))
    results = jax.tree.map(to_device, results)
    results.insert(6, p_value)  # on the host, in float64
    labels = {"items": tuple(first.labels), "others": tuple(second.labels)}
    return Similarities(
        *results, **labels, measure=known.name, num_samples=number, counts_once=symmetric
    )


@validated
def compare(
    x: Representations,
    y: Representations | None,
    measure: str | Measure | Callable[..., Array] = "debiased_cka",
    **options: Any,
) -> Similarities:
    """Return `pairwise` across two sets of representations, or of one pair.

    One pair has an interval of coverage 0.9 and a p-value by default. For tables pass
    `num_blocks=20` and `p_values=True`.

    Args:
        x: Representations as in `pairwise`, or one array [n, p] or [n].
        y: Representations of the same samples.
        measure: Measure as in `pairwise`.
        options: Other options of `pairwise`, and of the measure.

    Returns:
        Results as `pairwise`, [items of x, items of y], or single numbers for two plain arrays.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (100, 3))
        >>> found = compare(x, 2 * x + 1, "linear_cka")
        >>> round(float(found.values), 3), bool(found.baseline < 0.1), bool(found.p_values < 1e-6)
        (1.0, True, True)
    """
    if y is None:
        fail_kind("y", "be representations", "None", "`pairwise` compares one set with itself")
    return pairwise(x, measure, y, **options)


def _p_values(
    measure: Measure,
    form: Form,
    sets: Sequence[Items],
    values: np.ndarray,
    draws: np.ndarray | None,
    log_numbers: np.ndarray,
) -> np.ndarray:
    """Return p-values by the values `draws` in other orders where few orders differ, else by moments."""
    few = log_numbers < np.log(inference.FEWEST_ORDERS)
    p_value = np.full(values.shape, np.nan)
    if draws is not None:
        p_value = inference.placed(measure, values, draws, 0.95).p_value
    if not few.all():
        p_value = np.where(
            few, p_value, inference.moment_p_values(values, form.gram, sets, log_numbers)
        )
    if len(sets) == 1:
        np.fill_diagonal(p_value, np.nan)
    return p_value


def _outputs(one: Items, layer: str | None) -> tuple[Items, list[int]] | None:
    """Return the networks' outputs and each item's index of them, or None."""
    at = [place for place, (name, _) in enumerate(one.labels) if name == layer]
    if not at and layer not in (None, "logits"):
        check_choice("outputs", layer, dict.fromkeys(name for name, _ in one.labels))
    members = [member for _, member in one.labels]
    # Networks without an output cannot be compared by function.
    if max(members) >= len(at):
        return None
    array, places = next(
        found for found in zip(one.arrays, one.places, strict=True) if at[0] in found[1]
    )
    own = array[np.asarray([places.index(place) for place in at])]
    return Items([one.labels[place] for place in at], [own], [list(range(len(at)))]), [
        at[i] for i in members
    ]


def _of_outputs(
    values: np.ndarray, first: Items, second: Items, layer: str | None, budget: int | None
) -> list[np.ndarray | None]:
    """Return disagreement, divergence and the measure of the outputs of each pair."""
    own = _outputs(first, layer)
    other = own if second is first else _outputs(second, layer)
    if own is None or other is None:
        return [None, None, None]
    of_measure = values[np.ix_(own[1], other[1])]
    classes = {outputs.arrays[0].shape[2] for outputs, _ in (own, other)}
    if len(classes) > 1 or classes == {1}:
        return [None, None, of_measure]
    members = np.ix_(*([member for _, member in one.labels] for one in (first, second)))
    known = [MEASURES[name] for name in FUNCTIONAL]
    found = [
        tables(one, one.with_options(), own[0], other[0], budget=budget)[0][0][members]
        for one in known
    ]
    return [*found, of_measure]


def _warn_dropped(form: Form, sets: Sequence[Items]) -> None:
    for one in sets[: len(form.sides)] if form.cut else ():
        for stack, places in zip(one.arrays, one.places, strict=True):
            for place, features in zip(places, stack, strict=True):
                warn_dropped(form, one.shown(place), features)


def _warn_undefined(measure: Measure, values: np.ndarray, first: Items, second: Items) -> None:
    known = np.isfinite(values)
    sides = ((first, ~known.any(1)), (second, ~known.any(0)))
    gone: dict[str, bool] = {}
    for one, undefined in sides:
        for place in np.flatnonzero(undefined).tolist():
            gone[one.shown(place)] = one.is_constant(place)
    if gone:
        # One of a pair is enough for the pair to be undefined.
        names = ", ".join(
            name for name, is_constant in gone.items() if is_constant or not any(gone.values())
        )
        warn(
            f"{measure.name} is not defined for {names}, whose values are NaN: are all samples "
            "the same there?"
        )


def _warn_biased(measure: Measure, values: np.ndarray, interval: inference.Interval) -> None:
    estimate = np.asarray(interval.estimate)
    limit = LARGEST_BIAS / 2 if measure.name in SPECTRAL else LARGEST_BIAS
    leaning = np.abs(interval.bias) > limit * interval.standard_error + 1e-5
    if leaning.any():
        warn(
            f"{leaning.sum()} of {leaning.size} `values` of {measure.name} have a bias larger "
            f"than {limit:g} standard "
            "errors: read `estimate`, from which it is removed to first order. What remains may "
            "exceed the "
            "interval. Use more samples for so many features, or a debiased measure."
        )
    clipped = np.isin(estimate, measure.range) & (np.abs(values - estimate) > 1e-5)
    if clipped.any():
        warn(
            f"{clipped.sum()} of {clipped.size} estimates of {measure.name} left the range "
            f"{measure.range[0]:.4g} to "
            f"{measure.range[1]:.4g} without their bias, and are set to its end."
        )
