"""Results of measures and trainings, which convert to datasets, tables and files."""

import dataclasses
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import numpy as np

from dissociation._core import checks
from dissociation._core.conversion import number_kind
from dissociation._core.datasets import check_name, make_dataset, save_results, tables_of

if TYPE_CHECKING:
    import os
    from pathlib import Path

    import pandas
    import xarray

_PRINTED = 16
_LONGEST = 80


@runtime_checkable
class Axes(Protocol):
    """Interface of an ensemble over named axes, such as `training.Grid`."""

    @property
    def axes(self) -> tuple[str, ...]: ...  # noqa: D102

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102

    @property
    def coords(self) -> Mapping[str, tuple[str, np.ndarray]]: ...  # noqa: D102


Over = str | Sequence[str] | Mapping[str, Any] | Axes | None
"""Leading axes: names, names with coordinates, or a grid whose axes replace the first axis."""


class Labelled:
    """Mixin of methods that convert and save a result."""

    __slots__ = ()

    def to_xarray(self: Any, over: Over = None) -> "xarray.Dataset":
        """Return a dataset, see `dataset_of`."""
        return dataset_of(self, over)

    def to_dataframe(self: Any, over: Over = None) -> "dict[tuple[str, ...], pandas.DataFrame]":
        """Return tidy tables by the names of their axes, with a row per position along the axes.

        `found.to_dataframe()["items", "others"]` is the table of `pairwise`; single numbers are in
        the table `()`.
        """
        return tables_of(self.to_xarray(over))

    def save(self: Any, path: "str | os.PathLike[str]", over: Over = None) -> "Path":
        """Write a file that `load_results` reads, see `save_results`."""
        return save_results(self.to_xarray(over), path)


def check_names(name: str, tree: Any, prefix: str, *reserved: str) -> None:
    """Raise if arrays of a tree, named from `prefix` on, do not fit into a file.

    The file has axes `reserved`.
    """
    names = [*reserved, *(field_name for field_name, *_ in _fields(tree, prefix))]
    for field_name in names:
        check_name(name, field_name)
        if names.count(field_name) > 1:
            checks.fail(name, "give each array a name of its own", f"{field_name} twice")


class _Front(NamedTuple):
    """Axes before the annotated ones."""

    axes: tuple[str, ...]
    coords: dict[str, tuple[str, Any]]
    grid: tuple[int, ...] = ()  # shape that the first axis unfolds to

    @property
    def depth(self) -> int:
        """Return the number of leading axes of an array, in which a grid is one axis."""
        return len(self.axes) - max(len(self.grid) - 1, 0)


def dataset_of(
    tree: Any, over: Over = None, *, then: Mapping[str, Any] | None = None
) -> "xarray.Dataset":
    """Return a dataset of the arrays of a result.

    A result nests modules, named tuples, dictionaries and lists. Names of fields are joined by `_`.
    Axes are named by annotations, `Float[Array, "pairs r"]`, or `<array>_dim_<place>`. `UNITS`
    holds units of fields, and `axis_coordinates()` returns coordinates. Text and static fields
    become attributes. None and functions are omitted.
    """
    front = _front(over)
    inner = _front(then)
    front = _Front((*front.axes, *inner.axes), front.coords | inner.coords, front.grid)
    arrays = {}
    dims = {}
    units = {}
    attrs = {}
    for name, value, hint, unit in _fields(tree, ""):
        if name in arrays or name in attrs:
            checks.fail("tree", "give each array a name of its own", f"{name} twice")
        if hint is None:
            attrs[name] = value
            continue
        arrays[name], dims[name] = _placed(name, value, hint, front)
        if unit:
            units[name] = unit
    if not arrays:
        checks.fail_kind("tree", "hold arrays", f"an object of type {type(tree).__name__}")

    used = set().union(*dims.values())
    all_coords = dict(front.coords)
    all_coords |= getattr(tree, "axis_coordinates", dict)()
    coords = {}
    for name, (axis, values) in all_coords.items():
        if axis in used:
            coords[name] = values
            dims[name] = (axis,)
    return make_dataset(arrays, dims, coords=coords, units=units, attrs=attrs)


def _front(over: Over) -> _Front:
    """Return the leading axes."""
    if isinstance(over, Axes):
        return _Front(over.axes, dict(over.coords), over.shape)
    if isinstance(over, Mapping):
        coords = {}
        for name, values in over.items():
            if values is not None:
                coords[name] = (name, np.asarray(values))
        return _Front(tuple(over), coords)
    if isinstance(over, str):
        over = (over,)
    return _Front(tuple(over or ()), {})


def _fields(
    tree: Any, name: str, hint: Any = (None, ()), unit: str = ""
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield arrays and static fields with names, annotations (None for static fields) and units."""
    if tree is None or (callable(tree) and not dataclasses.is_dataclass(tree)):
        return
    if isinstance(tree, str):
        yield name or "text", tree, None, ""
        return
    fields = _record(tree)
    is_list = isinstance(tree, list | tuple) and not _is_leaf(tree)
    if fields is not None:
        yield from _fields_of_record(tree, name, fields)
    elif isinstance(tree, Mapping) or is_list:
        entries: Any = tree
        named = entries.items() if isinstance(tree, Mapping) else enumerate(entries)
        for key, value in named:
            yield from _fields(value, f"{name}_{key}" if name else str(key), unit=unit)
    else:
        yield name or "values", tree, hint, unit


def _fields_of_record(
    tree: Any, name: str, fields: dict[str, bool]
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield what `_fields` does, for a named tuple or dataclass."""
    hints = {}
    for base in reversed(type(tree).__mro__):
        hints |= base.__dict__.get("__annotations__", {})
    units = getattr(tree, "UNITS", {})
    axes = getattr(tree, "AXES", ())
    for field, is_static in fields.items():
        value = getattr(tree, field)
        field_name = f"{name}_{field}" if name else field
        if not is_static:
            yield from _fields(value, field_name, (hints.get(field), axes), units.get(field, ""))
        elif not callable(value):
            yield field_name, value, None, ""


def _record(tree: Any) -> dict[str, bool] | None:
    """Return the fields of a named tuple or dataclass, True for static ones, or None."""
    if hasattr(tree, "_fields"):
        return dict.fromkeys(tree._fields, False)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return {field.name: bool(field.metadata.get("static")) for field in fields}
    return None


def _is_leaf(tree: Sequence[Any]) -> bool:
    """Return True if a list is an array, a non-empty list of plain numbers."""
    plain = bool | int | float | complex | np.generic
    return bool(tree) and all(isinstance(element, plain) for element in tree)


def _placed(
    name: str, value: Any, hint: tuple[Any, tuple[str, ...]], front: _Front
) -> tuple[Any, tuple[str, ...]]:
    """Return an array and its axes, with the axis of a grid unfolded."""
    if isinstance(value, jax.Array) and number_kind(value.dtype) == "key":
        value = jax.random.key_data(value)
    shape = np.shape(value)
    depth = front.depth
    axes = _annotated_axes(*hint, len(shape) - depth)
    if axes is None:
        # The array has no leading axes.
        depth = 0
        axes = _annotated_axes(*hint, len(shape))
    if not axes:
        axes = [None] * (len(shape) - depth)
    names = tuple(axis or f"{name}_dim_{i}" for i, axis in enumerate(axes))
    if not depth:
        return value, names

    if front.grid:
        num_members = int(np.prod(front.grid))
        if shape[0] != num_members:
            requirement = (
                f"have {num_members} members on the first axis of every array, as the grid has "
                f"shape {front.grid}"
            )
            checks.fail("tree", requirement, f"shape {shape} in {name}")
        value = np.asarray(value).reshape(*front.grid, *shape[1:])
    return value, (*front.axes, *names)


def _annotated_axes(hint: Any, axes: tuple[str, ...], ndim: int) -> Sequence[str | None] | None:
    """Return the names of `ndim` axes, None for unnamed ones.

    `axes` are those that `...` in the annotation stands for. Return None if the annotation has more
    axes.
    """
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "index_variadic")]
    for kind in kinds:
        names = [getattr(dim, "name", None) for dim in kind.dims]
        names = [None if name == "_" else name for name in names]
        position = kind.index_variadic
        num_more = ndim - len(names)
        if position is None and num_more >= 0:
            return [None] * num_more + names
        if position is not None and num_more >= -1:
            variadic = names[position]
            middle = [variadic]
            if variadic is None and len(axes) == num_more + 1:
                # "..." stands for the class's `AXES` if their number fits.
                middle = list(axes)
            elif num_more:
                middle = [variadic and f"{variadic}_{i}" for i in range(num_more + 1)]
            return [*names[:position], *middle, *names[position + 1 :]]
    if kinds or ndim < 0:
        return None
    return [None] * ndim


class Result(eqx.Module, Labelled):
    """Base of results. `repr` prints small arrays as numbers, larger ones as shape and range.

    After a `vmap` over seeds, `result.to_xarray("seeds")` names the leading axis.

    Attributes:
        UNITS: Units of fields, by name.
        AXES: Axes that replace "..." in annotations if their number fits.
        LEAST: Bounds by field; numbers at or below print as "< bound".

    Example:
        >>> import jax.numpy as jnp
        >>> class Height(Result):
        ...     mean: jnp.ndarray
        ...     table: jnp.ndarray
        >>> Height(jnp.array([1.5, 2.0]), jnp.arange(1200.0).reshape(3, 400))
        Height(mean=[1.5 2. ], table=f32[3,400] from 0 to 1199)
    """

    UNITS: ClassVar[Mapping[str, str]] = {}
    AXES: ClassVar[tuple[str, ...]] = ()
    LEAST: ClassVar[Mapping[str, float]] = {}

    def __repr__(self) -> str:
        return printed(self)


def printed(self: Any) -> str:
    """Return a result as text, as the `__repr__` of modules and named tuples."""
    fields = self._asdict() if hasattr(self, "_asdict") else vars(self)
    bounds = getattr(self, "LEAST", {})
    words = []
    for name, value in fields.items():
        if value is not None:
            words.append(f"{name}={_printed_field(value, bounds.get(name, -np.inf))}")
    return f"{type(self).__name__}({', '.join(words)})"


def _printed_field(value: Any, bound: float) -> str:
    """Return a value as text, with numbers up to `bound` as "< bound"."""
    if not eqx.is_array_like(value) or checks.is_traced(value):
        text = eqx.tree_pformat(value)
        if type(value) in (list, tuple) and len(text) > _LONGEST:
            return f"({eqx.tree_pformat(value[0])}, ..., {eqx.tree_pformat(value[-1])})"
        return text
    array = np.asarray(value)
    numbers = np.zeros(0)
    if array.dtype.kind in "iuf":
        numbers = array[np.isfinite(array)]

    def word(number: Any, digits: int = 4) -> str:
        if number <= bound:
            return f"< {bound:.4g}"
        return f"{number:.{digits}g}"

    if array.size <= _PRINTED:
        formatter: Any = None
        if (numbers <= bound).any():
            formatter = {"float": lambda number: word(number, 6)}
        return np.array2string(array, precision=6, formatter=formatter)
    text = eqx.tree_pformat(value)
    if numbers.size:
        text += f" from {word(numbers.min())} to {word(numbers.max())}"
    return text
