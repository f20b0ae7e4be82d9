"""Preparation and comparison of representations, and properties of measures."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import fail, is_traced, warn
from dissociation._core.conversion import as_array, as_numbers, to_device, warn_narrowed
from dissociation._core.linalg import centre, column_units, finite_part, product, rank_cut, scale_of

Features = Float[Array | np.ndarray, "n p"]
"""Representation, samples first."""

OtherFeatures = Float[Array | np.ndarray, "n q"]
"""Representation of the same samples in the same order."""

Score = Float[Array, ""]


class Prepared(NamedTuple):
    """Representation that is compared by an inner product."""

    entries: Any  # PyTree of arrays
    # The product's mean over all orders of one representation's samples is the product of both
    # means.
    mean: Array


def inner(a: Prepared, b: Prepared) -> Array:
    """Return the inner product of two prepared representations."""
    products = jax.tree.map(
        partial(jnp.vdot, precision=lax.Precision.HIGHEST), a.entries, b.entries
    )
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def inner_mean(a: Prepared, b: Prepared) -> Array:
    """Return the mean of `inner` over all orders of one representation's samples."""
    return a.mean * b.mean


class Form(NamedTuple):
    """Measure as a preparation of each representation and a comparison of two prepared ones."""

    # Functions compare by value, and traced options are leaves of `equinox.Partial`, so programs
    # are compiled once.
    prepare: Callable[
        ..., Any
    ]  # from [n, p], and `labels` of its rows if there are any, to a PyTree of arrays
    compare: Callable[[Any, Any], Array]  # from two of these to a number
    expected: Callable[[Any, Any], Array] | None = (
        None  # mean over all orders of one representation's samples
    )
    # The measure as `inner` of symmetric matrices over samples, of norm 1 and with rows of sum 0,
    # so that the moments of the null are known.
    gram: Callable[[Array], Prepared] | None = None
    half: Callable[[Array], Prepared] | None = None  # `gram` from about half of its entries
    minimum: int = 2  # samples
    narrow: bool = False  # True if it inverts covariances, which takes more samples than features
    cut: str = (
        ""  # "scaled" if it cuts the rank of columns of one size, "plain" if of columns as they are
    )
    sides: str = "xy"  # representations that must be narrow, and whose ranks are cut
    # From the number of rows to integers [rows] that stay with each row when others are left out,
    # such as its fold.
    labels: Callable[[int], np.ndarray] | None = None
    # The form for samples in groups, whose labels are these: it leaves out pairs within a group.
    apart: "Form | None" = None
    outside: int = 0  # fewest samples outside of any group

    def grouped(self, groups: np.ndarray | None) -> "Form":
        """Return the form for samples in groups [n]: numbers of samples and folds become those of groups."""
        form = self.apart or self
        if groups is None or form.labels is None:
            return self if groups is None else form
        of_groups = form.labels(int(groups.max()) + 1)
        return form._replace(labels=lambda number: of_groups[groups])

    def prepared(self, x: Array, labels: Array | None) -> Any:
        """Return a prepared representation, with the labels of its rows."""
        return self.prepare(x) if labels is None else self.prepare(x, labels)

    def labels_of(self, number: int) -> Array | None:
        """Return the labels of all rows, or None."""
        return None if self.labels is None else to_device(self.labels(number))


def of_sizes(form: Form, n: int, p: int, q: int, *, items: int = 2, pairs: int = 1) -> Form:
    """Return the form over features, or the form over samples if it exists and takes fewer multiplications."""
    # Programs do not depend on these.
    form = form._replace(narrow=False, cut="", labels=None, apart=None, outside=0)
    p, q = max(p, q), min(p, q)
    if form.gram is None or n * (items * p + pairs) >= p * (items * p + pairs * q):
        return form
    return form._replace(prepare=form.half or form.gram, compare=inner, expected=inner_mean)


@dataclass(frozen=True)
class Measure:
    """Measure of similarity and its properties.

    Attributes:
        function: Function f(x, y, **options) of two representations.
        form: Preparation and comparison, or a function of options that returns them.
        equation: Formula of the centred features Xc and K = X X^T.
        invariances: Letters of maps that do not change the measure: O rotations and reflections, S
            scale, T translation, P permutations of neurons, L invertible linear maps, D positive
            scales of neurons.
        invariances_of_y: Letters of maps of y, if they differ from those of x.
        invariances_if_narrow: Letters of maps of x among `invariances` that need fewer features
            than the samples of which a map is fitted, four fifths of all.
        metric: If True, the measure obeys the triangle inequality and is zero for equal
            representations.
        symmetric: If True, x and y may be exchanged.
        range: Smallest and largest value.
        identical: Value for two equal representations. Tied neighbours, or constant neurons in
            matchings, lower it.
        cost: Leading orders of multiplications of one pair.
        reference: Source.
        same_width: If True, both representations have the same number of features, the classes.
        repeats: Number of blocks of rows that repeat the same conditions.
        population: If True, the measure converges as 1 / n with the number n of samples.
        host: If True, one step runs in SciPy on the host and has no derivative.
    """

    function: Callable[..., Array]
    form: Form | Callable[..., Form]
    equation: str = ""
    invariances: str = ""
    cost: str = ""
    reference: str = ""
    range: tuple[float, float] = (0.0, 1.0)
    identical: float = 1.0
    metric: bool = False
    symmetric: bool = True
    invariances_of_y: str | None = None
    invariances_if_narrow: str = ""
    same_width: bool = False
    repeats: int = 1
    # False for measures of k neighbours, because neighbourhoods shrink as n grows, and for sums
    # over samples, because these grow with n.
    population: bool = True
    host: bool = False

    @property
    def name(self) -> str:
        """Return the name of the function, the key in `MEASURES`."""
        return getattr(self.function, "__name__", "measure")

    @property
    def larger_is_closer(self) -> bool:
        """Return True for a similarity, False for a distance."""
        return self.identical == self.range[1]

    @property
    def minimum(self) -> int:
        """Return the smallest number of samples, with default options."""
        return self.with_options().minimum

    @property
    def narrow(self) -> bool:
        """Return True if the measure needs more samples than features, with default options."""
        return self.with_options().narrow

    def invariances_at(self, number: int, width: int) -> str:
        """Return the letters that hold for `number` samples and `width` features of x, with default options."""
        if width < number - -(-number // 5):
            return self.invariances
        return "".join(
            letter for letter in self.invariances if letter not in self.invariances_if_narrow
        )

    def with_options(self, **options: Any) -> Form:
        """Return the form of the measure with options."""
        known = (
            () if isinstance(self.form, Form) else inspect.signature(self.form).parameters.values()
        )
        names = [one.name for one in known if one.kind == one.KEYWORD_ONLY]
        wrong = [name for name in options if name not in names]
        if wrong and not any(one.kind == one.VAR_KEYWORD for one in known):
            allowed = (
                f"the options of {self.name} are {', '.join(names)}"
                if names
                else f"{self.name} has no options"
            )
            raise TypeError(f"`{wrong[0]}` is no option: {allowed}.")
        return self.form if isinstance(self.form, Form) else self.form(**options)

    def __call__(self, x: Any, y: Any, **options: Any) -> Array:
        """Return the measure of two representations."""
        return self.function(x, y, **options)


def evaluate(form: Form, x: Array | np.ndarray, y: Array | np.ndarray) -> Array:
    """Return a measure of two representations after checks."""
    both = {"x": x, "y": y}
    for name, array in both.items():
        refuse_vanishing(name, array)
    for name in form.sides:
        check_size(form, name, *both[name].shape)
        warn_dropped(form, name, both[name])
    sized = of_sizes(form, x.shape[0], x.shape[1], y.shape[1])
    first, second = in_common_dtype(x, y)
    value = compared(sized, first, second, form.labels_of(x.shape[0]))
    # The search for equal rows costs a pass over the data, so it runs only after NaN.
    if not is_traced(value) and np.isnan(value):
        for name, array in both.items():
            refuse_constant(name, array)
    return value


@eqx.filter_jit
def compared(form: Form, x: Array, y: Array, labels: Array | None = None) -> Array:
    """Return a measure of two arrays of one dtype, with labels of their rows."""
    return form.compare(form.prepared(x, labels), form.prepared(y, labels))


def real_numbers(name: str, value: Any, words: str, *, gates: int = 1) -> Any:
    """Return an array of floats, with a warning of lost digits."""
    array = as_array(name, value, words)
    # More than `gates` outer calls have given the warning.
    warn_narrowed(name, array, gates=gates)
    return as_numbers(name, array, frozenset({"float"}))


def in_common_dtype(*arrays: Any) -> list[Array]:
    """Return JAX arrays in their widest dtype, at least float32."""
    # Half precisions would lose what solvers and rank cuts need.
    kinds = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays]
    kind = jnp.promote_types(jnp.result_type(*kinds), jnp.float32)
    return [to_device(array, kind) for array in arrays]


def check_size(form: Form, name: str, number: int, width: int, *, left: str = "") -> None:
    """Raise unless there are enough samples, and not too many features for a form that needs more samples."""
    if number < form.minimum:
        fail(name, f"have at least {form.minimum} samples", f"{number}{left}")
    if form.narrow and width >= number - 1:
        advice = "As many features as samples span all of them. Reduce the features (`svcca`)"
        fail(
            name,
            "have fewer features than samples less one",
            f"{width} features of {number} samples{left}",
            advice,
        )


def check_group_sizes(form: Form, groups: np.ndarray, left: str = "") -> None:
    """Raise unless samples in groups [n] are in enough groups, none of which is too large."""
    sizes = np.bincount(groups)
    number = int(np.count_nonzero(sizes))
    if form.labels is not None and number < form.minimum:
        fail("groups", f"label at least {form.minimum} groups", f"{number} groups{left}")
    inside, outside = int(sizes.max()), len(groups) - int(sizes.max())
    if form.outside and outside < max(form.outside, inside + 1):
        wanted = (
            f"leave at least {max(form.outside, inside + 1)} samples outside of the "
            f"largest, of {inside} samples"
        )
        fail("groups", wanted, f"{outside}{left}")


def refuse_constant(name: str, x: Any) -> None:
    """Raise a `ValueError` if `x` is not traced and all of its rows are equal."""
    if not is_traced(x) and not np.ptp(np.asarray(x), axis=0).any():
        fail(
            name,
            "differ between samples",
            f"the same row {np.shape(x)[0]} times",
            "Nothing can be similar to it",
        )


def refuse_vanishing(name: str, x: Any) -> None:
    """Raise a `ValueError` if `x` is not traced and its largest entry is so small that processors round it to zero."""
    if is_traced(x):
        return
    least = jnp.finfo(jax.dtypes.canonicalize_dtype(np.result_type(x.dtype, np.float32))).tiny
    if 0 < (largest := np.max(np.abs(np.asarray(x)), initial=0)) < least:
        fail(
            name,
            f"have an entry of at least {least:.2g}",
            f"{largest:.2g} at most",
            "Multiply it by a number",
        )


def scaled(x: Array) -> tuple[Array, Array]:
    """Return features divided by a power of two near their largest absolute entry, and this power of two."""
    scale = scale_of(jnp.max(jnp.abs(x)))
    return x / scale, scale


def centred(x: Array) -> tuple[Array, Array]:
    """Return centred columns divided by a power of two near their largest absolute entry, and this power of two."""
    x, first = scaled(x)
    # Scaled again after centring, because an offset may exceed the spread by far.
    x, second = scaled(centre(x))
    return x, first * second


def column_sizes(x: Array) -> Array:
    """Return powers of two near the largest entries of columns; ranks are cut on columns divided by them."""
    return scale_of(jnp.max(jnp.abs(x), 0, keepdims=True))


def warn_dropped(form: Form, name: str, x: Any) -> None:
    """Warn of directions that a form's rank cut drops although they exceed rounding, with the column of each."""
    evens = form.cut == "scaled"
    if not form.cut or is_traced(x) or (evens and x.shape[1] >= x.shape[0] - 1):
        return
    with jax.ensure_compile_time_eval():  # known features may be used under a trace
        features = to_device(x)
        kept, known = (int(number) for number in _num_kept(features, evens))
        if not evens and kept < min(
            x.shape[0] - 1, x.shape[1]
        ):  # units of columns decide what a plain cut keeps
            known = int(_num_kept(features, True)[1])
    if known > kept:
        columns = np.asarray(features) - np.asarray(features).mean(0)
        columns = columns / column_units(columns) if evens else columns
        triangle = np.asarray(np.linalg.qr(columns, mode="r"), float)
        right = np.linalg.svd(triangle)[2]
        most = ", ".join(map(str, np.abs(right[kept:known]).argmax(1)))
        warn(
            f"{known - kept} of the directions of `{name}` exceed rounding, but are too small "
            "beside the largest to be "
            f"kept: they count as absent. Column with most of each: {most}. Float64 keeps "
            "smaller ones."
        )


@partial(jax.jit, static_argnames="evens")
def _num_kept(x: Array, evens: bool) -> tuple[Array, Array]:
    """Return the number of directions above the rank cut, and of those that are more than rounding."""
    x, _ = centred(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    values = jnp.linalg.svd(finite_part(x / column_sizes(x) if evens else x)[0], compute_uv=False)
    # Exact dependence leaves some 3 roundings.
    rounding = 16 * jnp.finfo(x.dtype).eps * values[0]
    return jnp.sum(values > jnp.maximum(rank_cut(x) * values[0], rounding)), jnp.sum(
        values > rounding
    )


def unit(array: Array) -> Array:
    """Return an array divided by its Frobenius norm; NaN for zeros."""
    return array / jnp.sqrt(jnp.sum(array**2))


def apart_from_rounding(array: Array, whole: Array) -> Array:
    """Return `array`, the result of a subtraction from `whole`, or NaN in all entries if only rounding remains.

    Only rounding remains if no entry of `array` exceeds 100 eps times the largest entry of `whole`.
    """
    sizes = [lax.stop_gradient(jnp.max(jnp.abs(part))) for part in (array, whole)]
    return jnp.where(sizes[0] <= 100 * jnp.finfo(array.dtype).eps * sizes[1], jnp.nan, array)


def narrowed(x: Array) -> Array:
    """Return features in an orthonormal basis of the samples' span, [n, min(n, p)], with equal inner products."""
    if x.shape[1] <= x.shape[0]:
        return x
    # The axes count as constants: to first order, a change of x outside of them changes no inner
    # product of samples.
    columns, undefined = finite_part(jax.lax.stop_gradient(x.T))
    return product(x, jnp.linalg.qr(columns)[0]) + undefined


def aligned(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the wider of two matrices, and the other, rotated by a constant to be nearest to it."""
    if b.shape[1] > a.shape[1]:
        a, b = b, a
    turned, undefined = finite_part(jax.lax.stop_gradient(product(b.T, a)))
    left, _, right = jnp.linalg.svd(turned, full_matrices=False)
    return a, product(b, product(left, right)) + undefined
