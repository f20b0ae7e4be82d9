"""Walk through a model's program that records hidden layers and the values of modules."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from dissociation._core._compat import parameters
from dissociation.models._module_values import calls_marks, is_mark
from dissociation.models._program import MOVES, Walk, bound, numbered, run_loop

READER = "recorder"
"""Reader of the marks that `Recorder` takes, see `with_marks`."""


class Mark(NamedTuple):
    """Origin of a value and its axis of features.

    Attributes:
        kind: "weights", "input" or "both".
        recorded: List that is empty until the value is recorded. Values that differ only by order
            or shape of axes share the list, so that one of them is recorded.
        depth: Number of consecutive products with weights that lead to the value.
        leaf: Index of the first array of weights in the last of these products.
        axis: Axis of features, None if unknown.
    """

    kind: str
    recorded: list[bool]
    depth: int
    leaf: int
    axis: int | None = None


class Record(NamedTuple):
    """A value of the program.

    Attributes:
        layer: Name of the layer, without a number.
        suffix: End of the name, of one of several values of a module.
        value: Array, with axes of iterations in front.
        has_features: True if features are on the last axis.
        is_activity: True for an array that weights multiply, False for a module's value.
        num_loops: Number of loops around the value.
    """

    layer: str
    suffix: str
    value: Array
    has_features: bool
    is_activity: bool
    num_loops: int = 0


def record_names(records: Sequence[Record], taken: Iterable[str]) -> list[str]:
    """Return names that differ from each other and from `taken`."""
    names = [""] * len(records)
    unavailable = set(taken)
    # Names do not depend on what loops hold.
    for index in sorted(range(len(records)), key=lambda index: records[index].num_loops > 0):
        record = records[index]
        names[index] = numbered(record.layer, unavailable, record.suffix)
        unavailable.add(names[index])
    return names


_MAKERS = (
    "dot_general",
    "conv_general_dilated",
    "gather",
    "dynamic_slice",
    "scan",
    "while",
    "cond",
)
"""Operations whose weights name the result; weights of others name it before the first of these."""


class Recorder(Walk):
    """Walk that records the arrays that weights multiply, and the values that modules return.

    Attributes:
        layers: Name of the layer of each array of weights.
        records: Records in the order of the program.
    """

    def __init__(self, layers: list[str]):
        self.layers = layers
        self.records: list[Record] = []

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        # Inside of it, a custom rule for derivatives would be lost.
        has_rule = equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        is_needed = not has_rule or self._holds_layers(equation, marks)
        return super().enters(equation, marks) and is_needed

    def _holds_layers(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if a program that an operation calls may hold layers."""
        has_weights = any(mark is not None and mark.kind == "weights" for mark in marks)
        return has_weights or calls_marks(equation, READER)

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results and their mark, or a list of marks."""
        if is_mark(equation, READER):
            self._record_value(equation.params, values[0], marks[0])
            return values, marks[0]

        name = equation.primitive.name
        weights_side = None
        if name in ("dot_general", "conv_general_dilated"):
            sides = ["" if mark is None else mark.kind for mark in marks[:2]]
            if "weights" in sides:
                weights_side = sides.index("weights")
            # The input itself is no hidden layer; products of two activations have no weights.
            if sorted(sides) == ["both", "weights"]:
                self._record_activity(equation, values, marks, sides.index("both"))

        if name == "scan" and self._holds_layers(equation, marks):
            return self._in_loop(equation, values, marks)
        results = bound(equation, values)
        known_marks = [mark for mark in marks if mark is not None]
        if not known_marks:
            return results, None

        kinds = {mark.kind for mark in known_marks}
        kind = "both" if len(kinds) > 1 else known_marks[0].kind
        depth = max(mark.depth for mark in known_marks)
        leaves = [mark.leaf for mark in known_marks if mark.depth == depth]
        leaf = min(leaves)
        if name in _MAKERS:
            weights = [mark.leaf for mark in known_marks if mark.kind == "weights"]
            if weights and kind == "both":
                depth += 1
                leaves = weights
            # In a loop the last weights make the result, in a product of attention and values
            # the values.
            leaf = max(leaves)

        recorded = []
        if name in MOVES and marks[0] is not None:
            recorded = marks[0].recorded
        axis = _axis_of_features(equation, marks, weights_side)
        return results, Mark(kind, recorded, depth, leaf, axis)

    def _record_activity(
        self, equation: Any, values: list[Any], marks: list[Any], side: int
    ) -> None:
        """Record the activations on one side of a product with weights once."""
        mark = marks[side]
        if not mark.recorded:
            value = _features_last(equation, values[side], side)
            self.records.append(Record(self.layers[mark.leaf], "", value, True, True))
            mark.recorded.append(True)

    def _record_value(self, params: dict[str, Any], value: Array, mark: Mark | None) -> None:
        """Record the value of a module."""
        # Measures must not guess an axis of features.
        is_last = mark is not None and mark.axis == value.ndim - 1
        has_features = value.ndim < 2 or is_last
        record = Record(params["layer"], params["suffix"], value, has_features, False)
        self.records.append(record)

    def _in_loop(
        self, equation: Any, values: list[Any], marks: list[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the results of a `scan` and their marks, and record values of all iterations."""
        params = parameters(equation)
        num_consts = params["num_consts"]
        num_fixed = num_consts + params["num_carry"]
        program = params["jaxpr"]
        loop_marks = marks[:num_fixed] + [_slice_mark(mark) for mark in marks[num_fixed:]]
        result_marks: list[Any] = []
        records: list[Record] = []

        def walk(operands):
            walker = Recorder(self.layers)
            # What a walk records must not change the next.
            fresh = [mark and mark._replace(recorded=list(mark.recorded)) for mark in loop_marks]
            pairs = walker.run(program.jaxpr, program.consts, operands, fresh)
            records[:] = walker.records
            result_marks[:] = [mark for _, mark in pairs]
            return [value for value, _ in pairs]

        def body(operands, iteration):
            results = walk(operands)
            return results, [record.value for record in records]

        # Iterations after the first get the marks of the iteration before.
        is_settled = False
        while not is_settled:
            jax.eval_shape(lambda *operands: walk(operands), *program.in_avals)
            carry_marks = list(map(_carry_mark, loop_marks[num_consts:num_fixed], result_marks))
            is_settled = carry_marks == loop_marks[num_consts:num_fixed]
            loop_marks[num_consts:num_fixed] = carry_marks

        results, stacked = run_loop(equation, values, body)
        for record, value in zip(records, stacked, strict=True):
            self.records.append(record._replace(value=value, num_loops=record.num_loops + 1))
        # The axis of features would be a guess.
        return results, [mark and mark._replace(recorded=[], axis=None) for mark in result_marks]


def _slice_mark(mark: Mark | None) -> Mark | None:
    """Return the mark of an array's slices along its first axis."""
    if mark is None:
        return None
    axis = None
    if mark.axis:
        axis = mark.axis - 1
    return mark._replace(recorded=[], axis=axis)


def _carry_mark(entry: Mark | None, result: Mark | None) -> Mark | None:
    """Return the mark of a carry that enters a loop, and of an iteration's result, as one."""
    if entry is None or result is None:
        mark = entry or result
        return mark and mark._replace(recorded=[])
    mark = entry
    # Weights outside of the loop name a hidden layer that enters it.
    if entry.kind != result.kind and entry.kind != "both":
        mark = result._replace(kind="both")
    if entry.axis != result.axis:
        mark = mark._replace(axis=None)
    return mark._replace(recorded=[])


def _features_last(equation: Any, value: Array, side: int) -> Array:
    """Return one side of a product with its contracted axes as one, the last."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        contracted = numbers[0][side]
        free = [axis for axis in range(value.ndim) if axis not in contracted]
        shape = [value.shape[axis] for axis in free]
        return value.transpose(*free, *contracted).reshape(*shape, -1)
    batch, channels, *space = numbers.rhs_spec if side else numbers.lhs_spec
    value = value.transpose(batch, *space, channels)
    # The batch axis of a convolution is of one example.
    return value[0] if value.shape[0] == 1 else value


def _axis_of_features(equation: Any, marks: Sequence[Any], side: int | None) -> int | None:
    """Return the axis of a result along which weights made features, if known.

    `side` is the side of the weights in a product.
    """
    name = equation.primitive.name
    params = equation.params
    if name == "conv_general_dilated":
        return params["dimension_numbers"].out_spec[1]
    if name == "dot_general":
        if side is None:
            return None
        contracted, batch = params["dimension_numbers"]
        num_free = equation.invars[side].aval.ndim - len(contracted[side]) - len(batch[side])
        if num_free != 1:
            return None
        return equation.outvars[0].aval.ndim - 1 if side else len(batch[side])

    shape_of_axis = {}
    for mark, atom in zip(marks, equation.invars, strict=True):
        if mark is not None and mark.axis is not None:
            shape_of_axis.setdefault(mark.axis, atom.aval.shape)
    # A wrong axis fails silently in measures: an uncertain one is left out.
    if len(shape_of_axis) != 1 or name in ("gather", "scan", "while", "cond"):
        return None
    ((axis, shape),) = shape_of_axis.items()
    return _axis_after(equation, axis, shape)


def _axis_after(equation: Any, axis: int, shape: tuple[int, ...]) -> int | None:
    """Return the axis of an operation's result that an axis of its operand becomes, if known."""
    name = equation.primitive.name
    params = equation.params
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]

    out_shape = equation.outvars[0].aval.shape
    dropped = ()
    if len(out_shape) < len(shape):
        dropped = params.get("dimensions" if name == "squeeze" else "axes", ())
    if axis in dropped or len(out_shape) != len(shape) - len(dropped):
        return None
    out_axis = axis - sum(dimension < axis for dimension in dropped)
    return out_axis if out_shape[out_axis] == shape[axis] else None
