import re
import warnings
from functools import partial
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiled import compilations
from trajectories import follow
from words import warned

from koopman import (
    Linear,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    decompose,
    diagnose,
    eigenvalues,
    fit,
    lagged_pairs,
    merge_moments,
    modes,
    moments,
    predict,
    right_eigenfunctions,
    risk,
    scan_moments,
    singular_values,
)
from koopman._operators import _diagnose
from koopman._operators import _findings as findings

ESTIMATORS = {
    "ridge": Ridge,
    "pcr": partial(PrincipalComponents, 3),
    "reduced_rank": partial(ReducedRank, 3),
}


def fit_kind(kind, *data, alpha=None, **options):
    return fit(ESTIMATORS[kind](alpha), *data, **options)


def delays(series, q):
    return np.stack([series[q - 1 - i : len(series) - i] for i in range(q)], 1)


def linear_trajectory(n=400, d=5, noise=0.3):
    rng = np.random.default_rng(0)
    matrix = np.diag(np.linspace(0.95, 0.1, d)) + np.triu(0.2 * rng.normal(size=(d, d)), 1)
    return matrix, follow(matrix, n, noise, rng)


def operator_matrix(operator, fitted=False):
    """G itself: features of x times it are the forecast features. With `fitted`, before shrinkage was undone."""
    basis, dual = (np.asarray(part.matrix, float) for part in (operator.encode, operator.dual))
    share = float(operator.alpha) * basis.T @ basis
    undone = sum(np.linalg.matrix_power(share, k) for k in range(4))
    return basis @ (np.linalg.inv(undone) if fitted else np.eye(len(share))) @ dual.T


# Where a test chooses an `alpha` that shrinks much, fits say so.
LARGE_ALPHA = pytest.mark.filterwarnings("ignore:.*suppresses .* that predict")
LOW_RANK = pytest.mark.filterwarnings("ignore:`rank` .* exceeds")


def defined(kind, x, y, alpha):
    """Return the matrix of an estimator of rank 3, before shrinkage is undone, from its definition."""
    c_x = x.T @ x / len(x)
    c_xy = x.T @ y / len(x)
    regular = c_x + alpha * np.eye(len(c_x))
    if kind is PrincipalComponents:
        _, vectors = np.linalg.eigh(c_x)
        return vectors[:, -3:] @ vectors[:, -3:].T @ np.linalg.solve(regular, c_xy)
    values, turn = np.linalg.eigh(regular)
    root = (turn / np.sqrt(values)) @ turn.T
    left = np.linalg.svd(root @ c_xy)[0][:, :3]
    return root @ left @ left.T @ root @ c_xy


@LARGE_ALPHA
@pytest.mark.parametrize("alpha", [0.0, 1e-2])
def test_estimators_are_their_definitions(alpha, x64):
    x, y = (np.asarray(a) for a in lagged_pairs(linear_trajectory()[1]))
    c_x, c_xy = x.T @ x / len(x), x.T @ y / len(x)
    regular = c_x + alpha * np.eye(5)
    exact = np.linalg.solve(regular, c_xy)
    np.testing.assert_allclose(operator_matrix(fit(Ridge(alpha), x, y), True), exact, atol=1e-10)
    iterated = np.zeros_like(exact)
    for _ in range(4):  # each step regresses what the ones before left over
        iterated = iterated + np.linalg.solve(regular, c_xy - c_x @ iterated)
    np.testing.assert_allclose(operator_matrix(fit(Ridge(alpha), x, y)), iterated, atol=1e-10)
    for kind in (PrincipalComponents, ReducedRank):
        operator = fit(kind(3, alpha), x, y)
        np.testing.assert_allclose(
            operator_matrix(operator, True), defined(kind, x, y, alpha), atol=1e-10
        )
    basis = operator.encode.matrix
    np.testing.assert_allclose(basis.T @ regular @ basis, np.eye(3), atol=1e-10)


@pytest.mark.parametrize(
    ("kind", "route"),
    [
        ("ridge", "qr"),
        ("pcr", "covariance"),
        ("reduced_rank", "qr"),
        ("reduced_rank", "covariance"),
    ],
)
def test_squares_near_the_ends_of_float32_are_right_or_refused(kind, route):
    states = linear_trajectory(d=3)[1].astype(np.float32)
    wanted = fit_kind(kind, *lagged_pairs(states), route=route)
    for scale in (1e-15, 1e15):
        x, y = lagged_pairs(np.float32(scale) * states)
        found = fit_kind(kind, x, y, route=route)
        np.testing.assert_allclose(eigenvalues(found), eigenvalues(wanted), atol=1e-3)
        np.testing.assert_allclose(singular_values(found), singular_values(wanted), atol=1e-3)
        np.testing.assert_allclose(found.singular_values / scale, wanted.singular_values, rtol=1e-2)
    for scale in (1e-25, 1e-18, 1e18, 1e25):
        x, y = lagged_pairs(np.float32(scale) * states)
        with pytest.raises(
            ValueError, match="`x` must have a mean square from .* to .*Scale the data"
        ):
            fit_kind(kind, x, y, route=route)


def test_float64_holds_larger_squares(x64):
    states = linear_trajectory(d=3)[1]
    wanted, found = (fit(Ridge(), *lagged_pairs(unit * states)) for unit in (1.0, 1e25))
    np.testing.assert_allclose(eigenvalues(found), eigenvalues(wanted), atol=1e-3)


@pytest.mark.parametrize("data", ["known", "traced", "moments"])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_the_default_regularisation_follows_the_data(kind, data):
    states = linear_trajectory()[1].astype(np.float32)
    wanted = np.asarray(eigenvalues(fit_kind(kind, *lagged_pairs(states))))
    plain = partial(fit_kind, kind)
    fit_data = {
        "known": plain,
        "traced": jax.jit(plain),
        "moments": lambda x, y: plain(moments(x, y)),
    }[data]
    for scale in (1e-3, 1e3):
        x, y = (np.asarray(a, np.float32) for a in lagged_pairs(scale * states))
        alpha = (5 * 2.0**-23) ** 2 * np.sum(x.astype(float) ** 2) / len(x)
        found = fit_data(x, y)
        np.testing.assert_allclose(eigenvalues(found), wanted, atol=1e-5)
        np.testing.assert_allclose(found.alpha, alpha, rtol=1e-4 if data == "moments" else 1e-5)


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_a_given_alpha_is_in_units_of_the_data(kind):
    states = linear_trajectory()[1].astype(np.float32)
    wanted = np.asarray(eigenvalues(fit_kind(kind, *lagged_pairs(states))))
    with pytest.warns(
        UserWarning, match=r"`alpha` \(1e-06\) suppresses . directions .* that predict"
    ):
        fixed = eigenvalues(fit_kind(kind, *lagged_pairs(1e-3 * states), alpha=1e-6))
    assert np.abs(np.abs(fixed) - np.abs(wanted)).max() > 0.1


@pytest.mark.parametrize(
    ("strength", "rank", "alpha", "directions"),
    [
        (0.1, 3, 1e-5, 0),
        (0.1, 3, 0.3, 1),
        (1.0, 3, 0.3, 0),
        (1.0, 3, 30.0, 3),
        (10.0, 3, 30.0, 0),
        (0.1, 2, 30.0, 2),
    ],
)
def test_an_alpha_that_suppresses_what_predicts_is_named(strength, rank, alpha, directions, x64):
    """Directions with b^4 > .01 whose F statistic is above 10: where there are any it is 158, .6, 527, 4.9, 80 490."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 3)) * [3.0, 1.0, 0.1]
    y = x + strength * rng.normal(size=x.shape)
    said = warned(lambda: fit(PrincipalComponents(rank, alpha), x, y))
    assert [f"suppresses {directions} direc" in words for words in said] == [True] * (
        directions > 0
    )
    assert not warned(lambda: jax.jit(lambda alpha: fit(Ridge(alpha), x, x).core)(30.0))


def misses_intercept(kind, streamed, path, **options):
    """Return if a fit of consecutive states warns of a missing intercept."""
    x, y = path[:-1], path[1:]
    if streamed:
        said = warned(lambda: fit_kind(kind, moments(x, y, **options)))
    else:
        said = warned(lambda: fit_kind(kind, x, y, **options))
    return any("A column of ones lowers" in words for words in said)


@pytest.mark.parametrize(
    ("kind", "streamed"),
    [("ridge", False), ("ridge", True), ("pcr", False), ("reduced_rank", True)],
)
def test_a_missing_intercept_is_named(kind, streamed, x64):
    rng = np.random.default_rng(1)
    path = linear_trajectory(300)[1]
    said = partial(misses_intercept, kind, streamed)
    assert not said(path)
    assert said(path + 3.0)
    assert not said(path + 3.0, center=True)
    assert not said(np.column_stack([path + 3.0, np.ones(len(path))]))
    assert not said(
        np.column_stack([path[:, :4] + 3.0, 1 - path[:, :1], path[:, :1]])
    )  # ones are in the span
    for _ in range(3):
        noise = rng.normal(size=(301, 5))
        assert not said(noise - noise.mean(0))


@pytest.mark.parametrize("streamed", [False, True])
def test_a_missing_intercept_far_from_zero_is_named(streamed, x64):
    said = partial(misses_intercept, "ridge", streamed)
    step = np.random.default_rng(1).normal(size=(301, 2))
    exact = np.array([0.9, 0.5]) ** np.arange(60)[:, None]
    for offset in (1e3, 1e6, 1e7):  # moments in float64 hold up to about 1e7
        assert said(step + offset) or (streamed and offset > 1e6)
        assert said(exact + offset) or offset > 1e6
        assert offset > 1e6 or not said(np.column_stack([step[:, 0] + offset, np.full(301, 0.1)]))


def test_overlapping_residuals_are_no_missing_intercept(x64):
    """At lag 100 residuals of a slow process without an offset overlap: 9 of 20 such series had the warning."""
    for seed in range(20):
        path = follow(np.full((1, 1), 0.99), 3999, 0.141, np.random.default_rng(seed))
        assert not warned(lambda path=path: fit(Ridge(), path[:-100], path[100:]))


def cycle_of_four(dtype):
    """Pairs of a deterministic cycle, whose operator has four singular values 1."""
    states = np.eye(4, dtype=dtype)[np.arange(41) % 4]
    return states[:-1], states[1:]


@pytest.mark.parametrize(
    ("kind", "rank", "dtype"),
    [
        (ReducedRank, 1, np.float64),
        (ReducedRank, 2, np.float32),
        (ReducedRank, 3, np.float64),
        (PrincipalComponents, 2, np.float32),
        (PrincipalComponents, 3, np.float64),
    ],
)
def test_a_rank_that_cuts_through_equal_singular_values_is_named(kind, rank, dtype, precision):
    x, y = cycle_of_four(dtype)
    with pytest.warns(
        UserWarning, match=rf"Singular values {rank} and {rank + 1} agree.*rank {rank} .*Use rank"
    ):
        fit(kind(rank), x, y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_rank_between_unequal_singular_values_is_not_named(dtype, precision):
    x, y = cycle_of_four(dtype)
    fit(ReducedRank(4), x, y)
    scale = np.asarray([1, 0.7, 0.7, 0.4], dtype)
    target = y @ np.diag(scale)
    with pytest.warns(UserWarning, match=r"Use rank 3 or 1\."):
        fit(ReducedRank(2), x, target)
    for rank in (1, 3, 4):
        fit(ReducedRank(rank), x, target)
    apart = y @ np.diag(np.asarray([1, 0.7, 0.6995, 0.4], dtype))
    fit(ReducedRank(2), x, apart)


@pytest.mark.parametrize(("solver", "d"), [("krylov", 3), ("krylov", 40), ("randomized", 40)])
@pytest.mark.parametrize(
    ("kind", "route"),
    [(ReducedRank, "auto"), (PrincipalComponents, "qr"), (PrincipalComponents, "covariance")],
)
def test_iterative_solvers_find_the_definitions(kind, route, solver, d, x64):
    x, y = (np.asarray(a) for a in lagged_pairs(linear_trajectory(d=d)[1]))
    found = operator_matrix(fit(kind(3, solver=solver), x, y, route=route))
    np.testing.assert_allclose(
        found, defined(kind, x, y, 0.0), atol=1e-6 if solver == "krylov" else 1e-2
    )


@LARGE_ALPHA
@pytest.mark.filterwarnings("ignore:A column of ones")
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("kind", ESTIMATORS)
def test_streamed_moments_fit_as_the_data_do(kind, center):
    x, y = (np.asarray(a, np.float32) + 1 for a in lagged_pairs(linear_trajectory()[1]))
    y = y + 0.5  # drift: the mean of y is not that of x
    o = np.sin(y[:, :2])
    streamed = scan_moments(
        x.reshape(8, 50, 5), y.reshape(8, 50, 5), observable=o.reshape(8, 50, 2), center=center
    )
    whole = fit_kind(kind, x, y, alpha=1e-3, observable=o, center=center)
    found = fit_kind(kind, streamed, alpha=1e-3)
    np.testing.assert_allclose(operator_matrix(found), operator_matrix(whole), atol=2e-3)
    np.testing.assert_allclose(found.gram_y, whole.gram_y, atol=2e-3)
    np.testing.assert_allclose(risk(found, x, y), risk(whole, x, y), rtol=1e-3)
    np.testing.assert_allclose(predict(found, x[:4], 2), predict(whole, x[:4], 2), atol=5e-3)


@pytest.mark.parametrize(("dtype", "n"), [(float, 100), (np.float32, 1000)])
@pytest.mark.parametrize("constant", [0.1, 7e5, 1e-9])
def test_a_constant_feature_about_its_mean_is_zero(constant, dtype, n, x64):
    """The rounding of its mean was an eigenvalue 1 of moments."""
    x = np.random.default_rng(0).normal(size=(n, 2))
    x, y = (np.column_stack([a, np.full(n, constant)]).astype(dtype) for a in (x, 0.7 * x))
    halves = (moments(x[at], y[at], center=True) for at in (slice(30), slice(30, None)))
    for data in ((x, y), (moments(x, y, center=True),), (merge_moments(*halves),)):
        operator = fit(Ridge(), *data, center=len(data) == 2)
        np.testing.assert_allclose(eigenvalues(operator), [0.7, 0.7, 0.0], atol=1e-5)
        assert "1 of 3 directions dropped" in repr(operator)


TIME = np.arange(4000)
COSINE = np.cos(0.01 * TIME)
TONES = np.cos(0.0445 * TIME) + 0.3 * np.cos(0.1247 * TIME)
TURN = np.linalg.qr(np.random.default_rng(0).normal(size=(25, 25)))[0]
# Series, delays, pairs, steps ahead, noise, dtype, and the error over the spread that the default
# is to reach.
FORECASTS = {
    "cosine of 40 delays": (COSINE, 40, 800, 3140, 0.0, float, 7e-12),
    "noise 1e-6": (TONES, 12, 1000, 400, 1e-6, float, 1e-4),
    "noise 0.1": (TONES, 12, 1000, 400, 0.1, float, 8.0),
    "cosine in float32": (COSINE, 2, 800, 3140, 0.0, np.float32, 0.09),
    "two tones in float32": (TONES, 12, 1000, 440, 0.0, np.float32, 0.03),
    "orthogonal in float32": (None, 1, 290, 290, 0.0, np.float32, 3e-4),
}


@pytest.mark.parametrize("name", FORECASTS)
def test_the_default_forecasts_far_ahead(name):
    """Least squares without `alpha` does; 1e-6 of the mean eigenvalue hid what predicts, and said nothing of it."""
    series, q, number, steps, noise, dtype, wanted = FORECASTS[name]
    if series is None:
        clean = np.stack([np.linalg.matrix_power(TURN, k)[0] for k in range(600)])
    else:
        clean = delays(series, q)
        series = series + noise * np.random.default_rng(0).normal(size=len(series))
    data = (clean if q == 1 else delays(series, q)).astype(dtype)
    with jax.enable_x64(dtype is float):
        operator = fit(Ridge(), data[:number], data[1 : number + 1])
        found = predict(operator, data[:20], steps)
    error = np.sqrt(np.mean((np.asarray(found, float) - clean[steps : steps + 20]) ** 2))
    assert error < wanted * clean.std()
    assert not operator.given


@pytest.mark.parametrize(
    ("kind", "dtype"), [("ridge", float), ("pcr", float), ("reduced_rank", np.float32)]
)
def test_units_of_columns_drop_no_direction(kind, dtype, precision):
    x, y = (a.astype(dtype) for a in lagged_pairs(linear_trajectory(d=3)[1]))
    units = np.asarray([1, 2.0**-40, 2.0**30], dtype)
    for alpha in (None, 0.0):
        one, other = (
            fit_kind(kind, x * u, y * u, alpha=alpha) for u in (np.ones((1, 3), dtype), units[None])
        )
        assert int(other.effective_rank) == 3
        tol = 1e-9 if dtype is float else 1e-3
        np.testing.assert_allclose(eigenvalues(other), eigenvalues(one), atol=tol)
        found = np.asarray(predict(other, x * units[None], 3)) / units
        np.testing.assert_allclose(found, predict(one, x, 3), atol=tol * np.abs(x).max())


@pytest.mark.parametrize(
    ("alpha", "options", "dtype"),
    [
        (None, {}, float),
        (1e-9, {}, np.float32),
        (None, {"kernel": Linear()}, np.float32),
        (1e-9, {"kernel": Linear()}, float),
    ],
    ids=str,
)
def test_a_rank_that_the_data_do_not_hold_is_named(alpha, options, dtype, precision):
    words = r"`rank` \(4\) exceeds the 2 directions that the data hold .* Lower it to 2"
    tone = delays(COSINE[::30], 6).astype(dtype)
    for kind in (PrincipalComponents, ReducedRank):
        with pytest.warns(UserWarning, match=words):
            operator = fit(kind(4, alpha), tone[:-1], tone[1:], **options)
        said = "given" if alpha else "default"
        assert f"({said}), 2 of 4 directions dropped" in repr(operator)
        assert "dropped" not in repr(fit(kind(2, alpha), tone[:-1], tone[1:], **options))


# A trend and a season, of which four delays are a linear system with an intercept.
SEASON = delays(0.5 * TIME[:600] + np.sin(2 * np.pi * TIME[:600] / 12), 4)
# States, forecasts {steps: value} from the last one and eigenvalues.
DECAY = 2 + 8 * 0.9 ** np.arange(31)[::-1, None]
AFFINE = {
    "decay": (
        DECAY[::-1][:31],
        DECAY[-1:],
        {1: 9.2, 5: 6.72392, 20: 2.97261, 200: 2.00000000564},
        [0.9],
    ),
    "growth": (
        2 + 0.1 * 1.2 ** np.arange(20)[:, None],
        np.full((1, 1), 3.0),
        {10: 2 + 1.2**10},
        [1.2],
    ),
    "drift": (np.arange(51.0)[:, None], np.full((1, 1), 50.0), {1: 51.0, 100: 150.0}, [1.0]),
    "season": (SEASON[:150], SEASON[150:151], {1: SEASON[151], 240: SEASON[390]}, [1, 1, 1, 0]),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("name", AFFINE)
def test_affine_maps_are_exact(name, streamed, x64):
    states, start, wanted, moduli = AFFINE[name]
    x, y = states[:-1], states[1:]
    data = (moments(x, y, center=True),) if streamed else (x, y)
    operator = fit(
        Ridge(None if name == "season" else 0.0), *data, **({} if streamed else {"center": True})
    )
    for steps, value in wanted.items():
        np.testing.assert_allclose(
            predict(operator, start, steps)[0], value, rtol=2e-6 if steps == 20 else 1e-9
        )
    found, held = decompose(operator), modes(operator)
    np.testing.assert_allclose(np.abs(found.eigenvalues), moduli, atol=1e-9)
    np.testing.assert_allclose(found.residuals, 0, atol=1e-6)  # a drift is none
    np.testing.assert_allclose(risk(operator, x, y), 0, atol=1e-18 * np.max(x**2))
    np.testing.assert_allclose(
        np.var(np.asarray(right_eigenfunctions(operator, x, found))[:, 0]), 1, rtol=1e-9
    )
    if name in (
        "decay",
        "growth",
    ):  # psi is proportional to x - 2, and the constant's mode is the fixed point
        values = np.real(right_eigenfunctions(operator, np.asarray([[2.0], [3.0], [5.0]])))[:, 0]
        np.testing.assert_allclose(values / values[1], [0, 1, 3], atol=1e-9)
        np.testing.assert_allclose(held.constant, 2, rtol=1e-9)
        growth = (
            np.asarray(right_eigenfunctions(operator, start)) * np.asarray(found.eigenvalues) ** 4
        )
        ahead = growth @ np.asarray(held.amplitudes) + np.asarray(held.constant)
        np.testing.assert_allclose(ahead, predict(operator, start, 5), rtol=1e-9)
    if name == "decay":  # without the intercept the step is no linear one: the negative control
        with pytest.warns(UserWarning, match="A column of ones"):
            assert np.abs(predict(fit(Ridge(0.0), x, y), start, 200) - 2) > 0.1


def test_images_as_observables():
    x, y = (np.asarray(a, np.float32) for a in lagged_pairs(linear_trajectory()[1]))
    images = np.einsum("ni,hi,wi->nhw", y, *np.random.default_rng(0).normal(size=(2, 3, 5))).astype(
        np.float32
    )
    forecast = predict(fit(Ridge(), x, y, observable=images), x[:6], [1, 4])
    assert forecast.shape == (2, 6, 3, 3)
    flat = predict(fit(Ridge(), x, y, observable=images.reshape(-1, 9)), x[:6], [1, 4])
    np.testing.assert_allclose(forecast.reshape(2, 6, 9), flat, atol=1e-6)


@LOW_RANK
@pytest.mark.parametrize(
    ("kind", "route", "samples", "width", "rank"),
    [
        ("ridge", "qr", 400, 70, 20),
        ("reduced_rank", "covariance", 400, 70, 20),
        ("pcr", "covariance", 140, 66, 65),
        ("ridge", "qr", 8, 20, 8),
        ("pcr", "covariance", 8, 20, 8),
    ],
)
def test_rounding_is_no_direction_of_the_data(samples, width, rank, kind, route, x64):
    """The zeros of a covariance of deficient rank come out at up to a few rounding units of the largest eigenvalue."""
    rng = np.random.default_rng(samples)
    x = rng.normal(size=(samples, rank)) @ rng.normal(size=(rank, width))
    y = x @ rng.normal(size=(width, width)) / width
    whole = {
        "ridge": Ridge(),
        "pcr": PrincipalComponents(width),
        "reduced_rank": ReducedRank(width),
    }
    found = fit(whole[kind], x, y, route=route)
    assert int(found.effective_rank) == rank
    np.testing.assert_allclose(predict(found, x), y, atol=1e-3)


@pytest.mark.slow
def test_alpha_makes_no_directions_of_rounding(x64):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 5)) @ rng.normal(size=(5, 300))
    estimator = ReducedRank(8, 1e-7 * np.sum(x**2) / len(x))
    with pytest.warns(UserWarning, match="exceeds the 5 directions"):
        found = fit(estimator, x, x)
    assert int(found.effective_rank) == 5


def test_a_singular_covariance_is_named():
    x, y = (np.asarray(a, np.float32) for a in lagged_pairs(linear_trajectory()[1]))
    x, y = (np.concatenate([a, a[:, :1]], 1) for a in (x, y))
    with pytest.raises(ValueError, match="Ridge needs rank 6, C_x has rank 5 of 6. Pass alpha > 0"):
        fit(Ridge(0.0), x, y)
    for estimator in (
        Ridge(),
        PrincipalComponents(2),
        ReducedRank(2),
    ):  # alpha follows the data: to zero
        with pytest.raises(ValueError, match="C_x has rank 0 of 6"):
            fit(estimator, 0 * x, 0 * y)
    # Five principal directions there are.
    assert np.isfinite(fit(PrincipalComponents(5, 0.0), x, y).core).all()
    inside = jax.jit(lambda x, y: fit(ReducedRank(6, 0.0), x, y))(x, y)
    assert np.isfinite(inside.core).all()
    assert int(inside.effective_rank) == 5


def test_latent_functions_not_in_use_are_zero():
    for third in (0.0, 1.0):  # of which no warning speaks
        x = np.random.default_rng(0).normal(size=(100, 3)).astype(np.float32)
        x[:, 2] = third * x[:, 1]
        np.testing.assert_allclose(
            np.diagonal(fit(Ridge(1e-3), x, 0.5 * x).gram_x), [1, 1, 0], atol=2e-3
        )


def wide_pairs(d, n, seeds=None, decades=1):
    """Pairs with deviations over one decade or more, so that the routes' rounding differs."""
    rng = np.random.default_rng(d)
    shape = (n + 1, d) if seeds is None else (seeds, n + 1, d)
    mixing = np.linalg.qr(rng.normal(size=(d, d)))[0] * np.logspace(0, -decades, d)[:, None]
    states = np.cumsum(rng.normal(size=shape), -2) @ mixing * 0.1
    return states[..., :-1, :], states[..., 1:, :]


AUTO = {
    "ridge": (Ridge, 70),
    "pcr": (partial(PrincipalComponents, 5), 70),
    "reduced rank": (partial(ReducedRank, 5), 70),
    "reduced rank krylov": (partial(ReducedRank, 5, solver="krylov"), 70),
    "reduced rank of many": (partial(ReducedRank, 5), 260),
}
AUTO_CASES = [
    pytest.param(*case, id=name, marks=[pytest.mark.slow] * name.endswith(("krylov", "many")))
    for name, case in AUTO.items()
]


@pytest.mark.parametrize("route", ["auto", "covariance"])
@pytest.mark.parametrize(("estimator", "d"), AUTO_CASES)
def test_second_moments_give_the_same_operator_if_the_data_outweigh_their_rounding(
    estimator, d, route, x64
):
    x, y = wide_pairs(d, 3 * d)
    alpha = (
        (d * 2.0**-52) ** 2 * np.sum(x**2) / len(x)
    )  # the default; given, the next test has the same programs
    exact = fit(estimator(alpha), x, y, route="qr")
    quick = fit(estimator(alpha), x, y, route=route)
    H = operator_matrix(exact)
    G = operator_matrix(quick)
    # What they predict, for which directions that hardly vary mean nothing.
    assert not np.array_equal(G, H)
    assert np.linalg.norm(x @ (G - H)) < 1e-6 * np.linalg.norm(x @ H)
    np.testing.assert_allclose(quick.singular_values, exact.singular_values, rtol=1e-6, atol=1e-8)
    gram = np.asarray(quick.gram_x) + np.asarray(quick.penalty)
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-6)


@LARGE_ALPHA
@LOW_RANK
@pytest.mark.parametrize(("estimator", "d"), AUTO_CASES)
def test_below_that_the_features_are_factored(estimator, d, x64):
    """As by QR, whatever `alpha` is, if small directions are cut off."""
    x, y = wide_pairs(d, 3 * d, decades=6)
    shares = [1e-12, 1e-8]
    if estimator is AUTO["reduced rank krylov"][0] or d > 256:
        shares = [1e-12]  # a factor of C_x + alpha I cuts none
    for share in shares:
        alpha = share * np.sum(x**2) / len(x)
        exact, same = (fit(estimator(alpha), x, y, route=by) for by in ("qr", "auto"))
        leaves = [jax.tree.leaves(eqx.filter(operator, eqx.is_array)) for operator in (exact, same)]
        for wanted, array in zip(*leaves, strict=True):
            atol = 1e-12 * np.max(np.abs(wanted), initial=1e-300)
            np.testing.assert_allclose(array, wanted, rtol=0, atol=atol)


@LARGE_ALPHA
@LOW_RANK
@pytest.mark.slow
def test_a_factor_counts_alpha(x64):
    x, y = wide_pairs(260, 780, decades=6)
    alpha = 1e-9 * np.sum(x**2) / len(x)
    exact, near, quick = (
        fit(ReducedRank(5, alpha), x, y, route=by) for by in ("qr", "auto", "covariance")
    )
    H, G, K = (operator_matrix(operator) for operator in (exact, near, quick))
    np.testing.assert_array_equal(G, K)
    assert not np.array_equal(G, H)
    assert np.linalg.norm(G - H) < 1e-6 * np.linalg.norm(H)


@LARGE_ALPHA
@LOW_RANK
@pytest.mark.parametrize(
    ("d", "number", "dtype"), [(70, 79, np.float64), (63, 200, np.float64), (70, 210, np.float32)]
)
def test_few_features_or_pairs_and_float32_are_factored_bit_for_bit(d, number, dtype, precision):
    """Else "auto" has both routes in one program."""
    x, y = (part.astype(dtype) for part in wide_pairs(d, number))
    same = [fit(ReducedRank(5, 1.0), x, y, route=by) for by in ("auto", "qr")]
    jax.tree.map(np.testing.assert_array_equal, *map(eqx.filter, same, [eqx.is_array] * 2))


@LARGE_ALPHA
@pytest.mark.parametrize(
    "axes", [(None, None, 0), pytest.param((0, 0, None), marks=pytest.mark.slow), (0, 0, 0)]
)
def test_members_of_a_sweep_decide_together(axes, x64):
    """With data of one member that need it all go by QR; else a sweep equals its members in turn."""

    def matrix(x, y, alpha, route="auto"):
        return (o := fit(ReducedRank(4, alpha), x, y, route=route)).encode.matrix @ o.dual.matrix.T

    x, y = wide_pairs(70, 160, seeds=2)
    thin = [np.stack([part[0] * np.logspace(0, -6, 70), part[1]]) for part in (x, y)]
    alphas = np.array([1e-5, 1e-3]) * np.sum(x**2) / x.shape[1] / 2
    given, thin = (
        [
            part if axis == 0 else jnp.asarray(part[0])
            for part, axis in zip((*data, alphas), axes, strict=True)
        ]
        for data in ((x, y), thin)
    )
    sweep = jax.jit(jax.vmap(matrix, axes))
    one = jax.jit(matrix)
    members = [
        [part if axis is None else part[i] for part, axis in zip(given, axes, strict=True)]
        for i in (0, 1)
    ]
    alone = np.stack([one(*member) for member in members])
    assert np.linalg.norm(np.asarray(sweep(*given)) - alone) < 1e-7 * np.linalg.norm(alone)
    exact = jax.jit(jax.vmap(partial(matrix, route="qr"), axes))(*thin)
    np.testing.assert_array_equal(sweep(*thin), exact)


@pytest.mark.parametrize("center", [False, True])
def test_another_number_of_pairs_compiles_nothing(center):
    x, y = (np.asarray(a, np.float32) for a in lagged_pairs(linear_trajectory()[1]))
    for estimator in (Ridge(), ReducedRank(2)):

        def fitted(*numbers, estimator=estimator):
            for number in numbers:
                fit(estimator, x[:number], y[:number], center=center)

        fitted(200)
        assert not compilations(
            lambda: fitted(5, 12, 37, 201, 399)
        )  # fewer pairs than columns, too


def test_fit_warns_of_what_diagnose_finds():
    _, states = linear_trajectory(300, d=3)
    pairs = lagged_pairs((states + 5).astype(np.float32))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        operator = fit(ReducedRank(3, 100.0), *pairs)
    found = diagnose(operator, *pairs)
    assert {str(finding) for finding in found} == {str(one.message) for one in seen}
    assert [finding.name for finding in found] == ["suppressed_directions", "missing_intercept"]
    assert found[0].numbers["alpha"] == 100
    assert diagnose(fit(Ridge(), *pairs, center=True), *pairs) == ()
    page = (Path(__file__).parents[2] / "docs" / "koopman.md").read_text()
    named = set(
        re.findall(
            r"\"(\w+)\"",
            re.search(r"Their names are(.*?)The last two", diagnose.__doc__, re.DOTALL)[1],
        )
    )
    assert len(named) == 12
    assert all(f"`{name}`" in page for name in named)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stacked = jax.vmap(lambda x: fit(ReducedRank(3, 100.0), x, x))(np.stack([pairs.x] * 2))
    with pytest.raises(
        ValueError, match=r"`operator` must be one known operator, got `core` of shape \(2, 3, 3\)"
    ):
        diagnose(stacked, *pairs)
    few = moments(pairs.x[:, :2], pairs.y[:, :2])
    for data, words in (
        ((pairs.x,), "`y` must be given with `x`, got None"),
        (
            (pairs.x[:, :2], pairs.y[:, :2]),
            "`x` must have 3 columns, as the operator was fitted, got 2",
        ),
        ((few,), "`x` must have 3 columns, as the operator was fitted, got 2"),
        ((moments(*pairs), pairs.y), "`y` must be None with moments"),
    ):
        with pytest.raises(ValueError, match=words):
            diagnose(operator, *data)
    with warnings.catch_warnings(action="ignore"):
        of_kernel = fit(ReducedRank(2, 1e-3), *pairs, kernel=Linear())
    with pytest.raises(
        ValueError, match="`x` must be the states of a fit with a kernel, got moments"
    ):
        diagnose(of_kernel, moments(*pairs))


def test_findings_do_not_depend_on_the_decomposition(monkeypatch, x64):
    """Wide features with a given `alpha` take `eigh` of their products, else an SVD."""
    rng = np.random.default_rng(0)
    width = _diagnose._QUICK_SVD + 2
    x = 1.0 + rng.normal(size=(3 * width, width)) * np.logspace(0, -1, width)
    y = 0.5 * x + 1.0 + 1e-3 * rng.normal(size=x.shape)
    with warnings.catch_warnings(action="ignore"):
        operator = fit(Ridge(0.02), x, y)
    quick = diagnose(operator, x, y)
    monkeypatch.setattr(_diagnose, "_QUICK_SVD", 2 * width)
    exact = diagnose(operator, x, y)
    names = [finding.name for finding in quick]
    assert names == ["suppressed_directions", "missing_intercept"]
    assert names == [finding.name for finding in exact]
    for first, second in zip(quick, exact, strict=True):
        assert first.numbers == pytest.approx(second.numbers, rel=1e-8)


def test_snapshots_in_columns_are_hinted_at_once():
    _, states = linear_trajectory(20, d=3)
    snapshots = states.T.astype(np.float32)  # [3, 21]
    pairs = lagged_pairs(snapshots)
    findings._hint_once.cache_clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "There are fewer pairs")
        fit(PrincipalComponents(2), *pairs)
        fit(Ridge(), *pairs, kernel=Linear())
        fit(Ridge(), *lagged_pairs(snapshots.T))
        jax.eval_shape(lambda x, y: fit(Ridge(), x, y), *pairs)
    with pytest.warns(
        UserWarning,
        match=r"fewer pairs than directions .*\[features, time\], pass the transpose x.T",
    ):
        fit(Ridge(), *pairs)


def test_columns_that_principal_components_do_not_see_are_named(x64):
    x, y = lagged_pairs(linear_trajectory(d=3)[1])
    units = np.array([[1, 1e9, 1e9]])
    with pytest.warns(
        UserWarning, match="Column 0 of `x` is too small beside the largest for the default `alpha`"
    ):
        fit(PrincipalComponents(2), x * units, y * units)
    # All directions have no order: they are ridge regression's.
    found, wanted = (
        eigenvalues(fit(kind, x * units, y * units)) for kind in (PrincipalComponents(3), Ridge())
    )
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    with (
        pytest.raises(ValueError, match="`x` must have a mean square from"),
        np.errstate(over="ignore"),
    ):
        fit(Ridge(), x * 1e160, y * 1e160)


@pytest.mark.parametrize(("has_kernel", "num_centres"), [(False, 0), (True, 0), (True, 30)])
def test_a_linear_kernel_is_explicit_features_by_default(has_kernel, num_centres, x64):
    """A tone 300 times weaker than another had modulus .99886 with one, and 1 with the other."""
    x = np.stack([np.cos(0.3 * TIME[:200]), np.sin(0.3 * TIME[:200])], 1)
    x = np.concatenate(
        [x, np.stack([np.cos(0.7 * TIME[:200]), np.sin(0.7 * TIME[:200])], 1) / 300], 1
    )
    kernel = Linear() if has_kernel else None
    centres = x[:num_centres] if num_centres else None
    found = eigenvalues(fit(ReducedRank(4), x[:-1], x[1:], kernel=kernel, centres=centres))
    np.testing.assert_allclose(np.abs(found), 1, atol=1e-9)


def test_an_estimator_with_an_array_of_its_own_is_refused():
    class Cut(Ridge):
        rtol: float = 0.0

    with pytest.raises(
        TypeError, match=r"Fields of an estimator must be static, .* got \['rtol'\]"
    ):
        Cut()
