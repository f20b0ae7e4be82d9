"""Derivatives without differentiation."""

import jax


def directional(function, point, direction, step=1e-4):
    """Return central differences of the fourth order along a direction, of trees of arrays."""

    def at(number):
        return function(
            jax.tree.map(lambda part, way: part + number * step * way, point, direction)
        )

    return jax.tree.map(
        lambda a, b, c, d: (a - 8 * b + 8 * c - d) / (12 * step), *map(at, (-2, -1, 1, 2))
    )
