"""Arrays with dimensions, coordinates and units, and tables and files of them."""

import dataclasses
import importlib
import io
import itertools
import json
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dissociation._core.checks import check_choice, fail, fail_kind, is_traced
from dissociation._core.files import RefusedFile, reason_of, replacing, write_bytes

if TYPE_CHECKING:
    import pandas
    import xarray


Families = Mapping[str, Mapping[str, Sequence[str | int]]]
"""Axes of arrays that differ in their last words: beginning of names, axis, words."""

_AXES, _REST = "axes", "labelled"
_RESERVED = (_AXES, _REST, "file", "allow_pickle")
"""Names that arrays in an `.npz` file cannot have."""

_KINDS = {".npz": (b"PK", "zip archive"), ".nc": (b"\x89HDF", "HDF5 file")}
"""First bytes and format of result files, by suffix."""


@dataclasses.dataclass(frozen=True, eq=False)
class Labelled:
    """Named arrays with named axes, made by `label`.

    Attributes:
        arrays: NumPy arrays by name: numbers, booleans or text.
        dims: Axes of every array and coordinate, by name.
        coords: One-dimensional arrays by name. One with the name of its axis is the index of this axis.
        units: Units by name of array or coordinate.
        attrs: Further attributes, in the types of JSON.
    """

    arrays: Mapping[str, np.ndarray]
    dims: Mapping[str, tuple[str, ...]]
    coords: Mapping[str, np.ndarray]
    units: Mapping[str, str]
    attrs: Mapping[str, Any]

    def __post_init__(self):
        sizes: dict[str, tuple[int, str]] = {}
        for name, array in {**self.arrays, **self.coords}.items():
            if name in _RESERVED or not isinstance(name, str) or not name or "/" in name:
                fail("arrays", f"have names other than {', '.join(_RESERVED)}, without a slash", repr(name))
            axes = self.dims.get(name, ())
            if len(axes) != array.ndim or len(set(axes)) != len(axes):
                fail("dims", f"name the axes of {name}, of shape {array.shape}, each differently", axes)
            for axis, size in zip(axes, array.shape, strict=True):
                known, first = sizes.setdefault(axis, (size, name))
                if size != known:
                    fail("arrays", f"have {known} places along {axis} as {first} has", f"{size} in {name}")
            if name in self.coords and len(axes) != 1:
                fail("coords", "lie along one axis", f"{name} of shape {array.shape}")
        for name in sizes:
            if name in self.arrays or (name in self.coords and self.dims[name] != (name,)):
                fail("dims", "name an axis like an array only if the array is its coordinate", repr(name))

    def __getitem__(self, name: str) -> np.ndarray:
        known = {**self.arrays, **self.coords}
        check_choice("name", name, known)
        return known[name]

    def __repr__(self) -> str:
        lines = [type(self).__name__]
        for title, arrays in (("coordinates", self.coords), ("arrays", self.arrays)):
            lines += [f"  {title}:"] * bool(arrays)
            for name, array in arrays.items():
                sizes = ", ".join(f"{axis}: {size}" for axis, size in zip(self.dims[name], array.shape, strict=True))
                unit = f" in {self.units[name]}" if name in self.units else ""
                lines.append(f"    {name} [{sizes}] {array.dtype}{unit}")
        return "\n".join(lines)

    def stacked(self, families: Families) -> "Labelled":
        """Return the arrays, with the arrays of each family stacked along new leading axes.

        A family is a set of arrays whose names begin alike, such as `error_trained` and `error_scaled`. The place of a
        missing array is NaN. A family is not stacked if its arrays differ in axes, shape or dtype, or if an array is
        missing and the dtype has no NaN.

        Args:
            families: New axes of each family: `{"error": {"variants": ("trained", "scaled")}}` stacks `error_trained`
                [...] and `error_scaled` [...] as `error` [variants, ...].
        """
        found = {beginning: self._members(beginning, axes) for beginning, axes in families.items()}
        found = {beginning: members for beginning, members in found.items() if members}
        words: dict[str, tuple[str | int, ...]] = {}
        for beginning, members in found.items():
            for i, (axis, known) in enumerate(families[beginning].items()):
                here = [word for word in known if any(place[i] == word for place in members)]
                words[axis] = tuple(dict.fromkeys((*words.get(axis, ()), *here)))
        arrays, dims, units = dict(self.arrays), dict(self.dims), dict(self.units)
        for beginning, members in found.items():
            axes = tuple(families[beginning])
            first = self.arrays[next(iter(members.values()))]
            shape = tuple(len(words[axis]) for axis in axes)
            whole = len(members) == int(np.prod(shape))
            if not whole and first.dtype.kind not in "fc":
                continue
            array = np.full((*shape, *first.shape), np.nan if not whole else np.zeros((), first.dtype), first.dtype)
            for place, name in members.items():
                array[tuple(words[axis].index(word) for axis, word in zip(axes, place, strict=True))] = arrays.pop(name)
                dims[beginning] = (*axes, *dims.pop(name))
                units |= {beginning: units.pop(name)} if name in units else {}
            arrays[beginning] = array
        used = {axis for axes in dims.values() for axis in axes}
        coords = {**self.coords, **{axis: np.asarray(words[axis]) for axis in words if axis in used}}
        return label(arrays, dims, coords=coords, units=units, attrs=self.attrs)

    def _members(self, beginning: str, axes: Mapping[str, Sequence[str | int]]) -> dict[tuple[str | int, ...], str]:
        """Return a family's arrays by words, none if they differ in dtype or axes."""
        members = {
            words: name
            for words in itertools.product(*axes.values())
            if (name := "_".join((beginning, *map(str, words)))) in self.arrays
        }
        kinds = {(self.dims[name], self.arrays[name].shape, self.arrays[name].dtype) for name in members.values()}
        return members if len(kinds) == 1 and beginning not in self.arrays else {}

    def to_xarray(self) -> "xarray.Dataset":
        """Return a dataset of xarray. Attributes of compound types become JSON.

        Raises:
            ImportError: If xarray is not installed.
        """
        xarray = _extra("xarray")

        def variables(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
            units = {name: {"units": self.units[name]} if name in self.units else {} for name in arrays}
            return {name: (self.dims[name], array, units[name]) for name, array in arrays.items()}

        plain = {
            name: value if isinstance(value, str | int | float) and not isinstance(value, bool) else json.dumps(value)
            for name, value in self.attrs.items()
        }
        return xarray.Dataset(variables(self.arrays), coords=variables(self.coords), attrs=plain)

    def to_dataframe(self, *names: str) -> dict[tuple[str, ...], "pandas.DataFrame"]:
        """Return tidy tables of pandas: one per set of axes, with a row per position along the axes.

        Args:
            *names: Names of arrays, by default all.

        Returns:
            Tables by the names of their axes. A table has a column per axis (its coordinate, or positions from 0), per
            further coordinate and per array.

        Raises:
            ImportError: If pandas is not installed.
            ValueError: If a name is unknown.
        """
        pandas = _extra("pandas")
        groups: dict[frozenset[str], list[str]] = {}
        for name in names or self.arrays:
            check_choice("names", name, self.arrays)
            groups.setdefault(frozenset(self.dims[name]), []).append(name)
        return {self.dims[group[0]]: pandas.DataFrame(self._columns(group)) for group in groups.values()}

    def _columns(self, names: Sequence[str]) -> dict[str, np.ndarray]:
        axes = self.dims[names[0]]
        shape = self.arrays[names[0]].shape
        places = dict(zip(axes, np.indices(shape).reshape(len(axes), int(np.prod(shape))), strict=True))
        columns = {axis: self.coords[axis][place] if axis in self.coords else place for axis, place in places.items()}
        for name, values in self.coords.items():
            (axis,) = self.dims[name]
            if axis in places:
                columns.setdefault(name, values[places[axis]])
        for name in names:
            columns[name] = self.arrays[name].transpose([self.dims[name].index(axis) for axis in axes]).reshape(-1)
        return columns

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the arrays to a file that `load_results` reads, atomically, and return its path.

        Args:
            path: Path that ends in ".npz", or in ".nc" (needs xarray and h5netcdf). Complex numbers in ".nc" have the
                HDF5 form of h5py and NumPy.

        Raises:
            ValueError: If the path ends otherwise.
            ImportError: If a package is not installed.
            OSError: If the file cannot be written.
        """
        target = Path(path)
        if target.suffix == ".npz":
            save_npz(target, self, {})
        elif target.suffix == ".nc":
            _extra("h5netcdf")
            kinds = {name: array.dtype.str for name, array in {**self.arrays, **self.coords}.items()}
            rest = json.dumps({"dtypes": kinds, "attrs": self.attrs})
            drawn = io.BytesIO()
            self.to_xarray().assign_attrs({_REST: rest}).to_netcdf(drawn, engine="h5netcdf", invalid_netcdf=True)
            write_bytes(target, drawn.getvalue())
        else:
            fail("path", "end in .npz or .nc", target.name)
        return target


def label(
    arrays: Mapping[str, Any],
    dims: Mapping[str, Sequence[str]],
    *,
    coords: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> Labelled:
    """Return arrays with named axes.

    An array with the name of its only axis becomes a coordinate. The second of two equal axes of an array is called
    `other_<axis>`. Without a coordinate, an axis that differs in length between arrays is called `<axis>_<length>`.
    """
    known = {name: _on_host(name, value) for name, value in arrays.items()}
    axes = {name: tuple(dims.get(name, ())) for name in known}
    beside = {name: _on_host(name, value) for name, value in (coords or {}).items()}
    axes |= {name: tuple(dims.get(name, (name,))) for name in beside}
    for name in [name for name in known if axes[name] == (name,)]:
        beside[name] = known.pop(name)
    for name, array in {**known, **beside}.items():
        if len(axes[name]) != array.ndim:
            fail("dims", f"name the axes of {name}, of shape {array.shape}", axes[name])
    axes = _told_apart(axes, {**known, **beside}, {axis for name in beside for axis in axes[name]})
    for axis in sorted({axis for names in axes.values() for axis in names} - beside.keys()):
        if axis.startswith("other_") and (same := axis.removeprefix("other_")) in beside:
            beside[axis], axes[axis] = beside[same], (axis,)
    every = {**known, **beside}
    return Labelled(
        known, axes, beside, {k: v for k, v in (units or {}).items() if k in every}, as_json(dict(attrs or {}))
    )


def _told_apart(
    axes: Mapping[str, tuple[str, ...]], arrays: Mapping[str, np.ndarray], known: AbstractSet[str]
) -> dict[str, tuple[str, ...]]:
    """Return axes renamed so that none occurs twice in an array, and unknown ones have one length."""
    once = {}
    for name, own in axes.items():
        earlier = [own[:i].count(axis) for i, axis in enumerate(own)]
        marks = ["" if not i else "other_" if i == 1 else f"other{i}_" for i in earlier]
        once[name] = tuple(mark + axis for mark, axis in zip(marks, own, strict=True))
    lengths: dict[str, set[int]] = {}
    for name, own in axes.items():
        for axis, size in zip(own, arrays[name].shape, strict=True):
            lengths.setdefault(axis, set()).add(size)
    several = {axis for axis, sizes in lengths.items() if len(sizes) > 1} - known
    return {
        name: tuple(
            f"{new}_{size}" if old in several else new
            for new, old, size in zip(own, axes[name], arrays[name].shape, strict=True)
        )
        for name, own in once.items()
    }


def _on_host(name: str, value: Any) -> np.ndarray:
    if is_traced(value):
        fail_kind(name, "be known", "a traced value", "Label results outside of transformations")
    array = np.asarray(value)
    if array.dtype == object and all(isinstance(item, str) for item in array.flat):
        array = array.astype(str)
    if array.dtype.kind == "V":  # half precisions that NumPy does not know
        array = array.astype(np.float32)
    if array.dtype.kind not in "biufcU":
        fail_kind(name, "hold numbers, truth values or text", f"entries of dtype {array.dtype}")
    return array


def as_json(value: Any) -> Any:
    """Return a value after a round trip through JSON."""
    return json.loads(json.dumps(value, default=_plain))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    array = np.asarray(value)
    return array.tolist() if array.dtype.kind in "biufU" else str(value)


def save_npz(path: str | os.PathLike[str], labelled: Labelled, families: Families) -> None:
    """Write arrays and coordinates to an `.npz` file, with JSON for the rest."""
    rest = {
        "coords": list(labelled.coords), "units": labelled.units, "attrs": labelled.attrs, "families": as_json(families)
    }  # fmt: skip
    texts = {_AXES: np.asarray(json.dumps(labelled.dims)), _REST: np.asarray(json.dumps(rest))}
    with replacing(path) as file:
        np.savez_compressed(file, **labelled.arrays, **labelled.coords, **texts)  # pyright: ignore[reportArgumentType]


def load_results(path: str | os.PathLike[str]) -> Labelled:
    """Read a file that `Labelled.save` or the command line wrote.

    Args:
        path: Path that ends in ".npz" or ".nc" (needs xarray and h5netcdf).

    Returns:
        The arrays with their dimensions, coordinates, units and attributes.

    Raises:
        FileNotFoundError: If the file does not exist.
        RefusedFile: If it is broken, a folder, or not a file of results.
        OSError: If it cannot be read.
        ValueError: If the path ends otherwise.
        ImportError: If a package is not installed.
    """
    source = Path(path)
    if source.suffix not in _KINDS:
        fail("path", "end in .npz or .nc", source.name)
    if source.is_dir():
        raise RefusedFile(f"{source} is a folder, and no file of results.")
    if not source.is_file():
        raise FileNotFoundError(f"`path` must be a file of results, got {source}, where there is none.")
    if source.suffix == ".nc":
        _extra("h5netcdf")
    start, kind = _KINDS[source.suffix]
    with source.open("rb") as file:  # one that may not be read is not broken
        begun = file.read(len(start))
    if begun != start:
        found = f"no {kind}, as {source.suffix} files of results are" if begun else "empty"
        raise RefusedFile(f"{source} is broken, or no file of results: it is {found}.")
    read = _read_npz if source.suffix == ".npz" else _read_netcdf
    broken = (ValueError, TypeError, EOFError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error, OSError)
    try:
        return read(source)
    except broken as error:
        raise RefusedFile(f"{source} is broken, or no file of results: {reason_of(error)}.") from error


def _read_npz(path: Path) -> Labelled:
    with np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    dims, rest = json.loads(str(arrays.pop(_AXES))), json.loads(str(arrays.pop(_REST, "{}")))
    if not isinstance(dims, dict) or not isinstance(rest, dict):
        raise ValueError("what it says of its arrays is no dictionary")
    coords = {name: arrays.pop(name) for name in rest.get("coords", ())}
    found = label(arrays, dims, coords=coords, units=rest.get("units"), attrs=rest.get("attrs"))
    return found.stacked(rest["families"]) if rest.get("families") else found


def _read_netcdf(path: Path) -> Labelled:
    options = {"engine": "h5netcdf", "decode_times": False, "decode_timedelta": False, "phony_dims": "access"}
    with _extra("xarray").open_dataset(path, **options) as file:
        data = file.load()
    rest = json.loads(data.attrs[_REST])
    arrays = {str(name): data[name].values for name in data.variables}
    arrays = {name: values.astype(rest["dtypes"][name]) for name, values in arrays.items()}
    return label(
        {name: values for name, values in arrays.items() if name in data.data_vars},
        {str(name): tuple(map(str, data[name].dims)) for name in data.variables},
        coords={name: values for name, values in arrays.items() if name in data.coords},
        units={str(name): data[name].attrs["units"] for name in data.variables if "units" in data[name].attrs},
        attrs=rest["attrs"],
    )


def _extra(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f"{name} must be installed for this: pip install 'dissociation[labels]'.") from error
