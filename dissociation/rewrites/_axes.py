"""Axes of arrays as trees of symbolic dimensions ("atoms" in code), which a symmetry may permute.

None is an axis along which an array is constant.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

Name = tuple[int, ...]
"""Name of an occurrence of a symbolic dimension."""

Shape = tuple[int, ...]


class Leaf(NamedTuple):
    """An occurrence of a symbolic dimension in an axis.

    Occurrences that replace it, after a refinement of the dimension, have names that start with
    `name`.
    """

    name: Name
    atom: int
    size: int


class Product(NamedTuple):
    """An axis flattened from `children`, the last one fastest; without children its length is 1."""

    children: tuple["Axis", ...]


class Sum(NamedTuple):
    """An axis concatenated from `children`."""

    children: tuple["Axis", ...]


class Order(NamedTuple):
    """A reordered axis: entry i is entry `order[i]` of `child`."""

    child: "Axis"
    order: np.ndarray

    @property
    def children(self) -> tuple["Axis", ...]:
        """Return the child, as a tuple."""
        return (self.child,)


Axis = Leaf | Product | Sum | Order
Axes = list[Axis | None]
"""Axes of an array."""
UNIT = Product(())
Placed = tuple[Leaf, np.ndarray]
"""An occurrence, and positions of its indices along an axis, [occurrence's size, repetitions]."""


def mapped(axis: Axis, change: Callable[[Leaf], Axis]) -> Axis:
    """Return the axis with its occurrences changed, in order."""
    if isinstance(axis, Leaf):
        return change(axis)
    if isinstance(axis, Order):
        return Order(mapped(axis.child, change), axis.order)
    return type(axis)(tuple(mapped(child, change) for child in axis.children))


class Atoms:
    """The symbolic dimensions of a program."""

    def __init__(self, *, single: bool = False) -> None:
        self.single = single  # if True, axes of length 1 have atoms too
        self._parent: list[int] = []
        self._reasons: list[str] = []  # empty if permutable
        self._refinements: dict[int, Axis] = {}  # by atom; names within count from 0
        self._num_occurrences = 0
        self.tied: list[tuple[Axis, Axis]] = []  # rows of one array: they have one exponent
        self.constant: list[Axis] = []  # axes along which arrays are constant

    def new(self, size: int, reason: str = "") -> Axis:
        """Return an axis of one new dimension, fixed if `reason` is not empty."""
        if size == 1 and not self.single:
            return UNIT
        atom = len(self._parent)
        self._parent.append(atom)
        self._reasons.append(reason)
        return self._occurrence(atom, size)

    def new_axes(self, sizes: Iterable[int], reason: str = "") -> list[Axis]:
        """Return one new axis for each size."""
        return [self.new(size, reason) for size in sizes]

    def _occurrence(self, atom: int, size: int) -> Leaf:
        self._num_occurrences += 1
        return Leaf((self._num_occurrences,), atom, size)

    def find(self, atom: int) -> int:
        """Return the representative of the dimensions united with `atom`."""
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def reason(self, atom: int) -> str:
        """Return the reason why a dimension is fixed; an empty string if it is permutable."""
        return self._reasons[self.find(atom)]

    def resolve(self, axis: Axis) -> Axis:
        """Return the axis with united and refined dimensions replaced."""
        if isinstance(axis, Leaf):
            atom = self.find(axis.atom)
            if atom not in self._refinements:
                return axis._replace(atom=atom)
            numbers = itertools.count()
            refined = mapped(
                self._refinements[atom],
                lambda leaf: leaf._replace(name=(*axis.name, next(numbers))),
            )
            return self.resolve(refined)

        if isinstance(axis, Order):
            return self._ordered(self.resolve(axis.child), axis.order)

        children = []
        for child in map(self.resolve, axis.children):
            if isinstance(child, type(axis)):
                children += child.children
            else:
                children.append(child)
        if len(children) == 1:
            return children[0]
        return type(axis)(tuple(children))

    def leaves(self, axis: Axis | None) -> list[Leaf]:
        """Return the occurrences in an axis by first position, outer before inner."""
        if axis is None:
            return []
        axis = self.resolve(axis)
        if has_order(axis):
            return [leaf for leaf, _ in self.occurrences(axis)]
        return _leaves(axis)

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
        a = self.resolve(first)
        b = self.resolve(second)
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

    def _refine(self, atom: int, refinement: Axis) -> None:
        """Replace a dimension by an axis of other dimensions."""
        reason = self._reasons[atom]
        # An atom refined by itself would make `resolve` loop for ever.
        if any(leaf.atom == atom for leaf in self.leaves(refinement)):
            if not reason and isinstance(refinement, Order):
                self._refine_by_cycles(atom, refinement.order)
            return
        self._refinements[atom] = refinement
        if reason:
            self.freeze(refinement, reason)

    def _refine_by_cycles(self, atom: int, order: np.ndarray) -> None:
        """Unite a dimension with a reordering of itself: cycles of equal length stay permutable."""
        cycles_of_length = defaultdict(list)
        is_visited = np.zeros(len(order), bool)
        for start in range(len(order)):
            index = start
            cycle = []
            while not is_visited[index]:
                is_visited[index] = True
                cycle.append(index)
                index = int(order[index])
            if cycle:
                cycles_of_length[len(cycle)].append(cycle)

        blocks = []
        positions = []
        for length, cycles in cycles_of_length.items():
            permutable = self.new(len(cycles))
            fixed = self.new(length, "it meets itself in another order")
            blocks.append(Product((permutable, fixed)))
            positions.append(np.ravel(cycles))
        inverse = np.argsort(np.concatenate(positions))
        self._refinements[atom] = Order(Sum(tuple(blocks)), inverse)

    def _ordered(self, axis: Axis, order: np.ndarray) -> Axis:
        """Return a resolved axis in another order, moved into its children if possible."""
        if isinstance(axis, Order):
            order = axis.order[order]
            axis = axis.child
        if (order == np.arange(len(order))).all():
            return axis
        reordered = None
        if isinstance(axis, Sum):
            reordered = _ordered_sum(axis, order)
        elif isinstance(axis, Product):
            reordered = _ordered_product(axis, order)
        if reordered is None:
            return Order(axis, order)
        return self.resolve(reordered)

    def _unite_ordered(self, a: Order, b: Axis) -> None:
        ordered = self._ordered(b, np.argsort(a.order))
        if isinstance(a.child, Leaf) or not isinstance(ordered, Order):
            self.unite(a.child, ordered)
        elif isinstance(ordered.child, Leaf):
            self.unite(ordered.child, Order(a.child, np.argsort(ordered.order)))
        else:
            self._unite_entries(a, b)

    def _unite_entries(self, a: Axis, b: Axis) -> None:
        """Unite two axes index by index."""
        size = size_of(a)
        while True:
            placed_a = placed(self.resolve(a))
            placed_b = placed(self.resolve(b))
            if any(positions.shape[1] > 1 for _, positions in placed_a + placed_b):
                self.freeze(a, "its indices are in two orders")
                self.freeze(b, "its indices are in two orders")
                return
            met_by_a = _met(placed_a, placed_b, size)
            met = met_by_a + _met(placed_b, placed_a, size)
            several = next((pair for pair in met if np.ptp(pair[1])), None)
            if several is None:
                break
            self._split(*several)

        for leaf, numbers in met:
            if numbers[0] < 0:
                self.freeze(leaf, "it meets single indices")
        for (leaf, positions), (_, numbers) in zip(placed_a, met_by_a, strict=True):
            if numbers[0] >= 0:
                partner, partner_positions = placed_b[numbers[0]]
                ranks = np.argsort(np.argsort(positions[:, 0]))
                order = np.argsort(partner_positions[:, 0])
                self.unite(leaf, Order(partner, order[ranks]))

    def _split(self, leaf: Leaf, classes: np.ndarray) -> None:
        """Split the dimension of an occurrence into one for each class in `classes`, [size]."""
        _, sizes = np.unique(classes, return_counts=True)
        blocks = self.new_axes(sizes.tolist(), self._reasons[leaf.atom])
        order = np.argsort(classes, kind="stable")
        self._refine(leaf.atom, Order(Sum(tuple(blocks)), np.argsort(order)))

    def taken(self, axis: Axis | None, indices: np.ndarray) -> Any:
        """Return the axis of a result that reads `axis` at `indices`."""
        if axis is None:
            return None
        axis = self.resolve(axis)
        counts = np.bincount(indices, minlength=size_of(axis))
        if (counts == 1).all():
            return self._ordered(axis, indices)
        if isinstance(axis, Order):
            return self.taken(axis.child, axis.order[indices])
        if isinstance(axis, Leaf):
            return self._taken_leaf(axis, indices, counts)
        if isinstance(axis, Sum):
            return self._taken_sum(axis, indices)
        if axis.children:
            return self._taken_product(axis, indices)
        repeats = self.new(len(indices))
        self.constant.append(repeats)
        return repeats

    def _taken_leaf(self, leaf: Leaf, indices: np.ndarray, counts: np.ndarray) -> Axis:
        """Read a dimension at `indices`, which hold its entries as often as `counts`, [size]."""
        reason = self._reasons[leaf.atom]
        if reason:
            return self.new(len(indices), reason)
        if (counts != counts[0]).any():
            self._split(leaf, counts)
            return self.taken(leaf, indices)
        repeats = self.new(int(counts[0]))
        self.constant.append(repeats)
        order = np.argsort(indices, kind="stable")
        return self.resolve(Order(Product((leaf, repeats)), np.argsort(order)))

    def _taken_sum(self, axis: Sum, indices: np.ndarray) -> Axis:
        starts = np.cumsum([0, *sizes_of(axis)])
        block_of_index = np.searchsorted(starts, indices, side="right") - 1
        blocks = []
        positions = []
        for number, child in enumerate(axis.children):
            positions_in_result = np.flatnonzero(block_of_index == number)
            if len(positions_in_result):
                block_indices = indices[positions_in_result] - starts[number]
                blocks.append(self.taken(child, block_indices))
                positions.append(positions_in_result)
        order = np.argsort(np.concatenate(positions))
        return self.resolve(Order(Sum(tuple(blocks)), order))

    def _taken_product(self, axis: Product, indices: np.ndarray) -> Axis:
        head = axis.children[0]
        tail = Product(axis.children[1:])
        outer, inner = np.divmod(indices, size_of(axis) // size_of(head))
        # Indices can be split into indices of each factor only if they form a grid, of outer and
        # inner indices.
        for length in range(1, len(indices) + 1):
            if len(indices) % length:
                continue
            rows = outer.reshape(-1, length)
            columns = inner.reshape(-1, length)
            if (rows == rows[:, :1]).all() and (columns == columns[:1]).all():
                head = self.taken(head, rows[:, 0])
                return self.resolve(Product((head, self.taken(tail, columns[0]))))

        reason = "it is read across its blocks"
        self.freeze(axis, reason)
        return self.new(len(indices), reason)

    def _unite_products(self, a: Product, b: Product) -> None:
        first = list(a.children)
        second = list(b.children)
        if sizes_of(a) != sizes_of(b):
            first = self._without_single(first)
            second = self._without_single(second)

        while first and second:
            small, large = sorted((first, second), key=lambda factors: size_of(factors[0]))
            outer = size_of(small[0])
            inner, remainder = divmod(size_of(large[0]), outer)
            if remainder:
                for factor in first + second:
                    self.freeze(factor, "its indices are grouped in two ways")
                return
            if inner > 1:
                large[:1] = self.factored(large[0], (outer, inner))
            self.unite(first.pop(0), second.pop(0))

    def _without_single(self, factors: list[Axis]) -> list[Axis]:
        """Fix axes of length 1 and return the longer ones."""
        for factor in factors:
            if size_of(factor) == 1:
                self.freeze(factor, "its length is 1 and it comes and goes")
        return [factor for factor in factors if size_of(factor) > 1]

    def _unite_sums(self, a: Axis, b: Axis) -> None:
        ends = {0}
        for axis in (a, b):
            if isinstance(axis, Sum):
                ends.update(itertools.accumulate(sizes_of(axis)))
        sizes = np.diff(sorted(ends)).tolist()
        for block_a, block_b in zip(self.cut(a, sizes), self.cut(b, sizes), strict=True):
            self.unite(block_a, block_b)

    def cut(self, axis: Axis, sizes: list[int]) -> list[Axis]:
        """Return the axis split into consecutive blocks of lengths `sizes`, without empty ones."""
        axis = self.resolve(axis)
        sizes = list(filter(None, sizes))
        if len(sizes) == 1:
            return [axis]
        if isinstance(axis, Order):
            pieces = np.split(np.arange(size_of(axis)), np.cumsum(sizes)[:-1])
            return [self.resolve(self.taken(axis, piece)) for piece in pieces]
        if isinstance(axis, Leaf):
            blocks = self.new_axes(sizes, self._reasons[axis.atom])
            self._refine(axis.atom, Sum(tuple(blocks)))
            return self.cut(axis, sizes)
        if isinstance(axis, Sum):
            return self._cut_sum(list(axis.children), sizes)

        head, *tail = axis.children
        outer_sizes = []
        for size in sizes:
            outer, remainder = divmod(size, size_of(Product(tuple(tail))))
            if remainder:
                self.freeze(axis, "it is cut within its blocks")
                return self.new_axes(sizes, "it is cut within its blocks")
            outer_sizes.append(outer)
        heads = self.cut(head, outer_sizes)
        return [self.resolve(Product((head, *tail))) for head in heads]

    def _cut_sum(self, blocks: list[Axis], sizes: list[int]) -> list[Axis]:
        pieces = []
        for size in sizes:
            piece = []
            while size:
                length = size_of(blocks[0])
                if length > size:
                    blocks[:1] = self.cut(blocks[0], [size, length - size])
                    continue
                piece.append(blocks.pop(0))
                size -= length
            pieces.append(self.resolve(Sum(tuple(piece))))
        return pieces

    def factored(self, axis: Axis, sizes: Shape) -> list[Axis]:
        """Return the axis unflattened into factors of lengths `sizes`, outer first."""
        axis = self.resolve(axis)
        if isinstance(axis, Order) and isinstance(axis.child, Leaf):
            atom = axis.child.atom
            grid = Product(tuple(self.new_axes(sizes, self._reasons[atom])))
            self._refine(atom, Order(grid, np.argsort(axis.order)))
            return self.factored(axis, sizes)

        remaining = [axis]
        if isinstance(axis, Product):
            remaining = list(axis.children)
        factors: list[Axis] = []
        for size in sizes:
            factor = []
            while size > 1:
                length = size_of(remaining[0])
                if length <= size and size % length == 0:
                    factor.append(remaining.pop(0))
                    size //= length
                elif length % size == 0:
                    remaining[:1] = self._halved(remaining[0], size, length // size)
                else:
                    reason = "its indices are grouped in two ways"
                    self.freeze(axis, reason)
                    return self.new_axes(sizes, reason)
            factors.append(self.resolve(Product(tuple(factor))))
        if remaining:  # of length 1
            factors[-1] = self.resolve(Product((factors[-1], *remaining)))
        return factors

    def _halved(self, axis: Axis, outer: int, inner: int) -> list[Axis]:
        """Return the axis unflattened into two factors."""
        if isinstance(axis, Leaf):
            halves = self.new_axes((outer, inner), self._reasons[axis.atom])
            self._refine(axis.atom, Product(tuple(halves)))
            refined: Any = self.resolve(axis)
            return list(refined.children)
        if isinstance(axis, Order) and isinstance(axis.child, Leaf):
            return self.factored(axis, (outer, inner))

        # Concatenated blocks become rows of a matrix, whose columns move together.
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
        occurrences = placed(axis)
        if has_order(axis):
            occurrences.sort(key=lambda occurrence: int(occurrence[1].min()))
        return occurrences


def _ordered_sum(axis: Sum, order: np.ndarray) -> Sum | None:
    """Return the sum of reordered blocks, or None if `order` mixes entries of blocks."""
    ends = np.cumsum(sizes_of(axis))
    block_of_entry = np.searchsorted(ends, order, side="right")
    runs = np.flatnonzero(np.diff(block_of_entry, prepend=-1))
    if len(runs) != len(axis.children):
        return None
    starts = [0, *ends]
    blocks = []
    for run, indices in zip(runs, np.split(order, runs[1:]), strict=True):
        number = block_of_entry[run]
        blocks.append(Order(axis.children[number], indices - starts[number]))
    return Sum(tuple(blocks))


def _ordered_product(axis: Product, order: np.ndarray) -> Product | None:
    """Return the product of reordered factors, or None if `order` does not form a grid."""
    sizes = sizes_of(axis)
    factors = []
    for k, indices in enumerate(np.unravel_index(order, sizes)):
        grid = np.moveaxis(indices.reshape(sizes), k, 0)
        rows = grid.reshape(sizes[k], -1)
        if (rows != rows[:, :1]).any():
            return None
        factors.append(Order(axis.children[k], rows[:, 0]))
    return Product(tuple(factors))


def _met(
    occurrences: list[Placed], opposite: list[Placed], size: int
) -> list[tuple[Leaf, np.ndarray]]:
    """Return each occurrence with the number in `opposite` at each of its indices, or -1."""
    number_at = np.full(size, -1)
    for number, (_, positions) in enumerate(opposite):
        number_at[positions[:, 0]] = number
    return [(leaf, number_at[positions[:, 0]]) for leaf, positions in occurrences]


def placed(axis: Axis, positions: np.ndarray | None = None) -> list[Placed]:
    """Return occurrences of a resolved axis with their positions, by child."""
    if positions is None:
        positions = np.arange(size_of(axis))[:, None]
    if isinstance(axis, Leaf):
        return [(axis, positions)]

    sizes = sizes_of(axis)
    if isinstance(axis, Order):
        pieces = [positions[np.argsort(axis.order)]]
    elif isinstance(axis, Sum):
        pieces = np.split(positions, np.cumsum(sizes)[:-1])
    else:
        grid = positions.reshape(*sizes, -1)
        pieces = [np.moveaxis(grid, k, 0).reshape(size, -1) for k, size in enumerate(sizes)]

    occurrences = []
    for child, piece in zip(axis.children, pieces, strict=True):
        occurrences += placed(child, piece)
    return occurrences


def has_order(axis: Axis) -> bool:
    """Return True if an axis is reordered, or one of its descendants is."""
    if isinstance(axis, Leaf):
        return False
    return isinstance(axis, Order) or any(map(has_order, axis.children))


def _leaves(axis: Axis) -> list[Leaf]:
    if isinstance(axis, Leaf):
        return [axis]
    return [leaf for child in axis.children for leaf in _leaves(child)]


def size_of(axis: Axis) -> int:
    """Return the length of an axis."""
    if isinstance(axis, Leaf):
        return axis.size
    if isinstance(axis, Product):
        return math.prod(sizes_of(axis))
    return sum(sizes_of(axis))


def sizes_of(axis: Product | Sum | Order) -> list[int]:
    """Return the lengths of an axis' children."""
    return list(map(size_of, axis.children))
