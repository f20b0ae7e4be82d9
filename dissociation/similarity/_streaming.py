"""Similarities from joint moments that add over batches of samples."""

from collections.abc import Callable, Iterable
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
"""A measure of all pairs and its mean over all orders of one representation's samples, if it is known, [R, R]."""


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
        return self.sums[1 : 1 + len(self.mean), 1 : 1 + len(self.mean)]

    @property
    def quartics(self) -> Array:
        """Return sum |x_r|^2 |x_s|^2, [R, R]."""
        return self.sums[1 + len(self.mean) :, 1 + len(self.mean) :]

    def squares(self) -> Array:
        """Return sums |x_r|^2, [R]."""
        return _per_representation(jnp.diagonal(self.products), self.widths)


def _per_representation(values: Array, widths: tuple[int, ...]) -> Array:
    """Return sums over each representation's features on the first axis."""
    return jax.ops.segment_sum(values, np.repeat(np.arange(len(widths)), widths), len(widths))


def stream_moments(batches: Iterable[Any]) -> JointMoments:
    """Return the moments of samples in batches, whose memory is the square of the number of all features.

    Args:
        batches: Sequences of one array [n, p] per representation. Each new n is compiled for.

    Returns:
        The moments of all samples, computed about the means of the first batch, so that large means
        cost no digits.

    Raises:
        ValueError: If there is no batch, or batches differ in their representations.
    """
    total: Any = None
    points: list[np.ndarray] = []
    for number, batch in enumerate(batches):
        if not isinstance(batch, (list, tuple)):
            fail("batches", "give a tuple of arrays each, one per representation", describe(batch))
        named = [(f"batches[{number}][{place}]", part) for place, part in enumerate(batch)]
        arrays = [as_array(name, part, "real numbers [n, p]") for name, part in named]
        for (name, _), array in zip(named, arrays, strict=True):
            check_finite(name, as_numbers(name, array, frozenset({"float"})))
        # Moments about a point near the means lose no digits to a large offset.
        points = points or [
            np.mean(np.asarray(part, np.float64), 0, keepdims=True) for part in arrays
        ]
        shapes = [part.shape for part in arrays]
        if not shapes or shapes != [(shapes[0][0], point.size) for point in points]:
            wanted = "hold arrays [n, p], [n, q], ... of one n, and of the same widths throughout"
            fail("batches", wanted, shapes)
        arrays = [
            real_numbers("batches", part - at, "numbers")
            for part, at in zip(arrays, points, strict=True)
        ]
        own = _moments(tuple(in_common_dtype(*arrays)))
        total = own if total is None else _merged(total, own)
    if total is None:
        fail("batches", "give at least one batch", "none")
    # Shifted on the host, which compiles nothing.
    shift = np.concatenate(points, 1)[0].astype(total.mean.dtype)
    return eqx.tree_at(lambda m: m.mean, total, to_device(np.asarray(total.mean) + shift))


@eqx.filter_jit
def _moments(arrays: tuple[Array, ...]) -> JointMoments:
    widths = tuple(array.shape[1] for array in arrays)
    joined = jnp.concatenate(arrays, 1)
    x = centre(joined)
    # Squared lengths are squared again, so float32 holds lengths up to 1e8.
    z = jnp.concatenate([jnp.ones_like(x[:, :1]), x, _per_representation((x**2).T, widths).T], 1)
    return JointMoments(joined[0] - x[0], product(z.T, z), widths)


@jax.jit
def _merged(a: JointMoments, b: JointMoments) -> JointMoments:
    """Return the exact moments of two batches together, moved to the common mean."""
    count, apart = a.count + b.count, b.mean - a.mean
    by = apart * (b.count / count)
    sums = _moved(a.sums, -by, a.widths) + _moved(b.sums, apart * (a.count / count), a.widths)
    return JointMoments(a.mean + by, sums, a.widths)


def _moved(sums: Array, by: Array, widths: tuple[int, ...]) -> Array:
    """Return the sums of x + `by`, in which z is linear."""
    for _ in range(2):  # rows, then columns
        one, x, lengths = jnp.split(sums, [1, 1 + len(by)])
        along = 2 * by[:, None] * x + (by**2)[:, None] * one
        sums = jnp.concatenate(
            [one, x + by[:, None] * one, lengths + _per_representation(along, widths)]
        ).T
    return sums


def _divided(m: JointMoments, features: Array, lengths: Array) -> JointMoments:
    """Return the sums of features x divided by `features`, [P], and of |x_r|^2 divided by `lengths`, [R]."""
    sizes = jnp.concatenate([jnp.ones_like(lengths[:1]), features, lengths])
    return eqx.tree_at(lambda m: m.sums, m, m.sums / sizes[:, None] / sizes[None])


def _scaled(m: JointMoments) -> JointMoments:
    """Return the sums of representations whose squared lengths sum to 1."""
    squares = m.squares()
    return _divided(m, jnp.sqrt(squares)[np.repeat(np.arange(len(m.widths)), m.widths)], squares)


def _block_squares(m: JointMoments) -> Array:
    """Return the sums of squares of all blocks of `products`, [R, R]."""
    return _per_representation(_per_representation(m.products**2, m.widths).T, m.widths)


def _linear_cka(m: JointMoments) -> Tables:
    inner = _block_squares(_scaled(m))
    own = jnp.sqrt(jnp.diagonal(inner))
    return inner / own[:, None] / own[None], 1 / own[:, None] / own[None] / (m.count - 1)


def _debiased_cka(m: JointMoments) -> Tables:
    n, m = m.count, _scaled(m)
    inner = _block_squares(m)
    hsic = inner - n / (n - 2) * m.quartics + 1 / ((n - 1) * (n - 2))
    own = jnp.sqrt(jax.vmap(apart_from_rounding)(jnp.diagonal(hsic), jnp.diagonal(inner)))
    return jnp.clip(hsic / own[:, None] / own[None], -1.0, 1.0), jnp.zeros_like(hsic)


# These depend on samples through sums of x_i y_j, x_i |y|^2 and |x|^2 |y|^2 about the means only.
STREAMED: dict[str, Callable[[JointMoments], Tables]] = {
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
        check_size(
            MEASURES[measure].with_options(), "moments", int(diagonal[0]), max(moments.widths)
        )
        starts = np.cumsum((0, *moments.widths[:-1]))
        _check_scale(np.add.reduceat(diagonal[1 : 1 + len(moments.mean)], starts) / diagonal[0])
    found = _from_moments(moments, measure)[0]
    if not is_traced(found) and np.isnan(np.diagonal(found)).any():
        places = ", ".join(str(place) for place in np.flatnonzero(np.isnan(np.diagonal(found))))
        warn(
            f"{measure} is not defined for representation {places}, counted from 0: its values "
            "are NaN."
        )
    return found


def _check_scale(squares: np.ndarray) -> None:
    """Raise if squares of a representation's mean square overflow or underflow."""
    limits = np.finfo(squares.dtype)
    low, high = (
        float(limits.tiny / limits.eps) ** 0.5,
        float(limits.max) ** 0.5 * float(limits.eps) ** 0.5,
    )
    for square in squares.astype(np.float64):
        if not (square == 0 or low < square < high):
            wanted = (
                f"have representations of mean squares from {low:.0e} to {high:.0e}, whose "
                "squares it holds"
            )
            fail("moments", wanted, f"{square:.2g}", "Scale the features")


@eqx.filter_jit
def _from_moments(moments: JointMoments, measure: str) -> Tables:
    return STREAMED[measure](moments)


@validated
def baseline_from_moments(
    moments: JointMoments, measure: str = "debiased_cka"
) -> Float[Array, "r r"]:
    """Return the exact mean of a measure of each pair over all orders of one representation's samples, [R, R].

    These are the values by chance, for independent representations.

    Args:
        moments: Moments from `stream_moments`.
        measure: "linear_cka" or "debiased_cka".

    Raises:
        ValueError: If `measure` is another one.
    """
    check_choice("measure", measure, STREAMED)
    return _from_moments(moments, measure)[1]
