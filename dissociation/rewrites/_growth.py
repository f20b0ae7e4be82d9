"""Rewrites that widen a group: duplicated neurons, and neurons without effect.

A model that is not the same program with more neurons is rejected; see `rewrites.refitted` for
sizes in module fields.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from dissociation._core.checks import fail
from dissociation._core.conversion import as_examples, to_device
from dissociation._core.types import Natural, NonNegative, PRNGKey, Scalar, Size
from dissociation._core.validation import validated
from dissociation.rewrites._comparison import check_defined, check_resized
from dissociation.rewrites._groups import NeuronGroup, Slot, resized
from dissociation.rewrites._rewrites import Change, Rewrite, changed, current
from dissociation.rewrites._seen import layer_inputs
from dissociation.rewrites._sizes import refit


def copies_of(
    hidden: int, multiplier: float | int, name: str = "duplicate_multiplier"
) -> np.ndarray:
    """Return the original index of each neuron after duplication.

    All neurons are repeated a whole number of times, then the first neurons again.
    """
    multiplier = float(multiplier)
    if not (math.isfinite(multiplier) and multiplier >= 1):
        advice = "Fewer neurons would change the function"
        fail(name, "be finite and at least 1", multiplier, advice)
    num_repeats = math.floor(multiplier)
    num_more = round((multiplier - num_repeats) * hidden)
    return np.arange(num_repeats * hidden + num_more) % hidden


def _duplicated(model: Any, group: NeuronGroup, multiplier: float) -> Any:
    group = current(group, model)
    _check_grows(group, new=False)
    original = copies_of(group.size, multiplier)
    num_copies = np.bincount(original, minlength=group.size)
    exponents: Any = group.sharing

    def divide(index, *_):
        factors = num_copies[original] ** float(exponents[index])
        return eqx.Partial(_multiply, factors)

    return _resized(model, group, original, divide)


def _multiply(factors: Array, slot: Slot, array: Array) -> Array:
    factors = factors.astype(array.dtype)
    factors = factors.reshape(-1, *[1] * array.ndim)
    return slot.with_blocks(array, slot.blocks(array) * factors)


@validated
def duplicate(group: NeuronGroup, multiplier: float | int = 2.0) -> Rewrite:
    """Return the rewrite that duplicates the neurons of a group.

    Outgoing weights are divided among the copies. Copies are appended as whole groups, for a
    fractional multiplier also of the first neurons alone.

    Args:
        group: Group of the model.
        multiplier: Factor of the number of neurons, at least 1; static, as it sets shapes.

    Raises:
        TypeError: If `multiplier` is traced or, on application, the model has the number of neurons
            in its code.
        ValueError: If the group cannot be widened, or `multiplier` is below 1.
    """
    _check_grows(group, new=False)
    # A wrong multiplier raises here and not when the rewrite is applied.
    copies_of(group.size, multiplier, "multiplier")
    return Rewrite(_duplicated, (group, float(multiplier)), ())


def _check_grows(group: NeuronGroup, neurons_per_group: int = 1, *, new: bool = True) -> None:
    sharing = group.sharing
    if sharing is None:
        reason = "no product is summed over its neurons"
        if group.normalised:
            reason = "a statistic is taken over its neurons"
        fail("group", "be a group that can be widened", f"{group.name}: {reason}")
    is_in_range = np.all((sharing >= -1) & (sharing <= 0))
    if new and not (is_in_range and sharing.min() < 0):
        fail("group", "have neurons without effect if their outgoing weights are zero", group.name)
    if neurons_per_group > 1 and not group.cancelling:
        wanted_size = f"be 1 for {group.name}, whose outgoing weights do more than multiply and sum"
        fail("neurons_per_group", wanted_size, neurons_per_group)


def _resized(
    model: Any, group: NeuronGroup, original: np.ndarray, change: Callable[..., Change]
) -> Any:
    """Return the model with neurons `original` in a group.

    Every slot is then changed by `change(index, slot, axis length)`.
    """
    (wider,), sources = resized([group], [original])
    slot_of_axis = {(slot.leaf, slot.axis): slot for slot in wider.slots}
    changes: list[tuple[Slot, Change]] = []
    for axis, slot in slot_of_axis.items():
        changes.append((slot, eqx.Partial(_taken, sources[axis])))
    # Outgoing weights come last, so that new neurons have no effect on each other either.
    order = sorted(range(len(wider.slots)), key=lambda index: wider.slots[index].outgoing)
    for index in order:
        slot = wider.slots[index]
        length = len(sources[slot.leaf, slot.axis])
        changes.append((slot, change(index, slot, length)))
    grown = changed(model, changes)

    # The shape of a grouped convolution does not distinguish wider groups from more groups: try
    # both.
    with_wider_groups = refit(grown, more_groups=False)
    with_more_groups = refit(grown, more_groups=True)
    try:
        check_resized(model, with_wider_groups, group, [wider])
    except (TypeError, ValueError):
        if jax.tree.structure(with_wider_groups) == jax.tree.structure(with_more_groups):
            raise
        check_resized(model, with_more_groups, group, [wider])
        return with_more_groups
    return with_wider_groups


def _taken(indices: Array, slot: Slot, array: Array) -> Array:
    return jnp.take(array, indices, axis=slot.axis)


def cancelling(normal: Array, std: Any, axis: int) -> Array:
    """Return draws of N(0, std^2) that add up to zero along an axis, from draws of N(0, 1)."""
    size = normal.shape[axis]
    centred = normal - jnp.mean(normal, axis=axis, keepdims=True)
    # Subtracting the mean lowers the variance by (size - 1) / size; the square root restores it.
    correction = (size / (size - 1)) ** 0.5
    return jnp.asarray(std, normal.dtype) * correction * centred


def _drawn(
    num_groups: int,
    size: int,
    present: Array,
    incoming_std: Array,
    outgoing_std: Array | None,
    key: PRNGKey,
    slot: Slot,
    array: Array,
) -> Array:
    """Return an array with drawn weights of the last neurons, in sets of `size` that cancel.

    `present` are indices along the axis that are not of new neurons.
    """
    num_present = len(slot.positions) - num_groups * size
    new = slot._replace(positions=slot.positions[num_present:])
    if slot.outgoing and size == 1:
        return new.with_blocks(array, 0.0)
    shape = new.blocks(array).shape[1:]
    weights = jnp.moveaxis(array, slot.axis, 0)
    weights = weights[present]
    if slot.outgoing:  # they add up to zero in each set
        if outgoing_std is None:
            outgoing_std = jnp.sqrt(jnp.mean(weights**2))
        normal = jax.random.normal(key, (num_groups, size, *shape), array.dtype)
        blocks = cancelling(normal, outgoing_std, axis=1)
        blocks = blocks.reshape(num_groups * size, *shape)
        return new.with_blocks(array, blocks)
    # A number per neuron, such as a variance, may have to be like those of others.
    if array.size == array.shape[slot.axis]:
        pick = jax.random.randint(key, (num_groups,), 0, num_present)
        blocks = slot.blocks(array)[pick]
    else:
        normal = jax.random.normal(key, (num_groups, *shape), array.dtype)
        # If all entries are positive, the program may need them so, as under a square root.
        is_positive = jnp.all(weights > 0)
        normal = jnp.where(is_positive, jnp.abs(normal), normal)
        blocks = jnp.asarray(incoming_std, array.dtype) * normal
    group_of_neuron = np.repeat(np.arange(num_groups), size)
    return new.with_blocks(array, blocks[group_of_neuron])


@eqx.filter_jit
def _slot_keys(key: PRNGKey, is_outgoing: tuple[bool, ...]) -> list[PRNGKey]:
    """Return a key for each slot, from one key for incoming and one for outgoing slots."""
    keys = [key] * len(is_outgoing)
    side_keys = jax.random.split(key)
    for side_key, side in zip(side_keys, (False, True), strict=True):
        indices = [index for index, outgoing in enumerate(is_outgoing) if outgoing == side]
        slot_keys = [side_key]
        if len(indices) > 1:
            slot_keys = jax.random.split(side_key, len(indices))
        for index, slot_key in zip(indices, slot_keys, strict=False):
            keys[index] = slot_key
    return keys


def _with_nuisance(
    model: Any,
    group: NeuronGroup,
    num_groups: int,
    size: int,
    key: PRNGKey,
    incoming_std: Scalar,
    outgoing_std: Scalar | None,
) -> Any:
    """Append `num_groups` sets of `size` neurons to a group."""
    group = current(group, model)
    _check_grows(group, size)
    count = num_groups * size
    if count == 0:
        return model
    original = np.concatenate([np.arange(group.size), np.zeros(count, int)])
    is_outgoing = tuple(slot.outgoing for slot in group.slots)
    keys = _slot_keys(key, is_outgoing)
    incoming_std = to_device(incoming_std, float)
    if outgoing_std is not None:
        outgoing_std = to_device(outgoing_std, float)

    def draw(index, slot, length):
        new_positions = slot.positions[group.size :]
        present = np.setdiff1d(np.arange(length), new_positions)
        return eqx.Partial(
            _drawn, num_groups, size, present, incoming_std, outgoing_std, keys[index]
        )

    grown = _resized(model, group, original, draw)
    # Outgoing weights of zero do not silence neurons that are NaN.
    check_defined(model, grown, group)
    return grown


@validated
def add_nuisance(
    group: NeuronGroup,
    num_groups: Natural = 3,
    neurons_per_group: Size = 1,
    *,
    key: PRNGKey,
    incoming_std: NonNegative = 1.0,
    outgoing_std: NonNegative | None = None,
) -> Rewrite:
    """Return the rewrite that appends random neurons without effect, in sets that cancel.

    Neurons of one set share incoming weights. Matrices and kernels are draws of N(0,
    incoming_std^2), in magnitude if all present entries are positive. Biases, gains and variances
    are copied from a random present neuron. Outgoing weights of a set add up to zero; see
    `fig4.expand.add_random_zero_neurons`.

    Args:
        group: Group of the model.
        num_groups: Number of sets, 0 or more.
        neurons_per_group: Neurons of each set, 1 or more.
        key: A PRNG key.
        incoming_std: Standard deviation of incoming weights; may be traced.
        outgoing_std: Standard deviation of outgoing weights of larger sets; None is the root mean
            square of present ones.

    Raises:
        TypeError: If, on application, the model has the number of neurons in its code.
        ValueError: If the group cannot be widened, an option is out of range or, on application,
            new neurons are not finite, as behind a logarithm.
    """
    _check_grows(group, neurons_per_group)
    static = (group, num_groups, neurons_per_group)
    return Rewrite(_with_nuisance, static, (key, incoming_std, outgoing_std))


def _with_phantom(model: Any, group: NeuronGroup, matrix: Array, bias: Array | None) -> Any:
    """Append neurons with incoming weights [new, features] and biases [new] to a group."""
    group = current(group, model)
    _check_grows(group)
    num_new = len(matrix)
    original = np.concatenate([np.arange(group.size), np.zeros(num_new, int)])

    def write(_, slot, __):
        if slot.outgoing:
            return eqx.Partial(_written, np.zeros(num_new, np.float32))
        if len(slot.shape) == 1:
            return eqx.Partial(_written, bias)
        return eqx.Partial(_written, matrix)

    return _resized(model, group, original, write)


def _written(weights: Array, slot: Slot, array: Array) -> Array:
    """Return an array with other weights of the last neurons, a row for each, or one number."""
    num_new = len(weights)
    new = slot._replace(positions=slot.positions[-num_new:])
    axes = [1] * (array.ndim - weights.ndim)
    blocks = weights.reshape(num_new, 1, *axes, *weights.shape[1:])
    return new.with_blocks(array, blocks.astype(array.dtype))


@validated(finite=("pattern",))
def add_phantom(
    group: NeuronGroup,
    model: Any,
    inputs: Any,
    pattern: Float[Array | np.ndarray, "vectors new"],
    *,
    rtol: NonNegative | None = None,
) -> Rewrite:
    """Return the rewrite that appends neurons without effect that show a pattern.

    The pattern is that of their preactivations on given inputs.

    Args:
        group: Group of the model, with one incoming matrix and at most one bias.
        model: The model.
        inputs: Examples, see `rewrites.layer_inputs`.
        pattern: Preactivations, one row per layer input and one column per new neuron.
        rtol: See `fig4.expand.add_phantom_zero_neurons`.

    Raises:
        TypeError: If, on application, the model has the number of neurons in its code.
        ValueError: If the group cannot be widened, has other incoming weights, or `pattern` has
            another number of rows.
    """
    _check_grows(group)
    rows = incoming(group, model, inputs)
    if len(rows) != len(pattern):
        wanted_rows = f"have a row for every input vector of {group.name} ({len(rows)})"
        fail("pattern", wanted_rows, len(pattern))
    target = to_device(pattern, rows.dtype)
    weights = least_squares(rows, target, rtol)
    _, bias = made_by(group)
    arrays = _split_bias(weights, bias is not None)
    return Rewrite(_with_phantom, (group,), arrays)


@partial(jax.jit, static_argnums=1)
def _split_bias(weights: Array, has_bias: bool) -> tuple[Array, Array | None]:
    """Return incoming weights [new, features], and biases [new] from the last row of `weights`."""
    if not has_bias:
        return weights.T, None
    return weights[:-1].T, weights[-1]


def incoming(group: NeuronGroup, model: Any, inputs: Any) -> Array:
    """Return the inputs of a group's incoming weights, [vectors, features].

    With a bias, the last column is ones.
    """
    matrix, bias = made_by(group)
    inputs = as_examples("inputs", inputs, finite=True)
    rows = layer_inputs(model, inputs, matrix.path, call=group.call).rows
    return _with_ones(rows, bias is not None)


@partial(jax.jit, static_argnums=1)
def _with_ones(rows: Array, has_bias: bool) -> Array:
    dtype = jnp.promote_types(rows.dtype, jnp.float32)  # also of integers and halves
    ones = jnp.ones((len(rows), has_bias), dtype)
    return jnp.concatenate([rows.astype(dtype), ones], 1)


def made_by(group: NeuronGroup) -> tuple[Slot, Slot | None]:
    """Return the incoming matrix of a group and its bias; raise if there are other such weights."""
    slots = [slot for slot in group.slots if not slot.outgoing]
    matrices = [slot for slot in slots if len(slot.shape) == 2]
    biases = [slot for slot in slots if len(slot.shape) == 1]
    has_matrix = len(matrices) == 1 and matrices[0].positions.shape[1] == 1
    if not has_matrix or len(biases) > 1 or len(slots) > 2:
        fail("group", "be made by one matrix, and a bias or none", group)
    if not biases:
        return matrices[0], None
    return matrices[0], biases[0]


def least_squares(a: Array, b: Array, rtol: ArrayLike | None) -> Array:
    """Return the smallest x that minimises |a x - b|.

    Its derivative is that of Golub and Pereyra (1973), at constant rank.
    """
    if rtol is None:
        # The usual cut-off, epsilon times the larger side, blurs: a uniform [0, 1] pattern on 512
        # MNIST test images is missed by up to 0.34 with it, by 2e-5 with this one, which still
        # drops the rounding noise of low-rank inputs.
        eps = float(jnp.finfo(a.dtype).eps)
        rtol = eps * math.sqrt(max(a.shape))
    return _least_squares(a, b, rtol)


@jax.jit
def _least_squares(a: Array, b: Array, rtol: ArrayLike) -> Array:
    # The derivative of the pseudo-inverse needs no derivative of singular vectors, which equal
    # singular values make NaN.
    step = a - jax.lax.stop_gradient(a)  # zero, with a derivative
    a = jax.lax.stop_gradient(a)
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    cutoff = jnp.asarray(rtol, a.dtype) * s[0]
    is_kept = (s > 0) & (s >= cutoff)
    inverse = jnp.where(is_kept, 1 / jnp.where(is_kept, s, 1), 0)
    inverse = inverse[:, None]
    times = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    x = jnp.zeros((a.shape[1], b.shape[1]), a.dtype)
    # The first round solves. The others remove most of the rounding error, which the condition
    # number magnifies.
    for _ in range(3):
        residual = b - times(a, x)
        x = x + times(vt.T, inverse * times(u.T, residual))

    # dx = -a^+ da x + a^+ (a^+)^T da^T (b - a x) + (1 - a^+ a) da^T (a^+)^T x
    solution = jax.lax.stop_gradient(x)
    residual = jax.lax.stop_gradient(b) - times(a, solution)
    missed = times(step.T, residual)
    within = inverse * (inverse * times(vt, missed) - times(u.T, times(step, solution)))
    across = times(step.T, times(u, inverse * times(vt, solution)))
    rows = vt * is_kept[:, None]
    return x + times(vt.T, within) + across - times(rows.T, times(rows, across))
