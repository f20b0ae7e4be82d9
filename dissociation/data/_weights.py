"""Weights from files into models, by name."""

import functools
import os
import re
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core.array_files import StoredArray, check_size, open_arrays, total_bytes
from dissociation._core.checks import fail, fail_kind, warn
from dissociation._core.conversion import KINDS, number_kind, to_device
from dissociation._core.validation import validated

Rename = Callable[[str], str | None] | Mapping[str, str | None]
"""Names of a model by names of a file."""

_MANY_UPDATES = 2**30
"""Number of updates after which running statistics of Equinox carry no bias."""

_MAX_NAMES = 12


@validated
def load_state(
    model: Any,
    path: str | os.PathLike[str],
    rename: Rename | None = None,
    convert: Callable[[str, np.ndarray], Any] | None = None,
    *,
    memory_budget: int | None = None,
) -> Any:
    """Return a model whose arrays are those of a file with the same names.

    Names are paths joined by dots, as PyTorch writes them: "blocks.3.fc.weight" is
    `model.blocks[3].fc.weight`. Shapes must be equal, up to axes of length 1, and nothing is
    transposed: an array of a square matrix fits either way, so compare outputs. Arrays take the
    dtype of the model.

    Args:
        model: Any PyTree, which may be abstract (`eqx.filter_eval_shape`); then memory holds the
            loaded model and one array of the file at most. In a pair (model, state), running means
            and variances ("norm.running_mean", "norm.running_var") go to the state of their
            `eqx.nn.BatchNorm`.
        path: A `.safetensors` file, the index of its shards, or an `.npz` file.
        rename: Function from a name of the file to a name of the model, or a dictionary in which
            each * of a name stands for any text, inserted at the * of the other name in order. The
            first entry that fits counts; a name that fits none stays. None leaves an array out.
        convert: Function from a name of the file and its array to the array that the model takes,
            for example `lambda name, array: array.T`.
        memory_budget: Largest size of the arrays together, in bytes. None is half of the free
            memory.

    Returns:
        The model, or the pair. Integers and booleans that the file lacks keep their values.

    Raises:
        RefusedFile: If the file is broken, a pickle, or larger than the budget.
        ValueError: If names or shapes differ.
        TypeError: If an array has numbers of another kind, such as complex ones for real ones.
        ImportError: If safetensors is not installed.

    Example:
        >>> model = eqx.nn.Linear(3, 2, key=jax.random.key(0))
        >>> load_state(model, "layer.safetensors", {"fc.*": "*"})  # doctest: +SKIP
    """
    arrays = _renamed(open_arrays(path), rename)
    check_size(path, total_bytes(arrays), memory_budget)
    names, like = _named(model)
    leaf_of_name = {}
    jax.tree.map(leaf_of_name.setdefault, names, like)
    leaf_of_name.pop("", None)
    _check_names(arrays, leaf_of_name)
    if convert is None:
        for name, array in arrays.items():
            _check_array(name, array, leaf_of_name[name])

    narrowed = []

    def loaded(name: str, leaf: Any) -> Any:
        if name not in arrays:
            return leaf
        array = arrays[name].read()
        if convert is not None:
            array = np.asarray(convert(arrays[name].name, array))
            _check_array(name, array, leaf)
        has_same_kind = number_kind(array.dtype) == number_kind(leaf.dtype)
        if has_same_kind and jnp.promote_types(array.dtype, leaf.dtype) != leaf.dtype:
            narrowed.append(f"{name} from {array.dtype} to {leaf.dtype}")
        array = _as_dtype(name, array.reshape(leaf.shape), leaf.dtype)
        if isinstance(leaf, np.ndarray):
            return array
        return jax.block_until_ready(jax.device_put(array, may_alias=False))

    model = jax.tree.map(loaded, names, like)
    if any(map(_is_abstract, jax.tree.leaves(model))):
        fail("model", "have no state but running statistics if it is abstract", "other state")
    if narrowed:
        warn(f"Arrays of {path} lose digits in the model's dtype: {_listed(narrowed)}.")
    return model


def _renamed(arrays: Mapping[str, StoredArray], rename: Rename | None) -> dict[str, StoredArray]:
    """Return arrays by names of the model, without those that are left out."""
    name_of: Any = rename
    if not callable(rename):
        name_of = functools.partial(_name_by_patterns, rename or {})
    renamed = {}
    for name, array in arrays.items():
        new_name = name_of(name)
        if new_name is None:
            continue
        if not isinstance(new_name, str):
            fail_kind("rename", "return a name or None", f"{new_name!r} for {name}")
        if new_name in renamed:
            fail("rename", "give each array a name of its own", f"{new_name} twice")
        renamed[new_name] = array
    return renamed


def _name_by_patterns(patterns: Mapping[str, str | None], name: str) -> str | None:
    """Return the new name that the first pattern gives, or the name."""
    for pattern, new_name in patterns.items():
        expression = "(.*)".join(map(re.escape, pattern.split("*")))
        match = re.fullmatch(expression, name)
        if match is None:
            continue
        if new_name is not None:
            for text in match.groups():
                new_name = new_name.replace("*", text, 1)
        return new_name
    return name


def _named(model: Any) -> tuple[Any, Any]:
    """Return a tree of names and a tree of leaves; leaves that no file holds have no name."""
    if not isinstance(model, tuple) or len(model) != 2 or not isinstance(model[1], eqx.nn.State):
        return _named_leaves(model), model
    module, state = model
    values, markers = state.tree_flatten()
    value_of_marker = dict(zip(markers, values, strict=True))
    name_of_marker: dict[Any, Any] = dict.fromkeys(markers, "")
    norms = jax.tree_util.tree_leaves_with_path(module, is_leaf=_is_norm)
    for path, norm in filter(lambda pair: _is_norm(pair[1]), norms):
        prefix = jax.tree_util.keystr((*path, ""), simple=True, separator=".")
        statistics = (f"{prefix}running_mean", f"{prefix}running_var")
        if norm.mode == "ema":
            name_of_marker[norm.ema_state_index.marker] = statistics
            value_of_marker[norm.ema_first_time_index.marker] = to_device(False, bool)
        else:
            name_of_marker[norm.batch_state_index.marker] = statistics
            value_of_marker[norm.batch_counter.marker] = to_device(_MANY_UPDATES, int)
    names = eqx.nn.State.tree_unflatten(markers, list(name_of_marker.values()))
    state = eqx.nn.State.tree_unflatten(markers, list(value_of_marker.values()))
    return (_named_leaves(module), names), (module, state)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _is_norm(node: Any) -> bool:
    return isinstance(node, eqx.nn.BatchNorm)


def _named_leaves(model: Any) -> Any:
    def is_index(node: Any) -> bool:
        return isinstance(node, eqx.nn.StateIndex)

    def name_of(path: Any, leaf: Any) -> str:
        # Keys of random numbers, functions and initial states are in no file.
        is_array = _is_abstract(leaf) or eqx.is_array(leaf) or isinstance(leaf, np.ndarray)
        if is_array and number_kind(leaf.dtype) in KINDS:
            return jax.tree_util.keystr(path, simple=True, separator=".")
        return ""

    return jax.tree_util.tree_map_with_path(name_of, model, is_leaf=is_index)


def _check_names(arrays: Mapping[str, StoredArray], leaf_of_name: Mapping[str, Any]) -> None:
    """Raise unless the arrays have the names of the model's leaves."""
    missing = []
    for name, leaf in leaf_of_name.items():
        is_needed = _is_abstract(leaf) or jnp.issubdtype(leaf.dtype, jnp.inexact)
        if is_needed and name not in arrays:
            missing.append(name)
    excess = []
    for name, array in arrays.items():
        if name not in leaf_of_name:
            excess.append(name if name == array.name else f"{array.name} as {name}")
    if not missing and not excess:
        return
    differences = []
    if missing:
        differences.append(f"none for {_listed(missing)}")
    if excess:
        differences.append(f"{_listed(excess)}, which `model` lacks")
    advice = "`rename` gives names of the model to names of the file, and None to leave one out"
    if any(name.endswith("running_mean") for name in excess):
        advice += ". Running means belong to a pair (model, state)"
    fail("path", "hold each array of `model`", "; ".join(differences), advice)


def _as_dtype(name: str, array: np.ndarray, dtype: Any) -> np.ndarray:
    """Return an array in a data type, or raise if finite numbers become infinite."""
    with np.errstate(over="ignore"):
        converted = array.astype(dtype, copy=False)
    is_narrower = converted.dtype != array.dtype and jnp.issubdtype(dtype, jnp.inexact)
    if is_narrower and (np.isinf(converted) & np.isfinite(array)).any():
        largest = np.abs(array[np.isfinite(array)]).max()
        fail("path", f"hold numbers that fit {dtype} as {name}", f"{largest:.3g}")
    return converted


def _listed(names: list[str]) -> str:
    text = ", ".join(names[:_MAX_NAMES])
    if len(names) > _MAX_NAMES:
        text += f" and {len(names) - _MAX_NAMES} more"
    return text


def _check_array(name: str, array: StoredArray | np.ndarray, leaf: Any) -> None:
    """Raise unless the array has the shape of the leaf, up to axes of length 1, and its kind."""
    kind = number_kind(array.dtype)
    kinds = KINDS[: KINDS.index(number_kind(leaf.dtype)) + 1]
    if kind not in kinds:
        fail_kind("path", f"hold numbers of dtype {leaf.dtype} as {name}", f"dtype {array.dtype}")
    lengths = [size for size in array.shape if size != 1]
    leaf_lengths = [size for size in leaf.shape if size != 1]
    if lengths == leaf_lengths:
        return
    advice = ""
    if sorted(lengths) == sorted(leaf_lengths):
        advice = "A transpose would fit: pass `convert`, such as lambda name, array: array.T"
    fail("path", f"hold {name} of shape {leaf.shape}", array.shape, advice)
