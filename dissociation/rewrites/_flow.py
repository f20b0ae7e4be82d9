"""Which axes of a program move together, read off its operations.

An operation unites the axes that it lines up, takes them apart where it treats indices differently, and freezes what it
does not know: what is found is safe. Linear equations are collected for the exponents of a scaling: if a value is
multiplied by a^e along an atom, products add exponents, sums want equal ones, and a contraction wants them to cancel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dissociation.rewrites._axes import UNIT, Atoms, Axis, Product, size_of

FEW = 65536
"""Entries of constants that are followed, such as indices."""


@dataclass
class Value:
    """What is known of an array.

    Attributes:
        shape: Its shape.
        axes: What each axis is made of; None where nothing differs along it.
        zero: Whether all of it is.
        known: Its entries, if they are constants and few.
        endless: Whether no entry is finite, so that no factor changes it.
        refers: The axis whose indices its entries are, as those of an argmax.
        shifted: Whether they are others too: a number more, or the first of some that tie.
        column: Where they stand beside other indices, along the last axis; None if they are alone.
        pair: What the largest values and their indices share where these may be others, but only of zeros.
        level: Whether entries may be equal though nothing says that they are one: 0 if not, 1 if all such are zero, as
            after a ReLU, 2 if they may be any number.
    """

    shape: tuple[int, ...]
    axes: list[Axis | None]
    zero: bool = False
    known: np.ndarray | None = None
    endless: bool = False
    refers: Axis | None = None
    shifted: bool = False
    column: int | None = None
    pair: Any = None
    level: int = 0


class Equation(NamedTuple):
    """sum of coefficient * exponent = 0, or, of what a contraction adds up, = -1 where neurons are duplicated."""

    terms: tuple[tuple[Axis, float], ...]
    adds_up: bool = False


class Part(NamedTuple):
    """A program within an operation: the body of a loop, or a branch."""

    steps: list["Step"]
    inputs: list[Value]
    outputs: list[Value]


@dataclass
class Step:
    """An operation, what is known of its operands and, once it was followed, of its results; `shapes` are theirs."""

    name: str
    params: dict[str, Any]
    operands: list[Value]
    shapes: list[tuple[int, ...]]
    results: list[Value] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)


@dataclass
class Flow:
    """What is read off a program.

    Attributes:
        atoms: All of them.
        equations: For exponents.
        uneven: Axes along which something happens that no linear map of their indices commutes with.
        counted: Axes over which a statistic is taken.
        contracted: Axes of values that were summed over in a product with another.
        lengths: Of axes along which nothing differs, over which is summed.
        referred: Axes that are read or written at indices which follow from values along them.
        steps: What was done, in order.
        large: Constants too large to be followed.
    """

    atoms: Atoms = field(default_factory=Atoms)
    equations: list[Equation] = field(default_factory=list)
    uneven: list[Axis] = field(default_factory=list)
    counted: list[Axis] = field(default_factory=list)
    contracted: list[Axis] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    referred: list[Axis] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    large: list[np.ndarray] = field(default_factory=list)

    def array(self, shape: Sequence[int], reason: str = "") -> Value:
        """A value of new atoms, frozen if a reason is given."""
        return Value(tuple(shape), [self.atoms.new(size, reason) for size in shape])

    def constant(self, array: Any) -> Value:
        """A known array: it may move along axes along which it does not differ."""
        if jnp.issubdtype(getattr(array, "dtype", type(array)), jax.dtypes.prng_key):
            return self.array(array.shape, "a key differs along it")
        array = np.asarray(array)
        axes: list[Axis | None] = []
        for k, size in enumerate(array.shape):
            first = array[(slice(None),) * k + (slice(0, 1),)]
            even = size <= 1 or bool(((array == first) | ((array != array) & (first != first))).all())  # NaN is NaN
            axes.append(self.atoms.new(size, "a constant differs along it") if not even else None)
        known = array if array.size <= FEW else None
        self.large += [array] if known is None else []
        endless = bool(np.issubdtype(array.dtype, np.inexact) and array.size and not np.isfinite(array).any())
        return Value(array.shape, axes, not array.any(), known, endless)

    def unknown(self, step: Step) -> list[Value]:
        """Freezes everything that an operation touches."""
        reason = f"`{step.name}` is not known to leave its order open"
        for value in step.operands:
            self.freeze(value, reason)
        return [self.array(shape, reason) for shape in step.shapes]

    def even(self, size: int) -> Axis:
        """An axis along which nothing differs, where one is needed."""
        axis = self.atoms.new(size)
        self.still(axis)
        return axis

    def still(self, axis: Axis | None) -> None:
        """The exponent is zero."""
        if axis is not None:
            self.equations.append(Equation(((axis, 1.0),)))

    def equal(self, a: Axis, b: Axis | None) -> None:
        """The exponents are equal; that of None is zero."""
        self.equations.append(Equation(((a, 1.0),) if b is None else ((a, 1.0), (b, -1.0))))

    def bend(self, *axes: Axis | None, still: bool = False) -> None:
        """Notes what no linear map of the axes' indices commutes with; with `still`, their exponents are zero."""
        self.uneven += [axis for axis in axes if axis is not None]
        for axis in axes if still else ():
            self.still(axis)

    def freeze(self, value: Value, reason: str, axes: Sequence[int] | None = None) -> None:
        """Freezes some axes of a value, or all."""
        for k in range(len(value.axes)) if axes is None else axes:
            self.atoms.freeze(value.axes[k], reason)

    def lined_up(self, axes: Sequence[Axis | None]) -> Axis | None:
        """United axes in a new occurrence; None where nothing differs along any."""
        there = [axis for axis in axes if axis is not None]
        for axis in there[1:]:
            self.atoms.unite(there[0], axis)
        return self.atoms.copied(there[0]) if there else None

    def summed(self, operands: Sequence[Value], *, linear: bool = True) -> Value:
        """A sum of arrays, or if not `linear` a choice: whatever is homogeneous of degree one in all of them together.

        Operands have one shape, but that axes may be of length 1, or are scalars.
        """

        def exponents(axis: Axis, own: list[Axis | None]) -> None:
            there = [(each, value.endless) for each, value in zip(own, operands, strict=True) if not value.zero]
            if not linear or any(each is None for each, _ in there):
                self.bend(axis, *(each for each, _ in there))
            for each, endless in there:
                if each is not None or not endless:
                    self.equal(axis, each)

        found = self._aligned(operands, exponents)
        found.zero = all(value.zero for value in operands)
        return found

    def multiplied(self, operands: Sequence[Value], powers: Sequence[float]) -> Value:
        """A product of powers of arrays, of one shape, or scalars."""

        def exponents(axis: Axis, own: list[Axis | None]) -> None:
            terms = [(each, -power) for each, power in zip(own, powers, strict=True) if each is not None]
            self.equations.append(Equation(((axis, 1.0), *terms)))
            if len(terms) > 1 or terms[0][1] != -1:
                self.bend(axis, *own)

        return self._aligned(operands, exponents)

    def mixed(self, operands: Sequence[Value], *, ordered: bool = False) -> Value:
        """Any function of single numbers; if `ordered`, it asks which is larger alone: all may be scaled alike."""

        def exponents(axis: Axis, own: list[Axis | None]) -> None:
            self.bend(axis, still=True)
            there = [each for each, value in zip(own, operands, strict=True) if not (ordered and value.zero)]
            known = [each for each in there if each is not None]
            if ordered and len(known) == len(there):
                for each in known[1:]:
                    self.equal(known[0], each)
            else:
                for each in known:
                    self.still(each)

        return self._aligned(operands, exponents)

    def _aligned(self, operands: Sequence[Value], exponents: Any) -> Value:
        shape = np.broadcast_shapes(*(value.shape for value in operands))
        axes: list[Axis | None] = []
        for k, size in enumerate(shape):
            own = [value.axes[k] if value.shape and value.shape[k] == size else None for value in operands]
            for value in operands:
                if value.shape and value.shape[k] != size:
                    self.freeze(value, "it is broadcast", [k])
            axis = self.lined_up(own)
            axes.append(axis)
            if axis is not None:
                exponents(axis, own)
        return Value(shape, axes)

    def handed_on(self, axis: Axis | None) -> Axis | None:
        """An axis of a result, which moves with that of an operand but is read by others."""
        if axis is None:
            return None
        copy = self.atoms.copied(axis)
        self.equal(copy, axis)
        return copy

    def contract(self, a: Axis | None, b: Axis | None) -> None:
        """Sums products over an axis of two arrays."""
        self.atoms.unite(a, b)
        terms = tuple((axis, 1.0) for axis in (a, b) if axis is not None)
        self.contracted += [axis for axis, _ in terms]
        if len(terms) == 2:
            self.equations.append(Equation(terms, adds_up=True))
        elif terms and size_of(terms[0][0]) == 1:
            self.atoms.freeze(terms[0][0], "it is multiplied with what has no such axis")
        elif terms:  # with what does not differ along it: a statistic
            self.reduce(terms[0][0])

    def reduce(self, axis: Axis | None) -> None:
        """Takes a statistic over an axis."""
        if axis is not None:
            self.counted.append(axis)
            self.bend(axis, still=True)

    def referring(self, value: Value, axis: Axis | None) -> Axis | None:
        """An axis that is read or written at the indices that a value holds: it moves with the one that they are of."""
        if value.refers is None or axis is None:
            return None
        self.atoms.unite(value.refers, axis)
        self.bend(axis, still=True)
        self.referred.append(axis)
        return axis

    def regrouped(self, value: Value, shape: tuple[int, ...]) -> list[Axis | None]:
        """The axes of an array of another shape with the same entries in the same order."""
        if value.shape == shape:
            return list(value.axes)
        old = [(axis, size) for axis, size in zip(value.axes, value.shape, strict=True) if size != 1]
        new = [size for size in shape if size != 1]
        alone = [axis for axis, size in zip(value.axes, value.shape, strict=True) if size == 1]
        single = tuple(leaf for axis in alone for leaf in self.atoms.leaves(axis))
        if single and old:  # goes with the first axis that is longer
            old[0] = Product((*single, old[0][0] or self.even(old[0][1]))), old[0][1]
        elif single and shape:
            return [Product(single), *[UNIT] * (len(shape) - 1)]
        elif single:
            self.freeze(value, "it is an axis no more")
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
"""What is known of the results of an operation; tables of rules are by names of primitives."""
