"""Train encoders, autoencoders and classifiers for many seeds by `dissociation.training.fit`."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NamedTuple

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
    check_non_negative,
    check_positive,
    fail,
    fail_kind,
)
from dissociation._core.types import Classes, InTime, PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.training._fitting import FitResult, fit
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step
from koopman._encoders._losses import autoencoder_loss, dpnets_loss, spectral_contrastive_loss, vamp_loss
from koopman._encoders._networks import (
    FEATURES,
    Autoencoder,
    FeatureMap,
    Network,
    build_encoder,
    build_network,
    first_line,
)
from koopman._operators._pairs import Pairs, lagged_pairs

States = Float[Array | np.ndarray, "n *state"]
Trajectories = Annotated[Float[Array | np.ndarray, "..."] | Sequence[Float[Array | np.ndarray, "..."]], InTime()]
Rate = Float[Array | np.ndarray, " seeds"] | Scalar
Schedule = Callable[[Any], Any]

FIT_OPTIONS = ("callbacks", "checkpoint", "layout", "same_program")
"""Options of `fit` that the trainers accept."""

ENCODER_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "vamp": partial(vamp_loss, center_covariances=False),
    "contrastive": spectral_contrastive_loss,
    "dpnets": partial(dpnets_loss, center_covariances=False),
}
"""Losses of features now and one lag later: VAMP-2 and DPNets without centring, spectral contrastive."""


@validated
def encode(model: Callable[[Array], Array], states: States) -> Array:
    """Return the outputs of one model at every state, [n, ...]; NaN for a state that is not finite."""
    _check_one(model)
    return jax.vmap(model)(jnp.asarray(states))


def pair_loss(kind: str, model: FeatureMap, x: States, y: States) -> Float[Array, ""]:
    """Return the loss of pairs of states, from the features of x and the lagged head's features of y."""
    # One pass for both, because a convolution of twice as many images is cheaper than two.
    both = encode(model, jnp.concatenate([jnp.asarray(x), jnp.asarray(y)]))
    return ENCODER_LOSSES[kind](both[: len(x)], jax.vmap(model.lagged_head)(both[len(x) :]))


def reconstruction_loss(model: Autoencoder, x: States, y: States) -> Float[Array, ""]:
    """Return `autoencoder_loss` of pairs of states, with the error of the latent step in units of the states.

        mean (x - dec(enc(x)))^2  +  r mean (enc(y) - K enc(x))^2  +  mean (y - dec(K enc(x)))^2

    Source: Lusch, Kutz and Brunton (2018).
    """
    x, y = jnp.asarray(x), jnp.asarray(y)
    features = encode(model.encoder, jnp.concatenate([x, y]))
    now, later = features[: len(x)], features[len(x) :]
    evolved = now @ model.matrix()
    states = jax.vmap(model.decoder)(jnp.concatenate([now, evolved]))
    spread = jnp.mean(jnp.var(later, 0))
    # r = var y / var enc(y). With r = 1, as published, features shrink until the second term has no weight and their
    # step stays wrong, because the decoder rescales them.
    ratio = jnp.where(spread > 0, jnp.mean(jnp.var(y, 0)) / jnp.where(spread > 0, spread, 1.0), 0.0)
    return autoencoder_loss(x, y, states[: len(x)], later, evolved, states[len(x) :], alpha_lin=ratio)


@validated
def train_encoders(
    kind: str,
    trajectories: Trajectories,
    *,
    key: PRNGKey,
    encoder: Network | None = None,
    features: int | None = None,
    feature_norm: float | None = None,
    lag: int = 1,
    trajectory_axis: int | None = None,
    num_seeds: int = 5,
    num_epochs: int = 50,
    batch_size: int = 64,
    learning_rate: Rate | Schedule = 2e-3,
    weight_decay: Rate = 0.01,
    init: str = "pytorch",
    validation: Trajectories | None = None,
    **options: Any,
) -> FitResult:
    """Train feature maps on pairs of a state and the state one lag later, with AdamW.

    Args:
        kind: "vamp", "contrastive" or "dpnets".
        trajectories: One trajectory [time, ...], a list of trajectories of any lengths, or one array with
            `trajectory_axis`; states of any shape. Rows of numbers in lists are one trajectory.
        key: Key of every seed's network, and of the order of batches, which all seeds share.
        encoder: Network from one state to a vector of features: an Equinox module, whose weights every seed starts
            from, or a function from a key to one. Default: the encoder of images of 28 x 28 pixels.
        features: Width of the default encoder, 5 if not given.
        feature_norm: Norm of the features. Default: sqrt(features) with the default encoder, else none. See
            `FeatureMap`.
        lag: Steps between the two states of a pair.
        trajectory_axis: Axis of trajectories of equal length in one array; the first other axis is time.
        num_seeds: Number of networks.
        num_epochs: Passes over the pairs.
        batch_size: Pairs in a batch. The last batch of an epoch may be smaller.
        learning_rate: Rate of AdamW, one for all seeds or one for each, [num_seeds], or a schedule of Optax.
        weight_decay: Weight decay of AdamW, one for all seeds or one for each, [num_seeds].
        init: "pytorch" or "lecun", of the default encoder and the lagged head.
        validation: Other trajectories, whose loss, of all pairs at once, is observed after every epoch.
        **options: Options of `dissociation.training.fit`: `callbacks`, `checkpoint`, `layout`, `same_program`.

    Returns:
        Result of `fit`; `history.observed` is the validation loss [seeds, epochs + 1], if there is one.

    Raises:
        ValueError: If no trajectory has a pair at this lag, a batch has fewer pairs than the loss needs, or a network
            does not fit the states.
        TypeError: If a network is neither a module nor a function from a key to one.

    References:
        Kostic, Novelli, Grazzi, Lounici and Pontil (2024), see `dpnets_loss`.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    pairs = _pairs("trajectories", trajectories, lag, trajectory_axis)
    width = _encoder_width(encoder, features, pairs.x[0], key)
    least = _least_pairs(kind, width)
    _check_batches(len(pairs.x), batch_size, least)
    if feature_norm is None and encoder is None:
        feature_norm = width**0.5
    build = partial(FeatureMap, width, encoder=encoder, feature_norm=feature_norm, init=init)
    adamw = _adamw(learning_rate, weight_decay, num_seeds)
    observe = _observe(kind, validation, lag, trajectory_axis, pairs.x, least)
    return _fit(build, kind, pairs, key, num_epochs, batch_size, adamw, observe, options)


@validated
def train_autoencoders(
    trajectories: Trajectories,
    *,
    key: PRNGKey,
    encoder: Network | None = None,
    decoder: Network | None = None,
    features: int | None = None,
    lag: int = 1,
    trajectory_axis: int | None = None,
    num_seeds: int = 5,
    num_epochs: int = 50,
    batch_size: int = 64,
    learning_rate: Rate | Schedule = 1e-3,
    weight_decay: Rate = 0.01,
    orthogonal: bool = False,
    upsampling: str = "nearest",
    init: str = "lecun",
    validation: Trajectories | None = None,
    **options: Any,
) -> FitResult:
    """Train dynamical autoencoders: features with linear dynamics, and a decoder to states.

    Results and errors are those of `train_encoders`.

    Args:
        trajectories: As in `train_encoders`.
        key: As in `train_encoders`.
        encoder: As in `train_encoders`.
        decoder: Network from a vector of features to one state, or a function from a key to one. Default: the decoder
            of images of 28 x 28 pixels.
        features: Width of the latent space with the default encoder, 5 if not given.
        lag: As in `train_encoders`.
        trajectory_axis: As in `train_encoders`.
        num_seeds: As in `train_encoders`.
        num_epochs: As in `train_encoders`.
        batch_size: As in `train_encoders`.
        learning_rate: As in `train_encoders`. Large rates may deactivate all units of the convolutional
            encoder.
        weight_decay: As in `train_encoders`.
        orthogonal: If True, the latent map is kept orthogonal.
        upsampling: "nearest" or "bilinear", of the default decoder.
        init: "pytorch" or "lecun", of the default networks.
        validation: As in `train_encoders`.
        **options: As in `train_encoders`.

    References:
        Lusch, Kutz and Brunton (2018), see `autoencoder_loss`.
    """
    pairs = _pairs("trajectories", trajectories, lag, trajectory_axis)
    _check_batches(len(pairs.x), batch_size)
    width = _encoder_width(encoder, features, pairs.x[0], key)
    _check_decoder(decoder, width, pairs.x[0], key)
    # With the published loss, PyTorch's initial weights and a rate of 2e-3, most rectified units of the convolutional
    # encoder were dead after 20 steps. Weights of variance 1/fan_in and the published rate keep them active.
    settings = {"encoder": encoder, "decoder": decoder, "orthogonal": orthogonal, "upsampling": upsampling}
    build, adamw = partial(Autoencoder, width, **settings, init=init), _adamw(learning_rate, weight_decay, num_seeds)
    observe = _observe("reconstruction", validation, lag, trajectory_axis, pairs.x)
    return _fit(build, "reconstruction", pairs, key, num_epochs, batch_size, adamw, observe, options)


@validated(finite=("states",))
def train_classifiers(
    states: States,
    labels: Classes,
    *,
    key: PRNGKey,
    encoder: Network | None = None,
    num_classes: int = 5,
    num_seeds: int = 5,
    num_epochs: int = 20,
    batch_size: int = 64,
    learning_rate: Rate | Schedule = 8e-4,
    weight_decay: Rate = 0.01,
    init: str = "pytorch",
    **options: Any,
) -> FitResult:
    """Train encoders as classifiers, by cross entropy.

    Results and errors are those of `train_encoders`.

    Args:
        states: Images of 28 x 28 pixels, or states of any shape that `encoder` takes, [n, ...], finite.
        labels: Classes, 0 to `num_classes` - 1: [n].
        key: As in `train_encoders`.
        encoder: Network from one state to [num_classes], or a function from a key to one. Default: that of images.
        num_classes: Width of the output.
        num_seeds: As in `train_encoders`.
        num_epochs: As in `train_encoders`.
        batch_size: As in `train_encoders`.
        learning_rate: As in `train_encoders`.
        weight_decay: As in `train_encoders`.
        init: "pytorch" or "lecun", of the default encoder.
        **options: As in `train_encoders`.
    """
    check_count("num_classes", num_classes, minimum=2)
    check_classes("labels", labels, num_classes)
    _check_batches(len(states), batch_size)
    states, labels = jnp.asarray(states), jnp.asarray(labels)
    width = _encoder_width(encoder, num_classes, states[0], key, name="num_classes")
    build, adamw = partial(build_encoder, encoder, width, init), _adamw(learning_rate, weight_decay, num_seeds)
    return _fit(build, "classes", (states, labels), key, num_epochs, batch_size, adamw, None, options)


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
    """Return the loss of `train_encoders` on trajectories, of all pairs at once or as the mean over batches.

    The two differ, and the mean over batches is lower for the same network.

    Args:
        kind: "vamp", "contrastive" or "dpnets".
        model: One feature map.
        trajectories: As in `train_encoders`.
        lag: Steps between the two states of a pair.
        trajectory_axis: As in `train_encoders`.
        batch_size: Pairs in a batch, in order. The last batch may be smaller, with the same weight. None: all at once.

    Raises:
        ValueError: If `model` is a stack, no trajectory has a pair at this lag, or a batch has fewer pairs than the
            loss needs.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    _check_one(model)
    x, y = _pairs("trajectories", trajectories, lag, trajectory_axis)
    least = _least_pairs(kind, model.lagged_head.weight.shape[0])
    size = len(x) if batch_size is None else batch_size
    _check_batches(len(x), size, least)
    # The contrastive loss omits i = j, a pair of one class. Of five classes in turn (12.8 - 1) / 63 = 0.187 of the
    # other pairs in a batch of 64 are equal, of 999 pairs 0.199. VAMP gains from noisier covariances.
    starts = range(0, len(x), size)
    return jnp.mean(jnp.stack([pair_loss(kind, model, x[i : i + size], y[i : i + size]) for i in starts]))


def _check_one(model: Any) -> None:
    """Raise if a feature map or an autoencoder is a stack."""
    weight = {FeatureMap: lambda m: m.lagged_head.weight, Autoencoder: lambda m: m.dynamics}.get(type(model))
    if weight is not None and np.ndim(weight(model)) > 2:
        fail("model", "be one model", f"{len(weight(model))} stacked ones", "Take one of them: `member(models, 0)`")


def _least_pairs(kind: str, width: int) -> int:
    """Return the smallest number of pairs of states in a batch for which the loss `kind` is defined.

    The contrastive loss compares two pairs. VAMP inverts covariances of `width` features.
    """
    return 2 if kind == "contrastive" else width + 1


def _check_batches(number: int, batch_size: int, least: int = 1) -> None:
    check_count("batch_size", batch_size, minimum=1)
    if number < least:
        fail("trajectories", f"hold at least {least} pairs, which the loss of these features needs", number)
    smallest = number % batch_size or batch_size
    if min(smallest, number) < least:
        wanted = f"leave at least {least} pairs for every batch, which the loss of these features needs"
        fail("batch_size", wanted, f"a batch of {smallest} ({number} pairs by {batch_size})")


# Modules of equal kinds are equal, unlike closures, so that a second training does not compile.
class _Loss(eqx.Module):
    """Loss of a batch."""

    kind: str = eqx.field(static=True)

    def __call__(self, model: Any, batch: tuple[Array, Array], key: Array) -> Array:
        if self.kind == "classes":
            return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(encode(model, batch[0]), batch[1]))
        if self.kind == "reconstruction":
            return reconstruction_loss(model, *batch)
        return pair_loss(self.kind, model, *batch)


class _Validation(eqx.Module):
    """Observation of the validation loss."""

    kind: str = eqx.field(static=True)
    x: Array
    y: Array

    def __call__(self, model: Any, step: Array, key: Array) -> Array:
        return _Loss(self.kind)(model, (self.x, self.y), key)


def _pairs(name: str, trajectories: Trajectories, lag: int, trajectory_axis: int | None) -> Pairs:
    """Return `lagged_pairs`, of one trajectory if an array has no `trajectory_axis`."""
    one = isinstance(trajectories, Array | np.ndarray) and trajectory_axis is None
    given: Any = [trajectories] if one else trajectories
    try:
        return lagged_pairs(given, lag, trajectory_axis=trajectory_axis)
    except WrongValue as error:  # it names the argument of `lagged_pairs`
        raise WrongValue(str(error).replace("`trajectories", f"`{name}")) from None


def _observe(
    kind: str, validation: Trajectories | None, lag: int, trajectory_axis: int | None, states: Array, least: int = 1
) -> _Validation | None:
    """Return the observation of `validation`, or None, after a check of its states."""
    if validation is None:
        return None
    pairs = _pairs("validation", validation, lag, trajectory_axis)
    if pairs.x.shape[1:] != states.shape[1:]:
        fail("validation", f"have the states of `trajectories`, of shape {states.shape[1:]}", pairs.x.shape[1:])
    if len(pairs.x) < least:
        fail("validation", f"hold at least {least} pairs, which the loss of these features needs", len(pairs.x))
    return _Validation(kind, *pairs)


def _encoder_width(
    encoder: Network | None, features: int | None, state: Array, key: PRNGKey, name: str = "features"
) -> int:
    """Return the number of features of an encoder, or raise if it does not fit the states."""
    if encoder is None:
        if state.shape != (28, 28):
            advice = "Pass `encoder=`, or name the axis of trajectories"
            fail("encoder", "be given for states other than images of 28 x 28 pixels", f"shape {state.shape}", advice)
        return FEATURES if features is None else check_count(name, features, minimum=1)
    shape = _output_shape("encoder", encoder, state, key)
    if len(shape) != 1:
        advice = "For several trajectories in one array name their axis (`trajectory_axis=0`) or pass a list"
        wanted = f"make a vector of features of one state (shape {state.shape})"
        fail("encoder", wanted, f"an output of shape {shape}", advice)
    if features is not None and shape[0] != features:
        fail(name, f"be the width of the encoder's output ({shape[0]})", features)
    return shape[0]


def _check_decoder(decoder: Network | None, width: int, state: Array, key: PRNGKey) -> None:
    """Raise if a decoder does not map features to a state."""
    if decoder is None and state.shape != (28, 28):
        fail("decoder", "be given for states other than images of 28 x 28 pixels", f"shape {state.shape}")
    if decoder is not None:
        shape = _output_shape("decoder", decoder, jnp.zeros(width, state.dtype), key)
        if shape != state.shape:
            fail("decoder", f"make a state (shape {state.shape}) of {width} features", f"an output of shape {shape}")


def _output_shape(name: str, network: Network, example: Array, key: PRNGKey) -> tuple[int, ...]:
    """Return the shape of a network's output for one example, by abstract evaluation."""
    made = eqx.filter_eval_shape(lambda k: build_network(name, network, key=k), key)
    try:
        out = eqx.filter_eval_shape(lambda model, x: model(x), made, example)
    except Exception as error:  # any error of the network is about the example
        got = repr(first_line(error))
        raise ValueError(f"`{name}` must take one example of shape {example.shape}, got {got}.") from error
    if not isinstance(out, jax.ShapeDtypeStruct):
        fail(name, "make one array of one example", type(out).__name__)
    return out.shape


class _Rates(NamedTuple):
    """AdamW settings, one per seed; traced. A schedule replaces the learning rates."""

    learning_rate: Array
    weight_decay: Array


@dataclasses.dataclass(frozen=True)
class _AdamW:
    """Optimiser of one seed's rates, equal for equal schedules."""

    schedule: Schedule | None

    def __call__(self, rates: _Rates) -> optax.GradientTransformation:
        return optax.adamw(self.schedule or rates.learning_rate, weight_decay=rates.weight_decay)


def _adamw(learning_rate: Rate | Schedule, weight_decay: Rate, num_seeds: int) -> tuple[_AdamW, _Rates]:
    num_seeds = check_count("num_seeds", num_seeds, minimum=1)
    schedule, rate = (learning_rate, 1.0) if callable(learning_rate) else (None, learning_rate)
    if schedule is not None:
        wanted = "be a number, one per seed, or make a number of a traced step, as Optax's schedules do"
        try:
            made = jax.eval_shape(schedule, jnp.zeros((), int))
        except Exception as error:  # whatever the caller's function raises
            raise TypeError(f"`learning_rate` must {wanted}, got {str(error).strip()[:200]!r}.") from error
        if getattr(made, "shape", None) != ():
            fail_kind("learning_rate", wanted, f"a function to {made}")
    check_positive("learning_rate", rate)
    check_non_negative("weight_decay", weight_decay)
    for name, value in (("learning_rate", rate), ("weight_decay", weight_decay)):
        if np.ndim(value) and np.shape(value) != (num_seeds,):
            fail(name, f"be one number, or one per seed ({num_seeds})", f"shape {np.shape(value)}")
    return _AdamW(schedule), _Rates(*(jnp.full(num_seeds, value, float) for value in (rate, weight_decay)))


def _fit(
    build: Callable[..., Any],
    kind: str,
    data: Any,
    key: PRNGKey,
    num_epochs: int,
    batch_size: int,
    adamw: tuple[_AdamW, _Rates],
    observe: _Validation | None,
    options: dict[str, Any],
) -> FitResult:
    """Fit one model per seed, each `build(key=key)`, to `data` by the loss of a kind."""
    for name in options:
        if name not in FIT_OPTIONS:
            fail_kind(name, f"be left out, or be one of {', '.join(FIT_OPTIONS)}", "an unknown option")
    optimizer, rates = adamw
    build_key, fit_key = jax.random.split(key)
    models = eqx.filter_vmap(lambda key: build(key=key))(jax.random.split(build_key, len(rates.weight_decay)))
    step, sampler, save = make_step(_Loss(kind), optimizer), Epochs(data, batch_size), Save(observe)
    return fit(models, step, sampler, num_epochs=num_epochs, key=fit_key, hyperparams=rates, save=save, **options)
