"""Read a network's hidden layers and logits, under one naming for all models.

Hidden layers in forward order are "hidden0", "hidden1", ...; the last of them, which the output layer reads, is
"features"; the output is "logits".
"""

import functools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Num

from dissociation._core.checks import check_takes, fail, fail_kind
from dissociation._core.validation import validated
from dissociation.models._program import MOVES, Walk, bound, program_of
from dissociation.training._members import count


@jax.tree_util.register_pytree_with_keys_class
class Layers(dict[str, Array]):
    """A dictionary of representations by layer, which states what their axes are. Features (channels) are the last one.

    Samples and members of an ensemble come before the axes of one example, as `vmap` adds them. By name, `ranks` are
    the numbers of axes of one example; a layer whose axis of features is unknown is not among them.
    """

    def __init__(self, arrays: Any, ranks: Mapping[str, int]):
        super().__init__(arrays)
        self.ranks = dict(ranks)

    def tree_flatten_with_keys(self) -> Any:
        """Return arrays with their names, in the order of the layers, and what is static."""
        keyed = [(jax.tree_util.DictKey(name), array) for name, array in self.items()]
        return keyed, (tuple(self), tuple(self.ranks.items()))

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Layers":
        """Return the dictionary of these arrays."""
        names, ranks = static
        return cls(zip(names, arrays, strict=True), dict(ranks))


def named(hidden: Sequence[Array], logits: Array) -> Layers:
    """Hidden layers of one example in forward order and the output, under the names that all models share."""
    names = [*(f"hidden{index}" for index in range(len(hidden) - 1)), *["features"] * bool(hidden), "logits"]
    arrays = dict(zip(names, [*hidden, logits], strict=True))
    return Layers(arrays, {name: jnp.ndim(array) for name, array in arrays.items()})


class Network(eqx.Module):
    """A network of one example, whose output is the last of its representations."""

    @abstractmethod
    def representations(self, x: Any) -> dict[str, Array]:
        """Everything that is computed on the way, by name, see `named`."""

    def __call__(self, x: Float[Array | np.ndarray, "..."]) -> Float[Array, " classes"]:
        """Logits of one example."""
        return self.representations(x)["logits"]


@functools.singledispatch
def representations_of_example(model: Any, x: Array) -> dict[str, Array]:
    """What a model makes of one example; what a type of models makes may be stated by `.register(type)` of this.

    Args:
        model: With a method `representations(x)`, as those of `dissociation.models`, or of a registered type: both
            return arrays whose last axis are features (channels). Or any other as `rewrites.neuron_groups` takes
            it: then hidden layers are what each of its weights is multiplied by (in a matrix product or a convolution,
            outside of loops), in forward order and each once, with the axis that the weights sum over moved to the end;
            the inputs themselves are none. The output's channels are moved to the end as well.
        x: One example.

    Raises:
        TypeError: If the model cannot be called, or returns anything but one array.
    """
    if callable(getattr(model, "representations", None)):
        return model.representations(x)
    if not callable(model[0] if isinstance(model, tuple) and len(model) == 2 else model):
        fail_kind("model", "be a function of one example, or such a one and its state", type(model).__name__)
    return seen_by_weights(model, x)


def seen_by_weights(model: Any, x: Array) -> dict[str, Array]:
    """What the weights of any model are multiplied by for one example; see `representations_of_example`."""
    _, leaves, program = program_of(model, None)
    traced = jax.make_jaxpr(program)(leaves, x)
    if len(traced.out_avals) != 1:
        fail_kind("model", "return one array", f"{len(traced.out_avals)} arrays")
    look = _Look()
    marks = [*(_Mark("weights", []) for _ in leaves), _Mark("input", [])]
    ((logits, mark),) = look.run(traced.jaxpr, traced.consts, [*leaves, x], marks)
    axis = None if mark is None else mark.axis
    found = named(look.found, logits if axis is None else jnp.moveaxis(logits, axis, -1))
    if axis is None and logits.ndim > 1:
        del found.ranks["logits"]
    return found


class _Mark(NamedTuple):
    """Where a value comes from ("weights", "input" or "both"), whether it has been noted, and its axis of features.

    Values that differ by the order or shape of their axes alone share the list `noted`, which is filled once.
    """

    kind: str
    noted: list[bool]
    axis: int | None = None


class _Look(Walk):
    """Notes what weights are multiplied by."""

    def __init__(self) -> None:
        self.found: list[Array] = []

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """The results of an operation, and where they come from."""
        name = equation.primitive.name
        side = None
        if name in ("dot_general", "conv_general_dilated"):
            kinds = ["" if mark is None else mark.kind for mark in marks[:2]]
            if sorted(kinds) == ["both", "weights"]:
                side = kinds.index("both")
                if not marks[side].noted:
                    self.found.append(_features_last(equation, values[side], side))
                    marks[side].noted.append(True)
            side = kinds.index("weights") if "weights" in kinds else None
        kinds = {mark.kind for mark in marks if mark is not None}
        axis = _axis_of_features(equation, marks, side)
        noted = marks[0].noted if name in MOVES and marks[0] is not None else []
        mark = _Mark("both" if len(kinds) > 1 else kinds.pop(), noted, axis) if kinds else None
        return bound(equation, values), mark


def _features_last(equation: Any, value: Array, side: int) -> Array:
    """One side of a product, with the axes that are summed over as one, the last."""
    numbers = equation.params["dimension_numbers"]
    if equation.primitive.name == "dot_general":
        summed = numbers[0][side]
        rest = [axis for axis in range(value.ndim) if axis not in summed]
        return value.transpose(*rest, *summed).reshape(*(value.shape[axis] for axis in rest), -1)
    batch, channels, *space = numbers.rhs_spec if side else numbers.lhs_spec
    value = value.transpose(batch, *space, channels)
    return value[0] if value.shape[0] == 1 else value


def _axis_of_features(equation: Any, marks: Sequence[Any], weights: int | None) -> int | None:
    """The axis of what is returned along which weights made features, if it is known."""
    name, params, out = equation.primitive.name, equation.params, equation.outvars[0].aval
    if name == "conv_general_dilated":
        return params["dimension_numbers"].out_spec[1]
    if name == "dot_general":
        if weights is None:
            return None
        summed, batch = (numbers[weights] for numbers in params["dimension_numbers"])
        free = equation.invars[weights].aval.ndim - len(summed) - len(batch)
        return None if free != 1 else out.ndim - 1 if weights else len(batch)
    known = [(mark.axis, atom.aval) for mark, atom in zip(marks, equation.invars, strict=True) if mark is not None]
    known = [(axis, one) for axis, one in known if axis is not None]
    if len({axis for axis, _ in known}) != 1 or name in ("gather", "scan", "while", "cond"):
        return None
    axis, one = known[0]
    dropped = params.get("dimensions" if name == "squeeze" else "axes", ()) if out.ndim < one.ndim else ()
    if name == "transpose":
        return params["permutation"].index(axis)
    if name == "broadcast_in_dim":
        return params["broadcast_dimensions"][axis]
    if axis in dropped or out.ndim != one.ndim - len(dropped):
        return None
    place = axis - sum(other < axis for other in dropped)
    return place if out.shape[place] == one.shape[axis] else None


@representations_of_example.register
def _(model: eqx.nn.MLP, x: Array) -> dict[str, Array]:
    def activated(activation: Any, x: Array) -> Array:  # a function, or a module whose arrays have one row per neuron
        return eqx.filter_vmap(lambda one, value: one(value))(activation, x)

    layers = list(model.layers)
    if layers[0].weight.ndim != 2:
        fail("model", "be one network", f"weights of shape {layers[0].weight.shape}", "`member` picks one")
    if getattr(model, "scan", False) and model.depth > 0:
        first, stacked, last = layers
        layers = [first, *(jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(model.depth - 1)), last]
    hidden = []
    for index, layer in enumerate(layers[:-1]):
        activation = jax.tree.map(lambda leaf, i=index: leaf[i] if eqx.is_array(leaf) else leaf, model.activation)
        x = activated(activation, layer(x))
        hidden.append(x)
    x = layers[-1](x)
    if hidden:  # without hidden layers Equinox applies no activation at all
        x = model.final_activation(x) if model.out_size == "scalar" else activated(model.final_activation, x)
    return named(hidden, x)


@validated
def representations(model: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> Layers:
    """Everything that one network computes on the way, for many examples.

    Args:
        model: One network: of `dissociation.models`, an `eqx.nn.MLP`, or any other, see `representations_of_example`.
        inputs: Examples, [n, ...].

    Returns:
        By name, hidden layers in forward order: "hidden0", "hidden1", ..., "features" (the last hidden layer) and
        "logits": [n, ...] each, channels last, also of models that have them first.

    Raises:
        TypeError: If the model offers no representations, or does not take such examples.
        ValueError: If it is several stacked ones.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> {name: array.shape for name, array in representations(model, jnp.ones((5, 4))).items()}
        {'hidden0': (5, 8), 'features': (5, 8), 'logits': (5, 3)}
    """

    def layers(x: Array) -> Layers:
        found = representations_of_example(model, x)
        ranks = {name: jnp.ndim(array) for name, array in found.items()}
        return found if isinstance(found, Layers) else Layers(found, ranks)

    inputs = jnp.asarray(inputs)
    check_takes("model", layers, jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype))
    return jax.vmap(layers)(inputs)


@validated
def member_representations(models: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> Layers:
    """Return the `representations` [members, n, ...] of stacked members, all on the same inputs [n, ...].

    Raises:
        TypeError: If the models offer no representations, or do not take such examples.
        ValueError: If the models are one network.
    """
    count(models)
    return eqx.filter_vmap(representations, in_axes=(eqx.if_array(0), None))(models, jnp.asarray(inputs))
