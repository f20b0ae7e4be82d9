"""Results of a figure, with names for the axes of its arrays."""

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from dissociation._core.labelled import Families, Labelled, label
from dissociation.figures._protocol import Figure

COUNTED = ("seeds", "epochs")
"""Axes with the coordinates 0, 1, 2, ..."""


class Results(SimpleNamespace):
    """Results of a figure: the entries of its `AXES`, arrays or nested dictionaries of arrays, and more.

    Attributes:
        config: Configuration.
        data: Name and sizes of the dataset.
        seconds: Wall time in seconds of every part.
        member: One of the networks, which the report shows.
        diverged_at: Step at which a network diverged, or -1: [seeds]. Numbers of diverged networks are NaN.
    """

    member: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"`{name}` must not be set, got another value. Use `_replace`.")

    def _replace(self, **changes: Any) -> "Results":
        """Return a copy with other values."""
        return Results(**(vars(self) | changes))


def _leaves(tree: Any, words: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield the arrays of nested dictionaries with the keys that lead to them."""
    if isinstance(tree, Mapping):
        for word, inner in tree.items():
            yield from _leaves(inner, (*words, word))
    else:
        yield words, tree


def _axes_of(name: str, figure: Figure) -> tuple[str, ...]:
    """Return the axes of an array by the longest entry of `AXES` that begins its name."""
    beginning = max((part for part in figure.AXES if name.startswith(part)), key=len, default=None)
    return () if beginning is None else figure.AXES[beginning]


def flat_results_of(figure: Figure, results: Any) -> Labelled:
    """Return the arrays of a figure as in its `.npz` file, with keys at the ends of names."""
    arrays, axes = {}, {}
    for kind, tree in figure.arrays(results).items():
        for words, array in _leaves(tree):
            name, own = "_".join((kind, *map(str, words))), _axes_of(kind, figure)[len(words) :]
            if len(own) != np.ndim(array):
                raise ValueError(f"`axes` must name the axes of {name}, of shape {np.shape(array)}, got {own}.")
            arrays[name], axes[name] = array, own
    sizes = {axis: size for name, own in axes.items() for axis, size in zip(own, np.shape(arrays[name]), strict=True)}
    counted = {axis: np.arange(sizes[axis]) for axis in COUNTED if axis in sizes and axis not in arrays}
    units = getattr(figure, "UNITS", {})
    of_arrays = {name: unit for name in arrays for beginning, unit in units.items() if name.startswith(beginning)}
    return label(arrays, axes, coords=counted, units=of_arrays, attrs=figure.describe(results))


def families_of(figure: Figure, results: Any) -> Families:
    """Return the keys of a figure's dictionaries of arrays, by array and axis."""
    if (own := getattr(figure, "families", None)) is not None:
        return own(results)
    families: dict[str, tuple[str, ...]] = {}
    words: dict[str, dict[str | int, None]] = {}
    for kind, tree in figure.arrays(results).items():
        for place, _ in _leaves(tree):
            families[kind] = _axes_of(kind, figure)[: len(place)]
            for axis, word in zip(families[kind], place, strict=True):
                words.setdefault(axis, {})[word] = None
    return {kind: {axis: tuple(words[axis]) for axis in axes} for kind, axes in families.items() if axes}


def results_of(figure: Figure, results: Any) -> Labelled:
    """Return a figure's results as labelled arrays: `results_of(robustness, results).to_xarray()`.

    Args:
        figure: Module of the figure.
        results: Value of its `compute`.

    Returns:
        The arrays with the axes of `AXES`; variants, layers and measures, which end the arrays' names, are axes.
        Coordinates are the arrays named like an axis, and the numbers of seeds and epochs; attributes are those of
        `describe`.
    """
    return flat_results_of(figure, results).stacked(families_of(figure, results))
