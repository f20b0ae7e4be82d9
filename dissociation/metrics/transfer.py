"""Transfer: how well a representation serves a new task, for growing budgets of labelled samples."""

from collections.abc import Sequence
from itertools import groupby
from math import ceil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation.checks import check_choice, check_count, check_ndim, check_same_length, fail
from dissociation.metrics.probes import Count, Scalar, crossval_gradient_predict, crossval_softmax_predict


def hidden_features(
    model: eqx.nn.MLP, images: Float[Array | np.ndarray, "n inputs"], layer: int = 1
) -> Float[Array, "n hidden"]:
    """Post-activations of one hidden layer.

    The widths are those of the weights, so a rewritten model whose layers grew serves as well.

    Args:
        model: One network, with no member axis: map over members outside.
        images: Inputs.
        layer: Hidden layer counted from 0; the default is the second.

    Returns:
        What `layers[layer + 1]` of the model receives.

    Raises:
        ValueError: If `layer` is no hidden layer of the model, or `images` has not two axes.
        TypeError: If `layer` is no integer.
    """
    check_ndim("images", images, 2, "[samples, inputs]")
    check_count("layer", layer)
    depth = len(model.layers) - 1
    if layer >= depth:
        fail("layer", f"be a hidden layer, 0 to {depth - 1}", layer)

    def forward(image: Array) -> Array:
        for index in range(layer + 1):
            image = model.layers[index](image)
            # An activation with parameters holds them stacked over layers, and Equinox applies it neuron by neuron.
            own = jax.tree.map(lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, model.activation)
            image = eqx.filter_vmap(lambda activation, value: activation(value))(own, image)
        return image

    return jax.vmap(forward)(jnp.asarray(images))


def transfer_errors(
    features: Float[Array | np.ndarray, "n d"],
    labels: Float[Array | np.ndarray, "n classes"],
    *,
    fractions: Sequence[float] = tuple(k / 20 for k in range(1, 21)),
    num_splits: int = 10,
    probe: str = "converged",
    ridge: Scalar = 1.0,
    num_steps: Count = 200,
    step_size: Scalar | None = None,
    num_buckets: int = 4,
) -> Float[Array, " budgets"]:
    """Cross-validated error of a probe on the first int(p n) samples, for every fraction p.

    Under `jax.jit` all budgets are one compilation: they are sorted into `num_buckets` groups by size, and a group runs
    in turn through one solver whose arrays are as long as the group's largest budget. One bucket compiles fastest and
    makes every budget cost as much as the largest; more buckets compile longer and follow the budgets.

    Args:
        features: Representation of the samples, in the order in which budgets take them.
        labels: One-hot labels.
        fractions: Budgets as fractions of n in (0, 1], in any order.
        num_splits: Folds of the cross-validation.
        probe: "converged" for `crossval_softmax_predict`, "gradient" for `crossval_gradient_predict`.
        ridge: Penalty of the converged probe.
        num_steps: Steps of the gradient probe.
        step_size: Step of the gradient probe; default one that follows the features' curvature.
        num_buckets: Solvers of different length.

    Returns:
        1 - accuracy per fraction, in [0, 1].

    Raises:
        ValueError: If a fraction is outside (0, 1] or leaves fewer samples than folds, or `probe` is unknown.
    """
    check_ndim("features", features, 2, "[samples, features]")
    check_ndim("labels", labels, 2, "[samples, classes]")
    check_same_length("features", features.shape[0], "labels", labels.shape[0])
    check_choice("probe", probe, ("converged", "gradient"))
    check_count("num_splits", num_splits, minimum=2)
    check_count("num_buckets", num_buckets, minimum=1)
    size = features.shape[0]
    counts = [_budget(fraction, size, num_splits) for fraction in fractions]
    if not counts:
        fail("fractions", "name at least one budget", fractions)
    features, labels = jnp.asarray(features), np.asarray(labels) if isinstance(labels, np.ndarray) else labels

    def error(count: Array, length: int) -> Array:
        x, y = features[:length], labels[:length]
        if probe == "converged":
            chances = crossval_softmax_predict(x, y, num_splits, ridge=ridge, num_samples=count)
        else:
            options = {"num_steps": num_steps, "step_size": step_size}
            chances = crossval_gradient_predict(x, y, num_splits, num_samples=count, **options)
        right = jnp.argmax(chances, -1) == jnp.argmax(jnp.asarray(y), -1)
        return 1.0 - jnp.sum(right & (jnp.arange(length) < count)) / count.astype(features.dtype)

    order = sorted(range(len(counts)), key=counts.__getitem__)
    errors = []
    for _, group in groupby(order, key=lambda i: ceil(counts[i] * num_buckets / size)):
        members = [counts[i] for i in group]
        # The last is the largest. One program for the group, whatever its number of budgets.
        errors.append(lax.map(lambda count, n=members[-1]: error(count, n), jnp.asarray(members, jnp.int32)))
    return jnp.concatenate(errors)[np.argsort(order)]


def _budget(fraction: float, size: int, num_splits: int) -> int:
    """The int(fraction * size) of real numbers: rounding of the product must not cost a sample."""
    if not 0 < fraction <= 1:
        fail("fractions", "lie in (0, 1]", fraction)
    count = int(round(fraction * size, 6))
    if count < num_splits:
        fail("fractions", f"leave at least `num_splits` ({num_splits}) of {size} samples", fraction)
    return count
