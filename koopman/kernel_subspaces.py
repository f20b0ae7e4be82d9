"""What the latent functions of a kernel estimator span, and its derivative: `subspaces` in terms of Gram matrices.

With K = k(X, X) / n and L = k(Y, Y) / n, weights W = sqrt(n) c as in `nystroem`: W^T (K^2 + alpha K) W = I.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from dissociation.checks import is_traced
from dissociation.linalg import product
from koopman.solvers import Leading, leading_eigenpairs
from koopman.subspaces import Basis, halved, mixing


class GramMethod(NamedTuple):
    """The static choices of a fit.

    Attributes:
        kind: "pcr" (ridge is the case of all directions) or "reduced_rank".
        size: Latent functions.
        solver: "dense", "krylov" or, for reduced rank, "spectral".
    """

    kind: str
    size: int
    solver: str


def gram_cutoff(gram: Float[Array, "n n"]) -> float:
    """Relative size below which an eigenvalue counts as zero: 8 times the rounding unit.

    Kernels of deficient rank have their zeros at 1.3 to 3.3 times the unit for 30 to 2000 samples. A cut-off that grew
    with n would drop directions that the regularised risk needs.
    """
    return 8 * float(jnp.finfo(gram.dtype).eps)


def cholesky_floor(gram: Float[Array, "n n"]) -> Float[Array, ""]:
    """The least `alpha` at which what the factor of K + alpha I adds in rounding, eps tr(K) / alpha, is below 1 %."""
    return 100 * float(jnp.finfo(gram.dtype).eps) * jnp.trace(gram)


def gram_weights(
    method: GramMethod,
    gram_x: Float[Array, "n n"],
    gram_y: Float[Array, "n n"],
    alpha: Float[Array, ""],
    active: Int[Array, ""] | None = None,
) -> Basis:
    """W and the estimator's singular values.

    Args:
        method: The estimator.
        gram_x: K.
        gram_y: L.
        alpha: Tikhonov regularisation.
        active: Columns in use, the others are zero; default all.

    Returns:
        W, singular values, and eigenvalue number `size` of K (an upper bound of it, tr(K) / size, from "krylov" for
        reduced rank). What is computed from W W^T has a derivative in all arguments (for K,
        along directions that keep its rank), at the cost of a dense decomposition.

    Raises:
        ValueError: If "krylov" for reduced rank finds K + alpha I, known, not to be positive definite.
    """
    return _weights(method, gram_x, gram_y, alpha, jnp.asarray(method.size if active is None else active))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _weights(method: GramMethod, gram_x: Array, gram_y: Array, alpha: Array, active: Array) -> Basis:
    if method.kind == "pcr":
        found = _pcr(method, gram_x, alpha)
    elif method.solver == "krylov":
        found = _reduced_krylov(method, gram_x, gram_y, alpha)
    else:
        found = _reduced_turned(method, gram_x, gram_y, alpha)
    used = jnp.arange(method.size) < active
    return found._replace(vectors=found.vectors * used[None], values=found.values * used)


def _pcr(method: GramMethod, gram_x: Array, alpha: Array) -> Basis:
    number, size = gram_x.shape[0], method.size
    if method.solver == "krylov":
        found = leading_eigenpairs(partial(product, gram_x), number, size, dtype=gram_x.dtype)
    else:
        found = _leading(gram_x, size)
    scale, _ = _scale(found.values, gram_cutoff(gram_x), alpha)
    return _basis(found._replace(vectors=found.vectors * scale[None]), found.values[-1])


def _leading(matrix: Array, size: int) -> Leading:
    values, vectors = jnp.linalg.eigh(matrix)
    values = values[::-1]
    return Leading(vectors[:, ::-1][:, :size], values[:size], values[size:])


def _basis(found: Leading, variance: Array) -> Basis:
    values, rest = (jnp.sqrt(jnp.maximum(part, 0.0)) for part in (found.values, found.rest))
    return Basis(found.vectors, values, rest, variance)


def _scale(values: Array, cutoff: float, alpha: Array) -> tuple[Array, Array]:
    """(lambda (lambda + alpha))^(-1/2), zero where lambda is cut off, and where it is not."""
    kept = values > cutoff * values[0]
    safe = jnp.where(kept, values, 1.0)
    return jnp.where(kept, jax.lax.rsqrt(safe) * jax.lax.rsqrt(safe + alpha), 0.0), kept


class _Turned(NamedTuple):
    """K = P diag(values) P^T, falling; (values (values + alpha))^(-1/2); g L' g with L' = P^T L P and P g^2 P^T = T."""

    vectors: Array
    values: Array
    scale: Array
    gain: Array
    turned: Array


def _turn(gram_x: Array, gram_y: Array, alpha: Array) -> _Turned:
    values, vectors = jnp.linalg.eigh(gram_x)
    values, vectors = values[::-1], vectors[:, ::-1]
    scale, _ = _scale(values, gram_cutoff(gram_x), alpha)
    return _Turned(vectors, values, scale, (scale * values)[:, None], product(vectors.T, product(gram_y, vectors)))


def _reduced_turned(method: GramMethod, gram_x: Array, gram_y: Array, alpha: Array) -> Basis:
    """In the eigenbasis P of K: T = P diag(g)^2 P^T, and P^T L P does without `alpha`."""
    vectors, values, scale, gain, turned = _turn(gram_x, gram_y, alpha)
    if method.solver == "spectral":
        found = leading_eigenpairs(
            lambda block: gain * product(turned, gain * block), scale.shape[0], method.size, dtype=gram_x.dtype
        )
    else:
        found = _leading(gain * turned * gain.T, method.size)
    weights = product(vectors, scale[:, None] * found.vectors)
    return _basis(found._replace(vectors=weights), values[method.size - 1])


def _reduced_krylov(method: GramMethod, gram_x: Array, gram_y: Array, alpha: Array) -> Basis:
    number = gram_x.shape[0]
    factor = jnp.linalg.cholesky(gram_x + alpha * jnp.eye(number, dtype=gram_x.dtype))
    if not is_traced(factor) and not bool(jnp.isfinite(factor[-1, -1])):
        raise ValueError(
            f"`alpha` must make K + alpha I positive definite in {gram_x.dtype}, got {float(alpha):.3g}. Raise it "
            f"above {float(cholesky_floor(gram_x)):.1g}, use solver='dense', or enable x64."
        )

    def solve(block: Array) -> Array:
        return jax.scipy.linalg.cho_solve((factor, True), block)

    def shrink(block: Array) -> Array:
        return block - alpha * solve(block)  # T

    found = leading_eigenpairs(partial(product, gram_y), number, method.size, dtype=gram_x.dtype, inner=shrink)
    return _basis(found._replace(vectors=solve(found.vectors)), jnp.trace(gram_x) / method.size)


@_weights.defjvp
def _weights_jvp(method, primals, tangents):
    """By perturbation theory, with no rotation among the columns of W."""
    gram_x, gram_y, alpha, active = primals
    found = _weights(method, gram_x, gram_y, alpha, active)
    rule = _pcr_jvp if method.kind == "pcr" else _reduced_jvp
    d_weights, d_values = rule(found.vectors, found.values, primals, tangents)
    return found, Basis(d_weights, d_values, jnp.zeros_like(found.rest), jnp.zeros_like(found.variance))


def _pcr_jvp(weights, values, primals, tangents):
    """W = V F^(1/2) with V the leading eigenvectors of K, and F = lambda^-1 (lambda + alpha)^-1 a matrix function."""
    (gram_x, _, alpha, active), (d_gram, _, d_alpha, _) = primals, tangents
    size = weights.shape[1]
    squares, vectors = jnp.linalg.eigh(gram_x)
    squares, vectors = squares[::-1], vectors[:, ::-1]
    scale, kept = _scale(squares, gram_cutoff(gram_x), alpha)
    active = jnp.minimum(active, jnp.sum(kept))
    leading = jnp.arange(size) < active
    scale = scale[:size] * leading
    mixed = product(vectors.T, product(d_gram, vectors[:, :size]))
    outside = mixing(mixed, squares, active) * scale[None]
    both = squares[:size, None] + squares[None, :size] + alpha
    inside = -0.5 * both * scale[:, None] ** 2 * scale[None] * mixed[:size]
    inside = inside - jnp.diag(0.5 * d_alpha * scale / (jnp.where(leading, squares[:size], 1.0) + alpha))
    d_own = product(vectors, outside) + product(vectors[:, :size], inside)
    # The solver's own columns: they differ by a rotation where eigenvalues coincide.
    pull = scale * squares[:size] * (squares[:size] + alpha)
    turn = pull[:, None] * product(vectors[:, :size].T, weights)
    return product(d_own, turn), halved(jnp.diagonal(mixed), values)


def _reduced_jvp(weights, values, primals, tangents):
    """K L K w = sigma^2 (K^2 + alpha K) w, a symmetric pencil on the range of K."""
    (gram_x, gram_y, alpha, active), (d_x, d_y, d_alpha, _) = primals, tangents
    size = weights.shape[1]
    vectors, _, scale, gain, turned = _turn(gram_x, gram_y, alpha)
    squares, turn = jnp.linalg.eigh(gain * turned * gain.T)
    squares, turn = jnp.maximum(squares[::-1], 0.0), turn[:, ::-1]
    every = product(vectors, scale[:, None] * turn)
    own = every[:, :size] * (jnp.arange(size) < active)[None]
    seen, d_seen = product(gram_x, own), product(d_x, own)
    ahead = product(gram_y, seen)
    d_left = product(d_x, ahead) + product(gram_x, product(d_y, seen) + product(gram_y, d_seen))
    d_right = product(every.T, product(d_x, seen) + product(gram_x, d_seen) + alpha * d_seen + d_alpha * seen)
    mixed = product(every.T, d_left) - d_right * squares[None, :size]
    d_own = product(every, mixing(mixed, squares, active, gram_cutoff(gram_x))) - 0.5 * product(own, d_right[:size])
    seen = product(gram_x, weights)
    rotation = product(own.T, product(gram_x, seen) + alpha * seen)
    return product(d_own, rotation), halved(jnp.diagonal(mixed), values)
