"""Simulate states of linear systems with noise."""

import numpy as np


def follow(matrix, num_steps, noise, rng):
    """Return states [num_steps + 1, d] of x' = A x + `noise` z, with a normal initial state and normal z."""
    path = [rng.normal(size=len(matrix))]
    for _ in range(num_steps):
        path.append(matrix @ path[-1] + noise * rng.normal(size=len(matrix)))
    return np.asarray(path)
