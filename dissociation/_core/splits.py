"""Folds, halves and blocks of rows, drawn by a fixed permutation so that the order of the rows does not matter."""

import numpy as np

__all__ = ["folds", "permutation"]


def permutation(number: int) -> np.ndarray:
    """Return the fixed permutation of `number` rows: the same on every machine and with every NumPy version.

    Args:
        number: Number of rows.

    Returns:
        The integers from 0 to `number` - 1, [number].

    Example:
        >>> permutation(5)
        array([3, 2, 0, 1, 4])
    """
    # Raw words of a bit generator are stable across versions of NumPy; its `permutation` is not.
    return np.argsort(np.random.Philox(key=1).random_raw(number), kind="stable")


def folds(number: int, num_folds: int, *, contiguous: bool = False) -> list[np.ndarray]:
    """Return disjoint sets of rows, of sizes that differ by at most one.

    Args:
        number: Number of rows.
        num_folds: Number of sets, at most `number`; 2 for halves.
        contiguous: If True, each set is a run of neighbouring rows, as a time series needs; the rows must not be
            sorted or periodic then. If False, sets are drawn by `permutation`.

    Returns:
        Rising row numbers of every set.

    Example:
        >>> folds(6, 2), folds(6, 2, contiguous=True)
        ([array([2, 3, 5]), array([0, 1, 4])], [array([0, 1, 2]), array([3, 4, 5])])
    """
    order = np.arange(number) if contiguous else permutation(number)
    return [np.sort(part) for part in np.array_split(order, num_folds)]
