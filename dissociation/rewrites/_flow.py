"""Axes of a program that move together, and linear equations for exponents of scalings."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dissociation.rewrites._axes import (
    UNIT,
    Atoms,
    Axes,
    Axis,
    Name,
    Product,
    Shape,
    has_order,
    placed,
    size_of,
)

TOLERANCE = 1e-9

FEW = 65536
"""Largest size of constants whose entries are tracked, such as indices."""


@dataclass
class Value:
    """Static properties of an array."""

    shape: Shape
    axes: Axes  # None if the array is constant along an axis
    is_zero: bool = False  # if all entries are zero
    known: np.ndarray | None = None  # entries of a constant with at most `FEW`
    is_infinite: bool = False  # if no entry is finite
    indexed: Axis | None = None  # axis that the entries index, as after an argmax
    is_shifted: bool = False  # if the indices may be offset, or depend on the order of tied entries
    column: int | None = None  # position of these indices along the last axis; None if alone
    pair: Any = None  # shared by the values and indices of a `top_k` in which only zeros tie
    tie_level: int = 0  # ties of entries: 0 none, 1 only of zeros, as after a ReLU, 2 of any value

    def axes_without(self, positions: Container[Any]) -> Axes:
        """Return the axes that are not at `positions`."""
        return [axis for k, axis in enumerate(self.axes) if k not in positions]

    def axes_except(self, position: int) -> Axes:
        """Return the axes, with None at `position`."""
        axes = list(self.axes)
        axes[position] = None
        return axes


Results = list[Value]
"""Results of an operation."""


class Equation(NamedTuple):
    """An equation for exponents: the sum of coefficient * exponent is zero.

    With `adds_up`, the sum is -1 if neurons are duplicated.
    """

    terms: tuple[tuple[Axis, float], ...]
    adds_up: bool = False


class Part(NamedTuple):
    """A loop body or branch."""

    steps: list["Step"]
    inputs: list[Value]
    outputs: list[Value]


@dataclass
class Step:
    """An operation with operands and results; `shapes` are the shapes of results."""

    name: str
    params: dict[str, Any]
    operands: list[Value]
    shapes: list[Shape]
    results: Results = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    @property
    def shape(self) -> Shape:
        """Return the shape of the first result."""
        return self.shapes[0]


@dataclass
class Flow:
    """Axes, equations for exponents, and operations found in a program.

    Attributes:
        atoms: Symbolic dimensions.
        equations: Equations for exponents.
        nonlinear: Axes along which rotations do not commute with an operation.
        reduced: Axes that a statistic is computed over.
        contracted: Axes that a product sums over.
        lengths: Lengths of constant axes that are reduced over.
        referred: Axes that are read or written at indices computed from values along them.
        steps: Operations.
        large: Constants that are too large to track.
    """

    atoms: Atoms = field(default_factory=Atoms)
    equations: list[Equation] = field(default_factory=list)
    nonlinear: list[Axis] = field(default_factory=list)
    reduced: list[Axis] = field(default_factory=list)
    contracted: list[Axis] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    referred: list[Axis] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    large: list[np.ndarray] = field(default_factory=list)

    def array(self, shape: Sequence[int], reason: str = "") -> Value:
        """Return a value of new dimensions, fixed if `reason` is not empty."""
        return Value(tuple(shape), [*self.atoms.new_axes(shape, reason)])

    def constant(self, array: Any) -> Value:
        """Return the value of a constant; axes along which it varies are fixed."""
        if jnp.issubdtype(getattr(array, "dtype", type(array)), jax.dtypes.prng_key):
            return self.array(array.shape, "a key differs along it")

        array = np.asarray(array)
        axes = []
        for k, size in enumerate(array.shape):
            axis = None
            if size > 1:
                first = array[(slice(None),) * k + (slice(1),)]
                # NaN equals NaN here: all of a constant may be NaN.
                is_equal = (array == first) | ((array != array) & (first != first))
                if not is_equal.all():
                    axis = self.atoms.new(size, "a constant differs along it")
            axes.append(axis)

        constant = Value(array.shape, axes, not array.any())
        if array.size > FEW:
            self.large.append(array)
        else:
            constant.known = array
        if array.size and np.issubdtype(array.dtype, np.inexact):
            constant.is_infinite = not np.isfinite(array).any()
        return constant

    def unknown(self, step: Step) -> Results:
        """Return fixed results, and fix all operands."""
        # Only symmetries that rules prove are reported: a missing rule costs groups, not
        # correctness.
        reason = f"`{step.name}` is not known to leave its order open"
        for value in step.operands:
            self.freeze(value, reason)
        return [self.array(shape, reason) for shape in step.shapes]

    def unscaled(self, size: int) -> Axis:
        """Return a new permutable axis with exponent zero."""
        axis = self.atoms.new(size)
        self.equal(axis)
        return axis

    def equal(self, a: Axis | None, b: Axis | None = None) -> None:
        """Set the exponent of `a` equal to that of `b`, zero for None."""
        if a is None:
            return
        if b is None:
            self.equations.append(Equation(((a, 1.0),)))
        else:
            self.equations.append(Equation(((a, 1.0), (b, -1.0))))

    def bend(self, *axes: Axis | None, scalable: bool = True) -> None:
        """Mark axes as `nonlinear`; set their exponents to zero unless they are `scalable`."""
        self.nonlinear += filter(None, axes)
        if not scalable:
            for axis in axes:
                self.equal(axis)

    def freeze(self, value: Value, reason: str, axes: Sequence[int] | None = None) -> None:
        """Fix the axes of a value at positions `axes`; None is all."""
        if axes is None:
            axes = range(len(value.axes))
        for k in axes:
            self.atoms.freeze(value.axes[k], reason)

    def united(self, axes: Sequence[Axis | None]) -> Axis | None:
        """Unite axes and return a new occurrence; None if all are None."""
        varying = list(filter(None, axes))
        if not varying:
            return None
        for axis in varying[1:]:
            self.atoms.unite(varying[0], axis)
        return self.atoms.copied(varying[0])

    def summed(self, operands: Sequence[Value], *, linear: bool = True) -> Value:
        """Return the result of a sum or, if not `linear`, of a choice such as a maximum."""
        total, aligned = self._aligned(operands)
        total.is_zero = all(value.is_zero for value in operands)
        for axis, operand_axes in aligned:
            term_axes = []
            for value, term_axis in zip(operands, operand_axes, strict=True):
                if value.is_zero:
                    continue
                term_axes.append(term_axis)
                if term_axis is not None or not value.is_infinite:
                    # Terms of a sum must scale alike for the sum to scale.
                    self.equal(axis, term_axis)
            if not linear or None in term_axes:
                self.bend(axis, *term_axes)
        return total

    def multiplied(self, operands: Sequence[Value], powers: Sequence[float]) -> Value:
        """Return the product of powers of arrays."""
        product, aligned = self._aligned(operands)
        for axis, operand_axes in aligned:
            terms = []
            for factor_axis, power in zip(operand_axes, powers, strict=True):
                if factor_axis is not None:
                    terms.append((factor_axis, -power))
            # Products add exponents.
            self.equations.append(Equation(((axis, 1.0), *terms)))
            if len(terms) > 1 or terms[0][1] != -1:
                self.bend(axis, *operand_axes)
        return product

    def mixed(self, operands: Sequence[Value], *, ordered: bool = False) -> Value:
        """Return the result of an elementwise function.

        With `ordered` it is a comparison, which allows a common factor.
        """
        mixture, aligned = self._aligned(operands)
        for axis, operand_axes in aligned:
            self.bend(axis, scalable=False)
            compared = []
            for value, operand_axis in zip(operands, operand_axes, strict=True):
                if not (ordered and value.is_zero):
                    compared.append(operand_axis)
            common = None
            if ordered and compared and None not in compared:
                # A common factor does not change which number is larger.
                common = compared[0]
            for operand_axis in compared:
                self.equal(operand_axis, common)
        return mixture

    def _aligned(self, operands: Sequence[Value]) -> tuple[Value, list[tuple[Axis, Axes]]]:
        """Return an elementwise result, and each of its axes with the operands' axes."""
        aligned = Value(np.broadcast_shapes(*(value.shape for value in operands)), [])
        varying = []
        for k, size in enumerate(aligned.shape):
            operand_axes = []
            for value in operands:
                # Operands may be scalars or have axes of length 1.
                axis = None
                if value.shape and value.shape[k] == size:
                    axis = value.axes[k]
                elif value.shape:
                    self.freeze(value, "it is broadcast", [k])
                operand_axes.append(axis)
            axis = self.united(operand_axes)
            aligned.axes.append(axis)
            if axis is not None:
                varying.append((axis, operand_axes))
        return aligned, varying

    def handed_on(self, axis: Axis | None) -> Axis | None:
        """Return a new occurrence of an operand's axis, for a result."""
        # A new occurrence, as other operations use the result than the operand.
        copy = self.united([axis])
        self.equal(copy, axis)
        return copy

    def contract(self, a: Axis | None, b: Axis | None) -> None:
        """Record a sum of products over an axis of two arrays."""
        self.atoms.unite(a, b)
        self.contracted += filter(None, (a, b))
        axis = a or b
        if a is not None and b is not None:
            # A sum over neurons does not change if the two factors of each cancel.
            self.equations.append(Equation(((a, 1.0), (b, 1.0)), adds_up=True))
        elif axis is not None and size_of(axis) == 1:
            self.atoms.freeze(axis, "it is multiplied with what has no such axis")
        else:  # a product with a constant is a statistic
            self.reduce(axis)

    def reduce(self, axis: Axis | None) -> None:
        """Record a statistic over an axis."""
        if axis is not None:
            self.reduced.append(axis)
            self.bend(axis, scalable=False)

    def referring(self, value: Value, axis: Axis | None) -> Axis | None:
        """Unite `axis` with the axis that `value` indexes and return it; None if either is None."""
        if value.indexed is None or axis is None:
            return None
        self.atoms.unite(value.indexed, axis)
        self.bend(axis, scalable=False)
        self.referred.append(axis)
        return axis

    def regrouped(self, value: Value, shape: Shape) -> Axes:
        """Return the axes of a value reshaped to `shape`."""
        if value.shape == shape:
            return list(value.axes)

        # Axes of length 1 and longer ones are regrouped separately.
        single = []
        longer = []
        for axis, size in zip(value.axes, value.shape, strict=True):
            if size == 1:
                single += self.atoms.leaves(axis)
            else:
                longer.append((axis, size))
        if single and longer:  # joins the first longer axis
            axis, size = longer[0]
            longer[0] = Product((*single, axis or self.unscaled(size))), size
        elif single and shape:
            return [Product(tuple(single)), *[UNIT] * (len(shape) - 1)]
        elif single:
            self.freeze(value, "it is no longer an axis")

        positions = [k for k, size in enumerate(shape) if size != 1]
        regrouped = self._regrouped(longer, [shape[k] for k in positions])
        axes: Axes = [UNIT] * len(shape)
        for k, axis in zip(positions, regrouped, strict=True):
            axes[k] = axis
        return axes

    def _regrouped(self, old: list[tuple[Axis | None, int]], new: list[int]) -> Axes:
        """Return axes of lengths `new`, given an array's axes and lengths, none of them 1."""
        axes: Axes = []
        while old or new:
            axis, length = old.pop(0)
            group = [(axis, length)]
            sizes = [new.pop(0)]
            new_length = sizes[0]
            while length != new_length:
                if length < new_length:
                    group.append(old.pop(0))
                    length *= group[-1][1]
                else:
                    sizes.append(new.pop(0))
                    new_length *= sizes[-1]

            if len(group) == len(sizes) == 1:
                axes.append(axis)
            elif not any(axis for axis, _ in group):
                axes += [None] * len(sizes)
            else:
                factors = tuple(axis or self.unscaled(size) for axis, size in group)
                axes += self.atoms.factored(Product(factors), tuple(sizes))
        return axes


Rule = Callable[[Flow, Step], Results]
"""Function from an operation to its results."""


class Row(NamedTuple):
    """An equation for exponents of one dimension: names with coefficients, and their sum."""

    terms: tuple[tuple[Name, float], ...]
    total: float = 0.0


def equations_of(flow: Flow) -> dict[int, list[Row]]:
    """Return the equations of each dimension."""
    equations = list(flow.equations)
    for a, b in flow.atoms.tied:
        equations.append(Equation(((a, 1.0), (b, -1.0))))
    for axis in flow.atoms.constant:
        equations.append(Equation(((axis, 1.0),)))

    rows: dict[int, list[Row]] = defaultdict(list)
    for terms, adds_up in equations:
        total = -1.0 if adds_up else 0.0
        axes, weights = zip(*terms, strict=True)
        if any(has_order(flow.atoms.resolve(axis)) for axis in axes):
            _place_by_place(flow, terms, total, rows)
            continue
        for leaves in itertools.zip_longest(*map(flow.atoms.leaves, axes)):
            if len({getattr(leaf, "atom", None) for leaf in leaves}) == 1:
                names = [leaf.name for leaf in leaves]
                row = Row(tuple(zip(names, weights, strict=True)), total)
                rows[leaves[0].atom].append(row)
                continue
            # Most are frozen, as indices that were grouped in two ways. Others get no exponents,
            # which is safe.
            for leaf in filter(None, leaves):
                rows[leaf.atom].append(Row(((leaf.name, 1.0),)))
    return rows


def _place_by_place(
    flow: Flow, terms: Sequence[tuple[Axis, float]], total: float, rows: dict[int, list[Row]]
) -> None:
    """Add to `rows` the equations of axes with reordered neurons, one per set of positions."""
    # By atom: the number of a term, the name of an occurrence in it, and sorted positions.
    occurrences = defaultdict(list)
    for number, (axis, _) in enumerate(terms):
        for leaf, positions in placed(flow.atoms.resolve(axis)):
            occurrence = number, leaf.name, np.sort(positions, axis=1)
            occurrences[leaf.atom].append(occurrence)

    for atom, atom_occurrences in occurrences.items():
        row_terms = defaultdict(list)
        numbers = defaultdict(list)
        distinct = {}
        for number, name, positions in atom_occurrences:
            key = positions.tobytes()
            row_terms[key].append((name, terms[number][1]))
            numbers[key].append(number)
            distinct[key] = np.unique(positions)
        all_positions = np.concatenate(list(distinct.values()))
        is_disjoint = len(np.unique(all_positions)) == len(all_positions)

        if is_disjoint:
            # An occurrence in some of the terms binds only these.
            for row in row_terms.values():
                rows[atom].append(Row(tuple(row), total))
        # A neuron at only part of the places of a term has no exponents, which is safe.
        all_numbers = list(range(len(terms)))
        is_complete = all(row_numbers == all_numbers for row_numbers in numbers.values())
        if not is_disjoint or (total and not is_complete):
            for _, name, _ in atom_occurrences:
                rows[atom].append(Row(((name, 1.0),)))


def exponents_of(rows: list[Row], slots: Sequence[Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a basis of scalings' exponents [scalings, slots], and exponents under duplication.

    The second are None if neurons cannot be duplicated.
    """
    parent: dict[Name, Name] = {}
    remaining = []
    for row in rows:
        # Most equations say that two exponents are equal: uniting them keeps the matrix small.
        if row.total == 0 and len(row.terms) == 2 and row.terms[0][1] == -row.terms[1][1]:
            first = _root(parent, row.terms[0][0])
            parent[first] = _root(parent, row.terms[1][0])
        else:
            remaining.append(row)

    # Eliminate values within the program first, then outgoing slots, then incoming ones, the last
    # first. The free unknowns of the basis are then incoming weights.
    roots = [_root(parent, slot.name) for slot in slots]
    order = []
    for terms, _ in remaining:
        inner = [_root(parent, name) for name, _ in terms]
        order += [root for root in inner if root not in roots]
    order += [root for root, slot in zip(roots, slots, strict=True) if slot.outgoing]
    order += reversed(dict.fromkeys(roots))
    columns = {root: k for k, root in enumerate(dict.fromkeys(order))}

    matrix = np.zeros((len(remaining), len(columns) + 1))
    for i, (terms, total) in enumerate(remaining):
        for name, weight in terms:
            matrix[i, columns[_root(parent, name)]] += weight
        matrix[i, -1] = total
    pivots = _eliminate(matrix)

    slot_columns = [columns[root] for root in roots]
    basis = []
    for free in sorted(set(slot_columns) - set(pivots), reverse=True):
        vector = np.zeros(len(columns))
        vector[free] = 1.0
        for row, pivot in enumerate(pivots):
            vector[pivot] = -matrix[row, free]
        basis.append(vector[slot_columns])
    scalings = np.array(basis).reshape(len(basis), len(slots))

    residuals = np.abs(matrix[len(pivots) :, -1])
    is_consistent = residuals.max(initial=0.0) < TOLERANCE
    if not is_consistent:
        return scalings, None
    particular = np.zeros(len(columns))
    particular[pivots] = matrix[: len(pivots), -1]
    return scalings, particular[slot_columns]


def _root(parent: dict[Name, Name], name: Name) -> Name:
    """Return the representative of an exponent among those united with it."""
    root = name
    while parent.setdefault(root, root) != root:
        root = parent[root]
    parent[name] = root
    return root


def _eliminate(matrix: np.ndarray) -> list[int]:
    """Run Gauss-Jordan elimination in place and return the pivot columns.

    The last column is the right-hand side.
    """
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
        is_reduced = np.abs(matrix[:, column]) > TOLERANCE
        is_reduced[row] = False
        matrix[is_reduced] -= matrix[is_reduced, column][:, None] * matrix[row]
        pivots.append(column)
    return pivots
