"""Find which copies of a group of neurons may move independently: heads, layers of a stack, groups of channels."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dissociation.rewrites._axes import UNIT
from dissociation.rewrites._flow import Flow, Step, Value
from dissociation.rewrites._indexing import WRITES, clipped, update_axes
from dissociation.rewrites._labels import Copies, Label, Marks, thin
from dissociation.rewrites._rules import ALONG, COMPARISONS, LIKE_SUMS, MIXED, POWERS, REDUCTIONS, SAME, WINDOWS

LONGEST = 256
"""Largest number of loop iterations whose copies are distinguished."""

Labels = list[Any]
"""Labels by operand or result; None if the dimension does not occur."""

Rule = Callable[[Copies, Step, Labels, list[int], int], Labels | None]


def run(copies: Copies, steps: Sequence[Step]) -> None:
    """Propagate labels through a program."""
    for step in steps:
        if step.name in PARTS:
            PARTS[step.name](copies, step)
        elif step.name not in SKIPPED and not any(value is given for value in step.results for given in step.operands):
            _apply(copies, step)


def _apply(copies: Copies, step: Step) -> None:
    given = [copies.marks(value) for value in step.operands]
    marks: list[Marks] = [{} for _ in step.results]
    for atom in {atom for own in given for atom in own}:
        rule = RULES.get(step.name)
        labels = [own.get(atom) for own in given]
        axes = [-1 if label is None else copies.axis(v, atom) for v, label in zip(step.operands, labels, strict=True)]
        apart = step.name not in CROSSING and len({axis for axis in axes if axis >= 0}) > 1
        found = None if rule is None or apart else rule(copies, step, labels, axes, atom)
        if found is None:
            # If no rule applies, no copies are known to be independent. It is safe to move all of them together.
            copies.tied.add(atom)
            continue
        for own, label in zip(marks, found, strict=True):
            if label is not None and (thin(label) >= 0).any():  # a slice may hold no neuron
                own[atom] = label
    for value, own in zip(step.results, marks, strict=True):
        copies.mark(value, own)


def _one_by_one(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    there = [label for label in labels if label is not None]
    return [copies.same(there, value.shape) for value in step.results]


def _reduced(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    gone = tuple(int(k) for k in step.params["axes"])
    return [None if axes[0] in gone else copies.along(labels[0], gone).squeeze(gone)]


def _along(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    label, params = copies.same([label for label in labels if label is not None], step.operands[0].shape), step.params
    if "window_dimensions" in params:
        windows = enumerate(params["window_dimensions"])
        over = [k for k, width in windows if width > 1 or label.shape[k] != step.results[0].shape[k]]
    elif "fft_lengths" in params:
        over = list(range(label.ndim - len(params["fft_lengths"]), label.ndim))
    else:
        over = [params.get("axis", params.get("dimension", -1)) % label.ndim]
    # An array that is sorted alone does not depend on its order before.
    if not set(over).isdisjoint(axes):
        return [*(None for _ in step.results)] if step.name in ("sort", "top_k") else None
    return [np.broadcast_to(copies.along(label, over), value.shape) for value in step.results]


def _moved(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    found = MOVES[step.name](step, labels[0])
    return found if isinstance(found, list) else [found]


def _reshape(step: Step, label: Label) -> Label:
    shape = step.results[0].shape
    even = all(stride == 0 or size == 1 for stride, size in zip(label.strides, label.shape, strict=True))
    return np.broadcast_to(label.flat[0], shape) if even else label.reshape(shape)


def _broadcast(step: Step, label: Label) -> Label:
    shape = step.results[0].shape
    new = tuple(k for k in range(len(shape)) if k not in step.params["broadcast_dimensions"])
    return np.broadcast_to(np.expand_dims(label, new), shape)


def _read(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    """Propagate labels through `gather`; entries read at unknown places get one label."""
    value, where = step.operands
    numbers, sizes, out = step.params["dimension_numbers"], step.params["slice_sizes"], step.results[0].shape
    found = []
    if labels[0] is not None:
        if where.known is not None:
            with jax.ensure_compile_time_eval():
                whole, mode = np.ascontiguousarray(labels[0]), step.params["mode"]
                read = jax.lax.gather(whole, where.known, numbers, sizes, mode=mode, fill_value=-1)
            found.append(np.asarray(read))
        else:
            batching = dict(zip(numbers.start_indices_batching_dims, numbers.operand_batching_dims, strict=True))
            over = [k for k, n in enumerate(sizes) if n != value.shape[k] and k not in batching.values()]
            label = copies.along(labels[0], over)
            kept = [k for k in range(label.ndim) if k not in (*numbers.collapsed_slice_dims, *batching.values())]
            places, gone = iter(range(len(out))), numbers.collapsed_slice_dims
            order = [kept.pop(0) if k in numbers.offset_dims else batching.get(next(places)) for k in range(len(out))]
            there = [k for k in order if k is not None]
            label = label.transpose([*there, *gone])[(...,) + (0,) * len(gone)]
            found.append(np.expand_dims(label, [place for place, k in enumerate(order) if k is None]))
    if labels[1] is not None:
        label = copies.along(labels[1], (labels[1].ndim - 1,))[..., 0]
        found.append(np.expand_dims(label, tuple(numbers.offset_dims)))
    return [copies.same(found, out)]


def _written(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    place = 1 if step.name == "dynamic_update_slice" else 2
    if place == 2 and labels[1] is not None:
        return None
    value, update = labels[0], labels[place]
    whole, part = step.operands[0].shape, step.operands[place].shape
    pairs = update_axes(step.params.get("dimension_numbers"), len(whole), len(part))
    own = {of_update: k for k, of_update in enumerate(pairs) if of_update is not None and part[of_update] == whole[k]}
    found = [] if value is None else [value]
    if update is not None:
        gone = [k for k in range(len(part)) if k not in own]
        order = sorted(own, key=lambda of_update: own[of_update])
        label = copies.along(update, gone).transpose([*order, *gone])[(...,) + (0,) * len(gone)]
        found.append(np.expand_dims(label, [k for k in range(len(whole)) if k not in own.values()]))
    return [copies.same(found, whole)]


def _pad(step: Step, label: Label) -> Label:
    with jax.ensure_compile_time_eval():
        return np.asarray(jax.lax.pad(np.ascontiguousarray(label), -1, step.params["padding_config"]))


def _slice(step: Step, label: Label) -> Label:
    bounds = step.params["start_indices"], step.params["limit_indices"], step.params["strides"] or (1,) * label.ndim
    return label[tuple(slice(*each) for each in zip(*bounds, strict=True))]


def _dynamic_slice(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    label = labels[0]
    for k, size in enumerate(step.results[0].shape):
        start: Any = step.operands[1 + k].known
        if size < label.shape[k] and start is None:  # any entry may be read
            label = np.broadcast_to(copies.along(label, (k,)), (*label.shape[:k], size, *label.shape[k + 1 :]))
        elif size < label.shape[k]:
            label = np.take(label, clipped(start, label.shape[k], size) + np.arange(size), k)
    return [label]


def _joined(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    pairs = zip(labels, step.operands, strict=True)
    parts = [np.broadcast_to(-1, value.shape) if label is None else label for label, value in pairs]
    if step.name == "stack":
        return [np.stack(parts, step.params["axis"])]
    return [np.concatenate(parts, step.params["dimension"])]


def _product(
    copies: Copies, labels: Labels, letters: tuple[list[Any], list[Any]], along: list[Any], out: list[Any]
) -> Label | None:
    """Return the labels of a sum of products in the notation of `einsum`."""
    aligned = []
    everything = [*out, *(x for x in dict.fromkeys([*letters[0], *letters[1]]) if x not in out)]
    for label, own, other in zip(labels, letters, letters[::-1], strict=True):
        if label is None:
            continue
        # Along axes that the other factor lacks, each of its entries is multiplied with all entries of this factor.
        if all(x is not None for x in along):
            label = copies.along(label, [k for k, x in enumerate(own) if x not in other])
        order = [own.index(x) for x in everything if x in own]
        aligned.append(np.expand_dims(label.transpose(order), [k for k, x in enumerate(everything) if x not in own]))
    label = copies.same(aligned)
    if not any(x in out for x in along):
        return None
    gone = tuple(range(len(out), len(everything)))
    return copies.along(label, gone).squeeze(gone)


def _dot(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    contracted, batched = step.params["dimension_numbers"]
    letters: list[list[Any]] = []
    for side, value in enumerate(step.operands):
        named = {k: ("sum", n) for n, k in enumerate(contracted[side])}
        named |= {k: ("batch", n) for n, k in enumerate(batched[side])}
        letters.append([named.get(k, (side, k)) for k in range(len(value.shape))])
    out = [("batch", n) for n in range(len(batched[0]))]
    out += [x for side in (0, 1) for x in letters[side] if x[0] == side]
    along = [own[axis] if axis >= 0 else None for own, axis in zip(letters, axes, strict=True)]
    if None not in along and along[0] != along[1]:
        return None
    label = _product(copies, labels, (letters[0], letters[1]), along, out)
    return [None if label is None else np.broadcast_to(label, step.results[0].shape)]


def _convolution(copies: Copies, step: Step, labels: Labels, axes: list[int], atom: int) -> Labels | None:
    numbers, groups = step.params["dimension_numbers"], step.params["feature_group_count"]
    names = ("image", "in"), ("out", "in")
    flat: Labels = [None, None]
    along: list[Any] = [None, None]
    for side, spec in enumerate((numbers.lhs_spec, numbers.rhs_spec)):
        label, axis, value = labels[side], axes[side], step.operands[side]
        if label is None:
            continue
        if axis not in spec[:2]:
            return None
        blocked, space = spec[1 - side], tuple(range(2, label.ndim))  # `blocked`: axis that feature groups divide
        sizes = groups, value.shape[blocked] // groups
        plain = copies.along(label.transpose(spec), space).squeeze(space)
        flat[side] = plain.reshape(*sizes, -1) if side else plain.reshape(-1, *sizes)
        block = copies.flow.atoms.factored(value.axes[blocked] or UNIT, sizes)[0] if axis == blocked else UNIT
        grouped = any(leaf.atom == atom for leaf in copies.flow.atoms.leaves(block))
        along[side] = "group" if grouped else names[side][spec.index(axis)]
    if None not in along and along[0] != along[1]:
        return None
    out, shape = numbers.out_spec, step.results[0].shape
    letters: Any = ["image", "group", "in"], ["group", "out", "in"]
    label = _product(copies, flat, letters, along, ["image", "group", "out"])
    if label is None:
        return [None]
    wide = np.broadcast_to(label, (shape[out[0]], groups, shape[out[1]] // groups))
    wide = np.expand_dims(wide.reshape(shape[out[0]], shape[out[1]]), tuple(range(2, len(out))))
    return [np.broadcast_to(wide.transpose(np.argsort(out).tolist()), shape)]


def _scan(copies: Copies, step: Step) -> None:
    (part,), params = step.parts, step.params
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    carry, slices, over = part.inputs[first:last], part.inputs[last:], step.operands[last:]
    made = part.outputs[last - first :]
    for value, start in zip(carry, step.operands[first:last], strict=True):
        copies.mark(value, copies.marks(start))
    marks = [copies.marks(value) for value in over]
    differ = any((label != label[:1]).any() for own in marks for label in own.values())
    turns = list(range(params["length"]))[:: -1 if params["reverse"] else 1]
    # One run of the body is enough for equal labels, and safe for a loop that is too long to unroll.
    if not differ or len(turns) > LONGEST:
        marks = [{atom: copies.along(label, (0,)) for atom, label in own.items()} for own in marks]
        turns = [0]
    found: dict[int, list[Marks]] = {}
    for turn in turns:
        for value, own in zip(slices, marks, strict=True):
            copies.mark(value, {atom: label[turn] for atom, label in own.items()})
        if len(turns) == 1:
            _settled(copies, [part.steps], carry, part.outputs[: last - first])
        else:
            run(copies, part.steps)
        found[turn] = [copies.marks(value) for value in made]
        after = [copies.marks(value) for value in part.outputs[: last - first]]
        for value, own in zip(carry, after, strict=True):
            copies.mark(value, own)
    for k, value in enumerate(step.results[last - first :]):
        whole: Marks = {}
        for atom in {atom for own in found.values() for atom in own[k]}:
            labels = [found[turn][k].get(atom, np.full(value.shape[1:], -1)) for turn in sorted(found)]
            whole[atom] = np.broadcast_to(labels[0] if len(labels) == 1 else np.stack(labels), value.shape)
        copies.mark(value, whole)


def _settled(copies: Copies, programs: list[list[Step]], carry: list[Value], after: list[Value]) -> None:
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
                label = copies.same([own[atom] for own in (before, new) if atom in own], value.shape)
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
        copies.mark(value, {atom: copies.same([own[atom] for own in cases if atom in own]) for atom in atoms})


CROSSING = ("gather", *WRITES, "dynamic_update_slice", "dot_general", "conv_general_dilated")
"""Operations of which two operands may have a dimension on different axes."""

SKIPPED = ("optimization_barrier", "name", "sharding_constraint")
"""Operations that return their operands."""

PARTS: dict[str, Callable[[Copies, Step], None]] = {"scan": _scan, "while": _while, "cond": _cond}

MOVES: dict[str, Callable[[Step, Label], Label | list[Label]]] = {
    "transpose": lambda step, label: label.transpose(step.params["permutation"]),
    "broadcast_in_dim": _broadcast,
    "squeeze": lambda step, label: label.squeeze(tuple(step.params["dimensions"])),
    "reshape": _reshape,
    "rev": lambda step, label: np.flip(label, step.params["dimensions"]),
    "slice": _slice,
    "take": lambda step, label: label.take(step.params["indices"], step.params["dimensions"][0]),
    "tile": lambda step, label: np.tile(label, step.params["reps"]),
    "pad": _pad,
    "split": lambda step, label: np.split(label, np.cumsum(step.params["sizes"])[:-1], step.params["axis"]),
    "unstack": lambda step, label: list(np.moveaxis(label, step.params["axis"], 0)),
}

RULES: dict[str, Rule] = {
    **dict.fromkeys((*LIKE_SUMS, *SAME, *POWERS, *COMPARISONS, *MIXED), _one_by_one),
    **dict.fromkeys(("integer_pow", "pow", "mul", "div", "select_n", "bitcast_convert_type"), _one_by_one),
    **dict.fromkeys((*REDUCTIONS, "argmax", "argmin"), _reduced),
    **dict.fromkeys((*ALONG, *WINDOWS, "sort", "top_k", "fft"), _along),
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
        # Every row starts as its own copy; operations that add or multiply two rows unite them.
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
            if k != axis and (new == np.take(new, [0], k)).all():
                new = np.take(new, [0], k)
        slots[place] = new
    return {atom: max(len(own), 1) for atom, own in numbers.items()}, slots
