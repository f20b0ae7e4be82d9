"""Check datasets and their files."""

from dissociation import load_results, save_results


def assert_saved(dataset, folder, dims):
    """Raise unless variables of a dataset have these axes, and both kinds of files restore it."""
    assert {name: dataset[name].dims for name in dims} == dims
    for suffix in ("npz", "nc"):
        assert_same(load_results(save_results(dataset, folder / f"saved.{suffix}")), dataset)


def assert_same(one, other):
    """Raise unless two datasets have equal arrays, dtypes, names, units and attributes."""
    assert one.identical(other), (one, other)
    assert {name: array.dtype for name, array in one.variables.items()} == {
        name: array.dtype for name, array in other.variables.items()
    }
