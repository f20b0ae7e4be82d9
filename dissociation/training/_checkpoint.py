"""Atomic save and restore of PyTrees: a JSON header, then the bytes of every leaf with a checksum.

A reader finds the old file or the new one, and checksums detect changes. Typed PRNG keys are stored
with the name of their implementation.
"""

import errno
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
from dissociation._core.conversion import to_device
from dissociation._core.files import RefusedFile, reading, replacing

MAGIC = b"dissociation checkpoint 2\n"

_ADVICE = "Delete it to start from scratch."


def save(path: str | os.PathLike[str], tree: Any, header: dict[str, Any] | None = None) -> None:
    """Write `tree` and a header atomically."""
    described, blobs = [], []
    for name, leaf in _storable_leaves(tree):
        numbers = type(leaf) in _NUMBERS or _is_key(leaf)
        numbers = numbers or leaf.dtype.kind in "bmM" or jnp.issubdtype(leaf.dtype, np.number)
        if not numbers or isinstance(leaf, np.ma.MaskedArray | jax.ShapeDtypeStruct):
            got = f"a {type(leaf).__name__} of {leaf.dtype}{name and f' at {name}'}"
            checks.fail_kind(
                "tree", "hold arrays of numbers or dates", got, "Text can be in `header`"
            )
        entry, blob = _encode(leaf)
        described.append({"path": name, "bytes": len(blob), "crc32": zlib.crc32(blob), **entry})
        blobs.append(blob)
    meta = json.dumps({"user": header or {}, "leaves": described}).encode()
    with replacing(path) as file:
        file.write(
            MAGIC + len(meta).to_bytes(8, "little") + zlib.crc32(meta).to_bytes(4, "little") + meta
        )
        for blob in blobs:
            file.write(blob)


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the header that was given to `save`."""
    with _reading(path):
        return dict(_read_meta(Path(path).read_bytes(), path)[0]["user"])


def restore(path: str | os.PathLike[str], like: Any) -> Any:
    """Read a tree with the structure of `like`."""
    with _reading(path):
        return _restored(path, like)


@contextmanager
def _reading(path: str | os.PathLike[str]) -> Iterator[None]:
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        raise OSError(
            errno.EINVAL, "It must be a regular file, got a device or a pipe", os.fspath(path)
        )
    with reading(path, _ADVICE, "is damaged"):
        yield


def _restored(path: str | os.PathLike[str], like: Any) -> Any:
    contents = Path(path).read_bytes()
    meta, offset = _read_meta(contents, path)
    wanted, values = dict(_storable_leaves(like)), {}
    if different := sorted(wanted.keys() ^ {entry["path"] for entry in meta["leaves"]}):
        raise RefusedFile(
            f"{path}: the leaf {different[0]} is "
            f"{'lacking' if different[0] in wanted else 'unknown'}."
        )
    for entry in meta["leaves"]:
        blob = contents[offset : offset + entry["bytes"]]
        offset += entry["bytes"]
        if len(blob) != entry["bytes"] or zlib.crc32(blob) != entry["crc32"]:
            raise RefusedFile(
                f"{path} is damaged at the leaf {entry['path']}: its checksum does not fit. "
                f"{_ADVICE}"
            )
        values[entry["path"]] = _decode(entry, blob, wanted[entry["path"]], path)
    if offset != len(contents):
        raise RefusedFile(
            f"{path} is damaged: {len(contents) - offset} bytes follow its last leaf. {_ADVICE}"
        )
    return jax.tree_util.tree_map_with_path(
        lambda p, leaf: values.get(jax.tree_util.keystr(p), leaf), like
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
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return [
        (jax.tree_util.keystr(p), leaf)
        for p, leaf in leaves
        if type(leaf) in _NUMBERS or isinstance(leaf, kinds)
    ]


_NUMBERS = (bool, int, float, complex)


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _encode(leaf: Any) -> tuple[dict[str, Any], "bytes | memoryview"]:
    if type(leaf) in _NUMBERS:
        return {
            "kind": "number",
            "value": [leaf.real, leaf.imag] if type(leaf) is complex else leaf,
        }, b""
    if _is_key(leaf):
        data = np.asarray(jax.random.key_data(leaf))
        kind = {"kind": "key", "implementation": str(jax.random.key_impl(leaf))}
    else:
        data, kind = np.asarray(leaf), {"kind": "array"}
        data = data.astype(data.dtype.newbyteorder("="), copy=False)
    contents = np.ascontiguousarray(data).reshape(-1).view(np.uint8)  # no copy: states may be large
    return {**kind, "dtype": data.dtype.name, "shape": list(data.shape)}, contents.data


def _decode(entry: dict[str, Any], blob: bytes, like: Any, path: Any) -> Any:
    name = entry["path"]
    if entry["kind"] == "number":
        value = complex(*entry["value"]) if isinstance(entry["value"], list) else entry["value"]
        if type(like) is not type(value):
            raise RefusedFile(
                f"{path}: the leaf {name} is {value!r}, wanted a {type(like).__name__}."
            )
        return value
    dtype = jnp.dtype(entry["dtype"])
    data = np.frombuffer(blob, dtype).reshape(entry["shape"])
    given: Any = data
    if entry["kind"] == "key":
        given = jax.random.wrap_key_data(to_device(data), impl=entry["implementation"])
    shape, wanted = np.shape(like), getattr(like, "dtype", None) or np.asarray(like).dtype
    if given.shape != shape or given.dtype != (
        wanted if _is_key(like) else jnp.dtype(wanted).newbyteorder("=")
    ):
        found = f"shape {given.shape} and dtype {given.dtype}"
        raise RefusedFile(f"{path}: the leaf {name} has {found}, wanted {shape} and {wanted}.")
    if isinstance(like, np.ndarray | np.generic):
        data = data.astype(wanted)
        return data[()] if isinstance(like, np.generic) else data
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise RefusedFile(f"{path}: the leaf {name} is {dtype}. Enable JAX's 64 bits to read it.")
    return to_device(given)


def _read_meta(contents: bytes, path: Any) -> tuple[dict[str, Any], int]:
    size, start = len(MAGIC), len(MAGIC) + 12
    if contents[:size] != MAGIC:
        raise RefusedFile(
            f"{path} must be a checkpoint that begins with {MAGIC!r}, got {contents[:16]!r}. "
            f"{_ADVICE}"
        )
    end = start + int.from_bytes(contents[size : size + 8], "little")
    meta = contents[start:end]
    if len(contents) < end or zlib.crc32(meta) != int.from_bytes(
        contents[size + 8 : start], "little"
    ):
        raise RefusedFile(f"{path} is damaged: its header cannot be read. {_ADVICE}")
    return json.loads(meta), end
