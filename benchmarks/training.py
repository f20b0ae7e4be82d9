"""Compare one training epoch of S seeds with a plain PyTorch CPU loop, one seed after another, and the matmul peak.

    python benchmarks/training.py [--seeds 1 4 8] [--repeats 3] [--threads 2] [--samples 60000]

Both train the same 784-1024-1024-10 ReLU network without biases by SGD in batches of 128 on the
same random images (values do not change the time), from data in memory. The first call of each
size, which compiles, is apart. The peak is a product of two 2048 x 2048 float32 matrices, timed in
JAX and PyTorch in the same run. Flops are those of the products of forward and backward pass (2 per
multiply-add), without gradients for the images.
"""

import argparse
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from timing import add_row, in_turn, one_process_per_core, shares, timed

from dissociation import use_all_cores
from dissociation.recipes import cross_entropy, fresh_networks
from dissociation.training import Epochs, fit, make_step

BATCH = 128
FLOPS_PER_SAMPLE = 2 * (2 * 784 * 1024 + 3 * 1024 * 1024 + 3 * 1024 * 10)


def jax_peak():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2048, 2048)).astype(np.float32))
    product = jax.jit(lambda a: a @ a)
    product(x).block_until_ready()
    return (
        2 * 2048**3 / np.median([timed(lambda: product(x).block_until_ready()) for _ in range(10)])
    )


def torch_peak():
    x = torch.randn(2048, 2048)
    _ = x @ x
    return 2 * 2048**3 / np.median([timed(lambda: x @ x) for _ in range(10)])


def torch_epoch(images, labels, num_seeds):
    x, y = torch.from_numpy(images), torch.from_numpy(labels.argmax(1))
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Linear(784, 1024, bias=False), torch.nn.ReLU(),
            torch.nn.Linear(1024, 1024, bias=False), torch.nn.ReLU(), torch.nn.Linear(1024, 10, bias=False),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x[chosen]), y[chosen]).backward()
            optimizer.step()


def torch_alone(samples, num_seeds):
    torch_epoch(*random_data(samples), num_seeds)


def torch_warm():
    torch_epoch(*random_data(5 * BATCH), 1)


def random_data(samples):
    rng = np.random.default_rng(0)
    images = rng.random((samples, 784), np.float32)
    return images, np.eye(10, dtype=np.float32)[rng.integers(0, 10, samples)]


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of PyTorch; XLA takes all cores"
    )
    parser.add_argument("--samples", type=int, default=60_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_all_cores()
    images, labels = random_data(options.samples)
    step = make_step(cross_entropy, optax.sgd(optax.linear_schedule(0.1, 1e-6, 469)))

    print(
        f"{options.samples} images, batches of {BATCH}, PyTorch on {options.threads} threads, "
        f"{jax.devices()}"
    )
    print(
        "seeds  ours s  (first call)  GFLOP/s  of peak | torch s  GFLOP/s  of its peak | torch/ours"
    )
    for num_seeds in options.seeds:
        models = fresh_networks(num_seeds, key=jax.random.key(0))

        def epoch(models=models):
            result = fit(
                models, step, Epochs((images, labels), BATCH), num_epochs=1, key=jax.random.key(1)
            )
            jax.block_until_ready(result.models.layers[0].weight)

        first = timed(epoch)
        parts = [(options.samples, share) for share in shares(num_seeds)]
        alone = partial(one_process_per_core, torch_warm, torch_alone, parts)
        ours, theirs, processes, peaks, torch_peaks = [], [], [], [], []
        for _ in range(options.repeats):
            peaks.append(jax_peak())
            torch_peaks.append(torch_peak())
            both = in_turn(
                {"ours": epoch, "theirs": partial(torch_epoch, images, labels, num_seeds)}, 1
            )
            ours += both["ours"]
            theirs += both["theirs"]
            processes += [alone()] if num_seeds > 1 else []
        peers = {"PyTorch": theirs} | (
            {"PyTorch, one process per core": processes} if processes else {}
        )
        work = (
            f"MLP 784-1024-1024-10, SGD, batches of {BATCH}: one epoch of {options.samples} "
            f"images, {num_seeds} seed(s)"
        )
        add_row(work, ours, peers, first=first)
        flops = FLOPS_PER_SAMPLE * options.samples * num_seeds
        rate, torch_rate = flops / np.median(ours), flops / np.median(theirs)
        print(
            f"{num_seeds:5d} {np.median(ours):7.2f} {first:13.2f} {rate / 1e9:8.0f} "
            f"{rate / np.median(peaks):8.0%} |"
            f" {np.median(theirs):7.2f} {torch_rate / 1e9:8.0f} "
            f"{torch_rate / np.median(torch_peaks):12.0%} |"
            f" {np.median(np.divide(theirs, ours)):6.2f}"
        )


if __name__ == "__main__":
    main()
