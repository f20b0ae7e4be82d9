"""What a network computes on the way from input to output, under one naming for all models.

Hidden layers in forward order are "hidden0", "hidden1", ...; the last of them, which the output layer reads, is
"features"; what comes out is "logits".
"""

import functools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num

from dissociation.checks import check_takes, fail, fail_kind
from dissociation.models.program import MOVES, Walk, bound, program_of
from dissociation.validation import validated


def named(hidden: Sequence[Array], logits: Array) -> dict[str, Array]:
    """Hidden layers in forward order and the output, under the names that all models share."""
    names = [*(f"hidden{index}" for index in range(len(hidden) - 1)), *["features"] * bool(hidden)]
    return {**dict(zip(names, hidden, strict=True)), "logits": logits}


@functools.singledispatch
def representations_of_example(model: Any, x: Array) -> dict[str, Array]:
    """What a model makes of one example; what a type of models makes may be stated by `.register(type)` of this.

    Args:
        model: With a method `representations(x)`, as those of `dissociation.models`, or of a registered type, or any
            other as `weights.groups.neuron_groups` takes it: then hidden layers are what each of its weights is
            multiplied by (in a matrix product or a convolution, outside of loops), in forward order and each once; the
            inputs themselves are none.
        x: One example.

    Returns:
        Arrays by name, see `named`.

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
    marks = [*(_Mark("weights") for _ in leaves), _Mark("input")]
    ((logits, _),) = look.run(traced.jaxpr, traced.consts, [*leaves, x], marks)
    return named(look.found, logits)


class _Mark:
    """Where a value comes from: weights, input, or both; and whether it has been noted."""

    def __init__(self, kind: str):
        self.kind = kind
        self.noted = False


class _Look(Walk):
    """Notes what weights are multiplied by."""

    def __init__(self) -> None:
        self.found: list[Array] = []

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """The results of an operation, and where they come from."""
        name = equation.primitive.name
        if name in ("dot_general", "conv_general_dilated"):
            kinds = ["" if mark is None else mark.kind for mark in marks[:2]]
            if sorted(kinds) == ["both", "weights"]:
                side = kinds.index("both")
                self._note(values[side], marks[side], image=name != "dot_general")
        kinds = {mark.kind for mark in marks if mark is not None}
        mark = _Mark("both" if len(kinds) > 1 else kinds.pop()) if kinds else None
        moved = name in MOVES and marks[0] is not None
        return bound(equation, values), marks[0] if moved else mark

    def _note(self, value: Array, mark: _Mark, *, image: bool) -> None:
        if not mark.noted:
            self.found.append(value[0] if image and value.shape[0] == 1 else value)
        mark.noted = True


@representations_of_example.register
def _(model: eqx.nn.MLP, x: Array) -> dict[str, Array]:
    def activated(activation: Any, x: Array) -> Array:  # a function, or a module whose arrays have one row per neuron
        return eqx.filter_vmap(lambda one, value: one(value))(activation, x)

    layers = list(model.layers)
    if layers[0].weight.ndim != 2:
        fail("model", "be one network", f"weights of shape {layers[0].weight.shape}", "`members.member` picks one")
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
def representations(model: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> dict[str, Array]:
    """Everything that one network computes on the way, for many examples.

    Args:
        model: One network: of `dissociation.models`, an `eqx.nn.MLP`, or any other, see `representations_of_example`.
        inputs: Examples, [n, ...].

    Returns:
        By name, hidden layers in forward order: "hidden0", "hidden1", ..., "features" (the last hidden layer) and
        "logits", [n, ...] each.

    Raises:
        TypeError: If the model offers no representations, or does not take such examples.
        ValueError: If it is several stacked ones.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> {name: array.shape for name, array in representations(model, jnp.ones((5, 4))).items()}
        {'hidden0': (5, 8), 'features': (5, 8), 'logits': (5, 3)}
    """
    names: list[str] = []

    def values(x: Array) -> tuple[Array, ...]:
        by_name = representations_of_example(model, x)
        names[:] = by_name
        return tuple(by_name.values())

    inputs = jnp.asarray(inputs)
    check_takes("model", values, jax.ShapeDtypeStruct(inputs.shape[1:], inputs.dtype))
    arrays = jax.vmap(values)(inputs)  # as a dictionary they would come back in alphabetical order
    return dict(zip(names, arrays, strict=True))


@validated
def member_representations(models: Any, inputs: Num[Array | np.ndarray, "n ..."]) -> dict[str, Array]:
    """`representations` of stacked members, all on the same inputs.

    Args:
        models: Stacked networks, members first.
        inputs: Examples, [n, ...].

    Returns:
        By name, hidden layers in forward order: [members, n, ...] each.

    Raises:
        TypeError: If the models offer no representations, or do not take such examples.
    """
    names: list[str] = []

    def values(model: Any, inputs: Array) -> tuple[Array, ...]:
        by_name = representations(model, inputs)
        names[:] = by_name
        return tuple(by_name.values())

    arrays = eqx.filter_vmap(values, in_axes=(eqx.if_array(0), None))(models, jnp.asarray(inputs))
    return dict(zip(names, arrays, strict=True))
