import jax
import jax.numpy as jnp
import numpy as np
import pytest

from koopman.datasets.langevin import langevin_spectrum, overdamped_langevin
from koopman.generator import fit_generator

THETA, SIGMA = 0.7, 1.3


def hermite(x):
    return jnp.stack([jnp.ones_like(x), x, x**2, x**3])


def ornstein_uhlenbeck(n, seed=0):
    x = SIGMA / np.sqrt(2 * THETA) * np.random.default_rng(seed).normal(size=n)
    return jax.vmap(hermite)(x), jax.vmap(jax.jacfwd(hermite))(x)[:, :, None]


def test_rates_of_an_ornstein_uhlenbeck_process():
    with jax.enable_x64(True):
        runs = [
            fit_generator(*ornstein_uhlenbeck(20_000, seed), rank=4, diffusion=SIGMA**2 / 2, alpha=0.0).eigenvalues
            for seed in range(20)
        ]
        mean, error = np.mean(runs, 0), np.std(runs, 0) / np.sqrt(20)
        np.testing.assert_allclose(mean[0], 0.0, atol=1e-9)
        assert (np.abs(mean[1:] + THETA * np.arange(1, 4)) < 4 * error[1:]).all()


def test_eigenfunctions_are_hermite_polynomials():
    with jax.enable_x64(True):
        x, jac = ornstein_uhlenbeck(400_000)
        found = fit_generator(x, jac, rank=3, diffusion=SIGMA**2 / 2)
        grid = np.linspace(-1.5, 1.5, 7)
        scaled = grid * np.sqrt(2 * THETA) / SIGMA
        exact = np.stack([np.ones(7), scaled, (scaled**2 - 1) / np.sqrt(2)], 1)
        values = np.asarray(jax.vmap(hermite)(grid) @ found.coefficients)
        np.testing.assert_allclose(values * np.sign(np.sum(values * exact, 0)), exact, atol=0.03)


def test_rates_of_langevin_dynamics_in_two_wells(key):
    def potential(x):
        return 2 * (x[0] ** 2 - 1) ** 2

    def features(x):
        return (x / 1.2) ** jnp.arange(10)

    # As many start in either well, and five units of time settle them there.
    start = jnp.where(jnp.arange(400)[:, None] % 2, 1.0, -1.0)
    options = {"friction": 1.0, "sigma": np.sqrt(2)}
    paths = overdamped_langevin(
        potential, 200, key=key, initial=start, num_trajectories=400, time_step=0.1, substeps=20, **options
    )
    samples = paths[:, 50:].reshape(-1, 1)
    found = fit_generator(
        *jax.jit(lambda x: (jax.vmap(features)(x), jax.vmap(jax.jacfwd(features))(x)))(samples), rank=3, diffusion=1.0
    )
    exact = langevin_spectrum(potential, (-3.0, 3.0), time_step=0.1, num_components=4, **options).eigenvalues
    rates = np.log(exact)[1:3] / 0.1
    np.testing.assert_allclose(found.eigenvalues[0], 0.0, atol=1e-3)
    np.testing.assert_allclose(found.eigenvalues[1:], rates, rtol=0.1)
    assert (found.eigenvalues[1:] < rates).all()  # a basis that is not complete makes all rates faster


def test_dependent_features_come_last():
    with jax.enable_x64(True):
        x, jac = ornstein_uhlenbeck(5000)
        double = fit_generator(jnp.concatenate([x, x], 1), jnp.concatenate([jac, jac], 1), rank=5, diffusion=0.845)
        single = fit_generator(x, jac, rank=4, diffusion=0.845)
        np.testing.assert_allclose(double.eigenvalues[:4], single.eigenvalues, rtol=1e-5, atol=1e-9)
        assert double.eigenvalues[4] < -1e9


def test_bad_input_is_refused():
    x, jac = ornstein_uhlenbeck(50)
    for change, words in (
        ({"rank": 5}, "at most the number of features"),
        ({"diffusion": 0.0}, "`diffusion`"),
        ({"alpha": -1.0}, "`alpha`"),
    ):
        with pytest.raises(ValueError, match=words):
            fit_generator(x, jac, **({"rank": 1} | change))
