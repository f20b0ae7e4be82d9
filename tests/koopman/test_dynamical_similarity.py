import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from trajectories import follow

from koopman import (
    PrincipalComponents,
    ReducedRank,
    Ridge,
    align_dynamics,
    delay_embed,
    dynamical_distance,
    eigenvalue_distance,
    eigenvalues,
    fit,
    lagged_pairs,
    transition_matrix,
)
from koopman._operators import _dynamical_similarity as dynamical_similarity

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True, scope="module")
def _programs():
    """Compile the alignments that most tests share: of 2 x 2 matrices in float32, and of 4 x 4 in float64."""
    key = jax.random.key(20)
    plane = np.eye(2, dtype=np.float32)
    align_dynamics(plane, plane, key=key)
    with jax.enable_x64(True):
        for form in ("frobenius", "angular"):
            align_dynamics(np.eye(4), np.eye(4), key=key, form=form)


def orthogonal(r, rng=RANDOM):
    return np.linalg.qr(rng.normal(size=(r, r)))[0]


def norm(matrix):
    return np.linalg.norm(matrix, axis=(-2, -1))


def blocks(*eigenvalues):
    """A real normal matrix of these eigenvalues: complex ones bring their conjugates."""
    parts = [
        [[z.real, z.imag], [-z.imag, z.real]] if isinstance(z, complex) else [[z]]
        for z in eigenvalues
    ]
    return scipy.linalg.block_diag(*parts)


def closed_form_in_the_plane(a, b):
    """A = s I + k J + a symmetric traceless part of size p: C turns the last by any angle, and a mirror flips k."""
    square = 0.0
    for part in (
        lambda m: m[0, 0] + m[1, 1],
        lambda m: abs(m[0, 1] - m[1, 0]),
        lambda m: np.hypot(m[0, 0] - m[1, 1], m[0, 1] + m[1, 0]),
    ):
        square += (part(a) - part(b)) ** 2 / 2
    return square**0.5


@pytest.mark.parametrize("scales", [(1.0, 1.0), (1e-30, 1e-30), (1e30, 1e30), (1e-30, 1e30)])
def test_in_the_plane_there_is_a_closed_form(key, scales):
    for pair in RANDOM.normal(size=(10, 2, 2, 2)):
        a, b = (np.asarray(scales)[:, None, None] * pair).astype(np.float32)
        found = align_dynamics(a, b, key=key)
        wanted = max(scales) * closed_form_in_the_plane(
            *(m.astype(float) / max(scales) for m in (a, b))
        )
        np.testing.assert_allclose(
            [found.distance, found.lower_bound], wanted, atol=1e-5 * max(scales)
        )
        assert found.distance.dtype == np.float32


@pytest.mark.slow  # a program of its own
def test_with_one_coordinate(key, x64):
    np.testing.assert_allclose(dynamical_distance([[2.0]], [[-1.0]], key=key), 3.0)


def test_with_zeros(key, x64):
    zeros = np.zeros((4, 4))
    a = np.diag([3.0, 4.0, 0.0, 0.0])
    for first, second, wanted in ((zeros, a, 5.0), (a, zeros, 5.0), (zeros, zeros, 0.0)):
        found = align_dynamics(first, second, key=key)
        np.testing.assert_allclose([found.distance, found.lower_bound], wanted, rtol=1e-12)
        assert found.converged
        assert found.agreement == 64
        assert np.isnan(align_dynamics(first, second, key=key, form="angular").distance)


def planted(family, r, rng):
    """A matrix that is not normal, as they come out of fits, or as optimisers stumble over."""
    a = rng.normal(size=(r, r))
    if family == "defective":
        return 0.9 * np.eye(r) + np.eye(r, k=1)
    if family == "slow":
        q = orthogonal(r, rng)
        return q @ (0.95 * np.eye(r) + 0.1 * np.triu(a)) @ q.T
    if family == "repeated":
        return orthogonal(r, rng) @ np.diag(np.repeat([1.0, 0.5], [r // 2, r - r // 2]))
    if family == "low rank":
        return a[:, : -(-r // 3)] @ rng.normal(size=(-(-r // 3), r))
    return a


FAMILIES = ("gaussian", "defective", "slow", "repeated", "low rank")


SIZES = [
    (2, np.float32),
    (4, np.float64),
    pytest.param(7, np.float32, marks=pytest.mark.slow),
    pytest.param(20, np.float64, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("r", "dtype"), SIZES)
def test_other_coordinates_are_found(key, r, dtype, precision):
    rng = np.random.default_rng(r)
    firsts = np.stack([planted(family, r, rng) for family in FAMILIES])
    turns = np.stack([orthogonal(r, rng) for _ in firsts])
    seconds = turns @ firsts @ turns.swapaxes(1, 2)
    for which, (a, b) in enumerate(zip(firsts.astype(dtype), seconds.astype(dtype), strict=True)):
        found = align_dynamics(a, b, key=key)
        assert found.distance <= (5e-6 if dtype is np.float32 else 1e-13) * norm(a), which
        assert found.converged, which
        moved = np.asarray(found.rotation) @ b @ np.asarray(found.rotation).T
        np.testing.assert_allclose(
            moved, a, atol=(5e-6 if dtype is np.float32 else 1e-13) * norm(a)
        )


def test_the_bound_is_that_of_sorted_parts(key, x64):
    """By hand, of matrices of unequal norms, where it is below the distance."""
    for scale in (0.3, 3.0):
        a, b = RANDOM.normal(size=(2, 4, 4))
        b = scale * b
        found = align_dynamics(a, b, key=key)
        units = a / norm(a), b / norm(b)
        gaps = [
            np.subtract(*(function(m) for m in units))
            for function in (
                lambda m: np.linalg.eigvalsh(m + m.T) / 2,
                lambda m: np.linalg.svd(m - m.T)[1] / 2,
                lambda m: np.linalg.svd(m)[1],
            )
        ]
        chord = max(np.sum(gaps[0] ** 2) + np.sum(gaps[1] ** 2), np.sum(gaps[2] ** 2))
        wanted = ((norm(a) - norm(b)) ** 2 + norm(a) * norm(b) * chord) ** 0.5
        np.testing.assert_allclose(found.lower_bound, wanted, rtol=1e-10)
        assert found.lower_bound < 0.99 * found.distance


def test_the_matching_is_the_best_of_all_permutations(x64):
    first, second = RANDOM.normal(size=(2, 5)) + 1j * RANDOM.normal(size=(2, 5))
    costs = [
        np.linalg.norm(first - second[list(order)]) for order in itertools.permutations(range(5))
    ]
    mapped = jax.vmap(eigenvalue_distance)(np.stack([first, second]), np.stack([second, second]))
    np.testing.assert_allclose(mapped, [min(costs), 0], rtol=1e-12)


# Pairs are matched with pairs, in another order than that of real parts; and a pair with two real
# eigenvalues.
PAIRS = blocks(0.9 + 0.1j, 0.8 + 0.5j), blocks(0.85 + 0.55j, 0.95 + 0.05j)
MIXED = blocks(0.8 + 0.5j, 0.3, -0.2), blocks(0.05 + 0.1j, 0.85 + 0.55j)


@pytest.mark.parametrize("matrices", [PAIRS, MIXED])
def test_normal_matrices_are_as_far_as_their_eigenvalues(key, matrices, x64):
    a, b = ((q := orthogonal(4)) @ m @ q.T for m in matrices)
    values = [np.linalg.eigvals(m) for m in matrices]
    found = align_dynamics(a, b, key=key)
    np.testing.assert_allclose(found.distance, eigenvalue_distance(*values), rtol=1e-12)
    assert found.converged
    # Negative control: not normal, of the same eigenvalues.
    stretch = np.diag(np.linspace(1, 2, 4))
    sheared = stretch @ a @ np.linalg.inv(stretch)
    assert norm(sheared @ sheared.T - sheared.T @ sheared) > 0.1
    assert dynamical_distance(sheared, b, key=key) > found.distance + 0.01


def test_a_pair_that_would_be_torn_apart_keeps_normal_matrices_farther_than_their_eigenvalues(
    key, x64
):
    """Over unitary C it is the eigenvalues' distance; over real ones here sqrt(1 + 4 y^2 - 2 y^4), by hand.

    An equal fourth eigenvalue, far from the others, changes neither.
    """
    y = 0.1
    a = blocks(1 + 1j * y, 0.0, 9.0)
    b = blocks(1j * y, 1.0, 9.0)
    np.testing.assert_allclose(
        dynamical_distance(a, b, key=key) ** 2, 1 + 4 * y**2 - 2 * y**4, rtol=1e-12
    )
    apart = eigenvalue_distance(np.linalg.eigvals(a), np.linalg.eigvals(b))
    np.testing.assert_allclose(apart**2, 1 + 2 * y**2, rtol=1e-12)


def test_the_angle_is_that_of_the_same_rotation(key, x64):
    a, b = RANDOM.normal(size=(2, 4, 4))
    distance = dynamical_distance(a, b, key=key)
    angle = align_dynamics(a, b, key=key, form="angular")
    cosine = (norm(a) ** 2 + norm(b) ** 2 - distance**2) / (2 * norm(a) * norm(b))
    np.testing.assert_allclose(angle.distance, np.arccos(cosine), rtol=1e-9)
    moved = np.asarray(angle.rotation) @ b @ np.asarray(angle.rotation).T
    np.testing.assert_allclose(np.sum(a * moved) / (norm(a) * norm(b)), cosine, rtol=1e-9)
    np.testing.assert_allclose(
        dynamical_distance(3 * a, 0.2 * b, key=key, form="angular"), angle.distance
    )
    assert angle.lower_bound <= angle.distance
    np.testing.assert_allclose(
        dynamical_distance(np.eye(4), -np.eye(4), key=key, form="angular"), np.pi
    )


def test_angles_are_a_metric(key, x64):
    matrices = RANDOM.normal(size=(3, 4, 4))
    angles = [
        [dynamical_distance(b, c, key=key, form="angular") for b in matrices] for c in matrices
    ]
    np.testing.assert_allclose(np.diagonal(angles), 0, atol=1e-9)
    for i, j, k in itertools.permutations(range(3)):
        assert 0 < angles[i][j] <= angles[i][k] + angles[k][j]


def test_small_angles_keep_their_digits():
    """An arccos in float32 knows none below 3e-4."""
    a = blocks(1.0, 0.5, 0.2).astype(np.float32)
    b = a + np.diag([0, 0, 1e-5]).astype(np.float32)
    wanted = np.arccos(
        np.sum(a.astype(float) * b) / (norm(a.astype(float)) * norm(b.astype(float)))
    )
    eye = np.eye(3, dtype=np.float32)
    angle = jax.jit(partial(dynamical_similarity._distance, form="angular"))
    found, _ = angle(a, b, eye, np.float32(0.0))
    np.testing.assert_allclose(found, wanted, rtol=0.02)


@pytest.mark.slow  # a program of its own
@pytest.mark.parametrize("form", ["frobenius", "angular"])
def test_the_derivative_is_that_of_the_minimum(key, form, x64):
    """Central differences search anew at every point."""
    a, b = RANDOM.normal(size=(2, 4, 4))
    directions = RANDOM.normal(size=(2, 4, 4))
    step = 1e-5
    gradient = jax.grad(lambda a, b: dynamical_distance(a, b, key=key, form=form) ** 2, (0, 1))

    def square(a, b):
        return float(dynamical_distance(a, b, key=key, form=form)) ** 2

    slopes = [np.asarray(slope) for slope in gradient(a, b)]
    for which in (0, 1):
        moves = step * directions * (np.arange(2) == which)[:, None, None]
        wanted = (square(a + moves[0], b + moves[1]) - square(a - moves[0], b - moves[1])) / (
            2 * step
        )
        np.testing.assert_allclose(np.sum(slopes[which] * directions[which]), wanted, rtol=1e-6)
    if form == "frobenius":
        turn = np.asarray(align_dynamics(a, b, key=key).rotation)
        np.testing.assert_allclose(slopes[0], 2 * (a - turn @ b @ turn.T), atol=1e-9)
        np.testing.assert_allclose(slopes[1], 2 * (b - turn.T @ a @ turn), atol=1e-9)
    np.testing.assert_allclose(gradient(a, a), 0, atol=1e-12)


@pytest.mark.parametrize("form", ["frobenius", "angular"])
def test_the_derivative_at_zero_is_zero(form, x64):
    eye = jnp.eye(4)
    slope = jax.jit(
        jax.grad(lambda m: dynamical_similarity._distance(m, eye, eye, jnp.zeros(()), form)[0])
    )(eye)
    np.testing.assert_array_equal(slope, 0)


def test_the_derivative_of_the_matching_is_that_of_its_differences(x64):
    first, second = RANDOM.normal(size=(2, 4)) + 1j * RANDOM.normal(size=(2, 4))
    direction, step = RANDOM.normal(size=4) + 1j * RANDOM.normal(size=4), 1e-6
    ends = [eigenvalue_distance(first + sign * step * direction, second) for sign in (1, -1)]
    _, slope = jax.jvp(lambda v: eigenvalue_distance(v, second), (first,), (direction,))
    np.testing.assert_allclose(slope, (ends[0] - ends[1]) / (2 * step), rtol=1e-7)
    np.testing.assert_array_equal(
        jax.grad(lambda v: eigenvalue_distance(v, first))(jnp.asarray(first)), 0
    )


def test_searches_that_cannot_be_trusted_say_so(key, x64):
    a, b = np.random.default_rng(5).normal(size=(2, 4, 4))
    found, again, other = (align_dynamics(a, b, key=k) for k in (key, key, jax.random.key(99)))
    assert found.converged
    assert found.agreement < 64
    # Keys change the starts and nothing else.
    np.testing.assert_array_equal(found.rotation, again.rotation)
    assert not np.array_equal(found.rotation, other.rotation)
    np.testing.assert_allclose(found.distance, other.distance, rtol=1e-5)
    cut = align_dynamics(a, b, key=key, num_steps=1)
    assert cut.gradient > 1e-3
    assert not cut.converged
    with pytest.warns(UserWarning, match="The distance may not be the least"):
        dynamical_distance(a, b, key=key, num_steps=1)


def spiral(seed=0):
    """A damped turn and two decays, kicked."""
    matrix = np.block(
        [
            [0.95 * blocks(complex(np.cos(0.5), np.sin(0.5))), np.zeros((2, 2))],
            [np.zeros((2, 2)), np.diag([0.8, 0.4])],
        ]
    )
    matrix[0, 3] = 0.5
    return follow(matrix, 80, 0.1, np.random.default_rng(seed))


def test_white_coordinates_are_those_of_the_paper(key, x64):
    """A_v = (V^T V)^-1 V^T V' of the right singular vectors V of the delay-embedded data, transposed."""
    x, y = (np.asarray(side) for side in lagged_pairs(delay_embed(spiral(), 3)))
    left, sizes, right = np.linalg.svd(x, full_matrices=False)
    white = left[:, :4] * len(x) ** 0.5
    after = y @ right[:4].T / sizes[:4] * len(x) ** 0.5
    paper = np.linalg.lstsq(white, after, rcond=None)[0].T
    operator = fit(PrincipalComponents(4, 0.0), x, y)
    found = np.asarray(transition_matrix(operator))
    np.testing.assert_allclose(np.abs(found), np.abs(paper), atol=1e-9)
    np.testing.assert_allclose(dynamical_distance(found, paper, key=key), 0, atol=1e-9)
    # Projected dynamic mode decomposition.
    cut = left[:, :4] * sizes[:4] @ right[:4]
    projected = right[:4] @ np.linalg.lstsq(cut, y, rcond=1e-9)[0].T @ right[:4].T
    plain = np.asarray(transition_matrix(operator, metric="features"))
    np.testing.assert_allclose(np.abs(plain), np.abs(projected), atol=1e-9)
    assert dynamical_distance(plain, found, key=key) > 0.1


@pytest.mark.filterwarnings("ignore:.*suppresses .* that predict")
@pytest.mark.parametrize("metric", ["data", "features"])
@pytest.mark.parametrize(
    "estimator", [Ridge(0.05), PrincipalComponents(3, 0.05), ReducedRank(3, 0.05)]
)
def test_transition_matrices_have_the_eigenvalues_of_the_operator(estimator, metric, x64):
    operator = fit(estimator, *lagged_pairs(spiral()))
    found = np.linalg.eigvals(transition_matrix(operator, metric=metric))
    np.testing.assert_allclose(eigenvalue_distance(found, eigenvalues(operator)), 0, atol=1e-10)


def test_mixed_recordings_of_one_system_are_one_and_others_are_not(key, x64):
    """Data metric: no invertible mixture of what is recorded is seen; feature metric: no orthogonal one."""
    path, other = spiral(), spiral(seed=1)[:, ::-1] ** 3
    turn, mixture = orthogonal(4), RANDOM.normal(size=(4, 4))

    def of(states, metric="data"):
        return transition_matrix(fit(Ridge(0.0), *lagged_pairs(states)), metric=metric)

    def apart(first, second):
        return dynamical_distance(first, second, key=key)

    for mixed in (path @ turn, path @ mixture):
        np.testing.assert_allclose(apart(of(path), of(mixed)), 0, atol=1e-9)
    assert apart(of(path), of(other)) > 0.1
    plain = of(path, "features")
    np.testing.assert_allclose(apart(plain, of(path @ turn, "features")), 0, atol=1e-9)
    assert apart(plain, of(path @ mixture, "features")) > 0.1


def test_latent_functions_beyond_a_traced_rank_are_zeros():
    x, y = lagged_pairs(spiral().astype(np.float32))
    full = jax.jit(lambda rank: transition_matrix(fit(PrincipalComponents(rank, 0.0), x, y)))(2)
    cut = transition_matrix(fit(PrincipalComponents(2, 0.0), x, y))
    np.testing.assert_allclose(full[:2, :2], cut, atol=1e-5)
    np.testing.assert_array_equal(full[2:], 0)
    np.testing.assert_array_equal(full[:, 2:], 0)
