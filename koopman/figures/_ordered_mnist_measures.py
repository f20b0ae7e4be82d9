"""Forecasts of a sequence of digits, read by an oracle."""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray
from jax import lax
from jaxtyping import Array, Complex, Float, Int

from dissociation.models import Encoder
from koopman import (
    Operator,
    decompose,
    eigenpairs,
    encode,
    left_eigenfunctions,
    matrix_powers,
    predict,
)
from koopman.datasets import cycle_spectrum

PROTOCOLS = ("images", "powers", "circle", "roots")
"""Ways to forecast: by the model from its last forecast image, or by powers of its operator, with eigenvalues as
fitted, moved to the unit circle, or moved to roots of unity."""

SCALES = ("raw", "rescaled")
"""Scales at which forecasts are read: as forecast, or with the training images' mean norm."""


class Pixels(eqx.Module):
    """Features of an image: standardised pixels."""

    mean: Float[Array, " d"]
    deviation: Float[Array, " d"]

    def __call__(self, image: Float[Array, "28 28"]) -> Float[Array, " d"]:
        return (image.reshape(-1) - self.mean) / self.deviation


class Latent(eqx.Module):
    """Linear map from an image's features to those of the next image, trained with an autoencoder."""

    matrix: Float[Array, "d d"]


class Forecaster(eqx.Module):
    """Forecaster of the images that follow given images."""

    features: Callable[[Array], Array]  # of one image
    dynamics: Operator | Latent
    decoder: (
        Callable[[Array], Array] | None
    )  # from a forecast to an image; None if the dynamics forecast images

    def __call__(
        self, images: Float[Array, "n 28 28"], steps: Int[Array, " t"]
    ) -> Float[Array, "t n 28 28"]:
        return self.ahead(encode(self.features, images), steps)

    def ahead(
        self, values: Float[Array, "n d"], steps: Int[Array, " t"]
    ) -> Float[Array, "t n 28 28"]:
        """Return the images `steps` ahead of features."""
        if isinstance(self.dynamics, Operator):
            forecasts = predict(self.dynamics, values, steps)
        else:
            forecasts = jnp.matmul(
                values[None],
                matrix_powers(self.dynamics.matrix, steps),
                precision=lax.Precision.HIGHEST,
            )
        return forecasts if self.decoder is None else jax.vmap(jax.vmap(self.decoder))(forecasts)


def spectral(dynamics: Operator | Latent) -> tuple[Array, Array, Array]:
    """Return eigenvalues [r], right and left eigenvectors [r, r] of an operator's core or of a latent map."""
    if isinstance(dynamics, Operator):
        pairs = decompose(dynamics)
        return pairs.eigenvalues, pairs.right, pairs.left
    values, right = eigenpairs(dynamics.matrix)
    return values, right, jnp.linalg.inv(right).T


def project(forecaster: Forecaster, kind: str, num_digits: int) -> Forecaster:
    """Return a forecaster with moved eigenvalues and the same eigenvectors."""
    where = (
        (lambda f: f.dynamics.core)
        if isinstance(forecaster.dynamics, Operator)
        else (lambda f: f.dynamics.matrix)
    )
    return eqx.tree_at(where, forecaster, _moved(forecaster.dynamics, num_digits)[kind])


@eqx.filter_jit
def _moved(dynamics: Any, num_digits: int) -> dict[str, Array]:
    """Return the matrix with eigenvalues moved to the circle and to the roots of unity, by name."""
    # Both in one program, so that forecasters of one kind share a single compilation.
    values, right, left = spectral(dynamics)
    turns = jnp.angle(values) / (2 * jnp.pi)
    nearest = jnp.where(
        values.imag != 0,
        jnp.round(turns * num_digits) / num_digits,
        0.0 if num_digits % 2 else turns,
    )
    moved = {"circle": turns, "roots": nearest}
    return {
        kind: jnp.real(
            jnp.matmul(
                right * jnp.exp(2j * jnp.pi * turns)[None], left.T, precision=lax.Precision.HIGHEST
            )
        )
        for kind, turns in moved.items()
    }


def evaluate(
    forecaster: Forecaster,
    oracle: Encoder,
    images: Float[Array | np.ndarray, "n 28 28"],
    *,
    num_steps: int,
    far: int,
    norm: float,
    num_digits: int,
) -> dict[str, np.ndarray]:
    """Forecast from every image by every protocol, and read the forecasts by the oracle.

    "logits" [protocol, scale, time, n, classes]; "strips", from the first image, [protocol, steps,
    28, 28]; "eigenvalues" [r]; "left", eigenfunctions, [n, r], zero for a latent map.
    """
    images = jnp.asarray(images)
    values = _encoded(forecaster.features, images)

    def forecasts(protocol: str) -> Iterator[Array]:
        if protocol == "images":  # step by step, not to the far horizon
            now = images
            for _ in range(num_steps):
                yield (now := _forecast(forecaster, now, jnp.asarray([1])))
        else:
            moved = (
                forecaster if protocol == "powers" else project(forecaster, protocol, num_digits)
            )
            yield from (
                _ahead(moved, values, jnp.asarray([step]))
                for step in [*range(1, num_steps + 1), far]
            )

    logits, strips = [], []
    for protocol in PROTOCOLS:
        outputs, strip = zip(
            *((_read(oracle, now, norm), now[0]) for now in forecasts(protocol)), strict=True
        )
        missing = [jnp.full_like(outputs[0], jnp.nan)] * (num_steps + 1 - len(outputs))
        logits.append(jnp.stack([*outputs, *missing], 1))
        strips.append(jnp.stack(strip[:num_steps]))
    spectrum = {"eigenvalues": spectral(forecaster.dynamics)[0], "left": _left(forecaster, values)}
    found = {"logits": jnp.stack(logits), "strips": jnp.stack(strips), **spectrum}
    return {name: np.asarray(value) for name, value in found.items()}


@eqx.filter_jit
def _forecast(forecaster: Forecaster, images: Array, steps: Array) -> Array:
    return forecaster(images, steps)[0]


@eqx.filter_jit
def _ahead(forecaster: Forecaster, values: Array, steps: Array) -> Array:
    return forecaster.ahead(values, steps)[0]


_encoded = eqx.filter_jit(encode)


@eqx.filter_jit
def _read(oracle: Encoder, images: Array, norm: float) -> Array:
    sizes = jnp.sqrt(jnp.sum(images**2, (1, 2), keepdims=True))
    rescaled = images * (norm / jnp.where(sizes > 0, sizes, 1.0))
    return jnp.stack([encode(oracle, images), encode(oracle, rescaled)])


@eqx.filter_jit
def _left(forecaster: Forecaster, values: Array) -> Any:
    if isinstance(forecaster.dynamics, Operator):
        return left_eigenfunctions(forecaster.dynamics, values)
    return jnp.zeros((len(values), forecaster.dynamics.matrix.shape[0]), jnp.complex64)


def predicted(logits: np.ndarray) -> np.ndarray:
    """Return the class of the largest logit, int8; -1 if a logit is not finite."""
    return np.where(np.isfinite(logits).all(-1), logits.argmax(-1), -1).astype(np.int8)


def measured(dataset: xarray.Dataset) -> xarray.Dataset:
    """Return the dataset with measures of its logits and eigenvalues, see `ordered_mnist.compute`."""
    read, classes = predicted(dataset.logits.values), dataset.sizes["classes"]
    digits = (dataset.labels.values + dataset.times.values[:, None]) % classes
    ahead = read[:, :, 0, 0, 0]
    # Diverged seeds read -1, and are not stuck.
    most = np.stack([(ahead == digit).mean(-1) for digit in range(classes)]).max(0)
    distances, phases = eigenvalue_errors(dataset.eigenvalues.values)
    axes = dataset.logits.dims
    return dataset.assign(
        predicted=(axes[:-1], read),
        accuracy=(axes[:-2], np.where(read >= 0, read == digits, np.nan).mean(-1)),
        stuck=(axes[:2], most > 0.9),
        eigenvalue_error=(axes[:2], distances),
        phase_error=(axes[:2], phases, {"units": "radians per step"}),
    )


def eigenvalue_errors(values: Complex[np.ndarray, "*members k"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest distance and the largest angle of k-th roots of unity to their nearest of k eigenvalues."""
    # Powers of t steps are off by t times this angle, and digits are wrong from about pi / k.
    roots = cycle_spectrum(values.shape[-1])
    nearest = np.take_along_axis(values, np.abs(values[..., None] - roots).argmin(-2), -1)
    return np.abs(nearest - roots).max(-1), np.abs(np.angle(nearest * np.conj(roots))).max(-1)
