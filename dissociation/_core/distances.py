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
    """Return `squared_distances` and the magnitudes whose rounding they carry, for `ties.snapped`."""
    norms = root(jnp.sum(x**2, 1))
    # About the row nearest to the mean: an offset cancels, and integers stay integers, so equal
    # distances are equal.
    middle = jnp.argmin(jnp.sum((x - jnp.mean(x, 0)[None]) ** 2, 1))
    moved = x - x[middle][None]
    lengths = jnp.sum(moved**2, 1)
    both = lengths[:, None] + lengths[None]
    square = both - 2 * product(moved, moved.T)
    rounding = 4 + x.shape[1] ** 0.5 / 16
    selves = jnp.eye(x.shape[0], dtype=bool) & jnp.isfinite(square)
    small = square <= rounding * jnp.finfo(x.dtype).eps * both
    square = jnp.where(small | selves, 0.0, square)  # but NaN stays
    size = rounding * both / 16
    if by_order:
        # Ranks need exact ties, so near rows get sums of squared differences, at a cost of n^2 p.
        near = (square <= NEAR * both) & ~selves
        differences = lambda: lax.map(lambda row: jnp.sum((row[None] - x) ** 2, 1), x)  # noqa: E731
        square = jnp.where(near, lax.cond(jnp.any(near), differences, lambda: square), square)
        size = jnp.where(near, 0.0, size)
    # Rounding of the subtraction, and of the rows, which changes d^2 by 2 d eps |x| + (eps |x|)^2.
    norms = norms[:, None] + norms[None]
    own = norms * (root(square) + 8 * jnp.finfo(x.dtype).eps * norms) / 32
    return square, size + own


def root(square: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the square root, 0 for negative numbers, with derivative 0 at 0."""
    none = square <= 0  # not `~(square > 0)`, so NaN stays
    return jnp.where(none, 0.0, jnp.sqrt(jnp.where(none, 1.0, square)))


def cosine_distances_with_size(
    x: Float[Array, "n p"], *, by_order: bool
) -> tuple[Float[Array, "n n"], Float[Array, "n n"]]:
    """Return one minus the cosines of rows, and the magnitudes whose rounding they carry."""
    x = x / scale_of(jnp.max(jnp.abs(x), 1, keepdims=True))
    lengths = root(jnp.sum(x**2, 1, keepdims=True))
    none = lengths[:, 0] == 0
    known = jnp.where(lengths > 0, lengths, 1.0)
    cosines = product(x, x.T) / (known * known.T)
    square, size = squared_distances_with_size(x / known, by_order=by_order)
    far = cosines < 0.5
    distances = jnp.where(far, 1 - cosines, 0.5 * square)
    unknown = (none[:, None] | none[None]) & ~jnp.eye(x.shape[0], dtype=bool)
    # A row of zeros has no angle to others, and counts as orthogonal.
    return jnp.where(unknown, 1.0, distances), jnp.where(far, 0.5 + x.shape[1] ** 0.5 / 256, size)


def typical(
    distances: Float[Array, "n n"], among: Bool[Array, "n n"] | None = None
) -> Float[Array, ""]:
    """Return the median over pairs i < j, or those `among` them, the mean if the median is 0, or 1."""
    number = distances.shape[0]
    if number < 2:
        return jnp.ones((), distances.dtype)
    if among is None:
        distances = distances.reshape(-1)[1:].reshape(number - 1, number + 1)[
            :, :-1
        ]  # i != j: every pair twice
    middle, mean = median(distances, among), jnp.mean(distances, where=among)
    return jnp.where(
        middle > 0, middle, jnp.where(mean > 0, mean, jnp.where(jnp.isnan(mean), jnp.nan, 1.0))
    )


def median(values: Float[Array, "*b"], among: Bool[Array, "*b"] | None = None) -> Float[Array, ""]:
    """Return `jnp.median` of non-negative numbers, or those `among` them, found bit by bit."""
    number, width = values.size if among is None else jnp.sum(among), jnp.finfo(values.dtype).bits
    kind = {16: jnp.int16, 32: jnp.int32, 64: jnp.int64}[width]
    # The bits of non-negative floats have the order of the numbers, so counting replaces a sort.
    bits = lax.bitcast_convert_type(lax.stop_gradient(values), kind)
    if among is not None:
        bits = jnp.where(among, bits, jnp.iinfo(kind).max)

    def closer(index: Array, least: Array) -> Array:
        higher = least | (jnp.asarray(1, kind) << (width - 2 - index).astype(kind))
        return jnp.where(jnp.sum(bits < higher) <= (number - 1) // 2, higher, least)

    low = lax.fori_loop(0, width - 1, closer, jnp.zeros((), kind))
    reached = jnp.sum(bits <= low) > number // 2
    high = jnp.where(reached, low, jnp.min(bits, where=bits > low, initial=jnp.iinfo(kind).max))

    def mean_of(which: Array) -> Array:  # with the mean derivative of equal values
        own = bits == which
        change = jnp.where(own & jnp.isfinite(values), values - lax.stop_gradient(values), 0.0)
        return lax.bitcast_convert_type(which, values.dtype) + jnp.sum(change) / jnp.sum(own)

    known = jnp.where(jnp.any(jnp.isnan(values)), jnp.nan, 1.0).astype(values.dtype)
    return known * (0.5 * mean_of(low) + 0.5 * mean_of(high))
