"""Shapes: metrics of what is left of a configuration of samples after the best rotation.

With M = Xc^T Yc, min over orthogonal Q of |Xc - Yc Q^T|^2 = |Xc|^2 + |Yc|^2 - 2 nuc(M), the narrower one padded by
zeros. The right-hand side loses half the digits of a small distance, so distances are computed from the left one, at a
rotation that counts as a constant: first derivatives are those of the measures, second ones are not.
"""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from dissociation._core.checks import check_single, fail, is_traced
from dissociation._core.distances import root
from dissociation._core.linalg import nuclear_norm, product, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity._base import (
    Features,
    OtherFeatures,
    Route,
    Routes,
    Score,
    aligned,
    centred,
    column_sizes,
    evaluate,
    narrowed,
    refuse_wide,
    unit,
    warn_dropped,
)


def residual(a: Array, b: Array) -> Array:
    """Return the least |a - b Q|^2 over rotations Q, the narrower matrix padded by zeros."""
    wide, turned = aligned(a, b)
    return jnp.sum((wide - turned) ** 2)


def _angle(a: Array, b: Array) -> Array:
    """Return the angle theta between unit configurations: |a - b Q| = 2 sin(theta / 2)."""
    return 2 * jnp.arcsin(jnp.minimum(0.5 * root(residual(a, b)), 0.5**0.5))


def _distance(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    (x, size_x), (y, size_y) = a, b
    size = jnp.maximum(size_x, size_y)
    return size * root(residual(x * (size_x / size), y * (size_y / size)))


def _centred(x: Array) -> tuple[Array, Array]:
    x, size = centred(x)
    return narrowed(x), size


def _unit_centred(x: Array) -> Array:
    return unit(_centred(x)[0])


def _whitened(x: Array, a: Array) -> Array:
    x, _ = centred(x)
    parameter = jnp.stack([a, (1 - a) * x.shape[1] ** -0.5]).astype(x.dtype)
    x = x / jnp.where(a > 0, 1.0, column_sizes(x))
    return unit(narrowed(singular_map(_partly, unit(x), parameter)))


def _partly(values: Array, parameter: Array) -> Array:
    return parameter[0] * values + parameter[1]


PROCRUSTES = (Route(_centred, _distance, by_rows=True),)

ANGULAR_SIMILARITY = (Route(_unit_centred, lambda a, b: jnp.minimum(nuclear_norm(product(a.T, b)), 1.0), by_rows=True),)

ANGULAR_DISTANCE = (Route(_unit_centred, _angle, by_rows=True),)


def partial_whitening_routes(*, a: Scalar = 0.5) -> Routes:
    """Return one route."""
    check_single("a", a)
    if not is_traced(a) and not 0 <= float(a) <= 1:
        fail("a", "lie from 0 (whitened) to 1 (as it is)", a)
    return (Route(eqx.Partial(_whitened, a=jnp.asarray(a, float)), _angle, by_rows=True),)


@validated(finite=("x", "y"))
def procrustes_distance(x: Features, y: OtherFeatures) -> Score:
    """The size-and-shape distance sqrt(|Xc|^2 + |Yc|^2 - 2 nuc(Xc^T Yc)), the least |Xc - Yc Q| over rotations Q.

    Representations of unequal widths are padded by zeros.

    Args:
        x: [n, p].
        y: [n, q], of the same samples.

    Returns:
        Non-negative, in units of the features times sqrt(n p).

    Raises:
        ValueError: If the numbers of samples differ, or there is one alone.

    References:
        Williams, Kunz, Kornblith and Linderman (2021), Generalized shape metrics on neural representations, eq. 3.
        Ding, Denain and Steinhardt (2021), Grounding representation similarity with statistical testing.
    """
    return evaluate(PROCRUSTES, x, y)


@validated(finite=("x", "y"))
def angular_similarity(x: Features, y: OtherFeatures) -> Score:
    """The cosine between shapes, nuc(Xc^T Yc) / (|Xc| |Yc|), also called normalised Bures similarity (NBS).

    Args:
        x: [n, p].
        y: [n, q], of the same samples.

    Returns:
        From 0 to 1.

    Raises:
        ValueError: If the numbers of samples differ, or known samples are all the same.

    References:
        Williams et al. (2021), eq. 4; Tang, Maddox, Dickens, Diethe and Damianou (2020), Similarity of neural networks
        with gradients; Harvey, Larsen and Williams (2024), Duality of Bures and shape distances.
    """
    return evaluate(ANGULAR_SIMILARITY, x, y)


@validated(finite=("x", "y"))
def angular_distance(x: Features, y: OtherFeatures) -> Score:
    """The angle between shapes, arccos(nuc(Xc^T Yc) / (|Xc| |Yc|)): a metric, precise for small angles as well.

    Args:
        x: [n, p].
        y: [n, q], of the same samples.

    Returns:
        From 0 to pi / 2, in radians.

    Raises:
        ValueError: If the numbers of samples differ, or known samples are all the same.

    References:
        Williams et al. (2021), eq. 4.
    """
    return evaluate(ANGULAR_DISTANCE, x, y)


@validated(finite=("x", "y"))
def partial_whitening_distance(x: Features, y: OtherFeatures, *, a: Scalar = 0.5) -> Score:
    """The angle between shapes that are partly whitened, Z = Xc (a I + (1 - a) |Xc| / sqrt(p) (Xc^T Xc)^(-1/2)).

    At a = 1 it is `angular_distance`; at a = 0 any invertible linear map leaves it as it is, and directions without
    variance stay out.

    Args:
        x: [n, p].
        y: [n, q], of the same samples.
        a: From 0 to 1.

    Returns:
        From 0 to pi / 2, in radians.

    Raises:
        ValueError: If the numbers of samples differ, known samples are all the same, `a` is out of range, or `a` is 0
            and there are not more samples than features, so that all whitened representations are equal.

    References:
        Williams et al. (2021), section 2.3.
    """
    if not is_traced(a) and float(a) == 0:
        refuse_wide(x, y)
    if not is_traced(a) and float(a) < 1:
        warn_dropped(level=float(a) == 0, x=x, y=y)
    return evaluate(partial_whitening_routes(a=a), x, y)
