"""Atomic save and restore of PyTrees: a JSON header, then the bytes of every leaf with a checksum.

`_run.Contents` says what the checkpoint of a run holds. A reader finds the old file or the new one,
and checksums detect changes. Typed PRNG keys are stored with the name of their implementation.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dissociation._core import checks
from dissociation._core.conversion import number_kind, to_device
from dissociation._core.files import RefusedFile, check_regular, reading, replacing

MAGIC = b"dissociation checkpoint 2\n"

_ADVICE = "Delete it to start from scratch."


def save(path: str | os.PathLike[str], tree: Any, header: dict[str, Any] | None = None) -> None:
    """Write `tree` and a header atomically."""
    entries = []
    blobs = []
    for name, leaf in _storable_leaves(tree):
        _check_storable(name, leaf)
        entry, blob = _encode(leaf)
        entries.append({"path": name, "bytes": len(blob), "crc32": zlib.crc32(blob), **entry})
        blobs.append(blob)
    meta = json.dumps({"user": header or {}, "leaves": entries}).encode()
    length = len(meta).to_bytes(8, "little")
    checksum = zlib.crc32(meta).to_bytes(4, "little")
    with replacing(path) as file:
        file.write(MAGIC + length + checksum + meta)
        for blob in blobs:
            file.write(blob)


def _check_storable(name: str, leaf: Any) -> None:
    """Raise unless a leaf holds numbers, dates or keys."""
    is_numeric = (
        type(leaf) in _NUMBERS or number_kind(leaf.dtype) or leaf.dtype.kind in "mM"  # dates
    )
    if not is_numeric or isinstance(leaf, np.ma.MaskedArray | jax.ShapeDtypeStruct):
        checks.fail_kind(
            "tree",
            "hold arrays of numbers or dates",
            f"a {type(leaf).__name__} of {leaf.dtype}{name and f' at {name}'}",
            "Text can be in `header`",
        )


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the header that was given to `save`."""
    with _reading(path):
        meta, _ = _read_meta(Path(path).read_bytes(), path)
        return dict(meta["user"])


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a tree with the structure of `like`."""
    with _reading(path):
        return _restored(path, like)


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    check_regular(path)
    with reading(path, _ADVICE, "is damaged"):
        yield


def _restored(path: str | os.PathLike[str], like: Any) -> Any:
    contents = Path(path).read_bytes()
    meta, offset = _read_meta(contents, path)
    like_leaves = dict(_storable_leaves(like))
    stored_names = {entry["path"] for entry in meta["leaves"]}
    different = sorted(like_leaves.keys() ^ stored_names)
    if different:
        name = different[0]
        status = "lacking" if name in like_leaves else "unknown"
        raise RefusedFile(f"{path}: the leaf {name} is {status}.")

    leaves = {}
    for entry in meta["leaves"]:
        name = entry["path"]
        blob = contents[offset : offset + entry["bytes"]]
        offset += entry["bytes"]
        if len(blob) != entry["bytes"] or zlib.crc32(blob) != entry["crc32"]:
            raise RefusedFile(
                f"{path} is damaged at the leaf {name}: its checksum does not fit. {_ADVICE}"
            )
        leaves[name] = _decode(entry, blob, like_leaves[name], path)
    if offset != len(contents):
        raise RefusedFile(
            f"{path} is damaged: {len(contents) - offset} bytes follow its last leaf. {_ADVICE}"
        )
    return jax.tree_util.tree_map_with_path(
        lambda p, leaf: leaves.get(jax.tree_util.keystr(p), leaf), like
    )


def fingerprint(tree: Any) -> str:
    """Return a hexadecimal digest of the arrays of `tree`: paths, dtypes, shapes and bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for name, leaf in _storable_leaves(tree):
        entry, blob = _encode(leaf)
        digest.update(json.dumps([name, entry]).encode())
        digest.update(blob)
    return digest.hexdigest()


def _storable_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the paths and leaves that are numbers, arrays, or shapes of arrays."""
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return [
        (jax.tree_util.keystr(path), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if type(leaf) in _NUMBERS or isinstance(leaf, kinds)
    ]


_NUMBERS = (bool, int, float, complex)


def _encode(leaf: Any) -> tuple[dict[str, Any], "bytes | memoryview"]:
    """Return the description of a leaf for the header, and its bytes."""
    if type(leaf) in _NUMBERS:
        number = leaf
        if type(leaf) is complex:
            number = [leaf.real, leaf.imag]
        return {"kind": "number", "value": number}, b""
    if number_kind(leaf.dtype) == "key":
        array = np.asarray(jax.random.key_data(leaf))
        entry = {"kind": "key", "implementation": str(jax.random.key_impl(leaf))}
    else:
        array = np.asarray(leaf)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        entry = {"kind": "array"}
    contents = np.ascontiguousarray(array).reshape(-1).view(np.uint8)  # no copy of large states
    return {**entry, "dtype": array.dtype.name, "shape": list(array.shape)}, contents.data


def _decode(entry: dict[str, Any], blob: bytes, like: Any, path: Any) -> Any:
    """Return a leaf of the type of `like`; raise unless shape and dtype fit."""
    name = entry["path"]
    if entry["kind"] == "number":
        number = entry["value"]
        if isinstance(number, list):
            number = complex(*number)
        if type(like) is not type(number):
            raise RefusedFile(
                f"{path}: the leaf {name} is {number!r}, wanted a {type(like).__name__}."
            )
        return number

    stored_dtype = jnp.dtype(entry["dtype"])
    array: Any = np.frombuffer(blob, stored_dtype).reshape(entry["shape"])
    if entry["kind"] == "key":
        array = jax.random.wrap_key_data(to_device(array), impl=entry["implementation"])
    shape = np.shape(like)
    dtype = getattr(like, "dtype", None) or np.asarray(like).dtype
    native_dtype = dtype
    if number_kind(dtype) != "key":
        native_dtype = jnp.dtype(dtype).newbyteorder("=")
    if array.shape != shape or array.dtype != native_dtype:
        stored = f"shape {array.shape} and dtype {array.dtype}"
        raise RefusedFile(f"{path}: the leaf {name} has {stored}, wanted {shape} and {dtype}.")

    if isinstance(like, np.ndarray | np.generic):
        array = array.astype(dtype)
        return array[()] if isinstance(like, np.generic) else array
    if jax.dtypes.canonicalize_dtype(stored_dtype) != stored_dtype:
        raise RefusedFile(
            f"{path}: the leaf {name} is {stored_dtype}. Enable JAX's 64 bits to read it."
        )
    return to_device(array)


def _read_meta(contents: bytes, path: Any) -> tuple[dict[str, Any], int]:
    """Return the header and the offset of the first leaf."""
    size = len(MAGIC)
    start = size + 12
    if contents[:size] != MAGIC:
        raise RefusedFile(
            f"{path} must be a checkpoint that begins with {MAGIC!r}, got {contents[:16]!r}. "
            f"{_ADVICE}"
        )
    end = start + int.from_bytes(contents[size : size + 8], "little")
    checksum = int.from_bytes(contents[size + 8 : start], "little")
    meta = contents[start:end]
    if len(contents) < end or zlib.crc32(meta) != checksum:
        raise RefusedFile(f"{path} is damaged: its header cannot be read. {_ADVICE}")
    return json.loads(meta), end
