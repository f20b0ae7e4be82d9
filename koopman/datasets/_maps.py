"""Noisy logistic map, with an evolution operator of finite rank."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_count
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from koopman.datasets._spectrum_type import ExactSpectrum, conjugate_order, rows
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

    def advance(state, key):
        noise = logistic_noise(key, (1,), order=order).astype(state.dtype)
        image = 4 * state * (1 - state)
        following = jnp.mod(image + noise, 1)
        # The remainder of a tiny negative number rounds to 1.
        return jnp.where(following < 1, following, 0)

    def draw_initial(key):
        key_uniform, key_walk = jax.random.split(key)
        start = jax.random.uniform(key_uniform, (1,))
        # After 100 steps the influence of the start is below rounding.
        states = walk(advance, 100, key_walk, start)
        return states[-1]

    simulate = partial(walk, advance, num_steps)
    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, 1)


def logistic_noise(key: PRNGKey, shape: tuple[int, ...], *, order: int) -> Float[Array, "..."]:
    """Draw from the density proportional to cos(pi xi)^(2 order) on [-1/2, 1/2]."""
    key_normal, key_pairs = jax.random.split(key)
    # arctan(z_0 / |(z_1, ..., z_nu)|) / pi, nu = 2 order + 1, has this density, since sqrt(nu)
    # times the fraction is Student's t. Exponential draws replace pairs of squares. Rejection would
    # take seconds to compile.
    z = jax.random.normal(key_normal, (*shape, 2))
    pairs = jax.random.exponential(key_pairs, (*shape, order))
    square = z[..., 1] ** 2 + 2 * jnp.sum(pairs, axis=-1)
    return jnp.arctan2(z[..., 0], jnp.sqrt(square)) / math.pi


@validated
def logistic_features(states: Points, order: int = 20) -> Float[Array, "n features"]:
    """Return trigonometric features [n, 2 M + 1] of s = 4 x (1 - x).

    [1, sqrt(2) cos(2 pi s), ..., sqrt(2) cos(2 pi M s), sqrt(2) sin(2 pi s), ..., sqrt(2) sin(2 pi
    M s)]

    In their span the evolution operator is exact. Eigenfunctions of nonzero eigenvalues need only
    the first M + 1 features.

    Args:
        states: [n, 1], in [0, 1].
        order: Noise order M, 1 or more.
    """
    order = check_count("order", order, minimum=1)
    states = jnp.asarray(states)
    # The transition density is a trigonometric polynomial of degree M in s.
    degrees = jnp.arange(1, order + 1, dtype=states.dtype)
    s = 4 * states * (1 - states)
    angle = 2 * math.pi * s * degrees[None, :]
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
    num_kept = order + 1
    if num_components is not None:
        num_kept = min(num_kept, check_count("num_components", num_components))
    # Gauss-Legendre sums of this size converge to rounding.
    nodes, weights = np.polynomial.legendre.leggauss(100 + 20 * order)
    nodes = (nodes[:, None] + 1) / 2  # on [0, 1]
    weights = weights / 2
    # S is even about 1/2, so rows of sines vanish: M eigenvalues are zero, and the others are those
    # of the cosines.
    cosines = slice(order + 1)
    sines = slice(order + 1, None)
    waves = _fourier(nodes, order)
    image_waves = _fourier(_parabola(nodes), order)
    image_cosines = image_waves[:, cosines]
    overlaps = (weights[:, None] * waves[:, cosines]).T @ image_waves  # [cosines, all]
    central = math.comb(2 * order, order)
    noise = np.array([math.comb(2 * order, order + n) / central for n in range(order + 1)])

    # A diagonal similarity makes the matrix graded, which keeps small eigenvalues accurate.
    root = np.sqrt(noise)
    graded = root[:, None] * overlaps[:, cosines] * root[None, :]
    values, vectors = np.linalg.eig(graded)
    chosen = conjugate_order(values)[:num_kept]
    values = values[chosen]
    right_vectors = root[:, None] * vectors[:, chosen]
    largest_rows = np.argmax(np.abs(right_vectors), axis=0)
    largest = right_vectors[largest_rows, np.arange(num_kept)]
    right_vectors = right_vectors * (np.abs(largest) / largest)[None, :]
    inverse = np.linalg.inv(vectors).T
    left_cosines = inverse[:, chosen] * root[:, None]
    left_images = overlaps[:, sines].T @ left_cosines
    left_sines = noise[1:, None] * left_images / values[None, :]
    left_vectors = np.concatenate([left_cosines, left_sines])

    # Norms and products in L2 of the invariant density, by sums over nodes.
    invariant = (left_vectors[:, 0] / left_vectors[0, 0]).real
    density = waves @ invariant
    squares = np.abs(image_cosines @ right_vectors) ** 2
    norms = np.sqrt((weights * density) @ squares)
    right_vectors /= norms[None, :]
    weighted = weights[:, None] * (waves @ left_vectors)
    products = weighted * (image_cosines @ right_vectors)
    left_vectors /= np.sum(products, axis=0)[None, :]

    def right_functions(states):
        image = _parabola(rows(states, 1))
        return _fourier(image, order)[:, cosines] @ right_vectors

    def density_function(states):
        return _fourier(rows(states, 1), order) @ invariant

    def left_functions(states):
        functions = _fourier(rows(states, 1), order) @ left_vectors
        return functions.conj() / density_function(states)[:, None]

    return ExactSpectrum(values, right_functions, left_functions, density_function)


def _parabola(x: np.ndarray) -> np.ndarray:
    return 4 * x * (1 - x)


def _fourier(x: np.ndarray, order: int) -> np.ndarray:
    """Return the orthonormal real Fourier basis of [0, 1] at x [n, 1], [n, 2 order + 1].

    Cosines come before sines.
    """
    degrees = np.arange(1, order + 1)
    angle = 2 * np.pi * x * degrees[None, :]
    cosines = math.sqrt(2) * np.cos(angle)
    sines = math.sqrt(2) * np.sin(angle)
    return np.concatenate([np.ones((len(x), 1)), cosines, sines], axis=1)
