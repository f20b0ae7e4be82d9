"""Compare the converged cross-validated probe with scikit-learn, fold by fold, on the same features.

    python benchmarks/probes.py                                  # 10 000 samples, 1024 features
    python benchmarks/probes.py --samples 1000 --features 128    # small

Features are post-activations of a ReLU network trained for a few epochs, on MNIST if
DISSOCIATION_DATA names its folder, else on synthetic clusters. Both sides minimise the same loss (C
= 1) on features standardised by each training part, and both losses are evaluated in float64. The
peer solves the first fold with one thread and with all, and the others with the faster number,
because on a busy machine its threads wait for each other.
"""

import argparse
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import KFold
from threadpoolctl import threadpool_limits
from timing import add_row

from dissociation import use_all_cores
from dissociation.measures import gradient_probe, linear_probe_fit


def make_features(samples, width, epochs, seed):
    """Return the features, the labels and a name of their source."""
    if "DISSOCIATION_DATA" in os.environ:
        from dissociation.data import mnist_data

        train, train_labels, images, labels = mnist_data()
        images, labels = images[:samples], labels[:samples]
        name = f"MNIST test images, second layer of a {width}-{width} network after {epochs} epochs"
    else:
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(10, 64))
        classes = rng.integers(0, 10, samples + 20_000)
        inputs = (centres[classes] + 1.5 * rng.normal(size=(len(classes), 64))).astype(np.float32)
        hot = np.eye(10, dtype=np.float32)[classes]
        images, labels, train, train_labels = (
            inputs[:samples],
            hot[:samples],
            inputs[samples:],
            hot[samples:],
        )
        name = (
            f"synthetic clusters, second layer of a {width}-{width} network after {epochs} epochs"
        )
    sizes = [images.shape[1], width, width, 10]
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    weights = [
        jax.random.uniform(k, (i, o), minval=-1, maxval=1) / np.sqrt(i) for k, i, o in shapes
    ]

    def hidden(weights, x):
        return jax.nn.relu(jax.nn.relu(x @ weights[0]) @ weights[1])

    def loss(weights, x, y):
        return -jnp.mean(jnp.sum(y * jax.nn.log_softmax(hidden(weights, x) @ weights[2]), -1))

    @jax.jit
    def epoch(weights, x, y):
        def step(weights, batch):
            return jax.tree.map(
                lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights, *batch)
            ), None

        return jax.lax.scan(step, weights, (x, y))[0]

    whole = len(train) // 128 * 128
    batches = train[:whole].reshape(-1, 128, sizes[0]), train_labels[:whole].reshape(-1, 128, 10)
    for _ in range(epochs):
        weights = epoch(weights, *batches)
    return np.asarray(jax.jit(hidden)(weights, images)), np.asarray(labels), name


def objective(x, y, coefficients, intercept, train):
    """Return the loss of one fold in float64, for coefficients of standardised features, over its training part."""
    logits = x @ coefficients + intercept
    logits -= logits.max(1, keepdims=True)
    return -np.sum(
        y[train] * (logits - np.log(np.exp(logits).sum(1, keepdims=True)))
    ) + 0.5 * np.sum(coefficients**2)


def standardise(x, train):
    part = np.asarray(x[train], np.float64)
    deviation = np.where(np.ptp(part, axis=0) == 0, 0, part.std(0))
    return (part - part.mean(0)) * np.where(
        deviation > 0, 1 / np.where(deviation > 0, deviation, 1), 0
    ), deviation


def solve_peer(z, labels, threads):
    """Return the seconds and the fit of one fold in float32."""
    single = z.astype(np.float32)
    with threadpool_limits(threads):
        start, busy = time.perf_counter(), time.process_time()
        peer = LogisticRegression(C=1.0, tol=1e-6, max_iter=10_000).fit(single, labels)
        return time.perf_counter() - start, time.process_time() - busy, peer


def wait(function):
    start, busy = time.perf_counter(), time.process_time()
    result = jax.block_until_ready(function())
    return time.perf_counter() - start, time.process_time() - busy, result


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value, text in [
        ("samples", 10_000, "samples"),
        ("features", 1024, "width of the hidden layers"),
        ("folds", 10, "folds"),
        ("peer-folds", 10, "folds that the peer solves; its total is scaled up to all"),
        ("epochs", 4, "epochs of training before the features are taken"),
        ("repeats", 3, "timed runs of ours"),
        ("seed", 0, "seed of the network"),
    ]:
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default {value})")
    parser.add_argument(
        "--gradient", action="store_true", help="time the gradient probe of 200 steps, too"
    )
    options = parser.parse_args()

    use_all_cores()
    x, y, source = make_features(options.samples, options.features, options.epochs, options.seed)
    n, d = x.shape
    print(
        f"{source}: {n} samples x {d} features x {options.folds} folds x {y.shape[1]} classes; "
        f"load {os.getloadavg()}"
    )
    square = jnp.ones((2048, 2048), jnp.float32)
    product = jax.jit(lambda a: a @ a)
    wait(lambda: product(square))
    peak = 2 * 2048**3 / min(wait(lambda: product(square))[0] for _ in range(5))
    device = jnp.asarray(x)

    first, _, _ = wait(lambda: linear_probe_fit(device, y, options.folds, folds="contiguous"))
    times, fit = [], None  # pairs of wall and processor seconds
    for _ in range(options.repeats):
        *seconds, fit = wait(lambda: linear_probe_fit(device, y, options.folds, folds="contiguous"))
        times.append(seconds)
    ours, busy = np.median(times, axis=0)
    rate = 4 * n * (d + 1) * options.folds * y.shape[1] * int(fit.iterations) / ours
    print(
        f"ours   {ours:8.2f} s for all folds, median of {options.repeats}; the first call "
        f"{first:.2f} s, with compiling"
    )
    print(
        f"       {int(fit.iterations)} steps, a product with the data and back each, at "
        f"{rate / 1e9:.0f} GFLOP/s,"
    )
    print(
        f"       a 2048 square product at {peak / 1e9:.0f}; gap at most {float(fit.gap.max()):.1e}",
        flush=True,
    )

    spent, threads = [], None
    for fold, (train, _) in zip(
        range(options.peer_folds), KFold(options.folds).split(x), strict=False
    ):
        z, deviation = standardise(x, train)
        labels = y[train].argmax(1)
        if threads is None:
            trials = {count: solve_peer(z, labels, count) for count in sorted({1, os.cpu_count()})}
            threads = min(trials, key=lambda count: trials[count][0])
            print(
                "peer   fold 0 by threads:",
                ", ".join(f"{count}: {run[0]:.2f} s" for count, run in trials.items()),
            )
            *seconds, peer = trials[threads]
        else:
            *seconds, peer = solve_peer(z, labels, threads)
        spent.append(seconds)
        theirs = objective(z, y, peer.coef_.T.astype(np.float64), peer.intercept_, train)
        own = np.asarray(fit.coefficients[fold], np.float64)
        shift = (
            np.asarray(fit.intercepts[fold], np.float64)
            + np.asarray(x[train], np.float64).mean(0) @ own
        )
        mine = objective(z, y, own * deviation[:, None], shift, train)
        print(
            f"peer   {seconds[0]:8.2f} s for fold {fold}, {peer.n_iter_[0]} steps; loss "
            f"{theirs:.4f}, ours {mine:.4f},"
        )
        print(f"       ours above the peer's by {mine / theirs - 1:+.1e} of it", flush=True)
    total, worked = np.median(spent, axis=0) * options.folds
    work = f"converged probe, {n} samples x {d} features x {options.folds} folds"
    add_row(work, [ours], {f"scikit-learn, {threads} thread(s)": [total]}, first=first)
    note = f"{threads} threads, median of {len(spent)} folds times {options.folds}"
    print(
        f"peer   {total:8.2f} s for all folds ({note}); ratio {total / ours:.1f}, with compiling "
        f"{total / first:.1f}"
    )
    print(
        f"processor seconds, less distorted by a busy machine: ours {busy:.2f}, peer "
        f"{worked:.2f}, {worked / busy:.1f}"
    )

    if options.gradient:
        first, _, _ = wait(lambda: gradient_probe(device, y, options.folds))
        seconds, _, _ = wait(lambda: gradient_probe(device, y, options.folds))
        print(
            f"gradient probe, 200 steps: {seconds:.2f} s for all folds, {first - seconds:.2f} s "
            "more to compile"
        )


if __name__ == "__main__":
    main()
