"""Grokking sweeps against PyTorch, in one run: optimiser steps, a whole run with its observations, and information.

    python benchmarks/collapse.py [--steps 1000] [--members 1 30] [--repeats 3] [--only steps whole share knn]

steps: of 1 and of 30 members (784-200-200-10, batches of 100), against a lean PyTorch loop (batches cut from a tensor)
member after member. whole: one member with all its observations against the published style of loop (a data loader,
measures in Python). share: what cheap and dear measures cost beside the training of 100 000 steps. knn: information of
10 000 points in 4 + 4 dimensions against scikit-learn's KD-tree. Compile time is reported apart: the first call.
"""

import argparse
import os
import time
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from scipy.special import digamma, gammaln
from sklearn.neighbors import KDTree

from dissociation.data.datasets import Dataset
from dissociation.figures.collapse_measures import Config, information_measures
from dissociation.metrics.information.hsic import information_plane
from dissociation.metrics.information.nearest import entropy_weights, information
from dissociation.recipes.grokking import (
    CheapMeasures,
    initial_models,
    observation_steps,
    squared_error,
    train_grokking,
)
from dissociation.training import fit

SEEN, BATCH = 1000, 100
FLOPS = 2 * 3 * BATCH * (784 * 200 + 200 * 200 + 200 * 10) - 2 * BATCH * 784 * 200  # no gradient on inputs


def timed(function):
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def adamw(settings):
    return optax.adamw(1e-3, weight_decay=settings)


def torch_network():
    layers = [torch.nn.Linear(784, 200), torch.nn.ReLU(), torch.nn.Linear(200, 200), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(200, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def torch_lean(x, y, members, steps):
    for seed in range(members):
        torch.manual_seed(seed)
        model, optimizer = torch_network()
        done = 0
        while done < steps:
            for chosen in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                ((model(x[chosen]) - y[chosen]) ** 2).sum().backward()
                optimizer.step()
                done += 1


def torch_published(data, steps, times, dear_times):
    """A data loader; at every observation accuracies and measures of collapse by loaders; nHSIC at some."""
    train = torch.utils.data.TensorDataset(*(torch.from_numpy(a) for a in (data.train_images, data.train_labels)))
    test = torch.utils.data.TensorDataset(*(torch.from_numpy(a) for a in (data.test_images, data.test_labels)))
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer = torch_network()
    body, done = model[:-1], 0
    while True:
        for x, y in loader:
            if done in times:
                with torch.no_grad():
                    torch_measures(model, body, train, test, dear=done in dear_times)
            if done == steps:
                return
            optimizer.zero_grad()
            ((model(x) - y) ** 2).sum().backward()
            optimizer.step()
            done += 1


def torch_measures(model, body, train, test, *, dear):
    for pictures in (train, test):
        features, labels, hits = [], [], 0
        for x, y in torch.utils.data.DataLoader(pictures, batch_size=BATCH):
            hits += (model(x).argmax(1) == y.argmax(1)).sum().item()
            features.append(body(x))
            labels.append(y.argmax(1))
        z, c = torch.cat(features), torch.cat(labels)
        means = torch.stack([z[c == k].mean(0) for k in range(10)])
        within = sum(((z[c == k] - means[k]) ** 2).sum() for k in range(10)) / len(z)
        (within / z.norm(dim=1).mean() ** 2).item()
        torch.linalg.cond(means).item()
    if not dear:
        return
    for _ in range(3):
        for x, y in torch.utils.data.DataLoader(test, batch_size=BATCH, shuffle=True):
            z, ridge, spans = body(x), 1e-5 * BATCH * torch.eye(BATCH), []
            for part in (z, x):
                square = ((part[:, None] - part[None]) ** 2).sum(-1)  # the [n, n, d] array of the published code
                gram = torch.exp(-square / (2 * 25 * part.shape[1]))
                centre = torch.eye(BATCH) - 1 / BATCH
                gram = centre @ gram @ centre
                spans.append(gram @ torch.linalg.inv(gram + ridge))
            gram = y @ y.T
            spans.append(gram @ torch.linalg.inv(gram + ridge))
            torch.trace(spans[0] @ spans[1]).item(), torch.trace(spans[0] @ spans[2]).item()


def our_steps(images, labels, members, steps):
    models = initial_models(jax.random.split(jax.random.PRNGKey(0), members))
    result = fit(
        models, squared_error, (images, labels), adamw, num_steps=steps, batch_size=BATCH, shared_batches=False,
        key=jax.random.split(jax.random.PRNGKey(1), members), hyperparams=jnp.full(members, 0.1), observe_at=[steps],
    )  # fmt: skip
    jax.block_until_ready(result.models)


def measure_steps(options, data):
    x, y = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    tx, ty = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    for members in options.members:
        steps, peers = options.steps if members == 1 else max(options.steps // 4, 100), min(members, 4)
        ours, theirs = partial(our_steps, x, y, members, steps), partial(torch_lean, tx, ty, peers, steps)
        first = timed(ours)
        torch_lean(tx, ty, 1, 100)
        mine, other = [], []
        for _ in range(options.repeats):
            mine.append(members * steps / timed(ours))
            other.append(peers * steps / timed(theirs))
        print(
            f"steps: {members} members: ours {np.median(mine):.0f} member steps a second "
            f"({np.median(mine) * FLOPS / 1e9:.0f} GFLOP/s; first call of {steps} steps {first:.1f} s), "
            f"PyTorch {np.median(other):.0f}: {np.median(np.divide(mine, other)):.2f} times as fast",
            flush=True,
        )


def peak(repeats=5):
    a = jnp.ones((2000, 2000), jnp.float32)
    run = jax.jit(lambda m: m @ m)
    jax.block_until_ready(run(a))
    return 2 * 2000**3 / min(timed(lambda: jax.block_until_ready(run(a))) for _ in range(repeats)) / 1e9


class PlaneOnly(eqx.Module):
    """nHSIC of test features with pictures and labels."""

    images: jax.Array
    labels: jax.Array

    def __call__(self, model, key):
        """By name."""
        features = jax.vmap(model.representations)(self.images)["features"]
        plane = information_plane(features, self.images, self.labels, key=key)
        return {"zx": plane.zx, "zy": plane.zy}


def measure_whole(options, data):
    steps = options.whole_steps
    times = observation_steps(steps)
    dear = Config(num_steps=steps).information_steps()
    # nHSIC alone is dear here, on both sides: what the published loop also measures.
    measures = PlaneOnly(jnp.asarray(data.test_images), jnp.asarray(data.test_labels))

    def ours():
        result = train_grokking(
            data, weight_decays=(0.1,), seeds=(42,), num_steps=steps, measures=measures, measure_at=dear
        )
        jax.block_until_ready(result.models)

    first, mine = timed(ours), timed(ours)
    theirs = timed(lambda: torch_published(data, steps, set(times.tolist()), set(dear.tolist())))
    print(
        f"whole: 1 member, {steps} steps, {len(times)} observations, {len(dear)} of nHSIC: ours {mine:.1f} s "
        f"(first call {first:.1f} s), published style {theirs:.1f} s: {theirs / mine:.1f} times as fast",
        flush=True,
    )


def measure_share(options, data):
    config = Config()
    codes = jax.random.normal(jax.random.PRNGKey(0), (len(data.test_images), config.code))
    dear = information_measures(config, data, codes)
    cheap = CheapMeasures(*(jnp.asarray(a) for a in (data.train_images, data.train_labels)),
                          *(jnp.asarray(a) for a in (data.test_images, data.test_labels)))  # fmt: skip
    model = jax.tree.map(lambda leaf: leaf[0], initial_models(jax.random.PRNGKey(0)[None]))
    runs = {
        "cheap": partial(jax.jit(lambda m, f: f(m)), model, cheap),
        "dear": partial(jax.jit(lambda m, f: f(m, jax.random.PRNGKey(1))), model, dear),
    }
    costs = {}
    for name, run in runs.items():
        jax.block_until_ready(run())
        costs[name] = min(timed(lambda run=run: jax.block_until_ready(run())) for _ in range(3))
    train = partial(our_steps, jnp.asarray(data.train_images), jnp.asarray(data.train_labels), 1)
    train(500)
    whole = 100_000 * min(timed(partial(train, 1000)) for _ in range(3)) / 1000
    count = len(observation_steps(100_000))
    print(
        f"share: of the training of 100 000 steps ({whole:.0f} s a member) {count} cheap observations of "
        f"{costs['cheap']:.3f} s cost {count * costs['cheap'] / whole:.2f}, 30 dear ones of {costs['dear']:.2f} s "
        f"{30 * costs['dear'] / whole:.2f}",
        flush=True,
    )


def measure_knn(options):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(10_000, 4)).astype(np.float32)
    z = (0.5 * x + rng.normal(size=x.shape)).astype(np.float32)
    run = jax.jit(lambda a, b: information(a, b).value)
    first = timed(lambda: jax.block_until_ready(run(x, z)))

    def entropy(points):
        number, width = points.shape
        radii = KDTree(points).query(points, k=6)[0][:, 1:]
        logs = width * np.log(radii) + 0.5 * width * np.log(np.pi) - gammaln(width / 2 + 1) + np.log(number - 1)
        return np.mean((logs - digamma(np.arange(1, 6))) @ entropy_weights(5, width))

    mine, theirs = [], []
    for _ in range(options.repeats):
        mine.append(timed(lambda: jax.block_until_ready(run(x, z))))
        theirs.append(timed(lambda: entropy(x) + entropy(z) - entropy(np.hstack([x, z]))))
    peer = entropy(x) + entropy(z) - entropy(np.hstack([x, z]))
    print(
        f"knn: 10 000 points in 4 + 4 dimensions: ours {np.median(mine):.2f} s (first {first:.1f} s), KD-tree "
        f"{np.median(theirs):.2f} s: {np.median(np.divide(theirs, mine)):.1f} times as fast; "
        f"values {float(run(x, z)):.4f} and {peer:.4f}"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--whole-steps", type=int, default=10_000)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 30])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch; XLA takes all cores")
    parser.add_argument("--only", nargs="+", choices=["steps", "whole", "share", "knn"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.only or ["steps", "whole", "share", "knn"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}, {jax.devices()}, products of 2000: {peak():.0f} GFLOP/s")
    rng = np.random.default_rng(0)

    def make(number):
        images = rng.normal(size=(number, 784)).astype(np.float32)
        return images, np.eye(10, dtype=np.float32)[rng.integers(0, 10, number)]

    data = Dataset("random", *make(SEEN), *make(10_000))
    if "steps" in wanted:
        measure_steps(options, data)
    if "whole" in wanted:
        measure_whole(options, data)
    if "share" in wanted:
        measure_share(options, data)
    if "knn" in wanted:
        measure_knn(options)


if __name__ == "__main__":
    main()
