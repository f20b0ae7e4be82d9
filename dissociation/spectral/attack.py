"""Projected gradient ascent: an adversarial example if one is found, against which certificates are tested."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from dissociation.checks import check_count, check_finite, check_model, check_positive, fail, is_traced
from dissociation.models.program import function_of
from dissociation.results import Result
from dissociation.spectral.forms import Spectrum, check_on_inputs
from dissociation.types import PRNGKey
from dissociation.validation import validated


class Attack(Result):
    """The best of several restarts.

    Attributes:
        step: Array added to the input, of the same shape.
        margin: The label's logit less the largest other one there: negative if the attack succeeded.
        found: Whether it did.
    """

    step: Float[Array, "..."]
    margin: Float[Array, ""]
    found: Bool[Array, ""]


@validated
def projected_attack(
    model: Any,
    x: Float[Array | np.ndarray, "..."],
    label: Int[Array | np.ndarray, ""] | int,
    radius: Float[Array | np.ndarray, ""] | float,
    *,
    key: PRNGKey,
    num_restarts: int = 20,
    num_steps: int = 100,
) -> Attack:
    """Looks for an input of another class within a Euclidean distance, by projected gradient steps.

    Every restart begins at a random point of the ball, and steps 2.5 radius / num_steps along the normalised gradient
    of the label's margin, downhill, projected onto the ball. An attack that finds nothing proves nothing; for one-layer
    bilinear networks `certificate.certified_radius` is exact.

    Args:
        model: One input to logits, or a pair of such a model and its state; in inference mode.
        x: The input, of any shape.
        label: Its class.
        radius: Of the ball.
        key: Draws the starting points.
        num_restarts: Starting points, at least 1.
        num_steps: Steps from each, at least 1.

    Returns:
        The attack with the lowest margin among all points visited; a margin of NaN where the model's logits
        are, or a traced label is no class.

    Raises:
        ValueError: If a count is below 1, the radius is not positive, the input not one finite example, the label no
            class, or the model a spectrum in hidden space.

    References:
        Madry et al. (2018), Towards deep learning models resistant to adversarial attacks, section 2.1.
    """
    restarts = check_count("num_restarts", num_restarts, minimum=1)
    steps = check_count("num_steps", num_steps, minimum=1)
    check_positive("radius", radius)
    check_finite("x", x)
    if isinstance(model, Spectrum):
        check_on_inputs("model", model)
    model = function_of("model", model)
    x, radius = jnp.asarray(x), jnp.asarray(radius)
    if len(shape := check_model("model", model, x).shape) != 1:
        fail("model", "give logits [classes] for one example", f"shape {shape}")
    classes = shape[0]
    if not is_traced(label) and not 0 <= int(label) < classes:
        fail("label", f"be a class from 0 to {classes - 1}", label)
    label = jnp.where((label >= 0) & (label < classes), label, classes)

    def margin(step: Array) -> Array:
        logits = model(x + step)
        others = jnp.where(jnp.arange(logits.shape[0]) == label, -jnp.inf, logits)
        return logits.at[label].get(mode="fill", fill_value=jnp.nan) - jnp.max(others)

    def project(step: Array) -> Array:
        return step * jnp.minimum(1.0, radius / jnp.maximum(jnp.linalg.norm(step), jnp.finfo(x.dtype).tiny))

    def one(key: Array) -> tuple[Array, Array]:
        direction, length = jax.random.split(key)
        away = jax.random.normal(direction, x.shape, x.dtype)
        away = radius * away / jnp.linalg.norm(away) * jax.random.uniform(length, (), x.dtype)

        def move(state: tuple[Array, Array, Array], _: None) -> tuple[tuple[Array, Array, Array], None]:
            step, best, lowest = state
            slope = jax.grad(margin)(step)
            slope = slope / jnp.maximum(jnp.linalg.norm(slope), jnp.finfo(x.dtype).tiny)
            step = project(step - 2.5 * radius / steps * slope)
            value = margin(step)
            lower = value < lowest
            return (step, jnp.where(lower, step, best), jnp.where(lower, value, lowest)), None

        state, _ = jax.lax.scan(move, (away, away, margin(away)), None, length=steps)
        return state[1], state[2]

    steps_found, lowest = jax.vmap(one)(jax.random.split(key, restarts))
    first = jnp.argmin(jnp.where(jnp.isnan(lowest), jnp.inf, lowest))
    return Attack(steps_found[first], lowest[first], lowest[first] < 0)
