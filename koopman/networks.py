"""Networks of the ordered digits: an encoder, its mirror image, and what is made of the two.

Modules take one picture [28, 28]. Pictures run channels last, the layout in which XLA's CPU convolutions are fastest,
and pooling is three elementwise maxima, whose gradient is several times faster than that of `reduce_window`. A
convolution after nearest upsampling is done at the lower resolution.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Key, UInt32

from dissociation.checks import check_choice, check_positive
from dissociation.models.initial import INITS, draw_weights

AnyKey = Key[Array, ""] | UInt32[Array, "2"]
FEATURES = 5


class Affine(eqx.Module):
    """x W + b, or without b.

    Attributes:
        weight: [in, out].
        bias: [out] or None.
    """

    weight: Float[Array, "i o"]
    bias: Float[Array, " o"] | None

    def __init__(self, inputs: int, outputs: int, *, bias: bool = True, init: str = "pytorch", key: AnyKey):
        check_choice("init", init, INITS)
        first, second = jax.random.split(key)
        self.weight = draw_weights(init, (inputs, outputs), inputs, key=first)
        zero = init == "lecun"
        self.bias = (
            (jnp.zeros(outputs) if zero else draw_weights(init, (outputs,), inputs, key=second)) if bias else None
        )

    def __call__(self, x: Float[Array, " i"]) -> Float[Array, " o"]:
        """The layer's output."""
        y = x @ self.weight
        return y if self.bias is None else y + self.bias


class Convolution(eqx.Module):
    """5 x 5 convolution of stride 1 that keeps the picture's size.

    Attributes:
        weight: [5, 5, in, out].
        bias: [out].
    """

    weight: Float[Array, "5 5 i o"]
    bias: Float[Array, " o"]

    def __init__(self, inputs: int, outputs: int, *, transposed: bool = False, init: str = "pytorch", key: AnyKey):
        check_choice("init", init, INITS)
        first, second = jax.random.split(key)
        # PyTorch counts the outputs of a transposed convolution as its fan-in.
        fan_in = 25 * (outputs if transposed and init == "pytorch" else inputs)
        self.weight = draw_weights(init, (5, 5, inputs, outputs), fan_in, key=first)
        self.bias = jnp.zeros(outputs) if init == "lecun" else draw_weights(init, (outputs,), fan_in, key=second)

    def __call__(self, x: Float[Array, "h w i"]) -> Float[Array, "h w o"]:
        """The layer's output."""
        return _convolve(x, self.weight, padding=2) + self.bias[None, None]

    def upsampled(self, x: Float[Array, "h w i"]) -> Float[Array, "2*h 2*w o"]:
        """The output for an input whose every entry was repeated in a 2 x 2 square first (nearest upsampling).

        Of the 5 x 5 entries under the kernel at most 3 x 3 differ, so weights of equal entries are added before the
        convolution and not after: 9 products instead of 25.
        """
        height, width, _ = x.shape
        add = jnp.asarray(_EQUAL_ENTRIES, x.dtype)
        merged = jnp.einsum("apk,bql,klio->pqiabo", add, add, self.weight, precision="highest")
        four = _convolve(x, merged.reshape(3, 3, x.shape[2], -1), padding=1).reshape(height, width, 2, 2, -1)
        return four.transpose(0, 2, 1, 3, 4).reshape(2 * height, 2 * width, -1) + self.bias[None, None]


_EQUAL_ENTRIES = (
    ((1, 1, 0, 0, 0), (0, 0, 1, 1, 0), (0, 0, 0, 0, 1)),
    ((1, 0, 0, 0, 0), (0, 1, 1, 0, 0), (0, 0, 0, 1, 1)),
)
"""For even and odd outputs: which of the 5 weights in a row meet the entry before, at and after the output's own."""


def _convolve(x: Float[Array, "h w i"], weight: Float[Array, "k l i o"], *, padding: int) -> Float[Array, "h w o"]:
    kinds, around = ("NHWC", "HWIO", "NHWC"), [(padding, padding)] * 2
    return lax.conv_general_dilated(x[None], weight, (1, 1), around, dimension_numbers=kinds)[0]


def max_pool(x: Float[Array, "h w c"]) -> Float[Array, "h//2 w//2 c"]:
    """The largest of every 2 x 2 square."""
    upper, lower = x[::2], x[1::2]
    return jnp.maximum(jnp.maximum(upper[:, ::2], upper[:, 1::2]), jnp.maximum(lower[:, ::2], lower[:, 1::2]))


class Encoder(eqx.Module):
    """Picture to features: two of (5 x 5 convolution, ReLU, 2 x 2 max-pool), to 16 and 32 channels, and a linear layer.

    Attributes:
        convolutions: The two convolutions.
        head: The linear layer, [1568, features].
    """

    convolutions: tuple[Convolution, Convolution]
    head: Affine

    def __init__(self, features: int = FEATURES, *, init: str = "pytorch", key: AnyKey):
        keys = jax.random.split(key, 3)
        self.convolutions = (Convolution(1, 16, init=init, key=keys[0]), Convolution(16, 32, init=init, key=keys[1]))
        self.head = Affine(32 * 49, features, init=init, key=keys[2])

    def __call__(self, image: Float[Array | np.ndarray, "28 28"]) -> Float[Array, " features"]:
        """Features of one picture."""
        hidden = jnp.asarray(image)[:, :, None]
        for convolution in self.convolutions:
            hidden = jax.nn.relu(max_pool(convolution(hidden)))  # the same as ReLU first, on a quarter of the values
        return self.head(hidden.reshape(-1))


class Decoder(eqx.Module):
    """Features to picture, the encoder's mirror image; no activation at the end.

    Attributes:
        head: The linear layer, [features, 1568].
        convolutions: Two transposed convolutions (of stride 1: plain ones with turned kernels), to 16 and 1 channels.
        upsampling: "nearest" or "bilinear".
    """

    head: Affine
    convolutions: tuple[Convolution, Convolution]
    upsampling: str = eqx.field(static=True)

    def __init__(self, features: int = FEATURES, *, upsampling: str = "nearest", init: str = "pytorch", key: AnyKey):
        check_choice("upsampling", upsampling, ("nearest", "bilinear"))
        keys = jax.random.split(key, 3)
        self.head = Affine(features, 32 * 49, init=init, key=keys[0])
        turned = {"transposed": True, "init": init}
        self.convolutions = (Convolution(32, 16, **turned, key=keys[1]), Convolution(16, 1, **turned, key=keys[2]))
        self.upsampling = upsampling

    def __call__(self, features: Float[Array, " features"]) -> Float[Array, "28 28"]:
        """The picture."""
        hidden = self.head(features).reshape(7, 7, 32)
        for convolution in self.convolutions:
            if self.upsampling == "nearest":
                hidden = convolution.upsampled(jax.nn.relu(hidden))
            else:
                shape = (2 * hidden.shape[0], 2 * hidden.shape[1], hidden.shape[2])
                hidden = convolution(jax.nn.relu(jax.image.resize(hidden, shape, self.upsampling)))
        return hidden[:, :, 0]


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
