import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman._operators._diagnostics import warn_unconverged
from koopman._operators._solvers import find_eigenpairs, find_left_vectors


def matrix_of(values, rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    left, right = (np.linalg.qr(rng.normal(size=(n, len(values))))[0] for n in (rows, columns))
    return left, (left * values) @ right.T


def test_krylov_converges_where_power_iterations_have_not():
    # A slowly falling spectrum: four power iterations are 1 % off, the Krylov space goes on to rounding.
    with jax.enable_x64(True):
        values = np.linspace(1.0, 0.9, 100)
        _, matrix = matrix_of(values, 120, 110)
        found = {s: find_left_vectors(jnp.asarray(matrix), 3, solver=s).values for s in ("krylov", "randomized")}
        np.testing.assert_allclose(found["krylov"], values[:3], rtol=1e-10)
        assert np.abs(found["randomized"] / values[:3] - 1).max() > 1e-3


@pytest.mark.parametrize(("size", "number"), [(1, 1), (8, 2), (8, 8), (13, 3), (40, 20)])
def test_small_operators(size, number):
    # Of 8 rows a block of 2 + 4 leaves no room for a second one, and a space of one block never grows.
    spectra = np.stack([np.arange(size, 0, -1), np.linspace(1, 0.97, size), 0.5 ** np.arange(size)])

    for inner, factor in ((None, 1), (lambda block: 2 * block, 2)):

        def solve(values, inner=inner):
            return find_eigenpairs(lambda b: values[:, None] * b, size, number, jnp.float32, inner)

        for values, vectors, found in zip(
            spectra, *jax.jit(jax.vmap(solve))(jnp.asarray(spectra, jnp.float32))[:2], strict=True
        ):
            np.testing.assert_allclose(found, factor * values[:number], atol=2e-5 * values[0])
            off = factor * values[:, None] * vectors - vectors * found[None]
            assert np.abs(off).max() < 5e-5 * values[0]


def test_a_solver_that_does_not_converge_says_so():
    with jax.enable_x64(True):
        values = jnp.linspace(1.0, 0.9, 400)[:, None]
        eps = float(jnp.finfo(float).eps)
        with pytest.warns(UserWarning, match="ended with a relative residual of"):
            warn_unconverged(find_eigenpairs(lambda b: values * b, 400, 2, jnp.float64, max_restarts=1).residual, eps)
        warn_unconverged(find_eigenpairs(lambda b: values * b, 400, 2, jnp.float64).residual, eps)


@pytest.mark.parametrize("solver", ["auto", "dense", "krylov", "randomized"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_matrix_that_is_not_finite_gives_nan(solver, bad):
    matrix = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)
    matrix[3, 5] = bad
    for found in find_left_vectors(jnp.asarray(matrix), 3, solver=solver)[:3]:
        assert np.isnan(found).all()
