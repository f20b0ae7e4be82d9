"""Protocol of figures, their computation, and parts of their datasets and drawings."""

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import matplotlib.figure
import matplotlib.pyplot as plt
import numpy as np
import xarray
from jaxtyping import Array

from dissociation._core.checks import (
    check_choice,
    check_count,
    check_distinct,
    check_non_negative,
    fail,
)
from dissociation._core.datasets import as_json
from dissociation.figures._cache import AnyMeter, Cache, CacheFolder, identity_of
from dissociation.plotting._axes import house_style


@runtime_checkable
class Figure(Protocol):
    """Module of a figure, listed by `figures()` of its package.

    Attributes:
        STEM: Name of the files.
        SHOWS: Purpose of the figure in a sentence, the help of its command.
        Config: Class of the options, a frozen dataclass that checks itself, defined in the module.
            Its fields' docstrings are help texts. Its method `quick` returns the options of a smoke
            run.
    """

    @property
    def STEM(self) -> str: ...  # noqa: D102, N802

    @property
    def SHOWS(self) -> str: ...  # noqa: D102, N802

    @property
    def Config(self) -> Callable[..., Any]: ...  # noqa: D102, N802

    def source(self, config: Any) -> Any:
        """Load the data, whose contents belong to the identity of a run.

        Raise an error if an option does not fit.
        """
        ...

    def compute(
        self,
        config: Any,
        *,
        key: Array,
        data: Any = None,
        cache: CacheFolder = None,
        progress: AnyMeter = None,
    ) -> xarray.Dataset:
        """Compute the dataset of the figure, with coordinates and units.

        The attribute `config` is the configuration as JSON.

        Args:
            config: Options.
            key: Key of all randomness.
            data: Data in place of those of `source`.
            cache: Folder of cached arrays, from which a second call with the same arguments
                resumes.
            progress: Meter: "auto", "terminal", a function that opens one, or None.

        Raises:
            RefusedFile: If `cache` holds arrays of another run, or broken ones.
            WrongValue: If an option does not fit the data, or all networks diverged.
        """
        ...

    def draw(self, dataset: xarray.Dataset) -> matplotlib.figure.Figure:
        """Draw the value of `compute`, or of `load_results`, without further measurements."""
        ...

    def caption(self, dataset: xarray.Dataset) -> str:
        """Return a caption of two to six sentences, with numbers from the dataset.

        Panel by panel (a, b, ...): content, numbers of members and samples, data, meaning of lines
        and bands.
        """
        ...

    def headline(self, dataset: xarray.Dataset) -> str:
        """Return a line with the data and the size of the run."""
        ...

    def table(self, dataset: xarray.Dataset) -> list[list[str]]:
        """Return a header and rows of cells."""
        ...


class Settings:
    """Base of the options of a figure, frozen dataclasses that check themselves."""

    def check(self, **limits: Any) -> None:
        """Check fields, entries of tuples one by one.

        A limit is the least count, a pair of the least and largest count or (in floats) real
        number, a collection of names, or a function that checks a name and a value.
        """
        for name, limit in limits.items():
            setting = getattr(self, name)
            if isinstance(setting, tuple | list):
                check_distinct(name, setting)
                for entry in setting:
                    _check_limit(name, entry, limit)
            else:
                _check_limit(name, setting, limit)


def _check_limit(name: str, value: Any, limit: Any) -> None:
    """Raise unless a value is within a limit of `Settings.check`."""
    if callable(limit):
        limit(name, value)
    elif isinstance(limit, int):
        check_count(name, value, minimum=limit)
    elif isinstance(next(iter(limit)), str):
        check_choice(name, value, limit)
    elif isinstance(limit[0], int):
        check_count(name, value, minimum=limit[0], maximum=limit[1])
    else:
        check_non_negative(name, value)
        if not limit[0] <= value <= limit[1]:
            fail(name, f"lie from {limit[0]:g} to {limit[1]:g}", value)


def run(
    body: Callable[..., xarray.Dataset],
    config: Any,
    *,
    key: Array,
    data: Any,
    cache: CacheFolder,
    progress: AnyMeter = None,
) -> xarray.Dataset:
    """Return `body(config, key, data, cache)`, a dataset, with the configuration as an attribute.

    Args:
        body: Function that computes the dataset, with an open `Cache`.
        config: Options of the figure.
        key: Key of all randomness.
        data: Data, or None if the figure simulates them.
        cache: Folder of cached arrays, or an open `Cache` of this run; None keeps nothing.
        progress: Meter: "auto", "terminal", a function that opens one, or None.
    """
    with ExitStack() as stack:
        if not isinstance(cache, Cache):
            identity = identity_of(config, key, data)
            cache = stack.enter_context(Cache(cache, identity, progress))
        dataset = body(config, key, data, cache)
        return dataset.assign_attrs(config=json.dumps(as_json(config)))


def drawing(
    draw: Callable[[xarray.Dataset], matplotlib.figure.Figure],
) -> Callable[[xarray.Dataset], matplotlib.figure.Figure]:
    """Return `draw` in the style of the package.

    The figure is closed in pyplot, so that a notebook shows it once.
    """

    @functools.wraps(draw)
    def drawn(dataset: xarray.Dataset) -> matplotlib.figure.Figure:
        with house_style():
            figure = draw(dataset)
        plt.close(figure)
        return figure

    return drawn


def decoded(value: Any) -> Any:
    """Return `value` decoded from JSON, or unchanged if it is not JSON."""
    try:
        return json.loads(value)
    except (TypeError, ValueError):  # a number or a sentence
        return value


def config_of(dataset: xarray.Dataset) -> SimpleNamespace:
    """Return the configuration of a figure's dataset; tuples are lists."""
    return SimpleNamespace(**json.loads(dataset.attrs["config"]))


def rows(array: xarray.DataArray, axis: str) -> dict[str, np.ndarray]:
    """Return the arrays along an axis by coordinate, without arrays of NaN alone."""
    row_of_name = {}
    for name in array[axis].values:
        row = array.sel({axis: name}).values
        if not np.isnan(row).all():
            row_of_name[str(name)] = row
    return row_of_name


def padded(arrays: Sequence[np.ndarray], fill: float | int = np.nan) -> np.ndarray:
    """Return arrays of equal rank stacked along a new first axis.

    They are padded with `fill` to the largest sizes.
    """
    sizes = np.max([array.shape for array in arrays], 0)
    stacked = np.full((len(arrays), *sizes), fill, np.result_type(*arrays))
    for padded_array, array in zip(stacked, arrays, strict=True):
        corner = tuple(map(slice, array.shape))
        padded_array[corner] = array
    return stacked
