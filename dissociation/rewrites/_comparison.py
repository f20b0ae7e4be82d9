"""Whether a model computes as another does, but for the number of neurons in a group; and whether it is defined."""

import math
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core._compat import jex
from dissociation._core.checks import fail, fail_kind, is_traced
from dissociation.models._program import bound, program_of
from dissociation.rewrites._flow import FEW
from dissociation.rewrites._groups import NeuronGroup, group_report

KEPT_SIZE = (
    "If a module keeps its size in a field, `rewrites.refitted.register` what makes it anew; a size that is written in "
    "its code has to be read off its arrays"
)
LOOPS = ("scan", "while")
"""What is handed to the programs of these is not what they begin with each time."""


def check_same_program(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raises unless both are one program, without anything in it that depends on how many neurons a group has."""
    one, other = (list(_operations(model, group)) for model in (before, after))
    lengths = [group_report(model, group.example, call=group.call).lengths for model in (before, after)]
    if len(one) != len(other) or not all(map(_same_operation, one, other)) or lengths[0] != lengths[1]:
        fail("group", "be one whose number of neurons the function does not depend on", group.name)


PARTIAL = {"sqrt", "rsqrt", "log", "log1p", "pow", "div", "integer_pow", "acos", "asin", "acosh", "atanh", "erf_inv"}
"""Operations that are not finite, or not numbers, everywhere."""


def check_defined(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raises if outputs are no longer numbers because of new neurons, whose weight of zero does not silence NaN."""
    numbers = [jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) for model in (before, after)]
    if any(map(is_traced, [*numbers[0], *numbers[1]])):
        return
    if PARTIAL.isdisjoint(operation.name for operation in _operations(after, group)):
        return
    examples = jax.tree.map(_drawn_like, group.example)
    runs = [program_of(model, group.call) for model in (before, after)]
    one, other = ([np.isfinite(y) for y in jax.vmap(run, (None, 0))(leaves, examples)] for _, leaves, run in runs)
    if any((kept & ~still).any() for kept, still in zip(one, other, strict=True)):
        wanted = "be one whose new neurons are finite, whatever weights are drawn"
        fail("group", wanted, group.name, "What it passes through is not defined for these weights")


def _drawn_like(leaf: Any) -> Any:
    """Examples to try, half of them without negative numbers; zeros where they are no real numbers."""
    shape, kind = (64, *np.shape(leaf)), jax.dtypes.result_type(leaf)
    if not jnp.issubdtype(kind, jnp.floating):
        return jnp.zeros(shape, kind)
    drawn = jax.random.normal(jax.random.key(0), shape, kind)
    return drawn.at[::2].set(jnp.abs(drawn[::2]))


class _Operation(NamedTuple):
    """An operation: the shapes of its operands and results, plain parameters, and operands that are known."""

    name: str
    given: tuple[Any, ...]
    made: tuple[Any, ...]
    params: dict[str, Any]
    numbers: tuple[np.ndarray, ...]


def _operations(model: Any, group: NeuronGroup) -> Iterator[_Operation]:
    _, leaves, program = program_of(model, group.call)
    shapes = [jax.ShapeDtypeStruct(np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves]
    try:
        jaxpr = jax.make_jaxpr(program)(shapes, group.example)
    except Exception as error:
        wanted = f"run with another number of neurons in {group.name}"
        fail_kind("model", wanted, f"{type(error).__name__}: {error}", KEPT_SIZE)
    return _operations_in(jaxpr)


def _operations_in(
    closed: Any, given: list[Any] | None = None, *, handed_on: bool = False
) -> Generator[_Operation, None, list[Any]]:
    """The operations of a program that depend on its inputs, in order; what follows from constants is computed."""
    known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, map(_as_known, closed.consts), strict=True))
    known |= {} if given is None else dict(zip(closed.jaxpr.invars, given, strict=True))

    def read(variable: Any) -> Any:
        return _as_known(variable.val) if isinstance(variable, jex.Literal) else known.get(variable)

    for equation in closed.jaxpr.eqns:
        operands = [read(variable) for variable in equation.invars]
        parts = [inner for value in equation.params.values() for inner in _programs_in(value)]
        few = all(math.prod(shape) <= FEW for shape in _shapes(equation.outvars))
        if few and not parts and all(operand is not None for operand in operands):
            with jax.ensure_compile_time_eval():
                results = bound(equation, [jnp.asarray(operand) for operand in operands])
            known |= dict(zip(equation.outvars, map(_as_known, results), strict=True))
            continue
        numbers = tuple(operand for operand in operands if operand is not None)
        params = {name: value for name, value in equation.params.items() if _is_plain(value)}
        yield _Operation(equation.primitive.name, _shapes(equation.invars), _shapes(equation.outvars), params, numbers)
        for inner in parts:
            whole = (
                len(parts) == 1 and len(inner.jaxpr.invars) == len(operands) and equation.primitive.name not in LOOPS
            )
            into = operands if whole else [None] * len(inner.jaxpr.invars)
            results = yield from _operations_in(inner, into, handed_on=whole)
            known |= dict(zip(equation.outvars, results, strict=True)) if whole else {}
    shapes = _shapes(closed.jaxpr.outvars)
    results = [read(variable) for variable in closed.jaxpr.outvars]
    numbers = () if handed_on else tuple(value for value in results if value is not None)
    yield _Operation("results", (), (), {"shapes": shapes} if given is None else {}, numbers)
    return results


def _shapes(variables: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(getattr(variable.aval, "shape", ())) for variable in variables)


def _is_plain(value: Any) -> bool:
    """Whether a parameter is numbers or words, and no function or program, which are other objects each time."""
    plain = isinstance(value, int | float | str | tuple)
    return plain and not list(_programs_in(value)) and " at 0x" not in repr(value)


def _same_operation(one: _Operation, other: _Operation) -> bool:
    if one.name != other.name or len(one.numbers) != len(other.numbers):
        return False
    if not all(map(_same_numbers, one.numbers, other.numbers)):
        return False
    if one.given == other.given and one.name != "broadcast_in_dim":  # nothing in it has neurons
        return one.made == other.made and one.params == other.params
    # Shapes and slices follow the neurons; other numbers do not, but for the groups of a convolution.
    plain = [{k: v for k, v in each.params.items() if isinstance(v, int | float | str)} for each in (one, other)]
    return plain[0] == plain[1] or one.name == "conv_general_dilated"


def _same_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether constants are the same, whatever the length of an axis."""
    if one.shape == other.shape:
        return one.tobytes() == other.tobytes()
    return np.array_equal(np.unique(one), np.unique(other), equal_nan=one.dtype.kind in "fc")


def _as_known(value: Any) -> np.ndarray | None:
    if is_traced(value) or jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key):
        return None
    return np.asarray(value)


def _programs_in(value: Any) -> Iterator[Any]:
    for inner in value if isinstance(value, tuple) else (value,):
        if isinstance(inner, jex.Jaxpr):
            yield jex.ClosedJaxpr(inner, ())
        elif isinstance(inner, jex.ClosedJaxpr):
            yield inner
