import jax
import jax.numpy as jnp
import numpy as np
import pytest

import koopman

RNG = np.random.default_rng(0)
X, Y = RNG.normal(3.0, 1.0, size=(2, 9, 4))
DISTANCE = np.linalg.norm(X[:, None] - Y[None], axis=-1)
FAR = 5**0.5 * DISTANCE / 2

CASES = [
    (koopman.Linear(), X @ Y.T),
    (koopman.RBF(0.7), np.exp(-(DISTANCE**2) / (2 * 0.7**2))),
    (koopman.Laplacian(0.7), np.exp(-DISTANCE / 0.7)),
    (koopman.Matern(0.7, 0.5), np.exp(-DISTANCE / 0.7)),
    (koopman.Matern(0.7, 1.5), (1 + 3**0.5 * DISTANCE / 0.7) * np.exp(-(3**0.5) * DISTANCE / 0.7)),
    (koopman.Matern(2.0, 2.5), (1 + FAR + FAR**2 / 3) * np.exp(-FAR)),
    (koopman.Polynomial(3, 0.5, 2.0), (0.5 * X @ Y.T + 2) ** 3),
]


@pytest.mark.parametrize(("kernel", "wanted"), CASES, ids=lambda c: type(c).__name__)
def test_closed_forms_and_their_gradients(kernel, wanted, x64):
    np.testing.assert_allclose(kernel(X, Y), wanted, rtol=1e-10)
    np.testing.assert_allclose(jax.jit(lambda x: kernel(x, Y))(X), wanted, rtol=1e-10)
    weight, step = RNG.normal(size=(9, 9)), RNG.normal(size=X.shape)
    value = jax.jit(lambda x: jnp.sum(weight * kernel(x, jnp.asarray(Y))))
    numeric = (value(X + 1e-5 * step) - value(X - 1e-5 * step)) / 2e-5
    np.testing.assert_allclose(jnp.vdot(jax.grad(value)(jnp.asarray(X)), step), numeric, rtol=1e-6)
    # On the diagonal distances are zero, where a root has no finite slope.
    assert np.isfinite(jax.grad(lambda x: jnp.sum(kernel(x, x)))(jnp.asarray(X))).all()
    # States that are not numbers have no kernel value.
    bad = np.float32(np.where(np.arange(9)[:, None] == 4, np.nan, X))
    np.testing.assert_array_equal(
        np.isnan(kernel(bad, np.float32(Y[:3]))).all(1), np.arange(9) == 4
    )


@pytest.mark.parametrize("kind", [koopman.RBF, koopman.Laplacian, koopman.Matern])
@pytest.mark.parametrize("unit", [2.0**-100, 2.0**100])
def test_units_of_length_do_not_matter(kind, unit):
    """Squares of states overflowed or vanished before they were divided by the length scale."""
    x, unit = X.astype(np.float32), np.float32(unit)
    np.testing.assert_allclose(
        kind(jnp.asarray(1.5 * unit))(x * unit, x * unit), kind(1.5)(x, x), rtol=1e-6
    )
    np.testing.assert_allclose(
        koopman.median_distance(x * unit) / unit, koopman.median_distance(x), rtol=1e-6
    )


def test_median_distance():
    with jax.enable_x64(True):
        rows, columns = np.triu_indices(9, 1)
        exact = np.median(np.linalg.norm(X[rows] - X[columns], axis=1))
        np.testing.assert_allclose(koopman.median_distance(X), exact, rtol=1e-10)
    # Squared norms of 1e6 would leave no digit of distances near 1: states are taken about their
    # mean.
    np.testing.assert_allclose(
        koopman.median_distance((X + 1000).astype(np.float32)), exact, rtol=1e-4
    )
    cycle = np.tile(np.linspace(0, 1, 10)[:, None], (40, 1))  # every tenth state is the same
    exact = koopman.median_distance(cycle)
    np.testing.assert_allclose(koopman.median_distance(cycle, max_samples=40), exact, atol=0.15)


@pytest.mark.parametrize(
    "kernel", [koopman.Laplacian(0.1), koopman.Matern(0.1, 2.5), koopman.RBF(0.1)]
)
def test_kernels_of_distances_are_exact_for_close_states(kernel):
    # The root of a cancelled square took up to a tenth off the diagonal.
    x = (RNG.normal(size=(50, 5)) * 10).astype(np.float32)
    near = x + np.float32(2e-3) * RNG.normal(size=x.shape).astype(np.float32)
    with jax.enable_x64(True):
        wanted = kernel(x.astype(float), near.astype(float))
    np.testing.assert_array_equal(np.diagonal(kernel(x, x)), 1.0)
    np.testing.assert_allclose(kernel(x, near), wanted, atol=1e-5)
    np.testing.assert_allclose(jax.jit(kernel)(x, near), wanted, atol=1e-5)
    stacked = jax.vmap(kernel)(np.stack([x, near]), np.stack([near, near]))
    np.testing.assert_allclose(stacked[0], wanted, atol=1e-5)
    assert jnp.isfinite(jax.grad(lambda x: jnp.sum(kernel(x, x)))(x)).all()


@pytest.mark.parametrize("make", [np.int64, np.asarray, jnp.asarray])
def test_numbers_of_numpy_are_static_too(make):
    assert type(koopman.Polynomial(make(2)).degree) is int
    assert (
        type(
            koopman.Matern(
                1.0, make(np.float32(1.5)) if make is not np.int64 else np.float32(1.5)
            ).nu
        )
        is float
    )
    assert koopman.Polynomial(make(2)) == koopman.Polynomial(2)


def test_a_kernel_may_be_symmetric_up_to_rounding():
    """By expanded squares, whose sum rounds in another order for (y, x) than for (x, y)."""
    x = (X + 3).astype(np.float32)

    def expanded(x, y):
        return jnp.exp(-0.5 * ((jnp.sum(x**2, 1)[:, None] - 2 * x @ y.T) + jnp.sum(y**2, 1)[None]))

    values = expanded(x, x)
    assert np.abs(values - values.T).max() > 2 * np.finfo(np.float32).eps
    operator = koopman.fit(koopman.ReducedRank(2, 1e-3), x[:-1], x[1:], kernel=expanded)
    exact = koopman.fit(koopman.ReducedRank(2, 1e-3), x[:-1], x[1:], kernel=koopman.RBF(1.0))
    np.testing.assert_allclose(koopman.predict(operator, x), koopman.predict(exact, x), atol=1e-3)
