"""Hidden layers and logits of any network, by common names."""

import fnmatch
import functools
import types
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core.checks import check_takes, fail, fail_kind, is_traced
from dissociation._core.conversion import as_examples, describe
from dissociation._core.validation import validated
from dissociation.models._module_values import fail_unknown, with_marks
from dissociation.models._program import (
    Call,
    called,
    evaluated,
    path_text,
    program_of,
    separate_state,
)
from dissociation.models._recorder import READER, Mark, Record, Recorder, record_names
from dissociation.training._members import count


@jax.tree_util.register_pytree_with_keys_class
class Layers(dict[str, Array]):
    """Dictionary of representations by layer, with features (channels) on the last axis.

    `layers["features"]` is the last hidden layer, unless a layer has that name. `ranks` are numbers
    of axes of one example by name, without layers whose axis of features is unknown. `iterations`
    are the axes of iterations of layers within loops by name, counted from the end: (-2,) of
    [n, iterations, features].
    """

    def __init__(
        self,
        arrays: Any,
        ranks: Mapping[str, int] | None = None,
        iterations: Mapping[str, tuple[int, ...]] | None = None,
    ):
        super().__init__(arrays)
        # `vmap` adds axes of samples and members in front: their number does not follow from an
        # array.
        if ranks is None:
            ranks = {name: jnp.ndim(array) for name, array in self.items()}
        self.ranks = dict(ranks)
        self.iterations = dict(iterations or {})

    def unrolled(self) -> "Layers":
        """Return a layer for each iteration of a loop: "blocks.fc 0" and "blocks.fc 1".

        `np.savez("network.npz", **layers.unrolled())` writes a file for the command `compare`.
        """
        arrays = {}
        ranks = {}
        for name, array in self.items():
            axes = self.iterations.get(name, ())
            if axes and not is_traced(array):
                # Slices of JAX's arrays would compile a program each.
                array = np.asarray(array)
            trailing = (slice(None),) * (-1 - max(axes, default=-1))
            sizes = [array.shape[axis] for axis in axes]
            for index in np.ndindex(*sizes):
                layer = " ".join([name, *map(str, index)])
                arrays[layer] = array[(..., *index, *trailing)] if axes else array
                if name in self.ranks:
                    ranks[layer] = self.ranks[name] - len(axes)
        return Layers(arrays, ranks)

    def __missing__(self, name: str) -> Array:
        try:
            return self[layer_named("layer", name, self)]
        except ValueError as error:
            raise KeyError(str(error)) from None

    def tree_flatten_with_keys(self) -> Any:
        """Return arrays with their names, in the order of layers, and static data."""
        keyed = [(jax.tree_util.DictKey(name), array) for name, array in self.items()]
        static = (tuple(self), tuple(self.ranks.items()), tuple(self.iterations.items()))
        return keyed, static

    @classmethod
    def tree_unflatten(cls, static: Any, arrays: Any) -> "Layers":
        """Return the dictionary from `static` and `arrays`."""
        names, ranks, iterations = static
        return cls(zip(names, arrays, strict=True), dict(ranks), dict(iterations))


def layer_named(argument: str, name: str, layers: Iterable[str]) -> str:
    """Return `name` if it is one of `layers`, or the last hidden layer for "features".

    Raises:
        ValueError: If `name` is neither, or "features" of layers without logits.
    """
    names = list(dict.fromkeys(layers))
    if name in names:
        return name
    hidden = [layer for layer in names if layer != "logits" and "()" not in layer]
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
def representations_of_example(model: Any, x: Any) -> dict[str, Array]:
    """Return the representations of one example; `.register(type)` adds types of models.

    Args:
        model: A model with a method `representations(x)`, or of a registered type: both return
            arrays with features (channels) last. Hidden layers of any other model are the arrays
            that weights multiply in matrix products and convolutions, each array once, without the
            model's input, contracted axes last. Those in a `scan` have axes of iterations in front.
            The result of a loop is named after the last weights in it.
        x: One example: an array, or a dictionary or tuple of arrays.

    Raises:
        TypeError: If the model cannot be called, or does not return arrays.
    """
    if callable(getattr(model, "representations", None)):
        return model.representations(x)
    module, _ = separate_state(model)
    if not callable(module):
        requirement = "be a function of one example, or such a one and its state"
        fail_kind("model", requirement, type(model).__name__)
    return layers_of(model, x)


At = str | Sequence[str] | Callable[[str, tuple[int, ...]], Any] | None
"""Patterns of names, or a function of a name and a shape."""


def layers_of(model: Any, x: Any, call: Call | None = None, at: At = None) -> Layers:
    """Return layers and outputs of one example by name.

    Without `at`, these are the arrays that weights multiply, and the outputs. Otherwise values that
    modules return are among them, and representations that the model names.
    """
    has_names = at is not None and call is None and _names_layers(model)
    function = call or called
    if has_names:
        function = representations_of_example
    if at is not None:
        model, _ = with_marks(model, READER)
    outputs = Layers({})

    def apply(model: Any, example: Any) -> Any:
        nonlocal outputs
        outputs = _named_outputs(function(model, example), has_names=has_names)
        return outputs

    _, weight_layers, leaves, run = program_of(model, apply)
    traced = jax.make_jaxpr(run)(leaves, x)
    inputs = jax.tree.leaves(x)
    marks = [Mark("weights", [], 0, leaf) for leaf in range(len(leaves))]
    marks += [Mark("input", [], -1, 0) for _ in inputs]
    recorder = Recorder(weight_layers)
    pairs = recorder.run(traced.jaxpr, traced.consts, [*leaves, *inputs], marks)

    layers = Layers({}, outputs.ranks, outputs.iterations)
    names = record_names(recorder.records, outputs)
    for name, record in zip(names, recorder.records, strict=True):
        if not (has_names and record.is_activity):
            _add_record(layers, name, record)
    results = [value for value, _ in pairs]
    if at is not None:
        # Recorded values change how XLA fuses operations, and with it the last bits of outputs.
        results = run(leaves, jax.lax.optimization_barrier(x))
    for name, value, (_, mark) in zip(outputs, results, pairs, strict=True):
        axis = None if mark is None else mark.axis
        if axis is not None and not has_names:
            value = jnp.moveaxis(value, axis, -1)
            layers.ranks[name] = value.ndim
        layers[name] = value
    if at is None:
        return layers
    selected = names_at(at, layers)
    ranks = {name: layers.ranks[name] for name in selected if name in layers.ranks}
    return Layers({name: layers[name] for name in selected}, ranks, layers.iterations)


def _add_record(layers: Layers, name: str, record: Record) -> None:
    """Add a record to the layers."""
    layers[name] = record.value
    rank = record.value.ndim
    if record.has_features:
        layers.ranks[name] = rank
    if record.num_loops:
        layers.iterations[name] = tuple(range(-rank, record.num_loops - rank))


def _names_layers(model: Any) -> bool:
    """Return True if a model names its representations, by a method or a registered function."""
    has_method = callable(getattr(model, "representations", None))
    return has_method or _is_registered(model)


def _is_registered(model: Any) -> bool:
    dispatch = representations_of_example.dispatch
    return dispatch(type(model)) is not dispatch(object)


def _named_outputs(outputs: Any, *, has_names: bool = False) -> Layers:
    """Return output arrays: "logits", or several as "outputs.pooled" and "outputs[0]".

    If the model names its layers, return them.
    """
    if has_names:
        return outputs if isinstance(outputs, Layers) else Layers(outputs)

    # The state of a model is no output.
    def is_state(node: Any) -> bool:
        return isinstance(node, eqx.nn.State)

    pairs, _ = jax.tree_util.tree_flatten_with_path(outputs, is_leaf=is_state)
    arrays = {}
    for path, leaf in pairs:
        if eqx.is_array(leaf):
            arrays[f"outputs{path_text(path)}"] = leaf
    if not arrays:
        fail_kind("model", "return arrays", describe(outputs))
    if len(arrays) == 1:
        arrays = {"logits": next(iter(arrays.values()))}
    # Measures must not guess an axis of features.
    ranks = {name: array.ndim for name, array in arrays.items() if array.ndim < 2}
    return Layers(arrays, ranks)


def names_at(at: At, layers: Mapping[str, Any]) -> list[str]:
    """Return the names of `layers` that `at` selects, in their order."""
    if callable(at):
        selected = [name for name, array in layers.items() if at(name, array.shape)]
        if not selected:
            fail("at", "be True for at least one layer", "none of them")
        return selected
    patterns = [at] if isinstance(at, str) else list(at or ())
    if not patterns:
        fail("at", "hold at least one pattern", "none")
    selected = set()
    for pattern in patterns:
        # Brackets are parts of names.
        escaped = pattern.replace("[", "[[]")
        matches = [name for name in layers if fnmatch.fnmatchcase(name, escaped)]
        if not matches and pattern == "features":
            matches = [layer_named("at", pattern, layers)]
        if not matches:
            fail_unknown("at", pattern, layers)
        selected.update(matches)
    return [name for name in layers if name in selected]


@validated
def representations(model: Any, inputs: Any, at: At = None, *, call: Call | None = None) -> Layers:
    """Return hidden layers and outputs of one network for many examples.

    Args:
        model: One network: of `dissociation.models`, or any other, see
            `representations_of_example`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        at: Layers: names or patterns, in which only * and ? are special, or a function from name
            and shape of one example to a boolean. By default hidden layers and outputs. `at` also
            finds values that modules of an Equinox model return: "blocks[3].attn()", and "norm():2"
            for a second call, or "cell()[0]" for one of several arrays. `layer_shapes` lists all.
        call: Function from model and example to outputs, as in `rewrites.neuron_groups`.

    Returns:
        Arrays [n, ...] by name: hidden layers in forward order, then "logits", or several outputs,
        "outputs.pooled" or "outputs[0]". Channels are last for every model, except in values of
        modules, which are as returned, with axes of an inner `vmap` in front. A hidden layer is
        named after the weights that made it, as in `rewrites.neuron_groups`: "layers[0]", and
        "layers[0]:2" for a second one. Layers within a `scan` have shape [n, iterations, ...].
        `["features"]` is the last hidden layer.

    Raises:
        TypeError: If the model has no representations, or does not accept such examples.
        ValueError: If it holds several stacked networks, or `at` finds nothing.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> {name: array.shape for name, array in representations(model, jnp.ones((5, 4))).items()}
        {'layers[0]': (5, 8), 'layers[1]': (5, 8), 'logits': (5, 3)}
        >>> representations(model, jnp.ones((5, 4)), "layers[?]()")["layers[2]()"].shape
        (5, 3)
    """
    inputs = as_examples("inputs", inputs)
    if callable(at):
        example = jax.tree.map(lambda array: array[0], inputs)
        at = tuple(names_at(at, layer_shapes(model, example, call=call)))
    elif at is not None and not isinstance(at, str):
        at = tuple(at)
    # Registered functions and closures may refer to what changes.
    may_cache = not _is_registered(model) and _is_constant(call)
    return evaluated(_representations, model, inputs, at, call, may_cache=may_cache)


def _is_constant(call: Call | None) -> bool:
    """Return True unless a function closes over values, which may change."""
    is_method = isinstance(call, types.MethodType)
    return is_method or getattr(call, "__closure__", None) is None


def _representations(model: Any, inputs: Any, at: At, call: Call | None) -> Layers:
    layers = functools.partial(_layers_of_example, model, at, call)
    # A wrong example fails here with a clear message, and not within `vmap`.
    example = jax.tree.map(lambda array: array[0], inputs)
    check_takes("model", layers, example)
    return jax.vmap(layers)(inputs)


def _layers_of_example(model: Any, at: At, call: Call | None, x: Any) -> Layers:
    if call is not None or at is not None:
        return layers_of(model, x, call, at)
    return _named_outputs(representations_of_example(model, x), has_names=True)


@validated
def member_representations(
    models: Any, inputs: Any, at: At = None, *, call: Call | None = None
) -> Layers:
    """Return the `representations` [members, n, ...] of stacked members.

    All members get the same inputs [n, ...].

    Raises:
        TypeError: If the models have no representations, or do not accept such examples.
        ValueError: If the models are one network, or `at` finds nothing.
    """
    count(models)
    inputs = as_examples("inputs", inputs)
    of_member = functools.partial(representations, at=at, call=call)
    over_members = eqx.filter_vmap(of_member, in_axes=(eqx.if_array(0), None))
    return over_members(models, inputs)


class LayerShapes(dict[str, jax.ShapeDtypeStruct]):
    """Shapes and dtypes of the layers of one example by name, printed as a table."""

    def __repr__(self) -> str:
        width = max(map(len, self), default=0)
        shapes = [str(struct.shape) for struct in self.values()]
        shape_width = max(map(len, shapes), default=0)
        lines = [f"{'layer':<{width}}  {'shape':<{shape_width}}  {'dtype':<8}  bytes per example"]
        for (name, struct), shape in zip(self.items(), shapes, strict=True):
            num_bytes = struct.size * struct.dtype.itemsize
            cells = f"{name:<{width}}  {shape:<{shape_width}}  {struct.dtype!s:<8}"
            lines.append(f"{cells}  {num_bytes:>17,}")
        return "\n".join(lines)


@validated
def layer_shapes(model: Any, example: Any, *, call: Call | None = None) -> LayerShapes:
    """Return shapes and dtypes of all layers that `representations` finds, without computing them.

    Args:
        model: See `representations`.
        example: One example: an array or `jax.ShapeDtypeStruct`, or a dictionary or tuple of them.
        call: See `representations`.

    Returns:
        A dictionary by name in the order of the program, which prints as a table with bytes.

    Raises:
        TypeError: If the model has no representations, or does not accept such an example.

    Example:
        >>> layer_shapes(eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0)), jnp.ones(4))
        layer        shape  dtype    bytes per example
        layers[0]()  (8,)   float32                 32
        layers[0]    (8,)   float32                 32
        layers[1]()  (3,)   float32                 12
        logits       (3,)   float32                 12
    """
    layers = functools.partial(_layers_of_example, model, ("*",), call)
    return LayerShapes(check_takes("model", layers, example))
