"""What a figure leaves on disk besides images: arrays, a description of the run, and parts to resume from.

Every part carries a digest of the run that it belongs to and a checksum of its contents, so that one that was changed,
renamed or brought from another run is refused rather than mixed in.
"""

import dataclasses
import json
import os
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core import checks, files
from dissociation._core.files import RefusedFile, reason_of, replacing, write_bytes
from dissociation.figures import _provenance as provenance
from dissociation.training import _checkpoint as checkpoint
from dissociation.training import _distributed as distributed

Arrays = dict[str, np.ndarray]

IDENTITY = "identity.json"
"""The file that says which run a folder of parts belongs to."""

_RUN, _CHECKSUM = "run_digest", "checksum"


def save_arrays(
    path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], axes: Mapping[str, tuple[str, ...]] | None = None
) -> None:
    """Writes an `.npz` file, whole or not at all."""
    named = {} if axes is None else {"axes": np.asarray(json.dumps(axes))}
    with replacing(path) as file:
        np.savez_compressed(file, **arrays, **named)  # pyright: ignore[reportArgumentType]


def axes_of(arrays: Mapping[str, np.ndarray], axes: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Names of every array's axes."""
    named = {}
    for name, array in arrays.items():
        beginning = max((part for part in axes if name.startswith(part)), key=len, default=None)
        named[name] = () if beginning is None else axes[beginning]
        if len(named[name]) != np.ndim(array):
            raise ValueError(f"`axes` must name the axes of {name}, of shape {np.shape(array)}, got {named[name]}.")
    return named


def save_part(path: str | os.PathLike[str], arrays: Mapping[str, np.ndarray], digest: str) -> None:
    """Writes an `.npz` file that `read_part` takes for one of the run with this digest, under this name only."""
    values = {name: np.asarray(value) for name, value in arrays.items()}
    marks = {_RUN: np.asarray(digest), _CHECKSUM: np.asarray(_checksum(path, values, digest))}
    save_arrays(path, values | marks)


def read_part(path: str | os.PathLike[str], digest: str) -> Arrays:
    """The arrays that `save_part` wrote."""
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            arrays = dict(file)
    except (ValueError, TypeError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        advice = "Delete it to have this part computed again."
        raise RefusedFile(f"{path} is broken: {reason_of(error)}. {advice}") from error
    run, checksum = (str(arrays.pop(name, "")) for name in (_RUN, _CHECKSUM))
    if run != digest:
        raise RefusedFile(f"{path} belongs to another run. Delete it to have this part computed again.")
    if checksum != _checksum(path, arrays, digest):
        raise RefusedFile(f"{path} was changed or renamed since it was written. Delete it to have it computed again.")
    return arrays


def _checksum(path: str | os.PathLike[str], arrays: Arrays, digest: str) -> str:
    return checkpoint.fingerprint([np.asarray(f"{digest} {Path(path).name}"), dict(sorted(arrays.items()))])


def save_description(path: str | os.PathLike[str], description: Mapping[str, Any]) -> None:
    """Writes JSON with `description`, and the environment that the run had, see `provenance`."""
    # What is not finite has no place in JSON: null.
    plain = json.dumps({**description, "environment": provenance.environment()}, default=_plain)
    strict = json.loads(plain, parse_constant=lambda _: None)
    write_bytes(path, (json.dumps(strict, indent=2) + "\n").encode())


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return np.asarray(value).tolist()


def _as_read(value: Any) -> Any:
    """What comes back after writing to JSON."""
    return json.loads(json.dumps(value, default=_plain))


def differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    """What sets two runs apart, by name: settings where both have some, other parts of their identities."""
    names = sorted(name for name in wanted.keys() | stored.keys() if wanted.get(name) != stored.get(name))
    one, other = stored.get("config"), wanted.get("config")
    if "config" in names and isinstance(one, dict) and isinstance(other, dict):
        names.remove("config")
        names += differences(one, other)
    return names


def digest_of(identity: Mapping[str, Any]) -> str:
    """A short text that differs for every two identities, in hexadecimal."""
    return checkpoint.fingerprint(np.asarray(json.dumps(_as_read(dict(identity)), sort_keys=True)))


def identity_of(config: Any, key: jax.Array, data: Any) -> dict[str, Any]:
    """What makes two runs the same: configuration, key, the contents of the data, and precision."""
    precision = str(jnp.result_type(float))
    prints = {"key": checkpoint.fingerprint(key), "data": checkpoint.fingerprint(data)}
    return {"config": _as_read(config), **prints, "precision": precision}


def read_identity(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Which run the parts in `folder` belong to."""
    path = Path(folder) / IDENTITY
    if not path.is_file():
        raise FileNotFoundError(f"`folder` must hold parts of a run, got {folder}, without {IDENTITY}.")
    try:
        kept = json.loads(path.read_bytes())
        identity, digest = dict(kept["identity"]), kept["digest"]
    except (ValueError, TypeError, KeyError) as error:
        raise RefusedFile(f"{path} is broken. {_anew(folder)}") from error
    if digest != digest_of(identity):
        raise RefusedFile(f"{path} was changed since it was written. {_anew(folder)}")
    return identity


def _anew(folder: str | os.PathLike[str]) -> str:
    return f"Which run the parts in {folder} belong to is not known: delete or move that folder to begin anew."


def check_parts_of(folder: str | os.PathLike[str], config: Any) -> str:
    """Raises unless `folder` holds parts of a run with this configuration; returns the run's digest."""
    identity = read_identity(folder)
    if different := differences(identity["config"], _as_read(config)):
        raise RefusedFile(
            f"`folder` must hold parts of a run of this configuration, got {folder}, "
            f"whose {checks.that_differ(different)}."
        )
    return digest_of(identity)


@contextmanager
def locked(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a folder, which is made if need be, for one process; the lock ends with the block or the process."""
    with files.locked(Path(folder) / ".lock", folder):
        yield


class Parts:
    """Named pieces of a long computation, each kept in a folder as soon as it is done; a context.

    A piece is a dictionary of arrays. It belongs to an identity (configuration, key and data): a folder with pieces
    of another one is refused rather than mixed in, and a folder has one user at a time. Process 0 alone writes.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, identity: Mapping[str, Any]):
        self.folder = None if folder is None else Path(folder)
        self.identity, self.digest = _as_read(dict(identity)), digest_of(identity)
        self.seconds: dict[str, float] = {}
        self._held = ExitStack()

    def __enter__(self) -> "Parts":
        """Takes the folder.

        Raises:
            RefusedFile: If it holds pieces of another run, or of which is not known.
            OSError: If it is in use, or cannot be read or written.
        """
        distributed.on_main(self._take)
        return self

    def _take(self) -> None:
        if self.folder is None:
            return
        with ExitStack() as stack:
            stack.enter_context(locked(self.folder))
            self._open(self.folder)
            self._held = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def _open(self, folder: Path) -> None:
        if (folder / IDENTITY).exists():
            if different := differences(read_identity(folder), self.identity):
                raise RefusedFile(
                    f"`folder` must hold parts of the same run, got {folder}, whose {checks.that_differ(different)}. "
                    "Name another folder, or delete this one to begin anew."
                )
            return
        if any(not path.name.startswith(".") for path in folder.iterdir()):
            raise RefusedFile(f"{folder / IDENTITY} is missing. {_anew(folder)}")
        kept = {"identity": self.identity, "digest": self.digest}
        write_bytes(folder / IDENTITY, json.dumps(kept, indent=2).encode())

    def path(self, name: str) -> Path | None:
        """Where a piece called `name` may keep a file of its own; None without a folder."""
        return None if self.folder is None else self.folder / name

    def save(self, name: str, arrays: Mapping[str, Any]) -> None:
        """Keep a piece called `name`, if there is a folder; an earlier one is replaced."""
        if (path := self.path(f"{name}.npz")) is not None and jax.process_index() == 0:
            save_part(path, arrays, self.digest)

    def load(self, name: str) -> Arrays | None:
        """The piece called `name`, if it is kept.

        Raises:
            RefusedFile: If it is broken, was changed, or belongs to another run.
        """
        path = self.path(f"{name}.npz")
        return None if path is None or not path.exists() else read_part(path, self.digest)

    def get(self, name: str, compute: Callable[[], Mapping[str, Any]]) -> Arrays:
        """Return the piece called `name`: read it if it is there, else compute, time and keep it."""
        path = self.path(f"{name}.npz")
        there = path is not None and path.exists()
        # All processes read it, or all compute it, as computing may need all of them.
        if all(distributed.all_values(there)) and (kept := self.load(name)) is not None:
            self.seconds[name] = float(kept.pop("seconds"))
            return kept
        began = time.perf_counter()
        arrays = {key: np.asarray(value) for key, value in compute().items()}
        self.seconds[name] = time.perf_counter() - began
        self.save(name, {**arrays, "seconds": np.asarray(self.seconds[name])})
        return arrays
