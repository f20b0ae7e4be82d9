"""Newton's method over rotations, for two matrices of norm 1."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from dissociation._core.distances import root
from dissociation._core.linalg import product

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
    a: Array, b: Array, start: Array, *, num_steps: int | Array, tolerance: float, inner: int
) -> Point:
    """Take trust-region Newton steps until the gradient is below `tolerance` or `num_steps` are taken.

    Source: Absil, Mahony and Sepulchre (2008), Optimization algorithms on matrix manifolds,
    algorithms 10 and 11.
    """
    rounding = 10 * float(jnp.finfo(a.dtype).eps)

    def at(rotation: Array, radius: Array, step: Array) -> Point:
        moved = product(rotation, product(b, rotation.T))
        # E -> E - <skew [R, M^T], W> + <[W, A], [W, M]> / 2 + O(|W|^3) for a step C -> exp(W) C
        # along a skew W, with M = C B C^T, R = A - M and commutators [X, Y] = X Y - Y X.
        rest = a - moved
        return Point(
            rotation, moved, 0.5 * jnp.sum(rest**2), skew(_commutator(rest, moved.T)), radius, step
        )

    def body(here: Point) -> Point:
        def curvature(w: Array) -> Array:
            first = _commutator(_commutator(w, a), here.moved.T)
            return 0.5 * skew(first + _commutator(_commutator(w, here.moved), a.T))

        turn, bent, at_edge = newton_step(here.slope, curvature, here.radius, inner)
        promised = jnp.sum(turn * here.slope) - 0.5 * jnp.sum(turn * bent)
        there = at(_turned(turn, here.rotation), here.radius, here.step)
        noise = rounding * jnp.sqrt(
            here.energy
        )  # rounding of equal energies, which must not reject a step
        ratio = (here.energy - there.energy + noise) / (promised + noise)
        wider = jnp.where(
            (ratio > 0.75) & at_edge, jnp.minimum(2 * here.radius, RADIUS), here.radius
        )
        taken = jax.tree.map(lambda new, old: jnp.where(ratio > 0.05, new, old), there, here)
        return taken._replace(
            radius=jnp.where(ratio < 0.25, 0.25 * norm(turn), wider), step=here.step + 1
        )

    first = at(start, jnp.asarray(RADIUS, a.dtype), jnp.asarray(0))
    return lax.while_loop(
        lambda here: (here.step < num_steps) & (norm(here.slope) > tolerance), body, first
    )


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
    moved = rotation + product(turn + 0.5 * square + 0.125 * product(square, turn), rotation)
    for _ in range(3):
        moved = 1.5 * moved - 0.5 * product(moved, product(moved.T, moved))
    return moved


class _Step(NamedTuple):
    """State of conjugate gradients."""

    turn: Array  # W
    bent: Array  # H W
    rest: Array  # slope - H W
    ahead: Array  # search direction
    number: Array
    at_edge: Array  # of the trust region
    done: Array


def newton_step(
    slope: Array, curvature: Callable[[Array], Array], radius: Array, inner: int
) -> tuple[Array, Array, Array]:
    """Return W within a radius that minimises -<slope, W> + <W, H W> / 2, H W, and True if W is at the edge.

    Source: Steihaug (1983), truncated conjugate gradients.
    """
    size = norm(slope)
    target = size * jnp.minimum(size, 0.1)  # for quadratic convergence

    def body(now: _Step) -> _Step:
        bent_ahead = curvature(now.ahead)
        bend = jnp.sum(now.ahead * bent_ahead)
        old = jnp.sum(now.rest**2)
        length = old / jnp.where(bend > 0, bend, 1.0)
        # `to_edge` is the positive root of |W + t ahead| = radius.
        square, along = jnp.sum(now.ahead**2), jnp.sum(now.turn * now.ahead)
        room = jnp.maximum(radius**2 - jnp.sum(now.turn**2), 0.0)
        # Negative curvature is followed to the edge, away from saddles.
        to_edge = room / (along + jnp.sqrt(along**2 + square * room))
        # Turns within an eigenspace have zero curvature up to rounding. After the first step they
        # do not lower E.
        flat = (now.number > 0) & (
            jnp.abs(bend) <= 100 * float(jnp.finfo(slope.dtype).eps) * square
        )
        out = ~flat & ((bend <= 0) | (length >= to_edge))
        length = jnp.where(flat, 0.0, jnp.where(out, to_edge, length))
        rest = now.rest - length * bent_ahead
        new = jnp.sum(rest**2)
        done = flat | out | (new <= target**2) | (now.number + 1 >= inner)
        turn, bent = now.turn + length * now.ahead, now.bent + length * bent_ahead
        return _Step(turn, bent, rest, rest + (new / old) * now.ahead, now.number + 1, out, done)

    zero = jnp.zeros_like(slope)
    start = _Step(zero, zero, slope, slope, jnp.asarray(0), jnp.asarray(False), size == 0)
    end = lax.while_loop(lambda now: ~now.done, body, start)
    return end.turn, end.bent, end.at_edge
