"""Networks to learn from sequences: encoders with a lagged head, and autoencoders with linear dynamics.

Where no network is given, they are the convolutional ones of the ordered digits, for images of 28 x 28 pixels.
"""

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
from dissociation.models._cnn import Decoder, Encoder
from dissociation.models._layers import Affine

Network = eqx.Module | Callable[..., Any]
"""A network of one example, or a function that makes one from a key."""
FEATURES = 5


@validated
def build_network(name: str, network: Network, *, key: PRNGKey) -> Any:
    """A network as it was given, or as its maker makes it."""
    wanted = "be an Equinox module that takes one example, or a function from a key to one"
    if isinstance(network, type):
        fail_kind(name, wanted, f"the class {network.__name__}")
    try:
        made = network if isinstance(network, eqx.Module) else network(key)
    except Exception as error:  # whatever it raises, it does not take a key
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TypeError(f"`{name}` must {wanted}, got a function that fails on a key: {reason!r}.") from error
    if not isinstance(made, eqx.Module) or not callable(made):
        fail_kind(name, wanted, type(made).__name__ if made is network else f"a function to {type(made).__name__}")
    return jax.tree.map(lambda leaf: jnp.asarray(leaf) if isinstance(leaf, np.ndarray) else leaf, made)


class FeatureMap(eqx.Module):
    """An encoder, whose output may be brought to a fixed norm, and a linear head for the features one lag later.

    The norm matters to losses that compare scales. Features of norm 1 in d directions have C_x = I / d at best, and
    the spectral contrastive loss then has its minimum at weights W = C_x^{-1} C_xy C_y^{-1} of the lagged head of
    singular values d. PyTorch starts them below 1, and Adam moves a weight by no more than the learning rate in a step,
    so W is too small for anything but a constant feature for thousands of steps: the loss waits on a plateau of -1.
    Features of norm sqrt(d) have C_x = I and W orthogonal at the optimum, and training leaves the plateau in a few
    epochs (the norm is the temperature of contrastive learning). VAMP does not see it.

    A fixed norm suits features of classes. Where the size of a state matters, as in a linear system, it takes from the
    features what the system is about: then `feature_norm` is None.

    Attributes:
        encoder: From a state to features.
        lagged_head: Linear layer without bias, after the normalisation, for the features one lag later.
        feature_norm: Norm of the features; None leaves the encoder's output as it is.
    """

    encoder: Any
    lagged_head: Affine
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
        """A fresh feature map.

        Args:
            features: Width of the encoder's output.
            encoder: A network from one state to [features], or a function from a key to one; default: the encoder of
                images of 28 x 28 pixels.
            feature_norm: Norm of the features, positive; None leaves them as the encoder makes them.
            init: How the default encoder and the lagged head begin, one of `dissociation.models._initial.INITS`.
            key: Draws the weights.
        """
        check_count("features", features, minimum=1)
        if feature_norm is not None:
            check_positive("feature_norm", feature_norm)
        first, second = jax.random.split(key)
        self.feature_norm = feature_norm
        self.encoder = (
            Encoder(features, init=init, key=first) if encoder is None else build_network("encoder", encoder, key=first)
        )
        self.lagged_head = Affine(features, features, bias=False, init=init, key=second)

    def __call__(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, " features"]:
        """Features of one state, of norm `feature_norm` if there is one."""
        features = self.encoder(jnp.asarray(state))
        width = self.lagged_head.weight.shape[-2]
        if jnp.shape(features) != (width,):
            fail("encoder", f"make a vector of {width} features, as `features` says", f"shape {jnp.shape(features)}")
        if self.feature_norm is None:
            return features
        # The norm's root has no finite slope at zero, hence the clip inside it.
        return features * (self.feature_norm * lax.rsqrt(jnp.maximum(jnp.sum(features**2), 1e-24)))

    def lagged(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, " features"]:
        """The features of a state one lag later, as the present ones are compared with them."""
        return self.lagged_head(self(state))


class Autoencoder(eqx.Module):
    """Encoder, linear dynamics of the features, and decoder.

    Attributes:
        encoder: From a state to features.
        decoder: From features to a state.
        dynamics: What the linear map is made of: itself, or the skew part of a Cayley transform: [features, features].
        orthogonal: Whether the map is kept orthogonal, K = ((I - S)(I + S)^{-1})^2 with S = A - A^T, so that features
            neither decay nor grow. Without the square an angle near 180 degrees needs a large S, which learning
            rates reach late.
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
        """A fresh autoencoder.

        Args:
            features: Width of the latent space: what the encoder puts out and the decoder takes.
            encoder: A network from one state to [features], or a function from a key to one; default: the encoder of
                images of 28 x 28 pixels.
            decoder: A network from [features] to one state, likewise.
            orthogonal: Whether the latent map is kept orthogonal.
            upsampling: Of the default decoder, "nearest" or "bilinear".
            init: How the default networks begin, one of `dissociation.models._initial.INITS`. The latent map always
                begins as PyTorch's linear layers do, with a spectral radius around 0.6: a direction that no data excite
                keeps what it begins with, and must not grow.
            key: Draws the weights.
        """
        check_count("features", features, minimum=1)
        keys = jax.random.split(key, 3)
        self.encoder = (
            Encoder(features, init=init, key=keys[0])
            if encoder is None
            else build_network("encoder", encoder, key=keys[0])
        )
        self.decoder = (
            Decoder(features, upsampling=upsampling, init=init, key=keys[1])
            if decoder is None
            else build_network("decoder", decoder, key=keys[1])
        )
        self.dynamics = Affine(features, features, bias=False, key=keys[2]).weight.T
        self.orthogonal = orthogonal

    def matrix(self) -> Float[Array, "f f"]:
        """The map of one lag, features times it."""
        if not self.orthogonal:
            return self.dynamics
        skew, eye = self.dynamics - self.dynamics.T, jnp.eye(self.dynamics.shape[0])
        half = jnp.linalg.solve(eye + skew, eye - skew)
        return half @ half

    def __call__(self, state: Float[Array | np.ndarray, "*state"]) -> Float[Array, "*state"]:
        """The state, encoded and decoded."""
        return self.decoder(self.encoder(jnp.asarray(state)))
