"""Gradient flow of two-layer linear networks in closed form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_known, check_positive, fail, is_traced
from dissociation._core.conversion import to_device
from dissociation._core.linalg import product
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.linear._families import LinearNetwork, check_network, check_single, polar
from dissociation.linear._tasks import Task

_LONGEST = 4.0
"""Largest product of an interval and a growth rate.

Longer intervals are divided, because exp(2 l t) swamps all other terms.
"""

_MOST = 4_000_000
"""Largest number of divisions of all intervals, some minutes."""


class Flow(NamedTuple):
    """Gradient flow at some times, as products of weights; see `gradient_flow`.

    Attributes:
        map: W2 W1, [times, outputs, inputs].
        first: W1^T W1, [times, inputs, inputs].
        second: W2 W2^T, [times, outputs, outputs].
    """

    map: Float[Array, "times outputs inputs"]
    first: Float[Array, "times inputs inputs"]
    second: Float[Array, "times outputs outputs"]

    __repr__ = printed


@validated
def balanced_network(task: Task, hidden: int, scale: Scalar, *, key: PRNGKey) -> LinearNetwork:
    """Return a random network with W1 W1^T = W2^T W2, a start for `gradient_flow`.

    Args:
        task: Task.
        hidden: Hidden units.
        scale: Largest singular value of both layers, positive. Others are uniform below it.
        key: Random key.
    """
    check_single(task)
    check_count("hidden", hidden, minimum=1)
    check_positive("scale", scale)
    sizes = hidden, task.x.shape[1], task.y.shape[1]
    rank = min(sizes)
    keys = jax.random.split(key, 4)
    bases = []
    for k, size in zip(keys[:3], sizes, strict=True):
        bases.append(polar(jax.random.normal(k, (size, rank), task.x.dtype)))
    frame, inputs, outputs = bases
    values = scale * jax.random.uniform(keys[3], (rank,), task.x.dtype).at[0].set(1.0)
    first = product(frame * values[None], inputs.T)
    second = product(outputs * values[None], frame.T)
    return LinearNetwork((first, second))


@validated(finite=("times",))
def gradient_flow(
    task: Task, network: LinearNetwork, times: Float[Array | np.ndarray, " times"]
) -> Flow:
    """Return the exact gradient flow of a balanced network on a task with white inputs.

    dW/dt = -dL/dW with L = sum |G x - y|^2 / (2 samples), X X^T / samples = k I, and W1 W1^T = W2^T
    W2 at the start. With the stacked weights Q = [W1^T; W2], F = [[0, Syx^T], [Syx, 0]], and P = Q
    Q^T, the flow is P(t) = e^(F t) P(0) (I + k J(t) P(0))^-1 e^(F t), J(t) = int_0^t e^(2 F s) ds.
    Weights follow up to a rotation of hidden units, the same for both layers.

    Args:
        task: Task whose inputs are white: X X^T proportional to the identity.
        network: Balanced network, for instance `balanced_network`.
        times: Increasing times from 0 on; a step of gradient descent with rate h lasts h.

    Raises:
        ValueError: If inputs are not white, the network is not balanced, times do not increase, or
            they are too late. Under `jit` and `vmap` the flow is NaN for such inputs and networks.
        TypeError: If the times are traced, because they set the number of intervals.

    References:
        Saxe, McClelland and Ganguli (2014), Exact solutions to the nonlinear dynamics of learning
        in deep linear neural networks, for starts aligned with the task. Fukumizu (1998), Effect of
        batch learning in multilayer neural networks, and Braun et al. (2022), Exact learning
        dynamics of deep linear networks with prior knowledge, for all balanced starts.
    """
    check_network(task, network)
    check_known("they set the number of intervals", times=times)
    steps = np.diff(np.asarray(times, float), prepend=0.0)
    if (steps < 0).any():
        fail("times", "increase from 0 on", times)
    # In NumPy, because each operation on known arrays would compile a program.
    map_values = _numpy_unless_traced(task.map_values)
    input_values = _numpy_unless_traced(task.input_values)
    is_white = _is_white(task, input_values)
    is_balanced = _is_balanced(network)
    if not is_traced(is_white) and not is_white:
        spectrum = (
            f"rank {len(task.input_values)} of {task.x.shape[1]}, singular values "
            f"{task.input_values}"
        )
        fail("task", "have white inputs, X X^T proportional to the identity", spectrum)
    if not is_traced(is_balanced) and not is_balanced:
        fail("network", "be balanced, W1 W1^T = W2^T W2", "another start")

    # Intervals are divided equally, so that there is one program for all.
    longest = float(steps.max(initial=0.0))
    num_divisions = longest / _LONGEST * _growth(task, map_values, input_values).max() + 1
    limit = max(_MOST // len(steps), 1)
    if is_traced(num_divisions):
        divisions = jnp.where(num_divisions <= limit, num_divisions, 1).astype(int)
        steps = jnp.where(num_divisions <= limit, steps, jnp.nan)
    elif num_divisions > limit:
        latest = f"{longest * limit / float(num_divisions):.3g} in each of {len(steps)} intervals"
        fail(
            "times",
            f"rise by at most {latest}, {limit} steps of the largest rate",
            f"{longest:.3g}",
            "Modes with a rate have long converged; others decay as 1 / time",
        )
    elif any(map(is_traced, network.weights)):
        divisions = int(num_divisions)  # derivatives of a loop need its length
    else:
        divisions = to_device(np.asarray(int(num_divisions)))
    return _flow(task, network, to_device(steps, task.x.dtype), divisions)


def _numpy_unless_traced(values: Any) -> Any:
    """Return a known array as NumPy's, and a traced one unchanged."""
    return values if is_traced(values) else np.asarray(values)


def _growth(task: Task, map_values: Any, input_values: Any) -> Any:
    """Return the singular values of Syx = Y X^T / samples, for white inputs."""
    return map_values * input_values[0] ** 2 / task.x.shape[0]


def _is_white(task: Task, input_values: Any) -> Any:
    """Return True if the inputs' singular values are equal and none is missing."""
    tolerance = float(jnp.finfo(task.x.dtype).eps) ** 0.7
    is_equal = input_values.max() / input_values.min() - 1 <= tolerance
    return is_equal & (len(input_values) == task.x.shape[1])


@eqx.filter_jit
def _is_balanced(network: LinearNetwork) -> Array:
    """Return True if W1 W1^T = W2^T W2 up to rounding."""
    first, second = network.weights
    size = jnp.maximum(jnp.sum(first**2), jnp.sum(second**2))
    return jnp.linalg.norm(product(first, first.T) - product(second.T, second)) <= 1e-5 * size


@eqx.filter_jit
def _flow(task: Task, network: LinearNetwork, steps: Array, divisions: int | Array) -> Flow:
    first, second = network.weights
    inputs = first.shape[1]
    white = task.input_values[0] ** 2 / task.x.shape[0]
    rates = _growth(task, task.map_values, task.input_values)

    # Eigenvectors of F: (V, U) / sqrt(2) with s, (V, -U) / sqrt(2) with -s, and all else with 0.
    half = 0.5**0.5
    growing = half * jnp.concatenate([task.map_right, task.map_left])
    decaying = half * jnp.concatenate([task.map_right, -task.map_left])
    stacked = jnp.concatenate([first.T, second])

    def spread(step: Array, matrix: Array, function: Callable[[Array], Array]) -> Array:
        """Return f(F step) @ matrix, given f with f(0) = 1 on eigenvalues."""
        up = product(growing.T, matrix)
        down = product(decaying.T, matrix)
        plus = function(rates * step) - 1.0
        minus = function(-rates * step) - 1.0
        return matrix + product(growing * plus[None], up) + product(decaying * minus[None], down)

    def advance(step: Array, weights: Array) -> Array:
        """Return R with R R^T = P after a step, from Q with Q Q^T = P before."""
        grown = spread(step, weights, jnp.exp)
        # J(t) = t phi(2 F t) with phi(z) = (e^z - 1) / z.
        integral = spread(step, weights, lambda z: _phi(2 * z))
        identity = jnp.eye(weights.shape[1], dtype=weights.dtype)
        inner = identity + white * step * product(weights.T, integral)
        factor = jnp.linalg.cholesky(0.5 * (inner + inner.T))
        return jax.scipy.linalg.solve_triangular(factor, grown.T, lower=True).T

    def to_time(weights: Array, step: Array) -> tuple[Array, Array]:
        def divided(_: Any, weights: Array) -> Array:
            return advance(step / divisions, weights)

        weights = lax.fori_loop(0, divisions, divided, weights)
        return weights, product(weights, weights.T)

    _, grams = lax.scan(to_time, stacked, steps)
    is_exact = _is_white(task, task.input_values) & _is_balanced(network)
    grams = jnp.where(is_exact, grams, jnp.nan)
    return Flow(grams[:, inputs:, :inputs], grams[:, :inputs, :inputs], grams[:, inputs:, inputs:])


def _phi(z: Array) -> Array:
    is_zero = z == 0
    return jnp.where(is_zero, 1.0, jnp.expm1(z) / jnp.where(is_zero, 1.0, z))
