"""Rules for products, convolutions, windows and Fourier transforms."""

from dissociation.rewrites._axes import UNIT, Axis, Product
from dissociation.rewrites._flow import Flow, Rule, Step, Value

CONVOLVED = "a convolution runs over it"
TRANSFORMED = "a Fourier transform runs over it"


def _dot(flow: Flow, step: Step) -> list[Value]:
    (contracted, batched), (left, right) = step.params["dimension_numbers"], step.operands
    for i, j in zip(*contracted, strict=True):
        flow.contract(left.axes[i], right.axes[j])
    axes: list[Axis | None] = []
    for i, j in zip(*batched, strict=True):
        axes.append(_along_both(flow, left.shape[i], left.axes[i], right.axes[j]))
    for value, *gone in ((left, contracted[0], batched[0]), (right, contracted[1], batched[1])):
        axes += [flow.handed_on(axis) for k, axis in enumerate(value.axes) if k not in (*gone[0], *gone[1])]
    return [Value(step.shapes[0], axes, left.zero or right.zero)]


def _along_both(flow: Flow, size: int, first: Axis | None, second: Axis | None) -> Axis | None:
    """Return the axis that both factors of a product have."""
    return flow.multiplied([Value((size,), [first]), Value((size,), [second])], (1.0, 1.0)).axes[0]


def _convolution(flow: Flow, step: Step) -> list[Value]:
    (image, kernel), params = step.operands, step.params
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    if params["batch_group_count"] != 1:
        return flow.unknown(step)
    zero = image.zero or kernel.zero
    lhs, rhs, out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    axes: list[Axis | None] = [None] * len(out)
    axes[out[0]] = image.axes[lhs[0]]
    strides, around = params["window_strides"], params["padding"]
    for n, (i, j, place) in enumerate(zip(lhs[2:], rhs[2:], out[2:], strict=True)):
        plain = tuple(around[n]) == (0, 0) and params["lhs_dilation"][n] == params["rhs_dilation"][n] == 1
        # Wider windows read neighbours, which fixes the order of positions.
        if plain and kernel.shape[j] == 1 and strides[n] == 1:  # a product at each position
            flow.freeze(kernel, CONVOLVED, [j])
            axes[place] = flow.handed_on(image.axes[i])
        elif plain and kernel.shape[j] == image.shape[i]:  # a sum over all positions
            flow.contract(image.axes[i], kernel.axes[j])
            axes[place] = UNIT
        else:
            flow.freeze(image, CONVOLVED, [i])
            flow.freeze(kernel, CONVOLVED, [j])
            axes[place] = flow.atoms.new(step.shapes[0][place], CONVOLVED)
    channels, outputs, inputs = image.axes[lhs[1]], kernel.axes[rhs[0]], kernel.axes[rhs[1]]
    if groups == 1:
        flow.contract(channels, inputs)
        axes[out[1]] = flow.handed_on(outputs)
        return [Value(step.shapes[0], axes, zero)]
    # Blocks of channels, each with its own kernels: [groups, channels of one], [groups, outputs of one].
    sizes = groups, image.shape[lhs[1]] // groups
    channels = flow.even(image.shape[lhs[1]]) if channels is None else channels
    outputs = flow.even(kernel.shape[rhs[0]]) if outputs is None else outputs
    block, within = flow.atoms.factored(channels, sizes)
    other, own = flow.atoms.factored(outputs, (groups, kernel.shape[rhs[0]] // groups))
    flow.contract(within, inputs)
    axes[out[1]] = Product((_along_both(flow, groups, block, other) or UNIT, own))
    return [Value(step.shapes[0], axes, zero)]


def _window(flow: Flow, step: Step) -> list[Value]:
    value, shape = step.operands[0], step.shapes[0]
    axes = list(value.axes)
    strides = step.params.get("window_strides") or (1,) * len(axes)
    for k, width in enumerate(step.params["window_dimensions"]):
        if width > 1 or shape[k] != value.shape[k] or strides[k] != 1:
            flow.freeze(value, "a window runs over it", [k])
            axes[k] = flow.atoms.new(shape[k], "a window runs over it")
        elif step.name != "reduce_window_sum":
            flow.bend(axes[k])
    return [Value(shape, axes, value.zero)]


def _fourier(flow: Flow, step: Step) -> list[Value]:
    value, shape = step.operands[0], step.shapes[0]
    over = range(len(shape) - len(step.params["fft_lengths"]), len(shape))
    flow.freeze(value, TRANSFORMED, over)
    new = [flow.atoms.new(size, TRANSFORMED) if k in over else None for k, size in enumerate(shape)]
    axes = [made or flow.handed_on(axis) for made, axis in zip(new, value.axes, strict=True)]
    return [Value(shape, axes, value.zero)]


RULES: dict[str, Rule] = {
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    **dict.fromkeys(("reduce_window_sum", "reduce_window_max", "reduce_window_min"), _window),
}
