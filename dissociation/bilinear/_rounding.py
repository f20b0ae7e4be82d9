"""Rounding bounds of quadratic margins sum_k w_k (l_k . z + b_k)(r_k . z + c_k) + 2 h . z, for certificates."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dissociation._core.linalg import product


class Factors(NamedTuple):
    """A margin as a sum of products; sizes are those of the summands before they cancel."""

    left: Float[Array, "m d"]
    right: Float[Array, "m d"]
    left_bias: Float[Array, " m"]
    right_bias: Float[Array, " m"]
    weights: Float[Array, " m"]
    linear: Float[Array, " d"]
    left_size: Float[Array, " m"]  # norms of rows
    right_size: Float[Array, " m"]
    weight_size: Float[Array, " m"]  # absolute values
    linear_size: Float[Array, " d"]


def bound_rounding(
    factors: Factors, values: Float[Array, " r"], directions: Float[Array, "r d"], linear: Float[Array, " r"]
) -> Float[Array, "3"]:
    """Return error bounds of quadratic part, half linear part and constant (Higham, 2002, chapter 3)."""
    f, values, directions, linear = jax.lax.stop_gradient((factors, values, directions, linear))
    eps = jnp.finfo(values.dtype).eps
    left, right = jnp.abs(f.left), jnp.abs(f.right)
    turned = directions.T

    def symmetric(a: Array, b: Array, weighted_a: Array, weighted_b: Array) -> Array:
        return 0.5 * (product(a.T, weighted_b) + product(b.T, weighted_a))

    weights = f.weights[:, None]
    image = symmetric(f.left, f.right, weights * product(f.left, turned), weights * product(f.right, turned))
    # Products, sums and the eigendecomposition are measured together: the matrix is applied to the eigenvectors once
    # more, factor by factor (Parlett, 1998, The symmetric eigenvalue problem, section 4.5).
    residual = jnp.linalg.norm(image - turned * values[None])
    skew = jnp.linalg.norm(product(directions, turned) - jnp.eye(values.shape[0], dtype=values.dtype))
    # The norm of a matrix without negative entries is at most its largest row sum.
    sizes = f.weight_size[:, None]
    ones = jnp.ones((left.shape[1], 1), left.dtype)
    summands = jnp.max(symmetric(left, right, sizes * product(left, ones), sizes * product(right, ones)))
    norms = [jnp.linalg.norm(rows, axis=1) for rows in (left, right)]
    rows = jnp.sqrt(jnp.sum(f.weight_size**2 * ((f.left_size * norms[1]) ** 2 + (norms[0] * f.right_size) ** 2)))
    # Few numbers may agree by chance, so the rounding of single operations is added (Higham, 2002, Accuracy and
    # stability of numerical algorithms, chapter 3).
    quadratic = 2 * (residual + jnp.max(jnp.abs(values)) * skew) + eps * (summands + rows)

    biases = [jnp.abs(bias)[:, None] for bias in (f.left_bias, f.right_bias)]
    exact = symmetric(f.left, f.right, weights * f.left_bias[:, None], weights * f.right_bias[:, None])[:, 0]
    off = jnp.linalg.norm(exact + f.linear - product(turned, linear[:, None])[:, 0])
    summands = jnp.linalg.norm(symmetric(left, right, sizes * biases[0], sizes * biases[1])[:, 0] + f.linear_size)
    rows = jnp.linalg.norm(f.weight_size * (f.left_size * biases[1][:, 0] + f.right_size * biases[0][:, 0]))
    constant = (2 + values.shape[0] ** 0.5) * jnp.sum(sizes * biases[0] * biases[1])
    return jnp.stack([quadratic, 2 * off + eps * (summands + rows), eps * constant])
