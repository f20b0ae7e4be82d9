"""Datasets of xarray with named axes, and files that restore them bit for bit."""

import dataclasses
import io
import json
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dissociation._core.array_files import check_size, npz_arrays, total_bytes
from dissociation._core.checks import check_known, fail, fail_kind, import_extra
from dissociation._core.files import (
    RefusedFile,
    check_regular,
    reason_of,
    replacing,
    write_bytes,
)

if TYPE_CHECKING:
    import pandas
    import xarray

_AXES = "axes"
_LABELS = "labelled"
_RESERVED = (_AXES, _LABELS)
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

    host = {name: _storable(name, value) for name, value in {**arrays, **coords}.items()}
    axes = {}
    sizes = set()
    for name, array in host.items():
        check_name("arrays", name)
        default = (name,) if name in coords else ()
        axes[name] = tuple(dims.get(name, default))
        if len(axes[name]) != array.ndim:
            fail("dims", f"name the axes of {name}, of shape {array.shape}", axes[name])
        sizes.update(zip(axes[name], array.shape, strict=True))

    # Distinguish axes of several lengths, and equal axes of an array.
    indices = {name for name in host if axes[name] == (name,)}
    num_sizes = Counter(axis for axis, _ in sizes)
    several = {axis for axis, count in num_sizes.items() if count > 1} - indices
    for name, array in host.items():
        axes[name] = tuple(_distinct(axes[name], array.shape, several))
    for axis in set().union(*axes.values()) - indices:
        original = axis.removeprefix("other_")
        if original in indices:
            host[axis] = host[original]
            axes[axis] = (axis,)

    variables = {}
    for name, array in host.items():
        attributes = {}
        if name in units:
            attributes["units"] = units[name]
        variables[name] = (axes[name], array, attributes)
    plain_attrs = {}
    for name, value in as_json(attrs).items():
        if type(value) not in (str, int, float):
            value = json.dumps(value)
        plain_attrs[name] = value
    return xarray.Dataset(variables, attrs=plain_attrs).set_coords(list(coords))


def check_name(argument: str, name: str) -> None:
    """Raise if no array in a file of results can have this name."""
    if name in _RESERVED or not name or "/" in name:
        fail(argument, f"have names other than {', '.join(_RESERVED)}, without a slash", repr(name))


def _distinct(axes: tuple[str, ...], shape: tuple[int, ...], several: set[str]) -> Iterator[str]:
    """Yield distinct names of axes, with the length appended to axes of several lengths."""
    for i, (axis, size) in enumerate(zip(axes, shape, strict=True)):
        num_earlier = axes[:i].count(axis)
        prefix = ""
        if num_earlier:
            prefix = "other_" if num_earlier == 1 else f"other{num_earlier}_"
        suffix = f"_{size}" if axis in several else ""
        yield f"{prefix}{axis}{suffix}"


def _storable(name: str, value: Any) -> np.ndarray:
    """Return a result as an array that files can hold: numbers, booleans or text, or raise."""
    check_known("", advice="Label results outside of transformations", **{name: value})
    array = np.asarray(value)
    if array.dtype == object and all(isinstance(element, str) for element in array.flat):
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
    if array.dtype.kind in "biufU":
        return array.tolist()
    return str(value)


def tables_of(dataset: "xarray.Dataset") -> "dict[tuple[str, ...], pandas.DataFrame]":
    """Return a tidy table per set of axes, with a row per position along the axes.

    The keys are the names of the axes.
    """
    import pandas

    names_of_axes = {}
    for name, array in dataset.items():
        names_of_axes.setdefault(frozenset(array.dims), []).append(name)
    tables = {}
    for names in names_of_axes.values():
        arrays = dataset[names]
        dims = tuple(map(str, dataset[names[0]].dims))
        if dims:
            table = arrays.to_dataframe(dim_order=dims).reset_index()
            coords = [str(name) for name in arrays.coords if name not in dims]
            tables[dims] = table[[*dims, *coords, *names]]
        else:
            tables[dims] = pandas.DataFrame({name: [arrays[name].item()] for name in names})
    return tables


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
    if target.suffix == ".npz":
        _write_npz(dataset, target)
    elif target.suffix == ".nc":
        _write_netcdf(dataset, target)
    else:
        fail("path", "end in .npz or .nc", target.name)
    return target


def _write_npz(dataset: "xarray.Dataset", path: Path) -> None:
    arrays = {}
    dims = {}
    units = {}
    for name, array in dataset.variables.items():
        check_name("dataset", str(name))
        arrays[str(name)] = array.values
        dims[name] = array.dims
        if "units" in array.attrs:
            units[name] = array.attrs["units"]
    labels = {"coords": list(dataset.coords), "units": units, "attrs": dataset.attrs}
    arrays[_AXES] = np.asarray(json.dumps(dims))
    arrays[_LABELS] = np.asarray(json.dumps(labels))
    with replacing(path) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        # NumPy's `savez` would take names for its own arguments.
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as stream:
                np.lib.format.write_array(stream, np.asanyarray(array), allow_pickle=False)


def _write_netcdf(dataset: "xarray.Dataset", path: Path) -> None:
    import_extra("h5netcdf", ".nc files", "netcdf")
    dtypes = {}
    encoding = {}
    for name, variable in dataset.variables.items():
        array = variable.values
        dtypes[str(name)] = array.dtype.str
        if array.ndim and array.size and array.dtype.kind in "biuf":
            # A checksum of each block, which detects bits that changed on the disk.
            encoding[str(name)] = {"fletcher32": True}
    labels = json.dumps({"dtypes": dtypes, "attrs": dataset.attrs})
    contents = io.BytesIO()
    labelled = dataset.assign_attrs({_LABELS: labels})
    labelled.to_netcdf(contents, engine="h5netcdf", invalid_netcdf=True, encoding=encoding)
    write_bytes(path, contents.getvalue())


def load_results(path: str | os.PathLike[str]) -> "xarray.Dataset":
    """Read a file that `save_results` or the command line wrote.

    Args:
        path: Path that ends in ".npz" or ".nc" (needs h5netcdf).

    Returns:
        The arrays with their axes, coordinates, units and attributes.

    Raises:
        RefusedFile: If it is broken, not a file of results, or larger than half of the free memory.
        OSError: If it does not exist, is a folder, or cannot be read.
        ValueError: If the path ends otherwise.
        ImportError: If h5netcdf is not installed.
    """
    source = Path(path)
    if source.suffix not in (".npz", ".nc"):
        fail("path", "end in .npz or .nc", source.name)
    check_regular(source)  # a missing or unreadable file is not a broken one
    read = _read_npz
    if source.suffix == ".nc":
        import_extra("h5netcdf", ".nc files", "netcdf")
        read = _read_netcdf
    try:
        return read(source)
    except RefusedFile:
        raise
    except Exception as error:
        raise RefusedFile(
            f"{source} is broken, or not a file of results: {reason_of(error)}."
        ) from error


def _read_npz(path: Path) -> "xarray.Dataset":
    stored_arrays = npz_arrays(path)
    check_size(path, total_bytes(stored_arrays), None)
    arrays = {name: array.read() for name, array in stored_arrays.items()}
    dims = json.loads(str(arrays.pop(_AXES)))
    labels = json.loads(str(arrays.pop(_LABELS)))
    if not isinstance(dims, dict) or not isinstance(labels, dict):
        raise ValueError("the description of its arrays is not a dictionary")
    for name in dims:
        if name not in arrays:
            raise KeyError(name)
    coords = {name: arrays.pop(name) for name in labels["coords"]}
    return make_dataset(arrays, dims, coords=coords, units=labels["units"], attrs=labels["attrs"])


def _read_netcdf(path: Path) -> "xarray.Dataset":
    import xarray

    options = {
        "engine": "h5netcdf",
        "decode_times": False,
        "decode_timedelta": False,
        "phony_dims": "access",
    }
    with xarray.open_dataset(path, **options) as file:
        # HDF5 allocates by the shape in the file, which holds no byte of constant arrays.
        check_size(path, file.nbytes, None)
        dataset = file.load()
    labels = json.loads(dataset.attrs[_LABELS])
    variables = {}
    for name, dtype in labels["dtypes"].items():
        array = dataset[name]
        variables[name] = (array.dims, array.values.astype(dtype), array.attrs)
    dataset = dataset.assign(variables)
    dataset.attrs = labels["attrs"]
    return dataset
