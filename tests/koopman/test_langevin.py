import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import kstest
from words import refused

from koopman.datasets import langevin_spectrum, overdamped_langevin, prinz_langevin, prinz_spectrum
from koopman.datasets._langevin import prinz_potential

ROOT_2 = np.sqrt(2)


@pytest.mark.parametrize(
    ("friction", "expected"),
    [
        (0.1, [1, 0.97989261, 0.92044637, 0.84199274]),
        (1.0, [1, 0.99988011, 0.99921146, 0.99846504]),
    ],
)
def test_prinz_spectrum(friction, expected):
    """Published eigenvalues, which are up to 8e-9 off at friction 0.1."""
    spectrum = prinz_spectrum(friction=friction)
    np.testing.assert_allclose(spectrum.eigenvalues, expected, atol=1.2e-8)
    assert spectrum.left is spectrum.right  # reversible
    finer = prinz_spectrum(friction=friction, num_cells=800)
    np.testing.assert_allclose(finer.eigenvalues, spectrum.eigenvalues, atol=3e-9)


def test_reflected_free_diffusion_has_cosines():
    spectrum = langevin_spectrum(
        lambda x: 0 * x, (1.0, 3.0), friction=2.0, sigma=0.8, time_step=0.3
    )
    k = np.arange(4)
    np.testing.assert_allclose(
        spectrum.eigenvalues, np.exp(-0.3 * 0.5 * 0.4**2 * (k * np.pi / 2) ** 2), rtol=5e-9
    )
    x = np.linspace(1.05, 2.95, 11)[:, None]
    expected = np.where(k == 0, 1, ROOT_2)[None, :] * np.cos(k[None, :] * np.pi * (3 - x) / 2)
    np.testing.assert_allclose(spectrum.right(x), expected, atol=1e-7)
    np.testing.assert_allclose(spectrum.density(x), 0.5, rtol=1e-12)


def test_a_high_barrier_keeps_the_stationary_function_apart():
    spectrum = langevin_spectrum(
        lambda x: 30 * jnp.sum((x**2 - 1) ** 2), (-4.0, 4.0), time_step=1.0, num_components=3
    )
    np.testing.assert_allclose(spectrum.right([[-1.0], [1.0]])[:, :2], [[1, -1], [1, 1]], atol=1e-6)


def test_a_wide_domain_changes_nothing():
    narrow, wide = (
        langevin_spectrum(prinz_potential, (-end, end), time_step=1e-4, num_cells=800)
        for end in (1.5, 6.0)
    )
    np.testing.assert_allclose(wide.eigenvalues, narrow.eigenvalues, atol=1e-9)
    cut = langevin_spectrum(
        prinz_potential, (-0.4, 1.4), time_step=1e-4
    )  # without the well on the left it does
    assert np.abs(cut.eigenvalues - narrow.eigenvalues)[1] > 5e-5


def test_prinz_trajectories_follow_density_and_spectrum(key):
    n, lag = 10_000, 20
    path = np.asarray(prinz_langevin(lag, key=key, num_trajectories=n), np.float64)
    assert path.shape == (n, lag + 1, 1)
    spectrum = prinz_spectrum()
    x = np.linspace(-2, 2, 4001)
    cumulative = np.cumsum(spectrum.density(x[:, None])) * (x[1] - x[0])
    for states in (path[:, 0, 0], path[:, -1, 0]):  # starts in equilibrium and stays there
        assert kstest(states, lambda s: np.interp(s, x, cumulative)).pvalue > 1e-3
    assert kstest(path[:, 0, 0] + 0.05, lambda s: np.interp(s, x, cumulative)).pvalue < 1e-3
    for component in (1, 2):
        start, end = (spectrum.right(path[:, t])[:, component] for t in (0, -1))
        products = start * end
        expected = spectrum.eigenvalues[component] ** lag
        bias = 0.004 * expected * -np.log(expected)  # of the scheme
        assert abs(products.mean() - expected) < 4 * products.std() / np.sqrt(n) + bias


def test_scheme_in_a_harmonic_well(key):
    """Without noise the state shrinks by (1 - h k / friction) per substep; with it the variance has a closed form."""
    stiffness = jnp.array([1.0, 3.0])

    def potential(x):
        return 0.5 * jnp.sum(stiffness * x**2)

    start = np.array([1.0, -2.0])
    path = overdamped_langevin(
        potential, 4, key=key, initial=start, friction=2.0, sigma=0.0, time_step=0.1, substeps=5
    )
    factor = (1 - 0.02 * np.array([1.0, 3.0]) / 2) ** (5 * np.arange(5)[:, None])
    np.testing.assert_allclose(path, start * factor, rtol=1e-5)

    n, h, sigma = 20_000, 0.1, 0.7
    shrink = 1 - h * np.array([1.0, 3.0]) / 2
    path = overdamped_langevin(
        potential,
        3,
        key=key,
        num_trajectories=n,
        initial=start,
        friction=2.0,
        sigma=sigma,
        time_step=h,
    )
    variance = (sigma / 2) ** 2 * h * (1 + shrink**2 + shrink**4)
    last = np.asarray(path[:, -1], np.float64)
    np.testing.assert_array_less(np.abs(last.var(axis=0) / variance - 1), 4 * np.sqrt(2 / n))
    np.testing.assert_array_less(
        np.abs(last.mean(axis=0) - start * shrink**3), 4 * np.sqrt(variance / n)
    )
    assert abs(np.corrcoef(last.T)[0, 1]) < 4 / np.sqrt(n)


def test_wrong_arguments_are_named(key):
    def drawn(initial, **options):
        return overdamped_langevin(jnp.sum, 3, key=key, initial=initial, **options)

    refused(
        (lambda: prinz_langevin(3, key=key, friction=0.0), "`friction` must be positive"),
        (lambda: prinz_langevin(3, key=key, substeps=0), "`substeps` must be at least 1"),
        (lambda: drawn(np.zeros(1), sigma=-1.0), "`sigma` must be non-negative"),
        (
            lambda: drawn(np.zeros((3, 2)), num_trajectories=4),
            r"shape \(2,\) or \(4, 2\), got \(3, 2\)",
        ),
        (
            lambda: langevin_spectrum(prinz_potential, (1.0, -1.0)),
            "`domain` must be two ends in ascending order",
        ),
        (lambda: langevin_spectrum(prinz_potential, (-1e3, 1e3)), "`domain` must be narrower"),
        (lambda: prinz_spectrum(num_cells=101), "`num_cells` must be even"),
        (lambda: prinz_spectrum(num_cells=20), "`num_cells` must be at least 32"),
    )


@pytest.mark.parametrize(
    ("potential", "words"),
    [
        (lambda x: 1 / x[0] ** 2, "rise and fall by less than .* Choose a `domain`"),
        (
            lambda x: jnp.log(jnp.abs(x[0])),
            "have a value at every state of the domain, got -inf at 0",
        ),
        (lambda x: jnp.stack([x, x]), "give one real energy"),
        (lambda x: x[0] + 1j, "give one real energy"),
    ],
)
def test_what_is_no_potential_is_refused(potential, words):
    with pytest.raises(ValueError, match=f"`potential` must {words}"):
        langevin_spectrum(potential, (-3.0, 3.0))
    if "energy" in words:
        with pytest.raises(ValueError, match=f"`potential` must {words}"):
            overdamped_langevin(potential, 3, key=jax.random.key(0), initial=np.ones(1))
