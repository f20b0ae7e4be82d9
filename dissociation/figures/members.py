"""Training stacked members, rewriting them, and measuring what came of it."""

import os
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation.bmap import bmap
from dissociation.data.datasets import Dataset, load
from dissociation.fig4.mnist import fit_mnist
from dissociation.figures.artifacts import Parts, identity_of
from dissociation.metrics.robustness import input_noise_error
from dissociation.progress import MeterFactory
from dissociation.training import FitResult
from dissociation.weights.certificate import certify


def source(config: Any) -> Dataset:
    """The data set that a figure's configuration names: `data`, `num_train` and `num_test` of it."""
    return load(config.data, num_train=config.num_train, num_test=config.num_test)


def members_headline(config: Any, data: dict[str, Any]) -> str:
    """What a figure was computed on, in a line."""
    sizes = f"{data['num_train']} training and {data['num_test']} test images"
    return f"{data['name']}: {sizes}, {config.num_seeds} seeds, {config.num_epochs} epochs"


def train_members(
    config: Any,
    *,
    key: Array,
    dataset: Dataset | None,
    folder: str | os.PathLike[str] | None,
    progress: str | MeterFactory | None,
) -> tuple[Dataset, Parts, FitResult]:
    """What every figure of trained networks begins with.

    Args:
        config: A figure's configuration: `data`, `num_train`, `num_test`, `num_seeds`, `num_epochs` and `width` of it.
        key: The networks' key, see `fit_mnist`.
        dataset: In place of the one that `config.data` names.
        folder: Where finished parts and the training's checkpoint are kept.
        progress: See `dissociation.progress`.

    Returns:
        The data, the parts kept in `folder`, and the trained networks.

    Raises:
        ValueError: If `folder` holds parts of another run.
    """
    data = dataset or source(config)
    parts = Parts(folder, identity_of(config, key, data))
    trained = fit_mnist(
        num_epochs=config.num_epochs,
        num_seeds=config.num_seeds,
        key=key,
        dataset=data,
        width=config.width,
        progress=progress,
        checkpoint=parts.path("training.ckpt"),
    )
    return data, parts, trained


def measure_members(
    rewrite: Callable[[Any, Array], Any],
    measure: Callable[[Any, Any, Array], Any],
    models: Any,
    rewrite_keys: Array,
    measure_keys: Array,
) -> Any:
    """`measure(model, rewrite(model, rewrite_key), measure_key)` for every member, compiled as one program.

    On a CPU the members go one after another, which takes the memory of one; on an accelerator all at once. Bind
    arrays to the two functions by `eqx.Partial`, which hands them to the program instead of baking them into it.

    Args:
        rewrite: From one model and a key to the rewritten model.
        measure: From the model, the rewritten model and a key to a PyTree of arrays.
        models: Stacked models, or whatever else of theirs `rewrite` takes, members first.
        rewrite_keys: One key per member.
        measure_keys: One key per member.

    Returns:
        The measurements, members first.
    """
    return _measure_members((rewrite, measure), models, rewrite_keys, measure_keys)


@eqx.filter_jit
def _measure_members(functions: Any, models: Any, rewrite_keys: Array, measure_keys: Array) -> Any:
    rewrite, measure = functions

    def one(model: Any, rewrite_key: Array, measure_key: Array) -> Any:
        return measure(model, rewrite(model, rewrite_key), measure_key)

    batch_size = 1 if jax.default_backend() == "cpu" else None
    return bmap(one, batch_size=batch_size)(models, rewrite_keys, measure_keys)


def certify_members(images: Array, labels: Array, model: Any, rewritten: Any, key: Array) -> dict[str, Array]:
    """A measure: the certificate on `images`, and the rewritten network's error there as `clean_error`."""
    certificate = certify(model, rewritten, images)
    error = input_noise_error(rewritten, images, labels, jnp.zeros(1), noise=jnp.zeros_like(images))[0]
    return {**certificate._asdict(), "clean_error": error}


def worst(certificates: dict[str, np.ndarray]) -> dict[str, float]:
    """Certificates of all seeds in one: the largest changes, and changed predictions and inputs in all."""
    return {name: float(value.max() if name.startswith("max") else value.sum()) for name, value in certificates.items()}
