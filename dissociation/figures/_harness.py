"""Compute datasets of figures, and read their settings."""

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Array

from dissociation._core.datasets import as_json
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder, identity_of

if TYPE_CHECKING:
    import xarray


def run(
    body: Callable[..., "xarray.Dataset"],
    config: Any,
    *,
    key: Array,
    data: Any,
    cache: CacheFolder,
    progress: AnyMeter = None,
) -> "xarray.Dataset":
    """Return `body(config, key, data, cache)`, a dataset, with the configuration as an attribute.

    Args:
        body: Function that computes the dataset, with an open `Cache`.
        config: Options of the figure.
        key: Key of all randomness.
        data: Data, or None if the figure simulates them.
        cache: Folder of cached arrays, or an open `Cache` of this run; None keeps nothing.
        progress: Meter: "auto", "terminal", a function that opens one, or None.
    """
    if isinstance(cache, Cache):
        return described(body(config, key, data, cache), config)
    with Cache(cache, identity_of(config, key, np.zeros(0) if data is None else data), progress) as opened:
        return described(body(config, key, data, opened), config)


def described(dataset: "xarray.Dataset", config: Any) -> "xarray.Dataset":
    """Return the dataset with the configuration as an attribute, JSON."""
    return dataset.assign_attrs(config=json.dumps(as_json(config)))


def decoded(value: Any) -> Any:
    """Return `value` decoded from JSON, or unchanged if it is not JSON."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):  # a number or a sentence
        return value


def config_of(dataset: "xarray.Dataset") -> SimpleNamespace:
    """Return the configuration of a figure's dataset; tuples are lists."""
    return SimpleNamespace(**json.loads(dataset.attrs["config"]))


def rows(array: "xarray.DataArray", axis: str) -> "dict[str, np.ndarray]":
    """Return the arrays along an axis by coordinate, without arrays of NaN alone."""
    known = {str(name): array.sel({axis: name}).values for name in array[axis].values}
    return {name: values for name, values in known.items() if not np.isnan(values).all()}


def padded(arrays: Sequence[np.ndarray], fill: float | int = np.nan) -> np.ndarray:
    """Return arrays of equal rank stacked along a new first axis, padded with `fill` to the largest sizes."""
    sizes = np.max([array.shape for array in arrays], 0)
    kinds = [array.dtype for array in arrays]
    stacked = np.full((len(arrays), *sizes), fill, np.result_type(*kinds))
    for place, array in zip(stacked, arrays, strict=True):
        place[tuple(map(slice, array.shape))] = array
    return stacked
