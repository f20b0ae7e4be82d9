"""A figure's configuration with lists in place of values: a grid of configurations, each computed by itself.

What a figure trains at once, its seeds, is one program; configurations go in turn, and share compiled programs where
their shapes are the same.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax import Array

from dissociation.checks import check_distinct, fail
from dissociation.figures.artifacts import axes_of
from dissociation.figures.protocol import Figure
from dissociation.progress import MeterFactory
from dissociation.sweeps import Grid


@dataclasses.dataclass(frozen=True)
class ConfigGrid:
    """Configurations by named axes.

    Attributes:
        grid: The axes: values that are neither numbers nor text stand there as text.
        configs: In the order of the grid's members.
    """

    grid: Grid
    configs: tuple[Any, ...]

    def quick(self) -> "ConfigGrid":
        """Small runs of the same axes: what is swept stays as it is."""
        swept = [dict(zip(self.grid.axes, values, strict=True)) for values in self._values()]
        small = [dataclasses.replace(config.quick(), **own) for config, own in zip(self.configs, swept, strict=True)]
        return ConfigGrid(self.grid, tuple(small))

    def _values(self) -> list[list[Any]]:
        return [[getattr(config, name) for name in self.grid.axes] for config in self.configs]


class Swept:
    """Base of configurations: one that is made with lists in place of values is a `ConfigGrid`."""

    if not TYPE_CHECKING:  # a checker of types is told of single configurations

        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            """A configuration, or a grid of them."""
            names = [field.name for field in dataclasses.fields(cls)]
            given = dict(zip(names, args, strict=False)) | kwargs
            lists = {name: value for name, value in given.items() if isinstance(value, list)}
            return config_grid(cls, lists, given) if lists else super().__new__(cls)


def config_grid(kind: Any, lists: Mapping[str, Sequence[Any]], fixed: Mapping[str, Any] = {}) -> ConfigGrid:
    """All configurations of some lists of values.

    Args:
        kind: A figure's `Config`.
        lists: Values by field.
        fixed: Of other fields.

    Raises:
        ValueError: If a list is empty or names a value twice, or a configuration is refused.
    """
    for name, values in lists.items():
        if not values:
            fail(name, "list at least one value", "none")
        check_distinct(name, list(values))
    others = {name: value for name, value in fixed.items() if name not in lists}
    configs = [kind(**others, **dict(zip(lists, own, strict=True))) for own in itertools.product(*lists.values())]
    return ConfigGrid(Grid(**{name: _plain(values) for name, values in lists.items()}), tuple(configs))


def _plain(values: Sequence[Any]) -> list[Any]:
    """Numbers as they are, anything else as text."""
    numbers = all(isinstance(value, int | float) for value in values)
    return list(values) if numbers else [str(value) for value in values]


class GridResults(NamedTuple):
    """What a figure's configurations gave.

    Attributes:
        grid: What they are.
        results: Of each, what the figure's `compute` returned.
        arrays: Those that have one shape in all configurations, the grid's axes first.
        axes: Names of the axes of each.
    """

    grid: Grid
    results: tuple[Any, ...]
    arrays: dict[str, np.ndarray]
    axes: dict[str, tuple[str, ...]]


def compute_grid(
    figure: Figure,
    configs: ConfigGrid,
    *,
    key: Array,
    dataset: Any = None,
    folder: str | os.PathLike[str] | None = None,
    progress: str | MeterFactory | None = None,
) -> GridResults:
    """A figure's `compute` of every configuration, one after another.

    Args:
        figure: A module of figures.
        configs: Its `Config` with lists in place of values.
        key: Of each of them.
        dataset: In place of what each configuration names.
        folder: Where parts of each are kept, in folders named by what differs; a second call goes on from there.
        progress: See `dissociation.progress`.

    Returns:
        All results.

    Raises:
        WrongValue: If a configuration does not fit its data, before anything is computed.
        RefusedFile: If `folder` holds parts of another run.
    """
    data = [figure.source(config) if dataset is None else dataset for config in configs.configs]
    results = []
    for config, own, name in zip(configs.configs, data, names_of(configs.grid), strict=True):
        parts = None if folder is None else Path(folder) / name
        results.append(figure.compute(config, key=key, dataset=own, folder=parts, progress=progress))
    arrays, axes = stacked([figure.arrays(each) for each in results], configs.grid, figure.AXES)
    return GridResults(configs.grid, tuple(results), arrays, axes)


def names_of(grid: Grid) -> list[str]:
    """A name of a folder for each member of a grid."""
    return ["_".join(f"{name}-{value}".replace("/", "-") for name, value in member.items()) for member in grid]


def stacked(
    arrays: Sequence[Mapping[str, np.ndarray]], grid: Grid, axes: Mapping[str, tuple[str, ...]]
) -> tuple[dict[str, np.ndarray], dict[str, tuple[str, ...]]]:
    """Arrays of all members of a grid in one, with the grid's axes first; and the grid's own values.

    Args:
        arrays: Of each member, by name. What one member lacks, or has in another shape, is left out.
        grid: The members.
        axes: Names of the arrays' axes, see `artifacts.axes_of`.
    """
    whole: dict[str, np.ndarray] = {}
    named: dict[str, tuple[str, ...]] = {name: (name,) for name in grid.axes}
    for name in arrays[0]:
        own = [np.asarray(each[name]) for each in arrays if name in each]
        if len(own) == len(arrays) and len({(one.shape, one.dtype.kind) for one in own}) == 1:
            whole[name] = np.stack(own).reshape(*grid.shape, *own[0].shape)
            named[name] = (*grid.axes, *axes_of({name: own[0]}, axes)[name])
    values = grid.values
    for place, name in enumerate(grid.axes):
        along = values[name].reshape(grid.shape)
        whole[name] = along[tuple(slice(None) if k == place else 0 for k in range(along.ndim))]
    return whole, named
