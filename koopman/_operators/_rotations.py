"""Newton's method over rotations, for two matrices of norm 1."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dissociation._core.distances import root
from dissociation._core.linalg import product
from koopman._operators._numerics import positive_or_one, rounding_unit

RADIUS = 1.4
"""Largest step in Frobenius norm, at which no plane turns by more than one radian."""


def norm(x: Array) -> Array:
    """Return Frobenius norms of matrices, with zero gradient at zero."""
    return root(jnp.sum(x**2, (-2, -1)))


class Point(NamedTuple):
    """State of a descent."""

    rotation: Array  # C
    moved: Array  # C B C^T
    energy: Array  # |A - C B C^T|^2 / 2
    slope: Array  # minus the gradient, skew
    radius: Array
    step: Array


def descend(
    a: Array,
    b: Array,
    start: Array,
    *,
    num_steps: int | Array,
    tolerance: float,
    num_inner_steps: int,
) -> Point:
    """Take trust-region Newton steps until the gradient is at most `tolerance`.

    At most `num_steps` steps are taken.

    Source: Absil, Mahony and Sepulchre (2008), Optimization algorithms on matrix manifolds,
    algorithms 10 and 11.
    """
    rounding = 10 * rounding_unit(a)

    def point_at(rotation: Array, radius: Array, step: Array) -> Point:
        moved = product(rotation, product(b, rotation.T))
        # E -> E - <skew [R, M^T], W> + <[W, A], [W, M]> / 2 + O(|W|^3) for a step C -> exp(W) C
        # along a skew W, with M = C B C^T, R = A - M and commutators [X, Y] = X Y - Y X.
        residual = a - moved
        energy = 0.5 * jnp.sum(residual**2)
        slope = skew(_commutator(residual, moved.T))
        return Point(rotation, moved, energy, slope, radius, step)

    def is_unfinished(point: Point) -> Array:
        return (point.step < num_steps) & (norm(point.slope) > tolerance)

    def advance(point: Point) -> Point:
        def curvature(w: Array) -> Array:
            first = _commutator(_commutator(w, a), point.moved.T)
            second = _commutator(_commutator(w, point.moved), a.T)
            return 0.5 * skew(first + second)

        turn, bent, is_at_edge = newton_step(point.slope, curvature, point.radius, num_inner_steps)
        predicted = jnp.sum(turn * point.slope) - 0.5 * jnp.sum(turn * bent)
        trial = point_at(_turned(turn, point.rotation), point.radius, point.step)
        # Rounding of equal energies must not reject a step.
        noise = rounding * jnp.sqrt(point.energy)
        ratio = (point.energy - trial.energy + noise) / (predicted + noise)

        wider = jnp.minimum(2 * point.radius, RADIUS)
        radius = jnp.where((ratio > 0.75) & is_at_edge, wider, point.radius)
        radius = jnp.where(ratio < 0.25, 0.25 * norm(turn), radius)
        accepted = jax.tree.map(lambda new, old: jnp.where(ratio > 0.05, new, old), trial, point)
        return accepted._replace(radius=radius, step=point.step + 1)

    first = point_at(start, jnp.asarray(RADIUS, a.dtype), jnp.asarray(0))
    return lax.while_loop(is_unfinished, advance, first)


def _commutator(x: Array, y: Array) -> Array:
    return product(x, y) - product(y, x)


def skew(x: Array) -> Array:
    """Return the skew part of a matrix."""
    return 0.5 * (x - x.T)


def _turned(turn: Array, rotation: Array) -> Array:
    """Return an orthogonal matrix that is exp(W) C to second order."""
    # I + W + W^2 / 2 + W^3 / 8 is orthogonal up to -W^6 / 64; Newton-Schulz steps converge to the
    # polar factor.
    square = product(turn, turn)
    series = turn + 0.5 * square + 0.125 * product(square, turn)
    moved = rotation + product(series, rotation)
    for _ in range(3):
        gram = product(moved.T, moved)
        moved = 1.5 * moved - 0.5 * product(moved, gram)
    return moved


class _Step(NamedTuple):
    """State of conjugate gradients."""

    turn: Array  # W
    bent: Array  # H W
    residual: Array  # slope - H W
    direction: Array  # search direction
    number: Array
    is_at_edge: Array  # True at the edge of the trust region
    is_done: Array


def newton_step(
    slope: Array, curvature: Callable[[Array], Array], radius: Array, num_steps: int
) -> tuple[Array, Array, Array]:
    """Return W within a radius that minimises -<slope, W> + <W, H W> / 2.

    Return also H W, and True if W is at the edge.

    Source: Steihaug (1983), truncated conjugate gradients.
    """
    size = norm(slope)
    target = size * jnp.minimum(size, 0.1)  # for quadratic convergence

    def advance(step: _Step) -> _Step:
        direction = step.direction
        bent_direction = curvature(direction)
        bend = jnp.sum(direction * bent_direction)
        old_square = jnp.sum(step.residual**2)
        length = old_square / positive_or_one(bend)

        # `to_edge` is the positive root t of |W + t direction| = radius.
        square = jnp.sum(direction**2)
        along = jnp.sum(step.turn * direction)
        room = jnp.maximum(radius**2 - jnp.sum(step.turn**2), 0.0)
        to_edge = room / (along + jnp.sqrt(along**2 + square * room))

        # Turns within an eigenspace have zero curvature up to rounding. After the first step they
        # do not lower E.
        is_bend_rounding = jnp.abs(bend) <= 100 * rounding_unit(slope) * square
        is_flat = (step.number > 0) & is_bend_rounding
        # Negative curvature is followed to the edge, away from saddles.
        is_at_edge = ~is_flat & ((bend <= 0) | (length >= to_edge))
        length = jnp.where(is_at_edge, to_edge, length)
        length = jnp.where(is_flat, 0.0, length)

        residual = step.residual - length * bent_direction
        new_square = jnp.sum(residual**2)
        is_last = (new_square <= target**2) | (step.number + 1 >= num_steps)
        return _Step(
            turn=step.turn + length * direction,
            bent=step.bent + length * bent_direction,
            residual=residual,
            direction=residual + (new_square / old_square) * direction,
            number=step.number + 1,
            is_at_edge=is_at_edge,
            is_done=is_flat | is_at_edge | is_last,
        )

    zero = jnp.zeros_like(slope)
    start = _Step(zero, zero, slope, slope, jnp.asarray(0), jnp.asarray(False), size == 0)
    end = lax.while_loop(lambda step: ~step.is_done, advance, start)
    return end.turn, end.bent, end.is_at_edge
