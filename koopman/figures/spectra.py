"""Figure `spectra`: estimated against exact eigenvalues and eigenfunctions of systems with known spectra."""

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
    Operator,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    datasets,
    decompose,
    fit,
    lagged_pairs,
    right_eigenfunctions,
)
from koopman.figures._spectra_drawing import draw, kept

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
    """System with a known spectrum, and its observation."""

    label: str  # name in the figure
    sample: Callable[
        [int, Array], Array
    ]  # from a number of transitions and a key to a trajectory [time, 1]
    features: Callable[[Array], Array]  # from states [n, 1] to features [n, d]
    exact: datasets.ExactSpectrum  # at the lag
    lag: int  # steps from x to y
    rank: int  # of the truncated estimators
    compared: int  # eigenvalues compared with the exact ones, without the trivial one
    length_scale: float  # of the Nystroem estimator's RBF kernel
    grid: np.ndarray  # states at which an eigenfunction is drawn, [points]


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
        for name, value, least, most in (
            (
                "order",
                self.order,
                2,
                200,
            ),  # five features at least, and quadrature of few thousand nodes
            ("num_centres", self.num_centres, MAX_RANK, 5000),
            *(("lengths", length, 100, 10**8) for length in self.lengths),
        ):
            checks.check_count(name, value, minimum=least, maximum=most)
        checks.check_positive("alpha", self.alpha)
        if self.alpha > 1e6:
            checks.fail(
                "alpha", "be at most 1e6, for features with mean squares of one", self.alpha
            )
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
    known = {
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
    return {name: known[name] for name in config.systems}


def _hermite(count: int, x: Array) -> Array:
    """Return normalised probabilists' Hermite polynomials, [n, count]."""
    columns = [jnp.ones_like(x[:, 0]), x[:, 0]]
    for k in range(2, count):
        columns.append((x[:, 0] * columns[-1] - (k - 1) ** 0.5 * columns[-2]) / k**0.5)
    return jnp.stack(columns[:count], 1)


def _bumps(x: Array) -> Array:
    """Return a constant and 19 Gaussian bumps of width 0.15 from -1.2 to 1.2, [n, 20]."""
    centres = jnp.linspace(-1.2, 1.2, 19, dtype=x.dtype)
    return jnp.concatenate([jnp.ones_like(x), jnp.exp(-0.5 * ((x - centres[None]) / 0.15) ** 2)], 1)


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
    for place, (name, system) in enumerate(processes.items()):
        for index, length in enumerate(config.lengths):
            trial_key = jax.random.fold_in(jax.random.fold_in(key, place), index)
            jobs[f"{name}_{index}"] = partial(_trials, config, system, length, trial_key)
    found = cache.get_all(jobs, "simulating and fitting")
    last = len(config.lengths) - 1

    def estimates(name: str, field: str, index: int) -> np.ndarray:
        return np.stack([found[f"{name}_{index}"][f"{field}_{each}"] for each in ESTIMATORS])

    exact = padded([_compared(system) for system in processes.values()])
    values = padded(
        [np.stack([estimates(name, "values", i) for i in range(last + 1)], 2) for name in processes]
    )
    truth = exact[:, None, None, None]
    error = np.max(np.abs(values - truth) / np.abs(truth), -1, initial=0, where=np.isfinite(truth))
    rate = -np.log(np.abs(values))
    mean, deviation, count = plotting.summarise(np.moveaxis(rate[..., last, :], 2, 0))
    functions = np.stack([estimates(name, "functions", last) for name in processes])
    exact_functions = np.stack([np.real(_exact_function(system)) for system in processes.values()])
    estimated, trials = (
        ("systems", "estimators"),
        ("systems", "estimators", "trajectories", "lengths"),
    )
    per_lag = {"units": "1 / lag"}
    variables = {
        "exact": (("systems", "components"), exact),
        "exact_rate": (("systems", "components"), -np.log(np.abs(exact)), per_lag),
        "eigenvalues": ((*trials, "components"), values),
        "rate": ((*trials, "components"), rate, per_lag),
        "error": (trials, error),
        "mean_rate": ((*estimated, "components"), mean, per_lag),
        "standard_error": (
            (*estimated, "components"),
            deviation / np.sqrt(np.maximum(count, 1)),
            per_lag,
        ),
        "functions": ((*estimated, "trajectories", "points"), functions),
        "grid": (("systems", "points"), np.stack([system.grid for system in processes.values()])),
        "exact_functions": (("systems", "points"), exact_functions),
    }
    coords = {
        "systems": [system.label for system in processes.values()],
        "num_components": ("systems", np.isfinite(exact).sum(1)),
        "estimators": list(ESTIMATORS.values()),
        "lengths": ("lengths", list(config.lengths), {"units": "transitions"}),
    }
    return xarray.Dataset(variables, coords)


def _compared(system: System) -> np.ndarray:
    return np.asarray(system.exact.eigenvalues, complex)[1 : 1 + system.compared]


def _exact_function(system: System) -> np.ndarray:
    return np.asarray(system.exact.right(system.grid[:, None])[:, 1], complex)


def _trials(config: Config, system: System, length: int, key: Array) -> dict[str, Array]:
    """Estimate all trajectories of one length: the nearest eigenvalues, and the first eigenfunction."""
    exact, truth = (
        jnp.asarray(part(system), jnp.complex64) for part in (_compared, _exact_function)
    )
    grid = jnp.asarray(system.grid[:, None], jnp.float32)
    centres, alpha = jnp.linspace(grid[0], grid[-1], config.num_centres), jnp.asarray(config.alpha)

    def one(key: Array) -> dict[str, Array]:
        x, y = lagged_pairs(system.sample(length, key), system.lag)
        features = system.features(x), system.features(y)
        reduced_rank = ReducedRank(system.rank, alpha)
        fitted: dict[str, tuple[Operator, Array]] = {
            "ridge": (fit(Ridge(alpha), *features), system.features(grid)),
            "pcr": (fit(PrincipalComponents(system.rank, alpha), *features), system.features(grid)),
            "reduced_rank": (fit(reduced_rank, *features), system.features(grid)),
            "nystroem": (
                fit(reduced_rank, x, y, kernel=RBF(system.length_scale), centres=centres),
                grid,
            ),
        }
        out = {}
        for name, (operator, where) in fitted.items():
            spectrum = decompose(operator)
            # One estimate may be nearest to several exact eigenvalues, and many eigenvalues favour
            # an estimator.
            nearest = jnp.argmin(jnp.abs(spectrum.eigenvalues[None] - exact[:, None]), 1)
            out[f"values_{name}"] = spectrum.eigenvalues[nearest]
            function = right_eigenfunctions(operator, where, spectrum)[:, nearest[0]]
            # An eigenfunction is defined up to a complex factor: this one brings it closest to the
            # truth.
            factor = jnp.vdot(function, truth) / jnp.vdot(function, function)
            out[f"functions_{name}"] = jnp.real(factor * function)
        return out

    batch_size = 1 if jax.default_backend() == "cpu" else None  # one by one on a CPU
    return bmap(one, batch_size=batch_size)(jax.random.split(key, config.num_trajectories))


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    many = f"{dataset.sizes['trajectories']} independent trajectories"
    functions = dataset.functions.values
    drawn = plotting.drawn_as(*functions.reshape(-1, *functions.shape[2:]), members="trajectories")
    systems = [
        f"{name} ({', '.join('abcdefghi'[3 * row : 3 * row + 3])})"
        for row, name in enumerate(dataset.systems.values)
    ]
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
    shown = [["system", "estimator", "exact rate", "mean", "standard error", "bias / error"]]
    for name in dataset.systems.values:
        one = kept(dataset, name)
        for estimator in one.estimators.values:
            numbers = one.sel(estimators=estimator)[["exact_rate", "mean_rate", "standard_error"]]
            for exact, mean, error in numbers.to_array().values.T:
                cells = [
                    f"{exact:.5f}",
                    f"{mean:.5f}",
                    f"{error:.5f}",
                    f"{(mean - exact) / error:+.1f}",
                ]
                shown.append([name, estimator, *cells])
    return shown
