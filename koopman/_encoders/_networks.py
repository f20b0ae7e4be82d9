"""Networks for sequences: encoders with a lagged head, and autoencoders with linear dynamics."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_positive, fail, fail_kind
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._images import Decoder, Encoder
from dissociation.models._layers import Affine

Network = eqx.Module | Callable[..., Any]
"""Network of one example, or a function from a key to one."""
FEATURES = 5


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, or the name of its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def build_network(name: str, network: Network, *, key: PRNGKey) -> Any:
    """Return `network`, or if it is a function its value at `key`, with JAX arrays."""
    expected = "be an Equinox module that takes one example, or a function from a key to one"
    if isinstance(network, type):
        fail_kind(name, expected, f"the class {network.__name__}")

    module = network
    if not isinstance(network, eqx.Module):
        try:
            module = network(key)
        except Exception as error:  # any error means that it does not take a key
            received = f"a function that fails on a key: {first_line(error)!r}"
            raise TypeError(f"`{name}` must {expected}, got {received}.") from error
    if not isinstance(module, eqx.Module) or not callable(module):
        received = type(module).__name__
        if module is not network:
            received = f"a function to {received}"
        fail_kind(name, expected, received)

    def as_jax(leaf: Any) -> Any:
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf

    return jax.tree.map(as_jax, module)


def _encoder(encoder: Network | None, features: int, init: str, key: PRNGKey) -> Any:
    if encoder is None:
        return Encoder(features, init=init, key=key)
    return build_network("encoder", encoder, key=key)


class FeatureMap(eqx.Module):
    """Encoder with an optional fixed norm of its output, and a linear head for lagged features.

    VAMP does not depend on the norm. The spectral contrastive loss of d features trains in a few
    epochs with norm sqrt(d), and stays at -1 for thousands of steps with norm 1. A fixed norm suits
    classes. If the size of a state matters, as in a linear system, pass None.

    Attributes:
        encoder: Network from a state to features.
        lagged_head: Linear layer without bias, from the normalised features to those one lag later.
        feature_norm: Norm of the features; None leaves the encoder's output unchanged.
    """

    encoder: Any
    lagged_head: Affine
    # With norm 1, C_x is I / d at best, and at the contrastive minimum the lagged weights have
    # singular values d, far from their initial values below 1. With norm sqrt(d), C_x can be I, and
    # the weights orthogonal.
    feature_norm: float | None = eqx.field(static=True)

    @validated
    def __init__(
        self,
        features: int = FEATURES,
        *,
        encoder: Network | None = None,
        feature_norm: float | None = 1.0,
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw a feature map.

        Args:
            features: Width of the encoder's output.
            encoder: Network from one state to [features], or a function from a key to one. Default:
                the encoder of images of 28 x 28 pixels.
            feature_norm: Norm of the features, positive, or None.
            init: Initial weights of the default encoder and the lagged head, "pytorch" or "lecun".
            key: Key of the weights.
        """
        check_count("features", features, minimum=1)
        if feature_norm is not None:
            check_positive("feature_norm", feature_norm)
        encoder_key, head_key = jax.random.split(key)
        self.feature_norm = feature_norm
        self.encoder = _encoder(encoder, features, init, encoder_key)
        self.lagged_head = Affine(features, features, bias=False, init=init, key=head_key)

    def __call__(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, " features"]:
        """Return the features of one state, of norm `feature_norm` unless it is None."""
        features = self.encoder(jnp.asarray(state))
        width = self.lagged_head.weight.shape[-2]
        shape = jnp.shape(features)
        if shape != (width,):
            expected = f"make a vector of {width} features, as `features` says"
            fail("encoder", expected, f"shape {shape}")
        if self.feature_norm is None:
            return features
        # Clipped, because the root has no finite derivative at zero.
        square = jnp.maximum(jnp.sum(features**2), 1e-24)
        return features * (self.feature_norm * lax.rsqrt(square))

    def lagged(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, " features"]:
        """Return the lagged head's features of a state."""
        return self.lagged_head(self(state))


class Autoencoder(eqx.Module):
    """Autoencoder with linear dynamics of the features.

    Attributes:
        encoder: Network from a state to features.
        decoder: Network from features to a state.
        dynamics: Linear map K, or A if it is orthogonal: [features, features].
        orthogonal: If True, K = ((I - S)(I + S)^{-1})^2 with S = A - A^T is orthogonal: features
            keep their norm.
    """

    encoder: Any
    decoder: Any
    dynamics: Float[Array, "f f"]
    orthogonal: bool = eqx.field(static=True)

    @validated
    def __init__(
        self,
        features: int = FEATURES,
        *,
        encoder: Network | None = None,
        decoder: Network | None = None,
        orthogonal: bool = False,
        upsampling: str = "nearest",
        init: str = "pytorch",
        key: PRNGKey,
    ):
        """Draw an autoencoder.

        Args:
            features: Width of the latent space.
            encoder: Network from one state to [features], or a function from a key to one. Default:
                the encoder of images of 28 x 28 pixels.
            decoder: Network from [features] to one state, or a function from a key to one. Default:
                the decoder of such images.
            orthogonal: If True, the linear dynamics are orthogonal throughout training.
            upsampling: Upsampling of the default decoder, "nearest" or "bilinear".
            init: Initial weights of the default encoder and decoder, "pytorch" or "lecun". The
                dynamics always have PyTorch's.
            key: Key of the weights.
        """
        check_count("features", features, minimum=1)
        keys = jax.random.split(key, 3)
        self.encoder = _encoder(encoder, features, init, keys[0])
        if decoder is None:
            self.decoder = Decoder(features, upsampling=upsampling, init=init, key=keys[1])
        else:
            self.decoder = build_network("decoder", decoder, key=keys[1])
        # A direction that the data do not excite keeps its initial eigenvalue, which must be below
        # 1 (here about 0.6).
        self.dynamics = Affine(features, features, bias=False, key=keys[2]).weight.T
        self.orthogonal = orthogonal

    def matrix(self) -> Float[Array, "f f"]:
        """Return the map K of one lag, which multiplies features from the right."""
        if not self.orthogonal:
            return self.dynamics
        skew = self.dynamics - self.dynamics.T
        eye = jnp.eye(self.dynamics.shape[0])
        # Without the square, angles near 180 degrees would need a large S, which training reaches
        # late.
        half = jnp.linalg.solve(eye + skew, eye - skew)
        return half @ half

    def __call__(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, "*state"]:
        """Return the state, encoded and decoded."""
        return self.decoder(self.encoder(jnp.asarray(state)))
