"""Files of arrays: what is read of them, and what is refused by header and size alone."""

import json
import os
import re
import struct
import tracemalloc
import zipfile

import ml_dtypes
import numpy as np
import pytest
import xarray
from safetensors.numpy import save_file

from dissociation import load_results, save_results
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


def contents_of(suffix, header, num_bytes, length=None):
    """Return a file of a header, `dtype shape` or `dtype shape offsets, ...`, and of numbers."""
    if suffix == ".npy":
        dtype, shape = header.split(" ", 1)
        header = f"{{'descr': {dtype}, 'fortran_order': False, 'shape': {shape}}}"
        start = b"\x93NUMPY\x02\x00"
    else:
        entry = '"%s": {"dtype": "%s", "shape": %s, "data_offsets": %s}'
        entries = [entry % (i, *words.split(" ")) for i, words in enumerate(header.split("; "))]
        header = f"{{{', '.join(entries)}}}"
        start = b""
    code = "<I" if start else "<Q"
    return start + struct.pack(code, length or len(header)) + header.encode() + bytes(num_bytes)


REFUSED = {
    "objects.npy": ("'|O' (1,)", 8, "holds Python objects, which are not"),
    "fields.npy": ("[('a','<f4')] (1,)", 4, "entries of dtype"),
    "a negative size.npy": ("'<f4' (-1,)", 0, r"announces shape \(-1,\)"),
    "a large shape.npy": ("'<f4' (1099511627776,)", 0, "more than it holds"),
    "an overflow.npy": ("'<f4' (4611686018427387904, 4611686018427387904)", 0, "more than it holds"),
    "a small shape.npy": ("'<f4' (2,)", 16, "less than it holds"),
    "an overlap.safetensors": ("F32 [2] [0,8]; F32 [2] [4,12]", 12, "offset"),
    "an offset that overflows.safetensors": ("F32 [2] [0,18446744073709551624]", 8, "JSON"),
    "an offset outside.safetensors": ("F32 [4] [0,16]", 8, "not fully covered"),
    "an overflow.safetensors": ("F32 [4611686018427387904,8] [0,8]", 8, "overflow"),
    "a negative size.safetensors": ("F32 [-2] [0,8]", 8, "-2"),
    "eight bits.safetensors": ("F8_E4M3 [2] [0,2]", 2, "F8_E4M3"),
}  # fmt: skip


def assert_refused(path, reason, *readers):
    for read in readers:
        tracemalloc.start()
        with pytest.raises(RefusedFile, match=f"^{re.escape(str(path))} is .*{reason}"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**23
        tracemalloc.stop()


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_headers_are_refused_before_memory_is_taken(tmp_path, name):
    *contents, reason = REFUSED[name]
    path = tmp_path / name
    path.write_bytes(contents_of(path.suffix, *contents))
    assert_refused(path, reason, open_arrays)


def test_headers_of_2_31_bytes_are_refused(tmp_path):
    for name, text in (("a.npy", "'<f4' (2,)"), ("a.safetensors", "F32 [2] [0,8]")):
        path = tmp_path / name
        path.write_bytes(contents_of(path.suffix, text, 8, 2**31))
        os.truncate(path, 2**31 + 2**12)
        assert_refused(path, "2147483648 bytes", open_arrays)


NPY = contents_of(".npy", "'<f4' (9000,)", 0) + RNG.bytes(36_000)
MEMBERS = {
    "other contents": (b"words", None, "magic"),
    "a short member": (NPY, (len(NPY) - 8, len(NPY) - 8), "more than it holds"),
    "a long member": (NPY, (2**20, len(NPY)), "longer than the file"),
    "a dense member": (NPY, (60, 2**31), "2147483648 bytes, more than it holds"),
}
"""Contents, compressed and other size in the list of members, and reason."""


@pytest.mark.parametrize("name", MEMBERS)
def test_wrong_members_are_refused_before_memory_is_taken(tmp_path, name):
    contents, sizes, reason = MEMBERS[name]
    path = tmp_path / "a.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", contents)
    if sizes:
        raw = path.read_bytes()
        start = raw.index(b"PK\x01\x02") + 20
        path.write_bytes(raw[:start] + struct.pack("<II", *sizes) + raw[start + 8 :])
    assert_refused(path, reason, open_arrays, load_results)


def test_lists_of_2_31_bytes_and_pickles_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(b"")
    os.truncate(path, 2**31)
    with path.open("ab") as file:
        file.write(b"PK\x05\x06" + struct.pack("<4H2LH", 0, 0, 1, 1, 2**31 - 1, 1, 0))
    assert_refused(path, "2147483647 bytes", open_arrays, load_results)
    for suffix in (".pt", ".bin"):
        path = path.rename(path.with_suffix(suffix))
        assert_refused(path, rf"save_file\(.*torch.load\(\"a{suffix}\"", open_arrays)


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
def test_results_beyond_the_budget_are_refused(tmp_path, monkeypatch, suffix):
    path = save_results(xarray.Dataset({"a": ("x", np.zeros(2**20))}), tmp_path / f"a{suffix}")
    monkeypatch.setattr("dissociation._core.array_files.host_budget", lambda: 2**20)
    with pytest.raises(
        RefusedFile, match=" holds arrays of 8388.* bytes, more than the 1048576 of"
    ):
        load_results(path)
