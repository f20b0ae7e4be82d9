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
from jaxtyping import Array, ArrayLike, Float, Int, Real, Shaped

from dissociation.checks import check_count, check_non_negative, check_positive, fail, fail_kind, is_traced
from dissociation.models.program import called, program_of
from dissociation.types import PRNGKey, Scalar
from dissociation.validation import validated
from dissociation.weights.axes import spread
from dissociation.weights.certificate import Certificate, certify
from dissociation.weights.groups import NeuronGroup, Slot, neuron_groups, parameters_of
from dissociation.weights.neurons import copies_of, least_squares
from dissociation.weights.seen import LayerInputs, layer_inputs
from dissociation.weights.sizes import refit
from dissociation.weights.symmetry import null_basis, perturb_in_null_space


class Rewrite(eqx.Module):
    """A function from one model to one model."""

    @abstractmethod
    def __call__(self, model: Any) -> Any:
        """The rewritten model."""

    def __or__(self, other: "Rewrite") -> "Rewrite":
        return compose([self, other])


class Composed(Rewrite):
    """Rewrites one after another."""

    parts: tuple[Rewrite, ...]

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        for part in self.parts:
            model = part(model)
        return model


@validated
def compose(rewrites: Sequence[Rewrite]) -> Rewrite:
    """Rewrites one after another, the first one first. Groups that an earlier one enlarged are found again.

    Args:
        rewrites: Any number; none leave a model as it is.
    """
    return Composed(tuple(rewrites))


def current(group: NeuronGroup, model: Any) -> NeuronGroup:
    """The group in a model whose arrays may have other shapes by now.

    Raises:
        ValueError: If the model is another one.
    """
    leaves = parameters_of(model)[0]
    if all(slot.leaf < len(leaves) and np.shape(leaves[slot.leaf]) == slot.shape for slot in group.slots):
        return group
    for slot in group.slots:
        shape = np.shape(leaves[slot.leaf]) if slot.leaf < len(leaves) else None
        if shape is None or len(shape) != len(slot.shape):
            advice = (
                "A group belongs to models of one structure; map rewrites over stacked members by `eqx.filter_vmap`"
            )
            fail("model", f"have an array {slot.path} of shape {slot.shape}", shape, advice)
    groups = neuron_groups(model, group.example, call=group.call)
    if group.name not in groups:
        fail("model", f"have a group {group.name!r}", f"groups {', '.join(map(repr, groups))}")
    return groups[group.name]


Change = Callable[[Slot, Array, float], Array]


def _changed(model: Any, group: NeuronGroup, change: Change, exponents: np.ndarray | None = None) -> Any:
    """The model with every slot's array changed, in the order of the slots."""
    leaves, tree, rest = parameters_of(model)
    for index, slot in enumerate(group.slots):
        exponent = 0.0 if exponents is None else float(exponents[index])
        leaves[slot.leaf] = change(slot, jnp.asarray(leaves[slot.leaf]), exponent)
    return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


def _along(vector: Array, array: Array, axis: int) -> Array:
    """A vector along one axis of an array."""
    return vector.reshape([-1 if k == axis else 1 for k in range(array.ndim)])


class Permute(Rewrite):
    """See `permute`."""

    permutation: Int[Array, "*copies neurons"] | None
    key: PRNGKey | None
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        drawing: Any = self.key
        permutation = self.permutation
        if permutation is None:
            permutation = jnp.tile(jnp.arange(group.size), (group.copies, 1))
            permutation = jax.random.permutation(drawing, permutation, axis=1, independent=group.copies > 1)
        each = _each_copy("permutation", permutation, group, 1)
        return _changed(model, group, lambda slot, array, exponent: slot.permuted(array, each))


def _each_copy(name: str, given: Array, group: NeuronGroup, rank: int) -> Array:
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
) -> Permute:
    """Puts the neurons of a group in another order, wherever they are made or read.

    Args:
        group: Of the model.
        permutation: Neuron `permutation[i]` comes to place i, [neurons]; or one for each copy, [copies, neurons].
        key: Draws the permutation where none is given, of as many neurons as there are when it is applied, for each
            copy by itself.

    Returns:
        The rewrite.

    Raises:
        ValueError: If `permutation` repeats or lacks a neuron or is no vector or matrix, or both or neither of
            `permutation` and `key` are given.
    """
    if (permutation is None) == (key is None):
        fail("permutation", "be given, or `key` to draw it", "neither" if key is None else "both")
    if permutation is None:
        return Permute(None, key, group)
    if permutation.ndim not in (1, 2):
        fail("permutation", "be of shape [neurons] or [copies, neurons]", permutation.shape)
    if not is_traced(permutation) and (np.sort(permutation) != np.arange(permutation.shape[-1])).any():
        fail("permutation", f"hold each of 0, ..., {permutation.shape[-1] - 1} once", np.asarray(permutation))
    return Permute(jnp.asarray(permutation), None, group)


class Scale(Rewrite):
    """See `scale`."""

    factor: Array
    exponents: tuple[float, ...] = eqx.field(static=True)
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        factor = jnp.where((self.factor > 0) & jnp.isfinite(self.factor), self.factor, jnp.nan)
        if factor.shape not in ((), (group.size,), (group.copies, group.size)):
            wanted = f"be one number, one per neuron ({group.size}), or that for each copy ({group.copies})"
            fail("factor", wanted, f"shape {factor.shape}")
        each = jnp.broadcast_to(factor, (group.copies, group.size))

        def change(slot: Slot, array: Array, exponent: float) -> Array:
            if exponent == 0:
                return array
            own = slot.per_neuron(each).astype(array.dtype)
            own = own**exponent if exponent > 0 else 1 / own**-exponent
            return slot.with_blocks(array, slot.blocks(array) * own)

        return _changed(model, group, change, np.array(self.exponents))


@validated
def scale(group: NeuronGroup, factor: Real[ArrayLike, "..."] = 0.1, *, scaling: int | None = None) -> Scale:
    """Multiplies what makes the neurons of a group by a > 0, and divides what reads them.

    Exponents of a are those that the group has: for ReLU incoming weights and biases times a, outgoing weights over a;
    for a bilinear layer both incoming matrices times a, outgoing ones over a^2; what a normalisation makes is scaled by
    its gain and shift.

    Args:
        group: Of the model.
        factor: a, one for all neurons, one for each [neurons], or for each of each copy [copies, neurons]; positive.
            May be traced.
        scaling: Which of the group's `scalings`; default: `scaling`.

    Returns:
        The rewrite; NaN for neurons whose traced factor is not positive and finite.

    Raises:
        ValueError: If the group cannot be scaled, or a known factor is not positive and finite.

    References:
        Dinh, Pascanu, Bengio and Bengio (2017), Sharp minima can generalize for deep nets, section 3.
    """
    if group.scaling is None:
        why = "a statistic is taken over it" if group.normalised else "its activation is not homogeneous"
        fail("group", "be one that can be scaled", f"{group.name}, which cannot: {why}")
    if scaling is not None and not -len(group.scalings) <= scaling < len(group.scalings):
        fail("scaling", f"be one of the {len(group.scalings)} scalings of {group.name}", scaling)
    check_positive("factor", factor)
    exponents = group.scaling if scaling is None else group.scalings[scaling]
    return Scale(jnp.asarray(factor, float), tuple(map(float, exponents)), group)


class Duplicate(Rewrite):
    """See `duplicate`."""

    multiplier: float = eqx.field(static=True)
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        original = copies_of(group.size, self.multiplier)
        copies = np.bincount(original, minlength=group.size)[original]
        exponents: Any = group.sharing

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            for index, owner in owners.items():
                vector = np.where(owner >= 0, copies[owner] ** float(exponents[index]), 1.0)
                array = array * _along(jnp.asarray(vector, array.dtype), array, axis)
            return array

        return _resized(model, group, original, change)


@validated
def duplicate(group: NeuronGroup, multiplier: float | int = 2.0) -> Duplicate:
    """Repeats the neurons of a group, and shares what reads them out equally over the copies of each.

    The copies come as whole groups one after another; see `neurons.duplicate_neurons`.

    Args:
        group: Of the model.
        multiplier: Of the number of neurons, at least 1; a plain number, as it sets shapes.

    Returns:
        The rewrite.

    Raises:
        TypeError: If `multiplier` is traced.
        ValueError: If the group cannot grow, or `multiplier` is below 1.
    """
    _check_grows(group)
    copies_of(group.size, multiplier, "multiplier")
    return Duplicate(float(multiplier), group)


def _check_grows(group: NeuronGroup) -> None:
    if group.sharing is None:
        why = "a statistic is taken over its neurons" if group.normalised else "no product is summed over its neurons"
        fail("group", "be one that can grow", f"{group.name}, which cannot: {why}")


Fill = Callable[[Array, int, dict[int, np.ndarray]], Array]


def _resized(model: Any, group: NeuronGroup, original: np.ndarray, fill: Fill) -> Any:
    """The model with other neurons in a group.

    Args:
        model: The model.
        group: Current in it.
        original: Which old neuron each new one takes over.
        fill: From an array with the new neurons along an axis, and, for the group's slots there, which of the new
            neurons each place belongs to, or -1.
    """
    leaves, tree, rest = parameters_of(model)
    owners: dict[tuple[int, int], dict[int, np.ndarray]] = {}
    for (leaf, axis), own in group.by_axis().items():
        slots = [group.slots[index] for index in own]
        places, by_name = spread(slots[0].layout, {slot.name: original for slot in slots})
        leaves[leaf] = jnp.take(jnp.asarray(leaves[leaf]), places, axis=axis)
        owners[leaf, axis] = {index: by_name[slot.name] for index, slot in zip(own, slots, strict=True)}
    # What reads the new neurons comes last, so that they are without effect on each other too.
    for (leaf, axis), own in sorted(owners.items(), key=lambda item: group.slots[min(item[1])].outgoing):
        leaves[leaf] = fill(leaves[leaf], axis, own)
    rewritten = refit(eqx.combine(jax.tree.unflatten(tree, leaves), rest))
    check_same_program(model, rewritten, group)
    _check_same_places(rewritten, group, owners, len(original))
    return rewritten


def _check_same_places(
    rewritten: Any, group: NeuronGroup, owners: dict[tuple[int, int], dict[int, np.ndarray]], size: int
) -> None:
    """Raises unless the neurons are a group of the grown model, at the places that they were given."""
    wanted: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for place, own in owners.items():
        pairs = (zip(owner.tolist(), range(len(owner)), strict=True) for owner in own.values())
        wanted[place] = {pair for some in pairs for pair in some if pair[0] >= 0}
    for other in neuron_groups(rewritten, group.example, call=group.call).values():
        if other.size == size and {(slot.leaf, slot.axis) for slot in other.slots} == set(wanted):
            found: dict[tuple[int, int], set[tuple[int, int]]] = {place: set() for place in wanted}
            for slot in other.slots:
                rows = enumerate(slot.positions.tolist())
                found[slot.leaf, slot.axis] |= {(neuron, place) for neuron, row in rows for place in row}
            if found == wanted:
                return
    fail("group", "be one whose neurons the program does not count", group.name)


def check_same_program(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raises if the program holds a number that depends on how many neurons there are in a group."""
    numbers = [_literals(model, group) for model in (before, after)]
    if numbers[0] != numbers[1]:
        fail("group", "be one whose number of neurons the function does not depend on", group.name)


def _literals(model: Any, group: NeuronGroup) -> Any:
    _, leaves, program = program_of(model, group.call)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    try:
        jaxpr = jax.make_jaxpr(program)(shapes, group.example)
    except Exception as error:
        advice = "If a module keeps its size, `weights.sizes.refitted.register` what makes it anew"
        fail_kind(
            "model", f"run with another number of neurons in {group.name}", f"{type(error).__name__}: {error}", advice
        )
    return list(_numbers_in(jaxpr.jaxpr))


def _numbers_in(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for operand in equation.invars:
            if hasattr(operand, "val") and np.ndim(operand.val) == 0:
                yield repr(np.asarray(operand.val).item())
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(inner, "jaxpr"):
                    yield from _numbers_in(inner.jaxpr)
                elif hasattr(inner, "eqns"):
                    yield from _numbers_in(inner)


class AddNuisance(Rewrite):
    """See `add_nuisance`."""

    key: PRNGKey
    incoming_std: Scalar
    outgoing_std: Scalar | None
    num_groups: int = eqx.field(static=True)
    neurons_per_group: int = eqx.field(static=True)
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        count, size = self.num_groups * self.neurons_per_group, self.neurons_per_group
        if count == 0:
            return model
        original = np.concatenate([np.arange(group.size), np.zeros(count, int)])
        made = [index for index, slot in enumerate(group.slots) if not slot.outgoing]
        read = [index for index, slot in enumerate(group.slots) if slot.outgoing]
        firsts, others = jax.random.split(self.key)
        keys = dict(zip((*made, *read), (*_keys(firsts, len(made)), *_keys(others, len(read))), strict=True))
        member = np.repeat(np.arange(self.num_groups), size)

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            array = jnp.moveaxis(array, axis, 0)
            for index, owner in sorted(owners.items(), key=lambda item: group.slots[item[0]].outgoing):
                new = owner >= group.size
                columns = int(new.sum()) // count
                shape = (count, columns, *array.shape[1:])
                order = np.argsort(owner[new], kind="stable")
                places = np.flatnonzero(new)[order].reshape(count, columns)
                if group.slots[index].outgoing:
                    values = self._cancelling(keys[index], shape, array, places)
                elif math.prod(array.shape[1:]) == 1:  # one number each, such as a variance: as others have it
                    pick = jax.random.randint(keys[index], (self.num_groups,), 0, group.size)
                    values = array[jnp.asarray(_rows_of(owner, group.size))[pick]][member]
                else:
                    drawn = jax.random.normal(keys[index], (self.num_groups, *shape[1:]), array.dtype)
                    values = (jnp.asarray(self.incoming_std, array.dtype) * drawn)[member]
                array = array.at[places].set(values)
            return jnp.moveaxis(array, 0, axis)

        return _resized(model, group, original, change)

    def _cancelling(self, key: Array, shape: tuple[int, ...], array: Array, places: np.ndarray) -> Array:
        """Outgoing weights that add up to zero in each group of new neurons."""
        size = self.neurons_per_group
        if size == 1:
            return jnp.zeros(shape, array.dtype)
        known = np.setdiff1d(np.arange(array.shape[0]), places)
        std = jnp.sqrt(jnp.mean(array[known] ** 2)) if self.outgoing_std is None else self.outgoing_std
        drawn = jax.random.normal(key, (self.num_groups, size, *shape[1:]), array.dtype)
        centred = drawn - jnp.mean(drawn, axis=1, keepdims=True)
        return (jnp.asarray(std, array.dtype) * (size / (size - 1)) ** 0.5 * centred).reshape(shape)


def _keys(key: Array, count: int) -> list[Array]:
    return [key] if count == 1 else list(jax.random.split(key, count)) if count else []


def _rows_of(owner: np.ndarray, size: int) -> np.ndarray:
    """Places of the old neurons along an axis with one place for each."""
    known = (owner >= 0) & (owner < size)
    places = np.flatnonzero(known)
    return places[np.argsort(owner[known], kind="stable")].reshape(size, -1)


@validated
def add_nuisance(
    group: NeuronGroup,
    num_groups: int = 3,
    neurons_per_group: int = 1,
    *,
    key: PRNGKey,
    incoming_std: Scalar = 1.0,
    outgoing_std: Scalar | None = None,
) -> AddNuisance:
    """Appends random neurons without effect to a group, in sets that cancel out.

    Neurons of one set share what makes them: draws of N(0, incoming_std^2) for matrices and kernels, and for arrays
    with one number per neuron (biases, gains, variances) those of a neuron that is there. What reads them adds up to
    zero over each set: zero for sets of one, draws less their mean for larger ones; see
    `neurons.add_random_zero_neurons`.

    Args:
        group: Of the model.
        num_groups: Sets, 0 or more.
        neurons_per_group: Neurons of each, 1 or more.
        key: A PRNG key of either kind.
        incoming_std: Standard deviation of incoming weights; may be traced.
        outgoing_std: Standard deviation of outgoing weights of larger sets; None is the root mean square of those that
            are there.

    Returns:
        The rewrite.

    Raises:
        TypeError: If a count is no integer.
        ValueError: If the group cannot grow, or an option is out of range.
    """
    _check_grows(group)
    check_count("num_groups", num_groups)
    check_count("neurons_per_group", neurons_per_group, minimum=1)
    check_non_negative("incoming_std", incoming_std)
    if outgoing_std is not None:
        check_non_negative("outgoing_std", outgoing_std)
    if neurons_per_group > 1 and not group.cancelling:
        wanted = f"be 1 for {group.name}, as what reads it is not multiplied and summed just as it stands"
        fail("neurons_per_group", wanted, neurons_per_group)
    return AddNuisance(key, incoming_std, outgoing_std, num_groups, neurons_per_group, group)


class Rotate(Rewrite):
    """See `rotate`."""

    matrix: Float[Array, "*copies neurons neurons"] | None
    key: PRNGKey | None
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        drawing: Any = self.key
        own = jax.random.orthogonal(drawing, group.size, (group.copies,)) if self.matrix is None else self.matrix
        if own.shape[-2:] != (group.size, group.size):
            fail("matrix", f"be square, a row per neuron of {group.name} ({group.size})", own.shape)
        own = _each_copy("matrix", own, group, 2)
        other = own if self.matrix is None else jnp.linalg.inv(own).mT

        def change(slot: Slot, array: Array, side: float) -> Array:
            matrix = slot.of_copies((own if side > 0 else other).astype(array.dtype))
            columns = jnp.moveaxis(slot.blocks(array), 0, -1)[..., None]
            turned = jnp.matmul(matrix, columns, precision=jax.lax.Precision.HIGHEST)
            return slot.with_blocks(array, jnp.moveaxis(turned[..., 0], -1, 0))

        return _changed(model, group, change, group.linear)


@validated
def rotate(
    group: NeuronGroup,
    matrix: Float[Array | np.ndarray, "*copies neurons neurons"] | None = None,
    *,
    key: PRNGKey | None = None,
) -> Rotate:
    """Turns the neurons of a group into linear combinations of each other, where nothing stands between two products.

    What makes them is multiplied by an invertible M, what reads them by its inverse transposed: the queries and keys of
    attention heads, their values and outputs, hidden layers of linear networks.

    Args:
        group: Of the model, with `linear`.
        matrix: M, [neurons, neurons], or one for each copy, [copies, neurons, neurons]; invertible.
        key: Draws a rotation for each copy, uniformly, where none is given.

    Returns:
        The rewrite.

    Raises:
        ValueError: If the group has no linear symmetry, or both or neither of `matrix` and `key` are given.
    """
    if group.linear is None:
        fail("group", "have nothing but sums and products between what makes and what reads it", group.name)
    if (matrix is None) == (key is None):
        fail("matrix", "be given, or `key` to draw it", "neither" if key is None else "both")
    return Rotate(None if matrix is None else jnp.asarray(matrix), key, group)


class NullSpace(NamedTuple):
    """Directions of a layer's weights that nothing it sees has.

    Attributes:
        path: Of the weights, as slots of groups have it.
        leaf: Their number among the model's arrays of floating-point numbers.
        axes: Of the weights, along which they are multiplied and summed.
        basis: Orthonormal directions, [null dimension, features], features in the order of the weights' `axes`.
    """

    path: str
    leaf: int
    axes: tuple[int, ...]
    basis: Float[Array | np.ndarray, "null features"]


@validated
def null_space(seen: LayerInputs, *, rtol: float | None = None) -> NullSpace:
    """The null space of what a layer sees, on the host, in float64; see `symmetry.null_spectrum`.

    Args:
        seen: From `seen.layer_inputs`.
        rtol: Singular values below this times the largest count as zero; None is 1e-10, for numbers that are exact.
            What a layer makes of them in float32 has rounding of 1e-7 and wants 1e-6.

    Returns:
        The directions; none if the layer sees all.

    Raises:
        ValueError: If `rtol` is negative.
        TypeError: If what it sees is traced.
    """
    return NullSpace(seen.path, seen.leaf, seen.axes, null_basis(seen.rows, rtol))


class NullPerturb(Rewrite):
    """See `null_perturb`."""

    basis: Float[Array, "null features"]
    std: Scalar
    key: PRNGKey
    leaf: int = eqx.field(static=True)
    axes: tuple[int, ...] = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        leaves, tree, rest = parameters_of(model)
        last = tuple(range(-len(self.axes), 0))
        weights = jnp.moveaxis(jnp.asarray(leaves[self.leaf]), self.axes, last)
        flat = weights.reshape(-1, self.basis.shape[-1])
        moved = perturb_in_null_space(flat, self.basis, self.std, key=self.key)
        leaves[self.leaf] = jnp.moveaxis(moved.reshape(weights.shape), last, self.axes)
        return eqx.combine(jax.tree.unflatten(tree, leaves), rest)


@validated
def null_perturb(space: NullSpace, std: Scalar, *, key: PRNGKey) -> NullPerturb:
    """Adds Gaussian noise to the weights of a layer, in directions that nothing it sees has.

    The function stays on the examples that the space is of, and changes elsewhere.

    Args:
        space: From `null_space`.
        std: Standard deviation of the noise along each direction, not negative. May be traced.
        key: A PRNG key of either kind.

    Returns:
        The rewrite; of an empty space, it changes nothing.

    Raises:
        ValueError: If `std` is negative.
    """
    check_non_negative("std", std)
    return NullPerturb(jnp.asarray(space.basis, float), std, key, space.leaf, space.axes)


class AddPhantom(Rewrite):
    """See `add_phantom`."""

    incoming: Float[Array, "new features"]
    bias: Float[Array, " new"] | None
    group: NeuronGroup = eqx.field(static=True)

    def __call__(self, model: Any) -> Any:
        """The rewritten model."""
        group = current(self.group, model)
        count = len(self.incoming)
        original = np.concatenate([np.arange(group.size), np.zeros(count, int)])

        def change(array: Array, axis: int, owners: dict[int, np.ndarray]) -> Array:
            array = jnp.moveaxis(array, axis, 0)
            for index, owner in sorted(owners.items(), key=lambda item: group.slots[item[0]].outgoing):
                new = np.flatnonzero(owner >= group.size)
                values: Any = 0.0
                if not group.slots[index].outgoing:
                    values = self.bias if array.ndim == 1 else self.incoming.reshape(count, *array.shape[1:])
                array = array.at[new].set(values)
            return jnp.moveaxis(array, 0, axis)

        return _resized(model, group, original, change)


@validated(finite=("pattern",))
def add_phantom(
    group: NeuronGroup,
    model: Any,
    inputs: Float[Array | np.ndarray, "batch ..."],
    pattern: Float[Array | np.ndarray, "batch new"],
    *,
    rtol: Scalar | None = None,
) -> AddPhantom:
    """Appends neurons without effect to a group, whose preactivations show a pattern on inputs of the model.

    Args:
        group: Of the model; made by one matrix, and a bias or none.
        model: The model.
        inputs: Examples.
        pattern: The preactivations wanted of the new neurons, one column each.
        rtol: See `neurons.add_phantom_zero_neurons`.

    Returns:
        The rewrite.

    Raises:
        ValueError: If the group cannot grow, is made by anything else, or sees several vectors for each example.
    """
    _check_grows(group)
    made = [slot for slot in group.slots if not slot.outgoing]
    matrices = [slot for slot in made if len(slot.shape) == 2]
    biases = [slot for slot in made if len(slot.shape) == 1]
    if len(matrices) != 1 or len(biases) > 1 or len(made) > 2 or matrices[0].positions.shape[1] != 1:
        fail("group", "be made by one matrix, and a bias or none", group)
    seen = layer_inputs(model, inputs, matrices[0].path, call=group.call)
    if len(seen.rows) != len(pattern):
        fail("pattern", f"have a row for every vector that {group.name} sees ({len(seen.rows)})", len(pattern))
    rows = jnp.concatenate([seen.rows, jnp.ones((len(seen.rows), len(biases)), seen.rows.dtype)], 1)
    found = least_squares(rows, jnp.asarray(pattern, rows.dtype), rtol).T
    width = seen.rows.shape[1]
    return AddPhantom(found[:, :width], found[:, width] if biases else None, group)


@validated
def check_groups(
    model: Any,
    inputs: Shaped[Array | np.ndarray, "samples ..."],
    *,
    key: PRNGKey,
    call: Callable[[Any, Any], Any] | None = None,
) -> dict[str, Certificate]:
    """Finds the groups of a model, permutes each at random, and compares the outputs.

    Args:
        model: See `groups.neuron_groups`.
        inputs: Examples, first axis first.
        key: Draws the permutations.
        call: See `groups.neuron_groups`.

    Returns:
        A certificate for every group, by name.
    """
    inputs = jnp.asarray(inputs)
    groups = neuron_groups(model, inputs[0], call=call)
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
