"""Shape metrics, distances of configurations of samples after the best rotation."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from dissociation._core.checks import check_single, fail, is_traced
from dissociation._core.distances import root
from dissociation._core.linalg import nuclear_norm, product, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Score


def residual(a: Array, b: Array) -> Array:
    """Return the least |a - b Q|^2 over rotations Q, with the narrower matrix padded by zeros."""
    # |a|^2 + |b|^2 - 2 nuc(a^T b) would lose half of the digits of a small distance. The rotation counts as a
    # constant, so first derivatives are exact and second ones are not.
    wide, turned = base.aligned(a, b)
    return jnp.sum((wide - turned) ** 2)


def _angle(a: Array, b: Array) -> Array:
    """Return the angle theta between unit configurations, |a - b Q| = 2 sin(theta / 2)."""
    return 2 * jnp.arcsin(jnp.minimum(0.5 * root(residual(a, b)), 0.5**0.5))


def _distance(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    (x, size_x), (y, size_y) = a, b
    # Relative sizes keep squares within the dtype.
    size = jnp.maximum(size_x, size_y)
    return size * root(residual(x * (size_x / size), y * (size_y / size)))


def _centred(x: Array) -> tuple[Array, Array]:
    x, size = base.centred(x)
    return base.narrowed(x), size


def _unit_centred(x: Array) -> Array:
    return base.unit(_centred(x)[0])


def _whitened(x: Array, a: Array) -> Array:
    x, _ = base.centred(x)
    parameter = jnp.stack([a, (1 - a) * x.shape[1] ** -0.5]).astype(x.dtype)
    # At a = 0 a scale per neuron has no effect, and the rank is cut on columns of one size.
    x = x / jnp.where(a > 0, 1.0, base.column_sizes(x))
    return base.unit(base.narrowed(singular_map(_partly, base.unit(x), parameter)))


def _partly(values: Array, parameter: Array) -> Array:
    return parameter[0] * values + parameter[1]


PROCRUSTES = Form(_centred, _distance)

ANGULAR_SIMILARITY = Form(_unit_centred, lambda a, b: jnp.minimum(nuclear_norm(product(a.T, b)), 1.0))

ANGULAR_DISTANCE = Form(_unit_centred, _angle)


def partial_whitening_form(*, a: Scalar = 0.5) -> Form:
    check_single("a", a)
    if not is_traced(a) and not 0 <= float(a) <= 1:
        fail("a", "lie from 0 (whitened) to 1 (as it is)", a)
    return Form(eqx.Partial(_whitened, a=jnp.asarray(a, float)), _angle, narrow=not is_traced(a) and float(a) == 0)


@validated(finite=("x", "y"))
def procrustes_distance(x: Features, y: OtherFeatures) -> Score:
    """Return the size-and-shape distance sqrt(|Xc|^2 + |Yc|^2 - 2 nuc(Xc^T Yc)).

    It is the least |Xc - Yc Q| over rotations Q, with the narrower representation padded by zeros.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Non-negative distance in units of the features times sqrt(n p).

    Raises:
        ValueError: If the numbers of samples differ, or there is only one.

    References:
        Williams, Kunz, Kornblith and Linderman (2021), Generalized shape metrics on neural representations, eq. 3.
        Ding, Denain and Steinhardt (2021), Grounding representation similarity with statistical testing.
    """
    return base.evaluate(PROCRUSTES, x, y)


@validated(finite=("x", "y"))
def angular_similarity(x: Features, y: OtherFeatures) -> Score:
    """Return the cosine between shapes (normalised Bures similarity), nuc(Xc^T Yc) / (|Xc| |Yc|).

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Similarity from 0 to 1.

    Raises:
        ValueError: As `linear_cka`.

    References:
        Williams et al. (2021), eq. 4; Tang, Maddox, Dickens, Diethe and Damianou (2020), Similarity of neural networks
        with gradients; Harvey, Larsen and Williams (2024), Duality of Bures and shape distances.
    """
    return base.evaluate(ANGULAR_SIMILARITY, x, y)


@validated(finite=("x", "y"))
def angular_distance(x: Features, y: OtherFeatures) -> Score:
    """Return the angle between shapes, arccos(nuc(Xc^T Yc) / (|Xc| |Yc|)), a metric that is precise for small angles.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Angle from 0 to pi / 2, in radians.

    Raises:
        ValueError: As `linear_cka`.

    References:
        Williams et al. (2021), eq. 4.
    """
    return base.evaluate(ANGULAR_DISTANCE, x, y)


@validated(finite=("x", "y"))
def partial_whitening_distance(x: Features, y: OtherFeatures, *, a: Scalar = 0.5) -> Score:
    """Return the angle between partly whitened shapes Z = Xc (a I + (1 - a) |Xc| / sqrt(p) (Xc^T Xc)^(-1/2)).

    At a = 1 it is `angular_distance`. At a = 0 it is invariant under invertible linear maps, without directions that
    have no variance.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        a: Number from 0 (whitened) to 1.

    Returns:
        Angle from 0 to pi / 2, in radians.

    Raises:
        ValueError: As `linear_cka`, or if `a` is out of range, or 0 without more samples than features.

    References:
        Williams et al. (2021), section 2.3.
    """
    if not is_traced(a) and 0 < float(a) < 1:
        base.warn_dropped(level=False, x=x, y=y)
    return base.evaluate(partial_whitening_form(a=a), x, y)
