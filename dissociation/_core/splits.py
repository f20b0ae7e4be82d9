"""Folds, halves and blocks of rows, drawn by a fixed permutation so that the order of the rows does not matter."""

import numpy as np


def permutation(number: int) -> np.ndarray:
    """Return a fixed permutation [number], the same on every machine and with every NumPy version."""
    # Raw words of a bit generator are stable across versions of NumPy; its `permutation` is not.
    return np.argsort(np.random.Philox(key=1).random_raw(number), kind="stable")


def folds(number: int, num_folds: int, *, contiguous: bool = False) -> list[np.ndarray]:
    """Return disjoint sets of rows, of sizes that differ by at most one."""
    order = np.arange(number) if contiguous else permutation(number)
    return [np.sort(part) for part in np.array_split(order, num_folds)]
