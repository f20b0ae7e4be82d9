"""Groups of neurons of any model, found in its traced program, and the rewrites that they allow."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl

from dissociation._core.checks import check_finite, check_known, fail, fail_kind, is_traced
from dissociation._core.conversion import describe, number_kind
from dissociation._core.validation import validated
from dissociation.models._program import Call, Program, numbered, program_of
from dissociation.rewrites._axes import (
    Atoms,
    Axis,
    Leaf,
    Name,
    Order,
    Product,
    Shape,
    Sum,
    size_of,
    sizes_of,
)
from dissociation.rewrites._control_flow import follow
from dissociation.rewrites._copies import independent_copies
from dissociation.rewrites._flow import Flow, Value, equations_of, exponents_of


class Slot(NamedTuple):
    """A parameter axis along which the neurons of a group lie.

    Attributes:
        path: Path of the array, as `jax.tree_util.keystr` prints it.
        leaf: Index of the array among the model's floating-point arrays.
        axis: Axis of the array.
        positions: Positions along the axis, [neurons, positions of each].
        outgoing: True for outgoing weights, False for incoming ones.
        shape: Shape of the array.
        layout: Symbolic dimensions of the axis.
        name: Name of the occurrence in `layout` of the neurons' dimension.
        copy: Index of the copy at each entry. Broadcasts to the array, with one entry per position
            of a neuron along `axis`; zeros for one copy.
    """

    path: str
    leaf: int
    axis: int
    positions: np.ndarray
    outgoing: bool
    shape: Shape
    layout: Axis
    name: Name
    copy: np.ndarray

    def blocks(self, array: Any) -> Any:
        """Return the weights at each neuron, [neurons, positions, ...], the other axes in order."""
        return array.__array_namespace__().moveaxis(array, self.axis, 0)[self.positions]

    def rows(self, array: Any) -> Any:
        """Return the weights at each neuron, [neurons, numbers]."""
        return self.blocks(array).reshape(len(self.positions), -1)

    def with_blocks(self, array: Any, blocks: Any) -> Any:
        """Return the array with other `blocks`."""
        if isinstance(array, np.ndarray):
            moved = np.moveaxis(array, self.axis, 0).copy()
            moved[self.positions] = blocks
            return np.moveaxis(moved, 0, self.axis)
        moved = jnp.moveaxis(array, self.axis, 0).at[self.positions].set(blocks)
        return jnp.moveaxis(moved, 0, self.axis)

    def of_copies(self, numbers: Any) -> Any:
        """Return the entry for the copy at each position, [positions, ..., *trailing].

        `numbers` have shape [copies, *trailing].
        """
        copy = numbers.__array_namespace__().moveaxis(self.copy, self.axis, 0)
        return numbers[copy]

    def per_neuron(self, numbers: Any) -> Any:
        """Return numbers [copies, neurons] as `blocks`, [neurons, positions, ...].

        Axes may have length 1.
        """
        return numbers.__array_namespace__().moveaxis(self.of_copies(numbers), -1, 0)

    def permuted(self, array: Any, permutations: Any) -> Any:
        """Return the array with its neurons permuted by [copies, neurons]."""
        library = array.__array_namespace__()
        order = self.per_neuron(permutations)
        return self.with_blocks(array, library.take_along_axis(self.blocks(array), order, axis=0))


@dataclass(frozen=True, eq=False)
class NeuronGroup:
    """Neurons that may be permuted without a change of the function.

    Attributes:
        name: Name of the layer of incoming weights, as of its activities in
            `models.representations`.
        size: Number of neurons in each copy.
        slots: Parameter axes of the neurons, in the order of the model's arrays.
        scalings: Exponents [scalings, slots]: for each row, multiplying every slot by a^exponent,
            with a > 0 per neuron, keeps the function. No rows if nothing can be scaled.
        scaling: Exponents that `scale` uses, one per slot; incoming weights are multiplied by a.
            None if nothing can be scaled.
        degree: Degree of homogeneity of the input of the next layer in the incoming weights: 1 for
            ReLU, 2 for a bilinear layer. None if the group cannot be scaled or has no single
            degree.
        sharing: Exponents of the number of copies when neurons are duplicated, one per slot. None
            if they cannot be, as under a statistic over neurons.
        cancelling: True if neurons with equal incoming weights cancel when their outgoing weights
            add up to zero.
        normalised: True if a statistic is computed over the neurons.
        linear: Linear symmetry, one number per slot: 1 if an invertible M [neurons, neurons]
            multiplies the slot, -1 if the transposed inverse of M does. None if there is more than
            sums and products between incoming and outgoing weights.
        example: Shapes and dtypes that the model was traced with.
        call: Function that calls the model, see `neuron_groups`.
        copies: Number of independent copies, such as heads or stacked layers. 1 also if all copies
            must move together.
        structure: Structure of the model, see `structure_of`.
    """

    name: str
    size: int
    slots: tuple[Slot, ...]
    scalings: np.ndarray
    scaling: np.ndarray | None
    degree: float | None
    sharing: np.ndarray | None
    cancelling: bool
    normalised: bool
    linear: np.ndarray | None
    example: Any
    call: Call | None
    copies: int
    structure: Any

    def places(self) -> set[tuple[int, int, int, bytes]]:
        """Return array, axis, and number and positions of neurons of each slot.

        They are equal for equal groups of two models.
        """
        return {
            (slot.leaf, slot.axis, self.size, np.sort(slot.positions, 1).tobytes())
            for slot in self.slots
        }

    def __repr__(self) -> str:
        kinds = ["permutable"]
        if self.degree is not None:
            kinds.append(f"homogeneous of degree {self.degree:g}")
        elif self.scaling is not None:
            kinds.append("scalable")
        if self.linear is not None:
            kinds.append("rotatable")
        if self.normalised:
            kinds.append("normalised")
        size = f"{self.size} neurons"
        if self.copies > 1:
            size += f" in each of {self.copies} copies"
        lines = [f"NeuronGroup({self.name!r}: {size}, {', '.join(kinds)}"]
        lines += map(self._slot_line, range(len(self.slots)))
        return "\n".join(dict.fromkeys(lines)) + ")"

    def _slot_line(self, index: int) -> str:
        slot = self.slots[index]
        verb = "read by" if slot.outgoing else "made by"
        line = f"    {verb} {slot.path}[{slot.axis}]"
        num_positions = slot.positions.shape[1]
        if num_positions > 1:
            line += f" in blocks of {num_positions}"
        if self.scaling is None or not self.scaling[index]:
            return line
        line += " x a"
        if self.scaling[index] != 1:
            line += f"^{self.scaling[index]:g}"
        return line

    def __pdoc__(self, **_: Any) -> wl.AbstractDoc:  # how Equinox prints it within a rewrite
        return wl.TextDoc(f"{repr(self).partition(chr(10))[0]})")


Spread = tuple[np.ndarray, dict[Name, np.ndarray]]
"""Old position of each entry of a resized axis, and by name its new neuron or -1."""


def _spread(axis: Axis, neurons: dict[Name, np.ndarray]) -> Spread:
    """Resize an axis, given the original of each new neuron by name."""
    if isinstance(axis, Leaf):
        if axis.name not in neurons:
            return np.arange(axis.size), {}
        originals = neurons[axis.name]
        return originals, {axis.name: np.arange(len(originals))}
    children = [_spread(child, neurons) for child in axis.children]
    if isinstance(axis, Order):
        return _spread_order(axis.order, *children[0])
    if isinstance(axis, Sum):
        return _spread_sum(axis, children)
    return _spread_product(axis, children)


def _spread_order(
    order: np.ndarray, positions: np.ndarray, owners: dict[Name, np.ndarray]
) -> Spread:
    rank = np.argsort(order)
    # A reversed axis stays reversed at another size; in any other order new neurons follow their
    # originals.
    new_order = np.argsort(rank[positions], kind="stable")
    if (np.diff(order) == -1).all():
        new_order = np.arange(len(positions))[::-1]
    new_owners = {name: owner[new_order] for name, owner in owners.items()}
    return rank[positions[new_order]], new_owners


def _spread_sum(axis: Sum, children: list[Spread]) -> Spread:
    num_new = sum(len(positions) for positions, _ in children)
    new_positions = []
    new_owners = {}
    old_start = 0
    new_start = 0
    for size, (positions, owners) in zip(sizes_of(axis), children, strict=True):
        new_end = new_start + len(positions)
        new_positions.append(positions + old_start)
        for name, owner in owners.items():
            new_owners[name] = np.full(num_new, -1)
            new_owners[name][new_start:new_end] = owner
        old_start += size
        new_start = new_end
    return np.concatenate(new_positions), new_owners


def _spread_product(axis: Product, children: list[Spread]) -> Spread:
    lengths = [len(positions) for positions, _ in children]
    grid = np.zeros(math.prod(lengths), int)
    new_owners = {}
    indices = np.indices(lengths).reshape(len(lengths), grid.size)
    for k, (positions, owners) in enumerate(children):
        grid = grid * size_of(axis.children[k]) + positions[indices[k]]
        for name, owner in owners.items():
            new_owners[name] = owner[indices[k]]
    return grid, new_owners


def resized(
    groups: Sequence[NeuronGroup], originals: Sequence[np.ndarray]
) -> tuple[list[NeuronGroup], dict[tuple[int, int], np.ndarray]]:
    """Return groups of the neurons `originals`, and old positions of entries by array and axis."""
    neurons = {}
    for group, group_originals in zip(groups, originals, strict=True):
        for slot in group.slots:
            neurons[slot.name] = group_originals

    sources: dict[tuple[int, int], np.ndarray] = {}
    resized_groups = []
    for group, group_originals in zip(groups, originals, strict=True):
        size = len(group_originals)
        slots = []
        for slot in group.slots:
            sources[slot.leaf, slot.axis], owners = _spread(slot.layout, neurons)
            owner = owners[slot.name]
            positions = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
            slots.append(slot._replace(positions=positions.reshape(size, -1)))
        resized_groups.append(replace(group, size=size, slots=tuple(slots)))
    return resized_groups, sources


class GroupReport(NamedTuple):
    """All groups of a model, and all axes that are fixed.

    Attributes:
        groups: Groups by name.
        frozen: Reason for each axis, "path[axis]", of which at least a part is fixed.
    """

    groups: dict[str, NeuronGroup]
    frozen: dict[str, str]

    def __str__(self) -> str:
        lines = list(map(repr, self.groups.values()))
        for axis, reason in self.frozen.items():
            lines.append(f"{axis} is fixed: {reason}")
        return "\n".join(lines)

    __repr__ = __str__


@validated
def neuron_groups(
    model: Any, example: Any, *, call: Call | None = None, single: bool = False
) -> dict[str, NeuronGroup]:
    """Return the groups of neurons of a model, by name.

    Args:
        model: Any PyTree of arrays and functions: an Equinox model, or (model, state) for one with
            `eqx.nn.State`, used in inference mode. Floating-point arrays are parameters, others are
            constants.
        example: One example, or anything with its shape and dtype.
        call: Function from model and example to outputs; default: `model(example)`, or
            `model(example, state)[0]`.
        single: If True, include neurons that are alone in their layer.

    Returns:
        Groups of at least two neurons, or one if `single`, in the order of their incoming weights.
        `group_report` gives the reason for axes that are fixed.

    Raises:
        TypeError: If the model does not accept the example, or holds no floating-point arrays.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> for group in neuron_groups(model, jax.numpy.ones(4)).values():
        ...     print(group.name, group.size, group.degree, [slot.path for slot in group.slots])
        layers[0] 8 1.0 ['.layers[0].weight', '.layers[0].bias', '.layers[1].weight']
        layers[1] 8 1.0 ['.layers[1].weight', '.layers[1].bias', '.layers[2].weight']
    """
    return group_report(model, example, call=call, single=single).groups


def parameters_of(model: Any) -> tuple[list[Any], Any, Any]:
    """Return the floating-point arrays of a model, their tree, and the model without them."""
    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(arrays)
    return leaves, tree, static


def known_parameters(name: str, model: Any, what: str) -> list[np.ndarray]:
    """Return the parameters of a model in float64; raise unless they are real, finite and known."""
    leaves: Any = parameters_of(model)[0]
    check_known(f"{what} of the host", **{name: leaves})
    for leaf in leaves:
        check_finite(name, leaf)
    if any(map(np.iscomplexobj, leaves)):
        fail(name, "have real parameters", "complex ones")
    return [np.asarray(leaf, np.float64) for leaf in leaves]


class _Any:
    """Value of a traced constant in the state, which equals all values."""

    def __eq__(self, other: object) -> bool:
        return True


def structure_of(model: Any) -> tuple[Any, list[Any]]:
    """Return a model without values of parameters: its tree, shapes, constants and other leaves."""
    nodes = jax.tree.leaves(model, is_leaf=_is_state)
    states = list(filter(_is_state, nodes))
    state_ids = set(map(id, jax.tree.leaves(states)))
    described = []
    for leaf in jax.tree.leaves(model):
        described.append(_described(leaf, is_in_state=id(leaf) in state_ids))
    return jax.tree.structure(model), described


def _is_state(node: Any) -> bool:
    return isinstance(node, eqx.nn.State)


def _described(leaf: Any, *, is_in_state: bool) -> Any:
    """Return the shape, dtype and content of an array; parameters and keys have no content."""
    if not hasattr(leaf, "shape"):
        return leaf
    content = None
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    if not (is_key or eqx.is_inexact_array(leaf)):
        if not is_traced(leaf):
            content = np.asarray(leaf).tobytes()
        elif is_in_state:  # such as the counter of a batch normalisation, if members are mapped
            content = _Any()
    return leaf.shape, leaf.dtype, content


_CALLED = (
    "`example` is one, not a batch; a model that is called otherwise needs `call=lambda "
    "model, example: ...`"
)


@validated
def group_report(
    model: Any, example: Any, *, call: Call | None = None, single: bool = False
) -> GroupReport:
    """Return the groups of a model and the fixed axes with reasons; its text has a line for each.

    Arguments and errors are those of `neuron_groups`.
    """
    if call is None and callable(example):
        fail_kind(
            "example",
            "be arrays, and `model` a function of them",
            describe(example),
            "Is `model` given second?",
        )
    example = jax.tree.map(_shape_of, example)
    program, flow, parameters, results = flow_of(
        model, example, call, "take `example`", _CALLED, single=single
    )
    if not parameters:
        advice = (
            "Arrays that a function closes over are not found. Pass them as `model`, and "
            "the function as `call`"
        )
        fail_kind(
            "model",
            "hold arrays of floating-point numbers",
            f"{type(model).__name__}, which holds none",
            advice,
        )
    if not results:
        fail_kind(
            "model",
            "return arrays for `example`",
            f"{type(model).__name__}, which returns none",
            _CALLED,
        )
    for value in results:
        flow.freeze(value, "the output has it")
        flow.atoms.freeze(value.indexed, "its indices are what is asked for")
    return _read(flow, program, parameters, model, example, call)


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    if isinstance(array, np.ndarray | np.generic | str) and not number_kind(
        np.asarray(array).dtype
    ):
        fail_kind("example", "hold numbers", describe(array))
    return jax.ShapeDtypeStruct(np.shape(array), jax.dtypes.result_type(array))


def flow_of(
    model: Any,
    example: Any,
    call: Call | None,
    requirement: str,
    advice: str,
    *,
    single: bool = False,
) -> tuple[Program, Flow, list[Value], list[Value]]:
    """Return a model's program, its flow, and the values of parameters and results."""
    program = program_of(model, call)
    try:
        traced = jax.make_jaxpr(program.run)(list(map(_shape_of, program.leaves)), example)
    except Exception as error:
        fail_kind("model", requirement, f"{type(model).__name__}: {error}", advice)

    flow = Flow(Atoms(single=single))
    jaxpr = traced.jaxpr
    arguments = [flow.array(variable.aval.shape) for variable in jaxpr.invars]
    parameters = arguments[: len(program.leaves)]
    for value in arguments[len(program.leaves) :]:
        flow.freeze(value, "the input has it")

    read = list(jaxpr.outvars)
    for equation in jaxpr.eqns:
        read += equation.invars
    used = {variable for variable in read if not hasattr(variable, "val")}
    for variable, value in zip(jaxpr.invars, parameters, strict=False):
        if variable not in used:
            flow.freeze(value, "the function does not depend on it")
    results = follow(flow, jaxpr, list(map(flow.constant, traced.consts)), arguments)
    return program, flow, parameters, results


def _read(
    flow: Flow, program: Program, parameters: list[Value], model: Any, example: Any, call: Any
) -> GroupReport:
    """Build groups from the symbolic dimensions of a program."""
    structure = structure_of(model)
    contracted = _leaves(flow, flow.contracted)
    nonlinear = _leaves(flow, flow.nonlinear)
    outgoing = {leaf.name for leaf in contracted}
    linear_reads = outgoing - {leaf.name for leaf in nonlinear}
    nonlinear_atoms = {leaf.atom for leaf in nonlinear}
    reduced_atoms = {leaf.atom for leaf in _leaves(flow, flow.reduced)}
    slots_of_atom, num_copies = _slots(flow, program, parameters, outgoing)

    rows = equations_of(flow)
    groups: dict[str, NeuronGroup] = {}
    for atom, slots in slots_of_atom.items():
        if flow.atoms.reason(atom):
            continue
        # One array may hold the incoming weights of several groups. Names are those of
        # representations.
        name = numbered(program.layers[_naming_slot(slots).leaf], {"logits", *groups})
        scalings, sharing = exponents_of(rows.get(atom, []), slots)
        if sharing is not None:
            for i, exponent in enumerate(sharing):
                slots[i] = slots[i]._replace(outgoing=bool(exponent < 0))
        scaling, degree = _main_scaling(scalings, slots)

        normalised = atom in reduced_atoms
        if normalised:
            sharing = None
        linear = None
        is_invertible = len(scalings) == 1 and np.all(np.abs(scalings[0]) == 1)
        if is_invertible and not normalised and atom not in nonlinear_atoms:
            linear = scalings[0]
        groups[name] = NeuronGroup(
            name=name,
            size=slots[0].positions.shape[0],
            slots=tuple(slots),
            scalings=scalings,
            scaling=scaling,
            degree=degree,
            sharing=sharing,
            cancelling=_cancels(sharing, slots, linear_reads),
            normalised=normalised,
            linear=linear,
            example=example,
            call=call,
            copies=num_copies.get(atom, 1),
            structure=structure,
        )
    return GroupReport(groups, _frozen(flow, program, parameters))


def _leaves(flow: Flow, axes: list[Axis]) -> list[Leaf]:
    return [leaf for axis in axes for leaf in flow.atoms.leaves(axis)]


def _slots(
    flow: Flow, program: Program, parameters: list[Value], outgoing: set[Name]
) -> tuple[dict[int, list[Slot]], dict[int, int]]:
    """Return the slots and the number of copies of each dimension."""
    present = set()
    for value in parameters:
        for axis in value.axes:
            present.update(leaf.atom for leaf in flow.atoms.leaves(axis))
    free = {atom for atom in present if not flow.atoms.reason(atom)}
    num_copies, copy_at = independent_copies(flow, parameters, free)

    slots_of_atom = defaultdict(list)
    for index, (path, value) in enumerate(zip(program.paths, parameters, strict=True)):
        single_copy = np.zeros([1] * len(value.shape), int)
        for k, axis in enumerate(value.axes):
            for leaf, positions in flow.atoms.occurrences(axis):
                slot = Slot(
                    path=path,
                    leaf=index,
                    axis=k,
                    positions=positions,
                    outgoing=leaf.name in outgoing,
                    shape=value.shape,
                    layout=flow.atoms.resolve(axis or leaf),
                    name=leaf.name,
                    copy=copy_at.get((index, leaf.name), single_copy),
                )
                slots_of_atom[leaf.atom].append(slot)
    return slots_of_atom, num_copies


def _frozen(flow: Flow, program: Program, parameters: list[Value]) -> dict[str, str]:
    """Return the reason for each axis of which at least a part is fixed."""
    frozen: dict[str, str] = {}
    for path, value in zip(program.paths, parameters, strict=True):
        for k, axis in enumerate(value.axes):
            for leaf in flow.atoms.leaves(axis):
                reason = flow.atoms.reason(leaf.atom)
                if reason:
                    frozen.setdefault(f"{path}[{k}]", reason)
    return frozen


def _naming_slot(slots: list[Slot]) -> Slot:
    """Return the slot whose layer names a group: the first of incoming weights."""
    incoming = [slot for slot in slots if not slot.outgoing]
    if not incoming:
        return slots[0]
    # Dictionaries have their keys in the order of text, biases before kernels.
    if incoming[0].path.removesuffix(".value").endswith("]"):
        for slot in incoming:
            if math.prod(slot.shape) > max(slot.shape):
                return slot
    return incoming[0]


def _cancels(sharing: np.ndarray | None, slots: list[Slot], linear_reads: set[Name]) -> bool:
    """Return True if outgoing weights of duplicates, which add up, are all that reads them."""
    if sharing is None:
        return False
    for exponent, slot in zip(sharing, slots, strict=True):
        if exponent != 0 and not (exponent == -1 and slot.name in linear_reads):
            return False
    return True


def _main_scaling(
    scalings: np.ndarray, slots: list[Slot]
) -> tuple[np.ndarray | None, float | None]:
    """Return the exponents that `scale` uses, and the degree of homogeneity."""
    if not len(scalings):
        return None, None
    is_matrix = np.zeros(len(scalings), bool)
    for i, vector in enumerate(scalings):
        first = slots[int(np.flatnonzero(vector)[0])]
        is_matrix[i] = math.prod(first.shape) > first.positions.size and not first.outgoing
    # Scalings of several incoming matrices combine, as of the two of a bilinear layer.
    if is_matrix.any():
        scalings = scalings[is_matrix]
    scaling = scalings.sum(0)
    read = {float(e) for e, slot in zip(scaling, slots, strict=True) if slot.outgoing}
    if len(read) != 1:
        return scaling, None
    return scaling, 0.0 - read.pop()
