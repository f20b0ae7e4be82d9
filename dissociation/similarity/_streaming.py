"""Similarities from joint moments that add over batches of samples."""

from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_finite, fail, is_traced, warn
from dissociation._core.conversion import as_array, as_numbers, describe, to_device
from dissociation._core.linalg import centre, product
from dissociation._core.results import Result
from dissociation._core.validation import validated
from dissociation.similarity._base import (
    apart_from_rounding,
    check_size,
    in_common_dtype,
    real_numbers,
)
from dissociation.similarity._measures import MEASURES

Tables = tuple[Array, Any]
"""Measure of all pairs, and its mean over all orders of one representation's samples, [R, R]."""


class JointMoments(Result):
    """Sums over samples of several representations with joined features, about their mean.

    Attributes:
        mean: Mean of all features, [P].
        sums: sum z z^T of z = (1, x, |x_1|^2, ..., |x_R|^2), for all features x and each
            representation's x_r, [1 + P + R, 1 + P + R].
        widths: Number of features of each representation.
    """

    mean: Float[Array, " p"]
    sums: Float[Array, "z z"]
    widths: tuple[int, ...] = eqx.field(static=True)

    @property
    def count(self) -> Array:
        """Return the number of samples n."""
        return self.sums[0, 0]

    @property
    def products(self) -> Array:
        """Return sum x x^T, [P, P]."""
        features = slice(1, 1 + len(self.mean))
        return self.sums[features, features]

    @property
    def quartics(self) -> Array:
        """Return sum |x_r|^2 |x_s|^2, [R, R]."""
        lengths = slice(1 + len(self.mean), None)
        return self.sums[lengths, lengths]

    def squares(self) -> Array:
        """Return sums |x_r|^2, [R]."""
        return _per_representation(jnp.diagonal(self.products), self.widths)


def _representation_of_feature(widths: tuple[int, ...]) -> np.ndarray:
    """Return the index of each feature's representation, [P]."""
    return np.repeat(np.arange(len(widths)), widths)


def _per_representation(values: Array, widths: tuple[int, ...]) -> Array:
    """Return sums over each representation's features on the first axis."""
    indices = _representation_of_feature(widths)
    return jax.ops.segment_sum(values, indices, len(widths))


def _read_batch(number: int, batch: Any) -> list[Any]:
    """Return the arrays of a batch, or raise unless they are finite real numbers."""
    if not isinstance(batch, (list, tuple)):
        fail("batches", "give a tuple of arrays each, one per representation", describe(batch))
    arrays = []
    for index, features in enumerate(batch):
        name = f"batches[{number}][{index}]"
        array = as_array(name, features, "real numbers [n, p]")
        check_finite(name, as_numbers(name, array, frozenset({"float"})))
        arrays.append(array)
    return arrays


def stream_moments(batches: Iterable[Any]) -> JointMoments:
    """Return the moments of samples in batches.

    Memory is the square of the number of all features.

    Args:
        batches: Sequences of one array [n, p] per representation. Each new n is compiled for.

    Returns:
        The moments of all samples, computed about the means of the first batch, so that large means
        cost no digits.

    Raises:
        ValueError: If there is no batch, or batches differ in their representations.
    """
    total: Any = None
    points = []
    for number, batch in enumerate(batches):
        arrays = _read_batch(number, batch)
        # Moments about a point near the means lose no digits to a large offset.
        if not points:
            points = [np.mean(np.asarray(array, np.float64), 0, keepdims=True) for array in arrays]
        shapes = [array.shape for array in arrays]
        if not shapes or shapes != [(shapes[0][0], point.size) for point in points]:
            requirement = (
                "hold arrays [n, p], [n, q], ... of one n, and of the same widths throughout"
            )
            fail("batches", requirement, shapes)

        shifted = []
        for array, point in zip(arrays, points, strict=True):
            shifted.append(real_numbers("batches", array - point, "numbers"))
        moments = _moments(tuple(in_common_dtype(*shifted)))
        total = moments if total is None else _merged(total, moments)

    if total is None:
        fail("batches", "give at least one batch", "none")
    # Shifted on the host, which compiles nothing.
    shift = np.concatenate(points, 1)[0].astype(total.mean.dtype)
    mean = np.asarray(total.mean) + shift
    return eqx.tree_at(lambda m: m.mean, total, to_device(mean))


@eqx.filter_jit
def _moments(arrays: tuple[Array, ...]) -> JointMoments:
    """Return the moments of one batch."""
    widths = tuple(array.shape[1] for array in arrays)
    joined = jnp.concatenate(arrays, 1)
    x = centre(joined)
    # Squared lengths are squared again, so float32 holds lengths up to 1e8.
    lengths = _per_representation((x**2).T, widths)
    ones = jnp.ones_like(x[:, :1])
    z = jnp.concatenate([ones, x, lengths.T], 1)
    mean = joined[0] - x[0]
    return JointMoments(mean, product(z.T, z), widths)


@jax.jit
def _merged(a: JointMoments, b: JointMoments) -> JointMoments:
    """Return the exact moments of two batches together, moved to the common mean."""
    count = a.count + b.count
    difference = b.mean - a.mean
    shift = difference * (b.count / count)
    sums_a = _moved(a.sums, -shift, a.widths)
    sums_b = _moved(b.sums, difference * (a.count / count), a.widths)
    return JointMoments(a.mean + shift, sums_a + sums_b, a.widths)


def _moved(sums: Array, shift: Array, widths: tuple[int, ...]) -> Array:
    """Return the sums of x + `shift`, in which z is linear."""
    for _ in range(2):  # rows, then columns
        ones, x, lengths = jnp.split(sums, [1, 1 + len(shift)])
        changes = 2 * shift[:, None] * x + (shift**2)[:, None] * ones
        x = x + shift[:, None] * ones
        lengths = lengths + _per_representation(changes, widths)
        sums = jnp.concatenate([ones, x, lengths]).T
    return sums


def _scaled(m: JointMoments) -> JointMoments:
    """Return the sums of representations whose squared lengths sum to 1."""
    squares = m.squares()
    features = jnp.sqrt(squares)[_representation_of_feature(m.widths)]
    sizes = jnp.concatenate([jnp.ones_like(squares[:1]), features, squares])
    sums = m.sums / sizes[:, None] / sizes[None]
    return eqx.tree_at(lambda m: m.sums, m, sums)


def _block_squares(m: JointMoments) -> Array:
    """Return the sums of squares of all blocks of `products`, [R, R]."""
    rows = _per_representation(m.products**2, m.widths)
    return _per_representation(rows.T, m.widths)


def _linear_cka(m: JointMoments) -> Tables:
    inner = _block_squares(_scaled(m))
    norms = jnp.sqrt(jnp.diagonal(inner))
    chance = 1 / norms[:, None] / norms[None] / (m.count - 1)
    return inner / norms[:, None] / norms[None], chance


def _debiased_cka(m: JointMoments) -> Tables:
    n = m.count
    m = _scaled(m)
    inner = _block_squares(m)
    hsic = inner - n / (n - 2) * m.quartics + 1 / ((n - 1) * (n - 2))
    squares = jax.vmap(apart_from_rounding)(jnp.diagonal(hsic), jnp.diagonal(inner))
    norms = jnp.sqrt(squares)
    ratio = hsic / norms[:, None] / norms[None]
    return jnp.clip(ratio, -1.0, 1.0), jnp.zeros_like(hsic)


# These depend on samples through sums of x_i y_j, x_i |y|^2 and |x|^2 |y|^2 about the means only.
STREAMED = {
    "linear_cka": _linear_cka,
    "debiased_cka": _debiased_cka,
}
"""Measures that follow from joint moments."""


@validated
def similarity_from_moments(
    moments: JointMoments, measure: str = "debiased_cka"
) -> Float[Array, "r r"]:
    """Return a measure of all pairs of representations, from their joint moments.

    Values equal those of the samples up to rounding. In float32, debiased CKA loses digits to a
    sample hundreds of times longer than others.

    Args:
        moments: Moments from `stream_moments`.
        measure: "linear_cka" or "debiased_cka".

    Returns:
        Table, [R, R]. `baseline_from_moments` returns chance.

    Raises:
        ValueError: If `measure` is another one, or there are too few samples.
    """
    check_choice("measure", measure, STREAMED)
    if not is_traced(moments.sums):
        diagonal = np.diagonal(np.asarray(moments.sums))
        form = MEASURES[measure].with_options()
        check_size(form, "moments", int(diagonal[0]), max(moments.widths))
        starts = np.cumsum((0, *moments.widths[:-1]))
        squares = np.add.reduceat(diagonal[1 : 1 + len(moments.mean)], starts)
        _check_scale(squares / diagonal[0])

    table, _ = _from_moments(moments, measure)
    if not is_traced(table):
        is_undefined = np.isnan(np.diagonal(table))
        if is_undefined.any():
            indices = ", ".join(map(str, np.flatnonzero(is_undefined)))
            warn(
                f"{measure} is not defined for representation {indices}, counted from 0: its "
                "values are NaN."
            )
    return table


def _check_scale(squares: np.ndarray) -> None:
    """Raise if squares of a representation's mean square overflow or underflow."""
    limits = np.finfo(squares.dtype)
    low = float(limits.tiny / limits.eps) ** 0.5
    high = float(limits.max) ** 0.5 * float(limits.eps) ** 0.5
    for square in squares.astype(np.float64):
        if square != 0 and not low < square < high:
            requirement = (
                f"have representations of mean squares from {low:.0e} to {high:.0e}, whose "
                "squares it holds"
            )
            fail("moments", requirement, f"{square:.2g}", "Scale the features")


@eqx.filter_jit
def _from_moments(moments: JointMoments, measure: str) -> Tables:
    return STREAMED[measure](moments)


@validated
def baseline_from_moments(
    moments: JointMoments, measure: str = "debiased_cka"
) -> Float[Array, "r r"]:
    """Return the exact mean of a measure over all orders of one representation's samples, [R, R].

    These are the values by chance of each pair, for independent representations.

    Args:
        moments: Moments from `stream_moments`.
        measure: "linear_cka" or "debiased_cka".

    Raises:
        ValueError: If `measure` is another one.
    """
    check_choice("measure", measure, STREAMED)
    _, chance = _from_moments(moments, measure)
    return chance
