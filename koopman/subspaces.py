"""What the latent functions of an estimator on explicit features span, and its derivative.

Columns U with U^T (C_x + alpha I) U = I, from rows with x^T x = C_x and x^T y = C_xy. Whatever is computed from U U^T
has the derivative that is written out here, by perturbation theory, also where singular values coincide in the span.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from dissociation.checks import check_count, fail, is_traced
from dissociation.linalg import product
from koopman.pairs import gram_root
from koopman.perturbation import refused
from koopman.solvers import Leading, leading_left_vectors

Rank = int | Int[Array | np.ndarray, ""]


def latent_size(rank: Rank | None, width: int, columns: str) -> tuple[int, Array | None]:
    """The static number of latent functions, and the traced number of those in use.

    Args:
        rank: What was asked for; None for everything.
        width: The most there can be.
        columns: What `width` counts, for error messages.

    Returns:
        `rank` and None, or `width` and the traced rank.

    Raises:
        ValueError: If `rank` is below 1 or above `width`.
        TypeError: If it is no whole number.
    """
    if rank is None:
        return width, None
    if is_traced(rank):
        return width, jnp.asarray(rank)
    size = check_count("rank", rank.item() if isinstance(rank, jax.Array) else rank, minimum=1)
    if size > width:
        fail("rank", f"be at most the number of {columns} ({width})", rank)
    return size, None


def refuse_singular(
    kind: str, values: np.ndarray, cutoff: float, needed: int, width: int, what: tuple[str, str]
) -> None:
    """Raises where no regularisation is asked for and the data do not hold what the estimator inverts.

    Args:
        kind: The estimator, for the message.
        values: Singular values or eigenvalues, the largest first.
        cutoff: Relative size below which one counts as zero.
        needed: How many must not be zero.
        width: How many there could be.
        what: What the matrix is and its symbol, for the message.

    Raises:
        ValueError: If fewer are above zero.
    """
    found = int((values > cutoff * values[0]).sum())
    if found < needed:
        raise ValueError(
            f"`alpha` must be positive where {what[0]} is singular: {kind} needs rank {needed}, {what[1]} has rank "
            f"{found} of {width}. Pass alpha > 0, drop dependent features or samples, or lower the rank."
        )


class Method(NamedTuple):
    """The static choices of a fit.

    Attributes:
        kind: "ridge", "pcr" or "reduced_rank".
        size: Latent functions.
        solver: See `leading_left_vectors`.
        route: "qr" or "covariance".
        cutoff: Relative size below which a singular value of the data counts as zero.
    """

    kind: str
    size: int
    solver: str
    route: str
    cutoff: float


class Basis(NamedTuple):
    """What latent functions span.

    Attributes:
        vectors: U, [d, size].
        values: The estimator's singular values, falling: [size].
        rest: Those that follow, as far as the solver knows them. Without derivative, as `variance`.
        variance: Eigenvalue number `size` of C_x, or for ridge the mean of all: what `alpha` is to be compared with.
    """

    vectors: Array
    values: Array
    rest: Array
    variance: Array


def whitened_basis(
    method: Method,
    x: Float[Array, "m d"],
    y: Float[Array, "m dy"],
    alpha: Float[Array, ""],
    active: Int[Array, ""] | None = None,
) -> Basis:
    """U and the estimator's singular values, from rows with x^T x = C_x and x^T y = C_xy.

    Args:
        method: The estimator.
        x: Rows of the states.
        y: Rows of the successors.
        alpha: Tikhonov regularisation.
        active: Columns in use, the others are zero; default all.

    Returns:
        The basis, of static size.
    """
    return _basis(method, x, y, alpha, jnp.asarray(method.size if active is None else active))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _basis(method: Method, x: Array, y: Array, alpha: Array, active: Array) -> Basis:
    if method.kind == "pcr" and method.solver != "dense":
        basis, values, rest = _leading_directions(method, x, alpha)
        deviations = values
    else:
        basis, deviations, gain, turned = _whitening(method, x, alpha)
        if method.kind == "reduced_rank":
            rows = turned(y)
            number = min(method.size, *rows.shape)
            vectors, values, rest = leading_left_vectors(rows, number, scale=gain, solver=method.solver)
            basis = product(basis, vectors)
        else:
            basis, values, rest = basis[:, : method.size], deviations[: method.size], deviations[method.size :]
    if method.kind == "ridge":
        variance = jnp.sum(deviations**2) / x.shape[1]
    else:
        variance = deviations[min(method.size, deviations.shape[0]) - 1] ** 2
    missing = method.size - values.shape[0]  # fewer samples than the rank asked for
    used = jnp.arange(method.size) < active
    basis = jnp.pad(basis, ((0, 0), (0, missing))) * used[None]
    return Basis(basis, jnp.pad(values, (0, missing)) * used, rest, variance)


def _leading_directions(method: Method, x: Array, alpha: Array) -> Leading:
    """The first columns of W and deviations of `_whitening`, without the others."""
    if method.route == "covariance":
        vectors, *squares = leading_left_vectors(product(x.T, x), method.size, solver=method.solver)
        values, rest = (jnp.sqrt(part) for part in squares)
    else:
        root = gram_root(x) if x.shape[0] > x.shape[1] else x
        vectors, values, rest = leading_left_vectors(root.T, min(method.size, *root.shape), solver=method.solver)
    return Leading(_scaled(method, values, vectors.T, alpha)[0], values, rest)


def _whitening(method: Method, x: Array, alpha: Array) -> tuple[Array, Array, Array, Callable[[Array], Array]]:
    """W [d, k], W^T (C_x + alpha I) W = I on the range of C_x; falling deviations [k]; g [k] and f, W^T x^T y = g f(y).

    `alpha` is in g alone, so that all values of a sweep share f(y).
    """
    if method.route == "covariance":
        squares, vectors = jnp.linalg.eigh(product(x.T, x))
        values, right = jnp.sqrt(jnp.maximum(squares, 0.0))[::-1], vectors.T[::-1]
        whiten, scale = _scaled(method, values, right, alpha)
        return whiten, values, scale, lambda y: product(right, product(x.T, y))
    tall = x.shape[0] > x.shape[1]
    if tall and method.kind != "reduced_rank":  # which does without Q
        orthogonal, root = None, gram_root(x)
    else:
        orthogonal, root = jnp.linalg.qr(x) if tall else (None, x)
    left, values, right = jnp.linalg.svd(root, full_matrices=False)
    whiten, scale = _scaled(method, values, right, alpha)

    def turned(y: Array) -> Array:
        # Through Q: W^T (x^T y) would multiply the rounding of x^T y by W.
        return product(left.T, y if orthogonal is None else product(orthogonal.T, y))

    return whiten, values, values * scale, turned


def _scaled(method: Method, values: Array, right: Array, alpha: Array) -> tuple[Array, Array]:
    kept = values > method.cutoff * values[0]
    scale = jnp.where(kept, jax.lax.rsqrt(jnp.where(kept, values**2 + alpha, 1.0)), 0.0)
    return right.T * scale[None], scale


@_basis.defjvp
def _basis_jvp(method, primals, tangents):
    """By perturbation theory of the covariances, with no rotation among the columns of U: they span, and no more."""
    kind, size = method.kind, method.size
    (x, y, alpha, active), (d_x, d_y, d_alpha, _) = primals, tangents
    found = _basis(method, x, y, alpha, active)
    basis, values = found.vectors, found.values

    def slopes(d_basis: Array, d_values: Array) -> tuple[Basis, Basis]:
        return found, Basis(d_basis, d_values, jnp.zeros_like(found.rest), jnp.zeros_like(found.variance))

    half = product(x.T, d_x)
    d_cov = half + half.T + d_alpha * jnp.eye(x.shape[1], dtype=x.dtype)
    squares, vectors = jnp.linalg.eigh(product(x.T, x))
    squares, right = jnp.maximum(squares, 0.0)[::-1], vectors.T[::-1]
    whiten, scale = _scaled(method, jnp.sqrt(squares), right, alpha)

    def inverse(block: Array) -> Array:
        return product(whiten, product(whiten.T, block))

    if kind != "reduced_rank":
        mixed = product(product(right, d_cov), right.T)
        d_values = halved(jnp.diagonal(mixed)[:size] - d_alpha, values)
        if kind == "ridge":
            return slopes(-0.5 * inverse(product(d_cov, basis)), d_values)
        # U = V G^(-1/2) with V the leading directions, G = V^T (C_x + alpha) V.
        used = (jnp.arange(size) < active) & jnp.any(basis != 0, 0)  # and none that is cut off
        outside = mixing(mixed[:, :size], squares, jnp.sum(used))
        own = whiten[:, :size] * used[None]
        scale = scale[:size] * used
        inside = -0.5 * scale[:, None] * mixed[:size, :size] * scale[None]
        d_own = product(right.T, outside * scale[None]) + product(own, inside)
        return slopes(product(d_own, product(_pull(own, x, alpha), basis)), d_values)  # in the fit's columns
    rows = product(whiten.T, product(x.T, y))
    d_cross = product(d_x.T, y) + product(x.T, d_y)
    d_rows = product(whiten.T, d_cross) - 0.5 * product(product(whiten.T, product(d_cov, whiten)), rows)
    left, sizes, _ = jnp.linalg.svd(rows, full_matrices=rows.shape[0] > rows.shape[1])
    squares = jnp.pad(sizes, (0, left.shape[1] - sizes.shape[0])) ** 2
    d_square = product(d_rows, rows.T)
    # The solver's own columns of U, and not the decomposition's: the two differ by a rotation.
    turn = product(product(left[:, :size].T, _pull(whiten, x, alpha)), basis)
    mixed = product(product(left.T, d_square + d_square.T), left)
    outside = mixing(mixed[:, :size], squares, active)
    d_basis = product(whiten, product(product(left, outside), turn)) - 0.5 * inverse(product(d_cov, basis))
    return slopes(d_basis, halved(jnp.diagonal(mixed)[:size], values))


def _pull(whiten: Array, x: Array, alpha: Array) -> Array:
    """W^T (C_x + alpha I): takes U = W E back to E."""
    return product(product(whiten.T, x.T), x) + alpha * whiten.T


def mixing(
    numerator: Float[Array, "k r"], squares: Float[Array, " k"], active: Int[Array, ""], floor: float = 0.0
) -> Float[Array, "k r"]:
    """What leading eigenvectors take up of the others: N_ij / (s_j - s_i) for i beyond and j within the leading ones.

    Args:
        numerator: The perturbation between eigenvectors i and j.
        squares: Eigenvalues s in falling order.
        active: How many are leading.
        floor: Relative size at which an eigenvalue counts as zero.

    Returns:
        Coefficients; not finite where s_j and s_i agree up to rounding, where there is no derivative, and zero where
        both are zero.
    """
    rows, columns = jnp.arange(numerator.shape[0])[:, None], jnp.arange(numerator.shape[1])[None]
    leading = squares[None, : numerator.shape[1]]
    gap = leading - squares[:, None]
    used = (rows >= active) & (columns < active) & (leading > floor * squares[0])
    eps = jnp.finfo(squares.dtype).eps
    # Small ones may be rounding themselves, which what is computed from the whole does not see.
    noise = 64 * eps * jnp.where(leading > eps**0.5 * squares[0], squares[0], leading)
    tied = used & (gap <= noise)
    return refused(jnp.where(used, numerator / jnp.where(used & ~tied, gap, 1.0), 0.0), tied)


def halved(slopes: Float[Array, " r"], values: Float[Array, " r"]) -> Float[Array, " r"]:
    """Slopes of roots from those of their squares; zero at zero."""
    return jnp.where(values > 0, 0.5 * slopes / jnp.where(values > 0, values, 1.0), 0.0)
