"""Rules for elementwise operations, operations along axes, reductions, and products of arrays.

`RULES` maps names of JAX's primitives, such as "reshape", to rules. A rule returns the axes of the
results; its arithmetic of axes is in `_flow.py`, and rules for indices in `_indexing.py`.
"""

from typing import Any

import numpy as np

from dissociation.rewrites._axes import UNIT, Axes, Axis, Product, Sum
from dissociation.rewrites._flow import Flow, Results, Rule, Step, Value

LIKE_SUMS = {
    "add": True,
    "sub": True,
    "add_any": True,
    "max": False,
    "min": False,
    "clamp": False,
    "complex": True,
}
"""Operations homogeneous of degree one; True if linear."""

SAME = (
    "neg",
    "stop_gradient",
    "convert_element_type",
    "copy",
    "copy_p",
    "reduce_precision",
    "real",
    "imag",
    "conj",
)
POWERS = {"abs": 1.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne", "sign", "lt_to", "le_to")
MIXED = (
    "exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "asin", "acos", "atan",
    "sinh", "cosh", "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv", "lgamma",
    "digamma", "floor", "ceil", "round", "not", "and", "or", "xor", "rem", "atan2", "nextafter",
    "is_finite", "polygamma", "igamma", "igammac", "bessel_i0e", "bessel_i1e", "shift_left",
    "shift_right_logical", "shift_right_arithmetic", "clz", "population_count", "zeta",
    "igamma_grad_a", "random_gamma_grad", "regularized_incomplete_beta",
)  # fmt: skip
REDUCTIONS = (
    "reduce_sum",
    "reduce_max",
    "reduce_min",
    "reduce_prod",
    "reduce_and",
    "reduce_or",
    "reduce_xor",
)
WINDOWS = ("reduce_window_sum", "reduce_window_max", "reduce_window_min")
ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
CUMULATED = "a cumulative operation runs along it"


def _like_sum(flow: Flow, step: Step) -> Results:
    return [flow.summed(step.operands, linear=LIKE_SUMS[step.name])]


def _same(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    dtype = step.params.get("new_dtype")
    if dtype is not None and not np.issubdtype(dtype, np.inexact) and value.known is None:
        # Rounded, or compared with zero.
        return [flow.mixed(step.operands, ordered=dtype == np.bool_)]
    result = Value(value.shape, value.axes, value.is_zero, is_infinite=value.is_infinite)
    if dtype is not None:
        result.known = value.known
    return [result]


def _power(flow: Flow, step: Step) -> Results:
    base, *exponent = step.operands
    if base.shape != step.shape:  # one number to several powers
        return flow.unknown(step)
    power: Any = POWERS.get(step.name, step.params.get("y"))
    if exponent:
        entries = exponent[0].known
        if entries is None or entries.size != 1:
            return [flow.mixed(step.operands)]
        power = entries.item()
    flow.bend(*base.axes)
    return [flow.multiplied([base], [float(power)])]


def _multiplied(flow: Flow, step: Step) -> Results:
    first, second = step.operands
    product = flow.multiplied([first, second], (1.0, 1.0))
    product.is_zero = first.is_zero or second.is_zero
    return [product]


def _divided(flow: Flow, step: Step) -> Results:
    quotient = flow.multiplied(step.operands, (1.0, -1.0))
    quotient.is_zero = step.operands[0].is_zero
    return [quotient]


def _mixed(flow: Flow, step: Step) -> Results:
    return [flow.mixed(step.operands, ordered=step.name in COMPARISONS)]


def _bitcast(flow: Flow, step: Step) -> Results:
    if step.shape != step.operands[0].shape:
        return flow.unknown(step)
    return [flow.mixed(step.operands)]


def _unchanged(flow: Flow, step: Step) -> Results:
    return step.operands


def _select(flow: Flow, step: Step) -> Results:
    which, *cases = step.operands
    selected = flow.summed(cases)
    for k, axis in enumerate(which.axes):
        if axis is None:
            continue
        if selected.axes[k] is None:
            selected.axes[k] = flow.united([axis])
            flow.equal(selected.axes[k])
        flow.atoms.unite(axis, selected.axes[k])
    flow.bend(*which.axes)
    return [selected]


def _reduction(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    for k in step.params["axes"]:
        flow.reduce(value.axes[k])
        if value.axes[k] is None:
            # A sum over a constant axis depends on its length.
            flow.lengths.append(value.shape[k])
    axes = value.axes_without(step.params["axes"])
    if step.name != "reduce_sum":
        # A product over an axis scales by a power that depends on its length.
        flow.bend(*axes, scalable=step.name != "reduce_prod")
    return [Value(step.shape, axes, value.is_zero)]


def _along(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    along = step.params["axis"]
    flow.freeze(value, CUMULATED, [along])
    axes = list(map(flow.handed_on, value.axes))
    if step.name != "cumsum":
        flow.bend(*axes, scalable=step.name in ("cummax", "cummin"))
    if axes[along] is None:
        axes[along] = flow.atoms.new(value.shape[along], CUMULATED)
    return [Value(value.shape, axes, value.is_zero and step.name != "cumlogsumexp")]


def _argument(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    axes = value.axes_without(step.params["axes"])
    indices = flow.mixed([Value(step.shape, axes)], ordered=True)
    (along,) = step.params["axes"]
    flow.reduce(value.axes[along])
    indices.indexed = value.axes[along]
    indices.is_shifted = value.tie_level > 0
    return [indices]


def _sort(flow: Flow, step: Step) -> Results:
    """Follow a sort; the first of several operands reorders all, whatever its scale."""
    along = step.params["dimension"] % len(step.shape)
    if len(step.operands) == 1:
        flow.reduce(step.operands[0].axes[along])
    else:
        for value in step.operands:
            flow.freeze(value, "it is sorted", [along])

    results = []
    for value in step.operands:
        axes = []
        for operand_axes in zip(*(operand.axes for operand in step.operands), strict=True):
            axes.append(flow.united(operand_axes))
        flow.bend(*axes)
        for axis, operand_axis in zip(axes, value.axes, strict=True):
            flow.equal(axis, operand_axis)
        axes[along] = flow.atoms.new(value.shape[along], "it is sorted")
        results.append(Value(value.shape, axes, value.is_zero))
    return results


def _top(flow: Flow, step: Step) -> Results:
    """Follow `top_k`: the largest values along an axis, and their indices."""
    value = step.operands[0]
    along = int(step.params["axis"]) % len(step.shape)
    flow.reduce(value.axes[along])
    axes = list(map(flow.handed_on, value.axes_except(along)))
    axes[along] = flow.atoms.new(step.shape[along], "its largest values are asked for")
    flow.bend(*axes)

    largest = Value(step.shape, axes, value.is_zero)
    indices = flow.mixed([largest], ordered=True)
    indices.indexed = value.axes[along]
    indices.is_shifted = value.tie_level > 0
    if value.tie_level == 1:
        indices.pair = largest.pair = object()
    return [largest, indices]


def _unstack(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    along = step.params["axis"]
    flow.freeze(value, "it is taken apart", [along])
    return [Value(shape, value.axes_without([along]), value.is_zero) for shape in step.shapes]


def _transpose(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    axes = [value.axes[k] for k in step.params["permutation"]]
    return [Value(step.shape, axes, value.is_zero)]


def _broadcast(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    axes: Axes = [None] * len(step.shape)
    for k, target in enumerate(step.params["broadcast_dimensions"]):
        if value.shape[k] == step.shape[target]:
            axes[target] = value.axes[k]
        else:
            flow.freeze(value, "it is broadcast", [k])
    return [Value(step.shape, axes, value.is_zero, is_infinite=value.is_infinite)]


def _squeeze(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    squeezed = [k % len(value.shape) for k in step.params["dimensions"]]
    flow.freeze(value, "it is no longer an axis", squeezed)
    return [Value(step.shape, value.axes_without(squeezed), value.is_zero)]


def _reshape(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    order = step.params.get("dimensions")
    if order is not None:
        shape = tuple(value.shape[k] for k in order)
        value = Value(shape, [value.axes[k] for k in order], value.is_zero)
    return [Value(step.shape, flow.regrouped(value, step.shape), value.is_zero)]


def _iota(flow: Flow, step: Step) -> Results:
    along = step.params["dimension"]
    axes: Axes = [None] * len(step.shape)
    axes[along] = flow.atoms.new(step.shape[along], "a constant differs along it")
    return [Value(step.shape, axes)]


def _split(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    along = step.params["axis"]
    axis = value.axes[along]
    blocks: Axes = [None] * len(step.shapes)
    if axis is not None:
        sizes = list(map(int, step.params["sizes"]))
        blocks = [*flow.atoms.cut(axis, sizes)]
    results = []
    for shape, block in zip(step.shapes, blocks, strict=True):
        axes = list(value.axes)
        axes[along] = block
        results.append(Value(shape, axes, value.is_zero))
    return results


def _concatenate(flow: Flow, step: Step) -> Results:
    along = int(step.params["dimension"])
    operands = [value for value in step.operands if value.shape[along]]
    if len(operands) == 1:
        return operands

    # Along the other axes it is like a sum: one exponent for all.
    terms = []
    for value in operands:
        terms.append(Value(step.shape, value.axes_except(along), value.is_zero))
    joined = _summed(flow, terms)
    if joined.is_zero and not any(value.axes[along] for value in operands):
        return [joined]

    blocks = []
    for value in operands:
        block = value.axes[along]
        if block is None:
            block = flow.atoms.new(value.shape[along])
            if not value.is_zero:
                flow.equal(block)
        blocks.append(block)
    joined.axes[along] = Sum(tuple(blocks))
    return [joined]


def _summed(flow: Flow, operands: list[Value]) -> Value:
    """Return a sum whose terms have its axes, also the terms that are zero."""
    total = flow.summed(operands)
    for value in operands:
        if value.is_zero:
            for axis, operand_axis in zip(total.axes, value.axes, strict=True):
                flow.atoms.unite(axis, operand_axis)
    return total


def _stack(flow: Flow, step: Step) -> Results:
    total = _summed(flow, step.operands)
    along = int(step.params["axis"])
    # Stacked arrays come from different operations, so their order is fixed.
    layers = flow.atoms.new(step.shape[along], "arrays are stacked along it")
    total.axes.insert(along, layers)
    return [Value(step.shape, total.axes, total.is_zero)]


def _tile(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    axes = list(value.axes)
    for k, count in enumerate(step.params["reps"]):
        copies = flow.atoms.new(count, "copies of it stand side by side")
        axis = axes[k]
        if axis is not None and count != 1:
            axes[k] = Product((copies, axis))
    return [Value(step.shape, axes, value.is_zero)]


CONVOLVED = "a convolution runs over it"
TRANSFORMED = "a Fourier transform runs over it"


def _dot(flow: Flow, step: Step) -> Results:
    contracted, batched = step.params["dimension_numbers"]
    lhs, rhs = step.operands
    for i, j in zip(*contracted, strict=True):
        flow.contract(lhs.axes[i], rhs.axes[j])
    axes: Axes = []
    for i, j in zip(*batched, strict=True):
        axes.append(_along_both(flow, lhs.shape[i], lhs.axes[i], rhs.axes[j]))
    for side, value in enumerate(step.operands):
        free = value.axes_without((*contracted[side], *batched[side]))
        axes += map(flow.handed_on, free)
    return [Value(step.shape, axes, lhs.is_zero or rhs.is_zero)]


def _along_both(flow: Flow, size: int, first: Axis | None, second: Axis | None) -> Axis | None:
    """Unite an axis of two factors and return the axis of their product."""
    factors = [Value((size,), [first]), Value((size,), [second])]
    return flow.multiplied(factors, (1.0, 1.0)).axes[0]


def _convolution(flow: Flow, step: Step) -> Results:
    if step.params["batch_group_count"] != 1:
        return flow.unknown(step)
    image, kernel = step.operands
    numbers = step.params["dimension_numbers"]
    groups = step.params["feature_group_count"]
    batch, channel, *_ = numbers.lhs_spec
    output, kernel_input, *_ = numbers.rhs_spec
    out_batch, out_channel, *positions = numbers.out_spec

    axes: Axes = [None] * len(numbers.out_spec)
    axes[out_batch] = image.axes[batch]
    for n, k in enumerate(positions):
        axes[k] = _convolved(flow, step, n)

    if groups == 1:
        flow.contract(image.axes[channel], kernel.axes[kernel_input])
        axes[out_channel] = flow.handed_on(kernel.axes[output])
    else:
        # Blocks of channels, each with its own kernels.
        num_channels = image.shape[channel]
        num_outputs = kernel.shape[output]
        channels = image.axes[channel] or flow.unscaled(num_channels)
        outputs = kernel.axes[output] or flow.unscaled(num_outputs)
        block, within = flow.atoms.factored(channels, (groups, num_channels // groups))
        out_block, out_within = flow.atoms.factored(outputs, (groups, num_outputs // groups))
        flow.contract(within, kernel.axes[kernel_input])
        out_block = _along_both(flow, groups, block, out_block) or UNIT
        axes[out_channel] = Product((out_block, out_within))
    return [Value(step.shape, axes, image.is_zero or kernel.is_zero)]


def _convolved(flow: Flow, step: Step, n: int) -> Axis | None:
    """Return the `n`-th axis of positions of a convolution."""
    image, kernel = step.operands
    params = step.params
    numbers = params["dimension_numbers"]
    i = numbers.lhs_spec[2 + n]
    j = numbers.rhs_spec[2 + n]
    size = step.shape[numbers.out_spec[2 + n]]
    is_padded = tuple(params["padding"][n]) != (0, 0)
    is_dilated = not params["lhs_dilation"][n] == params["rhs_dilation"][n] == 1
    if not (is_padded or is_dilated):
        # Wider windows read neighbours, which fixes the order of positions.
        if kernel.shape[j] == 1 and params["window_strides"][n] == 1:
            # A product at each position.
            flow.freeze(kernel, CONVOLVED, [j])
            return flow.handed_on(image.axes[i])
        if kernel.shape[j] == image.shape[i]:
            # A sum over all positions.
            flow.contract(image.axes[i], kernel.axes[j])
            return UNIT
    flow.freeze(image, CONVOLVED, [i])
    flow.freeze(kernel, CONVOLVED, [j])
    return flow.atoms.new(size, CONVOLVED)


def _window(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    axes = list(value.axes)
    strides = step.params.get("window_strides") or (1,) * len(axes)
    for k, width in enumerate(step.params["window_dimensions"]):
        if width > 1 or step.shape[k] != value.shape[k] or strides[k] != 1:
            flow.freeze(value, "a window runs over it", [k])
            axes[k] = flow.atoms.new(step.shape[k], "a window runs over it")
        elif step.name != "reduce_window_sum":
            flow.bend(axes[k])
    return [Value(step.shape, axes, value.is_zero)]


def _fourier(flow: Flow, step: Step) -> Results:
    value = step.operands[0]
    first = len(step.shape) - len(step.params["fft_lengths"])
    flow.freeze(value, TRANSFORMED, range(first, len(step.shape)))
    frequencies = flow.atoms.new_axes(step.shape[first:], TRANSFORMED)
    axes = [*map(flow.handed_on, value.axes[:first]), *frequencies]
    return [Value(step.shape, axes, value.is_zero)]


RULES: dict[str, Rule] = {
    **dict.fromkeys(LIKE_SUMS, _like_sum),
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys((*POWERS, "integer_pow", "pow"), _power),
    **dict.fromkeys((*COMPARISONS, *MIXED), _mixed),
    "mul": _multiplied,
    "div": _divided,
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("optimization_barrier", "name", "sharding_constraint"), _unchanged),
    **dict.fromkeys(("argmax", "argmin"), _argument),
    "select_n": _select,
    "sort": _sort,
    "top_k": _top,
    "bitcast_convert_type": _bitcast,
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
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "fft": _fourier,
    **dict.fromkeys(WINDOWS, _window),
}
