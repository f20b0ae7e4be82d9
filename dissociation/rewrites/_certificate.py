"""Measure how much a rewrite changed the function of a model on given inputs."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dissociation._core.checks import check_model, fail
from dissociation._core.conversion import as_examples, to_device
from dissociation._core.results import printed
from dissociation._core.types import Size
from dissociation._core.validation import validated
from dissociation.models._program import Call, function_of, program_of
from dissociation.training._traced import Traced, trace


class Certificate(NamedTuple):
    """Differences between the outputs of two models.

    Attributes:
        max_abs_change: Largest change of any output on any input; NaN if an output is NaN.
        max_rel_change: `max_abs_change` over the largest absolute output of the original model.
        changed_predictions: Number of inputs for which the index of the largest output (or the sign
            of a single output) changed, or the largest output is not finite in either model.
        num_inputs: Number of inputs.
    """

    max_abs_change: Float[Array, ""]
    max_rel_change: Float[Array, ""]
    changed_predictions: Int[Array, ""]
    num_inputs: Int[Array, ""]

    __repr__ = printed

    def kept(self, tolerance: float = 1e-4) -> Bool[Array, ""]:
        """Test that no output changed by more than `tolerance` and no prediction changed."""
        return (self.max_abs_change <= tolerance) & (self.changed_predictions == 0)


@validated
def certify(
    original: Any,
    rewritten: Any,
    inputs: Any,
    *,
    call: Call | None = None,
    batch_size: Size | None = 1024,
) -> Certificate:
    """Compare the outputs of a model before and after a rewrite.

    Args:
        original: A function of one example or a pair (model, state), in inference mode.
        rewritten: The rewritten model.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        call: Function from model and example to outputs, as in `neuron_groups`.
        batch_size: Examples per batch, which bounds memory. None is all at once, faster for
            convolutions on a CPU.

    Raises:
        TypeError: If `batch_size` is not an integer, or a model does not accept one example or
            return a real array.
        ValueError: If there are no inputs, one is not finite, or the shapes of outputs differ.
    """
    if call is None:
        function = function_of("original", original)
        rewritten_function = function_of("rewritten", rewritten)
    else:
        function = partial(call, original)
        rewritten_function = partial(call, rewritten)
    inputs = as_examples("inputs", inputs, finite=True)
    example = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape[1:], array.dtype), inputs)
    with jax.default_matmul_precision("highest"):
        before = check_model("original", function, example)
        after = check_model("rewritten", rewritten_function, example)
    if before.shape != after.shape:
        wanted_shape = f"give outputs of the shape that `original` gives, {before.shape}"
        fail("rewritten", wanted_shape, after.shape)
    program = _first_output(original, example, call)
    rewritten_program = _first_output(rewritten, example, call)
    return compare_programs(program, rewritten_program, inputs, batch_size)


def _first_output(model: Any, example: Any, call: Call | None) -> "Program":
    _, _, leaves, run = program_of(model, call)
    return trace_exactly(lambda arrays, x: run(arrays, x)[0], leaves, example), leaves


def trace_exactly(
    function: Callable[[list[Any], Any], Array], leaves: list[Any], example: Any
) -> Traced:
    """Trace a function of a model's arrays and one example, at the highest precision."""
    # The short formats of an accelerator would change outputs more than the rewrite does.
    with jax.default_matmul_precision("highest"):
        return trace(function, eqx.filter_eval_shape(lambda: leaves), example)


Program = tuple[Traced, list[Any]]
"""Traced function of a model's arrays and one example, and the arrays."""


def compare_programs(
    original: Program, rewritten: Program, inputs: Any, batch_size: int | None = 1024
) -> Certificate:
    """Return the certificate of two programs on examples."""
    if batch_size is not None:
        batch_size = min(batch_size, len(jax.tree.leaves(inputs)[0]))
    return _compare(jax.tree.map(to_device, (original, rewritten)), inputs, batch_size)


@eqx.filter_jit
def _compare(programs: tuple[Program, Program], inputs: Any, batch_size: int | None) -> Certificate:
    (original, leaves), (rewritten, rewritten_leaves) = programs

    def compare(example):
        before = original(leaves, example).ravel()
        after = rewritten(rewritten_leaves, example).ravel()
        # An output that is not finite predicts no class, so it counts as changed.
        is_defined = jnp.isfinite(jnp.max(before)) & jnp.isfinite(jnp.max(after))
        is_flipped = (_prediction(before) != _prediction(after)) | ~is_defined
        change = jnp.max(jnp.abs(after - before))
        return change, jnp.max(jnp.abs(before)), is_flipped

    if batch_size is None:
        changes, sizes, is_flipped = jax.vmap(compare)(inputs)
    else:
        changes, sizes, is_flipped = jax.lax.map(compare, inputs, batch_size=batch_size)
    change = jnp.max(changes)
    num_flipped = jnp.sum(is_flipped)
    # If all outputs are zero, the relative change is zero or infinite.
    relative_change = jnp.where(change == 0, change, change / jnp.max(sizes))
    num_inputs = jnp.asarray(len(is_flipped), num_flipped.dtype)
    return Certificate(change, relative_change, num_flipped, num_inputs)


def _prediction(outputs: Array) -> Array:
    if outputs.size == 1:
        return outputs[0] > 0
    return jnp.argmax(outputs)
