"""Hidden layers and logits of any network, by common names."""

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from dissociation._core.checks import check_takes, fail, fail_kind
from dissociation._core.conversion import describe, to_device
from dissociation._core.validation import validated
from dissociation.models._program import (
    MOVES,
    Call,
    Walk,
    bound,
    evaluated,
    numbered,
    program_of,
    separate_state,
)
from dissociation.training._members import count


@jax.tree_util.register_pytree_with_keys_class
class Layers(dict[str, Array]):
    """Dictionary of representations by layer, with features (channels) on the last axis.

    `layers["features"]` is the last hidden layer, unless a layer has that name. `ranks` are numbers
    of axes of one example by name, without layers whose axis of features is unknown.
    """

    def __init__(self, arrays: Any, ranks: Mapping[str, int] | None = None):
        super().__init__(arrays)
        # `vmap` adds axes of samples and members in front: their number does not follow from an
        # array.
        if ranks is None:
            ranks = {name: jnp.ndim(array) for name, array in self.items()}
        self.ranks = dict(ranks)

    def __missing__(self, name: str) -> Array:
        try:
            return self[layer_named("layer", name, self)]
        except ValueError as error:
            raise KeyError(str(error)) from None

    def tree_flatten_with_keys(self) -> Any:
        """Return arrays with their names, in the order of layers, and static data."""
        keyed = [(jax.tree_util.DictKey(name), array) for name, array in self.items()]
        return keyed, (tuple(self), tuple(self.ranks.items()))

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Layers":
        """Return the dictionary from `static` and `arrays`."""
        names, ranks = static
        return cls(zip(names, arrays, strict=True), dict(ranks))


def layer_named(argument: str, name: str, layers: Iterable[str]) -> str:
    """Return `name` if it is one of `layers`, or the last hidden layer for "features".

    Raises:
        ValueError: If `name` is neither, or "features" of layers without logits.
    """
    names = list(dict.fromkeys(layers))
    if name in names:
        return name
    hidden = [layer for layer in names if layer != "logits"]
    if name == "features" and hidden and "logits" in names:
        return hidden[-1]
    fail(argument, f"be one of {', '.join(map(repr, names))}", repr(name))


def named(hidden: Mapping[str, Array], logits: Array) -> Layers:
    """Return hidden layers and logits of one example.

    `hidden` has layers in forward order, by the names of their weights.
    """
    if not isinstance(hidden, Mapping):
        advice = (
            'Name layers by the paths of their weights: named({"layers[0]": array, ...}, logits)'
        )
        fail_kind("hidden", "be arrays by the names of their layers", describe(hidden), advice)
    return Layers({**hidden, "logits": logits})


class Network(eqx.Module):
    """Base of networks that take one example and name their representations."""

    @abstractmethod
    def representations(self, x: Any) -> dict[str, Array]:
        """Return hidden layers and logits of one example by name."""

    def __call__(self, x: Float[Array | np.ndarray, "..."]) -> Float[Array, " classes"]:
        """Return the logits of one example."""
        return self.representations(x)["logits"]


@functools.singledispatch
def representations_of_example(model: Any, x: Array) -> dict[str, Array]:
    """Return the representations of one example; `.register(type)` adds types of models.

    Args:
        model: A model with a method `representations(x)`, or of a registered type: both return
            arrays with features (channels) last. Hidden layers of any other model are the arrays
            that weights multiply in matrix products and convolutions outside of loops, each array
            once, without the model's input, contracted axes last. The result of a loop is named
            after the last weights in it.
        x: One example.

    Raises:
        TypeError: If the model cannot be called, or does not return one array.
    """
    if callable(getattr(model, "representations", None)):
        return model.representations(x)
    module, _ = separate_state(model)
    if not callable(module):
        requirement = "be a function of one example, or such a one and its state"
        fail_kind("model", requirement, type(model).__name__)
    return seen_by_weights(model, x)


def seen_by_weights(model: Any, x: Array, call: Call | None = None) -> Layers:
    """Return the arrays that weights multiply, and the logits, by name."""
    _, layers, leaves, program = program_of(model, call)
    traced = jax.make_jaxpr(program)(leaves, x)
    if len(traced.out_avals) != 1:
        fail_kind("model", "return one array", f"{len(traced.out_avals)} arrays")
    recorder = _InputRecorder(layers)
    marks = [_Mark("weights", [], 0, leaf) for leaf in range(len(leaves))]
    marks.append(_Mark("input", [], -1, 0))
    ((logits, mark),) = recorder.run(traced.jaxpr, traced.consts, [*leaves, x], marks)

    axis = None if mark is None else mark.axis
    if axis is not None:
        logits = jnp.moveaxis(logits, axis, -1)
    arrays = named(recorder.inputs, logits)
    # Measures must not guess an axis of features.
    if axis is None and logits.ndim > 1:
        del arrays.ranks["logits"]
    return arrays


class _Mark(NamedTuple):
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


class _InputRecorder(Walk):
    """Walk that records the arrays that weights multiply.

    Attributes:
        layers: Name of the layer of each array of weights.
        inputs: Recorded arrays by name.
    """

    def __init__(self, layers: list[str]):
        self.layers = layers
        self.inputs: dict[str, Array] = {}

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        # Inside of it, a custom rule for derivatives would be lost.
        has_rule = equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        has_weights = any(mark is not None and mark.kind == "weights" for mark in marks)
        return super().enters(equation, marks) and (has_weights or not has_rule)

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results and their mark."""
        name = equation.primitive.name
        weights_side = None
        if name in ("dot_general", "conv_general_dilated"):
            sides = ["" if mark is None else mark.kind for mark in marks[:2]]
            if "weights" in sides:
                weights_side = sides.index("weights")
            # The input itself is no hidden layer; products of two activations have no weights.
            if sorted(sides) == ["both", "weights"]:
                self._record(equation, values, marks, sides.index("both"))

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
        return results, _Mark(kind, recorded, depth, leaf, axis)

    def _record(self, equation: Any, values: list[Any], marks: list[Any], side: int) -> None:
        """Record the activations on one side of a product with weights once."""
        mark = marks[side]
        if not mark.recorded:
            layer = numbered(self.layers[mark.leaf], {"logits", *self.inputs})
            self.inputs[layer] = _features_last(equation, values[side], side)
            mark.recorded.append(True)


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


@validated
def representations(
    model: Any, inputs: Num[Array | np.ndarray, "n ..."], *, call: Call | None = None
) -> Layers:
    """Return hidden layers and logits of one network for many examples.

    Args:
        model: One network: of `dissociation.models`, or any other, see
            `representations_of_example`.
        inputs: Examples, [n, ...].
        call: Function from model and example to outputs, as in `rewrites.neuron_groups`.

    Returns:
        Arrays [n, ...] by name, channels last for every model: hidden layers in forward order, then
        "logits". A hidden layer is named after the weights that made it, as in
        `rewrites.neuron_groups`: "layers[0]", and "layers[0]:2" for a second one. `["features"]` is
        the last hidden layer.

    Raises:
        TypeError: If the model has no representations, or does not accept such examples.
        ValueError: If it holds several stacked networks.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> {name: array.shape for name, array in representations(model, jnp.ones((5, 4))).items()}
        {'layers[0]': (5, 8), 'layers[1]': (5, 8), 'logits': (5, 3)}
    """
    # A registered function may close over what changes.
    function_of = representations_of_example.dispatch
    may_cache = function_of(type(model)) is function_of(object)
    return evaluated(_representations, model, to_device(inputs), call, may_cache=may_cache)


def _representations(model: Any, inputs: Array, call: Call | None) -> Layers:
    def layers(x: Array) -> Layers:
        if call is not None:
            return seen_by_weights(model, x, call)
        arrays = representations_of_example(model, x)
        return arrays if isinstance(arrays, Layers) else Layers(arrays)

    # A wrong example fails here with a clear message, and not within `vmap`.
    example = jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype)
    check_takes("model", layers, example)
    return jax.vmap(layers)(inputs)


@validated
def member_representations(models: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> Layers:
    """Return the `representations` [members, n, ...] of stacked members.

    All members get the same inputs [n, ...].

    Raises:
        TypeError: If the models have no representations, or do not accept such examples.
        ValueError: If the models are one network.
    """
    count(models)
    over_members = eqx.filter_vmap(representations, in_axes=(eqx.if_array(0), None))
    return over_members(models, to_device(inputs))
