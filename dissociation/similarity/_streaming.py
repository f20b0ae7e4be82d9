"""Similarities from joint moments that add over batches of samples."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice, check_finite, fail, is_traced, warn
from dissociation._core.conversion import (
    as_array,
    as_numbers,
    describe,
    to_device,
    warn_narrowed,
)
from dissociation._core.linalg import product
from dissociation._core.results import Result
from dissociation._core.validation import validated
from dissociation.similarity._base import apart_from_rounding, check_size
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
    """Return the arrays of a batch, or raise unless they hold real numbers."""
    if not isinstance(batch, (list, tuple)):
        fail("batches", "give a tuple of arrays each, one per representation", describe(batch))
    arrays = []
    for index, features in enumerate(batch):
        name = f"batches[{number}][{index}]"
        arrays.append(as_array(name, features, "real numbers [n, p]"))
        as_numbers(name, arrays[-1], frozenset({"float"}))
    return arrays


def point_of(array: Any) -> np.ndarray:
    """Return a point near all samples: their mean, in a dtype that holds differences from it."""
    mean = np.mean(np.asarray(array, np.float64), 0)
    return mean.astype(np.result_type(np.asarray(array[:0]).dtype, np.float32))


def stream_moments(batches: Iterable[Any]) -> JointMoments:
    """Return the moments of samples in batches.

    Memory is the square of the number of all features. Products are those of NumPy, or of JAX for
    arrays on an accelerator. They are added in float64.

    Args:
        batches: Sequences of one array [n, p] per representation. On an accelerator, each new n is
            compiled for.

    Returns:
        The moments of all samples, computed about the means of the first batch, so that large means
        cost no digits.

    Raises:
        ValueError: If there is no batch, or batches differ in their representations.
    """
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    points = []
    total: Any = 0.0
    for number, batch in enumerate(batches):
        arrays = _read_batch(number, batch)
        if not points:
            points = [point_of(array) for array in arrays]
        shapes = [array.shape for array in arrays]
        if not shapes or shapes != [(shapes[0][0], point.size) for point in points]:
            requirement = (
                "hold arrays [n, p], [n, q], ... of one n, and of the same widths throughout"
            )
            fail("batches", requirement, shapes)

        for array, point in zip(arrays, points, strict=True):
            if point.dtype.itemsize > dtype.itemsize:
                warn_narrowed("batches", array - point)
        is_on_host = all(map(_is_on_host, arrays))
        sums_of = _sums_on_host if is_on_host else _sums_on_device
        sums = np.asarray(sums_of(arrays, points, dtype))
        if not np.isfinite(sums).all():
            for index, array in enumerate(arrays):
                check_finite(f"batches[{number}][{index}]", array)
        total = total + sums.astype(np.float64)

    if not points:
        fail("batches", "give at least one batch", "none")
    widths = tuple(point.size for point in points)
    offset = total[0, 1 : 1 + sum(widths)] / total[0, 0]
    mean = np.concatenate(points) + offset
    with np.errstate(invalid="ignore"):
        sums = _moved(total, -offset, widths)
    return JointMoments(to_device(mean, dtype), to_device(sums, dtype), widths)


def _is_on_host(array: Any) -> bool:
    """Return True if NumPy reads an array without a copy from an accelerator."""
    return isinstance(array, np.ndarray) or {d.platform for d in array.devices()} == {"cpu"}


def augmented(arrays: Any, points: Any, dtype: np.dtype, xp: Any) -> Any:
    """Return z of x - `points` for each sample, as in `JointMoments.sums`, [n, z]."""
    blocks = [(x - point[None]).astype(dtype) for x, point in zip(arrays, points, strict=True)]
    lengths = [xp.sum(block**2, 1, keepdims=True) for block in blocks]
    return xp.concatenate([xp.ones_like(lengths[0]), *blocks, *lengths], 1)


def _sums_on_host(arrays: list[Any], points: list[np.ndarray], dtype: np.dtype) -> np.ndarray:
    """Return sum z z^T of x - `points`, as `JointMoments.sums`."""
    with np.errstate(over="ignore", invalid="ignore"):
        z = augmented(map(np.asarray, arrays), points, dtype, np)
        return z.T @ z  # NumPy computes one half of a product with the transpose


@partial(jax.jit, static_argnums=2)
def _sums_on_device(arrays: list[Array], points: list[Array], dtype: np.dtype) -> Array:
    """Return what `_sums_on_host` returns."""
    z = augmented(arrays, points, dtype, jnp)
    return product(z.T, z)


def _moved(sums: np.ndarray, shift: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Return the sums of x + `shift`, in which z is linear."""
    starts = np.cumsum((0, *widths[:-1]))
    for _ in range(2):  # rows, then columns
        ones, x, lengths = np.split(sums, [1, 1 + len(shift)])
        changes = 2 * shift[:, None] * x + (shift**2)[:, None] * ones
        x = x + shift[:, None] * ones
        lengths = lengths + np.add.reduceat(changes, starts)
        sums = np.concatenate([ones, x, lengths]).T
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
