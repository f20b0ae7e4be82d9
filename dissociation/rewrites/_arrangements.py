"""Rules for operations that rearrange entries: transpose, reshape, split, join, tile."""

from dissociation.rewrites._axes import Axis, Product, Sum
from dissociation.rewrites._flow import Flow, Rule, Step, Value


def _unstack(flow: Flow, step: Step) -> list[Value]:
    value, along = step.operands[0], step.params["axis"]
    flow.freeze(value, "it is taken apart", [along])
    left = [axis for k, axis in enumerate(value.axes) if k != along]
    return [Value(shape, list(left), value.zero) for shape in step.shapes]


def _transpose(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    return [Value(step.shapes[0], [value.axes[k] for k in step.params["permutation"]], value.zero)]


def _broadcast(flow: Flow, step: Step) -> list[Value]:
    value, shape = step.operands[0], step.shapes[0]
    axes: list[Axis | None] = [None] * len(shape)
    for k, to in enumerate(step.params["broadcast_dimensions"]):
        if value.shape[k] == shape[to]:
            axes[to] = value.axes[k]
        else:
            flow.freeze(value, "it is broadcast", [k])
    return [Value(shape, axes, value.zero, endless=value.endless)]


def _squeeze(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    gone = [k % len(value.shape) for k in step.params["dimensions"]]
    flow.freeze(value, "it is an axis no more", gone)
    return [Value(step.shapes[0], [axis for k, axis in enumerate(value.axes) if k not in gone], value.zero)]


def _reshape(flow: Flow, step: Step) -> list[Value]:
    value, order = step.operands[0], step.params.get("dimensions")
    if order is not None:
        value = Value(tuple(value.shape[k] for k in order), [value.axes[k] for k in order], value.zero)
    return [Value(step.shapes[0], flow.regrouped(value, step.shapes[0]), value.zero)]


def _iota(flow: Flow, step: Step) -> list[Value]:
    shape, along = step.shapes[0], step.params["dimension"]
    axes: list[Axis | None] = [None] * len(shape)
    axes[along] = flow.atoms.new(shape[along], "a constant differs along it")
    return [Value(shape, axes)]


def _split(flow: Flow, step: Step) -> list[Value]:
    value, along = step.operands[0], step.params["axis"]
    axis = value.axes[along]
    sizes = [int(size) for size in step.params["sizes"]]
    parts = [None] * len(sizes) if axis is None else flow.atoms.cut(axis, sizes)
    results = []
    for shape, part in zip(step.shapes, parts, strict=True):
        axes = list(value.axes)
        axes[along] = part
        results.append(Value(shape, axes, value.zero))
    return results


def _concatenate(flow: Flow, step: Step) -> list[Value]:
    along, shape = int(step.params["dimension"]), step.shapes[0]
    operands = [value for value in step.operands if value.shape[along]]
    if len(operands) == 1:
        return operands
    ends = [value.axes[along] for value in operands]
    # Along the other axes it is like a sum: one exponent for all.
    across = [
        Value(shape, [None if k == along else axis for k, axis in enumerate(value.axes)], value.zero)
        for value in operands
    ]
    found = _summed(flow, across)
    if not found.zero or any(axis is not None for axis in ends):
        parts = [value.axes[along] or flow.atoms.new(value.shape[along]) for value in operands]
        for axis, part, value in zip(ends, parts, operands, strict=True):
            if axis is None and not value.zero:
                flow.still(part)
        found.axes[along] = Sum(tuple(parts))
    return [found]


def _summed(flow: Flow, operands: list[Value]) -> Value:
    """Sum operands and unite axes of zero operands too."""
    found = flow.summed(operands)
    for value in operands:
        for axis, own in zip(found.axes, value.axes, strict=True) if value.zero else ():
            flow.atoms.unite(axis, own)
    return found


def _stack(flow: Flow, step: Step) -> list[Value]:
    found, along = _summed(flow, step.operands), int(step.params["axis"])
    # Stacked arrays come from different operations, so their order is fixed.
    layers = flow.atoms.new(step.shapes[0][along], "arrays are stacked along it")
    return [Value(step.shapes[0], [*found.axes[:along], layers, *found.axes[along:]], found.zero)]


def _tile(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    axes: list[Axis | None] = []
    for axis, count in zip(value.axes, step.params["reps"], strict=True):
        copies = flow.atoms.new(count, "copies of it stand side by side")
        axes.append(axis if axis is None or count == 1 else Product((copies, axis)))
    return [Value(step.shapes[0], axes, value.zero)]


RULES: dict[str, Rule] = {
    "unstack": _unstack,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "iota": _iota,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
}
