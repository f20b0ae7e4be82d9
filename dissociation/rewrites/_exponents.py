"""Solve the equations that a program sets for exponents of scalings and of duplicated neurons."""

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from dissociation.rewrites._axes import Axis, has_order
from dissociation.rewrites._flow import Equation, Flow

TOLERANCE = 1e-9

Row = tuple[tuple[tuple[tuple[int, ...], float], ...], float]


def equations_of(flow: Flow) -> dict[int, list[Row]]:
    """Return the equations of each dimension: terms (name, coefficient) and their sum."""
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
                # Most are frozen, as indices that were grouped in two ways. Others get no exponents, which is safe.
                for leaf in filter(None, each):
                    rows.setdefault(leaf.atom, []).append((((leaf.name, 1.0),), 0.0))
                continue
            row = tuple((leaf.name, weight) for leaf, (_, weight) in zip(each, expanded, strict=True))
            rows.setdefault(each[0].atom, []).append((row, total))
    return rows


def _place_by_place(flow: Flow, terms: Sequence[tuple[Axis, float]], total: float, rows: dict[int, list[Row]]) -> None:
    """Add the equations of reordered axes: occurrences at the same places share one."""
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
    # Eliminate values within the program first, then outgoing slots, then incoming ones, the last first. The free
    # unknowns of the basis are then incoming weights.
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
