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
"""Leading axes: names, a mapping of names to coordinates, or a grid whose axes replace the first axis."""


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


def check_names(name: str, tree: Any, beginning: str, *taken: str) -> None:
    """Raise if a tree, with names that start with `beginning`, does not fit into a file with axes `taken`."""
    names = [*taken, *(each for each, *_ in _fields(tree, beginning))]
    for each in names:
        check_name(name, each)
        if names.count(each) > 1:
            checks.fail(name, "give each array a name of its own", f"{each} twice")


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
    """Return a dataset of the arrays of a result: nested modules, named tuples, dictionaries and lists.

    Names of fields are joined by `_`. Axes are named by annotations, `Float[Array, "pairs r"]`, or
    `<array>_dim_<place>`. `UNITS` holds units of fields, and `axis_coordinates()` returns
    coordinates. Text and static fields become attributes. None and functions are omitted.
    """
    front, more = _front(over), _front(then)
    front = _Front((*front.axes, *more.axes), front.coords | more.coords, front.grid)
    arrays, dims, units, attrs = {}, {}, {}, {}
    for name, value, hint, unit in _fields(tree, ""):
        if name in arrays or name in attrs:
            checks.fail("tree", "give each array a name of its own", f"{name} twice")
        if hint is None:
            attrs[name] = value
            continue
        arrays[name], dims[name] = _placed(name, value, hint, front)
        units |= {name: unit} if unit else {}
    if not arrays:
        checks.fail_kind("tree", "hold arrays", f"an object of type {type(tree).__name__}")
    used = {axis for axes in dims.values() for axis in axes}
    beside = dict(front.coords) | getattr(tree, "axis_coordinates", dict)()
    coords = {name: values for name, (axis, values) in beside.items() if axis in used}
    dims |= {name: (axis,) for name, (axis, _) in beside.items() if name in coords}
    return make_dataset(arrays, dims, coords=coords, units=units, attrs=attrs)


def _front(over: Over) -> _Front:
    if isinstance(over, Axes):
        return _Front(over.axes, dict(over.coords), over.shape)
    if isinstance(over, Mapping):
        given = {
            name: (name, np.asarray(values)) for name, values in over.items() if values is not None
        }
        return _Front(tuple(over), given)
    return _Front((over,) if isinstance(over, str) else tuple(over or ()), {})


def _fields(
    tree: Any, name: str, hint: Any = (None, ()), unit: str = ""
) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield arrays and static fields with names, annotations (None for static fields) and units."""
    if tree is None or (callable(tree) and not dataclasses.is_dataclass(tree)):
        return
    if isinstance(tree, str):
        yield name or "text", tree, None, ""
    elif (fields := _record(tree)) is not None:
        bases, units = reversed(type(tree).__mro__), getattr(tree, "UNITS", {})
        hints = {
            k: hint
            for base in bases
            for k, hint in base.__dict__.get("__annotations__", {}).items()
        }
        axes = getattr(tree, "AXES", ())
        for field, static in fields.items():
            value, inner = getattr(tree, field), f"{name}_{field}" if name else field
            if not static:
                yield from _fields(value, inner, (hints.get(field), axes), units.get(field, ""))
            elif not callable(value):
                yield inner, value, None, ""
    elif isinstance(tree, Mapping) or (isinstance(tree, list | tuple) and not _is_leaf(tree)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _fields(value, f"{name}_{key}" if name else str(key), unit=unit)
    else:
        yield name or "values", tree, hint, unit


def _record(tree: Any) -> dict[str, bool] | None:
    """Return the fields of a named tuple or dataclass, True for static ones, or None."""
    if hasattr(tree, "_fields"):
        return dict.fromkeys(tree._fields, False)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return {
            field.name: bool(field.metadata.get("static")) for field in dataclasses.fields(tree)
        }
    return None


def _is_leaf(tree: Sequence[Any]) -> bool:
    """Return True if a list is an array, a non-empty list of plain numbers."""
    return bool(tree) and all(
        isinstance(item, bool | int | float | complex | np.generic) for item in tree
    )


def _placed(
    name: str, value: Any, hint: tuple[Any, tuple[str, ...]], front: _Front
) -> tuple[Any, tuple[str, ...]]:
    """Return an array and its axes, with the axis of a grid unfolded."""
    if isinstance(value, jax.Array) and number_kind(value.dtype) == "key":
        value = jax.random.key_data(value)
    shape = np.shape(value)
    for depth in (front.depth, 0):
        own = _own_axes(*hint, len(shape) - depth)
        if own is not None:
            break
    named = tuple(
        axis or f"{name}_dim_{i}" for i, axis in enumerate(own or [None] * (len(shape) - depth))
    )
    if not depth:
        return value, named
    if front.grid:
        if shape[0] != int(np.prod(front.grid)):
            members = int(np.prod(front.grid))
            wanted = (
                f"have {members} members on the first axis of every array, as the grid has "
                f"shape {front.grid}"
            )
            checks.fail("tree", wanted, f"shape {shape} in {name}")
        value = np.asarray(value).reshape(*front.grid, *shape[1:])
    return value, (*front.axes, *named)


def _own_axes(hint: Any, axes: tuple[str, ...], ndim: int) -> Sequence[str | None] | None:
    """Return the names of `ndim` axes, None for unnamed ones, or None if the annotation has more axes."""
    kinds = [kind for kind in (hint, *typing.get_args(hint)) if hasattr(kind, "index_variadic")]
    for kind in kinds:
        names = [
            None if (found := getattr(dim, "name", None)) == "_" else found for dim in kind.dims
        ]
        at, more = kind.index_variadic, ndim - len(names)
        if at is None and more >= 0:
            return [None] * more + names
        if at is not None and more >= -1:
            several = names[at]
            middle = [several and f"{several}_{i}" for i in range(more + 1)] if more else [several]
            # "..." stands for the class's `AXES` if their number fits.
            middle = list(axes) if several is None and len(axes) == more + 1 else middle
            return [*names[:at], *middle, *names[at + 1 :]]
    return None if kinds or ndim < 0 else [None] * ndim


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
    least = getattr(self, "LEAST", {})
    known = {name: value for name, value in fields.items() if value is not None}
    shown = ", ".join(
        f"{name}={_shown(value, least.get(name, -np.inf))}" for name, value in known.items()
    )
    return f"{type(self).__name__}({shown})"


def _shown(value: Any, least: float) -> str:
    if not eqx.is_array_like(value) or checks.is_traced(value):
        text = eqx.tree_pformat(value)
        if type(value) in (list, tuple) and len(text) > _LONGEST:
            return f"({eqx.tree_pformat(value[0])}, ..., {eqx.tree_pformat(value[-1])})"
        return text
    array = np.asarray(value)
    known = array[np.isfinite(array)] if array.dtype.kind in "iuf" else np.zeros(0)

    def word(number: Any, digits: int = 4) -> str:
        return f"< {least:.4g}" if number <= least else f"{number:.{digits}g}"

    if array.size <= _PRINTED:
        formatter: Any = (
            {"float": lambda number: word(number, 6)} if (known <= least).any() else None
        )
        return np.array2string(array, precision=6, formatter=formatter)
    return eqx.tree_pformat(value) + (
        f" from {word(known.min())} to {word(known.max())}" if known.size else ""
    )
