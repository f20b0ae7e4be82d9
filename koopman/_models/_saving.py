"""Write models to `.npz` files without pickle, and read them."""

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dissociation._core.checks import fail, fail_kind
from dissociation._core.files import write_bytes
from koopman._models._lifting import Lifted, Lifting, Recipe, StateBasis
from koopman._operators import _kernels, _operator
from koopman._operators._estimators import PrincipalComponents, ReducedRank, Ridge

_CLASSES = (
    _kernels.Linear,
    _kernels.RBF,
    _kernels.Laplacian,
    _kernels.Matern,
    _kernels.Polynomial,
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
)
_FORMAT = "koopman model 1"


def write_model(model: Any, path: str | Path, classes: tuple[type, ...]) -> None:
    """Write a model to an `.npz` file.

    Args:
        model: Module of numbers, arrays, and classes of this package.
        path: Name of the file.
        classes: Classes of the model that are not listed here.
    """
    arrays: dict[str, np.ndarray] = {}
    tree = _encoded(model, "model", arrays, (*_CLASSES, *classes))
    words = json.dumps({"format": _FORMAT, "model": tree})
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.asarray(words), **arrays)  # pyright: ignore[reportArgumentType]
    write_bytes(_with_suffix(path), buffer.getvalue())


def read_model(path: str | Path, classes: tuple[type, ...], features: Any) -> Any:
    """Read the model of a file; `features` stand where it had features."""
    path = _with_suffix(path)
    try:
        with np.load(path, allow_pickle=False) as file:
            tree = json.loads(str(file["tree"]))
            arrays = {name: file[name] for name in file.files if name != "tree"}
        if tree["format"] != _FORMAT:
            raise ValueError(f"format {tree['format']!r}")
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        fail("path", "be a file of KoopmanModel.save", f"{path} ({reason})")
    class_of_name = {kind.__name__: kind for kind in (*_CLASSES, *classes)}
    return _decoded(tree["model"], arrays, features, class_of_name)


def _with_suffix(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


def _encoded(
    value: Any, name: str, arrays: dict[str, np.ndarray], classes: tuple[type, ...]
) -> Any:
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
    if type(value) in classes:
        fields = {}
        for field in _field_names(type(value)):
            fields[field] = _encoded(getattr(value, field), f"{name}.{field}", arrays, classes)
        return {"class": type(value).__name__, "fields": fields}
    if isinstance(value, list | tuple):
        items = [_encoded(item, f"{name}.{i}", arrays, classes) for i, item in enumerate(value)]
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


def _decoded(
    tree: Any, arrays: dict[str, np.ndarray], features: Any, class_of_name: dict[str, Any]
) -> Any:
    """Return the value of JSON and arrays."""
    if not isinstance(tree, dict):
        return tree
    if "features" in tree:
        return features
    if "array" in tree:
        return arrays[tree["array"]]
    if "tuple" in tree:
        return tuple(_decoded(item, arrays, features, class_of_name) for item in tree["tuple"])
    kind = class_of_name[tree["class"]]
    fields = {}
    for name, field in tree["fields"].items():
        fields[name] = _decoded(field, arrays, features, class_of_name)
    if hasattr(kind, "_fields"):
        return kind(**fields)
    module = object.__new__(kind)
    for name, field in fields.items():
        object.__setattr__(module, name, field)
    return module
