"""Train the networks of the robustness and transfer figures."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from dissociation._core.checks import check_choice
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated
from dissociation.data._datasets import Dataset, load
from dissociation.measures._robustness import error_rate
from dissociation.models._images import CNN, ResNet, Transformer
from dissociation.models._layers import check_sizes
from dissociation.training._fitting import FitResult, fit
from dissociation.training._progress import MeterFactory, Progress
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs, steps_per_epoch
from dissociation.training._state import make_step

DEFAULT_SEED = 37
BATCH_SIZE = 128
FIRST_RATE = 1e-1
LAST_RATE = 1e-6
IMAGE_NETWORKS = {"cnn": CNN, "resnet": ResNet, "transformer": Transformer}
NETWORKS = ("mlp", *IMAGE_NETWORKS)


@validated
def train_mnist(
    *,
    num_epochs: int = 30,
    num_seeds: int = 10,
    key: PRNGKey | None = None,
    dataset: str | Dataset = "mnist",
    width: int = 1024,
    progress: str | MeterFactory | None = "auto",
) -> eqx.nn.MLP:
    """Train stacked networks; see `fit_classifiers` for arguments and for the history.

    Returns:
        An `eqx.nn.MLP` without biases whose `layers[i].weight` has seeds first.
    """
    return fit_classifiers(
        num_epochs=num_epochs,
        num_seeds=num_seeds,
        key=key,
        dataset=dataset,
        width=width,
        progress=progress,
    ).models


@validated
def fit_classifiers(
    *,
    num_epochs: int = 30,
    num_seeds: int = 10,
    key: PRNGKey | None = None,
    dataset: str | Dataset = "mnist",
    width: int = 1024,
    progress: str | MeterFactory | None = "auto",
    network: str = "mlp",
    mesh: Mesh | str | None = "auto",
    checkpoint: str | Path | None = None,
    observe: Callable[..., dict[str, Array]] | None = None,
) -> FitResult:
    """Train stacked networks by stochastic gradient descent on the cross entropy.

    Batches of 128 come in one order for all seeds; the last of an epoch is smaller. The learning
    rate falls linearly from 1e-1 to 1e-6.

    Args:
        num_epochs: Passes over the training images; 0 returns initial networks.
        num_seeds: Number of networks.
        key: Key, split once into one per network and one for the order of batches; None is
            `jax.random.PRNGKey(37)`.
        dataset: "mnist", "glyphs", or a loaded `Dataset`.
        width: Width of hidden layers, in networks of images of the last one.
        progress: Meter of loss and test error over seeds; None for silence.
        network: "mlp", ReLU with two hidden layers and no biases, or for 28 x 28 pixels "cnn",
            "resnet" or "transformer" of `models`.
        mesh: Devices for the seeds, see `training.fit`.
        checkpoint: File to write and to resume from, see `training.fit`.
        observe: Observation before training and after every epoch, see `training.Save`; default:
            `HeldOutPerformance`.

    Returns:
        A `FitResult` whose `history.observed` is `{"test_error", "test_loss"}`, [seeds, epochs + 1]
        each, or that of `observe`.
    """
    if key is None:
        key = jax.random.PRNGKey(DEFAULT_SEED)
    if isinstance(dataset, str):
        dataset = load(dataset)
    check_sizes(num_seeds=num_seeds, width=width)
    check_choice("network", network, NETWORKS)
    keys = jax.random.split(key, num_seeds + 1)
    num_images, num_inputs = dataset.train_images.shape
    num_classes = dataset.train_labels.shape[1]
    models = _networks(keys[:num_seeds], num_inputs, num_classes, width, network)

    # A small dataset may have fewer images than a batch.
    batch_size = min(BATCH_SIZE, num_images)
    num_steps = num_epochs * steps_per_epoch(num_images, batch_size)
    # A schedule needs a step, also for no epochs.
    rate = optax.linear_schedule(FIRST_RATE, LAST_RATE, max(num_steps, 1))
    test_images = jnp.asarray(dataset.test_images)
    test_labels = jnp.asarray(dataset.test_labels)
    if observe is None:
        observe = HeldOutPerformance(test_images, test_labels)
    return fit(
        models,
        make_step(cross_entropy, optax.sgd(rate)),
        Epochs((dataset.train_images, dataset.train_labels), batch_size),
        num_epochs=num_epochs,
        key=keys[num_seeds],
        save=Save(observe),
        callbacks=[Progress(progress)],
        mesh=mesh,
        checkpoint=checkpoint,
    )


@validated
def fresh_networks(
    num_seeds: int, *, key: PRNGKey, num_inputs: int = 784, num_classes: int = 10, width: int = 1024
) -> eqx.nn.MLP:
    """Return stacked ReLU networks with two hidden layers, no biases and Equinox's initial weights.

    Args:
        num_seeds: Number of networks, at least 1.
        key: Key, split into one per seed.
        num_inputs: Width of the input.
        num_classes: Width of the output.
        width: Width of hidden layers.
    """
    check_sizes(num_seeds=num_seeds, num_inputs=num_inputs, num_classes=num_classes, width=width)
    return _networks(jax.random.split(key, num_seeds), num_inputs, num_classes, width)


def _networks(
    keys: Array, num_inputs: int, num_classes: int, width: int, network: str = "mlp"
) -> Any:
    def build(key: Array) -> eqx.Module:
        if network in IMAGE_NETWORKS:
            return IMAGE_NETWORKS[network](width, num_classes, key=key)
        return eqx.nn.MLP(
            num_inputs,
            num_classes,
            width,
            2,
            jax.nn.relu,
            use_bias=False,
            use_final_bias=False,
            key=key,
        )

    return eqx.filter_vmap(build)(keys)


@validated
def cross_entropy(
    model: Any, batch: tuple[Array, Array], key: Array | None = None
) -> Float[Array, ""]:
    """Return the mean over the batch of -sum_k y_k log softmax(f(x))_k, in nats.

    Args:
        model: Function from one image [pixels] to logits [classes].
        batch: Images [batch, pixels] and one-hot labels [batch, classes].
        key: Not used; `training.fit` passes one.
    """
    images, labels = batch
    return optax.softmax_cross_entropy(jax.vmap(model)(images), labels).mean()


class HeldOutPerformance(eqx.Module):
    """Observation of error rate and cross entropy on held-out images, for `training.Save`."""

    images: Float[Array, "n pixels"]
    labels: Float[Array, "n classes"]

    def __call__(self, model: Any, step: Array, key: Array) -> dict[str, Float[Array, ""]]:
        """Return `{"test_error", "test_loss"}`: a fraction, or NaN, and a loss in nats."""
        logits = jax.vmap(model)(self.images)
        return {
            "test_error": error_rate(logits, self.labels),
            "test_loss": optax.softmax_cross_entropy(logits, self.labels).mean(),
        }
