"""Eigenvalues, eigenfunctions and modes of a fitted operator.

With M = U^T C_xy U and M w_i = lambda_i w_i, l_i^T M = lambda_i l_i^T:

    right eigenfunction   psi_i(x) = u(x) w_i,          E[psi_i(x_{t+1}) | x_t] = lambda_i psi_i(x_t),
    left eigenfunction    xi_i(x) = <C_yx U l_i, phi(x)> / lambda_i,

with <xi_j, psi_i> = delta_ij in the space of the features. Every function here takes the r x r decomposition through
one routine, on the host where a backend has none of its own.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float

from dissociation.checks import check_positive
from dissociation.linalg import product
from koopman.fitted import Operator

Scalar = float | int | Float[Array | np.ndarray, ""]


class Spectrum(NamedTuple):
    """Eigenpairs of an operator, by falling modulus; of a conjugate pair the one with positive imaginary part first.

    Attributes:
        eigenvalues: [r], complex.
        right: w_i in columns, scaled so that psi_i has mean square 1 on the training states: [r, r].
        left: l_i in columns, l_j^T w_i = delta_ij without conjugation: [r, r].
        residuals: sqrt(E|psi_i(y) - lambda_i psi_i(x)|^2 / E|psi_i(x)|^2) on the training pairs: [r]. For a
            deterministic system lambda_i is in the pseudospectrum of that size (if the operator is normal, no farther
            from the spectrum), and a large one unmasks a spurious pair; for a noisy one it contains the noise,
            sqrt(1 - |lambda_i|^2) for an exact eigenpair. With as many latent functions as samples it vanishes for all
            pairs, and says nothing.
        condition: |l_i| |w_i|, the eigenvalue's condition number in latent coordinates, 1 for a normal M: [r].
    """

    eigenvalues: Complex[Array, " r"]
    right: Complex[Array, "r r"]
    left: Complex[Array, "r r"]
    residuals: Float[Array, " r"]
    condition: Float[Array, " r"]


def eigenvalues(operator: Operator) -> Complex[Array, " r"]:
    """Eigenvalues by falling modulus, conjugates adjacent.

    They have a derivative (dlambda_i = l_i^T dM w_i), which is finite where they are distinct.

    Args:
        operator: A fitted operator.

    Returns:
        Complex eigenvalues per lag. Latent functions beyond a traced rank count as zeros, last.
    """
    return _eigenvalues(operator.core)


def decompose(operator: Operator) -> Spectrum:
    """All eigenpairs with their residuals.

    Args:
        operator: A fitted operator.

    Returns:
        The spectrum. It has no derivative but that of `eigenvalues`; eigenvectors' phases are arbitrary.

    References:
        Colbrook, Ayton and Szoke (2023), Residual dynamic mode decomposition, eq. 3.1.
    """
    core = jax.lax.stop_gradient(operator.core)
    values, right = eigenpairs(core)
    power = jnp.real(jnp.sum(right.conj() * product(operator.gram_x.astype(right.dtype), right), 0))
    # An eigenfunction that vanishes on the data keeps its scale.
    scale = jnp.where(power > 0, jax.lax.rsqrt(jnp.where(power > 0, power, 1.0)), 1.0)
    right = right * scale[None].astype(right.dtype)
    left = jnp.linalg.inv(right).T
    ahead = jnp.real(jnp.sum(right.conj() * product(operator.gram_y.astype(right.dtype), right), 0))
    across = jnp.sum(right.conj() * product(core.astype(right.dtype), right), 0)
    square = ahead - 2 * jnp.real(values.conj() * across) + jnp.abs(values) ** 2 * jnp.where(power > 0, 1.0, 0.0)
    condition = jnp.linalg.norm(left, axis=0) * jnp.linalg.norm(right, axis=0)
    return Spectrum(values, right, left, jnp.sqrt(jnp.maximum(square, 0.0)), condition)


def right_eigenfunctions(
    operator: Operator, x: Float[Array | np.ndarray, "n d"], spectrum: Spectrum | None = None
) -> Complex[Array, "n r"]:
    """psi_i at features x (states x, for a kernel operator).

    Args:
        operator: A fitted operator.
        x: Where to evaluate, as the operator was fitted.
        spectrum: Of `decompose`, if it is known already.

    Returns:
        Values with mean square 1 on the training states.

    Raises:
        ValueError: If x has another width than the operator was fitted on.
    """
    spectrum = decompose(operator) if spectrum is None else spectrum
    latent = operator.encode(x)
    return product(latent.astype(spectrum.right.dtype), spectrum.right)


def left_eigenfunctions(
    operator: Operator, x: Float[Array | np.ndarray, "n d"], spectrum: Spectrum | None = None
) -> Complex[Array, "n r"]:
    """xi_i at features x (states x, for a kernel operator); zero for an eigenvalue of zero.

    Args:
        operator: A fitted operator.
        x: Where to evaluate.
        spectrum: Of `decompose`, if it is known already.

    Returns:
        Values, bi-orthonormal to the right eigenfunctions: <xi_j, psi_i> = delta_ij in feature space.

    Raises:
        ValueError: If x has another width than the operator was fitted on.
    """
    spectrum = decompose(operator) if spectrum is None else spectrum
    known = spectrum.eigenvalues != 0
    inverse = jnp.where(known, 1.0 / jnp.where(known, spectrum.eigenvalues, 1.0), 0.0)
    latent = operator.dual(x)
    return product(latent.astype(spectrum.left.dtype), spectrum.left) * inverse[None]


class Modes(NamedTuple):
    """An observable's part in every eigenfunction.

    Attributes:
        amplitudes: l_i^T D: [r, ...]; the mode at state x is psi_i(x) times it, and modes sum to the forecast of one
            lag, without the observable's mean.
        frequency: |arg lambda| / 2 pi, in cycles per unit of `time_step`: [r].
        half_life: Time after which the mode has fallen to a half; infinite where it does not decay: [r].
        implied_time_scale: -time_step / log |lambda|: [r].
    """

    amplitudes: Complex[Array, "r *o"]
    frequency: Float[Array, " r"]
    half_life: Float[Array, " r"]
    implied_time_scale: Float[Array, " r"]


def modes(operator: Operator, *, time_step: Scalar = 1.0, spectrum: Spectrum | None = None) -> Modes:
    """Koopman modes of the observable that the operator was fitted with.

    Args:
        operator: A fitted operator.
        time_step: Time from x to y in the pairs: lag times sampling interval.
        spectrum: Of `decompose`, if it is known already.

    Returns:
        Amplitudes and times, in the order of the spectrum.

    Raises:
        ValueError: If `time_step` is not positive.

    References:
        Kostic et al. (2022), eq. 5.
    """
    check_positive("time_step", time_step)
    spectrum = decompose(operator) if spectrum is None else spectrum
    amplitudes = product(spectrum.left.T, operator.readout.astype(spectrum.left.dtype))
    rate = -jnp.log(jnp.abs(spectrum.eigenvalues)) / time_step
    scale = jnp.where(rate > 0, 1.0 / jnp.where(rate > 0, rate, 1.0), jnp.inf)
    return Modes(
        amplitudes=amplitudes.reshape(-1, *operator.observable_shape),
        frequency=jnp.abs(jnp.angle(spectrum.eigenvalues)) / (2 * jnp.pi * time_step),
        half_life=jnp.log(2.0) * scale,
        implied_time_scale=scale,
    )


def singular_values(operator: Operator) -> Float[Array, " r"]:
    """Singular values of G as an operator on the space of the features, in falling order.

    G G^* = U (U^T C_xy C_yx U) U^T, so they are the square roots of the eigenvalues of (U^T U)(U^T C_xy C_yx U).

    Args:
        operator: A fitted operator.

    Returns:
        Non-negative values; without derivative where they coincide.
    """
    values, vectors = jnp.linalg.eigh(operator.basis_gram)
    half = vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None]
    squares = jnp.linalg.eigvalsh(product(half.T, product(operator.dual_gram, half)))
    return jnp.sqrt(jnp.maximum(squares, 0.0))[::-1]


@jax.custom_jvp
def _eigenvalues(matrix: Array) -> Array:
    return eigenpairs(matrix)[0]


@_eigenvalues.defjvp
def _eigenvalues_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    values, right = eigenpairs(primals[0])
    turned = product(jnp.linalg.inv(right), product(tangents[0].astype(right.dtype), right))
    return values, jnp.diagonal(turned)


def eigenpairs(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues in the house's order and unit eigenvectors whose largest entry is real and positive."""
    if jax.default_backend() == "cpu":
        values, right = jnp.linalg.eig(matrix)
    else:  # one small matrix: the host is faster than any accelerator at it
        kind = jnp.result_type(matrix.dtype, jnp.complex64)
        shapes = jax.ShapeDtypeStruct(matrix.shape[:1], kind), jax.ShapeDtypeStruct(matrix.shape, kind)
        values, right = jax.pure_callback(_eig_on_host, shapes, matrix, vmap_method="expand_dims")
    # Moduli are compared after rounding: two that differ by less are one, and a pair must not be torn apart.
    unit = jnp.maximum(jnp.max(jnp.abs(values)), jnp.finfo(matrix.dtype).tiny) * 64 * jnp.finfo(matrix.dtype).eps
    size, real = jnp.round(jnp.abs(values) / unit), jnp.round(values.real / unit)
    order = jnp.lexsort((-values.imag, -real, -size))
    values, right = values[order], right[:, order]
    largest = jnp.take_along_axis(right, jnp.argmax(jnp.abs(right), 0)[None], 0)
    return values, right * (jnp.abs(largest) / jnp.where(largest == 0, 1.0, largest))


def _eig_on_host(matrix: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, right = np.linalg.eig(np.asarray(matrix))
    kind = np.result_type(matrix.dtype, np.complex64)
    return values.astype(kind), right.astype(kind)
