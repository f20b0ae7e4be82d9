"""Expected losses of linear networks under noise on inputs and weights, and their minimisers."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from dissociation._core.checks import check_count, check_non_negative, check_single, fail, is_traced
from dissociation._core.linalg import product, rank_cut, scale_of
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.linear._families import LSS, LinearNetwork, check_hidden, check_network, polar
from dissociation.linear._tasks import Task, check_semidefinite


class Noise(NamedTuple):
    """Standard deviations of independent Gaussian noise, drawn for every evaluation of the loss.

    Attributes:
        inputs: Deviation of entries of X.
        first: Deviation of entries of W1.
        second: Deviation of entries of W2.
    """

    inputs: Scalar = 0.0
    first: Scalar = 0.0
    second: Scalar = 0.0


class SimulatedLoss(NamedTuple):
    """Mean loss over draws of noise, and its standard error."""

    mean: Float[Array, ""]
    error: Float[Array, ""]

    __repr__ = printed


NONE = Noise()


def _checked(noise: Noise) -> Noise:
    for name, value in noise._asdict().items():
        check_non_negative(f"noise.{name}", value)
        check_single(f"noise.{name}", value)
    return Noise(*map(jnp.asarray, noise))  # floats would be static


@validated
def expected_loss(task: Task, network: LinearNetwork, noise: Noise = NONE) -> Float[Array, ""]:
    """Return the expected loss under noise, with the same weight noise for all samples.

    L0 + (s_x^2 |G|^2 + s_1^2 |W2|^2 tr S + s_2^2 d_out tr(W1 S W1^T) + s_1^2 s_2^2 d_h d_out tr S)
    / 2 with the loss L0 without noise, G = W2 W1 and S = X X^T / samples + s_x^2 I.

    Args:
        task: Task.
        network: Network of two layers.
        noise: Standard deviations; zeros give the loss.

    References:
        Braun, Grant and Saxe (2025), section 4, for inputs and weights apart.
    """
    check_network(task, network)
    return _expected(task, network, _checked(noise))


@eqx.filter_jit
def _expected(task: Task, network: LinearNetwork, noise: Noise) -> Array:
    samples = task.x.shape[0]
    residual = product(task.x, network.map.T) - task.y
    clean = 0.5 * jnp.sum(residual**2) / samples
    input_moment = jnp.sum(task.x**2) / samples
    hidden_moment = jnp.sum(network.hidden(task.x) ** 2) / samples
    return clean + _penalty(network, noise, input_moment, hidden_moment)


def _penalty(
    network: LinearNetwork, noise: Noise, input_moment: Array, hidden_moment: Array
) -> Array:
    """Return the loss that noise adds.

    Moments are tr C and tr(W1 C W1^T) of the inputs' second moment C.
    """
    first, second = network.weights
    outputs, hidden = second.shape
    variances = jnp.square(jnp.asarray(noise, first.dtype))
    input_variance = variances[0]
    first_variance = variances[1]
    second_variance = variances[2]
    trace = input_moment + input_variance * first.shape[1]
    hidden_trace = hidden_moment + input_variance * jnp.sum(first**2)
    first_loss = first_variance * jnp.sum(second**2) * trace
    second_loss = second_variance * outputs * hidden_trace
    product_loss = first_variance * second_variance * hidden * outputs * trace
    input_loss = input_variance * jnp.sum(network.map**2)
    return 0.5 * (input_loss + (first_loss + second_loss) + product_loss)


@validated
def simulated_loss(
    task: Task, network: LinearNetwork, noise: Noise, *, num_draws: int = 1000, key: PRNGKey
) -> SimulatedLoss:
    """Return the mean loss over draws of noise, for comparison with `expected_loss`.

    Args:
        task: Task.
        network: Network of two layers.
        noise: Standard deviations.
        num_draws: Draws, at least 2.
        key: Random key.
    """
    check_network(task, network)
    check_count("num_draws", num_draws, minimum=2)
    return _simulated(task, network, _checked(noise), num_draws, key)


@eqx.filter_jit
def _simulated(
    task: Task, network: LinearNetwork, noise: Noise, num_draws: int, key: PRNGKey
) -> SimulatedLoss:
    arrays = (task.x, *network.weights)
    deviations = jnp.asarray(noise, task.x.dtype)
    ends = np.cumsum([array.size for array in arrays])

    def noisy_loss(key: Array) -> Array:
        drawn = jax.random.normal(key, (int(ends[-1]),), task.x.dtype)
        draws = jnp.split(drawn, ends[:-1])
        noisy = []
        for array, deviation, draw in zip(arrays, deviations, draws, strict=True):
            noisy.append(array + deviation * draw.reshape(array.shape))
        x, first, second = noisy
        outputs = product(product(x, first.T), second.T)
        return 0.5 * jnp.sum((outputs - task.y) ** 2) / x.shape[0]

    keys = jax.random.split(key, num_draws)
    losses = lax.map(noisy_loss, keys, batch_size=min(num_draws, 64))
    return SimulatedLoss(jnp.mean(losses), jnp.std(losses, ddof=1) / num_draws**0.5)


@validated
def noise_minimiser(task: Task, hidden: int, noise: Noise, *, key: PRNGKey) -> LinearNetwork:
    """Return a GLS of least expected loss under noise.

    Without weight noise, it is a random LSS. With weight noise, W2 = t M sqrt(N) R^T and
    W1 = R sqrt(N) O^T S^(-1/2) / t with S of `expected_loss`, M N O^T = W* S^(1/2), t^4 = s_2^2
    d_out / (s_1^2 tr S), and a random frame R. It moves from a MRNS, up to the factor t, to a MWNS
    as noise on inputs grows. Without noise on inputs, rows of W1 lie in the inputs' span. At t = 1
    it is then a MRNS.

    Args:
        task: Task.
        hidden: Hidden units, at least `task.rank`.
        noise: Standard deviations. Both weights must have noise, or neither.
        key: Random key.

    Raises:
        ValueError: If one layer alone has noise: the loss then has an infimum that no network
            reaches. Weights are NaN if the noise is traced.
    """
    check_hidden(task, hidden)
    deviations = _checked(noise)
    is_zero = [float(value) == 0 for value in noise[1:] if not is_traced(value)]
    if is_zero == [True, True]:
        return LSS.sample(task, hidden, key=key)
    if any(is_zero):
        advice = "The loss falls without end as one layer shrinks and the other grows"
        fail("noise", "have noise on both layers, or on neither", tuple(noise), advice)
    return _minimiser(task, hidden, deviations, key)


def _balance(task: Task, noise: Noise) -> tuple[Array, Any, Array]:
    """Return roots of S in the inputs' span, the decomposition of W* S^(1/2) there, and tr S."""
    samples = task.x.shape[0]
    variance = jnp.square(jnp.asarray(noise.inputs, task.x.dtype))
    roots = jnp.sqrt(task.input_values**2 / samples + variance)
    trace = jnp.sum(task.x**2) / samples + variance * task.x.shape[1]
    codes = product(task.map_right.T, task.input_basis)
    scaled_map = task.map_values[:, None] * codes * roots[None]
    return roots, jnp.linalg.svd(scaled_map, full_matrices=False), trace


@eqx.filter_jit
def _minimiser(task: Task, hidden: int, noise: Noise, key: PRNGKey) -> LinearNetwork:
    roots, (left_vectors, values, right_vectors), trace = _balance(task, noise)
    frame = polar(jax.random.normal(key, (hidden, task.rank), task.x.dtype))
    variances = jnp.square(jnp.asarray(noise, task.x.dtype))
    first_variance = variances[1]
    second_variance = variances[2]
    is_silent = (first_variance == 0) & (second_variance == 0)
    is_noisy = (first_variance > 0) & (second_variance > 0)
    second_size = jnp.where(is_silent, 1.0, second_variance) * task.y.shape[1]
    first_size = jnp.where(is_silent, 1.0, first_variance) * trace
    ratio = (second_size / first_size) ** 0.25
    ratio = jnp.where(is_silent | is_noisy, ratio, jnp.nan)

    scale = jnp.sqrt(values)[None]
    codes = product(frame * scale, right_vectors / roots[None])
    first = product(codes, task.input_basis.T) / ratio
    readout = product(task.map_left, left_vectors) * scale
    return LinearNetwork((first, product(readout, frame.T) * ratio))


@validated
def least_loss(task: Task, hidden: int, noise: Noise) -> Float[Array, ""]:
    """Return the least expected loss of a GLS under noise.

    It is the loss of `noise_minimiser`, or the infimum:
    (c + s_x^2 |W*|^2 + 2 s_1 s_2 sqrt(d_out tr S) nuc(W* S^(1/2)) + s_1^2 s_2^2 d_h d_out tr S) /
    2.
    """
    check_hidden(task, hidden)
    return _least(task, hidden, _checked(noise))


@eqx.filter_jit
def _least(task: Task, hidden: int, noise: Noise) -> Array:
    _, (_, values, _), trace = _balance(task, noise)
    deviations = jnp.asarray(noise, task.x.dtype)
    inputs = deviations[0] ** 2 * jnp.sum(task.map_values**2)
    mixed = deviations[1] * deviations[2] * jnp.sqrt(task.y.shape[1] * trace)
    return 0.5 * (task.unexplained + inputs + 2 * mixed * jnp.sum(values) + mixed**2 * hidden)


@validated(finite=("teacher", "covariance"))
def fresh_loss(
    network: LinearNetwork,
    teacher: Float[Array | np.ndarray, "outputs inputs"],
    covariance: Float[Array | np.ndarray, "inputs inputs"] | None = None,
    noise: Noise = NONE,
) -> Float[Array, ""]:
    """Return the expected loss on fresh inputs from N(0, C), with a linear teacher's targets T x.

    tr((G - T) C (G - T)^T) / 2, and the terms of noise in `expected_loss` with S = C + s_x^2 I.

    Args:
        network: Network of two layers.
        teacher: T, for instance `task.best_map`.
        covariance: C, default the identity.
        noise: Standard deviations.
    """
    if len(network.weights) != 2:
        fail("network", "have two layers", len(network.weights))
    target = jnp.asarray(teacher)
    network_map = network.map
    if target.shape != network_map.shape:
        fail("teacher", f"have the shape of the network's map, {network_map.shape}", target.shape)
    if covariance is None:
        moment = jnp.eye(network_map.shape[1], dtype=network_map.dtype)
    else:
        moment = jnp.asarray(covariance)
        if not is_traced(moment):
            check_semidefinite("covariance", np.asarray(moment, float))

    difference = target - network_map
    first, _ = network.weights
    hidden_moment = jnp.sum(product(first, moment) * first)
    clean = 0.5 * jnp.sum(product(difference, moment) * difference)
    return clean + _penalty(network, _checked(noise), jnp.trace(moment), hidden_moment)


@validated(finite=("x", "y"))
def second_readout_loss(
    network: LinearNetwork,
    x: Float[Array | np.ndarray, "samples inputs"],
    y: Float[Array | np.ndarray, "samples others"],
) -> Float[Array, ""]:
    """Return the loss of the best linear readout of the hidden layer on other targets.

    sum |y - P_H y|^2 / (2 samples) with the projection P_H on the span of the hidden activities.

    Args:
        network: Network.
        x: Inputs.
        y: Targets of the second task.
    """
    hidden = network.hidden(jnp.asarray(x))
    # The span does not depend on the neurons' scales.
    hidden = hidden / scale_of(jnp.max(jnp.abs(hidden), 0, keepdims=True))
    vectors, values, _ = jnp.linalg.svd(hidden, full_matrices=False)
    is_spanned = values > rank_cut(hidden) * values[0]
    basis = jnp.where(is_spanned[None], vectors, 0.0)
    targets = jnp.asarray(y)
    residual = targets - product(basis, product(basis.T, targets))
    return 0.5 * jnp.sum(residual**2) / len(targets)
