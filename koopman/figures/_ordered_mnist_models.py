"""Models of a sequence of digits: names, training and forecasters."""

from collections.abc import Callable
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
from koopman import Autoencoder, FeatureMap, ReducedRank, encode, fit, lagged_pairs, train_encoders, validation_loss
from koopman.figures._ordered_mnist_measures import Forecaster, Latent, Pixels


class Model(NamedTuple):
    """Model of the sequence."""

    label: str  # name in the figure
    networks: tuple[str, ...]  # trained networks, besides the oracle
    shown: str  # protocol of its curve and strip
    color: int  # per kind of network
    kind: int  # number of its marker and dashes

    def look(self) -> dict[str, Any]:
        """Return the style of its curve."""
        return {**plotting.look(self.kind), "color": plotting.color(self.color)}


MODELS = {
    "linear": Model("linear", (), "images", 6, 0),
    "classifier": Model("classifier features", (), "images", 0, 1),
    "vamp": Model("VAMP-2", ("vamp",), "images", 1, 2),
    "contrastive": Model("spectral contrastive", ("contrastive",), "images", 2, 3),
    "dpnets": Model("DPNets", ("dpnets",), "images", 3, 4),
    "autoencoder": Model("autoencoder", ("autoencoder",), "powers", 4, 0),
    "autoencoder_operator": Model("autoencoder, fitted operator", ("autoencoder",), "powers", 4, 1),
    "autoencoder_images": Model("autoencoder, image regression", ("autoencoder",), "images", 4, 2),
    "orthogonal": Model("orthogonal autoencoder", ("orthogonal",), "powers", 5, 3),
}
"""Models in the order of tables and legends."""


_loss = eqx.filter_jit(validation_loss)


class Networks(NamedTuple):
    """Networks trained on a sequence, by name."""

    models: dict[str, Any]  # stacked; "oracle" reads forecasts
    validation: dict[str, np.ndarray]  # losses of encoders and autoencoders on validation images, [seeds, epochs + 1]
    batched: dict[str, np.ndarray]  # the last validation loss of encoders as the mean over batches of 64, [seeds]
    diverged_at: dict[str, np.ndarray]  # the step at which a network diverged, or -1: [seeds]


def _network(name: str, width: int, key: Array) -> Any:
    """Draw a network by its name."""
    if name == "oracle":
        return Encoder(width, key=key)
    if name in ("autoencoder", "orthogonal"):
        return Autoencoder(width, orthogonal=name == "orthogonal", init="lecun", key=key)
    return FeatureMap(width, feature_norm=width**0.5, key=key)


def train_networks(
    config: Any, key: Array, train: np.ndarray, validation: np.ndarray, labels: np.ndarray, cache: Cache
) -> Networks:
    """Train the oracle and the networks of the models of `config`, for all seeds, on images `train` [n, 28, 28]."""
    oracle_key, *keys = jax.random.split(jax.random.fold_in(key, 1), 6)
    common = {"num_seeds": config.num_seeds, "batch_size": config.batch_size, "callbacks": [Progress(cache.progress)]}
    found = Networks({}, {}, {}, {})

    def keep(name: str, result: Any, words: str) -> None:
        found.models[name], found.diverged_at[name] = result.models, result.diverged_at
        cache.seconds[f"training {words}"] = result.seconds

    def trained(name: str, loss: str, data: Any, rate: float, **options: Any) -> Any:
        network, optimizer = partial(_network, name, config.num_digits), optax.adamw(rate, weight_decay=0.01)
        checkpoint = cache.path(f"{name}.ckpt")
        return train_encoders(network, loss, data, optimizer=optimizer, checkpoint=checkpoint, **common, **options)

    oracle = trained("oracle", "classes", (train, labels), 8e-4, key=oracle_key, num_epochs=config.oracle_epochs)
    keep("oracle", oracle, "the oracle")
    pairs, held_out = lagged_pairs([train]), lagged_pairs([validation])
    for name, name_key in zip(("vamp", "contrastive", "dpnets", "autoencoder", "orthogonal"), keys, strict=True):
        if not any(model.startswith(name) for model in config.models):
            continue
        loss, rate = ("reconstruction", 1e-3) if name in ("autoencoder", "orthogonal") else (name, 2e-3)
        options = {"key": name_key, "num_epochs": config.num_epochs, "validation": held_out}
        result = trained(name, loss, pairs, rate, **options)
        if loss == name:
            networks = [member(result.models, seed) for seed in range(config.num_seeds)]
            losses = [_loss(name, network, jnp.asarray(validation), batch_size=64) for network in networks]
            found.batched[name] = np.asarray(losses)
        keep(name, result, name)
        found.validation[name] = np.asarray(result.history.observed)
    return found


def forecasters(config: Any, train: np.ndarray, trained: dict[str, Any]) -> dict[str, Callable[[int], Forecaster]]:
    """Return for every model of `config` a function from a seed to a forecaster."""
    images = jnp.asarray(train)

    def pixels(seed: int) -> Forecaster:
        flat = images.reshape(len(images), -1)
        deviation = jnp.std(flat, 0)
        return fitted(Pixels(jnp.mean(flat, 0), jnp.where(deviation > 0, deviation, 1.0)), center=True)

    def through(name: str, seed: int) -> Forecaster:
        model = member(trained[name], seed)
        return fitted(model.encoder if name == "autoencoder" else model)

    def by_powers(name: str, seed: int) -> Forecaster:
        model = member(trained[name], seed)
        return Forecaster(model.encoder, Latent(model.matrix()), model.decoder)

    def latent(seed: int) -> Forecaster:
        model = member(trained["autoencoder"], seed)
        return fitted(model.encoder, decoder=model.decoder)

    def fitted(features: Any, *, center: bool = False, decoder: Any = None) -> Forecaster:
        return _fit(features, images, config.num_digits, jnp.asarray(config.alpha), center, decoder)

    everything = {
        "linear": pixels,
        "classifier": partial(through, "oracle"),
        "vamp": partial(through, "vamp"),
        "contrastive": partial(through, "contrastive"),
        "dpnets": partial(through, "dpnets"),
        "autoencoder": partial(by_powers, "autoencoder"),
        "autoencoder_operator": latent,
        "autoencoder_images": partial(through, "autoencoder"),
        "orthogonal": partial(by_powers, "orthogonal"),
    }
    return {name: build for name, build in everything.items() if name in config.models}


@eqx.filter_jit
def _fit(features: Any, images: Array, rank: int, alpha: Array, center: bool, decoder: Any) -> Forecaster:
    """Fit a forecaster by reduced rank regression on features, of images or, with a decoder, of features."""
    # Only pixels are centred. Centring removes the constant function, of eigenvalue 1, from the operator.
    x, y = lagged_pairs(encode(features, images))
    observable = images[1:] if decoder is None else None
    operator = fit(ReducedRank(rank, alpha), x, y, observable=observable, center=center)
    return Forecaster(features, operator, decoder)
