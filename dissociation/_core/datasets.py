"""Datasets of xarray with named axes, and files that restore them bit for bit."""

import dataclasses
import errno
import importlib
import io
import json
import math
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dissociation._core.checks import check_known, fail, fail_kind
from dissociation._core.files import RefusedFile, reason_of, replacing, write_bytes

if TYPE_CHECKING:
    import pandas
    import xarray

_AXES, _REST = "axes", "labelled"
_RESERVED = (_AXES, _REST)
"""Names that arrays in an `.npz` file cannot have."""


def make_dataset(
    arrays: Mapping[str, Any],
    dims: Mapping[str, Sequence[str]],
    *,
    coords: Mapping[str, Any],
    units: Mapping[str, str],
    attrs: Mapping[str, Any],
) -> "xarray.Dataset":
    """Return a dataset of arrays with named axes.

    An array named as its only axis becomes a coordinate. The second of two equal axes is called
    `other_<axis>`. An axis without coordinate that differs in length between arrays is called
    `<axis>_<length>`. Attributes of compound types become JSON.
    """
    import xarray

    host = {name: _on_host(name, value) for name, value in {**arrays, **coords}.items()}
    axes = {name: tuple(dims.get(name, (name,) if name in coords else ())) for name in host}
    for name, array in host.items():
        check_name("arrays", name)
        if len(axes[name]) != array.ndim:
            fail("dims", f"name the axes of {name}, of shape {array.shape}", axes[name])
    indices = {name for name in host if axes[name] == (name,)}
    sizes = {
        pair for name, array in host.items() for pair in zip(axes[name], array.shape, strict=True)
    }
    counts = Counter(axis for axis, _ in sizes)
    several = {axis for axis, count in counts.items() if count > 1} - indices
    axes = {name: tuple(_distinct(own, host[name].shape, several)) for name, own in axes.items()}
    for axis in {axis for own in axes.values() for axis in own} - indices:
        if (same := axis.removeprefix("other_")) in indices:
            host[axis], axes[axis] = host[same], (axis,)
    made = {
        name: (axes[name], array, {"units": units[name]} if name in units else {})
        for name, array in host.items()
    }
    known = as_json(attrs)
    plain = {
        name: value if type(value) in (str, int, float) else json.dumps(value)
        for name, value in known.items()
    }
    return xarray.Dataset(made, attrs=plain).set_coords(list(coords))


def check_name(argument: str, name: str) -> None:
    """Raise if no array in a file of results can have this name."""
    if name in _RESERVED or not name or "/" in name:
        fail(argument, f"have names other than {', '.join(_RESERVED)}, without a slash", repr(name))


def _distinct(axes: tuple[str, ...], shape: tuple[int, ...], several: set[str]) -> Iterator[str]:
    """Yield distinct names of axes, with the length at the end of those of several lengths."""
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        earlier = axes[:i].count(axis)
        mark = "" if not earlier else "other_" if earlier == 1 else f"other{earlier}_"
        yield mark + (f"{axis}_{size}" if axis in several else axis)


def _on_host(name: str, value: Any) -> np.ndarray:
    check_known("", advice="Label results outside of transformations", **{name: value})
    array = np.asarray(value)
    if array.dtype == object and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    if array.dtype.kind == "V":  # types that NumPy lacks, such as bfloat16
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufcU":
        fail_kind(name, "hold numbers, booleans or text", f"entries of dtype {array.dtype}")
    return array


def as_json(value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biufU" else str(value)


def tables_of(dataset: "xarray.Dataset") -> "dict[tuple[str, ...], pandas.DataFrame]":
    """Return a tidy table per set of axes, by the names of the axes, with a row per position along them."""
    import pandas

    groups: dict[frozenset[Any], list[Any]] = {}
    for name, array in dataset.items():
        groups.setdefault(frozenset(array.dims), []).append(name)
    found = {}
    for names in groups.values():
        part, dims = dataset[names], tuple(map(str, dataset[names[0]].dims))
        if dims:
            table = part.to_dataframe(dim_order=dims).reset_index()
            others = [str(name) for name in part.coords if name not in dims]
            found[dims] = table[[*dims, *others, *names]]
        else:
            found[dims] = pandas.DataFrame({name: [part[name].item()] for name in names})
    return found


def save_results(dataset: "xarray.Dataset", path: str | os.PathLike[str]) -> Path:
    """Write a dataset to a file that `load_results` reads, atomically, and return its path.

    Args:
        dataset: Dataset of a figure or of `to_xarray`: numbers, booleans or text; coordinates have
            one axis.
        path: Path that ends in ".npz", or in ".nc" (needs h5netcdf). Complex numbers in ".nc" have
            the HDF5 form of h5py and NumPy.

    Raises:
        ValueError: If the path ends otherwise, or a name is reserved or holds a slash.
        TypeError: If it is no dataset.
        ImportError: If h5netcdf is not installed.
        OSError: If the file cannot be written.
    """
    import xarray

    if not isinstance(dataset, xarray.Dataset):
        fail_kind("dataset", "be an xarray.Dataset", f"an object of type {type(dataset).__name__}")
    target = Path(path)
    arrays = {str(name): array.values for name, array in dataset.variables.items()}
    if target.suffix == ".npz":
        for name in arrays:
            check_name("dataset", name)
        dims = {name: array.dims for name, array in dataset.variables.items()}
        units = {
            name: array.attrs["units"]
            for name, array in dataset.variables.items()
            if "units" in array.attrs
        }
        rest = {"coords": list(dataset.coords), "units": units, "attrs": dataset.attrs}
        texts = {_AXES: np.asarray(json.dumps(dims)), _REST: np.asarray(json.dumps(rest))}
        with replacing(target) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            # NumPy's `savez` would take names for its own arguments.
            for name, array in {**arrays, **texts}.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    np.lib.format.write_array(entry, np.asanyarray(array), allow_pickle=False)
    elif target.suffix == ".nc":
        _netcdf()
        rest = json.dumps(
            {
                "dtypes": {name: array.dtype.str for name, array in arrays.items()},
                "attrs": dataset.attrs,
            }
        )
        # A checksum of each block, which tells of bits that changed on the disk.
        numbers = [
            name
            for name, array in arrays.items()
            if array.ndim and array.size and array.dtype.kind in "biuf"
        ]
        encoding = {name: {"fletcher32": True} for name in numbers}
        drawn = io.BytesIO()
        marked = dataset.assign_attrs({_REST: rest})
        marked.to_netcdf(drawn, engine="h5netcdf", invalid_netcdf=True, encoding=encoding)
        write_bytes(target, drawn.getvalue())
    else:
        fail("path", "end in .npz or .nc", target.name)
    return target


def load_results(path: str | os.PathLike[str]) -> "xarray.Dataset":
    """Read a file that `save_results` or the command line wrote.

    Args:
        path: Path that ends in ".npz" or ".nc" (needs h5netcdf).

    Returns:
        The arrays with their axes, coordinates, units and attributes.

    Raises:
        RefusedFile: If it is broken, or not a file of results.
        OSError: If it does not exist, is a folder, or cannot be read.
        ValueError: If the path ends otherwise.
        ImportError: If h5netcdf is not installed.
    """
    source = Path(path)
    if source.suffix not in (".npz", ".nc"):
        fail("path", "end in .npz or .nc", source.name)
    if source.exists() and not source.is_file() and not source.is_dir():
        raise OSError(
            errno.EINVAL, "It must be a regular file, got a device or a pipe", str(source)
        )
    source.open("rb").close()  # a missing or unreadable file is not a broken one
    if source.suffix == ".nc":
        _netcdf()
    try:
        return _read_npz(source) if source.suffix == ".npz" else _read_netcdf(source)
    except Exception as error:
        raise RefusedFile(
            f"{source} is broken, or not a file of results: {reason_of(error)}."
        ) from error


def check_sizes(path: str | os.PathLike[str]) -> None:
    """Raise if an array of an `.npz` file is larger than its entry, before memory is taken for it."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as entry:
                version = np.lib.format.read_magic(entry)
                read = (
                    np.lib.format.read_array_header_1_0
                    if version == (1, 0)
                    else np.lib.format.read_array_header_2_0
                )
                shape, _, dtype = read(entry)
            if math.prod(shape) * dtype.itemsize > info.file_size:
                raise ValueError(
                    f"{info.filename} announces shape {shape} of {dtype}, more than it holds"
                )


def _read_npz(path: Path) -> "xarray.Dataset":
    check_sizes(path)
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    dims, rest = json.loads(str(arrays.pop(_AXES))), json.loads(str(arrays.pop(_REST)))
    if not isinstance(dims, dict) or not isinstance(rest, dict):
        raise ValueError("the description of its arrays is not a dictionary")
    for name in dims:
        if name not in arrays:
            raise KeyError(name)
    coords = {name: arrays.pop(name) for name in rest["coords"]}
    return make_dataset(arrays, dims, coords=coords, units=rest["units"], attrs=rest["attrs"])


def _read_netcdf(path: Path) -> "xarray.Dataset":
    import xarray

    options = {
        "engine": "h5netcdf",
        "decode_times": False,
        "decode_timedelta": False,
        "phony_dims": "access",
    }
    with xarray.open_dataset(path, **options) as file:
        data = file.load()
    rest = json.loads(data.attrs[_REST])
    kinds = {name: data[name].values.astype(kind) for name, kind in rest["dtypes"].items()}
    data = data.assign(
        {name: (data[name].dims, values, data[name].attrs) for name, values in kinds.items()}
    )
    data.attrs = rest["attrs"]
    return data


def _netcdf() -> None:
    try:
        importlib.import_module("h5netcdf")
    except ImportError as error:
        raise ImportError(
            "h5netcdf must be installed for .nc files: pip install 'dissociation[netcdf]'."
        ) from error
