"""Arrays in files, described by headers and read on demand.

A header is compared with the size of its file before memory is allocated by it.
"""

import io
import json
import math
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from dissociation._core.checks import check_count, fail
from dissociation._core.files import RefusedFile, check_regular, reading
from dissociation._core.memory import host_budget

INDEX = ".safetensors.index.json"
"""End of the name of an index of shards."""

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")

_KINDS = "biufcSU"
_LARGEST_HEADER = 10_000
"""Largest header of an array in bytes, as in NumPy."""

_LARGEST_DIRECTORY = 2**24
"""Largest list of the arrays of a file in bytes."""

_LARGEST_RATIO = 1032
"""Largest number of bytes that one byte of a deflated stream stands for."""

_CHUNK = 2**20
_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""Data types by their names in `.safetensors` files."""


Stream = IO[bytes] | io.BufferedIOBase


class StoredArray(NamedTuple):
    """Array in a file.

    Attributes:
        path: File.
        name: Name in the file.
        shape: Shape.
        dtype: Data type, of any byte order.
        offset: Position of the first number in the file, or in its member.
        member: Name of the member of a zip archive, or None.
        is_fortran: True if the first axis varies fastest.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int
    member: str | None = None
    is_fortran: bool = False

    @property
    def nbytes(self) -> int:
        """Return the size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    def read(self) -> np.ndarray:
        """Return the array, in the byte order of the machine."""
        shape = self.shape[::-1] if self.is_fortran else self.shape
        with self._opened() as stream:
            array = self._next(stream, shape)
        return array.T if self.is_fortran else array

    def batches(self, num_rows: int) -> Iterator[np.ndarray]:
        """Yield consecutive blocks of at most `num_rows` rows.

        In Fortran's order, the whole array is read first.
        """
        length = self.shape[0]
        if self.is_fortran:
            array = self.read()
            for start in range(0, length, num_rows):
                yield array[start : start + num_rows]
            return
        with self._opened() as stream:
            for start in range(0, length, num_rows):
                num_left = min(num_rows, length - start)
                yield self._next(stream, (num_left, *self.shape[1:]))

    def rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of `indices`, in their order, without the others in memory."""
        if self.member is None and self.nbytes:
            order = "F" if self.is_fortran else "C"
            mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order)
            return _native(np.array(mapped[indices]))
        block_length = max(1, _CHUNK * self.shape[0] // max(self.nbytes, 1))
        selection = np.empty((len(indices), *self.shape[1:]), self.dtype.newbyteorder("="))
        start = 0
        for block in self.batches(block_length):
            is_inside = (indices >= start) & (indices < start + len(block))
            selection[is_inside] = block[indices[is_inside] - start]
            start += len(block)
        return selection

    @contextmanager
    def _opened(self) -> Iterator[Stream]:
        """Open the file, or its member, at the first number."""
        with reading(self.path, "", f"is broken at {self.name}"), open(self.path, "rb") as file:
            if self.member is None:
                file.seek(self.offset)
                yield file
                return
            with zipfile.ZipFile(file) as archive, archive.open(self.member) as stream:
                stream.read(self.offset)
                yield stream

    def _next(self, stream: Any, shape: tuple[int, ...]) -> np.ndarray:
        """Return the next numbers of a stream as an array."""
        contents = bytearray(math.prod(shape) * self.dtype.itemsize)
        view = memoryview(contents)
        start = 0
        while start < len(view):
            # A member of an archive is copied by each read: small ones keep the copy small.
            count = stream.readinto(view[start : start + _CHUNK])
            if not count:
                raise ValueError("it ends before the last number")
            start += count
        return _native(np.frombuffer(contents, self.dtype).reshape(shape))


def _native(array: np.ndarray) -> np.ndarray:
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def open_arrays(path: str | os.PathLike[str]) -> dict[str, StoredArray]:
    """Return the arrays of a file by name, of which only headers are read and checked.

    Args:
        path: An `.npz` file, whose order is kept; a `.npy` file, whose array is named after the
            file; a `.safetensors` file or the `.safetensors.index.json` of its shards, in natural
            order.

    Raises:
        RefusedFile: If the file is broken, is a pickle, or its headers do not fit its size; or if
            safetensors is not installed.
        ValueError: If the path ends otherwise.
        OSError: If a file does not exist or cannot be read.
    """
    source = Path(path)
    check_regular(source)
    if source.suffix in PICKLES:
        raise RefusedFile(_refusal_of_pickle(source))
    if source.name.endswith(INDEX):
        read_headers = _shards
    elif source.suffix in _READERS:
        read_headers = _READERS[source.suffix]
    else:
        fail("path", f"end in {', '.join(_READERS)} or {INDEX}", source.name)
    with reading(source, ""):
        return read_headers(source)


def _refusal_of_pickle(path: Path) -> str:
    """Return an error with the lines of PyTorch that convert a file."""
    target = path.with_suffix(".safetensors").name
    load = f'torch.load("{path.name}", map_location="cpu", weights_only=True)'
    arrays = f"{{n: a.clone().contiguous() for n, a in {load}.items()}}"
    save = f'safetensors.torch.save_file({arrays}, "{target}")'
    return (
        f"{path} is a pickle, which could run code when it is read. Convert it with PyTorch: "
        f"import torch, safetensors.torch; {save}"
    )


def total_bytes(arrays: Mapping[str, StoredArray]) -> int:
    """Return the size of arrays together."""
    return sum(array.nbytes for array in arrays.values())


def check_size(
    path: str | os.PathLike[str], num_bytes: int, memory_budget: int | None = None
) -> None:
    """Raise if arrays of a file exceed a budget in bytes, by default half of the free memory."""
    if memory_budget is None:
        memory_budget = host_budget()
    check_count("memory_budget", memory_budget, minimum=1, maximum=None)
    if num_bytes > memory_budget:
        raise RefusedFile(
            f"{path} holds arrays of {num_bytes} bytes, more than the {memory_budget} of "
            "`memory_budget`."
        )


def npz_arrays(path: Path) -> dict[str, StoredArray]:
    """Return the arrays of an `.npz` file by name; errors do not name the file."""
    file_size = path.stat().st_size
    arrays = {}
    with _Bounded(path) as file, zipfile.ZipFile(file) as archive:
        members = archive.infolist()
        if sum(member.compress_size for member in members) > file_size:
            raise ValueError("its members are longer than the file")
        for member in members:
            name = member.filename.removesuffix(".npy")
            if name in arrays:
                raise ValueError(f"it holds {member.filename} twice")
            _check_member(member)
            if not member.filename.endswith(".npy"):
                raise ValueError(f"{member.filename} is no array")
            with archive.open(member) as stream:
                array = _described(path, name, stream, member.file_size)
            arrays[name] = array._replace(member=member.filename)
    return arrays


class _Bounded(io.FileIO):
    """File that refuses to read more than the list of an archive may have."""

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next `size` bytes."""
        if size is not None and size > _LARGEST_DIRECTORY:
            raise ValueError(f"its list of arrays has {size} bytes")
        return super().read(size)


def _check_member(member: zipfile.ZipInfo) -> None:
    """Raise if a member of an archive announces more than its bytes in the file can hold."""
    largest_size = member.compress_size
    if member.compress_type == zipfile.ZIP_DEFLATED:
        largest_size *= _LARGEST_RATIO
    elif member.compress_type != zipfile.ZIP_STORED:
        raise ValueError(f"{member.filename} is compressed in a way that NumPy does not write")
    if member.file_size > largest_size:
        raise ValueError(
            f"{member.filename} announces {member.file_size} bytes, more than it holds"
        )


def _npy_arrays(path: Path) -> dict[str, StoredArray]:
    with open(path, "rb") as file:
        array = _described(path, path.stem, file, path.stat().st_size)
    return {array.name: array}


def _described(path: Path, name: str, stream: Stream, size: int) -> StoredArray:
    """Return the array of a stream of `size` bytes in the format of `.npy`, from its header."""
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_2_0
    num_digits = 4
    if version == (1, 0):
        read_header = np.lib.format.read_array_header_1_0
        num_digits = 2
    digits = stream.read(num_digits)
    header_length = int.from_bytes(digits, "little")
    if header_length > _LARGEST_HEADER:
        raise ValueError(f"the header of {name} has {header_length} bytes")
    header = stream.read(header_length)
    shape, is_fortran, dtype = read_header(io.BytesIO(digits + header))

    if dtype.hasobject:
        raise ValueError(f"it holds Python objects, which are not read, as {name}")
    if dtype.kind not in _KINDS:
        advice = ""
        if dtype.kind == "V":
            advice = ". NumPy does not store bfloat16: write `.safetensors`, or float32"
        raise ValueError(f"{name} holds entries of dtype {dtype}{advice}")
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} announces shape {shape}")
    offset = np.lib.format.MAGIC_LEN + num_digits + header_length
    array = StoredArray(path, name, shape, dtype, offset, None, is_fortran)
    excess = array.nbytes - (size - offset)
    if excess:
        amount = "more" if excess > 0 else "less"
        raise ValueError(f"{name}.npy announces shape {shape} of {dtype}, {amount} than it holds")
    return array


def _safetensors_arrays(path: Path) -> dict[str, StoredArray]:
    try:
        from safetensors import safe_open
    except ImportError as error:
        raise RefusedFile(f"{path} needs `pip install 'dissociation[files]'`.") from error
    with open(path, "rb") as file:
        header_length = int.from_bytes(file.read(8), "little")
        if header_length > _LARGEST_DIRECTORY:
            raise ValueError(f"its list of arrays has {header_length} bytes")
        # The library maps the file and compares shapes, offsets and the size of the file.
        with safe_open(path, "numpy"):
            entries = json.loads(file.read(header_length))

    arrays = {}
    for name in sorted(entries, key=natural_order):
        if name == "__metadata__":
            continue
        entry = entries[name]
        if entry["dtype"] not in _DTYPES:
            raise ValueError(f"{name} holds entries of dtype {entry['dtype']}")
        dtype = np.dtype(_DTYPES[entry["dtype"]]).newbyteorder("<")
        offset = 8 + header_length + entry["data_offsets"][0]
        arrays[name] = StoredArray(path, name, tuple(entry["shape"]), dtype, offset)
    return arrays


def natural_order(name: str) -> list[Any]:
    """Return a key that sorts "layer.2" before "layer.10"."""
    words: list[Any] = re.split(r"(\d+)", name)
    words[1::2] = map(int, words[1::2])  # text and digits alternate
    return words


def _shards(index: Path) -> dict[str, StoredArray]:
    """Return the arrays of several `.safetensors` files, whose index names the file of each."""
    if index.stat().st_size > _LARGEST_DIRECTORY:
        raise ValueError(f"it has {index.stat().st_size} bytes")
    file_of_name = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    arrays_of_shard = {}
    for shard in set(file_of_name.values()):
        if Path(shard).name != shard:
            raise ValueError(f"the shard {shard} is not in its folder")
        arrays_of_shard[shard] = open_arrays(index.with_name(shard))
    arrays = {}
    for name in sorted(file_of_name, key=natural_order):
        arrays[name] = arrays_of_shard[file_of_name[name]][name]
    return arrays


_READERS = {".npz": npz_arrays, ".npy": _npy_arrays, ".safetensors": _safetensors_arrays}
