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

from dissociation._core._compat import jex
from dissociation._core.checks import fail, fail_kind
from dissociation._core.conversion import describe

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
            raise TypeError(
                f"weights of shape {self.weight.shape} are those of stacked networks; `member` "
                "picks one"
            )
        return super().__call__(x, key=key)


def _single(layer: eqx.nn.Linear) -> _Single:
    """Return a copy of `layer` that raises for stacked weights."""
    # Modules are frozen and their constructors draw weights: the fields are copied instead.
    single = object.__new__(_Single)
    vars(single).update(vars(layer))
    return single


def called(model: Any, example: Any) -> Any:
    """Return the outputs of a model, or of a pair (model, state), in inference mode."""
    module, *states = model if isinstance(model, tuple) and len(model) == 2 else (model,)

    # Equinox's layer multiplies stacked weights without an error.
    def is_linear(part):
        return type(part) is eqx.nn.Linear and np.ndim(part.weight) > 2

    module = jax.tree.map(
        lambda part: _single(part) if is_linear(part) else part, module, is_leaf=is_linear
    )
    function: Any = eqx.nn.inference_mode(module) if isinstance(module, eqx.Module) else module
    if not states:
        return function(example)
    # A copy, as a state that was set cannot be used again.
    return function(example, jax.tree.map(lambda leaf: leaf, states[0]))[0]


def function_of(name: str, model: Any) -> Callable[[Any], Any]:
    """Return `called` as a function of one example; raise `TypeError` if `model` cannot be called."""
    if not callable(model[0] if isinstance(model, tuple) and len(model) == 2 else model):
        fail_kind(
            name,
            "be a function",
            describe(model),
            "Weights alone need `call=`; a model with state is a pair (model, state)",
        )
    return functools.partial(called, model)


def parameters_in(model: Any, where: Any = None) -> Any:
    """Return the parameters of a model, None elsewhere; `where` selects some, as in `eqx.tree_at`."""

    # A `StateIndex` holds the initial values of the state, which are no parameters either.
    def is_state(part):
        return isinstance(part, eqx.nn.State | eqx.nn.StateIndex)

    kept = jax.tree.map(
        lambda part: not is_state(part) and eqx.is_inexact_array(part), model, is_leaf=is_state
    )
    if where is not None:
        kept = eqx.tree_at(where, jax.tree.map(lambda _: False, kept), replace=where(kept))
    return eqx.filter(model, kept)


def with_draws(model: Any, noise: Any) -> Any:
    """Return `noise` with zeros for parameters where it is None; raise `ValueError` unless shapes fit."""

    def is_none(leaf):
        return leaf is None

    parameters = parameters_in(model)
    places = [
        jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)[0]
        for tree in (parameters, noise)
    ]
    pairs = itertools.zip_longest(*places, fillvalue=((), None))
    fits = all(
        one == two and (b is None or (a is not None and np.shape(b) == a.shape))
        for (one, a), (two, b) in pairs
    )
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
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    named, tree = jax.tree_util.tree_flatten_with_path(arrays)
    run = functools.partial(_run, called if call is None else call, tree, rest)
    paths = [jax.tree_util.keystr(path) for path, _ in named]
    leaves = [leaf for _, leaf in named]
    # Names are the same with and without a state.
    skipped = int(isinstance(model, tuple) and isinstance(model[-1], eqx.nn.State))
    # Flax wraps each array in an object with the attribute `value`.
    keys = [path[skipped : -1 if path and str(path[-1]) == ".value" else None] for path, _ in named]
    matrices = {
        path
        for path, leaf in zip(keys, leaves, strict=True)
        if np.size(leaf) > max(np.shape(leaf), default=1)
    }
    return Program(paths, _layers_of(keys, matrices), leaves, run)


def _layers_of(paths: list[tuple[Any, ...]], matrices: set[tuple[Any, ...]]) -> list[str]:
    """Return the name of the layer of each path: "layers[0]" of ".layers[0].weight", "Dense_0" of "Dense_0", "kernel".

    The last key of a dictionary is left out if the dictionary holds one matrix. Front keys up to
    the last one of a dictionary that all matrices share are left out, too.
    """
    own = [path[:-1] for path in matrices]

    def layer(path: tuple[Any, ...]) -> tuple[Any, ...]:
        if not path:
            return path
        *head, last = path
        if isinstance(last, jax.tree_util.GetAttrKey):
            return tuple(head) if head and last.name.startswith(("weight", "bias")) else path
        of_dictionary = isinstance(last, jax.tree_util.DictKey)
        return tuple(head) if head and of_dictionary and own.count(tuple(head)) < 2 else path

    layers = [layer(path) for path in paths]
    known = [layer(path) for path in matrices] or layers
    common = 0
    for keys in zip(*(path[:-1] for path in known), strict=False):
        if len(set(map(str, keys))) > 1:
            break
        common += 1
    shared = known[0][:common] if known else ()
    of_containers = (jax.tree_util.DictKey, jax.tree_util.FlattenedIndexKey)
    front = max(
        (place + 1 for place, key in enumerate(shared) if isinstance(key, of_containers)), default=0
    )
    return [
        "".join(map(_shown, path[front:] if path[:front] == shared[:front] else path)).lstrip(".")
        for path in layers
    ]


def _shown(key: Any) -> str:
    """Return a key of a path as text: ".name" or "[index]"."""
    if isinstance(key, jax.tree_util.DictKey):
        return f".{key.key}"
    return f"[{key.key}]" if isinstance(key, jax.tree_util.FlattenedIndexKey) else str(key)


def numbered(name: str, taken: Container[str]) -> str:
    """Return `name`, or the first of "name:2", "name:3", ... that is not in `taken`."""
    names = itertools.chain([name], (f"{name}:{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in taken)


def _run(apply: Call, tree: Any, rest: Any, leaves: list[Any], example: Any) -> list[Any]:
    outputs = apply(eqx.combine(jax.tree.unflatten(tree, leaves), rest), example)
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
    """Return True if a program may be cached by the structure of `model`: a PyTree of JAX arrays and constants."""
    module = model[0] if isinstance(model, tuple) and model else model
    if jax.tree_util.treedef_is_leaf(jax.tree.structure(module)):
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
        """Return an operation's results and their mark."""

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
            return (atom.val, None) if isinstance(atom, jex.Literal) else env[atom]

        for equation in jaxpr.eqns:
            pairs = [read(atom) for atom in equation.invars]
            values, own = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
            inner = inner_program(equation.params)
            if (
                inner is not None
                and len(inner.jaxpr.invars) == len(values)
                and self.enters(equation, own)
            ):
                found = self.run(inner.jaxpr, inner.consts, values, own)
            else:
                results, mark = self.at(equation, values, own)
                found = [(result, mark) for result in results]
            env |= dict(zip(equation.outvars, found, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def bound(equation: Any, values: Sequence[Any]) -> list[Any]:
    """Apply an operation to `values` and return its results as a list."""
    results = equation.primitive.bind(
        *values, **equation.primitive.get_bind_params(equation.params)
    )
    return list(results) if equation.primitive.multiple_results else [results]
