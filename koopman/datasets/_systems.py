"""Duffing and Lorenz 63 flows, and the Ornstein-Uhlenbeck diffusion."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_non_negative, check_positive
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman.datasets._spectrum_type import ExactSpectrum, rows
from koopman.datasets._trajectories import run_trajectories, scan_trajectory, step_normals

SQRT_2 = math.sqrt(2.0)


@validated
def ornstein_uhlenbeck(
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    theta: Scalar = 1.0,
    sigma: Scalar = SQRT_2,
    time_step: Scalar = 0.1,
    initial: Float[Array | np.ndarray, "..."] | None = None,
) -> Float[Array, "*trajectories time 1"]:
    """Simulate trajectories of dX = -theta X dt + sigma dW.

    They are drawn from the exact transition density.

    x' = a x + sigma sqrt((1 - a^2) / (2 theta)) z with a = exp(-theta time_step) and z standard
    normal.

    Args:
        num_steps: Steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        num_trajectories: Batch size; None: no batch axis.
        theta: Rate of return, positive.
        sigma: Strength of the noise, 0 or more.
        time_step: Time between states, positive.
        initial: State [1], or [num_trajectories, 1]. None draws it from the invariant N(0, sigma^2
            / (2 theta)).

    References:
        Gillespie (1996), Exact numerical simulation of the Ornstein-Uhlenbeck process and its
        integral, eq. 1.9.
    """
    check_positive("theta", theta)
    check_non_negative("sigma", sigma)
    check_positive("time_step", time_step)

    def simulate(key, initial):
        dtype = initial.dtype
        rate = jnp.asarray(theta, dtype)
        elapsed = rate * jnp.asarray(time_step, dtype)
        # `expm1` keeps the digits of a short time step.
        variance = -jnp.expm1(-2 * elapsed) / (2 * rate)
        deviation = jnp.asarray(sigma, dtype) * jnp.sqrt(variance)
        kicks = deviation * step_normals(key, num_steps, 1, dtype)

        def advance(x, kick):
            decay = jnp.exp(-elapsed)
            return decay * x + kick

        return scan_trajectory(advance, initial, kicks)

    def draw_initial(key):
        rate = jnp.asarray(theta)
        deviation = jnp.asarray(sigma) / jnp.sqrt(2 * rate)
        return deviation * jax.random.normal(key, (1,))

    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, 1)


@validated
def ornstein_uhlenbeck_spectrum(
    *, theta: Scalar = 1.0, sigma: Scalar = SQRT_2, time_step: Scalar = 0.1, num_components: int = 4
) -> ExactSpectrum:
    """Return the spectrum of `ornstein_uhlenbeck`, computed on the host.

    Eigenvalues are exp(-k theta time_step). The k-th eigenfunction is He_k(x / s) / sqrt(k!), s^2 =
    sigma^2 / (2 theta), with the probabilists' polynomials, orthonormal in L2 of the invariant
    density N(0, s^2).

    Args:
        theta: Rate of return, positive.
        sigma: Strength of the noise, positive.
        time_step: Lag of the operator, positive.
        num_components: Number of eigenvalues, 1 or more, from k = 0.

    References:
        Pavliotis (2014), Stochastic processes and applications, section 4.4.
    """
    check_positive("theta", theta)
    check_positive("sigma", sigma)
    check_positive("time_step", time_step)
    count = check_count("num_components", num_components, minimum=1)
    degrees = np.arange(count)
    eigenvalues = np.exp(-degrees * float(theta) * float(time_step))
    scale = float(sigma) / math.sqrt(2 * float(theta))

    def functions(states):
        x = rows(states, 1)[:, 0] / scale
        columns = [np.ones_like(x), x]
        for k in degrees[2:]:
            polynomial = x * columns[-1] - math.sqrt(k - 1) * columns[-2]
            columns.append(polynomial / math.sqrt(k))  # normalised here, as factorials overflow
        return np.stack(columns[:count], axis=1)

    def density(states):
        x = rows(states, 1)[:, 0] / scale
        norm = scale * math.sqrt(2 * math.pi)
        return np.exp(-(x**2) / 2) / norm

    return ExactSpectrum(eigenvalues, functions, functions, density)


def rk4_trajectory(
    field: Callable[[Array, Array], Array],
    initial: Array,
    num_steps: int,
    time_step: Scalar,
    substeps: int,
) -> Float[Array, "time ..."]:
    """Return the solution of dx/dt = field(t, x) from t = 0.

    The scheme is the classical one of Runge and Kutta, of order four.

    Source: Hairer, Norsett and Wanner (1993), Solving ordinary differential equations I, table 1.2.
    """
    num_steps = check_count("num_steps", num_steps, minimum=1)
    substeps = check_count("substeps", substeps, minimum=1)
    check_positive("time_step", time_step)
    h = jnp.asarray(time_step, initial.dtype) / substeps
    half = h / 2

    def substep(state, index):
        # A sum over steps would accumulate rounding.
        t = h * index
        first = field(t, state)
        second = field(t + half, state + half * first)
        third = field(t + half, state + half * second)
        fourth = field(t + h, state + h * third)
        slopes = first + 2 * second + 2 * third + fourth
        return state + h / 6 * slopes, None

    def advance(state, step):
        indices = step * substeps + jnp.arange(substeps)
        following, _ = jax.lax.scan(substep, state, indices)
        return following

    return scan_trajectory(advance, initial, jnp.arange(num_steps))


@validated(finite=("alpha", "beta", "gamma", "delta", "omega"))
def duffing(
    num_steps: int,
    *,
    key: PRNGKey | None = None,
    num_trajectories: int | None = None,
    initial: Float[Array | np.ndarray, "..."] | None = None,
    time_step: Scalar = 0.01,
    substeps: int = 1,
    alpha: Scalar = 0.5,
    beta: Scalar = 0.0625,
    gamma: Scalar = 0.1,
    delta: Scalar = 2.5,
    omega: Scalar = 2.0,
) -> Float[Array, "*trajectories time 2"]:
    """Simulate trajectories (position, velocity) of the driven Duffing oscillator.

    x'' + delta x' + alpha x + beta x^3 = gamma cos(omega t)

    The drive starts at phase 0. Unless gamma is 0, the law depends on time, except between states
    recorded once per period 2 pi / omega.

    Args:
        num_steps: Recorded steps, 1 or more; time has length num_steps + 1.
        key: Key of initial states; not needed if `initial` is given.
        num_trajectories: Batch size; None: no batch axis.
        initial: State [2], or [num_trajectories, 2]. None draws it from N(0, I).
        time_step: Time between recorded states, positive.
        substeps: Runge-Kutta steps per recorded step, 1 or more.
        alpha: Linear stiffness.
        beta: Cubic stiffness.
        gamma: Amplitude of the drive.
        delta: Damping.
        omega: Angular frequency of the drive.
    """

    def field(t, state):
        x, velocity = state
        force = gamma * jnp.cos(omega * t) - alpha * x - beta * x**3
        acceleration = force - delta * velocity
        return jnp.stack([velocity, acceleration]).astype(state.dtype)

    def draw_initial(key):
        return jax.random.normal(key, (2,))

    def simulate(_, initial):
        return rk4_trajectory(field, initial, num_steps, time_step, substeps)

    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, 2)


@validated(finite=("sigma", "mu", "beta"))
def lorenz63(
    num_steps: int,
    *,
    key: PRNGKey | None = None,
    num_trajectories: int | None = None,
    initial: Float[Array | np.ndarray, "..."] | None = None,
    time_step: Scalar = 0.01,
    substeps: int = 1,
    sigma: Scalar = 10.0,
    mu: Scalar = 28.0,
    beta: Scalar = 8.0 / 3.0,
) -> Float[Array, "*trajectories time 3"]:
    """Simulate trajectories (x, y, z) of Lorenz's convection model.

    x' = sigma (y - x),  y' = x (mu - z) - y,  z' = x y - beta z

    Args:
        num_steps: Recorded steps, 1 or more; time has length num_steps + 1.
        key: Key of initial states; not needed if `initial` is given.
        num_trajectories: Batch size; None: no batch axis.
        initial: State [3], or [num_trajectories, 3]. None draws it from N((0, 0, mu - 1), 5^2 I),
            near but off the attractor.
        time_step: Time between recorded states, positive.
        substeps: Runge-Kutta steps per recorded step, 1 or more.
        sigma: Prandtl number.
        mu: Rayleigh number over its critical value.
        beta: Geometric factor.

    References:
        Lorenz (1963), Deterministic nonperiodic flow, eqs. 25-27.
    """

    def field(t, state):
        del t
        x, y, z = state
        dx = sigma * (y - x)
        dy = x * (mu - z) - y
        dz = x * y - beta * z
        return jnp.stack([dx, dy, dz]).astype(state.dtype)

    def draw_initial(key):
        # The attractor lies around the fixed points, at z = mu - 1.
        centre = jnp.zeros(3).at[2].set(mu - 1)
        return 5 * jax.random.normal(key, (3,)) + centre

    def simulate(_, initial):
        return rk4_trajectory(field, initial, num_steps, time_step, substeps)

    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, 3)
