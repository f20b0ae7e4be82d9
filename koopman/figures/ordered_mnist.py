"""Figure `ordered-mnist`: learning that digits come in turn, and forecasting the images to come.

Encoders are trained on a sequence whose next image shows the next digit, operators are fitted on their features, and an
oracle, a classifier trained apart, reads the forecast images. The true operator is a cycle: its eigenvalues are roots
of unity, so a good model is as right after 1000 steps as after one.
"""

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array, Complex
from matplotlib.figure import Figure

from dissociation import plotting
from dissociation.checks import WrongValue
from dissociation.data.datasets import Dataset, load
from dissociation.figures.artifacts import Parts, identity_of
from dissociation.figures.seeds import cell, check_some_left, named_diverged
from dissociation.members import member
from dissociation.progress import MeterFactory, open_meter
from koopman.datasets.ordered_mnist import OrderedDigits, cycle_spectrum, ordered_mnist
from koopman.figures.film_models import LABELS, NETWORKS, Config, forecasters, train_networks
from koopman.figures.films import PROTOCOLS, SCALES, Forecaster, evaluate
from koopman.learn import encode

STEM = "ordered-mnist"
SHOWS = "Digits in turn: encoders, operators, and forecast images read by an oracle."

AXES = {
    "times": ("times",),
    "labels": ("images",),
    "oracle_accuracy": ("seeds",),
    "accuracy": ("seeds", "protocols", "scales", "times"),
    "predicted": ("seeds", "protocols", "scales", "times", "images"),
    "logits": ("seeds", "protocols", "scales", "times", "images", "classes"),
    "strips": ("seeds", "protocols", "steps", "rows", "columns"),
    "eigenvalues": ("seeds", "components"),
    "left": ("seeds", "images", "components"),
    "validation": ("seeds", "epochs"),
    "batched": ("seeds",),
    "diverged_at": ("seeds",),
}

LOOKS = {
    "linear": {"color": "0.6"},
    "autoencoder": {"linestyle": (0, (2, 1)), "color": "C0"},
    "autoencoder_operator": {"linestyle": (0, (2, 1)), "color": "C1"},
    "autoencoder_images": {"linestyle": (0, (2, 1)), "color": "C2"},
    "orthogonal": {"linestyle": (0, (2, 1)), "color": "C3"},
    "classifier": {"color": "C0"},
    "vamp": {"color": "C1"},
    "contrastive": {"color": "C2"},
    "dpnets": {"color": "C3"},
}
"""Encoders are drawn in full, autoencoders in dashes."""

SHOWN = {
    "linear": "images",
    "classifier": "images",
    "vamp": "images",
    "contrastive": "images",
    "dpnets": "images",
    "autoencoder": "powers",
    "autoencoder_operator": "powers",
    "autoencoder_images": "images",
    "orthogonal": "powers",
}
"""The protocol by which a model's curve and strip are drawn."""


class Results(NamedTuple):
    """Everything the figure shows.

    Attributes:
        config: What was asked for.
        data: The sequence's source and sizes.
        images: Test images, [n, 28, 28].
        labels: Their digits, [n].
        times: Horizons of the accuracies: 1 to `num_steps`, and `far`.
        logits: Per model, the oracle's, [seeds, protocols, scales, times, n, classes].
        strips: Per model, forecast images from the first test image, [seeds, protocols, num_steps, 28, 28].
        eigenvalues: Per model, [seeds, r].
        left: Per model, left eigenfunctions on the test images, [seeds, n, r].
        validation: Per trained encoder, its validation loss along training, [seeds, epochs + 1].
        batched: The same at the end as the mean over batches, [seeds].
        oracle_accuracy: On the validation images, [seeds].
        diverged_at: Per trained network, the step at which a seed diverged, or -1: [seeds]. Its numbers are NaN, and
            all numbers of a seed whose oracle diverged.
        seconds: Wall time of every part.
    """

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

    def accuracy(self, model: str) -> np.ndarray:
        """Share of forecasts that the oracle reads as the right digit: [seeds, protocols, scales, times]."""
        digits = (self.labels[None] + self.times[:, None]) % self.config.num_digits
        found = self.logits[model].argmax(-1) == digits
        return np.where(np.isfinite(self.logits[model]).all(-1), found, np.nan).mean(-1)


def source(config: Config) -> Dataset:
    """The data set that the sequence is cut from.

    Raises:
        WrongValue: If the sequence is shorter than the three splits.
    """
    data = load(config.data)
    _split(config, ordered_mnist(config.num_digits, data=data))
    return data


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains, fits, forecasts and reads.

    Args:
        config: What to do.
        key: Everything random follows from it.
        dataset: The source of the sequence, in place of the one that `config.data` names.
        folder: Where finished parts are kept; a second call with the same arguments goes on from there.
        progress: See `dissociation.progress`.

    Returns:
        The results.

    Raises:
        RefusedFile: If `folder` holds parts of another run, or broken ones.
        WrongValue: If the sequence is shorter than the three splits, or the oracle diverged with all seeds.
    """
    film = ordered_mnist(config.num_digits, data=source(config) if dataset is None else dataset)
    _split(config, film)
    with Parts(folder, identity_of(config, key, (film.images, film.labels))) as parts:
        return _computed(config, key, film, parts, progress)


def _computed(
    config: Config, key: Array, film: OrderedDigits, parts: Parts, progress: str | MeterFactory | None
) -> Results:
    train, validation, test, labels = _split(config, film)
    trained, curves, batched, diverged_at = train_networks(config, key, train, validation, labels, parts, progress)
    check_some_left(diverged_at["oracle"], "oracles")
    builders = forecasters(config, train, trained)
    norm = float(np.sqrt((train**2).sum((1, 2))).mean())
    evaluations: dict[str, dict[str, np.ndarray]] = {}
    meter = open_meter(progress, len(builders), "forecasting")
    try:
        for done, (name, build) in enumerate(builders.items()):
            meter.advance(done, LABELS[name])

            def over_seeds(name: str, build: Callable[[int], Forecaster]) -> dict[str, np.ndarray]:
                options = {"num_steps": config.num_steps, "far": config.far, "num_digits": config.num_digits}
                needed = [diverged_at[network] for network in ("oracle", *NETWORKS[name])]
                alive = (np.stack(needed) < 0).all(0)
                seeds = {
                    seed: evaluate(build(seed), member(trained["oracle"], seed), test, norm=norm, **options)._asdict()
                    for seed in np.flatnonzero(alive).tolist()
                }
                nothing = next(iter(seeds.values()), None) or _nothing(config, test)
                nothing = {field: np.full_like(value, np.nan) for field, value in nothing.items()}
                seeds = [seeds.get(seed, nothing) for seed in range(config.num_seeds)]
                return {field: np.stack([seed[field] for seed in seeds]) for field in nothing}

            evaluations[name] = parts.get(name, partial(over_seeds, name, build))
        meter.advance(len(builders), "done")
    finally:
        meter.close()

    def of(field: str) -> dict[str, np.ndarray]:
        return {name: part[field] for name, part in evaluations.items()}

    read = _logits_of_members(trained["oracle"], validation, config.num_seeds).argmax(-1)
    right = (read == labels["validation"][None]).mean(1)
    return Results(
        config=config,
        data={"name": film.name, "num_train": len(train), "num_validation": len(validation), "num_test": len(test)},
        images=test,
        labels=labels["test"],
        times=np.asarray([*range(1, config.num_steps + 1), config.far]),
        logits=of("logits"),
        strips=of("strips"),
        eigenvalues=of("eigenvalues"),
        left=of("left"),
        validation=curves,
        batched=batched,
        oracle_accuracy=np.where(diverged_at["oracle"] < 0, right, np.nan),
        diverged_at=diverged_at,
        seconds=parts.seconds,
    )


def _nothing(config: Config, test: np.ndarray) -> dict[str, np.ndarray]:
    """The shapes of a model's forecasts for one seed, where there is no seed to take them from."""
    protocols, digits = len(PROTOCOLS), config.num_digits
    return {
        "logits": np.zeros((protocols, len(SCALES), config.num_steps + 1, len(test), digits), np.float32),
        "strips": np.zeros((protocols, config.num_steps, *test.shape[1:]), np.float32),
        "eigenvalues": np.zeros(digits, np.complex64),
        "left": np.zeros((len(test), digits), np.complex64),
    }


def _split(config: Config, film: OrderedDigits) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    sizes = np.cumsum([config.num_train, config.num_validation, config.num_test])
    if sizes[-1] > len(film.images):
        raise WrongValue(
            f"`num_train`, `num_validation` and `num_test` must sum to at most the sequence's length, "
            f"{len(film.images)}, got {sizes[-1]}."
        )
    train, validation, test, _ = np.split(film.images, sizes)
    labels = np.split(film.labels, sizes)
    return train, validation, test, dict(zip(("train", "validation", "test"), labels[:3], strict=True))


def _logits_of_members(models: Any, images: np.ndarray, count: int) -> np.ndarray:
    run = eqx.filter_jit(encode)
    return np.stack([np.asarray(run(member(models, seed), jnp.asarray(images))) for seed in range(count)])


def eigenvalue_errors(results: Results) -> dict[str, np.ndarray]:
    """Per model, the largest distance of a root of unity to the nearest eigenvalue: [seeds]."""
    roots = cycle_spectrum(results.config.num_digits)
    return {name: np.abs(nearest(values, roots) - roots[None]).max(1) for name, values in results.eigenvalues.items()}


def phase_errors(results: Results) -> dict[str, np.ndarray]:
    """Per model, the largest angle between a root of unity and the nearest eigenvalue, radians per step: [seeds].

    After t steps powers of the operator are out by t times it; digits are mistaken from about pi / k on.
    """
    roots = cycle_spectrum(results.config.num_digits)
    return {
        name: np.abs(np.angle(nearest(values, roots) * np.conj(roots)[None])).max(1)
        for name, values in results.eigenvalues.items()
    }


def nearest(values: Complex[np.ndarray, "seeds r"], roots: Complex[np.ndarray, " k"]) -> Complex[np.ndarray, "seeds k"]:
    """For every root the nearest eigenvalue of each seed."""
    closest = np.abs(values[:, :, None] - roots[None, None]).argmin(1)
    return np.take_along_axis(values, closest, 1)


def predicted(logits: np.ndarray) -> np.ndarray:
    """What the oracle reads, int8: the class of the largest logit, or -1 where one is not finite."""
    return np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1).astype(np.int8)


def _shown_seed(results: Results, name: str) -> int:
    """The first that did not diverge."""
    return int(np.isfinite(results.eigenvalues[name]).all(1).argmax())


def draw(results: Results) -> Figure:
    """The sequence, accuracy against time, forecast strips, eigenfunctions and eigenvalues.

    Args:
        results: What `compute` returned.

    Returns:
        A figure of 7 x 8.5 inches.
    """
    with plotting.house_style():
        figure = plt.figure(figsize=(7.0, 8.5))
        panels: Any = figure.subfigures(4, 1, height_ratios=[0.7, 2.3, 4.2, 2.2])
        sequence, curves, strips, lower = panels
        _draw_sequence(sequence, results)
        _draw_accuracy(curves, results)
        _draw_strips(strips, results)
        _draw_spectra(lower, results)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _draw_sequence(panel: Any, results: Results) -> None:
    axes = panel.subplots(1, 10)
    for axis, image, label in zip(axes, results.images, results.labels, strict=False):
        axis.imshow(image, cmap="gray", vmin=0, vmax=1)
        axis.set_title(str(label), fontsize="small")
        axis.axis("off")


def _draw_accuracy(panel: Any, results: Results) -> None:
    axis = panel.subplots()
    steps = results.config.num_steps
    for name in results.logits:
        protocol = SHOWN[name]
        curve = results.accuracy(name)[:, list(PROTOCOLS).index(protocol), 0, :steps]
        plotting.band(axis, results.times[:steps], curve, label=LABELS[name], **LOOKS[name])
    axis.axhline(1 / results.config.num_digits, linestyle="dashed", color="black", label="Random")
    axis.set(xlabel="time steps", ylabel="accuracy", xlim=(1, steps), ylim=(0, 1.1))
    panel.legend(*axis.get_legend_handles_labels(), loc="outside right center", fontsize="small")


def _draw_strips(panel: Any, results: Results) -> None:
    steps, digits = results.config.num_steps, results.config.num_digits
    shown = min(steps, 14)
    axes = panel.subplots(len(results.logits), shown + 1, squeeze=False)
    start, label = results.images[0], int(results.labels[0])
    for row, name in zip(axes, results.logits, strict=True):
        which, seed = list(PROTOCOLS).index(SHOWN[name]), _shown_seed(results, name)
        read = predicted(results.logits[name][seed, which, 0, :shown, 0])
        for step, axis in enumerate(row):
            image = start if step == 0 else results.strips[name][seed, which, step - 1]
            axis.imshow(image, cmap="gray")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(False)
            true = (label + step) % digits
            if row is axes[0]:
                axis.set_title(str(true), fontsize="small")
            if step:
                colour = "limegreen" if read[step - 1] == true else "red"
                axis.text(0.97, 0.97, str(read[step - 1]), transform=axis.transAxes, ha="right", va="top", color=colour)
        row[0].set_ylabel(LABELS[name], rotation=0, ha="right", va="center", fontsize="small")


def _draw_spectra(panel: Any, results: Results) -> None:
    names = [name for name in ("classifier", "vamp", "contrastive") if name in results.logits]
    axes = panel.subplots(1, len(names) + 1, squeeze=False)[0]
    colours = plt.rcParams["axes.prop_cycle"].by_key()["color"]
    for axis, name in zip(axes, names, strict=False):
        seed = _shown_seed(results, name)
        values, left = results.eigenvalues[name][seed], results.left[name][seed]
        pairs = [i for i in range(len(values)) if values[i].imag > 1e-3][:2]
        first, second = [left[:, i].real for i in (pairs if len(pairs) == 2 else (0, 1))]
        for digit in range(results.config.num_digits):
            own = results.labels == digit
            axis.scatter(first[own], second[own], s=2, color=colours[digit % len(colours)], label=str(digit))
        axis.set(xticks=[], yticks=[], title=LABELS[name])
    if names:
        axes[0].set(xlabel="left eigenfunction 1", ylabel="left eigenfunction 2")
        axes[0].legend(markerscale=3, fontsize="x-small", loc="best")
    disc = axes[-1]
    turn = np.exp(1j * np.linspace(0, 2 * np.pi, 200))
    disc.plot(np.real(turn), np.imag(turn), color="black", linewidth=0.5)
    roots = cycle_spectrum(results.config.num_digits)
    disc.plot(np.real(roots), np.imag(roots), "+", color="black", markersize=8, label="roots of unity")
    for name in [name for name in ("linear", *names) if name in results.logits]:
        values = results.eigenvalues[name].reshape(-1)
        disc.scatter(np.real(values), np.imag(values), s=6, label=LABELS[name], zorder=3, color=LOOKS[name]["color"])
    disc.set(aspect="equal", xticks=[-1, 0, 1], yticks=[-1, 0, 1], title="eigenvalues")
    panel.legend(*disc.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize="x-small")


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    fields = ("logits", "strips", "eigenvalues", "left", "validation", "batched")
    flat = {f"{field}_{name}": part for field in fields for name, part in getattr(results, field).items()}
    labels = {f"predicted_{name}": predicted(part) for name, part in results.logits.items()}
    accuracy = {f"accuracy_{name}": results.accuracy(name) for name in results.logits}
    fixed = {"times": results.times, "labels": results.labels, "oracle_accuracy": results.oracle_accuracy}
    diverged = {f"diverged_at_{name}": steps for name, steps in results.diverged_at.items()}
    return {**fixed, **accuracy, **labels, **flat, **diverged}


def describe(results: Results) -> dict[str, Any]:
    """What the JSON beside the figure says."""
    return {
        "figure": "ordered-mnist",
        "config": results.config,
        "data": results.data,
        "protocols": list(PROTOCOLS),
        "scales": list(SCALES),
        "largest distance of a root of unity to the nearest eigenvalue": eigenvalue_errors(results),
        "largest phase error, radians per step": phase_errors(results),
    }


def headline(results: Results) -> str:
    """What was computed on, in a line."""
    sizes = ", ".join(f"{results.data[f'num_{part}']} {part}" for part in ("train", "validation", "test"))
    names = [f"{name} seed {i}" for name, steps in results.diverged_at.items() for i in range(len(steps))]
    oracle = cell(results.oracle_accuracy, factor=100, unit=" %")
    return (
        f"{results.data['name']}: {sizes} pictures, {results.config.num_seeds} seeds; "
        f"oracle {oracle} right on validation pictures"
        f"{named_diverged(names, np.concatenate(list(results.diverged_at.values())))}"
    )


def table(results: Results) -> list[list[str]]:
    """A header and a row per model: accuracies at the last step and far ahead, eigenvalues, validation loss."""
    last, far = results.config.num_steps, results.config.far
    header = ["model", f"images, {last}", f"powers, {last}", f"rescaled, {last}", f"powers, {far}"]
    header += [
        f"rescaled, {far}",
        f"circle, {last}",
        f"circle, {far}",
        f"roots, {far}",
        "eigenvalue error",
        "phase error",
        "loss",
    ]
    errors, phases = eigenvalue_errors(results), phase_errors(results)
    rows = [header]
    for name in results.logits:
        found = results.accuracy(name)
        cells = [(0, 0, last - 1), (1, 0, last - 1), (1, 1, last - 1), (1, 0, last), (1, 1, last)]
        cells += [(2, 0, last - 1), (2, 0, last), (3, 0, last)]
        row = [cell(found[:, protocol, scale, time], 3) for protocol, scale, time in cells]
        loss = cell(results.validation[name][:, -1], 3) if name in results.validation else ""
        rows.append([LABELS[name], *row, cell(errors[name], 3), cell(phases[name], 5), loss])
    return rows
