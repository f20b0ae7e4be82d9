"""Train networks until they grok, at many weight decays at once."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_non_negative,
    check_positive,
    check_seed,
    fail,
)
from dissociation._core.types import PRNGKeys, PyTree
from dissociation._core.validation import validated
from dissociation.data._datasets import Dataset
from dissociation.measures._collapse import (
    class_moments,
    nearest_centre_agreement,
    neural_collapse,
    self_duality,
    simplex_frame,
    trace_ratio,
)
from dissociation.measures._margins import linear_head
from dissociation.measures._robustness import error_rate
from dissociation.models._images import CNN
from dissociation.models._mlp import MLP
from dissociation.models._representations import representations
from dissociation.training._fitting import FitResult, fit
from dissociation.training._members import after
from dissociation.training._records import Save
from dissociation.training._samplers import Epochs
from dissociation.training._state import make_step
from dissociation.training._sweeps import Grid

PIXEL_MEAN = 0.1307
"""Mean of MNIST's training pixels in [0, 1]."""

PIXEL_DEVIATION = 0.3081
"""Standard deviation of MNIST's training pixels in [0, 1]."""


def standardised(images: Float[Array | np.ndarray, "n d"]) -> Float[Array, "n d"]:
    """Return images in [0, 1] in units of MNIST's deviation about its mean."""
    return (jnp.asarray(images) - PIXEL_MEAN) / PIXEL_DEVIATION


@validated
def observation_steps(num_steps: int) -> Int[np.ndarray, " times"]:
    """Return steps 0 to 29, every tenth to 150, then every num_steps / 150, rounded, to the last.

    Args:
        num_steps: Last step.

    Example:
        >>> len(observation_steps(100_000))
        193
    """
    total = check_count("num_steps", num_steps, minimum=1)
    later = np.rint(np.arange(1, 151) * total / 150).astype(int)
    later = later[later > 150]
    steps = np.concatenate([np.arange(30), np.arange(30, 151, 10), later, [total]])
    steps = np.unique(steps)
    return steps[steps <= total]


@validated(empty=("measure_at",))
def train_grokking(
    dataset: Dataset,
    *,
    weight_decays: Sequence[float] = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    seeds: Sequence[int] = (42, 43, 44, 45, 46),
    num_steps: int = 100_000,
    num_train: int = 1000,
    batch_size: int = 100,
    learning_rate: float = 1e-3,
    init_scale: float | Sequence[float] | Float[Array | np.ndarray, " members"] = 8.0,
    optimizer: str = "adamw",
    network: str = "mlp",
    options: dict[str, Any] | None = None,
    measures: eqx.Module | None = None,
    measure_at: Sequence[int] | Int[np.ndarray, " times"] = (),
    **fit_options: Any,
) -> FitResult:
    """Train one network per weight decay and seed by squared error against one-hot labels.

    A seed sets weights and order of batches, whatever the weight decay. Biases are scaled and decay
    too.

    Args:
        dataset: Images and one-hot labels.
        weight_decays: Weight decays of AdamW; traced.
        seeds: Seeds from 0 to 4294967295.
        num_steps: Optimiser steps.
        num_train: Number of training images, the first ones.
        batch_size: Images per batch, reshuffled every epoch.
        learning_rate: Learning rate.
        init_scale: Factor of all initial parameters, one or per member; traced.
        optimizer: "adamw", or "sgd" with the decay times the learning rate, as in AdamW.
        network: "mlp" or "cnn".
        options: Options of `models.MLP` or `models.CNN`.
        measures: Slow measures, `measures(model, key)`.
        measure_at: Steps of `measures`, out of `observation_steps(num_steps)`.
        **fit_options: `callbacks`, `checkpoint`, `mesh`, `member_map` of `training.fit`.

    Returns:
        Result of `fit`, members in the order of `Grid(weight_decay=weight_decays, seed=seeds)`.
        `history.observed` has `CheapMeasures` at `observation_steps`, and under "expensive"
        `measures`, NaN outside of `measure_at`. The loss is a sum over classes and batch.
    """
    check_choice("optimizer", optimizer, OPTIMIZERS)
    check_positive("learning_rate", learning_rate)
    for seed in seeds:
        check_seed("seeds", seed)
    check_non_negative("weight_decays", weight_decays)
    num_images = check_count("num_train", num_train, minimum=1)
    num_available = len(dataset.train_images)
    if num_images > num_available:
        requirement = f"be at most the number of training images ({num_available})"
        fail("num_train", requirement, num_train)
    times = observation_steps(num_steps)
    if not np.isin(measure_at, times).all():
        unobserved = sorted(set(measure_at) - set(times.tolist()))
        fail("measure_at", "be steps of `observation_steps(num_steps)`", unobserved)

    grid = Grid(weight_decay=weight_decays, seed=seeds)
    keys = jnp.stack([jax.random.PRNGKey(seed) for seed in grid.values["seed"].tolist()])
    # Keys of a seed alone: members of different weight decay must differ by nothing else.
    init_keys, fit_keys = (
        jax.vmap(lambda key, i=i: jax.random.fold_in(key, i))(keys) for i in range(2)
    )
    sizes = {"classes": dataset.num_classes}
    if network == "mlp":  # images of a CNN have a fixed size
        sizes["inputs"] = dataset.num_pixels
    models = initial_models(init_keys, init_scale, network, {**sizes, **(options or {})})

    images = standardised(dataset.train_images[:num_images])
    labels = jnp.asarray(dataset.train_labels[:num_images])
    rates = grid.hyperparams("weight_decay") | {
        "learning_rate": jnp.full(len(grid), learning_rate, float)
    }
    test_images = standardised(dataset.test_images)
    cheap_measures = CheapMeasures(images, labels, test_images, jnp.asarray(dataset.test_labels))
    measured_steps = jnp.asarray(measure_at, int)

    def observe(model: MLP | CNN, step: Array, key: Array) -> dict[str, Any]:
        observed: dict[str, Any] = cheap_measures(model)
        if measures is None:
            return observed
        slow_measures: Any = measures
        # Both branches of `cond` must return the same shapes.
        structs = jax.eval_shape(slow_measures, model, key)
        empty = jax.tree.map(lambda leaf: jnp.full(leaf.shape, jnp.nan, leaf.dtype), structs)
        observed, model = after(observed, model)
        is_measured = jnp.any(measured_steps == step)
        measured = jax.lax.cond(is_measured, lambda: slow_measures(model, key), lambda: empty)
        return {**observed, "expensive": measured}

    return fit(
        models,
        make_step(squared_error, OPTIMIZERS[optimizer]),
        # Every seed has its own order of batches.
        Epochs((images, labels), batch_size, shared=False),
        num_steps=num_steps,
        key=fit_keys,
        hyperparams=rates,
        save=Save(observe, times),
        **fit_options,
    )


@validated
def initial_models(
    keys: PRNGKeys,
    init_scale: float | Sequence[float] | Float[Array | np.ndarray, " scales"] = 8.0,
    network: str = "mlp",
    options: dict[str, Any] | None = None,
) -> PyTree:
    """Return stacked initial networks, every parameter multiplied by `init_scale`.

    Args:
        keys: One key per member.
        init_scale: Positive factor, one or per member.
        network: "mlp" or "cnn".
        options: Options of `models.MLP` or `models.CNN`.
    """
    check_choice("network", network, ("mlp", "cnn"))
    scales = np.atleast_1d(np.asarray(init_scale, float))
    check_positive("init_scale", scales)
    if scales.shape not in ((1,), (len(keys),)):
        requirement = f"be one number, or one for each of the {len(keys)} members"
        fail("init_scale", requirement, f"shape {scales.shape}")
    scales = jnp.broadcast_to(jnp.asarray(scales, float), (len(keys),))
    return _scaled(keys, scales, network, options or {})


@eqx.filter_jit
def _scaled(keys: PRNGKeys, scales: Array, network: str, options: dict[str, Any]) -> PyTree:
    def build(key: Array, scale: Array) -> eqx.Module:
        network_type = MLP if network == "mlp" else CNN
        parameters, static = eqx.partition(network_type(**options, key=key), eqx.is_inexact_array)
        parameters = jax.tree.map(lambda leaf: scale * leaf, parameters)
        return eqx.combine(parameters, static)

    return eqx.filter_vmap(build)(keys, scales)


OPTIMIZERS: dict[str, Callable[[dict[str, Any]], optax.GradientTransformation]] = {
    "adamw": lambda rates: optax.adamw(rates["learning_rate"], weight_decay=rates["weight_decay"]),
    # The decay comes first, so that the learning rate multiplies it as in AdamW.
    "sgd": lambda rates: optax.chain(
        optax.add_decayed_weights(rates["weight_decay"]), optax.sgd(rates["learning_rate"])
    ),
}


@validated
def squared_error(model: Callable, batch: tuple[Array, Array], key: Array) -> Float[Array, ""]:
    """Return the sum over images and classes of (logit - one-hot label)^2."""
    images, labels = batch
    return jnp.sum((jax.vmap(model)(images) - labels) ** 2)


class CheapMeasures(eqx.Module):
    """Accuracy and neural collapse on training and test images.

    Attributes:
        train_images: Training images, [n, d].
        train_labels: One-hot labels, [n, classes].
        images: Test images, [m, d].
        labels: One-hot labels, [m, classes].
    """

    train_images: Float[Array, "n d"]
    train_labels: Float[Array, "n classes"]
    images: Float[Array, "m d"]
    labels: Float[Array, "m classes"]

    def __call__(self, model: eqx.Module) -> dict[str, Array]:
        """Return accuracies, losses per image and measures of collapse by name.

        Names of test images have the prefix "test_". "nc4_score" uses centres of training images.
        "weight_norm" is the Frobenius norm of all weights, "head_norm" of the last layer's, without
        biases.
        """
        classifier, _ = linear_head(model)
        # Biases have one axis.
        weights = [
            leaf for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf) and leaf.ndim > 1
        ]
        measured = {"weight_norm": _norm(weights), "head_norm": _norm([classifier])}
        centres = None
        examples_of_prefix = {
            "": (self.train_images, self.train_labels),
            "test_": (self.images, self.labels),
        }
        for prefix, (images, labels) in examples_of_prefix.items():
            layers = representations(model, images)
            features = layers["features"]
            logits = layers["logits"]
            classes = jnp.argmax(labels, 1)

            # Decompositions that XLA runs in parallel in one program on a CPU can wait for each
            # other for ever.
            measured, features = after(measured, features)
            moments = class_moments(features, classes, labels.shape[1], scatter=True)
            if centres is None:
                centres = moments
            collapse = neural_collapse(moments)
            collapse, moments = after(collapse, moments)
            frame = simplex_frame(moments)

            split = prefix or "train_"
            measured[f"{split}accuracy"] = 1 - error_rate(logits, labels)
            measured[f"{split}loss"] = jnp.sum((logits - labels) ** 2) / labels.shape[0]
            of_split = {
                "within_class_variance": collapse.within,
                "between_class_variance": collapse.between,
                "scale_means": collapse.scale,
                "nc1_score": collapse.nc1,
                "rnc1_score": collapse.rnc1,
                "nc2_score": collapse.nc2,
                "trace_ratio": trace_ratio(moments),
                "equinorm": frame.equinorm,
                "equiangularity": frame.equiangularity,
                "maximal_angle": frame.maximal_angle,
                "nc3_score": self_duality(moments, classifier),
                "nc4_score": nearest_centre_agreement(features, logits, centres),
            }
            for name, measure in of_split.items():
                measured[f"{prefix}{name}"] = measure
        return measured


def _norm(arrays: list[Array]) -> Array:
    return jnp.sqrt(sum(jnp.sum(array**2) for array in arrays))
