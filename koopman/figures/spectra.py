"""Figure `spectra`: estimated against exact spectra of simulated systems."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array

from dissociation import bmap, figures, plotting
from dissociation._core import checks
from dissociation.figures import AnyMeter, Cache, CacheFolder, padded
from koopman import (
    RBF,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    datasets,
    decompose,
    fit,
    lagged_pairs,
    right_eigenfunctions,
)
from koopman.figures._spectra_drawing import draw, without_conjugates

__all__ = ["Config", "compute", "draw"]

STEM = "spectra"
SHOWS = "Estimated against exact eigenvalues and eigenfunctions of systems whose spectra are known."

SYSTEMS = ("logistic", "ornstein_uhlenbeck", "prinz")

ESTIMATORS = {
    "ridge": "ridge",
    "pcr": "principal components",
    "reduced_rank": "reduced rank",
    "nystroem": "Nystr\u00f6m reduced rank",
}
"""Names of the estimators in the figure, in the order of the legend."""

MAX_RANK = 6
"""Largest rank of the operators, and least number of centres."""


class System(NamedTuple):
    """System with a known spectrum, and its observation.

    Attributes:
        label: Name in the figure.
        sample: Function from a number of transitions and a key to a trajectory, [time, 1].
        features: Function from states [n, 1] to features [n, d].
        exact: Exact spectrum at the lag.
        lag: Steps from x to y.
        rank: Rank of the truncated estimators.
        compared: Number of exact eigenvalues to compare with, without the trivial one.
        length_scale: Length scale of the Nystroem estimator's RBF kernel.
        grid: States at which an eigenfunction is drawn, [points].
    """

    label: str
    sample: Callable[[int, Array], Array]
    features: Callable[[Array], Array]
    exact: datasets.ExactSpectrum
    lag: int
    rank: int
    compared: int
    length_scale: float
    grid: np.ndarray


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of simulations and estimators."""

    num_trajectories: int = 20
    """Independent trajectories of every length."""
    lengths: tuple[int, ...] = (1000, 3000, 10_000, 30_000, 100_000)
    """Transitions in a trajectory, ascending, from 100 to 1e8."""
    alpha: float = 1e-6
    """Regularisation, up to 1e6."""
    num_centres: int = 50
    """Centres of the Nystroem estimator, spread evenly over the grid of states."""
    systems: tuple[str, ...] = SYSTEMS
    """Systems to simulate."""
    order: int = 20
    """Order of the logistic map's noise; its operator is exact on 2 * order + 1 features."""

    def __post_init__(self):
        checks.check_count("num_trajectories", self.num_trajectories, minimum=1)
        # Five features at least, and quadrature of few thousand nodes.
        checks.check_count("order", self.order, minimum=2, maximum=200)
        checks.check_count("num_centres", self.num_centres, minimum=MAX_RANK, maximum=5000)
        for length in self.lengths:
            checks.check_count("lengths", length, minimum=100, maximum=10**8)
        checks.check_positive("alpha", self.alpha)
        if self.alpha > 1e6:
            wanted_range = "be at most 1e6, for features with mean squares of one"
            checks.fail("alpha", wanted_range, self.alpha)
        checks.check_distinct("lengths", self.lengths)
        if list(self.lengths) != sorted(self.lengths):
            checks.fail("lengths", "be ascending, because rates are of the last one", self.lengths)
        checks.check_distinct("systems", self.systems)
        for name in self.systems:
            checks.check_choice("systems", name, SYSTEMS)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(self, num_trajectories=4, lengths=(500, 2000), num_centres=20)


def systems(config: Config) -> dict[str, System]:
    """Return the systems of a configuration."""
    system_of_name = {
        "logistic": System(
            "noisy logistic map",
            lambda steps, key: datasets.logistic_map(steps, key=key, order=config.order),
            lambda x: datasets.logistic_features(x, config.order),
            datasets.logistic_spectrum(config.order),
            lag=1,
            rank=5,
            compared=2,
            length_scale=0.1,
            grid=np.linspace(0.0, 1.0, 101),
        ),
        "ornstein_uhlenbeck": System(
            "Ornstein-Uhlenbeck",
            lambda steps, key: datasets.ornstein_uhlenbeck(steps, key=key, time_step=0.1),
            partial(_hermite, 6),
            datasets.ornstein_uhlenbeck_spectrum(time_step=0.5, num_components=4),
            lag=5,
            rank=5,
            compared=3,
            length_scale=1.0,
            grid=np.linspace(-2.5, 2.5, 101),
        ),
        "prinz": System(
            "Prinz potential",
            lambda steps, key: datasets.prinz_langevin(steps, key=key),
            _bumps,
            datasets.prinz_spectrum(time_step=1e-3, num_components=4),
            lag=10,
            rank=MAX_RANK,
            compared=3,
            length_scale=0.2,
            grid=np.linspace(-1.1, 1.1, 101),
        ),
    }
    return {name: system_of_name[name] for name in config.systems}


def _hermite(count: int, x: Array) -> Array:
    """Return normalised probabilists' Hermite polynomials, [n, count]."""
    states = x[:, 0]
    columns = [jnp.ones_like(states), states]
    for k in range(2, count):
        product = states * columns[-1] - (k - 1) ** 0.5 * columns[-2]
        columns.append(product / k**0.5)
    return jnp.stack(columns[:count], 1)


def _bumps(x: Array) -> Array:
    """Return a constant and 19 Gaussian bumps of width 0.15 from -1.2 to 1.2, [n, 20]."""
    centres = jnp.linspace(-1.2, 1.2, 19, dtype=x.dtype)
    distances = (x - centres[None]) / 0.15
    bumps = jnp.exp(-0.5 * distances**2)
    return jnp.concatenate([jnp.ones_like(x), bumps], 1)


def source(config: Config) -> None:
    """Load nothing: the systems are simulated."""


def compute(
    config: Config,
    *,
    key: Array,
    data: None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Simulate, fit and compare; see `dissociation.figures.Figure.compute`.

    Returns:
        By system and component, of which there are `num_components`: `exact`, the compared exact
        eigenvalues, and `exact_rate`, -log|lambda| per lag. Estimates by system and estimator:
        `eigenvalues` [trajectories, lengths, components], the nearest to the exact ones, and their
        `rate`; `error` [trajectories, lengths], the largest relative error of an eigenvalue; at the
        largest length, `mean_rate` and `standard_error` [components], over trajectories, and
        `functions` [trajectories, points], the real part of the first eigenfunction, scaled to the
        exact one, which is `exact_functions` [systems, points], at the states `grid` [systems,
        points].
    """
    return figures.run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: None, cache: Cache) -> xarray.Dataset:
    processes = systems(config)
    jobs = {}
    for position, (name, system) in enumerate(processes.items()):
        system_key = jax.random.fold_in(key, position)
        for index, length in enumerate(config.lengths):
            trial_key = jax.random.fold_in(system_key, index)
            jobs[f"{name}_{index}"] = partial(_trials, config, system, length, trial_key)
    trials_of_job = cache.get_all(jobs, "simulating and fitting")

    labels = []
    grids = []
    exact_values = []
    exact_functions = []
    values = []
    functions = []
    for name, system in processes.items():
        labels.append(system.label)
        grids.append(system.grid)
        exact_values.append(_compared(system))
        exact_functions.append(np.real(_exact_function(system)))
        trials_of_length = [
            trials_of_job[f"{name}_{index}"] for index in range(len(config.lengths))
        ]
        values_of_length = [_by_estimator(trials, "values") for trials in trials_of_length]
        values.append(np.stack(values_of_length, 2))
        functions.append(_by_estimator(trials_of_length[-1], "functions"))
    exact = padded(exact_values)
    exact_rate = -np.log(np.abs(exact))
    eigenvalues = padded(values)

    truth = exact[:, None, None, None]
    relative_errors = np.abs(eigenvalues - truth) / np.abs(truth)
    is_defined = np.isfinite(truth)
    error = np.max(relative_errors, -1, initial=0, where=is_defined)
    rate = -np.log(np.abs(eigenvalues))
    last_rate = np.moveaxis(rate[..., -1, :], 2, 0)
    mean, deviation, count = plotting.summarise(last_rate)
    standard_error = deviation / np.sqrt(np.maximum(count, 1))

    estimator_axes = ("systems", "estimators")
    component_axes = (*estimator_axes, "components")
    trial_axes = (*estimator_axes, "trajectories", "lengths")
    point_axes = ("systems", "points")
    per_lag = {"units": "1 / lag"}
    variables = {
        "exact": (("systems", "components"), exact),
        "exact_rate": (("systems", "components"), exact_rate, per_lag),
        "eigenvalues": ((*trial_axes, "components"), eigenvalues),
        "rate": ((*trial_axes, "components"), rate, per_lag),
        "error": (trial_axes, error),
        "mean_rate": (component_axes, mean, per_lag),
        "standard_error": (component_axes, standard_error, per_lag),
        "functions": ((*estimator_axes, "trajectories", "points"), np.stack(functions)),
        "grid": (point_axes, np.stack(grids)),
        "exact_functions": (point_axes, np.stack(exact_functions)),
    }
    coords = {
        "systems": labels,
        "num_components": ("systems", np.isfinite(exact).sum(1)),
        "estimators": list(ESTIMATORS.values()),
        "lengths": ("lengths", list(config.lengths), {"units": "transitions"}),
    }
    return xarray.Dataset(variables, coords)


def _by_estimator(trials: dict[str, np.ndarray], field: str) -> np.ndarray:
    """Return a field of the trials, stacked over estimators."""
    return np.stack([trials[f"{field}_{estimator}"] for estimator in ESTIMATORS])


def _compared(system: System) -> np.ndarray:
    eigenvalues = np.asarray(system.exact.eigenvalues, complex)
    return eigenvalues[1 : 1 + system.compared]


def _exact_function(system: System) -> np.ndarray:
    functions = system.exact.right(system.grid[:, None])
    return np.asarray(functions[:, 1], complex)


def _trials(config: Config, system: System, length: int, key: Array) -> dict[str, Array]:
    """Estimate nearest eigenvalues and first eigenfunction from all trajectories of one length."""
    exact = jnp.asarray(_compared(system), jnp.complex64)
    truth = jnp.asarray(_exact_function(system), jnp.complex64)
    grid = jnp.asarray(system.grid[:, None], jnp.float32)
    centres = jnp.linspace(grid[0], grid[-1], config.num_centres)
    alpha = jnp.asarray(config.alpha)

    def estimates(key):
        x, y = lagged_pairs(system.sample(length, key), system.lag)
        features = system.features(x), system.features(y)
        reduced_rank = ReducedRank(system.rank, alpha)
        kernel = RBF(system.length_scale)
        operators = {
            "ridge": fit(Ridge(alpha), *features),
            "pcr": fit(PrincipalComponents(system.rank, alpha), *features),
            "reduced_rank": fit(reduced_rank, *features),
            "nystroem": fit(reduced_rank, x, y, kernel=kernel, centres=centres),
        }
        arrays = {}
        for name, operator in operators.items():
            points = grid
            if name != "nystroem":
                points = system.features(grid)
            spectrum = decompose(operator)
            # One estimate may be nearest to several exact eigenvalues, and many eigenvalues favour
            # an estimator.
            distances = jnp.abs(spectrum.eigenvalues[None] - exact[:, None])
            nearest = jnp.argmin(distances, 1)
            arrays[f"values_{name}"] = spectrum.eigenvalues[nearest]
            functions = right_eigenfunctions(operator, points, spectrum)
            function = functions[:, nearest[0]]
            # An eigenfunction is defined up to a complex factor: this one brings it closest to the
            # truth.
            factor = jnp.vdot(function, truth) / jnp.vdot(function, function)
            arrays[f"functions_{name}"] = jnp.real(factor * function)
        return arrays

    batch_size = None
    if jax.default_backend() == "cpu":
        batch_size = 1  # one by one
    keys = jax.random.split(key, config.num_trajectories)
    return bmap(estimates, batch_size=batch_size)(keys)


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    many = f"{dataset.sizes['trajectories']} independent trajectories"
    functions = dataset.functions.values
    curves = functions.reshape(-1, *functions.shape[2:])
    drawn = plotting.drawn_as(*curves, members="trajectories")
    systems = []
    for row, name in enumerate(dataset.systems.values):
        letters = ", ".join("abcdefghi"[3 * row : 3 * row + 3])
        systems.append(f"{name} ({letters})")
    return (
        "Estimates of four estimators on simulated systems whose spectra are known: "
        f"{', '.join(systems)}. "
        f"Left, decay rates over the exact ones at {dataset.lengths.values[-1]} transitions, a "
        f"dot for each of {many} "
        "and their mean with its 95 % Student interval, one of each conjugate pair. Middle, the "
        "leading eigenfunction "
        f"at the same length, scaled to the exact one (dashed); {drawn[0].lower()}{drawn[1:]} "
        "Right, the largest "
        f"relative error of the eigenvalues by length, means over {many} with 95 % Student "
        "intervals; dotted, a fall "
        "as one over the root of the length."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    longest = dataset.lengths.values[-1]
    return (
        f"{dataset.sizes['trajectories']} trajectories of up to {longest} transitions; rates "
        "-log|lambda| per lag"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per system, estimator and rate."""
    rows = [["system", "estimator", "exact rate", "mean", "standard error", "bias / error"]]
    for name in dataset.systems.values:
        results = without_conjugates(dataset, name)[["exact_rate", "mean_rate", "standard_error"]]
        for estimator in results.estimators.values:
            rates = results.sel(estimators=estimator).to_array()
            for exact, mean, error in rates.values.T:
                numbers = [f"{exact:.5f}", f"{mean:.5f}", f"{error:.5f}"]
                bias = f"{(mean - exact) / error:+.1f}"
                rows.append([name, estimator, *numbers, bias])
    return rows
