"""Train bilinear networks on images."""

from typing import Any, NamedTuple

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

    The learning rate falls along a cosine to zero, epoch by epoch. Gaussian noise is drawn for every image, step and
    network. The last, smaller batch of an epoch is dropped.

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
        Result of `fit`; `history.observed` holds "train_loss", "train_accuracy", "validation_loss" and
        "validation_accuracy" without noise, each [seeds, epochs + 1].

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
    batch_size = min(batch_size, len(dataset.train_images))
    epoch_steps = steps_per_epoch(len(dataset.train_images), batch_size, drop_remainder=True)
    data = jnp.asarray(dataset.train_images), jnp.asarray(dataset.train_labels)
    train = (part[:num_observed] for part in data)
    observe = LossAndAccuracy(*train, *map(jnp.asarray, (dataset.test_images, dataset.test_labels)))
    settings = Settings(*map(float, (learning_rate, weight_decay, num_epochs, epoch_steps)))
    return fit(
        models,
        make_step(NoisyCrossEntropy(jnp.asarray(noise, float)), _optimizer),
        # Batches of one size compile one step.
        Epochs(data, batch_size, drop_remainder=True),
        num_epochs=num_epochs,
        key=fit_key,
        hyperparams=jax.tree.map(lambda value: jnp.full(num_seeds, value), settings),
        save=Save(observe),
        **options,
    )


class Settings(NamedTuple):
    """Settings of AdamW, [members] each."""

    # Traced: other values do not compile again.
    learning_rate: Any
    weight_decay: Any
    num_epochs: Any
    epoch_steps: Any


def _optimizer(settings: Settings) -> optax.GradientTransformation:
    def rate(step: ArrayLike) -> Array:
        epoch = jnp.floor(jnp.asarray(step) / settings.epoch_steps)
        return 0.5 * settings.learning_rate * (1 + jnp.cos(jnp.pi * epoch / settings.num_epochs))

    return optax.adamw(rate, weight_decay=settings.weight_decay)


@validated
def loss_and_accuracy(
    model: BilinearNetwork, images: Float[Array, "n d"], labels: Float[Array, "n classes"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return mean cross entropy and accuracy; NaN for a diverged network."""
    logits = jax.vmap(model)(images)
    return jnp.mean(optax.softmax_cross_entropy(logits, labels)), 1 - error_rate(logits, labels)


class NoisyCrossEntropy(eqx.Module):
    """Loss: mean cross entropy of noisy images."""

    noise: Float[Array, ""]

    def __call__(self, model: BilinearNetwork, batch: tuple[Array, Array], key: Array) -> Array:
        """Return the loss."""
        images, labels = batch
        return loss_and_accuracy(model, images + self.noise * normal(key, images.shape, images.dtype), labels)[0]


class LossAndAccuracy(eqx.Module):
    """Observation of loss and accuracy on training and validation images."""

    train_images: Float[Array, "n d"]
    train_labels: Float[Array, "n classes"]
    images: Float[Array, "m d"]
    labels: Float[Array, "m classes"]

    def __call__(self, model: BilinearNetwork, step: Array, key: Array) -> dict[str, Array]:
        """Return loss and accuracy of both splits."""
        train = loss_and_accuracy(model, self.train_images, self.train_labels)
        validation = loss_and_accuracy(model, self.images, self.labels)
        names = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy")
        return dict(zip(names, (*train, *validation), strict=True))
