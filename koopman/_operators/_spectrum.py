"""Eigenvalues, eigenfunctions and modes of a fitted operator."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Complex, Float, Inexact

from dissociation._core.checks import check_positive, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.distances import root
from dissociation._core.linalg import product, psd_power, scale_of
from dissociation._core.results import printed
from dissociation._core.rounding_ties import snapped
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from koopman._operators._numerics import (
    largest_entries,
    positive_or_one,
    ratio_or_zero,
    rounding_unit,
)
from koopman._operators._operator import Operator
from koopman._operators._pairs import Rows
from koopman._operators._subspaces import infinite_if_unresolved


class Eigensystem(NamedTuple):
    """Eigenpairs of an operator, K w_i = lambda_i w_i and l_i^T K = lambda_i l_i^T.

    They are sorted by falling modulus. Of a conjugate pair the eigenvalue with positive imaginary
    part comes first. Derivatives are not finite if eigenvalues coincide. Those of `right` and
    `left` are with respect to the operator, not to the data: they omit a rotation of the latent
    functions.

    Attributes:
        eigenvalues: Complex eigenvalues per lag, [r].
        right: w_i in columns: [r, r]. The eigenfunction psi_i has mean square 1 on the training
            states, and the largest amplitude of its mode (of w_i, if the mode vanishes) is real and
            positive.
        left: l_i in columns, l_j^T w_i = delta_ij without conjugation: [r, r].
        residuals: sqrt(E|psi_i(y) - lambda_i psi_i(x)|^2 / E|psi_i(x)|^2) on the training pairs,
            centred if the operator is: [r]. In a deterministic system a large residual indicates a
            spurious pair; in a noisy one an exact pair has sqrt(1 - |lambda_i|^2). With as many
            latent functions as samples it vanishes.
        condition: |l_i| |w_i|, the eigenvalue's condition number in latent coordinates, 1 for a
            normal K: [r].
        shrinkage: Factor of `alpha` in lambda_i, to first order: 1 - b^4 with b the share of
            `alpha` in psi_i's regularised norm: [r]. A pair far below 1 depends little on the data.
    """

    eigenvalues: Complex[Array, " r"]
    right: Complex[Array, "r r"]
    left: Complex[Array, "r r"]
    residuals: Float[Array, " r"]
    condition: Float[Array, " r"]
    shrinkage: Float[Array, " r"]


@validated
@eqx.filter_jit
def eigenvalues(operator: Operator) -> Complex[Array, " r"]:
    """Return the complex eigenvalues [r] of K, per lag, by falling modulus.

    Conjugates are adjacent.

    Args:
        operator: A fitted operator. Its latent functions beyond a traced rank give zeros, last.
    """
    return eigenpairs(operator.core)[0]


@validated
@eqx.filter_jit
def decompose(operator: Operator) -> Eigensystem:
    """Return all eigenpairs with their residuals.

    Args:
        operator: A fitted operator.

    References:
        Colbrook, Ayton and Szoke (2023), Residual dynamic mode decomposition, eq. 3.1.
    """
    values, vectors = eigenpairs(operator.core)
    dtype = vectors.dtype
    power = jnp.real(_quadratic_form(operator.gram_x, vectors))
    # An eigenfunction that vanishes on the data keeps its scale.
    has_power = power > 0
    safe_power = jnp.where(has_power, power, 1.0)
    scale = jnp.where(has_power, lax.rsqrt(safe_power), 1.0)
    vectors = vectors * scale[None].astype(dtype)
    left_vectors = jnp.linalg.inv(vectors).T
    left_norms = jnp.linalg.norm(left_vectors, axis=0)
    amplitudes = product(operator.readout.T.astype(dtype), left_vectors)
    phase = _phase(amplitudes, left_norms, operator.readout)
    vectors = vectors * phase[None]
    left_vectors = left_vectors * phase.conj()[None]

    # E|psi(y) - lambda psi(x)|^2, expanded.
    ahead = jnp.real(_quadratic_form(operator.gram_y, vectors))
    across = _quadratic_form(operator.cross_gram, vectors)
    square_modulus = jnp.real(values * values.conj())
    square = ahead - 2 * jnp.real(values.conj() * across) + square_modulus * has_power

    norms = jnp.real(jnp.sum(vectors.conj() * vectors, 0))
    penalty = jnp.real(_quadratic_form(operator.penalty, vectors))
    return Eigensystem(
        eigenvalues=values,
        right=vectors,
        left=left_vectors,
        residuals=root(square),
        condition=jnp.linalg.norm(left_vectors, axis=0) * jnp.sqrt(norms),
        shrinkage=1 - (penalty / norms) ** 4,
    )


def _quadratic_form(
    matrix: Float[Array, "r r"], vectors: Complex[Array, "r r"]
) -> Complex[Array, " r"]:
    """Return w_i^* M w_i of the columns w_i."""
    images = product(matrix.astype(vectors.dtype), vectors)
    return jnp.sum(vectors.conj() * images, 0)


def _constants(operator: Operator, spectrum: Eigensystem) -> Array:
    """Return m w_i / (lambda_i - 1) of every right eigenfunction [r].

    It is zero if lambda_i is 1 up to rounding.
    """
    # The added constant c_i solves (lambda_i - 1) c_i = m w_i. In general it has no solution if
    # lambda_i is 1.
    gap = spectrum.eigenvalues - 1
    core = operator.core
    noise = 64 * rounding_unit(core) * jnp.linalg.norm(core) * spectrum.condition
    drift = operator.drift[None].astype(gap.dtype)
    drift = product(drift, spectrum.right)[0]
    return ratio_or_zero(drift, gap, jnp.abs(gap) > noise)


def _phase(amplitudes: Array, size: Array, readout: Array) -> Array:
    """Return unit numbers that make the largest entry of each mode [o, r] positive.

    They are 1 for modes of rounding.
    """
    largest = largest_entries(amplitudes)[0]
    noise = 64 * rounding_unit(readout) * size * jnp.linalg.norm(readout)
    largest = jnp.where(jnp.abs(largest) > noise, largest, 1.0)
    return largest / jnp.abs(largest)


@validated
def right_eigenfunctions(
    operator: Operator, x: Rows, spectrum: Eigensystem | None = None
) -> Complex[Array, "n r"]:
    """Return psi_i(x) = u(x) w_i + m w_i / (lambda_i - 1).

    They have E[psi_i(x_{t+1}) | x_t] = lambda_i psi_i(x_t). The constant is zero for operators that
    are not centred, and at lambda_i = 1.

    Args:
        operator: A fitted operator.
        x: Features (states, for a kernel operator), [n, d].
        spectrum: Result of `decompose`, if known.

    Returns:
        Values [n, r] with mean square 1 on the training states, or variance 1 if the operator is
        centred.
    """
    if spectrum is None:
        spectrum = decompose(operator)
    return _right_values(operator, spectrum, operator.encode(x))


@eqx.filter_jit
def _right_values(operator: Operator, spectrum: Eigensystem, latent: Array) -> Array:
    values = product(latent.astype(spectrum.right.dtype), spectrum.right)
    return values + _constants(operator, spectrum)[None]


@validated
def left_eigenfunctions(
    operator: Operator, x: Rows, spectrum: Eigensystem | None = None
) -> Complex[Array, "n r"]:
    """Return xi_i(x) = <C_yx U F l_i, phi(x)> / lambda_i; zero for an eigenvalue of zero.

    Args:
        operator: A fitted operator.
        x: Features (states, for a kernel operator), [n, d].
        spectrum: Result of `decompose`, if known.

    Returns:
        Values [n, r], bi-orthonormal to the right eigenfunctions: <xi_j, psi_i> = delta_ij in
        feature space.
    """
    if spectrum is None:
        spectrum = decompose(operator)
    return _left_values(spectrum, operator.dual(x))


@jax.jit
def _left_values(spectrum: Eigensystem, latent: Array) -> Array:
    inverse = ratio_or_zero(1.0, spectrum.eigenvalues, spectrum.eigenvalues != 0)
    values = product(latent.astype(spectrum.left.dtype), spectrum.left)
    return values * inverse[None]


class Modes(NamedTuple):
    """Contributions of the eigenfunctions to an observable.

    Attributes:
        amplitudes: l_i^T D: [r, ...]; the mode at state x is psi_i(x) times it. Modes and
            `constant` sum to the forecast of one lag, and times lambda_i^(s-1) to that of s lags
            (at lambda_i = 1 without the drift).
        frequency: |arg lambda| / 2 pi, in cycles per unit of `time_step`: [r].
        half_life: Time in which the mode falls to a half; infinite if it does not decay: [r].
        implied_time_scale: -1 / growth; infinite for a mode that does not decay: [r].
        growth: log |lambda| / time_step, minus infinity at lambda = 0: [r].
        share: Fraction of the variance of the forecast of one lag on the training states,
            Re E[conj(p_i) . p] / E|p|^2 of the centred modes p_i and their sum p: [r]. Fractions
            sum to 1; a mode that cancels others has a negative one.
        constant: Mode of the constant function of a centred operator, the observable at the fixed
            point; else zero: [...].
    """

    amplitudes: Complex[Array, "r *o"]
    frequency: Float[Array, " r"]
    half_life: Float[Array, " r"]
    implied_time_scale: Float[Array, " r"]
    growth: Float[Array, " r"]
    share: Float[Array, " r"]
    constant: Float[Array, "*o"]

    def __repr__(self) -> str:
        if self.growth.ndim != 1 or is_traced(self.growth):
            return printed(self)
        lines = [
            "Modes, a line for each pair; the unit of time is that of `time_step`, by default "
            "one lag:",
            "    growth  frequency  half-life   share",
        ]
        fields = (self.growth, self.frequency, self.half_life, self.share)
        rows = np.stack([np.asarray(field) for field in fields], 1)
        index = 0
        while index < len(rows) and len(lines) < 12:
            growth, frequency, half_life, share = rows[index]
            is_pair = False
            if frequency > 0 and index + 1 < len(rows):
                is_pair = np.allclose(rows[index + 1, :2], rows[index, :2], rtol=1e-4)
            if is_pair:
                share = share + rows[index + 1, 3]
            lines.append(f"{growth:10.4g} {frequency:10.4g} {half_life:10.4g} {share:7.4f}")
            index += 1 + is_pair
        if index < len(rows):
            lines.append(f"    and {len(rows) - index} eigenvalues more")
        return "\n".join(lines)


@validated
def modes(
    operator: Operator, *, time_step: Scalar = 1.0, spectrum: Eigensystem | None = None
) -> Modes:
    """Return the Koopman modes of the observable that the operator was fitted with.

    They are in the order of the spectrum.

    Args:
        operator: A fitted operator.
        time_step: Time from x to y in the pairs, positive: lag times sampling interval.
        spectrum: Result of `decompose`, if known.

    References:
        Kostic et al. (2022), eq. 5.
    """
    check_positive("time_step", time_step)
    if spectrum is None:
        spectrum = decompose(operator)
    return _modes(operator, spectrum, to_device(time_step, operator.core.dtype))


@eqx.filter_jit
def _modes(operator: Operator, spectrum: Eigensystem, time_step: Array) -> Modes:
    vectors = spectrum.right
    amplitudes = product(spectrum.left.T, operator.readout.astype(vectors.dtype))
    covariance = operator.gram_x - operator.mean_latent[:, None] * operator.mean_latent[None]
    covariance = product(covariance.astype(vectors.dtype), vectors)
    covariance = product(vectors.conj().T, covariance)
    # Without the unit squares may overflow or vanish.
    scaled = amplitudes / scale_of(jnp.max(jnp.abs(amplitudes)))
    products = covariance * product(scaled.conj(), scaled.T)
    power = jnp.sum(jnp.real(products), 1)
    total = jnp.sum(power)
    constant = product(_constants(operator, spectrum)[None], amplitudes)[0]
    fixed = operator.mean_observable - jnp.real(constant)

    values = spectrum.eigenvalues
    is_nonzero = values != 0
    values = jnp.where(is_nonzero, values, 1.0)
    growth = jnp.log(jnp.abs(values)) / time_step
    growth = jnp.where(is_nonzero, growth, -jnp.inf)
    is_decaying = growth < 0
    decay = jnp.where(is_decaying, growth, -1.0)
    time_scale = jnp.where(is_decaying, -1.0 / decay, jnp.inf)
    return Modes(
        amplitudes=amplitudes.reshape(-1, *operator.observable_shape),
        frequency=jnp.abs(jnp.angle(values)) / (2 * jnp.pi * time_step),
        half_life=jnp.log(2.0) * time_scale,
        implied_time_scale=time_scale,
        growth=growth,
        share=power / positive_or_one(total),
        constant=fixed.reshape(operator.observable_shape),
    )


@validated
@eqx.filter_jit
def singular_values(operator: Operator) -> Float[Array, " r"]:
    """Return the singular values [r] of G on the space of the features, in falling order.

    Derivatives are not finite if singular values coincide.

    Args:
        operator: A fitted operator.
    """
    # G G^* = U (U^T C_xy C_yx U) U^T has the eigenvalues of (U^T U)(U^T C_xy C_yx U).
    half = psd_power(operator.basis_gram, 0.5)
    square = product(half, product(operator.dual_gram, half))
    return root(_symmetric_eigenvalues(square))


@jax.custom_jvp
def _symmetric_eigenvalues(matrix: Array) -> Array:
    return jnp.linalg.eigvalsh(matrix)[::-1]


@_symmetric_eigenvalues.defjvp
def _symmetric_eigenvalues_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    (matrix,) = primals
    (d_matrix,) = tangents
    values, vectors = jnp.linalg.eigh(matrix)
    perturbation = product(vectors.T, product(d_matrix, vectors))
    is_unresolved = _unresolved(values, jnp.ones_like(values), matrix)
    d_values = slopes(perturbation, is_unresolved)
    return values[::-1], d_values[::-1]


@jax.custom_jvp
def eigenpairs(matrix: Float[Array, "r r"]) -> tuple[Complex[Array, " r"], Complex[Array, "r r"]]:
    """Return eigenvalues by falling modulus, and unit eigenvectors in columns.

    Largest entries of eigenvectors are real and positive. Derivatives are dlambda_j = l_j^T dM w_j
    and dw_j = sum_i w_i l_i^T dM w_j / (lambda_j - lambda_i), plus a multiple of w_j that keeps the
    normalisation. They are not finite if eigenvalues coincide to rounding.

    Args:
        matrix: A square matrix, [r, r].

    References:
        Magnus (1985), On differentiating eigenvalues and eigenvectors, section 4.
    """
    if jax.default_backend() == "cpu":
        values, vectors = jnp.linalg.eig(matrix)
    else:  # for one small matrix the host is faster
        dtype = jnp.result_type(matrix.dtype, jnp.complex64)
        values_shape = jax.ShapeDtypeStruct(matrix.shape[:1], dtype)
        vectors_shape = jax.ShapeDtypeStruct(matrix.shape, dtype)
        values, vectors = jax.pure_callback(
            _eig_on_host, (values_shape, vectors_shape), matrix, vmap_method="expand_dims"
        )

    # Moduli that differ by rounding count as equal, so that conjugate pairs stay adjacent.
    moduli = jnp.abs(values)
    real = snapped(values.real, jnp.max(moduli))
    order = jnp.lexsort((-values.imag, -real, -snapped(moduli)))
    values = values[order]
    vectors = vectors[:, order]
    largest = largest_entries(vectors)
    phase = jnp.abs(largest) / jnp.where(largest == 0, 1.0, largest)
    return values, vectors * phase


@eigenpairs.defjvp
def _eigenpairs_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    (matrix,) = primals
    (d_matrix,) = tangents
    values, vectors = eigenpairs(matrix)
    inverse = jnp.linalg.inv(vectors)
    perturbation = product(inverse, product(d_matrix.astype(vectors.dtype), vectors))
    is_unresolved = _unresolved(values, jnp.linalg.norm(inverse, axis=1), matrix)
    d_values = slopes(perturbation, is_unresolved)

    gap = values[None] - values[:, None]
    d_vectors = product(vectors, couplings(perturbation, gap, is_unresolved))
    # The normalisation is kept: norm 1, and a real largest entry.
    rows = jnp.argmax(jnp.abs(vectors), 0)[None]
    largest = jnp.take_along_axis(vectors, rows, 0).real
    turn = jnp.take_along_axis(d_vectors, rows, 0).imag / largest
    stretch = jnp.sum(vectors.conj() * d_vectors, 0).real[None]
    d_vectors = d_vectors - vectors * (stretch + 1j * turn)
    return (values, vectors), (d_values, d_vectors)


def _unresolved(values: Array, condition: Array, matrix: Array) -> Array:
    """Return True for pairs of eigenvalues that are closer than their perturbation by rounding."""
    noise = 64 * rounding_unit(matrix) * jnp.linalg.norm(matrix) * condition
    gap = jnp.abs(values[None] - values[:, None])
    is_near = gap <= jnp.maximum(noise[None], noise[:, None])
    is_diagonal = jnp.eye(values.shape[0], dtype=bool)
    return is_near & ~is_diagonal


def couplings(
    perturbation: Inexact[Array, "k r"], gap: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, "k r"]:
    """Return perturbation / gap, the change of eigenvectors j (columns) along i (rows).

    It is zero for i = j.
    """
    is_diagonal = jnp.eye(*gap.shape, dtype=bool)
    ratio = perturbation / jnp.where(is_diagonal | unresolved, 1.0, gap)
    return jnp.where(is_diagonal, 0.0, infinite_if_unresolved(ratio, unresolved))


def slopes(
    perturbation: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, " r"]:
    """Return derivatives of eigenvalues, the diagonal; not finite if equal eigenvalues couple."""
    coupled = jnp.where(unresolved, infinite_if_unresolved(perturbation, unresolved), 0.0)
    diagonal = jnp.diagonal(perturbation)[: perturbation.shape[1]]
    return diagonal + jnp.sum(coupled, 0)


def _eig_on_host(matrix: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, vectors = np.linalg.eig(np.asarray(matrix))
    dtype = np.result_type(matrix.dtype, np.complex64)
    return values.astype(dtype), vectors.astype(dtype)
