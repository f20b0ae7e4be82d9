"""Canonical correlations, the singular values of Qx^T Qy with the polar factors Q of centred features."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array

from dissociation._core.checks import check_non_negative, check_single, fail, is_traced
from dissociation._core.distances import root
from dissociation._core.linalg import finite_part, nuclear_norm, product, singular_map
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from dissociation.similarity import _base as base
from dissociation.similarity._base import Features, Form, OtherFeatures, Score


def _ones(values: Array, parameter: Array) -> Array:
    return jnp.ones_like(values)


def basis(x: Array) -> tuple[Array, Array]:
    """Return the polar factor of centred features and its rank, NaN for rank 0."""
    x, _ = base.centred(x)
    # A covariance would square the condition number. A scale per neuron has no effect, so columns get one size first.
    return _ranked(singular_map(_ones, x / base.column_sizes(x), jnp.zeros((), x.dtype)))


def _ranked(q: Array) -> tuple[Array, Array]:
    rank = jnp.round(lax.stop_gradient(jnp.sum(q**2)))
    return q, jnp.where(rank > 0, rank, jnp.nan)


def _leading(values: Array, variance: Array) -> Array:
    squares = values**2
    return jnp.where((jnp.cumsum(squares) - squares) < variance * jnp.sum(squares), 1.0, 0.0).astype(values.dtype)


def _leading_basis(x: Array, variance: Array) -> tuple[Array, Array]:
    return _ranked(singular_map(_leading, base.centred(x)[0], variance.astype(x.dtype)))


def _mean_correlation(a: tuple[Array, Array], b: tuple[Array, Array]) -> Array:
    return jnp.minimum(nuclear_norm(product(a[0].T, b[0])) / jnp.minimum(a[1], b[1]), 1.0)


def _seen(x: Array) -> tuple[Array, Array, Array]:
    q, rank = basis(x)
    return q, product(q.T, base.centred(x)[0]), rank


def _weighted(a: tuple[Array, Array, Array], b: tuple[Array, Array, Array]) -> Array:
    (q, neurons, rank), (other, _, other_rank) = a, b
    meeting, undefined = finite_part(product(q.T, other))
    variates, values, _ = jnp.linalg.svd(meeting, full_matrices=False)
    weights = jnp.sum(jnp.abs(product(variates.T, neurons)), 1)
    weights = jnp.where(jnp.arange(values.shape[0]) < jnp.minimum(rank, other_rank), weights, 0.0)
    return jnp.minimum(jnp.sum(weights * values) / jnp.sum(weights), 1.0) + undefined


def _shrunk(values: Array, parameter: Array) -> Array:
    return values / jnp.sqrt(values**2 + parameter)


def _regularised(x: Array, lam: Array) -> Array:
    x, _ = base.centred(x)
    evened = x / jnp.where(lam > 0, 1.0, base.column_sizes(x))
    return base.narrowed(singular_map(_shrunk, evened, lam.astype(x.dtype) * jnp.sum(x**2)))


def _gulp_distance(a: Array, b: Array) -> Array:
    # |A A^T - B B^T|^2 for B in any rotation; with D = A - B and S = A + B nothing cancels where they are close.
    wide, turned = base.aligned(a, b)
    apart, sums = wide - turned, wide + turned
    crossed = product(sums.T, apart)
    return root(0.5 * (jnp.sum(product(apart.T, apart) * product(sums.T, sums)) + jnp.sum(crossed * crossed.T)))


CCA = Form(basis, _mean_correlation)

CCA_SQUARED = Form(
    basis,
    lambda a, b: jnp.minimum(jnp.sum(product(a[0].T, b[0]) ** 2) / jnp.minimum(a[1], b[1]), 1.0),
    lambda a, b: a[1] * b[1] / ((a[0].shape[-2] - 1) * jnp.minimum(a[1], b[1])),
)

PWCCA = Form(_seen, _weighted)


def svcca_form(*, variance: Scalar = 0.99) -> Form:
    check_single("variance", variance)
    if not is_traced(variance) and not 0 < float(variance) <= 1:
        fail("variance", "be above 0 and at most 1", variance)
    return Form(eqx.Partial(_leading_basis, variance=jnp.asarray(variance, float)), _mean_correlation)


def gulp_form(*, lam: Scalar = 1e-2) -> Form:
    check_single("lam", lam)
    check_non_negative("lam", lam)
    plain = not is_traced(lam) and float(lam) == 0
    return Form(eqx.Partial(_regularised, lam=jnp.asarray(lam, float)), _gulp_distance, narrow=plain)


def _between_subspaces(form: Form, x: Array | np.ndarray, y: Array | np.ndarray) -> Array:
    base.refuse_wide(x, y)
    base.warn_dropped(x=x, y=y)
    return base.evaluate(form, x, y)


@validated(finite=("x", "y"))
def cca(x: Features, y: OtherFeatures) -> Score:
    """Return the mean canonical correlation, sum_i rho_i / min(rank of Xc, rank of Yc).

    Args:
        x: Features, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1. With p + q > n - 1 subspaces meet by dimension alone.

    Raises:
        ValueError: As `linear_cka`, or if features are as many as samples.

    References:
        Hotelling (1936), Relations between two sets of variates; Raghu, Gilmer, Yosinski and Sohl-Dickstein (2017).
    """
    return _between_subspaces(CCA, x, y)


@validated(finite=("x", "y"))
def cca_squared(x: Features, y: OtherFeatures) -> Score:
    """Return the mean squared canonical correlation (R^2 of CCA), |Qx^T Qy|^2 / min(rank of Xc, rank of Yc).

    Args:
        x: Features, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1.

    Raises:
        ValueError: As `cca`.

    References:
        Ramsay, ten Berge and Styan (1984), Matrix correlation; Kornblith et al. (2019), table 1.
    """
    return _between_subspaces(CCA_SQUARED, x, y)


@validated(finite=("x", "y"))
def svcca(x: Features, y: OtherFeatures, *, variance: Scalar = 0.99) -> Score:
    """Return the mean canonical correlation of the fewest leading principal components that hold `variance`.

    The value jumps if a component passes the cut, and the derivative is at a fixed number of components. The value is
    near 1 for any data if components are nearly as many as samples.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        variance: Fraction of the variance, above 0 and at most 1.

    Returns:
        Correlation from 0 to 1.

    Raises:
        ValueError: As `linear_cka`, or if `variance` is out of range.

    References:
        Raghu et al. (2017), SVCCA: singular vector canonical correlation analysis.
    """
    if not is_traced(variance) and float(variance) == 1:
        base.warn_dropped(level=False, x=x, y=y)
    return base.evaluate(svcca_form(variance=variance), x, y)


@validated(finite=("x", "y"))
def pwcca(x: Features, y: OtherFeatures) -> Score:
    """Return projection-weighted CCA, sum_i w_i rho_i with w_i proportional to sum_j |<h_i, x_j>|.

    h_i are canonical variates of x of norm 1, and x_j its centred neurons. It is not symmetric, depends on the axes of
    x, and has a derivative if correlations differ.

    Args:
        x: Features that give the weights, [n, p], p < n - 1.
        y: Features, [n, q], q < n - 1.

    Returns:
        Correlation from 0 to 1. If correlations repeat, as for p + q > n - 1, weights depend on rounding.

    Raises:
        ValueError: As `cca`.

    References:
        Morcos, Raghu and Bengio (2018), Insights on representational similarity in neural networks with canonical
        correlation, section 2.2.
    """
    return _between_subspaces(PWCCA, x, y)


@validated(finite=("x", "y"))
def gulp_distance(x: Features, y: OtherFeatures, *, lam: Scalar = 1e-2) -> Score:
    r"""Return the largest difference d of ridge predictions from two representations, over targets.

        d^2 = tr((Sxl^-1 Sx)^2) + tr((Syl^-1 Sy)^2) - 2 tr(Sxl^-1 Sxy Syl^-1 Syx),

    with covariances S (1 / n) of centred features scaled to |Xc|^2 = n, and Sxl = Sx + lambda I.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].
        lam: Non-negative lambda, in units of the total variance. At 0, d^2 = p + q - 2 sum rho^2.

    Returns:
        Distance from 0 to sqrt(p + q).

    Raises:
        ValueError: As `linear_cka`, or if `lam` is negative, or 0 with as many features as samples.

    References:
        Boix-Adsera, Lawrence, Stepaniants and Rigollet (2022), GULP: a prediction-based metric between
        representations.
    """
    return base.evaluate(gulp_form(lam=lam), x, y)
