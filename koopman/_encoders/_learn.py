"""Encoders and autoencoders of sequences, and classifiers, many seeds at once, through `dissociation.training.fit`.

Trajectories come as everywhere in `koopman`: one array [time, ...], a list of such arrays, or one array whose axis of
trajectories is named. States may have any shape; where no network is given they are images of 28 x 28 pixels.
"""

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
from dissociation.models._cnn import Encoder
from dissociation.training._fitting import FitResult, fit
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step
from koopman._encoders._losses import autoencoder_loss, dpnets_loss, spectral_contrastive_loss, vamp_loss
from koopman._encoders._networks import FEATURES, Autoencoder, FeatureMap, Network, build_network
from koopman._operators._pairs import Pairs, lagged_pairs

States = Float[Array | np.ndarray, "n *state"]
Trajectories = Annotated[Float[Array | np.ndarray, "..."] | Sequence[Float[Array | np.ndarray, "..."]], InTime()]
Rate = Float[Array | np.ndarray, " seeds"] | Scalar
Schedule = Callable[[Any], Any]

FIT_OPTIONS = ("callbacks", "checkpoint", "layout", "same_program")
"""What training here hands on to `fit`."""

ENCODER_LOSSES: dict[str, Callable[[Array, Array], Array]] = {
    "vamp": partial(vamp_loss, center_covariances=False),
    "contrastive": spectral_contrastive_loss,
    "dpnets": partial(dpnets_loss, center_covariances=False),
}
"""Losses of features now and one step later: VAMP-2 without centring, spectral contrastive, DPNets."""


@validated
def encode(model: Callable[[Array], Array], states: States) -> Array:
    """`model`, one and not a stack, at every state: [n, ...]; what a state that is not finite gives is not either."""
    _check_one(model)
    return jax.vmap(model)(jnp.asarray(states))


@validated
def pair_loss(kind: str, model: FeatureMap, x: States, y: States) -> Float[Array, ""]:
    """The loss of pairs of states: features of x against the lagged head's features of y."""
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    _check_one(model)
    _check_states(x, y)
    # One pass for both: a convolution of twice the images is cheaper than two.
    both = encode(model, jnp.concatenate([jnp.asarray(x), jnp.asarray(y)]))
    return ENCODER_LOSSES[kind](both[: len(x)], jax.vmap(model.lagged_head)(both[len(x) :]))


@validated
def reconstruction_loss(model: Autoencoder, x: States, y: States) -> Float[Array, ""]:
    """`autoencoder_loss` of pairs of states, with the error of the latent step in units of the states.

        mean (x - dec(enc(x)))^2  +  r mean (enc(y) - K enc(x))^2  +  mean (y - dec(K enc(x)))^2

    with r = var y / var enc(y), variances over the batch, averaged over entries. With r = 1, as published, the second
    term falls with the size of the features, for which the decoder makes up: they shrink until it weighs nothing, and
    their step stays as wrong as it was (on MNIST by their own variance). The ratio makes the loss blind to their size.

    Source: Lusch, Kutz and Brunton (2018), Deep learning for universal linear embeddings of nonlinear dynamics.
    """
    _check_one(model)
    _check_states(x, y)
    x, y = jnp.asarray(x), jnp.asarray(y)
    features = encode(model.encoder, jnp.concatenate([x, y]))
    now, later = features[: len(x)], features[len(x) :]
    evolved = now @ model.matrix()
    states = jax.vmap(model.decoder)(jnp.concatenate([now, evolved]))
    spread = jnp.mean(jnp.var(later, 0))
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
    """Trains feature maps on pairs of a state and the state one lag later, with AdamW.

    Args:
        kind: "vamp", "contrastive" or "dpnets".
        trajectories: One trajectory [time, ...] with states of any shape, a list of them (of any lengths; no pair goes
            from one to the next), or one array with `trajectory_axis`. Rows of numbers in lists are one trajectory.
        key: One key; every seed's network follows from it, and the order of batches, which all seeds share.
        encoder: A network from one state to a vector of features: an Equinox module, from whose weights every seed
            begins, or a function from a key to one. Default: the encoder of images of 28 x 28 pixels.
        features: Width of the default encoder, 5 if not given; that of another is its own.
        feature_norm: Norm of the features. Default: sqrt(features) for images, and for an encoder of your own what it
            puts out, as it is. Published for images: 1, with which the contrastive loss waits on a plateau of -1 for
            many epochs, see `FeatureMap`.
        lag: Steps between the two states of a pair.
        trajectory_axis: In an array that holds several trajectories of equal length, their axis; the first of the
            others is time.
        num_seeds: Networks.
        num_epochs: Passes over the pairs.
        batch_size: Pairs in a batch; the last, smaller one of an epoch is kept.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds]; or a schedule of Optax's, from the step
            to the rate.
        weight_decay: AdamW's, likewise.
        init: "pytorch" or "lecun", of the default encoder and the lagged head.
        validation: Other trajectories, in the form of `trajectories`, whose loss (all pairs at once) is observed after
            every epoch.
        **options: For `dissociation.training.fit`: `callbacks`, `checkpoint`, `layout`, `same_program`.

    Returns:
        What `fit` returns; `history.observed` is the validation loss [seeds, epochs + 1], if there is one.

    Raises:
        ValueError: If an option is out of range, a trajectory has no pair at this lag, or the encoder does not go from
            one state to a vector of features.
        TypeError: If `encoder` is neither a module nor a function from a key to one.

    References:
        Kostic et al. (2024), Learning invariant representations of time-homogeneous stochastic dynamical systems.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    pairs = _pairs("trajectories", trajectories, lag, trajectory_axis)
    width = _encoder_width(encoder, features, pairs.x[0], key)
    least = _least_pairs(kind, width)
    _check_batches(len(pairs.x), batch_size, least)
    if feature_norm is None and encoder is None:
        feature_norm = width**0.5
    adamw = _adamw(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)
    settings = {"encoder": encoder, "feature_norm": feature_norm, "init": init}
    models = _stack(lambda k: FeatureMap(width, **settings, key=k), build_key, num_seeds)

    observe = _observe(kind, validation, lag, trajectory_axis, pairs.x, least)
    return _fit(models, _Loss(kind), pairs, fit_key, num_epochs, batch_size, adamw, observe, options)


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
    """Trains dynamical autoencoders: features that move by a linear map, from which states are drawn again.

    An untrained decoder draws noise, which a loss damps fastest by silencing the encoder: at first all its units are
    driven down together, by some learning rates' worth of every weight. With the published loss, PyTorch's initial
    weights (a third of the variance here) and a rate of 2e-3, most rectified units of the convolutional encoder were
    silent after 20 steps, and with the last of them its gradient is exactly zero: it draws the mean image for good.
    `reconstruction_loss`, initial weights of variance 1/fan_in without biases and the published rate keep them alive.

    Args:
        trajectories: One trajectory [time, ...], a list of them, or one array with `trajectory_axis`, see
            `train_encoders`.
        key: One key.
        encoder: A network from one state to a vector of features, or a function from a key to one, see
            `train_encoders`.
        decoder: A network from a vector of features to one state, likewise; needed for states other than images of
            28 x 28 pixels.
        features: Width of the latent space of the default encoder, 5 if not given; that of another is its own.
        lag: Steps between the two states of a pair.
        trajectory_axis: In an array that holds several trajectories, their axis.
        num_seeds: Networks.
        num_epochs: Passes over the pairs.
        batch_size: Pairs in a batch.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds], or a schedule of Optax's; see above for
            larger ones.
        weight_decay: AdamW's, likewise.
        orthogonal: Whether the latent map is kept orthogonal.
        upsampling: Of the default decoder, "nearest" or "bilinear".
        init: "pytorch" or "lecun", of the default networks.
        validation: Other trajectories, whose loss is observed after every epoch.
        **options: For `dissociation.training.fit`.

    Returns:
        What `fit` returns.

    Raises:
        ValueError: If an option is out of range, a trajectory has no pair at this lag, or the encoder or the decoder
            does not fit the states.
        TypeError: If either is neither a module nor a function from a key to one.

    References:
        Lusch, Kutz and Brunton (2018), Deep learning for universal linear embeddings of nonlinear dynamics.
    """
    pairs = _pairs("trajectories", trajectories, lag, trajectory_axis)
    _check_batches(len(pairs.x), batch_size)
    width = _encoder_width(encoder, features, pairs.x[0], key)
    _check_decoder(decoder, width, pairs.x[0], key)
    adamw = _adamw(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)
    settings = {"encoder": encoder, "decoder": decoder, "orthogonal": orthogonal, "upsampling": upsampling}
    models = _stack(lambda k: Autoencoder(width, **settings, init=init, key=k), build_key, num_seeds)

    observe = _observe("reconstruction", validation, lag, trajectory_axis, pairs.x)
    loss = _Loss("reconstruction")
    return _fit(models, loss, pairs, fit_key, num_epochs, batch_size, adamw, observe, options)


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
    """Trains encoders as classifiers, by cross entropy: the oracle that reads forecast images.

    Args:
        states: Images of 28 x 28 pixels, or states of any shape that `encoder` takes.
        labels: Classes, 0 to `num_classes` - 1.
        key: One key.
        encoder: A network from one state to [num_classes], or a function from a key to one; default: that of images.
        num_classes: Width of the output.
        num_seeds: Networks.
        num_epochs: Passes over the states.
        batch_size: States in a batch.
        learning_rate: AdamW's, one for all seeds or one for each: [num_seeds]; or a schedule of Optax's, from the step
            to the rate.
        weight_decay: AdamW's, likewise.
        init: "pytorch" or "lecun", of the default encoder.
        **options: For `dissociation.training.fit`.

    Returns:
        What `fit` returns.

    Raises:
        ValueError: If lengths disagree, states are not finite, an option is out of range, or the encoder does not go
            from one state to [num_classes].
        TypeError: If `encoder` is neither a module nor a function from a key to one.
    """
    check_count("num_classes", num_classes, minimum=2)
    check_classes("labels", labels, num_classes)
    _check_batches(len(states), batch_size)
    states, labels = jnp.asarray(states), jnp.asarray(labels)
    width = _encoder_width(encoder, num_classes, states[0], key, name="num_classes")
    adamw = _adamw(learning_rate, weight_decay, num_seeds)
    build_key, fit_key = jax.random.split(key)

    def build(draw_key: Array) -> Any:
        return (
            Encoder(width, init=init, key=draw_key)
            if encoder is None
            else build_network("encoder", encoder, key=draw_key)
        )

    models = _stack(build, build_key, num_seeds)
    return _fit(models, _Loss("classes"), (states, labels), fit_key, num_epochs, batch_size, adamw, None, options)


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
    """`pair_loss` of trajectories: of all pairs at once, or as the mean over batches.

    The two differ, and the mean over batches looks better for the same network. The contrastive loss leaves out i = j,
    a pair of one class. Of five classes in turn that leaves (12.8 - 1) / 63 = 0.187 equal pairs in a batch of 64, and
    0.199 of 999 pairs: with perfect features, 25 times the share minus 10 is -5.32 and -5.02. VAMP gains a little from
    covariances that are noisier in a batch.

    Args:
        kind: One of `ENCODER_LOSSES`.
        model: One feature map.
        trajectories: One trajectory [time, ...], a list of them, or one array with `trajectory_axis`.
        lag: Steps between the two states of a pair.
        trajectory_axis: In an array that holds several trajectories, their axis.
        batch_size: Pairs in a batch, in order; the last, smaller one counts as much as the others. None: all at once.

    Returns:
        The loss.

    Raises:
        ValueError: If `kind` is unknown, `model` is a stack of them, a trajectory has no pair at this lag, or a batch
            has fewer pairs than the loss needs.
    """
    check_choice("kind", kind, tuple(ENCODER_LOSSES))
    _check_one(model)
    x, y = _pairs("trajectories", trajectories, lag, trajectory_axis)
    least = _least_pairs(kind, model.lagged_head.weight.shape[0])
    _check_batches(len(x), len(x) if batch_size is None else batch_size, least)
    if batch_size is None:
        return pair_loss(kind, model, x, y)
    starts = range(0, len(x), batch_size)
    return jnp.mean(jnp.stack([pair_loss(kind, model, x[i : i + batch_size], y[i : i + batch_size]) for i in starts]))


def _check_one(model: Any) -> None:
    """Refuses stacked models where one is meant."""
    weight = {FeatureMap: lambda m: m.lagged_head.weight, Autoencoder: lambda m: m.dynamics}.get(type(model))
    if weight is not None and np.ndim(weight(model)) > 2:
        fail("model", "be one model", f"{len(weight(model))} stacked ones", "Take one of them: `member(models, 0)`")


def _least_pairs(kind: str, width: int) -> int:
    """What a batch needs for the loss to be one."""
    return 2 if kind == "contrastive" else width + 1


def _check_batches(number: int, batch_size: int, least: int = 1) -> None:
    check_count("batch_size", batch_size, minimum=1)
    if number < least:
        fail("trajectories", f"hold at least {least} pairs, which the loss of these features needs", number)
    smallest = number % batch_size or batch_size
    if min(smallest, number) < least:
        wanted = f"leave at least {least} pairs for every batch, which the loss of these features needs"
        fail("batch_size", wanted, f"a batch of {smallest} ({number} pairs by {batch_size})")


def _check_states(x: States, y: States) -> None:
    if np.shape(x) != np.shape(y):
        fail("y", f"have the shape of `x` {np.shape(x)}", np.shape(y))


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


def _pairs(name: str, trajectories: Trajectories, lag: int, trajectory_axis: int | None) -> Pairs:
    """`lagged_pairs`, where an array without `trajectory_axis` is one trajectory."""
    given: Any = trajectories
    if isinstance(trajectories, Array | np.ndarray) and trajectory_axis is None:
        given = [trajectories]
    try:
        return lagged_pairs(given, lag, trajectory_axis=trajectory_axis)
    except WrongValue as error:  # of `lagged_pairs`, which has its own name for them
        raise WrongValue(str(error).replace("`trajectories", f"`{name}")) from None


def _observe(
    kind: str, validation: Trajectories | None, lag: int, trajectory_axis: int | None, states: Array, least: int = 1
) -> _Validation | None:
    """The loss of `validation`, if there is one, whose states must be like those of training."""
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
    """The features that an encoder makes of one state; refuses an encoder and states that do not fit."""
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
    """Refuses a decoder that does not make a state of features."""
    if decoder is None and state.shape != (28, 28):
        fail("decoder", "be given for states other than images of 28 x 28 pixels", f"shape {state.shape}")
    if decoder is not None:
        shape = _output_shape("decoder", decoder, jnp.zeros(width, state.dtype), key)
        if shape != state.shape:
            fail("decoder", f"make a state (shape {state.shape}) of {width} features", f"an output of shape {shape}")


def _output_shape(name: str, network: Network, example: Array, key: PRNGKey) -> tuple[int, ...]:
    """The shape of what a network makes of one example, by abstract evaluation."""
    made = eqx.filter_eval_shape(lambda k: build_network(name, network, key=k), key)
    try:
        out = eqx.filter_eval_shape(lambda model, x: model(x), made, example)
    except Exception as error:  # whatever the caller's network raises, it is about the example's shape or kind
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"`{name}` must take one example of shape {example.shape}, got {reason!r}.") from error
    if not isinstance(out, jax.ShapeDtypeStruct):
        fail(name, "make one array of one example", type(out).__name__)
    return out.shape


def _stack(build: Callable[[Array], Any], key: Array, num_seeds: int) -> Any:
    count = check_count("num_seeds", num_seeds, minimum=1)
    return eqx.filter_vmap(build)(jax.random.split(key, count))


class _Rates(NamedTuple):
    """AdamW's settings, one per seed; traced. A schedule takes the place of the learning rates."""

    learning_rate: Array
    weight_decay: Array


@dataclasses.dataclass(frozen=True)
class _AdamW:
    """The optimiser of one seed's rates. Equal for equal schedules."""

    schedule: Schedule | None

    def __call__(self, rates: _Rates) -> optax.GradientTransformation:
        return optax.adamw(self.schedule or rates.learning_rate, weight_decay=rates.weight_decay)


def _adamw(learning_rate: Rate | Schedule, weight_decay: Rate, num_seeds: int) -> tuple[_AdamW, _Rates]:
    schedule, rate = (learning_rate, 1.0) if callable(learning_rate) else (None, learning_rate)
    if schedule is not None:
        _check_schedule(schedule)
    check_positive("learning_rate", rate)
    check_non_negative("weight_decay", weight_decay)
    for name, value in (("learning_rate", rate), ("weight_decay", weight_decay)):
        if np.ndim(value) and np.shape(value) != (num_seeds,):
            fail(name, f"be one number, or one per seed ({num_seeds})", f"shape {np.shape(value)}")
    return _AdamW(schedule), _Rates(*(jnp.full(num_seeds, value, float) for value in (rate, weight_decay)))


def _check_schedule(schedule: Schedule) -> None:
    """Refuses what makes no number of a traced step."""
    wanted = "be a number, one per seed, or make a number of a traced step, as Optax's schedules do"
    try:
        made = jax.eval_shape(schedule, jnp.zeros((), int))
    except Exception as error:  # whatever the caller's function raises
        raise TypeError(f"`learning_rate` must {wanted}, got {str(error).strip()[:200]!r}.") from error
    if getattr(made, "shape", None) != ():
        fail_kind("learning_rate", wanted, f"a function to {made}")


def _fit(
    models: Any,
    loss: _Loss,
    data: Any,
    key: Array,
    num_epochs: int,
    batch_size: int,
    adamw: tuple[_AdamW, _Rates],
    observe: _Validation | None,
    options: dict[str, Any],
) -> FitResult:
    for name in options:
        if name not in FIT_OPTIONS:
            fail_kind(name, f"be left out, or be one of {', '.join(FIT_OPTIONS)}", "an unknown option")
    optimizer, rates = adamw
    step, sampler, save = make_step(loss, optimizer), Epochs(data, batch_size), Save(observe)
    return fit(models, step, sampler, num_epochs=num_epochs, key=key, hyperparams=rates, save=save, **options)
