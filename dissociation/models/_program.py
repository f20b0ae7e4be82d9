"""Models as functions of their arrays, and walks through their operations."""

import functools
import itertools
import reprlib
from abc import abstractmethod
from collections.abc import Callable, Container, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core._compat import jex, parameters
from dissociation._core.checks import fail, fail_kind
from dissociation._core.conversion import describe
from dissociation._core.types import parameter_mask
from dissociation.models._function import FunctionModel

Call = Callable[[Any, Any], Any]
"""Function from a model and an example to outputs."""

MOVES = (
    "transpose",
    "reshape",
    "convert_element_type",
    "stop_gradient",
    "copy",
    "squeeze",
    "broadcast_in_dim",
)
"""Operations that move or convert weights without computing with them."""


class _Single(eqx.nn.Linear):
    """Linear layer that raises for stacked weights of several networks."""

    def __call__(self, x: Any, *, key: Any = None) -> Any:
        if self.weight.ndim != 2:
            stacked = f"weights of shape {self.weight.shape} are those of stacked networks"
            raise TypeError(f"{stacked}; `member` picks one")
        return super().__call__(x, key=key)


def _is_stacked(node: Any) -> bool:
    # Equinox's layer multiplies stacked weights without an error.
    return type(node) is eqx.nn.Linear and np.ndim(node.weight) > 2


def single(node: Any) -> Any:
    """Return `node`, or a copy of a linear layer of stacked weights that raises when called."""
    return with_class(node, _Single) if _is_stacked(node) else node


def with_class(module: Any, cls: type) -> Any:
    """Return a module as an instance of a subclass of its class."""
    # Modules are frozen and their constructors draw weights: the fields are copied instead.
    copy = object.__new__(cls)
    vars(copy).update(vars(module))
    return copy


def separate_state(model: Any) -> tuple[Any, list[Any]]:
    """Return a model and a list of its states, which is empty unless `model` has a state."""
    if isinstance(model, tuple) and len(model) == 2:
        return model[0], [model[1]]
    return model, []


def called(model: Any, example: Any) -> Any:
    """Return the outputs of a model, or of a pair (model, state), in inference mode."""
    module, states = separate_state(model)

    module = jax.tree.map(single, module, is_leaf=_is_stacked)
    function: Any = module
    if isinstance(module, eqx.Module):
        function = eqx.nn.inference_mode(module)
    if not states:
        return function(example)
    # A copy, as a state that was set cannot be used again.
    state = jax.tree.map(lambda leaf: leaf, states[0])
    return function(example, state)[0]


def function_of(name: str, model: Any) -> Callable[[Any], Any]:
    """Return `called` as a function of one example; raise `TypeError` without a callable model."""
    module, _ = separate_state(model)
    if not callable(module):
        advice = "Weights alone need `call=`; a model with state is a pair (model, state)"
        fail_kind(name, "be a function", describe(model), advice)
    return functools.partial(called, model)


def parameters_in(model: Any, where: Any = None) -> Any:
    """Return the parameters of a model, and None for its other leaves.

    `where` selects some of the parameters, as in `eqx.tree_at`.
    """
    mask = parameter_mask(model)
    if where is not None:
        empty_mask = jax.tree.map(lambda _: False, mask)
        mask = eqx.tree_at(where, empty_mask, replace=where(mask))
    return eqx.filter(model, mask)


def with_draws(model: Any, noise: Any) -> Any:
    """Return `noise` with zeros for parameters where it is None.

    Raises:
        ValueError: If shapes do not fit.
    """

    def is_none(leaf):
        return leaf is None

    parameters = parameters_in(model)
    weights, _ = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_none)
    draws, _ = jax.tree_util.tree_flatten_with_path(noise, is_leaf=is_none)
    pairs = itertools.zip_longest(weights, draws, fillvalue=((), None))
    fits = True
    for (weight_path, weight), (draw_path, draw) in pairs:
        if draw is not None:
            fits = fits and weight is not None and np.shape(draw) == weight.shape
        fits = fits and weight_path == draw_path
    if not fits:
        shapes = [np.shape(leaf) for leaf in jax.tree.leaves(noise)]
        fail(
            "noise",
            "be shaped like the parameters of `model`",
            f"arrays of shapes {reprlib.repr(shapes)}",
        )

    def fill(weight, draw):
        return jnp.zeros_like(weight) if draw is None and weight is not None else draw

    return jax.tree.map(fill, parameters, noise, is_leaf=is_none)


class Program(NamedTuple):
    """A model as a function of its arrays.

    Attributes:
        paths: Paths of its floating-point arrays.
        layers: Names of the layers that hold them.
        leaves: These arrays.
        run: Function from such arrays and an example to output arrays.
    """

    paths: list[str]
    layers: list[str]
    leaves: list[Any]
    run: Callable[[list[Any], Any], list[Any]]


def program_of(model: Any, call: Call | None) -> Program:
    """Return a model as a function of its arrays, evaluated by `call`, default `called`."""
    arrays, constants = eqx.partition(model, eqx.is_inexact_array)
    leaf_pairs, tree = jax.tree_util.tree_flatten_with_path(arrays)
    paths = [jax.tree_util.keystr(path) for path, _ in leaf_pairs]
    leaves = [leaf for _, leaf in leaf_pairs]

    apply = called if call is None else call
    run = functools.partial(_run, apply, tree, constants)
    layers, _ = layers_of_arrays(model)
    return Program(paths, layers, leaves, run)


class Wrapper(eqx.Module):
    """Base of models around a model, whose layers keep their names.

    Attributes:
        model: Model, or pair (model, state).
    """

    model: Any


def num_wrappers(model: Any) -> int:
    """Return the number of keys in front of each path that names leave out."""
    # Names are the same with and without a state.
    if isinstance(model, Wrapper):
        return 1 + num_wrappers(model.model)
    has_state = isinstance(model, tuple) and isinstance(model[-1], eqx.nn.State)
    return int(has_state or isinstance(model, FunctionModel))


def layers_of_arrays(model: Any) -> tuple[list[str], tuple[Any, ...]]:
    """Return the layers of a model's floating-point arrays, and keys that their names leave out."""
    arrays = eqx.filter(model, eqx.is_inexact_array)
    leaf_pairs, _ = jax.tree_util.tree_flatten_with_path(arrays)
    num_skipped = num_wrappers(model)
    keys = []
    rank_of_matrix = {}
    for path, leaf in leaf_pairs:
        # Flax wraps each array in an object with the attribute `value`.
        is_wrapped = path and str(path[-1]) == ".value"
        path = path[num_skipped:]
        if is_wrapped:
            name = getattr(path[-2], "name", None)
            last = path[-2] if name is None else jax.tree_util.DictKey(name)
            path = (*path[:-2], last)
        keys.append(path)
        if np.size(leaf) > max(np.shape(leaf), default=1):
            rank_of_matrix[path] = np.ndim(leaf)

    # Biases of several heads or of stacked layers have fewer axes than the weights beside them.
    largest_ranks: dict[tuple[Any, ...], int] = {}
    for path, rank in rank_of_matrix.items():
        largest_ranks[path[:-1]] = max(rank, largest_ranks.get(path[:-1], 0))
    matrices = {path for path, rank in rank_of_matrix.items() if rank == largest_ranks[path[:-1]]}
    return _layers_of(keys, matrices)


def _layers_of(
    paths: list[tuple[Any, ...]], matrices: set[tuple[Any, ...]]
) -> tuple[list[str], tuple[Any, ...]]:
    """Return the name of the layer of each path, and the keys that names leave out.

    "layers[0]" is the name of ".layers[0].weight".

    The last key of a dictionary is left out if the dictionary holds one matrix: "Dense_0" of
    "Dense_0", "kernel". Front keys up to the last one of a dictionary that all matrices share are
    left out, too.
    """
    containers = [path[:-1] for path in matrices]

    def layer_path(path: tuple[Any, ...]) -> tuple[Any, ...]:
        if len(path) < 2:
            return path
        container = path[:-1]
        last = path[-1]
        if isinstance(last, jax.tree_util.GetAttrKey):
            is_array_name = last.name.startswith(("weight", "bias"))
        else:
            is_item = isinstance(last, jax.tree_util.DictKey)
            is_array_name = is_item and containers.count(container) < 2
        return container if is_array_name else path

    layers = [layer_path(path) for path in paths]
    matrix_layers = [layer_path(path) for path in matrices] or layers
    shared = []
    for keys in zip(*(path[:-1] for path in matrix_layers), strict=False):
        if len(set(map(str, keys))) > 1:
            break
        shared.append(keys[0])

    num_front = 0
    for position, key in enumerate(shared):
        if isinstance(key, jax.tree_util.DictKey | jax.tree_util.FlattenedIndexKey):
            num_front = position + 1
    front = tuple(shared[:num_front])

    return [path_name(path, front) for path in layers], front


def path_name(path: tuple[Any, ...], front: tuple[Any, ...] = ()) -> str:
    """Return a path without `front` as text, such as "blocks[0].norm"."""
    num_front = len(front)
    if path[:num_front] == front:
        path = path[num_front:]
    return path_text(path).lstrip(".")


def path_text(path: tuple[Any, ...]) -> str:
    """Return a path as text, such as ".blocks[0].norm"."""
    return "".join(map(_key_text, path))


def _key_text(key: Any) -> str:
    """Return a key of a path as text: ".name" or "[index]"."""
    if isinstance(key, jax.tree_util.DictKey):
        return f".{key.key}"
    if isinstance(key, jax.tree_util.FlattenedIndexKey):
        return f"[{key.key}]"
    return str(key)


def numbered(name: str, taken: Container[str], suffix: str = "") -> str:
    """Return `name`, or the first of "name:2", "name:3", ... that is not in `taken`.

    `suffix` follows the number.
    """
    unique_name = name + suffix
    number = 1
    while unique_name in taken:
        number += 1
        unique_name = f"{name}:{number}{suffix}"
    return unique_name


def _run(apply: Call, tree: Any, constants: Any, leaves: list[Any], example: Any) -> list[Any]:
    """Return the output arrays of the model with arrays `leaves`."""
    model = eqx.combine(jax.tree.unflatten(tree, leaves), constants)
    outputs = apply(model, example)
    return jax.tree.leaves(eqx.filter(outputs, eqx.is_array))


def evaluated(function: Callable[..., Any], model: Any, *arguments: Any, may_cache: bool) -> Any:
    """Return `function(model, *arguments)`, computed by one program.

    Programs are cached by the structure of `model`, if `may_cache` is True and the model is a
    PyTree.
    """
    if may_cache and _has_structure(model):
        return _evaluated(function, model, *arguments)
    # What a function closes over may change, but not the function's identity: its program is
    # compiled anew.
    closed = eqx.filter_closure_convert(functools.partial(function, model), *arguments)
    return eqx.filter_jit(lambda *inputs: closed(*inputs))(*arguments)


@eqx.filter_jit
def _evaluated(function: Callable[..., Any], model: Any, *arguments: Any) -> Any:
    return function(model, *arguments)


def _has_structure(model: Any) -> bool:
    """Return True if a program may be cached by the structure of `model`.

    The model must be a PyTree of JAX arrays and constants.
    """
    module = model[0] if isinstance(model, tuple) and model else model
    structure = jax.tree.structure(module)
    if jax.tree_util.treedef_is_leaf(structure):
        return False
    # Integers of NumPy set shapes, which a program must not trace; they have no hash.
    constants = eqx.filter(model, lambda leaf: isinstance(leaf, jax.Array), inverse=True)
    try:
        hash((jax.tree.structure(model), *jax.tree.leaves(constants)))
    except TypeError:
        return False
    return True


def inner_program(params: dict[str, Any]) -> Any:
    """Return the closed jaxpr in an operation's `params`, or None."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = params.get(name)
        if isinstance(inner, jex.ClosedJaxpr):
            return inner
        if isinstance(inner, jex.Jaxpr) and not inner.constvars:
            return jex.ClosedJaxpr(inner, ())
    return None


class Walk:
    """Walk through a program and the programs it calls, with a mark for every value."""

    @abstractmethod
    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results and their mark, or a list of marks."""

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        # A loop runs its program many times, so a value in it has no single mark.
        return equation.primitive.name not in ("scan", "while", "cond")

    def run(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], marks: Sequence[Any]
    ) -> list[Any]:
        """Return a pair (value, mark) for every output; constants have mark None."""
        env = {v: (value, None) for v, value in zip(jaxpr.constvars, consts, strict=True)}
        env |= {v: pair for v, *pair in zip(jaxpr.invars, args, marks, strict=True)}

        def read(atom: Any) -> Any:
            if isinstance(atom, jex.Literal):
                return (atom.val, None)
            return env[atom]

        for equation in jaxpr.eqns:
            pairs = [read(atom) for atom in equation.invars]
            values = [value for value, _ in pairs]
            input_marks = [mark for _, mark in pairs]

            inner = inner_program(equation.params)
            fits = inner is not None and len(inner.jaxpr.invars) == len(values)
            if inner is not None and fits and self.enters(equation, input_marks):
                outputs = self.run(inner.jaxpr, inner.consts, values, input_marks)
            else:
                results, mark = self.at(equation, values, input_marks)
                marks_of_results = mark if isinstance(mark, list) else [mark] * len(results)
                outputs = list(zip(results, marks_of_results, strict=True))
            env |= dict(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def run_loop(
    equation: Any, values: Sequence[Any], body: Callable[[list[Any], Array], tuple[list[Any], Any]]
) -> tuple[list[Any], Any]:
    """Run a `scan` with another body, from operands and the iteration to results and more arrays.

    Return the results of the loop, and the other arrays of all iterations, stacked.
    """
    params = parameters(equation)
    num_consts = params["num_consts"]
    num_carry = params["num_carry"]
    num_fixed = num_consts + num_carry
    consts = values[:num_consts]

    def step(carry: list[Any], slices: Any) -> Any:
        iteration, inputs = slices
        results, extra = body([*consts, *carry, *inputs], iteration)
        return results[:num_carry], (results[num_carry:], extra)

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    iterations = jnp.arange(params["length"])
    stacked_inputs = (iterations, list(values[num_fixed:]))
    carry, (stacked, extra) = jax.lax.scan(
        step, list(values[num_consts:num_fixed]), stacked_inputs, **options
    )
    return [*carry, *stacked], extra


def bound(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Apply an operation to `values` and return its results as a list."""
    primitive = equation.primitive
    bind_params = primitive.get_bind_params(equation.params)
    results = primitive.bind(*values, **bind_params)
    return list(results) if primitive.multiple_results else [results]
