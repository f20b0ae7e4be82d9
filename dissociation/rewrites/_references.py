"""Rules for values that are indices of an axis, such as those of the largest neurons."""

import numpy as np

from dissociation.rewrites._axes import size_of
from dissociation.rewrites._flow import Flow, Step, Value
from dissociation.rewrites._indexing import ASKED

READS = ("gather", "scatter", "scatter-add")
MOVES = ("broadcast_in_dim", "reshape", "squeeze", "slice", "transpose", "convert_element_type", "copy")
"""Operations that keep indices what they are."""


def on_indices(flow: Flow, step: Step) -> list[Value] | None:
    """Return results of operations that read at indices of an axis; freeze the axis for any other operation."""
    found, name, operands, shape = None, step.name, step.operands, step.shapes[0]
    first, other = operands[0], operands[1] if len(operands) > 1 else None
    # The condition is known to be false, as in the guard against negative indices.
    if name == "select_n" and first.zero and other is not None:
        return [other]
    if first.refers is not None and (first.pair is not None or not first.shifted):
        single = other is not None and other.known is not None and len(np.unique(other.known)) == 1
        # JAX reads at `i + n` for an index `i` below zero, which indices of an axis never are.
        if name == "lt" and other is not None and other.zero:
            return [flow.constant(np.zeros(shape, bool))]
        if name == "add" and single:
            return [Value(first.shape, list(first.axes), refers=first.refers, shifted=True)]
        if name == "eq" and not first.shifted:
            found = _one_hot(flow, first, operands[1], shape)
        if name == "concatenate" and not first.shifted:
            found = _beside(operands, shape)
    for k, value in enumerate(operands):
        moved = name in MOVES and value.column is None
        read = found is not None or moved or (name in READS and k == 1) or (name == "dynamic_slice" and k > 0)
        kept = name in MOVES or (
            name in ("scatter", "scatter-add") and operands[0].zero and operands[2].pair is value.pair
        )
        sure = not value.shifted or (value.pair is not None and kept)
        if value.refers is not None and not (sure and read):
            flow.atoms.freeze(value.refers, ASKED)
    return found


def _beside(operands: list[Value], shape: tuple[int, ...]) -> list[Value] | None:
    """Join indices of an axis with known ones, as coordinates to read at."""
    first, others = operands[0], operands[1:]
    if not shape or first.shape != (*shape[:-1], 1) or any(value.known is None for value in others):
        return None
    return [Value(shape, [*first.axes[:-1], None], refers=first.refers, column=0)]


def _one_hot(flow: Flow, where: Value, numbers: Value, shape: tuple[int, ...]) -> list[Value] | None:
    """Compare indices of an axis with all of its numbers."""
    for k, size in enumerate(shape):
        count = np.arange(size).reshape([-1 if j == k else 1 for j in range(len(shape))])
        each = where.shape[k] == 1 or where.axes[k] is None
        if size > 1 and each and numbers.known is not None and (numbers.known == count).all():
            axis = flow.lined_up([where.refers])
            if axis is None or size_of(axis) != size or flow.referring(where, axis) is None:
                return None
            own = [None if n == 1 else each for n, each in zip(where.shape, where.axes, strict=True)]
            return [Value(shape, [axis if j == k else each for j, each in enumerate(own)])]
    return None
