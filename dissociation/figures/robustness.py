"""Figure `robustness`: networks of one function and many representations, under noise on inputs and parameters.

Networks are trained from several seeds and rewritten without changing their function: moved in the null space of the
data, duplicated, scaled, given neurons without effect. Then inputs or parameters become noisy. The rewrites that act
on hidden neurons cannot change what input noise does, since they keep the function everywhere; a move in the null
space keeps it on the data alone. Noise on parameters, on the other hand, tells them apart.
"""

import dataclasses
import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from jaxtyping import Array
from matplotlib.figure import Figure

from dissociation._core.checks import check_count, check_non_negative, fail
from dissociation.data._datasets import Dataset
from dissociation.figures._artifacts import Parts, identity_of
from dissociation.figures._members import (
    FACTORS,
    DataName,
    ModelName,
    certify_members,
    check_members,
    check_neurons,
    measure_members,
    members_headline,
    neuron_rewrites,
    rewritten_group,
    train_members,
    worst,
)
from dissociation.figures._members import (
    source as source,
)
from dissociation.figures._null_spaces import moved_weights, null_perturbed, null_spaces, of_members
from dissociation.figures._seeds import cell, masked_part
from dissociation.measures._robustness import input_noise_error, parameter_noise_error
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._groups import NeuronGroup
from dissociation.rewrites._noise import parameter_noise
from dissociation.rewrites._null_spaces import null_basis
from dissociation.rewrites._seen import LayerInputs
from dissociation.training._members import take
from dissociation.training._progress import MeterFactory, open_meter

__all__ = ["Config", "compute", "draw"]

STEM = "noise-robustness"
SHOWS = "Test error of function-preserving rewrites under noise on inputs and on parameters."

AXES = {
    "input_scales": ("input_scales",),
    "parameter_scales": ("parameter_scales",),
    "input_error": ("seeds", "input_scales"),
    "parameter_error": ("seeds", "parameter_scales"),
    "clean_error": ("seeds",),
    "test_error": ("seeds", "epochs"),
    "diverged_at": ("seeds",),
}

UNITS = {"input_scales": "pixel intensity"}

LABELS = {
    "trained": "trained",
    "null_perturbed": "input null-perturbed",
    "duplicated": "duplicated",
    "scaled": "scaled",
    "nuisance": "nuisance neurons",
    "published_null": "function changed",
}
"""What the variants are called in the figure, in the order of its legend. The last is a null space by the usual float32
cut-off, which is too large."""


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of training, rewrites and noise."""

    data: DataName = "glyphs"
    """Data set, by its name in `_datasets.SOURCES`."""
    model: ModelName = "mlp"
    """The architecture; the neurons of its last hidden layer are rewritten."""
    num_seeds: int = 4
    """Networks trained from scratch."""
    num_epochs: int = 10
    """Passes over the training images."""
    num_train: int | None = None
    """Training images; None takes the data set's own number."""
    num_test: int | None = None
    """Test images; None takes the data set's own number."""
    width: int = 1024
    """Units in each of the two hidden layers; of networks of images, in the last."""
    num_scales: int = 40
    """Noise scales on each axis."""
    null_scale: float = 0.1
    """Standard deviation of the noise in the null space of the data, or, for networks of images, of what their last
    hidden layer sees of it."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    scale_factor: float = 20.0
    """Factor on incoming weights (outgoing ones are divided by it)."""
    num_zero: int = 1024
    """Neurons without effect, one per group."""
    published_null: bool = False
    """Whether to show what the usual float32 cut-off does: a null space too large, so the function changes."""

    def __post_init__(self):
        check_members(self)
        check_count("num_scales", self.num_scales, minimum=2)
        check_count("num_zero", self.num_zero)
        check_neurons("num_zero", self.num_zero, self.num_zero, self)
        check_non_negative("null_scale", self.null_scale)
        if self.null_scale > FACTORS[1]:
            fail("null_scale", f"be at most {FACTORS[1]:g}", self.null_scale)
        if self.published_null and self.model != "mlp":
            fail("published_null", "be left out but for the perceptron, whose first layer sees the data", self.model)

    def quick(self) -> "Config":
        """A small run that shows that everything works: seconds, no science."""
        return dataclasses.replace(
            self, num_seeds=2, num_epochs=5, num_train=2000, num_test=300, width=128, num_scales=10, num_zero=128
        )


class Results(NamedTuple):
    """Everything the figure shows.

    Attributes:
        config: What was asked for.
        data: The data set's name and sizes.
        input_scales: Noise scales on inputs, in units of pixel intensity (0 to 1), [scales].
        parameter_scales: Noise scales on parameters, [scales].
        input_error: Per variant, test error under input noise, [seeds, scales].
        parameter_error: Per variant, test error under parameter noise, [seeds, scales].
        clean_error: Per variant, test error without noise, [seeds].
        certificates: Per variant, largest absolute and relative change of a logit on the test images over all seeds,
            and predictions changed in all.
        null_space: Of what the moved weights see: its dimension, the rank, and the singular values on both sides of the
            cut; where each network has its own, the least clear.
        test_error: Test error along training, [seeds, epochs + 1].
        diverged_at: The step at which a network diverged, or -1: [seeds]. Its numbers are NaN.
        seconds: Wall time of every part.
        member: One of the networks, as a report shows it; None for results of another making.
    """

    config: Config
    data: dict[str, Any]
    input_scales: np.ndarray
    parameter_scales: np.ndarray
    input_error: dict[str, np.ndarray]
    parameter_error: dict[str, np.ndarray]
    clean_error: dict[str, np.ndarray]
    certificates: dict[str, dict[str, float]]
    null_space: dict[str, float]
    test_error: np.ndarray
    diverged_at: np.ndarray
    seconds: dict[str, float]
    member: Any = None


def rewrites(config: Config, group: NeuronGroup, weights: LayerInputs) -> dict[str, Callable[..., Any]]:
    """The variants: functions of one network and a key, the trained network itself first.

    Those that move in a null space take a pair of a key and a basis, orthonormal rows [dimension, features], in place
    of the key.
    """
    moved = null_perturbed(weights, config.null_scale)
    neurons = neuron_rewrites(config, config.num_zero, group)
    variants = {
        "trained": neurons["trained"],
        "null_perturbed": moved,
        "duplicated": neurons["duplicated"],
        "scaled": neurons["scaled"],
        "nuisance": neurons["zero"],
    }
    return variants | ({"published_null": moved} if config.published_null else {})


def compute(
    config: Config,
    *,
    key: Array,
    dataset: Dataset | None = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> Results:
    """Trains, rewrites and measures; see `figures.Figure.compute`."""
    data = source(config) if dataset is None else dataset
    with Parts(folder, identity_of(config, key, data)) as parts:
        return _computed(config, key, data, parts, progress)


def _computed(config: Config, key: Array, data: Dataset, parts: Parts, progress: str | MeterFactory | None) -> Results:
    train_key, rewrite_key, input_key, parameter_key = jax.random.split(key, 4)
    trained = train_members(config, key=train_key, data=data, parts=parts, progress=progress)
    all_images = np.concatenate([data.train_images, data.test_images])
    group = rewritten_group(trained.models, all_images[0])
    weights = moved_weights(config.model, trained.models, group, all_images[:1])
    null_space = parts.get("null_space", lambda: _null_space(config, trained.models, weights.path, all_images, data))
    variants = rewrites(config, group, weights)

    scales = {
        "input": jnp.logspace(-1, 1, config.num_scales),
        "parameter": jnp.logspace(-4, 0, config.num_scales),
    }
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels)
    curves = {
        "input": eqx.Partial(
            _input_curve, images, labels, scales["input"], jax.random.normal(input_key, images.shape, images.dtype)
        ),
        "parameter": eqx.Partial(_parameter_curve, images, labels, scales["parameter"]),
    }
    rewrite_keys: dict[str, Any] = {
        name: jax.random.split(jax.random.fold_in(rewrite_key, i), config.num_seeds) for i, name in enumerate(variants)
    }
    for name, basis in (("null_perturbed", "basis"), ("published_null", "published_basis")):
        if name in variants:
            rewrite_keys[name] = (rewrite_keys[name], of_members(null_space[basis], config.num_seeds))
    noise_keys = jax.random.split(parameter_key, config.num_seeds)
    errors: dict[str, dict[str, np.ndarray]] = {"input": {}, "parameter": {}, "clean": {}}
    certificates: dict[str, dict[str, float]] = {}
    jobs = [(name, kind) for name in variants for kind in ("certificate", *curves)]
    jobs = [job for job in jobs if job != ("published_null", "parameter")]
    meter = open_meter(progress, len(jobs), "measuring")
    try:
        for done, (name, kind) in enumerate(jobs):
            meter.advance(done, f"{label(config, name)}, {kind}")
            measure = eqx.Partial(certify_members, images, labels) if kind == "certificate" else curves[kind]
            part = masked_part(
                parts,
                f"{name}_{kind}",
                trained.alive,
                partial(measure_members, variants[name], measure, trained.models, rewrite_keys[name], noise_keys),
            )
            if kind == "certificate":
                errors["clean"][name] = part.pop("clean_error")
                certificates[name] = worst(part, trained.alive)
            else:
                errors[kind][name] = part["error"]
        meter.advance(len(jobs), "done")
    finally:
        meter.close()
    return Results(
        config=config,
        data={"name": data.name, "num_train": len(data.train_images), "num_test": len(data.test_images)},
        input_scales=np.asarray(scales["input"]),
        parameter_scales=np.asarray(scales["parameter"]),
        input_error=errors["input"],
        parameter_error=errors["parameter"],
        clean_error=errors["clean"],
        certificates=certificates,
        null_space={name: float(value) for name, value in null_space.items() if np.ndim(value) == 0},
        test_error=trained.test_error,
        diverged_at=trained.diverged_at,
        seconds={"training": trained.seconds, **parts.seconds},
        member=take(trained.models, 0),
    )


def draw(results: Results) -> Figure:
    """Test error by noise on inputs and on parameters, above what every rewrite adds to it; 3.24 x 2.9 inches."""
    names = {variant: label(results.config, variant) for variant in results.input_error}
    looks = plotting.looks(names)
    if "published_null" in looks:
        looks["published_null"] |= {"color": "0.6", "marker": None}  # no rewrite of the function
    with plotting.house_style():
        figure, axes = plt.subplots(2, 2, figsize=(3.24, 2.9), sharex="col")
        axes[0, 1].sharey(axes[0, 0])
        for (above, below), (title, scales, errors) in zip(axes.T, _noises(results), strict=True):
            for name, curves in errors.items():
                plotting.band(above, scales, curves, label=names[name], within=(1e-4, 1.0), **looks[name])
            plotting.differences(below, scales, errors, names=names, looks=looks)
            above.set(xscale="log", title=f"{title} noise")
            plotting.log_height(above)
            below.set(xlabel="noise scale (log)", xlim=(round(float(scales[0]), 6), round(float(scales[-1]), 6)))
        axes[0, 0].set_ylabel("test error (log)")
        axes[1, 0].set_ylabel("added test error")
        plotting.letter(*axes.flat)
        handles = axes[0, 0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside upper center", ncols=3, handlelength=3.0, columnspacing=1.2)
    plt.close(figure)  # out of pyplot's hands: a notebook shows what it is given
    return figure


def _noises(results: Results) -> list[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    parameters = results.parameter_scales, results.parameter_error
    return [("input", results.input_scales, results.input_error), ("parameter", *parameters)]


def caption(results: Results) -> str:
    """See `figures.Figure.caption`."""
    said = []
    for kind, scales, errors in _noises(results):
        most = []
        for name in list(errors)[1:]:
            mean = plotting.summarise(errors[name] - errors["trained"]).mean
            place = int(np.nanargmax(np.abs(mean)))
            where = f" (at {scales[place]:.2g})" if mean[place] else ""
            most.append(f"{label(results.config, name)} {mean[place]:+.2g}{where}")
        said.append(f"under {kind} noise, {', '.join(most)}")
    curves = [*results.input_error.values(), *results.parameter_error.values()]
    return (
        "Test error of trained networks, and of rewrites that keep their function, under noise on inputs (a) and on "
        "parameters (b), and what every rewrite adds to its own trained network's error (c, d). "
        f"{plotting.drawn_as(*curves)} The largest mean differences: {'; '.join(said)}. "
        f"Data: {headline(results)}."
    )


def arrays(results: Results) -> dict[str, np.ndarray]:
    """The arrays of the figure under flat names, for an `.npz` file."""
    named = {"input_scales": results.input_scales, "parameter_scales": results.parameter_scales}
    for kind in ("input_error", "parameter_error", "clean_error"):
        named |= {f"{kind}_{name}": value for name, value in getattr(results, kind).items()}
    return named | {"test_error": results.test_error, "diverged_at": results.diverged_at}


def families(results: Results) -> dict[str, Any]:
    """Return the endings of array names, by the axes that they make; see `figures`."""
    variants = tuple(results.clean_error)
    return {kind: {"variants": variants} for kind in ("input_error", "parameter_error", "clean_error")}


def headline(results: Results) -> str:
    """Return a line that names the data and the size of the run."""
    return members_headline(results.config, results.data, results.diverged_at)


def describe(results: Results) -> dict[str, Any]:
    """Return the settings and numbers for the JSON beside the figure."""
    return {
        "figure": "robustness",
        "config": results.config,
        "data": results.data,
        "certificates on the test images": {label(results.config, k): v for k, v in results.certificates.items()},
        "null space of training and test images": results.null_space,
    }


def table(results: Results) -> list[list[str]]:
    """A header and a row per variant: errors (%) clean and at two noise scales, and what the function did."""
    at_input = int(np.argmin(np.abs(results.input_scales - 0.37)))
    at_parameter = int(np.argmin(np.abs(results.parameter_scales - 0.01)))
    header = [
        "variant",
        "clean",
        f"inputs +{results.input_scales[at_input]:.2g}",
        f"parameters +{results.parameter_scales[at_parameter]:.2g}",
        "largest change of a logit",
        "predictions changed",
    ]
    rows = [header]
    for name, clean in results.clean_error.items():
        noisy = [results.input_error[name][:, at_input]]
        if name in results.parameter_error:
            noisy.append(results.parameter_error[name][:, at_parameter])
        errors = [cell(error, factor=100, unit=" %") for error in [clean, *noisy]]
        certificate = results.certificates[name]
        changes = [f"{certificate['max_abs_change']:.1e}", f"{certificate['changed_predictions']:.0f}"]
        rows.append([label(results.config, name), *errors, *[""] * (3 - len(errors)), *changes])
    return rows


def label(config: Config, variant: str) -> str:
    """What a variant is called: the perceptron's null space is that of the inputs."""
    return LABELS[variant] if config.model == "mlp" else LABELS[variant].removeprefix("input ")


def _null_space(config: Config, models: Any, path: str, images: np.ndarray, data: Dataset) -> dict[str, Any]:
    found = null_spaces(config.model, models, path, images, config.num_seeds)
    if config.published_null:
        rtol = len(data.test_images) * float(np.finfo(np.float32).eps)
        found["published_basis"] = null_basis(data.test_images, rtol)
    return found


def _input_curve(
    images: Array, labels: Array, scales: Array, noise: Array, model: Any, rewritten: Any, key: Array
) -> dict[str, Array]:
    return {"error": input_noise_error(rewritten, images, labels, scales, noise=noise)}


def _parameter_curve(
    images: Array, labels: Array, scales: Array, model: Any, rewritten: Any, key: Array
) -> dict[str, Array]:
    noise = parameter_noise(rewritten, key=key)
    return {"error": parameter_noise_error(rewritten, images, labels, scales, noise=noise)}
