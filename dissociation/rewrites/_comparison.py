"""Compare the programs of two models that differ in the number of neurons of a group."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core.checks import fail, is_traced
from dissociation._core.conversion import to_device
from dissociation.models._program import program_of
from dissociation.rewrites._flow import Step, Value
from dissociation.rewrites._groups import NeuronGroup, flow_of, neuron_groups
from dissociation.training._traced import Traced, trace

KEPT_SIZE = (
    "If a module keeps its size in a field, `rewrites.refitted.register` a function that "
    "rebuilds it; code must read a size off the arrays"
)


def check_resized(
    before: Any,
    after: Any,
    group: NeuronGroup,
    resized: Sequence[NeuronGroup],
    *,
    single: bool = False,
) -> None:
    """Raise unless two programs differ in the number of neurons of a group alone.

    The groups of `after` must contain the groups `resized`.
    """
    wanted_run = f"run with another number of neurons in {group.name}"
    example = group.example
    _, flow, _, results = flow_of(before, example, group.call, wanted_run, KEPT_SIZE)
    _, flow_after, _, results_after = flow_of(after, example, group.call, wanted_run, KEPT_SIZE)
    is_same = (
        flow.lengths == flow_after.lengths
        and _all_same(_same_step, flow.steps, flow_after.steps)
        and _same_constants(results, results_after)
        and _shapes(results) == _shapes(results_after)
        and _all_same(_same_numbers, flow.large, flow_after.large)
    )
    if not is_same:
        fail("group", "be one whose number of neurons the function does not depend on", group.name)
    # A number of neurons in the code, as in a mean over them, would make it another function.
    groups = neuron_groups(after, example, call=group.call, single=single)
    occupied = [group_after.places() for group_after in groups.values()]
    for resized_group in resized:
        if resized_group.places() not in occupied:
            fail("group", "be one whose neurons the program does not count", group.name)


PARTIAL = {
    "sqrt",
    "rsqrt",
    "log",
    "log1p",
    "pow",
    "div",
    "integer_pow",
    "acos",
    "asin",
    "acosh",
    "atanh",
    "erf_inv",
}
"""Operations that are not finite everywhere."""


def check_defined(before: Any, after: Any, group: NeuronGroup) -> None:
    """Raise if new neurons make outputs NaN or infinite; do not check traced models."""
    parameters = eqx.filter((before, after), eqx.is_inexact_array)
    if any(map(is_traced, jax.tree.leaves(parameters))):
        return
    programs = []
    arrays = []
    for model in (before, after):
        _, _, leaves, run = program_of(model, group.call)
        programs.append(trace(run, leaves, group.example))
        arrays.append(list(map(to_device, leaves)))
    # Most models need no run: their operations are finite everywhere.
    if PARTIAL.isdisjoint(programs[1].code.primitives):
        return
    if bool(_loses_values(programs, arrays, group.example)):
        wanted_neurons = "be one whose new neurons are finite, whatever weights are drawn"
        advice = "What it passes through is not defined for these weights"
        fail("group", wanted_neurons, group.name, advice)


@eqx.filter_jit
def _loses_values(programs: list[Traced], arrays: list[list[Array]], example: Any) -> Array:
    """Return True if finite outputs of the first program are not finite in the second.

    Both programs run on drawn examples.
    """
    # A weight of zero does not silence NaN: outputs must be compared.
    examples = jax.tree.map(_drawn_like, example)
    outputs = jax.vmap(programs[0], (None, 0))(arrays[0], examples)
    outputs_after = jax.vmap(programs[1], (None, 0))(arrays[1], examples)
    is_lost = []
    for output, output_after in zip(outputs, outputs_after, strict=True):
        is_lost.append(jnp.any(jnp.isfinite(output) & ~jnp.isfinite(output_after)))
    return jnp.any(jnp.stack(is_lost))


def _drawn_like(leaf: Any) -> Any:
    """Draw 64 examples, half of them non-negative; zeros for dtypes that are not real."""
    shape = (64, *np.shape(leaf))
    dtype = jax.dtypes.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.floating):
        return jnp.zeros(shape, dtype)
    examples = jax.random.normal(jax.random.key(0), shape, dtype)
    return examples.at[::2].set(jnp.abs(examples[::2]))


def _all_same(
    is_same: Callable[[Any, Any], bool], first: Sequence[Any], second: Sequence[Any]
) -> bool:
    """Test whether two sequences have the same length and pairwise the same elements."""
    return len(first) == len(second) and all(map(is_same, first, second))


def _same_step(first: Step, second: Step) -> bool:
    if first.name != second.name or not _all_same(_same_part, first.parts, second.parts):
        return False
    if not _same_constants(first.operands, second.operands):
        return False
    params = _plain_params(first)
    params_of_second = _plain_params(second)
    has_same_shapes = _shapes(first.operands) == _shapes(second.operands)
    if has_same_shapes and first.name != "broadcast_in_dim":  # its operands have no neurons
        has_same_indices = _indices(first) == _indices(second)
        return first.shapes == second.shapes and params == params_of_second and has_same_indices
    # Shapes and slices depend on the number of neurons; other numbers do not, except the groups of
    # a convolution.
    is_convolution = first.name == "conv_general_dilated"
    return is_convolution or _without_tuples(params) == _without_tuples(params_of_second)


def _same_part(first: Any, second: Any) -> bool:
    """Test whether two loop bodies or branches have the same steps and outputs."""
    has_same_steps = _all_same(_same_step, first.steps, second.steps)
    return has_same_steps and _same_constants(first.outputs, second.outputs)


def _plain_params(step: Step) -> dict[str, Any]:
    """Return the parameters that hold numbers or text, which do not differ between traces."""
    plain = {}
    for name, value in step.params.items():
        if name == "branches" or not isinstance(value, int | float | str | tuple):
            continue
        if " at 0x" not in repr(value):
            plain[name] = value
    return plain


def _without_tuples(params: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in params.items() if not isinstance(value, tuple)}


def _indices(step: Step) -> Any:
    indices = step.params.get("indices")
    if indices is None:
        return None
    return indices.tolist()


def _shapes(values: list[Value]) -> list[tuple[int, ...]]:
    return [value.shape for value in values]


def _same_constants(first: list[Value], second: list[Value]) -> bool:
    return _all_same(_same_numbers, _constants(first), _constants(second))


def _constants(values: list[Value]) -> list[np.ndarray]:
    return [value.known for value in values if value.known is not None]


def _same_numbers(first: np.ndarray, second: np.ndarray) -> bool:
    """Test whether constants are equal up to the length of an axis."""
    if first.shape == second.shape:
        return first.tobytes() == second.tobytes()
    equal_nan = first.dtype.kind in "fc"
    return np.array_equal(np.unique(first), np.unique(second), equal_nan=equal_nan)
