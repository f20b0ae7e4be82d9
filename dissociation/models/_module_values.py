"""Values that Equinox modules return, marked in a model's program by the paths of the modules."""

import difflib
import functools
from collections.abc import Iterable
from typing import Any, NoReturn

import equinox as eqx
import jax
import jax.numpy as jnp

from dissociation._core._compat import ad, batching, jex, mlir
from dissociation._core.checks import fail
from dissociation.models._program import (
    inner_program,
    layers_of_arrays,
    num_wrappers,
    path_name,
    path_text,
    single,
    with_class,
)

NUM_NEAREST = 5
"""Number of names that an error about an unknown name lists."""


@functools.cache
def _mark() -> Any:
    """Return the operation that marks a value and returns it.

    Its parameters are `layer`, the module's name; `suffix`, of one of several values; and `reader`,
    "recorder" or "intervention".
    """
    # `checkpoint_name` would leave open which axes `vmap` added, and marks derivatives, too.
    mark = jex.Primitive("module_value")
    mark.def_impl(lambda value, **_: value)
    mark.def_abstract_eval(lambda value, **_: value)
    mlir.register_lowering(mark, lambda _, value, **__: [value])

    def derivative(values, tangents, **params):
        return mark.bind(*values, **params), tangents[0]

    def batched(values, axes, **params):
        # Transposes that cancel let XLA compile the same program as without the mark.
        value = mark.bind(jnp.moveaxis(values[0], axes[0], 0), **params)
        return jnp.moveaxis(value, 0, axes[0]), axes[0]

    ad.primitive_jvps[mark] = derivative
    batching.primitive_batchers[mark] = batched
    return mark


def is_mark(equation: Any, reader: str) -> bool:
    """Return True if an operation marks a value for `reader`."""
    return equation.primitive is _mark() and equation.params["reader"] == reader


def calls_marks(equation: Any, reader: str) -> bool:
    """Return True if an operation calls a program that marks values for `reader`."""
    inner = inner_program(equation.params)
    if inner is None:
        return False
    inner_equations = inner.jaxpr.eqns
    return any(is_mark(item, reader) or calls_marks(item, reader) for item in inner_equations)


def _is_module(node: Any) -> bool:
    return isinstance(node, eqx.Module | eqx.nn.State)


def _marked(outputs: Any, layer: str, reader: str) -> Any:
    """Return what a module returned, with its arrays marked."""
    # States and modules in the outputs are no activity.
    num_arrays = sum(map(eqx.is_array, jax.tree.leaves(outputs, is_leaf=_is_module)))

    def mark(path, leaf):
        if not eqx.is_array(leaf):
            return leaf
        suffix = path_text(path) if num_arrays > 1 else ""
        return _mark().bind(leaf, layer=layer, suffix=suffix, reader=reader)

    return jax.tree_util.tree_map_with_path(mark, outputs, is_leaf=_is_module)


@functools.cache
def _named_class(base: type, layer: str, reader: str) -> type:
    """Return a subclass of a module's class whose calls mark their values.

    Compiled functions within a model are cached by the class, so it is made once.
    """

    def call(self, *args, **kwargs):
        inherited: Any = super(named, self)
        outputs = inherited.__call__(*args, **kwargs)
        return _marked(outputs, layer, reader)

    attributes = {"__call__": call}
    for name in ("__module__", "__qualname__", "__doc__"):
        attributes[name] = getattr(base, name)
    named = type(base)(base.__name__, (base,), attributes)
    return named


def with_marks(model: Any, reader: str) -> tuple[Any, list[str]]:
    """Return a model whose modules mark the values that they return, and the names of the values.

    The model itself is not a layer.
    """
    names: list[str] = []
    _, front = layers_of_arrays(model)
    num_skipped = num_wrappers(model)

    def marked(node, path):
        def is_child(child):
            return child is not node and _is_module(child)

        name = path_name(path[num_skipped:], front)
        is_layer = isinstance(node, eqx.Module) and callable(node) and name
        if is_layer:
            names.append(f"{name}()")

        def mark_child(inner_path, leaf):
            return marked(leaf, path + inner_path) if isinstance(leaf, eqx.Module) else leaf

        node = jax.tree_util.tree_map_with_path(mark_child, node, is_leaf=is_child)
        if not is_layer:
            return node
        node = single(node)
        return with_class(node, _named_class(type(node), f"{name}()", reader))

    return marked(model, ()), names


def fail_unknown(argument: str, name: str, names: Iterable[str]) -> NoReturn:
    """Raise for a name that is not one of `names`, with the nearest of them."""
    names = list(names)
    nearest = difflib.get_close_matches(name, names, NUM_NEAREST, cutoff=0.0)
    requirement = f"name layers, of which the nearest are {', '.join(map(repr, nearest))}"
    if not nearest:
        requirement = "name layers, of which the model has none"
    fail(argument, requirement, repr(name), "`layer_shapes` lists all")
