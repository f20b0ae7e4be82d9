"""What products, windows and Fourier transforms do to axes: what is multiplied and summed, and what is run over."""

from dissociation.rewrites._axes import UNIT, Axis, Product
from dissociation.rewrites._flow import Flow, Value
from dissociation.rewrites._indexing import Params, Rule


def _dot(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    (contracted, batched), (left, right) = params["dimension_numbers"], operands
    for i, j in zip(*contracted, strict=True):
        flow.contract(left.axes[i], right.axes[j])
    shared = [
        Value((left.shape[i],), [each.axes[k]])
        for i, j in zip(*batched, strict=True)
        for each, k in ((left, i), (right, j))
    ]
    axes: list[Axis | None] = []
    for first, second in zip(shared[::2], shared[1::2], strict=True):
        axes += flow.multiplied([first, second], (1.0, 1.0)).axes
    for value, *gone in ((left, contracted[0], batched[0]), (right, contracted[1], batched[1])):
        axes += [flow.handed_on(axis) for k, axis in enumerate(value.axes) if k not in (*gone[0], *gone[1])]
    return [Value(shapes[0], axes, left.zero or right.zero)]


def _convolution(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    image, kernel = operands
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if params["batch_group_count"] != 1:
        return flow.unknown("conv_general_dilated", operands, shapes)
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    axes: list[Axis | None] = [None] * len(out)
    axes[out[0]] = image.axes[lhs[0]]
    strides, around = params["window_strides"], params["padding"]
    for n, (i, j, place) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        plain = tuple(around[n]) == (0, 0) and params["lhs_dilation"][n] == params["rhs_dilation"][n] == 1
        if plain and kernel.shape[j] == 1 and strides[n] == 1:  # by itself at each place
            flow.freeze(kernel, "a convolution runs over it", [j])
            axes[place] = flow.handed_on(image.axes[i])
        elif plain and kernel.shape[j] == image.shape[i]:  # over all of it at once
            flow.contract(image.axes[i], kernel.axes[j])
            axes[place] = UNIT
        else:
            flow.freeze(image, "a convolution runs over it", [i])
            flow.freeze(kernel, "a convolution runs over it", [j])
            axes[place] = flow.atoms.new(shapes[0][place], "a convolution runs over it")
    channels, outputs, inputs = image.axes[lhs[1]], kernel.axes[rhs[0]], kernel.axes[rhs[1]]
    if groups == 1:
        flow.contract(channels, inputs)
        axes[out[1]] = flow.handed_on(outputs)
        return [Value(shapes[0], axes, image.zero or kernel.zero)]
    # Blocks of channels, each with its own kernels: [groups, channels of one], [groups, outputs of one].
    sizes = groups, image.shape[lhs[1]] // groups
    channels = flow.even(image.shape[lhs[1]]) if channels is None else channels
    outputs = flow.even(kernel.shape[rhs[0]]) if outputs is None else outputs
    block, within = flow.atoms.factored(channels, sizes)
    other, own = flow.atoms.factored(outputs, (groups, kernel.shape[rhs[0]] // groups))
    flow.contract(within, inputs)
    both = flow.multiplied([Value((groups,), [block]), Value((groups,), [other])], (1.0, 1.0)).axes[0]
    axes[out[1]] = Product((both or UNIT, own))
    return [Value(shapes[0], axes, image.zero or kernel.zero)]


def _window(linear: bool) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        value = operands[0]
        axes = list(value.axes)
        for k, width in enumerate(params["window_dimensions"]):
            strides = params.get("window_strides") or (1,) * len(axes)
            if width > 1 or shapes[0][k] != value.shape[k] or strides[k] != 1:
                flow.freeze(value, "a window runs over it", [k])
                axes[k] = flow.atoms.new(shapes[0][k], "a window runs over it")
            elif (axis := axes[k]) is not None and not linear:
                flow.uneven.append(axis)
        return [Value(shapes[0], axes, value.zero)]

    return rule


def _fourier(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, shape = operands[0], shapes[0]
    over = range(len(shape) - len(params["fft_lengths"]), len(shape))
    flow.freeze(value, "a Fourier transform runs over it", over)
    made = [flow.atoms.new(n, "a Fourier transform runs over it") if k in over else None for k, n in enumerate(shape)]
    axes = [new or flow.handed_on(axis) for new, axis in zip(made, value.axes, strict=True)]
    return [Value(shape, axes, value.zero)]


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    "reduce_window_sum": _window(True),
    "reduce_window_max": _window(False),
    "reduce_window_min": _window(False),
}
"""By names of primitives."""
