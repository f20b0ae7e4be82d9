"""Similarity of all pairs of representations: of layers and members, labelled, beside chance and with intervals."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_finite,
    check_same_length,
    fail,
    fail_kind,
    is_traced,
    warn,
)
from dissociation._core.conversion import as_array, as_numbers, holds_arrays, refuse_nested, warn_narrowed
from dissociation._core.results import Result
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._representations import Layers
from dissociation.similarity._base import Measure, Route, cheapest, in_common_dtype, refuse_vanishing, warn_dropped
from dissociation.similarity._inference import (
    LEAST_P_VALUE,
    Interval,
    adjust_p_values,
    in_chunks,
    invariants_of,
    jackknife_interval,
    kept_rows,
    moment_test,
    placed,
    random_orders,
)
from dissociation.similarity._measures import MEASURES, as_measure, routes_of
from dissociation.similarity._tables import Plan, expected_table, prepared, prepared_bytes, reordered, tables
from dissociation.training._memory import free_memory
from dissociation.training._progress import MeterFactory, open_meter

POSITIONS = ("samples", "neurons")
"""Positions (pixels, tokens, steps) of a sample as samples of their own, [n h w, c], or as neurons, [n, h w c]."""

CHANNELS = ("last", "first")
"""Where the axis of channels lies among a sample's axes."""

FEWEST_FOR_MOMENTS, MOST_FOR_MOMENTS = 6, 4096
"""Samples between which tests are by moments of matrices over samples, whose cost is the cube of their number."""

DEFAULT_BLOCKS = 20
"""Blocks of samples where one pair is compared; fewer of fewer samples."""

LARGEST_BIAS = 2
"""Standard errors of bias that the jackknife takes off before a warning says so."""

Representations = Mapping[str, Any] | Sequence[Any] | Array | np.ndarray


class Similarities(Result):
    """Similarities of all pairs of two sets of representations; both sets may be the same.

    Attributes:
        values: The measure of all samples, [items, others].
        estimate: `values` without the bias that few samples for so many features cause, as the jackknife finds it to
            first order, within the measure's range; `low` <= `estimate` <= `high`. `values` themselves for measures
            that tend to no value as samples grow; or None without intervals.
        baseline: What the same representations score with the samples of one in another order, on average: chance.
            [items, others], or None.
        standard_error: Of each value over samples, by the jackknife; or None.
        low: Lower ends of the intervals about `estimate`; or None.
        high: Upper ends of the intervals about `estimate`; or None.
        p_values: Of having as much in common by chance, not corrected for how many there are (`corrected`); NaN for
            items with themselves; or None.
        disagreement: Share of samples to which the two networks give other classes, [items, others]; None without
            outputs, or with one number as output.
        jensen_shannon: Divergence of their predicted distributions in nats; or None.
        output_similarity: The measure itself, of the two networks' outputs; or None.
        items: Layer and member of each row.
        others: Of each column.
        measure: Its name.
        num_samples: Samples.
        counts_once: Whether every pair stands there twice.
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
    LEAST = {"p_values": LEAST_P_VALUE}

    def axis_coordinates(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the labels of rows and columns, by name: an axis and its values."""
        found = {}
        for axis, stem, pairs in (("items", "item", self.items), ("others", "other", self.others)):
            found[axis] = axis, np.asarray([f"{layer} {member}" for layer, member in pairs])
            found[f"{stem}_layers"] = axis, np.asarray([layer for layer, _ in pairs])
            found[f"{stem}_members"] = axis, np.asarray([member for _, member in pairs])
        return found

    def bars(self) -> tuple[Array, Array]:
        """Return `estimate` and the lengths of its bars, never negative, as Matplotlib's `errorbar` takes them.

        `values` have no bars: they may lie outside of the interval, and are drawn as points.

        Returns:
            `estimate`, [pairs], and distances to `low` and to `high`, [2, pairs]: tables row by row.

        Raises:
            ValueError: If there are no intervals.
        """
        if self.estimate is None or self.low is None or self.high is None:
            fail("num_blocks", "be given for intervals", "None")
        middle = self.estimate.reshape(-1)
        return middle, jnp.stack([middle - self.low.reshape(-1), self.high.reshape(-1) - middle])

    def between(self, layer: str, other: str | None = None) -> Array:
        """Values of one layer's members with another's, [members, members].

        Args:
            layer: Of the rows.
            other: Of the columns; default: the same.
        """
        other = layer if other is None else other
        rows = [i for i, (name, _) in enumerate(self.items) if name == layer]
        columns = [i for i, (name, _) in enumerate(self.others) if name == other]
        for name, wanted, found, known in (("layer", layer, rows, self.items), ("other", other, columns, self.others)):
            if not found:
                layers = ", ".join(repr(label) for label in dict.fromkeys(label for label, _ in known))
                fail(name, f"be one of {layers}", repr(wanted))
        return self.values[np.ix_(rows, columns)]

    def corrected(self, method: str = "holm") -> Array | np.ndarray | None:
        """P-values corrected for how many pairs there are, see `adjust_p_values`.

        Where both sets are one, a pair of a symmetric measure counts once; items with themselves are not tested.

        Args:
            method: One of "holm", "bh", "by" and "none".

        Returns:
            Like `p_values`: to be compared with the level as they are. None without them.
        """
        if self.p_values is None:
            return None
        values = np.array(self.p_values, float)
        if not self.counts_once:
            return adjust_p_values(values, method)
        upper = np.triu_indices(len(values), 1)
        values[upper] = adjust_p_values(values[upper], method)
        values.T[upper] = values[upper]
        return values


class _Set(NamedTuple):
    labels: list[tuple[str, int]]
    arrays: list[Array]  # [items, n, p], one per width
    places: list[list[int]]  # of their items among the labels
    each: int = 1  # rows of one sample
    name: str = ""
    single: bool = False  # one array of one network


@validated
def pairwise(
    measure: str | Measure | Callable[..., Array],
    representations: Representations,
    others: Representations | None = None,
    *,
    baseline: bool = True,
    p_values: bool | None = None,
    num_orders: int | None = None,
    key: PRNGKey | None = None,
    num_blocks: int | str | None = "auto",
    blocks: str = "shuffled",
    level: float = 0.9,
    positions: str | None = None,
    channels: str | None = None,
    members: bool | None = None,
    outputs: str | None = "logits",
    memory_budget: int | None = None,
    progress: str | MeterFactory | None = "late",
    **options: Any,
) -> Similarities:
    """One measure of all pairs of representations of the same samples.

    Each representation is prepared once. Linear CKA goes over features or over samples, whichever takes less work; all
    pairs of a measure that is a product are products of large matrices. Half of the pairs are computed for symmetric
    measures. Programs are compiled once for shapes, measure and options; what would not fit in memory, or takes long,
    is done in parts.

    Args:
        measure: A name in `MEASURES`, a `Measure`, or a function of two arrays [n, p] and [n, q], of JAX's operations.
            More of it counts as more in common, and intervals lie about its value; `custom_measure` says otherwise.
        representations: By layer's name, arrays [n, p] of one network or [members, n, p] of several, with more axes in
            place of p where samples have positions; or one such array; or a list of them, of any widths. Rows are the
            same samples in the same order throughout. One number per sample is one feature: [n] or [members, n]. What
            `models.representations` returns states its axes; `members` and `channels` state those of other arrays.
        others: A second set, like the first: then pairs are of one of each. `compare(x, y, measure)` is this.
        baseline: Whether to say what the pairs score by chance: exactly where it is known, and else by the mean over
            random orders.
        p_values: Whether to test each pair against chance; default: if there is one pair alone. Tests are by the null's
            moments for linear and RBF CKA of up to 4096 samples, and else by random orders, of which the least p-value
            is 1 / (1 + num_orders); see `permutation_test`.
        num_orders: Random orders, where they are needed; default 5 for a baseline and 199 for tests. Corrections for
            many pairs want more.
        key: Draws them; default: the same ones each time.
        num_blocks: Blocks of samples for the jackknife's intervals; None: no intervals. Default: 20 for one pair alone,
            if there are so many samples, and none for more pairs. See `jackknife_interval`.
        blocks: How blocks are made: "shuffled", by a fixed permutation, or "contiguous" for samples that resemble
            their neighbours, as of a time series. Baselines and tests are then by shifts of one of the two.
        level: Of the intervals.
        positions: What positions of a sample are (pixels of an image, tokens or steps of a sequence), "samples" or
            "neurons". As samples, all positions of a sample are left out or change places together; all layers must
            be maps of one size then.
        channels: With `positions="samples"`, whether the channels of [n, h, w, c] are "last" or those of [n, c, h, w]
            "first".
        members: If True, the first axis of arrays is members and the second samples; if False, the first is samples.
            Default: samples for [n] and [n, p]; arrays of more axes need a word.
        outputs: The layer that holds the networks' outputs, by which their functions are compared beside every pair of
            representations; where there are no "logits", or it is None, they are not.
        memory_budget: Bytes for prepared representations; default: half of what is free.
        progress: See `dissociation.training`.
        options: Of the measure.

    Returns:
        The values, [items, items or others], rows and columns labelled by layer and member. NaN, with a warning that
        names them, for representations that a measure is not defined for.

    Raises:
        ValueError: If numbers of samples differ, entries are not finite, or an option is out of range.
        TypeError: If representations are of another kind.
    """
    known = as_measure(measure)
    if known.name in ("mutual_knn", "knn_jaccard"):
        least = check_count("num_neighbours", options.get("num_neighbours", 10), minimum=1) + 1
        known = dataclasses.replace(known, minimum=max(known.minimum, least))
    names = ("representations",) if others is None else ("x", "y")
    axes = {"members": members, "positions": positions, "channels": channels}
    first = _as_set(names[0], representations, **axes)
    second = None if others is None else _as_set(names[-1], others, **axes)
    sets = [one for one in (first, second) if one is not None]
    number, each = _check_sets(sets, known), max(one.each for one in sets)
    units = number // known.repeats // each
    one_pair = second is not None and len(first.labels) == len(second.labels) == 1
    p_values = one_pair if p_values is None else p_values
    if num_blocks == "auto":
        enough = units >= DEFAULT_BLOCKS or (units - 1) * each * known.repeats >= known.minimum
        num_blocks = min(units, DEFAULT_BLOCKS) if one_pair and enough else None
    kept = [] if num_blocks is None else kept_rows(number, num_blocks, blocks, known.repeats, each)
    left = min((rows.shape[1] for rows in kept), default=number)
    for one in sets:
        _check_fit(one, known, left, number)
        _count_dropped(one, known)
    job = _Job(known, first, second, options, memory_budget)
    alike = blocks == "shuffled" and each == 1
    by_moments = job.matrix is not None and alike and MOST_FOR_MOMENTS >= number >= FEWEST_FOR_MOMENTS
    drawn = p_values and not by_moments, baseline and (job.expected is None or not alike)
    orders = None
    if any(drawn):
        default = 199 if drawn[0] else 5 if alike else 20
        count = check_count("num_orders", default if num_orders is None else num_orders, minimum=1)
        orders = random_orders(
            jax.random.key(0) if key is None else key, count, number, known.repeats, blocks=blocks, each=each
        )
    values, shuffled, leave_outs = _computed(job, orders, kept, progress)
    chance = p_value = None
    if baseline:
        chance = jnp.mean(shuffled, 0) if drawn[1] else job.run_expected()
        chance = 0.5 * (chance + chance.T) if job.plan.symmetric else chance
    if p_values:
        p_value = job.test_by_moments(values) if by_moments else _shares(known, values, shuffled)
        p_value = _without_selves(p_value) if second is None else p_value
    error = low = high = estimate = None
    if kept:
        error, low, high, bias, estimate = _intervals(values, leave_outs, level, known.range, known.population)
        if known.population:
            _warn_biased(known, values, bias, error, estimate)
    _warn_undefined(known, values, first, second)
    of_networks = [None if one is None else _outputs(one, outputs) for one in (first, second)]
    beside = [
        _functional(name, (first, second or first), of_networks, memory_budget)
        for name in ("disagreement", "jensen_shannon")
    ]
    beside.append(_of_outputs(values, first, second or first, outputs))
    found: list[Any] = [values, estimate, chance, error, low, high, p_value, *beside]
    if second is not None and first.single and second.single:
        found = [None if part is None else part[..., 0, 0] for part in found]
    labels = {"items": tuple(first.labels), "others": tuple((second or first).labels)}
    once = second is None and known.symmetric
    return Similarities(*found, **labels, measure=known.name, num_samples=number, counts_once=once)


@validated
def compare(
    x: Representations,
    y: Representations | None,
    measure: str | Measure | Callable[..., Array] = "debiased_cka",
    **options: Any,
) -> Similarities:
    """`pairwise` across two sets of representations, or of one pair.

    Args:
        x: As `representations` of `pairwise`, or one array [n, p] or [n].
        y: The same, of the same samples.
        measure: As of `pairwise`.
        options: All others of `pairwise`, with its defaults, and of the measure.

    Returns:
        As `pairwise`, [items of x, items of y]; of two plain arrays, single numbers.

    Raises:
        ValueError: As `pairwise`.
        TypeError: As `pairwise`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (100, 3))
        >>> found = compare(x, 2 * x + 1, "linear_cka")
        >>> round(float(found.values), 3), bool(found.baseline < 0.1), bool(found.p_values < 1e-6)
        (1.0, True, True)
    """
    if y is None:
        fail_kind("y", "be representations", "None", "`pairwise` compares one set with itself")
    return pairwise(measure, x, y, **options)


def _computed(
    job: "_Job", orders: Array | None, kept: list[np.ndarray], progress: str | MeterFactory | None
) -> tuple[Array, Any, list[Array]]:
    """The values, those in other orders of the samples of one of two, and those without blocks."""
    steps: list[tuple[str, Any, Any]] = [("other orders", None, orders)] * (orders is not None)
    steps += [("without blocks", rows, None) for rows in kept]
    sizes = [1, *(len(rows if order is None else order) for _, rows, order in steps)]
    meter = open_meter(progress, sum(sizes), job.measure.name)
    try:
        values = job.run()[0]
        extra = []
        for index, (word, rows, order) in enumerate(steps, 1):
            before = sum(sizes[:index])
            meter.advance(before, word)
            extra.append(job.run(rows, order, lambda done, _, at=before, word=word: meter.advance(at + done, word)))
        meter.advance(sum(sizes), "done")
    finally:
        meter.close()
    return values, (extra[0] if orders is not None else None), extra[orders is not None :]


def _without_selves(table: Any) -> np.ndarray:
    return np.where(np.eye(len(table), dtype=bool), np.nan, table)


@eqx.filter_jit
def _intervals(
    values: Array, leave_outs: list[Array], level: float, bounds: tuple[float, float], unbias: bool
) -> Interval:
    return jackknife_interval(values, jnp.concatenate(leave_outs), level=level, bounds=bounds, unbias=unbias)


def _outputs(one: _Set, layer: str | None) -> _Set | None:
    """Outputs of the networks, where there is a layer of that name."""
    for array, places in zip(one.arrays, one.places, strict=True):
        own = [(row, one.labels[place]) for row, place in enumerate(places) if one.labels[place][0] == layer]
        if own:
            rows, labels = zip(*own, strict=True)
            return _Set(list(labels), [array[np.asarray(rows)]], [list(range(len(rows)))])
    if layer not in (None, "logits"):
        layers = ", ".join(dict.fromkeys(repr(name) for name, _ in one.labels if name)) or "arrays without names"
        fail("outputs", "name a layer of the representations", f"{layer!r} beside {layers}")
    return None


def _functional(name: str, sides: tuple[_Set, _Set], outputs: list[_Set | None], budget: int | None) -> Array | None:
    """A measure of the outputs of the networks that each pair of representations is of; None where there are none."""
    own, other = outputs
    members = [[member for _, member in one.labels] for one in sides]
    counts = [0 if one is None else len(one.labels) for one in (own, other or own)]
    if own is None or any(max(rows) >= count for rows, count in zip(members, counts, strict=True)):
        return None
    classes = own.arrays[0].shape[2]
    if classes == 1 or (other is not None and other.arrays[0].shape[2] != classes):
        return None  # no classes, or others
    return _Job(MEASURES[name], own, other, {}, budget).run()[0][np.ix_(*members)]


def _of_outputs(values: Array, first: _Set, second: _Set, layer: str | None) -> Array | None:
    """The values of the outputs of the networks that each pair of representations is of; None where there are none."""
    at = []
    for one in (first, second):
        places = {member: index for index, (name, member) in enumerate(one.labels) if name == layer}
        if any(member not in places for _, member in one.labels):
            return None
        at.append([places[member] for _, member in one.labels])
    return values[np.ix_(*at)]


class _Job:
    """One measure on two sets, of which the second may be the first."""

    def __init__(
        self, measure: Measure, first: _Set, second: _Set | None, options: Mapping[str, Any], budget: int | None
    ):
        self.measure, self.first, self.second = measure, first, second
        both = first.arrays + (second.arrays if second else [])
        number, widths = both[0].shape[1], [array.shape[2] for array in both]
        items = sum(array.shape[0] for array in both)
        pairs = len(first.labels) * len((second or first).labels)
        routes = routes_of(measure, dict(options))
        self.route = cheapest(routes, number, max(widths), min(widths), items=items, pairs=pairs)
        self.work = self.route.work(number, max(widths), min(widths), items=items, pairs=pairs)
        self.matrix = next((route for route in routes if route.matrix), None)
        known = tuple(route for route in routes if route.expected is not None)
        self.expected = min(known, key=lambda route: route.prepare_work(number, max(widths)), default=None)
        symmetric = measure.symmetric and second is None
        held = int(self.route.compare_memory(number, max(widths), max(widths)))
        self.plan = Plan(symmetric, both[0].dtype.itemsize, held, jax.default_backend() != "cpu")
        self.budget = (
            free_memory(both) if budget is None else check_count("memory_budget", budget, minimum=1, maximum=None)
        )

    def _pieces(self, one: _Set, route: Route) -> list[_Set]:
        """The set in as many pieces as memory asks for."""
        bytes_of = [prepared_bytes(route, array, array.shape[1]) for array in one.arrays]
        sets = 1 if self.second is None else 2
        if sets * sum(size * len(array) for size, array in zip(bytes_of, one.arrays, strict=True)) <= self.budget:
            return [one]
        pieces = []
        for size, array, places in zip(bytes_of, one.arrays, one.places, strict=True):
            step = max(1, int(self.budget // (2 * size)))
            pieces += [
                _Set(one.labels, [array[i : i + step]], [places[i : i + step]]) for i in range(0, len(array), step)
            ]
        return pieces

    def _over_pieces(self, route: Route, of_pair: Callable[[_Set, _Set | None, Plan], Array]) -> Array:
        """Tables of all pairs of pieces, put together: [..., items, others]."""
        rows = self._pieces(self.first, route)
        columns = rows if self.second is None else self._pieces(self.second, route)
        count = len(self.first.labels), len((self.second or self.first).labels)
        whole = [np.concatenate(pieces[0].places) for pieces in (rows, columns) if len(pieces) == 1]
        if len(whole) == 2 and all(np.array_equal(places, np.arange(len(places))) for places in whole):
            return of_pair(rows[0], self.second and columns[0], self.plan)
        out = None
        for i, one in enumerate(rows):
            for j, other in enumerate(columns):
                if self.plan.symmetric and j < i:
                    continue
                same = self.second is None and i == j
                part = of_pair(one, None if same else other, self.plan._replace(symmetric=self.plan.symmetric and same))
                out = jnp.zeros((*part.shape[:-2], *count), part.dtype) if out is None else out
                at = np.ix_(np.concatenate(one.places), np.concatenate(other.places))
                out = out.at[(..., *at)].set(part)
                if self.plan.symmetric and not same:
                    out = out.at[(..., *(axis.T for axis in at[::-1]))].set(part.swapaxes(-1, -2))
        table: Any = out
        return table

    def run(
        self, rows: Any = None, orders: Any = None, advance: Callable[[int, str], None] = lambda done, text: None
    ) -> Array:
        """[choices, items, others], for choices of samples, or with the second set in other orders."""
        route = self.route.program()

        def table(one: _Set, other: _Set | None, plan: Plan) -> Array:
            stacks, others = tuple(one.arrays), None if other is None else tuple(other.arrays)
            if orders is None:
                chunk = lambda part: tables(route, stacks, others, part, plan)  # noqa: E731
                return chunk(None) if rows is None else jnp.asarray(in_chunks(chunk, rows, self.work, advance))
            first, second = prepared(route, stacks, plan), others or stacks
            if route.by_rows:
                second = first if others is None else prepared(route, others, plan)
            chunk = lambda part: reordered(route, first, second, part, plan)  # noqa: E731
            return jnp.asarray(in_chunks(chunk, orders, self.work, advance))

        return self._over_pieces(self.route, table)

    def run_expected(self) -> Array:
        """The measure's mean over all orders of the samples."""
        route: Any = self.expected

        def table(one: _Set, other: _Set | None, plan: Plan) -> Array:
            return expected_table(
                route.program(), tuple(one.arrays), None if other is None else tuple(other.arrays), plan
            )

        return self._over_pieces(route, table)

    def test_by_moments(self, values: Array) -> Any:
        """P-values from the null's moments."""
        own = [_invariants(self.matrix, one) for one in (self.first, self.second or self.first)]
        rows = jax.tree.map(lambda leaf: leaf[:, None], own[0])
        columns = jax.tree.map(lambda leaf: leaf[None], own[1])
        return moment_test(values, rows, columns, self.first.arrays[0].shape[1]).p_value


def _invariants(route: Any, one: _Set) -> Any:
    found = [invariants_of(route.program(), array) for array in one.arrays]
    order = np.argsort(np.concatenate(one.places))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *found)


def _shares(measure: Measure, values: Array, shuffled: Array | None) -> Any:
    return placed(measure, np.asarray(values), np.asarray(shuffled), 0.95).p_value


def _named(name: str, given: Any) -> list[tuple[str, str, Any]]:
    """Representations with the names that messages and labels have for them."""
    if isinstance(given, Mapping):
        if len(set(map(str, given))) < len(given):
            fail(name, "have layers whose names differ as text", list(given), "Rename one")
        return [(f"{name}[{layer!r}]", str(layer), value) for layer, value in given.items()]
    if holds_arrays(given):
        return [(f"{name}[{index}]", "", value) for index, value in enumerate(given)]
    return [(name, "", given)]


def _as_set(name: str, given: Any, *, members: bool | None, positions: str | None, channels: str | None) -> _Set:
    """Representations with their labels, equal widths stacked."""
    named = _named(name, given)
    if not named:
        fail(name, "hold at least one representation", "none")
    ranks = given.ranks if isinstance(given, Layers) else {}
    labels: list[tuple[str, int]] = []
    widths: dict[int, tuple[list[Array], list[int]]] = {}
    grids, single = set(), False
    for full, layer, value in named:
        wanted = "real numbers [n, p] or [members, n, p]"
        array = as_array(full, value, wanted)
        if not isinstance(given, Mapping):
            refuse_nested(full, value, array, 2 if value is given else 0)
        warn_narrowed(full, array, gates=2)
        array = as_numbers(full, array, frozenset({"float"}))
        if is_traced(array):
            advice = "Under a transformation call the measures themselves"
            fail_kind(full, "be known: all pairs are planned on the host", "a traced value", advice)
        check_finite(full, array)
        rank, place = ranks.get(layer), "last" if layer in ranks else channels
        if rank is None:
            if members is None and array.ndim > 2:
                one, other, *rest = array.shape
                advice = (
                    f"True: {one} members, {other} samples each. False: {one} samples, of shape {(other, *rest)} each"
                )
                fail("members", f"be True or False for `{full}` of shape {array.shape}", "None", advice)
            rank = array.ndim - (2 if members else 1)
        single = array.ndim == 1 + rank and named[0][2] is given
        array, grid = _arranged(full, array if array.ndim != 1 + rank else array[None], rank, positions, place)
        grids.add(grid)
        refuse_vanishing(full, array)
        stack = jnp.asarray(array)
        arrays, places = widths.setdefault(stack.shape[2], ([], []))
        arrays.append(stack)
        places += range(len(labels), len(labels) + stack.shape[0])
        before = sum(label == layer for label, _ in labels)
        labels += [(layer, before + index) for index in range(stack.shape[0])]
    if positions == "samples" and len(grids) > 1:
        fail(
            name, 'have positions of one size throughout for `positions="samples"`', ", ".join(map(str, sorted(grids)))
        )
    numbers = {array.shape[1] for arrays, _ in widths.values() for array in arrays}
    if len(numbers) > 1:
        fail(name, "be of the same samples throughout", f"{', '.join(map(str, sorted(numbers)))} samples")
    every = in_common_dtype(*(array for arrays, _ in widths.values() for array in arrays))
    joined, start = [], 0
    for arrays, _ in widths.values():
        own = every[start : start + len(arrays)]
        joined.append(own[0] if len(own) == 1 else jnp.concatenate(own))
        start += len(arrays)
    each = int(np.prod(grids.pop())) if positions == "samples" else 1
    return _Set(labels, joined, [places for _, places in widths.values()], each, name, single)


def _arranged(name: str, array: Any, rank: int, positions: str | None, channels: str | None) -> tuple[Any, tuple]:
    """[members, n, p] of an array whose samples have `rank` axes, and the sizes of their positions.

    This is the one place that decides what axes of a sample are.
    """
    lead, shape = array.shape[:2], array.shape[2:]
    if array.ndim != 2 + rank or rank < 0:
        wanted = "have axes [n, p] or [members, n, p], or those of positions in place of p"
        fail(name, wanted, f"shape {array.shape}", "`members` states what the first axis is")
    if rank < 2:
        return array.reshape(*lead, -1), ()
    if positions is None:
        fail("positions", f"be one of {', '.join(map(repr, POSITIONS))} for samples of shape {shape}", "None")
    check_choice("positions", positions, POSITIONS)
    if positions == "neurons":
        return array.reshape(*lead, -1), ()
    if channels is None:
        advice = f"Last: {shape[-1]} channels. First: {shape[0]} channels"
        fail("channels", f"be one of {', '.join(map(repr, CHANNELS))} for samples of shape {shape}", "None", advice)
    check_choice("channels", channels, CHANNELS)
    if channels == "first":
        array = array.reshape(*lead, shape[0], -1).swapaxes(2, 3)
    grid = shape[1:] if channels == "first" else shape[:-1]
    return array.reshape(lead[0], lead[1] * int(np.prod(grid)), -1), grid


def _check_sets(sets: Sequence[_Set], measure: Measure) -> int:
    """The number of samples, if the sets can be compared by the measure."""
    number = sets[0].arrays[0].shape[1]
    for other in sets[1:]:
        check_same_length(sets[0].name, number, other.name, other.arrays[0].shape[1])
    if number % measure.repeats:
        fail(sets[0].name, f"have rows that {measure.repeats} goes into, one per repeat of all conditions", number)
    widths = {array.shape[2] for one in sets for array in one.arrays}
    if measure.same_width and len(widths) > 1:
        fail(sets[-1].name, f"have as many classes throughout for {measure.name}", ", ".join(map(str, sorted(widths))))
    return number


def _count_dropped(one: _Set, known: Measure) -> None:
    """Warn of directions that a measure between subspaces, whose ranks it cuts, takes for absent."""
    if "L" in known.invariances + (known.invariances_of_y or ""):
        for stack, places in zip(one.arrays, one.places, strict=True):
            for place, features in zip(places, stack, strict=True):
                warn_dropped(**{one.name if one.single else "{} {}".format(*one.labels[place]): features})


def _check_fit(one: _Set, measure: Measure, number: int, every: int) -> None:
    """Raises unless every representation is fit for the measure with so many samples left."""
    left = "" if number == every else f", {number} of them without one block"
    if number < measure.minimum:
        fail(one.name, f"have at least {measure.minimum} samples for {measure.name}", f"{every}{left}")
    widest = max(array.shape[2] for array in one.arrays)
    if measure.narrow and widest >= number - 1:
        wanted = f"have fewer features than samples less one for {measure.name}"
        fail(one.name, wanted, f"{widest} features of {every} samples{left}")


def _warn_undefined(measure: Measure, values: Array, first: _Set, second: _Set | None) -> None:
    known: Any = np.isfinite(np.asarray(values))
    sides = [(first, ~known.any(1)), (first if second is None else second, ~known.any(0))]
    gone = {
        _shown(one, label): None
        for one, undefined in sides
        for label, bad in zip(one.labels, undefined, strict=True)
        if bad
    }
    if gone:
        names = ", ".join(gone)
        warn(f"{measure.name} is not defined for {names}, whose values are NaN: are all samples the same there?")


def _shown(one: _Set, label: tuple[str, int]) -> str:
    layer, member = label
    return one.name if len(one.labels) == 1 and not layer else f"{layer or one.name} {member}"


def _warn_biased(measure: Measure, values: Array, bias: Array, error: Array, estimate: Array) -> None:
    leaning = np.abs(np.asarray(bias)) > LARGEST_BIAS * np.asarray(error) + 1e-5
    if leaning.any():
        warn(
            f"{leaning.sum()} of {leaning.size} `values` of {measure.name} have a bias larger than {LARGEST_BIAS} "
            "standard errors: read `estimate`, from which it is removed to first order. What remains may exceed the "
            "interval. Use more samples for so many features, or a debiased measure."
        )
    clipped = np.isin(estimate, measure.range) & (np.abs(np.asarray(values - estimate)) > 1e-5)
    if clipped.any():
        warn(
            f"{clipped.sum()} of {clipped.size} estimates of {measure.name} left the range {measure.range[0]:.4g} to "
            f"{measure.range[1]:.4g} without their bias, and are set to its end."
        )
