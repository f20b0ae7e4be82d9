"""Linear regression tasks with their decompositions."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.linalg import svdvals

from dissociation._core.checks import (
    check_count,
    check_finite,
    check_known,
    check_non_negative,
    fail,
)
from dissociation._core.linalg import column_units, num_directions, product
from dissociation._core.types import PRNGKey
from dissociation._core.validation import validated


class Task(eqx.Module):
    """Task of predicting y from x by a linear map G; see `make_task`.

    The loss is sum |G x - y|^2 / (2 samples). The best map of least norm is W* = Y X^+ = U S V^T,
    and the best predictions are Yh = M N O^T, with one row per sample. Tasks with equal shapes of
    all fields may be stacked, for `vmap`.

    Attributes:
        x: Inputs X, [samples, inputs].
        y: Targets Y, [samples, outputs].
        input_basis: Orthonormal basis A of the span of the inputs, [inputs, input rank].
        input_values: Singular values B of X, descending, [input rank].
        sample_basis: Left singular vectors C of X, [samples, input rank].
        map_left: U, [outputs, rank].
        map_values: S, descending, [rank].
        map_right: V, [inputs, rank].
        target_left: M, [outputs, rank].
        target_values: N, descending, [rank].
        target_right: O, [samples, rank].
        read_in: O^T X^+, [rank, inputs].
        irrelevant: Orthonormal basis of the inputs' span without V, [inputs, input rank - rank].
        unseen: Orthonormal basis of the directions that no input has, [inputs, inputs - input
            rank].
        unexplained: c = |Y - Yh|^2 / samples. The least loss is c / 2.
        rtol: Relative size up to which singular values were taken as zero.
    """

    x: Float[Array, "samples inputs"]
    y: Float[Array, "samples outputs"]
    input_basis: Float[Array, "inputs k"]
    input_values: Float[Array, " k"]
    sample_basis: Float[Array, "samples k"]
    map_left: Float[Array, "outputs r"]
    map_values: Float[Array, " r"]
    map_right: Float[Array, "inputs r"]
    target_left: Float[Array, "outputs r"]
    target_values: Float[Array, " r"]
    target_right: Float[Array, "samples r"]
    read_in: Float[Array, "r inputs"]
    irrelevant: Float[Array, "inputs i"]
    unseen: Float[Array, "inputs u"]
    unexplained: Float[Array, ""]
    rtol: float = eqx.field(static=True)

    @property
    def rank(self) -> int:
        """Rank of the best map, the least number of hidden units that solve the task."""
        return self.map_values.shape[-1]

    @property
    def best_map(self) -> Float[Array, "outputs inputs"]:
        """W*, the best map of least norm."""
        return product(self.map_left * self.map_values[None], self.map_right.T)

    @property
    def predictions(self) -> Float[Array, "samples outputs"]:
        """Yh, the best predictions."""
        return product(self.target_right * self.target_values[None], self.target_left.T)

    def __repr__(self) -> str:
        samples, inputs = self.x.shape[-2:]
        shape = f"samples={samples}, inputs={inputs}, outputs={self.y.shape[-1]}"
        rank = self.input_values.shape[-1]
        # No direction of weights is free of the inputs.
        coincide = ", GLS and LSS coincide" if rank == inputs else ""
        return f"Task({shape}, rank={self.rank}, input_rank={rank}, rtol={self.rtol:.2g}{coincide})"


@validated(finite=("x", "y"))
def make_task(
    x: Float[Array | np.ndarray, "samples inputs"],
    y: Float[Array | np.ndarray, "samples outputs"],
    *,
    rtol: float | None = None,
) -> Task:
    """Return the task of predicting y from x, decomposed on the host in float64.

    Args:
        x: Inputs, one row per sample. They are not centred.
        y: Targets.
        rtol: Fraction of the largest singular value of x, and of y for the best predictions, up to
            which singular values count as zero. Such components of x are removed. Default: the
            coarsest rounding of x, of y and of JAX's dtype for them, times the larger size of x, at
            most 300, by which directions are counted on columns divided by their sizes, so that
            units do not matter.

    Returns:
        The task, in the dtype of JAX for x and y. If singular values differ, a key draws the same
        networks from it on every processor, up to rounding.

    Raises:
        ValueError: If entries are not finite, or the inputs do not predict the targets at all.
        TypeError: If an array is traced, because its rank sets shapes.

    References:
        Braun, Grant and Saxe (2025), section 3.
    """
    check_known("its rank sets shapes", x=x, y=y)
    dtype = jnp.result_type(jnp.asarray(x[:1, :1]), jnp.asarray(y[:1, :1]))
    inputs = np.asarray(x, float)
    targets = np.asarray(y, float)
    if rtol is not None:
        check_non_negative("rtol", rtol)
        cutoff: Any = rtol
        return _decomposed(inputs, targets, cutoff, dtype)
    units = []
    for kind in (x.dtype, y.dtype, dtype):
        if jnp.issubdtype(kind, jnp.floating):
            units.append(float(jnp.finfo(kind).eps))
    rounding: float = min(max(x.shape), 300) * max(units)
    return _decomposed(inputs, targets, rounding, dtype, evens=True)


def check_semidefinite(name: str, matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eigenvalues and eigenvectors; raise unless a matrix is positive semidefinite."""
    values, vectors = np.linalg.eigh(0.5 * (matrix + matrix.T))
    slack = 1e-5 * float(np.abs(values).max())
    asymmetry = float(np.abs(matrix - matrix.T).max())
    if asymmetry > slack or values[0] < -slack:
        defects = (
            f"a least eigenvalue of {values[0]:.3g}, and a difference from its transpose of "
            f"{asymmetry:.3g}"
        )
        fail(name, "be symmetric and positive semidefinite", defects)
    return values, vectors


def _decomposed(
    x: np.ndarray, targets: np.ndarray, rtol: float, dtype: Any, *, evens: bool = False
) -> Task:
    """Return the task; with `evens`, directions are counted on columns divided by their units."""
    units = np.ones(x.shape[1])
    target_units = np.ones(targets.shape[1])
    if evens:
        units = column_units(x)
        target_units = column_units(targets)
    samples, values, inputs = np.linalg.svd(x, full_matrices=False)
    input_rank = num_directions(x / units, rtol)
    samples, inputs = _signed(samples[:, :input_rank], inputs[:input_rank].T)
    is_cut = values[input_rank:].any()
    values = values[:input_rank]
    if is_cut:
        x = (samples * values) @ inputs.T

    left_vectors, sizes, right_vectors = np.linalg.svd(targets.T @ samples, full_matrices=False)
    even_targets = targets / target_units
    predictions = svdvals(even_targets.T @ samples)
    rank = int(np.sum(predictions > rtol * np.linalg.norm(even_targets, 2)))
    if not rank:
        fail("y", "depend on x linearly", f"best predictions of zero, by `rtol` {rtol:.2g}")
    sizes = sizes[:rank]
    left_vectors, right_vectors = _signed(left_vectors[:, :rank], right_vectors[:rank].T)

    # The best map has the rank of the predictions: it is decomposed within their span.
    turn, strengths, directions = np.linalg.svd(
        (sizes[:, None] * right_vectors.T) / values, full_matrices=True
    )
    codes = samples @ right_vectors
    read, write = _signed(inputs @ directions[:rank].T, left_vectors @ turn)
    complement = np.linalg.qr(inputs, mode="complete")[0][:, input_rank:]
    residual = targets - (codes * sizes) @ left_vectors.T
    arrays = {
        "x": x,
        "y": targets,
        "input_basis": inputs,
        "input_values": values,
        "sample_basis": samples,
        "map_left": write,
        "map_values": strengths,
        "map_right": read,
        "target_left": left_vectors,
        "target_values": sizes,
        "target_right": codes,
        "read_in": (right_vectors.T / values) @ inputs.T,
        "irrelevant": _turned(inputs @ directions[rank:].T),
        "unseen": _turned(complement),
        "unexplained": np.sum(residual**2) / len(x),
    }
    return Task(**{name: jnp.asarray(array, dtype) for name, array in arrays.items()}, rtol=rtol)


# Processors choose signs of singular vectors and bases of null spaces differently, and with them
# what a key draws.
def _signed(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return pairs of singular vectors, in columns, with fixed signs.

    Each first vector has a positive product with a fixed vector.
    """
    is_positive = np.random.default_rng(0).normal(size=len(first)) @ first > 0
    return np.where(is_positive, first, -first), np.where(is_positive, second, -second)


def _turned(basis: np.ndarray) -> np.ndarray:
    """Return the orthonormal basis of a span that is nearest to fixed vectors."""
    fixed = np.random.default_rng(0).normal(size=basis.shape)
    left_vectors, _, right_vectors = np.linalg.svd(basis.T @ fixed)
    return basis @ left_vectors @ right_vectors


@validated
def random_task(
    num_samples: int,
    num_inputs: int,
    num_outputs: int,
    *,
    rank: int | None = None,
    input_rank: int | None = None,
    condition: float | None = None,
    noise: float = 0.0,
    key: PRNGKey,
) -> Task:
    """Return a task with Gaussian inputs, and targets of a Gaussian map.

    Args:
        num_samples: Samples.
        num_inputs: Inputs.
        num_outputs: Outputs.
        rank: Rank of the map, by default as large as possible.
        input_rank: Rank of the inputs, by default as large as possible.
        condition: Ratio of the largest to the smallest singular value of the inputs, geometrically
            spaced; by default that of Gaussian inputs.
        noise: Standard deviation of noise on targets, which raises the rank of the best map.
        key: Random key.
    """
    check_count("num_samples", num_samples, minimum=1)
    check_count("num_inputs", num_inputs, minimum=1)
    check_count("num_outputs", num_outputs, minimum=1)
    inner = min(num_samples, num_inputs)
    if input_rank is not None:
        inner = check_count("input_rank", input_rank, minimum=1, maximum=inner)
    largest_rank = min(inner, num_outputs)
    if rank is None:
        rank = largest_rank
    rank = check_count("rank", rank, minimum=1, maximum=largest_rank)
    check_non_negative("noise", noise)
    check_known("tasks are made on the host", key=key)
    rtol = 300 * float(np.finfo(float).eps)
    if condition is not None and not 1 <= condition < 1 / rtol:
        fail(
            "condition",
            f"be at least 1, and below {1 / rtol:.1e}, where directions count as zero",
            condition,
        )
    layers = pairwise((num_samples, inner, num_inputs, rank, num_outputs))
    shapes = [*layers, (num_samples, num_outputs)]
    ends = np.cumsum([rows * columns for rows, columns in shapes])
    drawn = np.asarray(jax.random.normal(key, (int(ends[-1]),)), float)
    draws = np.split(drawn, ends[:-1])
    matrices = [draw.reshape(shape) for draw, shape in zip(draws, shapes, strict=True)]
    first, second, inner_map, outer_map, noises = matrices

    left_vectors, values, right_vectors = np.linalg.svd(
        first @ second / np.sqrt(inner), full_matrices=False
    )
    if condition is not None:
        values[:inner] = np.sqrt(num_samples) * np.geomspace(condition**0.5, condition**-0.5, inner)
    x = (left_vectors[:, :inner] * values[:inner]) @ right_vectors[:inner]
    y = x @ inner_map @ outer_map / np.sqrt(num_inputs * rank)
    return _decomposed(x, y + noise * noises, rtol, jnp.zeros(0).dtype)


@validated
def teacher_task(
    x: Float[Array | np.ndarray, "samples inputs"],
    weights: Sequence[Float[Array | np.ndarray, "..."]],
    *,
    noise: float = 0.0,
    key: PRNGKey,
) -> Task:
    """Return the task of a linear teacher W_l ... W_1, whose targets may be noisy.

    Args:
        x: Inputs.
        weights: Weights of the teacher, [outputs, inputs] each, the first layer first.
        noise: Standard deviation of noise on targets.
        key: Random key of the noise.
    """
    check_non_negative("noise", noise)
    check_known("tasks are made on the host", x=x, weights=weights, key=key)
    y: Any = np.asarray(x)
    for index, weight in enumerate(map(np.asarray, weights)):
        if weight.ndim != 2 or weight.shape[1] != y.shape[1]:
            fail(f"weights[{index}]", f"have shape [outputs, {y.shape[1]}]", weight.shape)
        check_finite(f"weights[{index}]", weight)
        y = y @ weight.T
    draw = np.asarray(jax.random.normal(key, y.shape), y.dtype)
    return make_task(x, y + noise * draw)


@validated
def hierarchy_task(
    parents: Int[Array | np.ndarray, " nodes"],
    x: Float[Array | np.ndarray, "leaves inputs"] | None = None,
) -> Task:
    """Return the task of a semantic hierarchy, whose items are the leaves of a tree.

    A target is 1 for the leaf and its ancestors.

    Args:
        parents: Index of each node's parent, -1 for the root. Leaves are nodes without children.
        x: Inputs of the leaves in the order of nodes; default: one-hot.

    Returns:
        The task, with one output per node.

    Raises:
        ValueError: If `parents` is no tree.
        TypeError: If an argument is traced.

    References:
        Saxe, McClelland and Ganguli (2019), A mathematical theory of semantic development in deep
        neural networks.
    """
    check_known("tasks are made on the host", parents=parents)
    above = np.asarray(parents)
    nodes = np.arange(len(above))
    if np.sum(above == -1) != 1 or above.min() < -1 or above.max() >= len(above):
        fail("parents", "hold one -1, and indices of nodes", above.tolist())
    leaves = np.setdiff1d(nodes, above)
    y = np.zeros((len(nodes), len(nodes) + 1))  # the last column is the parent of the root
    reached = nodes
    for _ in nodes:
        y[nodes, reached] = 1
        reached = np.append(above, -1)[reached]
    if (reached != -1).any():
        fail("parents", "lead to the root from every node", above.tolist(), "They have a cycle")
    if x is not None and len(x) != len(leaves):
        fail("x", f"have a row per leaf ({len(leaves)})", np.shape(x))
    if x is None:
        x = np.eye(len(leaves), dtype=np.float32)
    return make_task(x, y[leaves, :-1].astype(np.float32))


@validated
def complete_tree(depth: int, branching: int = 2) -> Int[np.ndarray, " nodes"]:
    """Return the parents of a complete tree's nodes, level by level, for `hierarchy_task`."""
    check_count("depth", depth, minimum=1)
    check_count("branching", branching, minimum=2)
    number = sum(branching**level for level in range(depth + 1))
    if number > 10**8:
        fail("depth", "give a tree of at most 10^8 nodes", f"{number:.3g} nodes at depth {depth}")
    return (np.arange(number) - 1) // branching
