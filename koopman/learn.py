"""Encoders, autoencoders and classifiers of films, many seeds at once, through `dissociation.training.fit`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, Key, UInt32

from dissociation.checks import check_choice, check_count, check_non_negative, check_positive, check_same_length, fail
from dissociation.models.cnn import Encoder
from dissociation.training import FitResult, fit
from koopman.losses import autoencoder_loss, dpnets_loss, spectral_contrastive_loss, vamp_loss
from koopman.networks import Autoencoder, FeatureMap

AnyKey = Key[Array, ""] | UInt32[Array, "2"]
Images = Float[Array | np.ndarray, "n 28 28"]
Film = Float[Array | np.ndarray, "m 28 28"]
Rate = float | Float[Array | np.ndarray, "..."]

ENCODER_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "vamp": partial(vamp_loss, center_covariances=False),
    "contrastive": spectral_contrastive_loss,
    "dpnets": partial(dpnets_loss, center_covariances=False),
}
"""Losses of features now and one step later: VAMP-2 without centring, spectral contrastive, DPNets."""


def encode(model: Callable[[Array], Array], images: Images) -> Array:
    """`model` at every picture: [n, ...]."""
    return jax.vmap(model)(jnp.asarray(images))


def pair_loss(kind: str, model: FeatureMap, x: Images, y: Images) -> Float[Array, ""]:
    """The loss of pairs of pictures: features of x, and features of y in the lagged view.

    Args:
        kind: One of `ENCODER_LOSSES`.
        model: One feature map.
        x: Pictures.
        y: The pictures after them.

    Returns:
        The loss. For n classes in a cycle and n features the optimum of "vamp" is -n, and so is that of "contrastive"
        for many pairs; see `validation_loss` for few.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    # One pass for both: a convolution of twice the pictures is cheaper than two.
    both = encode(model, jnp.concatenate([jnp.asarray(x), jnp.asarray(y)]))
    return ENCODER_LOSSES[kind](both[: len(x)], jax.vmap(model.lag)(both[len(x) :]))


def reconstruction_loss(model: Autoencoder, x: Images, y: Images) -> Float[Array, ""]:
    """`autoencoder_loss` of pairs of pictures.

    Args:
        model: One autoencoder.
        x: Pictures.
        y: The pictures after them.

    Returns:
        Mean squared errors of reconstruction, of the linear step between features, and of the predicted picture.
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    features = encode(model.encoder, jnp.concatenate([x, y]))
    now, later = features[: len(x)], features[len(x) :]
    evolved = now @ model.matrix()
    pictures = jax.vmap(model.decoder)(jnp.concatenate([now, evolved]))
    return autoencoder_loss(x, y, pictures[: len(x)], later, evolved, pictures[len(x) :])


def train_encoders(
    kind: str,
    images: Images,
    *,
    key: AnyKey,
    num_seeds: int = 5,
    num_epochs: int = 50,
    batch_size: int = 64,
    learning_rate: Rate = 2e-3,
    weight_decay: Rate = 0.01,
    features: int = 5,
    init: str = "pytorch",
    length: float | None = None,
    validation: Film | None = None,
    **options: Any,
) -> FitResult:
    """Trains feature maps on a film, pairs of one picture and the next, with AdamW.

    Args:
        kind: "vamp", "contrastive" or "dpnets".
        images: The film.
        key: One key; every seed's network follows from it, and the order of batches, which all seeds share.
        num_seeds: Networks.
        num_epochs: Passes over the pairs.
        batch_size: Pairs in a batch; the last, smaller one of an epoch is kept.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds].
        weight_decay: AdamW's, likewise.
        features: Width of the output.
        init: "pytorch" or "lecun".
        length: Norm of the features, default sqrt(features); published: 1, with which the contrastive loss waits on a
            plateau of -1 for many epochs, see `FeatureMap`.
        validation: Another film, whose loss (all pairs at once) is observed after every epoch.
        **options: For `dissociation.training.fit`: `progress`, `checkpoint`, `log`, `mesh`, `member_map`.

    Returns:
        What `fit` returns; `history.observed` is the validation loss [seeds, epochs + 1], if there is one.

    Raises:
        ValueError: If an option is out of range or the film has fewer than two pictures.

    References:
        Kostic et al. (2024), Learning invariant representations of time-homogeneous stochastic dynamical systems.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    if (len(images) - 1) % batch_size == 1:
        fail("batch_size", "not leave a single pair for the last batch", f"{batch_size} for {len(images) - 1} pairs")
    rates = _rates(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)
    norm = features**0.5 if length is None else length
    models = _stack(lambda k: FeatureMap(features, length=norm, init=init, key=k), build_key, num_seeds)

    observe = None if validation is None else _Validation(kind, *_pairs(validation))
    return _fit(models, _Loss(kind), _pairs(images), fit_key, num_epochs, batch_size, rates, observe, options)


def train_autoencoders(
    images: Images,
    *,
    key: AnyKey,
    num_seeds: int = 5,
    num_epochs: int = 50,
    batch_size: int = 64,
    learning_rate: Rate = 2e-3,
    weight_decay: Rate = 0.01,
    features: int = 5,
    orthogonal: bool = False,
    upsampling: str = "nearest",
    init: str = "pytorch",
    validation: Film | None = None,
    **options: Any,
) -> FitResult:
    """Trains dynamical autoencoders on a film.

    Args:
        images: The film.
        key: One key.
        num_seeds: Networks.
        num_epochs: Passes over the pairs.
        batch_size: Pairs in a batch.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds].
        weight_decay: AdamW's, likewise.
        features: Width of the latent space.
        orthogonal: Whether the latent map is kept orthogonal.
        upsampling: "nearest" or "bilinear".
        init: "pytorch" or "lecun".
        validation: Another film, whose loss is observed after every epoch.
        **options: For `dissociation.training.fit`.

    Returns:
        What `fit` returns.

    Raises:
        ValueError: If an option is out of range or the film has fewer than two pictures.

    References:
        Lusch, Kutz and Brunton (2018), Deep learning for universal linear embeddings of nonlinear dynamics.
    """
    rates = _rates(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)
    settings = {"orthogonal": orthogonal, "upsampling": upsampling, "init": init}
    models = _stack(lambda k: Autoencoder(features, **settings, key=k), build_key, num_seeds)

    observe = None if validation is None else _Validation("reconstruction", *_pairs(validation))
    loss = _Loss("reconstruction")
    return _fit(models, loss, _pairs(images), fit_key, num_epochs, batch_size, rates, observe, options)


def train_classifiers(
    images: Images,
    labels: Int[Array | np.ndarray, " n"],
    *,
    key: AnyKey,
    num_classes: int = 5,
    num_seeds: int = 5,
    num_epochs: int = 20,
    batch_size: int = 64,
    learning_rate: Rate = 8e-4,
    weight_decay: Rate = 0.01,
    init: str = "pytorch",
    **options: Any,
) -> FitResult:
    """Trains encoders as classifiers, by cross entropy: the oracle that reads forecast pictures.

    Args:
        images: Pictures.
        labels: Classes, 0 to `num_classes` - 1.
        key: One key.
        num_classes: Width of the output.
        num_seeds: Networks.
        num_epochs: Passes over the pictures.
        batch_size: Pictures in a batch.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds].
        weight_decay: AdamW's, likewise.
        init: "pytorch" or "lecun".
        **options: For `dissociation.training.fit`.

    Returns:
        What `fit` returns.

    Raises:
        ValueError: If lengths disagree or an option is out of range.
    """
    check_same_length("images", len(images), "labels", len(labels))
    rates = _rates(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)
    models = _stack(lambda k: Encoder(num_classes, init=init, key=k), build_key, num_seeds)

    data, loss = (jnp.asarray(images), jnp.asarray(labels)), _Loss("classes")
    return _fit(models, loss, data, fit_key, num_epochs, batch_size, rates, None, options)


def validation_loss(kind: str, model: FeatureMap, images: Images, *, batch_size: int | None = None) -> Float[Array, ""]:
    """`pair_loss` of a film: of all pairs at once, or as the mean over batches.

    The two differ, and the mean over batches looks better for the same network. The contrastive loss leaves out i = j,
    a pair of one class. Of five classes in turn that leaves (12.8 - 1) / 63 = 0.187 equal pairs in a batch of 64, and
    0.199 of 999 pairs: with perfect features, 25 times the share less 10 is -5.32 and -5.02. VAMP gains a little from
    covariances that are noisier in a batch.

    Args:
        kind: One of `ENCODER_LOSSES`.
        model: One feature map.
        images: The film.
        batch_size: Pairs in a batch, in order; the last, smaller one counts as much as the others. None: all at once.

    Returns:
        The loss.
    """
    x, y = _pairs(images)
    if batch_size is None:
        return pair_loss(kind, model, x, y)
    check_count("batch_size", batch_size, minimum=2)
    starts = range(0, len(x), batch_size)
    return jnp.mean(jnp.stack([pair_loss(kind, model, x[i : i + batch_size], y[i : i + batch_size]) for i in starts]))


def member(models: Any, index: int) -> Any:
    """One of stacked models."""
    return jax.tree.map(lambda leaf: leaf[index] if eqx.is_array(leaf) else leaf, models)


class _Loss(eqx.Module):
    """The loss of a batch. Equal for equal kinds, unlike closures, so that training twice compiles once."""

    kind: str = eqx.field(static=True)

    def __call__(self, model: Any, batch: tuple[Array, Array], key: Array) -> Array:
        if self.kind == "classes":
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(encode(model, batch[0]), batch[1]))
        if self.kind == "reconstruction":
            return reconstruction_loss(model, *batch)
        return pair_loss(self.kind, model, *batch)


class _Validation(eqx.Module):
    """An observation: the loss of other pairs."""

    kind: str = eqx.field(static=True)
    x: Array
    y: Array

    def __call__(self, model: Any, step: Array, key: Array) -> Array:
        return _Loss(self.kind)(model, (self.x, self.y), key)


def _pairs(images: Images) -> tuple[Array, Array]:
    if len(images) < 2:
        fail("images", "hold at least two pictures", f"{len(images)}")
    return jnp.asarray(images[:-1]), jnp.asarray(images[1:])


def _stack(build: Callable[[Array], Any], key: Array, num_seeds: int) -> Any:
    count = check_count("num_seeds", num_seeds, minimum=1)
    return eqx.filter_vmap(build)(jax.random.split(key, count))


class _Rates(NamedTuple):
    """AdamW's settings, one per seed; traced."""

    learning_rate: Array
    weight_decay: Array


def _rates(learning_rate: Rate, weight_decay: Rate, num_seeds: int) -> _Rates:
    check_positive("learning_rate", learning_rate)
    check_non_negative("weight_decay", weight_decay)
    for name, value in (("learning_rate", learning_rate), ("weight_decay", weight_decay)):
        if np.ndim(value) and np.shape(value) != (num_seeds,):
            fail(name, f"be one number, or one per seed ({num_seeds})", f"shape {np.shape(value)}")
    return _Rates(*(jnp.full(num_seeds, value, float) for value in (learning_rate, weight_decay)))


def _adamw(rates: _Rates) -> optax.GradientTransformation:
    return optax.adamw(rates.learning_rate, weight_decay=rates.weight_decay)


def _fit(
    models: Any,
    loss: _Loss,
    data: Any,
    key: Array,
    num_epochs: int,
    batch_size: int,
    rates: _Rates,
    observe: _Validation | None,
    options: dict[str, Any],
) -> FitResult:
    schedule = {"num_epochs": num_epochs, "batch_size": batch_size}
    return fit(models, loss, data, _adamw, **schedule, key=key, hyperparams=rates, observe=observe, **options)
