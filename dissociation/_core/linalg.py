"""Differentiable linear algebra: matrix powers, nuclear norm, singular values and centring."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Inexact
from scipy.linalg import svdvals

from dissociation._core.conversion import to_device
from dissociation._core.types import NonNegative
from dissociation._core.validation import validated


def product(
    a: Inexact[Array, "... n k"], b: Inexact[Array, "... k m"]
) -> Inexact[Array, "... n m"]:
    """Return the matrix product at the highest precision of the backend."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def scale_of(size: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return a power of two near `size`, a constant for derivatives.

    Division by a power of two does not round.
    """
    size = lax.stop_gradient(size)
    is_usable = (size > 0) & jnp.isfinite(size)
    limits = jnp.finfo(size.dtype)
    # The bits of the exponent alone are the power of two below: `frexp` and `ldexp` take ten times
    # as long to compile.
    size = jnp.where(is_usable, jnp.maximum(size, limits.tiny), 0.5)
    bits = lax.bitcast_convert_type(size, f"uint{limits.bits}")
    exponent_mask = ((1 << limits.nexp) - 1) << limits.nmant
    power = lax.bitcast_convert_type(bits & exponent_mask, size.dtype)
    largest_power = 2.0 ** (limits.maxexp - 1)
    return jnp.minimum(2 * power, largest_power)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def no_derivative(x: Array, quantity: str) -> Array:
    """Return `x`, whose derivative raises an error that names `quantity`."""
    return x


@no_derivative.defjvp
def _no_derivative(quantity: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{quantity} has no derivative.")


def finite_part(
    matrix: Float[Array, "*b n m"],
) -> tuple[Float[Array, "*b n m"], Float[Array, "*b"]]:
    """Return the matrix, or zeros if an entry is not finite, and 0 or NaN to add to results."""
    # LAPACK may loop for ever on NaN or infinity, or return finite numbers.
    is_finite = jnp.all(jnp.isfinite(matrix), (-2, -1))
    finite_matrix = jnp.where(is_finite[..., None, None], matrix, 0.0)
    undefined = jnp.where(is_finite, 0.0, jnp.nan)
    return finite_matrix, undefined.astype(matrix.dtype)


@validated
@jax.jit
def centre(
    x: Float[Array | np.ndarray, "n d"], is_used: Bool[Array | np.ndarray, " n"] | None = None
) -> Float[Array, "n d"]:
    """Subtract the mean over the rows `is_used`, by default all, of every column."""
    if is_used is None:
        first = 0
        weights = None
    else:
        first = jnp.argmax(is_used)
        weights = is_used[:, None]
    is_constant = jnp.all(x == x[first][None], 0, where=weights)

    centred = x - jnp.mean(x, 0, where=weights)[None]
    # The first mean carries the rounding of a large offset.
    centred = centred - jnp.mean(centred, 0, where=weights)[None]

    step = x - jax.lax.stop_gradient(x)  # zero, with the derivative of x
    centred_step = step - jnp.mean(step, 0, where=weights)[None]
    return jnp.where(is_constant[None], centred_step, centred)


@validated
@jax.jit
def positive_inverse(matrix: Float[Array | np.ndarray, "*b n n"]) -> Float[Array, "*b n n"]:
    """Return inverses of stacked small positive definite matrices [..., n, n]."""
    number = matrix.shape[-1]
    batch = matrix.shape[:-2]
    factor = jnp.linalg.cholesky(matrix)

    # Pad the factor by an identity to a power of two.
    size = 1 << max(number - 1, 0).bit_length()
    extra = (0, size - number)
    padded = jnp.pad(factor, ((0, 0),) * len(batch) + (extra, extra))
    identity = jnp.diag(jnp.arange(size) >= number).astype(padded.dtype)
    padded = padded + identity[(None,) * len(batch)]

    # [[A, 0], [B, C]]^{-1} = [[A^{-1}, 0], [-C^{-1} B A^{-1}, C^{-1}]], from diagonal blocks that
    # double in every round. Triangular solves of a stack would run sequentially.
    diagonal = jnp.diagonal(padded, axis1=-2, axis2=-1)
    inverses = 1 / diagonal[..., None, None]  # [..., blocks, width, width]
    width = 1
    while width < size:
        upper_left = inverses[..., ::2, :, :]
        lower_right = inverses[..., 1::2, :, :]

        num_blocks = size // (2 * width)
        tiles = padded.reshape(*batch, num_blocks, 2 * width, num_blocks, 2 * width)
        diagonal_tiles = jnp.diagonal(tiles, axis1=-4, axis2=-2)
        diagonal_tiles = jnp.moveaxis(diagonal_tiles, -1, -3)
        lower_left = diagonal_tiles[..., width:, :width]
        lower_left = -product(lower_right, product(lower_left, upper_left))

        upper = jnp.concatenate([upper_left, jnp.zeros_like(upper_left)], -1)
        lower = jnp.concatenate([lower_left, lower_right], -1)
        inverses = jnp.concatenate([upper, lower], -2)
        width *= 2
    inverse = inverses[..., 0, :number, :number]
    return product(jnp.swapaxes(inverse, -1, -2), inverse)


@validated
def psd_power(
    matrix: Float[Array | np.ndarray, "d d"], power: float | int, *, rtol: NonNegative | None = None
) -> Float[Array, "d d"]:
    """Return V diag(f(l)) V^T, a power of a positive semidefinite matrix V diag(l) V^T.

    f(l) = l^power if l > rtol max(l), else 0.

    Source: Daleckii and Krein (1965), Integration and differentiation of functions of Hermitian
    operators. Higham (2008), Functions of matrices, theorem 3.11.
    """
    matrix = to_device(matrix)
    if rtol is None:
        rtol = matrix.shape[0] * float(jnp.finfo(matrix.dtype).eps)
    return _symmetric_power(float(power), matrix, to_device(rtol, matrix.dtype))


@partial(jax.jit, static_argnums=0)
def _symmetric_power(power: float, matrix: Array, rtol: Array) -> Array:
    return _psd_power(power, 0.5 * (matrix + matrix.T), rtol)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _psd_power(power: float, matrix: Array, rtol: Array) -> Array:
    return _decompose(power, matrix, rtol)[-1]


@_psd_power.defjvp
def _psd_power_jvp(
    power: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    eigenvalues, is_retained, eigenvectors, image = _decompose(power, *primals)

    # With r = log(a / b), (a^p - b^p) / (a - b) = (a b)^((p - 1) / 2) sinh(p r / 2) / sinh(r / 2):
    # smooth and even in r, so nothing cancels if a is close to b.
    logarithms = jnp.log(eigenvalues)
    r = logarithms[:, None] - logarithms[None]
    is_equal = r == 0
    numerator = jnp.sinh(0.5 * power * r)
    denominator = jnp.sinh(jnp.where(is_equal, 1.0, 0.5 * r))
    quotient = jnp.where(is_equal, power, numerator / denominator)
    root = eigenvalues ** (0.5 * (power - 1))
    retained_slopes = root[:, None] * root[None] * quotient

    edge = jnp.where(is_retained, eigenvalues ** (power - 1), 0.0)
    slopes = jnp.where(
        is_retained[:, None] & is_retained[None], retained_slopes, edge[:, None] + edge[None]
    )

    # dP = V (F * (V^T dM V)) V^T with divided differences F of f. JAX's rule is not finite if
    # eigenvalues coincide.
    rotated = product(product(eigenvectors.T, tangents[0]), eigenvectors)
    return image, product(product(eigenvectors, slopes * rotated), eigenvectors.T)


@partial(jax.jit, static_argnums=0)
def _decompose(power: float, matrix: Array, rtol: Array) -> tuple[Array, Array, Array, Array]:
    """Return eigenvalues (1 if cut off), flags of retained ones, eigenvectors, and the power."""
    matrix, undefined = finite_part(matrix)
    eigenvalues, eigenvectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    is_retained = eigenvalues > rtol * jnp.maximum(eigenvalues[-1], 0.0)
    eigenvalues = jnp.where(is_retained, eigenvalues, 1.0)
    powers = jnp.where(is_retained, eigenvalues**power, 0.0)
    image = product(eigenvectors * powers[None], eigenvectors.T)
    return eigenvalues, is_retained, eigenvectors + undefined, image + undefined


@jax.custom_jvp
@jax.jit
def nuclear_norm(matrix: Float[Array, "m k"]) -> Float[Array, ""]:
    """Return the sum of singular values.

    The derivative is <U V^T, dM> over singular values that are not negligible.

    Source: Watson (1992), Characterization of the subdifferential of some matrix norms.
    """
    matrix, undefined = finite_part(matrix)
    return jnp.sum(jnp.linalg.svd(matrix, compute_uv=False)) + undefined


@nuclear_norm.defjvp
def _nuclear_norm_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    matrix, undefined = finite_part(primals[0])
    left_vectors, values, right_vectors = jnp.linalg.svd(matrix, full_matrices=False)
    rtol = max(matrix.shape) * float(jnp.finfo(matrix.dtype).eps)
    is_retained = values > rtol * values[0]
    # At deficient rank this is the subgradient of least norm.
    polar = product(left_vectors * is_retained[None], right_vectors) + undefined
    return jnp.sum(values) + undefined, jnp.sum(polar * tangents[0])


def rank_cut(x: Float[Array, "n p"]) -> float:
    """Return the fraction of the largest singular value up to which others count as zero."""
    # The rounding of a missing direction, some 3 units, does not grow with the number of samples.
    num_units = min(max(x.shape), 300)
    return num_units * float(jnp.finfo(x.dtype).eps)


def column_units(x: np.ndarray) -> np.ndarray:
    """Return powers of two near the largest entries of columns [n, p].

    The rank of `x` divided by these powers does not depend on units.
    """
    sizes = np.abs(x).max(0, initial=0.0)
    sizes = np.where(sizes > 0, sizes, 1.0)
    _, exponents = np.frexp(sizes)
    return np.ldexp(1.0, exponents)


def num_directions(x: np.ndarray, rtol: float) -> int:
    """Return the number of singular values that exceed a fraction of the largest."""
    values = np.asarray(svdvals(x))
    if values.size == 0:
        return 0
    return int(np.sum(values > rtol * values[0]))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def singular_map(
    function: Callable[[Array, Array], Array],
    x: Float[Array, "n p"],
    parameter: Float[Array, "..."],
    cut: float | Float[Array, ""],
) -> Float[Array, "n p"]:
    """Return U diag(f(s)) V^T of a matrix U diag(s) V^T, with zeros for negligible s.

    `function` f(s, parameter) is hashable and acts entry by entry, up to locally constant factors,
    on s [k] in falling order. Up to the fraction `cut` of the largest, s are negligible.
    """
    return _singular(function, x, parameter, cut)[0]


def _singular(function: Any, x: Array, parameter: Array, cut: float | Array) -> tuple[Array, ...]:
    """Return the image of `x`, its singular vectors and values, and the values' images."""
    x, undefined = finite_part(x)
    left_vectors, values, right_vectors = jnp.linalg.svd(x, full_matrices=False)
    is_retained = values > cut * values[0]
    values = jnp.where(is_retained, values, 0.0)
    mapped = jnp.where(is_retained, function(values, parameter), 0.0)
    image = product(left_vectors * mapped[None], right_vectors) + undefined
    return image, left_vectors, values, right_vectors, mapped


@singular_map.defjvp
def _singular_map_jvp(function: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, parameter, cut = primals
    dx, dparameter, _ = tangents
    image, left_vectors, values, right_vectors, mapped = _singular(function, x, parameter, cut)
    is_retained = values > 0

    def derivative(*direction: Any) -> Array:
        _, tangent = jax.jvp(lambda *args: function(*args), (values, parameter), direction)
        return jnp.where(is_retained, tangent, 0.0)

    slope = derivative(jnp.ones_like(values), jnp.zeros_like(parameter))
    change = derivative(jnp.zeros_like(values), dparameter)

    # Within the singular vectors, divided differences of f multiply U^T dX V.
    inner = product(product(left_vectors.T, dx), right_vectors.T)
    symmetric = 0.5 * (inner + inner.T)
    antisymmetric = 0.5 * (inner - inner.T)
    gap = values[:, None] - values[None]
    total = values[:, None] + values[None]
    is_close = jnp.abs(gap) <= jnp.finfo(x.dtype).eps ** 0.5 * total
    divisor = jnp.where(is_close, 1.0, gap)
    mean_slope = 0.5 * (slope[:, None] + slope[None])
    differences = jnp.where(is_close, mean_slope, (mapped[:, None] - mapped[None]) / divisor)
    mapped_total = mapped[:, None] + mapped[None]
    sums = jnp.where(total > 0, mapped_total / jnp.where(total > 0, total, 1.0), 0.0)

    # Outside of the singular vectors, f(s) / s multiplies dX.
    ratio = jnp.where(is_retained, mapped / jnp.where(is_retained, values, 1.0), 0.0)
    core = differences * symmetric + sums * antisymmetric + jnp.diag(change)
    within = product(product(left_vectors, core), right_vectors)
    new_columns = dx - product(left_vectors, product(left_vectors.T, dx))
    beside = product(new_columns, right_vectors.T * ratio[None])
    new_rows = dx - product(product(dx, right_vectors.T), right_vectors)
    beyond = product((left_vectors * ratio[None]).T, new_rows)
    return image, within + product(beside, right_vectors) + product(left_vectors, beyond)
