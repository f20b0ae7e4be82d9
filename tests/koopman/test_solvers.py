import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman._operators._diagnostics import warn_unconverged
from koopman._operators._solvers import find_eigenpairs, find_left_vectors


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
