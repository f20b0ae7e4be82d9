"""Figure `ordered-mnist`: learn the order of digits, and forecast images.

Operators are fitted on features of trained encoders, and an oracle reads the forecast images.
"""

import dataclasses
import json
from functools import partial
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray
from jaxtyping import Array

from dissociation import figures, member
from dissociation._core import checks
from dissociation.data import NAMES
from dissociation.figures import AnyMeter, Cache, CacheFolder, DataName, cell
from koopman import encode
from koopman.datasets import ordered_mnist
from koopman.figures import _ordered_mnist_drawing as drawing
from koopman.figures._ordered_mnist_drawing import draw as draw
from koopman.figures._ordered_mnist_measures import PROTOCOLS, SCALES, evaluate, measured, predicted
from koopman.figures._ordered_mnist_models import MODELS, Networks, forecaster, train_networks

__all__ = ["Config", "compute", "draw", "PROTOCOLS"]

STEM = "ordered-mnist"
SHOWS = "Digits in sequence: encoders, operators, and forecast images read by an oracle."

PARTS = ("train", "validation", "test")
"""Consecutive blocks of the sequence."""

Digits = tuple[np.ndarray, np.ndarray, str]
"""Images, labels and name of a sequence, see `koopman.datasets.OrderedDigits`."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the sequence, the networks and the forecasts."""

    data: DataName = "glyphs"
    """Data set, by its name in `dissociation.data.NAMES`."""
    num_digits: int = 5
    """Digits in the cycle."""
    num_seeds: int = 3
    """Networks of every kind, trained from scratch."""
    num_train: int = 3000
    """Images of the sequence for training, from its start."""
    num_validation: int = 1000
    """Images after those for training, for validation losses."""
    num_test: int = 1000
    """Images after those for validation, from which forecasts start."""
    num_epochs: int = 50
    """Passes over the training sequence, for encoders and autoencoders."""
    oracle_epochs: int = 20
    """Passes for the oracle."""
    batch_size: int = 64
    """Pairs, or images, in a batch."""
    alpha: float = 1e-6
    """Regularisation of the operators."""
    num_steps: int = 15
    """Horizons."""
    far: int = 1000
    """Further horizon, for powers of the operator."""
    models: tuple[str, ...] = tuple(MODELS)
    """Models to compare; the oracle is always trained."""

    def __post_init__(self):
        checks.check_choice("data", self.data, NAMES)
        minimum_of_count = {
            "num_seeds": 1,
            "num_test": 1,
            "num_steps": 1,
            "num_train": 2,
            "num_validation": 2,
            "num_epochs": 0,
            "oracle_epochs": 0,
        }
        for name, minimum in minimum_of_count.items():
            checks.check_count(name, getattr(self, name), minimum=minimum)
        checks.check_count("num_digits", self.num_digits, minimum=1, maximum=10)
        checks.check_count("batch_size", self.batch_size, minimum=1, maximum=self.num_train - 1)
        checks.check_count("far", self.far, minimum=self.num_steps + 1)
        checks.check_positive("alpha", self.alpha)
        checks.check_distinct("models", self.models)
        for name in self.models:
            checks.check_choice("models", name, MODELS)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        # 256 pairs divide into batches of 64: a smaller one would compile again.
        return dataclasses.replace(
            self,
            num_seeds=2,
            num_validation=100,
            num_test=100,
            num_epochs=2,
            oracle_epochs=4,
            num_steps=3,
            num_train=257,
        )


def source(config: Config, data: Digits | None = None) -> Digits:
    """Return the sequence of a configuration, or the given one, after checking it."""
    if data is None:
        data = ordered_mnist(config.num_digits, data=config.data)
    images, labels, name = data
    needed = config.num_train + config.num_validation + config.num_test
    if needed > len(images):
        raise checks.WrongValue(
            "`num_train`, `num_validation` and `num_test` must sum to at most the sequence's "
            f"length, {len(images)}, got {needed}."
        )
    num_digits = int(labels.max()) + 1
    if num_digits != config.num_digits:
        wanted_number = f"be the number of different digits in the sequence ({num_digits})"
        checks.fail("num_digits", wanted_number, config.num_digits)
    return images, labels, name  # a plain tuple, because its hash is in the identity of a run


def compute(
    config: Config,
    *,
    key: Array,
    data: Digits | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, fit, forecast and read, on a sequence of `koopman.datasets.ordered_mnist`.

    See `figures.Figure.compute`.

    Returns:
        `test_images` [images, rows, columns] and their digits, `labels`. Forecasts from them, by
        model, seed, protocol, scale and horizon (`times`, 1 to `num_steps`, and `far`): `logits` of
        the oracle [..., images, classes], the digit read, `predicted` [..., images], -1 if a logit
        is not finite, and `accuracy`, the fraction read as the right digit. By model and seed:
        `strips` [protocols, steps, rows, columns], forecasts from the first image at scale "raw";
        `eigenvalues` [components]; `left` [images, components], left eigenfunctions, 0 for latent
        maps; `eigenvalue_error` and `phase_error`, the largest distance and angle of a root of
        unity to the nearest eigenvalue; `stuck`, True if over 9 in 10 forecasts one step ahead are
        read as one digit. By trained network and seed: `validation` [epochs], the validation loss
        along training; `batched`, encoders' last one as the mean over batches; `diverged_at`, the
        step at which the network diverged, or -1. `oracle_accuracy` [seeds], on validation images.
        Missing numbers, and those of a seed whose network or oracle diverged, are NaN.
    """
    data = source(config, data)
    return figures.run(_computed, config, key=key, data=data, cache=cache, progress=progress)


def _computed(config: Config, key: Array, data: Digits, cache: Cache) -> xarray.Dataset:
    images, labels, sequence_name = data
    num_seeds = config.num_seeds
    ends = np.cumsum([config.num_train, config.num_validation, config.num_test])
    train_images, validation_images, test_images, _ = np.split(images, ends)
    train_labels, validation_labels, test_labels, _ = np.split(labels, ends)

    networks = train_networks(config, key, train_images, validation_images, train_labels, cache)
    oracles = networks.models["oracle"]
    is_alive = figures.check_some_left(networks.diverged_at["oracle"], "oracles")
    cache.network = member(oracles, 0)
    norms = np.sqrt((train_images**2).sum((1, 2)))
    norm = float(norms.mean())

    jobs = {}
    legend = []
    for name, model in MODELS.items():
        if name in config.models:
            jobs[name] = partial(
                _evaluated, config, name, networks, train_images, test_images, norm
            )
            legend.append(model.label)
    evaluations = cache.get_all(jobs, "forecasting")

    run = eqx.filter_jit(encode)
    logits = []
    for seed in range(num_seeds):
        logits.append(run(member(oracles, seed), jnp.asarray(validation_images)))
    is_right = predicted(np.stack(logits)) == validation_labels
    oracle_accuracy = np.where(is_alive, is_right.mean(1), np.nan)

    variables: dict[str, Any] = {}
    axes_of_forecasts = {
        "logits": ("protocols", "scales", "times", "images", "classes"),
        "strips": ("protocols", "steps", "rows", "columns"),
        "eigenvalues": ("components",),
        "left": ("images", "components"),
    }
    for name, axes in axes_of_forecasts.items():
        arrays = [evaluation[name] for evaluation in evaluations.values()]
        variables[name] = (("models", "seeds", *axes), np.stack(arrays))
    variables["test_images"] = (("images", "rows", "columns"), test_images)
    axes_of_networks = {"validation": ("epochs",), "batched": (), "diverged_at": ()}
    for name, axes in axes_of_networks.items():
        arrays = list(getattr(networks, name).values())
        variables[name] = (("networks", "seeds", *axes), np.stack(arrays))
    variables["oracle_accuracy"] = ("seeds", oracle_accuracy)
    coords = {
        "models": list(jobs),
        "legend": ("models", legend),
        "networks": list(networks.diverged_at),
        "protocols": list(PROTOCOLS),
        "scales": list(SCALES),
        "times": ("times", [*range(1, config.num_steps + 1), config.far], {"units": "steps"}),
        "labels": ("images", test_labels),
        "seeds": np.arange(num_seeds),
        "epochs": np.arange(config.num_epochs + 1),
    }
    description = {"name": sequence_name}
    for block in PARTS:
        description[f"num_{block}"] = getattr(config, f"num_{block}")
    attributes = {"data": json.dumps(description)}
    return measured(xarray.Dataset(variables, coords, attributes))


def _evaluated(
    config: Config, name: str, networks: Networks, train: np.ndarray, test: np.ndarray, norm: float
) -> dict[str, np.ndarray]:
    """Evaluate a model's forecasters of all seeds.

    Arrays of seeds whose networks or oracle diverged are NaN.
    """
    models = networks.models
    diverged_at = networks.diverged_at
    is_alive = (diverged_at["oracle"] < 0) & (diverged_at[MODELS[name].network] < 0)
    options = {
        "num_steps": config.num_steps,
        "far": config.far,
        "num_digits": config.num_digits,
        "norm": norm,
    }
    seeds = [_nothing(config, test)] * config.num_seeds
    for seed in np.flatnonzero(is_alive).tolist():
        fitted = forecaster(config, name, train, models, seed)
        oracle = member(models["oracle"], seed)
        seeds[seed] = evaluate(fitted, oracle, test, **options)

    stacked = {}
    for field in seeds[0]:
        stacked[field] = np.stack([arrays[field] for arrays in seeds])
    return stacked


def _nothing(config: Config, test: np.ndarray) -> dict[str, np.ndarray]:
    """Return NaN in the shapes of a model's forecasts for one seed."""
    digits = config.num_digits
    axes = (len(PROTOCOLS), len(SCALES), config.num_steps + 1, len(test), digits)
    strips = (len(PROTOCOLS), config.num_steps, *test.shape[1:])
    return {
        "logits": np.full(axes, np.nan, np.float32),
        "strips": np.full(strips, np.nan, np.float32),
        "eigenvalues": np.full(digits, np.nan, np.complex64),
        "left": np.full((len(test), digits), np.nan, np.complex64),
    }


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    return f"{drawing.caption(dataset)} Data: {headline(dataset)}."


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    data = json.loads(dataset.attrs["data"])
    seeds = dataset.seeds.values
    sizes = ", ".join(f"{data[f'num_{block}']} {block}" for block in PARTS)
    names = []
    for name in dataset.networks.values:
        names += [f"{name} seed {seed}" for seed in seeds]
    oracle = cell(dataset.oracle_accuracy.values, factor=100, unit=" %")
    diverged = figures.named_diverged(names, dataset.diverged_at.values.reshape(-1))
    return (
        f"{data['name']}: {sizes} images, {len(seeds)} seeds; oracle {oracle} right on "
        f"validation images{diverged}"
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per model."""
    *_, last, far = dataset.times.values
    columns = {
        f"images, {last}": ("images", "raw", last),
        f"powers, {last}": ("powers", "raw", last),
        f"rescaled, {last}": ("powers", "rescaled", last),
        f"powers, {far}": ("powers", "raw", far),
        f"rescaled, {far}": ("powers", "rescaled", far),
        f"circle, {last}": ("circle", "raw", last),
        f"circle, {far}": ("circle", "raw", far),
        f"roots, {far}": ("roots", "raw", far),
    }
    rows = [["model", *columns, "eigenvalue error", "phase error", "loss"]]
    for name in dataset.models.values:
        model = dataset.sel(models=name)
        row = [model.legend.item()]
        for protocol, scale, time in columns.values():
            accuracy = model.accuracy.sel(protocols=protocol, scales=scale, times=time)
            row.append(cell(accuracy.values, 3))
        row.append(cell(model.eigenvalue_error.values, 3))
        row.append(cell(model.phase_error.values, 5))
        loss = ""
        if name in dataset.networks:
            losses = dataset.validation.sel(networks=name)
            loss = cell(losses[:, -1].values, 3)
        rows.append([*row, loss])
    return rows
