"""Datasets of results: what names do, tables against arrays, files that restore everything."""

import dataclasses
import json
import os
import re
import zipfile
from functools import partial
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import xarray
from saved import assert_same
from words import refused

from dissociation import load_results, save_results
from dissociation._core.datasets import as_json, make_dataset, tables_of
from dissociation._core.files import RefusedFile

plain_dataset = partial(make_dataset, coords={}, units={}, attrs={})


@pytest.fixture
def everything():
    rng = np.random.default_rng(0)
    arrays = {
        "error": rng.normal(size=(2, 3)).astype(np.float32),
        "other_error": np.asarray([[np.nan, np.inf, -0.0], [1, 2, 3]], np.float32),
        "eigenvalues": rng.normal(size=(2, 2)) + 1j * rng.normal(size=(2, 2)),
        "small": np.asarray([1 + 2j, np.nan], np.complex64),
        "alive": np.asarray([True, False]),
        "counts": np.asarray([2**62, -1]),
        "bytes": np.asarray([0, 255], np.uint8),
        "half": np.asarray([0.5, 2.0], np.float16),
        "stress": 0.25,
        "name": "digits",
        "nothing": np.zeros((0, 3)),
        "no_names": np.asarray([], str),
        "words": ["a", "wört"],
        "wide": np.asarray(["a", "b"], "<U9"),
        "scales": [0.1, 1.0, np.nan],
        "seeds": [7, 9],
        "pairs": rng.normal(size=(2, 2)),
    }
    dims = {
        "error": ("seeds", "scales"), "other_error": ("seeds", "scales"), "eigenvalues": ("seeds", "modes"),
        "nothing": ("empty", "scales"), "no_names": ("empty",), "scales": ("scales",), "pairs": ("seeds", "seeds"),
        "layers": ("modes",),
    } | dict.fromkeys(("small", "alive", "counts", "bytes", "half", "words", "wide", "seeds"), ("seeds",))  # fmt: skip
    attrs = {
        "config": {"width": 3, "rates": (0.1, 0.2)},
        "nan": np.nan,
        "none": None,
        "yes": True,
        "text": "ä",
        "n": 3,
    }
    units = {"scales": "seconds", "error": "%"}
    return make_dataset(
        arrays, dims, coords={"layers": ["first", "last"]}, units=units, attrs=attrs
    )


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
def test_files_restore_everything(everything, tmp_path, suffix):
    path = save_results(everything, tmp_path / f"new folder/x{suffix}")
    assert_same(load_results(path), everything)
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    if suffix == ".nc":
        with xarray.open_dataset(path, engine="h5netcdf", decode_times=False) as read:
            assert read.error.attrs["units"] == "%"
    with pytest.raises(AssertionError):  # the comparison notices a change
        assert_same(load_results(path).assign(counts=everything["counts"] + 1), everything)


def test_names_of_axes_become_coordinates(everything):
    assert set(everything.coords) == {"scales", "seeds", "other_seeds", "layers"}
    assert everything.pairs.dims == ("seeds", "other_seeds")
    np.testing.assert_array_equal(everything.other_seeds, [7, 9])
    assert float(everything.error.sel(seeds=9, scales=1.0)) == everything.error.values[1, 1]
    assert everything.layers.dims == ("modes",)
    assert everything.attrs["config"] == '{"width": 3, "rates": [0.1, 0.2]}'
    assert (everything.attrs["text"], everything.attrs["n"], everything.attrs["yes"]) == (
        "ä",
        3,
        "true",
    )


def test_tables_are_tidy_and_never_a_product(everything):
    tables = tables_of(everything)
    assert set(tables) == {
        ("seeds", "scales"), ("seeds", "modes"), ("seeds",), (), ("empty", "scales"), ("empty",),
        ("seeds", "other_seeds"),
    }  # fmt: skip
    errors = tables["seeds", "scales"]
    assert list(errors.columns) == ["seeds", "scales", "error", "other_error"]
    np.testing.assert_array_equal(errors.seeds, [7, 7, 7, 9, 9, 9])
    np.testing.assert_array_equal(errors.scales, [0.1, 1.0, np.nan] * 2)
    np.testing.assert_array_equal(errors.other_error, everything.other_error.values.ravel())
    modes = tables["seeds", "modes"]
    assert (modes["layers"].tolist(), modes["modes"].tolist()) == (
        ["first", "last"] * 2,
        [0, 1] * 2,
    )
    assert len(tables["empty", "scales"]) == 0
    assert tables[()].stress.tolist() == [0.25]
    a = np.arange(6.0).reshape(2, 3)  # one table, whatever the order of the axes
    ((_, table),) = tables_of(
        plain_dataset({"a": a, "b": 10 * a.T}, {"a": ("x", "y"), "b": ("y", "x")})
    ).items()
    pandas.testing.assert_series_equal(table.b, 10 * table.a, check_names=False)


def test_values_of_any_kind():
    @dataclasses.dataclass
    class Config:
        rates: tuple = (1, 2)

    assert as_json({"a": Config(), "b": jnp.arange(2), "c": 1j, "d": print}) == {
        "a": {"rates": [1, 2]}, "b": [0, 1], "c": "1j", "d": "<built-in function print>",
    }  # fmt: skip
    found = plain_dataset(
        {"half": jnp.ones(2, jnp.bfloat16), "b": np.zeros(4)}, {"half": ("k",), "b": ("k",)}
    )
    assert found.half.dtype == np.float32
    assert (found.half.dims, found.b.dims) == (
        ("k_2",),
        ("k_4",),
    )  # unequal lengths are in the names of axes


def test_wrong_names_raise():
    unequal = {"k": np.zeros(2), "b": np.zeros(3)}
    refused(
        (
            lambda: plain_dataset({"a": np.zeros(2)}, {}),
            r"`dims` must name the axes of a, of shape \(2,\), got",
        ),
        (
            lambda: plain_dataset({"axes": 1.0}, {}),
            "`arrays` must have names other than axes, labelled",
        ),
        (lambda: plain_dataset(unequal, dict.fromkeys(unequal, ("k",))), "conflicting sizes"),
    )
    with pytest.raises(TypeError, match="`a` must hold numbers, booleans or text"):
        plain_dataset({"a": [object()]}, {"a": ("k",)})


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
def test_wrong_files_raise(everything, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    with pytest.raises(FileNotFoundError, match="No such file"):
        load_results(path)
    whole = save_results(everything, path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RefusedFile, match="is broken, or not a file of results"):
        load_results(path)
    for call in (load_results, lambda path: save_results(everything, path)):
        with pytest.raises(ValueError, match=r"`path` must end in .npz or .nc, got x.csv"):
            call(tmp_path / "x.csv")


OTHER = xarray.Dataset({"a": ("k", [1.0])})


def announced(path):
    """Write an array whose header announces more numbers than follow."""
    with zipfile.ZipFile(path, "w") as archive, archive.open("a.npy", "w") as entry:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
        np.lib.format.write_array_header_1_0(entry, header)
        entry.write(bytes(80))


def described(path, **rest):
    np.savez(
        path, a=np.zeros(2), axes=np.array('{"a": ["x"]}'), labelled=np.array(json.dumps(rest))
    )


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
@pytest.mark.parametrize("name", ["allow_pickle", "file", "mode", "compression"])
def test_names_are_no_arguments(tmp_path, name, suffix):
    dataset = xarray.Dataset({name: ("x", np.arange(2.0))})
    found = load_results(save_results(dataset, tmp_path / f"a{suffix}"))
    xarray.testing.assert_identical(found, dataset)


@pytest.mark.parametrize("name", ["", "a/b", "axes", "labelled"])
def test_names_that_no_file_can_hold_are_refused(tmp_path, name):
    with pytest.raises(
        ValueError, match="`dataset` must have names other than axes, labelled, without a slash"
    ):
        save_results(xarray.Dataset({name: ("x", np.ones(2))}), tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()
    with pytest.raises(
        TypeError, match="`dataset` must be an xarray.Dataset, got an object of type dict"
    ):
        save_results({"a": 1}, tmp_path / "a.npz")


def test_a_pipe_is_refused_before_it_is_read(tmp_path):
    path = tmp_path / "pipe.npz"
    os.mkfifo(path)
    with pytest.raises(OSError, match="It must be a regular file, got a device or a pipe"):
        load_results(path)


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("x.nc", lambda path: path.write_bytes(b""), "not a file of results: "),
        (
            "x.npz",
            lambda path: path.write_bytes(b""),
            "not a file of results: File is not a zip file",
        ),
        (
            "x.npz",
            lambda path: path.write_text("words"),
            "not a file of results: File is not a zip file",
        ),
        (
            "x.npz",
            lambda path: np.save(path.open("wb"), np.zeros(2)),
            "not a file of results: File is not a zip file",
        ),
        (
            "x.npz",
            announced,
            "a.npy announces shape (1000000000000,) of float64, more than it holds",
        ),
        (
            "x.npz",
            lambda path: np.savez(path, axes=np.array("[" * 100_000)),
            "maximum recursion depth exceeded",
        ),
        ("x.npz", lambda path: described(path, attrs=[1]), "is broken, or not a file of results: "),
        (
            "x.npz",
            lambda path: np.savez(path, a=np.array([{}], object)),
            "it holds Python objects, which are",
        ),
        (
            "x.npz",
            lambda path: np.savez(path, a=np.zeros(2)),
            "not a file of results: it lacks 'axes'",
        ),
        (
            "x.nc",
            lambda path: OTHER.to_netcdf(path, engine="h5netcdf"),
            "not a file of results: it lacks 'labelled'",
        ),
        (
            "x.npz",
            lambda path: np.savez(path, axes=np.array("3"), labelled=np.array("3")),
            "the description of its arrays is not a dictionary",
        ),
    ],
)
def test_other_files_raise_with_a_reason(tmp_path, name, write, reason):
    write(tmp_path / name)
    with pytest.raises(RefusedFile, match=re.escape(reason)) as refused:
        load_results(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name} is ")
    assert "pickle" not in str(refused.value)


@pytest.mark.parametrize("suffix", ["npz", "nc"])
def test_arrays_that_changed_or_are_lacking_raise(tmp_path, suffix):
    path = tmp_path / f"x.{suffix}"
    save_results(
        plain_dataset({"a": np.arange(6.0), "b": np.ones(3)}, {"a": ("time",), "b": ("seeds",)}),
        path,
    )
    if suffix == "nc":
        contents = bytearray(path.read_bytes())
        contents[contents.index(np.float64(4.0).tobytes()) + 6] ^= 1
        path.write_bytes(contents)
    else:
        with np.load(path) as file:
            left = {name: file[name] for name in file if name != "b"}
        np.savez(path, **left)
    reason = "it lacks 'b'" if suffix == "npz" else ""
    with pytest.raises(RefusedFile, match=f"broken, or not a file of results: {reason}"):
        load_results(path)


def test_an_unreadable_file_is_not_called_broken(everything, tmp_path, monkeypatch):
    path = save_results(everything, tmp_path / "x.npz")
    monkeypatch.setattr(type(path), "open", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        load_results(path)


def test_without_the_extra_the_error_names_it(everything, tmp_path, monkeypatch):
    path = save_results(everything, tmp_path / "x.nc")
    monkeypatch.setattr(
        "dissociation._core.checks.importlib.import_module", Mock(side_effect=ImportError)
    )
    for call in (lambda: save_results(everything, path), lambda: load_results(path)):
        with pytest.raises(
            ImportError,
            match=r"h5netcdf must be installed .*: pip install 'dissociation\[netcdf\]'",
        ):
            call()
    assert_same(load_results(save_results(everything, tmp_path / "y.npz")), everything)
