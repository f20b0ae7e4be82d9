"""Rules for elementwise operations, operations along axes, reductions, and products of arrays."""

from typing import Any

import numpy as np

from dissociation.rewrites._axes import UNIT, Axis, Product, Sum
from dissociation.rewrites._flow import Flow, Rule, Step, Value

LIKE_SUMS = {"add": True, "sub": True, "add_any": True, "max": False, "min": False, "clamp": False,
             "complex": True}  # fmt: skip
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
MIXED = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
         "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma", "floor", "ceil", "round",
         "not", "and", "or", "xor", "rem", "atan2", "nextafter", "is_finite", "polygamma", "igamma", "igammac",
         "bessel_i0e", "bessel_i1e", "shift_left", "shift_right_logical", "shift_right_arithmetic", "clz",
         "population_count", "zeta", "igamma_grad_a", "random_gamma_grad",
         "regularized_incomplete_beta")  # fmt: skip
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


def _same(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    kind = step.params.get("new_dtype")
    if kind is not None and not np.issubdtype(kind, np.inexact) and value.known is None:
        return [
            flow.mixed(step.operands, ordered=kind == np.bool_)
        ]  # rounded, or compared with zero
    return [
        Value(
            value.shape,
            value.axes,
            value.zero,
            None if kind is None else value.known,
            value.endless,
        )
    ]


def _power(flow: Flow, step: Step) -> list[Value]:
    base, *exponent = step.operands
    if base.shape != step.shapes[0]:  # one number to several powers
        return flow.unknown(step)
    power: Any = POWERS.get(step.name, step.params.get("y"))
    if exponent:
        known = exponent[0].known
        if known is None or known.size != 1:
            return [flow.mixed(step.operands)]
        power = known.item()
    flow.bend(*base.axes)
    return [flow.multiplied([base], [float(power)])]


def _product(flow: Flow, step: Step) -> list[Value]:
    first, second = step.operands
    found = flow.multiplied(step.operands, (1.0, 1.0 if step.name == "mul" else -1.0))
    found.zero = first.zero or (second.zero and step.name == "mul")
    return [found]


def _mixed(flow: Flow, step: Step) -> list[Value]:
    return [flow.mixed(step.operands, ordered=step.name in COMPARISONS)]


def _select(flow: Flow, step: Step) -> list[Value]:
    which, *cases = step.operands
    found = flow.summed(cases)
    for k, axis in enumerate(which.axes):
        if axis is not None:
            if found.axes[k] is None:
                found.axes[k] = flow.lined_up([axis])
                flow.equal(found.axes[k])
            flow.atoms.unite(axis, found.axes[k])
    flow.bend(*which.axes)
    return [found]


def _reduction(flow: Flow, step: Step) -> list[Value]:
    value, over = step.operands[0], step.params["axes"]
    for k in over:
        flow.reduce(value.axes[k])
        # A sum over a constant axis depends on its length.
        flow.lengths += [value.shape[k]] if value.axes[k] is None else []
    left = [axis for k, axis in enumerate(value.axes) if k not in over]
    if step.name != "reduce_sum":
        # A product over an axis scales by a power that depends on its length.
        flow.bend(*left, still=step.name == "reduce_prod")
    return [Value(step.shapes[0], left, value.zero)]


def _along(flow: Flow, step: Step) -> list[Value]:
    value, along = step.operands[0], step.params["axis"]
    flow.freeze(value, CUMULATED, [along])
    axes = [flow.handed_on(axis) for axis in value.axes]
    if step.name != "cumsum":
        flow.bend(*axes, still=step.name not in ("cummax", "cummin"))
    if axes[along] is None:
        axes[along] = flow.atoms.new(value.shape[along], CUMULATED)
    return [Value(value.shape, axes, value.zero and step.name != "cumlogsumexp")]


def _argument(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    (along,) = step.params["axes"]
    left = Value(step.shapes[0], [axis for k, axis in enumerate(value.axes) if k != along])
    found = flow.mixed([left], ordered=True)
    flow.reduce(value.axes[along])
    found.refers, found.shifted = value.axes[along], value.level > 0
    return [found]


def _sort(flow: Flow, step: Step) -> list[Value]:
    """Follow a sort; the first of several operands reorders all, whatever its scale."""
    operands, along = step.operands, step.params["dimension"] % len(step.shapes[0])
    if len(operands) == 1:
        flow.reduce(operands[0].axes[along])
    for value in operands if len(operands) > 1 else ():
        flow.freeze(value, "it is sorted", [along])
    results = []
    for value, shape in zip(operands, step.shapes, strict=True):
        axes = [flow.lined_up([each.axes[k] for each in operands]) for k in range(len(shape))]
        flow.bend(*axes)
        for axis, own in zip(axes, value.axes, strict=True):
            flow.equal(axis, own)
        axes[along] = flow.atoms.new(shape[along], "it is sorted")
        results.append(Value(shape, axes, value.zero))
    return results


def _top(flow: Flow, step: Step) -> list[Value]:
    """Follow `top_k`: the largest values along an axis, and their indices."""
    (value,), shape = step.operands, step.shapes[0]
    along = step.params["axis"] % len(shape)
    flow.reduce(value.axes[along])
    new = flow.atoms.new(shape[along], "its largest values are asked for")
    axes = [new if k == along else flow.handed_on(axis) for k, axis in enumerate(value.axes)]
    largest = Value(shape, axes, value.zero)
    flow.bend(*axes)
    places = flow.mixed([largest], ordered=True)
    places.refers, places.shifted = value.axes[along], value.level > 0
    largest.pair = places.pair = object() if value.level == 1 else None
    return [largest, places]


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
    flow.freeze(value, "it is no longer an axis", gone)
    return [
        Value(
            step.shapes[0], [axis for k, axis in enumerate(value.axes) if k not in gone], value.zero
        )
    ]


def _reshape(flow: Flow, step: Step) -> list[Value]:
    value, order = step.operands[0], step.params.get("dimensions")
    if order is not None:
        value = Value(
            tuple(value.shape[k] for k in order), [value.axes[k] for k in order], value.zero
        )
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
        Value(
            shape, [None if k == along else axis for k, axis in enumerate(value.axes)], value.zero
        )
        for value in operands
    ]
    found = _summed(flow, across)
    if not found.zero or any(axis is not None for axis in ends):
        parts = [value.axes[along] or flow.atoms.new(value.shape[along]) for value in operands]
        for axis, part, value in zip(ends, parts, operands, strict=True):
            if axis is None and not value.zero:
                flow.equal(part)
        found.axes[along] = Sum(tuple(parts))
    return [found]


def _summed(flow: Flow, operands: list[Value]) -> Value:
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
        axes += [
            flow.handed_on(axis)
            for k, axis in enumerate(value.axes)
            if k not in (*gone[0], *gone[1])
        ]
    return [Value(step.shapes[0], axes, left.zero or right.zero)]


def _along_both(flow: Flow, size: int, first: Axis | None, second: Axis | None) -> Axis | None:
    """Unite an axis of two factors and return the axis of their product."""
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
        plain = (
            tuple(around[n]) == (0, 0)
            and params["lhs_dilation"][n] == params["rhs_dilation"][n] == 1
        )
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
    # Blocks of channels, each with its own kernels: [groups, channels of one], [groups, outputs of
    # one].
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
    **dict.fromkeys(
        LIKE_SUMS, lambda flow, step: [flow.summed(step.operands, linear=LIKE_SUMS[step.name])]
    ),
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys((*POWERS, "integer_pow", "pow"), _power),
    **dict.fromkeys((*COMPARISONS, *MIXED), _mixed),
    **dict.fromkeys(("mul", "div"), _product),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(
        ("optimization_barrier", "name", "sharding_constraint"), lambda flow, step: step.operands
    ),
    **dict.fromkeys(("argmax", "argmin"), _argument),
    "select_n": _select,
    "sort": _sort,
    "top_k": _top,
    "bitcast_convert_type": lambda flow, step: (
        _mixed(flow, step) if step.shapes[0] == step.operands[0].shape else flow.unknown(step)
    ),
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
