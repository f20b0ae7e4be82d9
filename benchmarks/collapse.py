"""Compare grokking sweeps with PyTorch: optimiser steps, a whole run with observations, and information.

    python benchmarks/collapse.py [--steps 4000] [--members 1 30] [--repeats 3]
        [--only steps whole knn]

steps: 1 and 30 members (784-200-200-10, batches of 100) against a lean PyTorch loop (batches cut
from a tensor), one member after another, with PyTorch's default and fused AdamW, each at its best
number of threads. whole: a step, a cheap observation and one of nHSIC, against the published style
of loop (a data loader, measures in Python); the total of 100 000 steps with their observations; and
the share of our measures in it. knn: information of 10 000 points in 4 + 4 dimensions against
scikit-learn's KD-tree (one thread), without and with the halves and parts that give our error.
First calls, which compile, are apart.
"""

import argparse
import os
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from scipy.special import digamma, gammaln
from sklearn.neighbors import KDTree
from timing import add_row, in_turn, one_process_per_core, shares, timed

from dissociation import use_all_cores
from dissociation.data import Dataset
from dissociation.figures.collapse import Config, information_measures
from dissociation.measures import entropy_weights, information, information_plane
from dissociation.models import representations
from dissociation.recipes import CheapMeasures, initial_models, observation_steps, squared_error
from dissociation.training import Epochs, Save, fit, make_step

SEEN, BATCH = 1000, 100
FLOPS = (
    2 * 3 * BATCH * (784 * 200 + 200 * 200 + 200 * 10) - 2 * BATCH * 784 * 200
)  # no gradient on inputs


def adamw(settings):
    return optax.adamw(1e-3, weight_decay=settings)


def torch_network(fused=False):
    layers = [
        torch.nn.Linear(784, 200),
        torch.nn.ReLU(),
        torch.nn.Linear(200, 200),
        torch.nn.ReLU(),
    ]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(200, 10))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8.0)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=fused)


def torch_lean(x, y, members, steps, threads, fused):
    torch.set_num_threads(threads)
    for seed in range(members):
        torch.manual_seed(seed)
        model, optimizer = torch_network(fused)
        done = 0
        while done < steps:
            for chosen in torch.randperm(len(x)).split(BATCH):
                optimizer.zero_grad()
                ((model(x[chosen]) - y[chosen]) ** 2).sum().backward()
                optimizer.step()
                done += 1


def torch_alone(members, steps):
    torch_lean(*map(torch.from_numpy, random_images(SEEN)), members, steps, 1, True)


def torch_warm():
    torch_alone(1, 100)


def random_images(number):
    rng = np.random.default_rng(0)
    images = rng.normal(size=(number, 784)).astype(np.float32)
    return images, np.eye(10, dtype=np.float32)[rng.integers(0, 10, number)]


def torch_loader_steps(train, steps):
    loader = torch.utils.data.DataLoader(train, batch_size=BATCH, shuffle=True)
    model, optimizer = torch_network()
    done = 0
    while done < steps:
        for x, y in loader:
            optimizer.zero_grad()
            ((model(x) - y) ** 2).sum().backward()
            optimizer.step()
            done += 1


@torch.no_grad()
def torch_cheap(model, train, test):
    """Return accuracy and measures of collapse on both sets, by loaders."""
    body, head = model[:-1], model[-1]
    for images in (train, test):
        features, labels, hits = [], [], 0
        for x, y in torch.utils.data.DataLoader(images, batch_size=BATCH):
            z = body(x)
            hits += (head(z).argmax(1) == y.argmax(1)).sum().item()
            features.append(z)
            labels.append(y.argmax(1))
        z, c = torch.cat(features), torch.cat(labels)
        means = torch.stack([z[c == k].mean(0) for k in range(10)])
        within = sum(((z[c == k] - means[k]) ** 2).sum() for k in range(10)) / len(z)
        (within / z.norm(dim=1).mean() ** 2).item()
        torch.linalg.cond(means).item()


@torch.no_grad()
def torch_plane(model, test):
    """Return normalised HSIC over three shuffled passes, with the [n, n, d] array of the published code."""
    body, centre = model[:-1], torch.eye(BATCH) - 1 / BATCH
    ridge = 1e-5 * BATCH * torch.eye(BATCH)
    for _ in range(3):
        for x, y in torch.utils.data.DataLoader(test, batch_size=BATCH, shuffle=True):
            spans = []
            for part in (body(x), x):
                square = ((part[:, None] - part[None]) ** 2).sum(-1)
                gram = centre @ torch.exp(-square / (2 * 25 * part.shape[1])) @ centre
                spans.append(gram @ torch.linalg.inv(gram + ridge))
            gram = y @ y.T
            spans.append(gram @ torch.linalg.inv(gram + ridge))
            torch.trace(spans[0] @ spans[1]).item(), torch.trace(spans[0] @ spans[2]).item()


class PlaneOnly(eqx.Module):
    """Observation of the nHSIC of test features with images and labels."""

    images: jax.Array
    labels: jax.Array

    def __call__(self, model, key):
        """Return the measures by name."""
        features = representations(model, self.images)["features"]
        plane = information_plane(features, self.images, self.labels, key=key)
        return {"zx": plane.zx, "zy": plane.zy}


def our_steps(images, labels, models, steps):
    members = len(jax.tree.leaves(models)[0])
    result = fit(
        models, make_step(squared_error, adamw), Epochs((images, labels), BATCH, shared=False), num_steps=steps,
        key=jax.random.split(jax.random.PRNGKey(1), members), hyperparams=jnp.full(members, 0.1), save=Save(at=[steps]),
    )  # fmt: skip
    jax.block_until_ready(result.models)


def measure_steps(options, data):
    x, y = jnp.asarray(data.train_images), jnp.asarray(data.train_labels)
    tx, ty = torch.from_numpy(data.train_images), torch.from_numpy(data.train_labels)
    ways = {(threads, fused): 0.0 for threads in (1, 2) for fused in (False, True)}
    for way in ways:
        torch_lean(tx, ty, 1, 100, *way)
        ways[way] = timed(partial(torch_lean, tx, ty, 1, 300, *way))
    best = {
        fused: min((seconds, n) for (n, own), seconds in ways.items() if own == fused)[1]
        for fused in (False, True)
    }
    print(
        f"PyTorch {torch.__version__}: fastest with {best[False]} threads (AdamW as it comes), "
        f"{best[True]} (fused)"
    )
    for members in options.members:
        steps, peers = (
            options.steps if members == 1 else max(options.steps // 4, 100),
            min(members, 4),
        )
        models = initial_models(jax.random.split(jax.random.PRNGKey(0), members))
        ours = partial(our_steps, x, y, models, steps)
        first = timed(ours)
        mine, other, peaks = [], {False: [], True: []}, []
        for _ in range(options.repeats):
            peaks.append(peak())
            mine.append(members * steps / timed(ours))
            for fused, threads in best.items():
                peer = partial(torch_lean, tx, ty, peers, steps, threads, fused)
                other[fused].append(peers * steps / timed(peer))
        names = {False: "PyTorch, default AdamW", True: "PyTorch, fused AdamW"}
        found = {names[fused]: np.divide(1, rates) for fused, rates in other.items()}
        if members > 1:
            parts = [(part, steps) for part in shares(2 * peers)]
            alone = [
                one_process_per_core(torch_warm, torch_alone, parts) for _ in range(options.repeats)
            ]
            found["PyTorch, fused AdamW, one process per core"] = np.divide(
                alone, 2 * peers * steps
            )
        work = (
            f"grokking, 784-200-200-10, AdamW, batches of {BATCH}: time per step and member, "
            f"{members} member(s)"
        )
        add_row(work, np.divide(1, mine), found, first=first)
        share = np.median(np.multiply(mine, FLOPS / 1e9) / peaks)
        shown = ", ".join(
            f"{'fused' if fused else 'as it comes'} {np.median(own):.0f}: "
            f"{np.median(np.divide(mine, own)):.2f} times"
            for fused, own in other.items()
        )
        print(
            f"steps: {members} members: ours {np.median(mine):.0f} member steps a second "
            f"({np.median(mine) * FLOPS / 1e9:.0f} GFLOP/s, {100 * share:.0f} % of "
            f"{np.median(peaks):.0f}; first call "
            f"of {steps} steps {first:.1f} s), PyTorch {shown} as fast",
            flush=True,
        )


def peak(repeats=5):
    a = jnp.ones((2000, 2000), jnp.float32)
    run = jax.jit(lambda m: m @ m)
    jax.block_until_ready(run(a))
    return (
        2
        * 2000**3
        / min(timed(lambda: jax.block_until_ready(run(a))) for _ in range(repeats))
        / 1e9
    )


def measure_whole(options, data):
    """Measure every part of a run, ours and the peer's alternately."""
    sets = [torch.utils.data.TensorDataset(*(torch.from_numpy(a) for a in pair)) for pair in (
        (data.train_images, data.train_labels), (data.test_images, data.test_labels))]  # fmt: skip
    x, y, images, labels = (jnp.asarray(a) for a in (data.train_images, data.train_labels, data.test_images,
                                                     data.test_labels))  # fmt: skip
    models = initial_models(jax.random.PRNGKey(0)[None])
    model = jax.tree.map(lambda leaf: leaf[0], models)
    codes = jax.random.normal(jax.random.PRNGKey(0), (len(images), 4))
    cheap, plane = CheapMeasures(x, y, images, labels), PlaneOnly(images, labels)
    expensive = information_measures(Config(), data, codes)
    with_key = jax.jit(lambda m, f: f(m, jax.random.PRNGKey(1)))
    network = torch_network()[0]
    torch.set_num_threads(options.threads)
    number = options.steps // 4
    runs = {
        "step": (
            partial(our_steps, x, y, models, 2 * number),
            partial(torch_loader_steps, sets[0], number),
        ),
        "cheap": (
            partial(jax.jit(lambda m, f: f(m)), model, cheap),
            partial(torch_cheap, network, *sets),
        ),
        "nHSIC": (partial(with_key, model, plane), partial(torch_plane, network, sets[1])),
        "expensive": (partial(with_key, model, expensive), lambda: None),
    }
    costs = {}
    for name, (ours, theirs) in runs.items():
        jax.block_until_ready(ours())
        pairs = [
            (timed(lambda f=ours: jax.block_until_ready(f())), timed(theirs))
            for _ in range(options.repeats)
        ]
        mine, other = np.median(pairs, axis=0)
        if name == "step":  # twice as many less as many: without what a call costs
            mine = mine - np.median(
                [timed(partial(our_steps, x, y, models, number)) for _ in range(options.repeats)]
            )
            mine, other = mine / number, other / number
        costs[name] = mine, other
        print(
            f"whole: {name}: ours {1e3 * mine:.2f} ms, published style {1e3 * other:.2f} ms",
            flush=True,
        )
    steps, times, often = (
        100_000,
        len(observation_steps(100_000)),
        len(Config().information_steps()),
    )
    for title, asked in (("without nHSIC", 0), ("with nHSIC", often)):
        mine, other = (
            steps * costs["step"][i] + times * costs["cheap"][i] + asked * costs["nHSIC"][i]
            for i in (0, 1)
        )
        ratio = f"{other / mine:.1f} times as fast"
        print(
            f"whole: 100 000 steps, {times} observations, {title}: {mine:.0f} and {other:.0f} s: "
            f"{ratio}"
        )
    training = steps * costs["step"][0]
    print(
        f"whole: share of the training ({training:.0f} s a member): cheap measures "
        f"{times * costs['cheap'][0] / training:.2f}, {often} expensive ones "
        f"{often * costs['expensive'][0] / training:.2f}",
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
        logs = (
            width * np.log(radii)
            + 0.5 * width * np.log(np.pi)
            - gammaln(width / 2 + 1)
            + np.log(number - 1)
        )
        return np.mean((logs - digamma(np.arange(1, 6))) @ entropy_weights(5, width))

    def peer(*strides):
        parts = [(x[i::stride], z[i::stride]) for stride in strides for i in range(stride)]
        return [entropy(a) + entropy(b) - entropy(np.hstack([a, b])) for a, b in parts]

    alone = "scikit-learn's KD-tree, one thread, only the estimate"
    peers = {
        alone: partial(peer, 1),
        "the same, also for halves and 16 blocks, as ours": partial(peer, 1, 2, 16),
    }
    theirs = in_turn({"ours": lambda: jax.block_until_ready(run(x, z)), **peers}, options.repeats)
    mine, note = theirs.pop("ours"), "ours also computes a standard error and compares halves"
    work = "nearest-neighbour information of 10 000 points in 4 + 4 dimensions"
    add_row(work, mine, theirs, first=first, note=note)
    ratios = ", ".join(
        f"{np.median(np.divide(own, mine)):.1f} times as fast as {who}"
        for who, own in theirs.items()
    )
    print(
        f"knn: 10 000 points in 4 + 4 dimensions: ours {np.median(mine):.2f} s (first "
        f"{first:.1f} s), {ratios}; "
        f"values {float(run(x, z)):.4f} and {peer(1)[0]:.4f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--members", type=int, nargs="+", default=[1, 30])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=2, help="of PyTorch in `whole`; XLA takes all cores"
    )
    parser.add_argument("--only", nargs="+", choices=["steps", "whole", "knn"])
    options = parser.parse_args()
    wanted = options.only or ["steps", "whole", "knn"]
    use_all_cores()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}, {jax.devices()}")
    data = Dataset("random", *random_images(SEEN), *random_images(10_000))
    if "steps" in wanted:
        measure_steps(options, data)
    if "whole" in wanted:
        measure_whole(options, data)
    if "knn" in wanted:
        measure_knn(options)


if __name__ == "__main__":
    main()
