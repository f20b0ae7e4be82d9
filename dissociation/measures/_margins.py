"""Distances of features to class boundaries of a linear last layer, and the plane of two classes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import fail_kind
from dissociation._core.linalg import product
from dissociation._core.validation import validated
from dissociation.models._layers import Affine


@validated
def linear_head(model: Any) -> tuple[Float[Array, "classes d"], Float[Array, " classes"]]:
    """Return the weights [classes, d] and biases [classes] of a model's last layer.

    Args:
        model: Model with a layer `head`, or a sequence `layers` with an affine last one, as in
            `dissociation.models` or `eqx.nn.MLP`; or a pair of such a model and its state. Missing
            biases are zero.

    Raises:
        TypeError: If the last layer is not linear, or is not found.
    """
    model = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    if isinstance(model, eqx.nn.MLP):
        _check_call(model, eqx.nn.MLP, "model.layers[-1].weight and model.layers[-1].bias")
        with jax.ensure_compile_time_eval():
            # Numbers of many sizes, because a clipped activation is the identity on small ones.
            probe = jnp.asarray(np.outer([-1.5, 0.5], 10.0 ** np.arange(-15, 16)).ravel(), float)
            if not np.allclose(jax.vmap(model.final_activation)(probe), probe, atol=0):
                fail_kind(
                    "model",
                    "have a linear last layer",
                    f"{type(model).__name__} with an activation",
                )
    last = getattr(model, "head", None)
    if last is None:
        last = (getattr(model, "layers", None) or [None])[-1]
    if not isinstance(last, Affine | eqx.nn.Linear):
        fail_kind(
            "model", "have a linear last layer", f"{type(model).__name__} ending in {last!r:.60}"
        )
    _check_call(
        last,
        Affine if isinstance(last, Affine) else eqx.nn.Linear,
        "its weights [classes, d] and biases",
    )
    biases = jnp.zeros(last.weight.shape[0], last.weight.dtype) if last.bias is None else last.bias
    return last.weight, biases


def _check_call(module: Any, kind: type, weights: str) -> None:
    """Raise if a module's class calls it otherwise than its base `kind`."""
    if type(module).__call__ is not kind.__call__:
        name = type(module).__name__
        wanted = f"be called as {kind.__name__} is, for its last layer to be known"
        fail_kind(
            "model",
            wanted,
            f"{name}, a subclass with its own __call__",
            f"Pass {weights}, if they are linear",
        )


def class_places(
    features: Array, weights: Array, biases: Array, first: int, second: int, rtol: float = 1e-5
) -> tuple[Array, Array, Array]:
    """Return distances to the boundary of two classes, coordinates in their weights' plane, and the boundary's place.

    Distances are (z . (w_a - w_b) + b_a - b_b) / |w_a - w_b|, [n]. Coordinates are along w_a - w_b
    and along the rest of w_b, [n, 2]. The boundary's place is on the first axis. All are NaN for
    equal weights, the second coordinates also for parallel ones.
    """
    normal, offset, other = (
        weights[first] - weights[second],
        biases[first] - biases[second],
        weights[second],
    )
    length = jnp.linalg.norm(normal)
    length = jnp.where(length > 0, length, jnp.nan)
    along = normal / length
    rest = other - jnp.sum(other * along) * along
    rest = rest - jnp.sum(rest * along) * along  # twice, against rounding
    size = jnp.linalg.norm(rest)
    size = jnp.where(size > rtol * jnp.linalg.norm(other), size, jnp.nan)
    distance = (product(features, normal[:, None])[:, 0] + offset) / length
    return distance, product(features, jnp.stack([along, rest / size]).T), -offset / length
