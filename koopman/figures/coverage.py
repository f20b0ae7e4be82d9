"""Figure `coverage`: how often intervals of rates hold the exact rates of simulated systems."""

import dataclasses
from functools import partial
from typing import Any

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

__all__ = ["Config", "compute", "draw"]

STEM = "coverage"
SHOWS = "Coverage of intervals of rates, and the share withheld, on systems with known spectra."

RELAXATION = -np.log(0.8)
ROTATION = 0.95 * np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
REGIMES = np.array([[[0.9, 0.3], [-0.3, 0.9]], [[0.5, 0.0], [0.2, 0.8]]])
TRANSITION = np.array([[0.95, 0.05], [0.1, 0.9]])
MAX_MODES = 4
"""Largest number of exact modes to compare with."""
MAX_WITHHELD = 1 / 3
"""Largest fraction withheld without a reason in the table."""
NORMAL_QUANTILE = 1.96
TINY = 1e-12
FAINT = "below the noise floor"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of simulations and intervals."""

    num_seeds: int = 400
    """Independent trajectories of every system and length."""
    lengths: tuple[int, ...] = (2000, 20_000)
    """Steps of a trajectory, from 200 on."""
    level: float = 0.9
    """Probability of the intervals."""

    def __post_init__(self):
        checks.check_count("num_seeds", self.num_seeds, minimum=2)
        checks.check_level(self.level)
        checks.check_distinct("lengths", self.lengths)
        for length in self.lengths:
            checks.check_count("lengths", length, minimum=200, maximum=10**6)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(self, num_seeds=10, lengths=(2000,))


def _ornstein_uhlenbeck(steps: int, **options: Any) -> Array:
    """Return Hermite polynomials of degree 1 to 4."""
    states = datasets.ornstein_uhlenbeck(steps, time_step=RELAXATION, **options)
    columns = [jnp.ones_like(states), states]
    for k in range(2, 5):
        product = states * columns[-1] - (k - 1) ** 0.5 * columns[-2]
        columns.append(product / k**0.5)
    return jnp.concatenate(columns[1:], 2)


def _logistic(steps: int, **options: Any) -> Array:
    """Return twenty cosines, in whose span the operator is exact."""
    states = datasets.logistic_map(steps, **options)
    features = jax.vmap(datasets.logistic_features)(states)
    return features[:, :, 1:21]


def _prinz(steps: int, **options: Any) -> Array:
    """Return 19 Gaussian bumps of width 0.15."""
    states = datasets.prinz_langevin(steps, time_step=1e-3, substeps=100, **options)
    centres = jnp.linspace(-1.2, 1.2, 19, dtype=states.dtype)
    return jnp.exp(-0.5 * ((states - centres[None, None]) / 0.15) ** 2)


def _linear(steps: int, **options: Any) -> Array:
    return datasets.linear_system(ROTATION, steps, noise=1.0, **options)


def _regime_switching(steps: int, **options: Any) -> Array:
    """Return the regime, and the state in every regime."""
    states, regimes = datasets.regime_switching_var(
        REGIMES, TRANSITION, steps, noise=1.0, **options
    )
    is_second = regimes[..., None].astype(states.dtype)
    return jnp.concatenate([is_second, states, is_second * states], 2)


SYSTEMS = {
    "Ornstein-Uhlenbeck": (
        _ornstein_uhlenbeck,
        partial(datasets.ornstein_uhlenbeck_spectrum, time_step=RELAXATION, num_components=5),
    ),
    "noisy logistic map": (_logistic, partial(datasets.logistic_spectrum, 20, num_components=3)),
    "Prinz potential": (_prinz, partial(datasets.prinz_spectrum, time_step=1e-3, num_components=4)),
    "linear": (_linear, partial(datasets.linear_spectrum, ROTATION, 1)),
    "regime switching": (
        _regime_switching,
        partial(datasets.regime_switching_spectrum, REGIMES, TRANSITION),
    ),
}
"""Function from a number of steps to features [trajectories, time, features], and the spectrum."""


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
        Over systems and lengths: `coverage`, the fraction of intervals that hold the exact growth
        or frequency, and `withheld`, the fraction of modes without intervals, of those whose
        modulus exceeds five standard errors; each with its standard error `_error`, and the ends
        `_low` and `_high` of Wilson's 95 % interval. Counts of a trajectory, [systems, lengths,
        seeds]: `num_covered` of `num_intervals`, and `num_withheld` of `num_strong`. Of every mode:
        `deviation`, the estimate minus the exact rate in halves of the interval, NaN without an
        interval, and `reason` as in `KoopmanModel.rates`.
    """
    return figures.run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: None, cache: Cache) -> xarray.Dataset:
    jobs = {}
    for position, name in enumerate(SYSTEMS):
        system_key = jax.random.fold_in(key, position)
        for index, length in enumerate(config.lengths):
            trial_key = jax.random.fold_in(system_key, index)
            jobs[f"{position}_{index}"] = partial(_trials, config, name, length, trial_key)
    trials = cache.get_all(jobs, "simulating and fitting")
    coords = {
        "systems": list(SYSTEMS),
        "lengths": ("lengths", list(config.lengths), {"units": "steps"}),
        "level": config.level,
        "rates": ["growth", "frequency"],
    }
    dataset = xarray.Dataset(coords=coords)
    shape = (len(SYSTEMS), len(config.lengths))
    for name, axes in (("deviation", ("seeds", "rates", "modes")), ("reason", ("seeds", "modes"))):
        values = np.stack([trials[job][name] for job in jobs])
        dataset[name] = (("systems", "lengths", *axes), values.reshape(*shape, *values.shape[1:]))
    is_rate = dataset.deviation.notnull()
    is_strong = dataset.reason != FAINT
    is_covered = np.abs(dataset.deviation) <= 1
    dataset["num_covered"] = is_covered.sum(("rates", "modes"))
    dataset["num_intervals"] = is_rate.sum(("rates", "modes"))
    dataset["num_withheld"] = (is_strong & (dataset.reason != "")).sum("modes")
    dataset["num_strong"] = is_strong.sum("modes")
    for name, hits, total in (
        ("coverage", "num_covered", "num_intervals"),
        ("withheld", "num_withheld", "num_strong"),
    ):
        size = dataset[total].sum("seeds")
        dataset[name] = dataset[hits].sum("seeds") / size
        # Counts of a trajectory depend on each other.
        residuals = dataset[hits] - dataset[name] * dataset[total]
        dataset[f"{name}_error"] = (residuals**2).sum("seeds") ** 0.5 / size
        num_trajectories = (dataset[total] > 0).sum("seeds")
        ends = _wilson_ends(dataset[name], dataset[f"{name}_error"], num_trajectories, size)
        dataset[f"{name}_low"] = ends[0]
        dataset[f"{name}_high"] = ends[1]
    return dataset


def _wilson_ends(fraction: Any, error: Any, num_trajectories: Any, size: Any) -> tuple[Any, Any]:
    """Return the ends of Wilson's interval, for as many independent cases as explain the error."""
    # If all cases agree, both variances are 0, and a trajectory counts as one case.
    ratio = (fraction * (1 - fraction) + TINY) / (error**2 + TINY / num_trajectories)
    spread = NORMAL_QUANTILE**2 / np.minimum(ratio, size)
    centre = (fraction + 0.5 * spread) / (1 + spread)
    half = (spread * fraction * (1 - fraction) + 0.25 * spread**2) ** 0.5 / (1 + spread)
    return np.minimum(centre - half, fraction), np.maximum(centre + half, fraction)


@jax.enable_x64(True)
def _trials(config: Config, name: str, length: int, key: Array) -> dict[str, np.ndarray]:
    """Return the arrays of every trajectory, [seeds, ...]."""
    # Here, because it takes a fifth of a second.
    from scipy.optimize import linear_sum_assignment

    sample, spectrum = SYSTEMS[name]
    truth = np.asarray(spectrum().eigenvalues, complex)
    truth = truth[(np.imag(truth) >= 0) & (np.abs(truth - 1) > 1e-9)][:MAX_MODES]
    exact = np.stack([np.log(np.abs(truth)), np.angle(truth) / (2 * np.pi)])
    # A real eigenvalue has no frequency.
    has_rate = np.stack([np.isfinite(truth), np.imag(truth) > 0])
    trajectories = np.asarray(sample(length, key=key, num_trajectories=config.num_seeds))
    reasons = np.full((len(trajectories), MAX_MODES), FAINT, "U200")
    deviations = np.full((len(trajectories), 2, MAX_MODES), np.nan)
    for number, trajectory in enumerate(trajectories):
        rates = fit_model(trajectory).rates(config.level)
        eigenvalues = np.exp(rates.growth.values + 2j * np.pi * rates.frequency.values)
        modes, nearest = linear_sum_assignment(np.abs(truth[:, None] - eigenvalues))
        rates = rates.isel(mode=nearest)
        reasons[number, modes] = rates.reason.values
        # Upper ends, because the lower end of a frequency stops at 0. They are NaN if withheld.
        high = rates[["growth_high", "frequency_high"]].to_array().values
        estimates = rates[["growth", "frequency"]].to_array().values
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = (estimates - exact[:, modes]) / (high - estimates)
        deviations[number][:, modes] = np.where(has_rate[:, modes], ratio, np.nan)
    return {"deviation": deviations, "reason": reasons}


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw coverage and the fraction withheld, a row per system, 6.5 inches wide."""
    with plotting.house_style():
        figure, axes = plt.subplots(1, 2, figsize=(6.5, 2.6), sharey=True)
        positions = np.arange(dataset.sizes["systems"])
        for index, length in enumerate(dataset.lengths.values):
            look = plotting.look(index)
            style = {"color": look["color"], "fmt": look["marker"], "capsize": 1.5}
            results = dataset.isel(lengths=index)
            shift = positions + 0.2 * (index - 0.5)
            for panel, name in zip(axes, ("coverage", "withheld"), strict=True):
                centre = results[name]
                ends = [centre - results[f"{name}_low"], results[f"{name}_high"] - centre]
                panel.errorbar(centre, shift, xerr=ends, label=f"{length} steps", **style)
        axes[0].axvline(float(dataset.level), color="black", linestyle="--", linewidth=0.8)
        axes[0].set(xlabel="coverage of intervals that are not withheld")
        axes[0].set_yticks(positions, dataset.systems.values)
        axes[0].invert_yaxis()
        axes[1].set(xlabel="fraction withheld")
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
        "standard errors. Bars are Wilson's 95 % intervals over trajectories."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    return f"{dataset.sizes['seeds']} trajectories per system and length"


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per system and length, with the reason of every miss."""
    rows = [["system", "steps", "coverage", "withheld", "reason of a miss"]]
    for name in dataset.systems.values:
        for length in dataset.lengths.values:
            results = dataset.sel(systems=name, lengths=length)
            cells = []
            for quantity in ("coverage", "withheld"):
                error = float(results[f"{quantity}_error"])
                cells.append(f"{float(results[quantity]):.3f} +- {error:.3f}")
            rows.append([name, str(length), *cells, _reason_of_miss(results)])
    return rows


def _reason_of_miss(results: xarray.Dataset) -> str:
    """Return why coverage, or the fraction withheld, is outside of its limits; "" within them."""
    level = float(results.level)
    words = []
    coverage = float(results.coverage)
    if coverage < level - 0.04 or coverage > level + 0.05:
        # All intervals, times this factor, would hold as many rates as they promise.
        factor = float(np.abs(results.deviation).quantile(level))
        bias = results.deviation.mean("seeds").stack(quantity=("rates", "modes")).dropna("quantity")
        largest = bias[np.argmax(np.abs(bias.values))]
        rate, mode = largest.quantity.item()
        words.append(
            f"intervals {factor:.2f} times as wide hold {100 * level:.4g} %; "
            f"{rate} of mode {mode} is off by {float(largest):+.2f} half-widths"
        )
    if float(results.withheld) > MAX_WITHHELD:
        values = results.reason.values
        is_withheld = (values != "") & (values != FAINT)
        reasons, counts = np.unique(values[is_withheld], return_counts=True)
        words.append(f"{counts.max()} of {counts.sum()} withheld: {reasons[np.argmax(counts)]}")
    return "; ".join(words)
