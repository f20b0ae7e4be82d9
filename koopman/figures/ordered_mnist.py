"""Figure `ordered-mnist`: learn the order of digits, and forecast images.

Operators are fitted on features of trained encoders, and an oracle reads the forecast images.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex

from dissociation import figures, member
from dissociation.data import NAMES, Dataset, load
from dissociation.figures import DataName, cell
from koopman import encode
from koopman.datasets import OrderedDigits, cycle_spectrum, ordered_mnist
from koopman.figures import _ordered_mnist_drawing as drawing
from koopman.figures._ordered_mnist_drawing import draw as draw
from koopman.figures._ordered_mnist_measures import PROTOCOLS, SCALES, Forecaster, evaluate, predicted
from koopman.figures._ordered_mnist_models import MODELS, Networks, forecasters, train_networks

__all__ = ["Config", "compute", "draw", "PROTOCOLS"]

STEM = "ordered-mnist"
SHOWS = "Digits in sequence: encoders, operators, and forecast images read by an oracle."

AXES = {
    "times": ("times",),  # horizons: 1 to `num_steps`, and `far`
    "labels": ("images",),  # digits of the test images
    "oracle_accuracy": ("seeds",),  # on the validation images
    "accuracy": ("models", "seeds", "protocols", "scales", "times"),  # fraction of forecasts read as the right digit
    "predicted": ("models", "seeds", "protocols", "scales", "times", "images"),  # the digit read
    "logits": ("models", "seeds", "protocols", "scales", "times", "images", "classes"),  # of the oracle
    "strips": ("models", "seeds", "protocols", "steps", "rows", "columns"),  # forecasts from the first test image
    "eigenvalues": ("models", "seeds", "components"),
    "left": ("models", "seeds", "images", "components"),  # left eigenfunctions on the test images
    "validation": ("models", "seeds", "epochs"),  # validation loss of trained networks along training
    "batched": ("models", "seeds"),  # last loss of encoders as the mean over batches
    "diverged_at": ("models", "seeds"),  # the step at which a trained network diverged, or -1
    "protocols": ("protocols",),
    "scales": ("scales",),
}
"""Axes of the arrays. Numbers of a seed are NaN if its network or its oracle diverged."""

UNITS = {"times": "steps"}


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
        figures.check_choice("data", self.data, NAMES)
        for name in ("num_digits", "num_seeds", "num_test", "num_steps", "batch_size"):
            figures.check_count(name, getattr(self, name), minimum=1)
        for name in ("num_train", "num_validation"):
            figures.check_count(name, getattr(self, name), minimum=2)
        if self.num_digits > 10:
            figures.fail("num_digits", "be at most 10", self.num_digits)
        if self.batch_size >= self.num_train:
            figures.fail("batch_size", f"be below `num_train` ({self.num_train})", self.batch_size)
        for name in ("num_epochs", "oracle_epochs"):
            figures.check_count(name, getattr(self, name))
        if figures.check_count("far", self.far) <= self.num_steps:
            figures.fail("far", f"be beyond `num_steps` ({self.num_steps})", self.far)
        figures.check_positive("alpha", self.alpha)
        figures.check_distinct("models", self.models)
        for name in self.models:
            figures.check_choice("models", name, MODELS)

    def quick(self) -> "Config":
        """Return the settings of a smoke run."""
        return dataclasses.replace(
            self,
            num_seeds=2,
            num_train=257,  # 256 pairs divide into batches of 64: a smaller one would compile again
            num_validation=100,
            num_test=100,
            num_epochs=2,
            oracle_epochs=4,
            num_steps=3,
        )


class Results(NamedTuple):
    """Results of the figure, see `AXES`; `images` are test images, [n, 28, 28]."""

    config: Config
    data: dict[str, Any]
    images: np.ndarray
    labels: np.ndarray
    times: np.ndarray
    logits: dict[str, np.ndarray]
    strips: dict[str, np.ndarray]
    eigenvalues: dict[str, np.ndarray]
    left: dict[str, np.ndarray]
    validation: dict[str, np.ndarray]
    batched: dict[str, np.ndarray]
    oracle_accuracy: np.ndarray
    diverged_at: dict[str, np.ndarray]
    seconds: dict[str, float]
    member: Any = None

    def accuracy(self, model: str) -> np.ndarray:
        """Return the fraction of forecasts read as the right digit: [seeds, protocols, scales, times]."""
        digits = (self.labels[None] + self.times[:, None]) % self.config.num_digits
        right = self.logits[model].argmax(-1) == digits
        return np.where(np.isfinite(self.logits[model]).all(-1), right, np.nan).mean(-1)


def source(config: Config) -> Dataset:
    """Load the data set of the sequence."""
    data = load(config.data)
    _split(config, ordered_mnist(config.num_digits, data=data))
    return data


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | figures.MeterFactory | None = None,
) -> Results:
    """Train, fit, forecast and read, on a sequence from `dataset`; see `figures.Figure.compute`."""
    sequence = ordered_mnist(config.num_digits, data=source(config) if dataset is None else dataset)
    _split(config, sequence)
    with figures.Parts(folder, figures.identity_of(config, key, (sequence.images, sequence.labels)), progress) as parts:
        return _computed(config, key, sequence, parts)


def _computed(config: Config, key: Array, sequence: OrderedDigits, parts: figures.Parts) -> Results:
    train, validation, test, labels = _split(config, sequence)
    networks = train_networks(config, key, train, validation, labels["train"], parts)
    diverged_at, oracles = networks.diverged_at, networks.models["oracle"]
    figures.check_some_left(diverged_at["oracle"], "oracles")
    norm = float(np.sqrt((train**2).sum((1, 2))).mean())
    jobs = {
        name: partial(_evaluated, config, name, build, networks, test, norm)
        for name, build in forecasters(config, train, networks.models).items()
    }
    evaluations = parts.get_all(jobs, "forecasting")
    run = eqx.filter_jit(encode)
    logits = [np.asarray(run(member(oracles, seed), jnp.asarray(validation))) for seed in range(config.num_seeds)]
    right = (np.stack(logits).argmax(-1) == labels["validation"][None]).mean(1)
    return Results(
        config=config,
        data={"name": sequence.name, "num_train": len(train), "num_validation": len(validation), "num_test": len(test)},
        images=test,
        labels=labels["test"],
        times=np.asarray([*range(1, config.num_steps + 1), config.far]),
        **{field: {name: part[field] for name, part in evaluations.items()} for field in _nothing(config, test)},
        validation=networks.validation,
        batched=networks.batched,
        oracle_accuracy=np.where(diverged_at["oracle"] < 0, right, np.nan),
        diverged_at=diverged_at,
        seconds=parts.seconds,
        member=member(oracles, 0),
    )


def _evaluated(
    config: Config, name: str, build: Callable[[int], Forecaster], networks: Networks, test: np.ndarray, norm: float
) -> dict[str, np.ndarray]:
    """Evaluate a model's forecasters of all seeds; NaN for seeds whose networks or oracle diverged."""
    needed = [networks.diverged_at[network] for network in ("oracle", *MODELS[name].networks)]
    options = {"num_steps": config.num_steps, "far": config.far, "num_digits": config.num_digits, "norm": norm}
    found = {
        seed: evaluate(build(seed), member(networks.models["oracle"], seed), test, **options)
        for seed in np.flatnonzero((np.stack(needed) < 0).all(0)).tolist()
    }
    shapes = next(iter(found.values()), None) or _nothing(config, test)
    nothing = {field: np.full_like(value, np.nan) for field, value in shapes.items()}
    seeds = [found.get(seed, nothing) for seed in range(config.num_seeds)]
    return {field: np.stack([seed[field] for seed in seeds]) for field in nothing}


def _nothing(config: Config, test: np.ndarray) -> dict[str, np.ndarray]:
    """Return zeros of the shapes of a model's forecasts for one seed."""
    protocols, digits = len(PROTOCOLS), config.num_digits
    return {
        "logits": np.zeros((protocols, len(SCALES), config.num_steps + 1, len(test), digits), np.float32),
        "strips": np.zeros((protocols, config.num_steps, *test.shape[1:]), np.float32),
        "eigenvalues": np.zeros(digits, np.complex64),
        "left": np.zeros((len(test), digits), np.complex64),
    }


def _split(config: Config, sequence: OrderedDigits) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    sizes = np.cumsum([config.num_train, config.num_validation, config.num_test])
    if sizes[-1] > len(sequence.images):
        raise figures.WrongValue(
            f"`num_train`, `num_validation` and `num_test` must sum to at most the sequence's length, "
            f"{len(sequence.images)}, got {sizes[-1]}."
        )
    train, validation, test, _ = np.split(sequence.images, sizes)
    labels = np.split(sequence.labels, sizes)
    return train, validation, test, dict(zip(("train", "validation", "test"), labels[:3], strict=True))


def eigenvalue_errors(results: Results) -> dict[str, np.ndarray]:
    """Return per model the largest distance of a root of unity to its nearest eigenvalue: [seeds]."""
    roots = cycle_spectrum(results.config.num_digits)
    return {name: np.abs(nearest(values, roots) - roots[None]).max(1) for name, values in results.eigenvalues.items()}


def phase_errors(results: Results) -> dict[str, np.ndarray]:
    """Return per model the largest angle of a root of unity to the nearest eigenvalue, radians per step: [seeds]."""
    # After t steps powers of the operator are off by t times this angle; digits are wrong from about pi / k.
    roots = cycle_spectrum(results.config.num_digits)
    return {
        name: np.abs(np.angle(nearest(values, roots) * np.conj(roots)[None])).max(1)
        for name, values in results.eigenvalues.items()
    }


def nearest(values: Complex[np.ndarray, "seeds r"], roots: Complex[np.ndarray, " k"]) -> Complex[np.ndarray, "seeds k"]:
    """Return for every root the nearest eigenvalue of each seed."""
    return np.take_along_axis(values, np.abs(values[:, :, None] - roots[None, None]).argmin(1), 1)


def arrays(results: Results) -> dict[str, Any]:
    """Return the arrays of the figure, by name."""
    fields = ("logits", "strips", "eigenvalues", "left", "validation", "batched", "diverged_at")
    return {
        "protocols": np.asarray(tuple(PROTOCOLS)),
        "scales": np.asarray(SCALES),
        "times": results.times,
        "labels": results.labels,
        "oracle_accuracy": results.oracle_accuracy,
        "accuracy": {name: results.accuracy(name) for name in results.logits},
        "predicted": {name: predicted(part) for name, part in results.logits.items()},
        **{field: getattr(results, field) for field in fields},
    }


def describe(results: Results) -> dict[str, Any]:
    """Return settings and numbers for the JSON file."""
    return {
        "figure": "ordered-mnist",
        "config": results.config,
        "data": results.data,
        "protocols": list(PROTOCOLS),
        "scales": list(SCALES),
        "largest distance of a root of unity to the nearest eigenvalue": eigenvalue_errors(results),
        "largest phase error, radians per step": phase_errors(results),
    }


def families(results: Results) -> dict[str, Any]:
    """Return the ends of array names, by the axes that they make; see `figures.Figure`."""
    kinds = ("accuracy", "predicted", "logits", "strips", "eigenvalues", "left", "validation", "batched", "diverged_at")
    return dict.fromkeys(kinds, {"models": tuple(results.logits)})


def caption(results: Results) -> str:
    """Return the caption."""
    return f"{drawing.caption(results)} Data: {headline(results)}."


def headline(results: Results) -> str:
    """Return a line with the data and the size of the run."""
    sizes = ", ".join(f"{results.data[f'num_{part}']} {part}" for part in ("train", "validation", "test"))
    names = [f"{name} seed {i}" for name, steps in results.diverged_at.items() for i in range(len(steps))]
    oracle = cell(results.oracle_accuracy, factor=100, unit=" %")
    return (
        f"{results.data['name']}: {sizes} images, {results.config.num_seeds} seeds; "
        f"oracle {oracle} right on validation images"
        f"{figures.named_diverged(names, np.concatenate(list(results.diverged_at.values())))}"
    )


def table(results: Results) -> list[list[str]]:
    """Return a header and a row per model."""
    last, far = results.config.num_steps, results.config.far
    columns = {  # protocol, scale and time
        f"images, {last}": (0, 0, last - 1),
        f"powers, {last}": (1, 0, last - 1),
        f"rescaled, {last}": (1, 1, last - 1),
        f"powers, {far}": (1, 0, last),
        f"rescaled, {far}": (1, 1, last),
        f"circle, {last}": (2, 0, last - 1),
        f"circle, {far}": (2, 0, last),
        f"roots, {far}": (3, 0, last),
    }
    errors, phases = eigenvalue_errors(results), phase_errors(results)
    rows = [["model", *columns, "eigenvalue error", "phase error", "loss"]]
    for name in results.logits:
        accuracy = results.accuracy(name)
        row = [cell(accuracy[:, protocol, scale, time], 3) for protocol, scale, time in columns.values()]
        loss = cell(results.validation[name][:, -1], 3) if name in results.validation else ""
        rows.append([MODELS[name].label, *row, cell(errors[name], 3), cell(phases[name], 5), loss])
    return rows
