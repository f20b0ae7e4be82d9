"""Small differentiable linear algebra: powers of positive semidefinite matrices, the nuclear norm, centring.

An eigenvector has no derivative where eigenvalues coincide, and JAX's own rules are not finite there. The functions
here depend on the matrix alone, whichever eigenvectors are taken, so they do have one; their rules are written out.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Inexact

from dissociation._core.checks import check_non_negative, fail
from dissociation._core.types import Scalar
from dissociation._core.validation import validated

__all__ = [
    "centre",
    "finite_part",
    "no_derivative",
    "nuclear_norm",
    "positive_inverse",
    "product",
    "psd_power",
    "scale_of",
    "singular_map",
]


def product(a: Inexact[Array, "... n k"], b: Inexact[Array, "... k m"]) -> Inexact[Array, "... n m"]:
    """The matrix product at the highest precision that the backend has."""
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def scale_of(size: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """A power of two near a size: what divides data without rounding, and counts as a constant."""
    size = lax.stop_gradient(size)
    usable = (size > 0) & jnp.isfinite(size)
    exponent = jnp.frexp(jnp.where(usable, size, 0.5))[1]
    return jnp.ldexp(jnp.ones_like(size), jnp.minimum(exponent, jnp.finfo(size.dtype).maxexp - 1))


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def no_derivative(x: Array, what: str) -> Array:
    """The array itself, through which no derivative is taken: that is an error which names `what`."""
    return x


@no_derivative.defjvp
def _no_derivative(what: str, primals: Any, tangents: Any) -> Any:
    raise TypeError(f"{what} has no derivative.")


def finite_part(matrix: Float[Array, "*b n m"]) -> tuple[Float[Array, "*b n m"], Float[Array, "*b"]]:
    """A matrix that LAPACK can be given, and a number to add to all that comes of it.

    On an infinite or undefined entry its decompositions may loop without end, and may return finite numbers.
    """
    finite = jnp.all(jnp.isfinite(matrix), (-2, -1))
    return jnp.where(finite[..., None, None], matrix, 0.0), jnp.where(finite, 0.0, jnp.nan).astype(matrix.dtype)


@validated
def centre(x: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n d"]:
    """Subtracts the mean of every column.

    It does so twice: the first mean carries the rounding of a large offset. A column that is constant becomes zeros,
    and not what rounding leaves of it.
    """
    return _centre(jnp.asarray(x))


@jax.jit
def _centre(x: Array) -> Array:
    even = jnp.all(x == x[:1], 0)
    centred = x - jnp.mean(x, 0)[None]
    centred = centred - jnp.mean(centred, 0)[None]
    step = x - jax.lax.stop_gradient(x)  # zero, but for its derivative
    return jnp.where(even[None], step - jnp.mean(step, 0)[None], centred)


@validated
def positive_inverse(matrix: Float[Array | np.ndarray, "*b n m"]) -> Float[Array, "*b n m"]:
    """Inverses of positive definite matrices, for stacks of small ones.

    By Cholesky's factor L, whose inverse is put together from those of its diagonal blocks, twice as large in every
    round: [[A, 0], [B, C]]^{-1} = [[A^{-1}, 0], [-C^{-1} B A^{-1}, C^{-1}]]. But for the factor everything is a batched
    product, where triangular solves of a stack go one by one.
    """
    matrix = jnp.asarray(matrix)
    if matrix.ndim < 2 or matrix.shape[-1] != matrix.shape[-2]:
        fail("matrix", "be a stack of square matrices", matrix.shape)
    return _positive_inverse(matrix)


@jax.jit
def _positive_inverse(matrix: Array) -> Array:
    number, batch = matrix.shape[-1], matrix.shape[:-2]
    size = 1 << max(number - 1, 0).bit_length()
    factor = jnp.linalg.cholesky(matrix)
    extra = size - number
    padded = jnp.pad(factor, ((0, 0),) * len(batch) + ((0, extra), (0, extra)))
    rest = jnp.diag(jnp.arange(size) >= number).astype(padded.dtype)
    padded = padded + rest[(None,) * len(batch)]
    blocks = 1 / jnp.diagonal(padded, axis1=-2, axis2=-1)[..., None, None]  # [..., blocks, width, width]
    width = 1
    while width < size:
        first, second = blocks[..., ::2, :, :], blocks[..., 1::2, :, :]
        count = size // (2 * width)
        cut = padded.reshape(*batch, count, 2 * width, count, 2 * width)
        diagonal = jnp.moveaxis(jnp.diagonal(cut, axis1=-4, axis2=-2), -1, -3)  # the diagonal blocks
        below = -product(second, product(diagonal[..., width:, :width], first))
        upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
        blocks = jnp.concatenate([upper, jnp.concatenate([below, second], -1)], -2)
        width *= 2
    inverse = blocks[..., 0, :number, :number]
    return product(jnp.swapaxes(inverse, -1, -2), inverse)


@validated
def psd_power(
    matrix: Float[Array | np.ndarray, "d d"], power: float | int, *, rtol: Scalar | None = None
) -> Float[Array, "d d"]:
    r"""A power of a positive semidefinite matrix, of its inverse kind only on the range of the matrix.

        M = V diag(l) V^T   ->   V diag(f(l)) V^T,     f(l) = l^power if l > rtol max(l), else 0

    Power -1 is the pseudo-inverse, -1/2 whitens, 1/2 is the square root, 0 projects onto the range. The derivative is

        dP = V (F * (V^T dM V)) V^T,     F_ij = (f(l_i) - f(l_j)) / (l_i - l_j)

    with its limit l^(power - 1) power where eigenvalues coincide, f(l_i) / l_i where l_j is cut off, and 0 where both
    are. It is finite for every spectrum and is the true one along directions that keep the rank.

    Source: Daleckii and Krein (1965), Integration and differentiation of functions of Hermitian operators. Higham
    (2008), Functions of matrices, theorem 3.11.
    """
    matrix = jnp.asarray(matrix)
    if rtol is None:
        rtol = matrix.shape[0] * float(jnp.finfo(matrix.dtype).eps)
    check_non_negative("rtol", rtol)
    return _psd_power(float(power), 0.5 * (matrix + matrix.T), jnp.asarray(rtol, matrix.dtype))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _psd_power(power: float, matrix: Array, rtol: Array) -> Array:
    _, _, _, image = _decompose(power, matrix, rtol)
    return image


@_psd_power.defjvp
def _psd_power_jvp(power: float, primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    values, kept, vectors, image = _decompose(power, *primals)
    # With r = log(a / b), (a^p - b^p) / (a - b) = (a b)^((p - 1) / 2) sinh(p r / 2) / sinh(r / 2): smooth and even in
    # r, so nothing cancels where a is close to b.
    ratio = jnp.log(values)[:, None] - jnp.log(values)[None]
    equal = ratio == 0
    quotient = jnp.where(equal, power, jnp.sinh(0.5 * power * ratio) / jnp.sinh(jnp.where(equal, 1.0, 0.5 * ratio)))
    half = values ** (0.5 * (power - 1))
    edge = jnp.where(kept, values ** (power - 1), 0.0)
    slopes = jnp.where(kept[:, None] & kept[None], half[:, None] * half[None] * quotient, edge[:, None] + edge[None])
    turned = product(product(vectors.T, tangents[0]), vectors)
    return image, product(product(vectors, slopes * turned), vectors.T)


@partial(jax.jit, static_argnums=0)
def _decompose(power: float, matrix: Array, rtol: Array) -> tuple[Array, Array, Array, Array]:
    """Eigenvalues (1 where cut off), which are kept, eigenvectors, and the power of the matrix."""
    matrix, undefined = finite_part(matrix)
    values, vectors = jnp.linalg.eigh(matrix, symmetrize_input=False)
    kept = values > rtol * jnp.maximum(values[-1], 0.0)
    values = jnp.where(kept, values, 1.0)
    image = product(vectors * jnp.where(kept, values**power, 0.0)[None], vectors.T)
    return values, kept, vectors + undefined, image + undefined


@validated
def nuclear_norm(matrix: Float[Array | np.ndarray, "m k"], *, rtol: Scalar | None = None) -> Float[Array, ""]:
    """The sum of the singular values; d|M| = <U V^T, dM> with the singular vectors of those that are not negligible.

    Where the rank is deficient the norm has a kink, and this is the subgradient of least norm.

    Source: Watson (1992), Characterization of the subdifferential of some matrix norms.
    """
    matrix = jnp.asarray(matrix)
    if rtol is None:
        rtol = max(matrix.shape) * float(jnp.finfo(matrix.dtype).eps)
    check_non_negative("rtol", rtol)
    return _nuclear_norm(matrix, jnp.asarray(rtol, matrix.dtype))


@jax.custom_jvp
@jax.jit
def _nuclear_norm(matrix: Array, rtol: Array) -> Array:
    del rtol
    matrix, undefined = finite_part(matrix)
    return jnp.sum(jnp.linalg.svd(matrix, compute_uv=False)) + undefined


@_nuclear_norm.defjvp
def _nuclear_norm_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    matrix, rtol = primals
    matrix, undefined = finite_part(matrix)
    left, values, right = jnp.linalg.svd(matrix, full_matrices=False)
    polar = product(left * (values > rtol * values[0])[None], right) + undefined
    return jnp.sum(values) + undefined, jnp.sum(polar * tangents[0])


def rank_cut(x: Float[Array, "n p"]) -> float:
    """Singular values of a matrix that count as zero, of the largest: max(n, p) roundings, and not more than 300.

    What rounding leaves of a direction that is missing does not grow with the number of samples: some 3 roundings.
    """
    return min(max(x.shape), 300) * float(jnp.finfo(x.dtype).eps)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def singular_map(
    function: Callable[[Array, Array], Array], x: Float[Array, "n p"], parameter: Float[Array, "..."]
) -> Float[Array, "n p"]:
    """U diag(f(s)) V^T of a matrix U diag(s) V^T, with zeros where s is negligible.

    f = 1 is the polar factor, an orthonormal basis of the columns' span. The derivative exists for every spectrum, as
    that of `psd_power`: of two components it takes the divided differences of f, their mean slope where they coincide.

    `function`: f of the singular values [k] in falling order and of `parameter`, entry by entry but for what is
    constant under small changes, as a cut is. Hashable.
    """
    return _singular(function, x, parameter)[0]


def _singular(function: Any, x: Array, parameter: Array) -> tuple[Array, ...]:
    x, undefined = finite_part(x)
    left, values, right = jnp.linalg.svd(x, full_matrices=False)
    kept = values > rank_cut(x) * values[0]
    values = jnp.where(kept, values, 0.0)
    mapped = jnp.where(kept, function(values, parameter), 0.0)
    return product(left * mapped[None], right) + undefined, left, values, right, mapped


@singular_map.defjvp
def _singular_map_jvp(function: Any, primals: Any, tangents: Any) -> tuple[Array, Array]:
    (x, parameter), (dx, dparameter) = primals, tangents
    image, left, values, right, mapped = _singular(function, x, parameter)
    kept = values > 0
    slope, change = (
        jnp.where(kept, jax.jvp(lambda *args: function(*args), (values, parameter), direction)[1], 0.0)
        for direction in ((jnp.ones_like(values), jnp.zeros_like(parameter)), (jnp.zeros_like(values), dparameter))
    )
    inner = product(product(left.T, dx), right.T)
    even, odd = 0.5 * (inner + inner.T), 0.5 * (inner - inner.T)
    gap, total = values[:, None] - values[None], values[:, None] + values[None]
    near = jnp.abs(gap) <= jnp.finfo(x.dtype).eps ** 0.5 * total
    quotient = jnp.where(near, 1.0, gap)
    differences = jnp.where(near, 0.5 * (slope[:, None] + slope[None]), (mapped[:, None] - mapped[None]) / quotient)
    sums = jnp.where(total > 0, (mapped[:, None] + mapped[None]) / jnp.where(total > 0, total, 1.0), 0.0)
    ratio = jnp.where(kept, mapped / jnp.where(kept, values, 1.0), 0.0)
    turned = product(product(left, differences * even + sums * odd + jnp.diag(change)), right)
    beside = product((dx - product(left, product(left.T, dx))), right.T * ratio[None])
    beyond = product((left * ratio[None]).T, dx - product(product(dx, right.T), right))
    return image, turned + product(beside, right) + product(left, beyond)
