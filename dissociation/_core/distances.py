"""Distances between the samples of one set, and their median."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from dissociation._core.linalg import product, scale_of

NEAR = 2.0**-10
"""Relative size below which squared distances lose too many digits as differences of products."""


def squared_distances(x: Float[Array, "n p"]) -> Float[Array, "n n"]:
    """Return |x_i - x_j|^2, exactly zero for rows that coincide in rounding."""
    return squared_distances_with_size(x)[0]


def squared_distances_with_size(
    x: Float[Array, "n p"], *, by_order: bool = False
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """Return `squared_distances` and the magnitudes whose rounding they carry.

    The magnitudes are for the argument `size` of `rounding_ties.snapped`.
    """
    lengths = root(jnp.sum(x**2, 1))
    # About the row nearest to the mean: an offset cancels, and integers stay integers, so equal
    # distances are equal.
    deviations = x - jnp.mean(x, 0)[None]
    middle = jnp.argmin(jnp.sum(deviations**2, 1))
    centred = x - x[middle][None]
    squares = jnp.sum(centred**2, 1)
    sums = squares[:, None] + squares[None]
    distances = sums - 2 * product(centred, centred.T)

    eps = jnp.finfo(x.dtype).eps
    num_roundings = 4 + x.shape[1] ** 0.5 / 16
    is_diagonal = jnp.eye(x.shape[0], dtype=bool) & jnp.isfinite(distances)
    is_rounding = distances <= num_roundings * eps * sums
    distances = jnp.where(is_rounding | is_diagonal, 0.0, distances)  # but NaN stays
    size = num_roundings * sums / 16

    if by_order:
        # Ranks need exact ties, so near rows get sums of squared differences, at a cost of n^2 p.
        is_near = (distances <= NEAR * sums) & ~is_diagonal

        def distances_of_differences() -> Array:
            return lax.map(lambda row: jnp.sum((row[None] - x) ** 2, 1), x)

        exact = lax.cond(jnp.any(is_near), distances_of_differences, lambda: distances)
        distances = jnp.where(is_near, exact, distances)
        size = jnp.where(is_near, 0.0, size)

    # Rounding of the subtraction, and of the rows, which changes d^2 by 2 d eps |x| + (eps |x|)^2.
    lengths = lengths[:, None] + lengths[None]
    row_size = lengths * (root(distances) + 8 * eps * lengths) / 32
    return distances, size + row_size


def root(square: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the square root, 0 for negative numbers, with derivative 0 at 0."""
    is_zero = square <= 0  # not `~(square > 0)`, so NaN stays
    return jnp.where(is_zero, 0.0, jnp.sqrt(jnp.where(is_zero, 1.0, square)))


def cosine_distances_with_size(
    x: Float[Array, "n p"], *, by_order: bool
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """Return one minus the cosines of rows, and the magnitudes whose rounding they carry."""
    x = x / scale_of(jnp.max(jnp.abs(x), 1, keepdims=True))
    lengths = root(jnp.sum(x**2, 1, keepdims=True))
    is_zero = lengths[:, 0] == 0
    divisors = jnp.where(lengths > 0, lengths, 1.0)
    cosines = product(x, x.T) / (divisors * divisors.T)
    square, near_size = squared_distances_with_size(x / divisors, by_order=by_order)
    is_far = cosines < 0.5
    distances = jnp.where(is_far, 1 - cosines, 0.5 * square)

    # A row of zeros has no angle to others, and counts as orthogonal.
    is_undefined = (is_zero[:, None] | is_zero[None]) & ~jnp.eye(x.shape[0], dtype=bool)
    far_size = 0.5 + x.shape[1] ** 0.5 / 256
    return jnp.where(is_undefined, 1.0, distances), jnp.where(is_far, far_size, near_size)


def typical(
    distances: Float[Array, "n n"], among: Bool[Array, "n n"] | None = None
) -> Float[Array, ""]:
    """Return the median over pairs i < j, or over pairs `among` them.

    If the median is 0, return the mean, and if the mean is 0, return 1.
    """
    number = distances.shape[0]
    if number < 2:
        return jnp.ones((), distances.dtype)
    if among is None:
        # Drop the diagonal; every pair stays twice.
        shifted = distances.reshape(-1)[1:].reshape(number - 1, number + 1)
        distances = shifted[:, :-1]
    middle = median(distances, among)
    mean = jnp.mean(distances, where=among)
    fallback = jnp.where(mean > 0, mean, jnp.where(jnp.isnan(mean), jnp.nan, 1.0))
    return jnp.where(middle > 0, middle, fallback)


def median(values: Float[Array, "*b"], among: Bool[Array, "*b"] | None = None) -> Float[Array, ""]:
    """Return `jnp.median` of non-negative numbers, or those `among` them, found bit by bit."""
    number = values.size if among is None else jnp.sum(among)
    width = jnp.finfo(values.dtype).bits
    dtype = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}[width]
    largest = jnp.iinfo(dtype).max
    # The bits of non-negative floats have the order of the numbers, so counting replaces a sort.
    bits = lax.bitcast_convert_type(lax.stop_gradient(values), dtype)
    if among is not None:
        bits = jnp.where(among, bits, largest)

    def with_bit(index: Array, bound: Array) -> Array:
        shift = (width - 2 - index).astype(dtype)
        higher = bound | (jnp.asarray(1, dtype) << shift)
        return jnp.where(jnp.sum(bits < higher) <= (number - 1) // 2, higher, bound)

    low = lax.fori_loop(0, width - 1, with_bit, jnp.zeros((), dtype))
    is_middle = jnp.sum(bits <= low) > number // 2
    next_higher = jnp.min(bits, where=bits > low, initial=largest)
    high = jnp.where(is_middle, low, next_higher)

    def mean_of(pattern: Array) -> Array:
        """Return the number with these bits, with the mean derivative of equal numbers."""
        is_equal = bits == pattern
        step = values - lax.stop_gradient(values)
        step = jnp.where(is_equal & jnp.isfinite(values), step, 0.0)
        middle = lax.bitcast_convert_type(pattern, values.dtype)
        return middle + jnp.sum(step) / jnp.sum(is_equal)

    factor = jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, 1.0).astype(values.dtype)
    return factor * (0.5 * mean_of(low) + 0.5 * mean_of(high))
