"""Error rates under noise on inputs or parameters, for many noise scales at once."""

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core import checks
from dissociation._core.conversion import to_device
from dissociation._core.types import OneHot, PyTree
from dissociation._core.validation import validated
from dissociation.models._program import called, function_of, parameters_in, with_draws
from dissociation.training._bmap import bmap

Images = Float[Array | np.ndarray, "n *image"]
Scales = Float[Array | np.ndarray, " scales"]


@validated
@jax.jit
def error_rate(logits: Float[Array | np.ndarray, "n classes"], labels: OneHot) -> Float[Array, ""]:
    """Return the fraction of samples whose largest logit is not at the label.

    Args:
        logits: Logits, [samples, classes].
        labels: Classes [samples], or one-hot [samples, classes].

    Returns:
        Error rate from 0 to 1; NaN without samples, or if the largest logit of a sample is not
        finite.

    Example:
        >>> error_rate(jnp.array([[2.0, 1.0], [0.0, 3.0]]), jnp.array([[1.0, 0.0], [1.0, 0.0]]))
        Array(0.5, dtype=float32)
    """
    is_wrong = logits.argmax(axis=1) != labels.argmax(axis=1)
    rate = is_wrong.mean(dtype=logits.dtype)
    # `argmax` of NaN is class 0, but a network that has diverged predicts no class.
    is_finite = jnp.isfinite(logits.max(axis=1))
    return jnp.where(jnp.all(is_finite), rate, jnp.nan)


@validated
def input_noise_error(
    model: Any,
    images: Images,
    labels: OneHot,
    scales: Scales,
    *,
    noise: Images,
    scales_per_batch: int | None = 1,
) -> Float[Array, " scales"]:
    """Return the error rate on `images + scale * noise`, for every scale.

    All scales share one draw of the noise. If models share it too, their curves differ only by the
    models.

    Args:
        model: Function from one image, of any shape, to logits [classes], or a pair (model, state);
            in inference mode.
        images: Images, [samples, ...].
        labels: Classes [samples], or one-hot [samples, classes].
        scales: Non-negative noise scales in units of `images`, [scales].
        noise: Noise in the shape of `images`, usually standard normal.
        scales_per_batch: Scales evaluated at once; 1 takes the least memory and is fastest on a
            CPU; None takes all.

    Returns:
        Error rates between 0 and 1, [scales]; NaN as in `error_rate`, with a `RuntimeWarning` that
        names the scales unless the call is traced.
    """
    checks.check_non_negative("scales", scales)
    _check_outputs(model, images, labels)
    images = to_device(images)
    directions = to_device(noise)
    with jax.default_matmul_precision("highest"):
        inputs, tail = _apply_first_layer(model, images)
        if inputs is not images:  # without the bias, which is in `inputs`
            directions = _multiplied(model.layers[0].weight, directions)
    labels = to_device(labels)
    return _over_scales(scales, scales_per_batch, inputs, directions, tail, None, labels)


@validated
def parameter_noise_error(
    model: Any,
    images: Images,
    labels: OneHot,
    scales: Scales,
    *,
    noise: PyTree,
    scales_per_batch: int | None = 1,
) -> Float[Array, " scales"]:
    """Return the error rate of the model with parameters `p + scale * noise`, for every scale.

    The parameters of `model` are p. The result and warnings are those of `input_noise_error`.

    Args:
        model: Function from one image to logits [classes].
        images: Images, [samples, ...].
        labels: Classes [samples], or one-hot [samples, classes].
        scales: Non-negative noise scales in units of the parameters, [scales].
        noise: A PyTree like `model` with a draw, or None, per parameter, from
            `rewrites.parameter_noise`.
        scales_per_batch: Scales evaluated at once; None for all.
    """
    checks.check_non_negative("scales", scales)
    _check_outputs(model, images, labels)
    noise = with_draws(model, noise)
    images = to_device(images)
    with jax.default_matmul_precision("highest"):
        inputs, tail = _apply_first_layer(model, images)
        if inputs is images:
            directions = jnp.zeros(())
            tail_noise = noise
        else:
            directions, tail_noise = _apply_first_layer(noise, images)
    labels = to_device(labels)
    return _over_scales(scales, scales_per_batch, inputs, directions, tail, tail_noise, labels)


def _at_scale(
    scale: Array, inputs: Array, directions: Array, tail: Any, tail_noise: Any, labels: Array
) -> Array:
    """Return the error rate of `tail + scale * tail_noise` on `inputs + scale * directions`."""
    if tail_noise is not None:
        parameters = parameters_in(tail)
        noisy = jax.tree.map(lambda p, draw: p + scale * draw, parameters, tail_noise)
        tail = eqx.combine(noisy, tail)
    outputs = jax.vmap(partial(called, tail))(inputs + scale * directions)
    return error_rate(outputs, labels)


def _over_scales(scales: Any, batch_size: int | None, *constants: Any) -> Array:
    """Return the errors at every scale, and warn of undefined ones."""
    in_axes = (0,) + (None,) * len(constants)
    mapped = bmap(_at_scale, in_axes=in_axes, batch_size=batch_size)
    with jax.default_matmul_precision("highest"):
        errors = mapped(to_device(scales), *constants)
    if checks.is_traced(errors):
        return errors
    is_undefined = np.isnan(errors)
    if is_undefined.any():
        checks.warn(
            "`model` gives outputs that are not finite, and so no error rate, at `scales` "
            f"{scales[is_undefined]}"
        )
    return errors


def _check_outputs(model: Any, images: Any, labels: Any) -> None:
    output = checks.check_model("model", function_of("model", model), images[0])
    num_classes = labels.shape[1]
    if output.ndim == 1 and output.shape[0] > num_classes:
        num_outputs = output.shape[0]
        requirement = f"have {num_outputs} classes, as `model` gives outputs"
        advice = (
            "If they are integers without the last class, pass "
            f"jax.nn.one_hot(labels, {num_outputs})"
        )
        checks.fail("labels", requirement, num_classes, advice)
    if output.shape != labels.shape[1:]:
        requirement = f"give an output for each of the {num_classes} classes"
        checks.fail("model", requirement, f"shape {output.shape}")


@jax.jit
def _multiplied(weight: Array, draws: Array) -> Array:
    return jax.vmap(lambda draw: weight @ draw)(draws)


@eqx.filter_jit
def _applied(layer: eqx.nn.Linear, images: Array) -> Array:
    return jax.vmap(layer)(images)


def _apply_first_layer(model: Any, images: Any) -> tuple[Any, Any]:
    """Return the first layer's preactivations and the remaining model.

    If the first layer is not linear, return the images and the model.
    """
    # A subclass may do something else before its first layer.
    if type(model) is not eqx.nn.MLP:
        return images, model
    layers = model.layers
    if len(layers) < 2 or type(layers[0]) is not eqx.nn.Linear:
        return images, model
    # W (x + s n) = W x + s W n, so two applications of the first layer serve all scales.
    preactivations = _applied(layers[0], images)
    tail = eqx.tree_at(lambda mlp: mlp.layers[0], model, eqx.nn.Identity())
    return preactivations, tail
