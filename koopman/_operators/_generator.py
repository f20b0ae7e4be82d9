"""Generator of reversible overdamped Langevin dynamics, from samples of its equilibrium in any order."""

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
    """Fit the resolvent (shift - L)^{-1} in the energy space by Rayleigh and Ritz, with Tikhonov regularisation.

        C c = mu (shift (C + alpha I) + E) c,     rate = shift - 1 / mu,     C = E[phi phi^T],   E =
        D E[J J^T]

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
    size = check_count("rank", rank, minimum=1)
    if size > x.shape[1]:
        fail("rank", f"be at most the number of features ({x.shape[1]})", rank)
    warn_float32(x, jac)
    warn_of(lost_variance(x, advice="take them about their mean"))
    width = x.shape[1]
    x = to_device(x)
    numbers = jax.tree.map(lambda number: to_device(number, x.dtype), (diffusion, alpha, shift))
    forms = _forms(x, to_device(jac), *numbers)
    if not any(map(is_traced, forms)):
        trace = float(forms.trace)
        energy = float(forms.energy)
        if energy > 0 and trace > 0:
            check_square(
                "jac",
                energy / trace * float(forms.pace) ** 2,
                "squares, over those of `x`,",
                x.dtype,
            )
        which = "the mean eigenvalue of E[phi phi^T]"
        square = float(forms.unit) ** 2
        warn_of(
            large_alpha(
                float(forms.penalty) * square, trace / width * square, trace * square, which
            )
        )
    return _generator(forms, size)


class _Forms(NamedTuple):
    """Features and both quadratic forms in units in which squares neither overflow nor vanish."""

    x: Array  # features over `unit` and `sizes`: [n, d]
    root: Array  # R with R^T R = C: [d, d]
    slope: Array  # R with R^T R = E / pace^2: [d, d]
    unit: Array
    sizes: Array  # divisors of the columns: [d]
    pace: Array
    shift: Array
    penalty: Array  # alpha
    trace: Array  # of C
    energy: Array  # trace of E / pace^2


@jax.jit
def _forms(
    x: Array, jac: Array, diffusion: Array, alpha: Array | None, shift: Array | None
) -> _Forms:
    number, width = x.shape
    # In these units squares neither overflow nor vanish. Column sizes are powers of two.
    flat = jnp.moveaxis(jac, 2, 1).reshape(-1, width)
    unit = scale_of(jnp.max(jnp.abs(x)))
    x, flat = x / unit, flat / unit * jnp.sqrt(diffusion)
    sizes = scale_of(jnp.max(jnp.abs(x), 0)) if alpha is None else jnp.ones(width, x.dtype)
    x, flat = x / sizes[None], flat / sizes[None]
    pace = scale_of(jnp.max(jnp.abs(flat)))
    root, slope = gram_root(x * number**-0.5), gram_root(flat / pace * number**-0.5)
    trace = jnp.sum(root**2)
    energy = jnp.sum(slope**2)
    if (
        shift is None
    ):  # the mean rate, or 1 if a trace is zero, because the rates then have no scale
        varying = (trace > 0) & (energy > 0)
        shift = jnp.where(varying, energy, 1.0) / jnp.where(varying, trace, 1.0)
    else:
        shift = shift / pace / pace
    penalty = default_alpha(trace, min(x.shape)) if alpha is None else alpha / unit / unit
    return _Forms(x, root, slope, unit, sizes, pace, shift, penalty, trace, energy)


@partial(jax.jit, static_argnames="size")
def _generator(forms: _Forms, size: int) -> Generator:
    x, root, slope, unit, sizes, pace, shift, penalty, *_ = forms
    number, width = x.shape
    # In the energy space <f, g> = shift E[f g] - E[f L g] the resolvent has the quadratic form
    # E[f^2]. The regularised form has shift alpha I: alpha I added to C alone would make directions
    # with few samples slow.
    rows, ridge = jnp.stack([jnp.sqrt(shift) * root, slope]), shift * penalty
    vectors = _pencil(rows, ridge)[:, :size]
    # Rayleigh quotients of the roots, whose numerators are sums of squares: they are not negative
    # and do not cancel.
    held, energy = jnp.sum(product(rows, vectors[None]) ** 2, 1)
    held_up = held > (width * jnp.finfo(x.dtype).eps) ** 2
    square = jnp.where(held_up, held / shift, 1.0)
    coefficients = vectors * jax.lax.rsqrt(square)[None]
    rates = jnp.where(
        held_up, -(energy + ridge * jnp.sum(vectors**2, 0)) / square * pace * pace, -jnp.inf
    )
    moment = jnp.mean(product(x, coefficients) ** 4, 0)
    coefficients = coefficients / sizes[:, None] / unit
    largest = jnp.take_along_axis(coefficients, jnp.argmax(jnp.abs(coefficients), 0)[None], 0)
    coefficients = coefficients * jnp.where(largest < 0, -1.0, 1.0)
    return Generator(
        rates, coefficients, jnp.where(held_up, number / jnp.where(held_up, moment, 1.0), 0.0)
    )


@jax.custom_jvp
def _pencil(rows: Float[Array, "2 d d"], ridge: Float[Array, ""]) -> Float[Array, "d d"]:
    """Return eigenvectors v of H v = s^2 A v with v^T A v = 1, s falling.

    A = H + rows[1]^T rows[1] + ridge I, H = rows[0]^T rows[0].
    """
    width = rows.shape[-1]
    stack = jnp.concatenate([*rows, jnp.sqrt(ridge) * jnp.eye(width, dtype=rows.dtype)])
    # Cosines of the singular vectors of the stacked rows do not square the condition number.
    left, sizes, right = jnp.linalg.svd(stack, full_matrices=False)
    kept = sizes > width * jnp.finfo(rows.dtype).eps * sizes[0]
    whiten = right.T * jnp.where(kept, 1.0 / jnp.where(kept, sizes, 1.0), 0.0)[None]
    return product(whiten, jnp.linalg.svd(left[:width] * kept[None])[2].T)


@_pencil.defjvp
def _pencil_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (rows, ridge), (d_rows, d_ridge) = primals, tangents
    vectors = _pencil(rows, ridge)
    seen = product(rows, vectors[None])
    half = product(jnp.swapaxes(seen, 1, 2), product(d_rows, vectors[None]))
    d_held, d_slope = half + jnp.swapaxes(half, 1, 2)
    d_energy = d_held + d_slope + d_ridge * product(vectors.T, vectors)
    squares = jnp.sum(seen[0] ** 2, 0)
    gap = squares[None] - squares[:, None]
    unresolved = (jnp.abs(gap) <= 64 * jnp.finfo(rows.dtype).eps) & ~jnp.eye(
        len(squares), dtype=bool
    )
    turn = couplings(
        d_held - d_energy * squares[None], gap, unresolved
    )  # lengths cancel in all results
    return vectors, product(vectors, turn)
