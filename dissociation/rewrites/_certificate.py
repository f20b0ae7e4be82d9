"""What a rewrite did to the function of a model, measured on given inputs."""

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
    """How far the outputs of two models are apart.

    Attributes:
        max_abs_change: The largest change of any output on any input; NaN if an output is.
        max_rel_change: The same over the largest absolute output of the original model.
        changed_predictions: On how many inputs the largest output is another one (of a single output: its sign), or
            either model's largest is NaN or infinite.
        num_inputs: How many inputs were compared.
    """

    max_abs_change: Float[Array, ""]
    max_rel_change: Float[Array, ""]
    changed_predictions: Int[Array, ""]
    num_inputs: Int[Array, ""]

    __repr__ = printed

    def kept(self, tolerance: float = 1e-4) -> Bool[Array, ""]:
        """Whether no output moved by more than `tolerance` and no prediction changed."""
        return (self.max_abs_change <= tolerance) & (self.changed_predictions == 0)


@validated
def certify(
    original: Any,
    rewritten: Any,
    inputs: Any,
    *,
    batch_size: int | None = 1024,
) -> Certificate:
    """Compares the outputs of a model before and after a rewrite.

    Both are evaluated at the highest matmul precision, so that what is reported is the rewrite's doing and not that of
    an accelerator's short formats.

    Args:
        original: A function of one example, such as an Equinox model, or a pair (model, state); in inference mode.
        rewritten: The same after the rewrite; outputs of the same shape.
        inputs: The examples, samples first: an array, or a dictionary or tuple of arrays, as the models take them.
        batch_size: How many examples are evaluated at once, which bounds the memory; None is all of them, without a
            loop (the faster choice for convolutions on a CPU).

    Raises:
        TypeError: If `batch_size` is no integer, or a model does not take one example or gives no real array.
        ValueError: If there are no inputs, one is not finite, or the two models differ in the shape of their outputs.
    """
    original, rewritten = function_of("original", original), function_of("rewritten", rewritten)
    inputs = as_examples("inputs", inputs, finite=True)
    num_inputs, first = len(jax.tree.leaves(inputs)[0]), jax.tree.map(lambda part: part[0], inputs)

    def compare(example: Any) -> tuple[Array, Array, Array]:
        before, after = original(example).ravel(), rewritten(example).ravel()
        # An output that is not finite names no class, so it is never the same one.
        defined = jnp.isfinite(jnp.max(before)) & jnp.isfinite(jnp.max(after))
        flipped = (_prediction(before) != _prediction(after)) | ~defined
        return jnp.max(jnp.abs(after - before)), jnp.max(jnp.abs(before)), flipped

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
        # Where all outputs are zero, no change is none and any change is infinite.
        max_rel_change=jnp.where(change == 0, change, change / size),
        changed_predictions=flipped,
        num_inputs=jnp.asarray(num_inputs, flipped.dtype),
    )


def _prediction(outputs: Array) -> Array:
    """The class that the outputs of one example name."""
    return outputs[0] > 0 if outputs.size == 1 else jnp.argmax(outputs)
