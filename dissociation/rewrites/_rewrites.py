"""Rewrites of any model that keep its function, on groups of neurons that were found (`groups`).

A rewrite is made of a group and its options, and is then a function of one model: `scale(group, 20.0)(model)`. Rewrites
follow one another by `|`, or as a list in `compose`. Stacked members are mapped over with `bmap` or `eqx.filter_vmap`.
Each computes in the model's own precision, and is pure: it goes through `jit`, `vmap` and `grad`.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, Real

from dissociation._core.checks import check_non_negative, check_positive, fail, fail_kind, is_traced
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.types import PRNGKey, Scalar
from dissociation._core.validation import validated
from dissociation.models._program import called, program_of
from dissociation.rewrites._certificate import Certificate, certify
from dissociation.rewrites._groups import NeuronGroup, Slot, neuron_groups, parameters_of, structure_of
from dissociation.rewrites._null_spaces import null_basis, perturb_in_null_space
from dissociation.rewrites._seen import LayerInputs

ONE_STRUCTURE = "A group belongs to models of one structure; map rewrites over stacked members by `eqx.filter_vmap`"


class Rewrite(eqx.Module):
    """A function from one model to one model."""

    @abstractmethod
    def __call__(self, model: Any) -> Any:
        """The rewritten model."""

    def __or__(self, other: "Rewrite") -> "Rewrite":
        return compose([self, other])


class FunctionRewrite(Rewrite):
    """The rewrite `function(model, *settings, *arrays)`."""

    function: Callable[..., Any] = eqx.field(static=True)
    settings: tuple[Any, ...] = eqx.field(static=True)
    arrays: tuple[Any, ...]

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        return self.function(model, *self.settings, *self.arrays)


@validated
def compose(rewrites: Sequence[Rewrite]) -> Rewrite:
    """Return one rewrite for several, the first one first. Groups that an earlier one enlarged are found again."""
    for index, rewrite in enumerate(rewrites):
        if not isinstance(rewrite, Rewrite):
            fail_kind(f"rewrites[{index}]", "be a rewrite, such as `permute` makes", type(rewrite).__name__)
    return FunctionRewrite(_one_after_another, (), tuple(rewrites))


def _one_after_another(model: Any, *rewrites: Rewrite) -> Any:
    for rewrite in rewrites:
        model = rewrite(model)
    return model


def current(group: NeuronGroup, model: Any) -> NeuronGroup:
    """The group in a model whose arrays may have other shapes by now, or that may be another one.

    Where the model is what the group was found in but for its numbers, the group is as it was. Else it is found again,
    and may then have other scalings, or not be there.
    """
    leaves = parameters_of(model)[0]
    same = all(slot.leaf < len(leaves) and np.shape(leaves[slot.leaf]) == slot.shape for slot in group.slots)
    if same and (group.structure is None or _same(group.structure, structure_of(model))):
        return group
    for slot in group.slots:
        shape = np.shape(leaves[slot.leaf]) if slot.leaf < len(leaves) else None
        if shape is None or len(shape) != len(slot.shape):
            fail("model", f"have an array {slot.path} of shape {slot.shape}", shape, ONE_STRUCTURE)
    groups = neuron_groups(model, group.example, call=group.call)
    if group.name not in groups or len(groups[group.name].slots) != len(group.slots):
        fail("model", f"have a group {group.name!r}", f"groups {', '.join(map(repr, groups))}")
    return groups[group.name]


def _same(one: Any, other: Any) -> bool:
    """Whether two structures are; not, where things that they hold have no one answer to that."""
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False


def _changed(model: Any, group: NeuronGroup, change: Callable[[Slot, Array, float], Array], exponents: Any) -> Any:
    """The model with every slot's array changed, in the order of the slots, each by its exponent."""
    leaves, tree, rest = parameters_of(model)
    for slot, exponent in zip(group.slots, exponents, strict=True):
        leaves[slot.leaf] = change(slot, jnp.asarray(leaves[slot.leaf]), float(exponent))
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def _permuted(model: Any, group: NeuronGroup, permutation: Array | None, key: PRNGKey | None) -> Any:
    group = current(group, model)
    if key is not None:
        permutation = jnp.tile(jnp.arange(group.size), (group.copies, 1))
        permutation = jax.random.permutation(key, permutation, axis=1, independent=group.copies > 1)
    each = _each_copy("permutation", permutation, group, 1)
    return _changed(model, group, lambda slot, array, _: slot.permuted(array, each), [0.0] * len(group.slots))


def _each_copy(name: str, given: Any, group: NeuronGroup, rank: int) -> Array:
    """An argument of one shape for all copies of a group, or with a first axis of one for each: for each."""
    if given.shape[-1:] != (group.size,):
        fail(name, f"have {group.size} entries, one per neuron of {group.name}", given.shape)
    if given.ndim > rank and len(given) != group.copies:
        fail(name, f"be one for all, or one for each of the {group.copies} copies of {group.name}", given.shape)
    return jnp.broadcast_to(given, (group.copies, *given.shape[-rank:]))


@validated
def permute(
    group: NeuronGroup,
    permutation: Int[Array | np.ndarray, "*copies neurons"] | None = None,
    *,
    key: PRNGKey | None = None,
) -> Rewrite:
    """Return the rewrite that puts the neurons of a group in another order, wherever they are made or read.

    Args:
        group: Of the model.
        permutation: Neuron `permutation[i]` comes to place i, [neurons]; or one for each copy, [copies, neurons].
        key: Draws the permutation where none is given, of as many neurons as there are when it is applied, for each
            copy by itself.

    Raises:
        ValueError: If `permutation` repeats or lacks a neuron or is no vector or matrix, or both or neither of
            `permutation` and `key` are given.
    """
    if (permutation is None) == (key is None):
        fail("permutation", "be given, or `key` to draw it", "neither" if key is None else "both")
    if permutation is None:
        return FunctionRewrite(_permuted, (group,), (None, key))
    if permutation.ndim not in (1, 2):
        fail("permutation", "be of shape [neurons] or [copies, neurons]", permutation.shape)
    if not is_traced(permutation) and (np.sort(permutation) != np.arange(permutation.shape[-1])).any():
        fail("permutation", f"hold each of 0, ..., {permutation.shape[-1] - 1} once", np.asarray(permutation))
    return FunctionRewrite(_permuted, (group,), (jnp.asarray(permutation), None))


def _scaled(model: Any, group: NeuronGroup, exponents: tuple[float, ...], factor: Array) -> Any:
    group = current(group, model)
    if np.linalg.matrix_rank(np.vstack([group.scalings, exponents])) > len(group.scalings):
        fail("model", f"let {group.name} be scaled as where the group was found", group)
    if factor.shape not in ((), (group.size,), (group.copies, group.size)):
        wanted = f"be one number, one per neuron ({group.size}), or that for each copy ({group.copies})"
        fail("factor", wanted, f"shape {factor.shape}")
    each = jnp.where((factor > 0) & jnp.isfinite(factor), factor, jnp.nan)
    each = jnp.broadcast_to(each, (group.copies, group.size))

    def change(slot: Slot, array: Array, exponent: float) -> Array:
        _check_power(factor, exponent, array.dtype)
        if exponent == 0:
            return array
        own = slot.per_neuron(each).astype(array.dtype)
        own = own**exponent if exponent > 0 else 1 / own**-exponent
        changed = slot.blocks(array) * own
        if not is_traced(changed):
            sizes, limits = abs(np.asarray(changed)), jnp.finfo(array.dtype)
            if ((sizes > limits.max) | (sizes < limits.tiny) & np.asarray(slot.blocks(array) != 0)).any():
                fail("factor", f"leave weights that {array.dtype} holds", "weights that vanish or overflow")
        return slot.with_blocks(array, changed)

    return _changed(model, group, change, exponents)


@validated
def scale(group: NeuronGroup, factor: Real[ArrayLike, "..."] = 0.1, *, scaling: int | None = None) -> Rewrite:
    """Return the rewrite that multiplies what makes the neurons of a group by a > 0, and divides what reads them.

    Exponents of a are those that the group has: for ReLU incoming weights and biases times a, outgoing weights over a;
    for a bilinear layer both incoming matrices times a, outgoing ones over a^2; what a normalisation makes is scaled by
    its gain and shift.

    Args:
        group: Of the model.
        factor: a, one for all neurons, one for each [neurons], or for each of each copy [copies, neurons]; positive.
            May be traced.
        scaling: Which of the group's `scalings`; default: `scaling`.

    Raises:
        ValueError: If the group cannot be scaled, or a known factor is not positive and finite; a traced one that is
            not makes the neuron's weights NaN.

    References:
        Dinh, Pascanu, Bengio and Bengio (2017), Sharp minima can generalize for deep nets, section 3.
    """
    if group.scaling is None:
        why = "a statistic is taken over it" if group.normalised else "its activation is not homogeneous"
        fail("group", "be one that can be scaled", f"{group.name}, which cannot: {why}")
    if scaling is not None and not -len(group.scalings) <= scaling < len(group.scalings):
        fail("scaling", f"be one of the {len(group.scalings)} scalings of {group.name}", scaling)
    check_positive("factor", factor)
    with np.errstate(over="ignore"):
        factor = jnp.asarray(factor, float)
    check_positive("factor", factor)  # also in the precision that it is computed in
    exponents = group.scaling if scaling is None else group.scalings[scaling]
    for exponent in set(map(float, exponents)):
        _check_power(factor, exponent, factor.dtype)
    return FunctionRewrite(_scaled, (group, tuple(map(float, exponents))), (factor,))


def _check_power(factor: Array, exponent: float, dtype: Any) -> None:
    """Raises unless what weights are multiplied by is a normal number of their precision."""
    if is_traced(factor):
        return
    limits = jnp.finfo(dtype)
    powers = exponent * np.log2(np.asarray(factor, np.float64))
    if not ((powers >= limits.minexp) & (powers < limits.maxexp)).all():
        fail("factor", f"have a power {exponent:g} that {limits.dtype} holds", np.asarray(factor))


def _rotated(model: Any, group: NeuronGroup, matrix: Array | None, key: PRNGKey | None) -> Any:
    group = current(group, model)
    _check_rotates(group)
    own: Any = matrix if key is None else jax.random.orthogonal(key, group.size, (group.copies,))
    if own.shape[-2:] != (group.size, group.size):
        fail("matrix", f"be square, a row per neuron of {group.name} ({group.size})", own.shape)
    own = _each_copy("matrix", own, group, 2)
    other = own if matrix is None else jnp.linalg.inv(own).mT

    def change(slot: Slot, array: Array, side: float) -> Array:
        turns = slot.of_copies((own if side > 0 else other).astype(array.dtype))
        columns = jnp.moveaxis(slot.blocks(array), 0, -1)[..., None]
        turned = jnp.matmul(turns, columns, precision=jax.lax.Precision.HIGHEST)
        return slot.with_blocks(array, jnp.moveaxis(turned[..., 0], -1, 0))

    return _changed(model, group, change, group.linear)


@validated
def rotate(
    group: NeuronGroup,
    matrix: Float[Array | np.ndarray, "*copies neurons neurons"] | None = None,
    *,
    key: PRNGKey | None = None,
) -> Rewrite:
    """Return the rewrite that turns neurons into linear combinations of each other, if nothing is between two products.

    What makes them is multiplied by an invertible M, what reads them by its inverse transposed: the queries and keys of
    attention heads, their values and outputs, hidden layers of linear networks.

    Args:
        group: Of the model, with `linear`.
        matrix: M, [neurons, neurons], or one for each copy, [copies, neurons, neurons]; invertible.
        key: Draws a rotation for each copy, uniformly, where none is given.

    Raises:
        ValueError: If the group has no linear symmetry, or both or neither of `matrix` and `key` are given.
    """
    _check_rotates(group)
    if (matrix is None) == (key is None):
        fail("matrix", "be given, or `key` to draw it", "neither" if key is None else "both")
    return FunctionRewrite(_rotated, (group,), (None if matrix is None else jnp.asarray(matrix), key))


def _check_rotates(group: NeuronGroup) -> None:
    if group.linear is None:
        fail("group", "have nothing but sums and products between what makes and what reads it", group.name)


class NullSpace(NamedTuple):
    """Directions of a layer's weights that nothing it sees has.

    Attributes:
        path: Of the weights, as slots of groups have it.
        leaf: Their number among the model's arrays of floating-point numbers.
        axes: Of the weights, along which they are multiplied and summed.
        basis: Orthonormal directions, [null dimension, features], features in the order of the weights' `axes`.
        shape: Shape of the weights; None is one axis more than `axes`, of any length.
    """

    path: str
    leaf: int
    axes: tuple[int, ...]
    basis: Float[Array | np.ndarray, "null features"]
    shape: tuple[int, ...] | None = None

    __repr__ = printed


@validated
def null_space(seen: LayerInputs, *, rtol: float | None = None) -> NullSpace:
    """The null space of what a layer sees, on the host, in float64; see `_null_spaces.null_spectrum`.

    Args:
        seen: From `rewrites.layer_inputs`.
        rtol: Singular values below this times the largest count as zero; None is 1e-10, for numbers that are exact.
            What a layer makes of them in float32 has rounding of 1e-7 and wants 1e-6.

    Raises:
        TypeError: If what it sees is traced.
    """
    return NullSpace(seen.path, seen.leaf, seen.axes, null_basis(seen.rows, rtol), seen.shape)


def _null_perturbed(
    model: Any, path: str, axes: tuple[int, ...], rank: int, basis: Array, std: Scalar, key: PRNGKey
) -> Any:
    leaves, tree, rest = parameters_of(model)
    paths, width = program_of(model, None).paths, basis.shape[-1]
    leaf = paths.index(path) if path in paths else len(leaves)
    shape = np.shape(leaves[leaf]) if leaf < len(leaves) else None
    if shape is None or len(shape) != rank or math.prod(shape[axis] for axis in axes) != width:
        wanted = f"have an array {path} of {rank} axes, {width} features along {axes}"
        fail("model", wanted, f"shape {shape}", ONE_STRUCTURE.replace("group", "null space"))
    last = tuple(range(-len(axes), 0))
    weights = jnp.moveaxis(jnp.asarray(leaves[leaf]), axes, last)
    moved = perturb_in_null_space(weights.reshape(-1, width), basis, std, key=key)
    leaves[leaf] = jnp.moveaxis(moved.reshape(weights.shape), last, axes)
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


@validated
def null_perturb(space: NullSpace, std: Scalar, *, key: PRNGKey) -> Rewrite:
    """Return the rewrite that adds Gaussian noise to a layer's weights, in directions that nothing it sees has.

    The function stays on the examples that the space is of, and changes elsewhere. With an empty space nothing changes.

    Args:
        space: From `null_space`.
        std: Standard deviation of the noise along each direction, not negative. May be traced.
        key: A PRNG key of either kind.
    """
    check_non_negative("std", std)
    rank = len(space.axes) + 1 if space.shape is None else len(space.shape)
    return FunctionRewrite(_null_perturbed, (space.path, space.axes, rank), (jnp.asarray(space.basis, float), std, key))


@validated
def check_groups(
    model: Any,
    inputs: Any,
    *,
    key: PRNGKey,
    call: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Certificate]:
    """Find the groups of a model, permute each at random, and return a certificate for each, by name.

    Args:
        model: See `rewrites.neuron_groups`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        key: Draws the permutations.
        call: See `rewrites.neuron_groups`.
    """
    inputs = as_examples("inputs", inputs)
    groups = neuron_groups(model, jax.tree.map(lambda part: part[0], inputs), call=call)
    apply = called if call is None else call
    keys = jax.random.split(key, max(len(groups), 1))
    found = {}
    for one, (name, group) in zip(keys, groups.items(), strict=False):
        permuted = permute(group, key=one)(model)
        found[name] = certify(lambda x: _one(apply(model, x)), lambda x, p=permuted: _one(apply(p, x)), inputs)
    return found


def _one(outputs: Any) -> Array:
    """All outputs in one array."""
    return jnp.concatenate([jnp.ravel(part) for part in jax.tree.leaves(eqx.filter(outputs, eqx.is_inexact_array))])
