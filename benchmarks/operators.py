"""Compare operators with kooplearn on the same data: single fits, 16 regularisations and 8 seeds at once.

Single fits are plain calls on NumPy's arrays, which are diagnosed, and compiled ones, which are
not.

    python benchmarks/operators.py                 # 5000 samples: 784 pixels; Lorenz 63
    python benchmarks/operators.py --samples 500   # small

Everything is float64, as in the peer. Times are medians, compile time is apart, and eigenvalues are
compared. The linear data are ordered digits, from MNIST if DISSOCIATION_DATA names its folder, else
drawn ones. Eigenvalues of the Nystroem estimators differ, since kooplearn 2.0.3 adds alpha K to
nothing: with any `alpha` its eigenvalues are the same. `--peer-solver dense` is the peer's default
solver of exact Gram matrices for 25 components, a generalised eigenproblem that takes minutes at
5000 samples. The default here is the faster ARPACK.
"""

import argparse
import os
from functools import partial

import jax

from dissociation import use_all_cores

jax.config.update("jax_enable_x64", True)
# before SciPy's OpenBLAS is loaded, whose threads the peer gets back in `Peer.fit_once`
use_all_cores()

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from kooplearn.kernel import KernelRidge, NystroemKernelRidge  # noqa: E402
from kooplearn.linear_model import Ridge  # noqa: E402
from threadpoolctl import threadpool_limits  # noqa: E402
from timing import add_row, timed  # noqa: E402

from dissociation import bmap  # noqa: E402
from koopman import RBF, ReducedRank, fit, lagged_pairs, median_distance  # noqa: E402
from koopman.datasets import lorenz63, ordered_mnist  # noqa: E402

QR_NOTE = (
    "set here; the default takes QR in float32, or if an eigenvalue of the covariance is "
    "near its rounding"
)

NYSTROEM_NOTE = "kooplearn 2.0.3 computes its Nystroem estimator without alpha"


def calls(function, peer, repeats):
    """Return the seconds of every call, ours and the peer's alternately, and of our first one, which is not counted."""
    run, spent, theirs = lambda: jax.block_until_ready(function()), [], []
    first = timed(run)
    for _ in range(repeats):
        spent.append(timed(run))
        theirs.append(timed(peer))
    return np.asarray(spent), np.asarray(theirs), first


def compare(name, peer, fit, seeds, alphas, repeats, *, sweep=None):
    """Print the two sides' times and eigenvalues: for one regularisation, for all, and for pairs of many seeds.

    Args:
        name: Name of the estimator.
        peer: Peer's model on the first seed's pairs.
        fit: Function of pairs and alpha.
        seeds: Pairs of every seed, two arrays [seeds, samples, width].
        alphas: Regularisations.
        repeats: Number of timed calls.
        sweep: Function to vectorise over alphas, if another solver is faster there.
    """
    arguments = tuple(leaf[0] for leaf in seeds)
    one = partial(jax.jit(fit), *arguments, alphas[0])
    peer.fit_once()

    def shown(what, function, times, repeats, note=""):
        ours, theirs, first = calls(function, peer.fit_once, repeats)
        found = np.median(ours), np.median(theirs / ours) * times, first - np.median(ours)
        told = "ours {:.3f} s, {:.2f} times the peer; {:.1f} s compiling".format(*found)
        print(f"{name}, {what}: {told}", flush=True)
        notes = [QR_NOTE] * name.endswith("qr") + [NYSTROEM_NOTE] * name.startswith("Nystroem")
        why = "; ".join(notes)
        add_row(
            f"{name}, {what}", ours, {f"kooplearn{note}": theirs * times}, first=first, note=why
        )

    on_host = [np.asarray(leaf) for leaf in arguments]
    shown("one fit, as pages call it", partial(fit, *on_host, float(alphas[0])), 1, repeats)
    shown("one fit under jit", one, 1, repeats)
    mine = np.sort(np.abs(np.linalg.eigvals(np.asarray(one().cross_gram))))[
        ::-1
    ]  # as fitted, as the peer's
    other = np.sort(np.abs(peer.model.eig()))[::-1]
    few = min(5, len(mine), len(other))
    print(f"    moduli ours {mine[:few].round(5)}, peer {other[:few].round(5)}")
    number, fewer = len(seeds[0]), max(2, repeats // 2)
    at_once = jax.jit(jax.vmap(sweep or fit, (None, None, 0)))
    count = len(alphas)
    shown(
        f"{count} alphas",
        lambda: at_once(*arguments, alphas),
        count,
        fewer,
        f", one fit times {count}",
    )
    together = bmap(lambda x, y: fit(x, y, alphas[0]), batch_size=1)
    shown(f"{number} seeds", lambda: together(*seeds), number, fewer, f", one fit times {number}")


class Peer:
    """A peer's model on one trajectory."""

    def __init__(self, model, trajectory):
        self.model, self.trajectory = model, trajectory

    def fit_once(self):
        """Fit the model, with all threads."""
        with threadpool_limits(os.cpu_count()):
            self.model.fit(self.trajectory)


def gram_fit(x, y, alpha, *, scale, solver="auto"):
    """Fit reduced rank regression with exact Gram matrices."""
    return fit(ReducedRank(25, alpha, solver=solver), x, y, kernel=RBF(scale))


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--centres", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--peer-solver", choices=["arpack", "dense"], default="arpack")
    parser.add_argument("--only", choices=["linear", "kernel", "nystroem"])
    options = parser.parse_args()
    number, alphas = options.samples, jnp.logspace(-6, -1, 16)
    wanted = {options.only} if options.only else {"linear", "kernel", "nystroem"}
    print(f"{os.cpu_count()} cores, load {os.getloadavg()}")

    if "linear" in wanted:
        sequence = ordered_mnist(5, data="mnist" if "DISSOCIATION_DATA" in os.environ else "glyphs")
        pixels = sequence.images[: number + 1].reshape(-1, 784).astype(float)
        peer = Peer(Ridge(n_components=5, alpha=1e-6, reduced_rank=True), pixels)
        # Seeds differ by a little noise: the work is the same.
        noise = np.random.default_rng(0).normal(scale=1e-3, size=(options.seeds, *pixels.shape))
        noise[0] = 0.0
        seeds = jax.vmap(lagged_pairs)(jnp.asarray(pixels + noise))
        for route in ("auto", "qr", "covariance"):
            own = lambda x, y, a, r=route: fit(ReducedRank(5, a), x, y, route=r)  # noqa: E731
            compare(
                f"reduced rank regression, {sequence.name}, {seeds[0][0].shape}, rank 5, route "
                f"{route}",
                peer,
                own,
                seeds,
                alphas,
                options.repeats,
            )

    paths = jax.vmap(lambda key: lorenz63(number + 1000, key=key))(
        jax.random.split(jax.random.key(0), options.seeds)
    )
    paths = np.asarray(paths)[:, 1000:]
    paths = (paths - paths.mean(1, keepdims=True)) / paths.std(1, keepdims=True)
    seeds = jax.vmap(lagged_pairs)(paths)
    path, x = paths[0], seeds[0][0]
    scale = float(median_distance(x))
    settings = {
        "n_components": 25,
        "alpha": 1e-6,
        "reduced_rank": True,
        "kernel": "rbf",
        "gamma": 0.5 / scale**2,
    }
    if "kernel" in wanted:
        peer = Peer(KernelRidge(**settings, eigen_solver=options.peer_solver, random_state=0), path)
        own = partial(gram_fit, scale=scale)
        compare(
            f"kernel reduced rank regression, Lorenz 63, {x.shape}, rank 25, peer's solver "
            f"{options.peer_solver}",
            peer,
            own,
            seeds,
            alphas,
            max(1, options.repeats // 2),
            sweep=partial(own, solver="spectral"),
        )
    if "nystroem" in wanted:
        peer = Peer(
            NystroemKernelRidge(n_centers=options.centres, random_state=0, **settings), path
        )
        peer.fit_once()
        chosen = peer.model.nys_centers_idxs_
        for route in ("auto", "qr", "covariance"):
            on = {"kernel": RBF(scale), "centres": x[chosen], "route": route}
            own = lambda x, y, a, on=on: fit(ReducedRank(25, a), x, y, **on)  # noqa: E731
            compare(
                f"Nystroem, Lorenz 63, {x.shape}, {options.centres} centres, route {route}",
                peer,
                own,
                seeds,
                alphas,
                options.repeats,
            )


if __name__ == "__main__":
    main()
