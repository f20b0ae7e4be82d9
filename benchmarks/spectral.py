"""Compare bilinear networks with PyTorch: training epochs, several seeds, and eigendecompositions.

    python benchmarks/spectral.py [--samples 60000] [--repeats 3] [--epochs 3]
        [--only training seeds decompose]

training: epochs at size 300, against a lean PyTorch loop (batches cut from a tensor) and the
published kind of loader (samples indexed one by one and stacked). seeds: epochs of 5 networks of
size 100 against 5 in PyTorch. decompose: ordered eigenvectors on inputs of 5 networks x 10 classes
at size 300 against the same in PyTorch, and against torch.linalg.eigh of the hidden matrices alone.
XLA's CPU eigh calls SciPy's OpenBLAS for parts of a batch in parallel; `use_all_cores` limits
OpenBLAS's own threads. The first call, which compiles, is apart.
"""

import argparse
import os
from functools import partial

import equinox as eqx
import jax
import numpy as np
import torch
from timing import add_row, in_turn, one_process_per_core, shares, timed

from dissociation import use_all_cores
from dissociation.bilinear import decompose
from dissociation.data import Dataset
from dissociation.models import BilinearNetwork
from dissociation.recipes import train_bilinear

BATCH = 2048


class TorchBilinear(torch.nn.Module):
    """The peer's network."""

    def __init__(self, hidden):
        super().__init__()
        self.embed = torch.nn.Linear(784, hidden, bias=False)
        self.both = torch.nn.Linear(hidden, 2 * hidden, bias=False)
        self.head = torch.nn.Linear(hidden, 10, bias=False)

    def forward(self, x):
        """Return logits."""
        left, right = self.both(self.embed(x)).chunk(2, dim=-1)
        return self.head(left * right)


def torch_epochs(images, labels, hidden, num_seeds, loader, number):
    x, y = torch.from_numpy(images), torch.from_numpy(labels.argmax(1))
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        model = TorchBilinear(hidden)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1.0)
        for _ in range(number):
            if loader == "published":
                pairs = torch.utils.data.TensorDataset(x, y)
                batches = torch.utils.data.DataLoader(
                    pairs, batch_size=BATCH, shuffle=True, drop_last=True
                )
            else:
                chosen = torch.randperm(len(x)).split(BATCH)
                batches = ((x[c], y[c]) for c in chosen if len(c) == BATCH)
            for images, truth in batches:
                optimizer.zero_grad()
                logits = model(images + 0.4 * torch.randn_like(images))
                torch.nn.functional.cross_entropy(logits, truth).backward()
                optimizer.step()


def random_data(samples):
    rng = np.random.default_rng(0)
    images = rng.random((samples, 784), np.float32)
    return images, np.eye(10, dtype=np.float32)[rng.integers(0, 10, samples)]


def torch_alone(samples, hidden, num_seeds, number):
    torch_epochs(*random_data(samples), hidden, num_seeds, "lean", number)


def torch_warm():
    torch_alone(BATCH, 10, 1, 1)


def decompositions(repeats):
    models = eqx.filter_vmap(lambda k: BilinearNetwork(784, 300, key=k))(
        jax.random.split(jax.random.key(0), 5)
    )
    run = eqx.filter_jit(eqx.filter_vmap(decompose))
    first = timed(lambda: jax.block_until_ready(run(models)))
    weights = [
        torch.from_numpy(np.array(w))
        for w in (models.embed, models.layers[0].left, models.layers[0].right)
    ]
    head = torch.from_numpy(np.array(models.head))

    def peer():
        embed, left, right = weights
        lift, root = torch.linalg.qr(embed.mT)
        left, right = left @ root.mT, right @ root.mT
        forms = torch.einsum("sco,soi,soj->scij", head, left, right)
        return lift, *torch.linalg.eigh(0.5 * (forms + forms.mT))

    def whole_peer():
        lift, values, vectors = peer()
        order = torch.argsort(values.abs(), dim=-1, descending=True)
        return torch.gather(values, -1, order), torch.stack([
            (own @ vectors[s, c]).T[order[s, c]] for s, own in enumerate(lift) for c in range(order.shape[1])
        ])  # fmt: skip

    peers = {"the same": whole_peer, "eigh of hidden matrices alone": peer}
    whole_peer()
    theirs = in_turn({"ours": lambda: jax.block_until_ready(run(models)), **peers}, repeats)
    ours = theirs.pop("ours")
    work = (
        "50 sorted eigendecompositions of bilinear networks of size 300, with eigenvectors on "
        "inputs"
    )
    add_row(work, ours, {"PyTorch": theirs["the same"]}, first=first)
    shown = ", ".join(
        f"{k} {np.median(t):.3f} s ({np.median(np.divide(t, ours)):.2f} times ours)"
        for k, t in theirs.items()
    )
    difference = np.abs(np.asarray(run(models).values) - whole_peer()[0].numpy()).max()
    print(
        "decompose: 5 x 10 x size 300, "
        f"OPENBLAS_NUM_THREADS={os.environ.get('OPENBLAS_NUM_THREADS', 'unset')}: "
        f"ours {np.median(ours):.3f} s (first {first:.2f} s), PyTorch: {shown}; largest "
        f"difference {difference:.1e}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--epochs", type=int, default=3, help="in a call, so that what a call costs counts little"
    )
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of PyTorch; XLA takes all cores"
    )
    parser.add_argument("--only", nargs="+", choices=["training", "seeds", "decompose"])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_all_cores()
    wanted = options.only or ["training", "seeds", "decompose"]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}, {jax.devices()}")
    images, labels = random_data(options.samples)
    data = Dataset("random", images, labels, images[:10], labels[:10])
    for name, hidden, num_seeds in (("training", 300, 1), ("seeds", 100, 5)):
        if name not in wanted:
            continue

        def epochs(number, hidden=hidden, num_seeds=num_seeds):
            # Observations are no part of an epoch: few images. The schedule of an epoch is compiled
            # once.
            result = train_bilinear(
                data,
                hidden,
                key=jax.random.key(0),
                num_seeds=num_seeds,
                num_epochs=number,
                num_observed=10,
            )
            jax.block_until_ready(result.models)

        first = timed(lambda: epochs(options.epochs))
        peers = ("lean", "published") if name == "training" else ("lean",)
        both = {
            loader: partial(torch_epochs, images, labels, hidden, num_seeds, loader, options.epochs)
            for loader in peers
        }
        theirs = in_turn({"ours": partial(epochs, options.epochs), **both}, options.repeats)
        if num_seeds > 1:
            parts = [
                (options.samples, hidden, share, options.epochs) for share in shares(num_seeds)
            ]
            alone = partial(one_process_per_core, torch_warm, torch_alone, parts)
            theirs["one process per core"] = [alone() for _ in range(options.repeats)]
        theirs = {loader: np.divide(times, options.epochs) for loader, times in theirs.items()}
        ours = theirs.pop("ours")
        epoch = f"one epoch of {options.samples} images, {num_seeds} seed(s)"
        work = f"bilinear networks of size {hidden}, AdamW, noise: {epoch}"
        titles = {"lean": "lean loop", "published": "published loader"}
        add_row(
            work,
            ours,
            {f"PyTorch, {titles.get(k, k)}": times for k, times in theirs.items()},
            first=first,
        )
        shown = ", ".join(
            f"PyTorch {k} {np.median(t):.2f} s ({np.median(np.divide(t, ours)):.2f} times ours)"
            for k, t in theirs.items()
        )
        print(
            f"{name}: {num_seeds} x size {hidden}, per epoch: ours {np.median(ours):.2f} s "
            "(first call of "
            f"{options.epochs} epochs {first:.2f} s), {shown}",
            flush=True,
        )
    if "decompose" in wanted:
        decompositions(options.repeats)


if __name__ == "__main__":
    main()
