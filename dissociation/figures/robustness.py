"""Figure `robustness`: networks of one function and many representations, under noise.

Trained networks are moved in the null space of the data, which keeps their function on the data, or
duplicated, scaled or given nuisance neurons, which keeps it everywhere and so under input noise.
Under parameter noise all differ.
"""

import dataclasses
import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Array
from matplotlib.figure import Figure

from dissociation._core.checks import fail
from dissociation.data._datasets import Dataset
from dissociation.figures import _members as members
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder
from dissociation.figures._harness import config_of, drawing, rows, run
from dissociation.figures._members import headline
from dissociation.figures._members import source as source
from dissociation.figures._null_spaces import moved_weights, null_perturbed, null_spaces
from dissociation.figures._seeds import cell
from dissociation.measures._robustness import input_noise_error, parameter_noise_error
from dissociation.plotting import _axes as plotting
from dissociation.rewrites._noise import parameter_noise

__all__ = ["Config", "compute", "draw"]

STEM = "noise-robustness"
SHOWS = "Test error of function-preserving rewrites under noise on inputs and on parameters."

UNCLEAR = "function changed"
"""Name of the variant moved in a null space that the usual float32 cut-off makes too large."""

EQUAL_CURVES = {
    "input": ("duplicated", "scaled", "nuisance"),
    "parameter": ("null-perturbed",),
}
"""Variants whose errors are those of "trained" by theory, by kind of noise.

A move in the null space of the images changes no activity on them, whatever is added to weights.
"""

EXPONENTS = {"input": (-1.0, 1.0), "parameter": (-4.0, 0.0)}
"""Powers of ten of the least and the largest noise scale, by kind of noise."""

SAME_ERROR = 1e-4
"""Largest difference of two error rates that only rounding explains."""


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, rewrites and noise."""

    width: int = 1024
    """Units in each of the two hidden layers; of networks of images, in the last."""
    num_scales: int = 14
    """Noise scales on each axis; half are evenly spaced, the others where curves are steep."""
    even_scales: bool = False
    """If True, space all noise scales evenly, and measure every variant at each of them."""
    null_scale: float = 0.1
    """Standard deviation of the noise in the null space of the data;
    for networks of images, of their last hidden layer's inputs."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    scale_factor: float = 20.0
    """Factor on incoming weights; outgoing ones are divided by it."""
    num_zero: int = 1024
    """Nuisance neurons, one per group."""
    published_null: bool = False
    """If True, add a move in the usual float32 null space, so large that the function changes."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_scales=2, null_scale=(0.0, members.FACTORS[1]))
        if self.published_null and self.model != "mlp":
            requirement = "be False except for the perceptron, whose first layer gets the data"
            fail("published_null", requirement, self.model)

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self, num_seeds=2, num_epochs=5, num_train=2000, num_test=300, width=128, num_scales=10,
            num_zero=128,
        )  # fmt: skip


def compute(
    config: Config,
    *,
    key: Array,
    data: Dataset | None = None,
    cache: CacheFolder = None,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Train, rewrite and measure; see `figures.Figure.compute`.

    Returns:
        Test errors under noise, `input_error` [variants, seeds, input_scales] and `parameter_error`
        [variants, seeds, parameter_scales]; without noise, `clean_error` [variants, seeds]; along
        training, `test_error` [seeds, epochs]. Over all seeds, the certificate of each variant on
        the test images, see `rewrites.Certificate`. The attribute `null_space` holds dimension,
        rank, and the singular values on both sides of the (least clear) cut; `shared` the variants
        by kind of noise whose errors equal those of "trained" at the evenly spaced scales, and
        were not measured at the others.
    """
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    """Train, rewrite and certify networks, and measure errors under input and parameter noise."""
    train_key, rewrite_key, input_key, parameter_key = jax.random.split(key, 4)
    trained = config.train(train_key, data, cache)
    models = trained.models
    num_seeds = config.num_seeds
    all_images = np.concatenate([data.train_images, data.test_images])
    group = members.rewritten_group(models, all_images[0])
    weights = moved_weights(config.model, models, group, all_images[:1])
    published = data.test_images if config.published_null else None
    find_spaces = partial(
        null_spaces, config.model, models, weights.path, all_images, num_seeds, published
    )
    null_space = cache.get("null_space", find_spaces)

    variants, rewrite_inputs = _variants(config, group, weights, null_space, rewrite_key)
    images = jnp.asarray(data.test_images)
    labels = jnp.asarray(data.test_labels)
    noise = jax.random.normal(input_key, images.shape, images.dtype)
    noise_keys = jax.random.split(parameter_key, num_seeds)

    make_curve = {
        "input": lambda scales: eqx.Partial(_input_curve, images, labels, scales, noise),
        "parameter": lambda scales: eqx.Partial(_parameter_curve, images, labels, scales),
    }

    def measured(title: str, measure: Any, names: list[str]) -> dict[str, dict[str, np.ndarray]]:
        jobs = {}
        for name in names:
            job = partial(members.measure_members, variants[name], measure, models)
            jobs[f"{name}_{title}"] = partial(job, rewrite_inputs[name], noise_keys)
        return cache.get_all(jobs, "measuring")

    def errors_at(kind: str, scales: np.ndarray, names: list[str]) -> dict[str, np.ndarray]:
        title = f"{kind}_{scales[0]:.6g}"
        arrays = measured(title, make_curve[kind](jnp.asarray(scales)), names)
        return {name: arrays[f"{name}_{title}"]["error"] for name in names}

    names = list(variants)
    certificate = eqx.Partial(members.certify_members, images, labels)
    arrays = measured("certificate", certificate, names)
    variables = {}
    scales_of_kind = {}
    shared_of_kind = {}
    for kind in make_curve:
        is_input = kind == "input"
        scales, curves, shared = _curves(
            partial(errors_at, kind),
            [name for name in names if is_input or name != UNCLEAR],
            EQUAL_CURVES[kind],
            EXPONENTS[kind],
            config.num_scales,
            _num_even(config),
        )
        curves.setdefault(UNCLEAR, np.full((num_seeds, len(scales)), np.nan))
        errors = np.stack([curves[name] for name in names])
        variables[f"{kind}_error"] = (("variants", "seeds", f"{kind}_scales"), errors)
        scales_of_kind[kind] = scales
        shared_of_kind[kind] = shared
    variables |= members.certified(arrays, variants, trained.alive)
    coords = {
        "variants": list(variants),
        "input_scales": ("input_scales", scales_of_kind["input"], {"units": "pixel intensity"}),
        "parameter_scales": scales_of_kind["parameter"],
    }
    cut = {name: float(number) for name, number in null_space.items() if np.ndim(number) == 0}
    dataset = trained.dataset(data, variables, coords)
    return dataset.assign_attrs(null_space=json.dumps(cut), shared=json.dumps(shared_of_kind))


def _variants(
    config: Config, group: Any, weights: Any, null_space: dict[str, np.ndarray], key: Array
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return functions that rewrite networks, and their second inputs, by the name of the variant.

    The first variant is the reference of differences.
    """
    num_seeds = config.num_seeds
    rewrites: dict[str, Any] = config.rewrites(group)
    rewrites["null-perturbed"] = null_perturbed(weights, config.null_scale)
    names = ("trained", "null-perturbed", "duplicated", "scaled", "nuisance")
    variants = {name: rewrites[name] for name in names}
    if config.published_null:
        variants[UNCLEAR] = rewrites["null-perturbed"]

    rewrite_inputs = {}
    for index, name in enumerate(variants):
        variant_key = jax.random.fold_in(key, index)
        rewrite_inputs[name] = jax.random.split(variant_key, num_seeds)
    for name, field in (("null-perturbed", "basis"), (UNCLEAR, "published_basis")):
        if name in variants:
            basis = null_space[field]
            bases = jnp.broadcast_to(basis, (num_seeds, *basis.shape[-2:]))
            rewrite_inputs[name] = (rewrite_inputs[name], bases)
    return variants, rewrite_inputs


def _curves(
    errors_at: Callable[..., Mapping[str, np.ndarray]],
    names: list[str],
    equal_names: Collection[str],
    exponents: tuple[float, float],
    num_scales: int,
    num_even: int,
) -> tuple[np.ndarray, dict[str, np.ndarray], list[str]]:
    """Return noise scales, the errors at them by variant, [seeds, scales], and `shared`.

    `shared` holds the variants that have errors of "trained" instead of measured ones.

    The first scales are evenly spaced powers of ten, the others in the intervals over which errors
    change most. If the errors of variants in `equal_names` are those of "trained" at the first
    scales, they get the errors of "trained" at the others.
    """
    even = np.linspace(*exponents, num_even)
    errors = dict(errors_at(_powers(even), names))
    if num_even == num_scales:
        return _powers(even), errors, []

    shared = []
    for name in equal_names:
        pair = (errors[name], errors["trained"])
        # NaN is no error rate: a variant that is not finite where "trained" is differs from it.
        if np.allclose(*pair, rtol=0, atol=SAME_ERROR, equal_nan=True):
            shared.append(name)
    steep = _between(even, list(errors.values()), num_scales - num_even)
    steep_errors = dict(errors_at(_powers(steep), [name for name in names if name not in shared]))
    for name in shared:
        steep_errors[name] = steep_errors["trained"]

    exponents_of_all = np.concatenate([even, steep])
    order = np.argsort(exponents_of_all)
    for name in names:
        errors[name] = np.concatenate([errors[name], steep_errors[name]], axis=1)[:, order]
    return _powers(exponents_of_all[order]), errors, shared


def _num_even(config: Any) -> int:
    """Return the number of evenly spaced noise scales."""
    if config.even_scales:
        return config.num_scales
    return max(2, config.num_scales - config.num_scales // 2)


def _powers(exponents: np.ndarray) -> np.ndarray:
    """Return powers of ten in the precision of arrays."""
    return np.power(10.0, exponents).astype(jnp.result_type(float))


def _between(points: np.ndarray, curves: list[np.ndarray], num_more: int) -> np.ndarray:
    """Return points in the intervals of `points` over which the mean of a curve changes most.

    Points of one interval divide it evenly.
    """
    changes = np.zeros(len(points) - 1)
    for errors in curves:
        finite = np.nan_to_num(errors, nan=1.0)
        changes = np.maximum(changes, np.abs(np.diff(finite.mean(axis=0))))
    num_in_interval = np.zeros(len(changes), int)
    for _ in range(num_more):
        steepest = np.argmax(changes / (num_in_interval + 1))
        num_in_interval[steepest] += 1
    new_points = []
    for start, stop, num_points in zip(points, points[1:], num_in_interval, strict=False):
        new_points.append(np.linspace(start, stop, num_points + 2)[1:-1])
    return np.concatenate(new_points)


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw test error by noise, and the error that rewrites add below, 3.24 x 2.9 inches.

    Noise on inputs is in the first column, noise on parameters in the second.
    """
    looks = plotting.looks(dataset.variants.values)
    if UNCLEAR in looks:
        looks[UNCLEAR] |= {"color": "0.6", "marker": None}
    figure, axes = plt.subplots(2, 2, figsize=(3.24, 2.9), sharex="col")
    axes[0, 1].sharey(axes[0, 0])
    for panels, (title, scales, errors) in zip(axes.T, _noises(dataset), strict=True):
        above, below = panels
        for name, curves in errors.items():
            plotting.band(above, scales, curves, label=name, within=(1e-4, 1.0), **looks[name])
        plotting.differences(below, scales, errors, looks=looks)
        above.set(xscale="log", title=f"{title} noise")
        plotting.log_height(above)
        limits = [round(float(scale), 6) for scale in scales[[0, -1]]]
        below.set(xlabel="noise scale", xlim=limits)
    axes[0, 0].set_ylabel("test error")
    axes[1, 0].set_ylabel("added test error")
    plotting.letter(*axes.flat)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside upper center", ncols=3, handlelength=3.0, columnspacing=1.2
    )
    return figure


def _noises(dataset: xarray.Dataset) -> list[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    """Return the place of noise, its scales, and the errors of variants under it."""
    noises = []
    for kind in ("input", "parameter"):
        errors = rows(dataset[f"{kind}_error"], "variants")
        noises.append((kind, dataset[f"{kind}_scales"].values, errors))
    return noises


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    clauses = []
    sentences = []
    all_errors = []
    for kind, scales, errors in _noises(dataset):
        all_errors += errors.values()
        differences = []
        for name in list(errors)[1:]:
            mean = plotting.summarise(errors[name] - errors["trained"]).mean
            peak = int(np.nanargmax(np.abs(mean)))
            difference = f"{name} {mean[peak]:+.2g}"
            if mean[peak]:
                difference += f" (at {scales[peak]:.2g})"
            differences.append(difference)
        clauses.append(f"under {kind} noise, {', '.join(differences)}")
        shared = json.loads(dataset.shared)[kind]
        if shared:
            num_measured = _num_even(config_of(dataset))
            sentences.append(
                f"Under {kind} noise the errors of {' and '.join(shared)} are those of trained at "
                f"{num_measured} scales; the other {len(scales) - num_measured} were measured for "
                "trained alone. "
            )
    return (
        "Test error of trained networks, and of rewrites that keep the function, under noise on "
        "inputs (a) and on "
        "parameters (b), and the error that a rewrite adds to the same seed's trained network "
        "(c, d). "
        f"{''.join(sentences)}{plotting.drawn_as(*all_errors)} "
        f"The largest mean differences: {'; '.join(clauses)}. "
        f"Data: {headline(dataset)}."
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per variant.

    Columns are errors (%), clean and at two noise scales, and changes of the function.
    """
    columns = [dataset.clean_error]
    titles = ["clean"]
    for kind, scale in (("input", 0.37), ("parameter", 0.01)):
        axis = f"{kind}_scales"
        errors = dataset[f"{kind}_error"].sel({axis: scale}, method="nearest")
        columns.append(errors)
        titles.append(f"{kind}s +{float(errors[axis]):.2g}")

    table_rows = [["variant", *titles, "largest change of a logit", "predictions changed"]]
    for name in dataset.variants.values:
        cells = []
        for errors in columns:
            fractions = errors.sel(variants=name).values
            is_missing = np.isnan(fractions).all()
            cells.append("" if is_missing else cell(fractions, factor=100, unit=" %"))
        certificate = dataset.sel(variants=name)
        cells.append(f"{certificate.max_abs_change.item():.1e}")
        cells.append(f"{certificate.changed_predictions.item():.0f}")
        table_rows.append([name, *cells])
    return table_rows


def _input_curve(
    images: Array,
    labels: Array,
    scales: Array,
    noise: Array,
    model: Any,
    rewritten: Any,
    key: Array,
) -> dict[str, Array]:
    return {"error": input_noise_error(rewritten, images, labels, scales, noise=noise)}


def _parameter_curve(
    images: Array, labels: Array, scales: Array, model: Any, rewritten: Any, key: Array
) -> dict[str, Array]:
    noise = parameter_noise(rewritten, key=key)
    return {"error": parameter_noise_error(rewritten, images, labels, scales, noise=noise)}
