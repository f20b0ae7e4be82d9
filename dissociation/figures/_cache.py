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
from dissociation._core.array_files import npz_arrays
from dissociation._core.datasets import as_json
from dissociation._core.files import RefusedFile, locked, reading, replacing, write_bytes
from dissociation.training import _checkpoint_file as checkpoint
from dissociation.training._progress import MeterFactory, open_meter

Arrays = dict[str, np.ndarray]
AnyMeter = str | MeterFactory | None

IDENTITY = "identity.json"
"""File with the identity of a folder's run."""

_RUN = "run_digest"
_CHECKSUM = "checksum"
_START_ADVICE = "Delete or move its folder to start from scratch."


def read_part(path: Path, digest: str) -> Arrays:
    """Return the arrays that `Cache.save` wrote.

    Raises:
        RefusedFile: If the file is broken, was changed or renamed, or has another digest.
        OSError: If it cannot be opened.
    """
    with reading(path, "Delete it to compute this part again."):
        path.open("rb").close()
        arrays = {name: array.read() for name, array in npz_arrays(path).items()}
    run_digest = str(arrays.pop(_RUN, ""))
    checksum = str(arrays.pop(_CHECKSUM, ""))
    if run_digest != digest:
        raise RefusedFile(f"{path} belongs to another run. Delete it to compute this part again.")
    if checksum != _checksum(path, arrays, digest):
        changed = f"{path} was changed or renamed since it was written"
        raise RefusedFile(f"{changed}. Delete it to compute it again.")
    return arrays


def _checksum(path: Path, arrays: Arrays, digest: str) -> str:
    """Return a hash of a file's name and arrays, and of its run's digest."""
    header = np.asarray(f"{digest} {path.name}")
    return checkpoint.fingerprint([header, dict(sorted(arrays.items()))])


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries in which two identities, or two configurations, differ.

    An entry that one of them lacks counts as None. Of two configurations inside of identities the
    names of the settings that differ replace the name "config".
    """
    names = []
    for name in sorted(wanted.keys() | stored.keys()):
        if wanted.get(name) != stored.get(name):
            names.append(name)
    stored_config = stored.get("config")
    config = wanted.get("config")
    if "config" in names and isinstance(stored_config, dict) and isinstance(config, dict):
        names.remove("config")
        names += differences(stored_config, config)
    return names


def digest_of(identity: Mapping[str, Any]) -> str:
    """Return a hexadecimal hash of an identity."""
    document = json.dumps(as_json(dict(identity)), sort_keys=True)
    return checkpoint.fingerprint(np.asarray(document))


def identity_of(config: Any, key: jax.Array, data: Any) -> dict[str, Any]:
    """Return the identity of a run: configuration, hashes of key and data, and precision."""
    if data is None:
        data = np.zeros(0)
    return {
        "config": as_json(config),
        "key": checkpoint.fingerprint(key),
        "data": checkpoint.fingerprint(data),
        "precision": str(jnp.result_type(float)),
    }


def read_identity(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the identity of a folder's run."""
    path = Path(folder) / IDENTITY
    if not path.is_file():
        message = f"`folder` must hold parts of a run, got {folder}, without {IDENTITY}."
        raise FileNotFoundError(message)
    with reading(path, _START_ADVICE):
        document = json.loads(path.read_bytes())
        identity = dict(document["identity"])
        digest = document["digest"]
    if digest != digest_of(identity):
        raise RefusedFile(f"{path} was changed since it was written. {_START_ADVICE}")
    return identity


class Cache:
    """Named parts of a long computation, each saved in a folder; a context manager.

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
        self.identity = as_json(dict(identity))
        self.digest = digest_of(identity)
        self.progress = progress
        self.seconds: dict[str, float] = {}
        self.network: Any = None  # one of the networks of the run, which the report shows
        self._lock = ExitStack()

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
            self._check_identity(folder)
            self._lock = stack.pop_all()
        return self

    def _check_identity(self, folder: Path) -> None:
        """Write the identity to an empty folder; raise if a folder holds parts of another run."""
        path = folder / IDENTITY
        if path.exists():
            names = differences(read_identity(folder), self.identity)
            if names:
                raise RefusedFile(
                    f"`folder` must hold parts of the same run, got {folder}, whose "
                    f"{checks.that_differ(names)}. "
                    "Name another folder, or delete this one to start from scratch."
                )
            return
        if any(not file.name.startswith(".") for file in folder.iterdir()):
            raise RefusedFile(f"{path} is missing. {_START_ADVICE}")
        document = {"identity": self.identity, "digest": self.digest}
        write_bytes(path, json.dumps(document, indent=2).encode())

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def path(self, name: str) -> Path | None:
        """Return the path of the file `name` in the folder; None without a folder."""
        return None if self.folder is None else self.folder / name

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Write the part `name` to the folder, if there is one, over an earlier part."""
        path = self.path(f"{name}.npz")
        if path is None:
            return
        entries = {key: np.asarray(value) for key, value in arrays.items()}
        # Digest and checksum detect arrays that were changed, renamed or copied from another run.
        checksum = _checksum(path, entries, self.digest)
        entries |= {_RUN: np.asarray(self.digest), _CHECKSUM: np.asarray(checksum)}
        with replacing(path) as file:
            np.savez_compressed(file, **entries)  # pyright: ignore[reportArgumentType]

    def load(self, name: str) -> Arrays | None:
        """Return the saved part `name`, or None if there is none.

        Raises:
            RefusedFile: If the part is broken, was changed, or belongs to another run.
        """
        path = self.path(f"{name}.npz")
        if path is None or not path.exists():
            return None
        return read_part(path, self.digest)

    def get(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Arrays:
        """Return the part `name`: read it if it was saved, else compute and save it."""
        saved = self.load(name)
        if saved is not None:
            self.seconds[name] = float(saved.pop("seconds"))
            return saved
        began = time.perf_counter()
        arrays = {key: np.asarray(value) for key, value in compute().items()}
        self.seconds[name] = time.perf_counter() - began
        self.save(name, {**arrays, "seconds": np.asarray(self.seconds[name])})
        return arrays

    def get_all(
        self, jobs: Mapping[str, Callable[[], Mapping[str, Any]]], title: str
    ) -> dict[str, Arrays]:
        """Return the parts that `jobs` compute, by name, as `get` does.

        A meter has the title `title`.
        """
        arrays_of_job = {}
        with closing(open_meter(self.progress, len(jobs), title)) as meter:
            for num_done, (name, compute) in enumerate(jobs.items()):
                meter.advance(num_done, name.replace("_", " "))
                arrays_of_job[name] = self.get(name, compute)
            meter.advance(len(jobs), "done")
        return arrays_of_job


CacheFolder = str | os.PathLike[str] | Cache | None
"""Folder of cached arrays, or an open cache of this run; None keeps nothing."""
