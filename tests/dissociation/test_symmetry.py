import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dissociation.rewrites import _null_spaces as null_spaces
from dissociation.rewrites import certify, null_dimension, null_perturb
from dissociation.rewrites._null_spaces import null_spectrum, perturb_in_null_space
from dissociation.rewrites._rewrites import NullSpace


def of_rank(samples, features, rank, seed=0):
    """Whole numbers, so that the rank is exact."""
    rng = np.random.default_rng(seed)
    return (rng.integers(-3, 4, (samples, rank)) @ rng.integers(-3, 4, (rank, features))).astype(
        np.float32
    )


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize(
    ("samples", "features", "rank"), [(50, 9, 6), (5, 9, 5), (9, 9, 9), (4, 9, 0)]
)
def test_dimensions_are_exact(samples, features, rank, chunk, monkeypatch):
    if chunk:
        monkeypatch.setattr(null_spaces, "CHUNK", chunk)
    data = of_rank(samples, features, rank)
    assert null_dimension(data) == (features - rank, rank, features)
    spectrum = null_spectrum(data)
    assert spectrum.basis.shape == (features - rank, features)
    assert spectrum.basis.dtype == np.float64
    np.testing.assert_allclose(
        spectrum.basis @ spectrum.basis.T, np.eye(features - rank), atol=1e-12
    )
    np.testing.assert_allclose(data @ spectrum.basis.T, 0, atol=1e-9)
    wanted = np.zeros(features)
    wanted[: min(samples, features)] = np.linalg.svd(data.astype(float), compute_uv=False)
    np.testing.assert_allclose(spectrum.singular_values, wanted, atol=1e-8)
    assert spectrum.gap > 1e8 if 0 < rank < features else spectrum.gap == np.inf


@pytest.mark.usefixtures("unchecked")
def test_images_keep_their_shape():
    data = of_rank(60, 12, 5)
    for kind in (np.asarray, jnp.asarray):
        images = null_spectrum(kind(data.reshape(60, 3, 4))).basis
        assert images.shape == (7, 3, 4)
        np.testing.assert_array_equal(images.reshape(7, 12), null_spectrum(data).basis)
    with pytest.raises(ValueError, match="`dataset` must be .* .samples, features, ...., got"):
        null_spectrum(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="`rtol` must be non-negative"):
        null_spectrum(np.ones((3, 4)), -1.0)
    with pytest.raises(TypeError, match="outside of jit"):
        jax.jit(null_dimension)(jnp.ones((3, 4)))


def test_weak_directions_are_not_null():
    # Singular values of 1e-9: their squares are lost in the rounding of a Gram matrix, which alone
    # finds rank 4.
    rng = np.random.default_rng(0)
    u, v = (np.linalg.qr(rng.normal(size=(n, 6)))[0] for n in (80, 6))
    values = np.asarray([1, 0.5, 1e-2, 1e-6, 1e-9, 0])
    data = (u * values) @ v.T
    assert null_dimension(data) == (1, 5, 6)
    spectrum = null_spectrum(data)
    np.testing.assert_allclose(spectrum.singular_values[:5], values[:5], rtol=1e-4)
    assert spectrum.gap > 10
    gram = np.linalg.eigvalsh(data.T @ data)
    assert np.sum(gram > 6 * np.finfo(float).eps * gram.max()) == 4
    # The cut-off can be asked for.
    assert null_dimension(data, rtol=1e-5) == (3, 3, 6)
    assert null_dimension(data, 1e-8) == (2, 4, 6)
    assert null_dimension(np.diag([1, 1.2e-10, 0.8e-10])) == (1, 2, 3)  # it is 1e-10


@pytest.fixture(scope="module")
def images():
    """Dark borders, as scanned digits have them, and one pixel that repeats another."""
    rng = np.random.default_rng(3)
    data = np.zeros((300, 8, 8), np.float32)
    data[:, 2:6, 2:6] = rng.integers(0, 256, (300, 4, 4)) / np.float32(255)
    data[:, 5, 5] = data[:, 2, 2]
    return data


def test_noise_lies_in_the_null_space_and_has_the_scale(images, key):
    basis = null_spectrum(images).basis.reshape(49, 64)
    w_in, traces = jnp.zeros((500, 64)), []

    @jax.jit
    def noisy(scale):
        traces.append(scale)
        return perturb_in_null_space(w_in, basis, scale, key=key)

    nothing, noise, more = (np.asarray(noisy(scale)) for scale in (0.0, 0.3, 3.0))
    assert len(traces) == 1
    np.testing.assert_array_equal(nothing, 0)
    np.testing.assert_allclose(10 * noise, more, atol=1e-4)
    np.testing.assert_array_equal(
        perturb_in_null_space(w_in, np.zeros((0, 64)), 1.0, key=key), w_in
    )
    coefficients = noise @ basis.T
    np.testing.assert_allclose(coefficients @ basis, noise, atol=1e-6)
    size = coefficients.size
    assert abs(coefficients.mean()) < 4 * 0.3 / np.sqrt(size)
    assert abs(coefficients.var() / 0.09 - 1) < 4 * np.sqrt(2 / size)
    # Uncorrelated between directions, as the projection of white noise is.
    correlation = np.corrcoef(coefficients.T) - np.eye(49)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(500)


def moved(model, basis, key):
    return null_perturb(
        NullSpace(".layers[0].weight", (1,), 2, basis.reshape(len(basis), -1)), 0.1, key=key
    )(model)


def test_noise_does_not_depend_on_the_basis_that_lapack_returns(images, key, monkeypatch):
    """Its eigenvectors are arbitrary in sign, and within the null space by any rotation."""
    eigh, rng = np.linalg.eigh, np.random.default_rng(0)

    def of_another_processor(matrix):
        values, vectors = eigh(matrix)
        null = np.flatnonzero(values <= 1e-15 * values[-1])
        vectors[:, null] = (
            vectors[:, null] @ np.linalg.qr(rng.normal(size=(len(null), len(null))))[0]
        )
        return values, vectors * rng.choice([-1, 1], len(values))

    bases = [null_spectrum(images).basis]
    monkeypatch.setattr(np.linalg, "eigh", of_another_processor)
    bases.append(null_spectrum(images).basis)
    bases.append(
        np.concatenate([bases[1], np.zeros((3, 8, 8))])
    )  # as bases of several members are padded
    model = eqx.nn.MLP(64, 4, 5, 1, key=key)
    weights = [moved(model, jnp.asarray(basis), key).layers[0].weight for basis in bases[:2]]
    weights.append(
        jax.jit(perturb_in_null_space)(
            model.layers[0].weight, bases[2].reshape(-1, 64), 0.1, key=key
        )
    )
    assert np.abs(bases[1] - bases[0]).max() > 0.1
    assert np.abs(weights[0] - model.layers[0].weight).max() > 0.1
    for other in weights[1:]:
        np.testing.assert_allclose(other, weights[0], atol=1e-6)


def test_a_singular_value_at_the_cut_is_kept_whatever_its_rounding():
    rng = np.random.default_rng(1)
    left, right = (np.linalg.qr(rng.normal(size=(8, 8)))[0] for _ in range(2))
    for ratio in (1e-3, 1e-10):
        for end, rank in ((1.0, 8), (0.999, 7)):
            for turn in (np.eye(8), left, left[::-1]):
                data = turn * [1, 1, 1, 1, 1, 1, 1, end * ratio] @ right
                assert null_spectrum(data, ratio).rank == rank


def test_noise_refuses_directions_that_are_not_orthonormal(images, key):
    basis = null_spectrum(images).basis.reshape(49, 64)
    for directions in (2 * basis, np.concatenate([basis, basis[:1]]), basis * np.nan):
        with pytest.raises(
            ValueError, match="`basis` must hold orthonormal directions, got inner products"
        ):
            perturb_in_null_space(jnp.ones((3, 64)), directions, 0.1, key=key)


def test_the_null_space_does_not_depend_on_units():
    data = np.random.default_rng(0).normal(size=(5, 8))
    plain = null_spectrum(data)
    for factor in (1e200, 1e-200):
        scaled = null_spectrum(factor * data)
        assert plain.rank == scaled.rank == 5
        np.testing.assert_allclose(
            scaled.singular_values[:5], factor * plain.singular_values[:5], rtol=1e-12
        )
        np.testing.assert_allclose(scaled.basis @ data.T, 0, atol=1e-13)
    assert null_spectrum(np.zeros((5, 8))).rank == 0
    assert null_spectrum(np.full((5, 8), -128, np.int8)).rank == 1


@pytest.mark.slow
@pytest.mark.skipif("DISSOCIATION_DATA" not in os.environ, reason="DISSOCIATION_DATA is not set")
def test_mnist(key):
    from dissociation.data import mnist_data

    train, _, test, _ = mnist_data()
    assert null_dimension(test) == (123, 661, 784)
    assert null_dimension(train) == (72, 712, 784)
    both = np.concatenate([train, test])
    spectrum = null_spectrum(both)
    assert (len(spectrum.basis), spectrum.rank) == (71, 713)
    assert spectrum.gap > 1e5
    model = eqx.nn.MLP(784, 10, 1024, 1, use_bias=False, key=key)
    certificate = eqx.filter_jit(certify)(model, moved(model, spectrum.basis, key), both[::10])
    assert bool(certificate.kept(1e-4)), certificate
    # The control: the 180 directions that the float32 cut-off calls null on the test images.
    values, vectors = np.linalg.eigh(test.T.astype(float) @ test)
    wrong = vectors.T[values < (len(test) * np.finfo(np.float32).eps) ** 2 * values[-1]].astype(
        np.float32
    )
    assert len(wrong) > 150
    published = moved(model, wrong, key)
    assert not bool(eqx.filter_jit(certify)(model, published, test).kept(1e-2))
