"""Sweeps over the members of a grid of named axes, and results in those axes."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from dissociation._core import checks
from dissociation._core.conversion import as_array, as_numbers, describe, to_device
from dissociation._core.keys import typed
from dissociation._core.types import PRNGKey, PyTree
from dissociation._core.validation import validated


class Grid:
    """Product of named axes: members in the order of `itertools.product`, the last axis fastest.

    Seeds are an axis like any other. `Grid.zipped` makes one axis of several quantities that vary
    together, and `first * second` the product of two grids.

    Args:
        **axes: Values of each quantity, at least one and without repetition: numbers, or text (the
            name of an optimiser).

    Raises:
        ValueError: If there is no axis, or an axis has no values, NaN, or a repeated value.
        TypeError: If the values of an axis are neither numbers nor text.

    Example:
        >>> grid = Grid(weight_decay=[0.1, 0.3], seed=[0, 1, 2])
        >>> len(grid), grid.axes, grid.shape
        (6, ('weight_decay', 'seed'), (2, 3))
        >>> grid.values["seed"]
        array([0, 1, 2, 0, 1, 2])
        >>> grid.unflatten(np.arange(6))
        array([[0, 1, 2],
               [3, 4, 5]])
        >>> grid.where(weight_decay=0.3)
        array([3, 4, 5])
    """

    def __init__(self, **axes: Any):
        if not axes:
            checks.fail("axes", "name at least one axis", "none")
        self._axes = tuple(_axis({name: values}) for name, values in axes.items())

    @classmethod
    def zipped(cls, **quantities: Any) -> "Grid":
        """Return a grid of one axis, along which several quantities vary together.

        Raises:
            ValueError: If the quantities differ in their number of values, or two members are
                equal.

        Example:
            >>> (Grid.zipped(width=[8, 64], rate=[0.1, 0.01]) * Grid(seed=[0, 1])).axes
            ('width,rate', 'seed')
        """
        if not quantities:
            checks.fail("quantities", "name at least one", "none")
        return _grid_of((_axis(quantities),))

    def __mul__(self, other: "Grid") -> "Grid":
        if not isinstance(other, Grid):
            return NotImplemented
        axes = (*self._axes, *other._axes)
        checks.check_distinct("axes", [name for axis in axes for name in axis])
        return _grid_of(axes)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the name of every axis; a zipped axis joins its names by commas."""
        return tuple(map(",".join, self._axes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the length of every axis."""
        columns = [next(iter(axis.values())) for axis in self._axes]
        return tuple(map(len, columns))

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the quantities of every member, by name."""
        values = self.values
        for member in range(len(self)):
            yield {name: column[member].item() for name, column in values.items()}

    def __repr__(self) -> str:
        sizes = [f"{name}: {size}" for name, size in zip(self.axes, self.shape, strict=True)]
        return f"Grid({', '.join(sizes)})"

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Return every quantity by member, [members] each."""
        values = {}
        indices_of_axes = np.unravel_index(np.arange(len(self)), self.shape)
        for axis, indices in zip(self._axes, indices_of_axes, strict=True):
            for name, column in axis.items():
                values[name] = column[indices]
        return values

    @property
    def coords(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the axis of every quantity and the values along it."""
        coords = {}
        for axis_name, axis in zip(self.axes, self._axes, strict=True):
            for name, column in axis.items():
                coords[name] = (axis_name, column)
        return coords

    def hyperparams(self, *names: str) -> dict[str, Array]:
        """Return the named quantities by member as floats, for `fit(hyperparams=...)`.

        Raises:
            ValueError: If a name is unknown, or distinct values become equal as floats.
            TypeError: If a quantity is text.

        Example:
            >>> Grid(rate=[1, 2], seed=[7]).hyperparams("rate")
            {'rate': Array([1., 2.], dtype=float32)}
        """
        values = self.values
        hyperparams = {}
        for name in names:
            checks.check_choice("names", name, values)
            exact = values[name]
            if exact.dtype.kind not in "fiub":
                checks.fail_kind(
                    "names", "name quantities that are numbers", f"{name!r}, which is text"
                )
            with np.errstate(over="ignore", under="ignore"):
                floats = to_device(exact, float)
            hyperparams[name] = floats

            tolerance = 2 * float(jnp.finfo(floats.dtype).eps)
            if exact.dtype.kind in "iu":
                tolerance = 0
            rounded = np.asarray(floats, np.float64)
            is_near = np.allclose(rounded, exact.astype(np.float64), rtol=tolerance, atol=0)
            if not is_near or len(np.unique(rounded)) < len(np.unique(exact)):
                checks.fail(
                    "names",
                    "name quantities that floats distinguish",
                    f"{name!r}, {exact} in {floats.dtype}",
                    "Enable jax_enable_x64",
                )
        return hyperparams

    @validated
    def keys(self, key: PRNGKey, name: str = "seed") -> Array:
        """Return a key per member, which depends only on the member's seed: [members].

        Args:
            key: Key into which the seeds are folded.
            name: Name of the quantity with the seeds, integers from 0 to 4294967295.
        """
        return folded(typed(key), self.seeds(name))

    def seeds(self, name: str = "seed") -> Array:
        """Return the seeds of the members: [members]."""
        values = self.values
        checks.check_choice("name", name, values)
        for seed in values[name].tolist():
            checks.check_seed(name, seed)
        return to_device(values[name], np.uint32)

    def where(self, **coordinates: Any) -> np.ndarray:
        """Return indices of members whose quantities have a given value, or one of several."""
        values = self.values
        is_matching = np.ones(len(self), bool)
        for name, coordinate in coordinates.items():
            checks.check_choice("coordinates", name, values)
            choices = list(dict.fromkeys(values[name].tolist()))
            for choice in np.ravel(coordinate).tolist():
                if choice not in choices:
                    checks.fail(name, f"be one of {', '.join(map(repr, choices))}", repr(choice))
            is_matching &= np.isin(values[name], coordinate)
        return np.flatnonzero(is_matching)

    def unflatten(self, tree: PyTree) -> PyTree:
        """Return results in named axes: every array [members, ...] becomes [*shape, ...]."""
        if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(tree)):
            checks.fail_kind("tree", f"hold arrays of {len(self)} members", describe(tree))

        def in_axes(leaf: Any) -> Any:
            if not hasattr(leaf, "shape"):
                return leaf
            if np.shape(leaf)[:1] != (len(self),):
                checks.fail(
                    "tree",
                    f"hold arrays of {len(self)} members, one for each of {self}",
                    np.shape(leaf),
                )
            return leaf.reshape(*self.shape, *leaf.shape[1:])

        return jax.tree.map(in_axes, tree)


@jax.jit
def folded(key: Array, seeds: Array) -> Array:
    """Return a key for each seed."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, seeds)


def _grid_of(axes: tuple[Mapping[str, np.ndarray], ...]) -> Grid:
    """Return the grid of some axes, each a mapping from quantities to values."""
    grid = object.__new__(Grid)
    grid._axes = axes
    return grid


def _axis(quantities: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Return the values of the quantities of one axis, whose members must differ."""
    axis = {name: _values(name, values) for name, values in quantities.items()}
    first_name, first_values = next(iter(axis.items()))
    for name, values in axis.items():
        checks.check_same_length(first_name, len(first_values), name, len(values), "values")

    members = first_values.tolist()
    if len(axis) > 1:
        columns = [values.tolist() for values in axis.values()]
        members = list(zip(*columns, strict=True))
    checks.check_distinct(",".join(axis), members)
    return axis


def _values(name: str, values: Any) -> np.ndarray:
    """Return the values of an axis: numbers or text."""
    if isinstance(values, list | tuple) and values and all(isinstance(v, str) for v in values):
        return np.asarray(values)
    numbers = as_array(name, values, "numbers or text")
    kinds = frozenset({"bool", "int", "float"})
    array = np.asarray(as_numbers(name, numbers, kinds))
    if array.ndim != 1:
        checks.fail(name, "be one-dimensional", f"shape {array.shape}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        checks.fail(name, "hold no NaN, by which no member is found", array.tolist())
    return array
