"""Compute numbers of other packages for tests, stored in `peers.json` with the versions.

    pip install pydmd deeptime kooplearn
    python benchmarks/peers.py

Each entry of `PEERS` computes its numbers from `data()`. Those of a package that is not installed
stay in the file.
"""

import importlib.metadata
import json
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("peers.json")


def data():
    """Return noise-free rotations lifted to six coordinates, a cosine, and an autoregression with an offset."""
    rng = np.random.default_rng(0)

    def turn(radius, angle):
        return radius * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])

    step = np.zeros((4, 4))
    step[:2, :2], step[2:, 2:] = turn(0.97, 0.3), turn(0.8, 1.1)
    states = [np.ones(4)]
    for _ in range(60):
        states.append(step @ states[-1])
    lifted = np.array(states) @ rng.standard_normal((4, 6))
    cosine = np.cos(0.25 * np.arange(80))[:, None]
    affine, noise = [np.array([10.0, -5.0, 0.0])], rng.standard_normal((2000, 3))
    drift = np.array([[0.9, 0.1, 0.0], [-0.1, 0.7, 0.2], [0.0, 0.0, 0.4]])
    for kick in noise:
        affine.append(drift @ affine[-1] + np.array([2.0, -1.0, 0.5]) + 0.3 * kick)
    return {"lifted": lifted, "cosine": cosine, "affine": np.array(affine)}


def spectrum(values):
    """Return complex numbers as pairs, by falling modulus and rising imaginary part."""
    return sorted(
        ([float(v.real), float(v.imag)] for v in values),
        key=lambda v: (-round(np.hypot(*v), 9), v[1]),
    )


def pydmd(paths):
    """Return eigenvalues of exact DMD, and of Hankel DMD with two delays."""
    from pydmd import DMD, HankelDMD

    plain = DMD(svd_rank=4, exact=True).fit(paths["lifted"].T)
    delayed = HankelDMD(svd_rank=2, d=2).fit(paths["cosine"].T)
    return {"lifted": spectrum(plain.eigs), "cosine": spectrum(delayed.eigs)}


def deeptime(paths):
    """Return the VAMP-2 score of states about their means, with the constant function's 1."""
    from deeptime.covariance import Covariance
    from deeptime.decomposition import VAMP

    # Dense: looking for constant columns fails with this NumPy.
    covariances = Covariance(
        lagtime=1, compute_c0t=True, compute_ctt=True, remove_data_mean=True, sparse_mode="dense"
    )
    moments = covariances.fit(paths["affine"]).fetch_model()
    model = VAMP(epsilon=1e-12).fit_from_covariances(moments).fetch_model()
    return {"affine": float(model.score(2))}


def kooplearn(paths):
    """Return eigenvalues of reduced rank regression of rank 2 at alpha 1e-12, of states about their mean."""
    from kooplearn.linear_model import Ridge

    model = Ridge(n_components=2, reduced_rank=True, alpha=1e-12, eigen_solver="dense")
    model.fit(paths["affine"] - paths["affine"].mean(0))
    return {"affine": spectrum(model.eig())}


PEERS = {"PyDMD": pydmd, "deeptime": deeptime, "kooplearn": kooplearn}


def main():
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, compute in PEERS.items():
        try:
            kept[name] = {"version": importlib.metadata.version(name), **compute(data())}
        except ImportError as error:
            print(f"{name}: kept, as it is not installed ({error})")
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
    print(FILE.read_text())


if __name__ == "__main__":
    main()
