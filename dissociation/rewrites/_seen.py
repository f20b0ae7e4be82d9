"""Inputs of any layer of a model: the vectors that its weights are multiplied by."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dissociation._core._compat import parameters
from dissociation._core.checks import check_takes, fail
from dissociation._core.conversion import as_examples
from dissociation._core.results import printed
from dissociation._core.validation import validated
from dissociation.models._program import MOVES, Call, Walk, bound, evaluated, program_of, run_loop


class LayerInputs(NamedTuple):
    """Inputs of a layer.

    Attributes:
        path: Path of the weights, as in `Slot.path`.
        leaf: Index of the weights among the model's floating-point arrays.
        axes: Axes of the weights that are contracted with the inputs.
        rows: A row per example and position of use, such as a pixel or a token, [rows, features],
            features in the order of `axes`.
        shape: Shape of the weights.
    """

    path: str
    leaf: int
    axes: tuple[int, ...]
    rows: Float[Array, "rows features"]
    shape: tuple[int, ...]

    __repr__ = printed


@validated
def layer_inputs(model: Any, inputs: Any, path: str, *, call: Call | None = None) -> LayerInputs:
    """Return the inputs of a layer of any model.

    Args:
        model: See `rewrites.neuron_groups`.
        inputs: Examples, samples first: an array, or a dictionary or tuple of arrays.
        path: Path of the weights, such as ".layers[1].weight".
        call: See `rewrites.neuron_groups`.

    Raises:
        TypeError: If the model does not accept the examples.
        ValueError: If there is no such array, or no product uses it as a whole, as in a loop over
            it.
    """
    paths, _, leaves, _ = program_of(model, call)
    if path not in paths:
        fail("path", f"be one of {', '.join(paths)}", repr(path))
    inputs = as_examples("inputs", inputs)
    rows, axes = evaluated(_layer_rows, model, inputs, path, call, may_cache=call is None)
    leaf = paths.index(path)
    return LayerInputs(path, leaf, axes, rows, np.shape(leaves[leaf]))


def _layer_rows(
    model: Any, inputs: Any, path: str, call: Call | None
) -> tuple[Array, tuple[int, ...]]:
    """Return the rows that the weights at `path` multiply, and their contracted axes."""
    paths, _, leaves, program = program_of(model, call)
    example = jax.tree.map(lambda array: array[0], inputs)
    check_takes("model", lambda x: program(leaves, x), example)
    leaf = paths.index(path)
    shape = np.shape(leaves[leaf])
    marks: list[Any] = [None] * len(leaves)
    marks[leaf] = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    axes: list[tuple[int, ...]] = []

    def recorded(x):
        traced = jax.make_jaxpr(program)(leaves, x)
        watch = _Watch(shape)
        arrays = jax.tree.leaves(x)
        input_marks = marks + [None] * len(arrays)
        watch.run(traced.jaxpr, traced.consts, [*leaves, *arrays], input_marks)
        axes[:] = watch.axes
        return watch.rows

    # Null spaces need exact inputs, also on an accelerator.
    with jax.default_matmul_precision("highest"):
        rows_of_uses = jax.vmap(recorded)(inputs)
    if not rows_of_uses:
        fail("path", "name weights that something is multiplied by, as a whole", repr(path))
    if len(set(axes)) > 1:
        wanted_weights = (
            "name weights that are multiplied along the same axes wherever they are used"
        )
        fail("path", wanted_weights, repr(path))
    return jnp.concatenate(_flattened(rows_of_uses)), axes[0]


def _flattened(rows_of_uses: list[Array]) -> list[Array]:
    """Return rows [..., features] of each use of the weights as [rows, features]."""
    return [rows.reshape(-1, rows.shape[-1]) for rows in rows_of_uses]


class _Watch(Walk):
    """Recorder of the vectors that weights multiply; marks are flat indices into the weights."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.rows: list[Array] = []
        self.axes: list[tuple[int, ...]] = []

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return the results of an operation and their marks."""
        name = equation.primitive.name
        params = parameters(equation)
        if name == "scan" and any(mark is not None for mark in marks[: params["num_consts"]]):
            return self._in_loop(equation, values, marks), None
        if name == "dot_general":
            self._at_product(params["dimension_numbers"], values, marks)
        if name == "conv_general_dilated" and marks[1] is not None:
            self._at_convolution(params, values[0], marks[1])
        mark = None
        if marks and marks[0] is not None and name in MOVES:
            if "new_dtype" in params:
                params = params | {"new_dtype": np.dtype(np.int32)}
            # Marks are NumPy arrays; the trace around them must not turn them into tracers.
            with jax.ensure_compile_time_eval():
                mark = np.asarray(equation.primitive.bind(marks[0], **params))
        return bound(equation, values), mark

    def _in_loop(self, equation: Any, values: list[Any], marks: list[Any]) -> list[Any]:
        """Return the results of a loop, the same weights in every iteration, and record rows."""
        params = parameters(equation)
        program = params["jaxpr"]
        num_consts = params["num_consts"]
        loop_marks = marks[:num_consts] + [None] * (len(values) - num_consts)
        axes: list[tuple[int, ...]] = []

        def body(operands, _):
            watch = _Watch(self.shape)
            outputs = watch.run(program.jaxpr, program.consts, operands, loop_marks)
            axes[:] = watch.axes
            return [value for value, _ in outputs], watch.rows

        results, rows = run_loop(equation, values, body)
        self.rows += _flattened(rows)
        self.axes += axes
        return results

    def _note(self, rows: Array, indices: np.ndarray) -> None:
        """Record rows that weights at flat indices multiply."""
        # Features come in the order of the weights, which the program may transpose.
        order = np.argsort(indices)
        axes = []
        for axis, coordinates in enumerate(np.unravel_index(indices[order], self.shape)):
            if len(np.unique(coordinates)) > 1:
                axes.append(axis)
        self.axes.append(tuple(axes))
        self.rows.append(rows[..., order])

    def _at_product(self, numbers: Any, values: list[Any], marks: list[Any]) -> None:
        contracted, batched = numbers
        for side in (0, 1):
            if marks[side] is None:
                continue
            if batched[side]:
                wanted_weights = "name weights that are the same for all of a batch"
                fail("path", wanted_weights, "weights in a product with batch axes")
            num_axes = len(contracted[side])
            weights = np.moveaxis(marks[side], contracted[side], range(num_axes))
            width = int(np.prod(weights.shape[:num_axes]))
            vectors = jnp.moveaxis(values[1 - side], contracted[1 - side], range(-num_axes, 0))
            indices = weights.reshape(width, -1)[:, 0]
            self._note(vectors.reshape(-1, width), indices)

    def _at_convolution(self, params: Any, image: Array, mark: np.ndarray) -> None:
        numbers = params["dimension_numbers"]
        if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
            fail("path", "name weights of a convolution without groups", "groups")
        patches = jax.lax.conv_general_dilated_patches(
            image,
            [mark.shape[axis] for axis in numbers.rhs_spec[2:]],
            params["window_strides"],
            params["padding"],
            params["lhs_dilation"],
            params["rhs_dilation"],
            dimension_numbers=numbers,
            precision=jax.lax.Precision.HIGHEST,
        )
        vectors = jnp.moveaxis(patches, numbers.out_spec[1], -1)
        # Channels, then kernel positions.
        indices = np.transpose(mark, numbers.rhs_spec)[0].reshape(-1)
        self._note(vectors.reshape(-1, len(indices)), indices)
