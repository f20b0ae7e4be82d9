"""Follows programs of JAX operation by operation, and says what each does to axes (`flow`): a rule per primitive.

What has no rule freezes what it touches. The rules of loops and branches are here, which follow programs themselves.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from dissociation._core._compat import jex, parameters
from dissociation.models._program import inner_program
from dissociation.rewrites import (
    _arrangements as arrangements,
)
from dissociation.rewrites import (
    _contractions as contractions,
)
from dissociation.rewrites import (
    _elementwise as elementwise,
)
from dissociation.rewrites import (
    _indexing as indexing,
)
from dissociation.rewrites._axes import UNIT
from dissociation.rewrites._elementwise import COMPARISONS
from dissociation.rewrites._flow import FEW, Flow, Part, Step, Value
from dissociation.rewrites._indexing import Params, Rule, take
from dissociation.rewrites._references import MOVES, on_indices

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
            if len(there) == len(equation.invars) and there[0][1] == parameters(equation)["dimension"]:
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
    name, params = equation.primitive.name, parameters(equation)
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
    name, params = equation.primitive.name, parameters(equation)
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
    **elementwise.RULES,
    **arrangements.RULES,
    **contractions.RULES,
    **indexing.RULES,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "custom_vjp_call": _inner("custom_vjp_call"),
}
"""By names of primitives."""
