"""The models of a sequence of digits: what they are called, how they are trained, and the forecasters made of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation import member, plotting
from dissociation.figures import MeterFactory, Parts
from dissociation.training import Progress
from koopman import (
    ReducedRank,
    encode,
    fit,
    lagged_pairs,
    train_autoencoders,
    train_classifiers,
    train_encoders,
    validation_loss,
)
from koopman.figures._ordered_mnist_measures import Forecaster, Latent, Pixels


class Model(NamedTuple):
    """A way to foresee the sequence.

    Attributes:
        label: What it is called.
        networks: The trained networks that it needs, besides the oracle, which reads all forecasts.
        shown: The protocol by which its curve and strip are drawn.
        color: The number of its colour, one for every kind of network.
        kind: The number of its marker and dashes.
    """

    label: str
    networks: tuple[str, ...]
    shown: str
    color: int
    kind: int

    def look(self) -> dict[str, Any]:
        """Of its curve."""
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
"""In the order of tables and legends."""


_loss = eqx.filter_jit(validation_loss)


class Networks(NamedTuple):
    """Everything that is trained on a sequence.

    Attributes:
        models: By name, stacked over seeds; "oracle" reads forecasts.
        validation: Per encoder and autoencoder, its loss on the validation images, [seeds, epochs + 1].
        batched: Per encoder, the same at the end as the mean over batches of 64, [seeds].
        diverged_at: By name, the step at which a network diverged, or -1: [seeds].
    """

    models: dict[str, Any]
    validation: dict[str, np.ndarray]
    batched: dict[str, np.ndarray]
    diverged_at: dict[str, np.ndarray]


def train_networks(
    config: Any,
    key: Array,
    train: np.ndarray,
    validation: np.ndarray,
    labels: dict[str, np.ndarray],
    parts: Parts,
    progress: str | MeterFactory | None,
) -> Networks:
    """Trains the oracle and the networks that the models of `config` need on a sequence, all seeds at once.

    `train`, [n, 28, 28], shows digits `labels["train"]`; `validation` is another stretch. `parts` keeps checkpoints.
    """
    oracle_key, *keys = jax.random.split(jax.random.fold_in(key, 1), 6)
    common = {"num_seeds": config.num_seeds, "batch_size": config.batch_size, "callbacks": [Progress(progress)]}

    def options(name: str) -> dict[str, Any]:
        path = parts.path(f"{name}.ckpt")
        return {**common, "checkpoint": path, "num_epochs": config.num_epochs, "validation": validation}

    oracle_options = {**common, "num_epochs": config.oracle_epochs, "checkpoint": parts.path("oracle.ckpt")}
    oracle = train_classifiers(train, labels["train"], key=oracle_key, num_classes=config.num_digits, **oracle_options)
    parts.seconds["training the oracle"] = oracle.seconds
    models: dict[str, Any] = {"oracle": oracle.models}
    curves, batched, diverged_at = {}, {}, {"oracle": oracle.diverged_at}
    for name, name_key in zip(("vamp", "contrastive", "dpnets"), keys, strict=False):
        if name not in config.models:
            continue
        result = train_encoders(name, train, key=name_key, features=config.num_digits, **options(name))
        models[name], curves[name] = result.models, np.asarray(result.history.observed)
        networks = [member(result.models, seed) for seed in range(config.num_seeds)]
        losses = [_loss(name, network, jnp.asarray(validation), batch_size=64) for network in networks]
        batched[name], diverged_at[name] = np.asarray(losses), result.diverged_at
        parts.seconds[f"training {name}"] = result.seconds
    for name, name_key, orthogonal in (("autoencoder", keys[3], False), ("orthogonal", keys[4], True)):
        if not any(model.startswith(name) for model in config.models):
            continue
        settings = {"features": config.num_digits, "orthogonal": orthogonal}
        result = train_autoencoders(train, key=name_key, **settings, **options(name))
        models[name], curves[name] = result.models, np.asarray(result.history.observed)
        diverged_at[name] = result.diverged_at
        parts.seconds[f"training {name}"] = result.seconds
    return Networks(models, curves, batched, diverged_at)


def forecasters(config: Any, train: np.ndarray, trained: dict[str, Any]) -> dict[str, Callable[[int], Forecaster]]:
    """For every model of `config`, from a seed's number to its forecaster: one of `trained`, or fitted on `train`."""
    images = jnp.asarray(train)

    def pixels(seed: int) -> Forecaster:
        flat = images.reshape(len(images), -1)
        deviation = jnp.std(flat, 0)
        features = Pixels(jnp.mean(flat, 0), jnp.where(deviation > 0, deviation, 1.0))
        return _fitted(features, images, config, center=True)

    def through(name: str) -> Callable[[int], Forecaster]:
        def build(seed: int) -> Forecaster:
            model = member(trained[name], seed)
            return _fitted(getattr(model, "encoder", model) if name == "autoencoder" else model, images, config)

        return build

    def by_powers(name: str) -> Callable[[int], Forecaster]:
        def build(seed: int) -> Forecaster:
            model = member(trained[name], seed)
            return Forecaster(model.encoder, Latent(model.matrix()), model.decoder)

        return build

    def latent(seed: int) -> Forecaster:
        model = member(trained["autoencoder"], seed)
        return _fitted(model.encoder, images, config, decoder=model.decoder)

    everything = {
        "linear": pixels,
        "classifier": through("oracle"),
        "vamp": through("vamp"),
        "contrastive": through("contrastive"),
        "dpnets": through("dpnets"),
        "autoencoder": by_powers("autoencoder"),
        "autoencoder_operator": latent,
        "autoencoder_images": through("autoencoder"),
        "orthogonal": by_powers("orthogonal"),
    }
    return {name: build for name, build in everything.items() if name in config.models}


def _fitted(
    features: Callable[[Array], Array],
    images: Array,
    config: Any,
    *,
    center: bool = False,
    decoder: Callable[[Array], Array] | None = None,
) -> Forecaster:
    """A forecaster by reduced rank regression on features, of images or, where there is a decoder, of features.

    With `center` the constant function goes, and its eigenvalue 1 with it.
    """
    return _fit(features, images, config.num_digits, jnp.asarray(config.alpha), center, decoder)


@eqx.filter_jit
def _fit(features: Any, images: Array, rank: int, alpha: Array, center: bool, decoder: Any) -> Forecaster:
    x, y = lagged_pairs(encode(features, images))
    observable = images[1:] if decoder is None else None
    operator = fit(ReducedRank(rank, alpha), x, y, observable=observable, center=center)
    return Forecaster(features, operator, decoder)
