"""Figure `robustness`: networks of one function and many representations, under noise on inputs and parameters.

Trained networks are moved in the null space of the data, which keeps their function on the data, or
duplicated, scaled or given nuisance neurons, which keeps it everywhere and so under input noise.
Under parameter noise all differ.
"""

import dataclasses
import json
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
from dissociation.figures._harness import drawing, rows, run
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


@dataclasses.dataclass(frozen=True)
class Config(members.Config):
    """Settings of training, rewrites and noise."""

    width: int = 1024
    """Units in each of the two hidden layers; of networks of images, in the last."""
    num_scales: int = 40
    """Noise scales on each axis."""
    null_scale: float = 0.1
    """Standard deviation of the noise in the null space of the data; for networks of images, of their last hidden
    layer's inputs."""
    duplicate_multiplier: float = 2.0
    """Copies of each neuron in the duplicated network."""
    scale_factor: float = 20.0
    """Factor on incoming weights; outgoing ones are divided by it."""
    num_zero: int = 1024
    """Nuisance neurons, one per group."""
    published_null: bool = False
    """If True, add a move in the null space of the usual float32 cut-off, which is too large: the function changes."""

    def __post_init__(self):
        super().__post_init__()
        self.check(num_scales=2, null_scale=(0.0, members.FACTORS[1]))
        if self.published_null and self.model != "mlp":
            fail(
                "published_null",
                "be False except for the perceptron, whose first layer gets the data",
                self.model,
            )

    def quick(self) -> "Config":
        """Return the options of a smoke run."""
        return dataclasses.replace(
            self,
            num_seeds=2,
            num_epochs=5,
            num_train=2000,
            num_test=300,
            width=128,
            num_scales=10,
            num_zero=128,
        )


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
        rank, and the singular values on both sides of the (least clear) cut.
    """
    return run(
        _computed, config, key=key, data=source(config, data), cache=cache, progress=progress
    )


def _computed(config: Config, key: Array, data: Dataset, cache: Cache) -> xarray.Dataset:
    train_key, rewrite_key, input_key, parameter_key = jax.random.split(key, 4)
    trained = config.train(train_key, data, cache)
    all_images = np.concatenate([data.train_images, data.test_images])
    group = members.rewritten_group(trained.models, all_images[0])
    weights = moved_weights(config.model, trained.models, group, all_images[:1])
    spaces = partial(
        null_spaces, config.model, trained.models, weights.path, all_images, config.num_seeds
    )
    null_space = cache.get(
        "null_space", partial(spaces, data.test_images if config.published_null else None)
    )
    moved, others = null_perturbed(weights, config.null_scale), config.rewrites(group)
    # The first variant is the reference of differences.
    variants = {"trained": others["trained"], "null-perturbed": moved}
    variants |= {name: others[name] for name in ("duplicated", "scaled", "nuisance")}
    variants |= {UNCLEAR: moved} if config.published_null else {}
    input_scales, parameter_scales = (
        jnp.logspace(*ends, config.num_scales) for ends in ((-1, 1), (-4, 0))
    )
    images, labels = jnp.asarray(data.test_images), jnp.asarray(data.test_labels)
    noise = jax.random.normal(input_key, images.shape, images.dtype)
    measures = {
        "certificate": eqx.Partial(members.certify_members, images, labels),
        "input": eqx.Partial(_input_curve, images, labels, input_scales, noise),
        "parameter": eqx.Partial(_parameter_curve, images, labels, parameter_scales),
    }
    rewrite_keys: dict[str, Any] = {
        name: jax.random.split(jax.random.fold_in(rewrite_key, i), config.num_seeds)
        for i, name in enumerate(variants)
    }
    for name, basis in (("null-perturbed", "basis"), (UNCLEAR, "published_basis")):
        if name in variants:
            every = (config.num_seeds, *null_space[basis].shape[-2:])
            rewrite_keys[name] = (rewrite_keys[name], jnp.broadcast_to(null_space[basis], every))
    noise_keys = jax.random.split(parameter_key, config.num_seeds)
    jobs = {
        f"{name}_{kind}": partial(
            members.measure_members,
            rewrite,
            measure,
            trained.models,
            rewrite_keys[name],
            noise_keys,
        )
        for name, rewrite in variants.items()
        for kind, measure in measures.items()
        if (name, kind) != (UNCLEAR, "parameter")
    }
    found = cache.get_all(jobs, "measuring")
    missing = {"error": np.full((config.num_seeds, config.num_scales), np.nan)}
    errors = {
        f"{kind}_error": (
            ("variants", "seeds", f"{kind}_scales"),
            np.stack([found.get(f"{name}_{kind}", missing)["error"] for name in variants]),
        )
        for kind in ("input", "parameter")
    }
    coords = {
        "variants": list(variants),
        "input_scales": ("input_scales", input_scales, {"units": "pixel intensity"}),
        "parameter_scales": parameter_scales,
    }
    cut = {name: float(value) for name, value in null_space.items() if np.ndim(value) == 0}
    dataset = trained.dataset(
        data, errors | members.certified(found, variants, trained.alive), coords
    )
    return dataset.assign_attrs(null_space=json.dumps(cut))


@drawing
def draw(dataset: xarray.Dataset) -> Figure:
    """Draw test error by noise on inputs and parameters, and below what rewrites add; 3.24 x 2.9 inches."""
    looks = plotting.looks(dataset.variants.values)
    if UNCLEAR in looks:
        looks[UNCLEAR] |= {"color": "0.6", "marker": None}
    figure, axes = plt.subplots(2, 2, figsize=(3.24, 2.9), sharex="col")
    axes[0, 1].sharey(axes[0, 0])
    for (above, below), (title, scales, errors) in zip(axes.T, _noises(dataset), strict=True):
        for name, curves in errors.items():
            plotting.band(above, scales, curves, label=name, within=(1e-4, 1.0), **looks[name])
        plotting.differences(below, scales, errors, looks=looks)
        above.set(xscale="log", title=f"{title} noise")
        plotting.log_height(above)
        below.set(
            xlabel="noise scale", xlim=(round(float(scales[0]), 6), round(float(scales[-1]), 6))
        )
    axes[0, 0].set_ylabel("test error")
    axes[1, 0].set_ylabel("added test error")
    plotting.letter(*axes.flat)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        *handles, loc="outside upper center", ncols=3, handlelength=3.0, columnspacing=1.2
    )
    return figure


def _noises(dataset: xarray.Dataset) -> list[tuple[str, np.ndarray, dict[str, np.ndarray]]]:
    kinds = ("input", "parameter")
    return [
        (kind, dataset[f"{kind}_scales"].values, rows(dataset[f"{kind}_error"], "variants"))
        for kind in kinds
    ]


def caption(dataset: xarray.Dataset) -> str:
    """Return the caption."""
    said, every = [], []
    for kind, scales, errors in _noises(dataset):
        most = []
        every += errors.values()
        for name in list(errors)[1:]:
            mean = plotting.summarise(errors[name] - errors["trained"]).mean
            place = int(np.nanargmax(np.abs(mean)))
            where = f" (at {scales[place]:.2g})" if mean[place] else ""
            most.append(f"{name} {mean[place]:+.2g}{where}")
        said.append(f"under {kind} noise, {', '.join(most)}")
    return (
        "Test error of trained networks, and of rewrites that keep the function, under noise on "
        "inputs (a) and on "
        "parameters (b), and the error that a rewrite adds to the same seed's trained network "
        "(c, d). "
        f"{plotting.drawn_as(*every)} The largest mean differences: {'; '.join(said)}. "
        f"Data: {headline(dataset)}."
    )


def table(dataset: xarray.Dataset) -> list[list[str]]:
    """Return a header and a row per variant: errors (%) clean and at two noise scales, and changes of the function."""
    at = {"input": 0.37, "parameter": 0.01}
    noisy = [
        dataset[f"{kind}_error"].sel({f"{kind}_scales": at[kind]}, method="nearest") for kind in at
    ]
    scales = [
        f"{kind}s +{float(errors[f'{kind}_scales']):.2g}"
        for kind, errors in zip(at, noisy, strict=True)
    ]
    shown = [["variant", "clean", *scales, "largest change of a logit", "predictions changed"]]
    for name in dataset.variants.values:
        errors = [measured.sel(variants=name).values for measured in (dataset.clean_error, *noisy)]
        cells = [
            "" if np.isnan(values).all() else cell(values, factor=100, unit=" %")
            for values in errors
        ]
        certificate = dataset.sel(variants=name)
        changes = [
            f"{certificate.max_abs_change.item():.1e}",
            f"{certificate.changed_predictions.item():.0f}",
        ]
        shown.append([name, *cells, *changes])
    return shown


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
