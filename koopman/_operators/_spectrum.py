"""Eigenvalues, eigenfunctions and modes of a fitted operator."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Complex, Float, Inexact

from dissociation._core.checks import check_positive, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.distances import root
from dissociation._core.linalg import product, psd_power, scale_of
from dissociation._core.results import printed
from dissociation._core.ties import snapped
from dissociation._core.types import Scalar
from dissociation._core.validation import validated
from koopman._operators._kernels import Operator
from koopman._operators._pairs import Rows
from koopman._operators._subspaces import refused


class Eigensystem(NamedTuple):
    """Eigenpairs of an operator, K w_i = lambda_i w_i and l_i^T K = lambda_i l_i^T, by falling modulus.

    Of a conjugate pair the eigenvalue with positive imaginary part comes first. Derivatives are not
    finite if eigenvalues coincide. Those of `right` and `left` are with respect to the operator,
    not to the data: they omit a rotation of the latent functions.

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
    """Return the complex eigenvalues [r] of K, per lag, by falling modulus and with conjugates adjacent.

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
    values, right = eigenpairs(operator.core)
    kind = right.dtype
    power = jnp.real(jnp.sum(right.conj() * product(operator.gram_x.astype(kind), right), 0))
    # An eigenfunction that vanishes on the data keeps its scale.
    held = power > 0
    right = right * jnp.where(held, jax.lax.rsqrt(jnp.where(held, power, 1.0)), 1.0)[None].astype(
        kind
    )
    left = jnp.linalg.inv(right).T
    phase = _phase(
        product(operator.readout.T.astype(kind), left),
        jnp.linalg.norm(left, axis=0),
        operator.readout,
    )
    right, left = right * phase[None], left * phase.conj()[None]
    ahead = jnp.real(jnp.sum(right.conj() * product(operator.gram_y.astype(kind), right), 0))
    across = jnp.sum(right.conj() * product(operator.cross_gram.astype(kind), right), 0)
    square = ahead - 2 * jnp.real(values.conj() * across) + jnp.real(values * values.conj()) * held
    norms = jnp.real(jnp.sum(right.conj() * right, 0))
    penalty = jnp.real(jnp.sum(right.conj() * product(operator.penalty.astype(kind), right), 0))
    return Eigensystem(
        eigenvalues=values,
        right=right,
        left=left,
        residuals=root(square),
        condition=jnp.linalg.norm(left, axis=0) * jnp.sqrt(norms),
        shrinkage=1 - (penalty / norms) ** 4,
    )


def _constants(operator: Operator, spectrum: Eigensystem) -> Array:
    """Return m w_i / (lambda_i - 1) of each right eigenfunction [r], or zero if lambda_i is 1 up to rounding."""
    # The added constant c_i solves (lambda_i - 1) c_i = m w_i. In general it has no solution if
    # lambda_i is 1.
    gap = spectrum.eigenvalues - 1
    eps = jnp.finfo(operator.core.dtype).eps
    known = jnp.abs(gap) > 64 * eps * jnp.linalg.norm(operator.core) * spectrum.condition
    drift = product(operator.drift[None].astype(gap.dtype), spectrum.right)[0]
    return jnp.where(known, drift / jnp.where(known, gap, 1.0), 0.0)


def _phase(amplitudes: Array, size: Array, readout: Array) -> Array:
    """Return unit numbers that make the largest entry of each mode [o, r] positive; 1 for modes of rounding."""
    largest = jnp.take_along_axis(amplitudes, jnp.argmax(jnp.abs(amplitudes), 0)[None], 0)[0]
    known = jnp.abs(largest) > 64 * jnp.finfo(readout.dtype).eps * size * jnp.linalg.norm(readout)
    largest = jnp.where(known, largest, 1.0)
    return largest / jnp.abs(largest)


@validated
def right_eigenfunctions(
    operator: Operator, x: Rows, spectrum: Eigensystem | None = None
) -> Complex[Array, "n r"]:
    """Return psi_i(x) = u(x) w_i + m w_i / (lambda_i - 1), with E[psi_i(x_{t+1}) | x_t] = lambda_i psi_i(x_t).

    The constant is zero for operators that are not centred, and at lambda_i = 1.

    Args:
        operator: A fitted operator.
        x: Features (states, for a kernel operator), [n, d].
        spectrum: Result of `decompose`, if known.

    Returns:
        Values [n, r] with mean square 1 on the training states, or variance 1 if the operator is
        centred.
    """
    spectrum = decompose(operator) if spectrum is None else spectrum
    return _right_values(operator, spectrum, operator.encode(x))


@eqx.filter_jit
def _right_values(operator: Operator, spectrum: Eigensystem, latent: Array) -> Array:
    return (
        product(latent.astype(spectrum.right.dtype), spectrum.right)
        + _constants(operator, spectrum)[None]
    )


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
    spectrum = decompose(operator) if spectrum is None else spectrum
    return _left_values(spectrum, operator.dual(x))


@jax.jit
def _left_values(spectrum: Eigensystem, latent: Array) -> Array:
    nonzero = spectrum.eigenvalues != 0
    inverse = jnp.where(nonzero, 1.0 / jnp.where(nonzero, spectrum.eigenvalues, 1.0), 0.0)
    return product(latent.astype(spectrum.left.dtype), spectrum.left) * inverse[None]


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
        known = [
            np.asarray(part) for part in (self.growth, self.frequency, self.half_life, self.share)
        ]
        columns = np.stack(known, 1)
        place = 0
        while place < len(columns) and len(lines) < 12:
            growth, frequency, half_life, share = columns[place]
            two = bool(frequency > 0) and place + 1 < len(columns)
            two = two and np.allclose(columns[place + 1, :2], columns[place, :2], rtol=1e-4)
            share = share + columns[place + 1, 3] if two else share
            lines.append(f"{growth:10.4g} {frequency:10.4g} {half_life:10.4g} {share:7.4f}")
            place += 1 + two
        lines += [f"    and {len(columns) - place} eigenvalues more"] * (place < len(columns))
        return "\n".join(lines)


@validated
def modes(
    operator: Operator, *, time_step: Scalar = 1.0, spectrum: Eigensystem | None = None
) -> Modes:
    """Return the Koopman modes of the observable that the operator was fitted with, in the order of the spectrum.

    Args:
        operator: A fitted operator.
        time_step: Time from x to y in the pairs, positive: lag times sampling interval.
        spectrum: Result of `decompose`, if known.

    References:
        Kostic et al. (2022), eq. 5.
    """
    check_positive("time_step", time_step)
    spectrum = decompose(operator) if spectrum is None else spectrum
    return _modes(operator, spectrum, to_device(time_step, operator.core.dtype))


@eqx.filter_jit
def _modes(operator: Operator, spectrum: Eigensystem, time_step: Array) -> Modes:
    amplitudes = product(spectrum.left.T, operator.readout.astype(spectrum.left.dtype))
    about_mean = operator.gram_x - operator.mean_latent[:, None] * operator.mean_latent[None]
    held = product(
        spectrum.right.conj().T, product(about_mean.astype(amplitudes.dtype), spectrum.right)
    )
    parts = amplitudes / scale_of(
        jnp.max(jnp.abs(amplitudes))
    )  # otherwise squares may overflow or vanish
    power = jnp.sum(jnp.real(held * product(parts.conj(), parts.T)), 1)
    total = jnp.sum(power)
    fixed = operator.mean_observable - jnp.real(
        product(_constants(operator, spectrum)[None], amplitudes)[0]
    )
    values = spectrum.eigenvalues
    known = values != 0
    values = jnp.where(known, values, 1.0)
    growth = jnp.where(known, jnp.log(jnp.abs(values)) / time_step, -jnp.inf)
    scale = jnp.where(growth < 0, -1.0 / jnp.where(growth < 0, growth, -1.0), jnp.inf)
    return Modes(
        amplitudes=amplitudes.reshape(-1, *operator.observable_shape),
        frequency=jnp.abs(jnp.angle(values)) / (2 * jnp.pi * time_step),
        half_life=jnp.log(2.0) * scale,
        implied_time_scale=scale,
        growth=growth,
        share=power / jnp.where(total > 0, total, 1.0),
        constant=fixed.reshape(operator.observable_shape),
    )


@validated
@eqx.filter_jit
def singular_values(operator: Operator) -> Float[Array, " r"]:
    """Return the singular values [r] of G as an operator on the space of the features, in falling order.

    Derivatives are not finite if singular values coincide.

    Args:
        operator: A fitted operator.
    """
    # G G^* = U (U^T C_xy C_yx U) U^T has the eigenvalues of (U^T U)(U^T C_xy C_yx U).
    half = psd_power(operator.basis_gram, 0.5)
    return root(_symmetric_eigenvalues(product(half, product(operator.dual_gram, half))))


@jax.custom_jvp
def _symmetric_eigenvalues(matrix: Array) -> Array:
    return jnp.linalg.eigvalsh(matrix)[::-1]


@_symmetric_eigenvalues.defjvp
def _symmetric_eigenvalues_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    values, vectors = jnp.linalg.eigh(primals[0])
    turned = product(vectors.T, product(tangents[0], vectors))
    return values[::-1], slopes(turned, _unresolved(values, jnp.ones_like(values), primals[0]))[
        ::-1
    ]


@jax.custom_jvp
def eigenpairs(matrix: Float[Array, "r r"]) -> tuple[Complex[Array, " r"], Complex[Array, "r r"]]:
    """Return eigenvalues by falling modulus, and unit eigenvectors in columns with real positive largest entries.

    Derivatives are dlambda_j = l_j^T dM w_j and dw_j = sum_i w_i l_i^T dM w_j / (lambda_j -
    lambda_i), plus a multiple of w_j that keeps the normalisation. They are not finite if
    eigenvalues coincide to rounding.

    Args:
        matrix: A square matrix, [r, r].

    References:
        Magnus (1985), On differentiating eigenvalues and eigenvectors, section 4.
    """
    if jax.default_backend() == "cpu":
        values, right = jnp.linalg.eig(matrix)
    else:  # for one small matrix the host is faster
        kind = jnp.result_type(matrix.dtype, jnp.complex64)
        shapes = (
            jax.ShapeDtypeStruct(matrix.shape[:1], kind),
            jax.ShapeDtypeStruct(matrix.shape, kind),
        )
        values, right = jax.pure_callback(_eig_on_host, shapes, matrix, vmap_method="expand_dims")
    # Moduli that differ by rounding count as equal, so that conjugate pairs stay adjacent.
    size = jnp.abs(values)
    size, real = snapped(size), snapped(values.real, jnp.max(size))
    order = jnp.lexsort((-values.imag, -real, -size))
    values, right = values[order], right[:, order]
    largest = jnp.take_along_axis(right, jnp.argmax(jnp.abs(right), 0)[None], 0)
    return values, right * (jnp.abs(largest) / jnp.where(largest == 0, 1.0, largest))


@eigenpairs.defjvp
def _eigenpairs_jvp(
    primals: tuple[Array], tangents: tuple[Array]
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    values, right = eigenpairs(primals[0])
    left = jnp.linalg.inv(right)
    turned = product(left, product(tangents[0].astype(right.dtype), right))
    unresolved = _unresolved(values, jnp.linalg.norm(left, axis=1), primals[0])
    step = product(right, couplings(turned, values[None] - values[:, None], unresolved))
    # The normalisation is kept: norm 1, and a real largest entry.
    largest = jnp.argmax(jnp.abs(right), 0)[None]
    turn = jnp.take_along_axis(step, largest, 0).imag / jnp.take_along_axis(right, largest, 0).real
    stretch = jnp.sum(right.conj() * step, 0).real[None]
    return (values, right), (slopes(turned, unresolved), step - right * (stretch + 1j * turn))


def _unresolved(values: Array, condition: Array, matrix: Array) -> Array:
    """Return True for pairs of eigenvalues that are closer than their perturbation by rounding."""
    noise = 64 * jnp.finfo(matrix.dtype).eps * jnp.linalg.norm(matrix) * condition
    near = jnp.abs(values[None] - values[:, None]) <= jnp.maximum(noise[None], noise[:, None])
    return near & ~jnp.eye(values.shape[0], dtype=bool)


def couplings(
    perturbation: Inexact[Array, "k r"], gap: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, "k r"]:
    """Return perturbation / gap, the change of eigenvectors j (columns) along i (rows), zero for i = j."""
    itself = jnp.eye(*gap.shape, dtype=bool)
    return jnp.where(
        itself, 0.0, refused(perturbation / jnp.where(itself | unresolved, 1.0, gap), unresolved)
    )


def slopes(
    perturbation: Inexact[Array, "k r"], unresolved: Bool[Array, "k r"]
) -> Inexact[Array, " r"]:
    """Return derivatives of eigenvalues j, the diagonal; not finite if coinciding ones are coupled."""
    coupled = jnp.where(unresolved, refused(perturbation, unresolved), 0.0)
    return jnp.diagonal(perturbation)[: perturbation.shape[1]] + jnp.sum(coupled, 0)


def _eig_on_host(matrix: Array | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, right = np.linalg.eig(np.asarray(matrix))
    kind = np.result_type(matrix.dtype, np.complex64)
    return values.astype(kind), right.astype(kind)
