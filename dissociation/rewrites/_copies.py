"""Find which copies of a group of neurons may move independently: heads, layers of a stack, groups of channels.

Every row of a parameter starts as its own copy, with a label. Operations unite the labels that they
combine.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from dissociation.rewrites._axes import UNIT
from dissociation.rewrites._flow import Flow, Step, Value
from dissociation.rewrites._indexing import WRITES, clipped, update_axes
from dissociation.rewrites._rules import (
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
        self.rows: dict[tuple[int, tuple[int, ...]], tuple[int, int, Label]] = {}
        self._marks: dict[int, Marks] = {}  # by the `id` of a value
        # Pairs of labels to unite are only collected: `found` needs one pass over them, as
        # connected components.
        self._pairs: list[np.ndarray] = []
        self._count = 0
        self._known: dict[int, dict[int, int]] = {}

    def marks(self, value: Value) -> Marks:
        """Return the labels of a value by dimension, without tied dimensions."""
        return {
            atom: label
            for atom, label in self._marks.get(id(value), {}).items()
            if atom not in self.tied
        }

    def mark(self, value: Value, marks: Marks) -> None:
        """Set the labels of a value."""
        self.tied |= {atom for atom in marks if self.axis(value, atom) < 0}
        self._marks[id(value)] = marks

    def axis(self, value: Value, atom: int) -> int:
        """Return the number of the axis that has a dimension; -1 if it is not unique."""
        if id(value) not in self._known:
            own: dict[int, int] = {}
            for k, axis in enumerate(value.axes):
                times: dict[int, np.ndarray] = {}
                for leaf, places in self.flow.atoms.occurrences(axis):
                    times.setdefault(leaf.atom, np.zeros(value.shape[k], int))[places] += 1
                own |= {
                    inner: k if each.max(initial=1) == 1 and inner not in own else -1
                    for inner, each in times.items()
                }
            self._known[id(value)] = own
        return self._known[id(value)].get(atom, -1)

    def begin(self, index: int, value: Value, free: set[int]) -> None:
        """Label a parameter."""
        marks: Marks = {}
        for k, axis in enumerate(value.axes):
            for leaf, positions in self.flow.atoms.occurrences(axis):
                if leaf.atom not in free:
                    continue
                shape = [
                    positions.shape[1] if j == k else size for j, size in enumerate(value.shape)
                ]
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
        shape = (
            np.broadcast_shapes(*(label.shape for label in labels))
            if shape is None
            else tuple(shape)
        )
        wide = [np.broadcast_to(label, shape) for label in labels]
        # Axes along which all labels are broadcast stay of length 1: activations may be large.
        narrow = tuple(
            slice(0, None if any(label.strides[k] for label in wide) else 1)
            for k in range(len(shape))
        )
        first, *others = [label[narrow] for label in wide]
        for label in others:
            first = np.maximum(first, label)
        for label in [label[narrow] for label in wide] if others else ():
            self._unite(first, label)
        return np.broadcast_to(first, shape)

    def placed(
        self, label: Label, order: Sequence[int | None], shape: Sequence[int] | None = None
    ) -> Label:
        """Return labels of which axis i is axis `order[i]`, or new for None; unite them along all other axes."""
        gone = tuple(k for k in range(label.ndim) if k not in order)
        if gone:
            small = thin(label)
            first = small.max(gone, keepdims=True)
            self._unite(np.broadcast_to(first, small.shape), small)
            label = np.broadcast_to(
                first, [1 if k in gone else size for k, size in enumerate(label.shape)]
            )
        moved = label.transpose([*(k for k in order if k is not None), *gone])
        moved = np.expand_dims(
            moved[(...,) + (0,) * len(gone)], [i for i, k in enumerate(order) if k is None]
        )
        return moved if shape is None else np.broadcast_to(moved, shape)

    def _unite(self, first: Label, second: Label) -> None:
        differ = (first != second) & (second >= 0)
        if not differ.any():
            return
        one, other = first[differ], second[differ]
        partner = np.full(other.max() + 1, -1)
        partner[other] = one
        if (partner[other] == one).all():  # most labels have one partner, at many entries
            other = np.flatnonzero(partner >= 0)
            one = partner[other]
        self._pairs.append(np.stack([one, other]))

    def found(self) -> np.ndarray:
        """Return the copy of each label; -1 for labels united with no other, as of unused entries."""
        pairs = np.concatenate([np.zeros((2, 0), int), *self._pairs], 1)
        graph = coo_array(
            (np.ones(pairs.shape[1]), (pairs[0], pairs[1])), shape=(self._count, self._count)
        )
        number = connected_components(graph, directed=False)[1]
        several = np.bincount(number, minlength=1) > 1
        return np.where(several, np.cumsum(several) - 1, -1)[number]


Rule = Callable[[Copies, Step, Labels, list[int], int], Labels | None]


def thin(label: Label) -> Label:
    """Return a label with its broadcast axes of length 1."""
    return label[tuple(slice(0, 1) if step == 0 else slice(None) for step in label.strides)]


def run(copies: Copies, steps: Sequence[Step]) -> None:
    """Propagate labels through a program."""
    for step in steps:
        if step.name in PARTS:
            PARTS[step.name](copies, step)
        elif step.name not in SKIPPED and not any(
            value is given for value in step.results for given in step.operands
        ):
            _apply(copies, step)


def _apply(copies: Copies, step: Step) -> None:
    given = [copies.marks(value) for value in step.operands]
    marks: list[Marks] = [{} for _ in step.results]
    for atom in {atom for own in given for atom in own}:
        rule = RULES.get(step.name)
        labels = [own.get(atom) for own in given]
        axes = [
            -1 if label is None else copies.axis(v, atom)
            for v, label in zip(step.operands, labels, strict=True)
        ]
        apart = step.name not in CROSSING and len({axis for axis in axes if axis >= 0}) > 1
        found = None if rule is None or apart else rule(copies, step, labels, axes, atom)
        if found is None:
            # If no rule applies, no copies are known to be independent. It is safe to move all of
            # them together.
            copies.tied.add(atom)
            continue
        for own, label in zip(marks, found, strict=True):
            if label is not None and (thin(label) >= 0).any():  # a slice may hold no neuron
                own[atom] = label
    for value, own in zip(step.results, marks, strict=True):
        copies.mark(value, own)


def _one_by_one(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels:
    there = [label for label in labels if label is not None]
    return [copies.same(there, value.shape) for value in step.results]


def _whole_axes(
    copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int
) -> Labels | None:
    """Propagate labels through an operation that moves axes, or combines all entries along some."""
    label = _one_by_one(copies, step, labels, axes, atom)[0] if len(labels) > 1 else labels[0]
    order = _order(step)
    if max(axes) not in order:
        return [None for _ in step.results]
    return [copies.placed(label, order, value.shape) for value in step.results]


def _order(step: Step) -> list[int | None]:
    """Return the operand's axis for each axis of a result; None if it is new or combines all entries."""
    params, given, made = step.params, step.operands[0].shape, step.results[0].shape
    if step.name == "transpose":
        return list(params["permutation"])
    if step.name == "broadcast_in_dim":
        places = {to: k for k, to in enumerate(params["broadcast_dimensions"])}
        return [places.get(to) for to in range(len(made))]
    if "axes" in params or step.name == "squeeze":
        over = params["axes"] if "axes" in params else params["dimensions"]  # perhaps none
        return [k for k in range(len(given)) if k not in over]
    if "window_dimensions" in params:
        over = [
            k
            for k, width in enumerate(params["window_dimensions"])
            if width > 1 or given[k] != made[k]
        ]
    elif "fft_lengths" in params:
        over = range(len(given) - len(params["fft_lengths"]), len(given))
    else:
        over = [params.get("axis", params.get("dimension", -1)) % len(given)]
    return [None if k in over else k for k in range(len(given))]


def _moved(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    found = MOVES[step.name](step, labels[0])
    return found if isinstance(found, list) else [found]


def _reshape(step: Step, label: Label) -> Label:
    shape = step.results[0].shape
    even = all(
        stride == 0 or size == 1 for stride, size in zip(label.strides, label.shape, strict=True)
    )
    return np.broadcast_to(label.flat[0], shape) if even else label.reshape(shape)


def _pad(step: Step, label: Label) -> Label:
    with jax.ensure_compile_time_eval():
        return np.asarray(
            jax.lax.pad(np.ascontiguousarray(label), -1, step.params["padding_config"])
        )


def _slice(step: Step, label: Label) -> Label:
    bounds = (
        step.params["start_indices"],
        step.params["limit_indices"],
        step.params["strides"] or (1,) * label.ndim,
    )
    return label[tuple(slice(*each) for each in zip(*bounds, strict=True))]


def _joined(
    copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int
) -> Labels | None:
    pairs = zip(labels, step.operands, strict=True)
    parts = [np.broadcast_to(-1, value.shape) if label is None else label for label, value in pairs]
    if step.name == "stack":
        return [np.stack(parts, step.params["axis"])]
    return [np.concatenate(parts, step.params["dimension"])]


def _read(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    """Propagate labels through `gather`; entries read at unknown places get one label."""
    value, where = step.operands
    numbers, sizes, out = (
        step.params["dimension_numbers"],
        step.params["slice_sizes"],
        step.results[0].shape,
    )
    found = []
    if labels[0] is not None and where.known is not None:
        with jax.ensure_compile_time_eval():
            whole, mode = np.ascontiguousarray(labels[0]), step.params["mode"]
            read = jax.lax.gather(whole, where.known, numbers, sizes, mode=mode, fill_value=-1)
        found.append(np.asarray(read))
    elif labels[0] is not None:
        batching = dict(
            zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True)
        )
        kept = (
            k
            for k in range(len(sizes))
            if k not in (*numbers.collapsed_slice_dims, *batching.values())
        )
        whole = [k if sizes[k] == value.shape[k] else None for k in kept]
        places = iter(range(len(out)))
        order = [
            whole.pop(0) if k in numbers.offset_dims else batching.get(next(places))
            for k in range(len(out))
        ]
        found.append(copies.placed(labels[0], order))
    if labels[1] is not None:
        places = iter(range(len(out)))
        order = [None if k in numbers.offset_dims else next(places) for k in range(len(out))]
        found.append(copies.placed(labels[1], order))
    return [copies.same(found, out)]


def _written(
    copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int
) -> Labels | None:
    place = 1 if step.name == "dynamic_update_slice" else 2
    if place == 2 and labels[1] is not None:
        return None
    whole, part = step.operands[0].shape, step.operands[place].shape
    pairs = update_axes(step.params.get("dimension_numbers"), len(whole), len(part))
    found = [] if labels[0] is None else [labels[0]]
    if labels[place] is not None:
        order = [
            k if k is not None and part[k] == size else None
            for k, size in zip(pairs, whole, strict=True)
        ]
        found.append(copies.placed(labels[place], order))
    return [copies.same(found, whole)]


def _dynamic_slice(
    copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int
) -> Labels | None:
    label, out = labels[0], step.results[0].shape
    for k, size in enumerate(out):
        start: Any = step.operands[1 + k].known
        if size < label.shape[k] and start is None:  # any entry may be read
            label = copies.placed(label, [None if j == k else j for j in range(label.ndim)])
        elif size < label.shape[k]:
            label = np.take(label, clipped(start, label.shape[k], size) + np.arange(size), k)
    return [np.broadcast_to(label, out)]


def _product(
    copies: Copies,
    labels: Labels,
    axes: list[int],
    letters: Sequence[list[Any]],
    out: list[Any],
    shape: Sequence[int],
) -> Labels | None:
    """Return the labels of a sum of products in the notation of `einsum`."""
    along = {own[axis] for own, axis in zip(letters, axes, strict=True) if axis >= 0}
    if len(along) > 1:
        return None
    everything, aligned = dict.fromkeys([*out, *letters[0], *letters[1]]), []
    for label, own, other in zip(labels, letters, letters[::-1], strict=True):
        if label is not None:
            # Along axes that the other factor lacks, each of its entries is multiplied with all
            # entries of this factor.
            kept = set(own) & set(other) if min(axes) >= 0 else own
            aligned.append(
                copies.placed(label, [own.index(x) if x in kept else None for x in everything])
            )
    label = copies.same(aligned)
    return [copies.placed(label, range(len(out)), shape) if along <= set(out) else None]


def _dot(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    contracted, batched = step.params["dimension_numbers"]
    letters: list[list[Any]] = []
    for side, value in enumerate(step.operands):
        named = {k: ("sum", n) for n, k in enumerate(contracted[side])}
        named |= {k: ("batch", n) for n, k in enumerate(batched[side])}
        letters.append([named.get(k, (side, k)) for k in range(len(value.shape))])
    out = [("batch", n) for n in range(len(batched[0]))]
    out += [x for side in (0, 1) for x in letters[side] if x[0] == side]
    return _product(copies, labels, axes, letters, out, step.results[0].shape)


def _convolution(
    copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int
) -> Labels | None:
    numbers, groups = step.params["dimension_numbers"], step.params["feature_group_count"]
    letters = ["image", "group", "in"], ["group", "out", "in"]
    flat: Labels = [None, None]
    places = [-1, -1]
    for side, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
        label, axis, value = labels[side], axes[side], step.operands[side]
        if label is None:
            continue
        if axis not in spec[:2]:
            return None
        blocked = spec[1 - side]  # axis that feature groups divide
        sizes = groups, value.shape[blocked] // groups
        plain = copies.placed(label, spec[:2])
        flat[side] = plain.reshape(*sizes, -1) if side else plain.reshape(-1, *sizes)
        block = (
            copies.flow.atoms.factored(value.axes[blocked] or UNIT, sizes)[0]
            if axis == blocked
            else UNIT
        )
        grouped = any(leaf.atom == atom for leaf in copies.flow.atoms.leaves(block))
        names = ("out", "in") if side else ("image", "in")
        places[side] = letters[side].index("group" if grouped else names[spec.index(axis)])
    out, shape = numbers.out_spec, step.results[0].shape
    blocks = shape[out[0]], groups, shape[out[1]] // groups
    found = _product(copies, flat, places, letters, ["image", "group", "out"], blocks)
    if found is None or found[0] is None:
        return found
    order = [place if (place := out.index(k)) < 2 else None for k in range(len(out))]
    return [copies.placed(found[0].reshape(shape[out[0]], shape[out[1]]), order, shape)]


def _scan(copies: Copies, step: Step) -> None:
    (part,), params = step.parts, step.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    carry, slices = part.inputs[first:last], part.inputs[last:]
    ends, made = part.outputs[: last - first], part.outputs[last - first :]
    for value, start in zip(carry, step.operands[first:last], strict=True):
        copies.mark(value, copies.marks(start))
    marks = [copies.marks(value) for value in step.operands[last:]]
    differ = any((label != label[:1]).any() for own in marks for label in own.values())
    turns = list(range(params["length"]))[:: -1 if params["reverse"] else 1]
    # One run of the body is enough for equal labels, and safe for a loop that is too long to
    # unroll.
    once = not differ or len(turns) > LONGEST
    found: dict[int, list[Marks]] = {}
    for turn in [0] if once else turns:
        for value, own in zip(slices, marks, strict=True):
            rows = range(1, len(value.shape) + 1)
            each = {
                atom: copies.placed(label, rows) if once else label[turn]
                for atom, label in own.items()
            }
            copies.mark(value, each)
        if once:
            _settled(copies, [part.steps], carry, ends)
        else:
            run(copies, part.steps)
        found[turn] = [copies.marks(value) for value in made]
        for value, own in zip(carry, [copies.marks(value) for value in ends], strict=True):
            copies.mark(value, own)
    for k, value in enumerate(step.results[last - first :]):
        whole: Marks = {}
        for atom in {atom for own in found.values() for atom in own[k]}:
            labels = [
                found[turn][k].get(atom, np.full(value.shape[1:], -1)) for turn in sorted(found)
            ]
            whole[atom] = np.broadcast_to(labels[0] if once else np.stack(labels), value.shape)
        copies.mark(value, whole)


def _settled(
    copies: Copies, programs: list[list[Step]], carry: list[Value], after: list[Value]
) -> None:
    """Propagate labels through loop bodies until the carried labels stop changing."""
    grown = True
    # Labels only unite, so the loop ends.
    while grown:
        grown = False
        for steps in programs:
            run(copies, steps)
        for value, new in [(v, copies.marks(w)) for v, w in zip(carry, after, strict=True)]:
            before = copies.marks(value)
            for atom in before | new:
                label = copies.same(
                    [own[atom] for own in (before, new) if atom in own], value.shape
                )
                grown |= atom not in before or bool(((label >= 0) & (before[atom] < 0)).any())
                new[atom] = label
            copies.mark(value, new)


def _while(copies: Copies, step: Step) -> None:
    test, body = step.parts
    carry = body.inputs[step.params["body_nconsts"] :]
    for value, start in zip(carry, step.operands[len(step.operands) - len(carry) :], strict=True):
        copies.mark(value, copies.marks(start))
    # The number of iterations is unknown: one label must hold for all of them.
    _settled(copies, [test.steps, body.steps], carry, body.outputs)


def _cond(copies: Copies, step: Step) -> None:
    for part in step.parts:
        run(copies, part.steps)
    for k, value in enumerate(step.results):
        cases = [copies.marks(part.outputs[k]) for part in step.parts]
        atoms = {atom for own in cases for atom in own}
        copies.mark(
            value,
            {atom: copies.same([own[atom] for own in cases if atom in own]) for atom in atoms},
        )


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


def copies_told_apart(
    flow: Flow, made: Sequence[Value], free: set[int]
) -> tuple[dict[int, int], dict[tuple[int, tuple[int, ...]], np.ndarray]]:
    """Return the number of independent copies of each dimension, and the copy at each parameter entry."""
    copies = Copies(flow)
    for index, value in enumerate(made):
        copies.begin(index, value, free)
    copies.tied |= {leaf.atom for axis in flow.referred for leaf in flow.atoms.leaves(axis)}
    run(copies, flow.steps)
    found = copies.found()
    numbers: dict[int, dict[int, int]] = {}
    slots = {}
    for place, (atom, axis, ids) in copies.rows.items():
        own = numbers.setdefault(atom, {})
        old = np.full(ids.shape, -1) if atom in copies.tied else found[ids]
        there, firsts = np.unique(old[old >= 0], return_index=True)
        for number in there[np.argsort(firsts)].tolist():
            own.setdefault(number, len(own))
        # The last entry is for -1.
        known = np.array([own.get(number, 0) for number in range(found.max(initial=-1) + 1)] + [0])
        new = known[old]
        for k in range(new.ndim):
            if k != axis and new.size and (new == np.take(new, [0], k)).all():
                new = np.take(new, [0], k)
        slots[place] = new
    return {atom: max(len(own), 1) for atom, own in numbers.items()}, slots
