"""Compare `fit` and `train` with a `lax.scan` written by hand, of the same step on the same shuffled batches.

    python benchmarks/engine.py [--steps 400] [--repeats 9] [--width 1024]

A 784-width-width-10 ReLU network without biases learns by SGD in batches of 128, on random images
in memory (values do not change the time), with losses recorded and nothing observed. The three
alternate, each for the given number of steps and for twice as many: the difference is the cost of
the steps, and the rest is fixed (tracing, copies of the state, the order of samples). Ratios are
medians over rounds. First calls, which compile, are left out.
"""

import argparse
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from dissociation import member
from dissociation.recipes import cross_entropy, fresh_networks
from dissociation.training import Epochs, fit, make_step, train

BATCH = 128


def timed(function, *arguments):
    began = time.perf_counter()
    jax.block_until_ready(function(*arguments))
    return time.perf_counter() - began


def contestants(steps, width):
    """Return functions of a number of steps, up to twice `steps`, which is one epoch."""
    rng, samples = np.random.default_rng(0), 2 * steps * BATCH
    images = jnp.asarray(rng.random((samples, 784), np.float32))
    labels = jnp.asarray(np.eye(10, dtype=np.float32)[rng.integers(0, 10, samples)])
    optimizer, key = optax.sgd(0.1), jax.random.key(1)
    step, sampler = make_step(cross_entropy, optimizer), Epochs((images, labels), BATCH)
    models = fresh_networks(1, width=width, key=jax.random.key(0))
    start = step.init(member(models, 0))
    arrays, static = eqx.partition(start.model, eqx.is_array)

    @jax.jit
    def by_hand(arrays, opt_state, data, orders):
        def loss_of(model, batch, key):
            return cross_entropy(eqx.combine(model, static), batch, key)

        def one(carry, order):
            model, opt_state, i = carry
            batch = jax.tree.map(lambda leaf: leaf.at[order].get(mode="promise_in_bounds"), data)
            loss, slope = jax.value_and_grad(loss_of)(model, batch, jax.random.fold_in(key, i))
            updates, opt_state = optimizer.update(slope, opt_state, model)
            return (optax.apply_updates(model, updates), opt_state, i + 1), loss

        return jax.lax.scan(one, (arrays, opt_state, 0), orders)

    def scanned(number):
        order = jax.random.permutation(key, samples)[: number * BATCH].reshape(number, BATCH)
        return by_hand(arrays, start.opt_state, (images, labels), order)

    def fitted(number):
        return jax.tree.leaves(fit(models, step, sampler, num_steps=number, key=key).models)[0]

    @eqx.filter_jit
    def trained(number, start=start, sampler=sampler):
        return jax.tree.leaves(train(start, step, sampler, number, key=key)[0].arrays)[0]

    return {"scan by hand": scanned, "fit": fitted, "train": trained}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    steps, runs = options.steps, contestants(options.steps, options.width)
    for run in runs.values():
        timed(run, steps), timed(run, 2 * steps)
    seconds = {name: [] for name in runs}
    for _ in range(options.repeats):  # in turn, so that a drift of the machine meets all
        for name, run in runs.items():
            seconds[name].append((timed(run, steps), timed(run, 2 * steps)))
    print(
        f"784-{options.width}-{options.width}-10, batches of {BATCH}, {steps} and {2 * steps} "
        f"steps, {jax.devices()}"
    )
    print("                ms/step   of the scan's   fixed ms")
    times = {name: np.asarray(values) for name, values in seconds.items()}
    each = {name: (values[:, 1] - values[:, 0]) / steps for name, values in times.items()}
    for name, values in times.items():
        ratios = each[name] / each["scan by hand"]
        low, middle, high = np.quantile(ratios, [0.25, 0.5, 0.75])
        fixed = np.median(values[:, 0] - steps * each[name])
        spread = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"{name:14s} {1e3 * np.median(each[name]):8.3f}   {spread}  {1e3 * fixed:8.0f}")


if __name__ == "__main__":
    main()
