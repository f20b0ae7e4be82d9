"""Differentiable linear algebra: powers of positive semidefinite matrices, nuclear norm and centring."""

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
    """Return a power of two near a size, which divides data without rounding; a constant for derivatives."""
    size = lax.stop_gradient(size)
    usable = (size > 0) & jnp.isfinite(size)
    limits = jnp.finfo(size.dtype)
    # The bits of the exponent alone are the power of two below: `frexp` and `ldexp` take ten times
    # as long to compile.
    size = jnp.where(usable, jnp.maximum(size, limits.tiny), 0.5)
    bits = lax.bitcast_convert_type(size, f"uint{limits.bits}")
    exponent = bits & (((1 << limits.nexp) - 1) << limits.nmant)
    power = lax.bitcast_convert_type(exponent, size.dtype)
    return jnp.minimum(2 * power, 2.0 ** (limits.maxexp - 1))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def no_derivative(x: Array, what: str) -> Array:
    """Return the array, whose derivative raises an error that names `what`."""
    return x


@no_derivative.defjvp
def _no_derivative(what: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{what} has no derivative.")


def finite_part(
    matrix: Float[Array, "*b n m"],
) -> tuple[Float[Array, "*b n m"], Float[Array, "*b"]]:
    """Return the matrix, or zeros if an entry is not finite, and 0 or NaN to add to results."""
    # LAPACK may loop for ever on NaN or infinity, or return finite numbers.
    finite = jnp.all(jnp.isfinite(matrix), (-2, -1))
    return jnp.where(finite[..., None, None], matrix, 0.0), jnp.where(finite, 0.0, jnp.nan).astype(
        matrix.dtype
    )


@validated
@jax.jit
def centre(
    x: Float[Array | np.ndarray, "n d"], kept: Bool[Array | np.ndarray, " n"] | None = None
) -> Float[Array, "n d"]:
    """Subtract the mean over `kept` rows, by default all, of every column."""
    if kept is None:
        first = 0
        weights = None
    else:
        first = jnp.argmax(kept)
        weights = kept[:, None]
    even = jnp.all(x == x[first][None], 0, where=weights)
    centred = x - jnp.mean(x, 0, where=weights)[None]
    # The first mean carries the rounding of a large offset.
    centred = centred - jnp.mean(centred, 0, where=weights)[None]
    step = x - jax.lax.stop_gradient(x)  # zero, with the derivative of x
    return jnp.where(even[None], step - jnp.mean(step, 0, where=weights)[None], centred)


@validated
@jax.jit
def positive_inverse(matrix: Float[Array | np.ndarray, "*b n n"]) -> Float[Array, "*b n n"]:
    """Return inverses of stacked small positive definite matrices [..., n, n]."""
    number, batch = matrix.shape[-1], matrix.shape[:-2]
    size = 1 << max(number - 1, 0).bit_length()
    factor = jnp.linalg.cholesky(matrix)
    extra = size - number
    padded = jnp.pad(factor, ((0, 0),) * len(batch) + ((0, extra), (0, extra)))
    rest = jnp.diag(jnp.arange(size) >= number).astype(padded.dtype)
    padded = padded + rest[(None,) * len(batch)]
    # [[A, 0], [B, C]]^{-1} = [[A^{-1}, 0], [-C^{-1} B A^{-1}, C^{-1}]], from diagonal blocks that
    # double in every round. Triangular solves of a stack would run sequentially.
    blocks = (
        1 / jnp.diagonal(padded, axis1=-2, axis2=-1)[..., None, None]
    )  # [..., blocks, width, width]
    width = 1
    while width < size:
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        count = size // (2 * width)
        cut = padded.reshape(*batch, count, 2 * width, count, 2 * width)
        diagonal = jnp.moveaxis(
            jnp.diagonal(cut, axis1=-4, axis2=-2), -1, -3
        )  # the diagonal blocks
        below = -product(second, product(diagonal[..., width:, :width], first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([upper, jnp.concatenate([below, second], -1)], -2)
        width *= 2
    inverse = blocks[..., 0, :number, :number]
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
    _, _, _, image = _decompose(power, matrix, rtol)
    return image


@_psd_power.defjvp
def _psd_power_jvp(
    power: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]
) -> tuple[Array, Array]:
    values, kept, vectors, image = _decompose(power, *primals)
    # With r = log(a / b), (a^p - b^p) / (a - b) = (a b)^((p - 1) / 2) sinh(p r / 2) / sinh(r / 2):
    # smooth and even in r, so nothing cancels if a is close to b.
    ratio = jnp.log(values)[:, None] - jnp.log(values)[None]
    equal = ratio == 0
    quotient = jnp.where(
        equal, power, jnp.sinh(0.5 * power * ratio) / jnp.sinh(jnp.where(equal, 1.0, 0.5 * ratio))
    )
    half = values ** (0.5 * (power - 1))
    edge = jnp.where(kept, values ** (power - 1), 0.0)
    slopes = jnp.where(
        kept[:, None] & kept[None],
        half[:, None] * half[None] * quotient,
        edge[:, None] + edge[None],
    )
    # dP = V (F * (V^T dM V)) V^T with divided differences F of f. JAX's rule is not finite if
    # eigenvalues coincide.
    turned = product(product(vectors.T, tangents[0]), vectors)
    return image, product(product(vectors, slopes * turned), vectors.T)


@partial(jax.jit, static_argnums=0)
def _decompose(power: float, matrix: Array, rtol: Array) -> tuple[Array, Array, Array, Array]:
    """Return eigenvalues (1 if cut off), flags of kept ones, eigenvectors, and the power."""
    matrix, undefined = finite_part(matrix)
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    kept = values > rtol * jnp.maximum(values[-1], 0.0)
    values = jnp.where(kept, values, 1.0)
    image = product(vectors * jnp.where(kept, values**power, 0.0)[None], vectors.T)
    return values, kept, vectors + undefined, image + undefined


@jax.custom_jvp
@jax.jit
def nuclear_norm(matrix: Float[Array, "m k"]) -> Float[Array, ""]:
    """Return the sum of singular values, with derivative <U V^T, dM> over those that are not negligible.

    Source: Watson (1992), Characterization of the subdifferential of some matrix norms.
    """
    matrix, undefined = finite_part(matrix)
    return jnp.sum(jnp.linalg.svd(matrix, compute_uv=False)) + undefined


@nuclear_norm.defjvp
def _nuclear_norm_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    matrix, undefined = finite_part(primals[0])
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    rtol = max(matrix.shape) * float(jnp.finfo(matrix.dtype).eps)
    # At deficient rank this is the subgradient of least norm.
    polar = product(left * (values > rtol * values[0])[None], right) + undefined
    return jnp.sum(values) + undefined, jnp.sum(polar * tangents[0])


def rank_cut(x: Float[Array, "n p"]) -> float:
    """Return the fraction of the largest singular value up to which others count as zero."""
    # The rounding of a missing direction, some 3 units, does not grow with the number of samples.
    return min(max(x.shape), 300) * float(jnp.finfo(x.dtype).eps)


def column_units(x: np.ndarray) -> np.ndarray:
    """Return powers of two near the largest entries of columns [n, p]; divided by them, ranks depend on no units."""
    sizes = np.abs(x).max(0, initial=0.0)
    return np.ldexp(1.0, np.frexp(np.where(sizes > 0, sizes, 1.0))[1])


def num_directions(x: np.ndarray, rtol: float) -> int:
    """Return the number of singular values that exceed a fraction of the largest."""
    values = np.asarray(svdvals(x))
    return int(np.sum(values > rtol * values[0])) if values.size else 0


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def singular_map(
    function: Callable[[Array, Array], Array],
    x: Float[Array, "n p"],
    parameter: Float[Array, "..."],
    cut: float | Float[Array, ""],
) -> Float[Array, "n p"]:
    """Return U diag(f(s)) V^T of a matrix U diag(s) V^T, with zeros for negligible s [k], in falling order.

    `function` f(s, parameter) is hashable and acts entry by entry, up to locally constant factors.
    Up to the fraction `cut` of the largest, s are negligible.
    """
    return _singular(function, x, parameter, cut)[0]


def _singular(function: Any, x: Array, parameter: Array, cut: float | Array) -> tuple[Array, ...]:
    x, undefined = finite_part(x)
    left, values, right = jnp.linalg.svd(x, full_matrices=False)
    kept = values > cut * values[0]
    values = jnp.where(kept, values, 0.0)
    mapped = jnp.where(kept, function(values, parameter), 0.0)
    return product(left * mapped[None], right) + undefined, left, values, right, mapped


@singular_map.defjvp
def _singular_map_jvp(function: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x, parameter, cut), (dx, dparameter, _) = primals, tangents
    image, left, values, right, mapped = _singular(function, x, parameter, cut)
    kept = values > 0
    slope, change = (
        jnp.where(
            kept, jax.jvp(lambda *args: function(*args), (values, parameter), direction)[1], 0.0
        )
        for direction in (
            (jnp.ones_like(values), jnp.zeros_like(parameter)),
            (jnp.zeros_like(values), dparameter),
        )
    )
    inner = product(product(left.T, dx), right.T)
    even, odd = 0.5 * (inner + inner.T), 0.5 * (inner - inner.T)
    gap, total = values[:, None] - values[None], values[:, None] + values[None]
    near = jnp.abs(gap) <= jnp.finfo(x.dtype).eps ** 0.5 * total
    quotient = jnp.where(near, 1.0, gap)
    differences = jnp.where(
        near, 0.5 * (slope[:, None] + slope[None]), (mapped[:, None] - mapped[None]) / quotient
    )
    sums = jnp.where(
        total > 0, (mapped[:, None] + mapped[None]) / jnp.where(total > 0, total, 1.0), 0.0
    )
    ratio = jnp.where(kept, mapped / jnp.where(kept, values, 1.0), 0.0)
    turned = product(product(left, differences * even + sums * odd + jnp.diag(change)), right)
    beside = product((dx - product(left, product(left.T, dx))), right.T * ratio[None])
    beyond = product((left * ratio[None]).T, dx - product(product(dx, right.T), right))
    return image, turned + product(beside, right) + product(left, beyond)
