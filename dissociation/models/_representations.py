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
from dissociation.models._program import MOVES, Call, Walk, bound, evaluated, numbered, program_of
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
        self.ranks = (
            {name: jnp.ndim(array) for name, array in self.items()}
            if ranks is None
            else dict(ranks)
        )

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
    """Return `name` if it is one of `layers`, the last hidden one for "features" of layers with logits, or raise."""
    known = list(dict.fromkeys(layers))
    hidden = [layer for layer in known if layer != "logits"] if "logits" in known else []
    if name in known:
        return name
    if name == "features" and hidden:
        return hidden[-1]
    fail(argument, f"be one of {', '.join(map(repr, known))}", repr(name))


def named(hidden: Mapping[str, Array], logits: Array) -> Layers:
    """Return hidden layers of one example, in forward order by the names of their weights, and its logits."""
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
    if not callable(model[0] if isinstance(model, tuple) and len(model) == 2 else model):
        fail_kind(
            "model",
            "be a function of one example, or such a one and its state",
            type(model).__name__,
        )
    return seen_by_weights(model, x)


def seen_by_weights(model: Any, x: Array, call: Call | None = None) -> dict[str, Array]:
    """Return the arrays that weights multiply, and the logits, by name."""
    _, layers, leaves, program = program_of(model, call)
    traced = jax.make_jaxpr(program)(leaves, x)
    if len(traced.out_avals) != 1:
        fail_kind("model", "return one array", f"{len(traced.out_avals)} arrays")
    look = _Look(layers)
    marks = [
        *(_Mark("weights", [], (0, leaf)) for leaf in range(len(leaves))),
        _Mark("input", [], (-1, 0)),
    ]
    ((logits, mark),) = look.run(traced.jaxpr, traced.consts, [*leaves, x], marks)
    axis = None if mark is None else mark.axis
    found = named(look.found, logits if axis is None else jnp.moveaxis(logits, axis, -1))
    # Measures must not guess an axis of features.
    if axis is None and logits.ndim > 1:
        del found.ranks["logits"]
    return found


class _Mark(NamedTuple):
    """Origin of a value ("weights", "input" or "both") and its axis of features."""

    # Values that differ only by order or shape of axes share the list `noted`, so that each is
    # noted once.
    kind: str
    noted: list[bool]
    # Number of products with weights up to it, one after another, and index of the first array in
    # the last of them.
    made: tuple[int, int]
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


class _Look(Walk):
    """Walk that records in `found` the arrays that weights multiply, given the layers of the weights."""

    def __init__(self, layers: list[str]):
        self.layers, self.found = layers, dict[str, Array]()

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        # Inside of it, a custom rule for derivatives would be lost.
        keeps = equation.primitive.name in ("custom_jvp_call", "custom_vjp_call")
        weights = any(mark is not None and mark.kind == "weights" for mark in marks)
        return super().enters(equation, marks) and (weights or not keeps)

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results and their mark."""
        name = equation.primitive.name
        side = None
        if name in ("dot_general", "conv_general_dilated"):
            kinds = ["" if mark is None else mark.kind for mark in marks[:2]]
            # The input itself is no hidden layer; products of two activations have no weights.
            if sorted(kinds) == ["both", "weights"]:
                side = kinds.index("both")
                if not marks[side].noted:
                    layer = numbered(self.layers[marks[side].made[1]], {"logits", *self.found})
                    self.found[layer] = _features_last(equation, values[side], side)
                    marks[side].noted.append(True)
            side = kinds.index("weights") if "weights" in kinds else None
        known = [mark for mark in marks if mark is not None]
        if not known:
            return bound(equation, values), None
        kinds, depth = {mark.kind for mark in known}, max(mark.made[0] for mark in known)
        makes = name in _MAKERS
        own = (
            [mark.made[1] for mark in known if mark.kind == "weights"]
            if makes and len(kinds) > 1
            else []
        )
        # In a loop the last weights make the result, in a product of attention and values the
        # values.
        pick = max if makes else min
        made = (
            depth + bool(own),
            pick(own or [mark.made[1] for mark in known if mark.made[0] == depth]),
        )
        noted = marks[0].noted if name in MOVES and marks[0] is not None else []
        kind = "both" if len(kinds) > 1 else kinds.pop()
        return bound(equation, values), _Mark(
            kind, noted, made, _axis_of_features(equation, marks, side)
        )


def _features_last(equation: Any, value: Array, side: int) -> Array:
    """Return one side of a product with its contracted axes as one, the last."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        summed = numbers[0][side]
        rest = [axis for axis in range(value.ndim) if axis not in summed]
        return value.transpose(*rest, *summed).reshape(*(value.shape[axis] for axis in rest), -1)
    batch, channels, *space = numbers.rhs_spec if side else numbers.lhs_spec
    value = value.transpose(batch, *space, channels)
    # The batch axis of a convolution is of one example.
    return value[0] if value.shape[0] == 1 else value


def _axis_of_features(equation: Any, marks: Sequence[Any], weights: int | None) -> int | None:
    """Return the axis of a result along which weights made features, if known."""
    name, params, out = equation.primitive.name, equation.params, equation.outvars[0].aval
    if name == "conv_general_dilated":
        return params["dimension_numbers"].out_spec[1]
    if name == "dot_general":
        if weights is None:
            return None
        summed, batch = (numbers[weights] for numbers in params["dimension_numbers"])
        free = equation.invars[weights].aval.ndim - len(summed) - len(batch)
        return None if free != 1 else out.ndim - 1 if weights else len(batch)
    known = [
        (mark.axis, atom.aval)
        for mark, atom in zip(marks, equation.invars, strict=True)
        if mark is not None
    ]
    known = [(axis, one) for axis, one in known if axis is not None]
    # A wrong axis fails silently in measures: an uncertain one is left out.
    if len({axis for axis, _ in known}) != 1 or name in ("gather", "scan", "while", "cond"):
        return None
    axis, one = known[0]
    dropped = (
        params.get("dimensions" if name == "squeeze" else "axes", ()) if out.ndim < one.ndim else ()
    )
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]
    if axis in dropped or out.ndim != one.ndim - len(dropped):
        return None
    place = axis - sum(other < axis for other in dropped)
    return place if out.shape[place] == one.shape[axis] else None


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
    may_cache = representations_of_example.dispatch(
        type(model)
    ) is representations_of_example.dispatch(object)
    return evaluated(_representations, model, to_device(inputs), call, may_cache=may_cache)


def _representations(model: Any, inputs: Array, call: Call | None) -> Layers:
    def layers(x: Array) -> Layers:
        found = (
            representations_of_example(model, x)
            if call is None
            else seen_by_weights(model, x, call)
        )
        return found if isinstance(found, Layers) else Layers(found)

    # A wrong example fails here with a clear message, and not within `vmap`.
    check_takes("model", layers, jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype))
    return jax.vmap(layers)(inputs)


@validated
def member_representations(models: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> Layers:
    """Return the `representations` [members, n, ...] of stacked members, all on the same inputs [n, ...].

    Raises:
        TypeError: If the models have no representations, or do not accept such examples.
        ValueError: If the models are one network.
    """
    count(models)
    return eqx.filter_vmap(representations, in_axes=(eqx.if_array(0), None))(
        models, to_device(inputs)
    )
