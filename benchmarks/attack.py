"""Search for adversarial examples by projected gradient ascent, to check certificates."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array


def projected_attack(
    model: Callable[[Array], Array],
    x: Array,
    label: Array | int,
    radius: Array | float,
    *,
    key: Array,
    num_restarts: int = 20,
    num_steps: int = 100,
) -> tuple[Array, Array]:
    """Return the step of the lowest margin within a Euclidean distance of `x`, and this margin.

    Every restart begins at a random point of the ball, and takes steps of length 2.5 radius /
    num_steps against the gradient of the label's margin, projected onto the ball.

    Args:
        model: Function of one input to logits.
        x: Input, of any shape.
        label: Class of `x`.
        radius: Radius of the ball.
        key: Random key of the starting points.
        num_restarts: Number of starting points.
        num_steps: Number of steps from each starting point.

    Returns:
        Array to add to `x`, and the label's logit minus the largest other one at the sum, negative
        after a success.

    References:
        Madry et al. (2018), Towards deep learning models resistant to adversarial attacks, section
        2.1.
    """
    tiny = jnp.finfo(x.dtype).tiny

    def margin(step: Array) -> Array:
        logits = model(x + step)
        others = jnp.where(jnp.arange(logits.shape[0]) == label, -jnp.inf, logits)
        return logits[label] - jnp.max(others)

    def one(key: Array) -> tuple[Array, Array]:
        direction, length = jax.random.split(key)
        away = jax.random.normal(direction, x.shape, x.dtype)
        away = radius * away / jnp.linalg.norm(away) * jax.random.uniform(length, (), x.dtype)

        def move(
            state: tuple[Array, Array, Array], _: None
        ) -> tuple[tuple[Array, Array, Array], None]:
            step, best, lowest = state
            slope = jax.grad(margin)(step)
            step = step - 2.5 * radius / num_steps * slope / jnp.maximum(
                jnp.linalg.norm(slope), tiny
            )
            step = step * jnp.minimum(1.0, radius / jnp.maximum(jnp.linalg.norm(step), tiny))
            value = margin(step)
            lower = value < lowest
            return (step, jnp.where(lower, step, best), jnp.where(lower, value, lowest)), None

        state, _ = jax.lax.scan(move, (away, away, margin(away)), None, length=num_steps)
        return state[1], state[2]

    steps, margins = jax.vmap(one)(jax.random.split(key, num_restarts))
    best = jnp.argmin(margins)
    return steps[best], margins[best]
