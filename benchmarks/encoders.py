"""One training epoch of S encoders of a sequence against the same network in a plain PyTorch CPU loop, seed after seed.

    python benchmarks/encoders.py [--seeds 1 4] [--repeats 5] [--threads 2] [--losses vamp contrastive]

Both train the network of the ordered digits (two 5 x 5 convolutions with ReLU and max-pool, a linear layer, features of
fixed norm, a linear layer for the next image) with AdamW on batches of 64 pairs of 3000 drawn images, from data in
memory; x and y pass the network together on both sides. PyTorch's losses are kooplearn's. Compile time is reported
apart: the first call of each size.
"""

import argparse
import os
from functools import partial

import jax
import numpy as np
import torch
from kooplearn.torch.nn import _functional as peer_losses
from timing import add_row, in_turn, one_process_per_core, shares, timed

from dissociation.cores import use_all_cores
from koopman.datasets.ordered_mnist import ordered_mnist
from koopman.learn import train_encoders

BATCH, FEATURES, SAMPLES = 64, 5, 3000


class TorchFeatureMap(torch.nn.Module):
    """The peer's network."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Conv2d(16, 32, 5, padding=2), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
            torch.nn.Flatten(), torch.nn.Linear(1568, FEATURES),
        )  # fmt: skip
        self.lag = torch.nn.Linear(FEATURES, FEATURES, bias=False)

    def forward(self, images):
        """Features of norm sqrt(5)."""
        return FEATURES**0.5 * torch.nn.functional.normalize(self.encoder(images), dim=1, eps=1e-12)


TORCH_LOSSES = {
    "vamp": lambda x, y: peer_losses.vamp_loss(x, y, schatten_norm=2, center_covariances=False),
    "contrastive": peer_losses.spectral_contrastive_loss,
}


def torch_epoch(images, loss, num_seeds):
    images = torch.from_numpy(images)[:, None]
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        model = TorchFeatureMap()
        optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
        for chosen in torch.randperm(len(images) - 1).split(BATCH):
            optimizer.zero_grad()
            both = model(torch.cat([images[chosen], images[chosen + 1]]))
            loss(both[: len(chosen)], model.lag(both[len(chosen) :])).backward()
            optimizer.step()


def torch_alone(samples, name, num_seeds):
    torch_epoch(np.random.default_rng(0).random((samples, 28, 28), np.float32), TORCH_LOSSES[name], num_seeds)


def torch_warm():
    torch_alone(3 * BATCH, "vamp", 1)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="threads of PyTorch; XLA takes all cores")
    parser.add_argument("--losses", nargs="+", choices=list(TORCH_LOSSES), default=list(TORCH_LOSSES))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_all_cores()
    images = ordered_mnist(FEATURES, data="glyphs").images[:SAMPLES]
    print(f"{SAMPLES} images, batches of {BATCH}, PyTorch on {options.threads} threads, {jax.devices()}")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}")
    print("loss         seeds  ours s  (first call)  torch s  torch/ours")
    for name in options.losses:
        for num_seeds in options.seeds:

            def epoch(name=name, num_seeds=num_seeds):
                result = train_encoders(name, images, key=jax.random.key(0), num_seeds=num_seeds, num_epochs=1)
                jax.block_until_ready(result.models)

            first = timed(epoch)
            peer = partial(torch_epoch, images, TORCH_LOSSES[name], num_seeds)
            parts = [(SAMPLES, name, share) for share in shares(num_seeds)]
            ours, theirs, processes = [], [], []
            for _ in range(options.repeats):
                both = in_turn({"ours": epoch, "theirs": peer}, 1)
                ours += both["ours"]
                theirs += both["theirs"]
                processes += [one_process_per_core(torch_warm, torch_alone, parts)] if num_seeds > 1 else []
            peers = {"PyTorch": theirs} | ({"PyTorch, a process per core": processes} if processes else {})
            work = f"convolutional encoders, {name} loss: an epoch of {SAMPLES} images, {num_seeds} seed(s)"
            note = "XLA's CPU convolutions (Eigen's) run at about half the rate of oneDNN's"
            add_row(work, ours, peers, first=first, note=note)
            print(
                f"{name:12s} {num_seeds:5d} {np.median(ours):7.2f} {first:13.2f} {np.median(theirs):8.2f}"
                f" {np.median(np.divide(theirs, ours)):11.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
