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
from dissociation.models._program import MOVES, Call, Walk, bound, evaluated, program_of


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
    """Return the rows that the weights at `path` multiply, and the contracted axes of the weights."""
    paths, _, leaves, program = program_of(model, call)
    check_takes("model", lambda x: program(leaves, x), jax.tree.map(lambda part: part[0], inputs))
    shape = np.shape(leaves[paths.index(path)])
    marks = [
        np.arange(np.prod(shape, dtype=int)).reshape(shape) if name == path else None
        for name in paths
    ]
    axes: list[tuple[int, ...]] = []

    def seen(x: Any) -> list[Array]:
        traced = jax.make_jaxpr(program)(leaves, x)
        watch = _Watch(shape)
        given = jax.tree.leaves(x)
        watch.run(traced.jaxpr, traced.consts, [*leaves, *given], [*marks, *(None for _ in given)])
        axes[:] = watch.axes
        return watch.rows

    # Null spaces need exact inputs, also on an accelerator.
    with jax.default_matmul_precision("highest"):
        found = jax.vmap(seen)(inputs)
    if not found:
        fail("path", "name weights that something is multiplied by, as a whole", repr(path))
    if len(set(axes)) > 1:
        fail(
            "path",
            "name weights that are multiplied along the same axes wherever they are used",
            repr(path),
        )
    return jnp.concatenate([part.reshape(-1, part.shape[-1]) for part in found]), axes[0]


class _Watch(Walk):
    """Recorder of the vectors that given weights multiply; marks are flat indices into the weights."""

    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape
        self.rows: list[Array] = []
        self.axes: list[tuple[int, ...]] = []

    def at(self, equation: Any, values: list[Any], marks: list[Any]) -> tuple[list[Any], Any]:
        """Return the results of an operation and their marks."""
        name, params = equation.primitive.name, parameters(equation)
        if name == "scan" and any(mark is not None for mark in marks[: params["num_consts"]]):
            return self._in_loop(params, values, marks), None
        if name == "dot_general":
            self._at_product(params["dimension_numbers"], values, marks)
        if name == "conv_general_dilated" and marks[1] is not None:
            self._at_convolution(params, values[0], marks[1])
        mark = None
        if marks and marks[0] is not None and name in MOVES:
            # Places are NumPy arrays; the trace around them must not turn them into tracers.
            with jax.ensure_compile_time_eval():
                moved = params | (
                    {"new_dtype": np.dtype(np.int32)} if "new_dtype" in params else {}
                )
                mark = np.asarray(equation.primitive.bind(marks[0], **moved))
        return bound(equation, values), mark

    def _in_loop(self, params: Any, values: list[Any], marks: list[Any]) -> list[Any]:
        """Return the results of a loop, the same weights in every iteration, and record rows."""
        num_consts, num_carry, inner = params["num_consts"], params["num_carry"], params["jaxpr"]
        consts, carry, xs = np.split(np.arange(len(values)), [num_consts, num_consts + num_carry])
        own = [*marks[:num_consts], *(None for _ in (*carry, *xs))]
        axes: list[tuple[int, ...]] = []

        def body(carried: list[Array], x: list[Array]) -> Any:
            watch = _Watch(self.shape)
            found = watch.run(
                inner.jaxpr, inner.consts, [*(values[i] for i in consts), *carried, *x], own
            )
            axes[:] = watch.axes
            results = [value for value, _ in found]
            return results[:num_carry], (results[num_carry:], watch.rows)

        options = {name: params[name] for name in ("length", "reverse")}
        last, (each, rows) = jax.lax.scan(
            body, [values[i] for i in carry], [values[i] for i in xs], **options
        )
        self.rows += [part.reshape(-1, part.shape[-1]) for part in rows]
        self.axes += axes
        return [*last, *each]

    def _note(self, rows: Array, places: np.ndarray) -> None:
        """Record rows that weights at flat indices `places` multiply."""
        # Features come in the order of the weights, which the program may transpose.
        order = np.argsort(places)
        coordinates = np.unravel_index(places[order], self.shape)
        self.axes.append(tuple(k for k, each in enumerate(coordinates) if len(np.unique(each)) > 1))
        self.rows.append(rows[..., order])

    def _at_product(self, numbers: Any, values: list[Any], marks: list[Any]) -> None:
        contracted, batched = numbers
        for side in (0, 1):
            if marks[side] is None:
                continue
            own, other = contracted[side], contracted[1 - side]
            if batched[side]:
                wanted = "name weights that are the same for all of a batch"
                fail("path", wanted, "weights in a product with batch axes")
            weights = np.moveaxis(marks[side], own, range(len(own)))
            count = int(np.prod(weights.shape[: len(own)]))
            vectors = jnp.moveaxis(values[1 - side], other, range(-len(other), 0))
            self._note(vectors.reshape(-1, count), weights.reshape(count, -1)[:, 0])

    def _at_convolution(self, params: Any, image: Array, mark: np.ndarray) -> None:
        numbers = params["dimension_numbers"]
        if params["feature_group_count"] != 1 or params["batch_group_count"] != 1:
            fail("path", "name weights of a convolution without groups", "groups")
        spatial = tuple(mark.shape[k] for k in numbers.rhs_spec[2:])
        patches = jax.lax.conv_general_dilated_patches(
            image, spatial, params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"],
            dimension_numbers=numbers, precision=jax.lax.Precision.HIGHEST,
        )  # fmt: skip
        weights = np.transpose(mark, numbers.rhs_spec)[0].reshape(
            -1
        )  # channels, then kernel positions
        self._note(
            jnp.moveaxis(patches, numbers.out_spec[1], -1).reshape(-1, len(weights)), weights
        )
