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
    # Over all orders of one representation's samples, the mean of the product is the product of
    # both means.
    mean: Array


def inner(a: Prepared, b: Prepared) -> Array:
    """Return the inner product of two prepared representations."""
    vdot = partial(jnp.vdot, precision=lax.Precision.HIGHEST)
    products = jax.tree.map(vdot, a.entries, b.entries)
    return jnp.sum(jnp.stack(jax.tree.leaves(products)))


def inner_mean(a: Prepared, b: Prepared) -> Array:
    """Return the mean of `inner` over all orders of one representation's samples."""
    return a.mean * b.mean


class Form(NamedTuple):
    """Measure as a preparation of each representation and a comparison of two prepared ones.

    Functions compare by value, and traced options are leaves of `equinox.Partial`, so programs are
    compiled once.
    """

    # From [n, p], and `labels` of its rows if there are any, to a PyTree of arrays.
    prepare: Callable[..., Any]
    # From two prepared representations to a number.
    compare: Callable[[Any, Any], Array]
    # Mean of `compare` over all orders of one representation's samples.
    expected: Callable[[Any, Any], Array] | None = None
    # The measure as `inner` of symmetric matrices over samples, of norm 1 and with rows of sum 0,
    # so that the moments of the null are known.
    gram: Callable[[Array], Prepared] | None = None
    half: Callable[[Array], Prepared] | None = None  # `gram` from about half of its entries
    minimum: int = 2  # samples
    narrow: bool = False  # True if it inverts covariances, which takes more samples than features
    # "scaled" if it cuts the rank of columns of one size, "plain" if of columns as they are.
    cut: str = ""
    sides: str = "xy"  # representations that must be narrow, and whose ranks are cut
    # From the number of rows to integers [rows] that stay with each row when others are left out,
    # such as its fold.
    labels: Callable[[int], np.ndarray] | None = None
    # The form for samples in groups, whose labels are these: it leaves out pairs within a group.
    apart: "Form | None" = None
    outside: int = 0  # fewest samples outside of any group
    # From two sets of stacks and blocks of rows to the tables without each block.
    leave_outs: Callable[..., Any] | None = None

    def grouped(self, groups: np.ndarray | None) -> "Form":
        """Return the form for samples in groups [n], which counts and divides groups."""
        if groups is None:
            return self
        form = self.apart or self
        if form.labels is None:
            return form
        labels_of_groups = form.labels(int(groups.max()) + 1)
        return form._replace(labels=lambda number: labels_of_groups[groups])

    def prepared(self, x: Array, labels: Array | None) -> Any:
        """Return a prepared representation, with the labels of its rows."""
        if labels is None:
            return self.prepare(x)
        return self.prepare(x, labels)

    def labels_of(self, number: int) -> Array | None:
        """Return the labels of all rows, or None."""
        if self.labels is None:
            return None
        return to_device(self.labels(number))


def of_sizes(form: Form, n: int, p: int, q: int, *, items: int = 2, pairs: int = 1) -> Form:
    """Return the form over features, or the form over samples if it takes fewer multiplications."""
    # Programs do not depend on these.
    form = form._replace(narrow=False, cut="", labels=None, apart=None, outside=0, leave_outs=None)
    width = max(p, q)
    over_samples = n * (items * width + pairs)
    over_features = width * (items * width + pairs * min(p, q))
    if form.gram is None or over_samples >= over_features:
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
        """Return the letters that hold for `number` samples and `width` features of x.

        Options are the default ones.
        """
        num_fitted = number - -(-number // 5)
        if width < num_fitted:
            return self.invariances
        return "".join(
            letter for letter in self.invariances if letter not in self.invariances_if_narrow
        )

    def with_options(self, **options: Any) -> Form:
        """Return the form of the measure with options."""
        parameters: Any = ()
        if not isinstance(self.form, Form):
            parameters = inspect.signature(self.form).parameters.values()
        names = [
            parameter.name for parameter in parameters if parameter.kind == parameter.KEYWORD_ONLY
        ]
        takes_all = any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters)

        unknown = [name for name in options if name not in names]
        if unknown and not takes_all:
            allowed = f"{self.name} has no options"
            if names:
                allowed = f"the options of {self.name} are {', '.join(names)}"
            raise TypeError(f"`{unknown[0]}` is no option: {allowed}.")

        if isinstance(self.form, Form):
            return self.form
        return self.form(**options)

    def __call__(self, x: Any, y: Any, **options: Any) -> Array:
        """Return the measure of two representations."""
        return self.function(x, y, **options)


def evaluate(form: Form, x: Array | np.ndarray, y: Array | np.ndarray) -> Array:
    """Return a measure of two representations after checks."""
    representations = {"x": x, "y": y}
    for name, features in representations.items():
        refuse_vanishing(name, features)
    for name in form.sides:
        features = representations[name]
        check_size(form, name, *features.shape)
        warn_dropped(form, name, features)

    number, width = x.shape
    sized = of_sizes(form, number, width, y.shape[1])
    first, second = in_common_dtype(x, y)
    score = compared(sized, first, second, form.labels_of(number))

    # The search for equal rows costs a pass over the data, so it runs only after NaN.
    if not is_traced(score) and np.isnan(score):
        for name, features in representations.items():
            refuse_constant(name, features)
    return score


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
    dtypes = [jax.dtypes.canonicalize_dtype(array.dtype) for array in arrays]
    # Half precisions would lose what solvers and rank cuts need.
    dtype = jnp.promote_types(jnp.result_type(*dtypes), jnp.float32)
    return [to_device(array, dtype) for array in arrays]


def check_size(form: Form, name: str, number: int, width: int, *, condition: str = "") -> None:
    """Raise if there are too few samples, or too many features for a narrow form."""
    if number < form.minimum:
        fail(name, f"have at least {form.minimum} samples", f"{number}{condition}")
    if form.narrow and width >= number - 1:
        size = f"{width} features of {number} samples{condition}"
        advice = "As many features as samples span all of them. Reduce the features (`svcca`)"
        fail(name, "have fewer features than samples less one", size, advice)


def check_group_sizes(form: Form, groups: np.ndarray, condition: str = "") -> None:
    """Raise if the groups [n] of samples are too few, or if one of them is too large."""
    sizes = np.bincount(groups)
    num_groups = int(np.count_nonzero(sizes))
    if form.labels is not None and num_groups < form.minimum:
        requirement = f"label at least {form.minimum} groups"
        fail("groups", requirement, f"{num_groups} groups{condition}")

    inside = int(sizes.max())
    outside = len(groups) - inside
    minimum = max(form.outside, inside + 1)
    if form.outside and outside < minimum:
        requirement = (
            f"leave at least {minimum} samples outside of the largest, of {inside} samples"
        )
        fail("groups", requirement, f"{outside}{condition}")


def refuse_constant(name: str, x: Any) -> None:
    """Raise a `ValueError` if `x` is not traced and all of its rows are equal."""
    if is_traced(x):
        return
    ranges = np.ptp(np.asarray(x), axis=0)
    if not ranges.any():
        rows = f"the same row {len(x)} times"
        fail(name, "differ between samples", rows, "Nothing can be similar to it")


def refuse_vanishing(name: str, x: Any) -> None:
    """Raise a `ValueError` if `x` is not traced and processors round its largest entry to zero."""
    if is_traced(x):
        return
    dtype = jax.dtypes.canonicalize_dtype(np.result_type(x.dtype, np.float32))
    smallest = jnp.finfo(dtype).tiny
    sizes = np.abs(np.asarray(x))
    largest = np.max(sizes, initial=0)
    if 0 < largest < smallest:
        requirement = f"have an entry of at least {smallest:.2g}"
        fail(name, requirement, f"{largest:.2g} at most", "Multiply it by a number")


def scaled(x: Array) -> tuple[Array, Array]:
    """Return features divided by a power of two near their largest entry, and this power of two."""
    scale = scale_of(jnp.max(jnp.abs(x)))
    return x / scale, scale


def centred(x: Array) -> tuple[Array, Array]:
    """Return centred columns divided by a power of two near their largest entry, and this power."""
    x, first = scaled(x)
    # Scaled again after centring, because an offset may exceed the spread by far.
    x, second = scaled(centre(x))
    return x, first * second


def column_sizes(x: Array) -> Array:
    """Return powers of two near the largest entries of columns, the units of their rank cut."""
    sizes = jnp.abs(x)
    return scale_of(jnp.max(sizes, 0, keepdims=True))


def warn_dropped(form: Form, name: str, x: Any) -> None:
    """Warn of directions that exceed rounding but not the rank cut, and name their main columns."""
    if not form.cut or is_traced(x):
        return
    is_scaled = form.cut == "scaled"
    number, width = x.shape
    if is_scaled and width >= number - 1:
        return

    with jax.ensure_compile_time_eval():  # known features may be used under a trace
        features = to_device(x)
        num_kept, num_significant = map(int, _num_kept(features, is_scaled))
        # Units of columns decide what a plain cut keeps.
        if not is_scaled and num_kept < min(number - 1, width):
            num_significant = int(_num_kept(features, True)[1])
    if num_significant <= num_kept:
        return

    columns = np.asarray(features)
    columns = columns - columns.mean(0)
    if is_scaled:
        columns = columns / column_units(columns)
    triangle = np.linalg.qr(columns, mode="r")
    right_vectors = np.linalg.svd(np.asarray(triangle, float))[2]
    dropped = np.abs(right_vectors[num_kept:num_significant])
    main_columns = ", ".join(map(str, dropped.argmax(1)))
    warn(
        f"{num_significant - num_kept} of the directions of `{name}` exceed rounding, but are too "
        "small beside the largest to be kept: they count as absent. Column with most of each: "
        f"{main_columns}. Float64 keeps smaller ones."
    )


@partial(jax.jit, static_argnames="is_scaled")
def _num_kept(x: Array, is_scaled: bool) -> tuple[Array, Array]:
    """Return the number of directions above the rank cut, and of those that exceed rounding."""
    dtype = jnp.promote_types(x.dtype, jnp.float32)
    x, _ = centred(x.astype(dtype))
    if is_scaled:
        x = x / column_sizes(x)
    matrix, _ = finite_part(x)
    values = jnp.linalg.svd(matrix, compute_uv=False)
    # Exact dependence leaves some 3 roundings.
    rounding = 16 * jnp.finfo(x.dtype).eps * values[0]
    threshold = jnp.maximum(rank_cut(x) * values[0], rounding)
    return jnp.sum(values > threshold), jnp.sum(values > rounding)


def unit(array: Array) -> Array:
    """Return an array divided by its Frobenius norm; NaN for zeros."""
    return array / jnp.sqrt(jnp.sum(array**2))


def apart_from_rounding(array: Array, minuend: Array) -> Array:
    """Return `array`, the result of a subtraction from `minuend`, or NaN if only rounding remains.

    Only rounding remains if no entry of `array` exceeds 100 eps times the largest of `minuend`.
    """
    size = lax.stop_gradient(jnp.max(jnp.abs(array)))
    minuend_size = lax.stop_gradient(jnp.max(jnp.abs(minuend)))
    rounding = 100 * jnp.finfo(array.dtype).eps * minuend_size
    return jnp.where(size <= rounding, jnp.nan, array)


def narrowed(x: Array) -> Array:
    """Return features in an orthonormal basis of the samples' span, [n, min(n, p)].

    Inner products of samples stay the same.
    """
    if x.shape[1] <= len(x):
        return x
    # The axes count as constants: to first order, a change of x outside of them changes no inner
    # product of samples.
    columns, undefined = finite_part(lax.stop_gradient(x.T))
    axes, _ = jnp.linalg.qr(columns)
    return product(x, axes) + undefined


def aligned(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the wider of two matrices, and the narrower one rotated to be nearest to it.

    The rotation counts as a constant.
    """
    if b.shape[1] > a.shape[1]:
        a, b = b, a
    crossed, undefined = finite_part(lax.stop_gradient(product(b.T, a)))
    left_vectors, _, right_vectors = jnp.linalg.svd(crossed, full_matrices=False)
    rotation = product(left_vectors, right_vectors)
    return a, product(b, rotation) + undefined
