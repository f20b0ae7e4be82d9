"""Follow a JAX program operation by operation, with one rule per primitive."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dissociation._core._compat import jex, parameters
from dissociation.models._program import inner_program
from dissociation.rewrites._axes import UNIT
from dissociation.rewrites._flow import FEW, Flow, Part, Rule, Step, Value
from dissociation.rewrites._folding import folded, is_foldable
from dissociation.rewrites._indexing import MOVES, on_indices
from dissociation.rewrites._indexing import RULES as INDEXING
from dissociation.rewrites._rules import COMPARISONS
from dissociation.rewrites._rules import RULES as OTHERS

LEVELS = (*COMPARISONS, "max", "min", "clamp", "select_n", "floor", "ceil", "round", "and", "or", "not", "reduce_max",
          "reduce_min", "reduce_and", "reduce_or", "scan", "while", "cond", "scatter", "pad")  # fmt: skip
"""Operations that can make different entries equal."""
PRODUCTS = ("dot_general", "conv_general_dilated")


def follow(
    flow: Flow, jaxpr: jex.Jaxpr, consts: Sequence[Value], args: Sequence[Value]
) -> list[Value]:
    """Follow a program from its constants and arguments to its results."""
    env: dict[Any, Value] = dict(
        zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
    )
    # Operations that no result depends on must not freeze axes.
    for equation, joined in _needed(jaxpr):
        shapes = [tuple(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
        if joined is not None:
            source, along, indices = joined
            params, operands = {"dimensions": (along,), "indices": indices}, [env[source]]
            results = _ruled(flow, Step("take", params, operands, shapes))
        else:
            operands = [_read(flow, env, atom) for atom in equation.invars]
            results = _apply(
                flow,
                equation,
                Step(equation.primitive.name, parameters(equation), operands, shapes),
            )
        env |= dict(zip(equation.outvars, results, strict=True))
    return [_read(flow, env, atom) for atom in jaxpr.outvars]


def _read(flow: Flow, env: dict[Any, Value], atom: Any) -> Value:
    return flow.constant(atom.val) if isinstance(atom, jex.Literal) else env[atom]


Stretch = tuple[Any, int, np.ndarray]
"""A variable, and indices along one of its axes."""


def _needed(jaxpr: jex.Jaxpr) -> list[tuple[Any, Stretch | None]]:
    """Return the operations that results depend on, each with the `Stretch` that it joins, or None."""
    stretches: dict[Any, Stretch] = {}
    joined: dict[int, Stretch] = {}
    for number, equation in enumerate(jaxpr.eqns):
        stretches |= dict(zip(equation.outvars, _stretches(equation), strict=False))
        if equation.primitive.name == "concatenate":
            own = [stretches.get(v) for v in _variables(equation.invars)]
            there = [each for each in own if each is not None and each[:2] == (own[0] or each)[:2]]
            # Slices that are joined in another order, as in `roll`, are one permutation: rule by
            # rule they would cut the axis.
            if (
                len(there) == len(equation.invars)
                and there[0][1] == parameters(equation)["dimension"]
            ):
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
    """Return the slices that an operation takes along one axis."""
    name, params = equation.primitive.name, parameters(equation)
    if name not in ("slice", "split") or isinstance(equation.invars[0], jex.Literal):
        return []
    value = equation.invars[0]
    if name == "split":
        ends = np.cumsum(params["sizes"])
        return [
            (value, int(params["axis"]), own) for own in np.split(np.arange(ends[-1]), ends[:-1])
        ]
    shape = value.aval.shape
    bounds = zip(
        params["start_indices"],
        params["limit_indices"],
        params["strides"] or (1,) * len(shape),
        strict=True,
    )
    taken = [np.arange(*each) for each in bounds]
    over = [k for k, own in enumerate(taken) if len(own) != shape[k]]
    return [(value, over[0], taken[over[0]])] if len(over) == 1 else []


def _apply(flow: Flow, equation: Any, step: Step) -> list[Value]:
    name, operands, shapes = step.name, step.operands, step.shapes
    if all(0 in shape for shape in shapes):  # results are empty
        return [
            Value(shape, [UNIT if size == 1 else None for size in shape], zero=True)
            for shape in shapes
        ]
    if any(0 in shape for shape in shapes) or (
        any(0 in v.shape for v in operands) and name != "concatenate"
    ):
        return flow.unknown(step)
    known = [value.known for value in operands]
    # Rules need known indices, which programs compute from constants.
    constants = [value for value in known if value is not None]
    if is_foldable(equation) and len(constants) == len(known) and np.prod(shapes[0]) <= FEW:
        return [flow.constant(folded(equation, constants))]
    inner = None if name in RULES else inner_program(step.params)
    if inner is not None and name == "custom_vjp_call":  # its program takes the last operands
        operands = operands[len(operands) - len(inner.jaxpr.invars) :]
    if inner is None or [v.aval.shape for v in inner.jaxpr.invars] != [v.shape for v in operands]:
        return _ruled(flow, step)
    return _called(flow, inner, operands)


def _called(flow: Flow, program: Any, args: list[Value]) -> list[Value]:
    return follow(flow, program.jaxpr, [flow.constant(const) for const in program.consts], args)


def _ruled(flow: Flow, step: Step) -> list[Value]:
    """Apply the rule of an operation and append it to the steps unless results are constants."""
    results = on_indices(flow, step) or RULES.get(step.name, Flow.unknown)(flow, step)
    if any(value.known is not None for value in results):  # constants have no labels
        return results
    for value in results:
        value.level = _level(step.name, step.operands)
        if step.name in MOVES:
            first = step.operands[0]
            value.refers, value.shifted, value.pair = first.refers, first.shifted, first.pair
    step.results = results
    flow.steps.append(step)
    return results


def _level(name: str, operands: list[Value]) -> int:
    """Return the `level` of a result, see `Value`."""
    own = max((value.level for value in operands), default=0)
    if name in PRODUCTS:
        return 0
    if name == "max" and own == 0 and any(value.zero for value in operands):
        return 1
    return own if name in MOVES or (own == 0 and name not in LEVELS) else 2


def _follow_part(flow: Flow, step: Step, program: Any, args: list[Value]) -> list[Value]:
    """Follow a loop body or branch, append it to `step.parts`, and return its results."""
    outer, flow.steps = flow.steps, []
    found = _called(flow, program, args)
    step.parts.append(Part(flow.steps, args, found))
    flow.steps = outer
    return found


def _scan(flow: Flow, step: Step) -> list[Value]:
    params, operands = step.params, step.operands
    first, last = params["num_consts"], params["num_consts"] + params["num_carry"]
    carry = _carried(flow, operands[first:last])
    loop = flow.atoms.new(params["length"], "a loop runs over it")
    slices = []
    for value in operands[last:]:
        flow.atoms.unite(loop, value.axes[0])
        flow.freeze(value, "a loop runs over it", [0])
        slices.append(Value(value.shape[1:], value.axes[1:], value.zero))
    found = _follow_part(flow, step, params["jaxpr"], [*operands[:first], *carry, *slices])
    _close(flow, carry, found[: len(carry)])
    made = zip(found[len(carry) :], step.shapes[len(carry) :], strict=True)
    return [*carry, *(Value(shape, [loop, *value.axes]) for value, shape in made)]


def _while(flow: Flow, step: Step) -> list[Value]:
    params, operands = step.params, step.operands
    first, last = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    carry = _carried(flow, operands[last:])
    for value in _follow_part(flow, step, params["cond_jaxpr"], [*operands[:first], *carry]):
        flow.freeze(value, "a loop depends on it")
    _close(
        flow, carry, _follow_part(flow, step, params["body_jaxpr"], [*operands[first:last], *carry])
    )
    return carry


def _carried(flow: Flow, start: list[Value]) -> list[Value]:
    """Return initial values of a loop's carry, with new dimensions."""
    # The body may return other axes than it receives: new atoms are united with both.
    carry = [flow.array(value.shape) for value in start]
    _close(flow, carry, start)
    return carry


def _close(flow: Flow, carry: list[Value], other: list[Value]) -> None:
    for value, also in zip(carry, other, strict=True):
        for axis, each in zip(value.axes, also.axes, strict=True):
            flow.atoms.unite(axis, each)
            if each is not None or not also.zero:
                flow.equal(axis, each)


def _cond(flow: Flow, step: Step) -> list[Value]:
    results = [
        _follow_part(flow, step, branch, step.operands[1:]) for branch in step.params["branches"]
    ]
    return [flow.summed(cases) for cases in zip(*results, strict=True)]


RULES: dict[str, Rule] = {
    **OTHERS,
    **INDEXING,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
