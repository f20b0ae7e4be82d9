"""Measures of similarity: mean correlation of matched neurons of two representations."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array
from scipy import optimize, sparse

from dissociation._core.linalg import finite_part, no_derivative, product
from dissociation._core.validation import validated
from dissociation.similarity._base import (
    Features,
    Form,
    OtherFeatures,
    Score,
    centred,
    column_sizes,
    evaluate,
)

LARGEST_ASSIGNMENT = 4096
"""Largest number of repeated neurons for an assignment, in place of a linear programme."""


Match = Callable[[Array | np.ndarray], np.ndarray]
"""Function of correlations [p, q] to the mean correlation of matched neurons, on the host."""


def _standardised(x: Array) -> Array:
    """Return columns of mean zero and length 1, or zero for columns without variance."""
    x, _ = centred(x)
    x = x / column_sizes(x)
    lengths = jnp.sqrt(jnp.sum(x**2, 0, keepdims=True))
    return x / jnp.where(lengths > 0, lengths, 1.0)


def _hard(correlations: Array | np.ndarray) -> np.ndarray:
    """Return the largest mean correlation of a one-to-one matching."""
    table = np.asarray(correlations)
    matching = optimize.linear_sum_assignment(table, maximize=True)
    return np.asarray(table[matching].mean(), table.dtype)


def _soft(correlations: Array | np.ndarray) -> np.ndarray:
    """Return the largest mean correlation of a transport plan with uniform marginals."""
    table = np.asarray(correlations)
    p, q = table.shape
    common = math.gcd(p, q)
    if p * q // common <= LARGEST_ASSIGNMENT:  # a plan between copies of equal weight
        repeated = np.repeat(table, q // common, 0)
        return _hard(np.repeat(repeated, p // common, 1))

    rows = sparse.kron(sparse.eye(p), np.ones((1, q)))
    columns = sparse.kron(np.ones((1, p)), sparse.eye(q))
    constraints = sparse.vstack([rows, columns]).tocsr()
    margins = np.concatenate([np.full(p, 1 / p), np.full(q, 1 / q)])
    plan = optimize.linprog(-table.ravel(), A_eq=constraints, b_eq=margins, method="highs")
    optimum = np.nan
    if plan.success:
        optimum = -plan.fun
    return np.asarray(optimum, table.dtype)


def _mean_correlation(match: Match, a: Array, b: Array) -> Array:
    """Return the mean correlation of matched neurons of two standardised representations.

    A callback runs `match` in SciPy, also under `jit` and `vmap`. It has no derivative.
    """
    correlations, undefined = finite_part(product(a.T, b))
    # The callback would otherwise fail with an error that does not name the measure.
    correlations = no_derivative(correlations, "A matching of neurons")
    number = jax.ShapeDtypeStruct((), correlations.dtype)
    mean = jax.pure_callback(match, number, correlations, vmap_method="sequential")
    return mean + undefined


HARD_MATCHING = Form(_standardised, eqx.Partial(_mean_correlation, _hard))

SOFT_MATCHING = Form(_standardised, eqx.Partial(_mean_correlation, _soft))


@validated(finite=("x", "y"))
def hard_matching(x: Features, y: OtherFeatures) -> Score:
    """Return the largest mean correlation of min(p, q) pairs of neurons matched one to one.

    Correlations are signed. A neuron without variance correlates 0 with all others.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Correlation from -1 to 1, seldom negative for many neurons (see its baseline). For x with
        itself it is the fraction of neurons that vary.

    Raises:
        TypeError: If it is differentiated.

    References:
        Li, Yosinski, Clune, Lipson and Hopcroft (2015), Convergent learning: do different neural
        networks learn the same representations?
    """
    return evaluate(HARD_MATCHING, x, y)


@validated(finite=("x", "y"))
def soft_matching(x: Features, y: OtherFeatures) -> Score:
    """Return the largest sum_ij T_ij c_ij of correlations over transport plans T.

    The marginals of T are 1 / p and 1 / q. At equal widths it equals `hard_matching`.

    Args:
        x: Features, [n, p].
        y: Features, [n, q].

    Returns:
        Correlation from -1 to 1.

    Raises:
        TypeError: If it is differentiated.

    References:
        Khosla and Williams (2024), Soft matching distance: a metric on neural representations that
        captures single-neuron tuning.
    """
    return evaluate(SOFT_MATCHING, x, y)
