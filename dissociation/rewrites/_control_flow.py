"""Follow a JAX program operation by operation, through loops, branches and programs inside it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from dissociation._core._compat import jex, parameters
from dissociation.models._program import inner_program
from dissociation.rewrites._axes import UNIT, Axes, Shape
from dissociation.rewrites._flow import FEW, Flow, Part, Results, Rule, Step, Value
from dissociation.rewrites._folding import folded, is_foldable
from dissociation.rewrites._indexing import MOVES, on_indices
from dissociation.rewrites._indexing import RULES as INDEXING
from dissociation.rewrites._operation_rules import COMPARISONS
from dissociation.rewrites._operation_rules import RULES as OTHERS

LEVELS = (
    *COMPARISONS, "max", "min", "clamp", "select_n", "floor", "ceil", "round", "and", "or", "not",
    "reduce_max", "reduce_min", "reduce_and", "reduce_or", "scan", "while", "cond", "scatter",
    "pad",
)  # fmt: skip
"""Operations that can make different entries equal."""
PRODUCTS = ("dot_general", "conv_general_dilated")


class Stretch(NamedTuple):
    """Entries of a variable at `indices` along one axis."""

    variable: Any
    axis: int
    indices: np.ndarray


def follow(flow: Flow, jaxpr: jex.Jaxpr, consts: Sequence[Value], args: Sequence[Value]) -> Results:
    """Follow a program from its constants and arguments to its results."""
    env: dict[Any, Value] = dict(zip(jaxpr.constvars, consts, strict=True))
    env.update(zip(jaxpr.invars, args, strict=True))
    # Operations that no result depends on must not freeze axes.
    for equation, joined in _needed(jaxpr):
        shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
        if joined is None:
            operands = [_read(flow, env, atom) for atom in equation.invars]
            step = Step(equation.primitive.name, parameters(equation), operands, shapes)
            results = _apply(flow, equation, step)
        else:
            params = {"dimensions": (joined.axis,), "indices": joined.indices}
            results = _ruled(flow, Step("take", params, [env[joined.variable]], shapes))
        env.update(zip(equation.outvars, results, strict=True))
    return [_read(flow, env, atom) for atom in jaxpr.outvars]


def _read(flow: Flow, env: dict[Any, Value], atom: Any) -> Value:
    if isinstance(atom, jex.Literal):
        return flow.constant(atom.val)
    return env[atom]


def _needed(jaxpr: jex.Jaxpr) -> list[tuple[Any, Stretch | None]]:
    """Return the operations that results depend on, each with the `Stretch` that it joins."""
    stretches: dict[Any, Stretch] = {}
    joined = []
    for equation in jaxpr.eqns:
        stretches.update(zip(equation.outvars, _stretches(equation), strict=False))
        joined.append(_joined(equation, stretches))

    needed = []
    variables = set(_variables(jaxpr.outvars))
    for equation, stretch in zip(reversed(jaxpr.eqns), reversed(joined), strict=True):
        if variables.isdisjoint(equation.outvars):
            continue
        needed.append((equation, stretch))
        if stretch is None:
            variables.update(_variables(equation.invars))
        else:
            variables.add(stretch.variable)
    return needed[::-1]


def _variables(atoms: Sequence[Any]) -> list[Any]:
    return [atom for atom in atoms if not isinstance(atom, jex.Literal)]


def _joined(equation: Any, stretches: dict[Any, Stretch]) -> Stretch | None:
    """Return the stretch that an operation joins from stretches of one variable, or None."""
    # Slices that are joined in another order, as in `roll`, are one permutation: rule by rule they
    # would cut the axis.
    joined = [stretches.get(variable) for variable in _variables(equation.invars)]
    if equation.primitive.name != "concatenate" or len(joined) < len(equation.invars):
        return None
    first = joined[0]
    if first is None or first.axis != parameters(equation)["dimension"]:
        return None
    indices = []
    for stretch in joined:
        if stretch is None or stretch[:2] != first[:2]:
            return None
        indices.append(stretch.indices)
    return first._replace(indices=np.concatenate(indices))


def _stretches(equation: Any) -> list[Stretch]:
    """Return the `Stretch` of each result of a slice or a split.

    The list is empty for other operations, for slices of a constant, and for slices that cut
    several axes or none.
    """
    name = equation.primitive.name
    if name not in ("slice", "split") or isinstance(equation.invars[0], jex.Literal):
        return []
    value = equation.invars[0]
    params = parameters(equation)
    if name == "split":
        ends = np.cumsum(params["sizes"])
        pieces = np.split(np.arange(ends[-1]), ends[:-1])
        return [Stretch(value, int(params["axis"]), piece) for piece in pieces]

    shape = value.aval.shape
    strides = params["strides"] or (1,) * len(shape)
    taken = list(map(np.arange, params["start_indices"], params["limit_indices"], strides))
    cut_axes = [k for k, indices in enumerate(taken) if len(indices) != shape[k]]
    if len(cut_axes) != 1:
        return []
    axis = cut_axes[0]
    return [Stretch(value, axis, taken[axis])]


def _apply(flow: Flow, equation: Any, step: Step) -> Results:
    has_empty_result = [0 in shape for shape in step.shapes]
    if all(has_empty_result):
        return list(map(_empty, step.shapes))
    has_empty_operand = any(0 in value.shape for value in step.operands)
    if any(has_empty_result) or (has_empty_operand and step.name != "concatenate"):
        return flow.unknown(step)

    # Rules need known indices, which programs compute from constants.
    constants = [value.known for value in step.operands if value.known is not None]
    is_known = len(constants) == len(step.operands)
    if is_known and is_foldable(equation) and np.prod(step.shape) <= FEW:
        return [flow.constant(folded(equation, constants))]

    program = inner_program(step.params)
    if program is None or step.name in RULES:
        return _ruled(flow, step)
    operands = step.operands
    inputs = program.jaxpr.invars
    if step.name == "custom_vjp_call":  # its program takes the last operands
        operands = operands[len(operands) - len(inputs) :]
    if [variable.aval.shape for variable in inputs] != [value.shape for value in operands]:
        return _ruled(flow, step)
    return _called(flow, program, operands)


def _empty(shape: Shape) -> Value:
    axes: Axes = [None] * len(shape)
    for k, size in enumerate(shape):
        if size == 1:
            axes[k] = UNIT
    return Value(shape, axes, is_zero=True)


def _called(flow: Flow, program: Any, args: list[Value]) -> Results:
    return follow(flow, program.jaxpr, list(map(flow.constant, program.consts)), args)


def _ruled(flow: Flow, step: Step) -> Results:
    """Apply the rule of an operation and append it to the steps unless results are constants."""
    rule = RULES.get(step.name, Flow.unknown)
    results = on_indices(flow, step) or rule(flow, step)
    if any(value.known is not None for value in results):  # constants have no labels
        return results
    for value in results:
        value.tie_level = _tie_level(step.name, step.operands)
        if step.name in MOVES:
            first = step.operands[0]
            value.indexed = first.indexed
            value.is_shifted = first.is_shifted
            value.pair = first.pair
    step.results = results
    flow.steps.append(step)
    return results


def _tie_level(name: str, operands: list[Value]) -> int:
    """Return the `tie_level` of a result, see `Value`."""
    level = max((value.tie_level for value in operands), default=0)
    if name in PRODUCTS:
        return 0
    if name == "max" and level == 0 and any(value.is_zero for value in operands):
        return 1
    if name in MOVES or (level == 0 and name not in LEVELS):
        return level
    return 2


def _follow_part(flow: Flow, step: Step, program: Any, args: list[Value]) -> Results:
    """Follow a loop body or branch, append it to `step.parts`, and return its results."""
    outer_steps = flow.steps
    flow.steps = []
    results = _called(flow, program, args)
    step.parts.append(Part(flow.steps, args, results))
    flow.steps = outer_steps
    return results


def _scan(flow: Flow, step: Step) -> Results:
    first = step.params["num_consts"]
    num_carry = step.params["num_carry"]
    constants = step.operands[:first]
    carry = _carried(flow, step.operands[first : first + num_carry])
    loop = flow.atoms.new(step.params["length"], "a loop runs over it")
    slices = []
    for value in step.operands[first + num_carry :]:
        flow.atoms.unite(loop, value.axes[0])
        flow.freeze(value, "a loop runs over it", [0])
        slices.append(Value(value.shape[1:], value.axes[1:], value.is_zero))

    results = _follow_part(flow, step, step.params["jaxpr"], [*constants, *carry, *slices])
    _close(flow, carry, results[:num_carry])
    outputs = list(carry)
    for value, shape in zip(results[num_carry:], step.shapes[num_carry:], strict=True):
        outputs.append(Value(shape, [loop, *value.axes]))
    return outputs


def _while(flow: Flow, step: Step) -> Results:
    first = step.params["cond_nconsts"]
    last = first + step.params["body_nconsts"]
    carry = _carried(flow, step.operands[last:])
    test_inputs = [*step.operands[:first], *carry]
    for value in _follow_part(flow, step, step.params["cond_jaxpr"], test_inputs):
        flow.freeze(value, "a loop depends on it")
    body_inputs = [*step.operands[first:last], *carry]
    _close(flow, carry, _follow_part(flow, step, step.params["body_jaxpr"], body_inputs))
    return carry


def _carried(flow: Flow, start: list[Value]) -> Results:
    """Return initial values of a loop's carry, with new dimensions."""
    # The body may return other axes than it receives: new atoms are united with both.
    carry = [flow.array(value.shape) for value in start]
    _close(flow, carry, start)
    return carry


def _close(flow: Flow, carry: list[Value], bounds: list[Value]) -> None:
    """Unite a loop's carry with the values that it starts or ends with."""
    for value, bound in zip(carry, bounds, strict=True):
        for axis, bound_axis in zip(value.axes, bound.axes, strict=True):
            flow.atoms.unite(axis, bound_axis)
            if bound_axis is not None or not bound.is_zero:
                flow.equal(axis, bound_axis)


def _cond(flow: Flow, step: Step) -> Results:
    results = []
    for branch in step.params["branches"]:
        results.append(_follow_part(flow, step, branch, step.operands[1:]))
    return [flow.summed(cases) for cases in zip(*results, strict=True)]


RULES: dict[str, Rule] = {
    **OTHERS,
    **INDEXING,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
