"""The models of a sequence of digits: what they are called, how they are trained, and the forecasters made of them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation.checks import check_choice, check_count, check_distinct, check_positive, fail
from dissociation.data.datasets import NAMES
from dissociation.figures.artifacts import Parts
from dissociation.members import member
from dissociation.progress import MeterFactory
from dissociation.training import Progress
from koopman.estimators import ReducedRank
from koopman.figures.films import Forecaster, Latent, Pixels
from koopman.learn import encode, train_autoencoders, train_classifiers, train_encoders, validation_loss
from koopman.operators import fit
from koopman.pairs import lagged_pairs

NETWORKS = {
    "linear": (),
    "classifier": (),
    "vamp": ("vamp",),
    "contrastive": ("contrastive",),
    "dpnets": ("dpnets",),
    "autoencoder": ("autoencoder",),
    "autoencoder_operator": ("autoencoder",),
    "autoencoder_images": ("autoencoder",),
    "orthogonal": ("orthogonal",),
}
"""The trained networks that a model needs, besides the oracle, which reads all forecasts."""

LABELS = {
    "linear": "linear",
    "classifier": "classifier features",
    "vamp": "VAMP-2",
    "contrastive": "spectral contrastive",
    "dpnets": "DPNets",
    "autoencoder": "autoencoder",
    "autoencoder_operator": "autoencoder, fitted operator",
    "autoencoder_images": "autoencoder, image regression",
    "orthogonal": "orthogonal autoencoder",
}
"""What the models are called, in the order of tables and legends."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sequence, the networks, and how far to look."""

    data: Literal["glyphs", "mnist"] = "glyphs"
    """Data set: digits drawn by code, or MNIST."""
    num_digits: int = 5
    """Digits in the cycle."""
    num_seeds: int = 3
    """Networks of every kind, trained from scratch."""
    num_train: int = 3000
    """Images of the sequence for training: the first ones."""
    num_validation: int = 1000
    """The next ones, for validation losses."""
    num_test: int = 1000
    """The next ones, from which forecasts begin."""
    num_epochs: int = 50
    """Passes over the training sequence, for encoders and autoencoders."""
    oracle_epochs: int = 20
    """Passes for the oracle."""
    batch_size: int = 64
    """Pairs, or images, in a batch."""
    alpha: float = 1e-6
    """Regularisation of the operators."""
    num_steps: int = 15
    """Horizons."""
    far: int = 1000
    """One horizon more, for powers of the operator."""
    models: tuple[str, ...] = tuple(LABELS)
    """Which models; the oracle is always trained."""

    def __post_init__(self):
        check_choice("data", self.data, NAMES)
        for name in ("num_digits", "num_seeds", "num_test", "num_steps", "batch_size"):
            check_count(name, getattr(self, name), minimum=1)
        for name in ("num_train", "num_validation"):
            check_count(name, getattr(self, name), minimum=2)
        if self.num_digits > 10:
            fail("num_digits", "be at most 10", self.num_digits)
        if self.batch_size >= self.num_train:
            fail("batch_size", f"be below `num_train` ({self.num_train})", self.batch_size)
        for name in ("num_epochs", "oracle_epochs"):
            check_count(name, getattr(self, name))
        if check_count("far", self.far) <= self.num_steps:
            fail("far", f"be beyond `num_steps` ({self.num_steps})", self.far)
        check_positive("alpha", self.alpha)
        check_distinct("models", self.models)
        for name in self.models:
            check_choice("models", name, LABELS)

    def quick(self) -> "Config":
        """A small run that shows that everything works: no science."""
        return dataclasses.replace(
            self,
            num_seeds=2,
            num_train=300,
            num_validation=100,
            num_test=100,
            num_epochs=2,
            oracle_epochs=4,
            num_steps=3,
        )


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
    config: Config,
    key: Array,
    train: np.ndarray,
    validation: np.ndarray,
    labels: dict[str, np.ndarray],
    parts: Parts,
    progress: str | MeterFactory | None,
) -> Networks:
    """Trains the oracle and the networks that the models of `config` need, all seeds at once.

    Args:
        config: What to train.
        key: Everything random follows from it.
        train: The sequence, [n, 28, 28].
        validation: Another stretch of it.
        labels: Digits under "train".
        parts: Where checkpoints lie, and wall times are noted.
        progress: See `dissociation.progress`.

    Returns:
        The networks and their validation losses.
    """
    oracle_key, *keys = jax.random.split(jax.random.fold_in(key, 1), 6)
    common = {"num_seeds": config.num_seeds, "batch_size": config.batch_size, "callbacks": [Progress(progress)]}

    def options(name: str) -> dict[str, Any]:
        path: Path | None = parts.path(f"{name}.ckpt")
        return {**common, "checkpoint": path, "num_epochs": config.num_epochs, "validation": validation}

    oracle_options = {**common, "num_epochs": config.oracle_epochs, "checkpoint": parts.path("oracle.ckpt")}
    oracle = train_classifiers(train, labels["train"], key=oracle_key, num_classes=config.num_digits, **oracle_options)
    parts.seconds["training the oracle"] = oracle.seconds
    found: dict[str, Any] = {"oracle": oracle.models}
    curves, batched, diverged_at = {}, {}, {"oracle": oracle.diverged_at}
    for name, own in zip(("vamp", "contrastive", "dpnets"), keys, strict=False):
        if name not in config.models:
            continue
        result = train_encoders(name, train, key=own, features=config.num_digits, **options(name))
        found[name], curves[name] = result.models, np.asarray(result.history.observed)
        run = eqx.filter_jit(lambda model, images, kind=name: validation_loss(kind, model, images, batch_size=64))
        losses = [run(member(result.models, seed), jnp.asarray(validation)) for seed in range(config.num_seeds)]
        batched[name], diverged_at[name] = np.asarray(losses), result.diverged_at
        parts.seconds[f"training {name}"] = result.seconds
    for name, own, orthogonal in (("autoencoder", keys[3], False), ("orthogonal", keys[4], True)):
        if not any(model.startswith(name) for model in config.models):
            continue
        settings = {"features": config.num_digits, "orthogonal": orthogonal}
        result = train_autoencoders(train, key=own, **settings, **options(name))
        found[name], curves[name] = result.models, np.asarray(result.history.observed)
        diverged_at[name] = result.diverged_at
        parts.seconds[f"training {name}"] = result.seconds
    return Networks(found, curves, batched, diverged_at)


def forecasters(config: Config, train: np.ndarray, trained: dict[str, Any]) -> dict[str, Callable[[int], Forecaster]]:
    """For every model of `config`, a function from a seed's number to its forecaster.

    Args:
        config: Which models, and the rank and regularisation of their operators.
        train: The sequence that operators are fitted on.
        trained: `Networks.models`.

    Returns:
        The functions by the models' names.
    """
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

    def own(name: str) -> Callable[[int], Forecaster]:
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
        "autoencoder": own("autoencoder"),
        "autoencoder_operator": latent,
        "autoencoder_images": through("autoencoder"),
        "orthogonal": own("orthogonal"),
    }
    return {name: build for name, build in everything.items() if name in config.models}


def _fitted(
    features: Callable[[Array], Array],
    images: Array,
    config: Config,
    *,
    center: bool = False,
    decoder: Callable[[Array], Array] | None = None,
) -> Forecaster:
    """A forecaster by reduced rank regression on features, of images or, where there is a decoder, of features.

    With `center` the constant function goes, and its eigenvalue 1 with it.
    """
    return _fit(features, images, config.num_digits, config.alpha, center, decoder)


@eqx.filter_jit
def _fit(features: Any, images: Array, rank: int, alpha: float, center: bool, decoder: Any) -> Forecaster:
    x, y = lagged_pairs(encode(features, images))
    observable = images[1:] if decoder is None else None
    operator = fit(ReducedRank(rank, alpha), x, y, observable=observable, center=center)
    return Forecaster(features, operator, decoder)
