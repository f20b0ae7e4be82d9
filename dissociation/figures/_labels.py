"""A figure's results with names for their axes."""

from typing import Any

import numpy as np

from dissociation._core.labelled import Families, Labelled, label
from dissociation.figures._artifacts import axes_of
from dissociation.figures._protocol import Figure

COUNTED = ("seeds", "epochs")
"""Axes whose places are numbers from 0."""


def flat_results_of(figure: Figure, results: Any) -> Labelled:
    """The arrays of a figure as its `.npz` file has them, see `results_of`; those of families apart."""
    arrays = figure.arrays(results)
    axes = axes_of(arrays, figure.AXES)
    sizes = {axis: size for name, own in axes.items() for axis, size in zip(own, np.shape(arrays[name]), strict=True)}
    counted = {axis: np.arange(sizes[axis]) for axis in COUNTED if axis in sizes and axis not in arrays}
    units = getattr(figure, "UNITS", {})
    of_arrays = {name: unit for name in arrays for beginning, unit in units.items() if name.startswith(beginning)}
    return label(arrays, axes, coords=counted, units=of_arrays, attrs=figure.describe(results))


def families_of(figure: Figure, results: Any) -> Families:
    """How names of a figure's arrays go on: what its function `families` says, if it has one."""
    families = getattr(figure, "families", None)
    return {} if families is None else families(results)


def results_of(figure: Figure, results: Any) -> Labelled:
    """A figure's results as labelled arrays: `results_of(robustness, results).to_xarray()`.

    Args:
        figure: A module of figures.
        results: What its `compute` returned.

    Returns:
        Its arrays with the names in `AXES`; variants, layers and measures, which the arrays' names end in, are axes.
        Coordinates are the arrays that are named as an axis, and the numbers of seeds and epochs; attributes what
        `describe` says.
    """
    return flat_results_of(figure, results).stacked(families_of(figure, results))
