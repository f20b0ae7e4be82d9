"""Compare models of trajectories with PyDMD and deeptime, on the same data and equal results.

    pip install pydmd deeptime
    python benchmarks/models.py [--steps 20000] [--trials 100] [--repeats 5] [--only control rates tones]

control: a system with inputs, `fit_model` and its matrices, against DMDc. rates: states of 20
columns, `fit_model` alone and with intervals of the rates from 100 deleted blocks, against
deeptime's VAMP, which has no intervals. tones: 8 sensors at 200 uneven times, `fit_exponentials`
with intervals from 20 deleted blocks, against BOPDMD, one fit and many bags. Its own start diverges
on such times, so it starts from the truth. Rows of a peer that is not installed are left out.
"""

import argparse
import importlib
import warnings
from importlib import metadata

import jax

from dissociation import use_all_cores

jax.config.update("jax_enable_x64", True)
use_all_cores()

import numpy as np  # noqa: E402
from timing import add_row, in_turn, timed  # noqa: E402

from koopman import eigenvalues, fit_exponentials, fit_model  # noqa: E402

TONES = np.array([-0.05 + 2j, -0.1 + 5j])


def peer_of(package, name):
    """Return a module of a peer, or None if the peer is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        print(f"{package} is not installed: no rows")
        return None


def compare(work, ours, peers, repeats, difference, note=""):
    """Time a call and those of peers alternately, and add a row."""
    first = timed(ours)
    for peer in peers.values():
        peer()
    seconds = in_turn({"ours": ours, **peers}, repeats)
    own = seconds.pop("ours")
    times = ", ".join(
        f"{name} {np.median(values):.3f} s ({np.median(np.divide(values, own)):.2f} times ours)"
        for name, values in seconds.items()
    )
    print(
        f"{work}: ours {np.median(own):.3f} s (first {first:.2f} s), {times}; largest difference "
        f"{difference():.1e}",
        flush=True,
    )
    add_row(work, own, seconds, first=first, note=note)


def control(steps, repeats):
    """Compare with DMDc on a system of 6 states and 2 inputs."""
    pydmd = peer_of("PyDMD", "pydmd")
    if pydmd is None:
        return
    rng = np.random.default_rng(0)
    a = 0.9 * np.linalg.qr(rng.normal(size=(6, 6)))[0]
    b = rng.normal(size=(2, 6))
    inputs = rng.normal(size=(steps, 2))
    states = np.zeros((steps, 6))
    for step in range(steps - 1):
        states[step + 1] = states[step] @ a + inputs[step] @ b + 0.1 * rng.normal(size=6)

    def model():
        return jax.block_until_ready(fit_model(states, inputs=inputs, center=False))

    def peer():
        return pydmd.DMDc(svd_rank=-1, svd_rank_omega=-1).fit(states.T, inputs[:-1].T)

    def difference():
        return float(np.abs(peer().B.T - model().matrices().B.values[0]).max())

    name = f"DMDc (PyDMD {metadata.version('pydmd')})"
    work = f"fit_model with inputs, {steps} steps of 6 states and 2 inputs"
    note = "the first call checks inputs for feedback, and reads and diagnoses the data"
    compare(work, model, {name: peer}, repeats, difference, note)
    compare(
        f"{work}, and matrices with intervals",
        lambda: model().matrices(),
        {name: peer},
        repeats,
        difference,
        "the peer has no intervals",
    )


def rates(steps, repeats):
    """Compare with deeptime's VAMP on 20 columns."""
    decomposition = peer_of("deeptime", "deeptime.decomposition")
    if decomposition is None:
        return
    from deeptime.covariance import Covariance

    rng = np.random.default_rng(0)
    matrix = 0.95 * np.linalg.qr(rng.normal(size=(20, 20)))[0]
    states = np.zeros((steps, 20))
    for step in range(steps - 1):
        states[step + 1] = states[step] @ matrix + rng.normal(size=20)

    def model():
        return jax.block_until_ready(fit_model(states))

    def moments():
        # Dense, because its search for constant columns fails with new versions of NumPy.
        estimator = Covariance(
            lagtime=1,
            compute_c0t=True,
            compute_ctt=True,
            remove_data_mean=True,
            sparse_mode="dense",
        )
        return estimator.fit(states).fetch_model()

    def peer():
        return decomposition.VAMP(epsilon=1e-12).fit_from_covariances(moments()).fetch_model()

    def difference():
        covariances = moments()
        values = np.linalg.eigvals(np.linalg.solve(covariances.cov_00, covariances.cov_0t))
        own = np.asarray(eigenvalues(model().operator))
        own = own[np.abs(own - 1) > 1e-9]
        return float(np.abs(np.sort(np.abs(own)) - np.sort(np.abs(values))).max())

    name = f"VAMP (deeptime {metadata.version('deeptime')})"
    work = f"fit_model, {steps} steps of 20 states"
    note = "covariances alone; here the data are read, checked and diagnosed"
    compare(work, model, {name: peer}, repeats, difference, note)
    compare(
        f"{work}, and rates with intervals of 100 blocks",
        lambda: model().rates(),
        {name: peer},
        repeats,
        difference,
        "the peer has no intervals",
    )


def tones(trials, repeats):
    """Compare with BOPDMD on two tones at uneven times."""
    pydmd = peer_of("PyDMD", "pydmd")
    if pydmd is None:
        return
    rng = np.random.default_rng(0)
    times = np.sort(rng.uniform(0, 20, 200))
    shapes = rng.normal(size=(2, 8)) + 1j * rng.normal(size=(2, 8))
    states = np.real(np.exp(np.outer(times, TONES)) @ shapes) + 0.2 * rng.normal(size=(200, 8))
    start = np.ravel(np.stack([TONES, TONES.conj()], 1))

    def ours():
        fitted = fit_exponentials(states, times, rank=4)
        fitted.rates()
        return fitted

    def peer(num_trials=0):
        model = pydmd.BOPDMD(
            svd_rank=4,
            num_trials=num_trials,
            trial_size=0.6,
            init_alpha=start,
            eig_constraints={"conjugate_pairs"},
        )
        return model.fit(states.T.astype(complex), times)

    def difference():
        fitted = ours()
        own = np.sort(fitted.growth + 1j * fitted.angular_frequency)
        values = peer().eigs
        return float(np.abs(own - np.sort(values[values.imag > 0])).max())

    version = metadata.version("pydmd")
    peers = {
        f"BOPDMD, one fit (PyDMD {version})": peer,
        f"BOPDMD, {trials} bags (PyDMD {version})": lambda: peer(trials),
    }
    work = "fit_exponentials with intervals, 8 sensors, 200 uneven times, two tones"
    compare(work, ours, peers, repeats, difference, "the peer starts from the truth")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["control", "rates", "tones"])
    options = parser.parse_args()
    jobs = options.only or ["control", "rates", "tones"]
    # The peers warn of their own options.
    warnings.simplefilter("ignore")
    if "control" in jobs:
        control(options.steps, options.repeats)
    if "rates" in jobs:
        rates(options.steps, options.repeats)
    if "tones" in jobs:
        tones(options.trials, options.repeats)


if __name__ == "__main__":
    main()
