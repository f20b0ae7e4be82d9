"""Run one trajectory or a batch, with a key per step."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array

from dissociation._core.checks import check_count, check_finite, fail
from dissociation._core.keys import named_key
from dissociation._core.types import PRNGKey


def run_trajectories(
    simulate: Callable[[Array, Array], Any],
    draw_initial: Callable[[Array], Array],
    key: PRNGKey | None,
    num_trajectories: int | None,
    initial: ArrayLike | None,
    dimension: int,
) -> Any:
    """Run `simulate(key, initial)` once, or for `num_trajectories` keys.

    It starts from `initial`, [d] or [num_trajectories, d], or else from drawn states.
    """
    if key is None:
        if initial is None:
            fail("key", "be given where `initial` is not", None)
        key = named_key("nothing")  # never used
    shapes: Any = [(dimension,)]
    if num_trajectories is not None:
        num_trajectories = check_count("num_trajectories", num_trajectories, minimum=1)
        shapes.append((num_trajectories, dimension))
    if initial is not None:
        shape = np.shape(initial)
        if shape not in shapes:
            fail("initial", f"have shape {' or '.join(map(str, shapes))}", shape)
        check_finite("initial", initial)
        initial = jnp.asarray(initial)

    def run(key, initial):
        key_start, key_path = jax.random.split(key)
        if initial is None:
            initial = draw_initial(key_start)
        return simulate(key_path, initial)

    if num_trajectories is None:
        return run(key, initial)
    # A batch may share one initial state.
    initial_axis = 0 if initial is not None and initial.ndim == 2 else None
    keys = jax.random.split(key, num_trajectories)
    return jax.vmap(run, in_axes=(0, initial_axis))(keys, initial)


def step_keys(key: PRNGKey, num_steps: int) -> Array:
    """Return `fold_in(key, step)` for each step."""
    steps = jnp.arange(check_count("num_steps", num_steps, minimum=1))
    # Keys by `fold_in` do not depend on the number of steps, so a longer run starts as a shorter
    # one.
    return jax.vmap(lambda step: jax.random.fold_in(key, step))(steps)


def step_normals(key: PRNGKey, num_steps: int, size: int, dtype: Any) -> Array:
    """Return standard normal draws of each step, [steps, size]."""
    keys = step_keys(key, num_steps)
    return jax.vmap(lambda key: jax.random.normal(key, (size,), dtype))(keys)


def scan_trajectory(advance: Callable[[Array, Any], Array], initial: Array, inputs: Any) -> Array:
    """Return the states [time, ...] from `initial`.

    Each is `advance(state, input)` of the previous one.
    """

    def step(state, step_input):
        following = advance(state, step_input)
        return following, following

    _, states = jax.lax.scan(step, initial, inputs)
    return jnp.concatenate([initial[None], states])


def walk(
    advance: Callable[[Array, Any], Array], num_steps: int, key: PRNGKey, initial: Array
) -> Array:
    """Return `scan_trajectory` of steps `advance(state, key)`."""
    return scan_trajectory(advance, initial, step_keys(key, num_steps))
