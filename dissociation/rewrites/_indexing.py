"""Rules for operations that read or write at indices, which may be computed, as of the largest neurons."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.lax import GatherScatterMode

from dissociation.rewrites._axes import UNIT, Axis, Order, Sum, size_of
from dissociation.rewrites._flow import Flow, Rule, Step, Value

WRITES = {"scatter": True, "scatter-add": True, "scatter-sub": True, "scatter-min": False, "scatter-max": False,
          "scatter-mul": False}  # fmt: skip
"""Primitives that write at indices; True if linear."""
ASKED = "its indices are what is asked for"
COMPUTED = "it is read at places that are computed"
WRITTEN = "it is written at some places"
READS = ("gather", "scatter", "scatter-add")
MOVES = (
    "broadcast_in_dim",
    "reshape",
    "squeeze",
    "slice",
    "transpose",
    "convert_element_type",
    "copy",
)
"""Operations that move indices without changing their values."""


def _take(flow: Flow, step: Step) -> list[Value]:
    """Follow `rev`, and rejoined slices of one array."""
    value, indices = step.operands[0], step.params.get("indices")
    axes = list(value.axes)
    for k in step.params["dimensions"]:
        axes[k] = flow.atoms.taken(
            axes[k], np.arange(value.shape[k])[::-1] if indices is None else indices
        )
    return [Value(step.shapes[0], axes, value.zero)]


def _cut(flow: Flow, axis: Axis | None, length: int, start: int, stop: int) -> Axis | None:
    """Return the slice of an axis from `start` to `stop`."""
    return (
        None
        if axis is None
        else flow.atoms.cut(axis, [start, stop - start, length - stop])[int(start > 0)]
    )


def _slices(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    strides = step.params["strides"] or (1,) * len(value.shape)
    axes: list[Axis | None] = []
    bounds = zip(step.params["start_indices"], step.params["limit_indices"], strides, strict=True)
    for axis, length, (start, stop, stride) in zip(value.axes, value.shape, bounds, strict=True):
        if stride == 1:
            axes.append(_cut(flow, axis, length, start, stop))
        else:
            axes.append(flow.atoms.taken(axis, np.arange(start, stop, stride)))
    return [Value(step.shapes[0], axes, value.zero)]


def _dynamic_slice(flow: Flow, step: Step) -> list[Value]:
    value, starts = step.operands[0], step.operands[1:]
    axes: list[Axis | None] = []
    for k, size in enumerate(step.shapes[0]):
        start = starts[k].known
        if _referred(flow, starts[k], value, [k], step.shapes[0]) == k:
            axes.append(UNIT)
        elif size == value.shape[k] or value.axes[k] is None:
            axes.append(value.axes[k])
        elif start is not None:
            first = clipped(start, value.shape[k], size)
            axes.append(_cut(flow, value.axes[k], value.shape[k], first, first + size))
        else:
            flow.freeze(value, COMPUTED, [k])
            axes.append(flow.atoms.new(size, COMPUTED))
    return [Value(step.shapes[0], axes, value.zero)]


def clipped(start: Any, length: int, size: int) -> int:
    """Return the start of a slice as JAX clips it."""
    return min(max(int(start) + length * (int(start) < 0), 0), length - size)


def _pad(flow: Flow, step: Step) -> list[Value]:
    value, filler = step.operands
    axes: list[Axis | None] = []
    for axis, length, config in zip(
        value.axes, value.shape, step.params["padding_config"], strict=True
    ):
        low, high, interior = map(int, config)
        if not (low or high or interior):
            if not filler.zero:
                flow.bend(axis, still=not filler.endless)
            axes.append(axis)
            continue
        place = low + np.arange(length) * (interior + 1)
        whole = place[-1] + 1 + high
        there = np.flatnonzero((place >= 0) & (place < whole))
        if not len(there):
            axes.append(flow.atoms.new(whole, "padding"))
            continue
        middle = flow.even(len(there)) if axis is None else flow.atoms.taken(axis, there)
        gaps = np.setdiff1d(np.arange(whole), place[there])
        first, last = place[there[[0, -1]]]
        places = [
            gaps[gaps < first],
            place[there],
            gaps[(gaps > first) & (gaps < last)],
            gaps[gaps > last],
        ]
        parts = [
            middle if k == 1 else flow.atoms.new(len(own), "padding")
            for k, own in enumerate(places)
            if len(own)
        ]
        axes.append(
            flow.atoms.resolve(Order(Sum(tuple(parts)), np.argsort(np.concatenate(places))))
        )
    return [Value(step.shapes[0], axes, value.zero and filler.zero)]


def _gather(flow: Flow, step: Step) -> list[Value]:
    value, where = step.operands
    numbers, sizes, mode, fill = (
        step.params[name] for name in ("dimension_numbers", "slice_sizes", "mode", "fill_value")
    )
    flow.freeze(where, "it says where to read", [-1])
    batch: list[Axis | None] = _places_handed_on(flow, where)
    count = math.prod(where.shape[:-1])
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    parts = [k for k, size in enumerate(sizes) if size != value.shape[k] and k not in batching]
    starts = _starts(
        where, numbers.start_index_map, value.shape, sizes, mode == GatherScatterMode.CLIP
    )
    filled = mode == GatherScatterMode.FILL_OR_DROP and any(
        starts[k] is None for k in numbers.start_index_map
    )
    if not any(value.axes[k] is not None for k in parts) and not batching and not filled:
        batch = [None] * (len(where.shape) - 1)  # constant, wherever it is read
    kept: list[Axis | None] = []
    flow.freeze(where, "it says where to read", [k for k, n in enumerate(where.shape) if n == 1])
    flow.freeze(
        value,
        "it is no longer an axis",
        [k for k in numbers.collapsed_slice_dims if value.shape[k] == 1],
    )
    value, _ = _without(value, _referred(flow, where, value, numbers.start_index_map, sizes))
    for k, size in enumerate(sizes):
        axis, start = value.axes[k], starts[k]
        if k in batching:
            place = batching[k]
            batch[place] = _picked(flow, axis, batch[place])
            continue
        if k in parts and axis is not None:
            alone = (
                size == 1 and len(parts) == 1 and not batching and k in numbers.collapsed_slice_dims
            )
            if start is not None and count == 1 and not alone:
                axis = flow.atoms.taken(axis, start[0] + np.arange(size))
            elif start is not None and size == 1 and len(parts) == 1 and not batching:
                batch, axis = (
                    flow.regrouped(
                        Value((count,), [flow.atoms.taken(axis, start)]), where.shape[:-1]
                    ),
                    UNIT,
                )
            else:
                flow.freeze(value, "it is read at given places", [k])
                axis = flow.atoms.new(size, "it is read at given places")
        elif k in parts and size == 1:
            axis = UNIT
        if filled and fill and fill == fill:  # a fill value other than zero and NaN is not scaled
            flow.bend(axis, still=True)
        if k not in numbers.collapsed_slice_dims:
            kept.append(axis)
    axes = [
        kept.pop(0) if k in numbers.offset_dims else batch.pop(0)
        for k in range(len(step.shapes[0]))
    ]
    return [Value(step.shapes[0], axes, value.zero and not filled)]


def _referred(
    flow: Flow, where: Value, value: Value, read: Sequence[Any], sizes: Sequence[int]
) -> int | None:
    """Return the number of the axis of `value` that `where` indexes, or None."""
    if where.refers is None:
        return None
    several = where.column is None and len(read) > 1  # several indices give one place
    along = read[where.column or 0]
    whole = all(sizes[k] == value.shape[k] for k in read if k != along)
    if not several and sizes[along] == 1 and whole and size_of(where.refers) == value.shape[along]:
        flow.referring(where, value.axes[along])
        return int(along)
    flow.atoms.freeze(where.refers, ASKED)
    return None


def _without(value: Value, k: int | None) -> tuple[Value, Axis | None]:
    """Return an array with axis `k` set to None, and the old axis."""
    if k is None:
        return value, None
    axes = [None if j == k else axis for j, axis in enumerate(value.axes)]
    return dataclasses.replace(value, axes=axes), value.axes[k]


def _places_handed_on(flow: Flow, where: Value) -> list[Axis | None]:
    """Return the axes of a result that come from the indices `where`."""
    axes = []
    for axis in where.axes[:-1]:
        axes.append(flow.lined_up([axis]))
        flow.bend(axis, axes[-1], still=True)
    return axes


def _picked(flow: Flow, axis: Axis | None, place: Axis | None) -> Axis | None:
    """Return the common axis of an array and its indices in a result."""
    found = flow.lined_up([axis, place])
    flow.equal(found, axis)
    if place is not None:
        flow.bend(found, axis)
    return found


def _starts(
    where: Value, dimensions: Sequence[Any], shape: Sequence[int], sizes: Sequence[int], clip: bool
) -> list[np.ndarray | None]:
    """Return the starts of slices along every axis, [slices]; None if traced or out of bounds."""
    found: list[np.ndarray | None] = [np.zeros(math.prod(where.shape[:-1]), int)] * len(shape)
    for place, k in enumerate(dimensions):
        found[k] = None if where.known is None else where.known[..., place].astype(int).reshape(-1)
        last = shape[k] - sizes[k]
        if (start := found[k]) is not None and ((start < 0) | (start > last)).any():
            found[k] = np.clip(start, 0, last) if clip else None
    return found


def _scatter(flow: Flow, step: Step) -> list[Value]:
    value, where, update = step.operands
    numbers, rank = step.params["dimension_numbers"], len(value.shape)
    # The update may be any function.
    if step.name == "scatter" and step.params["update_jaxpr"] is not None:
        return flow.unknown(step)
    flow.freeze(where, "it says where to write", [-1])
    placed = _places_handed_on(flow, where)
    over = [k for k in range(len(update.shape)) if k not in numbers.update_window_dims]
    pairs = update_axes(numbers, rank, len(update.shape))
    for k, place in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        _picked(flow, value.axes[k], placed[place])
        _picked(flow, update.axes[over[place]], placed[place])
    sizes = [1 if of_update is None else update.shape[of_update] for of_update in pairs]
    referred = _referred(flow, where, value, numbers.scatter_dims_to_operand_dims, sizes)
    clip = step.params["mode"] == GatherScatterMode.CLIP
    starts: list[np.ndarray | None] = _starts(
        where, numbers.scatter_dims_to_operand_dims, value.shape, sizes, clip
    )
    for k in numbers.operand_batching_dims:
        starts[k] = None
    rest = [k for k in over if k not in pairs]
    singles = [k for k in numbers.inserted_window_dims if value.shape[k] != 1]
    if (
        len(rest) == len(singles) == 1
        and not numbers.operand_batching_dims
        and len(where.shape) == 2
    ):
        pairs[singles[0]], rest = rest[0], []
    elif math.prod(where.shape[:-1]) != 1:
        starts = [None] * rank
    for k in rest:
        flow.freeze(update, WRITTEN, [k])
        flow.freeze(where, WRITTEN, [over.index(k)])
    others, own = _without(value, referred)
    found = _written(flow, step.name, others, update, pairs, starts, singles)
    if referred is not None:
        found.axes[referred] = flow.lined_up([where.refers, own])
        flow.referring(where, found.axes[referred])
    return [found]


def update_axes(numbers: Any, rank: int, update_rank: int) -> list[int | None]:
    """Return the update's axis for each axis of an array, or None."""
    if numbers is None:  # of `dynamic_update_slice`
        return list(range(rank))
    over = [k for k in range(update_rank) if k not in numbers.update_window_dims]
    window = [
        k
        for k in range(rank)
        if k not in (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    ]
    pairs: list[int | None] = [None] * rank
    for k, of_update in zip(window, sorted(numbers.update_window_dims), strict=True):
        pairs[k] = of_update
    for k, place in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        pairs[k] = over[place]
    return pairs


def _dynamic_update(flow: Flow, step: Step) -> list[Value]:
    value, update, *places = step.operands
    starts = [
        None if place.known is None else np.array([clipped(place.known, length, size)])
        for place, length, size in zip(places, value.shape, update.shape, strict=True)
    ]
    return [
        _written(flow, "scatter", value, update, update_axes(None, len(value.shape), 0), starts, ())
    ]


def _written(
    flow: Flow,
    name: str,
    value: Value,
    update: Value,
    pairs: list[int | None],
    starts: list[np.ndarray | None],
    singles: Sequence[Any],
) -> Value:
    axes: list[Axis | None] = []
    lengths = [1 if of_update is None else update.shape[of_update] for of_update in pairs]
    partial = [k for k, size in enumerate(value.shape) if lengths[k] != size or k in singles]
    for k, size in enumerate(value.shape):
        own, start, of_update = value.axes[k], starts[k], pairs[k]
        other = UNIT if of_update is None else update.axes[of_update]
        if k not in partial and size != 1:
            axes.append(_united(flow, name, value, update, [own, other]))
            continue
        places = (
            None if start is None else start if len(start) > 1 else start[0] + np.arange(lengths[k])
        )
        # Unknown or repeated places may hit any neuron.
        if (
            size == 1
            or places is None
            or len(set(places.tolist())) < len(places)
            or len(places) != lengths[k]
        ):
            flow.freeze(value, WRITTEN, [k])
            flow.freeze(update, WRITTEN, [] if of_update is None else [of_update])
            axes.append(UNIT if size == 1 else flow.atoms.new(size, WRITTEN))
            continue
        left = np.setdiff1d(np.arange(size), places)
        order = np.concatenate([left, places])
        stays, old = (flow.atoms.taken(own, part) if len(part) else None for part in (left, places))
        alone = name == "scatter" and len(partial) == 1
        new = flow.handed_on(other) if alone else _united(flow, name, value, update, [old, other])
        if new is None:
            new = flow.atoms.new(len(places))
            flow.equal(None if update.zero and (alone or value.zero) else new)
        if stays is None and len(left):
            stays = flow.atoms.new(len(left))
            flow.equal(None if value.zero else stays)
        axes.append(Order(Sum((new,) if stays is None else (stays, new)), np.argsort(order)))
    return Value(value.shape, axes, value.zero and (update.zero or name == "scatter-mul"))


def _united(
    flow: Flow, name: str, value: Value, update: Value, axes: Sequence[Axis | None]
) -> Axis | None:
    if name == "scatter-mul":
        flow.bend(axes[1], still=True)
        return _picked(flow, *axes)
    size = next((size_of(axis) for axis in axes if axis is not None), 2)
    pairs = zip(axes, (value, update), strict=True)
    parts = [Value((size,), [axis], whole.zero, endless=whole.endless) for axis, whole in pairs]
    return flow.summed(parts, linear=WRITES[name]).axes[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("rev", "take"), _take),
    "slice": _slices,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "pad": _pad,
    "gather": _gather,
    **dict.fromkeys(WRITES, _scatter),
}


def on_indices(flow: Flow, step: Step) -> list[Value] | None:
    """Return the results of an operation on indices of an axis, or None; fix the axis if they do more than read."""
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
        read = (
            found is not None
            or moved
            or (name in READS and k == 1)
            or (name == "dynamic_slice" and k > 0)
        )
        kept = name in MOVES or (
            name in ("scatter", "scatter-add")
            and operands[0].zero
            and operands[2].pair is value.pair
        )
        sure = not value.shifted or (value.pair is not None and kept)
        if value.refers is not None and not (sure and read):
            flow.atoms.freeze(value.refers, ASKED)
    return found


def _beside(operands: list[Value], shape: tuple[int, ...]) -> list[Value] | None:
    """Concatenate indices of an axis with constant ones, as coordinates to read at."""
    first, others = operands[0], operands[1:]
    if not shape or first.shape != (*shape[:-1], 1) or any(value.known is None for value in others):
        return None
    return [Value(shape, [*first.axes[:-1], None], refers=first.refers, column=0)]


def _one_hot(
    flow: Flow, where: Value, numbers: Value, shape: tuple[int, ...]
) -> list[Value] | None:
    """Compare indices of an axis with all of its numbers."""
    for k, size in enumerate(shape):
        count = np.arange(size).reshape([-1 if j == k else 1 for j in range(len(shape))])
        each = where.shape[k] == 1 or where.axes[k] is None
        if size > 1 and each and numbers.known is not None and (numbers.known == count).all():
            axis = flow.lined_up([where.refers])
            if axis is None or size_of(axis) != size or flow.referring(where, axis) is None:
                return None
            own = [
                None if n == 1 else each for n, each in zip(where.shape, where.axes, strict=True)
            ]
            return [Value(shape, [axis if j == k else each for j, each in enumerate(own)])]
    return None
