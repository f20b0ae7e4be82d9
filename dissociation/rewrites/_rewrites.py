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
    """A pure function from one model to one model, `function(model, *settings, *arrays)`, in the model's precision."""

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
            fail_kind(
                f"rewrites[{index}]",
                "be a rewrite, such as `permute` makes",
                type(rewrite).__name__,
            )
    return Rewrite(_one_after_another, (), tuple(rewrites))


def _one_after_another(model: Any, *rewrites: Rewrite) -> Any:
    for rewrite in rewrites:
        model = rewrite(model)
    return model


def current(group: NeuronGroup, model: Any) -> NeuronGroup:
    """Return `group` as it is in `model`; find it again if the model differs in more than parameter values."""
    leaves = parameters_of(model)[0]
    same = all(
        slot.leaf < len(leaves) and np.shape(leaves[slot.leaf]) == slot.shape
        for slot in group.slots
    )
    if same and _same(group.structure, structure_of(model)):
        return group
    for slot in group.slots:
        shape = np.shape(leaves[slot.leaf]) if slot.leaf < len(leaves) else None
        if shape is None or len(shape) != len(slot.shape):
            fail("model", f"have an array {slot.path} of shape {slot.shape}", shape, ONE_STRUCTURE)
    # An earlier rewrite in a chain may have widened the group: its slots are out of date.
    groups = neuron_groups(model, group.example, call=group.call)
    if group.name not in groups or len(groups[group.name].slots) != len(group.slots):
        fail("model", f"have a group {group.name!r}", f"groups {', '.join(map(repr, groups))}")
    return groups[group.name]


def _same(one: Any, other: Any) -> bool:
    """Test whether two structures are equal; False if their comparison has no single answer."""
    try:
        return bool(one == other)
    except (TypeError, ValueError):
        return False


Change = Callable[[Slot, Any], Any]


def changed(model: Any, changes: Sequence[tuple[Slot, Change]]) -> Any:
    """Return the model with `change(slot, array)` for the array of each slot, one after the other, by one program.

    Args:
        model: A model.
        changes: Slots and PyTrees that are called, such as `eqx.Partial`.
    """
    leaves, tree, rest = parameters_of(model)
    touched = list(dict.fromkeys(slot.leaf for slot, _ in changes))
    arrays = [to_device(leaves[leaf]) for leaf in touched]
    placed = []
    for slot, change in changes:
        # Without paths, groups of one shape share a program, wherever their arrays are in the
        # model.
        placed.append(
            (slot._replace(path="", leaf=touched.index(slot.leaf), layout=UNIT, name=()), change)
        )
    for leaf, array in zip(touched, _change(arrays, placed), strict=True):
        leaves[leaf] = array
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


@eqx.filter_jit
def _change(arrays: list[Array], changes: list[tuple[Slot, Change]]) -> list[Array]:
    for slot, change in changes:
        arrays[slot.leaf] = change(slot, arrays[slot.leaf])
    return arrays


def _each_copy(name: str, value: Any, group: NeuronGroup, rank: int) -> Any:
    """Broadcast an argument for all copies of a group, or for each copy, to [copies, ...]."""
    if value.shape[-1:] != (group.size,):
        fail(
            name,
            f"have {group.size} entries on its last axis, one per neuron of {group.name}",
            value.shape,
        )
    if value.ndim > rank and len(value) != group.copies:
        fail(
            name,
            f"be one for all, or one for each of the {group.copies} copies of {group.name}",
            value.shape,
        )
    library = jnp if is_traced(value) else np
    return library.broadcast_to(value, (group.copies, *value.shape[-rank:]))


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
    """Return the rewrite that permutes the neurons of a group, in incoming and outgoing weights alike.

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
    if (
        not is_traced(permutation)
        and (np.sort(permutation) != np.arange(permutation.shape[-1])).any()
    ):
        fail(
            "permutation",
            f"hold each of 0, ..., {permutation.shape[-1] - 1} once",
            np.asarray(permutation),
        )
    return Rewrite(_permuted, (group,), (to_device(permutation), None))


def _check_one_given(name: str, value: Any, key: Any) -> None:
    if (value is None) == (key is None):
        fail(name, "be given, or `key` to draw it", "neither" if key is None else "both")


def _scaled(model: Any, group: NeuronGroup, exponents: tuple[float, ...], factor: Array) -> Any:
    group = current(group, model)
    # A group that was found again may have other scalings.
    if np.linalg.matrix_rank(np.vstack([group.scalings, exponents])) > len(group.scalings):
        fail(
            "model",
            f"have a group {group.name} with the scalings of the group that was passed",
            group,
        )
    factors = _each_copy("factor", factor, group, 1) if factor.ndim else factor
    leaves = parameters_of(model)[0]
    changes = []
    for slot, exponent in zip(group.slots, exponents, strict=True):
        _check_power(factor, exponent, jax.dtypes.canonicalize_dtype(leaves[slot.leaf].dtype))
        if exponent:
            changes.append((slot, eqx.Partial(_multiply, exponent, factors)))
    scaled = changed(model, changes)
    after = parameters_of(scaled)[0]
    touched = list({slot.leaf for slot, _ in changes})
    lost = _lost([to_device(leaves[leaf]) for leaf in touched], [after[leaf] for leaf in touched])
    if not is_traced(lost):
        for leaf, is_lost in zip(touched, np.asarray(lost), strict=True):
            if is_lost:
                fail(
                    "factor",
                    f"leave weights that {after[leaf].dtype} holds",
                    "weights that vanish or overflow",
                )
    return scaled


def _multiply(exponent: float, factors: Array, slot: Slot, array: Array) -> Array:
    # A traced factor cannot be checked: NaN makes a wrong one visible.
    factors = jnp.where((factors > 0) & jnp.isfinite(factors), factors, jnp.nan)
    power = (slot.per_neuron(factors) if factors.ndim else factors).astype(array.dtype)
    power = power**exponent if exponent > 0 else 1 / power**-exponent
    return slot.with_blocks(array, slot.blocks(array) * power)


@jax.jit
def _lost(before: list[Array], after: list[Array]) -> Array:
    """Return for each array whether entries changed to numbers that vanish or overflow."""
    lost = []
    for old, new in zip(before, after, strict=True):
        limits = jnp.finfo(new.dtype)
        sizes = jnp.abs(new)
        lost.append(jnp.any((new != old) & ((sizes > limits.max) | (sizes < limits.tiny))))
    return jnp.stack(lost)


@validated
def scale(
    group: NeuronGroup, factor: Real[ArrayLike, "..."] = 0.1, *, scaling: int | None = None
) -> Rewrite:
    """Return the rewrite that multiplies incoming weights of a group by a > 0 and divides outgoing weights.

    The group sets exponents of a. ReLU: incoming weights and biases times a, outgoing weights over
    a. Bilinear layer: both incoming matrices times a, outgoing weights over a^2. Behind a
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
        why = (
            "its activation is not homogeneous, or its neurons share a factor, as heads that "
            "share values"
        )
        why = "a statistic is taken over it" if group.normalised else why
        fail("group", "be one that can be scaled", f"{group.name}, which cannot: {why}")
    if scaling is not None and not -len(group.scalings) <= scaling < len(group.scalings):
        fail("scaling", f"be one of the {len(group.scalings)} scalings of {group.name}", scaling)
    check_positive("factor", factor)
    # A factor may overflow float32: the check of its powers finds it.
    with np.errstate(over="ignore"):
        factor = to_device(factor, float)
    exponents = group.scaling if scaling is None else group.scalings[scaling]
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
    turns = (
        _random_turns(key, group.size, group.copies)
        if matrix is None
        else _each_copy("matrix", matrix, group, 2)
    )
    sides: Any = group.linear
    changes = []
    for slot, side in zip(group.slots, sides, strict=True):
        # A drawn matrix is orthogonal, so it is its own inverse transposed.
        invert = matrix is not None and bool(side <= 0)
        changes.append((slot, eqx.Partial(_turned, turns, invert)))
    return changed(model, changes)


_random_turns = jax.jit(
    lambda key, size, copies: jax.random.orthogonal(key, size, (copies,)), static_argnums=(1, 2)
)


def _turned(turns: Array, invert: bool, slot: Slot, array: Array) -> Array:
    """Multiply the weights of a slot by matrices [copies, neurons, neurons], or by their transposed inverses."""
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
    if matrix is not None and not is_traced(matrix):
        _check_invertible(matrix)
    return Rewrite(_rotated, (group,), (None if matrix is None else to_device(matrix), key))


def _check_invertible(matrix: Array | np.ndarray) -> None:
    own = np.asarray(matrix, np.float64)
    for axis in (-2, -1):  # the scale of a neuron costs no digits
        size = np.max(np.abs(own), axis, keepdims=True)
        own = own / np.where(size > 0, size, 1)
    dtype = jax.dtypes.canonicalize_dtype(matrix.dtype)
    condition = np.linalg.cond(own)
    largest = 1e-3 / float(jnp.finfo(dtype).eps)
    if not np.all(condition < largest):
        wanted = f"be invertible, with a condition number below {largest:.1e} in {dtype}"
        fail("matrix", wanted, f"{np.max(condition):.1e}")


def _check_rotates(group: NeuronGroup) -> None:
    if group.linear is None:
        fail(
            "group",
            "have only sums and matrix products between its incoming and outgoing weights",
            group.name,
        )


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
    """Return the null space of a layer's inputs, computed on the host in float64; see `_null_spaces.null_spectrum`.

    Args:
        seen: Layer inputs, from `rewrites.layer_inputs`.
        rtol: Relative cut-off of singular values. None is 1e-10, for exact inputs. Outputs of a
            float32 layer have rounding of 1e-7 and need 1e-6.

    Raises:
        TypeError: If the inputs are traced.
    """
    return NullSpace(seen.path, seen.axes, len(seen.shape), null_spectrum(seen.rows, rtol).basis)


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
    leaves[leaf] = perturb_in_null_space(to_device(leaves[leaf]), basis, std, key=key, axes=axes)
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


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
    example = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape[1:], part.dtype), inputs)
    groups = neuron_groups(model, example, call=call)
    _, _, leaves, run = program_of(model, call)
    program = trace_exactly(lambda arrays, x: _one(run(arrays, x)), leaves, example)
    certificates = {}
    with closing(open_meter(progress, len(groups), "permuting groups")) as meter:
        meter.advance(0, "compiling")
        scores = jax.random.uniform(
            key, (sum(group.size * group.copies for group in groups.values()),)
        )
        sources = list(map(to_device, leaves))
        if not any(map(is_traced, (*leaves, scores))):
            # Permuting on the host compiles nothing for the axes of each group.
            sources, scores = jax.device_get((leaves, scores))
        for number, group in enumerate(groups.values(), 1):
            count = group.size * group.copies
            order = scores[:count].reshape(group.copies, group.size).argsort(-1)
            scores = scores[count:]
            moved: dict[int, Any] = {}
            for slot in group.slots:
                moved[slot.leaf] = slot.permuted(moved.get(slot.leaf, sources[slot.leaf]), order)
            permuted = [moved.get(leaf, array) for leaf, array in enumerate(leaves)]
            certificates[group.name] = compare_programs(
                (program, leaves), (program, permuted), inputs
            )
            meter.advance(number, group.name)
    return certificates


def _one(outputs: list[Array]) -> Array:
    """Concatenate all floating-point outputs into one vector."""
    # A certificate compares one array, but a model may return several.
    return jnp.concatenate([jnp.ravel(part) for part in outputs if eqx.is_inexact_array(part)])
