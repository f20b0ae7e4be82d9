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
from koopman._models import _lifting
from koopman._operators import _estimators, _kernels, _operator

_FORMAT = "koopman model 3"


def _class_of_name(classes: tuple[type, ...]) -> dict[str, Any]:
    """Return the classes that files may hold: these, and those of the lifting and of `fit`."""
    class_of_name: dict[str, Any] = {kind.__name__: kind for kind in classes}
    for module in (_lifting, _estimators, _kernels, _operator):
        entries: dict[str, Any] = vars(module)
        for name, kind in entries.items():
            if dataclasses.is_dataclass(kind):
                class_of_name[name] = kind
    return class_of_name


def write_model(model: Any, path: str | Path, classes: tuple[type, ...]) -> None:
    """Write a model to an `.npz` file.

    Args:
        model: Module of numbers, arrays, and classes of this package.
        path: Name of the file.
        classes: Classes of the model that are neither of the lifting nor of `koopman.fit`.
    """
    class_of_name = _class_of_name(classes)
    arrays: dict[str, Any] = {}

    def encoded(value: Any) -> Any:
        """Return what JSON cannot write as a dictionary, a number or text."""
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, np.ndarray | jax.Array):
            name = f"array_{id(value)}"  # once if two fields share it
            arrays[name] = np.asarray(value)
            return {"array": name}
        kind = type(value).__name__
        if class_of_name.get(kind) is type(value):
            names = [field.name for field in dataclasses.fields(value)]
            fields = {name: getattr(value, name) for name in names}
            if callable(fields.get("features")):
                fields["features"] = {"is_function": True}
            return {"class": kind, "fields": fields}
        if callable(value):
            advice = "Pass it as features=, which load_model takes again"
            fail_kind("kernel", "be one of koopman to be saved", kind, advice)
        return str(value)

    tree = json.dumps({"format": _FORMAT, "model": model}, default=encoded)
    buffer = io.BytesIO()
    np.savez(buffer, tree=np.asarray(tree), **arrays)
    write_bytes(_with_suffix(path), buffer.getvalue())


def read_model(path: str | Path, classes: tuple[type, ...], features: Any) -> Any:
    """Read the model of a file; `features` stand where it had features."""
    path = _with_suffix(path)
    class_of_name = _class_of_name(classes)

    def decoded(entries: dict[str, Any]) -> Any:
        """Return the value of a dictionary that `write_model` wrote."""
        if "array" in entries:
            return arrays[entries["array"]]
        if "is_function" in entries:
            return entries if features is None else features
        if "class" not in entries:
            return entries
        module = object.__new__(class_of_name[entries["class"]])
        for name, value in entries["fields"].items():
            object.__setattr__(module, name, _with_tuples(value))
        return module

    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        tree = json.loads(str(arrays["tree"]), object_hook=decoded)
        if tree["format"] != _FORMAT:
            raise ValueError(f"format {tree['format']!r}")
        return tree["model"]
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = str(error).partition("\n")[0]
        fail("path", "be a file of KoopmanModel.save", f"{path} ({reason})")


def _with_suffix(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".npz" else path.with_name(f"{path.name}.npz")


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
