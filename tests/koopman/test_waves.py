import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman.datasets.waves import travelling_waves, wave_spectrum
from koopman.estimators import PrincipalComponents
from koopman.operators import fit
from koopman.pairs import lagged_pairs
from koopman.spectrum import modes

SETTINGS = {
    "grid_shape": (12, 10),
    "wavenumbers": ((1, 0), (0, 2), (2, -1)),
    "frequencies": (1.0, 2.5, 4.0),
    "growth_rates": (0.0, -0.05, -0.2),
    "time_step": 0.3,
}


def regression_eigenvalues(snapshots, rank):
    """Of the linear map from each snapshot to the next, on the leading singular directions."""
    u, s, vt = np.linalg.svd(snapshots[:-1].T, full_matrices=False)
    values = np.linalg.eigvals(u[:, :rank].T @ snapshots[1:].T @ vt[:rank].T / s[:rank])
    return values, s


def assert_same_spectrum(first, second, atol):
    rest = list(second)
    assert len(first) == len(rest)
    for value in first:
        nearest = int(np.argmin(np.abs(np.array(rest) - value)))
        assert abs(rest.pop(nearest) - value) < atol


def test_spectrum_is_sorted_and_paired():
    truth = wave_spectrum(**SETTINGS)
    expected = [0 + 1j, 0 - 1j, -0.05 + 2.5j, -0.05 - 2.5j, -0.2 + 4j, -0.2 - 4j]
    np.testing.assert_allclose(truth.exponents, expected)
    np.testing.assert_allclose(truth.eigenvalues, np.exp(0.3 * np.array(expected)))
    flat = truth.modes.reshape(6, -1)
    np.testing.assert_allclose(flat.conj() @ flat.T / 120, np.eye(6), atol=1e-13)


def test_each_mode_evolves_by_its_eigenvalue(key):
    truth = wave_spectrum(**SETTINGS)
    with jax.enable_x64(True):
        fields = np.asarray(travelling_waves(20, key=key, amplitudes=(1.0, 2.0, 0.5), **SETTINGS))
    assert fields.shape == (21, 12, 10)
    amplitudes = np.einsum("tab,kab->tk", fields, truth.modes.conj()) / 120
    expected = amplitudes[:1] * truth.eigenvalues[None, :] ** np.arange(21)[:, None]
    np.testing.assert_allclose(amplitudes, expected, atol=1e-12)
    np.testing.assert_allclose(np.abs(amplitudes[0]), [0.5, 0.5, 1, 1, 0.25, 0.25], rtol=1e-12)
    rebuilt = np.einsum("tk,kab->tab", amplitudes, truth.modes)
    np.testing.assert_allclose(rebuilt, fields, atol=1e-12)


def test_regression_on_fields_finds_the_eigenvalues(key):
    with jax.enable_x64(True):
        fields = np.asarray(travelling_waves(20, key=key, **SETTINGS)).reshape(21, -1)
    values, singular = regression_eigenvalues(fields, 6)
    assert singular[6] < 1e-10 * singular[0]
    assert_same_spectrum(values, wave_spectrum(**SETTINGS).eigenvalues, 1e-10)


def test_modes_of_an_operator_are_the_waves(key):
    truth = wave_spectrum(**SETTINGS)
    with jax.enable_x64(True):
        fields = travelling_waves(20, key=key, **SETTINGS).reshape(21, -1)
        found = modes(
            jax.jit(lambda x, y: fit(PrincipalComponents(6, 0.0), x, y))(*lagged_pairs(fields)), time_step=0.3
        )
    np.testing.assert_allclose(found.frequency, np.abs(truth.exponents.imag) / (2 * np.pi), rtol=1e-8)
    np.testing.assert_allclose(found.implied_time_scale[2:], -1 / truth.exponents.real[2:], rtol=1e-7)
    np.testing.assert_allclose(found.half_life[2:], -np.log(2) / truth.exponents.real[2:], rtol=1e-7)
    assert np.abs(found.implied_time_scale[:2]).min() > 1e6  # the first wave does not decay
    # A mode's amplitude is the wave itself, up to a complex factor; which of a pair comes first is a convention.
    flat, waves = np.asarray(found.amplitudes), truth.modes.reshape(6, -1)
    overlap = np.abs(flat.conj() @ waves.T) / np.linalg.norm(flat, axis=1)[:, None] / np.linalg.norm(waves, axis=1)
    np.testing.assert_allclose(overlap, np.eye(6), atol=1e-7)


def test_standing_oscillation_needs_two_fields(key):
    """Opposite waves of one frequency: one field does not determine the next, two in succession do."""
    settings = {
        "grid_shape": (16,),
        "wavenumbers": ((1,), (-1,)),
        "frequencies": (2.0, 2.0),
        "growth_rates": (-0.1, -0.1),
        "time_step": 0.2,
    }
    with jax.enable_x64(True):
        fields = np.asarray(travelling_waves(30, key=key, **settings))
    singular = np.linalg.svd(fields, compute_uv=False)
    assert singular[1] < 1e-10 * singular[0]
    alone, _ = regression_eigenvalues(fields, 1)
    pair = np.exp(0.2 * np.array([-0.1 + 2j, -0.1 - 2j]))
    assert_same_spectrum(wave_spectrum(**settings).eigenvalues, [*pair, *pair], 1e-13)
    assert np.abs(alone[0] - pair).min() > 0.1
    delayed, _ = regression_eigenvalues(np.concatenate([fields[:-1], fields[1:]], axis=1), 2)
    assert_same_spectrum(delayed, pair, 1e-9)


def test_waves_move_along_their_wavenumber(key):
    """One grid point per step: the field is rolled."""
    speed = {"frequencies": (2 * np.pi,), "growth_rates": (0.0,), "time_step": 1 / 16}
    fields = travelling_waves(5, key=key, grid_shape=(16, 4), wavenumbers=((1, 0),), **speed)
    expected = np.stack([np.roll(fields[0], t, axis=0) for t in range(6)])
    np.testing.assert_allclose(fields, expected, atol=1e-5)
    assert np.abs(np.roll(fields[0], -1, axis=0) - fields[1]).max() > 0.1
    still = travelling_waves(3, key=key, frequencies=(0.0,) * 3, growth_rates=(-0.5,) * 3)
    np.testing.assert_allclose(still, still[:1] * np.exp(-0.05 * np.arange(4))[:, None, None], atol=1e-5)


def test_noise_has_its_deviation(key):
    clean, noisy = (travelling_waves(30, key=key, noise=noise) for noise in (0.0, 0.3))
    residual = np.asarray(noisy - clean, np.float64)
    n = residual.size
    assert abs(residual.std() / 0.3 - 1) < 4 / np.sqrt(2 * n)
    assert abs(np.mean(residual[:, 1:] * residual[:, :-1])) < 4 * 0.09 / np.sqrt(n)


def test_plain_jit_vmap_and_loop_agree(key):
    keys = jax.random.split(key, 3)
    rates = jnp.array([[0.5, 1.0, 2.0], [1.0, 1.0, 1.0], [3.0, 0.0, 1.0]])

    def one(key, frequencies):
        return travelling_waves(4, key=key, grid_shape=(6, 6), frequencies=frequencies, noise=0.1)

    looped = jnp.stack([one(k, r) for k, r in zip(keys, rates, strict=True)])
    np.testing.assert_allclose(jax.vmap(one)(keys, rates), looped, atol=1e-5)
    np.testing.assert_allclose(jax.jit(jax.vmap(one))(keys, rates), looped, atol=1e-5)
    batch = travelling_waves(4, key=key, num_trajectories=3, grid_shape=(6, 6), noise=0.1)
    np.testing.assert_allclose(batch[1], travelling_waves(4, key=keys[1], grid_shape=(6, 6), noise=0.1), atol=1e-5)
    assert np.abs(batch[0] - batch[1]).max() > 0.1


def test_wrong_arguments_are_named(key):
    with pytest.raises(ValueError, match="`num_steps` must be at least 1"):
        travelling_waves(0, key=key)
    with pytest.raises(ValueError, match="`noise` must be non-negative"):
        travelling_waves(3, key=key, noise=-0.1)
    with pytest.raises(ValueError, match=r"`frequencies` must have a number per wave \(3\), got \(2,\)"):
        travelling_waves(3, key=key, frequencies=(1.0, 2.0))
    with pytest.raises(ValueError, match="`wavenumbers` must be whole numbers below half of `grid_shape`"):
        travelling_waves(3, key=key, grid_shape=(4, 4))
    with pytest.raises(ValueError, match="`wavenumbers` must not be zero along every axis"):
        wave_spectrum(wavenumbers=((0, 0), (1, 0), (0, 1)))
    with pytest.raises(ValueError, match="`wavenumbers` must have as many axes as `grid_shape`"):
        wave_spectrum(grid_shape=(16,))
