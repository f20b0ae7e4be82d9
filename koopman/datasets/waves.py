"""Travelling waves on a periodic grid: image-like fields whose evolution is linear with known exponents.

The field's own evolution is linear with these exponents where no two wavenumbers are equal or opposite. Two opposite
waves of one frequency make a standing oscillation: a field alone does not tell where it goes from there, two in
succession do.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex, Float, Int

from dissociation.checks import (
    check_count,
    check_finite,
    check_non_negative,
    check_positive,
    check_same_length,
    fail,
    is_traced,
)
from dissociation.types import PRNGKey, Scalar
from dissociation.validation import validated
from koopman.datasets.exact import conjugate_order
from koopman.datasets.trajectories import run_trajectories

__all__ = ["WaveSpectrum", "travelling_waves", "wave_spectrum"]

Wavenumbers = Int[np.ndarray, "waves axes"] | tuple[tuple[int, ...], ...]
PerWave = Float[Array | np.ndarray, " waves"] | tuple[float, ...]

WAVENUMBERS = ((1, 0), (0, 2), (2, 1))
FREQUENCIES = (1.0, 2.5, 4.0)
GROWTH_RATES = (0.0, -0.05, -0.2)


@validated
def travelling_waves(
    num_steps: int,
    *,
    key: PRNGKey,
    num_trajectories: int | None = None,
    grid_shape: tuple[int, ...] = (32, 32),
    wavenumbers: Wavenumbers = WAVENUMBERS,
    frequencies: PerWave = FREQUENCIES,
    growth_rates: PerWave = GROWTH_RATES,
    amplitudes: PerWave | None = None,
    time_step: Scalar = 0.1,
    noise: Scalar = 0.0,
) -> Float[Array, "..."]:
    """Sums of plane waves on the unit torus, each with its growth rate, frequency and a random phase.

    u(t, x) = sum_j a_j exp(g_j t) cos(2 pi k_j . x - omega_j t + phase_j), plus noise on every grid point.

    A wave moves along k_j for positive omega_j and stands for omega_j = 0.

    Args:
        num_steps: Number of steps, 1 or more.
        key: A PRNG key, for phases and noise.
        num_trajectories: Size of a batch; None gives one trajectory without that axis.
        grid_shape: Points along each axis of the torus.
        wavenumbers: k, periods along each axis, whole numbers below half of `grid_shape`, not all zero; [waves, axes].
        frequencies: omega, in radians per unit time, [waves].
        growth_rates: g, per unit time, negative for decay, [waves].
        amplitudes: a, [waves]; None is 1 for all.
        time_step: Time between fields, positive.
        noise: Standard deviation of the measurement noise, 0 or more.

    Returns:
        Fields [num_steps + 1, *grid_shape], the one at time 0 first, with a leading axis for a batch.

    Raises:
        ValueError: If a number is out of range or the shapes do not fit.
    """
    num_steps = check_count("num_steps", num_steps, minimum=1)
    check_positive("time_step", time_step)
    check_non_negative("noise", noise)
    k = _wavenumbers(wavenumbers, grid_shape)
    omega = _per_wave("frequencies", frequencies, len(k))
    growth = _per_wave("growth_rates", growth_rates, len(k))
    heights = _per_wave("amplitudes", (1.0,) * len(k) if amplitudes is None else amplitudes, len(k))
    times = jnp.arange(num_steps + 1) * jnp.asarray(time_step, omega.dtype)
    clock = times[:, None] * omega[None, :]
    height = heights[None, :] * jnp.exp(times[:, None] * growth[None, :])
    turns = jnp.asarray(2 * math.pi * _cycles(k, grid_shape), omega.dtype)

    def one(key: Array, phases: Array) -> Array:
        fields = _difference_waves(height, clock, turns + phases[:, None])
        draw = jax.random.normal(key, fields.shape, fields.dtype)
        return (fields + jnp.asarray(noise, fields.dtype) * draw).reshape(num_steps + 1, *grid_shape)

    def draw_phases(key: Array) -> Array:
        return jax.random.uniform(key, (len(k),), omega.dtype, 0, 2 * math.pi)

    return run_trajectories(
        one, draw_phases, key=key, num_trajectories=num_trajectories, initial=None, dimension=len(k)
    )


def _difference_waves(height: Array, clock: Array, angles: Array) -> Array:
    """The sum over waves of height cos(angle - clock), [time, points], by products of small matrices."""
    cosines = jnp.matmul(height * jnp.cos(clock), jnp.cos(angles), precision="highest")
    return cosines + jnp.matmul(height * jnp.sin(clock), jnp.sin(angles), precision="highest")


class WaveSpectrum(NamedTuple):
    """What generates `travelling_waves`; two components per wave, modulus of the eigenvalue descending.

    Attributes:
        exponents: Continuous eigenvalues g_j - i omega_j and its conjugate, [components]. Of a conjugate pair, the
            eigenvalue with positive imaginary part comes first. Of a wave that stands, a field shows one of the two.
        eigenvalues: exp(time_step exponents), [components].
        modes: The fields that belong to them, exp(2 pi i k_j . x) and its conjugate, [components, *grid]. They are
            orthogonal, with mean square one, where wavenumbers are neither equal nor opposite.
    """

    exponents: Complex[np.ndarray, " components"]
    eigenvalues: Complex[np.ndarray, " components"]
    modes: Complex[np.ndarray, "components *grid"]


@validated
def wave_spectrum(
    *,
    grid_shape: tuple[int, ...] = (32, 32),
    wavenumbers: Wavenumbers = WAVENUMBERS,
    frequencies: PerWave = FREQUENCIES,
    growth_rates: PerWave = GROWTH_RATES,
    time_step: Scalar = 0.1,
) -> WaveSpectrum:
    """The exponents, eigenvalues and modes of `travelling_waves`, on the host; the arguments are as there."""
    check_positive("time_step", time_step)
    k = _wavenumbers(wavenumbers, grid_shape)
    omega = np.asarray(_per_wave("frequencies", frequencies, len(k), np), np.float64)
    growth = np.asarray(_per_wave("growth_rates", growth_rates, len(k), np), np.float64)
    waves = np.exp(2j * np.pi * _cycles(k, grid_shape)).reshape(len(k), *grid_shape)
    exponents = np.concatenate([growth - 1j * omega, growth + 1j * omega])
    eigenvalues = np.exp(float(time_step) * exponents)
    order = conjugate_order(eigenvalues)
    return WaveSpectrum(exponents[order], eigenvalues[order], np.concatenate([waves, waves.conj()])[order])


def _wavenumbers(wavenumbers: Wavenumbers, grid_shape: tuple[int, ...]) -> np.ndarray:
    k = np.asarray(wavenumbers)
    check_same_length("grid_shape", len(grid_shape), "wavenumbers", k.shape[1], "axes")
    sizes = np.array([check_count("grid_shape", size, minimum=1) for size in grid_shape])
    if np.any(2 * np.abs(k) >= np.maximum(sizes, 2)[None, :]):
        fail("wavenumbers", f"be whole numbers below half of `grid_shape` {grid_shape}", wavenumbers)
    if not np.all(np.any(k != 0, axis=1)):
        fail("wavenumbers", "not be zero along every axis", wavenumbers)
    return k


def _per_wave(name: str, values: PerWave, waves: int, xp: Any = jnp) -> Any:
    if np.shape(values) != (waves,):
        fail(name, f"have a number per wave ({waves})", np.shape(values))
    if not any(is_traced(value) for value in values):
        check_finite(name, np.asarray(values))
    return xp.asarray(values) + 0.0  # whole numbers too become floats


def _cycles(k: np.ndarray, grid_shape: tuple[int, ...]) -> np.ndarray:
    """The products k . x at every grid point, [waves, points]."""
    axes = np.meshgrid(*(np.arange(size) / size for size in grid_shape), indexing="ij")
    return k @ np.stack([axis.ravel() for axis in axes])
