"""Rewrites of one hidden layer, as a pair of matrices, that keep its function.

The layer is `w_out @ activation(w_in @ x)`. The notebook of the paper imports the rewrites from
here. For a bias, append a column to `w_in` and an input that is always 1.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from dissociation._core.checks import check_positive
from dissociation._core.types import Natural, NonNegative, PRNGKey, Size
from dissociation._core.validation import validated
from dissociation.rewrites._growth import cancelling, copies_of, least_squares

__all__ = [
    "add_phantom_zero_neurons",
    "add_random_zero_neurons",
    "duplicate_neurons",
    "scale_neurons",
]

Pair = tuple[Float[Array, "new_hidden inputs"], Float[Array, "outputs new_hidden"]]


@validated
def scale_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    scale_factor: Real[ArrayLike, ""] | Real[Array | np.ndarray, " hidden"] = 0.1,
) -> Pair:
    """Multiply incoming weights of hidden neurons by a > 0, and divide outgoing weights by a.

    The function does not change if the activation is positively homogeneous, f(a x) = a f(x): ReLU,
    leaky ReLU, identity, but not tanh, GELU or softplus.

    Args:
        w_in: Incoming weights.
        w_out: Outgoing weights.
        scale_factor: a, positive, a scalar or [hidden]. May be traced.

    Returns:
        `(w_in, w_out)`, of the given shapes; NaN for neurons whose traced factor is not positive
        and finite.

    Raises:
        ValueError: If the shapes do not fit or a concrete `scale_factor` is not positive and
            finite.

    References:
        Dinh et al. (2017), Sharp minima can generalize for deep nets, section 3.
        Neyshabur, Salakhutdinov and Srebro (2015), Path-SGD, section 2.
    """
    w_in = jnp.asarray(w_in)
    w_out = jnp.asarray(w_out)
    check_positive("scale_factor", scale_factor)
    factor = jnp.asarray(scale_factor, w_in.dtype)
    # A traced factor cannot be checked: NaN makes a wrong one visible.
    is_valid = (factor > 0) & jnp.isfinite(factor)
    factor = jnp.where(is_valid, factor, jnp.nan)
    factor = jnp.broadcast_to(factor, w_in.shape[:1])
    return w_in * factor[:, None], w_out / factor[None, :]


@validated
def duplicate_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    duplicate_multiplier: float | int = 1.2,
) -> Pair:
    """Duplicate hidden neurons and divide the outgoing weights of each equally among its copies.

    With multiplier m every neuron occurs floor(m) times, and the first round((m - floor(m)) hidden)
    once more. Row i of the result is neuron i mod hidden. The function does not change, for any
    activation.

    Args:
        w_in: Incoming weights.
        w_out: Outgoing weights.
        duplicate_multiplier: m >= 1, static, as it sets shapes. Python's `round` takes halves to
            the even number.

    Raises:
        TypeError: If `duplicate_multiplier` is traced or not a real number.
        ValueError: If the shapes do not fit or `duplicate_multiplier` is below 1 or not finite.

    References:
        Simsek et al. (2021), Geometry of the loss landscape in overparameterized neural networks,
        section 3.
    """
    w_in = jnp.asarray(w_in)
    w_out = jnp.asarray(w_out)
    hidden = w_in.shape[0]
    original = copies_of(hidden, duplicate_multiplier)
    num_copies = np.bincount(original, minlength=hidden)[original]
    divisors = jnp.asarray(num_copies, w_out.dtype)
    return w_in[original], w_out[:, original] / divisors[None, :]


@validated
def add_random_zero_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    num_zero_groups: Natural = 3,
    neurons_per_group: Size = 4,
    *,
    key: PRNGKey,
    incoming_std: NonNegative = 1.0,
    outgoing_std: NonNegative | None = None,
) -> Pair:
    """Append groups of neurons with equal incoming weights, whose outgoing weights add up to zero.

    Incoming weights are draws of N(0, incoming_std^2). Outgoing weights of a group of one are zero,
    of g neurons they are draws of N(0, outgoing_std^2) less their mean, times sqrt(g / (g - 1)).
    New neurons come last, by group. The function does not change, for any activation, up to
    rounding.

    Args:
        w_in: Incoming weights.
        w_out: Outgoing weights.
        num_zero_groups: Number of groups, 0 or more.
        neurons_per_group: Neurons of each group, 1 or more.
        key: A PRNG key.
        incoming_std: Standard deviation of incoming weights; 1 as published, which is large for a
            trained layer.
        outgoing_std: Standard deviation of outgoing weights in groups of two or more; None is the
            root mean square of `w_out`.

    Raises:
        TypeError: If a count is not a Python integer.
        ValueError: If the shapes do not fit, or a count or a standard deviation is out of range.

    References:
        Simsek et al. (2021), Geometry of the loss landscape in overparameterized neural networks,
        section 3 (zero-type
            neurons).
    """
    w_in = jnp.asarray(w_in)
    w_out = jnp.asarray(w_out)
    key_in, key_out = jax.random.split(key)

    incoming_draws = jax.random.normal(key_in, (num_zero_groups, w_in.shape[1]), w_in.dtype)
    incoming = jnp.asarray(incoming_std, w_in.dtype) * incoming_draws
    new_in = jnp.repeat(incoming, neurons_per_group, axis=0)

    outputs = w_out.shape[0]
    if neurons_per_group == 1:
        new_out = jnp.zeros((outputs, num_zero_groups), w_out.dtype)
    else:
        if outgoing_std is None:
            outgoing_std = jnp.sqrt(jnp.mean(w_out**2))
        shape = (outputs, num_zero_groups, neurons_per_group)
        outgoing_draws = jax.random.normal(key_out, shape, w_out.dtype)
        new_out = cancelling(outgoing_draws, outgoing_std, axis=-1)
        new_out = new_out.reshape(outputs, num_zero_groups * neurons_per_group)
    return jnp.concatenate([w_in, new_in]), jnp.concatenate([w_out, new_out], axis=1)


@validated(finite=("inputs", "pattern"), empty=("pattern",))
def add_phantom_zero_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    inputs: Float[Array | np.ndarray, "batch inputs"],
    pattern: Float[Array | np.ndarray, "batch new"],
    *,
    rtol: NonNegative | None = None,
) -> Pair:
    """Append neurons without effect whose preactivations on given inputs show a given pattern.

    The new incoming weights W solve min |inputs W^T - pattern|^2 with the smallest |W|. The new
    outgoing weights are zero, so the function does not change. Linearly independent inputs attain
    any pattern, other inputs its projection on their span. Nearly dependent inputs need large
    weights.

    Args:
        w_in: Incoming weights.
        w_out: Outgoing weights.
        inputs: Layer inputs, constants for derivatives.
        pattern: Preactivations, one column per new neuron.
        rtol: Relative cut-off of singular values of `inputs`; larger values give smaller weights
            and a coarser pattern. None is the machine epsilon times the square root of the larger
            side.

    Raises:
        ValueError: If the shapes do not fit, or concrete `inputs` or `pattern` are not finite.
    """
    w_in = jnp.asarray(w_in)
    w_out = jnp.asarray(w_out)
    inputs = jnp.asarray(inputs, w_in.dtype)
    pattern = jnp.asarray(pattern, w_in.dtype)
    incoming = least_squares(inputs, pattern, rtol).T
    outgoing = jnp.zeros((w_out.shape[0], incoming.shape[0]), w_out.dtype)
    return jnp.concatenate([w_in, incoming]), jnp.concatenate([w_out, outgoing], axis=1)
