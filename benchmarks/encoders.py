"""Compare encoders of a sequence with the same network in a plain PyTorch CPU loop, one seed after another.

    python benchmarks/encoders.py [--seeds 1 4] [--repeats 5] [--threads 2]
        [--losses vamp contrastive] [--only result]

epochs: one epoch of S seeds. result: time and correct forecasts of a short recipe, ours and
PyTorch's, and of the published one in PyTorch, by the contrastive loss. (By VAMP's, PyTorch's
network with its default initial weights learns nothing in 50 epochs of the published recipe.)

Both train the network of the ordered digits (two 5 x 5 convolutions with ReLU and max-pool, a
linear layer, features of fixed norm, a linear layer for the next image) with AdamW on batches of 64
pairs of 3000 drawn images, from data in memory; x and y pass the network together. PyTorch's losses
are kooplearn's. The first call of each size, which compiles, is apart.
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
from kooplearn.torch.nn import _functional as peer_losses
from timing import add_row, in_turn, one_process_per_core, shares, timed

from dissociation import member, use_all_cores
from dissociation.models import Encoder
from koopman import FeatureMap, ReducedRank, encode, fit, lagged_pairs, predict, train_encoders
from koopman.datasets import ordered_mnist

BATCH, FEATURES, SAMPLES = 64, 5, 3000
KIND, SEEDS, AHEAD, EPOCHS, RATE = "contrastive", 5, 15, 20, 4e-3


def feature_map(key):
    """Return our network, for states that are images."""
    return FeatureMap(FEATURES, feature_norm=FEATURES**0.5, key=key)


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
        """Return features of norm sqrt(5)."""
        return FEATURES**0.5 * torch.nn.functional.normalize(self.encoder(images), dim=1, eps=1e-12)


TORCH_LOSSES = {
    "vamp": lambda x, y: peer_losses.vamp_loss(x, y, schatten_norm=2, center_covariances=False),
    "contrastive": peer_losses.spectral_contrastive_loss,
}


def torch_train(images, loss, num_seeds, num_epochs=1, rate=2e-3, cycle=False):
    """Train the peer's networks by seed; the rate is constant, or rises over a fifth of the steps and falls to zero."""
    images, trained = torch.from_numpy(images)[:, None], []
    for seed in range(num_seeds):
        torch.manual_seed(seed)
        model = TorchFeatureMap()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
        steps = num_epochs * -(-(len(images) - 1) // BATCH)
        cycled = {"max_lr": rate, "total_steps": steps, "pct_start": 0.2, "cycle_momentum": False}
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, **cycled) if cycle else None
        for _ in range(num_epochs):
            for chosen in torch.randperm(len(images) - 1).split(BATCH):
                optimizer.zero_grad()
                both = model(torch.cat([images[chosen], images[chosen + 1]]))
                loss(both[: len(chosen)], model.lag(both[len(chosen) :])).backward()
                optimizer.step()
                if schedule is not None:
                    schedule.step()
        trained.append(model)
    return trained


def torch_alone(samples, name, num_seeds):
    torch_train(
        np.random.default_rng(0).random((samples, 28, 28), np.float32),
        TORCH_LOSSES[name],
        num_seeds,
    )


def torch_warm():
    torch_alone(3 * BATCH, "vamp", 1)


def measure_epochs(options):
    """Return the seconds of an epoch."""
    images = ordered_mnist(FEATURES, data="glyphs").images[:SAMPLES]
    print(
        f"{SAMPLES} images, batches of {BATCH}, PyTorch on {options.threads} threads, "
        f"{jax.devices()}"
    )
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}")
    print("loss         seeds  ours s  (first call)  torch s  torch/ours")
    for name in options.losses:
        for num_seeds in options.seeds:

            def epoch(name=name, num_seeds=num_seeds):
                options = {"key": jax.random.key(0), "num_seeds": num_seeds, "num_epochs": 1}
                result = train_encoders(feature_map, name, lagged_pairs([images]), **options)
                jax.block_until_ready(result.models)

            first = timed(epoch)
            peer = partial(torch_train, images, TORCH_LOSSES[name], num_seeds)
            parts = [(SAMPLES, name, share) for share in shares(num_seeds)]
            ours, theirs, processes = [], [], []
            for _ in range(options.repeats):
                both = in_turn({"ours": epoch, "theirs": peer}, 1)
                ours += both["ours"]
                theirs += both["theirs"]
                processes += (
                    [one_process_per_core(torch_warm, torch_alone, parts)] if num_seeds > 1 else []
                )
            peers = {"PyTorch": theirs} | (
                {"PyTorch, one process per core": processes} if processes else {}
            )
            work = (
                f"convolutional encoders, {name} loss: one epoch of {SAMPLES} images, "
                f"{num_seeds} seed(s)"
            )
            note = "XLA's CPU convolutions (Eigen's) run at about half the rate of oneDNN's"
            add_row(work, ours, peers, first=first, note=note)
            print(
                f"{name:12s} {num_seeds:5d} {np.median(ours):7.2f} {first:13.2f} "
                f"{np.median(theirs):8.2f}"
                f" {np.median(np.divide(theirs, ours)):11.2f}",
                flush=True,
            )


def measure_result(rounds):
    """Return the times of recipes, and the fractions of forecasts 15 steps ahead that an oracle reads correctly."""
    source = "mnist" if os.environ.get("DISSOCIATION_DATA") else "glyphs"
    sequence = ordered_mnist(FEATURES, data=source)
    train, _, test, _ = np.split(sequence.images, (SAMPLES, SAMPLES + 1000, SAMPLES + 2000))
    labels = np.split(sequence.labels, (SAMPLES, SAMPLES + 1000, SAMPLES + 2000))
    options = {
        "num_seeds": SEEDS,
        "num_epochs": 20,
        "optimizer": optax.adamw(8e-4, weight_decay=0.01),
    }
    classifier, examples = lambda key: Encoder(FEATURES, key=key), (train, labels[0])
    oracles = train_encoders(
        classifier, "classes", examples, key=jax.random.key(1), **options
    ).models

    @eqx.filter_jit
    def right(oracle, now, ahead):
        operator = fit(ReducedRank(FEATURES, 1e-6), now[:-1], now[1:], observable=train[1:])
        read = jnp.argmax(encode(oracle, predict(operator, ahead, AHEAD)), 1)
        return jnp.mean(read == (labels[2] + AHEAD) % FEATURES)

    def of_ours(models):
        each = [member(models, seed) for seed in range(SEEDS)]
        return [[encode(one, part) for part in (train, test)] for one in each]

    @torch.no_grad()
    def of_theirs(models):
        images = [torch.from_numpy(part)[:, None] for part in (train, test)]
        return [[one(part).numpy() for part in images] for one in models]

    steps = EPOCHS * -(-(SAMPLES - 1) // BATCH)
    schedule, loss = optax.cosine_onecycle_schedule(steps, RATE, pct_start=0.2), TORCH_LOSSES[KIND]
    kept = {}

    def ours():
        options = {
            "num_seeds": SEEDS,
            "num_epochs": EPOCHS,
            "optimizer": optax.adamw(schedule, weight_decay=0.01),
        }
        result = train_encoders(
            feature_map, KIND, lagged_pairs([train]), key=jax.random.key(0), **options
        )
        kept["ours"] = jax.block_until_ready(result.models)

    def theirs(name, *recipe):
        kept[name] = torch_train(train, loss, SEEDS, *recipe)

    published, same = "PyTorch, published recipe", "PyTorch, our recipe"
    peers = {
        published: partial(theirs, published, 50),
        same: partial(theirs, same, EPOCHS, RATE, True),
    }
    first = timed(ours)
    seconds = in_turn({"ours": ours, **peers}, rounds)
    shown = {}
    for name, models in kept.items():
        features = (of_ours if name == "ours" else of_theirs)(models)
        found = [
            100 * float(right(member(oracles, seed), *parts)) for seed, parts in enumerate(features)
        ]
        shown[name] = f"{np.mean(found):.1f} %, {min(found):.1f} to {max(found):.1f}"
    mine = seconds.pop("ours")
    work = (
        f"training {SEEDS} {KIND} encoders of ordered digits ({source}); % of right forecasts "
        f"{AHEAD} steps ahead"
    )
    recipe = f"one cycle of rates up to {RATE:g} in {EPOCHS} epochs, instead of 50 epochs at 0.002"
    add_row(
        work,
        mine,
        {f"{name} ({shown[name]})": own for name, own in seconds.items()},
        first=first,
        note=f"ours: {shown['ours']}; {recipe}",
    )
    print(
        f"{work}: ours {np.median(mine):.1f} s (first {first:.1f} s), {shown['ours']} right; "
        f"{recipe}"
    )
    for name, own in seconds.items():
        print(
            f"  {name}: {np.median(own):.1f} s, {shown[name]} right, "
            f"{np.median(np.divide(own, mine)):.2f} times ours"
        )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--threads", type=int, default=2, help="threads of PyTorch; XLA takes all cores"
    )
    parser.add_argument(
        "--losses", nargs="+", choices=list(TORCH_LOSSES), default=list(TORCH_LOSSES)
    )
    parser.add_argument("--rounds", type=int, default=1, help="of the time to the result")
    parser.add_argument(
        "--only", nargs="+", choices=["epochs", "result"], default=["epochs", "result"]
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    use_all_cores()
    if "epochs" in options.only:
        measure_epochs(options)
    if "result" in options.only:
        measure_result(options.rounds)


if __name__ == "__main__":
    main()
