"""Train bilinear networks on images."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from dissociation._core.checks import check_non_negative, check_positive
from dissociation._core.keys import normal
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.data._datasets import Dataset
from dissociation.measures._robustness import error_rate
from dissociation.models._bilinear import BilinearNetwork
from dissociation.models._layers import check_sizes
from dissociation.training._fitting import FitResult, fit
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs, steps_per_epoch
from dissociation.training._state import make_step


@validated
def train_bilinear(
    dataset: Dataset,
    hidden: int = 256,
    *,
    key: PRNGKey,
    num_seeds: int = 5,
    num_epochs: int = 100,
    batch_size: int = 2048,
    learning_rate: Scalar = 1e-3,
    weight_decay: Scalar = 1.0,
    noise: Scalar = 0.4,
    num_observed: int = 10_000,
    network: dict[str, Any] | None = None,
    **options: Any,
) -> FitResult:
    """Train stacked `BilinearNetwork`s by cross entropy on noisy images.

    The learning rate falls along a cosine to zero, epoch by epoch. Gaussian noise is drawn for
    every image, step and network. The last, smaller batch of an epoch is dropped.

    Args:
        dataset: Images and one-hot labels.
        hidden: Width of embedding and layer.
        key: Key of networks, noise and the shared order of batches.
        num_seeds: Number of networks.
        num_epochs: Passes over the training images.
        batch_size: Images per batch; all if there are fewer.
        learning_rate: Initial learning rate.
        weight_decay: Weight decay of AdamW.
        noise: Standard deviation of the noise; pixels lie in [0, 1].
        num_observed: Number of first training images to observe loss and accuracy on.
        network: Options of `BilinearNetwork`.
        **options: `callbacks`, `checkpoint`, `mesh`, `member_map` of `training.fit`.

    Returns:
        Result of `fit`; `history.observed` holds "train_loss", "train_accuracy", "validation_loss"
        and "validation_accuracy" without noise, each [seeds, epochs + 1].

    References:
        Pearce et al. (2024), section 4.
    """
    check_positive("learning_rate", learning_rate)
    check_non_negative("weight_decay", weight_decay)
    check_non_negative("noise", noise)
    check_sizes(num_seeds=num_seeds, num_observed=num_observed)
    build_key, fit_key = jax.random.split(key)
    sizes = {"inputs": dataset.num_pixels, "hidden": hidden, "classes": dataset.num_classes}
    build = eqx.filter_vmap(lambda k: BilinearNetwork(**sizes, **(network or {}), key=k))
    models = build(jax.random.split(build_key, num_seeds))

    # A small dataset may have fewer images than a batch.
    num_images = len(dataset.train_images)
    batch_size = min(batch_size, num_images)
    epoch_steps = steps_per_epoch(num_images, batch_size, drop_remainder=True)
    images = jnp.asarray(dataset.train_images)
    labels = jnp.asarray(dataset.train_labels)
    splits = {
        "train": (images[:num_observed], labels[:num_observed]),
        "validation": (jnp.asarray(dataset.test_images), jnp.asarray(dataset.test_labels)),
    }

    def observe(model: BilinearNetwork, step: Array, key: Array) -> dict[str, Array]:
        observed = {}
        for split, examples in splits.items():
            loss, accuracy = loss_and_accuracy(model, *examples)
            observed[f"{split}_loss"] = loss
            observed[f"{split}_accuracy"] = accuracy
        return observed

    # Traced: other values do not compile again.
    settings = {"learning_rate": learning_rate, "weight_decay": weight_decay}
    settings |= {"num_epochs": num_epochs, "epoch_steps": epoch_steps}
    hyperparams = {name: jnp.full(num_seeds, float(value)) for name, value in settings.items()}
    return fit(
        models,
        make_step(noisy_cross_entropy(noise), _optimizer),
        # Batches of one size compile one step.
        Epochs((images, labels), batch_size, drop_remainder=True),
        num_epochs=num_epochs,
        key=fit_key,
        hyperparams=hyperparams,
        save=Save(observe),
        **options,
    )


def _optimizer(settings: dict[str, Any]) -> optax.GradientTransformation:
    def rate(step: ArrayLike) -> Array:
        epoch = jnp.floor(jnp.asarray(step) / settings["epoch_steps"])
        phase = jnp.pi * epoch / settings["num_epochs"]
        return 0.5 * settings["learning_rate"] * (1 + jnp.cos(phase))

    return optax.adamw(rate, weight_decay=settings["weight_decay"])


def loss_and_accuracy(
    model: BilinearNetwork, images: Float[Array, "n d"], labels: Float[Array, "n classes"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return mean cross entropy and accuracy; NaN for a diverged network."""
    logits = jax.vmap(model)(images)
    loss = jnp.mean(optax.softmax_cross_entropy(logits, labels))
    return loss, 1 - error_rate(logits, labels)


def noisy_cross_entropy(
    noise: Scalar,
) -> Callable[[BilinearNetwork, tuple[Array, Array], Array], Array]:
    """Return a loss: mean cross entropy of images with normal noise of this deviation."""
    scale = jnp.asarray(noise, float)

    def loss(model: BilinearNetwork, batch: tuple[Array, Array], key: Array) -> Array:
        images, labels = batch
        images = images + scale * normal(key, images.shape, images.dtype)
        return loss_and_accuracy(model, images, labels)[0]

    return loss
