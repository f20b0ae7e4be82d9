"""Rewrites of one hidden layer, as a pair of matrices, that leave the function of the layer as it was.

A hidden layer computes `w_out @ activation(w_in @ x)`. A bias is the incoming weight of an input that is always 1:
append it to `w_in` as a column. `dissociation.rewrites` applies the same rewrites to whole models.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Real

from dissociation._core.checks import check_count, check_non_negative, check_positive, fail
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated

Pair = tuple[Float[Array, "new_hidden inputs"], Float[Array, "outputs new_hidden"]]


@validated
def scale_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    scale_factor: Real[ArrayLike, "..."] = 0.1,
) -> Pair:
    """Multiplies the incoming weights of every hidden neuron by a > 0 and divides its outgoing weights by a.

    The function stays as it was where the activation is positively homogeneous, f(a x) = a f(x): ReLU, leaky ReLU,
    identity. With any other (tanh, GELU, softplus) it changes.

    Args:
        w_in: Incoming weights, one row per hidden neuron.
        w_out: Outgoing weights, one column per hidden neuron.
        scale_factor: The factor a, positive: one for all neurons, or a vector [hidden]. May be traced.

    Returns:
        `(w_in, w_out)`, of the shapes given; NaN for neurons whose traced factor is not positive and finite.

    Raises:
        ValueError: If the shapes do not fit or a known `scale_factor` is not positive and finite.

    References:
        Dinh, Pascanu, Bengio and Bengio (2017), Sharp minima can generalize for deep nets, section 3.
        Neyshabur, Salakhutdinov and Srebro (2015), Path-SGD, section 2.
    """
    w_in, w_out = jnp.asarray(w_in), jnp.asarray(w_out)
    check_positive("scale_factor", scale_factor)
    hidden = w_in.shape[0]
    factor = jnp.asarray(scale_factor, w_in.dtype)
    if factor.shape not in ((), (hidden,)):
        fail("scale_factor", f"be one number or one per hidden neuron ({hidden})", f"shape {factor.shape}")
    factor = jnp.broadcast_to(jnp.where((factor > 0) & jnp.isfinite(factor), factor, jnp.nan), (hidden,))
    return w_in * factor[:, None], w_out / factor[None, :]


@validated
def duplicate_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    duplicate_multiplier: float | int = 1.2,
) -> Pair:
    """Repeats hidden neurons and shares the outgoing weights out equally over the copies of each.

    With multiplier m every neuron stands there floor(m) times, and the first round((m - floor(m)) hidden) once more.
    The copies come as whole layers one after another, then the first neurons again: row i of the result is neuron
    i mod hidden. The function stays as it was for every activation.

    Args:
        w_in: Incoming weights, one row per hidden neuron.
        w_out: Outgoing weights, one column per hidden neuron.
        duplicate_multiplier: m >= 1, a plain number: it sets shapes. Python's `round` takes halves to the even number.

    Raises:
        TypeError: If `duplicate_multiplier` is traced or no real number.
        ValueError: If the shapes do not fit or `duplicate_multiplier` is below 1 or not finite.

    References:
        Simsek, Ged, Jacot, Spadaro, Hongler, Gerstner and Brea (2021), Geometry of the loss landscape in
        overparameterized neural networks, section 3.
    """
    w_in, w_out = jnp.asarray(w_in), jnp.asarray(w_out)
    hidden = w_in.shape[0]
    original = copies_of(hidden, duplicate_multiplier)
    copies = np.bincount(original, minlength=hidden)
    return w_in[original], w_out[:, original] / jnp.asarray(copies[original], w_out.dtype)[None, :]


def copies_of(hidden: int, multiplier: float | int, name: str = "duplicate_multiplier") -> np.ndarray:
    """Which neuron each of the duplicated ones is: whole layers one after another, then the first neurons again."""
    multiplier = float(multiplier)
    if not (math.isfinite(multiplier) and multiplier >= 1):
        fail(name, "be finite and at least 1", multiplier, "Fewer neurons would change the function")
    whole = math.floor(multiplier)
    return np.arange(whole * hidden + round((multiplier - whole) * hidden)) % hidden


@validated
def add_random_zero_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    num_zero_groups: int = 3,
    neurons_per_group: int = 4,
    *,
    key: PRNGKey,
    incoming_std: Scalar = 1.0,
    outgoing_std: Scalar | None = None,
) -> Pair:
    """Appends groups of neurons that cancel out: the neurons of a group share their incoming weights.

    Every group draws its incoming weights afresh from N(0, incoming_std^2). A group of one has outgoing weights zero.
    In a larger group, of g neurons, they are draws of N(0, outgoing_std^2) less their mean over the group, times
    sqrt(g / (g - 1)) so that each keeps that standard deviation: their sum is zero up to rounding. The new neurons come
    last, group by group. The function stays as it was for every activation.

    Args:
        w_in: Incoming weights, one row per hidden neuron.
        w_out: Outgoing weights, one column per hidden neuron.
        num_zero_groups: How many groups, 0 or more.
        neurons_per_group: How many neurons in each, 1 or more.
        key: A PRNG key of either kind.
        incoming_std: Standard deviation of the incoming weights; 1 as published, which is large beside those of a
            trained layer: it is what parameter noise meets in the new neurons.
        outgoing_std: Standard deviation of the outgoing weights of cancelling groups; None is the root mean square of
            `w_out`.

    Raises:
        TypeError: If a count is not a Python integer.
        ValueError: If the shapes do not fit, or a count or a standard deviation is out of range.

    References:
        Simsek, Ged, Jacot, Spadaro, Hongler, Gerstner and Brea (2021), Geometry of the loss landscape in
        overparameterized neural networks, section 3 (zero-type neurons).
    """
    w_in, w_out = jnp.asarray(w_in), jnp.asarray(w_out)
    groups = check_count("num_zero_groups", num_zero_groups)
    size = check_count("neurons_per_group", neurons_per_group, minimum=1)
    check_non_negative("incoming_std", incoming_std)
    key_in, key_out = jax.random.split(key)

    incoming = jnp.asarray(incoming_std, w_in.dtype) * jax.random.normal(key_in, (groups, w_in.shape[1]), w_in.dtype)
    new_in = jnp.repeat(incoming, size, axis=0)
    if size == 1:
        new_out = jnp.zeros((w_out.shape[0], groups), w_out.dtype)
    else:
        if outgoing_std is None:
            outgoing_std = jnp.sqrt(jnp.mean(w_out**2))
        check_non_negative("outgoing_std", outgoing_std)
        draws = jax.random.normal(key_out, (w_out.shape[0], groups, size), w_out.dtype)
        centred = (draws - jnp.mean(draws, axis=-1, keepdims=True)) * math.sqrt(size / (size - 1))
        new_out = (jnp.asarray(outgoing_std, w_out.dtype) * centred).reshape(w_out.shape[0], groups * size)
    return jnp.concatenate([w_in, new_in]), jnp.concatenate([w_out, new_out], axis=1)


@validated(finite=("inputs", "pattern"), empty=("pattern",))
def add_phantom_zero_neurons(
    w_in: Float[Array | np.ndarray, "hidden inputs"],
    w_out: Float[Array | np.ndarray, "outputs hidden"],
    inputs: Float[Array | np.ndarray, "batch inputs"],
    pattern: Float[Array | np.ndarray, "batch new"],
    *,
    rtol: Scalar | None = None,
) -> Pair:
    """Appends neurons without effect whose preactivations on given inputs show a given pattern.

    The new incoming weights W solve min |inputs W^T - pattern|^2 with the smallest |W|, through the singular value
    decomposition of `inputs` and two steps of iterative refinement; the new outgoing weights are zero, so the function
    stays as it was for every activation. Where the inputs in the batch are linearly independent, any image is met;
    otherwise its projection on what they span is. Weights grow as the inputs come close to being dependent.

    Args:
        w_in: Incoming weights, one row per hidden neuron.
        w_out: Outgoing weights, one column per hidden neuron.
        inputs: What the layer sees. Derivatives treat them as constants.
        pattern: The preactivations wanted of the new neurons, one column each.
        rtol: Singular values of `inputs` below `rtol` times the largest count as zero. None is the machine epsilon
            times the square root of the larger side of `inputs`. Larger values give smaller weights and a coarser
            image.

    Raises:
        ValueError: If the shapes do not fit, or known `inputs` or `pattern` are not finite.
    """
    w_in, w_out = jnp.asarray(w_in), jnp.asarray(w_out)
    incoming = least_squares(jnp.asarray(inputs, w_in.dtype), jnp.asarray(pattern, w_in.dtype), rtol).T
    outgoing = jnp.zeros((w_out.shape[0], incoming.shape[0]), w_out.dtype)
    return jnp.concatenate([w_in, incoming]), jnp.concatenate([w_out, outgoing], axis=1)


def least_squares(a: Array, b: Array, rtol: ArrayLike | None) -> Array:
    """The smallest x that minimises |a x - b|, refined twice; differentiable where the rank of a stays.

    The pseudo-inverse's derivative is that of Golub and Pereyra (1973), without one of the singular vectors.
    """
    if min(a.shape) == 0:
        return jnp.zeros((a.shape[1], b.shape[1]), a.dtype)
    if rtol is None:
        # The usual cut-off, epsilon times the larger side, blurs: a uniform [0, 1] pattern on 512 MNIST test images is
        # missed by up to 0.34 with it, by 2e-5 with this one, which still drops the rounding noise of low-rank inputs.
        rtol = float(jnp.finfo(a.dtype).eps) * math.sqrt(max(a.shape))
    check_non_negative("rtol", rtol)
    step = a - jax.lax.stop_gradient(a)  # zero, but for its derivative
    a = jax.lax.stop_gradient(a)
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    kept = (s > 0) & (s >= jnp.asarray(rtol, a.dtype) * s[0])
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)

    def times(left: Array, right: Array) -> Array:
        return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)

    x = jnp.zeros((a.shape[1], b.shape[1]), a.dtype)
    # The first round solves; each of the others removes most of the rounding error that the last one left, which the
    # condition number magnifies.
    for _ in range(3):
        x = x + times(vt.T, inverse[:, None] * times(u.T, b - times(a, x)))
    here = jax.lax.stop_gradient(x)
    # dx = -a^+ da x + a^+ (a^+)^T da^T (b - a x) + (1 - a^+ a) da^T (a^+)^T x
    missed = times(step.T, jax.lax.stop_gradient(b) - times(a, here))
    within = inverse[:, None] * (inverse[:, None] * times(vt, missed) - times(u.T, times(step, here)))
    across = times(step.T, times(u, inverse[:, None] * times(vt, here)))
    kept_rows = vt * kept[:, None]
    return x + times(vt.T, within) + across - times(kept_rows.T, times(kept_rows, across))
