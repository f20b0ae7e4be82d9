"""Files of arrays: what is read of them, and what is refused by header and size alone."""

import json
import re
import struct
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dissociation import load_results
from dissociation._core.array_files import open_arrays, total_bytes
from dissociation._core.files import RefusedFile

RNG = np.random.default_rng(0)
X = RNG.normal(size=(7, 3)).astype(np.float32)
INDICES = np.array([5, 0, 5])
ARRAYS = {"b10": X, "b2": X.astype(">f8"), "f": np.asfortranarray(X), "n": np.array(3), "none": X[:0], "text": np.array(["a", "wört"])}  # fmt: skip


def written(path):
    """Write arrays in the format of the suffix, and return those that the file can hold."""
    arrays = dict(ARRAYS)
    if path.name == "small.npz":
        np.savez_compressed(path, **arrays)
    elif path.suffix == ".npz":
        np.savez(path, **arrays)
    elif path.suffix == ".npy":
        arrays = {path.stem: arrays[path.stem]}
        np.save(path, arrays[path.stem])
    else:
        del arrays["text"]
        arrays["f"] = X.astype(ml_dtypes.bfloat16)
        save_file({n: np.ascontiguousarray(a) for n, a in arrays.items()}, path, {"format": "np"})
    return arrays


@pytest.mark.parametrize("name", ["a.npz", "small.npz", "f.npy", "b2.npy", "a.safetensors"])
def test_arrays_are_read_whole_and_in_batches(tmp_path, name, monkeypatch):
    monkeypatch.setattr("dissociation._core.array_files._CHUNK", 40)
    arrays = written(tmp_path / name)
    stored = open_arrays(tmp_path / name)
    order = ["b2", "b10", "f", "n", "none"] if "safe" in name else list(arrays)
    assert list(stored) == order
    assert total_bytes(stored) == sum(array.nbytes for array in arrays.values())
    for name, array in arrays.items():
        copy = stored[name].read()
        np.testing.assert_array_equal(copy, array)
        assert copy.dtype == array.dtype.newbyteorder("=")
        if array.shape == X.shape:
            batches = list(stored[name].batches(3))
            assert [len(batch) for batch in batches] == [3, 3, 1]
            np.testing.assert_array_equal(np.concatenate(batches), array)
            np.testing.assert_array_equal(stored[name].rows(INDICES), array[INDICES])


def test_shards_are_one_file(tmp_path):
    shards = {"a-1.safetensors": {"x.10": X}, "a-2.safetensors": {"x.9": -X, "tied": X}}
    for file, arrays in shards.items():
        save_file(arrays, tmp_path / file)
    index = tmp_path / "a.safetensors.index.json"

    def write(weights):
        index.write_text(json.dumps({"weight_map": weights}))
        return open_arrays(index)

    stored = write({"x.10": "a-1.safetensors", "x.9": "a-2.safetensors"})
    assert list(stored) == ["x.9", "x.10"]
    np.testing.assert_array_equal(stored["x.9"].read(), -X)
    with pytest.raises(RefusedFile, match="it lacks 'x.9'"):
        write({"x.9": "a-1.safetensors"})
    with pytest.raises(RefusedFile, match="is not in its folder"):
        write({"x.9": "../a-1.safetensors"})
    with pytest.raises(FileNotFoundError):
        write({"x.9": "b.safetensors"})


def npy(shape, *, dtype="'<f4'", data=b"", length=None):
    header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}".encode()
    size = len(header) if length is None else length
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", size) + header + data


def safetensors(entries, data=b"", length=None):
    header = json.dumps(entries).encode()
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def tensor(shape, start, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def zipped(path, contents, *sizes):
    """Write an archive of one member, whose two sizes in the list of members are replaced."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", contents)
    raw = path.read_bytes()
    start = raw.index(b"PK\x01\x02") + 20
    path.write_bytes(raw[:start] + struct.pack("<II", *sizes) + raw[start + 8 :])


def list_of_2_31_bytes(path):
    with path.open("wb") as file:
        file.truncate(2**31)
        file.seek(2**31)
        file.write(b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 1, 1, 2**31 - 1, 1, 0))


def sparse(contents):
    def write(path):
        path.write_bytes(contents)
        with path.open("ab") as file:
            file.truncate(2**31 + 2**12)

    return write


A = npy((4,), data=bytes(16))
LONG = npy((9000,), data=RNG.bytes(36000))
REFUSED = {
    "an empty file.npy": (b"", "EOF"),
    "text.npz": (b"words", "not a zip file"),
    "objects.npy": (npy((1,), dtype="'|O'", data=bytes(8)), "holds Python objects, which are not"),
    "fields.npy": (npy((1,), dtype="[('a', '<f4')]", data=bytes(4)), "entries of dtype"),
    "a negative size.npy": (npy((-1,)), r"announces shape \(-1,\)"),
    "a large shape.npy": (npy((2**40,)), "more than it holds"),
    "an overflow.npy": (npy((2**62, 2**62)), "more than it holds"),
    "a small shape.npy": (npy((2,), data=bytes(16)), "less than it holds"),
    "a header of 2^31 bytes.npy": (sparse(npy((2,), length=2**31)), "header of .* has 2147483648"),
    "a header of 2^31 bytes.safetensors": (sparse(safetensors({}, length=2**31)), "2147483648 bytes"),
    "a list of 2^31 bytes.npz": (list_of_2_31_bytes, "2147483647 bytes"),
    "an overlap.safetensors": (safetensors({"a": tensor([2], 0, 8), "b": tensor([2], 4, 12)}, bytes(12)), "offset"),
    "an offset that overflows.safetensors": (safetensors({"a": tensor([2], 0, 2**64 + 8)}, bytes(8)), "JSON"),
    "an offset outside.safetensors": (safetensors({"a": tensor([4], 0, 16)}, bytes(8)), "not fully covered"),
    "an overflow.safetensors": (safetensors({"a": tensor([2**62, 2**62], 0, 8)}, bytes(8)), "overflow"),
    "a negative size.safetensors": (safetensors({"a": tensor([-2], 0, 8)}, bytes(8)), "-2"),
    "eight bits.safetensors": (safetensors({"a": tensor([2], 0, 2, "F8_E4M3")}, bytes(2)), "F8_E4M3"),
    "a short member.npz": (lambda path: zipped(path, LONG, len(LONG), len(LONG) - 8), "more than it holds"),
    "a long member.npz": (lambda path: zipped(path, npy((2**29,)), 2**20, 2**31 + len(npy((2**29,)))), "longer than the file"),
    "a dense member.npz": (lambda path: zipped(path, A, 60, 2**31), "2147483648 bytes, more than"),
    "other contents.npz": (lambda path: zipped(path, b"words", 7, 5), "magic"),
    "a pickle.pt": (b"\x80\x02}q\x00.", r"a pickle, which.*save_file\(.*torch.load\(\"a pickle.pt\""),
    "pickle.bin": (b"\x80\x02}q\x00.", r"torch.load\(\"pickle.bin\", .*weights_only=True"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_files_are_refused_before_memory_is_taken(tmp_path, name):
    contents, reason = REFUSED[name]
    path = tmp_path / name
    if callable(contents):
        contents(path)
    else:
        path.write_bytes(contents)
    open_arrays_of = [open_arrays]
    if path.suffix == ".npz":
        open_arrays_of.append(load_results)
    for read in open_arrays_of:
        tracemalloc.start()
        with pytest.raises(RefusedFile, match=f"{re.escape(str(path))} is .*{reason}"):
            read(path)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20
