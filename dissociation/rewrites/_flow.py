"""Axes of a program that move together, and linear equations for exponents of scalings."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dissociation.rewrites._axes import UNIT, Atoms, Axis, Product, size_of

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
    uneven: list[Axis] = field(default_factory=list)  # axes whose linear maps do not commute with an operation
    counted: list[Axis] = field(default_factory=list)  # axes that a statistic is computed over
    contracted: list[Axis] = field(default_factory=list)  # axes that a product sums over
    lengths: list[int] = field(default_factory=list)  # of constant axes that are reduced over
    referred: list[Axis] = field(default_factory=list)  # read or written at indices computed from values along them
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
            even = size <= 1 or bool(((array == first) | ((array != array) & (first != first))).all())
            axes.append(self.atoms.new(size, "a constant differs along it") if not even else None)
        known = array if array.size <= FEW else None
        if known is None:
            self.large.append(array)
        endless = bool(np.issubdtype(array.dtype, np.inexact) and array.size and not np.isfinite(array).any())
        return Value(array.shape, axes, not array.any(), known, endless)

    def unknown(self, step: Step) -> list[Value]:
        """Return fixed results, and fix all operands."""
        # Only symmetries that rules prove are reported: a missing rule costs groups, not correctness.
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
            there = [(each, value.endless) for each, value in zip(own, operands, strict=True) if not value.zero]
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
            terms = [(each, -power) for each, power in zip(own, powers, strict=True) if each is not None]
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
            there = [each for each, value in zip(own, operands, strict=True) if not (ordered and value.zero)]
            known = [each for each in there if each is not None]
            # A common factor does not change which number is larger.
            if ordered and len(known) == len(there):
                for each in known[1:]:
                    self.equal(known[0], each)
            else:
                for each in known:
                    self.equal(each)
        return found

    def _aligned(self, operands: Sequence[Value]) -> tuple[Value, list[tuple[Axis, list[Axis | None]]]]:
        """Return an elementwise result, and each axis that is not constant with the operands' axes that it unites."""
        found, united = Value(np.broadcast_shapes(*(value.shape for value in operands)), []), []
        for k, size in enumerate(found.shape):
            # Operands may be scalars or have axes of length 1.
            own = [value.axes[k] if value.shape and value.shape[k] == size else None for value in operands]
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
        old = [(axis, size) for axis, size in zip(value.axes, value.shape, strict=True) if size != 1]
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
            while (left := int(np.prod([size for _, size in group]))) != (right := int(np.prod(targets))):
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
