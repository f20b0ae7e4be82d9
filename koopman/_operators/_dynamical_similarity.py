"""Compare two linear evolution operators up to an orthogonal change of coordinates."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Complex, Float, Int

from dissociation._core.checks import check_choice, check_count, is_traced, warn
from dissociation._core.conversion import to_device
from dissociation._core.linalg import finite_part, product, psd_power, scale_of
from dissociation._core.results import Result
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from koopman._operators._kernels import Operator
from koopman._operators._rotations import Point, descend, norm

FORMS = ("frobenius", "angular")
Matrix = Float[Array | np.ndarray, "r r"]

_SEARCH = 1e-3, 12  # gradient that separates minima, conjugate gradient steps
_POLISH = 60  # conjugate gradient steps for the best run, which converges to rounding
_SAME = 1e-4  # largest difference in E = |A - C B C^T|^2 / 2 of runs at one minimum
_AGREED = 3  # number of runs at one minimum that make it credible
_LANES = 8192  # runs in parallel on an accelerator; a CPU is faster with sequential pairs


class DynamicalAlignment(Result):
    """Best orthogonal change of coordinates between two linear dynamics, with evidence of the minimum.

    Attributes:
        distance: |A - C B C^T|, or the angle between the two in radians.
        rotation: C, orthogonal of either determinant: [r, r].
        lower_bound: Lower bound of the distance over all C. If `distance` equals it, C is optimal.
        gradient: |skew [A, C B^T C^T]| / (|A| |B|), zero if C is stationary.
        agreement: Number of the 2 `num_starts` runs that ended at this minimum.
        converged: True if the gradient is zero to rounding, and three runs agree or the bound is
            met. All of 200 pairs up to 12 x 12 were then right; at 20 x 20 one in ten was above the
            lowest known distance, by at most 0.2 % of |A| + |B|.
    """

    distance: Float[Array, "*pairs"]
    rotation: Float[Array, "*pairs r r"]
    lower_bound: Float[Array, "*pairs"]
    gradient: Float[Array, "*pairs"]
    agreement: Int[Array, "*pairs"]
    converged: Bool[Array, "*pairs"]


@validated(finite=("a", "b"))
def align_dynamics(
    a: Matrix,
    b: Matrix,
    *,
    key: PRNGKey,
    num_starts: int = 32,
    num_steps: int = 100,
    form: str = "frobenius",
) -> DynamicalAlignment:
    """Return the orthogonal C that brings C B C^T closest to A, with evidence of the minimum.

    `delay_embed`, `koopman.fit` (in the paper with `PrincipalComponents`) and `transition_matrix`
    compute A and B from trajectories. Derivatives, at fixed C, are those of the minimum if C B C^T
    is unique. At zero only the squared distance is differentiable.

    Args:
        a: A, transition matrix of one system in orthonormal coordinates, [r, r].
        b: B, transition matrix of another, [r, r]. If ranks differ, pad with zeros.
        key: Key of the starts.
        num_starts: Number of starts, 1 or more, each of which is also run with its mirror image.
        num_steps: Largest number of Newton steps from each start, 1 or more.
        form: "frobenius" for the distance in units of the matrices; "angular" for arccos <A, C B
            C^T> / (|A| |B|), from 0 to pi and invariant to scale, NaN for a matrix of zeros. Both
            have the same C.

    Returns:
        The alignment; NaN, not converged, for traced matrices that are not finite.

    References:
        Ostrow, Eisen, Kozachkov and Fiete (2023), Beyond geometry: comparing the temporal structure
        of computation in neural circuits with dynamical similarity analysis.

    >>> turn = jnp.array([[0.0, -1.0], [1.0, 0.0]])
    >>> found = align_dynamics(0.9 * turn, 0.5 * turn.T, key=jax.random.key(0))
    >>> found.distance.round(4), jnp.linalg.det(found.rotation).round(4), bool(found.converged)
    (Array(0.5657, dtype=float32), Array(-1., dtype=float32), True)
    """
    both = _joined(to_device(a)[None], to_device(b)[None])
    alignments = _align(both, np.asarray([0]), np.asarray([1]), key, num_starts, num_steps, form)
    return _first(alignments)


@jax.jit
def _first(alignments: DynamicalAlignment) -> DynamicalAlignment:
    return jax.tree.map(lambda leaf: leaf[0], alignments)


@validated
def dynamical_distance(
    a: Matrix,
    b: Matrix,
    *,
    key: PRNGKey,
    num_starts: int = 32,
    num_steps: int = 100,
    form: str = "frobenius",
) -> Float[Array, ""]:
    """Return the distance of `align_dynamics`: the minimum over orthogonal C of |A - C B C^T|, or the angle.

    For symmetric or skew A and B it is the distance of sorted eigenvalues, for normal ones at least
    `eigenvalue_distance`.

    Args:
        a: A, [r, r].
        b: B, [r, r].
        key: Key of the starts, as the following arguments for `align_dynamics`.
        num_starts: Number of starts.
        num_steps: Largest number of Newton steps.
        form: "frobenius" or "angular".

    Returns:
        A non-negative number, never below the true minimum. Its derivative in A, for "frobenius",
        is (A - C B C^T) / distance.

    Warns:
        UserWarning: If known matrices have not `converged`.

    >>> shear = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    >>> dynamical_distance(shear, shear.T, key=jax.random.key(0)).round(3) + 0.0
    Array(0., dtype=float32)
    >>> dynamical_distance(shear, jnp.eye(2), key=jax.random.key(0)).round(3)
    Array(1., dtype=float32)
    """
    alignment = align_dynamics(a, b, key=key, num_starts=num_starts, num_steps=num_steps, form=form)
    _warn_unsure(alignment.converged)
    return alignment.distance


@validated(finite=("operators", "others"))
def pairwise_dynamical_distance(
    operators: Float[Array | np.ndarray, "m r r"],
    others: Float[Array | np.ndarray, "n r r"] | None = None,
    *,
    key: PRNGKey,
    num_starts: int = 32,
    num_steps: int = 100,
    form: str = "frobenius",
) -> Float[Array, "m n"]:
    """Return `dynamical_distance` of all pairs, computed in one compiled program.

    Args:
        operators: Transition matrices, [m, r, r].
        others: Second set of matrices, [n, r, r]. Default: the first set.
        key: Key of the starts, the same for every pair; like the following arguments as for
            `align_dynamics`.
        num_starts: Number of starts.
        num_steps: Largest number of Newton steps.
        form: "frobenius" or "angular".

    Returns:
        Distances [m, n]; within one set symmetric with zero diagonal.

    Warns:
        UserWarning: If known pairs have not `converged`.

    >>> pairwise_dynamical_distance(jnp.array([[[0.5]], [[0.25]]]), key=jax.random.key(0))
    Array([[0.  , 0.25],
           [0.25, 0.  ]], dtype=float32)
    """
    first = to_device(operators)
    if others is not None:
        size = first.shape[0], others.shape[0]
        rows, columns = np.indices(size).reshape(2, -1)
        both = _joined(first, to_device(others))
        alignments = _align(both, rows, size[0] + columns, key, num_starts, num_steps, form)
        _warn_unsure(alignments.converged)
        return alignments.distance.reshape(size)
    rows, columns = np.triu_indices(first.shape[0], 1)
    if not rows.size:
        return _table(first, jnp.zeros(0, first.dtype))
    alignments = _align(first, rows, columns, key, num_starts, num_steps, form)
    _warn_unsure(alignments.converged)
    return _table(first, alignments.distance)


@jax.jit
def _table(matrices: Array, distances: Array) -> Array:
    """Return all distances [m, m] from those above the diagonal, which is zero, or NaN for a matrix with NaN."""
    diagonal = jnp.diag(finite_part(matrices)[1])
    upper = jnp.zeros_like(diagonal).at[np.triu_indices(len(diagonal), 1)].set(distances)
    return upper + upper.T + diagonal


@jax.jit
def _joined(first: Array, second: Array) -> Array:
    dtype = jnp.result_type(first, second)
    return jnp.concatenate([first.astype(dtype), second.astype(dtype)])


def _warn_unsure(converged: Array) -> None:
    if is_traced(converged) or (sure := np.asarray(converged)).all():
        return
    what = "The distance" if sure.size == 1 else f"{(~sure).sum()} of {sure.size} distances"
    warn(
        f"{what} may not be the least: no three runs agree on it, or its gradient is not zero. "
        "Raise `num_starts` or "
        "`num_steps`, and see `align_dynamics`.",
        UserWarning,
    )


def _align(
    matrices: Array,
    rows: np.ndarray,
    columns: np.ndarray,
    key: PRNGKey,
    num_starts: int,
    num_steps: int,
    form: str,
) -> DynamicalAlignment:
    """Return the alignments of pairs of matrices, given by their indices."""
    check_choice("form", form, FORMS)
    check_count("num_starts", num_starts, minimum=1)
    check_count("num_steps", num_steps, minimum=1)
    at_once = 1 if jax.default_backend() == "cpu" else max(1, _LANES // (2 * num_starts))
    return _solve(matrices, rows, columns, key, num_starts, num_steps, form, at_once)


@partial(jax.jit, static_argnames=("num_starts", "form", "at_once"))
def _solve(
    matrices: Array,
    rows: Array,
    columns: Array,
    key: Array,
    num_starts: int,
    num_steps: int | Array,
    form: str,
    at_once: int,
) -> DynamicalAlignment:
    matrices, undefined = finite_part(matrices)
    rounding = float(jnp.finfo(matrices.dtype).eps) ** (
        2 / 3
    )  # a gradient of zero: the error of E is its square
    prepared, turns = _prepare(
        lax.stop_gradient(matrices), key, num_starts
    )  # C has no part in the derivative
    eye = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), turns.shape)

    def one(pair: tuple[Array, Array]) -> tuple[Point, Array, Array]:
        first, second = (_Prepared(*(leaf[index] for leaf in prepared)) for index in pair)
        bases = jnp.concatenate([first.bases, turns]), jnp.concatenate([second.bases, eye])
        starts = jax.vmap(partial(_matched, first.unit, second.unit))(*bases)
        starts = starts.reshape(-1, *starts.shape[2:])
        down = partial(descend, first.unit, second.unit, num_steps=num_steps)
        ends = jax.vmap(partial(down, tolerance=_SEARCH[0], inner=_SEARCH[1]))(starts)
        best = jnp.argmin(ends.energy)
        point = down(ends.rotation[best], tolerance=rounding, inner=_POLISH)
        return point, jnp.sum(ends.energy <= ends.energy[best] + _SAME), _chord_bound(first, second)

    point, agreement, bound = lax.map(one, (rows, columns), batch_size=at_once)
    gradient = norm(point.slope)
    bound = jnp.minimum(bound, jnp.sqrt(2 * point.energy))
    met = jnp.sqrt(2 * point.energy) <= bound + jnp.finfo(matrices.dtype).eps ** 0.5
    unknown = undefined[rows] + undefined[columns]
    distance, least = jax.vmap(partial(_distance, form=form))(
        matrices[rows], matrices[columns], point.rotation, bound
    )
    return DynamicalAlignment(
        distance=distance + unknown,
        rotation=point.rotation,
        lower_bound=jnp.minimum(least, distance) + unknown,
        gradient=gradient + unknown,
        agreement=agreement,
        converged=(gradient + unknown <= rounding) & ((agreement >= _AGREED) | met),
    )


def _distance(a: Array, b: Array, rotation: Array, bound: Array, form: str) -> tuple[Array, Array]:
    """Return the distance at C, and the lower bound `bound` of matrices of norm 1 converted to the same form."""
    unit = scale_of(jnp.maximum(jnp.max(jnp.abs(a)), jnp.max(jnp.abs(b))))
    a, b = a / unit, b / unit
    size_a, size_b = norm(a), norm(b)
    if (
        form == "angular"
    ):  # by sine and cosine of half the angle, because an arccos would lose small angles
        moved = product(rotation, product(b / size_b, rotation.T))
        angle = 2 * jnp.arctan2(norm(a / size_a - moved), norm(a / size_a + moved))
        return angle, 2 * jnp.arcsin(jnp.minimum(0.5 * bound, 1.0))
    least = jnp.sqrt((size_a - size_b) ** 2 + size_a * size_b * bound**2)
    return unit * norm(a - product(rotation, product(b, rotation.T))), unit * lax.stop_gradient(
        least
    )


class _Prepared(NamedTuple):
    """Factors of a matrix that all of its pairs share."""

    unit: Array  # of norm 1: [r, r]
    bases: Array  # eigenvectors of k symmetric functions of the matrix: [k, r, r]
    eigenvalues: Array  # of the symmetric part, rising: [r]
    singular: Array  # singular values of the skew part, and of the whole: [2, r]


def _prepare(matrices: Array, key: Array, num_starts: int) -> tuple[_Prepared, Array]:
    """Return the factors of all matrices [m, r, r], and random orthogonal matrices."""
    # E(C) has local minima. Half of the starts match, by rank, eigenvectors of a symmetric function
    # of A, a random combination of its symmetric part, A A^T, A^T A and A^2 + A^{2T}, to those of
    # B. If B = Q A Q^T, they are Q.
    draw_functions, draw_turns = jax.random.split(key)
    count, size = matrices.shape[0], matrices.shape[-1]
    matched = (num_starts + 1) // 2
    scaled = matrices / jax.vmap(scale_of)(jnp.max(jnp.abs(matrices), (1, 2)))[:, None, None]
    norms = norm(scaled)[:, None, None]
    unit = scaled / jnp.where(norms > 0, norms, 1.0)
    turned = unit.mT
    features = [unit, product(unit, turned), product(turned, unit), product(unit, unit)]
    weights = jax.random.normal(draw_functions, (matched, len(features)), unit.dtype)
    weights = weights.at[0].set(jnp.asarray([1.0, 0.0, 0.0, 0.0], unit.dtype))
    functions = jnp.einsum("kf,fmij->mkij", weights, jnp.stack(features), precision="highest")
    # Eigenvectors of a random symmetric matrix are a random orthogonal matrix, from the same
    # batched call.
    noise = jax.random.normal(draw_turns, (num_starts - matched, size, size), unit.dtype)
    every = jnp.concatenate([functions.reshape(-1, size, size), noise])
    values, vectors = jnp.linalg.eigh(0.5 * (every + every.mT), symmetrize_input=False)
    held = count * matched
    # A barrier orders the two, because batched LAPACK calls in parallel can hang on the CPU.
    unit, values = lax.optimization_barrier((unit, values))
    singular = jnp.linalg.svd(jnp.stack([0.5 * (unit - unit.mT), unit], 1), compute_uv=False)
    bases = vectors[:held].reshape(count, matched, size, size)
    return _Prepared(unit, bases, values[:held:matched], singular), vectors[held:]


def _chord_bound(a: _Prepared, b: _Prepared) -> Array:
    """Return a lower bound of |A - C B C^T| for unit matrices, by Hoffman and Wielandt (1953)."""
    # One bound is of the whole matrices, and another the sum of those of symmetric and skew parts.
    parts = jnp.sum((a.singular - b.singular) ** 2, 1)
    return jnp.sqrt(jnp.maximum(parts[1], parts[0] + jnp.sum((a.eigenvalues - b.eigenvalues) ** 2)))


def _matched(a: Array, b: Array, basis_a: Array, basis_b: Array) -> Array:
    """Return C = V_a D V_b^T with greedily chosen signs D, and with one sign reversed: [2, r, r]."""
    table = product(basis_a.T, product(a, basis_a)) * product(basis_b.T, product(b, basis_b))
    table = (table + table.T) * (1 - jnp.eye(table.shape[0], dtype=table.dtype))

    # <A, C B C^T> = sum_ij d_i d_j W_ij. The next sign is that on which the earlier ones have the
    # largest effect.
    def settle(_: Array, signs: Array) -> Array:
        pull = product(table, signs[:, None])[:, 0]
        chosen = jnp.argmax(jnp.where(signs == 0, jnp.abs(pull), -1.0))
        return signs.at[chosen].set(jnp.where(pull[chosen] < 0, -1.0, 1.0))

    signs = lax.fori_loop(0, table.shape[0], settle, jnp.zeros_like(table[0]))
    least = jnp.argmin(signs * product(table, signs[:, None])[:, 0])
    return product(
        basis_a[None] * jnp.stack([signs, signs.at[least].multiply(-1.0)])[:, None], basis_b.T[None]
    )


@validated(finite=("eigenvalues_a", "eigenvalues_b"))
@jax.jit
def eigenvalue_distance(
    eigenvalues_a: Complex[Array | np.ndarray, " r"],
    eigenvalues_b: Complex[Array | np.ndarray, " r"],
) -> Float[Array, ""]:
    """Return sqrt(min over permutations p of sum_i |l_i - m_p(i)|^2), the optimal matching of two spectra.

    For normal A and B it is min |A - C B C^*| over unitary C, hence at most `dynamical_distance`,
    and equal if a best matching maps conjugate pairs to conjugate pairs or to two real eigenvalues.
    For other matrices neither bounds the other. Divided by sqrt(r) it is the 2-Wasserstein distance
    of the spectra as distributions.

    Args:
        eigenvalues_a: Complex eigenvalues, [r], for example `koopman.eigenvalues` of an operator.
        eigenvalues_b: Complex eigenvalues, [r]. If ranks differ, pad with zeros.

    Returns:
        A non-negative number. Its derivative is at a fixed matching, and zero at zero.

    References:
        Hoffman and Wielandt (1953), The variation of the spectrum of a normal matrix; Redman et al.
        (2024), Identifying equivalent training dynamics.

    >>> eigenvalue_distance([1.0, 0.5j, -0.5j], [0.5j, -0.5j, 0.0])
    Array(1., dtype=float32)
    """
    # No real C separates a conjugate pair, but a matching may: with a small y, {1 + iy, 1 - iy, 0}
    # and {iy, -iy, 1}.
    gaps = lax.stop_gradient(eigenvalues_a[:, None] - eigenvalues_b[None])
    rows, columns = optax.assignment.hungarian_algorithm(jnp.real(gaps) ** 2 + jnp.imag(gaps) ** 2)
    apart = eigenvalues_a[rows] - eigenvalues_b[columns]
    return norm(jnp.stack([apart.real, apart.imag]))


@validated
@partial(jax.jit, static_argnames="metric")
def transition_matrix(operator: Operator, *, metric: str = "data") -> Float[Array, "r r"]:
    """Return A with E[v_{t+1} | v_t] = A v_t for orthonormal coordinates v of an operator's latent functions.

    With latent functions u, E[u_{t+1} | u_t] = u_t K (a row), and their Gram matrix N, v = N^(-1/2)
    u has A = (N^(1/2) K N^(-1/2))^T, unique up to an orthogonal change of v, with the eigenvalues
    of `koopman.eigenvalues`.

    Args:
        operator: A fitted operator.
        metric: "data": N = E[u u^T] on the training states, so that v is white (A_v of the paper,
            with `PrincipalComponents`). A is then symmetric for a reversible process, orthogonal
            for a deterministic measure-preserving one, and at full rank invariant to linear changes
            of the features. "features": N is the inner product of the features' space; for
            `PrincipalComponents` on explicit features A is the matrix of projected dynamic mode
            decomposition, in units of the features.

    Returns:
        A, [r, r], zero in rows and columns of latent functions that are beyond a traced rank or
        vanish on the data.

    References:
        Ostrow et al. (2023), see `align_dynamics`; Schmid (2010), Dynamic mode decomposition of
        numerical and experimental data.
    """
    check_choice("metric", metric, ("data", "features"))
    gram = operator.gram_x if metric == "data" else operator.basis_gram
    return product(psd_power(gram, 0.5), product(operator.core, psd_power(gram, -0.5))).T
