import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from koopman import fit_generator

THETA, SIGMA = 0.7, 1.3


def ornstein_uhlenbeck(n, seed=0):
    """Powers of stationary states up to the third, and their slopes."""
    x = SIGMA / np.sqrt(2 * THETA) * np.random.default_rng(seed).normal(size=n)
    powers = np.stack([np.ones(n), x, x**2, x**3], 1)
    slopes = np.stack([np.zeros(n), np.ones(n), 2 * x, 3 * x**2], 1)
    return powers, slopes[:, :, None]


def test_rates_of_an_ornstein_uhlenbeck_process(x64):
    runs = [
        fit_generator(
            *ornstein_uhlenbeck(20_000, seed), rank=4, diffusion=SIGMA**2 / 2, alpha=0.0
        ).eigenvalues
        for seed in range(20)
    ]
    mean, error = np.mean(runs, 0), np.std(runs, 0) / np.sqrt(20)
    np.testing.assert_allclose(mean[0], 0.0, atol=1e-9)
    assert (np.abs(mean[1:] + THETA * np.arange(1, 4)) < 4 * error[1:]).all()


@pytest.mark.parametrize(
    ("alpha", "shift"), [(0.0, 30.0), (0.3, None), (0.3, 2.0), (None, 5.0), (None, None)]
)
def test_against_a_dense_pencil(alpha, shift, x64):
    rng = np.random.default_rng(3)
    x, jac = rng.normal(size=(12, 4)), rng.normal(size=(12, 4, 2))
    c, e = x.T @ x / 12, 0.7 * np.einsum("nik,njk->ij", jac, jac) / 12
    by = np.trace(e) / np.trace(c) if shift is None else shift
    penalty = alpha or 0.0  # the default is rounding
    values, vectors = scipy.linalg.eigh(c, by * (c + penalty * np.eye(4)) + e)
    vectors = (vectors / np.sqrt(np.sum(vectors * (c @ vectors), 0)))[:, ::-1]
    vectors = vectors * np.sign(np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], 0))
    found = fit_generator(x, jac, rank=3, diffusion=0.7, alpha=alpha, shift=shift)
    np.testing.assert_allclose(found.eigenvalues, (by - 1 / values[::-1])[:3], rtol=1e-11)
    np.testing.assert_allclose(found.coefficients, vectors[:, :3], rtol=1e-10)
    functions = x @ vectors[:, :3]
    support = np.sum(functions**2, 0) ** 2 / np.sum(functions**4, 0)
    np.testing.assert_allclose(found.support, support, rtol=1e-10)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(3.0 ** np.arange(7), np.float64), (10.0 ** np.arange(3, -4, -1), np.float32)],
)
def test_the_default_alpha_bends_no_rate_of_columns_of_unequal_sizes(sizes, dtype):
    """Monomials of one variable: in the units of the largest, alpha made the constant and the slowest rates faster."""
    state, order = np.random.default_rng(0).normal(size=(5000, 1)), np.arange(7)
    x, jac = state**order, (order * state ** np.maximum(order - 1, 0))[:, :, None]
    with jax.enable_x64(True):
        wanted = [np.asarray(part) for part in fit_generator(x, jac, rank=4, alpha=0.0)]
    functions, x, jac = x @ wanted[1], x * sizes, jac * np.asarray(sizes)[:, None]
    with jax.enable_x64(dtype == np.float64):
        tolerance = 1e-9 if dtype == np.float64 else 1e-3
        found = fit_generator(x.astype(dtype), jac.astype(dtype), rank=4)
        np.testing.assert_allclose(found.eigenvalues, wanted[0], rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(found.support, wanted[2], rtol=100 * tolerance)
        np.testing.assert_allclose(
            np.abs(x @ np.asarray(found.coefficients)), np.abs(functions), atol=100 * tolerance
        )
        assert (np.max(found.coefficients, 0) >= -np.min(found.coefficients, 0)).all()
        bent = fit_generator(x.astype(dtype), jac.astype(dtype), rank=4, alpha=1e-6 * np.mean(x**2))
        if (
            sizes[-1] > sizes[0]
        ):  # an alpha that is given is in the units of the features, as they came
            assert np.abs(bent.eigenvalues - wanted[0]).max() > 0.1


def bumps(x, reach, width):
    """30 Gaussian features and their slopes."""
    centres = np.linspace(-reach, reach, 30)
    away = (x[:, None] - centres) / width
    values = np.exp(-(away**2) / 2)
    return values, (-away / width * values)[:, :, None]


def compressed(rows):
    """30 rows with the second moments of many, which are all that rates depend on."""
    squares, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    return np.sqrt(30 * np.maximum(squares, 0))[:, None] * vectors.T


@pytest.mark.slow
def test_thirty_bumps_at_any_alpha():
    """Added to C alone, alpha made directions that the samples hardly hold slow: 0, -.006, -.025, ... for 0, -1, -2."""
    fit = jax.jit(
        lambda x, jac, part: (
            fit_generator(x, jac, rank=4, alpha=part * jnp.sum(x**2) / x.size).eigenvalues
        )
    )
    for width in (0.35, 0.6, 1.0):
        found = []
        for seed in range(10):
            x, jac = bumps(np.random.default_rng(seed).normal(size=20_000), 5.0, width)
            x, jac = (
                np.float32(part) for part in (compressed(x), compressed(jac[:, :, 0])[:, :, None])
            )
            found.append([fit(x, jac, part) for part in (1e-8, 1e-6, 1e-4)])
        found = np.asarray(found, float)  # [draws, alphas, rates]
        assert np.abs(found[:, :, 0]).max() < 0.005
        np.testing.assert_allclose(np.median(found, 0)[:, 1:3], [[-1.0, -2.0]] * 3, rtol=0.05)


def test_few_samples_in_a_tail_are_told_by_their_support(x64):
    """Beyond 4 deviations two samples are left, and a function that is flat at both has no energy."""
    rng = np.random.default_rng(0)
    x, jac = bumps(np.append(np.clip(rng.normal(size=5000), -3, 3), [4.4, 4.45]), 5.0, 0.35)
    found = fit_generator(x, jac, rank=4, alpha=1e-8 * np.mean(x**2))
    slow = np.flatnonzero(found.support < 10)
    assert len(slow) == 1
    assert found.eigenvalues[slow[0]] > -0.9  # a rate that the process does not have
    wide = fit_generator(x, jac, rank=4, alpha=1e-2 * np.mean(x**2))
    assert (wide.support[:3] > 100).all()
    np.testing.assert_allclose(wide.eigenvalues[1], -1, rtol=0.15)


def test_dependent_features_come_last(x64):
    x, jac = ornstein_uhlenbeck(5000)
    double = fit_generator(
        np.concatenate([x, x], 1), np.concatenate([jac, jac], 1), rank=5, alpha=0.0
    )
    single = fit_generator(x, jac, rank=4, alpha=0.0)
    np.testing.assert_allclose(double.eigenvalues[:4], single.eigenvalues, rtol=1e-9, atol=1e-9)
    assert double.eigenvalues[4] < -1e9
    scaled = fit_generator(
        np.concatenate([x, 1e-3 * x], 1), np.concatenate([jac, 1e-3 * jac], 1), rank=5
    )
    np.testing.assert_allclose(scaled.eigenvalues[:4], single.eigenvalues, rtol=1e-9, atol=1e-9)
    assert scaled.eigenvalues[4] < -1e9


def test_units_change_nothing_but_rates():
    x, jac = (np.asarray(part, np.float32) for part in ornstein_uhlenbeck(300))
    wanted = fit_generator(x, jac, rank=3)
    for scale in (1e-30, 1e30):
        unit = np.float32(scale)
        found = fit_generator(x * unit, jac * unit, rank=3)
        np.testing.assert_allclose(found.eigenvalues, wanted.eigenvalues, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(
            found.coefficients * unit, wanted.coefficients, rtol=2e-2, atol=1e-3
        )
        np.testing.assert_allclose(found.support, wanted.support, rtol=1e-2)
    faster = fit_generator(x, jac * np.float32(1e12), rank=3)
    np.testing.assert_allclose(faster.eigenvalues / 1e24, wanted.eigenvalues, rtol=1e-3, atol=1e-4)
    faster = fit_generator(x, jac * np.float32(1e12), rank=3, shift=2e24, alpha=1e-3)
    wanted = fit_generator(x, jac, rank=3, shift=2.0, alpha=1e-3)
    np.testing.assert_allclose(faster.eigenvalues / 1e24, wanted.eigenvalues, rtol=1e-3, atol=1e-4)
    with pytest.raises(ValueError, match="`jac` must have squares, over those of `x`"):
        fit_generator(x, jac * np.float32(1e20), rank=3)


def test_an_alpha_above_the_features_and_a_large_mean_are_named():
    x, jac = (np.asarray(part, np.float32)[:, 1:2] for part in ornstein_uhlenbeck(300))
    for unit, said in ((1, "10"), (256, r"6.55e\+05")):
        with pytest.warns(
            UserWarning, match=rf"`alpha` \({said}\) exceeds the mean eigenvalue of E\[phi phi\^T\]"
        ):
            fit_generator(unit * x, unit * jac, rank=1, alpha=10.0 * unit**2)
    with pytest.warns(UserWarning, match="Column 0 of `x` varies.*take them about their mean"):
        fit_generator(x + np.float32(1e4), jac, rank=1)
