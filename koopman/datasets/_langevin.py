"""Overdamped Langevin dynamics in a potential: trajectories and spectra."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from scipy.interpolate import CubicSpline
from scipy.linalg import eigh_tridiagonal

from dissociation._core.checks import check_count, check_non_negative, check_positive, fail
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from koopman.datasets._spectrum_type import ExactSpectrum, rows
from koopman.datasets._trajectories import run_trajectories, walk

SQRT_2 = math.sqrt(2.0)
CUT_OFF = 36.0  # in kT: exp(-36) is the epsilon of float64


@validated
def overdamped_langevin(
    potential: Callable[[Array], Array],
    num_steps: int,
    *,
    key: PRNGKey,
    initial: Float[Array | np.ndarray, "... d"],
    num_trajectories: int | None = None,
    friction: Scalar = 1.0,
    sigma: Scalar = SQRT_2,
    time_step: Scalar = 1e-3,
    substeps: int = 1,
) -> Float[Array, "*trajectories time d"]:
    """Simulate trajectories of dX = -grad V(X) / friction dt + sigma / friction dW.

    The scheme is Euler and Maruyama's. The invariant density is proportional to exp(-V / kT) with
    kT = sigma^2 / (2 friction), up to an error linear in `time_step / substeps`.

    Args:
        potential: V, from one state [d] to its energy, differentiable by JAX.
        num_steps: Recorded steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        initial: State [d], or [num_trajectories, d].
        num_trajectories: Batch size; None: no batch axis.
        friction: Positive.
        sigma: Strength of the noise, 0 or more.
        time_step: Time between recorded states, positive.
        substeps: Steps of the scheme per recorded step, 1 or more.

    References:
        Maruyama (1955), Continuous Markov processes and stochastic equations.
    """
    _check_potential(potential, initial)
    advance = _scheme(potential, friction, sigma, time_step, substeps)
    simulate = partial(walk, advance, num_steps)
    dimension = np.shape(initial)[-1]
    # Initial states are given, not drawn.
    return run_trajectories(simulate, lambda key: key, key, num_trajectories, initial, dimension)


def _check_potential(potential: Callable[[Array], Array], states: Array | np.ndarray) -> None:
    """Raise unless the potential returns one real number for one of the states."""
    shape = np.shape(states)[-1:]
    state = jax.ShapeDtypeStruct(shape, jnp.result_type(float))
    energy = jax.eval_shape(potential, state)
    is_single = getattr(energy, "shape", None) in ((), (1,))
    if not is_single or not jnp.issubdtype(energy.dtype, jnp.floating):
        fail("potential", f"give one real energy of a state {list(shape)}", f"{energy}")


def _scheme(
    potential: Callable[[Array], Array],
    friction: Scalar,
    sigma: Scalar,
    time_step: Scalar,
    substeps: int,
) -> Callable[[Array, Array], Array]:
    """Return the function of a state [d] and a key to the state after all substeps."""
    check_positive("friction", friction)
    check_non_negative("sigma", sigma)
    check_positive("time_step", time_step)
    substeps = check_count("substeps", substeps, minimum=1)
    step = time_step / substeps
    gradient = jax.grad(lambda x: jnp.sum(potential(x)))

    def advance(state, key):
        mobility = jnp.asarray(step / friction, state.dtype)
        deviation = jnp.asarray(sigma / friction * step**0.5, state.dtype)

        def substep(state, draw):
            drift = mobility * gradient(state)
            return state - drift + deviation * draw, None

        draws = jax.random.normal(key, (substeps, *state.shape), state.dtype)
        following, _ = jax.lax.scan(substep, state, draws)
        return following

    return advance


@validated
def langevin_spectrum(
    potential: Callable[[Array], Array],
    domain: tuple[float, float],
    *,
    friction: Scalar = 1.0,
    sigma: Scalar = SQRT_2,
    time_step: Scalar = 1e-3,
    num_components: int = 4,
    num_cells: int = 400,
) -> ExactSpectrum:
    """Return the spectrum over `time_step` of overdamped Langevin dynamics on a line, on the host.

    The generator is L f = D exp(V / kT) (exp(-V / kT) f')', D = sigma^2 / (2 friction^2), kT =
    sigma^2 / (2 friction).

    Args:
        potential: V, from a state [1] to its energy, written in jax.numpy.
        domain: Reflecting ends (a, b). The outer parts, 36 kT or more above the minimum, are cut
            off.
        friction: Positive.
        sigma: Strength of the noise, positive.
        time_step: Lag of the operator, positive.
        num_components: Number of eigenvalues, 1 or more.
        num_cells: Cells of the finer grid, even; at least eight per component.

    Returns:
        Real eigenvalues exp(time_step times an eigenvalue of L), falling from 1; eigenfunctions
        orthonormal in L2 of the invariant density, positive at the upper end; this density.

    Raises:
        ValueError: If the potential is undefined, does not return one number, or is too steep for
            the cells.

    References:
        Latorre, Metzner, Hartmann and Schuette (2011), Commun. Math. Sci. 9, 1051-1072.
    """
    check_positive("friction", friction)
    check_positive("sigma", sigma)
    check_positive("time_step", time_step)
    components = check_count("num_components", num_components, minimum=1)
    if check_count("num_cells", num_cells, minimum=8 * components) % 2:
        fail("num_cells", "be even", num_cells)
    _check_potential(potential, np.zeros(1))
    temperature = _temperature(friction, sigma)

    def energy(x):
        # In float64 even if x64 mode is off, and on known values even under a trace.
        with jax.enable_x64(True), jax.ensure_compile_time_eval():
            energies = jax.vmap(lambda state: jnp.sum(potential(state)))
            return np.asarray(energies(x.reshape(-1, 1))) / temperature

    a, b = _within_cut_off(energy, domain)
    # Richardson extrapolation from h and 2 h removes the error of order h^2.
    fine = _reversible_chain(energy, a, b, num_cells, components)
    coarse = _reversible_chain(energy, a, b, num_cells // 2, components)
    diffusion = temperature / float(friction)
    rates = diffusion * (4 * fine.rates - coarse.rates) / 3
    rates[0] = 0.0
    eigenvalues = np.exp(-float(time_step) * rates)

    def functions(states):
        x = rows(states, 1)
        return (4 * fine.at(x) - coarse.at(x)) / 3

    def density(states):
        x = rows(states, 1)
        return np.exp(-energy(x) - fine.log_partition)

    return ExactSpectrum(eigenvalues, functions, functions, density)


def _within_cut_off(
    energy: Callable[..., np.ndarray], domain: tuple[float, float]
) -> tuple[float, float]:
    """Return the interval from the first to the last point of the domain below the cut-off."""
    is_finite = len(domain) == 2 and np.all(np.isfinite(domain))
    if not (is_finite and domain[0] < domain[1]):
        fail("domain", "be two ends in ascending order", domain)
    grid = np.linspace(*domain, 4001)
    levels = energy(grid)
    is_undefined = np.isnan(levels) | (levels == -np.inf)
    if is_undefined.any() or not np.isfinite(levels).any():
        index = int(np.argmax(is_undefined))
        words = f"{levels[index]} at {grid[index]:.6g}"
        fail("potential", "have a value at every state of the domain", words)
    limit = np.min(levels) + CUT_OFF
    within = grid[levels < limit]
    if len(within) < 40:
        fail("domain", "be narrower: only a hundredth of it or less is within reach", domain)
    return float(within[0]), float(within[-1])


class _Chain(NamedTuple):
    """Reversible chain on cells."""

    rates: np.ndarray  # of decay, for D = 1
    functions: CubicSpline  # through the k functions
    log_partition: float

    def at(self, x: np.ndarray) -> np.ndarray:
        """Return the functions at x [n, 1], constant beyond the outermost centres."""
        ends = self.functions.x[[0, -1]]
        return self.functions(np.clip(x[:, 0], *ends))


def _reversible_chain(
    energy: Callable[..., np.ndarray], a: float, b: float, cells: int, components: int
) -> _Chain:
    """Discretise L with D = 1 by finite volumes, `energy` in units of kT."""
    edges, h = np.linspace(a, b, cells + 1, retstep=True)
    centres = (edges[1:] + edges[:-1]) / 2
    cell = energy(centres)
    edge = energy(edges[1:-1])
    # Jumps between neighbouring cells have rates D / h^2 exp((V_cell - V_edge) / kT). The chain is
    # reversible, so a similarity by the root of its density makes the matrix symmetric.
    leaving = np.zeros(cells)
    with np.errstate(all="ignore"):  # values that are not finite raise below
        leaving[:-1] += np.exp(cell[:-1] - edge)
        leaving[1:] += np.exp(cell[1:] - edge)
        middle = (cell[1:] + cell[:-1]) / 2
        between = -np.exp(middle - edge)
    is_finite = np.isfinite(leaving).all() and np.isfinite(between).all()
    if not is_finite:
        requirement = "rise and fall by less than 700 kT between neighbouring cells"
        fail(
            "potential",
            requirement,
            "a steeper wall",
            "Choose a `domain` without it, or more cells",
        )
    leading = (0, components - 1)
    rates, vectors = eigh_tridiagonal(
        leaving / h**2, between / h**2, select="i", select_range=leading
    )

    # Behind a high barrier, vectors of nearly equal rates are mixed. The stationary one is known.
    lowest = np.min(cell)
    weights = np.exp((lowest - cell) / 2)
    stationary = weights / np.linalg.norm(weights)
    nearest = np.argmax(np.abs(stationary @ vectors))
    excited = np.delete(vectors, nearest, 1)
    vectors, _ = np.linalg.qr(np.column_stack([stationary, excited]))

    # A vector of norm 1 over the root of density times h is a function of norm 1.
    partition = np.sum(np.exp(lowest - cell)) * h
    scale = np.sqrt(partition / h * np.exp(cell - lowest))
    functions = vectors * scale[:, None]
    functions = functions * np.sign(functions[-1])[None]
    log_partition = np.log(partition) - lowest
    return _Chain(rates, CubicSpline(centres, functions), log_partition)


def prinz_potential(x: Float[Array | np.ndarray, "..."]) -> Float[Array, "..."]:
    """Return the energy of four wells on a line.

    V(x) = 4 (x^8 + 0.8 exp(-80 x^2) + 0.2 exp(-80 (x - 0.5)^2) + 0.5 exp(-40 (x + 0.5)^2))

    Source: Prinz, Wu, Sarich, Keller, Senne, Held, Chodera, Schuette and Noe (2011), Markov models
    of molecular kinetics: generation and validation, section III.
    """
    x = jnp.asarray(x)
    centre = 0.8 * jnp.exp(-80 * x**2)
    upper = 0.2 * jnp.exp(-80 * (x - 0.5) ** 2)
    lower = 0.5 * jnp.exp(-40 * (x + 0.5) ** 2)
    bumps = centre + upper + lower
    return 4 * (x**8 + bumps)


@validated
def prinz_langevin(
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    friction: Scalar = 0.1,
    sigma: Scalar = SQRT_2,
    time_step: Scalar = 1e-4,
    substeps: int = 10,
    initial: Float[Array | np.ndarray, "..."] | None = None,
) -> Float[Array, "*trajectories time 1"]:
    """Simulate trajectories of `overdamped_langevin` in a four-well potential, from equilibrium.

    The potential is that of Prinz et al. (2011).

    With the default friction kT = 10 is above every barrier; with friction 1, kT = 1 and the wells
    are metastable.

    Args:
        num_steps: Recorded steps, 1 or more; time has length num_steps + 1.
        key: Random key.
        num_trajectories: Batch size; None: no batch axis.
        friction: Positive.
        sigma: Strength of the noise, positive.
        time_step: Time between recorded states, positive.
        substeps: Steps of the scheme per recorded step, 1 or more. By default the slowest rate is
            0.3 % too fast, with one substep 4.3 %.
        initial: State [1], or [num_trajectories, 1]. None draws it from the invariant density.
    """
    check_positive("sigma", sigma)
    advance = _scheme(prinz_potential, friction, sigma, time_step, substeps)
    simulate = partial(walk, advance, num_steps)

    def draw_initial(key):
        temperature = sigma**2 / (2 * jnp.asarray(friction))
        edge = _prinz_edge(temperature)
        # On a line, the inverse of the cumulative density samples exactly up to the grid.
        grid = jnp.linspace(-edge, edge, 4097)
        density = jnp.exp(-prinz_potential(grid) / temperature)
        areas = (density[1:] + density[:-1]) / 2
        sums = jnp.cumsum(areas)
        cumulative = jnp.concatenate([jnp.zeros(1), sums]) / sums[-1]
        fraction = jax.random.uniform(key, (1,))
        return jnp.interp(fraction, cumulative, grid)

    return run_trajectories(simulate, draw_initial, key, num_trajectories, initial, 1)


@validated
def prinz_spectrum(
    *,
    friction: Scalar = 0.1,
    sigma: Scalar = SQRT_2,
    time_step: Scalar = 1e-4,
    num_components: int = 4,
    num_cells: int = 400,
) -> ExactSpectrum:
    """Return the spectrum of `prinz_langevin`, by `langevin_spectrum`.

    Eigenvalues are accurate to about 1e-8.

    Args:
        friction: Positive.
        sigma: Strength of the noise, positive.
        time_step: Lag of the operator, positive.
        num_components: Number of eigenvalues, 1 or more.
        num_cells: Cells of the finer grid, even; at least eight per component.
    """
    check_positive("friction", friction)
    temperature = _temperature(friction, sigma)
    edge = float(_prinz_edge(temperature))
    return langevin_spectrum(
        prinz_potential,
        (-edge, edge),
        friction=friction,
        sigma=sigma,
        time_step=time_step,
        num_components=num_components,
        num_cells=num_cells,
    )


def _prinz_edge(temperature: Any) -> Any:
    """Return the state at which 4 x^8 reaches the cut-off, beyond the bumps."""
    return (CUT_OFF * temperature / 4 + 1) ** 0.125


def _temperature(friction: Scalar, sigma: Scalar) -> float:
    return float(sigma) ** 2 / (2 * float(friction))
