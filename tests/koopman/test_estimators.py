from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman import RBF, PrincipalComponents, ReducedRank, Ridge, diagnose, fit, risk
from koopman._operators._estimators import Estimator
from koopman._operators._findings import unconverged, warn_of
from koopman._operators._subspaces import Basis, find_eigenpairs, find_left_vectors

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 4)).astype(np.float32)
Y = (0.7 * X + 0.3 * RNG.normal(size=X.shape)).astype(np.float32)
ALPHAS = jnp.asarray([0.05, 0.1, 0.2])


def test_a_rank_is_static_and_alpha_is_not():
    traces = []

    @jax.jit
    def core(estimator):
        traces.append(0)
        return fit(estimator, X, Y).core

    assert [core(ReducedRank(2, alpha)).shape for alpha in (0.1, 0.2)] == [(2, 2)] * 2
    assert len(traces) == 1
    assert core(ReducedRank(3, 0.1)).shape == (3, 3)
    masked = jax.vmap(partial(PrincipalComponents, alpha=0.1))(jnp.asarray([1, 3]))

    def error(estimator):
        return risk(fit(estimator, X, Y), X, Y)

    swept = jax.jit(jax.vmap(error))(masked)
    wanted = [jax.jit(error)(PrincipalComponents(rank, 0.1)) for rank in (1, 3)]
    np.testing.assert_allclose(swept, wanted, rtol=1e-4)
    one = jax.tree.map(lambda leaf: leaf[1], masked)  # known again, and static
    assert jax.eval_shape(lambda: fit(one, X, Y).core).shape == (3, 3)


class Coordinates(Estimator):
    """Ridge regression on the first features: an estimator of one's own."""

    def __init__(self, rank, alpha=None):
        super().__init__(rank, alpha, "dense")

    def features(self, problem):
        """The first columns, whitened."""
        first = jnp.eye(problem.x.shape[1])[:, : problem.size]
        cov = first.T @ problem.x.T @ problem.x @ first + problem.alpha * jnp.eye(problem.size)
        vectors = first @ jnp.linalg.inv(jnp.linalg.cholesky(cov)).T
        return Basis(vectors, jnp.ones(problem.size), jnp.zeros(0), jnp.trace(cov))

    def features_jvp(self, problem, tangent, found):
        """None yet."""
        raise NotImplementedError

    kernel = kernel_jvp = features_jvp


def test_a_new_estimator_is_one_class():
    operator = fit(Coordinates(2, 0.1), X, Y)
    wanted = fit(Ridge(0.1), X[:, :2], Y[:, :2])
    found = operator.encode.matrix @ operator.dual.matrix.T
    np.testing.assert_allclose(
        found[:2, :2], wanted.encode.matrix @ wanted.dual.matrix.T, atol=1e-5
    )
    np.testing.assert_allclose(found[2:], 0, atol=1e-7)
    with pytest.raises(TypeError, match="abstract"):
        Estimator(None, None, None)


@pytest.mark.parametrize("kernel", [None, RBF(3.0)])
@pytest.mark.parametrize("rank", [PrincipalComponents, ReducedRank])
def test_an_iterative_solver_is_heard_where_numbers_are_known(kernel, rank):
    """What it warns of is its residual, which a compiled program hands out."""
    x = np.random.default_rng(0).normal(size=(120, 60)).astype(np.float32)
    spectral = kernel is not None and rank is ReducedRank
    operator = fit(
        rank(2, 1e-3, solver="spectral" if spectral else "krylov"), x[:-1], x[1:], kernel=kernel
    )
    assert 0 < operator.fitting.residual < 1e-3
    late = eqx.tree_at(lambda o: o.fitting.residual, operator, jnp.asarray(0.1, jnp.float32))
    assert "unconverged" in {finding.name for finding in diagnose(late, x[:-1], x[1:])}


def test_a_solver_that_does_not_converge_says_so(x64):
    values = jnp.linspace(1.0, 0.9, 400)[:, None]
    eps = float(jnp.finfo(float).eps)
    late = find_eigenpairs(lambda b: values * b, 400, 2, jnp.float64, max_restarts=1)
    with pytest.warns(UserWarning, match="ended with a relative residual of"):
        warn_of(unconverged(late.residual, eps))
    assert not [
        *unconverged(find_eigenpairs(lambda b: values * b, 400, 2, jnp.float64).residual, eps)
    ]


@pytest.mark.parametrize("solver", ["auto", "dense", "krylov", "randomized"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_matrix_that_is_not_finite_gives_nan(solver, bad):
    matrix = np.random.default_rng(0).normal(size=(60, 40)).astype(np.float32)
    matrix[3, 5] = bad
    for found in find_left_vectors(jnp.asarray(matrix), 3, solver=solver)[:3]:
        assert np.isnan(found).all()
