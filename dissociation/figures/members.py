"""Rewriting stacked members and measuring what came of it."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation.bmap import bmap
from dissociation.metrics.robustness import input_noise_error
from dissociation.weights.certificate import certify


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
        models: Stacked models.
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
