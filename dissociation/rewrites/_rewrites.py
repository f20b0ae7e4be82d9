"""Function-preserving rewrites of any model, applied to groups of neurons.

`scale(group, 20.0)` is a function of one model. `|` and `compose` chain rewrites; `bmap` or
`eqx.filter_vmap` maps them over stacked members.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Real

from dissociation._core.checks import check_positive, fail, fail_kind, is_traced
from dissociation._core.conversion import as_examples, to_device
from dissociation._core.results import printed
from dissociation._core.types import NonNegative, PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.models._program import Call, program_of
from dissociation.rewrites._axes import UNIT
from dissociation.rewrites._certificate import Certificate, compare_programs, trace_exactly
from dissociation.rewrites._groups import (
    NeuronGroup,
    Slot,
    neuron_groups,
    parameters_of,
    structure_of,
)
from dissociation.rewrites._null_spaces import null_spectrum, perturb_in_null_space
from dissociation.rewrites._seen import LayerInputs
from dissociation.training._progress import MeterFactory, open_meter

ONE_STRUCTURE = (
    "A group belongs to models of one structure; map rewrites over stacked members "
    "by `eqx.filter_vmap`"
)


class Rewrite(eqx.Module):
    """A pure function from one model to one model, `function(model, *settings, *arrays)`.

    It computes in the model's precision.
    """

    # Static fields are compiled in; `arrays` may be traced, so that a sweep over factors compiles
    # once.
    function: Callable[..., Any] = eqx.field(static=True)
    settings: tuple[Any, ...] = eqx.field(static=True)
    arrays: tuple[Any, ...]

    def __call__(self, model: Any) -> Any:
        """Return the rewritten model."""
        return self.function(model, *self.settings, *self.arrays)

    def __or__(self, other: "Rewrite") -> "Rewrite":
        return compose([self, other])


@validated
def compose(rewrites: Sequence[Rewrite]) -> Rewrite:
    """Return one rewrite that applies several in order and finds widened groups again."""
    for index, rewrite in enumerate(rewrites):
        if not isinstance(rewrite, Rewrite):
            kind = type(rewrite).__name__
            fail_kind(f"rewrites[{index}]", "be a rewrite, such as `permute` makes", kind)
    return Rewrite(_one_after_another, (), tuple(rewrites))


def _one_after_another(model: Any, *rewrites: Rewrite) -> Any:
    for rewrite in rewrites:
        model = rewrite(model)
    return model


def current(group: NeuronGroup, model: Any) -> NeuronGroup:
    """Return `group` as it is in `model`.

    Find it again if the model differs in more than parameter values.
    """
    shape_of_leaf = dict(enumerate(map(np.shape, parameters_of(model)[0])))
    has_same_shapes = all(shape_of_leaf.get(slot.leaf) == slot.shape for slot in group.slots)
    if has_same_shapes and _same(group.structure, structure_of(model)):
        return group
    for slot in group.slots:
        shape = shape_of_leaf.get(slot.leaf)
        if shape is None or len(shape) != len(slot.shape):
            fail("model", f"have an array {slot.path} of shape {slot.shape}", shape, ONE_STRUCTURE)
    # An earlier rewrite in a chain may have widened the group: its slots are out of date.
    groups = neuron_groups(model, group.example, call=group.call)
    if group.name not in groups or len(groups[group.name].slots) != len(group.slots):
        fail("model", f"have a group {group.name!r}", f"groups {', '.join(map(repr, groups))}")
    return groups[group.name]


def _same(structure: Any, model_structure: Any) -> bool:
    """Test whether two structures are equal; False if their comparison has no single answer."""
    try:
        return bool(structure == model_structure)
    except (TypeError, ValueError):
        return False


Change = Callable[[Slot, Any], Any]


def changed(model: Any, changes: Sequence[tuple[Slot, Change]]) -> Any:
    """Return the model with `change(slot, array)` for the array of each slot, by one program.

    Args:
        model: A model.
        changes: Slots and PyTrees that are called, one after the other, such as `eqx.Partial`.
    """
    leaves, tree, static = parameters_of(model)
    changed_leaves = list(dict.fromkeys(slot.leaf for slot, _ in changes))
    arrays = [to_device(leaves[leaf]) for leaf in changed_leaves]
    local_changes = []
    for slot, change in changes:
        # Without paths, groups of one shape share a program, wherever their arrays are in the
        # model.
        index = changed_leaves.index(slot.leaf)
        slot = slot._replace(path="", leaf=index, layout=UNIT, name=())
        local_changes.append((slot, change))
    for leaf, array in zip(changed_leaves, _change(arrays, local_changes), strict=True):
        leaves[leaf] = array
    return eqx.combine(jax.tree.unflatten(tree, leaves), static)


@eqx.filter_jit
def _change(arrays: list[Array], changes: list[tuple[Slot, Change]]) -> list[Array]:
    for slot, change in changes:
        arrays[slot.leaf] = change(slot, arrays[slot.leaf])
    return arrays


def _each_copy(name: str, value: Any, group: NeuronGroup, rank: int) -> Any:
    """Broadcast an argument for all copies of a group, or for each copy, to [copies, ...]."""
    if value.shape[-1:] != (group.size,):
        entries = f"{group.size} entries on its last axis, one per neuron of {group.name}"
        fail(name, f"have {entries}", value.shape)
    if value.ndim > rank and len(value) != group.copies:
        copies = f"the {group.copies} copies of {group.name}"
        fail(name, f"be one for all, or one for each of {copies}", value.shape)
    shape = (group.copies, *value.shape[-rank:])
    if is_traced(value):
        return jnp.broadcast_to(value, shape)
    return np.broadcast_to(value, shape)


def _permuted(model: Any, group: NeuronGroup, permutation: Array | None, key: Any) -> Any:
    group = current(group, model)
    if permutation is None:
        # Drawn here and not in `permute`, because an earlier rewrite in a chain may widen the
        # group.
        orders = _random_order(key, group.size, group.copies)
    else:
        orders = _each_copy("permutation", permutation, group, 1)
    permuted = eqx.Partial(Slot.permuted, permutations=orders)
    return changed(model, [(slot, permuted) for slot in group.slots])


@partial(jax.jit, static_argnums=(1, 2))
def _random_order(key: PRNGKey, size: int, copies: int) -> Array:
    """Return a random permutation for each copy, [copies, neurons]."""
    identity = jnp.tile(jnp.arange(size), (copies, 1))
    return jax.random.permutation(key, identity, axis=1, independent=copies > 1)


@validated
def permute(
    group: NeuronGroup,
    permutation: Int[Array | np.ndarray, " neurons"]
    | Int[Array | np.ndarray, "copies neurons"]
    | None = None,
    *,
    key: PRNGKey | None = None,
) -> Rewrite:
    """Return the rewrite that permutes the neurons of a group, in all their weights.

    Args:
        group: Group of the model.
        permutation: Neuron `permutation[i]` moves to place i, [neurons] or [copies, neurons].
        key: Key of a random permutation for each copy, drawn when the rewrite is applied.

    Raises:
        ValueError: If `permutation` is not a permutation of the neurons, or not exactly one of
            `permutation` and `key` is given.
    """
    _check_one_given("permutation", permutation, key)
    if permutation is None:
        return Rewrite(_permuted, (group,), (None, key))
    if not is_traced(permutation):
        indices = np.arange(permutation.shape[-1])
        if (np.sort(permutation) != indices).any():
            wanted_entries = f"hold each of 0, ..., {len(indices) - 1} once"
            fail("permutation", wanted_entries, np.asarray(permutation))
    return Rewrite(_permuted, (group,), (to_device(permutation), None))


def _check_one_given(name: str, value: Any, key: Any) -> None:
    if value is None and key is None:
        fail(name, "be given, or `key` to draw it", "neither")
    if value is not None and key is not None:
        fail(name, "be given, or `key` to draw it", "both")


def _scaled(model: Any, group: NeuronGroup, exponents: tuple[float, ...], factor: Array) -> Any:
    group = current(group, model)
    # A group that was found again may have other scalings.
    if np.linalg.matrix_rank(np.vstack([group.scalings, exponents])) > len(group.scalings):
        wanted_group = f"have a group {group.name} with the scalings of the group that was passed"
        fail("model", wanted_group, group)
    factors = factor
    if factor.ndim:
        factors = _each_copy("factor", factor, group, 1)
    leaves, _, _ = parameters_of(model)
    changes = []
    for slot, exponent in zip(group.slots, exponents, strict=True):
        _check_power(factor, exponent, jax.dtypes.canonicalize_dtype(leaves[slot.leaf].dtype))
        if exponent:
            changes.append((slot, eqx.Partial(_multiply, exponent, factors)))
    scaled = changed(model, changes)

    scaled_leaves, _, _ = parameters_of(scaled)
    changed_leaves = list({slot.leaf for slot, _ in changes})
    before = [to_device(leaves[leaf]) for leaf in changed_leaves]
    after = [scaled_leaves[leaf] for leaf in changed_leaves]
    lost = _lost(before, after)
    if is_traced(lost):
        return scaled
    for array, is_lost in zip(after, np.asarray(lost), strict=True):
        if is_lost:
            wanted_weights = f"leave weights that {array.dtype} holds"
            fail("factor", wanted_weights, "weights that vanish or overflow")
    return scaled


def _multiply(exponent: float, factors: Array, slot: Slot, array: Array) -> Array:
    # A traced factor cannot be checked: NaN makes a wrong one visible.
    factors = jnp.where((factors > 0) & jnp.isfinite(factors), factors, jnp.nan)
    if factors.ndim:
        factors = slot.per_neuron(factors)
    power = factors.astype(array.dtype) ** abs(exponent)
    if exponent < 0:
        power = 1 / power
    return slot.with_blocks(array, slot.blocks(array) * power)


@jax.jit
def _lost(before: list[Array], after: list[Array]) -> Array:
    """Return True for each array with entries that changed to vanish or overflow."""
    lost = []
    for old, new in zip(before, after, strict=True):
        limits = jnp.finfo(new.dtype)
        sizes = jnp.abs(new)
        is_out_of_range = (sizes > limits.max) | (sizes < limits.tiny)
        lost.append(jnp.any((new != old) & is_out_of_range))
    return jnp.stack(lost)


@validated
def scale(
    group: NeuronGroup, factor: Real[ArrayLike, "..."] = 0.1, *, scaling: int | None = None
) -> Rewrite:
    """Return the rewrite that scales the neurons of a group.

    Incoming weights are multiplied by a > 0, and outgoing weights divided by a power of it. The
    group sets exponents of a. ReLU: incoming weights and biases times a, outgoing weights over a.
    Bilinear layer: both incoming matrices times a, outgoing weights over a^2. Behind a
    normalisation: its gain and shift times a.

    Args:
        group: Group of the model.
        factor: a, positive: a scalar, [neurons] or [copies, neurons]. May be traced.
        scaling: Index into `group.scalings`; None uses `group.scaling`.

    Raises:
        ValueError: If the group cannot be scaled, or a concrete factor is not positive and finite.
            Other traced factors give NaN weights.

    References:
        Dinh et al. (2017), Sharp minima can generalize for deep nets, section 3.
    """
    if group.scaling is None:
        reason = (
            "its activation is not homogeneous, or its neurons share a factor, as heads that "
            "share values"
        )
        if group.normalised:
            reason = "a statistic is taken over it"
        fail("group", "be one that can be scaled", f"{group.name}, which cannot: {reason}")
    if scaling is not None and not -len(group.scalings) <= scaling < len(group.scalings):
        fail("scaling", f"be one of the {len(group.scalings)} scalings of {group.name}", scaling)
    check_positive("factor", factor)
    # A factor may overflow float32: the check of its powers finds it.
    with np.errstate(over="ignore"):
        factor = to_device(factor, float)
    exponents = group.scaling
    if scaling is not None:
        exponents = group.scalings[scaling]
    return Rewrite(_scaled, (group, tuple(map(float, exponents))), (factor,))


def _check_power(factor: Array, exponent: float, dtype: Any) -> None:
    """Raise if a power of a concrete factor is not a normal number of `dtype`."""
    if is_traced(factor):
        return
    limits = jnp.finfo(dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        powers = exponent * np.log2(np.asarray(factor, np.float64))
    if not ((powers >= limits.minexp) & (powers < limits.maxexp)).all():
        fail("factor", f"have a power {exponent:g} that {limits.dtype} holds", np.asarray(factor))


def _rotated(model: Any, group: NeuronGroup, matrix: Array | None, key: PRNGKey | None) -> Any:
    group = current(group, model)
    _check_rotates(group)
    sides: Any = group.linear
    if matrix is None:
        # A drawn matrix is orthogonal, so it is its own inverse transposed.
        turns = _random_turns(key, group.size, group.copies)
        is_inverted = np.zeros(len(sides), bool)
    else:
        turns = _each_copy("matrix", matrix, group, 2)
        is_inverted = sides <= 0
    changes = []
    for slot, invert in zip(group.slots, is_inverted, strict=True):
        changes.append((slot, eqx.Partial(_turned, turns, bool(invert))))
    return changed(model, changes)


_random_turns = jax.jit(
    lambda key, size, copies: jax.random.orthogonal(key, size, (copies,)), static_argnums=(1, 2)
)


def _turned(turns: Array, invert: bool, slot: Slot, array: Array) -> Array:
    """Multiply the weights of a slot by matrices [copies, neurons, neurons].

    With `invert`, multiply by their transposed inverses.
    """
    if invert:
        turns = jnp.linalg.inv(turns).mT
    turns = slot.of_copies(turns.astype(array.dtype))
    columns = jnp.moveaxis(slot.blocks(array), 0, -1)[..., None]
    # An accelerator's default precision would change the function.
    turned = jnp.matmul(turns, columns, precision=jax.lax.Precision.HIGHEST)
    return slot.with_blocks(array, jnp.moveaxis(turned[..., 0], -1, 0))


@validated(finite=("matrix",))
def rotate(
    group: NeuronGroup,
    matrix: Float[Array | np.ndarray, "*copies neurons neurons"] | None = None,
    *,
    key: PRNGKey | None = None,
) -> Rewrite:
    """Return the rewrite that replaces linear neurons by linear combinations of each other.

    Incoming weights are multiplied by M, outgoing weights by its inverse transposed. Examples:
    queries and keys of attention heads, their values and outputs, hidden layers of linear networks.

    Args:
        group: Group of the model whose `linear` is not None.
        matrix: M, invertible, [neurons, neurons] or [copies, neurons, neurons].
        key: Key of a uniform random rotation for each copy.

    Raises:
        ValueError: If the group has no linear symmetry, not exactly one of `matrix` and `key` is
            given, or a known M is not finite or has a condition number above a thousandth of the
            inverse rounding, with rows and columns scaled to a largest entry of 1.
    """
    _check_rotates(group)
    _check_one_given("matrix", matrix, key)
    if matrix is None:
        return Rewrite(_rotated, (group,), (None, key))
    if not is_traced(matrix):
        _check_invertible(matrix)
    return Rewrite(_rotated, (group,), (to_device(matrix), key))


def _check_invertible(matrix: Array | np.ndarray) -> None:
    scaled = np.asarray(matrix, np.float64)
    for axis in (-2, -1):  # the scale of a neuron costs no digits
        size = np.max(np.abs(scaled), axis, keepdims=True)
        scaled = scaled / np.where(size > 0, size, 1)
    dtype = jax.dtypes.canonicalize_dtype(matrix.dtype)
    condition = np.linalg.cond(scaled)
    largest = 1e-3 / float(jnp.finfo(dtype).eps)
    if not np.all(condition < largest):
        wanted_matrix = f"be invertible, with a condition number below {largest:.1e} in {dtype}"
        fail("matrix", wanted_matrix, f"{np.max(condition):.1e}")


def _check_rotates(group: NeuronGroup) -> None:
    if group.linear is None:
        wanted_group = (
            "have only sums and matrix products between its incoming and outgoing weights"
        )
        fail("group", wanted_group, group.name)


class NullSpace(NamedTuple):
    """Directions of a layer's weights that are orthogonal to all its inputs.

    Attributes:
        path: Path of the weights, as in `Slot.path`.
        axes: Axes of the weights that are contracted with the inputs.
        rank: Number of axes of the weights.
        basis: Orthonormal directions, [null dimension, features], features in the order of `axes`.
    """

    path: str
    axes: tuple[int, ...]
    rank: int
    basis: Float[Array | np.ndarray, "null features"]

    __repr__ = printed


@validated
def null_space(seen: LayerInputs, *, rtol: float | None = None) -> NullSpace:
    """Return the null space of a layer's inputs, computed on the host in float64.

    Args:
        seen: Layer inputs, from `rewrites.layer_inputs`.
        rtol: Relative cut-off of singular values. None is 1e-10, for exact inputs. Outputs of a
            float32 layer have rounding of 1e-7 and need 1e-6.

    Raises:
        TypeError: If the inputs are traced.
    """
    basis = null_spectrum(seen.rows, rtol).basis
    return NullSpace(seen.path, seen.axes, len(seen.shape), basis)


def _null_perturbed(
    model: Any, path: str, axes: tuple[int, ...], rank: int, basis: Array, std: Scalar, key: PRNGKey
) -> Any:
    leaves, tree, static = parameters_of(model)
    paths = program_of(model, None).paths
    width = basis.shape[-1]
    shape = None
    if path in paths:
        shape = np.shape(leaves[paths.index(path)])
    if shape is None or len(shape) != rank or math.prod(shape[axis] for axis in axes) != width:
        wanted_array = f"have an array {path} of {rank} axes, {width} features along {axes}"
        advice = ONE_STRUCTURE.replace("group", "null space")
        fail("model", wanted_array, f"shape {shape}", advice)
    leaf = paths.index(path)
    leaves[leaf] = perturb_in_null_space(to_device(leaves[leaf]), basis, std, key=key, axes=axes)
    return eqx.combine(jax.tree.unflatten(tree, leaves), static)


@validated
def null_perturb(space: NullSpace, std: NonNegative, *, key: PRNGKey) -> Rewrite:
    """Return the rewrite that adds Gaussian noise to a layer's weights within a null space.

    The function does not change on the examples that the null space was computed from, but changes
    elsewhere.

    Args:
        space: Null space, from `null_space`.
        std: Standard deviation of the noise along each direction, not negative. May be traced.
        key: A PRNG key.
    """
    return Rewrite(_null_perturbed, space[:3], (to_device(space.basis, float), std, key))


@validated
def check_groups(
    model: Any,
    inputs: Any,
    *,
    key: PRNGKey,
    call: Call | None = None,
    progress: str | MeterFactory | None = "late",
) -> dict[str, Certificate]:
    """Permute each group of a model at random and return a certificate for each, by name.

    Args:
        model: See `rewrites.neuron_groups`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        key: Key of the permutations.
        call: See `rewrites.neuron_groups`.
        progress: See `dissociation.training`.
    """
    inputs = as_examples("inputs", inputs, finite=True)
    example = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), inputs)
    groups = neuron_groups(model, example, call=call)
    _, _, leaves, run = program_of(model, call)
    program = trace_exactly(lambda arrays, x: _joined(run(arrays, x)), leaves, example)
    certificates = {}
    with closing(open_meter(progress, len(groups), "permuting groups")) as meter:
        meter.advance(0, "compiling")
        num_scores = sum(group.size * group.copies for group in groups.values())
        scores = jax.random.uniform(key, (num_scores,))
        sources = list(map(to_device, leaves))
        if not any(map(is_traced, (*leaves, scores))):
            # Permuting on the host compiles nothing for the axes of each group.
            sources, scores = jax.device_get((leaves, scores))
        for number, group in enumerate(groups.values(), 1):
            num_neurons = group.size * group.copies
            order = scores[:num_neurons].reshape(group.copies, group.size).argsort(-1)
            scores = scores[num_neurons:]
            permuted = list(leaves)
            for slot in group.slots:
                permuted[slot.leaf] = sources[slot.leaf]
            for slot in group.slots:
                permuted[slot.leaf] = slot.permuted(permuted[slot.leaf], order)
            programs = (program, leaves), (program, permuted)
            certificates[group.name] = compare_programs(*programs, inputs)
            meter.advance(number, group.name)
    return certificates


def _joined(outputs: list[Array]) -> Array:
    """Concatenate all floating-point outputs into one vector."""
    # A certificate compares one array, but a model may return several.
    return jnp.concatenate([jnp.ravel(array) for array in outputs if eqx.is_inexact_array(array)])
