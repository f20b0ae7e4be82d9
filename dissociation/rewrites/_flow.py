"""Axes of a program that move together, and linear equations for exponents of scalings."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dissociation.rewrites._axes import UNIT, Atoms, Axis, Product, has_order, size_of

TOLERANCE = 1e-9

FEW = 65536
"""Largest size of constants whose entries are tracked, such as indices."""


@dataclass
class Value:
    """Static properties of an array."""

    shape: tuple[int, ...]
    axes: list[Axis | None]  # None if the array is constant along an axis
    zero: bool = False  # if all entries are zero
    known: np.ndarray | None = None  # entries of a constant with at most `FEW`
    endless: bool = False  # if no entry is finite
    refers: Axis | None = None  # axis that the entries index, as after an argmax
    shifted: bool = False  # if the indices may be offset, or depend on the order of tied entries
    column: int | None = None  # position of these indices along the last axis; None if alone
    pair: Any = None  # shared by the values and indices of a `top_k` in which only zeros tie
    level: int = 0  # ties between entries: 0 none, 1 only of zeros, as after a ReLU, 2 of any value


class Equation(NamedTuple):
    """An equation for exponents: sum of coefficient * exponent = 0; -1 if `adds_up` and neurons are duplicated."""

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
    shapes: list[tuple[int, ...]]
    results: list[Value] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


@dataclass
class Flow:
    """Axes, equations for exponents, and operations found in a program."""

    atoms: Atoms = field(default_factory=Atoms)
    equations: list[Equation] = field(default_factory=list)
    uneven: list[Axis] = field(
        default_factory=list
    )  # axes along which rotations do not commute with an operation
    counted: list[Axis] = field(default_factory=list)  # axes that a statistic is computed over
    contracted: list[Axis] = field(default_factory=list)  # axes that a product sums over
    lengths: list[int] = field(default_factory=list)  # of constant axes that are reduced over
    referred: list[Axis] = field(
        default_factory=list
    )  # read or written at indices computed from values along them
    steps: list[Step] = field(default_factory=list)
    large: list[np.ndarray] = field(default_factory=list)  # constants too large to track

    def array(self, shape: Sequence[int], reason: str = "") -> Value:
        """Return a value of new dimensions, fixed if `reason` is not empty."""
        return Value(tuple(shape), [self.atoms.new(size, reason) for size in shape])

    def constant(self, array: Any) -> Value:
        """Return the value of a constant; axes along which it varies are fixed."""
        if jnp.issubdtype(getattr(array, "dtype", type(array)), jax.dtypes.prng_key):
            return self.array(array.shape, "a key differs along it")
        array = np.asarray(array)
        axes: list[Axis | None] = []
        for k, size in enumerate(array.shape):
            first = array[(slice(None),) * k + (slice(0, 1),)]
            # NaN equals NaN here: all of a constant may be NaN.
            even = size <= 1 or bool(
                ((array == first) | ((array != array) & (first != first))).all()
            )
            axes.append(self.atoms.new(size, "a constant differs along it") if not even else None)
        known = array if array.size <= FEW else None
        if known is None:
            self.large.append(array)
        endless = bool(
            np.issubdtype(array.dtype, np.inexact) and array.size and not np.isfinite(array).any()
        )
        return Value(array.shape, axes, not array.any(), known, endless)

    def unknown(self, step: Step) -> list[Value]:
        """Return fixed results, and fix all operands."""
        # Only symmetries that rules prove are reported: a missing rule costs groups, not
        # correctness.
        reason = f"`{step.name}` is not known to leave its order open"
        for value in step.operands:
            self.freeze(value, reason)
        return [self.array(shape, reason) for shape in step.shapes]

    def even(self, size: int) -> Axis:
        """Return a new permutable axis with exponent zero."""
        axis = self.atoms.new(size)
        self.equal(axis)
        return axis

    def equal(self, a: Axis | None, b: Axis | None = None) -> None:
        """Set the exponent of `a` equal to that of `b`, zero for None."""
        if a is not None:
            self.equations.append(Equation(((a, 1.0),) if b is None else ((a, 1.0), (b, -1.0))))

    def bend(self, *axes: Axis | None, still: bool = False) -> None:
        """Mark axes as `uneven`; with `still`, set their exponents to zero."""
        self.uneven += [axis for axis in axes if axis is not None]
        for axis in axes if still else ():
            self.equal(axis)

    def freeze(self, value: Value, reason: str, axes: Sequence[int] | None = None) -> None:
        """Fix the axes of a value at positions `axes`; None is all."""
        for k in range(len(value.axes)) if axes is None else axes:
            self.atoms.freeze(value.axes[k], reason)

    def lined_up(self, axes: Sequence[Axis | None]) -> Axis | None:
        """Unite axes and return a new occurrence; None if all are None."""
        there = [axis for axis in axes if axis is not None]
        for axis in there[1:]:
            self.atoms.unite(there[0], axis)
        return self.atoms.copied(there[0]) if there else None

    def summed(self, operands: Sequence[Value], *, linear: bool = True) -> Value:
        """Return the result of a sum or, if not `linear`, of a choice such as a maximum."""
        found, axes = self._aligned(operands)
        found.zero = all(value.zero for value in operands)
        for axis, own in axes:
            there = [
                (each, value.endless)
                for each, value in zip(own, operands, strict=True)
                if not value.zero
            ]
            if not linear or any(each is None for each, _ in there):
                self.bend(axis, *(each for each, _ in there))
            for each, endless in there:
                if each is not None or not endless:
                    # Terms of a sum must scale alike for the sum to scale.
                    self.equal(axis, each)
        return found

    def multiplied(self, operands: Sequence[Value], powers: Sequence[float]) -> Value:
        """Return the product of powers of arrays."""
        found, axes = self._aligned(operands)
        for axis, own in axes:
            terms = [
                (each, -power) for each, power in zip(own, powers, strict=True) if each is not None
            ]
            # Products add exponents.
            self.equations.append(Equation(((axis, 1.0), *terms)))
            if len(terms) > 1 or terms[0][1] != -1:
                self.bend(axis, *own)
        return found

    def mixed(self, operands: Sequence[Value], *, ordered: bool = False) -> Value:
        """Return the result of an elementwise function; a comparison (`ordered`) allows a common factor."""
        found, axes = self._aligned(operands)
        for axis, own in axes:
            self.bend(axis, still=True)
            there = [
                each
                for each, value in zip(own, operands, strict=True)
                if not (ordered and value.zero)
            ]
            known = [each for each in there if each is not None]
            # A common factor does not change which number is larger.
            common = known[0] if ordered and len(known) == len(there) > 0 else None
            for each in known:
                self.equal(each, common)
        return found

    def _aligned(
        self, operands: Sequence[Value]
    ) -> tuple[Value, list[tuple[Axis, list[Axis | None]]]]:
        """Return an elementwise result, and each axis that is not constant with the operands' axes that it unites."""
        found, united = Value(np.broadcast_shapes(*(value.shape for value in operands)), []), []
        for k, size in enumerate(found.shape):
            # Operands may be scalars or have axes of length 1.
            own = [
                value.axes[k] if value.shape and value.shape[k] == size else None
                for value in operands
            ]
            for value in operands:
                if value.shape and value.shape[k] != size:
                    self.freeze(value, "it is broadcast", [k])
            axis = self.lined_up(own)
            found.axes.append(axis)
            united += [] if axis is None else [(axis, own)]
        return found, united

    def handed_on(self, axis: Axis | None) -> Axis | None:
        """Return a new occurrence of an operand's axis, for a result."""
        # A new occurrence, as other operations use the result than the operand.
        copy = self.lined_up([axis])
        self.equal(copy, axis)
        return copy

    def contract(self, a: Axis | None, b: Axis | None) -> None:
        """Record a sum of products over an axis of two arrays."""
        self.atoms.unite(a, b)
        terms = tuple((axis, 1.0) for axis in (a, b) if axis is not None)
        self.contracted += [axis for axis, _ in terms]
        if len(terms) == 2:
            # A sum over neurons does not change if the two factors of each cancel.
            self.equations.append(Equation(terms, adds_up=True))
        elif terms and size_of(terms[0][0]) == 1:
            self.atoms.freeze(terms[0][0], "it is multiplied with what has no such axis")
        elif terms:  # a product with a constant is a statistic
            self.reduce(terms[0][0])

    def reduce(self, axis: Axis | None) -> None:
        """Record a statistic over an axis."""
        if axis is not None:
            self.counted.append(axis)
            self.bend(axis, still=True)

    def referring(self, value: Value, axis: Axis | None) -> Axis | None:
        """Unite `axis` with the axis that `value` indexes and return it; None if either is None."""
        if value.refers is None or axis is None:
            return None
        self.atoms.unite(value.refers, axis)
        self.bend(axis, still=True)
        self.referred.append(axis)
        return axis

    def regrouped(self, value: Value, shape: tuple[int, ...]) -> list[Axis | None]:
        """Return the axes of a value reshaped to `shape`."""
        if value.shape == shape:
            return list(value.axes)
        old = [
            (axis, size) for axis, size in zip(value.axes, value.shape, strict=True) if size != 1
        ]
        new = [size for size in shape if size != 1]
        alone = [axis for axis, size in zip(value.axes, value.shape, strict=True) if size == 1]
        single = tuple(leaf for axis in alone for leaf in self.atoms.leaves(axis))
        if single and old:  # joins the first longer axis
            old[0] = Product((*single, old[0][0] or self.even(old[0][1]))), old[0][1]
        elif single and shape:
            return [Product(single), *[UNIT] * (len(shape) - 1)]
        elif single:
            self.freeze(value, "it is no longer an axis")
        found: list[Axis | None] = []
        while old or new:
            group, targets = [old.pop(0)], [new.pop(0)]
            while (left := int(np.prod([size for _, size in group]))) != (
                right := int(np.prod(targets))
            ):
                if left < right:
                    group.append(old.pop(0))
                else:
                    targets.append(new.pop(0))
            if len(group) == len(targets) == 1:
                found.append(group[0][0])
            elif all(axis is None for axis, _ in group):
                found += [None] * len(targets)
            else:
                parts = tuple(self.even(size) if axis is None else axis for axis, size in group)
                found += self.atoms.factored(Product(parts), tuple(targets))
        return [UNIT if size == 1 else found.pop(0) for size in shape]


Rule = Callable[[Flow, Step], list[Value]]
"""Function from an operation to its results."""


Row = tuple[tuple[tuple[tuple[int, ...], float], ...], float]


def equations_of(flow: Flow) -> dict[int, list[Row]]:
    """Return the equations of each dimension: terms (name, coefficient) and their sum."""
    rows: dict[int, list[Row]] = {}
    ties = [Equation(((a, 1.0), (b, -1.0))) for a, b in flow.atoms.tied]
    for terms, adds_up in (
        *flow.equations,
        *ties,
        *[Equation(((axis, 1.0),)) for axis in flow.atoms.even],
    ):
        total = -1.0 if adds_up else 0.0
        if any(has_order(flow.atoms.resolve(axis)) for axis, _ in terms):
            _place_by_place(flow, terms, total, rows)
            continue
        expanded = [(flow.atoms.leaves(axis), weight) for axis, weight in terms]
        for each in itertools.zip_longest(*(leaves for leaves, _ in expanded)):
            if len({None if leaf is None else leaf.atom for leaf in each}) != 1:
                # Most are frozen, as indices that were grouped in two ways. Others get no
                # exponents, which is safe.
                for leaf in filter(None, each):
                    rows.setdefault(leaf.atom, []).append((((leaf.name, 1.0),), 0.0))
                continue
            row = tuple(
                (leaf.name, weight) for leaf, (_, weight) in zip(each, expanded, strict=True)
            )
            rows.setdefault(each[0].atom, []).append((row, total))
    return rows


def _place_by_place(
    flow: Flow, terms: Sequence[tuple[Axis, float]], total: float, rows: dict[int, list[Row]]
) -> None:
    """Add to `rows` the equations of axes whose neurons are reordered, one per set of places of a neuron."""
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
        whole = all(
            sorted(term for *_, term in each) == list(range(len(terms)))
            for each in together.values()
        )
        for each in together.values() if apart else ():
            # An occurrence in some of the terms binds only these.
            row = tuple((leaf.name, terms[term][1]) for leaf, _, term in each)
            rows.setdefault(atom, []).append((row, total))
        # A neuron at only part of the places of a term has no exponents, which is safe.
        if not apart or (total and not whole):
            rows.setdefault(atom, []).extend((((leaf.name, 1.0),), 0.0) for leaf, *_ in own)


def exponents_of(rows: list[Row], slots: Sequence[Any]) -> tuple[np.ndarray, np.ndarray | None]:
    """Return a basis of the exponents of scalings [scalings, slots], and exponents for duplicated neurons or None."""
    parent: dict[tuple[int, ...], tuple[int, ...]] = {}
    left = []
    for terms, total in rows:
        # Most equations say that two exponents are equal: uniting them keeps the matrix small.
        if total == 0 and len(terms) == 2 and terms[0][1] == -terms[1][1]:
            parent[_root(parent, terms[0][0])] = _root(parent, terms[1][0])
        else:
            left.append((terms, total))
    # Eliminate values within the program first, then outgoing slots, then incoming ones, the last
    # first. The free unknowns of the basis are then incoming weights.
    roots = [_root(parent, slot.name) for slot in slots]
    firsts = dict.fromkeys(root for root, slot in zip(roots, slots, strict=True) if slot.outgoing)
    inner = (_root(parent, name) for terms, _ in left for name, _ in terms)
    order = {root: None for root in inner if root not in roots}
    firsts |= dict.fromkeys(reversed(dict.fromkeys(roots)))
    columns = {root: k for k, root in enumerate([*order, *firsts])}
    matrix = np.zeros((len(left), len(columns) + 1))
    for i, (terms, total) in enumerate(left):
        for name, weight in terms:
            matrix[i, columns[_root(parent, name)]] += weight
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


def _root(parent: dict[tuple[int, ...], tuple[int, ...]], name: tuple[int, ...]) -> tuple[int, ...]:
    """Return the representative of an exponent among those united with it."""
    root = name
    while (up := parent.setdefault(root, root)) != root:
        root = up
    parent[name] = root
    return root


def _eliminate(matrix: np.ndarray) -> list[int]:
    """Run Gauss-Jordan elimination in place and return the pivot columns; the last column is the right-hand side."""
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
