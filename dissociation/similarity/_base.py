"""What a measure of similarity is: how a representation is prepared, how two are compared, and what holds of it."""

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

from dissociation._core.checks import check_same_length, fail, is_traced, warn
from dissociation._core.linalg import centre, finite_part, product, rank_cut, scale_of

Features = Float[Array | np.ndarray, "n p"]
"""A representation: samples first."""

OtherFeatures = Float[Array | np.ndarray, "n q"]
"""Another one of the same samples, in the same order."""

Score = Float[Array, ""]

HOST = 10_000
"""Multiplications that a step on the host counts as, beside its own."""


class Prepared(NamedTuple):
    """A representation, ready to be compared by a product.

    Attributes:
        entries: What is multiplied entry by entry and summed, in one array or in parts.
        mean: The product's mean over all orders of the samples of one of two is the product of their means.
        rank: For measures that divide by it; else 1.
    """

    entries: Any
    mean: Array
    rank: Array | float = 1.0


class Route(NamedTuple):
    """One way to compute a measure: each representation is prepared once, and all pairs of prepared ones are compared.

    Functions compare by value and hold traced options as leaves, so that a program is compiled once
    (`equinox.Partial`).

    Attributes:
        prepare: From [n, p] to a PyTree of arrays.
        compare: From two of these to a number.
        prepare_work: Multiplications, from n and p.
        compare_work: Multiplications, from n, p and q.
        compare_memory: Numbers held while two are compared, from n, p and q.
        finish: From the product of two `Prepared` ones, and these, to the measure, for a measure that is one of them:
            all pairs are then one product of matrices.
        matrix: Whether what is multiplied are symmetric matrices over samples whose rows sum to zero, of norm 1, and
            the measure is their product.
        expected: From two prepared ones to the measure's mean over all orders of one's samples, where that is known.
        by_rows: Whether a representation with its samples in another order is prepared as its prepared samples, the
            first axes of its arrays, in that order.
    """

    prepare: Callable[[Array], Any]
    compare: Callable[[Any, Any], Array]
    prepare_work: Callable[[int, int], float | int]
    compare_work: Callable[[int, int, int], float | int]
    compare_memory: Callable[[int, int, int], float | int] = lambda n, p, q: 4 * p * q
    finish: Callable[[Array, Any, Any], Array] | None = None
    matrix: bool = False
    expected: Callable[[Any, Any], Array] | None = None
    by_rows: bool = False

    def program(self) -> "Route":
        """Without the costs: what compiled programs are told apart by."""
        return self._replace(prepare_work=_unknown, compare_work=_unknown, compare_memory=_unknown)

    def work(self, n: int, p: int, q: int, *, items: int, pairs: int) -> float | int:
        """Multiplications for so many representations and pairs of them."""
        return items * self.prepare_work(n, max(p, q)) + pairs * self.compare_work(n, p, q)


def _unknown(*sizes: int) -> float:
    raise RuntimeError("A program knows no costs.")


def as_it_is(product: Array, a: Prepared, b: Prepared) -> Array:
    """A measure that is the product itself."""
    return product


def product_route(
    prepare: Callable[[Array], Prepared],
    finish: Callable[[Array, Any, Any], Array] = as_it_is,
    *,
    linear: bool = True,
    matrix: bool = False,
    sorts: bool = False,
) -> Route:
    """The route of a measure over pairs of samples that is a function of one product."""
    return Route(
        prepare=prepare,
        compare=eqx.Partial(_finished, finish),
        prepare_work=lambda n, p: n * n * (p + (100 if sorts else 5)),
        compare_work=lambda n, p, q: n * n,
        compare_memory=lambda n, p, q: 1,
        finish=finish,
        matrix=matrix,
        expected=eqx.Partial(_finished_mean, finish) if linear else None,
    )


def _finished(finish: Callable[..., Array], a: Prepared, b: Prepared) -> Array:
    products = jax.tree.map(partial(jnp.vdot, precision=jax.lax.Precision.HIGHEST), a.entries, b.entries)
    return finish(sum(jax.tree.leaves(products)), a, b)


def _finished_mean(finish: Callable[..., Array], a: Prepared, b: Prepared) -> Array:
    return finish(a.mean * b.mean, a, b)


@dataclass(frozen=True)
class Measure:
    """What is known of a measure.

    Attributes:
        name: Its key in `MEASURES`.
        function: f(x, y, **options) of two representations.
        routes: From options to the ways of computing it, two where the cheaper one depends on the sizes.
        equation: With Xc the centred features and K = X X^T.
        invariances: Maps of either representation that leave it as it is, by letters: O rotations and reflections, S
            scale, T translation, P permutations of neurons, L invertible linear maps, D a positive scale per neuron.
            Where it is not symmetric, maps of x.
        invariances_of_y: Maps of y, where they are others.
        metric: Whether it obeys the triangle inequality, and is zero between equals.
        symmetric: Whether x and y may be exchanged.
        range: The least and the largest value.
        identical: Its value for a representation with itself (less where neighbours are tied, and with dead neurons in
            matchings).
        cost: Multiplications of one pair, leading orders.
        reference: Where it is from.
        minimum: Samples at least.
        narrow: Whether there have to be more samples than features.
        same_width: Whether both have the same number of features, as classes.
        repeats: How often the rows run through the same conditions.
        population: Whether it tends to a value as samples grow, as 1 / n. Of a fixed number of neighbours it does not,
            nor does a sum over samples.
        host: Whether a step of it is done by SciPy on the host, through which no derivative is taken.
    """

    name: str
    function: Callable[..., Array]
    routes: Callable[..., tuple[Route, ...]]
    equation: str
    invariances: str
    range: tuple[float, float]
    identical: float
    cost: str
    reference: str
    metric: bool = False
    symmetric: bool = True
    invariances_of_y: str | None = None
    minimum: int = 2
    narrow: bool = False
    same_width: bool = False
    repeats: int = 1
    population: bool = True
    host: bool = False

    @property
    def larger_is_closer(self) -> bool:
        """Whether it is a similarity, and no distance."""
        return self.identical == self.range[1]

    def __call__(self, x: Any, y: Any, **options: Any) -> Array:
        """The measure of two representations."""
        return self.function(x, y, **options)


def cheapest(routes: tuple[Route, ...], n: int, p: int, q: int, *, items: int = 2, pairs: int = 1) -> Route:
    """The route of the least work."""
    return min(routes, key=lambda route: route.work(n, p, q, items=items, pairs=pairs))


def evaluate(routes: tuple[Route, ...], x: Array | np.ndarray, y: Array | np.ndarray, *, minimum: int = 2) -> Array:
    """A measure of two representations, checked."""
    check_samples("x", x.shape[0], minimum)
    for name, array in (("x", x), ("y", y)):
        refuse_vanishing(name, array)
    route = cheapest(routes, x.shape[0], x.shape[1], y.shape[1])
    value = _evaluate(route.prepare, route.compare, *in_common_dtype(x, y))
    if not is_traced(value) and np.isnan(value):
        for name, array in (("x", x), ("y", y)):
            refuse_constant(name, array)
    return value


@eqx.filter_jit
def _evaluate(prepare: Any, compare: Any, x: Array, y: Array) -> Array:
    return compare(prepare(x), prepare(y))


def in_common_dtype(*arrays: Any) -> list[Array]:
    """Arrays of JAX in the widest of their dtypes, float32 at least."""
    arrays = tuple(jnp.asarray(array) for array in arrays)
    kind = jnp.promote_types(jnp.result_type(*(array.dtype for array in arrays)), jnp.float32)
    return [array.astype(kind) for array in arrays]


def check_pair(x: Array | np.ndarray, y: Array | np.ndarray, measure: Measure) -> None:
    """Raises unless the shapes of two representations are fit for a measure."""
    check_same_length("x", x.shape[0], "y", y.shape[0])
    check_samples("x", x.shape[0], measure.minimum)
    if measure.narrow:
        refuse_wide(x, y)
    if measure.same_width and x.shape[1] != y.shape[1]:
        fail("y", f"have the classes of `x` ({x.shape[1]})", y.shape[1])


def check_samples(name: str, number: int, minimum: int) -> None:
    """Raises unless there are enough samples."""
    if number < minimum:
        fail(name, f"have at least {minimum} samples", f"{number}")


def refuse_constant(name: str, x: Any) -> None:
    """Raises if known rows are all the same."""
    if not is_traced(x) and not np.ptp(np.asarray(x), axis=0).any():
        fail(name, "differ between samples", f"the same row {np.shape(x)[0]} times", "Nothing can be similar to it")


def refuse_vanishing(name: str, x: Any) -> None:
    """Raises if known numbers are so small that processors take all of them for zero."""
    if not is_traced(x):
        least = jnp.finfo(jax.dtypes.canonicalize_dtype(np.result_type(x.dtype, np.float32))).tiny
        if 0 < (largest := np.max(np.abs(np.asarray(x)), initial=0)) < least:
            fail(name, f"have an entry of at least {least:.2g}", f"{largest:.2g} at most", "Multiply it by a number")


def refuse_wide(x: Array | np.ndarray, y: Array | np.ndarray) -> None:
    """Raises unless there are more samples than features, after centring."""
    for name, array in (("x", x), ("y", y)):
        number, width = array.shape
        if width >= number - 1:
            advice = "As many samples as features span all: every correlation would be 1. Reduce the features (`svcca`)"
            fail(name, "have fewer features than samples less one", f"shape {tuple(array.shape)}", advice)


def centred(x: Array) -> tuple[Array, Array]:
    """The columns about their means, divided by a power of two near the largest entry, and that power."""
    first = scale_of(jnp.max(jnp.abs(x)))
    x = centre(x / first)
    second = scale_of(jnp.max(jnp.abs(x)))
    return x / second, first * second


def scaled(x: Array) -> tuple[Array, Array]:
    """The features divided by a power of two near the largest entry, and that power."""
    scale = scale_of(jnp.max(jnp.abs(x)))
    return x / scale, scale


def column_sizes(x: Array) -> Array:
    """Powers of two near the columns' largest entries: a rank is cut on columns of one size."""
    return scale_of(jnp.max(jnp.abs(x), 0, keepdims=True))


def warn_dropped(*, level: bool = True, **features: Any) -> None:
    """Warn of directions of known features that a rank cut takes for absent, although they exceed rounding.

    With `level` the cut is made on columns of one size.
    """
    for name, x in features.items():
        if is_traced(x):
            continue
        with jax.ensure_compile_time_eval():  # known features may be used under a trace
            count = int(_num_dropped(jnp.asarray(x), level))
        if count:
            warn(
                f"{count} of the directions of `{name}` exceed rounding, but are too small beside the largest to be "
                "kept: they count as absent. Float64 keeps smaller ones."
            )


@partial(jax.jit, static_argnames="level")
def _num_dropped(x: Array, level: bool) -> Array:
    x, _ = centred(x.astype(jnp.promote_types(x.dtype, jnp.float32)))
    values = jnp.linalg.svd(finite_part(x / column_sizes(x) if level else x)[0], compute_uv=False)
    # Exact dependence leaves some 3 roundings.
    return jnp.sum((values > 16 * jnp.finfo(x.dtype).eps * values[0]) & (values <= rank_cut(x) * values[0]))


def unit(array: Array) -> Array:
    """An array divided by its Frobenius norm; NaN for zeros."""
    return array / jnp.sqrt(jnp.sum(array**2))


def apart_from_rounding(array: Array, whole: Array) -> Array:
    """An array that was left of another by subtraction; NaN where all that was left is rounding."""
    sizes = [lax.stop_gradient(jnp.max(jnp.abs(part))) for part in (array, whole)]
    return jnp.where(sizes[0] <= 100 * jnp.finfo(array.dtype).eps * sizes[1], jnp.nan, array)


def narrowed(x: Array) -> Array:
    """Features in the axes of their samples, for what no rotation of them changes: [n, p] to [n, min(n, p)].

    The axes count as constants: to first order, a change of x that leaves them moves no inner product of samples that
    the axes hold.
    """
    if x.shape[1] <= x.shape[0]:
        return x
    columns, undefined = finite_part(jax.lax.stop_gradient(x.T))
    return product(x, jnp.linalg.qr(columns)[0]) + undefined


def aligned(a: Array, b: Array) -> tuple[Array, Array]:
    """The wider of two matrices, and the narrower one, turned to be nearest to it by what counts as a constant."""
    if b.shape[1] > a.shape[1]:
        a, b = b, a
    turned, undefined = finite_part(jax.lax.stop_gradient(product(b.T, a)))
    left, _, right = jnp.linalg.svd(turned, full_matrices=False)
    return a, product(b, product(left, right)) + undefined
