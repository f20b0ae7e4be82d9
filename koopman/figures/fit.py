"""Figure `fit`: rates with intervals, modes and a forecast of a file of trajectories."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import xarray
from jaxtyping import Array
from matplotlib.figure import Figure

from dissociation import figures
from dissociation._core import checks
from dissociation.figures import AnyMeter, Cache, CacheFolder
from koopman import KoopmanModel, PrincipalComponents, Ridge, fit_model, plot_model

__all__ = ["Config", "compute", "draw"]

STEM = "fit"
SHOWS = "Rates with intervals, modes and a forecast of trajectories in a file."

SUFFIXES = (".csv", ".npy", ".npz")
_NUM_SENSORS = 8
_TONES_STEP = 0.05
_TONES_DELAYS = 48


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of a model of a file."""

    file: str | None = None
    """File of trajectories: a table with a head (.csv), an array [time, columns] (.npy), or arrays,
    one per run (.npz). Without it two noisy tones are simulated."""
    time: str | None = None
    """Column of times of a table."""
    run: str | None = None
    """Column of labels of runs of a table."""
    columns: tuple[str, ...] = ()
    """Columns, or arrays of an .npz file, that are states; by default all others."""
    inputs: tuple[str, ...] = ()
    """Columns that are inputs, or arrays of an .npz file, one per run."""
    lag: int = 1
    """Steps from a state to the state that is predicted."""
    num_delays: int | None = None
    """Number of successive states from which the next is predicted: 1, for the tones 48."""
    rank: int | Literal["auto"] | None = None
    """Number of modes that are kept; "auto" takes those above the noise, as for the tones."""
    steps: int = 50
    """Steps of the forecast, in lags."""
    level: float = 0.9
    """Probability of the intervals."""
    num_times: int = 900
    """Times of the tones."""

    def __post_init__(self):
        for name, minimum in {
            "lag": 1,
            "steps": 1,
            "num_delays": 1,
            "rank": 1,
            "num_times": 200,
        }.items():
            count = getattr(self, name)
            if count not in (None, "auto"):
                checks.check_count(name, count, minimum=minimum, maximum=10**6)
        checks.check_level(self.level)
        if self.file is not None and Path(self.file).suffix not in SUFFIXES:
            checks.fail("file", f"end in one of {', '.join(SUFFIXES)}", repr(self.file))
        if self.file is None and (self.columns or self.inputs or self.time or self.run):
            checks.fail("file", "be given with time, run, columns or inputs", "None")

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(self, num_times=400)


def source(config: Config) -> dict[str, np.ndarray] | None:
    """Return the columns or arrays of the file; None for the tones."""
    if config.file is None:
        return None
    path = Path(config.file)
    if path.suffix == ".csv":
        import pandas

        table = pandas.read_csv(path)
        columns = {str(name): table[name].to_numpy() for name in table.columns}
        # Text, because the contents of a run are those of arrays.
        return {
            name: values if values.dtype.kind in "biuf" else values.astype(str)
            for name, values in columns.items()
        }
    try:
        arrays = np.load(path, allow_pickle=False)
        return {"states": arrays} if isinstance(arrays, np.ndarray) else dict(arrays)
    except ValueError as error:
        advice = "Write a list of arrays as numpy.savez(file, *arrays)"
        checks.fail("file", "hold arrays of numbers", f"{path} ({error})", advice)


def compute(
    config: Config,
    *,
    key: Array,
    data: Any = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Fit the model and forecast; see `dissociation.figures.Figure.compute`.

    With a `cache` the model is saved beside its folder as `model.npz`.

    Returns:
        The variables of `KoopmanModel.rates` over `mode`, `eigenvalues` and `shapes` [mode,
        column]; `observed` [observation, column] at `observation_time`; and those of
        `KoopmanModel.predict` with the prefix `forecast_`, for the first run.
    """
    return figures.run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: Any, cache: Cache) -> xarray.Dataset:
    if data is None:
        data = source(config)
    with jax.enable_x64(True):
        try:
            model = _model(config, key, data)
            dataset = model.report(config.steps, config.level)
            summary = model.summary(config.level)
        except TypeError as error:
            raise checks.WrongValue(str(error)) from error
        if cache.folder is not None:
            model.save(cache.folder.parent / "model.npz")
    num_pairs = int(np.maximum(model.lifted.lengths - config.lag, 0).sum())
    return dataset.assign_attrs(model=repr(model), num_pairs=num_pairs, summary=summary)


def _model(config: Config, key: Array, data: Any) -> KoopmanModel:
    """Return the model of a file, or of the tones."""
    num_delays = config.num_delays or 1
    rank = config.rank
    options: dict[str, Any] = {}
    if data is None:
        trajectories: Any = _tones(config.num_times, key)
        num_delays = config.num_delays or _TONES_DELAYS
        rank = rank or "auto"
        options["time_step"] = _TONES_STEP
    elif Path(str(config.file)).suffix == ".csv":
        import pandas

        trajectories = pandas.DataFrame(data)
        for name in ("time", "run", "columns", "inputs"):
            setting = getattr(config, name)
            if setting:
                options[name] = list(setting) if isinstance(setting, tuple) else setting
    else:
        options = {"time": config.time, "run": config.run}
        names = config.columns or [name for name in data if name not in config.inputs]
        trajectories = _arrays(data, "columns", names)
        if config.inputs:
            options["inputs"] = _arrays(data, "inputs", config.inputs)
    estimator = Ridge() if rank is None else PrincipalComponents(rank)
    return fit_model(trajectories, estimator, lag=config.lag, num_delays=num_delays, **options)


def _arrays(data: dict[str, np.ndarray], argument: str, names: Any) -> list[np.ndarray]:
    """Return the arrays of these names."""
    missing = [name for name in names if name not in data]
    if missing:
        checks.fail(argument, f"be arrays of the file, of {list(data)}", missing)
    return [data[name] for name in names]


def _tones(num_times: int, key: Array) -> np.ndarray:
    """Return two decaying tones with noise, [time, sensors]."""
    rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).ravel())
    times = _TONES_STEP * np.arange(num_times)
    rates = np.array([-0.05 + 2j, -0.1 + 5j])
    size = (len(rates), _NUM_SENSORS)
    shapes = rng.normal(size=size) + 1j * rng.normal(size=size)
    clean = np.real(np.exp(np.outer(times, rates)) @ shapes)
    return clean + 0.1 * rng.normal(size=clean.shape)


def draw(dataset: xarray.Dataset) -> Figure:
    """Draw eigenvalues, rates, mode shapes and a forecast."""
    return plot_model(dataset)


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    level = f"{100 * float(dataset.attrs['level']):.3g} %"
    num_resolved = int(dataset.resolved.sum())
    config = figures.config_of(dataset)
    name = "two simulated tones" if config.file is None else Path(config.file).name
    return (
        f"A model of {name}, fitted to {dataset.attrs['num_pairs']} pairs. (a) Eigenvalues in the "
        "complex plane; on the circle nothing decays. "
        f"(b) Growth over frequency with {level} intervals; {num_resolved} of "
        f"{dataset.sizes['mode']} modes are resolved, open dots are not. (c) Shapes of the leading "
        f"modes, with their share of the variance. (d) Observations (dots) up to the dashed line, "
        f"and the forecast {config.steps} lags ahead with {level} bands of the mean (dark) and of "
        "new observations (light)."
    )


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the model and the number of pairs."""
    return f"{dataset.attrs['model']}, {dataset.attrs['num_pairs']} pairs; saved as model.npz"


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per mode."""
    lines = dataset.attrs["summary"].splitlines()[1:]
    return [re.split(" {2,}", line.strip()) for line in lines]
