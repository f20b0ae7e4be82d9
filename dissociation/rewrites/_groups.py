"""Groups of neurons of any model: what may be permuted, scaled or rotated without a change of the function.

The groups are found from the program that the model traces to; nothing is said by hand. A neuron is an index of an atom
(`axes`): its slots are places in the model's arrays that move together.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import wadler_lindig as wl

from dissociation._core.checks import check_finite, fail, fail_kind, is_traced
from dissociation._core.conversion import describe
from dissociation._core.validation import validated
from dissociation.models._program import program_of
from dissociation.rewrites._axes import Atoms, Axis, has_order
from dissociation.rewrites._copies import copies_told_apart
from dissociation.rewrites._flow import Equation, Flow, Value
from dissociation.rewrites._operations import follow

TOLERANCE = 1e-9


class Slot(NamedTuple):
    """Where the neurons of a group lie in one array of a model.

    Attributes:
        path: Of the array, as `jax.tree_util.keystr` writes it.
        leaf: Its number among the model's arrays of floating-point numbers.
        axis: Of the array.
        positions: Along the axis, [neurons, positions of each].
        outgoing: Whether the neurons are read here, in a product that is summed over them, and not made.
        shape: Of the array.
        layout: Of the axis, for other numbers of neurons: parts, nested or end to end, of which `name` are the neurons.
        name: In the layout.
        copy: Which copy of the neurons is where: an array that broadcasts to that of the model, but that it has along
            `axis` one entry for each position of a neuron. Zeros where there is one copy.
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
        """What lies at each neuron in the array: [neurons, positions, ...], the other axes in their order."""
        library = np if isinstance(array, np.ndarray) else jnp
        return library.moveaxis(array, self.axis, 0)[self.positions]

    def rows(self, array: Any) -> Any:
        """What lies at each neuron in the array: [neurons, numbers]."""
        return self.blocks(array).reshape(len(self.positions), -1)

    def with_blocks(self, array: Any, blocks: Any) -> Any:
        """The array with other `blocks`."""
        if isinstance(array, np.ndarray):
            moved = np.moveaxis(array, self.axis, 0).copy()
            moved[self.positions] = blocks
            return np.moveaxis(moved, 0, self.axis)
        moved = jnp.moveaxis(array, self.axis, 0).at[self.positions].set(blocks)
        return jnp.moveaxis(moved, 0, self.axis)

    def of_copies(self, each: Any) -> Any:
        """Of something with copies along its first axis, that of the copy at each position: [positions, ..., *rest]."""
        return each[np.moveaxis(self.copy, self.axis, 0)]

    def per_neuron(self, each: Any) -> Any:
        """Numbers [copies, neurons] as `blocks` has them: [neurons, positions, ...]; axes may be of length 1."""
        library = np if isinstance(each, np.ndarray) else jnp
        return library.moveaxis(self.of_copies(each), -1, 0)

    def permuted(self, array: Any, permutations: Any) -> Any:
        """The array with neurons `permutations` [copies, neurons] at the places of the neurons."""
        library = np if isinstance(array, np.ndarray) else jnp
        order = self.per_neuron(permutations)
        return self.with_blocks(array, library.take_along_axis(self.blocks(array), order, axis=0))


@dataclass(frozen=True, eq=False)
class NeuronGroup:
    """Neurons that may change places.

    Attributes:
        name: After the array that makes them; what they show is called by its place, see `models.representations`.
        size: How many they are, in each copy.
        slots: Where they lie, in the order of the model's arrays.
        scalings: Exponents [scalings, slots]: the function stays if every slot is multiplied by a^exponent, for each
            neuron with a positive factor a of its own, and for each row alone. No rows where nothing can be scaled.
        scaling: The exponents, one per slot, that `scale` takes: what makes the neurons is multiplied by a. None where
            nothing can be.
        degree: Of homogeneity, of what the next layer reads in what makes the neurons: 1 for ReLU, 2 for a bilinear
            layer; None where the group cannot be scaled or it has no one degree.
        sharing: Exponents, one per slot, of the number of copies where neurons are duplicated; None where they must
            not be, as where a statistic is taken over them.
        cancelling: Whether neurons that are made alike cancel where what reads them adds up to zero: it is multiplied
            and summed as it stands.
        normalised: Whether a statistic is taken over them.
        linear: Sides of a general linear symmetry, one per slot: arrays with 1 are multiplied by an invertible M
            [neurons, neurons], those with -1 by its inverse transposed; None where there is more than sums and products
            between what makes them and what reads them.
        example: What the model was traced for: shapes.
        call: How.
        copies: How many times they are there, as in heads or the layers of a stack, where each copy may be permuted,
            scaled and rotated by itself; 1 also where all copies must move alike.
        structure: Of the model, see `structure_of`.
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
    call: Callable[[Any, Any], Any] | None
    copies: int = 1
    structure: Any = None

    def by_axis(self) -> dict[tuple[int, int], list[int]]:
        """Numbers of the slots by array and axis."""
        found: dict[tuple[int, int], list[int]] = {}
        for index, slot in enumerate(self.slots):
            found.setdefault((slot.leaf, slot.axis), []).append(index)
        return found

    def __repr__(self) -> str:
        kinds = ["permutable"]
        if self.scaling is not None:
            kinds.append("scalable" if self.degree is None else f"homogeneous of degree {self.degree:g}")
        kinds += [
            word for word, holds in (("rotatable", self.linear is not None), ("normalised", self.normalised)) if holds
        ]
        made = ", ".join(dict.fromkeys(f"{s.path}[{s.axis}]" for s in self.slots if not s.outgoing))
        read = ", ".join(dict.fromkeys(f"{s.path}[{s.axis}]" for s in self.slots if s.outgoing))
        size = f"{self.size} neurons" + (f" in each of {self.copies} copies" if self.copies > 1 else "")
        return f"NeuronGroup({self.name!r}: {size}, {', '.join(kinds)}; made by {made}; read by {read})"

    def __pdoc__(self, **_: Any) -> wl.AbstractDoc:  # how Equinox prints it within a rewrite
        return wl.TextDoc(repr(self))


class GroupReport(NamedTuple):
    """All groups of a model, and what stands still.

    Attributes:
        groups: By name.
        frozen: For every array and axis that cannot be permuted as a whole, why.
    """

    groups: dict[str, NeuronGroup]
    frozen: dict[str, str]

    def __str__(self) -> str:
        lines = [repr(group) for group in self.groups.values()]
        return "\n".join(lines + [f"{place} stands still: {reason}" for place, reason in self.frozen.items()])

    __repr__ = __str__


@functools.singledispatch
def stated_groups(model: Any, example: Any) -> dict[str, NeuronGroup] | None:
    """Groups that somebody states for a type of models, by `stated_groups.register(type)`; None: they are found."""
    return None


@validated
def neuron_groups(
    model: Any, example: Any, *, call: Callable[[Any, Any], Any] | None = None, single: bool = False
) -> dict[str, NeuronGroup]:
    """The groups of neurons of a model, by name.

    Args:
        model: Any PyTree of arrays and functions: an Equinox model, or (model, state) for one with `eqx.nn.State`,
            taken in inference mode. Arrays of floating-point numbers are parameters, others are constants.
        example: One example, or anything with its shape and dtype.
        call: From model and example to outputs; default: `model(example)`, and for a pair `model(example, state)[0]`.
        single: Whether neurons that are alone in their layer are found, too.

    Returns:
        Groups of two neurons and more, or of one and more, in the order of the arrays that make them. `group_report`
        says what stands still, and why.

    Raises:
        TypeError: If the model does not take the example, or holds no arrays of floating-point numbers.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> for group in neuron_groups(model, jax.numpy.ones(4)).values():
        ...     print(group.name, group.size, group.degree, [slot.path for slot in group.slots])
        layers[0] 8 1.0 ['.layers[0].weight', '.layers[0].bias', '.layers[1].weight']
        layers[1] 8 1.0 ['.layers[1].weight', '.layers[1].bias', '.layers[2].weight']
    """
    stated = stated_groups(model, example)
    return group_report(model, example, call=call, single=single).groups if stated is None else stated


def parameters_of(model: Any) -> tuple[list[Any], Any, Any]:
    """The floating-point arrays of a model, their tree, and everything else."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, tree = jax.tree.flatten(arrays)
    return leaves, tree, rest


def known_parameters(name: str, model: Any, what: str) -> list[np.ndarray]:
    """The parameters of a model in float64; raises unless they are known, real and finite."""
    leaves = parameters_of(model)[0]
    if any(map(is_traced, leaves)):
        raise TypeError(f"`{name}` must be known: {what} of the host, got traced arrays.")
    for leaf in leaves:
        check_finite(name, leaf)
    if any(map(np.iscomplexobj, leaves)):
        fail(name, "have real parameters", "complex ones")
    return [np.asarray(leaf, np.float64) for leaf in leaves]


def structure_of(model: Any) -> tuple[Any, list[Any]]:
    """What a model is but for its parameters: its tree, shapes, constants, and leaves that are no arrays."""

    def part(leaf: Any) -> Any:
        if not hasattr(leaf, "shape"):
            return leaf
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        constant = not (eqx.is_inexact_array(leaf) or is_traced(leaf) or is_key)
        return leaf.shape, leaf.dtype, np.asarray(leaf).tobytes() if constant else None

    return jax.tree.structure(model), [part(leaf) for leaf in jax.tree.leaves(model)]


_CALLED = "`example` is one, not a batch; a model that is called otherwise needs `call=lambda model, example: ...`"


@validated
def group_report(
    model: Any, example: Any, *, call: Callable[[Any, Any], Any] | None = None, single: bool = False
) -> GroupReport:
    """Return what `neuron_groups` finds, and what stands still, with the reason; printed, a line each.

    Arguments and errors are those of `neuron_groups`.
    """
    if call is None and callable(example):
        fail_kind("example", "be arrays, and `model` a function of them", describe(example), "Is `model` given second?")
    paths, leaves, program = program_of(model, call)
    if not leaves:
        advice = "What a function closes over is not seen: give the arrays as `model`, and the function as `call`"
        fail_kind("model", "hold arrays of floating-point numbers", f"{type(model).__name__}, which holds none", advice)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), (leaves, example))
    try:
        traced = jax.make_jaxpr(program)(*shapes)
    except Exception as error:
        fail_kind("model", "take `example`", f"{type(model).__name__}: {error}", _CALLED)
    if not traced.jaxpr.outvars:
        fail_kind("model", "return arrays for `example`", f"{type(model).__name__}, which returns none", _CALLED)
    flow, made, results = flow_of(traced, leaves, single=single)
    for value in results:
        flow.freeze(value, "the output has it")
        flow.atoms.freeze(value.refers, "its indices are what is asked for")
    return _read(flow, paths, made, model, shapes[1], call)


def flow_of(traced: Any, leaves: Sequence[Any], *, single: bool = False) -> tuple[Flow, list[Value], list[Value]]:
    """What is read off a program of parameters `leaves` and inputs; what is known of parameters and of results."""
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
    return flow, made, follow(flow, jaxpr, [flow.constant(const) for const in traced.consts], arguments)


def _read(flow: Flow, paths: Sequence[str], made: list[Value], model: Any, example: Any, call: Any) -> GroupReport:
    """Groups from atoms."""
    atoms, structure = flow.atoms, structure_of(model)
    start = "[0]" if isinstance(model, tuple) and isinstance(model[-1], eqx.nn.State) else ""
    contracted, bent, statistics = (
        [leaf for axis in axes for leaf in atoms.leaves(axis)] for axes in (flow.contracted, flow.uneven, flow.counted)
    )
    outgoing, counted = {leaf.name for leaf in contracted}, {leaf.atom for leaf in statistics}
    read, uneven = outgoing - {leaf.name for leaf in bent}, {leaf.atom for leaf in bent}
    places: dict[int, list[Slot]] = {}
    frozen: dict[str, str] = {}
    present = {leaf.atom for value in made for axis in value.axes for leaf in atoms.leaves(axis)}
    copies, copy = copies_told_apart(flow, made, {atom for atom in present if not atoms.reason(atom)})
    for index, (path, value) in enumerate(zip(paths, made, strict=True)):
        for k, axis in enumerate(value.axes):
            for leaf, positions in atoms.occurrences(axis):
                layout = atoms.resolve(axis or leaf)
                own = copy.get((index, leaf.name), np.zeros([1] * len(value.shape), int))
                slot = Slot(path, index, k, positions, leaf.name in outgoing, value.shape, layout, leaf.name, own)
                places.setdefault(leaf.atom, []).append(slot)
                if atoms.reason(leaf.atom):
                    frozen.setdefault(f"{path}[{k}]", atoms.reason(leaf.atom))
    rows = _rows(flow)
    groups: dict[str, NeuronGroup] = {}
    for atom, own in places.items():
        if atoms.reason(atom):
            continue
        name = _name_of(own).removeprefix(start).lstrip(".")
        numbered = (f"{name}:{number}" for number in itertools.count(2))
        name = next(each for each in itertools.chain([name], numbered) if each not in groups)
        scalings, sharing = _exponents(rows.get(atom, []), own)
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
                share == 0 or (share == -1 and slot.name in read) for share, slot in zip(sharing, slots, strict=True)
            ),
            normalised=atom in counted,
            linear=None if atom in uneven | counted else sides,
            example=example,
            call=call,
            copies=copies.get(atom, 1),
            structure=structure,
        )
    return GroupReport(groups, frozen)


def _name_of(slots: list[Slot]) -> str:
    first = next((slot for slot in slots if not slot.outgoing), slots[0])
    head, dot, last = first.path.rpartition(".")
    return (head if dot and head and last.startswith(("weight", "bias")) else first.path).lstrip(".")


Row = tuple[tuple[tuple[tuple[int, ...], float], ...], float]


def _rows(flow: Flow) -> dict[int, list[Row]]:
    """The equations of each atom: (name, coefficient) of every occurrence, and what they add up to."""
    rows: dict[int, list[Row]] = {}
    ties = [Equation(((a, 1.0), (b, -1.0))) for a, b in flow.atoms.tied]
    for terms, adds_up in (*flow.equations, *ties, *[Equation(((axis, 1.0),)) for axis in flow.atoms.even]):
        total = -1.0 if adds_up else 0.0
        if any(has_order(flow.atoms.resolve(axis)) for axis, _ in terms):
            _place_by_place(flow, terms, total, rows)
            continue
        expanded = [(flow.atoms.leaves(axis), weight) for axis, weight in terms]
        for each in itertools.zip_longest(*(leaves for leaves, _ in expanded)):
            if len({None if leaf is None else leaf.atom for leaf in each}) != 1:
                # Most are frozen, as indices that were grouped in two ways. What is not has no exponents: it is safe.
                for leaf in filter(None, each):
                    rows.setdefault(leaf.atom, []).append((((leaf.name, 1.0),), 0.0))
                continue
            row = tuple((leaf.name, weight) for leaf, (_, weight) in zip(each, expanded, strict=True))
            rows.setdefault(each[0].atom, []).append((row, total))
    return rows


def _place_by_place(flow: Flow, terms: Sequence[tuple[Axis, float]], total: float, rows: dict[int, list[Row]]) -> None:
    """The equations of axes in other orders: occurrences belong together where they lie at the same places.

    A neuron that lies there in some of the terms alone binds these; one that lies there in part has no exponents.
    """
    found: dict[int, list[tuple[Any, np.ndarray, int]]] = {}
    for term, (axis, _) in enumerate(terms):
        for leaf, places in flow.atoms.placed(flow.atoms.resolve(axis)):
            found.setdefault(leaf.atom, []).append((leaf, np.sort(places, axis=1), term))
    for atom, own in found.items():
        together: dict[bytes, list[tuple[Any, np.ndarray, int]]] = {}
        for each in own:
            together.setdefault(each[1].tobytes(), []).append(each)
        firsts = [np.unique(each[0][1]) for each in together.values()]
        apart = len(np.unique(np.concatenate(firsts))) == sum(map(len, firsts))
        whole = all(sorted(term for *_, term in each) == list(range(len(terms))) for each in together.values())
        for each in together.values() if apart else ():
            row = tuple((leaf.name, terms[term][1]) for leaf, _, term in each)
            rows.setdefault(atom, []).append((row, total))
        if not apart or (total and not whole):
            rows.setdefault(atom, []).extend((((leaf.name, 1.0),), 0.0) for leaf, *_ in own)


def _exponents(rows: list[Row], slots: list[Slot]) -> tuple[np.ndarray, np.ndarray | None]:
    """Exponents of slots: a basis of those that keep every contraction, and those that share copies out.

    Unknowns of which it is said that they are equal are one. They are eliminated in the order of what follows from
    what: values within the program, slots that read neurons, and of those that make them the last first. So what a
    basis vector is free to choose is what makes the neurons.
    """
    parent: dict[tuple[int, ...], tuple[int, ...]] = {}

    def find(name: tuple[int, ...]) -> tuple[int, ...]:
        root = name
        while (up := parent.setdefault(root, root)) != root:
            root = up
        parent[name] = root
        return root

    left = []
    for terms, total in rows:
        if total == 0 and len(terms) == 2 and terms[0][1] == -terms[1][1]:
            parent[find(terms[0][0])] = find(terms[1][0])
        else:
            left.append((terms, total))
    roots = [find(slot.name) for slot in slots]
    firsts = dict.fromkeys(root for root, slot in zip(roots, slots, strict=True) if slot.outgoing)
    order = {root: None for root in (find(name) for terms, _ in left for name, _ in terms) if root not in roots}
    firsts |= dict.fromkeys(reversed(dict.fromkeys(roots)))
    columns = {root: k for k, root in enumerate([*order, *firsts])}
    matrix = np.zeros((len(left), len(columns) + 1))
    for i, (terms, total) in enumerate(left):
        for name, weight in terms:
            matrix[i, columns[find(name)]] += weight
        matrix[i, -1] = total
    pivots = _eliminate(matrix)
    at = [columns[root] for root in roots]
    basis = []
    for free in sorted(set(at) - set(pivots), reverse=True):
        vector = np.zeros(len(columns))
        vector[free] = 1.0
        for row, pivot in enumerate(pivots):
            vector[pivot] = -matrix[row, free]
        basis.append(vector[at])
    consistent = np.abs(matrix[len(pivots) :, -1]).max(initial=0.0) < TOLERANCE
    particular = np.zeros(len(columns))
    particular[pivots] = matrix[: len(pivots), -1]
    return np.array(basis).reshape(len(basis), len(slots)), particular[at] if consistent else None


def _eliminate(matrix: np.ndarray) -> list[int]:
    """Gauss and Jordan, in place; the last column is the right hand side. Returns the columns of the pivots."""
    pivots: list[int] = []
    for column in range(matrix.shape[1] - 1):
        row = len(pivots)
        if row == len(matrix):
            break
        best = row + int(np.argmax(np.abs(matrix[row:, column])))
        if abs(matrix[best, column]) < TOLERANCE:
            continue
        matrix[[row, best]] = matrix[[best, row]]
        matrix[row] /= matrix[row, column]
        others = np.abs(matrix[:, column]) > TOLERANCE
        others[row] = False
        matrix[others] -= matrix[others, column][:, None] * matrix[row]
        pivots.append(column)
    return pivots


def _main_scaling(scalings: np.ndarray, slots: tuple[Slot, ...]) -> tuple[np.ndarray | None, float | None]:
    if not len(scalings):
        return None, None
    firsts = [slots[int(np.flatnonzero(vector)[0])] for vector in scalings]
    matrices = np.array([math.prod(slot.shape) > slot.positions.size and not slot.outgoing for slot in firsts])
    scaling = scalings[matrices].sum(0) if matrices.any() else scalings.sum(0)
    read = {float(e) for e, slot in zip(scaling, slots, strict=True) if slot.outgoing}
    return scaling, 0.0 - read.pop() if len(read) == 1 else None
