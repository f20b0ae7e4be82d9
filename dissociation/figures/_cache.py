"""Cached arrays of a run, from which a figure resumes."""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core import checks
from dissociation._core.datasets import as_json, check_sizes
from dissociation._core.files import RefusedFile, locked, reading, replacing, write_bytes
from dissociation.training import _checkpoint as checkpoint
from dissociation.training._progress import MeterFactory, open_meter

Arrays = dict[str, np.ndarray]
AnyMeter = str | MeterFactory | None

IDENTITY = "identity.json"
"""File with the identity of a folder's run."""

_RUN, _CHECKSUM = "run_digest", "checksum"


def read_part(path: Path, digest: str) -> Arrays:
    """Return the arrays that `Cache.save` wrote.

    Raises:
        RefusedFile: If the file is broken, was changed or renamed, or has another digest.
        OSError: If it cannot be opened.
    """
    with reading(path, "Delete it to compute this part again."):
        check_sizes(path)
        with open(path, "rb") as opened, np.load(opened) as file:
            arrays = dict(file)
    run, checksum = (str(arrays.pop(name, "")) for name in (_RUN, _CHECKSUM))
    if run != digest:
        raise RefusedFile(f"{path} belongs to another run. Delete it to compute this part again.")
    if checksum != _checksum(path, arrays, digest):
        raise RefusedFile(
            f"{path} was changed or renamed since it was written. Delete it to compute it again."
        )
    return arrays


def _checksum(path: Path, arrays: Arrays, digest: str) -> str:
    return checkpoint.fingerprint(
        [np.asarray(f"{digest} {path.name}"), dict(sorted(arrays.items()))]
    )


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries in which two identities differ; of "config", the names of its settings."""
    names = sorted(
        name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name)
    )
    one, other = stored.get("config"), wanted.get("config")
    if "config" in names and isinstance(one, dict) and isinstance(other, dict):
        names.remove("config")
        names += differences(one, other)
    return names


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return a hexadecimal hash of an identity."""
    return checkpoint.fingerprint(np.asarray(json.dumps(as_json(dict(identity)), sort_keys=True)))


def identity_of(config: Any, key: jax.Array, data: Any) -> dict[str, Any]:
    """Return the identity of a run: configuration, hashes of key and data, and precision."""
    prints = {"key": key, "data": np.zeros(0) if data is None else data}
    prints = {name: checkpoint.fingerprint(value) for name, value in prints.items()}
    return {"config": as_json(config), **prints, "precision": str(jnp.result_type(float))}


def read_identity(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the identity of a folder's run."""
    path, advice = Path(folder) / IDENTITY, "Delete or move its folder to start from scratch."
    if not path.is_file():
        raise FileNotFoundError(
            f"`folder` must hold parts of a run, got {folder}, without {IDENTITY}."
        )
    with reading(path, advice):
        kept = json.loads(path.read_bytes())
        identity, digest = dict(kept["identity"]), kept["digest"]
    if digest != digest_of(identity):
        raise RefusedFile(f"{path} was changed since it was written. {advice}")
    return identity


class Cache:
    """Named parts of a long computation, each saved in a folder when it is computed; a context manager.

    A part is a dictionary of arrays. A folder holds parts of one identity (configuration, key and
    data), and is locked by one process, the only one that writes.

    Args:
        folder: Folder of the parts; None saves nothing.
        identity: Identity of the run, see `identity_of`.
        progress: Meter of `get_all`: "auto", "terminal", a function that opens one, or None.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        identity: Mapping[str, Any],
        progress: AnyMeter = None,
    ):
        self.folder = None if folder is None else Path(folder)
        self.identity, self.digest = as_json(dict(identity)), digest_of(identity)
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.network: Any = None  # one of the networks of the run, which the report shows
        self._held = ExitStack()

    def __enter__(self) -> "Cache":
        """Lock the folder.

        Raises:
            RefusedFile: If the folder holds parts of another run, or of an unknown one.
            OSError: If the folder is in use, or cannot be read or written.
        """
        folder = self.folder
        if folder is None:
            return self
        with ExitStack() as stack:
            stack.enter_context(locked(folder / ".lock", folder))
            if not (folder / IDENTITY).exists():
                if any(not path.name.startswith(".") for path in folder.iterdir()):
                    advice = "Delete or move its folder to start from scratch."
                    raise RefusedFile(f"{folder / IDENTITY} is missing. {advice}")
                kept = {"identity": self.identity, "digest": self.digest}
                write_bytes(folder / IDENTITY, json.dumps(kept, indent=2).encode())
            elif different := differences(read_identity(folder), self.identity):
                raise RefusedFile(
                    f"`folder` must hold parts of the same run, got {folder}, whose "
                    f"{checks.that_differ(different)}. "
                    "Name another folder, or delete this one to start from scratch."
                )
            self._held = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def path(self, name: str) -> Path | None:
        """Return the path of the file `name` in the folder; None without a folder."""
        return None if self.folder is None else self.folder / name

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write the part `name` to the folder, if there is one, over an earlier part of this name."""
        if (path := self.path(f"{name}.npz")) is None:
            return
        # Digest and checksum detect arrays that were changed, renamed or copied from another run.
        values = {key: np.asarray(value) for key, value in arrays.items()}
        marks = {
            _RUN: np.asarray(self.digest),
            _CHECKSUM: np.asarray(_checksum(path, values, self.digest)),
        }
        with replacing(path) as file:
            np.savez_compressed(file, **values, **marks)  # pyright: ignore[reportArgumentType]

    def load(self, name: str) -> Arrays | None:
        """Return the saved part `name`, or None if there is none.

        Raises:
            RefusedFile: If the part is broken, was changed, or belongs to another run.
        """
        path = self.path(f"{name}.npz")
        return None if path is None or not path.exists() else read_part(path, self.digest)

    def get(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Arrays:
        """Return the part `name`: read it if it was saved, else compute and save it."""
        kept = self.load(name)
        if kept is not None:
            self.seconds[name] = float(kept.pop("seconds"))
            return kept
        began = time.perf_counter()
        arrays = {key: np.asarray(value) for key, value in compute().items()}
        self.seconds[name] = time.perf_counter() - began
        self.save(name, {**arrays, "seconds": np.asarray(self.seconds[name])})
        return arrays

    def get_all(
        self, jobs: Mapping[str, Callable[[], Mapping[str, Any]]], title: str
    ) -> dict[str, Arrays]:
        """Return the parts that `jobs` compute, by name, and show a meter titled `title`; see `get`."""
        found = {}
        with closing(open_meter(self.progress, len(jobs), title)) as meter:
            for done, (name, compute) in enumerate(jobs.items()):
                meter.advance(done, name.replace("_", " "))
                found[name] = self.get(name, compute)
            meter.advance(len(jobs), "done")
        return found


CacheFolder = str | os.PathLike[str] | Cache | None
"""Folder of cached arrays, or an open cache of this run; None keeps nothing."""
