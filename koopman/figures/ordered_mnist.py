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
        counts = {
            "num_seeds": 1,
            "num_test": 1,
            "num_steps": 1,
            "num_train": 2,
            "num_validation": 2,
        }
        for name, least in (counts | {"num_epochs": 0, "oracle_epochs": 0}).items():
            checks.check_count(name, getattr(self, name), minimum=least)
        checks.check_count("num_digits", self.num_digits, minimum=1, maximum=10)
        checks.check_count("batch_size", self.batch_size, minimum=1, maximum=self.num_train - 1)
        checks.check_count("far", self.far, minimum=self.num_steps + 1)
        checks.check_positive("alpha", self.alpha)
        checks.check_distinct("models", self.models)
        for name in self.models:
            checks.check_choice("models", name, MODELS)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=2, num_validation=100, num_test=100, num_epochs=2, oracle_epochs=4, num_steps=3,
            num_train=257,  # 256 pairs divide into batches of 64: a smaller one would compile again
        )  # fmt: skip


def source(config: Config, data: Digits | None = None) -> Digits:
    """Return the sequence of a configuration, or the given one, after checking it."""
    images, labels, name = (
        ordered_mnist(config.num_digits, data=config.data) if data is None else data
    )
    if (needed := config.num_train + config.num_validation + config.num_test) > len(images):
        raise checks.WrongValue(
            "`num_train`, `num_validation` and `num_test` must sum to at most the sequence's "
            f"length, {len(images)}, "
            f"got {needed}."
        )
    if (digits := int(labels.max()) + 1) != config.num_digits:
        checks.fail(
            "num_digits",
            f"be the number of different digits in the sequence ({digits})",
            config.num_digits,
        )
    return images, labels, name  # a plain tuple, because its hash is in the identity of a run


def compute(
    config: Config,
    *,
    key: Array,
    data: Digits | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, fit, forecast and read, on a sequence of `koopman.datasets.ordered_mnist`; see `figures.Figure.compute`.

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
    return figures.run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Digits, cache: Cache) -> xarray.Dataset:
    sizes = np.cumsum([config.num_train, config.num_validation, config.num_test])
    train, validation, test = zip(*(np.split(part, sizes)[:3] for part in data[:2]), strict=True)
    networks = train_networks(config, key, train[0], validation[0], train[1], cache)
    oracles, diverged_at = networks.models["oracle"], networks.diverged_at
    alive = figures.check_some_left(diverged_at["oracle"], "oracles")
    cache.network = member(oracles, 0)
    norm = float(np.sqrt((train[0] ** 2).sum((1, 2))).mean())
    names = [name for name in MODELS if name in config.models]
    jobs = {
        name: partial(_evaluated, config, name, networks, train[0], test[0], norm) for name in names
    }
    found = cache.get_all(jobs, "forecasting")
    run = eqx.filter_jit(encode)
    logits = [
        run(member(oracles, seed), jnp.asarray(validation[0])) for seed in range(config.num_seeds)
    ]
    right = (predicted(np.stack(logits)) == validation[1]).mean(1)
    forecasts = {
        "logits": ("protocols", "scales", "times", "images", "classes"),
        "strips": ("protocols", "steps", "rows", "columns"),
        "eigenvalues": ("components",),
        "left": ("images", "components"),
    }
    variables: dict[str, Any] = {
        name: (("models", "seeds", *axes), np.stack([one[name] for one in found.values()]))
        for name, axes in forecasts.items()
    }
    variables |= {
        "test_images": (("images", "rows", "columns"), test[0]),
        "validation": (
            ("networks", "seeds", "epochs"),
            np.stack(list(networks.validation.values())),
        ),
        "batched": (("networks", "seeds"), np.stack(list(networks.batched.values()))),
        "diverged_at": (("networks", "seeds"), np.stack(list(diverged_at.values()))),
        "oracle_accuracy": ("seeds", np.where(alive, right, np.nan)),
    }
    coords = {
        "models": list(found),
        "legend": ("models", [MODELS[name].label for name in found]),
        "networks": list(diverged_at),
        "protocols": list(PROTOCOLS),
        "scales": list(SCALES),
        "times": ("times", [*range(1, config.num_steps + 1), config.far], {"units": "steps"}),
        "labels": ("images", test[1]),
        "seeds": np.arange(config.num_seeds),
        "epochs": np.arange(config.num_epochs + 1),
    }
    described = {"name": data[2]} | {
        f"num_{name}": getattr(config, f"num_{name}") for name in PARTS
    }
    return measured(xarray.Dataset(variables, coords, {"data": json.dumps(described)}))


def _evaluated(
    config: Config, name: str, networks: Networks, train: np.ndarray, test: np.ndarray, norm: float
) -> dict[str, np.ndarray]:
    """Evaluate a model's forecasters of all seeds; NaN for seeds whose networks or oracle diverged."""
    alive = (networks.diverged_at["oracle"] < 0) & (networks.diverged_at[MODELS[name].network] < 0)
    options = {
        "num_steps": config.num_steps,
        "far": config.far,
        "num_digits": config.num_digits,
        "norm": norm,
    }
    seeds = [_nothing(config, test)] * config.num_seeds
    for seed in np.flatnonzero(alive).tolist():
        built = forecaster(config, name, train, networks.models, seed)
        seeds[seed] = evaluate(built, member(networks.models["oracle"], seed), test, **options)
    return {field: np.stack([seed[field] for seed in seeds]) for field in seeds[0]}


def _nothing(config: Config, test: np.ndarray) -> dict[str, np.ndarray]:
    """Return NaN in the shapes of a model's forecasts for one seed."""
    protocols, digits = len(PROTOCOLS), config.num_digits
    return {
        "logits": np.full(
            (protocols, len(SCALES), config.num_steps + 1, len(test), digits), np.nan, np.float32
        ),
        "strips": np.full((protocols, config.num_steps, *test.shape[1:]), np.nan, np.float32),
        "eigenvalues": np.full(digits, np.nan, np.complex64),
        "left": np.full((len(test), digits), np.nan, np.complex64),
    }


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    return f"{drawing.caption(dataset)} Data: {headline(dataset)}."


def headline(dataset: xarray.Dataset) -> str:
    """Return a line with the data and the size of the run."""
    data, seeds = json.loads(dataset.attrs["data"]), dataset.seeds.values
    sizes = ", ".join(f"{data[f'num_{part}']} {part}" for part in PARTS)
    names = [f"{name} seed {seed}" for name in dataset.networks.values for seed in seeds]
    oracle = cell(dataset.oracle_accuracy.values, factor=100, unit=" %")
    gone = figures.named_diverged(names, dataset.diverged_at.values.reshape(-1))
    return (
        f"{data['name']}: {sizes} images, {len(seeds)} seeds; oracle {oracle} right on "
        f"validation images{gone}"
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
    shown = [["model", *columns, "eigenvalue error", "phase error", "loss"]]
    for name in dataset.models.values:
        one = dataset.sel(models=name)
        row = [
            one.accuracy.sel(protocols=kind, scales=scale, times=time)
            for kind, scale, time in columns.values()
        ]
        loss = (
            cell(dataset.validation.sel(networks=name)[:, -1].values, 3)
            if name in dataset.networks
            else ""
        )
        cells = [cell(values.values, 3) for values in (*row, one.eigenvalue_error)]
        shown.append([one.legend.item(), *cells, cell(one.phase_error.values, 5), loss])
    return shown
