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
    """Return the original index of each neuron after duplication: whole layers, then the first neurons again."""
    multiplier = float(multiplier)
    if not (math.isfinite(multiplier) and multiplier >= 1):
        fail(
            name, "be finite and at least 1", multiplier, "Fewer neurons would change the function"
        )
    whole = math.floor(multiplier)
    return np.arange(whole * hidden + round((multiplier - whole) * hidden)) % hidden


def _duplicated(model: Any, group: NeuronGroup, multiplier: float) -> Any:
    group = current(group, model)
    _check_grows(group, new=False)
    original = copies_of(group.size, multiplier)
    copies = np.bincount(original, minlength=group.size)[original]
    exponents: Any = group.sharing

    def divide(index: int, *_: Any) -> Change:
        return eqx.Partial(_multiply, copies ** float(exponents[index]))

    return _resized(model, group, original, divide)


def _multiply(factors: Array, slot: Slot, array: Array) -> Array:
    factors = factors.astype(array.dtype).reshape(-1, *[1] * array.ndim)
    return slot.with_blocks(array, slot.blocks(array) * factors)


@validated
def duplicate(group: NeuronGroup, multiplier: float | int = 2.0) -> Rewrite:
    """Return the rewrite that duplicates the neurons of a group and divides their outgoing weights among the copies.

    Copies are appended as whole groups, for a fractional multiplier also of the first neurons
    alone.

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
    if group.sharing is None:
        why = (
            "a statistic is taken over its neurons"
            if group.normalised
            else "no product is summed over its neurons"
        )
        fail("group", "be a group that can be widened", f"{group.name}: {why}")
    if new and not (
        group.sharing.min() < 0 and np.all((group.sharing >= -1) & (group.sharing <= 0))
    ):
        fail("group", "have neurons without effect if their outgoing weights are zero", group.name)
    if neurons_per_group > 1 and not group.cancelling:
        wanted = f"be 1 for {group.name}, whose outgoing weights do more than multiply and sum"
        fail("neurons_per_group", wanted, neurons_per_group)


def _resized(
    model: Any, group: NeuronGroup, original: np.ndarray, change: Callable[..., Change]
) -> Any:
    """Return the model with neurons `original` in a group, after `change(index, slot, axis length)` of each slot."""
    (wider,), sources = resized([group], [original])
    # Outgoing weights come last, so that new neurons have no effect on each other either.
    order = sorted(range(len(wider.slots)), key=lambda index: wider.slots[index].outgoing)
    axes = {(slot.leaf, slot.axis): slot for slot in wider.slots}
    changes: list[tuple[Slot, Change]] = []
    for place, slot in axes.items():
        changes.append((slot, eqx.Partial(_taken, sources[place])))
    for index in order:
        slot = wider.slots[index]
        length = len(sources[slot.leaf, slot.axis])
        changes.append((slot, change(index, slot, length)))
    grown = changed(model, changes)
    # The shape of a grouped convolution does not distinguish wider groups from more groups: try
    # both.
    one, other = (refit(grown, more_groups=more) for more in (False, True))
    try:
        check_resized(model, one, group, [wider])
    except (TypeError, ValueError):
        if jax.tree.structure(one) == jax.tree.structure(other):
            raise
        check_resized(model, other, group, [wider])
        return other
    return one


def _taken(indices: Array, slot: Slot, array: Array) -> Array:
    return jnp.take(array, indices, axis=slot.axis)


def cancelling(normal: Array, std: Any, axis: int) -> Array:
    """Return draws of N(0, std^2) from standard normal numbers, which add up to zero along an axis."""
    size = normal.shape[axis]
    centred = normal - jnp.mean(normal, axis=axis, keepdims=True)
    # Subtracting the mean lowers the variance by (size - 1) / size; the square root restores it.
    return jnp.asarray(std, normal.dtype) * (size / (size - 1)) ** 0.5 * centred


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
    shape = new.blocks(array).shape[1:]
    weights = jnp.moveaxis(array, slot.axis, 0)[present]
    group_of = np.repeat(np.arange(num_groups), size)
    if slot.outgoing and size == 1:
        values = 0.0
    elif slot.outgoing:  # they add up to zero in each set
        std = jnp.sqrt(jnp.mean(weights**2)) if outgoing_std is None else outgoing_std
        normal = jax.random.normal(key, (num_groups, size, *shape), array.dtype)
        values = cancelling(normal, std, axis=1).reshape(num_groups * size, *shape)
    # A number per neuron, such as a variance, may have to be like those of others.
    elif array.size == array.shape[slot.axis]:
        pick = jax.random.randint(key, (num_groups,), 0, num_present)
        values = slot.blocks(array)[pick][group_of]
    else:
        normal = jax.random.normal(key, (num_groups, *shape), array.dtype)
        # If all entries are positive, the program may need them so, as under a square root.
        normal = jnp.where(jnp.all(weights > 0), jnp.abs(normal), normal)
        values = (jnp.asarray(incoming_std, array.dtype) * normal)[group_of]
    return new.with_blocks(array, values)


@eqx.filter_jit
def _slot_keys(key: PRNGKey, is_outgoing: tuple[bool, ...]) -> list[PRNGKey]:
    """Return a key for each slot, from one key for incoming and one for outgoing slots."""
    keys: dict[int, PRNGKey] = {}
    for side_key, side in zip(jax.random.split(key), (False, True), strict=True):
        indices = [index for index, outgoing in enumerate(is_outgoing) if outgoing == side]
        slot_keys = [side_key] if len(indices) < 2 else jax.random.split(side_key, len(indices))
        keys |= dict(zip(indices, slot_keys, strict=False))
    return [keys[index] for index in range(len(is_outgoing))]


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
    keys = _slot_keys(key, tuple(slot.outgoing for slot in group.slots))
    incoming = to_device(incoming_std, float)
    outgoing = None if outgoing_std is None else to_device(outgoing_std, float)

    def draw(index: int, slot: Slot, length: int) -> Change:
        present = np.setdiff1d(np.arange(length), slot.positions[group.size :])
        return eqx.Partial(_drawn, num_groups, size, present, incoming, outgoing, keys[index])

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
    """Return the rewrite that appends random neurons without effect to a group, in sets that cancel.

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
    return Rewrite(
        _with_nuisance, (group, num_groups, neurons_per_group), (key, incoming_std, outgoing_std)
    )


def _with_phantom(model: Any, group: NeuronGroup, incoming: Array, bias: Array | None) -> Any:
    """Append neurons with incoming weights [new, features] and biases [new] to a group."""
    group = current(group, model)
    _check_grows(group)
    original = np.concatenate([np.arange(group.size), np.zeros(len(incoming), int)])

    def write(_: int, slot: Slot, __: int) -> Change:
        if slot.outgoing:
            return eqx.Partial(_written, np.zeros(len(incoming), np.float32))
        return eqx.Partial(_written, bias if len(slot.shape) == 1 else incoming)

    return _resized(model, group, original, write)


def _written(weights: Array, slot: Slot, array: Array) -> Array:
    """Return an array with other weights of the last neurons, a row for each, or one number."""
    new = slot._replace(positions=slot.positions[-len(weights) :])
    blocks = weights.reshape(
        len(weights), 1, *[1] * (array.ndim - weights.ndim), *weights.shape[1:]
    )
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
    """Return the rewrite that appends neurons without effect whose preactivations on given inputs show a pattern.

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
        fail(
            "pattern",
            f"have a row for every input vector of {group.name} ({len(rows)})",
            len(pattern),
        )
    weights = least_squares(rows, to_device(pattern, rows.dtype), rtol)
    return Rewrite(_with_phantom, (group,), _split_bias(weights, made_by(group)[1] is not None))


@partial(jax.jit, static_argnums=1)
def _split_bias(weights: Array, has_bias: bool) -> tuple[Array, Array | None]:
    """Return incoming weights [new, features], and biases [new] from the last row of `weights` [features, new]."""
    if not has_bias:
        return weights.T, None
    return weights[:-1].T, weights[-1]


def incoming(group: NeuronGroup, model: Any, inputs: Any) -> Array:
    """Return what a group's incoming weights multiply, [vectors, features], with a last column of ones for a bias."""
    matrix, bias = made_by(group)
    rows = layer_inputs(
        model, as_examples("inputs", inputs, finite=True), matrix.path, call=group.call
    ).rows
    return _with_ones(rows, bias is not None)


@partial(jax.jit, static_argnums=1)
def _with_ones(rows: Array, has_bias: bool) -> Array:
    rows = rows.astype(jnp.promote_types(rows.dtype, jnp.float32))  # also of integers and halves
    return jnp.concatenate([rows, jnp.ones((len(rows), has_bias), rows.dtype)], 1)


def made_by(group: NeuronGroup) -> tuple[Slot, Slot | None]:
    """Return the incoming matrix of a group and its bias, or raise if it has other incoming weights."""
    made = [slot for slot in group.slots if not slot.outgoing]
    matrices = [slot for slot in made if len(slot.shape) == 2]
    biases = [slot for slot in made if len(slot.shape) == 1]
    if (
        len(matrices) != 1
        or len(biases) > 1
        or len(made) > 2
        or matrices[0].positions.shape[1] != 1
    ):
        fail("group", "be made by one matrix, and a bias or none", group)
    return matrices[0], biases[0] if biases else None


def least_squares(a: Array, b: Array, rtol: ArrayLike | None) -> Array:
    """Return the smallest x that minimises |a x - b|; derivative by Golub and Pereyra (1973), at constant rank."""
    if rtol is None:
        # The usual cut-off, epsilon times the larger side, blurs: a uniform [0, 1] pattern on 512
        # MNIST test images is missed by up to 0.34 with it, by 2e-5 with this one, which still
        # drops the rounding noise of low-rank inputs.
        rtol = float(jnp.finfo(a.dtype).eps) * math.sqrt(max(a.shape))
    return _least_squares(a, b, rtol)


@jax.jit
def _least_squares(a: Array, b: Array, rtol: ArrayLike) -> Array:
    # The derivative of the pseudo-inverse needs no derivative of singular vectors, which equal
    # singular values make NaN.
    step = a - jax.lax.stop_gradient(a)  # zero, with a derivative
    a = jax.lax.stop_gradient(a)
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    kept = (s > 0) & (s >= jnp.asarray(rtol, a.dtype) * s[0])
    inverse = jnp.where(kept, 1 / jnp.where(kept, s, 1), 0)

    def times(left: Array, right: Array) -> Array:
        return jnp.matmul(left, right, precision=jax.lax.Precision.HIGHEST)

    x = jnp.zeros((a.shape[1], b.shape[1]), a.dtype)
    # The first round solves. The others remove most of the rounding error, which the condition
    # number magnifies.
    for _ in range(3):
        x = x + times(vt.T, inverse[:, None] * times(u.T, b - times(a, x)))
    here = jax.lax.stop_gradient(x)
    # dx = -a^+ da x + a^+ (a^+)^T da^T (b - a x) + (1 - a^+ a) da^T (a^+)^T x
    missed = times(step.T, jax.lax.stop_gradient(b) - times(a, here))
    within = inverse[:, None] * (
        inverse[:, None] * times(vt, missed) - times(u.T, times(step, here))
    )
    across = times(step.T, times(u, inverse[:, None] * times(vt, here)))
    kept_rows = vt * kept[:, None]
    return x + times(vt.T, within) + across - times(kept_rows.T, times(kept_rows, across))
