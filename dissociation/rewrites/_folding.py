"""Evaluate operations on constants in NumPy, which compiles no program."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Params = dict[str, Any]


def _iota(params: Params) -> np.ndarray:
    shape = params["shape"]
    axis = params["dimension"]
    size = shape[axis]
    lengths = [1] * len(shape)
    lengths[axis] = size
    indices = np.arange(size).reshape(lengths)
    return np.broadcast_to(indices, shape)


def _broadcast(params: Params, value: np.ndarray) -> np.ndarray:
    shape = params["shape"]
    lengths = [1] * len(shape)
    for axis, size in zip(params["broadcast_dimensions"], value.shape, strict=True):
        lengths[axis] = size
    return np.broadcast_to(value.reshape(lengths), shape)


def _slice(params: Params, value: np.ndarray) -> np.ndarray:
    starts = params["start_indices"]
    stops = params["limit_indices"]
    strides = params["strides"] or (1,) * value.ndim
    slices = tuple(map(slice, starts, stops, strides))
    return value[slices]


def _divide(_: Params, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if a.dtype.kind not in "iu":
        return a / b
    # Integers are divided towards zero.
    remainder = np.fmod(a, b)
    return (a - remainder) // b


ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "neg": np.negative,
    "rem": np.fmod,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.bitwise_not,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}

FOLDS: dict[str, Callable[..., np.ndarray]] = {
    "div": _divide,
    "select_n": lambda _, index, *cases: np.choose(index.astype(int), cases),
    "convert_element_type": lambda _, value: value,  # `folded` converts the result
    "concatenate": lambda params, *values: np.concatenate(values, params["dimension"]),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda params, value: value.reshape(params["new_sizes"]),
    "squeeze": lambda params, value: value.squeeze(params["dimensions"]),
    "slice": _slice,
    "transpose": lambda params, value: value.transpose(params["permutation"]),
    "rev": lambda params, value: np.flip(value, params["dimensions"]),
}


def is_foldable(equation: Any) -> bool:
    """Return True if `folded` evaluates an operation."""
    name = equation.primitive.name
    return name in ELEMENTWISE or name in FOLDS


def folded(equation: Any, values: Sequence[np.ndarray]) -> np.ndarray:
    """Return the result of an operation on constants, in the dtype that JAX gives it."""
    name = equation.primitive.name
    operands = []
    for value, atom in zip(values, equation.invars, strict=True):
        operands.append(np.asarray(value, atom.aval.dtype))
    dtype = equation.outvars[0].aval.dtype
    with np.errstate(all="ignore"):
        if name in ELEMENTWISE:
            return np.asarray(ELEMENTWISE[name](*operands)).astype(dtype)
        return np.asarray(FOLDS[name](equation.params, *operands)).astype(dtype)
