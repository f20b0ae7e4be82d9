"""Valid calls of the public functions of `koopman`."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import koopman
from dissociation.data import Dataset
from koopman import datasets
from koopman._operators import _forecast as forecast

RANDOM = np.random.default_rng(0)
PATH = RANDOM.standard_normal((13, 3)).astype(np.float32)
X, Y = PATH[:-1], PATH[1:]
JACOBIAN = RANDOM.standard_normal((12, 3, 2)).astype(np.float32)
OBSERVABLE = RANDOM.standard_normal((12, 2)).astype(np.float32)
STABLE = np.array([[0.5, 0.1], [0.0, 0.3]], np.float32)
TRANSITION = np.array([[0.9, 0.1], [0.2, 0.8]], np.float32)
KEY = np.array([0, 1], np.uint32)  # raw: making a typed one would start a backend
KERNEL = koopman.RBF(1.0)


def energy(x):
    """A harmonic well."""
    return jnp.sum(x**2) / 2


def kernel(x, y):
    """The kernel of plain products, as a plain function."""
    return x @ y.T


def encoder():
    """From states of 3 coordinates to 2 features."""
    return eqx.nn.Linear(3, 2, key=jax.random.key(0))


def decoder():
    """From 2 features to states of 3 coordinates."""
    return eqx.nn.Linear(2, 3, key=jax.random.key(1))


@functools.cache
def operator():
    """A fitted operator on 3 features."""
    return koopman.fit(koopman.Ridge(0.1), X, Y)


@functools.cache
def decomposed():
    """Its spectrum."""
    return koopman.decompose(operator())


def feature_map():
    """A feature map of states of 3 coordinates."""
    return koopman.FeatureMap(2, encoder=encoder(), key=jax.random.key(0))


def digits():
    """Images of two classes."""
    labels = np.eye(2, dtype=np.float32)[[0, 1, 1, 0]]
    images = RANDOM.random((4, 784)).astype(np.float32)
    return Dataset("noise", images, labels, images, labels)


def training():
    """A training as short as can be."""
    schedule = {"num_seeds": 1, "num_epochs": 1, "batch_size": 6, "learning_rate": 1e-3, "weight_decay": 0.01}
    return schedule | {"key": KEY, "encoder": encoder(), "init": "lecun"}


PAIRS = {"x": X, "y": Y}
FIT = PAIRS | {"observable": OBSERVABLE}
OPTIONS = {"center": False, "route": "qr", "rtol": 1e-6}
RUN = {"num_steps": 3, "key": KEY, "num_trajectories": 2}
REGIMES = {"matrices": np.stack([STABLE, -STABLE]), "transition": TRANSITION}
NOISY = {"friction": 1.0, "sigma": 1.0}
CELLS = {"time_step": 0.1, "num_components": 2, "num_cells": 40}
ALIGN = {"key": KEY, "num_starts": 2, "num_steps": 20, "form": "frobenius"}

CALLS = {
    koopman.RBF: lambda: {"length_scale": 1.5},
    koopman.Laplacian: lambda: {"length_scale": 1.5},
    koopman.Matern: lambda: {"length_scale": 1.5, "nu": 2.5},
    koopman.Polynomial: lambda: {"degree": 3, "gamma": 0.5, "offset": 0.0},
    koopman.FeatureMap: lambda: {
        "features": 2,
        "encoder": encoder(),
        "feature_norm": 1.5,
        "init": "lecun",
        "key": KEY,
    },
    koopman.Autoencoder: lambda: {
        "features": 2,
        "orthogonal": True,
        "upsampling": "bilinear",
        "init": "lecun",
        "key": KEY,
    },
    datasets.overdamped_langevin: lambda: (
        {"potential": energy, "initial": np.ones((2, 3), np.float32), "time_step": 0.01, "substeps": 2} | RUN | NOISY
    ),
    datasets.langevin_spectrum: lambda: {"potential": energy, "domain": (-3.0, 3.0)} | NOISY | CELLS,
    datasets.prinz_langevin: lambda: (
        RUN | NOISY | {"time_step": 1e-3, "substeps": 2, "initial": np.ones((2, 1), np.float32)}
    ),
    datasets.prinz_spectrum: lambda: NOISY | CELLS,
    datasets.linear_system: lambda: RUN | {"matrix": STABLE, "noise": STABLE[:, :1], "initial": np.ones(2, np.float32)},
    datasets.linear_spectrum: lambda: {"matrix": STABLE, "degree": 2, "noise": STABLE},
    datasets.regime_switching_var: lambda: (
        RUN | REGIMES | {"noise": 0.1, "initial": np.ones(2, np.float32), "initial_regime": 1}
    ),
    datasets.regime_switching_spectrum: lambda: dict(REGIMES),
    datasets.logistic_map: lambda: RUN | {"order": 2, "initial": np.full((2, 1), 0.3, np.float32)},
    datasets.logistic_features: lambda: {"states": RANDOM.random((5, 1)), "order": 2},
    datasets.logistic_spectrum: lambda: {"order": 2, "num_components": 2},
    datasets.ordered_mnist: lambda: {"num_digits": 2, "data": digits(), "folder": "."},
    datasets.cycle_spectrum: lambda: {"num_digits": 4},
    datasets.ornstein_uhlenbeck: lambda: (
        RUN | {"theta": 1.0, "sigma": 1.0, "time_step": 0.1, "initial": np.ones((2, 1), np.float32)}
    ),
    datasets.ornstein_uhlenbeck_spectrum: lambda: {"theta": 1.0, "sigma": 1.0, "time_step": 0.1, "num_components": 3},
    datasets.duffing: lambda: (
        RUN
        | {"initial": np.ones((2, 2), np.float32), "time_step": 0.01, "substeps": 2}
        | {"alpha": 0.5, "beta": 0.1, "gamma": 0.1, "delta": 2.5, "omega": 2.0}
    ),
    datasets.lorenz63: lambda: (
        RUN
        | {"initial": np.ones((2, 3), np.float32), "time_step": 0.01, "substeps": 2}
        | {"sigma": 10.0, "mu": 28.0, "beta": 2.5}
    ),
    koopman.predict: lambda: {"operator": operator(), "x": X, "steps": 2},
    koopman.matrix_powers: lambda: {"matrix": STABLE, "exponents": np.array([1, 3])},
    koopman.risk: lambda: {"operator": operator()} | PAIRS,
    forecast.r2_score: lambda: {"target": X, "forecast": Y},
    koopman.score: lambda: {
        "operator": operator(),
        "trajectory": PATH,
        "lag": 1,
        "steps": 2,
        "observable": PATH,
        "metric": forecast.r2_score,
    },
    koopman.align_dynamics: lambda: ALIGN | {"a": STABLE, "b": TRANSITION},
    koopman.dynamical_distance: lambda: ALIGN | {"a": STABLE, "b": TRANSITION},
    koopman.pairwise_dynamical_distance: lambda: (
        ALIGN | {"operators": np.stack([STABLE, TRANSITION, -STABLE]), "others": np.stack([STABLE.T, TRANSITION])}
    ),
    koopman.eigenvalue_distance: lambda: {
        "eigenvalues_a": np.array([0.5, 0.1j, -0.1j], np.complex64),
        "eigenvalues_b": np.array([0.2, 0.9, -0.3j], np.complex64),
    },
    koopman.transition_matrix: lambda: {"operator": operator(), "metric": "data"},
    koopman.Ridge: lambda: {"alpha": 0.1},
    koopman.PrincipalComponents: lambda: {"rank": 2, "alpha": 0.1, "solver": "krylov"},
    koopman.ReducedRank: lambda: {"rank": 2, "alpha": 0.1, "solver": "spectral"},
    koopman.fit_generator: lambda: {
        "x": X,
        "jac": JACOBIAN,
        "rank": 2,
        "diffusion": 1.0,
        "alpha": 0.1,
        "shift": 1.0,
    },
    koopman.median_distance: lambda: {"x": X, "max_samples": 10},
    koopman.encode: lambda: {"model": encoder(), "states": X},
    koopman.train_encoders: lambda: (
        training()
        | {"kind": "vamp", "trajectories": PATH, "features": 2, "feature_norm": 1.0, "lag": 1, "validation": PATH}
    ),
    koopman.train_autoencoders: lambda: (
        training()
        | {
            "trajectories": PATH,
            "decoder": decoder(),
            "features": 2,
            "lag": 1,
            "orthogonal": True,
            "upsampling": "nearest",
            "validation": PATH,
        }
    ),
    koopman.train_classifiers: lambda: training() | {"states": X, "labels": np.arange(12) % 2, "num_classes": 2},
    koopman.validation_loss: lambda: {
        "kind": "vamp",
        "model": feature_map(),
        "trajectories": np.stack([PATH, PATH[::-1]]),
        "lag": 1,
        "trajectory_axis": 0,
        "batch_size": 12,
    },
    koopman.vamp_loss: lambda: PAIRS | {"schatten_norm": 2, "center_covariances": True},
    koopman.vamp_score: lambda: (
        PAIRS | {"x_test": X[:7], "y_test": Y[:7], "schatten_norm": 2, "center_covariances": True, "rank": 2}
    ),
    koopman.dpnets_loss: lambda: PAIRS | {"relaxed": False, "metric_deformation": 1.0, "center_covariances": True},
    koopman.spectral_contrastive_loss: lambda: dict(PAIRS),
    koopman.autoencoder_loss: lambda: (
        PAIRS
        | {"x_rec": X + 1, "y_enc": X[:, :2], "x_evo": Y[:, :2], "y_pred": Y + 1}
        | {"alpha_rec": 1.0, "alpha_lin": 1.0, "alpha_pred": 1.0}
    ),
    koopman.energy_loss: lambda: {"x": X, "jac": JACOBIAN, "grad_weight": 0.1, "form": "energy"},
    koopman.orthonormal_fro_reg: lambda: {"x": X, "key": KEY},
    koopman.orthonormal_logfro_reg: lambda: {"x": X},
    koopman.nystroem_map: lambda: {"kernel": KERNEL, "centres": X[:4], "rtol": 1e-6},
    koopman.choose_centres: lambda: {
        "x": X,
        "num_centres": 4,
        "key": KEY,
        "method": "leverage",
        "kernel": KERNEL,
        "alpha": 0.1,
    },
    koopman.fit: (
        lambda: FIT | {"estimator": koopman.ReducedRank(2, 0.1, solver="dense")} | OPTIONS,
        lambda: FIT | {"estimator": koopman.PrincipalComponents(2, 0.1), "kernel": kernel, "center": False},
        lambda: FIT | {"estimator": koopman.Ridge(0.1), "kernel": KERNEL, "centres": X[:4], "route": "qr"},
    ),
    koopman.lagged_pairs: lambda: {
        "trajectories": np.stack([PATH, PATH]),
        "lag": 1,
        "max_lag": 2,
        "trajectory_axis": 0,
    },
    koopman.delay_embed: lambda: {
        "trajectory": np.stack([PATH, PATH]),
        "num_delays": 3,
        "stride": 2,
        "trajectory_axis": 0,
    },
    koopman.moments: lambda: PAIRS | {"observable": OBSERVABLE, "center": True},
    koopman.merge_moments: lambda: {"first": koopman.moments(X, Y), "second": koopman.moments(Y, X)},
    koopman.scan_moments: lambda: {
        "x": X.reshape(3, 4, 3),
        "y": Y.reshape(3, 4, 3),
        "observable": OBSERVABLE.reshape(3, 4, 2),
        "center": True,
    },
    koopman.eigenvalues: lambda: {"operator": operator()},
    koopman.decompose: lambda: {"operator": operator()},
    koopman.right_eigenfunctions: lambda: {"operator": operator(), "x": X, "spectrum": decomposed()},
    koopman.left_eigenfunctions: lambda: {"operator": operator(), "x": X, "spectrum": decomposed()},
    koopman.modes: lambda: {
        "operator": operator(),
        "time_step": 0.1,
        "spectrum": decomposed(),
    },
    koopman.singular_values: lambda: {"operator": operator()},
}

_SEVERAL = "lists within lists of rows are several trajectories, which have no `trajectory_axis`"

MAY_PASS = {
    koopman.lagged_pairs: {("trajectories", "a list"): _SEVERAL},
    koopman.delay_embed: {("trajectory", "a list"): _SEVERAL},
    koopman.validation_loss: {("trajectories", "a list"): _SEVERAL},
    koopman.train_encoders: {("trajectories", "a list"): _SEVERAL, ("validation", "a list"): _SEVERAL},
    koopman.train_autoencoders: {("trajectories", "a list"): _SEVERAL, ("validation", "a list"): _SEVERAL},
}
