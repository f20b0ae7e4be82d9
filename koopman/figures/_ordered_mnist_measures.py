"""Forecasts of a sequence of digits, read by an oracle."""

from collections.abc import Callable
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
"""Ways to forecast: by the model from its last forecast image, or by powers of its operator.

Eigenvalues of the operator are as fitted for "powers", moved to the unit circle for "circle", and
moved to roots of unity for "roots".
"""

SCALES = ("raw", "rescaled")
"""Scales at which forecasts are read: as forecast, or with the training images' mean norm."""


class Pixels(eqx.Module):
    """Features of an image: standardised pixels."""

    mean: Float[Array, " d"]
    deviation: Float[Array, " d"]

    def __call__(self, image: Float[Array, "28 28"]) -> Float[Array, " d"]:
        pixels = image.reshape(-1)
        return (pixels - self.mean) / self.deviation


class Latent(eqx.Module):
    """Linear map from an image's features to those of the next one, trained with an autoencoder."""

    matrix: Float[Array, "d d"]


class Forecaster(eqx.Module):
    """Forecaster of the images that follow given images.

    Attributes:
        features: Function from an image to its features.
        dynamics: Operator or linear map on features.
        decoder: Function from a forecast to an image; None if the dynamics forecast images.
    """

    features: Callable[[Array], Array]
    dynamics: Operator | Latent
    decoder: Callable[[Array], Array] | None

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
            powers = matrix_powers(self.dynamics.matrix, steps)
            forecasts = jnp.matmul(values[None], powers, precision=lax.Precision.HIGHEST)
        if self.decoder is None:
            return forecasts
        return jax.vmap(jax.vmap(self.decoder))(forecasts)


def spectral(dynamics: Operator | Latent) -> tuple[Array, Array, Array]:
    """Return eigenvalues [r], right and left eigenvectors [r, r] of an operator or a latent map."""
    if isinstance(dynamics, Operator):
        pairs = decompose(dynamics)
        return pairs.eigenvalues, pairs.right, pairs.left
    eigenvalues, right_vectors = eigenpairs(dynamics.matrix)
    left_vectors = jnp.linalg.inv(right_vectors).T
    return eigenvalues, right_vectors, left_vectors


def project(forecaster: Forecaster, kind: str, num_digits: int) -> Forecaster:
    """Return a forecaster with moved eigenvalues and the same eigenvectors."""
    matrix = _moved(forecaster.dynamics, num_digits)[kind]
    if isinstance(forecaster.dynamics, Operator):
        return eqx.tree_at(lambda f: f.dynamics.core, forecaster, matrix)
    return eqx.tree_at(lambda f: f.dynamics.matrix, forecaster, matrix)


@eqx.filter_jit
def _moved(dynamics: Any, num_digits: int) -> dict[str, Array]:
    """Return the matrix with its eigenvalues moved to the circle and to the roots, by name."""
    # Both in one program, so that forecasters of one kind share a single compilation.
    eigenvalues, right_vectors, left_vectors = spectral(dynamics)
    turns = jnp.angle(eigenvalues) / (2 * jnp.pi)
    # Real eigenvalues move to real roots: to 1, or, if there are two, to the one of their sign.
    real_turns = turns
    if num_digits % 2:
        real_turns = 0.0
    nearest = jnp.round(turns * num_digits) / num_digits
    nearest = jnp.where(eigenvalues.imag != 0, nearest, real_turns)

    matrices = {}
    for kind, angles in (("circle", turns), ("roots", nearest)):
        scaled = right_vectors * jnp.exp(2j * jnp.pi * angles)[None]
        matrix = jnp.matmul(scaled, left_vectors.T, precision=lax.Precision.HIGHEST)
        matrices[kind] = jnp.real(matrix)
    return matrices


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
    features = _encoded(forecaster.features, images)

    def forecasts(protocol):
        if protocol == "images":  # step by step, not to the far horizon
            forecast = images
            for _ in range(num_steps):
                forecast = _forecast(forecaster, forecast, jnp.asarray([1]))
                yield forecast
            return
        moved = forecaster
        if protocol != "powers":
            moved = project(forecaster, protocol, num_digits)
        for step in (*range(1, num_steps + 1), far):
            yield _ahead(moved, features, jnp.asarray([step]))

    logits = []
    strips = []
    for protocol in PROTOCOLS:
        outputs = []
        strip = []
        for forecast in forecasts(protocol):
            outputs.append(_read(oracle, forecast, norm))
            strip.append(forecast[0])
        if protocol == "images":
            outputs.append(jnp.full_like(outputs[0], jnp.nan))
        logits.append(jnp.stack(outputs, 1))
        strips.append(jnp.stack(strip[:num_steps]))

    eigenvalues, *_ = spectral(forecaster.dynamics)
    arrays = {
        "logits": jnp.stack(logits),
        "strips": jnp.stack(strips),
        "eigenvalues": eigenvalues,
        "left": _left(forecaster, features),
    }
    return {name: np.asarray(array) for name, array in arrays.items()}


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
    sizes = jnp.where(sizes > 0, sizes, 1.0)
    raw_logits = encode(oracle, images)
    rescaled_logits = encode(oracle, images * (norm / sizes))
    return jnp.stack([raw_logits, rescaled_logits])


@eqx.filter_jit
def _left(forecaster: Forecaster, values: Array) -> Any:
    if isinstance(forecaster.dynamics, Operator):
        return left_eigenfunctions(forecaster.dynamics, values)
    num_components = len(forecaster.dynamics.matrix)
    return jnp.zeros((len(values), num_components), jnp.complex64)


def predicted(logits: np.ndarray) -> np.ndarray:
    """Return the class of the largest logit, int8; -1 if a logit is not finite."""
    is_finite = np.isfinite(logits).all(-1)
    return np.where(is_finite, logits.argmax(-1), -1).astype(np.int8)


def measured(dataset: xarray.Dataset) -> xarray.Dataset:
    """Return the dataset with measures of logits and eigenvalues, see `ordered_mnist.compute`."""
    axes = dataset.logits.dims
    num_classes = dataset.sizes["classes"]
    labels = (dataset.labels.values + dataset.times.values[:, None]) % num_classes
    digits = predicted(dataset.logits.values)
    is_defined = digits >= 0
    is_right = np.where(is_defined, digits == labels, np.nan)

    # Diverged seeds read -1, and are not stuck.
    first_digits = digits[:, :, 0, 0, 0]
    fractions = [(first_digits == digit).mean(-1) for digit in range(num_classes)]
    is_stuck = np.stack(fractions).max(0) > 0.9
    distances, phases = eigenvalue_errors(dataset.eigenvalues.values)
    return dataset.assign(
        predicted=(axes[:-1], digits),
        accuracy=(axes[:-2], is_right.mean(-1)),
        stuck=(axes[:2], is_stuck),
        eigenvalue_error=(axes[:2], distances),
        phase_error=(axes[:2], phases, {"units": "radians per step"}),
    )


def eigenvalue_errors(values: Complex[np.ndarray, "*members k"]) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest distance and angle of k-th roots of unity to their nearest eigenvalues."""
    # Powers of t steps are off by t times this angle, and digits are wrong from about pi / k.
    roots = cycle_spectrum(values.shape[-1])
    indices = np.abs(values[..., None] - roots).argmin(-2)
    nearest = np.take_along_axis(values, indices, -1)
    distances = np.abs(nearest - roots)
    phases = np.angle(nearest * np.conj(roots))
    return distances.max(-1), np.abs(phases).max(-1)
