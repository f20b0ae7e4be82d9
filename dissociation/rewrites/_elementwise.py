"""What operations entry by entry do to axes, and those that compare or add up along one: sums, powers, maxima."""

import numpy as np

from dissociation.rewrites._flow import Equation, Flow, Value
from dissociation.rewrites._indexing import Params, Rule

LIKE_SUMS = {"add": True, "sub": True, "add_any": True, "max": False, "min": False, "clamp": False,
             "complex": True}  # fmt: skip
"""Homogeneous of degree one in all operands together, and whether they are linear."""

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


def _like_sum(name: str) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        found = flow.summed(operands, linear=LIKE_SUMS[name])
        found.zero = all(value.zero for value in operands)
        return [found]

    return rule


def _same(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value = operands[0]
    kind = params.get("new_dtype")
    if kind is not None and not np.issubdtype(kind, np.inexact) and value.known is None:
        return [flow.mixed(operands, ordered=kind == np.bool_)]  # rounded, or asked whether it is zero
    known = value.known if kind is not None else None
    return [Value(value.shape, value.axes, value.zero, known, value.endless)]


def _all_same(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    return operands


def _power(power: float | None) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        flow.uneven += [axis for axis in operands[0].axes if axis is not None]
        return [flow.multiplied(operands, [float(params["y"]) if power is None else power])]

    return rule


def _product(powers: tuple[float, float]) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        found = flow.multiplied(operands, powers)
        found.zero = operands[0].zero or (operands[1].zero and powers[1] > 0)
        return [found]

    return rule


def _to_power(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    base, exponent = operands
    if exponent.known is None or exponent.known.size != 1:
        return [flow.mixed(operands)]
    return _power(float(exponent.known.reshape(())))(flow, params, [base], shapes)


def _mixed(ordered: bool) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        return [flow.mixed(operands, ordered=ordered)]

    return rule


def _select(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    which, *cases = operands
    found = flow.summed(cases)
    found.zero = all(value.zero for value in cases)
    for k, axis in enumerate(which.axes):
        if axis is not None:
            if found.axes[k] is None:
                found.axes[k] = flow.lined_up([axis])
                flow.still(found.axes[k])
            flow.atoms.unite(axis, found.axes[k])
            flow.uneven.append(axis)
    return [found]


def _reduction(name: str) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        value = operands[0]
        for k in params["axes"]:
            flow.reduce(value.axes[k])
            flow.lengths += [value.shape[k]] if value.axes[k] is None else []
        left = [axis for k, axis in enumerate(value.axes) if k not in params["axes"]]
        for axis in left if name != "reduce_sum" else ():
            if axis is not None:
                flow.uneven.append(axis)
                if name == "reduce_prod":
                    flow.still(axis)
        return [Value(shapes[0], left, zero=value.zero)]

    return rule


def _along(name: str) -> Rule:
    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        value = operands[0]
        flow.freeze(value, "a cumulative operation runs along it", [params["axis"]])
        axes = [flow.handed_on(axis) for axis in value.axes]
        for axis in axes if name != "cumsum" else ():
            if axis is not None:
                flow.uneven.append(axis)
                if name not in ("cummax", "cummin"):
                    flow.still(axis)
        along = params["axis"]
        if axes[along] is None:
            axes[along] = flow.atoms.new(value.shape[along], "a cumulative operation runs along it")
        return [Value(value.shape, axes, value.zero and name != "cumlogsumexp")]

    return rule


def _argument(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value = operands[0]
    left = Value(shapes[0], [axis for k, axis in enumerate(value.axes) if k not in params["axes"]])
    found = flow.mixed([left], ordered=True)
    (along,) = params["axes"]
    flow.reduce(value.axes[along])
    found.refers, found.shifted = value.axes[along], value.level > 0
    return [found]


def _sort(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    """Each along the others: what is sorted by, whatever its factors, gives the others their places."""
    along = params["dimension"] % len(shapes[0])
    if len(operands) == 1:
        flow.reduce(operands[0].axes[along])
    for value in operands if len(operands) > 1 else ():
        flow.freeze(value, "it is sorted", [along])
    results = []
    for value, shape in zip(operands, shapes, strict=True):
        axes = [flow.lined_up([each.axes[k] for each in operands]) for k in range(len(shape))]
        for axis, own in zip(axes, value.axes, strict=True):
            if axis is not None:
                flow.uneven.append(axis)
                flow.equations.append(Equation(((axis, 1.0),) if own is None else ((axis, 1.0), (own, -1.0))))
        axes[along] = flow.atoms.new(shape[along], "it is sorted")
        results.append(Value(shape, axes, value.zero))
    return results


def _top(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    """The largest values along an axis, and where they were."""
    (value,), along = operands, params["axis"] % len(shapes[0])
    flow.reduce(value.axes[along])
    new = flow.atoms.new(shapes[0][along], "its largest values are asked for")
    axes = [new if k == along else flow.handed_on(axis) for k, axis in enumerate(value.axes)]
    largest = Value(shapes[0], axes, value.zero)
    flow.uneven += [axis for axis in largest.axes if axis is not None]
    places = flow.mixed([largest], ordered=True)
    places.refers, places.shifted = value.axes[along], value.level > 0
    largest.pair = places.pair = object() if value.level == 1 else None
    return [largest, places]


def _bits(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    same = shapes[0] == operands[0].shape
    return [flow.mixed(operands)] if same else flow.unknown("bitcast_convert_type", operands, shapes)


RULES: dict[str, Rule] = {
    **{name: _like_sum(name) for name in LIKE_SUMS},
    **dict.fromkeys(SAME, _same),
    **{name: _power(power) for name, power in POWERS.items()},
    **{name: _mixed(True) for name in COMPARISONS},
    **{name: _mixed(False) for name in MIXED},
    **{name: _reduction(name) for name in REDUCTIONS},
    **{name: _along(name) for name in ALONG},
    "integer_pow": _power(None),
    "pow": _to_power,
    "mul": _product((1.0, 1.0)),
    "div": _product((1.0, -1.0)),
    "select_n": _select,
    "optimization_barrier": _all_same,
    "argmax": _argument,
    "argmin": _argument,
    "sort": _sort,
    "top_k": _top,
    "bitcast_convert_type": _bits,
    "name": _all_same,
    "sharding_constraint": _all_same,
}
"""By names of primitives."""
