"""Train encoders, autoencoders and classifiers for many seeds by `dissociation.training.fit`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from dissociation._core.checks import (
    WrongValue,
    check_choice,
    check_classes,
    check_count,
    fail,
    fail_kind,
)
from dissociation._core.conversion import as_examples
from dissociation._core.types import InTime, PRNGKey
from dissociation._core.validation import validated
from dissociation.training._fitting import FitResult, fit
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step
from koopman._encoders._losses import (
    autoencoder_loss,
    dpnets_loss,
    spectral_contrastive_loss,
    vamp_loss,
)
from koopman._encoders._networks import Autoencoder, FeatureMap, build_network, first_line
from koopman._operators._numerics import ratio_or_zero
from koopman._operators._pairs import lagged_pairs

States = Float[Array | np.ndarray, "n *state"]
Trajectories = Annotated[
    Float[Array | np.ndarray, "..."] | Sequence[Float[Array | np.ndarray, "..."]], InTime()
]

FIT_OPTIONS = ("hyperparams", "callbacks", "checkpoint", "mesh", "member_map", "same_program")
"""Options of `training.fit` that `train_encoders` passes on."""

ENCODER_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "vamp": partial(vamp_loss, center_covariances=False),
    "contrastive": spectral_contrastive_loss,
    "dpnets": partial(dpnets_loss, center_covariances=False),
}
"""Losses of features and features one lag later; VAMP-2 and DPNets are not centred."""

LOSSES = (*ENCODER_LOSSES, "reconstruction", "classes")
EXAMPLE = (
    "train_encoders(lambda key: FeatureMap(5, key=key), 'vamp', "
    "lagged_pairs(trajectories), key=key)"
)


@validated
def encode(model: Callable[[Array], Array], states: States) -> Array:
    """Return the outputs of one model at every state, [n, ...].

    The outputs are NaN at states that are not finite.
    """
    _check_one(model)
    return jax.vmap(model)(jnp.asarray(states))


def pair_loss(kind: str, model: FeatureMap, x: States, y: States) -> Float[Array, ""]:
    """Return the loss of the features of x and the lagged head's features of y."""
    # One pass for both, because one convolution of twice as many images is cheaper than two.
    states = jnp.concatenate([jnp.asarray(x), jnp.asarray(y)])
    features = encode(model, states)
    features_x = features[: len(x)]
    features_y = jax.vmap(model.lagged_head)(features[len(x) :])
    return ENCODER_LOSSES[kind](features_x, features_y)


def reconstruction_loss(model: Autoencoder, x: States, y: States) -> Float[Array, ""]:
    """Return `autoencoder_loss` of pairs of states.

    The weight of the latent step is r = var y / var enc(y).
    """
    x = jnp.asarray(x)
    y = jnp.asarray(y)
    features = encode(model.encoder, jnp.concatenate([x, y]))
    features_x = features[: len(x)]
    features_y = features[len(x) :]
    evolved = features_x @ model.matrix()

    states = jax.vmap(model.decoder)(jnp.concatenate([features_x, evolved]))
    x_rec = states[: len(x)]
    y_pred = states[len(x) :]

    # With r = 1, as published, features shrink until the latent step has no weight, because the
    # decoder can undo that.
    feature_variance = jnp.mean(jnp.var(features_y, 0))
    variance = jnp.mean(jnp.var(y, 0))
    weight = ratio_or_zero(variance, feature_variance, feature_variance > 0)
    return autoencoder_loss(x, y, x_rec, features_y, evolved, y_pred, alpha_lin=weight)


# A module, because equal modules are equal, unlike closures, so that a second training does not
# compile.
class _Loss(eqx.Module):
    kind: str = eqx.field(static=True)

    def __call__(self, model: Any, batch: tuple[Array, Array], key: Array) -> Array:
        if self.kind == "classes":
            states, labels = batch
            logits = encode(model, states)
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.mean(losses)
        if self.kind == "reconstruction":
            return reconstruction_loss(model, *batch)
        return pair_loss(self.kind, model, *batch)


class _Validation(eqx.Module):
    loss: Callable[..., Any]
    data: Any

    def __call__(self, model: Any, step: Array, key: Array) -> Array:
        return self.loss(model, self.data, key)


@validated
def train_encoders(
    model: Any,
    loss: Any,
    data: Any,
    *,
    key: PRNGKey,
    optimizer: Any = None,
    num_seeds: int = 5,
    num_epochs: int = 50,
    batch_size: int = 64,
    validation: Any = None,
    **options: Any,
) -> FitResult:
    """Train networks of many seeds on pairs of states one lag apart, or on states with classes.

    Args:
        model: Function from a key to a network, or a network with the initial weights of every
            seed: a `FeatureMap` for "vamp", "contrastive" (see there for the norm) and "dpnets", an
            `Autoencoder` for "reconstruction", and for "classes" any network from one state to
            logits.
        loss: "vamp", "contrastive", "dpnets", "reconstruction" (`autoencoder_loss`, with the latent
            step in units of the states), "classes" (cross entropy), or a function of a network, a
            batch of `data`, and a key.
        data: Pairs of states (x, y), as of `lagged_pairs`, or (states, classes): samples first,
            finite.
        key: Key of every seed's network, and of the order of batches, which all seeds share.
        optimizer: Optax transformation, or with the option `hyperparams` a function of one seed's
            to one. Default: AdamW of rate 2e-3 and weight decay 0.01. Above 1e-3 an autoencoder's
            convolutional encoder may end with all units inactive.
        num_seeds: Number of networks.
        num_epochs: Passes over the data.
        batch_size: Samples in a batch. The last batch of an epoch may be smaller.
        validation: Other data. Their loss, of all samples at once, is observed after every epoch.
        **options: Options of `dissociation.training.fit`, `hyperparams`, `callbacks`, `checkpoint`,
            `mesh`, `member_map`, `same_program`.

    Returns:
        Result of `fit`; `history.observed` is the validation loss, [seeds, epochs + 1], if any.

    Raises:
        ValueError: If the network or the loss does not take batches of the data.
        TypeError: If `model` is neither a module nor a function from a key to one.

    References:
        See `vamp_loss`, `spectral_contrastive_loss`, `dpnets_loss` and `autoencoder_loss`.
    """
    for name in options:
        if name not in FIT_OPTIONS:
            expected = f"be left out, or be one of {', '.join(FIT_OPTIONS)}"
            advice = f"Settings of networks are arguments of `model`, as in {EXAMPLE}"
            fail_kind(name, expected, "an unknown option", advice)
    batch_loss = loss
    if isinstance(loss, str):
        check_choice("loss", loss, LOSSES)
        batch_loss = _Loss(loss)
    num_seeds = check_count("num_seeds", num_seeds, minimum=1)
    data = as_examples("data", data, finite=True)

    def build(key: PRNGKey) -> Any:
        return build_network("model", model, key=key)

    template = eqx.filter_eval_shape(build, key)
    _check_batches(batch_loss, template, data, batch_size)
    if loss == "classes":
        logits = eqx.filter_eval_shape(encode, template, data[0])
        check_classes("data", data[1], logits.shape[1])
    observe = None
    if validation is not None:
        validation = as_examples("validation", validation, finite=True)
        num_samples = len(jax.tree.leaves(validation)[0])
        expected = "be like `data`, and enough for `loss`"
        _check_batch("validation", expected, batch_loss, template, validation, num_samples)
        observe = _Validation(batch_loss, validation)

    # With the published loss, PyTorch's initial weights and a rate of 2e-3, most rectified units of
    # an autoencoder's convolutional encoder were inactive after 20 steps. With weights of variance
    # 1/fan_in and the published rate they stay active.
    if optimizer is None:
        optimizer = optax.adamw(2e-3, weight_decay=0.01)
    step = make_step(batch_loss, optimizer)
    sampler = Epochs(data, batch_size)

    build_key, fit_key = jax.random.split(key)
    models = eqx.filter_vmap(build)(jax.random.split(build_key, num_seeds))
    return fit(
        models, step, sampler, num_epochs=num_epochs, key=fit_key, save=Save(observe), **options
    )


@validated
def validation_loss(
    kind: str,
    model: FeatureMap,
    trajectories: Trajectories,
    *,
    lag: int = 1,
    trajectory_axis: int | None = None,
    batch_size: int | None = None,
) -> Float[Array, ""]:
    """Return the loss of `train_encoders` on trajectories, of all pairs or as a mean over batches.

    Args:
        kind: "vamp", "contrastive" or "dpnets".
        model: One feature map.
        trajectories: One trajectory [time, ...], a list of trajectories of any lengths, or one
            array with `trajectory_axis`; states of any shape. A list of rows of numbers is one
            trajectory.
        lag: Steps between the two states of a pair.
        trajectory_axis: Axis of trajectories of equal length in one array; the first other axis is
            time.
        batch_size: Pairs in a batch, in order; None for all. The last batch may be smaller, and has
            the same weight. The mean over batches is lower than the loss of all.

    Raises:
        ValueError: If `model` is a stack, no trajectory has a pair at this lag, or a batch has
            fewer pairs than the loss needs.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    _check_one(model)
    # An array without `trajectory_axis` is one trajectory, also of images.
    if isinstance(trajectories, Array | np.ndarray) and trajectory_axis is None:
        trajectories = [trajectories]
    pairs = lagged_pairs(trajectories, lag, trajectory_axis=trajectory_axis)
    x, y = pairs
    if batch_size is None:
        batch_size = len(x)
    _check_batches(_Loss(kind), model, pairs, batch_size)

    # The contrastive loss omits i = j, a pair of one class, which matters more in small batches:
    # with five classes a fraction (12.8 - 1) / 63 = 0.187 of the pairs in a batch of 64 share their
    # class, and 0.199 of 999. Noisier covariances raise VAMP.
    losses = []
    for start in range(0, len(x), batch_size):
        batch = slice(start, start + batch_size)
        losses.append(pair_loss(kind, model, x[batch], y[batch]))
    return jnp.mean(jnp.stack(losses))


def _check_one(model: Any) -> None:
    """Raise if a feature map or an autoencoder is a stack."""
    if type(model) is FeatureMap:
        weight = model.lagged_head.weight
    elif type(model) is Autoencoder:
        weight = model.dynamics
    else:
        return
    if np.ndim(weight) > 2:
        advice = "Take one of them: `member(models, 0)`"
        fail("model", "be one model", f"{len(weight)} stacked ones", advice)


def _check_batches(loss: Callable[..., Any], model: Any, data: Any, batch_size: int) -> None:
    """Raise unless the loss takes all samples at once, and an epoch's smallest batch."""
    check_count("batch_size", batch_size, minimum=1)
    num_samples = len(jax.tree.leaves(data)[0])
    _check_batch("model", "fit `data` and `loss`", loss, model, data, num_samples)
    expected = f"leave enough samples for every batch, of {num_samples} in all"
    smallest = num_samples % batch_size or min(batch_size, num_samples)
    _check_batch("batch_size", expected, loss, model, data, smallest)


def _check_batch(
    name: str, expected: str, loss: Callable[..., Any], model: Any, data: Any, size: int
) -> None:
    """Raise unless the loss takes a batch of this size, by abstract evaluation."""
    batch = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), data
    )
    try:
        eqx.filter_eval_shape(loss, model, batch, jax.eval_shape(jax.random.key, 0))
    except Exception as error:  # any error of the network or of the loss is about the batch
        shapes = ", ".join(str(leaf.shape) for leaf in jax.tree.leaves(batch))
        received = f"for a batch of shapes {shapes} the error {first_line(error)!r}"
        raise WrongValue(f"`{name}` must {expected}, got {received}.") from error
