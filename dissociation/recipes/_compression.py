"""Compress images, for estimators that need few dimensions."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.models._images import Decoder, Encoder
from dissociation.models._layers import check_sizes
from dissociation.training._fitting import fit
from dissociation.training._members import member, stack
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step

Images = Float[Array | np.ndarray, "n 784"]


class Autoencoder(eqx.Module):
    """Encoder and decoder of flat images."""

    encoder: Encoder
    decoder: Decoder

    def __call__(self, image: Float[Array, " 784"]) -> Float[Array, " 784"]:
        """Return the reconstructed image."""
        return self.decoder(self.encoder(image.reshape(28, 28))).reshape(-1)


@validated(finite=("images",), pixels=("images",))
def train_compression(
    images: Images,
    code: int = 4,
    *,
    key: PRNGKey,
    num_epochs: int = 10,
    batch_size: int = 100,
    **options: Any,
) -> Autoencoder:
    """Train an autoencoder by squared error, with Adam at 2e-3 falling along a cosine to zero.

    Args:
        images: Images in [0, 1], 28 x 28 pixels, [n, 784].
        code: Numbers per image.
        key: Key of weights and of the order of batches.
        num_epochs: Passes over the images.
        batch_size: Images per batch.
        **options: For `training.fit`.

    Returns:
        The autoencoder. Information about its code is a lower bound of that about the image.
    """
    check_sizes(code=code, num_epochs=num_epochs, batch_size=batch_size)
    build_key, order_key = jax.random.split(key)
    encoder_key, decoder_key = jax.random.split(build_key)
    model = Autoencoder(Encoder(code, key=encoder_key), Decoder(code, key=decoder_key))
    # The sampler drops the last, smaller batch of an epoch.
    num_steps = num_epochs * max(1, len(images) // batch_size)
    rate = optax.cosine_decay_schedule(2e-3, num_steps)
    trained = fit(
        stack([model]),
        make_step(reconstruction_error, optax.adam(rate)),
        # Batches of one size compile one step.
        Epochs(images, min(batch_size, len(images)), drop_remainder=True),
        num_epochs=num_epochs,
        key=order_key,
        **options,
    )
    return member(trained.models, 0)


def reconstruction_error(model: Autoencoder, batch: Images, key: Array) -> Float[Array, ""]:
    """Return the squared error, averaged over images and pixels."""
    images = jnp.asarray(batch)
    return jnp.mean((jax.vmap(model)(images) - images) ** 2)


@eqx.filter_jit
def encode(model: Autoencoder, images: Images) -> Float[Array, "n code"]:
    """Return codes of images, in slices of 500, which bound the memory of the convolutions."""
    squares = jnp.asarray(images).reshape(-1, 28, 28)
    slices = jnp.split(squares, list(range(500, images.shape[0], 500)))
    # No loop of JAX: see `training.fit`.
    return jnp.concatenate([jax.vmap(model.encoder)(batch) for batch in slices])
