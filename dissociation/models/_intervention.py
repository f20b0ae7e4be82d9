"""Models in which functions replace the values that modules return."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from dissociation._core.checks import fail, fail_kind
from dissociation._core.conversion import describe
from dissociation._core.validation import validated
from dissociation.models._module_values import fail_unknown, holds_marks, is_mark, with_marks
from dissociation.models._program import (
    Call,
    Walk,
    Wrapper,
    bound,
    called,
    inner_program,
    numbered,
    run_loop,
)

READER = "intervention"
"""Reader of the marks that interventions take, see `with_marks`."""


class Intervened(Wrapper):
    """Model in which functions replace values, see `intervene`.

    Attributes:
        model: Model, or pair (model, state).
        functions: Functions by the names of the values.
        call: Function from model and example to outputs, or None.
    """

    functions: dict[str, Callable[..., Any]]
    call: Call | None = eqx.field(static=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the model for the same arguments, with replaced values."""
        model, _ = with_marks(self.model, READER)
        trace = eqx.filter_make_jaxpr(self._apply)
        traced, shapes, static = trace(model, args, kwargs)
        values = jax.tree.leaves(eqx.filter((model, args, kwargs), eqx.is_array))

        walk = _Intervention(self.functions)
        pairs = walk.run(traced.jaxpr, traced.consts, values, [None] * len(values))
        for name in self.functions:
            if name not in walk.names:
                fail_unknown("functions", name, walk.names)
        arrays = jax.tree.unflatten(jax.tree.structure(shapes), [value for value, _ in pairs])
        return eqx.combine(arrays, static)

    def _apply(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.call is not None:
            return self.call(model, *args, **kwargs)
        if isinstance(model, tuple):
            if len(args) != 1 or kwargs:
                received = f"{len(args) + len(kwargs)} arguments"
                fail_kind("model", "get one example: it holds the state", received)
            return called(model, args[0])
        return model(*args, **kwargs)


class _Intervention(Walk):
    """Walk that replaces marked values.

    Attributes:
        functions: Functions by name.
        names: Names of the marked values, in the order of the program.
        iteration: Index of each loop around the program.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], iteration: Any = ()):
        self.functions = functions
        self.names: list[str] = []
        self.iteration = tuple(iteration)

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        inner = inner_program(equation.params)
        is_marked = inner is not None and holds_marks(inner.jaxpr, READER)
        is_checkpoint = equation.primitive.name == "remat2"
        return super().enters(equation, marks) and is_marked and not is_checkpoint

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results, and None as their mark."""
        if is_mark(equation, READER):
            params = equation.params
            name = numbered(params["layer"], self.names, params["suffix"])
            self.names.append(name)
            if name in self.functions:
                return [self._replaced(name, values[0])], None
            return values, None

        inner = inner_program(equation.params)
        name = equation.primitive.name
        if name not in ("scan", "remat2") or not holds_marks(inner.jaxpr, READER):
            return bound(equation, values), None
        # JAX may trace the inner program more than once.
        names = list(self.names)

        def run(operands: list[Any], iteration: tuple[Any, ...]) -> list[Any]:
            walk = _Intervention(self.functions, self.iteration + iteration)
            walk.names += names
            pairs = walk.run(inner.jaxpr, inner.consts, operands, [None] * len(operands))
            self.names[:] = walk.names
            return [value for value, _ in pairs]

        if name == "scan":

            def body(operands: list[Any], iteration: Array) -> tuple[list[Any], None]:
                return run(operands, (iteration,)), None

            return run_loop(equation, values, body)[0], None
        options = {name: equation.params[name] for name in ("prevent_cse", "policy")}
        checkpointed = jax.checkpoint(lambda *operands: run(list(operands), ()), **options)
        return checkpointed(*values), None

    def _replaced(self, name: str, value: Array) -> Array:
        """Return the value that a function returns in place of `value`."""
        function = self.functions[name]
        arguments: list[Any] = [value]
        if _takes_iteration(function):
            if not self.iteration:
                fail(f"functions[{name!r}]", "take one argument outside of a `scan`", "two")
            index = self.iteration
            arguments.append(index[0] if len(index) == 1 else index)
        result = function(*arguments)
        if result is None:
            fail_kind(f"functions[{name!r}]", "return an array", "None")
        result = jnp.asarray(result)
        if result.shape != value.shape or result.dtype != value.dtype:
            requirement = f"return an array of shape {value.shape} and dtype {value.dtype}"
            fail(f"functions[{name!r}]", requirement, f"{result.shape} and {result.dtype}")
        return result


def _takes_iteration(function: Callable[..., Any]) -> bool:
    """Return True if a function needs two arguments."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # a compiled function has no known signature
        return False
    try:
        signature.bind("value")
    except TypeError:
        return True
    return False


@validated
def intervene(model: Any, functions: Mapping[str, Any], *, call: Call | None = None) -> Intervened:
    """Return a model in which functions replace values that its modules return.

    The model's outputs follow from the replaced values, as in activation patching. With the
    identity, they are the same to the last bit under `jit`. Values within a `while` loop or a
    `cond` cannot be replaced.

    Args:
        model: An Equinox model, or a pair (model, state), in inference mode.
        functions: Functions by the names of `layer_shapes` that end in "()", such as
            "blocks[3].mlp()" or "norm():2". A function gets the value of one example, with the
            axes of an inner `vmap` in front, and returns an array of the same shape and dtype. In a
            `scan` it gets the value of one iteration, and the iteration as well if it needs two
            arguments; a tuple of iterations for nested loops.
        call: Function from model and example to outputs, which replaces the model's call.

    Returns:
        A model that takes what `model` takes, or one example with `call` or a state.

    Raises:
        ValueError: If a name is not in the model, or, when the returned model is called, if a
            function changes shape or dtype.

    Example:
        >>> model = eqx.nn.MLP(4, 3, width_size=8, depth=2, key=jax.random.key(0))
        >>> ablated = intervene(model, {"layers[1]()": jnp.zeros_like})
        >>> jnp.array_equal(ablated(jnp.ones(4)), model.layers[2](jax.nn.relu(jnp.zeros(8))))
        Array(True, dtype=bool)
    """
    functions = dict(functions)
    if isinstance(model, Intervened) and model.call is call:
        functions = model.functions | functions
        model = model.model
    _, names = with_marks(model, READER)
    for name, function in functions.items():
        if not callable(function):
            fail_kind(f"functions[{name!r}]", "be a function of a value", describe(function))
        layer = re.match(r"(.*\(\))(:\d+)?", name)
        if layer is None or layer[1] not in names:
            fail_unknown("functions", name, names)
    return Intervened(model, functions, call)
