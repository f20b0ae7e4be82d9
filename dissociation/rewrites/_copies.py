"""Find independent copies of a group of neurons: heads, layers of a stack, groups of channels.

Every row of a parameter starts as its own copy, with a label. Operations unite the labels that they
combine.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dissociation.rewrites._axes import UNIT, Name
from dissociation.rewrites._flow import Flow, Step, Value
from dissociation.rewrites._indexing import WRITES, AxisMap, clipped, update_axes
from dissociation.rewrites._operation_rules import (
    ALONG,
    COMPARISONS,
    LIKE_SUMS,
    MIXED,
    POWERS,
    REDUCTIONS,
    SAME,
    WINDOWS,
)

LONGEST = 256
"""Largest number of loop iterations whose copies are distinguished."""

Label = np.ndarray
"""Integers shaped like a value; -1 for entries of no neuron, or constant along neurons."""

Marks = dict[int, Label]
"""Labels by symbolic dimension ("atom")."""

Labels = list[Any]
"""Labels by operand or result; None if the dimension does not occur."""


class Copies:
    """Labels of all values in a program."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.tied: set[int] = set()
        # By index of a parameter and name of an occurrence: the atom, its axis of the parameter,
        # and labels.
        self.rows: dict[tuple[int, Name], tuple[int, int, Label]] = {}
        self._marks: dict[int, Marks] = {}  # by the `id` of a value
        # Pairs of labels to unite are only collected: `copy_of_label` needs one pass over them, as
        # connected components.
        self._pairs: list[np.ndarray] = []
        self._num_labels = 0
        self._axis_of_atom: dict[int, dict[int, int]] = {}  # by the `id` of a value

    def marks(self, value: Value) -> Marks:
        """Return the labels of a value by dimension, without tied dimensions."""
        marks = self._marks.get(id(value), {})
        return {atom: label for atom, label in marks.items() if atom not in self.tied}

    def mark(self, value: Value, marks: Marks) -> None:
        """Set the labels of a value."""
        for atom in marks:
            if self.axis(value, atom) < 0:
                self.tied.add(atom)
        self._marks[id(value)] = marks

    def axis(self, value: Value, atom: int) -> int:
        """Return the number of the axis that has a dimension; -1 if it is not unique."""
        if id(value) not in self._axis_of_atom:
            self._axis_of_atom[id(value)] = self._find_axes(value)
        return self._axis_of_atom[id(value)].get(atom, -1)

    def _find_axes(self, value: Value) -> dict[int, int]:
        axis_of_atom: dict[int, int] = {}
        for k, axis in enumerate(value.axes):
            counts: dict[int, np.ndarray] = {}
            for leaf, positions in self.flow.atoms.occurrences(axis):
                counts.setdefault(leaf.atom, np.zeros(value.shape[k], int))[positions] += 1
            for atom, count in counts.items():
                is_unique = count.max(initial=1) == 1 and atom not in axis_of_atom
                axis_of_atom[atom] = k if is_unique else -1
        return axis_of_atom

    def begin(self, index: int, value: Value, free: set[int]) -> None:
        """Label a parameter."""
        marks: Marks = {}
        for k, axis in enumerate(value.axes):
            for leaf, positions in self.flow.atoms.occurrences(axis):
                if leaf.atom not in free:
                    continue
                num_repeats = positions.shape[1]
                shape = list(value.shape)
                shape[k] = num_repeats
                ids = self._num_labels + np.arange(np.prod(shape)).reshape(shape)
                self._num_labels += ids.size
                self.rows[index, leaf.name] = leaf.atom, k, ids
                if positions.size == value.shape[k] and num_repeats == 1:
                    marks[leaf.atom] = np.broadcast_to(ids, value.shape)
                    continue
                label = marks.get(leaf.atom, np.full(value.shape, -1))
                np.moveaxis(label, k, 0)[positions] = np.moveaxis(ids, k, 0)[None]
                marks[leaf.atom] = label
        self.mark(value, marks)

    def same(self, labels: Sequence[Label], shape: Sequence[int] | None = None) -> Label:
        """Unite labels at the same entries and return them, broadcast to `shape`."""
        if shape is None:
            shape = np.broadcast_shapes(*(label.shape for label in labels))
        wide = [np.broadcast_to(label, shape) for label in labels]
        # Axes along which all labels are broadcast stay of length 1: activations may be large.
        varies = np.any([label.strides for label in wide], axis=0)
        narrow = [label[_without_repeats(varies)] for label in wide]
        united = functools.reduce(np.maximum, narrow)
        if len(narrow) > 1:
            for label in narrow:
                self._unite(united, label)
        return np.broadcast_to(united, shape)

    def placed(
        self, label: Label, order: Sequence[int | None], shape: Sequence[int] | None = None
    ) -> Label:
        """Return labels of which axis i is axis `order[i]`, or new for None.

        Labels are united along all other axes.
        """
        removed = tuple(k for k in range(label.ndim) if k not in order)
        if removed:
            thin_label = thin(label)
            largest = thin_label.max(removed, keepdims=True)
            self._unite(np.broadcast_to(largest, thin_label.shape), thin_label)
            lengths = np.array(label.shape)
            lengths[list(removed)] = 1
            label = np.broadcast_to(largest, lengths)

        moved = label.transpose([*(k for k in order if k is not None), *removed])
        moved = moved[(..., *[0] * len(removed))]
        moved = np.expand_dims(moved, [i for i, k in enumerate(order) if k is None])
        if shape is None:
            return moved
        return np.broadcast_to(moved, shape)

    def _unite(self, first: Label, second: Label) -> None:
        is_different = (first != second) & (second >= 0)
        if not is_different.any():
            return
        targets = first[is_different]
        sources = second[is_different]
        target_of = np.full(sources.max() + 1, -1)
        target_of[sources] = targets
        if (target_of[sources] == targets).all():
            # Most labels have one partner, at many entries.
            sources = np.flatnonzero(target_of >= 0)
            targets = target_of[sources]
        self._pairs.append(np.stack([targets, sources]))

    def copy_of_label(self) -> np.ndarray:
        """Return the copy of each label; -1 for labels without a partner, as of unused entries."""
        pairs = np.concatenate([np.zeros((2, 0), int), *self._pairs], 1)
        size = self._num_labels
        graph = coo_array((np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(size, size))
        _, components = connected_components(graph, directed=False)
        is_copy = np.bincount(components, minlength=1) > 1
        copies = np.where(is_copy, np.cumsum(is_copy) - 1, -1)
        return copies[components]


class Operands(NamedTuple):
    """One dimension on the operands of an operation.

    Attributes:
        atom: The dimension.
        labels: Label on each operand, or None.
        axes: Axis of each operand that has the dimension, -1 without a label.
    """

    atom: int
    labels: Labels
    axes: list[int]


Rule = Callable[[Copies, Step, Operands], Labels | None]


def _without_repeats(varies: Iterable[Any]) -> tuple[slice, ...]:
    """Return slices of length 1 along the axes on which labels do not vary."""
    return tuple(slice(None if axis_varies else 1) for axis_varies in varies)


def thin(label: Label) -> Label:
    """Return a label with its broadcast axes of length 1."""
    return label[_without_repeats(label.strides)]


def run(copies: Copies, steps: Sequence[Step]) -> None:
    """Propagate labels through a program."""
    for step in steps:
        if step.name in PARTS:
            PARTS[step.name](copies, step)
            continue
        operand_ids = set(map(id, step.operands))
        if step.name not in SKIPPED and operand_ids.isdisjoint(map(id, step.results)):
            _apply(copies, step)


def _apply(copies: Copies, step: Step) -> None:
    operand_marks = list(map(copies.marks, step.operands))
    result_marks: list[Marks] = [{} for _ in step.results]
    for atom in set().union(*operand_marks):
        labels = _ruled(copies, step, operand_marks, atom)
        if labels is None:
            # If no rule applies, no copies are known to be independent. It is safe to move all of
            # them together.
            copies.tied.add(atom)
            continue
        for marks, label in zip(result_marks, labels, strict=True):
            if label is not None and (thin(label) >= 0).any():  # a slice may hold no neuron
                marks[atom] = label
    for value, marks in zip(step.results, result_marks, strict=True):
        copies.mark(value, marks)


def _ruled(copies: Copies, step: Step, operand_marks: list[Marks], atom: int) -> Labels | None:
    """Apply the rule of an operation to one dimension, or return None if no rule applies."""
    labels = [marks.get(atom) for marks in operand_marks]
    axes = [-1] * len(labels)
    for k, label in enumerate(labels):
        if label is not None:
            axes[k] = copies.axis(step.operands[k], atom)
    is_crossing = len(set(axes) - {-1}) > 1
    if step.name not in RULES or (is_crossing and step.name not in CROSSING):
        return None
    return RULES[step.name](copies, step, Operands(atom, labels, axes))


def _one_by_one(copies: Copies, step: Step, operands: Operands) -> Labels:
    labels = [label for label in operands.labels if label is not None]
    return [copies.same(labels, value.shape) for value in step.results]


def _whole_axes(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    """Propagate labels through an operation that moves axes, or combines all entries along some."""
    label = operands.labels[0]
    if len(operands.labels) > 1:
        label = _one_by_one(copies, step, operands)[0]
    order = _order(step)
    if max(operands.axes) not in order:
        return [None] * len(step.results)
    return [copies.placed(label, order, value.shape) for value in step.results]


def _order(step: Step) -> AxisMap:
    """Return the operand's axis for each axis of a result.

    It is None for axes that are new, and for those along which all entries are combined.
    """
    params = step.params
    shape = step.operands[0].shape
    if step.name == "transpose":
        return list(params["permutation"])
    order: AxisMap = [None] * len(step.shape)
    if step.name == "broadcast_in_dim":
        for k, target in enumerate(params["broadcast_dimensions"]):
            order[target] = k
        return order
    if "axes" in params or step.name == "squeeze":
        removed = params["axes"] if "axes" in params else params["dimensions"]  # perhaps none
        return [k for k in range(len(shape)) if k not in removed]

    if "window_dimensions" in params:
        widths = params["window_dimensions"]
        combined = [k for k, n in enumerate(widths) if n > 1 or shape[k] != step.shape[k]]
    elif "fft_lengths" in params:
        combined = range(len(shape) - len(params["fft_lengths"]), len(shape))
    else:
        combined = [params.get("axis", params.get("dimension", -1)) % len(shape)]
    for k in range(len(shape)):
        if k not in combined:
            order[k] = k
    return order


def _moved(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    moved = MOVES[step.name](step, operands.labels[0])
    if isinstance(moved, list):
        return moved
    return [moved]


def _reshape(step: Step, label: Label) -> Label:
    if thin(label).size == 1:
        return np.broadcast_to(label.flat[0], step.shape)
    return label.reshape(step.shape)


def _pad(step: Step, label: Label) -> Label:
    with jax.ensure_compile_time_eval():
        padded = jax.lax.pad(np.ascontiguousarray(label), -1, step.params["padding_config"])
        return np.asarray(padded)


def _slice(step: Step, label: Label) -> Label:
    starts = step.params["start_indices"]
    strides = step.params["strides"] or (1,) * label.ndim
    return label[tuple(map(slice, starts, step.params["limit_indices"], strides))]


def _joined(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    labels = []
    for value, label in zip(step.operands, operands.labels, strict=True):
        if label is None:
            label = np.broadcast_to(-1, value.shape)
        labels.append(label)
    if step.name == "stack":
        return [np.stack(labels, step.params["axis"])]
    return [np.concatenate(labels, step.params["dimension"])]


def _read(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    """Propagate labels through `gather`; entries read at unknown places get one label."""
    value, where = step.operands
    value_label, where_label = operands.labels
    numbers = step.params["dimension_numbers"]
    sizes = step.params["slice_sizes"]
    index_axes = [k for k in range(len(step.shape)) if k not in numbers.offset_dims]

    labels = []
    if value_label is not None and where.known is not None:
        with jax.ensure_compile_time_eval():
            read = jax.lax.gather(
                np.ascontiguousarray(value_label),
                where.known,
                numbers,
                sizes,
                mode=step.params["mode"],
                fill_value=-1,
            )
        labels.append(np.asarray(read))
    elif value_label is not None:
        order: AxisMap = [None] * len(step.shape)
        batching = zip(
            numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True
        )
        for n, k in batching:
            order[index_axes[n]] = k
        outside = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
        window = [k for k in range(len(sizes)) if k not in outside]
        for n, k in zip(numbers.offset_dims, window, strict=True):
            if sizes[k] == value.shape[k]:
                order[n] = k
        labels.append(copies.placed(value_label, order))
    if where_label is not None:
        order = [None] * len(step.shape)
        for n, k in enumerate(index_axes):
            order[k] = n
        labels.append(copies.placed(where_label, order))
    return [copies.same(labels, step.shape)]


def _written(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    label, update_label = operands.labels[:2]
    update = step.operands[1]
    if step.name != "dynamic_update_slice":
        if update_label is not None:  # the second operand holds indices
            return None
        update_label = operands.labels[2]
        update = step.operands[2]

    shape = step.operands[0].shape
    labels = []
    if label is not None:
        labels.append(label)
    if update_label is not None:
        numbers = step.params.get("dimension_numbers")
        order = update_axes(numbers, len(shape), len(update.shape))
        for k, update_axis in enumerate(order):
            if update_axis is not None and update.shape[update_axis] != shape[k]:
                order[k] = None
        labels.append(copies.placed(update_label, order))
    return [copies.same(labels, shape)]


def _dynamic_slice(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    label = operands.labels[0]
    for k, size in enumerate(step.shape):
        start: Any = step.operands[1 + k].known
        length = label.shape[k]
        if size < length and start is None:  # any entry may be read
            order: AxisMap = list(range(label.ndim))
            order[k] = None
            label = copies.placed(label, order)
        elif size < length:
            indices = clipped(start, length, size) + np.arange(size)
            label = np.take(label, indices, k)
    return [np.broadcast_to(label, step.shape)]


def _product(
    copies: Copies,
    operands: Operands,
    letters: Sequence[list[Any]],
    result_letters: list[Any],
    shape: Sequence[int],
) -> Labels | None:
    """Return the labels of a sum of products in the notation of `einsum`."""
    _, labels, axes = operands
    along = {letters[side][axis] for side, axis in enumerate(axes) if axis >= 0}
    if len(along) > 1:
        return None
    all_letters = list(dict.fromkeys([*result_letters, *letters[0], *letters[1]]))
    aligned = []
    for side, label in enumerate(labels):
        if label is None:
            continue
        # Along axes that the other factor lacks, each of its entries is multiplied with all
        # entries of this factor.
        order: AxisMap = [None] * len(all_letters)
        for k, letter in enumerate(letters[side]):
            if min(axes) < 0 or letter in letters[1 - side]:
                order[all_letters.index(letter)] = k
        aligned.append(copies.placed(label, order))

    label = copies.same(aligned)
    if not along <= set(result_letters):
        return [None]
    return [copies.placed(label, range(len(result_letters)), shape)]


def _dot(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    contracted, batched = step.params["dimension_numbers"]
    letters: list[list[Any]] = []
    result_letters: list[Any] = [("batch", n) for n in range(len(batched[0]))]
    for side, value in enumerate(step.operands):
        free = [(side, k) for k in range(len(value.shape))]
        factor_letters: list[Any] = list(free)
        for n, k in enumerate(contracted[side]):
            factor_letters[k] = ("sum", n)
        for n, k in enumerate(batched[side]):
            factor_letters[k] = ("batch", n)
        letters.append(factor_letters)
        result_letters += [letter for letter in free if letter in factor_letters]
    return _product(copies, operands, letters, result_letters, step.shape)


def _convolution(copies: Copies, step: Step, operands: Operands) -> Labels | None:
    numbers = step.params["dimension_numbers"]
    groups = step.params["feature_group_count"]
    letters = [["image", "group", "in"], ["group", "out", "in"]]
    grouped = Operands(operands.atom, [None, None], [-1, -1])
    for side, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
        if operands.labels[side] is None:
            continue
        if operands.axes[side] not in spec[:2]:
            return None
        label, letter = _grouped(copies, step, operands, side, spec)
        grouped.labels[side] = label
        grouped.axes[side] = letters[side].index(letter)

    batch, channel, *_ = numbers.out_spec
    num_images = step.shape[batch]
    num_outputs = step.shape[channel]
    blocks = num_images, groups, num_outputs // groups
    labels = _product(copies, grouped, letters, ["image", "group", "out"], blocks)
    if labels is None or labels[0] is None:
        return labels
    order: AxisMap = [None] * len(step.shape)
    order[batch] = 0
    order[channel] = 1
    label = labels[0].reshape(num_images, num_outputs)
    return [copies.placed(label, order, step.shape)]


def _grouped(
    copies: Copies, step: Step, operands: Operands, side: int, spec: Sequence[Any]
) -> tuple[Label, str]:
    """Return a convolution's labels by feature group, and the letter of the axis of neurons."""
    value = step.operands[side]
    axis = operands.axes[side]
    groups = step.params["feature_group_count"]
    divided = spec[1 - side]  # axis that feature groups divide
    sizes = groups, value.shape[divided] // groups
    shape = (*sizes, -1) if side else (-1, *sizes)
    label = copies.placed(operands.labels[side], spec[:2]).reshape(shape)
    if axis == divided:
        atoms = copies.flow.atoms
        block = atoms.factored(value.axes[divided] or UNIT, sizes)[0]
        if any(leaf.atom == operands.atom for leaf in atoms.leaves(block)):
            return label, "group"
    if axis == spec[1]:
        return label, "in"
    return label, ("image", "out")[side]


def _scan(copies: Copies, step: Step) -> None:
    body = step.parts[0]
    first = step.params["num_consts"]
    num_carry = step.params["num_carry"]
    last = first + num_carry
    carry = body.inputs[first:last]
    ends = body.outputs[:num_carry]
    _hand_on(copies, step.operands[first:last], carry)
    operand_marks = list(map(copies.marks, step.operands[last:]))

    # One run of the body is enough for equal labels, and safe for a loop that is too long to
    # unroll.
    runs_once = step.params["length"] > LONGEST or not any(map(_differs, operand_marks))
    turns: Sequence[int] = range(step.params["length"])
    if runs_once:
        turns = [0]
    elif step.params["reverse"]:
        turns = turns[::-1]
    marks_of_turn: dict[int, list[Marks]] = {}
    for turn in turns:
        for value, marks in zip(body.inputs[last:], operand_marks, strict=True):
            slice_marks: Marks = {}
            for atom, label in marks.items():
                if runs_once:
                    slice_marks[atom] = copies.placed(label, range(1, label.ndim))
                else:
                    slice_marks[atom] = label[turn]
            copies.mark(value, slice_marks)
        if runs_once:
            _settle(copies, [body.steps], carry, ends)
        else:
            run(copies, body.steps)
        marks_of_turn[turn] = list(map(copies.marks, body.outputs[num_carry:]))
        _hand_on(copies, ends, carry)

    for k, value in enumerate(step.results[num_carry:]):
        _stack_turns(copies, value, [marks_of_turn[turn][k] for turn in sorted(turns)])


def _hand_on(copies: Copies, sources: list[Value], targets: list[Value]) -> None:
    """Set the labels of values to those of other values, which may be among them."""
    for target, marks in zip(targets, list(map(copies.marks, sources)), strict=True):
        copies.mark(target, marks)


def _differs(marks: Marks) -> bool:
    """Return True if labels differ between the iterations of a loop."""
    return any((label != label[:1]).any() for label in marks.values())


def _stack_turns(copies: Copies, value: Value, marks_of_turns: list[Marks]) -> None:
    """Set the labels of a loop's output to those of all iterations; a single one is for all."""
    stacked: Marks = {}
    missing = np.full(value.shape[1:], -1)
    for atom in set().union(*marks_of_turns):
        labels = [marks.get(atom, missing) for marks in marks_of_turns]
        label = labels[0]
        if len(labels) > 1:
            label = np.stack(labels)
        stacked[atom] = np.broadcast_to(label, value.shape)
    copies.mark(value, stacked)


def _merged(copies: Copies, value: Value, cases: list[Marks]) -> Marks:
    """Unite the labels that a value has in several cases."""
    merged: Marks = {}
    for atom in set().union(*cases):
        labels = [marks[atom] for marks in cases if atom in marks]
        merged[atom] = copies.same(labels, value.shape)
    return merged


def _settle(
    copies: Copies, programs: list[list[Step]], carry: list[Value], ends: list[Value]
) -> None:
    """Propagate labels through loop bodies until the carried labels stop changing."""
    is_settled = False
    # Labels only unite, so the loop ends.
    while not is_settled:
        is_settled = True
        for steps in programs:
            run(copies, steps)
        for value, end_marks in zip(carry, list(map(copies.marks, ends)), strict=True):
            marks = copies.marks(value)
            merged = _merged(copies, value, [marks, end_marks])
            for atom, label in merged.items():
                if atom not in marks or ((label >= 0) & (marks[atom] < 0)).any():
                    is_settled = False
            copies.mark(value, merged)


def _while(copies: Copies, step: Step) -> None:
    test, body = step.parts
    carry = body.inputs[step.params["body_nconsts"] :]
    _hand_on(copies, step.operands[len(step.operands) - len(carry) :], carry)
    # The number of iterations is unknown: one label must hold for all of them.
    _settle(copies, [test.steps, body.steps], carry, body.outputs)


def _cond(copies: Copies, step: Step) -> None:
    for branch in step.parts:
        run(copies, branch.steps)
    for k, value in enumerate(step.results):
        cases = [copies.marks(branch.outputs[k]) for branch in step.parts]
        copies.mark(value, _merged(copies, value, cases))


CROSSING = ("gather", *WRITES, "dynamic_update_slice", "dot_general", "conv_general_dilated")
"""Operations of which two operands may have a dimension on different axes."""

SKIPPED = ("optimization_barrier", "name", "sharding_constraint")
"""Operations that return their operands."""

PARTS: dict[str, Callable[[Copies, Step], None]] = {"scan": _scan, "while": _while, "cond": _cond}

MOVES: dict[str, Callable[[Step, Label], Label | list[Label]]] = {
    "reshape": _reshape,
    "rev": lambda step, label: np.flip(label, step.params["dimensions"]),
    "slice": _slice,
    "take": lambda step, label: label.take(step.params["indices"], step.params["dimensions"][0]),
    "tile": lambda step, label: np.tile(label, step.params["reps"]),
    "pad": _pad,
    "split": lambda step, label: np.split(
        label, np.cumsum(step.params["sizes"])[:-1], step.params["axis"]
    ),
    "unstack": lambda step, label: list(np.moveaxis(label, step.params["axis"], 0)),
}

RULES: dict[str, Rule] = {
    **dict.fromkeys((*LIKE_SUMS, *SAME, *POWERS, *COMPARISONS, *MIXED), _one_by_one),
    **dict.fromkeys(
        ("integer_pow", "pow", "mul", "div", "select_n", "bitcast_convert_type"), _one_by_one
    ),
    **dict.fromkeys(
        ("transpose", "broadcast_in_dim", "squeeze", *REDUCTIONS, "argmax", "argmin"), _whole_axes
    ),
    **dict.fromkeys((*ALONG, *WINDOWS, "sort", "top_k", "fft"), _whole_axes),
    **dict.fromkeys(MOVES, _moved),
    **dict.fromkeys(("concatenate", "stack"), _joined),
    **dict.fromkeys((*WRITES, "dynamic_update_slice"), _written),
    "dynamic_slice": _dynamic_slice,
    "gather": _read,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
}


def independent_copies(
    flow: Flow, parameters: Sequence[Value], free: set[int]
) -> tuple[dict[int, int], dict[tuple[int, Name], np.ndarray]]:
    """Return the number of independent copies by dimension, and the copy at each entry."""
    copies = Copies(flow)
    for index, value in enumerate(parameters):
        copies.begin(index, value, free)
    for axis in flow.referred:
        copies.tied.update(leaf.atom for leaf in flow.atoms.leaves(axis))
    run(copies, flow.steps)

    copy_of_label = copies.copy_of_label()
    numbers: dict[int, dict[int, int]] = {}
    entries = {}
    for occurrence, (atom, axis, ids) in copies.rows.items():
        copy_at = np.full(ids.shape, -1)
        if atom not in copies.tied:
            copy_at = copy_of_label[ids]
        # Copies are numbered by their first entries.
        number_of_copy = numbers.setdefault(atom, {})
        distinct, firsts = np.unique(copy_at[copy_at >= 0], return_index=True)
        for copy in distinct[np.argsort(firsts)].tolist():
            number_of_copy.setdefault(copy, len(number_of_copy))
        renumbered = np.zeros(copy_of_label.max(initial=-1) + 2, int)  # the last one is for -1
        for copy, number in number_of_copy.items():
            renumbered[copy] = number

        number_at = renumbered[copy_at]
        for k in range(number_at.ndim):
            if k == axis or not number_at.size:
                continue
            first = np.take(number_at, [0], k)
            if (number_at == first).all():
                number_at = first
        entries[occurrence] = number_at
    num_copies = {atom: max(len(copies), 1) for atom, copies in numbers.items()}
    return num_copies, entries
