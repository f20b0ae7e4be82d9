"""Labels that distinguish independent copies of neurons, by entry of each value of a program."""

from collections.abc import Sequence

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dissociation.rewrites._flow import Flow, Value

Label = np.ndarray
"""Integers shaped like a value; -1 for entries of no neuron, or constant along neurons."""

Marks = dict[int, Label]
"""Labels by symbolic dimension ("atom")."""


class Copies:
    """Labels of all values in a program."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.tied: set[int] = set()
        # By index of a parameter and name of an occurrence: the atom, its axis of the parameter, and labels.
        self.rows: dict[tuple[int, tuple[int, ...]], tuple[int, int, Label]] = {}
        self._marks: dict[int, Marks] = {}  # by the `id` of a value
        # Pairs of labels to unite are only collected: `found` needs one pass over them, as connected components.
        self._pairs: list[np.ndarray] = []
        self._count = 0
        self._known: dict[int, dict[int, int]] = {}

    def marks(self, value: Value) -> Marks:
        """Return the labels of a value by dimension, without tied dimensions."""
        return {atom: label for atom, label in self._marks.get(id(value), {}).items() if atom not in self.tied}

    def mark(self, value: Value, marks: Marks) -> None:
        """Set the labels of a value."""
        for atom in marks:
            if self.axis(value, atom) < 0:
                self.tied.add(atom)
        self._marks[id(value)] = marks

    def axis(self, value: Value, atom: int) -> int:
        """Return the number of the axis that has a dimension; -1 if it is not unique."""
        if id(value) not in self._known:
            own: dict[int, int] = {}
            for k, axis in enumerate(value.axes):
                times: dict[int, np.ndarray] = {}
                for leaf, places in self.flow.atoms.occurrences(axis):
                    times.setdefault(leaf.atom, np.zeros(value.shape[k], int))[places] += 1
                own |= {inner: k if each.max() == 1 and inner not in own else -1 for inner, each in times.items()}
            self._known[id(value)] = own
        return self._known[id(value)].get(atom, -1)

    def begin(self, index: int, value: Value, free: set[int]) -> None:
        """Label a parameter: every row of neurons starts as its own copy."""
        marks: Marks = {}
        for k, axis in enumerate(value.axes):
            for leaf, positions in self.flow.atoms.occurrences(axis):
                if leaf.atom not in free:
                    continue
                shape = [positions.shape[1] if j == k else size for j, size in enumerate(value.shape)]
                ids = self._count + np.arange(np.prod(shape)).reshape(shape)
                self._count += ids.size
                self.rows[index, leaf.name] = leaf.atom, k, ids
                if positions.size == value.shape[k] and positions.shape[1] == 1:
                    marks[leaf.atom] = np.broadcast_to(ids, value.shape)
                    continue
                label = marks.get(leaf.atom, np.full(value.shape, -1))
                np.moveaxis(label, k, 0)[positions] = np.moveaxis(ids, k, 0)[None]
                marks[leaf.atom] = label
        self.mark(value, marks)

    def same(self, labels: Sequence[Label], shape: Sequence[int] | None = None) -> Label:
        """Unite labels at the same entries and return them, broadcast to `shape`."""
        shape = np.broadcast_shapes(*(label.shape for label in labels)) if shape is None else tuple(shape)
        wide = [np.broadcast_to(label, shape) for label in labels]
        # Axes along which all labels are broadcast stay of length 1: activations may be large.
        narrow = [all(label.strides[k] == 0 for label in wide) for k in range(len(shape))]
        small = [label[tuple(slice(0, 1) if one else slice(None) for one in narrow)] for label in wide]
        first = small[0]
        for label in small[1:]:
            first = np.maximum(first, label)
        for label in small if len(small) > 1 else ():
            self._unite(first, label)
        return np.broadcast_to(first, shape)

    def along(self, label: Label, axes: Sequence[int]) -> Label:
        """Unite labels along some axes, which have length 1 in the result."""
        shape = tuple(1 if k in axes else size for k, size in enumerate(label.shape))
        small = thin(label)
        first = small.max(tuple(axes), keepdims=True) if axes else small
        self._unite(np.broadcast_to(first, small.shape), small)
        return np.broadcast_to(first, shape)

    def _unite(self, first: Label, second: Label) -> None:
        differ = (first != second) & (second >= 0)
        if not differ.any():
            return
        one, other = first[differ], second[differ]
        start = other.min()
        partner = np.full(other.max() - start + 1, -1)
        partner[other - start] = one
        # With one partner for each label, as along an axis, no sorting of pairs is needed.
        if (partner[other - start] == one).all():
            there = np.flatnonzero(partner >= 0)
            self._pairs.append(np.stack([partner[there], there + start]))
        else:
            both = np.unique(one * self._count + other)
            self._pairs.append(np.stack(np.divmod(both, self._count)))

    def found(self) -> np.ndarray:
        """Return the copy of each label; -1 for labels united with no other, as of unused entries."""
        pairs = np.concatenate([np.zeros((2, 0), int), *self._pairs], 1)
        graph = coo_array((np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(self._count, self._count))
        number = connected_components(graph, directed=False)[1]
        several = np.bincount(number, minlength=1) > 1
        return np.where(several, np.cumsum(several) - 1, -1)[number]


def thin(label: Label) -> Label:
    """Return a label with its broadcast axes of length 1."""
    return label[tuple(slice(0, 1) if step == 0 else slice(None) for step in label.strides)]
