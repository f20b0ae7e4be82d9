"""Axes of arrays as trees of symbolic dimensions ("atoms" in code), which a symmetry may permute.

None is an axis along which an array is constant.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Leaf(NamedTuple):
    """An occurrence of a symbolic dimension in an axis; names of its refined parts start with `name`."""

    name: tuple[int, ...]
    atom: int
    size: int


class Product(NamedTuple):
    """An axis flattened from `parts`, the last one fastest; without parts its length is 1."""

    parts: tuple["Axis", ...]


class Sum(NamedTuple):
    """An axis concatenated from `parts`."""

    parts: tuple["Axis", ...]


class Order(NamedTuple):
    """A reordered axis: entry i is entry `order[i]` of `part`."""

    part: "Axis"
    order: np.ndarray

    @property
    def parts(self) -> tuple["Axis", ...]:
        """Return the part, as a tuple."""
        return (self.part,)


Axis = Leaf | Product | Sum | Order
UNIT = Product(())
Placed = tuple[Leaf, np.ndarray]
"""An occurrence and the positions of its indices along the axis, [size of the occurrence, repetitions]."""


def mapped(axis: Axis, change: Callable[[Leaf], Axis]) -> Axis:
    """Return the axis with its occurrences changed, in order."""
    if isinstance(axis, Leaf):
        return change(axis)
    parts = tuple(mapped(part, change) for part in axis.parts)
    return Order(parts[0], axis.order) if isinstance(axis, Order) else type(axis)(parts)


class Atoms:
    """The symbolic dimensions of a program."""

    def __init__(self, *, single: bool = False) -> None:
        self.single = single  # if True, axes of length 1 have atoms too
        self._parent: list[int] = []
        self._reasons: list[str] = []  # empty: free
        self._parts: dict[int, Axis] = {}  # of refined atoms; names within count from 0
        self._names = 0
        self.tied: list[tuple[Axis, Axis]] = []  # rows of one array: they have one exponent
        self.even: list[Axis] = []  # axes along which arrays are constant

    def new(self, size: int, reason: str = "") -> Axis:
        """Return an axis of one new dimension, fixed if `reason` is not empty."""
        if size == 1 and not self.single:
            return UNIT
        self._parent.append(len(self._parent))
        self._reasons.append(reason)
        return self._occurrence(len(self._parent) - 1, size)

    def _occurrence(self, atom: int, size: int) -> Leaf:
        self._names += 1
        return Leaf((self._names,), atom, size)

    def find(self, atom: int) -> int:
        """Return the representative of the dimensions united with `atom`."""
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def reason(self, atom: int) -> str:
        """Return the reason why a symbolic dimension is fixed; an empty string if it is permutable."""
        return self._reasons[self.find(atom)]

    def resolve(self, axis: Axis) -> Axis:
        """Return the axis with united and refined dimensions replaced."""
        if isinstance(axis, Leaf):
            atom = self.find(axis.atom)
            if atom not in self._parts:
                return axis._replace(atom=atom)
            count = itertools.count()
            return self.resolve(
                mapped(
                    self._parts[atom], lambda leaf: leaf._replace(name=(*axis.name, next(count)))
                )
            )
        if isinstance(axis, Order):
            return self._ordered(self.resolve(axis.part), axis.order)
        parts: list[Axis] = []
        for part in map(self.resolve, axis.parts):
            parts += (
                part.parts if not isinstance(part, Leaf) and type(part) is type(axis) else (part,)
            )
        return parts[0] if len(parts) == 1 else type(axis)(tuple(parts))

    def leaves(self, axis: Axis | None) -> list[Leaf]:
        """Return the occurrences in an axis by first position, outer before inner."""
        if axis is None:
            return []
        axis = self.resolve(axis)
        return [leaf for leaf, _ in self.occurrences(axis)] if has_order(axis) else _leaves(axis)

    def copied(self, axis: Axis) -> Axis:
        """Return the axis with new occurrences of the same dimensions."""
        return mapped(self.resolve(axis), lambda leaf: self._occurrence(leaf.atom, leaf.size))

    def freeze(self, axis: Axis | None, reason: str) -> None:
        """Fix all dimensions of an axis."""
        for leaf in self.leaves(axis):
            self._reasons[leaf.atom] = self._reasons[leaf.atom] or reason

    def unite(self, first: Axis | None, second: Axis | None) -> None:
        """Unite two axes of equal length; do nothing if one is None."""
        if first is None or second is None:
            return
        a, b = self.resolve(first), self.resolve(second)
        if isinstance(a, Leaf) and isinstance(b, Leaf):
            if a.atom != b.atom:
                self._parent[b.atom] = a.atom
                self._reasons[a.atom] = self._reasons[a.atom] or self._reasons[b.atom]
        elif isinstance(a, Leaf):
            self._refine(a.atom, b)
        elif isinstance(b, Leaf):
            self._refine(b.atom, a)
        elif isinstance(a, Order):
            self._unite_ordered(a, b)
        elif isinstance(b, Order):
            self._unite_ordered(b, a)
        elif isinstance(a, Sum) or isinstance(b, Sum):
            self._unite_sums(a, b)
        else:
            self._unite_products(a, b)

    def _refine(self, atom: int, parts: Axis) -> None:
        # An atom refined by itself would make `resolve` loop for ever.
        if any(leaf.atom == atom for leaf in self.leaves(parts)):
            if not self._reasons[atom] and isinstance(parts, Order):
                self._turn(atom, parts.order)
            return
        self._parts[atom] = parts
        if self._reasons[atom]:
            self.freeze(parts, self._reasons[atom])

    def _turn(self, atom: int, order: np.ndarray) -> None:
        """Unite a dimension with a reordering of itself: cycles of equal length stay permutable."""
        cycles: dict[int, list[list[int]]] = {}
        seen = np.zeros(len(order), bool)
        for start in range(len(order)):
            cycle = []
            while not seen[start]:
                seen[start] = True
                cycle.append(start)
                start = int(order[start])
            if cycle:
                cycles.setdefault(len(cycle), []).append(cycle)
        reason = "it meets itself in another order"
        parts = tuple(
            Product((self.new(len(own)), self.new(n, reason))) for n, own in cycles.items()
        )
        places = np.concatenate([np.ravel(own) for own in cycles.values()])
        self._parts[atom] = Order(Sum(parts), np.argsort(places))

    def _ordered(self, axis: Axis, order: np.ndarray) -> Axis:
        """Return a resolved axis in another order, moved into the parts if possible."""
        if isinstance(axis, Order):
            axis, order = axis.part, axis.order[order]
        if (order == np.arange(len(order))).all():
            return axis
        if isinstance(axis, Sum):
            ends = np.cumsum([size_of(part) for part in axis.parts])
            owner = np.searchsorted(ends, order, side="right")
            runs = np.flatnonzero(np.diff(owner, prepend=-1))
            if len(runs) == len(axis.parts):
                own = zip(owner[runs], np.split(order, runs[1:]), strict=True)
                starts = [0, *ends]
                return self.resolve(
                    Sum(tuple(Order(axis.parts[k], piece - starts[k]) for k, piece in own))
                )
        if isinstance(axis, Product):
            sizes = [size_of(part) for part in axis.parts]
            grids = [place.reshape(sizes) for place in np.unravel_index(order, sizes)]
            lines = [np.moveaxis(grid, k, 0).reshape(sizes[k], -1) for k, grid in enumerate(grids)]
            if all((line == line[:, :1]).all() for line in lines):
                parts = zip(axis.parts, lines, strict=True)
                return self.resolve(Product(tuple(Order(part, line[:, 0]) for part, line in parts)))
        return Order(axis, order)

    def _unite_ordered(self, a: Order, b: Axis) -> None:
        other = self._ordered(b, np.argsort(a.order))
        if isinstance(a.part, Leaf) or not isinstance(other, Order):
            self.unite(a.part, other)
        elif isinstance(other.part, Leaf):
            self.unite(other.part, Order(a.part, np.argsort(other.order)))
        else:
            self._unite_entries(a, b)

    def _unite_entries(self, a: Axis, b: Axis) -> None:
        """Unite two axes index by index."""
        while True:
            placed = [self.placed(self.resolve(axis)) for axis in (a, b)]
            if any(places.shape[1] > 1 for own in placed for _, places in own):
                for axis in (a, b):
                    self.freeze(axis, "its indices are in two orders")
                return
            met = self._met(placed[0], placed[1], size_of(a)) + self._met(
                placed[1], placed[0], size_of(a)
            )
            parted = next(
                ((leaf, others) for leaf, others in met if (others != others[0]).any()), None
            )
            if parted is None:
                break
            self._part(*parted)
        for leaf, others in met:
            self.freeze(leaf if others[0] < 0 else None, "it meets single indices")
        for (leaf, places), (_, others) in zip(placed[0], met, strict=False):
            if others[0] >= 0:
                other, there = placed[1][others[0]]
                ranks = np.argsort(np.argsort(places[:, 0]))
                self.unite(leaf, Order(other, np.argsort(there[:, 0])[ranks]))

    @staticmethod
    def _met(own: list[Placed], others: list[Placed], size: int) -> list[tuple[Leaf, np.ndarray]]:
        """Return each occurrence in `own` with the number in `others` at each index, or -1."""
        owner = np.full(size, -1)
        for number, (_, places) in enumerate(others):
            owner[places[:, 0]] = number
        return [(leaf, owner[places[:, 0]]) for leaf, places in own]

    def _part(self, leaf: Leaf, classes: np.ndarray) -> None:
        """Split the dimension of an occurrence into one for each class in `classes`, [size]."""
        order = np.argsort(classes, kind="stable")
        reason = self._reasons[leaf.atom]
        sizes = np.unique(classes, return_counts=True)[1].tolist()
        self._refine(
            leaf.atom,
            Order(Sum(tuple(self.new(size, reason) for size in sizes)), np.argsort(order)),
        )

    def taken(self, axis: Axis | None, indices: np.ndarray) -> Any:
        """Return the axis of a result that reads `axis` at `indices`."""
        if axis is None:
            return None
        axis = self.resolve(axis)
        counts = np.bincount(indices, minlength=size_of(axis))
        if (counts == 1).all():
            return self._ordered(axis, indices)
        if isinstance(axis, Order):
            return self.taken(axis.part, axis.order[indices])
        if axis == UNIT:
            self.even.append(self.new(len(indices)))
            return self.even[-1]
        if isinstance(axis, Product):
            return self._taken_product(axis, indices)
        if isinstance(axis, Sum):
            starts = np.cumsum([0, *(size_of(part) for part in axis.parts)])
            owner = np.searchsorted(starts, indices, side="right") - 1
            places = [np.flatnonzero(owner == k) for k in range(len(axis.parts))]
            there = [
                (part, places[k], indices[places[k]] - starts[k])
                for k, part in enumerate(axis.parts)
            ]
            parts = [(self.taken(part, own), where) for part, where, own in there if len(own)]
        elif self._reasons[axis.atom]:
            return self.new(len(indices), self._reasons[axis.atom])
        else:
            if (counts != counts[0]).any():
                self._part(axis, counts)
                return self.taken(axis, indices)
            each = self.new(int(counts[0]))
            self.even.append(each)
            parts = [(Product((axis, each)), np.argsort(indices, kind="stable"))]
        order = np.argsort(np.concatenate([where for _, where in parts]))
        return self.resolve(Order(Sum(tuple(part for part, _ in parts)), order))

    def _taken_product(self, axis: Product, indices: np.ndarray) -> Axis:
        inner = size_of(axis) // size_of(axis.parts[0])
        outer, within = np.divmod(indices, inner)
        # Indices can be split into indices of each part only if they form a grid, of outer and
        # inner indices.
        for length in (n for n in range(1, len(indices) + 1) if len(indices) % n == 0):
            grids = outer.reshape(-1, length), within.reshape(-1, length)
            if (grids[0] == grids[0][:, :1]).all() and (grids[1] == grids[1][:1]).all():
                head = self.taken(axis.parts[0], grids[0][:, 0])
                return self.resolve(
                    Product((head, self.taken(Product(axis.parts[1:]), grids[1][0])))
                )
        reason = "it is read across its blocks"
        self.freeze(axis, reason)
        return self.new(len(indices), reason)

    def _unite_products(self, a: Product, b: Product) -> None:
        first, second = list(a.parts), list(b.parts)
        if [size_of(part) for part in first] != [size_of(part) for part in second]:
            first, second = self._without_single(first), self._without_single(second)
        while first and second:
            small, large = sorted((first, second), key=lambda parts: size_of(parts[0]))
            head, whole = size_of(small[0]), size_of(large[0])
            if whole % head:
                for part in first + second:
                    self.freeze(part, "its indices are grouped in two ways")
                return
            if whole > head:
                large[:1] = self.factored(large[0], (head, whole // head))
            self.unite(first.pop(0), second.pop(0))

    def _without_single(self, parts: list[Axis]) -> list[Axis]:
        for part in parts:
            if size_of(part) == 1:
                self.freeze(part, "its length is 1 and it comes and goes")
        return [part for part in parts if size_of(part) > 1]

    def _unite_sums(self, a: Axis, b: Axis) -> None:
        ends = {0}
        for axis in (a, b):
            if isinstance(axis, Sum):
                ends |= set(np.cumsum([size_of(part) for part in axis.parts]).tolist())
        sizes = np.diff(sorted(ends)).tolist()
        for one, other in zip(self.cut(a, sizes), self.cut(b, sizes), strict=True):
            self.unite(one, other)

    def cut(self, axis: Axis, sizes: list[int]) -> list[Axis]:
        """Return the axis split into consecutive parts of lengths `sizes`, without empty ones."""
        axis = self.resolve(axis)
        sizes = [size for size in sizes if size]
        if len(sizes) == 1:
            return [axis]
        if isinstance(axis, Order):
            pieces = np.split(np.arange(size_of(axis)), np.cumsum(sizes)[:-1])
            return [self.resolve(self.taken(axis, piece)) for piece in pieces]
        if isinstance(axis, Leaf):
            reason = self._reasons[axis.atom]
            self._refine(axis.atom, Sum(tuple(self.new(size, reason) for size in sizes)))
            return self.cut(axis, sizes)
        if isinstance(axis, Sum):
            return self._cut_sum(list(axis.parts), sizes)
        inner = math.prod(size_of(part) for part in axis.parts[1:])
        if any(size % inner for size in sizes):
            self.freeze(axis, "it is cut within its blocks")
            return [self.new(size, "it is cut within its blocks") for size in sizes]
        heads = self.cut(axis.parts[0], [size // inner for size in sizes])
        return [self.resolve(Product((head, *axis.parts[1:]))) for head in heads]

    def _cut_sum(self, parts: list[Axis], sizes: list[int]) -> list[Axis]:
        pieces: list[Axis] = []
        for size in sizes:
            piece: list[Axis] = []
            while size:
                part, own = parts[0], size_of(parts[0])
                if own > size:
                    parts[:1] = self.cut(part, [size, own - size])
                    continue
                piece.append(parts.pop(0))
                size -= own
            pieces.append(self.resolve(Sum(tuple(piece))))
        return pieces

    def factored(self, axis: Axis, sizes: tuple[int, ...]) -> list[Axis]:
        """Return the axis unflattened into parts of lengths `sizes`, outer first."""
        axis = self.resolve(axis)
        if isinstance(axis, Order) and isinstance(axis.part, Leaf):
            own = tuple(self.new(size, self._reasons[axis.part.atom]) for size in sizes)
            self._refine(axis.part.atom, Order(Product(own), np.argsort(axis.order)))
            return self.factored(axis, sizes)
        parts: list[Axis] = list(axis.parts) if isinstance(axis, Product) else [axis]
        factors: list[Axis] = []
        for size in sizes:
            factor: list[Axis] = []
            while size > 1:
                own = size_of(parts[0])
                if own > size or size % own:
                    if own % size:
                        reason = "its indices are grouped in two ways"
                        self.freeze(axis, reason)
                        return [self.new(length, reason) for length in sizes]
                    parts[:1] = self._halved(parts[0], size, own // size)
                    continue
                factor.append(parts.pop(0))
                size //= own
            factors.append(self.resolve(Product(tuple(factor))))
        if parts:  # of length 1
            factors[-1] = self.resolve(Product((factors[-1], *parts)))
        return factors

    def _halved(self, axis: Axis, outer: int, inner: int) -> list[Axis]:
        if isinstance(axis, Leaf):
            reason = self._reasons[axis.atom]
            self._refine(axis.atom, Product((self.new(outer, reason), self.new(inner, reason))))
            halves = self.resolve(axis)
            return list(halves.parts) if isinstance(halves, Product) else [halves]
        if isinstance(axis, Order) and isinstance(axis.part, Leaf):
            return self.factored(axis, (outer, inner))
        # Concatenated parts become rows of a matrix, whose columns move together.
        rows = self.cut(axis, [inner] * outer)
        for row in rows[1:]:
            self.unite(rows[0], row)
            self.tied.append((rows[0], row))
        return [self.new(outer, "parts that were put end to end"), rows[0]]

    def occurrences(self, axis: Axis | None) -> list[Placed]:
        """Return the `leaves` of an axis with their positions."""
        if axis is None:
            return []
        axis = self.resolve(axis)
        found = self.placed(axis)
        return sorted(found, key=lambda each: int(each[1].min())) if has_order(axis) else found

    def placed(self, axis: Axis, places: np.ndarray | None = None) -> list[Placed]:
        """Return occurrences of a resolved axis with their positions, by part."""
        places = np.arange(size_of(axis))[:, None] if places is None else places
        if isinstance(axis, Leaf):
            return [(axis, places)]
        sizes = [size_of(part) for part in axis.parts]
        if isinstance(axis, Order):
            pieces = [places[np.argsort(axis.order)]]
        elif isinstance(axis, Sum):
            pieces = np.split(places, np.cumsum(sizes)[:-1])
        else:
            grid = places.reshape(*sizes, -1)
            pieces = [np.moveaxis(grid, k, 0).reshape(size, -1) for k, size in enumerate(sizes)]
        return [
            each
            for part, own in zip(axis.parts, pieces, strict=True)
            for each in self.placed(part, own)
        ]


def has_order(axis: Axis) -> bool:
    """Test whether an axis has reordered parts."""
    return isinstance(axis, Order) or (
        not isinstance(axis, Leaf) and any(map(has_order, axis.parts))
    )


def _leaves(axis: Axis) -> list[Leaf]:
    return (
        [axis]
        if isinstance(axis, Leaf)
        else [leaf for part in axis.parts for leaf in _leaves(part)]
    )


def size_of(axis: Axis) -> int:
    """Return the length of an axis."""
    if isinstance(axis, Leaf):
        return axis.size
    sizes = [size_of(part) for part in axis.parts]
    return math.prod(sizes) if isinstance(axis, Product) else sum(sizes)
