"""Distances of configurations of samples after the best rotation, and canonical correlations."""

import equinox as eqx
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_non_negative, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.distances import root
from dissociation._core.linalg import finite_part, nuclear_norm, product, rank_cut, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Score

Sized = tuple[Array, Array]
"""Centred features divided by a power of two, and this power."""

Basis = tuple[Array, Array]
"""Orthonormal basis of the samples' span, and its dimension (NaN for 0)."""

Weighted = tuple[Array, Array, Array]
"""A basis as in `Basis`, the coordinates of neurons in it, and its dimension."""


def residual(a: Array, b: Array) -> Array:
    """Return the least |a - b Q|^2 over rotations Q, with the narrower matrix padded by zeros."""
    # |a|^2 + |b|^2 - 2 nuc(a^T b) would lose half of the digits of a small distance. The rotation
    # counts as a constant, so first derivatives are exact and second ones are not.
    wide, turned = base.aligned(a, b)
    return jnp.sum((wide - turned) ** 2)


def _angle(a: Array, b: Array) -> Array:
    """Return the angle theta between unit configurations, |a - b Q| = 2 sin(theta / 2)."""
    distance = root(residual(a, b))
    return 2 * jnp.arcsin(jnp.minimum(0.5 * distance, 0.5**0.5))


def _distance(a: Sized, b: Sized) -> Array:
    """Return the Procrustes distance."""
    x, size_x = a
    y, size_y = b
    # Relative sizes keep squares within the dtype.
    size = jnp.maximum(size_x, size_y)
    x = x * (size_x / size)
    y = y * (size_y / size)
    return size * root(residual(x, y))


def _centred(x: Array) -> Sized:
    x, size = base.centred(x)
    return base.narrowed(x), size


def _unit_centred(x: Array) -> Array:
    x, _ = _centred(x)
    return base.unit(x)


def _whitened(x: Array, a: Array) -> Array:
    """Return partly whitened features, of norm 1."""
    x, _ = base.centred(x)
    offset = (1 - a) * x.shape[1] ** -0.5
    parameter = jnp.stack([a, offset]).astype(x.dtype)
    # At a = 0 a scale per neuron has no effect, and the rank is cut on columns of one size.
    x = x / jnp.where(a > 0, 1.0, base.column_sizes(x))
    whitened = singular_map(_partly, base.unit(x), parameter, rank_cut(x))
    return base.unit(base.narrowed(whitened))


def _partly(values: Array, parameter: Array) -> Array:
    return parameter[0] * values + parameter[1]


PROCRUSTES = Form(_centred, _distance)


def _cosine(a: Array, b: Array) -> Array:
    crossed = product(a.T, b)
    return jnp.minimum(nuclear_norm(crossed), 1.0)


ANGULAR_SIMILARITY = Form(_unit_centred, _cosine)

ANGULAR_DISTANCE = Form(_unit_centred, _angle)


@validated
def partial_whitening_form(*, a: Scalar = 0.5) -> Form:
    cut = ""
    if not is_traced(a):
        number = float(a)
        if not 0 <= number <= 1:
            fail("a", "lie from 0 (whitened) to 1 (as it is)", a)
        if number == 0:
            cut = "scaled"
        elif number < 1:
            cut = "plain"
    prepare = eqx.Partial(_whitened, a=to_device(a, float))
    return Form(prepare, _angle, narrow=cut == "scaled", cut=cut)


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
        Williams, Kunz, Kornblith and Linderman (2021), Generalized shape metrics on neural
        representations, eq. 3. Ding, Denain and Steinhardt (2021), Grounding representation
        similarity with statistical testing.
    """
    return base.evaluate(PROCRUSTES, x, y)


@validated(finite=("x", "y"))
def angular_similarity(x: Features, y: OtherFeatures) -> Score:
    """Return the cosine between shapes (normalised Bures similarity), nuc(Xc^T Yc) / (|Xc| |Yc|).

    In 200 draws of features with four common causes (`benchmarks/coverage.py`), nominal 90 %
    intervals of `compare` held the truth in 80 % for 200 samples of 10 features, and in 78 % for
    1000 samples of 20, with a warning in all of the latter.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Similarity from 0 to 1.

    References:
        Williams et al. (2021), eq. 4; Tang, Maddox, Dickens, Diethe and Damianou (2020), Similarity
        of neural networks with gradients; Harvey, Larsen and Williams (2024), Duality of Bures and
        shape distances.
    """
    return base.evaluate(ANGULAR_SIMILARITY, x, y)


@validated(finite=("x", "y"))
def angular_distance(x: Features, y: OtherFeatures) -> Score:
    """Return the angle between shapes, arccos(nuc(Xc^T Yc) / (|Xc| |Yc|)).

    It is a metric, and precise for small angles.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Angle from 0 to pi / 2, in radians.

    References:
        Williams et al. (2021), eq. 4.
    """
    return base.evaluate(ANGULAR_DISTANCE, x, y)


@validated(finite=("x", "y"))
def partial_whitening_distance(x: Features, y: OtherFeatures, *, a: Scalar = 0.5) -> Score:
    """Return the angle between partly whitened shapes.

        Z = Xc (a I + (1 - a) |Xc| / sqrt(p) (Xc^T Xc)^(-1/2))

    At a = 1 it is `angular_distance`. At a = 0 it is invariant under invertible linear maps,
    without directions that have no variance.

    Its bias exceeds the first order. In 200 draws of 200 samples of 10 features with four common
    causes (`benchmarks/coverage.py`), nominal 90 % intervals of `compare` held the truth in 45 %,
    with a warning in all.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        a: Number from 0 (whitened, which takes p, q < n - 1) to 1.

    Returns:
        Angle from 0 to pi / 2, in radians.

    References:
        Williams et al. (2021), section 2.3.
    """
    return base.evaluate(partial_whitening_form(a=a), x, y)


def _shrunk(values: Array, parameter: Array) -> Array:
    return values / jnp.sqrt(values**2 + parameter)


def basis(x: Array) -> Basis:
    """Return the polar factor of centred features and its rank, NaN for rank 0."""
    x, _ = base.centred(x)
    # A covariance would square the condition number. A scale per neuron has no effect, so columns
    # get one size first.
    evened = x / base.column_sizes(x)
    polar = singular_map(_shrunk, evened, jnp.zeros((), x.dtype), rank_cut(x))
    return _ranked(polar)


def _ranked(q: Array) -> Basis:
    """Return a partial isometry and its rank."""
    squares = jnp.sum(q**2)
    rank = jnp.round(lax.stop_gradient(squares))
    return q, jnp.where(rank > 0, rank, jnp.nan)


def _leading(values: Array, variance: Array) -> Array:
    """Return 1 for the leading singular values that hold a fraction of the variance, else 0."""
    squares = values**2
    total = jnp.sum(squares)
    preceding = jnp.cumsum(squares) - squares
    weights = jnp.where(preceding < variance * total, 1.0, 0.0)
    return weights.astype(values.dtype)


def _leading_basis(x: Array, variance: Array) -> Basis:
    x, _ = base.centred(x)
    polar = singular_map(_leading, x, variance.astype(x.dtype), rank_cut(x))
    return _ranked(polar)


def _mean_correlation(a: Basis, b: Basis) -> Array:
    """Return the mean canonical correlation."""
    x, rank_x = a
    y, rank_y = b
    total = nuclear_norm(product(x.T, y))
    return jnp.minimum(total / jnp.minimum(rank_x, rank_y), 1.0)


def _mean_square(a: Basis, b: Basis) -> Array:
    """Return the mean squared canonical correlation."""
    x, rank_x = a
    y, rank_y = b
    total = jnp.sum(product(x.T, y) ** 2)
    return jnp.minimum(total / jnp.minimum(rank_x, rank_y), 1.0)


def _expected_square(a: Basis, b: Basis) -> Array:
    """Return the mean of `_mean_square` over all orders of one representation's samples."""
    x, rank_x = a
    _, rank_y = b
    smaller = jnp.minimum(rank_x, rank_y)
    return rank_x * rank_y / ((x.shape[-2] - 1) * smaller)


def _with_neurons(x: Array) -> Weighted:
    q, rank = basis(x)
    x, _ = base.centred(x)
    return q, product(q.T, x), rank


def _weighted(a: Weighted, b: Weighted) -> Array:
    """Return the mean canonical correlation, weighted by the neurons of `a`."""
    x, neurons, rank_x = a
    y, _, rank_y = b
    crossed, undefined = finite_part(product(x.T, y))
    variates, values, _ = jnp.linalg.svd(crossed, full_matrices=False)

    sizes = jnp.abs(product(variates.T, neurons))
    weights = jnp.sum(sizes, 1)
    is_common = jnp.arange(len(values)) < jnp.minimum(rank_x, rank_y)
    weights = jnp.where(is_common, weights, 0.0)
    mean = jnp.sum(weights * values) / jnp.sum(weights)
    return jnp.minimum(mean, 1.0) + undefined


def _regularised(x: Array, lam: Array) -> Array:
    """Return features whose singular values s become s / sqrt(s^2 + lam |Xc|^2)."""
    x, _ = base.centred(x)
    evened = x / jnp.where(lam > 0, 1.0, base.column_sizes(x))
    penalty = lam.astype(x.dtype) * jnp.sum(x**2)
    shrunk = singular_map(_shrunk, evened, penalty, rank_cut(x))
    return base.narrowed(shrunk)


def _gulp_distance(a: Array, b: Array) -> Array:
    # |A A^T - B B^T|^2 for B in any rotation; with D = A - B and S = A + B nothing cancels where
    # they are close.
    wide, turned = base.aligned(a, b)
    difference = wide - turned
    total = wide + turned
    crossed = product(total.T, difference)
    squares = product(difference.T, difference) * product(total.T, total)
    return root(0.5 * (jnp.sum(squares) + jnp.sum(crossed * crossed.T)))


CCA = Form(basis, _mean_correlation, minimum=3, narrow=True, cut="scaled")

CCA_SQUARED = CCA._replace(compare=_mean_square, expected=_expected_square)

PWCCA = CCA._replace(prepare=_with_neurons, compare=_weighted)


@validated
def svcca_form(*, variance: Scalar = 0.99) -> Form:
    cut = ""
    if not is_traced(variance):
        fraction = float(variance)
        if not 0 < fraction <= 1:
            fail("variance", "be above 0 and at most 1", variance)
        if fraction == 1:
            cut = "plain"
    prepare = eqx.Partial(_leading_basis, variance=to_device(variance, float))
    return Form(prepare, _mean_correlation, cut=cut)


@validated
def gulp_form(*, lam: Scalar = 1e-2) -> Form:
    check_non_negative("lam", lam)
    prepare = eqx.Partial(_regularised, lam=to_device(lam, float))
    form = Form(prepare, _gulp_distance)
    if is_traced(lam) or float(lam) > 0:
        return form
    return form._replace(narrow=True, cut="scaled")


@validated(finite=("x", "y"))
def cca(x: Features, y: OtherFeatures) -> Score:
    """Return the mean canonical correlation, sum_i rho_i / min(rank of Xc, rank of Yc).

    Its bias exceeds the first order. In 200 draws of 200 samples of 10 features with four common
    causes (`benchmarks/coverage.py`), nominal 90 % intervals of `compare` held the truth in 39 %,
    with a warning in all.

    Args:
        x: Features, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1. With p + q > n - 1 subspaces meet by dimension alone.

    References:
        Hotelling (1936), Relations between two sets of variates; Raghu, Gilmer, Yosinski and
        Sohl-Dickstein (2017).
    """
    return base.evaluate(CCA, x, y)


@validated(finite=("x", "y"))
def cca_squared(x: Features, y: OtherFeatures) -> Score:
    """Return the mean squared canonical correlation (R^2 of CCA).

        |Qx^T Qy|^2 / min(rank of Xc, rank of Yc), with bases Qx and Qy.

    Args:
        x: Features, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1.

    References:
        Ramsay, ten Berge and Styan (1984), Matrix correlation; Kornblith et al. (2019), table 1.
    """
    return base.evaluate(CCA_SQUARED, x, y)


@validated(finite=("x", "y"))
def svcca(x: Features, y: OtherFeatures, *, variance: Scalar = 0.99) -> Score:
    """Return the mean canonical correlation of leading principal components.

    They are the fewest components that hold `variance`.

    The value jumps if a component passes the cut, and the derivative is at a fixed number of
    components. The value is near 1 for any data if components are nearly as many as samples. Its
    bias exceeds the first order: in the draws of `cca`, intervals held the truth in 28 %, with a
    warning in 88 %.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        variance: Fraction of the variance, above 0 and at most 1.

    Returns:
        Correlation from 0 to 1.

    References:
        Raghu et al. (2017), SVCCA: singular vector canonical correlation analysis.
    """
    return base.evaluate(svcca_form(variance=variance), x, y)


@validated(finite=("x", "y"))
def pwcca(x: Features, y: OtherFeatures) -> Score:
    """Return projection-weighted CCA, sum_i w_i rho_i with w_i proportional to sum_j |<h_i, x_j>|.

    h_i are canonical variates of x of norm 1, and x_j its centred neurons. It is not symmetric,
    depends on the axes of x, and has a derivative if correlations differ. Its bias exceeds the
    first order: in the draws of `cca`, intervals held the truth in 47 %, with a warning in 75 %.

    Args:
        x: Features that give the weights, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1. If correlations repeat, as for p + q > n - 1, weights depend on
        rounding.

    References:
        Morcos, Raghu and Bengio (2018), Insights on representational similarity in neural networks
        with canonical correlation, section 2.2.
    """
    return base.evaluate(PWCCA, x, y)


@validated(finite=("x", "y"))
def gulp_distance(x: Features, y: OtherFeatures, *, lam: Scalar = 1e-2) -> Score:
    r"""Return the largest difference d of ridge predictions from two representations, over targets.

        d^2 = tr((Sxl^-1 Sx)^2) + tr((Syl^-1 Sy)^2) - 2 tr(Sxl^-1 Sxy Syl^-1 Syx),

    with covariances S (1 / n) of centred features scaled to |Xc|^2 = n, and Sxl = Sx + lambda I.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        lam: Non-negative lambda, in units of the total variance. At 0, which takes p, q < n - 1,
            d^2 = p + q - 2 sum rho^2.

    Returns:
        Distance from 0 to sqrt(p + q).

    References:
        Boix-Adsera, Lawrence, Stepaniants and Rigollet (2022), GULP: a prediction-based metric
        between representations.
    """
    return base.evaluate(gulp_form(lam=lam), x, y)
