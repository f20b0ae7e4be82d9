"""What a figure leaves on disk besides pictures: arrays, a description of the run, and parts to resume from."""

import dataclasses
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dissociation import checkpoint

Arrays = dict[str, np.ndarray]


def save_arrays(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray]) -> None:
    """Writes an `.npz` file atomically."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".npz", delete=False) as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    os.replace(file.name, target)


def save_description(path: str | os.PathLike[str], description: Mapping[str, Any]) -> None:
    """Writes JSON with `description`, and the versions and devices that the run had."""
    packages = ("dissociation", "jax", "jaxlib", "equinox", "optax", "numpy")
    environment = {
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in packages},
        "devices": [str(device) for device in jax.devices()],
    }
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # What is not finite has no place in JSON: null.
    plain = json.dumps({**description, "environment": environment}, default=_plain)
    strict = json.loads(plain, parse_constant=lambda _: None)
    target.write_text(json.dumps(strict, indent=2) + "\n")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return np.asarray(value).tolist()


def _as_read(value: Any) -> Any:
    """What comes back after writing to JSON."""
    return json.loads(json.dumps(value, default=_plain))


def _differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


class Parts:
    """Named pieces of a long computation, each kept in a folder as soon as it is done.

    A piece is a dictionary of arrays. It belongs to an identity (configuration, key and data): a folder with pieces
    of another one is refused rather than mixed in.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]):
        self.folder = None if folder is None else Path(folder)
        self.seconds: dict[str, float] = {}
        if self.folder is None:
            return
        wanted = _as_read(dict(identity))
        path = self.folder / "identity.json"
        if path.exists() and (different := _differences(json.loads(path.read_text()), wanted)):
            raise ValueError(
                f"`folder` must hold parts of the same run, got {self.folder}, whose {', '.join(different)} differ. "
                "Name another folder, or start anew by deleting it."
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted))

    def path(self, name: str) -> Path | None:
        """Where a piece called `name` may keep a file of its own; None without a folder."""
        return None if self.folder is None else self.folder / name

    def get(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Arrays:
        """The piece called `name`: read if it is there, else computed, timed and kept."""
        path = self.path(f"{name}.npz")
        if path is not None and path.exists():
            with np.load(path) as file:
                arrays = dict(file)
            self.seconds[name] = float(arrays.pop("seconds"))
            return arrays
        began = time.perf_counter()
        arrays = {key: np.asarray(value) for key, value in compute().items()}
        self.seconds[name] = time.perf_counter() - began
        if path is not None:
            save_arrays(path, {**arrays, "seconds": np.asarray(self.seconds[name])})
        return arrays


def identity_of(config: Any, key: jax.Array, data: Any) -> dict[str, Any]:
    """What makes two runs the same: configuration, key, and the contents of the data."""
    return {"config": config, "key": checkpoint.fingerprint(key), "data": checkpoint.fingerprint(data)}


def check_parts_of(folder: str | os.PathLike[str], config: Any) -> None:
    """Raises unless `folder` holds parts of a run with this configuration.

    Raises:
        FileNotFoundError: If it holds no parts.
        ValueError: If they are of another configuration.
    """
    path = Path(folder) / "identity.json"
    if not path.exists():
        raise FileNotFoundError(f"`folder` must hold parts of a run, got {folder}, without {path.name}.")
    if different := _differences(json.loads(path.read_text())["config"], _as_read(config)):
        raise ValueError(
            f"`folder` must hold parts of a run of this configuration, got {folder}, "
            f"whose {', '.join(different)} differ."
        )
