"""Distances of features to boundaries between classes of a linear layer, in a plane of weights."""

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
    if isinstance(model, tuple) and len(model) == 2:
        model, _ = model
    name = type(model).__name__
    if isinstance(model, eqx.nn.MLP):
        _check_call(model, eqx.nn.MLP, "model.layers[-1].weight and model.layers[-1].bias")
        with jax.ensure_compile_time_eval():
            # Numbers of many sizes, because a clipped activation is the identity on small ones.
            sizes = 10.0 ** np.arange(-15, 16)
            probe = jnp.asarray(np.outer([-1.5, 0.5], sizes).ravel(), float)
            activations = jax.vmap(model.final_activation)(probe)
            if not np.allclose(activations, probe, atol=0):
                fail_kind("model", "have a linear last layer", f"{name} with an activation")

    layer = getattr(model, "head", None)
    if layer is None:
        layers = getattr(model, "layers", None) or [None]
        layer = layers[-1]
    if not isinstance(layer, Affine | eqx.nn.Linear):
        fail_kind("model", "have a linear last layer", f"{name} ending in {layer!r:.60}")
    kind = eqx.nn.Linear
    if isinstance(layer, Affine):
        kind = Affine
    _check_call(layer, kind, "its weights [classes, d] and biases")
    weights = layer.weight
    biases = layer.bias
    if biases is None:
        biases = jnp.zeros(len(weights), weights.dtype)
    return weights, biases


def _check_call(module: Any, kind: type, weights: str) -> None:
    """Raise if a module's class calls it otherwise than its base `kind`."""
    if type(module).__call__ is not kind.__call__:
        requirement = f"be called as {kind.__name__} is, for its last layer to be known"
        subclass = f"{type(module).__name__}, a subclass with its own __call__"
        fail_kind("model", requirement, subclass, f"Pass {weights}, if they are linear")


def class_places(
    features: Array, weights: Array, biases: Array, first: int, second: int, rtol: float = 1e-5
) -> tuple[Array, Array, Array]:
    """Return distances to the boundary of two classes, and coordinates in their weights' plane.

    Distances are (z . (w_a - w_b) + b_a - b_b) / |w_a - w_b|, [n]. Coordinates are along w_a - w_b
    and along the component of w_b at right angles to it, [n, 2]. The boundary's position on the
    first axis follows. All are NaN for equal weights, the second coordinates also for parallel
    ones.
    """
    second_weights = weights[second]
    normal = weights[first] - second_weights
    offset = biases[first] - biases[second]
    length = jnp.linalg.norm(normal)
    length = jnp.where(length > 0, length, jnp.nan)
    direction = normal / length

    orthogonal = second_weights - jnp.sum(second_weights * direction) * direction
    # Twice, against rounding.
    orthogonal = orthogonal - jnp.sum(orthogonal * direction) * direction
    size = jnp.linalg.norm(orthogonal)
    size = jnp.where(size > rtol * jnp.linalg.norm(second_weights), size, jnp.nan)

    distance = (product(features, normal[:, None])[:, 0] + offset) / length
    axes = jnp.stack([direction, orthogonal / size])
    coordinates = product(features, axes.T)
    return distance, coordinates, -offset / length
