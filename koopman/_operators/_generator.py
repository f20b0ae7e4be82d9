"""Generator of reversible overdamped Langevin dynamics, from equilibrium samples in any order."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import (
    check_count,
    check_non_negative,
    check_positive,
    fail,
    is_traced,
)
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product, scale_of
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from koopman._operators._findings import large_alpha, lost_variance, warn_float32, warn_of
from koopman._operators._numerics import largest_entries, ratio_or_zero, rounding_unit
from koopman._operators._pairs import check_square, default_alpha, gram_root
from koopman._operators._spectrum import couplings


class Generator(NamedTuple):
    """Eigenpairs of a generator.

    Attributes:
        eigenvalues: Rates, non-positive and falling from the slowest: [r].
        coefficients: Coefficients of the eigenfunctions in the features, in columns: [d, r].
            Eigenfunctions have mean square 1 on the samples, and the largest coefficient is
            positive.
        support: Effective number of samples of each eigenfunction, n (E f^2)^2 / E f^4, from 1 to n
            (0 for a rate of minus infinity): [r]. A slow rate on a few samples may be an artefact.
    """

    eigenvalues: Float[Array, " r"]
    coefficients: Float[Array, "d r"]
    support: Float[Array, " r"]


@validated(finite=("x", "jac"))
def fit_generator(
    x: Float[Array | np.ndarray, "n d"],
    jac: Float[Array | np.ndarray, "n d m"],
    *,
    rank: int,
    diffusion: Scalar = 1.0,
    alpha: Scalar | None = None,
    shift: Scalar | None = None,
) -> Generator:
    """Fit the regularised resolvent (shift - L)^{-1} in the energy space by Rayleigh and Ritz.

        C c = mu (shift (C + alpha I) + E) c,     rate = shift - 1 / mu,
        C = E[phi phi^T],   E = D E[J J^T]

    For dX = -grad V dt / gamma + sqrt(2 D) dW the generator L is self-adjoint, -<f, L g> = D E[grad
    f . grad g]. The rate is -(E + shift alpha I) / C along c, so that directions with C << alpha
    are fast and come last.

    With exact moments, rates are at or below the true ones. Features that are flat on a few samples
    in a tail give a rate near 0 (see `Generator.support`), which only a larger alpha or wider
    features remove.

    Args:
        x: Features phi of samples of the invariant measure, [n, d].
        jac: Derivatives of the features with respect to the state's m coordinates, [n, d, m].
        rank: Number of slowest eigenpairs, at most d.
        diffusion: D = k_B T / gamma, in units of length^2 / time: s^2 / 2 for noise s dW, and
            sigma^2 / (2 friction^2) for `datasets.overdamped_langevin`.
        alpha: Tikhonov regularisation in the units of C, non-negative. None is rounding, of
            features scaled to one size. With narrow features, `alpha=1e-6 * mean(x**2)` may remove
            slow rates on few samples.
        shift: Positive, in units of 1 / time. None is tr(E) / tr(C), the mean rate of the features;
            rates far from it lose digits. Without alpha it cancels.

    Returns:
        The slowest eigenpairs. A constant function in the features' span comes first with rate 0,
        or -shift alpha |c|^2. Directions without samples come last, with rate minus infinity.
        Derivatives are not finite if rates coincide.

    Warns:
        UserWarning: For known values, if `alpha` exceeds tr(C) / d, or a feature's variance is
            below the rounding of its squared mean.

    Raises:
        ValueError: If data are not finite, or rates are out of the dtype's range.

    References:
        Kostic, Lounici, Halconruy, Devergne and Pontil (2024), Learning the infinitesimal generator
        of stochastic diffusion processes.
    """
    check_positive("diffusion", diffusion)
    if alpha is not None:
        check_non_negative("alpha", alpha)
    if shift is not None:
        check_positive("shift", shift)
    rank = check_count("rank", rank, minimum=1)
    num_features = x.shape[1]
    if rank > num_features:
        fail("rank", f"be at most the number of features ({num_features})", rank)
    warn_float32(x, jac)
    warn_of(lost_variance(x, advice="take them about their mean"))

    x = to_device(x)
    numbers = jax.tree.map(lambda number: to_device(number, x.dtype), (diffusion, alpha, shift))
    forms = _forms(x, to_device(jac), *numbers)
    if not any(map(is_traced, forms)):
        _check_forms(forms)
    return _generator(forms, rank)


class _Forms(NamedTuple):
    """Features and both quadratic forms in units in which squares neither overflow nor vanish."""

    x: Array  # features over `unit` and `sizes`: [n, d]
    root: Array  # R with R^T R = C: [d, d]
    slope: Array  # R with R^T R = E / pace^2: [d, d]
    unit: Array  # divisor of the features
    sizes: Array  # divisors of the columns: [d]
    pace: Array  # divisor of the derivatives
    shift: Array
    penalty: Array  # alpha
    trace: Array  # trace of C
    energy: Array  # trace of E / pace^2


@jax.jit
def _forms(
    x: Array, jac: Array, diffusion: Array, alpha: Array | None, shift: Array | None
) -> _Forms:
    num_samples, width = x.shape
    # In these units squares neither overflow nor vanish. Column sizes are powers of two.
    rows = jnp.moveaxis(jac, 2, 1).reshape(-1, width)
    unit = scale_of(jnp.max(jnp.abs(x)))
    x = x / unit
    rows = rows / unit * jnp.sqrt(diffusion)

    sizes = jnp.ones(width, x.dtype)
    if alpha is None:
        sizes = scale_of(jnp.max(jnp.abs(x), 0))
    x = x / sizes[None]
    rows = rows / sizes[None]
    pace = scale_of(jnp.max(jnp.abs(rows)))

    root = gram_root(x * num_samples**-0.5)
    slope = gram_root(rows / pace * num_samples**-0.5)
    trace = jnp.sum(root**2)
    energy = jnp.sum(slope**2)
    if shift is None:
        # The mean rate, or 1 if a trace is zero, because the rates then have no scale.
        is_varying = (trace > 0) & (energy > 0)
        shift = jnp.where(is_varying, energy, 1.0) / jnp.where(is_varying, trace, 1.0)
    else:
        shift = shift / pace / pace
    penalty = default_alpha(trace, min(x.shape)) if alpha is None else alpha / unit / unit
    return _Forms(x, root, slope, unit, sizes, pace, shift, penalty, trace, energy)


def _check_forms(forms: _Forms) -> None:
    """Raise if rates are out of the dtype's range, and warn if `alpha` is large."""
    trace = float(forms.trace)
    energy = float(forms.energy)
    if energy > 0 and trace > 0:
        ratio = energy / trace * float(forms.pace) ** 2
        check_square("jac", ratio, "squares, over those of `x`,", forms.x.dtype)

    square = float(forms.unit) ** 2
    alpha = float(forms.penalty) * square
    mean_eigenvalue = trace / forms.x.shape[1] * square
    words = "the mean eigenvalue of E[phi phi^T]"
    warn_of(large_alpha(alpha, mean_eigenvalue, trace * square, words))


@partial(jax.jit, static_argnames="size")
def _generator(forms: _Forms, size: int) -> Generator:
    x, root, slope, unit, sizes, pace, shift, penalty, *_ = forms
    num_samples, width = x.shape
    # In the energy space <f, g> = shift E[f g] - E[f L g] the resolvent has the quadratic form
    # E[f^2]. The regularised form has shift alpha I: alpha I added to C alone would make directions
    # with few samples slow.
    rows = jnp.stack([jnp.sqrt(shift) * root, slope])
    ridge = shift * penalty
    vectors = _pencil(rows, ridge)[:, :size]

    # Rayleigh quotients of the roots, whose numerators are sums of squares: they are not negative
    # and do not cancel.
    shifted_squares, energies = jnp.sum(product(rows, vectors[None]) ** 2, 1)
    is_sampled = shifted_squares > (width * rounding_unit(x)) ** 2
    squares = jnp.where(is_sampled, shifted_squares / shift, 1.0)
    energies = energies + ridge * jnp.sum(vectors**2, 0)
    finite_rates = -energies / squares * pace * pace
    rates = jnp.where(is_sampled, finite_rates, -jnp.inf)

    coefficients = vectors * jax.lax.rsqrt(squares)[None]
    fourth_moments = jnp.mean(product(x, coefficients) ** 4, 0)
    support = ratio_or_zero(float(num_samples), fourth_moments, is_sampled)
    coefficients = coefficients / sizes[:, None] / unit
    signs = jnp.where(largest_entries(coefficients) < 0, -1.0, 1.0)
    return Generator(rates, coefficients * signs, support)


@jax.custom_jvp
def _pencil(rows: Float[Array, "2 d d"], ridge: Float[Array, ""]) -> Float[Array, "d d"]:
    """Return eigenvectors v of H v = s^2 A v with v^T A v = 1, s falling.

    A = H + rows[1]^T rows[1] + ridge I, H = rows[0]^T rows[0].
    """
    width = rows.shape[-1]
    ridge_rows = jnp.sqrt(ridge) * jnp.eye(width, dtype=rows.dtype)
    stack = jnp.concatenate([*rows, ridge_rows])
    # Cosines of the singular vectors of the stacked rows do not square the condition number.
    left_vectors, sizes, right_vectors = jnp.linalg.svd(stack, full_matrices=False)
    is_kept = sizes > width * rounding_unit(rows) * sizes[0]
    whiten = right_vectors.T * ratio_or_zero(1.0, sizes, is_kept)[None]
    cosines = left_vectors[:width] * is_kept[None]
    _, _, directions = jnp.linalg.svd(cosines)
    return product(whiten, directions.T)


@_pencil.defjvp
def _pencil_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    rows, ridge = primals
    d_rows, d_ridge = tangents
    vectors = _pencil(rows, ridge)
    images = product(rows, vectors[None])
    d_images = product(d_rows, vectors[None])
    half = product(jnp.swapaxes(images, 1, 2), d_images)
    d_moments, d_slopes = half + jnp.swapaxes(half, 1, 2)
    d_energies = d_moments + d_slopes + d_ridge * product(vectors.T, vectors)

    squares = jnp.sum(images[0] ** 2, 0)
    gap = squares[None] - squares[:, None]
    is_diagonal = jnp.eye(len(squares), dtype=bool)
    is_unresolved = (jnp.abs(gap) <= 64 * rounding_unit(rows)) & ~is_diagonal
    perturbation = d_moments - d_energies * squares[None]
    # Lengths cancel in all results.
    return vectors, product(vectors, couplings(perturbation, gap, is_unresolved))
