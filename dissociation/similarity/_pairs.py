"""Comparison of all pairs of representations of layers and members."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
"""Measures with half of this limit.

Sums of singular values keep more bias than the first order removes.
"""


Table = Float[Array, "..."] | None

Labels = tuple[tuple[str, int], ...]
"""Layer and member of each item."""


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
        family_p_values: P-values corrected for the number of pairs by the largest of all in each
            order; None if moments gave some of them.
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
    estimate: Table
    baseline: Table
    standard_error: Table
    low: Table
    high: Table
    p_values: Float[Array | np.ndarray, "..."] | None
    family_p_values: Float[Array | np.ndarray, "..."] | None
    disagreement: Table
    jensen_shannon: Table
    output_similarity: Table
    items: Labels = eqx.field(static=True)
    others: Labels = eqx.field(static=True)
    measure: str = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    counts_once: bool = eqx.field(static=True)

    UNITS = {"jensen_shannon": "nats"}
    AXES = ("items", "others")
    LEAST = {"p_values": inference.LEAST_P_VALUE}

    def axis_coordinates(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the labels of rows and columns, by name: an axis and its values.

        `to_xarray`, in `dissociation._core.results`, calls this method.
        """
        coordinates = {}
        for axis, stem, pairs in (("items", "item", self.items), ("others", "other", self.others)):
            labels = [f"{layer} {member}" for layer, member in pairs]
            layers = [layer for layer, _ in pairs]
            members = [member for _, member in pairs]
            coordinates[axis] = (axis, np.asarray(labels))
            coordinates[f"{stem}_layers"] = (axis, np.asarray(layers))
            coordinates[f"{stem}_members"] = (axis, np.asarray(members))
        return coordinates

    def bars(self) -> tuple[Array, Array]:
        """Return `estimate`, [pairs], and its distances to `low` and `high`, [2, pairs].

        They are for `errorbar`. Tables are flattened row by row. `values` have no bars because they
        may lie outside of the interval.

        Raises:
            ValueError: If there are no intervals.
        """
        if self.estimate is None or self.low is None or self.high is None:
            fail("num_blocks", "be given for intervals", "None")
        middle = self.estimate.reshape(-1)
        below = middle - self.low.reshape(-1)
        above = self.high.reshape(-1) - middle
        return middle, jnp.stack([below, above])

    def plot(self) -> "Figure":
        """Return a figure of the table and of the best match of each item, both ways.

        Dots mark the best match of each row, and squares that of each column. Items of one set are
        not matched with themselves.
        """
        from dissociation.plotting import _matches as drawing  # matplotlib takes a second
        from dissociation.plotting._axes import house_style

        optional = {}
        values = self.values if self.estimate is None else self.estimate
        fields = {"estimate": values, "low": self.low, "high": self.high, "chance": self.baseline}
        if self.estimate is not None:
            fields["values"] = self.values
        for name, table in fields.items():
            optional[name] = None
            if table is not None:
                optional[name] = np.atleast_2d(np.array(table, float))
        if self.items == self.others:
            np.fill_diagonal(optional["estimate"], np.nan)
        listed = MEASURES.get(self.measure)
        tables = drawing.Tables(
            rows=_titles(self.items),
            columns=_titles(self.others),
            measure=self.measure,
            larger_is_closer=listed is None or listed.larger_is_closer,
            **optional,
        )
        with house_style():
            return drawing.draw_matches(tables)

    def between(self, layer: str, other: str | None = None) -> Array:
        """Return the values of one layer's members with another's, [members, members].

        Args:
            layer: Layer of the rows; "features" is the last hidden layer of networks with "logits".
            other: Layer of the columns, by default `layer`.
        """
        column_layer = layer if other is None else other
        rows = _indices_of("layer", layer, self.items)
        columns = _indices_of("other", column_layer, self.others)
        return self.values[np.ix_(rows, columns)]

    def corrected(self, method: str = "holm") -> Array | np.ndarray | None:
        """Return p-values corrected for the number of pairs by `adjust_p_values`.

        Without p-values, return None. In a symmetric table each pair counts once. Items with
        themselves are not tested.

        Args:
            method: One of "holm", "bh", "by" and "none"; or "largest", which returns
                `family_p_values`.

        Raises:
            ValueError: If `method` is unknown, or "largest" for tests by moments.
        """
        if self.p_values is None:
            return None
        if method == "largest":
            if self.family_p_values is None:
                fail(
                    "method", "be another one for p-values by moments", repr(method), 'Pass "holm"'
                )
            return self.family_p_values
        values = np.array(self.p_values, float)
        if not self.counts_once:
            return inference.adjust_p_values(values, method)
        values[np.tril_indices(len(values))] = np.nan
        values = inference.adjust_p_values(values, method)
        return np.fmax(values, values.T)


def _titles(labels: Labels) -> list[str]:
    """Return the layer of each item, with its member if there are several."""
    titles = []
    for layer, member in labels:
        is_alone = (layer, 1) not in labels
        titles.append(layer if is_alone and layer else f"{layer} {member}".strip())
    return titles


def _indices_of(argument: str, layer: str, labels: Sequence[tuple[str, int]]) -> list[int]:
    """Return the indices of a layer's members among labels."""
    layers = [name for name, _ in labels]
    layer = layer_named(argument, layer, layers)
    return [index for index, name in enumerate(layers) if name == layer]


class _Samples(NamedTuple):
    """Rows of all representations, and how they may be divided and reordered."""

    number: int  # rows
    repeats: int  # of all conditions
    num_positions: int  # rows of one sample
    groups: np.ndarray | None  # group of each row
    blocks: str  # one of `inference.BLOCKS`

    @property
    def are_exchangeable(self) -> bool:
        """Return True if moments and expected values over all orders hold."""
        return self.blocks == "shuffled" and self.num_positions == 1 and self.groups is None

    def default_blocks(self, form: Form) -> int | None:
        """Return the number of blocks for one pair, or None if there are too few samples."""
        rows_per_sample = self.num_positions * self.repeats
        if self.groups is None:
            num_units = self.number // self.repeats // self.num_positions
        else:
            num_units = int(self.groups.max()) + 1
            if num_units <= form.minimum:
                return None
        if num_units >= DEFAULT_BLOCKS or (num_units - 1) * rows_per_sample >= form.minimum:
            return min(num_units, DEFAULT_BLOCKS)
        return None


class _Null(NamedTuple):
    """Orders of samples for tests and for values by chance."""

    log_numbers: np.ndarray  # logarithms of numbers of orders that differ, of each pair; or 0
    orders: np.ndarray | None = None  # [orders, n]
    are_all: bool = False  # True if the orders are all that differ
    too_few: bool = False  # True if too few orders exchange groups
    has_baseline: bool = False  # True if the orders give values by chance
    has_all_tests: bool = False  # True if the orders give the p-values of all pairs


def _null(
    form: Form,
    sets: Sequence[Items],
    samples: _Samples,
    num_orders: int | None,
    key: Any,
    *,
    tests: bool,
    baseline: bool,
) -> _Null:
    """Return the orders of samples that tests and values by chance need."""
    # Moments hold for exchangeable samples.
    by_moments = form.gram is not None and samples.are_exchangeable
    units = units_of(samples.number, samples.repeats, samples.num_positions, samples.groups)
    log_numbers = np.zeros(())
    if tests and by_moments and inference.FEWEST <= samples.number <= inference.MOST:
        log_numbers = inference.log_orders(sets, units)
    is_few = log_numbers < np.log(inference.FEWEST_ORDERS)
    has_all_tests = tests and bool(is_few.all())
    tests = tests and bool(is_few.any())
    has_baseline = baseline and (form.expected is None or not samples.are_exchangeable)
    if not tests and not has_baseline:
        return _Null(log_numbers)

    # A mean needs few orders, a p-value many: its smallest value is 1 / (1 + orders).
    count = 5 if samples.are_exchangeable else 20
    if tests:
        count = 199
    if num_orders is not None:
        count = check_count("num_orders", num_orders, minimum=1)
    if key is None:
        key = jax.random.key(0)
    too_few = samples.groups is not None and inference.warn_few_exchanges(units)
    orders, are_all = inference.orders_of(sets, key, count, units, blocks=samples.blocks)
    return _Null(log_numbers, orders, are_all, too_few, has_baseline, has_all_tests)


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
    comparison = planned(
        representations,
        measure,
        others,
        baseline=baseline,
        p_values=p_values,
        num_orders=num_orders,
        key=key,
        num_blocks=num_blocks,
        blocks=blocks,
        groups=groups,
        level=level,
        positions=positions,
        channels=channels,
        members=members,
        options=options,
    )
    step_tables = comparison.tables(comparison.steps(), memory_budget, progress)
    return concluded(comparison, step_tables, outputs, memory_budget)


class Comparison(NamedTuple):
    """Two sets of representations, or one set twice, and the samples that are compared."""

    measure: Measure
    form: Form
    first: Items
    second: Items
    number: int  # rows
    subsets: list[np.ndarray]  # rows without each block, [choices, remaining]
    null: _Null
    tests: bool
    baseline: bool
    level: float

    @property
    def sets(self) -> list[Items]:
        """Return the sets that differ."""
        if self.first is self.second:
            return [self.first]
        return [self.first, self.second]

    def steps(self) -> list[Step]:
        """Return all samples, the orders, and the samples without each block, as `tables` does."""
        steps: list[Step] = [("all", None)]
        if self.null.orders is not None:
            steps.append(("orders", self.null.orders))
        return [*steps, *(("blocks", rows) for rows in self.subsets)]

    def tables(
        self,
        steps: Sequence[Step],
        budget: int | None = None,
        progress: str | MeterFactory | None = None,
    ) -> list[np.ndarray]:
        """Return the tables of steps, see `tables`."""
        return tables(
            self.measure,
            self.form,
            self.first,
            self.second,
            steps,
            budget=budget,
            progress=progress,
        )


def planned(
    representations: Any,
    measure: Any,
    others: Any,
    *,
    baseline: bool,
    p_values: bool | None,
    num_orders: int | None,
    key: Any,
    num_blocks: int | str | None,
    blocks: str,
    groups: Any,
    level: float,
    positions: str | None,
    channels: str | None,
    members: bool | None,
    options: Mapping[str, Any],
) -> Comparison:
    """Return the comparison of `pairwise` after checks of its arguments."""
    check_level(level)
    measure = as_measure(measure)
    form = measure.with_options(**options)
    read = partial(as_items, members=members, positions=positions, channels=channels)
    is_within = others is None
    first = read("representations" if is_within else "x", representations)
    second = first
    sets = [first]
    if not is_within:
        second = read("y", others)
        sets = [first, second]
    number = check_sets(sets, measure)
    num_positions = max(items.num_positions for items in sets)
    groups = inference.groups_of(sets, measure, groups, blocks)
    form = form.grouped(groups)

    samples = _Samples(number, measure.repeats, num_positions, groups, blocks)
    is_pair = not is_within and len(first.labels) == len(second.labels) == 1
    if num_blocks == "auto":
        num_blocks = samples.default_blocks(form) if is_pair else None
    subsets = inference.kept_rows(
        number, num_blocks, blocks, measure.repeats, num_positions, groups
    )
    check_fit(sets, form, number, subsets, groups)
    _warn_dropped(form, sets)

    tests = is_pair if p_values is None else p_values
    null = _null(form, sets, samples, num_orders, key, tests=tests, baseline=baseline)
    return Comparison(measure, form, first, second, number, subsets, null, tests, baseline, level)


def concluded(
    comparison: Comparison,
    step_tables: Sequence[np.ndarray],
    outputs: str | None = None,
    memory_budget: int | None = None,
) -> Similarities:
    """Return the result of a comparison from the tables of its steps."""
    measure = comparison.measure
    null = comparison.null
    first = comparison.first
    second = comparison.second
    sets = comparison.sets
    (values, *expected), *by_step = step_tables
    draws = None
    if null.orders is not None:
        draws = by_step.pop(0)
        if null.too_few:
            draws = np.full_like(draws, np.nan)

    fields: dict[str, Any] = dict.fromkeys(("estimate", "standard_error", "low", "high"))
    if comparison.subsets:
        fields = _intervals(
            measure, values, by_step, comparison.subsets, comparison.number, comparison.level
        )
    fields["values"] = values
    fields["baseline"] = None
    if comparison.baseline:
        fields["baseline"] = _by_chance(values, expected, draws, null)
    counts_once = len(sets) == 1 and measure.symmetric
    p_value = None
    family_p_value = None
    if comparison.tests:
        p_value = _p_values(measure, comparison.form, sets, values, draws, null.log_numbers)
        if null.has_all_tests and draws is not None:
            is_tested = np.isfinite(p_value)
            if counts_once:
                is_tested = np.triu(is_tested)
            family_p_value = inference.largest_p_values(measure, values, draws, is_tested)
            if counts_once:
                family_p_value = np.fmax(family_p_value, family_p_value.T)
    _warn_undefined(measure, values, first, second)
    fields |= _of_outputs(values, first, second, outputs, memory_budget)

    p_tables = (p_value, family_p_value)
    if len(sets) == 2 and first.single and second.single:
        fields, p_tables = jax.tree.map(lambda table: table[..., 0, 0], (fields, p_tables))
    p_value, family_p_value = p_tables
    return Similarities(
        **jax.tree.map(to_device, fields),
        p_values=p_value,  # on the host, in float64
        family_p_values=family_p_value,
        items=tuple(first.labels),
        others=tuple(second.labels),
        measure=measure.name,
        num_samples=comparison.number,
        counts_once=counts_once,
    )


def _intervals(
    measure: Measure,
    values: np.ndarray,
    leave_outs: Sequence[np.ndarray],
    subsets: Sequence[np.ndarray],
    number: int,
    level: float,
) -> dict[str, Any]:
    """Return the fields of jackknife intervals by name, with a warning of large biases."""
    joined = np.concatenate(leave_outs)
    quantile = inference.students_quantile(level, len(joined))
    fractions = []
    for rows in subsets:
        fraction = 1 - rows.shape[1] / number
        fractions.append(np.full(len(rows), fraction))
    fractions = np.concatenate(fractions)
    unbias = measure.population
    with np.errstate(all="ignore"):
        interval = inference.interval(
            values, joined, quantile, measure.range, unbias, np, fractions
        )
    if unbias:
        _warn_biased(measure, values, interval)
    fields = interval._asdict()
    del fields["bias"]
    return fields


def _by_chance(values: np.ndarray, expected: Any, draws: Any, null: _Null) -> np.ndarray:
    """Return the means over orders of samples, from draws or exactly."""
    if not null.has_baseline:
        return np.where(np.isnan(values), np.nan, expected[0])
    if null.are_all:
        draws = [*draws, values]
    return np.mean(draws, 0)


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
    draws: Any,
    log_numbers: np.ndarray,
) -> np.ndarray:
    """Return p-values by values `draws` in other orders if few orders differ, else by moments."""
    is_few = log_numbers < np.log(inference.FEWEST_ORDERS)
    p_value = np.full(values.shape, np.nan)
    if is_few.any():
        p_value = inference.placed(measure, values, draws, 0.95).p_value
    if not is_few.all():
        by_moments = inference.moment_p_values(values, form.gram, sets, log_numbers)
        p_value = np.where(is_few, p_value, by_moments)
    if len(sets) == 1:
        np.fill_diagonal(p_value, np.nan)
    return p_value


def _outputs(items: Items, layer: str | None) -> tuple[Items, list[int]] | None:
    """Return the networks' outputs, and the index of each item's output; or None."""
    indices = [index for index, (name, _) in enumerate(items.labels) if name == layer]
    if not indices and layer not in (None, "logits"):
        check_choice("outputs", layer, dict.fromkeys(name for name, _ in items.labels))
    # Networks without an output cannot be compared by function.
    if max(items.members) >= len(indices):
        return None

    array, array_indices = items.stack_with(indices[0])
    positions = [array_indices.index(index) for index in indices]
    chosen = array[np.asarray(positions)]
    labels = [items.labels[index] for index in indices]
    outputs = Items(labels, [chosen], [list(range(len(indices)))])
    return outputs, [indices[member] for member in items.members]


def _of_outputs(
    values: np.ndarray, first: Items, second: Items, layer: str | None, budget: int | None
) -> dict[str, Any]:
    """Return disagreement, divergence and the measure of the outputs of each pair, by field."""
    fields: dict[str, Any] = dict.fromkeys((*FUNCTIONAL, "output_similarity"))
    of_first = _outputs(first, layer)
    of_second = of_first if second is first else _outputs(second, layer)
    if of_first is None or of_second is None:
        return fields
    x, rows = of_first
    y, columns = of_second
    fields["output_similarity"] = values[np.ix_(rows, columns)]

    num_classes = {items.arrays[0].shape[2] for items in (x, y)}
    if len(num_classes) > 1 or num_classes == {1}:
        return fields
    for name in FUNCTIONAL:
        measure = MEASURES[name]
        (table,) = tables(measure, measure.with_options(), x, y, budget=budget)
        fields[name] = table[0][np.ix_(first.members, second.members)]
    return fields


def _warn_dropped(form: Form, sets: Sequence[Items]) -> None:
    """Warn of directions of representations that the form's rank cut drops."""
    if not form.cut:
        return
    for items in sets[: len(form.sides)]:
        for array, indices in items.stacks():
            for index, features in zip(indices, array, strict=True):
                warn_dropped(form, items.name_of(index), features)


def _warn_undefined(measure: Measure, values: np.ndarray, first: Items, second: Items) -> None:
    """Warn of representations whose values are all NaN."""
    is_finite = np.isfinite(values)
    sides = ((first, is_finite.any(1)), (second, is_finite.any(0)))
    is_constant_of_name = {}
    for items, has_value in sides:
        for index in np.flatnonzero(~has_value).tolist():
            is_constant_of_name[items.name_of(index)] = items.is_constant(index)
    if not is_constant_of_name:
        return
    names = list(is_constant_of_name)
    # One of a pair is enough for the pair to be undefined.
    if any(is_constant_of_name.values()):
        names = [name for name, is_constant in is_constant_of_name.items() if is_constant]
    warn(
        f"{measure.name} is not defined for {', '.join(names)}, whose values are NaN: are all "
        "samples the same there?"
    )


def _warn_biased(measure: Measure, values: np.ndarray, interval: inference.Interval) -> None:
    """Warn of biases that exceed the limit, and of estimates outside of the measure's range."""
    estimate = np.asarray(interval.estimate)
    limit = LARGEST_BIAS
    if measure.name in SPECTRAL:
        limit = LARGEST_BIAS / 2
    is_biased = np.abs(interval.bias) > limit * interval.standard_error + 1e-5
    if is_biased.any():
        warn(
            f"{is_biased.sum()} of {is_biased.size} `values` of {measure.name} have a bias larger "
            f"than {limit:g} standard errors: read `estimate`, from which it is removed to first "
            "order. What remains may exceed the interval. Use more samples for so many features, "
            "or a debiased measure."
        )
    is_clipped = np.isin(estimate, measure.range) & (np.abs(values - estimate) > 1e-5)
    if is_clipped.any():
        low, high = measure.range
        warn(
            f"{is_clipped.sum()} of {is_clipped.size} estimates of {measure.name} left the range "
            f"{low:.4g} to {high:.4g} without their bias, and are set to its end."
        )
