"""Compare exact walks on the solution manifold with perturbation and gradient descent, as published.

    python benchmarks/manifold.py [--tasks 10] [--steps 101] [--repeats 5]

The peer moves the weights to (1 - a) w + 5 a xi with a = 5e-3, xi standard normal, and descends the
squared residual at a rate of .15 until it is below 5e-6. It is compiled and mapped over tasks like
ours, and both return residuals.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from timing import add_row, in_turn, timed

from dissociation.linear import FAMILIES, random_task

SIZES = {
    "num_samples": 30,
    "num_inputs": 10,
    "num_outputs": 6,
    "rank": 4,
    "input_rank": 8,
    "condition": 1.5,
}
HIDDEN = 12
NOISE, RATE, TOLERANCE, MOST = 5e-3, 0.15, 5e-6, 20_000


def descend(task, weights, span):
    """Return weights after gradient descent on |(W2 W1 - W*) P|^2 / 2, and the squared residual."""

    def wrong(weights):
        return (weights[1] @ weights[0] - task.best_map) @ span

    def step(state):
        weights, _, count = state
        error = wrong(weights)
        slope = weights[1].T @ error, error @ weights[0].T
        moved = tuple(weight - RATE * part for weight, part in zip(weights, slope, strict=True))
        return moved, jnp.sum(wrong(moved) ** 2), count + 1

    start = weights, jnp.sum(wrong(weights) ** 2), 0
    return lax.while_loop(lambda state: (state[1] > TOLERANCE) & (state[2] < MOST), step, start)


def perturb_and_descend(name, task, steps, key):
    """Return weights of all steps and their relative residuals."""
    span = (
        jnp.eye(len(task.input_basis)) if name == "LSS" else task.input_basis @ task.input_basis.T
    )

    def step(weights, key):
        noise = [
            jax.random.normal(k, w.shape)
            for k, w in zip(jax.random.split(key), weights, strict=True)
        ]
        moved = tuple((1 - NOISE) * w + 5 * NOISE * n for w, n in zip(weights, noise, strict=True))
        weights, square, count = descend(task, moved, span)
        return weights, (weights, jnp.sqrt(square) / jnp.linalg.norm(task.map_values), count)

    start = FAMILIES["MWNS"].sample(task, HIDDEN, key=key).weights
    return lax.scan(step, start, jax.random.split(key, steps))[1]


def exact(name, task, steps, key):
    """Return a walk and its residuals."""
    family = FAMILIES[name]
    walk = family.walk(task, HIDDEN, steps, rate=NOISE, key=key)
    return walk.weights, jax.vmap(lambda network: family.residual(task, network).map)(walk)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=101)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    tasks = [random_task(**SIZES, key=jax.random.key(seed)) for seed in range(options.tasks)]
    stacked = jax.tree.map(lambda *parts: jnp.stack(parts), *tasks)
    keys = jax.random.split(jax.random.key(0), options.tasks)
    for name in ("GLS", "LSS"):
        calls, firsts = {}, {}
        for label, function in (("ours", exact), ("perturb and descend", perturb_and_descend)):
            compiled = eqx.filter_jit(
                jax.vmap(lambda task, key, f=function, n=name: f(n, task, options.steps, key))
            )
            calls[label] = lambda compiled=compiled: jax.block_until_ready(compiled(stacked, keys))
            firsts[label] = timed(calls[label])
        seconds = in_turn(calls, options.repeats)
        ours, theirs = seconds.values()
        worst = {label: float(np.max(call()[1])) for label, call in calls.items()}
        count = int(np.max(calls["perturb and descend"]()[2]))
        print(
            f"{name}: ours {np.median(ours) * 1e3:.1f} ms (first call {firsts['ours']:.1f} s, "
            "largest residual "
            f"{worst['ours']:.0e}), peer {np.median(theirs) * 1e3:.0f} ms (first call "
            f"{firsts['perturb and descend']:.1f} s, {worst['perturb and descend']:.0e}, at most "
            f"{count} descents): "
            f"ratio {np.median(np.divide(theirs, ours)):.0f}"
        )
        work = f"{name}, walks of {options.steps} steps in {options.tasks} tasks, with residuals"
        add_row(work, ours, {"perturb and descend (JAX)": theirs}, first=firsts["ours"])


if __name__ == "__main__":
    main()
