"""Groups of neurons of any model, found in its traced program, and the rewrites that each allows."""

import math
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
from dissociation.rewrites._axes import Atoms, Axis, Leaf, Order, Sum, size_of
from dissociation.rewrites._copies import copies_told_apart
from dissociation.rewrites._flow import Flow, Value, equations_of, exponents_of
from dissociation.rewrites._operations import follow


class Slot(NamedTuple):
    """A parameter axis along which the neurons of a group lie.

    Attributes:
        path: Path of the array, as `jax.tree_util.keystr` prints it.
        leaf: Index of the array among the model's floating-point arrays.
        axis: Axis of the array.
        positions: Positions along the axis, [neurons, positions of each].
        outgoing: True for outgoing weights, False for incoming ones.
        shape: Shape of the array.
        layout: Parts of the axis.
        name: Name of the part of `layout` that holds the neurons.
        copy: Index of the copy at each entry. Broadcasts to the array, with one entry per position
            of a neuron along `axis`; zeros for one copy.
    """

    path: str
    leaf: int
    axis: int
    positions: np.ndarray
    outgoing: bool
    shape: tuple[int, ...]
    layout: Axis
    name: tuple[int, ...]
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

    def of_copies(self, each: Any) -> Any:
        """Return the entry of [copies, *rest] for the copy at each position, [positions, ..., *rest]."""
        return each[each.__array_namespace__().moveaxis(self.copy, self.axis, 0)]

    def per_neuron(self, each: Any) -> Any:
        """Return numbers [copies, neurons] as `blocks`, [neurons, positions, ...], with axes possibly of length 1."""
        return each.__array_namespace__().moveaxis(self.of_copies(each), -1, 0)

    def permuted(self, array: Any, permutations: Any) -> Any:
        """Return the array with its neurons permuted by [copies, neurons]."""
        order, library = self.per_neuron(permutations), array.__array_namespace__()
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
        """Return array, axis, and number and positions of neurons of each slot, to compare groups of two models."""
        return {
            (slot.leaf, slot.axis, self.size, np.sort(slot.positions, 1).tobytes())
            for slot in self.slots
        }

    def __repr__(self) -> str:
        kinds = ["permutable"]
        if self.scaling is not None:
            kinds.append(
                "scalable" if self.degree is None else f"homogeneous of degree {self.degree:g}"
            )
        kinds += [
            word
            for word, holds in (
                ("rotatable", self.linear is not None),
                ("normalised", self.normalised),
            )
            if holds
        ]
        size = f"{self.size} neurons" + (
            f" in each of {self.copies} copies" if self.copies > 1 else ""
        )
        lines = [f"NeuronGroup({self.name!r}: {size}, {', '.join(kinds)}"]
        for index, slot in enumerate(self.slots):
            rows = slot.positions.shape[1]
            words = ["read by" if slot.outgoing else "made by", f"{slot.path}[{slot.axis}]"]
            words += [f"in blocks of {rows}"] * (rows > 1)
            if self.scaling is not None and (exponent := self.scaling[index]):
                words.append("x a" if exponent == 1 else f"x a^{exponent:g}")
            lines.append("    " + " ".join(words))
        return "\n".join(dict.fromkeys(lines)) + ")"

    def __pdoc__(self, **_: Any) -> wl.AbstractDoc:  # how Equinox prints it within a rewrite
        return wl.TextDoc(f"{repr(self).partition(chr(10))[0]})")


def _spread(
    axis: Axis, neurons: dict[tuple[int, ...], np.ndarray]
) -> tuple[np.ndarray, dict[tuple[int, ...], np.ndarray]]:
    """Return the old position of each entry of a resized axis and, by name, its new neuron or -1."""
    if isinstance(axis, Leaf):
        if axis.name not in neurons:
            return np.arange(axis.size), {}
        own = neurons[axis.name]
        return own, {axis.name: np.arange(len(own))}
    parts = [_spread(part, neurons) for part in axis.parts]
    old = [size_of(part) for part in axis.parts]
    new = [len(places) for places, _ in parts]
    owners: dict[tuple[int, ...], np.ndarray] = {}
    if isinstance(axis, Order):
        (places, own), backwards = parts[0], (np.diff(axis.order) == -1).all()
        rank = np.argsort(axis.order)
        # A reversed axis stays reversed at another size; in any other order new neurons follow
        # their originals.
        order = np.arange(new[0])[::-1] if backwards else np.argsort(rank[places], kind="stable")
        return rank[places[order]], {name: owner[order] for name, owner in own.items()}
    if isinstance(axis, Sum):
        for k, (_, inner) in enumerate(parts):
            for name, owner in inner.items():
                owners[name] = np.concatenate(
                    [owner if j == k else np.full(n, -1) for j, n in enumerate(new)]
                )
        starts = np.cumsum([0, *old[:-1]])
        return np.concatenate(
            [places + start for (places, _), start in zip(parts, starts, strict=True)]
        ), owners
    grid = np.zeros(math.prod(new), int)
    for (places, inner), size, index in zip(
        parts, old, np.indices(new).reshape(len(new), grid.size), strict=True
    ):
        grid = grid * size + places[index]
        owners |= {name: owner[index] for name, owner in inner.items()}
    return grid, owners


def resized(
    groups: Sequence[NeuronGroup], originals: Sequence[np.ndarray]
) -> tuple[list[NeuronGroup], dict[tuple[int, int], np.ndarray]]:
    """Return groups made of the neurons `originals`, and by (array, axis) the old position of each entry."""
    neurons = {
        slot.name: own for group, own in zip(groups, originals, strict=True) for slot in group.slots
    }
    places: dict[tuple[int, int], np.ndarray] = {}

    def moved(slot: Slot) -> Slot:
        places[slot.leaf, slot.axis], owners = _spread(slot.layout, neurons)
        owner = owners[slot.name]
        there = np.argsort(owner, kind="stable")[np.count_nonzero(owner < 0) :]
        return slot._replace(positions=there.reshape(len(neurons[slot.name]), -1))

    pairs = zip(groups, originals, strict=True)
    return [
        replace(one, size=len(own), slots=tuple(map(moved, one.slots))) for one, own in pairs
    ], places


class GroupReport(NamedTuple):
    """All groups of a model, and all axes that are fixed.

    Attributes:
        groups: Groups by name.
        frozen: Reason for each axis, "path[axis]", of which at least a part is fixed.
    """

    groups: dict[str, NeuronGroup]
    frozen: dict[str, str]

    def __str__(self) -> str:
        lines = [repr(group) for group in self.groups.values()]
        return "\n".join(
            lines + [f"{place} is fixed: {reason}" for place, reason in self.frozen.items()]
        )

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
    """Return the floating-point arrays of a model, their tree structure, and the model without them."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(arrays)
    return leaves, tree, rest


def known_parameters(name: str, model: Any, what: str) -> list[np.ndarray]:
    """Return the parameters of a model in float64; raise unless they are concrete, real and finite."""
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
    """Return everything about a model except parameter values: tree, shapes, constants, other leaves."""
    is_state = lambda part: isinstance(part, eqx.nn.State)  # noqa: E731
    states = [part for part in jax.tree.leaves(model, is_leaf=is_state) if is_state(part)]
    in_state = {id(leaf) for leaf in jax.tree.leaves(states)}

    def part(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        if eqx.is_inexact_array(leaf) or is_key:
            return leaf.shape, leaf.dtype, None
        if is_traced(leaf):  # such as the counter of a batch normalisation, if members are mapped
            return leaf.shape, leaf.dtype, _Any() if id(leaf) in in_state else None
        return leaf.shape, leaf.dtype, np.asarray(leaf).tobytes()

    return jax.tree.structure(model), [part(leaf) for leaf in jax.tree.leaves(model)]


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
    program, flow, made, results = flow_of(
        model, example, call, "take `example`", _CALLED, single=single
    )
    if not made:
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
        flow.atoms.freeze(value.refers, "its indices are what is asked for")
    return _read(flow, program, made, model, example, call)


def _shape_of(array: Any) -> jax.ShapeDtypeStruct:
    if isinstance(array, np.ndarray | np.generic | str) and not number_kind(
        np.asarray(array).dtype
    ):
        fail_kind("example", "hold numbers", describe(array))
    return jax.ShapeDtypeStruct(np.shape(array), jax.dtypes.result_type(array))


def flow_of(
    model: Any, example: Any, call: Call | None, wanted: str, advice: str, *, single: bool = False
) -> tuple[Program, Flow, list[Value], list[Value]]:
    """Return a model's program, its flow, and the values of parameters and results."""
    program = program_of(model, call)
    leaves = program.leaves
    try:
        traced = jax.make_jaxpr(program.run)(list(map(_shape_of, leaves)), example)
    except Exception as error:
        fail_kind("model", wanted, f"{type(model).__name__}: {error}", advice)
    flow, jaxpr = Flow(Atoms(single=single)), traced.jaxpr
    arguments = [flow.array(variable.aval.shape) for variable in jaxpr.invars]
    made = arguments[: len(leaves)]
    for value in arguments[len(leaves) :]:
        flow.freeze(value, "the input has it")
    read = [*jaxpr.outvars, *(v for equation in jaxpr.eqns for v in equation.invars)]
    used = {v for v in read if not hasattr(v, "val")}
    for variable, value in zip(jaxpr.invars, made, strict=False):
        if variable not in used:
            flow.freeze(value, "the function does not depend on it")
    results = follow(flow, jaxpr, [flow.constant(const) for const in traced.consts], arguments)
    return program, flow, made, results


def _read(
    flow: Flow, program: Program, made: list[Value], model: Any, example: Any, call: Any
) -> GroupReport:
    """Build groups from the symbolic dimensions of a program."""
    atoms, structure = flow.atoms, structure_of(model)
    contracted, bent, statistics = (
        [leaf for axis in axes for leaf in atoms.leaves(axis)]
        for axes in (flow.contracted, flow.uneven, flow.counted)
    )
    outgoing, counted = {leaf.name for leaf in contracted}, {leaf.atom for leaf in statistics}
    read, uneven = outgoing - {leaf.name for leaf in bent}, {leaf.atom for leaf in bent}
    places: dict[int, list[Slot]] = {}
    frozen: dict[str, str] = {}
    present = {leaf.atom for value in made for axis in value.axes for leaf in atoms.leaves(axis)}
    copies, copy = copies_told_apart(
        flow, made, {atom for atom in present if not atoms.reason(atom)}
    )
    for index, (path, value) in enumerate(zip(program.paths, made, strict=True)):
        for k, axis in enumerate(value.axes):
            for leaf, positions in atoms.occurrences(axis):
                layout = atoms.resolve(axis or leaf)
                own = copy.get((index, leaf.name), np.zeros([1] * len(value.shape), int))
                slot = Slot(
                    path,
                    index,
                    k,
                    positions,
                    leaf.name in outgoing,
                    value.shape,
                    layout,
                    leaf.name,
                    own,
                )
                places.setdefault(leaf.atom, []).append(slot)
                if atoms.reason(leaf.atom):
                    frozen.setdefault(f"{path}[{k}]", atoms.reason(leaf.atom))
    rows = equations_of(flow)
    groups: dict[str, NeuronGroup] = {}
    for atom, own in places.items():
        if atoms.reason(atom):
            continue
        incoming = [slot for slot in own if not slot.outgoing]
        # Dictionaries have their keys in the order of text, biases before kernels.
        by_text = bool(incoming) and incoming[0].path.removesuffix(".value").endswith("]")
        matrices = [
            slot for slot in incoming if by_text and math.prod(slot.shape) > max(slot.shape)
        ]
        first = next(iter(matrices or incoming), own[0])
        # One array may hold the incoming weights of several groups.
        name = numbered(
            program.layers[first.leaf], {"logits", *groups}
        )  # as representations are named
        scalings, sharing = exponents_of(rows.get(atom, []), own)
        slots = tuple(
            slot._replace(outgoing=slot.outgoing if sharing is None else bool(sharing[i] < 0))
            for i, slot in enumerate(own)
        )
        scaling, degree = _main_scaling(scalings, slots)
        sides = scalings[0] if len(scalings) == 1 and np.all(np.abs(scalings[0]) == 1) else None
        groups[name] = NeuronGroup(
            name=name,
            size=own[0].positions.shape[0],
            slots=slots,
            scalings=scalings,
            scaling=scaling,
            degree=degree,
            sharing=None if atom in counted else sharing,
            cancelling=sharing is not None
            and atom not in counted
            and all(
                share == 0 or (share == -1 and slot.name in read)
                for share, slot in zip(sharing, slots, strict=True)
            ),
            normalised=atom in counted,
            linear=None if atom in uneven | counted else sides,
            example=example,
            call=call,
            copies=copies.get(atom, 1),
            structure=structure,
        )
    return GroupReport(groups, frozen)


def _main_scaling(
    scalings: np.ndarray, slots: tuple[Slot, ...]
) -> tuple[np.ndarray | None, float | None]:
    if not len(scalings):
        return None, None
    firsts = [slots[int(np.flatnonzero(vector)[0])] for vector in scalings]
    matrices = np.array(
        [math.prod(slot.shape) > slot.positions.size and not slot.outgoing for slot in firsts]
    )
    # Scalings of several incoming matrices combine, as of the two of a bilinear layer.
    scaling = scalings[matrices].sum(0) if matrices.any() else scalings.sum(0)
    read = {float(e) for e, slot in zip(scaling, slots, strict=True) if slot.outgoing}
    return scaling, 0.0 - read.pop() if len(read) == 1 else None
