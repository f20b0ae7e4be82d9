"""Rules for elementwise operations, reductions, and operations along an axis."""

from typing import Any

import numpy as np

from dissociation.rewrites._flow import Flow, Rule, Step, Value

LIKE_SUMS = {"add": True, "sub": True, "add_any": True, "max": False, "min": False, "clamp": False,
             "complex": True}  # fmt: skip
"""Operations homogeneous of degree one; True if linear."""

SAME = ("neg", "stop_gradient", "convert_element_type", "copy", "copy_p", "reduce_precision", "real", "imag", "conj")
POWERS = {"abs": 1.0, "square": 2.0, "sqrt": 0.5, "rsqrt": -0.5, "cbrt": 1 / 3}
COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne", "sign", "lt_to", "le_to")
MIXED = ("exp", "exp2", "log", "log1p", "expm1", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
         "asinh", "acosh", "atanh", "logistic", "erf", "erfc", "erf_inv", "lgamma", "digamma", "floor", "ceil", "round",
         "not", "and", "or", "xor", "rem", "atan2", "nextafter", "is_finite", "polygamma", "igamma", "igammac",
         "bessel_i0e", "bessel_i1e", "shift_left", "shift_right_logical", "shift_right_arithmetic", "clz",
         "population_count", "zeta", "igamma_grad_a", "random_gamma_grad",
         "regularized_incomplete_beta")  # fmt: skip
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor")
ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
CUMULATED = "a cumulative operation runs along it"


def _same(flow: Flow, step: Step) -> list[Value]:
    value = step.operands[0]
    kind = step.params.get("new_dtype")
    if kind is not None and not np.issubdtype(kind, np.inexact) and value.known is None:
        return [flow.mixed(step.operands, ordered=kind == np.bool_)]  # rounded, or compared with zero
    return [Value(value.shape, value.axes, value.zero, None if kind is None else value.known, value.endless)]


def _power(flow: Flow, step: Step) -> list[Value]:
    base, *exponent = step.operands
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
                flow.still(found.axes[k])
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
    """Follow a sort; with several operands the first reorders the others, whatever its scale."""
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
            if axis is not None:
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


RULES: dict[str, Rule] = {
    **dict.fromkeys(LIKE_SUMS, lambda flow, step: [flow.summed(step.operands, linear=LIKE_SUMS[step.name])]),
    **dict.fromkeys(SAME, _same),
    **dict.fromkeys((*POWERS, "integer_pow", "pow"), _power),
    **dict.fromkeys((*COMPARISONS, *MIXED), _mixed),
    **dict.fromkeys(("mul", "div"), _product),
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(ALONG, _along),
    **dict.fromkeys(("optimization_barrier", "name", "sharding_constraint"), lambda flow, step: step.operands),
    **dict.fromkeys(("argmax", "argmin"), _argument),
    "select_n": _select,
    "sort": _sort,
    "top_k": _top,
    "bitcast_convert_type": lambda flow, step: (
        _mixed(flow, step) if step.shapes[0] == step.operands[0].shape else flow.unknown(step)
    ),
}
