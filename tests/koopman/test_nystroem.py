from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trajectories import follow
from words import warned

from koopman import (
    RBF,
    Linear,
    Polynomial,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    decompose,
    eigenvalues,
    fit,
    lagged_pairs,
    left_eigenfunctions,
    predict,
    right_eigenfunctions,
    risk,
    singular_values,
)

KINDS = {
    "ridge": Ridge,
    "pcr": partial(PrincipalComponents, 2),
    "reduced_rank": partial(ReducedRank, 2),
}


def states(n=120, d=3, seed=0):
    rng = np.random.default_rng(seed)
    matrix = np.diag(np.linspace(0.9, 0.3, d)) + np.triu(0.2 * rng.normal(size=(d, d)), 1)
    return follow(matrix, n, 0.3, rng)


def fit_kernel(kind, x, y, kernel, centres=None, **options):
    return fit(KINDS[kind](**options), x, y, kernel=kernel, centres=centres)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "solver"),
    [
        ("ridge", "dense"),
        ("pcr", "krylov"),
        ("reduced_rank", "krylov"),
        ("reduced_rank", "spectral"),
    ],
)
def test_the_linear_kernel_is_explicit_regression(kind, solver, x64):
    x, y = (np.asarray(a) for a in lagged_pairs(states()))
    options = {} if kind == "ridge" else {"solver": solver}
    found = fit_kernel(kind, x, y, Linear(), alpha=1e-2, **options)
    wanted = fit(KINDS[kind](alpha=1e-2), x, y)
    rank = 3 if kind == "ridge" else 2
    np.testing.assert_allclose(eigenvalues(found)[:rank], eigenvalues(wanted), atol=1e-7)
    np.testing.assert_allclose(
        predict(found, x[:7], [1, 3]), predict(wanted, x[:7], [1, 3]), atol=1e-7
    )
    np.testing.assert_allclose(risk(found, x, y), risk(wanted, x, y), rtol=1e-7)
    np.testing.assert_allclose(singular_values(found)[:rank], singular_values(wanted), atol=1e-6)
    residuals = decompose(found).residuals[:rank]
    np.testing.assert_allclose(residuals, decompose(wanted).residuals, atol=1e-6)
    one, other = (left_eigenfunctions(o, x[:7]) for o in (found, wanted))
    right_one, right_other = (right_eigenfunctions(o, x[:7]) for o in (found, wanted))
    # Eigenfunctions have a sign of their own, their products have not.
    np.testing.assert_allclose((one * right_one)[:, :rank], other * right_other, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_all_samples_as_centres_are_the_exact_kernel(kind, x64):
    """And a plain function is a kernel too, under `jit` with both."""
    # A kernel of finite rank, 10, so that the centres span the whole space.
    x, y = (np.asarray(a) for a in lagged_pairs(states(80)))
    exact = fit_kernel(kind, x, y, Polynomial(2), alpha=1e-2)
    rank = 10 if kind == "ridge" else 2
    plain = partial(fit_kernel, kind, kernel=lambda a, b: (a @ b.T + 1) ** 2, alpha=1e-2)
    for found in (
        fit_kernel(kind, x, y, Polynomial(2), x, alpha=1e-2),
        jax.jit(partial(plain, centres=x))(x, y),
        jax.jit(plain)(x, y),
    ):
        np.testing.assert_allclose(eigenvalues(found)[:rank], eigenvalues(exact)[:rank], atol=1e-6)
        np.testing.assert_allclose(predict(found, x[:5], 2), predict(exact, x[:5], 2), atol=1e-6)
        np.testing.assert_allclose(risk(found, x, y), risk(exact, x, y), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "checked"),
    [(PrincipalComponents, 3), pytest.param(ReducedRank, 1, marks=pytest.mark.slow)],
)
def test_ranks_by_masking(kind, checked, x64):
    x, y = (np.asarray(a) for a in lagged_pairs(states(25)))

    def value(alpha, rank):
        return risk(fit(kind(rank, alpha), x, y, kernel=RBF(1.0)), x, y)

    both = jax.value_and_grad(value)
    swept = jax.jit(jax.vmap(lambda rank: both(1e-2, rank)))(jnp.asarray([1, 3]))
    alone = jax.jit(lambda alpha: both(alpha, checked))(1e-2)
    found = [np.asarray(part)[[1, 3].index(checked)] for part in swept]
    np.testing.assert_allclose(found, alone, rtol=1e-6, atol=1e-12)
    with pytest.raises(ValueError, match="`solver` must be 'dense' for a traced `rank`"):
        jax.jit(lambda rank: fit(kind(rank, solver="krylov"), x, y, kernel=RBF(1.0)))(2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kernel", [Linear(), Polynomial(3), RBF(1.0)], ids=lambda k: type(k).__name__
)
def test_float32_on_whole_kernel_matrices(kernel):
    # A cut-off that grew with the samples lost directions (RBF); Cholesky's rounding made up others
    # (cubic, linear).
    path = states(300)
    x, y = path[:-1], path[1:]
    rank = 3 if isinstance(kernel, Linear) else 8
    alpha = 1e-4 * float(np.mean(jnp.diagonal(kernel(x, x))))
    with jax.enable_x64(True):
        exact = fit(ReducedRank(rank, alpha), x, y, kernel=kernel)
        wanted = float(risk(exact, x, y)), np.abs(eigenvalues(exact))
    x, y = x.astype(np.float32), y.astype(np.float32)
    for solver in ("auto", "spectral", "krylov"):
        found = fit(ReducedRank(rank, alpha, solver=solver), x, y, kernel=kernel)
        np.testing.assert_allclose(risk(found, x, y), wanted[0], rtol=2e-3)
        np.testing.assert_allclose(np.abs(eigenvalues(found)), wanted[1], atol=5e-3)


@pytest.mark.parametrize("samples", [50, 300])
def test_directions_that_alpha_has_shrunk_are_no_cause_for_doubt(samples, x64):
    """The least eigenvalues of a smooth kernel's matrix are rounding, and weigh nothing in ridge regression."""
    rng = np.random.default_rng(samples)
    x, at = rng.normal(size=(samples, 2)), rng.normal(size=(20, 2))
    y = 0.9 * x @ np.array([[0.8, -0.6], [0.6, 0.8]]) + 0.05 * rng.normal(size=(samples, 2))

    def values(a, b):
        return np.exp(-0.5 * ((a[:, None] - b[None]) ** 2).sum(-1))

    found = fit(Ridge(1e-5), x, y, kernel=RBF(1.0))  # warnings are errors
    weights = np.zeros_like(y)
    for _ in range(4):  # each step regresses what the ones before left over
        left_over = y - values(x, x) @ weights
        weights = weights + np.linalg.solve(
            values(x, x) + samples * 1e-5 * np.eye(samples), left_over
        )
    wanted = values(at, x) @ weights
    np.testing.assert_allclose(predict(found, at), wanted, atol=1e-5)


@pytest.mark.slow
def test_the_default_regularisation_follows_the_kernel(x64):
    scale = 1e-3
    path = states(80)
    x, y = path[:-1], path[1:]
    for kind in KINDS:
        wanted = fit_kernel(kind, x, y, Linear())
        found = fit_kernel(kind, scale * x, scale * y, Linear())
        np.testing.assert_allclose(eigenvalues(found)[:2], eigenvalues(wanted)[:2], rtol=1e-8)
        mean = scale**2 * np.mean(np.sum(x**2, 1))
        np.testing.assert_allclose(found.alpha, 8 * 2.0**-52 * mean, rtol=1e-10)
        np.testing.assert_allclose(
            eigenvalues(fit(KINDS[kind](), x, y))[:2], eigenvalues(found)[:2], rtol=1e-8
        )
        centres = fit_kernel(kind, scale * x, scale * y, Linear(), scale * x[:9])
        np.testing.assert_allclose(centres.alpha, 8 * 2.0**-52 * mean, rtol=1e-8)
        np.testing.assert_allclose(eigenvalues(centres)[:2], eigenvalues(wanted)[:2], rtol=1e-6)
    np.testing.assert_allclose(fit(Ridge(), x, y, kernel=RBF(1.0)).alpha, 1e-6, rtol=1e-10)
    with pytest.warns(UserWarning, match=r"exceeds eigenvalue 2 of k\(X, X\) / n"):
        fit(PrincipalComponents(2, 100.0), x, y, kernel=Linear())
    with pytest.warns(UserWarning, match=r"`alpha` \(1.1\) exceeds the mean of k\(x, x\) \(1\)"):
        fit(Ridge(1.1), x, y, kernel=RBF(1.0))


def test_a_singular_kernel_matrix_is_named():
    x, y = lagged_pairs(states(30))
    for estimator, rank in (
        (Ridge(0.0), 30),
        (PrincipalComponents(4, 0.0), 4),
        (ReducedRank(2, 0.0), 30),
    ):
        name = type(estimator).__name__
        with pytest.raises(
            ValueError, match=f"{name} needs rank {rank}, K has rank 3 of 30. Pass alpha > 0"
        ):
            fit(estimator, x, y, kernel=Linear())
    # Three principal directions there are; under jit the rank found is reported.
    assert np.isfinite(fit(PrincipalComponents(3, 0.0), x, y, kernel=Linear()).core).all()
    inside = jax.jit(lambda x, y: fit(Ridge(0.0), x, y, kernel=Linear()))(x, y)
    assert int(inside.effective_rank) == 3
    assert np.isfinite(inside.core).all()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [Linear(), Polynomial(3, offset=0.0)])
@pytest.mark.parametrize(
    ("kind", "solver"),
    [("pcr", "dense"), ("pcr", "krylov"), ("reduced_rank", "dense"), ("reduced_rank", "spectral")],
)
def test_the_scale_of_states_changes_nothing(kind, solver, kernel):
    # Squares of kernel values overflowed at 1e5, and vanished at 1e-10.
    path = states().astype(np.float32)
    wanted = fit_kernel(kind, *lagged_pairs(path), kernel, solver=solver)
    degree = getattr(kernel, "degree", 1)
    for scale in (1e5, 10 ** (-12 / degree)):
        found = fit_kernel(kind, *lagged_pairs(np.float32(scale) * path), kernel, solver=solver)
        np.testing.assert_allclose(eigenvalues(found), eigenvalues(wanted), atol=5e-3)
        np.testing.assert_allclose(singular_values(found), singular_values(wanted), atol=5e-3)
        np.testing.assert_allclose(
            found.singular_values / scale**degree, wanted.singular_values, rtol=1e-2
        )
        np.testing.assert_allclose(
            predict(found, scale * path[:5]) / scale, predict(wanted, path[:5]), atol=0.05
        )


@pytest.mark.parametrize("transform", [lambda function: function, jax.jit])
def test_kernel_matrices_that_memory_cannot_hold_are_refused_before_they_are_made(transform):
    x = np.ones((10**6, 1), np.float32)
    for estimator, wanted in ((Ridge(), r"2.8e\+04 GB of"), (ReducedRank(2), r"1.2e\+04 GB of")):
        with pytest.raises(
            ValueError, match=rf"`centres` must be given .* 1000000 states, .* {wanted}"
        ):
            transform(lambda x, estimator=estimator: fit(estimator, x, x, kernel=RBF(1.0)))(x)


def test_kernel_values_beyond_float32_are_refused():
    for scale, kernel, words in (
        (1e-18, Linear(), "`kernel` must have a mean of k"),
        (1e-30, Linear(), "got 0. Scale"),
        (1e17, Linear(), "`kernel` must have a mean of k"),
        (1e12, Polynomial(4), "`kernel` must give finite values, got inf.*scale the states"),
    ):
        x, y = lagged_pairs(np.float32(scale) * states().astype(np.float32))
        with pytest.raises(ValueError, match=words):
            fit(Ridge(), x, y, kernel=kernel)


@pytest.mark.filterwarnings("ignore:`rank` .* exceeds")
@pytest.mark.parametrize("kernel", [Linear(), Polynomial(2), RBF(1e6)])
def test_states_that_are_all_but_one_to_the_kernel_are_named(kernel):
    path = states().astype(np.float32) + np.float32(0 if isinstance(kernel, RBF) else 1e5)
    x, y = lagged_pairs(path)
    for kind, centres in (("pcr", None), ("ridge", x[:9])):
        with pytest.warns(UserWarning, match=r"k\(x, x\) varies about its mean") as seen:
            fit_kernel(kind, x, y, kernel, centres)
        assert not any(
            "center=True" in str(warning.message) for warning in seen
        )  # which these do not take
    fit_kernel("pcr", x - x.mean(0)[None], y - x.mean(0)[None], RBF(1.0))
    fit_kernel(
        "pcr", np.ones_like(x), np.ones_like(x), kernel
    )  # the states are one, and nothing is lost


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        (lambda a, b: jnp.exp(-jnp.sum((a - b) ** 2, 1)), ValueError, r"got shape \(6,\)"),
        (lambda a, b: None, TypeError, "`kernel` must give an array of kernel values, got None"),
        (
            lambda a, b: (a @ b.T).astype(complex),
            TypeError,
            "real floating-point numbers, got complex64",
        ),
        (lambda a, b: jnp.log(a @ b.T - 1), ValueError, "`kernel` must give finite values"),
        (lambda a, b: a @ (b @ jnp.asarray([[1.0, 0.0], [6.0, 3.0]])).T, ValueError, "symm"),
        (lambda a, b: -(a @ b.T), ValueError, "`kernel` must be positive semidefinite"),
    ],
)
def test_what_is_no_kernel_is_refused(kernel, error, words):
    x = np.arange(12, dtype=np.float32).reshape(6, 2) % 5
    for estimator, centres in ((Ridge(), None), (ReducedRank(1), x)):
        with pytest.raises(error, match=words):
            fit(estimator, x, x, kernel=kernel, centres=centres)
    if "shape" in words or "complex" in words:  # known also of what is traced
        with pytest.raises(error, match=words):
            jax.jit(lambda x: fit(Ridge(), x, x, kernel=kernel))(x)


def test_an_alpha_below_the_rounding_of_a_factor_is_said():
    x, y = lagged_pairs(states(200).astype(np.float32))
    kernel = Polynomial(3)
    with pytest.warns(
        UserWarning, match="orthonormal only to .* rounding of float32 outweighs `alpha`"
    ):
        fit(ReducedRank(8, 1e-6, solver="krylov"), x, y, kernel=kernel)
    fit(ReducedRank(8, 1e-3, solver="krylov"), x, y, kernel=kernel)
    fit(ReducedRank(8, 1e-6), x, y, kernel=kernel)


def test_an_alpha_that_leaves_no_factor_is_refused():
    x = np.zeros((200, 3), np.float32)
    with pytest.raises(ValueError, match="positive definite in float32.*enable x64"):
        fit(ReducedRank(1, 1e-12, solver="krylov"), x, x, kernel=RBF(1.0))


@pytest.mark.parametrize("number", [None, 20])
def test_kernels_of_no_overlap_are_named(number):
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    centres = None if number is None else x[:number]
    with pytest.warns(UserWarning, match="length scale of the kernel is too small"):
        fit(Ridge(), x, 0.7 * x, kernel=RBF(1e-3), centres=centres)


def test_features_that_do_not_vary_are_named():
    x = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    with pytest.raises(
        ValueError, match=r"got k\(x, centres\) = 0, as all are far from the centres"
    ):
        fit(Ridge(), x, 0.7 * x, kernel=RBF(2.0), centres=x[:20] + 100)
    with pytest.raises(ValueError, match="features that vary, got constant ones alone"):
        fit(Ridge(), np.full_like(x, 3), np.full_like(x, 3), center=True)


def said(path, alpha=None, **options):
    """Return the first words of each warning of a fit of consecutive states."""
    return [
        words[:40] for words in warned(lambda: fit(Ridge(alpha), path[:-1], path[1:], **options))
    ]


PATH = follow(np.diag([0.9, 0.5, -0.3]), 399, 0.3, np.random.default_rng(0))
TONES = np.cos(np.outer(np.arange(450), [0.0445, 0.1247])).sum(1)
DELAYS = np.stack([TONES[3 - i : 450 - i] for i in range(4)], 1)


@pytest.mark.parametrize("number", [None, 20])
@pytest.mark.parametrize(
    ("states", "alpha", "words"),
    [(PATH, None, None), (PATH + 5.0, None, "A column of one"), (DELAYS, 1e-6, "suppresses 1 dir")],
    ids=["nothing", "intercept", "alpha"],
)
def test_a_linear_kernel_warns_as_its_features_do(states, alpha, words, number, x64):
    found = said(
        states, alpha, kernel=Linear(), centres=None if number is None else states[:number]
    )
    assert found == said(states, alpha)
    assert [words in one for one in found] == [True] * bool(words)


def test_other_kernels_and_few_pairs_have_no_such_warnings(x64):
    assert said(PATH + 5.0, kernel=RBF(5.0)) == []
    few = np.random.default_rng(0).normal(
        size=(30, 40)
    )  # fewer pairs than features: nothing to test
    assert said(few, kernel=Linear()) == []


def test_a_large_alpha_of_a_krylov_fit_is_named():
    """The mean of the kept eigenvalues, at most tr K / r, is a bound of the last one."""
    x = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
    with pytest.warns(
        UserWarning, match=r"`alpha` \(3\) exceeds eigenvalue 4 of k\(X, X\) / n \(0.25\)"
    ):
        fit(ReducedRank(4, alpha=3.0, solver="krylov"), x[:-1], x[1:], kernel=RBF(1.0))
