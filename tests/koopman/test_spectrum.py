import re
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from trajectories import follow

from koopman import (
    RBF,
    PrincipalComponents,
    ReducedRank,
    Ridge,
    decompose,
    eigenvalues,
    fit,
    lagged_pairs,
    left_eigenfunctions,
    modes,
    predict,
    right_eigenfunctions,
    singular_values,
)


def rotation(n=300, angle=0.3, decay=0.95, noise=0.1, seed=0):
    """A damped rotation, a real decay, and noise: one conjugate pair and one real eigenvalue."""
    turn = decay * np.asarray([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = np.block([[turn, np.zeros((2, 1))], [np.zeros((1, 2)), np.full((1, 1), 0.6)]])
    return follow(matrix, n, noise, np.random.default_rng(seed))


LARGE_ALPHA = pytest.mark.filterwarnings("ignore:.*suppresses .* that predict")


def fitted_core(operator):
    """M, from which K came by undoing shrinkage."""
    undone = sum(np.linalg.matrix_power(np.asarray(operator.penalty), k) for k in range(4))
    return np.linalg.solve(undone, operator.core)


def test_a_cycle_has_the_roots_of_unity(x64):
    cycle = np.eye(5)[np.arange(51) % 5]
    operator = fit(Ridge(0.0), cycle[:-1], cycle[1:])
    roots = np.exp(2j * np.pi * np.asarray([0, 1, -1, 2, -2]) / 5)
    np.testing.assert_allclose(eigenvalues(operator), roots, atol=1e-12)
    found = decompose(operator)
    np.testing.assert_allclose(found.residuals, 0, atol=1e-7)
    np.testing.assert_allclose(found.condition, 1, atol=1e-9)
    np.testing.assert_allclose(singular_values(operator), 1, atol=1e-12)


@LARGE_ALPHA
def test_eigenfunctions_obey_their_equations(x64):
    x, y = (np.asarray(a) for a in lagged_pairs(rotation()))
    operator = fit(Ridge(1e-2), x, y)
    found = decompose(operator)
    np.testing.assert_allclose(fitted_core(operator), operator.cross_gram, atol=1e-12)
    encode, dual = (np.asarray(part.matrix) for part in (operator.encode, operator.dual))
    values = np.asarray(found.eigenvalues)
    matrix = encode @ dual.T  # G
    weights = encode @ np.asarray(found.right)  # psi = phi(x) weights
    np.testing.assert_allclose(matrix @ weights, weights * values, atol=1e-10)
    duals = dual @ (np.asarray(found.left) / values)
    np.testing.assert_allclose(matrix.T @ duals, duals * values, atol=1e-10)
    np.testing.assert_allclose(duals.T @ weights, np.eye(3), atol=1e-10)
    right = np.asarray(right_eigenfunctions(operator, x, found))
    left = left_eigenfunctions(operator, x, found)
    np.testing.assert_allclose(right, x @ weights, atol=1e-10)
    np.testing.assert_allclose(left, x @ duals, atol=1e-10)
    off = np.asarray(right_eigenfunctions(operator, y, found)) - values * right
    np.testing.assert_allclose(found.residuals, np.sqrt(np.mean(np.abs(off) ** 2, 0)), rtol=1e-8)
    np.testing.assert_allclose(np.mean(np.abs(right) ** 2, 0), 1, atol=1e-10)
    amplitudes = np.asarray(modes(operator, spectrum=found).amplitudes)
    largest = np.take_along_axis(amplitudes, np.abs(amplitudes).argmax(1)[:, None], 1)
    np.testing.assert_allclose(largest, np.abs(largest), atol=1e-12)
    np.testing.assert_allclose(eigenvalues(operator), values, atol=1e-12)
    for steps in (1, 4):  # one operator: what modes sum to is the forecast
        ahead = (right * values ** (steps - 1)) @ amplitudes
        np.testing.assert_allclose(ahead, predict(operator, x, steps), atol=1e-10)
        np.testing.assert_allclose(ahead, x @ np.linalg.matrix_power(matrix, steps), atol=1e-10)


@LARGE_ALPHA
@pytest.mark.parametrize(
    ("estimator", "rank", "part", "kernel"),
    [
        (Ridge, 3, 0.05, None),
        (Ridge, 3, 1e-3, None),
        (partial(PrincipalComponents, 2), 2, 0.05, None),
        (partial(ReducedRank, 2), 2, 0.05, None),
        (partial(ReducedRank, 4), 4, 1e-3, RBF(2.0)),
    ],
)
def test_shrinkage_is_undone(estimator, rank, part, kernel, x64):
    """Against least squares on the span of the latent functions, by how much `alpha` had moved the eigenvalues."""
    x, y = (np.asarray(a) for a in lagged_pairs(rotation(n=150)))
    second = 0.05 if kernel else np.linalg.eigvalsh(x.T @ x / len(x))[-2]
    operator = fit(estimator(alpha=part * second), x, y, kernel=kernel)
    now, later = operator.encode(x), operator.encode(y)
    exact = np.linalg.eigvals(np.linalg.lstsq(now, later, rcond=None)[0])
    fitted = np.linalg.eigvals(fitted_core(operator))
    exact, fitted = (v[np.lexsort((-v.imag, -np.abs(v).round(9)))][:2] for v in (exact, fitted))
    undone = decompose(operator)
    before, after = np.abs(fitted - exact), np.abs(undone.eigenvalues[:2] - exact)
    assert (after < 0.02 * before).all()
    # To first order, the shrinkage that is told is the one that was there.
    size, penalised = (
        (undone.right.conj() * (m @ undone.right)).sum(0).real
        for m in (np.eye(rank), operator.penalty)
    )
    shares = (penalised / size)[:2]
    np.testing.assert_allclose(1 - undone.shrinkage[:2], shares**4, rtol=1e-6, atol=1e-14)
    np.testing.assert_allclose(before / np.abs(exact), shares, rtol=0.3)


def test_nothing_grows_where_alpha_outweighs_the_data(x64):
    """Least squares on 40 samples' own kernel functions is noise; undoing stays within a factor of four of the fit."""
    x, y = (np.asarray(a) for a in lagged_pairs(rotation(n=40)))
    operator = fit(Ridge(0.5), x, y, kernel=RBF(1.0))
    found = decompose(operator)
    assert np.abs(found.eigenvalues).max() < 1
    assert found.shrinkage.min() < 0.1
    np.testing.assert_array_less(np.linalg.norm(operator.cross_gram, 2), 1)
    assert (
        np.abs(np.linalg.eigvals(np.linalg.pinv(operator.gram_x) @ operator.cross_gram)).max() > 1
    )


@LARGE_ALPHA
def test_order_of_a_traced_rank_is_that_of_the_rank(x64):
    """Columns beyond it are zero, and stay so when shrinkage is undone."""
    x, y = (np.asarray(a) for a in lagged_pairs(rotation()))
    masked = jax.jit(lambda rank: decompose(fit(ReducedRank(rank, 0.05), x, y)))(2)
    cut = decompose(fit(ReducedRank(2, 0.05), x, y))
    np.testing.assert_allclose(masked.eigenvalues, [*cut.eigenvalues, 0], atol=1e-12)
    for name in ("residuals", "shrinkage", "condition"):
        np.testing.assert_allclose(getattr(masked, name)[:2], getattr(cut, name), rtol=1e-9)


def test_residuals_unmask_spurious_eigenvalues(x64):
    # Without noise the damped rotation's eigenpairs are exact; a feature that is noise adds one
    # that is not.
    path = np.concatenate([rotation(noise=0.0), np.random.default_rng(1).normal(size=(301, 1))], 1)
    found = decompose(fit(Ridge(0.0), *lagged_pairs(path)))
    exact = np.argsort(found.residuals)[:3]
    assert (found.residuals[exact] < 1e-6).all()
    assert found.residuals[np.setdiff1d(np.arange(4), exact)[0]] > 0.5
    np.testing.assert_allclose(
        np.sort(np.abs(found.eigenvalues[exact])), [0.6, 0.95, 0.95], atol=1e-8
    )


def test_order_keeps_pairs_together_and_is_stable():
    x, y = (np.asarray(a, np.float32) for a in lagged_pairs(rotation()))
    orders = []
    for seed in range(5):
        turn = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0].astype(np.float32)
        values = np.asarray(eigenvalues(fit(Ridge(), x @ turn, y @ turn)))
        assert values[0].imag > 0
        np.testing.assert_array_equal(values[1], values[0].conj())
        orders.append(values)
    np.testing.assert_allclose(orders, np.broadcast_to(orders[0], (5, 3)), atol=1e-4)


def test_modes_tell_times_and_growth_has_a_rate(x64):
    operator = fit(Ridge(0.0), *lagged_pairs(rotation(noise=0.0)))
    found = modes(operator, time_step=0.5)
    np.testing.assert_allclose(found.frequency, [0.3 / np.pi, 0.3 / np.pi, 0.0], atol=1e-9)
    np.testing.assert_allclose(found.implied_time_scale[0], -0.5 / np.log(0.95), rtol=1e-7)
    np.testing.assert_allclose(found.half_life[2], 0.5 * np.log(2) / -np.log(0.6), rtol=1e-7)
    # Grows, decays and vanishes at once.
    found = modes(
        eqx.tree_at(lambda o: o.core, operator, jnp.diag(jnp.asarray([1.5, -0.8, 0.0]))),
        time_step=0.5,
    )
    np.testing.assert_allclose(found.growth, [2 * np.log(1.5), 2 * np.log(0.8), -np.inf], rtol=1e-9)
    decay = -0.5 / np.log(0.8)
    np.testing.assert_allclose(found.implied_time_scale, [np.inf, decay, 0], rtol=1e-9)
    np.testing.assert_allclose(found.half_life, [np.inf, np.log(2) * decay, 0], rtol=1e-9)


def test_shares_of_modes_have_a_sum(x64):
    # Cosines of amplitudes 3 and 1 hold 9 and 1 of 10 parts, products of them with 1 % of the
    # amplitude next to nothing, although they come first by modulus; a constant has no part in what
    # varies.
    t = np.arange(2000)
    one, two = np.exp(1j * t * 0.5), np.exp(1j * t * 1.1)
    parts = np.stack([one.real, one.imag, two.real, two.imag, (1 + 1e-9) ** t], 1)
    parts = np.concatenate(
        [parts, (1 + 1e-7) ** t[:, None] * np.stack([(one * two).real, (one * two).imag], 1)], 1
    )
    series = parts @ np.asarray([3, 0, 1, 0, 5, 0.03, 0])
    operator = fit(Ridge(0.0), parts[:-1], parts[1:], observable=series[1:])
    found = modes(operator)
    np.testing.assert_allclose(jnp.sum(found.share), 1, rtol=1e-9)
    np.testing.assert_allclose(jnp.sum(found.share[:2]), 1e-4, rtol=0.1)
    angle = 2 * np.pi * found.frequency
    for wanted, share in ((0.5, 0.9), (1.1, 0.1), (0.0, 0.0)):
        own = np.abs(angle - wanted) < 1e-6
        np.testing.assert_allclose(np.sum(found.share, where=own), share, atol=1e-2)


@LARGE_ALPHA
def test_host_and_device_routes_agree(monkeypatch):
    # Where a backend has no eigendecomposition, the host's serves, under jit and vmap too.
    x, y = (np.asarray(a, np.float32) for a in lagged_pairs(rotation()))
    operators = [fit(Ridge(a), x, y) for a in (1e-3, 0.05)]
    here = [decompose(o) for o in operators]
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *operators)
    mapped = jax.jit(jax.vmap(decompose))(stacked)
    for index, one in enumerate(here):
        np.testing.assert_allclose(mapped.eigenvalues[index], one.eigenvalues, atol=1e-5)
        np.testing.assert_allclose(mapped.residuals[index], one.residuals, atol=1e-4)


@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_shares_do_not_depend_on_the_unit_of_the_observable(size):
    x = np.random.default_rng(0).normal(size=(200, 2)).astype(np.float32)
    y = x * np.float32([[0.9, 0.5]])
    wanted, found = (
        modes(fit(Ridge(), x, y, observable=np.float32(unit) * y)).share for unit in (1, size)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_modes_are_printed_with_a_line_for_each_pair():
    angle = 0.3
    matrix = np.diag([0.0, 0.0, 0.8])
    matrix[:2, :2] = 0.9 * np.array(
        [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    )
    states = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    found = modes(fit(Ridge(), states, states @ matrix.T.astype(np.float32)), time_step=0.5)
    title, columns, pair, single = repr(found).splitlines()
    assert "time_step" in title
    assert columns.split() == ["growth", "frequency", "half-life", "share"]
    np.testing.assert_allclose(
        [*map(float, pair.split())][:2], [np.log(0.9) / 0.5, angle / np.pi], rtol=1e-3
    )
    np.testing.assert_allclose(
        [*map(float, single.split())][:3],
        [np.log(0.8) / 0.5, 0, 0.5 * np.log(0.5) / np.log(0.8)],
        rtol=1e-3,
    )
    assert float(pair.split()[3]) + float(single.split()[3]) == pytest.approx(1, abs=1e-3)
    many = fit(
        Ridge(),
        np.random.default_rng(1).normal(size=(100, 40)),
        np.random.default_rng(2).normal(size=(100, 40)),
    )
    assert re.search(r"and \d+ eigenvalues more$", repr(modes(many)))
