"""Figure `coverage`: how often intervals of rates hold the exact rates of simulated systems."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Array
from matplotlib.figure import Figure

from dissociation import figures, plotting
from dissociation._core import checks
from dissociation.figures import AnyMeter, Cache, CacheFolder
from koopman import datasets, fit_model
from koopman._models._intervals import BELOW_NOISE, matched

__all__ = ["Config", "compute", "draw"]

STEM = "coverage"
SHOWS = "Coverage of intervals of rates, and the share withheld, on systems with known spectra."

SYSTEMS = ("ornstein_uhlenbeck", "logistic", "prinz", "linear", "regime_switching")

ROTATION = 0.95 * np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
REGIMES = np.array([[[0.9, 0.3], [-0.3, 0.9]], [[0.5, 0.0], [0.2, 0.8]]])
TRANSITION = np.array([[0.95, 0.05], [0.1, 0.9]])
MAX_MODES = 4
"""Largest number of exact modes to compare with."""


class System(NamedTuple):
    """System with a known spectrum.

    Attributes:
        label: Name in the figure.
        sample: Function from a number of steps, a number of trajectories and a key to features,
            [trajectories, time, features].
        eigenvalues: Exact eigenvalues without the constant's, per step.
    """

    label: str
    sample: Callable[[int, int, Array], Array]
    eigenvalues: np.ndarray


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of simulations and intervals."""

    num_seeds: int = 400
    """Independent trajectories of every system and length."""
    lengths: tuple[int, ...] = (2000, 20_000)
    """Steps of a trajectory, from 200 on."""
    level: float = 0.9
    """Probability of the intervals."""
    systems: tuple[str, ...] = SYSTEMS
    """Systems to simulate."""

    def __post_init__(self):
        checks.check_count("num_seeds", self.num_seeds, minimum=2)
        checks.check_level(self.level)
        checks.check_distinct("lengths", self.lengths)
        for length in self.lengths:
            checks.check_count("lengths", length, minimum=200, maximum=10**6)
        checks.check_distinct("systems", self.systems)
        for name in self.systems:
            checks.check_choice("systems", name, SYSTEMS)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(self, num_seeds=10, lengths=(1000, 2000))


def systems(config: Config) -> dict[str, System]:
    """Return the systems of a configuration."""
    relaxation = -np.log(0.8)
    table = {
        "ornstein_uhlenbeck": (
            "Ornstein-Uhlenbeck",
            _ornstein_uhlenbeck,
            datasets.ornstein_uhlenbeck_spectrum(time_step=relaxation, num_components=5),
        ),
        "logistic": (
            "noisy logistic map",
            _logistic,
            datasets.logistic_spectrum(20, num_components=3),
        ),
        "prinz": (
            "Prinz potential",
            _prinz,
            datasets.prinz_spectrum(time_step=1e-3, num_components=4),
        ),
        "linear": ("linear", _linear, datasets.linear_spectrum(ROTATION, 1)),
        "regime_switching": (
            "regime switching",
            _regime_switching,
            datasets.regime_switching_spectrum(REGIMES, TRANSITION),
        ),
    }
    chosen = {}
    for name in config.systems:
        label, sample, spectrum = table[name]
        values = np.asarray(spectrum.eigenvalues, complex)
        is_mode = (values.imag >= 0) & (np.abs(values - 1) > 1e-9)
        chosen[name] = System(label, sample, values[is_mode][:MAX_MODES])
    return chosen


def _ornstein_uhlenbeck(steps: int, number: int, key: Array) -> Array:
    """Return Hermite polynomials of degree 1 to 4."""
    states = datasets.ornstein_uhlenbeck(
        steps, key=key, num_trajectories=number, time_step=-np.log(0.8)
    )
    columns = [jnp.ones_like(states), states]
    for k in range(2, 5):
        product = states * columns[-1] - (k - 1) ** 0.5 * columns[-2]
        columns.append(product / k**0.5)
    return jnp.concatenate(columns[1:], 2)


def _logistic(steps: int, number: int, key: Array) -> Array:
    """Return twenty cosines, in whose span the operator is exact."""
    states = datasets.logistic_map(steps, key=key, num_trajectories=number)
    features = jax.vmap(datasets.logistic_features)(states)
    return features[:, :, 1:21]


def _prinz(steps: int, number: int, key: Array) -> Array:
    """Return 19 Gaussian bumps of width 0.15."""
    states = datasets.prinz_langevin(
        steps, key=key, num_trajectories=number, time_step=1e-3, substeps=20
    )
    centres = jnp.linspace(-1.2, 1.2, 19, dtype=states.dtype)
    return jnp.exp(-0.5 * ((states - centres) / 0.15) ** 2)


def _linear(steps: int, number: int, key: Array) -> Array:
    return datasets.linear_system(ROTATION, steps, key=key, num_trajectories=number, noise=1.0)


def _regime_switching(steps: int, number: int, key: Array) -> Array:
    """Return the regime, and the state in every regime."""
    states, regimes = datasets.regime_switching_var(
        REGIMES, TRANSITION, steps, key=key, num_trajectories=number, noise=1.0
    )
    is_second = regimes[..., None].astype(states.dtype)
    return jnp.concatenate([is_second, states, is_second * states], 2)


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
        `is_held` [systems, lengths, seeds, modes, rates]: 1 if the interval holds the exact growth
        or frequency, 0 if not, NaN if it is withheld or there is no such rate. `is_strong`, without
        the last axis: 1 if the modulus of the eigenvalue exceeds five standard errors. Over systems
        and lengths: `coverage` of the intervals that are not withheld, and `withheld`, the fraction
        withheld of strong modes, each with its standard error `_error`. By mode: `mode_coverage`,
        and the exact `eigenvalues`.
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

    shape = (len(processes), len(config.lengths), config.num_seeds, MAX_MODES)
    is_held = np.full((*shape, 2), np.nan)
    is_strong = np.full(shape, np.nan)
    exact = np.full((len(processes), MAX_MODES), np.nan, complex)
    for row, (name, system) in enumerate(processes.items()):
        num_modes = len(system.eigenvalues)
        exact[row, :num_modes] = system.eigenvalues
        for index in range(len(config.lengths)):
            trials = trials_of_job[f"{name}_{index}"]
            is_held[row, index, :, :num_modes] = trials["is_held"]
            is_strong[row, index, :, :num_modes] = trials["is_strong"]

    is_defined = np.isfinite(is_held)
    is_resolved = is_defined[..., 0]
    coverage, coverage_error = _fraction(is_held, is_defined)
    withheld, withheld_error = _fraction(~is_resolved, is_strong == 1)
    with np.errstate(invalid="ignore"):
        mode_coverage = np.nansum(is_held, (2, 4)) / np.sum(is_defined, (2, 4))
    axes = ("systems", "lengths")
    mode_axes = (*axes, "seeds", "modes")
    variables = {
        "is_held": ((*mode_axes, "rates"), is_held),
        "is_strong": (mode_axes, is_strong),
        "coverage": (axes, coverage),
        "coverage_error": (axes, coverage_error),
        "withheld": (axes, withheld),
        "withheld_error": (axes, withheld_error),
        "mode_coverage": ((*axes, "modes"), mode_coverage),
        "eigenvalues": (("systems", "modes"), exact),
    }
    coords = {
        "systems": [system.label for system in processes.values()],
        "lengths": ("lengths", list(config.lengths), {"units": "steps"}),
        "rates": ["growth", "frequency"],
        "level": config.level,
    }
    return xarray.Dataset(variables, coords)


@jax.enable_x64(True)
def _trials(config: Config, system: System, length: int, key: Array) -> dict[str, np.ndarray]:
    """Return whether intervals hold the exact rates, for every trajectory."""
    truth = system.eigenvalues
    exact = np.stack([np.log(np.abs(truth)), np.angle(truth) / (2 * np.pi)], 1)
    has_rate = np.stack([np.isfinite(truth), truth.imag > 0], 1)
    is_held = np.full((config.num_seeds, len(truth), 2), np.nan)
    is_strong = np.zeros((config.num_seeds, len(truth)))
    trajectories = np.asarray(system.sample(length, config.num_seeds, key))
    for seed, trajectory in enumerate(trajectories):
        table = fit_model(trajectory).mode_table(config.level)
        nearest = matched(truth, table.eigenvalues[None])[0]
        modes = np.argmin(np.abs(nearest[:, None] - table.eigenvalues), 1)
        rates = table.rates.isel(mode=modes)
        is_strong[seed] = rates.reason.values != BELOW_NOISE
        ends = [
            rates[[f"growth{end}", f"frequency{end}"]].to_array().T for end in ("_low", "_high")
        ]
        is_within = (ends[0].values <= exact) & (exact <= ends[1].values)
        is_defined = rates.resolved.values[:, None] & has_rate
        is_held[seed] = np.where(is_defined, is_within, np.nan)
    return {"is_held": is_held, "is_strong": is_strong}


def _fraction(is_true: np.ndarray, is_counted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the fraction of counted entries that are true, and its standard error over seeds.

    The arrays are [systems, lengths, seeds, ...]. Entries of a seed depend on each other.
    """
    shape = (*is_true.shape[:3], -1)
    hits = np.where(is_counted, is_true, 0.0).reshape(shape).sum(3)
    counts = is_counted.reshape(shape).sum(3)
    total = np.maximum(counts.sum(2), 1)
    fraction = hits.sum(2) / total
    deviations = hits - fraction[..., None] * counts
    return fraction, np.sqrt(np.sum(deviations**2, 2)) / total


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw coverage and the fraction withheld, a row per system, 6.5 inches wide."""
    level = float(dataset.level)
    with plotting.house_style():
        figure, axes = plt.subplots(1, 2, figsize=(6.5, 2.6), sharey=True)
        positions = np.arange(dataset.sizes["systems"])
        for index, length in enumerate(dataset.lengths.values):
            look = plotting.look(index)
            style = {"color": look["color"], "fmt": look["marker"], "capsize": 1.5}
            results = dataset.isel(lengths=index)
            shift = positions + 0.2 * (index - 0.5)
            for panel, name in zip(axes, ("coverage", "withheld"), strict=True):
                values = results[name].values
                spread = 1.96 * results[f"{name}_error"].values
                panel.errorbar(values, shift, xerr=spread, label=f"{length} steps", **style)
        axes[0].axvline(level, color="black", linestyle="--", linewidth=0.8)
        axes[0].set(xlabel="coverage of intervals that are not withheld")
        axes[0].set_yticks(positions, dataset.systems.values)
        axes[0].invert_yaxis()
        axes[1].set(xlabel="fraction withheld", xlim=(-0.02, 1.02))
        axes[1].legend()
        plotting.letter(*axes)
    plt.close(figure)
    return figure


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    return (
        f"Intervals of growth and frequency at {100 * float(dataset.level):.4g} %, of "
        f"{dataset.sizes['seeds']} independent trajectories of every system and length. a, "
        "fraction of intervals that hold the exact rate, of those that are not withheld, over "
        "modes and rates. b, fraction of modes withheld, of those whose modulus exceeds five "
        "standard errors. Bars are 95 % intervals over trajectories."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    return f"{dataset.sizes['seeds']} trajectories per system and length"


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per system and length."""
    rows = [["system", "steps", "coverage", "withheld", "coverage by mode"]]
    for name in dataset.systems.values:
        for length in dataset.lengths.values:
            results = dataset.sel(systems=name, lengths=length)
            cells = []
            for quantity in ("coverage", "withheld"):
                value = float(results[quantity])
                error = float(results[f"{quantity}_error"])
                cells.append(f"{value:.3f} +- {error:.3f}")
            by_mode = results.mode_coverage.values
            numbers = [f"{value:.2f}" for value in by_mode[np.isfinite(by_mode)]]
            rows.append([name, str(length), *cells, " ".join(numbers)])
    return rows
