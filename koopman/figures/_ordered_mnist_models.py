"""Models of a sequence of digits: names, training and forecasters."""

from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from dissociation import member, plotting
from dissociation.figures import Cache
from dissociation.models import Encoder
from dissociation.training import Progress
from koopman import (
    Autoencoder,
    FeatureMap,
    ReducedRank,
    encode,
    fit,
    lagged_pairs,
    train_encoders,
    validation_loss,
)
from koopman.figures._ordered_mnist_measures import Forecaster, Latent, Pixels


class Model(NamedTuple):
    """Model of the sequence."""

    label: str  # name in the figure
    network: str  # name of its trained network; the oracle if it has none of its own
    protocol: str  # protocol of its curve and strip
    color: int  # per kind of network
    kind: int  # number of its marker and dashes

    def look(self) -> dict[str, Any]:
        """Return the style of its curve."""
        style = plotting.look(self.kind)
        style["color"] = plotting.color(self.color)
        return style


MODELS = {
    "linear": Model("linear", "oracle", "images", 6, 0),
    "classifier": Model("classifier features", "oracle", "images", 0, 1),
    "vamp": Model("VAMP-2", "vamp", "images", 1, 2),
    "contrastive": Model("spectral contrastive", "contrastive", "images", 2, 3),
    "dpnets": Model("DPNets", "dpnets", "images", 3, 4),
    "autoencoder": Model("autoencoder", "autoencoder", "powers", 4, 0),
    "autoencoder_operator": Model("autoencoder, fitted operator", "autoencoder", "powers", 4, 1),
    "autoencoder_images": Model("autoencoder, image regression", "autoencoder", "images", 4, 2),
    "orthogonal": Model("orthogonal autoencoder", "orthogonal", "powers", 5, 3),
}
"""Models in the order of tables and legends."""

NETWORKS = {
    "oracle": ("classes", 8e-4),
    "vamp": ("vamp", 2e-3),
    "contrastive": ("contrastive", 2e-3),
    "dpnets": ("dpnets", 2e-3),
    "autoencoder": ("reconstruction", 1e-3),
    "orthogonal": ("reconstruction", 1e-3),
}
"""Losses and learning rates of the networks."""

_loss = eqx.filter_jit(validation_loss)


class Networks(NamedTuple):
    """Networks trained on a sequence, by name. Losses that a network lacks are NaN.

    Attributes:
        models: Stacked networks. "oracle" reads forecasts.
        validation: Losses of encoders and autoencoders on validation images, [seeds, epochs + 1].
        batched: Last validation loss of encoders as the mean over batches of 64, [seeds].
        diverged_at: Step at which a network diverged, or -1, [seeds].
    """

    models: dict[str, Any]
    validation: dict[str, np.ndarray]
    batched: dict[str, np.ndarray]
    diverged_at: dict[str, np.ndarray]


def _network(name: str, width: int, key: Array) -> Any:
    """Draw a network by its name."""
    if name == "oracle":
        return Encoder(width, key=key)
    if NETWORKS[name][0] == "reconstruction":
        return Autoencoder(width, orthogonal=name == "orthogonal", init="lecun", key=key)
    return FeatureMap(width, feature_norm=width**0.5, key=key)


def train_networks(
    config: Any,
    key: Array,
    train: np.ndarray,
    validation: np.ndarray,
    labels: np.ndarray,
    cache: Cache,
) -> Networks:
    """Train the oracle and the networks of the models of `config`, for all seeds.

    Images `train` and `validation` have shape [n, 28, 28].
    """
    num_seeds = config.num_seeds
    pairs: dict[str, Any] = {
        "data": lagged_pairs([train]),
        "validation": lagged_pairs([validation]),
        "num_epochs": config.num_epochs,
    }
    classes = {"data": (train, labels), "num_epochs": config.oracle_epochs}
    missing = np.full((num_seeds, config.num_epochs + 1), np.nan, jnp.result_type(float))

    needed = {"oracle"}
    for model in config.models:
        needed.add(MODELS[model].network)
    keys = jax.random.split(jax.random.fold_in(key, 1), len(NETWORKS))

    networks = Networks({}, {}, {}, {})
    for name, network_key in zip(NETWORKS, keys, strict=True):
        if name not in needed:
            continue
        loss, learning_rate = NETWORKS[name]
        examples = pairs
        if name == "oracle":
            examples = classes
        trained = train_encoders(
            partial(_network, name, config.num_digits),
            loss,
            key=network_key,
            optimizer=optax.adamw(learning_rate, weight_decay=0.01),
            num_seeds=num_seeds,
            batch_size=config.batch_size,
            checkpoint=cache.path(f"{name}.ckpt"),
            callbacks=[Progress(cache.progress)],
            **examples,
        )
        cache.seconds[f"training {name}"] = trained.seconds
        networks.models[name] = trained.models
        networks.diverged_at[name] = trained.diverged_at

        networks.validation[name] = missing
        if name != "oracle":
            networks.validation[name] = np.asarray(trained.history.observed)
        networks.batched[name] = missing[:, 0]
        if loss == name:
            losses = []
            for seed in range(num_seeds):
                network = member(trained.models, seed)
                losses.append(_loss(name, network, jnp.asarray(validation), batch_size=64))
            networks.batched[name] = np.asarray(losses)
    return networks


def forecaster(
    config: Any, name: str, images: np.ndarray, trained: dict[str, Any], seed: int
) -> Forecaster:
    """Return a forecaster of a model of `config`.

    It is fitted to `images`, with features of the stacked networks `trained`, by name.
    """
    fitted = partial(_fit, jnp.asarray(images), config.num_digits, jnp.asarray(config.alpha))
    if name == "linear":
        flat = jnp.asarray(images).reshape(len(images), -1)
        deviation = jnp.std(flat, 0)
        deviation = jnp.where(deviation > 0, deviation, 1.0)
        # Only pixels are centred. Centring removes the constant function, of eigenvalue 1, from the
        # operator.
        return fitted(Pixels(jnp.mean(flat, 0), deviation), None, center=True)

    network = MODELS[name].network
    model = member(trained[network], seed)
    if not isinstance(model, Autoencoder):
        return fitted(model, None, center=False)
    if name == network:
        return Forecaster(model.encoder, Latent(model.matrix()), model.decoder)
    decoder = None
    if name == "autoencoder_operator":
        decoder = model.decoder
    return fitted(model.encoder, decoder, center=False)


@eqx.filter_jit
def _fit(
    images: Array, rank: int, alpha: Array, features: Any, decoder: Any, *, center: bool
) -> Forecaster:
    """Fit a forecaster by reduced rank regression on features.

    It forecasts images, or features if there is a decoder.
    """
    x, y = lagged_pairs(encode(features, images))
    observable = None
    if decoder is None:
        observable = images[1:]
    operator = fit(ReducedRank(rank, alpha), x, y, observable=observable, center=center)
    return Forecaster(features, operator, decoder)
