"""Rules for operations that read or write at indices, which may be computed."""

import dataclasses
import math
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.lax import GatherScatterMode

from dissociation.rewrites._axes import UNIT, Axes, Axis, Order, Shape, Sum, size_of
from dissociation.rewrites._flow import Flow, Results, Rule, Step, Value

WRITES = {
    "scatter": True,
    "scatter-add": True,
    "scatter-sub": True,
    "scatter-min": False,
    "scatter-max": False,
    "scatter-mul": False,
}
"""Primitives that write at indices; True if linear."""
AxisMap = list[int | None]
"""Axis of one array for each axis of another; None if there is no such axis."""
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


def _take(flow: Flow, step: Step) -> Results:
    """Follow `rev`, and rejoined slices of one array."""
    value = step.operands[0]
    axes = list(value.axes)
    for k in step.params["dimensions"]:
        reversed_indices = np.arange(value.shape[k])[::-1]
        axes[k] = flow.atoms.taken(axes[k], step.params.get("indices", reversed_indices))
    return [Value(step.shape, axes, value.is_zero)]


def _cut(flow: Flow, axis: Axis | None, length: int, start: int, stop: int) -> Axis | None:
    """Return the slice of an axis from `start` to `stop`."""
    if axis is None:
        return None
    blocks = flow.atoms.cut(axis, [start, stop - start, length - stop])
    return blocks[int(start > 0)]


def _slices(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    starts = step.params["start_indices"]
    stops = step.params["limit_indices"]
    strides = step.params["strides"] or (1,) * len(value.shape)
    axes: Axes = []
    for k, axis in enumerate(value.axes):
        if strides[k] == 1:
            axes.append(_cut(flow, axis, value.shape[k], starts[k], stops[k]))
        else:
            indices = np.arange(starts[k], stops[k], strides[k])
            axes.append(flow.atoms.taken(axis, indices))
    return [Value(step.shape, axes, value.is_zero)]


def _dynamic_slice(flow: Flow, step: Step) -> Results:
    value, *starts = step.operands
    axes: Axes = []
    for k, size in enumerate(step.shape):
        axis = value.axes[k]
        length = value.shape[k]
        start = starts[k].known
        if _referred(flow, starts[k], value, [k], step.shape) == k:
            axes.append(UNIT)
        elif size == length or axis is None:
            axes.append(axis)
        elif start is not None:
            first = clipped(start, length, size)
            axes.append(_cut(flow, axis, length, first, first + size))
        else:
            flow.freeze(value, COMPUTED, [k])
            axes.append(flow.atoms.new(size, COMPUTED))
    return [Value(step.shape, axes, value.is_zero)]


def clipped(start: Any, length: int, size: int) -> int:
    """Return the start of a slice as JAX clips it."""
    first = int(start)
    if first < 0:
        first += length
    return min(max(first, 0), length - size)


def _pad(flow: Flow, step: Step) -> Results:
    value, filler = step.operands
    axes = list(value.axes)
    for k, config in enumerate(step.params["padding_config"]):
        if any(config):
            axes[k] = _padded(flow, axes[k], value.shape[k], config, step.shape[k])
        elif not filler.is_zero:
            flow.bend(axes[k], scalable=filler.is_infinite)
    return [Value(step.shape, axes, value.is_zero and filler.is_zero)]


def _padded(flow: Flow, axis: Axis | None, length: int, config: Sequence[Any], size: int) -> Axis:
    """Return an axis of length `size`, padded by `config`: low, high, interior."""
    low, _, interior = config
    positions = low + np.arange(length) * (interior + 1)
    remaining = np.flatnonzero((positions >= 0) & (positions < size))
    if not len(remaining):
        return flow.atoms.new(size, "padding")
    middle = flow.atoms.taken(axis, remaining)
    if middle is None:
        middle = flow.unscaled(len(remaining))

    middle_positions = positions[remaining]
    first = middle_positions[0]
    last = middle_positions[-1]
    gaps = np.setdiff1d(np.arange(size), middle_positions)
    low_gaps = gaps[gaps < first]
    inner_gaps = gaps[(gaps > first) & (gaps < last)]
    high_gaps = gaps[gaps > last]
    blocks = [middle]
    if len(low_gaps):
        blocks.insert(0, flow.atoms.new(len(low_gaps), "padding"))
    for padding in (inner_gaps, high_gaps):
        if len(padding):
            blocks.append(flow.atoms.new(len(padding), "padding"))
    order = np.concatenate([low_gaps, middle_positions, inner_gaps, high_gaps])
    return flow.atoms.resolve(Order(Sum(tuple(blocks)), np.argsort(order)))


def _gather(flow: Flow, step: Step) -> Results:
    value, where = step.operands
    numbers = step.params["dimension_numbers"]
    sizes = step.params["slice_sizes"]
    mode = step.params["mode"]
    fill = step.params["fill_value"]
    batching = dict(
        zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    )
    flow.freeze(where, "it says where to read", [-1])
    batch_axes: Axes = _places_handed_on(flow, where)

    partial = [k for k, size in enumerate(sizes) if size != value.shape[k] and k not in batching]
    is_clipped = mode == GatherScatterMode.CLIP
    starts = _starts(where, numbers.start_index_map, value.shape, sizes, is_clipped)
    is_filled = mode == GatherScatterMode.FILL_OR_DROP and any(
        starts[k] is None for k in numbers.start_index_map
    )
    if not (batching or is_filled or any(value.axes[k] for k in partial)):
        batch_axes = [None] * len(batch_axes)  # constant, wherever it is read
    flow.freeze(where, "it says where to read", _single(where, range(len(where.shape))))
    flow.freeze(value, "it is no longer an axis", _single(value, numbers.collapsed_slice_dims))
    value = _without(value, _referred(flow, where, value, numbers.start_index_map, sizes))
    listed = _listed(step, value, partial, starts)
    if listed is not None:
        points = flow.atoms.taken(value.axes[listed], starts[listed])
        index_shape = where.shape[:-1]
        batch_axes = flow.regrouped(Value((math.prod(index_shape),), [points]), index_shape)
        value = _without(value, listed)

    window_axes = []
    for k, size in enumerate(sizes):
        axis = value.axes[k]
        if k in batching:
            n = batching[k]
            batch_axes[n] = _picked(flow, axis, batch_axes[n])
            continue
        if k in partial and axis is not None:
            axis = _sliced(flow, value, k, starts[k], size)
        elif k in partial and size == 1:
            axis = UNIT
        if is_filled and fill and fill == fill:  # a value other than zero and NaN is not scaled
            flow.bend(axis, scalable=False)
        if k not in numbers.collapsed_slice_dims:
            window_axes.append(axis)

    for k, axis in zip(numbers.offset_dims, window_axes, strict=True):
        batch_axes.insert(k, axis)
    return [Value(step.shape, batch_axes, value.is_zero and not is_filled)]


def _without(value: Value, k: int | None) -> Value:
    """Return an array that is constant along axis `k`, if it is not None."""
    if k is None:
        return value
    return dataclasses.replace(value, axes=value.axes_except(k))


def _listed(step: Step, value: Value, partial: list[int], starts: list[Any]) -> int | None:
    """Return the only axis that is not read as a whole if single entries are read along it."""
    numbers = step.params["dimension_numbers"]
    if len(partial) != 1 or numbers.operand_batching_dims:
        return None
    k = partial[0]
    if value.axes[k] is None or starts[k] is None or step.params["slice_sizes"][k] != 1:
        return None
    if len(starts[k]) == 1 and k not in numbers.collapsed_slice_dims:
        return None  # a slice of length 1
    return k


def _sliced(flow: Flow, value: Value, k: int, start: Any, size: Any) -> Axis:
    """Return the slice of axis `k`, which is permutable if there is one known `start`."""
    if start is not None and len(start) == 1:
        return flow.atoms.taken(value.axes[k], start[0] + np.arange(size))
    flow.freeze(value, "it is read at given places", [k])
    return flow.atoms.new(size, "it is read at given places")


def _single(value: Value, axes: Sequence[Any]) -> list[Any]:
    """Return those of an array's axes that have length 1."""
    return [k for k in axes if value.shape[k] == 1]


def _referred(
    flow: Flow, where: Value, value: Value, dimensions: Sequence[Any], sizes: Sequence[int]
) -> int | None:
    """Return the number of the axis of `value` that `where` indexes, or None."""
    if where.indexed is None:
        return None
    is_alone = where.column is not None or len(dimensions) == 1  # or several indices give one place
    along = dimensions[where.column or 0]
    length = value.shape[along]
    reads_all = all(sizes[k] == value.shape[k] for k in dimensions if k != along)
    if is_alone and sizes[along] == 1 and reads_all and size_of(where.indexed) == length:
        flow.referring(where, value.axes[along])
        return int(along)
    flow.atoms.freeze(where.indexed, ASKED)
    return None


def _places_handed_on(flow: Flow, where: Value) -> Axes:
    """Return the axes of a result that come from the indices `where`."""
    axes: Axes = []
    for axis in where.axes[:-1]:
        axes.append(flow.united([axis]))
        flow.bend(axis, axes[-1], scalable=False)
    return axes


def _picked(flow: Flow, axis: Axis | None, index_axis: Axis | None) -> Axis | None:
    """Return the common axis of an array and its indices in a result."""
    common = flow.united([axis, index_axis])
    flow.equal(common, axis)
    if index_axis is not None:
        flow.bend(common, axis)
    return common


def _starts(
    where: Value, dimensions: Sequence[Any], shape: Sequence[int], sizes: Sequence[int], clip: bool
) -> list[Any]:
    """Return the starts of slices along every axis, [slices]; None if traced or out of bounds."""
    starts: list[Any] = [np.zeros(math.prod(where.shape[:-1]), int)] * len(shape)
    for column, k in enumerate(dimensions):
        starts[k] = None
        if where.known is not None:
            start = where.known[..., column].astype(int).reshape(-1)
            inside = np.clip(start, 0, shape[k] - sizes[k])
            if clip or (start == inside).all():
                starts[k] = inside
    return starts


class _Write(NamedTuple):
    """A write of an update into an array, by the primitive `name`."""

    name: str
    value: Value
    update: Value


def _scatter(flow: Flow, step: Step) -> Results:
    # The update may be any function.
    if step.name == "scatter" and step.params["update_jaxpr"] is not None:
        return flow.unknown(step)
    value, where, update = step.operands
    numbers = step.params["dimension_numbers"]
    dimensions = numbers.scatter_dims_to_operand_dims
    flow.freeze(where, "it says where to write", [-1])
    index_axes = _places_handed_on(flow, where)

    scattered = _scattered_axes(numbers, len(update.shape))
    pairs = update_axes(numbers, len(value.shape), len(update.shape))
    batching = zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    )
    for k, n in batching:
        _picked(flow, value.axes[k], index_axes[n])
        _picked(flow, update.axes[scattered[n]], index_axes[n])

    sizes = _update_sizes(update, pairs)
    referred = _referred(flow, where, value, dimensions, sizes)
    is_clipped = step.params["mode"] == GatherScatterMode.CLIP
    starts = _starts(where, dimensions, value.shape, sizes, is_clipped)
    for k in numbers.operand_batching_dims:
        starts[k] = None

    unpaired = [k for k in scattered if k not in pairs]
    inserted = [k for k in numbers.inserted_window_dims if value.shape[k] != 1]
    is_list = len(where.shape) == 2 and not numbers.operand_batching_dims
    if is_list and len(unpaired) == len(inserted) == 1:
        pairs[inserted[0]] = unpaired.pop()
    elif math.prod(where.shape[:-1]) != 1:
        starts = [None] * len(value.shape)
    for k in unpaired:
        flow.freeze(update, WRITTEN, [k])
        flow.freeze(where, WRITTEN, [scattered.index(k)])

    write = _Write(step.name, _without(value, referred), update)
    result = _written(flow, write, pairs, starts, inserted)
    if referred is not None:
        axis = flow.united([where.indexed, value.axes[referred]])
        result.axes[referred] = axis
        flow.referring(where, axis)
    return [result]


def _scattered_axes(numbers: Any, update_rank: int) -> list[int]:
    """Return the axes of an update that are axes of indices."""
    return [k for k in range(update_rank) if k not in numbers.update_window_dims]


def update_axes(numbers: Any, rank: int, update_rank: int) -> AxisMap:
    """Return the update's axis for each axis of an array, or None."""
    if numbers is None:  # of `dynamic_update_slice`
        return list(range(rank))
    scattered = _scattered_axes(numbers, update_rank)
    outside = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [k for k in range(rank) if k not in outside]
    pairs: AxisMap = [None] * rank
    for k, update_axis in zip(window, sorted(numbers.update_window_dims), strict=True):
        pairs[k] = update_axis
    for k, n in zip(
        numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True
    ):
        pairs[k] = scattered[n]
    return pairs


def _update_sizes(update: Value, pairs: AxisMap) -> list[int]:
    """Return the update's length along each axis of an array, 1 without an axis of the update."""
    return [1 if k is None else update.shape[k] for k in pairs]


def _dynamic_update(flow: Flow, step: Step) -> Results:
    value, update, *indices = step.operands
    starts: list[Any] = [None] * len(indices)
    for k, index in enumerate(indices):
        if index.known is not None:
            start = clipped(index.known, value.shape[k], update.shape[k])
            starts[k] = np.array([start])
    pairs = update_axes(None, len(value.shape), 0)
    return [_written(flow, _Write("scatter", value, update), pairs, starts, ())]


def _written(
    flow: Flow,
    write: _Write,
    pairs: AxisMap,
    starts: list[Any],
    inserted: Container[Any],
) -> Value:
    """Return the result of a write, given the update's axis and the starts along each axis."""
    _, value, update = write
    sizes = _update_sizes(update, pairs)
    partial = [k for k, size in enumerate(value.shape) if sizes[k] != size or k in inserted]
    is_overwritten = write.name == "scatter" and len(partial) == 1
    axes: Axes = []
    for k, size in enumerate(value.shape):
        paired = pairs[k]
        update_axis: Axis | None = UNIT
        if paired is not None:
            update_axis = update.axes[paired]
        positions = _positions(starts[k], sizes[k])
        if size != 1 and k not in partial:
            axes.append(_united(flow, write, value.axes[k], update_axis))
        elif size != 1 and positions is not None:
            axes.append(_written_axis(flow, write, k, update_axis, positions, is_overwritten))
        else:
            flow.freeze(value, WRITTEN, [k])
            if paired is not None:
                flow.freeze(update, WRITTEN, [paired])
            axis = UNIT
            if size != 1:
                axis = flow.atoms.new(size, WRITTEN)
            axes.append(axis)
    is_zero = value.is_zero and (update.is_zero or write.name == "scatter-mul")
    return Value(value.shape, axes, is_zero)


def _positions(start: np.ndarray | None, size: int) -> np.ndarray | None:
    """Return the positions at which `size` entries are written; None if unknown or repeated."""
    # Unknown or repeated places may hit any neuron.
    if start is None:
        return None
    positions = start
    if len(start) == 1:
        positions = start[0] + np.arange(size)
    if len(np.unique(positions)) == len(positions) == size:
        return positions
    return None


def _written_axis(
    flow: Flow,
    write: _Write,
    k: int,
    update_axis: Axis | None,
    positions: np.ndarray,
    is_overwritten: bool,
) -> Axis:
    """Return axis `k` of a result that is written at `positions`."""
    axis = write.value.axes[k]
    is_zero = write.value.is_zero
    other_positions = np.setdiff1d(np.arange(write.value.shape[k]), positions)
    unwritten = None
    if len(other_positions):
        unwritten = flow.atoms.taken(axis, other_positions)
    overwritten = flow.atoms.taken(axis, positions)

    written = (
        flow.handed_on(update_axis)
        if is_overwritten
        else _united(flow, write, overwritten, update_axis)
    )
    if written is None:
        written = flow.atoms.new(len(positions))
        if not (write.update.is_zero and (is_overwritten or is_zero)):
            flow.equal(written)

    blocks = [written]
    if len(other_positions):
        if unwritten is None:
            unwritten = flow.atoms.new(len(other_positions))
            if not is_zero:
                flow.equal(unwritten)
        blocks = [unwritten, written]
    order = np.concatenate([other_positions, positions])
    return Order(Sum(tuple(blocks)), np.argsort(order))


def _united(flow: Flow, write: _Write, axis: Axis | None, update_axis: Axis | None) -> Axis | None:
    """Unite an axis of an array and an update and return the axis of the result."""
    if write.name == "scatter-mul":
        flow.bend(update_axis, scalable=False)
        return _picked(flow, axis, update_axis)
    varying = axis or update_axis
    if varying is None:
        return None
    shape = (size_of(varying),)
    terms = []
    for value, term_axis in ((write.value, axis), (write.update, update_axis)):
        terms.append(Value(shape, [term_axis], value.is_zero, is_infinite=value.is_infinite))
    return flow.summed(terms, linear=WRITES[write.name]).axes[0]


RULES: dict[str, Rule] = {
    **dict.fromkeys(("rev", "take"), _take),
    "slice": _slices,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update,
    "pad": _pad,
    "gather": _gather,
    **dict.fromkeys(WRITES, _scatter),
}


def on_indices(flow: Flow, step: Step) -> Results | None:
    """Return the results of an operation on indices of an axis, or None.

    Fix the axis if the operation does more than read at its indices.
    """
    if not step.operands:
        return None
    first = step.operands[0]
    if step.name == "select_n" and first.is_zero:
        # The condition is known to be false, as in the guard against negative indices.
        return [step.operands[1]]
    results = _guarded(flow, step, first)
    if results is not None:
        return results

    if first.indexed is not None and not first.is_shifted:
        if step.name == "eq":
            results = _one_hot(flow, first, step.operands[1], step.shape)
        elif step.name == "concatenate":
            results = _beside(step.operands, step.shape)
    for k, value in enumerate(step.operands):
        is_read = results is not None or _reads(step, k)
        if value.indexed is not None and not (is_read and _is_sure(step, value)):
            flow.atoms.freeze(value.indexed, ASKED)
    return results


def _guarded(flow: Flow, step: Step, indices: Value) -> Results | None:
    """Return the results of JAX's guard against negative indices, or None for other operations."""
    if indices.indexed is None or (indices.is_shifted and indices.pair is None):
        return None
    # JAX reads at `i + n` for an index `i` below zero, which indices of an axis never are.
    if step.name == "lt" and step.operands[1].is_zero:
        return [flow.constant(np.zeros(step.shape, bool))]
    if step.name == "add" and _is_uniform(step.operands[1]):
        axes = list(indices.axes)
        return [Value(indices.shape, axes, indexed=indices.indexed, is_shifted=True)]
    return None


def _is_uniform(value: Value) -> bool:
    """Return True if all entries are known to be equal."""
    return value.known is not None and len(np.unique(value.known)) == 1


def _reads(step: Step, k: int) -> bool:
    """Return True if an operation moves operand `k` or reads at its entries."""
    if step.name in MOVES:
        return step.operands[k].column is None
    if step.name == "dynamic_slice":
        return k > 0
    return step.name in READS and k == 1


def _is_sure(step: Step, value: Value) -> bool:
    """Return True if ties of entries do not change what an operation does at indices `value`."""
    if not value.is_shifted:
        return True
    if value.pair is None:
        return False
    if step.name in MOVES:
        return True
    is_write = step.name in ("scatter", "scatter-add") and step.operands[0].is_zero
    return is_write and step.operands[2].pair is value.pair


def _beside(operands: list[Value], shape: Shape) -> Results | None:
    """Concatenate indices of an axis with constant ones, as coordinates to read at."""
    first, *constants = operands
    if first.shape != (*shape[:-1], 1) or any(value.known is None for value in constants):
        return None
    return [Value(shape, [*first.axes[:-1], None], indexed=first.indexed, column=0)]


def _one_hot(flow: Flow, where: Value, numbers: Value, shape: Shape) -> Results | None:
    """Compare indices of an axis with all of its numbers."""
    if numbers.known is None:
        return None
    for k, size in enumerate(shape):
        lengths = [1] * len(shape)
        lengths[k] = size
        count = np.arange(size).reshape(lengths)
        is_constant = where.shape[k] == 1 or where.axes[k] is None
        if size == 1 or not is_constant or not (numbers.known == count).all():
            continue
        axis = flow.united([where.indexed])
        if axis is None or size_of(axis) != size or flow.referring(where, axis) is None:
            return None
        axes: Axes = list(where.axes)
        for j in _single(where, range(len(shape))):
            axes[j] = None
        axes[k] = axis
        return [Value(shape, axes)]
    return None
