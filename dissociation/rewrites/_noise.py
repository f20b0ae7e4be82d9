"""Noise on every parameter of a model, to measure how exact weights must be.

It changes the function.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp

from dissociation._core.checks import fail
from dissociation._core.types import NonNegative, PRNGKey, PyTree
from dissociation._core.validation import validated
from dissociation.models._program import parameters_in

Model = TypeVar("Model")


@validated
def parameter_noise(
    model: PyTree, *, key: PRNGKey, where: Callable[[Any], Any] | None = None
) -> PyTree:
    """Draw N(0, 1) for every parameter of a model, or for some.

    One draw serves many scales, as in `measures.parameter_noise_error`. The key is split over the
    parameters in the order of the tree.

    Args:
        model: A network, a pair (model, state), or another tree. Floating-point and complex arrays
            are parameters, except those in `eqx.nn.State`.
        key: A PRNG key.
        where: Parts that get noise, as in `eqx.tree_at`: `lambda m: m.layers[0]`. It does not
            change their draws. None is all parameters.

    Returns:
        A tree like `model`, with noise in place of parameters and None elsewhere.

    Raises:
        ValueError: If `model` has no parameters, or `where` chooses none.
    """
    leaves, treedef = jax.tree.flatten(parameters_in(model))
    if not leaves:
        kind = type(model).__name__
        fail("model", "hold at least one array of floating-point numbers", f"none in a {kind}")
    # Keys for all parameters, whatever `where` chooses, so that it does not change the draws.
    keys = jax.random.split(key, len(leaves))
    draws = []
    for leaf_key, leaf in zip(keys, leaves, strict=True):
        draws.append(jax.random.normal(leaf_key, leaf.shape, leaf.dtype))
    noise = jax.tree.unflatten(treedef, draws)
    chosen = parameters_in(model, where)
    if not jax.tree.leaves(chosen):
        fail("where", "choose parameters of `model`", "none")

    def draw_if_chosen(parameter, draw):
        if parameter is None:
            return None
        return draw

    return jax.tree.map(draw_if_chosen, chosen, noise, is_leaf=lambda leaf: leaf is None)


@validated
def add_parameter_noise(model: Model, scale: NonNegative, *, key: PRNGKey) -> Model:
    """Return a model with `scale * N(0, 1)` added to every parameter.

    Args:
        model: See `parameter_noise`.
        scale: Standard deviation of the noise, non-negative. May be traced.
        key: A PRNG key, split as in `parameter_noise`.
    """

    def perturbed(weight, draw):
        return jnp.asarray(weight) + jnp.asarray(scale, draw.real.dtype) * draw

    noise = parameter_noise(model, key=key)
    return eqx.combine(jax.tree.map(perturbed, parameters_in(model), noise), model)
