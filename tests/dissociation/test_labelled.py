"""Labelled arrays: what names do, tables against arrays, files that give everything back."""

import dataclasses
import json
import re
from unittest.mock import Mock

import jax.numpy as jnp
import numpy as np
import pandas
import pytest
import xarray
from labels import assert_same

from dissociation import load_results
from dissociation._core.files import RefusedFile
from dissociation._core.labelled import Labelled, as_json, label


@pytest.fixture
def everything():
    rng = np.random.default_rng(0)
    arrays = {
        "error_scaled": rng.normal(size=(2, 3)).astype(np.float32),
        "error_trained": np.asarray([[np.nan, np.inf, -0.0], [1, 2, 3]], np.float32),
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
        "error_scaled": ("seeds", "scales"), "error_trained": ("seeds", "scales"), "eigenvalues": ("seeds", "modes"),
        "nothing": ("empty", "scales"), "no_names": ("empty",), "scales": ("scales",), "pairs": ("seeds", "seeds"),
    } | dict.fromkeys(("small", "alive", "counts", "bytes", "half", "words", "wide", "seeds"), ("seeds",))  # fmt: skip
    units = {"scales": "seconds", "error_scaled": "%"}
    attrs = {"config": {"width": 3, "rates": (0.1, 0.2)}, "nan": np.nan, "none": None, "yes": True, "text": "ä"}
    dims["layers"] = ("modes",)
    return label(arrays, dims, coords={"layers": ["first", "last"]}, units=units, attrs=attrs)


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
def test_files_give_everything_back(everything, tmp_path, suffix):
    path = everything.save(tmp_path / f"new folder/x{suffix}")
    assert_same(load_results(path), everything)
    assert [other.name for other in path.parent.iterdir()] == [path.name]
    if suffix == ".nc":
        with xarray.open_dataset(path, engine="h5netcdf", decode_times=False) as read:
            assert read.error_scaled.attrs["units"] == "%"
    changed = load_results(path).arrays["counts"] + 1
    assert (changed != everything["counts"]).all()  # and the comparison sees it


def test_an_array_named_as_its_axis_is_its_coordinate(everything):
    assert set(everything.coords) == {"scales", "seeds", "other_seeds", "layers"}
    assert everything.dims["pairs"] == ("seeds", "other_seeds")
    np.testing.assert_array_equal(everything["other_seeds"], [7, 9])
    with pytest.raises(ValueError, match="`name` must be one of .*, got 'missing'"):
        everything["missing"]


def test_families_become_axes(everything):
    found = everything.stacked({"error": {"variants": ("trained", "scaled", "absent")}, "none": {"x": ("y",)}})
    assert found.dims["error"] == ("variants", "seeds", "scales")
    np.testing.assert_array_equal(found["variants"], ["trained", "scaled"])  # in the order given, what there is
    np.testing.assert_array_equal(found["error"][1], everything["error_scaled"])
    assert found.units["error"] == "%"
    assert "error_scaled" not in found.arrays


def test_gaps_in_a_family_are_nan_or_it_stays_apart():
    arrays = {f"{kind}_{task}_{size}": np.full(2, size) for kind in "in" for task in "ab" for size in (1, 2)}
    arrays = {name: array.astype(int if name[0] == "i" else float) for name, array in arrays.items()}
    del arrays["n_a_2"], arrays["i_a_2"]
    axes = {"tasks": ("a", "b"), "sizes": (1, 2)}
    found = label(arrays, dict.fromkeys(arrays, ("seeds",))).stacked({"i": axes, "n": axes})
    np.testing.assert_array_equal(found["n"][..., 0], [[1, np.nan], [1, 2]])
    np.testing.assert_array_equal(found["sizes"], [1, 2])
    assert {name for name in found.arrays if name != "n"} == {"i_a_1", "i_b_1", "i_b_2"}
    uneven = label({"p_a": np.zeros(2), "p_b": np.zeros(3)}, {"p_a": ("k",), "p_b": ("k",)})
    assert set(uneven.stacked({"p": {"tasks": ("a", "b")}}).arrays) == {"p_a", "p_b"}


def test_a_dataset_is_indexed_by_name(everything):
    data = everything.to_xarray()
    assert float(data.error_scaled.sel(seeds=9, scales=1.0)) == everything["error_scaled"][1, 1]
    assert data.scales.attrs == {"units": "seconds"}
    assert data.layers.dims == ("modes",)
    assert data.attrs["text"] == "ä"
    assert data.attrs["config"] == '{"width": 3, "rates": [0.1, 0.2]}'


def test_tables_are_tidy_and_never_a_product(everything):
    tables = everything.to_dataframe()
    assert set(tables) == {
        ("seeds", "scales"), ("seeds", "modes"), ("seeds",), (), ("empty", "scales"), ("empty",),
        ("seeds", "other_seeds"),
    }  # fmt: skip
    errors = tables["seeds", "scales"]
    assert list(errors.columns) == ["seeds", "scales", "error_scaled", "error_trained"]
    np.testing.assert_array_equal(errors.seeds, [7, 7, 7, 9, 9, 9])
    np.testing.assert_array_equal(errors.scales, [0.1, 1.0, np.nan] * 2)
    np.testing.assert_array_equal(errors.error_trained, everything["error_trained"].ravel())
    modes = tables["seeds", "modes"]
    assert (modes["layers"].tolist(), modes["modes"].tolist()) == (["first", "last"] * 2, [0, 1] * 2)
    assert len(tables["empty", "scales"]) == 0
    assert set(everything.to_dataframe("alive")) == {("seeds",)}
    with pytest.raises(ValueError, match="`names` must be one of .*, got 'missing'"):
        everything.to_dataframe("missing")


def test_arrays_of_one_set_of_axes_share_a_table_whatever_their_order():
    a = np.arange(6.0).reshape(2, 3)
    ((_, table),) = label({"a": a, "b": 10 * a.T}, {"a": ("x", "y"), "b": ("y", "x")}).to_dataframe().items()
    pandas.testing.assert_series_equal(table.b, 10 * table.a, check_names=False)


def test_what_it_is_made_of_may_be_of_any_kind():
    @dataclasses.dataclass
    class Config:
        rates: tuple = (1, 2)

    assert as_json({"a": Config(), "b": jnp.arange(2), "c": 1j, "d": print}) == {
        "a": {"rates": [1, 2]}, "b": [0, 1], "c": "1j", "d": "<built-in function print>",
    }  # fmt: skip
    found = label({"half": jnp.ones(2, jnp.bfloat16), "b": np.zeros(4)}, {"half": ("k",), "b": ("k",)})
    assert found["half"].dtype == np.float32
    assert found.dims == {"half": ("k_2",), "b": ("k_4",)}  # lengths that disagree stand in the names of axes


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (lambda: label({"a": np.zeros(2)}, {}), ValueError, r"`dims` must name the axes of a, of shape \(2,\), got"),
        (lambda: label({"axes": 1.0}, {}), ValueError, "`arrays` must have names other than axes, labelled"),
        (lambda: label({"a": [object()]}, {"a": ("k",)}), TypeError, "`a` must hold numbers, truth values or text"),
        (lambda: label({"k": np.zeros((2, 2)), "b": np.zeros(2)}, {"k": ("i", "j"), "b": ("k",)}),
         ValueError, "`dims` must name an axis like an array only if the array is its coordinate, got 'k'"),
        (lambda: Labelled({"a": np.zeros(2), "b": np.zeros(3)}, {"a": ("k",), "b": ("k",)}, {}, {}, {}),
         ValueError, "`arrays` must have 2 places along k as a has, got 3 in b"),
    ],
)  # fmt: skip
def test_wrong_names_are_refused(call, kind, words):
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("suffix", [".npz", ".nc"])
def test_wrong_files_are_refused(everything, tmp_path, suffix):
    path = tmp_path / f"x{suffix}"
    with pytest.raises(FileNotFoundError, match="where there is none"):
        load_results(path)
    whole = everything.save(path).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RefusedFile, match="is broken, or no file of results"):
        load_results(path)
    with pytest.raises(ValueError, match=r"`path` must end in .npz or .nc, got x.csv"):
        load_results(tmp_path / "x.csv")


OTHER = xarray.Dataset({"a": ("k", [1.0])})


@pytest.mark.parametrize(
    ("name", "write", "reason"),
    [
        ("x.nc", lambda path: path.write_bytes(b""), "it is empty"),
        ("x.nc", lambda path: path.write_text("words"), "it is no HDF5 file, as .nc files of results are"),
        ("x.npz", lambda path: np.savez(path, a=np.array([{}], object)), "it holds Python objects, which are"),
        ("x.npz", lambda path: np.savez(path, a=np.zeros(2)), "no file of results: it lacks 'axes'"),
        ("x.nc", lambda path: OTHER.to_netcdf(path, engine="h5netcdf"), "no file of results: it lacks 'labelled'"),
        ("x.npz", lambda path: np.savez(path, axes=np.array("3")), "what it says of its arrays is no dictionary"),
        ("x.npz", lambda path: path.mkdir(), " is a folder, and no file of results"),
    ],
)
def test_what_is_no_file_of_results_is_refused_in_our_words(tmp_path, name, write, reason):
    write(tmp_path / name)
    with pytest.raises(RefusedFile, match=re.escape(reason)) as refused:
        load_results(tmp_path / name)
    assert str(refused.value).startswith(f"{tmp_path / name} is ")
    assert "pickle" not in str(refused.value)


def test_a_file_of_arrays_and_axes_alone_is_read(tmp_path):
    axes = json.dumps({"error": ["seeds", "scales"], "scales": ["scales"]})
    np.savez(tmp_path / "x.npz", error=np.zeros((2, 3)), scales=np.arange(3), axes=axes)
    found = load_results(tmp_path / "x.npz")
    assert (found.dims["error"], list(found.coords)) == (("seeds", "scales"), ["scales"])


def test_a_file_that_may_not_be_read_is_not_called_broken(everything, tmp_path, monkeypatch):
    path = everything.save(tmp_path / "x.npz")
    monkeypatch.setattr(type(path), "open", Mock(side_effect=PermissionError))
    with pytest.raises(PermissionError):
        load_results(path)


def test_without_the_extra_it_says_what_to_install(everything, tmp_path, monkeypatch):
    path, missing = everything.save(tmp_path / "x.nc"), Mock(side_effect=ImportError)
    monkeypatch.setattr("dissociation._core.labelled.importlib.import_module", missing)
    for call in (everything.to_xarray, everything.to_dataframe, lambda: load_results(path)):
        with pytest.raises(ImportError, match=r"must be installed for this: pip install 'dissociation\[labels\]'"):
            call()
    assert_same(load_results(everything.save(tmp_path / "y.npz")), everything)
