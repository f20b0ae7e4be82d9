"""What operations that put entries at other places do to axes: transposed, reshaped, split, joined, multiplied out."""

from dissociation.rewrites._axes import Axis, Product, Sum
from dissociation.rewrites._flow import Flow, Value
from dissociation.rewrites._indexing import Params, Rule


def _unstack(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, along = operands[0], params["axis"]
    flow.freeze(value, "it is taken apart", [along])
    left = [axis for k, axis in enumerate(value.axes) if k != along]
    return [Value(shape, list(left), value.zero) for shape in shapes]


def _transpose(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value = operands[0]
    return [Value(shapes[0], [value.axes[k] for k in params["permutation"]], value.zero)]


def _broadcast(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, shape = operands[0], shapes[0]
    axes: list[Axis | None] = [None] * len(shape)
    for k, to in enumerate(params["broadcast_dimensions"]):
        if value.shape[k] == shape[to]:
            axes[to] = value.axes[k]
        else:
            flow.freeze(value, "it is broadcast", [k])
    return [Value(shape, axes, value.zero, endless=value.endless)]


def _squeeze(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value = operands[0]
    gone = [k % len(value.shape) for k in params["dimensions"]]
    flow.freeze(value, "it is an axis no more", gone)
    return [Value(shapes[0], [axis for k, axis in enumerate(value.axes) if k not in gone], value.zero)]


def _reshape(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, order = operands[0], params.get("dimensions")
    if order is not None:
        value = _transpose(flow, {"permutation": order}, [value], [tuple(value.shape[k] for k in order)])[0]
    return [Value(shapes[0], flow.regrouped(value, shapes[0]), value.zero)]


def _iota(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    axes: list[Axis | None] = [None] * len(shapes[0])
    axes[params["dimension"]] = flow.atoms.new(shapes[0][params["dimension"]], "a constant differs along it")
    return [Value(shapes[0], axes)]


def _split(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, along = operands[0], params["axis"]
    axis = value.axes[along]
    parts = [None] * len(shapes) if axis is None else flow.atoms.cut(axis, [int(size) for size in params["sizes"]])
    results = []
    for shape, part in zip(shapes, parts, strict=True):
        axes = list(value.axes)
        axes[along] = part
        results.append(Value(shape, axes, value.zero))
    return results


def _concatenate(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    along = int(params["dimension"])
    operands = [value for value in operands if value.shape[along]]
    if len(operands) == 1:
        return operands
    lengths = [value.shape[along] for value in operands]
    ends = [value.axes[along] for value in operands]
    # Along the other axes it is like a sum: one exponent for all.
    across = [
        Value(shapes[0], [None if k == along else axis for k, axis in enumerate(value.axes)], value.zero)
        for value in operands
    ]
    axes = list(flow.summed(across).axes)
    for value in operands:
        if value.zero:
            for k, axis in enumerate(axes):
                if k != along:
                    flow.atoms.unite(axis, value.axes[k])
    if all(axis is None for axis in ends) and all(value.zero for value in operands):
        axes[along] = None
    else:
        parts = [flow.atoms.new(n) if axis is None else axis for axis, n in zip(ends, lengths, strict=True)]
        for axis, part, value in zip(ends, parts, operands, strict=True):
            if axis is None and not value.zero:
                flow.still(part)
        axes[along] = Sum(tuple(parts))
    return [Value(shapes[0], axes, all(value.zero for value in operands))]


def _stack(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    found = flow.summed(operands)
    for value in operands:
        for axis, own in zip(found.axes, value.axes, strict=True) if value.zero else ():
            flow.atoms.unite(axis, own)
    along = int(params["axis"])
    layers = flow.atoms.new(shapes[0][along], "arrays are stacked along it")
    return [Value(shapes[0], [*found.axes[:along], layers, *found.axes[along:]], all(v.zero for v in operands))]


def _tile(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value = operands[0]
    axes: list[Axis | None] = []
    for axis, count in zip(value.axes, params["reps"], strict=True):
        copies = flow.atoms.new(count, "copies of it stand side by side")
        axes.append(axis if axis is None or count == 1 else Product((copies, axis)))
    return [Value(shapes[0], axes, value.zero)]


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
"""By names of primitives."""
