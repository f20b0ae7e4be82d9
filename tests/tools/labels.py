"""Labelled arrays, compared and of figures."""

import numpy as np

from dissociation import load_results
from dissociation._core.labelled import save_npz
from dissociation.figures import results_of
from dissociation.figures._results import families_of, flat_results_of


def assert_same(one, other):
    """Raises unless two have equal arrays, dtypes, names, units and attributes."""
    for mine, yours in ((one.arrays, other.arrays), (one.coords, other.coords)):
        assert list(mine) == list(yours)
        for name, array in mine.items():
            assert array.dtype == yours[name].dtype, name
            np.testing.assert_array_equal(array, yours[name])
    assert dict(one.dims) == dict(other.dims)
    assert one.units == other.units
    assert repr(one.attrs) == repr(other.attrs)  # NaN is not itself


def assert_labelled(figure, results, folder, dims):
    """Raises unless a figure's arrays have these axes, come back from files, and are all there in tables.

    Args:
        figure: A module.
        results: What it computed.
        folder: For files.
        dims: Of some arrays.

    Returns:
        The results with names.
    """
    found = results_of(figure, results)
    assert {name: found.dims[name] for name in dims} == dims
    assert_same(load_results(found.save(folder / "labelled.nc")), found)
    save_npz(folder / "labelled.npz", flat_results_of(figure, results), families_of(figure, results))
    assert_same(load_results(folder / "labelled.npz"), found)
    shown = [name for table in found.to_dataframe().values() for name in table.columns]
    assert set(found.arrays) <= set(shown)
    return found
