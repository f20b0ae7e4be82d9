"""Measure how much a rewrite changed the function of a model on given inputs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dissociation._core.checks import check_count, check_model, fail
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.validation import validated
from dissociation.models._program import function_of


class Certificate(NamedTuple):
    """Differences between the outputs of two models.

    Attributes:
        max_abs_change: Largest change of any output on any input; NaN if an output is NaN.
        max_rel_change: `max_abs_change` over the largest absolute output of the original model.
        changed_predictions: Number of inputs for which the index of the largest output (or the sign of a single output)
            changed, or the largest output is not finite in either model.
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
    batch_size: int | None = 1024,
) -> Certificate:
    """Compare the outputs of a model before and after a rewrite.

    Args:
        original: A function of one example or a pair (model, state), in inference mode.
        rewritten: The rewritten model.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        batch_size: Examples per batch, which bounds memory. None is all at once, faster for convolutions on a CPU.

    Raises:
        TypeError: If `batch_size` is not an integer, or a model does not accept one example or return a real array.
        ValueError: If there are no inputs, one is not finite, or the shapes of outputs differ.
    """
    original, rewritten = function_of("original", original), function_of("rewritten", rewritten)
    inputs = as_examples("inputs", inputs, finite=True)
    num_inputs, first = len(jax.tree.leaves(inputs)[0]), jax.tree.map(lambda part: part[0], inputs)

    def compare(example: Any) -> tuple[Array, Array, Array]:
        before, after = original(example).ravel(), rewritten(example).ravel()
        # An output that is not finite predicts no class, so it counts as changed.
        defined = jnp.isfinite(jnp.max(before)) & jnp.isfinite(jnp.max(after))
        flipped = (_prediction(before) != _prediction(after)) | ~defined
        return jnp.max(jnp.abs(after - before)), jnp.max(jnp.abs(before)), flipped

    # The short formats of an accelerator would change outputs more than the rewrite does.
    with jax.default_matmul_precision("highest"):
        before, after = (check_model(*named, first) for named in (("original", original), ("rewritten", rewritten)))
        if before.shape != after.shape:
            fail("rewritten", f"give outputs of the shape that `original` gives, {before.shape}", after.shape)
        if batch_size is None:
            changes, sizes, flips = jax.vmap(compare)(inputs)
        else:
            batch_size = min(check_count("batch_size", batch_size, minimum=1), num_inputs)
            changes, sizes, flips = jax.lax.map(compare, inputs, batch_size=batch_size)
    change, size, flipped = jnp.max(changes), jnp.max(sizes), jnp.sum(flips)
    return Certificate(
        max_abs_change=change,
        # If all outputs are zero, the relative change is zero or infinite.
        max_rel_change=jnp.where(change == 0, change, change / size),
        changed_predictions=flipped,
        num_inputs=jnp.asarray(num_inputs, flipped.dtype),
    )


def _prediction(outputs: Array) -> Array:
    return outputs[0] > 0 if outputs.size == 1 else jnp.argmax(outputs)
