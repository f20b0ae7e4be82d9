"""Write models to `.npz` files without pickle, and read them."""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from dissociation._core.checks import check_known, fail, fail_kind
from dissociation._core.files import write_bytes
from dissociation._core.validation import validated
from koopman._models._lifting import (
    Lifted,
    Lifting,
    Recipe,
    StateBasis,
    as_features,
    state_features,
)
from koopman._models._model import KoopmanModel, Meaning, Series
from koopman._operators import _kernels, _operator
from koopman._operators._estimators import PrincipalComponents, ReducedRank, Ridge

_KERNELS = (
    _kernels.Linear,
    _kernels.RBF,
    _kernels.Laplacian,
    _kernels.Matern,
    _kernels.Polynomial,
)
_CLASSES = (
    *_KERNELS,
    _kernels.KernelMap,
    _kernels.LinearMap,
    _operator.Operator,
    _operator.Fitting,
    _operator.FitSettings,
    Ridge,
    PrincipalComponents,
    ReducedRank,
    Recipe,
    Lifting,
    StateBasis,
    Lifted,
    Series,
    Meaning,
    KoopmanModel,
)
_CLASS_OF_NAME = {kind.__name__: kind for kind in _CLASSES}
_FORMAT = "koopman model 1"
_PROBES = 8
"""Number of states at which features are compared with those of the fit."""


def save_model(model: KoopmanModel, path: str | Path) -> None:
    """Write a model to an `.npz` file.

    Raises:
        TypeError: If its kernel is not one of koopman.
    """
    check_known("a file holds numbers", model=eqx.filter(model, eqx.is_array))
    arrays = {}
    tree = _encoded(model, "model", arrays)
    words = json.dumps({"format": _FORMAT, "model": tree})
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.asarray(words), **arrays)
    write_bytes(_with_suffix(path), buffer.getvalue())


def _with_suffix(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


def _encoded(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value as JSON, and store its arrays by name."""
    if name.endswith(".features") and not isinstance(value, np.ndarray | None):
        return {"features": True}
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray | jax.Array):
        arrays[name] = np.asarray(value)
        return {"array": name}
    if type(value) in _CLASSES:
        fields = {}
        for field in _field_names(type(value)):
            fields[field] = _encoded(getattr(value, field), f"{name}.{field}", arrays)
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{name}.{i}", arrays) for i, item in enumerate(value)]
        return {"tuple": items}
    if ".kernel" in name:
        fail_kind(
            "kernel",
            "be one of koopman to be saved",
            type(value).__name__,
            "Pass it as features=, which load_model takes again",
        )
    return str(value)


def _field_names(kind: Any) -> list[str]:
    if hasattr(kind, "_fields"):
        return list(kind._fields)
    return [field.name for field in dataclasses.fields(kind)]


@validated
def load_model(path: str | Path, features: Any = None) -> KoopmanModel:
    """Read a model that `KoopmanModel.save` wrote.

    Args:
        path: Name of the file.
        features: Features of the fit, if it had some. A file does not hold functions.

    Raises:
        ValueError: If the file holds no model, or features are missing or are not those of the
            fit.
    """
    path = _with_suffix(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            tree = json.loads(str(file["tree"]))
            arrays = {name: file[name] for name in file.files if name != "tree"}
    except (ValueError, KeyError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        fail("path", "be a file of KoopmanModel.save", f"{path} ({reason})")
    if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
        fail("path", "be a file of KoopmanModel.save", path)
    model = _decoded(tree["model"], arrays, as_features(features))
    _check_features(model, features)
    return model


def _decoded(tree: Any, arrays: dict[str, np.ndarray], features: Any) -> Any:
    """Return the value of JSON and arrays."""
    if not isinstance(tree, dict):
        return tree
    if "features" in tree:
        return features
    if "array" in tree:
        return arrays[tree["array"]]
    if "tuple" in tree:
        return tuple(_decoded(item, arrays, features) for item in tree["tuple"])
    kind = _CLASS_OF_NAME[tree["class"]]
    fields = {}
    for name, field in tree["fields"].items():
        fields[name] = _decoded(field, arrays, features)
    if hasattr(kind, "_fields"):
        return kind(**fields)
    module = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(module, name, field)
    return module


def _check_features(model: KoopmanModel, features: Any) -> None:
    """Raise unless features are those of the fit, at its first states."""
    series = model.series
    if series.coordinates is None:
        if features is not None:
            fail("features", "be None: the model has none", "a function")
        return
    if features is None:
        fail("features", "be given again: files do not hold functions", "None")
    values = state_features(
        model.recipe.features, series.observed[:_PROBES], model.recipe.state_shape
    )
    expected = series.coordinates[: len(values)]
    is_same = values.shape == expected.shape
    tolerance = 1e-5 * np.abs(expected).max()
    if not is_same or not np.allclose(values, expected, rtol=1e-5, atol=tolerance):
        fail(
            "features",
            "be the function of the fit",
            "other values at its first states",
            "Load the parameters of the fit",
        )
