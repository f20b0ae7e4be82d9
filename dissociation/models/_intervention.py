"""Models in which functions replace the values that modules return."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from dissociation._core.checks import check_call, fail, fail_kind, takes
from dissociation._core.conversion import describe
from dissociation._core.validation import validated
from dissociation.models._module_values import calls_marks, fail_unknown, is_mark, with_marks
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

    def __call__(self, x: Any) -> Any:
        """Return the outputs of the model for one example, with replaced values."""
        model, _ = with_marks(self.model, READER)
        traced, shapes, static = eqx.filter_make_jaxpr(self.call or called)(model, x)
        walk = _Intervention(self.functions)
        results = walk.values_of(traced, jax.tree.leaves(eqx.filter((model, x), eqx.is_array)))
        for name in self.functions:
            if name not in walk.names:
                fail_unknown("functions", name, walk.names)
        return eqx.combine(jax.tree.unflatten(jax.tree.structure(shapes), results), static)


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
        self.iteration = iteration

    def values_of(self, program: Any, operands: Sequence[Any]) -> list[Any]:
        """Return the results of a closed jaxpr, with replaced values."""
        marks = [None] * len(operands)
        pairs = self.run(program.jaxpr, program.consts, operands, marks)
        return [value for value, _ in pairs]

    def enters(self, equation: Any, marks: list[Any]) -> bool:
        """Return True if the walk follows the program that an operation calls."""
        is_checkpoint = equation.primitive.name == "remat2"
        return (
            super().enters(equation, marks) and calls_marks(equation, READER) and not is_checkpoint
        )

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return an operation's results, and None as their mark."""
        params = equation.params
        if is_mark(equation, READER):
            name = numbered(params["layer"], self.names, params["suffix"])
            self.names.append(name)
            if name in self.functions:
                return [self._replaced(name, values[0])], None
            return values, None

        kind = equation.primitive.name
        if kind not in ("scan", "remat2") or not calls_marks(equation, READER):
            return bound(equation, values), None
        # JAX may trace the inner program more than once.
        names = list(self.names)

        def run(operands, *iteration):
            walk = _Intervention(self.functions, self.iteration + iteration)
            walk.names += names
            results = walk.values_of(inner_program(params), operands)
            self.names[:] = walk.names
            return results

        if kind == "scan":
            results, _ = run_loop(equation, values, lambda *operands: (run(*operands), None))
            return results, None
        options = {option: params[option] for option in ("prevent_cse", "policy")}
        return jax.checkpoint(run, **options)(values), None

    def _replaced(self, name: str, value: Array) -> Array:
        """Return the value that a function returns in place of `value`."""
        function = self.functions[name]
        argument = f"functions[{name!r}]"
        arguments: list[Any] = [value]
        if not takes(function, 1):
            if not self.iteration:
                fail(argument, "take one argument outside of a `scan`", "two")
            index = self.iteration
            arguments.append(index[0] if len(index) == 1 else index)
        result = function(*arguments)
        if result is None:
            fail_kind(argument, "return an array", "None")
        result = jnp.asarray(result)
        if result.shape != value.shape or result.dtype != value.dtype:
            requirement = f"return an array of shape {value.shape} and dtype {value.dtype}"
            fail(argument, requirement, f"{result.shape} and {result.dtype}")
        return result


@validated
def intervene(model: Any, functions: Mapping[str, Any], *, call: Call | None = None) -> Intervened:
    """Return a model in which functions replace values that its modules return.

    The model's outputs follow from the replaced values, as in activation patching. With the
    identity, they are the same to the last bit under `jit`. Values within a `while` loop or a
    `cond` have no names and cannot be replaced.

    Args:
        model: An Equinox model, or a pair (model, state), evaluated in inference mode.
        functions: Functions by the names of `layer_shapes` that end in "()", such as
            "blocks[3].mlp()" or "norm():2". A function gets the value of one example, with the
            axes of an inner `vmap` in front, and returns an array of the same shape and dtype. In a
            `scan` it gets the value of one iteration, and the iteration as well if it needs two
            arguments; a tuple of iterations for nested loops.
        call: Function from model and example to outputs, which replaces the model's call.

    Returns:
        A model of one example, which returns the outputs of `model` without a state.

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
        if not (takes(function, 1) or takes(function, 2)):
            check_call(f"functions[{name!r}]", function, ["value"])
        layer = re.match(r"(.*\(\))(:\d+)?", name)
        if layer is None or layer[1] not in names:
            fail_unknown("functions", name, names)
    return Intervened(model, functions, call)
