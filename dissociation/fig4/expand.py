"""The four rewrites of a hidden layer, under the name that the notebook of the paper imports them by."""

from dissociation.rewrites._neurons import (
    add_phantom_zero_neurons,
    add_random_zero_neurons,
    duplicate_neurons,
    scale_neurons,
)

__all__ = ["add_phantom_zero_neurons", "add_random_zero_neurons", "duplicate_neurons", "scale_neurons"]
