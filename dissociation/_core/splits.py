"""Folds, halves and blocks of rows."""

import numpy as np


def permutation(number: int) -> np.ndarray:
    """Return a permutation [number] that is the same everywhere."""
    # Across versions of NumPy, raw words of a bit generator are stable, unlike `permutation`.
    return np.argsort(np.random.Philox(key=1).random_raw(number), kind="stable")


def folds(number: int, num_folds: int, *, contiguous: bool = False) -> list[np.ndarray]:
    """Return disjoint sets of rows, whose sizes differ by at most one."""
    # Rows may be sorted or periodic, so folds are not taken by position.
    order = np.arange(number) if contiguous else permutation(number)
    return [np.sort(rows) for rows in np.array_split(order, num_folds)]


def fold_numbers(number: int, num_folds: int, *, contiguous: bool = False) -> np.ndarray:
    """Return the fold of each row, [number]."""
    numbers = np.zeros(number, int)
    for fold, rows in enumerate(folds(number, num_folds, contiguous=contiguous)):
        numbers[rows] = fold
    return numbers
