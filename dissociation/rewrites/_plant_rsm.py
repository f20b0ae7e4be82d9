"""Neurons without effect that give a layer's activities chosen products."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_known, fail, is_traced
from dissociation._core.conversion import as_examples
from dissociation._core.keys import typed
from dissociation._core.linalg import product
from dissociation._core.types import PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.rewrites._groups import NeuronGroup, parameters_of
from dissociation.rewrites._growth import add_phantom, made_by
from dissociation.rewrites._rewrites import Rewrite, compose, scale


@validated(finite=("rsm",))
def plant_rsm(
    group: NeuronGroup,
    model: Any,
    inputs: Any,
    rsm: Float[Array | np.ndarray, "samples samples"],
    *,
    num_neurons: Size = 64,
    largest: float | int = 100.0,
    key: PRNGKey,
) -> Rewrite:
    """Return the rewrite after which products H H^T of activities are near a multiple of a matrix.

    A factorisation rsm = B B^T with B >= 0 is found by multiplicative updates. Neurons without
    effect get a multiple of B as preactivations on the inputs, so a ReLU leaves it unchanged.
    Activities of the group are divided by `largest`, and their outgoing weights multiplied by it.
    Incoming weights of new neurons are at most `largest` times as long as the mean of the group's.
    If n inputs have rank n, only the factorisation and the group's own activities are missed; else
    `add_phantom` misses a part of B.

    Args:
        group: Group of ReLU neurons, made by one matrix and at most one bias.
        model: The model.
        inputs: Examples, samples first.
        rsm: Symmetric, non-negative matrix. Other than for B B^T with B >= 0, only the nearest such
            matrix is reached.
        num_neurons: New neurons, the number of columns of B.
        largest: Largest factor of weights, at least 1.
        key: Random key of the first B.

    Raises:
        ValueError: If the matrix is not symmetric and non-negative, or has another size; if the
            group cannot be widened as in `add_phantom`.

    References:
        Ding, He and Simon (2005), On the equivalence of nonnegative matrix factorization and
        spectral clustering.
    """
    check_known("it is checked on the host", rsm=rsm)
    target = np.asarray(rsm)
    if not 1 <= largest < np.inf:
        fail("largest", "be at least 1", largest)
    inputs = as_examples("inputs", inputs, finite=True)
    num_inputs = len(jax.tree.leaves(inputs)[0])
    if len(target) != num_inputs:
        wanted_shape = f"have shape {(num_inputs, num_inputs)}, the number of `inputs`"
        fail("rsm", wanted_shape, target.shape)
    size = float(np.abs(target).max())
    tolerance = 1e-5 * size
    asymmetry = np.abs(target - target.T).max()
    if size == 0 or target.min() < -tolerance or asymmetry > tolerance:
        entries = f"entries from {target.min():.3g} to {target.max():.3g}"
        fail("rsm", "be symmetric, non-negative and not zero", entries)

    target = jnp.asarray(target / size)
    pattern = _factor(target, num_neurons, typed(key))
    phantom = add_phantom(group, model, inputs, pattern)
    matrix, _ = made_by(group)
    leaves, _, _ = parameters_of(model)
    weights = jnp.asarray(leaves[matrix.leaf])
    rows = jnp.asarray(matrix.rows(weights))
    present_lengths = jnp.linalg.norm(rows, axis=1)
    new_lengths = jnp.linalg.norm(phantom.arrays[0], axis=1)
    for name, lengths in (("group", present_lengths), ("inputs", new_lengths)):
        if not is_traced(lengths) and not float(jnp.max(lengths)) > 0:
            fail(name, "lead to incoming weights that are not zero", "zeros")
    factor = largest * jnp.mean(present_lengths) / jnp.max(new_lengths)
    arrays = jax.tree.map(lambda array: factor * array, phantom.arrays)
    planted = Rewrite(phantom.function, phantom.settings, arrays)
    return compose([scale(group, 1 / largest), planted])


@partial(jax.jit, static_argnums=1)
def _factor(target: Array, columns: int, key: Array) -> Array:
    """Return B >= 0, [samples, columns], with B B^T near a matrix of entries up to 1."""
    start = jax.random.uniform(key, (len(target), columns), target.dtype, 0.1, 1.0)
    gram_of_start = product(start, start.T)
    start = start * jnp.sqrt(jnp.mean(target) / jnp.mean(gram_of_start))
    tiny = jnp.finfo(target.dtype).tiny

    def step(_, factor):
        approximation = product(factor, product(factor.T, factor))
        ratio = 0.5 * product(target, factor) / jnp.maximum(approximation, tiny)
        return factor * (0.5 + ratio)

    return lax.fori_loop(0, 500, step, start)
