"""A figure's configuration with lists in place of values: a grid of configurations, each computed by itself.

What a figure trains at once, its seeds, is one program; configurations go in turn. They share compiled programs where
their shapes are the same, and trained networks where they differ only in what is done with them.
"""

import dataclasses
import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from jax import Array

from dissociation.checks import check_distinct, fail, fail_kind
from dissociation.figures.artifacts import sharing
from dissociation.figures.labels import results_of
from dissociation.figures.protocol import Figure
from dissociation.labelled import Labelled
from dissociation.progress import MeterFactory
from dissociation.sweeps import Grid

TRAINED = "trained"
"""The folder of a sweep for checkpoints of networks that several configurations share."""


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

    def __getattr__(self, name: str) -> Any:
        advice = "`figures.sweep.compute_grid` takes it, and `compute` one of its `configs`"
        raise AttributeError(f"a grid of configurations has no {name!r}: {advice}")

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
        labelled: Arrays that have one shape in all configurations, the grid's axes first.
    """

    grid: Grid
    results: tuple[Any, ...]
    labelled: Labelled


def compute_grid(
    figure: Figure,
    configs: Any,
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
        folder: Where parts of each are kept, in folders named by what differs; a second call goes on from there. What
            configurations that train the same networks share is there, in a folder `TRAINED`, so that without a
            folder each trains its own.
        progress: See `dissociation.progress`.

    Returns:
        All results.

    Raises:
        WrongValue: If a configuration does not fit its data, before anything is computed.
        RefusedFile: If `folder` holds parts of another run.
    """
    if not isinstance(configs, ConfigGrid):
        fail_kind("configs", "be a configuration with lists in place of values", repr(configs))
    for config in configs.configs if dataset is None else ():  # all are refused, or none
        figure.source(config)
    results = []
    with sharing(Path(folder or "") / TRAINED):
        for config, name in zip(configs.configs, names_of(configs.grid), strict=True):
            own = figure.source(config) if dataset is None else dataset
            parts = None if folder is None else Path(folder) / name
            results.append(figure.compute(config, key=key, dataset=own, folder=parts, progress=progress))
    labelled = stacked([results_of(figure, each) for each in results], configs.grid)
    return GridResults(configs.grid, tuple(results), labelled)


def names_of(grid: Grid) -> list[str]:
    """A name of a folder for each member of a grid."""
    return ["_".join(f"{name}-{value}".replace("/", "-") for name, value in member.items()) for member in grid]


def stacked(members: Sequence[Labelled], grid: Grid) -> Labelled:
    """Results of all members of a grid in one, with the grid's axes first.

    Args:
        members: Results of each. Arrays that one of them lacks, or has along other axes, and coordinates that differ,
            are left out.
        grid: The members.
    """
    first, values = members[0], grid.values
    arrays, dims = {}, {}
    for name, array in first.arrays.items():
        own = [each.arrays[name] for each in members if name in each.arrays]
        alike = len(own) == len(members) and len({one.shape for one in own}) == 1
        alike &= not {name, *first.dims[name]} & {*grid.axes}
        if alike and all(each.dims[name] == first.dims[name] for each in members):
            arrays[name] = np.stack(own).reshape(*grid.shape, *array.shape)
            dims[name] = (*grid.axes, *first.dims[name])
    used = {dim for names in dims.values() for dim in names}
    coords = {}
    for name, along in first.coords.items():
        same = all(name in each.coords and np.array_equal(each.coords[name], along) for each in members)
        if same and first.dims[name][0] in used:
            coords[name], dims[name] = along, first.dims[name]
    for place, name in enumerate(grid.axes):
        along = values[name].reshape(grid.shape)
        coords[name], dims[name] = along[tuple(slice(None) if k == place else 0 for k in range(along.ndim))], (name,)
    units = {name: unit for name, unit in first.units.items() if name in arrays or name in coords}
    return Labelled(arrays, dims, coords, units, {})


def lists_in(words: Sequence[str], config: Any) -> dict[str, list[str]]:
    """Fields of a configuration that are given several values on a command line, but for those that take several.

    Args:
        words: Of the command line.
        config: A configuration: which fields are there, and which take several values.

    Example:
        >>> from dissociation.figures.robustness import Config
        >>> lists_in("robustness --width 64 128 --num-seeds 3".split(), Config())
        {'width': ['64', '128']}
    """
    single = {field.name for field in dataclasses.fields(config) if not isinstance(getattr(config, field.name), tuple)}
    found: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
            found.pop(name, None)  # of an option that is given twice the last holds
        elif name in single:
            found.setdefault(name, []).append(word)
    return {name: values for name, values in found.items() if len(values) > 1}


def words_of(words: Sequence[str], lists: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """A command line for each member of the grid that lists on one make, in the order of `Grid`."""
    left, name = [], ""
    for word in words:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].replace("-", "_")
        if name not in lists:
            left.append(word)
    options = [[f"--{name.replace('_', '-')}", "{}"] for name in lists]
    return [
        [*left, *(part.format(value) for option, value in zip(options, own, strict=True) for part in option)]
        for own in itertools.product(*lists.values())
    ]
