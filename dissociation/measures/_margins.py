"""Distances of features to class boundaries of a linear last layer, and the plane of two classes."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_same_length, fail, fail_kind, is_traced
from dissociation._core.linalg import product
from dissociation._core.results import Result
from dissociation._core.validation import validated
from dissociation.models._layers import Affine

Features = Float[Array | np.ndarray, "n d"]
Weights = Float[Array | np.ndarray, "classes d"]
Biases = Float[Array | np.ndarray, " classes"]


class Plane(Result):
    """Plane spanned by the last layer's weights of two classes.

    Attributes:
        basis: Orthonormal vectors, [2, d]: e1 along w_a - w_b, e2 along the rest of w_b.
        boundary: Coordinate along e1 at which the two logits are equal, for every point of feature space.
    """

    basis: Float[Array, "2 d"]
    boundary: Float[Array, ""]

    def coordinates(self, features: Features) -> Float[Array, "n 2"]:
        """Return features projected onto the plane, [samples, d] to [samples, 2]."""
        check_same_length("weights", self.basis.shape[1], "features", features.shape[1], "dimensions")
        return product(jnp.asarray(features), self.basis.T)


@validated
def linear_head(model: Any) -> tuple[Float[Array, "classes d"], Float[Array, " classes"]]:
    """Return the weights [classes, d] and biases [classes] of a model's last layer.

    Args:
        model: Model with a layer `head`, or a sequence `layers` with an affine last one, as in `dissociation.models`
            or `eqx.nn.MLP`; or a pair of such a model and its state. Missing biases are zero.

    Raises:
        TypeError: If the last layer is not linear, or is not found.
    """
    model = model[0] if isinstance(model, tuple) and len(model) == 2 else model
    if isinstance(model, eqx.nn.MLP):
        with jax.ensure_compile_time_eval():
            # Numbers of many sizes, because a clipped activation is the identity on small ones.
            probe = jnp.asarray(np.outer([-1.5, 0.5], 10.0 ** np.arange(-15, 16)).ravel(), float)
            if not np.allclose(jax.vmap(model.final_activation)(probe), probe, atol=0):
                fail_kind("model", "have a linear last layer", f"{type(model).__name__} with an activation")
    last = getattr(model, "head", None)
    if last is None:
        last = (getattr(model, "layers", None) or [None])[-1]
    if not isinstance(last, Affine | eqx.nn.Linear):
        fail_kind("model", "have a linear last layer", f"{type(model).__name__} ending in {last!r:.60}")
    biases = jnp.zeros(last.weight.shape[0], last.weight.dtype) if last.bias is None else last.bias
    return last.weight, biases


@validated
def signed_distance(
    features: Features, weights: Weights, biases: Biases, first: int, second: int
) -> Float[Array, " n"]:
    """Return distances of features [samples, d] to the boundary, (z . (w_a - w_b) + b_a - b_b) / |w_a - w_b|."""
    normal, length, offset = _between(weights, biases, first, second)
    return (product(jnp.asarray(features), normal[:, None])[:, 0] + offset) / length


@validated
def class_plane(weights: Weights, biases: Biases, first: int, second: int, *, rtol: float = 1e-5) -> Plane:
    """Return the plane of two classes' weights, for drawing samples and the boundary."""
    normal, length, offset = _between(weights, biases, first, second)
    along, other = normal / length, jnp.asarray(weights)[second]
    rest = other - jnp.sum(other * along) * along
    rest = rest - jnp.sum(rest * along) * along  # twice, against rounding
    size = jnp.linalg.norm(rest)
    if not is_traced(size) and float(size) <= rtol * float(jnp.linalg.norm(other)):
        fail("weights", f"of classes {first} and {second} span a plane", "parallel rows")
    size = jnp.where(size > rtol * jnp.linalg.norm(other), size, jnp.nan)
    return Plane(jnp.stack([along, rest / size]), -offset / length)


def _between(weights: Weights, biases: Biases, first: int, second: int) -> tuple[Array, Array, Array]:
    """Return the normal w_a - w_b of the boundary between two classes, its length, and b_a - b_b."""
    number = weights.shape[0]
    for name, value in (("first", first), ("second", second)):
        if check_count(name, value) >= number:
            fail(name, f"be a class from 0 to {number - 1}", value)
    if first == second:
        fail("second", "be another class than `first`", second)
    weights, biases = jnp.asarray(weights), jnp.asarray(biases)
    normal = weights[first] - weights[second]
    length = jnp.linalg.norm(normal)
    if not is_traced(length) and float(length) == 0.0:
        fail("weights", f"differ between classes {first} and {second}", "equal rows")
    return normal, jnp.where(length > 0, length, jnp.nan), biases[first] - biases[second]
