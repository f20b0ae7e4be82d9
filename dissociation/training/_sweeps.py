"""Sweeps over the members of a grid of named axes, and results in those axes."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
        self._parts = tuple(_part({name: values}) for name, values in axes.items())

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
        return _of_parts((_part(quantities),))

    def __mul__(self, other: "Grid") -> "Grid":
        if not isinstance(other, Grid):
            return NotImplemented
        checks.check_distinct(
            "axes", [name for part in (*self._parts, *other._parts) for name in part]
        )
        return _of_parts((*self._parts, *other._parts))

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the name of every axis; a zipped axis joins its names by commas."""
        return tuple(",".join(part) for part in self._parts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the length of every axis."""
        return tuple(len(next(iter(part.values()))) for part in self._parts)

    def __len__(self) -> int:
        return math.prod(self.shape)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the quantities of every member, by name."""
        values = self.values
        return (
            {name: column[i].item() for name, column in values.items()} for i in range(len(self))
        )

    def __repr__(self) -> str:
        return f"Grid({', '.join(f'{name}: {size}' for name, size in zip(self.axes, self.shape, strict=True))})"

    @property
    def values(self) -> dict[str, np.ndarray]:
        """Return every quantity by member, [members] each."""
        return {
            name: values[place]
            for part, place in zip(
                self._parts, np.unravel_index(np.arange(len(self)), self.shape), strict=True
            )
            for name, values in part.items()
        }

    @property
    def coords(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return the axis of every quantity and the values along it."""
        return {
            name: (axis, values)
            for axis, part in zip(self.axes, self._parts, strict=True)
            for name, values in part.items()
        }

    def hyperparams(self, *names: str) -> dict[str, Array]:
        """Return the named quantities by member as floats, for `fit(hyperparams=...)`.

        Raises:
            ValueError: If a name is unknown, or distinct values become equal as floats.
            TypeError: If a quantity is text.

        Example:
            >>> Grid(rate=[1, 2], seed=[7]).hyperparams("rate")
            {'rate': Array([1., 2.], dtype=float32)}
        """
        values, chosen = self.values, {}
        for name in names:
            checks.check_choice("names", name, values)
            if values[name].dtype.kind not in "fiub":
                checks.fail_kind(
                    "names", "name quantities that are numbers", f"{name!r}, which is text"
                )
            with np.errstate(over="ignore", under="ignore"):
                chosen[name] = to_device(values[name], float)
            found, exact = np.asarray(chosen[name], np.float64), values[name].astype(np.float64)
            rounding = (
                0
                if values[name].dtype.kind in "iu"
                else 2 * float(jnp.finfo(chosen[name].dtype).eps)
            )
            near = np.allclose(found, exact, rtol=rounding, atol=0)
            if not near or len(np.unique(found)) < len(np.unique(values[name])):
                got = f"{name!r}, {values[name]} in {chosen[name].dtype}"
                checks.fail(
                    "names", "name quantities that floats distinguish", got, "Enable jax_enable_x64"
                )
        return chosen

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
        """Return indices of members whose quantities have these values, or one of several given values."""
        values, matching = self.values, np.ones(len(self), bool)
        for name, value in coordinates.items():
            checks.check_choice("coordinates", name, values)
            known = list(dict.fromkeys(values[name].tolist()))
            for wanted in np.ravel(value).tolist():
                if wanted not in known:
                    checks.fail(name, f"be one of {', '.join(map(repr, known))}", repr(wanted))
            matching &= np.isin(values[name], value)
        return np.flatnonzero(matching)

    def unflatten(self, tree: PyTree) -> PyTree:
        """Return results in named axes: every array [members, ...] becomes [*shape, ...]."""

        def one(leaf: Any) -> Any:
            if np.shape(leaf)[:1] != (len(self),):
                checks.fail(
                    "tree",
                    f"hold arrays of {len(self)} members, one for each of {self}",
                    np.shape(leaf),
                )
            return leaf.reshape(*self.shape, *leaf.shape[1:])

        if not any(hasattr(leaf, "shape") for leaf in jax.tree.leaves(tree)):
            checks.fail_kind("tree", f"hold arrays of {len(self)} members", describe(tree))
        return jax.tree.map(lambda leaf: one(leaf) if hasattr(leaf, "shape") else leaf, tree)

    def split(self, name: str) -> list[tuple[Any, "Grid | None"]]:
        """Split the grid along an axis whose members differ in shape, into groups that are one program each.

        Args:
            name: Axis of a single quantity, such as the width.

        Returns:
            For every value of the axis, the value and the grid of the other axes (None if there is
            none).

        Example:
            >>> [(width, len(grid)) for width, grid in Grid(width=[8, 64], seed=[0, 1, 2]).split("width")]
            [(8, 3), (64, 3)]
        """
        checks.check_choice("name", name, [axis for axis in self.axes if "," not in axis])
        rest = tuple(part for part in self._parts if name not in part)
        values = next(part[name] for part in self._parts if name in part)
        return [(value.item(), _of_parts(rest) if rest else None) for value in values]

    def join(self, name: str, results: Sequence[PyTree]) -> PyTree:
        """Join the results of the groups of `split(name)`, in the order of the members.

        Args:
            name: Name of the axis.
            results: One PyTree per value of the axis, of equal shapes, with the group's members
                first.
        """
        (_, rest), *others = self.split(name)
        checks.check_same_length(name, len(others) + 1, "results", len(results), "groups")
        kinds = [jax.tree.map(np.shape, result) for result in results]
        for place, kind in enumerate(kinds):
            if kind != kinds[0]:
                checks.fail(
                    f"results[{place}]", f"have the arrays of `results[0]`, {kinds[0]}", kind
                )
        axis = self.axes.index(name)

        def one(*leaves: Any) -> np.ndarray:
            parts = [
                rest.unflatten(np.asarray(leaf)) if rest else np.reshape(leaf, leaf.shape[1:])
                for leaf in leaves
            ]
            return np.stack(parts, axis).reshape(len(self), *leaves[0].shape[1:])

        return jax.tree.map(one, *results)


@jax.jit
def folded(key: Array, seeds: Array) -> Array:
    """Return a key for each seed."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, seeds)


def _of_parts(parts: tuple[Mapping[str, np.ndarray], ...]) -> Grid:
    grid = object.__new__(Grid)
    grid._parts = parts
    return grid


def _part(quantities: Mapping[str, Any]) -> Mapping[str, np.ndarray]:
    """Return the values of the quantities of one axis, whose members must differ."""
    part = {name: _values(name, values) for name, values in quantities.items()}
    (first, values), *others = part.items()
    for name, more in others:
        checks.check_same_length(first, len(values), name, len(more), "values")
    members = list(zip(*(values.tolist() for values in part.values()), strict=True))
    checks.check_distinct(",".join(part), members if others else values.tolist())
    return part


def _values(name: str, values: Any) -> np.ndarray:
    """Return the values of an axis: numbers or text."""
    if (
        isinstance(values, (list, tuple))
        and values
        and all(isinstance(value, str) for value in values)
    ):
        return np.asarray(values)
    given = as_array(name, values, "numbers or text")
    array = np.asarray(as_numbers(name, given, frozenset({"bool", "int", "float"})))
    if array.ndim != 1:
        checks.fail(name, "be one-dimensional", f"shape {array.shape}")
    if array.dtype.kind == "f" and np.isnan(array).any():
        checks.fail(name, "hold no NaN, by which no member is found", array.tolist())
    return array
