"""The interaction tensor as a whole: its higher-order singular values, and its low-rank form.

T[o, i, j] holds the forms of all output directions. Everything is computed over the coordinates that `decompose` works
in (never more than the hidden layer has) and taken back to inputs at the end.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from dissociation.checks import check_count
from dissociation.linalg import product
from dissociation.models.bilinear import BilinearNetwork
from dissociation.results import printed
from dissociation.spectral.forms import compact_forms
from dissociation.types import PRNGKey
from dissociation.validation import validated


class HigherOrderSVD(NamedTuple):
    """T = core x_1 outputs x_2 inputs x_3 inputs, with orthonormal columns and all-orthogonal slices of the core.

    Attributes:
        core: [k, r, r].
        outputs: [k, k]; its columns are combinations of output directions that share no interaction.
        inputs: [d, r]; its columns are directions among inputs.
        output_values: Norms of the core's slices by output, falling: [k].
        input_values: The same by input, falling: [r].
    """

    core: Float[Array, "k r r"]
    outputs: Float[Array, "k k"]
    inputs: Float[Array, "d r"]
    output_values: Float[Array, " k"]
    input_values: Float[Array, " r"]

    __repr__ = printed


@validated
def higher_order_svd(
    model: BilinearNetwork, directions: Float[Array, "k o"] | None = None, *, layer: int = -1, space: str = "input"
) -> HigherOrderSVD:
    """The higher-order singular value decomposition of a layer's interaction tensor.

    Args:
        model: One network.
        directions: As in `interaction_tensor`.
        layer: Which layer.
        space: "input" or "hidden".

    Returns:
        The decomposition, exact.

    Raises:
        ValueError: As `interaction_tensor`.

    References:
        De Lathauwer, De Moor and Vandewalle (2000), A multilinear singular value decomposition, theorem 2.
        Pearce et al. (2024), appendix.
    """
    tensor, lift = compact_forms(model, directions, layer, space)
    outputs, output_values = _left_singular(tensor.reshape(tensor.shape[0], -1))
    inputs, input_values = _left_singular(jnp.moveaxis(tensor, 1, 0).reshape(tensor.shape[1], -1))
    turned = product(product(inputs.T[None], tensor), inputs[None])
    core = jnp.einsum("ok,oij->kij", outputs, turned, precision="highest")
    return HigherOrderSVD(core, outputs, product(lift, inputs), output_values, input_values)


def _left_singular(unfolding: Array) -> tuple[Array, Array]:
    # The factor of the transposed QR has the singular values of the unfolding and is square.
    root = jnp.linalg.qr(unfolding.T, mode="r") if unfolding.shape[1] > unfolding.shape[0] else unfolding.T
    # Full only where there are too few rows: that decomposition has no derivative.
    _, values, right = jnp.linalg.svd(root, full_matrices=root.shape[0] < root.shape[1])
    return right.T, jnp.pad(values, (0, unfolding.shape[0] - values.shape[0]))


class LowRank(NamedTuple):
    """T ~ sum_r outputs_r (left_r right_r^T), symmetrised: a bilinear layer of R units.

    Attributes:
        outputs: [k, R].
        left: [R, d], rows of norm 1.
        right: [R, d], rows of norm 1.
        cosine: Between the two tensors: 1 minus its square is the share of the squared norm that is lost.
    """

    outputs: Float[Array, "k R"]
    left: Float[Array, "R d"]
    right: Float[Array, "R d"]
    cosine: Float[Array, ""]

    __repr__ = printed


@validated
def low_rank(
    model: BilinearNetwork,
    directions: Float[Array, "k o"] | None = None,
    *,
    rank: int,
    key: PRNGKey,
    num_iterations: int = 100,
    layer: int = -1,
    space: str = "input",
) -> LowRank:
    """The canonical polyadic form of a layer's interaction tensor, by alternating least squares.

    Args:
        model: One network.
        directions: As in `interaction_tensor`.
        rank: R, at least 1. The layer itself has as many as it has units.
        key: Draws the start; another start may end in another optimum.
        num_iterations: Rounds over the three factors.
        layer: Which layer.
        space: "input" or "hidden".

    Returns:
        The form and its cosine to the tensor.

    Raises:
        ValueError: As `interaction_tensor`, or if a count is below 1.

    References:
        Carroll and Chang (1970); Harshman (1970); Kolda and Bader (2009), Tensor decompositions, section 3.4.
    """
    rank = check_count("rank", rank, minimum=1)
    count = check_count("num_iterations", num_iterations, minimum=1)
    tensor, lift = compact_forms(model, directions, layer, space)
    return _low_rank(tensor, lift, key, rank, count)


@partial(jax.jit, static_argnames=("rank", "count"))
def _low_rank(tensor: Array, lift: Array, key: PRNGKey, rank: int, count: int) -> LowRank:
    start = jax.random.normal(key, (2, tensor.shape[1], rank), tensor.dtype)

    def unit(factor: Array) -> Array:
        return factor / jnp.maximum(jnp.linalg.norm(factor, axis=0, keepdims=True), jnp.finfo(factor.dtype).tiny)

    def solve(moments: Array, first: Array, second: Array) -> Array:
        gram = product(first.T, first) * product(second.T, second)
        ridge = 10 * jnp.finfo(gram.dtype).eps * jnp.trace(gram) * jnp.eye(rank, dtype=gram.dtype)
        return jnp.linalg.solve(gram + ridge, moments.T).T

    def outputs_of(left: Array, right: Array) -> Array:
        return solve(jnp.einsum("oij,ir,jr->or", tensor, left, right, precision="highest"), left, right)

    def round_of(_: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        left, right = state
        outputs = outputs_of(left, right)
        left = unit(solve(jnp.einsum("oij,or,jr->ir", tensor, outputs, right, precision="highest"), outputs, right))
        outputs = outputs_of(left, right)
        right = unit(solve(jnp.einsum("oij,or,ir->jr", tensor, outputs, left, precision="highest"), outputs, left))
        return left, right

    left, right = lax.fori_loop(0, count, round_of, (unit(start[0]), unit(start[1])))
    outputs = outputs_of(left, right)
    approximation = jnp.einsum("or,ir,jr->oij", outputs, left, right, precision="highest")
    approximation = 0.5 * (approximation + approximation.swapaxes(1, 2))
    cosine = jnp.sum(approximation * tensor) / (jnp.linalg.norm(approximation) * jnp.linalg.norm(tensor))
    return LowRank(outputs, product(lift, left).T, product(lift, right).T, cosine)
