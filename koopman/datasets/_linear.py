"""Linear systems with Gaussian noise, in one regime or several, and their spectra."""

from collections.abc import Callable
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.linalg import solve_discrete_lyapunov

from dissociation._core.checks import (
    check_classes,
    check_count,
    check_finite,
    check_non_negative,
    fail,
    is_traced,
)
from dissociation._core.types import Count, PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman.datasets._spectrum_type import ExactSpectrum, conjugate_order, rows
from koopman.datasets._trajectories import (
    run_trajectories,
    scan_trajectory,
    step_keys,
    step_normals,
)

Matrix = Float[Array | np.ndarray, "d d"]
Matrices = Float[Array | np.ndarray, "regimes d d"]
Transition = Float[Array | np.ndarray, "regimes regimes"]
Noise = Float[Array | np.ndarray, "d sources"] | Scalar
KnownMatrix = Float[np.ndarray, "d d"]
KnownNoise = Float[np.ndarray, "d sources"] | float | int


@validated(finite=("matrix",))
def linear_system(
    matrix: Matrix,
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    noise: Noise = 0.0,
    initial: Float[Array | np.ndarray, "..."] | None = None,
) -> Float[Array, "*trajectories time d"]:
    """Simulate trajectories of x' = A x + B z with z standard normal, independent at every step.

    Args:
        matrix: A, [d, d].
        num_steps: Steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        num_trajectories: Batch size; None: no batch axis.
        noise: B, [d, sources], or a standard deviation for B = noise I.
        initial: State [d], or [num_trajectories, d]. None draws it from N(0, I).
    """
    matrix = jnp.asarray(matrix)
    d = len(matrix)
    dtype = matrix.dtype
    sources = _noise_matrix(noise, d, dtype)

    def simulate(key, initial):
        draws = step_normals(key, num_steps, sources.shape[1], dtype)
        kicks = jnp.matmul(draws, sources.T, precision="highest")

        def advance(state, kick):
            return jnp.matmul(matrix, state, precision="highest") + kick

        return scan_trajectory(advance, initial.astype(dtype), kicks)

    draw_initial = _standard_normal(d, dtype)
    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, d)


def stationary_covariance(matrix: KnownMatrix, noise: KnownNoise) -> Float[np.ndarray, "d d"]:
    """Return the stationary covariance C of `linear_system`, C = A C A^T + B B^T."""
    a = np.asarray(matrix, np.float64)
    radius = np.max(np.abs(np.linalg.eigvals(a)))
    if not radius < 1:
        requirement = "have all eigenvalues inside the unit circle to be stationary"
        fail("matrix", requirement, f"spectral radius {radius:.6g}")
    b = _noise_matrix(noise, len(a), np.float64, np)
    return solve_discrete_lyapunov(a, b @ b.T)


@validated(finite=("matrix",))
def linear_spectrum(matrix: KnownMatrix, degree: int, *, noise: KnownNoise = 0.0) -> ExactSpectrum:
    """Return the spectrum of the evolution operator of `linear_system` on polynomials.

    It is computed on the host. With A^T w_i = lambda_i w_i the eigenvalues are all products of up
    to `degree` lambda_i. Eigenfunctions are products of the w_i . x without noise, and with noise
    the coefficients of t^k in exp(w . x - w . C w / 2), w = sum_i t_i w_i, with C the stationary
    covariance.

    Args:
        matrix: A, [d, d]; with noise, stable. If it is not diagonalisable, eigenfunctions are
            missing.
        degree: Highest degree, 0 or more.
        noise: B, [d, sources], or a standard deviation.

    Returns:
        All C(d + degree, degree) eigenvalues; right eigenfunctions, of which those of degree one
        have variance one under the stationary distribution (or |w_i| = 1 in directions without
        noise) and others are not scaled; the stationary density, if the noise reaches every
        direction.

    Raises:
        ValueError: If there is noise and `matrix` is not stable.

    References:
        Budisic, Mohr and Mezic (2012), Applied Koopmanism, section II. Metafune, Pallara and Priola
        (2002), Spectrum of Ornstein-Uhlenbeck operators in L^p spaces, theorem 3.1 (continuous
        time).
    """
    degree = check_count("degree", degree)
    a = np.asarray(matrix, np.float64)
    d = len(a)
    sources = _noise_matrix(noise, d, np.float64, np)
    values, w = np.linalg.eig(a.T)
    covariance = np.zeros((d, d))
    density = None
    if np.any(sources):
        covariance = stationary_covariance(a, noise)
        variance = np.einsum("ai,ab,bi->i", w.conj(), covariance, w).real
        is_moved = variance > 1e-14 * np.trace(covariance)
        # Directions without noise keep |w_i| = 1.
        deviation = np.sqrt(np.where(is_moved, variance, 1.0))
        w = w / deviation[None, :]
        if np.linalg.matrix_rank(covariance) == d:
            density = _normal_density(covariance)
    c = w.T @ covariance @ w

    factors: list[Any] = []
    for n in range(degree + 1):
        factors += combinations_with_replacement(range(d), n)
    products = np.array([np.prod(values[list(term)]) for term in factors])
    order = conjugate_order(products)

    def right_functions(states):
        # Hermite polynomials of u_i = w_i . x with c_ij = w_i . C w_j:
        # H_0 = 1, H_(k + e_i) = u_i H_k - sum_j k_j c_ij H_(k - e_j).
        u = rows(states, d) @ w
        hermite = {(): np.ones(len(u), u.dtype)}
        for term in factors[1:]:
            i = term[0]
            lower = term[1:]
            polynomial = u[:, i] * hermite[lower]
            for position, j in enumerate(lower):
                lowest = lower[:position] + lower[position + 1 :]
                polynomial = polynomial - c[i, j] * hermite[lowest]
            hermite[term] = polynomial
        return np.stack([hermite[factors[i]] for i in order], axis=1)

    return ExactSpectrum(products[order], right_functions, None, density)


def _normal_density(covariance: np.ndarray) -> Callable[..., np.ndarray]:
    """Return the density of a centred normal distribution."""
    root = np.linalg.cholesky(covariance)
    d = len(root)
    determinant = np.prod(np.diag(root))
    scale = (2 * np.pi) ** (d / 2) * determinant

    def density(states):
        white = np.linalg.solve(root, rows(states, d).T)
        squares = np.sum(white**2, axis=0)
        return np.exp(-0.5 * squares) / scale

    return density


class RegimeTrajectory(NamedTuple):
    """Trajectories of `regime_switching_var`.

    Attributes:
        states: States, [time, d] or [trajectories, time, d].
        regimes: Regime of the step that follows each state, [time] or [trajectories, time].
    """

    states: Float[Array, "*trajectories time d"]
    regimes: Int[Array, "*trajectories time"]


@validated(finite=("matrices",))
def regime_switching_var(
    matrices: Matrices,
    transition: Transition,
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    noise: Scalar = 0.0,
    initial: Float[Array | np.ndarray, "..."] | None = None,
    initial_regime: Count = 0,
) -> RegimeTrajectory:
    """Simulate trajectories of a vector autoregression whose matrix follows a Markov chain.

    x' = A_s x + noise z with z standard normal; then s' = j with probability P[s, j].

    Args:
        matrices: The A_s, [regimes, d, d].
        transition: P, [regimes, regimes], rows that sum to 1.
        num_steps: Steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        num_trajectories: Batch size; None: no batch axis.
        noise: Standard deviation of the noise in every direction, 0 or more.
        initial: State [d], or [num_trajectories, d]. None draws it from N(0, I).
        initial_regime: Regime of the first step, from 0.
    """
    check_non_negative("noise", noise)
    _check_stochastic(transition)
    matrices = jnp.asarray(matrices)
    transition = jnp.asarray(transition)
    regimes, d = matrices.shape[:2]
    dtype = matrices.dtype
    if not is_traced(initial_regime) and not 0 <= initial_regime < regimes:
        fail("initial_regime", f"be one of the regimes 0 to {regimes - 1}", initial_regime)

    def step(carry, key):
        state, regime = carry
        key_noise, key_regime = jax.random.split(key)
        draw = jax.random.normal(key_noise, (d,), dtype)
        kick = jnp.asarray(noise, dtype) * draw
        following = jnp.matmul(matrices[regime], state, precision="highest") + kick
        logits = jnp.log(transition[regime])
        chosen = jax.random.categorical(key_regime, logits).astype(regime.dtype)
        carry = (following, chosen)
        return carry, carry

    def simulate(key, initial):
        state = initial.astype(dtype)
        regime = jnp.asarray(initial_regime, int)
        keys = step_keys(key, num_steps)
        _, (states, modes) = jax.lax.scan(step, (state, regime), keys)
        states = jnp.concatenate([state[None], states])
        modes = jnp.concatenate([regime[None], modes])
        return RegimeTrajectory(states, modes)

    draw_initial = _standard_normal(d, dtype)
    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, d)


@validated(finite=("matrices",))
def regime_switching_spectrum(matrices: Matrices, transition: Transition) -> ExactSpectrum:
    """Return the spectrum of `regime_switching_var` on functions that are affine in the state.

    It is computed on the host. f(x, s) = b_s + c_s . x becomes b'_s = sum_j P_sj b_j and c'_s =
    A_s^T sum_j P_sj c_j, for any noise. Eigenvalues are those of P and of the blocks P_sj A_s^T.

    Args:
        matrices: The A_s, [regimes, d, d].
        transition: P, [regimes, regimes].

    Returns:
        All `regimes` (1 + d) eigenvalues, and right eigenfunctions of states [n, d] and regimes
        [n].

    References:
        Costa, Fragoso and Marques (2005), Discrete-time Markov jump linear systems, section 3.2.
    """
    _check_stochastic(transition)
    a = np.asarray(matrices, np.float64)
    p = np.asarray(transition, np.float64)
    regimes, d = a.shape[:2]
    size = regimes * d
    blocks = np.einsum("sj,sab->sbja", p, a).reshape(size, size)
    chain_values, offsets = np.linalg.eig(p)
    block_values, slopes = np.linalg.eig(blocks)
    values = np.concatenate([chain_values, block_values])
    order = conjugate_order(values)
    slopes = slopes.reshape(regimes, d, -1)

    @validated
    def right_functions(
        states: Float[Array | np.ndarray, "n d"], at: Int[Array | np.ndarray, " n"]
    ) -> np.ndarray:
        x = rows(states, d)
        at = np.asarray(at)
        check_classes("at", at, regimes)
        linear = np.einsum("nd,ndk->nk", x, slopes[at])
        functions = np.concatenate([offsets[at], linear], axis=1)
        return functions[:, order]

    return ExactSpectrum(values[order], right_functions)


def _noise_matrix(noise: Any, d: int, dtype: Any, xp: Any = jnp) -> Any:
    """Return B as a matrix [d, sources]."""
    if np.ndim(noise) == 2:
        check_finite("noise", noise)
        return xp.asarray(noise, dtype)
    check_non_negative("noise", noise)
    return xp.asarray(noise, dtype) * xp.eye(d, dtype=dtype)


def _standard_normal(d: int, dtype: Any) -> Callable[[Array], Array]:
    return lambda key: jax.random.normal(key, (d,), dtype)


def _check_stochastic(transition: Transition) -> None:
    """Raise unless the known rows of a transition matrix are probabilities."""
    check_non_negative("transition", transition)
    if is_traced(transition):
        return
    sums = np.sum(np.asarray(transition), axis=1)
    if not np.allclose(sums, 1, atol=1e-5):
        fail("transition", "have rows that sum to 1", sums)
