"""Networks of the ordered digits: encoders with features of one length, and autoencoders with linear dynamics."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

from dissociation.checks import check_positive
from dissociation.models.cnn import Decoder, Encoder
from dissociation.models.layers import Affine

AnyKey = Key[Array, ""] | UInt32[Array, "2"]
FEATURES = 5


class FeatureMap(eqx.Module):
    """An encoder whose output has a fixed length, and the view of the next picture.

    The length matters to losses that compare scales. Features of norm 1 in d directions have C_x = I / d at best, and
    the spectral contrastive loss then has its minimum at lag weights W = C_x^{-1} C_xy C_y^{-1} of singular values d.
    PyTorch starts them below 1, and Adam moves a weight by no more than the learning rate in a step, so W is too small
    for anything but a constant feature for thousands of steps: the loss waits on a plateau of -1. Features of norm
    sqrt(d) have C_x = I and W orthogonal at the optimum, and training leaves the plateau in a few epochs (the length is
    the temperature of contrastive learning). VAMP does not see it.

    Attributes:
        encoder: The network.
        lag: Linear layer without bias after the normalisation, for the lagged view.
        length: Norm of the features.
    """

    encoder: Encoder
    lag: Affine
    length: float = eqx.field(static=True)

    def __init__(self, features: int = FEATURES, *, length: float = 1.0, init: str = "pytorch", key: AnyKey):
        check_positive("length", length)
        first, second = jax.random.split(key)
        self.length = length
        self.encoder = Encoder(features, init=init, key=first)
        self.lag = Affine(features, features, bias=False, init=init, key=second)

    def __call__(self, image: Float[Array | np.ndarray, "28 28"]) -> Float[Array, " features"]:
        """Features of one picture, of norm `length`."""
        features = self.encoder(image)
        # The norm's root has no finite slope at zero, hence the clip inside it.
        return features * (self.length * lax.rsqrt(jnp.maximum(jnp.sum(features**2), 1e-24)))

    def lagged(self, image: Float[Array | np.ndarray, "28 28"]) -> Float[Array, " features"]:
        """The next picture's features as the present one is compared with them."""
        return self.lag(self(image))


class Autoencoder(eqx.Module):
    """Encoder, linear dynamics of the features, and decoder.

    Attributes:
        encoder: Picture to features.
        decoder: Features to picture.
        dynamics: What the linear map is made of: itself, or the skew part of a Cayley transform: [features, features].
        orthogonal: Whether the map is kept orthogonal, K = ((I - S)(I + S)^{-1})^2 with S = A - A^T, so that features
            neither decay nor grow. Without the square an angle near 180 degrees needs a large S, which learning
            rates reach late.
    """

    encoder: Encoder
    decoder: Decoder
    dynamics: Float[Array, "f f"]
    orthogonal: bool = eqx.field(static=True)

    def __init__(
        self,
        features: int = FEATURES,
        *,
        orthogonal: bool = False,
        upsampling: str = "nearest",
        init: str = "pytorch",
        key: AnyKey,
    ):
        keys = jax.random.split(key, 3)
        self.encoder = Encoder(features, init=init, key=keys[0])
        self.decoder = Decoder(features, upsampling=upsampling, init=init, key=keys[1])
        self.dynamics = Affine(features, features, bias=False, init=init, key=keys[2]).weight
        self.orthogonal = orthogonal

    def matrix(self) -> Float[Array, "f f"]:
        """The map of one step, features times it."""
        if not self.orthogonal:
            return self.dynamics
        skew, eye = self.dynamics - self.dynamics.T, jnp.eye(self.dynamics.shape[0])
        half = jnp.linalg.solve(eye + skew, eye - skew)
        return half @ half

    def __call__(self, image: Float[Array | np.ndarray, "28 28"]) -> Float[Array, "28 28"]:
        """The picture, encoded and decoded."""
        return self.decoder(self.encoder(image))
