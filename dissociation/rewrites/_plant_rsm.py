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
    """Return the rewrite after which the products H H^T of a layer's activities are near a multiple of a matrix.

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
    number, size = len(jax.tree.leaves(inputs)[0]), float(np.abs(target).max())
    if len(target) != number:
        fail("rsm", f"have shape {(number, number)}, the number of `inputs`", target.shape)
    if size == 0 or target.min() < -1e-5 * size or np.abs(target - target.T).max() > 1e-5 * size:
        fail(
            "rsm",
            "be symmetric, non-negative and not zero",
            f"entries from {target.min():.3g} to {target.max():.3g}",
        )
    phantom = add_phantom(
        group, model, inputs, _factor(jnp.asarray(target / size), num_neurons, typed(key))
    )
    matrix, _ = made_by(group)
    trained = jnp.asarray(matrix.rows(jnp.asarray(parameters_of(model)[0][matrix.leaf])))
    length, longest = (jnp.linalg.norm(rows, axis=1) for rows in (trained, phantom.arrays[0]))
    for name, lengths in (("group", length), ("inputs", longest)):
        if not is_traced(lengths) and not float(jnp.max(lengths)) > 0:
            fail(name, "lead to incoming weights that are not zero", "zeros")
    factor = largest * jnp.mean(length) / jnp.max(longest)
    arrays = tuple(None if part is None else factor * part for part in phantom.arrays)
    return compose([scale(group, 1 / largest), Rewrite(phantom.function, phantom.settings, arrays)])


@partial(jax.jit, static_argnums=1)
def _factor(target: Array, columns: int, key: Array) -> Array:
    """Return B >= 0, [samples, columns], with B B^T near a matrix of entries up to 1."""
    start = jax.random.uniform(key, (len(target), columns), target.dtype, 0.1, 1.0)
    start = start * jnp.sqrt(jnp.mean(target) / jnp.mean(product(start, start.T)))

    def step(_: Array, factor: Array) -> Array:
        whole = product(factor, product(factor.T, factor))
        return factor * (
            0.5 + 0.5 * product(target, factor) / jnp.maximum(whole, jnp.finfo(target.dtype).tiny)
        )

    return lax.fori_loop(0, 500, step, start)
