import jax
import jax.numpy as jnp
import numpy as np
import pytest
from differences import directional

from dissociation._core.linalg import nuclear_norm, positive_inverse, psd_power


@pytest.mark.parametrize("power", [-1, 1 / 3])
def test_derivative_along_directions_that_keep_a_deficient_rank(power, x64):
    factor, direction = np.random.default_rng(5).normal(size=(2, 5, 3))
    weights = np.random.default_rng(7).normal(size=(5, 5))
    total = lambda factor: jnp.sum(weights * psd_power(factor @ factor.T, power))  # noqa: E731
    gradient = jax.grad(total)(jnp.asarray(factor))
    expected = directional(total, factor, direction, 1e-4)
    np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=1e-6)
    # In a direction that raises the rank, where the finite difference has no limit, it stays
    # finite.
    tangent = jax.jvp(
        lambda m: psd_power(m, power), (jnp.asarray(factor @ factor.T),), (jnp.eye(5),)
    )[1]
    assert np.abs(tangent).max() < 100


def test_close_eigenvalues_in_single_precision():
    """The derivative of the inverse is -M^-1 dM M^-1; quotients of differences lose it where eigenvalues are close."""
    direction = np.random.default_rng(8).normal(size=(4, 4)).astype(np.float32)
    direction = direction + direction.T
    values = (1.37 + np.array([0, 1.2e-7, 3.6e-7, 1])).astype(np.float32)  # three neighbours
    matrix = jnp.diag(jnp.asarray(values))
    expected = -direction / values[:, None] / values[None]
    tangent = jax.jvp(lambda m: psd_power(m, -1), (matrix,), (direction,))[1]
    np.testing.assert_allclose(tangent, expected, atol=1e-5)
    # Scales far from one neither overflow nor underflow.
    for scale in (1e-12, 1e12):
        tangent = jax.jvp(lambda m: psd_power(m, -0.5), (scale * matrix,), (scale * direction,))[1]
        reference = jax.jvp(lambda m: psd_power(m, -0.5), (matrix,), (direction,))[1]
        np.testing.assert_allclose(
            tangent, reference * scale**-0.5, rtol=1e-4, atol=1e-5 * scale**-0.5
        )


def test_inverse_of_an_indefinite_matrix_is_undefined():
    assert np.isnan(positive_inverse(-jnp.eye(3))).all()
    with pytest.raises(ValueError, match=r"`matrix` must be .* \[\.\.\., n, n\], got"):
        positive_inverse(jnp.ones((2, 3, 8)))


def test_nuclear_norm_where_singular_values_coincide_or_vanish():
    turn = np.linalg.qr(np.random.default_rng(9).normal(size=(4, 4)))[0]
    ones = np.ones((3, 3))
    for matrix, slope in ((3 * turn, turn), (np.zeros((2, 3)), np.zeros((2, 3))), (ones, ones / 3)):
        np.testing.assert_allclose(jax.grad(nuclear_norm)(jnp.asarray(matrix)), slope, atol=1e-6)
    left, direction = np.random.default_rng(10).normal(size=(2, 5, 2))
    right = np.random.default_rng(11).normal(size=(2, 4))
    with jax.enable_x64(True):
        gradient = jax.grad(lambda factor: nuclear_norm(factor @ right))(jnp.asarray(left))
        expected = directional(lambda factor: nuclear_norm(factor @ right), left, direction, 1e-4)
        np.testing.assert_allclose(jnp.sum(gradient * direction), expected, rtol=1e-7)
