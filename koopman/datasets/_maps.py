"""Noisy logistic map, with an evolution operator of finite rank."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_count
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from koopman.datasets._exact import ExactSpectrum, conjugate_order, rows
from koopman.datasets._trajectories import run_trajectories, walk

Points = Float[Array | np.ndarray, "n 1"]


@validated
def logistic_map(
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    order: int = 20,
    initial: Float[Array | np.ndarray, "..."] | None = None,
) -> Float[Array, "*trajectories time 1"]:
    """Simulate trajectories of the logistic map with trigonometric noise on the circle [0, 1).

    x' = (4 x (1 - x) + xi) mod 1, with the density of xi proportional to cos(pi xi)^(2 order) on
    [-1/2, 1/2].

    Args:
        num_steps: Steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        num_trajectories: Batch size; None: no batch axis.
        order: Noise order M, 1 or more, for a standard deviation of about 1 / (pi sqrt(2 M)).
        initial: State [1], or [num_trajectories, 1]. None draws it from the invariant distribution,
            to rounding.

    References:
        Ostruszka, Pakonski, Slomczynski and Zyczkowski (2000), Dynamical entropy for systems with
        stochastic perturbation, section IV.

    >>> logistic_map(100, key=jax.random.key(0), num_trajectories=3).shape
    (3, 101, 1)
    """
    order = check_count("order", order, minimum=1)

    def advance(state: Array, key: Array) -> Array:
        noise = logistic_noise(key, (1,), order=order).astype(state.dtype)
        following = jnp.mod(4 * state * (1 - state) + noise, 1)
        # The remainder of a tiny negative number rounds to 1.
        return jnp.where(following < 1, following, 0)

    def draw_initial(key: Array) -> Array:
        key_uniform, key_walk = jax.random.split(key)
        # After 100 steps the influence of the start is below rounding.
        return walk(advance, 100, key_walk, jax.random.uniform(key_uniform, (1,)))[-1]

    return run_trajectories(
        partial(walk, advance, num_steps), draw_initial, key, num_trajectories, initial, 1
    )


def logistic_noise(key: PRNGKey, shape: tuple[int, ...], *, order: int) -> Float[Array, "..."]:
    """Draw from the density proportional to cos(pi xi)^(2 order) on [-1/2, 1/2]."""
    key_normal, key_pairs = jax.random.split(key)
    # arctan(z_0 / |(z_1, ..., z_nu)|) / pi, nu = 2 order + 1, has this density, since sqrt(nu)
    # times the fraction is Student's t. Exponential draws replace pairs of squares. Rejection would
    # take seconds to compile.
    z = jax.random.normal(key_normal, (*shape, 2))
    pairs = jnp.sum(jax.random.exponential(key_pairs, (*shape, order)), axis=-1)
    return jnp.arctan2(z[..., 0], jnp.sqrt(z[..., 1] ** 2 + 2 * pairs)) / math.pi


@validated
def logistic_features(states: Points, order: int = 20) -> Float[Array, "n features"]:
    """Return trigonometric features [n, 2 M + 1] of s = 4 x (1 - x), in whose span the evolution operator is exact.

    [1, sqrt(2) cos(2 pi s), ..., sqrt(2) cos(2 pi M s), sqrt(2) sin(2 pi s), ..., sqrt(2) sin(2 pi
    M s)]

    Eigenfunctions of nonzero eigenvalues need only the first M + 1 features.

    Args:
        states: [n, 1], in [0, 1].
        order: Noise order M, 1 or more.
    """
    order = check_count("order", order, minimum=1)
    states = jnp.asarray(states)
    # The transition density is a trigonometric polynomial of degree M in s.
    angle = (
        2
        * math.pi
        * (4 * states * (1 - states))
        * jnp.arange(1, order + 1, dtype=states.dtype)[None, :]
    )
    waves = jnp.concatenate([jnp.cos(angle), jnp.sin(angle)], axis=1)
    return jnp.concatenate([jnp.ones_like(states), math.sqrt(2) * waves], axis=1)


@validated
def logistic_spectrum(order: int = 20, *, num_components: int | None = None) -> ExactSpectrum:
    """Return the spectrum of the evolution operator of `logistic_map`, on the host.

    With b_n the Fourier basis of [0, 1], S(x) = 4 x (1 - x) and g_n = C(2 M, M + n) / C(2 M, M) the
    Fourier coefficients of the noise, E b_m(S) = sum_n g_n <b_n, b_m(S)> b_n(S). With M = 20
    eigenvalues are accurate to 3e-12, and eigenfunctions of eigenvalues below 1e-8 are unusable.

    Args:
        order: Noise order M, 1 or more.
        num_components: Number of the M + 1 nonzero eigenvalues; None is all.

    Returns:
        Eigenvalues, right eigenfunctions of norm 1, left ones biorthonormal to them, and the
        invariant density.

    References:
        Ostruszka et al. (2000), see `logistic_map`, section IV.
    """
    order = check_count("order", order, minimum=1)
    kept = (
        order + 1
        if num_components is None
        else min(order + 1, check_count("num_components", num_components))
    )
    # Gauss-Legendre sums of this size converge to rounding.
    nodes, weights = np.polynomial.legendre.leggauss(100 + 20 * order)
    nodes, weights = (nodes[:, None] + 1) / 2, weights / 2  # on [0, 1]
    # S is even about 1/2, so rows of sines vanish: M eigenvalues are zero, and the others are those
    # of the cosines.
    before, after = _fourier(nodes, order), _fourier(_parabola(nodes), order)
    overlaps = (weights[:, None] * before[:, : order + 1]).T @ after  # [cosines, all]
    central = math.comb(2 * order, order)
    noise = np.array([math.comb(2 * order, order + n) / central for n in range(order + 1)])

    # A diagonal similarity makes the matrix graded, which keeps small eigenvalues accurate.
    root = np.sqrt(noise)
    values, vectors = np.linalg.eig(root[:, None] * overlaps[:, : order + 1] * root[None, :])
    chosen = conjugate_order(values)[:kept]
    values = values[chosen]
    right = root[:, None] * vectors[:, chosen]
    largest = right[np.argmax(np.abs(right), axis=0), np.arange(kept)]
    right = right * (np.abs(largest) / largest)[None, :]
    left_cosines = np.linalg.inv(vectors).T[:, chosen] * root[:, None]
    left_sines = noise[1:, None] * (overlaps[:, order + 1 :].T @ left_cosines) / values[None, :]
    left = np.concatenate([left_cosines, left_sines])

    invariant = (left[:, 0] / left[0, 0]).real
    density = before @ invariant
    right /= np.sqrt((weights * density) @ np.abs(after[:, : order + 1] @ right) ** 2)[None, :]
    left /= np.sum(weights[:, None] * (before @ left) * (after[:, : order + 1] @ right), axis=0)[
        None, :
    ]

    def right_functions(states: Any) -> np.ndarray:
        return _fourier(_parabola(rows(states, 1)), order)[:, : order + 1] @ right

    def density_function(states: Any) -> np.ndarray:
        return _fourier(rows(states, 1), order) @ invariant

    def left_functions(states: Any) -> np.ndarray:
        return (_fourier(rows(states, 1), order) @ left).conj() / density_function(states)[:, None]

    return ExactSpectrum(values, right_functions, left_functions, density_function)


def _parabola(x: np.ndarray) -> np.ndarray:
    return 4 * x * (1 - x)


def _fourier(x: np.ndarray, order: int) -> np.ndarray:
    """Return the orthonormal real Fourier basis of [0, 1] at x [n, 1], [n, 2 order + 1], cosines before sines."""
    angle = 2 * np.pi * x * np.arange(1, order + 1)[None, :]
    return np.concatenate(
        [np.ones((len(x), 1)), math.sqrt(2) * np.cos(angle), math.sqrt(2) * np.sin(angle)], axis=1
    )
