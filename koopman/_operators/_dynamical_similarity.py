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
from koopman._operators._numerics import positive_or_one, rounding_unit
from koopman._operators._operator import Operator
from koopman._operators._rotations import Point, descend, norm

FORMS = ("frobenius", "angular")
Matrix = Float[Array | np.ndarray, "r r"]

_SEARCH_GRADIENT = 1e-3  # gradient that separates minima
_SEARCH_STEPS = 12  # conjugate gradient steps
_POLISH_STEPS = 60  # conjugate gradient steps for the best run, which converges to rounding
_ENERGY_GAP = 1e-4  # largest difference in E = |A - C B C^T|^2 / 2 of runs at one minimum
_NUM_AGREEING = 3  # number of runs at one minimum that make it credible
_NUM_RUNS = 8192  # runs in parallel on an accelerator; a CPU is faster with sequential pairs


class DynamicalAlignment(Result):
    """Best orthogonal change of coordinates between two linear dynamics, with evidence.

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
    matrices = _joined(to_device(a)[None], to_device(b)[None])
    rows = np.asarray([0])
    columns = np.asarray([1])
    alignments = _align(matrices, rows, columns, key, num_starts, num_steps, form)
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
    """Return the distance of `align_dynamics`: the minimum of |A - C B C^T|, or the angle.

    The minimum is over orthogonal C. For symmetric or skew A and B it is the distance of sorted
    eigenvalues, for normal ones at least `eigenvalue_distance`.

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
    matrices = to_device(operators)
    num_operators = matrices.shape[0]
    if others is None:
        rows, columns = np.triu_indices(num_operators, 1)
        if not rows.size:
            return _table(matrices, jnp.zeros(0, matrices.dtype))
    else:
        rows, columns = np.indices((num_operators, others.shape[0])).reshape(2, -1)
        columns = num_operators + columns
        matrices = _joined(matrices, to_device(others))

    alignments = _align(matrices, rows, columns, key, num_starts, num_steps, form)
    _warn_unsure(alignments.converged)
    if others is None:
        return _table(matrices, alignments.distance)
    return alignments.distance.reshape(num_operators, -1)


@jax.jit
def _table(matrices: Array, distances: Array) -> Array:
    """Return all distances [m, m] from the distances above the diagonal.

    The diagonal is zero, or NaN for a matrix with NaN.
    """
    _, undefined = finite_part(matrices)
    diagonal = jnp.diag(undefined)
    indices = np.triu_indices(len(diagonal), 1)
    upper = jnp.zeros_like(diagonal).at[indices].set(distances)
    return upper + upper.T + diagonal


@jax.jit
def _joined(first: Array, second: Array) -> Array:
    dtype = jnp.result_type(first, second)
    return jnp.concatenate([first.astype(dtype), second.astype(dtype)])


def _warn_unsure(converged: Array) -> None:
    if is_traced(converged):
        return
    is_sure = np.asarray(converged)
    if is_sure.all():
        return
    subject = "The distance"
    if is_sure.size > 1:
        subject = f"{(~is_sure).sum()} of {is_sure.size} distances"
    message = (
        f"{subject} may not be the least: no three runs agree on it, or its gradient is not zero. "
        "Raise `num_starts` or `num_steps`, and see `align_dynamics`."
    )
    warn(message, UserWarning)


def _align(
    matrices: Array,
    rows: np.ndarray,
    columns: np.ndarray,
    key: PRNGKey,
    num_starts: int,
    num_steps: int,
    form: str,
) -> DynamicalAlignment:
    """Return the alignments of the matrices with indices `rows` to those with `columns`."""
    check_choice("form", form, FORMS)
    check_count("num_starts", num_starts, minimum=1)
    check_count("num_steps", num_steps, minimum=1)
    at_once = 1
    if jax.default_backend() != "cpu":
        at_once = max(1, _NUM_RUNS // (2 * num_starts))
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
    # A gradient of zero up to rounding: the error of E is its square.
    tolerance = rounding_unit(matrices) ** (2 / 3)
    # C has no part in the derivative.
    prepared, rotations = _prepare(lax.stop_gradient(matrices), key, num_starts)
    eye = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    identities = jnp.broadcast_to(eye, rotations.shape)

    def align(pair: tuple[Array, Array]) -> tuple[Point, Array, Array]:
        row, column = pair
        a = jax.tree.map(lambda leaf: leaf[row], prepared)
        b = jax.tree.map(lambda leaf: leaf[column], prepared)
        bases_a = jnp.concatenate([a.bases, rotations])
        bases_b = jnp.concatenate([b.bases, identities])
        starts = jax.vmap(partial(_matched, a.unit, b.unit))(bases_a, bases_b)
        starts = starts.reshape(-1, *starts.shape[2:])

        down = partial(descend, a.unit, b.unit, num_steps=num_steps)
        search = partial(down, tolerance=_SEARCH_GRADIENT, num_inner_steps=_SEARCH_STEPS)
        ends = jax.vmap(search)(starts)
        best = jnp.argmin(ends.energy)
        point = down(ends.rotation[best], tolerance=tolerance, num_inner_steps=_POLISH_STEPS)
        agreement = jnp.sum(ends.energy <= ends.energy[best] + _ENERGY_GAP)
        return point, agreement, _chord_bound(a, b)

    point, agreement, bound = lax.map(align, (rows, columns), batch_size=at_once)
    unit_distance = jnp.sqrt(2 * point.energy)
    bound = jnp.minimum(bound, unit_distance)
    is_bound_met = unit_distance <= bound + jnp.finfo(matrices.dtype).eps ** 0.5
    is_credible = (agreement >= _NUM_AGREEING) | is_bound_met

    undefined = undefined[rows] + undefined[columns]
    gradient = norm(point.slope) + undefined
    measure = jax.vmap(partial(_distance, form=form))
    distance, bound = measure(matrices[rows], matrices[columns], point.rotation, bound)
    return DynamicalAlignment(
        distance=distance + undefined,
        rotation=point.rotation,
        lower_bound=jnp.minimum(bound, distance) + undefined,
        gradient=gradient,
        agreement=agreement,
        converged=(gradient <= tolerance) & is_credible,
    )


def _distance(a: Array, b: Array, rotation: Array, bound: Array, form: str) -> tuple[Array, Array]:
    """Return the distance at C, and its lower bound from the `bound` of matrices of norm 1."""
    largest_a = jnp.max(jnp.abs(a))
    largest_b = jnp.max(jnp.abs(b))
    unit = scale_of(jnp.maximum(largest_a, largest_b))
    a = a / unit
    b = b / unit
    size_a = norm(a)
    size_b = norm(b)
    if form == "angular":
        # By sine and cosine of half the angle, because an arccos would lose small angles.
        moved = product(rotation, product(b / size_b, rotation.T))
        sine = norm(a / size_a - moved)
        cosine = norm(a / size_a + moved)
        angle = 2 * jnp.arctan2(sine, cosine)
        bound = 2 * jnp.arcsin(jnp.minimum(0.5 * bound, 1.0))
        return angle, bound

    moved = product(rotation, product(b, rotation.T))
    bound = jnp.sqrt((size_a - size_b) ** 2 + size_a * size_b * bound**2)
    return unit * norm(a - moved), unit * lax.stop_gradient(bound)


class _Prepared(NamedTuple):
    """Factors of a matrix that all of its pairs share."""

    unit: Array  # the matrix divided by its norm: [r, r]
    bases: Array  # eigenvectors of k symmetric functions of the matrix: [k, r, r]
    eigenvalues: Array  # eigenvalues of the symmetric part, rising: [r]
    singular: Array  # singular values of the skew part, and of the unit matrix: [2, r]


def _prepare(matrices: Array, key: Array, num_starts: int) -> tuple[_Prepared, Array]:
    """Return the factors of all matrices [m, r, r], and random orthogonal matrices."""
    # E(C) has local minima. Half of the starts match, by rank, eigenvectors of a symmetric function
    # of A, a random combination of its symmetric part, A A^T, A^T A and A^2 + A^{2T}, to those of
    # B. If B = Q A Q^T, they are Q.
    function_key, rotation_key = jax.random.split(key)
    num_matrices, size, _ = matrices.shape
    num_matched = (num_starts + 1) // 2
    num_random = num_starts - num_matched

    largest = jnp.max(jnp.abs(matrices), (1, 2))
    scaled = matrices / jax.vmap(scale_of)(largest)[:, None, None]
    norms = norm(scaled)[:, None, None]
    unit = scaled / positive_or_one(norms)

    features = [unit, product(unit, unit.mT), product(unit.mT, unit), product(unit, unit)]
    weights = jax.random.normal(function_key, (num_matched, len(features)), unit.dtype)
    symmetric_part = jnp.asarray([1.0, 0.0, 0.0, 0.0], unit.dtype)
    weights = weights.at[0].set(symmetric_part)
    functions = jnp.einsum("kf,fmij->mkij", weights, jnp.stack(features), precision="highest")
    functions = functions.reshape(-1, size, size)

    # Eigenvectors of a random symmetric matrix are a random orthogonal matrix, from the same
    # batched call.
    noise = jax.random.normal(rotation_key, (num_random, size, size), unit.dtype)
    stack = jnp.concatenate([functions, noise])
    stack = 0.5 * (stack + stack.mT)
    eigenvalues, vectors = jnp.linalg.eigh(stack, symmetrize_input=False)
    # A barrier orders the two, because batched LAPACK calls in parallel can hang on the CPU.
    unit, eigenvalues = lax.optimization_barrier((unit, eigenvalues))
    skew = 0.5 * (unit - unit.mT)
    pairs = jnp.stack([skew, unit], 1)
    singular = jnp.linalg.svd(pairs, compute_uv=False)

    num_functions = num_matrices * num_matched
    bases = vectors[:num_functions].reshape(num_matrices, num_matched, size, size)
    symmetric_eigenvalues = eigenvalues[:num_functions:num_matched]
    prepared = _Prepared(unit, bases, symmetric_eigenvalues, singular)
    return prepared, vectors[num_functions:]


def _chord_bound(a: _Prepared, b: _Prepared) -> Array:
    """Return a lower bound of |A - C B C^T| for unit matrices, by Hoffman and Wielandt (1953)."""
    # One bound is of the matrices, and another is the sum of those of symmetric and skew parts.
    squares = jnp.sum((a.singular - b.singular) ** 2, 1)
    symmetric_square = jnp.sum((a.eigenvalues - b.eigenvalues) ** 2)
    return jnp.sqrt(jnp.maximum(squares[1], squares[0] + symmetric_square))


def _matched(a: Array, b: Array, basis_a: Array, basis_b: Array) -> Array:
    """Return C = V_a D V_b^T with greedily chosen signs D, and with one sign reversed.

    The shape of the stack is [2, r, r].
    """
    turned_a = product(basis_a.T, product(a, basis_a))
    turned_b = product(basis_b.T, product(b, basis_b))
    table = turned_a * turned_b
    off_diagonal = 1 - jnp.eye(table.shape[0], dtype=table.dtype)
    table = (table + table.T) * off_diagonal

    # <A, C B C^T> = sum_ij d_i d_j W_ij. The next sign is that on which the earlier ones have the
    # largest effect.
    def settle(_: Array, signs: Array) -> Array:
        effects = product(table, signs[:, None])[:, 0]
        sizes = jnp.where(signs == 0, jnp.abs(effects), -1.0)
        strongest = jnp.argmax(sizes)
        sign = jnp.where(effects[strongest] < 0, -1.0, 1.0)
        return signs.at[strongest].set(sign)

    no_signs = jnp.zeros_like(table[0])
    signs = lax.fori_loop(0, table.shape[0], settle, no_signs)
    effects = product(table, signs[:, None])[:, 0]
    weakest = jnp.argmin(signs * effects)
    reversed_signs = signs.at[weakest].multiply(-1.0)
    signs = jnp.stack([signs, reversed_signs])
    return product(basis_a[None] * signs[:, None], basis_b.T[None])


@validated(finite=("eigenvalues_a", "eigenvalues_b"))
@jax.jit
def eigenvalue_distance(
    eigenvalues_a: Complex[Array | np.ndarray, " r"],
    eigenvalues_b: Complex[Array | np.ndarray, " r"],
) -> Float[Array, ""]:
    """Return the distance of two spectra under their optimal matching.

        sqrt(min over permutations p of sum_i |l_i - m_p(i)|^2)

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
    costs = jnp.real(gaps) ** 2 + jnp.imag(gaps) ** 2
    rows, columns = optax.assignment.hungarian_algorithm(costs)
    differences = eigenvalues_a[rows] - eigenvalues_b[columns]
    return norm(jnp.stack([differences.real, differences.imag]))


@validated
@partial(jax.jit, static_argnames="metric")
def transition_matrix(operator: Operator, *, metric: str = "data") -> Float[Array, "r r"]:
    """Return A with E[v_{t+1} | v_t] = A v_t for orthonormal coordinates v of latent functions.

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
    root = psd_power(gram, 0.5)
    inverse_root = psd_power(gram, -0.5)
    return product(root, product(operator.core, inverse_root)).T
