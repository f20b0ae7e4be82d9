"""Compare the programs of two models that differ in the number of neurons of a group."""

from collections.abc import Sequence
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
    "rebuilds it; code must read a "
    "size off the arrays"
)


def check_resized(
    before: Any,
    after: Any,
    group: NeuronGroup,
    wanted: Sequence[NeuronGroup],
    *,
    single: bool = False,
) -> None:
    """Raise unless both programs are equal up to the number of neurons of a group, and `after` has groups `wanted`."""
    grown = f"run with another number of neurons in {group.name}"
    (_, one, _, results), (_, other, _, others) = (
        flow_of(model, group.example, group.call, grown, KEPT_SIZE) for model in (before, after)
    )
    same = (
        one.lengths == other.lengths
        and _same_steps(one.steps, other.steps)
        and _same_known(results, others)
    )
    same = same and [value.shape for value in results] == [value.shape for value in others]
    if (
        not same
        or len(one.large) != len(other.large)
        or not all(map(_same_numbers, one.large, other.large))
    ):
        fail("group", "be one whose number of neurons the function does not depend on", group.name)
    # A number of neurons in the code, as in a mean over them, would make it another function.
    found = neuron_groups(after, group.example, call=group.call, single=single).values()
    if not all(any(one.places() == other.places() for other in found) for one in wanted):
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
    numbers = [
        jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array)) for model in (before, after)
    ]
    if any(map(is_traced, [*numbers[0], *numbers[1]])):
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
        wanted = "be one whose new neurons are finite, whatever weights are drawn"
        fail("group", wanted, group.name, "What it passes through is not defined for these weights")


@eqx.filter_jit
def _loses_values(programs: list[Traced], arrays: list[list[Array]], example: Any) -> Array:
    """Return True if finite outputs of the first program are not finite in the second, for drawn examples."""
    # A weight of zero does not silence NaN: outputs must be compared.
    examples = jax.tree.map(_drawn_like, example)
    outputs = [
        jax.vmap(run, (None, 0))(leaves, examples)
        for run, leaves in zip(programs, arrays, strict=True)
    ]
    lost = [
        jnp.any(jnp.isfinite(one) & ~jnp.isfinite(other))
        for one, other in zip(*outputs, strict=True)
    ]
    return jnp.any(jnp.stack(lost))


def _drawn_like(leaf: Any) -> Any:
    """Draw 64 examples, half of them non-negative; zeros for dtypes that are not real."""
    shape, kind = (64, *np.shape(leaf)), jax.dtypes.result_type(leaf)
    if not jnp.issubdtype(kind, jnp.floating):
        return jnp.zeros(shape, kind)
    drawn = jax.random.normal(jax.random.key(0), shape, kind)
    return drawn.at[::2].set(jnp.abs(drawn[::2]))


def _same_steps(one: list[Step], other: list[Step]) -> bool:
    return len(one) == len(other) and all(map(_same_step, one, other))


def _same_step(one: Step, other: Step) -> bool:
    if (one.name, len(one.parts)) != (other.name, len(other.parts)) or not _same_known(
        one.operands, other.operands
    ):
        return False
    for part, twin in zip(one.parts, other.parts, strict=True):
        if not _same_steps(part.steps, twin.steps) or not _same_known(part.outputs, twin.outputs):
            return False
    params = [
        {name: value for name, value in step.params.items() if _is_plain(name, value)}
        for step in (one, other)
    ]
    given = [[value.shape for value in step.operands] for step in (one, other)]
    if given[0] == given[1] and one.name != "broadcast_in_dim":  # its operands have no neurons
        order = [
            None if (own := step.params.get("indices")) is None else own.tolist()
            for step in (one, other)
        ]
        return one.shapes == other.shapes and params[0] == params[1] and order[0] == order[1]
    # Shapes and slices depend on the number of neurons; other numbers do not, except the groups of
    # a convolution.
    plain = [
        {name: value for name, value in own.items() if not isinstance(value, tuple)}
        for own in params
    ]
    return plain[0] == plain[1] or one.name == "conv_general_dilated"


def _is_plain(name: str, value: Any) -> bool:
    """Test whether a parameter holds numbers or text, which do not differ between traces."""
    return (
        name != "branches"
        and isinstance(value, int | float | str | tuple)
        and " at 0x" not in repr(value)
    )


def _same_known(one: list[Value], other: list[Value]) -> bool:
    known = [
        [value.known for value in values if value.known is not None] for values in (one, other)
    ]
    return len(known[0]) == len(known[1]) and all(map(_same_numbers, *known))


def _same_numbers(one: np.ndarray, other: np.ndarray) -> bool:
    """Test whether constants are equal up to the length of an axis."""
    if one.shape == other.shape:
        return one.tobytes() == other.tobytes()
    return np.array_equal(np.unique(one), np.unique(other), equal_nan=one.dtype.kind in "fc")
