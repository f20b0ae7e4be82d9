"""Similarity of all pairs of representations: of layers and members, labelled, beside chance and with intervals."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation.checks import (
    check_choice,
    check_count,
    check_finite,
    check_level,
    check_same_length,
    fail,
    fail_kind,
    is_traced,
    warn,
)
from dissociation.conversion import as_array, as_numbers
from dissociation.memory import free_memory
from dissociation.metrics.similarity.base import Measure, Route, cheapest, check_samples, in_common_dtype
from dissociation.metrics.similarity.inference import (
    Interval,
    invariants_of,
    jackknife_interval,
    kept_rows,
    moment_test,
    placed,
    random_orders,
)
from dissociation.metrics.similarity.measures import MEASURES, as_measure
from dissociation.metrics.similarity.tables import Plan, expected_table, prepared_bytes, tables
from dissociation.progress import MeterFactory, open_meter
from dissociation.results import Result
from dissociation.types import PRNGKey
from dissociation.validation import validated

POSITIONS = ("samples", "neurons")
"""Positions of an image of features as samples of their own, [n h w, c], or as neurons, [n, h w c]."""

LARGEST_BIAS = 2
"""Standard errors of bias that the jackknife takes off before a warning says so."""

Representations = Mapping[str, Any] | Sequence[Any] | Array | np.ndarray


class Similarities(Result):
    """What all pairs of two sets of representations score; both sets may be one.

    Attributes:
        values: [items, others].
        baseline: What the same representations score with the samples of one in another order, on average: chance.
            [items, others], or None.
        standard_error: Of each value over samples, by the jackknife; or None.
        low: Lower ends of intervals; or None.
        high: Upper ends.
        p_values: Of having as much in common by chance, not corrected for how many there are (`adjust_p_values`); or
            None.
        disagreement: Share of samples to which the two networks give other classes, [items, others]; None without
            outputs.
        jensen_shannon: Divergence of their predicted distributions in nats; or None.
        output_similarity: The measure itself, of the two networks' outputs; or None.
        items: Layer and member of each row.
        others: Of each column.
        measure: Its name.
        num_samples: Samples.
    """

    values: Float[Array, "..."]
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


class _Set(NamedTuple):
    labels: list[tuple[str, int]]
    arrays: list[Array]  # [items, n, p], one per width
    places: list[list[int]]  # of their items among the labels


@validated
def flatten_positions(features: Float[Array | np.ndarray, "n h w c"], positions: str) -> Array:
    """Features of images as a representation.

    Args:
        features: [n, h, w, c].
        positions: One of `POSITIONS`. As samples, a map's translation hardly matters, and neurons are channels; n h w
            samples are not independent, so intervals over them are too narrow. As neurons, positions count.

    Returns:
        [n h w, c] or [n, h w c].

    Raises:
        ValueError: If `features` has other axes or `positions` is unknown.
    """
    check_choice("positions", positions, POSITIONS)
    features = jnp.asarray(features)
    if features.ndim != 4:
        fail("features", "have 4 axes [n, h, w, c]", f"shape {features.shape}")
    return features.reshape((-1, features.shape[-1]) if positions == "samples" else (features.shape[0], -1))


@validated
def pairwise(
    measure: str | Measure | Callable[..., Array],
    representations: Representations,
    *,
    baseline: bool = True,
    p_values: bool = False,
    num_orders: int | None = None,
    key: PRNGKey | None = None,
    num_blocks: int | None = None,
    blocks: str = "interleaved",
    level: float = 0.9,
    positions: str | None = None,
    outputs: str | None = "logits",
    memory_budget: int | None = None,
    progress: str | MeterFactory | None = None,
    **options: Any,
) -> Similarities:
    """One measure of all pairs of representations of the same samples.

    Each representation is prepared once. Linear CKA goes over features or over samples, whichever takes less work; all
    pairs of a measure that is a product are products of large matrices. Half of the pairs are computed for symmetric
    measures. Everything is one program, compiled once for shapes, measure and options; what would not fit
    in memory is done in parts.

    Args:
        measure: A name in `MEASURES`, a `Measure`, or a function of two arrays [n, p] and [n, q].
        representations: By layer's name, arrays [n, p] of one network or [members, n, p] of several; with two more axes
            where features are images; or one such array; or a list of arrays [n, p], of any widths. Rows are the same
            samples in the same order throughout.
        baseline: Whether to say what the pairs score by chance: exactly where it is known, and else by the mean over
            random orders.
        p_values: Whether to test each pair against chance: by the null's moments for linear and RBF CKA, and else by
            random orders; see `permutation_test`.
        num_orders: Random orders, where they are needed; default 5 for a baseline and 199 for tests.
        key: Draws them; default: the same ones each time.
        num_blocks: Blocks of samples for the jackknife's intervals; None: no intervals. See `jackknife_interval`.
        blocks: How samples are dealt out to blocks, one of `inference.BLOCKS`.
        level: Of the intervals.
        positions: What positions of images are, one of `POSITIONS`.
        outputs: The layer that holds the networks' outputs, by which their functions are compared beside every pair of
            representations; where there is none, they are not.
        memory_budget: Bytes for prepared representations; default: half of what is free.
        progress: See `dissociation.progress`.
        options: Of the measure.

    Returns:
        The values, [items, items], rows and columns labelled by layer and member. NaN, with a warning that names them,
        for representations that a measure is not defined for.

    Raises:
        ValueError: If numbers of samples differ, entries are not finite, or an option is out of range.
        TypeError: If representations are of another kind.
    """
    return _similarities(
        measure, representations, None, baseline=baseline, num_orders=num_orders, p_values=p_values, key=key,
        num_blocks=num_blocks, blocks=blocks, level=level, positions=positions, outputs=outputs,
        memory_budget=memory_budget, progress=progress, **options,
    )  # fmt: skip


@validated
def compare(
    a: Representations,
    b: Representations,
    measure: str | Measure | Callable[..., Array] = "debiased_cka",
    *,
    num_blocks: int | None = 20,
    p_values: bool = True,
    **options: Any,
) -> Similarities:
    """One measure of all pairs across two sets of representations, or of one pair, with intervals, baseline and p.

    Args:
        a: As `representations` of `pairwise`, or one array [n, p].
        b: The same, of the same samples.
        measure: As of `pairwise`.
        num_blocks: As there.
        p_values: As there.
        options: All others of `pairwise`, and of the measure.

    Returns:
        As `pairwise`, [items of a, items of b]; of two plain arrays, single numbers.

    Raises:
        ValueError: As `pairwise`.
        TypeError: As `pairwise`.

    Example:
        >>> x = jax.random.normal(jax.random.key(0), (100, 3))
        >>> found = compare(x, 2 * x + 1, "linear_cka")
        >>> round(float(found.values), 3), bool(found.baseline < 0.1), bool(found.p_values < 1e-6)
        (1.0, True, True)
    """
    return _similarities(measure, a, b, num_blocks=num_blocks, p_values=p_values, **options)


def _similarities(
    measure: str | Measure | Callable[..., Array],
    a: Representations,
    b: Representations | None,
    *,
    baseline: bool = True,
    p_values: bool = False,
    num_orders: int | None = None,
    key: PRNGKey | None = None,
    num_blocks: int | None = None,
    blocks: str = "interleaved",
    level: float = 0.9,
    positions: str | None = None,
    outputs: str | None = "logits",
    memory_budget: int | None = None,
    progress: str | MeterFactory | None = None,
    **options: Any,
) -> Similarities:
    known = as_measure(measure)
    check_level(level)
    names = ("representations",) if b is None else ("a", "b")
    first = _as_set(names[0], a, positions)
    second = None if b is None else _as_set(names[-1], b, positions)
    number = _check_sets(names, first, second, known)
    kept = [] if num_blocks is None else kept_rows(number, num_blocks, blocks, known.repeats)
    left = min((rows.shape[1] for rows in kept), default=number)
    for name, one in zip(names, (first, second), strict=False):
        if one is not None:
            _check_fit(name, one, known, left)
    job = _Job(known, first, second, options, memory_budget)
    drawn_test = p_values and job.matrix is None
    orders = None
    if drawn_test or (baseline and job.expected is None):
        count = check_count("num_orders", (199 if drawn_test else 5) if num_orders is None else num_orders, minimum=1)
        orders = random_orders(jax.random.key(0) if key is None else key, count, number, known.repeats)
    steps = [(None, orders)] * (orders is not None) + [(jnp.asarray(rows), None) for rows in kept]
    meter = open_meter(progress, 1 + len(steps), known.name)
    try:
        values = job.run()[0]
        extra = []
        for done, (rows, order) in enumerate(steps, 1):
            meter.advance(done, "other orders" if rows is None else "without blocks")
            extra.append(job.run(rows, order))
        meter.advance(1 + len(steps), "done")
    finally:
        meter.close()
    shuffled, leave_outs = (extra[0] if orders is not None else None), extra[orders is not None :]
    chance = None
    if baseline:
        chance = job.run_expected() if shuffled is None or job.expected is not None else jnp.mean(shuffled, 0)
        chance = 0.5 * (chance + chance.T) if job.plan.symmetric else chance
    p_value = None
    if p_values:
        p_value = job.test_by_moments(values) if job.matrix is not None else _shares(known, values, shuffled)
    error = low = high = None
    if kept:
        error, low, high, bias = _intervals(values, leave_outs, level, known.range, known.population)
        if known.population:
            _warn_biased(known, bias, error)
    _warn_undefined(known, values, first, second)
    of_networks = [None if one is None else _outputs(one, outputs, positions) for one in (a, b)]
    beside = [
        _functional(name, (first, second or first), of_networks, memory_budget)
        for name in ("disagreement", "jensen_shannon")
    ]
    beside.append(_of_outputs(values, first, second or first, outputs))
    found: list[Any] = [values, chance, error, low, high, p_value, *beside]
    if b is not None and all(_is_single(one) for one in (a, b)):
        found = [None if part is None else part[..., 0, 0] for part in found]
    labels = {"items": tuple(first.labels), "others": tuple((second or first).labels)}
    return Similarities(*found, **labels, measure=known.name, num_samples=number)


@eqx.filter_jit
def _intervals(
    values: Array, leave_outs: list[Array], level: float, bounds: tuple[float, float], unbias: bool
) -> Interval:
    return jackknife_interval(values, jnp.concatenate(leave_outs), level=level, bounds=bounds, unbias=unbias)


def _outputs(given: Any, layer: str | None, positions: str | None) -> _Set | None:
    """Outputs of the networks, where there is a layer of that name."""
    return (
        _as_set("outputs", {layer: given[layer]}, positions) if isinstance(given, Mapping) and layer in given else None
    )


def _functional(name: str, sides: tuple[_Set, _Set], outputs: list[_Set | None], budget: int | None) -> Array | None:
    """A measure of the outputs of the networks that each pair of representations is of; None where there are none."""
    own, other = outputs
    members = [[member for _, member in one.labels] for one in sides]
    counts = [0 if one is None else len(one.labels) for one in (own, other or own)]
    if own is None or any(max(rows) >= count for rows, count in zip(members, counts, strict=True)):
        return None
    if other is not None and other.arrays[0].shape[2] != own.arrays[0].shape[2]:
        return None  # other classes
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
        self.first, self.second = first, second
        both = first.arrays + (second.arrays if second else [])
        number, widths = both[0].shape[1], [array.shape[2] for array in both]
        items = sum(array.shape[0] for array in both)
        pairs = len(first.labels) * len((second or first).labels)
        routes = measure.routes(**options)
        self.route = cheapest(routes, number, max(widths), min(widths), items=items, pairs=pairs)
        self.matrix = next((route for route in routes if route.matrix), None)
        known = tuple(route for route in routes if route.expected is not None)
        self.expected = min(known, key=lambda route: route.prepare_work(number, max(widths)), default=None)
        symmetric = measure.symmetric and second is None
        held = int(self.route.compare_memory(number, max(widths), max(widths)))
        self.plan = Plan(symmetric, both[0].dtype.itemsize, held, jax.default_backend() != "cpu")
        self.budget = free_memory(both) if budget is None else check_count("memory_budget", budget, minimum=1)

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

    def run(self, rows: Array | None = None, orders: Array | None = None) -> Array:
        """[choices, items, others], for choices of samples, or with the second set in other orders."""

        def table(one: _Set, other: _Set | None, plan: Plan) -> Array:
            others = None if other is None else tuple(other.arrays)
            return tables(self.route.program(), tuple(one.arrays), others, rows, orders, plan)

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


def _is_single(value: Any) -> bool:
    return not isinstance(value, (Mapping, list, tuple)) and np.ndim(value) in (2, 4)


def _as_set(name: str, given: Any, positions: str | None) -> _Set:
    """Representations with their labels, equal widths stacked."""
    named: list[tuple[str, str, Any]]
    if isinstance(given, Mapping):
        named = [(f"{name}[{layer!r}]", str(layer), value) for layer, value in given.items()]
    elif isinstance(given, (list, tuple)) and given and np.ndim(given[0]) >= 2:
        named = [(f"{name}[{index}]", "", value) for index, value in enumerate(given)]
    else:
        named = [(name, "", given)]
    if not named:
        fail(name, "hold at least one representation", "none")
    labels: list[tuple[str, int]] = []
    widths: dict[int, tuple[list[Array], list[int]]] = {}
    for full, layer, value in named:
        wanted = "be an array [n, p], or [members, n, p]"
        array = as_numbers(full, as_array(full, value, wanted), frozenset({"float"}))
        if is_traced(array):
            advice = "Under a transformation call the measures themselves"
            fail_kind(full, "be known: all pairs are planned on the host", "a traced value", advice)
        check_finite(full, array)
        stack = _stacked(full, array, positions)
        arrays, places = widths.setdefault(stack.shape[2], ([], []))
        arrays.append(stack)
        places += range(len(labels), len(labels) + stack.shape[0])
        before = sum(label == layer for label, _ in labels)
        labels += [(layer, before + index) for index in range(stack.shape[0])]
    numbers = {arrays[0].shape[1] for arrays, _ in widths.values()} | {
        array.shape[1] for arrays, _ in widths.values() for array in arrays
    }
    if len(numbers) > 1:
        fail(name, "be of the same samples throughout", f"{', '.join(map(str, sorted(numbers)))} samples")
    every = in_common_dtype(*(array for arrays, _ in widths.values() for array in arrays))
    joined, start = [], 0
    for arrays, _ in widths.values():
        own = every[start : start + len(arrays)]
        joined.append(own[0] if len(own) == 1 else jnp.concatenate(own))
        start += len(arrays)
    return _Set(labels, joined, [places for _, places in widths.values()])


def _stacked(name: str, array: Any, positions: str | None) -> Array:
    """[members, n, p]."""
    if array.ndim in (4, 5):
        if positions is None:
            fail("positions", f"be one of {', '.join(map(repr, POSITIONS))} for features of images", "None")
        flat = jax.vmap(lambda one: flatten_positions(one, positions))
        return flat(jnp.asarray(array)[None] if array.ndim == 4 else jnp.asarray(array))
    if array.ndim not in (2, 3):
        fail(
            name, "have axes [n, p], [members, n, p], or [n, h, w, c] and [members, n, h, w, c]", f"shape {array.shape}"
        )
    return jnp.asarray(array)[None] if array.ndim == 2 else jnp.asarray(array)


def _check_sets(names: tuple[str, ...], first: _Set, second: _Set | None, measure: Measure) -> int:
    number = first.arrays[0].shape[1]
    if second is not None:
        check_same_length(names[0], number, names[-1], second.arrays[0].shape[1])
    if number % measure.repeats:
        fail(names[0], f"have rows that {measure.repeats} goes into, one per repeat of all conditions", number)
    return number


def _check_fit(name: str, one: _Set, measure: Measure, number: int) -> None:
    """Raises unless every representation is fit for the measure with so many samples left."""
    check_samples(name, number, measure.minimum)
    widest = max(array.shape[2] for array in one.arrays)
    if measure.narrow and widest >= number - 1:
        fail(name, f"have fewer features than samples less one for {measure.name}", f"{widest} of {number} samples")


def _warn_undefined(measure: Measure, values: Array, first: _Set, second: _Set | None) -> None:
    known: Any = np.isfinite(np.asarray(values))
    sides = [(first, ~known.any(1)), (first if second is None else second, ~known.any(0))]
    gone = {label: None for one, undefined in sides for label, bad in zip(one.labels, undefined, strict=True) if bad}
    if gone:
        names = ", ".join(f"{layer} {member}".strip() for layer, member in gone)
        warn(f"{measure.name} is not defined for {names}, whose values are NaN: are all samples the same there?")


def _warn_biased(measure: Measure, bias: Array, error: Array) -> None:
    leaning = np.abs(np.asarray(bias)) > LARGEST_BIAS * np.asarray(error) + 1e-5
    if leaning.any():
        warn(
            f"{leaning.sum()} of {leaning.size} intervals of {measure.name} rest on a bias larger than {LARGEST_BIAS} "
            "standard errors, which was taken off to first order: they may not cover. Use more samples for so many "
            "features, or a debiased measure."
        )
