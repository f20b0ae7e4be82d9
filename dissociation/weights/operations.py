"""What each operation of JAX does to axes (`flow`): a rule per primitive, and what has none freezes what it touches."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from dissociation.models.program import inner_program
from dissociation.weights import indexing
from dissociation.weights.axes import UNIT, Axis, Product, Sum
from dissociation.weights.flow import FEW, Equation, Flow, Part, Step, Value
from dissociation.weights.indexing import Params, Rule, take
from dissociation.weights.references import MOVES, on_indices

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
FOLDED = ("add", "sub", "mul", "div", "neg", "lt", "le", "gt", "ge", "eq", "ne", "select_n", "convert_element_type",
          "concatenate", "rem", "max", "min", "iota", "and", "or", "not", "broadcast_in_dim", "reshape",
          "squeeze", "slice", "transpose", "rev")  # fmt: skip


LEVELS = (*COMPARISONS, "max", "min", "clamp", "select_n", "floor", "ceil", "round", "and", "or", "not", "reduce_max",
          "reduce_min", "reduce_and", "reduce_or", "scan", "while", "cond", "scatter", "pad")  # fmt: skip
"""What makes entries equal that are not one."""
PRODUCTS = ("dot_general", "conv_general_dilated")


def follow(flow: Flow, jaxpr: jex.Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> list[Value]:
    """Follows a program, from what is known of its constants and arguments to what is known of its results."""
    env: dict[Any, Value] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom: Any) -> Value:
        return flow.constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]

    for equation, joined in _needed(jaxpr):
        if joined is not None:
            source, along, indices = joined
            shape, step = tuple(equation.outvars[0].aval.shape), {"axis": along, "indices": indices}
            on_indices(flow, "take", [env[source]], [shape])
            results = take(flow, step, [env[source]], [shape])
            flow.steps.append(Step("take", step, [env[source]], results, []))
        else:
            results = _apply(flow, equation, [read(atom) for atom in equation.invars])
        env |= dict(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


Stretch = tuple[Any, int, np.ndarray]
"""A variable, and indices along one of its axes."""


def _needed(jaxpr: jex.Jaxpr) -> list[tuple[Any, Stretch | None]]:
    """The operations that results follow from; with what one takes that only puts stretches of an array together."""
    stretches: dict[Any, Stretch] = {}
    joined: dict[int, Stretch] = {}
    for number, equation in enumerate(jaxpr.eqns):
        stretches |= dict(zip(equation.outvars, _stretches(equation), strict=False))
        if equation.primitive.name == "concatenate":
            own = [stretches.get(v) for v in _variables(equation.invars)]
            there = [each for each in own if each is not None and each[:2] == (own[0] or each)[:2]]
            if len(there) == len(equation.invars) and there[0][1] == equation.params["dimension"]:
                joined[number] = *there[0][:2], np.concatenate([each[2] for each in there])
    wanted, needed = set(_variables(jaxpr.outvars)), []
    for number, equation in reversed(list(enumerate(jaxpr.eqns))):
        if not wanted.isdisjoint(equation.outvars):
            wanted |= {joined[number][0]} if number in joined else set(_variables(equation.invars))
            needed.append((equation, joined.get(number)))
    return needed[::-1]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def _stretches(equation: Any) -> list[Stretch]:
    """What an operation takes of its operand, if it takes stretches along one axis and nothing else."""
    name, params = equation.primitive.name, equation.params
    if name not in ("slice", "split") or isinstance(equation.invars[0], jex.Literal):
        return []
    value = equation.invars[0]
    if name == "split":
        ends = np.cumsum(params["sizes"])
        return [(value, int(params["axis"]), own) for own in np.split(np.arange(ends[-1]), ends[:-1])]
    shape = value.aval.shape
    bounds = zip(params["start_indices"], params["limit_indices"], params["strides"] or (1,) * len(shape), strict=True)
    taken = [np.arange(*each) for each in bounds]
    over = [k for k, own in enumerate(taken) if len(own) != shape[k]]
    return [(value, over[0], taken[over[0]])] if len(over) == 1 else []


def _apply(flow: Flow, equation: Any, operands: list[Value]) -> list[Value]:
    name, params = equation.primitive.name, equation.params
    shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
    if all(0 in shape for shape in shapes):  # nothing is left
        return [Value(shape, [UNIT if size == 1 else None for size in shape], zero=True) for shape in shapes]
    if any(0 in shape for shape in shapes) or (any(0 in v.shape for v in operands) and name != "concatenate"):
        return flow.unknown(name, operands, shapes)
    folded = _folded(equation, operands, shapes)
    if folded is not None:
        return [flow.constant(folded)]
    if name in RULES:
        outer, flow.parts = flow.parts, []
        results = on_indices(flow, name, operands, shapes) or RULES[name](flow, params, operands, shapes)
        if any(value.known is not None for value in results):  # whatever they were made of
            return results
        for value in results:
            value.level = _level(name, operands)
            if name in MOVES:
                first = operands[0]
                value.refers, value.shifted, value.pair = first.refers, first.shifted, first.pair
        flow.steps.append(Step(name, params, operands, results, flow.parts))
        flow.parts = outer
        return results
    inner = inner_program(params)
    if inner is None:
        on_indices(flow, name, operands, shapes)
    if inner is None or [v.aval.shape for v in inner.jaxpr.invars] != [v.shape for v in operands]:
        return flow.unknown(name, operands, shapes)
    return follow(flow, inner.jaxpr, [flow.constant(const) for const in inner.consts], operands)


def _level(name: str, operands: list[Value]) -> int:
    """Whether a result's entries may be equal, see `Value`."""
    own = max((value.level for value in operands), default=0)
    if name in PRODUCTS:
        return 0
    if name == "max" and own == 0 and any(value.zero for value in operands):
        return 1
    return own if name in MOVES or (own == 0 and name not in LEVELS) else 2


def _folded(equation: Any, operands: list[Value], shapes: list[tuple[int, ...]]) -> Any:
    """The result of an operation on constants, if it is small."""
    known = [value.known for value in operands]
    if equation.primitive.name not in FOLDED or any(each is None for each in known) or np.prod(shapes[0]) > FEW:
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(equation.primitive.bind(*known, **equation.params))


def _follow_part(flow: Flow, program: Any, args: list[Value]) -> list[Value]:
    """Follows the body of a loop, or a branch, and keeps its steps apart."""
    outer, flow.steps = flow.steps, []
    found = follow(flow, program.jaxpr, [flow.constant(const) for const in program.consts], args)
    flow.parts.append(Part(flow.steps, args, found))
    flow.steps = outer
    return found


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
    largest = Value(shapes[0], _with([flow.handed_on(axis) for axis in value.axes], along, new), value.zero)
    flow.uneven += [axis for axis in largest.axes if axis is not None]
    places = flow.mixed([largest], ordered=True)
    places.refers, places.shifted = value.axes[along], value.level > 0
    largest.pair = places.pair = object() if value.level == 1 else None
    return [largest, places]


def _fourier(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, shape = operands[0], shapes[0]
    over = range(len(shape) - len(params["fft_lengths"]), len(shape))
    flow.freeze(value, "a Fourier transform runs over it", over)
    made = [flow.atoms.new(n, "a Fourier transform runs over it") if k in over else None for k, n in enumerate(shape)]
    axes = [new or flow.handed_on(axis) for new, axis in zip(made, value.axes, strict=True)]
    return [Value(shape, axes, value.zero)]


def _unstack(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    value, along = operands[0], params["axis"]
    flow.freeze(value, "it is taken apart", [along])
    left = [axis for k, axis in enumerate(value.axes) if k != along]
    return [Value(shape, list(left), value.zero) for shape in shapes]


def _bits(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    same = shapes[0] == operands[0].shape
    return [flow.mixed(operands)] if same else flow.unknown("bitcast_convert_type", operands, shapes)


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
    across = [Value(shapes[0], _with(value.axes, along, None), value.zero) for value in operands]
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


def _with(axes: Sequence[Axis | None], place: int, axis: Axis | None) -> list[Axis | None]:
    return [axis if k == place else each for k, each in enumerate(axes)]


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


def _scan(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    body, counts = params["jaxpr"], (params["num_consts"], params["num_carry"])
    consts, start, over = operands[: counts[0]], operands[counts[0] : sum(counts)], operands[sum(counts) :]
    carry = _carried(flow, start)
    loop = flow.atoms.new(params["length"], "a loop runs over it")
    slices = []
    for value in over:
        flow.atoms.unite(loop, value.axes[0])
        flow.freeze(value, "a loop runs over it", [0])
        slices.append(Value(value.shape[1:], value.axes[1:], value.zero))
    found = _follow_part(flow, body, [*consts, *carry, *slices])
    _close(flow, carry, found[: counts[1]])
    stacked = [
        Value(shape, [loop, *value.axes]) for value, shape in zip(found[counts[1] :], shapes[counts[1] :], strict=True)
    ]
    return [*carry, *stacked]


def _while(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    test, body = params["cond_jaxpr"], params["body_jaxpr"]
    counts = params["cond_nconsts"], params["body_nconsts"]
    carry = _carried(flow, operands[sum(counts) :])
    for value in _follow_part(flow, test, [*operands[: counts[0]], *carry]):
        flow.freeze(value, "a loop depends on it")
    _close(flow, carry, _follow_part(flow, body, [*operands[counts[0] : sum(counts)], *carry]))
    return carry


def _carried(flow: Flow, start: list[Value]) -> list[Value]:
    """What a loop hands on, at its beginning: axes that may turn out to be anything."""
    carry = [flow.array(value.shape) for value in start]
    _close(flow, carry, start)
    return carry


def _close(flow: Flow, carry: list[Value], other: list[Value]) -> None:
    for value, also in zip(carry, other, strict=True):
        for axis, each in zip(value.axes, also.axes, strict=True):
            flow.atoms.unite(axis, each)
            if axis is not None and each is not None:
                flow.equal(axis, each)
            elif not also.zero:
                flow.still(axis)


def _cond(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
    results = [_follow_part(flow, branch, operands[1:]) for branch in params["branches"]]
    return [flow.summed(cases) for cases in zip(*results, strict=True)]


def _inner(name: str) -> Rule:
    """Of a call whose program is one of its parameters, with operands before it that are not the program's."""

    def rule(flow: Flow, params: Params, operands: list[Value], shapes: list[tuple[int, ...]]) -> list[Value]:
        inner = inner_program(params)
        if inner is None:
            return flow.unknown(name, operands, shapes)
        consts = [flow.constant(const) for const in inner.consts]
        return follow(flow, inner.jaxpr, consts, operands[len(operands) - len(inner.jaxpr.invars) :])

    return rule


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
    "fft": _fourier,
    "unstack": _unstack,
    "bitcast_convert_type": _bits,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "squeeze": _squeeze,
    "reshape": _reshape,
    "iota": _iota,
    "split": _split,
    "concatenate": _concatenate,
    "stack": _stack,
    "tile": _tile,
    "name": _all_same,
    "sharding_constraint": _all_same,
    "dot_general": _dot,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _window(True),
    "reduce_window_max": _window(False),
    "reduce_window_min": _window(False),
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_vjp_call": _inner("custom_vjp_call"),
    **indexing.RULES,
}
"""By names of primitives."""
